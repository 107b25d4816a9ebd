"""What a tuned table is made of (``table.py``), and how each part is read from JSON, in bounds."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from .bounded_json import BoundedError, Reader, shorten, shown
from .kernels.tiles import MOST_TERMS, ReadConfig, ScreenConfig, TileConfig
from .work import Config, Path, path_of_config

MAX_BATCH = 1 << 16
MAX_US = 1e9
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes per element
DTYPES = tuple(ITEMSIZE)
# The largest value of a field. Beyond, no kernel compiles, or one takes minutes to.
MOST_OF_FIELD = {
    "block_b": 256,
    "block_v": 1 << 20,
    "block_d": 1 << 14,
    "num_warps": 32,
    "stages": 16,
    "ctas_per_sm": 128,
    "least_parts": 512,
    "reduce_rows": 256,
    "terms": MOST_TERMS,
    "hidden_warps": 32,
    "chunk": 1 << 12,
    "rescore_v": 1 << 12,
    "rescore_d": 1 << 14,
    "rescore_warps": 32,
    "rescore_stages": 16,
    "rescore_ctas_per_sm": 128,
}
MOST_OF_BLOCK = 1 << 20  # elements of one block of a Triton kernel
LAUNCHES: dict[str, type[Config]] = {Path.FUSED: TileConfig, Path.LOGITS: ReadConfig, Path.SCREENED: ScreenConfig}


@dataclasses.dataclass(frozen=True)
class Device:
    """name: as the driver gives it; "cpu" where kernels are interpreted. cc: compute capability, "9.0". sms:
    multiprocessors. l2_mb: L2 cache in MiB. smem_optin: bytes of shared memory that a program may ask for."""

    name: str
    cc: str
    sms: int
    l2_mb: int
    smem_optin: int


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """vocab: ids of the head, or of the first of ``tp`` shards. hidden: D. dtype: of the weight, one of ``DTYPES``.
    softcap: whether the logits have one."""

    vocab: int
    hidden: int
    dtype: str
    tp: int = 1
    softcap: bool = False


@dataclasses.dataclass(frozen=True)
class Choice:
    """path: a ``Path``, or the name of one that this release does not know. config: the fields of its ``TileConfig``,
    ``ReadConfig`` or ``ScreenConfig``; a field that is left out has its default."""

    path: str
    config: dict[str, Any]

    @classmethod
    def of(cls, launch: Config) -> Choice:
        return cls(path_of_config(launch).value, dataclasses.asdict(launch))

    @functools.cached_property
    def launch(self) -> Config | None:
        """None for a path that this release does not know. Raises ValueError for a field out of range."""
        kind = LAUNCHES.get(self.path)
        return None if kind is None else kind(**self.config)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What one batch size uses, and how that was decided. Times are microseconds per call, the whole path.

    use, default: keys of ``Table.configs``; default is "" where none was measured. us, se, n: median, its standard
    error, samples. gain: the share of the default's time that is saved, ``1 - us / default_us``. tied: keys that were
    not slower beyond noise. checked: how tokens were compared. clock_mhz: median SM clock, 0 where unknown.
    others: times of other paths and rivals in the same race. distribution_only: "flashinfer" where batches whose
    caller wants the distribution alone take that path instead of ``use``.
    """

    use: str
    us: float
    se: float
    n: int
    default: str = ""
    default_us: float = 0.0
    gain: float = 0.0
    tied: list[str] = dataclasses.field(default_factory=list)
    checked: str = ""
    clock_mhz: float = 0.0
    others: dict[str, float] = dataclasses.field(default_factory=dict)
    distribution_only: str = ""


def _blocks(launch: Config) -> list[tuple[int, ...]]:
    """The sides of each step's blocks: rows, ids and, where there is a sum, hidden elements."""
    if isinstance(launch, ReadConfig):
        return [(launch.block_b, launch.block_v)]
    if isinstance(launch, TileConfig):
        return [(launch.block_b, launch.block_v, launch.block_d)]
    rescored = (launch.block_b, launch.rescore_v, launch.rescore_d)
    return [(launch.block_b * launch.terms, launch.block_v, launch.block_d), rescored, (launch.chunk, launch.block_b)]


def _largest_sides(sides: tuple[int, ...]) -> tuple[int, int]:
    second, largest = sorted(sides)[-2:]
    return second, largest


def as_batch(key: Any) -> int:
    return int(key) if isinstance(key, str) and re.fullmatch(r"[1-9][0-9]{0,4}", key) else 0


class EntryReader(Reader):
    """From parsed JSON to the dataclasses."""

    def device(self, data: Any) -> Device:
        fields = self.object("device", data)
        cc = self.text("device.cc", self.required(fields, "cc", "device."))
        if not re.fullmatch(r"[0-9]{1,2}\.[0-9]", cc):
            self.fail("device.cc", cc, "a compute capability such as '9.0'")
        found = Device(
            self.text("device.name", self.required(fields, "name", "device."), least=1),
            cc,
            self.integer("device.sms", self.required(fields, "sms", "device."), 0, 1 << 16),
            self.integer("device.l2_mb", self.required(fields, "l2_mb", "device."), 0, 1 << 20),
            self.integer("device.smem_optin", self.required(fields, "smem_optin", "device."), 0, 1 << 24),
        )
        self.rest("device.", fields)
        return found

    def head(self, data: Any) -> HeadShape:
        fields = self.object("head", data)
        dtype = self.required(fields, "dtype", "head.")
        if dtype not in DTYPES:
            self.fail("head.dtype", dtype, f"one of {', '.join(DTYPES)}")
        found = HeadShape(
            self.integer("head.vocab", self.required(fields, "vocab", "head."), 1, (1 << 31) - 1),
            self.integer("head.hidden", self.required(fields, "hidden", "head."), 1, 1 << 24),
            dtype,
            self.integer("head.tp", fields.pop("tp", 1), 1, 1 << 16),
            self.boolean("head.softcap", fields.pop("softcap", False)),
        )
        self.rest("head.", fields)
        return found

    def choice(self, where: str, data: Any) -> Choice:
        fields = self.object(where, data)
        path = self.text(f"{where}.path", self.required(fields, "path", f"{where}."), least=1)
        config = self.object(f"{where}.config", self.required(fields, "config", f"{where}."))
        self.rest(f"{where}.", fields)
        kind = LAUNCHES.get(path)
        if kind is None:
            self.note(f"{where}: the path {path!r}")
            return Choice(path, self.free(f"{where}.config", config))
        known: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            place = f"{where}.config.{field.name}"
            if field.name not in config and field.default is not dataclasses.MISSING:
                continue
            value = self.required(config, field.name, f"{where}.config.")
            if field.type == "bool":
                known[field.name] = self.boolean(place, value)
            elif field.type == "int":
                known[field.name] = self.integer(place, value, 1, MOST_OF_FIELD.get(field.name, 1 << 20))
            else:
                known[field.name] = self.text(place, value)
        self.rest(f"{where}.config.", config)
        choice = Choice(path, known)
        try:
            launch = choice.launch
        except ValueError as error:
            raise BoundedError(f"{shorten(where)}.config: {shorten(str(error))}") from None
        assert launch is not None
        if any(largest * second > MOST_OF_BLOCK for second, largest in map(_largest_sides, _blocks(launch))):
            raise BoundedError(f"{shorten(where)}.config has a block of more than {MOST_OF_BLOCK} elements")
        return choice

    def buckets(self, where: str, data: Any, configs: dict[str, Choice]) -> dict[int, Bucket]:
        found = {}
        for name, fields in self.object(where, data).items():
            if not 1 <= (batch := as_batch(name)) <= MAX_BATCH:
                raise BoundedError(f"{shorten(where)} has the batch size {shown(name)}; expected 1 to {MAX_BATCH}")
            found[batch] = self.bucket(f"{where}.{name}", fields, configs)
        return dict(sorted(found.items()))

    def bucket(self, where: str, data: Any, configs: dict[str, Choice]) -> Bucket:
        fields = self.object(where, data)

        def key(place: str, value: Any) -> str:
            if not isinstance(value, str) or value not in configs:
                self.fail(place, value, "a key of configs")
            return value

        default = fields.pop("default", "")
        tied = self.list(f"{where}.tied", fields.pop("tied", []))
        others = self.object(f"{where}.others", fields.pop("others", {}))
        path = self.text(f"{where}.distribution_only", fields.pop("distribution_only", ""))
        if path not in ("", Path.FLASHINFER):
            self.note(f"{where}.distribution_only: the path {path!r}")
            path = ""
        found = Bucket(
            use=key(f"{where}.use", self.required(fields, "use", f"{where}.")),
            us=self.number(f"{where}.us", self.required(fields, "us", f"{where}."), 1e-6, MAX_US),
            se=self.number(f"{where}.se", self.required(fields, "se", f"{where}."), 0.0, MAX_US),
            n=self.integer(f"{where}.n", self.required(fields, "n", f"{where}."), 0, 1 << 31),
            default=key(f"{where}.default", default) if default != "" else "",
            default_us=self.number(f"{where}.default_us", fields.pop("default_us", 0.0), 0.0, MAX_US),
            gain=self.number(f"{where}.gain", fields.pop("gain", 0.0), -1e6, 1.0),
            tied=[key(f"{where}.tied[{place}]", value) for place, value in enumerate(tied)],
            checked=self.text(f"{where}.checked", fields.pop("checked")),
            clock_mhz=self.number(f"{where}.clock_mhz", fields.pop("clock_mhz", 0.0), 0.0, 1e5),
            others={name: self.number(f"{where}.others.{name}", us, 0.0, MAX_US) for name, us in others.items()},
            distribution_only=path,
        )
        self.rest(f"{where}.", fields)
        return found
