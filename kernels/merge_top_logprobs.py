"""The k largest logprobs of the whole vocabulary, of those of the ranks that share it: 16 bytes per id and rank.

Each rank leaves its k first ids in the order (logit down, id up), with their logits and logprobs, and the log-mass of
its ids. The k first of all ranks are among them. A logprob of rank r is relative to its own ids:

    logprob = logprob[r] + log-mass[r] - log-mass        log-mass = logsumexp over ranks of log-mass[r]

Every rank merges the same numbers in the same order. A rank without ids contributes id -1 and a log-mass of (-inf, 0).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .config import next_power_of_2
from .launch import launch
from .logit_summary import LOWEST_LOGPROB, NUM_WARPS, check_rows, clamp_logprobs
from .top_logprobs import TopLogprobs, check_k, kth_key, rank_listed, sort_keys, store_first, store_rest, width_of

MAX_RANKS = 64
_NO_KEY = tl.constexpr(-(2**31))  # as in ``sort_keys``, of no shift
_LOWEST = tl.constexpr(LOWEST_LOGPROB)


@triton.jit(do_not_specialize=["k", "num_rows", "num_ranks"], do_not_specialize_on_alignment=["counts_ptr"])
def merge_top_logprobs_kernel(
    parts,  # TopLogprobs of all ranks: [N, B, k] each, the log-mass [N, B, 2]
    counts_ptr,  # [B] i32, or None: k in every row
    list_ptr,  # [B, 2, BLOCK_K] i32, scratch: places among the parts, and the bits of their logits
    output,  # TopLogprobs, out
    k,
    num_rows,
    num_ranks,
    # constexpr
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wanted = k
    if counts_ptr is not None:
        wanted = tl.minimum(tl.load(counts_ptr + row), k)
    # Ranks ascend, and so do equal logits of one rank: of equal ones the first has the smallest id.
    places = tl.arange(0, BLOCK_N * BLOCK_K)
    rank, slot = places // BLOCK_K, places % BLOCK_K
    inside = (rank < num_ranks) & (slot < k)
    source = (rank * num_rows + row) * k + slot
    exists = tl.load(parts.token_ids + source, mask=inside, other=-1) >= 0
    logits = tl.load(parts.logits + source, mask=exists, other=0.0)
    num = tl.minimum(wanted, tl.sum(exists.to(tl.int32)))

    ranks = tl.arange(0, BLOCK_N)
    own = (ranks * num_rows + row) * 2
    high = tl.load(parts.log_mass + own, mask=ranks < num_ranks, other=float("-inf"))
    low = tl.load(parts.log_mass + own + 1, mask=ranks < num_ranks, other=0.0)
    largest = tl.max(high)
    # Relative to the largest: at a low temperature log-masses are too large for their differences.
    total = tl.log(tl.sum(tl.exp((high - largest) + low)))
    tl.store(output.log_mass + row * 2, largest)
    tl.store(output.log_mass + row * 2 + 1, tl.where(largest == float("-inf"), 0.0, total))
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
        of_rank = (listed // BLOCK_K * num_rows + row) * 2
        from_rank = (listed // BLOCK_K * num_rows + row) * k + listed % BLOCK_K
        share = tl.load(parts.log_mass + of_rank, mask=found, other=0.0) - largest
        share += tl.load(parts.log_mass + of_rank + 1, mask=found, other=0.0) - total
        logprobs = clamp_logprobs(tl.load(parts.logprobs + from_rank, mask=found, other=0.0) + share)
        # A rank's own logprob of a forbidden id may be no number: other ranks may have an allowed one.
        forbidden = tl.where(largest > float("-inf"), _LOWEST, float("nan"))
        logprobs = tl.where(values > float("-inf"), logprobs, forbidden)
        out = row * k + order
        tl.store(output.token_ids + out, tl.load(parts.token_ids + from_rank, mask=found, other=0), mask=found)
        tl.store(output.logprobs + out, logprobs, mask=found)
        tl.store(output.logits + out, values, mask=found)
    store_rest(output, row, num, k, BLOCK_K)


def merge_top_logprobs(parts: TopLogprobs, *, counts: torch.Tensor | None = None) -> TopLogprobs:
    """The ``k`` likeliest ids of the whole vocabulary, of those of each part of it, in the order of the ids.

    parts: ``top_logprobs`` of N parts without a given log-mass, stacked: token_ids ``[N, B, k]`` int64, logprobs and
    logits ``[N, B, k]`` float32, log_mass ``[N, B, 2]`` float32. counts: as the parts had them. The result is that of
    ``top_logprobs`` of all ids; its log-mass is that of the vocabulary.

    Raises ValueError for a tensor of another shape, dtype, layout or device.
    """
    ids = parts.token_ids
    if ids.dim() != 3 or not 1 <= ids.shape[0] <= MAX_RANKS:
        raise ValueError(f"token_ids is {tuple(ids.shape)}; expected [N, B, k] of at most {MAX_RANKS} parts")
    num_ranks, num_rows, k = ids.shape
    check_k(k)
    check_rows("token_ids", ids, (num_ranks, num_rows, k), torch.int64, ids)
    check_rows("logprobs", parts.logprobs, (num_ranks, num_rows, k), torch.float32, ids)
    check_rows("logits", parts.logits, (num_ranks, num_rows, k), torch.float32, ids)
    if parts.log_mass is None:
        raise ValueError(f"log_mass is None; expected {(num_ranks, num_rows, 2)} torch.float32")
    check_rows("log_mass", parts.log_mass, (num_ranks, num_rows, 2), torch.float32, ids)
    if counts is not None:
        check_rows("counts", counts, (num_rows,), torch.int32, ids)
    output = TopLogprobs.empty(num_rows, k, ids.device)
    if num_rows == 0:
        return output
    width = width_of(k)
    launch(
        merge_top_logprobs_kernel,
        num_rows,
        (
            parts,
            counts,
            torch.empty(num_rows, 2, width, dtype=torch.int32, device=ids.device),
            output,
            k,
            num_rows,
            num_ranks,
        ),
        {"BLOCK_N": next_power_of_2(num_ranks), "BLOCK_K": width},
        NUM_WARPS,
        (ids.device.index, counts is None, *(tensor.data_ptr() % 16 == 0 for tensor in parts if tensor is not None)),
    )
    return output
