"""Drafts of speculative decoding, straight from the draft model's hidden states.

Greedy drafts are the most likely tokens, as SGLang's own; coupled drafts are drawn as the verification will draw. It
keeps a draft where that is the token that the target draws (``speculation.py``). A draft that is drawn at the request's
temperature, with the noise of that token, is more often the target's token than the draft model's most likely one is
(Daliri, Musco and Suresh, arXiv 2408.07978). The tokens do not depend on the drafts.

With ``--speculative-eagle-topk`` above 1 the drafts are a tree. The children of a node are the ids with the best
perturbed scores of the draft model: its draw, and those that the target draws most likely where it does not draw that
one. SGLang's builder keeps the nodes with the largest products of probabilities; it gets, for the softmax of the
draft model, how likely the target draws each child.

SGLang takes the largest logit of its draft model in several places, some of them in its own CUDA graphs. When the draft
model's LogitsProcessor returns, the drafts are known. It returns a stand-in for the logits, ``DraftLogits``, whose
largest one in each row is the draft. A graph reads temperatures and seeds in buffers that never move, and each step of
the server fills them first. The workspace and the screen that it was captured with stay too; until a change of weights
is over, and after a failure, graphs draft from an outdated screen: fewer drafts are accepted, the tokens are the same.

Ranks that share the draft model's LM head each draw from their part, and exchange the draws as in a step of the target
(``exchange.py``), also within SGLang's graphs. They draft alike, so a failure on one of them ends the server.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable
from typing import Any

import torch

from ..head import Head
from ..kernels.gather_rows import RowBuffers
from ..kernels.params import BatchParams
from ..selfcheck import MAX_COMPILED_ROWS
from ..switches import ALL_IDS, DRAFT_VOCAB_VARIABLE, DRAFTS_VARIABLE, text, word
from .batch import Batch, batch_of, routing_of
from .draft_graphs import BothGraphs
from .exchange import Exchange
from .find_heads import heads_of, processors_of
from .lazy_logits import DraftLogits, LazyLogits, plain
from .learned_vocabulary import LearnedVocabulary, hot_vocabulary
from .own_vocabulary import HotVocabulary, OwnVocabulary, unsupported_ids
from .runtime import Runtime
from .support import draft_model_has_its_own_head, unsupported_drafts

logger = logging.getLogger("sgl_flashsample")

_METADATA = 3  # the place of ``logits_metadata`` among the arguments of ``LogitsProcessor.forward``
# The chance of a child is _CEILING times the softmax of _SHARPNESS times the scores of all children of its node. Other
# numbers make other trees, and no other tokens; they are not fitted to a server's drafts.
_CEILING, _SHARPNESS = 0.9, 1.5


_Drawn = tuple[torch.Tensor, torch.Tensor | None]  # ids and chances of ``DraftLogits``


class DraftMode(enum.StrEnum):
    """The kind of drafts that the server's user chose."""

    COUPLED = "coupled"  # drawn at the request's temperature, with the noise of the target's token
    GREEDY = "greedy"  # the most likely tokens, without logits
    STOCK = "stock"  # SGLang's own: the most likely tokens


def start(runtime: Runtime, install: Callable[[Drafts], str | None]) -> None:
    """At the start of a server that verifies drafts. install: puts the hooks in place (``hooks.install_drafts``)."""
    mode = DraftMode(word(DRAFTS_VARIABLE))
    if mode is DraftMode.STOCK:
        return
    try:
        reason = unsupported_drafts() or install(Drafts(runtime, mode))
        runtime.prepares_drafts = reason is None and draft_model_has_its_own_head()
    except Exception as error:  # an SGLang whose configuration we cannot read
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        _announce_stock(reason)


def _announce_stock(reason: str) -> None:
    logger.warning("flashsample: drafts are SGLang's own (greedy), the tokens are the same: %s", reason)


class Drafts:
    """The drafts of a server with one draft model. Its methods are hooks. After a failure drafts are SGLang's own, and
    the log says why; on ranks that share a head, it is a RankError."""

    def __init__(self, runtime: Runtime, mode: DraftMode) -> None:
        self.runtime, self.mode = runtime, mode
        self._max_requests = self._num_nodes = 0
        self._num_children = 1  # of a node; 1 in a chain
        self._batch: Batch | None = None  # the batch whose parameters are loaded; None: all rows are greedy
        # The parameters of the requests. Graphs of SGLang's read them for as long as the process lives.
        self._rows: RowBuffers | None = None
        self._head: Head | None = None  # with scratch and a screen of its own
        self._own: OwnVocabulary | None = None  # where some of the target's ids are drafted
        self._learned: LearnedVocabulary | None = None  # where they are while it is in use
        self._exchange: Exchange | None = None  # with the ranks that hold the rest of the head
        self.no_graphs_reason: str | None = None  # why graphs are captured of one vocabulary alone
        self._max_rows = 0  # rows that are drawn at once

    def attach(self, worker: Any, *args: Any, **kwargs: Any) -> None:
        """Before ``EagleDraftWorker.init_cuda_graphs``: the draft model is complete, and no graph is captured."""
        if self._rows is not None:
            return
        reason = not_coupled = None
        try:
            processors = list(processors_of(worker.draft_runner.model).values())
            reason = self._unsupported(worker, processors)
            if reason is None:
                (processor,) = processors
                not_coupled = self._not_coupled(worker, processor)
                self.mode = DraftMode.COUPLED if not_coupled is None else DraftMode.GREEDY
                self._allocate(worker)
                processor.register_forward_hook(self.draw, with_kwargs=True)
                self.runtime.draws_drafts = True
        except Exception as error:  # a server must start without
            reason = f"{type(error).__name__}: {error}"
            self.runtime.stay_with_ranks(reason)
        if reason is not None:
            return self._stop(reason)
        if not_coupled is None:
            words = "coupled: drawn at each request's temperature, with the target's noise"
        else:
            words = f"greedy: {not_coupled}"
        how = "without logits" if self._own is None else f"through logits of {self._own.words}"
        if self._learned is not None:
            how += f", {self._learned.words}"
        if self._num_children > 1:
            how += f", trees of up to {self._num_children} children per node"
        logger.info("flashsample: drafts come from hidden states, %s; they are %s", how, words)

    def _unsupported(self, worker: Any, processors: list[Any]) -> str | None:
        """Why drafts are SGLang's own."""
        if len(processors) != 1:
            return f"the draft model has {len(processors)} places that compute logits; expected 1"
        model, token_ids = worker.draft_runner.model, _own_token_ids(worker)
        for processor, lm_head in heads_of(model):
            weight = getattr(lm_head, "weight", None)
            if token_ids is not None and weight is not None and len(weight) == len(token_ids):
                processor.vocab_size = len(token_ids)  # with a token map it is still the target's
        reason = self.runtime.prepare_draft_head(model, starting=False)
        if reason is not None:
            return reason
        state = self.runtime.draft_head
        assert state is not None
        if state.whole_rows or state.straddling is not None:
            return "a group of 16 ids of the draft model lies on two ranks, or a rank has none of its ids"
        return None

    def _not_coupled(self, worker: Any, processor: Any) -> str | None:
        """Why drafts are greedy; None where they are coupled."""
        if self.mode is DraftMode.GREEDY:
            return f"{DRAFTS_VARIABLE} says so"
        token_ids, verified = _own_token_ids(worker), {s.processor.vocab_size for s in self.runtime.heads}
        if token_ids is not None and len(verified) == 1:
            assert self.runtime.draft_head is not None
            return unsupported_ids(token_ids, self.runtime.draft_head.head.lm_head, *verified)
        if verified != {drafted := processor.vocab_size}:
            return f"the draft model has {drafted} ids, the target {', '.join(map(str, sorted(verified)))}"
        return None

    def _allocate(self, worker: Any) -> None:
        state = self.runtime.draft_head
        assert state is not None
        self._max_requests, self._num_nodes = worker.req_to_token_pool.size, worker.speculative_num_draft_tokens
        self._num_children = worker.topk
        # A draft extend may compute all nodes of a request.
        self._max_rows = min(self._max_requests * self._num_nodes, MAX_COMPILED_ROWS)
        is_shared = state in self.runtime.heads  # whose scratch is replaced when a batch outgrows it
        if not is_shared:
            state.update(self._max_rows)
        self._exchange = state.exchange
        if self._exchange is not None and self._exchange.memory is not None:
            self._max_rows = min(self._max_rows, self._exchange.memory.max_rows)
        token_ids = _own_token_ids(worker)
        if token_ids is None and self._exchange is None:
            self._use(hot_vocabulary(state.head.lm_head, self._max_rows, self.no_graphs_reason))
        elif text(DRAFT_VOCAB_VARIABLE) != ALL_IDS:
            why = "several ranks share its head" if token_ids is None else "it has some of the ids"
            logger.warning("flashsample: %s does nothing for this draft model: %s", DRAFT_VOCAB_VARIABLE, why)
        self._head = state.head.twin(self._max_rows if is_shared and self._own is None else 0)
        if token_ids is not None and self.mode is DraftMode.COUPLED:
            (vocab_size,) = {target.processor.vocab_size for target in self.runtime.heads}
            self._own = OwnVocabulary(self._head, token_ids, vocab_size, self._max_rows)
        if self._own is not None:
            self._max_rows = self._own.max_rows
        else:
            self._head.screen = None if state.screen is None or state.screen.stopped else state.screen.pin()
        self._rows = RowBuffers.allocate(self._max_requests, self._head.lm_head.weight.device)

    def _use(self, vocabulary: HotVocabulary | None) -> None:
        self.runtime.draft_vocabulary = vocabulary
        if isinstance(vocabulary, LearnedVocabulary):
            self._learned = vocabulary
            self.runtime.watch_tokens(vocabulary.watch)
        else:
            self._own = vocabulary

    def capture(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Before a runner of SGLang's captures a graph of drafts."""
        if self._learned is not None and not isinstance(runner.backend, BothGraphs):
            runner.backend = BothGraphs(runner.backend, self._learned)

    def load(self, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Before ``EAGLEWorkerV2.forward_batch_generation``: the parameters of this batch's rows. A batch that SGLang
        verifies gets greedy drafts: its coins do not know our noise."""
        if not self.runtime.draws_drafts:
            return
        assert self._rows is not None
        try:
            self._follow_weight()
            if self.mode is not DraftMode.COUPLED:
                return
            rows = self._rows_of(batch)
            if rows is self._batch:
                return
            if rows is None:
                self._rows.temperature.zero_()
            else:
                slots = batch.req_pool_indices[: len(rows)]
                rows.table.gather(slots, slots, self._rows)
            self._batch = rows
        except Exception as error:
            self._fail(error)

    def _follow_weight(self) -> None:
        """Renew a copy of rows of the head. While a change of weights is under way it stays: its end is announced."""
        runtime, state = self.runtime, self.runtime.draft_head
        if runtime.draft_vocabulary is None or not runtime.weights_settled:
            return
        assert state is not None
        if not state.is_current():
            state.update(1)
        runtime.draft_vocabulary.follow(state.head.lm_head, runtime.weight_changes)

    def _rows_of(self, batch: Any) -> Batch | None:
        """The rows of a batch of SGLang's that the fused pass will verify; None where SGLang will."""
        runtime, info = self.runtime, batch.sampling_info
        rows = batch_of(info)
        if runtime.inactive_reason is not None or rows is None or len(rows) > self._max_requests:
            return None
        heads = runtime.heads
        if not heads or not all(state.fits(len(rows) * self._num_nodes) for state in heads):
            return None
        if batch.has_grammar and runtime.no_grammars_reason is not None:  # ``info.grammars`` comes later in a step
            return None
        routing = routing_of(
            rows,
            info,
            batch.return_logprob,
            batch.top_logprobs_nums,
            batch.token_ids_logprobs,
            runtime.settings.original_logprobs,
            runtime.no_grammars_reason is None,
        )
        return None if routing.native else rows

    def draw(self, processor: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """After the draft model's ``LogitsProcessor``: the drafts in the place of the logits."""
        lazy, drafts = output.next_token_logits, None
        if not isinstance(lazy, LazyLogits):
            return
        try:
            forward_batch = kwargs["logits_metadata"] if "logits_metadata" in kwargs else args[_METADATA]
            drafts = self._draw(lazy, forward_batch)
        except torch.OutOfMemoryError as error:  # one pass lacks memory: SGLang computes its logits
            self.runtime.stay_with_ranks(f"drafts: {error}")
        except Exception as error:  # in the steps before a capture, or outside of any
            self._fail(error)
        output.next_token_logits = plain(lazy) if drafts is None else DraftLogits.of(lazy, *drafts)

    def _draw(self, lazy: LazyLogits, forward_batch: Any) -> _Drawn | None:
        """``[N, K]`` int64, the drafts of each row, and their chances, None in a chain; None for a pass that drafts
        nothing."""
        assert self._rows is not None and self._head is not None
        hidden, num_requests = lazy.hidden, forward_batch.batch_size
        positions = target_positions(forward_batch)
        if positions is None or len(positions) != len(hidden) or not 0 < num_requests <= self._max_requests:
            return None
        temperature, seed = self._rows.temperature[:num_requests], self._rows.seed[:num_requests]
        if (times := len(hidden) // num_requests) > 1:
            temperature, seed = (each.repeat_interleave(times, 0) for each in (temperature, seed))
        params = BatchParams(temperature, seed, positions, all_greedy=self.mode is DraftMode.GREEDY)
        state, drawn = self.runtime.draft_head, list[_Drawn]()
        assert state is not None
        if state not in self.runtime.heads and not state.is_current():  # a head of the target is followed in its steps
            state.update(1)
        if state.head.lm_head is not self._head.lm_head:  # the model has got another weight
            self._head.replace(state.head.lm_head)
        own, max_rows = self._own, self._max_rows
        if self._learned is not None and self._learned.in_use:
            own, max_rows = self._learned, self._learned.max_rows
        if len(hidden) <= max_rows:
            return self._drafts_of(hidden, params, own)
        for start in range(0, len(hidden), max_rows):
            rows = slice(start, start + max_rows)
            drawn.append(self._drafts_of(hidden[rows], params.rows(rows.start, rows.stop), own))
        ids, chances = zip(*drawn, strict=True)
        return torch.cat(ids), None if chances[0] is None else torch.cat(chances)

    def _drafts_of(self, hidden: torch.Tensor, params: BatchParams, own: OwnVocabulary | None) -> _Drawn:
        """``_draw`` of as many rows as are drawn at once."""
        assert self._head is not None
        drawer: Head | OwnVocabulary = self._head if own is None else own
        chances, exchange = None, self._exchange
        if self._num_children == 1:
            drawn = drawer.draw(hidden, params)
            ids = (drawn if exchange is None else exchange.merge(drawn)).token_ids[:, None]
        else:
            children = drawer.draw_children(hidden, params, self._num_children)
            ids, scores = children if exchange is None else exchange.merge_children(children)
            chances = torch.softmax(_SHARPNESS * scores, -1).mul_(_CEILING)
        return ids if own is None else own.drafts(ids), chances

    def add_to_chain(
        self,
        original: Callable,
        next_token_logits: torch.Tensor,
        positions: torch.Tensor,
        draft_tokens: torch.Tensor | None = None,
        draft_token_column: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Around SGLang's ``draft_topk1_postprocess``, a kernel that reads the logits' memory: the draft goes into its
        column of ``draft_tokens``, and the positions advance. Returns ``[N, 1]`` ones and drafts."""
        if not isinstance(next_token_logits, DraftLogits) or next_token_logits.is_dense:
            return original(plain(next_token_logits), positions, draft_tokens, draft_token_column)
        drafts = next_token_logits.ids
        if draft_tokens is not None:
            draft_tokens[:, draft_token_column : draft_token_column + 1].copy_(drafts)
        positions.add_(1)
        return torch.ones_like(drafts, dtype=torch.float32), drafts

    def _fail(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.runtime.stay_with_ranks(f"drafts: {reason}")
        self._stop(f"until restart, after {reason}")

    def _stop(self, reason: str) -> None:
        self.runtime.draws_drafts = False
        if self._learned is not None:
            self._learned.stop()
        if self._rows is not None:
            with contextlib.suppress(Exception):
                self._rows.temperature.zero_()  # graphs that are captured already go on reading it
        _announce_stock(reason)


def _own_token_ids(worker: Any) -> torch.Tensor | None:
    """``[H]`` int64: the target's id of each id of a draft model that has not all of them."""
    return getattr(worker, "hot_token_id", None)


def target_positions(forward_batch: Any) -> torch.Tensor | None:
    """``[N]`` int64: for each row of logits that a draft model computes for ``forward_batch``, the position at which
    the target draws the token that the row drafts. None in a pass that drafts nothing.

    The draft model has at each position the token of the next: what follows that token is drafted there, and drawn by
    the target one position later.
    """
    mode, positions = forward_batch.forward_mode, forward_batch.positions
    if mode.is_draft_extend_v2():
        selected = getattr(forward_batch.spec_info, "select_index", None)  # SGLang 0.5.17 computes all rows
        positions = positions if selected is None else positions[selected]
    elif mode.is_extend() and not mode.is_target_verify():
        positions = positions[torch.cumsum(forward_batch.extend_seq_lens, 0) - 1]
    elif not mode.is_decode():
        return None
    return positions.to(torch.int64) + 1
