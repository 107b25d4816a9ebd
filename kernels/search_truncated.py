"""The token of a row that ``draw_truncated`` could not answer in one pass, whatever it takes. The third launch.

Rounds of questions on one row, until a token is allowed: always exact, and tens of microseconds. A batch without such
a row costs an empty launch.

Bounds of the threshold that come for free are used first: min-p is exact, and the k-th largest group maximum is
below the k-th largest logit. Then tokens are taken in the order of their arrival ("window": the groups that arrive
next), two at a time, and count and mass of the larger logits say whether they are allowed. A token that is not allowed
excludes every smaller logit as well (FlashInfer's rejection sampling does the same with fresh noise).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .features import Truncation
from .head import ROW_POINTERS, SPAN, Kept, block_of_spans
from .kept_row import (
    arrivals,
    first_token,
    kth_bound,
    list_spans,
    lowest_allowed,
    mass_of_top_k,
    measure,
    score_row_groups,
    spans,
)
from .launch import launch
from .reduce_parts import OUTPUTS
from .tiles import DrawConfig

_ARRIVALS = tl.constexpr(2.5)  # scores of the spans of one window: e^2.5 spans or fewer are as close, on average
# Groups are handled by spans of 8: what is done to all of them is done to an eighth as many, in a thread's registers.
_SPAN = tl.constexpr(SPAN)
_SPAN_IDS = tl.constexpr(SPAN * rng.GROUP_SIZE)


@triton.jit
def _summarize(
    kept_row,
    score_row,
    mass_row,
    inv_temperature,
    seed,
    position,
    vocab_start,
    first_group,
    last_group,
    GATHER: tl.constexpr,
):
    """Of some groups the perturbed log-mass and the log-mass, to memory."""
    for first in tl.range(first_group, last_group, GATHER * _SPAN):
        groups = first + tl.arange(0, GATHER * _SPAN)
        inside = groups < last_group
        ids = groups[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
        logits = tl.load(kept_row + ids, mask=inside[:, None], other=float("-inf")).to(tl.float32)
        group = vocab_start // rng.GROUP_SIZE + groups
        score, log_mass, _ = score_row_groups(logits, group, inv_temperature, seed, position)
        tl.store(score_row + groups, score, mask=inside)
        tl.store(mass_row + groups, log_mass, mask=inside)


@triton.jit
def _search(
    kept_row,  # the row's logits
    score_row,  # per group its perturbed log-mass, log-mass and largest logit
    mass_row,
    peak_row,
    list_ptr,
    inv_temperature,
    seed,
    position,
    top_k,
    top_p,
    min_p,
    vocab_size,
    vocab_start,
    kept_width,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
    GATHER: tl.constexpr,
):
    """One row. Returns token (local id), its arrival, logprob, rounds."""
    num_groups = kept_width // rng.GROUP_SIZE
    log_mass = spans(mass_row, num_groups, BLOCK_S)
    peaks = tl.max(spans(peak_row, num_groups, BLOCK_S), axis=1)
    top, heaviest = tl.split(tl.max(tl.join(peaks, tl.max(log_mass, axis=1)), axis=0))
    top = tl.where(top == float("-inf"), 0.0, top)
    heaviest = tl.where(heaviest == float("-inf"), 0.0, heaviest)
    lse = heaviest + tl.log(tl.sum(tl.sum(tl.exp(log_mass - heaviest), axis=1)))

    use_k = (top_k >= 1) & (top_k < vocab_size)
    use_p = top_p < 1.0
    k = tl.where(use_k, top_k, vocab_size)
    floor = tl.full([], float("-inf"), tl.float32)  # no allowed logit is below
    if k * 2 < num_groups // _SPAN:
        floor = kth_bound(peaks, top, k)
    elif k < num_groups:
        floor = kth_bound(tl.reshape(spans(peak_row, num_groups, BLOCK_S), [BLOCK_S * _SPAN]), top, k)
    lowest = lowest_allowed(top, inv_temperature, min_p)
    p = tl.where(use_p, top_p, 2.0)
    if use_k & use_p & (min_p > 0.0):
        p = p * mass_of_top_k(
            kept_row, list_ptr, peak_row, floor, top, k, inv_temperature, lse, kept_width, BLOCK_S, GATHER
        )

    window_ptr = list_ptr + tl.cdiv(num_groups, _SPAN)  # the list of the window's spans, behind that of the others
    offs_w = tl.arange(0, WINDOW * _SPAN)
    excluded = tl.full([], float("-inf"), tl.float32)  # no allowed logit is this or below
    ceiling = tl.full([], float("inf"), tl.float32)  # groups that arrive before this score have been looked at
    # Of the tokens looked at, the first that may be allowed.
    score = tl.full([], float("-inf"), tl.float32)
    logit = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    rounds = tl.full([], 0, tl.int32)
    searching = rounds == 0
    while searching:
        peak = spans(peak_row, num_groups, BLOCK_S)
        pool = spans(score_row, num_groups, BLOCK_S)
        possible = (peak >= floor) & (peak > excluded) & (peak >= lowest)
        pool = tl.max(tl.where(possible & (pool < ceiling), pool, float("-inf")), axis=1)
        first = tl.max(pool)
        width = _ARRIVALS
        chosen = (pool >= first - width) & (pool > float("-inf"))
        num_chosen = tl.sum(chosen.to(tl.int32))
        while (num_chosen > WINDOW) & (width > 1e-6):
            width = 0.5 * width
            chosen = (pool >= first - width) & (pool > float("-inf"))
            num_chosen = tl.sum(chosen.to(tl.int32))
        bottom = first - width  # every token of a span not looked at arrives after this
        list_spans(chosen, window_ptr, WINDOW, BLOCK_S)
        span = tl.load(window_ptr + offs_w // _SPAN, mask=offs_w // _SPAN < num_chosen, other=0)
        groups = span * _SPAN + offs_w % _SPAN
        valid = (offs_w // _SPAN < num_chosen) & (groups < num_groups)
        ids = groups[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
        logits = tl.load(kept_row + ids, mask=valid[:, None], other=float("-inf")).to(tl.float32)
        of_group = tl.load(score_row + groups, mask=valid, other=float("-inf"))
        late = arrivals(logits, of_group, vocab_start + ids, inv_temperature, seed, position)
        allowed = (logits >= floor) & (logits > excluded) & (logits >= lowest)
        late = tl.where(allowed & valid[:, None], late, float("-inf"))
        logits = tl.reshape(logits, [WINDOW * _SPAN_IDS])
        late = tl.reshape(late, [WINDOW * _SPAN_IDS])

        score_, token_, logit_ = first_token(late, window_ptr, kept_row)
        if score_ >= score:
            score = score_
            token = token_
            logit = logit_
        known = score >= bottom
        while searching & known & (score > float("-inf")):
            # The next token with a larger logit: what comes if this one is not allowed. Below the ceiling other
            # windows may hold tokens in between.
            larger = tl.where(ceiling == float("inf"), logit, float("inf"))
            later = tl.where(logits > larger, late, float("-inf"))
            next_score, next_token, next_logit = first_token(later, window_ptr, kept_row)
            known = (next_score > float("-inf")) & (next_score >= bottom)
            next_logit = tl.where(known, next_logit, float("inf"))
            passes = rounds >= 0
            next_passes = known & (rounds < 0)
            if use_k | use_p:
                rounds += 1
                count, mass, more, heavier = measure(
                    kept_row, list_ptr, peak_row, logit, next_logit, inv_temperature, lse, kept_width, BLOCK_S, GATHER
                )
                # The largest logit is always allowed, whatever the limits are.
                passes = ((count < k) & (mass < p)) | (count == 0)
                next_passes = known & (((more < k) & (heavier < p)) | (more == 0))
            if passes:
                searching = rounds < 0
            elif next_passes:
                searching = rounds < 0
                score = next_score
                token = next_token
                logit = next_logit
            else:
                excluded = tl.where(known, next_logit, logit)
                later = tl.where(logits > excluded, late, float("-inf"))
                score, token, logit = first_token(later, window_ptr, kept_row)
                known = (ceiling == float("inf")) & (score >= bottom) & (score > float("-inf"))
                if not known:
                    # What was looked at holds no further token that surely comes next: look again from the start.
                    ceiling = tl.full([], float("inf"), tl.float32)
                    score = tl.full([], float("-inf"), tl.float32)
                    first = ceiling
                    bottom = ceiling
        if searching:
            ceiling = bottom
            # A row of nothing but -inf has no token.
            searching = (first > float("-inf")) | (score > float("-inf"))
    return token, score, logit * inv_temperature - lse, rounds


@triton.jit(
    do_not_specialize=["vocab_size", "vocab_start", "num_groups"],
    do_not_specialize_on_alignment=[*ROW_POINTERS, *OUTPUTS],
)
def search_truncated_kernel(
    kept_ptr,  # [B, kept_width]
    arrived_ptr,  # scratch [B] i32, zero before and after
    kept_score_ptr,  # scratch [B, kept_width / GROUP_SIZE] f32
    kept_mass_ptr,  # scratch [B, kept_width / GROUP_SIZE] f32
    kept_peak_ptr,  # [B, kept_width / GROUP_SIZE] f32, the largest logit of each group
    list_ptr,  # scratch [B, 3 * spans] i32
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    top_k_ptr,  # [B] i32
    top_p_ptr,  # [B] f32
    min_p_ptr,  # [B] f32
    token_ptr,  # out [B] i64
    best_score_ptr,  # out [B] f32
    logprob_ptr,  # out [B] f32
    rounds_ptr,  # in and out [B] i32, negative where a row is to be searched
    searched_ptr,  # in and out [1] i64, rows searched so far
    vocab_size,
    vocab_start,
    num_groups,
    # constexpr
    RETURN_LOGPROB: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
    GATHER: tl.constexpr,
):
    row = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    if tl.load(rounds_ptr + row) < 0:
        kept_width = num_groups * rng.GROUP_SIZE  # a multiple that the compiler knows: it loads 16 bytes at a time
        groups = row.to(tl.int64) * num_groups
        kept_row = kept_ptr + row.to(tl.int64) * kept_width
        inv_temperature = 1.0 / tl.load(temperature_ptr + row)
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        share = tl.cdiv(num_groups, CHUNKS)
        _summarize(
            kept_row,
            kept_score_ptr + groups,
            kept_mass_ptr + groups,
            inv_temperature,
            seed,
            position,
            vocab_start,
            chunk * share,
            tl.minimum((chunk + 1) * share, num_groups),
            GATHER,
        )
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == CHUNKS - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + row, 0)
            token, score, logprob, rounds = _search(
                kept_row,
                kept_score_ptr + groups,
                kept_mass_ptr + groups,
                kept_peak_ptr + groups,
                list_ptr + row.to(tl.int64) * (3 * tl.cdiv(num_groups, _SPAN)),
                inv_temperature,
                seed,
                position,
                tl.load(top_k_ptr + row),
                tl.load(top_p_ptr + row),
                tl.load(min_p_ptr + row),
                vocab_size,
                vocab_start,
                kept_width,
                BLOCK_S,
                WINDOW,
                GATHER,
            )
            tl.store(token_ptr + row, (vocab_start + token).to(tl.int64))
            tl.store(best_score_ptr + row, score)
            tl.store(rounds_ptr + row, 1 + tl.maximum(rounds, 1))
            tl.atomic_add(searched_ptr, tl.full([], 1, tl.int64))
            if RETURN_LOGPROB:
                tl.store(logprob_ptr + row, logprob)


def search_truncated(
    kept: Kept,
    temperature: torch.Tensor,  # [B] f32
    seed: torch.Tensor,  # [B] i64
    position: torch.Tensor,  # [B] i64
    truncation: Truncation,
    vocab_size: int,
    vocab_start: int,
    token: torch.Tensor,  # [B] i64
    score: torch.Tensor,  # [B] f32
    logprob: torch.Tensor | None,  # [B] f32
    config: DrawConfig,
) -> None:
    """Fill ``token``, ``score`` and ``logprob`` in the rows whose ``kept.rounds`` is negative."""
    block_s = block_of_spans(kept.width)
    launch(
        search_truncated_kernel,
        temperature.shape[0] * config.search_chunks,
        (
            kept.logits,
            kept.arrived,
            kept.score,
            kept.mass,
            kept.peak,
            kept.list,
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
            kept.searched,
            vocab_size,
            vocab_start,
            kept.width // rng.GROUP_SIZE,
        ),
        {
            "RETURN_LOGPROB": logprob is not None,
            "CHUNKS": config.search_chunks,
            "BLOCK_S": block_s,
            "WINDOW": min(config.window, block_s),
            "GATHER": min(config.gather, block_s),
        },
        config.search_warps,
        (temperature.device.index, kept.logits.dtype),
    )
