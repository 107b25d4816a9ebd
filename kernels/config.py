"""The shape of one launch: which tile of the head or of the logits a program works on, and how.

A config never changes a token: tiles decide how the work is cut, the noise is keyed by absolute vocabulary ids
(``rng.py``). Every config is a frozen dataclass of integers and booleans; one that no kernel can run raises ValueError.
"""

from __future__ import annotations

import dataclasses
import functools

# Ids that share one noise value (rng.py). One group is one warp's 16 rows of a tensor-core tile: its sums stay in one
# warp.
GROUP_SIZE = 16
MAX_DRAW_SPLITS = 16  # programs that share a truncated row
MAX_CANDIDATE_GROUPS = 512
MAX_SPLITS = 512  # parts that a vocabulary is cut into where logits are read: the reduction has room for no more
MAX_SCREEN_ROWS_PER_TILE = 128
LIMBS = 2  # int8 numbers per element of a hidden state, on the screened path
MIN_BLOCK_D = 32  # hidden elements per step of the fused pass
MIN_CHUNK = 16  # groups per rescoring program
MIN_RESCORED_ROWS = 16  # rows of the batch in a rescoring program: what a tensor-core instruction takes
# No more threads than pairs of a chunk's groups and a block's 16 rows or more: each pair is one thread's.
MAX_RESCORE_WARPS = MIN_CHUNK // 2
_REGISTERS, _MOST_WARPS = 65_536, 64  # of a multiprocessor
_REGISTER_LOT = 8  # a thread's registers are a multiple
_MOST_REGISTERS = 255  # of a thread
MAX_TRUNCATED_ROWS_PER_TILE = 128  # two integers hold so many flags (epilogue.flags_as_bits)


def cdiv(dividend: int, divisor: int) -> int:
    """``dividend / divisor``, rounded up; both positive. Triton's own takes microseconds, a launch needs several."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``, which is positive."""
    return 1 << (number - 1).bit_length()


def _require_powers_of_two(config: object, smallest: dict[str, int]) -> None:
    for name, least in smallest.items():
        value = getattr(config, name)
        if not isinstance(value, int) or value < least or value & (value - 1):
            raise ValueError(
                f"{type(config).__name__}.{name} is {value!r}; expected a power of two of at least {least}"
            )


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{type(config).__name__}.{name} is {value!r}; expected an integer of at least 1")


def _require_at_most(config: object, largest: dict[str, int]) -> None:
    for name, most in largest.items():
        value = getattr(config, name)
        if value > most:
            raise ValueError(f"{type(config).__name__}.{name} is {value}; expected {most} or fewer")


def _require_whole_reductions(config: TileConfig | ReadConfig) -> None:
    if config.one_launch and config.reduce_rows > config.block_b:
        raise ValueError(
            f"{type(config).__name__}.reduce_rows is {config.reduce_rows}; expected at most block_b, "
            f"{config.block_b}, with one launch"
        )


@dataclasses.dataclass(frozen=True, order=True)
class TileConfig:
    """One point of the launch space of ``lm_head_sample``.

    block_b: rows of the batch per tile; block_v: vocabulary ids per tile; block_d: hidden elements per step.
    num_warps, stages: warps per program and depth of the software pipeline. ctas_per_sm: resident programs per
    multiprocessor, and so the most registers of a thread. flatten: merge the tile loop and the hidden loop, so that
    the next tile's loads are in flight during an epilogue. tma, hidden_tma: load the head, the hidden states through
    tensor descriptors (compute capability 9.0 and newer). reduce_rows: rows of the batch per program of the reduction.
    rows_first: the batch is the left operand, which wants 64 rows or more; a group of ids is then in 4 lanes of a warp
    and not in 8, and its sums take a third of the shuffles. one_launch: without a truncation, the last program of a
    block of rows reduces its splits, ``reduce_rows`` rows at a time, instead of a second launch.
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
        smallest = {"block_b": 16, "block_v": 2 * GROUP_SIZE, "block_d": MIN_BLOCK_D, "num_warps": 1, "reduce_rows": 1}
        _require_powers_of_two(self, smallest)
        _require_positive(self, "stages", "ctas_per_sm")
        _require_whole_reductions(self)

    @property
    def _programs(self) -> int:
        return min(self.ctas_per_sm, cdiv(_MOST_WARPS, self.num_warps))

    @functools.cached_property
    def max_registers(self) -> int | None:
        """Registers of a thread, of which ``ctas_per_sm`` programs, or as many as there can be, have room for all their
        threads; None where that is no limit."""
        room = _REGISTERS // (32 * self.num_warps * self._programs) // _REGISTER_LOT * _REGISTER_LOT
        return None if room >= _MOST_REGISTERS else room

    @functools.cached_property
    def compiled(self) -> TileConfig:
        """The fields that the kernel's code depends on: configs that differ elsewhere share a binary."""
        programs = 1 if self.max_registers is None else self._programs
        reduce_rows = self.reduce_rows if self.one_launch else 1
        return dataclasses.replace(self, ctas_per_sm=programs, reduce_rows=reduce_rows)


@dataclasses.dataclass(frozen=True, order=True)
class ReadConfig:
    """One point of the launch space of ``sample_logits``.

    block_b: rows of the batch per tile; block_v: vocabulary ids per tile. num_warps: per program. stages: tiles in
    flight per program; 1 leaves the waiting to the other programs of the multiprocessor. ctas_per_sm: programs per
    multiprocessor that the vocabulary is cut for. min_splits: of the vocabulary, however many rows there are
    (``MAX_SPLITS`` or fewer): a truncated row finds its next candidates among the best groups of each.
    reduce_rows, one_launch: as in ``TileConfig``.
    """

    block_b: int
    block_v: int
    num_warps: int
    stages: int = 1
    ctas_per_sm: int = 8
    min_splits: int = 1
    reduce_rows: int = 1
    one_launch: bool = False

    def __post_init__(self) -> None:
        _require_powers_of_two(self, {"block_b": 1, "block_v": 2 * GROUP_SIZE, "num_warps": 1, "reduce_rows": 1})
        _require_positive(self, "stages", "ctas_per_sm", "min_splits")
        _require_at_most(self, {"min_splits": MAX_SPLITS})
        _require_whole_reductions(self)

    @functools.cached_property
    def compiled(self) -> ReadConfig:
        """The fields that the kernel's code depends on."""
        reduce_rows = self.reduce_rows if self.one_launch else 1
        return dataclasses.replace(self, ctas_per_sm=1, min_splits=1, reduce_rows=reduce_rows)


@dataclasses.dataclass(frozen=True)
class ScreenTile:
    """The fields of a ``ScreenConfig`` that the kernel of the first pass depends on."""

    block_b: int
    block_v: int
    block_d: int
    stages: int
    flatten: bool
    tma: bool
    num_warps: int


@dataclasses.dataclass(frozen=True)
class RescoreTile:
    """The fields of a ``ScreenConfig`` that the kernels of the second pass depend on. block_v, block_d,
    stages: rescore_v, rescore_d, rescore_stages. block_c: the chunk as a block, a power of two."""

    block_b: int
    block_v: int
    block_d: int
    stages: int
    chunk: int
    block_c: int
    prefetch: bool


@dataclasses.dataclass(frozen=True, order=True)
class ScreenConfig:
    """One point of the launch space of ``screened_sample``.

    The screen: block_b, block_v, block_d, num_warps, stages, ctas_per_sm, flatten: as in ``TileConfig``, of the INT8
    head. tma: load it and the hidden states through tensor descriptors.

    The rescoring: chunk: groups that one program answers for, any number from ``MIN_CHUNK`` on. rescore_v, rescore_d:
    ids and hidden elements per step, of the groups that are rescored. rescore_warps, rescore_stages: as num_warps
    and stages. prefetch: ask for all of a step's ids at once, for the pipeline is shorter than they are.
    listed: put the groups into one list first, with a launch of its own, and have one program per multiprocessor share
    them evenly; a chunk is then what one program of that launch looks through.

    early: each launch but the first starts while the one before it ends, where the device can do so (programmatic
    dependent launch).
    """

    block_b: int
    block_v: int
    block_d: int
    num_warps: int
    stages: int
    ctas_per_sm: int = 1
    flatten: bool = True
    tma: bool = True
    chunk: int = 72
    rescore_v: int = 64
    rescore_d: int = 128
    rescore_warps: int = 4
    rescore_stages: int = 4
    prefetch: bool = True
    listed: bool = False
    early: bool = False

    def __post_init__(self) -> None:
        smallest = {"block_b": 8, "block_v": 2 * GROUP_SIZE, "block_d": 32, "num_warps": 1}
        smallest |= {"rescore_v": GROUP_SIZE, "rescore_d": 16, "rescore_warps": 1}
        _require_powers_of_two(self, smallest)
        _require_positive(self, "stages", "ctas_per_sm", "rescore_stages", "chunk")
        if self.chunk < MIN_CHUNK:
            raise ValueError(f"ScreenConfig.chunk is {self.chunk}; expected {MIN_CHUNK} or more")
        _require_at_most(self, {"block_b": MAX_SCREEN_ROWS_PER_TILE, "rescore_warps": MAX_RESCORE_WARPS})

    @functools.cached_property
    def screen_tile(self) -> ScreenTile:
        sides = self.block_b, self.block_v, self.block_d
        return ScreenTile(*sides, self.stages, self.flatten, self.tma, self.num_warps)

    @functools.cached_property
    def rescore_tile(self) -> RescoreTile:
        block_b = max(MIN_RESCORED_ROWS, self.block_b)
        steps = (self.rescore_v, self.rescore_d, self.rescore_stages)
        return RescoreTile(block_b, *steps, self.chunk, next_power_of_2(self.chunk), self.prefetch)


@dataclasses.dataclass(frozen=True)
class TruncationConfig:
    """The launches that draw truncated rows. All powers of two.

    splits: programs that share a row, ``MAX_DRAW_SPLITS`` or fewer. num_warps: per program of the pass. block: logits
    per step of it. candidate_groups: groups that a row with a small top-k, at most half as large, is drawn from.
    search_splits, search_warps: programs per row of the search, and their warps. window, gather: blocks of 128 ids
    whose tokens the search puts in order, and whose logits it counts, at a time. A row's sums
    are cut by splits and block, so one head keeps both the same for all batch sizes.
    """

    splits: int = 8
    num_warps: int = 8
    block: int = 4096
    candidate_groups: int = 128
    search_splits: int = 8
    search_warps: int = 32
    window: int = 8
    gather: int = 32

    def __post_init__(self) -> None:
        smallest = {field.name: 1 for field in dataclasses.fields(self)} | {"block": GROUP_SIZE}
        _require_powers_of_two(self, smallest)
        largest = {"candidate_groups": MAX_CANDIDATE_GROUPS, "splits": MAX_DRAW_SPLITS}
        _require_at_most(self, largest | {"search_splits": MAX_DRAW_SPLITS})

    @property
    def max_small_top_k(self) -> int:
        """The largest top-k whose tokens are sure to be in ``candidate_groups`` groups, ties included."""
        return self.candidate_groups // 2


DEFAULT_TRUNCATION = TruncationConfig()
