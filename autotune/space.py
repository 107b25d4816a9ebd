"""The launch spaces of ``lm_head_sample``, ``sample_logits`` and ``screened_sample``: the configurations worth a trial,
declared once, without those that cannot run.

A ``Space`` is one path, one kind of batch and, except on the logits path, one tile class (rows of the batch per tile):
what one study searches. An axis maps each of its values, which Optuna sees, to the fields of the configuration that it
sets; what follows from several axes is derived in ``Space.config``. To add a knob, add an axis.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from typing import Any

from ..kernels.config import LIMBS, MIN_BLOCK_D, ReadConfig, ScreenConfig, TileConfig, next_power_of_2
from ..kinds import CONFIGS, BatchKind, Config, SamplingPath
from ..tables.lookup import stage_bytes

FUSED, LOGITS, SCREENED = SamplingPath.FUSED, SamplingPath.LOGITS, SamplingPath.SCREENED

Fields = dict[str, int | bool]
Axis = dict[Any, Fields]
Launches = tuple[tuple[Any, ...], ...]  # values of the axes of each launch of a configuration


def _numbers(name: str, *values: int | bool) -> Axis:
    """An axis of one field."""
    return {value: {name: value} for value in values}


def _tiles(names: str, *tiles: tuple[int, ...]) -> Axis:
    """An axis whose values are whole tiles: "64x256x4"."""
    return {"x".join(map(str, tile)): dict(zip(names.split(), tile, strict=True)) for tile in tiles}


# Axes of the fused path. shallower: pipeline stages below the deepest that fits. descriptors: the tensors that are
# loaded through tensor descriptors, where the device has them.
FUSED_AXES: dict[str, Axis] = {
    "block_v": _numbers("block_v", 64, 128, 256),
    "block_d": _numbers("block_d", 64, 128, 256),
    "num_warps": _numbers("num_warps", 4, 8),
    "ctas_per_sm": _numbers("ctas_per_sm", 1, 2),
    "shallower": _numbers("shallower", 0, 1, 2),
    "flatten": _numbers("flatten", True, False),
    "descriptors": {
        "head+hidden": {"tma": True, "hidden_tma": True},
        "head": {"tma": True},
        "none": {"tma": False},
    },
    "rows_first": _numbers("rows_first", True, False),
    "one_launch": _numbers("one_launch", True, False),
}
# Axes of readers. A thread has one group of 16 ids per tile, or two. warps_per_sm: the vocabulary is cut for so many.
# min_splits: for truncated rows.
LOGITS_AXES: dict[str, Axis] = {
    "tile": _tiles(
        "block_b block_v num_warps",
        *((1, 512, 1), (2, 256, 1), (4, 128, 1), (8, 64, 1)),
        *((1, 1024, 1), (2, 512, 1), (4, 256, 1)),
        *((1, 1024, 2), (1, 2048, 4), (4, 512, 4), (16, 128, 4)),
    ),
    "stages": _numbers("stages", 1, 2, 3),
    "warps_per_sm": _numbers("warps_per_sm", 24, 32, 64),
    "min_splits": _numbers("min_splits", 64, 128, 256),
    "one_launch": _numbers("one_launch", True, False),
}
# Axes of screens and of their rescoring, with pipelines as deep as fits. ids: a rescoring program loads them in its
# pipeline, prefetches them, or reads one list of all. The time of a batch is nearly the sum of the two launches, and
# each is compiled by itself (``LAUNCH_AXES``): tiles are whole points here, so that their product stays small.
SCREENED_AXES: dict[str, Axis] = {
    "tile": _tiles(
        "block_v block_d num_warps ctas_per_sm",
        *((64, 256, 4, 2), (128, 256, 4, 1), (64, 128, 4, 2), (128, 128, 4, 2), (128, 128, 8, 2)),
        *((128, 256, 8, 1), (64, 256, 8, 1), (64, 512, 4, 1), (256, 128, 8, 1), (64, 256, 4, 1)),
    ),
    "rescore": _tiles(
        "rescore_v rescore_d rescore_warps",
        *((64, 256, 4), (64, 128, 4), (64, 64, 8), (64, 128, 8), (32, 256, 4), (16, 512, 4), (64, 256, 8)),
        (32, 256, 8),
    )
    | _tiles("rescore_v rescore_d rescore_warps rescore_stages", (32, 512, 4, 3), (16, 512, 4, 6)),
    "ids": {
        "pipeline": {"prefetch": False},
        "prefetch": {"prefetch": True},
        "list": {"prefetch": False, "listed": True},
    },
    "early": _numbers("early", False, True),
}
AXES = {FUSED: FUSED_AXES, LOGITS: LOGITS_AXES, SCREENED: SCREENED_AXES}
# Axes of launches whose times add up: any configuration with a launch tells the time of that launch.
LAUNCH_AXES = {SCREENED: (("tile",), ("rescore", "ids", "early"))}

TILE_CLASSES = (16, 32, 64, 128)
SCREEN_CLASSES = (8, 16, 32, 64)
MAX_EDITED_CLASS = 64  # rows per tile on the fused path: the epilogue of a larger tile spills with edits
MIN_ROWS_FIRST = 64  # rows per tile that a tensor-core instruction takes as its left operand
MAX_ROWS_ONE_LAUNCH = 16  # rows per tile that one program reduces as fast as a separate launch
MIN_STAGES, MAX_STAGES, MAX_RESCORE_STAGES = 2, 8, 6
# Shared memory that the epilogue's reductions and layout changes take beside the pipeline's buffers.
EPILOGUE_BYTES = 8 * 1024
# Accumulator registers per thread beyond which every variant spills; edits need as many registers again, and so do
# weights that are converted on their way to a tensor core.
MAX_ACCUMULATORS = 128
MAX_ACCUMULATORS_EDITED = 64
# Bytes of local memory per thread beyond which a binary is not worth a measurement.
MAX_SPILLED = 1024

# First trials per tile class: ids per tile, hidden elements per step, warps, programs per multiprocessor. The first
# ones win most sizes of the shipped tables: a short study tries no others.
FIRST_TILES = {
    16: ((64, 256, 4, 1), (128, 128, 4, 1), (128, 256, 4, 1), (128, 128, 8, 1), (64, 128, 4, 2), (64, 128, 4, 1)),
    32: ((128, 128, 4, 1), (64, 128, 4, 1), (64, 128, 4, 2), (128, 64, 4, 2), (128, 128, 8, 1)),
    64: ((128, 128, 4, 1), (256, 64, 8, 1), (128, 64, 4, 2), (128, 64, 4, 1), (128, 128, 8, 1), (64, 128, 4, 2)),
    128: ((128, 64, 8, 1), (64, 128, 8, 1), (128, 128, 8, 1), (256, 64, 8, 1)),
}
# The first tiles of an E4M3 head: its weights have half the bytes, so tiles are twice as long for as many bytes in
# flight. Beyond 16 rows, a tile of more ids reads the hidden states less often; at 64, a second program may multiply
# while the first one converts.
FIRST_QUANTISED_TILES = {
    16: ((64, 256, 4, 2), (128, 128, 4, 2), (128, 256, 8, 1), (256, 128, 8, 1), (64, 128, 4, 2)),
    32: ((64, 256, 4, 2), (128, 256, 8, 1), (128, 128, 8, 1), (128, 128, 4, 2), (256, 128, 8, 1)),
    64: ((256, 64, 8, 1), (128, 128, 8, 1), (128, 128, 4, 2), (64, 128, 4, 2), (128, 64, 4, 2), (64, 256, 8, 1)),
    128: ((128, 64, 8, 1), (64, 128, 8, 1), (128, 128, 8, 1), (64, 64, 8, 1)),
}
FIRST_READERS = ("1x1024x1", "1x512x1", "2x512x1", "1x1024x2")
# First trials of a screen, each launch with the first of the other: by the source of the ids of rescoring programs, by
# the tiles of these, by the tiles of the screen.
FIRST_WAYS = (("pipeline", False), ("list", True), ("prefetch", False), ("list", False))


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds on the configurations that can run. hidden: D. itemsize: bytes of a weight element. shared_memory: bytes
    that a program of the device may have. tma: the device has tensor descriptors. chunk: groups of ids per rescoring
    program, so that each multiprocessor has one."""

    hidden: int
    itemsize: int
    shared_memory: int
    tma: bool
    chunk: int

    @property
    def quantised(self) -> bool:
        return self.itemsize == 1

    def deepest(self, config: TileConfig | ScreenConfig) -> TileConfig | ScreenConfig:
        """``config`` with its pipelines shortened to what fits in shared memory, to 1 stage at least."""
        shared, (first, rescoring) = self.shared_memory, stage_bytes(config, self.itemsize)
        if isinstance(config, ScreenConfig):
            stages = min(MAX_RESCORE_STAGES, config.rescore_stages, (shared - EPILOGUE_BYTES) // rescoring)
            config = dataclasses.replace(config, rescore_stages=max(1, stages))
        stages = min(config.stages, (shared // config.ctas_per_sm - EPILOGUE_BYTES) // first)
        return dataclasses.replace(config, stages=max(1, stages))


@dataclasses.dataclass(frozen=True)
class Space:
    """One study's space. path: fused, logits or screened. block_b: the tile class, 0 for logits. truncate, edit: of the
    kind of batch."""

    limits: Limits
    path: SamplingPath
    block_b: int
    truncate: bool
    edit: bool

    @functools.cached_property
    def axes(self) -> dict[str, tuple[Any, ...]]:
        """The values of each axis that such batches have."""
        axes = {name: tuple(axis) for name, axis in AXES[self.path].items()}
        if "one_launch" in axes and (self.truncate or self.block_b > MAX_ROWS_ONE_LAUNCH):
            axes["one_launch"] = (False,)
        if self.path == LOGITS:
            # A cut into more programs than are resident is moot where there are many splits anyway.
            axes["warps_per_sm"] = axes["warps_per_sm"][: 1 if self.truncate else None]
            axes["min_splits"] = axes["min_splits"] if self.truncate else (1,)
        elif self.path == FUSED:
            widest = next_power_of_2(self.limits.hidden)
            axes["block_d"] = tuple(size for size in axes["block_d"] if size <= widest) or (max(MIN_BLOCK_D, widest),)
            axes["descriptors"] = axes["descriptors"][:2] if self.limits.tma else ("none",)
            axes["rows_first"] = axes["rows_first"] if self.block_b >= MIN_ROWS_FIRST else (False,)
            if self.limits.quantised:  # as the right operand, converted weights go through shared memory once more
                axes["rows_first"] = axes["rows_first"][::-1]
        return axes

    def config(self, point: dict[str, Any]) -> Config | None:
        """The configuration at a point of the axes; None where it cannot run."""
        fields: Fields = {}
        for name, value in point.items():
            fields |= AXES[self.path][name].get(value, {name: value})
        if self.path == LOGITS:
            fields["ctas_per_sm"] = max(1, fields.pop("warps_per_sm") // fields["num_warps"])
            return ReadConfig(**fields)  # type: ignore[arg-type]
        fields |= {"block_b": self.block_b}
        if self.path == SCREENED:
            widest = next_power_of_2(self.limits.hidden)
            fields["block_d"] = min(fields["block_d"], max(32, widest))
            fields["rescore_d"] = min(fields["rescore_d"], max(16, widest))
            fields |= {"chunk": self.limits.chunk, "tma": self.limits.tma}
        elif fields["one_launch"]:
            fields["reduce_rows"] = self.block_b
        shallower = fields.pop("shallower", 0)
        config = self.limits.deepest(CONFIGS[self.path](**fields, stages=MAX_STAGES))  # type: ignore[arg-type]
        config = dataclasses.replace(config, stages=max(1, config.stages - shallower))
        return config if self.unsupported_reason(config) is None else None

    def unsupported_reason(self, config: Config) -> str | None:
        """Why ``config`` cannot run, or only slowly, by an estimate of its needs; None where it may run."""
        if isinstance(config, ReadConfig):
            return None
        threads = config.num_warps * 32
        accumulators, few = config.block_v * config.block_b, self.edit or self.limits.quantised
        most = MAX_ACCUMULATORS_EDITED if few else MAX_ACCUMULATORS
        stages = config.stages
        if isinstance(config, ScreenConfig):
            # Two bounds of each logit are as many registers as a logit and its edits.
            accumulators, most = accumulators * LIMBS, MAX_ACCUMULATORS_EDITED
            stages = min(stages, config.rescore_stages)
        if stages < MIN_STAGES or self.limits.deepest(config) != config:
            return "shared_memory"
        return "registers" if accumulators > most * threads else None

    @property
    def points(self) -> dict[Config, dict[str, Any]]:
        """Every configuration, in a fixed order, and its point of the axes."""
        return _points(self)

    def launches(self, config: Config) -> Launches | None:
        """The axis values of each launch, on a path whose launches' times add up. None on other paths, and for a
        configuration outside the space."""
        point = self.points.get(config)
        if point is None or self.path not in LAUNCH_AXES:
            return None
        return tuple(tuple(point[name] for name in names) for names in LAUNCH_AXES[self.path])

    def of_launches(self, launches: Launches) -> Config | None:
        """The configuration of such launches; None where it cannot run."""
        axes = LAUNCH_AXES[self.path]
        pairs = (zip(names, values, strict=True) for names, values in zip(axes, launches, strict=True))
        return self.config(dict(itertools.chain(*pairs)))

    def neighbours(self, config: Config) -> list[Config]:
        """The configurations of the space that are one step away on one axis."""
        point = self.points.get(config)
        if point is None:
            return []
        near: dict[Config, None] = {}
        for name, values in self.axes.items():
            place = values.index(point[name])
            for other in (place - 1, place + 1):
                if 0 <= other < len(values):
                    neighbour = self.config({**point, name: values[other]})
                    if neighbour is not None and neighbour != config:
                        near[neighbour] = None
        return list(near)

    def first(self) -> list[Config]:
        """The first trials, as far as they can run."""
        usual = {name: values[0] for name, values in self.axes.items()}
        changes: list[dict[str, Any]] = []
        if self.path == LOGITS:
            pairs = itertools.product(FIRST_READERS, self.axes["warps_per_sm"])
            changes += [{"tile": tile, "warps_per_sm": warps} for tile, warps in pairs]
        elif self.path == SCREENED:
            ways = [{"ids": ids, "early": early} for ids, early in FIRST_WAYS]
            tiles = [{name: value} for name in ("rescore", "tile") for value in self.axes[name][1:]]
            changes += [*ways[:2], *tiles, *ways[2:]]
        else:
            # Edits run out of registers beside descriptors for the hidden states; few rows do not need them.
            by_head_first = self.edit or self.block_b <= MAX_ROWS_ONE_LAUNCH
            names = ("block_v", "block_d", "num_warps", "ctas_per_sm")
            for descriptors in sorted(self.axes["descriptors"], reverse=not by_head_first):
                best = FIRST_QUANTISED_TILES if self.limits.quantised else FIRST_TILES
                tiles = [dict(zip(names, tile, strict=True)) for tile in best.get(self.block_b, ())]
                changes += [{**tile, "descriptors": descriptors} for tile in tiles]
        points = [usual | change for change in changes]
        configs = [self.config(point) for point in points if all(v in self.axes[n] for n, v in point.items())]
        return list(dict.fromkeys(config for config in configs if config is not None))


@functools.lru_cache(maxsize=256)
def _points(space: Space) -> dict[Config, dict[str, Any]]:
    points: dict[Config, dict[str, Any]] = {}
    for values in itertools.product(*space.axes.values()):
        point = dict(zip(space.axes, values, strict=True))
        config = space.config(point)
        if config is not None:
            points.setdefault(config, point)
    return points


def space_hash(path: str) -> str:
    """Hash of the declared space of ``path``, as "sha256:...": a table names the space that it was searched in."""
    rules = [TILE_CLASSES, SCREEN_CLASSES, MIN_ROWS_FIRST, MAX_ROWS_ONE_LAUNCH, MAX_STAGES, MAX_RESCORE_STAGES]
    axes = {name: list(axis.items()) for name, axis in AXES[SamplingPath(path)].items()}
    return f"sha256:{hashlib.sha256(json.dumps([axes, rules]).encode()).hexdigest()}"


def tile_classes(path: SamplingPath, num_rows: int, kind: BatchKind) -> list[int]:
    """Tile classes of ``path`` that may serve a batch: the one that holds all of it and, beyond 32 rows, half of it. On
    the fused path with edits, whose epilogue runs out of registers first, also a half of 32 rows and a quarter. 0 on
    the logits path, whose tiles are axes."""
    if path == LOGITS:
        return [0]
    classes, edited = SCREEN_CLASSES if path == SCREENED else TILE_CLASSES, path == FUSED and kind.edit
    whole = min(classes[-1], max(classes[0], next_power_of_2(num_rows)))
    count, largest = (3, MAX_EDITED_CLASS) if edited else (2 if whole > 32 else 1, whole)
    return [block_b for block_b in (whole, whole // 2, whole // 4)[:count] if classes[0] <= block_b <= largest]
