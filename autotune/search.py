"""The first half of a run: every study proposes, processes compile, a GPU compares tokens and measures.

Nothing is decided here: the times of a search are of different moments, and only say who may race.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Generator, Iterable
from typing import Any

from ..work import Work
from .builtin import kernels_of
from .names import label_of, path_of
from .plan import Plan, StudyKey
from .remote import Crew, Job
from .space import MAX_SPILLED, SCREENED, Config
from .study import Study
from .trials import Log, config_data, config_of

COMPILE_SECONDS = 60.0
TRIAL_SECONDS = 60.0
AHEAD = 24  # compiled configurations that may wait for a GPU
OFFERED = 3  # winners of a finished study that its siblings try
HOPELESS = 1.15  # a configuration slower than the best by this does not race
# A study that has timed so many, and is slower than others by so much wherever its finds could race, is over.
PROBATION, BEYOND_HOPE = 6, 1.3


@dataclasses.dataclass
class Context:
    """What the parts of a run share. head: as workers want it. note: says something to the person who waits. reject:
    takes a configuration, its work, the reason and the detail. left: seconds until the run's time is over."""

    plan: Plan
    log: Log
    head: dict[str, Any]
    gpus: Crew
    note: Callable[[str], None]
    reject: Callable[[Config, Work, str, str], None]
    left: Callable[[], float]
    failed_defaults: list[str] = dataclasses.field(default_factory=list)

    def is_default(self, config: Config, work: Work) -> bool:
        kernels = kernels_of(work, config)
        return any(
            self.plan.default(rows, other) == config
            for other in self.plan.works
            for rows in self.plan.buckets_of(other)
            if kernels_of(other, config) is kernels
        )

    def request(self, op: str, config: Config, work: Work, **values: Any) -> dict[str, Any]:
        return {
            "op": op,
            "head": self.head,
            "path": path_of(config),
            "config": config_data(config),
            "work": work.value,
            "label": label_of(config, work.value),
            **values,
        }


class Search:
    """All studies of a plan. compilers: None where nothing has to be compiled ahead."""

    def __init__(self, context: Context, compilers: Crew | None, elsewhere: Iterable[Config] = ()) -> None:
        self.context, self.compilers = context, compilers
        plan, elsewhere = context.plan, list(elsewhere)
        self.studies: dict[StudyKey, Study] = {}
        # Those with a built-in default come first: it races in any case, and one process alone compiles during races.
        for key in sorted(plan.studies, key=lambda key: not plan.defaults(key)):
            self.studies[key] = Study(
                plan.space(key), plan.seeds(key, elsewhere), plan.cap(key), seed=plan.studies.index(key)
            )
        self._served = {key: plan.served(key) for key in self.studies}
        self._turn = 0
        self._over: set[StudyKey] = set()
        self._stopped = False
        self._waiting = 0  # compiled, not measured yet
        self._compiled: set[tuple[Config, Work]] = set()  # or being compiled
        self.spent: collections.Counter[str] = collections.Counter()  # seconds of the processes, by what they do
        self._recall()

    def _recall(self) -> None:
        """What an earlier run has found out."""
        for event in self.context.log.of("trial"):
            try:
                work, config = Work(event["work"]), config_of(event["path"], event["config"])
                study = self.studies.get(self.context.plan.study_of(config, work))
                us = {int(rows): float(value) for rows, value in event["us"].items()}
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
            if study is not None and config not in study.trials:
                self._baseline(study, us)
                study.tell(config, us or None, event.get("why", ""), event.get("detail", ""))
                if event.get("why"):
                    self._rejected(config, work, event["why"], event.get("detail", ""))

    @property
    def tried(self) -> int:
        return sum(len(study.trials) for study in self.studies.values())

    @property
    def size(self) -> int:
        return sum(study.size for study in self.studies.values())

    @property
    def finished(self) -> bool:
        compiling = self.compilers.pending if self.compilers and not self._stopped else 0
        busy = self.context.gpus.pending + compiling
        return not busy and (self._stopped or len(self._over) == len(self.studies))

    def stop(self) -> None:
        """Ask for nothing more; what is being measured is measured to its end."""
        if not self._stopped:
            self._stopped = True
            for key in self.studies:
                if key not in self._over:
                    self._say_if_nothing_runs(key)
            if self.compilers is not None:
                self.compilers.drop_waiting()
            self.context.gpus.drop_waiting()

    def compile_for_races(self, entered: Iterable[tuple[Config, Work]]) -> None:
        """What will race and was in no trial, in that order, beside the races: else the process that measures would
        compile it, one by one. entered: configurations, and whose kernels they are."""
        for config, work in dict.fromkeys(entered):
            if self.compilers is not None and (config, work) not in self._compiled:
                self.compilers.add(self._compiled_as(config, work))

    def _compiled_as(self, config: Config, work: Work) -> Generator[tuple[dict[str, Any], float], dict[str, Any], Any]:
        """A job; what the compiler answers."""
        self._compiled.add((config, work))
        return (yield self.context.request("compile", config, work), COMPILE_SECONDS)

    def fill(self) -> None:
        """Give work to whoever is idle."""
        if self._stopped:
            return
        while self._room() > 0:
            found = self._next()
            if found is None:
                return
            key, config = found
            if self.compilers is None:
                self.context.gpus.add(self._measure(key, config))
            else:
                self.compilers.add(self._compile(key, config))

    def _room(self) -> int:
        if self.compilers is None:
            return self.context.gpus.idle
        return self.compilers.idle if self._waiting < AHEAD else 0

    def _next(self) -> tuple[StudyKey, Config] | None:
        """One configuration, of the studies in turn: those that compile slowest must not come last."""
        keys = list(self.studies)
        for _ in keys:
            key = keys[self._turn % len(keys)]
            self._turn += 1
            if key in self._over:
                continue
            study = self.studies[key]
            config = study.ask()
            if config is not None:
                return key, config
            if not study.asked:
                self._finish(key)
        return None

    def _finish(self, key: StudyKey) -> None:
        self._over.add(key)
        self._say_if_nothing_runs(key)
        winners = self.studies[key].best(self.context.plan.probes(key)[-1], OFFERED)
        for other, study in self.studies.items():
            if other != key and (other.path, other.block_b) == (key.path, key.block_b):
                study.offer(winners)

    def _say_if_nothing_runs(self, key: StudyKey) -> None:
        trials = self.studies[key].trials.values()
        whys = collections.Counter((trial.why, trial.detail) for trial in trials)
        if len(trials) >= PROBATION and not any(trial.us for trial in trials):
            (why, detail), count = whys.most_common(1)[0]
            self.context.note(f"{key}: none of {len(trials)} could be used; {count} of them: {why}: {detail}")

    def _is_beyond_hope(self, key: StudyKey) -> bool:
        """Whether all that a study has found is far slower than what others have, for every batch that it may serve."""
        study = self.studies[key]
        if sum(bool(trial.us) for trial in study.trials.values()) < PROBATION:
            return False
        for rows, work in self._served[key]:
            rivals = [other for other, served in self._served.items() if other != key and (rows, work) in served]
            least = min((us for other in rivals if (us := self.studies[other].least(rows)) is not None), default=None)
            own = study.least(rows)
            assert own is not None
            if least is None or own <= BEYOND_HOPE * least:
                return False
        return True

    def _compile(self, key: StudyKey, config: Config) -> Job:
        answer = yield from self._compiled_as(config, key.work)
        if self._stopped:
            return
        self._spend(answer)
        error = answer.get("error")
        if error is None and answer["spilled"] > MAX_SPILLED and not self.context.is_default(config, key.work):
            error = {"why": "registers", "detail": f"{answer['spilled']} bytes spilled per thread"}
        if error is None and answer["shared"] > self.context.plan.device.smem_optin:
            error = {"why": "shared_memory", "detail": f"{answer['shared']} bytes of shared memory"}
        if error is not None:
            self._tell(key, config, {}, error)
        else:
            self._waiting += 1
            self.context.gpus.add(self._measure(key, config, compiled=True))

    def _measure(self, key: StudyKey, config: Config, *, compiled: bool = False) -> Job:
        try:
            batches = self.context.plan.probes(key)
            answer = yield self.context.request("trial", config, key.work, batches=batches), TRIAL_SECONDS
        finally:
            self._waiting -= compiled
        self._spend(answer)
        us = {int(rows): value for rows, value in answer.get("us", {}).items()}
        self._tell(key, config, us, answer.get("error"))

    def _spend(self, answer: dict[str, Any]) -> None:
        for part, seconds in answer.get("seconds", {}).items():
            self.spent[part] += seconds

    def _tell(self, key: StudyKey, config: Config, us: dict[int, float], error: dict[str, Any] | None) -> None:
        study = self.studies[key]
        why, detail = (error["why"], error["detail"]) if error else ("", "")
        self._baseline(study, us)
        study.tell(config, us or None, why, detail)
        self.context.log.add(
            "trial",
            study=str(key),
            work=key.work.value,
            path=key.path,
            config=config_data(config),
            us={str(rows): round(value, 3) for rows, value in us.items()},
            why=why,
            detail=detail,
        )
        if why:
            self._rejected(config, key.work, why, detail)
        elif key not in self._over and self._is_beyond_hope(key):
            self._over.add(key)

    def _rejected(self, config: Config, work: Work, why: str, detail: str) -> None:
        label = label_of(config, work.value)
        self.context.reject(config, work, why, detail)
        if self.context.is_default(config, work):
            self.context.failed_defaults.append(f"{label}: {why}: {detail}")

    @staticmethod
    def _baseline(study: Study, us: dict[int, float]) -> None:
        """The first that could be measured: the built-in default, as a rule."""
        for rows, value in us.items():
            study.baseline.setdefault(rows, value)

    def finalists(self, rows: int, work: Work) -> list[Config]:
        """Who may race for a bucket: the fastest of each study that serves it, unless they are far behind."""
        plan = self.context.plan
        found: list[tuple[float, str, Config]] = []
        for key, study in self.studies.items():
            if not plan.serves(key, rows, work):
                continue
            # What is fastest without a screen is found without one: of it only the best runs beside those with one.
            most = plan.effort.finalists if key.path == SCREENED or not work.screened else 1
            for config in study.best(rows, most):
                us = study.estimate(config, rows)
                found.append((us, label_of(config, work.value), config))
        best = min((us for us, _, _ in found), default=0.0)
        return [config for us, _, config in sorted(found, key=lambda one: one[:2]) if us <= HOPELESS * best]
