"""The places where SGLang changes weights after the start: a screen is a copy of some, and must know.

    SchedulerWeightUpdaterManager   what every request comes to that updates, releases or resumes weights
    WeightUpdater                   what that calls for each model; expert rebalancing calls it by itself
    ModelRunner                     weights that are loaded only after graphs were captured (0.5.21 and later)

Weights are written through ``.data`` in all of them, which PyTorch does not count as a write. A class with a public
method that we do not know may have another way: then there is no screen.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .hooks import apply_hooks

if TYPE_CHECKING:
    from .runtime import Runtime

logger = logging.getLogger("sgl_flashsample")

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
LATE_LOAD = "sglang.srt.model_executor.model_runner.ModelRunner.finalize_startup_weight_load"  # not in 0.5.17

# Methods that leave other weights, or none: those of all known versions, and those of some.
CHANGING = {
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
# Methods that leave weights alone.
HARMLESS = {
    "init_weights_update_group",
    "destroy_weights_update_group",
    "receive_weights_from_distributed",
    "flush_cache_after_weight_update",
    "record_weight_version_after_update",
    "get_weights_by_name",
    "save_remote_model",
    "save_sharded_model",
}
# What ``check_weights`` does without changing any: else it fills them with noise.
READING_ACTIONS = {"snapshot", "compare", "checksum"}
WEIGHTS_TAG = "weights"  # SGLang's GPU_MEMORY_TYPE_WEIGHTS


class WeightHooks:
    """The hook functions, bound to one Runtime. None of them raises: SGLang would lose an update to it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def manager_call(self, original: Callable, manager: Any, *args: Any, **kwargs: Any) -> Any:
        """Around what the manager does for one request, outside of any step."""
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
            away = manager.offload_tags
            if WEIGHTS_TAG in away:
                self.runtime.free_screens()
            # What SGLang has released it must find free; and in a session weights are also written without a call.
            settled = not away and getattr(manager, "_session", None) is None
            # Callers that send weights in parts flush the cache with the last: copying after each would take too long.
            self._settle(settled, now=getattr(request, "flush_cache", True))
        except Exception as error:
            self.runtime.stop_screens(f"weights_changed: {type(error).__name__}: {error}")

    def _settle(self, settled: bool, now: bool = True) -> None:
        self.runtime.weights_settled = settled
        if settled and now:
            self.runtime.renew_screens()


def targets() -> tuple[dict[str, str], str | None]:
    """What to hook in this SGLang, each with the name of its hook in ``WeightHooks``, or why that is not known."""
    found: dict[str, str] = {}
    for path, (required, possible) in CHANGING.items():
        try:
            kind = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            return {}, f"{path} is missing ({error})"
        methods = {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
        if missing := required - methods:
            return {}, f"{path} has no {', '.join(sorted(missing))}"
        if unknown := methods - required - possible - HARMLESS:
            return {}, f"{path} has {', '.join(sorted(unknown))}, which may change weights"
        hook = "manager_call" if path == MANAGER else "updater_call"
        found |= {f"{path}.{name}": hook for name in methods & (required | possible)}
    try:
        pkgutil.resolve_name(LATE_LOAD)
        found[LATE_LOAD] = "late_load"
    except AttributeError:
        pass
    return found, None


def install(runtime: Runtime) -> str | None:
    """Register and apply the hooks. Returns why no head may have a screen, None when every hook landed."""
    from sglang.srt.plugins.hook_registry import HookType

    found, problem = targets()
    if problem is not None:
        return problem
    hooks = WeightHooks(runtime)
    kinds = {"manager_call": HookType.AROUND, "updater_call": HookType.BEFORE, "late_load": HookType.AFTER}
    return apply_hooks({target: (getattr(hooks, name), kinds[name]) for target, name in found.items()})
