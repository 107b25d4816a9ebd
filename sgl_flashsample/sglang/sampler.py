"""SGLang's Sampler, with the fused pass in front of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_exec

from .edits import edits_of
from .hooks import PREPROCESS_ATTRIBUTE, REASON_ATTRIBUTE, rows_of
from .lazy_logits import LazyLogits, plain
from .plan import Plan, plan_of
from .runtime import Runtime
from .subbatch import SubBatch


def native_backend() -> str:
    """The sampling backend that SGLang would have chosen by itself. Its sampler knows its own names only."""
    from sglang.srt.utils import is_flashinfer_available

    return "flashinfer" if is_flashinfer_available() else "pytorch"


class FlashSampler(Sampler):
    """Serves each row from its hidden state when nothing stands against it, else through ``super()``."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        self.native_backend = native_backend()

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list,
        positions: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        started = time.perf_counter()
        preprocess = vars(logits_output).pop(PREPROCESS_ATTRIBUTE, None)
        runtime = self.runtime
        asks_more = any(value is not None for value in kwargs.values()) if kwargs else False
        alone = not (return_logprob or asks_more)
        steady = runtime.steady
        if steady is not None:
            if alone and not sampling_info.grammars and runtime.problem is None:
                lazy, rows = logits_output.next_token_logits, rows_of(sampling_info)
                token_ids = steady.step(started, lazy, rows, positions)
                if token_ids is not None:
                    return token_ids
            runtime.look()
        arguments = (logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
        plan = self._plan(*arguments, asks_more)
        token_ids = None
        if not plan.all_native:
            token_ids = self._fused(plan, preprocess, *arguments)
            if token_ids is None:
                plan = Plan.whole("error", len(plan.reasons))
        if token_ids is None:
            _compute_logits(logits_output, sampling_info, preprocess)
            token_ids = self._native(*arguments, **kwargs)
        self._count(logits_output, plan)
        if runtime.trace is not None:
            runtime.trace.add(token_ids, logits_output.next_token_logits.shape[-1])
        if not plan.native:
            runtime.counters.add_host_time(time.perf_counter() - started)
            if alone and not plan.edit_kinds:
                runtime.repeat(logits_output.next_token_logits, rows_of(sampling_info))
        return token_ids

    def compute_logprobs_only(self, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any) -> None:
        _compute_logits(logits_output, sampling_info, vars(logits_output).pop(PREPROCESS_ATTRIBUTE, None))
        super().compute_logprobs_only(logits_output, sampling_info, *args, **kwargs)

    def _plan(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list,
        positions: torch.Tensor,
        asks_more: bool,
    ) -> Plan:
        lazy = logits_output.next_token_logits
        num_rows = lazy.shape[0]
        if self.runtime.problem is not None:
            return Plan.whole("inactive", num_rows)
        if not isinstance(lazy, LazyLogits) or lazy.is_dense:
            known = getattr(logits_output, REASON_ATTRIBUTE, None)
            return Plan.whole(known or ("input_logprobs" if return_logprob else "logits_computed"), num_rows)
        rows = rows_of(sampling_info)
        if rows is None or len(rows) != num_rows:
            return Plan.whole("unknown_rows", num_rows)
        if positions.shape != (num_rows,):
            return Plan.whole("positions", num_rows)
        if asks_more:
            return Plan.whole("unknown_argument", num_rows)
        runtime = self.runtime
        try:
            return plan_of(
                rows,
                sampling_info,
                return_logprob,
                top_logprobs_nums,
                token_ids_logprobs,
                runtime.original_logprobs,
                runtime.grammar_problem is None,
            )
        except Exception as error:  # a request must not fail because we cannot tell what it needs
            self.runtime.disable(f"plan: {type(error).__name__}: {error}")
            return Plan.whole("error", num_rows)

    def _fused(
        self,
        plan: Plan,
        preprocess: Callable | None,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list,
        positions: torch.Tensor,
    ) -> torch.Tensor | None:
        """The fused pass over all rows, and SGLang's sampler over those of them that need it. None after a failure,
        with ``logits_output`` as it was."""
        runtime = self.runtime
        if plan.native and runtime.mixing_problem is not None:
            return None
        rows = rows_of(sampling_info)
        assert rows is not None  # else there is no plan
        try:
            edits = edits_of(rows, plan, sampling_info)
        except Exception as error:  # a grammar of another kind: its rows are SGLang's from the next step on
            runtime.stop_grammars(f"{type(error).__name__}: {error}")
            return None
        # Its cost hardly depends on the number of rows: what it draws for the others is cheaper than leaving them out.
        out = runtime.sample(logits_output.next_token_logits, rows, edits, positions, return_logprob)
        if out is None:
            return None
        self._sync_token_ids_across_tp(out.token_ids, sampling_info)
        if plan.native:
            try:
                if plan.subbatch is None:
                    plan.subbatch = SubBatch(sampling_info, rows, plan)
                token_ids, own = plan.subbatch.sample(
                    self._native,
                    preprocess,
                    logits_output,
                    sampling_info,
                    return_logprob,
                    top_logprobs_nums,
                    token_ids_logprobs,
                    positions,
                )
                plan.subbatch.merge(token_ids, own, out, logits_output)
            except Exception as error:  # as in Runtime.sample; what SGLang itself refuses it will refuse again
                runtime.stop_mixing(f"{type(error).__name__}: {error}")
                return None
        if return_logprob:
            logits_output.next_token_logprobs = out.logprobs
        return out.token_ids

    def _native(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with get_exec().kernel.override(sampling_backend=self.native_backend):
            return super().forward(*args, **kwargs)

    def _count(self, logits_output: Any, plan: Plan) -> None:
        for (path, reason), num_rows in plan.counts.items():
            self.runtime.counters.add(path, reason, num_rows)
        if self.runtime.report_path:
            logits_output.customized_info = {"flashsample_path": list(plan.labels)}


def _compute_logits(logits_output: Any, sampling_info: Any, preprocess: Callable | None) -> None:
    """Leave ``logits_output`` as SGLang's sampler expects it: real logits, preprocessed."""
    logits_output.next_token_logits = plain(logits_output.next_token_logits)
    if preprocess is not None:
        preprocess(logits_output, sampling_info)
