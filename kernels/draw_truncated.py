"""The token of each row of a batch in which rows have top-k, top-p or min-p. The second launch of ``lm_head_sample``.

    token = argmin over the allowed tokens of  t(i),
    t(i)  = e(group) / W(group)  +  e(i) / w(i)  -  min_j e(j) / w(j)        (j over the group of i)

with ``w = exp(logit / temperature)``, ``W`` its sum over a group of 16 ids and ``e`` the exponential noise of
``rng.py``. The t(i) are independent exponential waiting times with rates w(i), because what is left of a race
after its first arrival has no memory; so the first allowed token is an exact draw from the distribution restricted
to the allowed set. The first of all is the token that a plain row draws: a truncation changes a token only
where it forbids it.

The allowed tokens are those above a threshold that is not known, but for a given token it is easy to say whether
it is allowed: count and mass of the larger logits. So the next tokens in the order of arrival are taken from what the
parts have left behind, each with a larger logit than the one before (a token that is not allowed excludes the smaller
ones), and one pass over the row's logits measures all of them at once. A few programs share a row; the
last one to finish adds up and decides. A row whose first tokens are all forbidden, or not certain to be the next,
is left to ``search_truncated``; ``Kept.rounds`` tells.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .features import Truncation
from .head import CHAIN, FIRST_GROUPS, PARTIALS, ROW_POINTERS, Kept, Workspace
from .kept_row import arrivals
from .launch import launch
from .reduce_parts import draw_from_parts
from .search_truncated import search_truncated
from .tiles import DrawConfig

_LOG2_E = tl.constexpr(1.4426950408889634)
_NO_TOKEN = tl.constexpr(2**31 - 1)
_WIDE = tl.constexpr(4.0)
_NARROW = tl.constexpr(2.5)
_PARTIALS = tl.constexpr(PARTIALS)
_CHAIN = tl.constexpr(CHAIN)
_GROUPS = tl.constexpr(FIRST_GROUPS)


@triton.jit
def truncates(top_k_ptr, top_p_ptr, min_p_ptr, rows, mask, vocab_size):
    """Whether rows restrict what may be drawn."""
    top_k = tl.load(top_k_ptr + rows, mask=mask, other=0)
    top_p = tl.load(top_p_ptr + rows, mask=mask, other=1.0)
    min_p = tl.load(min_p_ptr + rows, mask=mask, other=0.0)
    return ((top_k >= 1) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def _next_tokens(
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
    BLOCK_P: tl.constexpr,
):
    """The first tokens of the race, each with a larger logit than the one before: id, logit and arrival,
    ``[CHAIN]`` each.

    Where the parts do not tell what comes next, the logit is +inf and the arrival -inf.
    """
    offs_p = tl.arange(0, BLOCK_P)
    mask = offs_p < num_parts
    slots = offs_p * num_rows + row
    scores = tl.load(score_ptr + slots, mask=mask, other=float("-inf"))
    seconds = tl.load(second_ptr + slots, mask=mask, other=float("-inf"))
    # On average e^x or fewer groups score within x of the best: as many as there is room for.
    best = tl.max(scores)
    near = mask & (scores >= best - _WIDE)
    width = tl.where(tl.sum(near.to(tl.int32)) <= _GROUPS, _WIDE, _NARROW)
    near = mask & (scores >= best - width)
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
    late = tl.where((late >= unseen) & (of_group > float("-inf"))[:, None], late, float("-inf"))
    late = tl.reshape(late, [_GROUPS * rng.GROUP_SIZE])
    logits = tl.reshape(logits, [_GROUPS * rng.GROUP_SIZE])
    ids = tl.reshape(ids, [_GROUPS * rng.GROUP_SIZE])
    offs_c = tl.arange(0, _CHAIN)
    chain_ids = tl.zeros([_CHAIN], tl.int32)
    chain_logits = tl.full([_CHAIN], float("inf"), tl.float32)
    chain_late = tl.full([_CHAIN], float("-inf"), tl.float32)
    for step in tl.static_range(_CHAIN):
        first = tl.max(late)
        known = first > float("-inf")
        token = tl.min(tl.where(late == first, ids, _NO_TOKEN))
        logit = tl.max(tl.where(ids == token, logits, float("-inf")))
        place = tl.where(known, step, _CHAIN)
        chain_ids = tl.where(offs_c == place, token, chain_ids)
        chain_logits = tl.where(offs_c == place, logit, chain_logits)
        chain_late = tl.where(offs_c == place, first, chain_late)
        late = tl.where(logits > logit, late, float("-inf"))
    return chain_ids, chain_logits, chain_late


@triton.jit(
    do_not_specialize=["num_rows", "num_parts", "vocab_size", "vocab_start", "kept_width"],
    do_not_specialize_on_alignment=[*ROW_POINTERS, "token_ptr", "best_score_ptr", "logprob_ptr"],
)
def draw_truncated_kernel(
    score_ptr,  # [P, B] f32, what the parts have left behind, as in reduce_parts_kernel
    group_ptr,  # [P, B] i32
    logits_ptr,  # [P, B, GROUP_SIZE] f32
    lse_ptr,  # [P, B, 2] f32
    second_ptr,  # [P, B] f32, the part's second-best perturbed group
    kept_ptr,  # [B, kept_width]
    partial_ptr,  # scratch [B, CHUNKS, PARTIALS] f32
    first_ptr,  # scratch [B, CHUNKS, FIRST_GROUPS] i32
    arrived_ptr,  # scratch [B] i32, zero before and after
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    top_k_ptr,  # [B] i32
    top_p_ptr,  # [B] f32
    min_p_ptr,  # [B] f32
    token_ptr,  # out [B] i64
    best_score_ptr,  # out [B] f32
    logprob_ptr,  # out [B] f32
    rounds_ptr,  # out [B] i32: 0 without a truncation, 1 answered, -1 left to the search
    num_rows,
    num_parts,
    vocab_size,
    vocab_start,
    kept_width,
    # constexpr
    RETURN_LOGPROB: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0.0) & truncates(top_k_ptr, top_p_ptr, min_p_ptr, row, True, vocab_size):
        inv_temperature = 1.0 / temperature
        chain_ids, chain_logits, chain_late = _next_tokens(
            row,
            score_ptr,
            group_ptr,
            logits_ptr,
            second_ptr,
            first_ptr + tl.program_id(0) * _GROUPS,
            num_rows,
            num_parts,
            inv_temperature,
            tl.load(seed_ptr + row),
            tl.load(position_ptr + row),
            BLOCK_P,
        )
        offs_c = tl.arange(0, _CHAIN)
        reference = tl.min(chain_logits)  # the first token's: probabilities are relative to it
        count = tl.zeros([_CHAIN, BLOCK], tl.float32)  # exact: a vocabulary has fewer than 2**24 ids
        mass = tl.zeros([_CHAIN, BLOCK], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        kept_row = kept_ptr + row.to(tl.int64) * kept_width
        scale = inv_temperature * _LOG2_E
        # A row is cut in the same way whatever its neighbours are: its sums do not depend on them.
        width = tl.cdiv(tl.cdiv(kept_width, BLOCK), CHUNKS) * BLOCK
        for first in tl.range(chunk * width, tl.minimum((chunk + 1) * width, kept_width), BLOCK):
            offs = first + tl.arange(0, BLOCK)
            logits = tl.load(kept_row + offs, mask=offs < kept_width, other=float("-inf")).to(tl.float32)
            weight = tl.exp2((logits - reference) * scale)
            total += weight
            top = tl.maximum(top, logits)
            larger = logits[None, :] > chain_logits[:, None]
            count += tl.where(larger, 1.0, 0.0)
            mass += tl.where(larger, weight[None, :], 0.0)
        partials = partial_ptr + tl.program_id(0) * _PARTIALS
        tl.store(partials + offs_c, tl.sum(count, axis=1))
        tl.store(partials + offs_c + _CHAIN, tl.sum(mass, axis=1))
        tl.store(partials + 2 * _CHAIN, tl.sum(total))
        tl.store(partials + 2 * _CHAIN + 1, tl.max(top))
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == CHUNKS - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + row, 0)
            # In the order of the chunks, whichever finished last.
            sums = partial_ptr + (row * CHUNKS + tl.arange(0, CHUNKS)) * _PARTIALS
            above = tl.sum(tl.load(sums[:, None] + offs_c[None, :], volatile=True), axis=0)
            share = tl.sum(tl.load((sums + _CHAIN)[:, None] + offs_c[None, :], volatile=True), axis=0)
            everything = tl.sum(tl.load(sums + 2 * _CHAIN, volatile=True))
            largest = tl.max(tl.load(sums + 2 * _CHAIN + 1, volatile=True))
            top_k = tl.load(top_k_ptr + row)
            top_p = tl.load(top_p_ptr + row)
            min_p = tl.load(min_p_ptr + row)
            use_k = (top_k >= 1) & (top_k < vocab_size)
            p = tl.where(top_p < 1.0, top_p, 2.0)
            least = tl.where(min_p > 0.0, tl.log(tl.minimum(min_p, 1.0)), float("-inf"))
            # The largest logit is always allowed, whatever the limits are.
            largest_of_all = above == 0
            allowed = ((above < tl.where(use_k, top_k, vocab_size)) & (share / everything < p)) | largest_of_all
            allowed = allowed & ((chain_logits - largest) * inv_temperature >= least) & (chain_late > float("-inf"))
            # Top-p of what top-k has left allows less, how much less only the search knows: a token that passes here
            # may be the answer or not, so no later one is.
            unsure = use_k & (top_p < 1.0) & (min_p > 0.0) & ~largest_of_all
            winner = tl.min(tl.where(allowed, offs_c, _CHAIN))
            answered = tl.sum(((offs_c == winner) & ~unsure).to(tl.int32))
            tl.store(rounds_ptr + row, tl.where(answered == 1, 1, -1))
            token = tl.sum(tl.where(offs_c == winner, chain_ids, 0))
            logit = tl.max(tl.where(offs_c == winner, chain_logits, float("-inf")))
            tl.store(token_ptr + row, token.to(tl.int64))
            tl.store(best_score_ptr + row, tl.max(tl.where(offs_c == winner, chain_late, float("-inf"))))
            if RETURN_LOGPROB:
                tl.store(logprob_ptr + row, (logit - reference) * inv_temperature - tl.log(everything))
    elif chunk == 0:
        tl.store(rounds_ptr + row, 0)
        draw_from_parts(
            score_ptr,
            group_ptr,
            logits_ptr,
            lse_ptr,
            temperature_ptr,
            seed_ptr,
            position_ptr,
            token_ptr,
            best_score_ptr,
            logprob_ptr,
            num_rows,
            num_parts,
            vocab_size,
            vocab_start,
            row,
            RETURN_LOGPROB,
            BLOCK_P,
            1,
        )


def draw_truncated(
    workspace: Workspace,
    kept: Kept,
    num_parts: int,
    temperature: torch.Tensor,  # [B] f32
    seed: torch.Tensor,  # [B] i64
    position: torch.Tensor,  # [B] i64
    truncation: Truncation,
    vocab_size: int,
    vocab_start: int,
    *,
    return_logprob: bool,
    most_parts: int,
    config: DrawConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``token [B] i64``, ``score [B] f32`` and ``logprob [B] f32`` or None: rows with a truncation from ``kept``, the
    others from the parts in ``workspace``.

    ``kept.rounds [B]``: 0 for a row without a truncation, 1 for one that the pass has answered, more where it took a
    search.
    """
    num_rows = temperature.shape[0]
    if kept.num_rows < num_rows or kept.width != triton.cdiv(vocab_size, rng.GROUP_SIZE) * rng.GROUP_SIZE:
        raise ValueError(
            f"kept holds {kept.num_rows} rows of {kept.width} logits; "
            f"expected at least {num_rows} rows of {vocab_size} rounded up to a multiple of {rng.GROUP_SIZE}"
        )
    token = torch.empty(num_rows, dtype=torch.int64, device=temperature.device)
    score = torch.empty(num_rows, dtype=torch.float32, device=temperature.device)
    logprob = torch.empty(num_rows, dtype=torch.float32, device=temperature.device) if return_logprob else None
    launch(
        draw_truncated_kernel,
        num_rows * config.chunks,
        (
            workspace.score,
            workspace.group,
            workspace.logits,
            workspace.lse,
            workspace.second,
            kept.logits,
            kept.partial,
            kept.first,
            kept.arrived,
            temperature,
            seed,
            position,
            truncation.top_k,
            truncation.top_p,
            truncation.min_p,
            token,
            score,
            score if logprob is None else logprob,
            kept.rounds,
            num_rows,
            num_parts,
            vocab_size,
            vocab_start,
            kept.width,
        ),
        {
            "RETURN_LOGPROB": return_logprob,
            "BLOCK_P": triton.next_power_of_2(most_parts),
            "BLOCK": config.block,
            "CHUNKS": config.chunks,
        },
        config.num_warps,
        (temperature.device.index, kept.logits.dtype),
    )
    search_truncated(
        kept, temperature, seed, position, truncation, vocab_size, vocab_start, token, score, logprob, config
    )
    return token, score, logprob
