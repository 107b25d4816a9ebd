"""``sgl-flashsample bench``: what is measured, in which order, and what is called a difference."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import math
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from serving import CUDA, needs_sglang

from sgl_flashsample.files import check_output, write_whole
from sgl_flashsample.tools import bench, markov, progress
from sgl_flashsample.tools.comparison import EQUAL, FASTER, OPEN, SLOWER
from sgl_flashsample.tools.server import RequestError, Server, ServerError

LAB = Path(__file__).resolve().parents[1] / "lab"
LOAD = bench.Load(range(10, 90), prompt_tokens=4, short=2, long=6, seconds=0.0)


class Clock:
    """Time goes by only when a server works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class FakeServer:
    """Starts in ``ready`` seconds, and answers after some seconds per token (or a function of the parameters). log: of
    all servers, who was asked for the long answer, in order."""

    metrics_seconds = 0.0
    environment: dict[str, str] = {}  # noqa: RUF012
    port = 0

    def __init__(
        self, label, seconds, log, *, starts=None, ready=0.0, active=True, refuses=lambda params, batch: False
    ):
        self.label, self.log, self.active, self.refuses = label, log, active, refuses
        self.seconds = seconds if callable(seconds) else lambda params: seconds
        self.starts, self.ready, self.rows = starts, ready, 0

    def __enter__(self):
        CLOCK.now += self.ready
        if self.starts is not None:
            raise ServerError(self.starts)
        self.log.append(f"+{self.label}")
        return self

    def __exit__(self, *error):
        self.log.append(f"-{self.label}")

    def generate(self, *, input_ids, sampling_params, **fields):
        assert all(token in LOAD.ids for prompt in input_ids for token in prompt)
        tokens = sampling_params["max_new_tokens"]
        if self.refuses(sampling_params, len(input_ids)):
            raise RequestError("/generate answered 400: no grammar backend")
        if tokens == LOAD.long:
            self.log.append(self.label)
        self.rows += tokens * len(input_ids)
        CLOCK.now += self.seconds(sampling_params) * tokens
        return [{"output_ids": [0] * tokens} for _ in input_ids]

    def ask(self, path, data):
        assert path == "/generate"
        return json.dumps(self.generate(**json.loads(data))).encode()

    def stream(self, *, input_ids, sampling_params, **fields):
        for tokens in range(sampling_params["max_new_tokens"]):
            CLOCK.now += self.seconds(sampling_params)
            yield json.dumps({"output_ids": [0] * (tokens + 1)}).encode()

    def metrics(self):
        if self.label == bench.STOCK:
            return ""
        return (
            f'sglang:flashsample_rows_total{{path="fused",reason=""}} {self.rows}\n'
            f"sglang:flashsample_host_seconds_sum {self.rows * 4e-5}\n"
            f"sglang:flashsample_host_seconds_count {self.rows}\n"
        )

    def get(self, path):
        return {"internal_states": [{"flashsample": {"active": self.active, "reason": None if self.active else "tp"}}]}


def make_bench(tmp_path, servers, **changes):
    """A comparison of fake servers, and what they were asked for. servers: {label: options of FakeServer}."""
    log: list[str] = []
    values = {
        "model": "M",
        "samplings": ("t1",),
        "batches": (2,),
        "logs": tmp_path,
        "load": LOAD,
        "arguments": (),
    }
    comparison = bench.Bench(bench.Options(**values | changes), tmp_path / "b.json", tmp_path / "b.html")
    comparison.server = lambda label: FakeServer(label, log=log, **{"seconds": 0.001} | servers.get(label, {}))
    return comparison, log


@pytest.fixture
def memory(monkeypatch):
    """Sets the share of the memory that one server takes."""
    monkeypatch.setattr(bench, "memory_share", lambda device: 0.1)
    for module, name in ((bench, "perf_counter"), (bench, "monotonic"), (progress, "monotonic")):
        monkeypatch.setattr(module, name, CLOCK)
    return lambda share: monkeypatch.setattr(bench, "memory_share", lambda device: share)


# --- what is measured -----------------------------------------------------------------------------------------------


def test_a_sample_of_a_fast_server_is_the_median_of_many_answers_and_one_that_is_held_up_does_not_count(monkeypatch):
    monkeypatch.setattr(bench, "perf_counter", CLOCK)

    class HeldUp(FakeServer):
        def generate(self, *, sampling_params, **fields):
            CLOCK.now += 5.0 * (sampling_params["max_new_tokens"] == LOAD.long and len(self.log) == 1)
            return super().generate(sampling_params=sampling_params, **fields)

    log: list[str] = []
    load = LOAD._replace(seconds=0.0199)
    us = bench.tpot_us(HeldUp("ours", 0.001, log), load, 2, bench.SAMPLINGS["greedy"])
    assert us == pytest.approx(1000.0) and len(log) == 5, "answers of 4 tokens more than the short ones, 1 ms each"


def test_a_short_answer_that_is_held_up_does_not_make_a_sample_longer(monkeypatch):
    monkeypatch.setattr(bench, "perf_counter", CLOCK)

    class HeldUp(FakeServer):
        def generate(self, *, sampling_params, **fields):
            first_short = sampling_params["max_new_tokens"] == LOAD.short and not self.log
            CLOCK.now += first_short * 0.0039999  # all but the difference between the two answers
            return super().generate(sampling_params=sampling_params, **fields)

    log: list[str] = []
    us = bench.tpot_us(HeldUp("ours", 0.001, log), LOAD._replace(seconds=0.0079), 2, bench.SAMPLINGS["greedy"])
    assert us == pytest.approx(1000.0) and len(log) == 3


def test_gaps_are_not_those_of_a_batch_whose_other_requests_failed(monkeypatch):
    monkeypatch.setattr(bench, "perf_counter", CLOCK)
    server = FakeServer("ours", 0.001, [], refuses=lambda params, batch: batch == 7)
    with pytest.raises(RequestError, match="answered 400"):
        bench.gaps_us(server, LOAD, 8, bench.SAMPLINGS["greedy"])


def test_the_time_in_which_an_answer_is_read_as_json_is_not_the_servers(monkeypatch):
    def slowly(text):
        CLOCK.now += 3.0
        return json.loads(text)

    monkeypatch.setattr(bench, "perf_counter", CLOCK)
    monkeypatch.setattr(bench, "json", types.SimpleNamespace(dumps=json.dumps, loads=slowly))
    server = FakeServer("ours", 0.001, [])
    seconds = bench.generate(server, LOAD, 2, bench.SAMPLINGS["top-logprobs"], LOAD.long)
    assert seconds == pytest.approx(0.001 * LOAD.long)


# --- what is compared -----------------------------------------------------------------------------------------------


def cell_of(stock, ours, **fields):
    return bench.Cell("t1", 1, {bench.STOCK: stock, bench.OURS: ours}, **fields)


def test_servers_side_by_side_are_compared_by_pairs_of_samples():
    cell = cell_of([[1000.0, 2000.0, 4000.0, 1000.0]], [[900.0, 1800.0, 3600.0, 900.0]], seconds=8.0)
    assert cell.comparison.pairs == 4 and cell.comparison.change == pytest.approx(-0.1)
    assert cell.pair_seconds == 2.0 and cell.verdict == "faster by 10.0 ± 0.1 %"


def test_servers_in_turns_are_compared_by_the_medians_of_their_starts():
    """A difference between two starts is no difference between servers, however many samples each start has."""
    starts = [[1000.0] * 9, [1100.0] * 9], [[1100.0] * 9, [1000.0] * 9]
    cell = cell_of(*starts, in_turns=True)
    assert cell.comparison.pairs == 2 and cell.comparison.answer == OPEN
    assert cell.comparison.change == pytest.approx(0.0, abs=1e-9)


def test_equal_servers_in_turns_are_seldom_called_different_and_a_slower_one_is_found():
    g = random.Random(5)

    def starts(mean, number):
        of_starts = [mean * g.gauss(1.0, 0.003) for _ in range(number)]
        return [[of_start * g.gauss(1.0, 0.002) for _ in range(2)] for of_start in of_starts]

    equal = [cell_of(starts(5000, 6), starts(5000, 6), in_turns=True).comparison.answer for _ in range(1000)]
    assert sum(answer in (FASTER, SLOWER) for answer in equal) <= 20
    slower = [cell_of(starts(5000, 6), starts(5500, 6), in_turns=True).comparison.answer for _ in range(50)]
    assert slower == [SLOWER] * 50


def test_percentiles_of_the_times_between_tokens_are_those_of_numpy():
    cell = bench.Cell("t1", 1, gaps={bench.OURS: [float(gap) for gap in range(1, 101)]})
    assert cell.percentiles(bench.OURS) == pytest.approx([50.5, 99.01]) and cell.percentiles(bench.STOCK) == []


# --- how it runs ----------------------------------------------------------------------------------------------------


def test_two_servers_that_fit_are_asked_by_turns_and_each_comes_first_as_often(tmp_path, memory, capsys):
    comparison, log = make_bench(tmp_path, {bench.OURS: {"seconds": 0.003}}, batches=(1, 2))
    comparison.run()
    assert comparison.mode == bench.SIDE_BY_SIDE
    turn = [bench.STOCK, bench.OURS, bench.OURS, bench.STOCK]
    streams = [bench.STOCK, bench.OURS]  # beside which the rest of a batch of two is answered
    assert log == ["+stock", "+flashsample", *turn, *turn, *streams, *turn, *turn, "-flashsample", "-stock"]
    cells = comparison.cells
    assert [(cell.sampling, cell.batch) for cell in cells] == [("t1", 1), ("t1", 2)]
    assert all(cell.comparison.answer == SLOWER and cell.paths == {"fused": 1.0} for cell in cells)
    assert all(abs(cell.host_us - 40) < 1 for cell in cells)
    for cell in cells:
        assert len(cell.gaps[bench.OURS]) == LOAD.long - LOAD.short - 1
        assert cell.percentiles(bench.OURS)[0] > 2.5 * 1000 > cell.percentiles(bench.STOCK)[0]
    printed = capsys.readouterr().out
    assert "M: stock SGLang -> flashsample, 2 cells; about 10 minutes, starts of the servers included" in printed
    assert f"temperature 1; batch of 2: {cells[1].verdict}\n    µs per token 1000 -> 3000; 4 pairs: +200" in printed
    assert "served by fused 100%" in printed and "2 of 2 cells decided in 0 minutes\n" in printed
    written = json.loads((tmp_path / "b.json").read_text())
    assert [row["backend"] for row in written["rows"]] == ["stock", "flashsample"] * 2
    assert all(len(row["samples"]) == 4 and row["itl_p99_us"] >= row["itl_p50_us"] > 0 for row in written["rows"])
    assert written["comparisons"][0]["verdict"] == cells[0].verdict
    assert (written["comparisons"][0]["answer"], written["comparisons"][0]["pairs"]) == (SLOWER, 4)


def noisy(seconds: float, changes: dict[str, float], spread: float, seed: int):
    """Seconds per token that differ from answer to answer, and by so much for each sampling."""
    g = random.Random(seed)

    def of(params):
        name = next(n for n in ("greedy", "trunc", "t1") if bench.SAMPLINGS[n].params.items() <= params.items())
        return seconds * math.exp(changes.get(name, 0.0) + g.gauss(0.0, spread))

    return of


EIGHT_B = bench.Load(range(10, 90), prompt_tokens=4)


@pytest.mark.parametrize("seed", range(3))
def test_ten_minutes_decide_eight_of_nine_cells_of_an_8b_server(tmp_path, memory, seed):
    """Servers that take 75 s to start and 5 ms per token, with the changes and the spread of pairs (1.3 %) that were
    measured for Qwen3-8B on an H100; greedy requests are a harder case, equal."""
    changes, ready = {"t1": -0.05, "trunc": -0.075}, {"ready": 75.0}
    servers = {
        bench.STOCK: ready | {"seconds": noisy(0.005, {}, 0.009, seed)},
        bench.OURS: ready | {"seconds": noisy(0.005, changes, 0.009, 100 + seed)},
    }
    began = CLOCK.now
    comparison, _ = make_bench(
        tmp_path, servers, samplings=("t1", "trunc", "greedy"), batches=(1, 8, 32), load=EIGHT_B, minutes=10.0
    )
    comparison.run()
    assert CLOCK.now - began < 610
    answers = {(cell.sampling, cell.batch): cell.comparison.answer for cell in comparison.cells}
    assert len(answers) == 9 and sum(answer != OPEN for answer in answers.values()) >= 8
    assert all(answers[name, batch] == FASTER for name in changes for batch in (1, 8, 32))
    assert {answers["greedy", batch] for batch in (1, 8, 32)} <= {EQUAL, OPEN}


def test_what_decided_cells_leave_over_goes_to_the_others_and_the_time_ends_it(tmp_path, memory, capsys):
    servers = {
        bench.STOCK: {"seconds": noisy(0.005, {}, 0.0, 1)},
        bench.OURS: {"seconds": noisy(0.005, {"t1": -0.1}, 0.0, 2)},
    }
    unsteady = noisy(0.005, {}, 0.2, 3)
    steady = servers[bench.OURS]["seconds"]
    servers[bench.OURS]["seconds"] = lambda params: (unsteady if params["temperature"] == 0.0 else steady)(params)
    comparison, _ = make_bench(tmp_path, servers, samplings=("t1", "greedy"), load=EIGHT_B, minutes=3.0)
    comparison.run()
    t1, greedy = comparison.cells
    assert t1.comparison.decided and t1.comparison.pairs == 4
    assert greedy.comparison.answer == OPEN and greedy.comparison.pairs > 40
    assert 180 <= comparison._progress.elapsed < 190
    printed = capsys.readouterr().out
    assert f"greedy; batch of 2: {greedy.verdict}\n" in printed
    more = greedy.comparison.more_pairs * greedy.pair_seconds
    minutes = math.ceil(comparison._progress.elapsed / 60 + more / 60)
    assert f"1 of 2 cells decided in 3 minutes; about --minutes {minutes} decides the others\n" in printed


def test_cells_that_were_not_reached_count_among_what_needs_more_time(tmp_path, memory, capsys):
    """Starts of 25 s each leave 10 s: one cell gets a pair of about 6 s, and each of two others needs four."""
    servers = {label: {"ready": 25.0, "seconds": 0.015} for label in (bench.STOCK, bench.OURS)}
    comparison, _ = make_bench(tmp_path, servers, batches=(1, 2, 3), load=EIGHT_B, minutes=1.0)
    comparison.run()
    (cell,) = comparison.cells
    seconds = comparison._progress.elapsed + (cell.comparison.more_pairs + 2 * 4) * cell.pair_seconds
    line = f"0 of 3 cells decided in 1 minutes; about --minutes {math.ceil(seconds / 60)} decides the others\n"
    assert line in capsys.readouterr().out and math.ceil(seconds / 60) == 3


@pytest.mark.parametrize("in_turns", [False, True])
def test_where_the_starts_take_all_the_time_nothing_is_measured_and_it_says_so(tmp_path, memory, in_turns):
    servers = {label: {"ready": 40.0} for label in (bench.STOCK, bench.OURS)}
    comparison, _ = make_bench(tmp_path, servers, minutes=0.5, in_turns=in_turns)
    with pytest.raises(ServerError, match=r"nothing was measured in 0\.5 minutes: --minutes gives it more"):
        comparison.run()
    assert not (tmp_path / "b.json").exists()


def test_a_page_has_the_answers_the_figure_and_what_they_depend_on(tmp_path, memory):
    pytest.importorskip("plotly")
    comparison, _ = make_bench(
        tmp_path, {bench.OURS: {"seconds": 0.0009}}, model="<M>", arguments=("--dtype", "bfloat16")
    )
    comparison.run()
    html, env = (tmp_path / "b.html").read_text(), json.loads((tmp_path / "b.json").read_text())["env"]
    versions = f"sglang {importlib.metadata.version('sglang')}, torch {env['torch']}"
    for said in (comparison.cells[0].verdict, "1000 -&gt; 900", env["date"], versions, "bfloat16", "plotly"):
        assert said in html
    assert "sgl-flashsample bench --model-path" in html and "<M>" not in html
    (figure,) = [trace for trace in bench.changes(comparison).data if trace.name == FASTER]
    assert figure.x[0] == pytest.approx(-10.0, abs=0.1) and 0 < figure.error_x.array[0] < 0.2
    assert figure.y == ("temperature 1; batch of 2",)


def no_grammars(params, batch):
    return "json_schema" in params


def no_pairs_of_temperature_1(params, batch):
    return batch == 2 and params["temperature"] == 1.0 and params["max_new_tokens"] == LOAD.short


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize(
    "refuses, left_out", [(no_grammars, [("json", 1), ("json", 2)]), (no_pairs_of_temperature_1, [("t1", 2)])]
)
def test_a_cell_that_a_server_refuses_is_left_out_with_its_reason_and_the_others_run(
    tmp_path, memory, capsys, in_turns, refuses, left_out
):
    samplings, batches = ("t1", "json"), (1, 2)
    servers = {bench.OURS: {"refuses": refuses}}
    comparison, _ = make_bench(tmp_path, servers, samplings=samplings, batches=batches, in_turns=in_turns)
    comparison.run()
    assert all(cell.comparison.pairs == 4 for cell in comparison.cells)
    places = [(sampling, batch) for sampling in samplings for batch in batches]
    assert [(cell.sampling, cell.batch) for cell in comparison.cells] == [one for one in places if one not in left_out]
    reason = "/generate answered 400: no grammar backend"
    assert comparison.missing == [{"sampling": s, "batch": b, "reason": reason} for s, b in left_out]
    assert f"{left_out[0][0]}, batch {left_out[0][1]}: left out, as a server refuses it: {reason}" in (
        capsys.readouterr().out
    )


def test_it_is_shown_at_any_time_what_is_done_and_what_is_known(tmp_path, memory, monkeypatch):
    """Also while the first server starts, and while the first requests of a cell are answered."""
    comparison, _ = make_bench(tmp_path, {bench.OURS: {"seconds": 0.0012}}, samplings=("t1", "greedy"), batches=(1,))
    shown: list[str] = []
    generate = bench.generate
    monkeypatch.setattr(FakeServer, "__enter__", lambda self: shown.append(comparison._progress.line) or self)
    monkeypatch.setattr(
        bench, "generate", lambda *arguments: shown.append(comparison._progress.line) or generate(*arguments)
    )
    comparison.run()
    whats = list(dict.fromkeys(line.partition(" for ")[0] for line in shown))
    of_cells = ["t1, batch 1", "greedy, batch 1"]
    of_stock, of_ours = (
        [f"starting {label}", *(f"{label}'s first requests of {sampling}" for sampling in ("t1", "greedy"))]
        for label in (bench.STOCK, bench.OURS)
    )
    assert whats == of_stock + of_ours + of_cells
    assert shown[0] == "starting stock for 0 s; 0 of 2 decided, at most 10 min left"
    known = list(dict.fromkeys(line.split(", ")[2].partition(";")[0] for line in shown if line.startswith("greedy")))
    assert known == ["no pair yet", "+20.0 %"]
    assert "; 1 of 2 decided, at most " in shown[-1]


def test_servers_that_refuse_everything_end_the_comparison(tmp_path, memory):
    comparison, log = make_bench(tmp_path, {bench.STOCK: {"refuses": lambda params, batch: True}})
    with pytest.raises(ServerError, match="refuse all requests; the last one: /generate answered 400"):
        comparison.run()
    assert log == ["+stock", "-stock"]


@pytest.mark.parametrize("label, value", [(bench.STOCK, "0"), (bench.OURS, "1")])
def test_a_stock_server_need_not_fuse_where_servers_are_required_to(tmp_path, monkeypatch, label, value):
    monkeypatch.setenv("FLASHSAMPLE_REQUIRE", "1")
    values = {"model": "M", "samplings": ("t1",), "batches": (2,), "logs": tmp_path, "load": LOAD}
    server = bench.Bench(bench.Options(**values, arguments=())).server(label)
    assert isinstance(server, Server) and server.environment["FLASHSAMPLE_REQUIRE"] == value


@pytest.mark.parametrize("label", [bench.STOCK, bench.OURS])
def test_both_servers_take_custom_logit_processors_where_requests_have_one(tmp_path, label):
    values = {"model": "M", "batches": (2,), "logs": tmp_path, "load": LOAD, "arguments": ()}
    for samplings, takes in ((("t1", "processor"), True), (("t1",), False)):
        server = bench.Bench(bench.Options(**values, samplings=samplings)).server(label)
        assert ("--enable-custom-logit-processor" in server._arguments) is takes


@needs_sglang
def test_sglang_reads_the_custom_logit_processor_of_such_requests():
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor

    processor = CustomLogitProcessor.from_str(bench.SAMPLINGS["processor"].fields["custom_logit_processor"])
    assert type(processor) is DisallowedTokensLogitsProcessor
    params = [bench.SAMPLINGS["processor"].params["custom_params"]] * 2
    assert processor(torch.zeros(2, 300), params).isinf().sum(1).tolist() == [2, 2]


def test_a_result_says_how_to_measure_it_again_and_what_is_missing(tmp_path, memory, monkeypatch):
    """And names no folder of the machine it was measured on."""
    folder = tmp_path / "Model-1B"
    folder.mkdir()
    comparison, _ = make_bench(tmp_path, {}, model=str(folder), batches=(1, 2), arguments=("--dtype", "float32"))
    measured = bench.measure

    def only_one(servers, load, sampling, batch, *args, **kwargs):
        if batch == 2:
            raise ServerError("gone")
        return measured(servers, load, sampling, batch, *args, **kwargs)

    monkeypatch.setattr(bench, "measure", only_one)
    with pytest.raises(ServerError, match="gone"):
        comparison.run()
    env = json.loads((tmp_path / "b.json").read_text())["env"]
    assert env["model"] == "Model-1B"
    assert env["not_run"] == [{"sampling": "t1", "batch": 2, "reason": "not reached"}]
    assert 0 <= env["minutes_taken"] < env["minutes"] == 10 and env["sglang"] == importlib.metadata.version("sglang")
    words = "--samplings t1 --batches 1,2 --minutes 10 --input-tokens 4 --output-tokens 6 --dtype float32"
    assert env["command"] == f"sgl-flashsample bench --model-path Model-1B {words}"


@pytest.mark.parametrize("why", ["asked for", "no room", "second does not start"])
def test_servers_that_do_not_fit_start_in_turns(tmp_path, memory, capsys, why):
    servers: dict = {}
    if why == "no room":
        memory(0.6)
    comparison, log = make_bench(tmp_path, servers, in_turns=why == "asked for")
    if why == "second does not start":
        make, started = comparison.server, []

        def fails_beside_another(label):
            server = make(label)
            started.append(label)
            if label == bench.OURS and len(started) == 2:
                server.starts = "the server ended with code 1: CUDA out of memory"
            return server

        comparison.server = fails_beside_another
    comparison.run()
    assert comparison.mode == bench.IN_TURNS
    starts = [entry for entry in log if entry.startswith("+")]
    assert starts[-8:] == ["+stock", "+flashsample", "+flashsample", "+stock"] * 2
    first, last = log.index("+flashsample"), max(place for place, entry in enumerate(log) if entry == "+flashsample")
    assert "-stock" in log[:first] and "-flashsample" in log[first:last], "one server at a time"
    (cell,) = comparison.cells
    assert [len(start) for label in cell.samples for start in cell.samples[label]] == [2] * 8
    assert cell.comparison.pairs == 4 and cell.comparison.answer == EQUAL
    assert (
        "the servers are started one after another: stock, flashsample, flashsample, stock" in capsys.readouterr().out
    )


def test_servers_without_memory_for_a_batch_start_in_turns_too(tmp_path, memory, monkeypatch):
    tpot_us, failures = bench.tpot_us, iter([ServerError("CUDA out of memory")])

    def fails_once(*arguments):
        if (failure := next(failures, None)) is not None:
            raise failure
        return tpot_us(*arguments)

    monkeypatch.setattr(bench, "tpot_us", fails_once)
    comparison, _ = make_bench(tmp_path, {})
    comparison.run()
    (cell,) = comparison.cells
    assert comparison.mode == bench.IN_TURNS and cell.comparison.pairs == 4
    assert [len(starts) for starts in cell.samples.values()] == [4, 4]


def test_a_server_whose_fused_path_is_off_is_not_compared(tmp_path, memory):
    comparison, _ = make_bench(tmp_path, {bench.OURS: {"active": False}})
    with pytest.raises(ServerError, match="flashsample is not active in its server: tp"):
        comparison.run()


def test_a_failure_other_than_of_memory_is_not_tried_again(tmp_path, memory):
    comparison, log = make_bench(tmp_path, {bench.OURS: {"starts": "unrecognized arguments: --x"}})
    with pytest.raises(ServerError, match="--x"):
        comparison.run()
    assert log == ["+stock", "-stock"]


def test_a_sample_that_a_busy_machine_spoils_is_taken_again(monkeypatch):
    monkeypatch.setattr(bench, "perf_counter", CLOCK)
    server, spoilt = FakeServer("stock", 0.001, []), [0, 1]
    answer = server.generate

    def sometimes_slow(**fields):
        if fields["sampling_params"]["max_new_tokens"] == LOAD.short and spoilt.pop():
            CLOCK.now += 1.0
        return answer(**fields)

    server.generate = sometimes_slow
    assert bench.tpot_us(server, LOAD, 1, bench.SAMPLINGS["t1"]) == pytest.approx(1000.0)
    spoilt[:] = [1, 1, 1]
    with pytest.raises(ServerError, match="an answer of 6 tokens takes no longer than one of 2, 3 times in a row"):
        bench.tpot_us(server, LOAD, 1, bench.SAMPLINGS["t1"])


def test_answers_of_another_length_are_no_measurement():
    class Short(FakeServer):
        def generate(self, **fields):
            return [{"output_ids": [1]}]

    with pytest.raises(ServerError, match=r"answers have \[1\] tokens; expected 2"):
        bench.tpot_us(Short("stock", 0.0, []), LOAD, 1, bench.SAMPLINGS["t1"])


METRICS = """\
# HELP sglang:flashsample_rows_total Rows sampled, per path and reason
sglang:flashsample_rows_total{path="fused",reason=""} 90.0
sglang:flashsample_rows_total{path="native",reason="top_logprobs"} 6.0
sglang:flashsample_rows_total{path="native",reason="beams"} 4.0
sglang:flashsample_rows_created{path="fused",reason=""} 1.7e+09
sglang:flashsample_host_seconds_count{engine="0"} 20.0
sglang:flashsample_host_seconds_sum{engine="0"} 0.001
"""


def test_a_servers_metrics_say_which_path_served_and_what_a_step_takes_of_the_host():
    server = FakeServer(bench.OURS, 0.0, [])
    server.metrics = lambda: METRICS
    counters = bench.Counters.of(server, LOAD)
    assert counters == ({"fused": 90.0, "native": 10.0}, 0.001, 20.0)
    before = bench.Counters({"fused": 80.0, "native": 10.0, "logits": 0.0}, 0.0004, 10.0)
    assert counters.host_us_since(before) == 60.0
    assert counters.shares_since(before) == {"fused": 1.0}
    assert counters.shares_since(bench.Counters({}, 0.0, 0.0)) == {"fused": 0.9, "native": 0.1}


@pytest.mark.parametrize("until", [1, 2])
def test_a_file_that_cannot_be_written_ends_no_measurement_and_is_tried_again(memory, tmp_path, monkeypatch, until):
    """Such as on a full disk. until: cells that are complete when there is room again."""
    comparison, _ = make_bench(tmp_path, {}, samplings=("t1", "greedy"))

    def write(file, text):
        if len(comparison.cells) < until:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(file, text)

    monkeypatch.setattr(bench, "write_whole", write)
    comparison.run()
    assert len(comparison.cells) == 2 and not comparison.unwritten
    assert len(json.loads((tmp_path / "b.json").read_text())["rows"]) == 4
    monkeypatch.setattr(bench, "write_whole", lambda *_: write_whole("/proc/b.json", ""))
    comparison.run()
    assert list(comparison.unwritten.values()) == ["No such file or directory"] * 2


@pytest.mark.parametrize("decided", [True, False])
def test_what_is_measured_is_written_before_it_is_said(tmp_path, memory, decided):
    """Whoever reads the output may have gone by then, or the disk of its file be full."""
    servers = {label: {"seconds": noisy(0.005, {}, 0.0 if decided else 0.5, 1)} for label in (bench.STOCK, bench.OURS)}
    comparison, _ = make_bench(tmp_path, servers, load=EIGHT_B, minutes=0.2)
    answers = []

    def say(line):
        if line.startswith("temperature 1; batch of 2: "):
            answers.append(json.loads((tmp_path / "b.json").read_text())["comparisons"][0]["answer"])
            raise OSError(errno.ENOSPC, "No space left on device")

    comparison._progress.say = say
    with pytest.raises(OSError, match="No space left on device"):
        comparison.run()
    assert answers == [EQUAL if decided else OPEN]


@pytest.mark.parametrize("files", [True, False])
def test_a_measurement_whose_output_nobody_reads_goes_on_for_its_files_alone(tmp_path, memory, monkeypatch, files):
    def gone(progress, line):
        raise BrokenPipeError

    monkeypatch.setattr(bench.Progress, "say", gone)
    comparison, log = make_bench(tmp_path, {})
    if files:
        comparison.run()
        assert len(json.loads((tmp_path / "b.json").read_text())["rows"]) == 2
    else:
        comparison._json_file = comparison._html_file = None
        with pytest.raises(BrokenPipeError):
            comparison.run()
        assert log == []


def test_a_result_may_replace_an_earlier_one(tmp_path, memory):
    pytest.importorskip("plotly")
    comparison, _ = make_bench(tmp_path, {})
    comparison.run()
    check_output(tmp_path / "b.json", "--json", "a benchmark result")
    check_output(tmp_path / "b.html", "--html", "an HTML page")


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--samplings", "t1,t2"], "--samplings has t2; expected some of t1, trunc, greedy, "),
        (["--batches", "1,x"], "--batches is '1,x'; expected integers separated by commas, such as 1,8,32"),
        (["--batches", "0"], "--batches is 0; expected 1 to 65536"),
        (["--batches", "1,65537"], "--batches is 65537; expected 1 to 65536"),
        (["--traffic", "1" + "0" * 400], f"--traffic is 1{'0' * 400}; expected 1 to 65536"),
        (["--input-tokens", "1048577"], "--input-tokens is 1048577; expected 1 to 1048576"),
        (["--output-tokens", "1048577"], "--output-tokens is 1048577; expected 16 to 1048576"),
        (["--minutes", "0.5"], "--minutes is 0.5; expected 1 or more"),
        (["--minutes", "nan"], "--minutes is nan; expected 1 or more"),
        (["--minutes", "inf"], "--minutes is inf; expected 1 or more"),
        (["--output-tokens", "8"], "--output-tokens is 8; expected 16 to 1048576"),
        (["--load", "0"], "--load is 0; expected requests per second, above 0"),
        (["--json", "nowhere/b.json"], "--json is nowhere/b.json, in a folder that is not there"),
        (["--html", "/"], "--html is /, which is not a plain file"),
        (["--json", "b", "--html", "./b"], "--json and --html are both b; expected two files"),
        (["--logs", "/dev/null"], "--logs is /dev/null, which is not a folder"),
        (["--samplings", " ,"], "--samplings is ' ,'; expected names separated by commas"),
        (["--json", "/proc/b.json"], "--json is /proc/b.json, which cannot be written: No such file or directory"),
        (["--port", "30000"], "bench chooses --port of its two servers itself; leave it out"),
        (["--host=0.0.0.0"], "bench chooses --host of its two servers itself; leave it out"),
        (["--api-key", "k"], "bench asks its two servers without a key; leave --api-key out"),
        (["--nccl-port", "30001"], "bench chooses --nccl-port of its two servers itself; leave it out"),
        (
            ["--sampling-backend", "flashsample"],
            "--sampling-backend is of the stock server; expected one of SGLang's own, or leave it out",
        ),
        (
            [],
            "nowhere is neither a model's folder nor a config.json on this machine, nor a model that could be fetched "
            "from the Hugging Face hub",
        ),
    ],
)
@needs_sglang
def test_what_cannot_be_measured_is_one_line(run, monkeypatch, arguments, message):
    def no_such_model(*names):
        raise OSError("404")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", no_such_model)
    code, _, err = run("bench", "--model-path", "nowhere", *arguments)
    assert code == 2
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


@needs_sglang
def test_a_folder_for_logs_that_cannot_be_written_is_one_line_before_anything_starts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.Bench, "run", lambda comparison: pytest.fail("it starts"))
    (tmp_path / "config.json").write_text('{"vocab_size": 1000, "hidden_size": 64}')
    code, _, err = run("bench", "--model-path", tmp_path, "--logs", "/proc/logs")
    assert (code, err) == (2, "error: --logs is /proc/logs, which cannot be written: No such file or directory\n")


@needs_sglang
def test_every_argument_of_sglang_goes_to_both_servers_unchanged(run, tmp_path, monkeypatch):
    """Also one whose name begins with that of an option of bench, or that an abbreviation of one would be."""
    made = []
    monkeypatch.setattr(bench.Bench, "run", lambda comparison: made.append(comparison))
    (tmp_path / "config.json").write_text('{"vocab_size": 1000, "hidden_size": 64}')
    theirs = ["-tp", "2", "--dtype=bfloat16", "--load-format", "dummy", "--sampling", "x", "--minus", "-1"]
    theirs += ["--json-model-override-args", '{"a": 1}']
    code, _, err = run("bench", *theirs[:4], "--model-path", tmp_path, "--minutes", "3", *theirs[4:])
    assert (code, err) == (0, "")
    (comparison,) = made
    assert comparison.options.arguments == tuple(theirs) and comparison.options.minutes == 3.0
    for label in (bench.STOCK, bench.OURS):
        assert " ".join(theirs) in " ".join(comparison.server(label).command)


@needs_sglang
@pytest.mark.server
@pytest.mark.full
def test_two_real_servers_are_compared(tmp_path):
    markov.write(tmp_path / "model", markov.SIZES["tiny"])
    changes = ["--samplings", "greedy", "--batches", "2", "--minutes", "1.5", "--output-tokens", "64"]
    servers = ["--dtype", "float32", "--random-seed", "1", *(["--mem-fraction-static", "0.3"] if CUDA else [])]
    files = ["--json", "b.json", "--html", "b.html", "--logs", "logs"]
    command = [sys.executable, str(LAB), "bench", "--model-path", str(tmp_path / "model"), *changes, *servers, *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    out = done.stdout
    assert done.returncode == 0, done.stderr
    assert "greedy; batch of 2: " in out and "served by fused 100%" in out
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["env"]["arguments"] == servers
    stock, ours = result["rows"]
    assert min(len(stock["samples"]), len(ours["samples"])) >= 2
    assert "<code>sgl-flashsample bench" in (tmp_path / "b.html").read_text()
    assert ours["paths"] == {"fused": 1.0} and "paths" not in stock
    assert ("no CUDA GPU found" in out) is not CUDA
