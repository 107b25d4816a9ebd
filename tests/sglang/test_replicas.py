"""Ranks of DP attention that share an LM head: each draws its requests' tokens with the others, or all leave a step to
SGLang, and none waits. How ranks exchange draws is in ``test_exchange.py``."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest
import replica_ranks
import torch
from fake_head import FakeHead
from head_states import CPU, Processor, make_batch, make_head, make_state, metadata_of, serve, step_of
from replica_ranks import FUSED, STEPS, batch_of, hidden_of, weight_of
from sglang_batches import request

from sgl_flashsample.sglang import head as head_module
from sgl_flashsample.sglang.batch import DRAWN_ATTRIBUTE, DrawKind, GrammarError
from sgl_flashsample.sglang.draw import draw
from sgl_flashsample.sglang.head import HeadState
from sgl_flashsample.sglang.hooks import StepHooks
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.replicas import Facts, ReplicaHooks, Step
from sgl_flashsample.sglang.row_table import TOP_K_OFF
from sgl_flashsample.sglang.runtime import RankError, Runtime
from sgl_flashsample.sglang.step_graphs import Drawn
from sgl_flashsample.tools.server import free_port

# Ranks, ids of each, ids of the vocabulary: parts of whole groups of 16 ids, and parts whose groups lie on two ranks.
SHAPES = ("2x96x170", "4x44x170")
FUSED_STEP = Step.of([Facts(rows=2), Facts()])


@pytest.fixture(scope="module", params=SHAPES)
def answered(request, tmp_path_factory) -> tuple[int, list[dict]]:
    """The ids of the vocabulary, and the answers of each rank to each step."""
    command = [sys.executable, replica_ranks.__file__, str(free_port()), str(tmp_path_factory.mktemp("ranks"))]
    ran = subprocess.run([*command, request.param], capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return int(request.param.split("x")[2]), json.loads(ran.stdout)


@pytest.mark.slow
def test_each_rank_gets_the_tokens_of_its_requests_that_the_reference_draws_from_the_whole_head(answered):
    vocab, ranks = answered
    state = HeadState(Processor(vocab_size=vocab), make_head(weight_of(vocab)))
    state.head = FakeHead(state.head.lm_head, announces_changes=True)
    for rank, answers in enumerate(ranks):
        for name, case in STEPS.items():
            batch, positions = batch_of(case.parts[rank])
            answer = answers[name]
            if not answer["tokens"]:
                assert answer["tokens"] is None or not len(batch), name
                continue
            lazy = LazyLogits(hidden_of(rank, len(batch)), vocab, state, pytest.fail)
            want = draw(lazy, step_of(batch, positions, None, True))
            assert answer["tokens"] == want.token_ids.tolist(), name
            if answer["logprobs"] is not None:
                assert answer["logprobs"] == pytest.approx(want.logprobs.tolist(), abs=2e-4), name
        assert answers["again"] == answers[replica_ranks.AGAIN]


@pytest.mark.slow
def test_a_step_in_which_one_rank_needs_logits_has_those_of_all_ranks_and_no_other_step_has_any(answered):
    _, ranks = answered
    for rank in ranks:
        for name in STEPS:
            fused = name in FUSED
            assert (rank[name]["computed"], rank[name]["drawn together"]) == (0 if fused else 1, fused), name


def test_a_step_has_the_kind_that_serves_the_rows_of_all_ranks():
    idle, greedy = Facts(), Facts(rows=2)
    sampled = Facts(rows=1, all_greedy=False)
    small, large = (sampled._replace(truncated=True, top_k=top_k) for top_k in (64, TOP_K_OFF))
    assert Step.of([idle, greedy]) == Step(True, (0, 2), DrawKind(False, None, True, False), False)
    assert Step.of([sampled, greedy]).kind == DrawKind(False, None, False, False)
    assert Step.of([idle, small, sampled]).kind == DrawKind(True, 64, False, False)
    assert Step.of([small, large]).kind == DrawKind(True, None, False, False)
    assert Step.of([greedy, greedy._replace(return_logprob=True)]).return_logprob
    assert not Step.of([idle, idle]).fused and not Step.of([greedy, Facts(needs_logits=True, rows=1)]).fused


@pytest.fixture
def shared(server_config) -> tuple[Runtime, HeadState]:
    """The runtime of a rank whose head replicas share, and the head."""
    runtime, state = Runtime(None), make_state(CPU)
    state.exchange, state.spans_replicas = types.SimpleNamespace(rank=0, num_ranks=2), True
    serve(runtime, state)
    return runtime, state


@pytest.mark.parametrize("mode", ["decode", "extend", "idle"])
@pytest.mark.parametrize("num_rows", [0, 2])
@pytest.mark.parametrize("fields", [{}, {"is_prefill_only": True}, {"extend_return_logprob": True}], ids=str)
def test_whether_logits_are_left_out_follows_from_what_all_ranks_know(shared, mode, num_rows, fields):
    runtime, state = shared
    hidden, metadata = torch.zeros(num_rows, 32), metadata_of(mode, **fields)
    needs_logits = FUSED_STEP._replace(fused=False)
    for step, leaves_out in ((None, False), (needs_logits, False), (FUSED_STEP, True)):
        runtime.step_of_replicas = step
        found = runtime.can_defer(state.processor, hidden, state.lm_head, metadata)
        assert (found is state) is leaves_out


def test_a_rank_that_fails_in_a_step_ends(shared):
    """The others wait for it in the exchange."""
    runtime, state = shared
    hooks = ReplicaHooks(runtime)
    batch = types.SimpleNamespace(
        sampling_info=types.SimpleNamespace(_flashsample_batch=make_batch({})),
        forward_mode=types.SimpleNamespace(is_decode=lambda: True),
    )
    output = types.SimpleNamespace(next_token_logits=LazyLogits(torch.zeros(1, 32), 600, state, pytest.fail))
    hooks._next = FUSED_STEP
    with pytest.raises(RankError, match="the batch has 1 rows and 1 hidden states; the ranks expect 2"):
        hooks.forward(lambda *_: types.SimpleNamespace(logits_output=output), None, batch)
    assert runtime.step_of_replicas is None


@pytest.mark.parametrize("captured", [False, True])
def test_a_rank_on_which_logits_are_read_alone_ends(shared, pretend_gpu, captured):
    runtime, state = shared
    runtime.step_of_replicas = FUSED_STEP
    pretend_gpu(True, is_capturing=captured)
    hidden = torch.zeros(2, 32)
    arguments = state.processor, hidden, state.lm_head, metadata_of("decode")
    lazy = StepHooks(runtime).get_logits(pytest.fail, *arguments)
    with pytest.raises(RankError, match="logits that all ranks compute together are read on this one alone"):
        lazy + 0


def test_a_call_of_the_sampler_for_more_than_the_ranks_agreed_on_ends_the_rank(runners, head, hidden, info_of):
    sampler, state = runners[0].sampler, head.state
    state.exchange = types.SimpleNamespace(rank=0, num_ranks=2)
    serve(sampler.runtime, state)
    tokens = torch.tensor([3, 5])
    info, positions = info_of([request("a"), request("b")]), torch.arange(2)

    def sample(return_logprob: bool, top: int) -> torch.Tensor:
        output = types.SimpleNamespace(next_token_logits=head.lazy(hidden(2)), customized_info=None)
        setattr(output, DRAWN_ATTRIBUTE, Drawn(tokens, None))
        return sampler.forward(output, info, return_logprob, [top] * 2, [None] * 2, positions)

    assert sample(False, 0) is tokens
    for asked in ((True, 0), (True, 2)):
        with pytest.raises(RankError, match="asks for more than the ranks agreed on"):
            sample(*asked)


def test_rows_of_logits_get_what_hidden_states_would_and_sglang_serves_those_that_need_it(
    runners, head, hidden, info_of
):
    """SGLang's ranks have computed them together."""
    runtime, states = runners[0].sampler.runtime, hidden(5)
    rows = ({"temperature": 0.8}, {"top_p": 0.9, "frequency_penalty": 1.5}, {"temperature": 0.0}, {"top_k": 7})
    rows = (*rows, {"temperature": 0.0, "mask": True})

    def sample(logits: torch.Tensor) -> tuple[list, ...]:
        info = info_of([request(f"r{place}", **row) for place, row in enumerate(rows)])
        tokens, output = runners[0].sample(logits, info, True, top=[0, 2, 0, 0, 0])
        return tokens.tolist(), output.next_token_logprobs.tolist(), output.customized_info["flashsample_path"]

    want, head.state.spans_replicas = sample(head.lazy(states)), True
    serve(runtime, head.state)
    logits = ReplicaHooks(runtime)._rows_of(head.logits(states))
    got = sample(logits)
    assert (got[0], got[2]) == (want[0], want[2]) and got[1] == pytest.approx(want[1], abs=2e-4)
    assert got[2] == [*["fused"] * 4, "native:sampling_mask"]


def test_a_grammar_that_one_rank_cannot_read_is_sglangs_on_that_rank(runners, head, hidden, info_of, monkeypatch):
    """Other ranks do not wait for what it draws from logits."""
    runtime, state = runners[0].sampler.runtime, head.state
    state.exchange, state.spans_replicas = types.SimpleNamespace(rank=0, num_ranks=2), True
    serve(runtime, state)

    def unreadable(*arguments: object) -> None:
        raise GrammarError("a fault", everywhere=False)

    monkeypatch.setattr("sgl_flashsample.sglang.sampler.edits_of", unreadable)
    logits = ReplicaHooks(runtime)._rows_of(head.logits(hidden(2)))
    _, output = runners[0].sample(logits, info_of([request("a"), request("b")]))
    assert output.customized_info == {"flashsample_path": ["native:error"] * 2}
    assert (runtime.no_grammars_reason, runtime.inactive_reason) == ("a fault", None)


def test_logits_of_another_kind_stay_with_sglang(shared):
    hooks, logits = ReplicaHooks(shared[0]), torch.zeros(2, 600)
    assert type(hooks._rows_of(logits)) is LazyLogits
    for other in (logits.half(), logits.T, None):
        assert hooks._rows_of(other) is other


def test_a_head_whose_ranks_cannot_read_sglangs_logits_is_refused(shared, monkeypatch):
    _, state = shared
    monkeypatch.setattr(head_module, "compare_rows_with_reference", lambda size, width, dtype, *_, **__: f"{dtype}")
    assert state._unsupported_logits(4, False) == "torch.float32"
