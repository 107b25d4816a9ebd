"""Statistics of the tests and benchmarks: the G-test and its power before it runs, a test that may be looked at at any
time, and how often coupled draws of two distributions are equal."""

from __future__ import annotations

import numpy as np
import torch
from scipy import special, stats

from sgl_flashsample.autotune.gtest import MIN_EXPECTED, g_test
from sgl_flashsample.kernels.rng import GROUP_SIZE

__all__ = ["coupled_acceptance", "g_test", "log_e_value", "power"]


def power(draws: int, truth: np.ndarray, alternative: np.ndarray, alpha: float) -> float:
    """Probability that ``g_test`` at level ``alpha`` rejects ``truth`` when the draws follow ``alternative``."""
    small = truth * draws < MIN_EXPECTED
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
