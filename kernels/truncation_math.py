"""The mathematics of one truncated row: when its tokens are drawn, and which of them top-k, top-p and min-p allow.
Device functions only.

    token = argmax over the allowed tokens of  s(i) = -log t(i),
    t(i)  = e(group) / W(group)  +  e(i) / w(i)  -  min_j e(j) / w(j)        (j over the group of i)

with ``w = exp(logit / temperature)``, ``W`` its sum over a group of 16 ids and ``e`` the exponential noise of
``rng.py``. The t(i) are independent exponential waiting times with rates w(i), because what is left of a race after its
first arrival has no memory; so the first allowed token is an exact draw from the distribution restricted to the allowed
set. The first of all is the token that a plain row draws: a truncation changes a token only where it forbids it.

A token is allowed if fewer than top-k tokens and less than top-p of the mass have a larger logit, and its logit reaches
the limit of min-p. Where only their largest logits matter, groups are handled 8 at a time, in blocks or sets: what is
done to all of them is done to an eighth as many, in a thread's registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .epilogue import perturb, relative_weight
from .intrinsics import LOG2_E, float_to_ordered, ordered_to_float
from .workspace import GROUPS_PER_BLOCK

NO_TOKEN = tl.constexpr(2**31 - 1)
BLOCK_GROUPS = tl.constexpr(GROUPS_PER_BLOCK)
BLOCK_IDS = tl.constexpr(GROUPS_PER_BLOCK * rng.GROUP_SIZE)
_BISECTIONS = tl.constexpr(24)  # bounds the search for a lower bound: a loose one costs passes, not exactness


@triton.jit
def score_row_groups(
    logits,  # [N, GROUP_SIZE] f32
    group,  # [N] i32, absolute
    inv_temperature,
    seed,
    position,
):
    """Perturbed log-mass of some groups of a row, the same relative to the largest logit at temperature, the mass, and
    the largest logit: the arithmetic of ``epilogue.score_groups``, without greedy rows. A group without a token has
    -inf, and mass 0."""
    peak = tl.max(logits, axis=1)
    rate = inv_temperature * LOG2_E
    mass = tl.sum(tl.exp2((logits - peak[:, None]) * rate), axis=1)
    exponential = rng.exponential(seed, position, group, rng.SAMPLE, rng.GROUP)
    score, relative = perturb(peak, mass, rate, exponential)
    has_token = peak > float("-inf")
    return tl.where(has_token, score, float("-inf")), relative, tl.where(has_token, mass, 0.0), peak


@triton.jit
def token_scores(
    logits,  # [N, GROUP_SIZE] f32
    group_score,  # [N] f32, the group's perturbed log-mass: the score of its first token
    relative,  # [N] f32, the same relative to the group's largest logit at temperature
    ids,  # [N, GROUP_SIZE] i32, absolute
    inv_temperature,
    seed,
    position,
):
    """s(i) of the tokens of some groups; -inf where the logit is."""
    exponential = rng.exponential(seed, position, ids, rng.SAMPLE, rng.TOKEN)
    peak = tl.max(logits, axis=1)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    perturbed = (logits - peak[:, None]) * inv_temperature - tl.log(exponential)
    best = tl.max(perturbed, axis=1)
    behind = tl.exp(best[:, None] - perturbed) - 1.0
    ahead = tl.exp(relative - best)  # between e**-50 and e**50 of a group that has a token
    scores = group_score[:, None] - tl.log(1.0 + ahead[:, None] * behind)
    return tl.where(perturbed > float("-inf"), scores, float("-inf"))


@triton.jit
def min_p_limit(largest, inv_temperature, min_p):
    """The smallest logit that min-p allows where ``largest`` is the row's largest; -inf without min-p.

    One definition for all branches: whether a logit at the limit is allowed does not depend on which of them answers.
    """
    limit = largest + tl.log(tl.minimum(min_p, 1.0)) / inv_temperature
    return tl.where(min_p > 0.0, tl.minimum(limit, largest), float("-inf"))


# ---------------------------------------------------------------------------------------------------------------------
# A row with a small top-k. If the largest logits of k sets of groups are above a number, k logits are above it. So the
# groups that reach it, about k, hold everything that is allowed: they are listed, and the best of their tokens that
# top-k, top-p and min-p allow is found exactly.


def key_shift(dtype: torch.dtype) -> int:
    """The number of low bits that are zero in float32, in every number of ``dtype``."""
    return 16 if dtype is torch.bfloat16 else 0


@triton.jit
def largest_with_key(key, SHIFT: tl.constexpr):
    """The largest value with this key: values above it have larger keys."""
    return ordered_to_float(((key << SHIFT) | ((1 << SHIFT) - 1)).to(tl.int32))


@triton.jit
def key_below(x, SHIFT: tl.constexpr):
    """The key of the largest number below ``x``, which is not -inf. Below a zero of either sign is neither of them."""
    ordered = tl.where(x == 0.0, -1, float_to_ordered(x)).to(tl.int64)
    return tl.where(ordered >= 0, ordered - 1, ordered - (1 << SHIFT)) >> SHIFT


@triton.jit
def bound_of_top_k(maxima, largest, k, SHIFT: tl.constexpr):
    """A number that ``k`` or a few more of the maxima are above, or all of them.

    SHIFT: how many low bits of all values are zero. Bisection over what is left, a few instructions.
    """
    exists = maxima > float("-inf")
    num_above = tl.sum(exists.to(tl.int32))
    smallest = tl.min(tl.where(exists, maxima, float("inf")))
    # With fewer maxima than k, smaller logits beside them are wanted too, however small.
    start = tl.where(num_above < k, float("-inf"), smallest)
    failing = tl.where(num_above < k, (float_to_ordered(start) >> SHIFT).to(tl.int64), key_below(start, SHIFT))
    passing = (float_to_ordered(largest) >> SHIFT).to(tl.int64)
    while (passing - failing > 1) & (num_above > k + k // 16):
        middle = (passing + failing) >> 1
        count = tl.sum((maxima > largest_with_key(middle, SHIFT)).to(tl.int32))
        num_above = tl.where(count < k, num_above, count)
        passing = tl.where(count < k, middle, passing)
        failing = tl.where(count < k, failing, middle)
    return largest_with_key(failing, SHIFT)


@triton.jit
def mass_of_largest(values, weights, low, largest, k, SHIFT: tl.constexpr):
    """The weight of the ``k`` largest values and of those that equal the last of them, above ``low`` all."""
    failing = (float_to_ordered(low) >> SHIFT).to(tl.int64)
    passing = (float_to_ordered(largest) >> SHIFT).to(tl.int64)
    while passing - failing > 1:
        middle = (passing + failing) >> 1
        passes = tl.sum((values > largest_with_key(middle, SHIFT)).to(tl.int32)) < k
        passing = tl.where(passes, middle, passing)
        failing = tl.where(passes, failing, middle)
    return tl.sum(tl.where(values > largest_with_key(failing, SHIFT), weights, 0.0))


@triton.jit
def count_and_mass(values, weights, logit):
    """The number of values above ``logit``, float32, and their weight."""
    larger = values > logit
    return tl.split(tl.sum(tl.join(tl.where(larger, 1.0, 0.0), tl.where(larger, weights, 0.0)), axis=0))


@triton.jit
def is_allowed(count, mass, k, p):
    """Whether top-k and top-p allow a logit with ``count`` larger ones, whose weight is ``mass``; the largest always
    is."""
    return ((count < k) & (mass < p)) | (count == 0)


@triton.jit
def set_maxima(group_max, num_groups, BLOCK_S: tl.constexpr):
    """``[BLOCK_S]``: the largest logit of each set of groups, -inf of an empty one. group_max: of the row's groups.

    The groups of a set lie ``BLOCK_S`` apart, so that threads side by side read numbers side by side.
    """
    maxima = tl.full([BLOCK_S], float("-inf"), tl.float32)
    for place in tl.static_range(BLOCK_GROUPS):  # no load waits for another
        groups = place * BLOCK_S + tl.arange(0, BLOCK_S)
        maxima = tl.maximum(maxima, tl.load(group_max + groups, mask=groups < num_groups, other=float("-inf")))
    return maxima


@triton.jit
def list_groups_above(bound, maxima, group_max, list_ptr, num_groups, BLOCK_S: tl.constexpr, CANDIDATES: tl.constexpr):
    """List the groups with a logit above ``bound`` from ``list_ptr + CANDIDATES`` on; returns how many there are, some
    number above ``CANDIDATES`` where they are more than that. maxima: of ``set_maxima``."""
    num_sets = tl.sum((maxima > bound).to(tl.int32))
    list_chosen(maxima > bound, list_ptr, CANDIDATES, BLOCK_S)
    offs = tl.arange(0, CANDIDATES)
    first = tl.load(list_ptr + offs, mask=offs < num_sets, other=0)
    groups = tl.reshape(first[:, None] + tl.arange(0, BLOCK_GROUPS)[None, :] * BLOCK_S, [CANDIDATES * BLOCK_GROUPS])
    listed = tl.arange(0, CANDIDATES * BLOCK_GROUPS) < num_sets * BLOCK_GROUPS
    peaks = tl.load(group_max + groups, mask=listed & (groups < num_groups), other=float("-inf"))
    reaches = (peaks > bound).to(tl.int32)
    index = tl.cumsum(reaches, axis=0) - 1
    tl.store(list_ptr + CANDIDATES + index, groups, mask=(reaches > 0) & (index < CANDIDATES))
    tl.debug_barrier()
    # Each set has such a group: with more sets than were listed, the groups are too many as well.
    return tl.maximum(tl.sum(reaches), num_sets)


@triton.jit
def listed_logits(row_logits, list_ptr, num_listed, CANDIDATES: tl.constexpr):
    """``[CANDIDATES * GROUP_SIZE]`` logits of the listed groups, -inf beyond the last."""
    offs = tl.arange(0, CANDIDATES)
    group = tl.load(list_ptr + CANDIDATES + offs, mask=offs < num_listed, other=0)
    ids = group[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
    ids = tl.reshape(ids, [CANDIDATES * rng.GROUP_SIZE])
    valid = tl.arange(0, CANDIDATES * rng.GROUP_SIZE) < num_listed * rng.GROUP_SIZE
    return tl.load(row_logits + ids, mask=valid, other=float("-inf")).to(tl.float32)


@triton.jit
def listed_scores(
    row_logits,
    list_ptr,
    num_listed,
    inv_temperature,
    seed,
    position,
    CANDIDATES: tl.constexpr,
):
    """``[CANDIDATES * GROUP_SIZE]`` scores of the tokens of the listed groups, -inf beyond the last; and their ids."""
    offs = tl.arange(0, CANDIDATES)
    group = tl.load(list_ptr + CANDIDATES + offs, mask=offs < num_listed, other=0)
    ids = group[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
    logits = tl.load(row_logits + ids, mask=(offs < num_listed)[:, None], other=float("-inf")).to(tl.float32)
    score, relative, _, _ = score_row_groups(logits, group, inv_temperature, seed, position)
    scores = token_scores(logits, score, relative, ids, inv_temperature, seed, position)
    return tl.reshape(scores, [CANDIDATES * rng.GROUP_SIZE]), tl.reshape(ids, [CANDIDATES * rng.GROUP_SIZE])


@triton.jit
def first_allowed(
    logits,  # of ``listed_logits``
    weights,  # of these
    scores,  # of ``listed_scores``, as the next
    ids,
    low,
    k,
    p,
):
    """The best token that the limits allow, with a logit above ``low``: its id, logit and score; id 0 and -inf where
    there is none. Then the number and the weight of the larger logits, and the least such weight of a better token that
    top-p alone forbids, +inf without one.

    Best scores first: a token that is not allowed rules out every smaller logit, so few are looked at.
    """
    token = tl.full([], 0, tl.int32)
    logit = low
    score = tl.full([], float("-inf"), tl.float32)
    count = tl.full([], 0.0, tl.float32)
    mass = tl.full([], 0.0, tl.float32)
    forbidden = tl.full([], float("inf"), tl.float32)
    searching = low < float("inf")
    while searching:
        larger = tl.where(logits > logit, scores, float("-inf"))
        score = tl.max(larger)
        token = tl.min(tl.where(larger == score, ids, NO_TOKEN))  # of equal scores the lowest id
        logit = tl.max(tl.where(ids == token, logits, float("-inf")))
        count, mass = count_and_mass(logits, weights, logit)
        searching = (score > float("-inf")) & ~is_allowed(count, mass, k, p)
        forbidden = tl.where(searching & (count < k), mass, forbidden)
    return tl.where(score == float("-inf"), 0, token), logit, score, count, mass, forbidden


@triton.jit
def draw_small_top_k(
    row_logits,
    group_max,
    list_ptr,  # scratch, 2 * CANDIDATES
    inv_temperature,
    seed,
    position,
    top_k,
    top_p,
    min_p,
    total,  # the row's exp-sum at temperature, relative to its largest logit
    num_groups,
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Token, its logit, its score, and whether the groups were no more than ``CANDIDATES``."""
    maxima = set_maxima(group_max, num_groups, BLOCK_S)
    largest = tl.max(maxima)
    bound = bound_of_top_k(maxima, largest, top_k, SHIFT)
    num_listed = list_groups_above(bound, maxima, group_max, list_ptr, num_groups, BLOCK_S, CANDIDATES)
    logits = listed_logits(row_logits, list_ptr, num_listed, CANDIDATES)
    weights = relative_weight(logits, largest, inv_temperature)
    p = tl.where(top_p < 1.0, top_p * total, float("inf"))
    if (min_p > 0.0) & (top_p < 1.0):
        # With min-p, top-p is of what top-k has left.
        p = top_p * mass_of_largest(logits, weights, bound, largest, top_k, SHIFT)
    scores, ids = listed_scores(row_logits, list_ptr, num_listed, inv_temperature, seed, position, CANDIDATES)
    scores = tl.where(logits >= min_p_limit(largest, inv_temperature, min_p), scores, float("-inf"))
    token, logit, score, _, _, _ = first_allowed(logits, weights, scores, ids, bound, top_k, p)
    return token, logit, score, num_listed <= CANDIDATES


# ---------------------------------------------------------------------------------------------------------------------
# A row of any kind: how many of its logits are above a value, and how much of the mass.


@triton.jit
def load_group_blocks(row_ptr, num_groups, BLOCK_S: tl.constexpr):
    """A value per group of the row, by block: ``[BLOCK_S, GROUPS_PER_BLOCK]``, -inf beyond the last group.

    Read wherever it is needed: it comes from the L1 cache, while kept in registers it would spill.
    """
    groups = tl.arange(0, BLOCK_S)[:, None] * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[None, :]
    return tl.load(row_ptr + groups, mask=groups < num_groups, other=float("-inf"))


@triton.jit
def list_chosen(chosen, list_ptr, capacity, BLOCK_S: tl.constexpr):
    """Write the indices of the chosen blocks or sets to the row's list, in order, up to ``capacity`` of them."""
    slot = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # nobody reads the previous list any more
    tl.store(list_ptr + slot, tl.arange(0, BLOCK_S), mask=chosen & (slot < capacity))
    tl.debug_barrier()


@triton.jit
def _load_blocks(row_logits, list_ptr, first, num_blocks, listed, width, GATHER: tl.constexpr):
    """Logits of up to ``GATHER`` blocks from the first-th on, of the list or of all; flat, -inf beyond the last."""
    offs = first + tl.arange(0, GATHER)
    blocks = tl.where(listed, tl.load(list_ptr + offs, mask=listed & (offs < num_blocks), other=0), offs)
    ids = blocks[:, None] * BLOCK_IDS + tl.arange(0, BLOCK_IDS)[None, :]
    logits = tl.load(row_logits + ids, mask=(offs < num_blocks)[:, None] & (ids < width), other=float("-inf"))
    return tl.reshape(logits, [GATHER * BLOCK_IDS], can_reorder=True)


@triton.jit
def best_of_window(scores, list_ptr, row_logits):
    """The best token of a window: score, id and logit. The lowest id wins a tie: windows are in order."""
    score, index = tl.max(scores, axis=0, return_indices=True)
    block = tl.load(list_ptr + index // BLOCK_IDS, mask=score > float("-inf"), other=0)
    token = block * BLOCK_IDS + index % BLOCK_IDS
    return score, token, tl.load(row_logits + token).to(tl.float32)


@triton.jit
def measure(
    row_logits,
    list_ptr,
    group_max,
    low,  # the lower of two thresholds
    high,
    inv_temperature,
    largest,  # logit of the row
    width,
    BLOCK_S: tl.constexpr,
    GATHER: tl.constexpr,
):
    """The number of the row's logits above ``low``, and their mass relative to the largest; the same for ``high``.

    The order of the sums depends on the row and the config alone, so equal rows get equal answers.
    """
    num_groups = width // rng.GROUP_SIZE
    above = tl.max(load_group_blocks(group_max, num_groups, BLOCK_S), axis=1) > low
    num_above = tl.sum(above.to(tl.int32))
    num_blocks = tl.cdiv(num_groups, BLOCK_GROUPS)
    listed = num_above * 2 < num_blocks
    if listed:
        list_chosen(above, list_ptr, BLOCK_S, BLOCK_S)
    num_blocks = tl.where(listed, num_above, num_blocks)
    count_low = tl.zeros([GATHER * BLOCK_IDS], tl.float32)  # exact: a vocabulary has fewer than 2**24 ids
    count_high = tl.zeros([GATHER * BLOCK_IDS], tl.float32)
    mass_low = tl.zeros([GATHER * BLOCK_IDS], tl.float32)
    mass_high = tl.zeros([GATHER * BLOCK_IDS], tl.float32)
    block = _load_blocks(row_logits, list_ptr, 0, num_blocks, listed, width, GATHER)
    for first in tl.range(0, num_blocks, GATHER):
        following = _load_blocks(row_logits, list_ptr, first + GATHER, num_blocks, listed, width, GATHER)
        logits = block.to(tl.float32)
        weights = relative_weight(logits, largest, inv_temperature)
        count_low += tl.where(logits > low, 1.0, 0.0)
        mass_low += tl.where(logits > low, weights, 0.0)
        count_high += tl.where(logits > high, 1.0, 0.0)
        mass_high += tl.where(logits > high, weights, 0.0)
        block = following
    sums = tl.sum(tl.join(tl.join(count_low, mass_low), tl.join(count_high, mass_high)), axis=0)
    of_low, of_high = tl.split(sums)
    count_low, mass_low = tl.split(of_low)
    count_high, mass_high = tl.split(of_high)
    return count_low, mass_low, count_high, mass_high


@triton.jit
def kth_bound(maxima, largest, k):
    """A value that at least k of the maxima reach (so does the k-th largest logit), or -inf."""
    low = tl.min(tl.where(maxima == float("-inf"), largest, maxima))
    num_low = tl.sum((maxima >= low).to(tl.int32))
    bound = tl.where(num_low >= k, low, float("-inf"))
    high = largest
    step = 0
    while (num_low > k + k // 8 + 4) & (step < _BISECTIONS):
        middle = 0.5 * low + 0.5 * high
        num = tl.sum((maxima >= middle).to(tl.int32))
        enough = num >= k
        low = tl.where(enough, middle, low)
        num_low = tl.where(enough, num, num_low)
        bound = tl.where(enough, middle, bound)
        high = tl.where(enough, high, middle)
        step += 1
    return bound


@triton.jit
def mass_of_top_k(
    row_logits,
    list_ptr,
    group_max,
    bound,
    largest,
    k,
    inv_temperature,
    width,
    BLOCK_S: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Mass of the tokens that top-k leaves, ties included, relative to the largest logit: by bisection over the float32
    values."""
    # k or more logits are above low, fewer than k above high
    low = tl.where(bound == float("-inf"), float_to_ordered(bound).to(tl.int64), key_below(bound, 0))
    high = float_to_ordered(largest).to(tl.int64)
    mass = tl.full([], 0.0, tl.float32)
    while high - low > 0:
        middle = tl.where(high - low > 1, (low + high) >> 1, low)
        value = ordered_to_float(middle.to(tl.int32))
        count, mass, _, _ = measure(
            row_logits, list_ptr, group_max, value, value, inv_temperature, largest, width, BLOCK_S, GATHER
        )
        high = tl.where(middle == low, low, tl.where(count >= k, high, middle))
        low = tl.where(count >= k, middle, low)
    return mass
