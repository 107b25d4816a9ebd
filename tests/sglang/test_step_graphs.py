"""Steps of an unchanged batch are replayed as CUDA graphs: which steps are replayed, what a replay reads and writes.
Each change is noticed at the next step."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import re
import types
import weakref
from collections.abc import Callable

import pytest
import torch
from head_states import (
    CPU,
    CountingCapture,
    Processor,
    dtype_on,
    hidden_states,
    make_batch,
    make_head,
    make_state,
    mixed_temperatures,
    weights,
)
from serving import needs_sglang
from sglang_batches import SteadyServer, grammar

from sgl_flashsample.defaults import HeadTraits
from sgl_flashsample.dispatch import DispatchTable
from sgl_flashsample.kernels.params import BatchParams, Edit, LogitEdits, LogitsSpec, SampleOutput
from sgl_flashsample.kernels.workspace import ScreenCounter, Workspace
from sgl_flashsample.sglang import head, step_graphs
from sgl_flashsample.sglang.batch import Batch
from sgl_flashsample.sglang.head import HeadState
from sgl_flashsample.sglang.step_graphs import PATIENCE, RETRY_SECONDS, SLOTS, Launched, StepGraphs

WARM_UP = 2 * PATIENCE - 1  # steps of one batch at one place before the first that is replayed
SETTLED = WARM_UP + SLOTS + 1  # steps until all that come are replayed


def read_all(hidden: torch.Tensor, params: BatchParams, return_logprob: bool) -> SampleOutput:
    """ "Tokens" that depend on everything that a draw reads."""
    columns = [hidden[:, 0], params.temperature, params.seed, params.position]
    flags: list[object] = [params.all_greedy, params.distribution_only, return_logprob]
    if params.truncation is not None:
        columns += [params.truncation.top_k, params.truncation.top_p, params.truncation.min_p]
        flags.append(params.truncation.max_top_k)
    if params.edits is not None:
        edits = params.edits
        columns += [edit[:, 0] for edit in (edits.additive, edits.scaling, edits.mask, edits.bias) if edit is not None]
        columns += [] if edits.rows is None else [edits.rows]
    digest = torch.full((len(hidden),), hash(tuple(flags)) % 2**31)
    for column in columns:
        digest = digest * 1_000_003 + column.double().view(torch.int64)
    return SampleOutput(digest, None, torch.zeros(len(hidden)))


@dataclasses.dataclass
class Step:
    """The arguments of one step."""

    batch: Batch
    hidden: torch.Tensor
    positions: torch.Tensor
    edits: LogitEdits | None = None
    return_logprob: bool = False

    @property
    def launched(self) -> torch.Tensor:
        """The tokens that launches draw."""
        return read_all(self.hidden, self.batch.params(self.positions, self.edits), self.return_logprob).token_ids


class Drawing:
    """Step graphs of ``read_all``. Every replay is compared with launches."""

    def __init__(self, capture: CountingCapture | None = None, max_rows: int = 4, copies_tokens: bool = False) -> None:
        self.graphs = StepGraphs([Workspace(1, CPU)], max_rows, CPU, capture or CountingCapture(), copies_tokens)

    def step(self, step: Step) -> torch.Tensor | None:
        """The tokens of a replay; None where the step is to be launched."""
        hidden, return_logprob = step.hidden, step.return_logprob
        out = self.graphs.step(
            lambda params: Launched(read_all(hidden, params, return_logprob)),
            step.batch,
            hidden,
            step.edits,
            step.positions,
            return_logprob,
        )
        if out is None:
            return None
        assert torch.equal(out.token_ids, step.launched)
        return out.token_ids

    def replays(self, step: Step, count: int) -> list[bool]:
        return [self.step(step) is not None for _ in range(count)]


PLAIN = [{"temperature": 1.5, "sampling_seed": 1}, {"temperature": 0.5, "sampling_seed": 2}]
TRUNCATED = [
    {"temperature": 1.5, "sampling_seed": 1, "top_k": 6, "top_p": 0.5, "min_p": 0.25},
    {"temperature": 0.5, "sampling_seed": 2, "top_k": 7, "top_p": 0.75, "min_p": 0.5},
]


def make_step(rows=PLAIN, **changes) -> Step:
    return Step(make_batch(*rows), torch.zeros(len(rows), 4), torch.zeros(len(rows), dtype=torch.int64), **changes)


def mask_of(num_words: int, value: int = 0) -> torch.Tensor:
    return torch.full((2, num_words), value, dtype=torch.int32)


def make_edits(num_rows: int = 2) -> LogitEdits:
    return LogitEdits(
        additive=torch.zeros(num_rows, 8),
        scaling=torch.ones(num_rows, 8),
        mask=torch.zeros(num_rows, 1, dtype=torch.int32),
        bias=torch.zeros(num_rows, 8),
        rows=torch.zeros(num_rows, dtype=torch.int32),
    )


def test_a_batch_is_replayed_once_it_has_stayed_as_it_is():
    assert Drawing().replays(make_step(), SETTLED) == [False] * WARM_UP + [True] * (SETTLED - WARM_UP)


def test_a_replay_reads_this_steps_hidden_states_and_positions():
    drawing, step = Drawing(), make_step()
    drawing.replays(step, SETTLED)
    for number in range(5):
        step.hidden[:, 0], step.positions[:] = number, torch.tensor([number, 2 * number])
        assert drawing.step(step) is not None


@pytest.mark.parametrize("parameter", ["temperature", "sampling_seed", "top_k", "top_p", "min_p", "all"])
def test_another_batch_at_the_same_place_is_replayed_with_its_own_parameters(parameter):
    drawing, step = Drawing(), make_step(TRUNCATED)
    drawing.replays(step, SETTLED)
    others = {"temperature": 0.25, "sampling_seed": 9, "top_k": 5, "top_p": 0.125, "min_p": 0.125}
    changes = others if parameter == "all" else {parameter: others[parameter]}
    step.batch = make_batch(TRUNCATED[0], TRUNCATED[1] | changes)
    assert drawing.replays(step, PATIENCE) == [False] * (PATIENCE - 1) + [True]


@pytest.mark.parametrize(("copies_tokens", "steps"), [(False, 2), (True, 8)])
def test_tokens_outlive_the_next_step_and_copies_of_them_all(copies_tokens, steps):
    """SGLang has them on the host before it launches the second next; a pipeline sends them later."""
    drawing, step = Drawing(copies_tokens=copies_tokens), make_step(return_logprob=True)
    drawing.replays(step, WARM_UP)
    results = []
    for number in range(8):
        step.positions[:] = number
        results.append((drawing.step(step), step.launched))
        for tokens, drawn in results[-steps:]:
            assert torch.equal(tokens, drawn)
    assert drawing.graphs.count == 2, "one per slot, as /server_info says"


def test_batches_that_take_turns_are_launched():
    drawing, first = Drawing(), make_step()
    second = dataclasses.replace(first, batch=make_batch(*PLAIN))
    for _ in range(4 * WARM_UP):
        assert drawing.step(first) is drawing.step(second) is None


def of(*rows):
    """Another batch at the same place."""
    return lambda step: {"batch": make_batch(*rows)}


def moved(name: str):
    """The same batch with an edit at another address."""
    return lambda step: {"edits": dataclasses.replace(step.edits, **{name: getattr(step.edits, name).clone()})}


SEEDLESS = [{"top_p": 0.5}, {"top_p": 0.75}]  # only their distribution matters
UNBOUNDED = [{"sampling_seed": 1, "top_p": 0.5}, {"sampling_seed": 2, "min_p": 0.5}]  # no top-k is known
OTHERS = {
    "greedy": (PLAIN, of({"top_k": 1}, {"top_k": 1})),
    "truncated": (PLAIN, of(*UNBOUNDED)),
    "not truncated": (UNBOUNDED, of(*PLAIN)),
    "seeded": (SEEDLESS, of(SEEDLESS[0], {"top_p": 0.75, "sampling_seed": 3})),
    "larger top-k": (TRUNCATED, of(TRUNCATED[0], TRUNCATED[1] | {"top_k": 9})),
    "top-k of no bound": (TRUNCATED, of(TRUNCATED[0], {"top_p": 0.5})),
    "hidden states": (PLAIN, lambda step: {"hidden": step.hidden.clone()}),
    "positions": (PLAIN, lambda step: {"positions": step.positions.clone()}),
    "logprobs": (PLAIN, lambda step: {"return_logprob": True}),
    "no edits": (PLAIN, lambda step: {"edits": None}),
    "an edit less": (PLAIN, lambda step: {"edits": dataclasses.replace(step.edits, scaling=None)}),
    "a mask of other words": (PLAIN, lambda step: {"edits": dataclasses.replace(step.edits, mask=mask_of(2))}),
    **{name: (PLAIN, moved(name)) for name in ("additive", "scaling", "bias", "rows")},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_of_another_kind_or_at_another_place_has_graphs_of_its_own(name):
    rows, change = OTHERS[name]
    drawing, first = Drawing(), make_step(rows, edits=make_edits())
    drawing.replays(first, SETTLED)
    other = dataclasses.replace(first, **change(first))
    launched = WARM_UP if other.batch is not first.batch else PATIENCE
    assert drawing.replays(other, launched + 1) == [False] * launched + [True]


def test_rows_that_have_left_have_left_the_graphs():
    drawing, step = Drawing(), make_step([*PLAIN, *PLAIN])
    drawing.replays(step, SETTLED)
    fewer = Step(make_batch(*PLAIN), step.hidden[:2], step.positions[:2])
    assert drawing.replays(fewer, WARM_UP + 1) == [False] * WARM_UP + [True]


def test_edits_are_read_where_this_step_has_them():
    drawing, step = Drawing(), make_step()
    places = [make_edits(), make_edits()]  # a step's penalties are made anew, where those of the last but one were
    replayed = []
    for number in range(2 * SETTLED):
        step.edits = places[number % 2]
        for edit in (step.edits.additive, step.edits.scaling, step.edits.mask, step.edits.bias, step.edits.rows):
            edit.fill_(number)
        replayed.append(drawing.step(step) is not None)
    assert all(replayed[-4:])


def test_a_mask_is_read_wherever_this_step_has_it():
    """A grammar's mask is made anew for every step."""
    drawing, step, kept = Drawing(), make_step(edits=make_edits()), []
    for number in range(SETTLED):
        kept.append(step.edits.mask)  # so that no two masks share a place
        step.edits = dataclasses.replace(step.edits, mask=mask_of(1, number))
        assert (drawing.step(step) is not None) is (number >= WARM_UP)


def test_a_batch_larger_than_the_buffers_is_launched():
    assert not any(Drawing(max_rows=1).replays(make_step(), 3 * WARM_UP))


def test_graphs_that_are_not_used_make_room(monkeypatch):
    monkeypatch.setattr(step_graphs, "MAX_GRAPH_KEYS", 2)
    drawing, step = Drawing(), make_step()
    places = [dataclasses.replace(step, positions=step.positions.clone()) for _ in range(3)]
    for place in (0, 1, 0, 2):
        drawing.replays(places[place], WARM_UP + 1)
    assert drawing.step(places[0]) is not None
    assert drawing.step(places[1]) is None


def test_after_a_capture_that_fails_steps_are_launched_and_it_is_said_once(clock, caplog):
    capture = CountingCapture()
    capture.fails, drawing = True, Drawing(capture)
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        assert not any(drawing.replays(make_step(), 3 * WARM_UP))
    assert [record.message for record in caplog.records] == [
        "flashsample: CUDA graphs of the sampling step are off for 5 minutes, SGLang's own stay on; same tokens, more "
        "CPU time per step: RuntimeError: no memory for a graph"
    ]


def test_a_failed_capture_is_tried_again_after_some_minutes_in_a_pool_of_its_own(clock):
    """Others may have taken the memory for a moment."""
    capture, step = CountingCapture(), make_step()
    drawing = Drawing(capture)
    capture.fails = True
    drawing.replays(step, WARM_UP + 1)
    capture.fails = False
    clock[0] += RETRY_SECONDS - 1
    assert not any(drawing.replays(step, 2 * SETTLED))
    clock[0] += 1
    assert drawing.replays(step, WARM_UP + 1)[-1] and capture.pools == 2


def test_a_failed_capture_gives_the_memory_of_the_graphs_back(clock):
    capture, step = CountingCapture(), make_step()
    drawing = Drawing(capture)
    drawing.replays(step, SETTLED)
    assert drawing.graphs.count == SLOTS
    capture.fails = True
    drawing.replays(dataclasses.replace(step, hidden=step.hidden.clone()), WARM_UP + 1)
    assert drawing.graphs.count == 0


@pytest.fixture
def capturing(monkeypatch) -> types.SimpleNamespace:
    """PyTorch's captures, without a GPU. graphs: made so far, by weak references. ended: the pools that its allocator
    was told to leave. allocates: whether it allocates for a capture that fails."""
    noted = types.SimpleNamespace(graphs=[], ended=[], released=[], allocates=True)

    class Recording:
        def __init__(self) -> None:
            noted.graphs.append(weakref.ref(self))

        def capture_begin(self, **arguments): ...
        def capture_end(self): ...

    def end(index: int, pool: str) -> None:
        noted.ended.append((index, pool))
        if not noted.allocates:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *pool: noted.released.append(pool))
    return noted


@pytest.mark.parametrize("device, index", [(CPU, 3), (torch.device("cuda", 1), 1)])
def test_after_a_capture_that_fails_pytorch_no_longer_allocates_for_it(capturing, device, index):
    capture = step_graphs.CudaCapture(device)
    capture(lambda: None, "the pool of a capture")
    assert not capturing.ended
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 // 0, "a pool")
    assert capturing.ended == capturing.released == [(index, "a pool")]
    gc.collect()
    assert capturing.graphs[1]() is not None, "PyTorch's allocator of pinned memory goes on asking it"


def test_a_capture_that_came_to_its_end_is_left_already(capturing):
    """Then an error of Python's is all that has failed, and it is that error which is told."""
    capturing.allocates = False
    capture = step_graphs.CudaCapture(CPU)
    with contextlib.suppress(ZeroDivisionError):
        capture(lambda: 1 // 0, "a pool")
    assert capturing.ended and not capturing.released
    gc.collect()
    assert capturing.graphs[0]() is None, "it gives its memory back"


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_during_a_capture(capturing, collects):
    """An earlier graph may be part of it, and destroying that one would end the capture."""
    before, capture = gc.isenabled(), step_graphs.CudaCapture(CPU)
    try:
        (gc.enable if collects else gc.disable)()
        assert capture(gc.isenabled, None)[1] is False
        assert gc.isenabled() is collects
        with pytest.raises(ZeroDivisionError):
            capture(lambda: 1 // 0, None)
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_logits_that_a_graph_writes_to_live_as_long_as_the_graph():
    """A larger batch replaces the buffer of the workspace."""
    workspace, spec, step = Workspace(1, CPU), LogitsSpec(32), make_step(TRUNCATED)
    graphs = StepGraphs([workspace], 4, CPU, CountingCapture())

    def draw(params: BatchParams) -> Launched:
        workspace.logits_buffer(2, spec, torch.float32, edited=False)
        return Launched(read_all(step.hidden, params, False))

    for _ in range(WARM_UP + 1):
        graphs.step(draw, step.batch, step.hidden, None, step.positions, False)
    written = weakref.ref(workspace.last_buffer)
    workspace.logits_buffer(64, spec, torch.float32, edited=False)
    gc.collect()
    assert written() is not None and written() is not workspace.last_buffer
    del graphs
    gc.collect()
    assert written() is None


def test_what_a_graph_writes_to_lives_as_long_as_the_graph():
    """Else it would lie where the tokens of another graph are."""
    step, kept = make_step(), []
    graphs = StepGraphs([Workspace(1, CPU)], 4, CPU, CountingCapture())

    def draw(params: BatchParams) -> Launched:
        scratch = torch.zeros(2)
        kept.append(weakref.ref(scratch))
        return Launched(read_all(step.hidden, params, False), scratch)

    for _ in range(WARM_UP + 1):
        graphs.step(draw, step.batch, step.hidden, None, step.positions, False)
    gc.collect()
    assert kept[0]() is not None
    del graphs
    gc.collect()
    assert kept[0]() is None


# Of a head.


def test_all_graphs_of_a_head_are_captured_on_one_stream_each_set_in_a_pool_of_its_own(device):
    """PyTorch keeps a workspace of cuBLAS for each stream, and has 32 streams."""
    capture = CountingCapture()
    state = make_state(device, screened=True, capture=capture)
    for rebuilt in range(1, 6):
        state.update(2)
        assert state.step_graphs(make_batch({}), None, torch.zeros(1, dtype=torch.int64)) is not None
        assert capture.pools == rebuilt
        state.weights_change()
        state.renew_screen()


def test_only_steps_that_a_graph_can_repeat_have_graphs(device):
    state = make_state(device, capture=CountingCapture())
    state.update(2)
    batch, positions = make_batch({}, {}), torch.zeros(2, dtype=torch.int64)
    assert state.step_graphs(batch, None, positions) is not None
    assert state.step_graphs(batch, None, positions.int()) is None, "a copy of them would be made in every step"
    state.use_step_graphs = False
    assert state.step_graphs(batch, None, positions) is None


def test_a_head_captures_by_itself_where_nobody_says_how(device, monkeypatch):
    monkeypatch.setattr(head, "CudaCapture", CountingCapture)
    state = make_state(device)
    state.use_step_graphs = True
    state.update(1)
    graphs = state.step_graphs(make_batch({}), None, torch.zeros(1, dtype=torch.int64))
    assert graphs is state.step_graphs(make_batch({}), None, torch.zeros(1, dtype=torch.int64)) is not None


def test_batches_that_flashinfer_draws_have_no_graphs(device):
    """FlashInfer allocates while it draws: in the pool of the graphs, one's tokens may share memory with another's
    scratch."""
    state = make_state(device, capture=CountingCapture())
    state.head.table = DispatchTable(HeadTraits.of(state.head.lm_head), flashinfer=[2])
    state.update(3)
    positions = torch.zeros(3, dtype=torch.int64)

    def has_graphs(*rows, edits=None) -> bool:
        return state.step_graphs(make_batch(*rows), edits, positions[: len(rows)]) is not None

    truncated, seeded = {"top_p": 0.5}, {"top_p": 0.5, "sampling_seed": 1}
    assert not has_graphs(truncated, truncated)
    assert has_graphs(truncated, truncated, truncated), "a size that does not take FlashInfer"
    assert has_graphs(truncated, seeded) and has_graphs(truncated, {}), "FlashInfer would draw other tokens"
    assert has_graphs(truncated, truncated, edits=make_edits())
    state.head.table = DispatchTable(HeadTraits.of(state.head.lm_head))
    assert has_graphs(truncated, truncated)


# In a server.

KINDS = {
    "plain": [{"temperature": 1.0}] * 2,
    "truncated": [{"temperature": 0.7, "top_p": 0.9, "top_k": 5}] * 2,
    "greedy": [{"temperature": 0.0}] * 2,
}
SOON = 1 + SLOTS  # steps until all that come are replayed, where patience is short


class Pair:
    """A server that replays and one that launches."""

    def __init__(self, device, capture, rows, screened: bool, reports: bool) -> None:
        self.capture = capture
        self.replaying = SteadyServer(device, make_state(device, screened=screened, capture=capture), rows, reports)
        self.launching = SteadyServer(device, make_state(device, screened=screened), rows, reports)

    def settle(self) -> None:
        """Step one server until its steps are replays. The other server skips these steps without drawing."""
        for _ in range(SOON):
            self.replaying.step()
        self.launching.positions += SOON
        assert self.capture.replays == SLOTS

    @property
    def repeats(self) -> bool:
        """Whether the next step may be a repeated one."""
        return self.replaying.sampler.repeated is not None

    def step_tokens(self, **arguments) -> bool:
        """One step of both, which must draw the same. Whether it was replayed."""
        before = self.capture.replays
        assert self.replaying.step(**arguments) == self.launching.step(**arguments)
        return self.capture.replays > before

    def step(self, **arguments) -> bool:
        """The same, on the same paths."""
        replayed = self.step_tokens(**arguments)
        assert self.replaying.paths == self.launching.paths
        return replayed


@pytest.fixture
def pair(device, one_rank, monkeypatch):
    monkeypatch.setattr(step_graphs, "PATIENCE", 1)
    monkeypatch.setattr(step_graphs, "FULL_STEP_SECONDS", 1000.0)

    def make(kind: str = "plain", screened: bool = True, repeated: bool = True) -> Pair:
        """repeated: replayed steps may be repeated; else they report their paths, and none is."""
        return Pair(device, CountingCapture(device), KINDS[kind], screened, reports=not repeated)

    return make


repeated_or_not = pytest.mark.parametrize("repeated", [False, True], ids=["in full", "repeated"])


@needs_sglang
@pytest.mark.parametrize("screened", [False, True], ids=["no screen", "screen"])
@pytest.mark.parametrize("kind", KINDS)
@repeated_or_not
def test_replayed_steps_draw_what_launches_draw(pair, kind, screened, repeated):
    both = pair(kind, screened, repeated)
    both.settle()
    for _ in range(SLOTS):
        assert both.repeats == repeated and both.step()


CHANGES: dict[str, Callable[[SteadyServer], object]] = {
    "weight written": lambda server: server.state.lm_head.weight.neg_(),
    "weight replaced": lambda server: vars(server.state.lm_head).update(weight=-server.state.lm_head.weight),
    "weight announced, written unseen": lambda server: (
        server.state.weights_change(),
        server.state.lm_head.weight.data.neg_(),
    ),
    "screen renewed": lambda server: (server.state.weights_change(), server.state.renew_screen()),
    "screen freed": lambda server: server.state.free_screen(),
    "screen stopped": lambda server: server.state.stop_screen("a test"),
    "softcap": lambda server: vars(server.state.processor).update(final_logit_softcapping=0.5),
    "logit scale": lambda server: vars(server.state.processor).update(logit_scale=0.1),
    "larger workspace": lambda server: server.state.update(600),
    "other hidden states": lambda server: vars(server).update(hidden=-server.hidden),
    "other positions": lambda server: vars(server).update(positions=server.positions + 100),
    "positions of another dtype": lambda server: vars(server).update(positions=server.positions.int() + 100),
    "a grammar": lambda server: vars(server.info).update(grammars=[None, grammar(3)]),
    "a bias": lambda server: server.take([{"temperature": 1.0, "logit_bias": {"3": 300.0}}] * 2),
}


@needs_sglang
@pytest.mark.parametrize("name", CHANGES)
@repeated_or_not
def test_a_change_is_noticed_at_the_next_step(pair, name, repeated):
    both = pair(screened=name.startswith(("weight", "screen")), repeated=repeated)
    both.settle()
    for server in (both.replaying, both.launching):
        CHANGES[name](server)
    assert not both.step(), "drawn with a graph of before"


@needs_sglang
@pytest.mark.parametrize("kind", ["plain", "truncated"])
@repeated_or_not
def test_another_batch_at_the_same_place_draws_its_own_tokens_from_the_next_step_on(pair, repeated, kind):
    both = pair(screened=False, repeated=repeated)
    both.settle()
    limits = {"top_k": 3} if kind == "truncated" else {}
    for server in (both.replaying, both.launching):
        server.take([{"rid": f"another {row}", "temperature": 5.0} | limits for row in range(2)])
    for _ in range(SOON + 1):
        both.step()


@needs_sglang
def test_a_batch_that_is_launched_is_not_drawn_from_the_graphs_of_one_that_lay_there(pair):
    """Of FlashInfer's batches: the smallest top-p leaves one token, so that its own noise decides nothing."""
    both = pair()
    servers = (both.replaying, both.launching)
    for server in servers:
        server.state.head.table = DispatchTable(HeadTraits.of(server.state.head.lm_head), flashinfer=[2])
    both.settle()
    assert both.step()
    for server in servers:
        server.take([{"temperature": 1.0, "top_p": 1e-6}] * 2)
    assert not any(both.step() for _ in range(SOON + SLOTS))


@needs_sglang
def test_once_a_capture_has_failed_nothing_is_replayed(pair):
    both = pair()
    both.settle()
    both.capture.fails = True
    here = [server.positions for server in (both.replaying, both.launching)]
    for server in (both.replaying, both.launching):
        server.positions = server.positions.clone()
    assert not any(both.step() for _ in range(SOON)), "at another place: captured anew, in vain"
    for server, positions in zip((both.replaying, both.launching), here, strict=True):
        server.positions = positions.add_(100)
    assert not any(both.step() for _ in range(SOON)), "the same batch at the place of before"
    for server in (both.replaying, both.launching):
        server.take(KINDS["greedy"])
    assert not any(both.step() for _ in range(SOON)), "another batch there"


@needs_sglang
def test_steps_with_logprobs_are_drawn_with_them_and_others_go_on(pair):
    both = pair(screened=False)
    both.settle()
    assert not both.step(return_logprob=True)
    assert both.step() and both.step()


@needs_sglang
@pytest.mark.parametrize("kind", ["plain", "truncated"])
@repeated_or_not
def test_every_step_is_counted_once_whether_launched_or_replayed(pair, kind, repeated):
    both = pair(kind, screened=False, repeated=repeated)
    both.settle()
    metrics, steps = both.replaying.runtime.metrics, SOON + 4
    for _ in range(3):
        both.replaying.step()
    both.replaying.step(return_logprob=True)  # in full
    for _ in range(2):
        metrics.flush()  # nothing twice
    truncated = f", {2 * steps} of the rows with top-k, top-p or min-p (0 by a search)" if kind == "truncated" else ""
    assert metrics.summary().startswith(f"since the start: fused {2 * steps} rows in {steps} batches{truncated}; ")
    assert re.search(rf"; CPU time of fused sampling [\d.]+ us per batch over {steps} batches$", metrics.summary())


@needs_sglang
def test_after_a_while_a_step_is_served_in_full(pair, monkeypatch):
    """Counters, the log and a screen's pause have waited for it."""
    both = pair(screened=False)
    both.settle()
    assert both.repeats
    monkeypatch.setattr(step_graphs, "FULL_STEP_SECONDS", 0.0)
    both.step(return_logprob=True)
    metrics = both.replaying.runtime.metrics
    for steps in range(1, 4):
        assert both.step() and both.repeats
        metrics.flush()
        assert f"in {SOON + 1 + steps} batches" in metrics.summary()


@needs_sglang
@pytest.mark.parametrize("name", ["counted tokens", "penalties", "reported paths"])
def test_what_must_be_seen_of_every_step_is_not_repeated(pair, name):
    both = pair(screened=False, repeated=name != "reported paths")
    if name == "counted tokens":
        both.replaying.runtime.token_counts = types.SimpleNamespace(add=lambda *tokens: None)
    if name == "penalties":
        both.replaying.take([{"frequency_penalty": 0.5}] * 2)
    for _ in range(SETTLED):
        both.replaying.step()
        assert not both.repeats
    assert both.capture.replays or name == "penalties", "their tensors move with each step"


@needs_sglang
@repeated_or_not
def test_a_replay_that_fails_leaves_this_step_and_all_others_to_sglang(pair, caplog, repeated):
    both = pair("greedy", screened=False, repeated=repeated)
    both.settle()

    def fails():
        raise RuntimeError("no such graph")

    for graph in both.capture.graphs:
        graph.replay = fails
    server, greedy = both.replaying, both.launching
    assert server.step() == greedy.step()
    assert repeated or server.paths == ["native:error"] * 2
    assert server.step() == greedy.step()
    assert repeated or server.paths == ["native:inactive"] * 2
    assert server.runtime.inactive_reason == "RuntimeError: no such graph" and not both.repeats


@needs_sglang
@repeated_or_not
def test_once_the_fused_pass_is_off_no_step_is_replayed(pair, repeated):
    both = pair("greedy", screened=False, repeated=repeated)
    both.settle()
    both.replaying.runtime.disable("elsewhere, something failed")
    assert not both.step_tokens()


# On a GPU.


@pytest.mark.gpu
def test_a_capture_that_cuda_gives_up_leaves_pytorchs_allocator_as_it_was(device):
    """Else memory that another stream has used is never given back: SGLang copies the tokens of each step on a stream
    of its own."""
    capture, side = step_graphs.CudaCapture(device), torch.cuda.Stream(device)
    values = torch.zeros(1024, device=device)

    def steps(count: int) -> int:
        """Bytes that are in use after so many steps."""
        for _ in range(count):
            tokens = values + 1
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                tokens.cpu()
            tokens.record_stream(side)
            del tokens
        torch.cuda.synchronize(device)
        torch.empty(1, device=device)  # an allocation is when PyTorch looks for what is no longer used
        return torch.cuda.memory_stats(device)["active_bytes.all.current"]

    def invalidated() -> torch.Tensor:
        """To wait for a stream is forbidden in its own capture."""
        added = values + 1
        with contextlib.suppress(RuntimeError):
            torch.cuda.current_stream(device).synchronize()
        return added

    before = steps(10)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            capture(invalidated, capture.new_pool())
    gc.collect()
    assert steps(1000) <= before
    graph, added = capture(lambda: values + 1, capture.new_pool())
    graph.replay()
    assert added.sum().item() == 1024, "the next capture is one again"


@pytest.mark.gpu
@needs_sglang
@pytest.mark.parametrize("edited", [False, True], ids=["as they are", "edited"])
@pytest.mark.parametrize("truncated", [False, True], ids=["plain", "truncated"])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 200])
def test_cuda_graphs_draw_the_tokens_of_launches(device, truncated, num_rows, edited):
    """200 rows take the GEMM, 64 the fused pass."""
    from sgl_flashsample.sglang.sampler import draw

    torch.manual_seed(0)
    vocab = 50_257
    lm_head = make_head((torch.randn(vocab, 256, device=device) / 8).bfloat16())
    capture = CountingCapture(device)
    replaying = HeadState(Processor(vocab_size=vocab), lm_head, capture)
    launching = HeadState(Processor(vocab_size=vocab), lm_head)
    replaying.use_step_graphs = True
    row = {"top_k": 20, "top_p": 0.9} if truncated else {}
    batch = make_batch(*({"sampling_seed": seed} | row for seed in range(num_rows)), device=device)
    hidden = torch.randn(num_rows, 256, device=device).bfloat16()
    positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
    additive = torch.zeros(num_rows, vocab, device=device)
    kinds = torch.full((num_rows,), int(Edit.ADDITIVE | Edit.MASK), dtype=torch.int32, device=device)
    masks = []  # all kept: each is at a place of its own, as a grammar's are
    for step in range(SETTLED + 2 * SLOTS):
        masks.append(torch.randint(-(2**31), 2**31, (num_rows, vocab // 32 + 1), dtype=torch.int32, device=device))
        edits = LogitEdits(additive=additive, mask=masks[-1], rows=kinds)
        hidden.copy_(torch.randn(num_rows, 256, device=device))
        additive.copy_(torch.randn(num_rows, vocab, device=device))
        positions.fill_(step)
        arguments = (hidden, batch, edits if edited else None, positions, True)
        replayed, launched = draw(replaying, *arguments), draw(launching, *arguments)
        assert torch.equal(replayed.token_ids, launched.token_ids)
        assert torch.equal(replayed.logprobs, launched.logprobs)
    assert capture.replays == SETTLED + 2 * SLOTS - WARM_UP


@pytest.mark.gpu
@needs_sglang
def test_cuda_graphs_follow_the_weights_that_a_screen_serves(device):
    from sgl_flashsample.sglang.sampler import draw

    capture = CountingCapture(device)
    state, plain = make_state(device, screened=True, capture=capture), make_state(device)
    batch, hidden = mixed_temperatures(device), hidden_states(device)
    positions = torch.zeros(6, dtype=torch.int64, device=device)
    for seed in (0, 1, 2):
        for changed in (state, plain):
            changed.weights_change()
            changed.lm_head.weight.data.copy_(weights(device, seed))
            changed.renew_screen()
        before = capture.replays
        for step in range(SETTLED):
            hidden.copy_(torch.randn(hidden.shape, device=device).to(dtype_on(device)))
            positions.fill_(step)
            replayed = draw(state, hidden, batch, None, positions, False).token_ids
            assert torch.equal(replayed, draw(plain, hidden, batch, None, positions, False).token_ids)
        assert capture.replays == before + SETTLED - WARM_UP
    assert state.head.screen.counters[ScreenCounter.ROWS] == 3 * 6 * SETTLED, "a replay counts too"


@pytest.mark.gpu
def test_rebuilding_graphs_takes_no_more_streams(device):
    state = make_state(device, screened=True)
    state.use_step_graphs = True
    streams = set()
    batch, hidden = make_batch({}, {}, device=device), hidden_states(device, 2)
    positions = torch.zeros(2, dtype=torch.int64, device=device)

    def draw(params: BatchParams) -> Launched:
        streams.add(torch.cuda.current_stream(device).cuda_stream)
        return Launched(SampleOutput(params.seed + params.position, None, params.temperature * 1))

    for _ in range(40):
        state.update(2)
        graphs = state.step_graphs(batch, None, positions)
        for _ in range(WARM_UP + 1):
            out = graphs.step(draw, batch, hidden, None, positions, False)
        assert torch.equal(out.token_ids, batch.tensors.seed + positions)
        state.weights_change()
        state.renew_screen()
    assert len(streams) == 1
