"""``tune list | show | explain | diff | merge | lint``: the commands that need no GPU. Loads no torch.

Tables are read through ``load_table`` alone, which is bounded and waits for nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table as Grid

from ..cost_model import MULTIPLY_ADDS
from ..defaults import MODELLED, family_of
from ..dispatch import DENSE_ROWS, DispatchTable
from ..exit_codes import FAILED, OK
from ..files import check_output, write_whole
from ..kernels.config import ScreenConfig
from ..kinds import BATCH_KINDS, KIND_NAMES, MIN_RACED_BYTES, BatchKind, Config, path_of
from ..switches import FILE_VARIABLE, text
from ..tables.lookup import (
    COMPARED,
    NOTED,
    SIMULATED,
    TableFile,
    Target,
    bucket_for,
    dispatch_of,
    find,
    folders,
    known_stale,
    load_table,
    match,
    tables_in,
    unsupported_config,
    unusable_sizes,
)
from ..tables.schema import ITEMSIZE, Device, HeadShape, Table, file_name
from .decisions import (
    CONFIDENT,
    Decision,
    builtin_config,
    by_size,
    decisions,
    device_and_head,
    differently_compiled,
    larger_screen,
    same_defaults,
    screen_cost,
    stored,
    traits_of,
    why_apart,
)
from .labels import key_of, known_device
from .race import GAIN_TOLERANCE, gains_apart
from .staleness import Compilers


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def read(file: str | os.PathLike[str]) -> Table:
    """The table in ``file``. Raises ValueError for a file that is no table."""
    table, reason = load_table(file)
    if table is None:
        raise ValueError(f"{file}: {reason}")
    return table


def screen_line(table: Table) -> str:
    """The cost of a screen of this head, and the kinds that have one; empty for a table without any."""
    kinds = [name for name in table.kinds if KIND_NAMES[name].screen]
    if not kinds:
        return ""
    size, rows = screen_cost(table)
    memory = f"{size / 1e9:.2f} GB beside the head, for up to {rows} rows" if size else "of unknown size"
    return f"screen: {memory} ({', '.join(kinds)})"


class _Output:
    """Prints lines as wide as the terminal, or as COLUMNS says; 100 columns without both. A path is never broken."""

    def __init__(self) -> None:
        self._width = shutil.get_terminal_size((100, 24)).columns
        self._console = Console(width=self._width, highlight=False, markup=False, emoji=False, color_system=None)

    def print(self, what: str | Grid) -> None:
        if isinstance(what, str):
            lines = []
            for line in what.split("\n"):
                indent = " " * (10 if re.match(r"\S+ {2,}", line) else 2)  # below what follows a label
                lines += _wrapped(line, self._width, indent) or [""]
        else:
            with self._console.capture() as captured:
                self._console.print(what)
            lines = captured.get().rstrip("\n").split("\n")
        print(*(line.rstrip() for line in lines), sep="\n")


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    return textwrap.wrap(line, width, subsequent_indent=indent, **options)


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> Grid:
    """A table for the console. left: the columns that are text."""
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=None)
    for column in columns:
        grid.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def list_tables(as_json: bool = False) -> None:
    """Print the tables in the folders where servers look, in that order."""
    lines, places = [], []
    for folder, source in folders(os.environ):
        places.append(f"{source}: {folder}")
        for path, table, reason in tables_in(folder):
            line: dict[str, Any] = {"file": str(path), "source": source, "error": reason}
            if table is not None:
                device, head = device_and_head(table)
                confirmed = sum(len(sizes.rows) for sizes in table.confirmed.values())
                line |= {"device": device.name, "head": str(head), "effort": table.effort}
                line |= {"choices": len(table.entries), "confirmed": confirmed, "stale": _known_state(table)}
            lines.append(line)
    if as_json:
        print(json.dumps(lines, indent=2))
        return
    console = _Output()
    columns = ("device", "head", "effort", "choices", "built-in", "where", "stale")
    told = ("device", "head", "effort", "choices", "confirmed", "source", "stale")
    rows = [tuple(str(line[name]) for name in told) for line in lines if not line["error"]]
    console.print(_grid(columns, rows, ("device", "head", "effort", "where", "stale")))
    if rows:
        console.print("stale: as far as is known without compiling; `tune show FILE` compiles and compares")
    for line in lines:
        if line["error"]:
            console.print(f"not used: {line['file']}: {line['error']}")
    for place in places:
        console.print(place)


def _known_state(table: Table) -> str:
    """The reasons why a server would not trust the times of a table, as far as no compilation tells; or empty."""
    return SIMULATED if table.simulated else "; ".join(known_stale(table))


def show(file: str, as_json: bool = False, kind: str | None = None) -> None:
    """Print a table for people. kind: only this one."""
    table, console = read(file), _Output()
    with Compilers(_say) as compilers:
        staleness = compilers.staleness(table)
    if as_json:
        sizes = [f"{kind} {rows}" for kind, rows in staleness.sizes]
        state = {"stale": staleness.lines, "stale_sizes": sizes, "unknown": staleness.unknown}
        answer = {"file": file, "notes": table.notes, **state}
        print(json.dumps(answer | {"table": json.loads(table.dumps())}, indent=2))
        return
    device, head = device_and_head(table)
    console.print(f"{device.name} (compute capability {device.cc}, {device.sms} SMs), head {head}")
    versions = ", ".join(f"{name} {version}" for name, version in (table.tool | table.env).items())
    console.print(f"effort {table.effort}; {versions}")
    if table.simulated:
        console.print(SIMULATED)
    console.print(f"machine code: {staleness.words(table)}")
    console.print(f"built-in choices: {'as installed here' if same_defaults(table) else 'not those installed here'}")
    for line in (screen_line(table), *(f"note: {note}" for note in table.notes)):
        if line:
            console.print(line)
    columns = ("rows", "us", "+-", "built-in", "gain", "takes", "against", "tied", "others", "")
    for name in [str(each) for each in BATCH_KINDS if str(each) in table.kinds and kind in (None, str(each))]:
        measured = [one for one in decisions(table) if str(one.kind) == name]
        lines = [(*_shown(one), "stale" if (one.kind, one.rows) in staleness.sizes else "") for one in measured]
        console.print(f"\n{name}")
        console.print(_grid(columns, lines, ("takes", "others", "")))
    if table.rejected and kind is None:
        reasons = sorted(table.rejected.items(), key=lambda item: -item[1])
        console.print(f"\nrejected: {', '.join(f'{count} {reason}' for reason, count in reasons)}")


def _shown(one: Decision) -> tuple[str, ...]:
    entry = one.entry
    return (
        str(one.rows),
        f"{one.us:.1f}",
        f"{entry.se:.2f}" if entry.n else "",
        f"{entry.default_us:.1f}" if entry.default_us else "",
        f"{entry.gain:.1%}" if entry.default else "",
        one.takes,
        "?" if entry.against is None else str(entry.against),
        str(len(entry.tied) or ""),
        ", ".join(f"{name} {us:.1f}" for name, us in entry.others.items()),
    )


def explain(
    file: str | None, device_name: str | None, head: HeadShape | None, rows: int, kind: str | None, as_json: bool
) -> None:
    """Print the choice for a batch, the table that it comes from, and why: for all kinds, as of a server with default
    settings, or for one. file: a table; None for the table that a server with such a device and head would find."""
    warnings: list[str] = []
    if file is not None:
        table = read(file)
        device, head = device_and_head(table)
        # The target is the machine that it was measured on, with the kernels that are installed here.
        target = Target(device, head, table.env)
        how, differs = match(msgspec.structs.replace(table, simulated=False), target)
        assert how is not None, "a table is for its own device and head"
        differs = (SIMULATED, *differs) if table.simulated else differs
        table_file: TableFile | None = TableFile(table, file, "the named file", how, differs)
    else:
        if device_name is None or head is None:
            raise ValueError("there is no GPU here; expected --device NAME and a head to look for a table, or a table")
        target = _target_named(device_name, head)
        device = target.device
        table_file, warnings = find(target)
    traits, dispatch = traits_of(device, head), None
    if table_file is not None and traits is not None:
        dispatch, _ = dispatch_of(table_file, target, traits)
    # A server with default settings has a screen where a tuned table says that it wins, or a race at its start; a batch
    # that cannot have it (logprobs, a large top-k) is of the kinds without one.
    # A device that nothing describes may be any GPU.
    described = device.sms > 0
    raced = (traits is not None or not described) and not (table_file is not None and table_file.knows_screens)
    raced = raced and not head.is_quantised and head.num_bytes >= MIN_RACED_BYTES
    screened = dispatch is not None and not raced and dispatch.screened_rows(DENSE_ROWS, measured=True) > 0
    kinds = [each for each in BATCH_KINDS if screened or not each.screen] if kind is None else [KIND_NAMES[kind]]
    kinds.sort(key=lambda each: not each.screen)
    batches = [_explained(table_file, dispatch, target, rows, each) for each in kinds]
    if as_json:
        about = {name: table_file and getattr(table_file, name) for name in ("file", "match", "source")}
        screens = {"screen": screened, "screen_raced": raced}
        answer = {"rows": rows, **about, **screens, "batches": batches, "warnings": warnings}
        print(json.dumps(answer, indent=2))
        return
    console = _Output()
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if table_file is None:
        places = ", ".join(str(folder) for folder, _ in folders(os.environ))
        console.print(f"table     none: {file_name(device.name, head)} is not in {places}")
    else:
        because = f": {'; '.join(table_file.differs)}" if table_file.differs else ""
        console.print(f"table     {table_file.file} ({table_file.match}{because}; {table_file.source})")
    console.print(f"for       {device.name}, head {head}")
    if kind is not None:
        _print_batch(console, batches[0])
        return
    with_screen = "keeps a screen, for this table says that it wins" if screened else "keeps no screen"
    if raced:
        because = "there is no table" if table_file is None else f"this table is {table_file.match}"
        with_screen = f"races a screen at its start, for {because}, and uses it where it is faster"
        with_screen += "; for which batches is not known before"
        with_screen += "" if described else " (if there are kernels for this GPU, which is not known here)"
    console.print(f"batch     {_rows(rows)}; a server with default settings {with_screen}")
    lines = [(b["kind"], f"{b['us']:.1f}" if b.get("us") else "", str(b["takes"]), b["why"]) for b in batches]
    console.print(_grid(("kind", "us", "takes", "why"), lines, ("kind", "takes", "why")))


def _target_named(name: str, head: HeadShape) -> Target:
    """The target of a device that this machine does not have. The device is described by the first table found for its
    name, else by ``labels.DEVICES``; the versions are those that are installed here."""
    env: dict[str, str] = {}
    for package in (*COMPARED, *NOTED):
        try:
            env[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    known = known_device(name) or Device(name=name, cc="0.0", sms=0, l2_mb=0, smem_optin=0)
    named = text(FILE_VARIABLE)
    paths = [named] if named else []
    paths += [str(folder / file_name(known.name, head)) for folder, _ in folders(os.environ)]
    for path in paths:
        table, _ = load_table(path)
        if table is not None and table.device is not None and table.device.name == known.name:
            return Target(table.device, head, table.env | env)
    return Target(known, head, env)


def _by_cost_model(target: Target) -> list[str]:
    """A part of the reason for a built-in choice, where a server has a cost model of the GPU."""
    cc = target.device.cc
    capability, itemsize = tuple(map(int, cc.split("."))), ITEMSIZE[target.head.dtype]
    if capability in MULTIPLY_ADDS and (family_of(cc), itemsize) in MODELLED:
        return ["a server on this GPU takes the fused or the logits path by a cost model of its clocks"]
    return []


def _explained(
    table_file: TableFile | None, dispatch: DispatchTable | None, target: Target, rows: int, kind: BatchKind
) -> dict[str, Any]:
    """The choice for one batch, and why. dispatch: of the table; None without one and on a device without kernels."""
    answer: dict[str, Any] = {"kind": str(kind), "rows": rows, "size": None, "of": str(kind)}
    by_cost = _by_cost_model(target)
    if table_file is None:
        config = builtin_config(target.device, target.head, rows, kind)
        return answer | _taken(config, "; ".join(["the built-in choice, without a table", *by_cost]))
    if dispatch is None:
        return answer | _taken(None, f"no kernels for compute capability {target.device.cc}")
    choice = dispatch.choice(rows, kind)
    if rows > DENSE_ROWS:
        why = f"the built-in choice: a table serves batches of {DENSE_ROWS} rows or fewer"
        return answer | _taken(choice.config, why)
    table, unusable = table_file.table, unusable_sizes(table_file.table, target)
    looked_up = [(each, bucket_for(table.sizes(str(each)), rows)) for each in choice.asked]
    reasons = [
        f"size {size} of {each} cannot be used: {unusable[each, size]}"
        for each, size in looked_up
        if size is not None and (each, size) in unusable
    ]
    served, size = looked_up[-1]
    if not choice.measured:
        measured = ", ".join(map(str, table.sizes(str(kind)))) or "none"
        why = f"the built-in choice: no size from {rows} to {2 * rows} in its tile class (measured: {measured})"
        if isinstance(choice.config, ScreenConfig):
            why = f"the built-in choice, the screened path: the table has nothing of {served} for it"
        return answer | _taken(choice.config, "; ".join([why, *by_cost, *reasons]))
    assert size is not None
    why = (
        "its own size"
        if size == rows
        else f"size {size}, the next measured one of its tile class, not above {2 * rows}"
    )
    why += "" if served == kind else f", of {served} (there is none of {kind})"
    one = by_size(table)[served, size]
    evidence = {name: value for name, value in msgspec.to_builtins(one.entry).items() if name not in ("kind", "rows")}
    answer |= evidence | {"size": size, "of": str(served)}
    if one.confirmed:
        return answer | _taken(choice.config, f"the built-in choice, confirmed: {why}")
    return answer | _taken(choice.config, "; ".join([why, *reasons])) | {"takes": one.takes}


def _taken(config: Config | None, why: str) -> dict[str, Any]:
    """The fields of an answer about a choice. config: None on a device without built-in choices."""
    if config is None:
        return {"takes": "the built-in choice", "why": why}
    return {"takes": key_of(config), "path": path_of(config).value, "config": dataclasses.asdict(config), "why": why}


def _print_batch(console: _Output, answer: dict[str, Any]) -> None:
    console.print(f"batch     {_rows(answer['rows'])}, {answer['kind']}: {answer['why']}")
    console.print(f"takes     {answer['takes']}")
    if answer.get("us"):
        clock = f", {answer['clock_mhz']:.0f} MHz" if answer.get("clock_mhz") else ""
        noise = f" +- {answer.get('se', 0.0):.2f} us ({answer['n']} samples{clock})" if "n" in answer else " us"
        console.print(f"expected  {answer['us']:.1f}{noise}")
    if answer.get("default"):
        gain = answer.get("gain", 0.0)
        console.print(f"built-in  {answer.get('default_us', 0.0):.1f} us ({answer['default']}); gain {gain:.1%}")
    if answer.get("us"):
        console.print(f"against   {_against(answer.get('against'))}")
    if answer.get("tied"):
        console.print(f"tied      {'; '.join(answer['tied'])}")
    if answer.get("others"):
        console.print(f"others    {', '.join(f'{name} {us:.1f} us' for name, us in answer['others'].items())}")
    if answer.get("checked"):
        console.print(f"checked   {answer['checked']}")


def _rows(rows: int) -> str:
    return f"{rows} row{'s' * (rows != 1)}"


def _against(others: int | None) -> str:
    if others is None:
        return "an unknown number of other configurations"
    return "no other configuration" if not others else f"{others} other configuration{'s' * (others > 1)}"


def _paired(a: Table, b: Table) -> Iterator[tuple[BatchKind, int, Decision | None, Decision | None]]:
    """Every size that either table has, in their order."""
    first, second = by_size(a), by_size(b)
    for kind, rows in sorted(first.keys() | second.keys(), key=lambda at: (BATCH_KINDS.index(at[0]), at[1])):
        yield kind, rows, first.get((kind, rows)), second.get((kind, rows))


def _require_same_head(a: Table, b: Table, file_a: str, file_b: str) -> None:
    if a.head != b.head:
        raise ValueError(f"{file_a} is for head {a.head}, {file_b} for {b.head}")


def diff(file_a: str, file_b: str, as_json: bool = False, every: bool = False) -> int:
    """Print the differences of two tables of one head, and whether their noise explains them. every: also the sizes
    that agree. Returns 1 where a size has another choice, a time beyond noise, or is in one of them alone."""
    a, b = read(file_a), read(file_b)
    _require_same_head(a, b, file_a, file_b)
    sizes, recompiled = [], differently_compiled(a, b)
    for kind, rows, mine, theirs in _paired(a, b):
        line: dict[str, Any] = {"kind": str(kind), "rows": rows, "a": mine and mine.takes, "b": theirs and theirs.takes}
        if mine is not None and theirs is not None and mine.us and theirs.us:
            line["ratio"] = theirs.us / mine.us
            line["se"] = line["ratio"] * math.hypot(mine.entry.se / mine.us, theirs.entry.se / theirs.us)
            line["within_noise"] = not mine.beyond_noise(theirs)
            line["same_code"] = (kind, rows) not in recompiled
        sizes.append(line)
    environment = _environment(a, b)
    differ = any(line["a"] != line["b"] or not line.get("within_noise", True) for line in sizes)
    code = FAILED if differ else OK
    if as_json:
        print(json.dumps({"environment": environment, "sizes": sizes}, indent=2))
        return code
    console = _Output()
    for name, (first, second) in environment.items():
        console.print(f"{name}: {first} -> {second}")
    both = [line for line in sizes if line["a"] is not None and line["b"] is not None]
    for line in sizes:
        same = line["a"] == line["b"]
        choice = "same choice" if same else f"{line['a']} -> {line['b']}"
        choice += "" if line.get("same_code", True) else ", compiled to other machine code"
        place = f"{line['kind']} {line['rows']}:"
        if line not in both:
            console.print(f"{place:20} only in {'B' if line['a'] is None else 'A'}: {line['a'] or line['b']}")
        elif every or not same or not line.get("within_noise", True):
            times = "no times"
            if "ratio" in line:
                faster = "B slower" if line["ratio"] > 1 else "B faster"
                noise = "within noise" if line["within_noise"] else faster
                times = f"us B/A {line['ratio']:.4f} +- {line['se']:.4f}, {noise}"
            console.print(f"{place:20} {times}; {choice}")
    changed = sum(line["a"] != line["b"] for line in both)
    apart = sum(not line.get("within_noise", True) for line in both)
    console.print(
        f"{len(both)} sizes in both: {changed} with another choice, {apart} with a time beyond noise "
        f"({CONFIDENT} combined standard errors)"
    )
    return code


def _environment(a: Table, b: Table) -> dict[str, list[Any]]:
    """Differences beside the sizes: {name: [in A, in B]}."""
    both: list[dict[str, Any]] = []
    for table in (a, b):
        device, _ = device_and_head(table)
        answer = {"device": device.name, "SMs": device.sms, "effort": table.effort, "built-in choices": table.defaults}
        both.append(answer | table.tool | table.env | table.measure)
    first, second = both
    names = [*first, *(name for name in second if name not in first)]
    return {name: [first.get(name), second.get(name)] for name in names if first.get(name) != second.get(name)}


def merge(file_a: str, file_b: str, out: Path, strict: bool = False, as_json: bool = False) -> None:
    """Write two tables of one device and head as one. out: a file, or a folder for a file with the name that servers
    look for. strict: raise ValueError where a size has another choice in B."""
    a, b = read(file_a), read(file_b)
    _require_same_head(a, b, file_a, file_b)
    if a.device != b.device:
        raise ValueError(f"{file_a} is for {_words(a.device)}, {file_b} for {_words(b.device)}")
    if apart := why_apart(a, b):
        raise ValueError(f"the tables were {apart}; tune anew instead")
    for kind, rows, mine, theirs in _paired(a, b):
        if strict and mine is not None and theirs is not None and mine.takes != theirs.takes:
            raise ValueError(f"{kind} {rows} takes {mine.takes} in A and {theirs.takes} in B (--strict)")
    merged, taken, added = joined(a, b)
    out = out / merged.file_name if out.is_dir() else out
    check_output(out, "--out", "a tuned table", [file_a, file_b])
    try:
        write_whole(out, merged.dumps())
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror or error}") from None
    total = len(list(decisions(merged)))
    if as_json:
        print(json.dumps({"file": str(out), "sizes": total, "better_in_b": taken, "only_in_b": added}))
        return
    print(f"{out}: {total} sizes, {taken} of them better in {file_b}, {added} only there")


def _words(device: Device | None) -> str:
    assert device is not None  # a tuned table has one
    sizes = f"{device.sms} SMs, {device.l2_mb} MB of L2 cache, {device.smem_optin} bytes of shared memory"
    return f"{device.name} (compute capability {device.cc}, {sizes})"


def joined(a: Table, b: Table) -> tuple[Table, int, int]:
    """The table with every size of either; where both have one, the decision of ``a`` stays unless that of ``b`` beats
    it. Also returns how many sizes ``b`` has won, and how many only ``b`` has."""
    chosen: list[Decision] = []
    taken = added = 0
    for _, _, mine, theirs in _paired(a, b):
        if mine is None or (theirs is not None and theirs.beats(mine)):
            assert theirs is not None
            taken, added = taken + (mine is not None), added + (mine is None)
            chosen.append(theirs)
        else:
            chosen.append(mine)
    merged = msgspec.structs.replace(
        a,
        **stored(chosen),
        measure=a.measure | larger_screen(a, b),
        effort=a.effort if a.effort == b.effort else "mixed",
        rejected={reason: max(a.rejected.get(reason, 0), count) for reason, count in (a.rejected | b.rejected).items()},
        provenance={
            "complete": all(table.provenance.get("complete") is True for table in (a, b)),
            "a": _flat(a.provenance),
            "b": _flat(b.provenance),
        },
    )
    return merged, taken, added


def _flat(provenance: dict[str, Any]) -> dict[str, Any]:
    """The members without objects and lists: with them each merge would nest deeper than the last."""
    return {name: value for name, value in provenance.items() if not isinstance(value, dict | list)}


def lint(files: Sequence[str], as_json: bool = False) -> int:
    """Print the faults of tables that are to be shipped. Returns the exit code."""
    for file in files:
        if not os.path.isfile(file):
            read(file)  # no fault of a table: raises ValueError
    with Compilers(_say) as compilers:
        found = {file: dict(zip(("error", "stale", "note"), check(file, compilers), strict=True)) for file in files}
    wrong = sum(bool(lines["error"] or lines["stale"]) for lines in found.values())
    if as_json:
        print(json.dumps([{"file": file, **lines} for file, lines in found.items()], indent=2))
        return FAILED if wrong else OK
    for file, labelled in found.items():
        for label, lines in labelled.items():
            for line in lines:
                print(f"{file}: {label}: {line}")
    print(f"{len(files) - wrong} of {len(files)} tables are well-formed and up to date")
    return FAILED if wrong else OK


def check(file: str, compilers: Compilers) -> tuple[list[str], list[str], list[str]]:
    """Faults of the table in ``file``, changes since it was measured, and notes."""
    table, reason = load_table(file)
    if table is None:
        return [str(reason)], [], []
    staleness, notes = compilers.staleness(table), list(_notes(table, Path(file)))
    notes += [staleness.words(table)] if staleness.unknown else []
    return list(_errors(table, Path(file))), staleness.lines, notes


def _errors(table: Table, path: Path) -> Iterator[str]:
    device, head = device_and_head(table)
    if path.read_bytes() != table.dumps().encode():
        yield "it is not in its canonical form (an entry per line, by kind and size; one final newline)"
    if not table.entries and not table.confirmed:
        yield "it has no sizes"
    if table.simulated:
        yield SIMULATED
    for entry in table.entries:
        kind, place = KIND_NAMES[entry.kind], f"{entry.kind} {entry.rows}"
        config, key = entry.configuration, key_of(entry.configuration)
        if (reason := unsupported_config(config, device, head.dtype, kind)) is not None:
            yield f"{place} takes {key}, which cannot run: {reason}"
        if entry.n < 2:
            yield f"{place}: n is {entry.n}; expected 2 or more samples"
        if entry.us <= 0:
            yield f"{place}: us is {entry.us}; expected its time"
        elif entry.default and entry.default_us <= 0:
            yield f"{place}: default_us is {entry.default_us}; expected the built-in choice's time"
        elif entry.default and gains_apart(entry.gain, entry.us, entry.default_us) > GAIN_TOLERANCE:
            yield f"{place}: gain is {entry.gain}; its times give {1 - entry.us / entry.default_us:.3f}"
        if entry.flashinfer and (kind != BatchKind(truncate=True) or head.tp > 1):
            yield f"{place}: flashinfer is true; it serves truncated batches, tp 1"
        if key in entry.tied:
            yield f"{place}: tied names {key}, which it takes"
        if not entry.flashinfer and same_defaults(table) and config == builtin_config(device, head, entry.rows, kind):
            yield f"{place} takes the built-in choice: it belongs to the confirmed sizes"
    for name, confirmed in table.confirmed.items():
        if confirmed.rows != sorted(confirmed.rows):
            yield f"confirmed.{name}: rows are {confirmed.rows}; expected them ascending"


def _notes(table: Table, path: Path) -> Iterator[str]:
    yield from table.notes
    if path.name != table.file_name:
        yield f"its name is not {table.file_name}: a server uses it where it is named, and finds it in no folder"
    if screen_line(table) and not screen_cost(table)[0]:
        yield "measure.screen is missing: what memory a screen takes"
    missing = [str(kind) for kind in BATCH_KINDS if kind.fallback is None and str(kind) not in table.kinds]
    if missing:
        yield f"no sizes for {', '.join(missing)}"
