"""The token of a row with a top-k, from the groups that hold its largest logits. Device functions only.

What the largest logits of k spans are above, k logits are above. So the groups that reach it, about k, hold everything
that is allowed: they are listed, and what top-k, top-p and min-p allow of their logits is found exactly. Of that, the
first token of the race in ``draw_truncated`` wins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .epilogue import LIMIT
from .head import SPAN
from .kept_row import arrivals, list_spans, lowest_allowed, ordered, score_row_groups, value_of

_LOG2_E = tl.constexpr(1.4426950408889634)
_NO_TOKEN = tl.constexpr(2**31 - 1)
_SPAN = tl.constexpr(SPAN)
_GROUPS_AT_ONCE = tl.constexpr(32)  # the arithmetic of the noise is long: a loop over few keeps the code short


def key_shift(dtype: torch.dtype) -> int:
    """How many low bits of every number of ``dtype`` are zero in float32."""
    return 16 if dtype is torch.bfloat16 else 0


@triton.jit
def value_below(key, SHIFT: tl.constexpr):
    """The largest value with this key: values above it have larger keys."""
    return value_of(((key << SHIFT) | ((1 << SHIFT) - 1)).to(tl.int32))


@triton.jit
def bound_of_top_k(maxima, largest, k, SHIFT: tl.constexpr):
    """A number that ``k`` or a few more of the maxima are above, or all of them.

    SHIFT: how many low bits of all values are zero. Bisection over what is left, a few instructions.
    """
    failing = (ordered(tl.full([], -LIMIT * 2, tl.float32)) >> SHIFT).to(tl.int64)
    passing = (ordered(largest) >> SHIFT).to(tl.int64)
    num_above = tl.sum((maxima > float("-inf")).to(tl.int32))
    while (passing - failing > 1) & (num_above > k + k // 4 + 4):
        middle = (passing + failing) >> 1
        count = tl.sum((maxima > value_below(middle, SHIFT)).to(tl.int32))
        num_above = tl.where(count < k, num_above, count)
        passing = tl.where(count < k, middle, passing)
        failing = tl.where(count < k, failing, middle)
    return value_below(failing, SHIFT)


@triton.jit
def threshold_of(values, weights, low, largest, k, p, SHIFT: tl.constexpr):
    """A number x, ``low`` or above, such that exactly the values above x have fewer than ``k`` values and less than
    ``p`` of the weight above them. Nothing is above the largest value: that one always passes.
    """
    failing = (ordered(low) >> SHIFT).to(tl.int64)
    passing = (ordered(largest) >> SHIFT).to(tl.int64)
    while passing - failing > 1:
        middle = (passing + failing) >> 1
        larger = values > value_below(middle, SHIFT)
        counted = tl.join(tl.where(larger, 1.0, 0.0), tl.where(larger, weights, 0.0))
        count, mass = tl.split(tl.sum(counted, axis=0))
        passes = ((count < k) & (mass < p)) | (count == 0)
        passing = tl.where(passes, middle, passing)
        failing = tl.where(passes, failing, middle)
    return value_below(failing, SHIFT)


@triton.jit
def _race(kept_row, list_ptr, start, num_listed, inv_temperature, seed, position, floor, lowest):
    """Of the listed groups from the ``start``-th on: logits, ids and arrivals, -inf for tokens not allowed.

    ``[GROUPS_AT_ONCE, GROUP_SIZE]`` each.
    """
    offs = start + tl.arange(0, _GROUPS_AT_ONCE)
    group = tl.load(list_ptr + offs, mask=offs < num_listed, other=0)
    ids = group[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
    logits = tl.load(kept_row + ids, mask=(offs < num_listed)[:, None], other=float("-inf")).to(tl.float32)
    score, _, peak = score_row_groups(logits, group, inv_temperature, seed, position)
    of_group = tl.where(peak == float("-inf"), peak, score)
    late = arrivals(logits, of_group, ids, inv_temperature, seed, position)
    return logits, ids, tl.where((logits > floor) & (logits >= lowest), late, float("-inf"))


@triton.jit
def largest_of_spans(peak_row, num_groups, BLOCK_S: tl.constexpr):
    """``[BLOCK_S]``: the largest logit of each span of groups."""
    of_span = tl.full([BLOCK_S], float("-inf"), tl.float32)
    for place in tl.range(_SPAN):  # a loop, for few registers
        groups = tl.arange(0, BLOCK_S) * _SPAN + place
        of_span = tl.maximum(of_span, tl.load(peak_row + groups, mask=groups < num_groups, other=float("-inf")))
    return of_span


@triton.jit
def list_groups_above(bound, of_span, peak_row, list_ptr, num_groups, BLOCK_S: tl.constexpr, CANDIDATES: tl.constexpr):
    """List the groups with a logit above ``bound``, in order, from ``list_ptr + CANDIDATES`` on; returns how many there
    are, some number above ``CANDIDATES`` where they are more than that."""
    num_spans = tl.sum((of_span > bound).to(tl.int32))
    list_spans(of_span > bound, list_ptr, CANDIDATES, BLOCK_S)
    offs = tl.arange(0, CANDIDATES)
    span = tl.load(list_ptr + offs, mask=offs < num_spans, other=0)
    listed_groups = tl.reshape(span[:, None] * _SPAN + tl.arange(0, _SPAN)[None, :], [CANDIDATES * _SPAN])
    listed = tl.arange(0, CANDIDATES * _SPAN) < num_spans * _SPAN
    listed_peaks = tl.load(peak_row + listed_groups, mask=listed & (listed_groups < num_groups), other=float("-inf"))
    reaches = (listed_peaks > bound).to(tl.int32)
    index = tl.cumsum(reaches, axis=0) - 1
    tl.store(list_ptr + CANDIDATES + index, listed_groups, mask=(reaches > 0) & (index < CANDIDATES))
    tl.debug_barrier()
    # Each span has such a group: with more spans than were listed, the groups are too many as well.
    return tl.maximum(tl.sum(reaches), num_spans)


@triton.jit
def listed_logits(kept_row, list_ptr, num_chosen, CANDIDATES: tl.constexpr):
    """``[CANDIDATES * GROUP_SIZE]`` logits of the listed groups, -inf beyond the last."""
    offs = tl.arange(0, CANDIDATES)
    group = tl.load(list_ptr + CANDIDATES + offs, mask=offs < num_chosen, other=0)
    ids = group[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
    ids = tl.reshape(ids, [CANDIDATES * rng.GROUP_SIZE])
    valid = tl.arange(0, CANDIDATES * rng.GROUP_SIZE) < num_chosen * rng.GROUP_SIZE
    return tl.load(kept_row + ids, mask=valid, other=float("-inf")).to(tl.float32)


@triton.jit
def first_of_race(
    kept_row,
    list_ptr,
    num_chosen,
    inv_temperature,
    seed,
    position,
    floor,
    lowest,
    CANDIDATES: tl.constexpr,
):
    """Of the listed groups, the first token with a logit above ``floor`` and at least ``lowest``: its id, its logit and
    its arrival; id 0 and -inf where there is none."""
    token = tl.full([], _NO_TOKEN, tl.int32)
    logit = tl.full([], float("-inf"), tl.float32)
    score = tl.full([], float("-inf"), tl.float32)
    for start in tl.range(0, tl.minimum(num_chosen, CANDIDATES), _GROUPS_AT_ONCE):
        next_logits, next_ids, late = _race(
            kept_row, list_ptr + CANDIDATES, start, num_chosen, inv_temperature, seed, position, floor, lowest
        )
        first = tl.max(late)
        if first > score:  # groups ascend: of equal scores the lowest id
            score = first
            token = tl.min(tl.where(late == first, next_ids, _NO_TOKEN))
            logit = tl.max(tl.where(next_ids == token, next_logits, float("-inf")))
    return tl.where(score == float("-inf"), 0, token), logit, score


@triton.jit
def draw_top_k(
    kept_row,
    peak_row,  # largest logit per group
    list_ptr,  # scratch, 2 * CANDIDATES
    inv_temperature,
    seed,
    position,
    top_k,
    top_p,
    min_p,
    heaviest,  # the row's largest log-mass of a group
    total,  # its exp-sum relative to that
    num_groups,
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Token, its logit, its arrival, and whether the groups were no more than ``CANDIDATES``."""
    of_span = largest_of_spans(peak_row, num_groups, BLOCK_S)
    largest = tl.max(of_span)
    bound = bound_of_top_k(of_span, largest, top_k, SHIFT)
    num_chosen = list_groups_above(bound, of_span, peak_row, list_ptr, num_groups, BLOCK_S, CANDIDATES)
    logits = listed_logits(kept_row, list_ptr, num_chosen, CANDIDATES)
    weights = tl.exp2((logits * inv_temperature - heaviest) * _LOG2_E)
    p = tl.where(top_p < 1.0, top_p * total, float("inf"))
    if (min_p > 0.0) & (top_p < 1.0):
        # With min-p, top-p is of what top-k has left.
        floor = threshold_of(logits, weights, bound, largest, top_k, float("inf"), SHIFT)
        p = top_p * tl.sum(tl.where(logits > floor, weights, 0.0))
    floor = threshold_of(logits, weights, bound, largest, top_k, p, SHIFT)
    lowest = lowest_allowed(largest, inv_temperature, min_p)
    token, logit, score = first_of_race(
        kept_row, list_ptr, num_chosen, inv_temperature, seed, position, floor, lowest, CANDIDATES
    )
    return token, logit, score, num_chosen <= CANDIDATES
