"""The benchmark of the tuner: what it says follows from what it is given, on a simulated device."""

from __future__ import annotations

import importlib
import json
import math
import random
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_flashsample.autotune.labels import DEVICES, config_of, key_of, label_of
from sgl_flashsample.autotune.plan import EFFORTS, Plan
from sgl_flashsample.kinds import KIND_NAMES, PLAIN
from sgl_flashsample.tables.schema import HeadShape, Table

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"
HEAD = HeadShape(vocab=151936, hidden=4096, dtype="bf16")
PLAN = Plan(DEVICES["NVIDIA H200"], HEAD, EFFORTS["quick"])


@pytest.fixture(scope="module")
def tuning() -> Iterator[types.ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("tuning")
    sys.path.remove(str(FOLDER))
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def tuned(tuning, tmp_path_factory) -> Path:
    """A folder with a simulated device and, under ``151936x4096``, a table tuned on it."""
    folder = tmp_path_factory.mktemp("tuning")
    write_device(tuning, folder)
    setting(tuning, folder).tune("quick", "quick")
    return folder


def write_device(tuning, folder: Path, **changes) -> None:
    (folder / "device.json").write_text(json.dumps(tuning.EXAMPLE | changes))


def setting(tuning, folder: Path, **changes):
    until = time.monotonic() + 120
    options = {"efforts": ("quick",), "effort": "quick", "sizes": (1, 64)} | changes
    return tuning.Setting(HEAD, folder / "151936x4096", until, str(folder / "device.json"), **options)


@pytest.mark.full
def test_it_runs_in_pieces_and_each_section_has_words(tuning, tmp_path):
    out = tmp_path / "tuning.json"
    command = [
        sys.executable,
        str(FOLDER / "run.py"),
        "tuning",
        "--dry-run",
        "--out",
        str(out),
        "--batch-sizes",
        "1,64",
    ]
    command += ["--between", "1,40,64"]
    subprocess.run([*command, "--only", "runs"], check=True, capture_output=True)
    first = json.loads(out.read_text())
    assert set(first["sections"]) == {"runs"}
    quick = first["sections"]["runs"]["151936x4096"]["quick"]
    assert quick["untouched"] and (quick["status"], quick["again_status"]) == ("done", "up to date")
    others = ["regret", "proposals", "sweep", "replay"]
    done = subprocess.run([*command, "--keep", "--only", *others], check=True, capture_output=True, text=True)
    second = json.loads(out.read_text())
    assert list(second["sections"]) == list(tuning.SECTIONS)
    assert second["sections"]["runs"] == first["sections"]["runs"]
    regret = second["sections"]["regret"]["151936x4096"]
    places = {(row["kind"], row["batch"]) for row in regret["sizes"] if row["by"] == "built-in"}
    assert places == {(row["kind"], row["batch"]) for row in regret["sizes"] if row["by"] == "quick"}
    assert {rows for kind, rows in places if kind == "truncate"} == set(tuning.REGRET_SIZES)
    assert {rows for kind, rows in places if kind == "plain+screen"} == {1, 8, 16, 48}
    proposals = second["sections"]["proposals"]["151936x4096"]
    searches = {(row["effort"], row["share"] > 0): row for row in proposals["sizes"]}
    assert len(searches) == 4 and len(proposals["sizes"]) == 4 * len(tuning.PartPlan.SIZES)
    assert searches["quick", False]["proposed"] == 0
    assert (searches["quick", True]["proposed"], searches["quick", True]["trials"]) == (2, 6)
    assert searches["full", True]["proposed"] >= 6
    assert {row["batch"] for row in proposals["sizes"]} == set(tuning.PartPlan.SIZES)
    assert second["sections"]["replay"]["151936x4096"]["code"] == 0
    for name in others:
        assert second["sections"][name]["151936x4096"]["summary"] in done.stdout

    late = tmp_path / "late.json"
    command[5] = str(late)
    done = subprocess.run([*command, "--only", "runs", "--limit", "1"], capture_output=True, text=True)
    assert done.returncode == 1 and "out of time" in done.stdout
    late_result = json.loads(late.read_text())
    assert "sections" not in late_result and "out of time" in late_result["env"]["not_run"][0]["reason"]
    command[5] = str(out)
    out.write_text(json.dumps(second | {"env": {"device": "NVIDIA H100"}}))
    refused = subprocess.run([*command, "--keep", "--only", "replay"], capture_output=True, text=True)
    assert refused.returncode == 1 and "is of NVIDIA H100; expected cpu" in refused.stderr


@pytest.mark.full
def test_the_sweep_names_what_is_slower_than_the_default_and_nothing_else(tuning, tuned):
    table = setting(tuning, tuned).table_at("quick")
    chosen, default = tuning.dispatch_for(table).lookup(64, PLAIN), PLAN.default(40, PLAIN)
    costs = {label_of(chosen, PLAIN): {"48": 315.0, "64": 290.0}, label_of(default, PLAIN): {"64": 300.0}}
    write_device(tuning, tuned, costs=costs)
    sweep = tuning.sweep(setting(tuning, tuned, between=(1, 40, 64, 200)))
    write_device(tuning, tuned)
    screened = sum(KIND_NAMES[kind].screen for kind in table.kinds)
    assert sweep["places"] == 4 * len(table.kinds) - screened and not sweep["failed"], "200 rows are not screened"
    assert sweep["as_the_default"] + len(sweep["raced"]) == sweep["places"]
    plain = {one["batch"]: one for one in sweep["raced"] if one["kind"] == "plain"}
    assert 200 not in plain, "no measured size serves it"
    assert plain[40]["slower"] and plain[40]["off"] == pytest.approx(0.05, abs=0.004)
    assert not plain[64]["slower"] and plain[64]["off"] < 0


@pytest.mark.full
def test_a_table_is_read_as_it_was_written_and_launches_what_its_entries_say(tuning, tuned):
    (path,) = (tuned / "151936x4096" / "quick").glob("fs*.json")
    table = Table.loads(path.read_text())
    assert setting(tuning, tuned).wanted()[:2] == (table, path)
    assert setting(tuning, tuned, table=path).wanted() == (table, path, "given")
    dispatch = tuning.dispatch_for(table)
    assert table.entries and all(
        dispatch.lookup(entry.rows, KIND_NAMES[entry.kind]) == entry.configuration for entry in table.entries
    )
    assert tuning.places(table) == {(KIND_NAMES[kind], rows) for kind in table.kinds for rows in table.sizes(kind)}


@pytest.mark.parametrize("off", [0.0, 0.01, 0.05])
def test_the_interval_of_a_ratio_holds_it(tuning, off):
    generator = random.Random(1)
    theirs = [300.0 * math.exp(generator.gauss(0, 0.002)) for _ in range(30)]
    mine = [us * (1 + off) * math.exp(generator.gauss(0, 0.002)) for us in theirs]
    ratio = tuning.Ratio.of(mine, theirs, [1980.0] * 30)
    assert ratio.low <= off <= ratio.high and 0 < ratio.se < 0.001
    assert tuning.Ratio.of(theirs, mine, [1980.0] * 30).off == pytest.approx(1 / (1 + ratio.off) - 1)


def test_rounds_at_a_low_clock_do_not_count(tuning):
    mine, clocks = [300.0] * 10 + [600.0] * 4, [1980.0] * 10 + [990.0] * 4
    assert tuning.Ratio.of(mine, [300.0] * 14, clocks).off == 0.0
    with pytest.raises(ValueError, match="2 rounds count"):
        tuning.Ratio.of([1.0, 1.0], [1.0, 1.0], [0.0, 0.0])


def test_the_luck_of_the_best_of_many_is_no_regret(tuning):
    """All 64 have the same true time. The fastest by measured rounds looks a percent faster than the others."""
    generator, offs = random.Random(2), []
    for _ in range(40):
        samples = {str(n): [300.0 * math.exp(generator.gauss(0, 0.01)) for _ in range(24)] for n in range(64)}
        offs.append(tuning.best_by_half(samples, [0.0] * 24, "0")[1].off)
    assert abs(sum(offs) / len(offs)) < 0.002
    samples["7"] = [us * 0.9 for us in samples["7"]]
    best, ratio = tuning.best_by_half(samples, [0.0] * 24, "0")
    assert best == "7" and ratio.off == pytest.approx(1 / 0.9 - 1, abs=0.02)
    assert tuning.best_by_half(samples, [0.0] * 24, "7") == ("7", tuning.Ratio(0.0, 0.0, 0.0, 0.0))


@pytest.mark.full
def test_the_regret_of_a_choice_is_what_a_faster_one_of_the_search_would_have_saved(tuning, tuned):
    log = setting(tuning, tuned).events("quick", "trial")
    trials = [trial for trial in log if trial["study"] == "plain/fused/16" and trial["us"]]
    missed = config_of("fused", max(trials, key=lambda trial: trial["us"]["1"])["config"])
    write_device(tuning, tuned, costs={label_of(missed, PLAIN): {"1": 200.0, "48": 200.0}})
    regret = tuning.regret(setting(tuning, tuned))
    write_device(tuning, tuned)
    rows = {(row["by"], row["kind"], row["batch"]): row for row in regret["sizes"]}
    assert rows["quick", "plain", 1]["other"] == key_of(missed)
    assert rows["quick", "plain", 1]["off"] > 0.2
    assert rows["quick", "truncate", 1]["other"] != key_of(missed)


def test_a_part_of_the_plan_is_one_study_that_has_more_than_a_search_tries(tuning):
    plan = tuning.PartPlan(PLAN.device, HEAD, EFFORTS["full"], tuning.PartPlan.SIZES)
    space = plan.space(plan.STUDY)
    assert [str(key) for key in plan.studies] == ["plain/fused/16"]
    assert plan.trials(plan.STUDY) < len(space.points) / 2
    assert space.points.keys() < PLAN.space(plan.STUDY).points.keys()
    assert {plan.default(rows, PLAIN) for rows in plan.sizes} <= space.points.keys()
