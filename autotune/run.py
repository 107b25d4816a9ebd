"""``tune run``: one coordinator over one process per GPU and several that compile.

With several GPUs the studies stay here and the processes take turns at their proposals: everything is told in one place
and in one log. Optuna's shared storages would be a second truth beside that log, and buy nothing while one process can
ask for and tell thousands of trials a second.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..sources import installed_sources
from ..table import Device, HeadShape, Table, file_name
from . import surface
from .decide import Decider
from .plan import EFFORTS, Effort, Plan
from .progress import Plain
from .publish import MEASURE, SAME_ENV, Publisher
from .remote import Crew, Job, Remote, RemoteError, work_until
from .search import Context, Search
from .space import Config, space_hash
from .trials import Log

HELLO_SECONDS = 60.0
READY_SECONDS = 120.0
RIVALS_SECONDS = 240.0
MOST_COMPILERS = 15
SURFACE_COMPILERS = 1
MOST_BUSY = 20  # percent of a GPU that may be used by others before we begin
NOISY = 0.01  # median standard error of the winners' times, relative
OK, WRONG, BAD = 0, 1, 2


class TuneError(RuntimeError):
    """Why a run cannot begin or go on; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Options:
    """out: the folder of the table. budget: seconds, None for the effort's own. surface: a recorded one instead of a
    GPU. flashinfer: whether its path may be chosen. plan: a part of the plan, for who compares a search with a
    sweep."""

    head: HeadShape
    out: Path
    effort: str = "full"
    budget: float | None = None
    resume: bool = True
    force: bool = False
    gpus: int = 1
    surface: str | None = None
    allow_busy: bool = False
    compilers: int | None = None
    rivals: bool | None = None
    buckets: tuple[int, ...] | None = None
    flashinfer: bool = False
    plan: Callable[[Device, HeadShape, Effort, tuple[int, ...]], Plan] = Plan

    @property
    def plan_effort(self) -> Effort:
        effort = EFFORTS[self.effort]
        rivals = effort.rivals if self.rivals is None else self.rivals
        return dataclasses.replace(effort, budget=self.budget or effort.budget, rivals=rivals)


@dataclasses.dataclass
class Result:
    """code: the exit code. status: one word. message: one line."""

    code: int
    status: str
    message: str
    path: Path | None = None
    table: Table | None = None


def run(options: Options, progress: Plain) -> Result:
    """Tune. Raises TuneError; KeyboardInterrupt only before there is anything to keep."""
    began = time.monotonic()
    gpus = Crew(_gpu(options, index) for index in range(1 if options.surface else options.gpus))
    run_ = _Run(options, progress, gpus, began)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run_.all()
    except RemoteError as error:
        raise TuneError(str(error)) from None
    except OSError as error:
        raise TuneError(f"{options.out} cannot be written: {error.strerror or error}") from None
    finally:
        signal.signal(signal.SIGTERM, previous)
        run_.end()


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _gpu(options: Options, index: int) -> Remote:
    log = options.out / "logs" / f"worker-{index}.log"
    if options.surface:
        return Remote("measuring", {"bench": "surface", "file": options.surface}, log)
    return Remote("measuring", {"bench": "gpu"}, log, {"CUDA_VISIBLE_DEVICES": visible(index)})


def visible(index: int) -> str:
    """The name of the ``index``-th GPU that this process may use."""
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return given[index] if index < len(given) else str(index)


class _Run:
    def __init__(self, options: Options, progress: Plain, gpus: Crew, began: float) -> None:
        self.options, self.progress, self.gpus, self.began = options, progress, gpus, began
        self.effort = options.plan_effort
        self.compilers: Crew | None = None
        self.rivals: Crew | None = None
        self.flashinfer = False
        self.log: Log | None = None

    def left(self) -> float:
        return self.effort.budget - (time.monotonic() - self.began)

    def end(self) -> None:
        for crew in (self.gpus, self.compilers, self.rivals):
            if crew is not None:
                crew.end()
        if self.log is not None:
            self.log.close()

    def all(self) -> Result:
        options, head = self.options, self.options.head
        # They import while the device says who it is; where there may be nothing to do, that comes first.
        found = any(options.out.glob(file_name("*", head).replace("_", "*", 1)))
        if not found:
            self._start_compilers()
        device, env = self._hello()
        plan = options.plan(device, head, self.effort, options.buckets or Plan.buckets)
        try:
            _ = plan.family
            publisher = Publisher(options.out, plan, env, options.flashinfer)
        except ValueError as error:
            raise TuneError(str(error)) from None
        if not options.force and publisher.up_to_date():
            return Result(OK, "up to date", f"up to date: {publisher.path}", publisher.path)
        if found:
            self._start_compilers()
        self.log = Log(publisher.path.with_suffix(".trials.jsonl"), self._identity(plan, env), resume=self._resumes())
        if self.log.note:
            self.progress.note(self.log.note)
        context = Context(
            plan, self.log, dataclasses.asdict(head), self.gpus, self.progress.note, publisher.reject, self.left
        )
        interrupted = False
        search = Search(context, self.compilers, _elsewhere(options.out, device, head))
        decider = Decider(context, publisher, search.finalists, lambda: self.flashinfer)
        try:
            self._search(search)
            search.compile_for_races(decider.entered())
            self._decide(decider)
        except KeyboardInterrupt:
            interrupted = True
        return self._finish(publisher, search, decider, context, interrupted)

    def _resumes(self) -> bool:
        return self.options.resume and not self.options.force

    def _identity(self, plan: Plan, env: dict[str, str]) -> dict[str, Any]:
        return {
            "device": dataclasses.asdict(plan.device),
            "head": dataclasses.asdict(plan.head),
            "env": {name: env.get(name, "") for name in SAME_ENV},
            "src": installed_sources(),
            "space": [space_hash(path) for path in plan.paths],
            "measure": MEASURE,
        }

    def _start_compilers(self) -> None:
        surface = self.options.surface
        most = SURFACE_COMPILERS if surface else MOST_COMPILERS
        count = self.options.compilers or max(1, min(most, len(os.sched_getaffinity(0)) - 1))
        spec = {"bench": "surface", "file": surface} if surface else {"bench": "compiling", "processes": count}
        logs = self.options.out / "logs"
        environment = {"CUDA_VISIBLE_DEVICES": visible(0), "OMP_NUM_THREADS": "1"}
        self.compilers = Crew(
            Remote("compiling", spec, logs / f"compiling-{index}.log", environment) for index in range(count)
        )
        for remote in self.compilers.remotes:
            remote.start()

    def _hello(self) -> tuple[Device, dict[str, str]]:
        answers: list[dict[str, Any]] = []

        def hello() -> Job:
            answers.append((yield {"op": "hello"}, HELLO_SECONDS))

        for _ in self.gpus.remotes:
            self.gpus.add(hello())
        work_until([self.gpus], lambda: len(answers) == len(self.gpus.remotes))
        for answer in answers:
            if "error" in answer:
                raise TuneError(f"the device does not answer: {answer['error']['detail']}")
            if answer.get("busy", 0) > MOST_BUSY and not self.options.allow_busy:
                raise TuneError(f"noisy GPU: others use {answer['busy']} % of it; stop them, or --allow-busy")
            if answer["device"] != answers[0]["device"]:
                raise TuneError("the GPUs differ: tune each kind with --gpus 1 and CUDA_VISIBLE_DEVICES")
        try:
            device = Device(**answers[0]["device"])
        except TypeError as error:
            raise TuneError(f"the device is not described: {error}") from None
        env = {name: str(value) for name, value in answers[0]["env"].items() if value}
        self.progress.note(f"{device.name}, compute capability {device.cc}, {device.sms} multiprocessors")
        return device, env

    def _start_rivals(self) -> None:
        """FlashInfer compiles for a minute the first time: beside the search, and without it if it takes longer."""

        def prepare() -> Job:
            answer = yield {"op": "rivals"}, RIVALS_SECONDS
            self.flashinfer = bool(answer.get("available"))
            if not self.flashinfer:
                detail = answer.get("detail") or answer.get("error", {}).get("detail", "")
                self.progress.note(f"FlashInfer is not raced: {detail}")

        remote = _gpu(self.options, 0)
        remote.log = self.options.out / "logs" / "rivals.log"
        self.rivals = Crew([remote])
        self.rivals.add(prepare())

    def _crews(self) -> list[Crew]:
        return [crew for crew in (self.gpus, self.compilers, self.rivals) if crew is not None]

    def _search(self, search: Search) -> None:
        if self.effort.rivals or self.options.flashinfer:
            self._start_rivals()
        searching = self.effort.budget * self.effort.share

        def tick() -> None:
            if time.monotonic() - self.began > searching:
                search.stop()
            search.fill()
            rejected = sum(bool(t.why) for study in search.studies.values() for t in study.trials.values())
            self.progress.update("search", search.tried, search.size, f"{rejected} rejected")

        for _ in self.gpus.remotes:
            self.gpus.add(_ready(search.context.head))
        search.fill()
        work_until(self._crews(), lambda: search.finished, tick)
        spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in search.spent.items() if seconds)
        self.progress.note(
            f"searched: {search.tried} configurations in {time.monotonic() - self.began:.0f} s"
            + (f" ({spent}, all processes together)" if spent else "")
        )

    def _decide(self, decider: Decider) -> None:
        if self.options.flashinfer and self.rivals is not None:  # asked for: worth waiting for its compiler
            work_until([self.rivals], lambda: self.left() <= 0)
        for job in decider.jobs():
            self.gpus.add(job)

        def tick() -> None:
            self.progress.update("races", decider.done, decider.races)
            if self.compilers is not None and not self.compilers.pending:
                self.compilers.end()  # they hold memory of the device

        work_until(self._crews(), lambda: not self.gpus.pending, tick)

    def _finish(
        self, publisher: Publisher, search: Search, decider: Decider, context: Context, interrupted: bool
    ) -> Result:
        if not decider.done:
            why = "interrupted" if interrupted else "no race came about"
            detail = (
                f": {context.failed_defaults[0]}" if context.failed_defaults else f"; see {self.options.out / 'logs'}"
            )
            return Result(WRONG, why, f"{why}, no table written{detail}")
        complete = decider.done >= decider.races and not interrupted
        publisher.provenance = {
            "complete": complete,
            "when": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "trials": search.tried,
            "gpus": len(self.gpus.remotes),
            "budget": self.effort.budget,
            "seed": 0,
        }
        publisher.write()
        # A table that the server would not read is worth nothing: read it as it would.
        table = Table.loads(publisher.path.read_text(encoding="utf-8"))
        code, status, message = OK, "done", f"{decider.done} buckets in {time.monotonic() - self.began:.0f} s"
        buckets = [bucket for found in table.classes.values() for bucket in found.values()]
        if not complete:
            status = "interrupted" if interrupted else "out of time"
            message = f"{status}: {decider.done} of {decider.races} buckets; the next run goes on"
        elif all(bucket.use == bucket.default for bucket in buckets):
            message += "; the default won everywhere"
        if context.failed_defaults:
            code, status = WRONG, "wrong default"
            message = f"a built-in configuration failed: {context.failed_defaults[0]}"
        elif decider.noisy and sorted(decider.noisy)[len(decider.noisy) // 2] > NOISY:
            code, status = BAD, "noisy GPU"
            message = f"noisy GPU: times are known to {sorted(decider.noisy)[len(decider.noisy) // 2]:.1%} only"
        return Result(code, status, f"{message}; {publisher.path}", publisher.path, table)


def _ready(head: dict[str, Any]) -> Job:
    """Make the head while the first configurations are compiled."""
    answer = yield {"op": "ready", "head": head}, READY_SECONDS
    if "error" in answer:
        raise TuneError(f"the head cannot be made on the device: {answer['error']['detail']}")


def _elsewhere(folder: Path, device: Device, head: HeadShape) -> Iterator[Config]:
    """Winners of other tables in ``folder`` for GPUs of the same compute capability: where a search may begin."""
    for path in sorted(folder.glob("fs1,*.json"))[:50]:
        try:
            table = Table.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if table.device.cc != device.cc or table.head.dtype != head.dtype:
            continue
        for buckets in table.classes.values():
            for bucket in buckets.values():
                launch = table.configs[bucket.use].launch
                if launch is not None:
                    yield launch


__all__ = ["BAD", "OK", "WRONG", "Options", "Result", "TuneError", "run", "surface"]
