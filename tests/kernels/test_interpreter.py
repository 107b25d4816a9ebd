"""The patches that make the interpreter faster and its bfloat16 right change no other result of a kernel, and are
undone after each launch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sgl_flashsample.demo import interpreter

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
