"""Rows with top-k, top-p or min-p: the meaning of the limits, and every way of finding a row's token.

A row's status says which way that was: 0 without a limit, 1 in one pass, more where it took a search.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from kernel_cases import (
    CUDA,
    PATHS,
    READ,
    TILE,
    TRUNCATION,
    Case,
    assert_equal_to_reference,
    draw,
    expected,
    limits,
    limits_by_row,
    make_case,
    make_params,
    mixed_limits,
    near_a_limit_of_top_p,
    reference,
    spelled_out,
    take,
    ties_apart,
)

import sgl_flashsample.kernels.sample_truncated
from sgl_flashsample.kernels.config import ReadConfig, TileConfig, TruncationConfig
from sgl_flashsample.kernels.epilogue import num_top_groups
from sgl_flashsample.kernels.launch import resident_programs
from sgl_flashsample.kernels.lm_head_sample import num_splits
from sgl_flashsample.kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput, Truncation
from sgl_flashsample.kernels.reference import (
    allowed_ref,
    group_noise_ref,
    group_scores_ref,
    logits_ref,
    token_scores_ref,
)
from sgl_flashsample.kernels.sample_logits import max_read_splits, num_read_splits, sample_logits
from sgl_flashsample.kernels.sample_truncated import sample_truncated
from sgl_flashsample.kernels.search_truncated import search_truncated
from sgl_flashsample.kernels.workspace import LogitsBuffer, Workspace

# One split for the whole vocabulary: few tokens are certain to come next, so many rows are left to the search.
ONE_SPLIT = TileConfig(16, 128, 64, 4, 3) if CUDA else TileConfig(64, 2048, 64, 4, 1, tma=False, reduce_rows=64)
on_every_path = pytest.mark.parametrize("path", PATHS)
pytestmark = pytest.mark.slow


# --- what the limits mean -------------------------------------------------------------------------------------------

# Two 7s, a 6, five 5s, a 4, ...: equal logits stay or go together.
VALUES = [0.0, 7.0, 5.0, -1.0, 5.0, 6.0, 5.0, 7.0, 5.0, 4.0, -1.0, 5.0, 0.0]
SEVENS, SIX, FIVES, FOUR = {1, 7}, {5}, {2, 4, 6, 8, 11}, {9}
ALLOWED = [
    ({"top_k": 1}, SEVENS),
    ({"top_k": 2}, SEVENS),
    ({"top_k": 3}, SEVENS | SIX),
    ({"top_k": 4}, SEVENS | SIX | FIVES),
    ({"top_k": 8}, SEVENS | SIX | FIVES),
    ({"top_k": 9}, SEVENS | SIX | FIVES | FOUR),
    ({"top_p": 0.5}, SEVENS),
    ({"top_p": 0.74}, SEVENS | SIX),
    ({"top_p": 0.84}, SEVENS | SIX | FIVES),
    ({"min_p": 0.9}, SEVENS),
    ({"min_p": 0.36}, SEVENS | SIX),
    ({"min_p": 0.13}, SEVENS | SIX | FIVES),
    ({"top_k": 4, "top_p": 0.74}, SEVENS | SIX),
    ({"top_k": 3, "top_p": 0.84}, SEVENS | SIX),
    # With min-p, top-p is a share of the mass that top-k allows: the two 7s reach 0.84 of the three largest.
    ({"top_k": 3, "top_p": 0.84, "min_p": 0.001}, SEVENS),
    ({"top_k": 3, "top_p": 0.85, "min_p": 0.001}, SEVENS | SIX),
]


def test_the_reference_allows_what_the_definition_does():
    truncation = limits_by_row([limit for limit, _ in ALLOWED], torch.device("cpu"))
    logits = torch.tensor(VALUES, dtype=torch.float64).expand(len(ALLOWED), -1)
    allowed = allowed_ref(logits, torch.ones(len(ALLOWED)), truncation.top_k, truncation.top_p, truncation.min_p)
    for row, (limit, ids) in zip(allowed, ALLOWED, strict=True):
        assert set(row.nonzero()[:, 0].tolist()) == ids, limit


def races(logits: torch.Tensor, num_positions: int) -> torch.Tensor:
    """``[P, V]``: the scores of one row's tokens at each position, with seed 3 and temperature 1."""
    position = torch.arange(num_positions, device=logits.device)
    rows = logits.double().expand(num_positions, -1)
    return token_scores_ref(rows, torch.ones_like(position), torch.full_like(position, 3), position)


@on_every_path
def test_equal_logits_at_a_limit_stay_or_go_together(device, path):
    """The last of the smallest allowed logits is drawn at a position where its score is the best. The first of the
    largest forbidden logits is not drawn where its score is the best."""
    smallest = [max(ids, key=lambda i: (-VALUES[i], i)) for _, ids in ALLOWED]
    largest = [min(set(range(len(VALUES))) - ids, key=lambda i: (-VALUES[i], i)) for _, ids in ALLOWED]
    winner = races(torch.tensor(VALUES, device=device), 20_000).argmax(1)
    position = torch.stack([(winner == token).nonzero()[0, 0] for token in smallest + largest])
    case = spelled_out(VALUES, len(position), device)
    case = case.with_params(position=position, truncation=limits_by_row([limit for limit, _ in ALLOWED] * 2, device))
    drawn = draw(path, case)
    assert_equal_to_reference(case, drawn, 0.0)
    tokens = drawn.token_ids.tolist()
    assert tokens[: len(ALLOWED)] == smallest
    for token, (limit, ids) in zip(tokens[len(ALLOWED) :], ALLOWED, strict=True):
        assert token in ids, limit


@on_every_path
def test_a_token_with_just_top_p_of_the_mass_above_it_is_not_allowed(device, path):
    """With less mass above it, it is allowed. Float32 sums the weights 1, 1/2 and 1/2 exactly; top-p is half of
    them."""
    values = [-200.0] * 64
    values[0], values[16], values[32] = 0.0, -0.6931472, -0.6931472
    case = spelled_out(values, 12, device).with_params(truncation=limits(12, device, top_k=3, top_p=0.5, min_p=1e-6))
    assert draw(path, case).token_ids.tolist() == [0] * 12


@pytest.mark.parametrize("share", [1e-5, -1e-5])
@pytest.mark.parametrize("top_k", [50, 0])
@on_every_path
def test_top_p_lets_the_right_tokens_through_at_any_temperature(device, path, top_k, share):
    case, fourth = near_a_limit_of_top_p(device, top_k, share)
    assert len(fourth) > 8
    drawn = draw(path, case, logprobs=False).token_ids
    assert ((drawn == fourth) == (share > 0)).all()


def test_min_p_is_of_the_distribution_at_temperature(device):
    case = make_case(12, 400, device, dtype=torch.float32, seed=6)
    temperature = torch.where(torch.arange(12, device=device) % 2 == 0, 0.5, 3.0)
    truncation = limits_by_row([{"min_p": 0.5}, {"min_p": 0.5, "top_k": 50}, {"min_p": 0.5, "top_p": 0.9}] * 4, device)
    case = case.with_params(temperature=temperature, truncation=truncation)
    assert_equal_to_reference(case, draw("fused", case), 0.1)


# --- the ways of finding a token -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 6.0], ids=["peaked", "flat"])
@pytest.mark.parametrize("path", ["fused", "logits"])
def test_a_small_top_k_takes_one_pass_whatever_the_distribution(device, path, temperature):
    row_limits = [{"top_k": 30}, {"top_k": 20, "top_p": 0.6}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}, {"top_k": 64}]
    case = make_case(len(row_limits), 12_001, device, dtype=torch.float32, seed=5)
    case = case.with_params(temperature=torch.full((len(row_limits),), temperature, device=device))
    case = case.with_params(truncation=limits_by_row(row_limits, device))
    drawn = draw(path, case)
    assert drawn.status.tolist() == [1] * len(row_limits)
    assert_equal_to_reference(case, drawn, 0.3)


def test_a_small_top_k_with_more_ties_than_there_is_room_to_list_is_searched(device):
    case = spelled_out([1.0] * 3000 + [2.0], 3, device).with_params(truncation=limits(3, device, top_k=5))
    drawn = draw("fused", case)
    assert (drawn.status > 1).all()
    assert_equal_to_reference(case, drawn, 0.01)


@on_every_path
def test_ties_in_more_sets_of_groups_than_there_is_room_to_list_are_all_drawn(device, path):
    num_rows = 64 if CUDA else 10
    case, tied = ties_apart(num_rows, device)
    case = case.with_params(truncation=limits(num_rows, device, top_k=20))
    drawn = draw(path, case)
    assert torch.isin(drawn.token_ids, tied).all()
    assert (drawn.token_ids > tied[128]).any(), "of 200 blocks, 71 are beyond the list"
    assert (drawn.status > 1).all(), "the search answers"
    assert_equal_to_reference(case, drawn, 0.01)


@pytest.mark.parametrize("path", ["fused", "logits"])
def test_the_number_of_programs_that_share_a_row_does_not_change_a_bit(device, path, monkeypatch):
    num_rows = 6
    case = make_case(num_rows, 20_000, device, dtype=torch.float32)
    case = case.with_params(
        temperature=torch.full((num_rows,), 2.0, device=device), truncation=limits(num_rows, device, top_p=0.7)
    )
    drawn = []
    for resident in (1, 1000):
        monkeypatch.setattr(sgl_flashsample.kernels.sample_truncated, "_RESIDENT", resident)
        drawn.append(draw(path, case, truncation_config=TruncationConfig()))  # 8 parts
    assert (drawn[0].status == 1).any()
    for name in ("token_ids", "scores", "logprobs"):
        assert torch.equal(getattr(drawn[0], name), getattr(drawn[1], name)), name


ZEROS = {
    "nothing but zeros": ([0.0] * 2048, 3),
    "a zero is the last of the largest": ([{5: 1.0, 19: 0.5, 39: 0.25, 57: 0.0}.get(i, -9.0) for i in range(512)], 4),
    "a zero is the largest": ([{700: 0.0}.get(i, -9.0) for i in range(1024)], 1),
}


@on_every_path
@pytest.mark.parametrize("name", ZEROS)
def test_a_logit_of_zero_is_a_number_like_any_other(device, path, name):
    """Beside it is -0.0, which is not smaller."""
    values, top_k = ZEROS[name]
    case = spelled_out(values, 24, device).with_params(
        temperature=torch.full((24,), 50.0, device=device), truncation=limits(24, device, top_k=top_k)
    )
    drawn = draw(path, case)
    assert path == "screened" or len(values) == 2048 or (drawn.status == 1).all()
    assert_equal_to_reference(case, drawn, 0.01)


@on_every_path
def test_zeros_tied_at_the_end_of_a_top_k_are_in_the_mass_that_top_p_is_a_share_of(device, path):
    """Thirty ones, and zeros, of which top-k 100 leaves all: the ones have less than .3 of that mass."""
    values = [1.0 if i % 64 == 3 and i < 1920 else 0.0 for i in range(2048)]
    case = spelled_out(values, 24, device).with_params(
        temperature=torch.ones(24, device=device), truncation=limits(24, device, top_k=100, top_p=0.3, min_p=0.01)
    )
    assert_equal_to_reference(case, draw(path, case, truncation_config=TruncationConfig()), 0.01)


def distinct(num_values: int, num_rows: int, device: torch.device, step: float, **limit) -> Case:
    """Logits 0, step, 2 step, ... in every row, in this order."""
    case = spelled_out([step * i for i in range(num_values)], num_rows, device)
    return case.with_params(truncation=limits(num_rows, device, **limit))


@on_every_path
def test_a_large_top_k_leaves_exactly_k(device, path):
    """More than a small one, so that its tokens are measured: of 100 logits that are close together, 70."""
    case = distinct(100, 40, device, 1 / 64, top_k=70)
    drawn = draw(path, case)
    assert drawn.token_ids.min() >= 30
    assert path == "screened" or (drawn.status == 1).any()
    assert (drawn.token_ids < 40).any(), "also the last of those that are allowed"
    assert_equal_to_reference(case, drawn, 0.05)


@on_every_path
def test_a_large_top_k_with_min_p_takes_top_p_of_what_top_k_has_left(device, path):
    """Of 200 logits, close together: half the mass of 70 of them is that of 29, half of all that of 60."""
    case = distinct(200, 10, device, 1 / 256, top_k=70, top_p=0.5, min_p=1e-4)
    drawn = draw(path, case)
    assert drawn.token_ids.min() >= 165
    assert (drawn.status > 1).any()
    assert_equal_to_reference(case, drawn, 0.15)


def test_the_second_the_third_and_the_fourth_candidate_are_taken_where_those_before_are_forbidden(device):
    """Flat rows with a large top-k: in one pass, also where the plain token is not allowed."""
    case = distinct(300, 24, device, 1 / 128, top_k=100)
    drawn, plain = draw("fused", case), draw("fused", case.with_params(truncation=None))
    assert_equal_to_reference(case, drawn, 0.05)
    one_pass = drawn.status == 1
    assert (one_pass & (drawn.token_ids != plain.token_ids)).sum() >= 3
    if not CUDA:  # there, a split for each tile leaves every group behind
        assert (drawn.status > 1).any(), "where four are not enough"


def test_a_row_whose_first_token_is_allowed_takes_no_search(device):
    case = make_case(16, 1500, device, dtype=torch.float32, seed=2)
    each = [{"top_k": 40, "top_p": 0.95}, {"top_p": 0.9}, {"top_k": 200}, {"min_p": 0.1}]
    temperature = torch.full((16,), 0.7, device=device)
    case = case.with_params(temperature=temperature, truncation=limits_by_row(each * 4, device))
    truncation, drawn = case.params.truncation, draw("fused", case)
    allowed = allowed_ref(case.edited, temperature, truncation.top_k, truncation.top_p, truncation.min_p)
    plain = expected(case.with_params(truncation=None)).token
    first = allowed.gather(1, plain[:, None])[:, 0]
    assert first.sum() > 8
    assert (drawn.status[first] == 1).all()
    assert_equal_to_reference(case, drawn, 0.15)


def test_a_row_whose_first_candidates_are_all_forbidden_is_searched(device):
    """Flat rows with room for a few ids: the first arrivals are others. No top-k but 1 is a small one here."""
    each = [{"top_k": 2}, {"top_p": 0.001}, {"min_p": 0.8}, {"top_k": 9, "top_p": 0.5, "min_p": 0.3}]
    case = make_case(8, 1500, device, dtype=torch.float32, seed=2)
    case = case.with_params(
        temperature=torch.full((8,), 6.0, device=device), truncation=limits_by_row(each * 2, device)
    )
    drawn = draw("fused", case, truncation_config=dataclasses.replace(TRUNCATION, candidate_groups=2))
    assert (drawn.status > 1).sum() >= 5
    assert_equal_to_reference(case, drawn, 0.15)


def test_a_row_is_searched_with_one_tile_and_answered_at_once_with_another_to_the_same_token(device):
    """With one split, few tokens are certain to come next."""
    case = distinct(1500, 12, device, 1 / 1024, top_k=400)
    many, one = draw("fused", case), draw("fused", case, ONE_SPLIT)
    assert torch.equal(many.token_ids, one.token_ids)
    assert CUDA or ((one.status > 1) & (many.status == 1)).any()
    assert_equal_to_reference(case, one, 0.05)


def test_a_token_that_may_come_after_a_group_that_was_not_left_is_not_taken_for_the_next(device):
    """The only id that is allowed, 3, is in the best group, but late; others come in between."""
    num_rows, spec = 6, LogitsSpec(48)
    params = dataclasses.replace(
        make_params(num_rows, spec, device),
        temperature=torch.ones(num_rows, device=device),
        truncation=limits(num_rows, device, top_p=0.01),
    )
    workspace = Workspace(2 * num_rows, device)
    splits, buffer = workspace.splits, workspace.logits_buffer(num_rows, spec, torch.float32, edited=False)
    splits.score[:num_rows], splits.score[num_rows:] = 9.0, 8.9
    splits.group[:num_rows], splits.group[num_rows:] = 0, 2
    splits.second.fill_(8.8)
    splits.logits.zero_()
    splits.logits[:num_rows, 3] = 1.0
    buffer.logits.zero_()
    buffer.logits[:, 3] = 1.0
    buffer.group_max.zero_()
    buffer.group_max[:, 0] = 1.0
    # The mass of ids 0 to 31, relative to 1.0, and of ids 32 to 47, relative to 0.0.
    splits.mass[:num_rows] = torch.tensor([1.0, 1.0 + 31 / math.e], device=device)
    splits.mass[num_rows:] = torch.tensor([0.0, 16.0], device=device)
    drawn = sample_truncated(workspace, buffer, 2, params, spec, return_logprob=False, max_splits=8, config=TRUNCATION)
    assert drawn.token_ids.tolist() == [3] * num_rows
    assert (buffer.status[:num_rows] > 1).sum() >= 3


# --- the results of splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["fused", "logits"])
def test_each_split_leaves_its_best_and_its_second_best_groups_score(device, path):
    """Few splits of many tiles: what comes second lies in another tile, often at the same place in it."""
    num_rows, vocab = (17, 50_257) if CUDA else (5, 700)
    case = make_case(num_rows, vocab, device, dtype=torch.float32, seed=9)
    temperature = torch.full((num_rows,), 0.8, device=device)
    case = case.with_params(temperature=temperature, truncation=limits(num_rows, device, 5))
    if path == "fused":
        config = TileConfig(16, 64, 64, 4, 3) if CUDA else TileConfig(16, 32, 64, 4, 1, 3, tma=False, reduce_rows=16)
        splits, bound = num_splits(case.head, num_rows, config), resident_programs(device, config.ctas_per_sm)
    else:
        config = ReadConfig(16, 64, 4, ctas_per_sm=3, min_splits=3)
        splits, bound = num_read_splits(vocab, num_rows, config, device), max_read_splits(device, config)
    workspace = draw(path, case, config).workspace
    top_groups = num_top_groups(True, config.block_v, bound)
    assert top_groups > 1
    noise = group_noise_ref(case.params.seed, case.params.position, vocab, 0)
    score = group_scores_ref(case.edited, temperature, noise)
    group = torch.arange(score.shape[1], device=device)
    slot = group * 16 // config.block_v % splits * top_groups + group % top_groups
    for number in range(splits * top_groups):
        best, second = score[:, slot == number].topk(2, dim=1).values.unbind(1)
        rows = slice(number * num_rows, (number + 1) * num_rows)
        torch.testing.assert_close(workspace.splits.score[rows].double(), best, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(workspace.splits.second[rows].double(), second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", ["fused", "logits"])
def test_a_block_of_rows_leaves_the_logits_of_its_limited_rows_and_of_no_other(device, path):
    """100 rows in one block: more than the bits of one integer."""
    num_rows, vocab = 100, 300
    case = make_case(num_rows, vocab, device, dtype=torch.float32, seed=7)
    limited = (torch.rand(num_rows, generator=torch.Generator().manual_seed(1)) < 0.5).to(device)
    truncation = limits(num_rows, device)
    truncation.min_p[limited] = 0.9
    case = case.with_params(temperature=torch.ones(num_rows, device=device), truncation=truncation)
    config = READ if path == "logits" else TILE
    config = dataclasses.replace(config, block_b=128, block_v=128, num_warps=8, reduce_rows=64)
    workspace = Workspace(10 * num_rows, device)
    buffer = workspace.logits_buffer(num_rows, case.head.spec, torch.float32, edited=False)
    buffer.logits.fill_(-77.0)
    draw(path, case, config, workspace=workspace, truncation_config=dataclasses.replace(TRUNCATION, splits=1))
    assert torch.equal((buffer.logits[:, :vocab] != -77.0).all(1), limited)
    assert (buffer.logits[~limited] == -77.0).all()
    assert torch.equal(buffer.logits[limited, :vocab].double(), case.edited[limited])
    assert (buffer.logits[limited, vocab:] == float("-inf")).all()


def test_logits_are_left_as_they_are_drawn_from_in_the_fewest_bytes_that_hold_them(device):
    case = make_case(3, 300, device, "truncate", torch.bfloat16)
    for options, edited, dtype in (
        ({}, False, torch.bfloat16),
        ({"logit_scale": 3.0}, False, torch.bfloat16),
        ({"softcap": 5.0}, False, torch.float32),
        ({"logits_dtype": torch.float32}, False, torch.float32),
        ({}, True, torch.float32),
    ):
        head = LMHead(case.head.weight, **options)
        params = make_params(3, head.spec, device, "edit+truncate" if edited else "truncate")
        some = Case(case.hidden, head, params)
        buffer = draw("fused", some).workspace.last_buffer
        assert buffer.dtype is buffer.logits.dtype is dtype
        limited = some.limited
        torch.testing.assert_close(
            buffer.logits[:3][limited, :300].double(), some.edited[limited], rtol=1e-6, atol=1e-6
        )


def test_a_row_of_nothing_reads_no_slot_that_no_split_has_written(device):
    """With one split there is one slot per row. The memory after it belongs to no split."""
    head, nan = LMHead(torch.zeros(100, 16, device=device)), torch.full((1, 16), float("nan"), device=device)
    params = dataclasses.replace(make_params(1, head.spec, device), truncation=limits(1, device, 5))
    workspace = Workspace(64, device)
    for name, value in (("score", 9.0), ("logits", 1.0), ("group", 4)):
        getattr(workspace.splits, name).fill_(value)
    assert draw("fused", Case(nan, head, params), workspace=workspace).token_ids.tolist() == [0]


def test_what_is_masked_is_never_drawn_however_many_may_be(device):
    weight = torch.zeros(300, 16, device=device)
    weight[10:290] = float("nan")
    each = [{"top_k": 200}, {"top_p": 0.999}, {"min_p": 1e-9}]
    params = dataclasses.replace(make_params(15, LogitsSpec(300), device), truncation=limits_by_row(each * 5, device))
    token = draw("fused", Case(torch.ones(15, 16, device=device), LMHead(weight), params)).token_ids
    assert ((token < 10) | (token >= 290)).all()
    assert len(set(token.tolist())) > 5


# --- the search alone, on given logits -------------------------------------------------------------------

FEW = TruncationConfig(num_warps=4, search_splits=1, search_warps=4, window=1, gather=1)
MANY = TruncationConfig(num_warps=4, search_splits=2, search_warps=4, window=8, gather=64)
at_once = pytest.mark.parametrize("config", [FEW, MANY], ids=["few at a time", "many at a time"])


def search(
    logits, params: BatchParams, config=MANY, dtype=torch.float32, marked=None
) -> tuple[SampleOutput, torch.Tensor]:
    """The output and the statuses of all rows, of which the marked ones are searched."""
    num_rows, vocab = logits.shape
    buffer = LogitsBuffer(num_rows, vocab, dtype, logits.device)
    buffer.logits.fill_(float("-inf"))
    buffer.logits[:, :vocab] = logits
    buffer.group_max.copy_(buffer.logits.float().view(num_rows, -1, 16).amax(-1))
    marked = torch.ones(num_rows, dtype=torch.bool, device=logits.device) if marked is None else marked
    buffer.status.copy_(torch.where(marked, -1, 1))
    output = SampleOutput.empty(num_rows, logits.device, True)
    for tensor in output:
        tensor.fill_(-7)
    search_truncated(buffer, params, LogitsSpec(vocab), output, config)
    assert buffer.operands.searched.item() == marked.sum()
    assert not buffer.operands.arrived.any()
    return output, buffer.status


def search_case(num_rows, vocab, device, truncation, spread=2.5, seed=0) -> tuple[torch.Tensor, BatchParams]:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab, generator=g) * spread).to(device)
    params = make_params(num_rows, LogitsSpec(vocab), device, seed=seed)
    return logits, dataclasses.replace(
        params, temperature=torch.linspace(0.4, 1.6, num_rows, device=device), truncation=truncation
    )


def assert_found(output: SampleOutput, logits, params, max_near_ties=0.15) -> None:
    want = reference(logits.double(), params)
    certain = ~want.near_tie
    assert torch.equal(output.token_ids[certain], want.token[certain])
    assert want.near_tie.double().mean().item() <= max_near_ties
    assert ((output.logprobs - want.logprob_low).abs() <= 1e-4)[certain].all()
    log_mass = torch.logsumexp(logits.double() / params.temperature.double()[:, None], 1)
    torch.testing.assert_close(output.log_mass.double().sum(-1), log_mass, rtol=1e-6, atol=1e-4)
    scores = token_scores_ref(logits.double(), params.temperature, params.seed, params.position)
    score = scores.gather(1, output.token_ids[:, None])[:, 0]
    torch.testing.assert_close(output.scores.double(), score, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows, vocab", [(2, 1), (7, 127), (7, 129), (7, 2003), *([(63, 151_937)] if CUDA else [])])
@at_once
def test_a_search_with_any_combination_of_limits_equals_the_reference(device, num_rows, vocab, config):
    truncation = mixed_limits(2 * num_rows, vocab, device)
    limited = torch.tensor([i for i in range(2 * num_rows) if (i + 3) % 8][:num_rows], device=device)
    truncation = Truncation(truncation.top_k[limited], truncation.top_p[limited], truncation.min_p[limited])
    if vocab == 1:
        truncation = limits(num_rows, device, top_p=0.5)
    logits, params = search_case(num_rows, vocab, device, truncation)
    assert_found(search(logits, params, config)[0], logits, params, 0.3)


def test_a_search_of_logits_in_two_bytes_has_many_ties(device):
    each = [{"top_k": 30}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 100, "top_p": 0.7}, {"top_k": 9, "min_p": 0.1}]
    logits, params = search_case(len(each), 2000, device, limits_by_row(each, device))
    logits = logits.bfloat16().float()
    assert_found(search(logits, params, dtype=torch.bfloat16)[0], logits, params, 0.2)


@at_once
def test_a_search_of_a_flat_row_asks_as_often_as_it_needs(device, config):
    """For min-p it asks nothing: the largest logit alone gives that limit."""
    each = [{"top_k": 1}, {"top_k": 30}, {"top_p": 0.0}, {"top_p": 0.3}, {"top_k": 40, "top_p": 0.2}, {"min_p": 0.7}]
    logits, params = search_case(6, 1500, device, limits_by_row(each, device), spread=0.7, seed=3)
    params.temperature.fill_(1.0)
    output, status = search(logits, params, config)
    assert_found(output, logits, params, 0.2)
    assert (status[:5] > 2).any() and (status[:5] > 1).all() and status[5] == 2


def search_races(logits, position, truncation) -> torch.Tensor:
    """The tokens that the search finds in one row's logits, at these of its ``races``."""
    num_rows = len(position)
    seed = torch.full_like(position, 3)
    params = BatchParams(torch.ones(num_rows, device=logits.device), seed, position, truncation)
    output, _ = search(logits.expand(num_rows, -1), params)
    assert_found(output, logits.expand(num_rows, -1), params, 0.0)
    return output.token_ids


@pytest.mark.parametrize("share", [1e-5, -1e-5])
def test_a_search_lets_the_right_tokens_through_at_any_temperature(device, share):
    case, fourth = near_a_limit_of_top_p(device, 0, share)
    tokens = search(case.edited.float(), case.params)[0].token_ids
    assert ((tokens == fourth) == (share > 0)).all()


def test_a_search_lets_exactly_k_through(device):
    """A top-k of 70 out of 128 logits that are close together allows 58 and more. The row decides about 58, the last
    allowed id, or 57, the next one: as the best id, or as the second best after a smaller, forbidden id."""
    logits = torch.arange(128, device=device) / 256
    scores = races(logits, 2000)
    first = scores.argmax(1)
    second = torch.where(torch.arange(128, device=device) > first[:, None], scores, float("-inf")).argmax(1)
    decide = [first == 58, first == 57, (first < 57) & (second == 58), (first < 57) & (second == 57)]
    position = torch.stack([rows.nonzero()[0, 0] for rows in decide])
    token = search_races(logits, position, limits(4, device, top_k=70))
    assert token[[0, 2]].tolist() == [58, 58]
    assert (token[[1, 3]] > 58).all()


@pytest.mark.parametrize("apart", [1, 40], ids=["one group", "five groups"])
def test_a_search_takes_top_p_of_just_what_top_k_has_left(device, apart):
    """With min-p on. Two 3s and three 2s are left, by a top-k of 4, with a tie, and of 5. The 2s are allowed where
    top-p is more than the share of the 3s, which 200 ones are no part of."""
    logits, allowed_ids = torch.ones(205, device=device), torch.arange(5, device=device) * apart
    logits[allowed_ids] = torch.tensor([3.0, 3.0, 2.0, 2.0, 2.0], device=device)
    share = 2 / (2 + 3 * math.exp(-1))
    each = [{"top_k": k, "top_p": share + more, "min_p": 1e-6} for k in (4, 5) for more in (1e-3, -1e-3)]
    position = (races(logits, 100)[:, allowed_ids].argmax(1) >= 2).nonzero()[:4, 0]
    token = search_races(logits, position, limits_by_row(each, device))
    assert logits[token].tolist() == [2.0, 3.0, 2.0, 3.0]


def test_a_search_leaves_answered_rows_as_they_are(device):
    logits, params = search_case(6, 300, device, limits(6, device, top_k=3))
    marked = torch.tensor([True, False, False, True, False, True], device=device)
    output, status = search(logits, params, marked=marked)
    want = reference(logits.double(), params)
    assert torch.equal(output.token_ids[marked], want.token[marked])
    for tensor in output:
        assert (tensor[~marked] == -7).all()
    assert (status[~marked] == 1).all()


def test_a_search_never_finds_what_is_masked_and_ends_where_there_is_nothing(device):
    each = [{"top_k": 100}, {"top_p": 0.9999}, {"min_p": 1e-9}, {"top_k": 3, "top_p": 0.9, "min_p": 0.01}]
    logits, params = search_case(8, 700, device, limits_by_row(each * 2, device))
    logits[:, 5:690] = float("-inf")
    logits[4:] = float("-inf")
    token = search(logits, params)[0].token_ids
    assert token[4:].tolist() == [0] * 4
    some = take(params, torch.arange(4, device=device))
    want = reference(logits[:4].double(), some)
    assert torch.equal(token[:4][~want.near_tie], want.token[~want.near_tie])


# --- scratch and arguments ------------------------------------------------------------------------------------------


def test_rows_that_were_searched_are_counted_where_the_caller_says(device):
    searched = torch.full((1,), 5, dtype=torch.int64, device=device)
    workspace = Workspace(640, device, searched)
    case = spelled_out([1.0] * 3000 + [2.0], 3, device).with_params(truncation=limits(3, device, top_k=5))
    drawn = draw("fused", case, workspace=workspace)
    assert searched.item() == 5 + int((drawn.status > 1).sum()) == 8


def test_room_for_logits_grows_by_doubling_and_stays_when_it_is_enough(device):
    workspace = Workspace(8, device)
    assert workspace.last_buffer is None

    def reserved(num_rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> LogitsBuffer:
        buffer = workspace.logits_buffer(num_rows, LogitsSpec(vocab), dtype, edited=False)
        assert workspace.last_buffer is buffer
        return buffer

    first = reserved(4, 1000)
    assert (first.num_rows, first.width) == (4, 1008)
    assert reserved(3, 1008) is first
    assert reserved(5, 1000).num_rows == 8
    assert reserved(9, 992).num_rows == 9, "another vocabulary starts anew"
    other = reserved(9, 992, torch.bfloat16)
    assert other.dtype is torch.bfloat16
    assert reserved(9, 992) is not other and reserved(9, 992, torch.bfloat16) is other, "each dtype has its own room"


def test_a_buffer_of_another_shape_is_refused(device):
    spec = LogitsSpec(400)
    params = make_params(3, spec, device, "truncate")
    for num_rows, width, message in (
        (2, 400, "buffer holds 2 rows of 400 logits; expected at least 3 rows of 400 rounded up to a multiple of 16"),
        (3, 384, "buffer holds 3 rows of 384 logits; expected at least 3 rows of 400"),
    ):
        buffer = LogitsBuffer(num_rows, width, torch.float32, device)
        with pytest.raises(ValueError, match=message):
            sample_truncated(
                Workspace(8, device), buffer, 1, params, spec, return_logprob=False, max_splits=8, config=TRUNCATION
            )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("vocab", [127, 50_257, 151_936, 151_937])
def test_many_rows_equal_the_reference(device, vocab, dtype):
    searched = 0
    for start in range(8):
        case = make_case(128, vocab, device, "truncate", dtype, hidden=256, seed=start)
        drawn = draw("fused", case, TileConfig(64, 128, 64, 4, 3))
        assert_equal_to_reference(case, drawn, 0.2)
        searched += int((drawn.status > 1).sum())
    assert searched > 0


@pytest.mark.gpu
def test_logits_of_a_real_gemm_give_the_fused_tokens_up_to_the_order_of_its_sums(device):
    """The GEMMs round differently: rows whose own logits agree must draw the same."""
    case = make_case(128, 151_936, device, dtype=torch.float16, hidden=1024)
    fused = draw("fused", case).token_ids
    raw = torch.mm(case.hidden, case.head.weight.T)
    assert (sample_logits(raw, case.head.spec, case.params, READ).token_ids == fused).double().mean() > 0.85
    assert torch.equal(logits_ref(case.hidden, case.head.weight).argmax(-1), raw.double().argmax(-1))
