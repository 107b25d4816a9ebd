"""The second pass of the screened path: the groups that could still win, from the head itself; and the token.

A group is rescored when, for any row of a block, what it could reach (``score_hi`` of ``screen.py``) is at least what
some group does reach (``threshold``): for all rows of the block, with the fused pass's products in its order, its noise
and its epilogue. So the best of the rescored groups is the best of all.

Each program answers for ``chunk`` groups, or for an even share of what ``list_groups`` has found, and gathers those of
them that are to be rescored, ``block_v / GROUP_SIZE`` at a time. That may be none or all of them: there is no list that
could overflow. The program of a block of rows that finishes last draws the tokens inside the winning groups.

The exact score of a rescored group is a higher lower bound than the screen's: it raises ``threshold``, and a program
compares the groups that it has not read yet with the new value. Other programs raise it at the same time. So all
threads of a program take the value that one atomic operation returned: threads that read different values could
disagree on a branch with a barrier in it.

A truncated row takes part with the token that it would have without a truncation, or leaves its groups to others: see
``screened_truncated.py``. In either case the logits that are read go to a buffer.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
import triton
import triton.language as tl

from . import rng
from .config import MIN_CHUNK, ScreenConfig, cdiv
from .epilogue import (
    best_of_slots,
    bound_logits,
    edit_logits,
    find_edits,
    invert_temperature,
    score_groups,
    transform_logits,
)
from .intrinsics import LN_2, LOG2_E, float_to_ordered, log2, ordered_to_float, prefetch
from .launch import launch, resident_programs, supports_early_launch
from .params import ROW_POINTERS, TRITON_DTYPES, BatchParams, LMHead, SampleOutput
from .reduce_splits import pick_in_groups
from .screen import NO_BEST
from .workspace import LogitsBuffer, RowStatus, ScreenCounter, ScreenWorkspace

# A block of rows with more candidate groups than this share of the head is counted in MANY_CANDIDATES: the fused pass
# may be faster for it.
MANY_CANDIDATES = tl.constexpr(1.0 / 16.0)

_PLAIN, _WIDE, _OPEN = (tl.constexpr(int(one)) for one in (RowStatus.PLAIN, RowStatus.WIDE, RowStatus.OPEN))
_LINE_BYTES = tl.constexpr(128)
_LINES = tl.constexpr(8)  # lines that are asked for at a time
_LOWEST = tl.constexpr(-(2**31))
_LOW_WORD = tl.constexpr(2**32 - 1)
_COUNT_ROW_BLOCKS = tl.constexpr(int(ScreenCounter.ROW_BLOCKS))
_COUNT_ROWS = tl.constexpr(int(ScreenCounter.ROWS))
_COUNT_GROUPS = tl.constexpr(int(ScreenCounter.GROUPS))
_COUNT_CANDIDATES = tl.constexpr(int(ScreenCounter.CANDIDATES))
_COUNT_CERTIFIED_ROWS = tl.constexpr(int(ScreenCounter.CERTIFIED_ROWS))
_COUNT_MANY_CANDIDATES = tl.constexpr(int(ScreenCounter.MANY_CANDIDATES))


class RescorePass(enum.IntEnum):
    """Which groups are read from the head, and for which rows."""

    FIRST = 0  # those with the best scores; of open rows, those that surely have an allowed token, by max_logit_lo
    POSSIBLE = 1  # of open rows: all that could have one, by logit_hi
    WIDE = 2  # of wide rows: those that max_logit_lo marks
    ALL = 3  # of rows without an answer


_FIRST, _POSSIBLE = tl.constexpr(int(RescorePass.FIRST)), tl.constexpr(int(RescorePass.POSSIBLE))
_WIDE_PASS = tl.constexpr(int(RescorePass.WIDE))


@triton.jit
def flag_groups(score_hi_ptr, threshold, offs_c, mask_c, offs_b, mask_b, group_stride, row_stride):
    """``[BLOCK_C, BLOCK_B]`` int32: 1 where the row could take its token from the group. offs_c: ``[BLOCK_C]`` groups.
    threshold: ``[BLOCK_B]`` int32, ordered scores."""
    score_hi = tl.load(
        score_hi_ptr + offs_c[:, None] * group_stride + offs_b[None, :] * row_stride,
        mask=mask_c[:, None] & mask_b[None, :],
        other=float("-inf"),
    )
    return ((score_hi >= ordered_to_float(threshold)[None, :]) & (score_hi > float("-inf"))).to(tl.int32)


@triton.jit
def flag_possible(screen, buffer, bound, offs_c, mask_c, offs_b, mask_b, num_groups):
    """As ``flag_groups``: 1 where the group could have an allowed token of the row and has not been read."""
    flags = flag_groups(screen.logit_hi, bound, offs_c, mask_c, offs_b, mask_b, 1, num_groups)
    largest = tl.load(
        buffer.group_max + offs_c[:, None] + offs_b[None, :] * num_groups, mask=flags > 0, other=float("-inf")
    )
    return tl.where(largest > float("-inf"), 0, flags)


@triton.jit
def flag_of_pass(screen, buffer, threshold, offs_c, mask_c, offs_b, mask_b, num_rows, num_groups, PASS: tl.constexpr):
    """As ``flag_groups``, of one pass: 1 where the row needs the group. buffer: None without a truncation."""
    if buffer is None:
        flags = flag_groups(screen.score_hi, threshold, offs_c, mask_c, offs_b, mask_b, num_rows, 1)
    else:
        status = tl.load(buffer.status + offs_b, mask=mask_b, other=_PLAIN)
        bound = tl.load(screen.bound + offs_b, mask=mask_b, other=0)
        rows = mask_b & (status == (_WIDE if PASS == _WIDE_PASS else _OPEN))
        if PASS == _POSSIBLE:
            flags = flag_possible(screen, buffer, bound, offs_c, mask_c, offs_b, rows, num_groups)
        else:
            flags = flag_groups(screen.max_logit_lo, bound, offs_c, mask_c, offs_b, rows, 1, num_groups)
        if PASS == _FIRST:
            flags |= flag_groups(screen.score_hi, threshold, offs_c, mask_c, offs_b, mask_b & ~rows, num_rows, 1)
    return flags


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def list_groups_kernel(
    screen,  # ScreenOperands; out: group_list, group_place, num_flagged; in the first pass candidates
    buffer,  # BufferOperands, with status, or None
    num_rows,
    num_groups,
    # constexpr
    PASS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    chunk = tl.program_id(0) // num_row_blocks
    row_block = tl.program_id(0) % num_row_blocks
    offs_b = row_block * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    offs_c = chunk * CHUNK + tl.arange(0, BLOCK_C)
    mask_c = offs_c < tl.minimum((chunk + 1) * CHUNK, num_groups)
    threshold = tl.load(screen.threshold + offs_b, mask=mask_b, other=0)
    possible = flag_of_pass(screen, buffer, threshold, offs_c, mask_c, offs_b, mask_b, num_rows, num_groups, PASS)
    flagged = tl.max(possible, axis=1)
    num_flagged = tl.sum(flagged)
    if num_flagged > 0:
        first = tl.atomic_add(screen.num_flagged + row_block, num_flagged, sem="relaxed")
        place = first + tl.cumsum(flagged, axis=0) - 1
        tl.store(screen.group_list + row_block * num_groups + place, offs_c, mask=flagged > 0)
        tl.store(screen.group_place + row_block * num_groups + offs_c, place, mask=flagged > 0)
        if PASS == _FIRST:
            candidates = tl.sum(possible, axis=0)
            tl.atomic_add(screen.candidates + offs_b, candidates, mask=mask_b & (candidates > 0), sem="relaxed")


def list_groups(
    num_rows: int,
    workspace: ScreenWorkspace,
    config: ScreenConfig,
    buffer: LogitsBuffer | None = None,  # of a truncated batch
    which: RescorePass = RescorePass.FIRST,  # not ALL
) -> None:
    """Put the groups of a pass into one list per block of rows, so that programs share them evenly, however they lie in
    the vocabulary. Entries come in any order: the best of the rescored groups does not depend on it."""
    device = workspace.limbs.device
    early = config.early and supports_early_launch(device)
    tile = config.rescore_tile
    launch(
        list_groups_kernel,
        cdiv(workspace.num_groups, tile.chunk) * cdiv(num_rows, tile.block_b),
        (
            workspace.operands,
            None if buffer is None else buffer.operands,
            num_rows,
            workspace.num_groups,
        ),
        {"PASS": int(which), "BLOCK_B": tile.block_b, "CHUNK": tile.chunk, "BLOCK_C": tile.block_c, "EARLY": early},
        config.rescore_warps,
        (device.index, None if buffer is None else buffer.dtype),
        early=early,
    )


@triton.jit
def logits_of_ids(
    weight_ptr,
    hidden_ptrs,  # [BLOCK_D, BLOCK_B] pointers to the first hidden elements of the rows
    ids,  # [BLOCK_V] i32, rows of the head
    valid,  # [BLOCK_V] bool
    offs_b,
    mask_b,
    vocab_start,
    weight_stride,
    logit_scale,
    softcap,
    edits,
    found,
    D: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """``[BLOCK_V, BLOCK_B]`` float32: the fused pass's logits of these ids, edits included."""
    LINE: tl.constexpr = _LINE_BYTES // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = LINE * _LINES
    offs_d = tl.arange(0, BLOCK_D)
    row_ptrs = weight_ptr + ids.to(tl.int64)[:, None] * weight_stride
    if PREFETCH:
        offs_l = tl.arange(0, _LINES) * LINE
        for line in tl.range(0, D, LINES):
            prefetch(row_ptrs + (line + offs_l)[None, :], valid[:, None] & (line + offs_l < D)[None, :])
    acc = tl.zeros([ids.shape[0], offs_b.shape[0]], tl.float32)
    for d in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        mask_d = d + offs_d < D
        blk_w = tl.load(row_ptrs + (d + offs_d)[None, :], mask=valid[:, None] & mask_d[None, :], other=0.0)
        blk_h = tl.load(hidden_ptrs + d, mask=mask_b[None, :] & mask_d[:, None], other=0.0)
        acc = tl.dot(blk_w, blk_h, acc, input_precision="ieee")
    logits = transform_logits(acc, logit_scale, softcap, LOGITS_DTYPE, DROP_NAN=True)
    logits = bound_logits(logits, valid[:, None])
    if edits is not None:
        inside = valid[:, None] & mask_b[None, :]
        logits = edit_logits(logits, inside, offs_b, (vocab_start + ids)[:, None], found, edits)
    return logits


@triton.jit
def store_groups(buffer, logits, group, live, rows, offs_b, num_groups):
    """Put logits ``[SLOTS, GROUP_SIZE, BLOCK_B]`` and their maxima into the buffer, for the rows in ``rows``."""
    offs_i = tl.arange(0, rng.GROUP_SIZE)
    out = offs_b.to(tl.int64)[None, :] * num_groups + group[:, None]
    mask = live[:, None] & rows[None, :]
    logits_out = out[:, None, :] * rng.GROUP_SIZE + offs_i[None, :, None]
    tl.store(buffer.logits + logits_out, logits, mask=tl.broadcast_to(mask[:, None, :], logits.shape))
    tl.store(buffer.group_max + out, tl.max(logits, axis=1), mask=mask)
    return out, mask


@triton.jit
def store_exact(screen, logits, out, mask, inv_temperature):
    """Put what is known of groups, of whose logits ``[SLOTS, GROUP_SIZE, BLOCK_B]`` the screen had ends, into their
    place. out, mask: of ``store_groups``."""
    largest = tl.max(logits, axis=1)
    tl.store(screen.max_logit_lo + out, largest, mask=mask)
    tl.store(screen.logit_hi + out, largest, mask=mask)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2((logits - shift[:, None, :]) * (inv_temperature * LOG2_E)[None, None, :])
    log_mass = shift * inv_temperature[None, :] + log2(tl.sum(weights, axis=1)) * LN_2
    tl.store(screen.lse_hi + out, log_mass, mask=mask)
    tl.store(screen.lse_lo + out, log_mass, mask=mask)


@triton.jit
def _draw_in_best_groups(
    screen,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    output,
    row_block,
    offs_b,
    num_rows,
    num_groups,
    num_programs,
    vocab_size,
    vocab_start,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The tokens of a block of rows, once all its programs are done; and its counts."""
    mask_b = offs_b < num_rows
    first_group = vocab_start // rng.GROUP_SIZE
    packed = tl.load(screen.best + offs_b, mask=mask_b, other=0)
    scored = mask_b & (packed != NO_BEST)
    score = tl.where(scored, ordered_to_float((packed >> 32).to(tl.int32)), float("-inf"))
    # A row without a token takes the first id, as in the fused pass.
    group = tl.where(scored, (packed & _LOW_WORD).to(tl.int32) ^ rng.NO_GROUP, first_group)
    if LISTED:
        place_ptr = screen.group_place + row_block * num_groups
        program = tl.load(place_ptr + group - first_group, mask=scored, other=0) % num_programs
    else:
        program = (group - first_group) // CHUNK
    offs_i = tl.arange(0, rng.GROUP_SIZE)
    logits = tl.load(
        screen.logits + (program * num_rows + offs_b)[None, :] * rng.GROUP_SIZE + offs_i[:, None],
        mask=scored[None, :],
        other=float("-inf"),
    )
    temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
    seed = tl.load(seed_ptr + offs_b, mask=mask_b, other=0)
    position = tl.load(position_ptr + offs_b, mask=mask_b, other=0)
    pick = pick_in_groups(group, logits, temperature, seed, position, vocab_start + vocab_size)
    tl.store(output.token_ids + offs_b, (group * rng.GROUP_SIZE + pick).to(tl.int64), mask=mask_b)
    tl.store(output.scores + offs_b, score, mask=mask_b)
    candidates = tl.load(screen.candidates + offs_b, mask=mask_b, other=0)
    num_flagged = tl.load(screen.num_flagged + row_block)
    tl.store(screen.num_flagged + row_block, 0)
    # One launch at a time counts here, but its blocks of rows do so together.
    certified = tl.sum((mask_b & (candidates <= 1)).to(tl.int64))
    many = (num_flagged > num_groups * MANY_CANDIDATES).to(tl.int64)
    tl.atomic_add(screen.counters + _COUNT_ROW_BLOCKS, 1, sem="relaxed")
    tl.atomic_add(screen.counters + _COUNT_ROWS, tl.sum(mask_b.to(tl.int64)), sem="relaxed")
    tl.atomic_add(screen.counters + _COUNT_CANDIDATES, tl.sum(candidates.to(tl.int64)), sem="relaxed")
    tl.atomic_add(screen.counters + _COUNT_CERTIFIED_ROWS, certified, sem="relaxed")
    tl.atomic_add(screen.counters + _COUNT_MANY_CANDIDATES, many, sem="relaxed")


@triton.jit(
    do_not_specialize=["num_rows", "vocab_size", "vocab_start", "num_programs", "given_edits"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def rescore_groups_kernel(
    weight_ptr,  # [V, D]
    hidden_ptr,  # [B, D]
    screen,  # ScreenOperands, with score_hi and threshold, which it raises
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    edits,  # EditOperands, MaskOperands, or None
    buffer,  # BufferOperands, with status, out: groups of truncated rows; None where there is no truncation
    output,  # SampleOutput, out
    num_rows,
    vocab_size,
    vocab_start,
    num_programs,  # per block of rows
    weight_stride,
    hidden_stride,
    logit_scale,  # or None, as the next
    softcap,
    given_edits,  # FeatureOperands.given_edits
    # constexpr
    D: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    BLOCK_B: tl.constexpr = TILE.block_b
    BLOCK_V: tl.constexpr = TILE.block_v
    SLOTS: tl.constexpr = BLOCK_V // rng.GROUP_SIZE
    TRUNCATE: tl.constexpr = buffer is not None
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    program = tl.program_id(0) // num_row_blocks
    row_block = tl.program_id(0) % num_row_blocks
    offs_b = row_block * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    num_groups = tl.cdiv(vocab_size, rng.GROUP_SIZE)
    list_ptr = screen.group_list + row_block * num_groups
    if LISTED:
        # Entries program, program + num_programs, ...: only as many programs arrive as have one, and the first.
        num_listed = tl.load(screen.num_flagged + row_block)
        arriving = tl.maximum(tl.minimum(num_listed, num_programs), 1)
        list_ptr += program
        num_own = tl.cdiv(tl.maximum(num_listed - program, 0), num_programs)
        list_stride = num_programs
    else:
        arriving = num_programs
        offs_c = program * TILE.chunk + tl.arange(0, TILE.block_c)
        mask_c = offs_c < tl.minimum((program + 1) * TILE.chunk, num_groups)
        # Not from the L1 cache: other programs raise it. An older value would only flag more. Each pair of a group
        # and a row belongs to one thread here (MAX_RESCORE_WARPS); a group's flag is a maximum over threads.
        threshold = tl.load(screen.threshold + offs_b, mask=mask_b, other=0, cache_modifier=".cg")
        possible = flag_of_pass(screen, buffer, threshold, offs_c, mask_c, offs_b, mask_b, num_rows, num_groups, _FIRST)
        flagged = tl.max(possible, axis=1)
        num_own = tl.sum(flagged)
        list_ptr += program * TILE.chunk
        list_stride = 1
        if num_own > 0:
            candidates = tl.sum(possible, axis=0)
            tl.atomic_add(screen.candidates + offs_b, candidates, mask=mask_b & (candidates > 0), sem="relaxed")
            tl.atomic_add(screen.num_flagged + row_block, num_own, sem="relaxed")
            tl.store(list_ptr + tl.cumsum(flagged, axis=0) - 1, offs_c, mask=flagged > 0)
            tl.debug_barrier()
    if num_own > 0:
        temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
        greedy, inv_temperature = invert_temperature(temperature)
        prunes = num_own > 0
        if TRUNCATE:
            status = tl.load(buffer.status + offs_b, mask=mask_b, other=_PLAIN)
            truncated, open_rows = status < 0, status == _OPEN
            prunes = tl.max(open_rows.to(tl.int32)) == 0  # by scores, which say nothing of open rows
        offs_s = tl.arange(0, SLOTS)
        offs_i = tl.arange(0, rng.GROUP_SIZE)
        block_offs = offs_b[None, :] + tl.zeros([SLOTS, 1], tl.int32)
        block_mask = mask_b[None, :] & (offs_s >= 0)[:, None]
        seed = tl.load(seed_ptr + block_offs, mask=block_mask, other=0)
        position = tl.load(position_ptr + block_offs, mask=block_mask, other=0)
        found = find_edits(edits, given_edits, offs_b, mask_b)
        hidden_ptrs = hidden_ptr + offs_b.to(tl.int64)[None, :] * hidden_stride + tl.arange(0, TILE.block_d)[:, None]
        best_score = tl.full([SLOTS, BLOCK_B], float("-inf"), tl.float32)
        best_group = tl.full([SLOTS, BLOCK_B], rng.NO_GROUP, tl.int32)
        best_logits = tl.full([SLOTS, rng.GROUP_SIZE, BLOCK_B], float("-inf"), tl.float32)
        num_read = tl.full([], 0, tl.int32)
        for step in tl.range(0, num_own, SLOTS):
            live = step + offs_s < num_own
            group = tl.load(list_ptr + (step + offs_s) * list_stride, mask=live, other=0)
            if (step > 0) & prunes:
                raised = tl.atomic_max(screen.threshold + offs_b, _LOWEST, mask=mask_b, sem="relaxed")
                still_possible = flag_groups(screen.score_hi, raised, group, live, offs_b, mask_b, num_rows, 1)
                live &= tl.max(still_possible, axis=1) > 0
            num_live = tl.sum(live.to(tl.int32))
            num_read += num_live
            if num_live > 0:
                ids = tl.reshape(group[:, None] * rng.GROUP_SIZE + offs_i[None, :], [BLOCK_V])
                valid = tl.reshape(live[:, None] & (offs_i >= 0)[None, :], [BLOCK_V]) & (ids < vocab_size)
                logits = logits_of_ids(
                    weight_ptr,
                    hidden_ptrs,
                    ids,
                    valid,
                    offs_b,
                    mask_b,
                    vocab_start,
                    weight_stride,
                    logit_scale,
                    softcap,
                    edits,
                    found,
                    D,
                    LOGITS_DTYPE,
                    TILE.block_d,
                    TILE.stages,
                    TILE.prefetch,
                )
                logits = tl.reshape(logits, [SLOTS, rng.GROUP_SIZE, BLOCK_B])
                if TRUNCATE:
                    out, mask = store_groups(buffer, logits, group, live, truncated, offs_b, num_groups)
                    store_exact(screen, logits, out, mask, inv_temperature)
                group += vocab_start // rng.GROUP_SIZE
                score, _, _ = score_groups(logits, live, inv_temperature, greedy, seed, position, group)
                if TRUNCATE:
                    score = tl.where(open_rows[None, :], float("-inf"), score)
                better = (score > best_score) | ((score == best_score) & (group[:, None] < best_group))
                best_score = tl.where(better, score, best_score)
                best_group = tl.where(better, group[:, None], best_group)
                best_logits = tl.where(better[:, None, :], logits, best_logits)
                if step + SLOTS < num_own:
                    reached = float_to_ordered(tl.max(best_score, axis=0))
                    tl.atomic_max(screen.threshold + offs_b, reached, mask=mask_b, sem="relaxed")
        score, group, chosen = best_of_slots(best_score, best_group, 1)
        score = tl.max(score, axis=0)
        group = tl.min(group, axis=0)
        best_logits = tl.reshape(best_logits, [SLOTS, 1, rng.GROUP_SIZE, BLOCK_B])
        logits = tl.sum(tl.sum(tl.where(chosen[:, :, None, :], best_logits, 0.0), axis=0), axis=0)
        scored = mask_b & (score > float("-inf"))
        out = (program * num_rows + offs_b)[None, :] * rng.GROUP_SIZE + offs_i[:, None]
        tl.store(screen.logits + out, logits, mask=scored[None, :])
        packed = (float_to_ordered(score).to(tl.int64) << 32) | (group ^ rng.NO_GROUP).to(tl.int64)
        tl.atomic_max(screen.best + offs_b, packed, mask=scored, sem="relaxed")
        tl.atomic_max(screen.threshold + offs_b, float_to_ordered(score), mask=scored, sem="relaxed")
        tl.atomic_add(screen.counters + _COUNT_GROUPS, num_read.to(tl.int64), sem="relaxed")

    if program < arriving:
        tl.debug_barrier()  # the stores of this program's other threads come before its arrival
        if tl.atomic_add(screen.arrived + row_block, 1, sem="acq_rel") == arriving - 1:
            tl.store(screen.arrived + row_block, 0)
            _draw_in_best_groups(
                screen,
                temperature_ptr,
                seed_ptr,
                position_ptr,
                output,
                row_block,
                offs_b,
                num_rows,
                num_groups,
                num_programs,
                vocab_size,
                vocab_start,
                TILE.chunk,
                LISTED,
            )


def num_reading_programs(num_rows: int, workspace: ScreenWorkspace, config: ScreenConfig, *, listed: bool) -> int:
    """The programs that share the groups for each block of rows; a chunk each where these are not listed."""
    if not listed:
        return cdiv(workspace.num_groups, config.chunk)
    resident = resident_programs(workspace.limbs.device, 1)
    row_blocks = cdiv(num_rows, config.rescore_tile.block_b)
    return max(1, min(resident // row_blocks, cdiv(workspace.num_groups, MIN_CHUNK)))


def launch_reader(
    kernel: Any,
    programs: int,  # per block of rows
    hidden: torch.Tensor,  # [B, D]
    head: LMHead,
    params: BatchParams,
    workspace: ScreenWorkspace,
    config: ScreenConfig,
    *,
    rows: tuple[torch.Tensor, ...],
    outputs: tuple[Any, ...],
    constants: dict[str, Any],
    buffer_dtype: torch.dtype | None = None,
    block_b: int | None = None,
) -> None:
    """Run a kernel that reads ids of the head which the screen has chosen.

    rows: the kernel's parameters of rows. outputs: its outputs beside the workspace. constants: its constants between
    LOGITS_DTYPE and EARLY. buffer_dtype: dtype of the logits in ``outputs``. block_b: rows of a block, those of the
    rescoring when None.
    """
    num_rows, spec = hidden.shape[0], head.spec
    early = config.early and supports_early_launch(hidden.device)
    features = params.operands(spec, workspace.operands.score_hi, workspace.operands.threshold)
    launch(
        kernel,
        programs * cdiv(num_rows, block_b or config.rescore_tile.block_b),
        (
            head.weight,
            hidden,
            workspace.operands,
            *rows,
            features.edits,
            *outputs,
            num_rows,
            spec.vocab_size,
            spec.vocab_start,
            programs,
            head.weight.stride(0),
            hidden.stride(0),
            features.logit_scale,
            features.softcap,
            features.given_edits,
        ),
        {"D": hidden.shape[1], "LOGITS_DTYPE": TRITON_DTYPES[head.rounding], **constants, "EARLY": early},
        config.rescore_warps,
        (
            hidden.device.index,
            head.variant,
            hidden.stride(0),
            hidden.data_ptr() % 16 == 0,
            features.variant,
            buffer_dtype,
        ),
        early=early,
    )


def rescore_groups(
    hidden: torch.Tensor,  # [B, D], as ``screened_sample`` has checked it
    head: LMHead,
    params: BatchParams,
    workspace: ScreenWorkspace,  # with what ``screen_head`` has left
    config: ScreenConfig,
    buffer: LogitsBuffer | None = None,
) -> SampleOutput:
    """The tokens that rows have without a truncation, from the groups that the screen has not ruled out. Logits of
    truncated rows, which need ``buffer``, go there. Rows that are open get no token."""
    num_rows = hidden.shape[0]
    output = SampleOutput.empty(num_rows, hidden.device, False)
    if config.listed:
        list_groups(num_rows, workspace, config, buffer)
    launch_reader(
        rescore_groups_kernel,
        num_reading_programs(num_rows, workspace, config, listed=config.listed),
        hidden,
        head,
        params,
        workspace,
        config,
        rows=(params.temperature, params.seed, params.position),
        outputs=(None if buffer is None else buffer.operands, output),
        constants={"TILE": config.rescore_tile, "LISTED": config.listed},
        buffer_dtype=None if buffer is None else buffer.dtype,
    )
    return output
