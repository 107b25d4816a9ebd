"""The patches that make the interpreter faster and its bfloat16 right change no other result of a kernel, and are
undone after each launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from lab import interpreter

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here")


@triton.jit
def doubled_unless_large(x, LIMIT: tl.constexpr):
    tl.static_assert(LIMIT < 100, "a limit that is too large")
    return tl.where(x < LIMIT, x * 2, x)


@triton.jit
def kernel(x_ptr, out_ptr, largest_ptr, LIMIT: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    ids = row * WIDTH + tl.arange(0, WIDTH)
    values = doubled_unless_large(tl.load(x_ptr + ids), LIMIT)
    tl.store(out_ptr + ids, doubled_unless_large(values, LIMIT).to(tl.float16))
    tl.store(largest_ptr + row, tl.max(values))


@triton.jit
def bfloat16_kernel(x_ptr, rounded_ptr, product_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs).to(tl.bfloat16)
    tl.store(rounded_ptr + offs, x)
    tl.store(product_ptr + offs, tl.dot(x, x))


@pytest.mark.parametrize("limit", [5, 100])
def test_device_functions_of_ours_and_of_tritons_work_after_one_another_and_after_an_error(limit):
    x = torch.arange(24, dtype=torch.float32)
    out, largest = torch.empty(24, dtype=torch.float16), torch.empty(3)
    before = tl.load, tl.dtype.to_ir, tl.range
    if limit == 100:
        with pytest.raises(Exception, match="a limit that is too large"):
            kernel[(3,)](x, out, largest, limit, 8)
    else:
        kernel[(3,)](x, out, largest, limit, 8)
        once = torch.where(x < limit, 2 * x, x)
        assert torch.equal(largest, once.view(3, 8).amax(1))
        assert torch.equal(out, torch.where(once < limit, 2 * once, once).half())
    assert (tl.load, tl.dtype.to_ir, tl.range) == before, "patches are undone after the launch"


def test_bfloat16_is_rounded_to_nearest_and_multiplied_as_the_numbers_that_it_is():
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) * 100
    x[0, 0] = float("nan")
    rounded, product = torch.empty(16, 16, dtype=torch.bfloat16), torch.empty(16, 16)
    bfloat16_kernel[(1,)](x, rounded, product, 16)
    assert torch.equal(rounded.nan_to_num(), x.bfloat16().nan_to_num())
    want = rounded.float() @ rounded.float()
    torch.testing.assert_close(product, want, rtol=1e-6, atol=1e-3, equal_nan=True)


DTYPES = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.bfloat16, tl.float32]
DTYPES += [tl.float64, tl.pointer_type(tl.float32)]
SHAPES = [(), (4,), (1, 4), (4, 1), (2, 4)]
NUMBERS = [
    0,
    1,
    -1,
    True,
    255,
    -(2**31),
    2**31,
    2**40,
    2**63,
    2**64,
    0.0,
    -0.0,
    1.0,
    -2.5,
    1e300,
    float("inf"),
    float("nan"),
]


@pytest.fixture
def semantic():
    """Triton's own, with the languages as they are in a launch."""
    from triton.runtime import interpreter as tritons

    scope = tritons._patch_lang(kernel.fn)
    yield tritons.interpreter_semantic
    scope.restore()


def operand(semantic, dtype, shape: tuple[int, ...]):
    from triton.runtime import interpreter as tritons

    data = np.full(shape or (1,), 3).astype(tritons._get_np_dtype(dtype))
    return semantic.tensor(tritons.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def outcome(function, *arguments):
    """Types, shapes and values of what it gives, or its error."""
    try:
        results = function(*arguments)
    except Exception as error:
        return type(error), str(error)
    results = results if isinstance(results, tuple) else (results,)
    described = []
    for one in results:
        shape = [size.value for size in one.shape]
        described.append((str(one.type), str(one.dtype), shape, one.numel.value, str(one.handle.dtype)))
        described.append((one.handle.data.dtype, one.handle.data.shape, one.handle.data.tobytes()))
    return described


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_are_converted_as_triton_converts_them(semantic, dtype):
    """Every pair of types and shapes, and every number on either side."""
    kind = type(semantic)
    prepare, broadcast = kind.binary_op_type_checking_impl, kind.broadcast_impl_value
    pairs = 0
    for shape in SHAPES:
        one = operand(semantic, dtype, shape)
        others = [operand(semantic, other, size) for other in DTYPES for size in SHAPES]
        flags = ((), (True, True), (False, False, False), (False, False, True, True))
        for other in (*others, *NUMBERS):
            for arguments in (
                (first, second, *more) for first, second in ((one, other), (other, one)) for more in flags
            ):
                got, want = (outcome(function, semantic, *arguments) for function in (prepare, prepare.__wrapped__))
                assert got == want, arguments
                pairs += isinstance(want, list)
        for other in others:
            got, want = (outcome(function, semantic, one, other) for function in (broadcast, broadcast.__wrapped__))
            assert got == want
            got, want = (
                outcome(function, semantic, one, other.type) for function in (kind.cast, kind.cast.__wrapped__)
            )
            assert got == want
        for size in SHAPES:
            got, want = (outcome(function, semantic, one, size) for function in (kind.splat, kind.splat.__wrapped__))
            assert got == want
    assert pairs > 30


def test_it_is_in_use_and_a_second_time_changes_nothing():
    from triton.runtime import interpreter as tritons

    look = tritons._patch_lang
    assert look.once
    interpreter.patch()
    assert tritons._patch_lang is look


def test_an_interpreter_of_another_build_is_left_alone(monkeypatch):
    from triton.runtime import interpreter as tritons

    monkeypatch.delattr(tritons, "_LangPatchScope")
    monkeypatch.delattr(tritons._patch_lang, "once")
    look = tritons._patch_lang
    interpreter.patch()
    assert tritons._patch_lang is look
