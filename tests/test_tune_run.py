"""A whole tuning run over a recorded cost surface: everything but measuring, mishaps included."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from sgl_flashsample.autotune import lint
from sgl_flashsample.autotune.decide import MOST_TRIES
from sgl_flashsample.autotune.names import key_of, label_of, path_of_key
from sgl_flashsample.autotune.outcome import Outcome
from sgl_flashsample.autotune.plan import EFFORTS, Plan
from sgl_flashsample.autotune.race import GAIN_TOLERANCE, RECORDED_ROUNDS, Policy, gains_apart
from sgl_flashsample.autotune.remote import Remote
from sgl_flashsample.autotune.run import Options, TuneError, run
from sgl_flashsample.autotune.trials import read
from sgl_flashsample.autotune.verify import LOAD_ROUNDS, verify

from sgl_flashsample.sources import sources_hash
from sgl_flashsample.table import Device, HeadShape, Table
from sgl_flashsample.work import Work

H200 = {"name": "NVIDIA H200", "cc": "9.0", "sms": 132, "l2_mb": 50, "smem_optin": 232448}
ENV = {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}
HEAD = HeadShape(151936, 4096, "bf16")
PLAN = Plan(Device(**H200), HEAD, EFFORTS["quick"])
BUCKETS = (1, 64, 256)
DEFAULT = PLAN.default(1, Work.PLAIN)
OTHER = next(c for c in PLAN.space(PLAN.studies[0]).first() if c != DEFAULT)
SIZES = {work: [rows for rows in PLAN.buckets_of(work) if rows in BUCKETS] for work in PLAN.works}
ALL = sum(map(len, SIZES.values()))


class Notes:
    """A progress display that remembers. interrupt: at which note Ctrl-C is pressed."""

    def __init__(self, interrupt: str = "") -> None:
        self.lines: list[str] = []
        self.interrupt = interrupt

    def note(self, text: str) -> None:
        self.lines.append(text)
        if self.interrupt and self.interrupt in text:
            self.interrupt = ""
            raise KeyboardInterrupt

    def update(self, *values: object) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def surface(tmp_path):
    """A function that writes a surface with these changes; its path."""

    def write(**changes) -> str:
        data = {"schema": "flashsample-surface/1", "device": H200, "env": ENV, "noise": 0.003}
        data |= {"model": {"us": 300.0, "rugged": 0.08}, **changes}
        path = tmp_path / "surface.json"
        path.write_text(json.dumps(data))
        return str(path)

    return write


def tune(tmp_path, surface: str, notes: Notes | None = None, **options):
    options = {"effort": "quick", "buckets": BUCKETS, **options}
    return run(Options(HEAD, tmp_path / "out", surface=surface, **options), notes or Notes())


def rejected(result) -> dict[str, dict]:
    return {f"{e['config']['work']}/{e['config']['key']}": e for e in result.table.rejected}


def log_of(result) -> list[dict]:
    return read(result.path.with_suffix(".trials.jsonl"))


def test_a_run_finds_the_fastest_and_a_second_one_does_nothing(tmp_path, surface):
    best = label_of(OTHER, "plain")
    path = surface(costs={best: {"1": 250.0, "16": 250.0}})
    result = tune(tmp_path, path)
    assert (result.code, result.status) == (0, "done")
    assert result.path.name == "fs1,device=NVIDIA_H200,V=151936,D=4096,tp=1,w=bf16.json"
    table = Table.loads(result.path.read_text())
    assert table == result.table and not table.notes
    bucket = table.classes["plain"][1]
    assert bucket.use == key_of(OTHER) and bucket.default == key_of(DEFAULT)
    assert bucket.us == pytest.approx(250.0, rel=0.01) and 0.1 < bucket.gain < 0.3
    assert table.classes["greedy"][1].use == key_of(OTHER), "greedy batches have the kernels of plain ones"
    assert {work: sorted(found) for work, found in table.classes.items()} == SIZES
    assert table.provenance["complete"] is True and table.effort == "quick"
    before = result.path.stat().st_mtime_ns
    again = tune(tmp_path, path)
    assert (again.code, again.status) == (0, "up to date")
    assert result.path.stat().st_mtime_ns == before
    assert tune(tmp_path, path, force=True).status == "done"


def test_the_default_stays_where_nothing_is_faster_and_that_is_a_result(tmp_path, surface):
    costs = {label_of(PLAN.default(rows, w), w.value): {str(rows): 200.0} for w in PLAN.works for rows in SIZES[w]}
    result = tune(tmp_path, surface(costs=costs))
    assert result.code == 0 and "the default won everywhere" in result.message


def test_batches_with_a_screen_take_what_won_their_race_and_the_table_says_what_the_screen_costs(tmp_path, surface):
    screened = PLAN.default(1, Work.SCREENED)
    greedy = next(c for c in PLAN.space(PLAN.study_of(screened, Work.SCREENED)).first() if c != screened)
    costs = {label_of(screened, "plain+screen"): {"1": 160.0}, label_of(greedy, "plain+screen"): {"1": 170.0}}
    path = surface(costs=costs, faults={label_of(greedy, "plain+screen"): "biased"})
    table = tune(tmp_path, path, buckets=(1, 64)).table
    bucket = table.classes["plain+screen"][1]
    assert bucket.use == key_of(screened) and bucket.others["fused"] == pytest.approx(300.0, rel=0.1)
    assert table.classes["greedy+screen"][1].use == key_of(screened)
    assert table.classes["plain"][1].use != key_of(screened), "without a screen there is none to use"
    assert table.measure["screen"] == PLAN.screen
    assert table.kernels["screened"]["src"] == sources_hash("screened")
    unscreened = table.classes["edit+screen"][1]
    assert path_of_key(unscreened.use) in ("fused", "logits", "screened") and "fused" in {
        path_of_key(unscreened.use),
        *unscreened.others,
    }


def test_where_a_screen_never_wins_no_batch_takes_it(tmp_path, surface):
    costs = {label_of(PLAN.default(rows, Work.PLAIN), "plain"): {str(rows): 100.0} for rows in (1, 64)}
    table = tune(tmp_path, surface(costs=costs), buckets=(1, 64)).table
    for work in ("plain+screen", "greedy+screen"):
        assert {table.configs[bucket.use].path for bucket in table.classes[work].values()} == {"fused"}


def test_a_finished_table_of_a_release_without_a_path_is_not_up_to_date(tmp_path, surface):
    path = surface()
    result = tune(tmp_path, path, buckets=(1,))
    plain = {work: found for work, found in result.table.classes.items() if "screen" not in work}
    used = {k for found in plain.values() for b in found.values() for k in (b.use, b.default, *b.tied)}
    older = dataclasses.replace(
        result.table,
        classes=plain,
        configs={key: choice for key, choice in result.table.configs.items() if key in used},
        kernels={name: hashes for name, hashes in result.table.kernels.items() if name != "screened"},
    )
    result.path.write_text(older.dumps())
    again = tune(tmp_path, path, buckets=(1,))
    assert again.status == "done" and again.table.classes.keys() == result.table.classes.keys()


def test_a_full_run_agrees_with_an_exhaustive_one_within_a_percent_and_with_another_full_one(tmp_path, surface):
    class Unscreened(Plan):
        works = tuple(work for work in PLAN.works if not work.screened)  # thousands of configurations less

    path = surface(model={"us": 300.0, "rugged": 0.2}, noise=0.002)
    options = {"buckets": (64,), "rivals": False, "plan": Unscreened}
    oracle = tune(tmp_path / "a", path, effort="exhaustive", **options).table
    first = tune(tmp_path / "b", path, effort="full", **options).table
    second = tune(tmp_path / "c", path, effort="full", **options).table
    for work in Unscreened.works:
        best, found, other = (table.classes[work][64] for table in (oracle, first, second))
        assert max(found.us, other.us) <= best.us * 1.01, work
        # Either may have chosen a configuration that ties with its best one.
        assert found.use == other.use or abs(found.us / other.us - 1) < 0.015, work


@pytest.mark.parametrize(
    "fault, why",
    [
        ("shared_memory", "shared_memory"),
        ("compile", "compile"),
        ("wrong", "incorrect"),
        ("illegal", "runtime"),
        ("crash", "runtime"),
        ("biased", "incorrect"),
        ("crash in race", "runtime"),
    ],
)
def test_a_configuration_that_fails_is_rejected_with_its_reason_and_the_run_goes_on(tmp_path, surface, fault, why):
    label = label_of(OTHER, "plain")
    result = tune(tmp_path, surface(faults={label: fault}, costs={label: {"1": 200.0}}), buckets=(1,))
    assert (result.code, result.status) == (0, "done")
    entry = rejected(result)[label]
    assert entry["why"] == why and entry["detail"]
    assert all(bucket.use != key_of(OTHER) for bucket in result.table.classes["plain"].values())


@pytest.mark.parametrize("contradicting", [1, MOST_TRIES], ids=["once", "always"])
def test_a_race_whose_times_contradict_its_rounds_is_run_again(tmp_path, surface, monkeypatch, contradicting):
    """As where a GPU is slower in the race than when the times are taken that are recorded."""
    real, races = Outcome.__init__, []

    def recorded(self, verdict, configs, samples, clock, default, faster):
        races.append(verdict)
        if len(races) <= contradicting:
            samples = samples | {default: [260.0] * len(samples[default])}
        real(self, verdict, configs, samples, clock, default, faster)

    monkeypatch.setattr(Outcome, "__init__", recorded)
    notes = Notes()
    result = tune(tmp_path, surface(costs={label_of(OTHER, "plain"): {"1": 250.0, "16": 250.0}}), notes)
    bucket, repeats = result.table.classes["plain"][1], [line for line in notes.lines if "contradict" in line]
    assert result.code == 0 and bucket.use == key_of(OTHER)
    assert len(races) - ALL == len(repeats) == min(contradicting, MOST_TRIES - 1)
    assert (gains_apart(bucket.gain, bucket.us, bucket.default_us) <= GAIN_TOLERANCE) == (contradicting == 1)
    errors, _ = lint.check(str(result.path))
    assert any("its times give" in error for error in errors) == (contradicting > 1), "it is not published unseen"


def test_the_times_of_a_table_are_of_the_rounds_and_the_company_in_which_they_are_measured_again(
    tmp_path, surface, monkeypatch
):
    asked = []
    real = Remote.ask

    def ask(self, request, *arguments):
        asked.append(request)
        return real(self, request, *arguments)

    monkeypatch.setattr(Remote, "ask", ask)
    path = surface(costs={label_of(OTHER, "plain"): {"1": 250.0, "16": 250.0}})
    result = tune(tmp_path, path)
    recorded = [one for one in asked if one["op"] == "rounds" and one["rounds"] == RECORDED_ROUNDS]
    found = [bucket for buckets in result.table.classes.values() for bucket in buckets.values()]
    assert len(recorded) >= len(found) and {bucket.n for bucket in found} == {RECORDED_ROUNDS}
    first, bucket = recorded[0], result.table.classes["plain"][1]
    assert first["first"] == 0 and first["names"][:2] == [bucket.use, bucket.default]
    assert set(bucket.others) <= {path_of_key(name) if "-" in name else name for name in first["names"]}
    asked.clear()
    verify(result.table, path, Notes())
    again = [(one["first"], one["rounds"]) for one in asked if one["op"] == "rounds"]
    assert again == [(0, LOAD_ROUNDS), (0, RECORDED_ROUNDS)] * len(found), "under load, as after a race"


def test_a_configuration_that_hangs_is_ended_and_rejected(tmp_path, surface, monkeypatch):
    monkeypatch.setattr("sgl_flashsample.autotune.search.TRIAL_SECONDS", 0.4)
    monkeypatch.setattr("sgl_flashsample.autotune.remote.START_SECONDS", 0.6)
    label = label_of(OTHER, "plain")
    result = tune(tmp_path, surface(faults={label: "hang"}), buckets=(1,))
    assert result.status == "done"
    assert rejected(result)[label]["why"] == "timeout"


def test_a_default_that_draws_wrong_tokens_makes_the_run_fail(tmp_path, surface):
    result = tune(tmp_path, surface(faults={label_of(DEFAULT, "plain"): "wrong"}), buckets=(1,))
    assert result.code == 1 and "a built-in configuration failed" in result.message
    assert result.table.classes["plain"][1].default == ""


def test_a_device_that_is_lost_at_once_is_one_line(tmp_path, surface):
    with pytest.raises(TuneError, match="does not answer"):
        tune(tmp_path, str(tmp_path / "missing.json"))


def test_a_busy_gpu_is_refused_unless_that_is_allowed(tmp_path, surface):
    path = surface(busy=90)
    with pytest.raises(TuneError, match="noisy GPU: others use 90 %"):
        tune(tmp_path, path)
    assert tune(tmp_path, path, allow_busy=True, buckets=(1,)).status == "done"


def test_times_that_scatter_too_much_are_a_table_and_an_exit_code(tmp_path, surface):
    result = tune(tmp_path, surface(noise=0.2), buckets=(1,))
    assert (result.code, result.status) == (2, "noisy GPU") and result.path.exists()


def test_ctrl_c_keeps_what_is_finished_and_the_next_run_does_the_rest(tmp_path, surface):
    path = surface()
    result = tune(tmp_path, path, Notes(interrupt="greedy"))
    assert (result.code, result.status) == (0, "interrupted")
    kept = Table.loads(result.path.read_text())
    assert kept.provenance["complete"] is False
    done = {(work, rows) for work, found in kept.classes.items() for rows in found}
    assert 0 < len(done) < ALL
    again = tune(tmp_path, path)
    assert again.status == "done"
    decided = [(e["work"], e["batch"]) for e in log_of(again) if e.get("kind") == "bucket"]
    assert len(decided) == len(set(decided)) == ALL, "no bucket is decided twice"
    assert all(again.table.classes[work][rows] == kept.classes[work][rows] for work, rows in done)


def test_a_killed_run_loses_at_most_the_bucket_in_flight(tmp_path, surface):
    path = surface(seconds_per_round=0.01)
    arguments = ["run", "--vocab", "151936", "--hidden", "4096", "--effort", "quick", "--batch-sizes", "1,64,256"]
    command = [sys.executable, "-m", "sgl_flashsample.cli", "tune", *arguments]
    command += ["--surface", path, "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    for line in process.stderr:
        if "truncate" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    (log,) = (tmp_path / "out").glob("*.trials.jsonl")
    with log.open("a") as file:
        file.write('{"kind": "bucket", "wo')  # the line that it was writing
    before = [event for event in read(log) if event.get("kind") == "bucket"]
    assert len(before) >= 6
    result = tune(tmp_path, path)
    events = log_of(result)
    assert result.status == "done"
    assert len([event for event in events if event.get("kind") == "bucket"]) == ALL
    trials = [json.dumps([e["work"], e["config"]]) for e in events if e.get("kind") == "trial"]
    assert len(trials) == len(set(trials)), "nothing is measured twice"


def test_workers_end_with_a_killed_run(tmp_path, surface):
    path = surface(seconds_per_round=30.0)
    arguments = ["run", "--vocab", "4096", "--hidden", "64", "--effort", "quick", "--surface", path]
    command = [sys.executable, "-m", "sgl_flashsample.cli", "tune", *arguments]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "out")], stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "searched" in line:
            break
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    pids = [int(pid) for pid in children.stdout.split()]
    assert pids
    process.kill()
    process.wait()
    until = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_the_time_is_kept_and_what_is_done_by_then_is_a_table(tmp_path, surface):
    began = time.monotonic()
    result = tune(tmp_path, surface(seconds_per_round=0.05), budget=2.0)
    assert time.monotonic() - began < 5
    assert result.code == 0 and result.status in ("done", "out of time")


def test_several_gpus_share_the_work_and_find_the_same(tmp_path, surface, monkeypatch):
    path, started = surface(costs={label_of(OTHER, "plain"): {"1": 250.0}}), []
    monkeypatch.setattr("sgl_flashsample.autotune.run.Options.surface", None, raising=False)
    from sgl_flashsample.autotune import run as module
    from sgl_flashsample.autotune.remote import Crew, Remote

    def crew(remotes):
        found = Crew(Remote("measuring", {"bench": "surface", "file": path}, tmp_path / f"{n}.log") for n in range(3))
        started.append(found)
        return found

    monkeypatch.setattr(module, "Crew", crew)
    result = tune(tmp_path, path, gpus=3, buckets=(1, 64))
    assert result.status == "done" and result.table.provenance["gpus"] == 3
    assert result.table.classes["plain"][1].use == key_of(OTHER)
    assert all(remote.starts == 1 for remote in started[0].remotes)


def test_a_log_of_other_kernels_or_another_device_is_set_aside(tmp_path, surface):
    tune(tmp_path, surface(), buckets=(1,))
    notes = Notes()
    result = tune(tmp_path, surface(env=ENV | {"triton": "3.7.0"}), notes, buckets=(1,))
    assert result.status == "done"
    assert any("is kept as" in line for line in notes.lines)


def test_what_lies_between_two_buckets_gets_one_of_its_own_where_it_matters(tmp_path, surface):
    """At 160 rows what 256 rows use would be far slower than the default."""
    default = PLAN.default(160, Work.PLAIN)
    fast_at_256 = next(c for c in PLAN.space(PLAN.studies[3]).first() if c != default)
    costs = {label_of(default, "plain"): {"160": 200.0, "256": 400.0}}
    costs[label_of(fast_at_256, "plain")] = {"64": 300.0, "128": 300.0, "160": 300.0, "256": 300.0}
    path = surface(costs=costs, model={"us": 500.0, "rugged": 0.05})
    result = tune(tmp_path, path, effort="full", buckets=(64, 256), rivals=False)
    assert sorted(result.table.classes["plain"]) == [64, 160, 256]
    assert result.table.classes["plain"][160].use == key_of(default)


def test_verify_passes_what_is_as_recorded_and_names_what_is_not(tmp_path, surface):
    gemm = {"gemm": {"64": 320.0}}
    path = surface(noise=0.002, costs=gemm)
    result = tune(tmp_path, path, buckets=(1, 64))
    assert verify(result.table, path, Notes())[0] == 0
    slower = surface(noise=0.002, costs=gemm, model={"us": 330.0, "rugged": 0.08})
    code, line, _ = verify(result.table, slower, Notes())
    assert code == 1 and "from the recorded time" in line
    other = surface(device=H200 | {"name": "NVIDIA H100 80GB HBM3"})
    code, line, _ = verify(result.table, other, Notes())
    assert code == 2 and "this is NVIDIA H100" in line


def test_verify_passes_a_device_that_is_slower_as_a_whole(tmp_path, surface):
    """Power and heat move a large batch and the GEMM beside it alike."""
    result = tune(tmp_path, surface(noise=0.002), buckets=(64,))
    warm = surface(noise=0.002, model={"us": 330.0, "rugged": 0.08})
    code, _, replayed = verify(result.table, warm, Notes())
    assert code == 0
    assert all(one.off > 0.05 and abs(one.off_gemm) < 0.03 for one in replayed)


def test_verify_finds_what_is_slower_than_the_default(tmp_path, surface):
    label = label_of(OTHER, "plain")
    result = tune(tmp_path, surface(costs={label: {"1": 250.0}}), buckets=(1,))
    now = surface(costs={label: {"1": 250.0}, label_of(DEFAULT, "plain"): {"1": 200.0}})
    code, line, _ = verify(result.table, now, Notes())
    assert code == 1 and "slower than the default" in line


def test_a_policy_is_tighter_the_more_looks_it_takes():
    assert EFFORTS["quick"].policy.looks < Policy().looks
