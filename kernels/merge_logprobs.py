"""The k largest logprobs of the whole vocabulary and those of given ids, of those of the ranks that share it: 12 bytes
per likeliest id and rank, 4 per given id and rank.

Each rank leaves its k first ids in the order (logit down, id up), with their logits and logprobs, the logprobs of the
given ids that it holds, and the log-mass of its ids. The k first of all ranks are among them. A logprob of rank r is
relative to its own ids:

    logprob = logprob[r] + (log-mass[r] - log-mass)      log-mass = logsumexp over ranks of log-mass[r]

Every rank merges the same numbers in the same order. A rank without ids, or without some row, contributes id -1 and a
log-mass of (-inf, 0). Ids are below 2**24, which float32 holds exactly: no integer travels as the bits of a float.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .config import cdiv, next_power_of_2
from .launch import launch
from .logit_summary import LOWEST_LOGPROB, NUM_WARPS, check_rows, clamp_logprobs
from .top_logprobs import (
    TopLogprobs,
    check_k,
    kth_key,
    rank_listed,
    sort_keys,
    store_first,
    store_rest,
    width_of,
)
from .workspace import MAX_GIVEN_IDS, MAX_TOP_LOGPROBS

MAX_RANKS = 64
MAX_FIELDS = cdiv(2 + 3 * MAX_TOP_LOGPROBS + MAX_GIVEN_IDS, 16) * 16  # of a row, in memory of ranks
_MASS_FIELDS = tl.constexpr(2)
_BLOCK_IDS = 64  # given ids that a program packs or merges at a time
_NO_KEY = tl.constexpr(-(2**31))  # as in ``sort_keys``, of no shift
_LOWEST = tl.constexpr(LOWEST_LOGPROB)


@triton.jit(do_not_specialize=["first", "num_found", "k", "num_ids", "out_stride"])
def pack_logprobs_kernel(
    top,  # TopLogprobs of this rank, of the rows from ``first`` on; or None: k is 0
    of_ids_ptr,  # [b, m] f32, or None: m is 0
    log_mass_ptr,  # [b, 2] f32
    out_ptr,  # [B, fields_of(k, m)] f32, out: log-mass, ids, logprobs, logits, logprobs of given ids
    first,
    num_found,
    k,
    num_ids,
    out_stride,
    # constexpr
    BLOCK_K: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    row = tl.program_id(0)
    place = (row - first).to(tl.int64)
    exists = (place >= 0) & (place < num_found)
    out = out_ptr + row.to(tl.int64) * out_stride
    high = tl.load(log_mass_ptr + place * 2, mask=exists, other=float("-inf"))
    low = tl.load(log_mass_ptr + place * 2 + 1, mask=exists, other=0.0)
    tl.store(out, high)
    tl.store(out + 1, low)
    out += _MASS_FIELDS
    if top is not None:
        offs_k = tl.arange(0, BLOCK_K)
        inside = offs_k < k
        source = place * k + offs_k
        ids = tl.load(top.token_ids + source, mask=inside & exists, other=-1).to(tl.float32)
        logprobs = tl.load(top.logprobs + source, mask=inside & exists, other=_LOWEST)
        logits = tl.load(top.logits + source, mask=inside & exists, other=float("-inf"))
        tl.store(out + offs_k, ids, mask=inside)
        tl.store(out + k + offs_k, logprobs, mask=inside)
        tl.store(out + 2 * k + offs_k, logits, mask=inside)
        out += 3 * k
    if of_ids_ptr is not None:
        for start in tl.range(0, num_ids, BLOCK_I):
            offs_i = start + tl.arange(0, BLOCK_I)
            given = offs_i < num_ids
            values = tl.load(of_ids_ptr + place * num_ids + offs_i, mask=given & exists, other=_LOWEST)
            tl.store(out + offs_i, values, mask=given)


@triton.jit(
    do_not_specialize=["k", "num_ids", "num_ranks", "rank_stride", "row_stride"],
    do_not_specialize_on_alignment=["parts_ptr", "counts_ptr"],
)
def merge_logprobs_kernel(
    parts_ptr,  # [N, B, fields_of(k, m)] f32, as packed
    counts_ptr,  # [B] i32, or None: k in every row
    list_ptr,  # [B, 2, BLOCK_K] i32, scratch: places among the parts, and the bits of their logits; or None: k is 0
    output,  # TopLogprobs, out; of the log-mass alone where k is 0
    of_ids_ptr,  # [B, m] f32, out; or None: m is 0
    k,
    num_ids,
    num_ranks,
    rank_stride,
    row_stride,
    # constexpr
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts_ptr += row * row_stride
    ranks = tl.arange(0, BLOCK_N)
    own = ranks * rank_stride
    high = tl.load(parts_ptr + own, mask=ranks < num_ranks, other=float("-inf"))
    low = tl.load(parts_ptr + own + 1, mask=ranks < num_ranks, other=0.0)
    largest = tl.max(high)
    # Relative to the largest: at a low temperature log-masses are too large for their differences. The low part is the
    # rounding error of the high one, and may itself be too large for ``exp``.
    relative = (high - largest) + low
    peak = tl.max(relative)
    total = peak + tl.log(tl.sum(tl.exp(relative - peak)))
    tl.store(output.log_mass + row * 2, largest)
    tl.store(output.log_mass + row * 2 + 1, tl.where(largest == float("-inf"), 0.0, total))
    # A rank's own logprob of a forbidden id may be no number: other ranks may have an allowed one.
    forbidden = tl.where(largest > float("-inf"), _LOWEST, float("nan"))
    if list_ptr is not None:
        top_ptr = parts_ptr + _MASS_FIELDS
        wanted = k
        if counts_ptr is not None:
            wanted = tl.minimum(tl.load(counts_ptr + row), k)
        # Ranks ascend, and so do equal logits of one rank: of equal ones the first has the smallest id.
        places = tl.arange(0, BLOCK_N * BLOCK_K)
        rank, slot = places // BLOCK_K, places % BLOCK_K
        inside = (rank < num_ranks) & (slot < k)
        source = rank * rank_stride + slot
        exists = tl.load(top_ptr + source, mask=inside, other=-1.0) >= 0
        logits = tl.load(top_ptr + 2 * k + source, mask=exists, other=0.0)
        num = tl.minimum(wanted, tl.sum(exists.to(tl.int32)))
        if num > 0:
            list_ptr += row * 2 * BLOCK_K
            keys = sort_keys(logits, exists, 0)
            threshold = kth_key(keys, num, tl.full([], _NO_KEY + 1, tl.int32))
            chosen, place = store_first(list_ptr, places, keys, num, threshold)
            tl.store(list_ptr + BLOCK_K + place, logits.to(tl.int32, bitcast=True), mask=chosen)
            tl.debug_barrier()
            offs_k = tl.arange(0, BLOCK_K)
            found = offs_k < num
            listed = tl.load(list_ptr + offs_k, mask=found, other=0)
            values, order = rank_listed(list_ptr + BLOCK_K, num, BLOCK_K, 0)
            of_rank = parts_ptr + listed // BLOCK_K * rank_stride
            from_rank = top_ptr + listed // BLOCK_K * rank_stride + listed % BLOCK_K
            share = tl.load(of_rank, mask=found, other=0.0) - largest
            share += tl.load(of_rank + 1, mask=found, other=0.0)
            # A draw's merge adds in this order (``store_merged``): a token has one logprob.
            logprobs = clamp_logprobs(tl.load(from_rank + k, mask=found, other=0.0) + (share - total))
            logprobs = tl.where(values > float("-inf"), logprobs, forbidden)
            out = row * k + order
            tl.store(output.token_ids + out, tl.load(from_rank, mask=found, other=0.0).to(tl.int64), mask=found)
            tl.store(output.logprobs + out, logprobs, mask=found)
            tl.store(output.logits + out, values, mask=found)
        store_rest(output, row, num, k, BLOCK_K)
    if of_ids_ptr is not None:
        given_ptr = parts_ptr + _MASS_FIELDS + 3 * k
        shares = ((high - largest) + low) - total
        for start in tl.range(0, num_ids, BLOCK_I):
            offs_i = start + tl.arange(0, BLOCK_I)
            given = offs_i < num_ids
            mask = (ranks < num_ranks)[:, None] & given[None, :]
            of_ranks = tl.load(given_ptr + own[:, None] + offs_i[None, :], mask=mask, other=_LOWEST)
            # One rank holds the id. It has no number where none of its ids is allowed: NaN is not above LOWEST.
            known = (of_ranks > _LOWEST) & (high > float("-inf"))[:, None]
            of_ids = tl.max(tl.where(known, clamp_logprobs(of_ranks + shares[:, None]), _LOWEST), axis=0)
            unknown = tl.max((of_ranks != of_ranks).to(tl.int32), axis=0) > 0
            tl.store(of_ids_ptr + row * num_ids + offs_i, tl.where(unknown, forbidden, of_ids), mask=given)


def fields_of(k: int, num_ids: int) -> int:
    """The fields of a row: its log-mass, three per likeliest id and one per given id."""
    return 2 + 3 * k + num_ids


def pack_logprobs(
    top: TopLogprobs | None,
    of_ids: torch.Tensor | None,
    log_mass: torch.Tensor,
    first: int = 0,
    num_rows: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[B, fields_of(k, m)]`` float32: what this rank has found, as ``merge_logprobs`` takes it.

    top: of b rows, those of the batch from ``first`` on; None where k is 0. of_ids: ``[b, m]`` float32,
    ``LOWEST_LOGPROB`` of an id that the rank does not hold; None where m is 0. log_mass: ``[b, 2]`` float32, of the
    rank's ids, at the temperatures of both. num_rows: B, the rows of the batch; b when None. out: where to write it.

    Raises ValueError where these do not fit.
    """
    num_found, device = log_mass.shape[0], log_mass.device
    num_rows = num_found if num_rows is None else num_rows
    if first < 0 or first + num_found > num_rows:
        raise ValueError(f"first is {first} for {num_found} rows of {num_rows}; expected 0 to {num_rows - num_found}")
    check_rows("log_mass", log_mass, (num_found, 2), torch.float32, log_mass)
    k = 0 if top is None else top.token_ids.shape[1]
    num_ids = 0 if of_ids is None else of_ids.shape[1]
    if top is not None:
        check_k(k)
        check_rows("token_ids", top.token_ids, (num_found, k), torch.int64, log_mass)
        check_rows("logprobs", top.logprobs, (num_found, k), torch.float32, log_mass)
        check_rows("logits", top.logits, (num_found, k), torch.float32, log_mass)
    if of_ids is not None:
        check_rows("of_ids", of_ids, (num_found, num_ids), torch.float32, log_mass)
    shape = (num_rows, fields_of(k, num_ids))
    packed = torch.empty(shape, dtype=torch.float32, device=device) if out is None else out
    if packed.shape != shape or packed.dtype is not torch.float32 or packed.stride(1) != 1:
        raise ValueError(f"out is {tuple(packed.shape)} {packed.dtype}; expected {shape} torch.float32")
    if num_rows:
        launch(
            pack_logprobs_kernel,
            num_rows,
            (
                None if top is None else top._replace(log_mass=log_mass),  # Triton 3.6 takes no None in a tuple
                of_ids if num_ids else None,
                log_mass,
                packed,
                first,
                num_found,
                k,
                num_ids,
                packed.stride(0),
            ),
            {"BLOCK_K": width_of(max(k, 1)), "BLOCK_I": _BLOCK_IDS},
            1,
            (device.index, top is None, num_ids == 0, *_alignments(top, of_ids, log_mass, packed)),
        )
    return packed


def merge_logprobs(
    parts: torch.Tensor, k: int, *, counts: torch.Tensor | None = None, lists: torch.Tensor | None = None
) -> tuple[TopLogprobs | None, torch.Tensor | None, torch.Tensor]:
    """The ``k`` likeliest ids of the whole vocabulary, the logprobs of given ids, and the log-mass, of what N parts of
    it have found, in the order of the ids.

    parts: ``[N, B, fields_of(k, m)]`` float32, ``pack_logprobs`` of each part, whose logprobs are relative to its own
    log-mass. k: 0 to ``MAX_TOP_LOGPROBS``. counts: as the parts had them. lists: scratch, at least
    ``2 B MAX_TOP_LOGPROBS`` int32 in a row; allocated when None. Returns those of ``top_logprobs`` of all ids, None
    where k is 0; ``[B, m]`` float32, as ``gather_logprobs`` of all ids has them, None where m is 0; and ``[B, 2]``
    float32.

    Raises ValueError for a tensor of another shape, dtype, layout or device.
    """
    if k != 0:
        check_k(k)
    num_ids = parts.shape[-1] - fields_of(k, 0)
    if parts.dim() != 3 or not 1 <= parts.shape[0] <= MAX_RANKS or num_ids < 0:
        raise ValueError(
            f"parts is {tuple(parts.shape)}; expected [N, B, {fields_of(k, 0)} or more] of at most {MAX_RANKS} parts"
        )
    if parts.dtype is not torch.float32 or parts.stride(2) != 1:
        raise ValueError(f"parts is {parts.dtype} with strides {parts.stride()}; expected torch.float32, whole rows")
    num_ranks, num_rows, _ = parts.shape
    if counts is not None:
        check_rows("counts", counts, (num_rows,), torch.int32, parts)
    device, width = parts.device, width_of(max(k, 1))
    if lists is None:
        lists = torch.empty(num_rows * 2 * width, dtype=torch.int32, device=device)
    check_rows("lists", lists, (max(len(lists), num_rows * 2 * width),), torch.int32, parts)
    output = TopLogprobs.empty(num_rows, k, device)
    of_ids = output.logprobs.new_empty(num_rows, num_ids) if num_ids else None
    assert output.log_mass is not None
    if num_rows:
        launch(
            merge_logprobs_kernel,
            num_rows,
            (
                parts,
                counts,
                lists if k else None,
                output,
                of_ids,
                k,
                num_ids,
                num_ranks,
                parts.stride(0),
                parts.stride(1),
            ),
            {"BLOCK_N": next_power_of_2(num_ranks), "BLOCK_K": width, "BLOCK_I": _BLOCK_IDS},
            NUM_WARPS,
            (device.index, counts is None, k == 0, num_ids == 0),
        )
    return output if k else None, of_ids, output.log_mass


def _alignments(top: TopLogprobs | None, *tensors: torch.Tensor | None) -> tuple[bool, ...]:
    given = (*((None,) * 3 if top is None else top[:3]), *tensors)
    return tuple(tensor is not None and tensor.data_ptr() % 16 == 0 for tensor in given)
