"""Exchanges between the ranks of one node by kernels alone, through memory that all of them read and write.

``exchange_records``  each rank writes its records to all ranks, waits for those of the others, and merges them
                      (``merge_ranks.py``): FlashSampling, section 4.2 and Algorithm B.4
``exchange_rows``     each rank has the logits of its part of the vocabulary, and reads its rows of the others' parts
``exchange_first_logits``  the same of the first ids of each part, which all ranks read
``exchange_logprobs`` each rank has packed its logprobs (``merge_logprobs.py``), and reads those of all ranks

One launch each, or two, which a CUDA graph may hold: the numbers of the exchanges are counted on the device. Every rank
makes the same exchanges, of as many rows, in the same order, each from one stream. A rank waits for the others as long
as it takes.

Why nothing is overwritten that is still read: records have two buffers, which exchanges take in turn. A rank writes
those of exchange n + 2 only after it has received all records of exchange n + 1, and each rank sends these only after
it has read those of exchange n. Logits have one buffer, and so have logprobs: ``exchange_records`` has to follow
``exchange_rows``, ``exchange_first_logits`` and ``exchange_logprobs`` before a rank writes its next ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .config import GROUP_SIZE, cdiv, next_power_of_2
from .launch import compiling_only, launch
from .merge_logprobs import MAX_FIELDS
from .merge_ranks import MAX_RANKS, NUM_FIELDS, ROWS_PER_PROGRAM, load_records, store_merged, store_records
from .params import SampleOutput
from .workspace import MAX_TOP_LOGPROBS

_ALIGNMENT = 128  # bytes: each part of a region starts at a multiple
COLUMNS_PER_PROGRAM = 4096  # columns of logits that one program copies
COPYING_WARPS = 4


@triton.jit
def address_of(addresses_ptr, rank, like):
    """The address of one rank's part, as a pointer to elements of the type of ``like``'s."""
    pointer = tl.load(addresses_ptr + rank).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(pointer, 16)


@triton.jit
def tell(flags_ptr, place, number, num_ranks, like):
    """Tell every rank that what this one has written for exchange ``number`` is complete."""
    tl.debug_barrier()  # all threads have written
    for other in tl.range(num_ranks):
        tl.atomic_xchg(address_of(flags_ptr, other, like) + place, number, sem="release", scope="sys")


@triton.jit
def wait_for(flag_ptr, number):
    """Wait until the rank that writes to this flag has told exchange ``number``."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") < number:
        pass


@triton.jit(do_not_specialize=["first", "num_drawn", "num_rows", "max_rows", "rank", "num_ranks"])
def exchange_records_kernel(
    drawn,  # SampleOutput of this rank, with the rows from ``first`` on
    output,  # SampleOutput, out
    records_ptr,  # [N] i64, addresses of [2, N, max_rows, NUM_FIELDS] f32 on each rank
    flags_ptr,  # [N] i64, addresses of [programs, N] i64 on each rank
    exchanges_ptr,  # [programs] i64, how many there have been
    first,
    num_drawn,
    num_rows,
    max_rows,
    rank,
    num_ranks,
    # constexpr
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FIELDS: tl.constexpr,
):
    program = tl.program_id(0)
    rows = program * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < num_rows
    number = tl.load(exchanges_ptr + program) + 1
    turn = (number % 2).to(tl.int32)
    places = rows - first
    record = load_records(drawn, places, (places >= 0) & (places < num_drawn))
    for other in tl.range(num_ranks):
        mine = address_of(records_ptr, other, drawn.scores) + ((turn * num_ranks + rank) * max_rows + rows) * FIELDS
        store_records(mine, record, inside)
    tell(flags_ptr, program * num_ranks + rank, number, num_ranks, exchanges_ptr)
    flags = address_of(flags_ptr, rank, exchanges_ptr) + program * num_ranks
    for other in tl.range(num_ranks):
        wait_for(flags + other, number)
    ranks = tl.arange(0, BLOCK_N)
    here = address_of(records_ptr, rank, drawn.scores)
    everyones = here + ((turn * num_ranks + ranks[:, None]) * max_rows + rows[None, :]) * FIELDS
    store_merged(everyones, (ranks < num_ranks)[:, None] & inside[None, :], output, rows, inside)
    tl.store(exchanges_ptr + program, number)


@triton.jit(do_not_specialize=["rank", "num_ranks"])
def tell_logits_kernel(
    flags_ptr,  # [N] i64, addresses of [N] i64 on each rank
    exchanges_ptr,  # [1] i64, how many there have been
    rank,
    num_ranks,
):
    number = tl.load(exchanges_ptr) + 1
    tell(flags_ptr, rank, number, num_ranks, exchanges_ptr)
    tl.store(exchanges_ptr, number)


@triton.jit(do_not_specialize=["first", "num_ranks", "rank"])
def copy_rows_kernel(
    logits_ptr,  # [N] i64, addresses of [max_rows, stride] on each rank, logits or other numbers
    flags_ptr,  # [N] i64, addresses of [N] i64 on each rank
    exchanges_ptr,  # [1] i64, this one counted
    rows_ptr,  # [R, row_stride], out
    stride,
    row_stride,
    width,
    first,
    rank,
    num_ranks,
    # constexpr
    BLOCK: tl.constexpr,
):
    chunks = tl.cdiv(width, BLOCK)
    program = tl.program_id(0)
    chunk = program % chunks
    other = program // chunks % num_ranks
    row = (program // chunks // num_ranks).to(tl.int64)
    wait_for(address_of(flags_ptr, rank, exchanges_ptr) + other, tl.load(exchanges_ptr))
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = address_of(logits_ptr, other, rows_ptr) + (first + row).to(tl.int64) * stride
    values = tl.load(source + columns, mask=inside, volatile=True)
    tl.store(rows_ptr + row * row_stride + other * width + columns, values, mask=inside)


class PeerMemory:
    """A region of memory of each rank, which all ranks can read and write, and what this rank keeps beside it.

    regions: those of all ranks, as this process sees them, ``[num_bytes(...)]`` uint8, zeros at first. max_rows: of the
    largest exchange. width: logits of a row on each rank; dtype: of these. Raises ValueError for other regions.

    records, record_flags, logits_flags, logits, logprobs: ``[N]`` int64, addresses on each rank. record_exchanges,
    logits_exchanges: int64, how many there have been; the latter of logits and logprobs. own_logits: ``[max_rows,
    width]``, where this rank writes its logits before ``exchange_rows``. rows: what that returns. own_logprobs:
    ``[max_rows, MAX_FIELDS]`` float32, where it packs its logprobs before ``exchange_logprobs``. lists: scratch of
    ``merge_logprobs``, int32.
    """

    def __init__(
        self, regions: Sequence[torch.Tensor], rank: int, max_rows: int, width: int, dtype: torch.dtype
    ) -> None:
        num_ranks = len(regions)
        if not 1 <= num_ranks <= MAX_RANKS or not 0 <= rank < num_ranks:
            raise ValueError(f"rank is {rank} of {num_ranks}; expected 0 to {num_ranks - 1}, of at most {MAX_RANKS}")
        device, wanted = regions[rank].device, self.num_bytes(num_ranks, max_rows, width, dtype)
        for region in regions:
            if region.shape != (wanted,) or region.dtype is not torch.uint8 or region.data_ptr() % _ALIGNMENT:
                raise ValueError(
                    f"a region is {tuple(region.shape)} {region.dtype} at {region.data_ptr()}; expected ({wanted},) "
                    f"torch.uint8 at a multiple of {_ALIGNMENT}"
                )
        self.rank, self.num_ranks, self.max_rows, self.width = rank, num_ranks, max_rows, width
        self._regions = list(regions)
        offsets, _ = _layout(num_ranks, max_rows, width, dtype)
        addresses = [[region.data_ptr() + offset for region in regions] for offset in offsets]
        self.records, self.record_flags, self.logits_flags, self.logits, self.logprobs = torch.tensor(
            addresses, device=device
        )
        self.record_exchanges = torch.zeros(cdiv(max_rows, ROWS_PER_PROGRAM), dtype=torch.int64, device=device)
        self.logits_exchanges = torch.zeros(1, dtype=torch.int64, device=device)
        shard, padded = regions[rank][offsets[3] :].view(dtype), _row_stride(width)
        self.own_logits = shard[: max_rows * padded].view(max_rows, padded)[:, :width]
        packed = regions[rank][offsets[4] :].view(torch.float32)
        self.own_logprobs = packed[: max_rows * MAX_FIELDS].view(max_rows, MAX_FIELDS)
        self._joined = packed.new_empty(max_rows * num_ranks * MAX_FIELDS)
        self.lists = torch.empty(max_rows * 2 * MAX_TOP_LOGPROBS, dtype=torch.int32, device=device)
        # The reader is compiled for rows that start at multiples of 16 elements.
        self.rows = shard.new_empty(cdiv(max_rows, num_ranks), _row_stride(width * num_ranks))[:, : width * num_ranks]
        # Groups of ids lie on two ranks where a part ends within one.
        self._first = shard.new_empty(max_rows if width % GROUP_SIZE else 0, num_ranks * GROUP_SIZE)

    @staticmethod
    def num_bytes(num_ranks: int, max_rows: int, width: int, dtype: torch.dtype) -> int:
        """The size of a region."""
        return _layout(num_ranks, max_rows, width, dtype)[1]

    @property
    def total_bytes(self) -> int:
        """The device memory that this rank holds."""
        beside = self.rows.untyped_storage().nbytes() + self._first.nbytes + self._joined.nbytes + self.lists.nbytes
        return self._regions[self.rank].nbytes + beside


def exchange_records(memory: PeerMemory, drawn: SampleOutput, first: int, num_rows: int) -> SampleOutput:
    """The draw from the whole vocabulary, of ``num_rows`` rows. drawn: this rank's, of the rows from ``first`` on.
    Raises ValueError for rows that do not fit."""
    num_drawn, device = drawn.token_ids.shape[0], drawn.token_ids.device
    if not 0 <= first <= num_rows - num_drawn or num_rows > memory.max_rows:
        raise ValueError(
            f"first is {first} for {num_drawn} rows of {num_rows}; expected them among at most {memory.max_rows}"
        )
    return_logprob = drawn.logprobs is not None
    output = SampleOutput.empty(num_rows, device, return_logprob)
    launch(
        exchange_records_kernel,
        cdiv(num_rows, ROWS_PER_PROGRAM),
        (
            *(drawn, output, memory.records, memory.record_flags, memory.record_exchanges),
            *(first, num_drawn, num_rows, memory.max_rows, memory.rank, memory.num_ranks),
        ),
        {"BLOCK_N": next_power_of_2(memory.num_ranks), "BLOCK_R": ROWS_PER_PROGRAM, "FIELDS": NUM_FIELDS},
        1,
        (device.index, return_logprob),
    )
    return output


def exchange_rows(memory: PeerMemory, first: int, num_rows: int) -> torch.Tensor:
    """``[num_rows, N * width]``: the logits of all ranks of the rows from ``first`` on, this rank's own in
    ``memory.own_logits``. They stay until the next exchange. Raises ValueError for rows that do not fit."""
    tell_logits(memory)
    return copy_rows(memory, first, num_rows)


def tell_logits(memory: PeerMemory) -> None:
    """Tell every rank that this one's logits are complete."""
    arguments = (memory.logits_flags, memory.logits_exchanges, memory.rank, memory.num_ranks)
    launch(tell_logits_kernel, 1, arguments, {}, 1, (memory.rows.device.index,))


def copy_rows(memory: PeerMemory, first: int, num_rows: int) -> torch.Tensor:
    """``exchange_rows``, once this rank has told the others that its logits are complete."""
    most = len(memory.rows)
    if not 1 <= num_rows <= most or not 0 <= first <= memory.max_rows - num_rows:
        raise ValueError(f"first is {first} for {num_rows} rows; expected at most {most} among {memory.max_rows}")
    return _copied(memory, memory.logits, memory.own_logits.stride(0), memory.rows[:num_rows], memory.width, first)


def exchange_first_logits(memory: PeerMemory, num_rows: int) -> torch.Tensor:
    """``[N, num_rows, GROUP_SIZE]``: the first logits of all ranks, this rank's own in ``memory.own_logits``, where a
    part is no multiple of ``GROUP_SIZE``. They stay until the next exchange. Raises ValueError for rows that do not
    fit."""
    tell_logits(memory)
    return copy_first_logits(memory, num_rows)


def copy_first_logits(memory: PeerMemory, num_rows: int) -> torch.Tensor:
    """``exchange_first_logits``, once this rank has told the others that its logits are complete."""
    if not 0 <= num_rows <= len(memory._first):
        raise ValueError(f"num_rows is {num_rows}; expected at most {len(memory._first)}, 0 of whole groups")
    rows = memory._first[:num_rows]
    if num_rows:
        _copied(memory, memory.logits, memory.own_logits.stride(0), rows, GROUP_SIZE, 0)
    return rows.view(num_rows, memory.num_ranks, GROUP_SIZE).transpose(0, 1)


def exchange_logprobs(memory: PeerMemory, num_rows: int, num_fields: int) -> torch.Tensor:
    """``[N, num_rows, num_fields]`` float32, what all ranks have packed of the first rows; this rank's own is in
    ``memory.own_logprobs``, in so many fields. They stay until the next exchange. Raises ValueError for numbers that do
    not fit."""
    tell_logits(memory)
    return copy_logprobs(memory, num_rows, num_fields)


def copy_logprobs(memory: PeerMemory, num_rows: int, num_fields: int) -> torch.Tensor:
    """``exchange_logprobs``, once this rank has told the others that its logprobs are complete."""
    if not 0 <= num_rows <= memory.max_rows or not 1 <= num_fields <= MAX_FIELDS:
        raise ValueError(
            f"{num_rows} rows of {num_fields} fields; expected at most {memory.max_rows} rows of {MAX_FIELDS}"
        )
    rows = memory._joined[: num_rows * memory.num_ranks * num_fields].view(num_rows, memory.num_ranks * num_fields)
    if num_rows:
        _copied(memory, memory.logprobs, memory.own_logprobs.stride(0), rows, num_fields, 0)
    return rows.view(num_rows, memory.num_ranks, num_fields).transpose(0, 1)


def _copied(
    memory: PeerMemory, addresses: torch.Tensor, stride: int, rows: torch.Tensor, width: int, first: int
) -> torch.Tensor:
    """``rows``, filled with ``width`` numbers of each rank, of what is at ``addresses`` from row ``first`` on."""
    row_stride = rows.stride(0)
    launch(
        copy_rows_kernel,
        len(rows) * memory.num_ranks * cdiv(width, COLUMNS_PER_PROGRAM),
        (
            *(addresses, memory.logits_flags, memory.logits_exchanges, rows, stride, row_stride),
            *(width, first, memory.rank, memory.num_ranks),
        ),
        {"BLOCK": COLUMNS_PER_PROGRAM},
        COPYING_WARPS,
        (
            rows.device.index,
            rows.dtype,
            *(number % 16 == 0 for number in (stride, row_stride, width)),
            *(number == 1 for number in (row_stride, width)),
        ),
    )
    return rows


def compile_exchanges(region: torch.Tensor, num_ranks: int, max_rows: int, width: int, dtype: torch.dtype) -> None:
    """Compile what ranks launch, and run none of it: a rank that fails at that must not have begun to exchange. region:
    this rank's."""
    memory = PeerMemory([region] * num_ranks, 0, max_rows, width, dtype)
    with compiling_only():
        for return_logprob in (True, False):
            exchange_records(memory, SampleOutput.empty(1, region.device, return_logprob), 0, 1)
        exchange_rows(memory, 0, 1)
        if width % GROUP_SIZE:
            exchange_first_logits(memory, 1)
        for num_fields in (MAX_FIELDS, MAX_FIELDS - 1):
            exchange_logprobs(memory, 1, num_fields)


def _row_stride(width: int) -> int:
    return cdiv(width, GROUP_SIZE) * GROUP_SIZE


def _layout(num_ranks: int, max_rows: int, width: int, dtype: torch.dtype) -> tuple[list[int], int]:
    """Offsets of records, flags of records, flags of logits, logits, and logprobs in a region; and its bytes."""
    programs = cdiv(max_rows, ROWS_PER_PROGRAM)
    offset, offsets = 0, []
    for size in (
        2 * num_ranks * max_rows * NUM_FIELDS * 4,
        programs * num_ranks * 8,
        num_ranks * 8,
        max_rows * _row_stride(width) * dtype.itemsize,
        max_rows * MAX_FIELDS * 4,
    ):
        offsets.append(offset)
        offset += cdiv(size, _ALIGNMENT) * _ALIGNMENT
    return offsets, offset
