"""Which tokens of a truncated row may be the first that is allowed: from what the parts have left behind.

Device functions only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rng
from .head import CHAIN, FIRST_GROUPS
from .kept_row import arrivals, lowest_allowed

_NO_TOKEN = tl.constexpr(2**31 - 1)
_WIDEST = tl.constexpr(32.0)
_FINEST = tl.constexpr(0.1)
_CHAIN = tl.constexpr(CHAIN)
_GROUPS = tl.constexpr(FIRST_GROUPS)


@triton.jit
def next_tokens(
    row,
    score_ptr,
    group_ptr,
    logits_ptr,
    second_ptr,
    list_ptr,
    num_rows,
    num_parts,
    inv_temperature,
    seed,
    position,
    lowest,
    BLOCK_P: tl.constexpr,
):
    """The first tokens of the race with logits of at least ``lowest``, each with a larger logit than the one before:
    id, logit and arrival, ``[CHAIN]`` each.

    Where the parts do not tell what comes next, the logit is +inf and the arrival -inf.
    """
    offs_p = tl.arange(0, BLOCK_P)
    mask = offs_p < num_parts
    slots = offs_p * num_rows + row
    scores = tl.load(score_ptr + slots, mask=mask, other=float("-inf"))
    seconds = tl.load(second_ptr + slots, mask=mask, other=float("-inf"))
    # As many as there is room for: how far behind the best they are is found by bisection.
    best = tl.max(scores)
    width = tl.full([], 0.0, tl.float32)
    step = tl.full([], _WIDEST, tl.float32)
    while step > _FINEST:
        step = 0.5 * step
        fits = tl.sum((scores >= best - (width + step)).to(tl.int32)) <= _GROUPS
        width = tl.where(fits, width + step, width)
    near = mask & (scores >= best - width) & (scores > float("-inf"))
    place = tl.cumsum(near.to(tl.int32), axis=0) - 1
    near = near & (place < _GROUPS)
    tl.store(list_ptr + place, offs_p, mask=near)
    num_near = tl.sum(near.to(tl.int32))
    unseen = tl.max(tl.maximum(seconds, tl.where(near, float("-inf"), scores)))  # no other token arrives before this
    tl.debug_barrier()
    offs_m = tl.arange(0, _GROUPS)
    slots = tl.load(list_ptr + offs_m, mask=offs_m < num_near, other=0) * num_rows + row
    of_group = tl.load(score_ptr + slots, mask=offs_m < num_near, other=float("-inf"))
    offs_i = tl.arange(0, rng.GROUP_SIZE)
    ids = tl.load(group_ptr + slots)[:, None] * rng.GROUP_SIZE + offs_i[None, :]
    logits = tl.load(logits_ptr + slots[:, None] * rng.GROUP_SIZE + offs_i[None, :])
    late = arrivals(logits, of_group, ids, inv_temperature, seed, position)
    late = tl.where((late >= unseen) & (of_group > float("-inf"))[:, None] & (logits >= lowest), late, float("-inf"))
    late = tl.reshape(late, [_GROUPS * rng.GROUP_SIZE])
    logits = tl.reshape(logits, [_GROUPS * rng.GROUP_SIZE])
    ids = tl.reshape(ids, [_GROUPS * rng.GROUP_SIZE])
    offs_c = tl.arange(0, _CHAIN)
    chain_ids = tl.zeros([_CHAIN], tl.int32)
    chain_logits = tl.full([_CHAIN], float("inf"), tl.float32)
    chain_late = tl.full([_CHAIN], float("-inf"), tl.float32)
    for link in tl.static_range(_CHAIN):
        first = tl.max(late)
        known = first > float("-inf")
        token = tl.min(tl.where(late == first, ids, _NO_TOKEN))
        logit = tl.max(tl.where(ids == token, logits, float("-inf")))
        place = tl.where(known, link, _CHAIN)
        chain_ids = tl.where(offs_c == place, token, chain_ids)
        chain_logits = tl.where(offs_c == place, logit, chain_logits)
        chain_late = tl.where(offs_c == place, first, chain_late)
        late = tl.where(logits > logit, late, float("-inf"))
    return chain_ids, chain_logits, chain_late


@triton.jit
def lowest_of_min_p(peak_row, num_groups, inv_temperature, min_p, BLOCK: tl.constexpr):
    """The smallest logit that min-p allows."""
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, num_groups, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(peak_row + offs, mask=offs < num_groups, other=float("-inf")))
    return lowest_allowed(tl.max(top), inv_temperature, min_p)
