"""The first half of a run: every study proposes, processes compile, a GPU compares tokens and measures.

Nothing is decided here: the times of a search are of different moments, and only select the configurations that race.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable
from typing import Any

import msgspec

from ..kinds import KIND_NAMES, BatchKind, Config, path_of
from ..tables.schema import config_fields
from .errors import LASTING
from .labels import config_of, contender, kernel_kind, label_of
from .plan import Plan, StudyKey
from .pool import Job, Pool
from .space import MAX_SPILLED, SCREENED
from .study import Study, Trial
from .trials import TrialLog, recalled

COMPILE_SECONDS = 60.0
TRIAL_SECONDS = 60.0
MAX_COMPILED_AHEAD = 24  # configurations that may wait for a GPU
OFFERED = 3  # best configurations of a finished study that its siblings try
TOO_SLOW_TO_RACE = 1.15  # ratio to the best time
# A study ends after so many timed configurations if its best is so many times slower than that of others at every batch
# size that it serves.
PROBATION, TOO_SLOW_TO_SEARCH = 6, 1.3


@dataclasses.dataclass
class Context:
    """State that the parts of a run share. note: prints a line for the user. left: seconds until the run's time is
    over. rejected: the reasons, by label. failed_defaults: a line for each built-in choice that was rejected."""

    plan: Plan
    log: TrialLog
    gpus: Pool
    note: Callable[[str], None]
    left: Callable[[], float]
    rejected: dict[str, str] = dataclasses.field(default_factory=dict)
    failed_defaults: list[str] = dataclasses.field(default_factory=list)

    @property
    def head(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.plan.head)

    def is_default(self, config: Config, kind: BatchKind) -> bool:
        return any(
            self.plan.default(rows, other) == config
            for other in self.plan.kinds
            for rows in self.plan.sizes_of(other)
            if label_of(config, other) == label_of(config, kind)
        )

    def reject(self, config: Config, kind: BatchKind, reason: str, detail: str) -> None:
        label = label_of(config, kind)
        self.rejected[label] = reason
        if self.is_default(config, kind):
            self.failed_defaults.append(f"{label}: {reason}: {detail}")

    def request(self, op: str, config: Config, kind: BatchKind, **values: Any) -> dict[str, Any]:
        kernels = kernel_kind(kind, path_of(config))
        return {"op": op, "head": self.head, "kind": str(kernels), **contender(config, kind), **values}


class Search:
    """All studies of a plan. elsewhere: winners of other tables."""

    def __init__(self, context: Context, compilers: Pool, elsewhere: Iterable[Config] = ()) -> None:
        self.context, self.compilers = context, compilers
        plan, elsewhere = context.plan, list(elsewhere)
        self.studies: dict[StudyKey, Study] = {}
        # Studies with a built-in choice come first: it races in any case, and one process alone compiles during races.
        for key in sorted(plan.studies, key=lambda key: not plan.defaults(key)):
            self.studies[key] = Study(
                plan.space(key),
                plan.seeds(key, elsewhere),
                plan.cap(key),
                proposed=plan.effort.proposed,
                seed=plan.studies.index(key),
            )
        self.over: set[StudyKey] = set()
        self.spent: collections.Counter[str] = collections.Counter()  # seconds of all processes, by part of their work
        self._served = {key: plan.served(key) for key in self.studies}
        self._turns = itertools.cycle(self.studies)
        self._stopped = False
        self._waiting = 0  # compiled, not measured yet
        self._compiled: set[str] = set()  # labels of configurations that are, or are being, compiled
        self._recall()

    def _recall(self) -> None:
        """Take over the trials of an earlier run. A trial that failed for a reason that may be gone is made again."""

        def trial_of(event: dict[str, Any]) -> tuple[BatchKind, Trial, bool]:
            us = {int(rows): float(value) for rows, value in event["us"].items()}
            config = config_of(event["path"], event["config"])
            trial = Trial(config, us, event["reason"], event["detail"])
            return KIND_NAMES[event["kind"]], trial, bool(event.get("proposed"))

        for kind, trial, proposed in recalled(self.context.log.of("trial"), trial_of):
            study = self.studies.get(self.context.plan.study_of(trial.config, kind))
            lasts = not trial.reason or trial.reason in LASTING
            if lasts and study is not None and trial.config not in study.trials:
                study.tell(trial.config, trial.us, trial.reason, trial.detail)
                if proposed:
                    study.proposals.add(trial.config)
                if trial.reason:
                    self.context.reject(trial.config, kind, trial.reason, trial.detail)

    @property
    def tried(self) -> int:
        return sum(len(study.trials) for study in self.studies.values())

    @property
    def size(self) -> int:
        return sum(study.size for study in self.studies.values())

    @property
    def finished(self) -> bool:
        compiling = self.compilers.pending if not self._stopped else 0
        busy = self.context.gpus.pending + compiling
        return not busy and (self._stopped or len(self.over) == len(self.studies))

    def stop(self) -> None:
        """Ask for nothing more; measurements that have begun go on to their end."""
        if not self._stopped:
            self._stopped = True
            for key in self.studies:
                if key not in self.over:
                    self._note_if_nothing_runs(key)
            self.compilers.drop_waiting()
            self.context.gpus.drop_waiting()

    def compile_for_races(self, entered: Iterable[tuple[Config, BatchKind]]) -> None:
        """Compile, while the races run, the configurations that will race and were in no trial: else the process that
        measures would compile them. entered: configurations and kinds of batches in the order of their races."""
        for label, (config, kind) in {label_of(*one): one for one in entered}.items():
            if label not in self._compiled:
                self.compilers.add(self._compiled_as(config, kind))

    def _compiled_as(
        self, config: Config, kind: BatchKind
    ) -> Generator[tuple[dict[str, Any], float], dict[str, Any], Any]:
        """A job that returns the answer of the compiling process."""
        self._compiled.add(label_of(config, kind))
        return (yield self.context.request("compile", config, kind), COMPILE_SECONDS)

    def fill(self) -> None:
        """Give work to idle processes."""
        while not self._stopped and self.compilers.idle and self._waiting < MAX_COMPILED_AHEAD:
            proposal = self._next_proposal()
            if proposal is None:
                return
            self.compilers.add(self._compile(*proposal))

    def _next_proposal(self) -> tuple[StudyKey, Config] | None:
        """One configuration, from the studies in turn: a study that compiles slowly must not come last."""
        for key in itertools.islice(self._turns, len(self.studies)):
            if key in self.over:
                continue
            study = self.studies[key]
            config = study.ask()
            if config is not None:
                return key, config
            if not study.asked:
                self._finish(key)
        return None

    def _finish(self, key: StudyKey) -> None:
        self.over.add(key)
        self._note_if_nothing_runs(key)
        winners = self.studies[key].best(self.context.plan.probes(key)[-1], OFFERED)
        for other, study in self.studies.items():
            if other != key and (other.path, other.block_b) == (key.path, key.block_b):
                study.offer(winners)

    def _note_if_nothing_runs(self, key: StudyKey) -> None:
        trials = self.studies[key].trials.values()
        if len(trials) >= PROBATION and not any(trial.us for trial in trials):
            reasons = collections.Counter((trial.reason, trial.detail) for trial in trials)
            (reason, detail), count = reasons.most_common(1)[0]
            self.context.note(f"{key}: none of {len(trials)} could be used; {count} of them: {reason}: {detail}")

    def _is_too_slow(self, key: StudyKey) -> bool:
        """True where the best of a study is far slower than that of other studies, for every batch that it may
        serve."""
        study = self.studies[key]
        if sum(bool(trial.us) for trial in study.trials.values()) < PROBATION:
            return False
        for batch in self._served[key]:
            others = [other for other, served in self._served.items() if other != key and batch in served]
            best_us = min(
                (us for other in others if (us := self.studies[other].least(batch[0])) is not None), default=None
            )
            study_us = study.least(batch[0])
            assert study_us is not None
            if best_us is None or study_us <= TOO_SLOW_TO_SEARCH * best_us:
                return False
        return True

    def _compile(self, key: StudyKey, config: Config) -> Job:
        answer = yield from self._compiled_as(config, key.kind)
        if self._stopped:
            return
        self.spent.update(answer.get("seconds", {}))
        error = answer.get("error")
        if error is None and answer["spilled"] > MAX_SPILLED and not self.context.is_default(config, key.kind):
            error = {"reason": "registers", "detail": f"{answer['spilled']} bytes spilled per thread"}
        if error is None and answer["shared"] > self.context.plan.device.smem_optin:
            error = {"reason": "shared_memory", "detail": f"{answer['shared']} bytes of shared memory"}
        if error is not None:
            self.tell(key, config, {}, error)
        else:
            self._waiting += 1
            self.context.gpus.add(self._measure(key, config))

    def _measure(self, key: StudyKey, config: Config) -> Job:
        try:
            sizes = self.context.plan.probes(key)
            answer = yield self.context.request("trial", config, key.kind, sizes=sizes), TRIAL_SECONDS
        finally:
            self._waiting -= 1
        self.spent.update(answer.get("seconds", {}))
        us = {int(rows): value for rows, value in answer.get("us", {}).items()}
        self.tell(key, config, us, answer.get("error"))

    def tell(self, key: StudyKey, config: Config, us: dict[int, float], error: dict[str, Any] | None) -> None:
        """Record the result of one configuration: its times, or an error."""
        study = self.studies[key]
        reason, detail = (error["reason"], error["detail"]) if error else ("", "")
        study.tell(config, us or None, reason, detail)
        self.context.log.add(
            "trial",
            study=str(key),
            kind=str(key.kind),
            path=path_of(config).value,
            config=config_fields(config),
            us={str(rows): round(value, 3) for rows, value in us.items()},
            reason=reason,
            detail=detail,
            proposed=config in study.proposals,
        )
        if reason:
            self.context.reject(config, key.kind, reason, detail)
        elif key not in self.over and self._is_too_slow(key):
            self.over.add(key)

    def finalists(self, rows: int, kind: BatchKind) -> list[Config]:
        """The configurations that may race for a batch: the fastest of each study that serves it, unless they are far
        behind."""
        plan = self.context.plan
        ranked: list[tuple[float, str, Config]] = []
        for key, study in self.studies.items():
            if not plan.serves(key, rows, kind):
                continue
            # The paths without a screen are decided in the races without one: only the best of them runs in a race with
            # one.
            most = plan.effort.finalists if key.path == SCREENED or not kind.screen else 1
            for config in study.best(rows, most):
                ranked.append((study.estimate(config, rows), label_of(config, kind), config))
        ranked.sort(key=lambda one: one[:2])
        return [config for us, _, config in ranked if us <= TOO_SLOW_TO_RACE * ranked[0][0]]
