"""Support of the kernel tests: batches whose arithmetic is exact, the three paths behind one function, and the expected
token of each row."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig, TileConfig, TruncationConfig
from sgl_flashsample.kernels.int8_head import Int8Head
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample, num_splits
from sgl_flashsample.kernels.params import (
    LARGEST_LOGIT,
    BatchParams,
    Edit,
    LMHead,
    LogitEdits,
    LogitsSpec,
    Truncation,
)
from sgl_flashsample.kernels.reference import (
    Reference,
    dequantize_ref,
    edit_logits_ref,
    logits_ref,
    sample_ref,
    token_scores_ref,
    truncated_sample_ref,
)
from sgl_flashsample.kernels.sample_logits import num_read_splits, sample_logits
from sgl_flashsample.kernels.screened_sample import screened_sample
from sgl_flashsample.kernels.workspace import ScreenWorkspace, Workspace

CUDA = torch.cuda.is_available()
PATHS = ("fused", "logits", "screened")
KINDS = ("plain", "greedy", "edit", "truncate", "edit+truncate")
# Random123's kat_vectors for philox4x32-10: counter, key, answer.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
# Triton's own interpreter multiplies the bits of bfloat16 (``interpreter_bf16.py``): float16 stands in there.
UNPATCHED = os.environ.get("UNPATCHED_INTERPRETER") == "1"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.float16 if UNPATCHED else torch.bfloat16}
Config = TileConfig | ReadConfig | ScreenConfig


def numbers(*values: float) -> tuple[float, ...]:
    """Numbers that tests draw with, one after the other. Under Triton's own interpreter the first alone: a kernel takes
    the same operations with each."""
    return values[:1] if UNPATCHED else values


# Interpreted, a program costs milliseconds: large tiles, few of them; several splits, so that they are joined.
if CUDA:
    TILE = TileConfig(16, 128, 64, 4, 3)
    READ = ReadConfig(1, 512, 1, stages=2)
    SCREEN = ScreenConfig(16, 128, 128, 4, 3)
    TRUNCATION = TruncationConfig()
else:
    TILE = TileConfig(16, 512, 64, 4, 1, ctas_per_sm=6, tma=False, reduce_rows=64)
    READ = ReadConfig(16, 512, 4, ctas_per_sm=6, reduce_rows=64)
    SCREEN = ScreenConfig(16, 1024, 64, 4, 1, ctas_per_sm=3, tma=False, chunk=100, rescore_d=64)
    TRUNCATION = TruncationConfig(2, 4, 2**16, search_splits=2, search_warps=4, window=2, gather=64)
LISTED = dataclasses.replace(SCREEN, listed=True, early=True, rescore_v=32)


def config_of(path: str, vocab: int) -> Config:
    """The configuration that tests draw with when they ask for none."""
    config: Config = {"fused": TILE, "logits": READ, "screened": SCREEN}[path]
    if CUDA or vocab < 10_000:
        return config
    config = dataclasses.replace(config, block_v=2**15)
    if isinstance(config, ScreenConfig):
        return dataclasses.replace(config, chunk=4096, rescore_v=256, rescore_d=32, block_d=32)
    return dataclasses.replace(config, block_d=32) if isinstance(config, TileConfig) else config


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch. raw: ``[B, rows of the weight]``, a GEMM's output for the logits path, with gaps between its rows,
    which are not aligned. edited: ``[B, V]`` float64, the exact logits after the edits."""

    hidden: torch.Tensor
    head: LMHead
    params: BatchParams

    @functools.cached_property
    def raw(self) -> torch.Tensor:
        dots = self.hidden.double() @ dequantize_ref(self.head.weight, self.head.scale).T
        dtype = self.head.hidden_dtype if self.head.gemm_gives_logits else torch.float32
        rows = torch.full((len(dots), dots.shape[1] + 3), float("nan"), dtype=dtype, device=dots.device)
        rows[:, : dots.shape[1]] = dots
        return rows[:, : dots.shape[1]]

    @functools.cached_property
    def edited(self) -> torch.Tensor:
        head = self.head
        logits = logits_ref(
            self.hidden,
            head.weight[: head.vocab_size],
            scale=None if head.scale is None else head.scale[: head.vocab_size],
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            logits_dtype=head.rounding,
        )
        return logits if self.params.edits is None else edited_ref(logits, self.params.edits, head.vocab_start)

    @property
    def softcap_error(self) -> float:
        """The largest error of a float32 soft cap."""
        return 0.0 if self.head.softcap is None else self.head.softcap * 2.0**-20

    @property
    def limited(self) -> torch.Tensor:
        """``[B]`` bool: sampled rows that a truncation limits."""
        return limited_rows(self.params, self.head.vocab_size)

    def with_params(self, **changes) -> Case:
        return dataclasses.replace(self, params=dataclasses.replace(self.params, **changes))

    def rows(self, index: torch.Tensor) -> Case:
        """The batch of these rows, in this order."""
        return Case(self.hidden[index].contiguous(), self.head, take(self.params, index))


def limited_rows(params: BatchParams, vocab: int) -> torch.Tensor:
    if params.truncation is None:
        return torch.zeros_like(params.temperature, dtype=torch.bool)
    limits = params.truncation
    use_k = (limits.top_k >= 1) & (limits.top_k < vocab)
    return (use_k | (limits.top_p < 1) | (limits.min_p > 0)) & (params.temperature > 0)


def take(params: BatchParams, index: torch.Tensor) -> BatchParams:
    def rows_of(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        taken = {name: field[index].contiguous() for name, field in fields.items() if isinstance(field, torch.Tensor)}
        return dataclasses.replace(value, **taken)

    truncation, edits = (None if value is None else rows_of(value) for value in (params.truncation, params.edits))
    return dataclasses.replace(rows_of(params), truncation=truncation, edits=edits)


# --- making batches -------------------------------------------------------------------------------------------------


def make_case(
    num_rows: int,
    vocab: int,
    device: torch.device,
    kind: str = "plain",
    dtype: torch.dtype = torch.float16,
    *,
    hidden: int = 32,
    seed: int = 0,
    padding: int = 0,
    **head_options,
) -> Case:
    """A batch of this kind. Its dot products are exact in every order of summation and in every dtype. Logits have a
    deviation of about 2.5, with ties in 2-byte dtypes. padding: rows behind the
    vocabulary whose logits would win. dtype: the weight's; rows of a float8_e4m3fn one have scales of three bits, and
    hidden states are bfloat16 unless ``hidden_dtype`` says otherwise."""
    g = torch.Generator().manual_seed(seed + vocab)
    steps = {torch.float32: 256, torch.float16: 32, torch.bfloat16: 4, torch.float8_e4m3fn: 16}[dtype]
    states = torch.randint(-2, 3, (num_rows, hidden), generator=g).float()
    most = max(1, round(0.55 * steps))
    weight = torch.randint(-most, most + 1, (vocab + padding, hidden), generator=g) / steps
    weight[vocab:] *= 8
    if dtype is torch.float8_e4m3fn:
        scale = torch.randint(4, 8, (vocab + padding,), generator=g) / 256
        weight, head_options["scale"] = weight * 64, scale.to(device)
    head = LMHead(weight.to(dtype).to(device), vocab_size=vocab, **head_options)
    params = make_params(num_rows, head.spec, device, kind, seed)
    return Case(states.to(head.hidden_dtype).to(device), head, params)


def rounding_case(num_rows: int, vocab: int, device: torch.device, dtype: torch.dtype, hidden: int = 80) -> Case:
    """Gaussian hidden states and weights. Sums are rounded, and the result depends on their order."""
    g = torch.Generator().manual_seed(vocab)
    states = torch.randn(num_rows, hidden, generator=g).to(dtype).to(device)
    weight = (torch.randn(vocab, hidden, generator=g) * 3 / hidden**0.5).to(dtype).to(device)
    head = LMHead(weight)
    return Case(states, head, make_params(num_rows, head.spec, device))


def spelled_out(
    values: list[float],
    num_rows: int,
    device: torch.device,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """The same logits in every row; ``dtype`` must represent them exactly. Rows differ only in their position."""
    weight = torch.zeros(len(values), 16, device=device, dtype=dtype)
    weight[:, 0] = torch.tensor(values, device=device)
    hidden = torch.zeros(num_rows, 16, device=device, dtype=dtype)
    hidden[:, 0] = 1.0
    params = BatchParams(
        torch.full((num_rows,), temperature, device=device),
        torch.full((num_rows,), 3, device=device),
        torch.arange(num_rows, device=device),
    )
    return Case(hidden, LMHead(weight), params)


def ties_apart(num_rows: int, device: torch.device) -> tuple[Case, torch.Tensor]:
    """A batch whose largest logits are 200 equal ones, each in another block of 8 groups, and in another of the sets of
    groups that lie 256 apart; and their ids."""
    values = torch.zeros(200 * 128)
    tied = torch.arange(200) * 128 + torch.arange(200) // 32 * 16 + 5
    values[tied] = 4.0
    return spelled_out(values.tolist(), num_rows, device), tied.to(device)


# Down to the smallest. At the last two, the score of a logit of 40 is a float32 without digits for the noise.
TEMPERATURES = [1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-5, 1e-6]


def peaked(device: torch.device, dtype: torch.dtype = torch.float32, num_rows: int = 64) -> Case:
    """Rows with eight logits of 20 to 40, a temperature apart, in one half of the ids, among logits of a deviation
    of 3. The ``TEMPERATURES`` in turn."""
    g = torch.Generator().manual_seed(0)
    temperature = torch.tensor(TEMPERATURES).repeat(num_rows // len(TEMPERATURES))
    logits = torch.randn(num_rows, 1024, generator=g) * 3
    places = torch.stack([torch.randperm(512, generator=g)[:8] for _ in range(num_rows)])
    largest = 27 + 13 * torch.rand(num_rows, 1, generator=g)
    logits.scatter_(1, places, largest - temperature[:, None] * torch.arange(8))
    row = torch.arange(num_rows, device=device)
    hidden = torch.eye(num_rows, dtype=dtype, device=device)
    params = BatchParams(temperature.to(device), row, row)
    return Case(hidden, LMHead(logits.T.to(device, dtype).contiguous()), params)


@functools.cache
def draws_of_the_fourth(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Rows of logits at the ``TEMPERATURES`` whose noise draws the fourth-largest, their temperatures, their seeds
    (positions are equal to these), and these ids."""
    g = torch.Generator().manual_seed(1)
    tries, vocab = 400, 512
    found = []
    for temperature in TEMPERATURES:
        logits = torch.full((tries, vocab), -5.0)
        places = torch.stack([torch.randperm(vocab // 16, generator=g)[:8] * 16 for _ in range(tries)])
        steps = 25 + 15 * torch.rand(tries, 1, generator=g) - 0.5 * temperature * torch.arange(8)
        logits = logits.scatter_(1, places, steps).to(device)
        values = torch.tensor([temperature]).expand(tries).to(device)
        row = torch.arange(tries, device=device)
        # A step of less than a float32 has digits for would make ties: the rows that have them are left out.
        apart = (logits.sort(1, descending=True).values[:, :8].diff(dim=1) < 0).all(1)
        fourth = places[:, 3].to(device)
        drawn = token_scores_ref(logits.double(), values, row, row).argmax(1)
        picked = ((drawn == fourth) & apart).nonzero()[:2, 0]
        found.append([tensor[picked] for tensor in (logits, values, row, fourth)])
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def near_a_limit_of_top_p(device: torch.device, top_k: int, share: float) -> tuple[Case, torch.Tensor]:
    """The ``draws_of_the_fourth``, and their ids. Top-p is ``1 + share`` times the mass of the three logits above: the
    fourth is allowed where ``share`` is above 0."""
    rows, temperature, seed, fourth = draws_of_the_fourth(device)
    weights = torch.softmax(rows.double() / temperature.double()[:, None], 1).sort(1, descending=True).values
    limit = (weights[:, :3].sum(1) * (1 + share)).float()
    truncation = limits(len(rows), device, top_k, max_top_k=top_k or None)
    truncation = dataclasses.replace(truncation, top_p=limit)
    hidden = torch.eye(len(rows), max(16, len(rows)), device=device)
    weight = torch.nn.functional.pad(rows.T, (0, hidden.shape[1] - len(rows))).contiguous()
    return Case(hidden, LMHead(weight), BatchParams(temperature, seed, seed, truncation)), fourth


def huge_biases_and_a_mask(device: torch.device, temperature: float) -> tuple[Case, int]:
    """Row by row one id is allowed, with a huge bias on it, and every other id has the opposite bias. And that id."""
    huge = [-3e38, -1e31, -1e29, -100.0, 1e31, 3e38]
    case = spelled_out([0.25 * (i % 7) for i in range(300)], len(huge), device, temperature)
    allowed = torch.zeros(len(huge), 300, dtype=torch.bool, device=device)
    allowed[:, 170] = True
    bias = torch.tensor(huge, device=device)[:, None] * torch.where(allowed, 1.0, -1.0)
    return case.with_params(edits=LogitEdits(mask=pack_bits(allowed), bias=bias)), 170


def two_huge_biases(device: torch.device, temperature: float) -> tuple[Case, int]:
    """Rows with two huge biases, in one group and in two, in either order, beside every other id with the smaller of
    them and 0. And the id of the larger one."""
    pairs = [(1e6, 2e6), (1e20, 2e20), (1e31, 1e32), (1e37, 3e38), (6e37, 6.1e37)]
    pairs += [(-2e20, -1e20), (-2e31, -1.5e31), (-3e38, -1e38), (-3e38, -2.9e38)]
    places = [33, 17, 200]
    case = spelled_out([0.0] * 300, len(places) * len(pairs), device, temperature)
    bias = torch.zeros(len(places) * len(pairs), 300, device=device)
    for row, (place, (low, high)) in enumerate(itertools.product(places, pairs)):
        bias[row] = min(low, 0.0)
        bias[row, place], bias[row, 35] = low, high
    return case.with_params(edits=LogitEdits(bias=bias)), 35


CAPS = [0.5, 5.0, 30.0, 50.0, 1000.0, 1e4, 1e6]


def near_pairs(cap: float, device: torch.device) -> Case:
    """Greedy rows of two logits up to a soft cap, the larger one second: a share of 1e-5 apart, or 1e-5 to 1e-4. Those
    of a narrow cap, whose errors are shares of the cap, are 5 % of it at least: smaller ones may come out equal."""
    size = torch.cat(
        [torch.linspace(0.05 if cap <= 32 else 0.01, 1.0, 25) * cap, torch.tensor([0.2499, 0.25, 0.2501]) * cap]
    )
    some = torch.linspace(0.5, min(cap, 6.0), 10)
    low = torch.cat([size, some, some, some])
    high = torch.cat([size * (1 + 1e-5), some + 1e-5, some + 3e-5, some + 1e-4])
    rows = torch.cat([torch.stack([low, high], 1), torch.stack([-high, -low], 1)]).to(device)
    row = torch.arange(len(rows), device=device)
    hidden = torch.eye(len(rows), device=device)
    head = LMHead(rows.T.contiguous(), softcap=cap)
    return Case(hidden, head, BatchParams(torch.zeros(len(rows), device=device), row, row))


def make_params(num_rows: int, spec: LogitsSpec, device: torch.device, kind: str = "plain", seed: int = 0):
    """Temperatures from 0.3 to 2, every fifth row greedy but not the first, seeds and positions of every size."""
    g = torch.Generator().manual_seed(seed)
    temperature = 0.3 + 1.7 * torch.rand(num_rows, generator=g)
    temperature[4::5] = 0.0
    if kind == "greedy":
        temperature.zero_()
    return BatchParams(
        temperature.to(device),
        torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=g).to(device),
        torch.randint(0, 2**40, (num_rows,), generator=g).to(device),
        truncation=mixed_limits(num_rows, spec.vocab_size, device) if "truncate" in kind else None,
        edits=mixed_edits(num_rows, spec.vocab_end, device) if "edit" in kind else None,
        all_greedy=kind == "greedy",
    )


def mixed_limits(num_rows: int, vocab: int, device: torch.device) -> Truncation:
    """Every combination of top-k (small and large), top-p and min-p in turn, and none, in all the spellings of off."""
    g = torch.Generator().manual_seed(num_rows * 7 + vocab)
    row = torch.arange(num_rows)
    combination = (row + 3) % 8  # top-k and top-p first
    off = torch.tensor([0, -1, vocab, 2**30])[row // 8 % 4]
    small = torch.randint(1, max(2, min(vocab, 40)), (num_rows,), generator=g)
    large = torch.randint(65, 300, (num_rows,), generator=g).clamp(max=max(1, vocab - 1))
    top_k = torch.where(combination & 1 > 0, torch.where(row % 3 == 1, large, small), off)
    top_p = torch.where(combination & 2 > 0, 0.05 + 0.93 * torch.rand(num_rows, generator=g), 1.0)
    min_p = torch.where(combination & 4 > 0, 0.01 + 0.5 * torch.rand(num_rows, generator=g), 0.0)
    return Truncation(top_k.int().to(device), top_p.to(device), min_p.to(device))


def limits(
    num_rows: int, device: torch.device, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, **options
) -> Truncation:
    """The same limits for every row."""
    return Truncation(
        torch.full((num_rows,), top_k, dtype=torch.int32, device=device),
        torch.full((num_rows,), top_p, device=device),
        torch.full((num_rows,), min_p, device=device),
        **options,
    )


def limits_by_row(each: list[dict], device: torch.device) -> Truncation:
    """One row per entry, with its limits."""
    rows = [limits(1, device, **limit) for limit in each]
    return Truncation(*(torch.cat([getattr(row, name) for row in rows]) for name in ("top_k", "top_p", "min_p")))


def mixed_edits(
    num_rows: int, width: int, device: torch.device, *, bool_mask: bool = False, seed: int = 0
) -> LogitEdits:
    """Every combination of edits in turn, all of them in row 0. In eighths, so that only a scaling rounds."""
    g = torch.Generator().manual_seed(num_rows + width + seed)
    shape = (num_rows, width)
    additive = torch.where(torch.rand(shape, generator=g) < 0.3, -torch.randint(0, 24, shape, generator=g) / 8, 0.0)
    additive[torch.rand(shape, generator=g) < 0.05] = float("-inf")
    scaling = torch.where(torch.rand(shape, generator=g) < 0.3, torch.randint(9, 16, shape, generator=g) / 8, 1.0)
    bias = torch.where(torch.rand(shape, generator=g) < 0.2, torch.randint(-40, 40, shape, generator=g) / 8, 0.0)
    allowed = torch.rand(shape, generator=g) < 0.6
    flags = (15 - torch.arange(num_rows) % 16).int()
    mask = ~allowed if bool_mask else pack_bits(allowed)
    return LogitEdits(*(tensor.to(device) for tensor in (additive, scaling, mask, bias, flags)))


def pack_bits(allowed: torch.Tensor) -> torch.Tensor:
    """``[B, V]`` bool to a grammar's words: bit i % 32 of word i // 32 is set where token i is allowed."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32))
    words = (
        padded.view(len(allowed), padded.shape[1] // 32, 32).long() << torch.arange(32, device=allowed.device)
    ).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


# --- rows of logits with every feature ------------------------------------------------------------------------------

HOSTILE = (math.nan, math.inf, -math.inf, 3e38, -3e38)
HOSTILE_BIASES = (0.0, 0.0, 0.0, -1.5, 2.0, 1e31, -1e31, 3e38, -3e38, math.inf, -math.inf, math.nan)
HOSTILE_TEMPERATURES = (0.0, 1e-30, 1e-6, 1e-3, 0.7, 1.0, 30.0, 1e30, 3e38, math.inf, math.nan)


def with_holes(noise: torch.Tensor) -> torch.Tensor:
    """Logits of which four in ten are -inf; the first id has none."""
    kept = noise.roll(1, 1) > -0.25
    kept[:, 0] = True
    return torch.where(kept, 2 * noise, -math.inf)


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of logits, from Gaussian noise
    "normal": lambda noise: 3 * noise,
    "rounded": lambda noise: (3 * noise).round(),
    "peaked": lambda noise: 5 * noise,
    "flat": lambda noise: 0.05 * noise,
    "ties": lambda noise: noise.round(),
    "holes": with_holes,
    "zipf": lambda noise: -1.2 * (1.0 + noise.argsort(1).float()).log(),
}


@dataclasses.dataclass(frozen=True)
class Mix:
    """The features of ``random_rows``. Each feature is on or off at random in each row, so that all pairs occur.

    most_ids, least_ids: bounds of the number of ids, which is uniform in the logarithm. shapes: of a row's logits, keys
    of ``SHAPES``. dtypes: of logits, batch by batch. greedy, masked, edited (each kind of penalties, and the bias):
    shares of rows. limited: every row has a top-k, a top-p or a min-p. temperatures: the usual, 0.3 to 2; or their
    powers of ten. hostile: NaN, infinities and huge numbers among logits, biases and temperatures; a row may be without
    an allowed id.
    """

    most_ids: int = 2000
    shapes: tuple[str, ...] = ("normal", "normal", "normal", "normal", "rounded")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    greedy: float = 0.125
    masked: float = 0.5
    edited: float = 0.5
    limited: bool = False
    powers: tuple[float, float] | None = None
    hostile: bool = False
    least_ids: int = 1


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of logits, ``[B, V]`` in any dtype, and what they ask for. allowed: ``[B, V]`` bool, what the mask says."""

    logits: torch.Tensor
    params: BatchParams
    allowed: torch.Tensor

    @functools.cached_property
    def edited(self) -> torch.Tensor:
        """``[B, V]`` float64 after the edits, as kernels take hostile logits: forbidden, or the largest."""
        logits = bounded(self.logits.float())
        return logits.double() if self.params.edits is None else bounded(edited_ref(logits, self.params.edits))

    @property
    def may(self) -> torch.Tensor:
        """``[B, V]`` bool: ids that neither the mask, nor a logit or a bias of -inf or NaN forbids."""
        bias = None if self.params.edits is None else self.params.edits.bias
        return self.allowed & (self.logits > -math.inf) & (True if bias is None else bias > -math.inf)

    @property
    def finite(self) -> Rows:
        """The rows of a head's products, which are finite: 3e38 for infinity, -3e38 for -inf and NaN."""
        return dataclasses.replace(self, logits=self.logits.nan_to_num(nan=-3e38, posinf=3e38, neginf=-3e38))

    def case(self, times: int = 1) -> Case:
        """The batch of float32 rows, each ``times`` times in a row, with a head whose products are the ``finite``
        logits, bit for bit: products of an element 1.0 and its column of the head, and of zeros."""
        hidden = torch.eye(len(self.logits), dtype=self.logits.dtype, device=self.logits.device)
        head = LMHead(self.finite.logits.T.contiguous())
        return Case(hidden.repeat_interleave(times, 0), head, self.params.repeated(times))

    def quantised(self) -> tuple[Rows, Case]:
        """The rows with the nearest logits that weights in float8_e4m3fn stand for, each id with a scale of its own,
        and the batch with that head."""
        finite = self.finite.logits.float().T.contiguous()
        scale = finite.abs().amax(1).clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
        weight = (finite / scale[:, None]).to(torch.float8_e4m3fn)
        rows = dataclasses.replace(self, logits=(weight.float() * scale[:, None]).T.contiguous())
        hidden = torch.eye(len(self.logits), dtype=torch.bfloat16, device=self.logits.device)
        return rows, Case(hidden, LMHead(weight, scale=scale, logits_dtype=torch.float32), self.params)


def random_rows(mix: Mix, index: int, num_rows: int, device: torch.device) -> Rows:
    """The batch with this number: the same for the same number and kind of device."""
    on: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(index), "device": device}
    vocab = int(math.exp(random.Random(index).uniform(math.log(mix.least_ids), math.log(mix.most_ids))))
    vocab = max(vocab, mix.least_ids)  # of an exponential that is rounded down

    def some(share: float, *shape: int) -> torch.Tensor:
        return torch.rand(*(shape or (num_rows,)), **on) < share

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*(shape or (num_rows,)), **on)

    def one_of(values: Sequence[float], *shape: int) -> torch.Tensor:
        return torch.tensor(values, device=device)[torch.randint(len(values), shape or (num_rows,), **on)]

    noise, shape = torch.randn(num_rows, vocab, **on), torch.randint(len(mix.shapes), (num_rows,), **on)
    logits = torch.empty_like(noise)
    for place, name in enumerate(mix.shapes):
        logits[shape == place] = SHAPES[name](noise[shape == place])
    temperature = uniform(0.3, 2.0) if mix.powers is None else 10 ** uniform(*mix.powers)
    temperature = torch.where(some(mix.greedy), 0.0, temperature)
    k, p, m = (some(0.5) for _ in range(3))
    if mix.limited:
        k |= ~(p | m)
    truncation = Truncation(
        torch.where(k, torch.randint(1, max(2, min(vocab, 200)), (num_rows,), **on), 0).int(),
        torch.where(p, uniform(0.05, 0.99), 1.0),
        torch.where(m, 10 ** uniform(-3.0, -0.1), 0.0),
    )
    allowed = some(0.6, num_rows, vocab) | ~some(mix.masked)[:, None]
    edits = LogitEdits()
    if mix.edited:
        edits = LogitEdits(
            additive=some(mix.edited)[:, None] * uniform(-2, 0, num_rows, vocab),
            scaling=torch.where(some(mix.edited)[:, None], uniform(1, 1.5, num_rows, vocab), 1.0),
            bias=some(mix.edited)[:, None] * torch.randn(num_rows, vocab, **on),
        )
    if mix.hostile:
        broken = some(0.2)[:, None] & some(0.1, num_rows, vocab)
        logits = torch.where(broken, one_of(HOSTILE, num_rows, vocab), logits)
        temperature = torch.where(some(0.5), one_of(HOSTILE_TEMPERATURES), temperature)
        edits = dataclasses.replace(
            edits, bias=torch.where(some(0.8)[:, None], one_of(HOSTILE_BIASES, num_rows, vocab), 0.0)
        )
    else:
        allowed[:, 0] = True
    params = BatchParams(
        temperature,
        torch.randint(-(2**63), 2**63 - 1, (num_rows,), **on),
        torch.randint(0, 2**40, (num_rows,), **on),
        truncation,
        dataclasses.replace(edits, mask=pack_bits(allowed)),
    )
    return Rows(logits.to(mix.dtypes[index % len(mix.dtypes)]), params, allowed)


def bounded(logits: torch.Tensor) -> torch.Tensor:
    """Logits as kernels take them: NaN and -inf forbid an id, others are ``LARGEST_LOGIT`` at most."""
    return torch.where(logits > -math.inf, logits.clamp(max=LARGEST_LOGIT), -math.inf)


# --- the expected tokens ---------------------------------------------------------------------------------------------


def edited_ref(logits: torch.Tensor, edits: LogitEdits, vocab_start: int = 0) -> torch.Tensor:
    """The reference's ``[B, V]`` float64 logits after each row's own edits."""
    columns = slice(vocab_start, vocab_start + logits.shape[1])
    flags = torch.full((len(logits),), 15, device=logits.device) if edits.rows is None else edits.rows

    def applied(flag: Edit, tensor: torch.Tensor | None, nothing: float | bool) -> torch.Tensor | None:
        if tensor is None:
            return None
        return torch.where((flags & flag != 0)[:, None], tensor[:, columns], nothing)

    allowed = None
    if edits.mask is not None and edits.mask.dtype is torch.bool:
        allowed = ~edits.mask
    elif edits.mask is not None:
        ids = torch.arange(columns.stop, device=logits.device)
        words = torch.nn.functional.pad(edits.mask, (0, 1), value=-1)
        word = words[:, (ids // 32).clamp(max=words.shape[1] - 1)]
        allowed = (word >> (ids % 32)) & 1 != 0
    return edit_logits_ref(
        logits,
        additive=applied(Edit.ADDITIVE, edits.additive, 0.0),
        scaling=applied(Edit.SCALING, edits.scaling, 1.0),
        allowed=applied(Edit.MASK, allowed, True),
        bias=applied(Edit.BIAS, edits.bias, 0.0),
    ).double()


def assert_soft_capped(case: Case, drawn: Drawn) -> None:
    """The second logit of each of the ``near_pairs`` wins, with the score that float64 gives it."""
    cap = case.head.softcap
    want = cap * torch.tanh(case.head.weight[1].double() / cap)
    bound = 2.0**-21 * torch.clamp(4 * want.abs(), 32.0, max(cap, 32.0)).clamp(max=cap)
    assert (drawn.token_ids == 1).all()
    assert ((drawn.scores.double() - want).abs() <= bound).all()


def expected(case: Case) -> Reference:
    """The reference from exact logits: ``sample_ref`` for rows without limits, ``truncated_sample_ref`` for the others.
    A row without an allowed token gets the first id, and is no near-tie."""
    return reference(case.edited, case.params, case.head.vocab_start, case.softcap_error)


def reference(logits: torch.Tensor, params: BatchParams, vocab_start: int = 0, error: float = 0.0) -> Reference:
    """error: the largest error of each of the ``[B, V]`` logits."""
    values = (params.temperature, params.seed, params.position)
    want = sample_ref(logits, logits - error, logits + error, *values, vocab_start=vocab_start)
    limited = limited_rows(params, logits.shape[1])
    if limited.any():
        index = limited.nonzero()[:, 0]
        some, truncation = take(params, index), params.truncation
        drawn = truncated_sample_ref(
            logits[index],
            some.temperature,
            some.seed,
            some.position,
            *(tensor[index] for tensor in (truncation.top_k, truncation.top_p, truncation.min_p)),
        )
        fields = (f.name for f in dataclasses.fields(Reference))
        want = Reference(*(getattr(want, name).index_copy(0, index, getattr(drawn, name)) for name in fields))
    empty = ~(logits > float("-inf")).any(1)
    return dataclasses.replace(want, token=torch.where(empty, vocab_start, want.token), near_tie=want.near_tie & ~empty)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The results of one call. status: per row 0 without a truncation, 1 answered in one pass, more after a search;
    None for a batch without a truncation."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None
    scores: torch.Tensor
    log_mass: torch.Tensor | None
    status: torch.Tensor | None
    workspace: Workspace
    screen: ScreenWorkspace | None = None


def draw(
    path: str,
    case: Case,
    config: Config | None = None,
    *,
    logprobs: bool | None = None,
    workspace: Workspace | None = None,
    int8_head: Int8Head | None = None,
    screen: ScreenWorkspace | None = None,
    truncation_config: TruncationConfig = TRUNCATION,
) -> Drawn:
    """Draw the batch on this path. logprobs: requested unless False, on paths that have them."""
    hidden, head, params = case.hidden, case.head, case.params
    if UNPATCHED and torch.bfloat16 in (head.weight.dtype, head.rounding):
        pytest.skip("Triton's own interpreter has no right bfloat16")
    num_rows, device, vocab = len(hidden), hidden.device, head.vocab_size
    config = config_of(path, vocab) if config is None else config
    options = {"return_logprob": logprobs is not False, "truncation_config": truncation_config}
    if path == "screened":
        int8_head = Int8Head(head) if int8_head is None else int8_head
        if screen is None:
            screen = ScreenWorkspace(int8_head.num_groups, int8_head.weight.shape[1], max(1, num_rows), device)
        workspace = Workspace(1, device) if workspace is None else workspace
        options = {"workspace": screen, "head_workspace": workspace, "truncation_config": truncation_config}
        output = screened_sample(hidden, head, int8_head, params, config, **options)
    elif path == "logits":
        if workspace is None:
            workspace = Workspace(num_read_splits(vocab, max(1, num_rows), config, device) * max(1, num_rows), device)
        output = sample_logits(case.raw, head.spec, params, config, workspace=workspace, **options)
    else:
        if workspace is None:
            workspace = Workspace(num_splits(head, max(1, num_rows), config) * max(1, num_rows), device)
        output = lm_head_sample(hidden, head, params, config, workspace=workspace, **options)
    status = None
    if params.truncation is not None and num_rows:
        assert workspace.last_buffer is not None
        status = workspace.last_buffer.status[:num_rows].clone()
    return Drawn(*output, status, workspace, screen)


def assert_equal_to_reference(case: Case, drawn: Drawn, max_near_ties: float = 0.1) -> None:
    """Tokens equal the reference's except in near-ties. The share of near-ties is at most ``max_near_ties``. Logprobs,
    log-masses and statuses agree with the reference."""
    want, head = expected(case), case.head
    certain = ~want.near_tie
    assert torch.equal(drawn.token_ids[certain], want.token[certain])
    assert want.near_tie.double().mean().item() <= max_near_ties
    assert ((drawn.token_ids >= head.vocab_start) & (drawn.token_ids < head.vocab_start + head.vocab_size)).all()
    if drawn.status is not None:
        assert torch.equal(drawn.status > 0, case.limited), "only rows with limits are drawn by them"
    if drawn.logprobs is not None:
        same = (drawn.token_ids == want.token) & (case.edited > float("-inf")).any(1)
        temperature = torch.where(case.params.temperature > 0, case.params.temperature, 1.0).double()
        error_bound = 1e-4 + 4 * case.softcap_error / temperature
        assert ((drawn.logprobs.double() - want.logprob_low).abs() <= error_bound)[same].all()
        log_mass = torch.logsumexp(case.edited / temperature[:, None], 1)
        assert drawn.log_mass is not None
        assert drawn.logprobs.nan_to_num(-1.0).max() <= 0
        drawn_mass = drawn.log_mass.double().sum(-1)
        off = (drawn_mass - log_mass).abs()
        assert ((off <= error_bound + 1e-6 * log_mass.abs()) | (drawn_mass == log_mass)).all()
