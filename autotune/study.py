"""One search: what to try next in a space, given what is known about it.

Optuna's TPE proposes (multivariate, ask and tell); what is decided is decided elsewhere, in races. The study lives in
memory and is rebuilt from our own log of trials (``trials.py``): a storage of Optuna's would be a second truth, and its
journal does not survive a line that was cut short. Spaces of at most ``BRUTE`` configurations are walked, and
those that are to be tried as a whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from .space import LAUNCH_AXES, Config, Space

BRUTE = 64
STARTUP = 12  # trials before the surrogate has a say
POLISH = 0.6  # share of the trials after which the best are surrounded again: the sampler steps over its neighbours
LEADERS = 2  # whose neighbours are tried, whatever batch size they lead at
# Where the times of launches add up: configurations put together of known launches that are tried next, per batch size,
# and how much faster than the best known one they have to promise to be; and before all seeds have been tried.
PUT_TOGETHER, PROMISE, MUCH = 2, 0.002, 0.02
MOST_REPEATS = 40  # proposals already known, in a row, after which an unknown one is drawn


@dataclasses.dataclass
class Trial:
    """What is known of one configuration: microseconds per batch size, or why it was rejected."""

    config: Config
    us: dict[int, float] = dataclasses.field(default_factory=dict)
    why: str = ""
    detail: str = ""


class Study:
    """Proposes configurations of ``space``: first ``seeds``, in their order, and what promises to be faster by the sum
    of its launches (before the seeds, if it is much), then the neighbours of the best ones, then what the sampler says,
    and late in the search the neighbours of what is best by then. baseline: microseconds per batch size that a trial is
    compared with."""

    def __init__(self, space: Space, seeds: Iterable[Config], cap: int, *, seed: int = 0) -> None:
        self.space, self.cap = space, cap
        self.baseline: dict[int, float] = {}
        self.trials: dict[Config, Trial] = {}
        self._asked: dict[Config, Any] = {}  # and the optuna trial, None where the proposal is not its own
        self._seeds = list(dict.fromkeys(seeds))
        self._surrounded: set[Config] = set()  # whose neighbours have been proposed
        self._seed = seed
        self._random = random.Random(seed)
        self._optuna: Any = None

    @property
    def brute(self) -> bool:
        return len(self.space.points) <= max(BRUTE, self.cap)

    @property
    def size(self) -> int:
        """How many configurations will be tried."""
        outside = sum(config not in self.space.points for config in self._seeds)
        return min(self.cap, len(self.space.points) + outside)

    @property
    def known(self) -> int:
        return len(self.trials) + len(self._asked)

    @property
    def asked(self) -> int:
        """How many proposals have not been answered yet."""
        return len(self._asked)

    def offer(self, configs: Iterable[Config]) -> None:
        """Try these next: they have been good elsewhere."""
        inside = [config for config in configs if config in self.space.points]
        self._seeds = [*(config for config in inside if config not in self._seeds), *self._seeds]

    def ask(self) -> Config | None:
        """A configuration that nobody has asked for yet; None when the study is over, or has nothing to propose until
        it is told more."""
        if self.known >= self.size:
            return None
        config = self._next_seed()
        if config is None:
            config = self._walk() if self.brute else self._propose()
        return config

    def tell(self, config: Config, us: Mapping[int, float] | None, why: str = "", detail: str = "") -> None:
        """us: microseconds per batch size; None where ``config`` was rejected, with the reason."""
        asked = self._asked.pop(config, None)
        self.trials[config] = Trial(config, dict(us or {}), why, detail)
        if self._optuna is not None and config in self.space.points:
            self._tell_optuna(config, asked)

    def value(self, config: Config) -> float | None:
        """Log-ratio to the baseline at the batch size where ``config`` is best; None for a rejected one. A study serves
        several batch sizes, and what wins at one of them is worth finding."""
        trial = self.trials[config]
        if trial.why or not trial.us:
            return None
        return min(math.log(us / self.baseline.get(batch, us)) for batch, us in trial.us.items())

    def best(self, batch: int, count: int) -> list[Config]:
        """The fastest at the measured batch size nearest to ``batch``, fastest first."""
        timed = [trial for trial in self.trials.values() if not trial.why and trial.us]
        ranked = sorted(timed, key=lambda trial: (self.estimate(trial.config, batch), str(trial.config)))
        return [trial.config for trial in ranked[:count]]

    def estimate(self, config: Config, batch: int) -> float:
        """Microseconds at the probe nearest to ``batch``."""
        return self.trials[config].us[self.probe(config, batch)]

    def least(self, batch: int) -> float | None:
        """As ``estimate``, of the fastest; None where nothing was timed."""
        best = self.best(batch, 1)
        return self.estimate(best[0], batch) if best else None

    def probe(self, config: Config, batch: int) -> int:
        return min(self.trials[config].us, key=lambda measured: (abs(math.log2(measured / batch)), measured))

    def _next_seed(self) -> Config | None:
        while True:
            self._seeds = [config for config in self._seeds if self._is_unknown(config)]
            begun = bool(self._seeds) and not self._surrounded  # what it was given comes before what promises little
            together = [] if self.brute else self._promising(MUCH if begun else PROMISE)
            if together or self._seeds:
                config = together[0] if together else self._seeds.pop(0)
                self._asked[config] = None
                return config
            if self.brute:
                return None
            around = [config for config in self._leaders() if config not in self._surrounded]
            if not around or (self._surrounded and self.known < POLISH * self.size):
                return None
            self._surrounded |= set(around)
            self._seeds = [near for config in around for near in self.space.neighbours(config)]

    def _is_unknown(self, config: Config) -> bool:
        return config not in self.trials and config not in self._asked

    def _promising(self, promise: float) -> list[Config]:
        """Unknown configurations that take ``promise`` less than every known one at some batch size if the times of
        their launches add up: ``(a, b)`` takes as long as ``(a, y)`` and ``(x, b)`` without ``(x, y)``."""
        if self.space.path not in LAUNCH_AXES:
            return []
        known: dict[int, dict[tuple[Any, ...], float]] = {}
        for config, trial in self.trials.items():
            launches = self.space.launches(config)
            if launches is not None and not trial.why:
                for batch, us in trial.us.items():
                    known.setdefault(batch, {})[launches] = us
        found: dict[Config, None] = {}
        for times in known.values():
            firsts, seconds = ({launches[place] for launches in times} for place in (0, 1))
            ranked = []
            for pair in itertools.product(sorted(firsts, key=str), sorted(seconds, key=str)):
                a, b = pair
                sums = [
                    times[a, y] + times[x, b] - times[x, y]
                    for x, y in times
                    if (a, y) in times and (x, b) in times and pair not in times
                ]
                if sums and statistics.median(sums) < (1 - promise) * min(times.values()):
                    ranked.append((statistics.median(sums), pair))
            for _, pair in sorted(ranked, key=lambda one: (one[0], str(one[1])))[:PUT_TOGETHER]:
                together = self.space.of_launches(pair)
                if together is not None and self._is_unknown(together):
                    found[together] = None
        return list(found)

    def _leaders(self) -> list[Config]:
        """The best two, and the best at each batch size that is measured: each of them may win a race."""
        timed = [config for config in self.trials if self.value(config) is not None]
        leaders = sorted(timed, key=lambda config: (self.value(config), str(config)))[:LEADERS]
        for batch in sorted({batch for config in timed for batch in self.trials[config].us}):
            leaders += self.best(batch, 1)
        return list(dict.fromkeys(leaders))

    def _walk(self) -> Config | None:
        for config in self.space.points:
            if self._is_unknown(config):
                self._asked[config] = None
                return config
        return None

    def _propose(self) -> Config | None:
        optuna = _import_optuna()
        if self._optuna is None:
            self._start(optuna)
        for _ in range(MOST_REPEATS):
            trial = self._optuna.ask()
            point = {name: trial.suggest_categorical(name, choices) for name, choices in self.space.axes.items()}
            config = self.space.config(point)
            if config is None:
                self._optuna.tell(trial, state=optuna.trial.TrialState.PRUNED)
            elif config in self.trials:
                value = self.value(config)
                if value is None:
                    self._optuna.tell(trial, state=optuna.trial.TrialState.PRUNED)
                else:
                    self._optuna.tell(trial, value)
            elif config in self._asked:
                self._optuna.tell(trial, state=optuna.trial.TrialState.FAIL)  # ignored: what it is worth will be told
            else:
                self._asked[config] = trial
                return config
        left = [config for config in self.space.points if self._is_unknown(config)]
        if not left:
            return None
        config = self._random.choice(left)
        self._asked[config] = None
        return config

    def _start(self, optuna: Any) -> None:
        sampler = optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=STARTUP)
        self._optuna = optuna.create_study(direction="minimize", sampler=sampler)
        for config in self.trials:
            if config in self.space.points:
                self._tell_optuna(config, None)

    def _tell_optuna(self, config: Config, asked: Any) -> None:
        optuna = _import_optuna()
        value = self.value(config)
        if asked is not None:
            if value is None:
                self._optuna.tell(asked, state=optuna.trial.TrialState.PRUNED)
            else:
                self._optuna.tell(asked, value)
            return
        self._optuna.add_trial(frozen_trial(self.space, config, value))


def frozen_trial(space: Space, config: Config, value: float | None) -> Any:
    """A finished trial of Optuna's, pruned where ``value`` is None."""
    optuna = _import_optuna()
    axes = {name: optuna.distributions.CategoricalDistribution(choices) for name, choices in space.axes.items()}
    state = optuna.trial.TrialState.COMPLETE if value is not None else optuna.trial.TrialState.PRUNED
    return optuna.trial.create_trial(state=state, params=space.points[config], distributions=axes, value=value)


def importances(space: Space, values: Mapping[Config, float | None]) -> dict[str, float]:
    """Share of each axis in what makes a configuration good (PED-ANOVA); empty where too little is known."""
    inside = {config: value for config, value in values.items() if config in space.points}
    if sum(value is not None for value in inside.values()) < STARTUP:
        return {}
    optuna = _import_optuna()
    study = optuna.create_study(direction="minimize")
    for config, value in inside.items():
        study.add_trial(frozen_trial(space, config, value))
    try:
        found = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    except (ImportError, RuntimeError, ValueError):  # one value on every axis, or a library that is not there
        return {}
    return {name: float(share) for name, share in found.items()}


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ModuleNotFoundError(
            f"the search needs optuna ({error}): pip install 'sgl-flashsample[tune]', or take --effort quick"
        ) from None
    import warnings

    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
