"""Draws from logits of some ids are those from rows as wide as the vocabulary, with minus infinity at the others."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from kernel_cases import CUDA, make_params

from sgl_flashsample.kernels import sample_own_ids as module
from sgl_flashsample.kernels.config import ReadConfig
from sgl_flashsample.kernels.params import BatchParams, LogitsSpec
from sgl_flashsample.kernels.sample_logits import sample_logits
from sgl_flashsample.kernels.sample_own_ids import OwnIds, sample_own_ids

CONFIGS = [ReadConfig(1, 512, 1, ctas_per_sm=8), ReadConfig(4, 64, 4, ctas_per_sm=2, reduce_rows=4, one_launch=True)]
IDS = {
    "every id": range(1000),
    "one id": [777],
    "the first and the last": [0, 999],
    "one of each group": range(5, 1000, 16),
    "a whole group and one beside it": [*range(32, 48), 49],
    "every third": range(0, 1000, 3),
}


def batch(num_rows: int, device: torch.device, vocab: int = 1000, **options) -> tuple[LogitsSpec, BatchParams]:
    spec = LogitsSpec(vocab, **options)
    params = make_params(num_rows, spec, device)
    temperature = torch.linspace(0.0, 2.0, num_rows, device=device)  # one is greedy
    return spec, dataclasses.replace(params, temperature=temperature, truncation=None)


def widened(logits: torch.Tensor, own: OwnIds) -> torch.Tensor:
    wide = torch.full((len(logits), own.vocab_size), -math.inf, dtype=logits.dtype, device=logits.device)
    wide[:, own.token_ids[: own.size]] = logits[:, : own.size]
    return wide


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_token_and_its_score_are_those_of_a_row_with_minus_infinity_elsewhere(device, dtype, ids, config):
    own = OwnIds(torch.tensor(ids, device=device), 1000)
    spec, params = batch(9, device)
    logits = (3 * torch.randn(9, own.size + 7, generator=torch.Generator().manual_seed(own.size))).to(device, dtype)
    drawn = sample_own_ids(logits, own, spec, params, config)
    want = sample_logits(widened(logits, own), spec, params, config)
    assert torch.equal(drawn.token_ids, want.token_ids) and torch.equal(drawn.scores, want.scores)


@pytest.mark.parametrize("options", [{"logit_scale": -2.0}, {"softcap": 3.0}, {"logits_dtype": torch.float16}], ids=str)
def test_logits_are_transformed_before_ids_that_are_not_there_are_left_out(device, options):
    own = OwnIds(torch.arange(3, 1000, 7, device=device), 1000)
    spec, params = batch(9, device, **options)
    logits = 3 * torch.randn(9, own.size, generator=torch.Generator().manual_seed(1)).to(device)
    drawn = sample_own_ids(logits, own, spec, params, CONFIGS[0])
    plain = dataclasses.replace(spec, logit_scale=None, softcap=None)
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    wide = widened(logits * (spec.logit_scale or 1.0), own)
    assert torch.equal(drawn.token_ids, sample_logits(wide, plain, params, CONFIGS[0]).token_ids)


def test_another_set_of_ids_is_drawn_from_where_the_first_one_was(device):
    own = OwnIds(torch.arange(0, 1000, 3, device=device), 1000, most=500)
    spec, params = batch(9, device)
    before = [one.data_ptr() for one in own.operands[:4]]
    logits = torch.randn(9, 500, generator=torch.Generator().manual_seed(2)).to(device)
    own.replace(torch.arange(400, 900, device=device))
    assert [one.data_ptr() for one in own.operands[:4]] == before
    drawn = sample_own_ids(logits, own, spec, params, CONFIGS[0])
    assert torch.equal(drawn.token_ids, sample_logits(widened(logits, own), spec, params, CONFIGS[0]).token_ids)
    own.replace(torch.tensor([5], device=device))
    assert sample_own_ids(logits, own, spec, params, CONFIGS[0]).token_ids.tolist() == [5] * 9


@pytest.mark.parametrize("one_launch", [False, True])
def test_a_row_without_a_number_draws_the_first_id_of_the_first_group(device, one_launch):
    """Also with more splits than there are groups for."""
    own = OwnIds(torch.arange(100, 164, device=device), 1000)
    spec, params = batch(2, device)
    logits = torch.full((2, 64), math.nan, device=device)
    config = ReadConfig(1, 64, 1, min_splits=8, one_launch=one_launch)
    assert sample_own_ids(logits, own, spec, params, config).token_ids.tolist() == [96, 96]


def test_columns_may_be_in_any_order(device):
    """FR-Spec's lists begin with the most frequent id."""
    own = OwnIds(torch.arange(1, 1000, 3, device=device).flip(0), 1000, in_order=False)
    spec, params = batch(9, device)
    logits = torch.randn(9, own.size, generator=torch.Generator().manual_seed(3)).to(device)
    drawn = sample_own_ids(logits, own, spec, params, CONFIGS[1])
    assert torch.equal(drawn.token_ids, sample_logits(widened(logits, own), spec, params, CONFIGS[1]).token_ids)
    with pytest.raises(ValueError, match="token_ids are not different ids from 0 to 999"):
        own.replace(torch.tensor([5, 4, 5], device=device))


def test_launches_that_triton_compiles_apart_are_told_apart(device, monkeypatch):
    """A known binary is launched again without a look at its arguments."""
    seen = []
    monkeypatch.setattr(module, "launch", lambda *arguments: seen.append(arguments[5]))
    ordered = OwnIds(torch.arange(40, device=device), 1000)
    unordered = OwnIds(torch.arange(40, device=device).flip(0), 1000, in_order=False)
    one = OwnIds(torch.tensor([5], device=device), 1000)
    for own, rows, width in ((ordered, 2, 40), (unordered, 2, 40), (one, 2, 1), (ordered, 1, 40), (ordered, 3, 40)):
        logits = torch.zeros(rows, width, device=device)
        sample_own_ids(logits, own, *batch(rows, device), CONFIGS[1])
    assert len(set(seen[:4])) == 4 and seen[4] == seen[0]


@pytest.mark.parametrize(
    "ids, message",
    [
        ([], "token_ids has 0 ids; expected 1 to 4"),
        ([1, 2, 3, 4, 5], "token_ids has 5 ids; expected 1 to 4"),
        ([1, 1], "token_ids are not ascending ids from 0 to 99"),
        ([3, 2], "token_ids are not ascending ids from 0 to 99"),
        ([-1, 2], "token_ids are not ascending ids from 0 to 99"),
        ([1, 100], "token_ids are not ascending ids from 0 to 99"),
    ],
)
def test_ids_that_are_no_ascending_ids_of_the_vocabulary_are_refused(device, ids, message):
    own = OwnIds(torch.tensor([7], device=device), 100, most=4)
    with pytest.raises(ValueError, match=message):
        own.replace(torch.tensor(ids, dtype=torch.int64, device=device))


def test_logits_and_features_that_do_not_fit_are_refused(device):
    own = OwnIds(torch.arange(50, device=device), 1000)
    spec, params = batch(2, device)
    logits = torch.zeros(2, 50, device=device)
    for wrong, message in (
        ((logits[:, :49], own, spec, params), r"logits is \(2, 49\) torch.float32; expected \[B, 50 or more\]"),
        ((logits.double(), own, spec, params), r"logits is \(2, 50\) torch.float64"),
        ((logits.T.contiguous().T, own, spec, params), "logits has strides"),
        ((logits, own, LogitsSpec(900), params), "spec has ids 0 to 899; expected 0 to 999"),
        ((logits, own, spec, make_params(2, spec, device, "truncate")), "params has a truncation or edits"),
    ):
        with pytest.raises(ValueError, match=message):
            sample_own_ids(*wrong, CONFIGS[0])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_graph_draws_from_the_set_that_is_there_when_it_is_replayed(device):
    own = OwnIds(torch.arange(0, 1000, 3, device=device), 1000, most=500)
    spec, params = batch(9, device)
    logits = torch.randn(9, 500, device=device)
    sample_own_ids(logits, own, spec, params, CONFIGS[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sample_own_ids(logits, own, spec, params, CONFIGS[1])
    own.replace(torch.arange(400, 900, device=device))
    graph.replay()
    assert torch.equal(drawn.token_ids, sample_logits(widened(logits, own), spec, params, CONFIGS[1]).token_ids)
