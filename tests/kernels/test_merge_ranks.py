"""Records of ranks: merged as the reference merges them, in any order of merging. That ranks draw the token of the
whole vocabulary is in ``test_contract.py``."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_flashsample.kernels.merge_ranks import NO_RECORD, NUM_FIELDS, merge_records, no_record, pack_record
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
    log_mass = 20 * torch.randn(num_ranks, num_rows, 2, generator=generator)
    return torch.cat([torch.stack([score, token.float(), logprob], -1), log_mass], -1).to(device)


def as_output(records: torch.Tensor, return_logprob: bool = True) -> SampleOutput:
    """The draw of one rank whose ``[B, NUM_FIELDS]`` records these are."""
    score, token, logprob = (values.contiguous() for values in records[:, :3].unbind(-1))
    output = SampleOutput(token.long(), logprob, score, records[:, 3:].contiguous())
    return output if return_logprob else output._replace(logprobs=None, log_mass=None)


def as_record(output: SampleOutput) -> torch.Tensor:
    of_token = torch.stack([output.scores, output.token_ids.float(), output.logprobs], -1)
    return torch.cat([of_token, output.log_mass], -1)


@pytest.mark.parametrize("num_rows", [1, 3, 17, 65, 129])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 16])
def test_the_merge_equals_the_reference(device, num_ranks, num_rows):
    records = make_records(device, num_ranks, num_rows)
    merged = merge_records(records, return_logprob=True)
    token, logprob, log_mass = merge_records_ref(records)
    assert torch.equal(merged.token_ids, token) and torch.equal(merged.scores, records[..., 0].amax(0))
    torch.testing.assert_close(merged.logprobs.double(), logprob, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(merged.log_mass.double().sum(-1), log_mass, rtol=1e-6, atol=1e-5)
    without = merge_records(records, return_logprob=False)
    assert torch.equal(without.token_ids, token) and without.logprobs is without.log_mass is None


def test_log_masses_whose_rounding_error_is_too_large_for_exp_are_merged(device):
    """As of a bias of 1e10: neighbours among float32 are hundreds apart there."""
    first = [[5.8e9, 1.0, 0.0, 5.794555904e9, 248.34375], [2e10, 1.0, -1.5, 2e10, -900.0]]
    second = [[-4e9, 16.0, 0.0, -3.86e9, 72.0], [2e10 - 4096, 17.0, -0.5, 2e10, -901.0]]
    records = torch.tensor([first, second], device=device)
    merged = merge_records(records, return_logprob=True)
    token, logprob, log_mass = merge_records_ref(records)
    assert torch.equal(merged.token_ids, token)
    torch.testing.assert_close(merged.logprobs.double(), logprob, rtol=0, atol=1e-3)
    torch.testing.assert_close(merged.log_mass.double().sum(-1), log_mass, rtol=0, atol=1e-3)


def test_of_equal_scores_the_lowest_rank_wins_and_with_it_the_lowest_ids(device):
    records = torch.zeros(4, 3, NUM_FIELDS, device=device)
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
    records = [[[1.0, 0.0, -0.001, 30_000.0, 0.0]], [[0.0, 16.0, -2.0, 20_000.0, 0.0]]]
    records = torch.tensor(records, device=device)
    assert merge_records(records, return_logprob=True).logprobs.item() == pytest.approx(-0.001, rel=1e-5)


def test_beside_large_masses_the_second_part_of_each_decides(device):
    """As at a temperature of 1e-3, where neighbours among float32 log-masses are 0.004 apart."""
    records = [[[1.0, 0.0, -1.0, 40_000.0, 0.0015]], [[0.0, 16.0, -2.0, 40_000.0, -0.0015]]]
    merged = merge_records(torch.tensor(records, device=device), return_logprob=True)
    total = math.log(math.exp(0.0015) + math.exp(-0.0015))
    assert merged.logprobs.item() == pytest.approx(-1.0 + 0.0015 - total, abs=1e-6)
    assert merged.log_mass.double().sum().item() == pytest.approx(40_000.0 + total, abs=1e-6)


def test_a_logprob_is_never_above_0(device):
    """The mass of the whole is rounded, and may be below that of its only part."""
    records = torch.zeros(2, 500, NUM_FIELDS, device=device)
    records[0, :, 4] = torch.linspace(0.01, 3.0, 500, device=device)
    records[1] = torch.tensor(NO_RECORD, device=device)
    logprobs = merge_records(records, return_logprob=True).logprobs
    assert logprobs.max() <= 0 and logprobs.min() > -1e-6


def test_a_row_that_no_rank_allows_an_id_has_no_mass_and_the_first_id(device):
    records = [[[MASKED, 0.0, 0.0, MASKED, 0.0]], [[MASKED, 16.0, 0.0, MASKED, 0.0]]]
    merged = merge_records(torch.tensor(records, device=device), return_logprob=True)
    assert merged.token_ids.tolist() == [0]
    assert merged.scores.tolist() == [MASKED] and merged.log_mass.tolist() == [[MASKED, 0.0]]


@pytest.mark.parametrize("first, num_rows", [(0, 65), (1, 130), (65, 130), (2, 67)])
@pytest.mark.parametrize("return_logprob", [True, False])
def test_a_record_holds_the_drawn_rows_in_their_places_and_nothing_elsewhere(device, return_logprob, first, num_rows):
    """Also of masked rows, and of the largest id."""
    records = make_records(device, 1, 65)[0]
    records[3, 0], records[4, 1] = MASKED, 2**24 - 1
    want = torch.tensor(NO_RECORD, device=device).repeat(1, num_rows, 1)
    given = NUM_FIELDS if return_logprob else 2
    want[0, first : first + 65, :given] = records[:, :given]
    assert torch.equal(pack_record(as_output(records, return_logprob), first, num_rows), want)


@pytest.mark.parametrize("first, num_rows", [(-1, 5), (3, 5), (0, 2)])
def test_rows_that_do_not_fit_are_refused_by_name(device, first, num_rows):
    with pytest.raises(ValueError, match=f"first is {first} for 3 rows of {num_rows}; expected 0 to {num_rows - 3}"):
        pack_record(no_record(3, device, True), first, num_rows)


@pytest.mark.parametrize(
    "records",
    [torch.zeros(2, 3, NUM_FIELDS).half(), torch.zeros(2, 3, 2 * NUM_FIELDS)[..., ::2]],
    ids=["dtype", "layout"],
)
def test_records_of_another_dtype_or_layout_are_refused_by_name(records):
    with pytest.raises(ValueError, match=r"records is torch.float(16|32) with strides .*; expected torch.float32, con"):
        merge_records(records, return_logprob=True)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (0, 3, 5)])
def test_records_that_cannot_be_merged_are_refused_by_name(device, shape):
    with pytest.raises(ValueError, match=r"records is \(.*; expected "):
        merge_records(torch.zeros(shape, device=device), return_logprob=True)
