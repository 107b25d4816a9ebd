"""The rows of a mixed batch that need SGLang's own sampler, served as a batch of their own.

Only their logits are computed; SGLang's own code processes and samples them; what it returns is put in place
among the fused rows, in the form that SGLang gives the whole batch.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch

from ..api import SampleOutput
from .edits import penalties_of
from .hooks import ROWS_ATTRIBUTE
from .lazy_logits import LazyLogits
from .plan import Plan
from .rows import NEED_FLAGS, Rows, to_device

_NO_PENALIZERS = types.SimpleNamespace(is_required=False, filter=lambda keep_indices: None)
# Lists of LogitsProcessorOutput with an entry per row. SGLang copies these tensors to the host one by one and then
# asks each for its `tolist`: a row that wants none has an empty one.
_TENSOR_LISTS = ("next_token_top_logprobs_val", "next_token_top_logprobs_idx", "next_token_token_ids_logprobs_val")
# The other lists, with the entry of a row that wants none. The last two are filled by SGLang 0.5.17 alone.
_LISTS: dict[str, list | None] = {
    "next_token_token_ids_logprobs_idx": [],
    "next_token_sampling_mask_idx": None,
    "next_token_sampling_logprobs": None,
}


class SubBatch:
    """The rows of ``plan`` that are not fused, cut out of the batch of ``sampling_info``.

    Kept for as long as the batch stays as it is: cutting costs a dozen small kernels, and in SGLang 0.5.17 the
    host waits for the device while it cuts custom logit processors. ``info`` adds what changes with every step.
    """

    def __init__(self, sampling_info: Any, rows: Rows, plan: Plan) -> None:
        self.rows = plan.native
        self.index = to_device(self.rows, torch.int64, rows.seed.device)
        settings = copy.copy(sampling_info)
        setattr(settings, ROWS_ATTRIBUTE, None)  # our hook on the filter has nothing to follow here
        # The orchestrator is the whole batch's and filters in place; on the copies of overlap mode there is none.
        settings.penalizer_orchestrator = _NO_PENALIZERS
        settings.filter_batch(list(self.rows), self.index)
        settings.penalizer_orchestrator = settings.acc_additive_penalties = settings.acc_scaling_penalties = None
        settings.grammars = settings.grammar_mask = None
        # SGLang's flags stay set after the request that needed them has left; these are as for the rows alone.
        for name, needs in zip(NEED_FLAGS, zip(*(rows.needs[row] for row in self.rows), strict=True), strict=True):
            setattr(settings, name, any(needs))
        settings.is_any_greedy = any(rows.greedy[row] for row in self.rows)
        settings.is_all_greedy = all(rows.greedy[row] for row in self.rows)
        self._settings = settings

    def info(self, sampling_info: Any, return_logprob: bool) -> Any:
        """The SamplingBatchInfo of these rows in this step; ``sampling_info`` (the whole batch's) stays as it is."""
        info = copy.copy(self._settings)
        additive, scaling = penalties_of(sampling_info)
        info.acc_additive_penalties = None if additive is None else additive.index_select(0, self.index)
        info.acc_scaling_penalties = None if scaling is None else scaling.index_select(0, self.index)
        grammars = self._pick(sampling_info.grammars or None)
        info.grammars = grammars if grammars and any(grammars) else None
        if return_logprob:
            # The flag also decides at which temperature SGLang takes the logprobs of greedy rows: beside sampled
            # rows at their own, else at 1. They are to be what they are in the whole batch.
            info.is_all_greedy = sampling_info.is_all_greedy
        return info

    def sample(
        self,
        forward: Callable[..., torch.Tensor],
        preprocess: Callable[[Any, Any], Any] | None,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int] | None,
        token_ids_logprobs: list | None,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, Any]:
        """``forward`` (SGLang's sampler) after ``preprocess`` (SGLang's penalties, grammars and biases) on these
        rows. Returns their token ids and their LogitsProcessorOutput."""
        lazy: LazyLogits = logits_output.next_token_logits
        own = type(logits_output)(next_token_logits=lazy.logits_of(self.index))
        info = self.info(sampling_info, return_logprob)
        if preprocess is not None:
            preprocess(own, info)
        token_ids = forward(
            own,
            info,
            return_logprob,
            self._pick(top_logprobs_nums),
            self._pick(token_ids_logprobs),
            positions.index_select(0, self.index),
        )
        return token_ids, own

    def merge(self, token_ids: torch.Tensor, own: Any, fused: SampleOutput, logits_output: Any) -> None:
        """Put what ``sample`` returned in place: tokens and logprobs into ``fused``, the rest on ``logits_output``."""
        num_rows = len(fused.token_ids)
        merged: dict[str, Any] = {}
        for name in _TENSOR_LISTS:
            if (values := getattr(own, name)) is not None:
                empty = next(filter(torch.is_tensor, values)).new_empty(0)
                values = [value if torch.is_tensor(value) else empty for value in values]
                merged[name] = self._spread(values, num_rows, empty)
        for name, filler in _LISTS.items():
            if (values := getattr(own, name)) is not None:
                merged[name] = self._spread(values, num_rows, filler)
        if getattr(own, "sampling_mask_output", None) is not None:
            # Its rows are the requests with a mask, in the order of the batch; all of them are here.
            merged["sampling_mask_output"] = own.sampling_mask_output
        fused.token_ids.index_copy_(0, self.index, token_ids.to(fused.token_ids.dtype))
        if fused.logprobs is not None:
            fused.logprobs.index_copy_(0, self.index, own.next_token_logprobs.to(fused.logprobs.dtype))
        for name, value in merged.items():  # last: nothing is left half done
            setattr(logits_output, name, value)

    def _pick(self, values: list | None) -> list | None:
        return None if values is None else [values[row] for row in self.rows]

    def _spread(self, values: list, num_rows: int, filler: Any) -> list:
        spread = [filler] * num_rows
        for row, value in zip(self.rows, values, strict=True):
            spread[row] = value
        return spread
