"""The screen of a server's head: whether there is one, that it draws what the head draws, that no token is ever drawn
with a copy of other weights, and that it pauses where it reads too much of the head."""

from __future__ import annotations

import logging
import types

import pytest
import torch
from head_states import (
    CPU,
    VOCAB,
    CountingCapture,
    hidden_states,
    is_serving,
    make_state,
    mixed_temperatures,
    screening_table,
    settle,
    step_of,
    weights,
    write_unseen,
)
from sglang_batches import (
    CountingHead,
    ModelRunner,
    ScheduleBatch,
    SteadyServer,
    for_forward,
    grammar,
    make_samplers,
    request,
    sampling_info,
)

from sgl_flashsample.defaults import HeadTraits
from sgl_flashsample.dispatch import DispatchTable
from sgl_flashsample.kernels.params import LMHead
from sgl_flashsample.kernels.workspace import ScreenCounter
from sgl_flashsample.screen import Screen
from sgl_flashsample.screen_race import unsupported_race
from sgl_flashsample.sglang import screen_lifecycle
from sgl_flashsample.sglang.draw import draw
from sgl_flashsample.sglang.head import HeadState
from sgl_flashsample.sglang.hooks import StepHooks
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.metrics import LOG_SECONDS_VARIABLE
from sgl_flashsample.sglang.screen_lifecycle import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    MAX_READ_SHARE,
    MIN_BLOCKS,
    HeadScreen,
    PausePolicy,
    ScreenMode,
    unsupported_screen,
)

pytestmark = pytest.mark.slow

# Heads that get a screen.


MEASURED, BUILT_IN = screening_table, DispatchTable
ON, AUTO = ScreenMode.ON, ScreenMode.AUTO
TOO_SMALL = "too small, in the words of the race"
NOT_COVERED = "the head cannot be screened: its logit_scale is -1.0, the bound needs a positive one"


@pytest.mark.parametrize(
    "scale, table, mode, reason",
    [
        (None, BUILT_IN, AUTO, TOO_SMALL),
        (None, MEASURED, AUTO, None),
        (None, MEASURED, ON, None),
        (None, BUILT_IN, ON, None),
        (
            None,
            lambda traits: MEASURED(traits).without_screen(),
            ON,
            "the screened path is the choice for no batch size here",
        ),
        (-1.0, MEASURED, ON, NOT_COVERED),
    ],
)
def test_auto_wants_a_table_that_has_measured_it_and_on_takes_the_built_in_choice_too(
    device, scale, table, mode, reason
):
    if table is BUILT_IN and mode is ON and device.type != "cpu":
        pytest.skip("the built-in choice of a GPU depends on the head")
    head = make_state(device, logit_scale=scale).head.lm_head
    reason = unsupported_race(head) if reason is TOO_SMALL else reason
    assert unsupported_screen(head, table(HeadTraits.of(head)), mode, 16) == reason


def test_a_head_in_host_memory_has_none(in_host_memory):
    head = make_state(CPU).head.lm_head
    assert unsupported_screen(head, screening_table(HeadTraits.of(head)), ON, 16) == "the head is in host memory"


@pytest.fixture
def free_memory(monkeypatch):
    """Sets the free memory of a GPU that is not there, some of it held by PyTorch."""

    def set_free(num_bytes: int) -> None:
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (num_bytes - 500, 2 * num_bytes))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    return set_free


def on_a_gpu(head: LMHead) -> types.SimpleNamespace:
    """The attributes of a head that decide whether it gets a screen."""
    weight = types.SimpleNamespace(device=torch.device("cuda:0"), shape=head.weight.shape, dtype=head.weight.dtype)
    return types.SimpleNamespace(
        weight=weight, vocab_size=head.vocab_size, scale=None, logit_scale=None, batch_invariant=False
    )


@pytest.mark.parametrize("mode, share", [(ScreenMode.AUTO, 0.05), (ScreenMode.ON, 0.5)])
def test_a_screen_takes_no_more_than_its_share_of_the_free_memory(free_memory, mode, share):
    head = make_state(torch.device("cpu")).head.lm_head
    table = screening_table(HeadTraits.of(head))
    needed = Screen.bytes_for(head, table.screened_rows(16))
    free_memory(int(needed / share) + 20)
    assert unsupported_screen(on_a_gpu(head), table, mode, 16) is None
    free_memory(int(needed / share) - 20)
    reason = unsupported_screen(on_a_gpu(head), table, mode, 16)
    assert reason == (
        f"it takes {needed:,} bytes, more than {100 * share:.0f} % of the {int(needed / share) - 20:,} free bytes"
    )


# Draws with a screen.


def tokens(state: HeadState, return_logprob: bool = False) -> list[int]:
    """The tokens of a batch with rows of all temperatures."""
    device = state.head.lm_head.weight.device
    lazy = LazyLogits(hidden_states(device), VOCAB, state, lambda hidden: pytest.fail("logits"))
    step = step_of(mixed_temperatures(device), torch.arange(6, device=device), None, return_logprob)
    return draw(lazy, step).token_ids.tolist()


def screened_rows(state: HeadState) -> int:
    """Rows that the screen has served."""
    screen = state.head.screen
    return 0 if screen is None else int(screen.counters[ScreenCounter.ROWS])


@pytest.fixture
def state(device) -> HeadState:
    return make_state(device, screened=True)


@pytest.fixture(scope="module")
def unscreened(device) -> dict[int, list[int]]:
    """The tokens of heads without a screen, by the seed of their weights."""
    return {seed: tokens(make_state(device, seed)) for seed in (0, 1)}


@pytest.mark.parametrize(
    "rows, logprob, screened", [(8, False, 6), (8, True, 0), (4, False, 0)], ids=["", "every logit", "a larger batch"]
)
def test_a_screen_draws_the_heads_tokens_and_counts_those_that_it_has_drawn(state, unscreened, rows, logprob, screened):
    state.screen = HeadScreen(state.head.lm_head, rows, 0.0)
    assert tokens(state, logprob) == unscreened[0] != unscreened[1]
    assert screened_rows(state) == screened


def test_after_a_change_of_weights_nothing_is_drawn_with_the_old_copy(state, device, unscreened):
    assert tokens(state) == unscreened[0]
    write_unseen(state, weights(device, 1))
    assert tokens(state) != unscreened[1], "else this proves nothing: nobody has said that the weights have changed"
    state.weights_change()
    assert tokens(state) == unscreened[1] and state.head.screen is None
    state.renew_screen()
    assert tokens(state) == unscreened[1] and state.head.screen is not None
    assert screened_rows(state) == 6 + 6 + 6


@pytest.mark.parametrize("replace", [False, True], ids=["written", "replaced"])
def test_a_change_that_pytorch_knows_of_is_noticed_without_being_told(state, device, unscreened, replace):
    tokens(state)
    if replace:
        state.lm_head.weight = weights(device, 1)
    else:
        with torch.no_grad():
            state.lm_head.weight.copy_(weights(device, 1))
    assert tokens(state) == unscreened[1] and state.head.screen is None
    state.renew_screen()
    assert tokens(state) == unscreened[1] and state.head.screen is not None


def test_a_failing_screen_switches_off_itself_alone_with_one_warning(device, script, unscreened, caplog):
    state = make_state(device, screened=True, script=script)
    script.error, script.screened = RuntimeError("no such kernel"), True
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(3):
            assert tokens(state) == unscreened[0]
    assert [r.message for r in caplog.records] == [
        "flashsample: screen (INT8 copy of the LM head) off until restart; small batches are slower without it, their "
        "tokens are the same: RuntimeError: no such kernel"
    ]
    script.error = None
    state.renew_screen()
    assert tokens(state) == unscreened[0] and state.head.screen is None, "it stays off"
    assert [call.screened for call in script.calls] == [True] + [False] * 4


@pytest.mark.parametrize("screened, error", [(True, torch.OutOfMemoryError), (False, ZeroDivisionError)])
def test_a_failure_that_is_not_the_screens_is_raised_at_once_and_the_screen_stays(
    device, script, caplog, screened, error
):
    state = make_state(device, screened=screened, script=script)
    script.error = error("a fault")
    with pytest.raises(error):
        tokens(state)
    assert len(script.calls) == 1 and state.has_screen is screened and not caplog.records


def test_freed_memory_is_taken_again_only_where_there_is_enough(state, free_memory):
    screen, head = state.screen, state.head.lm_head
    screen.free(head)
    free_memory(1000)
    with pytest.raises(RuntimeError, match=r"it takes [\d,]+ bytes, more than 50 % of the 1,000 free bytes"):
        screen.renew(on_a_gpu(head))
    assert not is_serving(state)


def test_a_copy_for_which_there_is_no_memory_leaves_the_head_without_a_screen(state, unscreened, monkeypatch, caplog):
    class NoMemory(Screen):
        def __init__(self, *arguments, **options):
            raise torch.OutOfMemoryError("no memory for a copy")

    state.free_screen()
    monkeypatch.setattr(screen_lifecycle, "Screen", NoMemory)
    state.renew_screen()
    assert tokens(state) == unscreened[0] and not state.has_screen
    (record,) = caplog.records
    assert "off until restart" in record.message and record.message.endswith(": OutOfMemoryError: no memory for a copy")


def test_a_copy_that_was_made_in_sglangs_inference_mode_can_be_renewed_outside_of_it(state, unscreened):
    state.free_screen()
    assert not is_serving(state) and tokens(state) == unscreened[0] and state.head.screen is None
    with torch.inference_mode():
        state.renew_screen()
    state.weights_change()
    state.renew_screen()
    assert state.has_screen and tokens(state) == unscreened[0]
    assert screened_rows(state) == 6


FEATURES = {
    "plain": [{"temperature": 1.0}, {"temperature": 0}, {"temperature": 0.4, "sampling_seed": 3}],
    "edited": [{"temperature": 1.0, "logit_bias": {"5": 4.0}}, {"temperature": 0}, {"frequency_penalty": 1.0}],
    "greedy": [{"temperature": 0}, {"temperature": 0}],
    "top-p": [{"temperature": 1.0, "top_p": 0.8}, {"temperature": 1.0}],
    "top-k": [{"temperature": 1.0, "top_p": 0.8, "top_k": 5}, {"temperature": 1.0}],
    "both": [{"temperature": 1.0, "top_k": 5, "frequency_penalty": 1.0}, {"temperature": 0}],
    "grammar": [{"temperature": 1.0, "grammar": (3, 4, 99)}, {"temperature": 0.7}],
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("logprob, overlap", [(False, False), (False, True), (True, True)])
def test_batches_with_every_feature_have_the_same_tokens_with_a_screen(device, name, overlap, logprob):
    """SGLang's own batches: penalties, bias, grammars, truncations, logprobs, greedy and sampled rows."""
    rows = [{k: grammar(*v) if k == "grammar" else v for k, v in row.items()} for row in FEATURES[name]]
    hidden, drawn = hidden_states(device, len(rows), dtype=torch.float32), []
    heads = [CountingHead(device), CountingHead(device, screened=True)]
    for head in heads:
        ours = make_samplers()[0]
        runner = ModelRunner(ours, StepHooks(ours.runtime))
        batch = ScheduleBatch([request(f"r{i}", **params) for i, params in enumerate(rows)], device)
        info = for_forward(sampling_info(batch), overlap)
        token_ids, output = runner.sample(head.lazy(hidden), info, logprob)
        assert not head.computed and set(output.customized_info["flashsample_path"]) == {"fused"}
        drawn.append((token_ids.tolist(), output.next_token_logprobs.tolist() if logprob else None))
    assert drawn[0] == drawn[1]
    screened = 0 if logprob or name == "top-p" else len(rows)
    assert screened_rows(heads[1].state) == screened, "all but those that need every logit"


# Pauses.

GROUPS = 1000  # of a head of 2-byte weights, whose copy is half its bytes
FEW, MANY = 5, int((MAX_READ_SHARE - 0.5) * GROUPS) + 1


@pytest.fixture
def policy(clock) -> PausePolicy:
    return PausePolicy(head_bytes=32 * GROUPS, copy_bytes=16 * GROUPS, group_bytes=32)


def counted(blocks: int, groups: int) -> list[int]:
    """Counters after ``blocks`` blocks of rows with ``groups`` groups each."""
    numbers = {ScreenCounter.ROW_BLOCKS: blocks, ScreenCounter.ROWS: blocks, ScreenCounter.GROUPS: blocks * groups}
    return [numbers.get(counter, 0) for counter in ScreenCounter]


def test_a_screen_that_reads_little_of_the_head_serves_and_no_step_asks_for_the_time(policy, monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: pytest.fail("it does"))
    for _ in range(10):
        policy.add(counted(MIN_BLOCKS, FEW))
        assert not policy.is_paused()


def test_a_screen_that_reads_too_much_is_paused_for_a_while_and_tried_again(policy, clock):
    policy.add(counted(MIN_BLOCKS, MANY))
    assert policy.is_paused() and policy.paused
    clock[0] += FIRST_PAUSE_SECONDS - 1
    assert policy.is_paused()
    clock[0] += 1
    assert not policy.is_paused() and not policy.paused


@pytest.mark.parametrize(
    "copy_bytes, groups, paused", [(16 * GROUPS, MANY - 1, False), (16 * GROUPS, MANY, True), (0, MANY, False)]
)
def test_too_much_is_more_than_its_share_of_the_heads_bytes_the_copy_included(clock, copy_bytes, groups, paused):
    policy = PausePolicy(32 * GROUPS, copy_bytes, 32)
    policy.add(counted(MIN_BLOCKS, groups))
    assert policy.is_paused() is paused


def test_it_takes_enough_blocks_of_rows_and_their_mean_to_decide(policy):
    policy.add(counted(MIN_BLOCKS - 1, MANY))
    assert not policy.is_paused(), "too few to tell"
    policy.add(counted(MIN_BLOCKS, FEW))
    assert not policy.is_paused(), "few groups on average"
    policy.add(counted(MIN_BLOCKS - 1, MANY))
    assert not policy.is_paused(), "counts of an earlier decision are not used again"
    policy.add(counted(1, MANY))
    assert policy.is_paused()


def test_pauses_double_up_to_the_longest_and_start_again_once_the_screen_pays(policy, clock):
    def pause() -> float:
        started = clock[0]
        policy.add(counted(MIN_BLOCKS, MANY))
        while policy.is_paused():
            clock[0] += FIRST_PAUSE_SECONDS / 2
        return clock[0] - started

    pauses = [pause() for _ in range(9)]
    assert pauses[:4] == [FIRST_PAUSE_SECONDS * factor for factor in (1, 2, 4, 8)]
    assert pauses[-2:] == [LONGEST_PAUSE_SECONDS] * 2
    policy.add(counted(MIN_BLOCKS, FEW))
    assert pause() == FIRST_PAUSE_SECONDS


def test_what_arrives_during_a_pause_does_not_count_after_it(policy, clock):
    policy.add(counted(MIN_BLOCKS, MANY))
    policy.add(counted(2 * MIN_BLOCKS, MANY))
    clock[0] += FIRST_PAUSE_SECONDS
    assert not policy.is_paused(), "the pause is no longer for it"
    policy.add(counted(1, MANY))
    assert not policy.is_paused()


def test_one_line_per_pause_says_what_was_measured_and_for_how_long(policy, clock, caplog):
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        policy.add(counted(MIN_BLOCKS, 412))
        for _ in range(3):
            policy.is_paused()
            policy.add(counted(MIN_BLOCKS, 412))
        clock[0] += FIRST_PAUSE_SECONDS
        policy.is_paused()
        policy.add(counted(MIN_BLOCKS, 600))
    first, second = [record.message for record in caplog.records]
    assert first == (
        "flashsample: screen (INT8 copy of the LM head) paused for 60 s, then tried again: for the current requests it "
        "read 91.2 % of the LM head's bytes, and it is faster only below 65 %; until then the fused kernel draws the "
        "same tokens without it"
    )
    assert "paused for 120 s" in second and "91.2 %" not in second


# In a server, a head with one channel so large that its copy is wrong by as much as the others' elements.


def outlier_state(device, **options) -> HeadState:
    state = make_state(device, **options)
    values = weights(device)
    values[:, 0] = 1000.0
    write_unseen(state, values)
    state.renew_screen()
    return state


@pytest.fixture
def pausing(device, clock, one_rank, monkeypatch):
    """Servers of a head; a decision takes two blocks of rows, and every step looks at what was counted before it."""
    monkeypatch.setattr(screen_lifecycle, "MIN_BLOCKS", 2)
    monkeypatch.setenv(LOG_SECONDS_VARIABLE, "0")

    def make(state: HeadState) -> SteadyServer:
        rows = [{"temperature": 0.3 * place, "sampling_seed": place} for place in range(6)]
        server = SteadyServer(device, state, rows)
        server.hidden[:, 0] = 0  # the channel says nothing: tokens are those of the others
        return server

    return make


def test_a_pause_has_graphs_of_its_own_its_tokens_are_the_same_and_the_log_tells_of_it(pausing, device, clock):
    capture = CountingCapture()
    screened, plain = pausing(outlier_state(device, screened=True, capture=capture)), pausing(outlier_state(device))
    state, seen = screened.state, []
    for step in range(8):
        if step == 6:
            clock[0] += FIRST_PAUSE_SECONDS
        assert screened.step() == plain.step()
        assert state.graphs is not None
        log = screened.runtime.metrics.summary()
        seen.append((state.head.screen is not None, capture.pools, ", paused;" in log))
    assert seen == [
        *[(True, 1, False)] * 2,
        (True, 1, True),  # it pauses from the next step on
        *[(False, 2, True)] * 3,  # the graphs of before have the screen in them
        *[(True, 2, False)] * 2,  # and wait for it
    ]


def test_an_ordinary_head_is_served_by_its_screen_throughout(pausing, device, monkeypatch):
    if device.type == "cuda":  # a head of 2 bytes: its copy is half of it, not a quarter; as many groups beside it
        monkeypatch.setattr(screen_lifecycle, "MAX_READ_SHARE", MAX_READ_SHARE + 0.25)
    server = pausing(make_state(device, screened=True))
    for _ in range(6):
        server.step()
        settle(device)
    assert not server.state.screen.paused and screened_rows(server.state) == 6 * 6
    summary = server.runtime.metrics.summary()
    assert "; screen 30 rows (" in summary, "the counts of the last step are still being copied"


def test_a_paused_screen_keeps_its_memory_and_follows_the_weights(pausing, device, clock):
    server = pausing(outlier_state(device, screened=True))
    state, screen = server.state, server.state.screen.serving(server.state.head.lm_head)
    while not state.screen.paused:
        server.step()
    assert state.has_screen and not screen.closed and not is_serving(state)
    state.weights_change()
    write_unseen(state, weights(device, 1))
    state.renew_screen()
    assert not is_serving(state), "other weights do not end a pause, its time does"
    clock[0] += FIRST_PAUSE_SECONDS
    assert state.screen.serving(state.head.lm_head) is screen
    fresh = pausing(make_state(device, 1))
    fresh.positions = server.positions.clone()
    assert server.step() == fresh.step()
