"""Tuned tables, ``flashsample-tune/2``: measurements for one device and one LM head, as JSON that people can read.

A table has one entry per batch kind and size whose fastest configuration differs from the built-in one, with its
evidence, and one line per kind with the sizes at which measurement confirmed the built-in choice, and their times. The
built-in choices themselves are tables of the same form (``builtin-*.json``).

A table is data from elsewhere: everything in it is checked, its size, depth and numbers are bounded, and a fault is
named in one line. A table decides how the work is cut, never a token. Reading one needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..files import BadFileError, one_line, parse_json
from ..kernels.config import LIMBS, MAX_SPLITS, ReadConfig, ScreenConfig, TileConfig, next_power_of_2
from ..kinds import CONFIGS, KIND_NAMES, Config, SamplingPath

SCHEMA = "flashsample-tune/2"
FILE_PREFIX = "fs2-"  # file names of tuned tables begin with it
MAX_BYTES = 1 << 20
MAX_ROWS = 1 << 16
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1}  # bytes per element
DTYPES = tuple(ITEMSIZE)
MAX_NOTES = 20
MAX_ITEMS = 4096  # entries of one object or list
MAX_DEPTH = 4  # objects and lists inside each other
MAX_TEXT = 300  # characters
MAX_NUMBER = 1e18

# The largest value of a field of a configuration. Beyond, no kernel compiles, or one takes minutes to.
MAX_OF_FIELD = {
    "block_b": 256,
    "block_v": 1 << 20,
    "block_d": 1 << 14,
    "num_warps": 32,
    "stages": 16,
    "ctas_per_sm": 128,
    "min_splits": 512,
    "reduce_rows": 256,
    "chunk": 1 << 12,
    "rescore_v": 1 << 12,
    "rescore_d": 1 << 14,
    "rescore_warps": 32,
    "rescore_stages": 16,
}
MAX_BLOCK = 1 << 20  # elements of one block of a Triton kernel
MAX_PER_THREAD = 512  # elements of one block per thread: beyond, a factor of four compiles 13 times as long

# Types of bounded fields. ``_check_bounds`` has the bounds of any text, number, object or list.
Name = Annotated[str, Meta(min_length=1)]
Rows = Annotated[int, Meta(ge=1, le=MAX_ROWS)]
Microseconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Facts = Annotated[dict[str, Any], Meta(max_length=64)]
Texts = Annotated[dict[str, str], Meta(max_length=64)]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class Device(_Struct, frozen=True, omit_defaults=False):
    """name: as the driver gives it; "cpu" where kernels are interpreted. cc: compute capability, "9.0". sms:
    multiprocessors. l2_mb: L2 cache in MiB. smem_optin: bytes of shared memory that a program may ask for."""

    name: Name
    cc: Annotated[str, Meta(pattern=r"^[0-9]{1,2}\.[0-9]$")]
    sms: Annotated[int, Meta(ge=0, le=1 << 16)]
    l2_mb: Annotated[int, Meta(ge=0, le=1 << 20)]
    smem_optin: Annotated[int, Meta(ge=0, le=1 << 24)]


class HeadShape(_Struct, frozen=True, omit_defaults=False):
    """vocab: ids of the head; with several ranks, rows of the weight on each. hidden: D. dtype: the weight's, one of
    ``DTYPES``. tp: ranks that share the head. softcap: the logits have one."""

    vocab: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
    hidden: Annotated[int, Meta(ge=1, le=1 << 24)]
    dtype: str
    tp: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    softcap: bool = False

    def __str__(self) -> str:
        """ "151936 x 4096 bf16, tp 1"."""
        return f"{self.vocab} x {self.hidden} {self.dtype}, tp {self.tp}{', softcap' if self.softcap else ''}"

    @property
    def is_quantised(self) -> bool:
        """True for a head with a scale per row, whose hidden states have another dtype."""
        return self.dtype == "e4m3"

    @property
    def num_bytes(self) -> int:
        return self.vocab * self.hidden * ITEMSIZE[self.dtype]

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype is {one_line(ascii(self.dtype))}; expected one of {', '.join(DTYPES)}")


class Entry(_Struct, frozen=True):
    """The choice for one kind and size of batch, and its evidence. Times are microseconds per call of the whole path.

    kind: a ``BatchKind``. rows: the size it was measured at; in built-in choices, the largest size it serves.
    path, config: a ``SamplingPath`` and the fields of its configuration; a field that is left out has its default.
    flashinfer: batches whose caller wants the distribution alone take that path instead.

    us, se, n: median, its standard error, samples. default, default_us: the built-in choice and its time. gain: the
    share of that time that is saved. against: the number of other configurations in the same race, None where unknown.
    tied: labels of those that were not slower beyond noise. checked: the checks that it has passed. code: its machine
    code (``fingerprint.machine_code``) by the Triton of ``Table.env``, empty where unknown. clock_mhz: median SM clock,
    0 where unknown. others: times of other paths and baselines in the same race.

    In built-in choices alone: on_request: only for callers that ask for this path. min_hidden: only for heads with as
    many columns or more.
    """

    kind: Name
    rows: Rows
    path: Name
    config: Annotated[dict[str, bool | int], Meta(max_length=64)]
    flashinfer: bool = False
    us: Microseconds = 0.0
    se: Microseconds = 0.0
    n: Count = 0
    default: str = ""
    default_us: Microseconds = 0.0
    gain: Annotated[float, Meta(ge=-1e6, le=1.0)] = 0.0
    against: Count | None = None
    tied: Annotated[list[str], Meta(max_length=64)] = []
    checked: str = ""
    code: str = ""
    clock_mhz: Annotated[float, Meta(ge=0.0, le=1e5)] = 0.0
    others: Annotated[dict[str, Microseconds], Meta(max_length=64)] = {}
    on_request: bool = False
    min_hidden: Annotated[int, Meta(ge=0, le=1 << 24)] = 0

    @property
    def configuration(self) -> Config:
        """The configuration. Raises ValueError for a field out of range, KeyError for an unknown path."""
        config: dict[str, Any] = self.config
        return CONFIGS[SamplingPath(self.path)](**config)


class Confirmed(_Struct, frozen=True):
    """Sizes of one kind of batch for which the built-in choice is the fastest, in the order of ``rows``, and its times.
    gemm_us: times of the vendor's GEMM alone in the same race, 0 where it did not run. against, code: as in an entry;
    an empty list where they are unknown."""

    rows: Annotated[list[Rows], Meta(max_length=512)]
    us: Annotated[list[Microseconds], Meta(max_length=512)]
    gemm_us: Annotated[list[Microseconds], Meta(max_length=512)] = []
    against: Annotated[list[Count], Meta(max_length=512)] = []
    code: Annotated[list[str], Meta(max_length=512)] = []

    def __post_init__(self) -> None:
        for name in ("us", "gemm_us", "against", "code"):
            values = getattr(self, name)
            if len(values) != len(self.rows) and (values or name == "us"):
                raise ValueError(f"{name} has {len(values)} values; expected {len(self.rows)}, one for each of rows")


class Table(_Struct, frozen=True):
    """The tuned table of one device and one head, all kinds of batches in it.

    Built-in choices alone have, in the place of device and head: builtin: the device family. itemsize: bytes per weight
    element. truncation: fields of the ``TruncationConfig`` that differ from its defaults.

    defaults: digest of the built-in choices that it was measured against. tool: versions of the tuner
    ("sgl_flashsample", "noise"). env: versions of triton, torch, cuda, driver, ... measure: the way of measuring.
    simulated: its times were not taken on a GPU, so no server uses it. rejected: number of configurations that were not
    allowed to race, by reason. notes: parts of the file that were ignored.
    """

    schema: str = SCHEMA
    builtin: str = ""
    itemsize: Annotated[int, Meta(ge=0, le=8)] = 0
    truncation: Annotated[dict[str, int], Meta(max_length=16)] = {}
    device: Device | None = None
    head: HeadShape | None = None
    effort: str = ""
    simulated: bool = False
    defaults: str = ""
    tool: Facts = {}
    env: Texts = {}
    measure: Facts = {}
    provenance: Facts = {}
    rejected: Annotated[dict[str, Count], Meta(max_length=64)] = {}
    entries: list[Entry] = []
    confirmed: Annotated[dict[str, Confirmed], Meta(max_length=64)] = {}
    notes: Annotated[list[str], Meta(max_length=MAX_NOTES)] = []

    @classmethod
    def loads(cls, text: str) -> Table:
        """The table that ``text`` holds. Raises BadFileError."""
        try:
            return _read(parse_json(text, MAX_BYTES))
        except msgspec.ValidationError as error:
            raise BadFileError(one_line(str(error), 300)) from None

    def dumps(self) -> str:
        """The table's one text: an entry per line, by kind and size. Raises BadFileError where ``loads`` would."""
        entries = [
            msgspec.structs.replace(entry, others=dict(sorted(entry.others.items())))
            for entry in sorted(self.entries, key=lambda entry: (entry.kind, entry.rows, entry.path, entry.min_hidden))
        ]
        try:
            data = msgspec.to_builtins(msgspec.structs.replace(self, entries=entries, notes=[]))
            text = "{\n" + ",\n".join(_sections({"schema": SCHEMA} | data)) + "\n}\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise BadFileError(f"the table cannot be written: {one_line(str(error))}") from None
        Table.loads(text)
        return text

    @property
    def file_name(self) -> str:
        assert self.device is not None and self.head is not None
        return file_name(self.device.name, self.head)

    @property
    def kinds(self) -> list[str]:
        """The kinds of batches that were measured."""
        return list(dict.fromkeys([*(entry.kind for entry in self.entries), *self.confirmed]))

    @property
    def has_code(self) -> bool:
        """Whether the machine code of every size is known."""
        confirmed = self.confirmed.values()
        known = all(entry.code for entry in self.entries)
        return known and all(len(sizes.code) == len(sizes.rows) and all(sizes.code) for sizes in confirmed)

    @property
    def against(self) -> list[int | None]:
        """The number of other configurations in the race of each size, None where it is unknown."""
        numbers = [entry.against for entry in self.entries]
        for sizes in self.confirmed.values():
            numbers += sizes.against or [None] * len(sizes.rows)
        return numbers

    def entry(self, kind: str, rows: int) -> Entry | None:
        return next((entry for entry in self.entries if (entry.kind, entry.rows) == (kind, rows)), None)

    def sizes(self, kind: str) -> list[int]:
        """The batch sizes that were measured, ascending."""
        confirmed = self.confirmed[kind].rows if kind in self.confirmed else []
        return sorted({*confirmed, *(entry.rows for entry in self.entries if entry.kind == kind)})


def file_name(device_name: str, head: HeadShape) -> str:
    """Name of the file that is looked for in every folder, for this device and head; a valid key of a Kubernetes
    ConfigMap."""
    device = re.sub(r"[^A-Za-z0-9.-]+", "_", device_name)
    softcap = "-softcap" if head.softcap else ""
    return f"{FILE_PREFIX}{device}-V{head.vocab}-D{head.hidden}-tp{head.tp}-{head.dtype}{softcap}.json"


def config_fields(config: Config) -> dict[str, bool | int]:
    """The fields of a configuration that differ from its defaults, as an entry has them."""
    fields = dataclasses.fields(config)
    return {field.name: value for field in fields if (value := getattr(config, field.name)) != field.default}


def _sections(data: dict[str, Any]) -> Iterator[str]:
    for name, value in data.items():
        if name == "entries":
            lines = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in value)
            yield f' "entries": [\n{lines}\n ]' if value else ' "entries": []'
        elif name == "confirmed":
            lines = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(sizes)}" for kind, sizes in sorted(value.items()))
            yield f' "confirmed": {{\n{lines}\n }}'
        else:
            yield f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False, sort_keys=isinstance(value, dict))}"


def _read(data: Any) -> Table:
    if not isinstance(data, dict):
        raise BadFileError("it is no object")
    schema = data.get("schema")
    if not isinstance(schema, str) or not re.fullmatch(rf"{SCHEMA}(\.[0-9]{{1,3}})?", schema):
        raise BadFileError(f"schema is {one_line(ascii(schema))}; expected {SCHEMA!r}")
    _check_bounds("", data, MAX_DEPTH)
    table = msgspec.convert(data, Table, strict=True)
    if (table.device is None or table.head is None) and not table.builtin:
        raise BadFileError("device or head is missing")
    notes = [f"{where} is not known to this release and is ignored" for where in _unknown_fields(data)]
    num_sms = table.device.sms if table.device is not None else 0
    entries, seen = [], set()
    for place, entry in enumerate(table.entries):
        where = f"entries[{place}]"
        if entry.kind not in KIND_NAMES:
            notes.append(f"{where}: the kind {one_line(ascii(entry.kind))} is not known to this release and is ignored")
            continue
        if entry.path not in CONFIGS:
            notes.append(f"{where}: the path {one_line(ascii(entry.path))} is not known to this release and is ignored")
            continue
        if not table.builtin and (entry.kind, entry.rows) in seen:
            raise BadFileError(f"{where} is the second one for {entry.kind} batches of {entry.rows} rows")
        seen.add((entry.kind, entry.rows))
        entries.append(_checked(where, entry, num_sms, notes))
    for kind, confirmed in table.confirmed.items():
        twice = [rows for rows in confirmed.rows if (kind, rows) in seen]
        if twice or len(set(confirmed.rows)) != len(confirmed.rows):
            raise BadFileError(f"confirmed.{kind} has {(twice or confirmed.rows)[0]} rows, which are there twice")
    known = {kind: confirmed for kind, confirmed in table.confirmed.items() if kind in KIND_NAMES}
    return msgspec.structs.replace(
        table,
        schema=SCHEMA,
        entries=entries,
        confirmed=known,
        notes=[one_line(note, 300) for note in notes[:MAX_NOTES]],
    )


def _check_bounds(where: str, value: Any, depth: int) -> None:
    """Raise BadFileError for a value that is larger or deeper than any in a table."""
    if isinstance(value, dict | list):
        if depth == 0:
            raise BadFileError(f"{one_line(where)} is nested too deeply")
        if len(value) > MAX_ITEMS:
            raise BadFileError(f"{one_line(where)} has {len(value)} entries; expected {MAX_ITEMS} or fewer")
        if isinstance(value, list):
            for place, item in enumerate(value):
                _check_bounds(f"{where}[{place}]", item, depth - 1)
            return
        for name, item in value.items():
            inside = f"{where}.{name}" if where else name
            _check_bounds(inside, name, 0)
            _check_bounds(inside, item, depth - 1)
    elif isinstance(value, str):
        if len(value) > MAX_TEXT or not value.isprintable():
            raise BadFileError(f"{one_line(where)} is no text of {MAX_TEXT} or fewer printable characters")
    elif isinstance(value, int | float) and abs(value) > MAX_NUMBER:
        raise BadFileError(f"{one_line(where)} is a huge number; expected {MAX_NUMBER:g} or less")


def _unknown_fields(data: dict[str, Any]) -> Iterator[str]:
    """The fields that a later release has added to a well-formed table, except in configurations."""
    parts: list[tuple[str, type[_Struct], Any]] = [("", Table, data)]
    parts += [("device.", Device, data.get("device")), ("head.", HeadShape, data.get("head"))]
    parts += [(f"entries[{place}].", Entry, entry) for place, entry in enumerate(data.get("entries", []))]
    for kind, confirmed in data.get("confirmed", {}).items():
        if kind not in KIND_NAMES:
            yield f"confirmed.{kind}"
        parts.append((f"confirmed.{kind}.", Confirmed, confirmed))
    for where, struct, fields in parts:
        known = struct.__struct_fields__
        yield from (f"{where}{name}" for name in fields or () if name not in known)


def _checked(where: str, entry: Entry, num_sms: int, notes: list[str]) -> Entry:
    """``entry`` with the fields of its configuration that this release knows. num_sms: multiprocessors of the device, 0
    where unknown. Raises BadFileError."""
    types = {field.name: field.type for field in dataclasses.fields(CONFIGS[SamplingPath(entry.path)])}
    for name, value in entry.config.items():
        if name not in types:
            notes.append(f"{where}.config.{name} is not known to this release and is ignored")
            continue
        if (types[name] == "bool") is not isinstance(value, bool):
            expected = "true or false" if types[name] == "bool" else "an integer"
            raise BadFileError(f"{where}.config.{name} is {json.dumps(value)}; expected {expected}")
        if not isinstance(value, bool) and not 1 <= value <= MAX_OF_FIELD[name]:
            raise BadFileError(f"{where}.config.{name} is {value}; expected an integer from 1 to {MAX_OF_FIELD[name]}")
    known = {name: entry.config[name] for name in types if name in entry.config}
    entry = msgspec.structs.replace(entry, config=known)
    try:
        config = entry.configuration
    except (TypeError, ValueError) as error:
        raise BadFileError(f"{where}.config: {one_line(str(error))}") from None
    for what, size, warps in _blocks(config, num_sms):
        most = min(MAX_BLOCK, MAX_PER_THREAD * 32 * warps)
        if size > most:
            raise BadFileError(
                f"{where}.config has {what} of {size} elements for {warps} warps; expected {most} or fewer"
            )
    return entry


def _blocks(config: Config, num_sms: int) -> Iterator[tuple[str, int, int]]:
    """Yield per kernel step: description, element count and warps of its largest block."""
    steps: list[tuple[str, tuple[int, ...], int]]
    if isinstance(config, ScreenConfig):
        steps = [("a block", (config.block_b * LIMBS, config.block_v, config.block_d), config.num_warps)]
        rescored = (config.block_b, config.rescore_v, config.rescore_d)
        steps += [("a block", sides, config.rescore_warps) for sides in (rescored, (config.chunk, config.block_b))]
    else:
        splits = num_sms * config.ctas_per_sm
        if isinstance(config, ReadConfig):
            splits = min(MAX_SPLITS, max(config.min_splits, splits))
        tile = (config.block_b, config.block_v, *((config.block_d,) if isinstance(config, TileConfig) else ()))
        reduced = (next_power_of_2(max(1, splits)), config.reduce_rows)
        steps = [
            ("a block", tile, config.num_warps),
            ("a reduction", reduced, config.num_warps if config.one_launch else 1),
        ]
    for what, sides, warps in steps:
        second, largest = sorted(sides)[-2:]
        yield what, second * largest, warps
