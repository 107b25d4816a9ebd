"""Single hardware instructions against float64, within the errors that their docstrings state."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sgl_flashsample.kernels import intrinsics


@triton.jit
def _map_kernel(x_ptr, out_ptr, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=1.0)
    if FUNCTION == "log2":
        y = intrinsics.log2(x)
    elif FUNCTION == "square":
        y = intrinsics.mul_rn(x, x)
    elif FUNCTION == "reciprocal":
        y = intrinsics.reciprocal(x)
    elif FUNCTION == "drop_nan":
        y = intrinsics.drop_nan(x)
    elif FUNCTION == "round_to_bf16":
        y = intrinsics.round_to_bf16(x).to(tl.float32)
    elif FUNCTION == "ordered":
        y = intrinsics.float_to_ordered(x)
    else:
        y = intrinsics.ordered_to_float(intrinsics.float_to_ordered(x))
    tl.store(out_ptr + offs, y, mask=offs < n)


def mapped(x: torch.Tensor, function: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty_like(x, dtype=dtype)
    _map_kernel[(triton.cdiv(x.numel(), 4096),)](x, out, x.numel(), FUNCTION=function, BLOCK=4096)
    return out.double() if dtype is torch.float32 else out


def normal_numbers(device) -> torch.Tensor:
    """Numbers of every exponent, and many around 1."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-126, 127).repeat(200)
    of_every_exponent = torch.ldexp(torch.rand(exponents.shape, generator=generator) + 1.0, exponents)
    return torch.cat([of_every_exponent, torch.rand(50_000, generator=generator) * 1.5 + 0.5]).to(device)


def test_log2_errs_by_two_to_the_minus_22_absolute_around_1_and_relative_elsewhere(device):
    x = normal_numbers(device)
    want = torch.log2(x.double())
    error_bound = torch.where((x >= 0.5) & (x <= 2.0), torch.ones_like(want), want.abs()) * 2.0**-22
    assert ((mapped(x, "log2") - want).abs() <= error_bound).all()


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_log2_of_zero_is_minus_infinity(device):
    assert mapped(torch.zeros(1, device=device), "log2").item() == float("-inf")


def test_reciprocals_are_within_an_ulp(device):
    x = normal_numbers(device)
    x = x[x < 2.0**125]  # the reciprocal of larger ones is not normal
    want = 1.0 / x.double()
    assert ((mapped(x, "reciprocal") - want).abs() <= want * 2.0**-23).all()


def test_products_are_rounded_by_themselves(device):
    x = normal_numbers(device)
    x = x[(x > 2.0**-60) & (x < 2.0**60)]
    assert torch.equal(mapped(x, "square"), (x * x).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_the_place_of_nan_there_is_minus_infinity_and_else_what_was_there(device, dtype):
    inf = float("inf")
    x = torch.tensor([-inf, float("nan"), -1.5, -0.0, 0.0, 2.0**-14, -float("nan"), 3e4, inf], device=device)
    want = x.double().nan_to_num(-inf, inf, -inf)
    got = mapped(x.to(dtype), "drop_nan", dtype).double()
    assert torch.equal(got, want.to(dtype).double()) and torch.equal(got.signbit(), want.signbit())


def test_rounding_in_pairs_is_that_of_bfloat16_in_the_right_order(device):
    inf = float("inf")
    ties = torch.tensor([1.0, 1.00390625, 1.01171875, -1.00390625, inf, -inf, 0.0, -0.0, 3.3961776e38, float("nan")])
    x = torch.cat([ties.to(device), normal_numbers(device)])
    assert torch.equal(mapped(x, "round_to_bf16").nan_to_num(7.0), x.bfloat16().double().nan_to_num(7.0))


def test_floats_as_integers_keep_their_order_and_come_back(device):
    inf = float("inf")
    x = torch.cat([normal_numbers(device), torch.tensor([0.0, 2.0**-149, inf, 3.4e38], device=device)])
    x = torch.cat([x, -x]).sort().values
    keys = mapped(x, "ordered", torch.int32)
    assert ((keys[1:] > keys[:-1]) == (x[1:] > x[:-1]))[x[1:] != x[:-1]].all()
    assert (keys[1:] >= keys[:-1])[x[1:] != 0].all(), "but for the two zeros"
    assert torch.equal(mapped(x, "back"), x.double())
