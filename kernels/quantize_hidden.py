"""Hidden states in fixed point, for the integer tensor cores; and how far that is from them.

    k = step * (256 hi + lo)   with two terms, |256 hi + lo| <= 127 * 256
    k = step * hi              with one,       |hi| <= 127

``int8_head.py`` says what the norms are for. All that float32 rounds here is inside them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .int8_head import LEAST_SCALE, Int8Head, ScreenWorkspace
from .integers import next_power_of_2
from .kept_row import ordered
from .launch import launch, starts_early
from .tiles import ScreenConfig

# Sums of D <= 2**15 squares, in any order, are within 2**-9 of themselves, their roots within 2**-10.
_SUM = tl.constexpr(1.0 + 2.0**-9)
# An element in steps: the reciprocal of a rounded quotient and one product, 4 * 2**-24 of it with room.
_STEPS = tl.constexpr(2.0**-21)
_TINY = tl.constexpr(LEAST_SCALE)
NO_BEST = tl.constexpr(-(2**63))  # below what any group writes (rescore_groups.py)


@triton.jit
def quantize_hidden_kernel(
    hidden_ptr,  # [B, D]
    shrink_ptr,  # [D] f32
    terms_ptr,  # out [B * TERMS, D] i8
    scale_ptr,  # out [B] f32: the step
    norm_ptr,  # out [B] f32: at least |h|
    error_ptr,  # out [B] f32: at least |h - k|
    threshold_ptr,  # out [B] i32, as the next two: what a screen starts from
    best_ptr,  # out [B] i64
    candidates_ptr,  # out [B] i32
    hidden_stride,
    terms_stride,
    # constexpr
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TERMS: tl.constexpr,
    SHRINK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # of programs that wait for these to end
    row = tl.program_id(0)
    offs_d = tl.arange(0, BLOCK_D)
    mask = offs_d < D
    hidden = tl.load(hidden_ptr + row.to(tl.int64) * hidden_stride + offs_d, mask=mask, other=0.0).to(tl.float32)
    if SHRINK:
        hidden *= tl.load(shrink_ptr + offs_d, mask=mask, other=0.0)
    largest: tl.constexpr = 127.0 * 256.0 if TERMS == 2 else 127.0
    step = tl.maximum(tl.max(tl.abs(hidden)), _TINY * largest) / largest
    in_steps = hidden * (1.0 / step)
    rounded = tl.minimum(tl.maximum(tl.floor(in_steps + 0.5), -largest), largest)
    off = in_steps - rounded
    # In steps, where no square overflows and those that underflow are nothing beside the largest.
    norm = tl.sqrt(tl.sum(in_steps * in_steps)) * _SUM
    error = tl.sqrt(tl.sum(off * off)) * _SUM + norm * _STEPS
    tl.store(scale_ptr + row, step)
    tl.store(norm_ptr + row, norm * (1.0 + _STEPS) * step + _TINY)
    tl.store(error_ptr + row, error * (1.0 + _STEPS) * step + _TINY)
    terms = terms_ptr + (row * TERMS).to(tl.int64) * terms_stride + offs_d
    if TERMS == 2:
        high = tl.floor((rounded + 128.0) * (1.0 / 256.0))
        tl.store(terms, high.to(tl.int8), mask=mask)
        tl.store(terms + terms_stride, (rounded - 256.0 * high).to(tl.int8), mask=mask)
    else:
        tl.store(terms, rounded.to(tl.int8), mask=mask)
    tl.store(threshold_ptr + row, ordered(tl.full([], float("-inf"), tl.float32)))
    tl.store(best_ptr + row, NO_BEST)
    tl.store(candidates_ptr + row, 0)


def quantize_hidden(
    hidden: torch.Tensor,  # [B, D], as ``screened_sample`` has checked it
    int8_head: Int8Head,
    workspace: ScreenWorkspace,
    config: ScreenConfig,
) -> None:
    """Put the terms of ``hidden``, their scales and the norms into ``workspace``, and start a screen there."""
    num_rows, width = hidden.shape
    shrink = workspace.hidden_scale if int8_head.shrink is None else int8_head.shrink
    launch(
        quantize_hidden_kernel,
        num_rows,
        (
            hidden,
            shrink,
            workspace.terms,
            workspace.hidden_scale,
            workspace.hidden_norm,
            workspace.hidden_error,
            workspace.threshold,
            workspace.best,
            workspace.candidates,
            hidden.stride(0),
            workspace.terms.stride(0),
        ),
        {
            "D": width,
            "BLOCK_D": next_power_of_2(width),
            "TERMS": config.terms,
            "SHRINK": int8_head.shrink is not None,
            "EARLY": config.early and starts_early(hidden.device),
        },
        config.hidden_warps,
        (hidden.device.index, hidden.dtype, hidden.stride(0), workspace.terms.stride(0), hidden.data_ptr() % 16 == 0),
    )
