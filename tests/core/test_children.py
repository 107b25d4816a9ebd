"""``Head.draw_children``: the drawn token and the next best ids, from hidden states and from the logits of some ids."""

from __future__ import annotations

import pytest
import torch

from sgl_flashsample import BatchParams, Head, LMHead
from sgl_flashsample.kernels.reference import best_ids_ref
from sgl_flashsample.kernels.sample_own_ids import OwnIds

ROWS, VOCAB = 12, 4000
EXACT = 8  # denominators of numbers whose products have no rounding


@pytest.fixture
def weight(device) -> torch.Tensor:
    return torch.randint(-EXACT, EXACT, (VOCAB, 64), generator=torch.Generator().manual_seed(1)).float().to(device)


@pytest.fixture
def hidden(device) -> torch.Tensor:
    return torch.randint(-EXACT, EXACT, (ROWS, 64), generator=torch.Generator().manual_seed(2)).float().to(device) / 32


@pytest.fixture
def params(device) -> BatchParams:
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.0], device=device).repeat(ROWS // 4)
    return BatchParams(temperature, torch.arange(ROWS, device=device), torch.arange(ROWS, device=device) + 9)


def assert_children(children, drawn, logits, params) -> None:
    """The drawn id, and others in the order of their scores."""
    ids, scores = best_ids_ref(logits.double(), params.temperature, params.seed, params.position, VOCAB)
    of_id = torch.empty_like(scores).scatter_(1, ids, scores)
    torch.testing.assert_close(children.scores.double(), of_id.gather(1, children.token_ids), rtol=1e-5, atol=1e-4)
    assert torch.equal(children.token_ids[:, 0], drawn)
    assert (children.scores.diff() <= 0).all(), "descending"
    assert (children.token_ids.sort().values.diff() > 0).all(), "no id twice"


@pytest.mark.parametrize("max_rows", [0, ROWS])
@pytest.mark.parametrize("number", [2, 4])
def test_children_of_hidden_states_begin_with_the_drawn_token(weight, hidden, params, number, max_rows):
    head = Head(LMHead(weight), max_rows=max_rows)
    children = head.draw_children(hidden, params, number)
    assert_children(children, head.draw(hidden, params).token_ids, hidden @ weight.T, params)


def test_children_among_some_ids_begin_with_the_drawn_one(weight, hidden, params, device):
    own = OwnIds(torch.arange(1, VOCAB, 3, device=device), VOCAB)
    logits = hidden @ weight[own.token_ids].T
    head = Head(LMHead(weight[own.token_ids]))
    children = head.draw_children_of_own_ids(logits, own, params, 3)
    wide = torch.full((ROWS, VOCAB), -60.0, device=device)  # of no weight, and each id has a score
    wide[:, own.token_ids] = logits
    assert_children(children, head.draw_from_own_ids(logits, own, params).token_ids, wide, params)


def test_a_softcap_and_a_scale_come_before_the_scores(weight, hidden, params):
    head = Head(LMHead(weight, softcap=3.0, logit_scale=-0.5))
    logits = 3.0 * torch.tanh(-0.5 * (hidden @ weight.T).double() / 3.0)
    children = head.draw_children(hidden, params, 3)
    assert_children(children, head.draw(hidden, params).token_ids, logits, params)


def test_an_empty_batch_has_no_children(weight, hidden, params):
    children = Head(LMHead(weight)).draw_children(hidden[:0], params.rows(0, 0), 2)
    assert children.token_ids.shape == children.scores.shape == (0, 2)


def test_a_batch_invariant_head_is_refused(weight, hidden, params):
    with pytest.raises(ValueError, match="the head is batch-invariant"):
        Head(LMHead(weight, batch_invariant=True)).draw_children(hidden, params, 2)
