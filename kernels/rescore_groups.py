"""The second pass of the screened path: the groups that could still win, from the head itself; and the token.

A group is rescored when, for any row of a block, what it could reach (``upper`` of ``screen_head.py``) is at least what
some group does reach (``threshold``): for all rows of the block, with the fused pass's products in its order, its noise
and its epilogue. So the best of the rescored groups is the best of all.

Each program answers for ``CHUNK`` groups, or for an even share of what ``list_groups`` has found, and gathers those of
them that are to be rescored, ``BLOCK_V / GROUP_SIZE`` at a time. That may be none or all of them: there is no list that
could overflow. The program of a block of rows that finishes last draws the tokens inside the winning groups.

The score of a rescored group is reached too, and more than the screen could promise: it raises ``threshold``, and what
a program has not read yet is looked at again before it is. Other programs raise it at any moment, so no thread may look
for itself: two that see different values would not agree on what is left, nor on a branch that has a barrier in it.
What all of them see is what an atomic operation has returned.

Rows with a truncation have the logits of their groups kept instead, for ``draw_screened``; for these the same kernel
runs in three rounds (``rounds.py``): with what the first one reads, ``bound_truncated`` rules out most of the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .approx import prefetch
from .arguments import edit_arguments, transform_arguments, truncation_pointers
from .draw_in_groups import draw_in_best_groups
from .epilogue import bound_logits, edit_logits, score_groups, transform_logits
from .features import LogitEdits, Truncation
from .head import EDIT_POINTERS, ROW_POINTERS, Kept, LMHead
from .int8_head import Counted, ScreenWorkspace
from .integers import cdiv, next_power_of_2
from .kept_row import ordered
from .launch import launch, resident_programs, starts_early
from .list_groups import flag_groups, list_groups
from .part import best_of_slots
from .reduce_parts import OUTPUTS, Drawn
from .rounds import FIRST, MAIN, REST, Round
from .tiles import LEAST_CHUNK, ScreenConfig
from .truncates import truncates

_LINE_BYTES = tl.constexpr(128)
_LINES = tl.constexpr(8)  # that are asked for at a time
_GROUPS = tl.constexpr(int(Counted.GROUPS))
_LOWEST = tl.constexpr(-(2**31))


@triton.jit(
    do_not_specialize=[
        *("num_rows", "vocab_size", "vocab_start", "num_programs"),
        *("additive_stride", "scaling_stride", "mask_stride", "bias_stride", "mask_words", "given_edits"),
    ],
    do_not_specialize_on_alignment=[*ROW_POINTERS, *EDIT_POINTERS, *OUTPUTS],
)
def rescore_groups_kernel(
    weight_ptr,  # [V, D]
    hidden_ptr,  # [B, D]
    temperature_ptr,  # [B] f32
    seed_ptr,  # [B] i64
    position_ptr,  # [B] i64
    upper_ptr,  # [G, B] f32, G groups of ids; out in the FIRST round: -inf, of those that need not be read again
    reach_ptr,  # [B, G] f32, out in the FIRST round: their largest logits
    threshold_ptr,  # [B] i32, ``ordered`` scores: raised to what rescored groups reach
    best_ptr,  # [B] i64: ``ordered`` score of the best rescored group, and what is left of NO_GROUP beside its id
    logits_ptr,  # out [programs, B, GROUP_SIZE] f32, of each program's best rescored group
    list_ptr,  # [row blocks, G] i32, the groups to rescore: LISTED, or out, of each chunk
    place_ptr,  # [row blocks, G] i32, with LISTED: where each of these is in the list
    candidates_ptr,  # [B] i32: groups that the row could have taken its token from
    flagged_ptr,  # [row blocks] i32: groups to rescore (LISTED: all; else, so far); zero again afterwards, as the next
    arrived_ptr,  # [row blocks] i32: programs that are done
    counters_ptr,  # [len(Counted)] i64
    token_ptr,  # out [B] i64
    best_score_ptr,  # out [B] f32
    kept_ptr,  # out [B, kept_width], of rows with a truncation, as the next
    peak_ptr,  # out [B, G] f32
    rounds_ptr,  # [B] i32, in the REST round: negative in the rows that it is for
    top_k_ptr,  # [B] i32
    top_p_ptr,  # [B] f32
    min_p_ptr,  # [B] f32
    edit_rows_ptr,  # [B] i32
    additive_ptr,  # [B, V] f32
    scaling_ptr,  # [B, V] f32
    mask_ptr,  # [B, W] i32 or [B, V] bool
    bias_ptr,  # [B, V] f32
    num_rows,
    vocab_size,
    vocab_start,
    num_programs,
    weight_stride,
    hidden_stride,
    logit_scale,
    softcap,
    additive_stride,
    scaling_stride,
    mask_stride,
    bias_stride,
    mask_words,
    given_edits,
    # constexpr
    D: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TRUNCATE: tl.constexpr,
    ROUND: tl.constexpr,
    EDIT: tl.constexpr,
    EDIT_ROWS: tl.constexpr,
    MASK_IS_BOOL: tl.constexpr,
    BIAS_FIRST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PREFETCH: tl.constexpr,
    LISTED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    SLOTS: tl.constexpr = BLOCK_V // rng.GROUP_SIZE
    LINE: tl.constexpr = _LINE_BYTES // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = LINE * _LINES
    num_row_blocks = tl.cdiv(num_rows, BLOCK_B)
    program = tl.program_id(0) // num_row_blocks  # of num_programs per block of rows
    row_block = tl.program_id(0) % num_row_blocks
    offs_b = row_block * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_rows
    num_groups = tl.cdiv(vocab_size, rng.GROUP_SIZE)
    list_ptr += row_block * num_groups
    if LISTED:
        # Entries program, program + num_programs, ...: only as many programs arrive as have one, and the first.
        listed = tl.load(flagged_ptr + row_block)
        arriving = tl.maximum(tl.minimum(listed, num_programs), 1)
        list_ptr += program
        num_own = tl.cdiv(tl.maximum(listed - program, 0), num_programs)
        apart = num_programs
    else:
        arriving = num_programs
        offs_c = program * CHUNK + tl.arange(0, BLOCK_C)
        mask_c = offs_c < tl.minimum((program + 1) * CHUNK, num_groups)
        if ROUND == REST:
            left = mask_b & (tl.load(rounds_ptr + offs_b, mask=mask_b, other=0) < 0)
            possible = (mask_c[:, None] & left[None, :]).to(tl.int32)
        else:
            # Not from the L1 cache: other programs raise it. An older value would only flag more. Each pair of a group
            # and a row is one thread's here (MOST_RESCORE_WARPS); what is found of a group is a maximum over threads.
            threshold = tl.load(threshold_ptr + offs_b, mask=mask_b, other=0, cache_modifier=".cg")
            possible = flag_groups(upper_ptr, threshold, offs_c, mask_c, offs_b, mask_b, num_rows, 1)
        flagged = tl.max(possible, axis=1)
        num_own = tl.sum(flagged)
        list_ptr += program * CHUNK
        apart = 1
        if num_own > 0:
            if ROUND == MAIN:
                own = tl.sum(possible, axis=0)
                tl.atomic_add(candidates_ptr + offs_b, own, mask=mask_b & (own > 0), sem="relaxed")
                tl.atomic_add(flagged_ptr + row_block, num_own, sem="relaxed")
            tl.store(list_ptr + tl.cumsum(flagged, axis=0) - 1, offs_c, mask=flagged > 0)
            tl.debug_barrier()
    if num_own > 0:
        temperature = tl.load(temperature_ptr + offs_b, mask=mask_b, other=1.0)
        greedy = temperature <= 0.0
        inv_temperature = 1.0 / tl.where(greedy, 1.0, temperature)
        if TRUNCATE:
            if ROUND == REST:
                cut = left
            else:
                cut = mask_b & ~greedy & truncates(top_k_ptr, top_p_ptr, min_p_ptr, offs_b, mask_b, vocab_size)
        offs_d = tl.arange(0, BLOCK_D)
        offs_s = tl.arange(0, SLOTS)
        offs_i = tl.arange(0, rng.GROUP_SIZE)
        offs_l = tl.arange(0, _LINES) * LINE
        block_offs = offs_b[None, :] + tl.zeros([SLOTS, 1], tl.int32)
        block_mask = mask_b[None, :] & (offs_s >= 0)[:, None]
        seed = tl.load(seed_ptr + block_offs, mask=block_mask, other=0)
        position = tl.load(position_ptr + block_offs, mask=block_mask, other=0)
        edits = tl.zeros([BLOCK_B], tl.int32) + given_edits
        if EDIT_ROWS:
            edits &= tl.load(edit_rows_ptr + offs_b, mask=mask_b, other=0)
        edit_ptrs = (additive_ptr, scaling_ptr, mask_ptr, bias_ptr)
        edit_strides = (additive_stride, scaling_stride, mask_stride, bias_stride)
        hidden_ptrs = hidden_ptr + offs_b.to(tl.int64)[None, :] * hidden_stride + offs_d[:, None]
        best_score = tl.full([SLOTS, BLOCK_B], float("-inf"), tl.float32)
        best_group = tl.full([SLOTS, BLOCK_B], rng.NO_GROUP, tl.int32)
        best_logits = tl.full([SLOTS, rng.GROUP_SIZE, BLOCK_B], float("-inf"), tl.float32)
        num_read = tl.full([], 0, tl.int32)
        for step in tl.range(0, num_own, SLOTS):
            live = step + offs_s < num_own
            group = tl.load(list_ptr + (step + offs_s) * apart, mask=live, other=0)
            if ROUND == MAIN:  # noqa: SIM102 - the constant decides what is compiled
                if step > 0:
                    seen = tl.atomic_max(threshold_ptr + offs_b, _LOWEST, mask=mask_b, sem="relaxed")
                    again = flag_groups(upper_ptr, seen, group, live, offs_b, mask_b, num_rows, 1)
                    live &= tl.max(again, axis=1) > 0
            num_live = tl.sum(live.to(tl.int32))
            num_read += num_live
            if num_live > 0:
                ids = tl.reshape(group[:, None] * rng.GROUP_SIZE + offs_i[None, :], [BLOCK_V])
                valid = tl.reshape(live[:, None] & (offs_i >= 0)[None, :], [BLOCK_V]) & (ids < vocab_size)
                row_ptrs = weight_ptr + ids.to(tl.int64)[:, None] * weight_stride
                if PREFETCH:
                    for line in tl.range(0, D, LINES):
                        prefetch(row_ptrs + (line + offs_l)[None, :], valid[:, None] & (line + offs_l < D)[None, :])
                acc = tl.zeros([BLOCK_V, BLOCK_B], tl.float32)
                for d in tl.range(0, D, BLOCK_D, num_stages=STAGES):
                    mask_d = d + offs_d < D
                    blk_w = tl.load(row_ptrs + (d + offs_d)[None, :], mask=valid[:, None] & mask_d[None, :], other=0.0)
                    blk_h = tl.load(hidden_ptrs + d, mask=mask_b[None, :] & mask_d[:, None], other=0.0)
                    acc = tl.dot(blk_w, blk_h, acc, input_precision="ieee")
                logits = transform_logits(acc, logit_scale, softcap, LOGITS_DTYPE, HAS_SCALE, HAS_SOFTCAP)
                logits = bound_logits(logits, valid[:, None])
                if EDIT:
                    logits = edit_logits(
                        logits,
                        valid[:, None] & mask_b[None, :],
                        offs_b,
                        (vocab_start + ids)[:, None],
                        edits,
                        edit_ptrs,
                        edit_strides,
                        mask_words,
                        MASK_IS_BOOL,
                        BIAS_FIRST,
                    )
                logits = tl.reshape(logits, [SLOTS, rng.GROUP_SIZE, BLOCK_B])
                if TRUNCATE:
                    of_row = offs_b.to(tl.int64)[None, :] * num_groups + group[:, None]
                    kept = live[:, None] & cut[None, :]
                    out = of_row[:, None, :] * rng.GROUP_SIZE + offs_i[None, :, None]
                    tl.store(kept_ptr + out, logits, mask=tl.broadcast_to(kept[:, None, :], logits.shape))
                    tl.store(peak_ptr + of_row, tl.max(logits, axis=1), mask=kept)
                    if ROUND == FIRST:
                        tl.store(reach_ptr + of_row, tl.max(logits, axis=1), mask=kept)
                        of_group = group[:, None] * num_rows + offs_b[None, :]
                        tl.store(upper_ptr + of_group, tl.full(of_group.shape, float("-inf"), tl.float32), mask=kept)
                if ROUND == MAIN:
                    group += vocab_start // rng.GROUP_SIZE
                    score, _, _ = score_groups(logits, live, inv_temperature, greedy, seed, position, group)
                    if TRUNCATE:
                        score = tl.where(cut[None, :], float("-inf"), score)
                    better = (score > best_score) | ((score == best_score) & (group[:, None] < best_group))
                    best_score = tl.where(better, score, best_score)
                    best_group = tl.where(better, group[:, None], best_group)
                    best_logits = tl.where(better[:, None, :], logits, best_logits)
                    if step + SLOTS < num_own:
                        reached = ordered(tl.max(best_score, axis=0))
                        tl.atomic_max(threshold_ptr + offs_b, reached, mask=mask_b, sem="relaxed")
        if ROUND == MAIN:
            score, group, chosen = best_of_slots(best_score, best_group, 1)
            score = tl.max(score, axis=0)
            group = tl.min(group, axis=0)
            best_logits = tl.reshape(best_logits, [SLOTS, 1, rng.GROUP_SIZE, BLOCK_B])
            logits = tl.sum(tl.sum(tl.where(chosen[:, :, None, :], best_logits, 0.0), axis=0), axis=0)
            scored = mask_b & (score > float("-inf"))
            out = (program * num_rows + offs_b)[None, :] * rng.GROUP_SIZE + offs_i[:, None]
            tl.store(logits_ptr + out, logits, mask=scored[None, :])
            packed = (ordered(score).to(tl.int64) << 32) | (group ^ rng.NO_GROUP).to(tl.int64)
            tl.atomic_max(best_ptr + offs_b, packed, mask=scored, sem="relaxed")
            tl.atomic_max(threshold_ptr + offs_b, ordered(score), mask=scored, sem="relaxed")
        tl.atomic_add(counters_ptr + _GROUPS, num_read.to(tl.int64), sem="relaxed")

    if ROUND != REST:  # noqa: SIM102 - as above
        if program < arriving:
            tl.debug_barrier()  # what this program's other threads have written comes before its arrival
            if tl.atomic_add(arrived_ptr + row_block, 1, sem="acq_rel") == arriving - 1:
                tl.store(arrived_ptr + row_block, 0)
                if ROUND == FIRST:
                    tl.store(flagged_ptr + row_block, 0)
                else:
                    draw_in_best_groups(
                        temperature_ptr,
                        seed_ptr,
                        position_ptr,
                        best_ptr,
                        logits_ptr,
                        place_ptr + row_block * num_groups,
                        candidates_ptr,
                        flagged_ptr + row_block,
                        counters_ptr,
                        token_ptr,
                        best_score_ptr,
                        offs_b,
                        num_rows,
                        num_groups,
                        num_programs,
                        vocab_size,
                        vocab_start,
                        CHUNK,
                        LISTED,
                    )


def rescore_groups(
    hidden: torch.Tensor,  # [B, D], as ``screened_sample`` has checked it
    head: LMHead,
    temperature: torch.Tensor,  # [B] f32
    seed: torch.Tensor,  # [B] i64
    position: torch.Tensor,  # [B] i64
    workspace: ScreenWorkspace,  # with what ``screen_head`` has left
    config: ScreenConfig,
    edits: LogitEdits | None = None,
    truncation: Truncation | None = None,
    kept: Kept | None = None,
    *,
    of: Round = Round.MAIN,
) -> Drawn:
    """The tokens, from the groups that the screen has not ruled out. Of rows with a truncation, which need ``kept``,
    the logits of these groups and nothing else.

    of: in the other rounds, for rows with a truncation, nothing is drawn. FIRST: of the groups that surely reach
    ``workspace.threshold``, their logits into ``kept`` and the largest into ``workspace.reach``. REST: all logits of
    the rows whose ``kept.rounds`` is negative; where there are none, nothing is read.
    """
    num_rows = hidden.shape[0]
    drawn = Drawn.empty(num_rows, hidden.device, False) if of is Round.MAIN else Drawn(position, temperature, None)
    editing = edit_arguments(edits, temperature, workspace.threshold)
    block_b = max(16, config.block_b)
    row_blocks = cdiv(num_rows, block_b)
    early = config.early and starts_early(hidden.device)
    listed = of is Round.FIRST or (config.listed and of is Round.MAIN)
    programs = cdiv(workspace.num_groups, config.chunk)
    if listed:
        first = (temperature, truncation, head.vocab_size) if of is Round.FIRST and truncation is not None else None
        list_groups(num_rows, block_b, workspace, config, first)
        resident = resident_programs(hidden.device, config.rescore_ctas_per_sm)
        programs = max(1, min(resident // row_blocks, cdiv(workspace.num_groups, LEAST_CHUNK)))
    transform = transform_arguments(head.logit_scale, head.softcap, head.rounding)
    launch(
        rescore_groups_kernel,
        programs * row_blocks,
        (
            head.weight,
            hidden,
            temperature,
            seed,
            position,
            workspace.upper,
            workspace.reach,
            workspace.threshold,
            workspace.best,
            workspace.logits,
            workspace.list,
            workspace.place,
            workspace.candidates,
            workspace.flagged,
            workspace.arrived,
            workspace.counters,
            drawn.token,
            drawn.score,
            workspace.upper if kept is None else kept.logits,
            workspace.upper if kept is None else kept.peak,
            workspace.threshold if kept is None else kept.rounds,
            *truncation_pointers(truncation, temperature),
            *editing.pointers,
            num_rows,
            head.vocab_size,
            head.vocab_start,
            programs,
            head.weight.stride(0),
            hidden.stride(0),
            *transform.numbers,
            *editing.numbers,
        ),
        {
            "D": hidden.shape[1],
            **transform.constants,
            "TRUNCATE": truncation is not None,
            "ROUND": int(of),
            **editing.constants,
            "BLOCK_B": block_b,
            "BLOCK_V": config.rescore_v,
            "BLOCK_D": config.rescore_d,
            "STAGES": config.rescore_stages,
            "CHUNK": config.chunk,
            "BLOCK_C": next_power_of_2(config.chunk),
            "PREFETCH": config.prefetch,
            "LISTED": listed,
            "EARLY": early,
        },
        config.rescore_warps,
        (
            hidden.device.index,
            head.variant,
            hidden.stride(0),
            hidden.data_ptr() % 16 == 0,
            None if kept is None else kept.logits.dtype,
        ),
        early=early,
    )
    return drawn
