"""Coupled drafts of speculative decoding: the draft model draws as the verification will.

The verification keeps a draft where it is the token that the target draws (``speculation.py``). A draft that is drawn
at the request's temperature, with the noise of that token, is more often the target's token than the draft model's most
likely one is (Daliri, Musco and Suresh, arXiv 2408.07978). The tokens do not depend on the drafts.

SGLang takes the largest logit of its draft model in several places, some of them in its own CUDA graphs. So the token
that was drawn is made the largest where the draft model's LogitsProcessor returns the logits, and SGLang's code stays.
A graph reads temperatures and seeds in buffers that never move, and each step of the server fills them first.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from ..api import sample_from_logits
from ..defaults import HeadTraits, family_of_device
from ..dispatch import make_reading_workspace
from ..kernels.params import BatchParams
from ..kernels.workspace import Workspace
from .batch import Batch, batch_of, routing_of
from .runtime import LATE_HEAD, Runtime
from .support import unsupported_drafts

logger = logging.getLogger("sgl_flashsample")

DRAFTS_VARIABLE = "FLASHSAMPLE_DRAFTS"
_LOGITS_ITEMSIZE = 4  # of SGLang's float32 logits
_METADATA = 3  # the place of ``logits_metadata`` among the arguments of ``LogitsProcessor.forward``


def couple(runtime: Runtime, install: Callable[[CoupledDrafts], str | None]) -> None:
    """At the start of a server that verifies drafts: couple them where ``FLASHSAMPLE_DRAFTS`` says so. install: puts
    the hooks in place (``hooks.install_drafts``)."""
    mode = os.environ.get(DRAFTS_VARIABLE, "greedy")
    if mode == "greedy":
        return
    if mode != "coupled":
        return _announce_greedy(f"{DRAFTS_VARIABLE} is {mode!r}; expected greedy or coupled")
    try:
        reason = unsupported_drafts() or install(CoupledDrafts(runtime))
    except Exception as error:  # an SGLang whose configuration we cannot read
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        _announce_greedy(reason)


def _announce_greedy(reason: str) -> None:
    logger.warning("flashsample: drafts are greedy (SGLang's own), the tokens are the same: %s", reason)


class CoupledDrafts:
    """The drafts of a server whose draft model has the target's vocabulary. Its methods are hooks, and none of them
    raises: drafts are SGLang's own after a failure, and the log says why."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._processor: Any = None  # the draft model's, while its drafts are coupled
        self._max_requests = 0
        self._batch: Batch | None = None  # whose parameters are loaded; None: all rows are greedy
        # Graphs of SGLang's read and write these for as long as the process lives.
        self._temperature: torch.Tensor | None = None  # [max_requests] f32
        self._seed: torch.Tensor | None = None  # [max_requests] i64
        self._workspace: Workspace | None = None

    def attach(self, worker: Any, *args: Any, **kwargs: Any) -> None:
        """Before ``EagleDraftWorker.init_cuda_graphs``: the draft model is complete, and no graph is captured."""
        if self._temperature is not None:
            return
        try:
            reason = self._unsupported(worker)
            if reason is None:
                self._allocate(worker)
                (self._processor,) = _processors(worker)
                self._processor.register_forward_hook(self.draw, with_kwargs=True)
        except Exception as error:  # a server must start without
            self._processor, reason = None, f"{type(error).__name__}: {error}"
        if reason is not None:
            return _announce_greedy(reason)
        logger.info("flashsample: drafts are coupled: drawn at each request's temperature, with the target's noise")

    def _unsupported(self, worker: Any) -> str | None:
        runtime, heads = self.runtime, self.runtime.heads
        if runtime.all_native_reason is not None:
            return runtime.all_native_reason
        if not heads:
            return LATE_HEAD
        if getattr(worker, "hot_token_id", None) is not None:
            return "the draft model has a vocabulary of its own"
        processors = _processors(worker)
        if len(processors) != 1:
            return f"the draft model has {len(processors)} places that compute logits; expected 1"
        drafted, verified = processors[0].vocab_size, {state.processor.vocab_size for state in heads}
        if verified != {drafted}:
            return f"the draft model has {drafted} ids, the target {', '.join(map(str, sorted(verified)))}"
        return None

    def _allocate(self, worker: Any) -> None:
        device = self.runtime.heads[0].head.weight.device
        self._max_requests = worker.req_to_token_pool.size
        vocab_size = self.runtime.heads[0].processor.vocab_size
        traits = HeadTraits(family_of_device(device), _LOGITS_ITEMSIZE, vocab_size, hidden_size=0)
        # A draft extend may compute the logits of all nodes of a request.
        max_rows = self._max_requests * worker.speculative_num_draft_tokens
        self._workspace = make_reading_workspace(traits, max_rows, device)
        self._temperature = torch.zeros(self._max_requests, dtype=torch.float32, device=device)
        self._seed = torch.zeros(self._max_requests, dtype=torch.int64, device=device)

    def load(self, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Before ``EAGLEWorkerV2.forward_batch_generation``: the parameters of this batch's rows. Those of a batch that
        SGLang verifies are greedy: its coins do not know our noise."""
        if self._processor is None:
            return
        assert self._temperature is not None and self._seed is not None
        try:
            rows = self._rows_of(batch)
            if rows is self._batch:
                return
            if rows is None:
                self._temperature.zero_()
            else:
                self._temperature[: len(rows)].copy_(rows.tensors.temperature)
                self._seed[: len(rows)].copy_(rows.tensors.seed)
            self._batch = rows
        except Exception as error:
            self._stop(f"{type(error).__name__}: {error}")

    def _rows_of(self, batch: Any) -> Batch | None:
        """The rows of a batch of SGLang's that the fused pass will verify; None where SGLang will."""
        runtime, info = self.runtime, batch.sampling_info
        rows = batch_of(info)
        if runtime.inactive_reason is not None or rows is None or len(rows) > self._max_requests:
            return None
        routing = routing_of(
            rows,
            info,
            batch.return_logprob,
            batch.top_logprobs_nums,
            batch.token_ids_logprobs,
            runtime.original_logprobs,
            runtime.no_grammars_reason is None,
        )
        return None if routing.native else rows

    def draw(self, processor: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """After the draft model's ``LogitsProcessor``: the token that is drawn becomes the largest logit of its row."""
        if self._processor is None:
            return
        try:
            forward_batch = kwargs["logits_metadata"] if "logits_metadata" in kwargs else args[_METADATA]
            logits = output.next_token_logits
            if logits is not None and 0 < forward_batch.batch_size <= self._max_requests:
                self._draw(logits, forward_batch)
        except Exception as error:  # in the steps before a capture, or outside of any
            self._stop(f"{type(error).__name__}: {error}")

    def _draw(self, logits: torch.Tensor, forward_batch: Any) -> None:
        assert self._temperature is not None and self._seed is not None
        positions = target_positions(forward_batch)
        if positions is None:
            return
        requests = slice(forward_batch.batch_size)
        params = BatchParams(self._temperature[requests], self._seed[requests], positions)
        params = params.repeated(len(positions) // forward_batch.batch_size)
        drawn = sample_from_logits(logits, params, workspace=self._workspace)
        logits.scatter_(1, drawn.token_ids[:, None], torch.finfo(logits.dtype).max)

    def _stop(self, reason: str) -> None:
        self._processor = None
        if self._temperature is not None:
            with contextlib.suppress(Exception):
                self._temperature.zero_()  # graphs that are captured already go on reading it
        _announce_greedy(reason)


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


def _processors(worker: Any) -> list[Any]:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    modules = worker.draft_runner.model.modules()
    return [module for module in modules if isinstance(module, LogitsProcessor)]
