"""The end of the screened path: of a block of rows, the tokens inside their best groups, and what is counted.

Device functions only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rng
from .int8_head import Counted
from .kept_row import value_of
from .quantize_hidden import NO_BEST
from .reduce_parts import pick_in_groups

# Of a head's groups: a block of rows that could read more of them is counted, as one that the fused pass might have
# answered sooner.
WIDE = tl.constexpr(1.0 / 16.0)

_LOW_WORD = tl.constexpr(2**32 - 1)
_BATCHES = tl.constexpr(int(Counted.BATCHES))
_ROWS = tl.constexpr(int(Counted.ROWS))
_CANDIDATES = tl.constexpr(int(Counted.CANDIDATES))
_SURE_ROWS = tl.constexpr(int(Counted.SURE_ROWS))
_WIDE_BATCHES = tl.constexpr(int(Counted.WIDE_BATCHES))


@triton.jit
def draw_in_best_groups(
    temperature_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    logits_ptr,
    place_ptr,
    candidates_ptr,
    flagged_ptr,
    counters_ptr,
    token_ptr,
    best_score_ptr,
    offs_b,
    num_rows,
    num_groups,
    num_programs,
    vocab_size,
    vocab_start,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The tokens of a block of rows, once all its programs are done; and what is counted of it."""
    mask_b = offs_b < num_rows
    first_group = vocab_start // rng.GROUP_SIZE
    packed = tl.load(best_ptr + offs_b, mask=mask_b, other=0)
    scored = mask_b & (packed != NO_BEST)
    score = tl.where(scored, value_of((packed >> 32).to(tl.int32)), float("-inf"))
    # A row without a token takes the first id, as in the fused pass.
    group = tl.where(scored, (packed & _LOW_WORD).to(tl.int32) ^ rng.NO_GROUP, first_group)
    if LISTED:
        program = tl.load(place_ptr + group - first_group, mask=scored, other=0) % num_programs
    else:
        program = (group - first_group) // CHUNK
    offs_i = tl.arange(0, rng.GROUP_SIZE)
    logits = tl.load(
        logits_ptr + (program * num_rows + offs_b)[None, :] * rng.GROUP_SIZE + offs_i[:, None],
        mask=scored[None, :],
        other=float("-inf"),
    )
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    seed = tl.load(seed_ptr + offs_b, mask=mask_b, other=0)
    position = tl.load(position_ptr + offs_b, mask=mask_b, other=0)
    pick = pick_in_groups(group, logits, temperature, seed, position, vocab_start + vocab_size)
    tl.store(token_ptr + offs_b, (group * rng.GROUP_SIZE + pick).to(tl.int64), mask=mask_b)
    tl.store(best_score_ptr + offs_b, score, mask=mask_b)
    own = tl.load(candidates_ptr + offs_b, mask=mask_b, other=0)
    flagged = tl.load(flagged_ptr)
    tl.store(flagged_ptr, 0)
    # One launch at a time counts here, but its blocks of rows do so together.
    tl.atomic_add(counters_ptr + _BATCHES, 1, sem="relaxed")
    tl.atomic_add(counters_ptr + _ROWS, tl.sum(mask_b.to(tl.int64)), sem="relaxed")
    tl.atomic_add(counters_ptr + _CANDIDATES, tl.sum(own.to(tl.int64)), sem="relaxed")
    tl.atomic_add(counters_ptr + _SURE_ROWS, tl.sum((mask_b & (own <= 1)).to(tl.int64)), sem="relaxed")
    tl.atomic_add(counters_ptr + _WIDE_BATCHES, (flagged > num_groups * WIDE).to(tl.int64), sem="relaxed")
