"""The built-in choices: which path a batch takes (``path_for``), and which tile (``tile_for``), reader (``read_for``)
and draw (``draw_for``) its launches use. Tables, and a lookup for each; ``choices.py`` puts a tuned table on top.

The 2-byte entries for compute capability 9.0 are what the tuner has left standing, or put there, on an H200 for
151,936 x 4,096 and 2,048 (the tables that are shipped). All others are neighbours of them that compile without register
spills for their device (``tests/test_compile.py``); they are not measured.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from .kernels.head import LMHead
from .kernels.rng import GROUP_SIZE
from .kernels.tiles import DEFAULT_DRAW, DrawConfig, ReadConfig, ScreenConfig, TileConfig
from .work import Path, Work

_T = TypeVar("_T")
Entries = list[tuple[int, TileConfig]]
# {(family, bytes per weight element): [(largest number of rows, tile)]}; the last entry serves larger batches too.
TABLE: dict[tuple[str, int], Entries] = {
    ("sm90", 2): [
        (16, TileConfig(16, 64, 256, 4, 5, reduce_rows=16, one_launch=True)),
        (32, TileConfig(32, 128, 128, 4, 5, hidden_tma=True)),
        (64, TileConfig(64, 128, 128, 4, 4, hidden_tma=True, rows_first=True)),
        (128, TileConfig(64, 256, 64, 8, 5, hidden_tma=True, rows_first=True)),
        (512, TileConfig(128, 128, 64, 8, 6, hidden_tma=True, rows_first=True)),
    ],
    ("sm90", 4): [(512, TileConfig(16, 64, 32, 8, 4))],
    ("sm100", 2): [
        (16, TileConfig(16, 128, 128, 4, 6)),
        (64, TileConfig(32, 128, 128, 8, 5)),
        (512, TileConfig(64, 128, 128, 8, 4, hidden_tma=True, rows_first=True)),
    ],
    ("sm100", 4): [(512, TileConfig(16, 64, 32, 8, 4))],
    ("sm80", 2): [
        (16, TileConfig(16, 128, 64, 4, 5, tma=False)),
        (512, TileConfig(32, 128, 64, 4, 4, tma=False)),
    ],
    ("sm80", 4): [(512, TileConfig(16, 64, 32, 8, 3, tma=False))],
}
# Where work beyond a plain draw wants other tiles.
WORK_TABLE: dict[tuple[str, int, Work], Entries] = {
    ("sm90", 2, Work.TRUNCATE): [
        (16, TileConfig(16, 128, 128, 4, 5)),
        (32, TileConfig(32, 128, 128, 8, 5)),
        (512, TileConfig(64, 128, 128, 8, 4, hidden_tma=True, rows_first=True)),
    ],
    ("sm90", 2, Work.EDIT): [
        (16, TileConfig(16, 128, 128, 8, 5)),
        (32, TileConfig(32, 128, 128, 8, 5)),
        (512, TileConfig(64, 128, 128, 8, 4, rows_first=True)),
    ],
    ("sm90", 2, Work.EDIT_AND_TRUNCATE): [(512, TileConfig(16, 64, 128, 4, 5, ctas_per_sm=2, hidden_tma=True))],
    ("sm100", 2, Work.TRUNCATE): [(16, TileConfig(16, 128, 128, 4, 6)), (512, TileConfig(32, 128, 128, 8, 5))],
    ("sm100", 2, Work.EDIT): [(16, TileConfig(16, 128, 128, 4, 6)), (512, TileConfig(32, 128, 128, 8, 5))],
    ("sm100", 2, Work.EDIT_AND_TRUNCATE): [(16, TileConfig(16, 128, 128, 4, 6)), (512, TileConfig(32, 128, 128, 8, 5))],
    ("sm80", 2, Work.TRUNCATE): [
        (16, TileConfig(16, 128, 64, 4, 5, tma=False)),
        (512, TileConfig(32, 128, 64, 8, 4, tma=False)),
    ],
    ("sm80", 4, Work.TRUNCATE): [(512, TileConfig(16, 64, 32, 8, 4, tma=False))],
    ("sm80", 2, Work.EDIT): [(512, TileConfig(16, 128, 64, 8, 5, tma=False))],
    ("sm80", 2, Work.EDIT_AND_TRUNCATE): [(512, TileConfig(16, 128, 64, 8, 5, tma=False))],
}
# Where the draw of truncated rows wants another shape: the search spills less when it counts fewer spans at a time.
DRAWS: dict[str, DrawConfig] = {"sm80": DrawConfig(gather=16)}
# {work: [(largest number of rows, reader)]}; the last one serves larger batches. A truncated row wants as many parts as
# the fused pass has: with fewer, more rows are left to the search.
READS: dict[Work, list[tuple[int, ReadConfig]]] = {
    Work.PLAIN: [(512, ReadConfig(1, 1024, 1, ctas_per_sm=32, one_launch=True))],
    Work.TRUNCATE: [(512, ReadConfig(1, 512, 1, ctas_per_sm=24, least_parts=64))],
    Work.EDIT: [(512, ReadConfig(1, 512, 1, ctas_per_sm=24))],
    Work.EDIT_AND_TRUNCATE: [(512, ReadConfig(1, 512, 1, ctas_per_sm=24, least_parts=64))],
}
# How the rescored groups are found and how they are read, where not as usual.
_SHARED: dict[str, Any] = {"prefetch": False, "listed": True, "early": True}
_SMALL_STEPS: dict[str, Any] = {"rescore_v": 32, "rescore_d": 256, **_SHARED}
_MANY_GROUPS: dict[str, Any] = {"rescore_d": 64, "rescore_warps": 8, **_SHARED}
# {(family, bytes per weight element, work): [(largest number of rows, how the screened path launches)]}. Those of sm90
# for 2 bytes follow the winners of tuning runs on an H200 for 151,936 x 4,096 as far as ``SCREEN_ROWS``; beyond it they
# are where a search starts, and spill nothing. All others compile, and are not measured.
SCREENS: dict[tuple[str, int, Work], list[tuple[int, ScreenConfig]]] = {
    ("sm90", 2, Work.PLAIN): [
        (8, ScreenConfig(8, 64, 256, 4, 5, ctas_per_sm=2, **_SMALL_STEPS)),
        (16, ScreenConfig(16, 128, 256, 4, 5, **_SHARED)),
        (32, ScreenConfig(32, 64, 256, 4, 3, ctas_per_sm=2, **_SHARED)),
        (64, ScreenConfig(32, 128, 128, 4, 4, ctas_per_sm=2, **_SHARED)),
    ],
    ("sm90", 2, Work.EDIT): [
        (8, ScreenConfig(8, 64, 256, 4, 5, ctas_per_sm=2, **_SMALL_STEPS)),
        (16, ScreenConfig(16, 64, 256, 4, 4, ctas_per_sm=2, **_SMALL_STEPS)),
        (64, ScreenConfig(32, 64, 256, 8, 4, **_MANY_GROUPS)),
    ],
    ("sm90", 2, Work.TRUNCATE): [
        (8, ScreenConfig(8, 64, 256, 4, 5, ctas_per_sm=2, rescore_d=256, **_SHARED)),
        (64, ScreenConfig(16, 64, 256, 4, 4, ctas_per_sm=2, rescore_d=256, **_SHARED)),
    ],
    ("sm90", 2, Work.EDIT_AND_TRUNCATE): [
        (8, ScreenConfig(8, 64, 256, 4, 5, ctas_per_sm=2, **_MANY_GROUPS)),
        (64, ScreenConfig(16, 64, 256, 4, 4, ctas_per_sm=2, **_MANY_GROUPS)),
    ],
    ("sm90", 4, Work.PLAIN): [(64, ScreenConfig(16, 64, 256, 8, 6, rescore_d=16, rescore_warps=8))],
    ("sm100", 2, Work.PLAIN): [
        (8, ScreenConfig(8, 128, 256, 8, 5, rescore_d=64, rescore_warps=8)),
        (16, ScreenConfig(16, 128, 256, 8, 4, rescore_d=64, rescore_warps=8)),
        (64, ScreenConfig(32, 64, 256, 8, 4, rescore_v=32, rescore_d=64, rescore_warps=8)),
    ],
    ("sm100", 2, Work.EDIT): [
        (16, ScreenConfig(16, 64, 256, 8, 6, rescore_d=64, rescore_warps=8)),
        (64, ScreenConfig(32, 64, 256, 8, 4, rescore_d=64)),
    ],
    ("sm100", 4, Work.PLAIN): [(64, ScreenConfig(16, 64, 256, 8, 6, rescore_v=32, rescore_d=16, rescore_warps=8))],
    ("sm80", 2, Work.PLAIN): [
        (16, ScreenConfig(16, 128, 128, 8, 4, tma=False, rescore_d=64)),
        (64, ScreenConfig(32, 64, 128, 8, 4, tma=False, rescore_d=64, rescore_warps=8)),
    ],
    ("sm80", 4, Work.PLAIN): [(64, ScreenConfig(16, 64, 128, 8, 4, tma=False, rescore_d=16, rescore_warps=8))],
}
# {(family, bytes per weight element, work): largest number of rows that the fused pass takes}
PATHS: dict[tuple[str, int, Work], int] = {
    ("sm90", 2, Work.PLAIN): 128,
    ("sm90", 2, Work.TRUNCATE): 64,
    ("sm90", 2, Work.EDIT): 64,
    ("sm90", 2, Work.EDIT_AND_TRUNCATE): 48,
}
FUSED_ROWS = 64  # where PATHS has no entry
# {(family, bytes per weight element, work): [(largest number of columns, largest number of rows that the screened path
# takes where the head has a screen)]}; the last entry serves wider heads too. Where no shipped table of such a head has
# raced it and found it slower; between 2,048 and 2,880 columns there is none.
SCREEN_ROWS: dict[tuple[str, int, Work], list[tuple[int, int]]] = {
    ("sm90", 2, Work.PLAIN): [(8192, 32)],
    ("sm90", 2, Work.GREEDY): [(8192, 16)],
    ("sm90", 2, Work.EDIT): [(8192, 16)],
    ("sm90", 2, Work.TRUNCATE): [(2879, 1), (8192, 8)],
}
INTERPRETED_SCREEN_ROWS = 32  # of every kind of work: no time is lost, and what has a screen is there to be tried
# Major compute capability -> family. Ampere, Ada and the consumer Blackwells share the smallest shared memory.
FAMILIES = {8: "sm80", 9: "sm90", 10: "sm100", 11: "sm80", 12: "sm80"}


class Shape(NamedTuple):
    """What of a head the built-in choices depend on. has_gemm: a GEMM gives the head's logits as they are to be."""

    device: torch.device
    itemsize: int  # bytes per weight element
    vocab_size: int
    hidden_size: int
    has_gemm: bool

    @classmethod
    def of(cls, head: LMHead) -> Shape:
        weight = head.weight
        return cls(
            weight.device, weight.element_size(), head.vocab_size, weight.shape[1], head.rounding is weight.dtype
        )


def _own(table: Mapping[Any, _T], key: tuple, work: Work) -> _T | None:
    """The entry of ``work``, or of the first work that it falls back to that has one."""
    found = table.get((*key, work))
    return found if found is not None or work.fallback is None else _own(table, key, work.fallback)


def _up_to(entries: list[tuple[int, _T]], size: int) -> _T:
    return next((entry for largest, entry in entries if size <= largest), entries[-1][1])


@functools.lru_cache(maxsize=4096)
def tile_in(family: str, itemsize: int, num_rows: int, work: Work) -> TileConfig:
    """The tile on devices of ``family`` for a head of ``itemsize`` bytes per weight element."""
    return _up_to(_own(WORK_TABLE, (family, itemsize), work) or TABLE[family, itemsize], num_rows)


@functools.lru_cache(maxsize=4096)
def reader_in(num_rows: int, work: Work) -> ReadConfig:
    """The reader of logits, on any GPU."""
    return _up_to(READS[work.kernels], num_rows)


def screen_rows_in(family: str, itemsize: int, hidden_size: int, work: Work) -> int:
    """Up to how many rows the screened path is the fastest for a head that has a screen; 0 for work without one."""
    entries = SCREEN_ROWS.get((family, itemsize, work.unscreened)) if work.screened else None
    return _up_to(entries, hidden_size) if entries else 0


def path_in(family: str, itemsize: int, hidden_size: int, num_rows: int, work: Work) -> Path:
    """The fastest path for a head of ``hidden_size`` columns whose logits a GEMM gives."""
    if num_rows <= screen_rows_in(family, itemsize, hidden_size, work):
        return Path.SCREENED
    return Path.FUSED if num_rows <= (_own(PATHS, (family, itemsize), work) or FUSED_ROWS) else Path.LOGITS


@functools.lru_cache(maxsize=4096)
def _interpreted_tile(vocab_size: int, hidden_size: int, num_rows: int) -> TileConfig:
    """Interpreted programs cost milliseconds each: as few as the interpreter's block limit of 2**20 allows."""

    def cover(n: int, least: int, most: int) -> int:
        return min(max(least, 1 << (n - 1).bit_length()), most)

    block_d = cover(hidden_size, 16, 256)
    block_b = cover(num_rows, 16, 128)
    block_v = cover(vocab_size, 32, 2**19 // max(block_b, block_d))
    return TileConfig(block_b, block_v, block_d, 4, 1, flatten=False, tma=False, reduce_rows=block_b)


@functools.cache
def family_of(device: torch.device) -> str | None:
    """The table's name for ``device``; None where no entry fits it."""
    return FAMILIES.get(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else None


def _known_family(device: torch.device) -> str:
    family = family_of(device)
    if family is None:
        raise ValueError(f"device is {device}; expected a CUDA device of compute capability 8.0 or newer")
    return family


def tile_of(shape: Shape, num_rows: int, work: Work = Work.PLAIN) -> TileConfig:
    """The tile for ``num_rows`` rows of such a head. Raises ValueError on a device without an entry."""
    if shape.device.type == "cpu":
        return _interpreted_tile(shape.vocab_size, shape.hidden_size, num_rows)
    return tile_in(_known_family(shape.device), shape.itemsize, num_rows, work)


def tile_for(head: LMHead, num_rows: int, work: Work = Work.PLAIN) -> TileConfig:
    """``tile_of`` the shape of ``head``."""
    return tile_of(Shape.of(head), num_rows, work)


@functools.lru_cache(maxsize=256)
def _interpreted_draw(vocab_size: int) -> DrawConfig:
    block = min(max(8, 1 << max(0, vocab_size - 1).bit_length()), 2**16)
    return DrawConfig(chunks=1, num_warps=4, block=block, search_chunks=1, search_warps=4, window=2, gather=64)


def draw_on(device: torch.device, vocab_size: int) -> DrawConfig:
    """How rows with a truncation are drawn, whatever the batch size and the path."""
    if device.type == "cpu":
        return _interpreted_draw(vocab_size)
    return DRAWS.get(family_of(device) or "", DEFAULT_DRAW)


def draw_for(head: LMHead) -> DrawConfig:
    """``draw_on`` the device of ``head``, for its vocabulary."""
    return draw_on(head.weight.device, head.vocab_size)


def path_of(shape: Shape, num_rows: int, work: Work = Work.PLAIN) -> Path:
    """The fastest path for ``num_rows`` rows of such a head, of those that are exact for it."""
    family = family_of(shape.device)
    if family is None:
        return Path.SCREENED if work.screened and num_rows <= INTERPRETED_SCREEN_ROWS else Path.FUSED
    path = path_in(family, shape.itemsize, shape.hidden_size, num_rows, work)
    return Path.FUSED if path is Path.LOGITS and not shape.has_gemm else path


def path_for(head: LMHead, num_rows: int, work: Work = Work.PLAIN) -> Path:
    """``path_of`` the shape of ``head``."""
    return path_of(Shape.of(head), num_rows, work)


@functools.lru_cache(maxsize=256)
def _interpreted_screen(vocab_size: int, hidden_size: int, num_rows: int) -> ScreenConfig:
    """As few programs as the tile that ``_interpreted_tile`` makes."""
    tile = _interpreted_tile(vocab_size, hidden_size, num_rows)
    return ScreenConfig(
        tile.block_b,
        tile.block_v,
        max(32, tile.block_d),
        4,
        1,
        flatten=False,
        tma=False,
        chunk=1024,
        rescore_d=tile.block_d,
        rescore_stages=1,
    )


@functools.lru_cache(maxsize=4096)
def screen_in(family: str, itemsize: int, num_rows: int, work: Work) -> ScreenConfig:
    """How the screened path launches on devices of ``family``."""
    key = (family, itemsize)
    entries = _own(SCREENS, key, work) or (SCREENS.get((*key, Work.EDIT)) if work.edits else None)
    return _up_to(entries or SCREENS[(*key, Work.PLAIN)], num_rows)


def screen_of(shape: Shape, num_rows: int, work: Work = Work.PLAIN) -> ScreenConfig:
    """How the screened path launches ``num_rows`` rows of such a head, without a truncation. Raises ValueError on a
    device without an entry."""
    if shape.device.type == "cpu":
        return _interpreted_screen(shape.vocab_size, shape.hidden_size, num_rows)
    return screen_in(_known_family(shape.device), shape.itemsize, num_rows, work)


@functools.lru_cache(maxsize=4096)
def _interpreted_read(vocab_size: int, num_rows: int) -> ReadConfig:
    block_b = 1 << min(max(0, num_rows - 1).bit_length(), 6)
    block_v = min(max(2 * GROUP_SIZE, 1 << max(0, vocab_size - 1).bit_length()), 2**20 // block_b)
    return ReadConfig(block_b, block_v, 4, ctas_per_sm=1, reduce_rows=block_b)


def read_for(device: torch.device, vocab_size: int, num_rows: int, work: Work = Work.PLAIN) -> ReadConfig:
    """The reader of ``num_rows`` rows of logits. Raises ValueError on a device without an entry."""
    if device.type == "cpu":
        return _interpreted_read(vocab_size, num_rows)
    _known_family(device)
    return reader_in(num_rows, work)
