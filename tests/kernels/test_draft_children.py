"""The next best ids of a draw are those with the next best scores, one group per split of the vocabulary."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from kernel_cases import make_params

from sgl_flashsample import LMHead
from sgl_flashsample.kernels.config import GROUP_SIZE, ReadConfig, TileConfig
from sgl_flashsample.kernels.draft_children import MAX_CHILDREN, Splits, best_ids
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample, workspace_slots
from sgl_flashsample.kernels.params import BatchParams, LogitsSpec
from sgl_flashsample.kernels.reference import best_ids_ref, token_scores_ref
from sgl_flashsample.kernels.sample_logits import num_read_splits, sample_logits
from sgl_flashsample.kernels.sample_own_ids import OwnIds, sample_own_ids
from sgl_flashsample.kernels.workspace import Workspace

ROWS, NUMBERS = 9, (2, 3, MAX_CHILDREN)
READERS = [ReadConfig(1, 64, 1, min_splits=7), ReadConfig(4, 64, 4, min_splits=5, reduce_rows=4, one_launch=True)]


def batch(spec: LogitsSpec, device: torch.device) -> BatchParams:
    return dataclasses.replace(make_params(ROWS, spec, device), truncation=None)  # two rows are greedy


def logits_of(width: int, device: torch.device) -> torch.Tensor:
    """Scores of different groups that lie close together."""
    return 2 * torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width)).to(device)


def seen_by(logits: torch.Tensor, params: BatchParams, splits: int, block_v: int) -> torch.Tensor:
    """``logits``, with minus infinity but in the best group of each split: what the definition leaves of each row."""
    width, greedy = logits.shape[1], (params.temperature == 0)[:, None]
    temperature = torch.where(params.temperature > 0, params.temperature, 1.0)
    sampled = token_scores_ref(logits.double(), temperature, params.seed, params.position)
    of_id = torch.where(greedy, logits.double(), sampled)
    padded = torch.nn.functional.pad(of_id, (0, -width % GROUP_SIZE), value=-math.inf)
    of_group = padded.view(ROWS, -1, GROUP_SIZE).amax(-1)
    group = torch.arange(of_group.shape[1], device=logits.device)
    split = group // (block_v // GROUP_SIZE) % splits
    best = torch.stack([torch.where(split == one, of_group, -math.inf).argmax(-1) for one in range(splits)], 1)
    keeps = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best, True)
    return torch.where(keeps.repeat_interleave(GROUP_SIZE, 1)[:, :width], logits, -math.inf)


def assert_best(children, logits: torch.Tensor, params: BatchParams, number: int) -> None:
    ids, scores = best_ids_ref(logits.double(), params.temperature, params.seed, params.position, number)
    assert torch.equal(children.token_ids, ids)
    torch.testing.assert_close(children.scores.double(), scores, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("config", READERS, ids=["two launches", "one launch"])
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("width", [1000, 1003])
def test_they_are_the_best_of_the_groups_that_the_splits_have_left(device, width, number, config):
    spec, logits = LogitsSpec(width), logits_of(width, device)
    params, splits = batch(spec, device), num_read_splits(width, ROWS, config, device)
    workspace = Workspace(splits * ROWS, device)
    drawn = sample_logits(logits, spec, params, config, workspace=workspace)
    children = best_ids(workspace, Splits(splits, splits), params, spec, number)
    assert_best(children, seen_by(logits, params, splits, config.block_v), params, number)
    assert torch.equal(children.token_ids[:, 0], drawn.token_ids)
    assert (children.token_ids[:, 1:] != children.token_ids[:, :1]).all()


@pytest.mark.parametrize("number", [2, 4])
def test_the_next_best_ids_of_hidden_states_are_those_of_their_logits(device, number):
    weight = torch.randint(-8, 8, (1003, 64), generator=torch.Generator().manual_seed(1)).float().to(device)
    hidden = torch.randint(-8, 8, (ROWS, 64), generator=torch.Generator().manual_seed(2)).float().to(device) / 16
    head, tile = LMHead(weight), TileConfig(16, 64, 64, 4, 2)
    params, workspace = batch(head.spec, device), Workspace(workspace_slots(head, ROWS, tile), device)
    lm_head_sample(hidden, head, params, tile, workspace=workspace)
    splits = Splits.of_head(head, ROWS, tile)
    children = best_ids(workspace, splits, params, head.spec, number)
    assert_best(children, seen_by(hidden @ weight.T, params, splits.number, tile.block_v), params, number)


@pytest.mark.parametrize("config", READERS, ids=["two launches", "one launch"])
def test_of_some_ids_they_are_among_these(device, config):
    own = OwnIds(torch.arange(2, 1000, 3, device=device), 1000)
    spec, logits = LogitsSpec(1000), logits_of(own.size, device)
    params, splits = batch(spec, device), Splits.of_own_ids(own, ROWS, config)
    workspace = Workspace(splits.number * ROWS, device)
    drawn = sample_own_ids(logits, own, spec, params, config, workspace=workspace)
    children = best_ids(workspace, splits, params, spec, 4)
    assert torch.equal(children.token_ids[:, 0], drawn.token_ids) and (children.token_ids % 3 == 2).all()
    wide = torch.full((ROWS, 1000), -math.inf, device=device)
    wide[:, own.token_ids] = logits
    assert_best(children, seen_by(wide, params, splits.number, config.block_v), params, 4)


def test_a_row_with_fewer_ids_has_the_drawn_one_again(device):
    spec, logits = LogitsSpec(1000), torch.full((ROWS, 1000), -math.inf, device=device)
    logits[:, [7, 700]] = 1.0  # of different splits
    params, config = batch(spec, device), READERS[0]
    workspace = Workspace(Splits(8, 8).number * 16 * ROWS, device)
    sample_logits(logits, spec, params, config, workspace=workspace)
    children = best_ids(workspace, Splits(num_read_splits(1000, ROWS, config, device), 64), params, spec, 4)
    assert (children.token_ids[:, :2].sort().values == torch.tensor([7, 700], device=device)).all()
    assert (children.token_ids[:, 2:] == children.token_ids[:, :1]).all()
    assert (children.scores[:, 2:] == -math.inf).all()


@pytest.mark.parametrize("number", [1, MAX_CHILDREN + 1])
def test_another_number_is_refused(device, number):
    spec = LogitsSpec(1000)
    with pytest.raises(ValueError, match=f"number is {number}; expected 2 to {MAX_CHILDREN}"):
        best_ids(Workspace(ROWS, device), Splits(1, 1), batch(spec, device), spec, number)


def test_splits_that_the_workspace_cannot_hold_are_refused(device):
    spec = LogitsSpec(1000)
    with pytest.raises(
        ValueError, match="splits has 2; expected 1 to 4, and 9 rows of them in the workspace's 9 slots"
    ):
        best_ids(Workspace(ROWS, device), Splits(2, 4), batch(spec, device), spec, 2)


def test_a_batch_with_a_truncation_is_refused(device):
    spec = LogitsSpec(1000)
    with pytest.raises(ValueError, match="params has a truncation or edits; expected neither"):
        best_ids(Workspace(ROWS, device), Splits(1, 1), make_params(ROWS, spec, device, "truncate"), spec, 2)
