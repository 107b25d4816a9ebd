"""The token of the whole vocabulary, of the draws of the ranks that share it: 20 bytes per row and rank (FlashSampling,
section 4.2 and Algorithm B.4).

    record[r] = score, id, logprob, log-mass            of the draw of rank r from its part of the head; the log-mass is
                                                        the sum of two float32, what else is one
    w         = argmax over ranks of score              (ties: the lowest rank, which has the lowest ids)
    token     = id[w]
    log-mass  = logsumexp over ranks of log-mass
    logprob   = logprob[w] + log-mass[w] - log-mass

Every rank merges the same records in the same order. A merge of merges is the merge of all, and a rank without ids, or
without a draw of some row, contributes ``NO_RECORD``, which changes nothing. Ids are below 2**24, which float32 holds
exactly: no integer travels as the bits of a float.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .config import cdiv, next_power_of_2
from .launch import launch
from .params import SampleOutput

NUM_FIELDS = 5  # score, id, logprob, and the two parts of the log-mass
NO_RECORD = (float("-inf"), 0.0, 0.0, float("-inf"), 0.0)
MAX_RANKS = 1024
ROWS_PER_PROGRAM = 64


@triton.jit
def load_records(
    drawn,  # SampleOutput of this rank
    places,  # [BLOCK_R], rows of it
    exists,  # [BLOCK_R], whether there is such a row
):
    """The fields of the records of some rows, ``NO_RECORD`` where there is no row."""
    score = tl.load(drawn.scores + places, mask=exists, other=float("-inf"))
    token = tl.load(drawn.token_ids + places, mask=exists, other=0).to(tl.float32)
    logprob = tl.zeros(places.shape, tl.float32)
    high = tl.full(places.shape, float("-inf"), tl.float32)
    low = tl.zeros(places.shape, tl.float32)
    if drawn.logprobs is not None:
        logprob = tl.load(drawn.logprobs + places, mask=exists, other=0.0)
        high = tl.load(drawn.log_mass + places * 2, mask=exists, other=float("-inf"))
        low = tl.load(drawn.log_mass + places * 2 + 1, mask=exists, other=0.0)
    return score, token, logprob, high, low


@triton.jit
def store_records(
    place,  # [BLOCK_R] pointers to the first fields
    record,  # of load_records
    inside,
):
    for field in tl.static_range(len(record)):
        tl.store(place + field, record[field], mask=inside)


@triton.jit
def store_merged(
    places,  # [BLOCK_N, BLOCK_R] pointers to the first fields of all ranks' records
    mask,
    output,  # SampleOutput, out
    rows,  # [BLOCK_R]
    inside,
):
    """The draw from the whole vocabulary. The records are read as others have written them meanwhile."""
    ranks = tl.arange(0, places.shape[0])
    scores = tl.load(places, mask=mask, other=float("-inf"), volatile=True)
    winner = tl.argmax(scores, axis=0)
    won = ranks[:, None] == winner[None, :]
    tokens = tl.load(places + 1, mask=mask, other=0.0, volatile=True)
    tl.store(output.scores + rows, tl.max(scores, axis=0), mask=inside)
    tl.store(output.token_ids + rows, tl.sum(tl.where(won, tokens, 0.0), axis=0).to(tl.int64), mask=inside)
    if output.logprobs is not None:
        high = tl.load(places + 3, mask=mask, other=float("-inf"), volatile=True)
        low = tl.load(places + 4, mask=mask, other=0.0, volatile=True)
        logprob = tl.sum(tl.where(won, tl.load(places + 2, mask=mask, other=0.0, volatile=True), 0.0), axis=0)
        largest = tl.max(high, axis=0)
        # Relative to the largest: at a low temperature log-masses are too large for their differences. The low part is
        # the rounding error of the high one, and may itself be too large for ``exp``.
        log_mass = (high - largest[None, :]) + low
        peak = tl.max(log_mass, axis=0)
        total = peak + tl.log(tl.sum(tl.exp(log_mass - peak[None, :]), axis=0))
        logprob += tl.sum(tl.where(won, log_mass, 0.0), axis=0) - total
        # The total is at least each part's mass, but for the error of a GPU's ``log``.
        tl.store(output.logprobs + rows, tl.where(logprob > 0.0, 0.0, logprob), mask=inside)
        tl.store(output.log_mass + rows * 2, largest, mask=inside)
        tl.store(output.log_mass + rows * 2 + 1, tl.where(largest == float("-inf"), 0.0, total), mask=inside)


@triton.jit(do_not_specialize=["first", "num_drawn", "num_rows"])
def pack_record_kernel(
    drawn,  # SampleOutput of this rank, of the rows from ``first`` on
    records_ptr,  # [B, NUM_FIELDS] f32, out
    first,
    num_drawn,
    num_rows,
    # constexpr
    BLOCK_R: tl.constexpr,
    FIELDS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    places = rows - first
    record = load_records(drawn, places, (places >= 0) & (places < num_drawn))
    store_records(records_ptr + rows * FIELDS, record, rows < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_ranks"])
def merge_records_kernel(
    records_ptr,  # [N, B, NUM_FIELDS] f32
    output,  # SampleOutput, out
    num_rows,
    num_ranks,
    # constexpr
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FIELDS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    ranks = tl.arange(0, BLOCK_N)
    mask = (ranks < num_ranks)[:, None] & (rows < num_rows)[None, :]
    places = records_ptr + (ranks[:, None] * num_rows + rows[None, :]) * FIELDS
    store_merged(places, mask, output, rows, rows < num_rows)


def pack_record(drawn: SampleOutput, first: int = 0, num_rows: int | None = None) -> torch.Tensor:
    """``[1, B, NUM_FIELDS]`` float32: the records of the rows that this rank has drawn, ``NO_RECORD`` for the others.

    drawn: the draw of the rows from ``first`` on. num_rows: B; as many as there are in ``drawn`` when None. Raises
    ValueError where these do not fit.
    """
    num_drawn, device = drawn.token_ids.shape[0], drawn.token_ids.device
    num_rows = num_drawn if num_rows is None else num_rows
    if first < 0 or first + num_drawn > num_rows:
        raise ValueError(f"first is {first} for {num_drawn} rows of {num_rows}; expected 0 to {num_rows - num_drawn}")
    records = torch.empty(1, num_rows, NUM_FIELDS, dtype=torch.float32, device=device)
    launch(
        pack_record_kernel,
        cdiv(num_rows, ROWS_PER_PROGRAM),
        (drawn, records, first, num_drawn, num_rows),
        {"BLOCK_R": ROWS_PER_PROGRAM, "FIELDS": NUM_FIELDS},
        1,
        (device.index, drawn.logprobs is None),
    )
    return records


def merge_records(records: torch.Tensor, *, return_logprob: bool) -> SampleOutput:
    """The draw from the whole vocabulary, of the records of all ranks, ``[N, B, NUM_FIELDS]`` float32, in the order of
    the ids. return_logprob: the ranks have drawn with it. Raises ValueError for records of another shape or dtype."""
    if records.dim() != 3 or not 1 <= records.shape[0] <= MAX_RANKS or records.shape[2] != NUM_FIELDS:
        raise ValueError(
            f"records is {tuple(records.shape)}; expected [N, B, {NUM_FIELDS}] of at most {MAX_RANKS} ranks"
        )
    if records.dtype is not torch.float32 or not records.is_contiguous():
        raise ValueError(
            f"records is {records.dtype} with strides {records.stride()}; expected torch.float32, contiguous"
        )
    num_ranks, num_rows, _ = records.shape
    output = SampleOutput.empty(num_rows, records.device, return_logprob)
    launch(
        merge_records_kernel,
        cdiv(num_rows, ROWS_PER_PROGRAM),
        (records, output, num_rows, num_ranks),
        {"BLOCK_N": next_power_of_2(num_ranks), "BLOCK_R": ROWS_PER_PROGRAM, "FIELDS": NUM_FIELDS},
        1,
        (records.device.index, return_logprob),
    )
    return output


def no_record(num_rows: int, device: torch.device, return_logprob: bool) -> SampleOutput:
    """The draw of a rank that holds no id: ``NO_RECORD`` in each row."""
    score, _, logprob, *log_mass = NO_RECORD
    output = SampleOutput.empty(num_rows, device, return_logprob)
    output.token_ids.zero_()
    output.scores.fill_(score)
    if output.logprobs is not None and output.log_mass is not None:
        output.logprobs.fill_(logprob)
        for part, value in enumerate(log_mass):
            output.log_mass[:, part] = value
    return output
