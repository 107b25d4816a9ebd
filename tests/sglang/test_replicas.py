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

from sgl_flashsample.sglang.batch import DRAWN_ATTRIBUTE, DrawKind
from sgl_flashsample.sglang.draw import draw
from sgl_flashsample.sglang.head import HeadState
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.replicas import Facts, ReplicaHooks, Step
from sgl_flashsample.sglang.row_table import TOP_K_OFF
from sgl_flashsample.sglang.runtime import RankError, Runtime
from sgl_flashsample.tools.server import free_port

# Ranks, ids of each, ids of the vocabulary: parts of whole groups of 16 ids, and parts whose groups lie on two ranks.
SHAPES = ("2x96x170", "4x44x170")


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
        for name, case in FUSED.items():
            batch, positions = batch_of(case.parts[rank])
            answer = answers[name]
            assert answer["computed"] == 0, name
            if not len(batch):
                assert answer["tokens"] == [], name
                continue
            lazy = LazyLogits(hidden_of(rank, len(batch)), vocab, state, pytest.fail)
            want = draw(lazy, step_of(batch, positions, None, True))
            assert answer["tokens"] == want.token_ids.tolist(), name
            if answer["logprobs"] is not None:
                assert answer["logprobs"] == pytest.approx(want.logprobs.tolist(), abs=2e-4), name


@pytest.mark.slow
def test_what_one_rank_leaves_to_sglang_all_ranks_compute_together(answered):
    _, ranks = answered
    for rank in ranks:
        for name in STEPS.keys() - FUSED.keys():
            assert rank[name]["computed"] == 1 and rank[name]["error"] < 1e-4, name
        assert rank["again"] == rank[replica_ranks.AGAIN]


def test_a_step_has_the_kind_that_serves_the_rows_of_all_ranks():
    idle, greedy = Facts(), Facts(rows=2)
    sampled = Facts(rows=1, all_greedy=False)
    small, large = (sampled._replace(truncated=True, top_k=top_k) for top_k in (64, TOP_K_OFF))
    assert Step.of([idle, greedy]) == Step(True, (0, 2), DrawKind(False, None, True, False), False)
    assert Step.of([sampled, greedy]).kind == DrawKind(False, None, False, False)
    assert Step.of([idle, small, sampled]).kind == DrawKind(True, 64, False, False)
    assert Step.of([small, large]).kind == DrawKind(True, None, False, False)
    assert Step.of([greedy, greedy._replace(return_logprob=True)]).return_logprob
    assert not Step.of([idle, idle]).fused and not Step.of([greedy, Facts(native=True, rows=1)]).fused


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
    for step, leaves_out in ((None, False), (Step.of([Facts(native=True)]), False), (Step.of([Facts(rows=1)]), True)):
        runtime.step_of_replicas = step
        found = runtime.can_defer(state.processor, hidden, state.lm_head, metadata)
        assert (found is state) is leaves_out


def test_a_rank_that_fails_or_reads_logits_alone_ends(shared):
    """The others wait for it in the exchange."""
    runtime, state = shared
    hooks, fused = ReplicaHooks(runtime), Step.of([Facts(rows=2), Facts()])
    batch = types.SimpleNamespace(
        sampling_info=types.SimpleNamespace(_flashsample_batch=make_batch({})),
        forward_mode=types.SimpleNamespace(is_decode=lambda: True),
    )
    lazy = LazyLogits(torch.zeros(1, 32), 600, state, pytest.fail)
    output = types.SimpleNamespace(next_token_logits=lazy)
    result = types.SimpleNamespace(logits_output=output)
    hooks._next = fused
    with pytest.raises(RankError, match="the batch has 1 rows and 1 hidden states; the ranks expect 2"):
        hooks.forward(lambda *_: result, None, batch)
    assert runtime.step_of_replicas is None and DRAWN_ATTRIBUTE not in vars(output)
