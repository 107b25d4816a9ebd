"""The built-in tables (``tuned.py``) by the name of a device's family: what a tuned table has to beat. Needs no GPU."""

from __future__ import annotations

from .. import tuned
from ..kernels.tiles import ReadConfig, TileConfig
from ..work import Config, Path, Work


def family_of(cc: str) -> str | None:
    """cc: compute capability, "9.0"."""
    return tuned.FAMILIES.get(int(cc.split(".")[0]))


def default_of(family: str, itemsize: int, num_rows: int, work: Work) -> Config:
    """What a batch takes without a tuned table."""
    if tuned.path_in(family, itemsize, num_rows, work) is Path.FUSED:
        return tuned.tile_in(family, itemsize, num_rows, work)
    return tuned.reader_in(num_rows, work)


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
