"""What is worth trying: the launch spaces of ``lm_head_sample``, ``sample_logits`` and ``screened_sample``, declared
once, and what cannot run removed.

A ``Space`` is one path, one kind of work and, but for the logits path, one tile class (rows of the batch per tile):
what one study searches. Its axes are what Optuna sees; a point of the axes is a configuration, or nothing where
arithmetic shows that it cannot run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from typing import Any

from ..kernels.tiles import ReadConfig, ScreenConfig, TileConfig
from ..lookup import LEAST_RESCORED, buffer_bytes
from ..work import Config

FUSED, LOGITS, SCREENED = "fused", "logits", "screened"
BLOCK_V = (64, 128, 256)
BLOCK_D = (64, 128, 256)
NUM_WARPS = (4, 8)
CTAS_PER_SM = (1, 2)
FLATTEN = (True, False)
LEAST_ROWS_FIRST = 64  # rows per tile that a tensor-core instruction takes as its left operand
MOST_ROWS_ONE_LAUNCH = 16  # rows per tile that one program reduces as fast as a launch of its own
# What is loaded through tensor descriptors, where the device has them.
BY_HEAD, BY_BOTH, BY_NONE = "head", "head+hidden", "none"
# Pipeline stages below the deepest that fits.
SHALLOWER = (0, 1, 2)
MAX_BLOCK_B = 128
TILE_CLASSES = (16, 32, 64, 128)
MAX_STAGES = 8
MIN_STAGES = 2
# Shared memory that the epilogue's reductions and layout changes take beside the pipeline's buffers.
EPILOGUE_BYTES = 8 * 1024
# Accumulator registers per thread beyond which every variant spills; edits need as many registers again.
MAX_ACCUMULATORS = 128
MAX_ACCUMULATORS_EDITED = 64
MAX_THREADS = 2048  # per multiprocessor
# Bytes of local memory per thread beyond which a binary is not worth a measurement.
MAX_SPILLED = 1024

# Of readers: rows and ids per tile, and warps. A thread has one group of 16 ids per tile, or two.
READ_TILES = (
    *((1, 512, 1), (2, 256, 1), (4, 128, 1), (8, 64, 1)),
    *((1, 1024, 1), (2, 512, 1), (4, 256, 1)),
    *((1, 1024, 2), (1, 2048, 4), (4, 512, 4), (16, 128, 4)),
)
READ_STAGES = (1, 2, 3)
READ_WARPS_PER_SM = (24, 32, 64)  # that the vocabulary is cut for
READ_LEAST_PARTS = (64, 128, 256)  # where rows are truncated

# Of screens: ids per tile, bytes of a row per step, warps and programs per multiprocessor, with as deep a pipeline as
# fits; and of their rescoring ids and hidden elements per step, and warps. The time of a batch is the sum of the two,
# near enough, and each is compiled by itself (``LAUNCH_AXES``): tiles are whole points here, so that their product
# stays small.
SCREEN_CLASSES = (8, 16, 32, 64)
SCREEN_TILES = (
    *((64, 256, 4, 2), (128, 256, 4, 1), (64, 128, 4, 2), (128, 128, 4, 2), (128, 128, 8, 2)),
    *((128, 256, 8, 1), (64, 256, 8, 1), (64, 512, 4, 1), (256, 128, 8, 1), (64, 256, 4, 1)),
)
SCREEN_TERMS = 2  # one leaves many more groups: slower in development trials on an H200, whose times are not kept
RESCORE_TILES = ((64, 256, 4), (64, 128, 4), (64, 64, 8), (64, 128, 8), (32, 256, 4))
MAX_RESCORE_STAGES = 4
# How a rescoring program comes by its ids: as its pipeline loads them, asked for before that, or from one list of all.
BY_PIPELINE, BY_PREFETCH, BY_LIST = "pipeline", "prefetch", "list"
EARLY = (False, True)
# Axes of launches whose times add up: what one of them is worth is known from any configuration with it.
LAUNCH_AXES = {SCREENED: (("tile",), ("rescore", "ids", "early"))}

# What is tried first, per tile class: ids per tile, hidden elements per step, warps, programs per multiprocessor. What
# has been best on an H200.
FIRST_TILES = {
    16: ((64, 256, 4, 1), (128, 128, 4, 1), (64, 128, 4, 2), (128, 128, 8, 1), (128, 256, 4, 1), (64, 128, 4, 1)),
    32: ((128, 128, 4, 1), (128, 128, 8, 1), (64, 128, 4, 1), (128, 64, 4, 2), (64, 128, 4, 2)),
    64: ((128, 128, 4, 1), (256, 64, 8, 1), (128, 128, 8, 1), (128, 64, 4, 1), (128, 64, 4, 2), (64, 128, 4, 2)),
    128: ((128, 64, 8, 1), (64, 128, 8, 1), (128, 128, 8, 1), (256, 64, 8, 1)),
}
# Of a screen, each launch with the first of the other: by how rescoring programs come by their ids, by their tiles, by
# the screen's tiles.
FIRST_WAYS = ((BY_PIPELINE, False), (BY_LIST, True), (BY_PREFETCH, False), (BY_LIST, False))
FIRST_READERS = ((1, 1024, 1), (1, 512, 1), (2, 512, 1), (1, 1024, 2))


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Problem:
    """What decides which configurations can run: bytes of a weight element, D, and of the device the shared memory of
    a program in bytes, and whether it has tensor descriptors. chunk: groups of ids per rescoring program, so that each
    multiprocessor has one."""

    hidden: int
    itemsize: int
    shared_memory: int
    tma: bool
    chunk: int


@dataclasses.dataclass(frozen=True)
class Space:
    """One study's space. path: fused, logits or screened. block_b: the tile class, 0 for logits."""

    problem: Problem
    path: str
    block_b: int
    truncates: bool
    edits: bool

    @functools.cached_property
    def axes(self) -> dict[str, tuple[Any, ...]]:
        if self.path == LOGITS:
            least = READ_LEAST_PARTS if self.truncates else (1,)
            # A cut into more programs than are resident is moot where there are many parts anyway.
            warps = READ_WARPS_PER_SM[:1] if self.truncates else READ_WARPS_PER_SM
            tiles = tuple("x".join(map(str, tile)) for tile in READ_TILES)
            axes: dict[str, tuple[Any, ...]] = {"tile": tiles, "stages": READ_STAGES, "warps_per_sm": warps}
            return axes | {"least_parts": least, "one_launch": self._one_launch(True)}
        if self.path == SCREENED:
            return {
                "tile": tuple("x".join(map(str, tile)) for tile in SCREEN_TILES),
                "rescore": tuple("x".join(map(str, tile)) for tile in RESCORE_TILES),
                "ids": (BY_PIPELINE, BY_PREFETCH, BY_LIST),
                "early": EARLY,
            }
        deepest = next_power_of_2(self.problem.hidden)
        return {
            "block_v": BLOCK_V,
            "block_d": tuple(d for d in BLOCK_D if d <= deepest) or (max(16, deepest),),
            "num_warps": NUM_WARPS,
            "ctas_per_sm": CTAS_PER_SM,
            "shallower": SHALLOWER,
            "flatten": FLATTEN,
            "descriptors": (BY_BOTH, BY_HEAD) if self.problem.tma else (BY_NONE,),
            "rows_first": (True, False) if self.block_b >= LEAST_ROWS_FIRST else (False,),
            "one_launch": self._one_launch(self.block_b <= MOST_ROWS_ONE_LAUNCH),
        }

    def _one_launch(self, possible: bool) -> tuple[bool, ...]:
        return (True, False) if possible and not self.truncates else (False,)

    def config(self, point: dict[str, Any]) -> Config | None:
        """The configuration at a point of the axes; None where it cannot run."""
        if self.path == LOGITS:
            block_b, block_v, num_warps = map(int, point["tile"].split("x"))
            ctas = max(1, point["warps_per_sm"] // num_warps)
            one = point["one_launch"]
            return ReadConfig(block_b, block_v, num_warps, point["stages"], ctas, point["least_parts"], one_launch=one)
        if self.path == SCREENED:
            return self._screen(point)
        point = dict(point)
        stages = self.deepest(point["block_v"], point["block_d"], point["ctas_per_sm"]) - point.pop("shallower")
        if stages < MIN_STAGES:
            return None
        descriptors = point.pop("descriptors")
        point |= {"tma": descriptors != BY_NONE, "hidden_tma": descriptors == BY_BOTH}
        point["reduce_rows"] = self.block_b if point["one_launch"] else 1
        tile = TileConfig(self.block_b, stages=stages, **point)
        return tile if self.problem_of(tile) is None else None

    def _screen(self, point: dict[str, Any]) -> ScreenConfig | None:
        block_v, block_d, num_warps, ctas = map(int, point["tile"].split("x"))
        rescore_v, rescore_d, rescore_warps = map(int, point["rescore"].split("x"))
        widest = next_power_of_2(self.problem.hidden)
        block_d, rescore_d = min(block_d, max(32, widest)), min(rescore_d, max(16, widest))
        stages, rescore_stages = self.screen_stages(block_v, block_d, ctas, SCREEN_TERMS, rescore_v, rescore_d)
        if min(stages, rescore_stages) < MIN_STAGES:
            return None
        screen = ScreenConfig(
            self.block_b,
            block_v,
            block_d,
            num_warps,
            stages,
            ctas_per_sm=ctas,
            tma=self.problem.tma,
            terms=SCREEN_TERMS,
            chunk=self.problem.chunk,
            rescore_v=rescore_v,
            rescore_d=rescore_d,
            rescore_warps=rescore_warps,
            rescore_stages=rescore_stages,
            prefetch=point["ids"] == BY_PREFETCH,
            listed=point["ids"] == BY_LIST,
            early=point["early"],
        )
        return screen if self.problem_of(screen) is None else None

    def screen_stages(
        self, block_v: int, block_d: int, ctas_per_sm: int, terms: int, rescore_v: int, rescore_d: int
    ) -> tuple[int, int]:
        """Stages of the deepest pipelines that fit: of the screen, whose elements are bytes, and of the rescoring."""
        shared = self.problem.shared_memory
        step = (block_v + self.block_b * terms) * block_d
        rescored = (rescore_v + max(LEAST_RESCORED, self.block_b)) * rescore_d * self.problem.itemsize
        screening = (shared // ctas_per_sm - EPILOGUE_BYTES) // step
        return min(MAX_STAGES, screening), min(MAX_RESCORE_STAGES, (shared - EPILOGUE_BYTES) // rescored)

    def deepest(self, block_v: int, block_d: int, ctas_per_sm: int) -> int:
        """Stages of the deepest pipeline that fits, ``MAX_STAGES`` or fewer."""
        bytes_left = self.problem.shared_memory // ctas_per_sm - EPILOGUE_BYTES
        return min(MAX_STAGES, bytes_left // ((block_v + self.block_b) * block_d * self.problem.itemsize))

    def problem_of(self, config: Config) -> str | None:
        """Why ``config`` cannot run, or only badly; None where arithmetic has nothing against it."""
        if isinstance(config, ReadConfig):
            return None
        if isinstance(config, ScreenConfig):
            return self._problem_of_screen(config)
        if config.stages > self.deepest(config.block_v, config.block_d, config.ctas_per_sm):
            return "shared_memory"
        threads = config.num_warps * 32
        most = MAX_ACCUMULATORS_EDITED if self.edits else MAX_ACCUMULATORS
        if config.block_v * config.block_b > most * threads:
            return "registers"
        if threads * config.ctas_per_sm > MAX_THREADS:
            return "threads"
        return "no tensor descriptors" if config.tma and not self.problem.tma else None

    def _problem_of_screen(self, screen: ScreenConfig) -> str | None:
        stages, rescore_stages = self.screen_stages(
            screen.block_v, screen.block_d, screen.ctas_per_sm, screen.terms, screen.rescore_v, screen.rescore_d
        )
        if screen.stages > stages or screen.rescore_stages > rescore_stages:
            return "shared_memory"
        # Two bounds of each logit are as many registers as a logit and its edits.
        if screen.block_v * screen.block_b * screen.terms > MAX_ACCUMULATORS_EDITED * screen.num_warps * 32:
            return "registers"
        return "no tensor descriptors" if screen.tma and not self.problem.tma else None

    @functools.cached_property
    def points(self) -> dict[Config, dict[str, Any]]:
        """Every configuration, in a fixed order, and its point of the axes."""
        found: dict[Config, dict[str, Any]] = {}
        for values in itertools.product(*self.axes.values()):
            point = dict(zip(self.axes, values, strict=True))
            config = self.config(point)
            if config is not None:
                found.setdefault(config, point)
        return found

    def launches(self, config: Config) -> tuple[tuple[Any, ...], ...] | None:
        """What each of the launches is whose times add up; None where they do not, and outside the space."""
        point = self.points.get(config)
        if point is None or self.path not in LAUNCH_AXES:
            return None
        return tuple(tuple(point[name] for name in names) for names in LAUNCH_AXES[self.path])

    def of_launches(self, launches: tuple[tuple[Any, ...], ...]) -> Config | None:
        """The configuration of such launches; None where it cannot run."""
        point: dict[str, Any] = {}
        for names, values in zip(LAUNCH_AXES[self.path], launches, strict=True):
            point |= dict(zip(names, values, strict=True))
        return self.config(point)

    def neighbours(self, config: Config) -> list[Config]:
        """Those of the space that are one step away on one axis."""
        point = self.points.get(config)
        if point is None:
            return []
        found: dict[Config, None] = {}
        for name, choices in self.axes.items():
            place = choices.index(point[name])
            for other in (place - 1, place + 1):
                if 0 <= other < len(choices):
                    near = self.config({**point, name: choices[other]})
                    if near is not None and near != config:
                        found[near] = None
        return list(found)

    def first(self) -> list[Config]:
        """What is tried first, as far as it can run: what has been good elsewhere."""
        points: list[dict[str, Any]] = []
        if self.path == LOGITS:
            least, one = self.axes["least_parts"][0], self.axes["one_launch"][0]
            for tile, warps in itertools.product(FIRST_READERS, self.axes["warps_per_sm"]):
                point = {"tile": "x".join(map(str, tile)), "stages": 1, "warps_per_sm": warps}
                points.append(point | {"least_parts": least, "one_launch": one})
        if self.path == SCREENED:
            tiles, rescores = self.axes["tile"], self.axes["rescore"]
            ways = [{"ids": ids, "early": early} for ids, early in FIRST_WAYS]
            usual = {name: choices[0] for name, choices in self.axes.items()} | ways[0]
            points += [usual | way for way in ways[:2]]
            points += [usual | {"rescore": rescore} for rescore in rescores[1:]]
            points += [usual | {"tile": tile} for tile in tiles[1:]]
            points += [usual | way for way in ways[2:]]
        # Edits run out of registers beside descriptors for the hidden states; few rows do not need them.
        by_head_first = self.edits or self.block_b <= MOST_ROWS_ONE_LAUNCH
        first_tiles = FIRST_TILES.get(self.block_b, ()) if self.path == FUSED else ()
        for descriptors in sorted(self.axes.get("descriptors", ()), reverse=not by_head_first):
            for block_v, block_d, num_warps, ctas in first_tiles:
                point = {"block_v": block_v, "block_d": block_d, "num_warps": num_warps, "ctas_per_sm": ctas}
                point |= {"shallower": 0, "flatten": True, "descriptors": descriptors}
                points.append(point | {name: self.axes[name][0] for name in ("rows_first", "one_launch")})
        found = [self.config(point) for point in points if all(v in self.axes[n] for n, v in point.items())]
        return list(dict.fromkeys(config for config in found if config is not None))


def space_hash(path: str) -> str:
    """The declared space of ``path``, as "sha256:...": a table says which one it was searched in."""
    declared: dict[str, list[Any]] = {
        LOGITS: [READ_TILES, READ_STAGES, READ_WARPS_PER_SM, READ_LEAST_PARTS, "one_launch"],
        FUSED: [
            *(BLOCK_V, BLOCK_D, NUM_WARPS, CTAS_PER_SM, FLATTEN, SHALLOWER, MAX_STAGES, TILE_CLASSES),
            *(BY_HEAD, BY_BOTH, BY_NONE, LEAST_ROWS_FIRST, MOST_ROWS_ONE_LAUNCH),
        ],
        SCREENED: [
            *(SCREEN_CLASSES, SCREEN_TILES, SCREEN_TERMS, RESCORE_TILES, "a chunk per multiprocessor", EARLY),
            *(BY_PIPELINE, BY_PREFETCH, BY_LIST, MAX_STAGES, MAX_RESCORE_STAGES),
        ],
    }
    return f"sha256:{hashlib.sha256(json.dumps(declared[path]).encode()).hexdigest()}"


def shared_bytes(config: Config, itemsize: int) -> int:
    """Shared memory of the pipeline of one program, about; of several launches the largest."""
    return 0 if isinstance(config, ReadConfig) else buffer_bytes(config, itemsize)


def block_b_choices(num_rows: int, edits: bool = False) -> list[int]:
    """Tile classes for a batch: the one that holds all of it and, beyond 32 rows, half of it. With edits, whose
    epilogue runs out of registers first, also a half of 32 rows and a quarter."""
    whole = min(MAX_BLOCK_B, max(16, next_power_of_2(num_rows)))
    most = 3 if edits else 2 if whole > 32 else 1
    return [block_b for block_b in (whole, whole // 2, whole // 4)[:most] if block_b >= 16]


def screen_classes(num_rows: int) -> list[int]:
    """As ``block_b_choices``, of a screen: the class that holds the batch and, beyond 32 rows, half of it."""
    whole = min(SCREEN_CLASSES[-1], max(SCREEN_CLASSES[0], next_power_of_2(num_rows)))
    return [whole, whole // 2] if whole > 32 else [whole]
