"""What a row of logits and limits may draw and must be able to draw, in float64: the oracle of ``external.py`` and
``draws.py``. Where rounding or the order of equal logits decides, an id may be drawn and need not be.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Row:
    """Logits ``[V]`` float32, and limits; a limit that is None is off."""

    shape: str
    logits: np.ndarray
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None

    def __str__(self) -> str:
        limits = [f"{name} {getattr(self, name):.4g}" for name in ("top_k", "top_p", "min_p") if getattr(self, name)]
        return ", ".join([f"V {len(self.logits)}", self.shape, f"temperature {self.temperature:.4g}", *limits])


def probabilities(row: Row) -> np.ndarray:
    """``[V]`` float64, before any limit."""
    scaled = row.logits.astype(np.float64) / row.temperature
    p = np.exp(scaled - scaled.max())
    return p / p.sum()


def may_and_must(row: Row, p: np.ndarray, *, flashinfer: bool, slack: float = 1e-5) -> tuple[np.ndarray, np.ndarray]:
    """``[V]`` bool each. p: probabilities in float64.

    flashinfer: as SGLang defines the limits on its FlashInfer backend, and we do: equal logits stay or go together, and
    beside a min-p, top-p looks at what top-k has left. Else, as on its PyTorch backend, of equal logits any may go, and
    top-p looks at the whole distribution.
    """
    values, which, sizes = np.unique(-row.logits, return_inverse=True, return_counts=True)
    masses = np.bincount(which, weights=p, minlength=len(values))
    larger = (np.cumsum(sizes) - sizes)[which]  # how many logits are above each
    above = (np.cumsum(masses) - masses)[which]
    before = (larger, above)  # how many, and of what mass, go before each id; its equals too, where any of them may
    if not flashinfer:
        before = (larger + sizes[which] - 1, above + masses[which] - p)
    may = must = np.isfinite(row.logits)
    if row.top_k is not None:
        may, must = may & (larger < row.top_k), must & (before[0] < row.top_k)
    if row.top_p is not None:
        limit = row.top_p * (p[may].sum() if flashinfer and row.min_p is not None else 1.0)
        may, must = (
            may & ((above < limit + slack) | (larger == 0)),
            must & ((before[1] < limit - slack) | (before[0] == 0)),
        )
    if row.min_p is not None:
        least = np.log(row.min_p) + np.log(p.max())
        may = may & (np.log(np.maximum(p, 1e-300)) >= least - 10 * slack)
        must = must & (np.log(np.maximum(p, 1e-300)) >= np.minimum(least + 10 * slack, np.log(p.max())))
    return may, must
