"""The token of each row of a batch in which rows have top-k, top-p or min-p. The second launch of ``lm_head_sample``.

    token = argmin over the allowed tokens of  t(i),
    t(i)  = e(group) / W(group)  +  e(i) / w(i)  -  min_j e(j) / w(j)        (j over the group of i)

with ``w = exp(logit / temperature)``, ``W`` its sum over a group of 16 ids and ``e`` the exponential noise of
``rng.py``. The t(i) are independent exponential waiting times with rates w(i), because what is left of a race
after its first arrival has no memory; so the first allowed token is an exact draw from the distribution restricted
to the allowed set. The first of all is the token that a plain row draws: a truncation changes a token only
where it forbids it.

A row with a small top-k is drawn from the groups of its largest logits: ``draw_top_k``. In other rows the allowed
tokens may be many. They are those above a threshold that is not known, but for a given token it is easy to say whether
it is allowed: count and mass of the larger logits. So the next tokens in the order of arrival are taken from what the
parts have left behind, each with a larger logit than the one before (a token that is not allowed excludes the smaller
ones), and one pass over the row's logits measures all of them at once. A few programs share a row; the last one to
finish adds up and decides. A row whose first tokens are all forbidden, or not certain to be the next, is left to
``search_truncated``; ``Kept.rounds`` tells.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .draw_top_k import draw_top_k, key_shift
from .features import Truncation
from .head import CHAIN, FIRST_GROUPS, LISTED, PARTIALS, ROW_POINTERS, Kept, Workspace, block_of_spans
from .integers import cdiv, next_power_of_2
from .launch import launch
from .next_tokens import lowest_of_min_p, next_tokens
from .reduce_parts import OUTPUTS, Drawn, draw_from_parts, lse_of_parts
from .search_truncated import search_truncated
from .tiles import DrawConfig
from .truncates import truncates

_LOG2_E = tl.constexpr(1.4426950408889634)
_PARTIALS = tl.constexpr(PARTIALS)
_CHAIN = tl.constexpr(CHAIN)
_LOADED = tl.constexpr(8)  # logits of a 16-byte load
_GROUPS = tl.constexpr(FIRST_GROUPS)
_LISTED = tl.constexpr(LISTED)


@triton.jit
def _measure_chain(
    row,
    chunk,
    chain_ids,  # [CHAIN] i32, the first tokens, each with a larger logit than the one before
    chain_logits,  # [CHAIN] f32
    chain_late,  # [CHAIN] f32
    kept_row,
    partial_ptr,
    arrived_ptr,
    inv_temperature,
    top_k,
    top_p,
    min_p,
    token_ptr,
    best_score_ptr,
    logprob_ptr,
    rounds_ptr,
    vocab_size,
    kept_width,
    RETURN_LOGPROB: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Count and mass above each token of the chain, and the first that they allow: one of ``CHUNKS`` programs."""
    tl.static_assert(_CHAIN == 4)
    offs_c = tl.arange(0, _CHAIN)
    reference = tl.min(chain_logits)  # the first token's: probabilities are relative to it
    logit0 = tl.sum(tl.where(offs_c == 0, chain_logits, 0.0))
    logit1 = tl.sum(tl.where(offs_c == 1, chain_logits, 0.0))
    logit2 = tl.sum(tl.where(offs_c == 2, chain_logits, 0.0))
    logit3 = tl.sum(tl.where(offs_c == 3, chain_logits, 0.0))
    # Sums over the logits that one thread has loaded come first: they take few registers and no shuffles.
    LANES: tl.constexpr = BLOCK // _LOADED
    zeros = tl.zeros([LANES], tl.float32)
    count0, count1, count2, count3 = zeros, zeros, zeros, zeros  # exact: a vocabulary has fewer than 2**24 ids
    mass0, mass1, mass2, mass3, total = zeros, zeros, zeros, zeros, zeros
    scale = inv_temperature * _LOG2_E
    # A row is cut in the same way whatever its neighbours are: its sums do not depend on them.
    width = tl.cdiv(tl.cdiv(kept_width, BLOCK), CHUNKS) * BLOCK
    last = tl.minimum((chunk + 1) * width, kept_width)
    offs = chunk * width + tl.arange(0, BLOCK)
    block = tl.load(kept_row + offs, mask=offs < last, other=float("-inf"))
    for _ in tl.range(chunk * width, last, BLOCK):
        offs += BLOCK
        following = tl.load(kept_row + offs, mask=offs < last, other=float("-inf"))
        logits = tl.reshape(block.to(tl.float32), [LANES, _LOADED])
        weight = tl.exp2((logits - reference) * scale)
        total += tl.sum(weight, axis=1)
        count0 += tl.sum(tl.where(logits > logit0, 1.0, 0.0), axis=1)
        count1 += tl.sum(tl.where(logits > logit1, 1.0, 0.0), axis=1)
        count2 += tl.sum(tl.where(logits > logit2, 1.0, 0.0), axis=1)
        count3 += tl.sum(tl.where(logits > logit3, 1.0, 0.0), axis=1)
        mass0 += tl.sum(tl.where(logits > logit0, weight, 0.0), axis=1)
        mass1 += tl.sum(tl.where(logits > logit1, weight, 0.0), axis=1)
        mass2 += tl.sum(tl.where(logits > logit2, weight, 0.0), axis=1)
        mass3 += tl.sum(tl.where(logits > logit3, weight, 0.0), axis=1)
        block = following
    counts = tl.join(tl.join(count0, count1), tl.join(count2, count3))
    masses = tl.join(tl.join(mass0, mass1), tl.join(mass2, mass3))
    sums = tl.reshape(tl.sum(tl.join(counts, masses), axis=0), [2 * _CHAIN])
    index = tl.arange(0, 2 * _CHAIN)  # token % 2, token // 2, count or mass
    partials = partial_ptr + (row * CHUNKS + chunk) * _PARTIALS
    tl.store(partials + index // 4 + index // 2 % 2 * 2 + index % 2 * _CHAIN, sums)
    tl.store(partials + 2 * _CHAIN, tl.sum(total))
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == CHUNKS - 1:
        tl.debug_barrier()
        tl.store(arrived_ptr + row, 0)
        # In the order of the chunks, whichever finished last.
        all_partials = partial_ptr + (row * CHUNKS + tl.arange(0, CHUNKS)) * _PARTIALS
        above = tl.sum(tl.load(all_partials[:, None] + offs_c[None, :], volatile=True), axis=0)
        share = tl.sum(tl.load((all_partials + _CHAIN)[:, None] + offs_c[None, :], volatile=True), axis=0)
        everything = tl.sum(tl.load(all_partials + 2 * _CHAIN, volatile=True))
        use_k = (top_k >= 1) & (top_k < vocab_size)
        p = tl.where(top_p < 1.0, top_p, 2.0)
        # The largest logit is always allowed, whatever the limits are.
        largest_of_all = above == 0
        allowed = ((above < tl.where(use_k, top_k, vocab_size)) & (share / everything < p)) | largest_of_all
        allowed = allowed & (chain_late > float("-inf"))
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


@triton.jit(
    do_not_specialize=["num_rows", "num_parts", "vocab_size", "vocab_start", "kept_groups"],
    do_not_specialize_on_alignment=[*ROW_POINTERS, *OUTPUTS],
)
def draw_truncated_kernel(
    score_ptr,  # [P, B] f32, what the parts have left behind, as in reduce_parts_kernel
    group_ptr,  # [P, B] i32
    logits_ptr,  # [P, B, GROUP_SIZE] f32
    lse_ptr,  # [P, B, 2] f32
    second_ptr,  # [P, B] f32, the part's second-best perturbed group
    kept_ptr,  # [B, kept_width]
    peak_ptr,  # [B, kept_width / GROUP_SIZE] f32
    partial_ptr,  # scratch [B, CHUNKS, PARTIALS] f32
    list_ptr,  # scratch [B, LISTED] i32
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
    kept_groups,
    # constexpr
    RETURN_LOGPROB: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    kept_width = kept_groups * rng.GROUP_SIZE  # a multiple that the compiler knows: it loads 16 bytes at a time
    row = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0.0) & truncates(top_k_ptr, top_p_ptr, min_p_ptr, row, True, vocab_size):
        inv_temperature = 1.0 / temperature
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        # Twice as many groups as top-k needs, for ties and for several groups of one span.
        if (top_k >= 1) & (top_k <= CANDIDATES // 2) & (top_k < vocab_size):
            if chunk == 0:
                heaviest, total = lse_of_parts(lse_ptr, row, num_rows, num_parts, BLOCK_P)
                token, logit, score, answered = draw_top_k(
                    kept_ptr + row.to(tl.int64) * kept_width,
                    peak_ptr + row.to(tl.int64) * kept_groups,
                    list_ptr + row * _LISTED,
                    inv_temperature,
                    seed,
                    position,
                    top_k,
                    top_p,
                    min_p,
                    heaviest,
                    total,
                    kept_groups,
                    BLOCK_S,
                    CANDIDATES,
                    KEY_SHIFT,
                )
                tl.store(rounds_ptr + row, tl.where(answered, 1, -1))
                tl.store(token_ptr + row, (vocab_start + token).to(tl.int64))
                tl.store(best_score_ptr + row, score)
                if RETURN_LOGPROB:
                    tl.store(logprob_ptr + row, logit * inv_temperature - heaviest - tl.log(total))
        else:
            kept_row = kept_ptr + row.to(tl.int64) * kept_width
            lowest = tl.full([], float("-inf"), tl.float32)
            if min_p > 0.0:
                peak_row = peak_ptr + row.to(tl.int64) * kept_groups
                lowest = lowest_of_min_p(peak_row, kept_groups, inv_temperature, min_p, BLOCK)
            chain_ids, chain_logits, chain_late = next_tokens(
                row,
                score_ptr,
                group_ptr,
                logits_ptr,
                second_ptr,
                list_ptr + row * _LISTED + chunk * _GROUPS,
                num_rows,
                num_parts,
                inv_temperature,
                seed,
                position,
                lowest,
                BLOCK_P,
            )
            if ((top_k >= 1) & (top_k < vocab_size)) | (top_p < 1.0):
                _measure_chain(
                    row,
                    chunk,
                    chain_ids,
                    chain_logits,
                    chain_late,
                    kept_row,
                    partial_ptr,
                    arrived_ptr,
                    inv_temperature,
                    top_k,
                    top_p,
                    min_p,
                    token_ptr,
                    best_score_ptr,
                    logprob_ptr,
                    rounds_ptr,
                    vocab_size,
                    kept_width,
                    RETURN_LOGPROB,
                    BLOCK,
                    CHUNKS,
                )
            elif chunk == 0:
                # Min-p alone: the first token that it allows.
                score = tl.max(chain_late)
                logit = tl.min(chain_logits)
                tl.store(rounds_ptr + row, tl.where(score > float("-inf"), 1, -1))
                tl.store(token_ptr + row, tl.sum(tl.where(tl.arange(0, _CHAIN) == 0, chain_ids, 0)).to(tl.int64))
                tl.store(best_score_ptr + row, score)
                if RETURN_LOGPROB:
                    heaviest, total = lse_of_parts(lse_ptr, row, num_rows, num_parts, BLOCK_P)
                    tl.store(logprob_ptr + row, logit * inv_temperature - heaviest - tl.log(total))
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
) -> Drawn:
    """The tokens: rows with a truncation from ``kept``, the others from the parts in ``workspace``.

    ``kept.rounds [B]``: 0 for a row without a truncation, 1 for one that the pass has answered, more where it took a
    search.
    """
    num_rows = temperature.shape[0]
    if kept.num_rows < num_rows or kept.width != cdiv(vocab_size, rng.GROUP_SIZE) * rng.GROUP_SIZE:
        raise ValueError(
            f"kept holds {kept.num_rows} rows of {kept.width} logits; "
            f"expected at least {num_rows} rows of {vocab_size} rounded up to a multiple of {rng.GROUP_SIZE}"
        )
    drawn = Drawn.empty(num_rows, temperature.device, return_logprob)
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
            kept.peak,
            kept.partial,
            kept.first,
            kept.arrived,
            temperature,
            seed,
            position,
            truncation.top_k,
            truncation.top_p,
            truncation.min_p,
            *drawn.pointers,
            kept.rounds,
            num_rows,
            num_parts,
            vocab_size,
            vocab_start,
            kept.width // rng.GROUP_SIZE,
        ),
        {
            "RETURN_LOGPROB": return_logprob,
            "BLOCK_P": next_power_of_2(most_parts),
            "BLOCK": config.block,
            "CHUNKS": config.chunks,
            "BLOCK_S": block_of_spans(kept.width),
            "CANDIDATES": config.candidates,
            "KEY_SHIFT": key_shift(kept.logits.dtype),
        },
        config.num_warps,
        (temperature.device.index, kept.logits.dtype),
    )
    search_truncated(kept, temperature, seed, position, truncation, vocab_size, vocab_start, *drawn, config)
    return drawn
