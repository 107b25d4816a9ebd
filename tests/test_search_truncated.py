"""The search that answers what one pass over a truncated row cannot: alone, on logits that it is given."""

from __future__ import annotations

import pytest
import torch
from problems import CUDA, limit_all, limits, reference, rows, take
from sgl_flashsample.kernels.head import Kept
from sgl_flashsample.kernels.reference import allowed_ref, arrivals_ref
from sgl_flashsample.kernels.search_truncated import search_truncated
from sgl_flashsample.kernels.tiles import DEFAULT_DRAW, DrawConfig

FEW = DrawConfig(chunks=1, num_warps=4, block=1024, search_warps=4, window=1, gather=1)
MANY = DrawConfig(chunks=2, num_warps=4, block=1024, search_warps=4, window=8, gather=64)


def search(logits, params, truncation, config=MANY, dtype=torch.float32, marked=None):
    """Token, score, logprob and rounds of every row, or of the marked ones."""
    num_rows, vocab = logits.shape
    kept = Kept(num_rows, vocab, dtype, logits.device)
    kept.logits.fill_(float("-inf"))
    kept.logits[:, :vocab] = logits
    kept.peak.copy_(kept.logits.float().view(num_rows, -1, 16).amax(-1))
    marked = torch.ones(num_rows, dtype=torch.bool, device=logits.device) if marked is None else marked
    kept.rounds.copy_(torch.where(marked, -1, 1))
    token = torch.full((num_rows,), -7, device=logits.device)
    score, logprob = torch.full_like(params["temperature"], -7), torch.full_like(params["temperature"], -7)
    search_truncated(kept, **params, truncation=truncation, vocab_size=vocab, vocab_start=0, token=token,
                     score=score, logprob=logprob, config=config)  # fmt: skip
    assert kept.searched.item() == marked.sum()
    assert not kept.arrived.any()
    return token, score, logprob, kept.rounds


def problem(num_rows, vocab, device, spread=2.5, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab, generator=g) * spread).to(dtype).float().to(device)
    return logits, rows(num_rows, device, seed, greedy_every=num_rows + 1) | {
        "temperature": torch.linspace(0.4, 1.6, num_rows, device=device)
    }


def assert_equal_to_reference(found, logits, params, truncation, max_near_ties=0.1):
    token, score, logprob, _ = found
    want = reference(logits, params, truncation)
    sure = ~want.near_tie
    assert torch.equal(token[sure], want.token[sure])
    assert want.near_tie.double().mean().item() <= max_near_ties
    assert ((logprob - want.logprob_low).abs() <= 1e-4)[sure].all()
    arrival = arrivals_ref(logits.double(), **params).gather(1, token[:, None]).squeeze(1)
    torch.testing.assert_close(score.double(), arrival, rtol=1e-5, atol=1e-5)


RAGGED = [(2, 1), (7, 127), (14, 129), (14, 5003)] + ([(65, 50257), (65, 151937)] if CUDA else [])


@pytest.mark.parametrize("num_rows, vocab", RAGGED)
@pytest.mark.parametrize("config", [FEW, MANY, DEFAULT_DRAW], ids=["few at a time", "many at a time", "shipped"])
def test_every_combination_of_limits_equals_the_reference(device, num_rows, vocab, config):
    if config is DEFAULT_DRAW and not CUDA:
        num_rows = min(num_rows, 7)
    logits, params = problem(num_rows, vocab, device)
    some = [i for i in range(2 * num_rows) if i % 8][:num_rows]  # no row without a limit
    truncation = take(limits(2 * num_rows, vocab, device), torch.tensor(some, device=device))
    if vocab == 1:
        truncation = limit_all(num_rows, device, top_p=0.5)
    found = search(logits, params, truncation, config)
    assert_equal_to_reference(found, logits, params, truncation, 0.15)


def test_logits_that_are_kept_in_two_bytes_have_many_ties(device):
    logits, params = problem(14, 2000, device, dtype=torch.bfloat16)
    truncation = take(limits(28, 2000, device), torch.tensor([i for i in range(28) if i % 8][:14], device=device))
    found = search(logits, params, truncation, dtype=torch.bfloat16)
    assert_equal_to_reference(found, logits, params, truncation, 0.15)


@pytest.mark.parametrize("config", [FEW, MANY], ids=["few at a time", "many at a time"])
@pytest.mark.parametrize(
    "limit",
    [{"top_k": 1}, {"top_k": 30}, {"top_p": 0.0}, {"top_p": 0.3}, {"min_p": 0.7}, {"top_k": 40, "top_p": 0.2}],
    ids=str,
)
def test_a_flat_row_takes_as_many_rounds_as_it_needs(device, limit, config):
    logits, params = problem(5, 3000, device, spread=0.7, seed=3)
    params["temperature"].fill_(1.0)
    truncation = limit_all(5, device, **limit)
    found = search(logits, params, truncation, config)
    assert_equal_to_reference(found, logits, params, truncation, 0.2)
    if "min_p" in limit:
        assert found[3].tolist() == [2] * 5, "min-p is known without a question"
    else:
        assert (found[3] > 1).all()


def test_top_p_of_what_top_k_has_left_is_measured_exactly(device):
    """With min-p on. The mass of the top k, ties included, by bisection: limits around the mass of each token."""
    logits, params = problem(1, 300, device, seed=5)
    logits = (logits * 2).round() / 2
    value, _ = logits[0].double().sort(descending=True)
    left = torch.where(value >= value[19], torch.exp(value - value[0]), 0.0)
    share = left.cumsum(0) / left.sum()
    limit = torch.cat([share[2:14:3] - 1e-3, share[2:14:3] + 1e-3]).float().clamp(max=0.999).repeat(2)
    rows_ = len(limit)
    params = {name: v.expand(rows_).clone() for name, v in params.items()} | {
        "temperature": torch.ones(rows_, device=device),
        "position": torch.arange(rows_, device=device),
    }
    truncation = limit_all(rows_, device, top_k=20, min_p=1e-6)
    truncation.top_p.copy_(limit)
    logits = logits.expand(rows_, 300)
    assert_equal_to_reference(search(logits, params, truncation), logits, params, truncation, 0.1)


@pytest.mark.parametrize("limit", [{"top_k": 3}, {"top_k": 4}, {"top_p": 0.74}, {"min_p": 0.13}], ids=str)
def test_equal_logits_at_a_threshold_stay_or_go_together(device, limit):
    num_rows = 48
    values = torch.tensor([0.0, 7.0, 5.0, -1.0, 5.0, 6.0, 5.0, 7.0, 5.0, 4.0, -1.0, 5.0, 0.0], device=device)
    logits, params = values.expand(num_rows, 13), rows(num_rows, device, greedy_every=99)
    params["temperature"] = torch.ones(num_rows, device=device)
    truncation = limit_all(num_rows, device, **limit)
    found = search(logits, params, truncation)
    assert_equal_to_reference(found, logits, params, truncation, 0.01)
    allowed = allowed_ref(
        logits[:1].double(),
        params["temperature"][:1],
        truncation.top_k[:1],
        truncation.top_p[:1],
        truncation.min_p[:1],
    )
    assert set(found[0].tolist()) == set(allowed[0].nonzero()[:, 0].tolist())


def test_rows_that_are_answered_stay_as_they_are(device):
    logits, params = problem(6, 300, device)
    marked = torch.tensor([True, False, False, True, False, True], device=device)
    truncation = limit_all(6, device, top_k=3)
    token, score, logprob, rounds = search(logits, params, truncation, marked=marked)
    want = reference(logits, params, truncation)
    assert torch.equal(token[marked], want.token[marked])
    assert (token[~marked] == -7).all()
    assert (score[~marked] == -7).all()
    assert (logprob[~marked] == -7).all()
    assert (rounds[~marked] == 1).all()


def test_masked_logits_are_never_found_and_a_row_of_nothing_ends(device):
    logits, params = problem(4, 700, device)
    logits[:, 5:690] = float("-inf")
    logits[2] = float("-inf")
    for limit in ({"top_k": 100}, {"top_p": 0.9999}, {"min_p": 1e-9}, {"top_k": 3, "top_p": 0.9, "min_p": 0.01}):
        token, *_ = search(logits, params, limit_all(4, device, **limit))
        assert token[2].item() == 0
        assert ((token < 5) | (token >= 690)).all()
        keep = torch.tensor([0, 1, 3], device=device)
        some = {name: value[keep] for name, value in params.items()}
        want = reference(logits[keep], some, limit_all(3, device, **limit))
        assert torch.equal(token[keep][~want.near_tie], want.token[~want.near_tie])
