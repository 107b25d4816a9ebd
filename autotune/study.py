"""One search: the next configuration to try in a space, from the times of those before.

Optuna's TPE proposes (ask and tell); races decide, elsewhere. The study lives in memory and is
rebuilt from our own log of trials (``trials.py``): a storage of Optuna's would be a second truth, and its journal does
not survive a line that was cut short. Spaces of no more configurations than the study may try are tried as a whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import optuna

from ..kinds import Config
from .space import LAUNCH_AXES, Launches, Space

warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
optuna.logging.set_verbosity(optuna.logging.WARNING)

STARTUP = 2  # trials before the surrogate has a say: a short study has told it no more when it first proposes
POLISH = 0.6  # share of the trials after which neighbours of the best are tried again: the sampler skips them
LEADERS = 2  # configurations whose neighbours are tried, whatever batch size they lead at
# Recombinations of known launches whose times add up: the number that is tried next per batch size; the share by which
# their sum must be below the best known time; and the same share while seeds are left to try.
RECOMBINED, MIN_PROMISE, LARGE_PROMISE = 2, 0.002, 0.02
MAX_REPEATS = 40  # proposals already known, in a row, after which an unknown one is drawn


@dataclasses.dataclass
class Trial:
    """The result of one configuration: microseconds per batch size, or the reason why it was rejected."""

    config: Config
    us: dict[int, float] = dataclasses.field(default_factory=dict)
    reason: str = ""
    detail: str = ""


class Study:
    """Proposes configurations of ``space``, in this order: (1) recombinations that are predicted to be at least
    ``LARGE_PROMISE`` faster, (2) ``seeds``, (3) recombinations that are predicted to be at least ``MIN_PROMISE``
    faster, (4) neighbours of the leaders, (5) proposals of TPE, (6) after the share ``POLISH`` of the trials,
    neighbours of the new leaders. Where that would leave TPE less than the share ``proposed`` of all trials, the last
    ones are TPE's. cap: number of trials. proposals: TPE's so far. baseline: microseconds per batch size that a trial
    is compared with."""

    def __init__(
        self, space: Space, seeds: Iterable[Config], cap: int, *, proposed: float = 0.0, seed: int = 0
    ) -> None:
        self.space, self.cap, self.proposed = space, cap, proposed
        self.proposals: set[Config] = set()
        self.baseline: dict[int, float] = {}
        self.trials: dict[Config, Trial] = {}
        self._asked: dict[Config, optuna.Trial | None] = {}  # None where the proposal is not Optuna's
        self._seeds = list(dict.fromkeys(seeds))
        self._surrounded: set[Config] = set()  # configurations whose neighbours have been proposed
        self._seed = seed
        self._random = random.Random(seed)
        self._optuna: optuna.Study | None = None

    @property
    def brute(self) -> bool:
        return len(self.space.points) <= self.cap

    @property
    def size(self) -> int:
        """Configurations that will be tried."""
        outside = sum(config not in self.space.points for config in self._seeds)
        return min(self.cap, len(self.space.points) + outside)

    @property
    def known(self) -> int:
        return len(self.trials) + len(self._asked)

    @property
    def asked(self) -> int:
        """Proposals that have not been answered yet."""
        return len(self._asked)

    def offer(self, configs: Iterable[Config]) -> None:
        """Try these configurations next."""
        inside = [config for config in configs if config in self.space.points]
        self._seeds = [*(config for config in inside if config not in self._seeds), *self._seeds]

    def ask(self) -> Config | None:
        """A configuration that nobody has asked for yet; None when the study is over, or has nothing to propose until
        it is told more."""
        if self.known >= self.size:
            return None
        config = None if self._is_reserved else self._next_seed()
        if config is None and self.brute:
            config = next(filter(self._is_unknown, self.space.points), None)
        elif config is None:
            return self._propose()
        if config is not None:
            self._asked[config] = None
        return config

    @property
    def _is_reserved(self) -> bool:
        """True where all trials that are left are the sampler's."""
        owed = math.ceil(self.proposed * self.size) - len(self.proposals)
        return not self.brute and self.size - self.known <= owed

    def tell(self, config: Config, us: Mapping[int, float] | None, reason: str = "", detail: str = "") -> None:
        """us: microseconds per batch size; None where ``config`` was rejected, with the reason. The first times that a
        study is told, those of the built-in choice as a rule, are its baseline."""
        asked = self._asked.pop(config, None)
        for rows, value in (us or {}).items():
            self.baseline.setdefault(rows, value)
        self.trials[config] = Trial(config, dict(us or {}), reason, detail)
        if self._optuna is not None and config in self.space.points:
            self._tell_optuna(config, asked)

    def value(self, config: Config) -> float | None:
        """Log-ratio to the baseline at the batch size where ``config`` is best; None for a rejected one. A study serves
        several batch sizes, and a winner at one of them is worth finding."""
        trial = self.trials[config]
        if trial.reason or not trial.us:
            return None
        return min(math.log(us / self.baseline.get(rows, us)) for rows, us in trial.us.items())

    def best(self, rows: int, count: int) -> list[Config]:
        """The fastest at the measured batch size nearest to ``rows``, fastest first."""
        timed = [trial for trial in self.trials.values() if not trial.reason and trial.us]
        ranked = sorted(timed, key=lambda trial: (self.estimate(trial.config, rows), str(trial.config)))
        return [trial.config for trial in ranked[:count]]

    def estimate(self, config: Config, rows: int) -> float:
        """Microseconds at the measured batch size nearest to ``rows``."""
        us = self.trials[config].us
        return us[min(us, key=lambda measured: (abs(math.log2(measured / rows)), measured))]

    def least(self, rows: int) -> float | None:
        """The smallest ``estimate``; None where nothing was timed."""
        timed = (trial.config for trial in self.trials.values() if not trial.reason and trial.us)
        return min((self.estimate(config, rows) for config in timed), default=None)

    def recombined(self, promise: float) -> list[Config]:
        """Unknown configurations that take ``promise`` less than every known one at some batch size if the times of
        their launches add up: ``(a, b)`` takes as long as ``(a, y)`` and ``(x, b)`` without ``(x, y)``."""
        if self.space.path not in LAUNCH_AXES:
            return []
        known: dict[int, dict[Launches, float]] = {}
        for config, trial in self.trials.items():
            launches = self.space.launches(config)
            if launches is not None and not trial.reason:
                for rows, us in trial.us.items():
                    known.setdefault(rows, {})[launches] = us
        promising: dict[Config, None] = {}
        for times in known.values():
            firsts, seconds = ({launches[place] for launches in times} for place in (0, 1))
            ranked = []
            for a, b in itertools.product(sorted(firsts, key=str), sorted(seconds, key=str)):
                sums = [
                    times[a, y] + times[x, b] - times[x, y]
                    for x, y in times
                    if (a, y) in times and (x, b) in times and (a, b) not in times
                ]
                if sums and statistics.median(sums) < (1 - promise) * min(times.values()):
                    ranked.append((statistics.median(sums), (a, b)))
            for _, pair in sorted(ranked, key=lambda one: (one[0], str(one[1])))[:RECOMBINED]:
                together = self.space.of_launches(pair)
                if together is not None and self._is_unknown(together):
                    promising[together] = None
        return list(promising)

    def _next_seed(self) -> Config | None:
        while True:
            self._seeds = [config for config in self._seeds if self._is_unknown(config)]
            begun = bool(self._seeds) and not self._surrounded  # seeds come before recombinations that promise little
            promising = [] if self.brute else self.recombined(LARGE_PROMISE if begun else MIN_PROMISE)
            if promising or self._seeds:
                return promising[0] if promising else self._seeds.pop(0)
            if self.brute:
                return None
            around = [config for config in self._leaders() if config not in self._surrounded]
            if not around or (self._surrounded and self.known < POLISH * self.size):
                return None
            self._surrounded |= set(around)
            self._seeds = [near for config in around for near in self.space.neighbours(config)]

    def _is_unknown(self, config: Config) -> bool:
        return config not in self.trials and config not in self._asked

    def _leaders(self) -> list[Config]:
        """The best two, and the best at each batch size that is measured: each of them may win a race."""
        values = {config: value for config in self.trials if (value := self.value(config)) is not None}
        leaders = sorted(values, key=lambda config: (values[config], str(config)))[:LEADERS]
        for rows in sorted({rows for config in values for rows in self.trials[config].us}):
            leaders += self.best(rows, 1)
        return list(dict.fromkeys(leaders))

    def _propose(self) -> Config | None:
        if self._optuna is None:
            sampler = optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=STARTUP)
            self._optuna = optuna.create_study(direction="minimize", sampler=sampler)
            for known in self.trials:
                if known in self.space.points:
                    self._tell_optuna(known, None)
        for _ in range(MAX_REPEATS):
            trial = self._optuna.ask()
            point = {name: trial.suggest_categorical(name, values) for name, values in self.space.axes.items()}
            config = self.space.config(point)
            if config is not None and self._is_unknown(config):
                self._asked[config] = trial
                self.proposals.add(config)
                return config
            if config is not None and config in self._asked:
                # Ignored: its value will be told.
                self._optuna.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                self._tell_trial(trial, None if config is None else self.value(config))
        unknown = list(filter(self._is_unknown, self.space.points))
        if not unknown:
            return None
        drawn = self._random.choice(unknown)
        self._asked[drawn] = None
        return drawn

    def _tell_optuna(self, config: Config, asked: optuna.Trial | None) -> None:
        assert self._optuna is not None
        if asked is not None:
            self._tell_trial(asked, self.value(config))
        else:
            self._optuna.add_trial(frozen_trial(self.space, config, self.value(config)))

    def _tell_trial(self, trial: optuna.Trial, value: float | None) -> None:
        assert self._optuna is not None
        if value is None:
            self._optuna.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self._optuna.tell(trial, value)


def frozen_trial(space: Space, config: Config, value: float | None) -> optuna.trial.FrozenTrial:
    """A finished trial of Optuna's, pruned where ``value`` is None."""
    axes: dict[str, Any] = {
        name: optuna.distributions.CategoricalDistribution(values) for name, values in space.axes.items()
    }
    state = optuna.trial.TrialState.COMPLETE if value is not None else optuna.trial.TrialState.PRUNED
    return optuna.trial.create_trial(state=state, params=space.points[config], distributions=axes, value=value)


def finished_study(space: Space, values: Mapping[Config, float | None]) -> optuna.Study:
    """The trials of a search as a study of Optuna's, for its importances and plots. values: as ``Study.value``."""
    study = optuna.create_study(direction="minimize")
    for config, value in values.items():
        if config in space.points:
            study.add_trial(frozen_trial(space, config, value))
    return study
