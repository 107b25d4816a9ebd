"""The plan of a run for one head on one device: its studies, its races and an estimate of its time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable

from ..defaults import (
    LEAST_E4M3,
    HeadTraits,
    all_configs,
    default_config,
    defaults_digest,
    family_of,
    on_request_configs,
)
from ..kernels.config import GROUP_SIZE, MIN_CHUNK, ReadConfig, ScreenConfig, TileConfig, cdiv
from ..kernels.int8_head import MAX_HIDDEN
from ..kinds import KIND_NAMES, MAX_SCREENED_ROWS, BatchKind, Config, SamplingPath, path_of
from ..tables.schema import ITEMSIZE, Device, HeadShape
from .labels import kernel_kind
from .race import Policy
from .space import (
    FUSED,
    LOGITS,
    MAX_ROWS_ONE_LAUNCH,
    MIN_ROWS_FIRST,
    SCREENED,
    Limits,
    Space,
    tile_classes,
)

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows of the batches that are decided
# Kinds in the order of their races. A choice without a screen also runs in the race with one, so it is decided before.
# The kinds that gain most come early: servers have a screen only where a race has shown that it is faster, and a run
# may end before its last race.
KINDS = tuple(
    KIND_NAMES[kind + screen]
    for kind in ("plain", "greedy", "truncate", "edit", "edit+truncate")
    for screen in ("", "+screen")
)
# The fused pass reads the head once per block of rows: beyond this many rows only for the race.
MAX_FUSED_PROBE = 256

MAX_COMPILERS = 15
MIN_CAP = 6  # configurations that a study tries at least, where its space has so many

# Estimates: seconds of one processor per kernel without and with edits (sm90 cubins take 0.4 to 1 s and 0.7 to 3 s; the
# first truncated ones 5 s more); kernels of a screen that no other configuration has compiled; seconds to start a
# process, of a check with its timings, and of a race beside its samples; bytes per second of an unknown device.
COMPILE_SECONDS = {False: 1.0, True: 1.5}
SCREEN_KERNELS = 1.5
START_SECONDS, TRIAL_SECONDS, RACE_SECONDS = 10.0, 0.08, 0.25
BYTES_PER_SECOND = 3e12


@dataclasses.dataclass(frozen=True)
class Effort:
    """budget: seconds of the whole run. share: the part of it that the search may take. cap: configurations per study.
    proposed: the least share of them that the sampler proposes. finalists: per study in a race. transfer: also race
    between all batch sizes; else only below one where the fused pass has beaten a built-in GEMM. baselines: race
    FlashInfer too."""

    name: str
    budget: float
    share: float
    cap: int
    proposed: float
    finalists: int
    policy: Policy
    transfer: bool
    baselines: bool


# The sampler has no share of `quick`: with a third of the trials of a study of plain batches it found nothing better,
# on three heads, than the seeds in whose place they were. Its share of `full` is three trials of a screened study.
# Studies that run out of seeds propose more.
EFFORTS = {
    "quick": Effort("quick", 53.0, 0.42, 6, 0.0, 2, Policy(least=5, step=3, most=14), False, False),
    "full": Effort("full", 285.0, 0.8, 72, 1 / 12, 3, Policy(), True, True),
    # Every configuration of the declared space: the oracle that searches are compared with.
    "exhaustive": Effort("exhaustive", 4 * 3600.0, 0.9, 10**9, 0.0, 4, Policy(most=60), True, True),
}
RANK = {name: place for place, name in enumerate(EFFORTS)}


@dataclasses.dataclass(frozen=True)
class StudyKey:
    """path; kind: of batch whose kernels they are; block_b: the tile class, 0 for logits."""

    path: SamplingPath
    kind: BatchKind
    block_b: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.path}" + (f"/{self.block_b}" if self.block_b else "")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of each part, before anything is measured. covered: configurations for which the budget's share of the
    search is enough."""

    start: float
    search: float
    race: float
    covered: int

    @property
    def total(self) -> float:
        return self.start + self.search + self.race


@dataclasses.dataclass(frozen=True)
class Plan:
    device: Device
    head: HeadShape
    effort: Effort
    sizes: tuple[int, ...] = SIZES

    @property
    def family(self) -> str:
        """The device family. Raises ValueError for a device without built-in choices, and for one whose kernels cannot
        read the head."""
        family, least = family_of(self.device.cc), LEAST_E4M3 if self.head.is_quantised else (8, 0)
        if family is None or tuple(map(int, self.device.cc.split("."))) < least:
            expected = "{}.{} or newer".format(*least)
            raise ValueError(
                f"{self.device.name} has compute capability {self.device.cc}; expected {expected} for {self.head.dtype}"
            )
        return family

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.head.dtype]

    @property
    def defaults_digest(self) -> str:
        return defaults_digest(self.family, self.itemsize, self.head.hidden)

    @functools.cached_property
    def limits(self) -> Limits:
        descriptors = self.family in ("sm90", "sm100") and self.head.hidden * self.itemsize % 16 == 0
        groups = cdiv(self.head.vocab, GROUP_SIZE)
        chunk = max(MIN_CHUNK, cdiv(groups, max(1, self.device.sms)))
        return Limits(self.head.hidden, self.itemsize, self.device.smem_optin, descriptors, chunk)

    @property
    def kinds(self) -> tuple[BatchKind, ...]:
        """Only a whole vocabulary is truncated. Only a head that is not quantised, of a hidden size for which its bound
        holds, has a screen."""
        kinds = (kind for kind in KINDS if self.head.tp == 1 or not kind.truncate)
        return tuple(kind for kind in kinds if self.sizes_of(kind))

    def sizes_of(self, kind: BatchKind) -> tuple[int, ...]:
        """The batch sizes that are decided for ``kind``."""
        if not kind.screen:
            return self.sizes
        if self.head.is_quantised:  # an INT8 copy is no smaller
            return ()
        return tuple(rows for rows in self.sizes if rows <= MAX_SCREENED_ROWS and self.head.hidden <= MAX_HIDDEN)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths whose kernels are raced."""
        return (FUSED, LOGITS, *([SCREENED] if any(kind.screen for kind in self.kinds) else []))

    @functools.cached_property
    def screen(self) -> dict[str, int]:
        """The cost of a screen: device memory in bytes, and rows of its largest batch; empty where none is raced."""
        from ..screen import Screen
        from .workload import empty_head

        sizes = [rows for kind in self.kinds if kind.screen for rows in self.sizes_of(kind)]
        if not sizes:
            return {}
        return {"bytes": Screen.bytes_for(empty_head(self.head, "meta"), max(sizes)), "rows": max(sizes)}

    @functools.cached_property
    def studies(self) -> list[StudyKey]:
        studies: dict[StudyKey, None] = {}
        for kind in self.kinds:
            for path in (SCREENED,) if kind.screen else (FUSED, LOGITS):
                if kernel_kind(kind, path) == kind:
                    classes = itertools.chain(*(tile_classes(path, rows, kind) for rows in self.sizes_of(kind)))
                    studies |= {StudyKey(path, kind, block_b): None for block_b in classes}
        return list(studies)

    def serves(self, key: StudyKey, rows: int, kind: BatchKind) -> bool:
        """True where the finds of a study may race for ``rows`` rows of ``kind``."""
        return key.kind == kernel_kind(kind, key.path) and key.block_b in tile_classes(key.path, rows, kind)

    def served(self, key: StudyKey) -> frozenset[tuple[int, BatchKind]]:
        """The batches that a study's finds may race for."""
        batches = ((rows, kind) for kind in self.kinds for rows in self.sizes_of(kind))
        return frozenset((rows, kind) for rows, kind in batches if self.serves(key, rows, kind))

    def space(self, key: StudyKey) -> Space:
        return Space(self.limits, key.path, key.block_b, key.kind.truncate, key.kind.edit)

    def probes(self, key: StudyKey) -> list[int]:
        """The batch sizes that a study's configurations are timed at."""
        if key.path == LOGITS:
            middle = [rows for rows in self.sizes if rows >= 64] or list(self.sizes)
            return sorted({middle[0], middle[len(middle) // 2], middle[-1]})
        served = [rows for rows in self.sizes_of(key.kind) if self.serves(key, rows, key.kind)]
        served = [rows for rows in served if rows <= MAX_FUSED_PROBE] or served[:1]
        # Below a full block the rows do not matter; beyond it, each further block reads the head again.
        return sorted({served[0], *(rows for rows in served if rows >= key.block_b)})

    def default(self, rows: int, kind: BatchKind) -> Config:
        """The built-in choice, as its launcher runs it."""
        return self._launched(default_config(self._traits, rows, kind))

    def on_request(self, rows: int, kind: BatchKind) -> list[Config]:
        """The built-in choices that only callers who ask for their path get, as their launchers run them."""
        return [self._launched(config) for config in on_request_configs(self._traits, rows, kind)]

    @property
    def _traits(self) -> HeadTraits:
        return HeadTraits.of_shape(self.head, self.family)

    def _launched(self, config: Config) -> Config:
        if isinstance(config, TileConfig) and not self.limits.tma:
            return dataclasses.replace(config, tma=False, hidden_tma=False)
        return config

    def study_of(self, config: Config, kind: BatchKind) -> StudyKey:
        path = path_of(config)
        return StudyKey(path, kernel_kind(kind, path), 0 if isinstance(config, ReadConfig) else config.block_b)

    def defaults(self, key: StudyKey) -> list[Config]:
        """The built-in choices that belong to a study."""
        defaults = [self.default(rows, key.kind) for rows in self.sizes]
        return [config for config in dict.fromkeys(defaults) if self.study_of(config, key.kind) == key]

    def seeds(self, key: StudyKey, elsewhere: Iterable[Config] = ()) -> list[Config]:
        """The first trials of a study: the built-in choices, those that the space declares, then winners of other
        tables (``elsewhere``) and other built-in choices of the family."""
        space, defaults = self.space(key), self.defaults(key)
        others: list[Config] = []
        for config in (*elsewhere, *all_configs(self.family, self.itemsize)):
            if path_of(config) == key.path:
                others.append(config if isinstance(config, ReadConfig) else self.fitted(config, key.block_b))
        seeds = dict.fromkeys([*defaults, *space.first(), *others])
        return [config for config in seeds if config in defaults or config in space.points]

    def fitted(self, config: TileConfig | ScreenConfig, block_b: int) -> TileConfig | ScreenConfig:
        """``config`` in another tile class, with as many stages as fit there."""
        limits, tma = self.limits, config.tma and self.limits.tma
        if isinstance(config, ScreenConfig):
            return limits.deepest(dataclasses.replace(config, block_b=block_b, chunk=limits.chunk, tma=tma))
        one_launch = config.one_launch and block_b <= MAX_ROWS_ONE_LAUNCH
        return limits.deepest(
            dataclasses.replace(
                config,
                block_b=block_b,
                tma=tma,
                hidden_tma=config.hidden_tma and tma,
                rows_first=config.rows_first and block_b >= MIN_ROWS_FIRST,
                one_launch=one_launch,
                reduce_rows=block_b if one_launch else 1,
            )
        )

    def cap(self, key: StudyKey) -> int:
        """The most configurations that a study tries. A screen's time is the sum of two launches': half as many trials
        tell as much."""
        return self.effort.cap if key.path != SCREENED else max(MIN_CAP, self.effort.cap // 2)

    def trials(self, key: StudyKey) -> int:
        return min(self.cap(key), len(self.space(key).points))

    @property
    def compiles(self) -> int:
        return sum(self.trials(key) for key in self.studies)

    @property
    def races(self) -> int:
        return sum(len(self.sizes_of(kind)) for kind in self.kinds)

    def estimate(self, processes: int) -> Estimate:
        """Estimate the time of a run. processes: so many compile."""
        kernels = {SCREENED: SCREEN_KERNELS}
        each = (self.trials(key) * COMPILE_SECONDS[key.kind.edit] * kernels.get(key.path, 1.0) for key in self.studies)
        compiling = sum(each) / max(1, processes)
        sample = max(1e-3, self.head.vocab * self.head.hidden * self.itemsize / BYTES_PER_SECOND)
        rounds = (self.effort.policy.least + self.effort.policy.most) / 2
        racing = self.races * (RACE_SECONDS + rounds * sample * (3 + 2 * self.effort.finalists))
        measuring = self.compiles * (TRIAL_SECONDS + 16 * sample)
        search = max(compiling, measuring)
        time_left = self.effort.budget * self.effort.share - START_SECONDS
        covered = int(self.compiles * min(1.0, max(0.0, time_left / search)))
        return Estimate(START_SECONDS, search, racing, covered)


def usual_compilers() -> int:
    """Processes that compile unless their number is given."""
    return max(1, min(MAX_COMPILERS, len(os.sched_getaffinity(0)) - 1))


def midpoint(lower: int, upper: int) -> int | None:
    """A batch size between two that stands for those between; None where there is none worth it."""
    middle = (lower + upper) // 2
    return middle if lower < middle < upper and middle >= 8 else None
