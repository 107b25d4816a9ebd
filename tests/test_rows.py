"""Per-row parameters: reasons, seeds, and their way through a batch's filters and merges."""

from __future__ import annotations

import types

import pytest
import torch
from sgl_flashsample.kernels.features import Edit

from sgl_flashsample.sglang.rows import Rows, native_reason, request_seed

DEFAULTS = {
    "temperature": 1.0,
    "top_k": 1 << 30,
    "top_p": 1.0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "logit_bias": None,
    "sampling_seed": None,
    "n": 1,
}


def request(rid: str = "r", processor: str | None = None, mask: bool = False, **params) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        rid=rid,
        sampling_params=types.SimpleNamespace(**(DEFAULTS | params)),
        custom_logit_processor=processor,
        return_sampling_mask=mask,
    )


def rows(*requests) -> Rows:
    return Rows.of_requests(requests, 1, True, "cpu")


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({}, None),
        ({"temperature": 0.2}, None),
        ({"top_k": 1}, None),
        ({"top_k": 1, "top_p": 0.5, "min_p": 0.1}, None),
        ({"top_k": 2}, None),
        ({"top_p": 0.99}, None),
        ({"min_p": 0.01}, None),
        ({"frequency_penalty": 0.1}, None),
        ({"min_new_tokens": 1}, None),
        ({"logit_bias": {}}, None),
        ({"processor": "x"}, "custom_logit_processor"),
        ({"mask": True}, "sampling_mask"),
        ({"beam_width": 2}, "beam_search"),
        ({"beam_width": None}, None),
    ],
)
def test_each_feature_that_is_not_fused_has_its_reason(fields, reason):
    assert native_reason(request(**fields), custom_processors=True) == reason


def test_a_custom_processor_counts_only_where_the_server_runs_them():
    assert native_reason(request(processor="x"), custom_processors=False) is None


def test_greedy_rows_have_temperature_zero_whatever_sglang_sets_for_them():
    batch = rows(request(top_k=1, temperature=1.0), request(temperature=0.7))
    assert batch.temperature.tolist() == pytest.approx([0.0, 0.7])
    assert batch.greedy == (True, False)


def test_filters_and_merges_keep_every_row_with_its_parameters():
    a = rows(request("a", temperature=0.1), request("b", mask=True, top_p=0.5), request("c", top_k=1))
    b = rows(request("d", temperature=0.4))
    kept = a.keep([2, 0], torch.tensor([2, 0]))
    merged = kept.followed_by(b)
    assert merged.temperature.tolist() == pytest.approx([0.0, 0.1, 0.4])
    assert merged.seed.tolist() == [a.seed[2].item(), a.seed[0].item(), b.seed[0].item()]
    assert merged.reasons == (None, None, None)
    assert merged.needs == ((False, True, False), (False, False, False), (False, False, False))
    assert len(merged) == 3
    assert a.reasons == (None, "sampling_mask", None), "the rows of a forward under way do not change"


def test_the_reason_leaves_with_its_row():
    batch = rows(request("a"), request("b", mask=True), request("c", beam_width=2))
    assert batch.reasons == (None, "sampling_mask", "beam_search")
    assert batch.keep([0, 2], torch.tensor([0, 2])).reasons == (None, "beam_search")
    assert batch.keep([0], torch.tensor([0])).reasons == (None,)
    assert batch.keep([], torch.tensor([], dtype=torch.int64)).reasons == ()


def test_a_tempered_greedy_row_needs_stock_logprobs_only_beside_sampled_rows():
    greedy = request(top_k=1, temperature=0.5)
    assert rows(greedy, greedy).logprob_reasons == (None, None)
    assert rows(greedy, request()).logprob_reasons == ("greedy_logprob_at_temperature", None)
    assert rows(request(top_k=1), request()).logprob_reasons == (None, None)


def test_each_row_knows_what_sglangs_sampler_would_need_for_it_alone():
    batch = rows(request(), request(top_p=0.9), request(top_k=5), request(top_k=1), request(min_p=0.1))
    assert batch.needs == (
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, True, False),
        (False, False, True),
    )


@pytest.mark.parametrize(
    "fields, edits",
    [
        ({}, Edit(0)),
        ({"frequency_penalty": 0.1}, Edit.ADDITIVE),
        ({"presence_penalty": -0.1}, Edit.ADDITIVE),
        ({"min_new_tokens": 1}, Edit.ADDITIVE),
        ({"repetition_penalty": 1.1}, Edit.SCALING),
        ({"logit_bias": {}}, Edit.BIAS),
        ({"logit_bias": {"1": 2.0}, "repetition_penalty": 0.9, "presence_penalty": 1.0}, Edit(11)),
    ],
)
def test_each_row_knows_what_sglang_changes_in_its_logits(fields, edits):
    assert rows(request(**fields)).edits == (edits,)


def test_limits_of_probability_follow_their_rows_and_end_with_the_last_row_that_has_one():
    batch = rows(request("a"), request("b", top_p=0.5, top_k=7), request("c", min_p=0.25))
    kept = batch.keep([2, 1], torch.tensor([2, 1])).followed_by(rows(request("d", top_k=1)))
    assert kept.truncation.top_k.tolist() == [1 << 30, 7, 1]
    assert kept.truncation.top_p.tolist() == [1.0, 0.5, 1.0]
    assert kept.truncation.min_p.tolist() == [0.25, 0.0, 0.0]
    assert kept.keep([2], torch.tensor([2])).truncation is None, "a greedy row has no limits"
    assert rows(request("a")).truncation is None


def params(**fields):
    return types.SimpleNamespace(**(DEFAULTS | fields))


def test_a_request_keeps_its_own_seed():
    for seed in (0, 7, -1, 2**63 - 1, -(2**63)):
        assert request_seed(1, "r", params(sampling_seed=seed)) == seed


@pytest.mark.parametrize("seed", [2**63, 2**70, -(2**63) - 1])
def test_an_oversized_seed_still_fits_a_device_tensor(seed):
    torch.tensor([request_seed(1, "r", params(sampling_seed=seed))], dtype=torch.int64)


def test_requests_without_a_seed_get_their_own_from_server_seed_and_id():
    assert request_seed(1, "a", params()) == request_seed(1, "a", params())
    seeds = {request_seed(server, rid, params()) for server in (1, 2) for rid in ("a", "b", "c")}
    assert len(seeds) == 6
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_the_samples_of_one_seeded_request_do_not_share_noise():
    assert request_seed(1, "a", params(sampling_seed=5, n=2)) != request_seed(1, "b", params(sampling_seed=5, n=2))
