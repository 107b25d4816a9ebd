"""What a run will do for one head on one device: its studies, its buckets and about how long it takes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import torch

from ..kernels.head import LMHead
from ..kernels.int8_head import MOST_HIDDEN
from ..kernels.integers import cdiv
from ..kernels.rng import GROUP_SIZE
from ..kernels.tiles import LEAST_CHUNK, ReadConfig, ScreenConfig, TileConfig
from ..screen import Screen
from ..table import Device, HeadShape
from ..table_entries import ITEMSIZE
from ..work import Work, path_of_config
from . import builtin
from .inputs import DTYPES
from .race import Policy
from .space import (
    FUSED,
    LEAST_ROWS_FIRST,
    LOGITS,
    MOST_ROWS_ONE_LAUNCH,
    SCREEN_TERMS,
    SCREENED,
    Config,
    Problem,
    Space,
    block_b_choices,
    screen_classes,
)

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WORKS = (
    *(Work.PLAIN, Work.GREEDY, Work.TRUNCATE, Work.EDIT, Work.EDIT_AND_TRUNCATE),
    *(Work.SCREENED, Work.SCREENED_GREEDY, Work.SCREENED_EDIT),
    *(Work.SCREENED_TRUNCATE, Work.SCREENED_EDIT_AND_TRUNCATE),
)
# Rows of the largest batch with a screen that is tuned: beyond, the integer arithmetic takes as long as reading bf16.
LARGEST_SCREENED = 64
# The fused pass reads the head once per block of rows: beyond this many rows only for the race.
LARGEST_FUSED_PROBE = 256
LARGEST_EDITED_CLASS = 64  # a larger tile's epilogue spills with edits

LEAST_CAP = 6  # configurations that a study tries at least, where its space has so many

# For estimates: seconds of one processor per kernel without and with edits (sm90 cubins take 0.4 to 1 s and 0.7 to 3 s;
# the first truncated ones 5 s more), how many kernels of a screen others have not compiled already, of starting a
# process, of a check with its timings, and of a race beside its samples; bytes per second of an unknown device.
COMPILE_SECONDS = {False: 1.0, True: 1.5}
SCREEN_KERNELS = 1.5
START_SECONDS, TRIAL_SECONDS, RACE_SECONDS = 10.0, 0.08, 0.25
BYTES_PER_SECOND = 3e12


@dataclasses.dataclass(frozen=True)
class Effort:
    """budget: seconds of the whole run. share: of it that the search may take. cap: configurations per study.
    finalists: per study in a race. transfer: check batch sizes between buckets. rivals: race FlashInfer too.
    draws: of each winner's G-test."""

    name: str
    budget: float
    share: float
    cap: int
    finalists: int
    policy: Policy
    transfer: bool
    rivals: bool
    draws: int = 200_000


EFFORTS = {
    "quick": Effort("quick", 53.0, 0.42, 6, 2, Policy(least=5, step=3, most=14), False, False),
    "full": Effort("full", 285.0, 0.8, 72, 3, Policy(), True, True),
    # Every configuration of the declared space: the oracle that searches are compared with.
    "exhaustive": Effort("exhaustive", 4 * 3600.0, 0.9, 10**9, 4, Policy(most=60), True, True),
}
RANK = {"quick": 0, "full": 1, "exhaustive": 2}


@dataclasses.dataclass(frozen=True)
class StudyKey:
    """path; work: whose kernels they are; block_b: the tile class, 0 for logits."""

    path: str
    work: Work
    block_b: int

    def __str__(self) -> str:
        return f"{self.work.value}/{self.path}" + (f"/{self.block_b}" if self.block_b else "")


@dataclasses.dataclass(frozen=True)
class Plan:
    device: Device
    head: HeadShape
    effort: Effort
    buckets: tuple[int, ...] = BUCKETS

    @property
    def family(self) -> str:
        """Raises ValueError where there is nothing built in to compare with."""
        family = builtin.family_of(self.device.cc)
        if family is None:
            raise ValueError(f"{self.device.name} has compute capability {self.device.cc}; expected 8.0 or newer")
        return family

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.head.dtype]

    @functools.cached_property
    def problem(self) -> Problem:
        descriptors = self.family in ("sm90", "sm100") and self.head.hidden * self.itemsize % 16 == 0
        groups = cdiv(self.head.vocab, GROUP_SIZE)
        chunk = max(LEAST_CHUNK, cdiv(groups, max(1, self.device.sms)))
        return Problem(self.head.hidden, self.itemsize, self.device.smem_optin, descriptors, chunk)

    @property
    def works(self) -> tuple[Work, ...]:
        """Only a whole vocabulary is truncated, and only hidden sizes for which its bound holds have a screen."""
        works = (work for work in WORKS if self.head.tp == 1 or not work.truncates)
        return tuple(work for work in works if self.buckets_of(work))

    def buckets_of(self, work: Work) -> tuple[int, ...]:
        """The batch sizes that are decided for ``work``."""
        if not work.screened:
            return self.buckets
        return tuple(rows for rows in self.buckets if rows <= LARGEST_SCREENED and self.head.hidden <= MOST_HIDDEN)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths whose kernels are raced."""
        return (FUSED, LOGITS, *([SCREENED] if any(work.screened for work in self.works) else []))

    @functools.cached_property
    def screen(self) -> dict[str, int]:
        """What a screen costs: its device memory, and the rows that it is for; empty where none is raced."""
        sizes = [rows for work in self.works if work.screened for rows in self.buckets_of(work)]
        if not sizes:
            return {}
        weight = torch.empty(self.head.vocab, self.head.hidden, dtype=DTYPES[self.head.dtype], device="meta")
        return {"bytes": Screen.bytes_for(LMHead(weight), max(sizes)), "rows": max(sizes)}

    def classes(self, rows: int, work: Work, path: str = FUSED) -> list[int]:
        """Tile classes of ``path`` that may serve ``rows`` rows."""
        if path == SCREENED:
            return screen_classes(rows) if rows <= LARGEST_SCREENED else []
        found = block_b_choices(min(rows, LARGEST_FUSED_PROBE), work.edits)
        return [block_b for block_b in found if not work.edits or block_b <= LARGEST_EDITED_CLASS] or [
            LARGEST_EDITED_CLASS
        ]

    @functools.cached_property
    def studies(self) -> list[StudyKey]:
        found: dict[StudyKey, None] = {}
        for work in self.works:
            if work.fallback is None:
                for rows in self.buckets:
                    found |= {StudyKey(FUSED, work, block_b): None for block_b in self.classes(rows, work)}
                found[StudyKey(LOGITS, work, 0)] = None
            elif work.screened and not work.greedy:
                for rows in self.buckets_of(work):
                    found |= {StudyKey(SCREENED, work, b): None for b in self.classes(rows, work, SCREENED)}
        return list(found)

    def serves(self, key: StudyKey, rows: int, work: Work) -> bool:
        """Whether what a study finds may race for ``rows`` rows of ``work``."""
        kernels = work.screening if key.path == SCREENED else work.kernels
        return key.work is kernels and (key.path == LOGITS or key.block_b in self.classes(rows, work, key.path))

    def space(self, key: StudyKey) -> Space:
        return Space(self.problem, key.path, key.block_b, key.work.truncates, key.work.edits)

    def probes(self, key: StudyKey) -> list[int]:
        """The batch sizes that a study's configurations are timed at."""
        if key.path == LOGITS:
            middle = [rows for rows in self.buckets if rows >= 64] or list(self.buckets)
            return sorted({middle[0], middle[len(middle) // 2], middle[-1]})
        served = [rows for rows in self.buckets_of(key.work) if key.block_b in self.classes(rows, key.work, key.path)]
        served = [rows for rows in served if rows <= LARGEST_FUSED_PROBE] or served[:1]
        # Below a full block the rows do not matter; beyond it, each further block reads the head again.
        return sorted({served[0], *(rows for rows in served if rows >= key.block_b)})

    def default(self, rows: int, work: Work) -> Config:
        config = builtin.default_of(self.family, self.itemsize, self.head.hidden, rows, work)
        if isinstance(config, TileConfig) and not self.problem.tma:
            return dataclasses.replace(config, tma=False, hidden_tma=False)  # as the launcher does
        return config

    def defaults(self, key: StudyKey) -> list[Config]:
        """The built-in defaults that belong to a study."""
        defaults = [self.default(rows, key.work) for rows in self.buckets]
        return [config for config in dict.fromkeys(defaults) if self.study_of(config, key.work) == key]

    def served(self, key: StudyKey) -> frozenset[tuple[int, Work]]:
        """The batches that a study's finds may race for."""
        batches = ((rows, work) for work in self.works for rows in self.buckets_of(work))
        return frozenset((rows, work) for rows, work in batches if self.serves(key, rows, work))

    def seeds(self, key: StudyKey, elsewhere: Iterable[Config] = ()) -> list[Config]:
        """What a study tries first: the built-in defaults, then what has been good elsewhere, then their neighbours.
        elsewhere: winners of other tables."""
        space, own = self.space(key), self.defaults(key)
        tiles = builtin.tiles_of(self.family, self.itemsize)
        built_in = [*tiles, *builtin.readers_of(), *builtin.screens_of(self.family, self.itemsize)]
        others: list[Config] = []
        for config in (*elsewhere, *built_in):
            if isinstance(config, TileConfig) and key.path == FUSED:
                others.append(self.fitted(config, key.block_b))
            elif isinstance(config, ReadConfig) and key.path == LOGITS:
                others.append(config)
            elif isinstance(config, ScreenConfig) and key.path == SCREENED:
                others.append(self.fitted_screen(config, key.block_b))
        found = dict.fromkeys([*own, *space.first(), *others])
        return [config for config in found if config in own or config in space.points]

    def fitted(self, tile: TileConfig, block_b: int) -> TileConfig:
        """``tile`` in another tile class, with as many stages as fit there."""
        space = Space(self.problem, FUSED, block_b, False, False)
        stages = max(1, min(tile.stages, space.deepest(tile.block_v, tile.block_d, tile.ctas_per_sm)))
        one_launch = tile.one_launch and block_b <= MOST_ROWS_ONE_LAUNCH
        return dataclasses.replace(
            tile,
            block_b=block_b,
            stages=stages,
            tma=tile.tma and self.problem.tma,
            hidden_tma=tile.hidden_tma and self.problem.tma,
            rows_first=tile.rows_first and block_b >= LEAST_ROWS_FIRST,
            one_launch=one_launch,
            reduce_rows=block_b if one_launch else 1,
        )

    def fitted_screen(self, screen: ScreenConfig, block_b: int) -> ScreenConfig:
        """As ``fitted``, of the screened path."""
        space = Space(self.problem, SCREENED, block_b, False, False)
        stages, rescore_stages = space.screen_stages(
            screen.block_v, screen.block_d, screen.ctas_per_sm, SCREEN_TERMS, screen.rescore_v, screen.rescore_d
        )
        return dataclasses.replace(
            screen,
            block_b=block_b,
            stages=max(1, min(screen.stages, stages)),
            rescore_stages=max(1, min(screen.rescore_stages, rescore_stages)),
            terms=SCREEN_TERMS,
            chunk=self.problem.chunk,
            tma=screen.tma and self.problem.tma,
        )

    def study_of(self, config: Config, work: Work) -> StudyKey:
        kernels = builtin.kernels_of(work, config)
        return StudyKey(path_of_config(config).value, kernels, 0 if isinstance(config, ReadConfig) else config.block_b)

    def cap(self, key: StudyKey) -> int:
        """How many configurations a study tries at most. A screen's time is the sum of two launches': half as many tell
        as much."""
        return self.effort.cap if key.path != SCREENED else max(LEAST_CAP, self.effort.cap // 2)

    def trials(self, key: StudyKey) -> int:
        return min(self.cap(key), len(self.space(key).points))

    @property
    def compiles(self) -> int:
        return sum(self.trials(key) for key in self.studies)

    @property
    def races(self) -> int:
        return sum(len(self.buckets_of(work)) for work in self.works)

    def _compile_seconds(self, key: StudyKey) -> float:
        kernels = SCREEN_KERNELS if key.path == SCREENED else 1.0
        return self.trials(key) * COMPILE_SECONDS[key.work.edits] * kernels

    def estimate(self, processes: int, gpus: int = 1) -> dict[str, float]:
        """Seconds of each part, about: before anything is measured."""
        compiling = sum(map(self._compile_seconds, self.studies)) / max(1, processes)
        one_pass = self.head.vocab * self.head.hidden * self.itemsize / BYTES_PER_SECOND
        sample = max(1e-3, one_pass)
        rounds = (self.effort.policy.least + self.effort.policy.most) / 2
        contenders = 3 + 2 * self.effort.finalists
        racing = self.races * (RACE_SECONDS + rounds * sample * contenders)
        measuring = self.compiles * (TRIAL_SECONDS + 16 * sample)
        search = min(max(compiling, measuring / gpus), self.effort.budget * self.effort.share)
        return {
            "start": START_SECONDS,
            "search": search,
            "race": racing / gpus,
            "total": min(self.effort.budget, START_SECONDS + search + racing / gpus),
        }


def midpoint(lower: int, upper: int) -> int | None:
    """A batch size between two buckets that stands for those between; None where there is none worth it."""
    middle = (lower + upper) // 2
    return middle if lower < middle < upper and middle >= 8 else None


def nearest(sizes: Iterable[int], rows: int) -> int:
    return min(sizes, key=lambda size: (abs(math.log2(size / rows)), size))
