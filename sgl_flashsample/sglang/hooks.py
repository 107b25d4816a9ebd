"""The places where SGLang calls us. Installed only in a process whose server selected the backend."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

from . import versions
from .lazy_logits import LazyLogits, plain
from .rows import Rows
from .runtime import Runtime

ROWS_ATTRIBUTE = "_flashsample_rows"  # on SamplingBatchInfo
REASON_ATTRIBUTE = "_flashsample_reason"  # on LogitsProcessorOutput: why its logits were computed after all
PREPROCESS_ATTRIBUTE = "_flashsample_preprocess"  # on LogitsProcessorOutput: SGLang's preprocessing, still to be done
_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"


def rows_of(sampling_info: Any) -> Rows | None:
    """The rows that follow this SamplingBatchInfo; None when SGLang made it in a way we do not know."""
    return getattr(sampling_info, ROWS_ATTRIBUTE, None)


def _guarded(hook: Callable) -> Callable:
    """An AFTER hook runs inside SGLang's scheduler, where an exception would end the server: leave the fused pass
    instead. Without its rows a batch is SGLang's."""

    @functools.wraps(hook)
    def guarded(hooks: Hooks, result: Any, sampling_info: Any, *args: Any) -> None:
        try:
            hook(hooks, result, sampling_info, *args)
        except Exception as error:
            setattr(sampling_info, ROWS_ATTRIBUTE, None)
            hooks.runtime.disable(f"{hook.__name__}: {type(error).__name__}: {error}")

    return guarded


class Hooks:
    """The hook functions, bound to one Runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def get_logits(
        self,
        original: Callable,
        processor: Any,
        hidden_states: Any,
        lm_head: Any,
        logits_metadata: Any,
        embedding_bias: Any = None,
        use_logits_buffer: bool = True,
    ) -> Any:
        """LogitsProcessor._get_logits: carry the hidden states instead of computing logits."""
        state = None
        if embedding_bias is None:
            try:
                state = self.runtime.can_defer(processor, hidden_states, lm_head, logits_metadata)
            except Exception as error:  # as in _guarded
                self.runtime.disable(f"get_logits: {type(error).__name__}: {error}")
        if state is None:
            return original(processor, hidden_states, lm_head, logits_metadata, embedding_bias, use_logits_buffer)

        def compute(hidden: Any) -> Any:
            return original(processor, hidden, lm_head, logits_metadata, None, False)

        return LazyLogits(hidden_states, processor.vocab_size, state, compute)

    def load_model(self, result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        """ModelRunner.load_model: the weights are there, graphs are not captured yet."""
        try:
            if not model_runner.is_draft_worker:
                self.runtime.prepare_model(model_runner.model)
                if getattr(model_runner, "startup_weight_load", None) is not None:  # its weights are still to come
                    self.runtime.weights_settled = False
                    self.runtime.weights_change()
        except Exception as error:  # as in _guarded
            self.runtime.disable(f"load_model: {type(error).__name__}: {error}")

    def preprocess_logits(
        self, original: Callable, model_runner: Any, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """ModelRunner._preprocess_logits: applies penalties, grammar and bias, and needs real logits for that. Which
        rows will have real logits, the sampler knows: it is called next, and does this there."""
        lazy = logits_output.next_token_logits
        if isinstance(lazy, LazyLogits):
            observed = bool(args) or any(value is not None for value in kwargs.values())
            if not observed and not lazy.is_dense:
                sampling_info.grammar_mask = None  # what a departed request left behind would be another batch's
                setattr(logits_output, PREPROCESS_ATTRIBUTE, functools.partial(original, model_runner))
                return None
            setattr(logits_output, REASON_ATTRIBUTE, "sampling_observer" if observed else "logits_computed")
            logits_output.next_token_logits = plain(lazy)
        return original(model_runner, logits_output, sampling_info, *args, **kwargs)

    @_guarded
    def from_schedule_batch(self, result: Any, sampling_info: Any, batch: Any, vocab_size: int) -> None:
        runtime = self.runtime
        if runtime.problem is None:
            rows = Rows.of_requests(batch.reqs, runtime.server_seed, runtime.custom_processors, batch.device)
            setattr(sampling_info, ROWS_ATTRIBUTE, rows)

    @_guarded
    def filter_batch(self, result: Any, sampling_info: Any, keep_indices: Any, keep_indices_device: Any) -> None:
        rows = rows_of(sampling_info)
        if rows is not None:
            setattr(sampling_info, ROWS_ATTRIBUTE, rows.keep(keep_indices, keep_indices_device))

    @_guarded
    def merge_batch(self, result: Any, sampling_info: Any, other: Any) -> None:
        rows, others = rows_of(sampling_info), rows_of(other)
        merged = None if rows is None or others is None else rows.followed_by(others)
        setattr(sampling_info, ROWS_ATTRIBUTE, merged)

    @_guarded
    def copy_for_forward(self, result: Any, sampling_info: Any) -> None:
        setattr(result, ROWS_ATTRIBUTE, rows_of(sampling_info))


def install(runtime: Runtime) -> str | None:
    """Register and apply all hooks. Returns why the fused pass must stay off, None when every hook landed."""
    from sglang.srt.plugins.hook_registry import HookType

    problems = [p for p in map(versions.target_problem, versions.HOOK_TARGETS) if p]
    if problems:
        return "; ".join(problems)
    hooks = Hooks(runtime)
    table: dict[str, tuple[Callable, Any]] = {
        "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits": (hooks.get_logits, HookType.AROUND),
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model": (hooks.load_model, HookType.AFTER),
        "sglang.srt.model_executor.model_runner.ModelRunner._preprocess_logits": (
            hooks.preprocess_logits,
            HookType.AROUND,
        ),
        f"{_INFO}.adjusted_from_schedule_batch": (hooks.from_schedule_batch, HookType.AFTER),
        f"{_INFO}.adjusted_filter_batch": (hooks.filter_batch, HookType.AFTER),
        f"{_INFO}.adjusted_merge_batch": (hooks.merge_batch, HookType.AFTER),
        f"{_INFO}.copy_for_forward": (hooks.copy_for_forward, HookType.AFTER),
    }
    return apply_hooks(table)


def apply_hooks(table: dict[str, tuple[Callable, Any]]) -> str | None:
    """Register and apply the hook of each target. Returns which of them did not land, None when all did."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = {target: pkgutil.resolve_name(target) for target in table}
    for target, (hook, kind) in table.items():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    # A hook that fails to apply is only logged by SGLang, so look for ourselves.
    missed = [target for target in table if pkgutil.resolve_name(target) is before[target]]
    return f"SGLang did not apply the hook on {', '.join(missed)}" if missed else None
