"""The noise: the one place in this project where randomness is defined.

    noise(seed, position, index, stream, unit) = -log(-log1p(-v)),   v ~ U(0, 1)

``v`` has 64 bits and comes from Philox4x32-10 (Salmon et al., SC 2011) used as a pure function:

    key     = (seed bits 0..31,  seed bits 32..63)
    counter = (index, position bits 0..31, position bits 32..63, stream + 256 * unit)

``index`` is an absolute vocabulary id (unit ``TOKEN``) or an absolute group id (unit ``GROUP``: the
``GROUP_SIZE`` consecutive ids ``GROUP_SIZE * index ...``). Nothing else enters: not the tile, the
row, the batch, the rank or a launch counter. So a token depends on (logits row, seed, position) only.

A plain row is drawn in two levels, exact by Lemma 4.3 of the FlashSampling paper (group factorization):

    group = argmax_g  logsumexp_{i in g} l_i  +  noise(g, GROUP)
    token = argmax_{i in group}  l_i          +  noise(i, TOKEN)

so the epilogue of a kernel pays for one noise value per ``GROUP_SIZE`` logits.

Changing anything here changes tokens for a given seed: bump ``NOISE_ABI`` and say so.
"""

from __future__ import annotations

import enum

import triton
import triton.language as tl

from .config import GROUP_SIZE as GROUP_SIZE  # part of this definition, too
from .intrinsics import LN_2, log2

NOISE_ABI = 2


class Stream(enum.IntEnum):
    """The decision that a random value is for. Two decisions never share a stream, so never share noise.

    Numbers 1 to 3 are reserved.
    """

    SAMPLE = 0  # the token of a decode step


class Unit(enum.IntEnum):
    """The unit that ``index`` counts."""

    TOKEN = 0
    GROUP = 1


SAMPLE = tl.constexpr(int(Stream.SAMPLE))
TOKEN = tl.constexpr(int(Unit.TOKEN))
GROUP = tl.constexpr(int(Unit.GROUP))
NO_GROUP = tl.constexpr(2**31 - 1)  # above every group id: the neutral element of their minimum

_PHILOX_ROUNDS = tl.constexpr(10)
_TWO_POW_MINUS_32 = tl.constexpr(2.0**-32)
_TWO_POW_MINUS_64 = tl.constexpr(2.0**-64)
# -log(1 - t) = t + t^2 / 2 + ...: so many terms leave 5e-7 of it at 1/6, where the hardware's logarithm errs by 9e-7.
_SERIES_TERMS = tl.constexpr(8)
_SERIES_UP_TO = tl.constexpr(1.0 / 6.0)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10. All arguments uint32 blocks that broadcast; returns four uint32 blocks."""
    for _ in tl.static_range(_PHILOX_ROUNDS):
        hi0 = tl.umulhi(c0, 0xD2511F53)
        lo0 = tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        hi1 = tl.umulhi(c2, 0xCD9E8D57)
        lo1 = tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0 = hi1 ^ c1 ^ k0
        c1 = lo1
        c2 = hi0 ^ c3 ^ k1
        c3 = lo0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def exponential_from_bits(hi, lo):
    """Exp(1) from 64 random bits: ``-log1p(-v)`` with ``v = (2**32 hi + lo + 1/2) / 2**64``.

    hi, lo: uint32 blocks. Result: float32, finite and > 0 for every input, within 16 ulp: as
    much as a score is rounded by.

    Small values win, so they must keep full resolution: a 24-bit ``v`` puts a total variation of 3e-3
    on a 150k vocabulary. ``t`` is the distance of ``v`` to the nearer of 0 and 1, taken from the bits
    themselves, so neither end is rounded away and the result is never 0 or infinite.
    """
    upper = hi >= 0x80000000
    flip = tl.where(upper, 0xFFFFFFFF, 0).to(tl.uint32)
    t = (hi ^ flip).to(tl.float32) * _TWO_POW_MINUS_32 + ((lo ^ flip).to(tl.float32) + 0.5) * _TWO_POW_MINUS_64
    # Near 1 a logarithm is small and its error is not: there the series of -log(1 - t).
    series = tl.full(t.shape, 1.0 / _SERIES_TERMS, tl.float32)
    for term in tl.static_range(1, _SERIES_TERMS):
        series = tl.fma(series, t, 1.0 / (_SERIES_TERMS - term))
    minus_log = log2(tl.where(upper, t, 1.0 - t)) * -LN_2
    return tl.where(upper | (t > _SERIES_UP_TO), minus_log, series * t)


@triton.jit
def exponential(seed, position, index, STREAM: tl.constexpr, UNIT: tl.constexpr):
    """Exp(1) for each element. seed, position: int64; index: int32, >= 0; blocks that broadcast."""
    seed = seed.to(tl.uint64, bitcast=True)
    position = position.to(tl.uint64, bitcast=True)
    zero = (seed ^ seed).to(tl.uint32)
    hi, lo, _, _ = philox4x32(
        index.to(tl.uint32),
        position.to(tl.uint32),
        (position >> 32).to(tl.uint32),
        zero + (STREAM + 256 * UNIT),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    return exponential_from_bits(hi, lo)
