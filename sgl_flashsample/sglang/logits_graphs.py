"""Logits of SGLang's decode steps by CUDA graphs, for steps that its own sampler serves.

In stock SGLang the logits are the end of the model's graph. Here that graph ends with hidden states, so a step of
SGLang's sampler computes its logits after it: as another graph, which costs the host one launch, for each size that
SGLang pads its batches to. It holds SGLang's own launches, of all rows, and writes to the memory that SGLang has for
the logits of its graphs: whoever reads them may change them, as in stock.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

from .step_graphs import MAX_PREPARED_BYTES, PATIENCE, RETRY_SECONDS, Capture, Graph, StepCounts, free_bytes

logger = logging.getLogger("sgl_flashsample")


class CapturedLogits:
    """``LazyLogits`` computes with this the logits of hidden states that one of SGLang's graphs has.

    state: a ``HeadState``. captured: ``[P, D]``, which each replay of SGLang's graph writes. compute: ``[N, D]`` to
    ``[N, V]`` float32, by launches. compute_all: the launches for all P rows. place: ``[P, V]`` float32, where these
    write; None where SGLang has no memory for them.
    """

    def __init__(
        self,
        state: Any,
        captured: torch.Tensor,
        compute: Callable[[torch.Tensor], torch.Tensor],
        compute_all: Callable[[], torch.Tensor],
        place: torch.Tensor | None,
    ) -> None:
        self._state, self._captured, self._compute, self._compute_all = state, captured, compute, compute_all
        head, shape = state.head.lm_head, (captured.shape[0], state.processor.vocab_size)
        self._num_bytes = captured.shape[0] * head.weight.shape[0] * head.hidden_dtype.itemsize
        if place is None or place.shape != shape:
            self._num_bytes += 4 * math.prod(shape)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of ``hidden``: by a replay where these are the first rows of ``captured``."""
        if hidden.data_ptr() == self._captured.data_ptr() and not _is_capturing(hidden):
            graphs = self._state.logits_graphs
            logits = None if graphs is None else graphs.replay(self._captured, self._compute_all, self._num_bytes)
            if logits is not None:
                return logits[: hidden.shape[0]]
        return self._compute(hidden)


@dataclasses.dataclass
class _Logits:
    """The graph of one size. hidden: what it reads, which stays there. logits: what it writes. waiting: steps before
    the capture."""

    hidden: torch.Tensor
    waiting: int = PATIENCE
    graph: Graph | None = None
    logits: torch.Tensor | None = None


class LogitsGraphs:
    """The graphs of one head's logits, by the hidden states that they read.

    Their memory pool is their own: in the pool of the steps' graphs, intermediate results of a capture could lie where
    another graph has the tokens of the last step. made_of: the facts of the head that the launches depend on.
    taken_bytes: memory of other graphs, which counts against the same limit. num_bytes: device memory that these took.
    """

    def __init__(self, capture: Capture, counts: StepCounts, made_of: Hashable, taken_bytes: int = 0) -> None:
        self.made_of = made_of
        self._capture, self._counts, self._taken_bytes = capture, counts, taken_bytes
        self._pool: Any = None
        self._largest = 0  # bytes of intermediate results: one capture leaves them to the next
        self._graphs: dict[tuple[int, int], _Logits] = {}
        self._off_until: float | None = None
        self.num_bytes = 0

    @property
    def count(self) -> int:
        """The number of graphs."""
        return sum(one.graph is not None for one in self._graphs.values())

    def replay(self, hidden: torch.Tensor, launches: Callable[[], torch.Tensor], num_bytes: int) -> torch.Tensor | None:
        """``[P, V]``: the result of ``launches``, which read ``hidden``, until the next replay; after a capture where
        one is due. num_bytes: memory that the launches allocate. None where the caller has to launch: at first, after
        a failure, and where a graph would take too much memory."""
        key = hidden.data_ptr(), hidden.shape[0]
        one = self._graphs.get(key)
        if one is None:
            one = self._graphs[key] = _Logits(hidden)
        if one.graph is None and not self._captures(one, launches, num_bytes):
            return None
        assert one.graph is not None
        one.graph.replay()
        return one.logits

    def _captures(self, one: _Logits, launches: Callable[[], torch.Tensor], num_bytes: int) -> bool:
        """Capture a graph, if it is due. False where there is none yet."""
        if one.waiting:
            one.waiting -= 1
            return False
        if self._off_until is not None and time.monotonic() < self._off_until:
            return False
        more = num_bytes - self._largest
        if more > 0 and self._taken_bytes + self.num_bytes + more > MAX_PREPARED_BYTES:
            return False
        free = free_bytes(one.hidden.device)
        try:
            if self._pool is None:
                self._pool = self._capture.new_pool()
            launches()  # kernels that this size compiles cannot be loaded during a capture
            one.graph, one.logits = self._capture(launches, self._pool)
        except Exception as error:  # a step must not fail because it cannot be captured
            self._give_up(f"{type(error).__name__}: {error}")
            return False
        self._off_until, self._largest = None, max(self._largest, num_bytes)
        self._counts.late_captures += 1
        self.num_bytes += max(0, free - free_bytes(one.hidden.device))
        return True

    def _give_up(self, reason: str) -> None:
        """Launch for ``RETRY_SECONDS``, give the memory of the graphs back, and say why."""
        self._off_until, self._pool = time.monotonic() + RETRY_SECONDS, None
        self.num_bytes = self._largest = 0
        self._graphs.clear()
        logger.warning(
            "flashsample: CUDA graphs of the logits of SGLang's sampler are off for %d minutes; same logits, more CPU "
            "time per step: %s",
            RETRY_SECONDS // 60,
            reason,
        )


def _is_capturing(hidden: torch.Tensor) -> bool:
    return hidden.is_cuda and torch.cuda.is_current_stream_capturing()
