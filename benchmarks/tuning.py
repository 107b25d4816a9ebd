"""The promises of the autotuner, measured on this GPU: prints a table, writes JSON.

    python benchmarks/run.py tuning --out benchmarks/results/h200-tuning.json

runs       wall time of `tune run`, from empty caches; a second one does nothing
regret     choices of tables of both efforts, and built-in ones, against those that the longer search timed best
proposals  choices of searches with the sampler's share of their trials and without, in a part of the space, swept
sweep      batch sizes at and between the measured ones: the tuned choice against the built-in one
replay     `tune verify` in a fresh process

``--only`` runs some of them and ``--keep`` leaves the others in the file. What one section has tuned lies under --work
and is used by the next; one that runs alone tunes for itself. A call ends within --limit seconds: a section that does
not is not written, and goes on in the next call. ``--fast``: quick runs alone, and only the sections that race nothing
for long (runs, replay). ``--dry-run`` takes a simulated device: that tests the benchmark, and measures nothing.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import DRY_RUN, Benchmark, Result
from lab.simulated import EXAMPLE, measuring_on
from lab.simulated import workers as workers_of

from sgl_flashsample.autotune import pool
from sgl_flashsample.autotune.cli import sizes_of
from sgl_flashsample.autotune.decisions import device_and_head, traits_of
from sgl_flashsample.autotune.labels import config_of, key_of, setup_request
from sgl_flashsample.autotune.plan import EFFORTS, Effort, Plan, StudyKey
from sgl_flashsample.autotune.pool import PoolError, ask_once, visible_gpu
from sgl_flashsample.autotune.progress import Progress
from sgl_flashsample.autotune.race import Ratio, robust_mean, t_quantile
from sgl_flashsample.autotune.run import Options
from sgl_flashsample.autotune.run import run as tune
from sgl_flashsample.autotune.space import FUSED, Space
from sgl_flashsample.autotune.trials import read_events
from sgl_flashsample.dispatch import DispatchTable
from sgl_flashsample.kinds import KIND_NAMES, MAX_SCREENED_ROWS, PLAIN, BatchKind, Config
from sgl_flashsample.tables.lookup import Match, TableFile, Target, dispatch_of
from sgl_flashsample.tables.schema import Device, HeadShape, Table

BETWEEN = (*range(1, 17), 20, 24, 31, 32, 33, 48, 64, 65, 96, 127, 128, 129, 200, 256, 257, 384, 511, 512)
SWEEP_ROUNDS, REGRET_ROUNDS, PROPOSALS_ROUNDS = 25, 30, 60
RACED = 32  # configurations of a sweep, the fastest by the screening
TRIED = 6  # the same of a search, of each path
REGRET_SIZES = (1, 8, 16, 48, 96, 200)
REGRET_KINDS = tuple(KIND_NAMES[name] for name in ("plain", "plain+screen", "truncate", "truncate+screen"))
SHARES = {"quick": 1 / 3, "full": EFFORTS["full"].proposed}  # of the sampler in a search's trials
ALPHA = 0.05  # chance that one section calls anything slower that is not
PART_SECONDS = 240.0  # budget of a run in a part of the space
RESERVE = 20.0  # seconds of a call that stay for ending it
SETUP_SECONDS, EACH_SECONDS, ROUNDS_SECONDS = 30.0, 8.0, 60.0
TUNE = [sys.executable, "-m", "sgl_flashsample.cli", "tune"]
SIMULATED_TUNER = Path(__file__).resolve().parents[1] / "tests" / "lab" / "simulated.py"


class SectionError(RuntimeError):
    """Why a section has no result; one line."""


class RaceError(SectionError):
    """The process that measures could not; one line."""


class PartPlan(Plan):
    """One study of a plan: a plain draw on the fused path of up to 16 rows, with one shape of its loops."""

    STUDY = StudyKey(FUSED, PLAIN, 16)
    FIXED = {"flatten": (True,)}  # noqa: RUF012
    SIZES = (1, 8, 16)

    @property
    def kinds(self) -> tuple[BatchKind, ...]:
        return (self.STUDY.kind,)

    @functools.cached_property
    def studies(self) -> list[StudyKey]:
        return [self.STUDY]

    def space(self, key: StudyKey) -> Space:
        return Part(self.limits, key.path, key.block_b, key.kind.truncate, key.kind.edit)


@dataclasses.dataclass(frozen=True)
class Part(Space):
    """A space reduced to what can be swept."""

    @functools.cached_property
    def axes(self) -> dict[str, tuple[Any, ...]]:
        return {**super().axes, **PartPlan.FIXED}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One head of one call. folder: of this head, where tables and logs are kept between calls. until: the end of the
    call, by ``time.monotonic``."""

    head: HeadShape
    folder: Path
    until: float
    simulated: str | None = None
    efforts: tuple[str, ...] = ("quick", "full")
    effort: str = "full"
    sizes: tuple[int, ...] | None = None
    between: tuple[int, ...] = BETWEEN
    table: Path | None = None

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def require_time(self) -> None:
        """Raises SectionError where the call must end."""
        if self.left <= RESERVE:
            raise SectionError("out of time between two races; the next call begins the section again")

    def environment(self, name: str) -> dict[str, str]:
        """Variables with Triton's cache of the run in folder ``name``."""
        return {"TRITON_CACHE_DIR": str(self.folder / name / "triton")}

    def command(self, name: str, effort: str) -> list[str]:
        shape = ["--vocab", str(self.head.vocab), "--hidden", str(self.head.hidden), "--dtype", self.head.dtype]
        command = [*self.tuner, "run", *shape, "--effort", effort, "--out", str(self.folder / name), "--json"]
        command += ["--batch-sizes", ",".join(map(str, self.sizes))] if self.sizes else []
        return command + (["--compilers", "1"] if self.simulated else [])

    @property
    def tuner(self) -> list[str]:
        """The words before a command of ``tune`` and its options."""
        return TUNE if self.simulated is None else [sys.executable, str(SIMULATED_TUNER), self.simulated]

    def tune(self, name: str, effort: str) -> tuple[dict[str, Any], float]:
        """The answer of `tune run`, and its seconds. A run that is killed by the limit is resumed by the next call.
        Raises SectionError."""
        began = time.monotonic()
        said = self.call(self.command(name, effort), name, self.folder / f"{name}.log")
        if not said.get("file"):
            raise SectionError(said.get("message") or f"no table; see {self.folder / name}.log")
        return said, time.monotonic() - began

    def call(self, command: list[str], name: str, log: Path) -> dict[str, Any]:
        """The JSON that ``command`` prints. Raises SectionError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, **self.environment(name)}
        with log.open("ab") as errors:
            try:
                done = subprocess.run(
                    command, env=variables, stdout=subprocess.PIPE, stderr=errors, timeout=max(1.0, self.left)
                )
            except subprocess.TimeoutExpired:
                raise SectionError("out of time; the next call with this --work goes on") from None
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise SectionError(f"exit code {done.returncode}; see {log}") from None

    def table_at(self, name: str) -> Table:
        (path,) = (self.folder / name).glob("fs*.json")
        return Table.loads(path.read_text())

    def wanted(self) -> tuple[Table, Path, str]:
        """The table that is put to the test, its file and the run whose kernels are compiled: as given, or the first
        run's, which is made if it is not there."""
        if self.table is not None:
            return Table.loads(self.table.read_text()), self.table, "given"
        said, _ = self.tune(self.effort, self.effort)
        return self.table_at(self.effort), Path(said["file"]), self.effort

    @contextlib.contextmanager
    def racing(self, name: str) -> Iterator[Racer]:
        """name: of the run whose kernels are compiled."""
        workers = workers_of(self.simulated) if self.simulated else pool.WORKERS
        variables = {} if self.simulated else {"CUDA_VISIBLE_DEVICES": visible_gpu(0), **self.environment(name)}
        process = pool.WorkerProcess(workers.measuring, self.folder / "races.log", variables)
        try:
            yield Racer(self.head, process)
        finally:
            process.end()

    def start_afresh(self, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Events in the log of the run in folder ``name``; none where it does not exist yet."""
        logs = (self.folder / name).glob("*.trials.jsonl")
        return [line for log in logs for line in read_events(log) if line.get("event") == event]


@dataclasses.dataclass(frozen=True)
class Racer:
    """Asks one process that measures, as the autotuner's, and waits."""

    head: HeadShape
    process: pool.WorkerProcess

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            answer = ask_once(self.process, request, seconds)
        except PoolError as error:
            raise RaceError(str(error)) from None
        if "error" in answer:
            raise RaceError(f"{request['op']}: {answer['error']['detail']}")
        return answer

    def race(
        self, kind: BatchKind, rows: int, configs: Sequence[Config], rounds: int
    ) -> tuple[dict[str, list[float]], list[float]]:
        """Microseconds of each by its key, and the clock, round by round. Raises RaceError where one cannot run."""
        raced = {key_of(config): config for config in configs}
        request = setup_request(self.head, kind, rows, raced)
        failed = self._ask(request, SETUP_SECONDS + EACH_SECONDS * len(raced))["failed"]
        if failed:
            name, error = next(iter(failed.items()))
            raise RaceError(f"{kind} {rows}: {name}: {error['detail']}")
        answer = self._ask({"op": "rounds", "names": list(raced), "rounds": rounds, "first": 0}, ROUNDS_SECONDS)
        return answer["samples"], answer["clocks"]


def dispatch_for(table: Table) -> DispatchTable:
    """The choices of a server with ``table``."""
    device, head = device_and_head(table)
    traits = traits_of(device, head)
    assert traits is not None
    return dispatch_of(TableFile(table, "", "", Match.EXACT), Target(device, head, {}), traits)[0]


def places(table: Table) -> set[tuple[BatchKind, int]]:
    """Kind and size of each decision."""
    return {(KIND_NAMES[kind], rows) for kind in table.kinds for rows in table.sizes(kind)}


def best_by_half(samples: Mapping[str, Sequence[float]], clocks: Sequence[float], choice: str) -> tuple[str, Ratio]:
    """The fastest by the even rounds, and ``choice`` over it by the odd ones: the luck that makes one of many look best
    does not count for it."""
    mean = {name: robust_mean([math.log(us) for us in values[::2]])[0] for name, values in samples.items()}
    best = min(mean, key=lambda name: (mean[name], name))
    if best == choice:
        return best, Ratio(0.0, 0.0, 0.0, 0.0)
    return best, Ratio.of(samples[choice][1::2], samples[best][1::2], clocks[1::2])


def compared(
    kind: BatchKind, rows: int, name: str, other: str, samples: Mapping[str, Sequence[float]], ratio: Ratio
) -> dict[str, Any]:
    """A row of a result: two configurations in one race. ratio: of the first to the other."""
    us, other_us = (round(statistics.median(samples[key]), 3) for key in (name, other))
    names = {"config": name, "us": us, "other": other, "other_us": other_us}
    return {"kind": str(kind), "batch": rows, **names, **ratio.rounded}


def runs(setting: Setting) -> dict[str, Any]:
    by_effort = {}
    for effort in setting.efforts:
        setting.start_afresh(effort)
        said, seconds = setting.tune(effort, effort)
        path = Path(said["file"])
        before = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns
        again, again_seconds = setting.tune(effort, effort)
        table = setting.table_at(effort)
        by_effort[effort] = {
            "seconds": round(seconds, 1),
            "status": said["status"],
            "budget": EFFORTS[effort].budget,
            "trials": table.provenance.get("trials"),
            "sizes": len(places(table)),
            "rejected": sum(table.rejected.values()),
            "again_seconds": round(again_seconds, 1),
            "again_status": again["status"],
            "untouched": before == (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns),
        }
    summary = (
        f"{effort} {run['seconds']:.0f} s ({run['trials']} configurations, {run['sizes']} batch sizes), again "
        f"{run['again_seconds']:.0f} s, file {'untouched' if run['untouched'] else 'CHANGED'}"
        for effort, run in by_effort.items()
    )
    return {"summary": "; ".join(summary), **by_effort}


def regret(setting: Setting) -> dict[str, Any]:
    """At measured sizes and between them. What the longer search timed fastest races beside the choices."""
    tables: dict[str, Table] = {}
    for effort in setting.efforts:
        setting.tune(effort, effort)
        tables[effort] = setting.table_at(effort)
    longest = setting.efforts[-1]
    for effort in setting.efforts[:-1]:
        shutil.copytree(setting.folder / effort / "triton", setting.folder / longest / "triton", dirs_exist_ok=True)
    choosers: dict[str, Callable[[int, BatchKind], Config]] = {
        effort: dispatch_for(table).lookup for effort, table in tables.items()
    }
    choosers["built-in"] = dispatch_for(tables[longest]).default
    plan = Plan(*device_and_head(tables[longest]), EFFORTS[longest])
    timed = [trial for trial in setting.events(longest, "trial") if trial["us"]]
    sizes = []
    with setting.racing(longest) as racer:
        for kind, rows in itertools.product(REGRET_KINDS, REGRET_SIZES):
            if rows > MAX_SCREENED_ROWS and kind.screen:
                continue
            setting.require_time()
            choices = {by: choose(rows, kind) for by, choose in choosers.items()}
            raced = [*choices.values(), *_tried(plan, timed, rows, kind)]
            samples, clocks = racer.race(kind, rows, raced, REGRET_ROUNDS)
            for by, choice in choices.items():
                best, ratio = best_by_half(samples, clocks, key_of(choice))
                row = compared(kind, rows, key_of(choice), best, samples, ratio)
                sizes.append({"by": by} | row | {"raced": len(samples)})
    words = []
    for by in choosers:
        offs = {(size["kind"], size["batch"]): size["off"] for size in sizes if size["by"] == by}
        worst = max(offs, key=lambda place: offs[place])
        at = f"{100 * offs[worst]:.1f} % at {worst[0]} {worst[1]}"
        mean = statistics.fmean(max(0.0, off) for off in offs.values())
        words.append(f"{by} {100 * mean:.2f} % on average, at most {at}")
    return {"summary": "; ".join(words), "sizes": sizes}


def _tried(plan: Plan, timed: list[dict[str, Any]], rows: int, kind: BatchKind) -> list[Config]:
    """The fastest configurations of each path that a search has timed for such batches."""
    by_path: dict[str, list[tuple[float, Config]]] = collections.defaultdict(list)
    for trial in timed:
        config = config_of(trial["path"], trial["config"])
        key = plan.study_of(config, KIND_NAMES[trial["kind"]])
        if plan.serves(key, rows, kind):
            by_path[trial["path"]].append((_us_near(trial, rows), config))
    return [config for of in by_path.values() for _, config in sorted(of)[:TRIED]]


def _us_near(trial: dict[str, Any], rows: int) -> float:
    """The time of the next larger size at which ``trial`` was timed, else of the largest."""
    sizes = sorted(map(int, trial["us"]))
    return trial["us"][str(next((size for size in sizes if size >= rows), sizes[-1]))]


def proposals(setting: Setting) -> dict[str, Any]:
    """Each search's choices race beside the fastest of the sweep."""
    arms = [(effort, with_share) for effort in ("quick", "full") for with_share in (False, True)]
    tables = []
    for effort, with_share in arms:
        name = f"part-{effort}-{'with' if with_share else 'without'}-share"
        share = SHARES[effort] if with_share else 0.0
        chosen = _tune_part(setting, name, effort, share)
        trials = setting.events(name, "trial")
        proposed = sum(trial["proposed"] for trial in trials)
        about = {"effort": effort, "share": round(share, 3), "trials": len(trials), "proposed": proposed}
        tables.append((chosen, about))
    _tune_part(setting, "part-sweep", "exhaustive")
    sizes, words = _regrets(setting, tables), []
    for _, about in tables:
        off = statistics.fmean(size["off"] for size in sizes if about.items() <= size.items())
        proposed = f"{about['proposed']} of {about['trials']} configurations proposed"
        words.append(f"{about['effort']} {100 * off:.2f} % with {proposed}")
    return {"summary": "; ".join(words), "study": str(PartPlan.STUDY), "sizes": sizes}


def _regrets(setting: Setting, tables: Sequence[tuple[Table, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The choices of each table over the fastest of the sweep, in one race of all per size. tables: with the fields
    that name them in their rows."""
    kind, sizes = PartPlan.STUDY.kind, []
    timed = [trial for trial in setting.events("part-sweep", "trial") if trial["us"]]
    measured = set.intersection(*(set(table.sizes(str(kind))) for table, _ in tables))
    with setting.racing("part-sweep") as racer:
        for rows in sorted(measured & set(PartPlan.SIZES)):
            setting.require_time()
            choices = [dispatch_for(table).lookup(rows, kind) for table, _ in tables]
            raced = [*choices, *(config_of(PartPlan.STUDY.path, trial["config"]) for trial in _fastest(timed, rows))]
            samples, clocks = racer.race(kind, rows, raced, PROPOSALS_ROUNDS)
            for choice, (_, names) in zip(choices, tables, strict=True):
                best, ratio = best_by_half(samples, clocks, key_of(choice))
                row = compared(kind, rows, key_of(choice), best, samples, ratio)
                sizes.append(names | row | {"raced": len(samples)})
    return sizes


def _fastest(trials: list[dict[str, Any]], rows: int) -> list[dict[str, Any]]:
    """The fastest trials by their screening at the size nearest to ``rows``."""
    nearest = str(min(map(int, trials[0]["us"]), key=lambda size: abs(size - rows)))
    return sorted(trials, key=lambda trial: trial["us"][nearest])[:RACED]


def _tune_part(setting: Setting, name: str, effort: str, share: float | None = None) -> Table:
    """share: of the trials, for the sampler; None for the effort's own. Raises SectionError."""

    def plan(device: Device, head: HeadShape, effort: Effort, sizes: tuple[int, ...]) -> PartPlan:
        if share is not None:
            effort = dataclasses.replace(effort, proposed=share)
        return PartPlan(device, head, effort, sizes)

    options = Options(
        setting.head,
        setting.folder / name,
        effort=effort,
        budget=max(1.0, min(PART_SECONDS, setting.left - 60.0)),
        compilers=1 if setting.simulated else None,
        baselines="off",
        sizes=PartPlan.SIZES,
        plan=plan,
    )
    before = dict(os.environ)
    os.environ.update(setting.environment("part-sweep"))
    try:
        on_device = measuring_on(setting.simulated) if setting.simulated else contextlib.nullcontext()
        with on_device, Progress(quiet=True) as progress:
            result = tune(options, progress)
    finally:
        os.environ.clear()
        os.environ.update(before)
    if result.status not in ("done", "up to date"):
        raise SectionError(f"{name}: {result.message}")
    return setting.table_at(name)


def sweep(setting: Setting) -> dict[str, Any]:
    table, path, compiled = setting.wanted()
    dispatch = dispatch_for(table)
    kinds = [KIND_NAMES[kind] for kind in table.kinds]
    tried = [(kind, rows) for kind in kinds for rows in setting.between if not kind.screen or rows <= MAX_SCREENED_ROWS]
    differing = [
        place for place in tried if dispatch.lookup(place[1], place[0]) != dispatch.default(place[1], place[0])
    ]
    raced, failed = [], []
    with setting.racing(compiled) as racer:
        for kind, rows in differing:
            setting.require_time()
            tuned, default = dispatch.lookup(rows, kind), dispatch.default(rows, kind)
            try:
                samples, clocks = racer.race(kind, rows, [tuned, default], SWEEP_ROUNDS)
            except RaceError as error:
                failed.append(str(error))
                continue
            ratio = Ratio.of(samples[key_of(tuned)], samples[key_of(default)], clocks)
            row = compared(kind, rows, key_of(tuned), key_of(default), samples, ratio)
            raced.append(row | {"slower": slower(ratio, len(clocks), len(differing))})
    slow = ", ".join(f"{one['kind']} {one['batch']} by {one['off']:.1%}" for one in raced if one["slower"]) or "none"
    ratios = [1 + one["off"] for one in raced]
    times = f" and take {min(ratios):.3f} to {max(ratios):.3f} of its time" if ratios else ""
    summary = f"{len(raced)} of {len(tried)} places differ from the built-in choice{times}; slower beyond noise: {slow}"
    return {
        "summary": summary + (f"; {len(failed)} could not be raced" if failed else ""),
        "table": path.name,
        "places": len(tried),
        "as_the_default": len(tried) - len(differing),
        "slower": sum(one["slower"] for one in raced),
        "failed": failed,
        "raced": raced,
    }


def slower(ratio: Ratio, rounds: int, races: int) -> bool:
    """Beyond noise: the chance that any of so many races says so of two that are equal is ``ALPHA``."""
    return ratio.off / ratio.se > t_quantile(1 - ALPHA / races, rounds - 1)


def replay(setting: Setting) -> dict[str, Any]:
    _, path, compiled = setting.wanted()
    command = [*setting.tuner, "verify", str(path), "--json"]
    began = time.monotonic()
    said = setting.call(command, compiled, setting.folder / "verify.log")
    worst = {
        f"worst_{name}": max((abs(row[name]) for row in said["sizes"]), default=None) for name in ("off", "off_gemm")
    }
    seconds = round(time.monotonic() - began, 1)
    return {"summary": f"{said['message']}; {seconds:.0f} s", "seconds": seconds, "table": path.name, **worst, **said}


SECTIONS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "runs": runs,
    "regret": regret,
    "proposals": proposals,
    "sweep": sweep,
    "replay": replay,
}
FAST = ("runs", "replay")


def head_of(text: str) -> HeadShape:
    """ "151936x4096"."""
    vocab, _, hidden = text.partition("x")
    if not (vocab.isdigit() and hidden.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no head; expected such as 151936x4096")
    return HeadShape(vocab=int(vocab), hidden=int(hidden), dtype="bf16")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", nargs="+", type=head_of, default=[head_of("151936x4096")], metavar="VxD")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "flashsample-tuning")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds of this call (default: 570)")
    parser.add_argument("--table", type=Path, help="of sweep and replay, instead of the one that is tuned here")
    parser.add_argument("--efforts", nargs="+", choices=EFFORTS, help="of runs (default: quick full)")
    parser.add_argument("--effort", choices=EFFORTS, help="of the others (default: full)")
    parser.add_argument("--batch-sizes", dest="sizes", type=sizes_of, help="sizes to tune, instead of the tuner's ten")
    parser.add_argument("--between", type=sizes_of, default=BETWEEN, help="batch sizes of sweep")


def prepare(options: Any) -> None:
    quick = options.fast or DRY_RUN
    options.only = [name for name in options.only if name in FAST or not options.fast]
    options.efforts = tuple(options.efforts or (("quick",) if quick else ("quick", "full")))
    options.effort = options.effort or ("quick" if quick else "full")
    options.until = time.monotonic() + options.limit


def measure(options: Any, result: Result) -> int:
    simulated = None
    if DRY_RUN:
        options.work = Path(tempfile.mkdtemp(prefix="flashsample-tuning-"))
        simulated = str(options.work / "device.json")
        Path(simulated).write_text(json.dumps(EXAMPLE))
    for head in options.heads:
        name = f"{head.vocab}x{head.hidden}"
        given = {field: getattr(options, field) for field in ("efforts", "effort", "sizes", "between", "table")}
        setting = Setting(head, options.work / name, options.until, simulated, **given)
        for section in options.only:
            began = time.monotonic()
            try:
                measured = SECTIONS[section](setting)
            except Exception as error:  # the next section may do
                result.miss(str(error) if isinstance(error, SectionError) else error, section=section, head=name)
                continue
            took = round(time.monotonic() - began, 1)
            result.put(section, measured | {"section_seconds": took}, name)
            print(f"{section} {name}: {measured['summary']} ({took} s)", flush=True)
    return result.close()


BENCHMARKS = {"tuning": Benchmark(__doc__, measure, add_options, prepare, tuple(SECTIONS))}
