"""The short way for a step that differs from the one before in hidden states and positions alone.

Between two steps the host does much else, and the functions and objects of a step are no longer in its caches. So after
a step that was replayed from a CUDA graph (``head.py``), the next one checks in one function that nothing else has
changed and replays the graph. Counters, the log and a screen's pause wait for the next full step, which comes after
``FULL_STEP_SECONDS`` at the latest.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from .batch import BATCH_ATTRIBUTE, Batch, Routing
from .head import HeadState
from .lazy_logits import LazyLogits
from .runtime import Runtime

FULL_STEP_SECONDS = 0.05


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
        if graphs is None or runtime.report_path or runtime.token_counts is not None:
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
