"""The model's CUDA graphs get one more root: which graphs, on which GPUs, and what a failure does."""

from __future__ import annotations

import ctypes
import logging
import types

import pytest
import torch

from sgl_flashsample.sglang import model_graph
from sgl_flashsample.sglang import runtime as runtime_module
from sgl_flashsample.sglang.hooks import StepHooks
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.model_graph import MODEL_GRAPHS_VARIABLE, ExtraRoot
from sgl_flashsample.sglang.runtime import Runtime

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
    """A function that pretends a GPU of a compute capability, and a value of the variable."""

    def pretend(capability: tuple[int, int], value: str | None) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(model_graph, "_driver", Driver)
        monkeypatch.delenv(MODEL_GRAPHS_VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(MODEL_GRAPHS_VARIABLE, value)

    return pretend


@pytest.mark.parametrize(
    ("capability", "value", "added"),
    [((9, 0), None, True), ((8, 0), None, False), ((10, 0), None, False), ((9, 0), "0", False), ((8, 0), "1", True)],
)
def test_graphs_get_the_root_where_it_was_measured_or_asked_for(gpu, capability, value, added, caplog):
    gpu(capability, value)
    with caplog.at_level(logging.INFO, logger="sgl_flashsample"):
        root = ExtraRoot.of_device(CUDA)
    assert (root is not None) is added
    assert (MODEL_GRAPHS_VARIABLE in caplog.text) is added
    if root is not None:
        root.add(STREAM)
        assert root._driver.added == [(GRAPH, None, 0, EVENT)]


def test_the_host_has_no_graphs(gpu):
    gpu((9, 0), "1")
    assert ExtraRoot.of_device(torch.device("cpu")) is None


def test_without_a_cuda_driver_the_server_goes_without(gpu, monkeypatch, caplog):
    gpu((9, 0), None)

    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(model_graph, "_driver", missing)
    assert ExtraRoot.of_device(CUDA) is None
    assert "libcuda.so.1" in caplog.text


@pytest.mark.parametrize(("capturing", "deferred", "added"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_it_is_added_where_a_capture_leaves_the_logits_to_us(monkeypatch, capturing, deferred, added):
    runtime = Runtime("a test")
    runtime._extra_root = root_of(driver := Driver())
    state = types.SimpleNamespace()
    monkeypatch.setattr(runtime, "can_defer", lambda *_: state if deferred else None)
    monkeypatch.setattr(runtime_module, "_is_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=STREAM))
    logits = StepHooks(runtime).get_logits(
        lambda *_: "logits", types.SimpleNamespace(vocab_size=8), torch.zeros(2, 4), None, None
    )
    assert isinstance(logits, LazyLogits) is deferred
    assert len(driver.added) == added


@pytest.mark.gpu
def test_a_graph_with_the_root_has_two_roots_and_the_same_results(monkeypatch):
    monkeypatch.setenv(MODEL_GRAPHS_VARIABLE, "1")
    root = ExtraRoot.of_device(torch.device("cuda", torch.cuda.current_device()))
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
