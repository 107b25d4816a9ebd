"""A screen that reads too much of the head rests: when, for how long, and that no token depends on it."""

from __future__ import annotations

import logging

import pytest
import torch
from sgl_flashsample.kernels.int8_head import Counted
from test_runtime import lazy_rows
from test_screening import batch, make_state, screened_rows, serving, weights, write_unseen
from test_step_graphs import fake_capture

from sgl_flashsample.sglang import screen_guard
from sgl_flashsample.sglang.counters import Counters
from sgl_flashsample.sglang.runtime import HeadState, Runtime
from sgl_flashsample.sglang.screen_guard import (
    FIRST_REST_SECONDS,
    LEAST_BLOCKS,
    LONGEST_REST_SECONDS,
    MOST_READ,
    ScreenGuard,
)
from sgl_flashsample.sglang.step_graphs import StepGraphs

GROUPS = 1000  # of a head of 2-byte weights, whose copy is half its bytes
FEW, MANY = 5, int((MOST_READ - 0.5) * GROUPS) + 1


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The seconds that a guard sees."""
    now = [100.0]
    monkeypatch.setattr(screen_guard.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def guard(clock) -> ScreenGuard:
    return ScreenGuard(head_bytes=32 * GROUPS, copy_bytes=16 * GROUPS, group_bytes=32)


def counted(blocks: int, groups: int) -> list[int]:
    """Of ``blocks`` blocks of rows with ``groups`` groups each."""
    found = dict.fromkeys(Counted, 0) | {Counted.BATCHES: blocks, Counted.ROWS: blocks, Counted.GROUPS: blocks * groups}
    return [found[kind] for kind in Counted]


def test_a_screen_that_reads_little_of_the_head_serves(guard):
    for _ in range(10):
        guard.count(counted(LEAST_BLOCKS, FEW))
        assert not guard.rests()


def test_a_screen_that_reads_too_much_rests_for_a_while_and_is_tried_again(guard, clock):
    guard.count(counted(LEAST_BLOCKS, MANY))
    assert guard.rests() and guard.resting
    clock[0] += FIRST_REST_SECONDS - 1
    assert guard.rests()
    clock[0] += 1
    assert not guard.rests() and not guard.resting


def test_too_much_is_more_than_its_share_of_the_heads_bytes_the_copy_included(clock):
    for groups, rests in [(MANY - 1, False), (MANY, True)]:
        guard = ScreenGuard(32 * GROUPS, 16 * GROUPS, 32)
        guard.count(counted(LEAST_BLOCKS, groups))
        assert guard.rests() is rests
    without_a_copy = ScreenGuard(32 * GROUPS, 0, 32)
    without_a_copy.count(counted(LEAST_BLOCKS, MANY))
    assert not without_a_copy.rests()


def test_it_takes_enough_blocks_of_rows_and_their_mean_to_decide(guard):
    guard.count(counted(LEAST_BLOCKS - 1, MANY))
    assert not guard.rests(), "too few to tell"
    guard.count(counted(LEAST_BLOCKS, FEW))
    assert not guard.rests(), "few groups on average"
    guard.count(counted(LEAST_BLOCKS - 1, MANY))
    assert not guard.rests(), "what was decided on does not count again"
    guard.count(counted(1, MANY))
    assert guard.rests()


def test_rests_double_up_to_the_longest_and_start_again_once_the_screen_pays(guard, clock, caplog):
    def rest() -> float:
        started = clock[0]
        guard.count(counted(LEAST_BLOCKS, MANY))
        while guard.rests():
            clock[0] += FIRST_REST_SECONDS / 2
        return clock[0] - started

    rests = [rest() for _ in range(9)]
    assert rests[:4] == [FIRST_REST_SECONDS * factor for factor in (1, 2, 4, 8)]
    assert rests[-2:] == [LONGEST_REST_SECONDS] * 2
    guard.count(counted(LEAST_BLOCKS, FEW))
    assert rest() == FIRST_REST_SECONDS


def test_what_arrives_during_a_rest_does_not_count_after_it(guard, clock):
    guard.count(counted(LEAST_BLOCKS, MANY))
    guard.count(counted(2 * LEAST_BLOCKS, MANY))
    clock[0] += FIRST_REST_SECONDS
    assert not guard.rests(), "the rest is no longer for it"
    guard.count(counted(1, MANY))
    assert not guard.rests()


def test_one_line_per_rest_says_what_was_measured_and_for_how_long(guard, clock, caplog):
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        guard.count(counted(LEAST_BLOCKS, 412))
        for _ in range(3):
            guard.rests()
            guard.count(counted(LEAST_BLOCKS, 412))
        clock[0] += FIRST_REST_SECONDS
        guard.rests()
        guard.count(counted(LEAST_BLOCKS, 600))
    first, second = [record.message for record in caplog.records]
    assert first == (
        "flashsample: screen rests for 60 s, batches are drawn without it: 412.0 groups per batch are read from the LM "
        "head, 91.2 % of its bytes with the copy's; a screen is to read 65 % or less"
    )
    assert "rests for 120 s" in second and "600.0 groups per batch" in second


# In a server: a head with one channel so large that its rows' copies are wrong by as much as their other elements.


def outlier_weights(device, seed: int = 0) -> torch.Tensor:
    made = weights(device, seed)
    made[:, 0] = 1000.0
    return made


def make_outlier_state(device, screened: bool = True) -> HeadState:
    state = make_state(device, screened=screened)
    write_unseen(state, outlier_weights(device))
    state.renew_screen()
    return state


@pytest.fixture
def state(device, clock, monkeypatch) -> HeadState:
    monkeypatch.setattr(screen_guard, "LEAST_BLOCKS", 2)
    return make_outlier_state(device)


@pytest.fixture
def runtime() -> Runtime:
    made = Runtime("not asked yet")
    made.problem = made.screen_problem = None
    return made


def step(runtime: Runtime, state: HeadState, device, position: int = 0) -> list[int]:
    """The tokens of one step of the server; what the device has counted of earlier ones has arrived."""
    rows, hidden, positions = batch(device)
    hidden[:, 0] = 0  # the channel says nothing: tokens are those of the others
    lazy, _ = lazy_rows(device)
    lazy.source, lazy.hidden = state, hidden
    if device.type == "cuda":
        torch.cuda.synchronize()
    return runtime.sample(lazy, rows, None, positions + position, False).token_ids.tolist()


def test_no_token_changes_when_a_screen_goes_to_rest_and_when_it_comes_back(runtime, state, device, clock):
    plain = make_outlier_state(device, screened=False)
    rested = []
    for position in range(8):
        if position == 6:
            clock[0] += FIRST_REST_SECONDS
        before = screened_rows(state)
        assert step(runtime, state, device, position) == step(runtime, plain, device, position)
        rested.append(screened_rows(state) == before)
    assert rested == [False, False, False, True, True, True, False, False]


def test_an_ordinary_head_is_served_by_its_screen_throughout(runtime, device, clock, monkeypatch):
    monkeypatch.setattr(screen_guard, "LEAST_BLOCKS", 2)
    if device.type == "cuda":  # a head of 2 bytes: its copy is half of it, not a quarter; as many groups beside it
        monkeypatch.setattr(screen_guard, "MOST_READ", MOST_READ + 0.25)
    state = make_state(device)
    for position in range(6):
        step(runtime, state, device, position)
    assert not state.screen.resting and screened_rows(state) == 6 * 6


def test_a_resting_screen_keeps_its_memory_and_follows_the_weights(runtime, state, device, clock):
    while not state.screen.resting:
        step(runtime, state, device)
    screen = state.screen._screen
    assert state.has_screen and screen is not None and not serving(state)
    state.weights_change()
    write_unseen(state, weights(device, 1))
    state.renew_screen()
    assert not serving(state), "other weights do not end a rest, its time does"
    clock[0] += FIRST_REST_SECONDS
    assert state.screen.serving(state.current()) is screen
    fresh = make_state(device, 1, screened=False)
    assert step(runtime, state, device) == step(runtime, fresh, device)


def test_graphs_with_a_screen_are_not_replayed_while_it_rests_nor_those_without_it_afterwards(
    runtime, state, device, clock
):
    def kept_by_a_step() -> bool:
        """Whether a step goes on with the graphs of before."""
        state.graphs = graphs = StepGraphs(state._draw, 16, device, fake_capture)
        step(runtime, state, device)
        return state.graphs is graphs

    step(runtime, state, device)
    step(runtime, state, device)
    assert kept_by_a_step() and state.screen.resting, "it rests from the next step on"
    assert not kept_by_a_step(), "they have the screen in them"
    assert kept_by_a_step()
    clock[0] += FIRST_REST_SECONDS
    assert not kept_by_a_step(), "they would never take the screen again"
    assert kept_by_a_step()


def test_the_log_says_that_a_screen_rests_for_as_long_as_it_does(runtime, state, device, clock):
    step(runtime, state, device)
    step(runtime, state, device)
    assert not runtime.counters.summary().endswith("resting")
    for _ in range(2):
        step(runtime, state, device)
    assert runtime.counters.summary().endswith(" batches wide, resting")
    clock[0] += FIRST_REST_SECONDS
    step(runtime, state, device)
    assert not runtime.counters.summary().endswith("resting")


def test_a_metric_says_whether_a_screen_rests(monkeypatch):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Summary"):
        made = getattr(prometheus, kind)
        monkeypatch.setattr(prometheus, kind, lambda *args, made=made, **kw: made(*args, registry=registry, **kw))
    own = Counters(metrics=True)

    def resting() -> float | None:
        return registry.get_sample_value("sglang:flashsample_screen_resting")

    assert resting() == 0
    for state in (True, True, False):
        own.add_screened([0] * len(Counted), state)
        assert resting() == state


def test_while_the_screen_serves_a_step_does_not_even_look_at_the_clock(guard, monkeypatch):
    monkeypatch.setattr(screen_guard.time, "monotonic", lambda: pytest.fail("it did"))
    assert not guard.rests()
    guard.count(counted(LEAST_BLOCKS, FEW))
    assert not guard.rests()
