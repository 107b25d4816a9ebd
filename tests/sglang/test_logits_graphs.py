"""The logits of steps that SGLang's sampler serves are replayed as CUDA graphs: which steps, what a graph reads and
writes, and when there is none. A server or a head that is SGLang's keeps its logits in SGLang's own graph."""

from __future__ import annotations

import types
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
    serve,
    settle,
    step_of,
    weights,
)
from sglang_batches import ScheduleBatch, request, sampling_info

from sgl_flashsample.sglang import logits_graphs
from sgl_flashsample.sglang.batch import DrawKind
from sgl_flashsample.sglang.draw import draw
from sgl_flashsample.sglang.head import HeadState
from sgl_flashsample.sglang.hooks import StepHooks
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.logits_graphs import LogitsGraphs
from sgl_flashsample.sglang.model_graph import ExtraRoot
from sgl_flashsample.sglang.runtime import Runtime
from sgl_flashsample.sglang.step_graphs import PATIENCE, RETRY_SECONDS, SLOTS

TINY = 1e-4  # logits of other hidden states differ by more


class SGLang:
    """SGLang's computation of logits. calls: the rows of each, and whether they went to ``place``, its memory for the
    logits of its graphs."""

    def __init__(self, device: torch.device, max_rows: int = 8) -> None:
        self.place = torch.zeros(max_rows, VOCAB, device=device)
        self.calls: list[tuple[int, bool]] = []

    def get_logits(self, processor, hidden, lm_head, metadata, bias=None, use_buffer=True) -> torch.Tensor:
        self.calls.append((len(hidden), use_buffer))
        logits = (hidden @ lm_head.weight.T)[:, : processor.vocab_size].float()
        place = metadata.next_token_logits_buffer if use_buffer else None
        return logits if place is None or place.shape != logits.shape else place.copy_(logits)


class Native:
    """Steps of SGLang's sampler in a server that we serve: the logits of hidden states of SGLang's graphs, by size."""

    def __init__(self, runtime: Runtime, pretend_gpu: Any, device: torch.device = CPU, **options: Any) -> None:
        self.runtime, self.pretend_gpu, self.sglang = runtime, pretend_gpu, SGLang(device)
        self.capture = CountingCapture(device)
        self.state = make_state(device, capture=self.capture, **options)
        serve(runtime, self.state)
        self.outputs: dict[int, LazyLogits] = {}

    def sglang_captures(self, rows: int, seed: int = 5, place: bool = True) -> LazyLogits:
        """SGLang captures its model for so many rows. place: it has memory for their logits."""
        hidden = hidden_states(self.state.lm_head.weight.device, rows, seed=seed)
        metadata = metadata_of("decode", next_token_logits_buffer=self.sglang.place[:rows] if place else None)
        self.pretend_gpu(True, True)
        arguments = self.state.processor, hidden, self.state.lm_head, metadata
        self.outputs[rows] = StepHooks(self.runtime).get_logits(self.sglang.get_logits, *arguments)
        self.pretend_gpu(False)
        return self.outputs[rows]

    def step(self, rows: int, padded: int) -> torch.Tensor:
        """The logits of a step, which reads other hidden states than the last; right ones."""
        output = self.outputs[padded]
        output.hidden.copy_(torch.randn(output.hidden.shape))
        logits = output[:rows].dense()
        # A GEMM of more rows may add in another order.
        right = (output.hidden @ self.state.lm_head.weight.T)[:rows, :VOCAB].float()
        torch.testing.assert_close(logits, right, rtol=0, atol=TINY)
        return logits

    @property
    def replays(self) -> int:
        return self.capture.replays


@pytest.fixture
def native(runtime, pretend_gpu) -> Native:
    return Native(runtime, pretend_gpu)


def test_logits_of_a_size_are_replayed_once_there_have_been_some_steps(native):
    native.sglang_captures(4)
    for rows in (4, 3) * PATIENCE:
        native.step(rows, 4)
    assert native.replays == PATIENCE
    assert native.sglang.calls[:PATIENCE] == [(4, False), (3, False)] * (PATIENCE // 2), "no more rows than there are"
    assert native.state.counts.late_captures == 1 and native.state.status["graphs"] == 1


def test_a_graph_computes_all_rows_where_sglang_has_the_logits_of_its_graphs(native):
    native.sglang_captures(4)
    for _ in range(PATIENCE + 1):
        logits = native.step(3, 4)
    assert logits.shape == (3, VOCAB) and logits.data_ptr() == native.sglang.place.data_ptr()
    assert native.sglang.calls[PATIENCE] == (4, True)


def test_whoever_reads_the_logits_may_change_them(native):
    native.sglang_captures(4)
    for _ in range(PATIENCE + 2):
        native.step(4, 4).fill_(float("nan"))


def test_each_size_has_a_graph_of_its_own_and_all_are_in_one_pool(native):
    for padded in (2, 4):
        native.sglang_captures(padded, seed=padded)
    for _ in range(PATIENCE + 1):
        native.step(2, 2)
        native.step(3, 4)
    assert native.replays == 2 and len(native.capture.graphs) == 2 and native.capture.pools == 1


def test_after_sglang_has_captured_a_size_anew_its_graph_is_another(native):
    for seed in (1, 2):
        native.sglang_captures(4, seed=seed)
        for _ in range(PATIENCE + 1):
            native.step(4, 4)
    assert native.replays == 2 and len(native.capture.graphs) == 2


def test_logits_of_other_hidden_states_are_launched(native):
    """Rows of a mixed batch, and rows that are not the first ones of a graph."""
    output = native.sglang_captures(4)
    for _ in range(PATIENCE + 1):
        native.step(4, 4)
    right = (output.hidden @ native.state.lm_head.weight.T)[:, :VOCAB].float()
    torch.testing.assert_close(output[:4].logits_of(torch.tensor([0, 2])), right[[0, 2]], rtol=0, atol=TINY)
    torch.testing.assert_close(output[1:].dense(), right[1:], rtol=0, atol=TINY)
    assert native.replays == 1 and native.sglang.calls[-2:] == [(2, False), (3, False)]


@pytest.mark.parametrize("case", ["ranks", "switched off", "a prefill", "a draft model"])
def test_logits_without_graphs_are_launched(native, case):
    state, runtime = native.state, native.runtime
    if case == "ranks":
        state.exchange = types.SimpleNamespace(memory=None)
    elif case == "switched off":
        state.use_step_graphs = False
    if case == "a draft model":
        runtime.draft_head, runtime.draws_drafts = state, True
        runtime._draft_processors.add(id(state.processor))
    if case == "a prefill":
        arguments = state.processor, hidden_states(CPU, 4), state.lm_head, metadata_of("extend")
        native.outputs[4] = StepHooks(runtime).get_logits(native.sglang.get_logits, *arguments)
    else:
        native.sglang_captures(4)
    for _ in range(PATIENCE + 2):
        native.step(3, 4)
    assert native.capture.graphs == [] and native.sglang.calls == [(3, False)] * (PATIENCE + 2)


@pytest.mark.parametrize("change", ["another weight", "a write that PyTorch counts", "a logit scale"])
def test_after_a_change_of_the_head_its_graphs_are_captured_anew(native, change):
    native.sglang_captures(4)
    for _ in range(PATIENCE + 1):
        native.step(4, 4)
    lm_head = native.state.lm_head
    if change == "another weight":
        lm_head.weight = weights(CPU, seed=3)
    elif change == "a write that PyTorch counts":
        lm_head.weight.mul_(2)
    else:
        native.state.processor.logit_scale = 1.0
    for _ in range(PATIENCE + 1):
        native.step(4, 4)
    assert len(native.capture.graphs) == 2 and native.replays == 2


def test_a_write_that_pytorch_does_not_count_is_in_the_next_replay(native):
    native.sglang_captures(4)
    for _ in range(PATIENCE + 1):
        native.step(4, 4)
    native.state.lm_head.weight.data.mul_(2)
    native.step(4, 4)
    assert len(native.capture.graphs) == 1 and native.replays == 2


@pytest.mark.parametrize(
    "place, free, captured",
    [
        (True, 4 * 4 * (VOCAB + 8), True),  # float32 on a CPU, with the padding of the vocabulary
        (True, 4 * 4 * (VOCAB + 8) - 1, False),
        (False, 4 * 4 * (2 * VOCAB + 8), True),
        (False, 4 * 4 * (2 * VOCAB + 8) - 1, False),
    ],
)
def test_a_graph_that_takes_too_much_memory_is_not_captured(native, monkeypatch, place, free, captured):
    monkeypatch.setattr(logits_graphs, "MAX_PREPARED_BYTES", free)
    native.sglang_captures(4, place=place)
    for _ in range(PATIENCE + 2):
        native.step(4, 4)
    assert (native.replays > 0) is captured


def test_graphs_of_steps_and_of_logits_have_one_limit_and_smaller_sizes_find_the_memory_of_larger_ones(
    native, monkeypatch
):
    taken, large = 1000, 4 * 4 * (VOCAB + 8)
    monkeypatch.setattr(logits_graphs, "MAX_PREPARED_BYTES", taken + large)
    free = iter(range(10 * large, 0, -large))
    monkeypatch.setattr(logits_graphs, "free_bytes", lambda device: next(free))
    native.state.graphs = types.SimpleNamespace(num_bytes=taken, prepared_bytes=taken, count=0)
    for padded in (4, 2, 8):
        native.sglang_captures(padded, seed=padded)
        for _ in range(PATIENCE + 1):
            native.step(padded, padded)
    assert [len(graph.launched) for graph in native.capture.graphs] == [4, 2]
    assert native.state.status["graph_bytes"] == taken + 2 * large


def test_a_capture_that_fails_is_said_once_and_tried_again_in_another_pool(native, clock, caplog):
    for padded in (2, 4):
        native.sglang_captures(padded, seed=padded)
    for _ in range(PATIENCE + 1):
        native.step(2, 2)
    native.capture.fails = True
    for _ in range(3 * PATIENCE):
        native.step(4, 4)
        native.step(2, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no memory for a graph" in caplog.text
    assert native.capture.pools == 1 and native.state.status["graphs"] == 0
    native.capture.fails = False
    replays = native.replays
    clock[0] += RETRY_SECONDS
    native.step(4, 4)
    assert native.replays == replays + 1 and native.capture.pools == 2


def test_whatever_fails_beside_them_the_steps_graphs_stay(native):
    native.state.graphs = steps = native.state.step_graphs(4, DrawKind(False, None, True, False), False)
    native.capture.fails = True
    native.sglang_captures(4)
    for _ in range(PATIENCE + 1):
        native.step(4, 4)
    assert native.state.graphs is steps and not steps.is_off


@pytest.mark.parametrize("reason", ["the server", "its head", "a head that shows late"])
def test_what_is_sglangs_as_a_whole_has_its_logits_in_sglangs_graph(runtime, pretend_gpu, monkeypatch, reason):
    """With SGLang's memory for them, and no further root."""
    sglang, hidden, processor = SGLang(CPU), hidden_states(CPU, 4), Processor()
    lm_head = make_head(weights(CPU))
    runtime._extra_root = types.SimpleNamespace(add=lambda stream: pytest.fail("another root"))
    if reason == "the server":
        runtime.inactive_reason = "off"
    elif reason == "its head":
        runtime._heads[id(processor), id(lm_head)] = None
    pretend_gpu(True, True)
    metadata = metadata_of("decode", next_token_logits_buffer=sglang.place[:4])
    logits = StepHooks(runtime).get_logits(sglang.get_logits, processor, hidden, lm_head, metadata)
    assert type(logits) is torch.Tensor and logits.data_ptr() == sglang.place.data_ptr()
    assert sglang.calls == [(4, True)]


def test_a_server_without_a_head_that_is_served_adds_no_root(runtime, monkeypatch):
    monkeypatch.setattr(ExtraRoot, "of_device", lambda *arguments: pytest.fail("another root"))
    state = make_state(CPU)
    modules = {
        "0": types.SimpleNamespace(lm_head=make_head(weights(CPU).to(torch.float64))),
        "0.logits_processor": state.processor,
    }
    runtime.prepare_model(types.SimpleNamespace(named_modules=lambda: modules.items()))
    assert runtime.all_native_reason is not None


def test_sglang_computes_the_same_logits_into_the_memory_of_its_graphs(runners, pretend_gpu):
    from sglang.srt.layers.logits_processor import LogitsProcessor

    runtime = runners[0].sampler.runtime
    native = Native(runtime, pretend_gpu, logit_scale=0.5)
    processor = LogitsProcessor.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    names = ("do_tensor_parallel_all_gather_dp_attn", "use_tp_lm_head_all_to_all", "defer_verify_gather")
    facts = vars(native.state.processor) | dict.fromkeys(names, False) | {"rl_on_policy_target": None}
    for name, fact in facts.items():
        setattr(processor, name, fact)
    native.state.processor = processor
    serve(runtime, native.state)
    native.sglang.get_logits = LogitsProcessor._get_logits
    output = native.sglang_captures(4)
    for _ in range(PATIENCE + 2):
        output.hidden.copy_(torch.randn(output.hidden.shape))
        logits = output[:3].dense()
        right = (output.hidden @ native.state.lm_head.weight.T)[:3, :VOCAB] * 0.5
        torch.testing.assert_close(logits, right)
    assert native.replays == 2 and logits.data_ptr() == native.sglang.place.data_ptr()


def test_a_batch_of_custom_processors_gets_stocks_tokens_from_replayed_logits(runners, pretend_gpu):
    """SGLang's sampler changes them in place, at every step."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    (ours, stock), runtime = runners, runners[0].sampler.runtime
    native = Native(runtime, pretend_gpu, dtype=torch.float32)
    native.state.update(1)  # as when its counters are read for the first time
    native.sglang_captures(4)
    processor = DisallowedTokensLogitsProcessor.to_str()
    rows = [request(f"r{row}", processor, temperature=0, custom_params={"token_ids": [3]}) for row in range(3)]
    batches = [ScheduleBatch(rows, CPU) for _ in range(2)]  # penalizers refer to them weakly
    infos = [sampling_info(batch) for batch in batches]
    for _ in range(PATIENCE + 3):
        output = native.outputs[4]
        output.hidden.copy_(torch.randn(output.hidden.shape))
        logits = (output.hidden @ native.state.lm_head.weight.T)[:3, :VOCAB].float()
        got, described = ours.sample(output[:3], infos[0], True)
        want, expected = stock.sample(logits, infos[1], True)
        assert torch.equal(got, want)
        torch.testing.assert_close(described.next_token_logprobs, expected.next_token_logprobs, rtol=0, atol=TINY)
        assert described.customized_info == {"flashsample_path": ["native:custom_logit_processor"] * 3}
    assert native.replays == 3


@pytest.mark.gpu
@pytest.mark.parametrize("place", [True, False], ids=["SGLang's memory", "their own"])
def test_cuda_graphs_give_the_logits_of_launches(device, place):
    """Launches and graph have equally many rows, as a GEMM of another size rounds otherwise. Two sizes take turns, and
    readers change the logits."""
    vocab = 50_257
    lm_head = make_head((torch.randn(vocab, 256, device=device) / 8).bfloat16())
    state = HeadState(Processor(vocab_size=vocab), lm_head, CountingCapture(device))
    graphs = LogitsGraphs(state._capture, state.counts, None)
    shared = torch.zeros(64, vocab, device=device)
    replayed = 0
    sizes = {rows: torch.zeros(rows, 256, device=device).bfloat16() for rows in (8, 64)}

    def launches(hidden: torch.Tensor) -> torch.Tensor:
        logits = (hidden @ lm_head.weight.T).mul_(0.5)
        return shared[: len(hidden)].copy_(logits) if place else logits.float()

    for _ in range(PATIENCE + 4):
        for rows, hidden in sizes.items():
            hidden.copy_(torch.randn(rows, 256, device=device))
            right = launches(hidden).clone()
            shared.fill_(float("nan"))
            logits = graphs.replay(hidden, lambda hidden=hidden: launches(hidden), 2 * rows * vocab)
            if logits is not None:
                replayed += 1
                assert torch.equal(logits, right)
                logits.fill_(float("nan"))
    assert replayed == 2 * 4 and graphs.count == 2 and graphs.num_bytes < 100 << 20


@pytest.mark.gpu
def test_tokens_of_a_replayed_step_outlive_replayed_logits(device):
    """Also where the graph of the logits was captured first: it leaves memory free that a step's graph may take."""
    capture = CountingCapture(device)
    state = make_state(device, capture=capture)
    hidden = hidden_states(device, 8)
    batch = make_batch(*({"temperature": 0.7} for _ in range(8)), device=device)
    state.update(8)
    graphs = state.logits_graphs
    lazy = LazyLogits(hidden, VOCAB, state, lambda hidden: pytest.fail("logits"), hidden)

    def launches() -> torch.Tensor:
        return (hidden @ state.lm_head.weight.T).float()

    for _ in range(PATIENCE + 1):
        graphs.replay(hidden, launches, 0)
    for number in range(PATIENCE + SLOTS + 4):
        hidden.copy_(torch.randn(8, WIDTH, device=device).to(dtype_on(device)))
        step = step_of(batch, torch.full((8,), number, device=device), None, False)
        drawn = draw(lazy[:8], step).token_ids
        before = drawn.clone()
        assert graphs.replay(hidden, launches, 0) is not None
        settle(device)
        assert torch.equal(drawn, before)
    assert state.logits_graphs is graphs and state.counts.replayed == SLOTS + 4
