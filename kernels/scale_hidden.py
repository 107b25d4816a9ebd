"""Both operands of a product with a quantised head: float8_e4m3fn weights, and hidden states, as float16.

Weights are loaded as pairs of bytes, the words of ``ldmatrix``: a thread that holds two neighbouring words holds four
weights, and has its part of the product's left operand without a load for each pair. That takes the hidden size in
another order, the same for every tile: of each ``ORDERED`` elements those at even places first.

Each row is divided by a power of two, its unit, that brings its largest finite element into [2**15, 2**16): nothing
overflows, a float16 row is kept exactly, and an element of a bfloat16 row down to 2**-32 of the largest; what is
smaller is off by 2**-40 of that, less than what a float32 sum loses. Infinities and NaN stay what they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .config import MIN_BLOCK_D, next_power_of_2
from .intrinsics import unpack_e4m3
from .launch import launch
from .workspace import HalfHidden

ORDERED = tl.constexpr(MIN_BLOCK_D)
NUM_WARPS = 8
# Biased exponents of float32: that of 2**15 plus the bias, and the largest of a factor whose reciprocal is normal.
_TARGET = tl.constexpr(15 + 127 + 127)
_LARGEST = tl.constexpr(253)


@triton.jit
def load_pairs(weight, weight_stride, offs_v, first_pair, vocab_size, D: tl.constexpr, PAIRS: tl.constexpr):
    """``[BLOCK_V, PAIRS]`` i16, each two weights. weight: ``LMHead.addressed``, pairs or bytes."""
    offs_p = first_pair + tl.arange(0, PAIRS)
    exists = (offs_v < vocab_size)[:, None]
    rows = weight + offs_v.to(tl.int64)[:, None] * weight_stride
    if weight.dtype.element_ty == tl.int16:
        pairs = tl.load(rows + offs_p[None, :], mask=exists & (offs_p < D // 2)[None, :], other=0)
    else:
        low = tl.load(rows + 2 * offs_p[None, :], mask=exists & (2 * offs_p < D)[None, :], other=0)
        high = tl.load(rows + 2 * offs_p[None, :] + 1, mask=exists & (2 * offs_p + 1 < D)[None, :], other=0)
        pairs = (high.to(tl.int16) << 8) | low.to(tl.int16)
    return pairs


@triton.jit
def weights_as_fp16(pairs):
    """``[BLOCK_V, BLOCK_D]`` float16, in the order of the hidden states, from ``[BLOCK_V, BLOCK_D // 2]`` pairs."""
    even, odd = unpack_e4m3(pairs)
    BLOCK_V: tl.constexpr = pairs.shape[0]
    BLOCK_D: tl.constexpr = 2 * pairs.shape[1]
    both = tl.reshape(tl.join(even, odd), [BLOCK_V, BLOCK_D // ORDERED, ORDERED // 2, 2])
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), [BLOCK_V, BLOCK_D])


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
    pairs = tl.reshape((states * factor).to(tl.float16), [BLOCK_D // ORDERED, ORDERED // 2, 2])
    ordered = tl.reshape(tl.permute(pairs, (0, 2, 1)), [BLOCK_D])
    width = tl.cdiv(D, ORDERED) * ORDERED
    tl.store(half.states + row.to(tl.int64) * half_stride + offs_d, ordered, mask=offs_d < width)
    tl.store(half.unit + row, ((254 - exponent) << 23).to(tl.float32, bitcast=True))


def scale_hidden(hidden: torch.Tensor, half: HalfHidden, *, early: bool = False) -> None:
    """Write ``[B, D]`` bfloat16 or float16 ``hidden``, contiguous rows, as float16 in units of powers of two.

    half: ``Workspace.half_hidden(B, D)``: ``[B, D]`` float16, D up to a multiple of ``ORDERED``, in the order of the
    weights and with zeros in the places that are left; ``[B]`` float32 or longer. early: the next launch may start
    while this one runs, and waits for it (``launch``). Arguments are not checked.
    """
    num_rows, width = hidden.shape
    launch(
        scale_hidden_kernel,
        num_rows,
        (hidden, half, hidden.stride(0), half.states.stride(0)),
        {"D": width, "BLOCK_D": max(next_power_of_2(width), MIN_BLOCK_D), "EARLY": early},
        NUM_WARPS,
        (hidden.device.index, hidden.dtype, *(s.stride(0) for s in (hidden, half.states))),
    )
