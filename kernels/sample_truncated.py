"""The token of each row of a batch in which rows have top-k, top-p or min-p. The second launch of ``lm_head_sample``.

``truncation_math.py`` has the definition: of the allowed tokens, the one with the best score. A row with a small top-k
is drawn from the groups of its largest logits. In other rows the allowed tokens may be many: the logits above a
threshold. The threshold is not known, but a given token is allowed or not by the count and the mass of the larger
logits. So candidates are taken from the groups that the splits have left behind, best score first. A candidate that is
not allowed rules out every smaller logit, so each next candidate has a larger one. One pass over the groups with a
larger logit than the first candidate's measures all candidates at once. A few programs share a row; the last one to
finish adds up and decides. A row whose candidates are all forbidden, or not certain to be the next, is left to
``search_truncated``: its status is negative.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import rng
from .config import TruncationConfig, next_power_of_2
from .epilogue import invert_temperature, rows_truncated
from .intrinsics import LOG2_E
from .launch import launch, resident_programs
from .params import ROW_POINTERS, BatchParams, LogitsSpec, SampleOutput
from .reduce_splits import draw_from_splits, mass_of_splits, store_logprob
from .search_truncated import search_truncated
from .truncation_math import NO_TOKEN, draw_small_top_k, key_shift, min_p_limit, score_row_groups, token_scores
from .workspace import (
    CANDIDATE_GROUPS,
    LISTED_GROUPS,
    MEASURED_CANDIDATES,
    PARTIALS,
    LogitsBuffer,
    Workspace,
    num_group_blocks,
)

_PARTIALS = tl.constexpr(PARTIALS)
_CANDIDATES = tl.constexpr(MEASURED_CANDIDATES)
_CANDIDATE_GROUPS = tl.constexpr(CANDIDATE_GROUPS)
_LISTED_GROUPS = tl.constexpr(LISTED_GROUPS)
_LOADED = tl.constexpr(8)  # logits of a 16-byte load
_RESIDENT = 2  # programs per multiprocessor, by their registers
# Groups are taken whose score is behind the best one by this at most; and the resolution of that decision.
_WIDEST = tl.constexpr(32.0)
_FINEST = tl.constexpr(0.1)


@triton.jit
def _best_candidates(
    row,
    splits,
    list_ptr,
    num_rows,
    num_splits,
    inv_temperature,
    seed,
    position,
    lowest,
    BLOCK_P: tl.constexpr,
):
    """The best tokens with logits of at least ``lowest``, each with a larger logit than the one before: id, logit and
    score, ``[MEASURED_CANDIDATES]`` each.

    Where the splits do not tell what comes next, the logit is +inf and the score -inf.
    """
    offs_p = tl.arange(0, BLOCK_P)
    mask = offs_p < num_splits
    slots = offs_p * num_rows + row
    group_scores = tl.load(splits.score + slots, mask=mask, other=float("-inf"))
    seconds = tl.load(splits.second + slots, mask=mask, other=float("-inf"))
    # As many groups as there is room for: how far behind the best they are is found by bisection.
    best = tl.max(group_scores)
    width = tl.full([], 0.0, tl.float32)
    step = tl.full([], _WIDEST, tl.float32)
    while step > _FINEST:
        step = 0.5 * step
        fits = tl.sum((group_scores >= best - (width + step)).to(tl.int32)) <= _CANDIDATE_GROUPS
        width = tl.where(fits, width + step, width)
    near = mask & (group_scores >= best - width) & (group_scores > float("-inf"))
    place = tl.cumsum(near.to(tl.int32), axis=0) - 1
    near = near & (place < _CANDIDATE_GROUPS)
    tl.store(list_ptr + place, offs_p, mask=near)
    num_near = tl.sum(near.to(tl.int32))
    unseen = tl.max(tl.maximum(seconds, tl.where(near, float("-inf"), group_scores)))  # no other token scores more
    tl.debug_barrier()
    offs_m = tl.arange(0, _CANDIDATE_GROUPS)
    slots = tl.load(list_ptr + offs_m, mask=offs_m < num_near, other=0) * num_rows + row
    group_score = tl.load(splits.score + slots, mask=offs_m < num_near, other=float("-inf"))
    offs_i = tl.arange(0, rng.GROUP_SIZE)
    group = tl.load(splits.group + slots)
    ids = group[:, None] * rng.GROUP_SIZE + offs_i[None, :]
    logits = tl.load(splits.logits + slots[:, None] * rng.GROUP_SIZE + offs_i[None, :])
    _, relative, _, _ = score_row_groups(logits, group, inv_temperature, seed, position)
    scores = token_scores(logits, group_score, relative, ids, inv_temperature, seed, position)
    known = (scores >= unseen) & (group_score > float("-inf"))[:, None] & (logits >= lowest)
    scores = tl.where(known, scores, float("-inf"))
    scores = tl.reshape(scores, [_CANDIDATE_GROUPS * rng.GROUP_SIZE])
    logits = tl.reshape(logits, [_CANDIDATE_GROUPS * rng.GROUP_SIZE])
    ids = tl.reshape(ids, [_CANDIDATE_GROUPS * rng.GROUP_SIZE])
    offs_c = tl.arange(0, _CANDIDATES)
    best_ids = tl.zeros([_CANDIDATES], tl.int32)
    best_logits = tl.full([_CANDIDATES], float("inf"), tl.float32)
    best_scores = tl.full([_CANDIDATES], float("-inf"), tl.float32)
    for rank in tl.static_range(_CANDIDATES):
        first = tl.max(scores)
        token = tl.min(tl.where(scores == first, ids, NO_TOKEN))
        logit = tl.max(tl.where(ids == token, logits, float("-inf")))
        place = tl.where(first > float("-inf"), rank, _CANDIDATES)
        best_ids = tl.where(offs_c == place, token, best_ids)
        best_logits = tl.where(offs_c == place, logit, best_logits)
        best_scores = tl.where(offs_c == place, first, best_scores)
        scores = tl.where(logits > logit, scores, float("-inf"))
    return best_ids, best_logits, best_scores


@triton.jit
def _measure_candidates(
    row,
    program,
    num_programs,
    ids,  # [MEASURED_CANDIDATES] i32, the best tokens, each with a larger logit than the one before
    logits,  # [MEASURED_CANDIDATES] f32
    scores,  # [MEASURED_CANDIDATES] f32
    row_logits,
    splits,
    buffer,
    num_rows,
    num_splits,
    inv_temperature,
    top_k,
    top_p,
    min_p,
    output,
    vocab_size,
    num_groups,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Count and mass above each candidate, and the first that they allow: one of ``num_programs`` programs, which share
    the ``SPLITS`` parts of the row evenly."""
    tl.static_assert(_CANDIDATES == 4)
    largest, everything = mass_of_splits(splits, row, num_rows, num_splits, inv_temperature, BLOCK_P)
    offs_c = tl.arange(0, _CANDIDATES)
    lowest = tl.min(logits)  # the first candidate's: no smaller logit is counted
    logit0 = tl.sum(tl.where(offs_c == 0, logits, 0.0))
    logit1 = tl.sum(tl.where(offs_c == 1, logits, 0.0))
    logit2 = tl.sum(tl.where(offs_c == 2, logits, 0.0))
    logit3 = tl.sum(tl.where(offs_c == 3, logits, 0.0))
    group_max = buffer.group_max + row.to(tl.int64) * num_groups
    list_ptr = (buffer.group_score + row.to(tl.int64) * num_groups).to(tl.pointer_type(tl.int32))
    # A thread loads half of a group. Sums over its logits come first: they take few registers and no shuffles.
    LANES: tl.constexpr = BLOCK // _LOADED
    HALVES: tl.constexpr = rng.GROUP_SIZE // _LOADED
    lanes = tl.arange(0, LANES)
    offs_i = lanes % HALVES * _LOADED
    scale = inv_temperature * LOG2_E
    # A row is cut in the same way whatever its neighbours are: what is summed here does not depend on them.
    share = tl.cdiv(num_groups, SPLITS)
    num_own = SPLITS // num_programs
    # What does not change from part to part is computed again: kept, it would take the registers of a second program.
    for split in tl.range(program * num_own, (program + 1) * num_own, disable_licm=True):
        start = split * share
        last = tl.minimum(start + share, num_groups)
        num_listed = tl.full([], 0, tl.int32)
        for first in tl.range(start, last, BLOCK_S):
            groups = first + tl.arange(0, BLOCK_S)
            peaks = tl.load(group_max + groups, mask=groups < last, other=float("-inf"))
            larger = (peaks > lowest).to(tl.int32)
            place = start + num_listed + tl.cumsum(larger, axis=0) - 1
            tl.store(list_ptr + place, groups, mask=larger > 0)
            num_listed += tl.sum(larger)
        tl.debug_barrier()
        zeros = tl.zeros([LANES], tl.float32)
        count0, count1, count2, count3 = zeros, zeros, zeros, zeros  # exact: a vocabulary has fewer than 2**24 ids
        mass0, mass1, mass2, mass3 = zeros, zeros, zeros, zeros
        for first in tl.range(0, num_listed, LANES // HALVES):
            entry = first + lanes // HALVES
            group = tl.load(list_ptr + start + entry, mask=entry < num_listed, other=0)
            offs = (group * rng.GROUP_SIZE + offs_i)[:, None] + tl.arange(0, _LOADED)[None, :]
            values = tl.load(row_logits + offs, mask=(entry < num_listed)[:, None], other=float("-inf")).to(tl.float32)
            weight = tl.exp2((values - largest) * scale)
            count0 += tl.sum(tl.where(values > logit0, 1.0, 0.0), axis=1)
            count1 += tl.sum(tl.where(values > logit1, 1.0, 0.0), axis=1)
            count2 += tl.sum(tl.where(values > logit2, 1.0, 0.0), axis=1)
            count3 += tl.sum(tl.where(values > logit3, 1.0, 0.0), axis=1)
            mass0 += tl.sum(tl.where(values > logit0, weight, 0.0), axis=1)
            mass1 += tl.sum(tl.where(values > logit1, weight, 0.0), axis=1)
            mass2 += tl.sum(tl.where(values > logit2, weight, 0.0), axis=1)
            mass3 += tl.sum(tl.where(values > logit3, weight, 0.0), axis=1)
        counts = tl.join(tl.join(count0, count1), tl.join(count2, count3))
        masses = tl.join(tl.join(mass0, mass1), tl.join(mass2, mass3))
        sums = tl.reshape(tl.sum(tl.join(counts, masses), axis=0), [2 * _CANDIDATES])
        index = tl.arange(0, 2 * _CANDIDATES)  # candidate % 2, candidate // 2, count or mass
        partials = buffer.partial + (row * SPLITS + split) * _PARTIALS
        tl.store(partials + index // 4 + index // 2 % 2 * 2 + index % 2 * _CANDIDATES, sums)
    tl.debug_barrier()
    if tl.atomic_add(buffer.arrived + row, 1, sem="acq_rel") == num_programs - 1:
        tl.debug_barrier()
        tl.store(buffer.arrived + row, 0)
        # In the order of the splits, whichever finished last.
        all_partials = buffer.partial + (row * SPLITS + tl.arange(0, SPLITS)) * _PARTIALS
        above = tl.sum(tl.load(all_partials[:, None] + offs_c[None, :], volatile=True), axis=0)
        mass = tl.sum(tl.load((all_partials + _CANDIDATES)[:, None] + offs_c[None, :], volatile=True), axis=0)
        use_k = (top_k >= 1) & (top_k < vocab_size)
        p = tl.where(top_p < 1.0, top_p, 2.0)
        # The largest logit is always allowed, whatever the limits are.
        largest_of_all = above == 0
        allowed = ((above < tl.where(use_k, top_k, vocab_size)) & (mass / everything < p)) | largest_of_all
        allowed = allowed & (scores > float("-inf"))
        # Top-p of what top-k has left allows less, how much less only the search knows: a token that passes here
        # may be the answer or not, so no later one is.
        uncertain = use_k & (top_p < 1.0) & (min_p > 0.0) & ~largest_of_all
        winner = tl.min(tl.where(allowed, offs_c, _CANDIDATES))
        answered = tl.sum(((offs_c == winner) & ~uncertain).to(tl.int32))
        tl.store(buffer.status + row, tl.where(answered == 1, 1, -1))
        token = tl.sum(tl.where(offs_c == winner, ids, 0))
        logit = tl.max(tl.where(offs_c == winner, logits, float("-inf")))
        tl.store(output.token_ids + row, token.to(tl.int64))
        tl.store(output.scores + row, tl.max(tl.where(offs_c == winner, scores, float("-inf"))))
        if output.logprobs is not None:
            store_logprob(output, row, logit, largest, everything, inv_temperature, True)


@triton.jit
def _lowest_of_min_p(group_max, num_groups, inv_temperature, min_p, BLOCK: tl.constexpr):
    """The smallest logit that min-p allows."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, num_groups, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(group_max + offs, mask=offs < num_groups, other=float("-inf")))
    return min_p_limit(tl.max(largest), inv_temperature, min_p)


@triton.jit(
    do_not_specialize=["num_rows", "num_splits", "num_groups", "vocab_size", "vocab_start", "num_programs"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def sample_truncated_kernel(
    splits,  # SplitOperands, of P * TOP_GROUPS slots, with ``second``
    buffer,  # BufferOperands, with logits and group_max; out: status
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    truncation,  # TruncationOperands
    output,  # SampleOutput, out
    num_rows,
    num_splits,
    num_groups,
    vocab_size,
    vocab_start,
    num_programs,  # per row, a divisor of SPLITS
    # constexpr
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    width = num_groups * rng.GROUP_SIZE  # a multiple that the compiler knows: it loads 16 bytes at a time
    row = tl.program_id(0) // num_programs
    program = tl.program_id(0) % num_programs
    temperature = tl.load(temperature_ptr + row)
    greedy, inv_temperature = invert_temperature(temperature)
    if ~greedy & rows_truncated(truncation, row, True, vocab_size):
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        top_k = tl.load(truncation.top_k + row)
        top_p = tl.load(truncation.top_p + row)
        min_p = tl.load(truncation.min_p + row)
        # Twice as many groups as top-k needs, for ties and for several groups of one set.
        if (top_k >= 1) & (top_k <= CANDIDATES // 2) & (top_k < vocab_size):
            if program == 0:
                largest, total = mass_of_splits(splits, row, num_rows, num_splits, inv_temperature, BLOCK_P)
                token, logit, score, answered = draw_small_top_k(
                    buffer.logits + row.to(tl.int64) * width,
                    buffer.group_max + row.to(tl.int64) * num_groups,
                    buffer.group_list + row * _LISTED_GROUPS,
                    inv_temperature,
                    seed,
                    position,
                    top_k,
                    top_p,
                    min_p,
                    total,
                    num_groups,
                    BLOCK_S,
                    CANDIDATES,
                    KEY_SHIFT,
                )
                tl.store(buffer.status + row, tl.where(answered, 1, -1))
                tl.store(output.token_ids + row, (vocab_start + token).to(tl.int64))
                tl.store(output.scores + row, score)
                if output.logprobs is not None:
                    store_logprob(output, row, logit, largest, total, inv_temperature, True)
        else:
            row_logits = buffer.logits + row.to(tl.int64) * width
            lowest = tl.full([], float("-inf"), tl.float32)
            if min_p > 0.0:
                group_max = buffer.group_max + row.to(tl.int64) * num_groups
                lowest = _lowest_of_min_p(group_max, num_groups, inv_temperature, min_p, BLOCK)
            ids, logits, scores = _best_candidates(
                row,
                splits,
                buffer.group_list + row * _LISTED_GROUPS + program * _CANDIDATE_GROUPS,
                num_rows,
                num_splits,
                inv_temperature,
                seed,
                position,
                lowest,
                BLOCK_P,
            )
            if ((top_k >= 1) & (top_k < vocab_size)) | (top_p < 1.0):
                _measure_candidates(
                    row,
                    program,
                    num_programs,
                    ids,
                    logits,
                    scores,
                    row_logits,
                    splits,
                    buffer,
                    num_rows,
                    num_splits,
                    inv_temperature,
                    top_k,
                    top_p,
                    min_p,
                    output,
                    vocab_size,
                    num_groups,
                    BLOCK_P,
                    BLOCK,
                    SPLITS,
                    BLOCK_S,
                )
            elif program == 0:
                # Min-p alone: the first token that it allows.
                score = tl.max(scores)
                logit = tl.min(logits)
                tl.store(buffer.status + row, tl.where(score > float("-inf"), 1, -1))
                token = tl.sum(tl.where(tl.arange(0, _CANDIDATES) == 0, ids, 0))
                tl.store(output.token_ids + row, token.to(tl.int64))
                tl.store(output.scores + row, score)
                if output.logprobs is not None:
                    largest, total = mass_of_splits(splits, row, num_rows, num_splits, inv_temperature, BLOCK_P)
                    store_logprob(output, row, logit, largest, total, inv_temperature, True)
    elif program == 0:
        tl.store(buffer.status + row, 0)
        draw_from_splits(
            splits,
            temperature_ptr,
            seed_ptr,
            position_ptr,
            output,
            num_rows,
            num_splits,
            vocab_start + vocab_size,
            row,
            BLOCK_P,
            1,
        )


def sample_truncated(
    workspace: Workspace,
    buffer: LogitsBuffer,  # with the logits of truncated rows
    num_splits: int,  # P * TOP_GROUPS
    params: BatchParams,  # with a truncation
    spec: LogitsSpec,
    *,
    return_logprob: bool,
    max_splits: int,
    config: TruncationConfig,
) -> SampleOutput:
    """The tokens: truncated rows from ``buffer``, the others from the splits in ``workspace``.

    ``buffer.status [B]``: 0 for a row without a truncation, 1 for one that the pass has answered, more where it took a
    search. Raises ValueError for a buffer of another vocabulary or fewer rows.
    """
    num_rows, device = params.temperature.shape[0], params.temperature.device
    if buffer.num_rows < num_rows or buffer.width != spec.num_groups * rng.GROUP_SIZE:
        raise ValueError(
            f"buffer holds {buffer.num_rows} rows of {buffer.width} logits; "
            f"expected at least {num_rows} rows of {spec.vocab_size} rounded up to a multiple of {rng.GROUP_SIZE}"
        )
    assert params.truncation is not None
    output = SampleOutput.empty(num_rows, device, return_logprob)
    # Each program of a row finds its candidates anew: no more of them than run at a time.
    programs = config.splits
    while programs > 1 and num_rows * programs > resident_programs(device, _RESIDENT):
        programs //= 2
    launch(
        sample_truncated_kernel,
        num_rows * programs,
        (
            workspace.splits,
            buffer.operands,
            params.temperature,
            params.seed,
            params.position,
            params.truncation.operands,
            output,
            num_rows,
            num_splits,
            spec.num_groups,
            spec.vocab_size,
            spec.vocab_start,
            programs,
        ),
        {
            "BLOCK_P": next_power_of_2(max_splits),
            "BLOCK": config.block,
            "SPLITS": config.splits,
            "BLOCK_S": num_group_blocks(buffer.width),
            "CANDIDATES": config.candidate_groups,
            "KEY_SHIFT": key_shift(buffer.dtype),
        },
        config.num_warps,
        (device.index, buffer.dtype, return_logprob),
    )
    search_truncated(buffer, params, spec, output, config)
    return output
