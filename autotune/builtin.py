"""The built-in tables (``tuned.py``) by the name of a device's family: what a tuned table has to beat. Needs no GPU."""

from __future__ import annotations

from .. import tuned
from ..kernels.tiles import ReadConfig, ScreenConfig, TileConfig
from ..work import Config, Path, Work


def family_of(cc: str) -> str | None:
    """cc: compute capability, "9.0"."""
    return tuned.FAMILIES.get(int(cc.split(".")[0]))


def default_of(family: str, itemsize: int, hidden_size: int, num_rows: int, work: Work) -> Config:
    """What a batch takes without a tuned table."""
    path = tuned.path_in(family, itemsize, hidden_size, num_rows, work)
    if path is Path.SCREENED:
        return tuned.screen_in(family, itemsize, num_rows, work)
    return tuned.tile_in(family, itemsize, num_rows, work) if path is Path.FUSED else tuned.reader_in(num_rows, work)


def tiles_of(family: str, itemsize: int) -> list[TileConfig]:
    """Every tile of the family, whatever it is for: places to start."""
    found: dict[TileConfig, None] = {tile: None for _, tile in tuned.TABLE.get((family, itemsize), ())}
    for (other, size, _), entries in tuned.WORK_TABLE.items():
        if (other, size) == (family, itemsize):
            found |= {tile: None for _, tile in entries}
    return list(found)


def readers_of() -> list[ReadConfig]:
    return list(dict.fromkeys(config for entries in tuned.READS.values() for _, config in entries))


def screens_of(family: str, itemsize: int) -> list[ScreenConfig]:
    """As ``tiles_of``, of the screened path."""
    found: dict[ScreenConfig, None] = {}
    for (other, size, _), entries in tuned.SCREENS.items():
        if (other, size) == (family, itemsize):
            found |= {screen: None for _, screen in entries}
    return list(found)


def kernels_of(work: Work, config: Config) -> Work:
    """Greedy batches have the kernels of plain ones; batches with a screen have them on every path but the screened
    one."""
    return work.launched(config) if isinstance(config, ScreenConfig) else work.kernels
