"""Logprobs beside those of the tokens: the likeliest ids and given ids, against SGLang's own code in this process."""

from __future__ import annotations

import dataclasses
import gc
import sys
import types
import weakref
from collections.abc import Callable
from itertools import compress

import pytest
import torch
from head_states import CPU, VOCAB, CountingCapture, hidden_states, make_batch, make_state, step_of
from sglang_batches import SteadyServer, for_forward, request

from sgl_flashsample.kernels.params import SampleOutput
from sgl_flashsample.kernels.top_logprobs import TopLogprobs
from sgl_flashsample.logprobs import Logprobs
from sgl_flashsample.sglang import draw as draw_module
from sgl_flashsample.sglang import step_graphs
from sgl_flashsample.sglang.batch import DrawKind
from sgl_flashsample.sglang.draw import draw
from sgl_flashsample.sglang.head import GraphInputs
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.logprobs import AskedLogprobs, HostCopy, LogprobInputs, PackedLogprobs
from sgl_flashsample.sglang.step_graphs import PATIENCE, SLOTS, Launched, StepCounts, StepGraphs

LISTS = ("next_token_top_logprobs_val", "next_token_top_logprobs_idx", "next_token_token_ids_logprobs_val")
LEAST = -80  # SGLang's softmax gives 0 for less, in any order
SURE = 0.01  # a temperature at which a sampled row is as good as greedy
TOP, IDS = [0, 3, 9, 1], [[7], None, [], [VOCAB - 1, 4, 4]]


def packed(logprobs=None, token_ids=None, of_ids=None) -> PackedLogprobs:
    top = None if logprobs is None else TopLogprobs(token_ids, logprobs, logprobs, None)
    return PackedLogprobs.of(Logprobs(torch.zeros(len(of_ids if top is None else logprobs)), top, of_ids))


def asked_of(top=None, ids=None, native=(), original: bool = False) -> AskedLogprobs:
    asked = AskedLogprobs.of(native, top, ids, original)
    assert asked is not None
    return asked


@pytest.fixture
def original(request, runners, monkeypatch) -> bool:
    """Whether both samplers return logprobs at temperature 1 (``SGLANG_RETURN_ORIGINAL_LOGPROB``)."""
    monkeypatch.setattr(sys.modules["sglang.srt.layers.sampler"], "SGLANG_RETURN_ORIGINAL_LOGPROB", request.param)
    runners[0].sampler.runtime.settings.original_logprobs = request.param
    return request.param


@pytest.mark.parametrize("original", [False, True], indirect=True, ids=["at temperature", "original"])
@pytest.mark.parametrize("top, ids", [(TOP, IDS), (TOP, None), (None, IDS), (None, None)])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "all greedy"])
def test_rows_get_the_lists_that_sglang_makes(runners, head, info_of, hidden, original, top, ids, greedy):
    rows = [{"temperature": 0}, {"temperature": 0 if greedy else SURE}, {"temperature": 0}, {"temperature": 0}]
    rows[2] |= {"logit_bias": {"17": 3.0}}
    compare_with_sglang(runners, head, info_of, hidden(4), rows, top, ids)


def compare_with_sglang(runners, head, info_of, states, rows: list[dict], top, ids) -> None:
    """All rows are fused, with the tokens, the logprobs and the lists of SGLang's sampler."""
    ours, stock = (info_of([request(f"r{place}", **row) for place, row in enumerate(rows)]) for _ in range(2))
    got, output = runners[0].sample(head.lazy(states), for_forward(ours, True), True, top, ids)
    want, expected = runners[1].sample(head.logits(states), for_forward(stock, True), True, top, ids)
    assert got.tolist() == want.tolist()
    assert output.customized_info == {"flashsample_path": ["fused"] * len(rows)}
    torch.testing.assert_close(output.next_token_logprobs, expected.next_token_logprobs, atol=1e-4, rtol=0)
    for name in LISTS:
        mine, theirs = getattr(output, name), getattr(expected, name)
        assert (mine is None) is (theirs is None), name
        for row, (one, other) in enumerate(zip(mine or (), theirs or (), strict=True)):
            # SGLang has a list for a row without given ids, where it asks for a tensor's tolist.
            other = other.tolist() if torch.is_tensor(other) else other
            if name == LISTS[1]:
                known = [value > LEAST for value in output.next_token_top_logprobs_val[row].tolist()]
                assert list(compress(one.tolist(), known)) == list(compress(other, known)), row
            else:
                assert [max(value, LEAST) for value in one.tolist()] == pytest.approx(
                    [max(value, LEAST) for value in other], abs=1e-4
                ), (name, row)
    given = [[] if one is None else one for one in ids] if ids else None
    assert output.next_token_token_ids_logprobs_idx == given


@pytest.mark.parametrize("original", [False, True], indirect=True, ids=["at temperature", "original"])
@pytest.mark.parametrize("top, ids", [(TOP, IDS), (TOP, None), (None, IDS), (None, None)])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "all greedy"])
def test_a_greedy_row_with_a_temperature_has_sglangs_logprobs_beside_sampled_rows(
    runners, head, info_of, hidden, original, top, ids, greedy
):
    """At that temperature; at 1 where all rows are greedy. Its token is greedy all the same."""
    rows = [
        {"temperature": 0.5, "top_k": 1, "logit_bias": {"17": 3.0}},
        {"temperature": 0 if greedy else SURE},
        {"temperature": 3.0, "top_k": 1},
        {"temperature": 0},
    ]
    compare_with_sglang(runners, head, info_of, hidden(4), rows, top, ids)


def test_likeliest_ids_that_there_are_not_end_the_step_as_in_sglang(runners, head, info_of, hidden):
    """Whichever rows of the batch ask for them; SGLang ends the server then."""
    for top in ([VOCAB + 1, 0], [VOCAB + 1, VOCAB + 1]):
        for runner in runners:
            info = info_of([request("r0", temperature=0), request("r1", temperature=0)])
            states = hidden(2)
            logits = head.lazy(states) if runner is runners[0] else head.logits(states)
            with pytest.raises(RuntimeError, match="index k out of range"):
                runner.sample(logits, info, True, top)


def test_the_device_is_told_the_temperatures_of_each_batch():
    """Rows behind those of the batch, which are padding, have some temperature above 0."""
    inputs = LogprobInputs(4, CPU)
    places = set()
    for temperatures in ([0.5, 2.0, 1.0], [3.0, 0.25], [0.7, 0.8]):
        asked = AskedLogprobs.of((), None, None, False, torch.tensor(temperatures))
        wanted = inputs.load(asked, 4)
        assert torch.equal(wanted.temperature[: len(temperatures)], torch.tensor(temperatures))
        assert (wanted.temperature > 0).all()
        places.add(wanted.temperature.data_ptr())
    assert len(places) == 1, "graphs read them there"
    assert inputs.load(asked_of([5]), 4).temperature is None


def test_steps_with_temperatures_of_logprobs_are_replayed_and_get_those_of_launches(script):
    rows = [{"temperature": 1.5, "sampling_seed": 1}, {"temperature": 0.5, "top_k": 1}, {"top_p": 0.5}]
    batch, hidden = make_batch(*rows), hidden_states(CPU, 8)
    states = make_state(CPU, capture=CountingCapture(), script=script), make_state(CPU, script=script)

    def step(state, number: int, is_captured: bool):
        whole = LazyLogits(hidden, VOCAB, state, lambda hidden: pytest.fail("logits"), hidden if is_captured else None)
        asked = AskedLogprobs.of((), None, None, False, torch.tensor([1.5, 0.5 + number, 1.0]))
        return draw(whole[:3], step_of(batch, torch.arange(3) + number, None, True, asked=asked))

    for number in range(9):
        hidden.copy_(hidden_states(CPU, 8, number))
        got, want = step(states[0], number, True), step(states[1], number, False)
        assert torch.equal(got.token_ids, want.token_ids) and torch.equal(got.logprobs, want.logprobs)
    assert states[0].counts.replayed >= 4
    # With room for more rows, the temperatures are elsewhere: those graphs are not replayed again.
    states[0].wanted(asked_of([5]), 512)
    replayed = states[0].counts.replayed
    assert torch.equal(step(states[0], 9, True).logprobs, step(states[1], 9, False).logprobs)
    assert states[0].counts.replayed == replayed


def test_rows_of_sglangs_sampler_keep_what_it_gave_them():
    output = types.SimpleNamespace(**dict.fromkeys((*LISTS, "next_token_token_ids_logprobs_idx")))
    output.next_token_top_logprobs_val = ["", "stock", ""]
    output.next_token_top_logprobs_idx = ["", "stock too", ""]
    asked = asked_of([2, 5, 1], None, native=[1])
    assert asked.layout.top == 8
    asked.deliver(packed(-torch.arange(24.0).view(3, 8), torch.arange(24).view(3, 8)), output, keeps_tensors=False)
    first, second, third = output.next_token_top_logprobs_val
    assert (first.tolist(), second, third.tolist()) == ((0.0, -1.0), "stock", (-16.0,))
    assert output.next_token_top_logprobs_idx[1] == "stock too"
    assert output.next_token_token_ids_logprobs_val is None


def test_a_pipeline_gets_tensors_that_stay():
    output = types.SimpleNamespace(**dict.fromkeys(LISTS))
    read = packed(of_ids=torch.arange(16.0).view(2, 8))
    asked_of(None, [[3], [4, 5]]).deliver(read, output, keeps_tensors=True)
    read.data.zero_()
    assert [one.tolist() for one in output.next_token_token_ids_logprobs_val] == [[0.0], [8.0, 9.0]]


@pytest.mark.parametrize(
    "top, ids, native, layout",
    [
        ([0, 5], None, [], (8, 0, False, False)),
        ([0, 33], [[1] * 9, None], [], (128, 16, False, False)),
        ([40, 5], [[1] * 200, []], [0], (8, 8, False, False)),
        (None, [None, [1] * 256], [], (0, 256, False, False)),
    ],
)
def test_steps_whose_needs_are_alike_have_one_layout(top, ids, native, layout):
    assert asked_of(top, ids, native).layout == layout


@pytest.mark.parametrize("top, ids, native", [(None, None, []), ([0, 0], [None, None], []), ([5, 0], [[1], None], [0])])
def test_a_step_whose_fused_rows_ask_for_nothing_more_needs_nothing_more(top, ids, native):
    assert AskedLogprobs.of(native, top, ids, original=False) is None


def test_the_device_is_told_what_each_row_asks_for_and_nothing_of_other_rows():
    inputs = LogprobInputs(5, CPU)
    wanted = inputs.load(asked_of([3, 9, 1], [[4, 5], [6], None], native=[1]), 4)
    assert (wanted.top, wanted.counts.tolist()) == (8, [3, 0, 1, 0])
    assert wanted.token_ids.tolist() == [[4, 5, *[-1] * 6], *[[-1] * 8] * 3]
    places = wanted.counts.data_ptr(), wanted.token_ids.data_ptr()
    again = inputs.load(asked_of([2, 2], [[7], None]), 4)
    assert (again.counts.data_ptr(), again.token_ids.data_ptr()) == places
    assert again.counts.tolist() == [2, 2, 0, 0]
    assert again.token_ids.tolist() == [[7, *[-1] * 7], *[[-1] * 8] * 3]


def test_the_device_is_told_once_while_nothing_changes(monkeypatch):
    inputs, copies = LogprobInputs(5, CPU), []
    monkeypatch.setattr(inputs, "_copy", lambda to, values: copies.append(values))
    for top, rows in (([3, 1], 2), ([3, 1], 2), ([3, 2], 2), ([3, 2], 4)):
        inputs.load(asked_of(top), rows)
    assert copies == [[3, 1], [3, 2], [3, 2, 0, 0]]


@pytest.mark.parametrize("top, ids", [(TOP, None), (None, IDS), (TOP, IDS)])
def test_steps_with_these_logprobs_are_replayed_and_get_those_of_launches(script, top, ids):
    rows = [{"temperature": 1.5, "sampling_seed": 1}, {"temperature": 0}, {"top_p": 0.5}, {"temperature": 0.5}]
    batch, hidden = make_batch(*rows), hidden_states(CPU, 8)
    replaying = make_state(CPU, capture=CountingCapture(), script=script)
    launching = make_state(CPU, script=script)

    def step(state, number: int, is_captured: bool):
        whole = LazyLogits(hidden, VOCAB, state, lambda hidden: pytest.fail("logits"), hidden if is_captured else None)
        shift = number % 2
        asked = asked_of(top and top[shift:] + top[:shift], ids and ids[shift:] + ids[:shift])
        return draw(whole[:4], step_of(batch, torch.arange(4) + number, None, True, asked=asked))

    for number in range(9):
        hidden.copy_(hidden_states(CPU, 8, number))
        got, want = step(replaying, number, True), step(launching, number, False)
        assert torch.equal(got.token_ids, want.token_ids) and torch.equal(got.logprobs, want.logprobs)
        for one, other in zip(got.rest.parts(), want.rest.parts(), strict=True):
            assert torch.equal(one[:4], other) or not one.numel()
    assert replaying.counts.replayed >= 4 and replaying.counts.late_captures == 2


def test_scratch_that_found_no_memory_is_made_by_a_later_step(script, monkeypatch):
    state, asked = make_state(CPU, script=script), asked_of([5])

    def full(rows: int) -> None:
        raise torch.OutOfMemoryError("for a moment")

    with monkeypatch.context() as patched:
        patched.setattr(state.head, "reserve_logprobs", full)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                state.wanted(asked, 1)
    state.wanted(asked, 1)
    assert state.head.logprob_scratch is not None


def test_room_for_logprobs_grows_with_the_batches_that_ask_for_them(script):
    state, asked = make_state(CPU, script=script), asked_of([5])
    state.captured[512] = hidden_states(CPU, 512)
    for rows, room in ((2, 64), (64, 64), (65, 128), (3, 128)):
        assert len(state.wanted(asked, rows).counts) == rows
        assert state.head.logprob_scratch.rows.max_rows == room


def test_graphs_that_read_what_is_asked_for_elsewhere_go_with_their_scratch(script):
    """Of a batch that needs more room: the graphs of tokens alone stay."""
    state, hidden = make_state(CPU, capture=CountingCapture(), script=script), hidden_states(CPU, 4)
    state.captured[4] = hidden
    whole = LazyLogits(hidden, VOCAB, state, lambda hidden: pytest.fail("logits"), hidden)
    batch = make_batch({"temperature": 0}, {"temperature": 0})
    for asked in (None, asked_of([3, 9])):
        for _ in range(8):
            draw(whole[:2], step_of(batch, torch.arange(2), None, True, asked=asked))
    assert state.graphs.count == 4
    scratch = weakref.ref(state.head.logprob_scratch.draw)
    state.wanted(asked_of([5]), 512)
    gc.collect()
    assert state.graphs.count == 2 and scratch() is None


def test_steps_with_these_logprobs_of_other_layouts_have_graphs_of_their_own(script):
    state, hidden = make_state(CPU, capture=CountingCapture(), script=script), hidden_states(CPU, 4)
    whole = LazyLogits(hidden, VOCAB, state, lambda hidden: pytest.fail("logits"), hidden)
    batch = make_batch({"temperature": 0}, {"temperature": 0})
    for top, ids in (([3, 9], None), ([3, 1], None), (None, [[7], None]), (None, None)):
        asked = AskedLogprobs.of((), top, ids, original=top is None and ids is None)
        for number in range(8):
            drawn = draw(whole[:2], step_of(batch, torch.arange(2) + number, None, True, asked=asked))
            assert drawn.rest is not None
            assert (drawn.rest.top, drawn.rest.ids) == (asked.layout.top, asked.layout.ids)
    assert state.graphs.count == 8 and state.counts.replayed >= 12


ROWS = [{"temperature": 1.5, "sampling_seed": 1}, {"temperature": 0.5, "sampling_seed": 2}, {"temperature": 0}]
TEMPERED = {"temperature": 0.5, "top_k": 1}  # greedy
BIASED = {"temperature": 1.0, "logit_bias": {"17": 300.0}}
SETTLED = 4  # steps until both graphs of a kind can be replayed, where patience is short


class Asking:
    """A server that replays and one without graphs. Each step is compared. top, ids: as SGLang has them, the same lists
    while its batch does not change."""

    def __init__(self, script, rows=ROWS, original: bool = False) -> None:
        states = make_state(CPU, capture=CountingCapture(), script=script), make_state(CPU, script=script)
        self.replaying, self.launching = (SteadyServer(CPU, state, rows, 4) for state in states)
        self.replaying.state.inputs = GraphInputs(self.replaying.positions, torch.arange(1, 5))
        for server in (self.replaying, self.launching):
            runtime = server.runtime
            runtime.settings = dataclasses.replace(runtime.settings, report_path=False, original_logprobs=original)
        self.top, self.ids = [3, 0, 8], [[7], None, [4, 9]]
        self._route, self._routed = self.replaying.sampler._route, 0
        self.replaying.sampler._route = self._counted

    def _counted(self, *arguments):
        self._routed += 1
        return self._route(*arguments)

    def take(self, rows, top=None, ids=None) -> None:
        """Another batch, with the lists that SGLang makes for it."""
        for server in (self.replaying, self.launching):
            server.take(rows)
        self.top, self.ids = list(top or self.top), list(ids or self.ids)

    def step(self) -> bool:
        """One step of both servers, which must give the same. Whether it took the short way."""
        before, servers = self._routed, (self.replaying, self.launching)
        got, want = (server.step(True, self.top, self.ids) for server in servers)
        assert got == want
        torch.testing.assert_close(self.replaying.logprobs, self.launching.logprobs, rtol=0, atol=1e-5)
        for name in (*LISTS, "next_token_token_ids_logprobs_idx"):
            mine, theirs = ([list_of(one) for one in getattr(server.output, name) or ()] for server in servers)
            assert list(map(pytest.approx, theirs)) == mine, name
        return self._routed == before


def list_of(values) -> list:
    return list(values if isinstance(values, list) else values.tolist())


@pytest.fixture
def asking(one_rank, script, monkeypatch) -> Callable[..., Asking]:
    monkeypatch.setattr(step_graphs, "PATIENCE", 1)
    monkeypatch.setattr(draw_module, "FULL_STEP_SECONDS", 1000.0)
    return lambda *arguments: Asking(script, *arguments)


@pytest.mark.parametrize("rows", [ROWS, [TEMPERED, *ROWS[1:]]], ids=["sampled", "a greedy row with a temperature"])
@pytest.mark.parametrize("original", [False, True], ids=["at temperature", "original"])
@pytest.mark.parametrize(
    "top, ids", [(TOP[1:], IDS[1:]), (TOP[1:], [None] * 3), ([0] * 3, IDS[1:]), ([0] * 3, [None] * 3)]
)
def test_a_step_whose_batch_is_as_before_takes_the_short_way(asking, monkeypatch, rows, original, top, ids):
    servers = asking(rows, original)
    servers.take(rows, top, ids)
    for _ in range(SETTLED):
        servers.step()
    monkeypatch.setattr(draw_module, "routing_of", lambda *arguments: pytest.fail("decided once more"))
    assert [servers.step() for _ in range(4)] == [True] * 4


def lists(top=None, ids=None) -> Callable[[Asking], None]:
    """The same batch, of which SGLang has other lists."""
    return lambda servers: vars(servers).update(top=top or servers.top, ids=ids or servers.ids)


def another_temperature(servers: Asking) -> None:
    servers.take([TEMPERED, *ROWS[1:]])
    for _ in range(SETTLED):
        servers.step()
    servers.take([TEMPERED | {"temperature": 3.0}, *ROWS[1:]])


# Whether a step after the change takes the short way: the first, and the last of some.
CHANGES: dict[str, tuple[Callable[[Asking], None], bool, bool]] = {
    "a row less": (lambda servers: servers.take(ROWS[1:], [0, 8], [None, [4, 9]]), True, True),
    "a row more": (lambda servers: servers.take([*ROWS, ROWS[0]], [3, 0, 8, 2], [[7], None, [4, 9], [1]]), True, True),
    "rows that ask for less than others before them": (lambda servers: servers.take(ROWS, [0, 0, 1]), True, True),
    "another k": (lists([1, 7, 2]), True, True),
    "other ids": (lists(None, [None, [8, 9, 10], [3]]), True, True),
    "a k of another layout": (lists([3, 0, 40]), False, True),
    "ids of another layout": (lists(None, [[7], None, [*range(20)]]), False, True),
    "a k beyond the kernels": (lists([3, 0, 200]), False, False),
    "ids beyond the kernels": (lists(None, [[7], None, [*range(300)]]), False, False),
    "the logprobs of tokens alone": (lists([0] * 3, [None] * 3), False, True),
    "a greedy row with a temperature": (lambda servers: servers.take([TEMPERED, *ROWS[1:]]), False, True),
    "another temperature of a greedy row": (another_temperature, True, True),
    "a bias": (
        lambda servers: servers.take([*ROWS, BIASED], [3, 0, 8, 2], [[7], None, [4, 9], [1, 17]]),
        False,
        True,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_batch_is_decided_anew(asking, name):
    """And is replayed at once where its size and kind have graphs already."""
    change, first, last = CHANGES[name]
    servers = asking()
    for _ in range(SETTLED):
        servers.step()
    assert servers.step()
    change(servers)
    short = [servers.step() for _ in range(SETTLED + 2)]
    assert (short[0], short[-1]) == (first, last)
    servers.take(ROWS, [3, 0, 8], [[7], None, [4, 9]])
    assert servers.step(), "the graphs of before are still there"


def test_values_are_those_of_the_step_also_when_the_next_one_has_overwritten_them():
    read = packed(
        torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([[5, 6], [7, 8]]), torch.tensor([[0.5], [0.25]])
    )
    copied = HostCopy(read)
    read.data.zero_()
    assert copied.rows == ([(5, 6), (7, 8)], [(-1.0, -2.0), (-3.0, -4.0)], [(0.5,), (0.25,)])


def test_values_that_were_not_read_stay_when_their_graph_runs_again():
    def draw(_):
        values.add_(1.0)
        return Launched(SampleOutput.empty(2, CPU, False), rest=packed(of_ids=values))

    values, hidden = torch.zeros(2, 3), torch.zeros(2, 4)
    graphs = StepGraphs([], CountingCapture(), StepCounts())
    for _ in range(PATIENCE + SLOTS):
        keyed = graphs.find(draw, hidden, DrawKind(False, None, False, False), None, "ids", host_bytes=24)
        if keyed is not None:
            keyed.replay_next(2)
    values.zero_()
    copies = [HostCopy(keyed.replay_next(2).rest) for _ in range(3 * SLOTS)]
    assert [copy.rows[2] for copy in copies] == [[(float(n),) * 3] * 2 for n in range(1, 3 * SLOTS + 1)]


def test_the_garbage_collector_forgets_the_values_that_sglang_keeps():
    copied = HostCopy(packed(-torch.rand(4, 8), torch.arange(32).view(4, 8)))
    kept = [row.tolist() for row in copied.rows_at([(1, row, length) for row, length in enumerate(TOP)])]
    gc.collect()
    assert [len(values) for values in kept] == [0, 3, 8, 1] and not any(map(gc.is_tracked, kept))
