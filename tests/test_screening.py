"""The screen of a server's head: whether there is one, that it draws what the head draws, and that no token is ever
drawn with a copy of weights that are no longer served."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import types

import batches
import pytest
import torch
from batches import Batch, for_forward, grammar, request, sampling_info
from serving import needs_sglang, version_path
from sgl_flashsample.kernels.int8_head import Counted
from test_runtime import head, lazy_rows, processor
from test_step_graphs import WARM_UP, fake_capture

from sgl_flashsample import paths
from sgl_flashsample.choices import Choices, choices_for
from sgl_flashsample.screen import Screen
from sgl_flashsample.sglang import counters, head_state, hooks, plugin, screening, support, weight_hooks
from sgl_flashsample.sglang.runtime import HeadState, Runtime
from sgl_flashsample.sglang.screening import HeadScreen, Mode
from sgl_flashsample.sglang.step_graphs import TURNS, StepGraphs
from sgl_flashsample.tuned import screen_of
from sgl_flashsample.work import Work

WIDTH, VOCAB = 64, 1000


def dtype_on(device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def weights(device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(VOCAB + 8, WIDTH, generator=generator) / 4).to(device, dtype_on(device))


def make_state(device, seed: int = 0, screened: bool = True) -> HeadState:
    state = HeadState(processor(vocab_size=VOCAB), head(weights(device, seed)))
    shape = choices_for(state.current()).shape
    state.choices = Choices(shape, {Work.SCREENED: {rows: screen_of(shape, rows) for rows in range(1, 9)}})
    if screened:
        state.screen = HeadScreen(state.current(), 8, 0.0)
    return state


@pytest.fixture
def state(device) -> HeadState:
    return make_state(device)


@pytest.fixture
def runtime() -> Runtime:
    made = Runtime("not asked yet")
    made.problem = made.screen_problem = None
    return made


def serve(runtime: Runtime, *states: HeadState) -> None:
    """Let these be the heads of the server."""
    for state in states:
        runtime._heads[id(state.processor), id(state.lm_head)] = state


def batch(device, num_rows: int = 6):
    """Rows of all temperatures, and their hidden states and positions."""
    _, two = lazy_rows(device)
    ones = torch.ones(num_rows, device=device)
    rows = dataclasses.replace(
        two,
        reasons=(None,) * num_rows,
        greedy=(False,) * num_rows,
        tempered_greedy=(False,) * num_rows,
        temperature=torch.arange(num_rows, device=device) * 0.3,
        seed=torch.arange(num_rows, device=device),
        needs=((False,) * 3,) * num_rows,
        edits=two.edits[:1] * num_rows,
        top_k=ones.int(),
        top_p=ones,
        min_p=0 * ones,
    )
    hidden = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(5)).to(device, dtype_on(device))
    return rows, hidden, torch.arange(num_rows, device=device)


def tokens(state: HeadState, device, return_logprob: bool = False) -> list[int]:
    rows, hidden, positions = batch(device)
    return state.sample(hidden, rows, None, positions, return_logprob).token_ids.tolist()


def screened_rows(state: HeadState) -> int:
    return int(state.screen._screen.counters[Counted.ROWS])


def write_unseen(state: HeadState, values: torch.Tensor) -> None:
    """As SGLang's weight loaders write: PyTorch does not count it."""
    before = state.lm_head.weight._version
    state.lm_head.weight.data.copy_(values)
    assert state.lm_head.weight._version == before


@pytest.mark.parametrize("text, mode", [(None, Mode.AUTO), ("auto", Mode.AUTO), ("on", Mode.ON), ("off", Mode.OFF)])
def test_the_environment_says_what_was_asked_for(monkeypatch, caplog, text, mode):
    monkeypatch.delenv(screening.SCREEN_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(screening.SCREEN_VARIABLE, text)
    assert screening.asked_for() is mode
    assert not caplog.records


def test_a_bad_value_gets_one_line_and_the_default(monkeypatch, caplog):
    monkeypatch.setenv(screening.SCREEN_VARIABLE, "yes")
    assert screening.asked_for() is Mode.AUTO
    (record,) = caplog.records
    assert "FLASHSAMPLE_SCREEN is 'yes'; expected auto, on or off" in record.message


def tuned_for_screens(own) -> Choices:
    config = screen_of(choices_for(own).shape, 1)
    return Choices(choices_for(own).shape, {Work.SCREENED: {1: config, 2: config}})


def test_auto_takes_a_table_that_names_the_screened_path_and_on_the_built_in_choice_too(state):
    own = state.current()
    built_in, tuned = choices_for(own), tuned_for_screens(own)
    assert screening.problem_for(own, built_in, Mode.AUTO, 16) == "no tuned table says that it wins here"
    assert screening.problem_for(own, tuned, Mode.AUTO, 16) is None
    assert screening.problem_for(own, built_in, Mode.ON, 16) is None
    assert screening.problem_for(own, built_in.without_screen(), Mode.ON, 16) == "it wins at no batch size here"


def test_a_head_that_the_bound_does_not_cover_has_no_screen(device):
    own = HeadState(processor(vocab_size=VOCAB, logit_scale=-1.0), head(weights(device, 0))).current()
    assert "logit_scale is -1.0" in screening.problem_for(own, choices_for(own), Mode.ON, 16)


@pytest.mark.parametrize("mode, share", [(Mode.AUTO, 0.05), (Mode.ON, 0.5)])
def test_a_screen_takes_no_more_than_its_share_of_the_free_memory(state, monkeypatch, mode, share):
    own = state.current()
    choices = tuned_for_screens(own)
    needed = Screen.bytes_for(own, choices.screened_rows(16))
    monkeypatch.setattr(screening, "free_bytes", lambda device: int(needed / share) + 20)
    assert screening.problem_for(own, choices, mode, 16) is None
    monkeypatch.setattr(screening, "free_bytes", lambda device: int(needed / share) - 20)
    problem = screening.problem_for(own, choices, mode, 16)
    assert problem.startswith(f"it takes {needed:,} bytes, more than {100 * share:.0f} % of the ")


def test_a_screen_draws_the_heads_tokens_and_counts_what_that_took(state, device):
    assert tokens(state, device) == tokens(make_state(device, screened=False), device)
    assert screened_rows(state) == 6


def test_batches_that_need_every_logit_are_drawn_without_the_screen(state, device):
    assert tokens(state, device, return_logprob=True) == tokens(make_state(device, screened=False), device)
    assert screened_rows(state) == 0


def test_a_batch_larger_than_the_screen_is_drawn_without_it(device):
    state = make_state(device)
    state.screen = HeadScreen(state.current(), 4, 0.0)
    assert tokens(state, device) == tokens(make_state(device, screened=False), device)
    assert screened_rows(state) == 0


def test_after_a_change_of_weights_nothing_is_drawn_with_the_old_copy(state, device):
    old, new = (tokens(make_state(device, seed, screened=False), device) for seed in (0, 1))
    assert tokens(state, device) == old != new
    write_unseen(state, weights(device, 1))
    assert tokens(state, device) != new, "else this proves nothing: nobody has said that the weights have changed"
    state.weights_change()
    before = screened_rows(state)
    assert tokens(state, device) == new
    assert screened_rows(state) == before, "drawn without the screen"
    state.renew_screen()
    assert tokens(state, device) == new
    assert screened_rows(state) == before + 6, "and with it again"


def test_a_write_that_pytorch_counts_is_noticed_without_being_told(state, device):
    tokens(state, device)
    with torch.no_grad():
        state.lm_head.weight.copy_(weights(device, 1))
    assert tokens(state, device) == tokens(make_state(device, 1, screened=False), device)


def test_another_weight_tensor_is_not_drawn_with_the_copy_of_the_old_one(state, device):
    tokens(state, device)
    state.lm_head.weight = weights(device, 1)
    new = tokens(make_state(device, 1, screened=False), device)
    assert tokens(state, device) == new
    state.renew_screen()
    before = screened_rows(state)
    assert tokens(state, device) == new
    assert screened_rows(state) == before + 6


def test_graphs_with_a_screen_are_dropped_when_weights_change_and_when_it_serves_again(state, device):
    def graphs():
        return StepGraphs(state._draw, 16, device, fake_capture)

    for change in (state.weights_change, state.renew_screen, state.free_screen, state.renew_screen):
        state.graphs = first = graphs()
        change()
        tokens(state, device)
        assert state.graphs is not first
    tokens(state, device)
    state.graphs = first = graphs()
    tokens(state, device)
    assert state.graphs is first, "nothing has changed"
    state.weights_change()
    state.renew_screen()
    assert state.graphs is None, "also where no step was in between"
    tokens(state, device)
    state.graphs = graphs()
    with torch.no_grad():
        state.lm_head.weight.copy_(weights(device, 1))
    tokens(state, device)
    assert state.graphs is None, "it would be replayed with the old copy"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA graphs")
def test_replayed_steps_draw_the_tokens_of_the_weights_that_are_served():
    device = torch.device("cuda")
    state, plain = make_state(device), make_state(device, screened=False)
    state.replays = True
    rows, hidden, positions = batch(device)
    for seed in (0, 1, 2):
        for changed in (state, plain):
            changed.weights_change()
            write_unseen(changed, weights(device, seed))
            changed.renew_screen()
        for step in range(WARM_UP + 3 * TURNS):
            hidden.copy_(torch.randn(len(rows), WIDTH, device=device))
            positions.fill_(step)
            replayed = state.sample(hidden, rows, None, positions, False).token_ids
            assert torch.equal(replayed, plain.sample(hidden, rows, None, positions, False).token_ids)
        assert [len(known.captured) for known in state.graphs._steps.values()] == [TURNS]
    assert screened_rows(state) == 3 * 6 * (WARM_UP + 3 * TURNS), "a replay counts too"


def test_a_failing_screen_switches_off_itself_alone_with_one_warning(state, device, monkeypatch, caplog):
    def fails(*arguments, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(paths, "screened_sample", fails)
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(3):
            assert tokens(state, device) == tokens(make_state(device, screened=False), device)
    assert [r.message for r in caplog.records] == ["flashsample: screen off: RuntimeError: no such kernel"]
    monkeypatch.undo()
    state.renew_screen()
    tokens(state, device)
    assert screened_rows(state) == 0, "it stays off"


def test_what_fails_without_a_screen_too_is_not_blamed_on_it(state, device, caplog):
    rows, hidden, positions = batch(device)
    with pytest.raises(ValueError, match="hidden is"):
        state.sample(hidden[:, :-1].contiguous(), rows, None, positions, False)
    assert not caplog.records and state.has_screen


def test_a_failure_without_a_screen_is_raised_at_once(device, monkeypatch):
    calls = []
    monkeypatch.setattr(head_state, "sample", lambda *arguments, **options: calls.append(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tokens(make_state(device, screened=False), device)
    assert len(calls) == 1


def test_freed_memory_is_taken_again_only_where_there_is_enough(state, device, monkeypatch, caplog):
    state.free_screen()
    want = tokens(make_state(device, screened=False), device)
    assert state.screen._screen is None and tokens(state, device) == want
    monkeypatch.setattr(screening, "free_bytes", lambda device: 1000)
    state.renew_screen()
    assert tokens(state, device) == want and not state.has_screen
    (record,) = caplog.records
    assert "screen off: RuntimeError: it takes " in record.message
    assert "more than 50 % of the 1,000 that are free" in record.message


def test_a_copy_that_was_made_in_sglangs_inference_mode_can_be_renewed_outside_of_it(state, device):
    state.free_screen()
    with torch.inference_mode():
        state.renew_screen()
    state.weights_change()
    state.renew_screen()
    assert state.has_screen and tokens(state, device) == tokens(make_state(device, screened=False), device)
    assert screened_rows(state) == 6


# What SGLang's manager of weight updates does, as far as hooks see it.


class Manager:
    """SGLang's SchedulerWeightUpdaterManager. during: called in the middle of each of its calls."""

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


def call(runtime, manager, name, **fields):
    request = types.SimpleNamespace(**fields)
    return weight_hooks.WeightHooks(runtime).manager_call(getattr(Manager, name), manager, request)


def serving(state) -> bool:
    return state.screen.serving(state.current()) is not None


def metadata(mode: str):
    """SGLang's LogitsMetadata of a step."""
    is_mode = {f"is_{name}": (lambda name=name: mode == name) for name in ("decode", "extend", "target_verify")}
    forward_mode = types.SimpleNamespace(**is_mode, is_split_prefill=lambda: False)
    return types.SimpleNamespace(forward_mode=forward_mode, extend_return_logprob=False, is_prefill_only=False)


def step(runtime, state, mode: str) -> None:
    hidden = torch.zeros(2, WIDTH, device=state.lm_head.weight.device, dtype=state.lm_head.weight.dtype)
    assert runtime.can_defer(state.processor, hidden, state.lm_head, metadata(mode)) is state


def test_an_update_invalidates_before_it_writes_and_renews_after(runtime, state, device):
    serve(runtime, state)
    seen = []

    def during():
        seen.append(serving(state))
        write_unseen(state, weights(device, 1))

    assert call(runtime, Manager(during), "update") == "updated"
    assert seen == [False] and serving(state)
    assert tokens(state, device) == tokens(make_state(device, 1, screened=False), device)
    assert screened_rows(state) == 6


def test_an_update_that_fails_in_the_middle_is_raised_and_leaves_a_copy_of_what_is_there(runtime, state, device):
    serve(runtime, state)

    def during():
        write_unseen(state, weights(device, 1))
        raise RuntimeError("connection lost")

    with pytest.raises(RuntimeError, match="connection lost"):
        call(runtime, Manager(during), "update")
    assert serving(state)
    assert tokens(state, device) == tokens(make_state(device, 1, screened=False), device)


def test_weights_that_come_in_parts_are_copied_by_the_next_prefill_and_by_no_decode_step(runtime, state):
    serve(runtime, state)
    manager = Manager()
    for _ in range(3):
        call(runtime, manager, "update", flush_cache=False)
        step(runtime, state, "decode")
        assert not serving(state)
    step(runtime, state, "extend")
    assert serving(state)
    call(runtime, manager, "update", flush_cache=False)
    call(runtime, manager, "update", flush_cache=True)
    assert serving(state), "the last part of an update flushes the cache"


def test_nothing_is_copied_while_a_session_is_open(runtime, state):
    serve(runtime, state)
    manager = Manager()
    for name in ("begin", "update"):
        call(runtime, manager, name, flush_cache=True)
        step(runtime, state, "extend")
        assert not serving(state), "weights are also written without a call"
    call(runtime, manager, "end")
    assert serving(state)


def test_released_memory_is_freed_and_taken_again_after_all_of_it_is_back(runtime, state, device):
    serve(runtime, state)
    manager = Manager()
    call(runtime, manager, "release", tags=["weights", "kv_cache"])
    assert state.screen._screen is None
    call(runtime, manager, "resume", tags=["weights"])
    call(runtime, manager, "update", flush_cache=True)
    assert state.screen._screen is None, "SGLang must find the memory of its KV cache free"
    write_unseen(state, weights(device, 1))
    call(runtime, manager, "resume", tags=["kv_cache"])
    assert serving(state)
    assert tokens(state, device) == tokens(make_state(device, 1, screened=False), device)


def test_a_copy_that_cannot_be_made_anew_is_not_said_to_be(runtime, state, monkeypatch, caplog):
    serve(runtime, state)
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        call(runtime, Manager(), "update")
        monkeypatch.setattr(Screen, "rebuild", lambda self, head: 1 / 0)
        call(runtime, Manager(), "update")
        call(runtime, Manager(), "update")
    first, *others = [record.message for record in caplog.records]
    assert first.startswith("flashsample: screen made anew after a change of weights in ")
    assert others == ["flashsample: screen off: ZeroDivisionError: division by zero"]
    assert not serving(state)


def test_a_release_of_other_memory_keeps_the_copy(runtime, state):
    serve(runtime, state)
    manager = Manager()
    call(runtime, manager, "release", tags=["kv_cache"])
    assert state.screen._screen is not None
    call(runtime, manager, "resume", tags=["kv_cache"])
    assert serving(state)


def test_weights_that_are_only_read_leave_the_screen_alone(runtime, state):
    serve(runtime, state)
    seen = []
    manager = Manager(lambda: seen.append(serving(state)))
    for action in ("snapshot", "compare", "checksum", "reset_tensors"):
        call(runtime, manager, "update", action=action)
    assert seen == [True, True, True, False]


def test_weights_that_sglang_writes_in_a_step_are_copied_by_the_next_prefill(runtime, state):
    serve(runtime, state)
    assert weight_hooks.WeightHooks(runtime).updater_call("updater", "path") is None, "SGLang's arguments are its own"
    step(runtime, state, "decode")
    assert not serving(state)
    step(runtime, state, "extend")
    assert serving(state)


def test_weights_that_load_after_the_start_are_copied_then(runtime, state, monkeypatch):
    serve(runtime, state)
    monkeypatch.setattr(runtime, "prepare_model", lambda model: None)
    runner = types.SimpleNamespace(is_draft_worker=False, model=None, startup_weight_load=object())
    hooks.Hooks(runtime).load_model(None, runner)
    step(runtime, state, "extend")
    assert not serving(state), "a graph is captured with weights that mean nothing"
    weight_hooks.WeightHooks(runtime).late_load(None, runner)
    assert serving(state)


def test_a_failure_of_ours_never_reaches_sglang_and_switches_the_screen_off(runtime, state, device, caplog):
    serve(runtime, state)
    manager = Manager()
    del manager.offload_tags  # an SGLang that we do not know
    assert call(runtime, manager, "update") == "updated"
    assert not state.has_screen
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        "flashsample: screen off: weights_changed: AttributeError: 'Manager' object has no attribute 'offload_tags'"
    ]


CONFIGURATION = {"enable_lora": None, "lora_target_modules": None, "weight_cache_mode": "off"} | {
    "remote_instance_weight_loader_start_seed_via_transfer_engine": False,
    "remote_instance_weight_loader_backend": "nccl",
}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, None),
        ({"enable_lora": True}, "LoRA adapters may reach the LM head"),
        ({"enable_lora": True, "lora_target_modules": ["all"]}, "LoRA adapters may reach the LM head"),
        ({"enable_lora": True, "lora_target_modules": ["q_proj", "lm_head"]}, "LoRA adapters may reach the LM head"),
        ({"enable_lora": True, "lora_target_modules": {"q_proj"}}, None),
        ({"weight_cache_mode": "attach"}, "shared with other processes"),
        ({"remote_instance_weight_loader_start_seed_via_transfer_engine": True}, "may write to the weights"),
        ({"remote_instance_weight_loader_backend": "transfer_engine"}, "may write to the weights"),
    ],
    ids=str,
)
def test_a_server_in_which_others_change_the_head_has_no_screen(monkeypatch, changes, words):
    module = types.ModuleType("sglang.srt.runtime_context")
    module.get_lora = module.get_model = lambda: types.SimpleNamespace(**(CONFIGURATION | changes))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert (words is None and support.screen_problem() is None) or words in support.screen_problem()


PREPARED = [
    (Mode.ON, None, True, "screen built: "),
    (Mode.ON, "the hook is missing", True, "screen not built: the hook is missing"),
    (Mode.ON, None, False, "screen not built: the model shows its LM head only after the memory is shared out"),
    (Mode.AUTO, None, True, "screen not built: no tuned table says that it wins here"),
]


@pytest.mark.parametrize("mode, problem, starting, words", PREPARED, ids=[f"{row[0]} {row[1:3]}" for row in PREPARED])
def test_one_line_says_what_was_built_or_why_not(runtime, device, monkeypatch, caplog, mode, problem, starting, words):
    runtime._screening, runtime.screen_problem = mode, problem
    monkeypatch.setattr(support, "head_problem", lambda *arguments: None)
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = runtime.head_for(processor(vocab_size=VOCAB), head(weights(device, 0)), starting=starting)
    (line,) = [record.message for record in caplog.records if "flashsample: screen" in record.message]
    assert words in line
    assert state.has_screen == ("screen built" in words)
    if state.has_screen:
        screen = state.screen
        share = 100 * screen.num_bytes / (dtype_on(device).itemsize * (VOCAB + 8) * WIDTH)
        assert f"screen built: {screen.num_bytes:,} bytes, {share:.1f} % of the LM head's, " in line
        assert line.endswith(f"for batches of up to {screen.rows} rows")
    assert tokens(state, device) == tokens(make_state(device, screened=False), device)


def test_a_screen_whose_kernels_fail_at_start_is_given_back(runtime, device, monkeypatch, caplog):
    from sgl_flashsample import selftest

    def fails(*arguments, **options):
        raise RuntimeError("out of registers")

    runtime._screening = Mode.ON
    monkeypatch.setattr(support, "head_problem", lambda *arguments: None)
    monkeypatch.setattr(selftest, "screened_sample", fails)
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = runtime.head_for(processor(vocab_size=VOCAB), head(weights(device, 0)), starting=True)
    assert state.screen is None
    (line,) = [record.message for record in caplog.records if "flashsample: screen" in record.message]
    assert "screen not built: its kernels fail here: " in line and "out of registers" in line
    assert tokens(state, device) == tokens(make_state(device, screened=False), device)


def test_counters_of_a_screen_say_how_far_it_could_tell(monkeypatch):
    made = counters.Counters(metrics=False)
    counted = {Counted.BATCHES: 4, Counted.ROWS: 40, Counted.GROUPS: 18, Counted.CANDIDATES: 60}
    counted |= {Counted.SURE_ROWS: 30, Counted.WIDE_BATCHES: 1}
    made.add_screened([0] * len(Counted), resting=False)
    assert made.summary() == "", "nothing was screened, no word of it"
    made.add_screened([counted[kind] for kind in Counted], resting=False)
    assert made.summary() == (
        "screened 40 rows, 75.0 % sure, 1.5 candidates per row, 4.5 groups read per batch, 1 of 4 batches wide"
    )


def test_what_a_screen_counts_reaches_the_counters(runtime, state, device):
    rows, hidden, positions = batch(device)
    lazy, _ = lazy_rows(device)
    lazy.source, lazy.hidden = state, hidden
    for _ in range(3):
        assert runtime.sample(lazy, rows, None, positions, False) is not None
        if device.type == "cuda":
            torch.cuda.synchronize()
    summary = runtime.counters.summary()
    assert summary.startswith("screened 12 rows, "), "those of the last step are still under way"


@needs_sglang
def test_batches_of_a_server_with_every_feature_have_the_same_tokens_with_a_screen(monkeypatch):
    """SGLang's own batches: penalties, bias, grammars, truncations, logprobs, greedy and sampled rows."""
    batches.configure(monkeypatch)
    kinds = [
        [{"temperature": 1.0}, {"temperature": 0}, {"temperature": 0.4, "sampling_seed": 3}],
        [{"temperature": 1.0, "logit_bias": {"5": 4.0}}, {"temperature": 0}, {"frequency_penalty": 1.0}],
        [{"temperature": 0}, {"temperature": 0}],
        [{"temperature": 1.0, "top_p": 0.8}, {"temperature": 1.0}],
        [{"temperature": 1.0, "top_p": 0.8, "top_k": 5}, {"temperature": 1.0}, {"temperature": 0.6, "top_k": 33}],
        [{"temperature": 1.0, "top_k": 5, "frequency_penalty": 1.0}, {"temperature": 0}],
        [{"temperature": 1.0, "grammar": grammar(3, 4, 99)}, {"temperature": 0.7}],
    ]
    plain, screened = batches.Head(), batches.Head()
    screened.state.screen = HeadScreen(screened.state.current(), 8, 0.0)
    hidden = torch.randn(3, batches.WIDTH, generator=torch.Generator().manual_seed(3)).to(batches.DEVICE)
    for overlap in (False, True):
        for logprob in (False, True):
            for kind in kinds:
                drawn = []
                for own in (plain, screened):
                    runner = batches.ModelRunner(batches.samplers()[0])
                    runner.hooks = hooks.Hooks(runner.sampler.runtime)
                    requests = [request(f"r{i}", **params) for i, params in enumerate(kind)]
                    info = for_forward(sampling_info(Batch(requests)), overlap)
                    if any(r.grammar for r in requests):
                        info.update_regex_vocab_mask()
                    lazy = own.lazy(hidden[: len(kind)])
                    found, output = runner.sample(lazy, info, logprob)
                    assert not own.computed and runner.sampler.runtime.problem is None
                    logprobs = output.next_token_logprobs.tolist() if logprob else None
                    drawn.append((found.tolist(), logprobs))
                assert drawn[0] == drawn[1], (kind, overlap, logprob)
    counted = screened.state.screen._screen.counters.tolist()
    if batches.DEVICE == "cuda":
        return  # the built-in choice screens no float32 head there
    screened_rows = 3 + 3 + 2 + 3 + 2 + 2  # of all kinds but top-p without a top-k
    assert counted[Counted.ROWS] == 2 * screened_rows, "and none with logprobs"


@needs_sglang
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU machine has one SGLang")
@pytest.mark.parametrize("version", [None, "0.5.17", "0.5.23"])
def test_every_way_in_which_a_known_sglang_changes_weights_is_hooked(version, tmp_path):
    """In a process of its own, whose SGLang is that version's."""
    from sgl_flashsample.demo import cpu_platform

    code = """
import sys, types
from sgl_flashsample.sglang import weight_hooks
found, problem = weight_hooks.targets()
assert problem is None, problem
runtime = types.SimpleNamespace()
problem = weight_hooks.install(runtime)
assert problem is None, problem
print(*sorted(target.rpartition("sglang.srt.")[2] for target in found), sep="\\n")
"""
    environment = cpu_platform.environment(tmp_path)
    if version is not None:
        environment["PYTHONPATH"] = f"{version_path(version)}:{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    hooked = set(done.stdout.split())
    names = {target.rpartition(".")[2] for target in hooked}
    assert names >= weight_hooks.CHANGING[weight_hooks.MANAGER][0]
    sessions = {"begin_weight_update", "end_weight_update", "finalize_startup_weight_load"}
    assert sessions <= names if version != "0.5.17" else not sessions & names


def test_a_class_with_a_method_that_we_do_not_know_has_no_screen(monkeypatch):
    def known(path):
        required, possible = weight_hooks.CHANGING[path]
        return {name: (lambda self: None) for name in required | possible | weight_hooks.HARMLESS}

    kinds = {path: type("Kind", (), known(path)) for path in weight_hooks.CHANGING}
    monkeypatch.setattr(weight_hooks.pkgutil, "resolve_name", lambda path: kinds.get(path, print))
    found, problem = weight_hooks.targets()
    assert problem is None and f"{weight_hooks.MANAGER}.release_memory_occupation" in found
    kinds[weight_hooks.UPDATER].stream_weights = lambda self: None
    assert weight_hooks.targets() == ({}, f"{weight_hooks.UPDATER} has stream_weights, which may change weights")
    del kinds[weight_hooks.UPDATER].stream_weights, kinds[weight_hooks.MANAGER].resume_memory_occupation
    assert weight_hooks.targets() == ({}, f"{weight_hooks.MANAGER} has no resume_memory_occupation")


def test_a_hook_that_does_not_land_keeps_the_server_without_a_screen(monkeypatch):
    made = Runtime("not asked yet")
    made.problem = made.screen_problem = None
    sampler = types.ModuleType("sampler")
    sampler.FlashSampler = lambda runtime: runtime
    monkeypatch.setitem(sys.modules, "sgl_flashsample.sglang.sampler", sampler)
    monkeypatch.setattr(plugin, "_runtime", None)
    monkeypatch.setattr("sgl_flashsample.sglang.runtime.Runtime", lambda problem: made)
    monkeypatch.setattr(hooks, "install", lambda runtime: None)
    monkeypatch.setattr(weight_hooks, "install", lambda runtime: "SGLang did not apply the hook on X")
    assert plugin.make_sampler() is made
    assert made.problem is None and made.screen_problem == "SGLang did not apply the hook on X"


def test_a_server_that_is_asked_for_no_screen_is_not_hooked(monkeypatch):
    monkeypatch.setenv(screening.SCREEN_VARIABLE, "off")
    monkeypatch.setattr(support, "screen_problem", lambda: None)
    assert Runtime("not asked yet").screen_problem == "FLASHSAMPLE_SCREEN is off"
    monkeypatch.setenv(screening.SCREEN_VARIABLE, "auto")
    assert Runtime("not asked yet").screen_problem is None
