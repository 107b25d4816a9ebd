"""DP attention with one LM head over all ranks: each rank has requests of its own, and a part of the head.

    prepare_mlp_sync_batch_raw   SGLang's ranks tell each other what they run next; ours agree on the step (``Step``)
    LogitsProcessor._get_logits  carries the hidden states where the step is fused (``Runtime.can_defer``)
    ModelRunner.forward          the draw: each rank gets the rows of all, draws them from its part, and keeps its own

The draw is in the forward, where SGLang's own ranks exchange hidden states and logits: every rank comes there in each
step, also one without requests. It comes to its sampler when its requests let it, or not at all.

A step is fused where every rank can have it so. Edits of logits are too large to travel; where one rank has a row with
such, or one for SGLang's sampler, all ranks compute logits as SGLang does, and each draws its rows from these, with the
same noise. A rank that fails ends the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.launch import num_binaries
from ..kernels.params import BatchParams, LogitsSpec, SampleOutput
from ..logprobs import Logprobs, WantedLogprobs
from ..paths import read_logits, read_logits_with_logprobs
from .batch import DRAWN_ATTRIBUTE, Batch, DrawKind, batch_of
from .draw import launch
from .head import HeadState
from .lazy_logits import LazyLogits, plain
from .row_table import TOP_K_OFF
from .runtime import Runtime
from .step_graphs import Drawn

_SENT = ("temperature", "top_k", "top_p", "min_p", "seed", "position")  # parameters of a row, as in ``RowBuffers``


class Facts(NamedTuple):
    """The facts of one rank's batch. needs_logits: it has edits, rows for SGLang's sampler, or logprobs beside those of
    its tokens. rows: that are sampled. top_k: the bound of its top-k, as in ``Row``."""

    needs_logits: bool = False
    rows: int = 0
    truncated: bool = False
    top_k: int = 0
    all_greedy: bool = True
    return_logprob: bool = False


class Step(NamedTuple):
    """The facts that all ranks share. rows: of each rank."""

    fused: bool
    rows: tuple[int, ...]
    kind: DrawKind
    return_logprob: bool

    @classmethod
    def of(cls, ranks: Sequence[Facts]) -> Step:
        truncated = any(rank.truncated for rank in ranks)
        top_k = max(rank.top_k for rank in ranks)
        largest = top_k if truncated and top_k != TOP_K_OFF else None
        kind = DrawKind(truncated, largest, all(rank.all_greedy for rank in ranks), False)
        rows = tuple(rank.rows for rank in ranks)
        fused = any(rows) and not any(rank.needs_logits for rank in ranks)
        return cls(fused, rows, kind, any(rank.return_logprob for rank in ranks))


class ReplicaHooks:
    """The hook functions, bound to one Runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._next: Step | None = None  # agreed on, not yet run

    def agree(self, result: Any, local_batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        """After prepare_mlp_sync_batch_raw, in which SGLang's ranks have met. local_batch: None where this rank has no
        requests to run."""
        state = self.runtime.head_of_replicas
        if state is None:
            return
        started = time.perf_counter()
        try:
            facts = self._facts_of(local_batch, model_runner)
        except Exception:  # the other ranks wait for an answer
            facts = Facts(needs_logits=True)
        assert state.exchange is not None
        self._next = Step.of([Facts._make(values) for values in state.exchange.of_all(list(map(int, facts)))])
        self.runtime.metrics.scheduling_seconds += time.perf_counter() - started

    def _facts_of(self, local_batch: Any, model_runner: Any) -> Facts:
        if local_batch is None or local_batch.forward_mode.is_idle():
            return Facts()
        batch, original = batch_of(local_batch.sampling_info), self.runtime.settings.original_logprobs
        logprobs = bool(local_batch.return_logprob)
        if batch is None or len(batch) != local_batch.batch_size():
            return Facts(needs_logits=True)
        mix, observer = batch.mix, getattr(model_runner, "sampling_observer", None)
        reads = mix.is_native or mix.edits or local_batch.has_grammar or local_batch.is_prefill_only or observer
        reads = reads or (logprobs and (original or mix.has_other_logprobs or _asks_for_more(local_batch)))
        draw = mix.draw
        top_k = (draw.max_top_k or TOP_K_OFF) if draw.truncated else 0
        return Facts(bool(reads), len(batch), draw.truncated, top_k, draw.all_greedy, logprobs)

    def forward(self, original: Callable, model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around ModelRunner.forward: the draw of a step that is fused. Logits that a CUDA graph of SGLang's has left
        out are computed where it is not."""
        step, self._next = self._next, None
        self.runtime.step_of_replicas = step
        try:
            result = original(model_runner, forward_batch, *args, **kwargs)
            if step is not None and result.logits_output is not None:
                self._finish(result.logits_output, step, forward_batch)
        finally:
            self.runtime.step_of_replicas = None
        return result

    def _finish(self, output: Any, step: Step, forward_batch: Any) -> None:
        """Draw the rows of ``output``, or compute its logits."""
        started, lazy = time.perf_counter(), output.next_token_logits
        if type(lazy) is LazyLogits and step.fused:
            try:
                setattr(output, DRAWN_ATTRIBUTE, self._draw(lazy, step, forward_batch))
            except Exception as error:
                self.runtime.stay_with_ranks(f"{type(error).__name__}: {error}")
        else:
            output.next_token_logits = self._rows_of(plain(lazy))
        self.runtime.metrics.scheduling_seconds += time.perf_counter() - started

    def _rows_of(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        """These logits, for our sampler where it can read them."""
        state = self.runtime.head_of_replicas
        if state is None or logits is None or logits.dtype is not torch.float32 or logits.stride(-1) != 1:
            return logits
        return LazyLogits(logits, logits.shape[1], LogitRows(state), lambda rows: rows)

    def _draw(self, lazy: LazyLogits, step: Step, forward_batch: Any) -> Drawn:
        state, batch = lazy.source, batch_of(forward_batch.sampling_info)
        rows = step.rows[state.exchange.rank]
        if rows and (batch is None or len(batch) != rows or lazy.num_rows < rows):
            found = "no" if batch is None else len(batch)
            raise ValueError(f"the batch has {found} rows and {lazy.num_rows} hidden states; the ranks expect {rows}")
        decodes = forward_batch.forward_mode.is_decode()
        positions = forward_batch.positions if decodes else forward_batch.seq_lens - 1
        return draw(state, step, lazy.hidden[:rows], batch, forward_batch.req_pool_indices[:rows], positions[:rows])


class LogitRows:
    """Stands for a ``HeadState`` in a step whose logits SGLang's ranks have computed together: the rows of this rank,
    whole, are in the place of hidden states. What it draws and where it fails is no matter of the other ranks."""

    exchange = graphs = None

    def __init__(self, state: HeadState) -> None:
        self._state, self.head = state, LogitReader()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def step_graphs(self, *arguments: Any, **options: Any) -> None:
        """No graph holds such a step: its logits lie elsewhere each time."""

    def step_down(self, error: Exception) -> bool:
        """There is no other way to draw."""
        return False


class LogitReader:
    """Stands for a ``Head``: draws from float32 logits, scale and softcap applied."""

    logprob_scratch = None

    def draw(
        self, logits: torch.Tensor, params: BatchParams, *, return_logprob: bool = False, path: Any = None
    ) -> SampleOutput:
        return read_logits(logits, LogitsSpec(logits.shape[1]), params, return_logprob=return_logprob)

    def draw_with_logprobs(
        self, logits: torch.Tensor, params: BatchParams, wanted: WantedLogprobs
    ) -> tuple[SampleOutput, Logprobs]:
        return read_logits_with_logprobs(logits, LogitsSpec(logits.shape[1]), params, wanted)


def _asks_for_more(local_batch: Any) -> bool:
    """A row asks for other logprobs than those of its tokens."""
    if any(local_batch.top_logprobs_nums or ()) or any(ids is not None for ids in local_batch.token_ids_logprobs or ()):
        return True
    if not local_batch.forward_mode.is_extend():
        return False
    spans = zip(local_batch.extend_lens, local_batch.extend_logprob_start_lens, strict=True)
    return any(length > start for length, start in spans)


def draw(
    state: HeadState,
    step: Step,
    hidden: torch.Tensor,  # [B, D]
    batch: Batch | None,
    slots: torch.Tensor,  # [B]
    positions: torch.Tensor,  # [B]
) -> Drawn:
    """The tokens of this rank's rows; every rank calls it, one without rows too. batch: None without rows."""
    exchange, num_rows, total = state.exchange, len(hidden), sum(step.rows)
    assert exchange is not None
    state.update(total)
    known = num_binaries()
    buffers = state.rows
    if batch is not None and num_rows:
        slots, positions = (one.to(hidden.device, torch.int64).contiguous() for one in (slots, positions))
        batch.table.gather(slots, positions, buffers)
    fields = [getattr(buffers, name) for name in _SENT]
    columns = [_bytes_of(one[:num_rows]) for one in fields] + [_bytes_of(hidden)]
    received = exchange.gather_rows(torch.cat(columns, dim=1), step.rows)
    first = 0
    for field in fields:
        width = field.element_size()
        field[:total] = received[:, first : first + width].contiguous().view(field.dtype)[:, 0]
        first += width
    everyones = received[:, first:].contiguous().view(hidden.dtype)
    kind = step.kind
    params = buffers.params(
        total, truncated=kind.truncated, max_top_k=kind.max_top_k, greedy=kind.all_greedy, distribution_only=False
    )
    drawn = Drawn.of(launch(state, everyones, params, step.return_logprob))
    state.counts.launched += 1
    state.counts.late_compiles += num_binaries() - known
    start = sum(step.rows[: exchange.rank])
    mine = slice(start, start + num_rows)
    return Drawn(drawn.token_ids[mine], None if drawn.logprobs is None else drawn.logprobs[mine])


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """``[B, bytes of a row]`` uint8."""
    row_bytes = values.element_size() * (values.shape[1] if values.dim() == 2 else 1)
    return values.contiguous().view(torch.uint8).view(len(values), row_bytes)
