"""``tune verify``: a table against this machine, in a process of its own: are its times what they were, and is what it
names still no slower than the built-in default?"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ..table import Bucket, Table
from ..work import Config, Work
from .builtin import kernels_of
from .names import GEMM, label_of, path_of
from .plan import EFFORTS, Plan
from .progress import Plain
from .race import RECORDED_ROUNDS, Policy, robust_mean, t_quantile
from .remote import Crew, Remote, work_until
from .run import BAD, HELLO_SECONDS, OK, WRONG, visible
from .trials import config_data

WITHIN = 0.03  # of the recorded time
SLOWER = Policy().min_gain  # than the default: beyond noise, with this much
ALPHA = 0.01
LOAD_ROUNDS = Policy().most


@dataclasses.dataclass(frozen=True)
class Replayed:
    """One bucket measured again. off: relative to the recorded time. off_gemm: the same of its ratio to the GEMM that
    was timed beside it, where one was: a large batch is as fast as power and heat let it be, and that moves both.
    slower: than the default, at least, by the lower bound of the paired ratio; negative where it is faster or equal."""

    work: str
    rows: int
    us: float
    recorded_us: float
    off: float
    off_gemm: float
    default_us: float
    slower: float
    error: str = ""

    @property
    def problem(self) -> str:
        if self.error:
            return self.error
        if self.slower > SLOWER:
            return f"at least {self.slower:.1%} slower than the default"
        if min(abs(self.off), abs(self.off_gemm)) <= WITHIN:
            return ""
        return f"{self.off:+.1%} from the recorded time, {self.off_gemm:+.1%} beside its GEMM"


def verify(table: Table, surface: str | None, progress: Plain) -> tuple[int, str, list[Replayed]]:
    """Exit code, one line, and what was measured. 1: a bucket is off or slower than the default; 2: the table is of
    another device, or cannot be replayed."""
    # Not beside the table: that folder may be of an installed package.
    log = Path(tempfile.gettempdir()) / f"flashsample-verify-{os.getpid()}.log"
    if surface:
        remote = Remote("measuring", {"bench": "surface", "file": surface}, log)
    else:
        environment = {"CUDA_VISIBLE_DEVICES": visible(0)}
        remote = Remote("measuring", {"bench": "gpu"}, log, environment)
    found: list[Replayed] = []
    said: list[str] = []
    crew = Crew([remote])
    try:
        crew.add(_all(table, found, said, progress))
        work_until([crew], lambda: not crew.pending)
    finally:
        crew.end()
    if not said and log.exists() and not log.stat().st_size:
        log.unlink()
    if said:
        return BAD, said[0], found
    problems = [one for one in found if one.problem]
    if problems:
        worst = problems[0]
        line = f"{len(problems)} of {len(found)} buckets are off, first {worst.work} {worst.rows}: {worst.problem}"
        return WRONG, line, found
    return OK, f"{len(found)} buckets as recorded (within {WITHIN:.0%}), none slower than the default", found


def _all(table: Table, found: list[Replayed], said: list[str], progress: Plain) -> Generator[Any, dict[str, Any], None]:
    answer = yield {"op": "hello"}, HELLO_SECONDS
    if "error" in answer:
        said.append(f"the device does not answer: {answer['error']['detail']}")
        return
    device = answer["device"]
    if (device["name"], device["sms"]) != (table.device.name, table.device.sms):
        said.append(f"the table is for {table.device.name}, this is {device['name']}")
        return
    plan = Plan(table.device, table.head, EFFORTS["quick"])
    total = sum(len(buckets) for buckets in table.classes.values())
    for work, buckets in table.classes.items():
        if work not in list(Work):
            continue
        for rows, bucket in buckets.items():
            launch = table.configs[bucket.use].launch
            if launch is None:
                continue
            default = plan.default(rows, Work(work))
            names = {bucket.use: launch}
            if default != launch:
                names["default"] = default
            replayed = yield from _one(table, work, rows, bucket, names)
            found.append(replayed)
            progress.update("verified", len(found), total)
            if replayed.problem:
                progress.note(f"{work} {rows}: {replayed.problem}")


def _one(
    table: Table, work: str, rows: int, bucket: Bucket, names: dict[str, Config]
) -> Generator[Any, dict[str, Any], Replayed]:
    use, recorded = bucket.use, bucket.us
    entries: list[dict[str, Any]] = [
        {
            "name": name,
            "path": path_of(launch),
            "config": config_data(launch),
            "label": label_of(launch, kernels_of(Work(work), launch).value),
        }
        for name, launch in names.items()
    ]
    if bucket.distribution_only:
        entries.append({"name": bucket.distribution_only, "path": bucket.distribution_only, "config": None})
    if GEMM in bucket.others:
        entries.append({"name": GEMM, "path": GEMM, "config": None})
    head = dataclasses.asdict(table.head)
    answer = yield {"op": "setup", "head": head, "work": work, "batch": rows, "entries": entries}, 90.0
    failures = answer.get("failed", {})
    failed = answer.get("error") or failures.get(use) or failures.get(bucket.distribution_only)
    if failed:
        return Replayed(work, rows, 0.0, recorded, 0.0, 0.0, 0.0, 0.0, f"{failed['why']}: {failed['detail']}")
    running = [entry["name"] for entry in entries if entry["name"] not in answer["failed"]]
    # The recorded times were taken right after a race, on a GPU as hot and as slow as that had made it.
    for rounds in (LOAD_ROUNDS, RECORDED_ROUNDS):
        answer = yield {"op": "rounds", "names": running, "rounds": rounds, "first": 0}, 60.0
        if "error" in answer:
            return Replayed(work, rows, 0.0, recorded, 0.0, 0.0, 0.0, 0.0, answer["error"]["detail"])
    samples = answer["samples"]
    timed = {name: statistics.median(values) for name, values in samples.items()}
    us = timed[use]
    slower, default_us = 0.0, us
    if "default" in timed:
        slower, default_us = _at_least(samples, use, "default"), timed["default"]
    if bucket.distribution_only and (lost := _at_least(samples, bucket.distribution_only, use)) > 0:
        error = f"{bucket.distribution_only} is at least {lost:.1%} slower than {use}"
        return Replayed(work, rows, us, recorded, us / recorded - 1.0, 0.0, default_us, slower, error)
    off = off_gemm = us / recorded - 1.0
    if GEMM in timed:
        off_gemm = (us / timed[GEMM]) / (recorded / bucket.others[GEMM]) - 1.0
    return Replayed(work, rows, us, recorded, off, off_gemm, default_us, slower)


def _at_least(samples: dict[str, list[float]], name: str, than: str) -> float:
    """The lower bound of the log-ratio of two in the same rounds."""
    mean, error = robust_mean(
        [math.log(mine / theirs) for mine, theirs in zip(samples[name], samples[than], strict=True)]
    )
    return mean - t_quantile(1 - ALPHA, RECORDED_ROUNDS - 1) * error
