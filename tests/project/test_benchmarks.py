"""The benchmarks: every script runs without a GPU, its conclusions follow from its times, and the pages agree with the
result files."""

from __future__ import annotations

import argparse
import ast
import asyncio
import concurrent.futures
import contextlib
import graphlib
import gzip
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import types
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import fork_server
from serving import make_server, needs_sglang

from sgl_flashsample import LMHead
from sgl_flashsample.autotune import timing
from sgl_flashsample.autotune.workload import make_weight, quantize_rows
from sgl_flashsample.hot_vocab import HotVocab
from sgl_flashsample.kernels.config import ScreenConfig
from sgl_flashsample.tools.server import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is interpreted")


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], types.ModuleType]]:
    """Imports a script. Another package may be called ``kernels``: its modules are put aside meanwhile."""
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in SCRIPTS}
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))
    for name in SCRIPTS:
        sys.modules.pop(name, None)
    sys.modules.update(others)


@pytest.fixture
def dry_run(tmp_path) -> Callable[..., dict]:
    """Runs a benchmark with ``--dry-run``; returns the content of ``out.json``. ``judge`` tells the expected exit code
    from that."""

    def run(name: str, *arguments: str, judge: Callable[[dict], int] = lambda result: 0) -> dict:
        out = tmp_path / "out.json"
        command = [sys.executable, str(FOLDER / "run.py"), name, "--dry-run", "--out", str(out), *arguments]
        done = fork_server.run(command)
        assert out.exists(), done.stdout + done.stderr
        result = json.loads(out.read_text())
        assert done.returncode == judge(result), done.stdout + done.stderr
        return result

    return run


# --- every script runs


@no_gpu
@pytest.mark.full
def test_the_kernel_benchmark_draws_with_every_path_and_with_an_older_tree_beside_it(dry_run, tmp_path, load):
    """The older tree is this one: each cell has both times, and all tokens are the same."""
    contenders, step = load("contenders"), load("step")
    result = dry_run("kernels", "--samplings", "t1", "greedy")
    cells = {(row["sampling"], row["path"]): row for row in result["rows"]}
    assert cells.keys() >= {(sampling, path) for sampling in ("t1", "greedy") for path in contenders.OURS}
    assert cells.keys() >= {("nothing", "gemm"), ("t1", "gemm+exponential"), ("greedy", "gemm+argmax")}
    ours = [row for row in result["rows"] if row["path"] in contenders.OURS]
    assert all(row["same_tokens"] == row["B"] for row in ours)
    assert {row["path"] for row in ours if row.get("picked")} == {"fused", "screened"}
    assert all(gap["reason"] for gap in result["env"]["not_run"])

    out = tmp_path / "out.json"
    again = [sys.executable, str(FOLDER / "run.py"), "kernels", "--dry-run", "--keep", "--out", str(out)]
    for samplings, words in ((["t1", "greedy"], "holds every cell already"), (["edits"], "; expected {")):
        done = fork_server.run([*again, "--samplings", *samplings])
        assert done.returncode == 1 and words in done.stderr

    assert dry_run("kernels", "--limit", "0") == result, "out of time before the first race: nothing is written"

    def judge(result: dict) -> int:  # the trees are equal, but a busy machine can slow one of them down
        return 0 if step.judge(result["rows"])[1] else 1

    arguments = ("--paths", "fused", "--samplings", "t1", "edits", "--rounds", "3")
    rows = dry_run("kernels", "--compare-with", str(ROOT), *arguments, judge=judge)["rows"]
    assert {(row["path"], row["sampling"]) for row in rows} == {("fused", "t1"), ("fused", "edits")}
    for row in rows:
        assert row["older_form"] == row["form"] and row["same_tokens"] == row["B"]
        assert row["ratio"]["low"] <= row["ratio"]["off"] <= row["ratio"]["high"]


@no_gpu
@pytest.mark.full
def test_the_feature_benchmark_times_every_feature_and_compares_tokens_with_the_reference(dry_run, load):
    result, samplings, profiles = dry_run("features"), set(load("step").FEATURED), set(load("step").PROFILES)
    assert {(row["profile"], row["sampling"]) for row in result["rows"] if row["path"] == "picked"} == {
        (profile, sampling) for profile in profiles for sampling in samplings
    }
    screened = {row["sampling"] for row in result["rows"] if row["path"] == "picked with screen"}
    assert screened == samplings - {"logprob", "p90", "minp05", "k1000"}, "what no screen helps does not ask for one"
    assert result["searches"] and not any(row["different"] for row in result["searches"])


@no_gpu
@pytest.mark.full
def test_the_benchmark_of_quantised_heads_times_both_dtypes_of_every_sampling(dry_run, load):
    rows = [row for row in dry_run("quantised")["rows"] if row["path"] == "picked"]
    cells = [(row["sampling"], row["dtype"]) for row in rows]
    assert sorted(cells) == sorted((name, dtype) for name in load("step").COMPARED for dtype in ("fp16", "e4m3"))
    assert all(row["us"] > 0 and row["picked"] for row in rows)


@no_gpu
@pytest.mark.full
def test_the_screened_benchmark_compares_tokens(dry_run, load):
    screened = load("screened")
    sections = dry_run("screened", "--only", "tokens", "distribution")["sections"]
    rows = sections["tokens"]["rows"]
    assert {row["head"] for row in rows} == set(screened.HEADS)
    assert {row["truncated"] for row in rows} == {False, True}
    assert not any(row["different"] for row in rows) and all(row["candidates_per_row"] >= 1.0 for row in rows)
    assert 0.0 < sections["distribution"]["total_variation"] < 1.0


@no_gpu
@pytest.mark.full
def test_the_screened_benchmark_races_the_fused_path_and_keeps_other_sections(dry_run):
    before = dry_run("screened", "--only", "distribution")["sections"]
    sections = dry_run("screened", "--only", "speed", "launches", "decision", "--keep")["sections"]
    assert sections["distribution"] == before["distribution"]
    assert {row["path"] for row in sections["speed"]["rows"]} >= {"gemm", "fused", "screened"}
    assert all(row["rows_left"] == 0 for row in sections["speed"]["rows"] if row["path"] == "screened")
    (head,) = sections["decision"]["heads"]
    assert len(head["seconds"]) == 2 and head["rows"][0]["kind"] == "plain" and head["rows"][0]["screened_us"] > 0


@no_gpu
@needs_sglang
@pytest.mark.full
def test_the_benchmark_of_ranks_compares_tokens_and_exchanges(dry_run):
    rows = dry_run("ranks")["rows"]
    assert [row["section"] for row in rows] == ["tokens"] * 2 + ["exchange"] * 4 + ["soak"]
    tokens = [row for row in rows if "ranks_differ" in row]
    assert all(row["differing"] == row["ranks_differ"] == 0 < row["rows"] for row in tokens)


@no_gpu
@pytest.mark.full
def test_the_server_benchmark_measures_pairs_and_host_time(dry_run):
    arguments = ("--fast", "--samplings", "t1", "--batches", "1", "8")
    result = dry_run("serve", "--only", "stock", "screen", "host", "profile", "graphs", "plane", *arguments)
    pairs = {(row["section"], row["batch"], row["backend"]): row for row in result["rows"] if "tpot_us" in row}
    labels = {"stock": ("stock", "flashsample"), "screen": ("screen off", "screen on")}
    labels |= {"graphs": ("one root", "two roots"), "plane": ("flashsample", "decision plane")}
    assert pairs.keys() == {(s, batch, label) for s, names in labels.items() for label in names for batch in (1, 8)}
    assert all(len(row["samples"]) == 3 for row in pairs.values())
    assert all(("itl_p99_us" in row) is (row["section"] == "stock") for row in pairs.values())
    assert pairs["screen", 8, "screen on"]["same_answers"] == pairs["graphs", 8, "two roots"]["same_answers"] == 8
    assert pairs["plane", 8, "decision plane"]["same_answers"] == 8
    host = [row for row in result["rows"] if row["section"] == "host"]
    assert [row["host_us"] for row in host] == [40.0, 40.0] and result["env"]["servers"]["sgl-flashsample"]
    extended = dry_run("serve", "--only", "host", "--keep", *arguments)
    assert len(extended["rows"]) == len(result["rows"]) and len(extended["runs"]) == 2, "replaced, not added"
    assert {row["run"] for row in extended["rows"] if row["section"] == "host"} == {1}
    several = dry_run("serve", "--only", "stock", "oracle", "repeats", "--tp", "2", "--keep", *arguments)["rows"]
    assert several[: len(result["rows"])] == extended["rows"], "rows of one GPU stay"
    assert all((row["tp"], row["pp"]) == (2, 1) for row in several[len(result["rows"]) :])
    drafted = dry_run("serve", "--speculation", "NGRAM", "--draft-tokens", "4", "--keep", *arguments)["rows"]
    assert drafted[: len(several)] == several, "rows without drafts stay"
    assert {(row["speculation"], row["draft_tokens"]) for row in drafted[len(several) :]} == {("NGRAM", 4)}
    same_bits = dry_run("serve", "--deterministic", "--keep", *arguments)["rows"]
    assert same_bits[: len(drafted)] == drafted and all(row["deterministic"] for row in same_bits[len(drafted) :])
    new = {(row["section"], row.get("backend"), row["batch"]): row for row in several if "tp" in row}
    assert new["stock", "flashsample", 8]["bytes_per_row"] == 20 and ("oracle", "oracle", 8) in new
    repeated = new["repeats", None, 1]
    assert len(repeated["percent"]) == 2 >= repeated["faster"] + repeated["slower"] and repeated["pairs"] == 3
    prompts = dry_run("serve", "--only", "prompts", "--keep", *arguments)["rows"][len(same_bits) :]
    assert [(row["prompt_tokens"], row["backend"]) for row in prompts] == [
        (16, "stock"),
        (16, "flashsample"),
        (32, "stock"),
        (32, "flashsample"),
    ]
    assert all(len(row["samples"]) == 3 and row["ms"] > 0 for row in prompts)
    late = dry_run("serve", "--only", "profile", "--keep", "--limit", "0", *arguments)
    assert late["rows"] == same_bits + prompts and late["env"]["not_run"] == [], "its cells have been measured before"


@no_gpu
@pytest.mark.full
def test_the_server_benchmark_compares_answers_alone_with_those_of_two_other_ways(dry_run, load):
    arguments = ("--only", "answers", "--deterministic", "--samplings", "t1")
    result = dry_run("serve", *arguments)
    counted = {"requests": 6, "tokens": 36, "different": 0, "different_logprobs": 0, "without_all_logprobs": 0}
    counted |= {"retractions": 0}
    about = {"section": "answers", "model": "qwen3-1.7b", "deterministic": True, "run": 0}
    assert result["rows"] == [about | {"way": way} | counted for way in load("serve").WAYS]
    again = dry_run("serve", "--keep", *arguments)["rows"]
    assert again == [row | {"run": 1} for row in result["rows"]], "replaced, not added"


@pytest.mark.slow
def test_answers_that_differ_are_counted_and_those_that_are_short_or_not_fused_are_refused(load, tmp_path, monkeypatch):
    serve = load("serve")
    monkeypatch.setattr(serve, "ANSWERED", 20)

    class Varying(serve.PretendedServer):
        """After ``alone`` answers, seed 3 has another token, seed 5 another logprob of its prompt; seed 7 lacks one.
        fault: of all."""

        asked, alone, fault, log_lines = 0, 0, "", ""

        def log_text(self):
            return super().log_text() + self.log_lines

        def generate(self, *, input_ids, sampling_params, **fields):
            answers = super().generate(input_ids=input_ids, sampling_params=sampling_params, **fields)
            if "return_logprob" in fields:
                self.asked += 1
                seed = sampling_params["sampling_seed"] if self.asked > self.alone else None
                tokens, logprobs = answers[0]["output_ids"], answers[0]["meta_info"]
                tokens[0] = int(seed == 3)
                logprobs["input_token_logprobs"] = [[-0.5 if seed == 5 else -0.25, 1, None]]
                del logprobs["output_token_logprobs"][serve.ANSWER_TOKENS - (seed == 7) :]
                del tokens[serve.ANSWER_TOKENS - (self.fault == "short") :]
                self.log_lines = "a retraction\nTesting retraction. #retracted_reqs: 2, #new\n#retracted_reqs: 1, #new"
            return answers

        def metrics(self):
            native = f'sglang:flashsample_rows_total{{path="native",reason="x"}} {self.asked}\n'
            return super().metrics() + native * (self.fault == "native")

    def run(alone: int, fault: str = "") -> tuple[list[list], list[tuple]]:
        """Figures of the rows, and gaps. alone: answers after which the time is over. fault: of the other server."""

        def make_server(model, backend, log):
            servers.append(Varying(log, serve.CACHE_TOKENS))
            usual = not backend.arguments
            servers[-1].alone, servers[-1].fault = (alone, "") if usual else (alone + 20, fault)
            return servers[-1]

        servers: list[Varying] = []
        names = {"samplings": ["t1"], "logs": tmp_path, "tp": 1, "pp": 1, "dp": 1, "speculation": None}
        names |= {"deterministic": True}
        result = load("common").Result(tmp_path / "out.json", serve.BENCHMARKS["serve"], {})
        one = serve.ModelRun("tiny", types.SimpleNamespace(**names, together=True, turn=None), result)
        monkeypatch.setattr(one, "make_server", make_server)
        monkeypatch.setattr(one, "_late", lambda: servers[0].asked >= alone)
        rows = [row for rows in one.run(["answers"]) for row in rows]
        figures = ("way", "requests", "different", "different_logprobs", "without_all_logprobs", "retractions")
        gaps = [(gap.get("way"), gap["reason"]) for gap in result.env["not_run"]]
        return [[row[name] for name in figures] for row in rows], gaps

    among, *_, other = serve.WAYS
    monkeypatch.setattr(serve, "WAYS", {among: serve.USUAL, other: serve.OTHER})  # also where there are two GPUs
    few = serve.ANSWER_TOKENS
    assert run(alone=20) == ([[among, 20, 1, 1, 1, 0], [other, 20, 0, 0, 0, 3]], [])
    assert run(alone=5) == ([[among, 5, 1, 0, 0, 0], [other, 5, 0, 0, 0, 3]], []), "those that were asked in time"
    assert run(alone=0) == ([], [(among, "out of time"), (other, "out of time")])
    for fault, reason in (
        ("short", f"ServerError: an answer has {few - 1} tokens and ["),
        ("native", "ServerError: the paths of the answers are"),
    ):
        rows, ((way, said),) = run(alone=20, fault=fault)
        assert len(rows) == 1 and way == other and said.startswith(reason)


def test_replicas_of_dp_attention_have_an_lm_head_each_and_rows_that_say_so(load, tmp_path, monkeypatch):
    serve = load("serve")
    names = {"only": ["stock"], "samplings": ["t1"], "batches": [1], "pairs": 2, "fast": False, "set": []}
    names |= {"tp": 2, "pp": 1, "dp": 3, "speculation": None, "deterministic": False, "memory_share": 0.5, "limit": 9}
    options = types.SimpleNamespace(**names, python="python")
    with pytest.raises(ValueError, match="--dp is 3; expected a divisor of --tp, which is 2"):
        serve.prepare(options)
    options.dp, options.set = 2, []
    serve.prepare(options)
    monkeypatch.setattr(serve, "DRY_RUN", False)
    run = serve.ModelRun("tiny", options, None)
    server = run.make_server(tmp_path, serve.BACKENDS["stock"], tmp_path / "log")
    assert " --tp-size 2 --pp-size 1 --dp-size 2 --enable-dp-attention --enable-dp-lm-head" in " ".join(server.command)
    assert run.about == {"tp": 2, "pp": 1, "dp": 2}


def test_the_section_of_answers_asks_for_deterministic_inference_and_sets_it_up(load, tmp_path, monkeypatch):
    serve = load("serve")
    names = {"only": ["answers"], "deterministic": False, "samplings": None, "batches": None, "pairs": None}
    names |= {"fast": False, "set": [], "tp": 1, "pp": 1, "dp": 1, "speculation": None, "memory_share": 0.5}
    names |= {"python": "python", "limit": 9}
    options = types.SimpleNamespace(**names)
    with pytest.raises(ValueError, match="--only names answers without --deterministic; expected --det"):
        serve.prepare(options)
    options.deterministic, options.set = True, []
    serve.prepare(options)
    monkeypatch.setattr(serve, "DRY_RUN", False)
    run = serve.ModelRun("tiny", options, None)
    backends = (serve.ANSWERERS[label] for label in (serve.USUAL, serve.OTHER))
    usual, other = (run.make_server(tmp_path, backend, tmp_path / "log") for backend in backends)
    added = ["--chunked-prefill-size", "64", "--disable-cuda-graph"]
    assert set(added) <= set(other.command) and not set(added) & {*usual.command} - {"64"}
    assert all("--enable-deterministic-inference" in server.command for server in (usual, other))
    differ = {name for name, value in other.environment.items() if usual.environment.get(name) != value}
    assert differ == set(serve.ANSWERERS[serve.OTHER].environment) >= {"SGLANG_TEST_RETRACT"}


@needs_sglang
@pytest.mark.server
@pytest.mark.full
def test_the_oracle_answers_token_0_without_a_draw(load, tmp_path):
    package = load("oracle").install(tmp_path)
    server, _ = make_server(tmp_path, "tiny", name="oracle", backend="oracle", first_on_path=package)
    with server:
        answers = server.generate(input_ids=[[5], [6, 7]], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    assert [answer["output_ids"] for answer in answers] == [[0, 0, 0, 0]] * 2


# --- what follows from times


@pytest.fixture
def takes(monkeypatch) -> Callable[[float], Callable[[int], None]]:
    """Calls that take so many seconds, give or take 2 %, of a clock that nothing else moves."""
    clock = [0.0]
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: clock[0], monotonic=time.monotonic))

    def call(seconds: float) -> Callable[[int], None]:
        noise = random.Random(str(seconds))

        def run(step: int) -> None:
            clock[0] += seconds * noise.uniform(0.98, 1.02)

        return run

    return call


BATCH = types.SimpleNamespace(head=types.SimpleNamespace(weight=torch.zeros(4, 4)), refresh=lambda index: None)
TIMES = {"bf16": 2000.0, "e4m3": 1000.0}  # microseconds, by dtype of the head


def race_of(load, calls: dict[str, Callable], unusual: dict[str, str]):
    """Entrants by "path mode: form"; without a GPU each is timed by the clock of the host."""
    entrant = load("contenders").Entrant
    entrants = []
    for name, call in calls.items():
        words, _, form = name.removeprefix("older ").partition(": ")
        entrants.append(entrant(*words.split(), form, call, older=name.startswith("older ")))
    return load("racing").Race(BATCH, entrants, unusual, None)


@no_gpu
def test_a_row_is_the_fastest_form_of_a_path_and_what_cannot_run_is_recorded(load, takes):
    def fail(step: int) -> None:
        raise RuntimeError("no kernel image\nand more")

    calls = {
        "gemm+x plain: slow": takes(0.02),
        "gemm+x plain: fast": takes(0.001),
        "gemm+x plain: broken": fail,
        "gemm+y plain: unknown": lambda step: None,
        "fused plain: tile": takes(0.002),
        "older fused plain: tile": lambda step: None,
    }
    race = race_of(load, calls, {"gemm+y plain: unknown": "it cannot", "gemm+x plain: fast": "eager"})
    race.run(3)
    rows = {row["path"]: row for row in race.rows({"B": 2})}
    assert rows.keys() == {"gemm+x", "fused"} and rows["gemm+x"]["form"] == "fast, without a graph"
    assert rows["gemm+x"]["us"] == pytest.approx(1000, rel=0.02) and rows["fused"]["us"] == pytest.approx(
        2000, rel=0.02
    )
    gaps = {gap["path"]: gap["reason"] for gap in race.gaps({"B": 2})}
    assert gaps == {"gemm+x plain: broken": "RuntimeError: no kernel image", "gemm+y plain: unknown": "it cannot"}
    race.run(5, ["gemm+x plain: fast", "fused plain: tile"])
    assert race.timing("fused plain: tile").n == 8 and race.timing("gemm+x plain: slow").n == 3
    assert race.ratio("gemm+x plain: fast", "fused plain: tile", 0.05).high < 0
    assert race.ratio("gemm+x plain: fast", "gemm+x plain: broken", 0.05) is None


@no_gpu
def test_one_path_with_heads_of_two_dtypes_has_a_row_of_each(load, takes):
    entrant = load("contenders").Entrant
    entrants = [entrant("picked", "t1", "tile", takes(us * 1e-6), dtype=dtype) for dtype, us in TIMES.items()]
    race = load("racing").Race(BATCH, entrants, {}, None)
    race.run(3)
    rows = {row["dtype"]: row["us"] for row in race.rows({"B": 2})}
    assert rows == {dtype: pytest.approx(us, rel=0.03) for dtype, us in TIMES.items()}
    assert race.entrants[0].name == "bf16 picked t1: tile", "names tell them apart"


@no_gpu
def test_a_head_is_raced_beside_its_own_quantised_weights(load):
    contenders, shape = load("contenders"), load("common").Shape(48, 777)
    weight = make_weight(777, 48, torch.float16, torch.device("cpu"))
    half, quantised = contenders.trees(shape, weight, 3, contenders.Selection(("picked",), ("t1",), quantised=True))
    assert (half.dtype, quantised.dtype) == ("fp16", "e4m3") and half.head.weight is weight
    assert quantised.head.hidden_dtype is torch.float16
    want, scale = quantize_rows(weight)
    assert torch.equal(quantised.head.weight.float(), want.float()) and torch.equal(quantised.head.scale, scale)


@no_gpu
def test_a_race_that_breaks_ends_neither_the_run_nor_the_record(load):
    racing, contenders = load("racing"), load("contenders")
    env: dict = {}
    session = racing.Session([], [], contenders.Selection(("fused",), ("t1",)), env)
    batch = types.SimpleNamespace(head=None)
    assert session.race([], batch, 3, {"B": 2}) == []
    (gap,) = env["not_run"]
    assert (gap["B"], gap["path"]) == (2, "all") and gap["reason"].startswith("AttributeError")


def test_a_comparison_fails_for_what_is_slower_for_certain_and_for_nothing_else(load):
    def row(off: float, half: float, same: int = 4) -> dict:
        ratio = {"off": off, "se": 0.001, "low": off - half, "high": off + half}
        about = {"D": 8, "V": 9, "B": 4, "sampling": "t1", "path": "fused", "us": 3.0, "form": "a", "older_form": "b"}
        return about | {"older_us": 2.0, "ratio": ratio, "same_tokens": same}

    judge = load("step").judge
    text, fine = judge([row(-0.02, 0.001), row(0.009, 0.004), row(0.012, 0.004), {"path": "gemm"}])
    assert (
        fine and "3 cells of both trees: 0 slower by more than 1% for certain, 1 perhaps; 0 of 12 tokens differ" in text
    )
    text, fine = judge([row(0.015, 0.004), row(0.0, 0.001, same=3)])
    assert not fine and "1 slower by more than 1% for certain, 0 perhaps; 1 of 8 tokens differ" in text
    assert "D=8 V=9 B=4 fused t1: 3.0 us, was 2.0 (+1.1% to +1.9%; a, was b)" in text
    assert not judge([])[1], "without a comparison there is no line"


def graph(number: int, start: float, kernels: list[tuple[str, float]]) -> list[dict]:
    """The events of one CUDA graph whose kernels follow each other."""
    args, events = {"correlation": number}, []
    for name, us in kernels:
        events.append({"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": us, "args": args})
        start += us
    return [{"ph": "X", "name": "cudaGraphLaunch", "args": args}, *events]


def test_a_trace_of_speculation_has_the_times_of_its_verification_and_of_a_draft(load):
    """A step: the draft model's chain, which may take longer than the target, the target, the draw of every node (in a
    graph of its own), the draft model over what was accepted."""
    events = []
    for step, wait in enumerate((30.0, 40.0, 50.0)):
        start, number = 10_000.0 * step, 10 * step
        events += graph(number, start, [("gemm", 3300.0), ("rms_norm", 10.0), ("gemm", 90.0)])
        target = [*[("_fwd_kernel", 500.0)] * 6, ("RMSNorm", 20.0), ("head gemm", 200.0)]
        events += graph(number + 1, start + 3400.0, target)
        events += graph(number + 2, start + 6620.0 + wait, [("fused", 15.0)])
        verifying = {"name": "void TreeSpeculativeSamplingTargetOnly<1024>", "ts": start + 6635.0 + wait, "dur": 5.0}
        events.append({"ph": "X", "cat": "kernel", **verifying})
        events += graph(number + 3, start + 6700.0 + wait, [("_fwd_kernel", 350.0), ("norm", 5.0)])
        events.append({"ph": "X", "cat": "kernel", "name": "no graph's", "ts": start + 6760.0, "dur": 5.0})
    times = load("speculation").parts(events, chain=2)
    assert times.pop("busy_us") == 3400 + 3220 + 15 + 5 + 355  # the kernel outside of graphs runs beside others
    assert times.pop("drafts_us") == 355 + 3400
    assert times == {"target_us": 3020.0, "head_us": 200.0, "verify_us": 260.0, "draft_step_us": 1700.0}
    for name in ("norm", "_fwd"):
        others = [event for event in events if name not in event["name"].lower()]
        assert load("speculation").parts(others, 2) == {}, "no pass of the target"


@no_gpu
def test_only_batches_without_a_truncation_or_with_a_small_top_k_pick_the_screen(load):
    contenders = load("contenders")
    tree = contenders.Tree(torch.zeros(777, 48), None, 1, tuned=False, folder=None)

    def picks_screen(name: str) -> bool:
        config = tree._config(contenders.SAMPLINGS[name], 1, None, screened=True)
        return isinstance(config, ScreenConfig)

    assert [picks_screen(name) for name in ("t1", "k50p90", "p90", "k1000")] == [True, True, False, False]


def test_a_trace_says_which_operations_take_logits(load):
    def event(name: str, *shapes: list[int]) -> dict:
        return {"name": name, "args": {"Input Dims": list(shapes)}}

    events = [event("aten::softmax", [8, 500], []), event("aten::softmax", [16, 500]), event("aten::mm", [8, 500, 4])]
    events += [event("aten::add", [500]), event("aten::copy_", [8], [1, 500]), {"name": "aten::argmax"}]
    assert load("speculation").logits_operations(events, 500) == ["aten::copy_", "aten::softmax"]


CHAIN = {"stock": (1, 7, False), "greedy": (1, 7, False)}
REJECTION, TREE, COUPLED = {"rejection": (1, 7, True)}, {"tree": (4, 5, False)}, {"coupled": (1, 7, False)}
COUPLED |= {"coupled-trees": (2, 5, False)}
MAPPED = {"map": (1, 7, False), "mapped": (1, 7, False)}
HOT = {"hot": (1, 7, False), "hot-trees": (2, 5, False)}


@needs_sglang
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("EAGLE", CHAIN | REJECTION | TREE | COUPLED | MAPPED | HOT),
        ("NEXTN", CHAIN | REJECTION | TREE | COUPLED | MAPPED | HOT),
        ("EAGLE3", CHAIN | TREE | COUPLED),
        ("STANDALONE", CHAIN | TREE | COUPLED | HOT),
        ("NGRAM", dict.fromkeys(CHAIN, (None, None, False))),
    ],
)
def test_speculation_is_raced_against_each_mode_of_stock_that_the_algorithm_has(load, tmp_path, algorithm, expected):
    """Width of a node, passes of the draft model and rejection sampling, as SGLang reads them from the command."""
    from sglang.srt.server_args import ServerArgs

    speculation = load("speculation")
    options = speculation.BENCHMARKS["speculation"].parser("speculation").parse_args(["--out", "x"])
    speculation.prepare(options)
    options.logs = options.checkpoints = tmp_path
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    run, found = speculation.Run(options, None, "tiny", algorithm, 8, 0.6), {}
    for name in run.backends:
        server = run._server(name)
        command = " ".join(server._arguments).replace("--sampling-backend flashsample", "")
        given = parser.parse_args(["--model-path", "x", *command.split()])
        width, steps = given.speculative_eagle_topk, given.speculative_num_steps
        found[name] = (width, steps, given.speculative_use_rejection_sampling)
        assert (given.speculative_token_map is not None) == (name in MAPPED)
        assert (server.environment.get("FLASHSAMPLE_DRAFT_VOCAB") == str(run._counts)) == (name in HOT)
        coupled = name in COUPLED or name in HOT or name == "mapped"
        assert (server.environment.get("FLASHSAMPLE_DRAFTS") == "coupled") == coupled
    assert found == expected


@pytest.mark.parametrize(
    ("backend", "said", "measured"),
    [
        ("coupled", "without logits; they are coupled: drawn at", True),
        ("coupled", "without logits; they are greedy: FLASHSAMPLE_DRAFTS says so", False),
        ("hot", "through logits of the 160 most frequent ids of hot.json; they are coupled: drawn at", True),
        ("hot", "through logits of the 160 most frequent ids of hot.json; they are greedy: why", False),
        ("hot", "without logits; they are coupled: drawn at", False),
        ("stock", "", True),
    ],
)
def test_a_server_whose_drafts_are_others_is_not_measured(load, monkeypatch, tmp_path, backend, said, measured):
    speculation = load("speculation")
    server = load("serve").PretendedServer(tmp_path / "log", 100)
    server.log_lines = lambda marker: [f"flashsample: drafts come from hidden states, {said}"] if said else []
    names = {"backends": [backend], "only": [], "batches": [1], "temperatures": [1.0], "tokens": 32, "logs": tmp_path}
    missed = []
    result = types.SimpleNamespace(miss=lambda error, **about: missed.append(str(error)))
    options = types.SimpleNamespace(**names, checkpoints=tmp_path, tp=1, turn=None)
    run = speculation.Run(options, result, "tiny", "EAGLE", 4, 0.6)
    monkeypatch.setattr(run, "_server", lambda name: server)
    assert list(run.rows()) == [] and run._counts.is_file() == (backend == "hot"), "its server starts with them"
    assert missed == [] if measured else missed[0].startswith(f"drafts of {backend} are not what they are to be: ")


def test_what_is_known_of_a_draft_model_is_a_mean_over_what_was_answered(load):
    speculation, markov = load("speculation"), importlib.import_module("sgl_flashsample.tools.markov")
    size = markov.SIZES["tiny"]
    target, draft = markov.build(size), markov.build(size, error=0.6)
    assert speculation.distances(target, markov.build(size), [5, 6], 1.0)[1] == 0.0, "an error of 0 is the target"
    by_token = {token: speculation.distances(target, draft, [token], 1.0) for token in (5, 6)}
    assert all(0.0 < tv < 0.6 for _, tv in by_token.values()) and by_token[5] != by_token[6]
    means = speculation.distances(target, draft, [5, 5, 5, 6], 1.0)
    for got, five, six in zip(means, by_token[5], by_token[6], strict=True):
        assert got == pytest.approx(0.75 * five + 0.25 * six)
    p, q = (model.distribution(torch.tensor([5]))[0] for model in (target, draft))
    assert by_token[5] == pytest.approx((p.max().item(), 1 - torch.minimum(p, q).sum().item()))
    greedy = speculation.distances(target, draft, [5], 0.0)
    assert greedy == (1.0, float(p.argmax() != q.argmax()))


def test_a_draft_checkpoint_is_written_anew_for_another_error(tmp_path):
    markov = importlib.import_module("sgl_flashsample.tools.markov")
    heads = {error: markov.write(tmp_path, markov.SIZES["tiny"], error=error).head for error in (0.0, 0.6)}
    assert not torch.equal(heads[0.0], heads[0.6])
    assert torch.equal(markov.write(tmp_path, markov.SIZES["tiny"], error=0.6).head, heads[0.6])


def test_of_an_answer_the_first_token_is_no_verifications_and_the_root_of_one_is_no_draft(load):
    speculation = load("speculation")
    answers = speculation.Answers(1.0, [[7] * 9, [7] * 5], verifications=6, steps=4)  # gain 2 tokens each, of 4 nodes
    assert speculation.acceptance(answers, 4) == pytest.approx(1 / 3)


@no_gpu
@needs_sglang
@pytest.mark.server
@pytest.mark.full
def test_the_benchmark_of_speculation_runs_on_a_cpu_too(tmp_path):
    out = tmp_path / "speculation.json"
    arguments = ["--sizes", "tiny", "--algorithms", "STANDALONE", "--draft-tokens", "4", "--batches", "2"]
    arguments += ["--temperatures", "1", "--backends", "coupled", "hot", "--pairs", "2", "--tokens", "24"]
    arguments += ["--only", "speed", "tokens", "--compared", "90"]
    arguments += ["--checkpoints", str(tmp_path), "--logs", str(tmp_path), "--out", str(out)]
    done = fork_server.run([sys.executable, str(FOLDER / "run.py"), "speculation", *arguments])
    assert done.returncode == 0, done.stdout + done.stderr
    coupled, hot, *compared = json.loads(out.read_text())["rows"]
    for row, name in ((coupled, "coupled"), (hot, "hot")):
        assert row["backend"] == name and row["tokens_s"] > 0
        assert 0.0 < row["acceptance"] < 1.0 and 0.0 < row["draft_tv"] < 1.0
    assert 0.15 < hot["covered"] < 1.0 and "covered" not in coupled
    assert [one["backend"] for one in compared] == ["no drafts", "coupled", "hot"]
    for one, tokens in zip(compared, (4, 96, 96), strict=True):  # without drafts, the first of each answer
        assert one["section"] == "tokens" and (one["tokens"], one["near_ties"], one["different"]) == (tokens, 0, 0)


def test_answers_are_compared_until_they_differ_and_a_difference_is_judged_by_the_reference(load):
    speculation = load("speculation")
    target, seeds = speculation.markov.build(speculation.markov.SIZES["tiny"]), range(40)
    tokens, ties = speculation.drawn(target, [300] * 40, 1.0, seeds, 7)
    assert len(set(tokens)) > 5 and not any(ties), "another token with another seed, and none a near-tie"
    speculation._add_difference(
        row := dict.fromkeys(speculation.COUNTS, 0) | {"differences": []}, target, [5], 1, 1.0, [7, 8], [7, 8]
    )
    speculation._add_difference(row, target, [5], 1, 1.0, [7, 8, 9, 4], [7, 8, 3, 4])
    assert {name: row[name] for name in speculation.COUNTS} == {"tokens": 2 + 3, "near_ties": 0, "different": 1}
    assert row["differences"] == [{"seed": 1, "position": 2, "tokens": [9, 3]}]
    head = target.head[:1].repeat(len(target.head), 1)  # every id has the same logit: noise alone decides
    head[16:] *= 1 + 1e-7
    even = speculation.markov.MarkovModel(target.size, target.embedding, head)
    _, ties = speculation.drawn(even, [300], 0.0, [1], 7)
    assert ties == [True], "two ids are equally likely"


@pytest.mark.parametrize("temperatures", [[0.0], [0.7], [0.0, 1.0]])
def test_what_is_drawn_before_has_the_distribution_of_the_targets_answers(load, monkeypatch, temperatures):
    speculation = load("speculation")
    monkeypatch.setattr(speculation, "COUNTED_TOKENS", 1 << 18)
    target, every = speculation.markov.build(speculation.markov.SIZES["tiny"]), torch.arange(1024)
    wanted = torch.zeros(1024, dtype=torch.float64)
    for temperature in temperatures:
        likeliest = torch.nn.functional.one_hot(target.logits(every).argmax(-1), 1024).double()
        after = target.distribution(every, temperature) if temperature else likeliest
        last = (every > 2) / torch.tensor(1021.0, dtype=torch.float64)  # no special token ends a prompt
        for _ in range(4):
            last = last @ after
            wanted += last / (4 * len(temperatures))
    counts = speculation.drawn_before(target, 4, temperatures)
    assert counts.sum() == 1 << 18
    assert (counts / counts.sum() - wanted).abs().sum() / 2 < 0.03, "as far apart as so many tokens may be"
    assert torch.equal(counts, speculation.drawn_before(target, 4, temperatures)), "a second run drafts the same ids"


@pytest.mark.parametrize(
    "algorithm, coupled, target, draft",
    [
        ("NGRAM", False, "tiny", None),
        ("STANDALONE", True, "tiny", "tiny-draft-0.6"),
        ("EAGLE", True, "tiny", "tiny-draft-EAGLE"),
        ("EAGLE3", True, "tiny", "tiny-draft-EAGLE3"),
        ("NEXTN", True, "tiny-mtp", None),
    ],
)
def test_the_benchmark_of_speculation_gives_each_algorithm_its_checkpoints(
    load, tmp_path, algorithm, coupled, target, draft
):
    speculation = load("speculation")
    options = types.SimpleNamespace(
        **{"backends": ["stock", "greedy", "coupled"], "only": ["speed"], "checkpoints": tmp_path, "logs": tmp_path},
        **{"batches": [1], "tokens": 32, "temperatures": [0.0, 1.0], "memory_share": 0.3, "set": {}, "tp": 1},
    )
    run = speculation.Run(options, None, "tiny", algorithm, 4, 0.6)
    assert ("coupled" in run.backends) == coupled
    known, _ = run._write_checkpoints()
    if algorithm in speculation.HOT:
        run._write_likeliest(known)
        counts, likeliest = HotVocab.load(run._counts), torch.load(run._token_map)
        assert (counts.counted, len(likeliest)) == (1 << 20, int(0.15 * run.size.vocab_size))
        assert likeliest == counts.most_frequent(len(likeliest)).tolist()
    command = run._server("stock").command
    folders = [
        command[command.index(flag) + 1]
        for flag in ("--model-path", "--speculative-draft-model-path")
        if flag in command
    ]
    assert folders == [str(tmp_path / name) for name in (target, draft) if name is not None]
    assert all((Path(folder) / "config.json").is_file() for folder in folders)
    assert ("--speculative-num-steps" in command) == (algorithm != "NGRAM")
    assert "--tp-size" not in command and "tp" not in run.about
    options.tp = 2
    on_two = speculation.Run(options, None, "tiny", algorithm, 4, 0.6)
    assert on_two.about["tp"] == 2 and " --tp-size 2 " in " ".join(on_two._server("stock").command)


START = {7: 100.0, 8: 105.5, 9: 109.0}  # of kernels that take 4 us


def test_a_trace_says_when_each_launch_of_a_step_starts_and_how_long_it_runs(load):
    def kernel(name: str, ts: float, dur: float) -> dict:
        return {"cat": "kernel", "name": name, "ts": ts, "dur": dur}

    steps = [[kernel("screen", 100.0 * n, 50.0 + n), kernel("draw", 100.0 * n + 53, 4.0)] for n in range(3)]
    events = [*steps[2], {"cat": "gpu_memset", "name": "fill", "ts": 55.0}, *steps[0], *steps[1]]
    assert load("screened").launches_of(events, 3) == [
        {"launch": 0, "kernel": "screen", "start_us": 0.0, "us": 51.0},
        {"launch": 1, "kernel": "draw", "start_us": 53.0, "us": 4.0},
    ]
    with pytest.raises(ValueError, match="3 steps have 5 kernels; expected as many in each"):
        load("screened").launches_of(events[1:], 3)


def test_a_trace_says_what_a_step_asks_of_cuda(load, tmp_path):
    names = ["cudaGraphLaunch"] * 4 + ["cudaLaunchKernel"] * 6 + ["cudaStreamSynchronize", "aten::empty"]
    names += ["aten::item", "aten::_local_scalar_dense"] * 3  # of the host's own tensors
    names += ["aten::empty_like", "aten::empty_strided"]  # the one ends in the other
    events = [{"ph": "X", "name": name} for name in names]
    beside = {"args": {"correlation": 10}}
    events += [{"ph": "X", "cat": "kernel", "name": "mm", "dur": 30.0} | beside, {"ph": "i", "name": "aten::item"}]
    events[0]["args"] = {"correlation": 7}  # the model's own all-reduce is in its graph
    for number, name in ((7, "cross_device_reduce_1stage"), (8, "cross_device_reduce_1stage"), (9, "merge_records")):
        args = {"correlation": number, "stream": 7}
        kernel = {"ph": "X", "cat": "kernel", "name": name, "dur": 4.0, "args": args, "ts": START[number]}
        events.append(kernel)
    summarise = load("step_profile").summarise
    with pytest.raises(TimeoutError, match="no trace appeared"):
        summarise(tmp_path, 2, wait_seconds=0)
    (tmp_path / "a.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    step = summarise(tmp_path, 2)
    wanted = {
        "graph_launches": 2.0,
        "launches": 3.0,
        "synchronising": 0.5,
        "tensors": 1.0,
        "driver_allocating": 0.0,
    }
    assert {name: step[name] for name in wanted} == wanted and step["gpu_busy_us"] == 21.0
    assert step["exchange_us"] == 4.0 and step["beside_graphs_us"] == (30.0 + 4.0 + 4.0) / 2
    assert step["gaps_us"] == (1.5 - 0.5) / 2, "of kernels that follow each other, overlaps too"


@pytest.mark.slow
def test_a_cell_that_fails_is_recorded_and_the_others_are_measured(load, tmp_path, monkeypatch):
    serve = load("serve")
    monkeypatch.setattr(serve, "LOAD", serve.LOAD._replace(seconds=0.0))

    class Failing(serve.PretendedServer):
        def generate(self, *, input_ids, sampling_params, **fields):
            if len(input_ids) == 8:
                raise serve.ServerError("out of memory")
            return super().generate(input_ids=input_ids, sampling_params=sampling_params, **fields)

    class Run(serve.ModelRun):
        make_server = staticmethod(lambda model, backend, log: Failing(log, serve.CACHE_TOKENS))

    def run(limit: float) -> tuple[list[int], list[tuple[int, str]]]:
        options = types.SimpleNamespace(**names, until=time.monotonic() + limit)
        result = load("common").Result(tmp_path / "out.json", serve.BENCHMARKS["serve"], {})
        measured = [rows[0]["batch"] for rows in Run("tiny", options, result).run(["stock"])]
        return measured, [(gap["batch"], gap["reason"]) for gap in result.env["not_run"]]

    def host(self):
        raise serve.ServerError("no memory")

    names = {"samplings": ["t1"], "batches": [1, 8, 4], "pairs": 2, "logs": tmp_path, "tp": 1, "pp": 1, "dp": 1}
    names |= {"speculation": None, "deterministic": False, "together": False, "turn": None}
    assert run(60) == ([1, 4], [(8, "ServerError: out of memory")])
    assert run(0) == ([], [(size, "out of time") for size in (1, 8, 4)]), "no cell begins after the limit"
    monkeypatch.setattr(serve.ModelRun, "host", host)
    result = load("common").Result(tmp_path / "out.json", serve.BENCHMARKS["serve"], {})
    options = types.SimpleNamespace(**names | {"batches": [1]}, until=time.monotonic() + 60)
    assert len(list(Run("tiny", options, result).run(["stock", "host"]))) == 1
    assert [(gap["section"], gap["reason"]) for gap in result.env["not_run"]] == [("host", "ServerError: no memory")]


ANSWERING = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"here")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def stands_still(server) -> bool:
    return Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def comes_to(state: bool, server) -> bool:
    """True once the server stands still, or runs: a signal takes its time on a busy machine."""
    deadline = time.monotonic() + 60.0
    while stands_still(server) != state and time.monotonic() < deadline:
        time.sleep(0.01)
    return stands_still(server) == state


def make_answering(kind, log: Path):
    return kind("m", [], log=log, backend=None, launcher=(sys.executable, "-c", ANSWERING), patience=5.0)


def test_servers_that_take_turns_stand_still_while_another_one_answers(load, tmp_path):
    module = load("servers")
    servers = [make_answering(module.TakingTurns, tmp_path / name) for name in "ab"]
    with servers[0] as first, servers[1] as second:
        module.take_turns(servers)
        for one, other in ((first, second), (second, first), (first, second)):
            assert one.get("/anything") == "here"
            assert comes_to(True, other) and not stands_still(one)
        second.stop()
        assert second.process is None


def test_benchmarks_with_one_file_start_servers_side_by_side_and_measure_one_after_the_other(load, tmp_path):
    module = load("servers")
    first, second, third = (types.SimpleNamespace(turn=tmp_path / "turn", until=float(n)) for n in range(3))
    started = threading.Event()

    def measure(options) -> None:
        with module.in_turns(options) as wait_for_turn:
            started.set()
            wait_for_turn([server])

    answering = make_answering(module.Server, tmp_path / "log")
    with answering as server, concurrent.futures.ThreadPoolExecutor() as pool:
        with module.in_turns(second) as wait:
            waiting = pool.submit(measure, first)
            assert started.wait(60.0), "servers of two benchmarks start at once"
            assert comes_to(True, server) and not waiting.done(), "another one still starts servers"
            with pytest.raises(concurrent.futures.TimeoutError):
                waiting.result(0.2)
            wait([])  # both are ready: one measures after the other
            started.clear()
            late = pool.submit(measure, third)
            assert not started.wait(0.2), "nothing starts while something is measured"
        waiting.result(60.0)
        late.result(60.0)
        assert comes_to(False, server)
    assert first.until >= 0.2 and third.until >= 2.0, "the wait for a turn is no part of the limit"


# --- files and pages


def test_a_result_file_has_one_row_per_line(load, tmp_path):
    common = load("common")
    rows = [{"us": 1.5, "path": "fused"}, {"us": 2.0, "path": "logits"}]
    data = {"env": {"device": "x", "not_run": []}, "sections": {"a": {"rows": rows, "D": 3}}, "rows": rows}
    common.write_result(tmp_path / "new" / "r.json", data)
    text = (tmp_path / "new" / "r.json").read_text()
    assert json.loads(text) == data == common.read_result(tmp_path / "new" / "r.json", "x.py")
    lines = [line.strip(" ,") for line in text.splitlines()]
    assert lines.count('{"us": 1.5, "path": "fused"}') == 2 and '"env": {"device": "x", "not_run": []}' in lines


@pytest.mark.parametrize("text, complaint", [(None, "No such file"), ("{", "is no result"), ("[]", "has no env")])
def test_what_is_no_result_is_named_in_one_line(load, tmp_path, text, complaint):
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=complaint) as raised:
        load("common").read_result(tmp_path / "r.json", "kernels.py")
    assert "\n" not in str(raised.value)


def test_a_percentile_under_load_has_the_spread_of_the_same_percentile_over_the_run(load, tmp_path):
    clients = load("load").Clients(1, 9, tmp_path / "out.json")
    clients.began = time.monotonic() - 10
    clients.seconds, clients.gaps = [1.0] * 50 + [2.0] * 50, [0.1] * 9
    summary = clients.summary()
    assert summary["answer_s_p99"] == 2.0 and summary["answer_s_p99_spread"] == 0.5
    assert summary["gap_ms_p99"] == 100.0 and "gap_ms_p99_spread" not in summary, "fewer than one for each part"


@no_gpu
@needs_sglang
@pytest.mark.server
@pytest.mark.full
def test_servers_under_load_answer_every_request_and_their_memory_is_watched(load, tmp_path):
    out = tmp_path / "load.json"
    arguments = ("--models", "tiny", "--concurrency", "8", "--minutes", "0.2", "--every", "1")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(FOLDER / "run.py"), "load", "--out", str(out), *arguments]
    done = fork_server.run(command, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    stock, ours = json.loads(out.read_text())["rows"]
    assert (stock["backend"], ours["backend"]) == ("stock", "flashsample")
    assert all(row["ends"]["answered"] >= 8 and len(row["memory"]) >= 5 for row in (stock, ours))
    assert ours["rows"]["fused"] > 100 and ours["heads"][0]["graphs"] == 0 and not ours["failures"]


@no_gpu
@needs_sglang
@pytest.mark.server
@pytest.mark.full
def test_moving_traffic_to_real_servers_has_rows_of_every_kind_of_cell(dry_run, tmp_path):
    arguments = ("--samplings", "mix", "--arrivals", "closed", "poisson", "--logs", str(tmp_path / "logs"))
    result = dry_run("traffic", "--only", "traffic", "cold", *arguments)
    rows = result["rows"] + result["sections"]["cold"]["tiny"]["rows"]
    fields = "model clients arrivals sampling backend tokens_s spread ttft_ms_p50 ttft_ms_p99 itl_ms_p50 itl_ms_p99"
    fields = {*fields.split(), "host_us", "replayed", "late_captures", "late_compiles"}
    assert [(row["clients"], row["arrivals"]) for row in rows] == [(4, "closed")] * 2 + [(None, "poisson")] * 2 + [
        (4, "closed")
    ] * 2
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (stock["backend"], ours["backend"]) == ("stock", "flashsample")
        assert stock.keys() - {"run"} == fields and ours.keys() - {"run"} == {*fields, "ratio", "itl_ratio"}
        assert min(stock["tokens_s"], ours["tokens_s"], ours["host_us"]) > 0 and stock["host_us"] is None
    assert [row["ratio"]["windows"] >= 4 for row in rows[1::2]] == [True, True, False]
    assert result["env"]["poisson_requests_s"]["tiny mix"] > 0
    late = dry_run("traffic", "--keep", "--limit", "0", *arguments)
    assert late["rows"] == result["rows"] and late["env"]["not_run"] == [], "its cells have been measured before"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"clients": [4, 0]}, "--clients is 0; expected 1 or more"),
        ({"window": 0.0}, "--window is 0; expected 0.1 or more"),
        ({"seconds": 1.0, "window": 1.0}, "--seconds is 1; expected 4 or more"),
        ({"pp": 0}, "--pp is 0; expected 1 or more"),
        ({"set": ["A"]}, r"--set is \['A'\]; expected NAME=VALUE"),
    ],
)
def test_options_of_moving_traffic_that_do_not_fit_are_named(load, changes, message):
    options = types.SimpleNamespace(models=None, clients=None, samplings=None, arrivals=None, fast=False, set=[])
    vars(options).update({"window": 3.0, "seconds": 60.0, "cold_seconds": 60.0, "pp": 1} | changes)
    with pytest.raises(ValueError, match=message):
        load("traffic").prepare(options)


def test_servers_that_ran_one_after_the_other_are_compared_by_equal_work(load):
    module = load("traffic")
    plan = module.Plan("trunc", range(9), clients=4)
    added = []

    def cells(servers, clients):
        (label,) = servers
        totals = tuple((100 if label == "stock" else 120) * tick for tick in range(120))
        curve = module.traffic.Curve(totals, ((1.0, 11.9),))
        window = module.traffic.Window(1.0, (), ())
        yield module.traffic.TrafficCell(plan, {label: [window] * 4}, {label: {}}, {label: curve})

    run = object.__new__(module.ModelRun)
    run.servers = lambda labels: contextlib.nullcontext(dict.fromkeys(labels))
    run.cells, run._add = cells, added.append
    run._in_turns(None)
    (cell,) = added
    assert cell.segments == {"stock": [pytest.approx(1000.0)] * 5, "flashsample": [pytest.approx(1200.0)] * 5}


def test_under_load_what_a_healthy_server_does_not_do_is_named(load):
    module = load("load")
    row = {"ends": {"answered": 9, "left": 1}, "rows": {"fused": 5}, "failures": []}
    assert module.wrong(row) == []
    assert module.wrong(row | {"ends": {"status 500": 2}}) == ["2 requests: status 500"]
    assert module.wrong(row | {"rows": {"native error": 2}}) == ["SGLang's sampler served rows: native error"]
    assert module.wrong(row | {"ended": "killed", "failures": ["off until restart"]}) == [
        "the server ended: killed",
        "off until restart",
    ]


def test_under_load_clients_count_how_requests_end(load, tmp_path):
    """Against a server whose answers are too short, of status 500, or do not come."""
    from aiohttp import web

    module = load("load")
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(body := await request.json())
        if len(asked) % 3 == 1:
            return web.json_response({"meta_info": {"completion_tokens": body["sampling_params"]["max_new_tokens"]}})
        if len(asked) % 3 == 2:
            return web.json_response({"meta_info": {"completion_tokens": 0}})
        return web.Response(status=500)

    async def run() -> Any:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()
        clients = module.Clients(port, 1024, tmp_path / "clients.json")
        clients.stream = clients.whole
        await clients.run(4, 0.5, 0.1)
        await runner.cleanup()
        return clients

    ends = asyncio.run(run()).ends
    assert ends.total() == len(asked) > 10 and json.loads((tmp_path / "clients.json").read_text())["ends"] == ends
    assert ends["answered"] == pytest.approx(len(asked) / 3, abs=1) and ends["status 500"] == len(asked) // 3
    assert all(module.make_request(number, 1024) == module.make_request(number, 1024) for number in range(5))


@no_gpu
@pytest.mark.full
def test_steps_of_each_kind_are_profiled(dry_run):
    rows = dry_run("hot-path")["rows"]
    kinds = {row["kind"] for row in rows}
    assert kinds == {f"{kind}, picked" for kind in ("t1", "greedy", "k50p90", "edits", "logprob")} | {
        f"{kind}, picked with screen" for kind in ("t1", "greedy", "k50p90", "edits")
    }, "no screen serves logprobs"
    assert sum(row["steps"] for row in rows) >= 20


def test_what_cuda_was_asked_for_is_counted(load):
    hot_path, call = load("hot_path"), {"cat": "cuda_runtime", "name": "cudaMalloc"}
    events = [{"cat": "user_annotation", "name": "steps", "ts": 5.0, "dur": 10.0}]
    events += [call | {"ts": at} for at in (4.0, 6.0, 16.0)] + [call | {"ts": 7.0, "name": "cudaStreamSynchronize"}]
    events += [
        call | {"ts": 8.0, "name": "cuLaunchKernelEx", "cat": "cuda_driver"},
        call | {"ts": 9.0, "cat": "cpu_op"},
    ]
    assert hot_path.counted(events) == {"allocates": 1, "waits": 1, "calls": 3}


def test_a_recorded_command_has_no_folders_of_the_machine(load, monkeypatch):
    words = "/a/serve.py --out /a/b/c.json --set TUNED=/x/tables PYTHONPATH=/x/y:/z a/b --pp 2"
    monkeypatch.setattr(sys, "argv", words.split())
    assert load("common").command_line() == "python serve.py --out c.json --set TUNED=tables PYTHONPATH=y:z a/b --pp 2"


# --- the registry, result files and pages


def test_every_benchmark_is_in_the_list_and_says_what_it_measures(load):
    run = load("run")
    for name, entry in run.BENCHMARKS.items():
        benchmark = run.load(name)
        assert f"python benchmarks/run.py {name} " in benchmark.about and benchmark.measure and entry.needs
    modules = {entry.module: set(load(entry.module).BENCHMARKS) for entry in run.BENCHMARKS.values()}
    assert sorted(name for names in modules.values() for name in names) == sorted(run.BENCHMARKS)


@pytest.mark.parametrize("words, code", [((), 0), (("--help",), 0), (("kernel",), 1)])
def test_without_a_known_name_the_runner_lists_the_benchmarks(words, code):
    done = subprocess.run([sys.executable, str(FOLDER / "run.py"), *words], capture_output=True, text=True)
    assert done.returncode == code and "kernels      the whole last step" in done.stdout + done.stderr


@pytest.fixture
def make_result(load, tmp_path):
    """Makes a result whose rows have a section, a size of a model, a batch and a backend."""
    common = load("common")
    place = ("section", "model", "batch", "backend")
    benchmark = common.Benchmark(None, None, sections=("a", "b"), place=place, cell=("batch", "backend"))
    return lambda kept=None: common.Result(tmp_path / "r.json", benchmark, kept or {})


def test_rows_replace_those_of_their_cells_and_know_their_run(make_result):
    row = {"section": "a", "model": "m", "batch": 1, "backend": "x"}
    first = make_result()
    first.add([row | {"us": 1.0}, row | {"us": 2.0, "batch": 8}])
    again = make_result(first.data)
    again.add([row | {"us": 3.0}])
    assert [(one["us"], one["run"]) for one in again.rows] == [(2.0, 0), (3.0, 1)]
    assert [run["command"] for run in again.data["runs"]] == [again.run["command"]] * 2
    with pytest.raises(ValueError, match="is of NVIDIA H100; expected "):
        make_result({"env": {"device": "NVIDIA H100"}})


def test_sections_replace_those_of_their_name_in_the_order_of_the_benchmark(make_result):
    result = make_result()
    result.put("b", {"us": 1.0})
    result.put("a", {"us": 2.0}, "a head")
    result.put("a", {"us": 3.0}, "another head")
    result.put("b", {"us": 4.0})
    assert list(result.data["sections"]) == ["a", "b"] and list(result.data["sections"]["a"]) == [
        "a head",
        "another head",
    ]
    assert result.data["sections"]["b"]["us"] == 4.0


def test_a_result_names_what_no_run_has_measured_by_the_last_reason(make_result):
    result, cell = make_result(), {"section": "a", "model": "m", "batch": 8}

    def gaps() -> list[str]:
        return [gap["reason"] for gap in result.env["not_run"]]

    result.miss("out of time", **cell)
    result.miss("no memory", section="b", model="m")
    result.miss("out of memory", **cell)
    assert gaps() == ["no memory", "out of memory"] and result.close() == 1
    result.add([cell | {"backend": "x"}])
    assert gaps() == ["no memory"]
    result.miss("out of time", **cell)
    assert gaps() == ["no memory"], "the file has this cell"
    result.add([cell | {"section": "b", "batch": 1, "backend": "x"}])
    assert gaps() == [] and result.close() == 0
    result.miss("it ended", section="b", model="m")
    assert gaps() == ["it ended"], "after a row of its section"


def test_the_results_of_several_runs_are_put_into_one_file(load, tmp_path):
    """As if one run had followed the other into that file."""
    merge, row = load("merge"), {"section": "stock", "model": "qwen3-8b", "sampling": "t1", "batch": 1}
    late = {"section": "stock", "model": "qwen3-8b", "batch": 8, "reason": "out of time"}

    def write(name: str, rows: list[dict], runs: list[str], *gaps: dict, device: str = "NVIDIA H200") -> Path:
        env = {"device": device, "date": runs[-1], "rates": {name: 1.0}, "not_run": list(gaps)}
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"env": env, "runs": [{"date": date} for date in runs], "rows": rows}))
        return file

    file = write(
        "h200-serve",
        [row | {"us": 1.0, "run": 0}, row | {"us": 2.0, "run": 1, "batch": 64}],
        ["first", "second"],
        late | {"sampling": "t1"},
        late | {"sampling": "trunc"},
    )
    other = write("a", [row | {"us": 3.0, "run": 0}], ["third"], late | {"sampling": "trunc"}, late | {"batch": 64})
    newest = write("b", [row | {"us": 4.0, "run": 0, "batch": 8}], ["fourth"])
    command = [sys.executable, str(FOLDER / "merge.py"), str(file)]
    subprocess.run([*command, str(other), str(newest)], check=True, capture_output=True)
    data = json.loads(file.read_text())
    assert [one["date"] for one in data["runs"]] == ["second", "third", "fourth"], "the first has no row any more"
    assert [(one["batch"], one["us"], data["runs"][one["run"]]["date"]) for one in data["rows"]] == [
        (64, 2.0, "second"),
        (1, 3.0, "third"),
        (8, 4.0, "fourth"),
    ]
    assert data["env"]["date"] == "fourth" and data["env"]["rates"] == dict.fromkeys(("h200-serve", "a", "b"), 1.0)
    assert [(gap["sampling"], gap["batch"]) for gap in data["env"]["not_run"]] == [("trunc", 8)]
    before = file.read_text()
    for wrong, words in (
        (write("c", [], ["fifth"], device="NVIDIA H100"), "is of NVIDIA H100; expected NVIDIA H200"),
        (tmp_path / "none.json", "none.json: No such file"),
    ):
        done = subprocess.run([*command, str(wrong)], capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and file.read_text() == before
    with pytest.raises(ValueError, match="ends with the name of no benchmark; expected one of kernels, "):
        merge.name_of(tmp_path / "h200-server.json")


def test_the_sections_of_several_runs_are_put_into_one_file(load):
    merge, benchmark = load("merge"), load("run").load("tuning")

    def data(date: str, sections: dict, *missing: str) -> dict:
        gaps = [{"section": "replay", "head": head, "reason": "out of time"} for head in missing]
        return {"env": {"device": "x", "not_run": gaps}, "runs": [{"date": date}], "sections": sections}

    old = data("first", {"sweep": {"one": {"command": 1}}, "runs": {"one": {"command": 1}}}, "one", "two")
    new = data("second", {"replay": {"one": {"command": 2}}, "runs": {"two": {"command": 2}}})
    both = merge.merged(old, new, benchmark)
    assert both["sections"]["runs"] == {"one": {"command": 1}, "two": {"command": 2}}
    assert list(both["sections"]) == [name for name in benchmark.sections if name in ("runs", "sweep", "replay")]
    assert [gap["head"] for gap in both["env"]["not_run"]] == ["two"] and len(both["runs"]) == 2


def test_a_pair_of_times_has_the_larger_of_their_spreads(load):
    words = load("tables").pair_words
    stock, ours = {"tpot_us": 200.0, "spread_us": 0.25}, {"tpot_us": 100.0, "spread_us": 7.4}
    assert words(stock, ours) == "200 → 100 (0.500; ± 7)"
    assert words(stock, ours | {"spread_us": 0.1}) == "200 → 100 (0.500; ± 0.2)"


def test_a_pair_says_its_change_with_the_larger_spread_or_its_interval_and_what_is_certain(load):
    pair = load("tables").Pair
    assert pair(200.0, 190.0, (6.0, 3.0)).change_words() == "-5.0 % ± 3.0"
    assert pair(100.0, 106.0, rate=True, low=1.02, high=1.11).change_words() == "+6.0 % (+2 to +11)"
    assert pair(200.0, 190.0, (6.0, 3.0)).certain and not pair(200.0, 191.0, (6.0, 3.0)).certain
    assert not pair(100.0, 106.0, rate=True, low=0.99, high=1.2).certain
    slower = [pair(200.0, 201.0).slower, pair(200.0, 199.0).slower, pair(2.0, 1.0, rate=True).slower]
    assert slower == [True, False, True]


def words(text: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in text.split())


def test_the_pages_the_pictures_and_the_table_say_what_the_result_files_say(load):
    report = load("report")
    for file, text in report.written().items():
        assert file.read_text() == text, f"{file.relative_to(ROOT)}: run `python benchmarks/report.py --write`"


def test_the_page_of_results_has_every_table_and_both_pages_are_short(load):
    report = load("report")
    page = report.PAGE.read_text()
    of_the_readme = {name for name in load("tables").SECTIONS if name.startswith("summary-")}
    shown = set(report.MARKER.findall(page))
    of_others = {"regret", "proposals"}, {"deterministic", "answers"}
    for other, names in zip((report.PAGE_OF_THE_TUNER, report.PAGE_OF_LOGPROBS), of_others, strict=True):
        assert set(report.MARKER.findall(other.read_text())) == names
    assert shown == {*load("tables").SECTIONS, "summary-picture"} - of_the_readme - set.union(*of_others)
    assert words(page) <= 1000
    about = (FOLDER / "README.md").read_text()
    assert words(about) <= 900 and len(about.splitlines()) <= 150


def test_a_page_with_an_unknown_marker_and_a_result_of_a_dry_run_are_refused(load, tmp_path):
    report, sections = load("report"), load("tables").SECTIONS
    with pytest.raises(ValueError, match="results:tunes is no table"):
        report.filled(report.PAGE, "<!-- results:tunes -->\n<!-- end -->\n")
    (tmp_path / "h200-kernels.json").write_text(json.dumps({"env": {"device": "cpu"}, "rows": []}))
    with pytest.raises(ValueError, match="is of a dry run"):
        sections["summary-kernels"](tmp_path)
    (tmp_path / "h200-kernels.json").write_text("[]")
    with pytest.raises(ValueError, match=r"h200-kernels\.json is no result"):
        sections["summary-kernels"](tmp_path)


def test_what_was_not_measured_is_said_and_drawn_by_nobody(load, tmp_path):
    sections = load("tables").SECTIONS
    for name in ("eight", "conditions", "standing-and-traffic", "rivals", "tuned", "summary-serve", "summary-kernels"):
        assert sections[name](tmp_path) == "Not measured."
    assert load("picture").pictures(tmp_path) == {} and load("rows").script(tmp_path) == "const FILES = [\n\n];\n"
    assert load("report").picture_of(ROOT / "README.md", tmp_path) == "Not measured."


def test_committed_results_say_on_what_they_were_measured(load):
    for file in load("tables").result_files():
        env = json.loads(file.read_text())["env"]
        assert env.keys() >= {"device", "torch", "triton", "date", "command"}, file.name
        assert "serve" not in file.name or all(run["sglang"] for run in json.loads(file.read_text())["runs"])


SERVER = {"model": "qwen3-8b", "section": "stock", "run": 0}
PLACES = ("cpu", "gpu", "gpu, drafts", "gpus")
OF_RANKS = {"merge_logprobs.py", "merge_ranks.py", "peer_memory.py"}
OF_DRAFTS = {"draft_children.py", "follow_drafts.py", "sample_own_ids.py"}
ENV = {"device": "NVIDIA H200", "torch": "2", "triton": "3", "date": "2026-01-01", "command": "python run.py"}


def write_results(folder: Path, benchmark: str, rows: list[dict], gpu: str = "h200", **more: object) -> Path:
    file = folder / f"{gpu}-{benchmark}.json"
    file.write_text(json.dumps({"env": ENV, "runs": [ENV | {"sglang": "0.5.17"}], "rows": rows} | more))
    return file


def timed(us: dict[str, float], spread: float = 1.0, **fields: object) -> list[dict]:
    off = (-0.5, 0.5, 0.0, 0.25, -0.25, 0.0)
    return [
        SERVER
        | fields
        | {
            "backend": name,
            "tpot_us": time,
            "spread_us": spread,
            "samples": [time + one for one in (*off[place:], *off[:place])],
        }
        for place, (name, time) in enumerate(us.items())
    ]


def test_the_page_names_what_is_slower_for_certain_and_counts_the_rest(load, tmp_path):
    rows = timed({"stock": 100.0, "flashsample": 103.0}, sampling="greedy", batch=1)
    rows += timed({"stock": 100.0, "flashsample": 100.5}, sampling="greedy", batch=8)
    rows += timed({"stock": 100.0, "flashsample": 90.0}, sampling="t1", batch=8)
    rows += timed({"stock": 100.0, "flashsample": 111.0}, spread=9.0, sampling="t1", batch=1, model="other")
    rows[-1]["samples"] = [50.0, 180.0, 60.0, 170.0, 55.0, 175.0]
    write_results(tmp_path, "serve", rows)
    text = load("tables").SECTIONS["losses"](tmp_path)
    assert text.startswith("4 cells of servers were compared with stock. For certain 1 are faster and 1 is slower; ")
    assert "of the other 2, 2 are slower, 1 by 10 % or more: below." in text
    lines = [line for line in text.splitlines() if line.startswith("| H200")]
    assert lines[0] == "| H200, qwen3-8b, batch of 1, greedy | 100 → 103 µs per token | +3.0 % (+2 to +4) |"
    assert lines[1].startswith("| H200, other, batch of 1, temperature 1 | 100 → 111 µs per token | +11.0 % (-")
    assert len(lines) == 2


def test_a_batch_that_stays_is_beside_traffic_of_the_same_model_and_sampling(load, tmp_path):
    write_results(tmp_path, "serve", timed({"stock": 110.0, "flashsample": 100.0}, 0.0, sampling="t1", batch=64))
    cell = {"model": "qwen3-8b", "arrivals": "closed", "clients": 16, "sampling": "t1", "run": 0}
    ratio = {"of": 1.06, "low": 1.02, "high": 1.11}
    sides = [
        cell | {"backend": "stock", "tokens_s": 100.0},
        cell | {"backend": "flashsample", "tokens_s": 200.0, "ratio": ratio},
    ]
    write_results(tmp_path, "traffic", sides)
    line = load("tables").SECTIONS["standing-and-traffic"](tmp_path).splitlines()[-1]
    assert line == "| qwen3-8b, temperature 1 | +10.0 % ± 0.0 | +6.0 % (+2 to +11) |  |  |"


def test_a_tuned_table_has_its_gains_per_kind_and_its_losses_between_sizes(load, tmp_path):
    sizes = [
        {"kind": kind, "rows": rows, "us": us, "default_us": 100.0}
        for kind, rows, us in (("plain", 1, 100.0), ("plain", 2, 90.0), ("plain", 4, 95.0), ("plain+screen", 1, 99.5))
    ]
    raced = [{"slower": True, "off": 0.012}, {"slower": False, "off": 0.5}]
    sizes.append({"kind": "greedy", "rows": 1, "us": 100.0, "default_us": 100.0})
    head, other = "151936x4096", "201088x2880"
    sweeps = {head: {"slower": 1, "places": 285, "raced": raced}, other: {"slower": 0, "places": 9, "raced": raced[1:]}}
    sections = {"replay": {head: {"sizes": sizes}, other: {"sizes": sizes[:1]}}, "sweep": sweeps}
    write_results(tmp_path, "tuning", [], sections=sections)
    text = load("tables").SECTIONS["tuned"](tmp_path)
    assert text.splitlines()[2:5] == [
        "| temperature | 5.0 % (10.0 %; 2 of 3) | 0 |",
        "| temperature, with a screen | 0.5 % (0.5 %; 1 of 1) |  |",
        "| greedy | 0 |  |",
    ]
    assert "of H200, 151936x4096 are slower in 1 of 285 places, by at most 1.2 %." in text
    assert text.endswith("of H200, 201088x2880 are slower in 0 of 9 places.")


def test_our_paths_are_compared_with_the_fastest_rival_of_each_cell_and_lost_cells_are_named(load, tmp_path):
    def cell(batch: int, **us: float) -> list[dict]:
        of = {"mode": "plain", "D": 64, "V": 777, "B": batch, "run": 0}
        names = {name: name.replace("_", "-") for name in us}
        return [of | {"path": names[name], "us": us[name], "picked": name == "ours_screened"} for name in us]

    rows = cell(1, gemm=50.0, read=40.0, ours_fused=90.0, ours_picked=90.0, ours_screened=60.0, vllm=120.0, torch=100.0)
    rows += cell(16, gemm=50.0, read=40.0, ours_fused=200.0, ours_screened=102.0, vllm=100.0, torch=110.0)
    write_results(tmp_path, "rivals", rows)
    line = load("tables").SECTIONS["rivals"](tmp_path).splitlines()[-1]
    ours = "1.45 (0.90 to 2.00) | 0.90 (0.90 to 0.90) | 0.81 (0.60 to 1.02) | 0.81 (0.60 to 1.02)"
    assert line == f"| H200, plain | {ours} | 1 of 2: vllm, 777x64, 16 rows, 1.020 |"


def test_searches_with_and_without_proposals_are_compared_by_head_and_effort(load, tmp_path):
    section = load("tables").SECTIONS["proposals"]
    write_results(tmp_path, "tuning", [], sections={})
    assert section(tmp_path) == "Regret without the proposals of Optuna, and with them: Not measured."
    without, shared = ({"effort": "quick", "share": share, "trials": 6, "se": 0.0003} for share in (0.0, 0.333))
    sizes = [without | {"proposed": 0, "batch": batch, "off": off} for batch, off in ((1, 0.02), (16, 0.04))]
    sizes += [shared | {"proposed": 2, "batch": batch, "off": off} for batch, off in ((1, 0.01), (16, 0.0))]
    write_results(
        tmp_path, "tuning", [], sections={"proposals": {"151936x4096": {"sizes": sizes, "commit": "0123456789"}}}
    )
    line = section(tmp_path).splitlines()[-1]
    assert line == "| H200, 151936x4096, `quick`, commit 0123456 | 3.00 ± 0.02 % (0 of 6) | 0.50 ± 0.02 % (2 of 6) |"


def test_a_choice_that_is_faster_than_the_fastest_found_makes_no_other_ones_regret_smaller(load, tmp_path):
    section = load("tables").SECTIONS["regret"]
    places = (("plain", 1, -0.02), ("truncate+screen", 48, 0.06))
    sizes = [{"by": "full", "kind": kind, "batch": batch, "off": off} for kind, batch, off in places]
    sizes.append(sizes[0] | {"by": "built-in", "off": 0.5})
    write_results(tmp_path, "tuning", [], sections={"regret": {"8x8": {"sizes": sizes, "commit": "0123456789"}}})
    (line,) = section(tmp_path).splitlines()[2:]
    assert (
        line == "| H200, 8x8, `full`, commit 0123456 | 3.00 % | 6.0 % (top-k, top-p, min-p, with a screen, 48 rows) |"
    )


def test_servers_of_deterministic_inference_have_a_table_of_their_own(load, tmp_path):
    sections = load("tables").SECTIONS
    about = {"section": "stock", "model": "qwen3-8b", "sampling": "t1", "batch": 16, "spread_us": 4.0, "samples": [1.0]}
    rows = [about | {"backend": "stock", "tpot_us": 100.0}, about | {"backend": "flashsample", "tpot_us": 90.0}]
    write_results(tmp_path, "serve", rows)
    assert sections["deterministic"](tmp_path) == sections["answers"](tmp_path) == "Not measured."
    rows += [row | {"deterministic": True, "tpot_us": 2 * row["tpot_us"]} for row in rows]
    about = {"section": "answers", "model": "qwen3-8b", "deterministic": True, "way": "in chunks", "requests": 1000}
    rows += [
        about | {"tokens": 6000, "different": 1, "different_logprobs": 2, "without_all_logprobs": 4, "retractions": 3}
    ]
    write_results(tmp_path, "serve", rows)
    line = sections["deterministic"](tmp_path).splitlines()[-1]
    assert line == "| H200, qwen3-8b, temperature 1 | 200 → 180 (0.900; ± 4) |"
    assert (
        sections["answers"](tmp_path).splitlines()[-1]
        == "| H200, qwen3-8b, in chunks | 1 | 2 | 4 | 1,000 | 6,000 | 3 |"
    )


def test_every_row_of_every_file_is_in_the_table_of_all_results(load):
    files = load("rows").page_data()
    assert {entry["file"] for entry in files} == {file.name for file in load("tables").result_files()}
    place = files[0]["columns"].index("value")
    without = set()
    for entry in files:
        data = json.loads((FOLDER / "results" / entry["file"]).read_text())
        assert len(entry["rows"]) == len(data.get("rows", [])) + len(data.get("searches", [])) + rows_of_sections(data)
        without |= {(entry["benchmark"], row[0]) for row in entry["rows"] if row[place] is None}
    assert without == {("serve", "repeats")}, "they hold several figures of equal weight"


def rows_of_sections(data: dict) -> int:
    """Rows of each section, or of each head in it; a section without rows is one."""
    count = 0
    for section in data.get("sections", {}).values():
        for part in [section] if "command" in section else section.values():
            rows = [row for value in part.values() if isinstance(value, list) for row in value if isinstance(row, dict)]
            count += sum(len(row["rows"]) if isinstance(row.get("rows"), list) else 1 for row in rows) or 1
    return count


SETTINGS = ["model", "tp", "pp", "dp", "deterministic", "sampling", "batch", "prompt_tokens", "clients", "temperature"]
SETTINGS += ["error", "threads"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_row_of_the_table_is_compared_with_its_own_cell_alone(load, tmp_path, setting):
    fields: dict[str, object] = {"sampling": "greedy", "batch": 1}
    values = {"model": ("qwen3-8b", "qwen3-1.7b"), "sampling": ("t1", "greedy")}.get(setting, (1, 2))
    first, second = (fields | {setting: value} for value in values)
    rows = timed({"stock": 100.0, "flashsample": 103.0}) + timed({"stock": 50.0, "flashsample": 49.0})
    rows = [row | cell for row, cell in zip(rows, (first, first, second, second), strict=True)]
    file = write_results(tmp_path, "serve", rows)
    shown = load("rows").shown_rows(json.loads(file.read_text()))
    found = [(row.contender, row.over, row.beside, row.verdict) for row in shown]
    assert found == [
        ("stock", None, "", ""),
        ("flashsample", 1.03, "stock", "slower"),
        ("stock", None, "", ""),
        ("flashsample", 0.98, "stock", "not decided"),
    ]
    assert shown[0].about["tpot_us"] == 100.0 and shown[0].unit == "µs per token"


def test_more_tokens_per_second_are_less_time(load, tmp_path):
    cell = {"section": "speed", "model": "m", "algorithm": "NGRAM", "draft_tokens": 8, "batch": 1, "run": 0}
    cell |= {"temperature": 1.0, "tokens_s_spread": 1.0}
    sides = [cell | {"backend": "stock", "tokens_s": 100.0}, cell | {"backend": "coupled", "tokens_s": 200.0}]
    file = write_results(tmp_path, "speculation", sides)
    (_, ours) = load("rows").shown_rows(json.loads(file.read_text()))
    assert (ours.over, ours.verdict, ours.model) == (0.5, "faster", "m, 8 drafts of NGRAM")


def test_drafts_are_compared_with_the_fastest_of_sglangs_modes(load, tmp_path):
    cell = {"section": "speed", "model": "m", "algorithm": "EAGLE", "draft_tokens": 8, "batch": 1, "run": 0}
    cell |= {"temperature": 1.0, "tokens_s_spread": 1.0}
    speeds = {"stock": 100.0, "rejection": 400.0, "tree": 150.0, "coupled": 200.0, "hot": 500.0}
    file = write_results(tmp_path, "speculation", [cell | {"backend": k, "tokens_s": v} for k, v in speeds.items()])
    shown = {row.contender: (row.over, row.beside) for row in load("rows").shown_rows(json.loads(file.read_text()))}
    assert shown["coupled"] == (2.0, "rejection") and shown["hot"] == (0.8, "rejection")
    tables = load("tables")
    ((ours, pair),) = tables.draft_pairs(tables.Results("h200", tmp_path))
    assert ours["backend"] == "coupled" and (pair.one, pair.ours) == (400.0, 200.0)


def test_kernels_are_compared_with_the_fastest_baseline_and_quantised_heads_with_their_own_weights(load, tmp_path):
    cell = {"V": 100, "D": 8, "B": 1, "sampling": "t1", "us_spread": 0.1, "run": 0}
    us = {"fused": 50.0, "gemm+argmax": 80.0, "gemm+flashinfer": 60.0}
    rows = [cell | {"path": path, "us": time} for path, time in us.items()]
    rows += [cell | {"path": "picked", "dtype": dtype, "us": time} for dtype, time in (("bf16", 40.0), ("e4m3", 10.0))]
    file = write_results(tmp_path, "kernels", rows)
    over = {row.contender: (row.over, row.beside) for row in load("rows").shown_rows(json.loads(file.read_text()))}
    assert over["fused"] == (0.8333, "GEMM, FlashInfer") and over["picked, e4m3"] == (0.25, "picked, bf16")


BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium-headless-shell or chromium")
@pytest.mark.parametrize("link", ["", "#benchmark=serve&verdict=faster"])
def test_the_table_of_all_results_shows_what_a_link_asks_for_and_loads_nothing_else(load, link):
    page = ROOT / "docs" / "results" / "table.html"
    assert re.findall(r'(?:src|href)="([^"]+)"', page.read_text()) == ["./", "table-data.js"]
    command = [
        BROWSER,
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=8000",
        "--dump-dom",
        page.as_uri() + link,
    ]
    dump = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    pages = load("rows").page_data()
    rows = sum(len(entry["rows"]) for entry in pages)
    faster = [row for entry in pages if entry["benchmark"] == "serve" for row in entry["rows"] if "faster" in row]
    count = len(faster) if link else rows
    assert 0 < len(faster) < 300 < rows
    assert f"{count:,} of {rows:,} rows" in dump
    assert dump.count('class="line"') == min(count, 300)
    assert all(f"<td>{file.name}</td>" in dump for file in load("tables").result_files())


def test_the_picture_has_a_bar_per_measured_way_from_zero_with_its_change_and_its_versions(load, tmp_path):
    picture = load("picture")
    servers = timed({"stock": 6000.0, "flashsample": 5400.0}, 60.0, sampling="trunc", batch=64)
    write_results(tmp_path, "serve", servers)
    assert picture.pictures(tmp_path) == {}, "half of it is not measured"
    cell = {"D": 4096, "V": 151936, "B": 16, "sampling": "t1", "us_spread": 4.0, "run": 0}
    us = {"gemm+argmax": 500.0, "gemm+flashinfer": 400.0, "fused": 300.0, "screened": 200.0}
    steps = [cell | {"path": path, "us": time, "picked": path in ("fused", "screened")} for path, time in us.items()]
    write_results(tmp_path, "kernels", steps)
    light, dark = picture.pictures(tmp_path).values()
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)" height="15"', light)]
    assert [round(width / widths[0], 3) for width in widths] == [1.0, 0.9, 1.0, 0.75, 0.5]
    assert re.findall(r">([^<]*(?: ms| µs)[^<]*)<", light) == [
        "6.00 ms",
        "5.40 ms, -10 %",
        "400 µs",
        "300 µs, -25 %",
        "200 µs, -50 %",
    ]
    assert "LM head: H200, SGLang 0.5.17<" in light and "NVIDIA H200; SGLang 0.5.17, torch 2" in light != dark
    xml.etree.ElementTree.fromstring(light)


def test_a_result_records_its_versions_its_commit_and_the_code_that_draws_and_no_folder(make_result, load):
    result = make_result()
    assert result.env.keys() >= {"device", "torch", "triton", "commit", "drawing_code"}
    assert ("sglang" in result.env) is (importlib.util.find_spec("sglang") is not None)
    result.put("a", {"us": 1.0})
    assert result.data["sections"]["a"].keys() >= {"commit", "drawing_code"}
    run = result.run
    assert re.fullmatch(r"[0-9a-f]{40}(, changed)?|unknown", run["commit"])
    assert run["drawing_code"] == {place: load("tables").current(place) for place in PLACES}
    assert str(ROOT) not in json.dumps(run)


def test_a_result_of_other_kernels_or_of_unknown_ones_is_named(load, tmp_path):
    tables = load("tables")
    code = {place: tables.current(place) for place in PLACES}
    fresh, old = {"drawing_code": code, "commit": "c"}, {"drawing_code": code | {"gpu": "0"}, "commit": "c"}
    row = {"run": 1}
    write_results(tmp_path, "serve", [row], runs=[ENV | old, ENV | fresh])
    write_results(tmp_path, "traffic", [row], runs=[ENV | fresh, ENV | old])
    write_results(tmp_path, "load", [row], runs=[ENV | fresh, ENV])
    section = {"command": "c", "date": "d"}
    write_results(tmp_path, "screened", [], sections={"speed": section | fresh, "tokens": section | old})
    (tmp_path / "cpu.json").write_text(json.dumps({"env": ENV | {"device": "cpu"} | old}))
    names = ["h200-load.json", "h200-screened.json", "h200-traffic.json"]
    assert tables.with_other_code(tmp_path) == names
    about = tables.SECTIONS["age"](tmp_path)
    assert about.startswith(
        "**2 of 5 result files were measured with the kernels of this commit, 3 with older kernels, some in parts**: "
        "`h200-load.json`, `h200-screened.json`, `h200-traffic.json`;"
    )
    assert about.endswith("; 1 of these do not say with which commit.")


def test_the_check_of_a_release_fails_with_the_names_of_old_files(load, monkeypatch):
    report = load("report")
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    monkeypatch.setattr(report, "with_other_code", lambda: ["h200-serve.json"])
    with pytest.raises(SystemExit, match=r"than this tree's, measure again: h200-serve\.json"):
        report.main()
    monkeypatch.setattr(report, "with_other_code", lambda: [])
    report.main()
    assert "benchmarks/report.py --check\n" in (ROOT / ".ci" / "release").read_text()


def test_pages_are_made_without_torch():
    code = "import sys; sys.modules['torch'] = None; sys.path.insert(0, 'benchmarks'); import report; report.written()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_fingerprint_is_of_code_and_not_of_comments(load, tmp_path):
    sources, file = load("sources"), tmp_path / "kernel.py"

    def fingerprint(text: str) -> str:
        file.write_text(text)
        return sources.fingerprint([file])

    code = 'NAME = "a # b"\n\n\ndef double(x):\n    return 2 * x\n'
    same = [
        '"""Name."""\n\nNAME = "a # b"\n\n\ndef double(x):\n    """2\n    µs."""  # µs\n    return 2 * x\n',
        "# first\n" + code.replace("2 * x", "2 * x  # twice"),
    ]
    assert {fingerprint(text) for text in [code, *same]} == {fingerprint(code)}
    assert fingerprint(code.replace("2 * x", "3 * x")) != fingerprint(code) != fingerprint(code.replace("# b", "# c"))


@pytest.mark.parametrize(
    ("file", "without"),
    [
        ("h200x2-serve.json", set()),
        ("h200-speculation.json", OF_RANKS),
        ("h200-kernels.json", OF_RANKS | OF_DRAFTS),
        ("h200-hot-path.json", OF_RANKS | OF_DRAFTS),
    ],
)
def test_the_code_that_draws_is_every_kernel_that_a_file_can_have_run_and_what_chooses_one(load, file, without):
    sources = load("sources")
    names = {path.name for path in sources.drawing_code(sources.place_of(file))}
    kernels = {path.name for path in (ROOT / "kernels").glob("*.py")}
    assert names & kernels == kernels - {"reference.py"} - without
    assert names >= {"dispatch.py", "defaults.py", "builtin-sm90-2byte.json"}


def test_the_code_that_draws_on_a_cpu_is_its_loops(load):
    sources = load("sources")
    names = {path.name for path in sources.drawing_code(sources.place_of("cpu.json"))}
    assert names == {"cpu_loops.py", "cpu_path.py"}


def test_no_other_kernel_imports_those_of_drafts_or_of_ranks():
    own = OF_RANKS | OF_DRAFTS
    for file in (ROOT / "kernels").glob("*.py"):
        used = set(re.findall(r"^from \.(\w+) import", file.read_text(), re.M)) if file.name not in own else set()
        assert used.isdisjoint({Path(name).stem for name in own}), file.name


def test_the_tables_name_everything_that_is_measured(load):
    tables, contenders = load("tables"), load("contenders")
    assert set(tables.PATHS) == {*contenders.OURS, *contenders.BASELINES}


def test_scripts_import_each_other_in_no_circle():
    def imported(name: str) -> set[str]:
        nodes = list(ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())))
        names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        return names & set(SCRIPTS)

    graphlib.TopologicalSorter({name: imported(name) for name in SCRIPTS}).prepare()  # raises for a circle


# --- rivals


@no_gpu
@pytest.mark.full
def test_the_race_against_rivals_has_rows_of_every_path_and_mode_and_a_gap_for_who_is_not_installed(dry_run, tmp_path):
    """The tokens of each row were right, else it had no time."""
    result = dry_run("rivals", "--rivals", "torch", "flashsampling")
    assert [(gap["path"], "PYTHONPATH" in gap["reason"]) for gap in result["env"]["not_run"]] == [
        ("flashsampling", True)
    ]
    cells: dict[str, dict] = {}
    for row in result["rows"]:
        cells.setdefault(row["mode"], {})[row["path"]] = row
    assert cells.keys() == {"plain", "greedy", "top_k+top_p", "top_p", "min_p"}
    for mode, cell in cells.items():
        assert cell.keys() == {"gemm", "torch", "ours-fused", "ours-picked", "ours-screened"}
        assert [path for path, row in cell.items() if row.get("picked")] == ["ours-screened"]
        assert cell["ours-screened"]["form"].startswith("fused" if mode in ("top_p", "min_p") else "screened")
        assert (cell["ours-picked"]["us"], cell["ours-picked"]["same_as"]) == (cell["ours-fused"]["us"], "ours-fused")

    out = tmp_path / "out.json"
    again = [sys.executable, str(FOLDER / "run.py"), "rivals", "--dry-run", "--keep", "--out", str(out), "--rivals"]
    for rivals, words in ((["torch", "flashsampling"], "holds every cell already"), (["torch"], "; expected {")):
        done = fork_server.run([*again, *rivals])
        assert done.returncode == 1 and words in done.stderr


def test_a_rival_that_is_not_installed_says_how_to_install_it(load):
    rival = load("rivals").Rival(("flashsample_no_such_module",), "none", "pip install none", ("plain",), lambda: {})
    with pytest.raises(ImportError, match="No module named 'flashsample_no_such_module'; pip install none"):
        rival.load()


@pytest.fixture
def law(load) -> Callable[..., Any]:
    """The law of a mode for rows whose logits are given, each in a column of an identity."""
    rivals = load("rivals")

    def make(mode: str, logits: list[float], rows: int = 2) -> Any:
        head = types.SimpleNamespace(weight=torch.tensor(logits)[:, None])
        batch = types.SimpleNamespace(head=head, hidden=torch.ones(rows, 1), vocab=len(logits), rows=rows)
        batch.refresh = lambda index: None
        return rivals.Law(batch, mode)

    return make


def tokens(*ids: int) -> Callable[[int], torch.Tensor]:
    return lambda step: torch.tensor(ids, dtype=torch.int32)


@pytest.mark.parametrize(
    "mode, allowed, forbidden",
    [
        ("greedy", 0, 2),  # 1 is a near-tie
        ("greedy", 1, 3),
        ("top_p", 2, 3),  # the first three have 0.92 of the mass, the first two 0.78
        ("min_p", 3, 4),
        ("top_k+top_p", 2, 3),
    ],
)
def test_a_token_that_a_mode_does_not_allow_is_a_fault(law, mode, allowed, forbidden):
    logits = [5.0, 5.0 - 1e-6, 4.0, 3.0, 1.9, 1.0, *[-9.0] * 60]
    assert law(mode, logits).fault(tokens(allowed, 0)) is None
    fault = law(mode, logits).fault(tokens(0, forbidden))
    assert fault.endswith(f"are not allowed in this mode, first: row 1, id {forbidden}")


def test_more_than_the_k_largest_are_not_allowed(law):
    logits = [1.0 - 1e-3 * rank for rank in range(1000)]
    assert law("top_k+top_p", logits).fault(tokens(0, 49)) is None
    assert "id 50" in law("top_k+top_p", logits).fault(tokens(0, 50))


def test_plain_tokens_are_in_the_vocabulary_one_per_row_and_have_the_right_likelihood(law):
    logits = [0.0, *[-2.0] * 40]
    plain, generator = law("plain", logits, rows=64), torch.Generator().manual_seed(0)
    probs = torch.softmax(torch.tensor(logits), 0)
    assert plain.fault(lambda step: torch.multinomial(probs, 64, True, generator=generator)) is None
    assert "standard errors off" in plain.fault(lambda step: torch.zeros(64, 1, dtype=torch.int64))
    assert "1 of 128 are not allowed" not in plain.fault(tokens(*[0] * 63, 41)), "each call has one"
    assert "2 of 128 are not allowed in this mode, first: row 63, id 41" in plain.fault(tokens(*[0] * 63, 41))
    assert plain.fault(tokens(0, 1)) == "wrong tokens: 2 of 64 rows"


def test_who_draws_wrong_tokens_or_fails_is_not_raced(load, law):
    entrant, gaps = load("contenders").Entrant, []

    def fail(step: int) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    calls = {"right": tokens(0, 0), "wrong": tokens(0, 1), "broken": fail, "not called": fail}
    entered = [entrant("x", "greedy", form, call) for form, call in calls.items()]
    miss = lambda reason, **gap: gaps.append((gap["path"], reason))  # noqa: E731
    unusual = {"x greedy: not called": "it cannot", "x greedy: right": "eager"}
    fine = load("rivals").legal(entered, law("greedy", [1.0, 0.0]), unusual, miss)
    assert [one.form for one in fine] == ["right", "not called"], "the race records what cannot be called"
    (wrong, fault), broken = gaps
    assert wrong == "x greedy: wrong" and "id 1" in fault
    assert broken == ("x greedy: broken", "RuntimeError: no kernel image")


@no_gpu
def test_the_path_of_a_server_with_a_table_is_marked_and_one_configuration_is_raced_once(load, monkeypatch):
    rivals, weight = load("rivals"), make_weight(777, 48, torch.float32, torch.device("cpu"))
    screened_rows: list[int] = []

    def make(fresh: bool = True) -> Any:
        found = types.SimpleNamespace(screened_rows=lambda rows, measured: screened_rows[0])
        resolved = types.SimpleNamespace(table_file="x", dispatch=found, knows_screens=fresh)
        monkeypatch.setattr(rivals, "resolve", lambda head: resolved)
        ours = rivals.Ours(rivals.Shape(48, 777), [weight, weight.clone()], 3)
        return ours, ours.entrants(rivals.Workload(ours.heads[0], 3, "typical"), "plain")

    screened_rows[:] = [0]
    ours, (entered, same) = make()
    assert [one.path for one in entered] == ["ours-fused"] and len(ours.heads) == 2
    assert list(same) == ["ours-picked", "ours-screened", "ours-tuned", "ours-tuned-screened"]
    rows = ours.complete([{"path": "gemm", "us": 1.0}, {"path": "ours-fused", "us": 2.0}], same)
    assert [(row["path"], row["us"]) for row in rows if row.get("picked")] == [("ours-tuned-screened", 2.0)]
    assert ours.complete([{"path": "gemm", "us": 1.0}], same) == [{"path": "gemm", "us": 1.0}], "it could not be timed"

    screened_rows[:] = [64]  # the table has measured that a screen is faster
    _, (entered, same) = make()
    assert [one.path for one in entered] == ["ours-fused", "ours-tuned-screened"]
    assert entered[1].form.startswith("screened") and list(same) == ["ours-picked", "ours-screened", "ours-tuned"]
    _, (entered, _) = make(fresh=False)
    assert [one.path for one in entered] == ["ours-fused"], "a stale table does not say so, and this head is too small"


def test_a_cell_in_which_a_device_fails_is_recorded_and_left_out_from_then_on(load, make_result):
    rivals, result = load("rivals"), make_result()
    cell = {"D": 8, "V": 64, "B": 2, "mode": "plain"}

    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("an illegal memory access")

    session = types.SimpleNamespace(race_entrants=fail)
    ours = types.SimpleNamespace(heads=[LMHead(torch.zeros(64, 8))])
    with pytest.raises(SystemExit, match=r"an illegal memory access.*--keep goes on without this cell"):
        rivals._race(session, ours, [], cell, 3, result)
    assert result.env["not_run"] == [cell | {"path": "all", "reason": "the device failed"}]
    result.before["arguments"] = {"rounds": 3, "rivals": ["torch"]}
    options = types.SimpleNamespace(heads=[rivals.head_of("8x64")], batches=[2], modes=["plain"], out="FILE")
    options.rounds, options.rivals = 3, ["torch"]
    with pytest.raises(SystemExit, match="FILE holds every cell already"):
        rivals.measure(options, result)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"heads": ["4096"]}, "head is '4096'; expected DxV, as 4096x151936"),
        ({"batches": [0]}, "expected at least 1 and at least 3"),
        ({"rounds": 2}, "expected at least 1 and at least 3"),
    ],
)
def test_options_of_the_race_against_rivals_that_do_not_fit_are_named(load, changes, message):
    options = {"heads": None, "batches": None, "rivals": None, "rounds": None, "fast": False}
    with pytest.raises(ValueError, match=message):
        load("rivals").prepare(types.SimpleNamespace(**options | changes))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["cpu", "--out", "."], "--out is ., which is not a plain file"),
        (["cpu", "--out", "x", "--threads", "0"], "--threads has 0; expected 1 or more"),
        (["load", "--out", "x", "--minutes", "0"], "--minutes is 0; expected above 0"),
    ],
)
def test_options_that_do_not_fit_are_named_before_anything_is_measured(
    load, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        load("run").main()
    assert message in capsys.readouterr().err and not os.listdir(tmp_path)


def test_the_counters_of_a_server_are_found_among_the_labels_of_sglang(load):
    text = """\
sglang:flashsample_rows_total{model_name="m",path="fused",reason="",tp_rank="0"} 90.0
sglang:flashsample_rows_total{model_name="m",path="native",reason="top_logprobs",tp_rank="0"} 6.0
sglang:flashsample_rows_total{model_name="m",path="native",reason="top_logprobs",tp_rank="1"} 4.0
sglang:flashsample_active{model_name="m",tp_rank="0"} 1.0
"""
    server = types.SimpleNamespace(metrics_seconds=0.0, generate=lambda **fields: None, metrics=lambda: text)
    assert load("servers").counters_of(server) == {"fused": 90.0, "native top_logprobs": 10.0, "active": 1.0}
