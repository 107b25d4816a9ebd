"""One LM head that this server fuses: its current weights, dispatch table, workspace, screen and CUDA graphs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..api import sample_from_logits
from ..decision_plane import DecisionPlane
from ..defaults import HeadTraits
from ..dispatch import default_table
from ..head import make_reading_workspace, make_workspace
from ..kernels.launch import cdiv
from ..kernels.merge_ranks import merge_records, no_record, pack_record
from ..kernels.params import BatchParams, LMHead, LogitEdits, SampleOutput, Truncation
from ..kernels.rng import GROUP_SIZE
from ..kernels.workspace import Workspace
from ..kinds import BatchKind, SamplingPath
from ..paths import compute_logits
from ..screen import Screen
from ..selfcheck import MAX_COMPILED_ROWS, compare_rows_with_reference
from . import support
from .batch import Batch
from .exchange import Exchange
from .metrics import DeviceCounters
from .screen_lifecycle import HeadScreen

logger = logging.getLogger("sgl_flashsample")

SLOTS = 2  # graphs per key, replayed in turn
# Steps of an unchanged batch before its parameters are copied, and steps with equal keys before one is captured: a
# capture takes longer than a draw.
PATIENCE = 4
MAX_GRAPH_KEYS = 512  # the least recently used are dropped
RETRY_SECONDS = 300.0  # after which what found no memory, or could not be captured, is tried again


class HeadState:
    """A LogitsProcessor with its LM head, and everything that is derived from them.

    SGLang may change either after the start (a new weight tensor, a logit scale set late): ``update`` follows.

    exchange: with the ranks that hold the rest of the head; None where it is whole. whole_rows: the kernels cannot draw
    from the parts of these ranks, so every batch is exchanged as whole rows of logits. table: what batches of this head
    take. table_file: the tuned table that it is from, or None. path: which every batch takes instead, after a failure.
    plane: draws in host memory instead, where the server asked for it. screen: where the head has one. use_step_graphs:
    whether steps of unchanged batches are captured as CUDA graphs; copies_tokens: whether each step then has tokens of
    its own, which stay. As of the last ``update``: head (this rank's part), workspace, serving_screen (None where the
    screen does not serve), graphs (None where there are none yet, or something that they were captured with has
    changed).
    """

    def __init__(
        self, processor: Any, lm_head: Any, capture: Capture | None = None, exchange: Exchange | None = None
    ) -> None:
        """capture: of CUDA graphs; ``CudaCapture`` where None."""
        self.processor, self.lm_head, self.exchange = processor, lm_head, exchange
        self.use_step_graphs = self.copies_tokens = False
        self.path: SamplingPath | None = None
        self.plane: DecisionPlane | None = None
        self.screen: HeadScreen | None = None
        self.serving_screen: Screen | None = None
        self._parameters: dict[str, torch.Tensor] = getattr(lm_head, "_parameters", {})
        self._workspace: Workspace | None = None
        self._workspace_rows = 0
        self._rows_workspace: Workspace | None = None  # of whole rows
        self._too_large: int | None = None  # rows of the smallest batch that found no memory, left to SGLang until then
        self._too_large_until = 0.0
        self._searched: DeviceCounters | None = None
        self.graphs: StepGraphs | None = None
        self._capture = capture
        self._fingerprint = self._current_fingerprint()
        self.head = self._current_head()
        self.table = default_table(self.head)
        self.table_file: str | None = None

    def update(self, num_rows: int) -> None:
        """Follow the model, and make the workspace large enough for ``num_rows`` rows. Where nothing has changed, it
        costs the host about a microsecond."""
        fingerprint = self._current_fingerprint()
        if fingerprint != self._fingerprint:
            self.graphs = None
            self.head = self._current_head()
            if HeadTraits.of(self.head) != self.table.traits:
                self.table, self.table_file = default_table(self.head), None
            self._fingerprint = fingerprint
        if num_rows > self._workspace_rows:
            # At once for all batches that kernels are compiled for: none of these allocates a workspace in a step. Then
            # a quarter more at a time: a server may climb row by row.
            rows = max(num_rows, MAX_COMPILED_ROWS, self._workspace_rows * 5 // 4)
            searched = self._workspace.searched if self._workspace is not None else None
            self._workspace = make_workspace(self.head, rows, searched, self.table)
            self._workspace_rows = rows
            self.graphs = None
            if self.exchange is not None:
                head, searched = self.head, self._workspace.searched
                whole = {"vocab_size": self.processor.vocab_size, "itemsize": head.rounding.itemsize}
                traits, rows = HeadTraits.of(head)._replace(**whole), cdiv(rows, self.exchange.num_ranks)
                self._rows_workspace = make_reading_workspace(traits, rows, head.weight.device, searched)
        serving = None if self.screen is None else self.screen.serving(self.head)
        if serving is not self.serving_screen:
            self.serving_screen, self.graphs = serving, None

    @property
    def workspace(self) -> Workspace:
        assert self._workspace is not None, "update comes first"
        return self._workspace

    @property
    def status(self) -> dict[str, Any]:
        """Of this head, for ``Runtime.status``."""
        screen, weight = self.screen, self.head.weight
        screen_bytes = 0 if screen is None else screen.num_bytes
        memory = None if self.exchange is None else self.exchange.memory
        exchanged_bytes = 0 if memory is None else memory.total_bytes
        return {
            "vocab_size": self.processor.vocab_size,
            "ranks": 1 if self.exchange is None else self.exchange.num_ranks,
            "hidden_size": weight.shape[1],
            "dtype": str(weight.dtype).removeprefix("torch."),
            "table": self.table_file,
            "decision_plane": self.plane is not None,
            "screen": None if screen is None else {"rows": screen.rows, "bytes": screen_bytes, "paused": screen.paused},
            "graphs": 0 if self.graphs is None else self.graphs.count,
            "bytes": screen_bytes + (0 if self._workspace is None else self._workspace.num_bytes) + exchanged_bytes,
        }

    def is_current(self) -> bool:
        """Whether ``head`` still describes the model: the weight's address and version (PyTorch's count of its writes),
        and the processor's logit scale, softcap and vocabulary size, are equal to those at the last ``update``."""
        return self._current_fingerprint() == self._fingerprint

    def is_of(self, processor: Any, lm_head: Any) -> bool:
        """Whether another processor computes these logits from this weight too."""
        weight = getattr(lm_head, "weight", None)
        if not isinstance(weight, torch.Tensor):
            return False
        other = _identity(processor, weight)
        return other == self._fingerprint[: len(other)]

    def _current_fingerprint(self) -> tuple:
        """Changes when an attribute that ``head`` is made of changes, and with each write to the weight that PyTorch
        counts."""
        processor = self.processor
        weight = self._parameters.get("weight")  # as an attribute of a module it is looked up in Python
        if weight is None:
            weight = self.lm_head.weight
        version = None if weight.is_inference() else weight._version
        return *_identity(processor, weight), version

    def _current_head(self) -> LMHead:
        processor, weight = self.processor, self.lm_head.weight
        keeps_fp32 = processor.use_fp32_lm_head or getattr(processor, "use_fp32_lm_head_output", False)
        options: dict[str, Any] = {
            "logit_scale": processor.logit_scale,
            "softcap": getattr(processor, "final_logit_softcapping", None) or None,
            "logits_dtype": torch.float32 if keeps_fp32 else weight.dtype,
        }
        rank, num_ranks = (0, 1) if self.exchange is None else (self.exchange.rank, self.exchange.num_ranks)
        width, vocab_size = weight.shape[0], processor.vocab_size
        # Ranks agree on this: all of them have weights of this width.
        self.whole_rows = num_ranks > 1 and (width % GROUP_SIZE != 0 or vocab_size <= (num_ranks - 1) * width)
        if self.whole_rows:
            return LMHead(weight.detach(), **options)
        head = LMHead.of_rank(weight.detach(), rank, num_ranks, vocab_size, **options)
        assert head is not None  # else whole_rows
        return head

    def unsupported_rows(self, max_rows: int, bool_masks: bool) -> str | None:
        """Why whole rows cannot be drawn on this rank, of a batch of up to ``max_rows`` rows; None where they can. Also
        compiles what the exchange launches: a rank that fails at that must not have begun to exchange."""
        assert self.exchange is not None
        head, num_ranks = self.head, self.exchange.num_ranks
        for return_logprob in (True, False):
            nothing = no_record(1, head.weight.device, return_logprob)
            merge_records(pack_record(nothing), return_logprob=return_logprob)
        return compare_rows_with_reference(
            self.processor.vocab_size,
            num_ranks * head.weight.shape[0],
            head.rounding,
            head.weight.device,
            cdiv(max_rows, num_ranks),
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            bool_masks=bool_masks,
        )

    def check_exchange(self) -> str | None:
        """Connect with the other ranks and exchange known draws; returns what was wrong, or None. Every rank calls it,
        before any step: what connects ranks and reserves memory at its first call does so now."""
        if self.exchange is None:
            return None
        device, num_ranks = self.head.weight.device, self.exchange.num_ranks
        max_rows = MAX_COMPILED_ROWS if device.type == "cuda" else 2 * num_ranks
        self.update(max_rows)
        width, gatherer = self.head.weight.shape[0], getattr(self.processor, "_logits_gatherer", None)
        batches = list(itertools.product((max_rows, 1), (True, False)))
        right = [self._exchanges_right(*batch) for batch in batches]
        self.exchange.connect(max_rows, width, self.head.rounding)
        if self.exchange.memory is not None:
            right += [self._exchanges_right(*batch) for batch in batches]
        if gatherer is not None and not self.processor.use_attn_tp_group:
            gatherer(torch.zeros(1, width, dtype=self.head.rounding, device=device))
        if self.exchange.memory is None and (reason := support.unmeasured_exchange(device)) is not None:
            return reason
        return None if all(right) else f"in a trial exchange between {num_ranks} ranks, tokens came out wrong"

    def _exchanges_right(self, num_rows: int, return_logprob: bool) -> bool:
        """Whether a batch of one-hot logits, each rank with its part, gives the known tokens."""
        assert self.exchange is not None
        device, width = self.head.weight.device, self.head.weight.shape[0]
        row = torch.arange(num_rows, device=device)
        expected = row * 7919 % self.processor.vocab_size
        logits = torch.zeros(num_rows, width, dtype=self.head.rounding, device=device)
        local = expected - self.exchange.rank * width
        is_here = (local >= 0) & (local < width)
        logits[row[is_here], local[is_here]] = 8.0
        greedy = BatchParams(torch.zeros(num_rows, device=device), torch.zeros_like(row), torch.zeros_like(row))
        drawn = [
            self.exchange.draw_rows(logits, greedy, lambda rows, params: self.sample_rows(rows, params, return_logprob))
        ]
        if not self.whole_rows:
            scores, place = logits.float().max(dim=1)
            output = SampleOutput.empty(num_rows, device, return_logprob)._replace(scores=scores)
            drawn.append(self.exchange.merge(output._replace(token_ids=place + self.head.vocab_start)))
        return all(torch.equal(out.token_ids, expected) for out in drawn)

    def logits_of_shard(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, W]``: what the GEMM of this rank gives, rounded as the model's own; where the other ranks can read it,
        if there is such a place."""
        assert self.exchange is not None
        memory = self.exchange.memory_for(hidden.shape[0])
        shared = None if memory is None else memory.own_logits[: hidden.shape[0]]
        return compute_logits(hidden, self.head, self.workspace, out=shared)

    def sample_rows(self, logits: torch.Tensor, params: BatchParams, return_logprob: bool) -> SampleOutput:
        """The draw from whole rows of logits, ``[R, N * W]``, on this rank alone."""
        return sample_from_logits(
            logits,
            params,
            vocab_size=self.processor.vocab_size,
            logit_scale=self.head.logit_scale,
            softcap=self.head.softcap,
            return_logprob=return_logprob,
            workspace=self._rows_workspace,
        )

    def step_graphs(self, batch: Batch, edits: LogitEdits | None, positions: torch.Tensor) -> StepGraphs | None:
        """The CUDA graphs that may replay a step of ``batch``; None where it is to be launched, as collectives of ranks
        are: a graph must not wait for ranks that launch what this one replays.

        FlashInfer allocates while it draws. In a pool that graphs share, what one of them allocated may hold the tokens
        of another: its batches are launched.
        """
        if not self.use_step_graphs or self.plane is not None or positions.dtype is not torch.int64:
            return None
        if self.exchange is not None and self.exchange.memory_for(len(batch)) is None:
            return None
        if batch.distribution_only and self.table.flashinfer:
            kind = BatchKind(batch.truncation is not None, edits is not None)
            if self.table.takes_flashinfer(len(batch), kind):
                return None
        if self.graphs is None:
            if self._capture is None:
                self._capture = CudaCapture(self.head.weight.device)
            used = [self.workspace, *([] if self._rows_workspace is None else [self._rows_workspace])]
            device, capture = self.head.weight.device, self._capture
            self.graphs = StepGraphs(used, MAX_COMPILED_ROWS, device, capture, self.copies_tokens)
        return self.graphs

    def fits(self, num_rows: int) -> bool:
        """Whether no batch of this size or a smaller one has run out of memory in the last ``RETRY_SECONDS``."""
        if self._too_large is None or num_rows < self._too_large:
            return True
        if time.monotonic() < self._too_large_until:
            return False
        self._too_large = None
        return True

    def out_of_memory(self, num_rows: int) -> None:
        """A batch of ``num_rows`` rows, which ``fits``, found no memory: leave it, and larger ones, to SGLang's sampler
        for ``RETRY_SECONDS``. Not where ranks share the head: each of them would do so by itself."""
        self._too_large, self._too_large_until = num_rows, time.monotonic() + RETRY_SECONDS
        logger.warning(
            "flashsample: out of GPU memory for a batch of %d requests: from this batch on, for %d minutes, batches of "
            "this size or more use SGLang's own sampler; a lower --mem-fraction-static leaves this plugin more memory",
            num_rows,
            RETRY_SECONDS // 60,
        )

    @property
    def has_screen(self) -> bool:
        return self.screen is not None and not self.screen.stopped

    def weights_change(self) -> None:
        """The head's weights change, or may have changed: no screen, and no graph that reads one, until
        ``renew_screen``."""
        if self.screen is not None:
            self.screen.invalidate()
            self.serving_screen = self.graphs = None

    def free_screen(self) -> None:
        """Give the memory of the screen back, until ``renew_screen``. Waits for the device."""
        if self.screen is not None:
            self.serving_screen = self.graphs = None
            self.screen.free(self.head)

    def renew_screen(self) -> None:
        """Make the screen a copy of what the head holds now. Waits for the device: not in a decode step."""
        if self.screen is not None and not self.screen.stopped:
            try:
                self.update(1)
                self.screen.renew(self.head)
            except Exception as error:  # memory, or a head of another shape
                self.stop_screen(f"{type(error).__name__}: {error}")

    def stop_screen(self, reason: str) -> None:
        """Draw without a screen from now on, and say why."""
        if self.has_screen:
            assert self.screen is not None
            logger.warning(
                "flashsample: screen (INT8 copy of the LM head) off until restart; small batches are slower without "
                "it, their tokens are the same: %s",
                reason,
            )
            self.screen.stop()
            self.serving_screen = self.graphs = None

    def stop_plane(self, reason: str) -> None:
        """Draw without the decision plane from now on, and say why."""
        self.plane = None
        logger.warning(
            "flashsample: decision plane off until restart; from this step on the fused pass draws, same tokens: %s",
            reason,
        )

    def step_down(self, reason: str) -> bool:
        """After a draw from this rank's part that failed: without a screen from now on, else from the logits of a GEMM,
        and say why. False where there is no other way left."""
        if self.serving_screen is not None:
            self.stop_screen(reason)
        elif self.path is None and self.head.gemm_gives_logits:
            self.path = SamplingPath.LOGITS
            logger.warning(
                "flashsample: the fused kernel failed on rank %d; until restart this rank computes its logits with a "
                "GEMM and samples from them: same tokens, slower: %s",
                0 if self.exchange is None else self.exchange.rank,
                reason,
            )
        else:
            return False
        return True

    def newly_searched(self, counter_seconds: float) -> int:
        """Rows that took a search over their logits since the last call, as far as that is known without waiting; read
        from the device at most once in ``counter_seconds`` seconds."""
        if self._searched is None:
            self.update(1)
            self._searched = DeviceCounters(self.workspace.searched, counter_seconds)
        (searched,) = self._searched.new()
        return searched


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
        frees no memory that another stream has used. End that."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with contextlib.suppress(RuntimeError):  # a capture that came to its end was left already
            torch._C._cuda_endAllocateToPool(index, pool)
            self._failed.append(graph)
            torch._C._cuda_releasePool(index, pool)


class Launched(NamedTuple):
    """A draw that has been launched. scratch: what else the launches write to and nobody else keeps: a graph of them
    writes there at each replay."""

    out: SampleOutput
    scratch: Any = None


class _Captured(NamedTuple):
    graph: Graph
    out: SampleOutput
    holds: Any  # what else its launches write to


class _KeyedGraphs:
    """The graphs of one key. copies_tokens: as of ``StepGraphs``. waiting: steps to come before one is captured. slot:
    the place of the next graph."""

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
        # Of the batch, without edits and logprobs: the graphs of (hidden states, positions), by address.
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
        """How many there are; at most ``SLOTS * MAX_GRAPH_KEYS``."""
        return sum(len(graphs.captured) for graphs in self._graphs.values())

    def can_repeat(self, batch: Batch, hidden: torch.Tensor, positions: torch.Tensor) -> bool:
        """Whether ``repeat`` would draw from them."""
        return self._graphs_of(batch, hidden, positions) is not None

    def repeat(self, batch: Batch, hidden: torch.Tensor, positions: torch.Tensor) -> SampleOutput | None:
        """The next step of ``batch``, without edits and logprobs; None unless it is the batch that was stepped last,
        and ``step`` has served it from all ``SLOTS`` graphs for the addresses of these tensors."""
        graphs = self._graphs_of(batch, hidden, positions)
        return None if graphs is None else graphs.replay_next()

    def _graphs_of(self, batch: Batch, hidden: torch.Tensor, positions: torch.Tensor) -> _KeyedGraphs | None:
        # A batch that is launched without ``step`` may lie where the last one of ``step`` did.
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
        """As ``Batch.params``, from the buffers of the graphs."""
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


def _identity(processor: Any, weight: torch.Tensor) -> tuple:
    """What the logits of a processor depend on, beside the values of its weight."""
    softcap = getattr(processor, "final_logit_softcapping", None)
    return weight.data_ptr(), processor.logit_scale, softcap, processor.vocab_size


def _places(edits: LogitEdits | None) -> tuple[Hashable, ...]:
    """What of the edits a captured graph depends on: address, shape, strides and dtype of each tensor, and repeats."""
    if edits is None:
        return ()
    tensors = (edits.additive, edits.scaling, edits.mask, edits.bias, edits.rows)
    return edits.repeats, *(
        None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in tensors
    )
