"""When pairs of measurements decide between two servers, and what is said then.

A pair is one measurement of stock SGLang and one of ours, taken one after the other. The logs of the ratios of pairs
have a mean, which is the change. Its interval is a confidence sequence: it holds the true change after every pair at
once with ``1 - ALPHA``, so a measurement may look after each pair and stop when it likes. (The t statistic against a
normal mixture of effects, for normal logs of unknown variance: Lai, Annals of Statistics 4, 1976; as an e-process, Wang
and Ramdas, Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance, 2023.)

There are three answers: faster or slower, where the interval excludes 0; equal, where it lies within ``MARGIN``; not
decided yet. An interval of ``MARGIN`` width gives one of the first two, whatever the change is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ALPHA = 0.01  # chance that the interval of a cell ever leaves out the true change
MARGIN = 0.02  # servers whose change is certainly smaller are called equal
# Of the mixture: 1 over the variance of the effects, in standard deviations of a pair. Changes of servers are some of
# these; a smaller number gives narrower intervals for the first five pairs and wider ones after.
PRECISION = 0.03
LEAST_PAIRS = 4  # with fewer the interval is no use
SMALLEST_SPREAD = 1e-4  # equal ratios are a coarse clock, not certainty
MOST_PAIRS = 1 << 20
FASTER, SLOWER, EQUAL, OPEN = "faster", "slower", "equal", "not decided yet"


def half_width(spread: float, pairs: int) -> float:
    """Half the width of the interval of the mean. spread: standard deviation of the logs, with ``pairs`` as its
    divisor. Infinite for fewer than ``LEAST_PAIRS``."""
    if pairs < LEAST_PAIRS:
        return math.inf
    share = PRECISION / (pairs + PRECISION)
    bound = (ALPHA**2 * share) ** (-1 / pairs)
    return spread * math.sqrt((bound - 1) / (1 - share * bound))


class Comparison(NamedTuple):
    """change: of ours over stock, 0.05 is 5 % more. low, high: its interval. spread: of the logs of the ratios.
    more_is_faster: the numbers are speeds, not times."""

    pairs: int
    change: float
    low: float
    high: float
    spread: float
    more_is_faster: bool

    @classmethod
    def of(cls, stock: Sequence[float], ours: Sequence[float], *, more_is_faster: bool) -> Comparison:
        """Pairs of positive times or speeds; those of the longer sequence that are left over do not count."""
        pairs = min(len(stock), len(ours))
        if not pairs:
            return cls(0, 0.0, -1.0, math.inf, math.inf, more_is_faster)
        logs = np.log(ours[:pairs]) - np.log(stock[:pairs])
        mean, spread = float(logs.mean()), max(float(logs.std()), SMALLEST_SPREAD) if pairs > 1 else math.inf
        half = half_width(spread, pairs)
        low, high = (float(np.expm1(bound)) for bound in (mean - half, mean + half))
        return cls(pairs, math.expm1(mean), low, high, spread, more_is_faster)

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.high)

    @property
    def middle(self) -> float:
        """Of the interval; the change where it has no bounds."""
        return (self.low + self.high) / 2 if self.bounded else self.change

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    @property
    def answer(self) -> str:
        if self.low > 0 or self.high < 0:
            return FASTER if (self.low > 0) == self.more_is_faster else SLOWER
        return EQUAL if max(-self.low, self.high) <= MARGIN else OPEN

    @property
    def decided(self) -> bool:
        return self.answer != OPEN

    @property
    def more_pairs(self) -> int:
        """Pairs until it is decided, if their mean and spread stay as they are; 0 where it is."""
        if self.decided:
            return 0
        if not math.isfinite(self.spread):
            return LEAST_PAIRS - self.pairs
        mean = abs(math.log1p(self.change))
        enough = max(mean, MARGIN - mean)
        below, at_least = max(self.pairs, LEAST_PAIRS - 1), LEAST_PAIRS
        while at_least < MOST_PAIRS and (at_least <= below or half_width(self.spread, at_least) > enough):
            at_least *= 2
        while at_least - below > 1:
            middle = (below + at_least) // 2
            below, at_least = (below, middle) if half_width(self.spread, middle) <= enough else (middle, at_least)
        return at_least - self.pairs

    @property
    def percent(self) -> str:
        """The change and its interval: "-5.1 ± 0.9 %"."""
        if not self.bounded:
            return f"{100 * self.change:+.1f} %, of {self.pairs} pair{'s' * (self.pairs != 1)}"
        return f"{100 * self.middle:+.1f} ± {_up(100 * self.half)} %"

    def words(self, pair_seconds: float) -> str:
        """The answer. pair_seconds: that a pair takes."""
        if self.answer == OPEN:
            minutes = max(1, round(self.more_pairs * pair_seconds / 60))
            return f"{OPEN} (about {minutes} more minute{'s' * (minutes > 1)})"
        if self.answer == EQUAL:
            return f"equal within {_up(100 * max(-self.low, self.high))} %"
        return f"{self.answer} by {self.percent.lstrip('+-')}"

    def fields(self) -> dict[str, float | int | str | None]:
        """For a result file. low, high: None with fewer than ``LEAST_PAIRS``."""
        numbers = {"change": self.change, "low": self.low, "high": self.high}
        known = {name: round(value, 5) if self.bounded or name == "change" else None for name, value in numbers.items()}
        return {"answer": self.answer, "pairs": self.pairs, **known}


def _up(percent: float) -> str:
    """One decimal, never less than the number."""
    return f"{math.ceil(10 * percent - 1e-9) / 10:.1f}"
