"""SGLang's Sampler, with the fused pass in front of it: each row by the fused pass, or by SGLang's own sampler."""

from __future__ import annotations

import copy
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_exec

from ..kernels.workspace import MAX_TOP_LOGPROBS
from .batch import (
    BATCH_ATTRIBUTE,
    DRAWN_ATTRIBUTE,
    PREPROCESS_ATTRIBUTE,
    REASON_ATTRIBUTE,
    ROUTING_ATTRIBUTE,
    Batch,
    GrammarError,
    Routing,
    batch_of,
    edits_of,
    penalties_of,
    routing_of,
    slots_of,
    time_of_sglang,
    to_device,
)
from .draw import Step, draw, replayed
from .head import HeadState
from .lazy_logits import LazyLogits, plain
from .row_table import NEED_FLAGS, Reason
from .runtime import Runtime
from .step_graphs import Drawn

_NO_PENALIZERS = types.SimpleNamespace(is_required=False, filter=lambda keep_indices: None)
# Lists of LogitsProcessorOutput with an entry per row. SGLang copies these tensors to the host one by one and then asks
# each for its `tolist`: a row without such logprobs has an empty tensor.
_TENSOR_LISTS = ("next_token_top_logprobs_val", "next_token_top_logprobs_idx", "next_token_token_ids_logprobs_val")
# The other lists, with the entry of a row without such values. The last two are filled by SGLang 0.5.17 alone.
_LISTS: dict[str, list | None] = {
    "next_token_token_ids_logprobs_idx": [],
    "next_token_sampling_mask_idx": None,
    "next_token_sampling_logprobs": None,
}


Preprocess = tuple[Callable[..., Any], Any]  # SGLang's function, and its first argument: a ModelRunner


class Call(NamedTuple):
    """The arguments of one call of SGLang's Sampler, in its order."""

    logits_output: Any
    sampling_info: Any
    return_logprob: bool
    top_logprobs_nums: list[int] | None
    token_ids_logprobs: list | None
    positions: torch.Tensor


class Unserved(Exception):
    """SGLang's sampler has to serve the whole batch."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class FlashSampler(Sampler):
    """Serves each row from its hidden state, or through ``super()`` where there is a reason against that."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        self.native_backend = _native_backend(runtime.settings.deterministic)

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
        started, runtime = time.perf_counter(), self.runtime
        sees_every_step = runtime.settings.report_path or runtime.token_counts is not None
        leaves_grammars = runtime.no_grammars_reason is not None and sampling_info.grammars
        if not (kwargs or sees_every_step or leaves_grammars or runtime.inactive_reason):
            lazy, original = logits_output.next_token_logits, runtime.settings.original_logprobs
            try:
                found = replayed(
                    started,
                    lazy,
                    sampling_info,
                    positions,
                    return_logprob,
                    top_logprobs_nums,
                    token_ids_logprobs,
                    original,
                )
            except (GrammarError, torch.OutOfMemoryError):  # the way below meets it as well, and knows what to do
                found = None
            except Exception as error:  # a request must not fail because a path cannot serve it
                runtime.disable(f"{type(error).__name__}: {error}")
                found = None
            if found is not None:
                drawn, asked = found
                if return_logprob:
                    logits_output.next_token_logprobs = drawn.logprobs
                    if asked is not None and drawn.rest is not None:
                        asked.deliver(drawn.rest, logits_output, keeps_tensors=lazy.source.copies_tokens)
                batch = getattr(sampling_info, BATCH_ATTRIBUTE)
                if batch.mix.edits:
                    started += time_of_sglang.take()
                if runtime.metrics.add_fused(len(batch.kinds), batch.num_truncated, started):
                    runtime.show_counts()
                return drawn.token_ids
        routing = vars(logits_output).pop(ROUTING_ATTRIBUTE, None)
        if routing is not None:
            arguments = logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
            tokens = self._native(*arguments, **kwargs)
            runtime.count(logits_output, None, routing, tokens, started)
            return tokens
        call = Call(logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
        preprocess = vars(logits_output).pop(PREPROCESS_ATTRIBUTE, None)
        drawn = vars(logits_output).pop(DRAWN_ATTRIBUTE, None)
        if drawn is not None:
            return self._drawn_with_ranks(drawn, call, kwargs, started)
        num_rows = logits_output.next_token_logits.shape[0]
        if num_rows == 0 and not return_logprob:  # a rank of DP attention without requests
            return torch.empty(0, dtype=torch.int64, device=logits_output.next_token_logits.device)
        batch, token_ids = batch_of(sampling_info), None
        try:
            routing = self._route(call, batch, num_rows, kwargs)
            if not routing.all_native:
                assert batch is not None  # else the routing is native
                token_ids = self._fused(call, batch, routing, preprocess)
        except Unserved as unserved:
            routing = Routing.whole(unserved.reason, num_rows)
        if token_ids is None:
            _compute_logits(logits_output, sampling_info, preprocess)
            token_ids = self._native(*call, **kwargs)
        self.runtime.count(logits_output, batch, routing, token_ids, started)
        return token_ids

    def _drawn_with_ranks(self, drawn: Drawn, call: Call, extra: dict[str, Any], started: float) -> torch.Tensor:
        """The tokens of a step that all ranks have drawn together. Raises RankError for a call that asks for what they
        did not agree on."""
        output, info, batch = call.logits_output, call.sampling_info, batch_of(call.sampling_info)
        asks_for_more = call.return_logprob and (
            self.runtime.settings.original_logprobs
            or any(call.top_logprobs_nums or ())
            or any(ids is not None for ids in call.token_ids_logprobs or ())
        )
        unknown = asks_for_more or any(value is not None for value in extra.values()) or any(info.grammars or ())
        if unknown or (call.return_logprob and drawn.logprobs is None):
            self.runtime.stay_with_ranks("a step that is drawn already asks for more than the ranks agreed on")
        if call.return_logprob:
            output.next_token_logprobs = drawn.logprobs
        if batch is not None and len(batch):
            self.runtime.count(output, batch, batch.fused, drawn.token_ids, started)
        return drawn.token_ids

    def compute_logprobs_only(self, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any) -> None:
        _compute_logits(logits_output, sampling_info, vars(logits_output).pop(PREPROCESS_ATTRIBUTE, None))
        super().compute_logprobs_only(logits_output, sampling_info, *args, **kwargs)

    def _route(self, call: Call, batch: Batch | None, num_rows: int, extra: dict[str, Any]) -> Routing:
        """The server of each row: the fused pass or SGLang's sampler. extra: further arguments of the call, of a
        version or mode that we do not know."""
        runtime, lazy = self.runtime, call.logits_output.next_token_logits
        if runtime.inactive_reason is not None:
            raise Unserved(Reason.INACTIVE)
        if type(lazy) is not LazyLogits or lazy.is_dense:
            raise Unserved(self._why_computed(call.logits_output))
        if batch is None or len(batch.kinds) != num_rows or slots_of(call.sampling_info, num_rows) is None:
            raise Unserved(Reason.UNKNOWN_ROWS)
        if call.positions.shape != (num_rows,):
            raise Unserved(Reason.POSITIONS)
        if extra and any(value is not None for value in extra.values()):
            raise Unserved(Reason.UNKNOWN_ARGUMENT)
        if not lazy.source.fits(num_rows):
            raise Unserved(Reason.OUT_OF_MEMORY)
        routing = guarded_routing(
            runtime,
            batch,
            call.sampling_info,
            call.return_logprob,
            call.top_logprobs_nums,
            call.token_ids_logprobs,
            vocab_size=lazy.shape[1],
            other_temperatures=lazy.source.exchange is None,
        )
        if routing.native and not routing.all_native and runtime.no_mixing_reason is not None:
            raise Unserved(Reason.ERROR)
        return routing

    def _why_computed(self, logits_output: Any) -> Reason:
        """Why there are logits already: SGLang serves their LM head, or has computed those of the prompt too, or
        something has read them."""
        if self.runtime.all_native_reason is not None:
            return Reason.INACTIVE
        known: Reason | None = getattr(logits_output, REASON_ATTRIBUTE, None)
        if known is not None or isinstance(logits_output.next_token_logits, LazyLogits):
            return known or Reason.LOGITS_COMPUTED
        if logits_output.input_token_logprobs is not None:
            return Reason.INPUT_LOGPROBS
        return Reason.INACTIVE if self.runtime.leaves_heads else Reason.LOGITS_COMPUTED

    def _fused(self, call: Call, batch: Batch, routing: Routing, preprocess: Preprocess | None) -> torch.Tensor:
        """The fused pass over all rows, and SGLang's sampler over the rows that need it. Raises Unserved after a
        failure; ``call.logits_output`` is then unchanged."""
        runtime, lazy = self.runtime, call.logits_output.next_token_logits
        try:
            edits = edits_of(batch, routing, call.sampling_info, lazy.hidden.device)
            slots = slots_of(call.sampling_info, len(batch.kinds))
            assert slots is not None  # else the routing is native
            # Its cost hardly depends on the number of rows: drawing for all is cheaper than leaving some out.
            asked = None
            if call.return_logprob:
                original = runtime.settings.original_logprobs
                temperatures = batch.temperatures(call.sampling_info, original)
                asked = routing.asked(call.top_logprobs_nums, call.token_ids_logprobs, original, temperatures)
            drawn = draw(lazy, Step(batch, slots, call.positions, edits, call.return_logprob, asked=asked))
        except GrammarError as error:  # its rows are SGLang's from the next step on
            runtime.stop_grammars(str(error), error.everywhere or lazy.source.exchange is None)
            raise Unserved(Reason.ERROR) from None
        except torch.OutOfMemoryError:
            self._out_of_memory(lazy.source, len(batch))
        except Exception as error:  # a request must not fail because a path cannot serve it
            runtime.disable(f"{type(error).__name__}: {error}")
            raise Unserved(Reason.ERROR) from None
        if routing.native:
            try:
                if routing.native_rows is None:
                    routing.native_rows = NativeRows(call.sampling_info, batch, routing, lazy.hidden.device)
                token_ids, output = routing.native_rows.sample(self._native, preprocess, call)
                routing.native_rows.merge(token_ids, output, drawn, call.logits_output)
            except torch.OutOfMemoryError:
                self._out_of_memory(lazy.source, len(batch))
            except Exception as error:  # SGLang refuses the batch again where the request is wrong
                runtime.stop_mixing(f"{type(error).__name__}: {error}")
                raise Unserved(Reason.ERROR) from None
        if call.return_logprob:
            call.logits_output.next_token_logprobs = drawn.logprobs
        if asked is not None and drawn.rest is not None:
            asked.deliver(drawn.rest, call.logits_output, keeps_tensors=lazy.source.copies_tokens)
        return drawn.token_ids

    def _out_of_memory(self, state: HeadState, num_rows: int) -> NoReturn:
        """In an ``except`` clause. Other batches may well find memory."""
        if state.exchange is not None:
            raise  # the ranks that share the head would wait for this one
        state.out_of_memory(num_rows)
        raise Unserved(Reason.OUT_OF_MEMORY) from None

    def _native(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with get_exec().kernel.override(sampling_backend=self.native_backend):
            return super().forward(*args, **kwargs)


def guarded_routing(
    runtime: Runtime,
    batch: Batch,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int] | None,
    token_ids_logprobs: list | None,
    vocab_size: int = MAX_TOP_LOGPROBS,
    other_temperatures: bool = False,
) -> Routing:
    """``routing_of`` in this server. Raises Unserved after a failure: a request must not fail because its needs cannot
    be read."""
    try:
        return routing_of(
            batch,
            sampling_info,
            return_logprob,
            top_logprobs_nums,
            token_ids_logprobs,
            runtime.settings.original_logprobs,
            runtime.no_grammars_reason is None,
            vocab_size,
            other_temperatures,
        )
    except Exception as error:
        runtime.disable(f"routing: {type(error).__name__}: {error}")
        raise Unserved(Reason.ERROR) from None


class NativeRows:
    """The rows of a mixed batch that need SGLang's sampler, as a separate batch.

    Only their logits are computed; SGLang's own code processes and samples them; what it returns is put in place
    among the fused rows, in the form that SGLang gives the whole batch.

    Kept while the batch does not change: separating the rows costs a dozen small kernels, and in SGLang 0.5.17 the host
    waits for the device while it separates custom logit processors. ``info`` adds what changes with every step.
    """

    def __init__(self, sampling_info: Any, batch: Batch, routing: Routing, device: torch.device) -> None:
        self.rows = routing.native
        self.index = to_device(self.rows, torch.int64, device)
        rows = [batch.row(place) for place in self.rows]
        settings = copy.copy(sampling_info)
        setattr(settings, BATCH_ATTRIBUTE, None)  # our hook on the filter has nothing to follow here
        # The orchestrator is the whole batch's and filters in place; on the copies of overlap mode there is none.
        settings.penalizer_orchestrator = _NO_PENALIZERS
        settings.filter_batch(list(self.rows), self.index)
        settings.penalizer_orchestrator = settings.acc_additive_penalties = settings.acc_scaling_penalties = None
        settings.grammars = settings.grammar_mask = None
        # SGLang's flags stay set after the request that needed them has left; here they are set for these rows alone.
        for name, needs in zip(NEED_FLAGS, zip(*(row.needs for row in rows), strict=True), strict=True):
            setattr(settings, name, any(needs))
        settings.is_any_greedy = any(row.greedy for row in rows)
        settings.is_all_greedy = all(row.greedy for row in rows)
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
            # The flag also decides at which temperature SGLang takes the logprobs of greedy rows: beside sampled rows
            # at their own, else at 1. So it keeps the value that it has for the whole batch.
            info.is_all_greedy = sampling_info.is_all_greedy
        return info

    def sample(
        self, forward: Callable[..., torch.Tensor], preprocess: Preprocess | None, call: Call
    ) -> tuple[torch.Tensor, Any]:
        """``forward`` (SGLang's sampler) after ``preprocess`` (SGLang's penalties, grammars and biases) on these
        rows. Returns their token ids and their LogitsProcessorOutput."""
        lazy: LazyLogits = call.logits_output.next_token_logits
        output = type(call.logits_output)(next_token_logits=lazy.logits_of(self.index))
        info = self.info(call.sampling_info, call.return_logprob)
        if preprocess is not None:
            function, model_runner = preprocess
            function(model_runner, output, info)
        token_ids = forward(
            output,
            info,
            call.return_logprob,
            self._pick(call.top_logprobs_nums),
            self._pick(call.token_ids_logprobs),
            call.positions.index_select(0, self.index),
        )
        return token_ids, output

    def merge(self, token_ids: torch.Tensor, output: Any, fused: Drawn, logits_output: Any) -> None:
        """Put what ``sample`` returned in place: tokens and logprobs into ``fused``, the rest on ``logits_output``."""
        num_rows = len(fused.token_ids)
        merged: dict[str, Any] = {}
        for name in _TENSOR_LISTS:
            if (values := getattr(output, name)) is not None:
                empty = next(filter(torch.is_tensor, values)).new_empty(0)
                values = [value if torch.is_tensor(value) else empty for value in values]
                merged[name] = self._spread(values, num_rows, empty)
        for name, filler in _LISTS.items():
            if (values := getattr(output, name)) is not None:
                merged[name] = self._spread(values, num_rows, filler)
        if getattr(output, "sampling_mask_output", None) is not None:
            # Its rows are the requests with a mask, in the order of the batch; all of them are here.
            merged["sampling_mask_output"] = output.sampling_mask_output
        fused.token_ids.index_copy_(0, self.index, token_ids.to(fused.token_ids.dtype))
        if fused.logprobs is not None:
            fused.logprobs.index_copy_(0, self.index, output.next_token_logprobs.to(fused.logprobs.dtype))
        for name, value in merged.items():  # last: nothing is left half done
            setattr(logits_output, name, value)

    def _pick(self, values: list | None) -> list | None:
        return None if values is None else [values[row] for row in self.rows]

    def _spread(self, values: list, num_rows: int, filler: Any) -> list:
        spread = [filler] * num_rows
        for row, value in zip(self.rows, values, strict=True):
            spread[row] = value
        return spread


def _native_backend(deterministic: bool) -> str:
    """The sampling backend that SGLang would have chosen by itself. Its sampler knows its own names only."""
    if deterministic:
        return "pytorch"
    from sglang.srt.utils import is_flashinfer_available

    return "flashinfer" if is_flashinfer_available() else "pytorch"


def _compute_logits(logits_output: Any, sampling_info: Any, preprocess: Preprocess | None) -> None:
    """Leave ``logits_output`` as SGLang's sampler expects it: real logits, preprocessed."""
    logits_output.next_token_logits = plain(logits_output.next_token_logits)
    if preprocess is not None:
        function, model_runner = preprocess
        function(model_runner, logits_output, sampling_info)
