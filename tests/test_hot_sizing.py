"""The sizing model against cases that are known in closed form, and against trying every size."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_flashsample.hot_set import HotSet
from sgl_flashsample.hot_sizing import Costs, Sizing, fit

G = 9496  # groups of 151,936 ids
COSTS = Costs(fixed_us=12.0, hot_us=0.0273, screened_us=0.0137, hit_us=3.0, miss_us=11.0)


def curve(weights):
    """The hit curve of these shares of groups, most frequent first."""
    cumulative = [0.0, *itertools.accumulate(sorted(weights, reverse=True))]
    return lambda h: cumulative[h] / cumulative[-1]


def zipf(num_groups, exponent):
    return [(rank + 1) ** -exponent for rank in range(num_groups)]


HITS = curve(zipf(G, 1.0))


def test_the_cost_is_that_of_the_definition():
    model = Sizing(COSTS, G, HITS)
    for hot in (0, 1, 512, G - 1, G):
        hit = HITS(hot)
        read = 0.0273 * hot + 0.0137 * (G - hot)
        assert model.us(hot) == pytest.approx(12.0 + read + hit * 3.0 + (1 - hit) * 11.0, rel=1e-12)


@pytest.mark.parametrize("exponent", [0.6, 0.8, 1.0, 1.3, 2.0])
@pytest.mark.parametrize("num_groups", [64, 3142, G])
def test_on_a_zipf_curve_the_optimum_is_the_closed_form(exponent, num_groups):
    """The share of rank r is r^-s / Z: it has come down to (hot - screened) / (miss - hit) at r = (ratio / Z)^(1/s)."""
    norm = sum(zipf(num_groups, exponent))
    ratio = (COSTS.miss_us - COSTS.hit_us) / (COSTS.hot_us - COSTS.screened_us)
    closed = min(num_groups, math.floor((ratio / norm) ** (1 / exponent)))
    model = Sizing(COSTS, num_groups, curve(zipf(num_groups, exponent)))
    assert closed > 10
    assert model.stationary() == closed
    assert model.best() == closed


def test_at_the_optimum_the_derivative_of_a_smooth_curve_is_zero():
    """a(H) = 1 - exp(-H / L): F'(H) = slope - drop / L exp(-H / L), which is zero at L log(drop / (slope L))."""
    length, slope, drop = 700.0, COSTS.hot_us - COSTS.screened_us, COSTS.miss_us - COSTS.hit_us
    drop *= 10
    costs = dataclasses.replace(COSTS, miss_us=COSTS.hit_us + drop)
    model = Sizing(costs, G, lambda h: 1 - math.exp(-h / length))
    closed = length * math.log(drop / (slope * length))
    assert 1000 < closed < G
    assert abs(model.stationary() - closed) <= 1
    assert abs(model.best() - closed) <= 1


coefficients = st.floats(0, 100, allow_nan=False)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=120).filter(lambda shares: sum(shares) > 0.1),
    st.tuples(coefficients, coefficients, coefficients, coefficients, coefficients),
)
def test_the_first_order_condition_finds_what_trying_every_size_finds(shares, values):
    model = Sizing(Costs(*values), len(shares), curve(shares))
    stationary, best = model.stationary(), model.best()
    assert model.us(stationary) <= model.us(best) + 1e-9 * max(*values, 1.0) * len(shares)
    assert all(model.us(best) <= model.us(h) for h in range(len(shares) + 1))


def test_a_curve_that_is_not_concave_is_left_to_trying_every_size():
    hits = [0.0, 0.05, 0.1, 0.85, 0.9, 0.95, 1.0]
    model = Sizing(Costs(0.0, 2.0, 1.0, 0.0, 10.0), 6, hits.__getitem__)
    assert model.best() == 3
    assert model.us(model.stationary()) > model.us(3)


def test_screening_all_or_nothing_is_best_where_one_costs_nothing():
    assert Sizing(dataclasses.replace(COSTS, hot_us=0.01), G, HITS).best() == G
    assert Sizing(dataclasses.replace(COSTS, hot_us=0.01), G, HITS).stationary() == G
    for saved in (0.0, -5.0):  # a hit saves nothing: hot groups only cost
        model = Sizing(dataclasses.replace(COSTS, miss_us=COSTS.hit_us + saved), G, HITS)
        assert model.best() == model.stationary() == 0


def test_the_pure_paths_cost_what_was_measured():
    inner = Sizing(COSTS, G, HITS).best()
    assert 0 < inner < G
    least = Sizing(COSTS, G, HITS).us(inner)
    for name, size in (("none_us", 0), ("all_us", G)):
        assert Sizing(dataclasses.replace(COSTS, **{name: least - 0.1}), G, HITS).best() == size
        assert Sizing(dataclasses.replace(COSTS, **{name: least + 0.1}), G, HITS).best() == inner
        assert Sizing(dataclasses.replace(COSTS, **{name: 7.0}), G, HITS).us(size) == 7.0


def test_a_recorded_hot_set_gives_the_hit_curve():
    counts = tuple(int(1e6 * weight) for weight in zipf(200, 1.1))
    found = HotSet(3200, counts)
    model = Sizing(COSTS, found.num_groups, found.coverage)
    ratio = (COSTS.hot_us - COSTS.screened_us) / (COSTS.miss_us - COSTS.hit_us)
    assert model.best() == model.stationary() == sum(count / sum(counts) > ratio for count in counts)


SIZES = [16, 64, 256, 700, 1024, 2048, 4096, 8000]


def samples(costs, sizes=SIZES, noise=0.0, hits=HITS, num_groups=G):
    model, generator = Sizing(costs, num_groups, hits), random.Random(0)
    return [(h, model.us(h) + generator.gauss(0, noise)) for h in sizes]


def test_a_fit_of_exact_times_gives_the_coefficients_back():
    found = fit(samples(COSTS), G, HITS, screened_us=COSTS.screened_us, hit_us=COSTS.hit_us)
    for field in dataclasses.fields(Costs):
        want = getattr(COSTS, field.name)
        assert getattr(found.costs, field.name) == (want if want is None else pytest.approx(want, rel=1e-8))
    assert found.rms_us < 1e-9 and found.worst_us < 1e-9
    assert found.spare == len(SIZES) - 3


def test_what_whole_steps_cannot_tell_apart_changes_no_prediction_and_no_optimum():
    known = fit(samples(COSTS), G, HITS, screened_us=0.02, hit_us=5.0)
    unknown = fit(samples(COSTS), G, HITS)
    assert unknown.costs.screened_us == unknown.costs.hit_us == 0.0
    for h in (1, 300, 5000, G - 1):
        want = Sizing(COSTS, G, HITS).us(h)
        assert Sizing(known.costs, G, HITS).us(h) == pytest.approx(want, rel=1e-9)
        assert Sizing(unknown.costs, G, HITS).us(h) == pytest.approx(want, rel=1e-9)
    assert Sizing(unknown.costs, G, HITS).best() == Sizing(COSTS, G, HITS).best()


def test_a_fit_says_how_far_off_it_is_and_its_optimum_costs_hardly_more():
    noisy = samples(COSTS, SIZES * 20, noise=0.5)
    found = fit(noisy, G, HITS)
    assert found.rms_us == pytest.approx(0.5, rel=0.2)
    assert found.rms_us < found.worst_us < 2.5
    truth = Sizing(COSTS, G, HITS)
    assert truth.us(Sizing(found.costs, G, HITS).best()) < truth.us(truth.best()) + 0.3
    bent = [(h, us + 4 * (h == 1024)) for h, us in samples(COSTS)]
    assert fit(bent, G, HITS).worst_us > 2


def test_a_fit_is_the_least_squares_one():
    """No other coefficients near it have a smaller sum of squares."""
    noisy = samples(COSTS, noise=1.0)
    best = fit(noisy, G, HITS).costs

    def squares(costs):
        return sum((Sizing(costs, G, HITS).us(h) - us) ** 2 for h, us in noisy)

    for name, step in (("fixed_us", 0.01), ("hot_us", 1e-5), ("miss_us", 0.01)):
        for sign in (-1, 1):
            other = dataclasses.replace(best, **{name: getattr(best, name) + sign * step})
            assert squares(other) > squares(best)


def test_times_of_the_pure_paths_are_kept_apart():
    ends = [(0, 100.0), (0, 102.0), (G, 250.0)]
    found = fit(samples(COSTS) + ends, G, HITS)
    assert (found.costs.none_us, found.costs.all_us) == (101.0, 250.0)
    assert found.rms_us < 1e-9 and found.spare == len(SIZES) - 3


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "samples are of 0 sizes between 0 and 9496; expected 3 or more"),
        ([(0, 5.0), (G, 5.0), (9, 5.0), (10, 5.0)], "samples are of 2 sizes"),
        ([(9, 5.0)] * 10, "samples are of 1 sizes"),
        ([(-1, 5.0)], "samples have H = -1; expected 0 to 9496"),
        ([(G + 1, 5.0)], "samples have H = 9497; expected 0 to 9496"),
        ([(9, math.nan)], "samples have nan us at H = 9; expected a positive number"),
        ([(9, 0.0)], "samples have 0.0 us at H = 9; expected a positive number"),
    ],
)
def test_samples_that_determine_nothing_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        fit(given, G, HITS)


def test_sizes_where_the_hit_curve_is_straight_determine_nothing():
    straight = [(h, 100.0 + h) for h in (100, 200, 300, 400)]
    with pytest.raises(ValueError, match=r"samples are of 4 sizes .* not all where the hit curve is straight"):
        fit(straight, G, lambda h: h / G)


@pytest.mark.parametrize("name", ["fixed_us", "hot_us", "none_us"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_cost_that_is_no_number_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}; expected a finite number of microseconds"):
        dataclasses.replace(COSTS, **{name: value})


def test_a_size_beyond_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="num_hot is 9497; expected 0 to 9496"):
        Sizing(COSTS, G, HITS).us(G + 1)
    with pytest.raises(ValueError, match="num_groups is 0; expected 1 or more"):
        Sizing(COSTS, 0, HITS)
