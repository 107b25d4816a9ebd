"""What the autotuner promises, measured on this GPU: prints a table, writes JSON.

    python benchmarks/tuning.py --out benchmarks/results/h200-tuning.json

runs       wall time of `tune run`, from empty caches; a second one does nothing
resume     a run that is killed in the middle and started again: what is kept, what is done again
agreement  two independent runs: where they differ, both choices race each other
regret     a part of the space, swept, against what the search chooses in it
sweep      batch sizes at and between the buckets: the tuned choice against the built-in default
replay     `tune verify` in a fresh process

``--only`` runs some of them and ``--keep`` leaves the others in the file as they are. What one section has tuned lies
under --work and is used by the next; one that runs alone tunes for itself. A call ends within --limit seconds: a
section that does not is not written, and goes on in the next call. ``--surface`` takes a recorded cost surface instead
of a GPU: that tests the benchmark, and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sgl_flashsample.autotune import measure
from sgl_flashsample.autotune.names import key_of
from sgl_flashsample.autotune.plan import BUCKETS, EFFORTS, LARGEST_SCREENED, Plan
from sgl_flashsample.autotune.progress import Plain
from sgl_flashsample.autotune.race import t_quantile
from sgl_flashsample.autotune.run import Options
from sgl_flashsample.autotune.run import run as tune
from sgl_flashsample.autotune.search_commands import batches_of
from sgl_flashsample.autotune.trials import config_of, read
from tables import tuning_table
from tuning_races import Bench, Deadline, PartPlan, RaceError, Ratio, best_by_half, compare, median, served, tie_band

from sgl_flashsample.table import Bucket, HeadShape, Table
from sgl_flashsample.work import Work

BETWEEN = (*range(1, 17), 20, 24, 31, 32, 33, 48, 64, 65, 96, 127, 128, 129, 200, 256, 257, 384, 511, 512)
AGREEMENT_ROUNDS, SWEEP_ROUNDS, REGRET_ROUNDS = 30, 25, 60
RACED = 32  # of a sweep, the fastest by the screening
ALPHA = 0.05  # of everything that one section finds
PART_SECONDS = 240.0  # of a run in a part of the space
RESERVE = 20.0  # seconds of a call that stay for ending it
POLL_SECONDS = 0.01


class SectionError(RuntimeError):
    """Why a section has no result; one line."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One head of one call. folder: of this head, where tables and logs are kept between calls."""

    head: HeadShape
    folder: Path
    deadline: Deadline
    surface: str | None = None
    efforts: tuple[str, ...] = ("quick", "full")
    effort: str = "full"
    batch_sizes: tuple[int, ...] | None = None
    kill_after: int = 20
    between: tuple[int, ...] = BETWEEN
    table: Path | None = None

    def cache(self, name: str) -> Path:
        """Triton's, of the run in folder ``name``."""
        return self.folder / name / "triton"

    def command(self, name: str, effort: str) -> list[str]:
        shape = ["--vocab", str(self.head.vocab), "--hidden", str(self.head.hidden), "--dtype", self.head.dtype]
        found = [*TUNE, "run", *shape, "--effort", effort, "--out", str(self.folder / name), "--json"]
        found += ["--batch-sizes", ",".join(map(str, self.batch_sizes))] if self.batch_sizes else []
        return found + (["--surface", self.surface] if self.surface else [])

    def tune(self, name: str, effort: str) -> tuple[dict[str, Any], float]:
        """What `tune run` says, and its seconds. A run that is killed by the deadline is resumed by the next call.
        Raises SectionError."""
        began = time.monotonic()
        said = self.call(self.command(name, effort), self.cache(name), self.folder / f"{name}.log")
        if not said.get("file"):
            raise SectionError(said.get("message") or f"no table; see {self.folder / name}.log")
        return said, time.monotonic() - began

    def call(self, command: list[str], cache: Path, log: Path) -> dict[str, Any]:
        """The JSON that ``command`` prints. Raises SectionError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            try:
                done = subprocess.run(
                    command,
                    env=environment(cache),
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    timeout=max(1.0, self.deadline.left),
                )
            except subprocess.TimeoutExpired:
                raise SectionError(f"out of time, as far as it came in {self.folder}; the next call goes on") from None
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise SectionError(f"exit code {done.returncode}; see {log}") from None

    def table_at(self, name: str) -> Table:
        (path,) = (self.folder / name).glob("fs1,*.json")
        return Table.loads(path.read_text())

    def wanted(self) -> tuple[Table, Path, Path]:
        """The table that is put to the test, its file and the cache of its kernels: as given, or the first run's, which
        is made if it is not there."""
        if self.table is not None:
            return Table.loads(self.table.read_text()), self.table, self.folder / "triton"
        said, _ = self.tune(self.effort, self.effort)
        return self.table_at(self.effort), Path(said["file"]), self.cache(self.effort)

    def bench(self, cache: Path) -> contextlib.AbstractContextManager[Bench]:
        return Bench.of(self.head, self.surface, self.folder / "races.log", cache)

    def started_afresh(self, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def plan(self, table: Table) -> Plan:
        return Plan(table.device, table.head, EFFORTS["full"])


TUNE = [sys.executable, "-m", "sgl_flashsample.cli", "tune"]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "TRITON_CACHE_DIR": str(cache)}


def runs(setting: Setting) -> dict[str, Any]:
    found = {}
    for effort in setting.efforts:
        setting.started_afresh(effort)
        said, seconds = setting.tune(effort, effort)
        path = Path(said["file"])
        before = digest(path), path.stat().st_mtime_ns
        again, again_seconds = setting.tune(effort, effort)
        table = setting.table_at(effort)
        found[effort] = {
            "seconds": round(seconds, 1),
            "status": said["status"],
            "budget": EFFORTS[effort].budget,
            "trials": table.provenance.get("trials"),
            "buckets": count_of(table),
            "rejected": len(table.rejected),
            "again_seconds": round(again_seconds, 1),
            "again_status": again["status"],
            "untouched": before == (digest(path), path.stat().st_mtime_ns),
        }
    return found


def resume(setting: Setting) -> dict[str, Any]:
    """Killed once so many buckets are in the log, whatever it was doing then."""
    name, effort = "resume", setting.efforts[0]
    setting.started_afresh(name)
    setting.folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (setting.folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            setting.command(name, effort), env=environment(setting.cache(name)), stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            while process.poll() is None and len(of_kind(setting.folder / name, "bucket")) < setting.kill_after:
                if setting.deadline.left <= 0:
                    raise SectionError("out of time before the run was killed")
                time.sleep(POLL_SECONDS)
            killed = process.poll() is None
        finally:
            process.kill()
            process.wait()
    killed_seconds = time.monotonic() - began
    if not killed:
        raise SectionError(f"the run was over before {setting.kill_after} buckets were finished; lower --kill-after")
    before = {kind: of_kind(setting.folder / name, kind) for kind in ("bucket", "trial", "gtest")}
    left_behind = setting.table_at(name)  # raises for a file that is no whole table
    said, seconds = setting.tune(name, effort)
    after = {kind: of_kind(setting.folder / name, kind) for kind in before}
    table = setting.table_at(name)
    return {
        "effort": effort,
        "killed_after_seconds": round(killed_seconds, 1),
        "resumed_seconds": round(seconds, 1),
        "status": said["status"],
        "finished_when_killed": len(before["bucket"]),
        "in_the_table_when_killed": count_of(left_behind),
        "kept": sum(
            table.classes.get(event["work"], {}).get(event["batch"]) == Bucket(**event["bucket"])
            for event in before["bucket"]
        ),
        "buckets": count_of(table),
        **{f"{kind}s_done_again": done_again(after[kind]) for kind in before},
    }


def agreement(setting: Setting) -> dict[str, Any]:
    first, _, cache = setting.wanted()
    _, seconds = setting.tune("again", setting.effort)
    second, plan = setting.table_at("again"), setting.plan(first)
    places = {(work, rows) for table in (first, second) for work, buckets in table.classes.items() for rows in buckets}
    same, differing = 0, []
    with setting.bench(cache) as bench:
        for work, rows in sorted(places):
            one, other = (served(table, plan, rows, Work(work)) for table in (first, second))
            if one == other:
                same += 1
                continue
            in_time(setting)
            samples, clocks = bench.race(Work(work), rows, [one, other], AGREEMENT_ROUNDS)
            ours, theirs = samples[key_of(one)], samples[key_of(other)]
            ratio, band = compare(ours, theirs, clocks), tie_band(min(median(ours), median(theirs)))
            differing.append(
                {
                    "work": work,
                    "batch": rows,
                    "first": key_of(one),
                    "second": key_of(other),
                    "first_us": median(ours),
                    "second_us": median(theirs),
                    "band": round(band, 5),
                    "verdict": ratio.against(band),
                    **rounded(ratio),
                }
            )
    verdicts = {verdict: sum(one["verdict"] == verdict for one in differing) for verdict in VERDICTS}
    return {
        "second_seconds": round(seconds, 1),
        "places": len(places),
        "same": same,
        **verdicts,
        "differing": differing,
    }


VERDICTS = ("inside", "open", "outside")


def regret(setting: Setting) -> dict[str, Any]:
    """The sweep ranks all of the part by its screening; the fastest of them and the search's choice then race."""
    chosen = _tune_part(setting, "part-search", "full")
    _tune_part(setting, "part-sweep", "exhaustive")
    space = PartPlan(chosen.device, chosen.head, EFFORTS["full"]).space(PartPlan.STUDY)
    trials = of_kind(setting.folder / "part-sweep", "trial")
    timed = [trial for trial in trials if trial["us"]]
    tried = len(of_kind(setting.folder / "part-search", "trial"))
    found = []
    with setting.bench(setting.cache("part")) as bench:
        for rows, bucket in chosen.classes[PartPlan.STUDY.work].items():
            if rows not in PartPlan.BUCKETS:
                continue
            in_time(setting)
            probe = str(min(map(int, timed[0]["us"]), key=lambda size, rows=rows: abs(size - rows)))
            ranked = sorted(timed, key=lambda trial, probe=probe: trial["us"][probe])[:RACED]
            choice = chosen.configs[bucket.use].launch
            assert choice is not None
            raced = [choice, *(config_of(trial["path"], trial["config"]) for trial in ranked)]
            samples, clocks = bench.race(PartPlan.STUDY.work, rows, raced, REGRET_ROUNDS)
            best, ratio = best_by_half(samples, clocks, key_of(choice))
            found.append(
                {
                    "batch": rows,
                    "choice": key_of(choice),
                    "choice_us": median(samples[key_of(choice)]),
                    "best": best,
                    "best_us": median(samples[best]),
                    "raced": len(samples),
                    **rounded(ratio),
                }
            )
    return {
        "study": str(PartPlan.STUDY),
        "fixed": {name: list(values) for name, values in PartPlan.FIXED.items()},
        "space": len(space.points),
        "swept": len(trials),
        "timed": len(timed),
        "tried_by_the_search": tried,
        "buckets": found,
    }


def _tune_part(setting: Setting, name: str, effort: str) -> Table:
    """Raises SectionError."""
    options = Options(
        setting.head,
        setting.folder / name,
        effort=effort,
        budget=max(1.0, min(PART_SECONDS, setting.deadline.left - 60.0)),
        surface=setting.surface,
        rivals=False,
        buckets=PartPlan.BUCKETS,
        plan=PartPlan,
    )
    with (setting.folder / f"{name}.log").open("a") as log, _environ(environment(setting.cache("part"))):
        result = tune(options, Plain(log))
    if result.status not in ("done", "up to date"):
        raise SectionError(f"{name}: {result.message}")
    return setting.table_at(name)


@contextlib.contextmanager
def _environ(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def sweep(setting: Setting) -> dict[str, Any]:
    table, path, cache = setting.wanted()
    plan = setting.plan(table)
    sizes = [(work, rows) for work in plan.works for rows in setting.between]
    places = [
        (work, rows, served(table, plan, rows, work))
        for work, rows in sizes
        if not work.screened or rows <= LARGEST_SCREENED
    ]
    differing = [place for place in places if place[2] != plan.default(place[1], place[0])]
    found, failed = [], []
    with setting.bench(cache) as bench:
        for work, rows, tuned in differing:
            in_time(setting)
            default = plan.default(rows, work)
            try:
                samples, clocks = bench.race(work, rows, [tuned, default], SWEEP_ROUNDS)
            except RaceError as error:
                failed.append(str(error))
                continue
            ratio = compare(samples[key_of(tuned)], samples[key_of(default)], clocks)
            found.append(
                {
                    "work": work.value,
                    "batch": rows,
                    "tuned": key_of(tuned),
                    "tuned_us": median(samples[key_of(tuned)]),
                    "default_us": median(samples[key_of(default)]),
                    "slower": slower(ratio, len(clocks), len(differing)),
                    **rounded(ratio),
                }
            )
    return {
        "table": path.name,
        "places": len(places),
        "as_the_default": len(places) - len(differing),
        "slower": sum(one["slower"] for one in found),
        "failed": failed,
        "raced": found,
    }


def slower(ratio: Ratio, rounds: int, races: int) -> bool:
    """Beyond noise: the chance that any of so many races says so of two that are equal is ``ALPHA``."""
    return ratio.off / ratio.se > t_quantile(1 - ALPHA / races, rounds - 1)


def replay(setting: Setting) -> dict[str, Any]:
    _, path, cache = setting.wanted()
    command = [*TUNE, "verify", str(path), "--json", *(["--surface", setting.surface] if setting.surface else [])]
    began = time.monotonic()
    said = setting.call(command, cache, setting.folder / "verify.log")
    rows = said["buckets"]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "table": path.name,
        "code": said["code"],
        "message": said["message"],
        "worst_off": max((abs(row["off"]) for row in rows), default=None),
        "worst_off_beside_gemm": max((abs(row["off_gemm"]) for row in rows), default=None),
        "problems": sum(bool(row["problem"]) for row in rows),
        "buckets": rows,
    }


SECTIONS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "runs": runs,
    "resume": resume,
    "agreement": agreement,
    "regret": regret,
    "sweep": sweep,
    "replay": replay,
}


def in_time(setting: Setting) -> None:
    """Raises SectionError where the call must end."""
    if setting.deadline.left <= RESERVE:
        raise SectionError("out of time between two races; the next call begins the section again")


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Events of the one log in ``folder``; none where it does not exist yet."""
    return [event for log in folder.glob("*.trials.jsonl") for event in read(log) if event.get("kind") == kind]


def done_again(events: Sequence[dict[str, Any]]) -> int:
    """How many events are about what an earlier one was about."""
    about = [json.dumps([event.get(name) for name in ("work", "batch", "config", "label")]) for event in events]
    return len(about) - len(set(about))


def count_of(table: Table) -> int:
    return sum(map(len, table.classes.values()))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rounded(ratio: Ratio) -> dict[str, float]:
    return {name: round(value, 6) for name, value in dataclasses.asdict(ratio).items()}


def kept(out: Path, device: str | None) -> dict[str, Any]:
    """The results in ``out`` so far. Raises ValueError where they cannot be added to."""
    try:
        result = json.loads(out.read_text())
        known = result["env"].get("device")
        assert isinstance(result["sections"], dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise ValueError(f"{out} is no result of benchmarks/tuning.py to keep") from None
    if known != device:
        raise ValueError(f"{out} is of {known}; expected {device}")
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write, after every section")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--keep", action="store_true", help="keep the file's sections that are not measured now")
    parser.add_argument("--heads", nargs="+", type=head_of, default=[HeadShape(151936, 4096, "bf16")], metavar="VxD")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "flashsample-tuning")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds of this call (default: 570)")
    parser.add_argument("--table", type=Path, help="of sweep and replay, instead of the one that is tuned here")
    parser.add_argument("--efforts", nargs="+", choices=EFFORTS, default=["quick", "full"], help="of runs and resume")
    parser.add_argument("--effort", choices=EFFORTS, default="full", help="of the others (default: full)")
    parser.add_argument("--batch-sizes", type=batches_of, help="buckets to tune, instead of the tuner's ten")
    parser.add_argument("--between", type=batches_of, default=BETWEEN, help="batch sizes of sweep")
    parser.add_argument("--kill-after", type=int, default=2 * len(BUCKETS), help="finished buckets (default: 20)")
    parser.add_argument("--surface", help="a recorded cost surface instead of a GPU")
    return parser.parse_args()


def head_of(text: str) -> HeadShape:
    """ "151936x4096"."""
    vocab, _, hidden = text.partition("x")
    if not (vocab.isdigit() and hidden.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no head; expected such as 151936x4096")
    return HeadShape(int(vocab), int(hidden), "bf16")


def main() -> None:
    options, deadline = parse(), time.monotonic()
    deadline = Deadline(deadline + options.limit)
    env: dict[str, Any] = {"surface": Path(options.surface).name} if options.surface else measure.environment()
    result: dict[str, Any] = {"sections": {}}
    try:
        if options.keep and options.out.exists():
            result = kept(options.out, env.get("device"))
    except ValueError as error:
        sys.exit(f"error: {error}")
    words = (Path(word).name if word.startswith("/") else word for word in sys.argv)
    about = {"date": datetime.date.today().isoformat(), "command": " ".join(["python", *words])}
    result["env"] = env | about
    failed = []
    for head in options.heads:
        name = f"{head.vocab}x{head.hidden}"
        fields = ("surface", "effort", "batch_sizes", "kill_after", "between", "table")
        setting = Setting(
            head,
            options.work / name,
            deadline,
            efforts=tuple(options.efforts),
            **{field: getattr(options, field) for field in fields},
        )
        for section in options.only:
            began = time.monotonic()
            try:
                found = SECTIONS[section](setting)
            except RuntimeError as error:
                failed.append(f"{section} {name}: {error}")
                print(failed[-1], flush=True)
                continue
            took = {"section_seconds": round(time.monotonic() - began, 1)}
            result["sections"].setdefault(section, {})[name] = found | took | about
            save(result, options.out)
            print(f"{section} {name}: {took['section_seconds']} s", flush=True)
    if options.out.exists():
        print(tuning_table(options.out))
    sys.exit(f"error: {len(failed)} sections have no result: {'; '.join(failed)}" if failed else 0)


def save(result: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(out)


if __name__ == "__main__":
    main()
