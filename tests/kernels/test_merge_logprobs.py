"""The k largest logprobs of ranks and those of given ids, merged: those of the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_flashsample.kernels.gather_logprobs import gather_logprobs
from sgl_flashsample.kernels.logit_summary import LOWEST_LOGPROB, LogitRows, RowSummary
from sgl_flashsample.kernels.merge_logprobs import MAX_RANKS, fields_of, merge_logprobs, pack_logprobs
from sgl_flashsample.kernels.params import BatchParams, LogitsSpec
from sgl_flashsample.kernels.reference import gather_logprobs_ref, top_logprobs_ref
from sgl_flashsample.kernels.top_logprobs import TopLogprobs, top_logprobs

INF = float("inf")


def parts_of(logits: torch.Tensor, num_ranks: int, k: int, temperature=None, counts=None, ids=None) -> torch.Tensor:
    """The parts of ranks with equal shares of the ids in whole groups. A rank without ids has none."""
    num_rows, vocab = logits.shape
    width = -(-vocab // num_ranks // 16) * 16
    row = torch.arange(num_rows, device=logits.device)
    params = None if temperature is None else BatchParams(temperature, row, row)
    parts = []
    for start in range(0, num_ranks * width, width):
        size = min(width, vocab - start)
        if size > 0:
            spec = LogitsSpec(size, vocab_start=start, shards=max(2, num_ranks), total_ids=vocab)
            rows = LogitRows(logits[:, start : start + size].contiguous(), spec, params)
            log_mass, token = torch.empty(num_rows, 2, device=logits.device), row[:, None].contiguous()
            gather_logprobs(rows, token, own_mass=log_mass)
            known = RowSummary(log_mass=log_mass)
            top = top_logprobs(rows, k, counts=counts, summary=known) if k else None
            found = None if ids is None else gather_logprobs(rows, ids)
            parts.append(pack_logprobs(top, found, log_mass))
        else:
            top = TopLogprobs.empty(0, k, logits.device) if k else None
            found = None if ids is None else torch.empty(0, ids.shape[1], device=logits.device)
            parts.append(pack_logprobs(top, found, torch.empty(0, 2, device=logits.device), num_rows=num_rows))
    return torch.stack(parts)


def merge_top(parts: torch.Tensor, k: int, counts: torch.Tensor | None = None) -> TopLogprobs:
    top, of_ids, log_mass = merge_logprobs(parts, k, counts=counts)
    assert top is not None and top.log_mass is log_mass and of_ids is None
    return top


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
        assert_whole(merge_top(parts_of(logits, num_ranks, k, temperature), k), logits, temperature)


def test_log_masses_whose_rounding_error_is_too_large_for_exp_are_merged(device):
    """As of a bias of 1e10: neighbours among float32 are hundreds apart there. The second rank has 1 / (1 + e)."""
    low = (248.34375, -900.0), (247.34375, -901.0)
    found = (-0.5, LOWEST_LOGPROB), (LOWEST_LOGPROB, -0.25)
    parts = []
    for lows, logprobs in zip(low, found, strict=True):
        log_mass = torch.tensor([[5.794555904e9, lows[0]], [2e10, lows[1]]], device=device)
        parts.append(pack_logprobs(None, torch.tensor([logprobs] * 2, device=device), log_mass))
    _, of_ids, log_mass = merge_logprobs(torch.stack(parts), 0)
    first, second = -math.log1p(math.exp(-1.0)), -math.log1p(math.e)
    want = torch.tensor([[first - 0.5, second - 0.25]] * 2, device=device)
    torch.testing.assert_close(of_ids, want, rtol=0, atol=1e-3)
    masses = torch.tensor([5.794555904e9 + 248.34375 - first, 2e10 - 900.0 - first], dtype=torch.float64, device=device)
    torch.testing.assert_close(log_mass.double().sum(1), masses, rtol=0, atol=1e-3)


def test_of_equal_logits_the_smaller_ids_come_first(device):
    logits = torch.zeros(2, 320, device=device)
    logits[1, 100:] = -0.0
    merged = merge_top(parts_of(logits, 4, 128), 128)
    assert merged.token_ids.tolist() == [list(range(128))] * 2


def test_a_rank_without_an_allowed_id_has_forbidden_ones_and_a_row_without_one_has_no_logprobs(device):
    logits = torch.full((3, 96), -INF, device=device)
    logits[0, 50], logits[1, 90] = 2.0, -3.0
    merged = merge_top(parts_of(logits, 3, 5), 5)
    assert merged.token_ids.tolist() == [[50, 0, 1, 2, 3], [90, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert merged.logprobs[:2].tolist() == [[0.0] + [LOWEST_LOGPROB] * 4] * 2
    assert merged.logprobs[2].isnan().all()
    assert merged.log_mass.double().sum(1).tolist() == [2.0, -3.0, -INF]


def test_each_row_has_as_many_ids_as_its_count(device):
    logits = torch.randn(4, 320, generator=torch.Generator().manual_seed(1)).to(device)
    counts = torch.tensor([0, 3, 9, -1], dtype=torch.int32, device=device)
    merged = merge_top(parts_of(logits, 4, 5, counts=counts), 5, counts)
    ids, logprobs = top_logprobs_ref(logits, 5)
    for row, count in enumerate((0, 3, 5, 0)):
        assert merged.token_ids[row].tolist() == [*ids[row, :count].tolist(), *[-1] * (5 - count)]
        torch.testing.assert_close(merged.logprobs[row, :count].double(), logprobs[row, :count], rtol=0, atol=2e-5)
        assert set(merged.logprobs[row, count:].tolist()) <= {LOWEST_LOGPROB}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_logprobs_of_given_ids_are_those_of_the_whole_vocabulary_beside_top_logprobs_and_without(device, num_ranks):
    """With ids that no rank holds, more than a program merges at a time, and rows of all temperatures."""
    logits = (3 * torch.randn(5, 301, generator=torch.Generator().manual_seed(2))).to(device)
    logits[3], logits[4, 16:] = -INF, -INF
    ids = torch.randint(301, (5, 70), generator=torch.Generator().manual_seed(3)).to(device)
    ids[:, 5], ids[:, 69] = -1, 17
    temperature = torch.tensor([0.7, 0.0, 1e-3, 1.0, 2.0], device=device)
    want = gather_logprobs_ref(logits, ids, temperature)
    for k in (0, 5):
        parts = parts_of(logits, num_ranks, k, temperature, ids=ids)
        top, of_ids, log_mass = merge_logprobs(parts, k)
        torch.testing.assert_close(of_ids.double(), want, rtol=1e-6, atol=2e-5, equal_nan=True)
        assert not (of_ids > 0).any()
        if top is not None:
            assert top.log_mass is log_mass
            assert_whole(top, logits, temperature)
    assert (of_ids[4, ids[4] >= 16] == LOWEST_LOGPROB).all() and (of_ids[3, ids[3] >= 0]).isnan().all()


def test_a_token_has_one_logprob_among_the_likeliest_and_among_given_ids(device):
    logits = (3 * torch.randn(4, 96, generator=torch.Generator().manual_seed(4))).to(device)
    ids = logits.topk(9).indices
    top, of_ids, _ = merge_logprobs(parts_of(logits, 3, 9, ids=ids), 9)
    assert torch.equal(top.token_ids, ids) and torch.equal(top.logprobs, of_ids)


@pytest.mark.parametrize("k, num_ids", [(5, 0), (0, 3), (5, 3)])
def test_each_row_may_be_known_to_one_rank_alone(device, k, num_ids):
    """Its logprobs are those of that rank."""
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(5)).to(device)
    ids = torch.arange(num_ids, device=device)[None].repeat(5, 1) if num_ids else None
    (whole,) = parts_of(logits, 1, k, ids=ids)
    parts = []
    for first, last in ((0, 2), (2, 5), (5, 5)):
        rows = whole[first:last].contiguous()
        values = rows[:, 2 : 2 + 3 * k].view(len(rows), 3, k).unbind(1)
        top = TopLogprobs(values[0].long(), *(one.contiguous() for one in values[1:]), None) if k else None
        found = rows[:, 2 + 3 * k :].contiguous() if num_ids else None
        parts.append(pack_logprobs(top, found, rows[:, :2].contiguous(), first, 5))
    for one, other in zip(merge_logprobs(torch.stack(parts), k), merge_logprobs(whole[None], k), strict=True):
        if isinstance(one, TopLogprobs):
            assert torch.equal(one.token_ids, other.token_ids)
            one, other = one.logprobs, other.logprobs
        assert one is other is None or torch.allclose(one, other, rtol=0, atol=1e-6)


def test_parts_may_lie_row_by_row(device):
    logits = torch.randn(3, 96, generator=torch.Generator().manual_seed(6)).to(device)
    parts = parts_of(logits, 3, 5)
    by_row = parts.transpose(0, 1).contiguous().transpose(0, 1)
    for one, other in zip(merge_top(parts, 5), merge_top(by_row, 5), strict=True):
        assert torch.equal(one, other)


def test_no_rows_are_merged(device):
    parts = parts_of(torch.zeros(0, 40, device=device), 2, 5)
    assert parts.shape == (2, 0, fields_of(5, 0))
    assert [tuple(tensor.shape) for tensor in merge_top(parts, 5)] == [(0, 5), (0, 5), (0, 5), (0, 2)]


PARTS = torch.zeros(2, 3, fields_of(5, 4))


@pytest.mark.parametrize(
    "parts, message",
    [
        (PARTS[0], r"parts is \(3, 21\); expected \[N, B, 17 or more\] of at most 64 parts"),
        (PARTS[:1].expand(MAX_RANKS + 1, -1, -1), r"parts is \(65, 3, 21\)"),
        (PARTS[..., :16], r"parts is \(2, 3, 16\)"),
        (PARTS.double(), "parts is torch.float64"),
        (PARTS[..., ::2].repeat(1, 1, 3)[..., ::2], r"parts is torch.float32 with strides .*; expected"),
    ],
)
def test_wrong_parts_are_named(parts, message):
    with pytest.raises(ValueError, match=message):
        merge_logprobs(parts, 5)


def test_wrong_counts_and_numbers_are_named():
    with pytest.raises(ValueError, match=r"counts is \(2,\) .*; expected contiguous \(3,\) torch.int32"):
        merge_logprobs(PARTS, 5, counts=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="k is 129; expected an integer from 1 to 128"):
        merge_logprobs(PARTS, 129)
    with pytest.raises(ValueError, match=r"lists is \(47,\) .*; expected contiguous \(48,\) torch.int32"):
        merge_logprobs(PARTS, 5, lists=torch.zeros(47, dtype=torch.int32))


TOP, OF_IDS, MASS = TopLogprobs.empty(3, 5, torch.device("cpu")), torch.zeros(3, 4), torch.zeros(3, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((TOP, OF_IDS, MASS[:, 0]), r"log_mass is \(3,\) .*; expected contiguous \(3, 2\) torch.float32"),
        ((TOP._replace(token_ids=TOP.token_ids.int()), None, MASS), r"token_ids is \(3, 5\) torch.int32"),
        ((TOP._replace(logprobs=TOP.logprobs[:2]), None, MASS), r"logprobs is \(2, 5\)"),
        ((TOP._replace(logits=TOP.logits.double()), None, MASS), r"logits is \(3, 5\) torch.float64"),
        ((None, OF_IDS[:2], MASS), r"of_ids is \(2, 4\)"),
        ((None, OF_IDS, MASS, 1, 3), "first is 1 for 3 rows of 3; expected 0 to 0"),
        ((None, OF_IDS, MASS, -1), "first is -1 for 3 rows of 3"),
        ((TOP, OF_IDS, MASS, 0, 3, PARTS[0, :, 1:]), r"out is \(3, 20\) torch.float32; expected \(3, 21\)"),
    ],
)
def test_what_cannot_be_packed_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack_logprobs(*arguments)
