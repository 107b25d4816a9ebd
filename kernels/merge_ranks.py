"""The token of the whole vocabulary, of the draws of the ranks that share it: 16 bytes per row and rank (FlashSampling,
section 4.2 and Algorithm B.4).

    record[r] = score, id, logprob, log-mass            of the draw of rank r from its part of the head, float32 each
    w         = argmax over ranks of score              (ties: the lowest rank, which has the lowest ids)
    token     = id[w]
    log-mass  = logsumexp over ranks of log-mass
    logprob   = logprob[w] + log-mass[w] - log-mass

Every rank merges the same records in the same order. A merge of merges is the merge of all, and a rank without ids
contributes ``NO_RECORD``, which changes nothing. Ids are below 2**24, which float32 holds exactly: no integer travels
as the bits of a float, which an exchange that adds floats would change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, launch, next_power_of_2
from .params import SampleOutput

NUM_FIELDS = 4  # score, id, logprob, log-mass
NO_RECORD = (float("-inf"), 0.0, 0.0, float("-inf"))
MAX_RANKS = 1024
ROWS_PER_PROGRAM = 64


@triton.jit(do_not_specialize=["num_rows", "rank", "num_ranks"])
def pack_record_kernel(
    output,  # SampleOutput of this rank
    records_ptr,  # [N, B, NUM_FIELDS] f32, out
    num_rows,
    rank,
    num_ranks,
    # constexpr
    BLOCK_R: tl.constexpr,
    FIELDS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < num_rows
    score = tl.load(output.scores + rows, mask=inside, other=0.0)
    token = tl.load(output.token_ids + rows, mask=inside, other=0).to(tl.float32)
    logprob = tl.zeros([BLOCK_R], tl.float32)
    log_mass = tl.zeros([BLOCK_R], tl.float32)
    if output.logprobs is not None:
        logprob = tl.load(output.logprobs + rows, mask=inside, other=0.0)
        log_mass = tl.load(output.log_mass + rows, mask=inside, other=0.0)
    for other in tl.range(num_ranks):
        # An exchange that adds the ranks' buffers gets one record per rank: x + 0 is x, and -inf + 0 is -inf.
        place = records_ptr + (other * num_rows + rows) * FIELDS
        mine = other == rank
        tl.store(place, tl.where(mine, score, 0.0), mask=inside)
        tl.store(place + 1, tl.where(mine, token, 0.0), mask=inside)
        tl.store(place + 2, tl.where(mine, logprob, 0.0), mask=inside)
        tl.store(place + 3, tl.where(mine, log_mass, 0.0), mask=inside)


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
    scores = tl.load(places, mask=mask, other=float("-inf"))
    winner = tl.argmax(scores, axis=0)
    won = ranks[:, None] == winner[None, :]
    tokens = tl.load(places + 1, mask=mask, other=0.0)
    inside = rows < num_rows
    tl.store(output.scores + rows, tl.max(scores, axis=0), mask=inside)
    tl.store(output.token_ids + rows, tl.sum(tl.where(won, tokens, 0.0), axis=0).to(tl.int64), mask=inside)
    if output.logprobs is not None:
        log_mass = tl.load(places + 3, mask=mask, other=float("-inf"))
        logprob = tl.sum(tl.where(won, tl.load(places + 2, mask=mask, other=0.0), 0.0), axis=0)
        winners_mass = tl.sum(tl.where(won, log_mass, 0.0), axis=0)
        largest = tl.max(log_mass, axis=0)
        reference = tl.where(largest == float("-inf"), 0.0, largest)
        total = reference + tl.log(tl.sum(tl.exp(log_mass - reference[None, :]), axis=0))
        # The masses first: they may be thousands of times as large as a logprob.
        tl.store(output.logprobs + rows, logprob + (winners_mass - total), mask=inside)
        tl.store(output.log_mass + rows, total, mask=inside)


def pack_record(
    output: SampleOutput, rank: int = 0, num_ranks: int = 1, *, records: torch.Tensor | None = None
) -> torch.Tensor:
    """``[N, B, 4]`` float32: the record of this rank's draw at its place, zeros at those of the others.

    records: where to write it; allocated when None. Raises ValueError for a rank that is none, and for records of
    another shape, dtype or device.
    """
    num_rows, device = output.token_ids.shape[0], output.token_ids.device
    if not 1 <= num_ranks <= MAX_RANKS or not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank} of {num_ranks}; expected 0 to {num_ranks - 1}, of at most {MAX_RANKS}")
    shape = (num_ranks, num_rows, NUM_FIELDS)
    if records is None:
        records = torch.empty(shape, dtype=torch.float32, device=device)
    _check(records, shape, device)
    launch(
        pack_record_kernel,
        cdiv(num_rows, ROWS_PER_PROGRAM),
        (output, records, num_rows, rank, num_ranks),
        {"BLOCK_R": ROWS_PER_PROGRAM, "FIELDS": NUM_FIELDS},
        1,
        (device.index, output.logprobs is None),
    )
    return records


def merge_records(records: torch.Tensor, *, return_logprob: bool) -> SampleOutput:
    """The draw from the whole vocabulary, of the records of all ranks: ``[N, B, 4]`` float32, in the order of the ids.
    return_logprob: the ranks have drawn with it. Raises ValueError for records of another shape or dtype."""
    if records.dim() != 3 or not 1 <= records.shape[0] <= MAX_RANKS:
        raise ValueError(
            f"records is {tuple(records.shape)}; expected [N, B, {NUM_FIELDS}] of at most {MAX_RANKS} ranks"
        )
    num_ranks, num_rows, _ = records.shape
    _check(records, (num_ranks, num_rows, NUM_FIELDS), records.device)
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
    score, _, logprob, log_mass = NO_RECORD
    output = SampleOutput.empty(num_rows, device, return_logprob)
    output.token_ids.zero_()
    output.scores.fill_(score)
    if output.logprobs is not None and output.log_mass is not None:
        output.logprobs.fill_(logprob)
        output.log_mass.fill_(log_mass)
    return output


def _check(records: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if records.shape != shape or records.dtype is not torch.float32 or records.device != device:
        raise ValueError(
            f"records is {tuple(records.shape)} {records.dtype} on {records.device}; "
            f"expected {shape} torch.float32 on {device}"
        )
    if not records.is_contiguous():
        raise ValueError(f"records has strides {records.stride()}; expected it contiguous")
