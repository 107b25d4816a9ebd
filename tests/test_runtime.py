"""The plugin without a server: what it declines, how it follows a model, and what a failure of ours does."""

from __future__ import annotations

import dataclasses
import logging
import sys
import types

import pytest
import torch
from sgl_flashsample.kernels.features import Edit

from sgl_flashsample.sglang import counters, hooks, support
from sgl_flashsample.sglang.lazy_logits import LazyLogits
from sgl_flashsample.sglang.rows import Rows
from sgl_flashsample.sglang.runtime import HeadState, Runtime


class FakeLogitsProcessor:
    """What the plugin reads of SGLang's LogitsProcessor."""

    logit_scale = None
    final_logit_softcapping = None
    vocab_size = 100
    use_fp32_lm_head = False
    do_tensor_parallel_all_gather = False
    return_full_logits = False

    def forward(self): ...

    def _get_logits(self): ...

    def _compute_lm_head(self): ...


class OtherLogitsProcessor(FakeLogitsProcessor):
    def _compute_lm_head(self): ...


@pytest.fixture
def sglang(monkeypatch):
    """A stand-in for the one SGLang module that ``head_problem`` imports."""
    module = types.ModuleType("sglang.srt.layers.logits_processor")
    module.LogitsProcessor = FakeLogitsProcessor
    module.should_apply_lm_head_quant_method = lambda head, method: method is not None
    for name in ("sglang", "sglang.srt", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def runtime():
    made = Runtime("not asked yet")
    made.problem = None
    return made


def head(weight: torch.Tensor, **attributes) -> types.SimpleNamespace:
    return types.SimpleNamespace(weight=weight, quant_method=None, **attributes)


def processor(kind=FakeLogitsProcessor, **attributes):
    made = kind()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


WEIGHT = torch.zeros(104, 16)


def test_an_ordinary_head_is_served(sglang, device):
    assert support.head_problem(processor(), head(WEIGHT.to(device))) is None


@pytest.mark.parametrize(
    "own, lm_head, words",
    [
        (processor(OtherLogitsProcessor), head(WEIGHT), "has its own _compute_lm_head"),
        (processor(), head(WEIGHT, set_lora=1, apply_lora=1), "LoRA"),
        (processor(), types.SimpleNamespace(), "no two-dimensional weight"),
        (processor(), head(torch.zeros(4, 4, 4)), "no two-dimensional weight"),
        (processor(), types.SimpleNamespace(weight=WEIGHT, quant_method=object()), "quantised (object)"),
        (processor(), head(WEIGHT.to(torch.int8)), "torch.int8"),
        (processor(), head(torch.zeros(16, 104).T), "not contiguous"),
        (processor(), head(WEIGHT, use_intel_amx_backend=True), "AMX"),
        (processor(), head(WEIGHT.bfloat16()), "bfloat16 is wrong in Triton's interpreter"),
        (processor(do_tensor_parallel_all_gather=True), head(WEIGHT), "gathered over ranks"),
        (processor(return_full_logits=True), head(WEIGHT), "full logits"),
        (processor(vocab_size=200), head(WEIGHT), "200 ids, the LM head 104 rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_head_that_cannot_be_fused_has_its_reason_in_words(sglang, own, lm_head, words):
    assert words in support.head_problem(own, lm_head)


def test_a_device_without_kernels_has_its_reason_in_words(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "Triton's interpreter is off (TRITON_INTERPRET=1)" in support.device_problem(torch.device("cpu"))
    assert "the device is meta; CUDA is needed" in support.device_problem(torch.device("meta"))


def test_a_head_follows_its_model(device):
    own, lm_head = processor(), head(torch.ones(104, 16, device=device))
    state = HeadState(own, lm_head)
    first = state.current()
    assert state.current() is first
    assert (first.vocab_size, first.softcap, first.logit_scale, first.rounding) == (100, None, None, torch.float32)
    own.logit_scale, own.final_logit_softcapping = 0.5, 30.0
    assert (state.current().logit_scale, state.current().softcap) == (0.5, 30.0)
    lm_head.weight = torch.zeros(104, 16, device=device)
    assert state.current().weight.data_ptr() == lm_head.weight.data_ptr()
    own.final_logit_softcapping = 0  # SGLang: no softcap
    assert state.current().softcap is None


def test_a_float32_head_option_keeps_the_accumulator(device):
    weight = torch.zeros(104, 16, dtype=torch.float16, device=device)
    assert HeadState(processor(), head(weight)).current().rounding == torch.float16
    assert HeadState(processor(use_fp32_lm_head=True), head(weight)).current().rounding == torch.float32


def test_scratch_grows_only_for_a_larger_batch(device):
    state = HeadState(processor(), head(torch.zeros(104, 16, device=device)))
    first = state.scratch(3)
    assert state.scratch(512) is first
    assert state.scratch(600) is not first


def test_a_server_whose_configuration_cannot_be_read_is_left_to_sglang(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", None)  # the import fails
    assert "configuration cannot be read" in Runtime(None).problem


def lazy_rows(device):
    hidden = torch.zeros(2, 16, device=device)
    zeros, ones = torch.zeros(2, dtype=torch.int64, device=device), torch.ones(2, device=device)
    needs, edits = ((False,) * 3,) * 2, (Edit(0),) * 2
    limits = (zeros.int(), ones, zeros.float())
    rows = Rows(
        (None, None),
        (False, False),
        (False, False),
        ones,
        zeros,
        needs,
        edits,
        *limits,
        (False, False),
        (1 << 30, 1 << 30),
    )
    return LazyLogits(hidden, 100, HeadState(processor(), head(torch.zeros(104, 8))), lambda h: h), rows


def test_a_failing_kernel_switches_the_fused_pass_off_with_one_warning(runtime, device, caplog):
    lazy, rows = lazy_rows(device)  # a head of another width: the launcher raises
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(3):
            assert runtime.sample(lazy, rows, None, torch.zeros(2, dtype=torch.int64), False) is None
    assert "hidden is (2, 16)" in runtime.problem
    assert len([record for record in caplog.records if "SGLang's own sampler takes over" in record.message]) == 1


def test_a_failing_hook_leaves_the_batch_to_sglang_instead_of_ending_the_scheduler(runtime):
    info = types.SimpleNamespace(_flashsample_rows="something")
    broken = types.SimpleNamespace(reqs=[object()], device="cpu")  # a request without the attributes we read
    hooks.Hooks(runtime).from_schedule_batch(None, info, broken, 100)
    assert info._flashsample_rows is None
    assert "from_schedule_batch: AttributeError" in runtime.problem


def test_counters_sum_batches_and_rows_per_path_and_reason():
    made = counters.Counters(metrics=False)
    made.add("native", "top_p", 4)
    for _ in range(3):
        made.add("fused", "", 500)
    assert made.summary() == "fused 1,500 rows in 3 batches; native (top_p) 4 rows in 1 batches"


def test_counters_say_how_many_truncated_rows_took_a_search():
    made = counters.Counters(metrics=False)
    made.add("fused", "", 9)
    assert made.summary() == "fused 9 rows in 1 batches", "no truncated row, no word of them"
    made.add_truncated(8, 1)
    made.add_truncated(1_000, 2)
    assert made.summary() == "fused 9 rows in 1 batches; truncated 1,008 rows, 3 of them searched"


def test_counters_say_what_a_batch_takes_of_the_hosts_time():
    made = counters.Counters(metrics=False)
    made.add_host_time(30e-6)
    made.add_host_time(55e-6)
    assert made.summary() == "host 42.5 us per batch over 2 batches"


def test_counters_on_the_device_are_asked_at_most_once_per_interval_and_never_waited_for(device, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(counters.time, "monotonic", lambda: clock[0])
    on_device = torch.tensor([5, 0], device=device)
    made = counters.DeviceCounters(on_device, 10.0)
    assert made.new() == (0, 0), "the copy has just been started"
    settle(device)
    on_device += torch.tensor([2, 1], device=device)
    assert made.new() == (5, 0)
    clock[0] += 9
    assert made.new() == (0, 0)
    clock[0] += 1
    assert made.new() == (0, 0)
    settle(device)
    assert [made.new(), made.new()] == [(2, 1), (0, 0)]


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def test_a_copy_that_has_not_arrived_is_left_alone(device):
    made = counters.DeviceCounters(torch.tensor([5], device=device), 0.0)
    made.new()
    settle(device)
    made._arrived = types.SimpleNamespace(query=lambda: False, record=None)
    assert [made.new(), made.new()] == [(0,), (0,)]
    made._arrived = types.SimpleNamespace(query=lambda: True, record=lambda: None)
    assert [made.new(), made.new()] == [(5,), (0,)]


def test_searches_are_counted_over_all_batches_whatever_scratch_they_had(device):
    """One counter for logits of both dtypes, for more rows, and for a larger workspace."""
    state = HeadState(processor(), head(torch.zeros(104, 16, device=device)))
    first, second = state.scratch(1), state.scratch(600)
    assert second is not first
    made = [w.kept(n, 100, dtype) for w in (first, second) for n, dtype in ((1, torch.float32), (9, torch.bfloat16))]
    made += [first.kept(20, 100, torch.float32)]
    assert {kept.searched.data_ptr() for kept in made} == {first.searched.data_ptr()}


def test_rows_drawn_with_a_truncation_and_their_searches_reach_the_counters(runtime, device, monkeypatch):
    lazy, rows = lazy_rows(device)
    state = lazy.source = HeadState(processor(), head(torch.ones(104, 16, device=device)))
    rows = dataclasses.replace(rows, needs=((False, True, False), (False,) * 3))
    monkeypatch.setattr(runtime.counters, "read_interval", 0.0)
    positions = torch.zeros(2, dtype=torch.int64, device=device)
    for _ in range(3):
        assert runtime.sample(lazy, rows, None, positions, False) is not None
        state.scratch(1).searched += 4
        settle(device)
    assert runtime.counters.summary() == "truncated 3 rows, 4 of them searched"


def test_counters_are_logged_once_per_interval(monkeypatch, caplog):
    monkeypatch.setenv(counters.LOG_SECONDS_VARIABLE, "0")
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        counters.Counters(metrics=False).add("fused", "", 1)
        monkeypatch.setenv(counters.LOG_SECONDS_VARIABLE, "1000")
        counters.Counters(metrics=False).add("fused", "", 1)
    assert len(caplog.records) == 1


def test_a_bad_interval_gets_one_warning_and_the_default(monkeypatch, caplog):
    monkeypatch.setenv(counters.LOG_SECONDS_VARIABLE, "often")
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        assert counters.Counters(metrics=False).interval == 60.0
    assert "FLASHSAMPLE_LOG_SECONDS is 'often'; expected seconds" in caplog.text


def test_a_failure_while_deciding_or_preparing_leaves_the_model_to_sglang(device):
    """Metadata and model runners without the attributes we read: an SGLang that is not the one we know."""
    for call in (
        lambda h: h.get_logits(lambda *arguments: "sglang's", processor(), torch.zeros(2, 16), head(WEIGHT), object()),
        lambda h: h.load_model("result", object()),
    ):
        made = Runtime("not asked yet")
        made.problem = None
        assert call(hooks.Hooks(made)) in ("sglang's", None)
        assert "AttributeError" in made.problem
