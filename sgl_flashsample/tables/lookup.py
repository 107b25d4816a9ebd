"""The choices for the batches of a head on this machine: the tuned table that fits, on top of the built-in choices.

This file has the places where tables are looked for, and the rules of a match. A table that cannot be used is a miss
with one line that says why, never an error. Only ``resolve`` needs torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib.metadata
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..defaults import INTERPRETED, SHIPPED, HeadTraits, default_config, defaults_digest, evidence_of, family_of
from ..dispatch import DENSE_ROWS, DispatchTable
from ..files import BadFileError, one_line, read_plain
from ..kernels.config import (
    LIMBS,
    MAX_TRUNCATED_ROWS_PER_TILE,
    MIN_RESCORED_ROWS,
    ReadConfig,
    ScreenConfig,
    TileConfig,
)
from ..kinds import BATCH_KINDS, KIND_NAMES, BatchKind, Config
from ..switches import FAMILY_VARIABLE, FILE_VARIABLE, FOLDERS_VARIABLE, switch, text
from .schema import FILE_PREFIX, ITEMSIZE, MAX_BYTES, Device, HeadShape, Table, file_name

if TYPE_CHECKING:
    import torch

    from ..kernels.params import LMHead

MAX_FILES = 1000  # files of a folder that are looked at for tables of the same family
# Packages whose minor releases may compile kernels, or multiply (cuBLAS comes with CUDA), in another way.
COMPARED = ("triton", "cuda")
NOTED = ("torch", "driver")  # versions that may differ: the table holds
TILE_CLASSES = (16, 32, 64)  # rows of the largest batches that share a block size; larger batches are the last class


class Match(enum.StrEnum):
    """How well a table fits, best first."""

    EXACT = "exact"
    COMPATIBLE = "compatible"  # torch, the driver, or a patch release differs
    OTHER_VERSIONS = "of other versions"  # a minor release of Triton or CUDA: another choice may be faster by now
    STALE = "stale"  # machine code or built-in choices have changed: its times may be off
    FAMILY = "family"  # another GPU of the same compute capability


SHIPPED_SOURCE = "shipped"
SIMULATED = "its times are simulated: no server uses it"
FRESH = (Match.EXACT, Match.COMPATIBLE)  # tables whose times still hold, as far as is known before kernels are compiled
EXPLAINED = (Match.OTHER_VERSIONS, Match.STALE)  # the log line names the changes since the measurement


@dataclasses.dataclass(frozen=True)
class Target:
    """The device, head and versions that a table is wanted for. env: installed versions."""

    device: Device
    head: HeadShape
    env: dict[str, str]


@dataclasses.dataclass(frozen=True)
class TableFile:
    """A table, the file that holds it and how well it fits. source: the place in the lookup order that the file is in.
    differs: why ``match`` is not ``Match.EXACT``; empty where it is."""

    table: Table
    file: str
    source: str
    match: Match
    differs: tuple[str, ...] = ()

    @property
    def knows_screens(self) -> bool:
        """It says for which batches a screen is faster. A table that is stale, of other versions or of another GPU does
        not: servers race their screens (``screen_race.py``)."""
        return self.match in FRESH


@dataclasses.dataclass(frozen=True)
class ResolvedTable:
    """dispatch: the choices. table_file: the tuned table that they come from, or None. about: the device and head of
    the search for a table, in words. warnings: a line for each file that is unused, or used in part only, and why.
    evidence: the measurements behind the built-in choices, in words."""

    dispatch: DispatchTable
    table_file: TableFile | None
    about: str
    warnings: tuple[str, ...]
    evidence: str = ""

    @property
    def knows_screens(self) -> bool:
        """The table says for which batches a screen is faster."""
        return self.table_file is not None and self.table_file.knows_screens

    def line(self, screen: str = "") -> str:
        """One line for a log. screen: how batches use a screen that was raced, in words."""
        file = self.table_file
        if file is None:
            choices = f"built-in kernel settings{f' ({self.evidence})' if self.evidence else ''}"
            choices = f"{screen}; else {choices}" if screen else choices
            if self.dispatch.traits.batch_invariant:
                return f"no tuned table for {self.about}: it takes one built-in configuration"
            # Without a GPU there is nothing to tune.
            advice = "" if self.dispatch.traits.family == INTERPRETED else "; `sgl-flashsample tune run` makes one"
            return f"no tuned table for {self.about}: {choices}, same tokens{advice}"
        table = file.table
        confirmed = sum(len(sizes.rows) for sizes in table.confirmed.values())
        sizes = self.dispatch.flashinfer
        flashinfer = f"; FlashInfer draws truncated batches of {ranges_of(sizes)} rows without seeds" if sizes else ""
        match = f"{file.match}: {'; '.join(file.differs)}" if file.match in EXPLAINED else file.match
        return (
            f"tuned table {file.file} (match of GPU, LM head and versions: {match}; from: {file.source}): tuned kernel "
            f"settings for {len(table.entries)} batch sizes; built-in ones for {confirmed} others, where they measured "
            f"fastest{_raced_against(table)}; built-in ones without a measurement: "
            f"{'; '.join(self._unmeasured()) or 'for none'}{flashinfer}"
            f"{f'; {screen}' if screen else ''}"
        )

    def _unmeasured(self) -> Iterator[str]:
        """Ranges of the batch sizes that take the built-in choice unmeasured, per kind."""
        measured = set(self.table_file.table.kinds) if self.table_file is not None else set()
        for kind in BATCH_KINDS:
            if kind.screen and str(kind) not in measured:
                continue  # the table was measured without a screen
            sizes = [rows for rows in range(1, DENSE_ROWS + 1) if not self.dispatch.is_measured(rows, kind)]
            if sizes:
                yield f"{kind} {ranges_of(sizes)}"


def _raced_against(table: Table) -> str:
    """The smallest and the largest number of rivals that a choice of the table had; empty where none is known."""
    known = [others for others in table.against if others is not None]
    if not known:
        return ""
    span = " to ".join(map(str, sorted({min(known), max(known)})))
    where = " where that is known" if len(known) < len(table.against) else ""
    return f"; raced against {span} other configuration{'s' * (span != '1')}{where}"


def ranges_of(sizes: Iterable[int]) -> str:
    """ "1-4, 8"."""
    numbered = itertools.groupby(enumerate(sorted(sizes)), lambda at: at[1] - at[0])
    runs = [[rows for _, rows in run] for _, run in numbered]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def load_table(file: str | os.PathLike[str]) -> tuple[Table | None, str | None]:
    """The table in ``file``; or None and, in one line, why not. Raises nothing, and waits for nothing: only a plain
    file of at most ``schema.MAX_BYTES`` bytes is read."""
    try:
        table = Table.loads(read_plain(file, MAX_BYTES))
        if table.builtin:
            return None, "it holds built-in choices, not tuned ones"
        return table, None
    except BadFileError as error:
        return None, str(error)
    except Exception as error:  # the server must start, whatever a file does to its reader
        return None, one_line(f"{type(error).__name__}: {error}")


def match(table: Table, target: Target) -> tuple[Match | None, tuple[str, ...]]:
    """How ``table`` fits ``target``, and what differs; None where it must not be used. Compiles nothing, so a table
    whose machine code has changed is stale only after ``fingerprint.compare_compiled``."""
    theirs, ours = table.device, target.device
    assert theirs is not None and table.head is not None
    if table.simulated:
        return None, (SIMULATED,)
    if table.head != target.head:
        return None, (f"it is for head {table.head}; expected {target.head}",)
    if theirs.cc != ours.cc:
        return None, (f"it is for {theirs.name}, not {ours.name}",)
    if (theirs.name, theirs.sms) != (ours.name, ours.sms):
        return Match.FAMILY, (f"it is for {theirs.name} ({theirs.sms} SMs), not {ours.name} ({ours.sms} SMs)",)
    other: list[str] = []  # versions of another minor release
    changed: list[str] = []  # other differences of versions
    for name in (*COMPARED, *NOTED):
        was, now = table.env.get(name), target.env.get(name)
        if was != now:
            another = name in COMPARED and _minor(was) != _minor(now)
            (other if another else changed).append(f"{name} is {now or 'unknown'}, it was {was or 'unknown'}")
    if stale := known_stale(table):
        return Match.STALE, (*other, *stale)
    if other:
        return Match.OTHER_VERSIONS, tuple(other)
    return (Match.COMPATIBLE if changed else Match.EXACT), tuple(changed)


def known_stale(table: Table) -> list[str]:
    """Why ``table`` is stale whatever its configurations compile to; empty where that alone decides."""
    assert table.device is not None and table.head is not None
    family, stale = family_of(table.device.cc), []
    if family and not table.has_code:
        stale.append("it does not say with which machine code it was measured")
    head = ITEMSIZE[table.head.dtype], table.head.hidden
    if table.defaults and family and table.defaults != defaults_digest(family, *head):
        stale.append("the built-in choices have changed since")
    return stale


def other_code(sizes: Iterable[tuple[BatchKind, int]]) -> str:
    """The sizes whose configurations compile to other machine code than was measured, in one line."""
    by_kind: dict[BatchKind, list[str]] = {}
    for kind, rows in sorted(sizes, key=lambda at: (BATCH_KINDS.index(at[0]), at[1])):
        by_kind.setdefault(kind, []).append(str(rows))
    words = "; ".join(f"{kind} {', '.join(rows)}" for kind, rows in by_kind.items())
    return f"other machine code than was measured: {words}"


def _minor(version: str | None) -> str:
    """ "2.11.0+cu130" -> "2.11"."""
    return ".".join((version or "").partition("+")[0].split(".")[:2])


def unsupported_config(config: Config, device: Device, dtype: str, kind: BatchKind) -> str | None:
    """Why this configuration cannot run on ``device`` with any compiler; None where it may."""
    if kind.truncate and config.block_b > MAX_TRUNCATED_ROWS_PER_TILE:
        return f"block_b is {config.block_b}; expected {MAX_TRUNCATED_ROWS_PER_TILE} or fewer with a truncation"
    if isinstance(config, ScreenConfig) and not kind.screen:
        return f"it is for batches with a screen; expected another path for {kind}"
    if not isinstance(config, ReadConfig):
        if config.tma and float(device.cc) < 9.0:
            return f"tma is on; expected it off for compute capability {device.cc}"
        buffers = buffer_bytes(config, ITEMSIZE[dtype])
        if 0 < device.smem_optin < buffers:
            return f"its buffers take {buffers} bytes of shared memory; {device.smem_optin} are there"
    return None


def buffer_bytes(config: TileConfig | ScreenConfig, itemsize: int) -> int:
    """Shared memory of the pipeline of one program, of the launch that has the larger one. itemsize: bytes per element
    of the head."""
    first, rescoring = stage_bytes(config, itemsize)
    return max(config.stages * first, getattr(config, "rescore_stages", 0) * rescoring)


def stage_bytes(config: TileConfig | ScreenConfig, itemsize: int) -> tuple[int, int]:
    """Shared memory of one stage of the pipeline: of the fused pass, 0; of the pass over a screen, whose elements are
    bytes, and of its rescoring."""
    if isinstance(config, TileConfig):
        return (config.block_v * itemsize + config.block_b * max(2, itemsize)) * config.block_d, 0
    rescored = (config.rescore_v + max(MIN_RESCORED_ROWS, config.block_b)) * config.rescore_d
    return (config.block_v + config.block_b * LIMBS) * config.block_d, rescored * itemsize


def bucket_for(sizes: Iterable[int], batch: int) -> int | None:
    """The measured size that serves ``batch`` rows: the next one that is not smaller, within the same tile class and
    not more than twice as large; None where the built-in choice serves them. Reading the head once more, or a tile
    twice as tall, costs more than any tuning gains, so a measured size never serves another tile class."""
    least = min((size for size in sizes if size >= batch), default=None)
    if least is None or least > 2 * batch or _tile_class(least) != _tile_class(batch):
        return None
    return least


def _tile_class(batch: int) -> int:
    return next((place for place, most in enumerate(TILE_CLASSES) if batch <= most), len(TILE_CLASSES))


def find(
    target: Target, file: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[TableFile | None, list[str]]:
    """The table for ``target``, and a line for each file or folder that was named but is of no use.

    ``file``, or ``FLASHSAMPLE_TUNED``, wins if it can be used at all. Else the first folder (``folders``) that has an
    exact or compatible table, else the first that has a stale one, else, where ``FLASHSAMPLE_ALLOW_FAMILY`` is on,
    one of another GPU of the same compute capability. Raises nothing.
    """
    warnings: list[str] = []
    family = bool(switch(FAMILY_VARIABLE, environ))
    named = file or text(FILE_VARIABLE, environ)
    if named:
        table_file = _try(Path(named), "the named file", target, family, warnings)
        if table_file is not None:
            return table_file, warnings
    best: TableFile | None = None
    for folder, source in folders(environ, warnings):
        for path in _candidates(folder, target, family):
            # No warning for a shipped table that cannot be used: the user can do nothing about it.
            table_file = _try(path, source, target, family, [] if source == SHIPPED_SOURCE else warnings)
            if table_file is not None and (best is None or _rank(table_file) < _rank(best)):
                best = table_file
        if best is not None and best.match in FRESH:
            break
    return best, warnings


def _rank(table_file: TableFile) -> int:
    return 0 if table_file.match in FRESH else list(Match).index(table_file.match)


def folders(environ: Mapping[str, str], warnings: list[str] | None = None) -> Iterator[tuple[Path, str]]:
    """The folders of the lookup order, with their names in words. A folder that the user named and that is not there
    gets a line in ``warnings``."""
    for name in filter(None, text(FOLDERS_VARIABLE, environ).split(os.pathsep)):
        if not os.path.isdir(name) and warnings is not None:
            warnings.append(f"{FOLDERS_VARIABLE}: {one_line(name, 300)} is not a folder")
        yield Path(name), FOLDERS_VARIABLE
    yield user_folder(environ), "the user's cache"
    yield SHIPPED, SHIPPED_SOURCE


def tables_in(folder: Path) -> Iterator[tuple[Path, Table | None, str]]:
    """The tuned tables in a folder of the lookup order: path, table, and why a file is none. Raises nothing."""
    for name in _names_in(folder):
        if name.startswith(FILE_PREFIX) and name.endswith(".json"):
            table, reason = load_table(folder / name)
            yield folder / name, table, reason or ""


def _names_in(folder: Path) -> list[str]:
    """At most ``MAX_FILES`` names; none where ``folder`` is no folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for _, entry in zip(range(MAX_FILES), entries, strict=False))
    except OSError:
        return []


def user_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder where tables of this machine are kept."""
    return Path(environ.get("SGLANG_CACHE_DIR") or os.path.expanduser("~/.cache/sglang")) / "flashsample"


def _candidates(folder: Path, target: Target, family: bool) -> Iterator[Path]:
    exact_name = file_name(target.device.name, target.head)
    if os.path.lexists(folder / exact_name):
        yield folder / exact_name
    if family:
        start, _, end = file_name("*", target.head).partition("_")
        for name in _names_in(folder):
            if name != exact_name and name.startswith(start) and name.endswith(end):
                yield folder / name


def _try(path: Path, source: str, target: Target, family: bool, warnings: list[str]) -> TableFile | None:
    table, reason = load_table(path)
    if table is not None:
        how, differs = match(table, target)
        if how is None or (how is Match.FAMILY and not family):
            reason = differs[0] + (f" ({FAMILY_VARIABLE}=1 allows it)" if how is Match.FAMILY else "")
        elif how not in FRESH and (unusable := unusable_sizes(table, target)):
            # The table was measured elsewhere: its configurations ran there, and must at least be able to run here.
            (kind, rows), why = next(iter(unusable.items()))
            reason = f"it is {how}, and its configuration for {kind} {rows} cannot run here: {why}"
        else:
            return TableFile(table, str(path), source, how, differs)
    warnings.append(f"{one_line(str(path), 300)}: {reason}")
    return None


def unusable_sizes(table: Table, target: Target) -> dict[tuple[BatchKind, int], str]:
    """The sizes whose configuration cannot run on the target's device with any compiler, and why."""
    unusable = {}
    for entry in table.entries:
        kind = KIND_NAMES[entry.kind]
        reason = unsupported_config(entry.configuration, target.device, target.head.dtype, kind)
        if reason is not None:
            unusable[kind, entry.rows] = reason
    return unusable


@functools.cache
def device_of(device: torch.device) -> Device:
    """``device`` as tables name it; "cpu" where kernels are interpreted."""
    import torch

    if device.type != "cuda":
        return Device(name=device.type, cc="0.0", sms=0, l2_mb=0, smem_optin=0)
    properties: Any = torch.cuda.get_device_properties(device)
    return Device(
        name=properties.name,
        cc=f"{properties.major}.{properties.minor}",
        sms=properties.multi_processor_count,
        l2_mb=getattr(properties, "L2_cache_size", 0) >> 20,
        smem_optin=getattr(properties, "shared_memory_per_block_optin", 0),
    )


def head_shape_of(head: LMHead) -> HeadShape | None:
    """``head`` as tables name it. None for a head whose logits are kept in another dtype than the hidden states: no
    table is measured for one."""
    import torch

    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "e4m3"}
    weight = head.weight
    if not head.gemm_gives_logits:
        return None
    # The last shard may be shorter; all shards share one table.
    vocab = head.vocab_size if head.shards == 1 else weight.shape[0]
    softcap = head.softcap is not None
    return HeadShape(vocab=vocab, hidden=weight.shape[1], dtype=names[weight.dtype], tp=head.shards, softcap=softcap)


@functools.cache
def environment() -> dict[str, str]:
    """The versions that times depend on, as in ``Table.env``."""
    import torch
    import triton

    versions = {"triton": triton.__version__, "torch": str(torch.__version__), "cuda": torch.version.cuda or "none"}
    try:
        with open("/proc/driver/nvidia/version") as file:
            driver = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read(4096))
    except OSError:
        driver = None
    if driver is not None:
        versions["driver"] = driver.group()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["flashinfer"] = importlib.metadata.version("flashinfer-python")
    return versions


def resolve(head: LMHead, *, file: str | os.PathLike[str] | None = None, device: Device | None = None) -> ResolvedTable:
    """The choices for ``head`` from the tuned table that fits it, or the built-in ones.

    Reads files: once per head, at start. file: the table to use; None for the one that ``find`` finds. device: the
    head's when None. A table never makes this raise; warnings name its parts that are not used.

    Raises ValueError for a device without kernels.
    """
    if head.batch_invariant:
        return ResolvedTable(DispatchTable(HeadTraits.of(head)), None, "a batch-invariant head", ())
    shape = head_shape_of(head)
    if shape is None:
        return ResolvedTable(DispatchTable(HeadTraits.of(head)), None, "a head with logits in another dtype", ())
    target = Target(device or device_of(head.weight.device), shape, environment())
    table_file, warnings = find(target, file)
    ranks = f" on each of {shape.tp} ranks" if shape.tp > 1 else ""
    about = f"{target.device.name}, head {shape.vocab} x {shape.hidden} {shape.dtype}{ranks}"
    traits = HeadTraits.of(head)
    if table_file is None:
        evidence = evidence_of(traits, target.device.name)
        return ResolvedTable(DispatchTable(traits), None, about, tuple(warnings), evidence)
    dispatch, more = dispatch_of(table_file, target, traits)
    return ResolvedTable(dispatch, table_file, about, (*warnings, *more))


def slower_than_measured(table_file: TableFile) -> Iterator[str]:
    """A warning where the times of a table in use may be off. Of a shipped one the log line alone says so: its user has
    not tuned anything."""
    shipped = table_file.source == SHIPPED_SOURCE
    if table_file.match in FRESH or (shipped and table_file.match in EXPLAINED):
        return
    advice = "run `sgl-flashsample tune run` again"
    advice += "" if table_file.match is Match.FAMILY else ", or see with `tune verify` whether its times still hold"
    yield (
        f"tuned table {table_file.file} is used, but it is {table_file.match} ({'; '.join(table_file.differs)}): same "
        f"tokens, but it may be slow; {advice}"
    )


def gemm_as_measured(table: Table, traits: HeadTraits) -> bool:
    """Whether a GEMM is as fast for a head with these traits as for the one that ``table`` was measured with: that has
    a padded vocabulary, and the head may have none."""
    assert table.head is not None
    return traits.has_gemm == HeadTraits.of_shape(table.head, traits.family).has_gemm


def dispatch_of(table_file: TableFile, target: Target, traits: HeadTraits) -> tuple[DispatchTable, list[str]]:
    """The choices of a tuned table, and a warning for each reason why a part of it is unused or may be slow."""
    warnings = list(slower_than_measured(table_file))
    shipped = table_file.source == SHIPPED_SOURCE
    tuned: dict[BatchKind, dict[int, Config]] = {}
    measured: dict[BatchKind, set[int]] = {}
    flashinfer: set[int] = set()
    unusable = unusable_sizes(table_file.table, target)
    slow_gemm = not gemm_as_measured(table_file.table, traits)
    raced = traits.unmodelled  # a confirmed size means the choice that the tuner raced, whatever the cost model says
    measured_traits = raced._replace(has_gemm=traits.has_gemm or slow_gemm)
    left_out: list[str] = []
    for kind in BATCH_KINDS:
        sizes = table_file.table.sizes(str(kind))
        served = [(rows, bucket_for(sizes, rows)) for rows in range(1, DENSE_ROWS + 1)]
        for size in sizes:
            if (kind, size) in unusable:
                continue
            entry = table_file.table.entry(str(kind), size)
            rows_of_size = [rows for rows, bucket in served if bucket == size]
            config = default_config(measured_traits, size, kind) if entry is None else entry.configuration
            if slow_gemm and isinstance(config, ReadConfig):
                left_out.append(f"{kind} {size}")
                continue
            if entry is None:
                chosen = {rows: default_config(raced, rows, kind) for rows in rows_of_size}
                chosen = {rows: one for rows, one in chosen.items() if one != default_config(traits, rows, kind)}
                tuned.setdefault(kind, {}).update(chosen)
            else:
                tuned.setdefault(kind, {}).update(dict.fromkeys(rows_of_size, entry.configuration))
                if entry.flashinfer and kind == BatchKind(truncate=True) and not slow_gemm:
                    flashinfer.update(rows_of_size)
            measured.setdefault(kind, set()).update(rows_of_size)
    if unusable and not shipped:
        reasons = sorted(f"{kind} {rows}: {reason}" for (kind, rows), reason in unusable.items())
        warnings.append(f"{table_file.file}: not used, {'; '.join(reasons)[:500]}")
    if left_out and not shipped:
        why = "measured with a GEMM that is slow here, where the head's rows are no multiple of 8"
        warnings.append(f"{table_file.file}: not used, {why}: {'; '.join(left_out)[:500]}")
    return DispatchTable(traits, tuned, measured, flashinfer), warnings
