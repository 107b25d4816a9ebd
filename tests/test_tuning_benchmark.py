"""The benchmark of the tuner: what it says follows from what it is given, over a recorded cost surface."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sgl_flashsample.autotune.names import key_of, label_of
from sgl_flashsample.autotune.plan import EFFORTS, Plan
from sgl_flashsample.kernels.head import LMHead
from sgl_flashsample.kernels.tiles import ScreenConfig
from tuned_tables import H200, make_table, table_for_this_machine

from sgl_flashsample import resolution
from sgl_flashsample.lookup import Found, Match
from sgl_flashsample.table import HeadShape, Table
from sgl_flashsample.work import Work

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import tables  # noqa: E402
import tuning  # noqa: E402
import tuning_races  # noqa: E402

HEAD = HeadShape(151936, 4096, "bf16")
PLAN = Plan(H200, HEAD, EFFORTS["quick"])
SURFACE = {
    "schema": "flashsample-surface/1",
    "device": dataclasses.asdict(H200),
    "env": {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"},
    "noise": 0.003,
    "model": {"us": 300.0, "rugged": 0.2},
    "costs": {"gemm": {"64": 320.0}},
    "seconds_per_round": 0.002,
}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    """A folder with a surface and, under ``151936x4096``, a table tuned on it."""
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "surface.json").write_text(json.dumps(SURFACE))
    setting(folder).tune("quick", "quick")
    return folder


def setting(folder: Path, surface: str = "surface.json", **changes) -> tuning.Setting:
    deadline = tuning.Deadline(time.monotonic() + 120)
    found = {"efforts": ("quick",), "effort": "quick", "batch_sizes": (1, 64), "kill_after": 3} | changes
    return tuning.Setting(HEAD, folder / "151936x4096", deadline, str(folder / surface), **found)


def other_surface(folder: Path, **changes) -> str:
    (folder / "other.json").write_text(json.dumps(SURFACE | changes))
    return "other.json"


def test_it_runs_in_pieces_and_its_table_has_a_line_for_each_section(tmp_path):
    (tmp_path / "surface.json").write_text(json.dumps(SURFACE))
    out = tmp_path / "tuning.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "tuning.py"), "--out", str(out), "--work", str(tmp_path)]
    command += ["--surface", str(tmp_path / "surface.json"), "--efforts", "quick", "--effort", "quick"]
    command += ["--batch-sizes", "1,64", "--kill-after", "3", "--between", "1,40,64"]
    subprocess.run([*command, "--only", "runs", "resume"], check=True, capture_output=True)
    first = json.loads(out.read_text())
    assert set(first["sections"]) == {"runs", "resume"}
    runs = first["sections"]["runs"]["151936x4096"]["quick"]
    assert runs["untouched"] and (runs["status"], runs["again_status"]) == ("done", "up to date")
    resume = first["sections"]["resume"]["151936x4096"]
    assert 3 <= resume["finished_when_killed"] < resume["buckets"] == 20
    assert resume["kept"] == resume["finished_when_killed"]
    assert not any(resume[f"{kind}s_done_again"] for kind in ("bucket", "trial", "gtest"))

    others = ["agreement", "regret", "sweep", "replay"]
    done = subprocess.run([*command, "--keep", "--only", *others], check=True, capture_output=True, text=True)
    second = json.loads(out.read_text())
    assert list(second["sections"]) == list(tuning.SECTIONS)
    assert second["sections"]["runs"] == first["sections"]["runs"]
    assert all("--only" in found["151936x4096"]["command"] for found in second["sections"].values())
    regret = second["sections"]["regret"]["151936x4096"]
    assert regret["swept"] == regret["space"] > regret["tried_by_the_search"] > 0
    assert second["sections"]["replay"]["151936x4096"]["code"] == 0
    lines = tables.tuning_table(out).splitlines()
    assert len(lines) == 2 + len(tuning.SECTIONS) and {line.count("|") for line in lines} == {4}
    assert all(line in done.stdout for line in lines)


def test_a_section_that_runs_out_of_time_is_not_written_and_the_exit_code_says_so(tmp_path):
    (tmp_path / "surface.json").write_text(json.dumps(SURFACE | {"seconds_per_round": 60.0}))
    out = tmp_path / "tuning.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "tuning.py"), "--out", str(out), "--work", str(tmp_path)]
    command += ["--surface", str(tmp_path / "surface.json"), "--limit", "3", "--only", "runs"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "out of time" in done.stderr and not out.exists()


def test_what_differs_between_two_runs_is_raced_and_judged_by_the_tie_band(tuned):
    setting(tuned).tune("again", "quick")
    table = setting(tuned).table_at("again")
    chosen = table.classes["plain"][64]
    other = PLAN.default(64, Work.PLAIN)
    assert chosen.use != key_of(other)
    changed = dataclasses.replace(chosen, use=key_of(other))
    changed_table = dataclasses.replace(
        table, classes=table.classes | {"plain": {**table.classes["plain"], 64: changed}}
    )
    (path,) = (tuned / "151936x4096" / "again").glob("*.json")
    path.write_text(changed_table.dumps())
    verdicts = {}
    for us in (301.0, 330.0):
        costs = {
            label_of(table.configs[chosen.use].launch, "plain"): {"64": 300.0},
            label_of(other, "plain"): {"64": us},
        }
        found = tuning.agreement(setting(tuned, other_surface(tuned, costs=costs)))
        # What ties may come out either way in two runs.
        others = [one for one in found["differing"] if (one["work"], one["batch"]) != ("plain", 64)]
        assert all(one["verdict"] == "inside" for one in others)
        (differing,) = (one for one in found["differing"] if one not in others)
        assert found["same"] == found["places"] - 1 - len(others)
        assert (differing["first"], differing["second"]) == (chosen.use, key_of(other))
        assert differing["off"] == pytest.approx(300 / us - 1, abs=0.004)
        verdicts[us] = differing["verdict"]
    assert verdicts == {301.0: "inside", 330.0: "outside"}


def test_the_sweep_names_what_is_slower_than_the_default_and_nothing_else(tuned):
    table = setting(tuned).table_at("quick")
    chosen, default = table.configs[table.classes["plain"][64].use].launch, PLAN.default(40, Work.PLAIN)
    costs = {label_of(chosen, "plain"): {"48": 315.0, "64": 290.0}, label_of(default, "plain"): {"64": 300.0}}
    found = tuning.sweep(setting(tuned, other_surface(tuned, costs=costs), between=(1, 40, 64, 200)))
    screened = sum(work.screened for work in PLAN.works)
    assert found["places"] == 4 * len(PLAN.works) - screened and not found["failed"], "200 rows are not screened"
    assert found["as_the_default"] + len(found["raced"]) == found["places"]
    plain = {one["batch"]: one for one in found["raced"] if one["work"] == "plain"}
    assert 200 not in plain, "no bucket serves it"
    assert plain[40]["slower"] and plain[40]["off"] == pytest.approx(0.05, abs=0.004)
    assert not plain[64]["slower"] and plain[64]["off"] < 0


def test_what_a_server_launches_is_what_its_choices_say(device):
    weight = torch.zeros(512, 64, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    head = LMHead(weight)
    table = table_for_this_machine(device, resolution.head_shape_of(head))
    target = resolution.target_of(head)
    choices = resolution.apply(head, target, Found(table, "x", "test", Match.EXACT, ()), []).choices
    plan = Plan(H200, HEAD, EFFORTS["quick"])
    for work in Work:
        for rows in range(1, 40):
            tuned = choices.is_tuned(rows, work)
            if isinstance(choices.pick(rows, work), ScreenConfig):
                continue  # the built-in choice is of this head, the plan of another
            found = tuning_races.served(table, plan, rows, work)
            assert found == (choices.pick(rows, work) if tuned else plan.default(rows, work)), (work, rows)


def test_a_bucket_of_an_unknown_path_is_served_by_the_default():
    table = make_table()
    unknown = dataclasses.replace(table.configs["fused-16"], path="abacus", config={})
    changed = dataclasses.replace(table, configs=table.configs | {"fused-16": unknown})
    assert tuning_races.served(changed, PLAN, 1, Work.PLAIN) == PLAN.default(1, Work.PLAIN)


@pytest.mark.parametrize("off, band, verdict", [(0.0, 0.01, "inside"), (0.05, 0.01, "outside"), (0.01, 0.01, "open")])
def test_an_interval_lies_inside_the_band_outside_or_across_its_edge(off, band, verdict):
    generator = random.Random(1)
    theirs = [300.0 * math.exp(generator.gauss(0, 0.002)) for _ in range(30)]
    mine = [us * (1 + off) * math.exp(generator.gauss(0, 0.002)) for us in theirs]
    ratio = tuning_races.compare(mine, theirs, [1980.0] * 30)
    assert ratio.low <= off <= ratio.high and 0 < ratio.se < 0.001
    assert ratio.against(band) == verdict
    backwards = tuning_races.compare(theirs, mine, [1980.0] * 30)
    assert backwards.off == pytest.approx(1 / (1 + ratio.off) - 1)


def test_rounds_at_a_low_clock_do_not_count():
    mine, clocks = [300.0] * 10 + [600.0] * 4, [1980.0] * 10 + [990.0] * 4
    assert tuning_races.compare(mine, [300.0] * 14, clocks).off == 0.0
    with pytest.raises(ValueError, match="2 rounds count"):
        tuning_races.compare([1.0, 1.0], [1.0, 1.0], [0.0, 0.0])


def test_the_luck_of_the_best_of_many_is_no_regret():
    """All are equal: the fastest of 64 by its own rounds looks a percent faster than any one of them."""
    generator, offs = random.Random(2), []
    for _ in range(40):
        samples = {str(n): [300.0 * math.exp(generator.gauss(0, 0.01)) for _ in range(24)] for n in range(64)}
        offs.append(tuning_races.best_by_half(samples, [0.0] * 24, "0")[1].off)
    assert abs(sum(offs) / len(offs)) < 0.002
    samples["7"] = [us * 0.9 for us in samples["7"]]
    best, ratio = tuning_races.best_by_half(samples, [0.0] * 24, "0")
    assert best == "7" and ratio.off == pytest.approx(1 / 0.9 - 1, abs=0.02)
    assert tuning_races.best_by_half(samples, [0.0] * 24, "7") == ("7", tuning_races.Ratio(0.0, 0.0, 0.0, 0.0))


def test_what_is_done_twice_is_counted():
    events = [{"work": "plain", "batch": 1}, {"work": "plain", "batch": 2}, {"work": "greedy", "batch": 1}]
    assert tuning.done_again(events) == 0
    assert tuning.done_again([*events, {"work": "plain", "batch": 2, "us": 3.0}]) == 1
    trials = [{"work": "plain", "config": {"stages": n}} for n in (1, 2, 1)]
    assert tuning.done_again(trials) == 1


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("{", "is no result of benchmarks/tuning.py"),
        ('{"env": {}}', "is no result of benchmarks/tuning.py"),
        ('{"env": {"device": "NVIDIA H100"}, "sections": {}}', "is of NVIDIA H100; expected NVIDIA H200"),
    ],
)
def test_results_of_another_device_or_benchmark_are_not_added_to(tmp_path, text, complaint):
    (tmp_path / "out.json").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        tuning.kept(tmp_path / "out.json", "NVIDIA H200")


def test_the_table_of_the_readme_says_when_there_is_none(tmp_path):
    assert tables.tuning_table(tmp_path / "absent.json") == tables.NOT_MEASURED
    assert set(tables.TUNING) == set(tuning.SECTIONS)


def test_a_part_of_the_plan_is_one_study_that_has_more_than_a_search_tries():
    plan = tuning_races.PartPlan(H200, HEAD, EFFORTS["full"], tuning_races.PartPlan.BUCKETS)
    space = plan.space(plan.STUDY)
    assert [str(key) for key in plan.studies] == ["plain/fused/16"]
    assert plan.trials(plan.STUDY) < len(space.points) / 2
    assert set(space.points) < set(PLAN.space(plan.STUDY).points)
    assert {plan.default(rows, Work.PLAIN) for rows in plan.buckets} <= set(space.points)


def test_tables_are_read_as_they_were_written(tuned):
    (path,) = (tuned / "151936x4096" / "quick").glob("fs1,*.json")
    assert setting(tuned).wanted()[0] == Table.loads(path.read_text())
    given, file, _ = setting(tuned, table=path).wanted()
    assert given == Table.loads(path.read_text()) and file == path
