"""The reduction over splits against its reference: scores, ties, and a partial last group."""

from __future__ import annotations

import pytest
import torch

from sgl_flashsample.kernels.params import BatchParams, LogitsSpec
from sgl_flashsample.kernels.reduce_splits import reduce_splits
from sgl_flashsample.kernels.reference import reduce_splits_ref
from sgl_flashsample.kernels.rng import GROUP_SIZE
from sgl_flashsample.kernels.workspace import Workspace


def make_splits(device, num_splits, num_rows, spec: LogitsSpec, ties=False):
    """A workspace as the splits write it; the scores, groups and logits of the splits; and the rows' parameters."""
    generator = torch.Generator().manual_seed(num_splits * 100 + num_rows)
    workspace = Workspace(num_splits * num_rows + 7, device)
    score = torch.randn(num_splits, num_rows, generator=generator)
    score = score.round() if ties else score
    first, last = spec.vocab_start // GROUP_SIZE, (spec.vocab_end - 1) // GROUP_SIZE
    each = [first + torch.randperm(last - first + 1, generator=generator)[:num_splits] for _ in range(num_rows)]
    group = torch.stack(each, 1).int()
    logits = torch.randn(num_splits, num_rows, GROUP_SIZE, generator=generator)
    for name, values in (("score", score), ("group", group), ("logits", logits)):
        getattr(workspace.splits, name)[: num_splits * num_rows] = values.flatten(0, 1).to(device)
    row = torch.arange(num_rows, device=device)
    return (
        workspace,
        tuple(values.to(device) for values in (score, group, logits)),
        BatchParams((row % 3 * 0.7).float(), row * 31 - 4, row + 2),
    )


def reduced_ref(top_groups, params: BatchParams, spec: LogitsSpec) -> torch.Tensor:
    values = (params.temperature, params.seed, params.position)
    return reduce_splits_ref(*top_groups, *values, vocab_size=spec.vocab_size, vocab_start=spec.vocab_start)


@pytest.mark.parametrize("num_splits, num_rows", [(1, 1), (2, 3), (5, 17), (132, 65), (100, 1)])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_the_best_split_and_its_token_equal_the_reference(device, num_splits, num_rows, ties):
    spec = LogitsSpec(16_000)
    workspace, top_groups, params = make_splits(device, num_splits, num_rows, spec, ties)
    drawn = reduce_splits(
        workspace, num_splits, params, spec, return_logprob=False, max_splits=132, rows_per_program=32
    )
    assert torch.equal(drawn.scores, top_groups[0].amax(0))
    assert torch.equal(drawn.token_ids, reduced_ref(top_groups, params, spec))


def test_ids_past_the_end_of_the_vocabulary_are_not_drawn(device):
    spec = LogitsSpec(41, vocab_start=160, shards=2)
    workspace, top_groups, params = make_splits(device, 3, 64, spec)
    drawn = reduce_splits(workspace, 3, params, spec, return_logprob=False, max_splits=4, rows_per_program=64)
    assert torch.equal(drawn.token_ids, reduced_ref(top_groups, params, spec))
    assert ((drawn.token_ids >= 160) & (drawn.token_ids < 201)).all()
    assert (top_groups[1] == 12).any(), "the last group, of nine ids, takes part"


def test_the_logprob_combines_the_masses_of_all_splits(device):
    spec = LogitsSpec(16_000)
    workspace, (_, _, logits), params = make_splits(device, 4, 2, spec)
    params.temperature.fill_(1.0)
    peaks, masses = torch.tensor([[1.0, -2.0, float("-inf"), 3.0]] * 2).T, torch.tensor([[2.0, 9.0, 0.0, 1.5]] * 2).T
    workspace.splits.mass[:8] = torch.stack([peaks, masses], -1).reshape(8, 2).to(device)
    drawn = reduce_splits(workspace, 4, params, spec, return_logprob=True, max_splits=4, rows_per_program=2)
    total = torch.log((masses[:, 0] * torch.exp(peaks[:, 0])).sum())
    split = workspace.splits.score[:8].view(4, 2).argmax(0)
    logit = logits[split, torch.arange(2, device=device)].gather(1, (drawn.token_ids % GROUP_SIZE)[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, logit - total.to(device), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [0, 7, 99])
def test_a_number_of_splits_that_does_not_fit_raises(device, num_splits):
    spec = LogitsSpec(16_000)
    workspace, _, params = make_splits(device, 4, 3, spec)
    with pytest.raises(ValueError, match=f"num_splits is {num_splits}; expected 1 to 8"):
        reduce_splits(workspace, num_splits, params, spec, return_logprob=False, max_splits=8, rows_per_program=1)
