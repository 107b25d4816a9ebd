"""Shared by the tests of the autotuner: plans for an H200, simulated devices, and a run's parts without processes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from lab.simulated import measuring_on

from sgl_flashsample.autotune.plan import EFFORTS, Plan
from sgl_flashsample.autotune.run import Options, Result, run
from sgl_flashsample.autotune.search import Context
from sgl_flashsample.autotune.trials import log_of, read_events
from sgl_flashsample.autotune.verify import Replayed
from sgl_flashsample.autotune.verify import verify as replay
from sgl_flashsample.kinds import KIND_NAMES
from sgl_flashsample.tables.schema import Device, HeadShape, Table

H200 = Device(name="NVIDIA H200", cc="9.0", sms=132, l2_mb=50, smem_optin=232_448)
A100 = Device(name="NVIDIA A100-SXM4-80GB", cc="8.0", sms=108, l2_mb=40, smem_optin=166_912)
HEAD = HeadShape(vocab=151_936, hidden=4096, dtype="bf16")
QUICK = Plan(H200, HEAD, EFFORTS["quick"])
FULL = Plan(H200, HEAD, EFFORTS["full"])
EXHAUSTIVE = Plan(H200, HEAD, EFFORTS["exhaustive"])
SIZES = (1, 64, 256)
ENV = {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}
PLAIN, GREEDY, EDIT, TRUNCATE = (KIND_NAMES[name] for name in ("plain", "greedy", "edit", "truncate"))
SCREENED, SCREENED_GREEDY, SCREENED_EDIT, SCREENED_TRUNCATE = (
    kind._replace(screen=True) for kind in (PLAIN, GREEDY, EDIT, TRUNCATE)
)

# The built-in choice of one row, and another configuration of its study.
DEFAULT = QUICK.default(1, PLAIN)
OTHER = next(config for config in QUICK.space(QUICK.studies[0]).first() if config != DEFAULT)


def simulated_device(**changes: Any) -> dict[str, Any]:
    """The contents of a simulated H200's file."""
    device = {"name": H200.name, "cc": H200.cc, "sms": H200.sms, "l2_mb": H200.l2_mb, "smem_optin": H200.smem_optin}
    data = {"schema": "flashsample-simulated/1", "device": device, "env": ENV, "noise": 0.003}
    return data | {"model": {"us": 300.0, "rugged": 0.08}} | changes


def write_device(path: Path, **changes: Any) -> str:
    path.write_text(json.dumps(simulated_device(**changes)))
    return str(path)


class Notes:
    """A progress display that records its lines. interrupt: text of the note at which Ctrl-C is pressed."""

    def __init__(self, interrupt: str = "") -> None:
        self.lines: list[str] = []
        self.interrupt = interrupt

    def note(self, text: str) -> None:
        self.lines.append(text)
        if self.interrupt and self.interrupt in text:
            self.interrupt = ""
            raise KeyboardInterrupt

    def update(self, *values: object) -> None: ...


def tune(folder: Path, simulated: str, notes: Notes | None = None, **options: Any) -> Result:
    options = {"effort": "quick", "sizes": SIZES, "compilers": 1, **options}
    with measuring_on(simulated):
        return run(Options(HEAD, folder / "out", **options), notes or Notes())


def verify(table: Table, simulated: str) -> tuple[int, str, list[Replayed]]:
    with measuring_on(simulated):
        return replay(table, Notes())


def events_of(result: Result, event: str) -> list[dict[str, Any]]:
    assert result.path is not None
    return [one for one in read_events(log_of(result.path)) if one.get("event") == event]


class MemoryLog:
    """A log that is kept in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def of(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]

    def add(self, event: str, **values: Any) -> None:
        self.events.append({"event": event, **values})


class InstantPool:
    """A pool of one process that starts each job at once and records its requests. answer: the answer to every request,
    delivered when the test asks for it."""

    def __init__(self, answer: dict[str, Any] | None = None) -> None:
        self.answer, self.asked, self.jobs, self.processes = answer or {}, [], [], [None]

    @property
    def pending(self) -> int:
        return len(self.jobs)

    @property
    def idle(self) -> int:
        return 0 if self.jobs else 1

    def add(self, job: Any) -> None:
        self.jobs.append(job)
        self.asked.append(next(job)[0])

    def reply(self) -> None:
        try:
            self.jobs.pop(0).send(self.answer)
        except StopIteration:
            return

    def drop_waiting(self) -> None: ...


def context_of(plan: Plan, **changes: Any) -> Context:
    context = Context(plan, MemoryLog(), InstantPool(), lambda text: None, lambda: 1000.0)
    return dataclasses.replace(context, **changes)


def finish(job: Any, worker: Any, alter: Any = lambda request, answer: answer) -> None:
    """Answer all that a job asks by a worker in this process. alter: what becomes of each answer."""
    answer = None
    try:
        while True:
            request, _ = next(job) if answer is None else job.send({**answer, "at": ""})
            answer = alter(request, worker.answer(request))
    except StopIteration:
        return
