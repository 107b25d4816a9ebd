"""What a server counts, and how its counts reach the log and Prometheus."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch
from head_states import CPU, CountingCapture, make_state, settle
from sglang_batches import SteadyServer, grammar

from sgl_flashsample.kernels.workspace import ScreenCounter
from sgl_flashsample.sglang import metrics
from sgl_flashsample.sglang.batch import Routing, time_of_sglang
from sgl_flashsample.sglang.head import GraphInputs
from sgl_flashsample.sglang.metrics import LOG_SECONDS_VARIABLE, DeviceCounters, Metrics
from sgl_flashsample.sglang.settings import Settings
from sgl_flashsample.sglang.step_graphs import StepCounts

FUSED, MIXED = Routing((None,) * 500), Routing((None, "top_logprobs", "top_logprobs"))


def test_metrics_sum_batches_and_rows_per_path_and_reason():
    counted = Metrics(prometheus=False)
    counted.add_batch(MIXED, 0, None)
    counted.flush()
    for _ in range(3):
        counted.add_batch(FUSED, 0, None)
    counted.flush()
    assert counted.summary() == (
        "since the start: fused 1,501 rows in 4 batches; SGLang's sampler (top_logprobs) 2 rows in 1 batches"
    )


def test_metrics_say_how_many_truncated_rows_took_a_search():
    counted = Metrics(prometheus=False)
    counted.add_batch(FUSED, 0, None)
    counted.flush()
    assert counted.summary() == "since the start: fused 500 rows in 1 batches", (
        "without a truncated row, the summary does not name them"
    )
    counted.add_batch(FUSED, 400, None)
    counted.add_searched(3)
    counted.flush()
    assert counted.summary().endswith(", 400 of the rows with top-k, top-p or min-p (3 by a search)")


def test_metrics_say_what_a_batch_of_fused_rows_takes_of_the_hosts_time(clock):
    counted = Metrics(prometheus=False)
    counted.add_batch(FUSED, 0, clock[0] - 30e-6)
    counted.add_batch(FUSED, 0, clock[0] - 55e-6)
    counted.add_batch(MIXED, 0, None)
    counted.flush()
    assert counted.summary().endswith("; CPU time of fused sampling 42.5 us per batch over 2 batches")


SCREENED = {ScreenCounter.ROW_BLOCKS: 4, ScreenCounter.ROWS: 40, ScreenCounter.GROUPS: 18}
SCREENED |= {ScreenCounter.CANDIDATES: 60, ScreenCounter.CERTIFIED_ROWS: 30, ScreenCounter.MANY_CANDIDATES: 1}


def test_metrics_say_how_far_a_screen_could_tell():
    counted = Metrics(prometheus=False)
    counted.add_screened([0] * len(ScreenCounter), paused=False)
    assert counted.summary() == "", "without a screened row, the summary does not name them"
    counted.add_screened([SCREENED[counter] for counter in ScreenCounter], paused=False)
    line = (
        "since the start: screen 40 rows (30 with one candidate group or none), 4.5 of the head's groups read per "
        "block of rows, 1 of 4 blocks with too many candidates"
    )
    assert counted.summary() == line
    counted.add_screened([0] * len(ScreenCounter), paused=True)
    assert counted.summary() == f"{line}, paused"


def test_metrics_say_how_many_steps_were_replayed():
    counted, steps = Metrics(prometheus=False), StepCounts(launched=3)
    counted.add_steps(steps)
    assert counted.summary() == "", "without a replayed step, the summary does not name them"
    for _ in range(2):
        steps.replayed, steps.launched, steps.late_captures = 1_000, 5, 2
        counted.add_steps(steps)
        assert steps == StepCounts(), "nothing is added twice"
    assert counted.summary() == "since the start: 2,000 of 2,013 decode steps by CUDA graphs"


def test_prometheus_has_the_same_numbers(prometheus):
    counted = Metrics(prometheus=True)
    for routing in (FUSED, MIXED):
        counted.add_batch(routing, 7, 0.0)
    counted.flush()
    counted.add_searched(3)
    fused, native = {"path": "fused", "reason": ""}, {"path": "native", "reason": "top_logprobs"}
    assert [prometheus("rows_total", **each) for each in (fused, native)] == [501, 2]
    assert [prometheus("batches_total", **each) for each in (fused, native)] == [2, 1]
    assert [prometheus(f"{name}_rows_total") for name in ("truncated", "searched")] == [14, 3]
    assert prometheus("host_seconds_count") == 2 and prometheus("host_seconds_sum") > 0
    for _ in range(2):
        counted.add_steps(StepCounts(replayed=30, launched=5, late_captures=2, late_compiles=4))
    steps = ("replayed_steps", "launched_steps", "late_captures", "late_compiles")
    assert [prometheus(f"{name}_total") for name in steps] == [60, 10, 4, 8]
    for paused in (True, True, False):
        counted.add_screened([SCREENED[counter] for counter in ScreenCounter], paused)
        assert prometheus("screen_paused") == paused
    for counter, number in SCREENED.items():
        assert prometheus(f"screen_{counter.name.lower()}_total") == 3 * number


def test_prometheus_has_the_distribution_of_the_hosts_time(prometheus, clock):
    counted = Metrics(prometheus=True)
    for us in (8, 35, 36, 36, 900):
        counted.add_fused(1, 0, clock[0] - us * 1e-6)
    counted.add_batch(FUSED, 0, clock[0] - 2.0)
    for _ in range(2):
        counted.flush()
        at_most = {le: prometheus("host_seconds_bucket", le=le) for le in ("1e-05", "3e-05", "4e-05", "0.001", "+Inf")}
        assert at_most == {"1e-05": 1, "3e-05": 1, "4e-05": 4, "0.001": 5, "+Inf": 6}
    assert prometheus("host_seconds_count") == 6
    assert prometheus("host_seconds_sum") == pytest.approx(2.0 + 1015e-6)


def test_every_metric_has_the_labels_of_the_server(prometheus):
    labels = {"model_name": "m", "tp_rank": "1", "path": "is a label of ours"}
    counted = Metrics(prometheus=True, labels=labels)
    counted.add_batch(FUSED, 7, 0.0)
    counted.flush()
    del labels["path"]
    gauges_and_counters = ("active", "screen_paused", "truncated_rows_total", "host_seconds_count", "screen_rows_total")
    assert None not in [prometheus(name, **labels) for name in gauges_and_counters]
    assert prometheus("rows_total", path="fused", reason="", **labels) == 500


@pytest.mark.parametrize(
    "changes, labels",
    [
        ({}, {}),
        ({"disagg.disaggregation_mode": "prefill"}, {"engine_type": "prefill"}),
        ({"disagg.enable_pd_role_switch": True}, {"engine_type": "dynamic"}),
        ({"parallel.tp_size": 4, "parallel.tp_rank": 3}, {"tp_rank": "3", "moe_ep_rank": "1"}),
        ({"parallel.pp_rank": 1, "parallel.dp_rank": 2}, {"pp_rank": "1", "dp_rank": "2"}),
        ({"observability.extra_metric_labels": {"zone": "a"}}, {"zone": "a"}),
    ],
)
def test_the_labels_are_those_of_sglangs_own_metrics(server_config, changes, labels):
    server_config.observability.enable_metrics = True
    server_config.parallel.moe_ep_rank = 1
    for path, value in changes.items():
        part, name = path.split(".")
        setattr(getattr(server_config, part), name, value)
    plain = {"model_name": "model", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
    assert Settings.of_server().metric_labels == plain | labels


def test_labels_that_cannot_be_read_are_left_out_after_a_warning(server_config, caplog):
    server_config.observability.enable_metrics = True
    del server_config.serving.served_model_name
    settings = Settings.of_server()
    assert (settings.unsupported, settings.metrics, settings.metric_labels) == (None, True, {})
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith("flashsample: metrics have no labels of SGLang: AttributeError: ")


def test_without_prometheus_client_the_server_counts_into_its_log_alone_after_one_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    counted = Metrics(prometheus=True)
    counted.add_batch(FUSED, 0, None)
    counted.flush()
    assert counted.summary() == "since the start: fused 500 rows in 1 batches"
    (warning,) = [record.message for record in caplog.records]
    assert warning.endswith("prometheus_client is not installed: no flashsample metrics")


def test_counters_on_the_device_are_asked_at_most_once_per_interval_and_never_waited_for(device, clock):
    on_device = torch.tensor([5, 0], device=device)
    counters = DeviceCounters(on_device, 10.0)
    assert counters.new() == (0, 0), "the copy has just been started"
    settle(device)
    on_device += torch.tensor([2, 1], device=device)
    assert counters.new() == (5, 0)
    clock[0] += 9
    assert counters.new() == (0, 0)
    clock[0] += 1
    assert counters.new() == (0, 0)
    settle(device)
    assert [counters.new(), counters.new()] == [(2, 1), (0, 0)]


def test_a_copy_that_has_not_arrived_is_left_alone(device):
    counters = DeviceCounters(torch.tensor([5], device=device), 0.0)
    counters.new()
    settle(device)
    counters._arrived = types.SimpleNamespace(query=lambda: False, record=None)
    assert [counters.new(), counters.new()] == [(0,), (0,)]
    counters._arrived = types.SimpleNamespace(query=lambda: True, record=lambda: None)
    assert [counters.new(), counters.new()] == [(5,), (0,)]


def test_metrics_reach_the_log_once_per_interval_and_prometheus_more_often(monkeypatch, clock, caplog):
    monkeypatch.setenv(LOG_SECONDS_VARIABLE, "10")
    counted = Metrics(prometheus=False)
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        flushed = []
        for _ in range(40):
            clock[0] += 0.5
            flushed.append(counted.add_batch(FUSED, 0, None))
            if flushed[-1]:
                counted.flush()
    assert flushed == [False, True] * 20 and metrics.FLUSH_SECONDS == 1.0
    assert [record.message for record in caplog.records] == [
        "flashsample: since the start: fused 10,000 rows in 20 batches",
        "flashsample: since the start: fused 20,000 rows in 40 batches",
    ]


@pytest.mark.parametrize("text", ["0", "0.25", "1e3", None])
def test_the_interval_is_the_environments(monkeypatch, text):
    monkeypatch.delenv(LOG_SECONDS_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(LOG_SECONDS_VARIABLE, text)
    good = {"0": 0.0, "0.25": 0.25, "1e3": 1000.0}
    seconds, counted = good.get(text, 60.0), Metrics(prometheus=False)
    assert (counted.log_seconds, counted.read_seconds) == (seconds, min(seconds, 1.0))


def test_truncated_rows_and_their_searches_reach_the_metrics(device, one_rank, script, monkeypatch):
    monkeypatch.setenv(LOG_SECONDS_VARIABLE, "0")
    state = make_state(device, script=script)
    of_sglang = {"top_k": 4, "temperature": 1.0, "mask": True}
    server = SteadyServer(device, state, [{"top_k": 4, "temperature": 1.0}, {"temperature": 1.0}, of_sglang])
    for _ in range(3):
        server.step()
        state.head.searched.add_(4)
        settle(device)
    summary = server.runtime.metrics.summary()
    assert ", 3 of the rows with top-k, top-p or min-p (4 by a search); " in summary, (
        "the counts that had arrived before the last step"
    )


@pytest.mark.parametrize("how", ["launched", "replayed", "fails"])
def test_the_host_time_of_a_step_has_none_of_sglangs_own_grammars_and_penalties(
    one_rank, clock, monkeypatch, how, prometheus
):
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    time_of_sglang.take()  # what tests before this one have left
    failures = [ValueError("no mask")] if how == "fails" else []

    def slow(name: str, seconds: float) -> None:
        original = getattr(SamplingBatchInfo, name)

        def takes_long(info) -> None:
            clock[0] += seconds
            original(info)
            if failures and name == "update_regex_vocab_mask":
                raise failures.pop()

        monkeypatch.setattr(SamplingBatchInfo, name, takes_long)

    capture = CountingCapture()
    state = make_state(CPU, capture=capture if how == "replayed" else None)
    server = SteadyServer(CPU, state, [{"grammar": grammar(5, 6), "frequency_penalty": 0.5}, {}])
    server.runtime.settings.report_path = False
    state.inputs = GraphInputs(server.positions, torch.tensor([1, 2]))
    server.runtime.metrics = counted = Metrics(prometheus=True)
    slow("update_regex_vocab_mask", 5.0)
    slow("update_penalties", 7.0)
    for _ in range(12):
        server.step()
    counted.flush()
    assert clock[0] > 140, "SGLang's own code ran, with a clock that only it moves"
    assert prometheus("host_seconds_sum") == 0 and prometheus("host_seconds_count") == (0 if how == "fails" else 12)
    assert (capture.replays > 0) is (how == "replayed")
    # A batch of SGLang's sampler leaves seconds behind, which are not taken off the next batch.
    server.take([{}, {}])
    monkeypatch.setattr(server.sampler, "_route", lambda *args, route=server.sampler._route: _late(clock, route(*args)))
    server.step()
    counted.flush()
    assert prometheus("host_seconds_sum") == pytest.approx(2.0)


def _late(clock: list[float], result):
    clock[0] += 2.0
    return result
