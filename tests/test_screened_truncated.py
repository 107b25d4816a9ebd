"""Rows with a truncation through the screen: the token that they have without it, from a part of the head."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import (
    CUDA,
    bitmask,
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
from sgl_flashsample.kernels import screened_sample as screened_sample_module
from sgl_flashsample.kernels.features import LogitEdits
from sgl_flashsample.kernels.head import LMHead, Workspace
from sgl_flashsample.kernels.int8_head import ID_ROWS, Counted, Int8Head, ScreenWorkspace
from sgl_flashsample.kernels.quantize_hidden import quantize_hidden
from sgl_flashsample.kernels.reference import edit_logits_ref, logits_ref
from sgl_flashsample.kernels.screen_head import screen_head
from sgl_flashsample.kernels.screened_sample import screened_sample
from test_screened_sample import CONFIG, LISTED, ONE_TERM

from sgl_flashsample.tuned import draw_for

CONFIGS = pytest.mark.parametrize("config", [CONFIG, LISTED], ids=["chunks", "listed"])


@dataclasses.dataclass(frozen=True)
class Screened:
    """rounds: per row 0 without a truncation, 1 answered from the groups that were rescored, more after a search."""

    token: torch.Tensor
    score: torch.Tensor
    rounds: torch.Tensor
    groups_read: int


def screened(states, head, params, truncation, config=CONFIG, edits=None, int8_head=None) -> Screened:
    int8_head = Int8Head(head) if int8_head is None else int8_head
    workspace, head_workspace = ScreenWorkspace(int8_head, len(states)), Workspace(1, states.device)
    token, score, logprob = screened_sample(
        states,
        head,
        int8_head,
        **params,
        config=config,
        truncation=truncation,
        edits=edits,
        workspace=workspace,
        head_workspace=head_workspace,
        draw=draw_for(head),
    )
    assert logprob is None
    rounds = head_workspace.last_kept.rounds[: len(states)].clone()
    return Screened(token, score, rounds, int(workspace.counters[Counted.GROUPS]))


def assert_equal_to_the_fused_pass_and_the_reference(
    states, head, params, cut, config=CONFIG, edits=None, max_near_ties=0.12
) -> Screened:
    found = screened(states, head, params, cut, config, edits)
    fused = draw(states, head, params, cut, edits=edits)
    truncated = is_cut(params, cut, head.vocab_size)
    want = reference(fused.kept, params, cut)  # of truncated rows: of the others nothing is kept
    sure = truncated & ~want.near_tie
    assert torch.equal(found.token[sure], want.token[sure])
    sure |= ~truncated
    assert torch.equal(found.token[sure], fused.token[sure])
    torch.testing.assert_close(found.score[sure], fused.score[sure], rtol=1e-3, atol=1e-3)
    assert torch.equal(found.rounds > 0, truncated)
    assert (~sure).float().mean() <= max_near_ties
    return found


RAGGED = [(1, 1, 80), (3, 17, 65), (9, 127, 80), (17, 129, 33), (9, 2003, 72), (33, 401, 80)]
if CUDA:
    RAGGED += [(1, 151936, 4096), (17, 151937, 1000), (3, 50257, 768), (65, 151936, 256)]


@pytest.mark.parametrize("num_rows, vocab, hidden", RAGGED)
@CONFIGS
def test_tokens_equal_the_fused_pass_and_the_reference_for_every_kind_of_limit(device, num_rows, vocab, hidden, config):
    states, weight = random_problem(num_rows, vocab, hidden, torch.bfloat16, device, padding=vocab % 7)
    head, params, cut = LMHead(weight, vocab_size=vocab), rows(num_rows, device), limits(num_rows, vocab, device)
    assert_equal_to_the_fused_pass_and_the_reference(states, head, params, cut, config, max_near_ties=0.4)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"logit_scale": 3.0, "softcap": 20.0},
        {"logits_dtype": torch.float32},
        {"vocab_size": 901},
    ],
    ids=lambda o: "+".join(o),
)
def test_scale_softcap_rounding_and_padding_equal_the_fused_pass(device, options):
    states, weight = random_problem(33, 1000, 64, torch.bfloat16, device, seed=1)
    head = LMHead(weight, **options)
    cut = limits(33, head.vocab_size, device)
    assert_equal_to_the_fused_pass_and_the_reference(states, head, rows(33, device), cut)


def test_tokens_equal_to_the_bit_where_sums_are_exact_and_ties_abound_whatever_the_config(device):
    states, weight = integer_problem(16, 1200, 64, torch.float16, device, seed=4)
    head, params, cut = LMHead(weight), rows(16, device), limits(16, 1200, device)
    configs = [
        *(CONFIG, ONE_TERM, LISTED),
        dataclasses.replace(CONFIG, block_b=8, block_d=32, chunk=16),
        dataclasses.replace(CONFIG, block_v=128, chunk=1000, rescore_v=128, rescore_d=16),
    ]
    fused = draw(states, head, params, cut)
    for config in configs:
        assert torch.equal(screened(states, head, params, cut, config).token, fused.token)


def test_edited_logits_give_the_token_of_the_fused_pass(device):
    states, weight = integer_problem(17, 1900, 64, torch.float16, device, seed=6)
    g = torch.Generator().manual_seed(2)
    edits = LogitEdits(
        additive=torch.randint(-2, 1, (17, 1900), generator=g).to(device) / 2,
        scaling=torch.where(torch.rand(17, 1900, generator=g) < 0.1, 2.0, 1.0).to(device),
        mask=bitmask(torch.rand(17, 1900, generator=g) < 0.3).to(device),
        bias=torch.randint(0, 2, (17, 1900), generator=g).to(device) / 4,
    )
    head, params, cut = LMHead(weight), rows(17, device), limits(17, 1900, device)
    fused, found = draw(states, head, params, cut, edits=edits), screened(states, head, params, cut, edits=edits)
    assert torch.equal(found.token, fused.token)
    none = LogitEdits(mask=torch.ones(17, 1900, dtype=torch.bool, device=device))
    assert screened(states, head, params, cut, edits=none).token.tolist() == [0] * 17


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e7])
def test_hidden_states_and_weights_that_are_not_finite_or_huge_give_the_fused_pass_token(device, value):
    states, weight = integer_problem(8, 1000, 32, torch.float32, device)
    params, cut = rows(8, device, greedy_every=6), limits(8, 1000, device)
    broken_states, broken_weight = states.clone(), weight.clone()
    broken_states[1], broken_states[2, 0], broken_states[7] = value, value, value
    broken_weight[50], broken_weight[777, 3] = value, value
    for s, w in ((broken_states, weight), (states, broken_weight), (broken_states, broken_weight)):
        fused = draw(s, LMHead(w), params, cut)
        assert torch.equal(screened(s, LMHead(w), params, cut).token, fused.token)


def few_shares(device, num_rows=6, vocab=16_000, spread=1.0, **limit):
    """Rows with the same limits on logits of a deviation of 3 x ``spread``, and what the screen makes of them."""
    states, weight = random_problem(num_rows, vocab, 128, torch.bfloat16, device, seed=5)
    head, params = (
        LMHead(weight),
        rows(num_rows, device, greedy_every=num_rows + 1) | {"temperature": torch.ones(num_rows, device=device)},
    )
    cut = limit_all(num_rows, device, **limit)
    return assert_equal_to_the_fused_pass_and_the_reference(states * spread, head, params, cut)


def test_a_small_top_k_is_answered_from_a_part_of_the_head(device):
    found = few_shares(device, top_k=20)
    assert (found.rounds == 1).all()
    assert found.groups_read < 1000 / 2, "of 1000 groups, for 6 rows together"


def test_what_the_largest_groups_are_rules_out_more_than_what_they_are_at_least(device, monkeypatch):
    """Half the room between the two: a third of the groups, where logits fall off as slowly as these."""
    states, weight = random_problem(1, 60_000, 128, torch.bfloat16, device, seed=5)
    head, params, cut = LMHead(weight), rows(1, device, greedy_every=2), limit_all(1, device, top_k=8)
    params["temperature"].fill_(1.0)
    int8_head = Int8Head(head)
    int8_head.error *= 8  # as of 64 times as many columns
    found = screened(states, head, params, cut, int8_head=int8_head)
    bound = screened_sample_module.bound_truncated
    monkeypatch.setattr(
        screened_sample_module, "bound_truncated", lambda *given, again=False: again or bound(*given, again=again)
    )
    once = screened(states, head, params, cut, int8_head=int8_head)
    assert once.token == found.token == draw(states, head, params, cut).token
    assert found.groups_read < once.groups_read / 2, (found.groups_read, once.groups_read)


def test_ids_are_verified_one_by_one_and_bring_back_the_groups_that_they_reach_for(device):
    """A batch of ID_ROWS rows is answered from fewer bytes of the head than in a larger batch, which reads groups."""
    states, weight = random_problem(ID_ROWS + 1, 16_000, 96, torch.bfloat16, device, seed=5)
    params = rows(ID_ROWS + 1, device)
    head, cut = LMHead(weight), limit_all(ID_ROWS + 1, device, top_k=6)
    int8_head = Int8Head(head)
    int8_head.error *= 6
    fused = draw(states, head, params, cut)
    larger = screened(states, head, params, cut, int8_head=int8_head)
    fewer = {name: values[:ID_ROWS] for name, values in params.items()}
    found = screened(states[:ID_ROWS], head, fewer, take(cut, slice(0, ID_ROWS)), int8_head=int8_head)
    assert torch.equal(larger.token, fused.token) and torch.equal(found.token, fused.token[:ID_ROWS])
    assert found.groups_read < larger.groups_read / 2, (found.groups_read, larger.groups_read)


def test_top_p_beside_a_small_top_k_is_answered_where_the_mass_is_known_well_enough(device):
    assert (few_shares(device, top_k=20, top_p=0.95).rounds == 1).float().mean() > 0.8
    assert (few_shares(device, top_k=20, top_p=0.95, min_p=0.01).rounds == 1).all(), "of what top-k leaves: known"


def test_top_p_and_min_p_without_a_top_k_are_answered_where_few_tokens_matter(device):
    assert (few_shares(device, spread=2.0, min_p=0.2).rounds == 1).all()
    assert (few_shares(device, spread=3.0, top_p=0.5).rounds == 1).float().mean() > 0.8
    flat = few_shares(device, num_rows=3, spread=0.1, top_p=0.9)
    assert (flat.rounds > 1).all() and flat.groups_read >= 1000, "all of the head is read where all of it matters"


def test_a_row_that_is_left_does_not_make_the_others_read_more(device):
    states, weight = random_problem(2, 6000, 128, torch.bfloat16, device, seed=5)
    states[1] *= 0.1
    head, params = LMHead(weight), rows(2, device) | {"temperature": torch.ones(2, device=device)}
    cut = limit_all(2, device, top_k=10)
    few = screened(states, head, params, cut)
    cut.top_k[1], cut.top_p[1] = 0, 0.9
    left = screened(states, head, params, cut)
    assert left.rounds[0] == 1 < left.rounds[1] and left.token[0] == few.token[0]
    assert left.groups_read >= 375 > few.groups_read


@CONFIGS
def test_what_the_screen_says_of_groups_holds_what_is_true_of_them(device, config):
    states, weight = random_problem(9, 805, 96, torch.bfloat16, device, seed=2)
    head, params = LMHead(weight, softcap=30.0), rows(9, device)
    params["temperature"] = 0.3 + torch.arange(9, device=device) / 5
    int8_head, cut = Int8Head(head), limit_all(9, device, top_k=5)
    bias = torch.where(torch.arange(805, device=device) % 50 < 17, -float("inf"), 0.5).expand(9, -1).contiguous()
    edits, workspace = LogitEdits(bias=bias), ScreenWorkspace(int8_head, 9)
    quantize_hidden(states, int8_head, workspace, config)
    screen_head(head, int8_head, 9, *params.values(), workspace, config, edits, cut)
    groups = -(-805 // 16)
    upper = workspace.upper[: 9 * groups].view(groups, 9).T
    reach, most, least = (
        values[: 9 * groups].view(9, groups) for values in (workspace.reach, workspace.most, workspace.least)
    )
    logits = edit_logits_ref(logits_ref(states, weight, softcap=30.0), bias=bias)
    logits = torch.nn.functional.pad(logits.double(), (0, -805 % 16), value=-float("inf")).view(9, groups, 16)
    peak, mass = logits.amax(-1), (logits / params["temperature"].double()[:, None, None]).logsumexp(-1)
    assert (reach <= peak).all() and (peak <= upper).all()
    assert (least <= mass).all() and (mass <= most).all()
    some = peak > -float("inf")
    assert 0 < some.sum() < some.numel() and (upper[~some] == -float("inf")).all()
    assert (upper - reach)[some].median() < 1.0, "and little more"
    assert ((most - least)[some] > 0).all()


def test_a_screen_whose_bound_is_too_small_draws_other_tokens(device):
    states, weight = random_problem(12, 2000, 64, torch.float32, device, seed=8)
    states[:, 0], weight[:, 0] = 0.0, 200.0  # a column that decides the copy's steps and none of the logits
    head, params = LMHead(weight), rows(12, device) | {"temperature": torch.ones(12, device=device)}
    cut, int8_head = limit_all(12, device, top_k=3), Int8Head(head)
    fused = draw(states, head, params, cut)
    assert torch.equal(screened(states, head, params, cut, int8_head=int8_head).token, fused.token)
    int8_head.error *= 0.5
    assert torch.equal(screened(states, head, params, cut, int8_head=int8_head).token, fused.token), "not yet"
    int8_head.error *= 0.0
    assert (screened(states, head, params, cut, int8_head=int8_head).token != fused.token).any()


def test_a_bound_that_is_wide_is_late_and_not_wrong(device):
    states, weight = random_problem(12, 6000, 96, torch.bfloat16, device, seed=8)
    head, params = LMHead(weight), rows(12, device) | {"temperature": torch.ones(12, device=device)}
    int8_head, cut = Int8Head(head), limit_all(12, device, top_k=8, top_p=0.04)
    int8_head.error *= 12  # the mass could be many times what it is
    fused = draw(states, head, params, cut)
    found = screened(states, head, params, cut, int8_head=int8_head)
    assert torch.equal(found.token, fused.token)
    assert (found.rounds > 1).any(), "their mass is not known well enough"
    assert (found.rounds == 1).any(), "the largest logit is allowed whatever the mass is"


def test_what_min_p_allows_below_the_groups_that_the_draw_has_room_for_is_drawn_too(device):
    """The screen promises less of a logit than it turns out to be: what min-p allows may lie above what no other group
    reaches and yet below the last group that the draw has looked at."""
    states, weight = random_problem(16, 16_000, 64, torch.bfloat16, device, seed=8)
    params = rows(16, device, greedy_every=17) | {"temperature": torch.full((16,), 2.0, device=device)}
    head, cut = LMHead(weight), limit_all(16, device, min_p=0.05)
    int8_head, fused = Int8Head(head), draw(states, head, params, cut)
    for wider in (1, 20):
        int8_head.error *= wider
        found = screened(states, head, params, cut, int8_head=int8_head)
        assert torch.equal(found.token, fused.token)
        assert (found.rounds > 1).any(), "too many groups, and so the whole head"


def test_more_equal_logits_than_the_draw_has_room_for_are_all_drawn(device):
    states, head, params, tied = ties_apart(12, device)
    cut = limit_all(12, device, top_k=20)
    found = screened(states, head, params, cut)
    assert torch.equal(found.token, draw(states, head, params, cut).token)
    assert torch.isin(found.token, tied).all() and (found.token > tied[128]).any(), (
        "also those of spans that no list had room for"
    )
