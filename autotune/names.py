"""Names of configurations: short, readable, the same in tables, logs and surfaces."""

from __future__ import annotations

import dataclasses

from ..kernels.tiles import ReadConfig, ScreenConfig, TileConfig
from ..work import Config, path_of_config

GEMM = "gemm"  # the vendor's alone, which draws no token


def path_of(config: Config) -> str:
    return path_of_config(config).value


def key_of(config: Config) -> str:
    """The configuration's key in a table, unique among all configurations."""
    if isinstance(config, ReadConfig):
        key = f"logits-{config.block_b}x{config.block_v}-w{config.num_warps}-s{config.stages}-c{config.ctas_per_sm}"
        return f"{key}-p{config.least_parts}" + _reduction(config)
    return _screen_key(config) if isinstance(config, ScreenConfig) else _tile_key(config)


def _tile_key(tile: TileConfig) -> str:
    key = f"fused-{tile.block_b}x{tile.block_v}x{tile.block_d}-w{tile.num_warps}-s{tile.stages}-c{tile.ctas_per_sm}"
    key += "" if tile.flatten else "-nested"
    key += "" if tile.tma else "-pointers"
    key += "-hidden" if tile.hidden_tma else ""
    key += "-rows" if tile.rows_first else ""
    return key + _reduction(tile)


# What of a screen's configuration its key says in its own way; every other field is said where it is not as usual.
_SAID = {"block_b", "block_v", "block_d", "num_warps", "stages", "ctas_per_sm", "flatten", "tma", "terms", "chunk"}
_SAID |= {"rescore_v", "rescore_d", "rescore_warps", "rescore_stages", "prefetch", "listed", "early"}


def _screen_key(screen: ScreenConfig) -> str:
    key = f"screened-{screen.block_b}x{screen.block_v}x{screen.block_d}-w{screen.num_warps}-s{screen.stages}"
    key += f"-c{screen.ctas_per_sm}-t{screen.terms}"
    key += "" if screen.flatten else "-nested"
    key += "" if screen.tma else "-pointers"
    key += f"-then-{screen.chunk}x{screen.rescore_v}x{screen.rescore_d}-w{screen.rescore_warps}"
    key += f"-s{screen.rescore_stages}"
    key += "".join(f"-{name}" for name in ("prefetch", "listed", "early") if getattr(screen, name))
    rest = [field for field in dataclasses.fields(screen) if field.name not in _SAID]
    unusual = [field.name for field in rest if getattr(screen, field.name) != field.default]
    return key + "".join(f"-{name}{getattr(screen, name)}" for name in unusual)


def _reduction(config: TileConfig | ReadConfig) -> str:
    return (f"-r{config.reduce_rows}" if config.reduce_rows > 1 else "") + ("-one" if config.one_launch else "")


def label_of(config: Config, work: str) -> str:
    """The configuration with what it is to do."""
    return f"{work}/{key_of(config)}"


def path_of_key(key: str) -> str:
    """fused, logits or screened, of a key in a table."""
    return key.split("-")[0]
