"""The draw of rows with top-k, top-p or min-p against its float64 reference, whichever branch answers a row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from problems import (
    CUDA,
    DTYPES,
    TILE,
    WIDE,
    draw,
    integer_problem,
    is_cut,
    limit_all,
    limits,
    random_problem,
    reference,
    rows,
    take,
    ties_apart,
)
from sgl_flashsample.kernels.draw_truncated import draw_truncated
from sgl_flashsample.kernels.features import Truncation
from sgl_flashsample.kernels.head import LMHead, Workspace
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample, num_parts
from sgl_flashsample.kernels.part import left_of
from sgl_flashsample.kernels.reference import allowed_ref, arrivals_ref, gumbel_ref, logits_ref
from sgl_flashsample.kernels.rng import Stream, Unit
from sgl_flashsample.kernels.tiles import DEFAULT_DRAW, DrawConfig, TileConfig
from stats import g_test, power

from sgl_flashsample.tuned import draw_for

# One part for the whole vocabulary: few tokens are sure to come next, so many rows are left to the search.
ONE_PART = TileConfig(16, 128, 64, 4, 3) if CUDA else TileConfig(64, 2048, 64, 4, 1, tma=False, reduce_rows=64)


def assert_equal_to_reference(drawn, logits, params, truncation, max_near_ties: float, vocab: int | None = None):
    """Token, score and logprob of every row; ``logits [B, V]`` are the exact ones."""
    want = reference(logits, params, truncation)
    sure = ~want.near_tie
    assert torch.equal(drawn.token[sure], want.token[sure])
    assert want.near_tie.double().mean().item() <= max_near_ties
    same = drawn.token == want.token
    assert ((drawn.logprob - want.logprob_low).abs() <= 1e-4)[same].all()
    cut = is_cut(params, truncation, logits.shape[1])
    assert torch.equal(drawn.rounds > 0, cut), "only rows with a truncation are drawn by it"
    if (same & cut).any():
        tempered = params | {"temperature": torch.where(cut, params["temperature"], 1.0)}
        arrival = arrivals_ref(logits.double(), **tempered).gather(1, want.token[:, None]).squeeze(1)
        torch.testing.assert_close(drawn.score.double()[same & cut], arrival[same & cut], rtol=1e-5, atol=1e-5)


RAGGED = [(17, 1), (1, 127), (3, 129), (65, 129), (1, 5003), (17, 5003)]
if CUDA:
    RAGGED += [(65, 5003), (3, 50257), (65, 50257), (17, 151936), (65, 151937)]


def sampled_rows(num_rows, device, seed=0):
    """``rows`` with a sampled one first."""
    return {name: value.roll(-1) if num_rows > 1 else value for name, value in rows(num_rows, device, seed).items()} | (
        {"temperature": torch.full((1,), 0.9, device=device)} if num_rows == 1 else {}
    )


@pytest.mark.parametrize("num_rows, vocab", RAGGED)
@DTYPES
def test_every_combination_of_limits_beside_plain_and_greedy_rows_equals_the_reference(device, num_rows, vocab, dtype):
    states, weight = integer_problem(num_rows, vocab, 64, dtype, device, seed=vocab)
    params = sampled_rows(num_rows, device)
    truncation = limits(num_rows, vocab, device, first=7 if num_rows == 1 else 0)
    drawn = draw(states, LMHead(weight), params, truncation)
    assert_equal_to_reference(drawn, logits_ref(states, weight), params, truncation, 0.4 if num_rows < 9 else 0.12)


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 5.0}, {"logit_scale": 0.25}, {"logits_dtype": torch.float32}, {"vocab_size": 901}],
    ids=lambda o: "+".join(o) or "bf16",
)
def test_the_draw_from_the_kept_logits_of_a_random_problem_equals_the_reference(device, options):
    states, weight = random_problem(24, 1000, 64, torch.bfloat16, device, seed=1)
    head, params, truncation = LMHead(weight, **options), sampled_rows(24, device), limits(24, 1000, device)
    drawn = draw(states, head, params, truncation)
    cut = is_cut(params, truncation, head.vocab_size)
    kept = {name: value[cut] for name, value in params.items()}
    some = dataclasses.replace(drawn, **{f.name: getattr(drawn, f.name)[cut] for f in dataclasses.fields(drawn)})
    assert_equal_to_reference(some, some.kept, kept, take(truncation, cut), 0.12)


def test_logits_are_kept_as_they_are_drawn_from_in_the_fewest_bytes_that_hold_them(device):
    states, weight = integer_problem(8, 300, 64, torch.bfloat16, device)
    params, truncation = (
        rows(8, device, greedy_every=99) | {"temperature": torch.ones(8, device=device)},
        limit_all(8, device, 5),
    )
    for options, dtype in (
        ({}, torch.bfloat16),
        ({"logit_scale": 3.0}, torch.bfloat16),
        ({"softcap": 5.0}, torch.float32),
        ({"logits_dtype": torch.float32}, torch.float32),
    ):
        kept = draw(states, LMHead(weight, **options), params, truncation).kept
        assert kept.dtype is dtype
        torch.testing.assert_close(kept.double(), logits_ref(states, weight, **options), rtol=1e-6, atol=1e-6)


def test_a_block_of_rows_leaves_behind_the_logits_of_its_truncated_rows_and_of_no_other(device):
    num_rows, vocab = 100, 300  # more than 64 in a block
    tile = TileConfig(128, 128, 64, 8, 3) if CUDA else TileConfig(128, 512, 64, 4, 1, tma=False, reduce_rows=64)
    states, weight = integer_problem(num_rows, vocab, 64, torch.float32, device, seed=7)
    params = rows(num_rows, device) | {"temperature": torch.ones(num_rows, device=device)}
    cut = (torch.rand(num_rows, generator=torch.Generator().manual_seed(1)) < 0.5).to(device)
    truncation = limit_all(num_rows, device)
    truncation.top_p[cut] = 0.5
    head = LMHead(weight)
    workspace = Workspace(num_parts(head, num_rows, tile) * num_rows, device)
    kept = workspace.kept(num_rows, vocab, torch.float32)
    kept.logits.fill_(-77.0)
    lm_head_sample(states, head, **params, tile=tile, truncation=truncation, draw=draw_for(head), workspace=workspace)
    assert torch.equal((kept.logits[:num_rows, :vocab] != -77.0).all(1), cut)
    assert (kept.logits[:num_rows][~cut] == -77.0).all()


def invariance_problem(device, num_rows=24, vocab=1500):
    states, weight = integer_problem(num_rows, vocab, 64, torch.float16, device, seed=4)
    return states, LMHead(weight), sampled_rows(num_rows, device), limits(num_rows, vocab, device)


def test_a_token_does_not_depend_on_how_the_draw_is_launched(device):
    states, head, params, truncation = invariance_problem(device, 24 if CUDA else 9)
    drawn = [
        draw(states, head, params, truncation, config=config)
        for config in (
            None,
            DEFAULT_DRAW,
            DrawConfig(chunks=16, num_warps=4, block=128, search_warps=4, window=1, gather=1),
            DrawConfig(chunks=2, num_warps=4, block=256, search_warps=8, window=4, gather=2),
        )
    ]
    for other in drawn[1:]:
        assert torch.equal(drawn[0].token, other.token)
        torch.testing.assert_close(drawn[0].logprob, other.logprob, rtol=0, atol=1e-5)


def test_a_token_does_not_depend_on_the_tile_whichever_branch_answers_its_row(device):
    states, head, params, truncation = invariance_problem(device)
    many, wide, one = (draw(states, head, params, truncation, tile=tile) for tile in (TILE, WIDE, ONE_PART))
    assert torch.equal(many.token, wide.token)
    assert torch.equal(many.token, one.token)
    if not CUDA:
        assert ((one.rounds > 1) & (many.rounds == 1)).any(), "some rows take the search with one tile alone"


def test_each_part_leaves_its_best_and_its_second_best_group_behind(device):
    """Few parts of many tiles: what comes second lies in another tile, often at the same place in it."""
    tile = TileConfig(16, 64, 64, 4, 3) if CUDA else TileConfig(16, 32, 64, 4, 1, 3, tma=False, reduce_rows=16)
    num_rows, vocab = (17, 50_257) if CUDA else (9, 700)
    states, weight = integer_problem(num_rows, vocab, 64, torch.float32, device, seed=9)
    head, params = LMHead(weight), rows(num_rows, device, greedy_every=99)
    params["temperature"][0] = 1.0
    parts = num_parts(head, num_rows, tile)
    workspace = Workspace(parts * num_rows, device)
    lm_head_sample(
        states, head, **params, tile=tile, truncation=limit_all(num_rows, device, 5), workspace=workspace,
        draw=draw_for(head),
    )  # fmt: skip
    left = left_of(True, tile.block_v, parts)
    tempered = logits_ref(states, weight) / params["temperature"].double()[:, None]
    grouped = torch.nn.functional.pad(tempered, (0, -vocab % 16), value=float("-inf")).view(num_rows, -1, 16)
    group = torch.arange(grouped.shape[1], device=device)
    noise = gumbel_ref(params["seed"][:, None], params["position"][:, None], group[None], Stream.SAMPLE, Unit.GROUP)
    score, part = grouped.logsumexp(-1) + noise, group * 16 // tile.block_v % parts * left + group % left
    for number in range(parts * left):
        best, second = score[:, part == number].topk(2, dim=1).values.unbind(1)
        slots = slice(number * num_rows, (number + 1) * num_rows)
        torch.testing.assert_close(workspace.score[slots].double(), best, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(workspace.second[slots].double(), second, rtol=1e-5, atol=1e-5)


def test_a_token_that_may_come_after_a_group_not_left_behind_is_not_taken_for_the_next(device):
    """The best group is far ahead; the only id that is allowed, 3, is in it, but late; others come in between."""
    num_rows = 12
    workspace, params = Workspace(2 * num_rows, device), rows(num_rows, device, greedy_every=99)
    params["temperature"] = torch.ones(num_rows, device=device)
    workspace.score[:num_rows], workspace.score[num_rows:] = 15.0, 8.0
    workspace.group[:num_rows], workspace.group[num_rows:] = 0, 2
    workspace.second.fill_(7.0)
    kept = workspace.kept(num_rows, 48, torch.float32)
    kept.logits.zero_()
    kept.logits[:, 3] = 1.0
    kept.peak.zero_()
    kept.peak[:, 0] = 1.0
    workspace.logits.zero_()
    workspace.logits[:num_rows, 3] = 1.0
    token, _, _ = draw_truncated(
        workspace, kept, 2, **params, truncation=limit_all(num_rows, device, top_p=0.01), vocab_size=48, vocab_start=0,
        return_logprob=False, most_parts=8, config=draw_for(LMHead(torch.zeros(48, 16, device=device))),
    )  # fmt: skip
    assert token.tolist() == [3] * num_rows
    assert (kept.rounds[:num_rows] > 1).sum() >= 6


def test_a_token_does_not_depend_on_the_batch_its_order_or_its_neighbours(device):
    states, head, params, truncation = invariance_problem(device)
    together = draw(states, head, params, truncation)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(5)).to(device)
    shuffled = draw(
        states[order].contiguous(),
        head,
        {name: value[order].contiguous() for name, value in params.items()},
        take(truncation, order),
    )
    assert torch.equal(together.token[order], shuffled.token)
    assert torch.equal(together.logprob[order], shuffled.logprob)
    for row in (3, 6, 15):
        one = torch.tensor([row], device=device)
        alone = draw(states[one], head, {name: value[one] for name, value in params.items()}, take(truncation, one))
        assert alone.token.item() == together.token[row].item()
    others = Truncation(
        torch.where(order.sort().values == 3, truncation.top_k, 2),
        torch.where(order.sort().values == 3, truncation.top_p, 0.5),
        truncation.min_p,
    )
    assert draw(states, head, params, others).token[3].item() == together.token[3].item()


def test_a_truncation_changes_a_token_only_where_it_forbids_it(device):
    states, weight = integer_problem(48, 700, 64, torch.float32, device, seed=8)
    params, truncation = sampled_rows(48, device), limits(48, 700, device)
    plain, score, logprob = lm_head_sample(states, LMHead(weight), **params, tile=TILE, return_logprob=True)
    drawn = draw(states, LMHead(weight), params, truncation)
    cut = is_cut(params, truncation, 700)
    tempered = torch.where(cut, params["temperature"], 1.0)
    allowed = allowed_ref(logits_ref(states, weight), tempered, truncation.top_k, truncation.top_p, truncation.min_p)
    may_stay = allowed.gather(1, plain[:, None]).squeeze(1) | ~cut
    assert 8 <= may_stay.sum() <= 40
    assert torch.equal(drawn.token[may_stay], plain[may_stay])
    assert (drawn.token != plain)[~may_stay].all()
    torch.testing.assert_close(drawn.score[may_stay], score[may_stay], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(drawn.logprob[may_stay], logprob[may_stay], rtol=0, atol=1e-5)


@pytest.mark.parametrize("top_k", [0, -3, 700, 701, 2**30])
def test_limits_that_are_off_change_nothing_at_all(device, top_k):
    states, weight = random_problem(9, 700, 64, torch.bfloat16, device)
    params, truncation = rows(9, device), limit_all(9, device, top_k)
    token, score, logprob = lm_head_sample(states, LMHead(weight), **params, tile=TILE, return_logprob=True)
    drawn = draw(states, LMHead(weight), params, truncation)
    assert drawn.rounds.tolist() == [0] * 9
    assert torch.equal(drawn.token, token)
    # Another binary: a compiler may contract other multiplications and additions.
    torch.testing.assert_close(drawn.score, score, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(drawn.logprob, logprob, rtol=1e-6, atol=1e-5)


def test_greedy_rows_ignore_a_truncation(device):
    states, weight = integer_problem(6, 700, 64, torch.float32, device)
    params = rows(6, device) | {"temperature": torch.zeros(6, device=device)}
    drawn = draw(states, LMHead(weight), params, limit_all(6, device, 3, 0.5, 0.2))
    assert drawn.rounds.tolist() == [0] * 6
    assert torch.equal(drawn.token, logits_ref(states, weight).argmax(-1))


@pytest.mark.parametrize(
    "limit",
    [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0.0}, {"min_p": 1.0}, {"min_p": 1.5}, {"top_k": 1, "min_p": 0.5}],
    ids=str,
)
def test_the_tightest_limits_leave_the_largest_logit(device, limit):
    states, weight = random_problem(9, 700, 64, torch.float32, device, seed=3)
    params = rows(9, device, greedy_every=4)
    drawn = draw(states, LMHead(weight), params, limit_all(9, device, **limit))
    assert torch.equal(drawn.token, logits_ref(states, weight).argmax(-1))
    assert (drawn.rounds > 0).sum() == 6


def spelled_out(device, values: list[float], num_rows: int):
    """The same logits in every row, in float32, and rows that differ in their noise alone."""
    weight = torch.zeros(len(values), 16, device=device)
    weight[:, 0] = torch.tensor(values, device=device)
    states = torch.zeros(num_rows, 16, device=device)
    states[:, 0] = 1.0
    params = {
        "temperature": torch.ones(num_rows, device=device),
        "seed": torch.full((num_rows,), 3, device=device),
        "position": torch.arange(num_rows, device=device),
    }
    return states, LMHead(weight), params


TIES = [0.0, 7.0, 5.0, -1.0, 5.0, 6.0, 5.0, 7.0, 5.0, 4.0, -1.0, 5.0, 0.0]
LARGEST, SECOND, THIRD, FOURTH = {1, 7}, {5}, {2, 4, 6, 8, 11}, {9}


@pytest.mark.parametrize(
    "limit, allowed",
    [
        ({"top_k": 1}, LARGEST),
        ({"top_k": 2}, LARGEST),
        ({"top_k": 3}, LARGEST | SECOND),
        ({"top_k": 4}, LARGEST | SECOND | THIRD),
        ({"top_k": 8}, LARGEST | SECOND | THIRD),
        ({"top_k": 9}, LARGEST | SECOND | THIRD | FOURTH),
        ({"top_p": 0.5}, LARGEST),
        ({"top_p": 0.74}, LARGEST | SECOND),
        ({"top_p": 0.84}, LARGEST | SECOND | THIRD),
        ({"min_p": 0.9}, LARGEST),
        ({"min_p": 0.36}, LARGEST | SECOND),
        ({"min_p": 0.13}, LARGEST | SECOND | THIRD),
        ({"top_k": 4, "top_p": 0.74}, LARGEST | SECOND),
        ({"top_k": 3, "top_p": 0.84}, LARGEST | SECOND),
        # Top-p of what top-k has left: 0.84 of the five sixths that the three largest have is reached by the two 7s.
        ({"top_k": 3, "top_p": 0.84, "min_p": 0.001}, LARGEST),
        ({"top_k": 3, "top_p": 0.85, "min_p": 0.001}, LARGEST | SECOND),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_equal_logits_at_a_threshold_stay_or_go_together(device, limit, allowed):
    draws = 4000 if CUDA else 64
    states, head, params = spelled_out(device, TIES, draws)
    drawn = draw(states, head, params, limit_all(draws, device, **limit))
    assert set(drawn.token.tolist()) == allowed
    assert_equal_to_reference(drawn, logits_ref(states, head.weight), params, limit_all(draws, device, **limit), 0.01)


def test_a_row_whose_first_tokens_are_all_forbidden_is_searched_exactly(device):
    """Flat rows with room for a few ids: the first arrivals are others."""
    num_rows, vocab = (65, 5003) if CUDA else (6, 1500)
    states, weight = integer_problem(num_rows, vocab, 64, torch.float32, device, seed=2)
    params = rows(num_rows, device) | {"temperature": torch.full((num_rows,), 6.0, device=device)}
    config = dataclasses.replace(draw_for(LMHead(weight)), candidates=2)  # no top-k but 1 is a small one
    for limit in ({"top_k": 2}, {"top_p": 0.001}, {"min_p": 0.8}, {"top_k": 9, "top_p": 0.5, "min_p": 0.3}):
        truncation = limit_all(num_rows, device, **limit)
        drawn = draw(states, LMHead(weight), params, truncation, config=config)
        assert (drawn.rounds > 1).double().mean() > (0.8 if "min_p" not in limit or "top_k" in limit else 0.1)
        assert_equal_to_reference(drawn, logits_ref(states, weight), params, truncation, 0.06)


@pytest.mark.parametrize("temperature", [0.3, 6.0], ids=["peaked", "flat"])
@pytest.mark.parametrize(
    "limit", [{"top_k": 30}, {"top_k": 20, "top_p": 0.6}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}], ids=str
)
def test_a_row_with_a_small_top_k_is_answered_in_one_pass_whatever_its_distribution(device, limit, temperature):
    num_rows, vocab = (65, 50_257) if CUDA else (6, 12_001)
    states, weight = integer_problem(num_rows, vocab, 64, torch.float32, device, seed=5)
    weight += torch.arange(vocab, device=device)[:, None] % 7 / 64  # fewer ties, and sums as exact as before
    params = rows(num_rows, device) | {"temperature": torch.full((num_rows,), temperature, device=device)}
    truncation = limit_all(num_rows, device, **limit)
    drawn = draw(states, LMHead(weight), params, truncation)
    assert drawn.rounds.tolist() == [1] * num_rows
    assert_equal_to_reference(drawn, logits_ref(states, weight), params, truncation, 0.4)


def test_a_small_top_k_with_more_ties_than_there_is_room_for_is_searched(device):
    states, head, params = spelled_out(device, [1.0] * 3000 + [2.0], 8)
    drawn = draw(states, head, params, limit_all(8, device, top_k=5))
    assert (drawn.rounds > 1).all()
    assert_equal_to_reference(drawn, logits_ref(states, head.weight), params, limit_all(8, device, top_k=5), 0.01)


@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("limit", [{"min_p": 0.5}, {"min_p": 0.5, "top_k": 50}, {"min_p": 0.5, "top_p": 0.9}], ids=str)
def test_min_p_is_of_the_distribution_at_temperature(device, temperature, limit):
    num_rows = 400 if CUDA else 24
    states, weight = integer_problem(num_rows, 400, 64, torch.float32, device, seed=6)
    params = rows(num_rows, device) | {"temperature": torch.full((num_rows,), temperature, device=device)}
    truncation = limit_all(num_rows, device, **limit)
    drawn = draw(states, LMHead(weight), params, truncation)
    assert_equal_to_reference(drawn, logits_ref(states, weight), params, truncation, 0.1)
    assert (drawn.rounds == 1).any(), "some rows are answered in one pass"


def test_a_row_whose_first_token_is_allowed_takes_no_search(device):
    states, weight = integer_problem(32, 1500, 64, torch.float32, device, seed=2)
    params, truncation = rows(32, device, greedy_every=99), limit_all(32, device, 40, 0.95)
    params["temperature"] = params["temperature"].clamp(0.5, 1.0)
    drawn = draw(states, LMHead(weight), params, truncation)
    allowed = allowed_ref(
        logits_ref(states, weight), params["temperature"], truncation.top_k, truncation.top_p, truncation.min_p
    )
    plain = reference(logits_ref(states, weight), params).token
    first = allowed.gather(1, plain[:, None]).squeeze(1)
    assert first.sum() > 16
    assert (drawn.rounds[first] == 1).all()


def test_a_row_of_nothing_gives_the_first_id_and_touches_no_other_row(device):
    states, weight = random_problem(9, 1000, 32, torch.float32, device)
    params, truncation = rows(9, device, greedy_every=99), limits(9, 1000, device, first=1)
    params["temperature"][0] = 0.7
    clean = draw(states, LMHead(weight), params, truncation)
    broken = states.clone()
    broken[1], broken[4], broken[6] = float("nan"), float("nan"), float("-inf")
    drawn = draw(broken, LMHead(weight), params, truncation)
    assert drawn.token[[1, 4]].tolist() == [0, 0]
    assert ((drawn.token >= 0) & (drawn.token < 1000)).all()
    others = [0, 2, 3, 5, 7, 8]
    assert torch.equal(drawn.token[others], clean.token[others])


def test_a_row_of_nothing_reads_no_slot_that_no_part_has_written(device):
    """With one part there is one slot; what lies behind it says nothing about this row."""
    states, weight = torch.full((1, 16), float("nan"), device=device), torch.zeros(100, 16, device=device)
    params, truncation = sampled_rows(1, device), limit_all(1, device, 5)
    workspace = Workspace(64, device)
    workspace.score.fill_(9.0)
    workspace.logits.fill_(1.0)
    workspace.group.fill_(4)
    token, _, _ = lm_head_sample(
        states, LMHead(weight), **params, tile=TILE, truncation=truncation, workspace=workspace, draw=DEFAULT_DRAW
    )
    assert token.tolist() == [0]


def test_what_is_masked_is_never_drawn_however_many_may_be(device):
    weight = torch.zeros(300, 16, device=device)
    weight[10:290] = float("nan")
    states = torch.ones(24, 16, device=device)
    params = rows(24, device, greedy_every=99)
    for limit in ({"top_k": 200}, {"top_p": 0.999}, {"min_p": 1e-9}):
        token = draw(states, LMHead(weight), params, limit_all(24, device, **limit)).token
        assert ((token < 10) | (token >= 290)).all()
        assert len(set(token.tolist())) > 5


def test_an_infinite_logit_is_all_that_a_truncation_leaves(device):
    weight = torch.zeros(100, 16, device=device)
    weight[77] = float("inf")
    states, params = torch.ones(8, 16, device=device), rows(8, device)
    drawn = draw(states, LMHead(weight), params, limits(8, 100, device))
    assert drawn.token.tolist() == [77] * 8


def test_logprobs_are_those_before_the_truncation(device):
    states, weight = random_problem(16, 900, 64, torch.float32, device, seed=5)
    params, truncation = rows(16, device, greedy_every=99), limit_all(16, device, 4, 0.8)
    tempered = logits_ref(states, weight) / params["temperature"].double().clamp(min=1e-9)[:, None]
    config = draw_for(LMHead(weight))
    for candidates, searched in ((128, False), (2, True)):
        config = dataclasses.replace(config, candidates=candidates)
        drawn = draw(states, LMHead(weight), params, truncation, config=config)
        want = torch.log_softmax(tempered, -1).gather(1, drawn.token[:, None]).squeeze(1)
        assert (drawn.rounds[1:] > 1).any() == searched
        assert (drawn.rounds[1:] == 1).any()
        torch.testing.assert_close(drawn.logprob.double()[1:], want[1:], rtol=0, atol=1e-4)


def test_a_call_without_logprobs_draws_the_same_tokens(device):
    states, head, params, truncation = invariance_problem(device, 16)
    token, score, logprob = lm_head_sample(states, head, **params, tile=TILE, truncation=truncation)
    drawn = draw(states, head, params, truncation)
    assert logprob is None
    assert torch.equal(token, drawn.token)
    assert torch.equal(score, drawn.score)


def test_a_workspace_serves_one_batch_after_another(device):
    """Scratch that a batch leaves behind, its arrival counters above all, must not reach the next one."""
    workspace = Workspace(64 * 132, device)
    for num_rows, vocab in ((5, 700), (17, 700), (3, 300), (17, 700)):
        states, weight = integer_problem(num_rows, vocab, 64, torch.float32, device, seed=num_rows)
        params, truncation = sampled_rows(num_rows, device), limits(num_rows, vocab, device)
        token, _, _ = lm_head_sample(
            states, LMHead(weight), **params, tile=TILE, truncation=truncation, workspace=workspace, draw=DEFAULT_DRAW
        )
        want = reference(logits_ref(states, weight), params, truncation)
        assert torch.equal(token[~want.near_tie], want.token[~want.near_tie])
        assert not workspace.last_kept.arrived.any()


def test_room_for_kept_logits_grows_by_doubling_and_stays_when_it_is_enough(device):
    workspace = Workspace(8, device)
    assert workspace.last_kept is None
    first = workspace.kept(4, 1000, torch.float32)
    assert (first.num_rows, first.width) == (4, 1008)
    assert workspace.kept(3, 1008, torch.float32) is first
    assert workspace.kept(5, 1000, torch.float32).num_rows == 8
    assert workspace.kept(9, 992, torch.float32).num_rows == 9, "another vocabulary starts anew"
    other = workspace.kept(9, 992, torch.bfloat16)
    assert other.logits.dtype is torch.bfloat16
    assert workspace.last_kept is other
    assert workspace.kept(9, 992, torch.float32) is not other, "each dtype has its own room"
    assert workspace.kept(9, 992, torch.bfloat16) is other


# --- the distribution -------------------------------------------------------------------------------------------

MODES = {
    "top_p .95 + top_k 20": {"top_p": 0.95, "top_k": 20},
    "top_p .9 + top_k 50": {"top_p": 0.9, "top_k": 50},
    "top_p .9": {"top_p": 0.9},
    "min_p .05": {"min_p": 0.05},
    "top_k 1000": {"top_k": 1000},
}
SPREADS = {"peaked": 4.0, "typical": 2.5, "flat": 0.5}
VOCAB = 50_257 if CUDA else 600
BATCH = 20_000 if CUDA else 64
DRAWS = 34 * BATCH if CUDA else BATCH  # of each mode and spread: 10.2 million together on a GPU
DIFFERENCE = 0.01 if CUDA else 0.5  # total variation that the G-test sees
CELLS = 48 if CUDA else 4


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("mode", MODES)
def test_draws_follow_the_distribution_that_is_left_and_never_leave_it(device, mode, spread):
    """15 cases of 680,000 draws on a GPU (64 interpreted): no token outside the allowed set, and a G-test at alpha
    1e-6 (1e-4) with power > 0.99 against a total variation of 0.01 (0.5)."""
    generator = torch.Generator().manual_seed(11)
    values = torch.randn(VOCAB, generator=generator) * SPREADS[spread]
    states, head, params = spelled_out(device, values.tolist(), BATCH)
    truncation = limit_all(BATCH, device, **MODES[mode])
    logits = values.double()[None]
    one = take(limit_all(1, torch.device("cpu"), **MODES[mode]), torch.tensor([0]))
    allowed = allowed_ref(logits, torch.ones(1), one.top_k, one.top_p, one.min_p, slack=1e-5)[0]
    observed = torch.zeros(VOCAB, dtype=torch.int64)
    for start in range(0, DRAWS, BATCH):
        params["position"] = torch.arange(start, start + BATCH, device=device)
        drawn = draw(states, head, params, truncation, tile=WIDE)
        observed += torch.bincount(drawn.token.cpu(), minlength=VOCAB)
    assert observed[~allowed].sum() == 0

    truth = torch.where(allowed, torch.softmax(logits[0], 0), 0.0)
    truth, order = (truth / truth.sum()).sort(descending=True)
    cell = ((truth.cumsum(0) - truth / 2) * CELLS).long().clamp(max=CELLS - 1)
    expected = torch.zeros(CELLS, dtype=torch.float64).index_add(0, cell, truth).numpy()
    counts = torch.zeros(CELLS, dtype=torch.int64).index_add(0, cell, observed[order]).numpy()
    counts, expected = counts[expected > 0], expected[expected > 0]
    upper = np.cumsum(expected) - expected < 0.5
    mass = expected[upper].sum()
    assert mass < 1, "more than one cell is left"
    other = np.where(upper, expected * (1 - DIFFERENCE / mass), expected * (1 + DIFFERENCE / (1 - mass)))
    alpha = 1e-6 if CUDA else 1e-4
    assert power(DRAWS, expected, other, alpha) > 0.99
    assert g_test(counts, expected).p_value > alpha


# --- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"top_k": torch.zeros(2, dtype=torch.int64)},
            r"top_k is \(2,\) torch.int64.*expected contiguous \(2,\).*int32",
        ),
        ({"top_k": torch.zeros(3, dtype=torch.int32)}, r"top_k is \(3,\) .*expected contiguous \(2,\)"),
        ({"top_p": torch.ones(2, dtype=torch.float64)}, r"top_p is \(2,\) torch.float64.*expected .*float32"),
        ({"min_p": torch.zeros(4)[::2]}, r"min_p is \(2,\) .*strides \(2,\); expected contiguous"),
    ],
    ids=["dtype of top_k", "shape of top_k", "dtype of top_p", "layout of min_p"],
)
def test_a_bad_limit_raises_a_value_error_that_names_it(device, change, message):
    states, head = torch.zeros(2, 16, device=device), LMHead(torch.zeros(400, 16, device=device))
    truncation = dataclasses.replace(limit_all(2, device), **{name: value.to(device) for name, value in change.items()})
    if "strides" in message:
        truncation = dataclasses.replace(truncation, min_p=torch.zeros(4, device=device)[::2])
    with pytest.raises(ValueError, match=message):
        lm_head_sample(states, head, **rows(2, device), tile=TILE, truncation=truncation)


def test_a_truncation_of_a_shard_raises(device):
    states, head = torch.zeros(2, 16, device=device), LMHead(torch.zeros(400, 16, device=device), vocab_start=160)
    with pytest.raises(ValueError, match="vocab_start is 160; expected 0, the whole vocabulary, with a truncation"):
        lm_head_sample(states, head, **rows(2, device), tile=TILE, truncation=limit_all(2, device))


def test_more_logits_than_an_int32_counts_raise(device):
    weight = torch.zeros(1, 16, device=device).expand(2**20, 16)
    states = torch.zeros(1, 16, device=device).expand(2**11, 16)
    head = LMHead(torch.zeros(2**20, 16, device=device))
    assert weight.shape == head.weight.shape
    with pytest.raises(ValueError, match="hidden has 2048 rows; expected fewer than 2\\*\\*31 logits"):
        lm_head_sample(states, head, **rows(2**11, device), tile=TILE, truncation=limit_all(2**11, device))


def test_kept_logits_of_another_shape_raise(device):
    params, truncation = rows(3, device), limit_all(3, device)
    workspace = Workspace(8, device)
    for kept_rows, width, message in (
        (2, 400, "kept holds 2 rows of 400 logits; expected at least 3 rows of 400 rounded up to a multiple of 16"),
        (3, 384, "kept holds 3 rows of 384 logits; expected at least 3 rows of 400"),
    ):
        kept = Workspace(8, device).kept(kept_rows, width, torch.float32)
        with pytest.raises(ValueError, match=message):
            draw_truncated(
                workspace,
                kept,
                1,
                **params,
                truncation=truncation,
                vocab_size=400,
                vocab_start=0,
                return_logprob=False,
                most_parts=8,
                config=DEFAULT_DRAW,
            )


@pytest.mark.parametrize(
    "field, value, expectation",
    [
        ("chunks", 32, "16 or fewer"),
        ("chunks", 3, "a power of two"),
        ("block", 0, "a power of two"),
        ("block", 4, "a power of two of at least 8"),
        ("candidates", 1024, "512 or fewer"),
        ("window", 2.0, "a power of two"),
    ],
)
def test_a_bad_draw_config_raises_a_value_error_that_names_the_field(field, value, expectation):
    with pytest.raises(ValueError, match=f"DrawConfig.{field} is {value}; expected {expectation}"):
        DrawConfig(**{field: value})


def test_a_tile_of_more_rows_than_have_flags_raises_with_a_truncation(device):
    head, params = LMHead(torch.zeros(100, 16, device=device)), rows(3, device)
    tile = dataclasses.replace(TILE, block_b=256)
    states = torch.zeros(3, 16, device=device)
    with pytest.raises(ValueError, match="block_b is 256; expected 128 or fewer with a truncation"):
        lm_head_sample(states, head, **params, tile=tile, truncation=limit_all(3, device, 5))


def test_no_rows_give_no_tokens(device):
    head = LMHead(torch.zeros(100, 16, device=device))
    token, _, logprob = lm_head_sample(
        torch.zeros(0, 16, device=device),
        head,
        **rows(0, device),
        tile=TILE,
        truncation=limit_all(0, device),
        return_logprob=True,
    )
    assert token.shape == logprob.shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("vocab", [127, 50257, 151936, 151937])
def test_many_rows_equal_the_reference(device, vocab, dtype):
    head = LMHead(random_problem(1, vocab, 256, dtype, device, seed=7)[1])
    searched = 0
    for start in range(0, 1024, 128):
        states = random_problem(128, 1, 256, dtype, device, seed=100 + start)[0]
        params, truncation = rows(128, device, seed=start), limits(128, vocab, device)
        drawn = draw(states, head, params, truncation, tile=WIDE)
        cut = is_cut(params, truncation, vocab)
        want = reference(drawn.kept[cut], {k: v[cut] for k, v in params.items()}, take(truncation, cut))
        sure = ~want.near_tie
        assert torch.equal(drawn.token[cut][sure], want.token[sure])
        assert want.near_tie.double().mean() < 0.2
        searched += int((drawn.rounds > 1).sum())
    assert searched > 0


@pytest.mark.gpu
def test_a_captured_graph_follows_its_limits(device):
    states, weight = random_problem(17, 151936, 256, torch.bfloat16, device)
    head, params = LMHead(weight), rows(17, device)
    truncation = limits(17, 151936, device)
    workspace = Workspace(num_parts(head, 17, TILE) * 17, device)
    options = {"tile": TILE, "truncation": truncation, "workspace": workspace}
    eager, _, _ = lm_head_sample(states, head, **params, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, _, _ = lm_head_sample(states, head, **params, **options)
    for _ in range(3):
        graph.replay()
        assert torch.equal(token, eager)
    truncation.top_k.fill_(1)
    graph.replay()
    replayed = token.clone()
    assert torch.equal(replayed, lm_head_sample(states, head, **params, **options)[0])
    assert not torch.equal(replayed, eager)


def test_more_equal_logits_than_there_is_room_to_list_are_all_drawn(device):
    states, head, params, tied = ties_apart(64, device)
    drawn = draw(states, head, params, limit_all(64, device, top_k=20))
    assert torch.isin(drawn.token, tied).all()
    assert (drawn.token > tied[128]).float().mean() > 0.15, "of 200 spans, 71 are beyond the list"
    assert (drawn.rounds > 1).all(), "the search answers"
