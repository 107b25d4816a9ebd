"""Decisions of a tuned table: one per batch kind and size, with its evidence. Loads no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ..defaults import HeadTraits, default_config, defaults_digest, family_of
from ..kinds import BATCH_KINDS, KIND_NAMES, BatchKind, Config, path_of
from ..tables.schema import ITEMSIZE, Confirmed, Device, Entry, HeadShape, Table
from .labels import GEMM, key_of
from .race import Policy

CONFIDENT = 1.96  # standard errors; 95 % of the differences of equal times are smaller
# Versions that times depend on so much that times of other versions do not belong in the same table.
SAME_ENV = ("torch", "triton", "cuda", "sgl_flashsample")
CONFIRMED_ERROR = Policy().error  # relative error of the times of confirmed sizes, which tables lack: a race ends at it


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision of a table for one size. entry: the evidence; where the built-in choice was confirmed, that choice
    and its time, with further evidence only from the log of the run. config: None for a confirmed choice on a device
    for which this release has no built-in ones."""

    entry: Entry
    confirmed: bool
    config: Config | None

    @property
    def kind(self) -> BatchKind:
        return KIND_NAMES[self.entry.kind]

    @property
    def rows(self) -> int:
        return self.entry.rows

    @property
    def us(self) -> float:
        return self.entry.us

    @property
    def gemm_us(self) -> float:
        """Microseconds of the GEMM alone in the same race; 0 where it did not run."""
        return self.entry.others.get(GEMM, 0.0)

    @property
    def takes(self) -> str:
        key = key_of(self.config) if self.config is not None else "unknown"
        flashinfer = "; flashinfer where no row has a seed" if self.entry.flashinfer else ""
        return f"built-in: {key}" if self.confirmed else key + flashinfer

    def beyond_noise(self, other: Decision) -> bool:
        """True where the times are further apart than their noise explains."""
        return abs(other.us - self.us) > CONFIDENT * math.hypot(self.entry.se, other.entry.se)

    def beats(self, other: Decision) -> bool:
        """True where it is faster beyond noise than another table's decision for this size, each relative to a time of
        its own race: the built-in choice's, else the GEMM's. Times of two sessions alone say how fast the GPU was."""
        races = [(self.entry.default_us, other.entry.default_us), (self.gemm_us, other.gemm_us)]
        beside = next(((mine, theirs) for mine, theirs in races if mine and theirs), None)
        if beside is None or not self.us or not other.us:
            return False
        ratio = (self.us / beside[0]) / (other.us / beside[1])
        noise = math.hypot(self.entry.se / self.us, other.entry.se / other.us)
        return ratio < 1 - CONFIDENT * math.sqrt(2) * noise  # the time beside it scatters as much


def baseline_ratio(entry: Entry) -> float | None:
    """Time of the fastest GEMM with a sampler, over this one; None where none was raced."""
    times = [us for name, us in entry.others.items() if name.startswith(f"{GEMM}+")]
    return min(times) / entry.us if times and entry.us else None


def decisions(table: Table, logged: Iterable[Entry] = ()) -> Iterator[Decision]:
    """Every size that was measured, by kind. logged: entries from the log of the run."""
    known = {(entry.kind, entry.rows, entry.us): entry for entry in logged}
    for kind in BATCH_KINDS:
        confirmed = table.confirmed.get(str(kind), Confirmed(rows=[], us=[]))
        number = len(confirmed.rows)
        gemm_us, code = confirmed.gemm_us or [0.0] * number, confirmed.code or [""] * number
        against: list[int | None] = [*confirmed.against] or [None] * number
        evidence = {row[0]: row[1:] for row in zip(confirmed.rows, confirmed.us, gemm_us, against, code, strict=True)}
        for rows in table.sizes(str(kind)):
            entry = table.entry(str(kind), rows)
            if entry is not None:
                yield Decision(entry, False, entry.configuration)
                continue
            us, gemm, others_raced, code_of_it = evidence[rows]
            config = builtin_config(*device_and_head(table), rows, kind)
            path = path_of(config).value if config is not None else "built-in"
            others = {GEMM: gemm} if gemm else {}
            entry = Entry(kind=str(kind), rows=rows, path=path, config={}, us=us, default_us=us, others=others)
            entry = known.get((str(kind), rows, us), entry)
            entry = msgspec.structs.replace(entry, se=CONFIRMED_ERROR * us, against=others_raced, code=code_of_it)
            yield Decision(entry, True, config)


def by_size(table: Table) -> dict[tuple[BatchKind, int], Decision]:
    return {(one.kind, one.rows): one for one in decisions(table)}


def stored(chosen: Iterable[Decision]) -> dict[str, Any]:
    """The ``entries`` and ``confirmed`` of a table with these decisions, which are in the order of their sizes."""
    entries: list[Entry] = []
    confirmed: dict[str, list[Decision]] = {}
    for one in chosen:
        if one.confirmed:
            confirmed.setdefault(one.entry.kind, []).append(one)
        else:
            entries.append(one.entry)
    of_kinds = {}
    for kind, sizes in confirmed.items():
        rows, us, gemm_us = ([getattr(one, name) for one in sizes] for name in ("rows", "us", "gemm_us"))
        against, code = [one.entry.against for one in sizes], [one.entry.code for one in sizes]
        of_kinds[kind] = Confirmed(
            rows=rows,
            us=us,
            gemm_us=gemm_us if any(gemm_us) else [],
            against=[number for number in against if number is not None] if None not in against else [],
            code=code if any(code) else [],
        )
    return {"entries": entries, "confirmed": of_kinds}


def device_and_head(table: Table) -> tuple[Device, HeadShape]:
    """Device and head of a tuned table, which has both."""
    assert table.device is not None and table.head is not None
    return table.device, table.head


def screen_cost(table: Table) -> tuple[int, int]:
    """Bytes of a screen, and rows of its largest batch; 0 where the table does not say."""
    cost = table.measure.get("screen")
    size, rows = (cost.get("bytes"), cost.get("rows")) if isinstance(cost, dict) else (None, None)
    return (size, rows) if isinstance(size, int) and isinstance(rows, int) else (0, 0)


def larger_screen(*tables: Table) -> dict[str, Any]:
    """``measure.screen`` of a table that has the sizes of all of these; empty where none has a screen."""
    largest = max(tables, key=screen_cost)
    return {"screen": largest.measure["screen"]} if any(screen_cost(largest)) else {}


def why_apart(a: Table, b: Table) -> str:
    """The difference between two tables of one device and head that keeps their sizes out of one table; empty without
    one."""
    if a.defaults != b.defaults:
        return "measured against different built-in choices"
    if a.simulated != b.simulated:
        return "measured on a GPU and on a simulated device"
    if other := differently_compiled(a, b):
        kind, rows = other[0]
        return f"measured with different machine code of the same configuration ({kind} {rows})"
    for name in SAME_ENV:
        if a.env.get(name) != b.env.get(name):
            return f"measured with different versions ({name} {a.env.get(name)} and {b.env.get(name)})"
    allowed = [table.measure.get("allowed") or "none" for table in (a, b)]
    return "" if allowed[0] == allowed[1] else f"tuned with different --allow-path ({allowed[0]} and {allowed[1]})"


def differently_compiled(a: Table, b: Table) -> list[tuple[BatchKind, int]]:
    """The sizes of ``b`` whose configuration was measured in both tables, with other machine code in ``b``.
    Nothing is known of a size without machine code."""
    codes = {(one.kind.launched(one.config), one.config): one.entry.code for one in decisions(a) if one.config}
    other = []
    for one in decisions(b):
        code = codes.get((one.kind.launched(one.config), one.config), "") if one.config else ""
        if code and one.entry.code and code != one.entry.code:
            other.append((one.kind, one.rows))
    return other


def builtin_config(device: Device, head: HeadShape, rows: int, kind: BatchKind) -> Config | None:
    """The built-in choice for such a batch; None for a device without built-in choices."""
    traits = traits_of(device, head)
    return default_config(traits, rows, kind) if traits is not None else None


def traits_of(device: Device, head: HeadShape) -> HeadTraits | None:
    """The traits that built-in choices depend on; None for a device without them."""
    family = family_of(device.cc)
    return HeadTraits.of_shape(head, family) if family is not None else None


def same_defaults(table: Table) -> bool:
    device, head = device_and_head(table)
    family = family_of(device.cc)
    return family is not None and table.defaults == defaults_digest(family, ITEMSIZE[head.dtype], head.hidden)
