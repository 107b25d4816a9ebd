"""One LM head that this server fuses: a ``Head`` that follows SGLang's model, its screen and its CUDA graphs."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any, NamedTuple

import torch

from ..head import Head
from ..kernels.config import cdiv, next_power_of_2
from ..kernels.gather_rows import RowBuffers
from ..kernels.merge_ranks import merge_records, no_record, pack_record
from ..kernels.params import BatchParams, LMHead, SampleOutput
from ..kernels.rng import GROUP_SIZE
from ..kinds import BatchKind, SamplingPath
from ..logprobs import Logprobs, WantedLogprobs, merge_parts
from ..paths import compute_logits, gemm_dtype
from ..screen import Screen
from ..screen_race import GraphStopwatch, Stopwatch
from ..selfcheck import MAX_COMPILED_ROWS, compare_rows_with_reference
from ..tables.lookup import ResolvedTable
from . import quantised, support
from .batch import DrawKind
from .exchange import MAX_PROMPT_ROWS, Exchange
from .logits_graphs import LogitsGraphs
from .logprobs import AskedLogprobs, LogprobInputs
from .metrics import DeviceCounters
from .screen_lifecycle import HeadScreen
from .step_graphs import RETRY_SECONDS, Capture, CudaCapture, StepCounts, StepGraphs
from .straddling import Straddling

logger = logging.getLogger("sgl_flashsample")


FIRST_LOGPROB_ROWS = 64  # of the first batch with logprobs beside those of its tokens, at least
STAGED_ROWS = (1, 2, 4, 8, 16, 32)  # rows of prefills that are replayed, padded to the next: powers of 2


class GraphInputs(NamedTuple):
    """Where the graphs of SGLang's decode steps read the positions and the slots of their rows, each ``[N]`` int64 for
    the largest graph. Padding has position 0 and slot 0."""

    positions: torch.Tensor
    slots: torch.Tensor


class HeadState:
    """A LogitsProcessor with its LM head, and everything that is derived from them.

    SGLang may change either after the start (a new weight tensor, a logit scale set late): ``update`` follows.

    part: this rank's part of the LM head, as of the last ``update``. head: draws from it, or, with ``straddling``, from
    the groups of ids that lie on it alone; it has a screen while that serves. exchange: the exchange with the ranks
    that hold the rest; None where the head is whole. straddling: of groups of ids that lie on two ranks; None where
    none does. whole_rows: a rank has no id, or no whole group of ids, so every batch is exchanged as whole rows of
    logits. table_file: the tuned table of ``head``, or None.
    unraced: how ``head`` has no tuned table that knows its screen, until that is raced. screen_decision: the result of
    that race, in words, or None.
    spans_replicas: ranks with requests of their own share the head (``replicas.py``).
    path: the path that every batch takes after a failure. screen: the life of the screen, where the head has one.
    use_step_graphs: steps are captured as CUDA graphs. copies_tokens: each step then has tokens of its own, which stay.
    copies_staged: the same of steps that are in no graph of SGLang's.
    graphs: None where there are none yet, or something that they were captured with has changed. captured: hidden
    states of SGLang's graphs, by their rows. was_recaptured: SGLang has captured them once more since, elsewhere. rows:
    the parameters of the last step's rows. inputs: what SGLang's graphs read. logprob_inputs: what ours read of the
    logprobs that are asked for; None before the first of them. stages: hidden states of prefills, by
    their rows. counts: of all steps. too_large: rows of the smallest batch that has found no memory lately, left to
    SGLang for a while; None where there is none. full_step_at: by ``time.perf_counter``, when the next step has to
    follow the model, and the life of the screen, in full.
    """

    def __init__(
        self,
        processor: Any,
        lm_head: Any,
        capture: Capture | None = None,
        exchange: Exchange | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """capture: captures CUDA graphs; ``CudaCapture`` where None. batch_invariant: as in ``LogitsSpec``."""
        self.processor, self.lm_head, self.exchange = processor, lm_head, exchange
        self.batch_invariant = batch_invariant
        self.use_step_graphs = self.copies_tokens = self.copies_staged = False
        self.spans_replicas = exchange is not None and support.spans_replicas(processor)
        self.path: SamplingPath | None = None
        self.screen: HeadScreen | None = None
        self._parameters: dict[str, torch.Tensor] = getattr(lm_head, "_parameters", {})
        self.too_large: int | None = None
        self._too_large_until = 0.0
        self._searched: DeviceCounters | None = None
        self.graphs: StepGraphs | None = None
        self._logits_graphs: LogitsGraphs | None = None
        self._waiting: tuple[Screen | None, StepGraphs | None] = (None, None)  # with another screen, or without one
        self.captured: dict[int, torch.Tensor] = {}
        self.was_recaptured = False
        self.rows = RowBuffers.allocate(0, lm_head.weight.device)
        self.inputs: GraphInputs | None = None
        self.logprob_inputs: LogprobInputs | None = None
        self.stages: dict[int, torch.Tensor] = {}
        self.counts = StepCounts()
        self.full_step_at = 0.0
        self._capture = capture
        self._fingerprint = self._current_fingerprint()
        self._seen_weight: Any = None  # of the last ``update``: it has a version, or has none
        self._seen_scale: Any = None
        # ``[V]``, of a head with one scale for all rows. It stays where it is: CUDA graphs of SGLang's may read it.
        self._copied_scale: torch.Tensor | None = None
        self.straddling: Straddling | None = None
        self.head = Head(self._current_head(), announces_changes=True)
        self.table_file: str | None = None
        self.unraced: ResolvedTable | None = None
        self.screen_decision: str | None = None

    def update(self, num_rows: int) -> None:
        """Follow the model, and make the workspace large enough for ``num_rows`` rows. Where nothing has changed, it
        costs the host about a microsecond."""
        fingerprint = self._current_fingerprint()
        head = self.head
        if fingerprint != self._fingerprint:
            table, head.screen = head.table, None
            self.drop_graphs()
            head.replace(self._current_head())
            self._reserve_straddling(head.max_rows)
            self.logprob_inputs = None
            if head.table is not table:
                self.table_file = None
            self._fingerprint = fingerprint
        elif self._copies_scale and self._seen_weight is None:  # it may have been written, uncounted
            self._copy_scale(*quantised.read(self.lm_head)[:2])
        self._seen_weight, scaled = self._weight, self._fingerprint[4]
        self._seen_scale = None if scaled is None else self._scale
        if num_rows > head.max_rows:
            # At once for all batches that kernels are compiled for, and for all that SGLang has captured: none of these
            # allocates scratch in a step. Then a quarter more at a time: a server may climb row by row.
            rows = max(num_rows, MAX_COMPILED_ROWS, head.max_rows * 5 // 4, *self.captured)
            head.screen = None  # its scratch is for ``HeadScreen.rows``
            self.drop_graphs()
            buffers = RowBuffers.allocate(rows, head.lm_head.weight.device)
            head.grow(rows)  # last, where memory may be lacking: ``max_rows`` says that all of it is there
            self.rows = buffers
            if self.exchange is not None:
                head.reserve_rows(cdiv(rows, self.exchange.num_ranks), self.processor.vocab_size)
            self._reserve_straddling(rows)
        # ``head.lm_head`` would look for another weight again.
        serving = None if self.screen is None else self.screen.serving(head.lm_head)
        if serving is not head.screen:
            # A pause begins or ends: the graphs of before wait for the next time.
            (screen, graphs), self._waiting = self._waiting, (head.screen, self.graphs)
            head.screen, self.graphs = serving, graphs if screen is serving else None

    def _reserve_straddling(self, max_rows: int) -> None:
        """Scratch for groups that straddle, and for the logits of the whole part: a rank that finds no memory in a step
        would leave the others alone."""
        if self.straddling is not None and max_rows:
            self.straddling.reserve(max_rows)
            assert self.straddling.scratch is not None
            self.straddling.scratch.readers.draw.gemm(max_rows, len(self.part.weight), gemm_dtype(self.part))

    def wanted(self, asked: AskedLogprobs, num_rows: int) -> WantedLogprobs:
        """The logprobs that a step of ``num_rows`` rows, padding included, asks the head for, with scratch for them:
        what graphs read is at one place."""
        inputs = self.logprob_inputs
        if inputs is None or inputs.max_rows < num_rows:
            # No more than it takes: the logits of 512 rows are 150 MB, which a server may not have.
            rows = next_power_of_2(max(num_rows, FIRST_LOGPROB_ROWS))
            if self.exchange is None:  # ranks have reserved it: one that finds no memory would leave the others alone
                self.head.reserve_logprobs(rows)
            if inputs is not None and self.graphs is not None:
                self.graphs.forget_logprobs()
            inputs = self.logprob_inputs = LogprobInputs(rows, self.head.lm_head.weight.device)
        return inputs.load(asked, num_rows)

    def follow_recapture(self) -> None:
        """Forget the graphs that read hidden states where SGLang had them before it captured its model anew. Not while
        it captures: a graph must not be destroyed then."""
        if self.was_recaptured:
            self.was_recaptured = False
            self.drop_graphs()

    def drop_graphs(self) -> None:
        """The graphs hold something that has changed: the next steps capture others."""
        self.graphs, self._waiting = None, (None, None)
        self._logits_graphs = None

    @property
    def logits_graphs(self) -> LogitsGraphs | None:
        """The CUDA graphs of the logits of SGLang's steps; None where those are launched, as the gather of ranks is."""
        if not self.use_step_graphs or self.exchange is not None:
            return None
        made_of, graphs = self._current_fingerprint(), self._logits_graphs
        if graphs is None or graphs.made_of != made_of:
            taken = 0 if self.graphs is None else self.graphs.prepared_bytes
            graphs = self._logits_graphs = LogitsGraphs(self._capture_graphs(), self.counts, made_of, taken)
        return graphs

    def _capture_graphs(self) -> Capture:
        if self._capture is None:
            self._capture = CudaCapture(self.head.lm_head.weight.device)
        return self._capture

    def stopwatch(self) -> Stopwatch:
        """Times launches of this head as steps replay them."""
        return GraphStopwatch(self.head.lm_head.weight.device, self._capture_graphs())

    @property
    def status(self) -> dict[str, Any]:
        """Facts of this head for ``Runtime.status``."""
        screen, weight = self.screen, self.head.lm_head.weight
        screen_bytes = 0 if screen is None else screen.num_bytes
        memory = None if self.exchange is None else self.exchange.memory
        exchanged_bytes = 0 if memory is None else memory.total_bytes
        exchanged_bytes += 0 if self.straddling is None else self.straddling.num_bytes
        captured = [graphs for graphs in (self.graphs, self._logits_graphs) if graphs is not None]
        return {
            "vocab_size": self.processor.vocab_size,
            "ranks": 1 if self.exchange is None else self.exchange.num_ranks,
            "hidden_size": weight.shape[1],
            "dtype": str(weight.dtype).removeprefix("torch."),
            "table": self.table_file,
            "screen": None if screen is None else {"rows": screen.rows, "bytes": screen_bytes, "paused": screen.paused},
            "screen_decision": self.screen_decision,
            "graphs": sum(graphs.count for graphs in captured),
            "graph_bytes": sum(graphs.num_bytes for graphs in captured),
            "bytes": screen_bytes + sum(scratch.num_bytes for scratch in self.head.workspaces) + exchanged_bytes,
        }

    def is_current(self) -> bool:
        """``head`` still describes the model: the weight, its address and its version (PyTorch's count of its writes;
        an inference tensor has none), and the processor's logit scale, softcap and vocabulary size, are those of the
        last ``update``; of a quantised head, also its strides and the same of its scale. Asked at every step, and so
        without a call of our own for other heads."""
        processor, weight = self.processor, self._parameters.get("weight")
        if weight is None:
            weight = self.lm_head.weight
        place, logit_scale, softcap, vocab_size, scaled, version = self._fingerprint
        return (
            weight is self._seen_weight
            and weight.data_ptr() == place
            and (version is None or weight._version == version)
            and processor.logit_scale == logit_scale
            and getattr(processor, "final_logit_softcapping", None) == softcap
            and processor.vocab_size == vocab_size
            and (scaled is None or self._has_scale(weight, scaled))
        )

    def _has_scale(self, weight: torch.Tensor, scaled: tuple) -> bool:
        """A quantised ``weight`` has the strides, and the scale, of the last ``update``."""
        scale = self._scale
        return scale is self._seen_scale and quantised.identity(weight, scale) == scaled

    def takes(self, hidden: torch.Tensor) -> bool:
        """Hidden states of such a dtype and layout, ``[B, D]``, are drawn from."""
        weight = self._parameters.get("weight")  # without the call of ``_weight``
        if weight is None:
            weight = self.lm_head.weight
        dtype = weight.dtype
        if dtype is quantised.E4M3:
            dtype = self.head.lm_head.hidden_dtype
        return hidden.dtype is dtype and hidden.stride(1) == 1

    @property
    def _weight(self) -> torch.Tensor:
        weight = self._parameters.get("weight")  # as an attribute of a module it is looked up in Python
        return self.lm_head.weight if weight is None else weight

    @property
    def _scale(self) -> Any:
        """The scale of a quantised weight."""
        scale = self._parameters.get("weight_scale")
        return getattr(self.lm_head, "weight_scale", None) if scale is None else scale

    def is_of(self, processor: Any, lm_head: Any) -> bool:
        """Another processor computes these logits from this weight too."""
        weight = getattr(lm_head, "weight", None)
        if not isinstance(weight, torch.Tensor):
            return False
        other = _identity(processor, weight, getattr(lm_head, "weight_scale", None))
        return other == self._fingerprint[: len(other)]

    def lends_weight_alone(self, lm_head: Any) -> bool:
        """Another LM head has this quantised weight, and another scale: a draft model that takes the target's weight
        does not take its scale."""
        weight, scale = getattr(lm_head, "weight", None), getattr(lm_head, "weight_scale", None)
        if not isinstance(weight, torch.Tensor) or weight.data_ptr() != self._weight.data_ptr():
            return False
        mine, other = quantised.identity(self._weight, self._scale), quantised.identity(weight, scale)
        return mine is not None and (other is None or other[1] != mine[1])

    def _current_fingerprint(self) -> tuple:
        """A tuple that changes with each attribute that ``head`` is made of, and with each write to the weight that
        PyTorch counts."""
        processor, weight = self.processor, self._weight
        version = None if weight.is_inference() else weight._version
        # The scale of a head that is not quantised is not looked for: this is asked at every step.
        scale = self._scale if weight.dtype is quantised.E4M3 else None
        return *_identity(processor, weight, scale), version

    def _current_head(self) -> LMHead:
        processor, weight = self.processor, self.lm_head.weight.detach()
        keeps_fp32 = processor.use_fp32_lm_head or getattr(processor, "use_fp32_lm_head_output", False)
        options: dict[str, Any] = {
            "logit_scale": processor.logit_scale,
            "softcap": getattr(processor, "final_logit_softcapping", None) or None,
            "logits_dtype": torch.float32 if keeps_fp32 else weight.dtype,
            "batch_invariant": self.batch_invariant,
        }
        if weight.dtype is quantised.E4M3:
            weight, scale, hidden_dtype = quantised.read(self.lm_head)
            if len(scale) != len(weight):
                scale = self._copy_scale(weight, scale)
            # SGLang's own logits of such a head have the dtype of its hidden states, whatever is asked for.
            options |= {"scale": scale, "hidden_dtype": hidden_dtype, "logits_dtype": hidden_dtype}
        rank, num_ranks = (0, 1) if self.exchange is None else (self.exchange.rank, self.exchange.num_ranks)
        width, vocab_size = weight.shape[0], processor.vocab_size
        # Ranks agree on the following: all of them have weights of this width.
        if num_ranks > 1 and width % GROUP_SIZE:
            self.part = LMHead(weight, **options)
            self.straddling = Straddling.of_rank(self.part, rank, num_ranks, vocab_size)
            self.whole_rows = self.straddling is None
            return self.part if self.straddling is None else self.straddling.whole_groups
        self.whole_rows = num_ranks > 1 and vocab_size <= (num_ranks - 1) * width
        head = None if self.whole_rows else LMHead.of_rank(weight, rank, num_ranks, vocab_size, **options)
        self.part = LMHead(weight, **options) if head is None else head
        return self.part

    @property
    def _copies_scale(self) -> bool:
        return self._copied_scale is not None and self.part.scale is self._copied_scale

    def _copy_scale(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The scale of all rows of ``weight``, ``[1]``, once for each row."""
        if self._copied_scale is None or len(self._copied_scale) != len(weight):
            with torch.inference_mode(False):  # else it could not be written to outside of that mode
                self._copied_scale = torch.empty(len(weight), device=weight.device)
        return self._copied_scale.copy_(scale)

    def unsupported_rows(self, max_rows: int, bool_masks: bool) -> str | None:
        """Why this rank cannot draw whole rows, in batches of up to ``max_rows`` rows; None where it can. Also compiles
        the kernels of the exchange: a rank that fails at that must not have begun to exchange."""
        assert self.exchange is not None
        head, num_ranks = self.part, self.exchange.num_ranks
        device = head.weight.device
        for return_logprob in (True, False):
            nothing = no_record(1, device, return_logprob)
            merge_records(pack_record(nothing), return_logprob=return_logprob)
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        wanted, found = WantedLogprobs(1, token_ids=zero), None
        if not self.whole_rows:
            greedy = BatchParams(torch.zeros(1, device=device), zero[0], zero[0])
            hidden = torch.zeros(1, head.weight.shape[1], dtype=head.hidden_dtype, device=device)
            for one in (WantedLogprobs(token_ids=zero), wanted):  # ids alone have a kernel of their own
                drawn, found = self.head.draw_with_logprobs(hidden, greedy, one)
            if self.straddling is not None and found is not None:
                straddling = self.straddling.with_scratch(1)
                logits = torch.zeros(1, GROUP_SIZE, dtype=gemm_dtype(head), device=device)
                for return_logprob in (True, False):
                    straddling.complete(no_record(1, device, return_logprob), logits, greedy, [])
                straddling.complete_with_logprobs(drawn, found, logits, greedy, wanted, [])
        found = Logprobs.empty(wanted, 1, device) if found is None else found
        merge_parts(found.pack()[None], wanted, found.of_tokens)
        # Whole rows of this vocabulary, and groups that straddle.
        read = [(self.processor.vocab_size, num_ranks * head.weight.shape[0], cdiv(max_rows, num_ranks))]
        read += [] if self.straddling is None else [(GROUP_SIZE, GROUP_SIZE, max_rows)]
        if self.spans_replicas and (fault := self._unsupported_logits(max_rows, bool_masks)) is not None:
            return fault
        faults = (
            compare_rows_with_reference(
                *(vocab_size, width, head.rounding, device, num_rows),
                logit_scale=head.logit_scale,
                softcap=head.softcap,
                bool_masks=bool_masks,
            )
            for vocab_size, width, num_rows in read
        )
        return next(filter(None, faults), None)

    def _unsupported_logits(self, max_rows: int, bool_masks: bool) -> str | None:
        """Why SGLang's logits, float32 and as they are sampled, cannot be drawn from (``replicas.LogitReader``)."""
        size, device = self.processor.vocab_size, self.part.weight.device
        return compare_rows_with_reference(size, size, torch.float32, device, max_rows, bool_masks=bool_masks)

    def check_exchange(self) -> str | None:
        """Connect with the other ranks and exchange known draws; returns what was wrong, or None. Every rank calls it,
        before any step: the first exchange connects ranks and reserves memory."""
        if self.exchange is None:
            return None
        lm_head, num_ranks = self.part, self.exchange.num_ranks
        device = lm_head.weight.device
        max_rows = MAX_COMPILED_ROWS if device.type == "cuda" else 2 * num_ranks
        self.update(max_rows)
        width, gatherer = lm_head.weight.shape[0], getattr(self.processor, "_logits_gatherer", None)
        batches = list(itertools.product((max_rows, 1), (True, False)))
        right = [self._exchanges_right(*batch) for batch in batches]
        self.exchange.connect(max_rows, width, lm_head.rounding)
        if self.exchange.memory is not None:
            right += [self._exchanges_right(*batch) for batch in batches]
        if self.spans_replicas:
            right.append(self._gathers_right())
        if gatherer is not None and not self.processor.use_attn_tp_group:
            gatherer(torch.zeros(1, width, dtype=lm_head.rounding, device=device))
        if self.exchange.memory is None and (reason := support.unmeasured_exchange(device)) is not None:
            return reason
        return None if all(right) else f"in a trial exchange between {num_ranks} ranks, tokens came out wrong"

    def _gathers_right(self) -> bool:
        """Rows of ranks, another number of each and none of the first, come in their order."""
        assert self.exchange is not None
        rank, num_ranks = self.exchange.rank, self.exchange.num_ranks
        own = torch.full((rank, 3), rank, dtype=torch.uint8, device=self.part.weight.device)
        ranks = torch.arange(num_ranks, dtype=torch.uint8, device=own.device)
        expected = ranks.repeat_interleave(ranks.long())[:, None].expand(-1, 3)
        facts = self.exchange.of_all([rank, 2]) == [[other, 2] for other in range(num_ranks)]
        return facts and torch.equal(self.exchange.gather_rows(own, range(num_ranks)), expected)

    def _exchanges_right(self, num_rows: int, return_logprob: bool) -> bool:
        """A batch of one-hot logits, each rank with its part, gives the known tokens."""
        assert self.exchange is not None
        lm_head = self.part
        device, width = lm_head.weight.device, lm_head.weight.shape[0]
        row = torch.arange(num_rows, device=device)
        expected = row * 7919 % self.processor.vocab_size
        logits = torch.zeros(num_rows, width, dtype=lm_head.rounding, device=device)
        local = expected - self.exchange.rank * width
        is_here = (local >= 0) & (local < width)
        logits[row[is_here], local[is_here]] = 8.0
        greedy = BatchParams(torch.zeros(num_rows, device=device), torch.zeros_like(row), torch.zeros_like(row))
        drawn = [
            self.exchange.draw_rows(logits, greedy, lambda rows, params: self.sample_rows(rows, params, return_logprob))
        ]
        likeliest = []
        if return_logprob:
            wanted = WantedLogprobs(1, token_ids=expected[:, None].contiguous())
            out, found = self.exchange.draw_rows_with_logprobs(logits, greedy, wanted, self.sample_rows_with_logprobs)
            assert found.top is not None and found.of_ids is not None
            drawn.append(out)
            differs = (found.of_tokens - found.of_ids[:, 0]).abs()
            likeliest = [found.top.token_ids[:, 0] == expected, differs < 1e-3]
        if not self.whole_rows:
            drawn.append(self.exchange.merge(self._largest(logits, greedy, return_logprob)))
        return all(torch.equal(out.token_ids, expected) for out in drawn) and all(bool(one.all()) for one in likeliest)

    def _largest(self, logits: torch.Tensor, greedy: BatchParams, return_logprob: bool) -> SampleOutput:
        """The greedy draw from ``[B, W]`` logits of this rank's part."""
        assert self.exchange is not None
        straddling, start, first = self.straddling, self.exchange.rank * len(self.part.weight), 0
        inside = logits
        if straddling is not None:
            whole = straddling.whole_groups
            first = whole.vocab_start - start
            inside = logits[:, first : first + len(whole.weight)]
        scores, place = inside.float().max(dim=1)
        output = SampleOutput.empty(len(logits), logits.device, return_logprob)
        output = output._replace(scores=scores, token_ids=place + start + first)
        if straddling is None:
            return output
        received = self.exchange.first_logits(logits[:, :GROUP_SIZE].contiguous())
        if straddling.last is None:
            return output
        last = logits[:, logits.shape[1] - len(straddling.last.weight) :]
        return straddling.complete(output, straddling.group_of(last, received), greedy, [])

    def logits_of_shard(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, W]``: the logits of this rank's GEMM, rounded as the model's own; in memory that the other ranks can
        read, if there is such memory."""
        assert self.exchange is not None
        memory, num_rows = self.exchange.memory, len(hidden)
        shared = None if memory is None else memory.own_logits[:num_rows]
        if self.straddling is None:
            return self.head.logits(hidden, out=shared)
        assert self.straddling.scratch is not None
        return compute_logits(hidden, self.part, self.straddling.scratch.readers.draw, out=shared)

    def logits_of_group(self, straddling: Straddling, hidden: torch.Tensor) -> torch.Tensor | None:
        """``[B, GROUP_SIZE]``: the logits of the group of ids that begins on this rank and ends on the next; None
        without one. An exchange: every rank calls it, where groups straddle."""
        assert self.exchange is not None
        memory = self.exchange.memory
        shared = None if memory is None else memory.own_logits[: len(hidden), :GROUP_SIZE]
        received = self.exchange.first_logits(straddling.logits_of_first(hidden, shared))
        return straddling.logits_of_group(hidden, received)

    def logprobs_of_prompt(self, hidden: torch.Tensor, token_ids: torch.Tensor, wanted: WantedLogprobs) -> Logprobs:
        """``Head.logprobs_of`` the whole vocabulary: of all ranks that share the head, each of which calls it."""
        found = self.head.logprobs_of(hidden, token_ids, wanted)
        if self.exchange is None:
            return found
        num_rows = len(hidden)
        # Scratch of this call alone: a prompt must not leave behind what a step of decoding never needs.
        straddling = self.straddling and self.straddling.with_scratch(min(num_rows, MAX_PROMPT_ROWS))
        for start in range(0, 0 if straddling is None else num_rows, MAX_PROMPT_ROWS):
            assert straddling is not None
            stop = min(start + MAX_PROMPT_ROWS, num_rows)
            some = hidden[start:stop]
            received = self.exchange.first_logits(straddling.logits_of_first(some), by_memory=False)
            logits = straddling.logits_of_group(some, received)
            beside = token_ids[start:stop], wanted.rows(start, stop, num_rows)
            found.store(start, straddling.complete_prompt(found.rows(start, stop), logits, *beside))
        return self.exchange.merge_prompt(found, wanted)

    def sample_rows(self, logits: torch.Tensor, params: BatchParams, return_logprob: bool) -> SampleOutput:
        """The draw from whole rows of logits, ``[R, N * W]``, on this rank alone."""
        vocab_size = self.processor.vocab_size
        return self.head.draw_from_logits(logits, params, vocab_size=vocab_size, return_logprob=return_logprob)

    def sample_rows_with_logprobs(
        self, logits: torch.Tensor, params: BatchParams, wanted: WantedLogprobs
    ) -> tuple[SampleOutput, Logprobs]:
        """``sample_rows``, with the logprobs that are wanted of these rows."""
        size = self.processor.vocab_size
        return self.head.draw_from_logits_with_logprobs(logits, params, wanted, vocab_size=size)

    def stage_for(self, num_rows: int, prefills: bool = True) -> torch.Tensor | None:
        """The stage that a step of so many rows is replayed on where it is in no graph of SGLang's; None where it is to
        be launched: a step of more rows, and one of a pipeline, whose batch may be overwritten before it has run. Of
        ranks that share the head, those of prefills are replayed alone."""
        if not self.use_step_graphs or self.copies_tokens or num_rows > max(STAGED_ROWS, default=0):
            return None
        if self.exchange is not None and not prefills:
            return None
        return self.stage(next_power_of_2(num_rows))

    def stage(self, rows: int) -> torch.Tensor:
        """``[rows, D]``, where graphs bring hidden states that lie elsewhere each time."""
        stage = self.stages.get(rows)
        if stage is None:
            head = self.head.lm_head
            shape = rows, head.weight.shape[1]
            stage = self.stages[rows] = torch.zeros(shape, dtype=head.hidden_dtype, device=head.weight.device)
        return stage

    def step_graphs(self, num_rows: int, kind: DrawKind, edited: bool) -> StepGraphs | None:
        """The CUDA graphs that may replay a step of such a batch; None where it is to be launched, as collectives of
        ranks are: a graph must not wait for ranks that launch what this one replays.

        FlashInfer allocates while it draws. In a pool that graphs share, what one of them allocated may hold the tokens
        of another: its batches are launched.
        """
        if not self.use_step_graphs:
            return None
        if self.exchange is not None and self.exchange.memory is None:
            return None
        head = self.head
        by_flashinfer = kind.distribution_only and head.table.flashinfer
        if by_flashinfer and head.table.takes_flashinfer(num_rows, BatchKind(kind.truncated, edited)):
            return None
        if self.graphs is None:
            capture = self._capture_graphs()
            self.graphs = StepGraphs(head.workspaces, capture, self.counts, self.copies_tokens, self.copies_staged)
        assert self.graphs is not None
        return None if self.graphs.is_off else self.graphs

    @property
    def draws_padding(self) -> bool:
        """A step that is launched has the rows that a graph would have: of ranks that exchange through memory, one may
        launch what another one replays, and all of them exchange as many rows."""
        return self.exchange is not None and self.exchange.memory is not None

    def cuts_blocks_between(self, num_rows: int, repeats: int) -> bool:
        """Ranks exchange so many rows in blocks, of which one begins between rows that share a row of edits: edits that
        are found through ``LogitEdits.places`` cannot."""
        memory = None if self.exchange is None else self.exchange.memory
        return memory is not None and num_rows > memory.max_rows and memory.max_rows % repeats != 0

    def fits(self, num_rows: int) -> bool:
        """No batch of this size or a smaller one has run out of memory in the last ``RETRY_SECONDS``."""
        if self.too_large is not None and time.monotonic() >= self._too_large_until:
            self.too_large = None
        return self.too_large is None or num_rows < self.too_large

    def out_of_memory(self, num_rows: int) -> None:
        """A batch of ``num_rows`` rows, which ``fits``, found no memory: leave it, and larger ones, to SGLang's sampler
        for ``RETRY_SECONDS``. Not for ranks that share the head: each would decide alone."""
        self.too_large, self._too_large_until = num_rows, time.monotonic() + RETRY_SECONDS
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
        ``renew_screen``; and no step, until a copied scale has been copied anew."""
        if self._copies_scale:
            self._seen_weight = None
        if self.screen is not None:
            self.screen.invalidate()
            self.head.screen = None
            self.drop_graphs()

    def free_screen(self) -> None:
        """Give the memory of the screen back, until ``renew_screen``. Waits for the device."""
        if self.screen is not None:
            self.head.screen = None
            self.drop_graphs()
            self.screen.free(self.head.lm_head)

    def renew_screen(self) -> None:
        """Make the screen a copy of what the head holds now. Waits for the device: not in a decode step."""
        if self.screen is not None and not self.screen.stopped:
            try:
                self.update(1)
                self.screen.renew(self.head.lm_head)
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
            self.head.screen = None
            self.drop_graphs()

    def step_down(self, error: Exception) -> bool:
        """After a draw that failed: draw without a screen from now on, else, where ranks share the head, from the
        logits of a GEMM, and say why. False where there is no other way left."""
        if self.exchange is None and (self.head.screen is None or isinstance(error, torch.OutOfMemoryError)):
            return False
        reason = f"{type(error).__name__}: {error}"
        if self.head.screen is not None:
            self.stop_screen(reason)
        elif self.path is None and self.head.lm_head.gemm_gives_logits:
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
            assert self.head.searched is not None
            self._searched = DeviceCounters(self.head.searched, counter_seconds)
        (searched,) = self._searched.new()
        return searched


def _identity(processor: Any, weight: torch.Tensor, scale: Any) -> tuple:
    """The properties that the logits of a processor depend on, beside the values of its weight."""
    softcap, scaled = getattr(processor, "final_logit_softcapping", None), quantised.identity(weight, scale)
    return weight.data_ptr(), processor.logit_scale, softcap, processor.vocab_size, scaled
