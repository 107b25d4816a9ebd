"""Speculative decoding: SGLang's verification of drafts by a draw of the fused pass at every node.

SGLang verifies a batch in one place, ``eagle_sample``, for EAGLE, EAGLE3, MTP, STANDALONE and NGRAM. Its probabilities
of acceptance have the law of drawing a token at every node and following the drafts that were drawn
(``kernels/follow_drafts.py``). The noise is that of a token's position, so a request with a seed gets the tokens that
it gets without speculation. As SGLang's verification, this one ignores min-p, and takes top-p of what top-k has left.

Logprobs beside those of the tokens are read at every node, and those of the accepted nodes delivered, in lists with an
entry per place of SGLang's ``accept_index``. A batch in which any row needs SGLang's sampler is verified by SGLang as a
whole. Drafts are SGLang's own, or drawn by
``drafts.py``: they change how many tokens a step gains, and no token. Ranks that share the head exchange the draws of
their parts as in any step, and accept the same drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..kernels.follow_drafts import follow_drafts
from .batch import Batch, GrammarError, Routing, batch_of, edits_of_nodes
from .draw import Step, draw, replayed_nodes
from .lazy_logits import LazyLogits, plain
from .logprobs import AskedLogprobs
from .row_table import Reason
from .runtime import Runtime
from .sampler import Unserved, guarded_routing
from .step_graphs import Drawn

LOGPROBS_ATTRIBUTE = "_flashsample_logprobs"  # on LogitsProcessorOutput: NodeLogprobs
# An argument of ``eagle_sample`` that only says how to read another one.
_HARMLESS = {"watermark_full_mask"}


class NodeLogprobs(NamedTuple):
    """The logprobs of a verification. drawn: of the token at each node, and what was asked for beside them. asked: of
    each request, beside those of its tokens. keeps_tensors: as in ``AskedLogprobs.deliver``."""

    drawn: Drawn
    asked: AskedLogprobs | None
    keeps_tensors: bool

    def deliver(self, accept_index: torch.Tensor, logits_output: Any) -> None:
        """Put those of the accepted nodes, ``[B, P]`` with -1 after them, into a LogitsProcessorOutput. As in SGLang,
        places after the accepted ones have values of some node."""
        nodes, asked, rest = accept_index.clamp(min=0).long(), self.asked, self.drawn.rest
        assert self.drawn.logprobs is not None
        logits_output.next_token_logprobs = self.drawn.logprobs[nodes]
        if asked is not None and rest is not None and (asked.top or asked.ids):
            each = asked.repeated(nodes.shape[1])
            each.deliver(rest.select(nodes.reshape(-1)), logits_output, keeps_tensors=self.keeps_tensors)


class SpeculationHooks:
    """The hook functions of a verification, bound to one Runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def eagle_sample(
        self,
        original: Callable,
        verify_input: Any,
        batch: Any,
        logits_output: Any,
        grammar_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Around SGLang's ``eagle_sample``: the drawn token of each node, ``[B * D]`` int32; how many tokens each row
        gains, ``[B]`` int32; the nodes of these, ``[B, P]`` int32, -1 after them."""
        started, lazy = time.perf_counter(), logits_output.next_token_logits
        others = [*args, *(value for name, value in kwargs.items() if name not in _HARMLESS)]
        rows = verified = None
        try:
            rows, routing = self._route(verify_input, batch, lazy, others)
            verified = self._verify(started, verify_input, batch, logits_output, rows, routing, grammar_mask)
        except Unserved as unserved:
            rows, routing = None, Routing.whole(unserved.reason, len(batch.seq_lens))
        if verified is None:
            logits_output.next_token_logits = plain(lazy)
            verified = original(verify_input, batch, logits_output, grammar_mask, *args, **kwargs)
        self.runtime.count_verified(rows, routing, verified, lazy.shape[-1], started)
        return verified

    def compute_logprobs(self, original: Callable, batch: Any, logits_output: Any, *args: Any, **kwargs: Any) -> None:
        """Around SGLang's logprobs of the accepted tokens: the logprobs of our draw."""
        logprobs: NodeLogprobs | None = vars(logits_output).pop(LOGPROBS_ATTRIBUTE, None)
        if logprobs is None:
            return original(batch, logits_output, *args, **kwargs)
        nodes = kwargs["accept_index"] if "accept_index" in kwargs else args[1]
        logprobs.deliver(nodes, logits_output)
        return None

    def _route(self, verify_input: Any, batch: Any, lazy: torch.Tensor, others: list) -> tuple[Batch, Routing]:
        """The rows of the batch. Raises Unserved where SGLang has to verify them."""
        runtime, info = self.runtime, batch.sampling_info
        if runtime.inactive_reason is not None:
            raise Unserved(Reason.INACTIVE)
        if not isinstance(lazy, LazyLogits) or lazy.is_dense:
            of_sglang = not isinstance(lazy, LazyLogits) and runtime.leaves_heads
            raise Unserved(Reason.INACTIVE if of_sglang else Reason.LOGITS_COMPUTED)
        if others and any(value is not None for value in others):
            raise Unserved(Reason.UNKNOWN_ARGUMENT)
        rows, num_requests, num_rows = batch_of(info), batch.seq_lens.shape[0], lazy.num_rows
        if rows is None or len(rows.kinds) != num_requests or num_rows != num_requests * verify_input.draft_token_num:
            raise Unserved(Reason.UNKNOWN_ROWS)
        if verify_input.positions.shape != (num_rows,):
            raise Unserved(Reason.POSITIONS)
        if not lazy.source.fits(num_rows):
            raise Unserved(Reason.OUT_OF_MEMORY)
        routing = guarded_routing(
            runtime,
            rows,
            info,
            batch.return_logprob,
            batch.top_logprobs_nums,
            batch.token_ids_logprobs,
            vocab_size=lazy.shape[1],
        )
        if routing.native:
            raise Unserved(next(filter(None, routing.reasons)))
        return rows, routing

    def _verify(
        self,
        started: float,
        verify_input: Any,
        batch: Any,
        logits_output: Any,
        rows: Batch,
        routing: Routing,
        grammar_mask: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw every node and follow the drafts. Raises Unserved after a failure; ``logits_output`` is then
        unchanged."""
        lazy, num_nodes = logits_output.next_token_logits, verify_input.draft_token_num
        num_requests = len(rows.kinds)
        try:
            edits = edits_of_nodes(rows, routing, batch.sampling_info, grammar_mask, num_nodes, lazy.hidden.device)
            slots, positions = batch.req_pool_indices, verify_input.positions
            slots = slots if slots.shape[0] == num_requests else slots[:num_requests]
            asked = None
            if batch.return_logprob:
                original = self.runtime.settings.original_logprobs
                asked = routing.asked(batch.top_logprobs_nums, batch.token_ids_logprobs, original)
            of_nodes = None if asked is None else asked.repeated(num_nodes)
            step = Step(rows, slots, positions, edits, batch.return_logprob, num_nodes, of_nodes)
            drawn = replayed_nodes(started, lazy, step)
            if drawn is None:
                drawn = draw(lazy, step)
            tree = (verify_input.draft_token, verify_input.retrieve_next_token, verify_input.retrieve_next_sibling)
            tables = (_as_table(one, num_requests, num_nodes) for one in (drawn.token_ids, *tree))
            token_ids, drafts, first_child, next_sibling = tables
            nodes, num_tokens = follow_drafts(token_ids, drafts, first_child, next_sibling, verify_input.max_tree_depth)
        except GrammarError as error:
            self.runtime.stop_grammars(str(error), error.everywhere)
            raise Unserved(Reason.ERROR) from None
        except torch.OutOfMemoryError:
            if lazy.source.exchange is not None:
                raise  # the ranks that share the head would wait for this one
            lazy.source.out_of_memory(lazy.shape[0])
            raise Unserved(Reason.OUT_OF_MEMORY) from None
        except Exception as error:  # a request must not fail because a path cannot serve it
            self.runtime.disable(f"{type(error).__name__}: {error}")
            raise Unserved(Reason.ERROR) from None
        if batch.return_logprob:
            logprobs = NodeLogprobs(drawn, asked, lazy.source.copies_tokens)
            setattr(logits_output, LOGPROBS_ATTRIBUTE, logprobs)
        return drawn.token_ids.to(torch.int32), num_tokens, nodes


def _as_table(values: torch.Tensor, num_requests: int, num_nodes: int) -> torch.Tensor:
    """``[B, D]`` int64, contiguous. SGLang's are such already, or flat; an operation that changes nothing costs a
    microsecond."""
    shape = (num_requests, num_nodes)
    if values.dtype is torch.int64 and values.is_contiguous():
        return values if values.shape == shape else values.view(shape)
    return values.reshape(shape).to(torch.int64).contiguous()
