"""The fastest of several candidates, from samples that were taken side by side: a pure function of the samples.

A round times every candidate still in the race once, in rotated order, so that drift of the clocks falls on all alike.
The log-ratios to the leader within each round are judged. A candidate leaves once the confidence interval of
its ratio lies beyond the tie band (t intervals, Bonferroni over looks and candidates). The race ends when one is left,
when every ratio is known to ``Policy.error``, or after ``Policy.most`` rounds.

A fixed order decides among candidates that equal the leader, so that two runs agree; and the built-in choice is left
only for a gain that is certain.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence

from ..kernels.config import cdiv

GAIN_TOLERANCE = 0.05  # largest difference of the gain of paired rounds and that of the two medians
MIN_CLOCK = 0.9  # share of the median clock; rounds below it do not count
RECORDED_ROUNDS = 9  # rounds in which the times of a table are taken, and by `verify` taken again


@dataclasses.dataclass(frozen=True)
class Policy:
    """least, step, most: rounds before the first look, between looks, and in all. error: standard error of the
    log-ratios at which a race ends. tie, tie_us: times this close are equal, relative or in microseconds, the larger.
    min_gain: lower bound of a gain over the built-in choice's time. alpha: chance of any wrong elimination, and of
    leaving the built-in choice for less than ``min_gain``.
    """

    least: int = 6
    step: int = 3
    most: int = 30
    error: float = 0.003
    tie: float = 0.01
    tie_us: float = 0.5
    min_gain: float = 0.01
    alpha: float = 0.05

    @property
    def looks(self) -> int:
        return 1 + cdiv(max(0, self.most - self.least), self.step)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One configuration of a race. preference: order among equals, the smallest first (``preference_of``)."""

    name: str
    preference: tuple = ()


@dataclasses.dataclass(frozen=True)
class Standing:
    """us: median microseconds. ratio, ratio_se: mean log-ratio to the leader and its standard error. low: its lower
    bound."""

    us: float
    ratio: float
    ratio_se: float
    low: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """alive: candidates that go on, in the order given. winner, tied: the choice, and its equals.
    gain, gain_low: the winner's over the built-in choice, 0.02 is 2 %; and its lower bound."""

    alive: tuple[str, ...]
    done: bool
    winner: str
    tied: tuple[str, ...]
    gain: float
    gain_low: float
    standings: dict[str, Standing]


def preference_of(is_default: bool, is_neighbour: bool, shared_bytes: int, stages: int, config: Sequence) -> tuple:
    """The order among equals: the built-in choice, a neighbouring size's choice, less shared memory, fewer stages."""
    return (not is_default, not is_neighbour, shared_bytes, stages, tuple(map(str, config)))


def kept_rounds(clocks: Sequence[float]) -> list[bool]:
    """The rounds that count: those at ``MIN_CLOCK`` of the median clock or more. The highest clock is no measure: only
    the first round after a pause may have it. Unknown clocks (0) all count."""
    usual = statistics.median(clocks)
    return [clock >= MIN_CLOCK * usual for clock in clocks]


def judge(
    candidates: Sequence[Candidate],
    samples: Mapping[str, Sequence[float]],
    clocks: Sequence[float],
    default: str | None,
    policy: Policy,
    *,
    last: bool = False,
) -> Verdict:
    """The verdict on the samples so far.

    samples: microseconds per round, ``samples[name][i]`` of round ``i``; a candidate that has left the race has fewer.
    clocks: MHz per round. default: a candidate's name, or None. last: no more rounds will come (the time is over).
    """
    rounds, counts = len(clocks), kept_rounds(clocks)
    kept = {c.name: [v for v, counted in zip(samples[c.name], counts, strict=False) if counted] for c in candidates}
    running = [c for c in candidates if len(samples[c.name]) == rounds]
    common = min(len(kept[c.name]) for c in running)  # rounds that all who are running have in common
    log_times = {c.name: robust_mean([math.log(v) for v in kept[c.name][:common]])[0] for c in running}
    leader = min(running, key=lambda c: (log_times[c.name], c.preference)).name
    tests = policy.looks * max(1, len(candidates) - 1)
    standings = {
        c.name: _standing(kept[c.name], kept[leader], policy.alpha / tests) for c in candidates if kept[c.name]
    }
    best_us = standings[leader].us
    band = math.log1p(max(policy.tie, policy.tie_us / best_us))
    alive = tuple(c.name for c in running if standings[c.name].low <= band)
    open_ratios = [standings[name] for name in alive if name != leader]
    known = rounds >= policy.least and all(s.ratio_se < policy.error for s in open_ratios)
    # A candidate that has left cannot win, nor can one that is certainly slower than the leader, and by more than the
    # band.
    ties = [c for c in running if c.name in alive and (standings[c.name].ratio <= band or standings[c.name].low <= 0.0)]
    winner, gain, gain_low = _choose(ties, kept, default, policy)
    # More rounds may still show that the built-in choice is certainly slower, or that a candidate that seems slower is.
    doubtful = (winner == default and standings[winner].ratio > band) or any(
        standings[c.name].ratio > band for c in ties
    )
    decided = (known and not doubtful) or (rounds >= policy.least and not open_ratios)
    done = last or rounds >= policy.most or decided
    tied = tuple(sorted(c.name for c in ties if c.name != winner))
    return Verdict(alive, done, winner, tied, gain, gain_low, standings)


def certainly_faster(mine: Sequence[float], than: Sequence[float], clocks: Sequence[float], policy: Policy) -> bool:
    """True where ``mine`` is faster than ``than``, timed in the same rounds, by more than ``min_gain`` with the whole
    interval."""
    rounds = min(len(mine), len(than))
    gain = Ratio.of(than[:rounds], mine[:rounds], clocks[:rounds], 2 * policy.alpha / policy.looks)
    return gain.low > policy.min_gain


def _choose(
    ties: list[Candidate], kept: Mapping[str, Sequence[float]], default: str | None, policy: Policy
) -> tuple[str, float, float]:
    """The winner among ``ties``, its gain over the built-in choice and the gain's lower bound."""
    by_preference = sorted(ties, key=lambda c: c.preference)
    if default is None or not kept.get(default):
        return by_preference[0].name, 0.0, 0.0
    if default in {c.name for c in ties}:
        return default, 0.0, 0.0
    alpha = policy.alpha / (policy.looks * len(ties))
    for candidate in by_preference:
        gain = _standing(kept[default], kept[candidate.name], alpha)
        if gain.low > math.log1p(policy.min_gain):
            return candidate.name, math.expm1(gain.ratio), math.expm1(gain.low)
    return default, 0.0, 0.0


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The median and its standard error."""
    us = statistics.median(values)
    # Standard error of the median of n nearly normal values, from their mean absolute deviation: a spike counts once.
    spread = statistics.median(abs(v - us) for v in values) * 1.4826
    return us, 1.2533 * spread / math.sqrt(len(values))


def _standing(values: Sequence[float], leader: Sequence[float], alpha: float) -> Standing:
    us, n = statistics.median(values), min(len(values), len(leader))
    if values is leader:
        return Standing(us, 0.0, 0.0, 0.0)
    mean, error = robust_mean([math.log(v / w) for v, w in zip(values[:n], leader[:n], strict=True)])
    low = mean - t_quantile(1 - alpha, n - 1) * error if n >= 3 else -math.inf
    return Standing(us, mean, error, low)


def robust_mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error, values beyond four deviations (of the median) drawn in to there."""
    centre = statistics.median(values)
    spread = max(statistics.median(abs(v - centre) for v in values) * 1.4826, 1e-5)
    held = [min(max(v, centre - 4 * spread), centre + 4 * spread) for v in values]
    if len(held) < 2:
        return centre, math.inf
    return statistics.fmean(held), _error(held)


def _error(values: Sequence[float]) -> float:
    """The standard error of the mean. Identical samples are a coarse timer, not certainty."""
    return max(statistics.stdev(values), 1e-4) / math.sqrt(len(values))


@functools.lru_cache(maxsize=4096)
def t_quantile(probability: float, dof: int) -> float:
    """Quantile of Student's t."""
    from scipy import special  # takes a second to import, and only races need it

    return float(special.stdtrit(dof, probability))


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of two times minus one, its standard error, and the bounds of its confidence interval."""

    off: float
    se: float
    low: float
    high: float

    @classmethod
    def of(cls, mine: Sequence[float], theirs: Sequence[float], clocks: Sequence[float], alpha: float = 0.05) -> Ratio:
        """``mine`` over ``theirs``, round by round; rounds at a low clock do not count. alpha: level of the
        two-sided interval. Raises ValueError for fewer than three rounds."""
        counts = kept_rounds(clocks)
        logs = [math.log(a / b) for a, b, counted in zip(mine, theirs, counts, strict=True) if counted]
        if len(logs) < 3:
            raise ValueError(f"{len(logs)} rounds count; expected at least 3")
        return cls._of_log(*robust_mean(logs), len(logs) - 1, alpha)

    @classmethod
    def paired(cls, mine: Sequence[float], theirs: Sequence[float], alpha: float) -> Ratio:
        """``mine`` over ``theirs``, pair by pair, of few pairs: a spike counts, and widens the interval. Raises
        ValueError for fewer than two pairs."""
        logs = [math.log(a / b) for a, b in zip(mine, theirs, strict=True)]
        if len(logs) < 2:
            raise ValueError(f"{len(logs)} pairs; expected at least 2")
        return cls._of_log(statistics.fmean(logs), _error(logs), len(logs) - 1, alpha)

    @classmethod
    def _of_log(cls, mean: float, error: float, dof: int, alpha: float) -> Ratio:
        half = t_quantile(1 - alpha / 2, dof) * error
        return cls(math.expm1(mean), error, math.expm1(mean - half), math.expm1(mean + half))

    @property
    def rounded(self) -> dict[str, float]:
        return {name: round(value, 5) for name, value in dataclasses.asdict(self).items()}


class Race:
    """A race in the making: ask ``due`` what to time next, ``add`` what came of it, until ``due`` is empty."""

    def __init__(self, candidates: Sequence[Candidate], default: str | None, policy: Policy) -> None:
        self.candidates, self.default, self.policy = list(candidates), default, policy
        self.samples: dict[str, list[float]] = {c.name: [] for c in candidates}
        self.clocks: list[float] = []
        self.verdict: Verdict | None = None

    def due(self) -> tuple[list[str], int]:
        """The names to time next, and the number of rounds; none and 0 when the race is over."""
        if self.verdict is None:
            return [c.name for c in self.candidates], self.policy.least
        if self.verdict.done:
            return [], 0
        return list(self.verdict.alive), min(self.policy.step, self.policy.most - len(self.clocks))

    def add(self, samples: Mapping[str, Sequence[float]], clocks: Sequence[float], *, last: bool = False) -> Verdict:
        """samples: of each name that was due, one value per round. clocks: one per round. last: the time is over."""
        for name, values in samples.items():
            self.samples[name] += values
        self.clocks += clocks
        self.verdict = judge(self.candidates, self.samples, self.clocks, self.default, self.policy, last=last)
        return self.verdict


def gains_apart(gain: float, us: float, default_us: float) -> float:
    """Distance of the gain of paired rounds and that of the two medians. A device that changes in the middle of a race
    pulls them apart, and then neither is known. 0 where no built-in choice ran."""
    return abs(gain - (1 - us / default_us)) if default_us > 0 else 0.0
