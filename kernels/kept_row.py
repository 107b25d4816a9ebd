"""Questions to one row of kept logits: when its tokens arrive, and how many and how much lies above a value.

Device functions only. What ``draw_truncated`` and ``search_truncated`` ask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rng
from .approx import log2, product, reciprocal, saturate
from .epilogue import LEAST_MASS, LIMIT
from .head import SPAN

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_BISECTIONS = tl.constexpr(24)  # bounds the search for a lower bound: a loose one costs rounds, not exactness
# Groups are handled by spans of 8: what is done to all of them is done to an eighth as many, in a thread's registers.
_SPAN = tl.constexpr(SPAN)
_SPAN_IDS = tl.constexpr(SPAN * rng.GROUP_SIZE)


@triton.jit
def score_row_groups(
    logits,  # [N, GROUP_SIZE] f32
    group,  # [N] i32, absolute
    inv_temperature,
    seed,
    position,
):
    """Perturbed log-mass, log-mass and largest logit of some groups of a row: the arithmetic of
    ``epilogue.score_groups``, without greedy rows."""
    peak = tl.max(logits, axis=1)
    rate = inv_temperature * _LOG2_E
    base = product(tl.where(peak == float("-inf"), 0.0, peak), rate)
    mass = tl.sum(saturate(tl.exp2(tl.fma(logits, rate, -base[:, None]))), axis=1)
    mass = tl.where(peak == float("-inf"), 0.0, tl.maximum(mass, LEAST_MASS))
    waiting = rng.exponential(seed, position, group, rng.SAMPLE, rng.GROUP)
    perturbation = log2(mass * reciprocal(waiting))
    return (base + perturbation) * _LN_2, (base + (perturbation + log2(waiting))) * _LN_2, peak


@triton.jit
def arrivals(
    logits,  # [N, GROUP_SIZE] f32
    of_group,  # [N] f32, when the group's first token arrives: its perturbed log-mass
    ids,  # [N, GROUP_SIZE] i32, absolute
    inv_temperature,
    seed,
    position,
):
    """``-log t(i)`` of the tokens of some groups, t(i) as in ``draw_truncated``; -inf where the logit is."""
    waiting = rng.exponential(seed, position, ids, rng.SAMPLE, rng.TOKEN)
    perturbed = logits * inv_temperature - tl.log(waiting)
    best = tl.max(perturbed, axis=1)
    behind = tl.exp(best[:, None] - perturbed) - 1.0
    late = of_group[:, None] - tl.log(1.0 + tl.exp(of_group - best)[:, None] * behind)
    return tl.where(perturbed > float("-inf"), late, float("-inf"))


@triton.jit
def lowest_allowed(top, inv_temperature, min_p):
    """What a logit must reach to be allowed by min-p where ``top`` is the row's largest; -inf without min-p.

    One definition for all branches: whether a logit at the limit is allowed does not depend on which of them answers.
    """
    limit = top + tl.log(tl.minimum(min_p, 1.0)) / inv_temperature
    return tl.where(min_p > 0.0, tl.minimum(limit, top), float("-inf"))


@triton.jit
def ordered(x):
    """float32 to int32, order-preserving."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    """The inverse of ``ordered``."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def spans(row_ptr, num_groups, BLOCK_S: tl.constexpr):
    """A value per group of the row, by span: ``[BLOCK_S, SPAN]``, -inf beyond the last group.

    Read wherever it is needed: it comes from the L1 cache, while kept in registers it would spill.
    """
    groups = tl.arange(0, BLOCK_S)[:, None] * _SPAN + tl.arange(0, _SPAN)[None, :]
    return tl.load(row_ptr + groups, mask=groups < num_groups, other=float("-inf"))


@triton.jit
def list_spans(chosen, list_ptr, capacity, BLOCK_S: tl.constexpr):
    """Write the indices of the chosen spans to the row's list, in order, up to ``capacity`` of them."""
    slot = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # nobody reads the previous list any more
    tl.store(list_ptr + slot, tl.arange(0, BLOCK_S), mask=chosen & (slot < capacity))
    tl.debug_barrier()


@triton.jit
def load_spans(kept_row, list_ptr, first, num_spans, listed, kept_width, GATHER: tl.constexpr):
    """Logits of up to ``GATHER`` spans from the first-th on, of the list or of all; flat, -inf beyond the last."""
    offs = first + tl.arange(0, GATHER)
    spans = tl.where(listed, tl.load(list_ptr + offs, mask=listed & (offs < num_spans), other=0), offs)
    ids = spans[:, None] * _SPAN_IDS + tl.arange(0, _SPAN_IDS)[None, :]
    logits = tl.load(kept_row + ids, mask=(offs < num_spans)[:, None] & (ids < kept_width), other=float("-inf"))
    return tl.reshape(logits, [GATHER * _SPAN_IDS], can_reorder=True)


@triton.jit
def first_token(late, list_ptr, kept_row):
    """The first token of a window: its score, id and logit. Of equal scores the lowest id: windows are in order."""
    score, index = tl.max(late, axis=0, return_indices=True)
    span = tl.load(list_ptr + index // _SPAN_IDS, mask=score > float("-inf"), other=0)
    token = span * _SPAN_IDS + index % _SPAN_IDS
    return score, token, tl.load(kept_row + token).to(tl.float32)


@triton.jit
def measure(
    kept_row,
    list_ptr,
    peak_row,
    low,  # the lower of two thresholds
    high,
    inv_temperature,
    lse,
    kept_width,
    BLOCK_S: tl.constexpr,
    GATHER: tl.constexpr,
):
    """How many of the row's logits are above ``low``, and their probability; the same for ``high``.

    The order of the sums depends on the row and the config alone, so equal rows get equal answers.
    """
    num_groups = kept_width // rng.GROUP_SIZE
    above = tl.max(spans(peak_row, num_groups, BLOCK_S), axis=1) > low
    num_above = tl.sum(above.to(tl.int32))
    num_spans = tl.cdiv(num_groups, _SPAN)
    listed = num_above * 2 < num_spans
    if listed:
        list_spans(above, list_ptr, BLOCK_S, BLOCK_S)
    num_spans = tl.where(listed, num_above, num_spans)
    count = tl.zeros([GATHER * _SPAN_IDS], tl.float32)  # exact: a vocabulary has fewer than 2**24 ids
    more = tl.zeros([GATHER * _SPAN_IDS], tl.float32)
    mass = tl.zeros([GATHER * _SPAN_IDS], tl.float32)
    heavier = tl.zeros([GATHER * _SPAN_IDS], tl.float32)
    block = load_spans(kept_row, list_ptr, 0, num_spans, listed, kept_width, GATHER)
    for first in tl.range(0, num_spans, GATHER):
        following = load_spans(kept_row, list_ptr, first + GATHER, num_spans, listed, kept_width, GATHER)
        logits = block.to(tl.float32)
        probability = tl.exp2((logits * inv_temperature - lse) * _LOG2_E)
        count += tl.where(logits > low, 1.0, 0.0)
        mass += tl.where(logits > low, probability, 0.0)
        more += tl.where(logits > high, 1.0, 0.0)
        heavier += tl.where(logits > high, probability, 0.0)
        block = following
    of_low, of_high = tl.split(tl.sum(tl.join(tl.join(count, mass), tl.join(more, heavier)), axis=0))
    count, mass = tl.split(of_low)
    more, heavier = tl.split(of_high)
    return count, mass, more, heavier


@triton.jit
def kth_bound(peaks, top, k):
    """A value that at least k of the maxima reach (so does the k-th largest logit), or -inf."""
    low = tl.min(tl.where(peaks == float("-inf"), top, peaks))
    num_low = tl.sum((peaks >= low).to(tl.int32))
    bound = tl.where(num_low >= k, low, float("-inf"))
    high = top
    step = 0
    while (num_low > k + k // 8 + 4) & (step < _BISECTIONS):
        middle = 0.5 * low + 0.5 * high
        num = tl.sum((peaks >= middle).to(tl.int32))
        enough = num >= k
        low = tl.where(enough, middle, low)
        num_low = tl.where(enough, num, num_low)
        bound = tl.where(enough, middle, bound)
        high = tl.where(enough, high, middle)
        step += 1
    return bound


@triton.jit
def mass_of_top_k(
    kept_row,
    list_ptr,
    peak_row,
    bound,
    top,
    k,
    inv_temperature,
    lse,
    kept_width,
    BLOCK_S: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Probability of the tokens that top-k leaves, ties included: by bisection over the float32 values."""
    low = ordered(tl.where(bound == float("-inf"), -LIMIT, bound)).to(tl.int64) - 1  # k or more logits are above it
    high = ordered(top).to(tl.int64)  # fewer than k are
    mass = tl.full([], 1.0, tl.float32)
    while high - low > 0:
        middle = tl.where(high - low > 1, (low + high) >> 1, low)
        value = value_of(middle.to(tl.int32))
        count, mass, _, _ = measure(
            kept_row, list_ptr, peak_row, value, value, inv_temperature, lse, kept_width, BLOCK_S, GATHER
        )
        high = tl.where(middle == low, low, tl.where(count >= k, high, middle))
        low = tl.where(count >= k, middle, low)
    return mass
