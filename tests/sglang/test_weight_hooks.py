"""Weights that SGLang changes while it serves: no screen serves a copy of old weights, none is rebuilt in a decode
step, and a failure in a hook does not affect SGLang."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types

import pytest
import torch
from head_states import (
    CPU,
    gathered,
    hidden_states,
    is_serving,
    make_state,
    metadata_of,
    request,
    serve,
    weights,
    write_unseen,
)
from serving import needs_sglang, version_path

from sgl_flashsample.screen import Screen
from sgl_flashsample.sglang import hooks, versions
from sgl_flashsample.sglang.batch import Batch
from sgl_flashsample.sglang.drafts import DraftMode, Drafts
from sgl_flashsample.sglang.hooks import MANAGER, READING_METHODS, UPDATER, WRITING_METHODS, StepHooks, WeightHooks
from sgl_flashsample.sglang.row_table import RowTable
from sgl_flashsample.sglang.runtime import Runtime
from sgl_flashsample.switches import DRAFT_VOCAB_VARIABLE


class Manager:
    """A stand-in for SGLang's SchedulerWeightUpdaterManager, with the attributes that hooks read. during: called in the
    middle of an update."""

    def __init__(self, during=lambda: None):
        self.offload_tags, self._session, self.during = set(), None, during

    def update(self, request):
        self.during()
        return "updated"

    def release(self, request):
        self.offload_tags |= set(request.tags)

    def resume(self, request):
        self.offload_tags -= set(request.tags)

    def begin(self, request):
        self._session = "open"

    def end(self, request):
        self.during()
        self._session = None


def call(runtime: Runtime, manager: Manager, name: str, **fields):
    request = types.SimpleNamespace(**fields)
    return WeightHooks(runtime).manager_call(getattr(Manager, name), manager, request)


@pytest.fixture
def state(runtime, device):
    """A head with a screen that the runtime serves."""
    made = make_state(device, screened=True)
    serve(runtime, made)
    return made


def step(runtime: Runtime, state, mode: str) -> None:
    """A step of the server begins: "decode", or "extend" for a prefill."""
    hidden = hidden_states(state.lm_head.weight.device, 2)
    assert runtime.can_defer(state.processor, hidden, state.lm_head, metadata_of(mode)) is state


def is_a_copy(state) -> bool:
    """Whether the active screen is a copy of the head's current weight."""
    screen = state.screen.serving(state.head.lm_head)
    copy = Screen(state.head.lm_head, 1, announces_writes=True)
    return screen is not None and torch.equal(screen.int8_head.weight, copy.int8_head.weight)


@pytest.mark.parametrize("fails", [False, True])
def test_an_update_invalidates_before_it_writes_and_leaves_a_copy_of_what_is_there(runtime, state, device, fails):
    seen = []

    def during():
        seen.append(is_serving(state))
        write_unseen(state, weights(device, 1))
        if fails:
            raise RuntimeError("connection lost")

    with pytest.raises(RuntimeError, match="connection lost") if fails else contextlib.nullcontext():
        assert call(runtime, Manager(during), "update") == "updated"
    assert seen == [False] and is_a_copy(state)


def test_weights_that_come_in_parts_are_copied_by_the_next_prefill_and_by_no_decode_step(runtime, state):
    manager = Manager()
    for _ in range(3):
        call(runtime, manager, "update", flush_cache=False)
        step(runtime, state, "decode")
        assert not is_serving(state)
    step(runtime, state, "extend")
    assert is_serving(state)
    call(runtime, manager, "update", flush_cache=False)
    call(runtime, manager, "update", flush_cache=True)
    assert is_serving(state), "the last part of an update flushes the cache"


def test_nothing_is_copied_while_a_session_is_open(runtime, state):
    manager = Manager()
    for name in ("begin", "update"):
        call(runtime, manager, name, flush_cache=True)
        step(runtime, state, "extend")
        assert not is_serving(state), "weights are also written without a call"
    call(runtime, manager, "end")
    assert is_serving(state)


def test_released_memory_is_freed_and_taken_again_after_all_of_it_is_back(runtime, state, device):
    manager, screen = Manager(), state.screen.serving(state.head.lm_head)
    for _ in range(2):
        call(runtime, manager, "release", tags=["weights", "kv_cache"])
        assert screen.closed
    call(runtime, manager, "resume", tags=["weights"])
    call(runtime, manager, "update", flush_cache=True)
    step(runtime, state, "extend")
    assert not is_serving(state), "SGLang must find the memory of its KV cache free"
    write_unseen(state, weights(device, 1))
    call(runtime, manager, "resume", tags=["kv_cache"])
    assert is_a_copy(state)


def test_a_release_of_other_memory_keeps_the_copy(runtime, state):
    manager, screen = Manager(), state.screen.serving(state.head.lm_head)
    call(runtime, manager, "release", tags=["kv_cache"])
    assert not screen.closed
    call(runtime, manager, "resume", tags=["kv_cache"])
    assert state.screen.serving(state.head.lm_head) is screen


def test_weights_that_are_only_read_leave_the_screen_alone(runtime, state):
    seen = []
    manager = Manager(lambda: seen.append(is_serving(state)))
    for action in ("snapshot", "compare", "checksum", "reset_tensors"):
        call(runtime, manager, "update", action=action)
    assert seen == [True, True, True, False]


def test_weights_that_sglang_writes_in_a_step_are_copied_by_the_next_prefill(runtime, state):
    assert WeightHooks(runtime).updater_call("updater", "path") is None, "SGLang's arguments are its own"
    step(runtime, state, "decode")
    assert not is_serving(state)
    step(runtime, state, "extend")
    assert is_serving(state)


def test_weights_that_load_after_the_start_are_copied_then(runtime, state):
    runner = types.SimpleNamespace(is_generation=True, is_draft_worker=False, startup_weight_load=object())
    runner.model = torch.nn.Module()
    StepHooks(runtime).load_model(None, runner)
    step(runtime, state, "extend")
    assert not is_serving(state), "a graph is captured with weights that mean nothing"
    WeightHooks(runtime).late_load(None, runner)
    assert is_serving(state)


def test_a_copy_that_cannot_be_made_anew_is_not_said_to_be(runtime, state, caplog):
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        call(runtime, Manager(), "update")
        state.lm_head.weight = state.lm_head.weight[:, :16].contiguous()  # of a hidden size that the copy has not
        call(runtime, Manager(), "update")
        call(runtime, Manager(), "update")
    first, *others = [record.message for record in caplog.records]
    assert first.startswith("flashsample: screen rebuilt for new weights in ")
    (off,) = others
    assert "off until restart" in off and ": ValueError: " in off
    assert not is_serving(state)


UNKNOWN_MANAGER = "weights_changed: AttributeError: 'Manager' object has no attribute 'offload_tags'"


@pytest.mark.parametrize("words", [UNKNOWN_MANAGER, "weights_change: ZeroDivisionError: division by zero"])
def test_a_failure_of_ours_never_reaches_sglang_and_switches_the_screen_off(runtime, state, caplog, words):
    """It would serve a copy of old weights."""
    manager = Manager()
    if words is UNKNOWN_MANAGER:
        del manager.offload_tags
    else:
        state.weights_change = lambda: 1 / 0
    assert call(runtime, manager, "update") == "updated"
    assert not state.has_screen and not is_serving(state)
    (off,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert off.endswith(f": {words}")


def test_a_head_without_a_screen_goes_through_every_change_of_weights(runtime, device, caplog):
    state = make_state(device)
    serve(runtime, state)
    manager = Manager()
    call(runtime, manager, "update")
    call(runtime, manager, "release", tags=["weights"])
    call(runtime, manager, "resume", tags=["weights"])
    runtime.stop_screens("a fault")
    assert not state.has_screen and not caplog.records


# Hooked targets.

SESSIONS = {"begin_weight_update", "end_weight_update", "finalize_startup_weight_load"}  # not in 0.5.17


@pytest.mark.slow
@needs_sglang
def test_every_target_of_this_sglang_is_known():
    targets, reason = hooks.weight_targets()
    assert reason is None
    methods = {target.rpartition(".")[2] for target in targets}
    sessions = set() if versions.sglang_version() == "0.5.17" else SESSIONS
    assert methods >= WRITING_METHODS[MANAGER][0] | WRITING_METHODS[UPDATER][0] | sessions
    assert [versions.unsupported_target(target) for target in versions.HOOK_TARGETS] == [None] * 8
    assert versions.unsupported_target(hooks.ARRIVAL_TARGET, ("self", "req")) is None
    assert [versions.unsupported_target(*target) for target in versions.PROMPT_TARGETS.items()] == [None] * 2


INSTALL = """
import os
import pkgutil
import types
os.environ["FLASHSAMPLE_DRAFT_VOCAB"] = "auto"
from sgl_flashsample.sglang import hooks, versions
from sgl_flashsample.sglang.batch import Batch
from sgl_flashsample.sglang.drafts import Drafts, DraftMode
targets, reason = hooks.weight_targets()
assert reason is None, reason
for install in (hooks.install, hooks.install_weight_hooks, hooks.install_speculation, hooks.install_replicas):
    reason = install(types.SimpleNamespace(metrics=None))
    assert reason is None, reason
drafts = Drafts(types.SimpleNamespace(), DraftMode.COUPLED)
reason = hooks.install_drafts(drafts) or drafts.no_graphs_reason
assert reason is None, reason
hooks.install_arrival_hook(types.SimpleNamespace())
hooks.install_prompt_hooks(types.SimpleNamespace())
for target in (hooks.ARRIVAL_TARGET, *versions.PROMPT_TARGETS):
    assert hasattr(pkgutil.resolve_name(target), "__wrapped__")
print(*(target.rpartition(".")[2] for target in targets))
"""


@pytest.mark.full
@needs_sglang
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU machine has one SGLang")
@pytest.mark.parametrize("version", [None, "0.5.17", "0.5.23"])
def test_every_hook_lands_in_every_known_sglang(version, tmp_path):
    """Each version is imported in a new process."""
    from lab import cpu_platform, fork_server

    environment = cpu_platform.environment(tmp_path)
    if version is not None:
        environment["PYTHONPATH"] = f"{version_path(version)}:{environment.get('PYTHONPATH', '')}"
    (tmp_path / "install.py").write_text(INSTALL)
    done = fork_server.run([sys.executable, str(tmp_path / "install.py")], {**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    hooked = set(done.stdout.split())
    assert hooked >= WRITING_METHODS[MANAGER][0]
    assert hooked >= SESSIONS if version != "0.5.17" else not SESSIONS & hooked


def test_a_hook_that_did_not_land_is_named(server_config, pretend):
    """SGLang only logs that a hook could not be applied."""
    kind = type("Kind", (), {"lands": lambda self: None, "stays": lambda self: None})
    registered = []
    registry = types.SimpleNamespace(
        register=lambda target, hook, when: registered.append((target, when)),
        apply_hooks=lambda: setattr(kind, "lands", lambda self: None),
    )
    pretend("theirs", Kind=kind)
    pretend("sglang.srt.plugins.hook_registry", HookRegistry=registry)
    reason = hooks.apply_hooks({f"theirs.Kind.{name}": (print, "after") for name in ("lands", "stays")})
    assert reason == "SGLang did not apply the hook on theirs.Kind.stays"
    assert registered == [("theirs.Kind.lands", "after"), ("theirs.Kind.stays", "after")]


DRAFTS = Drafts(None, DraftMode.COUPLED)
INSTALLATIONS = {  # with further targets that are looked for
    "a step": (lambda _: hooks.install(types.SimpleNamespace(metrics=None)), versions.HOOK_TARGETS, ()),
    "replicas": (hooks.install_replicas, versions.REPLICA_TARGETS, ()),
    "drafts": (hooks.install_drafts, versions.DRAFT_TARGETS, versions.READ_CALLS),
}


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_what_is_looked_for_is_what_is_hooked_and_where_one_is_missing_nothing_is(registry, name):
    install, targets, others = INSTALLATIONS[name]
    for target in (*targets, *others):
        registry.missing = {target}
        assert install(DRAFTS) == f"no {target}" and not registry.hooked
    registry.missing = {*targets, *others}
    assert install(DRAFTS) == "; ".join(f"no {target}" for target in (*targets, *others))
    registry.missing.clear()
    assert install(DRAFTS) is None and registry.hooked.keys() == targets.keys()


def test_graphs_of_drafts_are_hooked_where_their_ids_are_learned_and_what_is_missing_is_no_harm(registry, monkeypatch):
    monkeypatch.setenv(DRAFT_VOCAB_VARIABLE, "auto")
    drafts, (first, second) = Drafts(None, DraftMode.COUPLED), versions.DRAFT_GRAPH_TARGETS
    registry.missing = {second}
    assert hooks.install_drafts(drafts) is None and drafts.no_graphs_reason == f"no {second}"
    assert registry.hooked.keys() == versions.DRAFT_TARGETS.keys()
    registry.missing.clear()
    assert hooks.install_drafts(drafts) is None and drafts.no_graphs_reason is None
    assert registry.hooked[first] == registry.hooked[second] == (drafts.capture, "before")


def test_of_a_function_with_two_names_the_one_that_this_sglang_has_is_hooked(registry):
    sample, logprobs = ([*names] for names in versions.SPECULATION_TARGETS)
    registry.missing.add(logprobs[0])
    assert hooks.install_speculation(None) is None
    assert registry.hooked == {sample[0]: ("sample", "around"), logprobs[1]: ("logs", "around")}
    registry.hooked.clear()
    registry.missing.add(logprobs[1])
    assert hooks.install_speculation(None) == f"no {logprobs[0]}; no {logprobs[1]}" and not registry.hooked


def test_hooks_of_weight_changes_are_around_requests_before_writes_and_after_a_late_load(registry, classes):
    assert hooks.install_weight_hooks(None) is None
    when = {target: kind for target, (_, kind) in registry.hooked.items()}
    assert {when[f"{MANAGER}.{name}"] for name in WRITING_METHODS[MANAGER][0]} == {"around"}
    assert {when[f"{UPDATER}.{name}"] for name in WRITING_METHODS[UPDATER][0]} == {"before"}
    assert when[hooks.LATE_LOAD] == "after"


def test_an_sglang_without_late_loads_is_hooked_without_them(registry, classes):
    classes[hooks.LATE_LOAD] = AttributeError(hooks.LATE_LOAD)
    assert hooks.install_weight_hooks(None) is None and registry.hooked
    assert hooks.LATE_LOAD not in registry.hooked


def test_an_sglang_without_a_class_that_changes_weights_has_no_screen(registry, classes):
    classes[MANAGER] = ImportError(f"no {MANAGER}")
    assert hooks.install_weight_hooks(None) == f"{MANAGER} is missing (no {MANAGER})" and not registry.hooked


def test_a_sample_that_is_aborted_while_it_waits_was_counted_when_it_arrived(registry, runtime):
    """It never comes to a batch, and the next request has the same n answers in the same order."""
    hooks.install_arrival_hook(runtime)
    arrive, when = registry.hooked[hooks.ARRIVAL_TARGET]
    assert when == "before"
    samples = [request(sampling_seed=5, n=2) for _ in range(4)]
    for each in [types.SimpleNamespace(), *samples]:  # SGLang serves also what we cannot read
        assert arrive(None, each) is None
    batch = Batch.of_requests([samples[0], *samples[2:]], [1, 2, 3], RowTable(CPU), 1, True, runtime.arrivals)
    first, third, fourth = gathered(batch).seed.tolist()
    assert first == third == 5 != fourth


def test_an_sglang_whose_requests_cannot_be_numbered_at_their_arrival_is_a_warning(registry, runtime, caplog):
    registry.missing.add(hooks.ARRIVAL_TARGET)
    hooks.install_arrival_hook(runtime)
    (warning,) = [record.message for record in caplog.records]
    assert warning.endswith(f"may come in another order: no {hooks.ARRIVAL_TARGET}") and not registry.hooked
    assert runtime.arrivals.of(request(sampling_seed=5, n=2)).sample == 0, "numbered when it is first scheduled"


def test_server_info_has_our_status_and_is_answered_without_it_after_a_failure(registry, caplog):
    stated = [{"active": True}]
    hooks.install_status_hook(stated.pop)
    hook, when = registry.hooked[hooks.STATUS_TARGET]
    answer = types.SimpleNamespace(internal_state={})
    assert hook(answer) is None and when == "after"
    assert answer.internal_state == {"flashsample": {"active": True}} and not caplog.records
    hook(answer)
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith("flashsample: no status in /server_info: IndexError: ")


def test_a_server_with_nothing_to_do_says_so(registry):
    calls = []
    hooks.install_idle_hook(types.SimpleNamespace(idle=lambda: calls.append(1)))
    hook, when = registry.hooked[hooks.IDLE_TARGET]
    assert hook("the scheduler") is None and when == "before" and calls == [1]


def test_an_sglang_whose_hooks_cannot_be_registered_goes_without_a_status(registry, caplog):
    def broken(table: dict) -> None:
        raise RuntimeError("no registry")

    registry.apply = broken
    hooks.install_status_hook(dict)
    (warning,) = [record.message for record in caplog.records]
    assert warning == "flashsample: no status in /server_info: RuntimeError: no registry" and not registry.hooked


def test_a_class_with_a_method_that_we_do_not_know_means_no_screen(classes):
    targets, reason = hooks.weight_targets()
    assert reason is None and targets[f"{MANAGER}.release_memory_occupation"] == "manager_call"
    assert not READING_METHODS & {target.rpartition(".")[2] for target in targets}
    classes[UPDATER].stream_weights = lambda self: None
    assert hooks.weight_targets() == ({}, f"{UPDATER} has stream_weights, which may change weights")


def test_a_class_without_a_method_that_we_know_means_no_screen(classes):
    del classes[MANAGER].resume_memory_occupation
    assert hooks.weight_targets() == ({}, f"{MANAGER} has no resume_memory_occupation")
