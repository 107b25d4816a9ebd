"""Which tuned table serves a device and a head: where tables are looked for, and how well one has to match.

A table that cannot be used is a miss with one line that says why, never an error. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from .bounded_json import BoundedError, shorten
from .files import read_plain
from .kernels.tiles import MOST_FLAGS, ScreenConfig, TileConfig
from .sources import installed_sources
from .table import MAX_BYTES, Bucket, Choice, Device, HeadShape, Table, TableError, file_name
from .table_entries import ITEMSIZE
from .work import Work

FILE_VARIABLE = "FLASHSAMPLE_TUNED"
FOLDERS_VARIABLE = "FLASHSAMPLE_TUNED_DIR"
FAMILY_VARIABLE = "FLASHSAMPLE_ALLOW_FAMILY"
SHIPPED = Path(__file__).parent / "tables"
MOST_FILES = 1000  # of a folder that are looked at for tables of the same family
# Versions of which another minor release may compile or multiply otherwise.
COMPARED = ("triton", "torch", "cuda")
LEAST_RESCORED = 16  # rows of the batch in a rescoring program: what a tensor-core instruction takes
TILE_CLASSES = (16, 32, 64)  # rows of the largest batches that share a block size; larger batches are the last class


class Match(enum.StrEnum):
    """How well a table fits, best first."""

    EXACT = "exact"
    COMPATIBLE = "compatible"  # a patch release or a driver differs
    STALE = "stale"  # kernels or a minor release differ: its times may be off
    FAMILY = "family"  # another GPU of the same compute capability


USED_AS_FOUND = (Match.EXACT, Match.COMPATIBLE)


@dataclasses.dataclass(frozen=True)
class Target:
    """What a table is wanted for. env, src: versions and, per path, kernels that are installed (``Table.env``,
    ``sources_hash``)."""

    device: Device
    head: HeadShape
    env: dict[str, str]
    src: dict[str, str] = dataclasses.field(default_factory=installed_sources)


@dataclasses.dataclass(frozen=True)
class Found:
    """A table and where it was. source: which place of the lookup order that is. differs: why not ``Match.EXACT``."""

    table: Table
    file: str
    source: str
    match: Match
    differs: tuple[str, ...] = ()


def load_table(file: str | os.PathLike[str]) -> tuple[Table | None, str | None]:
    """The table in ``file``; or None and, in one line, why not. Raises nothing, and waits for nothing: what is not a
    plain file of at most ``table.MAX_BYTES`` bytes is not read."""
    try:
        return Table.loads(read_plain(file, MAX_BYTES)), None
    except (BoundedError, TableError) as error:
        return None, str(error)
    except Exception as error:  # whatever else a file may do to its reader, the server must start
        return None, shorten(f"{type(error).__name__}: {error}")


def match(table: Table, target: Target) -> tuple[Match | None, tuple[str, ...]]:
    """How ``table`` fits ``target``, and what differs; None where it must not be used."""
    if table.head != target.head:
        return None, (f"it is for {_head(table.head)}, not {_head(target.head)}",)
    theirs, ours = table.device, target.device
    if theirs.cc != ours.cc:
        return None, (f"it is for {theirs.name}, not {ours.name}",)
    if (theirs.name, theirs.sms) != (ours.name, ours.sms):
        return Match.FAMILY, (f"it is for {theirs.name} ({theirs.sms} SMs), not {ours.name} ({ours.sms} SMs)",)
    stale = [
        f"{name} is {target.env.get(name, 'unknown')}, it was {table.env.get(name, 'unknown')}"
        for name in COMPARED
        if _minor(table.env.get(name)) != _minor(target.env.get(name))
    ]
    paths = sorted({choice.path for choice in table.configs.values() if choice.launch is not None})
    if any(table.kernels.get(path, {}).get("src") != target.src.get(path) for path in paths):
        stale.append("the kernels have changed since")
    if stale:
        return Match.STALE, tuple(stale)
    differs = tuple(
        f"{name} is {target.env.get(name, 'unknown')}, it was {table.env.get(name, 'unknown')}"
        for name in (*COMPARED, "driver")
        if table.env.get(name) != target.env.get(name)
    )
    return (Match.COMPATIBLE if differs else Match.EXACT), differs


def _head(head: HeadShape) -> str:
    softcap = " with softcap" if head.softcap else ""
    return f"{head.vocab} x {head.hidden} {head.dtype} tp {head.tp}{softcap}"


def _minor(version: str | None) -> str:
    """ "2.11.0+cu130" -> "2.11"."""
    return ".".join((version or "").partition("+")[0].split(".")[:2])


def config_problem(choice: Choice, device: Device, dtype: str, work: Work) -> str | None:
    """Why this configuration cannot run on ``device`` whatever the compiler does; None where it may."""
    launch = choice.launch
    if launch is None:
        return f"this release has no path {choice.path!r}"
    if work.truncates and launch.block_b > MOST_FLAGS:
        return f"block_b is {launch.block_b}; expected {MOST_FLAGS} or fewer with a truncation"
    if isinstance(launch, ScreenConfig) and not work.screened:
        return f"it is for batches with a screen; expected another path for {work}"
    if isinstance(launch, TileConfig | ScreenConfig):
        if launch.tma and float(device.cc) < 9.0:
            return f"tma is on; expected it off for compute capability {device.cc}"
        buffers = buffer_bytes(launch, ITEMSIZE[dtype])
        if 0 < device.smem_optin < buffers:
            return f"its buffers take {buffers} bytes of shared memory; {device.smem_optin} are there"
    return None


def buffer_bytes(launch: TileConfig | ScreenConfig, itemsize: int) -> int:
    """Shared memory of the pipeline of one program, of the launch that has the larger one. itemsize: bytes per element
    of the head."""
    if isinstance(launch, TileConfig):
        return launch.stages * (launch.block_v + launch.block_b) * launch.block_d * itemsize
    screening = launch.stages * (launch.block_v + launch.block_b * launch.terms) * launch.block_d
    rescored = (launch.rescore_v + max(LEAST_RESCORED, launch.block_b)) * launch.rescore_d
    return max(screening, launch.rescore_stages * rescored * itemsize)


def bucket_for(buckets: Mapping[int, Bucket], batch: int) -> int | None:
    """The bucket that serves ``batch`` rows: the next one that is not smaller, within the same tile class and not more
    than twice as large; None: the built-in choice does. Reading the head once more, or a tile twice as tall, costs more
    than any tuning gains, so a bucket never serves across."""
    least = min((bucket for bucket in buckets if bucket >= batch), default=None)
    if least is None or least > 2 * batch or _tile_class(least) != _tile_class(batch):
        return None
    return least


def _tile_class(batch: int) -> int:
    return next((place for place, most in enumerate(TILE_CLASSES) if batch <= most), len(TILE_CLASSES))


def find(
    target: Target, file: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[Found | None, list[str]]:
    """The table for ``target``, and a line for each file or folder that was named but is of no use.

    ``file``, or ``FLASHSAMPLE_TUNED``, wins if it can be used at all. Of the folders (``folders``), the first that has
    an exact or compatible table, else the first that has a stale one, else, where ``FLASHSAMPLE_ALLOW_FAMILY`` is 1,
    one of another GPU of the same compute capability. Raises nothing.
    """
    warnings: list[str] = []
    family = environ.get(FAMILY_VARIABLE) == "1"
    named = file or environ.get(FILE_VARIABLE)
    if named:
        found = _try(Path(named), "the named file", target, family, warnings)
        if found is not None:
            return found, warnings
    best: Found | None = None
    for folder, source in folders(environ, warnings):
        for path in _candidates(folder, target, family):
            found = _try(path, source, target, family, warnings)
            if found is not None and (best is None or _rank(found) < _rank(best)):
                best = found
        if best is not None and best.match in USED_AS_FOUND:
            break
    return best, warnings


def _rank(found: Found) -> int:
    return 0 if found.match in USED_AS_FOUND else list(Match).index(found.match)


def folders(environ: Mapping[str, str], warnings: list[str] | None = None) -> Iterator[tuple[Path, str]]:
    """The folders of the lookup order, with their names in words. A folder that the user named and that is not there
    gets a line in ``warnings``."""
    for name in filter(None, environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)):
        if not os.path.isdir(name) and warnings is not None:
            warnings.append(f"{FOLDERS_VARIABLE}: {shorten(name, 300)} is not a folder")
        yield Path(name), FOLDERS_VARIABLE
    yield user_folder(environ), "the user's cache"
    yield SHIPPED, "shipped"


def user_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where tables of this machine are kept."""
    return Path(environ.get("SGLANG_CACHE_DIR") or os.path.expanduser("~/.cache/sglang")) / "flashsample"


def _candidates(folder: Path, target: Target, family: bool) -> Iterator[Path]:
    own = file_name(target.device.name, target.head)
    if os.path.lexists(folder / own):
        yield folder / own
    if family:
        start, _, end = file_name("*", target.head).partition("_")
        try:
            with os.scandir(folder) as entries:
                names = sorted(entry.name for _, entry in zip(range(MOST_FILES), entries, strict=False))
        except OSError:
            return
        yield from (folder / name for name in names if name != own and name.startswith(start) and name.endswith(end))


def _try(path: Path, source: str, target: Target, family: bool, warnings: list[str]) -> Found | None:
    table, problem = load_table(path)
    if table is None:
        warnings.append(f"{shorten(str(path), 300)}: {problem}")
        return None
    how, differs = match(table, target)
    problem = _use_problem(table, how, differs, target, family)
    if how is None or problem is not None:
        warnings.append(f"{shorten(str(path), 300)}: {problem}")
        return None
    return Found(table, str(path), source, how, differs)


def _use_problem(table: Table, how: Match | None, differs: tuple[str, ...], target: Target, family: bool) -> str | None:
    if how is None or (how is Match.FAMILY and not family):
        allow = f" ({FAMILY_VARIABLE}=1 allows it)" if how is Match.FAMILY else ""
        return f"{differs[0]}{allow}"
    if how in USED_AS_FOUND:
        return None
    # Measured elsewhere: there it ran, here it must at least be able to.
    for work, buckets in table.classes.items():
        for bucket in buckets.values():
            choice = table.configs[bucket.use]
            if choice.launch is None:
                continue  # a path of a later release: the built-in choice takes its place
            problem = config_problem(choice, target.device, target.head.dtype, Work(work))
            if problem is not None:
                return f"it is {how}, and its configuration {shorten(bucket.use)} cannot run here: {problem}"
    return None
