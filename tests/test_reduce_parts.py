"""The reduction over parts against its reference: scores, ties, groups cut by the end of the vocabulary."""

from __future__ import annotations

import pytest
import torch
from sgl_flashsample.kernels.head import Workspace
from sgl_flashsample.kernels.reduce_parts import reduce_parts
from sgl_flashsample.kernels.reference import reduce_parts_ref
from sgl_flashsample.kernels.rng import GROUP_SIZE


def problem(device, parts, rows, ties=False, vocab_size=16_000, vocab_start=0):
    generator = torch.Generator().manual_seed(parts * 100 + rows)
    workspace = Workspace(parts * rows + 7, device)
    score = torch.randn(parts, rows, generator=generator)
    if ties:
        score = score.round()
    first = vocab_start // GROUP_SIZE
    last = (vocab_start + vocab_size - 1) // GROUP_SIZE
    group = torch.stack(
        [first + torch.randperm(last - first + 1, generator=generator)[:parts] for _ in range(rows)], 1
    ).int()
    logits = torch.randn(parts, rows, GROUP_SIZE, generator=generator)
    for target, values in ((workspace.score, score), (workspace.group, group), (workspace.logits, logits)):
        flat = values.reshape(parts * rows, *values.shape[2:])
        target[: parts * rows] = flat.to(device)
    row = torch.arange(rows)
    params = ((row % 3 * 0.7).float(), row * 31 - 4, row + 2)
    return workspace, [t.to(device) for t in (score, group, logits)], [t.to(device) for t in params]


@pytest.mark.parametrize("parts, rows", [(1, 1), (2, 3), (5, 17), (132, 65), (100, 1)])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_the_best_part_and_its_token_equal_the_reference(device, parts, rows, ties):
    workspace, (score, group, logits), params = problem(device, parts, rows, ties)
    token, best, _ = reduce_parts(
        workspace, parts, *params, 16_000, 0, return_logprob=False, most_parts=132, rows_per_program=32
    )
    assert torch.equal(best, score.amax(0))
    assert torch.equal(token, reduce_parts_ref(score, group, logits, *params, vocab_size=16_000))


def test_ids_past_the_end_of_the_vocabulary_are_not_drawn(device):
    workspace, (score, group, logits), params = problem(device, 3, 64, vocab_size=41, vocab_start=160)
    token, _, _ = reduce_parts(workspace, 3, *params, 41, 160, return_logprob=False, most_parts=4, rows_per_program=64)
    assert torch.equal(token, reduce_parts_ref(score, group, logits, *params, vocab_size=41, vocab_start=160))
    assert ((token >= 160) & (token < 201)).all()
    assert (group == 12).any(), "the last group, of nine ids, takes part"


def test_the_logprob_combines_the_masses_of_all_parts(device):
    workspace, (_, _, logits), params = problem(device, 4, 2)
    peaks, masses = torch.tensor([[1.0, -2.0, float("-inf"), 3.0]] * 2).T, torch.tensor([[2.0, 9.0, 0.0, 1.5]] * 2).T
    workspace.lse[:8] = torch.stack([peaks, masses], -1).reshape(8, 2).to(device)
    temperature = torch.ones(2, device=device)
    token, _, logprob = reduce_parts(
        workspace, 4, temperature, *params[1:], 16_000, 0, return_logprob=True, most_parts=4, rows_per_program=2
    )
    total = torch.log((masses[:, 0] * torch.exp(peaks[:, 0])).sum())
    part = workspace.score[:8].view(4, 2).argmax(0)
    own = logits[part, torch.arange(2, device=device)].gather(1, (token % GROUP_SIZE)[:, None]).squeeze(1)
    torch.testing.assert_close(logprob, own - total.to(device), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", [0, 7, 99])
def test_a_number_of_parts_that_does_not_fit_raises(device, parts):
    workspace, _, params = problem(device, 4, 3)
    with pytest.raises(ValueError, match=f"num_parts is {parts}; expected 1 to 8"):
        reduce_parts(workspace, parts, *params, 16_000, 0, return_logprob=False, most_parts=8, rows_per_program=1)
