"""The start of all logprobs of rows of logits: one pass over ``[B, V]``, which leaves a hundredth of it or less.

    group_max[b, g] = max of the 16 logits of group g          where ids are ranked (``top_logprobs.py``)
    tile_mass[b, t] = largest logit of tile t, and the sum of exp((logit - largest) / temperature) over it

Logits are those of the readers and of the fused pass: rounded, scaled, soft-capped, edited, with -inf for NaN and the
largest number for +inf. A truncation does not count, and a greedy row has temperature 1.

Tiles are the same for all batches. The order of every sum depends on the dtype, on the alignment of rows and on whether
the batch has edits, and on nothing else: a row's logprobs are the same, bit by bit, however many rows are beside it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import rng
from .config import cdiv, next_power_of_2
from .epilogue import (
    LIMIT,
    bound_logits,
    edit_logits,
    find_edits,
    invert_temperature,
    relative_mass,
    relative_weight,
    transform_logits,
)
from .intrinsics import mul_rn
from .launch import launch
from .params import TRITON_DTYPES, BatchParams, FeatureOperands, LogitsSpec, check_tensor
from .workspace import SUMMARY_IDS, LogprobWorkspace

LOWEST_LOGPROB = torch.finfo(torch.float32).min  # of an id that is forbidden, as SGLang has it
NUM_WARPS = 4  # one number for all readers of a summary: they add the masses of tiles in one order
WIDE_WARPS = 8  # of the pass over float32, and with edits: these take more registers per logit
_LOWEST = tl.constexpr(LOWEST_LOGPROB)


@triton.jit
def temperature_of(temperature_ptr, row):
    """The reciprocal of a row's temperature: 1 where it is greedy, and where there are no temperatures."""
    if temperature_ptr is None:
        inv_temperature = tl.full([], 1.0, tl.float32)
    else:
        _, inv_temperature = invert_temperature(tl.load(temperature_ptr + row))
    return inv_temperature


@triton.jit
def finish_logits(
    raw,  # any block of a row's raw logits
    inside,  # bool, of that shape: false for what is no id
    ids,  # i32, of that shape, columns
    row,
    vocab_start,
    logit_scale,
    softcap,
    edits,
    given_edits,
    LOGITS_DTYPE: tl.constexpr,
):
    """The row's logits, float32, in the shape of ``raw``; -inf outside, and where one is forbidden."""
    logits = bound_logits(transform_logits(raw, logit_scale, softcap, LOGITS_DTYPE, DROP_NAN=True), inside)
    if edits is not None:
        flat: tl.constexpr = [logits.numel, 1]
        rows = row + tl.arange(0, 1)
        found = find_edits(edits, given_edits, rows, rows >= 0)
        edited = edit_logits(
            tl.reshape(logits, flat),
            tl.reshape(inside, flat),
            rows,
            tl.reshape(vocab_start + ids, flat),
            found,
            edits,
        )
        logits = tl.reshape(edited, logits.shape)
    return logits


@triton.jit
def mass_of_tiles(tile_mass_ptr, row, num_tiles, inv_temperature, BLOCK_T: tl.constexpr):
    """The row's largest logit, and its exp-sum at temperature relative to that."""
    offs_t = tl.arange(0, BLOCK_T)
    slots = (row * num_tiles + offs_t) * 2
    peak = tl.load(tile_mass_ptr + slots, mask=offs_t < num_tiles, other=float("-inf"))
    mass = tl.load(tile_mass_ptr + slots + 1, mask=offs_t < num_tiles, other=0.0)
    largest = tl.max(peak)
    return largest, tl.sum(relative_mass(mass, peak, largest, inv_temperature))


@triton.jit
def clamp_logprobs(logprobs):
    """At most 0, at least the smallest float32 number; NaN stays."""
    logprobs = tl.where(logprobs > 0.0, 0.0, logprobs)
    return tl.where(logprobs < _LOWEST, _LOWEST, logprobs)


@triton.jit
def logprobs_by_mass(logits, largest, log_total, inv_temperature):
    """Logprobs of some logits of a row. largest, log_total: as ``log_mass_of`` has them."""
    # Halves: a float32 may hold the quotient by the temperature, and not the difference of two logits.
    return clamp_logprobs((0.5 * logits - 0.5 * largest) * (2.0 * inv_temperature) - log_total)


@triton.jit
def logprobs_by_log_mass(logits, high, low, inv_temperature):
    """Logprobs of some logits, from the two parts of a log-mass. The error of each product is added to the difference:
    a logprob has the digits of a float32 however large the products are."""
    product = mul_rn(logits, inv_temperature)
    error = tl.where(tl.abs(product) <= LIMIT, tl.fma(logits, inv_temperature, -product), 0.0)
    return clamp_logprobs((tl.minimum(product, LIMIT) - high) + (error - low))


@triton.jit(
    do_not_specialize=["num_groups", "num_tiles", "vocab_size", "vocab_start", "given_edits"],
    do_not_specialize_on_alignment=["temperature_ptr", "counts_ptr"],
)
def summarize_logits_kernel(
    raw_ptr,  # [B, >= V]
    temperature_ptr,  # [B] f32, or None: 1 in every row
    counts_ptr,  # [B] i32: rows with 0 or less are left out; or None
    edits,  # EditOperands, or None
    group_max_ptr,  # [B, G] f32, out; or None
    tile_mass_ptr,  # [B, T, 2] f32, out; or None
    num_groups,
    num_tiles,
    vocab_size,
    vocab_start,
    raw_stride,
    logit_scale,  # or None, as the next
    softcap,
    given_edits,  # FeatureOperands.given_edits
    # constexpr
    LOGITS_DTYPE: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    NUM_GROUPS: tl.constexpr = BLOCK_V // rng.GROUP_SIZE
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    wanted = True
    if counts_ptr is not None:
        wanted = tl.load(counts_ptr + row) > 0
    if wanted:
        groups = tile * NUM_GROUPS + tl.arange(0, NUM_GROUPS)
        ids = groups[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
        row_ptr = raw_ptr + row.to(tl.int64) * raw_stride
        # A mask that changes at multiples of 16 alone lets a thread load 16 bytes at a time.
        whole = vocab_size // rng.GROUP_SIZE
        in_whole = (groups < whole)[:, None] & (ids >= 0)
        raw = tl.load(row_ptr + ids, mask=in_whole, other=0.0)
        inside = in_whole
        if not WHOLE_GROUPS:
            inside = ids < vocab_size
            last = whole * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)
            rest = tl.load(row_ptr + last, mask=(last < vocab_size) & ((tile + 1) * NUM_GROUPS > whole), other=0.0)
            raw = tl.where((groups == whole)[:, None], rest[None, :], raw)
        logits = finish_logits(
            raw, inside, ids, row.to(tl.int32), vocab_start, logit_scale, softcap, edits, given_edits, LOGITS_DTYPE
        )
        peak = tl.max(logits, axis=1)
        if group_max_ptr is not None:
            tl.store(group_max_ptr + row * num_groups + groups, peak, mask=groups < num_groups)
        if tile_mass_ptr is not None:
            inv_temperature = temperature_of(temperature_ptr, row)
            largest = tl.max(peak)
            mass = tl.sum(relative_weight(logits, largest, inv_temperature))
            slot = (row * num_tiles + tile) * 2
            tl.store(tile_mass_ptr + slot, largest)
            tl.store(tile_mass_ptr + slot + 1, mass)


class RowSummary(NamedTuple):
    """The facts about rows of logits that their logprobs start from; None where not known.

    group_max: ``[B, G]`` float32, the largest logit of each group of 16 ids, -inf where it has none; as in a
    ``LogitsBuffer``, for the logits in it. tile_mass: ``[B, T, 2]`` float32, of each tile of ``SUMMARY_IDS`` ids the
    largest logit, and the exp-sum at temperature relative to that. log_mass: ``[B, 2]`` float32, two numbers whose sum
    is ``logsumexp(logits / temperature)``, as in ``SampleOutput``; where it is given, tile_mass is not read.
    """

    group_max: torch.Tensor | None = None
    tile_mass: torch.Tensor | None = None
    log_mass: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class LogitRows:
    """Rows of logits, and what is done to them before the softmax whose logprobs are wanted.

    logits: ``[B, >= V]`` bfloat16, float16 or float32; contiguous rows at any distance; not changed. Columns from V on
    are never read. spec: the columns, and their scale and soft cap. params: temperature and edits of the rows; their
    truncation does not count. None: temperature 1 and no edits, as for prompts. original: temperature 1 in every row,
    edits included (``SGLANG_RETURN_ORIGINAL_LOGPROB``). workspace: scratch; a new one where None.

    Raises ValueError for a tensor of another shape, dtype, layout or device.
    """

    logits: torch.Tensor
    spec: LogitsSpec
    params: BatchParams | None = None
    original: bool = False
    workspace: LogprobWorkspace | None = None

    def __post_init__(self) -> None:
        logits, spec = self.logits, self.spec
        if logits.dim() != 2 or logits.dtype not in TRITON_DTYPES or logits.shape[1] < spec.vocab_size:
            raise ValueError(
                f"logits is {tuple(logits.shape)} {logits.dtype}; "
                f"expected [B, {spec.vocab_size} or more] in bfloat16, float16 or float32"
            )
        if logits.stride(1) != 1 and logits.shape[1] > 1:
            raise ValueError(f"logits has strides {logits.stride()}; expected rows that are contiguous")
        if self.params is not None:
            untruncated(self.params).check("logits", logits, spec)
        _ = self.scratch  # a workspace that does not fit is found here

    @functools.cached_property
    def scratch(self) -> LogprobWorkspace:
        logits = self.logits
        return LogprobWorkspace.for_rows(logits.shape[0], self.spec.vocab_size, logits.device, self.workspace)

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def num_tiles(self) -> int:
        """T: the tiles of a row."""
        return cdiv(self.spec.vocab_size, SUMMARY_IDS)

    @property
    def temperature(self) -> torch.Tensor | None:
        return None if self.params is None or self.original else self.params.temperature

    @property
    def rounding(self) -> torch.dtype:
        """The dtype that logits are rounded to."""
        return self.logits.dtype if self.spec.logits_dtype is None else self.spec.logits_dtype

    @property
    def stride(self) -> int:
        """The distance of rows, also of a single one: another alignment is another order of sums."""
        return self.logits.stride(0)

    @functools.cached_property
    def features(self) -> FeatureOperands:
        return features_of(self.params, self.spec, self.scratch.group_max, self.scratch.lists)

    @property
    def variant(self) -> tuple[Hashable, ...]:
        """The facts about these rows that a compiled kernel depends on, beside its constants."""
        stride = self.stride
        return (
            self.logits.device.index,
            self.logits.dtype,
            self.logits.data_ptr() % 16 == 0,
            (stride % 16 == 0, stride == 1, stride < 2**31),
            self.temperature is None,
            self.features.variant,
        )

    def check(self, summary: RowSummary) -> None:
        """Raise ValueError unless the tensors of ``summary`` are of these rows."""
        shapes: tuple[tuple[int, ...], ...] = ((self.spec.num_groups,), (self.num_tiles, 2), (2,))
        for name, value, shape in zip(RowSummary._fields, summary, shapes, strict=True):
            if value is not None:
                check_rows(name, value, (self.num_rows, *shape), torch.float32, self.logits)

    def complete(self, summary: RowSummary | None, *, ranked: bool, counts: torch.Tensor | None = None) -> RowSummary:
        """``summary``, and what it lacks: masses, and where ``ranked`` the maxima. One launch where it lacks any."""
        summary = RowSummary() if summary is None else summary
        self.check(summary)
        maxima = ranked and summary.group_max is None
        masses = summary.log_mass is None and summary.tile_mass is None
        if not (maxima or masses):
            return summary
        new = summarize_logits(self, counts=counts, maxima=maxima, masses=masses)
        return RowSummary(
            new.group_max if maxima else summary.group_max,
            new.tile_mass if masses else summary.tile_mass,
            summary.log_mass,
        )


def untruncated(params: BatchParams) -> BatchParams:
    return params if params.truncation is None else dataclasses.replace(params, truncation=None)


def features_of(
    params: BatchParams | None, spec: LogitsSpec, floats: torch.Tensor, integers: torch.Tensor
) -> FeatureOperands:
    """Edits and transforms as kernels take them; ``floats``, ``integers`` as in ``BatchParams.operands``."""
    params = BatchParams(floats, integers, integers) if params is None else untruncated(params)
    return params.operands(spec, floats, integers, one_for_all=True)


def check_rows(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> None:
    """Raise ValueError unless ``tensor`` has this shape and dtype, the device of ``like``, and is contiguous."""
    check_tensor(name, tensor, shape, dtype, like)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; expected it contiguous")


def summarize_logits(
    rows: LogitRows, *, counts: torch.Tensor | None = None, maxima: bool = True, masses: bool = True
) -> RowSummary:
    """The maxima and the masses of ``rows``, as far as asked for: views of the workspace, until it is used again.

    counts: ``[B]`` int32; a row with 0 or less is not read, and what is returned of it is not defined.

    Raises ValueError for counts of another shape, dtype, layout or device.
    """
    if counts is not None:
        check_rows("counts", counts, (rows.num_rows,), torch.int32, rows.logits)
    num_rows, spec, scratch = rows.num_rows, rows.spec, rows.scratch
    group_max = scratch.group_max[:num_rows] if maxima else None
    tile_mass = scratch.tile_mass[:num_rows] if masses else None
    if num_rows and (maxima or masses):
        temperature = rows.temperature if masses else None
        launch(
            summarize_logits_kernel,
            num_rows * rows.num_tiles,
            (
                rows.logits,
                temperature,
                counts,
                rows.features.edits,
                group_max,
                tile_mass,
                spec.num_groups,
                rows.num_tiles,
                spec.vocab_size,
                spec.vocab_start,
                rows.stride,
                rows.features.logit_scale,
                rows.features.softcap,
                rows.features.given_edits,
            ),
            {
                "LOGITS_DTYPE": TRITON_DTYPES[rows.rounding],
                "WHOLE_GROUPS": spec.vocab_size % rng.GROUP_SIZE == 0,
                "BLOCK_V": SUMMARY_IDS,
            },
            WIDE_WARPS if rows.logits.itemsize == 4 or rows.features.edits is not None else NUM_WARPS,
            (*rows.variant, temperature is None, counts is None, maxima, masses),
        )
    return RowSummary(group_max, tile_mass)


def mass_constants(rows: LogitRows) -> dict[str, Any]:
    """The constants of kernels that read logits after a summary."""
    return {"LOGITS_DTYPE": TRITON_DTYPES[rows.rounding], "BLOCK_T": next_power_of_2(rows.num_tiles)}
