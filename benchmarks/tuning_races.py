"""The races of benchmarks/tuning.py: one process that measures, as the autotuner's, and what follows from its samples.

Every comparison is of samples taken side by side: log-ratios within rounds, with a t interval.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_flashsample.autotune.builtin import kernels_of
from sgl_flashsample.autotune.names import key_of, label_of, path_of
from sgl_flashsample.autotune.plan import Plan, StudyKey
from sgl_flashsample.autotune.race import Policy, kept_rounds, robust_mean, t_quantile
from sgl_flashsample.autotune.remote import Crew, Job, Remote, work_until
from sgl_flashsample.autotune.run import visible
from sgl_flashsample.autotune.space import FUSED, Space
from sgl_flashsample.autotune.trials import config_data
from sgl_flashsample.kernels.tiles import ScreenConfig

from sgl_flashsample.lookup import bucket_for
from sgl_flashsample.table import HeadShape, Table
from sgl_flashsample.work import Config, Work

SETUP_SECONDS, EACH_SECONDS, ROUNDS_SECONDS = 30.0, 8.0, 60.0
POLICY = Policy()


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Of two times, minus one: its standard error, and the bounds of its confidence interval."""

    off: float
    se: float
    low: float
    high: float

    def against(self, band: float) -> str:
        """Where the interval lies: "inside" the band around zero, "outside", or "open" where it crosses the edge."""
        if -band <= self.low and self.high <= band:
            return "inside"
        return "outside" if self.low > band or self.high < -band else "open"


def compare(mine: Sequence[float], theirs: Sequence[float], clocks: Sequence[float], alpha: float = 0.05) -> Ratio:
    """``mine`` over ``theirs``, round by round; rounds at a low clock do not count. alpha: of the two-sided interval.
    Raises ValueError for fewer than three rounds."""
    counts = kept_rounds(clocks, POLICY.clock)
    ratios = [math.log(a / b) for a, b, counted in zip(mine, theirs, counts, strict=True) if counted]
    if len(ratios) < 3:
        raise ValueError(f"{len(ratios)} rounds count; expected at least 3")
    mean, error = robust_mean(ratios)
    reach = t_quantile(1 - alpha / 2, len(ratios) - 1) * error
    return Ratio(math.expm1(mean), error, math.expm1(mean - reach), math.expm1(mean + reach))


def tie_band(us: float) -> float:
    """What the tuner takes as equal, relative."""
    return max(POLICY.tie, POLICY.tie_us / us)


def best_by_half(samples: Mapping[str, Sequence[float]], clocks: Sequence[float], choice: str) -> tuple[str, Ratio]:
    """The fastest by the even rounds, and ``choice`` over it by the odd ones: the luck that makes one of many look best
    does not count for it."""
    mean = {name: robust_mean([math.log(us) for us in values[::2]])[0] for name, values in samples.items()}
    best = min(mean, key=lambda name: (mean[name], name))
    if best == choice:
        return best, Ratio(0.0, 0.0, 0.0, 0.0)
    return best, compare(samples[choice][1::2], samples[best][1::2], clocks[1::2])


def served(table: Table, plan: Plan, rows: int, work: Work) -> Config:
    """What a server with ``table`` launches for ``rows`` rows."""
    own: Work | None = work
    while own is not None:
        buckets = table.classes.get(own, {})
        bucket = bucket_for(buckets, rows)
        launch = table.configs[buckets[bucket].use].launch if bucket is not None else None
        if launch is not None:
            return launch
        if isinstance(default := plan.default(rows, own), ScreenConfig):
            return default
        own = own.fallback
    return plan.default(rows, work)


@dataclasses.dataclass(frozen=True)
class Part(Space):
    """A space cut to what can be swept."""

    @functools.cached_property
    def axes(self) -> dict[str, tuple[Any, ...]]:
        return {**super().axes, **PartPlan.FIXED}


class PartPlan(Plan):
    """Of a plan, one study: a plain draw on the fused path of up to 16 rows, with one shape of its loops."""

    STUDY = StudyKey(FUSED, Work.PLAIN, 16)
    FIXED = {"flatten": (True,)}  # noqa: RUF012
    BUCKETS = (1, 8, 16)

    @property
    def works(self) -> tuple[Work, ...]:
        return (self.STUDY.work,)

    @functools.cached_property
    def studies(self) -> list[StudyKey]:
        return [self.STUDY]

    def space(self, key: StudyKey) -> Space:
        return Part(**dataclasses.asdict(super().space(key)) | {"problem": self.problem})


class RaceError(RuntimeError):
    """The process that measures could not; one line."""


class Bench:
    """Asks one process that measures, and waits. spec: of ``autotune.worker.main``."""

    def __init__(self, head: HeadShape, remote: Remote) -> None:
        self.head, self._crew = dataclasses.asdict(head), Crew([remote])

    @classmethod
    @contextlib.contextmanager
    def of(cls, head: HeadShape, surface: str | None, log: Path, cache: Path) -> Iterator[Bench]:
        """cache: of Triton, where what a run has compiled lies."""
        spec = {"bench": "surface", "file": surface} if surface else {"bench": "gpu"}
        environment = {"CUDA_VISIBLE_DEVICES": visible(0), "TRITON_CACHE_DIR": str(cache)}
        bench = cls(head, Remote("measuring", spec, log, {} if surface else environment))
        try:
            yield bench
        finally:
            bench._crew.end()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Raises RaceError."""
        answers: list[dict[str, Any]] = []

        def job() -> Job:
            answers.append((yield request, seconds))

        self._crew.add(job())
        work_until([self._crew], lambda: bool(answers))
        if "error" in answers[0]:
            raise RaceError(f"{request['op']}: {answers[0]['error']['detail']}")
        return answers[0]

    def race(
        self, work: Work, rows: int, configs: Sequence[Config], rounds: int
    ) -> tuple[dict[str, list[float]], list[float]]:
        """Microseconds of each by its key, and the clock, round by round. Raises RaceError where one cannot run."""
        entries = [
            {
                "name": key_of(config),
                "path": path_of(config),
                "config": config_data(config),
                "label": label_of(config, kernels_of(work, config).value),
            }
            for config in dict.fromkeys(configs)
        ]
        setup = {"op": "setup", "head": self.head, "work": work.value, "batch": rows, "entries": entries}
        failed = self.ask(setup, SETUP_SECONDS + EACH_SECONDS * len(entries))["failed"]
        if failed:
            name, error = next(iter(failed.items()))
            raise RaceError(f"{work.value} {rows}: {name}: {error['detail']}")
        names = [entry["name"] for entry in entries]
        answer = self.ask({"op": "rounds", "names": names, "rounds": rounds, "first": 0}, ROUNDS_SECONDS)
        return answer["samples"], answer["clocks"]


@dataclasses.dataclass(frozen=True)
class Deadline:
    """Of one call of the benchmark, by ``time.monotonic``."""

    until: float

    @property
    def left(self) -> float:
        return self.until - time.monotonic()


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)
