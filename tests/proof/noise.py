"""The noise, on a CPU: the map from bits to noise at every upper word, the order in which words are used, collisions.
Known answers of Philox are in the tests.

    python tests/proof/noise.py --out tests/proof/results/noise.json

collisions  steps that share all their noise: counted and expected, ours and vLLM's. Ours is a function of a 64-bit
            seed and the position; vLLM's default (0.33, PR 51367) of 32 bits that Murmur3 makes of the two
map         all 2**32 upper words with a lower word of 0, where the noise is largest: the float64 noise of the cpu path
            and the float32 noise of the kernels against the definition, and the bound of the cpu path above it. The
            cpu path's own functions, with words in place of Philox; the kernels' arithmetic compiled by Numba, which is
            compared with the kernels' own function. "with_lg2_approx": with all of the error that PTX allows to the
            hardware's logarithm, which is larger than this machine's
streams     words in orders in which samplers use them, as 32-bit numbers, tested by TestU01 where its library is
            installed (Debian: libtestu01-0, non-free). SmallCrush tests each order, and each with the bits of a number
            reversed, as most tests look at the upper bits. p-values as TestU01's guide reads them: 1e-10 or less from
            0 or 1 has failed; 0.001 or less is suspect, as 0.2 % of those of good words are
crush ...   one of the orders, named after ``--crush``, tested by TestU01's longer battery

Each of the first three has rows with a planted error, which must be noticed. The exit code is 1 where something is not
as it must be; the file then says what under "wrong". Takes 25 minutes on one core, and 35 minutes more for each order
of ``--crush``. ``--only`` runs some of the sections, or without a name none but ``--crush``; ``--keep`` leaves the
others in the file. Rows are written as they come; a section whose run has not ended says "unfinished".
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import os
import platform
import re
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numba
import numpy as np
import torch
import triton
import triton.language as tl
from programs import command_line, make_parser, new_env, read_result, reason_of, today, write_result
from numba import carray, cfunc, njit

from sgl_flashsample import cpu_loops
from sgl_flashsample.kernels import rng
from sgl_flashsample.sglang.arrivals import Arrivals

U64 = np.uint64
LOW = U64(0xFFFFFFFF)
WORDS = 2**32
TOKEN, GROUP = (int(rng.Stream.SAMPLE) + 256 * int(unit) for unit in (rng.Unit.TOKEN, rng.Unit.GROUP))
COMPARED = 2**20  # random pairs of words

Words = Callable[..., Any]  # as ``cpu_loops._philox``, compiled
Rows = Iterator[tuple[dict[str, Any], bool]]  # of a section, and whether each is as it must be


def with_globals(function: Any, **changes: Any) -> Any:
    """A compiled function of the cpu path, compiled again with other globals."""
    source = function.py_func
    return njit(types.FunctionType(source.__code__, source.__globals__ | changes, source.__name__))


# --- collisions


def seeds_of(requests: int, rank: int = 0) -> np.ndarray:
    """uint64, of the first requests of a server, or of one rank of it, without a seed of their own."""
    arrivals, unseeded = Arrivals(rank), types.SimpleNamespace(sampling_seed=None)
    seeds = (arrivals.seed_of(types.SimpleNamespace(sampling_params=unseeded), 42) for _ in range(requests))
    return np.fromiter(seeds, np.int64, requests).view(U64)


@njit
def _murmur_prefix(seed, position):
    """MurmurHash3_x86_32 after the words of seed and position, before those of the token: all that tokens share."""
    state = U64(0)
    for key in (seed & LOW, seed >> U64(32), position & LOW):
        key = (key * U64(0xCC9E2D51)) & LOW
        key = (key << U64(15) | key >> U64(17)) & LOW
        state ^= (key * U64(0x1B873593)) & LOW
        state = (state << U64(13) | state >> U64(19)) & LOW
        state = (state * U64(5) + U64(0xE6546B64)) & LOW
    return state


@njit
def _prefixes(seeds, positions):
    out = np.empty(len(seeds) * positions, U64)
    for i in range(len(out)):
        out[i] = _murmur_prefix(seeds[i // positions], U64(i % positions))
    return out


def equal_pairs(values: np.ndarray) -> int:
    counts = np.unique(values, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def check_collisions() -> Rows:
    """Two steps share all noise where seed and position are equal; for vLLM, where the 32 bits made of them are. Steps
    of one request differ in position, so of ours only steps of different requests at one position can."""
    for requests, positions in ((1000, 1000), (10**6, 1), (10**7, 1)):
        seeds = seeds_of(requests)
        steps = {"requests": requests, "positions": positions, "steps": requests * positions}
        pairs = math.comb(requests, 2)
        shared = {
            "ours": (positions * equal_pairs(seeds), positions * pairs / 2**64),
            "vLLM": (equal_pairs(_prefixes(seeds, positions)), positions**2 * pairs / 2**32),
        }
        if positions == 1:
            shared["ours, seeds cut to 32 bits"] = equal_pairs(seeds & LOW), pairs / 2**32
        for noise, (equal, expected) in shared.items():
            planted = {"planted": True} if noise.endswith("bits") else {}
            row = {"noise": noise, **steps, "equal_pairs": equal, "expected": float(f"{expected:.4g}"), **planted}
            # Five deviations of a Poisson count; of ours, with 1e-6 expected, any pair is too many.
            yield row, equal == 0 if noise == "ours" else expected <= 1 or abs(equal - expected) <= 5 * expected**0.5


# --- the map

LN_2, SIXTH, TWO_32, TWO_64 = (np.float32(x) for x in (math.log(2), 1 / 6, 2.0**-32, 2.0**-64))
HALF, ONE = np.float32(0.5), np.float32(1)
LG2_ERROR = np.float32(2.0**-22)  # of lg2.approx (PTX): absolute between 1/2 and 2, relative elsewhere
COEFFICIENTS = np.array([1 / n for n in range(1, 13)])
MAX_ULP = 16.0  # what ``exponential_from_bits`` promises
NUMBERS = (  # of ``scan``
    "cpu_max_absolute_error",
    "cpu_max_error_over_max_1_noise",
    "cpu_not_finite_or_not_below_the_one_before",
    "bound_min_slack_bits",
    "bound_max_slack_bits",
    "bound_below_noise",
    "kernel_exponential_max_relative_error",
    "kernel_exponential_max_relative_error_with_lg2_approx",
    "kernel_exponential_not_positive_or_beyond_16_ulp",
    "kernel_noise_max_absolute_error",
    "kernel_exponential_max_relative_fall",
)


@njit
def exponential_float32(hi, lo):
    """``rng.exponential_from_bits``, and how far from it the hardware's logarithm may take it."""
    upper = hi >= U64(0x80000000)
    flip = LOW if upper else U64(0)
    t = np.float32(hi ^ flip) * TWO_32 + (np.float32(lo ^ flip) + HALF) * TWO_64
    if not upper and t <= SIXTH:
        series = np.float32(1 / 8)
        for term in range(1, 8):
            series = series * t + np.float32(1 / (8 - term))
        return series * t, np.float32(0)
    log2 = np.float32(math.log2(t if upper else ONE - t))
    return log2 * -LN_2, LG2_ERROR * LN_2 * max(ONE, abs(log2))


@triton.jit
def _exponential_kernel(hi_ptr, lo_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    hi, lo = tl.load(hi_ptr + offs).to(tl.uint32), tl.load(lo_ptr + offs).to(tl.uint32)
    tl.store(out_ptr + offs, rng.exponential_from_bits(hi, lo))


def definition(hi: Any, lo: Any = 0) -> tuple[Any, Any, Any]:
    """1 - v, -log1p(-v) and -log(-log1p(-v)) of words, with 64 bits."""
    scale = np.longdouble(2) ** 32
    v = (np.longdouble(hi) + (np.longdouble(lo) + np.longdouble(0.5)) / scale) / scale
    rest = (np.longdouble(LOW - U64(hi)) + (np.longdouble(LOW - U64(lo)) + np.longdouble(0.5)) / scale) / scale
    exponential = np.where(hi < WORDS // 2, -np.log1p(-np.minimum(v, np.longdouble(0.5))), -np.log(rest))[()]
    return rest, exponential, -np.log(exponential)


def compare_pairs(gumbel: Any) -> dict[str, Any]:
    """On random pairs of words of every size: ``exponential_float32`` beside the kernels' own function, interpreted,
    and the noise of the cpu path beside the definition."""

    @njit
    def evaluate(hi, lo, exponentials, noise):
        for i in range(len(hi)):
            exponentials[i] = exponential_float32(hi[i], lo[i])[0]
            noise[i] = gumbel(hi[i], lo[i], U64(0), U64(0))

    hi, lo = np.random.default_rng(1).integers(0, WORDS, (2, COMPARED), dtype=U64)
    hi[: COMPARED // 2] >>= lo[: COMPARED // 2] & U64(31)
    hi[: COMPARED // 4] ^= LOW
    here, noise, kernels = np.empty(COMPARED, np.float32), np.empty(COMPARED), torch.empty(COMPARED)
    evaluate(hi, lo, here, noise)
    _exponential_kernel[(1,)](*(torch.from_numpy(w.astype(np.int64)) for w in (hi, lo)), kernels, BLOCK=COMPARED)
    ulp = np.abs(kernels.numpy().view(np.int32).astype(np.int64) - here.view(np.int32))
    want = definition(hi, lo)[2]
    error = float((np.abs(noise - want) / np.maximum(1, np.abs(want))).max())
    pairs = {"pairs": COMPARED, "pairs_equal_to_kernels": int((ulp == 0).sum()), "pairs_max_ulp_apart": int(ulp.max())}
    return pairs | {"pairs_cpu_max_error_over_max_1_noise": float(f"{error:.4g}")}


def pair(x: np.longdouble) -> tuple[float, float]:
    return float(x), float(x - np.longdouble(float(x)))


def anchors(stop: int) -> Iterator[tuple[int, int, np.longdouble, np.longdouble, np.longdouble]]:
    """Runs of upper words within which 1 - v and -log1p(-v) change by at most 1/64: the first, the one after the last,
    and ``definition`` of the first."""
    first = 0
    while first < stop:
        rest, exponential, noise = definition(first)
        last = min(first + max(1, int(rest * min(exponential, 1) * WORDS / 64)), stop)
        yield first, last, rest, exponential, noise
        first = last


@njit
def _minus_log1p(x):
    """-log(1 + x) for |x| up to 1/64, by its series: within 2**-80 of it but for rounding."""
    total = 0.0
    for n in range(len(COEFFICIENTS) - 1, -1, -1):
        total = COEFFICIENTS[n] - total * x
    return -total * x


def make_scan(gumbel: Any, bound_noise: Any, kept: int = 0xFFFFFFFF) -> Callable[..., None]:
    """kept: bits of the upper word that the kernels' map gets."""
    mask = U64(kept)

    @njit
    def scan(first, last, rest, exponential, exponential_low, noise, noise_low, before, words, bounds, numbers):
        """Adds a run of upper words to ``numbers``. What is not a number is no error but a violation."""
        for i in range(last - first):
            words[i] = first + i
        bound_noise(words[: last - first], U64(0), U64(0), bounds[: last - first])
        for i in range(last - first):
            hi = U64(first + i)
            # Increments of the definition's values over those of the first word, without a logarithm.
            more = _minus_log1p(-(i * 2.0**-32) / rest)
            less = _minus_log1p(more / exponential)
            got = gumbel(hi, U64(0), U64(0), U64(0))
            numbers[0] = max(numbers[0], abs((got - noise) - (noise_low + less)))
            numbers[1] = max(numbers[1], abs((got - noise) - (noise_low + less)) / max(1.0, abs(noise + less)))
            numbers[2] += not (math.isfinite(got) and got < before[0])
            before[0] = got
            if math.isfinite(bounds[i]):
                slack = bounds[i] - (4.0 + (noise + less) / math.log(2.0))
                numbers[3] = min(numbers[3], slack)
                numbers[4] = max(numbers[4], slack)
                numbers[5] += slack < 0
            else:
                numbers[5] += not bounds[i] > 0  # NaN or -inf; +inf bounds all
            value, hardware = exponential_float32(hi & mask, U64(0))
            off = abs((value - exponential) - (exponential_low + more))
            numbers[6] = max(numbers[6], off / (exponential + more))
            numbers[7] = max(numbers[7], (off + hardware) / (exponential + more))
            most = math.ldexp(MAX_ULP, math.frexp(exponential + more)[1] - 24)
            numbers[8] += not (math.isfinite(value) and value > 0 and off + hardware <= most)
            numbers[9] = max(numbers[9], abs((-np.log(value) - noise) - (noise_low + less)))
            numbers[10] = max(numbers[10], (before[1] - value) / value)
            before[1] = value

    return scan


def row_of_map(scan: Callable[..., None], stop: int, **more: Any) -> dict[str, Any]:
    numbers = np.zeros(len(NUMBERS))
    numbers[3] = np.inf
    before = np.array([np.inf, 0.0])
    words, bounds = np.empty(WORDS // 64, np.uint32), np.empty(WORDS // 64, np.float32)
    apart = 0.0
    for first, last, rest, exponential, noise in anchors(stop):
        scan(first, last, float(rest), *pair(exponential), *pair(noise), before, words, bounds, numbers)
        later = definition(last - 1)[2] - noise
        step = _minus_log1p(_minus_log1p(-((last - 1 - first) * 2.0**-32) / float(rest)) / float(exponential))
        apart = max(apart, abs(float(later - step)))
    rounded = {key: int(x) if x.is_integer() else float(f"{x:.4g}") for key, x in zip(NUMBERS, numbers, strict=True)}
    return {"upper_words": stop} | more | rounded | {"definition_max_difference": float(f"{apart:.2g}")}


@njit
def words_as_given(index, position, stream, seed):
    """In place of Philox: the upper word is the index, the lower one the position."""
    return index, position


@njit
def words_of_24_bits(index, position, stream, seed):
    return index & U64(0xFFFFFF00), position


def check_map(stop: int) -> Rows:
    gumbel = with_globals(cpu_loops.gumbel, _philox=words_as_given)
    bound = with_globals(cpu_loops._bound_noise, _philox=words_as_given)
    low_bound = with_globals(cpu_loops._bound_noise, _philox=words_as_given, _MARGIN=np.float32(-0.01))
    rough_gumbel = with_globals(cpu_loops.gumbel, _philox=words_of_24_bits)
    few = min(stop, 2**24)

    def good(row: dict[str, Any]) -> bool:
        return (
            row["cpu_max_error_over_max_1_noise"] < 2.0**-51
            and row["cpu_not_finite_or_not_below_the_one_before"] == row["bound_below_noise"] == 0
            and row["kernel_exponential_not_positive_or_beyond_16_ulp"] == 0
            and row["kernel_exponential_max_relative_fall"] <= 2.0**-20
            and row["definition_max_difference"] < 2.0**-55
            and row.get("pairs_max_ulp_apart", 0) <= 2
            and row.get("pairs_cpu_max_error_over_max_1_noise", 0) < 2.0**-51
        )

    row = compare_pairs(gumbel) | row_of_map(make_scan(gumbel, bound), stop)
    yield row, good(row)
    for planted, scan in (
        ("24 bits in the kernels' map", make_scan(gumbel, bound, 0xFFFFFF00)),
        ("a margin of -0.01 bits", make_scan(gumbel, low_bound)),
        ("24 bits in the cpu path", make_scan(rough_gumbel, bound)),
    ):
        row = row_of_map(scan, few, planted=planted)
        yield row, not good(row)


# --- streams

CHUNK = 2**17  # words of 64 bits
VOCABULARY = 151936
Order = Callable[[int], tuple[Any, Any, Any, Any]]  # of a chunk from its number: index, position, stream, seed


def numbers_of(chunk: int) -> np.ndarray:
    return np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=U64)


def requests(chunk: int) -> tuple[Any, Any, Any, Any]:
    """The 16 tokens of a group at 16 positions, for request after request."""
    place = np.arange(CHUNK) % 256
    return place % 16 + 4096, place // 16 + 7, TOKEN, np.repeat(seeds_of(CHUNK // 256, chunk), 256)


def steps(chunk: int) -> tuple[Any, Any, Any, Any]:
    """The words of one request: all groups and the tokens of one group, position after position."""
    groups = VOCABULARY // 16
    position, place = np.divmod(numbers_of(chunk), U64(groups + 16))
    in_group = place >= groups
    return np.where(in_group, place - U64(groups), place), position, np.where(in_group, TOKEN, GROUP), 42


ORDERS: dict[str, Order] = {
    "groups": lambda chunk: (numbers_of(chunk), 7, GROUP, 42),
    "positions": lambda chunk: (5, numbers_of(chunk), GROUP, 42),
    "seeds": lambda chunk: (5, 7, GROUP, numbers_of(chunk)),
    "requests": requests,
    "token and group": lambda chunk: (numbers_of(chunk) // U64(2), 7, np.resize((TOKEN, GROUP), CHUNK), 42),
    "steps": steps,
}
LIBRARY, PROGRAM = "libtestu01.so.0", {"program": "TestU01"}
NUMBERS_OF_CHUNK = 2 * CHUNK  # of 32 bits: the upper word, then the lower


@njit
def reversed_bits(number):
    """The bits of a 32-bit number in reverse order."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        number = (number >> U64(shift)) & U64(mask) | (number & U64(mask)) << U64(shift)
    return number


@functools.cache
def drawer(philox: Words, reverse: bool) -> Callable[..., None]:
    """A loop over ``_philox`` of the cpu path, or another in its place."""

    @njit
    def draw(index, position, stream, seed, out):
        for i in range(len(out)):
            for half, number in enumerate(philox(index[i], position[i], stream[i], seed[i])):
                out[i, half] = reversed_bits(number) if reverse else number

    return draw


class Generator(ctypes.Structure):
    """``unif01_Gen``: the numbers of an order. TestU01 calls compiled functions, and those Python for a new chunk."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("param", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("uniform", ctypes.c_void_p),
        ("bits", ctypes.c_void_p),
        ("write", ctypes.c_void_p),
    )

    def __init__(self, order: Order, philox: Words = cpu_loops._philox, reverse: bool = False) -> None:
        numbers, place = np.empty((CHUNK, 2), np.uint32), np.zeros(1, np.int64)
        draw, self.chunks = drawer(philox, reverse), 0

        @ctypes.CFUNCTYPE(None)
        def refill() -> None:
            try:
                draw(*(np.broadcast_to(np.asarray(part).astype(U64), CHUNK) for part in order(self.chunks)), numbers)
                self.chunks += 1
            except BaseException:  # KeyboardInterrupt too: TestU01 would go on with the old numbers
                traceback.print_exc()
                os._exit(1)

        @njit
        def following(param, state):
            numbers, place = carray(param, NUMBERS_OF_CHUNK, np.uint32), carray(state, 1, np.int64)
            at = place[0]
            if at == 0:
                refill()
            place[0] = (at + 1) % NUMBERS_OF_CHUNK
            return numbers[at]

        bits = cfunc("ulong(voidptr, voidptr)")(following)
        uniform = cfunc("double(voidptr, voidptr)")(lambda param, state: following(param, state) * 2.0**-32)
        self.alive = numbers, place, refill, bits, uniform  # what the addresses are of
        super().__init__(place.ctypes.data, numbers.ctypes.data, b"", uniform.address, bits.address)


def verdict(p: float) -> str | None:
    tail = min(p, 1 - p)
    return "FAILED" if tail < 1e-10 else "suspect" if tail < 1e-3 else None


def load_library() -> ctypes.CDLL | str:
    """TestU01, or why it is not there."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        return reason_of(error)


def run_battery(library: ctypes.CDLL, battery: str, order: str, generator: Generator) -> dict[str, Any]:
    ctypes.c_int.in_dll(library, "swrite_Basic").value = 0
    getattr(library, f"bbattery_{battery}")(ctypes.byref(generator))
    count = ctypes.c_int.in_dll(library, "bbattery_NTests").value
    names = (ctypes.c_char_p * count).in_dll(library, "bbattery_TestNames")
    values = (ctypes.c_double * count).in_dll(library, "bbattery_pVal")
    tested = [(name.decode(), p) for name, p in zip(names, values, strict=True) if p >= 0]  # -1: not tested
    unusual = [{"test": name, "p": p, "verdict": verdict(p)} for name, p in tested if verdict(p)]
    row = PROGRAM | {"version": version_of(LIBRARY), "battery": battery, "order": order}
    return row | {"numbers": generator.chunks * NUMBERS_OF_CHUNK, "p_values": len(tested), "not_normal": unusual}


def version_of(library: str) -> str:
    """The version of a loaded library, from its file: no function tells it."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    file = next(line.split()[-1] for line in maps if library in line)
    match = re.search(rb"TestU01 ([\d.]+)", Path(file).read_bytes())
    return match[1].decode() if match else "unknown"


def check_streams() -> Rows:
    if isinstance(library := load_library(), str):
        yield PROGRAM | {"reason": library}, True
        return
    # Without its multiplications, Philox moves bits and mixes none.
    planted = with_globals(cpu_loops._philox, _M0=U64(1), _M1=U64(1))
    generator = Generator(ORDERS["positions"], planted)
    row = run_battery(library, "SmallCrush", "positions", generator) | {"planted": "no multiplications"}
    yield row, any(one["verdict"] == "FAILED" for one in row["not_normal"])
    for order in ORDERS:
        for reverse in (False, True):
            yield from check_order(library, "SmallCrush", order, reverse)


def check_crush(order: str) -> Rows:
    if isinstance(library := load_library(), str):
        yield PROGRAM | {"reason": library}, True
        return
    yield from check_order(library, "Crush", order)


def check_order(library: ctypes.CDLL, battery: str, order: str, reverse: bool = False) -> Rows:
    row = run_battery(library, battery, order, Generator(ORDERS[order], reverse=reverse))
    row |= {"bits": "reversed" if reverse else "as drawn"}
    yield row, row["p_values"] > 0 and not any(one["verdict"] == "FAILED" for one in row["not_normal"])


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--words", type=int, default=WORDS, help="upper words of the map (default: all)")
    parser.add_argument("--crush", nargs="+", choices=ORDERS, default=[], help="orders that Crush tests too")
    parser.add_argument("--keep", action="store_true", help="keep the file's sections that are not run now")
    options = parser.parse_args()
    env = new_env() | {"processor": platform.processor() or platform.machine(), "numba": numba.__version__}
    keep = options.keep and options.out.exists()
    sections: dict[str, Any] = {}

    def write() -> None:
        # Others as the file has them now: another call may have added to it.
        others = read_result(options.out, "noise.py")["sections"] if keep else {}
        write_result(options.out, {"env": env, "sections": others | sections})

    checks = {name: functools.partial(SECTIONS[name], options) for name in options.only}
    checks |= {f"crush {order}": functools.partial(check_crush, order) for order in options.crush}
    for name, check in checks.items():
        began = time.monotonic()
        rows: list[dict[str, Any]] = []
        wrong: list[str] = []
        for row, good in check():
            print(row, flush=True)
            rows.append(row)
            wrong += [] if good else [f"{name}: {row}"]
            about = {"date": today(), "command": command_line(), "seconds": round(time.monotonic() - began)}
            sections[name] = about | {"unfinished": True, "wrong": wrong, "rows": rows}
            write()
        del sections[name]["unfinished"]
        write()
        print(f"{name}: {sections[name]['seconds']} s", *wrong, sep="\n", flush=True)
    return int(any(section["wrong"] for section in sections.values()))


SECTIONS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "collisions": lambda options: check_collisions(),
    "map": lambda options: check_map(options.words),
    "streams": lambda options: check_streams(),
}


if __name__ == "__main__":
    sys.exit(main())
