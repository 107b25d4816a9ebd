"""Truncated rows on the screened path: the token that a row has without its truncation, where that is allowed for
certain; else which groups could hold its token, and the token.

``bound_truncated`` finds a bound. If the largest logits of k groups are above x, k logits are above x, and a top-k of k
allows no smaller one: a group whose upper end is below x is ruled out. A row without a small top-k takes as many groups
as the draw can hold; whether they were enough is decided by the draw. Where the truncation probably allows the row's
token, the row races: ``rescore_groups`` finds that token as it does for plain rows. Other rows are open:
``rescore_groups`` reads the groups that surely reach their bound.

``certify_truncated`` answers a racing row if fewer than top-k logits and less than top-p of the mass can be above its
token: all logits that were not read count with their upper end, the mass of larger ones with its upper end, the rest of
the mass with its lower end. By ``truncation_math.py`` a truncation changes a token only where it forbids it. Of equal
scores in a group the lowest id wins, as in all truncated rows; in plain rows noise decides. A row that is not answered
is open. What has been read is known exactly now and gives a higher bound that fewer groups can reach.

``list_ids`` and ``read_ids`` rule out more groups of open rows. A group that could reach the bound has 16 ids, of which
mostly one has an upper end above it. Reading that id alone says whether it does: most do not, since an upper end is far
above the logit itself. A group with an id that does is read whole, for the noise inside the group needs all its logits.

``draw_rescored`` draws. Top-k and min-p depend on the groups that were read alone. Top-p is a share of the row's whole
mass, which the screen knows to within two ends: the tokens allowed under the smallest mass are also allowed under the
true one, and those under the true one also under the largest. So a token that wins among those of the largest mass, and
is allowed under the smallest, is the winner. Where the two ends do not decide, groups whose ends are furthest apart are
read as well, as many as will probably do, and ``draw_rescored`` draws again: their mass is exact then. A row that is
still without a token, with more groups than the draw can hold, or whose limits reach below what was read, is left: its
whole head is read, and ``search_truncated`` answers it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .config import ScreenConfig, TruncationConfig, cdiv
from .epilogue import find_edits, invert_temperature, relative_weight, rows_truncated
from .intrinsics import float_to_ordered, ordered_to_float
from .launch import launch, resident_programs, supports_early_launch
from .params import ROW_POINTERS, BatchParams, LMHead, SampleOutput
from .rescore import (
    RescorePass,
    flag_possible,
    launch_reader,
    list_groups,
    logits_of_ids,
    num_reading_programs,
    store_exact,
    store_groups,
)
from .truncation_math import (
    NO_TOKEN,
    bound_of_top_k,
    count_and_mass,
    first_allowed,
    is_allowed,
    key_below,
    key_shift,
    largest_with_key,
    list_groups_above,
    listed_logits,
    listed_scores,
    mass_of_largest,
    min_p_limit,
    score_row_groups,
    set_maxima,
    token_scores,
)
from .workspace import (
    ID_ROWS,
    LISTED_GROUPS,
    MAX_ID_ROWS,
    LogitsBuffer,
    RowStatus,
    ScreenCounter,
    ScreenWorkspace,
    num_group_blocks,
)

_LISTED_GROUPS = tl.constexpr(LISTED_GROUPS)
_COUNT_GROUPS = tl.constexpr(int(ScreenCounter.GROUPS))
# Relative error of a float32 sum of so many exponentials: a constant part, and a part per unit of the largest exponent.
_SUM_SLACK = tl.constexpr(2.0**-12)
_EXPONENT_SLACK = tl.constexpr(2.0**-21)
_ROOM = tl.constexpr(0.5)  # the part of the room that is counted on: an estimate is not exact
_TINY = tl.constexpr(1e-30)
_RACED = tl.constexpr(0.5)  # the least probability that a truncation allows a token of the row, for it to race
_OCTAVE = tl.constexpr(1 << 23)  # between ordered float32 numbers whose quotient is 2
_OCTAVES = tl.constexpr(24)  # the smaller masses are nothing beside the largest
_GROUPS_AT_ONCE = 16  # groups per program of list_ids
# Warps of list_ids: no more threads than pairs of these groups and a block's rows, so that no thread reads what another
# one changes.
_LIST_WARPS = 4


_ANSWERED, _PLAIN = tl.constexpr(int(RowStatus.ANSWERED)), tl.constexpr(int(RowStatus.PLAIN))
_LEFT, _WIDE = tl.constexpr(int(RowStatus.LEFT)), tl.constexpr(int(RowStatus.WIDE))
_OPEN, _RACING = tl.constexpr(int(RowStatus.OPEN)), tl.constexpr(int(RowStatus.RACING))
_ALL = tl.constexpr(int(RescorePass.ALL))
_MAX_ID_ROWS = tl.constexpr(MAX_ID_ROWS)


@triton.jit
def _groups_to_find(top_k, vocab_size, CANDIDATES: tl.constexpr):
    """The number of largest groups to look for, and a flag, true if they are enough for the top-k. Where the top-k is
    not small, the number leaves room for ties."""
    small = (top_k >= 1) & (top_k < vocab_size) & (top_k <= CANDIDATES // 2)
    return tl.where(small, top_k, CANDIDATES * 5 // 8), small


@triton.jit
def _masses_lo(peaks, lse_lo, logit, reference, num_groups, BLOCK_S: tl.constexpr):
    """The least mass, relative to ``reference``, of a row's groups with a peak above ``logit``, and of the others."""
    above = tl.zeros([2 * BLOCK_S], tl.float32)
    rest = tl.zeros([2 * BLOCK_S], tl.float32)
    for first in tl.range(0, num_groups, 2 * BLOCK_S):
        groups = first + tl.arange(0, 2 * BLOCK_S)
        inside = groups < num_groups
        mass = tl.exp(tl.load(lse_lo + groups, mask=inside, other=float("-inf")) - reference)
        larger = tl.load(peaks + groups, mask=inside, other=float("-inf")) > logit
        above += tl.where(larger, mass, 0.0)
        rest += tl.where(larger, 0.0, mass)
    return tl.split(tl.sum(tl.join(above, rest), axis=0))


@triton.jit
def _store_bound(screen, row, groups, top_k, num_groups, vocab_size, BLOCK_S: tl.constexpr, CANDIDATES: tl.constexpr):
    """The bound of a row whose groups begin at ``groups``; returns it, and the largest lower end."""
    maxima = set_maxima(screen.max_logit_lo + groups, num_groups, BLOCK_S)
    k, _ = _groups_to_find(top_k, vocab_size, CANDIDATES)
    largest = tl.max(maxima)
    bound = bound_of_top_k(maxima, largest, k, 0)
    tl.store(screen.bound + row, float_to_ordered(bound))
    return bound, largest


@triton.jit(do_not_specialize=["num_groups", "vocab_size"], do_not_specialize_on_alignment=[*ROW_POINTERS])
def bound_truncated_kernel(
    screen,  # ScreenOperands, with what is of truncated rows; out: bound
    buffer,  # BufferOperands, out: status; group_max -inf, as in groups that have not been read
    temperature_ptr,  # [B] f32
    truncation,  # TruncationOperands
    num_groups,
    vocab_size,
    # constexpr
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    status = tl.full([], _PLAIN, tl.int32)
    greedy, inv_temperature = invert_temperature(tl.load(temperature_ptr + row))
    if ~greedy & rows_truncated(truncation, row, True, vocab_size):
        groups = row.to(tl.int64) * num_groups
        bound, largest = _store_bound(
            screen, row, groups, tl.load(truncation.top_k + row), num_groups, vocab_size, BLOCK_S, CANDIDATES
        )
        reference = tl.where(largest == float("-inf"), 0.0, largest) * inv_temperature
        above, rest = _masses_lo(
            screen.max_logit_lo + groups, screen.lse_lo + groups, bound, reference, num_groups, BLOCK_S
        )
        for first in tl.range(0, num_groups, BLOCK_S):
            offs = first + tl.arange(0, BLOCK_S)
            tl.store(buffer.group_max + groups + offs, float("-inf"), mask=offs < num_groups)
        likely = tl.minimum(above, tl.load(truncation.top_p + row) * (above + rest))
        status = tl.where(likely >= (above + rest) * _RACED, _RACING, _OPEN)
    tl.store(buffer.status + row, status)


def bound_truncated(
    num_rows: int,
    vocab_size: int,
    params: BatchParams,  # with a truncation
    workspace: ScreenWorkspace,  # with what ``screen_head`` has left
    buffer: LogitsBuffer,
    config: ScreenConfig,
    truncation_config: TruncationConfig,
) -> None:
    """Put the bounds of truncated rows into ``workspace``, and start their rows of ``buffer``."""
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
            "EARLY": early,
        },
        truncation_config.num_warps,
        (device.index, buffer.dtype),
        early=early,
    )


@triton.jit
def _first_of_group(row_logits, group, inv_temperature, seed, position):
    """The best token of a group of a row, and its logit."""
    ids = group * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
    logits = tl.load(row_logits + ids).to(tl.float32)
    group += tl.zeros([1], tl.int32)
    score, relative, _, _ = score_row_groups(logits, group, inv_temperature, seed, position)
    scores = token_scores(logits, score, relative, ids, inv_temperature, seed, position)
    token = tl.min(tl.where(scores == tl.max(scores), ids, NO_TOKEN))
    return token, tl.max(tl.where(ids == token, logits, float("-inf")))


@triton.jit
def _surely_allowed(
    screen,
    buffer,
    row,
    groups,  # place of the row's first group
    logit,  # of a token
    inv_temperature,
    top_k,
    top_p,
    min_p,
    num_rows,
    num_groups,
    vocab_size,
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Whether the limits allow a token whatever the logits are that were not read: as if as many of these as can be
    were larger, and all masses were at the worse of their ends."""
    logit_hi = screen.logit_hi + groups
    list_ptr = buffer.group_list + row * _LISTED_GROUPS
    maxima = set_maxima(logit_hi, num_groups, BLOCK_S)
    largest = tl.max(maxima)
    num_listed = list_groups_above(logit, maxima, logit_hi, list_ptr, num_groups, BLOCK_S, CANDIDATES)
    offs = tl.arange(0, CANDIDATES)
    listed = offs < num_listed
    group = tl.load(list_ptr + CANDIDATES + offs, mask=listed, other=0)
    read = listed & (tl.load(buffer.group_max + groups + group, mask=listed, other=0.0) > float("-inf"))
    lse_hi = tl.load(screen.lse_hi + groups + group, mask=listed & ~read, other=float("-inf"))
    ids = group[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
    row_logits = buffer.logits + groups * rng.GROUP_SIZE
    logits = tl.load(row_logits + ids, mask=read[:, None], other=float("-inf")).to(tl.float32)
    unread = (listed & ~read)[:, None] & (ids < vocab_size)
    known = unread & (num_rows <= _MAX_ID_ROWS)
    id_hi = tl.load(screen.id_hi + ids * num_rows + row, mask=known, other=float("inf")).to(tl.float32)
    larger = (logits > logit) | (unread & (id_hi > logit))
    count = tl.sum(larger.to(tl.float32))
    reference = largest * inv_temperature
    weights = relative_weight(logits, largest, inv_temperature)
    mass = tl.sum(tl.where(logits > logit, weights, 0.0)) + tl.sum(tl.exp(lse_hi - reference))
    _, rest = _masses_lo(logit_hi, screen.lse_lo + groups, logit, reference, num_groups, BLOCK_S)
    rest += tl.sum(tl.where(logits > logit, 0.0, weights))
    slack = _SUM_SLACK + tl.abs(reference) * _EXPONENT_SLACK
    p = tl.where(top_p < 1.0, top_p * ((mass + rest) * (1.0 - slack)), float("inf"))
    k = tl.where((top_k >= 1) & (top_k < vocab_size), top_k, vocab_size)
    # With min-p, top-p is of what top-k has left: less than all.
    known = ~((top_p < 1.0) & (k < vocab_size) & (min_p > 0.0))
    lowest = min_p_limit(largest, inv_temperature, min_p)
    return (num_listed <= CANDIDATES) & (logit >= lowest) & ((count == 0) | (known & is_allowed(count, mass, k, p)))


@triton.jit(do_not_specialize=["num_rows", "num_groups", "vocab_size"], do_not_specialize_on_alignment=[*ROW_POINTERS])
def certify_truncated_kernel(
    screen,  # ScreenOperands; out: bound of rows that are open then
    buffer,  # BufferOperands, with what has been read; out: status
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    truncation,  # TruncationOperands
    output,  # SampleOutput, with the tokens of racing rows, in and out
    num_rows,
    num_groups,
    vocab_size,
    # constexpr
    BLOCK_S: tl.constexpr,
    CANDIDATES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    status = tl.load(buffer.status + row)
    if status < 0:
        groups = row.to(tl.int64) * num_groups
        top_k = tl.load(truncation.top_k + row)
        if (status == _RACING) & (tl.load(output.scores + row) > float("-inf")):
            _, inv_temperature = invert_temperature(tl.load(temperature_ptr + row))
            token, logit = _first_of_group(
                buffer.logits + groups * rng.GROUP_SIZE,
                (tl.load(output.token_ids + row) // rng.GROUP_SIZE).to(tl.int32),
                inv_temperature,
                tl.load(seed_ptr + row),
                tl.load(position_ptr + row),
            )
            allowed = _surely_allowed(
                screen,
                buffer,
                row,
                groups,
                logit,
                inv_temperature,
                top_k,
                tl.load(truncation.top_p + row),
                tl.load(truncation.min_p + row),
                num_rows,
                num_groups,
                vocab_size,
                BLOCK_S,
                CANDIDATES,
            )
            status = tl.where(allowed, _ANSWERED, status)
            tl.store(output.token_ids + row, token.to(tl.int64))
        if status < 0:
            _store_bound(screen, row, groups, top_k, num_groups, vocab_size, BLOCK_S, CANDIDATES)
            status = tl.full([], _OPEN, tl.int32)
        tl.store(buffer.status + row, status)


def certify_truncated(
    output: SampleOutput,  # of ``rescore_groups``
    vocab_size: int,
    params: BatchParams,  # with a truncation
    workspace: ScreenWorkspace,
    buffer: LogitsBuffer,
    config: ScreenConfig,
    truncation_config: TruncationConfig,
) -> None:
    """Answer the racing rows whose token is allowed for sure. Other truncated rows are open then, with a bound from
    what has been read."""
    assert params.truncation is not None
    device, num_rows = params.temperature.device, params.temperature.shape[0]
    early = config.early and supports_early_launch(device)
    launch(
        certify_truncated_kernel,
        num_rows,
        (
            workspace.operands,
            buffer.operands,
            params.temperature,
            params.seed,
            params.position,
            params.truncation.operands,
            output,
            num_rows,
            workspace.num_groups,
            vocab_size,
        ),
        {
            "BLOCK_S": num_group_blocks(buffer.width),
            "CANDIDATES": truncation_config.candidate_groups,
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
    screen,  # ScreenOperands; out, unless all are read: as ``store_exact``
    temperature_ptr,  # [B] f32
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
    PASS: tl.constexpr,
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
    rows = mask_b & (tl.load(buffer.status + offs_b, mask=mask_b, other=_PLAIN) < 0)
    if PASS != _ALL:
        # As in rescore_groups_kernel with LISTED.
        num_listed = tl.load(screen.num_flagged + row_block)
        arriving = tl.maximum(tl.minimum(num_listed, num_programs), 1)
        num_own = tl.cdiv(tl.maximum(num_listed - program, 0), num_programs)
        _, inv_temperature = invert_temperature(tl.load(temperature_ptr + offs_b, mask=mask_b, other=0.0))
    else:
        num_own = tl.minimum(TILE.chunk, num_groups - program * TILE.chunk)
        num_own = tl.where(tl.max(rows.to(tl.int32)) > 0, num_own, 0)
    if num_own > 0:
        offs_s = tl.arange(0, SLOTS)
        offs_i = tl.arange(0, rng.GROUP_SIZE)
        found = find_edits(edits, given_edits, offs_b, mask_b)
        hidden_ptrs = hidden_ptr + offs_b.to(tl.int64)[None, :] * hidden_stride + tl.arange(0, TILE.block_d)[:, None]
        for step in tl.range(0, num_own, SLOTS):
            live = step + offs_s < num_own
            if PASS != _ALL:
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
            if PASS != _ALL:
                store_exact(screen, logits, out, mask, inv_temperature)
        tl.atomic_add(screen.counters + _COUNT_GROUPS, num_own.to(tl.int64), sem="relaxed")
    if PASS != _ALL:  # noqa: SIM102 - the constant decides what is compiled
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
    which: RescorePass,  # not FIRST
) -> None:
    """Logits of rows without an answer into ``buffer``. Where nothing is to be read, nothing is."""
    num_rows = hidden.shape[0]
    listed = which is not RescorePass.ALL
    if listed:
        list_groups(num_rows, workspace, config, buffer, which)
    launch_reader(
        read_groups_kernel,
        num_reading_programs(num_rows, workspace, config, listed=listed),
        hidden,
        head,
        params,
        workspace,
        config,
        rows=(params.temperature,),
        outputs=(buffer.operands,),
        constants={"TILE": config.rescore_tile, "PASS": int(which)},
        buffer_dtype=buffer.dtype,
    )


@triton.jit(do_not_specialize=["num_rows", "num_groups", "vocab_size"])
def list_ids_kernel(
    screen,  # ScreenOperands, with logit_hi, id_hi and bound; out: ids, num_ids, logit_hi
    buffer,  # BufferOperands, with status
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
    open_rows = mask_b & (tl.load(buffer.status + offs_b, mask=mask_b, other=_PLAIN) == _OPEN)
    offs_c = tl.program_id(0) // num_row_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < num_groups
    bound = tl.load(screen.bound + offs_b, mask=mask_b, other=0)
    possible = flag_possible(screen, buffer, bound, offs_c, mask_c, offs_b, open_rows, num_groups)
    if tl.max(tl.max(possible, axis=1), axis=0) > 0:
        ids = offs_c[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
        id_hi = tl.load(
            screen.id_hi + ids[:, :, None] * num_rows + offs_b[None, None, :],
            mask=(possible > 0)[:, None, :] & (ids < vocab_size)[:, :, None],
            other=float("-inf"),
        ).to(tl.float32)
        reaches = (id_hi >= ordered_to_float(bound)[None, None, :]) & (id_hi > float("-inf"))
        listed = tl.reshape(tl.max(reaches.to(tl.int32), axis=2), [BLOCK_C * rng.GROUP_SIZE])
        first = tl.atomic_add(screen.num_ids + row_block, tl.sum(listed), sem="relaxed")
        place = row_block * num_groups * rng.GROUP_SIZE + first + tl.cumsum(listed, axis=0) - 1
        tl.store(screen.ids + place, tl.reshape(ids, [BLOCK_C * rng.GROUP_SIZE]), mask=listed > 0)
        tl.debug_barrier()
        out = offs_c[:, None] + offs_b[None, :] * num_groups
        tl.store(screen.logit_hi + out, tl.full(out.shape, float("-inf"), tl.float32), mask=possible > 0)


def list_ids(
    num_rows: int,  # MAX_ID_ROWS or fewer
    vocab_size: int,
    workspace: ScreenWorkspace,  # with what ``certify_truncated`` has left
    buffer: LogitsBuffer,
    config: ScreenConfig,
) -> None:
    """Put the ids of open rows that have yet to be read into one list per block of rows, and rule their groups out
    until they are. Entries come in any order."""
    device = workspace.limbs.device
    early = config.early and supports_early_launch(device)
    launch(
        list_ids_kernel,
        cdiv(workspace.num_groups, _GROUPS_AT_ONCE) * cdiv(num_rows, ID_ROWS),
        (
            workspace.operands,
            buffer.operands,
            num_rows,
            workspace.num_groups,
            vocab_size,
        ),
        {"BLOCK_B": ID_ROWS, "BLOCK_C": _GROUPS_AT_ONCE, "EARLY": early},
        _LIST_WARPS,
        (device.index, buffer.dtype),
        early=early,
    )


@triton.jit(
    do_not_specialize=["num_rows", "vocab_size", "vocab_start", "num_programs", "given_edits"],
    do_not_specialize_on_alignment=[*ROW_POINTERS],
)
def read_ids_kernel(
    weight_ptr,  # [V, D]
    hidden_ptr,  # [B, D]
    screen,  # ScreenOperands, with ids and bound; out: logit_hi +inf where a logit of the group reaches it
    edits,  # EditOperands, MaskOperands, or None
    buffer,  # BufferOperands, with status
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
        num_groups = tl.cdiv(vocab_size, rng.GROUP_SIZE)
        first_id = row_block * num_groups * rng.GROUP_SIZE
        open_rows = mask_b & (tl.load(buffer.status + offs_b, mask=mask_b, other=_PLAIN) == _OPEN)
        bound = ordered_to_float(tl.load(screen.bound + offs_b, mask=mask_b, other=0))
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
            reaches = live[:, None] & open_rows[None, :] & ~(logits < bound[None, :])
            out = (ids // rng.GROUP_SIZE)[:, None] + offs_b[None, :] * num_groups
            tl.store(screen.logit_hi + out, tl.full(out.shape, float("inf"), tl.float32), mask=reaches)
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
    buffer: LogitsBuffer,
    config: ScreenConfig,
) -> None:
    """Bring back the groups of the listed ids that reach a row's bound: their ``logit_hi`` becomes +inf."""
    tile = config.rescore_tile
    launch_reader(
        read_ids_kernel,
        max(1, resident_programs(hidden.device, 1) // cdiv(hidden.shape[0], ID_ROWS)),
        hidden,
        head,
        params,
        workspace,
        config,
        rows=(),
        outputs=(buffer.operands,),
        buffer_dtype=buffer.dtype,
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
    mass_hi = tl.zeros([2 * BLOCK_S], tl.float32)
    mass_lo = tl.zeros([2 * BLOCK_S], tl.float32)
    for first in tl.range(0, num_groups, 2 * BLOCK_S):
        groups = first + tl.arange(0, 2 * BLOCK_S)
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
    middle = tl.zeros([2 * BLOCK_S], tl.float32)
    for first in tl.range(0, num_groups, 2 * BLOCK_S):
        groups = first + tl.arange(0, 2 * BLOCK_S)
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
    scores, ids = listed_scores(row_logits, list_ptr, num_listed, inv_temperature, seed, position, CANDIDATES)
    scores = tl.where(logits >= lowest, scores, float("-inf"))
    p, undecided, searching = p_hi, num_listed < 0, num_listed >= 0
    while searching:
        token, _, score, count, mass, forbidden = first_allowed(logits, weights, scores, ids, low, k, p)
        certain &= score > float("-inf")
        searching = certain & ~undecided & ~is_allowed(count, mass, k, p_lo)
        if searching:  # once more, for the token that it will probably be
            undecided = searching
            others = _mass_in_the_middle(group_max, lse_hi, lse_lo, low, reference, num_groups, BLOCK_S)
            p = top_p * (rescored + others)
    status = tl.where(certain, tl.where(undecided, _WIDE, _ANSWERED), _LEFT)
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
):
    """Choose the groups whose mass is known least, so many that the others' is in a part of the room."""
    per_lo = 1.0 / tl.maximum(room_lo * _ROOM, _TINY)
    per_hi = 1.0 / tl.maximum(room_hi * _ROOM, _TINY)
    widest = tl.zeros([2 * BLOCK_S], tl.float32)
    for first in tl.range(0, num_groups, 2 * BLOCK_S):
        groups = first + tl.arange(0, 2 * BLOCK_S)
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
        taken = tl.zeros([4 * BLOCK_S], tl.float32)
        for first in tl.range(0, num_groups, 4 * BLOCK_S):
            groups = first + tl.arange(0, 4 * BLOCK_S)
            takes = tl.load(max_logit_lo + groups, mask=groups < num_groups, other=0.0)
            taken += tl.where(takes > ordered_to_float(bound), 0.0, takes)
        fits = tl.sum(taken) <= 1.0
        passing = tl.where(fits, bound, passing)
        failing = tl.where(fits, failing, bound)
    for first in tl.range(0, num_groups, BLOCK_S):
        groups = first + tl.arange(0, BLOCK_S)
        takes = tl.load(max_logit_lo + groups, mask=groups < num_groups, other=0.0)
        marks = tl.where(takes > ordered_to_float(passing), float("inf"), float("-inf"))
        tl.store(max_logit_lo + groups, marks, mask=groups < num_groups)


@triton.jit(do_not_specialize=["num_groups", "vocab_size", "again"], do_not_specialize_on_alignment=[*ROW_POINTERS])
def draw_rescored_kernel(
    screen,  # ScreenOperands, with bound, lse_hi and lse_lo; out: max_logit_lo of wide rows, unless again
    buffer,  # BufferOperands, with the groups that were read; out: status
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
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if tl.load(buffer.status + row) == tl.where(again == 0, _OPEN, _WIDE):
        _, inv_temperature = invert_temperature(tl.load(temperature_ptr + row))
        groups = row.to(tl.int64) * num_groups
        token, score, status, low, reference, room_lo, room_hi = _draw_row(
            buffer.logits + groups * rng.GROUP_SIZE,
            buffer.group_max + groups,
            screen.lse_hi + groups,
            screen.lse_lo + groups,
            buffer.group_list + row * _LISTED_GROUPS,
            ordered_to_float(tl.load(screen.bound + row)),
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
        if (again == 0) & (status == _WIDE):
            _choose_wide_groups(
                screen.max_logit_lo + groups,
                buffer.group_max + groups,
                screen.lse_hi + groups,
                screen.lse_lo + groups,
                low,
                reference,
                room_lo,
                room_hi,
                num_groups,
                BLOCK_S,
            )
        tl.store(buffer.status + row, status)


def draw_rescored(
    output: SampleOutput,  # with the rows without a truncation
    vocab_size: int,
    params: BatchParams,  # with a truncation
    workspace: ScreenWorkspace,
    buffer: LogitsBuffer,  # with the groups that were read
    config: ScreenConfig,
    truncation_config: TruncationConfig,
    *,
    again: bool = False,
) -> None:
    """Put the tokens of open rows into ``output``; their status says what they still need.

    again: those of wide rows, after their groups were read.
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
            "EARLY": early,
        },
        truncation_config.num_warps,
        (device.index, buffer.dtype),
        early=early,
    )
