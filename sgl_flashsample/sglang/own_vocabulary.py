"""Drafts from the logits of some of the target's ids: of a draft model that has no others (EAGLE3's, or one with a
token map), or of a hot vocabulary, a copy of the rows of the ids that carry the traffic (FR-Spec, arXiv 2502.14856;
SIMPLE, arXiv 2512.00719, sections 5.3 and 5.4).

The noise of a token belongs to its id in the target's vocabulary (``kernels/rng.py``): drafts are drawn with that of
the ids which the rows stand for (``kernels/sample_own_ids.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..files import BadFileError, one_line
from ..head import Head
from ..hot_vocab import MAPPED_SHARE, HotVocab, most_frequent
from ..kernels.config import cdiv
from ..kernels.draft_children import Children
from ..kernels.params import BatchParams, LMHead, SampleOutput
from ..kernels.rng import GROUP_SIZE
from ..kernels.sample_own_ids import OwnIds
from .screen_lifecycle import lack_of_memory

MAX_ROWS = 256  # drawn at a time: their logits are in memory of their own
MEMORY_SHARE = 0.5  # of the free memory that a copy may take: SGLang's CUDA graphs are still to come


def unsupported_ids(token_ids: torch.Tensor, lm_head: LMHead, vocab_size: int) -> str | None:
    """Why drafts of these ids, ``[H]``, cannot be coupled; None where they can. lm_head: the draft model's. vocab_size:
    ids of the target. Waits for the device."""
    rows = lm_head.spec.total_ids or lm_head.vocab_size
    if len(token_ids) != rows:
        return f"the draft model has {rows} rows for {len(token_ids)} of the target's ids"
    ordered = token_ids.sort().values
    if not (ordered[0] >= 0 and ordered[-1] < vocab_size and (ordered[1:] > ordered[:-1]).all()):
        return f"the draft model's ids are not different ones from 0 to {vocab_size - 1}"
    return None


class OwnVocabulary:
    """Draws drafts. All that a CUDA graph reads stays where it is.

    max_rows: of a draw, ``MAX_ROWS`` at most. head: of the draft model, or a part of it; its weight may be replaced.
    token_ids: ``[H]`` int64, the id that each of its rows has in the target. vocab_size: V, ids of the target.
    draws_rows: a draft is a row of the head; else the target's id. A head that is the part of a rank has some of the
    rows, and draws from the ids of these.
    """

    def __init__(
        self, head: Head, token_ids: torch.Tensor, vocab_size: int, max_rows: int, *, draws_rows: bool = True
    ) -> None:
        lm_head = head.lm_head
        device = lm_head.weight.device
        token_ids = token_ids.to(device)
        self._head, self.max_rows = head, min(max_rows, MAX_ROWS)
        here = token_ids[lm_head.vocab_start : lm_head.vocab_start + lm_head.vocab_size]
        self._ids = OwnIds(here, vocab_size, in_order=bool((here[1:] > here[:-1]).all()))
        self._places: torch.Tensor | None = None
        if draws_rows:
            self._places = torch.zeros(vocab_size, dtype=torch.int64, device=device)
            self._places[token_ids] = torch.arange(len(token_ids), device=device)
        hidden = torch.zeros(self.max_rows, lm_head.weight.shape[1], dtype=lm_head.hidden_dtype, device=device)
        self._logits = head.logits(hidden).clone()
        head.reserve_rows(self.max_rows, vocab_size)

    @property
    def words(self) -> str:
        """The ids, for the log."""
        return "the ids that the draft model has"

    def draw(self, hidden: torch.Tensor, params: BatchParams) -> SampleOutput:
        """``Head.draw`` of up to ``max_rows`` rows, among these ids."""
        logits = self._head.logits(hidden, out=self._logits[: len(hidden)])
        return self._head.draw_from_own_ids(logits, self._ids, params)

    def draw_children(self, hidden: torch.Tensor, params: BatchParams, number: int) -> Children:
        """``Head.draw_children`` of up to ``max_rows`` rows, among these ids."""
        logits = self._head.logits(hidden, out=self._logits[: len(hidden)])
        return self._head.draw_children_of_own_ids(logits, self._ids, params, number)

    def drafts(self, token_ids: torch.Tensor) -> torch.Tensor:
        """These ids of the target, int64, as SGLang expects them from the draft model."""
        return token_ids if self._places is None else self._places[token_ids]


class HotVocabulary(OwnVocabulary):
    """Drafts of some ids of a draft model that has all, from a copy of their rows. The rows are zeros until ``follow``
    writes them.

    lm_head: of the draft model. token_ids: ``[H]`` int64, ascending. words, status: for the log, and facts for
    ``Runtime.status``. Raises RuntimeError where too little memory is free.
    """

    def __init__(
        self, lm_head: LMHead, token_ids: np.ndarray, max_rows: int, words: str, status: dict[str, Any]
    ) -> None:
        weight, size = lm_head.weight, len(token_ids)
        num_bytes = size * (weight.shape[1] * weight.itemsize + (0 if lm_head.scale is None else 4))
        if (reason := lack_of_memory(num_bytes, weight.device, MEMORY_SHARE)) is not None:
            raise RuntimeError(reason)
        self._words = f"{words}, a copy of {num_bytes:,} bytes"
        self._status = {**status, "ids": size, "bytes": num_bytes}
        self._source: tuple[LMHead | None, int] = None, 0  # what ``follow`` has last copied
        with torch.inference_mode(False):  # else what is written later could not be written to outside of that mode
            self._weight = weight.new_zeros(size, weight.shape[1])
            self._scale = None if lm_head.scale is None else lm_head.scale.new_zeros(size)
            head = Head(self._rows_of(lm_head), announces_changes=True)
            super().__init__(head, torch.from_numpy(token_ids), lm_head.vocab_size, max_rows, draws_rows=False)

    @classmethod
    def of_file(cls, lm_head: LMHead, file: str, max_rows: int) -> HotVocabulary:
        """The vocabulary of the most frequent ids of a ``HotVocab`` file; where it counts fewer ids, the lowest others
        are added, which tokenizers give to what is frequent. Raises BadFileError for a file that cannot be read, or
        counts ids that the draft model does not have, RuntimeError where too little memory is free."""
        counts, vocab_size, name = HotVocab.load(file), lm_head.vocab_size, one_line(file)
        seen = np.flatnonzero(counts.ids)
        if seen[-1] >= vocab_size:
            raise BadFileError(f"{name} counts id {seen[-1]}; expected ids from 0 to {vocab_size - 1}")
        per_id = np.zeros(vocab_size, dtype=np.int64)
        per_id[seen] = counts.ids[seen]
        hot = most_frequent(per_id, hot_size(vocab_size))
        covers = int(per_id[hot].sum()) / counts.counted
        words = f"the {len(hot):,} most frequent ids of {name} ({100 * covers:.1f} % of its tokens)"
        return cls(lm_head, hot, max_rows, words, {"file": name, "covers": covers})

    @property
    def words(self) -> str:
        return self._words

    @property
    def status(self) -> dict[str, Any] | None:
        """Facts for ``Runtime.status``."""
        return self._status

    def _rows_of(self, lm_head: LMHead) -> LMHead:
        """The copy, with logits as those of ``lm_head``."""
        options: dict[str, Any] = {"logit_scale": lm_head.logit_scale, "softcap": lm_head.softcap}
        options |= {"logits_dtype": lm_head.rounding, "hidden_dtype": lm_head.hidden_dtype}
        return LMHead(self._weight, scale=self._scale, **options)

    def follow(self, lm_head: LMHead, changes: int) -> None:
        """Write the copy where it lies, if ``lm_head`` or the number of changes of its weight is another one. In host
        code of a step: a captured graph would write it at every replay."""
        known, known_changes = self._source
        if lm_head is known and changes == known_changes:
            return
        token_ids = self._ids.token_ids
        torch.index_select(_bytes_of(lm_head.weight), 0, token_ids, out=_bytes_of(self._weight))
        if lm_head.scale is not None:
            torch.index_select(lm_head.scale, 0, token_ids, out=self._scale)
        self._head.replace(self._rows_of(lm_head))
        self._source = lm_head, changes


def hot_size(vocab_size: int) -> int:
    """H, the ids of a hot vocabulary: whole groups of columns, so that rows of logits are aligned, without which a GEMM
    is slow."""
    return min(vocab_size, GROUP_SIZE * cdiv(max(1, int(MAPPED_SHARE * vocab_size)), GROUP_SIZE))


def _bytes_of(weight: torch.Tensor) -> torch.Tensor:
    """A quantised weight as bytes, which every PyTorch selects."""
    return weight.view(torch.uint8) if weight.itemsize == 1 else weight
