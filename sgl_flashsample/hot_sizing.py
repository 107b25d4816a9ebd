"""How many groups to read in bf16: what a step costs as a function of H, and where that is least.

The model is that of SIMPLE (arXiv 2512.00719, sections 5.4 and 7.5): a cost that is affine in the work, composed with
the measured hit curve (``HotSet.coverage``). There, the tail is scanned for the rows whose token is not hot, so the
average hit ratio a(H) weighs the two scans (its Eq. 10). Here the tail is screened for every row, and the hit ratio
weighs what the screen leaves over: a leader that is hot has its exact score before the tail is certified, one that is
not has to be rescored first. For G groups, H of them hot, in microseconds per step:

    F(H) = fixed + hot H + screened (G - H) + hit a(H) + miss (1 - a(H))                         (for Eq. 10)
    F(H + 1) - F(H) = (hot - screened) - (miss - hit) (a(H + 1) - a(H))                          (for Eq. 11)

Groups are hot in descending order of their share of the tokens, so a(H + 1) - a(H), the share of the next one, only
falls, and F is least where that share has come down to (hot - screened) / (miss - hit): the first-order condition, for
Eq. 12. H = 0 and H = G leave out a launch and may cost what they like: they are compared as they were measured.

Pure Python; nothing here knows a kernel.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence

HitCurve = Callable[[int], float]  # H -> share of the drawn tokens in the H most frequent groups, 0 to 1
_COLLINEAR = 1e-9  # of a column's length that is left over when the others are taken out of it


@dataclasses.dataclass(frozen=True)
class Costs:
    """Microseconds of one step at one batch size, one head and one device.

    hot_us, screened_us: per group that is read in bf16, that is screened. hit_us, miss_us: what the step's rescoring
    takes where the leaders of all its rows are hot (the bound leaves some groups over all the same), where none is.
    fixed_us: everything else. none_us, all_us: the whole step at H = 0 and at H = G, where measured; None: as the
    formula says.

    Fitted from noisy times, a coefficient may be negative. Raises ValueError for one that is not finite.
    """

    fixed_us: float
    hot_us: float
    screened_us: float
    hit_us: float
    miss_us: float
    none_us: float | None = None
    all_us: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{field.name} is {value}; expected a finite number of microseconds")


@dataclasses.dataclass(frozen=True)
class Sizing:
    """The model of one head: ``num_groups`` is G. hits: never falls, 0 at 0 and at most 1 at G. Raises ValueError."""

    costs: Costs
    num_groups: int
    hits: HitCurve

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ValueError(f"num_groups is {self.num_groups}; expected 1 or more")

    def us(self, num_hot: int) -> float:
        """F(``num_hot``), of 0 to G. Raises ValueError."""
        if not 0 <= num_hot <= self.num_groups:
            raise ValueError(f"num_hot is {num_hot}; expected 0 to {self.num_groups}")
        measured = {0: self.costs.none_us, self.num_groups: self.costs.all_us}.get(num_hot)
        return self.formula(num_hot) if measured is None else measured

    def formula(self, num_hot: int) -> float:
        """F(``num_hot``) as if H = 0 and H = G were sizes like any other."""
        costs, hit = self.costs, self.hits(num_hot)
        read = costs.hot_us * num_hot + costs.screened_us * (self.num_groups - num_hot)
        return costs.fixed_us + read + costs.hit_us * hit + costs.miss_us * (1.0 - hit)

    def stationary(self) -> int:
        """The H of the first-order condition: the first one from which another hot group does not pay. Found by
        bisection, so for a hit curve that is concave, as that of ranked groups is. The least of ``formula``, not
        compared with what was measured at 0 and at G; ``best`` is."""
        slope, drop = self.costs.hot_us - self.costs.screened_us, self.costs.miss_us - self.costs.hit_us
        if drop <= 0:  # a hit saves nothing: F has no minimum in between
            return 0 if self.formula(0) <= self.formula(self.num_groups) else self.num_groups

        def next_one(num_hot: int) -> float:
            return slope - drop * (self.hits(num_hot + 1) - self.hits(num_hot))

        return bisect.bisect_left(range(self.num_groups), 0.0, key=next_one)

    def best(self) -> int:
        """The H of 0 to G that costs least, by trying all; the smallest of equals. For any hit curve."""
        return min(range(self.num_groups + 1), key=self.us)


@dataclasses.dataclass(frozen=True)
class Fit:
    """rms_us, worst_us: root of the mean square, and largest size, of what the model is off at the samples between the
    pure paths. spare: samples beyond the three that always fit exactly; with none, the errors say nothing."""

    costs: Costs
    rms_us: float
    worst_us: float
    spare: int


def fit(
    samples: Sequence[tuple[int, float]],
    num_groups: int,
    hits: HitCurve,
    *,
    screened_us: float = 0.0,
    hit_us: float = 0.0,
) -> Fit:
    """Costs by least squares (section 7.5) from samples (H, microseconds of the step).

    Times of whole steps tell three numbers apart: the cost of making one more group hot, that of a miss beyond a hit,
    and the rest. So ``screened_us`` and ``hit_us`` are what was measured of them alone; left at 0, they are part of
    ``fixed_us``, ``hot_us`` and ``miss_us`` are what is paid beyond them, and every F(H) and optimum is the same.
    Samples at H = 0 and H = ``num_groups`` are not fitted: their means become ``none_us`` and ``all_us``.

    Raises ValueError for samples that do not determine the three, and for values out of range.
    """
    for num_hot, us in samples:
        if not 0 <= num_hot <= num_groups:
            raise ValueError(f"samples have H = {num_hot}; expected 0 to {num_groups}")
        if not (math.isfinite(us) and us > 0):
            raise ValueError(f"samples have {us} us at H = {num_hot}; expected a positive number")
    inner = [(num_hot, us) for num_hot, us in samples if 0 < num_hot < num_groups]
    misses = [1.0 - hits(num_hot) for num_hot, _ in inner]
    known = [us - screened_us * num_groups - hit_us for _, us in inner]
    columns = [[1.0] * len(inner), [float(num_hot) for num_hot, _ in inner], misses]
    solved = _least_squares(columns, known)
    if solved is None:
        sizes = len({num_hot for num_hot, _ in inner})
        raise ValueError(
            f"samples are of {sizes} sizes between 0 and {num_groups}; expected 3 or more, not all where the hit curve "
            "is straight"
        )
    fixed, slope, drop = solved
    costs = Costs(
        fixed_us=fixed,
        hot_us=screened_us + slope,
        screened_us=screened_us,
        hit_us=hit_us,
        miss_us=hit_us + drop,
        none_us=_mean([us for num_hot, us in samples if num_hot == 0]),
        all_us=_mean([us for num_hot, us in samples if num_hot == num_groups]),
    )
    model = Sizing(costs, num_groups, hits)
    off = [abs(model.formula(num_hot) - us) for num_hot, us in inner]
    return Fit(costs, math.sqrt(sum(error * error for error in off) / len(off)), max(off), len(inner) - 3)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _least_squares(columns: list[list[float]], values: list[float]) -> list[float] | None:
    """The factors that bring the sum of the columns closest to ``values``; None where they are not determined. By
    modified Gram-Schmidt, twice: of columns as unlike in size as 1, H and 1 - a(H), normal equations lose the last."""
    directions: list[list[float]] = []
    upper: list[list[float]] = []  # columns in terms of the directions
    for column in columns:
        length, rest, factors = math.hypot(*column), list(column), [0.0] * len(directions)
        for _ in range(2):
            for place, direction in enumerate(directions):
                share = _dot(direction, rest)
                factors[place] += share
                rest = [value - share * unit for value, unit in zip(rest, direction, strict=True)]
        left = math.hypot(*rest)
        if left <= _COLLINEAR * length or not left:
            return None
        directions.append([value / left for value in rest])
        upper.append([*factors, left])
    found = [0.0] * len(columns)
    rest = list(values)
    projections = []
    for direction in directions:
        share = _dot(direction, rest)
        projections.append(share)
        rest = [value - share * unit for value, unit in zip(rest, direction, strict=True)]
    for place in reversed(range(len(columns))):
        known = sum(upper[later][place] * found[later] for later in range(place + 1, len(columns)))
        found[place] = (projections[place] - known) / upper[place][place]
    return found


def _dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
