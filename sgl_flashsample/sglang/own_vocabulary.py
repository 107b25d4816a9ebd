"""Coupled drafts of a draft model that has some of the target's ids: EAGLE3's, or one with a token map (FR-Spec, arXiv
2502.14856).

The noise of a token belongs to its id in the target's vocabulary (``kernels/rng.py``): drafts are drawn with that of
the ids which the draft model's rows stand for (``kernels/sample_own_ids.py``).
"""

from __future__ import annotations

import torch

from ..head import Head
from ..kernels.params import BatchParams, LMHead
from ..kernels.sample_own_ids import OwnIds

MAX_ROWS = 256  # drawn at a time: their logits are in memory of their own


def unsupported_ids(token_ids: torch.Tensor, lm_head: LMHead, vocab_size: int) -> str | None:
    """Why drafts of these ids, ``[H]``, cannot be coupled; None where they can. lm_head: the draft model's. vocab_size:
    ids of the target. Waits for the device."""
    if len(token_ids) != lm_head.vocab_size:
        return f"the draft model has {lm_head.vocab_size} rows for {len(token_ids)} of the target's ids"
    ordered = token_ids.sort().values
    if not (ordered[0] >= 0 and ordered[-1] < vocab_size and (ordered[1:] > ordered[:-1]).all()):
        return f"the draft model's ids are not different ones from 0 to {vocab_size - 1}"
    return None


class OwnVocabulary:
    """Draws drafts. All that a CUDA graph reads stays where it is.

    max_rows: of a draw, ``MAX_ROWS`` at most. head: of the draft model; its weight may be replaced. token_ids: ``[H]``
    int64, the id that each of its rows has in the target. vocab_size: V, ids of the target.
    """

    def __init__(self, head: Head, token_ids: torch.Tensor, vocab_size: int, max_rows: int) -> None:
        lm_head = head.lm_head
        device = lm_head.weight.device
        token_ids = token_ids.to(device)
        self._head, self.max_rows = head, min(max_rows, MAX_ROWS)
        self._ids = OwnIds(token_ids, vocab_size, in_order=bool((token_ids[1:] > token_ids[:-1]).all()))
        self._places = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self._places[token_ids] = torch.arange(len(token_ids), device=device)
        hidden = torch.zeros(self.max_rows, lm_head.weight.shape[1], dtype=lm_head.hidden_dtype, device=device)
        self._logits = head.logits(hidden).clone()
        head.reserve_rows(self.max_rows, vocab_size)

    def draw(self, hidden: torch.Tensor, params: BatchParams) -> torch.Tensor:
        """``[N]`` int64: the draft of each of up to ``max_rows`` rows, as a row of the draft model's head."""
        logits = self._head.logits(hidden, out=self._logits[: len(hidden)])
        return self._places[self._head.draw_from_own_ids(logits, self._ids, params).token_ids]
