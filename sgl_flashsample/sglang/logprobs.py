"""Logprobs beside those of the tokens: from SGLang's lists of a batch to the device, and back into its lists.

SGLang copies each tensor of these lists to the host by itself, two per row and step. Here the values of a batch are
copied at once, and a list has an object per row, which SGLang asks for its ``tolist`` as it asks a tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.host_memory import copy_words, memory_for_graphs
from ..kernels.top_logprobs import width_of
from ..logprobs import Logprobs, WantedLogprobs

# The values of a row: a part of ``PackedLogprobs``, the row there, and how many of its values, from the first on.
Place = tuple[int, int, int]
_LEAST_IDS = 8  # places for given ids, of which there are powers of two
_PATIENCE, _PAUSE = 10.0, 1e-5  # seconds
# Lists of LogitsProcessorOutput with an entry per row, in the order of ``PackedLogprobs.parts``.
_LISTS = ("next_token_top_logprobs_idx", "next_token_top_logprobs_val", "next_token_token_ids_logprobs_val")


class LogprobLayout(NamedTuple):
    """The facts that the launches of a graph depend on. top: likeliest ids of a row, up to the next width of the
    kernels. ids: places for given ids. original: as in ``WantedLogprobs``. tempered: with temperatures of their own."""

    top: int
    ids: int
    original: bool
    tempered: bool = False

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of the ``PackedLogprobs`` of this many rows."""
        return num_rows * (12 * self.top + 4 * self.ids)


@dataclasses.dataclass(eq=False)
class AskedLogprobs:
    """The logprobs that SGLang asks for in one step. top: likeliest ids, per row; empty where no fused row asks for
    them. ids: given ids, per row, None in a row without; empty where no fused row has any. native: rows of SGLang's
    sampler. temperatures: ``[B]`` float32, of the logprobs, where the draw has others."""

    layout: LogprobLayout
    top: Sequence[int]
    ids: Sequence[Sequence[int] | None]
    native: frozenset[int]
    temperatures: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        native: Sequence[int],
        top: Sequence[int] | None,
        ids: Sequence[Sequence[int] | None] | None,
        original: bool,
        temperatures: torch.Tensor | None = None,
    ) -> AskedLogprobs | None:
        """None where the fused rows ask for nothing beside the logprobs of their tokens, at the temperatures of the
        draw."""
        rows = frozenset(native)
        most = max((n for row, n in enumerate(top or ()) if row not in rows), default=0)
        given = max((len(one) for row, one in enumerate(ids or ()) if one is not None and row not in rows), default=-1)
        if most == 0 and given < 0 and not original and temperatures is None:
            return None
        width = 0 if given < 0 else max(_LEAST_IDS, 1 << max(0, given - 1).bit_length())
        layout = LogprobLayout(width_of(most) if most else 0, width, original, temperatures is not None)
        return cls(layout, (top or ()) if most else (), (ids or ()) if width else (), rows, temperatures)

    def same_as(self, other: AskedLogprobs | None) -> bool:
        """The device has been told the same."""
        return (
            other is not None
            and self.layout == other.layout
            and self.native == other.native
            and self.temperatures is other.temperatures
            and list(self.top) == list(other.top)
            and list(self.ids) == list(other.ids)
        )

    def repeated(self, times: int) -> AskedLogprobs:
        """The same of a batch in which each row stands so many times, one after the other: nodes of a tree."""
        again = self._repeated.get(times)
        if again is None:
            top = [n for n in self.top for _ in range(times)]
            ids = [one for one in self.ids for _ in range(times)]
            native = frozenset(row * times + place for row in self.native for place in range(times))
            again = self._repeated[times] = AskedLogprobs(self.layout, top, ids, native)
        return again

    @functools.cached_property
    def _repeated(self) -> dict[int, AskedLogprobs]:
        return {}

    def deliver(self, read: PackedLogprobs, logits_output: Any, *, keeps_tensors: bool) -> None:
        """Put the values into the lists of a LogitsProcessorOutput, those of SGLang's rows beside them.

        keeps_tensors: SGLang sends the lists to another process of a pipeline, as tensors.
        """
        if not (self.top or self.ids):
            return
        rows = read.clone() if keeps_tensors else HostCopy(read)
        for name, places in self._lists:
            self._fill(logits_output, name, rows.rows_at(places))
        if self.ids:
            logits_output.next_token_token_ids_logprobs_idx = [[] if one is None else one for one in self.ids]

    @functools.cached_property
    def _lists(self) -> list[tuple[str, list[Place]]]:
        """The lists to be filled, by name, and where the values of each row are."""
        lengths = self.top, self.top, [0 if ids is None else len(ids) for ids in self.ids]
        parts = enumerate(zip(_LISTS, lengths, strict=True))
        return [
            (name, list(zip(itertools.repeat(part), itertools.count(), of_rows)))
            for part, (name, of_rows) in parts
            if of_rows
        ]

    def _fill(self, logits_output: Any, name: str, values: list) -> None:
        """Set the list of this name, but for the rows of SGLang's sampler."""
        present: list | None = getattr(logits_output, name)
        if present is not None:
            for row in self.native:
                values[row] = present[row]
        setattr(logits_output, name, values)


class PackedLogprobs(NamedTuple):
    """The values of a step in one tensor: ids of the likeliest, their logprobs, logprobs of given ids. data: ``[rows *
    (12 top + 4 ids)]`` uint8. block: where a graph has copied them on the host; None where nothing has."""

    data: torch.Tensor
    rows: int
    top: int
    ids: int
    block: HostBlock | None = None

    @classmethod
    def of(cls, read: Logprobs) -> PackedLogprobs:
        top, of_ids = read.top, read.of_ids
        parts = [] if top is None else [top.token_ids, top.logprobs]
        parts += [] if of_ids is None else [of_ids]
        rows, width = len(read.of_tokens), 0 if top is None else top.token_ids.shape[1]
        data = [part.reshape(-1).view(torch.uint8) for part in parts]
        packed = torch.cat(data) if data else torch.empty(0, dtype=torch.uint8, device=read.of_tokens.device)
        return cls(packed, rows, width, 0 if of_ids is None else of_ids.shape[1])

    @classmethod
    def joined(cls, blocks: Sequence[PackedLogprobs]) -> PackedLogprobs:
        """The values of all rows of some blocks of a step, in their order."""
        parts = [
            part.reshape(-1).view(torch.uint8)
            for same in zip(*(b.parts() for b in blocks), strict=True)
            for part in same
        ]
        return cls(torch.cat(parts), sum(block.rows for block in blocks), blocks[0].top, blocks[0].ids)

    def select(self, rows: torch.Tensor) -> PackedLogprobs:
        """The values of these rows, ``[R]`` int64."""
        data = torch.cat([part[rows].reshape(-1).view(torch.uint8) for part in self.parts() if len(part)])
        return self._replace(data=data, rows=len(rows), block=None)

    def clone(self) -> PackedLogprobs:
        return self._replace(data=self.data.clone(), block=None)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids ``[rows, top]`` int64, their logprobs, and those of given ids, ``[rows, ids]``, float32 both: views."""
        sizes = [8 * self.rows * self.top, 4 * self.rows * self.top, 4 * self.rows * self.ids]
        ids, logprobs, of_ids = self.data.split(sizes)
        floats = (part.view(torch.float32).view(self.rows, -1) if len(part) else part for part in (logprobs, of_ids))
        return (ids.view(torch.int64).view(self.rows, -1) if len(ids) else ids, *floats)  # type: ignore[return-value]

    def rows_at(self, places: Sequence[Place]) -> list[torch.Tensor]:
        """Entries of SGLang's lists."""
        parts = self.parts()
        return [parts[part][row, :length] for part, row, length in places]


class HostBlock:
    """Host memory into which a graph copies the values of its step. num_bytes: ``LogprobLayout.num_bytes``."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device, self._num_words = device, num_bytes // 4
        self._words = memory_for_graphs(self, self._num_words + 2, torch.int32, device)
        memory = memoryview(self._words.numpy().data)
        self._numbers = memory[self._num_words :]  # of the last replay whose values have arrived, and of the last one
        self.data = memory.cast("B")
        self.reader: HostCopy | None = None  # of the values of the last replay, until it has read them
        copy_words(self._words[:-2], self._words, tells=True)  # loads the kernel, which a capture must not

    def fill(self, read: PackedLogprobs) -> PackedLogprobs:
        """The launch of the graph that copies the values; the same values with this block."""
        copy_words(read.data.view(torch.int32), self._words, tells=True)
        return read._replace(block=self)

    def expect_next(self) -> None:
        """Before each replay: what has not been read yet is read now."""
        if self.reader is not None:
            _ = self.reader.rows
        self.wait()
        self._numbers[1] = (self._numbers[1] + 1) % (1 << 31)

    def wait(self) -> None:
        """Until the values of the last replay have arrived, for which SGLang has mostly waited already."""
        deadline = time.monotonic() + _PATIENCE
        while self._numbers[0] != self._numbers[1]:
            if time.monotonic() > deadline:
                torch.cuda.synchronize(self._device)  # raises the error of a device that has failed
                raise RuntimeError(f"the logprobs of a step have not arrived in {_PATIENCE:.0f} s")
            time.sleep(_PAUSE)


class HostCopy:
    """The values of a step on their way to the host, copied on the current stream."""

    def __init__(self, read: PackedLogprobs) -> None:
        self._shape, self._block = (read.rows, read.top, read.ids), read.block
        self._arrived: torch.cuda.Event | None = None
        if self._block is not None:
            self._data = self._block.data
            self._block.reader = self
            return
        data = read.data.to("cpu", non_blocking=True, copy=True)  # from a GPU, into pinned memory
        self._data = data.numpy().data
        if read.data.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @functools.cached_property
    def rows(self) -> tuple[list[tuple], ...]:
        """The rows of each part, after they have arrived: SGLang has waited for later work of its stream by then.

        Tuples of numbers, which Python's garbage collector does not track. SGLang keeps two of them per row and step
        until the request ends; as lists they would make the collector look through the whole process time and again.
        """
        if self._block is not None:
            self._block.wait()
        elif self._arrived is not None:
            self._arrived.synchronize()
        rows, top, ids = self._shape
        parts, at = [], 0
        for row in (f"={top}q", f"={top}f", f"={ids}f"):
            end = at + rows * struct.calcsize(row)
            parts.append(list(struct.iter_unpack(row, self._data[at:end])) if end > at else [])
            at = end
        if self._block is not None:
            self._block.reader = None
        return tuple(parts)

    def rows_at(self, places: Sequence[Place]) -> list[HostRow]:
        """Entries of SGLang's lists, made without a call of Python for each."""
        return list(map(HostRow, zip(itertools.repeat(self), places)))


class HostRow(tuple[HostCopy, Place]):
    """The values of one row. An entry of SGLang's lists."""

    __slots__ = ()

    def tolist(self) -> tuple:
        copy, (part, row, length) = self
        return copy.rows[part][row][:length]


class LogprobInputs:
    """The counts, the given ids and the temperatures of a step's rows, where graphs read them. max_rows: of the largest
    batch."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.max_rows, self._device = max_rows, device
        self._counts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._temperatures = torch.ones(max_rows, dtype=torch.float32, device=device)
        self._ids: dict[int, torch.Tensor] = {}  # [max_rows, m], by m
        self._loaded: tuple[AskedLogprobs | None, int, WantedLogprobs] = (None, 0, WantedLogprobs())

    def load(self, asked: AskedLogprobs, num_rows: int) -> WantedLogprobs:
        """Bring what a step of ``num_rows`` rows asks for to its place, on the current stream; rows behind those of the
        batch ask for nothing."""
        layout, (loaded, rows, wanted) = asked.layout, self._loaded
        if asked is loaded and num_rows == rows:
            return wanted
        ids = None
        if layout.ids:
            ids = self._ids.get(layout.ids)
            if ids is None:
                ids = self._ids[layout.ids] = torch.full((self.max_rows, layout.ids), -1, device=self._device)
        if not (rows == num_rows and asked.same_as(loaded)):
            fused = [row not in asked.native for row in range(num_rows)]
            if layout.top:
                counts = [n if here else 0 for n, here in zip(asked.top, fused, strict=False)]
                self._copy(self._counts, counts + [0] * (num_rows - len(counts)))
            if ids is not None:
                lines = [list(one or ()) if here else [] for one, here in zip(asked.ids, fused, strict=False)]
                lines += [[]] * (num_rows - len(lines))
                self._copy(ids, [line + [-1] * (layout.ids - len(line)) for line in lines])
            if asked.temperatures is not None:
                self._temperatures[: len(asked.temperatures)].copy_(asked.temperatures)
        wanted = WantedLogprobs(
            layout.top,
            self._counts[:num_rows] if layout.top else None,
            None if ids is None else ids[:num_rows],
            layout.original,
            self._temperatures[:num_rows] if layout.tempered else None,
        )
        self._loaded = asked, num_rows, wanted
        return wanted

    def _copy(self, to: torch.Tensor, values: list) -> None:
        source = torch.tensor(values, dtype=to.dtype, pin_memory=to.is_cuda)
        to[: len(values)].copy_(source, non_blocking=True)
