"""The noise: known answers, the float32 map against float64 over its whole range, and independence."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import KNOWN_ANSWERS
from scipy import stats

from sgl_flashsample.kernels import rng
from sgl_flashsample.kernels.reference import exponential_from_bits_ref, gumbel_ref, philox4x32_ref
from sgl_flashsample.kernels.rng import Stream, Unit

# -log(-log1p(-v)) of three (seed, position, index), computed with Python's integers and floats.
TOKEN_NOISE = [0.6748404362832034, -0.5360987695275121, -0.35710413780552125]
GROUP_NOISE = [0.06991854893082804, 3.286111557616761, 1.8504467226994248]


@triton.jit
def _philox_kernel(words_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    c0 = tl.load(words_ptr + offs, mask=mask, other=0).to(tl.uint32)
    c1 = tl.load(words_ptr + n + offs, mask=mask, other=0).to(tl.uint32)
    c2 = tl.load(words_ptr + 2 * n + offs, mask=mask, other=0).to(tl.uint32)
    c3 = tl.load(words_ptr + 3 * n + offs, mask=mask, other=0).to(tl.uint32)
    k0 = tl.load(words_ptr + 4 * n + offs, mask=mask, other=0).to(tl.uint32)
    k1 = tl.load(words_ptr + 5 * n + offs, mask=mask, other=0).to(tl.uint32)
    r0, r1, r2, r3 = rng.philox4x32(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr + offs, r0.to(tl.int64), mask=mask)
    tl.store(out_ptr + n + offs, r1.to(tl.int64), mask=mask)
    tl.store(out_ptr + 2 * n + offs, r2.to(tl.int64), mask=mask)
    tl.store(out_ptr + 3 * n + offs, r3.to(tl.int64), mask=mask)


@triton.jit
def _exponential_kernel(hi_ptr, lo_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hi = tl.load(hi_ptr + offs, mask=offs < n, other=0).to(tl.uint32)
    lo = tl.load(lo_ptr + offs, mask=offs < n, other=0).to(tl.uint32)
    tl.store(out_ptr + offs, rng.exponential_from_bits(hi, lo), mask=offs < n)


@triton.jit
def _noise_kernel(
    seed_ptr, position_ptr, index_ptr, out_ptr, n, STREAM: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr + offs, mask=offs < n, other=0)
    position = tl.load(position_ptr + offs, mask=offs < n, other=0)
    index = tl.load(index_ptr + offs, mask=offs < n, other=0)
    tl.store(out_ptr + offs, -tl.log(rng.exponential(seed, position, index, STREAM, UNIT)), mask=offs < n)


def philox(words: torch.Tensor) -> torch.Tensor:
    """``[6, N]`` counter and key words -> ``[4, N]`` answers, from the kernel's own function."""
    n = words.shape[1]
    out = torch.empty(4, n, dtype=torch.int64, device=words.device)
    block = 1024 if words.is_cuda or n <= 1024 else 65536
    _philox_kernel[(triton.cdiv(n, block),)](words.contiguous(), out, n, BLOCK=block)
    return out


def exponential(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    out = torch.empty(hi.shape, dtype=torch.float32, device=hi.device)
    block = 1024 if hi.is_cuda else 65536
    _exponential_kernel[(triton.cdiv(hi.numel(), block),)](hi, lo, out, hi.numel(), BLOCK=block)
    return out


def noise(seed, position, index, stream, unit) -> torch.Tensor:
    seed, position, index = (t.contiguous() for t in torch.broadcast_tensors(seed, position, index))
    out = torch.empty(seed.shape, dtype=torch.float32, device=seed.device)
    block = 1024 if seed.is_cuda else 65536
    _noise_kernel[(triton.cdiv(out.numel(), block),)](
        seed, position, index.to(torch.int32), out, out.numel(), STREAM=int(stream), UNIT=int(unit), BLOCK=block
    )
    return out


def assert_exponential_within_16_ulp(hi: torch.Tensor, lo: torch.Tensor) -> None:
    got = exponential(hi, lo)
    want = exponential_from_bits_ref(hi, lo)
    assert torch.isfinite(got).all()
    assert (got > 0).all()
    ulp = torch.ldexp(torch.ones_like(want), torch.frexp(want).exponent - 24)
    assert ((got.double() - want).abs() / ulp).max().item() <= 16.0


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(device, counter, key, answer):
    words = torch.tensor([*counter, *key], dtype=torch.int64, device=device)[:, None]
    assert tuple(philox(words)[:, 0].tolist()) == answer
    assert tuple(int(w) for w in philox4x32_ref(list(words[:4, 0]), list(words[4:, 0]))) == answer


def test_philox_equals_the_reference_bit_for_bit_on_random_counters_and_keys(device):
    words = torch.randint(0, 2**32, (6, 200_000), generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(philox(words), torch.stack(philox4x32_ref(list(words[:4]), list(words[4:]))))


def test_exponential_is_finite_positive_and_within_16_ulp_at_every_power_of_two_and_both_ends(device):
    powers = [2**k for k in range(33)]
    edges = sorted({min(max(p + e, 0), 2**32 - 1) for p in powers for e in range(-40, 41)})
    edges = sorted(set(edges) | {2**32 - 1 - e for e in edges})
    hi, lo = zip(*itertools.product(edges, (0, 1, 2**16, 2**31, 2**32 - 1)), strict=True)
    assert_exponential_within_16_ulp(torch.tensor(hi, device=device), torch.tensor(lo, device=device))
    tiny = [(0, x) for x in edges] + [(2**32 - 1, x) for x in edges]
    hi, lo = zip(*tiny, strict=True)
    assert_exponential_within_16_ulp(torch.tensor(hi, device=device), torch.tensor(lo, device=device))


def test_exponential_is_within_16_ulp_on_random_words(device):
    words = torch.randint(0, 2**32, (2, 2_000_000), generator=torch.Generator().manual_seed(2)).to(device)
    assert_exponential_within_16_ulp(words[0], words[1])


@pytest.mark.gpu
def test_exponential_is_within_16_ulp_on_all_high_words(device):
    generator = torch.Generator(device).manual_seed(3)
    step = 2**26
    for start in range(0, 2**32, step):
        hi = torch.arange(start, start + step, device=device)
        lo = torch.randint(0, 2**32, (step,), generator=generator, device=device)
        assert_exponential_within_16_ulp(hi, lo)


def test_exponential_grows_with_the_uniform_that_it_maps_but_for_its_rounding(device):
    hi = torch.arange(0, 2**32, 2**13, device=device)
    value = exponential(hi, torch.zeros_like(hi)).double()
    assert (value[1:] >= value[:-1] * (1 - 2.0**-20)).all()


def test_noise_equals_the_reference_for_seeds_positions_and_indices_of_every_size(device):
    seeds = torch.tensor([0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 12345678901234567], device=device)
    positions = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 + 7, 2**40], device=device)
    index = torch.tensor([0, 1, 15, 16, 151935, 2**31 - 1], device=device)
    grid = torch.cartesian_prod(seeds, positions, index)
    for stream, unit in itertools.product(Stream, Unit):
        got = noise(grid[:, 0], grid[:, 1], grid[:, 2], stream, unit)
        want = gumbel_ref(grid[:, 0], grid[:, 1], grid[:, 2], stream, unit)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
        assert got.unique().numel() == got.numel(), "two (seed, position, index) share noise"


def test_no_two_streams_or_units_share_noise(device):
    index = torch.arange(5000, device=device)
    zero = torch.zeros_like(index)
    values = torch.cat([noise(zero, zero, index, s, u) for s, u in itertools.product(Stream, Unit)])
    # 10,000 draws of a float32: a handful of equal values by chance, thousands if a unit were shared.
    assert values.numel() - values.unique().numel() < 20


def test_the_definition_is_the_one_that_tokens_were_promised_with(device):
    """Known values of NOISE_ABI 2. Another definition would give other tokens for a seed, and needs another number."""
    assert rng.NOISE_ABI == 2 and rng.GROUP_SIZE == 16
    assert (Stream.SAMPLE, Unit.TOKEN, Unit.GROUP) == (0, 0, 1)
    seed, position = torch.tensor([0, 42, -7]), torch.tensor([0, 17, 2**33])
    index = torch.tensor([0, 9496, 151_935])
    known = {Unit.TOKEN: TOKEN_NOISE, Unit.GROUP: GROUP_NOISE}
    for unit, values in known.items():
        want = torch.tensor(values, device=device)
        got = noise(*(t.to(device) for t in (seed, position, index)), Stream.SAMPLE, unit)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", ["seed", "position", "index"])
def test_noise_follows_a_gumbel_law_along_each_axis_and_neighbours_are_independent(device, axis):
    n = 200_000
    line = torch.arange(n, device=device)
    fixed = torch.full_like(line, 7)
    arguments = {"seed": fixed, "position": fixed, "index": fixed} | {axis: line}
    values = noise(*arguments.values(), Stream.SAMPLE, Unit.TOKEN).double().cpu().numpy()
    assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > 1e-4
    uniform = stats.gumbel_r.cdf(values)
    assert abs(np.corrcoef(uniform[1:], uniform[:-1])[0, 1]) < 5 / np.sqrt(n)
