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
MOST_TERMS = 2  # int8 numbers per element of a hidden state
MOST_BLOCK_B = 128  # rows of a screening tile
LEAST_CHUNK = 16  # groups per rescoring program
MOST_RESCORE_WARPS = LEAST_CHUNK // 2  # no more threads than pairs of a chunk's groups and a block's 16 rows or more
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


@dataclasses.dataclass(frozen=True, order=True)
class ScreenConfig:
    """One point of the launch space of ``screened_sample``.

    The screen: block_b, block_v, block_d, num_warps, stages, ctas_per_sm, flatten: as in ``TileConfig``, of the INT8
    head. tma: load it and the hidden states through tensor descriptors. terms: 1 or 2 int8 numbers per element of a
    hidden state: two leave fewer groups to rescore, one is half the arithmetic. ``block_b * terms`` is at least 16.
    hidden_warps: of the programs, one per row, that make them.

    The rescoring: chunk: groups that one program answers for, any number from ``LEAST_CHUNK`` on. rescore_v, rescore_d:
    ids and hidden elements per step, of the groups that are to be rescored. rescore_warps, rescore_stages: as num_warps
    and stages. prefetch: ask for all of a step's ids at once, for the pipeline is shorter than they are.
    listed: put the groups into one list first, with a launch of its own, and have ``rescore_ctas_per_sm`` programs per
    multiprocessor share them evenly; a chunk is then what one program of that launch looks through.

    early: each launch but the first starts while the one before it ends, where the device can do so.
    """

    block_b: int
    block_v: int
    block_d: int
    num_warps: int
    stages: int
    ctas_per_sm: int = 1
    flatten: bool = True
    tma: bool = True
    terms: int = 2
    hidden_warps: int = 8
    chunk: int = 72
    rescore_v: int = 64
    rescore_d: int = 128
    rescore_warps: int = 4
    rescore_stages: int = 4
    prefetch: bool = True
    listed: bool = False
    rescore_ctas_per_sm: int = 1
    early: bool = False

    def __post_init__(self) -> None:
        least = {"terms": 1, "block_b": 8, "block_v": 2 * GROUP_SIZE, "block_d": 32, "num_warps": 1, "hidden_warps": 1}
        least |= {"rescore_v": GROUP_SIZE, "rescore_d": 16, "rescore_warps": 1}
        _require_powers_of_two(self, least)
        _require_positive(self, "stages", "ctas_per_sm", "rescore_stages", "rescore_ctas_per_sm", "chunk")
        if self.chunk < LEAST_CHUNK:
            raise ValueError(f"ScreenConfig.chunk is {self.chunk}; expected {LEAST_CHUNK} or more")
        most = {"terms": MOST_TERMS, "block_b": MOST_BLOCK_B, "rescore_warps": MOST_RESCORE_WARPS}
        _require_at_most(self, most)
        if self.block_b * self.terms < 16:
            raise ValueError(
                f"ScreenConfig.block_b is {self.block_b} with {self.terms} terms; expected at least 16 of both together"
            )


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
