"""``tune run``: one coordinator over one process per GPU and several that compile.

With several GPUs the studies stay in this process, the measuring processes take turns at their proposals, and one log
records all. A shared storage of Optuna's would be a second record beside that log, and save nothing: one process can
ask for and tell thousands of trials a second.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from .. import kernels
from ..exit_codes import FAILED, INTERRUPTED, OK, USAGE
from ..files import hold
from ..kinds import PLAIN, BatchKind, Config
from ..tables.lookup import load_table, tables_in
from ..tables.schema import Device, HeadShape, Table, file_name
from .baselines import ARGMAX, FLASHINFER, NO_GEMM
from .decide import NOISY, Decider
from .decisions import SAME_ENV, baseline_ratio, device_and_head
from .labels import GEMM
from .plan import EFFORTS, SIZES, Effort, Plan, usual_compilers
from .pool import (
    HELLO_SECONDS,
    Job,
    Pool,
    ask_once,
    compiling_process,
    measuring_process,
    work_until,
)
from .progress import Progress
from .search import Context, Search
from .space import space_hash
from .staleness import Compilers
from .trials import TrialLog, log_of
from .writer import MEASURE, TableWriter

READY_SECONDS = 120.0
BASELINE_SECONDS = 240.0
MAX_BUSY = 20  # largest load of a GPU by others at the start, in percent
MAX_ELSEWHERE = 50  # tables of other GPUs or heads whose winners a search starts from


@dataclasses.dataclass(frozen=True)
class Options:
    """out: the folder of the table. budget: seconds, None for the effort's own. compilers: processes, None for the
    processors but one. baselines: "on" or "off", whether FlashInfer is raced; None for the effort's own. sizes: batch
    sizes, None for the usual ones. flashinfer: not None where its path may be chosen. plan: makes the plan; a smaller
    one serves to compare a search with a sweep."""

    head: HeadShape
    out: Path
    effort: str = "full"
    budget: float | None = None
    force: bool = False
    gpus: int = 1
    allow_busy: bool = False
    compilers: int | None = None
    baselines: str | None = None
    sizes: tuple[int, ...] | None = None
    flashinfer: str | None = None
    plan: Callable[[Device, HeadShape, Effort, tuple[int, ...]], Plan] = Plan

    @property
    def plan_effort(self) -> Effort:
        effort = EFFORTS[self.effort]
        baselines = effort.baselines if self.baselines is None else self.baselines == "on"
        return dataclasses.replace(effort, budget=self.budget or effort.budget, baselines=baselines)


@dataclasses.dataclass
class Result:
    """code: the exit code. status: one word or two. message: one line."""

    code: int
    status: str
    message: str
    path: Path | None = None
    table: Table | None = None


def run(options: Options, progress: Progress) -> Result:
    """Tune. Raises ValueError, with one line, where a run cannot begin or go on; KeyboardInterrupt only before there is
    anything to keep."""
    coordinator = _Coordinator(options, progress)
    try:
        return coordinator.run()
    except OSError as error:
        raise ValueError(f"{options.out} cannot be written: {error.strerror or error}") from None
    finally:
        coordinator.end()


class _Coordinator:
    def __init__(self, options: Options, progress: Progress) -> None:
        self.options, self.progress, self.effort = options, progress, options.plan_effort
        self._began = time.monotonic()
        self._logs = options.out / "logs"
        self.gpus = Pool(measuring_process(self._logs / f"worker-{index}.log", index) for index in range(options.gpus))
        count = options.compilers or usual_compilers()
        self.compilers = Pool(compiling_process(self._logs / f"compiling-{index}.log", count) for index in range(count))
        self.preparing = Pool([measuring_process(self._logs / "baselines.log")])  # compiles baselines
        self.pools = [self.gpus, self.compilers, self.preparing]
        self.flashinfer = False  # true once it can be raced
        self._simulated = False  # true once a process has said that it measures on no GPU
        self.log: TrialLog | None = None
        self._held: IO[str] | None = None  # lock: no other run writes to the table or its log

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def left(self) -> float:
        return self.effort.budget - self.seconds()

    def end(self) -> None:
        for pool in self.pools:
            pool.end()
        if self.log is not None:
            self.log.close()
        if self._held is not None:
            self._held.close()

    def run(self) -> Result:
        options, head = self.options, self.options.head
        # The compiling processes import while the device is asked for its name. Where a table exists there may be
        # nothing to do, and the device is asked first.
        table_there = any(options.out.glob(file_name("*", head).replace("_", "*", 1)))
        if not table_there:
            self.compilers.start()
        device, env = self._hello()
        options.out.mkdir(parents=True, exist_ok=True)
        self._held = hold((options.out / file_name(device.name, head)).with_suffix(".lock"))
        if self._held is None:
            raise ValueError(
                f"another run is tuning this head in {options.out}: wait for it, or choose another folder with --out"
            )
        plan = options.plan(device, head, self.effort, options.sizes or SIZES)
        flashinfer = options.flashinfer is not None
        writer = TableWriter(options.out, plan, env, flashinfer, self.progress.note, self._simulated)
        stale = False
        if writer.before is not None and not options.force:
            stale = self._forget_stale(writer, writer.before, env)
            if not stale and writer.up_to_date():
                return Result(OK, "up to date", f"up to date: {writer.path}", writer.path, writer.before)
        self.compilers.start()
        if options.force:
            writer.begin_anew()
        resumes = not (options.force or stale)  # its decisions are of that machine code too
        self.log = TrialLog(log_of(writer.path), self._identity(plan, env), resume=resumes)
        if self.log.note:
            self.progress.note(self.log.note)
        context = Context(plan, self.log, self.gpus, self.progress.note, self.left, writer.rejected)
        search = Search(context, self.compilers, _winners_elsewhere(options.out, device, head))
        decider = Decider(context, writer, search.finalists, lambda: self.flashinfer)
        interrupted = False
        try:
            if decider.done >= plan.races:
                search.stop()  # nothing is left to search for
            self._search(search)
            search.compile_for_races(decider.entered())
            self._decide(decider)
        except KeyboardInterrupt:
            interrupted = True
        return self._finish(writer, search, decider, interrupted)

    def _forget_stale(self, writer: TableWriter, table: Table, env: dict[str, str]) -> bool:
        """Have the stale sizes of the table that is there measured again; returns whether it has any. What compiling
        them takes is no part of the run's time."""
        with Compilers(self.progress.note) as compilers:
            staleness = compilers.staleness(table, env.get("triton", ""))
        self._began = time.monotonic()
        if staleness.unknown:
            self.progress.note(f"the table that is here: {staleness.words(table)}")
        if staleness.lines:
            self.progress.note(f"the table that is here is {staleness.words(table)}; such sizes are measured again")
            writer.forget(staleness.sizes)
        return bool(staleness.lines)

    def _identity(self, plan: Plan, env: dict[str, str]) -> dict[str, Any]:
        return {
            "device": msgspec.to_builtins(plan.device),
            "head": msgspec.to_builtins(plan.head),
            "env": {name: env.get(name, "") for name in SAME_ENV},
            "simulated": self._simulated,
            "sources": _kernel_sources(),
            "space": [space_hash(path) for path in plan.paths],
            "defaults": plan.defaults_digest,
            "measure": MEASURE,
        }

    def _hello(self) -> tuple[Device, dict[str, str]]:
        self.gpus.start()
        answers = [ask_once(process, {"op": "hello"}, HELLO_SECONDS) for process in self.gpus.processes]
        for answer in answers:
            if "error" in answer:
                raise ValueError(f"the device does not answer: {answer['error']['detail']}")
            if answer.get("busy", 0) > MAX_BUSY and not self.options.allow_busy:
                raise ValueError(f"noisy GPU: others use {answer['busy']} % of it; stop them, or --allow-busy")
            if answer["device"] != answers[0]["device"]:
                raise ValueError("the GPUs differ: tune each kind with --gpus 1 and CUDA_VISIBLE_DEVICES")
        device = msgspec.convert(answers[0]["device"], Device)
        self._simulated = any(answer.get("simulated") for answer in answers)
        env = {name: str(value) for name, value in answers[0]["env"].items() if value}
        self.progress.note(f"{device.name}, compute capability {device.cc}, {device.sms} multiprocessors")
        return device, env

    def _prepare_baselines(self) -> None:
        """Have FlashInfer compiled beside the search, which takes a minute the first time. If it takes longer, it is
        not raced."""

        def prepare() -> Job:
            answer = yield {"op": "baselines"}, BASELINE_SECONDS
            self.flashinfer = bool(answer.get("available"))
            if not self.flashinfer:
                detail = answer.get("detail") or answer.get("error", {}).get("detail", "")
                self.progress.note(f"FlashInfer is not raced: {detail}")

        self.preparing.add(prepare())

    def _search(self, search: Search) -> None:
        quantised = self.options.head.is_quantised
        if quantised:
            self.progress.note(f"{GEMM}, {ARGMAX} and {FLASHINFER} are not raced: {NO_GEMM}")
        if (self.effort.baselines and not quantised) or self.options.flashinfer:
            self._prepare_baselines()

        def tick() -> None:
            if self.seconds() > self.effort.budget * self.effort.share:
                search.stop()
            search.fill()
            self.progress.update("search", search.tried, search.size, f"{len(search.context.rejected)} rejected")

        for _ in self.gpus.processes:
            self.gpus.add(_ready(search.context.head))
        search.fill()
        work_until(self.pools, lambda: search.finished, tick)
        spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in search.spent.items() if seconds)
        self.progress.note(
            f"searched: {search.tried} configurations in {self.seconds():.0f} s"
            + (f" ({spent}, all processes together)" if spent else "")
        )

    def _decide(self, decider: Decider) -> None:
        if self.options.flashinfer:  # asked for: worth waiting for its compiler
            work_until([self.preparing], lambda: self.left() <= 0)
        races = decider.context.plan.races
        for job in decider.jobs():
            self.gpus.add(job)

        def tick() -> None:
            self.progress.update("races", decider.done, races, f"{max(0.0, self.left()):.0f} s left")
            if not self.compilers.pending:
                self.compilers.end()  # they hold memory of the device

        work_until(self.pools, lambda: not self.gpus.pending, tick)

    def _finish(self, writer: TableWriter, search: Search, decider: Decider, interrupted: bool) -> Result:
        failed_defaults = search.context.failed_defaults
        if not decider.done:
            return self._nothing_decided(failed_defaults, interrupted)
        error = statistics.median(decider.errors)
        left = f"{decider.done} of {writer.plan.races} batch sizes are tuned, the table can be used; "
        left += "run the same command again for the rest"
        code, status, message = OK, "done", ""
        if interrupted:
            code, status = INTERRUPTED, "interrupted"
            message = f"interrupted: {left}"
        elif failed_defaults:
            code, status = FAILED, "wrong default"
            message = f"a built-in configuration failed: {failed_defaults[0]}"
        elif error > NOISY:
            code, status = FAILED, "noisy GPU"
            message = f"noisy GPU: times are known to {error:.1%} only; run the same command again when it is quiet"
        elif decider.done < writer.plan.races:
            status, message = "out of time", f"out of time: {left}"
        writer.provenance = {
            "complete": status == "done",  # else a later run reports the fault again
            "when": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "trials": search.tried,
            "gpus": len(self.gpus.processes),
            "budget": self.effort.budget,
            "seed": 0,
        }
        writer.write()
        # Read the table as a server would: one that it cannot read is worth nothing.
        table, reason = load_table(writer.path)
        if table is None:
            raise ValueError(f"{writer.path} cannot be read again: {reason}")
        if status == "done":
            took = f"{decider.done} batch sizes in {self.seconds():.0f} s"
            message = f"{took}; {_summary(table)}{_over_baselines(writer)}"
        return Result(code, status, f"{message}; {writer.path}", writer.path, table)

    def _nothing_decided(self, failed_defaults: list[str], interrupted: bool) -> Result:
        if interrupted:
            return Result(INTERRUPTED, "interrupted", "interrupted, no table written")
        if failed_defaults:
            return Result(FAILED, "wrong default", f"no table written: {failed_defaults[0]}")
        if self.left() <= 0:
            more = f"run the same command again with a --budget of more than {self.effort.budget:.0f} s"
            return Result(USAGE, "out of time", f"out of time before the first race, no table written: {more}")
        return Result(FAILED, "no race came about", f"no race came about, no table written; see {self._logs}")


def _kernel_sources() -> str:
    """Digest of the files of the kernels: trials of other ones may have had other machine code, or wrong tokens."""
    digest = hashlib.sha256()
    for file in sorted(Path(kernels.__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _summary(table: Table) -> str:
    if not table.entries:
        return "the built-in choice won everywhere"
    total = len(table.entries) + sum(len(confirmed.rows) for confirmed in table.confirmed.values())
    best = max(entry.gain for entry in table.entries)
    return f"{len(table.entries)} of {total} improved, by up to {best:.1%}"


def _over_baselines(writer: TableWriter) -> str:
    """Time of the fastest baseline over the winner's, at the smallest and the largest size of the kinds that have raced
    one; empty where none was raced."""
    parts = []
    for kind in (PLAIN, BatchKind(truncate=True), BatchKind(edit=True)):
        every = {rows: baseline_ratio(entry) for rows, entry in writer.decided.get(kind, {}).items()}
        ratios = {rows: ratio for rows, ratio in every.items() if ratio is not None}
        if ratios:
            ends = dict.fromkeys((min(ratios), max(ratios)))
            parts.append(f"{kind} " + ", ".join(f"{ratios[rows]:.2f}x at B={rows}" for rows in ends))
    return f"; the fastest baseline takes {'; '.join(parts)}" if parts else ""


def _ready(head: dict[str, Any]) -> Job:
    """Make the head while the first configurations are compiled."""
    answer = yield {"op": "ready", "head": head}, READY_SECONDS
    if "error" in answer:
        raise ValueError(f"the head cannot be made on the device: {answer['error']['detail']}")


def _winners_elsewhere(folder: Path, device: Device, head: HeadShape) -> Iterator[Config]:
    """Winners of other tables in ``folder`` for GPUs of the same compute capability: first trials of a search."""
    for _, table, _ in itertools.islice(tables_in(folder), MAX_ELSEWHERE):
        if table is None:
            continue
        theirs, their_head = device_and_head(table)
        if (theirs.cc, their_head.dtype) == (device.cc, head.dtype):
            yield from (entry.configuration for entry in table.entries)
