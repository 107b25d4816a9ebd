"""Coupled drafts of a draft model that has some of the target's ids: EAGLE3's, or one with a token map (FR-Spec, arXiv
2502.14856).

The noise of a token belongs to its id in the target's vocabulary (``kernels/rng.py``). So the draft model's logits are
put where the target has these ids, among minus infinities, and a draft is drawn from that row as the target's token
will be from its own. A group of ids has the mass of those that the draft model has.
"""

from __future__ import annotations

import torch

from ..head import Head
from ..kernels.params import BatchParams, LMHead

MAX_ROWS = 64  # drawn at a time: their logits stand in rows as wide as the target's vocabulary


def unsupported_ids(token_ids: torch.Tensor, lm_head: LMHead, vocab_size: int) -> str | None:
    """Why drafts of these ids, ``[H]``, cannot be coupled; None where they can. lm_head: the draft model's. vocab_size:
    ids of the target. Waits for the device."""
    if len(token_ids) != lm_head.vocab_size:
        return f"the draft model has {lm_head.vocab_size} rows for {len(token_ids)} of the target's ids"
    ordered = token_ids.sort().values
    if not (ordered[0] >= 0 and ordered[-1] < vocab_size and (ordered[1:] > ordered[:-1]).all()):
        return f"the draft model's ids are not different ones from 0 to {vocab_size - 1}"
    # Minus infinity would become a logit that can be drawn.
    if lm_head.softcap is not None or not (1.0 if lm_head.logit_scale is None else lm_head.logit_scale) > 0:
        return "the draft model has some of the target's ids, and a softcap or a scale that is not positive"
    return None


class OwnVocabulary:
    """Draws drafts. All that a CUDA graph reads stays where it is.

    max_rows: of a draw. head: of the draft model; its weight may be replaced. token_ids: ``[H]`` int64, the id that
    each of its rows has in the target. vocab_size: V, ids of the target.
    """

    def __init__(self, head: Head, token_ids: torch.Tensor, vocab_size: int) -> None:
        lm_head = head.lm_head
        device, rounding = lm_head.weight.device, lm_head.rounding
        self._head, self._vocab_size, self.max_rows = head, vocab_size, MAX_ROWS
        self._token_ids = token_ids.to(device)
        self._places = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self._places[self._token_ids] = torch.arange(len(token_ids), device=device)
        self._logits = torch.full((self.max_rows, vocab_size), float("-inf"), dtype=rounding, device=device)
        hidden = torch.zeros(self.max_rows, lm_head.weight.shape[1], dtype=lm_head.hidden_dtype, device=device)
        self._own = head.logits(hidden).clone()
        head.reserve_rows(self.max_rows, vocab_size)

    def draw(self, hidden: torch.Tensor, params: BatchParams) -> torch.Tensor:
        """``[N]`` int64: the draft of each of up to ``max_rows`` rows, as a row of the draft model's head."""
        logits = self._logits[: len(hidden)]
        own = self._head.logits(hidden, out=self._own[: len(hidden)])[:, : len(self._token_ids)]
        logits.index_copy_(1, self._token_ids, own.to(logits.dtype))
        return self._places[self._head.draw_from_logits(logits, params, vocab_size=self._vocab_size).token_ids]
