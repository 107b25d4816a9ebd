"""SGLang's Sampler, with the fused pass in front of it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_exec

from . import support
from .hooks import REASON_ATTRIBUTE, rows_of
from .lazy_logits import LazyLogits, plain
from .runtime import Runtime


def native_backend() -> str:
    """The sampling backend that SGLang would have chosen by itself. Its sampler knows its own names only."""
    from sglang.srt.utils import is_flashinfer_available

    return "flashinfer" if is_flashinfer_available() else "pytorch"


class FlashSampler(Sampler):
    """Serves a batch from its hidden states when nothing stands against it, else through ``super()``."""

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
        runtime = self.runtime
        lazy = logits_output.next_token_logits
        num_rows = lazy.shape[0]
        reason: str | None
        if runtime.problem is not None:
            reason = "inactive"
        elif not isinstance(lazy, LazyLogits) or lazy.is_dense:
            reason = getattr(logits_output, REASON_ATTRIBUTE, "input_logprobs" if return_logprob else "logits_computed")
        else:
            rows = rows_of(sampling_info)
            reason = support.batch_reason(
                rows, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, runtime.original_logprobs
            )
            if reason is None and positions.shape != (num_rows,):
                reason = "positions"
            if reason is None:
                assert rows is not None  # else there is a reason
                out = runtime.sample(lazy, rows, positions, return_logprob)
                if out is not None:
                    if return_logprob:
                        logits_output.next_token_logprobs = out.logprobs
                    self._sync_token_ids_across_tp(out.token_ids, sampling_info)
                    self._count(logits_output, "fused", "", num_rows)
                    return out.token_ids
                reason = "error"
        logits_output.next_token_logits = plain(lazy)
        with get_exec().kernel.override(sampling_backend=self.native_backend):
            token_ids = super().forward(
                logits_output,
                sampling_info,
                return_logprob,
                top_logprobs_nums,
                token_ids_logprobs,
                positions,
                **kwargs,
            )
        self._count(logits_output, "native", reason, num_rows)
        return token_ids

    def _count(self, logits_output: Any, path: str, reason: str, num_rows: int) -> None:
        self.runtime.counters.add(path, reason, num_rows)
        if self.runtime.report_path:
            label = f"{path}:{reason}" if reason else path
            logits_output.customized_info = {"flashsample_path": [label] * num_rows}
