"""The sampling parameters of a batch, gathered from a table on the device with a line per slot of an engine's pool of
requests. A request's line is written once, when it arrives; a batch of any requests in any order is then a list of
slots, and costs one launch.

A table is ``[S, 8]`` int32, 32 bytes per line. Line 0 belongs to padding: it also stands for slots outside the table.

    word 0    temperature, float32            word 4    top_p, float32
    word 1    top_k, int32                    word 5    min_p, float32
    word 2    seed, int64: the low half       word 6    ``Edit`` flags, int32
    word 3    seed: the high half             word 7    0, reserved

The values are those of ``BatchParams``, ``Truncation`` and ``LogitEdits``: all zeros is a greedy row.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import ClassVar

import torch
import triton
import triton.language as tl

from .config import cdiv
from .host_memory import memory_for_graphs
from .launch import launch
from .params import BatchParams, LogitEdits, Truncation, check_tensor

LINE_WORDS = 8
# A min-p that removes no token of a float32 softmax. Where min-p is given, top-p is of what top-k has left.
NO_MIN_P = 1e-37
NO_TOP_K = 1 << 30  # from here on a top-k is off in any vocabulary
ROWS_PER_PROGRAM = 32  # one per thread
STAGED_COLUMNS, STAGE_WARPS = 2048, 4  # of a row of hidden states at a time: 16 values per thread

LINE = struct.Struct("=fiqffi4x")  # ``pack_line``
_FIELDS = (("temperature", "f"), ("top_k", "i"), ("seed", "q"), ("top_p", "f"), ("min_p", "f"), ("edits", "i"))
_EXPECTED = {"f": "a number", "i": "an int32", "q": "an int64"}
_NO_MIN_P = tl.constexpr(NO_MIN_P)
_NO_TOP_K = tl.constexpr(NO_TOP_K)


@dataclasses.dataclass(frozen=True, eq=False)
class RowBuffers:
    """Memory for the parameters of a batch, at addresses that stay: captured graphs read it.

    ``[R]`` each, on one device, contiguous, at a multiple of 16 bytes. temperature, top_p, min_p: float32. top_k, edits
    (``Edit`` flags): int32. seed, position: int64. The first rows are those of the last batch; later ones are older.

    Raises ValueError for another dtype, shape, layout or device.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    edits: torch.Tensor

    DTYPES: ClassVar[dict[str, torch.dtype]] = {
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "min_p": torch.float32,
        "seed": torch.int64,
        "position": torch.int64,
        "edits": torch.int32,
    }
    REMEMBERED_SIZES: ClassVar[int] = 64

    def __post_init__(self) -> None:
        num_rows = self.temperature.numel()
        for name, dtype in self.DTYPES.items():
            tensor = getattr(self, name)
            check_tensor(name, tensor, (num_rows,), dtype, self.temperature)
            if tensor.data_ptr() % 16:
                raise ValueError(f"{name} is at address {tensor.data_ptr()}; expected a multiple of 16")

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> RowBuffers:
        """Buffers for batches of up to ``rows`` rows: zeros, which are greedy rows without truncation and edits."""
        return cls(**{name: torch.zeros(rows, dtype=dtype, device=device) for name, dtype in cls.DTYPES.items()})

    @functools.cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The buffers in the order of ``DTYPES``."""
        return tuple(getattr(self, name) for name in self.DTYPES)

    @functools.cached_property
    def capacity(self) -> int:
        """The rows of the largest batch that fits."""
        return self.temperature.shape[0]

    @functools.cached_property
    def _views(self) -> dict[int, tuple[torch.Tensor, ...]]:
        return {}

    def params(
        self,
        rows: int,
        *,
        truncated: bool,
        max_top_k: int | None = None,
        greedy: bool = False,
        edits: LogitEdits | None = None,
        distribution_only: bool = False,
    ) -> BatchParams:
        """The parameters of the first ``rows`` rows: views, no copies, no kernel.

        truncated: with the rows' top-k, top-p and min-p; without, these are left out. max_top_k: as in ``Truncation``.
        greedy, distribution_only: as ``all_greedy`` and ``distribution_only`` in ``BatchParams``. edits: penalties,
        mask and bias of the batch; where they have no flags per row, they get those of the buffers.

        Raises ValueError for more rows than there are.
        """
        views = self._views.get(rows)
        if views is None:
            if not 0 <= rows <= self.capacity:
                raise ValueError(f"rows is {rows}; expected 0 to the buffers' {self.capacity}")
            if len(self._views) >= self.REMEMBERED_SIZES:
                del self._views[next(iter(self._views))]
            views = self._views[rows] = tuple(tensor[:rows] for tensor in self.tensors)
        temperature, top_k, top_p, min_p, seed, position, flags = views
        if edits is not None and edits.rows is None:
            edits = dataclasses.replace(edits, rows=flags)
        truncation = Truncation(top_k, top_p, min_p, max_top_k) if truncated else None
        return BatchParams(temperature, seed, position, truncation, edits, greedy, distribution_only)


@triton.jit
def _gather(
    rows,  # [BLOCK_R] i32
    table_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    edits_ptr,
    num_rows,
    num_written,
    num_slots,
    nodes,
    drafts,
    given,
):
    inside = rows < num_rows
    position = tl.load(positions_ptr + rows, mask=inside, other=0)
    slot = tl.load(slots_ptr + rows // nodes, mask=inside, other=0)
    slot = tl.where((slot >= 0) & (slot < num_slots), slot, 0)
    # Two loads of 16 bytes per line, as pairs of 8.
    line = table_ptr.to(tl.pointer_type(tl.int64)) + slot * 4
    pair = line[:, None] + tl.arange(0, 2)[None, :]
    head, seed = tl.split(tl.load(pair))
    limits, tail = tl.split(tl.load(pair + 2))

    top_k = (head >> 32).to(tl.int32)
    top_p = limits.to(tl.int32).to(tl.float32, bitcast=True)
    min_p = (limits >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    # The verification of drafts ignores min-p, and takes top-p of what top-k has left.
    has_both = (top_p != 1.0) & (top_k >= 1) & (top_k < _NO_TOP_K)
    min_p = tl.where(drafts != 0, tl.where(has_both, _NO_MIN_P, 0.0), min_p)

    written = rows < num_written  # those behind the batch have line 0
    tl.store(temperature_ptr + rows, head.to(tl.int32).to(tl.float32, bitcast=True), mask=written)
    tl.store(top_k_ptr + rows, top_k, mask=written)
    tl.store(top_p_ptr + rows, top_p, mask=written)
    tl.store(min_p_ptr + rows, min_p, mask=written)
    tl.store(seed_ptr + rows, seed, mask=written)
    tl.store(position_ptr + rows, position, mask=written)
    tl.store(edits_ptr + rows, tail.to(tl.int32) & given, mask=written)


@triton.jit
def _write(table_ptr, slots_ptr, lines_ptr, places, num_lines, num_slots, WORDS: tl.constexpr):
    slot = tl.load(slots_ptr + places, mask=places < num_lines, other=-1)
    words = tl.arange(0, WORDS)[None, :]
    mask = ((slot >= 0) & (slot < num_slots))[:, None]
    line = tl.load(lines_ptr + places[:, None] * WORDS + words, mask=mask)
    tl.store(table_ptr + slot[:, None] * WORDS + words, line, mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "num_written", "num_slots", "nodes", "drafts", "given"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def gather_rows_kernel(
    table_ptr,  # [S, 8] i32
    slots_ptr,  # [B] i64
    positions_ptr,  # [B * nodes] i64
    temperature_ptr,  # [B * nodes] f32, out, and so the rest
    top_k_ptr,  # i32
    top_p_ptr,  # f32
    min_p_ptr,  # f32
    seed_ptr,  # i64
    position_ptr,  # i64
    edits_ptr,  # i32
    num_rows,  # B * nodes
    num_written,
    num_slots,
    nodes,
    drafts,
    given,
    # constexpr
    BLOCK_R: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    _gather(
        rows,
        table_ptr,
        slots_ptr,
        positions_ptr,
        temperature_ptr,
        top_k_ptr,
        top_p_ptr,
        min_p_ptr,
        seed_ptr,
        position_ptr,
        edits_ptr,
        num_rows,
        num_written,
        num_slots,
        nodes,
        drafts,
        given,
    )


@triton.jit(do_not_specialize=["num_lines", "num_slots"], do_not_specialize_on_alignment=["slots_ptr", "lines_ptr"])
def write_rows_kernel(
    table_ptr,  # [S, 8] i32, out
    slots_ptr,  # [N] i64
    lines_ptr,  # [N, 8] i32
    num_lines,
    num_slots,
    # constexpr
    BLOCK_R: tl.constexpr,
    WORDS: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    _write(table_ptr, slots_ptr, lines_ptr, places, num_lines, num_slots, WORDS)


@triton.jit(do_not_specialize=["num_slots", "num_staged"])
def stage_rows_kernel(
    batch_ptr,  # [8] i64: ``StagedBatch``
    table_ptr,  # [S, 8] i32
    stage_ptr,  # [R, D], out
    temperature_ptr,  # [R] f32, out, and so the rest
    top_k_ptr,  # i32
    top_p_ptr,  # f32
    min_p_ptr,  # f32
    seed_ptr,  # i64
    position_ptr,  # i64
    edits_ptr,  # i32
    num_slots,
    num_staged,  # R
    width,  # D
    # constexpr
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Program 0 writes the new lines and gathers the parameters, each of the others copies one row of hidden states."""
    num_rows = tl.load(batch_ptr).to(tl.int32)
    if tl.program_id(0) == 0:
        num_lines = tl.load(batch_ptr + 4).to(tl.int32)
        new_slots = tl.load(batch_ptr + 5).to(tl.pointer_type(tl.int64))
        new_lines = tl.load(batch_ptr + 6).to(tl.pointer_type(tl.int32))
        for start in range(0, num_lines, BLOCK_R):
            _write(table_ptr, new_slots, new_lines, start + tl.arange(0, BLOCK_R), num_lines, num_slots, WORDS)
        tl.debug_barrier()  # lines that were written are gathered by other threads
        _gather(
            tl.arange(0, BLOCK_R),
            table_ptr,
            tl.load(batch_ptr + 2).to(tl.pointer_type(tl.int64)),
            tl.load(batch_ptr + 3).to(tl.pointer_type(tl.int64)),
            temperature_ptr,
            top_k_ptr,
            top_p_ptr,
            min_p_ptr,
            seed_ptr,
            position_ptr,
            edits_ptr,
            num_rows,
            num_staged,
            num_slots,
            1,
            0,
            0,
        )
    else:
        row = tl.program_id(0) - 1
        if row < num_rows:
            hidden = tl.load(batch_ptr + 1).to(tl.pointer_type(stage_ptr.dtype.element_ty))
            hidden = tl.multiple_of(hidden, 16) + row * width
            for start in range(0, width, BLOCK_D):
                column = start + tl.arange(0, BLOCK_D)
                values = tl.load(hidden + column, mask=column < width)
                tl.store(stage_ptr + row * width + column, values, mask=column < width)


def gather_rows(
    table: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    out: RowBuffers,
    *,
    nodes: int = 1,
    drafts: bool = False,
    edits: int = 0,
    rows: int | None = None,
) -> None:
    """Write the parameters of a batch into the first ``B * nodes`` rows of ``out``, row r from line
    ``slots[r // nodes]``, and line 0 into those behind them, ``rows`` in all. Later rows are not touched.

    table: ``[S, 8]`` int32. slots: ``[B]`` int64; line 0 is read for those outside of the table. positions:
    ``[B * nodes]`` int64, copied. nodes: rows per slot. drafts: the rows are nodes of trees of drafts,
    whose verification ignores min-p, and takes top-p of what top-k has left. edits: the ``Edit`` flags that this step
    gives; a row keeps no other. rows: ``B * nodes`` or more; when None, that many.

    Raises ValueError for another shape, dtype, layout or device, and where ``out`` has fewer rows.
    """
    device = table.device
    _check_table(table)
    if slots.dtype is not torch.int64 or slots.dim() != 1 or slots.device != device or not slots.is_contiguous():
        check_tensor("slots", slots, (slots.numel(),), torch.int64, table)
    if nodes < 1:
        raise ValueError(f"nodes is {nodes}; expected 1 or more")
    num_rows = slots.shape[0] * nodes
    if (
        positions.dtype is not torch.int64
        or positions.shape != (num_rows,)
        or positions.device != device
        or not positions.is_contiguous()
    ):
        check_tensor("positions", positions, (num_rows,), torch.int64, table)
    num_written = num_rows if rows is None else rows
    if num_written < num_rows:
        raise ValueError(f"rows is {rows}; expected {num_rows} or more, the rows of the batch")
    if num_written > out.capacity or out.temperature.device != device:
        raise ValueError(
            f"out has {out.capacity} rows on {out.temperature.device}; expected {num_written} or more on {device}"
        )
    if num_written == 0:
        return
    launch(
        gather_rows_kernel,
        cdiv(num_written, ROWS_PER_PROGRAM),
        (table, slots, positions, *out.tensors, num_rows, num_written, table.shape[0], nodes, int(drafts), int(edits)),
        {"BLOCK_R": ROWS_PER_PROGRAM},
        1,
        (device.index,),
    )


def write_rows(table: torch.Tensor, slots: torch.Tensor, lines: torch.Tensor) -> None:
    """Write lines of ``pack_line`` into the table, in one launch on the current stream.

    table: ``[S, 8]`` int32. slots: ``[N]`` int64, different from each other; a line for a slot outside of the table is
    dropped. lines: ``[N, 8]`` int32. Both may be in pinned host memory, which must stay as it is until the launch has
    ended; Triton refuses other host memory.

    Raises ValueError for another shape, dtype, layout or device.
    """
    _check_table(table)
    num_lines = slots.numel()
    for name, tensor, shape, dtype in (
        ("slots", slots, (num_lines,), torch.int64),
        ("lines", lines, (num_lines, LINE_WORDS), torch.int32),
    ):
        elsewhere = tensor.device != table.device and tensor.device.type != "cpu"
        if tensor.dtype is not dtype or tensor.shape != shape or elsewhere or not tensor.is_contiguous():
            check_tensor(name, tensor, shape, dtype, table)
            raise ValueError(f"{name} has strides {tensor.stride()}; expected it contiguous")
    if num_lines == 0:
        return
    launch(
        write_rows_kernel,
        cdiv(num_lines, ROWS_PER_PROGRAM),
        (table, slots, lines, num_lines, table.shape[0]),
        {"BLOCK_R": ROWS_PER_PROGRAM, "WORDS": LINE_WORDS},
        1,
        (table.device.index,),
    )


class StagedBatch:
    """The batch that ``stage_rows`` reads, as words in host memory: a captured graph with that launch is told its next
    batch by ``set``. The words must stay as they are until the graph has run.

    words: ``[8]`` int64, pinned where the device is a GPU: rows; addresses of the hidden states, slots and positions;
    the number of new lines; addresses of their slots and of the lines.
    """

    _WORDS = struct.Struct("=7q8x")

    def __init__(self, device: torch.device) -> None:
        self.words = memory_for_graphs(self, self._WORDS.size // 8, torch.int64, device)
        self._bytes = memoryview(self.words.numpy().data).cast("B")

    def set(
        self,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        new: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """The next batch. hidden: ``[B, D]``, of the stage's dtype, D and device. slots, positions: ``[B]`` int64. All
        three must stay until the launch has ended. new: the number of new lines, the address of their slots (``[N]``
        int64) and that of the lines (``[N, 8]`` int32), in memory that the device reads.

        Raises ValueError for another shape, dtype or layout.
        """
        (rows, _), place, device, int64 = hidden.shape, hidden.data_ptr(), hidden.device, torch.int64
        shape = (rows,)
        if (
            slots.dtype is not int64
            or positions.dtype is not int64
            or slots.shape != shape
            or positions.shape != shape
            or slots.device != device
            or positions.device != device
            or not slots.is_contiguous()
            or not positions.is_contiguous()
        ):
            check_tensor("slots", slots, shape, int64, hidden)
            check_tensor("positions", positions, shape, int64, hidden)
        if not hidden.is_contiguous() or place % 16:
            raise ValueError(
                f"hidden has strides {hidden.stride()} at address {place}; expected it contiguous, at a multiple of 16"
            )
        self._WORDS.pack_into(self._bytes, 0, rows, place, slots.data_ptr(), positions.data_ptr(), *new)


def stage_rows(batch: StagedBatch, table: torch.Tensor, stage: torch.Tensor, out: RowBuffers) -> None:
    """Bring the batch to places that captured graphs read, in one launch: its new lines into the table, its hidden
    states into the first rows of the stage, and the parameters of its rows, from their lines, into ``out``, with line 0
    behind them up to R rows. Later rows of the stage are not touched.

    table: ``[S, 8]`` int32. stage: ``[R, D]``, R at most 32; the batch has no more rows. Edits are left out.

    Raises ValueError for another shape, dtype, layout or device, and where ``out`` has fewer rows.
    """
    _check_table(table)
    rows, width = stage.shape
    is_placed = stage.is_contiguous() and stage.data_ptr() % 16 == 0 and stage.device == table.device
    if not 1 <= rows <= ROWS_PER_PROGRAM or not is_placed:
        raise ValueError(
            f"stage is {tuple(stage.shape)} with strides {stage.stride()} at address {stage.data_ptr()} on "
            f"{stage.device}; expected contiguous [1 to {ROWS_PER_PROGRAM}, D] on {table.device}, at a multiple of 16"
        )
    if rows > out.capacity or out.temperature.device != table.device:
        raise ValueError(
            f"out has {out.capacity} rows on {out.temperature.device}; expected {rows} or more on {table.device}"
        )
    launch(
        stage_rows_kernel,
        1 + rows,
        (batch.words, table, stage, *out.tensors, table.shape[0], rows, width),
        {"BLOCK_R": ROWS_PER_PROGRAM, "BLOCK_D": STAGED_COLUMNS, "WORDS": LINE_WORDS},
        STAGE_WARPS,
        (table.device.index, stage.dtype, width % 16 == 0, width == 1),
    )


def pack_line(temperature: float, top_k: int, seed: int, top_p: float, min_p: float, edits: int) -> bytes:
    """The line of one request. top_k, edits: int32. seed: int64. A number beyond float32 is infinite.

    Raises ValueError for a value of another type or range.
    """
    values = (temperature, top_k, seed, top_p, min_p, edits)
    try:
        return LINE.pack(*values)
    except (struct.error, OverflowError):
        return b"".join(_pack_field(*field) for field in zip(_FIELDS, values, strict=True)) + bytes(4)


def _pack_field(field: tuple[str, str], value: float) -> bytes:
    name, letter = field
    try:
        return struct.pack(f"={letter}", value)
    except OverflowError:  # finite, and beyond float32
        return struct.pack("=f", float("inf") if value > 0 else float("-inf"))
    except struct.error:
        raise ValueError(f"{name} is {value!r}; expected {_EXPECTED[letter]}") from None


def _check_table(table: torch.Tensor) -> None:
    shape = table.shape
    if (
        len(shape) != 2
        or shape[1] != LINE_WORDS
        or shape[0] < 1
        or table.dtype is not torch.int32
        or not table.is_contiguous()
        or table.data_ptr() % 16
    ):
        raise ValueError(
            f"table is {tuple(shape)} {table.dtype} with strides {table.stride()} at address {table.data_ptr()}; "
            f"expected contiguous [S, {LINE_WORDS}] torch.int32 of one line or more, at a multiple of 16"
        )
