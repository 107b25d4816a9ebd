"""A batch that stays as it is: its steps are repeated, they draw what launches draw, and whatever changes is noticed at
the next step."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from batches import request, samplers
from serving import needs_sglang
from sgl_flashsample.kernels.features import Edit
from test_screening import make_state
from test_step_graphs import WARM_UP, fake_capture

from sgl_flashsample.sglang import head_state, hooks, steady
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.rows import Rows
from sgl_flashsample.sglang.step_graphs import TURNS, StepGraphs

pytestmark = needs_sglang
ROWS = 3
SETTLED = WARM_UP + TURNS + 1  # steps until all that come are repeated
PLAIN, TRUNCATED = {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}


class Server:
    """A sampler and the batch that it draws for. replays: as on a GPU."""

    def __init__(self, device, replays: bool, screened: bool, params: dict) -> None:
        self.device, self.sampler = device, samplers()[0]
        self.runtime = self.sampler.runtime
        self.runtime.report_path = False
        self.state = make_state(device, screened=screened)
        self.state.replays = replays
        self.info = types.SimpleNamespace(grammars=None)
        self.take([request(f"r{row}", **params) for row in range(ROWS)])
        generator = torch.Generator().manual_seed(3)
        weight = self.state.lm_head.weight
        self.hidden = torch.randn(ROWS, weight.shape[1], generator=generator).to(device, weight.dtype)
        self.positions = torch.arange(ROWS, device=device)

    def take(self, requests) -> None:
        setattr(self.info, hooks.ROWS_ATTRIBUTE, Rows.of_requests(requests, 1, False, self.device))

    def step(self, return_logprob: bool = False, **more) -> list[int]:
        self.positions += 1
        lazy = LazyLogits(self.hidden, self.state.processor.vocab_size, self.state, self.state_logits)
        output = types.SimpleNamespace(next_token_logits=lazy, next_token_logprobs=None)
        nothing = ([0] * ROWS, [None] * ROWS)
        return self.sampler(output, self.info, return_logprob, *nothing, self.positions, **more).tolist()

    def state_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.state.lm_head.weight.T)[:, : self.state.processor.vocab_size].float()

    @property
    def repeated(self) -> int:
        """Steps of the present batch that were repeated."""
        return 0 if self.runtime.steady is None else self.runtime.steady.steps


@pytest.fixture
def servers(device, monkeypatch):
    """One that replays, and one that launches."""
    if device.type != "cuda":
        monkeypatch.setattr(head_state, "StepGraphs", lambda *given: StepGraphs(*given, fake_capture))
    monkeypatch.setattr(steady, "LOOK_SECONDS", 1000.0)

    def make(screened: bool = True, params: dict = PLAIN) -> tuple[Server, Server]:
        return Server(device, True, screened, params), Server(device, False, screened, params)

    return make


def assert_steps_alike(servers, count: int, **arguments) -> None:
    for _ in range(count):
        assert servers[0].step(**arguments) == servers[1].step(**arguments)


@pytest.mark.parametrize("screened", [False, True])
@pytest.mark.parametrize("params", [PLAIN, TRUNCATED, {"temperature": 0.0}], ids=["plain", "truncated", "greedy"])
def test_steps_are_repeated_and_draw_what_launches_draw(servers, screened, params):
    ours, launching = servers(screened, params)
    assert_steps_alike((ours, launching), SETTLED)
    before = ours.repeated
    assert_steps_alike((ours, launching), 4)
    assert ours.repeated == before + 4 and launching.runtime.steady is None


def write_in_place(server: Server) -> None:
    with torch.no_grad():
        server.state.lm_head.weight.neg_()


def replace_weight(server: Server) -> None:
    server.state.lm_head.weight = -server.state.lm_head.weight


def as_sglang_updates(server: Server) -> None:
    server.state.weights_change()
    server.state.lm_head.weight.data.neg_()


def cap_logits(server: Server) -> None:
    server.state.processor.final_logit_softcapping = 0.5


def scale_logits(server: Server) -> None:
    server.state.processor.logit_scale = 0.1


def take_others(server: Server) -> None:
    server.take([request(f"other{row}", **PLAIN) for row in range(ROWS)])


def move_states(server: Server) -> None:
    server.hidden = -server.hidden


def move_positions(server: Server) -> None:
    server.positions = server.positions + 100


def narrow_positions(server: Server) -> None:
    server.positions = server.positions.int() + 100


CHANGES = [write_in_place, replace_weight, as_sglang_updates, cap_logits, scale_logits]
CHANGES += [take_others, move_states, move_positions, narrow_positions]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed_at_the_next_step(servers, change):
    both = servers()
    assert_steps_alike(both, SETTLED)
    assert both[0].repeated
    for server in both:
        change(server)
    assert both[0].step() == both[1].step()
    assert not both[0].repeated, "everything was asked"


def test_a_step_that_is_not_the_last_one_s_is_none_of_ours(servers):
    ours, _ = servers()
    for _ in range(SETTLED):
        ours.step()
    repeat, rows, positions = ours.runtime.steady.step, hooks.rows_of(ours.info), ours.positions

    def lazy(source=ours.state, hidden=ours.hidden) -> LazyLogits:
        return LazyLogits(hidden, ours.state.processor.vocab_size, source, ours.state_logits)

    read = lazy()
    for other in (read.dense(), read, lazy(make_state(ours.device)), lazy(hidden=ours.hidden[:2])):
        assert repeat(0.0, other, rows, positions) is None
    assert repeat(0.0, lazy(), None, positions) is None
    assert repeat(0.0, lazy(), rows, positions[:2]) is None
    assert repeat(0.0, lazy(), rows, positions.view(torch.int32)[:ROWS]) is None, "other numbers at the same place"
    assert repeat(0.0, lazy(), rows, positions) is not None
    ours.state.graphs = None  # as after a change of what they were captured with
    assert repeat(0.0, lazy(), rows, positions) is None


def test_steps_with_logprobs_are_drawn_with_them_and_others_go_on(servers):
    both = servers(screened=False)
    assert_steps_alike(both, SETTLED)
    assert_steps_alike(both, 1, return_logprob=True)
    assert not both[0].repeated
    assert_steps_alike(both, 3)
    assert both[0].repeated


def test_what_must_be_seen_of_every_step_is_not_repeated(servers):
    for name, value in {"report_path": True, "syncs_tokens": True, "trace": types.SimpleNamespace(add=print)}.items():
        ours, _ = servers(screened=False)
        setattr(ours.runtime, name, value)
        ours.sampler._sync_token_ids_across_tp = lambda *given: None
        for _ in range(SETTLED):
            ours.step()
        assert ours.runtime.steady is None, name
    ours, _ = servers(screened=False)
    rows = hooks.rows_of(ours.info)
    penalised = dataclasses.replace(rows, edits=(Edit.ADDITIVE,) * ROWS)
    setattr(ours.info, hooks.ROWS_ATTRIBUTE, penalised)
    ours.info.penalizer_orchestrator = None
    ours.info.acc_additive_penalties = torch.zeros(ROWS, ours.state.processor.vocab_size, device=ours.device)
    ours.info.acc_scaling_penalties = None
    for _ in range(SETTLED):
        ours.step()
    assert ours.runtime.steady is None and ours.state.graphs.replays(penalised)


def test_a_grammar_ends_it(servers):
    ours, _ = servers(screened=False)
    for _ in range(SETTLED):
        ours.step()
    ours.info.grammars, asked = [object()] * ROWS, []
    ours.runtime.look = lambda: asked.append(True)
    ours.runtime.grammar_problem = "none are fused here"
    ours.sampler._native = lambda *given, **more: torch.zeros(ROWS, dtype=torch.int64)
    assert ours.step() == [0] * ROWS and asked


@pytest.mark.parametrize("params", [PLAIN, TRUNCATED], ids=["plain", "truncated"])
def test_every_step_is_counted_once_and_none_later_than_the_next_look(servers, params):
    ours, _ = servers(params=params)
    counters = ours.runtime.counters
    for _ in range(SETTLED + 4):
        ours.step()
    waiting = ours.repeated
    assert waiting >= 4
    ours.runtime.look()
    assert ours.runtime.steady is None
    assert counters._batches["fused", ""] == counters._host_batches == SETTLED + 4
    assert counters._rows["fused", ""] == ROWS * (SETTLED + 4)
    assert counters._truncated == (ROWS * (SETTLED + 4) if params is TRUNCATED else 0)
    assert counters._host_seconds > 0
    ours.runtime.look()
    assert counters._host_batches == SETTLED + 4, "nothing twice"


def test_everything_is_asked_again_after_a_while(servers, monkeypatch):
    ours, launching = servers()
    monkeypatch.setattr(steady, "LOOK_SECONDS", 0.0)
    assert_steps_alike((ours, launching), SETTLED + 3)
    assert ours.runtime.counters._host_batches == SETTLED + 3 and not ours.repeated


def test_a_replay_that_fails_leaves_this_step_and_all_others_to_sglang(servers, monkeypatch):
    ours, _ = servers(screened=False)
    for _ in range(SETTLED):
        ours.step()

    def fails(self, hidden, positions):
        raise RuntimeError("no such graph")

    monkeypatch.setattr(StepGraphs, "again", fails)
    ours.sampler._native = lambda *given, **more: torch.full((ROWS,), 7)
    assert ours.step() == [7] * ROWS == ours.step()
    assert ours.runtime.problem == "RuntimeError: no such graph" and ours.runtime.steady is None
