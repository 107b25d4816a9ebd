"""Names of configurations: short, readable, the same in tables, logs and surfaces."""

from __future__ import annotations

from ..kernels.tiles import ReadConfig, TileConfig
from ..work import Config, path_of_config

GEMM = "gemm"  # the vendor's alone, which draws no token


def path_of(config: Config) -> str:
    return path_of_config(config).value


def key_of(config: Config) -> str:
    """The configuration's key in a table, unique among all configurations."""
    if isinstance(config, ReadConfig):
        key = f"logits-{config.block_b}x{config.block_v}-w{config.num_warps}-s{config.stages}-c{config.ctas_per_sm}"
        return f"{key}-p{config.least_parts}" + _reduction(config)
    return _tile_key(config)


def _tile_key(tile: TileConfig) -> str:
    key = f"fused-{tile.block_b}x{tile.block_v}x{tile.block_d}-w{tile.num_warps}-s{tile.stages}-c{tile.ctas_per_sm}"
    key += "" if tile.flatten else "-nested"
    key += "" if tile.tma else "-pointers"
    key += "-hidden" if tile.hidden_tma else ""
    key += "-rows" if tile.rows_first else ""
    return key + _reduction(tile)


def _reduction(config: Config) -> str:
    return (f"-r{config.reduce_rows}" if config.reduce_rows > 1 else "") + ("-one" if config.one_launch else "")


def label_of(config: Config, work: str) -> str:
    """The configuration with what it is to do."""
    return f"{work}/{key_of(config)}"
