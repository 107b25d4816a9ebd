"""The decision plane in a server: who has one, that it draws the tokens of the fused pass, what its failure costs."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable

import pytest
import torch
from head_states import CountingCapture, Model, Processor, make_head, make_state, weights
from serving import needs_sglang
from sglang_batches import SteadyServer, grammar

from sgl_flashsample import decision_plane
from sgl_flashsample.decision_plane import DecisionPlane
from sgl_flashsample.sglang import runtime as runtime_module
from sgl_flashsample.sglang.exchange import Exchange
from sgl_flashsample.sglang.head import PATIENCE, SLOTS, HeadState
from sgl_flashsample.sglang.runtime import PLANE_VARIABLE, Runtime
from sgl_flashsample.sglang.screen_lifecycle import ScreenMode

pytest.importorskip("numba")

# Who has one.


@pytest.fixture
def started(server_config, monkeypatch, caplog, device) -> Callable[[str], Runtime]:
    """A server that has loaded its model, with this value of the variable; its kernels are right."""

    def checked(head, max_rows, table, **options):
        return types.SimpleNamespace(reason=None, refused=[], table=table)

    monkeypatch.setattr(runtime_module, "refuse_wrong", checked)
    caplog.set_level(logging.INFO, "sgl_flashsample")

    def start(value: str) -> Runtime:
        monkeypatch.setenv(PLANE_VARIABLE, value)
        runtime = Runtime(None)
        runtime.screen_mode = ScreenMode.ON
        runtime.prepare_model(Model(make_head(weights(device)), vocab_size=600))
        return runtime

    return start


def said(caplog) -> list[str]:
    return [record.message for record in caplog.records if "decision plane" in record.message.lower()]


@pytest.mark.slow
def test_a_server_that_asks_for_it_says_so_in_a_line_and_has_no_screen(started, caplog):
    (state,) = started("cpu").heads
    assert state.plane is not None and state.screen is None and state.status["decision_plane"]
    plane, no_screen = said(caplog)
    assert plane.startswith("flashsample: decision plane on, as FLASHSAMPLE_DECISION_PLANE is cpu: logits are copied")
    assert no_screen.endswith("same tokens: the decision plane draws")


@pytest.mark.slow
def test_without_the_variable_and_for_another_value_the_fused_pass_draws(started, caplog):
    (state,) = started("").heads
    assert state.plane is None and not said(caplog)
    (state,) = started("gpu").heads
    assert state.plane is None and not state.status["decision_plane"]


def shared(device: torch.device) -> HeadState:
    exchange = Exchange(types.SimpleNamespace(rank_in_group=0, world_size=2))
    return HeadState(Processor(vocab_size=1200), make_head(weights(device)), exchange=exchange)


@pytest.mark.parametrize("case", ["ranks", "drafts", "numba", "memory"])
def test_a_head_that_cannot_have_one_is_fused_and_a_line_says_why(runtime, monkeypatch, caplog, device, case):
    def no_memory(*arguments):
        raise RuntimeError("no pinned memory")

    state = shared(device) if case == "ranks" else make_state(device)
    runtime.verifies = case == "drafts"
    if case == "numba":
        monkeypatch.setattr(decision_plane, "unsupported_by_machine", lambda: "the cpu path needs Numba")
    if case == "memory":
        monkeypatch.setattr(DecisionPlane, "_host_memory", no_memory)
    runtime._build_plane(state)
    reasons = {
        "ranks": "several ranks share the LM head",
        "drafts": "drafts are verified on the device",
        "numba": "the cpu path needs Numba",
        "memory": "RuntimeError: no pinned memory",
    }
    assert state.plane is None
    assert said(caplog) == [f"flashsample: no decision plane, the fused pass draws: {reasons[case]}"]


# What it draws.

ROWS = [
    {"top_k": 1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {"7": 3.0}},
    {"sampling_seed": 11},
]


def make_server(device: torch.device, plane: bool, rows: list[dict] = ROWS) -> SteadyServer:
    state = make_state(device, capture=CountingCapture(device), dtype=torch.float32)
    state.plane = DecisionPlane(device, block_rows=2) if plane else None
    return SteadyServer(device, state, rows)


@needs_sglang
@pytest.mark.slow
@pytest.mark.parametrize("return_logprob", [False, True], ids=["tokens", "logprobs"])
def test_it_draws_the_tokens_of_the_fused_pass_step_by_step_without_graphs(one_rank, device, return_logprob):
    rows = [*ROWS, {"grammar": grammar(3, 5, 8)}]
    ours, fused = make_server(device, True, rows), make_server(device, False, rows)
    for _ in range(3):
        assert ours.step(return_logprob) == fused.step(return_logprob)
        assert ours.paths == ["fused"] * len(rows)
    assert ours.state.plane is not None and ours.state.graphs is None


@needs_sglang
@pytest.mark.slow
def test_a_batch_that_is_shared_with_sglangs_sampler_is_drawn_by_both(one_rank, device):
    rows = [{"top_k": 1}, {"top_k": 1, "mask": True}, {"sampling_seed": 3}]
    ours, fused = make_server(device, True, rows), make_server(device, False, rows)
    assert ours.step() == fused.step()
    assert ours.paths == ["fused", "native:sampling_mask", "fused"] and ours.state.plane is not None


@needs_sglang
@pytest.mark.slow
def test_what_fails_is_one_warning_and_the_fused_pass_goes_on_with_the_same_step(one_rank, device, caplog, monkeypatch):
    ours, fused = (make_server(device, plane, [{"top_k": 1}, {"sampling_seed": 11}]) for plane in (True, False))
    assert ours.step() == fused.step()
    monkeypatch.setattr(decision_plane, "sample_on_cpu", None)
    for _ in range(2 * PATIENCE + SLOTS):
        assert ours.step() == fused.step() and ours.paths == ["fused"] * 2
    assert ours.state.plane is None and not ours.state.status["decision_plane"]
    assert ours.state.graphs is not None, "steps are replayed again"
    (line,) = said(caplog)
    assert line.startswith(
        "flashsample: decision plane off until restart; from this step on the fused pass draws, same tokens: TypeError"
    )
