"""How finalists are compared: on samples whose truth is known."""

from __future__ import annotations

import math
import random

import pytest

from sgl_flashsample.autotune.race import Candidate, Policy, Race, judge, kept_rounds, preference_of, t_quantile

POLICY = Policy()


def simulate(truth: dict[str, float], seed: int, *, noise=0.004, drift=0.02, spikes=0.02, policy=POLICY, default="d"):
    """A race of candidates whose true times are ``truth``, with drift per round, noise per sample, and a few samples
    that are much slower."""
    chance = random.Random(seed)
    candidates = [Candidate(name, (name != default, name)) for name in truth]
    race = Race(candidates, default if default in truth else None, policy)
    while True:
        names, rounds = race.due()
        if not names:
            return race
        samples: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            common = 1 + drift * chance.uniform(-1, 1)
            for name in names:
                spike = 1.1 if chance.random() < spikes else 1.0
                samples[name].append(truth[name] * common * spike * math.exp(chance.gauss(0, noise)))
        race.add(samples, [1980.0] * rounds)


def test_the_default_stays_where_nothing_is_faster_by_more_than_the_margin():
    left = sum(
        simulate({"d": 300.0, "a": 298.0, "b": 297.2, "c": 310.0}, seed).verdict.winner != "d" for seed in range(300)
    )
    assert left <= 300 * POLICY.alpha / 2


def test_the_default_is_left_for_a_gain_that_is_certain_and_the_gain_is_what_it_is():
    races = [simulate({"d": 300.0, "a": 285.0, "b": 310.0}, seed) for seed in range(100)]
    assert all(race.verdict.winner == "a" for race in races)
    assert all(abs(race.verdict.gain - 300 / 285 + 1) < 0.01 for race in races)
    covered = sum(race.verdict.gain_low <= 300 / 285 - 1 for race in races)
    assert covered >= 97


@pytest.mark.slow
def test_the_true_best_is_eliminated_more_rarely_than_stated_and_never_for_more_than_the_band():
    truth = {name: 300.0 * (1 + 0.001 * i) for i, name in enumerate("abcdefgh")}
    wrong = regret = 0
    for seed in range(100):
        verdict = simulate(truth, seed, noise=0.01, default="none").verdict
        wrong += "a" not in verdict.alive
        regret = max(regret, truth[verdict.winner] / truth["a"] - 1)
    assert wrong <= 100 * POLICY.alpha / 2
    assert regret <= POLICY.tie


def test_who_is_clearly_slower_leaves_early_and_drift_of_all_alike_hides_nothing():
    race = simulate({"d": 300.0, "slow": 330.0, "slower": 600.0}, 1, drift=0.2)
    assert len(race.samples["slow"]) == POLICY.least == len(race.samples["slower"])
    assert race.verdict.alive == ("d",) and race.verdict.done


def test_a_race_ends_when_every_ratio_is_known_and_at_the_latest_after_the_most_rounds():
    quiet = simulate({"d": 300.0, "a": 300.0}, 2, noise=0.001, spikes=0.0)
    assert len(quiet.clocks) == POLICY.least
    noisy = simulate({"d": 300.0, "a": 300.0}, 2, noise=0.2)
    assert len(noisy.clocks) == POLICY.most


def test_equal_samples_give_equal_verdicts_in_any_order_of_candidates():
    truth = {"d": 300.0, "a": 292.0, "b": 292.5, "c": 305.0}
    race = simulate(truth, 3)
    again = judge(race.candidates[::-1], dict(reversed(race.samples.items())), race.clocks, "d", POLICY)
    assert (again.winner, again.tied, again.standings) == (
        race.verdict.winner,
        race.verdict.tied,
        race.verdict.standings,
    )


def test_two_noisy_races_among_equals_make_the_same_choice():
    truth = {"d": 330.0, "a": 300.4, "b": 300.0, "c": 300.8}
    assert {simulate(truth, seed).verdict.winner for seed in range(40)} == {"a"}


def test_among_equals_the_default_comes_first_then_a_neighbour_then_less_memory_then_fewer_stages_then_the_order():
    best_to_worst = [
        preference_of(True, False, 9, 9, (9,)),
        preference_of(False, True, 9, 9, (9,)),
        preference_of(False, False, 1, 9, (9,)),
        preference_of(False, False, 2, 1, (9,)),
        preference_of(False, False, 2, 2, ("a",)),
        preference_of(False, False, 2, 2, ("b",)),
    ]
    assert sorted(best_to_worst) == best_to_worst


@pytest.mark.parametrize("us, expected", [(10.0, "d"), (300.0, "a")])
def test_half_a_microsecond_is_a_tie_however_large_a_share_it_is(us, expected):
    truth = {"d": us * 1.03, "a": us}
    assert simulate(truth, 4, noise=0.0005).verdict.winner == expected


def test_one_round_at_a_high_clock_drops_no_other():
    """The first round after a pause may be the only one whose clock the power limit does not lower."""
    assert kept_rounds([1980.0, 1755.0, 1740.0, 1500.0, 1755.0]) == [True, True, True, False, True]


def test_rounds_at_a_low_clock_do_not_count():
    assert kept_rounds([1980.0, 1500.0, 1979.0, 0.0]) == [True, False, True, False]
    assert kept_rounds([0.0, 0.0]) == [True, True]
    samples = {"d": [300.0] * 8, "a": [280.0, 500.0] * 4}
    candidates = [Candidate("d", (0,)), Candidate("a", (1,))]
    assert judge(candidates, samples, [1980.0, 1000.0] * 4, "d", POLICY).winner == "a"
    assert judge(candidates, samples, [1980.0] * 8, "d", POLICY).winner == "d"


def test_without_a_default_the_preference_alone_decides_among_equals():
    assert simulate({"a": 300.0, "b": 299.0, "c": 330.0}, 5, default="none").verdict.winner == "a"


def test_a_single_candidate_has_won_after_the_least_rounds():
    race = simulate({"d": 300.0}, 6)
    assert race.verdict.winner == "d" and len(race.clocks) == POLICY.least


def test_when_the_time_is_over_one_round_must_do_and_the_default_stays():
    race = Race([Candidate("d", (0,)), Candidate("a", (1,))], "d", POLICY)
    verdict = race.add({"d": [300.0], "a": [200.0]}, [0.0], last=True)
    assert verdict.done and verdict.winner == "d"


@pytest.mark.parametrize("probability, dof, t", [(0.975, 1, 12.706), (0.95, 5, 2.015), (0.9999, 6, 8.0248)])
def test_the_quantiles_of_students_t_are_those_of_the_tables(probability, dof, t):
    assert t_quantile(probability, dof) == pytest.approx(t, abs=2e-3)
