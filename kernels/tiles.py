"""The shape of one launch: which tile of the head or of the logits a program works on, and how.

A config never changes a token: tiles decide how the work is cut, the noise is keyed by absolute
vocabulary ids (``rng.py``).
"""

from __future__ import annotations

import dataclasses

from .rng import GROUP_SIZE

MOST_CHUNKS = 16
MOST_CANDIDATES = 512
MOST_PARTS = 512  # of a vocabulary, where logits are read: what the second launch has room for
MOST_FLAGS = 128  # rows of a tile with a truncation: as many flags as two integers hold (part.as_bits)


def _require_powers_of_two(config: object, least: dict[str, int]) -> None:
    for name, smallest in least.items():
        value = getattr(config, name)
        if not isinstance(value, int) or value < smallest or value & (value - 1):
            raise ValueError(
                f"{type(config).__name__}.{name} is {value!r}; expected a power of two of at least {smallest}"
            )


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{type(config).__name__}.{name} is {value!r}; expected an integer of at least 1")


def _require_at_most(config: object, most: dict[str, int]) -> None:
    for name, largest in most.items():
        value = getattr(config, name)
        if value > largest:
            raise ValueError(f"{type(config).__name__}.{name} is {value}; expected {largest} or fewer")


def _require_whole_steps(config: TileConfig | ReadConfig) -> None:
    if config.one_launch and config.reduce_rows > config.block_b:
        raise ValueError(
            f"{type(config).__name__}.reduce_rows is {config.reduce_rows}; expected at most block_b, "
            f"{config.block_b}, with one launch"
        )


@dataclasses.dataclass(frozen=True, order=True)
class TileConfig:
    """One point of the launch space of ``lm_head_sample``.

    block_b: rows of the batch per tile; block_v: vocabulary ids per tile; block_d: hidden elements per
    step. num_warps, stages: warps per program and depth of the software pipeline. ctas_per_sm: resident
    programs per multiprocessor. flatten: merge the tile loop and the hidden loop, so that the next
    tile's loads are in flight during an epilogue. tma, hidden_tma: load the head, the hidden states
    through tensor descriptors (compute capability 9.0 and newer). reduce_rows: rows of the batch per
    program of the reduction. rows_first: the batch is the left operand, which wants 64 rows or more; a
    group of ids is then in 4 lanes of a warp and not in 8, and its sums take a third of the shuffles.
    one_launch: without a truncation, the last program of a block of rows reduces its parts, ``reduce_rows``
    rows at a time, instead of a second launch.
    """

    block_b: int
    block_v: int
    block_d: int
    num_warps: int
    stages: int
    ctas_per_sm: int = 1
    flatten: bool = True
    tma: bool = True
    reduce_rows: int = 1
    hidden_tma: bool = False
    rows_first: bool = False
    one_launch: bool = False

    def __post_init__(self) -> None:
        least = {"block_b": 16, "block_v": 2 * GROUP_SIZE, "block_d": 16, "num_warps": 1, "reduce_rows": 1}
        _require_powers_of_two(self, least)
        _require_positive(self, "stages", "ctas_per_sm")
        _require_whole_steps(self)


@dataclasses.dataclass(frozen=True, order=True)
class ReadConfig:
    """One point of the launch space of ``sample_logits``.

    block_b: rows of the batch per tile; block_v: vocabulary ids per tile. num_warps: per program. stages: tiles in
    flight per program; 1 leaves the waiting to the other programs of the multiprocessor. ctas_per_sm: programs per
    multiprocessor that the vocabulary is cut for. least_parts: of the vocabulary, however many rows there are
    (``MOST_PARTS`` or fewer): a truncated row finds its next tokens among the best groups of each.
    reduce_rows, one_launch: as in ``TileConfig``.
    """

    block_b: int
    block_v: int
    num_warps: int
    stages: int = 1
    ctas_per_sm: int = 8
    least_parts: int = 1
    reduce_rows: int = 1
    one_launch: bool = False

    def __post_init__(self) -> None:
        _require_powers_of_two(self, {"block_b": 1, "block_v": 2 * GROUP_SIZE, "num_warps": 1, "reduce_rows": 1})
        _require_positive(self, "stages", "ctas_per_sm", "least_parts")
        _require_at_most(self, {"least_parts": MOST_PARTS})
        _require_whole_steps(self)


@dataclasses.dataclass(frozen=True)
class DrawConfig:
    """The launches that draw rows with a truncation. All powers of two.

    chunks: programs that share a row, ``MOST_CHUNKS`` or fewer. num_warps: per program of the pass. block: logits per
    step of it. candidates: groups that a row with a small top-k, at most half as large, is drawn from.
    search_chunks, search_warps, window, gather: of the search, its programs per row, their warps and, in spans of 128
    ids, how many have their tokens put in order and how many their logits counted at a time. A row's sums are cut by
    chunks and block, so a table keeps both the same for all batch sizes.
    """

    chunks: int = 8
    num_warps: int = 8
    block: int = 4096
    candidates: int = 128
    search_chunks: int = 8
    search_warps: int = 32
    window: int = 8
    gather: int = 32

    def __post_init__(self) -> None:
        least = {field.name: 1 for field in dataclasses.fields(self)} | {"block": 8}  # a thread loads 8 logits at once
        _require_powers_of_two(self, least)
        most = {"candidates": MOST_CANDIDATES, "chunks": MOST_CHUNKS, "search_chunks": MOST_CHUNKS}
        _require_at_most(self, most)


DEFAULT_DRAW = DrawConfig()
