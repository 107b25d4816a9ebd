"""The G-test of draws: whether counts follow exact probabilities. The tuner, the tests and the proofs share it."""

from __future__ import annotations

import dataclasses

import numpy as np

MIN_EXPECTED = 10.0  # expected draws of a cell; smaller cells are pooled


@dataclasses.dataclass(frozen=True)
class GTest:
    statistic: float
    dof: int
    p_value: float


def g_test(observed: np.ndarray, probability: np.ndarray) -> GTest:
    """Observed counts against exact probabilities, which sum to 1. Cells that expect fewer than ``MIN_EXPECTED`` draws
    are pooled, never dropped: their mass is tested as one cell. A draw of probability 0 has the p-value 0.

    Williams' correction (Biometrika 63, 1976) is applied: among thousands of cells of a few draws each, the plain
    statistic is too large by half a standard deviation, and p below 1e-3 comes ten times too often.
    """
    from scipy import stats  # takes a second to import

    observed, probability = (np.asarray(values, dtype=np.float64) for values in (observed, probability))
    assert observed.shape == probability.shape
    assert np.isclose(probability.sum(), 1.0, atol=1e-6)
    if observed[probability == 0].sum() > 0:
        return GTest(float("inf"), len(observed) - 1, 0.0)
    expected = probability * (observed.sum() / probability.sum())
    small = expected < MIN_EXPECTED
    observed, expected = (np.append(cells[~small], cells[small].sum()) for cells in (observed, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    dof = len(observed) - 1
    if dof < 1:  # one cell, or none
        return GTest(0.0, 0, 1.0)
    plain = stats.power_divergence(observed, expected, lambda_="log-likelihood").statistic
    statistic = float(plain / (1.0 + ((1.0 / expected).sum() - 1.0 / expected.sum()) / (6.0 * dof)))
    return GTest(statistic, dof, float(stats.chi2.sf(statistic, dof)))
