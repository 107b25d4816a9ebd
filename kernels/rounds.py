"""The rounds of ``rescore_groups``: which groups are read, and what for."""

from __future__ import annotations

import enum

import triton.language as tl


class Round(enum.IntEnum):
    FIRST = 0  # of rows with a truncation, those that are surely among their largest: what they are, for the bound
    MAIN = 1  # what could still win: the tokens
    REST = 2  # all, of rows with a truncation that are left: their logits


FIRST, MAIN, REST = (tl.constexpr(int(each)) for each in Round)  # as kernels read them
