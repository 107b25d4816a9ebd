"""The sampling parameters of all requests of a server in one table on the device, and their kinds on the host.

SGLang gives each request a slot of its pool while it runs, and every batch carries the slots of its rows on the device.
So the line of a request is written once, when it is scheduled, and a filter or a merge of a batch moves nothing.

Lines are queued on the host and written at the next draw, on the stream of that draw. The scheduling of a step may run
beside the draw of the step before: a write there could reach a row of the slot's last owner.
"""

from __future__ import annotations

import enum
import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..cpu_path import draws_in_host_memory, gather_rows_on_cpu
from ..kernels.gather_rows import (
    LINE,
    LINE_WORDS,
    RowBuffers,
    StagedBatch,
    gather_rows,
    pack_line,
    stage_rows,
    write_rows,
)
from ..kernels.params import Edit
from .arrivals import Arrivals, given_seed

logger = logging.getLogger("sgl_flashsample")

# Attributes of SGLang's SamplingBatchInfo: whether its sampler has to truncate.
NEED_FLAGS = ("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")
TOP_K_OFF = 1 << 30  # SGLang's TOP_K_ALL
# Bounds of top-k that batches are told apart by: the path of a batch depends on whether its largest top-k is small.
TOP_K_BOUNDS = (64, 128)
FIRST_SLOTS = 4096  # SGLang's default for the largest number of requests; the table grows where there are more
QUEUE = 8192  # lines that may be queued until their memory is used again
MAX_FACTS = 4096


class Row(NamedTuple):
    """The kind of a request: what the host has to know of a row. Requests of one kind share one object.

    reason: why it needs SGLang's sampler, or None. tempered: greedy with a temperature other than 1, which SGLang
    applies to its logprob only beside sampled rows. needs: ``NEED_FLAGS`` of this request alone. edits: what SGLang
    changes in its logits. seeded: it is drawn, and gave a seed, which must give the same tokens each time. top_k: the
    smallest of ``TOP_K_BOUNDS`` that its top-k does not exceed, else ``TOP_K_OFF``. keeps_going: it has
    ``min_new_tokens`` and a grammar.
    """

    reason: Reason | None
    greedy: bool
    tempered: bool
    needs: tuple[bool, bool, bool]
    edits: Edit
    seeded: bool
    top_k: int
    keeps_going: bool = False

    @property
    def truncated(self) -> bool:
        """The row has top-k, top-p or min-p; a greedy row has none."""
        return any(self.needs) and not self.greedy


class Reason(enum.StrEnum):
    """Why a row takes SGLang's sampler: the label ``reason`` of the metrics. ``docs/operate/status.md`` says what
    each means."""

    # Reasons of a request.
    CUSTOM_LOGIT_PROCESSOR = "custom_logit_processor"
    SAMPLING_MASK = "sampling_mask"
    BEAM_SEARCH = "beam_search"
    UNREADABLE = "unreadable"
    TOP_LOGPROBS = "top_logprobs"
    TOKEN_IDS_LOGPROBS = "token_ids_logprobs"
    GREEDY_LOGPROB_AT_TEMPERATURE = "greedy_logprob_at_temperature"
    # Reasons of a batch.
    INPUT_LOGPROBS = "input_logprobs"
    LOGITS_COMPUTED = "logits_computed"
    SAMPLING_OBSERVER = "sampling_observer"
    UNKNOWN_ROWS = "unknown_rows"
    POSITIONS = "positions"
    UNKNOWN_ARGUMENT = "unknown_argument"
    OUT_OF_MEMORY = "out_of_memory"
    # Reasons of a server.
    INACTIVE = "inactive"
    GRAMMAR = "grammar"
    ERROR = "error"


# The kind of a request that cannot be read.
UNREADABLE = Row(
    Reason.UNREADABLE, False, False, needs=(True, True, True), edits=Edit(0), seeded=False, top_k=TOP_K_OFF
)

ROWS: list[Row] = [UNREADABLE]  # the kinds met so far, by id
_IDS: dict[Row, int] = {UNREADABLE: 0}
_KINDS: dict[tuple, int] = {}  # ids by the facts of a request


def id_of(row: Row) -> int:
    """The id of a kind. There are some hundreds of kinds."""
    kind = _IDS.get(row)
    if kind is None:
        kind = _IDS[row] = len(ROWS)
        ROWS.append(row)
    return kind


class RowTable:
    """``[slots, LINE_WORDS]`` int32 lines on the device, by slot. Line 0 belongs to no request: SGLang gives slot 0 to
    none. It is greedy and has no edits.

    queued: the place in the queue of each line that is not written yet, by slot: the last line of a slot wins.
    is_too_small: the next ``write`` makes a larger table.

    ``put`` from any stream; ``write``, ``gather`` and graphs with ``stage`` on the stream that draws. Queued lines lie
    in host memory that the kernel which writes them reads, one after the other up to its end.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._in_host_memory = draws_in_host_memory(self._device)
        self.lines = torch.zeros(FIRST_SLOTS + 1, LINE_WORDS, dtype=torch.int32, device=self._device)
        self._num_lines = len(self.lines)
        self.queued: dict[int, int] = {}
        self._written = self._end = 0  # places of the queue before these
        self._largest_slot, self.is_too_small = 0, False  # largest: that was ever queued
        self._make_queue(QUEUE)
        padding = torch.frombuffer(bytearray(pack_line(0.0, 0, 0, 1.0, 0.0, 0)), dtype=torch.int32).view(1, -1)
        self._write(torch.zeros(1, dtype=torch.int64, device=device), padding.to(device))  # loads the kernel, too

    def _make_queue(self, size: int) -> None:
        self._size, pinned = size, self._device.type == "cuda"
        self._new_lines = torch.zeros(size, LINE_WORDS, dtype=torch.int32, pin_memory=pinned)
        self._new_slots = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        # Between two steps much else runs, and then an assignment through NumPy or PyTorch is slow.
        self._line_bytes = memoryview(self._new_lines.numpy().data).cast("B")
        self._slot_values = memoryview(self._new_slots.numpy().data)
        self._addresses = self._new_slots.data_ptr(), self._new_lines.data_ptr()

    def put(self, slot: int, values: tuple[float, int, int, float, float, int]) -> None:
        """Queue the line of a request: temperature, top_k, seed, top_p, min_p, ``Edit`` flags. Raises ValueError for a
        slot that no request has, and for a value that a line cannot hold."""
        if slot < 1:
            raise ValueError(f"slot is {slot}; expected 1 or more")
        queued = self.queued.get(slot)
        if queued is None and self._end == self._size:
            self._make_room()
        place = self._end if queued is None else queued
        start = LINE.size * place
        try:
            LINE.pack_into(self._line_bytes, start, *values)
        except (struct.error, OverflowError):
            self._line_bytes[start : start + LINE.size] = pack_line(*values)
        if queued is None:
            self._slot_values[place] = slot
            self.queued[slot] = place
            self._end += 1
            if slot > self._largest_slot:
                self._largest_slot, self.is_too_small = slot, slot >= self._num_lines

    def _make_room(self) -> None:
        """Begin the queue anew, twice as large where all of it is still to be written."""
        waiting = slice(self._written, self._end)
        lines, slots = self._new_lines[waiting].clone(), self._new_slots[waiting].clone()
        if self._device.type == "cuda":
            # Once in thousands of requests: no launch still reads a line that was written.
            torch.cuda.synchronize(self._device)
        if self._written == 0:
            self._make_queue(2 * self._size)
        self._new_lines[: len(lines)], self._new_slots[: len(slots)] = lines, slots
        self.queued = {slot: place for place, slot in enumerate(slots.tolist())}
        self._written, self._end = 0, len(slots)

    def write(self) -> None:
        """Write every queued line to the table, on the current stream."""
        if not self.queued:
            return
        if self.is_too_small:
            grown = self.lines.new_zeros(max(self._largest_slot + 1, 2 * len(self.lines)), LINE_WORDS)
            grown[: len(self.lines)] = self.lines
            if self._device.type == "cuda":  # the last step's graph may still read them, of another stream's memory
                self.lines.record_stream(torch.cuda.current_stream(self._device))
            self.lines, self._num_lines, self.is_too_small = grown, len(grown), False
        new = slice(self._written, self._end)
        self._write(self._new_slots[new], self._new_lines[new])
        self.queued, self._written = {}, self._end

    def hand_over(self, batch: StagedBatch, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Tell a graph that was captured with ``stage`` its next batch. It writes every queued line, as ``write`` does;
        not where the table ``is_too_small``."""
        slots_address, lines_address = self._addresses
        first, lines = self._written, self._end - self._written
        batch.set(hidden, slots, positions, (lines, slots_address + 8 * first, lines_address + 4 * LINE_WORDS * first))
        self.queued, self._written = {}, self._end

    def stage(self, batch: StagedBatch, stage: torch.Tensor, out: RowBuffers) -> None:
        """``stage_rows`` into this table."""
        stage_rows(batch, self.lines, stage, out)

    def _write(self, slots: torch.Tensor, lines: torch.Tensor) -> None:
        if self._in_host_memory:
            self.lines[slots] = lines
        else:
            write_rows(self.lines, slots, lines)

    def gather(self, slots: torch.Tensor, positions: torch.Tensor, out: RowBuffers, **options: Any) -> None:
        """``gather_rows`` from this table, with these options, after ``write``."""
        self.write()
        gather = gather_rows_on_cpu if self._in_host_memory else gather_rows
        gather(self.lines, slots, positions, out, **options)


def read_requests(
    requests: Sequence[Any],
    slots: Sequence[int],
    table: RowTable,
    server_seed: int,
    custom_processors: bool,
    arrivals: Arrivals,
    unreadable: Callable[[Exception], None],
) -> str:
    """The kinds of SGLang's ``Req`` objects, a character each (``batch.Batch``); their lines are queued for ``slots``.
    A request that cannot be read here, though SGLang serves it, is a row of SGLang's sampler; ``unreadable`` gets the
    error."""
    kinds: list[str] = []
    for request, slot in zip(requests, slots, strict=True):
        try:
            seed = arrivals.seed_of(request, server_seed)  # first: it numbers a request that cannot be read as well
            kind, params = _kind_of(request, custom_processors), request.sampling_params
            row = ROWS[kind]
            temperature = 0.0 if row.greedy else params.temperature
            table.put(slot, (temperature, int(params.top_k), seed, params.top_p, params.min_p, row.edits))
            kinds.append(chr(kind))
        except Exception as error:
            kinds.append(chr(id_of(UNREADABLE)))  # without a line: nothing that is drawn from it is used
            unreadable(error)
    return "".join(kinds)


def _kind_of(request: Any, custom_processors: bool) -> int:
    """The id of the kind of a request. Requests come at almost every step: the facts that ``_row_of`` looks at lead to
    the id of the last request like it."""
    params = request.sampling_params
    facts = (
        params.top_k,
        params.temperature == 1.0,
        params.top_p == 1.0,
        params.min_p > 0,
        params.frequency_penalty == 0 and params.presence_penalty == 0,
        params.min_new_tokens > 0,
        params.repetition_penalty == 1,
        params.logit_bias is None,
        getattr(request, "grammar", None) is None,
        given_seed(params) is None,
        # ``native_reason`` looks at the next three.
        bool(custom_processors and request.custom_logit_processor),
        getattr(request, "return_sampling_mask", False),
        getattr(params, "beam_width", None),
    )
    kind = _KINDS.get(facts)
    if kind is None:
        if len(_KINDS) == MAX_FACTS:
            _KINDS.clear()
        kind = _KINDS[facts] = id_of(_row_of(request, custom_processors))
    return kind


def _row_of(request: Any, custom_processors: bool) -> Row:
    params = request.sampling_params
    greedy = params.top_k <= 1  # SGLang turns temperature 0 into top_k 1, and treats every top_k 1 as greedy
    edits = Edit(0)
    if params.frequency_penalty != 0 or params.presence_penalty != 0 or params.min_new_tokens > 0:
        edits |= Edit.ADDITIVE
    if params.repetition_penalty != 1:
        edits |= Edit.SCALING
    if params.logit_bias is not None:
        edits |= Edit.BIAS
    if getattr(request, "grammar", None) is not None:
        edits |= Edit.MASK
    return Row(
        reason=native_reason(request, custom_processors),
        greedy=greedy,
        tempered=greedy and params.temperature != 1.0,
        needs=(params.top_p != 1.0, params.top_k != TOP_K_OFF, params.min_p > 0),
        edits=edits,
        seeded=given_seed(params) is not None and not greedy,
        # SGLang lets a fraction through, and drops it.
        top_k=next((bound for bound in TOP_K_BOUNDS if int(params.top_k) <= bound), TOP_K_OFF),
        keeps_going=params.min_new_tokens > 0 and bool(edits & Edit.MASK),
    )


def native_reason(request: Any, custom_processors: bool) -> Reason | None:
    """Why this request needs SGLang's sampler, the first that applies; None when fused."""
    params = request.sampling_params
    if custom_processors and request.custom_logit_processor:
        return Reason.CUSTOM_LOGIT_PROCESSOR
    if getattr(request, "return_sampling_mask", False):
        return Reason.SAMPLING_MASK
    return Reason.BEAM_SEARCH if (getattr(params, "beam_width", None) or 1) > 1 else None
