"""The draws of a batch that stays as it is, as CUDA graphs: a step then costs the host one launch.

Every launch takes some Python, in every step. A graph is one call, however many kernels are in it.

A graph reads and writes fixed addresses. Hidden states, positions and edits come at a few addresses in turn, so these
are part of what a graph is known by. The parameters of a batch are copied, once, to buffers that all graphs read. A
graph's tokens are overwritten when its turn comes again, ``TURNS`` steps later: SGLang has those of a step on the host
before it launches the second next.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch

from ..api import BatchParams, SampleOutput
from ..kernels.features import LogitEdits, Truncation
from .rows import Rows

logger = logging.getLogger("sgl_flashsample")

TURNS = 2
# Steps that a batch lasts before its parameters are copied, and that come alike before one is captured: a capture takes
# longer than a draw.
PATIENCE = 4
MOST_GRAPHS = 512  # those used least recently are dropped
# (hidden, params, return_logprob) -> the draw, and what else its launches write to
Draw = Callable[[torch.Tensor, BatchParams, bool], tuple[SampleOutput, Any]]


class Graph(Protocol):
    def replay(self) -> None: ...


class _Captured(NamedTuple):
    graph: Graph
    out: SampleOutput
    holds: Any


class _Step:
    """What is known of the steps of one key: how often they are still to come before one is captured, their graphs, and
    whose turn it is."""

    def __init__(self) -> None:
        self.waiting = PATIENCE
        self.captured: list[_Captured] = []
        self.turn = 0

    def replay(self) -> SampleOutput:
        """By the graph whose turn it is, which is there."""
        captured = self.captured[self.turn]
        self.turn = (self.turn + 1) % TURNS
        captured.graph.replay()
        return captured.out


class CudaCapture:
    """Records launches on a stream of its own, without waiting for anything that runs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launches: Callable[[], Any]) -> tuple[Graph, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = launches()
            finally:
                graph.capture_end()
        return graph, result


class StepGraphs:
    """For one head, its workspace and its choices.

    draw: what a graph is made of. max_rows: larger batches are not replayed. capture: ``CudaCapture``, or what stands
    for it.
    """

    def __init__(
        self,
        draw: Draw,
        max_rows: int,
        device: torch.device,
        capture: Callable[[Callable[[], Any]], tuple[Graph, Any]] | None = None,
    ) -> None:
        self._draw, self._max_rows = draw, max_rows
        self._capture = CudaCapture(device) if capture is None else capture
        self._temperature, self._top_p, self._min_p = (
            torch.empty(max_rows, dtype=torch.float32, device=device) for _ in range(3)
        )
        self._seed = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._top_k = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._rows: Rows | None = None
        self._waiting = 0
        self._kind: tuple[Hashable, ...] = ()
        self._broken = False
        self._steps: collections.OrderedDict[tuple[Hashable, ...], _Step] = collections.OrderedDict()

    def step(
        self,
        rows: Rows,
        hidden: torch.Tensor,
        edits: LogitEdits | None,
        positions: torch.Tensor,
        return_logprob: bool,
    ) -> SampleOutput | None:
        """The tokens of one step of ``rows``; None where they are still to be drawn by launches.

        hidden: ``[B, D]``. positions: ``[B]`` int64. The tokens stay until ``TURNS`` steps later.
        """
        if self._broken:
            return None
        if rows is not self._rows:
            self._rows, self._waiting = rows, PATIENCE
        if self._waiting:
            if self._waiting > 1 or len(rows) > self._max_rows:
                self._waiting = max(1, self._waiting - 1)
                return None
            self._waiting = 0
            self._load(rows)
        key = self._key(hidden, positions, return_logprob, _places(edits))
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) == MOST_GRAPHS:
                self._steps.popitem(last=False)
            step = self._steps[key] = _Step()
        self._steps.move_to_end(key)
        if step.waiting:
            step.waiting -= 1
            return None
        if step.turn == len(step.captured):
            try:
                step.captured.append(self._captured(rows, hidden, edits, positions, return_logprob))
            except Exception as error:  # a step must not fail because it cannot be captured
                self._broken = True
                logger.warning(
                    "flashsample: draws are not captured as CUDA graphs: %s: %s", type(error).__name__, error
                )
                return None
        return step.replay()

    def _key(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        return_logprob: bool = False,
        edits: tuple[Hashable, ...] = (),
    ) -> tuple[Hashable, ...]:
        return hidden.data_ptr(), positions.data_ptr(), return_logprob, edits, *self._kind

    def replays(self, rows: Rows) -> bool:
        """Whether steps of ``rows`` are replayed, where they come from a place that is known."""
        return rows is self._rows and not self._waiting and not self._broken

    def again(self, hidden: torch.Tensor, positions: torch.Tensor) -> SampleOutput | None:
        """``step`` for the rows of the last one, which are replayed, without edits and logprobs; None where it is to be
        captured first. Asks nothing that has not changed."""
        step = self._steps.get(self._key(hidden, positions))
        if step is None or step.turn == len(step.captured):
            return None
        return step.replay()

    def _load(self, rows: Rows) -> None:
        """Leave the parameters of ``rows`` where the graphs read them."""
        num_rows = len(rows)
        self._temperature[:num_rows].copy_(rows.temperature)
        self._seed[:num_rows].copy_(rows.seed)
        if rows.truncation is not None:
            for own, given in (
                (self._top_k, rows.truncation.top_k),
                (self._top_p, rows.truncation.top_p),
                (self._min_p, rows.truncation.min_p),
            ):
                own[:num_rows].copy_(given)
        largest = None if rows.truncation is None else rows.truncation.largest_top_k
        self._kind = (num_rows, rows.truncation is not None, largest, rows.all_greedy, rows.distribution_only)

    def _captured(
        self,
        rows: Rows,
        hidden: torch.Tensor,
        edits: LogitEdits | None,
        positions: torch.Tensor,
        return_logprob: bool,
    ) -> _Captured:
        num_rows = len(rows)
        truncation = None
        if rows.truncation is not None:
            own = (self._top_k[:num_rows], self._top_p[:num_rows], self._min_p[:num_rows])
            truncation = Truncation(*own, largest_top_k=rows.truncation.largest_top_k)
        params = BatchParams(
            self._temperature[:num_rows],
            self._seed[:num_rows],
            positions,
            truncation,
            edits,
            rows.all_greedy,
            rows.distribution_only,
        )
        graph, (out, holds) = self._capture(lambda: self._draw(hidden, params, return_logprob))
        return _Captured(graph, out, holds)


def _places(edits: LogitEdits | None) -> tuple[Hashable, ...]:
    """Where a graph reads its edits, and as what."""
    if edits is None:
        return ()
    tensors = (edits.additive, edits.scaling, edits.mask, edits.bias, edits.rows)
    return edits.bias_before_mask, *(
        None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in tensors
    )
