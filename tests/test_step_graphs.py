"""Draws of a batch that stays as it is, as CUDA graphs: which steps are replayed, what they read, what they leave."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from sgl_flashsample.kernels.features import LogitEdits
from test_runtime import head, lazy_rows, processor

from sgl_flashsample.api import SampleOutput
from sgl_flashsample.sglang import step_graphs
from sgl_flashsample.sglang.runtime import HeadState
from sgl_flashsample.sglang.step_graphs import PATIENCE, TURNS, StepGraphs

WARM_UP = 2 * PATIENCE - 1  # steps of one batch at one place before the first that is replayed


class FakeGraph:
    """Runs what was captured again, into the tensors of the first run, as a graph would."""

    def __init__(self, launches):
        self.launches, self.replays = launches, 0
        self.out, self.holds = launches()

    def replay(self):
        self.replays += 1
        self.out.token_ids.copy_(self.launches()[0].token_ids)


def fake_capture(launches):
    graph = FakeGraph(launches)
    return graph, (graph.out, graph.holds)


def draw(hidden, params, return_logprob):
    """A "token" that depends on everything a graph reads."""
    value = hidden[:, 0].double() + 10 * params.position + 1000 * params.seed + 1e6 * params.temperature
    if params.truncation is not None:
        value = value + 1e8 * params.truncation.top_k
    if params.edits is not None:
        value = value + 1e10 * params.edits.additive[:, 0].double()
    token_ids = value.long()
    return SampleOutput(token_ids, None, torch.zeros(len(token_ids))), None


def make(capture=fake_capture, max_rows=4):
    return StepGraphs(draw, max_rows, torch.device("cpu"), capture)


def rows_like(rows, **changes):
    return dataclasses.replace(rows, **changes)


@pytest.fixture
def batch():
    _, rows = lazy_rows(torch.device("cpu"))
    return rows, torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)


def steps(graphs, batch, count, return_logprob=False):
    rows, hidden, positions = batch
    return [graphs.step(rows, hidden, None, positions, return_logprob) for _ in range(count)]


def test_a_batch_is_replayed_once_it_has_stayed_as_it_is(batch):
    found = steps(make(), batch, WARM_UP + 3)
    assert [out is not None for out in found] == [False] * WARM_UP + [True] * 3


def test_a_replay_reads_this_steps_hidden_states_and_positions(batch):
    graphs, (rows, hidden, positions) = make(), batch
    steps(graphs, batch, WARM_UP + TURNS)
    for step in range(5):
        hidden[:, 0], positions[:] = step, torch.tensor([step, 2 * step])
        assert graphs.step(rows, hidden, None, positions, False).token_ids.tolist() == [
            1_000_000 + 11 * step,
            1_000_000 + 21 * step,
        ]


def test_another_batch_at_the_same_place_is_replayed_with_its_own_parameters(batch):
    graphs, (rows, hidden, positions) = make(), batch
    steps(graphs, batch, WARM_UP + TURNS)
    other = rows_like(rows, seed=torch.tensor([7, 8]), temperature=torch.tensor([0.5, 2.0]))
    found = steps(graphs, (other, hidden, positions), PATIENCE)
    assert found[:-1] == [None] * (PATIENCE - 1)
    assert found[-1].token_ids.tolist() == [507_000, 2_008_000]


def test_tokens_outlive_the_next_step(batch):
    graphs, (rows, hidden, positions) = make(), batch
    steps(graphs, batch, WARM_UP)
    kept = []
    for step in range(4 * TURNS):
        positions[:] = step
        kept.append(graphs.step(rows, hidden, None, positions, False).token_ids)
        for age, tokens in enumerate(reversed(kept[-TURNS:])):
            assert tokens.tolist() == [1_000_000 + 10 * (step - age)] * 2


def test_batches_that_take_turns_are_launched(batch):
    rows, hidden, positions = batch
    graphs, other = make(), rows_like(rows)
    for _ in range(4 * WARM_UP):
        assert graphs.step(rows, hidden, None, positions, False) is None
        assert graphs.step(other, hidden, None, positions, False) is None


def test_a_truncation_is_part_of_what_a_graph_reads(batch):
    graphs, (rows, hidden, positions) = make(), batch
    needs = ((False, True, False),) * 2
    truncated = rows_like(rows, needs=needs, top_k=torch.tensor([3, 4], dtype=torch.int32))
    steps(graphs, batch, WARM_UP + TURNS)
    found = steps(graphs, (truncated, hidden, positions), WARM_UP + 1)
    assert found[:-1] == [None] * WARM_UP  # a graph of its own
    assert found[-1].token_ids.tolist() == [301_000_000, 401_000_000]


def test_addresses_and_logprobs_have_graphs_of_their_own(batch):
    graphs, (rows, hidden, positions) = make(), batch
    steps(graphs, batch, WARM_UP + TURNS)
    for other in (hidden.clone(), positions.clone()):
        arguments = (other, positions) if other.dtype == hidden.dtype else (hidden, other)
        assert graphs.step(rows, arguments[0], None, arguments[1], False) is None
    assert graphs.step(rows, hidden, None, positions, True) is None
    assert graphs.step(rows, hidden, None, positions, False) is not None


def test_edits_are_read_where_this_step_has_them(batch):
    graphs, (rows, hidden, positions) = make(), batch
    places = [LogitEdits(additive=torch.full((2, 8), value), rows=positions.int()) for value in (1.0, 2.0)]
    found = []
    for step in range(2 * (WARM_UP + TURNS)):
        edits = places[step % 2]  # a step's penalties are made anew, where those of the last but one were
        edits.additive.fill_(step)
        found.append(graphs.step(rows, hidden, edits, positions, False))
        if found[-1] is not None:
            assert found[-1].token_ids.tolist() == [1_000_000 + step * 10**10] * 2
    assert all(out is not None for out in found[-4:])
    assert graphs.step(rows, hidden, None, positions, False) is None


def test_a_batch_larger_than_the_buffers_is_launched(batch):
    assert steps(make(max_rows=1), batch, 3 * WARM_UP) == [None] * 3 * WARM_UP


def test_graphs_that_are_not_used_make_room(batch, monkeypatch):
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 2)
    graphs, (rows, hidden, positions) = make(), batch
    places = [positions.clone() for _ in range(3)]
    for place in (0, 1, 0, 2):
        steps(graphs, (rows, hidden, places[place]), WARM_UP + 1)
    assert graphs.step(rows, hidden, None, places[0], False) is not None
    assert graphs.step(rows, hidden, None, places[1], False) is None


def test_a_capture_that_fails_leaves_the_launches_and_warns_once(batch, caplog):
    def fails(launches):
        raise RuntimeError("no stream")

    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        assert steps(make(fails), batch, 3 * WARM_UP) == [None] * 3 * WARM_UP
    assert [record.message for record in caplog.records] == [
        "flashsample: draws are not captured as CUDA graphs: RuntimeError: no stream"
    ]


def test_another_head_or_workspace_has_no_old_graphs(device):
    state = HeadState(processor(), head(torch.ones(104, 16, device=device)))
    _, rows = lazy_rows(device)
    hidden, positions = torch.ones(2, 16, device=device), torch.zeros(2, dtype=torch.int64, device=device)

    def graphs():
        state.sample(hidden, rows, None, positions, False)
        return state.graphs

    assert graphs() is None  # not on a CPU
    state.graphs = first = make()
    state.replays = True
    assert graphs() is first
    state.scratch(600)
    assert state.graphs is None
    state.graphs = first
    state.lm_head.weight = torch.zeros(104, 16, device=device)
    state.current()
    assert state.graphs is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA graphs")
@pytest.mark.parametrize("edited", [False, True], ids=["as they are", "edited"])
@pytest.mark.parametrize("truncated", [False, True], ids=["plain", "truncated"])
@pytest.mark.parametrize("num_rows", [1, 3, 64, 200])
def test_replayed_steps_draw_the_tokens_of_launches(truncated, num_rows, edited):
    """200 rows take the GEMM, 64 the fused pass."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    weight = (torch.randn(50257, 256, device=device) / 8).bfloat16()
    state = HeadState(processor(vocab_size=50257), head(weight))
    _, two = lazy_rows(device)
    ones = torch.ones(num_rows, device=device)
    rows = dataclasses.replace(
        two,
        reasons=(None,) * num_rows,
        greedy=(False,) * num_rows,
        tempered_greedy=(False,) * num_rows,
        temperature=ones,
        seed=torch.arange(num_rows, device=device),
        needs=((False, truncated, False),) * num_rows,
        edits=two.edits[:1] * num_rows,
        top_k=(ones * 20).int(),
        top_p=ones,
        min_p=0 * ones,
        seeded=(True,) * num_rows,
        top_ks=(20,) * num_rows,
    )
    hidden = torch.randn(num_rows, 256, device=device).bfloat16()
    positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
    additive = torch.zeros(num_rows, 50257, device=device)
    edits = LogitEdits(additive=additive, rows=torch.ones(num_rows, dtype=torch.int32, device=device))
    edits = edits if edited else None
    state.replays = True
    for step in range(WARM_UP + 3 * TURNS):
        hidden.copy_(torch.randn(num_rows, 256, device=device))
        additive.copy_(torch.randn(num_rows, 50257, device=device))
        positions.fill_(step)
        replayed = state.sample(hidden, rows, edits, positions, True)
        params = step_graphs.BatchParams(rows.temperature, rows.seed, positions, rows.truncation, edits)
        launched = state._draw(hidden, params, True)[0]
        assert torch.equal(replayed.token_ids, launched.token_ids)
        assert torch.equal(replayed.logprobs, launched.logprobs)
    assert [len(known.captured) for known in state.graphs._steps.values()] == [TURNS]
