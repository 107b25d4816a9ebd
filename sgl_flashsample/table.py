"""Tuned tables, ``flashsample-tune/1``: what was measured for one device and one LM head, as JSON.

A table is data from elsewhere: everything in it is checked, its size, depth and numbers are bounded, and what is wrong
is named in one line. A table decides how the work is cut, never a token. Reading one needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from .bounded_json import BoundedError, parse, shorten
from .table_entries import Bucket, Choice, Device, EntryReader, HeadShape, as_batch
from .work import Work

__all__ = ["SCHEMA", "Bucket", "Choice", "Device", "HeadShape", "Table", "TableError", "file_name"]

SCHEMA = "flashsample-tune/1"
MAX_BYTES = 1 << 20


class TableError(ValueError):
    """A table that cannot be read; the message is one line that names what is wrong."""


@dataclasses.dataclass(frozen=True)
class Table:
    """The tuned table of one device and one head, all feature classes in it.

    tool: versions of what measured it ("sgl_flashsample", "noise"). env: versions of triton, torch, cuda, driver, ...
    measure: how. kernels: per path "src" (its ``sources_hash``) and "space". configs: what buckets name.
    classes: per ``Work`` value, batch size -> bucket. rejected: "config", "why" and "detail" of each configuration that
    was not allowed to race. notes: what was ignored while reading.
    """

    device: Device
    head: HeadShape
    configs: dict[str, Choice]
    classes: dict[str, dict[int, Bucket]]
    tool: dict[str, Any] = dataclasses.field(default_factory=dict)
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    measure: dict[str, Any] = dataclasses.field(default_factory=dict)
    effort: str = "quick"
    kernels: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    rejected: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def file_name(self) -> str:
        return file_name(self.device.name, self.head)

    @classmethod
    def loads(cls, text: str) -> Table:
        """The table that ``text`` holds. Raises TableError."""
        try:
            return _Reader().table(parse(text, MAX_BYTES))
        except BoundedError as error:
            raise TableError(str(error)) from None

    def dumps(self) -> str:
        """The table's one text: keys sorted, batch sizes by size, indented by two. Raises TableError where ``loads``
        would."""
        try:
            text = json.dumps(_ordered(self._data()), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise TableError(f"the table cannot be written: {shorten(str(error))}") from None
        Table.loads(text)
        return text

    def _data(self) -> dict[str, Any]:
        sections = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}
        return sections | {
            "schema": SCHEMA,
            "device": dataclasses.asdict(self.device),
            "head": dataclasses.asdict(self.head),
            "configs": {key: dataclasses.asdict(choice) for key, choice in self.configs.items()},
            "classes": {
                work: {str(batch): _bucket_data(bucket) for batch, bucket in buckets.items()}
                for work, buckets in self.classes.items()
            },
        }


def file_name(device_name: str, head: HeadShape) -> str:
    """Where the table of this device and head is looked for, in every folder."""
    device = re.sub(r"[^A-Za-z0-9.-]+", "_", device_name)
    softcap = ",softcap" if head.softcap else ""
    return f"fs1,device={device},V={head.vocab},D={head.hidden},tp={head.tp},w={head.dtype}{softcap}.json"


def _ordered(value: Any) -> Any:
    """Keys in their order: batch sizes by size, everything else by name."""
    if not isinstance(value, dict):
        return [_ordered(item) for item in value] if isinstance(value, list | tuple) else value
    # A key that is no text is refused when the text is read back.
    return {str(key): _ordered(value[key]) for key in sorted(value, key=lambda key: (as_batch(key), str(key)))}


def _bucket_data(bucket: Bucket) -> dict[str, Any]:
    data = dataclasses.asdict(bucket)
    for name in ("us", "se", "default_us", "gain", "clock_mhz"):
        data[name] = _as_float(data[name])
    data["others"] = {name: _as_float(us) for name, us in data["others"].items()}
    if not data["distribution_only"]:
        del data["distribution_only"]
    return data


def _as_float(value: Any) -> Any:
    return float(value) if type(value) is int else value


class _Reader(EntryReader):
    """From parsed JSON to the dataclasses."""

    def table(self, data: Any) -> Table:
        top = self.object("the table", data)
        schema = top.pop("schema", None)
        if not isinstance(schema, str) or not re.fullmatch(rf"{SCHEMA}(\.[0-9]{{1,3}})?", schema):
            self.fail("schema", schema, repr(SCHEMA))
        configs = self.each("configs", self.required(top, "configs"), self.choice)
        classes: dict[str, dict[int, Bucket]] = {}
        for work, buckets in self.object("classes", self.required(top, "classes")).items():
            if work not in list(Work):
                self.note(f"classes.{work}")
                continue
            classes[work] = self.buckets(f"classes.{work}", buckets, configs)
        table = Table(
            device=self.device(self.required(top, "device")),
            head=self.head(self.required(top, "head")),
            configs=configs,
            classes=classes,
            tool=self.free("tool", self.object("tool", top.pop("tool", {}))),
            env=self.texts("env", top.pop("env", {})),
            measure=self.free("measure", self.object("measure", top.pop("measure", {}))),
            effort=self.text("effort", top.pop("effort", "quick")),
            kernels=self.each("kernels", top.pop("kernels", {}), self.texts),
            rejected=[
                self.rejected(f"rejected[{place}]", entry)
                for place, entry in enumerate(self.list("rejected", top.pop("rejected", [])))
            ],
            provenance=self.free("provenance", self.object("provenance", top.pop("provenance", {}))),
        )
        self.rest("", top)
        return dataclasses.replace(table, notes=tuple(self.notes))

    def texts(self, where: str, value: Any) -> dict[str, str]:
        return self.each(where, value, self.text)

    def rejected(self, where: str, data: Any) -> dict[str, Any]:
        fields = self.object(where, data)
        found = {
            "config": self.free(f"{where}.config", self.object(f"{where}.config", fields.pop("config", {}))),
            "why": self.text(f"{where}.why", self.required(fields, "why", f"{where}.")),
            "detail": self.text(f"{where}.detail", fields.pop("detail")),
        }
        self.rest(f"{where}.", fields)
        return found
