"""Truncated rows on the screened path: which groups could hold their tokens, and the token.

``bound_truncated`` finds each row's threshold. If the largest logits of k groups are at least x, k logits are at least
x, and a top-k of k allows no smaller one: a group whose upper end is below x is ruled out. A row without a small top-k
takes as many groups as the draw can hold; whether they were enough is decided by the draw. After the groups that are
certain to reach the threshold have been read, their logits are known exactly, and the same step gives a higher
threshold that fewer groups can reach.

``list_ids`` and ``read_ids`` rule out more groups. A group that could reach the threshold has 16
ids, of which mostly one has an upper end above it. Reading that id alone says whether it does: most do not, since an
upper end is far above the logit itself. A group with an id that does is read whole, for the noise inside the group
needs all its logits.

``draw_rescored`` draws. Top-k and min-p depend on the rescored groups alone. Top-p is a share of the row's whole mass,
which the screen knows to within two ends: the tokens allowed under the smallest mass are also allowed under the true
one, and those under the true one also under the largest. So a token that wins among those of the largest mass, and is
allowed under the smallest, is the winner. Where the two ends do not decide, groups whose ends are furthest apart are
read as well, as many as will probably do, and ``draw_rescored`` draws again: their mass is exact then. A row that is
still without a token, with more groups than the draw can hold, or whose limits reach below what was rescored, is left:
its whole head is read, and ``search_truncated`` answers it.
"""

from __future__ import annotations

import enum

import torch
import triton
import triton.language as tl

from . import rng
from .config import ScreenConfig, TruncationConfig, cdiv
from .epilogue import find_edits, invert_temperature, relative_weight, rows_truncated
from .intrinsics import LN_2, LOG2_E, float_to_ordered, log2, ordered_to_float
from .launch import launch, resident_programs, supports_early_launch
from .params import ROW_POINTERS, BatchParams, LMHead, SampleOutput
from .rescore import (
    flag_groups,
    launch_reader,
    list_groups,
    logits_of_ids,
    num_reading_programs,
    store_groups,
)
from .truncation_math import (
    bound_of_top_k,
    count_and_mass,
    first_allowed,
    is_allowed,
    key_below,
    key_shift,
    largest_with_key,
    list_groups_above,
    listed_logits,
    mass_of_largest,
    min_p_limit,
    set_maxima,
)
from .workspace import ID_ROWS, LISTED_GROUPS, LogitsBuffer, ScreenCounter, ScreenWorkspace, num_group_blocks

_LISTED_GROUPS = tl.constexpr(LISTED_GROUPS)
_COUNT_GROUPS = tl.constexpr(int(ScreenCounter.GROUPS))
# Relative error of a float32 sum of so many exponentials: a constant part, and a part per unit of the largest exponent.
_SUM_SLACK = tl.constexpr(2.0**-12)
_EXPONENT_SLACK = tl.constexpr(2.0**-21)
_ROOM = tl.constexpr(0.5)  # the part of the room that is counted on: an estimate is not exact
_TINY = tl.constexpr(1e-30)
_OCTAVE = tl.constexpr(1 << 23)  # between ordered float32 numbers whose quotient is 2
_OCTAVES = tl.constexpr(24)  # the smaller masses are nothing beside the largest
_GROUPS_AT_ONCE = 16  # groups per program of list_ids
# Warps of list_ids: no more threads than pairs of these groups and a block's rows, so that no thread reads what another
# one changes.
_LIST_WARPS = 4


# The states of ``BufferOperands.status`` that ``draw_rescored`` leaves. Both are negative: without an answer.
_LEFT = tl.constexpr(-1)
_WIDE = tl.constexpr(-2)  # more of the mass has to be known


class RescorePass(enum.IntEnum):
    """The groups that ``read_groups`` reads for truncated rows, before and after the pass that draws."""

    CERTAIN_GROUPS = 0  # the groups that surely reach the row's threshold, by ``max_logit_lo``
    UNANSWERED_ROWS = 1  # all groups of the rows whose status is negative


@triton.jit
def _groups_to_find(top_k, vocab_size, CANDIDATES: tl.constexpr):
    """The number of largest groups to look for, and a flag, true if they are enough for the top-k. Where the top-k is
    not small, the number leaves room for ties."""
    small = (top_k >= 1) & (top_k < vocab_size) & (top_k <= CANDIDATES // 2)
    return tl.where(small, top_k, CANDIDATES * 5 // 8), small


@triton.jit(do_not_specialize=["num_groups", "vocab_size"], do_not_specialize_on_alignment=[*ROW_POINTERS])
def bound_truncated_kernel(
    screen,  # ScreenOperands, with max_logit_lo; out: threshold of truncated rows
    buffer,  # BufferOperands, out unless RESCORED: group_max -inf, as in groups that are not rescored
    temperature_ptr,  # [B] f32
    truncation,  # TruncationOperands
    num_groups,
    vocab_size,
    # constexpr
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    RESCORED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if ~(tl.load(temperature_ptr + row) <= 0.0) & rows_truncated(truncation, row, True, vocab_size):
        max_logit_lo = screen.max_logit_lo + row.to(tl.int64) * num_groups
        if not RESCORED:
            group_max = buffer.group_max + row.to(tl.int64) * num_groups
            for first in tl.range(0, num_groups, BLOCK_S):
                groups = first + tl.arange(0, BLOCK_S)
                tl.store(group_max + groups, float("-inf"), mask=groups < num_groups)
        maxima = set_maxima(max_logit_lo, num_groups, BLOCK_S)
        k, _ = _groups_to_find(tl.load(truncation.top_k + row), vocab_size, CANDIDATES)
        bound = bound_of_top_k(maxima, tl.max(maxima), k, 0)
        tl.store(screen.threshold + row, float_to_ordered(bound))


def bound_truncated(
    num_rows: int,
    vocab_size: int,
    params: BatchParams,  # with a truncation
    workspace: ScreenWorkspace,  # with what ``screen_head`` has left
    buffer: LogitsBuffer,
    config: ScreenConfig,
    truncation_config: TruncationConfig,
    *,
    rescored: bool = False,
) -> None:
    """Put the thresholds of truncated rows into ``workspace``, and start their rows of ``buffer``.

    rescored: ``rescore_groups`` has put the exact largest logits of some groups into ``workspace``; the rows of
    ``buffer`` that it filled stay.
    """
    assert params.truncation is not None
    device = params.temperature.device
    early = config.early and supports_early_launch(device)
    launch(
        bound_truncated_kernel,
        num_rows,
        (
            workspace.operands,
            buffer.operands,
            params.temperature,
            params.truncation.operands,
            workspace.num_groups,
            vocab_size,
        ),
        {
            "BLOCK_S": num_group_blocks(buffer.width),
            "CANDIDATES": truncation_config.candidate_groups,
            "RESCORED": rescored,
            "EARLY": early,
        },
        truncation_config.num_warps,
        (device.index, buffer.dtype),
        early=early,
    )


@triton.jit(
    do_not_specialize=["num_rows", "vocab_size", "vocab_start", "num_programs", "given_edits"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def read_groups_kernel(
    weight_ptr,  # [V, D]
    hidden_ptr,  # [B, D]
    # ScreenOperands; out, with CERTAIN: max_logit_lo and the ends of the mass become exact, and score_hi -inf: not to
    # be read again
    screen,
    temperature_ptr,  # [B] f32
    truncation,  # TruncationOperands
    edits,  # EditOperands, MaskOperands, or None
    buffer,  # BufferOperands, out: logits and group_max
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
    CERTAIN: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    BLOCK_B: tl.constexpr = TILE.block_b
    BLOCK_V: tl.constexpr = TILE.block_v
    SLOTS: tl.constexpr = BLOCK_V // rng.GROUP_SIZE
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    program = tl.program_id(0) // num_row_blocks
    row_block = tl.program_id(0) % num_row_blocks
    offs_b = row_block * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    num_groups = tl.cdiv(vocab_size, rng.GROUP_SIZE)
    if CERTAIN:
        # As in rescore_groups_kernel with LISTED.
        num_listed = tl.load(screen.num_flagged + row_block)
        arriving = tl.maximum(tl.minimum(num_listed, num_programs), 1)
        num_own = tl.cdiv(tl.maximum(num_listed - program, 0), num_programs)
        greedy, inv_temperature = invert_temperature(tl.load(temperature_ptr + offs_b, mask=mask_b, other=0.0))
        rows = mask_b & ~greedy & rows_truncated(truncation, offs_b, mask_b, vocab_size)
    else:
        rows = mask_b & (tl.load(buffer.status + offs_b, mask=mask_b, other=0) < 0)
        num_own = tl.minimum(TILE.chunk, num_groups - program * TILE.chunk)
        num_own = tl.where(tl.max(rows.to(tl.int32)) > 0, num_own, 0)
    if num_own > 0:
        offs_s = tl.arange(0, SLOTS)
        offs_i = tl.arange(0, rng.GROUP_SIZE)
        found = find_edits(edits, given_edits, offs_b, mask_b)
        hidden_ptrs = hidden_ptr + offs_b.to(tl.int64)[None, :] * hidden_stride + tl.arange(0, TILE.block_d)[:, None]
        for step in tl.range(0, num_own, SLOTS):
            live = step + offs_s < num_own
            if CERTAIN:
                place = row_block * num_groups + program + (step + offs_s) * num_programs
                group = tl.load(screen.group_list + place, mask=live, other=0)
            else:
                group = program * TILE.chunk + step + offs_s
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
            out, mask = store_groups(buffer, logits, group, live, rows, offs_b, num_groups)
            if CERTAIN:
                largest = tl.max(logits, axis=1)
                tl.store(screen.max_logit_lo + out, largest, mask=mask)
                shift = tl.where(largest == float("-inf"), 0.0, largest)
                weights = tl.exp2((logits - shift[:, None, :]) * (inv_temperature * LOG2_E)[None, None, :])
                log_mass = shift * inv_temperature[None, :] + log2(tl.sum(weights, axis=1)) * LN_2
                tl.store(screen.lse_hi + out, log_mass, mask=mask)
                tl.store(screen.lse_lo + out, log_mass, mask=mask)
                out = group[:, None] * num_rows + offs_b[None, :]
                tl.store(screen.score_hi + out, tl.full(out.shape, float("-inf"), tl.float32), mask=mask)
        tl.atomic_add(screen.counters + _COUNT_GROUPS, num_own.to(tl.int64), sem="relaxed")
    if CERTAIN:  # noqa: SIM102 - the constant decides what is compiled
        if program < arriving:
            tl.debug_barrier()  # the reads of this program's other threads come before its arrival
            if tl.atomic_add(screen.arrived + row_block, 1, sem="acq_rel") == arriving - 1:
                tl.store(screen.arrived + row_block, 0)
                tl.store(screen.num_flagged + row_block, 0)


def read_groups(
    hidden: torch.Tensor,  # [B, D]
    head: LMHead,
    params: BatchParams,  # with a truncation
    workspace: ScreenWorkspace,
    config: ScreenConfig,
    buffer: LogitsBuffer,
    which: RescorePass,
) -> None:
    """Logits of truncated rows into ``buffer``: see ``RescorePass``. Where nothing is to be read, nothing is.

    CERTAIN_GROUPS serves twice: after ``draw_rescored``, it reads the groups that this has chosen.
    """
    num_rows = hidden.shape[0]
    certain = which is RescorePass.CERTAIN_GROUPS
    if certain:
        list_groups(num_rows, head.spec.vocab_size, params, workspace, config, certain=True)
    launch_reader(
        read_groups_kernel,
        num_reading_programs(num_rows, workspace, config, listed=certain),
        hidden,
        head,
        params,
        workspace,
        config,
        rows=(params.temperature,),
        outputs=(buffer.operands,),
        constants={"TILE": config.rescore_tile, "CERTAIN": certain},
        buffer_dtype=buffer.dtype,
    )


@triton.jit(do_not_specialize=["num_rows", "num_groups", "vocab_size"], do_not_specialize_on_alignment=[*ROW_POINTERS])
def list_ids_kernel(
    screen,  # ScreenOperands, with score_hi, id_hi and threshold; out: ids, num_ids, candidates, score_hi
    temperature_ptr,  # [B] f32
    truncation,  # TruncationOperands
    num_rows,
    num_groups,
    vocab_size,
    # constexpr
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    row_block = tl.program_id(0) % num_row_blocks
    offs_b = row_block * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    sampled = ~(tl.load(temperature_ptr + offs_b, mask=mask_b, other=0.0) <= 0.0)
    truncated = mask_b & sampled & rows_truncated(truncation, offs_b, mask_b, vocab_size)
    offs_c = tl.program_id(0) // num_row_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < num_groups
    threshold = tl.load(screen.threshold + offs_b, mask=mask_b, other=0)
    possible = flag_groups(screen.score_hi, threshold, offs_c, mask_c, offs_b, truncated, num_rows, 1)
    if tl.max(tl.max(possible, axis=1), axis=0) > 0:
        ids = offs_c[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
        id_hi = tl.load(
            screen.id_hi + ids[:, :, None] * num_rows + offs_b[None, None, :],
            mask=(possible > 0)[:, None, :] & (ids < vocab_size)[:, :, None],
            other=float("-inf"),
        ).to(tl.float32)
        reaches = (id_hi >= ordered_to_float(threshold)[None, None, :]) & (id_hi > float("-inf"))
        listed = tl.reshape(tl.max(reaches.to(tl.int32), axis=2), [BLOCK_C * rng.GROUP_SIZE])
        first = tl.atomic_add(screen.num_ids + row_block, tl.sum(listed), sem="relaxed")
        place = row_block * num_groups * rng.GROUP_SIZE + first + tl.cumsum(listed, axis=0) - 1
        tl.store(screen.ids + place, tl.reshape(ids, [BLOCK_C * rng.GROUP_SIZE]), mask=listed > 0)
        candidates = tl.sum(possible, axis=0)
        tl.atomic_add(screen.candidates + offs_b, candidates, mask=mask_b & (candidates > 0), sem="relaxed")
        tl.debug_barrier()
        out = offs_c[:, None] * num_rows + offs_b[None, :]
        tl.store(screen.score_hi + out, tl.full(out.shape, float("-inf"), tl.float32), mask=possible > 0)


def list_ids(
    num_rows: int,  # MAX_ID_ROWS or fewer
    vocab_size: int,
    params: BatchParams,  # with a truncation
    workspace: ScreenWorkspace,  # with what ``bound_truncated`` has left
    config: ScreenConfig,
) -> None:
    """Put the ids that have yet to be read into one list per block of rows, and rule their groups out until they are.
    Entries come in any order."""
    assert params.truncation is not None
    device = params.temperature.device
    early = config.early and supports_early_launch(device)
    launch(
        list_ids_kernel,
        cdiv(workspace.num_groups, _GROUPS_AT_ONCE) * cdiv(num_rows, ID_ROWS),
        (
            workspace.operands,
            params.temperature,
            params.truncation.operands,
            num_rows,
            workspace.num_groups,
            vocab_size,
        ),
        {"BLOCK_B": ID_ROWS, "BLOCK_C": _GROUPS_AT_ONCE, "EARLY": early},
        _LIST_WARPS,
        (device.index,),
        early=early,
    )


@triton.jit(
    do_not_specialize=["num_rows", "vocab_size", "vocab_start", "num_programs", "given_edits"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def read_ids_kernel(
    weight_ptr,  # [V, D]
    hidden_ptr,  # [B, D]
    screen,  # ScreenOperands, with ids and threshold; out: score_hi +inf where a logit of the group reaches it
    temperature_ptr,  # [B] f32
    truncation,  # TruncationOperands
    edits,  # EditOperands, MaskOperands, or None
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
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    program = tl.program_id(0) // num_row_blocks
    row_block = tl.program_id(0) % num_row_blocks
    num_listed = tl.load(screen.num_ids + row_block)
    arriving = tl.maximum(tl.minimum(num_listed, num_programs), 1)
    num_own = tl.cdiv(tl.maximum(num_listed - program, 0), num_programs)
    if num_own > 0:
        offs_b = row_block * BLOCK_B + tl.arange(0, BLOCK_B)
        mask_b = offs_b < num_rows
        first_id = row_block * tl.cdiv(vocab_size, rng.GROUP_SIZE) * rng.GROUP_SIZE
        sampled = ~(tl.load(temperature_ptr + offs_b, mask=mask_b, other=0.0) <= 0.0)
        truncated = mask_b & sampled & rows_truncated(truncation, offs_b, mask_b, vocab_size)
        threshold = ordered_to_float(tl.load(screen.threshold + offs_b, mask=mask_b, other=0))
        found = find_edits(edits, given_edits, offs_b, mask_b)
        offs_v = tl.arange(0, BLOCK_V)
        hidden_ptrs = hidden_ptr + offs_b.to(tl.int64)[None, :] * hidden_stride + tl.arange(0, BLOCK_D)[:, None]
        for step in tl.range(0, num_own, BLOCK_V):
            live = step + offs_v < num_own
            place = first_id + program + (step + offs_v) * num_programs
            ids = tl.load(screen.ids + place, mask=live, other=0)
            logits = logits_of_ids(
                weight_ptr,
                hidden_ptrs,
                ids,
                live,
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
                BLOCK_D,
                STAGES,
                False,
            )
            reaches = live[:, None] & truncated[None, :] & ~(logits < threshold[None, :])
            out = (ids // rng.GROUP_SIZE)[:, None] * num_rows + offs_b[None, :]
            tl.store(screen.score_hi + out, tl.full(out.shape, float("inf"), tl.float32), mask=reaches)
    if program < arriving:
        tl.debug_barrier()
        if tl.atomic_add(screen.ids_arrived + row_block, 1, sem="acq_rel") == arriving - 1:
            tl.store(screen.ids_arrived + row_block, 0)
            tl.store(screen.num_ids + row_block, 0)
            num_read = tl.cdiv(num_listed, rng.GROUP_SIZE).to(tl.int64)
            tl.atomic_add(screen.counters + _COUNT_GROUPS, num_read, sem="relaxed")


def read_ids(
    hidden: torch.Tensor,  # [B, D], MAX_ID_ROWS rows or fewer
    head: LMHead,
    params: BatchParams,  # with a truncation
    workspace: ScreenWorkspace,  # with what ``list_ids`` has left
    config: ScreenConfig,
) -> None:
    """Bring back the groups of the listed ids that reach a row's threshold: their ``score_hi`` becomes +inf."""
    tile = config.rescore_tile
    launch_reader(
        read_ids_kernel,
        max(1, resident_programs(hidden.device, 1) // cdiv(hidden.shape[0], ID_ROWS)),
        hidden,
        head,
        params,
        workspace,
        config,
        rows=(params.temperature,),
        outputs=(),
        constants={"BLOCK_B": ID_ROWS, "BLOCK_V": tile.block_v, "BLOCK_D": tile.block_d, "STAGES": tile.stages},
        block_b=ID_ROWS,
    )


@triton.jit
def _ends(group_max, lse_hi, lse_lo, low, reference, groups, num_groups):
    """The ends of the log-mass of groups, relative to ``reference``: -inf of those with a rescored logit above
    ``low``."""
    inside = groups < num_groups
    hi = tl.load(lse_hi + groups, mask=inside, other=float("-inf"))
    lo = tl.load(lse_lo + groups, mask=inside, other=float("-inf"))
    other = inside & ~(tl.load(group_max + groups, mask=inside, other=float("-inf")) > low)
    return tl.where(other, hi, float("-inf")) - reference, tl.where(other, lo, float("-inf")) - reference


@triton.jit
def _mass_of_others(group_max, lse_hi, lse_lo, low, reference, num_groups, BLOCK_S: tl.constexpr):
    """The most and the least mass of the groups without a rescored logit above ``low``, relative to ``reference``."""
    mass_hi = tl.zeros([BLOCK_S], tl.float32)
    mass_lo = tl.zeros([BLOCK_S], tl.float32)
    for first in tl.range(0, num_groups, BLOCK_S):
        groups = first + tl.arange(0, BLOCK_S)
        hi, lo = _ends(group_max, lse_hi, lse_lo, low, reference, groups, num_groups)
        mass_hi += tl.exp(hi)
        mass_lo += tl.exp(lo)
    return tl.split(tl.sum(tl.join(mass_hi, mass_lo), axis=0))


@triton.jit
def _middle(hi, lo):
    """The mass in the middle of two ends of a log-mass, near which a group's mostly is; 0 where an end is infinite."""
    return tl.where((lo > float("-inf")) & (hi < float("inf")), tl.exp(0.5 * (hi + lo)), 0.0)


@triton.jit
def _mass_in_the_middle(group_max, lse_hi, lse_lo, low, reference, num_groups, BLOCK_S: tl.constexpr):
    """An estimate of the mass between the two of ``_mass_of_others``."""
    middle = tl.zeros([BLOCK_S], tl.float32)
    for first in tl.range(0, num_groups, BLOCK_S):
        groups = first + tl.arange(0, BLOCK_S)
        hi, lo = _ends(group_max, lse_hi, lse_lo, low, reference, groups, num_groups)
        middle += _middle(hi, lo)
    return tl.sum(middle)


@triton.jit
def _draw_row(
    row_logits,
    group_max,  # -inf where a group was not rescored
    lse_hi,
    lse_lo,
    list_ptr,  # scratch, 2 * CANDIDATES
    screened,  # no logit of another group is above
    inv_temperature,
    seed,
    position,
    top_k,
    top_p,
    min_p,
    vocab_size,
    num_groups,
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Token, its score, and the row's status: ``_WIDE`` where all is known but the mass of the groups that were not
    read. Then, of such a row: the number that no unread logit is above, the logit that masses are relative to, and how
    far below and above its estimate the mass has to be for another token."""
    # No logit that was not read is above this number. Below -inf there is none; then every group was read.
    unread = tl.where(screened == float("-inf"), screened, largest_with_key(key_below(screened, SHIFT), SHIFT))
    maxima = set_maxima(group_max, num_groups, BLOCK_S)
    largest = tl.max(maxima)
    wanted, complete = _groups_to_find(top_k, vocab_size, CANDIDATES)
    read = tl.where(maxima > unread, maxima, float("-inf"))
    low = tl.maximum(unread, bound_of_top_k(read, largest, wanted, SHIFT))
    num_listed = list_groups_above(low, maxima, group_max, list_ptr, num_groups, BLOCK_S, CANDIDATES)
    logits = listed_logits(row_logits, list_ptr, num_listed, CANDIDATES)
    reference = tl.where(largest == float("-inf"), 0.0, largest) * inv_temperature
    weights = relative_weight(logits, largest, inv_temperature)
    rescored = tl.sum(weights)
    limits_k = (top_k >= 1) & (top_k < vocab_size)
    k = tl.where(limits_k, top_k, vocab_size)
    p_hi = tl.full([], float("inf"), tl.float32)
    p_lo = tl.full([], float("inf"), tl.float32)
    # With min-p, top-p is of what top-k has left.
    of_top_k = (top_p < 1.0) & limits_k & (min_p > 0.0)
    known = complete | ~of_top_k
    if top_p < 1.0:
        if of_top_k:
            p_hi = top_p * mass_of_largest(logits, weights, low, largest, k, SHIFT)
            p_lo = p_hi
        else:
            mass_hi, mass_lo = _mass_of_others(group_max, lse_hi, lse_lo, low, reference, num_groups, BLOCK_S)
            slack = _SUM_SLACK + tl.abs(reference) * _EXPONENT_SLACK
            p_hi = top_p * ((rescored + mass_hi) * (1.0 + slack))
            p_lo = top_p * ((rescored + mass_lo) * (1.0 - slack))
    lowest = min_p_limit(largest, inv_temperature, min_p)
    count, mass = count_and_mass(logits, weights, low)
    complete |= ((count > 0) & ~((count < k) & (mass < p_hi))) | (lowest > low)
    certain = complete & known & (num_listed <= CANDIDATES)
    token = tl.full([], 0, tl.int32)
    score = tl.full([], float("-inf"), tl.float32)
    mass = tl.full([], 0.0, tl.float32)
    forbidden = tl.full([], float("inf"), tl.float32)
    p, undecided, searching = p_hi, num_listed < 0, num_listed >= 0
    while searching:
        token, _, score, count, mass, forbidden = first_allowed(
            row_logits,
            list_ptr,
            num_listed,
            logits,
            weights,
            inv_temperature,
            seed,
            position,
            low,
            lowest,
            k,
            p,
            CANDIDATES,
        )
        certain &= score > float("-inf")
        searching = certain & ~undecided & ~is_allowed(count, mass, k, p_lo)
        if searching:  # once more, for the token that it will probably be
            undecided = searching
            others = _mass_in_the_middle(group_max, lse_hi, lse_lo, low, reference, num_groups, BLOCK_S)
            p = top_p * (rescored + others)
    status = tl.where(certain, tl.where(undecided, _WIDE, 1), _LEFT)
    return token, score, status, low, reference, (p - mass) / top_p, (forbidden - p) / top_p


@triton.jit
def _choose_wide_groups(
    max_logit_lo,  # out: +inf where a group is to be read, -inf elsewhere
    group_max,
    lse_hi,
    lse_lo,
    low,
    reference,
    room_lo,  # how far the row's mass may be below its estimate, and above it, for the same token
    room_hi,
    num_groups,
    BLOCK_S: tl.constexpr,
    WIDE_GROUPS: tl.constexpr,
):
    """Choose the groups whose mass is known least, so many that the others' is in a part of the room. Returns whether
    they are ``WIDE_GROUPS`` or fewer; else none is chosen."""
    per_lo = 1.0 / tl.maximum(room_lo * _ROOM, _TINY)
    per_hi = 1.0 / tl.maximum(room_hi * _ROOM, _TINY)
    widest = tl.zeros([BLOCK_S], tl.float32)
    for first in tl.range(0, num_groups, BLOCK_S):
        groups = first + tl.arange(0, BLOCK_S)
        hi, lo = _ends(group_max, lse_hi, lse_lo, low, reference, groups, num_groups)
        middle = _middle(hi, lo)
        takes = tl.maximum((middle - tl.exp(lo)) * per_lo, (tl.exp(hi) - middle) * per_hi)
        takes = tl.where(hi < float("inf"), takes, float("inf"))
        widest = tl.maximum(widest, tl.where(takes < float("inf"), takes, 0.0))
        tl.store(max_logit_lo + groups, takes, mask=groups < num_groups)
    tl.debug_barrier()
    failing = float_to_ordered(tl.max(widest))
    passing = tl.maximum(failing - _OCTAVES * _OCTAVE, 0)
    while failing - passing > _OCTAVE // 8:
        bound = passing + (failing - passing) // 2
        taken = tl.zeros([BLOCK_S], tl.float32)
        for first in tl.range(0, num_groups, BLOCK_S):
            groups = first + tl.arange(0, BLOCK_S)
            takes = tl.load(max_logit_lo + groups, mask=groups < num_groups, other=0.0)
            taken += tl.where(takes > ordered_to_float(bound), 0.0, takes)
        fits = tl.sum(taken) <= 1.0
        passing = tl.where(fits, bound, passing)
        failing = tl.where(fits, failing, bound)
    bound = ordered_to_float(passing)
    num_chosen = tl.zeros([BLOCK_S], tl.int32)
    for first in tl.range(0, num_groups, BLOCK_S):
        groups = first + tl.arange(0, BLOCK_S)
        num_chosen += (tl.load(max_logit_lo + groups, mask=groups < num_groups, other=0.0) > bound).to(tl.int32)
    few = tl.sum(num_chosen) <= WIDE_GROUPS
    for first in tl.range(0, num_groups, BLOCK_S):
        groups = first + tl.arange(0, BLOCK_S)
        takes = tl.load(max_logit_lo + groups, mask=groups < num_groups, other=0.0)
        marks = tl.where((takes > bound) & few, float("inf"), float("-inf"))
        tl.store(max_logit_lo + groups, marks, mask=groups < num_groups)
    return few


@triton.jit(do_not_specialize=["num_groups", "vocab_size", "again"], do_not_specialize_on_alignment=[*ROW_POINTERS])
def draw_rescored_kernel(
    screen,  # ScreenOperands, with threshold, lse_hi and lse_lo; out: max_logit_lo of truncated rows, unless again
    buffer,  # BufferOperands, with the rescored groups; out: status
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    truncation,  # TruncationOperands
    output,  # SampleOutput, in and out: the other rows' tokens stay
    num_groups,
    vocab_size,
    again,  # not 0: only rows whose status is _WIDE
    # constexpr
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    WIDE_GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    greedy, inv_temperature = invert_temperature(tl.load(temperature_ptr + row))
    status = tl.full([], 0, tl.int32)
    if again != 0:
        status = tl.load(buffer.status + row)
    if ~greedy & rows_truncated(truncation, row, True, vocab_size) & ((again == 0) | (status == _WIDE)):
        groups = row.to(tl.int64) * num_groups
        token, score, status, low, reference, room_lo, room_hi = _draw_row(
            buffer.logits + groups * rng.GROUP_SIZE,
            buffer.group_max + groups,
            screen.lse_hi + groups,
            screen.lse_lo + groups,
            buffer.group_list + row * _LISTED_GROUPS,
            ordered_to_float(tl.load(screen.threshold + row)),
            inv_temperature,
            tl.load(seed_ptr + row),
            tl.load(position_ptr + row),
            tl.load(truncation.top_k + row),
            tl.load(truncation.top_p + row),
            tl.load(truncation.min_p + row),
            vocab_size,
            num_groups,
            BLOCK_S,
            CANDIDATES,
            KEY_SHIFT,
        )
        tl.store(output.token_ids + row, token.to(tl.int64))
        tl.store(output.scores + row, score)
        if again == 0:
            max_logit_lo = screen.max_logit_lo + groups
            if status == _WIDE:
                few = _choose_wide_groups(
                    max_logit_lo,
                    buffer.group_max + groups,
                    screen.lse_hi + groups,
                    screen.lse_lo + groups,
                    low,
                    reference,
                    room_lo,
                    room_hi,
                    num_groups,
                    BLOCK_S,
                    WIDE_GROUPS,
                )
                status = tl.where(few, _WIDE, _LEFT)
            else:
                for first in tl.range(0, num_groups, BLOCK_S):
                    others = first + tl.arange(0, BLOCK_S)
                    tl.store(max_logit_lo + others, float("-inf"), mask=others < num_groups)
    tl.store(buffer.status + row, status)


def draw_rescored(
    output: SampleOutput,  # with the rows without a truncation
    vocab_size: int,
    params: BatchParams,  # with a truncation
    workspace: ScreenWorkspace,  # with what ``bound_truncated`` has left
    buffer: LogitsBuffer,  # with the rescored groups
    config: ScreenConfig,
    truncation_config: TruncationConfig,
    *,
    again: bool = False,
) -> None:
    """Put the tokens of truncated rows into ``output``; ``buffer.status`` is negative where they are to be searched
    for.

    Where only the mass of unread groups is not known well enough for that, ``read_groups`` finds those to read next by
    ``max_logit_lo``. again: after these were read, the tokens of their rows.
    """
    assert params.truncation is not None
    device = params.temperature.device
    early = config.early and supports_early_launch(device)
    launch(
        draw_rescored_kernel,
        params.temperature.shape[0],
        (
            workspace.operands,
            buffer.operands,
            params.temperature,
            params.seed,
            params.position,
            params.truncation.operands,
            output,
            workspace.num_groups,
            vocab_size,
            int(again),
        ),
        {
            "BLOCK_S": num_group_blocks(buffer.width),
            "CANDIDATES": truncation_config.candidate_groups,
            "KEY_SHIFT": key_shift(buffer.dtype),
            "WIDE_GROUPS": truncation_config.wide_groups,
            "EARLY": early,
        },
        truncation_config.num_warps,
        (device.index, buffer.dtype),
        early=early,
    )
