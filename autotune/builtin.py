"""The built-in tables (``tuned.py``) by the name of a device's family: what a tuned table has to beat. Needs no GPU."""

from __future__ import annotations

from .. import tuned
from ..work import Work
from .space import Config, ReadConfig, TileConfig


def family_of(cc: str) -> str | None:
    """cc: compute capability, "9.0"."""
    return tuned.FAMILIES.get(int(cc.split(".")[0]))


def tile_of(family: str, itemsize: int, num_rows: int, work: Work) -> TileConfig:
    own = tuned.WORK_TABLE.get((family, itemsize, work))
    entries = own or tuned.WORK_TABLE.get((family, itemsize, kernels_of(work))) or tuned.TABLE[family, itemsize]
    return next((tile for largest, tile in entries if num_rows <= largest), entries[-1][1])


def reader_of(num_rows: int, work: Work) -> ReadConfig:
    entries = tuned.READS.get(work) or tuned.READS[kernels_of(work)]
    return next((config for largest, config in entries if num_rows <= largest), entries[-1][1])


def default_of(family: str, itemsize: int, num_rows: int, work: Work) -> Config:
    """What a batch takes without a tuned table."""
    most = tuned.PATHS.get((family, itemsize, work)) or tuned.PATHS.get((family, itemsize, kernels_of(work)))
    fused = num_rows <= (most or tuned.FUSED_ROWS)
    return tile_of(family, itemsize, num_rows, work) if fused else reader_of(num_rows, work)


def tiles_of(family: str, itemsize: int) -> list[TileConfig]:
    """Every tile of the family, whatever it is for: places to start."""
    found: dict[TileConfig, None] = {tile: None for _, tile in tuned.TABLE.get((family, itemsize), ())}
    for (other, size, _), entries in tuned.WORK_TABLE.items():
        if (other, size) == (family, itemsize):
            found |= {tile: None for _, tile in entries}
    return list(found)


def readers_of() -> list[ReadConfig]:
    return list(dict.fromkeys(config for entries in tuned.READS.values() for _, config in entries))


def kernels_of(work: Work) -> Work:
    """Greedy batches have the kernels of plain ones."""
    return work.fallback or work
