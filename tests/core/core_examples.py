"""Small batches with an exact reference, and configurations to tell launches from one another by."""

from __future__ import annotations

import torch
from kernel_cases import Case, expected, make_case

from sgl_flashsample.defaults import HeadTraits
from sgl_flashsample.dispatch import DispatchTable
from sgl_flashsample.kernels.config import ReadConfig, ScreenConfig, TileConfig
from sgl_flashsample.kernels.params import LMHead
from sgl_flashsample.kinds import BATCH_KINDS, PLAIN, BatchKind, Config

ROWS, VOCAB = 9, 600
UNSCREENED = tuple(kind for kind in BATCH_KINDS if not kind.screen)
SCREENED = tuple(kind for kind in BATCH_KINDS if kind.screen)
# Few programs, for they are interpreted, and several splits, so that they are joined.
TILE = TileConfig(16, 64, 32, 4, 1, ctas_per_sm=2, flatten=False, tma=False)
WIDE = TileConfig(32, 128, 64, 4, 1, flatten=False, tma=False)
READ = ReadConfig(4, 64, 4, ctas_per_sm=2)
LONG = ReadConfig(1, 128, 2, ctas_per_sm=3)
SCREEN = ScreenConfig(16, 64, 32, 4, 1, flatten=False, tma=False, rescore_d=32, rescore_stages=1)
ON_PATH = {"fused": TILE, "logits": READ, "screened": SCREEN}
# Paths in turns: no number of rows separates them.
TURNS: dict[int, Config] = {1: READ, 2: TILE, 3: LONG, 4: WIDE, 6: TILE, 9: READ}


def example(device: torch.device, kind: BatchKind = PLAIN, rows: int = ROWS, **options) -> Case:
    """The batch of this kind that ``make_case`` makes."""
    return make_case(rows, VOCAB, device, str(kind.unscreened), torch.float32, **options)


def table_of(head: LMHead, kinds=BATCH_KINDS, sizes=TURNS, **options) -> DispatchTable:
    """``sizes`` for each of these kinds."""
    return DispatchTable(HeadTraits.of(head), {kind: sizes for kind in kinds}, **options)


def assert_reference(tokens: torch.Tensor, case: Case) -> None:
    """The first rows of a batch have the reference's tokens, except where two scores nearly tie."""
    want = expected(case)
    certain = ~want.near_tie[: len(tokens)]
    assert certain.sum() >= len(tokens) - 2
    assert torch.equal(tokens[certain], want.token[: len(tokens)][certain])
