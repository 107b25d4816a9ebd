"""Drafts of the ids that requests get most often by now (``FLASHSAMPLE_DRAFT_VOCAB=auto``): ``hot_choice.py`` chooses
them in the thread that counts tokens, and the next step takes them over. Until then, and where no set of ids covers the
traffic, all ids are drafted.

A step that takes a set over copies its ids and rows to where they are read, and waits for the device once. Other steps
do nothing for it beyond the count of their tokens.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..files import BadFileError, first_line
from ..hot_choice import Change, HotChoice
from ..kernels.params import LMHead
from ..switches import ALL_IDS, DRAFT_VOCAB_VARIABLE, LEARNED_IDS, text
from .own_vocabulary import HotVocabulary, hot_size

logger = logging.getLogger("sgl_flashsample")


class LearnedVocabulary(HotVocabulary):
    """A hot vocabulary whose ids change while the server runs.

    in_use: the ids are drafted; False while all are. stopped: all are until restart. lm_head: of a draft model that has
    all ids. Raises RuntimeError where too little memory is free.
    """

    def __init__(self, lm_head: LMHead, max_rows: int) -> None:
        size = hot_size(lm_head.vocab_size)
        self.in_use, self.stopped = False, False
        self._choice = HotChoice(lm_head.vocab_size, size)
        self._changes: collections.deque[Change] = collections.deque(maxlen=1)  # the thread adds, a step takes
        words = f"of the {size:,} most frequent ids once {self._choice.window:,} tokens or more are counted"
        super().__init__(lm_head, np.arange(size), max_rows, words, {"file": None, "covers": None})

    @property
    def status(self) -> dict[str, Any] | None:
        return self._status if self.in_use else None

    def watch(self, token_ids: np.ndarray) -> None:
        """Count the ids of requests, ``[N]`` int64. In any one thread."""
        self._changes.extend(self._choice.add(token_ids[token_ids < self._ids.vocab_size]))

    def follow(self, lm_head: LMHead, changes: int) -> None:
        """Take over the last change that the tokens have made; then as for any hot vocabulary, while it is in use.
        After a failure all ids are drafted."""
        try:
            if self._changes and not self.stopped:
                self._take(self._changes.pop())
            if self.in_use:
                super().follow(lm_head, changes)
        except Exception as error:
            self.stop(first_line(error))

    def _take(self, change: Change) -> None:
        ids = f"{self._choice.size:,} frequent ids"
        covers = f"cover {100 * change.covers:.1f} % of the last {self._choice.window:,} tokens"
        if change.before is not None:
            covers += f", those so far {100 * change.before:.1f} %"
        self.in_use = False
        if change.token_ids is None:
            logger.info("flashsample: drafts are of the whole vocabulary, %s are given up: others %s", ids, covers)
            return
        self._ids.replace(torch.from_numpy(change.token_ids).to(self._ids.token_ids.device))
        self._source, self.in_use = (None, 0), True
        self._status = {**self._status, "covers": change.covers}
        logger.info("flashsample: drafts are of %s, %s: they %s", ids, change.verdict.value, covers)

    @contextlib.contextmanager
    def used(self, in_use: bool) -> Iterator[None]:
        """Within it, drafts are of these ids, or of all."""
        before, self.in_use = self.in_use, in_use
        try:
            yield
        finally:
            self.in_use = before and not self.stopped

    def stop(self, reason: str | None = None) -> None:
        """Draft all ids until restart. reason: for the log."""
        if reason is not None and not self.stopped:
            _announce_whole(f"until restart, after {reason}")
        self.stopped, self.in_use = True, False


def hot_vocabulary(lm_head: LMHead, max_rows: int, no_graphs_reason: str | None) -> HotVocabulary | None:
    """The hot vocabulary that ``FLASHSAMPLE_DRAFT_VOCAB`` asks for; None where all ids are drafted. no_graphs_reason:
    why CUDA graphs of drafts do not change with a vocabulary (``draft_graphs.py``)."""
    wanted = text(DRAFT_VOCAB_VARIABLE)
    if wanted == ALL_IDS:
        return None
    try:
        if wanted != LEARNED_IDS:
            return HotVocabulary.of_file(lm_head, wanted, max_rows)
        if no_graphs_reason is not None:
            raise RuntimeError(no_graphs_reason)
        return LearnedVocabulary(lm_head, max_rows)
    except Exception as error:  # memory, a file, or what else a server must start without
        reason = str(error) if isinstance(error, BadFileError) else first_line(error)
        _announce_whole(reason)
        return None


def _announce_whole(reason: str) -> None:
    logger.warning("flashsample: drafts are of the whole vocabulary (%s): %s", DRAFT_VOCAB_VARIABLE, reason)
