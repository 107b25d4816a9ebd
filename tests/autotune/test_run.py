"""Whole runs over a simulated device, with processes that crash, hang and are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import lab.simulated
import msgspec
import pytest
from lab.simulated import workers
from tune_examples import (
    DEFAULT,
    ENV,
    HEAD,
    OTHER,
    PLAIN,
    QUICK,
    SIZES,
    TRUNCATE,
    Notes,
    events_of,
    simulated_device,
    tune,
    verify,
)
from tuned_tables import make_entry

from sgl_flashsample.autotune import pool, search
from sgl_flashsample.autotune.decisions import decisions
from sgl_flashsample.autotune.labels import config_of, label_of
from sgl_flashsample.autotune.plan import Plan
from sgl_flashsample.autotune.pool import Pool, WorkerProcess, work_until
from sgl_flashsample.autotune.trials import log_of, read_events
from sgl_flashsample.files import hold
from sgl_flashsample.kinds import KIND_NAMES
from sgl_flashsample.tables.lookup import load_table
from sgl_flashsample.tables.schema import config_fields

pytestmark = pytest.mark.slow

PLANNED = {(str(kind), rows) for kind in QUICK.kinds for rows in QUICK.sizes_of(kind) if rows in SIZES}


def sizes_in(table) -> set[tuple[str, int]]:
    return {(str(one.kind), one.rows) for one in decisions(table)}


def test_a_run_finds_the_fastest_and_a_second_one_does_nothing(tmp_path, simulated):
    device = simulated(costs={label_of(OTHER, PLAIN): {"1": 250.0, "16": 250.0}})
    result = tune(tmp_path, device)
    assert (result.code, result.status) == (0, "done")
    assert result.path.name == "fs2-NVIDIA_H200-V151936-D4096-tp1-bf16.json"
    table, _ = load_table(result.path)
    assert table == result.table and not table.notes and sizes_in(table) == PLANNED
    assert table.entry("plain", 1).configuration == table.entry("greedy", 1).configuration == OTHER
    assert table.provenance["complete"] is True and table.effort == "quick"
    assert f"{len(table.entries)} of {len(PLANNED)} improved, by up to" in result.message
    before = result.path.stat().st_mtime_ns
    again = tune(tmp_path, device)
    assert (again.code, again.status) == (0, "up to date") and result.path.stat().st_mtime_ns == before


def test_a_forced_run_is_up_to_date_afterwards_whatever_was_there(tmp_path, simulated):
    device = simulated()
    tune(tmp_path, device, sizes=(3,))
    assert tune(tmp_path, device, sizes=(1,), force=True).table.sizes("plain") == [1]
    assert tune(tmp_path, device, sizes=(1,)).status == "up to date"


def test_a_run_is_up_to_date_for_its_sizes_though_the_table_keeps_others_of_less_effort(tmp_path, simulated):
    device = simulated()
    tune(tmp_path, device, sizes=(3,))
    more = tune(tmp_path, device, sizes=(1,), effort="full")
    assert more.table.effort == "quick" and set(more.table.sizes("plain")) == {1, 3}
    assert tune(tmp_path, device, sizes=(1,), effort="full").status == "up to date"
    assert tune(tmp_path, device, sizes=(3,), effort="full").status == "done"


def test_a_forced_run_measures_everything_again_and_keeps_the_log_of_the_one_before(tmp_path, simulated):
    result = tune(tmp_path, simulated(), sizes=(1,))
    log, trials = log_of(result.path), events_of(result, "trial")
    again = tune(tmp_path, simulated(model={"us": 600.0}), force=True, sizes=(1,))
    assert again.status == "done" and all(one.us > 500.0 for one in decisions(again.table))
    assert min(us for event in events_of(again, "trial") for us in event["us"].values()) > 500.0
    kept = [event for event in read_events(log.with_suffix(".old")) if event.get("event") == "trial"]
    assert kept == trials


def test_a_second_run_for_the_same_table_is_refused_in_one_line_while_the_first_goes_on(tmp_path, simulated):
    device, refused = simulated(), []

    class SecondRun(Notes):
        def note(self, text: str) -> None:
            super().note(text)
            if "searched: " in text:
                with pytest.raises(
                    ValueError, match=r"^another run is tuning this head in .*out: wait for it, or "
                ) as it:
                    tune(tmp_path, device, sizes=(1,))
                refused.append(it)
                assert tune(tmp_path / "elsewhere", device, sizes=(1,)).status == "done"

    result = tune(tmp_path, device, SecondRun(), sizes=(1, 64))
    assert result.status == "done" and refused
    assert {event["entry"]["rows"] for event in events_of(result, "decided")} == {1, 64}


def test_a_worker_that_outlives_its_run_does_not_keep_others_from_tuning(tmp_path, simulated):
    held = hold(tmp_path / "table.lock")
    assert held is not None and hold(tmp_path / "table.lock") is None
    worker = WorkerProcess(workers(simulated()).measuring, tmp_path / "log")
    try:
        assert "device" in pool.ask_once(worker, {"op": "hello"}, 30.0)
        held.close()
        again = hold(tmp_path / "table.lock")
        assert again is not None
        again.close()
    finally:
        worker.end()


def test_a_run_that_has_raced_baselines_says_how_much_longer_they_take(tmp_path, simulated):
    device = simulated(
        costs={"gemm+flashinfer": {"1": 600.0, "64": 450.0}}, model={"us": 300.0}, baselines=True, noise=0.0
    )
    result = tune(tmp_path, device, sizes=(1, 64), baselines="on")
    us = {one.rows: one.us for one in decisions(result.table) if one.kind == PLAIN}
    one, many = 600.0 / us[1], 450.0 / us[64]
    assert f"; the fastest baseline takes plain {one:.2f}x at B=1, {many:.2f}x at B=64; truncate " in result.message
    assert 1.8 < one < 2.1 and 1.1 < many < 1.3


def test_the_built_in_choice_stays_where_nothing_is_faster_and_that_is_a_result(tmp_path, simulated):
    sizes = [(kind, rows) for kind in QUICK.kinds for rows in QUICK.sizes_of(kind) if rows in SIZES]
    costs = {label_of(QUICK.default(rows, kind), kind): {str(rows): 200.0} for kind, rows in sizes}
    result = tune(tmp_path, simulated(costs=costs))
    assert result.code == 0 and "the built-in choice won everywhere" in result.message
    assert result.table.entries == [] and sizes_in(result.table) == PLANNED


FAULTS = {
    "shared_memory": "shared_memory",
    "registers": "registers",
    "compile": "compile",
    "wrong": "incorrect",
    "illegal": "runtime",
    "crash": "runtime",
    "biased": "incorrect",
    "crash in race": "runtime",
    "hang": "timeout",
}


def test_configurations_that_fail_are_rejected_with_their_reasons_and_the_run_goes_on(tmp_path, simulated, monkeypatch):
    monkeypatch.setattr(search, "TRIAL_SECONDS", 1.0)
    monkeypatch.setattr(pool, "START_SECONDS", 3.0)
    studies = [key for key in QUICK.studies if key.path == "fused" and key.block_b == 16]
    places = [(key, place) for place in (1, 2, 3) for key in studies]
    faults = {
        label_of(QUICK.seeds(key)[place], key.kind): fault for fault, (key, place) in zip(FAULTS, places, strict=False)
    }
    # Without their faults they would win.
    result = tune(tmp_path, simulated(faults=faults, costs={label: {"1": 100.0} for label in faults}), sizes=(1,))
    assert (result.code, result.status) == (0, "done")
    rejected = {}
    for event in (*events_of(result, "trial"), *events_of(result, "refused")):
        if event["reason"]:
            label = label_of(config_of(event["path"], event["config"]), KIND_NAMES[event["kind"]])
            rejected[label] = event["reason"]
            assert event["detail"]
    assert rejected == {label: FAULTS[fault] for label, fault in faults.items()}
    assert sum(result.table.rejected.values()) == len(FAULTS)
    assert all(one.us > 150.0 for one in decisions(result.table))


def test_a_default_that_draws_wrong_tokens_makes_the_run_fail(tmp_path, simulated):
    result = tune(tmp_path, simulated(faults={label_of(DEFAULT, PLAIN): "wrong"}), sizes=(1,))
    assert result.code == 1 and "a built-in configuration failed" in result.message
    assert result.table.entry("plain", 1).default == ""
    again = tune(tmp_path, simulated(faults={label_of(DEFAULT, PLAIN): "wrong"}), sizes=(1,))
    assert (again.code, again.message) == (1, result.message)
    assert events_of(again, "decided") == events_of(result, "decided"), "nothing is decided twice"


@pytest.mark.full
def test_a_full_run_agrees_with_an_exhaustive_one_within_a_percent_and_with_another_full_one(tmp_path, simulated):
    class Part(Plan):
        kinds = (PLAIN, TRUNCATE)  # thousands of configurations less

    device = simulated(model={"us": 300.0, "rugged": 0.2}, noise=0.002)
    options = {"sizes": (64,), "baselines": "off", "plan": Part}
    oracle, first, second = (
        {one.kind: one for one in decisions(tune(tmp_path / name, device, effort=effort, **options).table)}
        for name, effort in (("a", "exhaustive"), ("b", "full"), ("c", "full"))
    )
    for kind in Part.kinds:
        best, one, other = oracle[kind], first[kind], second[kind]
        assert max(one.us, other.us) <= best.us * 1.01, kind
        # Either may have chosen a configuration that ties with its best one.
        assert one.takes == other.takes or abs(one.us / other.us - 1) < 0.015, kind


def test_a_device_that_cannot_be_used_is_one_line(tmp_path, simulated):
    with pytest.raises(ValueError, match=r"does not answer: .* no simulated device in "):
        tune(tmp_path, str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match="noisy GPU: others use 90 %"):
        tune(tmp_path, simulated(busy=90))
    with pytest.raises(ValueError, match=r"has compute capability 7\.5; expected 8\.0 or newer"):
        tune(tmp_path, simulated(device={**simulated_device()["device"], "cc": "7.5"}))
    assert tune(tmp_path, simulated(busy=90), allow_busy=True, sizes=(1,)).status == "done"


def test_times_that_scatter_too_much_are_a_table_and_an_exit_code(tmp_path, simulated):
    result = tune(tmp_path, simulated(noise=0.2), sizes=(1,))
    assert (result.code, result.status) == (1, "noisy GPU") and result.path.exists()
    again = tune(tmp_path, simulated(noise=0.2), sizes=(1,))
    assert (again.code, again.status) == (1, "noisy GPU"), "it is not forgotten"
    quiet = tune(tmp_path, simulated(), sizes=(1,))
    assert (quiet.code, quiet.status) == (0, "done"), "the same command measures it again"


def test_ctrl_c_keeps_what_is_finished_and_the_next_run_does_the_rest(tmp_path, simulated):
    result = tune(tmp_path, simulated(), Notes(interrupt="greedy"))
    assert (result.code, result.status) == (130, "interrupted") and result.table.provenance["complete"] is False
    done = sizes_in(result.table)
    assert done and done < PLANNED
    again = tune(tmp_path, simulated())
    decided = [(event["entry"]["kind"], event["entry"]["rows"]) for event in events_of(again, "decided")]
    assert again.status == "done" and len(decided) == len(set(decided)) == len(PLANNED), "nothing is decided twice"
    by_size = {(one.kind, one.rows): one for one in decisions(again.table)}
    assert all(by_size[one.kind, one.rows] == one for one in decisions(result.table))


def start(device: str, *arguments: str) -> subprocess.Popen:
    shape = ["--vocab", "151936", "--hidden", "4096", "--effort", "quick", "--compilers", "1"]
    arguments = (sys.executable, lab.simulated.__file__, device, "run", *shape, *arguments)
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_run_that_is_ended_during_its_races_exits_with_130_and_says_that_its_table_can_be_used(tmp_path, simulated):
    process = start(simulated(seconds_per_round=0.01), "--out", str(tmp_path / "out"))
    for line in process.stderr:
        if "truncate" in line:
            break
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    (message,) = out.splitlines()
    assert message.startswith("interrupted: ") and "the table can be used; run the same command again" in message
    assert load_table(message.rpartition("; ")[2])[0] is not None


def test_a_killed_run_loses_at_most_the_race_in_flight_and_its_workers_end_with_it(tmp_path, simulated):
    sizes = ",".join(map(str, SIZES))
    process = start(simulated(seconds_per_round=0.01), "--batch-sizes", sizes, "--out", str(tmp_path / "out"))
    for line in process.stderr:
        if "truncate" in line:
            break
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    workers = [f"/proc/{pid}" for pid in children.stdout.split()]
    until = time.monotonic() + 60
    while any(map(os.path.exists, workers)) and time.monotonic() < until:
        time.sleep(0.02)
    assert workers and not any(map(os.path.exists, workers))
    (log,) = (tmp_path / "out").glob("*.trials.jsonl")
    assert hold(log.with_suffix("").with_suffix(".lock")) is not None, "and the next run waits for nothing"
    with log.open("a") as file:
        file.write('{"event": "decided", "en')  # the line that it was writing
    assert sum(event.get("event") == "decided" for event in read_events(log)) >= 6
    result = tune(tmp_path, simulated())
    assert result.status == "done" and len(events_of(result, "decided")) == len(PLANNED)
    trials = [json.dumps([event["kind"], event["path"], event["config"]]) for event in events_of(result, "trial")]
    assert len(trials) == len(set(trials)), "nothing is measured twice"


def test_the_time_is_kept_and_what_is_done_by_then_is_a_table(tmp_path, simulated):
    """Without a budget this takes 45 s or more. On a busy machine the first one ends before the first race."""
    for budget in (2.0, 10.0):
        began = time.monotonic()
        result = tune(tmp_path, simulated(seconds_per_round=0.1), budget=budget)
        assert time.monotonic() - began < budget + 18 and result.status == "out of time"
        if result.code == 0:
            break
    assert result.code == 0


def test_no_time_for_a_race_is_said_with_what_to_do(tmp_path, simulated):
    result = tune(tmp_path, simulated(), budget=0.01)
    assert (result.code, result.status, result.path) == (2, "out of time", None)
    assert "before the first race, no table written: run the same command again with a --budget" in result.message


def test_several_gpus_share_the_work_and_find_the_same(tmp_path, simulated):
    device = simulated(costs={label_of(OTHER, PLAIN): {"1": 250.0}})
    result = tune(tmp_path, device, gpus=3, sizes=(1, 64))
    assert result.status == "done" and result.table.provenance["gpus"] == 3
    assert result.table.entry("plain", 1).configuration == OTHER
    assert len(list((tmp_path / "out" / "logs").glob("worker-*.log"))) == 3


def test_a_log_of_other_versions_is_set_aside(tmp_path, simulated):
    tune(tmp_path, simulated(), sizes=(1,))
    notes = Notes()
    result = tune(tmp_path, simulated(env=ENV | {"triton": "3.7.0"}), notes, sizes=(1,))
    assert result.status == "done" and any("the log of another device, version" in line for line in notes.lines)


def test_whatever_lies_in_the_folder_a_run_goes_on(tmp_path, simulated):
    """A search begins with the choices in other devices' tables. Pipes, folders and broken files are skipped."""
    folder = tmp_path / "out"
    folder.mkdir()
    table_file = folder / "fs2-NVIDIA_H200-V151936-D4096-tp1-bf16.json"
    minimal = {"schema": "flashsample-tune/2", "device": simulated_device()["device"]}
    minimal["head"] = {"vocab": HEAD.vocab, "hidden": HEAD.hidden, "dtype": "bf16", "tp": 1, "softcap": False}
    minimal["entries"] = [{"kind": "plain", "rows": 1, "path": "fused", "config": config_fields(OTHER)}]
    table_file.write_text(json.dumps(minimal))
    other = folder / "fs2-NVIDIA_H100-V1-D16-tp1-bf16.json"
    other.write_text(json.dumps(minimal))
    os.mkfifo(folder / "fs2-pipe-V1-D16-tp1-bf16.json")
    (folder / "fs2-folder.json").mkdir()
    (folder / "fs2-deep.json").write_text("[" * 10_000)
    os.mkfifo(log_of(table_file))
    result = tune(tmp_path, simulated(), sizes=(1,))
    assert result.status == "done" and sizes_in(result.table) >= {("plain", 1)}


def test_a_process_that_cannot_start_is_named_and_one_that_ends_too_often_is_given_up(tmp_path, monkeypatch):
    process = WorkerProcess(workers("/nonexistent").measuring, tmp_path / "log")
    answers = []

    def job():
        answers.append((yield {"op": "hello"}, 5.0))

    processes = Pool([process])
    processes.add(job())
    work_until([processes], lambda: bool(answers))
    processes.end()
    assert "no simulated device in /nonexistent" in answers[0]["error"]["detail"]
    monkeypatch.setattr(pool, "MAX_STARTS", 1)
    with pytest.raises(pool.PoolError, match="the process of SimulatedWorker ended 1 times; its output is in "):
        process.start()


# --- verify


def test_verify_passes_what_is_as_recorded_and_names_what_is_not(tmp_path, simulated):
    recorded = {"noise": 0.002, "costs": {"gemm": {"64": 320.0}, label_of(OTHER, PLAIN): {"1": 250.0}}}
    result = tune(tmp_path, simulated(**recorded), sizes=(1, 64))
    table = result.table
    code, line, replayed = verify(table, simulated(**recorded))
    assert (code, len(replayed)) == (0, len(sizes_in(table))) and "none slower than the built-in choice" in line
    assert {(one.kind, one.rows) for one in replayed} == sizes_in(table), "entries and confirmed sizes"
    slower = recorded | {"model": {"us": 330.0, "rugged": 0.08}}
    code, line, replayed = verify(table, simulated(**slower))
    assert code == 1 and "from the recorded time" in line
    confirmed = next(
        one for one in replayed if one.kind in table.confirmed and one.rows in table.confirmed[one.kind].rows
    )
    assert confirmed.off == pytest.approx(0.1, abs=0.02) and confirmed.reason
    slow = {**recorded, "costs": recorded["costs"] | {label_of(DEFAULT, PLAIN): {"1": 200.0}}}
    code, line, _ = verify(table, simulated(**slow))
    assert code == 1 and "slower than the built-in choice" in line
    code, line, _ = verify(table, simulated(device=simulated_device()["device"] | {"name": "NVIDIA H100"}))
    assert code == 2 and "the table is for NVIDIA H200, this is NVIDIA H100" in line


def test_verify_passes_a_device_that_is_slower_as_a_whole(tmp_path, simulated):
    """Power and heat move a large batch and the GEMM beside it alike."""
    result = tune(tmp_path, simulated(noise=0.002), sizes=(64,))
    code, _, replayed = verify(result.table, simulated(noise=0.002, model={"us": 330.0, "rugged": 0.08}))
    assert code == 0 and all(one.off > 0.05 and abs(one.off_gemm) < 0.03 for one in replayed)


def test_verify_names_what_fails_and_what_has_no_time(tmp_path, simulated):
    result = tune(tmp_path, simulated(costs={label_of(OTHER, PLAIN): {"1": 250.0}}), sizes=(1,))
    device = simulated(costs={label_of(OTHER, PLAIN): {"1": 250.0}}, faults={label_of(OTHER, PLAIN): "crash in race"})
    _, _, replayed = verify(result.table, device)
    assert next(one.reason for one in replayed if one.kind == "plain") == "runtime: the process ended: exit code 139"
    untimed = msgspec.structs.replace(result.table, entries=[make_entry("plain", 1, OTHER)], confirmed={})
    _, line, _ = verify(untimed, simulated())
    assert "the table has no time of it" in line
