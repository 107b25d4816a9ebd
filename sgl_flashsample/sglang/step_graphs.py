"""CUDA graphs of the sampling step: an unchanged batch is drawn by a replay, which costs the host one launch.

``StepGraphs`` captures the draws of a batch and replays them. ``RepeatedStep`` is the short way for a step that differs
from the one before in hidden states and positions alone. Between two steps the host does much else, and the functions
and objects of a step are no longer in its caches. So after a step that was replayed, the next one checks in one
function that nothing else has changed and replays the graph. Counters, the log and a screen's pause wait for the next
full step, which comes after ``FULL_STEP_SECONDS`` at the latest.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..kernels.params import BatchParams, LogitEdits, SampleOutput, Truncation
from ..kernels.workspace import Workspace
from .batch import BATCH_ATTRIBUTE, Batch, Routing
from .lazy_logits import LazyLogits

if TYPE_CHECKING:
    from .head import HeadState
    from .runtime import Runtime

logger = logging.getLogger("sgl_flashsample")

SLOTS = 2  # graphs per key, replayed in turn
# Steps of an unchanged batch before its parameters are copied, and steps with equal keys before one is captured: a
# capture takes longer than a draw.
PATIENCE = 4
MAX_GRAPH_KEYS = 512  # the least recently used one is dropped
RETRY_SECONDS = 300.0  # after a lack of memory or a failed capture, until the next try
FULL_STEP_SECONDS = 0.05  # between two full steps, which count and log


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
        frees no memory that another stream has used. This call ends it."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with contextlib.suppress(RuntimeError):  # a capture that came to its end was left already
            torch._C._cuda_endAllocateToPool(index, pool)
            self._failed.append(graph)
            torch._C._cuda_releasePool(index, pool)


class Launched(NamedTuple):
    """A draw that has been launched. scratch: other tensors that the launches write to and that have no other owner: a
    graph writes there at each replay."""

    out: SampleOutput
    scratch: Any = None


class _Captured(NamedTuple):
    graph: Graph
    out: SampleOutput
    holds: Any  # scratch that its launches write to


class _KeyedGraphs:
    """The graphs of one key. copies_tokens: see ``StepGraphs``. waiting: steps before the next capture. slot: the place
    of the next graph."""

    def __init__(self, copies_tokens: bool) -> None:
        self._copies_tokens = copies_tokens
        self.waiting = PATIENCE
        self.captured: list[_Captured] = []
        self.slot = 0

    def replay_next(self) -> SampleOutput:
        captured = self.captured[self.slot]
        self.slot = (self.slot + 1) % SLOTS
        captured.graph.replay()
        out = captured.out
        if self._copies_tokens:
            logprobs = None if out.logprobs is None else out.logprobs.clone()
            out = out._replace(token_ids=out.token_ids.clone(), logprobs=logprobs)
        return out


class StepGraphs:
    """The draws of an unchanged batch, as CUDA graphs: a step then costs the host one launch, however many kernels it
    takes.

    A graph reads and writes fixed addresses. Hidden states, positions, penalties and bias come at a few addresses in
    turn, which are part of the key of a graph. The mask of a grammar is made anew for every step, at any address: it is
    copied to a buffer that all graphs read. So are the parameters of a batch, once. The tokens of a graph are
    overwritten ``SLOTS`` steps later: SGLang copies the tokens of a step to the host before it launches the step after
    the next. A pipeline sends them to its first stage later than that: with ``copies_tokens`` a step returns a copy of
    its tokens and logprobs.

    For these workspaces, and the head, table and screen that they were made with. max_rows: larger batches are not
    replayed.
    """

    def __init__(
        self,
        workspaces: Sequence[Workspace],
        max_rows: int,
        device: torch.device,
        capture: Capture,
        copies_tokens: bool = False,
    ) -> None:
        self._workspaces, self._max_rows, self._capture = workspaces, max_rows, capture
        self._copies_tokens = copies_tokens
        self._pool = capture.new_pool()
        self._temperature, self._top_p, self._min_p = (
            torch.empty(max_rows, dtype=torch.float32, device=device) for _ in range(3)
        )
        self._seed = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._top_k = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._masks: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._batch: Batch | None = None
        self._waiting = 0
        self._batch_key: tuple[Hashable, ...] = ()
        self._off_until: float | None = None
        # Graphs of the batch without edits and logprobs, by the addresses of (hidden states, positions).
        self._repeatable: dict[tuple[int, int], _KeyedGraphs] = {}
        self._graphs: collections.OrderedDict[tuple[Hashable, ...], _KeyedGraphs] = collections.OrderedDict()

    def step(
        self,
        draw: Callable[[BatchParams], Launched],
        batch: Batch,
        hidden: torch.Tensor,  # [B, D]
        edits: LogitEdits | None,
        positions: torch.Tensor,  # [B] int64
        return_logprob: bool,
    ) -> SampleOutput | None:
        """The tokens of one step of ``batch``; None where the caller has to launch it. draw: makes the launches that a
        graph captures. Without ``copies_tokens``, the tokens stay until ``SLOTS`` steps later."""
        if self._off_until is not None:
            if time.monotonic() < self._off_until:
                return None
            self._off_until, self._pool = None, self._capture.new_pool()
        if batch is not self._batch:
            self._batch, self._waiting, self._repeatable = batch, PATIENCE, {}
        if self._waiting:
            if self._waiting > 1 or len(batch) > self._max_rows:
                self._waiting = max(1, self._waiting - 1)
                return None
            self._waiting = 0
            self._load(batch)
        if edits is not None and edits.mask is not None:
            edits = dataclasses.replace(edits, mask=self._load_mask(edits.mask))
        key = (hidden.data_ptr(), positions.data_ptr(), return_logprob, _places(edits), self._batch_key)
        graphs = self._graphs.get(key)
        if graphs is None:
            if len(self._graphs) == MAX_GRAPH_KEYS:
                self._graphs.popitem(last=False)
            graphs = self._graphs[key] = _KeyedGraphs(self._copies_tokens)
        self._graphs.move_to_end(key)
        if graphs.waiting:
            graphs.waiting -= 1
            return None
        if graphs.slot == len(graphs.captured):
            params = self._params(batch, positions, edits)
            try:
                graph, (out, scratch) = self._capture(lambda: draw(params), self._pool)
            except Exception as error:  # a step must not fail because it cannot be captured
                self._give_up(f"{type(error).__name__}: {error}")
                return None
            holds = [scratch, *(used.last_buffer for used in self._workspaces)]
            graphs.captured.append(_Captured(graph, out, holds))
        if edits is None and not return_logprob and len(graphs.captured) == SLOTS:
            self._repeatable[hidden.data_ptr(), positions.data_ptr()] = graphs
        return graphs.replay_next()

    def _give_up(self, reason: str) -> None:
        """Launch all steps for ``RETRY_SECONDS``, give the memory of the graphs back, and say why."""
        self._off_until = time.monotonic() + RETRY_SECONDS
        self._repeatable = {}
        self._graphs.clear()
        logger.warning(
            "flashsample: CUDA graphs of the sampling step are off for %d minutes, SGLang's own stay on; same tokens, "
            "more CPU time per step: %s",
            RETRY_SECONDS // 60,
            reason,
        )

    @property
    def count(self) -> int:
        """The number of graphs; at most ``SLOTS * MAX_GRAPH_KEYS``."""
        return sum(len(graphs.captured) for graphs in self._graphs.values())

    def can_repeat(self, batch: Batch, hidden: torch.Tensor, positions: torch.Tensor) -> bool:
        """``repeat`` would draw from them."""
        return self._graphs_of(batch, hidden, positions) is not None

    def repeat(self, batch: Batch, hidden: torch.Tensor, positions: torch.Tensor) -> SampleOutput | None:
        """The next step of ``batch``, without edits and logprobs; None unless it is the batch that was stepped last,
        and ``step`` has served it from all ``SLOTS`` graphs for the addresses of these tensors."""
        graphs = self._graphs_of(batch, hidden, positions)
        return None if graphs is None else graphs.replay_next()

    def _graphs_of(self, batch: Batch, hidden: torch.Tensor, positions: torch.Tensor) -> _KeyedGraphs | None:
        # Compare identity: a batch that bypassed ``step`` may reuse the same addresses.
        return self._repeatable.get((hidden.data_ptr(), positions.data_ptr())) if batch is self._batch else None

    def _load(self, batch: Batch) -> None:
        """Copy the parameters of ``batch`` to where the graphs read them."""
        num_rows, truncation = len(batch), batch.truncation
        self._temperature[:num_rows].copy_(batch.tensors.temperature)
        self._seed[:num_rows].copy_(batch.tensors.seed)
        if truncation is not None:
            self._top_k[:num_rows].copy_(truncation.top_k)
            self._top_p[:num_rows].copy_(truncation.top_p)
            self._min_p[:num_rows].copy_(truncation.min_p)
        max_top_k = None if truncation is None else truncation.max_top_k
        self._batch_key = (num_rows, truncation is not None, max_top_k, batch.all_greedy, batch.distribution_only)

    def _load_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Copy the mask of this step to where the graphs read it."""
        num_rows, width = mask.shape
        buffer = self._masks.get((width, mask.dtype))
        if buffer is None:
            buffer = self._masks[width, mask.dtype] = mask.new_empty(self._max_rows, width)
        return buffer[:num_rows].copy_(mask)

    def _params(self, batch: Batch, positions: torch.Tensor, edits: LogitEdits | None) -> BatchParams:
        """``Batch.params``, with the tensors that the graphs read."""
        rows, truncation = slice(len(batch)), batch.truncation
        if truncation is not None:
            truncation = Truncation(self._top_k[rows], self._top_p[rows], self._min_p[rows], truncation.max_top_k)
        return BatchParams(
            self._temperature[rows],
            self._seed[rows],
            positions,
            truncation,
            edits,
            batch.all_greedy,
            batch.distribution_only,
        )


def _places(edits: LogitEdits | None) -> tuple[Hashable, ...]:
    """The key of edits in a captured graph: address, shape, strides and dtype of each tensor, and repeats."""
    if edits is None:
        return ()
    tensors = (edits.additive, edits.scaling, edits.mask, edits.bias, edits.rows)
    return edits.repeats, *(
        None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in tensors
    )


class RepeatedStep:
    """A step that was replayed, of a batch whose rows are all fused, without edits and without logprobs."""

    @classmethod
    def after(
        cls, runtime: Runtime, logits_output: Any, batch: Batch | None, routing: Routing, positions: torch.Tensor
    ) -> RepeatedStep | None:
        """The short way after the step that has just been served; None where there is none."""
        lazy = logits_output.next_token_logits
        if batch is None or routing.native or routing.edit_kinds or type(lazy) is not LazyLogits:
            return None
        graphs = lazy.source.graphs
        if graphs is None or runtime.settings.report_path or runtime.token_counts is not None:
            return None
        return cls(runtime, lazy.source, batch, routing) if graphs.can_repeat(batch, lazy.hidden, positions) else None

    def __init__(self, runtime: Runtime, state: HeadState, batch: Batch, routing: Routing) -> None:
        self._runtime, self._state, self._graphs = runtime, state, state.graphs
        self._batch, self._routing = batch, routing
        self._shape = torch.Size([len(batch)])
        self._seconds: list[float] = []  # of the host, per step that is not counted yet
        self._until = time.perf_counter() + FULL_STEP_SECONDS

    def step(
        self,
        started: float,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        positions: torch.Tensor,
        extra: dict[str, Any],
    ) -> torch.Tensor | None:
        """The token ids of the step that began at ``started`` (``time.perf_counter()``); None where a full step has to
        serve it. extra: further arguments of the call."""
        state, lazy = self._state, logits_output.next_token_logits
        if (
            started > self._until
            or self._runtime.inactive_reason is not None
            or getattr(sampling_info, BATCH_ATTRIBUTE, None) is not self._batch
            or sampling_info.grammars
            or return_logprob
            or extra
            or type(lazy) is not LazyLogits
            or lazy.source is not state
            or lazy.is_dense
            or lazy.hidden.shape[0] != self._shape[0]
            or positions.shape != self._shape
            or positions.dtype is not torch.int64
            or state.graphs is not self._graphs
            or not state.is_current()
        ):
            return None
        try:
            out = self._graphs.repeat(self._batch, lazy.hidden, positions)
        except Exception as error:  # a request must not fail because a path cannot serve it
            self._runtime.disable(f"{type(error).__name__}: {error}")
            return None
        if out is None:
            return None
        self._seconds.append(time.perf_counter() - started)
        return out.token_ids

    def count(self) -> None:
        """Bring the steps that are not counted yet into the metrics."""
        if self._seconds:
            metrics, seconds = self._runtime.metrics, self._seconds
            metrics.add_batches(self._routing, self._batch.num_truncated, len(seconds), seconds)
            self._seconds = []
