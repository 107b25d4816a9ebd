"""The model's CUDA graphs get one more root: which graphs, on which GPUs, and what a failure does."""

from __future__ import annotations

import ctypes
import json
import logging
import types
from collections.abc import Callable

import pytest
import torch
from head_states import CPU, hidden_states, make_state, metadata_of, model_of, serve
from serving import CUDA as CUDA_HERE
from serving import needs_sglang, server_of

from sgl_flashsample.sglang import model_graph
from sgl_flashsample.sglang.hooks import StepHooks
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.model_graph import MODEL_GRAPHS_VARIABLE, ExtraRoot
from sgl_flashsample.tools import markov

CUDA, STREAM, GRAPH, EVENT = torch.device("cuda", 0), 11, 22, 33
CAPTURING, NOT_CAPTURING, INVALIDATED = 1, 0, 2


class Driver:
    """Of CUDA: answers with ``status`` and ``errors``, and keeps which nodes were added."""

    def __init__(self, status: int = CAPTURING, capture_error: int = 0, node_error: int = 0) -> None:
        self.status, self.capture_error, self.node_error = status, capture_error, node_error
        self.added: list[tuple] = []

    def cuStreamGetCaptureInfo_v2(self, stream, status, ident, graph, dependencies, count):
        assert (stream, ident, dependencies, count) == (STREAM, None, None, None)
        status._obj.value, graph._obj.value = self.status, GRAPH
        return self.capture_error

    def cuGraphAddEventRecordNode(self, node, graph, dependencies, count, event):
        self.added.append((graph.value, dependencies, count, event))
        return self.node_error


def root_of(driver: Driver) -> ExtraRoot:
    return ExtraRoot(driver, types.SimpleNamespace(cuda_event=EVENT))


def test_the_root_depends_on_nothing_and_is_added_to_the_graph_that_is_captured():
    root_of(driver := Driver()).add(STREAM)
    assert driver.added == [(GRAPH, None, 0, EVENT)]


@pytest.mark.parametrize("status", [NOT_CAPTURING, INVALIDATED])
def test_without_a_capture_nothing_is_added(status, caplog):
    root_of(driver := Driver(status)).add(STREAM)
    assert not driver.added and not caplog.records


@pytest.mark.parametrize("errors", [{"capture_error": 901}, {"node_error": 801}])
def test_after_an_error_graphs_stay_as_they_are_with_one_warning(errors, caplog):
    root = root_of(driver := Driver(**errors))
    for _ in range(3):
        root.add(STREAM)
    assert len(driver.added) <= 1
    [record] = caplog.records
    assert record.levelno == logging.WARNING and str(next(iter(errors.values()))) in record.getMessage()


class Event:
    cuda_event = EVENT

    def record(self, stream) -> None:
        pass


@pytest.fixture
def gpu(monkeypatch):
    """A function that pretends a GPU with its driver, and a value of the variable."""

    def pretend(value: str | None, driver: Callable[[], Driver] = Driver) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(model_graph, "_driver", driver)
        monkeypatch.delenv(MODEL_GRAPHS_VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(MODEL_GRAPHS_VARIABLE, value)

    return pretend


@pytest.mark.parametrize(
    ("several_ranks", "value", "added"),
    [(False, None, False), (False, "1", True), (True, None, True), (True, "0", False)],
)
def test_graphs_get_the_root_where_stock_has_one_or_where_it_is_asked_for(gpu, several_ranks, value, added, caplog):
    gpu(value)
    with caplog.at_level(logging.INFO, logger="sgl_flashsample"):
        root = ExtraRoot.of_device(CUDA, several_ranks)
    assert (root is not None) is added
    assert (MODEL_GRAPHS_VARIABLE in caplog.text) is added
    if root is not None:
        root.add(STREAM)
        assert root._driver.added == [(GRAPH, None, 0, EVENT)]


@pytest.mark.parametrize("several_ranks", [False, True])
def test_a_server_asks_whether_ranks_share_its_head(runtime, monkeypatch, several_ranks):
    """With the agreement of the ranks and without a trial exchange, which others test."""
    asked = []
    state = make_state(CPU)
    state.exchange = types.SimpleNamespace(rank=0, num_ranks=2, memory=None) if several_ranks else None
    serve(runtime, state)
    monkeypatch.setattr(ExtraRoot, "of_device", lambda *arguments: asked.append(arguments))
    runtime.prepare_model(model_of(state))
    assert asked == [(state.head.lm_head.weight.device, several_ranks)]


def test_the_host_has_no_graphs(gpu):
    gpu("1")
    assert ExtraRoot.of_device(torch.device("cpu"), False) is None


def test_without_a_cuda_driver_the_server_goes_without(gpu, caplog):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    gpu("1", missing)
    assert ExtraRoot.of_device(CUDA, False) is None
    assert "libcuda.so.1" in caplog.text


@pytest.mark.parametrize(
    "captures, mode, draft, kept",
    [
        (True, "decode", False, True),
        (True, "target_verify", False, True),
        (False, "decode", False, False),
        (True, "draft_extend_v2", True, False),
        (True, "decode", True, False),
        (True, "nothing that draws", False, False),
    ],
)
def test_a_capture_that_leaves_the_logits_to_us_gets_the_root_and_its_hidden_states_are_kept(
    runtime, pretend_gpu, captures, mode, draft, kept
):
    """SGLang's graphs write them at the same place in each step; drafts are drawn within SGLang's graphs."""
    state, hidden = make_state(CPU), hidden_states(CPU)
    num_rows, drawn = len(hidden), mode != "nothing that draws"
    runtime._extra_root = root_of(driver := Driver())
    runtime.settings.verifies = True
    serve(runtime, state)
    pretend_gpu(True, captures)
    if draft:
        runtime.draft_head, runtime.draws_drafts = state, True
        runtime._draft_processors.add(id(state.processor))
    modes = [mode, "extend"] if mode == "target_verify" else [mode]
    arguments = state.processor, hidden, state.lm_head, metadata_of(*modes)
    logits = StepHooks(runtime).get_logits(lambda *_: "logits", *arguments)
    assert isinstance(logits, LazyLogits) is drawn and len(driver.added) == (captures and drawn)
    assert (state.captured.get(num_rows) is hidden) is kept and bool(state.captured) is kept
    assert not state.was_recaptured
    if drawn:
        assert (logits.captured is hidden) is (logits[:3].captured is hidden) is captures
        assert logits[1:].captured is None, "they do not begin where a graph has them"


@pytest.mark.gpu
def test_a_graph_with_the_root_has_two_roots_and_the_same_results(device, monkeypatch):
    monkeypatch.setenv(MODEL_GRAPHS_VARIABLE, "1")
    root = ExtraRoot.of_device(device, False)
    assert root is not None
    root._driver.cuGraphGetRootNodes.argtypes = [ctypes.c_void_p] * 3
    values, graph = torch.arange(4, device="cuda", dtype=torch.float32), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = values * 2 + 1
        stream = torch.cuda.current_stream().cuda_stream
        root.add(stream)
        status, captured, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
        assert not root._driver.cuStreamGetCaptureInfo_v2(
            stream, ctypes.byref(status), None, ctypes.byref(captured), None, None
        )
        assert not root._driver.cuGraphGetRootNodes(captured, None, ctypes.byref(count))
    assert count.value == 2
    for start in (0, 5):
        values.copy_(torch.arange(start, start + 4))
        graph.replay()
        torch.cuda.synchronize()
        assert results.tolist() == [2 * value + 1 for value in range(start, start + 4)]


def layers(values: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """A chain of norms and products, as of a model; the norms by FlashInfer with programmatic dependent launch."""
    from flashinfer.norm import fused_add_rmsnorm, rmsnorm

    residual = torch.zeros_like(values)
    for scale, up, down in weights:
        fused_add_rmsnorm(values, residual, scale, enable_pdl=True)
        values = torch.nn.functional.silu(values @ up) @ down
    return rmsnorm(values, weights[0][0], enable_pdl=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_kernels_that_overlap_give_the_same_bits(device, monkeypatch, num_rows):
    """A kernel that began before the one ahead of it had written would show."""
    pytest.importorskip("flashinfer")
    monkeypatch.setenv(MODEL_GRAPHS_VARIABLE, "1")
    root = ExtraRoot.of_device(device, False)
    assert root is not None
    torch.manual_seed(0)
    shapes = ((1024,), (1024, 3072), (3072, 1024))
    weights = [tuple((torch.randn(shape, device=device) / 32).bfloat16() for shape in shapes) for _ in range(24)]
    inputs, graphs = torch.randn(num_rows, 1024, device=device).bfloat16(), []
    layers(inputs.clone(), weights)  # compiles
    for roots in (1, 2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = layers(inputs.clone(), weights)
            if roots == 2:
                root.add(torch.cuda.current_stream().cuda_stream)
        graphs.append((graph, results))
    for _ in range(200):
        inputs.copy_(torch.randn(num_rows, 1024, device=device))
        for graph, _ in graphs:
            for _ in range(5):  # one after another, as steps come
                graph.replay()
        one, two = (results for _, results in graphs)
        assert torch.equal(one, two) and one.isfinite().all()


@pytest.mark.gpu
@pytest.mark.server
@needs_sglang
def test_a_model_whose_graphs_have_two_roots_gives_the_hidden_states_of_one_root_bit_by_bit(tmp_path):
    """SGLang's own model, of 28 layers with made weights. One request at a time: batches of a moment differ."""
    size = markov.SIZES["qwen3-0.6b" if CUDA_HERE else "tiny"]
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(markov.config(size)))
    markov.write_tokenizer(model, size.vocab_size)
    answers = []
    for roots in (1, 2):
        server = server_of(
            model,
            size.dtype,
            name=f"{roots} roots",
            arguments=["--load-format", "dummy", "--enable-return-hidden-states"],
            environment={MODEL_GRAPHS_VARIABLE: str(roots - 1)},
        )
        with server:
            assert bool(server.log_lines("get a second root")) is (roots == 2 and CUDA_HERE)
            answers.append(
                [
                    server.generate(
                        input_ids=[prompt, 300, 77],
                        sampling_params={"temperature": 0, "max_new_tokens": 32, "ignore_eos": True},
                        return_hidden_states=True,
                    )
                    for prompt in range(5, 13)
                ]
            )
    for one, two in zip(*answers, strict=True):
        assert one["output_ids"] == two["output_ids"]
        states = one["meta_info"]["hidden_states"]
        assert states and states == two["meta_info"]["hidden_states"]
