from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from fake_head import FakeHead, Script
from head_states import hidden_states, pretended_sglang
from serving import needs_sglang
from sglang_batches import Configuration, CountingHead, ModelRunner, ScheduleBatch, make_samplers, sampling_info

from sgl_flashsample.sglang import head as head_module
from sgl_flashsample.sglang import hooks, versions
from sgl_flashsample.sglang import runtime as runtime_module
from sgl_flashsample.sglang.hooks import READING_METHODS, WRITING_METHODS, StepHooks
from sgl_flashsample.sglang.runtime import Runtime


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "one_rank" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            item.add_marker(needs_sglang)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The seconds that ``time.monotonic`` and ``time.perf_counter`` give, in a list of one."""
    now = [100.0]
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(f"time.{name}", lambda: now[0])
    return now


@pytest.fixture
def prometheus(monkeypatch):
    """A function that returns the value of a metric, summed over the labels that it is not given, or None if it has
    none."""
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        made = getattr(client, kind)
        monkeypatch.setattr(client, kind, lambda *args, made=made, **kw: made(*args, registry=registry, **kw))

    def value(name: str, **labels: str) -> float | None:
        samples = [sample for metric in registry.collect() for sample in metric.samples]
        found = [
            sample.value
            for sample in samples
            if sample.name == f"sglang:flashsample_{name}" and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None

    return value


@pytest.fixture
def pretend(monkeypatch) -> Callable[..., None]:
    """A function that puts a module with these attributes in the place of one of SGLang's, or of ours that imports
    SGLang."""

    def put(name: str, **attributes: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    return put


@pytest.fixture
def server_config(pretend) -> types.SimpleNamespace:
    """SGLang's modules in which we look up a server's settings are pretended. The settings are those of a plain server;
    a test may change them."""
    config, modules = pretended_sglang()
    for name, attributes in modules.items():
        pretend(name, **attributes)
    return config


@pytest.fixture
def pretend_gpu(monkeypatch) -> Callable[..., None]:
    """A function that says whether there is a GPU, and whether its stream, number 11, is capturing."""

    def say(is_available: bool, is_capturing: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
        monkeypatch.setattr(runtime_module, "has_cuda", lambda: is_available)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(cuda_stream=11))

    return say


@pytest.fixture
def in_host_memory(monkeypatch) -> None:
    """Rows on a CPU are drawn without Triton's interpreter."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


@pytest.fixture
def runtime(server_config) -> Runtime:
    """The runtime of a server in which the fused pass is active."""
    return Runtime(None)


@pytest.fixture
def one_rank(monkeypatch) -> None:
    """SGLang's code runs without a server: a configuration, and one rank. A test with it needs SGLang."""
    import sglang.srt.layers.sampler as sglang_sampler
    import sglang.srt.sampling.sampling_batch_info as batch_info

    import sgl_flashsample.sglang.sampler as our_sampler

    configuration = Configuration()
    for module in (sglang_sampler, batch_info, our_sampler):
        for name in ("get_exec", "get_parallel", "get_server_args"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda: configuration)
    monkeypatch.setattr(sglang_sampler, "is_dp_attention_enabled", lambda: False)
    if hasattr(sglang_sampler, "get_tp_group"):  # SGLang 0.5.17
        monkeypatch.setattr(sglang_sampler, "get_tp_group", lambda: configuration.tp_group)
    monkeypatch.setattr(sglang_sampler.Sampler, "_sync_token_ids_across_tp", lambda *arguments: None)


@pytest.fixture
def runners(one_rank) -> tuple[ModelRunner, ModelRunner]:
    """Ours and stock."""
    ours, stock = make_samplers()
    return ModelRunner(ours, StepHooks(ours.runtime)), ModelRunner(stock)


@pytest.fixture
def script() -> Script:
    """The part of the fake heads in a test."""
    return Script()


@pytest.fixture
def head(device, script) -> CountingHead:
    return CountingHead(device, script=script)


@pytest.fixture
def fake_heads(monkeypatch, script) -> None:
    """The heads that a server makes are fake ones."""
    monkeypatch.setattr(head_module, "Head", functools.partial(FakeHead, script=script))


@pytest.fixture
def info_of(device, one_rank):
    """SGLang's SamplingBatchInfo of requests."""
    batches = []  # penalizers refer to the batch weakly

    def make(requests):
        batches.append(ScheduleBatch(requests, device))
        return sampling_info(batches[-1])

    return make


@pytest.fixture
def hidden(device):
    """Hidden states for the ``head``."""

    def make(rows: int, seed: int = 3) -> torch.Tensor:
        return hidden_states(device, rows, seed, torch.float32)

    return make


@pytest.fixture
def registry(monkeypatch, server_config, pretend) -> types.SimpleNamespace:
    """SGLang's registry of hooks, in which all of them land. missing: targets that this SGLang lacks. hooked: what was
    applied, {target: (hook, when)}, by ``apply``. registered: what was only registered."""
    noted = types.SimpleNamespace(
        missing=set(), registered=[], hooked={}, apply=lambda table: noted.hooked.update(table)
    )
    pretend(
        "sglang.srt.plugins.hook_registry",
        HookRegistry=types.SimpleNamespace(register=lambda target, *_: noted.registered.append(target)),
        HookType=types.SimpleNamespace(AROUND="around", BEFORE="before", AFTER="after"),
    )
    monkeypatch.setattr(hooks, "apply_hooks", lambda table: noted.apply(table))
    verification = types.SimpleNamespace(eagle_sample="sample", compute_logprobs="logs")
    pretend("sgl_flashsample.sglang.speculation", SpeculationHooks=lambda runtime: verification)
    monkeypatch.setattr(
        versions, "unsupported_target", lambda target, want=None: f"no {target}" if target in noted.missing else None
    )
    return noted


@pytest.fixture
def classes(monkeypatch) -> dict[str, Any]:
    """SGLang's classes that change weights, with the methods that we know; an error in the place of what is missing."""

    def known(path):
        required, possible = WRITING_METHODS[path]
        return {name: (lambda self: None) for name in required | possible | READING_METHODS}

    def resolve(path: str) -> Any:
        found = kinds.get(path, print)
        if isinstance(found, Exception):
            raise found
        return found

    kinds: dict[str, Any] = {path: type("Kind", (), known(path)) for path in WRITING_METHODS}
    monkeypatch.setattr(hooks.pkgutil, "resolve_name", resolve)
    return kinds
