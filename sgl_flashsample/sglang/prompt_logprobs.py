"""Logprobs of prompts, without the logits of their tokens in memory.

A prefill that asks for them calls ``InputLogprobProcessor.forward``. Here the head reads its hidden states in chunks
(``Head.logprobs_of``), at temperature 1 and without edits, as SGLang does. The rows that draw a token become a
``LazyLogits``, as in any other prefill: a seed gives the same tokens with and without prompt logprobs. Ranks that share
the head read the logprobs of their parts of the vocabulary, and exchange them.

After a retraction SGLang asks for the logprobs of all tokens that a request has generated, and drops them: those of its
prompt are stored already. ``PromptHooks.prepare_for_extend`` takes them back, so such a prefill stays as any other.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..kernels.workspace import MAX_TOP_LOGPROBS
from ..logprobs import Logprobs, WantedLogprobs
from .batch import to_device
from .head import HeadState
from .lazy_logits import LazyLogits
from .runtime import RankError, Runtime
from .step_graphs import RETRY_SECONDS

logger = logging.getLogger("sgl_flashsample")

MAX_GIVEN_VALUES = 1 << 23  # logprobs of given ids in one prefill: 12 bytes of device memory each


class Prompt(NamedTuple):
    """The rows of one sequence. start: its first row. rows: the number of its rows with logprobs; a sequence without
    any has one row, which draws its token. top: the number of likeliest ids. token_ids: the given ids, or None."""

    start: int
    rows: int
    top: int
    token_ids: list[int] | None

    @property
    def all_rows(self) -> int:
        return max(self.rows, 1)


class HostRows:
    """Rows of a matrix in host memory, each as a list, read when they are iterated over. A copy on the current stream
    fills the matrix; SGLang reads the logprobs of the tokens first, which it copies later on that stream."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[list]:
        return iter(self._rows.tolist())


class PromptHooks:
    """The hook functions of prompts, bound to one Runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._off_until = 0.0  # after a failure SGLang computes the logprobs of prompts, until then
        self._drops_stored = True  # until a batch cannot be read

    def forward(
        self,
        original: Callable,
        processor: Any,
        pruned_states: torch.Tensor,
        sample_indices: torch.Tensor,
        input_logprob_indices: torch.Tensor,
        token_to_seq_idx: list[int],
        lm_head: Any,
        get_logits_fn: Callable,
        logits_metadata: Any,
        skip_chunking_for_dp_attn: bool = False,
    ) -> Any:
        """InputLogprobProcessor.forward: a LogprobResult, and the logits of the rows that draw a token."""
        started, served = time.perf_counter(), None
        # With DP attention the ranks compute these logits together.
        if not skip_chunking_for_dp_attn and time.monotonic() >= self._off_until:
            try:
                served = self._read(
                    pruned_states, sample_indices, input_logprob_indices, lm_head, get_logits_fn, logits_metadata
                )
            except RankError:
                raise
            except Exception as error:  # a request must not fail because a path cannot serve it
                self._stop(error)
        if served is None:
            return original(
                processor,
                pruned_states,
                sample_indices,
                input_logprob_indices,
                token_to_seq_idx,
                lm_head,
                get_logits_fn,
                logits_metadata,
                skip_chunking_for_dp_attn,
            )
        self.runtime.metrics.scheduling_seconds += time.perf_counter() - started
        return served

    def _read(
        self,
        hidden: torch.Tensor,
        sample_indices: torch.Tensor,
        input_logprob_indices: torch.Tensor,
        lm_head: Any,
        get_logits: Callable,
        metadata: Any,
    ) -> Any:
        """The logprobs of these prompts from our head; None where SGLang has to compute them."""
        state = self.runtime.prompt_head(getattr(get_logits, "__self__", None), hidden, lm_head, metadata)
        if state is None:
            return None
        targets: torch.Tensor = metadata.extend_input_logprob_token_ids_gpu
        prompts = prompts_of(metadata)
        num_rows, num_targets = len(hidden), len(targets)
        if sum(one.all_rows for one in prompts) != num_rows or sum(one.rows for one in prompts) != num_targets:
            return None
        state.update(1)
        wanted = wanted_of(prompts, num_rows, state.processor.vocab_size, hidden.device)
        if wanted is None:
            return None
        # Rows that only draw a token are read too: a few, and without them the hidden states would have to be copied.
        if num_targets != num_rows:
            targets = targets.new_zeros(num_rows).index_copy_(0, input_logprob_indices, targets)
        logprobs = self._logprobs_of(state, hidden, targets, wanted)
        if num_targets != num_rows:
            logprobs = logprobs._replace(of_tokens=logprobs.of_tokens[input_logprob_indices])

        def compute(hidden: torch.Tensor) -> torch.Tensor:
            return get_logits(hidden, lm_head, metadata, use_logits_buffer=False)

        drawing = LazyLogits(hidden[sample_indices], state.processor.vocab_size, state, compute, prefills=True)
        return result_of(prompts, logprobs, metadata, state), drawing

    def _logprobs_of(
        self, state: HeadState, hidden: torch.Tensor, targets: torch.Tensor, wanted: WantedLogprobs
    ) -> Logprobs:
        """``Head.logprobs_of`` all ranks that share the head. Raises RankError after a failure of one of several."""
        try:
            return state.logprobs_of_prompt(hidden, targets, wanted)
        except Exception as error:
            if state.exchange is not None:
                self.runtime.stay_with_ranks(f"{type(error).__name__}: {error}")
            raise

    def _stop(self, error: Exception) -> None:
        """Leave the logprobs of prompts to SGLang, after a failure: until restart, or for a while where memory was
        missing. Raises RankError."""
        if not isinstance(error, AttributeError):  # a missing attribute is the same on all ranks
            self.runtime.stay_with_ranks(f"logprobs of a prompt: {type(error).__name__}: {error}")
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        self._off_until = time.monotonic() + RETRY_SECONDS if out_of_memory else float("inf")
        logger.warning(
            "flashsample: reading the logprobs of prompts failed; from this batch on, %s, SGLang computes them, and "
            "draws the first tokens of such prefills: %s: %s",
            f"for {RETRY_SECONDS / 60:.0f} minutes" if out_of_memory else "until restart",
            type(error).__name__,
            error,
        )

    def prepare_for_extend(self, result: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """After ScheduleBatch.prepare_for_extend: no logprobs of rows whose values SGLang has stored already."""
        try:
            if self._drops_stored and batch.return_logprob and batch.extend_input_logprob_token_ids is not None:
                drop_stored(batch)
        except Exception as error:  # SGLang then computes what it drops; ranks have the same batch in host memory
            self._drops_stored = False
            logger.warning(
                "flashsample: from this batch on until restart, prefills after a retraction compute logprobs that "
                "SGLang has stored already: %s: %s",
                type(error).__name__,
                error,
            )


def prompts_of(metadata: Any) -> list[Prompt]:
    """The sequences of a prefill (SGLang's LogitsMetadata), in the order of their rows."""
    lengths = [max(length, 0) for length in metadata.extend_logprob_pruned_lens_cpu]
    starts = itertools.accumulate((max(length, 1) for length in lengths), initial=0)
    none = (None,) * len(lengths)
    top = metadata.top_logprobs_nums if metadata.extend_return_top_logprob else (0,) * len(lengths)
    token_ids = metadata.token_ids_logprobs if metadata.extend_token_ids_logprob else none
    return [Prompt(*one) for one in zip(starts, lengths, top, token_ids, strict=False)]


def wanted_of(
    prompts: list[Prompt], num_rows: int, vocab_size: int, device: torch.device | str
) -> WantedLogprobs | None:
    """The logprobs that these prompts want of their rows; None where they want more than we read, or ids that only
    SGLang knows how to read."""
    rows = [one.all_rows for one in prompts]

    def each_row(values: torch.Tensor) -> torch.Tensor:
        lengths = to_device(rows, torch.int64, device)
        return values.repeat_interleave(lengths, dim=0, output_size=num_rows)

    tops = [one.top if one.rows else 0 for one in prompts]
    top = max(tops)
    if top > min(MAX_TOP_LOGPROBS, vocab_size):
        return None
    counts = None if min(tops) == top else each_row(to_device(tops, torch.int32, device))
    given = [one.token_ids or [] if one.rows else [] for one in prompts]
    width = max(map(len, given))
    if any(not 0 <= token_id < vocab_size for token_ids in given for token_id in token_ids):
        return None
    if num_rows * width > MAX_GIVEN_VALUES:
        return None
    ids = None
    if width:
        different = list(dict.fromkeys(tuple(token_ids) for token_ids in given if token_ids))
        if len(different) == 1:
            ids = to_device(different, torch.int64, device)
        else:
            padded = [[*token_ids, *[-1] * (width - len(token_ids))] for token_ids in given]
            ids = each_row(to_device(padded, torch.int64, device))
    return WantedLogprobs(top, counts, ids)


def result_of(prompts: list[Prompt], logprobs: Logprobs, metadata: Any, state: HeadState) -> Any:
    """SGLang's LogprobResult. Nothing waits for the device, except in a pipeline, which sends the lists on at once."""
    from sglang.srt.layers.logprob_processor import LogprobResult

    def on_host(values: torch.Tensor) -> torch.Tensor:
        if state.copies_tokens:
            return values.cpu()
        host = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        return host.copy_(values, non_blocking=True)

    def rows_of(matrix: torch.Tensor) -> list[Any]:
        rows = [HostRows(matrix[one.start : one.start + one.rows, : one.top]) for one in prompts]
        return [list(each) for each in rows] if state.copies_tokens else rows

    result = LogprobResult(token_logprobs=logprobs.of_tokens)
    if metadata.extend_return_top_logprob:
        if logprobs.top is None:
            result.top_logprobs_val, result.top_logprobs_idx = ([[[]] * one.rows for one in prompts] for _ in range(2))
        else:
            result.top_logprobs_val = rows_of(on_host(logprobs.top.logprobs))
            result.top_logprobs_idx = rows_of(on_host(logprobs.top.token_ids))
    if metadata.extend_token_ids_logprob:
        of_ids = None if logprobs.of_ids is None else on_host(logprobs.of_ids)
        result.token_ids_logprobs_val = [_given_of(one, of_ids, state.copies_tokens) for one in prompts]
        result.token_ids_logprobs_idx = [[] if one.token_ids is None else [one.token_ids] * one.rows for one in prompts]
    return result


def _given_of(prompt: Prompt, of_ids: torch.Tensor | None, as_list: bool) -> list | torch.Tensor:
    """The logprobs of the given ids of one sequence: as SGLang takes them, a matrix in host memory or its rows."""
    if prompt.token_ids is None or not prompt.rows:
        return []
    if of_ids is None:
        return [[]] * prompt.rows
    values = of_ids[prompt.start : prompt.start + prompt.rows, : len(prompt.token_ids)]
    return values.tolist() if as_list else values


def drop_stored(batch: Any) -> None:
    """Ask for no logprobs of the rows of requests whose prompt has its logprobs already, of SGLang's ScheduleBatch that
    has just been prepared for a prefill."""
    if batch.model_config.is_encoder_decoder:  # whose lengths count other tokens
        return
    stored = [request.logprob.input_token_logprobs_val is not None for request in batch.reqs]
    if not any(stored):
        return
    starts, lengths = batch.extend_logprob_start_lens, batch.extend_lens
    token_ids: torch.Tensor = batch.extend_input_logprob_token_ids
    parts = token_ids.split([length - start for length, start in zip(lengths, starts, strict=True)])
    kept = torch.cat([token_ids[:0], *(part for part, drop in zip(parts, stored, strict=True) if not drop)])
    if token_ids.is_pinned():
        with contextlib.suppress(RuntimeError):  # not pinned it is copied slower; a rank must not ask for other rows
            kept = kept.pin_memory()
    batch.extend_input_logprob_token_ids = kept
    batch.extend_logprob_start_lens = [
        length if drop else start for length, start, drop in zip(lengths, starts, stored, strict=True)
    ]
