"""Makes bfloat16 and float8_e4m3fn right in Triton's interpreter, for the tests. Compiled kernels are not concerned.

The interpreter stores bfloat16 as uint16 and then multiplies the raw bits (``tl.dot``) and truncates instead of
rounding (float32 to bfloat16). The NaN of float8_e4m3fn it takes for 480.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def _to_float32(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _round_to_bfloat16(data: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)


_E4M3_AS_FLOAT16 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half().numpy()


def patch() -> None:
    builder = interpreter.InterpreterBuilder
    dot, trunc, ext = builder.create_dot, builder.create_fp_trunc, builder.create_fp_ext
    convert = builder.create_fp_to_fp

    def create_dot(self, a, b, d, *rest):
        return dot(self, _to_float32(a), _to_float32(b), d, *rest)

    def create_fp_trunc(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_round_to_bfloat16(src.data), tl.bfloat16)
        return trunc(self, src, dst_type)

    def create_fp_ext(self, src, dst_type):
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return _to_float32(src)
        return ext(self, src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if src.dtype.scalar == tl.float8e4nv and dst_type.scalar == tl.float16:
            return interpreter.TensorHandle(_E4M3_AS_FLOAT16[src.data], tl.float16)
        return convert(self, src, dst_type, rounding_mode)

    builder.create_fp_to_fp = create_fp_to_fp
    builder.create_dot, builder.create_fp_trunc, builder.create_fp_ext = create_dot, create_fp_trunc, create_fp_ext
