"""CUDA graphs of the sampling step: a step is drawn by a replay, which costs the host one launch.

SGLang captures its model for a few batch sizes and pads every decode batch to the next of them. The hidden states of a
size are then always at one place, so a step has one graph per size and kind of batch, whichever requests are in it. The
parameters of the rows are gathered into buffers that the graphs read, and rows that are padding are drawn greedily and
left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..kernels.gather_rows import StagedBatch
from ..kernels.host_memory import copy_words, memory_for_graphs
from ..kernels.params import LogitEdits, SampleOutput
from ..kernels.workspace import Workspace
from .batch import DrawKind, Mix
from .logprobs import HostBlock, PackedLogprobs

logger = logging.getLogger("sgl_flashsample")

SLOTS = 2  # graphs per key, replayed in turn
PATIENCE = 4  # steps with equal keys before one is captured: a capture takes longer than a draw
RETRY_SECONDS = 300.0  # after a lack of memory or a failed capture, until the next try
MAX_READY = 1 << 13  # steps that are known without another look, about 3 KB of host memory each
MAX_PREPARED_BYTES = 100 << 20  # device memory that graphs captured ahead, and those of logits, may take
MAX_LATE_BYTES = 100 << 20  # and those that steps capture


class Graph(Protocol):
    def replay(self) -> None: ...


class Capture(Protocol):
    """``CudaCapture``, or a substitute for it."""

    def new_pool(self) -> Any: ...
    def __call__(self, launches: Callable[[], Any], pool: Any) -> tuple[Graph, Any]: ...


class CudaCapture:
    """Records launches on a separate stream, without waiting for anything that runs.

    One per head: PyTorch keeps a cuBLAS workspace for each stream that has run a GEMM, and has 32 streams in all.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._failed: list[torch.cuda.CUDAGraph] = []  # PyTorch's allocator of pinned memory goes on asking them

    def new_pool(self) -> Any:  # coverage: needs a GPU
        """A memory pool. Its graphs are dropped together: PyTorch refuses a pool whose graphs have all gone."""
        return torch.cuda.graph_pool_handle()

    def __call__(self, launches: Callable[[], Any], pool: Any) -> tuple[Graph, Any]:
        """The graph, and what ``launches`` returned. After a failure, no other capture may be into this pool."""
        graph = torch.cuda.CUDAGraph()
        # A garbage collection that finds an earlier graph destroys it, which CUDA forbids during a capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = launches()
                finally:
                    graph.capture_end()
        except BaseException:
            self._leave(graph, pool)
            raise
        finally:
            if collects:
                gc.enable()
        return graph, result

    def _leave(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """PyTorch allocates for a capture until its end, and stays so where CUDA has given the capture up: it then
        frees no memory that another stream has used. This call ends it. Its generator draws no random numbers until a
        capture has ended well: another one does."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with contextlib.suppress(RuntimeError):  # a capture that came to its end was left already
            torch._C._cuda_endAllocateToPool(index, pool)
            self._failed.append(graph)
            torch._C._cuda_releasePool(index, pool)
            another = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream), warnings.catch_warnings(action="ignore"):  # it is empty
                another.capture_begin(capture_error_mode="thread_local")
                another.capture_end()


class EditPlaces:
    """Where a graph finds the edits of its next batch. They must stay until the graph has run.

    places: ``LogitEdits.places``.
    """

    def __init__(self, device: torch.device) -> None:
        self._words = memory_for_graphs(self, 4, torch.int64, device)
        self._values = memoryview(self._words.numpy().data)
        self.places = torch.zeros(4, dtype=torch.int64, device=device)
        self.load()  # loads the kernel, which a capture must not

    def set(self, addresses: Sequence[int]) -> None:
        """addresses: of ``PlacedEdits``."""
        for which, address in enumerate(addresses):
            self._values[which] = address

    def load(self) -> None:
        """Bring the addresses to ``places``: the first launch of the graph."""
        copy_words(self._words.view(torch.int32), self.places.view(torch.int32))


class PlacedEdits(NamedTuple):
    """Edits as a graph is told them. layout: the facts that its launches depend on. addresses: of each of
    ``LogitEdits.tensors``, 0 where it is not given."""

    layout: tuple[Hashable, ...]
    addresses: tuple[int, ...]

    @classmethod
    def of(cls, edits: LogitEdits, num_rows: int, device: torch.device) -> PlacedEdits | None:
        """None where no graph on this device can be told such edits of ``num_rows`` rows: their flags have to be those
        of the table, and each tensor has to have its rows where kernels expect them."""
        if edits.rows is not None:
            return None
        layout: list[Hashable] = [edits.repeats]
        addresses = []
        for tensor in edits.tensors:
            if tensor is None:
                layout.append(None)
                addresses.append(0)
                continue
            is_mask = tensor is edits.mask
            (rows, width), (stride, column), dtype = tensor.shape, tensor.stride(), tensor.dtype
            address = tensor.data_ptr()
            if (
                rows * (1 if is_mask else edits.repeats) != num_rows
                or column != 1
                or address % 16
                or not (is_mask or dtype is torch.float32)
                or tensor.device != device
            ):
                return None
            layout.append((width, stride, dtype))
            addresses.append(address)
        return cls(tuple(layout), tuple(addresses))


NextBatch = StagedBatch | EditPlaces


@dataclasses.dataclass
class StepCounts:
    """Steps of a head, and captures and kernels that a step has waited for. launched: all that were not replayed, but
    prefills."""

    replayed: int = 0
    launched: int = 0
    prefills: int = 0
    late_captures: int = 0
    late_compiles: int = 0


class Launched(NamedTuple):
    """A draw that has been launched. scratch: other tensors that the launches write to and that have no other owner: a
    graph writes there at each replay. logprobs, rest: logprobs of the tokens that are not in ``out``, and those that
    were asked for beside these."""

    out: SampleOutput
    scratch: Any = None
    logprobs: torch.Tensor | None = None
    rest: PackedLogprobs | None = None


class Drawn(NamedTuple):
    """The tokens of a step, ``[B]`` int64, and their logprobs, ``[B]`` float32, where they were asked for. rest: the
    logprobs beside these, of these rows and perhaps of padding."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None
    rest: PackedLogprobs | None = None

    @classmethod
    def of(cls, launched: Launched) -> Drawn:
        out, logprobs = launched.out, launched.logprobs
        return cls(out.token_ids, out.logprobs if logprobs is None else logprobs, launched.rest)

    def first(self, num_rows: int) -> Drawn:
        """Views of the first rows."""
        logprobs = None if self.logprobs is None else self.logprobs[:num_rows]
        return Drawn(self.token_ids[:num_rows], logprobs, self.rest)

    def clone(self) -> Drawn:
        """Tokens and logprobs that stay."""
        return Drawn(self.token_ids.clone(), None if self.logprobs is None else self.logprobs.clone(), self.rest)


# Makes the launches of a graph. Takes where the graph finds its next batch; None where they do not ask.
Draw = Callable[[NextBatch | None], Launched]


class _Captured(NamedTuple):
    graph: Graph
    drawn: Drawn
    holds: Any  # other tensors that its launches write to
    first: dict[int, Drawn]  # views of the first rows, by their number
    block: HostBlock | None


def _filling(block: HostBlock | None, launched: Launched) -> Launched:
    """``launched``, whose logprobs beside those of the tokens are copied into ``block`` too."""
    if block is None or launched.rest is None:
        return launched
    return launched._replace(rest=block.fill(launched.rest))


class KeyedGraphs:
    """The graphs of one key. copies_tokens: a step returns a copy of its tokens and logprobs. batches: where each graph
    finds its next batch; empty where the launches do not ask. host_bytes: of the logprobs that each leaves for the
    host. waiting: steps before the next capture. slot: the place of the next graph. is_ahead: they are captured
    ahead."""

    def __init__(self, copies_tokens: bool, batches: Sequence[NextBatch] = (), host_bytes: int = 0) -> None:
        self._copies_tokens, self.batches, self.host_bytes = copies_tokens, batches, host_bytes
        self.waiting = PATIENCE
        self.captured: list[_Captured] = []
        self.slot, self.is_ahead = 0, False

    @property
    def next_batch(self) -> Any:
        """The ``StagedBatch`` or ``EditPlaces`` of the next graph, to be set before its replay."""
        return self.batches[self.slot]

    def replay_next(self, num_rows: int) -> Drawn:
        captured = self.captured[self.slot]
        self.slot = (self.slot + 1) % SLOTS
        if captured.block is not None:
            captured.block.expect_next()
        captured.graph.replay()
        drawn = captured.first.get(num_rows)
        if drawn is None:
            drawn = captured.first[num_rows] = captured.drawn.first(num_rows)
        return drawn.clone() if self._copies_tokens else drawn


Ready = tuple[KeyedGraphs, torch.Tensor | None, Hashable]  # see ``StepGraphs``


class StepGraphs:
    """The draws of steps, as CUDA graphs: a step then costs the host one launch, however many kernels it takes.

    A graph reads and writes fixed addresses: the hidden states of one of SGLang's own graphs, and the parameters of the
    rows in buffers. Penalties, bias and the masks of grammars are anywhere: a graph is told their addresses. The tokens
    of a graph are overwritten ``SLOTS`` steps later: SGLang copies the tokens of a step to the host before it launches
    the step after the next, and what a graph is told is overwritten no earlier. A pipeline sends tokens to its first
    stage later than that: with ``copies_tokens`` a step returns a copy of its tokens and logprobs, and no graph is told
    anything. Where drafts are verified, the first token of a request is the root of its first drafts, which may wait
    for prefills of others: with ``copies_staged`` a staged step returns a copy, too.

    ready: graphs that can be replayed without another look, the table of requests that they read, None where the caller
    gathers from it, and the layout of their edits, None without any; by the place of the hidden states and the rows
    there (of a prefill, the number of its rows twice), the kinds of rows, the nodes of each request in a verification
    of drafts, and the logprobs that are computed, as ``find`` is told them.

    Steps come in more kinds than memory can have graphs for: once those that steps have captured take
    ``MAX_LATE_BYTES``, they are dropped together, and the kinds that still come are captured anew, at most once in
    ``RETRY_SECONDS``.

    For these workspaces and buffers, and the head, table and screen that they were made with. is_prepared: all graphs
    that are to be captured ahead are there. num_bytes: device memory that all graphs took. prepared_bytes: that of
    those captured ahead.
    """

    def __init__(
        self,
        workspaces: Sequence[Workspace],
        capture: Capture,
        counts: StepCounts,
        copies_tokens: bool = False,
        copies_staged: bool = False,
    ) -> None:
        self._workspaces, self._capture, self._counts = workspaces, capture, counts
        self._copies_tokens, self._copies_staged = copies_tokens, copies_staged
        self._pool = capture.new_pool()
        self._off_until: float | None = None
        self._full_until = 0.0
        self.is_prepared, self.num_bytes, self.prepared_bytes = False, 0, 0
        self.ready: dict[tuple[int, int, Mix, int | None, Hashable], Ready] = {}
        self._graphs: dict[tuple[Hashable, ...], KeyedGraphs] = {}

    @property
    def is_off(self) -> bool:
        """A capture has failed in the last ``RETRY_SECONDS``: every step is launched."""
        if self._off_until is None:
            return False
        if time.monotonic() < self._off_until:
            return True
        self._off_until, self._pool = None, self._capture.new_pool()
        return False

    def find(
        self,
        draw: Draw,
        hidden: torch.Tensor,  # [P, D]
        kind: DrawKind,
        edits: Hashable,
        logprobs: Hashable,
        table: torch.Tensor | None = None,
        short: tuple[int, int, Mix, int | None] | None = None,
        staged: bool = False,
        host_bytes: int = 0,
    ) -> KeyedGraphs | None:
        """The graphs to replay, after a capture where one is due; None where the caller has to launch the step. draw:
        makes the launches that a graph captures, of all P rows. Tokens that are no copies stay until ``SLOTS`` steps
        later. edits: their layout, None without any. logprobs: which of them the launches compute.
        table: what these gather the parameters from; None where the caller has gathered them. short: the first
        four parts of the key by which the next steps like this one find them ``ready``. staged: the launches bring the
        batch, which ``KeyedGraphs.next_batch`` has to be told before each replay, to ``hidden``. host_bytes: of the
        logprobs beside those of the tokens."""
        graphs = self._graphs_of(hidden, kind, edits, logprobs, table, staged, host_bytes)
        if graphs.waiting:
            graphs.waiting -= 1
            return None
        if graphs.slot == len(graphs.captured):
            if not self._has_room() or not self._captures(graphs, draw, hidden.device):
                return None
            self._counts.late_captures += 1
        elif short is not None:
            if len(self.ready) >= MAX_READY:  # a set of kinds that comes again may have another ``Mix``
                self.ready.clear()
            self.ready[*short, logprobs] = graphs, table, edits
        return graphs

    def forget_logprobs(self) -> None:
        """Drop the graphs of steps with more logprobs than the tokens': what these steps ask for will lie elsewhere."""
        self._keep({key: graphs for key, graphs in self._graphs.items() if isinstance(key[-1], bool)})

    def has(self, hidden: torch.Tensor, kind: DrawKind, table: torch.Tensor | None, staged: bool) -> bool:
        """The graphs of such steps, without edits and logprobs, are there."""
        return len(self._graphs_of(hidden, kind, None, False, table, staged).captured) == SLOTS

    def prepare(
        self, draw: Draw, hidden: torch.Tensor, kind: DrawKind, table: torch.Tensor | None, staged: bool
    ) -> None:
        """Capture the graphs of such steps ahead."""
        graphs, before = self._graphs_of(hidden, kind, None, False, table, staged), self.num_bytes
        graphs.waiting, graphs.is_ahead = 0, True
        while len(graphs.captured) < SLOTS and self._captures(graphs, draw, hidden.device):
            pass
        self.prepared_bytes += max(0, self.num_bytes - before)

    def _has_room(self) -> bool:
        """A step may capture another graph. Drops the others that steps have captured where these take too much."""
        if self.num_bytes - self.prepared_bytes <= MAX_LATE_BYTES:
            return True
        if time.monotonic() >= self._full_until:
            self._full_until = time.monotonic() + RETRY_SECONDS
            self._keep({key: graphs for key, graphs in self._graphs.items() if graphs.is_ahead})
            self.num_bytes = self.prepared_bytes
        return False

    def _keep(self, kept: dict[tuple[Hashable, ...], KeyedGraphs]) -> None:
        """Drop the other graphs."""
        graphs = set(map(id, kept.values()))
        self._graphs = kept
        self.ready = {key: ready for key, ready in self.ready.items() if id(ready[0]) in graphs}
        if not self.count:
            self._pool = self._capture.new_pool()  # PyTorch refuses one whose graphs have all gone

    def _graphs_of(
        self,
        hidden: torch.Tensor,
        kind: DrawKind,
        edits: Hashable,
        logprobs: Hashable,
        table: torch.Tensor | None,
        staged: bool,
        host_bytes: int = 0,
    ) -> KeyedGraphs:
        place = None if table is None else table.data_ptr()
        key = (hidden.data_ptr(), hidden.shape[0], kind, place, edits, logprobs)
        graphs = self._graphs.get(key)
        if graphs is None:
            batches: list[NextBatch] = []
            if staged or edits is not None:
                batches = [(StagedBatch if staged else EditPlaces)(hidden.device) for _ in range(SLOTS)]
            copies = self._copies_tokens or (staged and self._copies_staged)
            graphs = self._graphs[key] = KeyedGraphs(copies, batches, host_bytes)
        return graphs

    def _captures(self, graphs: KeyedGraphs, draw: Draw, device: torch.device) -> bool:
        """Capture the next graph of these. False after a failure."""
        batch = graphs.batches[len(graphs.captured)] if graphs.batches else None
        free = free_bytes(device)
        try:
            block = HostBlock(graphs.host_bytes, device) if graphs.host_bytes else None
            graph, launched = self._capture(lambda: _filling(block, draw(batch)), self._pool)
        except Exception as error:  # a step must not fail because it cannot be captured
            self._give_up(f"{type(error).__name__}: {error}")
            return False
        holds = [launched, *(used.held for used in self._workspaces)]
        graphs.captured.append(_Captured(graph, Drawn.of(launched), holds, {}, block))
        self.num_bytes += max(0, free - free_bytes(device))
        return True

    def _give_up(self, reason: str) -> None:
        """Launch all steps for ``RETRY_SECONDS``, give the memory of the graphs back, and say why."""
        self._off_until = time.monotonic() + RETRY_SECONDS
        self._graphs.clear()
        self.ready.clear()
        self.is_prepared, self.num_bytes, self.prepared_bytes = False, 0, 0
        logger.warning(
            "flashsample: CUDA graphs of the sampling step are off for %d minutes, SGLang's own stay on; same tokens, "
            "more CPU time per step: %s",
            RETRY_SECONDS // 60,
            reason,
        )

    @property
    def count(self) -> int:
        """The number of graphs."""
        return sum(len(graphs.captured) for graphs in self._graphs.values())


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU; 0 of a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
