"""Steps are replayed as CUDA graphs: which steps are, what a replay reads and writes, and what is captured ahead. Each
change is noticed at the next step."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import logging
import random
import re
import time
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from head_states import (
    CPU,
    VOCAB,
    WIDTH,
    CountingCapture,
    Processor,
    dtype_on,
    hidden_states,
    make_batch,
    make_head,
    make_state,
    metadata_of,
    mixed_temperatures,
    request,
    settle,
    step_of,
    weights,
)
from serving import needs_sglang
from sglang_batches import SteadyServer, grammar

from sgl_flashsample.defaults import HeadTraits
from sgl_flashsample.dispatch import DispatchTable
from sgl_flashsample.kernels.params import BatchParams, Edit, LogitEdits, LogitsSpec, SampleOutput
from sgl_flashsample.kernels.workspace import ScreenCounter, Workspace
from sgl_flashsample.sglang import draw as draw_module
from sgl_flashsample.sglang import head, step_graphs
from sgl_flashsample.sglang import runtime as runtime_module
from sgl_flashsample.sglang.batch import BATCH_ATTRIBUTE, SLOTS_ATTRIBUTE, Batch, DrawKind
from sgl_flashsample.sglang.draw import COMMON_KINDS, Step, draw, prepare_next, replayed
from sgl_flashsample.sglang.head import GraphInputs, HeadState
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.row_table import TOP_K_BOUNDS, RowTable
from sgl_flashsample.sglang.step_graphs import PATIENCE, RETRY_SECONDS, SLOTS, Launched, StepCounts, StepGraphs

SETTLED = PATIENCE + SLOTS  # steps of a kind until both of its graphs are there
GREEDY, PLAIN_KIND, SMALL_TOP_K, ANY_TRUNCATION = COMMON_KINDS


def read_all(hidden: torch.Tensor, params: BatchParams, return_logprob: bool) -> SampleOutput:
    """ "Tokens" that depend on everything that a draw reads, but whether a batch needs its distribution alone."""
    columns = [hidden[:, 0], params.temperature, params.seed, params.position]
    flags: list[object] = [params.all_greedy, return_logprob]
    if params.truncation is not None:
        columns += [params.truncation.top_k, params.truncation.top_p, params.truncation.min_p]
        flags.append(params.truncation.max_top_k)
    if params.edits is not None:
        given = [] if params.edits.places is not None else [one for one in params.edits.tensors if one is not None]
        assert all(len(one) in (len(hidden), len(hidden) // params.edits.repeats) for one in given)
        for flag, column in zip(Edit, first_columns(params.edits, len(hidden)), strict=True):
            if column is not None:
                flagged = (params.edits.rows & flag) != 0
                columns += [flagged, torch.where(flagged, column, 0)]
    digest = torch.full((len(hidden),), hash(tuple(flags)) % 2**31)
    for column in columns:
        digest = digest * 1_000_003 + column.double().view(torch.int64)
    return SampleOutput(digest, digest.float() if return_logprob else None, torch.zeros(len(hidden)))


def first_columns(edits: LogitEdits, num_rows: int) -> list[torch.Tensor | None]:
    """The first value of each row of the edits, where a kernel finds it; nothing for rows behind them."""
    columns: list[torch.Tensor | None] = []
    places = [0, 0, 0, 0] if edits.places is None else edits.places.tolist()
    for tensor, place in zip(edits.tensors, places, strict=True):
        if tensor is None:
            columns.append(None)
            continue
        repeats = 1 if tensor is edits.mask else edits.repeats
        read = tensor[: -(-num_rows // repeats)]
        if place >= 1 << 16:  # a capture here runs what it captures, before there are addresses
            memory = (ctypes.c_byte * read.nbytes).from_address(place)
            read = torch.frombuffer(memory, dtype=tensor.dtype).view(read.shape)
        column = read[:, 0].float().repeat_interleave(repeats)[:num_rows]
        columns.append(torch.nn.functional.pad(column, (0, num_rows - len(column))))
    return columns


def reading_state(**options: Any) -> HeadState:
    """A head whose draws are ``read_all``."""
    state = make_state(CPU, **options)
    state.head.draw = lambda hidden, params, *, return_logprob, path: read_all(hidden, params, return_logprob)
    return state


def lazy_of(state: HeadState, captured: torch.Tensor, num_rows: int, is_captured: bool = True) -> LazyLogits:
    """The logits of the first rows of hidden states of one of SGLang's CUDA graphs."""
    whole = LazyLogits(captured, VOCAB, state, lambda hidden: pytest.fail("logits"), captured if is_captured else None)
    return whole[:num_rows]


TABLE = RowTable(CPU)


@pytest.fixture(autouse=True)
def no_prefills(monkeypatch, request) -> None:
    """Hidden states of prefills have no places, but in tests of prefills."""
    if "prefill" not in request.node.name:
        for module in (draw_module, head):
            monkeypatch.setattr(module, "STAGED_ROWS", ())


class Drawing:
    """Steps of a head with graphs. Each is compared with the same step of a head without."""

    def __init__(self, capture: CountingCapture | None = None, copies_tokens: bool = False) -> None:
        self.capture = CountingCapture() if capture is None else capture
        self.state, self._launching = reading_state(capture=self.capture), reading_state()
        self.state.copies_tokens = copies_tokens

    @property
    def counts(self) -> StepCounts:
        return self.state.counts

    @property
    def graphs(self) -> StepGraphs:
        assert self.state.graphs is not None
        return self.state.graphs

    @property
    def graphs_are_off(self) -> bool:
        return self.state.graphs is not None and self.state.graphs.is_off

    def step(self, captured: torch.Tensor, step: Step, is_captured: bool = True) -> SampleOutput | None:
        """The draw of a replay, of hidden states in one of SGLang's graphs; None where the step was launched."""
        num_rows = len(step.positions)
        launched = draw(lazy_of(self._launching, captured, num_rows, False), step)
        before = self.counts.replayed, self.counts.launched
        out = draw(lazy_of(self.state, captured, num_rows, is_captured), step)
        assert torch.equal(out.token_ids, launched.token_ids)
        assert step.return_logprob is (out.logprobs is not None)
        assert out.logprobs is None or torch.equal(out.logprobs, launched.logprobs)
        replayed, launched = self.counts.replayed - before[0], self.counts.launched - before[1]
        assert replayed + launched == 1, "each step is counted once"
        return out if replayed else None

    def replays(self, captured: torch.Tensor, step: Step, count: int = 1) -> list[bool]:
        return [self.step(captured, step) is not None for _ in range(count)]


PLAIN = [{"temperature": 1.5, "sampling_seed": 1}, {"temperature": 0.5, "sampling_seed": 2}]
TRUNCATED = [
    {"temperature": 1.5, "sampling_seed": 1, "top_k": 6, "top_p": 0.5, "min_p": 0.25},
    {"temperature": 0.5, "sampling_seed": 2, "top_k": 7, "top_p": 0.75, "min_p": 0.5},
]


def make_step(rows: Sequence[dict] = tuple(PLAIN), edits: LogitEdits | None = None, logprob: bool = False) -> Step:
    return step_of(make_batch(*rows), torch.arange(len(rows)), edits, logprob)


def hidden_of(num_rows: int, seed: int = 5) -> torch.Tensor:
    """The hidden states of one of SGLang's graphs."""
    return hidden_states(CPU, num_rows, seed)


def mask_of(num_words: int, value: int = 0) -> torch.Tensor:
    return torch.full((2, num_words), value, dtype=torch.int32)


def make_edits(num_rows: int = 2) -> LogitEdits:
    return LogitEdits(
        additive=torch.zeros(num_rows, 8),
        scaling=torch.ones(num_rows, 8),
        mask=torch.zeros(num_rows, 1, dtype=torch.int32),
        bias=torch.zeros(num_rows, 8),
    )


EDITED = {"frequency_penalty": 1.0, "repetition_penalty": 1.1, "logit_bias": {}, "grammar": "a grammar"}


def edited_step(edits: LogitEdits | None = None, **options: Any) -> Step:
    """Rows with every edit."""
    edits = make_edits() if edits is None else edits
    return make_step([row | EDITED for row in PLAIN], edits, **options)


def test_steps_of_a_kind_are_replayed_once_there_have_been_some_and_all_are_counted():
    drawing, hidden, step = Drawing(), hidden_of(2), make_step()
    assert drawing.replays(hidden, step, SETTLED + 3) == [False] * PATIENCE + [True] * (SLOTS + 3)
    assert drawing.counts == StepCounts(replayed=SLOTS + 3, launched=PATIENCE, late_captures=SLOTS)
    assert drawing.graphs.count == SLOTS, "as /server_info says"


def test_a_replay_reads_this_steps_hidden_states_and_positions():
    drawing, hidden, step = Drawing(), hidden_of(2), make_step()
    drawing.replays(hidden, step, SETTLED)
    for number in range(5):
        hidden[:, 0], step.positions[:] = number, torch.tensor([number, 2 * number])
        assert drawing.step(hidden, step) is not None
        moved = step._replace(positions=torch.tensor([7, number]))
        assert drawing.step(hidden, moved) is not None, "SGLang may have them at another place"


@pytest.mark.parametrize("parameter", ["temperature", "sampling_seed", "top_k", "top_p", "min_p", "all"])
def test_another_batch_of_the_same_kind_is_replayed_at_once_with_its_own_parameters(parameter):
    drawing, hidden = Drawing(), hidden_of(2)
    drawing.replays(hidden, make_step(TRUNCATED), SETTLED)
    others = {"temperature": 0.25, "sampling_seed": 9, "top_k": 5, "top_p": 0.125, "min_p": 0.125}
    changes = others if parameter == "all" else {parameter: others[parameter]}
    assert drawing.step(hidden, make_step([TRUNCATED[0], TRUNCATED[1] | changes])) is not None


def test_seedless_rows_do_not_take_graphs_of_their_own():
    """FlashInfer may draw them otherwise; where it does not, they are drawn as seeded rows are."""
    drawing, hidden = Drawing(), hidden_of(2)
    seedless = [{"top_p": 0.5}, {"top_p": 0.75}]
    drawing.replays(hidden, make_step(seedless), SETTLED)
    assert drawing.step(hidden, make_step([seedless[0], {"top_p": 0.5, "sampling_seed": 3}])) is not None


def test_a_batch_that_changes_at_every_step_is_replayed_at_every_step():
    """Requests come and go, in any order of any slots, in the sizes that one of SGLang's graphs serves."""
    rng, drawing, hidden = random.Random(3), Drawing(), hidden_of(8)
    everyone = make_batch(*({"temperature": 0.25 * place, "sampling_seed": place} for place in range(1, 33)))
    running = list(range(6))
    drawing.replays(hidden, make_step([*PLAIN, *PLAIN, *PLAIN]), PATIENCE)
    for number in range(60):
        waiting = [place for place in range(32) if place not in running]
        kept = rng.sample(running, rng.randint(1, len(running)))  # finished requests leave
        running = kept + rng.sample(waiting, rng.randint(0, 8 - len(kept)))  # others join
        batch = everyone.keep(kept).followed_by(everyone.keep(running[len(kept) :]))
        slots, positions = torch.tensor(running) + 1, torch.randint(0, 1000, (len(running),))
        hidden[:, 0] = number
        assert drawing.step(hidden, Step(batch, slots, positions, None, False)) is not None
    assert drawing.counts.late_captures == drawing.graphs.count == SLOTS


def test_a_request_that_takes_the_slot_of_one_that_has_left_is_drawn_with_its_own_parameters():
    drawing, hidden, first = Drawing(), hidden_of(2), make_step()
    drawing.replays(hidden, first, SETTLED)
    first.batch.table.put(2, (0.125, 1 << 30, 77, 1.0, 0.0, 0))
    assert drawing.step(hidden, first) is not None
    rows = drawing.state.rows
    assert rows.temperature[:2].tolist() == [1.5, 0.125] and rows.seed[1] == 77, "what the graphs read"


def test_rows_behind_the_batch_are_drawn_greedily_and_left_out():
    drawing, hidden, full = Drawing(), hidden_of(4), make_step([*PLAIN, *PLAIN])
    full.positions.add_(5)
    drawing.replays(hidden, full, SETTLED)
    fewer = make_step(PLAIN[1:])
    out = drawing.step(hidden, fewer)
    assert out is not None and len(out.token_ids) == 1
    (drawn,) = [graph.out.token_ids for graph in drawing.capture.graphs if graph.out.token_ids[0] == out.token_ids]
    nothing = BatchParams(torch.zeros(3), *torch.zeros(2, 3, dtype=torch.int64))
    assert torch.equal(drawn[1:], read_all(hidden[1:], nothing, False).token_ids)


@pytest.mark.parametrize("logprob", [False, True])
def test_every_size_of_a_graph_draws_the_tokens_of_launches(logprob):
    drawing, hidden = Drawing(), hidden_of(5)
    for num_rows in (5, 4, 3, 2, 1, 2, 5, 1, 3, 5):
        step = make_step([*PLAIN, *PLAIN, *PLAIN][:num_rows], logprob=logprob)
        drawing.replays(hidden, step, 2)
    assert drawing.counts.replayed == 20 - PATIENCE and drawing.graphs.count == SLOTS


@pytest.mark.parametrize(("copies_tokens", "steps"), [(False, 2), (True, 8)])
@pytest.mark.parametrize("num_rows", [2, 4])
def test_tokens_outlive_the_next_step_and_copies_of_them_all(copies_tokens, steps, num_rows):
    """SGLang has them on the host before it launches the second next; a pipeline sends them later."""
    drawing, hidden = Drawing(copies_tokens=copies_tokens), hidden_of(4)
    step = make_step([*PLAIN, *PLAIN][:num_rows], logprob=True)
    drawing.replays(hidden, step, PATIENCE)
    results = []
    for number in range(8):
        step.positions[:] = number
        out = drawing.step(hidden, step)
        results.append((out, out.token_ids.clone(), out.logprobs.clone()))
        for kept, token_ids, logprobs in results[-steps:]:
            assert torch.equal(kept.token_ids, token_ids) and torch.equal(kept.logprobs, logprobs)


@pytest.mark.parametrize("places", [1, 2])
def test_micro_batches_that_take_turns_are_both_replayed(places):
    """In one of SGLang's graphs, or each in another; neither writes to the tokens of the other's last step."""
    drawing, batches = Drawing(), [make_step(), make_step([{"temperature": 2.0}, {"temperature": 3.0}])]
    hidden = [hidden_of(2), hidden_of(2 * places)][:places]
    last: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(4 * SETTLED):
        for turn, step in enumerate(batches):
            step.positions[:] = number
            out = drawing.step(hidden[turn % places], step)
            if out is not None:
                last.append((out.token_ids, out.token_ids.clone()))
            for kept, drawn in last[-2:]:
                assert torch.equal(kept, drawn)
    assert drawing.counts.launched == places * PATIENCE


@pytest.mark.parametrize("edited", [False, True])
def test_a_step_outside_of_sglangs_graphs_is_launched(edited):
    """Eager steps have their hidden states anywhere."""
    drawing, hidden = Drawing(), hidden_of(2)
    step = edited_step() if edited else make_step()
    assert all(drawing.step(hidden, step, is_captured=False) is None for _ in range(3 * SETTLED))
    assert drawing.counts.launched == 3 * SETTLED and not drawing.capture.graphs
    assert all(drawing.replays(hidden, step, SETTLED)[PATIENCE:])
    assert drawing.step(hidden, step, is_captured=False) is None, "at the place where a graph has them"


def of(*rows: dict) -> Callable:
    """Another batch at the same place."""
    return lambda hidden, step: (hidden, step._replace(batch=make_batch(*rows)))


def with_edits(change: Callable[[LogitEdits], LogitEdits | None]) -> Callable:
    return lambda hidden, step: (hidden, step._replace(edits=change(step.edits)))


UNBOUNDED = [{"sampling_seed": 1, "top_p": 0.5}, {"sampling_seed": 2, "min_p": 0.5}]  # no top-k is known
LARGER, LARGEST = TOP_K_BOUNDS[0] + 1, TOP_K_BOUNDS[-1] + 1
OTHERS: dict[str, tuple[list[dict], Callable]] = {
    "greedy": (PLAIN, of({"top_k": 1}, {"top_k": 1})),
    "truncated": (PLAIN, of(*UNBOUNDED)),
    "not truncated": (UNBOUNDED, of(*PLAIN)),
    "larger top-k": (TRUNCATED, of(TRUNCATED[0], TRUNCATED[1] | {"top_k": LARGER})),
    "largest top-k": (TRUNCATED, of(TRUNCATED[0], TRUNCATED[1] | {"top_k": LARGEST})),
    "top-k of no bound": (TRUNCATED, of(TRUNCATED[0], {"top_p": 0.5})),
    "another size": (PLAIN, lambda hidden, step: (hidden._base, step)),
    "hidden states": (PLAIN, lambda hidden, step: (hidden.clone(), step)),
    "logprobs": (PLAIN, lambda hidden, step: (hidden, step._replace(return_logprob=True))),
}
OTHER_EDITS: dict[str, Callable] = {
    "no edits": with_edits(lambda edits: None),
    "an edit less": with_edits(lambda edits: dataclasses.replace(edits, scaling=None)),
    "a mask of other words": with_edits(lambda edits: dataclasses.replace(edits, mask=mask_of(2))),
    "rows that are further apart": with_edits(lambda edits: dataclasses.replace(edits, bias=torch.zeros(2, 12)[:, :8])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_of_another_kind_or_size_has_graphs_of_its_own(name):
    rows, change = OTHERS[name]
    drawing, hidden, step = Drawing(), hidden_of(4)[:2], make_step(rows)  # SGLang's graphs share their memory
    drawing.replays(hidden, step, SETTLED)
    assert drawing.replays(*change(hidden, step), SETTLED) == [False] * PATIENCE + [True] * SLOTS
    assert drawing.step(hidden, step) is not None, "those of before are still there"


@pytest.mark.parametrize("name", OTHER_EDITS)
def test_a_step_with_edits_of_another_layout_has_graphs_of_its_own(name):
    drawing, hidden, step = Drawing(), hidden_of(2), edited_step()
    drawing.replays(hidden, step, SETTLED)
    assert drawing.replays(*OTHER_EDITS[name](hidden, step), SETTLED) == [False] * PATIENCE + [True] * SLOTS
    assert drawing.step(hidden, step) is not None, "those of before are still there"


def test_edits_are_read_wherever_this_step_has_them():
    """Penalties and masks are made anew for every step."""
    drawing, hidden, kept = Drawing(), hidden_of(2), []
    for number in range(SETTLED + 4):
        edits = make_edits()
        kept.append(edits)  # so that no two steps share a place
        for edit in (edits.additive, edits.scaling, edits.mask, edits.bias):
            edit.fill_(number)
        assert (drawing.step(hidden, edited_step(edits)) is not None) is (number >= PATIENCE)


EAGER_EDITS: dict[str, Callable[[LogitEdits], LogitEdits]] = {
    "flags of their own": lambda edits: dataclasses.replace(edits, rows=torch.full((2,), 3, dtype=torch.int32)),
    "an odd address": lambda edits: dataclasses.replace(edits, bias=torch.zeros(17)[1:].view(2, 8)),
    "rows of every other column": lambda edits: dataclasses.replace(edits, bias=torch.zeros(2, 16)[:, ::2]),
}


@pytest.mark.parametrize("name", EAGER_EDITS)
def test_edits_that_a_graph_cannot_be_told_are_launched(name):
    drawing, hidden, step = Drawing(), hidden_of(2), edited_step()
    drawing.replays(hidden, step, SETTLED)
    changed = step._replace(edits=EAGER_EDITS[name](step.edits))
    assert drawing.replays(hidden, changed, SETTLED) == [False] * SETTLED
    assert drawing.step(hidden, step) is not None


def test_edited_steps_of_a_pipeline_are_launched():
    """A graph would be told the next batch before it has run."""
    drawing = Drawing(copies_tokens=True)
    assert drawing.replays(hidden_of(2), edited_step(), SETTLED) == [False] * SETTLED


def test_edits_without_flags_per_row_have_those_of_the_requests_of_this_step():
    drawing, hidden = Drawing(), hidden_of(2)
    edits = LogitEdits(additive=torch.zeros(2, 8), bias=torch.zeros(2, 8))
    drawing.replays(hidden, make_step([{"frequency_penalty": 1.0}] * 2, edits), SETTLED)
    others = make_step([{"logit_bias": {"3": 1.0}}, {}], edits)
    assert drawing.step(hidden, others) is not None
    assert drawing.state.rows.edits[:2].tolist() == [Edit.BIAS, 0]


def test_padding_has_no_edits():
    drawing, hidden, step = Drawing(), hidden_of(4), edited_step()
    assert drawing.replays(hidden, step, SETTLED) == [False] * PATIENCE + [True] * SLOTS
    assert drawing.state.rows.edits[:4].tolist() == [15, 15, 0, 0]
    assert {len(graph.out.token_ids) for graph in drawing.capture.graphs} == {4}


class Exchanging:
    """The exchange of one rank with others through memory, whose parts of the vocabulary lose everywhere. rows: how
    many each exchange has had."""

    num_ranks = 2

    def __init__(self, state: HeadState) -> None:
        self.memory, self.rows = types.SimpleNamespace(max_rows=64), []
        state.exchange, state.logits_of_shard = self, lambda hidden: hidden

    def merge(self, drawn: SampleOutput) -> SampleOutput:
        self.rows.append(len(drawn.token_ids))
        return drawn

    def draw_rows(self, hidden: torch.Tensor, params: BatchParams, draw: Callable) -> SampleOutput:
        return self.merge(read_all(hidden, params, False))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "step",
    [make_step(), make_step(logprob=True), make_step(TRUNCATED), edited_step()],
    ids=["plain", "logprobs", "truncated", "edits"],
)
def test_ranks_exchange_padding_too_where_a_step_is_launched(step, fails):
    """Another rank may replay it: its screen pauses at other times, its captures may fail."""
    capture = CountingCapture()
    capture.fails, drawing = fails, Drawing(capture)
    exchange = Exchanging(drawing.state)
    replayed = [False] * PATIENCE + [not fails] * SLOTS
    assert drawing.replays(hidden_of(4), step, SETTLED) == replayed
    assert len(exchange.rows) >= SETTLED and set(exchange.rows) == {4}


@pytest.mark.parametrize("most, replayed", [(4, False), (3, True), (6, True)])
def test_nodes_with_edits_that_ranks_exchange_in_blocks_are_launched_where_a_block_begins_amid_a_request(
    most, replayed
):
    """A graph's edits are found by their addresses, a row for the three nodes of a request."""
    drawing, hidden = Drawing(), hidden_of(6)
    exchange = Exchanging(drawing.state)
    exchange.memory.max_rows = most
    batch = make_batch(*[row | {"frequency_penalty": 1.0} for row in PLAIN])
    edits = LogitEdits(additive=torch.arange(16.0).view(2, 8), repeats=3)
    step = Step(batch, torch.tensor([1, 2]), torch.arange(6), edits, False, nodes=3)
    assert drawing.replays(hidden, step, SETTLED) == [False] * PATIENCE + [replayed] * SLOTS
    assert set(exchange.rows) == {most, 6 - most} - {0} and not drawing.graphs_are_off


def test_after_a_larger_batch_the_graphs_are_of_the_new_buffers():
    drawing, hidden, step = Drawing(), hidden_of(2), make_step()
    drawing.replays(hidden, step, SETTLED)
    rows = drawing.state.rows
    drawing.state.update(rows.capacity + 1)
    assert drawing.state.rows is not rows
    assert drawing.replays(hidden, step, SETTLED) == [False] * PATIENCE + [True] * SLOTS


def test_after_a_capture_that_fails_steps_are_launched_and_it_is_said_once(clock, caplog):
    capture = CountingCapture()
    capture.fails, drawing = True, Drawing(capture)
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        assert not any(drawing.replays(hidden_of(2), make_step(), 3 * SETTLED))
    assert [record.message for record in caplog.records] == [
        "flashsample: CUDA graphs of the sampling step are off for 5 minutes, SGLang's own stay on; same tokens, more "
        "CPU time per step: RuntimeError: no memory for a graph"
    ]
    assert drawing.counts == StepCounts(launched=3 * SETTLED)


def test_graphs_that_steps_capture_are_dropped_together_once_they_take_too_much(clock, monkeypatch, ahead):
    """But for those captured ahead. The kinds that still come are captured anew, until it is too much once more."""
    each = step_graphs.MAX_LATE_BYTES // 4
    monkeypatch.setattr(step_graphs, "free_bytes", lambda device: (1 << 40) - each * len(drawing.capture.graphs))
    monkeypatch.setattr(draw_module, "MAX_PREPARED_BYTES", 1 << 40)
    drawing, hidden = ahead.drawing, ahead.drawing.state.captured[2]
    ahead.idle()
    prepared = drawing.graphs.count
    kinds = [make_step(logprob=True), edited_step(), edited_step(logprob=True)]
    for step in kinds[:2]:
        assert drawing.replays(hidden, step, SETTLED) == [False] * PATIENCE + [True] * SLOTS
    assert drawing.state.status["graph_bytes"] == each * (prepared + 4)
    drawing.replays(hidden, kinds[2], PATIENCE + 1)  # takes a fifth
    assert drawing.graphs.count == prepared + 5
    drawing.replays(hidden, kinds[2], 1)
    assert drawing.graphs.count == prepared and drawing.graphs.num_bytes == each * prepared
    assert all(drawing.step(hidden, make_step()) is not None for _ in range(2)), "captured ahead"
    for step in (kinds[0], kinds[1], kinds[2]):
        drawing.replays(hidden, step, 3 * SETTLED)
    assert drawing.graphs.count == prepared + 5 and not any(drawing.replays(hidden, kinds[2], 2)), "full again"
    clock[0] += RETRY_SECONDS
    drawing.replays(hidden, kinds[2], 1)
    assert drawing.replays(hidden, kinds[2], SETTLED) == [False] * PATIENCE + [True] * SLOTS


class Refusing(CountingCapture):
    """Refuses a pool whose graphs have all gone, as PyTorch does. It holds no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.by_pool: dict[int, list[weakref.ref]] = {}

    def __call__(self, launches: Callable[[], Any], pool: int) -> tuple[Any, Any]:
        gc.collect()
        captured = self.by_pool.setdefault(pool, [])
        if captured and not any(graph() for graph in captured):
            raise RuntimeError("the pool is dead")
        graph, launched = super().__call__(launches, pool)
        self.graphs.clear()
        captured.append(weakref.ref(graph))
        return graph, launched


@pytest.mark.parametrize("dropped", ["for want of memory", "with other places of logprobs"])
def test_after_all_graphs_are_dropped_others_are_captured_in_another_pool(clock, monkeypatch, dropped):
    capture, hidden = Refusing(), torch.zeros(2, 4)
    graphs, out = StepGraphs([], capture, StepCounts()), SampleOutput.empty(2, CPU, False)

    def step() -> bool:
        keyed = graphs.find(lambda _: Launched(out), hidden, PLAIN_KIND, None, "ids")
        return keyed is not None and keyed.replay_next(2) is not None

    assert [step() for _ in range(PATIENCE + 1)] == [False] * PATIENCE + [True]
    if dropped == "for want of memory":
        graphs.num_bytes = step_graphs.MAX_LATE_BYTES + 1
        assert not step() and graphs.count == 0
    else:
        graphs.forget_logprobs()
    assert [step() for _ in range(PATIENCE + 1)] == [False] * PATIENCE + [True]
    assert capture.pools == 2 and not graphs.is_off


def test_a_failed_capture_is_tried_again_after_some_minutes_in_a_pool_of_its_own(clock):
    """Others may have taken the memory for a moment."""
    capture, hidden, step = CountingCapture(), hidden_of(2), make_step()
    drawing = Drawing(capture)
    capture.fails = True
    drawing.replays(hidden, step, SETTLED)
    capture.fails = False
    clock[0] += RETRY_SECONDS - 1
    assert not any(drawing.replays(hidden, step, 2 * SETTLED))
    clock[0] += 1
    assert drawing.replays(hidden, step, SETTLED)[-1] and capture.pools == 2


@pytest.mark.parametrize("edited", [False, True])
def test_a_failed_capture_gives_the_memory_of_the_graphs_back(clock, edited):
    capture, hidden, step = CountingCapture(), hidden_of(2), make_step()
    drawing = Drawing(capture)
    drawing.replays(hidden, step, SETTLED)
    drawing.replays(hidden, edited_step(), SETTLED)
    assert drawing.graphs.count == 2 * SLOTS
    capture.fails = True
    another = edited_step(logprob=True) if edited else make_step(logprob=True)
    drawing.graphs.is_prepared, drawing.graphs.num_bytes = True, 1 << 20
    drawing.replays(hidden, another, SETTLED)
    assert drawing.graphs.count == drawing.graphs.num_bytes == 0
    assert not drawing.graphs.is_prepared, "they are captured ahead once more"


@pytest.fixture
def capturing(monkeypatch) -> types.SimpleNamespace:
    """PyTorch's captures, without a GPU. graphs: made so far, by weak references. finished: graphs that came to their
    end. ended: the pools that its allocator was told to leave. allocates: whether it allocates for a capture that
    fails."""
    noted = types.SimpleNamespace(graphs=[], finished=0, ended=[], released=[], allocates=True)

    class Recording:
        def __init__(self) -> None:
            noted.graphs.append(weakref.ref(self))

        def capture_begin(self, **arguments): ...
        def capture_end(self):
            noted.finished += 1

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
    assert capturing.finished == len(capturing.graphs) == 3, "another capture brings its generator back"
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


def replay_once(graphs: StepGraphs, launches: Callable[..., Launched], hidden: torch.Tensor) -> SampleOutput:
    """Steps of a plain batch until the first that is replayed."""
    for _ in range(PATIENCE + 1):
        keyed = graphs.find(launches, hidden, PLAIN_KIND, None, False)
    assert keyed is not None
    return keyed.replay_next(len(hidden))


def test_logits_that_a_graph_writes_to_live_as_long_as_the_graph():
    """A larger batch replaces the buffer of the workspace."""
    workspace, spec, hidden = Workspace(1, CPU), LogitsSpec(32), hidden_of(2)
    graphs = StepGraphs([workspace], CountingCapture(), StepCounts())

    def launches(batch: object) -> Launched:
        workspace.logits_buffer(2, spec, torch.float32, edited=False)
        return Launched(SampleOutput.empty(2, CPU, False))

    replay_once(graphs, launches, hidden)
    written = weakref.ref(workspace.last_buffer)
    workspace.logits_buffer(64, spec, torch.float32, edited=False)
    gc.collect()
    assert written() is not None and written() is not workspace.last_buffer
    del graphs
    gc.collect()
    assert written() is None


def test_what_a_graph_writes_to_lives_as_long_as_the_graph():
    """Else it would lie where the tokens of another graph are."""
    kept: list[weakref.ref] = []
    graphs = StepGraphs([Workspace(1, CPU)], CountingCapture(), StepCounts())

    def launches(batch: object) -> Launched:
        scratch = torch.zeros(2)
        kept.append(weakref.ref(scratch))
        return Launched(SampleOutput.empty(2, CPU, False), scratch)

    replay_once(graphs, launches, hidden_of(2))
    gc.collect()
    assert kept[0]() is not None
    del graphs
    gc.collect()
    assert kept[0]() is None


# Graphs that are captured ahead.

ROWS_OF_KINDS: dict[DrawKind, list[dict]] = {
    GREEDY: [{"top_k": 1}, {"top_k": 1}],
    PLAIN_KIND: PLAIN,
    SMALL_TOP_K: TRUNCATED,
    ANY_TRUNCATION: UNBOUNDED,
}


@dataclasses.dataclass
class Ahead:
    """A head of a server that has captured its model for 2, 4 and 3 rows, and what was captured for its steps: the rows
    and the kind of each, in order."""

    drawing: Drawing
    captured: list[tuple[int, DrawKind]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        state = self.drawing.state
        state.captured = {rows: hidden_of(rows) for rows in (2, 4, 3)}
        draw_rows = state.head.draw

        def noting(hidden: torch.Tensor, params: BatchParams, **options: Any) -> SampleOutput:
            truncation = params.truncation
            kind = DrawKind(
                truncation is not None,
                None if truncation is None else truncation.max_top_k,
                params.all_greedy,
                params.distribution_only,
            )
            self.captured.append((len(hidden), kind))
            return draw_rows(hidden, params, **options)

        state.head.draw = noting

    def idle(self) -> None:
        """Until nothing is left to do."""
        for _ in range(100):
            if not prepare_next(self.drawing.state, TABLE):
                return
        pytest.fail("there is always more to do")


@pytest.fixture
def ahead() -> Ahead:
    return Ahead(Drawing())


def test_graphs_of_common_kinds_are_captured_ahead_the_largest_size_first_one_kind_at_a_time(ahead):
    """Smaller ones find the memory of larger ones. A request that arrives waits for one kind at most."""
    assert prepare_next(ahead.drawing.state, TABLE)
    assert ahead.captured == [(4, GREEDY)] * (1 + SLOTS), "a draw compiles what is missing"
    ahead.idle()
    each = [(rows, kind) for rows in (4, 3, 2) for kind in COMMON_KINDS]
    assert ahead.captured == [one for one in each for _ in range(1 + SLOTS)]
    assert ahead.drawing.graphs.count == SLOTS * len(each)
    ahead.idle()
    assert len(ahead.captured) == (1 + SLOTS) * len(each), "once"


@pytest.mark.parametrize("kind", COMMON_KINDS)
def test_a_step_whose_graphs_were_captured_ahead_is_replayed_at_once(ahead, kind):
    ahead.idle()
    rows = ROWS_OF_KINDS[kind]
    assert make_step(rows).kind == kind
    for size in (2, 3, 4):
        assert ahead.drawing.replays(ahead.drawing.state.captured[size], make_step(rows), 3) == [True] * 3
    assert ahead.drawing.counts == StepCounts(replayed=9)


def test_steps_beside_captures_ahead_keep_their_graphs(ahead):
    """Steps that came first may have captured one graph of a kind, or both."""
    hidden = ahead.drawing.state.captured[3]
    ahead.drawing.replays(hidden, make_step(), PATIENCE + 1)
    ahead.idle()
    assert ahead.drawing.graphs.count == SLOTS * len(COMMON_KINDS) * 3
    assert ahead.drawing.replays(hidden, make_step(), 3) == [True] * 3
    assert ahead.drawing.counts.late_captures == 1


def test_other_kinds_are_captured_in_steps(ahead):
    ahead.idle()
    for step in (make_step(logprob=True), edited_step()):
        assert not ahead.drawing.step(ahead.drawing.state.captured[2], step)


def test_captures_ahead_stop_at_their_share_of_memory(ahead, monkeypatch):
    """The graphs of each kind take a third of it, and a byte more."""
    third, graphs = draw_module.MAX_PREPARED_BYTES // 3 + 1, ahead.drawing.capture.graphs
    monkeypatch.setattr(step_graphs, "free_bytes", lambda device: (1 << 40) - third * (len(graphs) // SLOTS))
    ahead.idle()
    assert list(dict.fromkeys(ahead.captured)) == [(4, kind) for kind in COMMON_KINDS[:3]]
    assert ahead.drawing.state.status["graph_bytes"] == 3 * third
    assert not prepare_next(ahead.drawing.state, TABLE)
    assert ahead.drawing.step(ahead.drawing.state.captured[4], make_step(TRUNCATED)) is not None


@pytest.mark.parametrize("reason", ["an exchange", "no graphs"])
def test_nothing_is_captured_ahead_where_it_must_not_be(ahead, reason):
    """An exchange takes all ranks, and others may have something to do."""
    state = ahead.drawing.state
    if reason == "an exchange":
        state.exchange = types.SimpleNamespace(memory="memory")
    else:
        state.use_step_graphs = False
    assert not prepare_next(state, TABLE) and not ahead.captured


def test_where_a_draw_fails_ahead_steps_capture_what_they_need_and_it_is_said_once(ahead, monkeypatch, caplog):
    state = ahead.drawing.state
    with monkeypatch.context() as failing:
        failing.setattr(state.head, "draw", lambda *arguments, **options: 1 / 0)
        assert not any(prepare_next(state, TABLE) for _ in range(3))
    assert [record.message for record in caplog.records] == [
        "flashsample: CUDA graphs of the sampling step are captured in steps, not ahead: ZeroDivisionError: division "
        "by zero"
    ]
    assert not prepare_next(state, TABLE)
    assert ahead.drawing.replays(state.captured[2], make_step(), SETTLED) == [False] * PATIENCE + [True] * SLOTS


def test_a_capture_that_fails_ahead_is_tried_again_after_some_minutes(ahead, clock):
    state, capture = ahead.drawing.state, ahead.drawing.capture
    capture.fails = True
    prepare_next(state, TABLE)
    assert not prepare_next(state, TABLE) and not capture.graphs
    capture.fails = False
    clock[0] += RETRY_SECONDS
    ahead.idle()
    assert ahead.drawing.graphs.count == SLOTS * len(COMMON_KINDS) * 3


def test_after_a_change_of_the_head_its_graphs_are_captured_ahead_again(ahead):
    state = ahead.drawing.state
    ahead.idle()
    state.lm_head.weight = state.lm_head.weight.clone()
    ahead.captured.clear()
    ahead.idle()
    assert len(ahead.captured) == (1 + SLOTS) * len(COMMON_KINDS) * 3


@pytest.mark.parametrize("served", ["nothing", "a step"])
def test_after_sglang_has_captured_its_model_anew_graphs_are_captured_for_the_new_places_alone(
    ahead, runtime, monkeypatch, served
):
    state = ahead.drawing.state
    monkeypatch.setattr(runtime_module, "_is_capturing", lambda: True)
    metadata = metadata_of("decode")
    ahead.idle()
    before, places = ahead.drawing.graphs, {rows: hidden_of(rows) for rows in (2, 4, 3)}
    for hidden in places.values():
        runtime.captures_model(state.processor, state, hidden, metadata)
    assert ahead.drawing.graphs is before, "a graph must not be destroyed during a capture"
    if served == "a step":
        ahead.drawing.step(places[4], make_step([*PLAIN, *PLAIN]))
        assert ahead.drawing.graphs.count == 0, "none that reads where hidden states were"
    ahead.idle()
    assert ahead.drawing.graphs is not before
    assert ahead.drawing.graphs.count == SLOTS * len(COMMON_KINDS) * 3
    assert all(ahead.drawing.step(hidden, make_step()) is not None for hidden in places.values())


# Of a head.


def has_graphs(state: HeadState, *rows: dict, edited: bool = False) -> bool:
    return state.step_graphs(len(rows), make_step(rows).kind, edited) is not None


def test_all_graphs_of_a_head_are_captured_on_one_stream_each_set_in_a_pool_of_its_own(device):
    """PyTorch keeps a workspace of cuBLAS for each stream, and has 32 streams."""
    capture = CountingCapture()
    state = make_state(device, screened=True, capture=capture)
    for rebuilt in range(1, 6):
        state.update(2)
        assert has_graphs(state, {})
        assert capture.pools == rebuilt
        state.weights_change()
        state.renew_screen()


def test_a_head_whose_steps_are_not_to_be_captured_has_no_graphs(device):
    state = make_state(device, capture=CountingCapture())
    state.update(2)
    assert has_graphs(state, {}, {})
    state.use_step_graphs = False
    assert not has_graphs(state, {}, {})


def test_a_head_captures_by_itself_where_nobody_says_how(device, monkeypatch):
    monkeypatch.setattr(head, "CudaCapture", CountingCapture)
    state = make_state(device)
    state.use_step_graphs = True
    state.update(1)
    graphs = state.step_graphs(1, PLAIN_KIND, edited=False)
    assert graphs is state.step_graphs(1, GREEDY, edited=True) is not None


def test_batches_that_flashinfer_draws_have_no_graphs(device):
    """FlashInfer allocates while it draws: in the pool of the graphs, one's tokens may share memory with another's
    scratch."""
    state = make_state(device, capture=CountingCapture())
    state.head.table = DispatchTable(HeadTraits.of(state.head.lm_head), flashinfer=[2])
    state.update(3)
    truncated, seeded = {"top_p": 0.5}, {"top_p": 0.5, "sampling_seed": 1}
    assert not has_graphs(state, truncated, truncated)
    assert has_graphs(state, truncated, truncated, truncated), "a size that does not take FlashInfer"
    assert has_graphs(state, truncated, seeded) and has_graphs(state, truncated, {}), "it would draw other tokens"
    assert has_graphs(state, truncated, truncated, edited=True)
    state.head.table = DispatchTable(HeadTraits.of(state.head.lm_head))
    assert has_graphs(state, truncated, truncated)


# In a server.

KINDS = {
    "plain": [{"temperature": 1.0}] * 2,
    "truncated": [{"temperature": 0.7, "top_p": 0.9, "top_k": 5}] * 2,
    "greedy": [{"temperature": 0.0}] * 2,
}
SOON = 1 + SLOTS  # steps until both graphs of a kind are there, where patience is short


# Places that SGLang's graphs read, and the short way.


class Moving:
    """Decode steps in one of SGLang's graphs, which has the positions and slots of its rows at one place. Each step is
    compared with the same step of a head without graphs."""

    logprob = False  # whether logprobs of the tokens are asked for

    def __init__(self, padded: int = 4) -> None:
        self.capture, self.padded = CountingCapture(), padded
        self.state, self._launching = reading_state(capture=self.capture), reading_state()
        self.hidden = hidden_of(padded)
        self.state.captured[padded] = self.hidden
        self.state.inputs = GraphInputs(torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
        self.table = RowTable(CPU)
        self.number = 0

    def batch_in(self, slots: Sequence[int], *rows: dict) -> Batch:
        requests = [request(**row) for row in rows]
        return Batch.of_requests(requests, slots, self.table, 1, True)

    def step(self, batch: Batch, slots: Sequence[int], *, short: bool = True, **info: Any) -> str:
        """How the step was served: "ready", "replayed" or "launched". info: attributes of SGLang's sampling info."""
        num_rows, self.number = len(batch), self.number + 1
        positions = torch.arange(num_rows) + self.number
        self.state.inputs.positions.zero_()
        self.state.inputs.slots.zero_()
        self.state.inputs.positions[:num_rows], self.state.inputs.slots[:num_rows] = positions, torch.tensor(slots)
        step = Step(batch, torch.tensor(slots), positions, None, self.logprob)
        launched = draw(lazy_of(self._launching, self.hidden, num_rows, False), step)
        lazy = lazy_of(self.state, self.hidden, num_rows)
        sampling_info = types.SimpleNamespace(**{BATCH_ATTRIBUTE: batch, "grammars": None} | info)
        ready = replayed(time.perf_counter(), lazy, sampling_info, positions, self.logprob) if short else None
        drawn, how, before = ready and ready[0], "ready", self.state.counts.replayed
        if drawn is None:
            drawn = draw(lazy, step)
            how = "replayed" if self.state.counts.replayed > before else "launched"
        assert torch.equal(drawn.token_ids, launched.token_ids)
        assert drawn.logprobs is launched.logprobs is None or torch.equal(drawn.logprobs, launched.logprobs)
        return how


@pytest.fixture
def moving(monkeypatch) -> Moving:
    monkeypatch.setattr(draw_module, "FULL_STEP_SECONDS", 1000.0)
    return Moving()


WARM = ["launched"] * PATIENCE + ["replayed"] * SLOTS


@pytest.mark.parametrize("logprob", [False, True], ids=["tokens", "logprobs"])
def test_a_graph_gathers_the_rows_of_this_step_whichever_requests_they_are(moving, logprob):
    """One leaves and one joins at each step, in a slot that was used before."""
    moving.logprob, served = logprob, []
    for number in range(12):
        slots = [1 + number % 5, 1 + (number + 2) % 5, 1 + (number + 3) % 5][: 2 + number % 2]
        rows = [{"temperature": 0.5 + number + slot, "sampling_seed": number * slot} for slot in slots]
        served.append(moving.step(moving.batch_in(slots, *rows), slots))
    assert served == [*WARM, "replayed", *["ready"] * 5]
    assert moving.capture.replays == 8


def warm(moving: Moving) -> tuple[Batch, list[int]]:
    batch, slots = moving.batch_in([3, 1], {}, {"temperature": 0.5}), [3, 1]
    assert [moving.step(batch, slots) for _ in range(PATIENCE + SLOTS + 2)][-1] == "ready"
    return batch, slots


NOT_READY: dict[str, Callable[[Moving, Batch], dict[str, Any]]] = {
    "grammars": lambda moving, batch: {"grammars": [None, "a grammar"]},
    "a batch that is not known": lambda moving, batch: {BATCH_ATTRIBUTE: None},
    "rows that are not known": lambda moving, batch: {BATCH_ATTRIBUTE: moving.batch_in([3], {})},
    "other kinds of rows": lambda moving, batch: {BATCH_ATTRIBUTE: moving.batch_in([3, 1], {}, {"top_p": 0.5})},
    "a table that has grown": lambda moving, batch: {BATCH_ATTRIBUTE: moving.batch_in([5000, 1], {}, {})},
    "weights": lambda moving, batch: vars(moving.state.processor).update(logit_scale=0.5) or {},
    "graphs that have gone": lambda moving, batch: setattr(moving.state, "graphs", None) or {},
    "a lack of memory": lambda moving, batch: moving.state.out_of_memory(2) or {},
    "a while": lambda moving, batch: setattr(moving.state, "full_step_at", 0.0) or {},
}


@pytest.mark.parametrize("name", NOT_READY)
def test_what_may_have_changed_is_looked_at_in_full(moving, name):
    batch, _ = warm(moving)
    info = {BATCH_ATTRIBUTE: batch, "grammars": None}
    lazy = lazy_of(moving.state, moving.hidden, 2)
    assert replayed(time.perf_counter(), lazy, types.SimpleNamespace(**info), torch.arange(2), False) is not None
    info |= NOT_READY[name](moving, batch) or {}
    assert replayed(time.perf_counter(), lazy, types.SimpleNamespace(**info), torch.arange(2), False) is None


def test_a_graph_of_more_rows_at_the_same_place_has_no_short_way(moving):
    """SGLang may capture its model anew, and there."""
    batch, _ = warm(moving)
    larger = types.SimpleNamespace(data_ptr=moving.hidden.data_ptr, shape=(len(moving.hidden) + 1, WIDTH))
    lazy = LazyLogits(moving.hidden, VOCAB, moving.state, lambda hidden: pytest.fail("logits"), larger)[:2]
    info = types.SimpleNamespace(**{BATCH_ATTRIBUTE: batch, "grammars": None})
    assert replayed(time.perf_counter(), lazy, info, torch.arange(2), False) is None


def test_smaller_steps_than_one_that_found_no_memory_keep_their_short_way(moving):
    batch, slots = warm(moving)
    moving.state.out_of_memory(3)
    assert moving.step(batch, slots) == "ready"


def test_steps_known_without_another_look_are_no_more_than_a_bound(moving, monkeypatch):
    """Sets of kinds come again as other objects, once there have been too many."""
    monkeypatch.setattr(step_graphs, "MAX_READY", 3)
    kinds: list[dict] = [{}, {"temperature": 0}, {"sampling_seed": 1}, {"top_p": 0.5}]
    batches = [moving.batch_in([3, 1], {}, row) for row in kinds]
    for _ in range(2):
        for batch in batches:
            served = [moving.step(batch, [3, 1]) for _ in range(PATIENCE + SLOTS + 2)]
            assert served[-1] == "ready" and len(moving.state.graphs.ready) <= 3


@pytest.mark.parametrize("name", ["logits that were read", "no graph of SGLang's", "plain logits", "positions"])
def test_other_logits_have_no_short_way(moving, name):
    batch, _ = warm(moving)
    lazy: Any = lazy_of(moving.state, moving.hidden, 2, is_captured=name != "no graph of SGLang's")
    if name == "logits that were read":
        lazy.computed = torch.zeros(2, VOCAB)
    if name == "plain logits":
        lazy = torch.zeros(2, VOCAB)
    info = types.SimpleNamespace(**{BATCH_ATTRIBUTE: batch, "grammars": None})
    assert replayed(time.perf_counter(), lazy, info, torch.arange(3 if name == "positions" else 2), False) is None


@pytest.mark.parametrize("rows", [[{"logit_bias": {}}] * 2, [{}, {"beam_width": 2}]], ids=["edits", "SGLang's rows"])
def test_batches_that_need_more_than_a_draw_have_no_short_way(moving, rows):
    batch = moving.batch_in([1, 2], *rows)
    assert "ready" not in [moving.step(batch, [1, 2]) for _ in range(SETTLED + 4)]


def test_once_the_table_has_grown_graphs_read_the_new_one(moving):
    warm(moving)
    grown = moving.batch_in([5000, 1], {}, {"temperature": 0.5})
    assert moving.step(grown, [5000, 1]) == "launched"


def test_kernels_that_a_step_waits_for_are_counted(moving, monkeypatch):
    loaded = iter(range(100))
    monkeypatch.setattr(draw_module, "num_binaries", lambda: 3 * next(loaded))
    batch = moving.batch_in([1], {})
    for _ in range(PATIENCE + SLOTS + 3):
        moving.step(batch, [1])
    launches_and_replays = PATIENCE + SLOTS + 1
    assert moving.state.counts.late_compiles == 3 * launches_and_replays, "a ready step looks at none"


def test_graphs_that_are_captured_ahead_gather_their_rows(moving):
    while prepare_next(moving.state, moving.table):
        pass
    batch = moving.batch_in([2, 5, 1], {}, {"temperature": 3.0}, {"top_k": 1})
    assert [moving.step(batch, [2, 5, 1]) for _ in range(4)] == ["replayed", "ready", "ready", "ready"]


class Prefills:
    """Prefills of new requests in slots from 1 on, or with ``decodes`` decode steps that SGLang's graphs do not serve,
    whose hidden states are elsewhere each time. Each is compared with the same step of a head without graphs."""

    decodes = False
    drawn = staticmethod(lambda token_ids: None)  # called with the tokens of each step

    def __init__(self, **options: Any) -> None:
        self.capture, self.table = CountingCapture(), RowTable(CPU)
        self.state, self._launching = reading_state(capture=self.capture), reading_state()
        vars(self.state).update(options)
        self.number = 0

    def step(self, num_rows: int, edits: LogitEdits | None = None, first_slot: int = 1, **change: Any) -> str:
        """How the prefill was served: "ready", "replayed" or "launched". change: how its tensors are."""
        self.number += 1
        rows = [request(temperature=0.5 + self.number, sampling_seed=row) for row in range(num_rows)]
        slots = torch.arange(first_slot, first_slot + num_rows)
        batch = Batch.of_requests(rows, slots.tolist(), self.table, 1, True)
        hidden = change.get("hidden", lambda same: same)(hidden_states(CPU, num_rows, seed=self.number))
        slots, positions = (change.get(name, lambda same: same)(slots) for name in ("slots", "positions"))
        step = Step(batch, slots, positions, edits, False)
        replays = self.capture.replays
        lazy = LazyLogits(hidden, VOCAB, self.state, lambda hidden: pytest.fail("logits"), prefills=not self.decodes)
        info = types.SimpleNamespace(**{BATCH_ATTRIBUTE: batch, SLOTS_ATTRIBUTE: slots, "grammars": None})
        ready = None if edits is not None else replayed(time.perf_counter(), lazy, info, positions, False)
        drawn, how = ready and ready[0], "ready"
        if drawn is None:
            drawn = draw(lazy, step)
            how = "replayed" if self.capture.replays > replays else "launched"
        lazy = LazyLogits(hidden, VOCAB, self._launching, lambda hidden: pytest.fail("logits"), prefills=True)
        assert torch.equal(drawn.token_ids, draw(lazy, step).token_ids)
        self.drawn(drawn.token_ids)
        counts = self.state.counts
        if self.decodes:
            assert counts.replayed == self.capture.replays == self.number - counts.launched and counts.prefills == 0
        else:
            assert counts.prefills == self.number and counts.launched == 0
        return how


@pytest.fixture
def prefills(monkeypatch) -> Prefills:
    monkeypatch.setattr(draw_module, "FULL_STEP_SECONDS", 1000.0)
    return Prefills()


@pytest.mark.parametrize("num_rows", [1, 3, 32])
def test_prefills_are_replayed_from_a_place_of_their_own(prefills, num_rows):
    prefills.state.inputs = GraphInputs(*torch.ones(2, 64, dtype=torch.int64))  # of decode steps
    served = [prefills.step(num_rows) for _ in range(SETTLED + 4)]
    assert served == [*WARM, "replayed", *["ready"] * 3]
    assert prefills.state.counts.late_captures == SLOTS


def test_decode_steps_that_sglangs_graphs_do_not_serve_are_replayed_as_prefills_are(prefills):
    """On a rank of DP attention, where another one has a prefill; above SGLang's largest graph."""
    prefills.decodes = True
    assert [prefills.step(3) for _ in range(SETTLED + 4)] == [*WARM, "replayed", *["ready"] * 3]


def test_ranks_that_share_a_head_replay_prefills_alone_where_sglang_has_no_graph(prefills):
    prefills.state.exchange = object()
    assert prefills.state.stage_for(3, prefills=False) is None and prefills.state.stage_for(3) is not None


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_exchange_the_padding_of_a_prefill_too_where_it_is_launched(prefills, fails):
    prefills.capture.fails, exchange = fails, Exchanging(prefills.state)
    served = [prefills.step(3) for _ in range(SETTLED)]
    assert served == ["launched"] * PATIENCE + ["launched" if fails else "replayed"] * SLOTS
    assert len(exchange.rows) >= SETTLED and set(exchange.rows) == {4}


@pytest.mark.parametrize("copies", [False, True])
def test_the_tokens_of_a_prefill_stay_where_drafts_begin_with_them(prefills, copies, monkeypatch):
    """SGLang keeps them on the GPU until a verification, which prefills of other requests may be ahead of."""
    prefills.state.copies_staged, drawn = copies, []
    monkeypatch.setattr(prefills, "drawn", lambda tokens: drawn.append((tokens, tokens.clone())))
    assert [prefills.step(1) for _ in range(SETTLED + 4)][-1] == "ready"
    assert all(torch.equal(*pair) for pair in drawn) is copies


def test_the_graph_of_a_prefill_writes_the_lines_of_requests_that_are_in_other_batches(prefills):
    for _ in range(SETTLED + 1):
        prefills.step(2)
    Batch.of_requests([request(top_k=7)], [50], prefills.table, 1, True)
    assert prefills.step(2) == "ready"
    assert prefills.table.lines[50, 1] == 7


PLACES = {
    "strided hidden states": {"hidden": lambda hidden: torch.cat([hidden, hidden], 1)[:, : hidden.shape[1]]},
    "hidden states at an odd address": {
        "hidden": lambda hidden: torch.cat([hidden.new_zeros(1), hidden.flatten()])[1:].view(hidden.shape)
    },
    "slots of 32 bits": {"slots": torch.Tensor.int},
    "strided positions": {"positions": lambda positions: positions.repeat_interleave(2)[::2]},
}


@pytest.mark.parametrize("place", PLACES)
def test_prefills_whose_tensors_the_graph_cannot_read_are_launched(prefills, place):
    assert [prefills.step(2) for _ in range(SETTLED + 2)][-1] == "ready"
    assert prefills.step(2, **PLACES[place]) == "launched"
    assert prefills.step(2) == "ready"


def test_a_prefill_in_a_slot_beyond_the_table_is_drawn_from_a_larger_table(prefills):
    assert [prefills.step(2) for _ in range(SETTLED + 2)][-1] == "ready"
    assert prefills.step(2, first_slot=9000) == "launched"
    assert [prefills.step(2) for _ in range(SETTLED + 2)][-1] == "ready"


def test_a_prefill_whose_slots_are_not_known_has_no_short_way(prefills):
    assert [prefills.step(2) for _ in range(SETTLED + 2)][-1] == "ready"
    hidden, positions = hidden_states(CPU, 2), torch.arange(2)
    batch = Batch.of_requests([request(), request()], [1, 2], prefills.table, 1, True)
    lazy = LazyLogits(hidden, VOCAB, prefills.state, lambda hidden: pytest.fail("logits"), prefills=True)
    info = types.SimpleNamespace(**{BATCH_ATTRIBUTE: batch, "grammars": None})
    assert replayed(time.perf_counter(), lazy, info, positions, False) is None


@pytest.mark.parametrize("case", ["33 rows", "a bias", "a pipeline"])
def test_large_prefills_edited_ones_and_those_of_pipelines_are_launched(prefills, case):
    num_rows = 33 if case == "33 rows" else 2
    prefills.state.copies_tokens = case == "a pipeline"
    edits = make_edits() if case == "a bias" else None
    assert {prefills.step(num_rows, edits) for _ in range(SETTLED + 2)} == {"launched"}


@pytest.mark.parametrize("captured", [{}, {4: hidden_of(4)}], ids=["no graphs of SGLang's", "a model captured"])
def test_graphs_of_prefills_are_captured_ahead(prefills, captured):
    prefills.state.captured = captured
    while prepare_next(prefills.state, prefills.table):
        pass
    assert [prefills.step(2), prefills.step(2)] == ["replayed", "ready"]
    assert prefills.state.counts.late_captures == 0


class Pair:
    """A server that replays and one that launches. tokens: of the last step of both."""

    def __init__(self, device: torch.device, capture: CountingCapture, rows: list[dict], screened: bool) -> None:
        self.capture = capture
        self.replaying = SteadyServer(device, make_state(device, screened=screened, capture=capture), rows, PADDED)
        self.launching = SteadyServer(device, make_state(device, screened=screened), rows, PADDED)

    @property
    def both(self) -> tuple[SteadyServer, SteadyServer]:
        return self.replaying, self.launching

    def settle(self) -> None:
        """Step one server until its steps are replays. The other server skips these steps without drawing."""
        for _ in range(SOON):
            self.replaying.step()
        self.launching.positions += SOON
        assert self.capture.replays == SLOTS

    def step(self, **arguments: Any) -> bool:
        """One step of both, which must draw the same on the same paths. Whether it was replayed."""
        before, self.tokens = self.capture.replays, self.replaying.step(**arguments)
        assert self.tokens == self.launching.step(**arguments)
        assert self.replaying.paths == self.launching.paths
        return self.capture.replays > before


PADDED = 3


@pytest.fixture
def pair(device, one_rank, monkeypatch):
    monkeypatch.setattr(step_graphs, "PATIENCE", 1)

    def make(kind: str = "plain", screened: bool = True) -> Pair:
        return Pair(device, CountingCapture(device), KINDS[kind], screened)

    return make


@needs_sglang
@pytest.mark.parametrize("screened", [False, True], ids=["no screen", "screen"])
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_draw_what_launches_draw(pair, kind, screened):
    both = pair(kind, screened)
    both.settle()
    assert both.replaying.paths == ["fused"] * 2
    for _ in range(SLOTS):
        assert both.step()


def give_bias_and_grammar(server: SteadyServer, number: int) -> None:
    give_bias(server, 3)
    give_grammar(server, number)


def give_bias(server: SteadyServer, number: int) -> None:
    server.info.logit_bias = torch.zeros(2, VOCAB, device=server.device)
    server.info.logit_bias[0, number] = 300.0


def give_grammar(server: SteadyServer, number: int) -> None:
    server.info.grammars = [grammar(number), None]


GIVEN: dict[str, tuple[dict[str, Any], Callable[[SteadyServer, int], None]]] = {
    "bias": ({"logit_bias": {}}, give_bias),
    "grammar": ({"grammar": grammar}, give_grammar),
    "bias and grammar": ({"logit_bias": {}, "grammar": grammar}, give_bias_and_grammar),
    "penalties": ({"frequency_penalty": 0.5, "repetition_penalty": 1.1}, lambda server, number: None),
}


@needs_sglang
@pytest.mark.parametrize("name", GIVEN)
def test_steps_with_edits_are_found_at_once_and_replayed_with_the_edits_of_each(pair, monkeypatch, name):
    monkeypatch.setattr(draw_module, "FULL_STEP_SECONDS", 1000.0)
    found: list[bool] = []

    def find(*arguments: Any) -> Any:
        drawn = replayed(*arguments)
        found.append(drawn is not None)
        return drawn

    monkeypatch.setattr("sgl_flashsample.sglang.sampler.replayed", find)
    row, give = GIVEN[name]
    both = pair(screened=False)
    for server in both.both:
        server.runtime.settings.report_path = False
        server.state.inputs = GraphInputs(server.positions, torch.tensor([1, 2, 0], device=server.device))
        server.take([{"temperature": 1.0} | row, {"temperature": 1.0}])
        give(server, 3)
    both.settle()
    both.step()
    for number in range(5, 5 + 2 * SLOTS):
        for server in both.both:
            give(server, number)
        found.clear()
        assert both.step() and found == [True, False], "the other server has no graphs"
        if name != "penalties":
            assert both.tokens[0] == number
    if "grammar" in name:
        for server in both.both:
            server.info.grammars = None  # it went after its row was scheduled
        found.clear()
        both.step()
        assert found == [False, False]


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
    "hidden states outside of a graph": lambda server: vars(server).update(captured=False),
    "a grammar": lambda server: vars(server.info).update(grammars=[None, grammar(3)]),
    "a bias": lambda server: server.take([{"temperature": 1.0, "logit_bias": {"3": 300.0}}] * 2),
    "another kind": lambda server: server.take(KINDS["truncated"]),
}


@needs_sglang
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_at_the_next_step(pair, name):
    both = pair(screened=name.startswith(("weight", "screen")))
    both.settle()
    for server in both.both:
        CHANGES[name](server)
    assert not both.step(), "drawn with a graph of before"


MOVES: dict[str, Callable[[SteadyServer], object]] = {
    "other positions": lambda server: vars(server).update(positions=server.positions + 100),
    "positions of another dtype": lambda server: vars(server).update(positions=server.positions.int() + 100),
    "other requests": lambda server: server.take([{"rid": f"new {row}", "temperature": 5.0} for row in range(2)]),
    "a request less": lambda server: server.take([{"rid": "new", "temperature": 5.0}]),
    "a request more": lambda server: server.take([{"rid": f"new {row}", "temperature": 5.0} for row in range(3)]),
    "a greedy one beside": lambda server: server.take([{"temperature": 0.0}, {"temperature": 1.0}]),
}


@needs_sglang
@pytest.mark.parametrize("name", MOVES)
def test_another_batch_of_the_same_kind_and_size_is_replayed_from_its_first_step_on(pair, name):
    both = pair(screened=False)
    both.settle()
    for server in both.both:
        MOVES[name](server)
    assert all(both.step() for _ in range(SLOTS + 1))


@needs_sglang
def test_a_batch_that_is_launched_is_not_drawn_from_the_graphs_of_one_that_lay_there(pair):
    """Of FlashInfer's batches: the smallest top-p leaves one token, so that its own noise decides nothing."""
    both = pair()
    for server in both.both:
        server.state.head.table = DispatchTable(HeadTraits.of(server.state.head.lm_head), flashinfer=[2, PADDED])
    both.settle()
    assert both.step()
    for server in both.both:
        server.take([{"temperature": 1.0, "top_p": 1e-6}] * 2)
    assert not any(both.step() for _ in range(SOON + SLOTS))


@needs_sglang
def test_once_a_capture_has_failed_nothing_is_replayed(pair):
    both = pair()
    both.settle()
    both.capture.fails = True
    for server in both.both:
        server.take(KINDS["greedy"])
    assert not any(both.step() for _ in range(SOON)), "of another kind: captured anew, in vain"
    for server in both.both:
        server.take(KINDS["plain"])
    assert not any(both.step() for _ in range(SOON)), "of the kind of before"


@needs_sglang
def test_steps_with_logprobs_are_drawn_with_them_and_others_go_on(pair):
    both = pair(screened=False)
    both.settle()
    assert not both.step(return_logprob=True)
    assert both.step() and both.step()


@needs_sglang
@pytest.mark.parametrize("kind", ["plain", "truncated"])
def test_every_step_is_counted_once_whether_launched_or_replayed(pair, kind):
    both = pair(kind, screened=False)
    both.settle()
    server, steps = both.replaying, SOON + 4
    for _ in range(3):
        server.step()
    server.step(return_logprob=True)  # launched
    for _ in range(2):
        server.runtime.show_counts()  # nothing twice
    truncated = f", {2 * steps} of the rows with top-k, top-p or min-p (0 by a search)" if kind == "truncated" else ""
    summary = server.runtime.metrics.summary()
    assert summary.startswith(f"since the start: fused {2 * steps} rows in {steps} batches{truncated}; ")
    host = rf"; CPU time of fused sampling [\d.]+ us per batch over {steps} batches"
    assert re.search(rf"{host}; {SLOTS + 3} of {steps} decode steps by CUDA graphs$", summary)


@pytest.fixture
def short(pair, monkeypatch) -> Callable[[str], Pair]:
    """A pair whose replaying server takes the short way from its next step on."""
    monkeypatch.setattr(draw_module, "FULL_STEP_SECONDS", 1000.0)

    def make(kind: str) -> Pair:
        both = pair(kind, screened=False)
        runtime, state, device = both.replaying.runtime, both.replaying.state, both.replaying.device
        runtime.settings = dataclasses.replace(runtime.settings, report_path=False)
        state.inputs = GraphInputs(both.replaying.positions, torch.tensor([1, 2, 0], device=device))
        both.settle()
        both.replaying.step()
        both.launching.step()
        assert state.graphs.ready
        return both

    return make


@needs_sglang
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_the_short_way_draw_what_launches_draw_and_are_counted_once(short, kind):
    both = short(kind)
    server, steps = both.replaying, SOON + 4
    server.state.step_graphs = lambda *arguments, **options: pytest.fail("looked at in full")
    for _ in range(3):
        assert server.step() == both.launching.step()
    server.runtime.show_counts()
    truncated = f", {2 * steps} of the rows with top-k, top-p or min-p (0 by a search)" if kind == "truncated" else ""
    summary = server.runtime.metrics.summary()
    assert summary.startswith(f"since the start: fused {2 * steps} rows in {steps} batches{truncated}; ")
    assert summary.endswith(f"{SLOTS + 4} of {steps} decode steps by CUDA graphs")


@needs_sglang
def test_logprobs_of_the_short_way_are_those_of_launches(short):
    both = short("plain")
    server = both.replaying
    for _ in range(PATIENCE + SLOTS + 1):
        assert server.step(return_logprob=True) == both.launching.step(return_logprob=True)
    server.state.step_graphs = lambda *arguments, **options: pytest.fail("looked at in full")
    for _ in range(3):
        assert server.step(return_logprob=True) == both.launching.step(return_logprob=True)
        torch.testing.assert_close(server.logprobs, both.launching.logprobs, rtol=0, atol=1e-5)


@needs_sglang
def test_tokens_of_replayed_steps_are_counted(short):
    """They are not on the short way."""
    server, counted = short("plain").replaying, []
    server.runtime.token_counts = types.SimpleNamespace(add=lambda tokens, vocab: counted.append(tokens.tolist()))
    assert [server.step() for _ in range(3)] == counted


@needs_sglang
def test_a_replay_that_fails_leaves_this_step_and_all_others_to_sglang(pair, caplog):
    both = pair("greedy", screened=False)
    both.settle()

    def fails() -> None:
        raise RuntimeError("no such graph")

    for graph in both.capture.graphs:
        graph.replay = fails
    server, greedy = both.both
    assert server.step() == greedy.step()
    assert server.paths == ["native:error"] * 2
    assert server.step() == greedy.step()
    assert server.paths == ["native:inactive"] * 2
    assert server.runtime.inactive_reason == "RuntimeError: no such graph"


@needs_sglang
def test_a_replay_of_the_short_way_that_fails_leaves_this_step_and_all_others_to_sglang(short):
    both = short("greedy")
    for graph in both.capture.graphs:
        graph.replay = lambda: 1 / 0
    assert both.replaying.step() == both.launching.step()
    assert both.replaying.runtime.inactive_reason == "ZeroDivisionError: division by zero"


@needs_sglang
def test_once_the_fused_pass_is_off_no_step_is_replayed(short):
    both = short("greedy")
    replays = both.capture.replays
    both.replaying.runtime.disable("elsewhere, something failed")
    assert both.replaying.step() == both.launching.step() and both.capture.replays == replays


# On a GPU.


@pytest.mark.gpu
def test_a_capture_that_cuda_gives_up_leaves_pytorchs_allocator_and_generator_as_they_were(device):
    """Else memory that another stream has used is never given back, as SGLang copies the tokens of each step on a
    stream of its own; and its samplers draw no random numbers."""
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

    kept = capture(lambda: values + 1, capture.new_pool())  # PyTorch's generator has memory of its own while one lives
    before = steps(10)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            capture(invalidated, capture.new_pool())
        torch.rand(1, device=device)
    gc.collect()
    assert steps(1000) <= before
    del kept
    graph, added = capture(lambda: values + 1, capture.new_pool())
    graph.replay()
    assert added.sum().item() == 1024, "the next capture is one again"


def padded_with(edits: LogitEdits, rows: int) -> LogitEdits:
    additive, mask = (torch.nn.functional.pad(tensor, (0, 0, 0, rows)) for tensor in (edits.additive, edits.mask))
    return LogitEdits(additive, mask=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("edited", [False, True], ids=["as they are", "edited"])
@pytest.mark.parametrize("truncated", [False, True], ids=["plain", "truncated"])
@pytest.mark.parametrize("num_rows, padded", [(1, 1), (3, 4), (64, 64), (150, 200)])
def test_cuda_graphs_draw_the_tokens_of_launches(device, truncated, num_rows, padded, edited):
    """200 rows take the GEMM, 64 the fused pass. Requests change places at every step. It is compared with
    launches of as many rows: a GEMM of another size rounds otherwise."""
    torch.manual_seed(0)
    vocab = 50_257
    lm_head = make_head((torch.randn(vocab, 256, device=device) / 8).bfloat16())
    capture = CountingCapture(device)
    replaying = HeadState(Processor(vocab_size=vocab), lm_head, capture)
    launching = HeadState(Processor(vocab_size=vocab), lm_head)
    replaying.use_step_graphs = True
    row = {"top_k": 20, "top_p": 0.9} if truncated else {}
    row |= {"frequency_penalty": 1.0, "grammar": "a grammar"} if edited else {}
    batch = make_batch(*({"sampling_seed": seed} | row for seed in range(padded)), {"top_k": 1}, device=device)
    hidden = torch.randn(padded, 256, device=device).bfloat16()
    kept = []  # so that each is at a place of its own

    def drawn(state: HeadState, places: list[int], position: int, edits: LogitEdits | None) -> SampleOutput:
        slots = torch.tensor(places, device=device) + 1
        step = Step(batch.keep(places), slots, torch.full_like(slots, position), edits, True)
        return draw(lazy_of(state, hidden, len(places), state is replaying), step)

    for number in range(SETTLED + 2 * SLOTS):
        mask = torch.randint(-(2**31), 2**31, (num_rows, vocab // 32 + 1), dtype=torch.int32, device=device)
        kept.append(LogitEdits(torch.randn(num_rows, vocab, device=device), mask=mask))
        edits = kept[-1] if edited else None
        hidden.copy_(torch.randn(padded, 256, device=device))
        places = torch.randperm(padded)[:num_rows].tolist()
        replayed = drawn(replaying, places, number, edits)
        padding = 0 if number < PATIENCE else padded - num_rows
        launched = drawn(launching, places + [padded] * padding, number, edits and padded_with(edits, padding))
        assert torch.equal(replayed.token_ids, launched.token_ids[:num_rows])
        assert torch.equal(replayed.logprobs, launched.logprobs[:num_rows])
    assert capture.replays == SLOTS + 2 * SLOTS


@pytest.mark.gpu
def test_graphs_that_are_captured_ahead_on_a_gpu_draw_the_tokens_of_launches(device):
    state, plain = make_state(device, capture=CountingCapture(device)), make_state(device)
    state.captured = {rows: hidden_states(device, rows) for rows in (1, 4, 8)}
    table = RowTable(device)
    while prepare_next(state, table):
        pass
    settle(device)
    assert state.graphs.count == SLOTS * 3 * len(COMMON_KINDS)
    for rows in [[{"top_k": 1}], [{"temperature": 0.7}] * 3, [{"top_p": 0.9}] * 7, [{"top_k": 5}] * 8]:
        hidden = state.captured[next(size for size in (1, 4, 8) if size >= len(rows))]
        step = step_of(make_batch(*rows, device=device), torch.arange(len(rows), device=device), None, False)
        drawn = draw(lazy_of(state, hidden, len(rows)), step).token_ids
        assert torch.equal(drawn, draw(lazy_of(plain, hidden, len(rows), False), step).token_ids)
    assert state.counts == StepCounts(replayed=4)


@pytest.mark.gpu
def test_cuda_graphs_follow_the_weights_that_a_screen_serves(device):
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
        for number in range(SETTLED):
            hidden.copy_(torch.randn(hidden.shape, device=device).to(dtype_on(device)))
            positions.fill_(number)
            step = step_of(batch, positions, None, False)
            replayed = draw(lazy_of(state, hidden, 6), step).token_ids
            assert torch.equal(replayed, draw(lazy_of(plain, hidden, 6, False), step).token_ids)
        assert capture.replays == before + SLOTS
    assert state.head.screen.counters[ScreenCounter.ROWS] == 3 * 6 * SETTLED, "a replay counts too"


@pytest.mark.gpu
def test_rebuilding_graphs_takes_no_more_streams(device):
    state = make_state(device, screened=True)
    state.use_step_graphs = True
    streams = set()
    step, hidden = make_step(), hidden_states(device, 2)
    seed = torch.arange(2, device=device)

    def launches(batch: object) -> Launched:
        streams.add(torch.cuda.current_stream(device).cuda_stream)
        return Launched(SampleOutput(seed + 1, None, seed.float()))

    for _ in range(40):
        state.update(2)
        graphs = state.step_graphs(2, step.kind, edited=False)
        assert torch.equal(replay_once(graphs, launches, hidden).token_ids, seed + 1)
        state.weights_change()
        state.renew_screen()
    assert len(streams) == 1
