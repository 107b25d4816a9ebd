"""Records of ranks: merged as the reference merges them, in any order of merging, and unchanged by an exchange that
adds them up. That ranks draw the token of the whole vocabulary is in ``test_contract.py``."""

from __future__ import annotations

import pytest
import torch

from sgl_flashsample.kernels.merge_ranks import NO_RECORD, merge_records, no_record, pack_record
from sgl_flashsample.kernels.params import SampleOutput
from sgl_flashsample.kernels.reference import merge_records_ref

MASKED = float("-inf")


def make_records(device, num_ranks: int, num_rows: int) -> torch.Tensor:
    """Of ranks that hold 2**24 ids together, with ties of scores."""
    generator = torch.Generator().manual_seed(num_ranks * 1000 + num_rows)
    score = torch.randn(num_ranks, num_rows, generator=generator).mul(3).round()
    width = 2**24 // num_ranks
    token = torch.arange(num_ranks)[:, None] * width + torch.randint(width, (num_ranks, num_rows), generator=generator)
    logprob = -5 * torch.rand(num_ranks, num_rows, generator=generator)
    log_mass = 20 * torch.randn(num_ranks, num_rows, generator=generator)
    return torch.stack([score, token.float(), logprob, log_mass], -1).to(device)


def as_record(output: SampleOutput) -> torch.Tensor:
    return torch.stack([output.scores, output.token_ids.float(), output.logprobs, output.log_mass], -1)


@pytest.mark.parametrize("num_rows", [1, 3, 17, 65, 129])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 16])
def test_the_merge_equals_the_reference(device, num_ranks, num_rows):
    records = make_records(device, num_ranks, num_rows)
    merged = merge_records(records, return_logprob=True)
    token, logprob, log_mass = merge_records_ref(records)
    assert torch.equal(merged.token_ids, token) and torch.equal(merged.scores, records[..., 0].amax(0))
    torch.testing.assert_close(merged.logprobs.double(), logprob, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(merged.log_mass.double(), log_mass, rtol=1e-6, atol=1e-5)
    without = merge_records(records, return_logprob=False)
    assert torch.equal(without.token_ids, token) and without.logprobs is without.log_mass is None


def test_of_equal_scores_the_lowest_rank_wins_and_with_it_the_lowest_ids(device):
    records = torch.zeros(4, 3, 4, device=device)
    records[..., 1] = torch.arange(4, device=device)[:, None] * 16
    records[0, :, 0] = torch.tensor([1.0, 0.0, MASKED])
    records[1:, :, 0] = torch.tensor([1.0, 2.0, MASKED])
    assert merge_records(records, return_logprob=False).token_ids.tolist() == [0, 16, 0]


def test_a_merge_of_merges_is_the_merge_of_all(device):
    records = make_records(device, 8, 33)
    whole = as_record(merge_records(records, return_logprob=True))
    for cut in range(1, 8):
        halves = [as_record(merge_records(part, return_logprob=True)) for part in (records[:cut], records[cut:])]
        merged = as_record(merge_records(torch.stack(halves), return_logprob=True))
        assert torch.equal(merged[:, :2], whole[:, :2])
        torch.testing.assert_close(merged, whole, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_rank_without_ids_changes_nothing(device, place):
    records = make_records(device, 2, 17)
    nothing = pack_record(no_record(17, device, True))
    assert nothing[0, 0].tolist() == list(NO_RECORD)
    more = torch.cat([records[:place], nothing, records[place:]])
    for one, other in zip(*(merge_records(each, return_logprob=True) for each in (records, more)), strict=True):
        assert torch.equal(one, other)


def test_a_small_logprob_beside_a_large_mass_is_not_lost(device):
    """As at a temperature of 1e-3."""
    records = torch.tensor([[[1.0, 0.0, -0.001, 30_000.0]], [[0.0, 16.0, -2.0, 20_000.0]]], device=device)
    assert merge_records(records, return_logprob=True).logprobs.item() == pytest.approx(-0.001, rel=1e-5)


def test_a_row_that_no_rank_allows_an_id_has_no_mass_and_the_first_id(device):
    records = torch.tensor([[[MASKED, 0.0, 0.0, MASKED]], [[MASKED, 16.0, 0.0, MASKED]]], device=device)
    merged = merge_records(records, return_logprob=True)
    assert merged.token_ids.tolist() == [0]
    assert merged.scores.tolist() == merged.log_mass.tolist() == [MASKED]


@pytest.mark.parametrize("num_rows", [1, 65])
@pytest.mark.parametrize("return_logprob", [True, False])
def test_records_of_all_ranks_added_up_are_the_records(device, return_logprob, num_rows):
    """Also those of a rank without ids, of masked rows, and of the largest id."""
    records = make_records(device, 3, num_rows)
    records[1, 0] = torch.tensor(NO_RECORD)
    records[2, 0, 1] = 2**24 - 1
    added = torch.zeros_like(records)
    for rank, (score, token, logprob, log_mass) in enumerate(record.unbind(-1) for record in records):
        logprobs = (logprob.contiguous(), log_mass.contiguous()) if return_logprob else (None, None)
        drawn = SampleOutput(token.long(), logprobs[0], score.contiguous(), logprobs[1])
        added += pack_record(drawn, rank, 3, records=torch.full_like(records, float("nan")))
    fields = slice(None) if return_logprob else slice(2)
    assert torch.equal(added[..., fields], records[..., fields])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rank": 2, "num_ranks": 2}, "rank is 2 of 2; expected 0 to 1"),
        ({"num_ranks": 0}, "rank is 0 of 0; expected"),
        ({"num_ranks": 4096}, "rank is 0 of 4096; expected 0 to 4095, of at most 1024"),
        ({"records": torch.zeros(1, 3, 3)}, r"records is \(1, 3, 3\) torch.float32 .*; expected \(1, 3, 4\)"),
        ({"records": torch.zeros(1, 3, 4).half()}, "records is .* torch.float16 .*; expected .* torch.float32"),
        ({"records": torch.zeros(1, 3, 8)[..., ::2]}, "records has strides .*; expected it contiguous"),
    ],
)
def test_a_record_that_cannot_be_packed_is_refused_by_name(device, change, message):
    if "records" in change:
        records = change["records"]
        change = {"records": torch.empty_strided(records.shape, records.stride(), dtype=records.dtype, device=device)}
    with pytest.raises(ValueError, match=message):
        pack_record(no_record(3, device, True), **change)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5), (0, 3, 4)])
def test_records_that_cannot_be_merged_are_refused_by_name(device, shape):
    with pytest.raises(ValueError, match=r"records is \(.*; expected "):
        merge_records(torch.zeros(shape, device=device), return_logprob=True)
