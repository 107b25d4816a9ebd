"""Every place where SGLang calls us. Installed only in a process whose server selected the backend.

In a step and at the start (``StepHooks``):

    LogitsProcessor._get_logits      carry the hidden states instead of computing logits (during a capture of the
                                     model: ``model_graph.py``)
    ModelRunner._preprocess_logits   penalties, grammars and biases, of rows that need real logits
    ModelRunner.sample               the slots of the batch's requests in SGLang's pool
    ModelRunner.load_model           compile and check the kernels of the model's LM head
    SamplingBatchInfo                kinds of the rows, through filters and merges of the batch

Where a request arrives: ``GrammarManager.process_req_with_grammar``, to which the scheduler hands every request before
it waits for anything.

Where a prefill returns logprobs of the prompt (``prompt_logprobs.PromptHooks``):

    InputLogprobProcessor.forward        read them from the hidden states, without logits of the whole prompt
    ScheduleBatch.prepare_for_extend     ask for none after a retraction, which has them already

Where ranks with requests of their own share an LM head (``replicas.ReplicaHooks``): ``prepare_mlp_sync_batch_raw``, in
which they agree on a step, and ``ModelRunner.forward``, in which they draw it.

Where drafts are verified (``speculation.SpeculationHooks``): ``eagle_sample``, and the logprobs of accepted tokens.

Where drafts are drawn (``drafts.Drafts``):

    EagleDraftWorker.init_cuda_graphs          a forward hook on the draft model's LogitsProcessor
    EAGLEWorkerV2.forward_batch_generation     temperatures and seeds of the step's batch
    draft_topk1_postprocess                    a draft into the chain
    EAGLEDraft(Extend)CudaGraphRunner          CUDA graphs of drafts, where the drafted ids change (``draft_graphs.py``)

Where SGLang describes itself: ``Scheduler.get_internal_state``, which ``/server_info`` shows. Where it has nothing to
do: ``Scheduler.on_idle``, which brings the counters up to date.

Where SGLang changes weights later (``WeightHooks``): a screen is a copy of some, and must know.

    SchedulerWeightUpdaterManager    what serves every request that updates, releases or resumes weights
    WeightUpdater                    what that calls for each model; expert rebalancing calls it by itself
    ModelRunner                      weights that are loaded only after graphs were captured (0.5.21 and later)

Weights are written through ``.data`` in all of these, which PyTorch does not count as a write. A class with a public
method that we do not know may have another way to write them: then no head has a screen.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pkgutil
import time
from collections.abc import Callable
from typing import Any

from ..switches import DRAFT_VOCAB_VARIABLE, LEARNED_IDS, text
from . import versions
from .batch import (
    BATCH_ATTRIBUTE,
    PREPROCESS_ATTRIBUTE,
    REASON_ATTRIBUTE,
    ROUTING_ATTRIBUTE,
    SLOTS_ATTRIBUTE,
    Batch,
    batch_of,
)
from .drafts import Drafts
from .lazy_logits import LazyLogits, plain
from .logits_graphs import CapturedLogits
from .row_table import Reason
from .runtime import RankError, Runtime, mode_of
from .settings import NotActiveError, refuse_to_start

logger = logging.getLogger("sgl_flashsample")

ARRIVAL_TARGET = "sglang.srt.constrained.grammar_manager.GrammarManager.process_req_with_grammar"
STATUS_TARGET = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
IDLE_TARGET = "sglang.srt.managers.scheduler.Scheduler.on_idle"
_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def _guarded(hook: Callable) -> Callable:
    """An AFTER hook runs inside SGLang's scheduler, where an exception would end the server: leave the fused pass
    instead. SGLang serves a batch that has no ``Batch``. Its time is counted."""

    @functools.wraps(hook)
    def guarded(hooks: StepHooks, result: Any, sampling_info: Any, *args: Any) -> None:
        started = time.perf_counter()
        try:
            hook(hooks, result, sampling_info, *args)
        except Exception as error:
            setattr(sampling_info, BATCH_ATTRIBUTE, None)
            hooks.runtime.disable(f"{hook.__name__}: {type(error).__name__}: {error}")
        hooks.metrics.scheduling_seconds += time.perf_counter() - started

    return guarded


class StepHooks:
    """The hook functions of a step, bound to one Runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.metrics = runtime, runtime.metrics

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
        started, state = time.perf_counter(), None
        if embedding_bias is None:
            try:
                state = self.runtime.can_defer(processor, hidden_states, lm_head, logits_metadata)
            except Exception as error:  # as in _guarded
                self.runtime.disable(f"get_logits: {type(error).__name__}: {error}")
        if state is None:
            return original(processor, hidden_states, lm_head, logits_metadata, embedding_bias, use_logits_buffer)

        def launches(hidden: Any) -> Any:
            return original(processor, hidden, lm_head, logits_metadata, None, False)

        compute: Callable[[Any], Any] = launches
        is_captured = self.runtime.captures_model(processor, state, hidden_states, logits_metadata)
        captured, prefills = hidden_states if is_captured else None, mode_of(logits_metadata).prefills
        ends_step = is_captured and state.captured.get(hidden_states.shape[0]) is hidden_states
        if ends_step:

            def launches_of_all() -> Any:
                return original(processor, hidden_states, lm_head, logits_metadata, None, True)

            place = getattr(logits_metadata, "next_token_logits_buffer", None)
            compute = CapturedLogits(state, hidden_states, launches, launches_of_all, place)
        if state.spans_replicas:

            def launches_of_ranks(hidden: Any) -> Any:
                step = self.runtime.step_of_replicas
                if step is None or step.fused:
                    self.runtime.stay_with_ranks("logits that all ranks compute together are read on this one alone")
                return original(processor, hidden_states, lm_head, logits_metadata, None, True)[: hidden.shape[0]]

            compute = launches_of_ranks
        lazy = LazyLogits(hidden_states, processor.vocab_size, state, compute, captured, prefills)
        self.metrics.scheduling_seconds += time.perf_counter() - started
        return lazy

    def sample(self, model_runner: Any, logits_output: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Before ModelRunner.sample: the slots of the rows, for the sampler, which SGLang gives the sampling info
        alone."""
        started, lazy, info = time.perf_counter(), logits_output.next_token_logits, forward_batch.sampling_info
        if type(lazy) is LazyLogits and info is not None:
            setattr(info, SLOTS_ATTRIBUTE, forward_batch.req_pool_indices)
            self.metrics.scheduling_seconds += time.perf_counter() - started

    def load_model(self, result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        """ModelRunner.load_model: the weights are there, graphs are not captured yet. An embedding model samples
        nothing, the logits of a draft model are SGLang's."""
        try:
            if not model_runner.is_generation:
                refuse_to_start("this model generates no tokens")
            elif model_runner.is_draft_worker:
                self.runtime.leave_drafts(model_runner.model)
            else:
                replica = getattr(getattr(model_runner, "ps", None), "dp_rank", None)
                self.runtime.arrivals.rank = replica or self.runtime.arrivals.rank
                self.runtime.prepare_model(model_runner.model, model_runner)
                if getattr(model_runner, "startup_weight_load", None) is not None:  # its weights are still to come
                    self.runtime.weights_settled = False
                    self.runtime.weights_change()
        except (NotActiveError, RankError):
            raise
        except Exception as error:  # as in _guarded
            reason = f"load_model: {type(error).__name__}: {error}"
            self.runtime.disable(reason)
            refuse_to_start(reason)

    def preprocess_logits(
        self, original: Callable, model_runner: Any, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """ModelRunner._preprocess_logits: applies penalties, grammar and bias to real logits. Logits that are not
        computed yet are left alone: the sampler, which SGLang calls next, does it for the rows that need it. Where each
        request needs SGLang's sampler, all is done as in stock."""
        started, lazy = time.perf_counter(), logits_output.next_token_logits
        if isinstance(lazy, LazyLogits):
            observed = bool(args) or (bool(kwargs) and any(value is not None for value in kwargs.values()))
            if not observed and lazy.computed is None:
                batch: Batch | None = getattr(sampling_info, BATCH_ATTRIBUTE, None)
                if (
                    batch is not None
                    and batch.mix.all_native
                    and self.runtime.inactive_reason is None
                    and len(batch.kinds) == lazy.num_rows
                ):
                    setattr(logits_output, ROUTING_ATTRIBUTE, batch.native)
                    logits_output.next_token_logits = lazy.dense()
                    return original(model_runner, logits_output, sampling_info)
                sampling_info.grammar_mask = None  # a mask that a departed request left behind
                setattr(logits_output, PREPROCESS_ATTRIBUTE, (original, model_runner))
                self.metrics.scheduling_seconds += time.perf_counter() - started
                return None
            setattr(logits_output, REASON_ATTRIBUTE, Reason.SAMPLING_OBSERVER if observed else Reason.LOGITS_COMPUTED)
            logits_output.next_token_logits = plain(lazy)
        return original(model_runner, logits_output, sampling_info, *args, **kwargs)

    @_guarded
    def from_schedule_batch(self, result: Any, sampling_info: Any, schedule_batch: Any, vocab_size: int) -> None:
        runtime = self.runtime
        if not schedule_batch.reqs:  # another rank of DP attention has a step, and waits for this one in each of them
            runtime.metrics.last_batch = time.perf_counter()
        if runtime.inactive_reason is None:
            batch = Batch.of_requests(
                schedule_batch.reqs,
                schedule_batch.req_pool_indices_cpu.tolist(),
                runtime.row_table(schedule_batch.device),
                runtime.settings.seed,
                runtime.settings.custom_processors,
                runtime.arrivals,
                runtime.warn_of_request,
            )
            setattr(sampling_info, BATCH_ATTRIBUTE, batch)

    @_guarded
    def filter_batch(self, result: Any, sampling_info: Any, keep_indices: Any, keep_indices_device: Any) -> None:
        batch = batch_of(sampling_info)
        if batch is not None:
            setattr(sampling_info, BATCH_ATTRIBUTE, batch.keep(keep_indices))

    @_guarded
    def merge_batch(self, result: Any, sampling_info: Any, other: Any) -> None:
        batch, second = batch_of(sampling_info), batch_of(other)
        merged = None if batch is None or second is None else batch.followed_by(second)
        setattr(sampling_info, BATCH_ATTRIBUTE, merged)

    def copy_for_forward(self, result: Any, sampling_info: Any) -> None:
        started = time.perf_counter()
        setattr(result, BATCH_ATTRIBUTE, getattr(sampling_info, BATCH_ATTRIBUTE, None))
        self.metrics.scheduling_seconds += time.perf_counter() - started


def install(runtime: Runtime) -> str | None:
    """Register and apply the hooks of a step. Returns why the fused pass must stay off, None when every hook landed."""
    from sglang.srt.plugins.hook_registry import HookType

    reasons = [reason for reason in map(versions.unsupported_target, versions.HOOK_TARGETS) if reason]
    if reasons:
        return "; ".join(reasons)
    hooks = StepHooks(runtime)
    table: dict[str, tuple[Callable, Any]] = {
        "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits": (hooks.get_logits, HookType.AROUND),
        f"{_RUNNER}.load_model": (hooks.load_model, HookType.AFTER),
        f"{_RUNNER}._preprocess_logits": (hooks.preprocess_logits, HookType.AROUND),
        f"{_RUNNER}.sample": (hooks.sample, HookType.BEFORE),
        f"{_INFO}.adjusted_from_schedule_batch": (hooks.from_schedule_batch, HookType.AFTER),
        f"{_INFO}.adjusted_filter_batch": (hooks.filter_batch, HookType.AFTER),
        f"{_INFO}.adjusted_merge_batch": (hooks.merge_batch, HookType.AFTER),
        f"{_INFO}.copy_for_forward": (hooks.copy_for_forward, HookType.AFTER),
    }
    return apply_hooks(table)


def install_speculation(runtime: Runtime) -> str | None:
    """Register and apply the hooks of the verification of drafts. Returns why the fused pass must stay off, None when
    every hook landed."""
    from sglang.srt.plugins.hook_registry import HookType

    from .speculation import SpeculationHooks

    hooks = SpeculationHooks(runtime)
    table: dict[str, tuple[Callable, Any]] = {}
    functions: tuple[Callable, ...] = (hooks.eagle_sample, hooks.compute_logprobs)
    for names, hook in zip(versions.SPECULATION_TARGETS, functions, strict=True):
        reasons = {name: versions.unsupported_target(name, parameters) for name, parameters in names.items()}
        target = next((name for name, reason in reasons.items() if reason is None), None)
        if target is None:
            return "; ".join(filter(None, reasons.values()))
        table[target] = (hook, HookType.AROUND)
    return apply_hooks(table)


def install_replicas(runtime: Runtime) -> str | None:
    """Register and apply the hooks of ranks with requests of their own. Returns why the fused pass must stay off, None
    when every hook landed."""
    from sglang.srt.plugins.hook_registry import HookType

    from .replicas import ReplicaHooks

    hooks, targets = ReplicaHooks(runtime), versions.REPLICA_TARGETS
    reasons = [reason for target in targets if (reason := versions.unsupported_target(target, targets[target]))]
    if reasons:
        return "; ".join(reasons)
    functions: list[tuple[Callable, Any]] = [(hooks.agree, HookType.AFTER), (hooks.forward, HookType.AROUND)]
    return apply_hooks(dict(zip(targets, functions, strict=True)))


def install_drafts(drafts: Drafts) -> str | None:
    """Register and apply the hooks of drafts. Returns why drafts stay SGLang's own, None when every hook
    landed."""
    from sglang.srt.plugins.hook_registry import HookType

    wanted = versions.DRAFT_TARGETS | versions.READ_CALLS
    reasons = [reason for target in wanted if (reason := versions.unsupported_target(target, wanted[target]))]
    if reasons:
        return "; ".join(reasons)
    functions: list[tuple[Callable, Any]] = [(drafts.attach, HookType.BEFORE), (drafts.load, HookType.BEFORE)]
    functions.append((drafts.add_to_chain, HookType.AROUND))
    if text(DRAFT_VOCAB_VARIABLE) == LEARNED_IDS:
        drafts.no_graphs_reason = _install_draft_graphs(drafts)
    return apply_hooks(dict(zip(versions.DRAFT_TARGETS, functions, strict=True)))


def _install_draft_graphs(drafts: Drafts) -> str | None:
    """Register and apply the hooks of CUDA graphs of drafts. Returns why these stay those of one vocabulary, None when
    every hook landed."""
    from sglang.srt.plugins.hook_registry import HookType

    targets = versions.DRAFT_GRAPH_TARGETS
    reasons = [reason for target in targets if (reason := versions.unsupported_target(target, targets[target]))]
    return "; ".join(reasons) or apply_hooks({target: (drafts.capture, HookType.BEFORE) for target in targets})


def install_prompt_hooks(runtime: Runtime) -> None:
    """Register and apply the hooks of prompt logprobs. Where that fails, SGLang computes them, and draws the first
    tokens of such prefills."""
    from sglang.srt.plugins.hook_registry import HookType

    from .prompt_logprobs import PromptHooks

    hooks, targets = PromptHooks(runtime), versions.PROMPT_TARGETS
    reasons = [reason for target in targets if (reason := versions.unsupported_target(target, targets[target]))]
    functions: list[tuple[Callable, Any]] = [
        (hooks.forward, HookType.AROUND),
        (hooks.prepare_for_extend, HookType.AFTER),
    ]
    reason = "; ".join(reasons) or apply_hooks(dict(zip(targets, functions, strict=True)))
    runtime.reads_prompts = reason is None
    if reason is not None:
        logger.warning("flashsample: prefills that return logprobs of the prompt are SGLang's: %s", reason)


def install_arrival_hook(runtime: Runtime) -> None:
    """Number requests when they arrive. Where that fails, requests are numbered when they are first scheduled."""
    from sglang.srt.plugins.hook_registry import HookType

    def number(manager: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(Exception):  # the draw of the request names what cannot be read
            runtime.arrivals.of(request)

    reason = versions.unsupported_target(ARRIVAL_TARGET, ("self", "req"))
    reason = reason or apply_hooks({ARRIVAL_TARGET: (number, HookType.BEFORE)})
    runtime.numbers_arrivals = reason is None
    if reason is not None:
        logger.warning(
            "flashsample: requests are numbered when they are first scheduled, not when they arrive; after an abort, "
            "the n answers of a seeded request may come in another order: %s",
            reason,
        )


def install_status_hook(status: Callable[[], dict[str, Any]]) -> None:
    """Add what ``status`` returns to each entry of ``internal_states`` in ``/server_info`` and
    ``Engine.get_server_info()``, as "flashsample". Where that fails, the entry is missing."""

    def add_status(answer: Any, *args: Any) -> None:
        try:
            answer.internal_state["flashsample"] = status()
        except Exception as error:  # a question about the server must not end it
            logger.warning("flashsample: no status in /server_info: %s: %s", type(error).__name__, error)

    _install_dispensable(STATUS_TARGET, add_status, "AFTER", "no status in /server_info")


def install_idle_hook(runtime: Runtime) -> None:
    """Bring the counters up to date whenever SGLang has nothing to do. Without this hook, the next step does it."""

    def idle(*args: Any) -> None:
        runtime.idle()

    _install_dispensable(IDLE_TARGET, idle, "BEFORE", "counters of an idle server may lag")


def _install_dispensable(target: str, hook: Callable, kind: str, lack: str) -> None:
    """Register and apply a hook that is not worth a server: where that fails, the log says what is missing."""
    try:
        from sglang.srt.plugins.hook_registry import HookType

        reason = apply_hooks({target: (hook, getattr(HookType, kind))})
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.warning("flashsample: %s: %s", lack, reason)


def apply_hooks(table: dict[str, tuple[Callable, Any]]) -> str | None:
    """Register and apply the hook of each target. Returns the hooks that did not land, None when all did."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = {target: pkgutil.resolve_name(target) for target in table}
    for target, (hook, kind) in table.items():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    # A hook that fails to apply is only logged by SGLang, so look for ourselves.
    missed = [target for target in table if pkgutil.resolve_name(target) is before[target]]
    return f"SGLang did not apply the hook on {', '.join(missed)}" if missed else None


MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
LATE_LOAD = f"{_RUNNER}.finalize_startup_weight_load"  # not in 0.5.17

# Methods that replace or release the weights: in all known versions, and in some of them.
WRITING_METHODS = {
    MANAGER: (
        {
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "release_memory_occupation",
            "resume_memory_occupation",
            "check_weights",
        },
        {"begin_weight_update", "end_weight_update"},
    ),
    UPDATER: (
        {"update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"},
        {
            "update_weights_from_distributed",
            "load_weights_from_distributed",
            "begin_weight_update",
            "end_weight_update",
        },
    ),
}
READING_METHODS = {
    "init_weights_update_group",
    "destroy_weights_update_group",
    "receive_weights_from_distributed",
    "flush_cache_after_weight_update",
    "record_weight_version_after_update",
    "get_weights_by_name",
    "save_remote_model",
    "save_sharded_model",
}
# Actions of ``check_weights`` that change no weight; the others fill them with noise.
READING_ACTIONS = {"snapshot", "compare", "checksum"}
WEIGHTS_TAG = "weights"  # SGLang's GPU_MEMORY_TYPE_WEIGHTS


class WeightHooks:
    """The hook functions of weight changes, bound to one Runtime. None of them raises: an exception would make SGLang's
    update fail."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def manager_call(self, original: Callable, manager: Any, *args: Any, **kwargs: Any) -> Any:
        """Around one request to the manager, outside of any step."""
        request = next(iter((*args, *kwargs.values())), None)
        if getattr(request, "action", None) in READING_ACTIONS:
            return original(manager, *args, **kwargs)
        self._change()
        self.runtime.weights_settled = False  # graphs may be captured anew in the middle, and that begins as a prefill
        try:
            return original(manager, *args, **kwargs)
        finally:
            self._changed(manager, request)

    def updater_call(self, *args: Any, **kwargs: Any) -> None:
        """Before weights of one model are written: by a request, or by SGLang itself, perhaps in the middle of a
        step."""
        self._change()

    def late_load(self, *args: Any, **kwargs: Any) -> None:
        """After the weights of a model that was built without them have loaded."""
        self._settle(True)

    def _change(self) -> None:
        try:
            self.runtime.weights_change()
        except Exception as error:
            self.runtime.stop_screens(f"weights_change: {type(error).__name__}: {error}")

    def _changed(self, manager: Any, request: Any) -> None:
        try:
            released = manager.offload_tags
            if WEIGHTS_TAG in released:
                self.runtime.free_screens()
            # Not settled while memory is released or an update session is open: weights may change without a hook.
            settled = not released and getattr(manager, "_session", None) is None
            # Callers that send weights in parts flush the cache with the last: copying after each would take too long.
            self._settle(settled, now=getattr(request, "flush_cache", True))
        except Exception as error:
            self.runtime.stop_screens(f"weights_changed: {type(error).__name__}: {error}")

    def _settle(self, settled: bool, now: bool = True) -> None:
        self.runtime.weights_settled = settled
        if settled and now:
            self.runtime.renew_screens()


def weight_targets() -> tuple[dict[str, str], str | None]:
    """{target: name of its hook in ``WeightHooks``} for this SGLang; or why the targets are not known."""
    targets: dict[str, str] = {}
    for path, (required, possible) in WRITING_METHODS.items():
        try:
            kind = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            return {}, f"{path} is missing ({error})"
        methods = {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
        if missing := required - methods:
            return {}, f"{path} has no {', '.join(sorted(missing))}"
        if unknown := methods - required - possible - READING_METHODS:
            return {}, f"{path} has {', '.join(sorted(unknown))}, which may change weights"
        hook = "manager_call" if path == MANAGER else "updater_call"
        targets |= {f"{path}.{name}": hook for name in methods & (required | possible)}
    try:
        pkgutil.resolve_name(LATE_LOAD)
        targets[LATE_LOAD] = "late_load"
    except AttributeError:
        pass
    return targets, None


def install_weight_hooks(runtime: Runtime) -> str | None:
    """Register and apply the hooks of weight changes. Returns why no head may have a screen, None when every hook
    landed."""
    from sglang.srt.plugins.hook_registry import HookType

    targets, reason = weight_targets()
    if reason is not None:
        return reason
    hooks = WeightHooks(runtime)
    kinds = {"manager_call": HookType.AROUND, "updater_call": HookType.BEFORE, "late_load": HookType.AFTER}
    return apply_hooks({target: (getattr(hooks, name), kinds[name]) for target, name in targets.items()})
