"""The token of a row that ``sample_truncated`` could not answer in one pass. The third launch.

Questions on one row, until a token is allowed: always exact, and tens of microseconds. A batch without such a row costs
an empty launch.

Bounds of the threshold that come for free are used first: min-p is exact, and the k-th largest group maximum is below
the k-th largest logit. Then tokens are taken in the order of their scores ("window": the groups with the next best
ones), two at a time, and count and mass of the larger logits say whether they are allowed. A token that is not allowed
excludes every smaller logit as well (FlashInfer's rejection sampling does the same with fresh noise).
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rng
from .config import TruncationConfig
from .epilogue import invert_temperature, relative_mass
from .launch import launch
from .params import ROW_POINTERS, BatchParams, LogitsSpec, SampleOutput
from .reduce_splits import store_logprob
from .truncation_math import (
    BLOCK_GROUPS,
    BLOCK_IDS,
    best_of_window,
    kth_bound,
    list_chosen,
    load_group_blocks,
    mass_of_top_k,
    measure,
    min_p_limit,
    score_row_groups,
    token_scores,
)
from .workspace import LogitsBuffer, num_group_blocks

_WINDOW_WIDTH = tl.constexpr(2.5)  # range of a window's scores: e^2.5 blocks or fewer are so close, on average


@triton.jit
def _summarize(
    row_logits,
    group_score,
    group_mass,
    inv_temperature,
    seed,
    position,
    vocab_start,
    first_group,
    last_group,
    GATHER: tl.constexpr,
):
    """The perturbed log-mass of some groups and their mass, to memory."""
    for first in tl.range(first_group, last_group, GATHER * BLOCK_GROUPS):
        groups = first + tl.arange(0, GATHER * BLOCK_GROUPS)
        inside = groups < last_group
        ids = groups[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
        logits = tl.load(row_logits + ids, mask=inside[:, None], other=float("-inf")).to(tl.float32)
        group = vocab_start // rng.GROUP_SIZE + groups
        score, _, mass, _ = score_row_groups(logits, group, inv_temperature, seed, position)
        tl.store(group_score + groups, score, mask=inside)
        tl.store(group_mass + groups, mass, mask=inside)


@triton.jit
def _search(
    row_logits,
    group_score,  # per group of the row its perturbed log-mass, its mass and its largest logit
    group_mass,
    group_max,
    list_ptr,
    inv_temperature,
    seed,
    position,
    top_k,
    top_p,
    min_p,
    vocab_size,
    vocab_start,
    width,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
    GATHER: tl.constexpr,
):
    """One row. Returns token (local id), its score, its logit, the row's largest logit, its mass relative to that, and
    how many questions it took."""
    num_groups = width // rng.GROUP_SIZE
    peaks = load_group_blocks(group_max, num_groups, BLOCK_S)
    maxima = tl.max(peaks, axis=1)
    largest = tl.max(maxima)
    # Beyond the last group the peak is -inf; a mass there must be finite.
    group_masses = tl.where(peaks > float("-inf"), load_group_blocks(group_mass, num_groups, BLOCK_S), 0.0)
    total = tl.sum(tl.sum(relative_mass(group_masses, peaks, largest, inv_temperature), axis=1))

    use_k = (top_k >= 1) & (top_k < vocab_size)
    use_p = top_p < 1.0
    k = tl.where(use_k, top_k, vocab_size)
    floor = tl.full([], float("-inf"), tl.float32)  # no allowed logit is below
    if k * 2 < num_groups // BLOCK_GROUPS:
        floor = kth_bound(maxima, largest, k)
    elif k < num_groups:
        all_maxima = tl.reshape(load_group_blocks(group_max, num_groups, BLOCK_S), [BLOCK_S * BLOCK_GROUPS])
        floor = kth_bound(all_maxima, largest, k)
    lowest = min_p_limit(largest, inv_temperature, min_p)
    p = tl.where(use_p, top_p * total, float("inf"))
    if use_k & use_p & (min_p > 0.0):
        p = top_p * mass_of_top_k(
            row_logits, list_ptr, group_max, floor, largest, k, inv_temperature, width, BLOCK_S, GATHER
        )

    window_ptr = list_ptr + tl.cdiv(num_groups, BLOCK_GROUPS)  # the list of the window, behind that of ``measure``
    offs_w = tl.arange(0, WINDOW * BLOCK_GROUPS)
    excluded = tl.full([], float("-inf"), tl.float32)  # no allowed logit is this or below
    ceiling = tl.full([], float("inf"), tl.float32)  # groups with a score of this or more have been looked at
    # The first token that may be allowed, among those looked at.
    score = tl.full([], float("-inf"), tl.float32)
    logit = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    questions = tl.full([], 0, tl.int32)
    searching = questions == 0
    while searching:
        block_max = load_group_blocks(group_max, num_groups, BLOCK_S)
        pool = load_group_blocks(group_score, num_groups, BLOCK_S)
        possible = (block_max >= floor) & (block_max > excluded) & (block_max >= lowest)
        pool = tl.max(tl.where(possible & (pool < ceiling), pool, float("-inf")), axis=1)
        best = tl.max(pool)
        reach = _WINDOW_WIDTH
        chosen = (pool >= best - reach) & (pool > float("-inf"))
        num_chosen = tl.sum(chosen.to(tl.int32))
        while (num_chosen > WINDOW) & (reach > 1e-6):
            reach = 0.5 * reach
            chosen = (pool >= best - reach) & (pool > float("-inf"))
            num_chosen = tl.sum(chosen.to(tl.int32))
        bottom = best - reach  # no token of a block that is not looked at scores more
        list_chosen(chosen, window_ptr, WINDOW, BLOCK_S)
        block = tl.load(window_ptr + offs_w // BLOCK_GROUPS, mask=offs_w // BLOCK_GROUPS < num_chosen, other=0)
        groups = block * BLOCK_GROUPS + offs_w % BLOCK_GROUPS
        valid = (offs_w // BLOCK_GROUPS < num_chosen) & (groups < num_groups)
        ids = groups[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
        logits = tl.load(row_logits + ids, mask=valid[:, None], other=float("-inf")).to(tl.float32)
        first_scores = tl.load(group_score + groups, mask=valid, other=float("-inf"))
        group = vocab_start // rng.GROUP_SIZE + groups
        _, relative, _, _ = score_row_groups(logits, group, inv_temperature, seed, position)
        scores = token_scores(logits, first_scores, relative, vocab_start + ids, inv_temperature, seed, position)
        allowed = (logits >= floor) & (logits > excluded) & (logits >= lowest)
        scores = tl.where(allowed & valid[:, None], scores, float("-inf"))
        logits = tl.reshape(logits, [WINDOW * BLOCK_IDS])
        scores = tl.reshape(scores, [WINDOW * BLOCK_IDS])

        window_score, window_token, window_logit = best_of_window(scores, window_ptr, row_logits)
        if window_score >= score:
            score = window_score
            token = window_token
            logit = window_logit
        known = score >= bottom
        while searching & known & (score > float("-inf")):
            # The next token with a larger logit: what comes if this one is not allowed. Below the ceiling other
            # windows may hold tokens in between.
            larger = tl.where(ceiling == float("inf"), logit, float("inf"))
            next_scores = tl.where(logits > larger, scores, float("-inf"))
            next_score, next_token, next_logit = best_of_window(next_scores, window_ptr, row_logits)
            known = (next_score > float("-inf")) & (next_score >= bottom)
            next_logit = tl.where(known, next_logit, float("inf"))
            passes = questions >= 0
            next_passes = known & (questions < 0)
            if use_k | use_p:
                questions += 1
                count, mass, next_count, next_mass = measure(
                    row_logits, list_ptr, group_max, logit, next_logit, inv_temperature, largest, width, BLOCK_S, GATHER
                )
                # The largest logit is always allowed, whatever the limits are.
                passes = ((count < k) & (mass < p)) | (count == 0)
                next_passes = known & (((next_count < k) & (next_mass < p)) | (next_count == 0))
            if passes:
                searching = questions < 0
            elif next_passes:
                searching = questions < 0
                score = next_score
                token = next_token
                logit = next_logit
            else:
                excluded = tl.where(known, next_logit, logit)
                next_scores = tl.where(logits > excluded, scores, float("-inf"))
                score, token, logit = best_of_window(next_scores, window_ptr, row_logits)
                known = (ceiling == float("inf")) & (score >= bottom) & (score > float("-inf"))
                if not known:
                    # What was looked at holds no further token that surely comes next: look again from the start.
                    ceiling = tl.full([], float("inf"), tl.float32)
                    score = tl.full([], float("-inf"), tl.float32)
                    best = ceiling
                    bottom = ceiling
        if searching:
            ceiling = bottom
            # A row of nothing but -inf has no token.
            searching = (best > float("-inf")) | (score > float("-inf"))
    return token, score, logit, largest, total, questions


@triton.jit(
    do_not_specialize=["num_groups", "vocab_size", "vocab_start"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def search_truncated_kernel(
    buffer,  # BufferOperands, with logits and group_max; in and out: status, searched
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    truncation,  # TruncationOperands
    output,  # SampleOutput, out
    num_groups,
    vocab_size,
    vocab_start,
    # constexpr
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
    GATHER: tl.constexpr,
):
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    if tl.load(buffer.status + row) < 0:
        width = num_groups * rng.GROUP_SIZE  # a multiple that the compiler knows: it loads 16 bytes at a time
        groups = row.to(tl.int64) * num_groups
        row_logits = buffer.logits + row.to(tl.int64) * width
        _, inv_temperature = invert_temperature(tl.load(temperature_ptr + row))
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        share = tl.cdiv(num_groups, SPLITS)
        _summarize(
            row_logits,
            buffer.group_score + groups,
            buffer.group_mass + groups,
            inv_temperature,
            seed,
            position,
            vocab_start,
            split * share,
            tl.minimum((split + 1) * share, num_groups),
            GATHER,
        )
        tl.debug_barrier()
        if tl.atomic_add(buffer.arrived + row, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            tl.store(buffer.arrived + row, 0)
            token, score, logit, largest, total, questions = _search(
                row_logits,
                buffer.group_score + groups,
                buffer.group_mass + groups,
                buffer.group_max + groups,
                buffer.block_list + row.to(tl.int64) * (3 * tl.cdiv(num_groups, BLOCK_GROUPS)),
                inv_temperature,
                seed,
                position,
                tl.load(truncation.top_k + row),
                tl.load(truncation.top_p + row),
                tl.load(truncation.min_p + row),
                vocab_size,
                vocab_start,
                width,
                BLOCK_S,
                WINDOW,
                GATHER,
            )
            tl.store(output.token_ids + row, (vocab_start + token).to(tl.int64))
            tl.store(output.scores + row, score)
            tl.store(buffer.status + row, 1 + tl.maximum(questions, 1))
            tl.atomic_add(buffer.searched, tl.full([], 1, tl.int64))
            if output.logprobs is not None:
                store_logprob(output, row, logit, largest, total, inv_temperature, True)


def search_truncated(
    buffer: LogitsBuffer,
    params: BatchParams,  # with a truncation
    spec: LogitsSpec,
    output: SampleOutput,
    config: TruncationConfig,
) -> None:
    """Fill ``output`` in the rows whose ``buffer.status`` is negative."""
    assert params.truncation is not None
    blocks = num_group_blocks(buffer.width)
    launch(
        search_truncated_kernel,
        params.temperature.shape[0] * config.search_splits,
        (
            buffer.operands,
            params.temperature,
            params.seed,
            params.position,
            params.truncation.operands,
            output,
            spec.num_groups,
            spec.vocab_size,
            spec.vocab_start,
        ),
        {
            "SPLITS": config.search_splits,
            "BLOCK_S": blocks,
            "WINDOW": min(config.window, blocks),
            "GATHER": min(config.gather, blocks),
        },
        config.search_warps,
        (params.temperature.device.index, buffer.dtype, output.logprobs is None),
    )
