"""The ids that a draft model should draft, chosen by the tokens that requests get. Needs no torch, looks at no clock:
the same tokens in the same order give the same changes.

Tokens come in windows of ``WINDOW``. A set of ids is judged by the share of a window's tokens that it does not have, of
tokens alone that it was not made from. At the end of a window there are two such sets: the one in use, and a candidate,
the most frequent ids of the tokens before the window.

    no set in use, the candidate misses at most MOST_MISSED     a set is adopted
    the set in use misses more than GIVEN_UP                    renewed if the candidate misses at most MOST_MISSED,
                                                                else given up
    the candidate misses WORTH less than the set in use         the set is renewed

The new set is the most frequent ids with those of the window. Counts are halved after every ``HALVING`` windows.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

from .hot_vocab import most_frequent

WINDOW = 8192  # tokens: a share of 2 % is known to 0.15 points
SMALL_WINDOW = 8  # ids per token of a window, for vocabularies below WINDOW * SMALL_WINDOW ids
# A draft whose id is not in the set ends its chain. Of Qwen3-8B's size, with 7 drafts in a chain at temperature 0.7,
# tokens come 10 % faster with 99.2 % covered, and 12 to 16 % slower with 97 % (h200-speculation.json, "hot" and
# "coupled"). A round takes 4 to 15 % less time, and would gain 7 % fewer tokens with 98 % covered.
GIVEN_UP = 0.02
MOST_MISSED = 0.015  # below ``GIVEN_UP``, else chance alone would adopt a set and give it up
WORTH = 0.005
HALVING = 8


class Verdict(enum.StrEnum):
    ADOPTED = "adopted"
    RENEWED = "renewed"
    GIVEN_UP = "given up"


class Change(NamedTuple):
    """token_ids: ``[size]`` int64, ascending, to be drafted from now on; None: all ids. covers: share of the last
    window's tokens that a set made before it has. before: that of the set in use so far; None without one."""

    verdict: Verdict
    token_ids: np.ndarray | None
    covers: float
    before: float | None


class HotChoice:
    """Chooses ``size`` of ``vocab`` ids. window: tokens, by default ``WINDOW``, fewer for a small vocabulary."""

    def __init__(self, vocab: int, size: int, window: int | None = None) -> None:
        self.size = size
        self.window = min(WINDOW, max(1, vocab // SMALL_WINDOW)) if window is None else window
        self._counts = np.zeros(vocab)  # of the windows before; halves of halves are exact
        self._current = np.zeros(vocab, dtype=np.int64)
        self._in_current = self._windows = 0
        self._used: np.ndarray | None = None

    def add(self, token_ids: np.ndarray) -> list[Change]:
        """The changes that these further tokens make: ``[N]`` int64, below ``vocab``."""
        changes = []
        while len(token_ids):
            part, token_ids = np.split(token_ids, [self.window - self._in_current])
            self._current += np.bincount(part, minlength=len(self._current))
            self._in_current += len(part)
            if self._in_current == self.window and (change := self._end_window()) is not None:
                changes.append(change)
        return changes

    def _end_window(self) -> Change | None:
        covers = self._covered_by(most_frequent(self._counts, self.size))
        before = None if self._used is None else self._covered_by(self._used)
        self._counts += self._current
        verdict = self._verdict(covers, before)
        if verdict is not None:
            self._used = None if verdict is Verdict.GIVEN_UP else most_frequent(self._counts, self.size)
        self._current[:] = self._in_current = 0
        self._windows += 1
        if self._windows % HALVING == 0:
            self._counts /= 2
        return None if verdict is None else Change(verdict, self._used, covers, before)

    def _covered_by(self, token_ids: np.ndarray) -> float:
        return int(self._current[token_ids].sum()) / self.window

    @staticmethod
    def _verdict(covers: float, before: float | None) -> Verdict | None:
        would_cover = covers >= 1 - MOST_MISSED
        if before is None:
            return Verdict.ADOPTED if would_cover else None
        if before < 1 - GIVEN_UP:
            return Verdict.RENEWED if would_cover else Verdict.GIVEN_UP
        return Verdict.RENEWED if covers - before >= WORTH else None
