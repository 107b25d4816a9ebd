"""Single hardware instructions that Triton has no name for, and float32 as integers in the same order. Device functions
only."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # no inline assembly there


@triton.jit
def log2(x):
    """Base-2 logarithm of normal float32 numbers, a tenth of the instructions of ``tl.log2``.

    Error: 2**-22, absolute between 1/2 and 2, relative elsewhere (PTX, lg2.approx). Zero gives -inf.
    """
    if _INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def mul_rn(x, y):
    """``x * y`` in float32, rounded: never part of a fused multiply-add, so that every kernel has the same number."""
    if _INTERPRETED:
        result = x * y
    else:
        x, y = tl.broadcast(x, y)
        result = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def reciprocal(x):
    """``1 / x`` of normal float32 numbers, within 1 ulp."""
    if _INTERPRETED:
        result = 1.0 / x
    else:
        result = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def round_to_bf16(x):
    """float32 rounded to bfloat16: two numbers per instruction, where ``x.to(tl.bfloat16)`` takes one."""
    if _INTERPRETED:
        rounded = x.to(tl.bfloat16)
    else:
        rounded = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return rounded


@triton.jit
def unpack_e4m3(pairs):
    """int16, each two numbers in float8_e4m3fn, as float16: those of the low bytes, and those of the high bytes."""
    if _INTERPRETED:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 lows, highs;
                .reg .b16 low, high, rest;
                prmt.b32 lows, $2, 0, 0x4420;
                prmt.b32 highs, $2, 0, 0x4431;
                mov.b32 {low, rest}, lows;
                mov.b32 {high, rest}, highs;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def drop_nan(x):
    """Numbers of any float dtype, -inf in the place of each NaN; of bfloat16, two per instruction."""
    if _INTERPRETED or not x.dtype.is_bf16():
        wide = x.to(tl.float32)
        result = tl.where(wide == wide, wide, float("-inf")).to(x.dtype)
    else:
        result = tl.inline_asm_elementwise(
            "{ .reg .b32 lowest; mov.b32 lowest, 0xFF80FF80; max.bf16x2 $0, $1, lowest; }",
            "=r,r",
            [x],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return result


@triton.jit
def prefetch(pointers, mask):
    """Ask the L2 cache for the 128 bytes around each pointer that ``mask`` selects, and do not wait."""
    if not _INTERPRETED:
        pointers, mask = tl.broadcast(pointers, mask)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [pointers.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def after_writes(x):
    """``x``, an int32, once the host and other GPUs can see what this thread has written, or has seen."""
    if not _INTERPRETED:
        x = tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )
    return x


@triton.jit
def float_to_ordered(x):
    """float32 to int32, order-preserving."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def ordered_to_float(key):
    """The inverse of ``float_to_ordered``."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
