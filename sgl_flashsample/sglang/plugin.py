"""The SGLang plugin (entry point group ``sglang.srt.plugins``): makes ``--sampling-backend flashsample`` valid.

SGLang calls ``register`` at the start of every one of its processes. That only adds the backend's name.
Hooks are installed when a server has selected it and SGLang asks for its sampler, in that process alone:
an installed but unused plugin changes nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from typing import TYPE_CHECKING

from ..switches import REQUESTED_VARIABLE, REQUIRE_VARIABLE, check, switch
from . import versions

if TYPE_CHECKING:
    from .sampler import FlashSampler

BACKEND = "flashsample"
ON_POLICY = "on-policy RL logprobs, which it rounds to bfloat16: another order of a sum may round to another number"

logger = logging.getLogger("sgl_flashsample")
_runtime = None


def register() -> None:
    """Add the backend. Called by SGLang."""
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_sampler_backend(BACKEND, make_sampler)
    if (target := versions.deterministic_backend_target()) is not None:
        HookRegistry.register(target, _keep_backend, HookType.AROUND)
    option = f"--sampling-backend={BACKEND}"
    if option in ("=".join(pair) for pair in itertools.pairwise(sys.argv)) or option in sys.argv:
        os.environ[REQUESTED_VARIABLE] = "1"  # the server's processes inherit it
    # ``sgl.Engine`` and configuration files select a backend without the option. FLASHSAMPLE_REQUIRE is for them too.
    if switch(REQUESTED_VARIABLE) or switch(REQUIRE_VARIABLE):
        HookRegistry.register("sglang.srt.layers.sampler.create_sampler", _explain_replacement, HookType.AFTER)
    if {"--use-ray", "--config"} & set(sys.argv):  # a configuration file may ask for Ray too
        HookRegistry.register("sglang.srt.server_args.ServerArgs.from_cli_args", _leave_ray, HookType.BEFORE)


def _leave_ray(kind, arguments) -> None:
    """Before ``ServerArgs.from_cli_args``: under ``--use-ray``, schedulers are actors that load no plugins and do not
    know our backend. SGLang chooses its own. Raises NotActiveError where the server must not start without ours."""
    if not getattr(arguments, "use_ray", False):
        return
    from .settings import refuse_to_start

    reason = "Ray's actors load no plugins (--use-ray)"
    if arguments.sampling_backend == BACKEND:
        arguments.sampling_backend = None
        logger.warning("flashsample: not active, SGLang's own sampler is used for everything: %s", reason)
    refuse_to_start(reason)


def _keep_backend(choose, arguments):
    """Around the choice of a sampling backend in deterministic mode: ours stays where it is asked for and serves."""
    from .support import keeps_backend

    if arguments.sampling_backend == BACKEND and keeps_backend(arguments):
        return {}
    return choose(arguments)


def _explain_replacement(sampler, *args, **kwargs) -> None:
    """After ``create_sampler``: SGLang replaces a custom backend in some modes; say so instead of being silent. Raises
    NotActiveError where the server must not start without it."""
    from .sampler import FlashSampler

    if not isinstance(sampler, FlashSampler):
        from sglang.srt.runtime_context import get_exec

        from .hooks import install_status_hook
        from .settings import refuse_to_start

        execution = get_exec()
        mode = f" ({ON_POLICY})" if execution.deterministic.rl_on_policy_target is not None else ""
        backend = execution.kernel.sampling_backend
        reason = f"SGLang uses the sampling backend {backend} instead of {BACKEND}{mode}"
        logger.warning("flashsample: not active: %s", reason)
        install_status_hook(lambda: {"active": False, "reason": reason})
        refuse_to_start(reason)


def make_sampler() -> FlashSampler:
    """The sampler that SGLang asks for when the backend is selected; installs the hooks at the first call."""
    global _runtime
    from . import drafts, hooks
    from .runtime import Runtime
    from .sampler import FlashSampler

    if _runtime is None:
        check()
        _runtime = Runtime(versions.unsupported_version(versions.sglang_version()))
        if _runtime.inactive_reason is None:
            _runtime.inactive_reason = hooks.install(_runtime)
        if _runtime.inactive_reason is None:
            hooks.install_arrival_hook(_runtime)
            hooks.install_prompt_hooks(_runtime)
        if _runtime.inactive_reason is None and _runtime.settings.shares_head:
            _runtime.inactive_reason = hooks.install_replicas(_runtime)
        if _runtime.inactive_reason is None and _runtime.settings.verifies:
            _runtime.inactive_reason = hooks.install_speculation(_runtime)
        if _runtime.inactive_reason is None and _runtime.settings.verifies:
            drafts.start(_runtime, hooks.install_drafts)
        if _runtime.inactive_reason is None:
            reason = hooks.install_weight_hooks(_runtime)
            _runtime.no_screen_reason = _runtime.no_screen_reason or reason
            _runtime.prepares_steps = reason is None
        _runtime.agree()
        hooks.install_status_hook(lambda: _runtime.status)
        hooks.install_idle_hook(_runtime)
        if _runtime.inactive_reason is not None:
            _runtime.announce_inactive()
    return FlashSampler(_runtime)
