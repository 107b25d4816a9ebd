"""The programs of tests/proof: each runs without a GPU, counts what is wrong, and notices what is planted."""

from __future__ import annotations

import ast
import asyncio
import ctypes
import dataclasses
import functools
import importlib
import json
import math
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import random_rows, spelled_out
from lab import fork_server
from serving import needs_sglang

from sgl_flashsample import SampleOutput
from sgl_flashsample.kernels.reference import philox4x32_ref
from sgl_flashsample.kernels.top_logprobs import TopLogprobs

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "proof"
MODULES = {path.stem for folder in (FOLDER, ROOT / "benchmarks") for path in folder.glob("*.py")}

ENV = {"device": "cpu", "date": "2026-01-02", "command": "python tests/proof/x.py"}

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is interpreted")


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], types.ModuleType]]:
    """Imports a program. Other modules of these names are put aside meanwhile."""
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in MODULES}
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path[:] = path
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(others)


@pytest.fixture
def dry_run(tmp_path) -> Callable[..., dict]:
    """Runs a program with ``--dry-run``; returns what it wrote."""

    def run(program: str, *arguments: str) -> dict:
        out = tmp_path / "out.json"
        command = [sys.executable, str(FOLDER / f"{program}.py"), "--dry-run", "--out", str(out), *arguments]
        done = fork_server.run(command)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(out.read_text())

    return run


@no_gpu
@pytest.mark.parametrize("reverse", [False, True])
def test_testu01_gets_the_upper_and_the_lower_word_of_each_draw_in_the_order_of_the_stream(load, reverse):
    pytest.importorskip("numba")
    noise = load("noise")
    generator = noise.Generator(noise.ORDERS["seeds"], reverse=reverse)
    bits = ctypes.CFUNCTYPE(ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)(generator.bits)
    uniform = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p)(generator.uniform)
    got = [bits(generator.param, generator.state) for _ in range(noise.NUMBERS_OF_CHUNK + 2)]
    got.append(int(uniform(generator.param, generator.state) * 2**32))
    seeds = torch.arange(noise.CHUNK + 2)
    same = [torch.full_like(seeds, value) for value in (5, 7, 0, noise.GROUP)]
    words = torch.stack(philox4x32_ref(same, [seeds, torch.zeros_like(seeds)])[:2], 1).flatten().tolist()
    assert got == [int(f"{word:032b}"[::-1], 2) if reverse else word for word in words[: len(got)]]
    assert generator.chunks == 2


@no_gpu
def test_a_p_value_has_failed_or_is_suspect_on_either_side(load):
    pytest.importorskip("numba")
    verdict = load("noise").verdict
    assert [verdict(p) for p in (0.0, 1e-11, 1 - 1e-11, 1.0)] == ["FAILED"] * 4
    assert [verdict(p) for p in (1e-9, 0.0009, 0.9991)] == ["suspect"] * 3
    assert [verdict(p) for p in (0.0011, 0.5, 0.9989)] == [None] * 3


def generated(tokens: list[int], end: str = "length", **about: object) -> dict:
    """An answer of /generate with status 200."""
    about |= {"finish_reason": {"type": end, "length": len(tokens)}, "completion_tokens": len(tokens)}
    return {"text": "a" * len(tokens), "output_ids": tokens, "meta_info": about}


def differing(load, stock: dict, ours: dict, params: dict, streams: bool = False, statuses=(200, 200)) -> list[str]:
    fuzz = load("fuzz")
    bodies = [json.dumps(answer) for answer in (stock, ours)]
    if streams:
        bodies = [f"data: {body}\n\ndata: [DONE]\n\n" for body in bodies]
    answers = [fuzz.Answer.of(status, body, streams) for status, body in zip(statuses, bodies, strict=True)]
    request = fuzz.Request(0, "usual", "/generate", b"", (params,), streams=streams)
    return fuzz.differences(*answers, request)


@pytest.mark.parametrize("streams", [False, True])
def test_what_differs_between_two_servers_is_found_and_what_a_draw_decides_is_not(load, streams):
    """With a greedy request, with one whose number of tokens is known, and with one that may end at any token."""
    greedy, counted, free = {"temperature": 0}, {"ignore_eos": True}, {}
    logprobs = {"output_token_logprobs": [[-1.0, 5, None]]}
    cases = [
        (generated([5]), generated([6]), greedy, "ids"),
        (generated([5]), generated([6]), counted, None),
        (generated([5]), generated([5, 6]), counted, "tokens"),
        (generated([5]), generated([5, 6], "stop"), free, None),
        (generated([5]), generated([5], "abort"), free, "end"),
        (generated([5], "abort"), generated([6], "abort"), greedy, None),
        (generated([5]), generated([1024]), free, "no id"),
        (generated([5], **logprobs), generated([5]), free, "fields"),
        (generated([5], **logprobs), generated([5], output_token_logprobs=[]), free, "logprobs"),
        (generated([5], **logprobs), generated([5], output_token_logprobs=[[None, 5, None]]), free, "logprobs"),
        (generated([5]), {"error": {"message": "no"}}, free, "message"),
    ]
    for stock, ours, params, words in cases:
        different = differing(load, stock, ours, params, streams)
        assert any(words in one for one in different) if words else not different, (params, different)
        assert not differing(load, stock, stock, params, streams)
    assert differing(load, generated([5]), generated([5]), free, streams, statuses=(200, 500))


@pytest.mark.parametrize(
    "ours, gap, different, near_ties",
    [
        (generated([5, 7]), 1e-6, 0, 1),
        (generated([5, 7]), 1.0, 1, 0),
        (generated([5, 7, 8]), 1e-6, 0, 1),
        (generated([5, 7]) | {"extra": 1}, 1e-6, 1, 1),
        (generated([5, 6]) | {"text": "b"}, 1e-6, 1, 0),
        (generated([5, 6], "stop"), 1e-6, 1, 0),
    ],
    ids=["a tie", "no tie", "a tie, then longer", "a tie and another field", "another text", "another end"],
)
def test_a_near_tie_excuses_what_follows_from_another_token_and_nothing_else(load, ours, gap, different, near_ties):
    fuzz = load("fuzz")

    class Fuzz(fuzz.Fuzz):
        async def both(self, request):
            return {"stock": fuzz.Answer(200, generated([5, 6])), "ours": fuzz.Answer(200, ours)}

        async def post(self, side, path, body, streams=False):
            entry = [[-1.0, 6, None], [-1.0 - gap, 7, None]]
            return fuzz.Answer(200, generated([5, 6], output_token_ids_logprobs=[entry, entry]))

    run = Fuzz({}, None, None)
    params = {"temperature": 0}
    body = json.dumps({"sampling_params": params}).encode()
    asyncio.run(run.one(fuzz.Request(0, "usual", "/generate", body, (params,))))
    assert (run.different, run.near_ties) == (different, near_ties)


def test_top_logprobs_are_not_counted_where_tokens_of_the_same_text_share_an_entry(load, monkeypatch):
    fuzz, top = load("fuzz"), [{"a": -1.0}, {"a": -1.0, "b": -2.0}]
    rows = [{"text": "a", "logprobs": {"tokens": ["a"], "top_logprobs": [each]}} for each in top]
    rows += [{"logprobs": {"content": [{"token": "a", "top_logprobs": list(each)}]}} for each in top]
    for by_text in (False, True):
        monkeypatch.setattr(fuzz, "TOP_BY_TEXT", by_text)
        shapes = [fuzz.logprob_shapes(row) for row in rows]
        assert (shapes[0] == shapes[1]) == (shapes[2] == shapes[3]) == by_text


def test_requests_are_the_same_each_time_of_every_kind_and_ask_for_nothing_that_is_excluded(load):
    fuzz = load("fuzz")
    made = [fuzz.make_request(3, number) for number in range(3000)]
    assert made == [fuzz.make_request(3, number) for number in range(3000)]
    assert made != [fuzz.make_request(4, number) for number in range(3000)]
    assert {request.kind for request in made} == set(fuzz.KINDS)
    assert {request.path for request in made} == set(fuzz.ENDPOINTS)
    assert sum(request.certain for request in made) > 300 < sum(request.leave is not None for request in made) + 200
    excluded = [
        {"top_k": 2**31},
        {"logit_bias": [1]},
        {"regex": [1]},
        {"min_new_tokens": 1, "regex": "a"},
        {"min_new_tokens": 1, "stop_token_ids": list(fuzz.IDS)},
        {"min_tokens": 1, "temperature": 1e308},
        {"stop_token_ids": [fuzz.VOCAB]},
        {"skip_special_tokens": "x"},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": None},
    ]
    assert all(
        fuzz.unfit({"sampling_params": params}) and fuzz.unfit({"sampling_params": [{}, params]}) for params in excluded
    )
    fields = [{"top_logprobs_num": fuzz.VOCAB + 1}, {"logprob_start_len": -2}, {"token_ids_logprob": ["x"]}]
    assert all(fuzz.unfit({"sampling_params": {}} | one) for one in fields)
    assert not fuzz.unfit({"sampling_params": {"top_k": 5}, "top_logprobs_num": 2})


def test_what_ends_one_release_alone_is_excluded_there(load, monkeypatch):
    fuzz = load("fuzz")
    bodies = ({"sampling_params": {"regex": "a"}}, {"sampling_params": {}, "token_ids_logprob": [1]})
    monkeypatch.setattr(fuzz, "EXCLUDED", {})
    assert not any(map(fuzz.unfit, bodies))
    monkeypatch.setattr(fuzz, "EXCLUDED", fuzz.EXCLUDED_IN["0.5.17"])
    assert all(map(fuzz.unfit, bodies)) and not fuzz.unfit({"sampling_params": {"regex": ""}})


@no_gpu
@needs_sglang
@pytest.mark.server
@pytest.mark.full
def test_two_servers_answer_random_requests_alike(tmp_path):
    out = tmp_path / "out.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(FOLDER / "fuzz.py"), "--out", str(out), "--requests", "300", "--seed", "1"]
    done = fork_server.run(command, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["requests"] == sum(result["kinds"].values()) == 300 and result["counters"]["active"] == 1
    assert result["counters"]["fused"] > 100 and not result["ended"] and not result["failures"]


def test_coverage_counts_what_no_test_takes_and_what_is_left_out_by_its_reason(load):
    script = load("host_coverage")
    counts = {"num_statements": 9, "missing_lines": 1, "num_branches": 8, "missing_branches": 2}
    about = {"summary": counts, "missing_lines": [4], "missing_branches": [[2, 4], [7, -1]]}
    whole = {"summary": dict.fromkeys(counts, 0), "missing_lines": [], "missing_branches": []}
    row, complete = script.rows_of({"files": {"a.py": about, "b.py": whole}})
    assert (row["module"], row["percent"], row["missing"]) == ("a.py", 75.0, ["4", "2->4", "7->-1"])
    assert complete["percent"] == 100.0 and "missing" not in complete
    texts = ["if a:  # coverage: needs a GPU\n", "if b:  # coverage: else needs a GPU\nx = 1  # coverage: needs more\n"]
    assert script.excluded(texts) == {"a GPU": 2, "more": 1}


def test_reports_of_a_sanitizer_and_outcomes_of_its_tests_are_counted(load, tmp_path, monkeypatch):
    """Here the tool is a script that runs nothing: it reports an access, and that one test of two has passed."""
    module, out, tool = load("sanitized"), tmp_path / "out.json", tmp_path / "compute-sanitizer"
    report = "========= Invalid __global__ read of size 4 bytes\\n=========     at %s+0x40 in file.py:3\\n"
    cases = '<testcase/><testcase><skipped/></testcase><testcase name="b"><failure message="no memory"/></testcase>'
    cases = f"<testsuite>{cases}</testsuite>"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$*" in *pytest*) name=kernel;; *) name=defect;; esac\n'
        f"printf '{report}========= ERROR SUMMARY: 1 error\\n' $name > \"$4\"\n"
        f"for word; do case $word in --junitxml=*) echo '{cases}' > \"${{word#*=}}\";; esac; done\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(module, "select", lambda expression: ["a", "b"])
    monkeypatch.setattr(sys, "argv", ["sanitized.py", "--out", str(out), "--tools", "memcheck"])
    assert module.main() == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert row["reports"] == {"Invalid __global__ read of size 4 bytes in kernel": 1}
    assert row["planted_noticed"] and row["tests"] == 2
    assert row["outcomes"] == {"passed": 1, "skipped": 1, "failure": 1} and row["failures"] == {"b": "no memory"}
    assert row["reported_among"] == ["a, b"]
    row["outcomes"].pop("failure")
    assert module.wrong(row) and not module.wrong(row | {"reports": {}})
    assert module.wrong(row | {"reports": {}, "planted_noticed": False})
    assert module.wrong(row | {"reports": {}, "outcomes": {"failure": 1}})


@no_gpu
@pytest.mark.full
def test_verified_drafts_of_every_shape_are_counted(dry_run, load):
    draws, rows = load("draws"), dry_run("draws", "verified")["rows"]
    assert {(row["shape"], row["drafts"]) for row in rows} == {case[:2] for case in draws.verified_cases()}
    (certain,) = [row for row in rows if row["accepted_z"] is None]
    assert certain["drafts"] == "the target's" and certain["rejected"] == 0, "all are accepted"


def test_the_law_of_verified_tokens_is_one_test_of_what_follows_each_token(load):
    verified, generator = load("draws"), torch.Generator().manual_seed(3)
    target, _ = verified.make_languages()
    p, hotter = (target.distribution(temperature).numpy() for temperature in (1.0, 1.01))
    counts = torch.stack([torch.bincount(row, minlength=verified.VOCAB) for row in torch.multinomial(
        torch.from_numpy(p), 160_000, replacement=True, generator=generator)]).numpy()  # fmt: skip
    counts[0] = 0  # a token that nothing followed
    assert verified.p_value(counts, p) > 1e-3
    assert verified.p_value(counts, hotter) < verified.LEAST_P


def test_what_is_wrong_with_verified_drafts_is_told(load):
    is_wrong, right = load("draws").is_wrong_verified, {"p_value": 0.3, "accepted_z": -2.0, "different": 0}
    right |= {"noticed_law": True, "noticed_tokens": 5}
    assert not is_wrong(right, planted=True) and not is_wrong(right | {"noticed_law": False}, planted=False)
    for wrong in (
        {"p_value": 1e-6},
        {"accepted_z": 5.1},
        {"accepted_z": -5.1},
        {"accepted_z": None, "rejected": 1},
        {"different": 1},
        {"noticed_law": False},
        {"noticed_tokens": 0},
    ):
        assert is_wrong(right | wrong, planted=True), wrong


@no_gpu
@pytest.mark.full
def test_every_path_is_compared_interpreted(dry_run):
    rows = dry_run("draws", "determinism", "--only", "rows", "tables", "shards")["rows"]
    assert {row["section"] for row in rows} == {"rows", "tables", "shards"}
    assert {row["path"] for row in rows} == {"fused", "screened", "logits", "reader"}
    assert not any(row["different"] for row in rows)
    assert all(row["planted_noticed"] > 0 for row in rows if "planted_noticed" in row)


@no_gpu
@pytest.mark.full
def test_every_section_of_exact_tokens_and_every_path_is_counted(dry_run, load):
    counted = dry_run("draws", "exact")["rows"]
    both = [(section, path) for section in ("legal", "forbidden") for path in ("logits", "fused")]
    assert {(row["section"], row["path"]) for row in counted} == {
        *both,
        *((section, "logits") for section in ("reference", "hostile", "temperatures")),
        *(("heads", path) for path in ("quantised", "fused", "screened")),
        *(("logprobs", path) for path in ("logits", "prompts", "fused", "ranks")),
    }
    assert {row["section"] for row in counted} == set(load("draws").PROGRAMS["exact"].sections)


@no_gpu
def test_rows_of_other_sections_are_kept_and_those_that_are_counted_again_are_not(dry_run, load, tmp_path):
    about = {"path": "cpu", "planted_noticed": 1}
    rows = [about | {"section": "legal", "first": 7}, about | {"section": "hostile", "path": "logits", "rows": 0}]
    (tmp_path / "out.json").write_text(json.dumps({"env": ENV, "runs": [ENV], "rows": rows}))
    result = dry_run("draws", "exact", "--only", "hostile", "--keep")
    assert result["rows"][0] == rows[0] and result["rows"][1]["rows"] > 0 and len(result["rows"]) == 2
    assert result["runs"][0]["command"] == ENV["command"] and len(result["runs"]) == 2
    draws = load("draws")
    both = [{"section": "rows", "on": place} for place in ("a GPU", draws.WHERE)]
    assert [draws.is_kept(row, ["rows"]) for row in both] == [True, False]


def test_a_token_that_differs_where_the_reference_is_certain_is_counted(load, monkeypatch):
    draws = load("draws")
    case = spelled_out([place / 64 for place in range(40)], 4, torch.device("cpu"))
    want = draws.from_logits(case)
    count = draws.Count("rows", "cpu", "plain", "alone")
    count.add(want, want, case)
    assert (count.tokens, count.different) == (4, 0)
    other = want.clone()
    other[2] = (want[2] + 1) % 40
    count.add(other, want, case)
    assert (count.tokens, count.different, count.near_ties) == (8, 1, 0)
    tie = types.SimpleNamespace(near_tie=torch.ones(1, dtype=torch.bool))
    monkeypatch.setattr(draws, "expected", lambda case: tie)
    count.add(other, want, case)
    assert (count.tokens, count.different, count.near_ties) == (12, 1, 1)


@no_gpu
def test_evidence_that_is_looked_at_again_and_again_is_rarely_wrong_and_grows_where_draws_are(load):
    stats, random = load("stats"), np.random.default_rng(1)
    p = np.array([0.5, 0.3, 0.15, 0.05])
    one, two = stats.log_e_value(np.eye(4)[1], p), stats.log_e_value(2 * np.eye(4)[1], p)
    later = [(c * p[1] + 1) / (c + 1) for c in stats.CONCENTRATIONS]  # the chance of the second draw, after the first
    assert abs(one) < 1e-7 and abs(two - np.log(np.mean(later) / p[1])) < 1e-7
    looks = random.multinomial(500, p, size=(400, 20)).cumsum(1)
    reached = sum(max(stats.log_e_value(counts, p) for counts in of_run) >= np.log(20) for of_run in looks)
    assert reached <= 35, "of 400, 20 at most are expected: 35 has a chance below 1e-3, and the seed is fixed"
    soak = load("draws")
    other = soak.at_distance(p, soak.TVD)
    assert abs(np.abs(other - p).sum() / 2 - soak.TVD) < 1e-12 and abs(other.sum() - 1) < 1e-12
    evidence = [stats.log_e_value(random.multinomial(30_000_000, other), p) for _ in range(20)]
    assert min(evidence) > -np.log(soak.ALPHA)
    assert stats.log_e_value(np.array([5, 0, 0, 1]), np.array([0.5, 0.3, 0.2, 0.0])) == float("inf")


def tokens_alone(tokens: torch.Tensor) -> SampleOutput:
    return SampleOutput(tokens, None, torch.zeros(len(tokens)), None)


@no_gpu
@pytest.mark.parametrize("wrong", [False, True])
def test_a_soak_ends_with_1_where_draws_have_another_law(load, monkeypatch, tmp_path, wrong):
    draws, out = load("draws"), tmp_path / "soak.json"
    chance = np.random.default_rng(0)

    def drawn(path, rows):
        laws = [draws.distribution(row) for row in draws.oracle_rows(rows)]
        may = draws.legal_ids(rows).numpy()
        laws = [may[row] / may[row].sum() if law is None else law for row, law in enumerate(laws)]
        laws = [draws.at_distance(law, 0.1) if wrong and law.max() < 1 else law for law in laws]
        return lambda positions: tokens_alone(
            torch.from_numpy(np.concatenate([chance.choice(len(law), draws.SOAK_AT_ONCE, p=law) for law in laws]))
        )

    monkeypatch.setattr(draws.DrawPath, "drawn", drawn)
    monkeypatch.setattr(draws, "PATHS", {"cpu": draws.PATHS["cpu"]})
    monkeypatch.setattr(draws, "HOST", True)
    monkeypatch.setattr(draws, "SOAK_BATCHES", 1)
    monkeypatch.setattr(draws, "CALLS", 1000)  # enough to notice what is planted, however slow the machine is
    monkeypatch.setitem(draws.MIXES, "legal", dataclasses.replace(draws.LEGAL, most_ids=20))
    monkeypatch.setattr(sys, "argv", ["draws.py", "soak", "--out", str(out), "--scale", "1e-6"])
    assert draws.main() == int(wrong)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["draws_per_row"] >= draws.CALLS * draws.SOAK_AT_ONCE and 0 < row["rows"] <= draws.SOAK_ROWS
    assert (row["most_log_evidence"] >= -np.log(draws.ALPHA)) == wrong and row["powerful"] == 0
    assert row["noticed"] > 0
    soak = draws.Soak("cpu", 0)
    soak.draw = lambda positions: tokens_alone(torch.tensor([-1]).repeat(draws.SOAK_ROWS * draws.SOAK_AT_ONCE))
    soak.go_on()
    assert soak.evidence() == float("inf"), "no id is an id that cannot be drawn"


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_illegal_token_is_counted_and_a_legal_one_is_not(load, at_once):
    draws, each = load("draws"), torch.ones(8, dtype=torch.bool)
    rows = random_rows(draws.LEGAL, at_once, 8, torch.device("cpu"))
    path, may = draws.DrawPath("logits", 8, at_once), draws.legal_ids(rows)
    assert not may.all() and may.any(1).all()
    draw, positions = functools.cache(path.drawn(rows)), range(2 * at_once)
    assert draws.count_wrong(draw, positions, at_once, may, each) == (0, 0)
    assert draws.count_wrong(draw, positions, at_once, ~may, each) == (len(positions) * 8, 0)
    no_id = tokens_alone(torch.full((8 * at_once,), may.shape[1]))
    assert draws.count_wrong(lambda positions: no_id, positions, at_once, may, each) == (len(positions) * 8, 0)
    from_head = path._replace(name="fused").drawn(rows)
    assert torch.equal(from_head(range(at_once)).token_ids, draw(range(at_once)).token_ids)


def test_a_call_draws_each_row_at_each_of_its_positions(load):
    draws = load("draws")
    rows = random_rows(draws.LEGAL, 5, 8, torch.device("cpu"))
    one, three = (draws.DrawPath("logits", 8, at_once).drawn(rows) for at_once in (1, 3))
    tokens = [one(range(place, place + 1)).token_ids for place in range(3)]
    assert torch.equal(three(range(3)).token_ids.view(8, 3), torch.stack(tokens, 1))


def test_a_forbidden_token_and_a_logprob_above_0_or_no_number_are_counted(load):
    """Except the logprobs of a row that has no token."""
    draws, path = load("draws"), load("draws").DrawPath("logits", 8, 2)
    rows = random_rows(draws.MIXES["forbidden"], 7, 8, torch.device("cpu"))
    draw, may, has_token = functools.cache(path.drawn(rows, return_logprob=True)), rows.may, rows.may.any(1)
    assert has_token.sum() == 7
    may[:, 0] |= ~has_token
    assert draws.count_wrong(draw, range(4), 2, may, has_token) == (0, 0)
    assert draws.count_wrong(draw, range(4), 2, ~may, has_token) == (4 * 8, 0)
    for logprob in (1e-30, math.nan):
        above = draw(range(2))._replace(logprobs=torch.full((16,), logprob))
        assert draws.count_wrong(lambda positions, drawn=above: drawn, range(4), 2, may, has_token) == (0, 4 * 7)


def test_forbidden_tokens_and_bad_logprobs_are_counted_and_what_is_planted_is_noticed(load, monkeypatch):
    draws = load("draws")
    monkeypatch.setitem(draws.PATHS, "logits", draws.DrawPath("logits", 8, 1))
    monkeypatch.setattr(draws, "POSITIONS", 2)
    counted = draws.count_exact("forbidden", "logits", draws.Part(0, 1), 10)
    assert counted == {"draws": 16, "illegal": 0, "bad_logprobs": 0, "planted_noticed": counted["planted_noticed"]}
    assert counted["planted_noticed"] >= 8


def test_what_a_verification_may_draw_has_no_min_p_and_takes_top_p_of_what_top_k_has_left(load, monkeypatch, tmp_path):
    """From the second token on: the first is the prefill's."""
    parity = load("parity")
    model = parity.markov.write(tmp_path, parity.markov.SIZES["tiny"])
    plain, verified = (parity.Truth(model, tmp_path, of_drafts) for of_drafts in (False, True))
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()

    def allowed(truth, step: int, *names: str) -> list[int]:
        limits = truth.limits(parity.Cell(names), step, 1)
        return parity.allowed_ref(logits, torch.ones(1), *limits)[0].nonzero().flatten().tolist()

    for name, value in (("top_k", 2), ("top_p", 0.55), ("min_p", 0.6)):
        monkeypatch.setitem(parity.FEATURES, name, ({name: value}, {}))
    assert allowed(plain, 1, "top_k", "top_p") == [0, 1] == allowed(verified, 0, "top_k", "top_p")
    assert allowed(verified, 1, "top_k", "top_p") == [0], ".4 of .7 is more than .55"
    assert allowed(plain, 1, "min_p") == [0, 1] == allowed(verified, 0, "min_p")
    assert allowed(verified, 1, "min_p") == [0, 1, 2, 3]
    names = {name for cell in parity.VERIFIED_CELLS for name in cell.names}
    assert "top_logprobs" in names and "presence" not in names


def test_processes_count_as_many_tokens_as_one_each_batch_once(load, monkeypatch):
    draws, made = load("draws"), []

    def noted(mix, index, *about):
        made.append(index)
        return random_rows(mix, index, *about)

    monkeypatch.setattr(draws, "random_rows", noted)
    monkeypatch.setattr(draws, "POSITIONS", 2)
    monkeypatch.setitem(draws.PATHS, "logits", draws.DrawPath("logits", 4, 1))
    parts = [draws.count_exact("legal", "logits", draws.Part(number, 3), 4 * 2 * 6, 5) for number in range(3)]
    assert [part["draws"] for part in parts] == [16] * 3
    assert made == [5, 8, 6, 9, 7, 10]


@pytest.mark.parametrize(
    "section, path",
    [
        ("reference", "logits"),
        ("temperatures", "logits"),
        ("heads", "fused"),
        ("heads", "screened"),
        ("heads", "quantised"),
    ],
)
def test_a_token_of_another_position_is_counted_and_the_references_is_not(load, monkeypatch, section, path):
    draws, whole = load("draws"), load("draws").Part(0, 1)
    monkeypatch.setattr(draws, "NUM_ROWS", 64)
    monkeypatch.setattr(draws, "HEAD_ROWS", dict.fromkeys(draws.HEAD_ROWS, 64))
    monkeypatch.setitem(draws.MIXES, section, dataclasses.replace(draws.MIXES[section], most_ids=50))
    row = draws.count_exact(section, path, whole, 60)
    assert (row["rows"], row["different"]) == (64, 0) and row["planted_noticed"] > 5
    right = draws.drawn_by

    def of_the_next_position(path, rows):
        return rows, right(path, dataclasses.replace(rows, params=draws.later(rows.params)))[1]

    monkeypatch.setattr(draws, "drawn_by", of_the_next_position)
    assert draws.count_exact(section, path, whole, 60)["different"] > 5


def test_rows_of_any_temperature_are_sampled_with_limits_from_1e_6_to_1e4(load):
    params = random_rows(load("draws").MIXES["temperatures"], 0, 256, torch.device("cpu")).params
    powers, limits = params.temperature.log10(), params.truncation
    assert powers.min() > -6.01 and powers.max() < 4.01 and powers.histc(10, -6, 4).min() > 5
    assert ((limits.top_k > 0) | (limits.top_p < 1) | (limits.min_p > 0)).all()


def test_every_pair_of_features_occurs_and_hostile_numbers_are_in_every_second_row(load):
    draws = load("draws")
    rows = random_rows(draws.REFERENCE, 0, 512, torch.device("cpu"))
    params, edits, limits = rows.params, rows.params.edits, rows.params.truncation
    on = [params.temperature == 0, limits.top_k > 0, limits.top_p < 1, limits.min_p > 0, ~rows.allowed.all(1)]
    on += [(edits.additive != 0).any(1), (edits.scaling != 1).any(1), (edits.bias != 0).any(1)]
    counts = torch.stack(on).float() @ torch.stack(on).float().T
    assert counts.min() > 10 and not torch.stack(on).all(1).any()
    same = (draws.planted(rows, 0).logits == rows.logits).all(1)
    assert same[1::2].all() and not same[::2].any()
    assert {random_rows(draws.REFERENCE, index, 2, torch.device("cpu")).logits.dtype for index in range(3)} == set(
        draws.REFERENCE.dtypes
    )


# --- logprobs


def tiny(load, most_ids: int = 150) -> tuple:
    return (load("logprobs").Vocabulary(most_ids // 2, most_ids, 5, 1.0),)


def test_every_way_to_logprobs_has_those_of_float64_and_notices_what_is_planted(load):
    """Batches of each dtype, at the temperature of the draw and at 1."""
    logprobs, cpu = load("logprobs"), torch.device("cpu")
    indices = logprobs.shapes_once(tiny(load))[:4]
    shapes = [logprobs.shape_of(index, tiny(load)) for index in indices]
    assert len({shape.dtype for shape in shapes}) == 3 and len({shape.original for shape in shapes}) == 2
    counted = logprobs.count_logprobs(indices, cpu, tiny(load))
    assert set(counted) == {"logits", "prompts", "fused", "ranks"}
    for counts in counted.values():
        assert counts["rows"] == 20 and counts["planted_noticed"] > 0
        assert counts["wrong_ids"] == counts["wrong_values"] == 0 < counts["max_error"] <= logprobs.MOST_ERROR


def test_host_memory_has_the_logprobs_of_float64(load, monkeypatch):
    pytest.importorskip("numba")
    logprobs = load("logprobs")
    for module in ("head", "logprobs", "paths"):
        monkeypatch.setattr(f"sgl_flashsample.{module}.draws_in_host_memory", lambda device: True)
    monkeypatch.setattr(logprobs, "draws_in_host_memory", lambda device: True)
    monkeypatch.setattr(logprobs, "MIX", dataclasses.replace(logprobs.MIX, powers=(-2.0, 1.5)))
    counted = logprobs.count_logprobs(logprobs.shapes_once(tiny(load, 2000)), torch.device("cpu"), tiny(load, 2000))
    assert set(counted) == {"cpu", "cpu, prompts"}
    for counts in counted.values():
        assert counts["wrong_ids"] == counts["wrong_values"] == 0 < counts["planted_noticed"]


def test_another_id_another_value_and_anything_behind_a_count_are_counted_and_near_ties_are_not_wrong(load):
    logprobs = load("logprobs")
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0 + 1e-7, -1.0]], dtype=torch.float64)
    truth, low = logprobs.Truth(logits, 5), logprobs.LOWEST_LOGPROB
    of_all = torch.log_softmax(logits, -1)[0].float().tolist()

    def counted(ids: list[int], behind: tuple = (-1, low, -math.inf), **changed: float) -> dict[str, float]:
        values = [of_all[one] for one in ids]
        values[0] += changed.get("value", 0.0)
        columns = [*ids, behind[0]], [*values, behind[1]], [*logits[0, ids].tolist(), behind[2]]
        top = TopLogprobs(*(torch.tensor([column]) for column in columns), None)
        given = torch.tensor([[of_all[5] + changed.get("given", 0.0), low]])
        token = torch.tensor([of_all[2] + changed.get("token", 0.0)])
        wanted = logprobs.WantedLogprobs(5, torch.tensor([4]), torch.tensor([[5, 6]]))
        way = logprobs.Way("x", logprobs.Logprobs(token, top, given), torch.tensor([2]), wanted, None)
        counts = logprobs.compare(way, truth)
        assert counts["rows"] == 1 and counts["values"] == 1 + 2 + 4
        assert counts["unequal"] == (2 in ids and "token" in changed)
        return {name: counts[name] for name in ("near_ties", "wrong_ids", "wrong_values")}

    right = {"near_ties": 0, "wrong_ids": 0, "wrong_values": 0}
    assert counted([1, 2, 4, 3]) == right
    assert counted([1, 2, 3, 4]) == right | {"near_ties": 1}
    for ids in ([2, 1, 4, 3], [1, 2, 4, 0], [1, 2, 4, 4], [1, 1, 4, 3]):
        assert counted(ids)["wrong_ids"] == 1, ids
    for behind in ((0, low, -math.inf), (-1, -3.0, -math.inf), (-1, low, 0.0)):
        assert counted([1, 2, 4, 3], behind) == right | {"wrong_ids": 1}
    for name in ("value", "given", "token"):
        assert counted([1, 2, 4, 3], **{name: 1.9e-5}) == right
        for error in (2.2e-5, -2.2e-5, math.nan, 9.0):
            assert counted([1, 2, 4, 3], **{name: error}) == right | {"wrong_values": 1}
    above = logprobs.error_of(torch.tensor([1e-9, 0.0, -100.0]), torch.tensor([0.0, 0.0, -100.00003]).double())
    assert above.tolist() == [math.inf, 0.0, pytest.approx(1.5e-5, rel=0.2)]


def test_the_largest_error_of_all_parts_is_kept_and_counts_are_added(load):
    logprobs, totals = load("logprobs"), Counter(rows=3, max_error=2.0)
    logprobs.add(totals, Counter(rows=4, max_error=1.0))
    logprobs.add(totals, Counter(rows=1))
    assert totals == {"rows": 8, "max_error": 2.0}


def test_batches_have_every_size_and_dtype_and_each_of_them_every_width(load):
    logprobs = load("logprobs")
    shapes = [logprobs.shape_of(index, logprobs.VOCABULARIES) for index in range(300)]
    assert len(set(shapes)) == 30 == len(logprobs.shapes_once(logprobs.VOCABULARIES))
    for field in ("vocabulary", "dtype"):
        assert len({(getattr(shape, field), shape.width) for shape in shapes}) == 3 * len(
            {getattr(shape, field) for shape in shapes}
        )
    rows = [shape.vocabulary.rows for shape in shapes]
    assert sum(rows) / len(rows) * 15 / 16 > logprobs.MEAN_ROWS, "batches have up to an eighth fewer"


# --- the page


def test_the_page_says_what_the_result_files_say(load):
    summary = load("summary")
    page = summary.PAGE.read_text()
    assert summary.filled(page) == page, "run `python tests/proof/summary.py --write`"
    assert all(f"<!-- results:{name} -->" in page for name in summary.SECTIONS)


def test_every_result_file_is_read_by_a_goal(load):
    summary = load("summary")
    files = {goal.file for group in summary.GOALS.values() for goal in group}
    assert {file.stem for file in (FOLDER / "results").glob("*.json")} <= files


def test_a_marker_of_no_section_and_a_file_that_is_no_result_are_refused(load, tmp_path):
    summary = load("summary")
    with pytest.raises(ValueError, match="results:other is no section; there are goals, features"):
        summary.filled("<!-- results:other -->\n<!-- end -->")
    (tmp_path / "exact.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"exact\.json is no result: KeyError: 'env'"):
        summary.read("exact", [tmp_path])


def test_a_program_imports_first_what_finds_the_modules_of_the_others():
    """Here ``lab`` is on the path already."""
    elsewhere = {"lab", *(path.stem for path in (ROOT / "tests").glob("*.py"))} | MODULES - {
        path.stem for path in FOLDER.glob("*.py")
    }
    for file in FOLDER.glob("*.py"):
        imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom | ast.Import)]
        names = [getattr(node, "module", None) or node.names[0].name for node in imports]
        found = [name for name in names if name == "programs" or name.partition(".")[0] in elsewhere]
        assert "programs" not in found or found[0] == "programs", file


@pytest.mark.parametrize("fault", [None, "token", "logprob", "path", "unnoticed", "no start"])
def test_answers_of_an_architecture_are_compared_with_stocks(load, tmp_path, monkeypatch, fault, capsys):
    families = load("families")

    class Answering:
        """Answers of weights of this seed, with one fault in those of ours."""

        start = wait_until_ready = stop = lambda self: None

        def __init__(self, side: str, seed: int) -> None:
            self.seed, self.faulty = seed, side == "ours" and seed == 3

        def generate(self, *, input_ids, sampling_params, **fields):
            assert len(input_ids) == len(sampling_params) == len(families.PROMPTS)
            answers = [
                {
                    "output_ids": [self.seed if fault != "unnoticed" else 0] * params["max_new_tokens"],
                    "meta_info": {
                        "input_token_logprobs": [[None, 5, None], [-2.0, 6, None]],
                        "output_token_logprobs": [[-1.0, 7, None]] * params["max_new_tokens"],
                        "flashsample_path": ["fused"] * params["max_new_tokens"],
                    },
                }
                for params in sampling_params
            ]
            if self.faulty and fault == "token":
                answers[1]["output_ids"][2] += 1
            if self.faulty and fault == "logprob":
                answers[1]["meta_info"]["input_token_logprobs"][1][0] += 1e-4
            if self.faulty and fault == "path" and not fields:
                answers[1]["meta_info"]["flashsample_path"][0] = "native: penalties"
            return answers

    def make_server(folder, architecture, side, seed):
        if fault == "no start" and architecture == "OlmoForCausalLM":
            raise families.NotServedError("the server ended")
        return Answering(side, seed)

    monkeypatch.setattr(families, "make_server", make_server)
    monkeypatch.setattr(families, "new_env", dict)
    out = tmp_path / "families.json"
    names = ["PhiForCausalLM", "OlmoForCausalLM"]
    monkeypatch.setattr(sys, "argv", ["families.py", "--out", str(out), "--architectures", *names])
    code, said, result = families.main(), capsys.readouterr().out, json.loads(out.read_text())
    assert code == (fault not in (None, "no start"))
    rows = {(row["architecture"], "planted" in row): row for row in result["rows"]}
    assert list(rows) == [(names[0], False), *([] if fault == "no start" else [(names[1], False)]), (names[0], True)]
    figures = ("answers", "tokens", "different", "apart", "largest_difference", "not_fused")
    tokens = len(families.PROMPTS) * families.GREEDY["max_new_tokens"]
    of_first = [len(families.PROMPTS), tokens, fault == "token", fault == "logprob", 1e-4 * (fault == "logprob")]
    of_first = [*map(float, of_first), float(fault == "path")]
    assert [rows[names[0], False][figure] for figure in figures] == pytest.approx(of_first)
    missing = [{"architecture": names[1], "reason": "the server ended"}] * (fault == "no start")
    assert result["env"]["not_run"] == missing
    assert ("wrong: none" in said) == (fault in (None, "no start", "unnoticed"))
    assert ("unnoticed" in said) == (fault == "unnoticed")
    ((verdict, words, _),) = [
        verdict
        for name, verdict in verdicts(load, tmp_path, {"families": {"rows": result["rows"]}}).items()
        if name.startswith("greedy answers, by architecture")
    ]
    assert verdict == ("missed" if code else "met")
    assert words.endswith(f" of {len(rows) - 1} architectures; {rows[names[0], False]['largest_difference']:.1e}")


def verdicts(load, folder: Path, files: dict[str, dict]) -> dict[str, tuple[str, str, str]]:
    """{goal: verdict, numbers, by how much it is missed} of result files with these data."""
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"env": ENV} | data))
    return {goal.name: tuple(verdict) for goal, verdict in load("summary").verdicts([folder])}


def test_a_missed_goal_is_marked_and_has_its_reason(load, tmp_path):
    summary = load("summary")
    missed = [goal for goal, verdict in summary.verdicts() if verdict.verdict == summary.MISSED]
    assert missed and all(goal.why for goal in missed)
    text = summary.goals()
    lines = [line for line in text.splitlines() if line.startswith("| **missed**: ")]
    assert all(goal.name in line and goal.why in line for goal, line in zip(missed, lines, strict=True))
    assert text.count("missed**") == len(missed) and text.index(lines[-1]) < text.index("### Met")


def test_the_page_is_short(load):
    words = [word for word in load("summary").PAGE.read_text().split() if any(map(str.isalnum, word))]
    assert len(words) <= 1500


def test_features_are_counted_by_the_way_in_which_they_equal_stock(load, tmp_path):
    names = ["greedy", "json", "regex", "a", "b", "c"]
    cells = [[one] for one in names] + [[one, other] for other in names for one in names if one < other]
    rows = [{"features": cell, "result": "exact" if "greedy" in cell else "law"} for cell in cells]
    rows[cells.index(["json", "regex"])]["result"] = "refused"
    env = ENV | {"sglang": "1", "torch": "2", "triton": "3", "date": "d"}
    (tmp_path / "parity.json").write_text(json.dumps({"env": env, "rows": rows}))
    text = load("summary").features([tmp_path])
    assert text.startswith("6 *exact*: all with greedy; 14 *law*; 1 *refused*: json with regex. Features: `greedy`, ")


def test_a_goal_of_counts_is_met_by_enough_of_them_without_a_wrong_one_on_every_path(load, tmp_path):
    enough = {"section": "legal", "path": "logits", "illegal": 0, "draws": 5 * 10**8}
    cpu, fused = ({"path": path, "draws": 10**9} for path in ("cpu", "fused"))

    def judged(*rows: dict) -> tuple[str, str, str]:
        found = verdicts(load, tmp_path, {"exact": {"rows": [enough, enough, *(enough | row for row in rows)]}})
        return found["illegal tokens (cpu, logits, fused)"]

    words = "logits, cpu, fused: 0 of 1,000,000,000; screened: no row"
    assert judged(cpu, fused) == ("met", words, ""), (
        "runs of one path are one count, and equal counts are told together"
    )
    verdict, found, by = judged(cpu | {"draws": 2000}, fused | {"illegal": 3})
    assert verdict == "missed" and by == "fused: 3 of 1,000,000,000; cpu: too few"
    assert found == "logits: 0 of 1,000,000,000; cpu: 0 of 2,000; fused: 3 of 1,000,000,000; screened: no row"
    words = "logits, cpu: 0 of 1,000,000,000; fused, screened: no row"
    assert judged(cpu) == ("missed", words, "fused: no row")
    few = {"draws": 2000}
    assert judged(cpu | few, fused | few)[2] == "cpu, fused: too few"


def test_the_goals_of_logprobs_are_by_path_and_tell_the_largest_error(load, tmp_path):
    row = {"section": "logprobs", "rows": 10**6, "values": 10**8, "wrong_ids": 0, "wrong_values": 0}
    row |= {"max_error": 3e-6, "unequal": 0}
    rows = [row | {"path": path} for path in load("summary").LOGPROB_PATHS]

    def judged(rows: list[dict]) -> list[tuple[str, str, str]]:
        found = verdicts(load, tmp_path, {"exact": {"rows": rows}})
        names = ("rows with all features: other likeliest ids", "logprobs of these rows off by more than 2e-5")
        return [found[next(one for one in found if one.startswith(name))] for name in names]

    ids, values = judged(rows)
    assert ids[0] == values[0] == "met" and ids[1] == "cpu, logits, fused, prompts, ranks: 0 of 1,000,000"
    assert values[1].endswith(", ranks: 0 of 100,000,000; at most 3.0e-06")
    ids, values = judged([*rows[:-1], rows[-1] | {"wrong_ids": 2, "unequal": 5, "wrong_values": 3, "max_error": 0.5}])
    assert (ids[0], ids[2]) == ("missed", "ranks: 7 of 1,000,000")
    assert (values[0], values[2]) == ("missed", "ranks: 3 of 100,000,000")
    assert values[1].endswith("; ranks: 3 of 100,000,000; at most 5.0e-01")
    assert [by for _, _, by in judged(rows[:-1])] == ["ranks: no row"] * 2


def test_the_goal_of_equal_bits_is_met_only_where_another_order_was_noticed(load, tmp_path):
    tile = {"D": 64, "tile": "a", "order": 0, "unequal": 0, "batches": 900}
    halves = {"D": 64, "gemm": "two halves", "order": 1}

    def judged(*rows: dict) -> tuple[str, str, str]:
        found = verdicts(load, tmp_path, {"h200-order": {"rows": [tile, *rows]}})
        return found["bits of a row's logits, in batches of 1 to 512"]

    assert judged(halves) == ("met", "0 of 900", "")
    for rows in [], [halves | {"order": 0}], [halves | {"D": 32}]:
        assert judged(*rows) == ("missed", "0 of 900", "no other order was noticed")
    assert judged(halves, tile | {"unequal": 2})[::2] == ("missed", "2 of 1,800")


def test_a_goal_without_a_result_was_not_run(load, tmp_path):
    none = verdicts(load, tmp_path, {"exact": {"rows": []}})
    assert {verdict for verdict, _, _ in none.values()} == {"not run"}
    text = load("summary").goals([tmp_path])
    assert text.splitlines()[0] == f"0 goals are met, 0 are missed, {len(none)} were not run."
    assert "| PractRand | no failure | TestU01 was run in its place |" in text
    assert "| illegal tokens (cpu, logits, fused) | 0 of 1e9 draws | no result is committed |" in text


def test_a_goal_that_is_no_count_is_missed_by_what_is_wrong(load, tmp_path):
    ended = [{"side": "ours"}, {"number": 7}]
    soaked = {"path": "cpu", "rows": 2, "draws_per_row": 1000, "most_log_evidence": 1.0, "powerful": 1}
    small = {"battery": "SmallCrush", "order": "steps", "p_values": 15, "not_normal": [{"verdict": "suspect"}]}
    crush = small | {"battery": "Crush", "p_values": 144, "not_normal": [{"verdict": "FAILED"}]}
    planted, seeds = small | {"planted": "x", "not_normal": [{"verdict": "FAILED"}]}, small | {"order": "seeds"}
    noise = {"noise": "ours", "steps": 10**7, "equal_pairs": 0}
    errors = {"cpu_not_finite_or_not_below_the_one_before": 1, "cpu_max_absolute_error": 2e-15, "upper_words": 2**32}
    sections = {"streams": [planted, small, seeds], "crush": [crush], "collisions": [noise, noise | {"noise": "vLLM"}]}
    sections |= {"map": [errors]}
    memcheck = {"tool": "memcheck", "tests": 9, "outcomes": {"passed": 4, "failure": 2}}
    memcheck |= {"reports": {"Invalid read in k": 3, "Program hit out of memory": 5}}
    load_row = {
        "backend": "flashsample",
        "model": "m",
        "requests": 10,
        "ends": {"answered": 7, "left": 2, "status 500": 1},
    }
    load_row |= {"memory": [{"host_mib": 2000}], "host_mib_growth": 3.0}
    found = verdicts(
        load,
        tmp_path,
        {
            "http-fuzz": {"requests": 10**5, "different": 2, "failures": ["x"], "ended": ended},
            "soak": {"rows": [soaked, soaked | {"rows": 6, "most_log_evidence": 20.0}]},
            "noise": {"sections": {name: {"rows": rows} for name, rows in sections.items()}},
            "h200-sanitized": {"rows": [memcheck]},
            "h100-load": {"rows": [load_row, load_row | {"backend": "stock", "host_mib_growth": 2.0}]},
            "h200-hot-path": {"rows": [{"steps": 5000, "waits": 1, "allocates": 0, "loads": 2}] * 2},
            "verified": {"rows": [{"different": 0, "positions": 10**7, "p_value": 1e-6}]},
            "parity": {"rows": [{"features": ["greedy"], "result": "exact"}, {"features": ["x"], "result": "wrong"}]},
        },
    )
    missed = {name: by for name, (verdict, _, by) in found.items() if verdict == "missed"}
    assert missed == {
        "random requests that stock SGLang answers in another way": "2 of 100,000; 2 failures of a server",
        "draws of known distributions: log of the most evidence against them, at any time": (
            "cpu: 20.0 of 14.5; cpu: 2 of 8 distributions have this power"  # log(2 / 1e-6): 14.5
        ),
        "largest error of the map in host memory, over all upper words": (
            "2.0e-15; 1 of 4,294,967,296 not finite or out of order"
        ),
        "p-values of TestU01 that fail": "Crush: 1",
        "reports of compute-sanitizer in GPU tests of the kernels": (
            "memcheck: 3 reports, 2 tests failed, 3 tests not run"
        ),
        "requests under load that are not answered": "1 of 10",
        "growth of host memory under load": "it grew",
        "waits for the GPU, allocations and loaded kernels of the sampler's steps": "6 of 10,000",
        "verified drafts: smallest p-value of the tokens' law": "1e-06",
        "features and pairs of features as in stock SGLang": "1 wrong",
    }
    assert found["p-values of TestU01 that fail"][1] == (
        "SmallCrush: 0 of 30, 2 suspect, in 2 orders; Crush: 1 of 144, 0 suspect, in 1 order"
    )
    assert found["growth of host memory under load"][1] == "+3 of 2,000 MiB (stock +2)"
    assert load("summary").SOAK_ALPHA == load("draws").ALPHA


@pytest.mark.parametrize("processes", [1, 2])
def test_results_of_processes_come_in_the_order_of_the_cases(load, processes):
    programs = load("programs")
    assert list(programs.in_processes(divmod, [(7, 2), (9, 4), (8, 3)], processes)) == [(3, 1), (2, 1), (2, 2)]


@no_gpu
def test_logits_of_a_tile_do_not_depend_on_the_batch(dry_run):
    result = dry_run("order")
    tiles = [row for row in result["rows"] if "tile" in row]
    assert [(row["unequal"], row["batches"] > 10) for row in tiles] == [(0, True)] * 2 and result["wrong"] == []
    (one,) = [row for row in result["rows"] if row.get("gemm") == "batch-invariant"]
    assert (one["unequal"], one["masses"]) == (0, 0) and {row["mass_order"] for row in tiles} <= {0, 1}


@no_gpu
def test_a_tile_that_cannot_run_is_noted_and_the_others_are_measured(load, monkeypatch):
    order, not_run = load("order"), []

    def measured(fused, row, known_masses):
        if fused.tile.rows_first:
            raise RuntimeError("out of resource: shared memory")
        return {"unequal": 0, "alone": row}

    monkeypatch.setattr(order, "measured", measured)
    monkeypatch.setattr(order, "other_gemms", lambda head: {})
    rows = [row for row in order.rows_of(48, 128, not_run) if "tile" in row]
    assert [row["tile"]["rows_first"] for row in rows] == [False]
    (missing,) = not_run
    assert "rows_first=True" in missing["tile"] and "shared memory" in missing["reason"]


@no_gpu
def test_another_order_in_another_batch_and_halves_with_the_order_of_a_tile_are_wrong(load):
    rows = [
        {"D": 64, "tile": "a", "order": 0, "unequal": 2},
        {"D": 64, "tile": "b", "order": 1, "unequal": 0},
        {"D": 64, "gemm": "two halves", "order": 1, "unequal": 5},
        {"D": 32, "gemm": "two halves", "order": 1, "unequal": 5},
        {"D": 32, "gemm": "batch-invariant", "order": 0, "unequal": 0, "masses": 3},
        {"D": 16, "tile": "a", "order": 0, "unequal": 0},
    ]
    assert load("order").wrong(rows) == [
        "D 64: 2 batches change logits of a",
        "D 32: 0 batches change logits, 3 masses of a batch-invariant head",
        "D 64: two halves have the order of a tile",
        "D 16: two halves were not computed",
    ]


@no_gpu
def test_errors_of_logprobs_are_counted_beside_those_of_stock(dry_run):
    rows = dry_run("logprob_error")["rows"]
    ours = {row["logits"]: row for row in rows if row["sampler"] == "ours" and row["temperature"] == 1.0}
    assert ours["float32"]["mean"] < 1e-6 < ours["bfloat16"]["mean"] < 1e-3
    assert all(0 < row["ratio_spread"] < 0.1 and row["tokens"] == 8 for row in rows)


@no_gpu
def test_a_larger_error_than_that_of_stock_and_a_logprob_above_zero_are_wrong(load):
    cell = {"temperature": 1.0, "truncation": "none", "path": "fused", "illegal": 0, "mean": 1e-3}
    rows = [
        cell | {"logits": "bfloat16", "sampler": "stock"},
        cell | {"logits": "bfloat16", "sampler": "ours", "mean": 2e-3},
        cell | {"logits": "float32", "sampler": "stock"},
        cell | {"logits": "float32", "sampler": "ours", "illegal": 3},
    ]
    assert load("logprob_error").wrong(rows) == [
        "('bfloat16', 1.0, 'none', 'fused'): the mean error is 0.002; expected 0.0011 at most",
        "('float32', 1.0, 'none', 'fused'): 3 logprobs are above 0, or no number",
    ]
