"""Statistics of the tests and benchmarks: a G-test whose power is known before it runs, a test that may be looked at at
any time, and how often coupled draws of two distributions are equal."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from scipy import special, stats

from sgl_flashsample.kernels.rng import GROUP_SIZE


@dataclasses.dataclass(frozen=True)
class GTest:
    statistic: float
    dof: int
    p_value: float


def g_test(observed: np.ndarray, probability: np.ndarray, min_expected: float = 10.0) -> GTest:
    """Observed counts against exact probabilities. Cells that expect fewer than ``min_expected`` draws are pooled,
    never dropped: their mass is tested as one cell. With Williams' correction (Biometrika 63, 1976): the plain
    statistic is too large where many cells are small."""
    observed = np.asarray(observed, dtype=np.float64)
    expected = np.asarray(probability, dtype=np.float64) * observed.sum()
    assert observed.shape == expected.shape
    assert np.isclose(np.sum(probability), 1.0, atol=1e-6)
    small = expected < min_expected
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    if observed[expected == 0].sum() > 0:
        return GTest(float("inf"), len(observed) - 1, 0.0)
    keep = expected > 0
    observed, expected = observed[keep], expected[keep]
    terms = np.where(observed > 0, observed * np.log(np.where(observed > 0, observed, 1.0) / expected), 0.0)
    statistic, dof = 2.0 * terms.sum(), len(observed) - 1
    if dof < 1:  # one cell, or none
        return GTest(float(statistic), 0, 1.0)
    statistic /= 1.0 + ((1.0 / expected).sum() - 1.0 / expected.sum()) / (6.0 * dof)
    return GTest(float(statistic), dof, float(stats.chi2.sf(statistic, dof)))


def power(draws: int, truth: np.ndarray, alternative: np.ndarray, alpha: float, min_expected: float = 10.0) -> float:
    """Probability that ``g_test`` at level ``alpha`` rejects ``truth`` when the draws follow ``alternative``."""
    small = truth * draws < min_expected
    p = np.append(truth[~small], truth[small].sum())
    q = np.append(alternative[~small], alternative[small].sum())
    p, q = p[p > 0], q[p > 0]
    noncentrality = draws * float(((q - p) ** 2 / p).sum())
    dof = len(p) - 1
    return float(stats.ncx2.sf(stats.chi2.isf(alpha, dof), dof, noncentrality))


CONCENTRATIONS = (1e3, 1e5, 1e7)  # of the alternatives of ``log_e_value``: deviations of about 3 %, .3 % and .03 %


def log_e_value(observed: np.ndarray, probability: np.ndarray) -> float:
    """Log of the evidence against exact probabilities, of counts so far. Of draws that follow ``probability``, the
    evidence ever reaches 1 / alpha with a chance of at most alpha, however often one looks (Ville's inequality); the
    mean over several distributions has the same property. Infinite where something is drawn that cannot be.

    It is the likelihood of Dirichlet alternatives around ``probability``, in equal parts of several concentrations,
    over its own (Lindon and Malek, Anytime-Valid Inference for Multinomial Count Data, NeurIPS 2022, section 3)."""
    observed, probability = (np.asarray(values, dtype=np.float64) for values in (observed, probability))
    assert observed.shape == probability.shape
    assert np.isclose(probability.sum(), 1.0, atol=1e-6)
    if observed[probability == 0].sum() > 0:
        return float("inf")
    observed, probability = observed[probability > 0], probability[probability > 0]
    draws, own = observed.sum(), (observed * np.log(probability)).sum()

    def evidence(concentration: float) -> float:
        prior = concentration * probability
        of_ids = (special.gammaln(prior + observed) - special.gammaln(prior)).sum()
        return special.gammaln(concentration) - special.gammaln(concentration + draws) + of_ids - own

    return float(special.logsumexp([evidence(one) for one in CONCENTRATIONS]) - np.log(len(CONCENTRATIONS)))


def coupled_acceptance(p: torch.Tensor, q: torch.Tensor) -> float:
    """The chance that a draw of p and a draw of q with the same noise are equal. ``[V]`` float64 probabilities.

    A group of ids is chosen first, then an id in it, each by noise of its own: two choices among the same things with
    the same noise are both i with probability 1 / sum_j max(p_j / p_i, q_j / q_i)."""

    def both(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        equal = 1 / torch.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None]).sum(1)
        return equal.nan_to_num()  # what neither can draw

    groups = list(zip(p.split(GROUP_SIZE), q.split(GROUP_SIZE), strict=True))
    masses = (torch.stack([pair[which].sum() for pair in groups]) for which in range(2))
    return sum(chosen * both(*pair).sum() for chosen, pair in zip(both(*masses), groups, strict=True)).item()
