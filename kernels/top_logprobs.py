"""The k largest logprobs of each row of logits, k up to 128: ids in the order (logit down, id up), exactly.

The k first ids of this order lie in the k first groups of the order (largest logit down, group up): before an id of any
other group come k ids, one of each of these groups. The same holds for groups in blocks of 8. So a row's program never
looks at all of its logits:

    blocks of 128 ids    the k first of V / 128, by the maxima of their groups
    groups of 16 ids     the k first of 8 k
    ids                  the k first of 16 k, read from the logits

Each step finds the k-th largest number by bisection over float32 as integers, and takes numbers equal to it in
ascending order: no list can overflow, however many logits are equal. The maxima come from ``summarize_logits``, or from
the launch that has written the logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import rng
from .intrinsics import float_to_ordered
from .launch import launch
from .logit_summary import (
    LOWEST_LOGPROB,
    NUM_WARPS,
    LogitRows,
    RowSummary,
    check_rows,
    finish_logits,
    logprobs_by_log_mass,
    logprobs_by_mass,
    mass_constants,
    mass_of_tiles,
    temperature_of,
)
from .reduce_splits import log_mass_of
from .truncation_math import BLOCK_GROUPS
from .workspace import MAX_TOP_LOGPROBS, num_group_blocks

# The sizes of k that kernels are compiled for; a smaller k takes the next.
WIDTHS = (8, 32, MAX_TOP_LOGPROBS)
_NO_KEY = tl.constexpr(-(2**31))  # below that of every number
_LOWEST = tl.constexpr(LOWEST_LOGPROB)
_ROOM = tl.constexpr(MAX_TOP_LOGPROBS)
_RANKED = tl.constexpr(32)  # entries that others are compared with at a time: all of them would take many registers


class TopLogprobs(NamedTuple):
    """The likeliest ids of each row, first the likeliest; of equal logits the smaller id first.

    token_ids: ``[B, k]`` int64, absolute vocabulary ids. logprobs: ``[B, k]`` float32, natural logarithms of
    ``softmax(logits / temperature)``, temperature 1 on greedy rows, never above 0; ``LOWEST_LOGPROB`` of a forbidden
    id; NaN in a row without an allowed id. logits: ``[B, k]`` float32, after edits, -inf of a forbidden id: what the
    parts of a vocabulary are merged by. log_mass: ``[B, 2]`` float32, as in ``SampleOutput``: the given one, or that of
    the row's own ids.

    Forbidden ids follow the allowed ones in ascending order. Places behind the count of a row, or behind its last id,
    have id -1, logprob ``LOWEST_LOGPROB`` and logit -inf. A row with a count of 0 or less has a log-mass of (-inf, 0),
    unless it is given.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    logits: torch.Tensor
    log_mass: torch.Tensor | None

    @classmethod
    def empty(cls, num_rows: int, k: int, device: torch.device) -> TopLogprobs:
        """Room for the ``k`` likeliest ids of ``num_rows`` rows, and for their log-masses."""
        logprobs = torch.empty(num_rows, k, dtype=torch.float32, device=device)
        ids = torch.empty(num_rows, k, dtype=torch.int64, device=device)
        return cls(ids, logprobs, torch.empty_like(logprobs), logprobs.new_empty(num_rows, 2))

    def store(self, start: int, part: TopLogprobs) -> None:
        """Copy those of some rows to their places, from row ``start`` on."""
        for whole, some in zip(self, part, strict=True):
            if whole is not None and some is not None:
                whole[start : start + len(some)] = some


@triton.jit
def sort_keys(values, exists, SHIFT: tl.constexpr):
    """Integers in the order of float32 ``values``, equal for 0 and -0; the lowest where there is no value. SHIFT: the
    number of low bits that are zero in all values."""
    keys = float_to_ordered(values) >> SHIFT
    keys = tl.where(keys == -1, 0, keys)
    return tl.where(exists, keys, _NO_KEY >> SHIFT)


@triton.jit
def kth_key(keys, k, low):
    """A number that at least ``k`` keys reach and at most ``k`` are above. low: one that at least ``k`` reach."""
    above = tl.max(keys) + 1
    reached = low
    count = k + 1
    while (reached + 1 < above) & (count != k):
        middle = (reached & above) + ((reached ^ above) >> 1)  # half of their sum, which may not fit an int32
        number = tl.sum((keys >= middle).to(tl.int32))
        enough = number >= k
        reached = tl.where(enough, middle, reached)
        above = tl.where(enough, above, middle)
        count = tl.where(enough, number, count)
    return reached


@triton.jit
def store_first(list_ptr, entries, keys, k, threshold):
    """Write the entries of the ``k`` largest keys in their order; of keys equal to ``threshold``, the first ones.
    threshold: their ``kth_key``. Returns a flag per entry, and the places of those that are written."""
    larger = keys > threshold
    tied = keys == threshold
    room = k - tl.sum(larger.to(tl.int32))
    chosen = larger | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= room))
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(list_ptr + place, entries, mask=chosen)
    return chosen, place


@triton.jit
def _block_maxima(group_max, num_groups, BLOCK_S: tl.constexpr):
    """``[BLOCK_S]``: the largest logit of each block of groups. group_max: of the row's groups."""
    maxima = tl.full([BLOCK_S], float("-inf"), tl.float32)
    for place in tl.range(BLOCK_GROUPS):  # a loop, for few registers
        groups = tl.arange(0, BLOCK_S) * BLOCK_GROUPS + place
        maxima = tl.maximum(maxima, tl.load(group_max + groups, mask=groups < num_groups, other=float("-inf")))
    return maxima


@triton.jit
def _listed(list_ptr, places, num, SHIFT: tl.constexpr):
    """The logits whose bits are at some places of a list of ``num``, and their keys."""
    logits = tl.load(list_ptr + places, mask=places < num, other=0).to(tl.float32, bitcast=True)
    return logits, sort_keys(logits, places < num, SHIFT)


@triton.jit
def rank_listed(list_ptr, num, BLOCK_K: tl.constexpr, SHIFT: tl.constexpr):
    """``[BLOCK_K]`` logits whose bits are in a list of ``num``, and how many of these are before each: larger ones, and
    equal ones that are earlier in the list."""
    places = tl.arange(0, BLOCK_K)
    logits, keys = _listed(list_ptr, places, num, SHIFT)
    rank = tl.zeros([BLOCK_K], tl.int32)
    RANKED: tl.constexpr = min(BLOCK_K, _RANKED)
    for first in tl.range(0, num, RANKED):
        others = first + tl.arange(0, RANKED)
        _, other_keys = _listed(list_ptr, others, num, SHIFT)
        tied = other_keys[None, :] == keys[:, None]
        before = (other_keys[None, :] > keys[:, None]) | (tied & (others[None, :] < places[:, None]))
        rank += tl.sum(before.to(tl.int32), axis=1)
    return logits, rank


@triton.jit
def store_rest(output, row, num, k, BLOCK_K: tl.constexpr):
    """Fill the places of a row from ``num`` to ``k``."""
    offs_k = tl.arange(0, BLOCK_K)
    rest = (offs_k >= num) & (offs_k < k)
    tl.store(output.token_ids + row * k + offs_k, tl.full([BLOCK_K], -1, tl.int64), mask=rest)
    tl.store(output.logprobs + row * k + offs_k, tl.full([BLOCK_K], _LOWEST, tl.float32), mask=rest)
    tl.store(output.logits + row * k + offs_k, tl.full([BLOCK_K], float("-inf"), tl.float32), mask=rest)


@triton.jit(
    do_not_specialize=["k", "num_groups", "num_tiles", "vocab_size", "vocab_start", "given_edits"],
    do_not_specialize_on_alignment=["temperature_ptr", "counts_ptr", "group_max_ptr", "tile_mass_ptr", "log_mass_ptr"],
)
def top_logprobs_kernel(
    raw_ptr,  # [B, >= V]
    temperature_ptr,  # [B] f32, or None: 1 in every row
    counts_ptr,  # [B] i32, or None: k in every row
    edits,  # EditOperands, or None
    group_max_ptr,  # [B, G] f32
    tile_mass_ptr,  # [B, T, 2] f32; or None, where there is a log-mass
    log_mass_ptr,  # [B, 2] f32, or None
    list_ptr,  # [B, 4, MAX_TOP_LOGPROBS] i32, scratch: blocks, groups, ids, and the bits of the logits of these
    output,  # TopLogprobs, out; log_mass is None where it is given
    k,
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
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    wanted = k
    if counts_ptr is not None:
        wanted = tl.minimum(tl.load(counts_ptr + row), k)
    num = tl.minimum(wanted, vocab_size)
    if num > 0:
        list_ptr += row * 4 * _ROOM
        lowest = tl.full([], (_NO_KEY >> SHIFT) + 1, tl.int32)
        num_blocks = tl.cdiv(num_groups, BLOCK_GROUPS)
        blocks = tl.arange(0, BLOCK_S)
        row_max = group_max_ptr + row * num_groups
        keys = sort_keys(_block_maxima(row_max, num_groups, BLOCK_S), blocks < num_blocks, SHIFT)
        num_listed = tl.minimum(num, num_blocks)
        threshold = kth_key(keys, num_listed, lowest)
        store_first(list_ptr, blocks, keys, num_listed, threshold)
        tl.debug_barrier()

        # Where there are k blocks, k groups reach their threshold, and as many ids that of the groups.
        lowest = tl.where(num_listed == num, threshold, lowest)
        block = tl.load(list_ptr + offs_k, mask=offs_k < num_listed, other=num_blocks)
        groups = block[:, None] * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[None, :]
        groups = tl.reshape(groups, [BLOCK_K * BLOCK_GROUPS])
        exists = groups < num_groups
        maxima = tl.load(row_max + groups, mask=exists, other=0.0)
        keys = sort_keys(maxima, exists, SHIFT)
        num_listed = tl.minimum(num, num_groups)
        threshold = kth_key(keys, num_listed, lowest)
        store_first(list_ptr + _ROOM, groups, keys, num_listed, threshold)
        tl.debug_barrier()

        lowest = tl.where(num_listed == num, threshold, lowest)
        group = tl.load(list_ptr + _ROOM + offs_k, mask=offs_k < num_listed, other=num_groups)
        ids = group[:, None] * rng.GROUP_SIZE + tl.arange(0, rng.GROUP_SIZE)[None, :]
        ids = tl.reshape(ids, [BLOCK_K * rng.GROUP_SIZE])
        exists = ids < vocab_size
        raw = tl.load(raw_ptr + row.to(tl.int64) * raw_stride + ids, mask=exists, other=0.0)
        logits = finish_logits(
            raw, exists, ids, row.to(tl.int32), vocab_start, logit_scale, softcap, edits, given_edits, LOGITS_DTYPE
        )
        keys = sort_keys(logits, exists, SHIFT)
        chosen, place = store_first(list_ptr + 2 * _ROOM, ids, keys, num, kth_key(keys, num, lowest))
        tl.store(list_ptr + 3 * _ROOM + place, logits.to(tl.int32, bitcast=True), mask=chosen)
        tl.debug_barrier()

        found = offs_k < num
        ids = tl.load(list_ptr + 2 * _ROOM + offs_k, mask=found, other=0)
        logits, rank = rank_listed(list_ptr + 3 * _ROOM, num, BLOCK_K, SHIFT)
        inv_temperature = temperature_of(temperature_ptr, row)
        if log_mass_ptr is None:
            largest, total = mass_of_tiles(tile_mass_ptr, row, num_tiles, inv_temperature, BLOCK_T)
            log_total = tl.log(total)
            logprobs = logprobs_by_mass(logits, largest, log_total, inv_temperature)
            high, low = log_mass_of(largest, log_total, inv_temperature)
            tl.store(output.log_mass + row * 2, high)
            tl.store(output.log_mass + row * 2 + 1, low)
        else:
            high, low = tl.load(log_mass_ptr + row * 2), tl.load(log_mass_ptr + row * 2 + 1)
            logprobs = logprobs_by_log_mass(logits, high, low, inv_temperature)
        out = row * k + rank
        tl.store(output.token_ids + out, (vocab_start + ids).to(tl.int64), mask=found)
        tl.store(output.logprobs + out, logprobs, mask=found)
        tl.store(output.logits + out, logits, mask=found)
    elif log_mass_ptr is None:
        tl.store(output.log_mass + row * 2, float("-inf"))
        tl.store(output.log_mass + row * 2 + 1, 0.0)
    store_rest(output, row, num, k, BLOCK_K)


def key_shift(rows: LogitRows) -> int:
    """The number of low bits that are zero in every logit of ``rows``, as float32."""
    if rows.features.edits is not None or rows.features.softcap is not None:
        return 0
    return {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[rows.rounding]


def width_of(k: int) -> int:
    """The size that kernels are compiled for."""
    return next(width for width in WIDTHS if width >= k)


def check_k(k: int, name: str = "k") -> None:
    """Raise ValueError unless ``k`` ids of a row can be asked for."""
    if not isinstance(k, int) or not 1 <= k <= MAX_TOP_LOGPROBS:
        raise ValueError(f"{name} is {k!r}; expected an integer from 1 to {MAX_TOP_LOGPROBS}")


def top_logprobs(
    rows: LogitRows, k: int, *, counts: torch.Tensor | None = None, summary: RowSummary | None = None
) -> TopLogprobs:
    """The ``k`` likeliest ids of each row and their logprobs, in one launch after ``summarize_logits``.

    k: 1 to ``MAX_TOP_LOGPROBS``. counts: ``[B]`` int32, ids of each row, ``k`` at most; a row with 0 is not read.
    summary: the facts about ``rows`` that are known already; what it lacks is found first, of rows with a count. With a
    ``log_mass`` logprobs are relative to it, which may be that of several parts of a vocabulary; a logit whose quotient
    by the temperature is beyond float32 counts as the largest float32 then.

    Raises ValueError for a ``k`` out of its range, and for a tensor of another shape, dtype, layout or device.
    """
    check_k(k)
    if counts is not None:
        check_rows("counts", counts, (rows.num_rows,), torch.int32, rows.logits)
    known = rows.complete(summary, ranked=True, counts=counts)
    num_rows, spec = rows.num_rows, rows.spec
    output = TopLogprobs.empty(num_rows, k, rows.logits.device)
    if known.log_mass is not None:
        output = output._replace(log_mass=known.log_mass)
    if num_rows == 0:
        return output
    constants: dict[str, Any] = {
        **mass_constants(rows),
        "BLOCK_S": num_group_blocks(spec.vocab_size),
        "BLOCK_K": width_of(k),
        "SHIFT": key_shift(rows),
    }
    launch(
        top_logprobs_kernel,
        num_rows,
        (
            rows.logits,
            rows.temperature,
            counts,
            rows.features.edits,
            known.group_max,
            known.tile_mass if known.log_mass is None else None,
            known.log_mass,
            rows.scratch.lists,
            output if known.log_mass is None else output._replace(log_mass=None),
            k,
            spec.num_groups,
            rows.num_tiles,
            spec.vocab_size,
            spec.vocab_start,
            rows.stride,
            rows.features.logit_scale,
            rows.features.softcap,
            rows.features.given_edits,
        ),
        constants,
        NUM_WARPS,
        (*rows.variant, counts is None, known.log_mass is None),
    )
    return output
