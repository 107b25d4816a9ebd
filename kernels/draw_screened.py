"""The token of a row with a truncation, where only the groups of its largest logits were rescored.

Top-k and min-p ask for nothing else. Top-p is a share of the whole mass, of which the screen knows the ends: the tokens
that it allows of the most mass there could be hold those that it allows of the true one, and these hold those of the
least. So a token that wins among the first and is one of the last is the winner. A row without such a token, or with
more groups than the draw can hold, or whose limits reach below what was rescored, is left: its whole head is read, and
``search_truncated`` answers it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .bound_truncated import groups_to_find
from .draw_top_k import (
    bound_of_top_k,
    first_of_race,
    key_shift,
    largest_of_spans,
    list_groups_above,
    listed_logits,
    threshold_of,
    value_below,
)
from .features import Truncation
from .head import LISTED, ROW_POINTERS, SPAN, Kept, block_of_spans
from .int8_head import ScreenWorkspace
from .kept_row import lowest_allowed, ordered, value_of
from .launch import launch, starts_early
from .reduce_parts import OUTPUTS, Drawn
from .tiles import DrawConfig, ScreenConfig
from .truncates import truncates

_LOG2_E = tl.constexpr(1.4426950408889634)
_SPAN = tl.constexpr(SPAN)
_LISTED = tl.constexpr(LISTED)
# Of a mass: what a float32 sum of so many exponentials may be off by; and per unit of the largest exponent.
_SUM_SLACK = tl.constexpr(2.0**-12)
_EXPONENT_SLACK = tl.constexpr(2.0**-21)


@triton.jit
def mass_of_others(
    peak_row,
    most_row,
    least_row,
    low,
    reference,
    num_groups,
    BLOCK_S: tl.constexpr,
):
    """The most and the least mass of the groups without a rescored logit above ``low``, relative to ``reference``."""
    most = tl.zeros([BLOCK_S], tl.float32)
    least = tl.zeros([BLOCK_S], tl.float32)
    for place in tl.range(_SPAN):  # a loop, for few registers
        groups = tl.arange(0, BLOCK_S) * _SPAN + place
        inside = groups < num_groups
        other = inside & ~(tl.load(peak_row + groups, mask=inside, other=float("-inf")) > low)
        most += tl.exp(tl.load(most_row + groups, mask=other, other=float("-inf")) - reference)
        least += tl.exp(tl.load(least_row + groups, mask=other, other=float("-inf")) - reference)
    return tl.split(tl.sum(tl.join(most, least), axis=0))


@triton.jit
def draw_rescored(
    kept_row,
    peak_row,  # largest logit per group, -inf where it was not rescored
    most_row,
    least_row,
    list_ptr,  # scratch, 2 * CANDIDATES
    screened,  # no logit of another group is above
    inv_temperature,
    seed,
    position,
    top_k,
    top_p,
    min_p,
    vocab_size,
    num_groups,
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Token, its arrival, and whether that is certain."""
    of_span = largest_of_spans(peak_row, num_groups, BLOCK_S)
    largest = tl.max(of_span)
    wanted, complete = groups_to_find(top_k, vocab_size, CANDIDATES)
    bound = bound_of_top_k(of_span, largest, wanted, SHIFT)
    # The next number below: whatever is above ``screened`` is above this, in the kept logits' steps too.
    low = tl.maximum(bound, value_below((ordered(screened) >> SHIFT).to(tl.int64) - 1, SHIFT))
    num_chosen = list_groups_above(low, of_span, peak_row, list_ptr, num_groups, BLOCK_S, CANDIDATES)
    logits = listed_logits(kept_row, list_ptr, num_chosen, CANDIDATES)
    reference = tl.where(largest == float("-inf"), 0.0, largest) * inv_temperature
    weights = tl.exp2((logits * inv_temperature - reference) * _LOG2_E)
    limits_k = (top_k >= 1) & (top_k < vocab_size)
    k = tl.where(limits_k, top_k, vocab_size)
    p_most = tl.full([], float("inf"), tl.float32)
    p_least = tl.full([], float("inf"), tl.float32)
    # With min-p, top-p is of what top-k has left.
    of_top_k = (top_p < 1.0) & limits_k & (min_p > 0.0)
    known = complete | ~of_top_k
    if top_p < 1.0:
        if of_top_k:
            floor = threshold_of(logits, weights, low, largest, k, float("inf"), SHIFT)
            p_most = top_p * tl.sum(tl.where(logits > floor, weights, 0.0))
            p_least = p_most
        else:
            most, least = mass_of_others(peak_row, most_row, least_row, low, reference, num_groups, BLOCK_S)
            rescored = tl.sum(weights)
            slack = _SUM_SLACK + tl.abs(reference) * _EXPONENT_SLACK
            p_most = top_p * ((rescored + most) * (1.0 + slack))
            p_least = top_p * ((rescored + least) * (1.0 - slack))
    floor = threshold_of(logits, weights, low, largest, k, p_most, SHIFT)
    surely_allowed = floor
    if p_least < p_most:
        surely_allowed = threshold_of(logits, weights, low, largest, k, p_least, SHIFT)
    lowest = lowest_allowed(largest, inv_temperature, min_p)
    token, logit, score = first_of_race(
        kept_row, list_ptr, num_chosen, inv_temperature, seed, position, floor, lowest, CANDIDATES
    )
    complete |= (floor > low) | (lowest > low)
    certain = complete & known & (num_chosen <= CANDIDATES) & (logit > surely_allowed)
    return token, score, certain


@triton.jit(
    do_not_specialize=["vocab_size", "num_groups"],
    do_not_specialize_on_alignment=[*ROW_POINTERS, *OUTPUTS],
)
def draw_screened_kernel(
    kept_ptr,  # [B, kept_width]
    peak_ptr,  # [B, G] f32
    most_ptr,  # [B, G] f32
    least_ptr,  # [B, G] f32
    list_ptr,  # scratch [B, LISTED] i32
    threshold_ptr,  # [B] i32, ``ordered``
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    top_k_ptr,  # [B] i32
    top_p_ptr,  # [B] f32
    min_p_ptr,  # [B] f32
    token_ptr,  # in and out [B] i64: the other rows' stay
    best_score_ptr,  # in and out [B] f32
    rounds_ptr,  # out [B] i32: 0 without a truncation, 1 answered, -1 left
    vocab_size,
    num_groups,
    # constexpr
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    answer = tl.full([], 0, tl.int32)
    if (temperature > 0.0) & truncates(top_k_ptr, top_p_ptr, min_p_ptr, row, True, vocab_size):
        groups = row.to(tl.int64) * num_groups
        token, score, certain = draw_rescored(
            kept_ptr + groups * rng.GROUP_SIZE,
            peak_ptr + groups,
            most_ptr + groups,
            least_ptr + groups,
            list_ptr + row * _LISTED,
            value_of(tl.load(threshold_ptr + row)),
            1.0 / temperature,
            tl.load(seed_ptr + row),
            tl.load(position_ptr + row),
            tl.load(top_k_ptr + row),
            tl.load(top_p_ptr + row),
            tl.load(min_p_ptr + row),
            vocab_size,
            num_groups,
            BLOCK_S,
            CANDIDATES,
            KEY_SHIFT,
        )
        answer = tl.where(certain, 1, -1)
        tl.store(token_ptr + row, token.to(tl.int64))
        tl.store(best_score_ptr + row, score)
    tl.store(rounds_ptr + row, answer)


def draw_screened(
    drawn: Drawn,  # of the rows without a truncation
    vocab_size: int,
    temperature: torch.Tensor,  # [B] f32
    seed: torch.Tensor,  # [B] i64
    position: torch.Tensor,  # [B] i64
    truncation: Truncation,
    workspace: ScreenWorkspace,  # with what ``bound_truncated`` has left
    kept: Kept,  # with the rescored groups
    config: ScreenConfig,
    draw: DrawConfig,
) -> None:
    """Put the tokens of rows with a truncation into ``drawn``; ``kept.rounds`` is negative where they are to be
    searched for."""
    early = config.early and starts_early(temperature.device)
    launch(
        draw_screened_kernel,
        temperature.shape[0],
        (
            kept.logits,
            kept.peak,
            workspace.most,
            workspace.least,
            kept.first,
            workspace.threshold,
            temperature,
            seed,
            position,
            truncation.top_k,
            truncation.top_p,
            truncation.min_p,
            drawn.token,
            drawn.score,
            kept.rounds,
            vocab_size,
            kept.width // rng.GROUP_SIZE,
        ),
        {
            "BLOCK_S": block_of_spans(kept.width),
            "CANDIDATES": draw.candidates,
            "KEY_SHIFT": key_shift(kept.logits.dtype),
            "EARLY": early,
        },
        draw.num_warps,
        (temperature.device.index, kept.logits.dtype),
        early=early,
    )
