"""Hidden states as float16, for heads whose weights are multiplied as float16 (float8_e4m3fn, a subset of it).

Each row is divided by a power of two, its unit, that brings its largest finite element into [2**15, 2**16): nothing
overflows, a float16 row is kept exactly, and an element of a bfloat16 row down to 2**-32 of the largest; what is
smaller is off by 2**-40 of that, less than what a float32 sum loses. Infinities and NaN stay what they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .config import next_power_of_2
from .launch import launch
from .workspace import HalfHidden

NUM_WARPS = 8
# Biased exponents of float32: that of 2**15 plus the bias, and the largest of a factor whose reciprocal is normal.
_TARGET = tl.constexpr(15 + 127 + 127)
_LARGEST = tl.constexpr(253)


@triton.jit(do_not_specialize_on_alignment=["hidden_ptr"])
def scale_hidden_kernel(
    hidden_ptr,  # [B, D] bf16 or f16
    half,  # HalfHidden, out
    hidden_stride,
    half_stride,
    # constexpr
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row per program."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    offs_d = tl.arange(0, BLOCK_D)
    inside = offs_d < D
    states = tl.load(hidden_ptr + row.to(tl.int64) * hidden_stride + offs_d, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(states)
    largest = tl.max(tl.where(size < float("inf"), size, 0.0))
    exponent = tl.minimum(-(largest.to(tl.int32, bitcast=True) >> 23) + _TARGET, _LARGEST)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(half.states + row.to(tl.int64) * half_stride + offs_d, (states * factor).to(tl.float16), mask=inside)
    tl.store(half.unit + row, ((254 - exponent) << 23).to(tl.float32, bitcast=True))


def scale_hidden(hidden: torch.Tensor, half: HalfHidden, *, early: bool = False) -> None:
    """Write ``[B, D]`` bfloat16 or float16 ``hidden``, contiguous rows, as float16 in units of powers of two.

    half: ``[B, D]`` float16 and ``[B]`` float32 or longer. early: the next launch may start while this one runs, and
    waits for it (``launch``). Arguments are not checked.
    """
    num_rows, width = hidden.shape
    launch(
        scale_hidden_kernel,
        num_rows,
        (hidden, half, hidden.stride(0), half.states.stride(0)),
        {"D": width, "BLOCK_D": next_power_of_2(width), "EARLY": early},
        NUM_WARPS,
        (hidden.device.index, hidden.dtype, *(s.stride(0) for s in (hidden, half.states))),
    )
