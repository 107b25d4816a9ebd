"""Whether the ids that could reach a truncated row's threshold do: each read from the head by itself.

One that does brings its group back: the race inside a group needs all of it. Most do not, for a bound is wide and what
it bounds is near its middle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import rng
from .arguments import edit_arguments, transform_arguments, truncation_pointers
from .epilogue import bound_logits, edit_logits, transform_logits
from .features import LogitEdits, Truncation
from .head import EDIT_POINTERS, ROW_POINTERS, LMHead
from .int8_head import ID_ROWS, Counted, ScreenWorkspace
from .kept_row import value_of
from .launch import launch, resident_programs, starts_early
from .tiles import ScreenConfig
from .truncates import truncates

_GROUPS = tl.constexpr(int(Counted.GROUPS))


@triton.jit(
    do_not_specialize=[
        *("num_rows", "vocab_size", "vocab_start", "num_programs"),
        *("additive_stride", "scaling_stride", "mask_stride", "bias_stride", "mask_words", "given_edits"),
    ],
    do_not_specialize_on_alignment=[*ROW_POINTERS, *EDIT_POINTERS],
)
def verify_ids_kernel(
    weight_ptr,  # [V, D]
    hidden_ptr,  # [B, D]
    upper_ptr,  # out [G, B] f32: +inf where a logit of the group reaches the threshold
    threshold_ptr,  # [B] i32, ``ordered`` logits
    temperature_ptr,  # [B] f32
    top_k_ptr,  # [B] i32
    top_p_ptr,  # [B] f32
    min_p_ptr,  # [B] f32
    ids_ptr,  # [V] i32
    num_ids_ptr,  # [1] i32, zero again afterwards, as the next
    arrived_ptr,  # [1] i32
    counters_ptr,  # [len(Counted)] i64
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
    EDIT: tl.constexpr,
    EDIT_ROWS: tl.constexpr,
    MASK_IS_BOOL: tl.constexpr,
    BIAS_FIRST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    listed = tl.load(num_ids_ptr)
    arriving = tl.maximum(tl.minimum(listed, num_programs), 1)
    num_own = tl.cdiv(tl.maximum(listed - program, 0), num_programs)
    if num_own > 0:
        offs_b = tl.arange(0, BLOCK_B)
        mask_b = offs_b < num_rows
        sampled = tl.load(temperature_ptr + offs_b, mask=mask_b, other=0.0) > 0.0
        cut = mask_b & sampled & truncates(top_k_ptr, top_p_ptr, min_p_ptr, offs_b, mask_b, vocab_size)
        threshold = value_of(tl.load(threshold_ptr + offs_b, mask=mask_b, other=0))
        edits = tl.zeros([BLOCK_B], tl.int32) + given_edits
        if EDIT_ROWS:
            edits &= tl.load(edit_rows_ptr + offs_b, mask=mask_b, other=0)
        edit_ptrs = (additive_ptr, scaling_ptr, mask_ptr, bias_ptr)
        edit_strides = (additive_stride, scaling_stride, mask_stride, bias_stride)
        offs_v = tl.arange(0, BLOCK_V)
        offs_d = tl.arange(0, BLOCK_D)
        hidden_ptrs = hidden_ptr + offs_b.to(tl.int64)[None, :] * hidden_stride + offs_d[:, None]
        for step in tl.range(0, num_own, BLOCK_V):
            live = step + offs_v < num_own
            ids = tl.load(ids_ptr + program + (step + offs_v) * num_programs, mask=live, other=0)
            row_ptrs = weight_ptr + ids.to(tl.int64)[:, None] * weight_stride
            acc = tl.zeros([BLOCK_V, BLOCK_B], tl.float32)
            for d in tl.range(0, D, BLOCK_D, num_stages=STAGES):
                mask_d = d + offs_d < D
                blk_w = tl.load(row_ptrs + (d + offs_d)[None, :], mask=live[:, None] & mask_d[None, :], other=0.0)
                blk_h = tl.load(hidden_ptrs + d, mask=mask_b[None, :] & mask_d[:, None], other=0.0)
                acc = tl.dot(blk_w, blk_h, acc, input_precision="ieee")
            logits = transform_logits(acc, logit_scale, softcap, LOGITS_DTYPE, HAS_SCALE, HAS_SOFTCAP)
            logits = bound_logits(logits, live[:, None])
            if EDIT:
                logits = edit_logits(
                    logits,
                    live[:, None] & mask_b[None, :],
                    offs_b,
                    (vocab_start + ids)[:, None],
                    edits,
                    edit_ptrs,
                    edit_strides,
                    mask_words,
                    MASK_IS_BOOL,
                    BIAS_FIRST,
                )
            reaches = live[:, None] & cut[None, :] & ~(logits < threshold[None, :])
            of_group = (ids // rng.GROUP_SIZE)[:, None] * num_rows + offs_b[None, :]
            tl.store(upper_ptr + of_group, tl.full(of_group.shape, float("inf"), tl.float32), mask=reaches)
    if program < arriving:
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == arriving - 1:
            tl.store(arrived_ptr, 0)
            tl.store(num_ids_ptr, 0)
            tl.atomic_add(counters_ptr + _GROUPS, tl.cdiv(listed, rng.GROUP_SIZE).to(tl.int64), sem="relaxed")


def verify_ids(
    hidden: torch.Tensor,  # [B, D], as ``screened_sample`` has checked it; ID_ROWS rows or fewer
    head: LMHead,
    temperature: torch.Tensor,  # [B] f32
    truncation: Truncation,
    workspace: ScreenWorkspace,  # with what ``list_ids`` has left
    config: ScreenConfig,
    edits: LogitEdits | None = None,
) -> None:
    """Put +inf into ``workspace.upper`` for the groups of those ``workspace.ids`` that reach a row's threshold."""
    editing = edit_arguments(edits, temperature, workspace.threshold)
    early = config.early and starts_early(hidden.device)
    programs = resident_programs(hidden.device, config.rescore_ctas_per_sm)
    transform = transform_arguments(head.logit_scale, head.softcap, head.rounding)
    launch(
        verify_ids_kernel,
        programs,
        (
            head.weight,
            hidden,
            workspace.upper,
            workspace.threshold,
            temperature,
            *truncation_pointers(truncation, temperature),
            workspace.ids,
            workspace.num_ids,
            workspace.ids_arrived,
            workspace.counters,
            *editing.pointers,
            hidden.shape[0],
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
            **editing.constants,
            "BLOCK_B": ID_ROWS,
            "BLOCK_V": config.rescore_v,
            "BLOCK_D": config.rescore_d,
            "STAGES": config.rescore_stages,
            "EARLY": early,
        },
        config.rescore_warps,
        (hidden.device.index, head.variant, hidden.stride(0), hidden.data_ptr() % 16 == 0),
        early=early,
    )
