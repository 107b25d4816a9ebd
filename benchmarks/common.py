"""Shared by the benchmarks: heads, entries of the registry, command lines and result files. Import it first.

With ``--dry-run`` kernels are interpreted on the CPU and shapes are small: everything runs, the times mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for ``lab``, which is not installed

if "--dry-run" in sys.argv:
    from lab import interpreter

    interpreter.turn_on()  # before Triton is imported

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from sources import state

from sgl_flashsample import __version__
from sgl_flashsample.autotune.timing import describe_machine
from sgl_flashsample.autotune.workload import make_weight
from sgl_flashsample.files import first_line, one_line, write_whole

DRY_RUN = "--dry-run" in sys.argv
RESULTS = Path(__file__).resolve().parent / "results"
MAX_REASON = 160  # characters


@dataclasses.dataclass(frozen=True)
class Shape:
    """D hidden elements, V ids; a final softcap or None."""

    hidden: int
    vocab: int
    softcap: float | None = None

    def __str__(self) -> str:
        return f"{self.hidden}x{self.vocab}"

    @property
    def fields(self) -> dict[str, int]:
        return {"D": self.hidden, "V": self.vocab}

    def weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``[V, D]``, the head that the tuner measures on, whatever the profile of the hidden states. dtype: ``DTYPE``
        when None."""
        return make_weight(self.vocab, self.hidden, dtype or DTYPE, DEVICE)


DEVICE = torch.device("cpu" if DRY_RUN or not torch.cuda.is_available() else "cuda")
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
# Heads beside quantised ones have 2-byte hidden states, as these do. The interpreter's bfloat16 is wrong.
HALF_DTYPE = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
SHAPES = (
    [Shape(48, 777, 30.0)]
    if DEVICE.type == "cpu"
    else [Shape(4096, 151936), Shape(2048, 151936), Shape(8192, 128256), Shape(2880, 201088), Shape(3840, 262144, 30.0)]
)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One benchmark, as ``run.py`` runs it.

    about: the text of ``--help``. measure: takes the options and the result, fills the result and returns the exit
    code. options: adds options to the parser. prepare: completes the options; raises ValueError where they do not
    fit. sections: the choices of ``--only``; without it ``default``, or all. place: the fields that tell rows apart;
    cell: those of them that an entry of ``env.not_run`` lacks where a whole section was not measured.
    """

    about: str | None
    measure: Callable[[Any, Result], int]
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    prepare: Callable[[Any], None] = lambda options: None
    sections: tuple[str, ...] = ()
    default: tuple[str, ...] = ()
    place: tuple[str, ...] = ()
    cell: tuple[str, ...] = ()
    needs_gpu: bool = True

    def parser(self, name: str) -> argparse.ArgumentParser:
        """--out and --keep; --dry-run and --fast where a GPU is needed; ``--only``, and the options of its own."""
        lines_stay = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(prog=f"run.py {name}", description=self.about, formatter_class=lines_stay)
        parser.allow_abbrev = False
        parser.add_argument("--out", type=Path, required=True, help="the JSON file to write, as results come")
        if self.needs_gpu:
            parser.add_argument("--fast", action="store_true", help="a part of the cells, in about a third of the time")
            parser.add_argument("--dry-run", action="store_true", help="small shapes, interpreted; needs no GPU")
            if not DRY_RUN and DEVICE.type != "cuda" and "-h" not in sys.argv and "--help" not in sys.argv:
                parser.error("no CUDA device; --dry-run works without one")
        parser.add_argument("--keep", action="store_true", help="keep the file's results of what is not measured now")
        if self.sections:
            default = list(self.default or self.sections)
            parser.add_argument("--only", nargs="+", choices=self.sections, default=default, metavar="SECTION")
        self.options(parser)
        return parser

    def key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        """Equal for rows of one cell."""
        return tuple(map(row.get, self.place))

    def fills(self, row: dict[str, Any], gap: dict[str, Any]) -> bool:
        """True if ``row`` measures a cell that ``gap`` names, or one of its section."""
        fields = [field for field in self.place if field in gap or field not in self.cell]
        return "path" not in gap and bool(fields) and all(row.get(field) == gap.get(field) for field in fields)


class Result:
    """A result file, written again with each ``add`` and ``put``: ``env`` (what results depend on, and ``not_run``),
    ``runs`` (command, date and code of each), ``rows`` with the place of their run, and ``sections``.

    kept: the file's content so far, if it is kept; its rows and sections stay until they are measured anew. before: its
    environment.
    """

    def __init__(self, file: Path, benchmark: Benchmark, kept: dict[str, Any]) -> None:
        self.file, self._benchmark = file, benchmark
        self.before: dict[str, Any] = kept.get("env", {})
        self.run: dict[str, Any] = {"date": datetime.date.today().isoformat(), "command": command_line()} | state()
        self.env: dict[str, Any] = describe_machine(DEVICE) | {"sgl_flashsample": __version__} | self.run
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            self.env["sglang"] = importlib.metadata.version("sglang")
        self.env["not_run"] = list(self.before.get("not_run", []))
        self.data: dict[str, Any] = kept | {"env": self.env, "runs": [*kept.get("runs", []), self.run]}
        if kept and (device := self.before.get("device")) != self.env["device"]:
            raise ValueError(f"{file} is of {device}; expected {self.env['device']}")

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.data.setdefault("rows", [])

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add ``rows`` in the place of those of the same cells; what they measure is not missing any more."""
        new = [row | {"run": len(self.data["runs"]) - 1} for row in rows]
        key, fills = self._benchmark.key, self._benchmark.fills
        replaced = set(map(key, new))
        self.data["rows"] = [row for row in self.rows if key(row) not in replaced] + new
        gaps = self.env["not_run"]
        gaps[:] = [gap for gap in gaps if not any(fills(row, gap) for row in new)]
        self.write()

    def put(self, section: str, value: dict[str, Any], name: str | None = None) -> None:
        """Put a section, or its part of the head ``name``, in the place of its last value."""
        part = value | {name: self.run[name] for name in ("date", "command", "commit", "drawing_code")}
        sections = self.data.get("sections", {})
        sections[section] = part if name is None else sections.get(section, {}) | {name: part}
        gaps = self.env["not_run"]
        gaps[:] = [gap for gap in gaps if (gap.get("section"), gap.get("head")) != (section, name)]
        self.data["sections"] = {one: sections[one] for one in self._benchmark.sections if one in sections}
        self.write()

    def miss(self, reason: str | BaseException, **gap: Any) -> None:
        """Record what was not measured, by the last reason; not a cell that the file has."""
        words = reason if isinstance(reason, str) else reason_of(reason)
        print(f"not run: {', '.join(map(str, gap.values()))}: {words}", flush=True)
        cell, fills = self._benchmark.cell, self._benchmark.fills
        if cell and not gap.keys().isdisjoint(cell) and any(fills(row, gap) for row in self.rows):
            return
        others = [other for other in self.env["not_run"] if {**other, "reason": None} != {**gap, "reason": None}]
        self.env["not_run"][:] = [*others, {**gap, "reason": words}]

    def write(self) -> None:
        write_result(self.file, self.data)

    def close(self) -> int:
        """Write the file. Returns the exit code: 1 where something was not measured."""
        self.write()
        return int(bool(self.env["not_run"]))


def command_line() -> str:
    """The command of this process, without the folders of this machine."""
    return " ".join(["python", *(re.sub(r"(?<![^=:])/([^=:]*/)?", "", word) for word in sys.argv)])


def reason_of(error: BaseException) -> str:
    """One line for a result file: why something was not measured."""
    return one_line(first_line(error), MAX_REASON)


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """The times of one race, for who watches; over the floor where that is known."""
    # A floor is of one head.
    floor = next((row["us"] for row in rows if row["path"] == "read" and "dtype" not in rows[0]), None)
    print(title, flush=True)
    for row in rows:
        over = f" {row['us'] / floor:7.3f} of the floor" if floor else ""
        ratio = f", {1 + row['ratio']['off']:.3f} of {row['older_us']:.1f}" if "ratio" in row else ""
        path = " ".join(filter(None, (row.get("dtype"), row["path"])))
        line = f"  {row['sampling']:12} {path:18} {row['us']:8.1f} +- {row['us_spread']:5.1f} us{over}{ratio}"
        print(f"{line}  {row['form']}{', picked' * row.get('picked', False)}", flush=True)


def write_result(file: Path, data: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, dumps(data))


def dumps(data: dict[str, Any]) -> str:
    """JSON with one row per line."""
    return "\n".join(_lines(data, "")) + "\n"


def _lines(value: Any, indent: str) -> Iterator[str]:
    if not _has_rows(value):
        yield indent + json.dumps(value)
        return
    items = list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]
    yield indent + "[{"[isinstance(value, dict)]
    for place, (name, item) in enumerate(items):
        lines = list(_lines(item, indent + " "))
        if name is not None:
            lines[0] = f"{indent} {json.dumps(name)}: {lines[0].lstrip()}"
        lines[-1] += "," if place + 1 < len(items) else ""
        yield from lines
    yield indent + "]}"[isinstance(value, dict)]


def _has_rows(value: Any) -> bool:
    """True if ``value`` is a list of objects, or has one somewhere inside."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, dict) for item in value)
    return isinstance(value, dict) and any(map(_has_rows, value.values()))


def read_result(file: Path, made_by: str) -> dict[str, Any]:
    """A file of ``write_result``. Raises ValueError, in one line, for anything else."""
    try:
        data = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file} is no result of benchmarks/{made_by}: {reason_of(error)}") from None
    if not isinstance(data, dict) or not isinstance(data.get("env"), dict):
        raise ValueError(f"{file} is no result of benchmarks/{made_by}: it has no env")
    return data
