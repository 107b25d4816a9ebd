"""``Comparison``: when pairs decide, how often that is wrong, and the three answers."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from sgl_flashsample.tools import comparison
from sgl_flashsample.tools.comparison import ALPHA, EQUAL, FASTER, MARGIN, OPEN, SLOWER, Comparison, half_width


def of_logs(logs, more_is_faster=False) -> Comparison:
    return Comparison.of([1.0] * len(logs), [math.exp(value) for value in logs], more_is_faster=more_is_faster)


def of_mean(mean: float, half: float, pairs: int = 10, more_is_faster: bool = False) -> Comparison:
    """Logs with this mean, whose interval reaches ``half`` to both sides."""
    spread = half / half_width(1.0, pairs)
    return of_logs([mean + spread * (-1) ** place for place in range(pairs)], more_is_faster)


# --- the interval ----------------------------------------------------------------------------------------------------


def test_the_interval_ends_where_the_mixture_has_odds_of_1_over_alpha_against_the_mean():
    """The likelihood of the t statistic under normal effects, integrated, over that under no effect."""
    pairs, spread = 9, 0.013
    t = half_width(spread, pairs) / (spread / math.sqrt(pairs - 1))

    def weighed(effect: float) -> float:
        density = scipy.stats.nct.pdf(t, pairs - 1, effect * math.sqrt(pairs))
        return density * scipy.stats.norm.pdf(effect, scale=comparison.PRECISION**-0.5)

    odds = scipy.integrate.quad(weighed, -30, 30, limit=400)[0] / scipy.stats.t.pdf(t, pairs - 1)
    assert odds == pytest.approx(1 / ALPHA, rel=0.01)


def test_equal_servers_are_seldom_called_different_however_often_one_looks():
    """4,000 comparisons with a look after each of 200 pairs. At most 1 % may ever err; three standard errors more."""
    logs = np.random.default_rng(3).normal(0.0, 0.01, (4000, 200))
    sums, counts = logs.cumsum(1), np.arange(1, 201)
    spreads = np.sqrt(np.maximum((logs**2).cumsum(1) / counts - (sums / counts) ** 2, 0))
    widths = np.array([half_width(1.0, int(count)) for count in counts])
    looked = slice(comparison.LEAST_PAIRS - 1, None)
    ever = (np.abs(sums / counts)[:, looked] > (widths[looked] * spreads[:, looked])).any(1)
    assert 0 < ever.mean() <= ALPHA + 3 * math.sqrt(ALPHA / 4000)


@pytest.mark.parametrize("true", [0.0, 0.01, 0.022, 0.05])
def test_a_comparison_that_stops_when_it_is_decided_is_seldom_wrong(true):
    """Wrong: another sign, or equal where the change is larger than the margin."""
    rng, wrong, decided = np.random.default_rng(5), 0, 0
    for _ in range(400):
        logs = rng.normal(math.log1p(true), 0.01, 60)
        for pairs in range(comparison.LEAST_PAIRS, 61):
            found = of_logs(logs[:pairs], more_is_faster=True)
            if found.decided:
                break
        decided += found.decided
        wrong += found.answer == SLOWER or (found.answer == FASTER and true == 0.0)
        wrong += found.answer == EQUAL and true > MARGIN
    assert wrong <= 8
    assert decided >= 390


# --- the answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mean, half, answer, words",
    [
        (-0.05, 0.01, FASTER, r"faster by 4\.9 ± 1\.0 %"),
        (0.05, 0.01, SLOWER, r"slower by 5\.1 ± 1\.1 %"),
        (0.004, 0.009, EQUAL, r"equal within 1\.4 %"),
        (0.004, 0.018, OPEN, r"not decided yet \(about \d+ more minutes\)"),
        (0.03, 0.04, OPEN, r"not decided yet \(about \d+ more minutes\)"),
    ],
)
def test_there_are_three_answers(mean, half, answer, words):
    found = of_mean(mean, half)
    assert found.answer == answer and re.fullmatch(words, found.words(60.0))


def test_more_tokens_per_second_are_faster_and_more_time_is_slower():
    assert of_mean(0.05, 0.01, more_is_faster=True).answer == FASTER
    assert of_mean(0.05, 0.01, more_is_faster=False).answer == SLOWER


@pytest.mark.parametrize("mean", np.linspace(-0.04, 0.04, 9))
def test_an_interval_of_the_margins_width_always_decides(mean):
    assert of_mean(mean, MARGIN / 2 - 2e-4).decided


def test_the_time_until_a_decision_is_that_of_the_pairs_that_the_spread_asks_for():
    """And no pair fewer would do."""
    found = of_mean(0.001, 0.05, pairs=8)
    pairs = found.pairs + found.more_pairs
    enough = MARGIN - 0.001
    assert half_width(found.spread, pairs) <= enough < half_width(found.spread, pairs - 1)
    assert found.words(6.0) == f"not decided yet (about {round(found.more_pairs / 10)} more minutes)"
    assert found.words(0.1) == "not decided yet (about 1 more minute)"


@pytest.mark.parametrize("logs", [[], [0.3], [0.3, 0.31], [0.3, 0.3, 0.3]])
def test_fewer_than_four_pairs_decide_nothing_and_have_no_bounds(logs):
    found = of_logs(logs)
    fields = found.fields()
    assert (found.answer, found.more_pairs >= 4 - len(logs)) == (OPEN, True)
    assert (fields["low"], fields["high"], fields["pairs"]) == (None, None, len(logs))


def test_equal_ratios_are_a_coarse_clock_not_certainty():
    found = of_logs([0.0] * 6)
    assert found.high > 1e-4 and found.words(1.0) == "equal within 0.1 %"
