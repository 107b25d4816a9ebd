"""The k largest logprobs of ranks, merged: those of the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from sgl_flashsample.kernels.logit_summary import LOWEST_LOGPROB, LogitRows
from sgl_flashsample.kernels.merge_top_logprobs import MAX_RANKS, merge_top_logprobs
from sgl_flashsample.kernels.params import BatchParams, LogitsSpec
from sgl_flashsample.kernels.reference import top_logprobs_ref
from sgl_flashsample.kernels.top_logprobs import TopLogprobs, top_logprobs

INF = float("inf")


def parts_of(logits: torch.Tensor, num_ranks: int, k: int, temperature=None, counts=None) -> TopLogprobs:
    """``top_logprobs`` of ranks with equal shares of the ids in whole groups, stacked. A rank without ids has none."""
    num_rows, vocab = logits.shape
    width = -(-vocab // num_ranks // 16) * 16
    row = torch.arange(num_rows, device=logits.device)
    params = None if temperature is None else BatchParams(temperature, row, row)
    tops = []
    for start in range(0, num_ranks * width, width):
        size = min(width, vocab - start)
        if size > 0:
            spec = LogitsSpec(size, vocab_start=start, shards=max(2, num_ranks), total_ids=vocab)
            rows = LogitRows(logits[:, start : start + size].contiguous(), spec, params)
            tops.append(top_logprobs(rows, k, counts=counts))
        else:
            none = torch.full((num_rows, k), LOWEST_LOGPROB, device=logits.device)
            no_mass = torch.tensor([-INF, 0.0], device=logits.device).repeat(num_rows, 1)
            tops.append(TopLogprobs(torch.full_like(none, -1).long(), none, none - INF, no_mass))
    return TopLogprobs(*(torch.stack(one) for one in zip(*tops, strict=True)))


def assert_whole(merged: TopLogprobs, logits: torch.Tensor, temperature: torch.Tensor | None = None) -> None:
    k = merged.token_ids.shape[1]
    known = min(k, logits.shape[1])
    ids, logprobs = top_logprobs_ref(logits, known, temperature)
    assert torch.equal(merged.token_ids[:, :known], ids)
    torch.testing.assert_close(merged.logprobs[:, :known].double(), logprobs, rtol=1e-6, atol=2e-5, equal_nan=True)
    assert not (merged.logprobs > 0).any()
    assert set(merged.token_ids[:, known:].flatten().tolist()) <= {-1}
    tempered = logits.double()
    if temperature is not None:
        tempered = tempered / torch.where(temperature <= 0, 1.0, temperature.double())[:, None]
    want = torch.logsumexp(tempered, 1)
    torch.testing.assert_close(merged.log_mass.double().sum(1), want, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("k", [1, 5, 20, 128])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ids_and_logprobs_are_those_of_the_whole_vocabulary(device, num_ranks, k):
    """With ties between ranks, and with ranks that have fewer ids than k, or none."""
    generator = torch.Generator().manual_seed(k)
    for num_rows, vocab in ((5, 999), (3, 40)):
        logits = (3 * torch.randn(num_rows, vocab, generator=generator)).round().to(device)
        temperature = torch.tensor([0.7, 0.0, 1.0, 2.0, 1e-3], device=device)[:num_rows]
        assert_whole(merge_top_logprobs(parts_of(logits, num_ranks, k, temperature)), logits, temperature)


def test_of_equal_logits_the_smaller_ids_come_first(device):
    logits = torch.zeros(2, 320, device=device)
    logits[1, 100:] = -0.0
    merged = merge_top_logprobs(parts_of(logits, 4, 128))
    assert merged.token_ids.tolist() == [list(range(128))] * 2


def test_a_rank_without_an_allowed_id_has_forbidden_ones_and_a_row_without_one_has_no_logprobs(device):
    logits = torch.full((3, 96), -INF, device=device)
    logits[0, 50], logits[1, 90] = 2.0, -3.0
    merged = merge_top_logprobs(parts_of(logits, 3, 5))
    assert merged.token_ids.tolist() == [[50, 0, 1, 2, 3], [90, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert merged.logprobs[:2].tolist() == [[0.0] + [LOWEST_LOGPROB] * 4] * 2
    assert merged.logprobs[2].isnan().all()
    assert merged.log_mass.double().sum(1).tolist() == [2.0, -3.0, -INF]


def test_each_row_has_as_many_ids_as_its_count(device):
    logits = torch.randn(4, 320, generator=torch.Generator().manual_seed(1)).to(device)
    counts = torch.tensor([0, 3, 9, -1], dtype=torch.int32, device=device)
    merged = merge_top_logprobs(parts_of(logits, 4, 5, counts=counts), counts=counts)
    ids, logprobs = top_logprobs_ref(logits, 5)
    for row, count in enumerate((0, 3, 5, 0)):
        assert merged.token_ids[row].tolist() == [*ids[row, :count].tolist(), *[-1] * (5 - count)]
        torch.testing.assert_close(merged.logprobs[row, :count].double(), logprobs[row, :count], rtol=0, atol=2e-5)
        assert set(merged.logprobs[row, count:].tolist()) <= {LOWEST_LOGPROB}


def test_no_rows_are_merged(device):
    merged = merge_top_logprobs(parts_of(torch.zeros(0, 40, device=device), 2, 5))
    assert [tuple(tensor.shape) for tensor in merged] == [(0, 5), (0, 5), (0, 5), (0, 2)]


PARTS = TopLogprobs(torch.zeros(2, 3, 5).long(), torch.zeros(2, 3, 5), torch.zeros(2, 3, 5), torch.zeros(2, 3, 2))


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"token_ids": PARTS.token_ids[0]}, r"token_ids is \(3, 5\); expected \[N, B, k\] of at most 64 parts"),
        ({"token_ids": torch.zeros(MAX_RANKS + 1, 3, 5).long()}, r"token_ids is \(65, 3, 5\)"),
        ({"token_ids": torch.zeros(2, 3, 129).long()}, "k is 129; expected an integer from 1 to 128"),
        ({"token_ids": PARTS.token_ids.int()}, r"token_ids is \(2, 3, 5\) torch.int32 .*; expected .* torch.int64"),
        ({"logprobs": PARTS.logprobs[:1]}, r"logprobs is \(1, 3, 5\) .*; expected contiguous \(2, 3, 5\)"),
        ({"logits": PARTS.logits.double()}, r"logits is \(2, 3, 5\) torch.float64"),
        ({"log_mass": None}, r"log_mass is None; expected \(2, 3, 2\) torch.float32"),
        ({"log_mass": PARTS.logits}, r"log_mass is \(2, 3, 5\) .*; expected contiguous \(2, 3, 2\)"),
    ],
)
def test_wrong_parts_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        merge_top_logprobs(PARTS._replace(**changed))


def test_wrong_counts_are_named():
    with pytest.raises(ValueError, match=r"counts is \(2,\) .*; expected contiguous \(3,\) torch.int32"):
        merge_top_logprobs(PARTS, counts=torch.zeros(2, dtype=torch.int32))
