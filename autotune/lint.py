"""``tune lint``: whether tables are fit to be shipped."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..lookup import config_problem
from ..sources import installed_sources
from ..table import Table
from ..table_entries import LAUNCHES
from ..work import Work
from .race import GAIN_TOLERANCE, gains_apart
from .table_files import buckets_of, read, screen_line


def run(options: argparse.Namespace) -> int:
    wrong = 0
    for file in options.files:
        errors, notes = check(file)
        for error in errors:
            print(f"{file}: error: {error}")
        for note in notes:
            print(f"{file}: {note}")
        wrong += bool(errors)
    good = len(options.files) - wrong
    print(f"{good} of {len(options.files)} tables are well-formed")
    return 1 if wrong else 0


def check(file: str) -> tuple[list[str], list[str]]:
    """What is wrong with ``file``, and what is worth knowing."""
    try:
        table = read(file)
    except ValueError as error:
        return [str(error).removeprefix(f"{file}: ")], []
    return list(_errors(table, Path(file))), list(_notes(table))


def _errors(table: Table, path: Path) -> Iterator[str]:
    if path.read_bytes() != table.dumps().encode():
        yield "it is not in its canonical form (sorted keys, two spaces, one final newline)"
    if path.name != table.file_name:
        yield f"its name is not {table.file_name}: no folder is searched for another one"
    if not any(table.classes.values()):
        yield "it has no buckets"
    unused = set(table.configs)
    for work, rows in buckets_of(table):
        bucket, place = table.classes[work][rows], f"classes.{work}.{rows}"
        unused -= {bucket.use, bucket.default, *bucket.tied}
        if table.configs[bucket.use].path in LAUNCHES:
            problem = config_problem(table.configs[bucket.use], table.device, table.head.dtype, work)
            if problem is not None:
                yield f"{place} uses {bucket.use}, which cannot run: {problem}"
        if bucket.n < 2:
            yield f"{place}.n is {bucket.n}; expected 2 or more samples"
        if bucket.default:
            if bucket.default_us <= 0:
                yield f"{place}.default_us is {bucket.default_us}; expected the default's time"
            elif gains_apart(bucket.gain, bucket.us, bucket.default_us) > GAIN_TOLERANCE:
                yield f"{place}.gain is {bucket.gain}; its times give {1 - bucket.us / bucket.default_us:.3f}"
        if bucket.distribution_only and (work is not Work.TRUNCATE or table.head.tp > 1):
            yield f"{place}.distribution_only is {bucket.distribution_only}; it serves truncated batches, tp 1"
        if bucket.use in bucket.tied:
            yield f"{place}.tied names {bucket.use}, which it uses"
    for key in sorted(unused):
        yield f"configs.{key} is used by no bucket"


def _notes(table: Table) -> Iterator[str]:
    yield from (f"note: {note}" for note in table.notes)
    for path in sorted({choice.path for choice in table.configs.values() if choice.path in LAUNCHES}):
        if table.kernels.get(path, {}).get("src") != installed_sources().get(path):
            yield f"stale: the kernels of {path} have changed since it was measured"
    if screen_line(table) and not isinstance(table.measure.get("screen"), dict):
        yield "note: measure.screen is missing: what memory a screen takes"
    missing = [work for work in Work if work.fallback is None and not table.classes.get(work)]
    if missing:
        yield f"note: no buckets for {', '.join(missing)}"
