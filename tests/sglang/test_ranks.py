"""Two ranks that share an LM head, one of them with a fault: both serve the same, or neither goes on, and none waits.

What they exchange is in ``test_exchange.py``, servers of several ranks are in ``test_server.py``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import re
import subprocess
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_head import Script
from head_states import (
    CPU,
    RANK_ROWS,
    VOCAB,
    CountingCapture,
    hidden_states,
    make_state,
    metadata_of,
    model_of,
    rank_batches,
    serve,
    step_of,
)
from sglang_batches import request

from sgl_flashsample.kernels.params import SampleOutput
from sgl_flashsample.kinds import SamplingPath
from sgl_flashsample.logprobs import Logprobs, WantedLogprobs
from sgl_flashsample.sglang.batch import GrammarError, check_mask, grammar_mask
from sgl_flashsample.sglang.draw import draw
from sgl_flashsample.sglang.exchange import RankSync
from sgl_flashsample.sglang.head import HeadState
from sgl_flashsample.sglang.hooks import StepHooks
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.logprobs import AskedLogprobs
from sgl_flashsample.sglang.runtime import RankError, Runtime
from sgl_flashsample.sglang.step_graphs import PATIENCE, StepCounts
from sgl_flashsample.tools.server import free_port

WORKER = Path(__file__).with_name("rank_worker.py")
SECONDS = 20.0  # that a rank may take to end after the other one has; no rank waits for longer (``rank_worker.py``)

# Faults of rank 1 at the start, and the reason that both then have; or, where it does not concern the other rank,
# that it has no screen any more, or the path that it takes instead.
REFUSED = {
    "an unknown version": "the ranks differ: SGLang is '.*' on rank 0 and '9.9.9' on rank 1",
    "another setting": "the ranks differ: SGLANG_RETURN_ORIGINAL_LOGPROB is False on rank 0 and True on rank 1",
    "a hook that is missing": "rank 1: a hook did not land",
    "no hook of prompts": "the ranks differ: hooks of prompts is True on rank 0 and False on rank 1",
    "no configuration": r"rank 1: this server's configuration cannot be read \(a fault\)",
    "no models": "rank 1: RuntimeError: a fault",
    "a head that is not served": "rank 1: a fault",
    "no table": "rank 1: its setup failed: RuntimeError: a fault",
    "a wrong token": "rank 1: a fault with ReadConfig.*",
    "a wrong exchange": "rank 1: in a trial exchange between 2 ranks, tokens came out wrong",
    "collectives alone": "rank 1: collectives are not measured",
    "no kernels for an exchange": "rank 1: its setup failed: RuntimeError: a fault",
    "no memory for a workspace": "rank 1: its setup failed: OutOfMemoryError: a fault",
}
PRIVATE = {
    "no memory for a screen": (False, None),
    "the screened path fails": (False, None),
    "the fused path fails": (False, "logits"),
    "no memory for the fused path": (False, "logits"),
    "a broken table": (True, None),
}
PRIVATE_ONCE = ("no memory for a screen", "the screened path fails", "the fused path fails")  # without --full
# Races of the ranks' screens at the start, and whether both have one then.
RACES = {"a race that both win": True, "a race that one loses": False, "a race that fails": False}
RACED = "a race that one loses"  # runs without --full
NO_MEMORY = ("no memory for an exchange", "memory that cannot be opened")
ODD = "an odd width"  # of both ranks' parts
ONCE = ("no models", "collectives alone", "a wrong exchange")  # what runs without --full
FATAL = ["no way to draw", "no memory for logits", "rows cannot be drawn", "no logprobs", "no memory for a prompt"]
FATAL += ["a trial that fails"]


def start(*faults: str, folder: Path | None = None) -> list[subprocess.Popen]:
    """folder: of memory through which the ranks exchange."""
    port, place = free_port(), "" if folder is None else str(folder)
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(port), place, *faults],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def finish(ranks: list[subprocess.Popen], *seconds: float) -> list[tuple[str, str]]:
    """What each rank has printed. seconds: that each may take after the one before it. One that waits for another for
    ever does not outlive the test."""
    try:
        return [rank.communicate(timeout=limit) for rank, limit in zip(ranks, seconds, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> dict[str, list[dict]]:
    """What both ranks serve, by the fault."""
    full = request.config.getoption("--full")
    refused, races, memory = (REFUSED, RACES, NO_MEMORY) if full else (ONCE, [RACED], NO_MEMORY[:1])
    faults = ["none", *refused, *memory, ODD, *(PRIVATE if full else PRIVATE_ONCE), *races]
    ranks = start(*faults, folder=tmp_path_factory.mktemp("memory"))
    printed = finish(ranks, 450, 450)
    assert [rank.returncode for rank in ranks] == [0, 0], printed[0][1][-2000:] + printed[1][1][-2000:]
    lines = [[json.loads(line) for line in out.splitlines()] for out, _ in printed]
    return {fault: list(both) for fault, *both in zip(faults, *lines, strict=True)}


@pytest.mark.slow
def test_without_a_fault_both_ranks_draw_the_tokens_of_one_rank_with_the_seed_of_the_first(served):
    first, second = served["none"]
    assert first == second and first["reason"] is None and first["screen"] and first["seed"] == 1234
    assert first["memory"]
    assert first["gathered"] == [[1, 320]], "SGLang's own gather has connected the ranks before any step"
    state = make_state(CPU)
    lazy, state.path = lazy_of(state), SamplingPath.LOGITS
    drawn = [draw(lazy, step_of(batch, torch.arange(RANK_ROWS), None, False)) for batch, _ in rank_batches()]
    assert first["tokens"] == [out.token_ids.tolist() for out in drawn]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=() if fault in ONCE else pytest.mark.full) for fault in REFUSED]
)
def test_what_one_rank_cannot_serve_at_the_start_neither_serves_for_the_same_reason(served, fault):
    first, second = served[fault]
    reason = first.pop("reason")
    assert re.fullmatch(REFUSED[fault], reason)
    assert reason.removeprefix("rank 1: ") == second.pop("reason")
    assert first == second and first["heads"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", [NO_MEMORY[0], pytest.param(NO_MEMORY[1], marks=pytest.mark.full)])
def test_where_one_rank_has_no_memory_for_exchanges_both_use_collectives_and_the_tokens_stay(served, fault):
    first, second = served[fault]
    assert first == second == served["none"][0] | {"memory": False}


@pytest.mark.slow
def test_of_parts_that_are_no_multiple_of_16_ids_the_tokens_are_the_same(served):
    first, second = served[ODD]
    assert first == second == served["none"][0] | {"gathered": []}


@pytest.mark.slow
@pytest.mark.parametrize(
    "race", [pytest.param(race, marks=() if race == RACED else pytest.mark.full) for race in RACES]
)
def test_both_ranks_use_a_screen_where_both_have_measured_it_as_faster_and_the_tokens_stay(served, race):
    first, second = served[race]
    assert first == second == served["none"][0] | {"screen": RACES[race]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=() if fault in PRIVATE_ONCE else pytest.mark.full) for fault in PRIVATE]
)
def test_how_a_rank_draws_from_its_part_is_its_own_affair_and_the_tokens_stay(served, fault):
    first, second = served[fault]
    assert first == served["none"][0]
    assert (second.pop("screen"), second.pop("path")) == PRIVATE[fault]
    assert second.items() <= first.items()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [FATAL[0], *(pytest.param(fault, marks=pytest.mark.full) for fault in FATAL[1:])])
def test_where_a_rank_cannot_draw_at_all_both_end_and_none_waits(fault):
    ranks = start(fault)
    (_, errors), (_, errors_of_first) = finish(ranks[::-1], 120, SECONDS)
    assert (
        ranks[1].returncode == 1
        and "flashsample: sampling failed on rank 1 (of 0 to 1); " in errors
        and "a fault" in errors
    )
    assert ranks[0].returncode == 1 and "flashsample: sampling failed on rank 0 (of 0 to 1); " in errors_of_first


@pytest.fixture
def shared(server_config) -> Runtime:
    """The runtime of a rank that shares its head."""
    runtime, state = Runtime(None), make_state(CPU)
    state.exchange = types.SimpleNamespace(rank=0, num_ranks=2)
    serve(runtime, state)
    return runtime


class Peers:
    """Ranks that answer with ``others``, one after the other, then as this rank does."""

    rank, num_ranks = 0, 2

    def __init__(self, *others) -> None:
        self.others = list(others)

    def of_all(self, value):
        return [value, self.others.pop(0) if self.others else value]

    first_reason = RankSync.first_reason


@pytest.mark.parametrize("place", ["check_exchange", "_agree_on_heads", "_race_screens"])
def test_a_rank_that_fails_at_the_start_ends_before_the_others_wait(server_config, monkeypatch, place):
    """Nothing is served yet, and the other rank is in the exchange already."""
    runtime, state = Runtime(None), make_state(CPU)
    serve(runtime, state)
    runtime._ranks = Peers()

    def no_memory(*arguments: Any) -> str | None:
        raise torch.OutOfMemoryError("a fault")

    monkeypatch.setattr(HeadState if place == "check_exchange" else Runtime, place, no_memory)
    runner = types.SimpleNamespace(is_generation=True, is_draft_worker=False, model=model_of(state))
    with pytest.raises(RankError, match=r"sampling failed on rank 0 \(of 0 to 1\); .*: OutOfMemoryError: a fault"):
        StepHooks(runtime).load_model(None, runner)


@pytest.mark.parametrize("change", ["disable", "stop_mixing"])
def test_a_rank_does_not_change_alone_what_it_serves(shared, change):
    before = shared.inactive_reason, shared.no_mixing_reason
    with pytest.raises(
        RankError, match=r"^flashsample: sampling failed on rank 0 \(of 0 to 0\); .*, so the server ends: a fault$"
    ):
        getattr(shared, change)("a fault")
    assert (shared.inactive_reason, shared.no_mixing_reason) == before


def test_an_error_in_a_hook_of_a_step_ends_a_rank_that_shares_its_head(shared):
    with pytest.raises(RankError, match="filter_batch: AttributeError"):
        StepHooks(shared).filter_batch(None, types.SimpleNamespace(_flashsample_batch=object()), [0], None)


@pytest.mark.parametrize("error, everywhere", [(AttributeError, True), (RuntimeError, False)])
def test_a_grammar_that_only_this_rank_cannot_read_ends_it(shared, error, everywhere):
    class Info:
        grammars = None

        def update_regex_vocab_mask(self) -> None:
            raise error("a fault")

    with pytest.raises(GrammarError) as caught:
        grammar_mask(Info(), [None])
    assert caught.value.everywhere is everywhere
    with contextlib.nullcontext() if everywhere else pytest.raises(RankError):
        shared.stop_grammars(str(caught.value), caught.value.everywhere)
    assert (shared.no_grammars_reason is None) is not everywhere


def test_no_memory_for_a_mask_is_no_error_of_its_grammar():
    class Info:
        grammars = None

        def update_regex_vocab_mask(self) -> None:
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        grammar_mask(Info(), [None])


@pytest.mark.parametrize(
    "mask, words",
    [
        (None, "its mask is a NoneType; expected a tensor"),
        (torch.zeros(3, 4, dtype=torch.int32), r"its mask is \(3, 4\) torch.int32; expected \[2, words\] int32 or "),
        (torch.zeros(2, 4), r"its mask is \(2, 4\) torch.float32; expected \[2, words\] int32 or "),
    ],
    ids=["none", "rows", "dtype"],
)
def test_a_mask_of_another_form_is_an_error_of_its_grammars(mask, words):
    with pytest.raises(GrammarError, match=words):
        check_mask(mask, 2)


@pytest.mark.parametrize("reasons, active", [([None], True), (["a fault"], False), (["a fault", None], True)])
def test_a_stage_without_the_head_says_what_the_last_stage_serves(server_config, reasons, active):
    vars(server_config.parallel).update(pp_size=2)
    runtime = Runtime(None)
    status = {"vocab_size": 600, "table": "table.json"}
    runtime._ranks = Peers(*[[None, reasons, [status]]] * 2)
    runtime.prepare_model(torch.nn.Module())
    assert (runtime.status["active"], runtime.status["heads"]) == (active, [status])
    assert runtime.status["reason"] == (None if active else "rank 1: a fault")


LATE = "the model shows its LM head only at its first batch, which is not supported with several ranks"


@pytest.mark.parametrize(
    "has_head, answer, reason",
    [
        (True, [None, [None, None], []], "the ranks have different numbers of LM heads"),
        (True, ["a fault", [], []], "rank 1: a fault"),
        (False, ["a fault", [], []], "rank 1: a fault"),  # the head may show itself at the first batch
        (False, [None, [], []], LATE),
    ],
)
def test_ranks_that_do_not_find_the_same_heads_serve_none(server_config, caplog, has_head, answer, reason):
    runtime, state = Runtime(None), make_state(CPU)
    runtime._ranks = Peers(answer)
    if has_head:
        serve(runtime, state)
    runtime.prepare_model(model_of(state) if has_head else model_of())
    assert runtime.heads == [] and runtime.status["reason"] == reason
    assert all(record.message.endswith(f"for everything: {reason}") for record in caplog.records) and caplog.records


def test_a_head_that_one_rank_refuses_is_sglangs_and_the_other_one_is_served(server_config, caplog):
    """Ranks with the whole head each, as of DP attention: they exchange nothing."""
    runtime, states = Runtime(None), [make_state(CPU), make_state(CPU)]
    runtime._ranks = Peers(*[[None, ["a fault", None], []]] * 2)
    serve(runtime, *states)
    runtime.prepare_model(model_of(*states))
    assert runtime.heads == [states[1]] and runtime.status["active"]
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.endswith(
        "not active for one of its LM heads, SGLang's own sampler is used for that head: rank 1: a fault"
    )


def test_a_rank_without_memory_in_a_step_ends_instead_of_leaving_the_others_alone(
    runners, head, hidden, info_of, script
):
    script.error = torch.OutOfMemoryError("a fault")
    lazy = head.lazy(hidden(2))
    lazy.source.exchange = types.SimpleNamespace(rank=0, num_ranks=2, memory=None)
    with pytest.raises(torch.OutOfMemoryError):
        runners[0].sample(lazy, info_of([request("a"), request("b")]))


def test_steps_of_ranks_without_common_memory_are_launched():
    """A graph must not hold a collective: it would wait for ranks that launch what this one replays."""
    state, kind = make_state(CPU, capture=CountingCapture()), rank_batches()[0][0].mix.draw
    state.update(RANK_ROWS)
    for memory in (None, object()):
        state.exchange = types.SimpleNamespace(memory=memory)
        assert (state.step_graphs(RANK_ROWS, kind, edited=False) is None) is (memory is None)


def lazy_of(state: HeadState) -> LazyLogits:
    """The logits of a step in one of SGLang's CUDA graphs."""
    hidden = hidden_states(CPU, RANK_ROWS)
    return LazyLogits(hidden, VOCAB, state, lambda hidden: pytest.fail("logits"), hidden)


def test_each_step_is_exchanged_whether_launched_or_replayed():
    state, merged = make_state(CPU, capture=CountingCapture(), script=Script()), []
    exchange = types.SimpleNamespace(memory=types.SimpleNamespace(max_rows=RANK_ROWS), num_ranks=1, rank=0)
    exchange.merge = lambda drawn: merged.append(drawn) or drawn
    state.exchange, steps = exchange, 12
    lazy, step = lazy_of(state), step_of(rank_batches()[0][0], torch.arange(RANK_ROWS), None, False)
    for _ in range(steps):
        draw(lazy, step)
    replays = state._capture.replays
    assert replays and len(merged) == steps + len(state._capture.graphs), "a capture here draws once more than on a GPU"


@pytest.mark.parametrize("kind", ["plain", "truncated"])
def test_logprobs_beside_the_tokens_are_exchanged_whether_launched_or_replayed(kind):
    """Truncated rows are drawn whole, with their logprobs. What is merged is delivered."""
    state, merged = make_state(CPU, capture=CountingCapture(), script=Script()), []

    def merge(drawn: SampleOutput, found: Logprobs, wanted: WantedLogprobs) -> tuple[SampleOutput, Logprobs]:
        merged.append(wanted)
        return drawn, found._replace(of_tokens=found.of_tokens - 1.0)

    memory = types.SimpleNamespace(max_rows=RANK_ROWS, own_logits=torch.empty(RANK_ROWS, len(state.lm_head.weight)))
    exchange = types.SimpleNamespace(memory=memory, num_ranks=1, rank=0)
    exchange.merge_with_logprobs = merge
    exchange.draw_rows_with_logprobs = lambda logits, params, wanted, draw: merge(*draw(logits, params, wanted), wanted)
    batch, _ = rank_batches()[kind == "truncated"]
    state.update(RANK_ROWS)
    lazy, steps = lazy_of(state), 8
    asked = AskedLogprobs.of((), [3, 0, 1, 5][:RANK_ROWS], None, False)
    step = step_of(batch, torch.arange(RANK_ROWS), None, True, asked=asked)
    want = draw(lazy, step)
    state.exchange, state.graphs = exchange, None
    for _ in range(steps):
        got = draw(lazy, step)
        assert torch.equal(got.token_ids, want.token_ids)
        torch.testing.assert_close(got.logprobs, want.logprobs - 1.0)
        for one, other in zip(got.rest.parts(), want.rest.parts(), strict=True):
            torch.testing.assert_close(one, other)
    replays = state._capture.replays
    assert replays and len(merged) == steps + len(state._capture.graphs)
    assert {(wanted.top, tuple(wanted.counts.tolist())) for wanted in merged} == {(8, (3, 0, 1, 5))}


@pytest.mark.parametrize("kind", ["plain", "truncated"])
def test_what_a_rank_draws_before_the_exchange_lives_as_long_as_the_graph_that_writes_there(kind):
    """Else it would lie where the tokens of another graph are."""
    state, drawn = make_state(CPU, capture=CountingCapture(), script=Script()), []

    def merge(out: SampleOutput) -> SampleOutput:
        drawn.append(weakref.ref(out.token_ids))
        return out._replace(token_ids=out.token_ids.clone())

    memory = types.SimpleNamespace(max_rows=RANK_ROWS, own_logits=torch.empty(RANK_ROWS, len(state.lm_head.weight)))
    exchange = types.SimpleNamespace(memory=memory, num_ranks=1, rank=0, merge=merge)
    exchange.draw_rows = lambda logits, params, draw: merge(draw(logits, params))
    batch, _ = rank_batches()[kind == "truncated"]
    lazy, step = lazy_of(state), step_of(batch, torch.arange(RANK_ROWS), None, False)
    state.update(RANK_ROWS)
    state.exchange = exchange
    for _ in range(PATIENCE + 1):
        drawn.clear()
        draw(lazy, step)
    (graph,) = state._capture.graphs
    gc.collect()
    assert graph.capture.replays == 1
    assert drawn[0]() is not None, "the draw of the capture"


def test_a_head_that_shows_itself_late_is_sglangs_on_several_ranks(shared, caplog):
    shared._ranks.num_ranks = 2
    state = make_state(CPU)
    assert shared.head_for(state.processor, state.lm_head) is None and LATE in caplog.text


@pytest.mark.parametrize("carried", [False, True], ids=["logits", "a graph's hidden states"])
def test_a_rank_without_requests_draws_nothing(runners, carried):
    """Of DP attention: SGLang asks its sampler all the same, also after a replay of the others' graph."""
    state = make_state(CPU)
    nothing = types.SimpleNamespace(next_token_logits=lazy_of(state)[:0] if carried else torch.empty(0, 600))
    tokens = runners[0].sampler(nothing, None, False, [], [], torch.empty(0, dtype=torch.int64))
    assert tokens.shape == (0,) and tokens.dtype is torch.int64


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("reads_prompts", "hooks of prompts"),
        ("numbers_arrivals", "the hook of arrivals"),
        ("use_step_graphs", "FLASHSAMPLE_STEP_GRAPHS"),
    ],
)
def test_ranks_of_which_one_lacks_a_hook_or_step_graphs_fuse_nothing(server_config, monkeypatch, hook, words):
    """It would compute with SGLang what the others exchange."""
    runtime = Runtime(None)

    class Other(Peers):
        def of_all(self, value):
            reason, seed, shared = value
            assert shared[words]
            return [value, [reason, seed, shared | {words: False}]]

    monkeypatch.setattr(RankSync, "of_server", Other)
    setattr(runtime, hook, True)
    runtime.agree()
    assert runtime.inactive_reason == f"the ranks differ: {words} is True on rank 0 and False on rank 1"


@pytest.mark.parametrize("kind", ["plain", "truncated"])
def test_a_batch_beyond_the_memory_of_the_ranks_is_drawn_in_blocks(kind):
    state, sizes = make_state(CPU, script=Script()), []
    batch, _ = rank_batches()[kind == "truncated"]
    lazy, step = lazy_of(state), step_of(batch, torch.arange(RANK_ROWS), None, True)
    want = draw(lazy, step)
    most = RANK_ROWS - 1
    memory = types.SimpleNamespace(max_rows=most, own_logits=torch.empty(most, len(state.lm_head.weight)))
    state.exchange = types.SimpleNamespace(memory=memory, num_ranks=1, rank=0)
    state.exchange.merge = lambda drawn: sizes.append(len(drawn.token_ids)) or drawn
    state.exchange.draw_rows = lambda logits, params, draw: state.exchange.merge(draw(logits, params))
    got = draw(lazy, step)
    assert sizes == [most, 1]
    assert torch.equal(got.token_ids, want.token_ids)
    torch.testing.assert_close(got.logprobs, want.logprobs)


class Untouched:
    """An exchange of which nothing is asked."""

    def __getattr__(self, name: str) -> None:
        pytest.fail(f"{name} of an exchange is asked for")


@pytest.mark.parametrize("modes", [("decode",), ("extend",), ()], ids=["decode", "prefill", "idle"])
def test_a_rank_without_requests_asks_no_other_and_launches_nothing(server_config, modes):
    """Of DP attention: the others of its group have no requests either, and replicas are other groups."""
    runtime, script = Runtime(None), Script()
    state = make_state(CPU, script=script)
    serve(runtime, state)
    state.exchange = Untouched()
    state.update = lambda num_rows: pytest.fail("an update")
    nothing, computed = hidden_states(CPU, 0), []

    def original(processor, hidden, *arguments) -> torch.Tensor:
        computed.append(hidden)
        return torch.empty(0, VOCAB)

    logits = StepHooks(runtime).get_logits(original, state.processor, nothing, state.lm_head, metadata_of(*modes))
    assert type(logits) is torch.Tensor and len(computed) == 1 and computed[0] is nothing
    assert not script.calls and state.counts == StepCounts()


def test_a_server_whose_ranks_cannot_be_found_is_sglangs(server_config, monkeypatch):
    def fails():
        raise AttributeError("an SGLang that is not the one we know")

    monkeypatch.setattr(RankSync, "of_server", fails)
    runtime = Runtime(None)
    runtime.agree()
    assert runtime.inactive_reason == "this server's ranks cannot be found (an SGLang that is not the one we know)"


def test_one_process_asks_nobody():
    sync = RankSync()
    assert (sync.rank, sync.num_ranks, sync.of_all({"a": 1})) == (0, 1, [{"a": 1}])
    assert sync.first_reason([None]) is None and sync.first_reason(["this"]) == "this"
