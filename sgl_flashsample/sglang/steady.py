"""A batch that stays as it is: what is asked before its last step is repeated.

Between two steps the host does much else: whatever a sampler's step touches, functions and objects, has left its caches
by then. So where the last step was replayed (``step_graphs.py``), the next one asks in one place what could make it
another step, and nothing that can wait: neither counters nor logs nor a screen's rest, for ``LOOK_SECONDS`` at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from .counters import Counters
from .head_state import HeadState
from .lazy_logits import LazyLogits
from .rows import Rows
from .step_graphs import StepGraphs

LOOK_SECONDS = 0.05


class Steady:
    """Of ``rows``, which have no edits and no grammar, and whose last step asked for no logprobs and was replayed by
    ``graphs``, those of ``state``. disable: given what has failed, leaves everything to SGLang's sampler.

    steps, seconds: what was repeated and not counted yet, and what it took of the host's time.
    """

    def __init__(self, state: HeadState, graphs: StepGraphs, rows: Rows, disable: Callable[[str], None]) -> None:
        self.state, self.graphs, self.rows = state, graphs, rows
        self._disable = disable
        self.steps, self.seconds = 0, 0.0
        self._shape = torch.Size([len(rows)])
        self._facts = state.facts()
        self._until = time.perf_counter() + LOOK_SECONDS

    def step(self, started: float, lazy: Any, rows: Rows | None, positions: torch.Tensor) -> torch.Tensor | None:
        """The tokens of a step that began at ``started``; None where it may be another one than the last, or where it
        is time to look at everything again."""
        state = self.state
        if (
            started > self._until
            or rows is not self.rows
            or type(lazy) is not LazyLogits
            or lazy.source is not state
            or lazy._dense is not None
            or positions.shape != self._shape
            or positions.dtype is not torch.int64
            or state.graphs is not self.graphs
            or state.facts() != self._facts
        ):
            return None
        hidden = lazy.hidden
        if hidden.shape[0] != len(rows.reasons):
            return None
        try:
            out = self.graphs.again(hidden, positions)
        except Exception as error:  # a request must not fail because a path cannot serve it
            self._disable(f"{type(error).__name__}: {error}")
            return None
        if out is None:
            return None
        self.steps += 1
        self.seconds += time.perf_counter() - started
        return out.token_ids

    def count(self, counters: Counters) -> None:
        """Count what has not been counted yet."""
        if self.steps:
            counters.add("fused", "", len(self.rows), self.steps)
            if self.rows.num_truncated:
                counters.add_truncated(self.rows.num_truncated * self.steps, 0)
            counters.add_host_time(self.seconds, self.steps)
            self.steps, self.seconds = 0, 0.0
