"""``tune explain``: what a batch takes, from which table, and why."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
from typing import Any

from ..lookup import (
    COMPARED,
    FILE_VARIABLE,
    Found,
    Target,
    bucket_for,
    config_problem,
    find,
    folders,
    load_table,
    match,
)
from ..table import Bucket, Device, HeadShape, Table, file_name
from ..table_entries import ITEMSIZE
from ..work import Path, Work
from .table_files import config_line, head_line, or_flashinfer, read


def run(options: argparse.Namespace) -> int:
    warnings: list[str] = []
    if options.file is not None:
        if options.device or options.vocab or options.hidden:
            raise ValueError("a table and --device, --vocab or --hidden are given; expected one or the other")
        table = read(options.file)
        # As on the machine that it was measured on, with the kernels that are installed here.
        how, differs = match(table, Target(table.device, table.head, table.env))
        assert how is not None, "a table is for its own device and head"
        found: Found | None = Found(table, options.file, "the named file", how, differs)
    else:
        if not (options.device and options.vocab and options.hidden):
            raise ValueError("no table is given; expected one, or --device, --vocab and --hidden to look for one")
        head = HeadShape(options.vocab, options.hidden, options.dtype, options.tp, options.softcap)
        found, warnings = find(_target(options.device, head))
    facts = _facts(found, options.batch, Work(options.work)) | {"warnings": warnings}
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if found is None:
        folders_of = ", ".join(str(folder) for folder, _ in folders(os.environ))
        print(f"table     none: {file_name(options.device, head)} is not in {folders_of}")
    else:
        why = f": {'; '.join(found.differs)}" if found.differs else ""
        print(f"table     {found.file} ({found.match}{why}; {found.source})")
        print(f"for       {found.table.device.name}, head {head_line(found.table)}")
    print(f"batch     {options.batch} rows, {options.work}: {facts['why']}")
    if facts["bucket"] is not None:
        assert found is not None
        _print_bucket(found.table, facts)
    return 0


def _target(device: str, head: HeadShape) -> Target:
    """Of a machine that is not at hand: its device is what the nearest table of that name says, its versions are those
    that are installed here."""
    env: dict[str, str] = {}
    for name in COMPARED:
        try:
            env[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    named = os.environ.get(FILE_VARIABLE)
    paths = [named] if named else []
    paths += [str(folder / file_name(device, head)) for folder, _ in folders(os.environ)]
    for path in paths:
        table, _ = load_table(path)
        if table is not None and table.device.name == device:
            return Target(table.device, head, table.env | env)
    return Target(Device(device, "0.0", 0, 0, 0), head, env)


def _facts(found: Found | None, batch: int, work: Work) -> dict[str, Any]:
    facts: dict[str, Any] = {"batch": batch, "work": work.value, "file": None, "match": None, "bucket": None}
    if found is None:
        return facts | {"why": "the built-in choice, without a table"}
    table = found.table
    facts |= {"file": found.file, "match": found.match.value, "source": found.source}
    class_, bucket = work, bucket_for(table.classes.get(work, {}), batch)
    while bucket is None and class_.fallback is not None:
        if _screened_without(table, batch, class_):
            return facts | {"why": f"the built-in choice, the screened path: the table has nothing of {class_} for it"}
        class_ = class_.fallback
        bucket = bucket_for(table.classes.get(class_, {}), batch)
    if bucket is None:
        sizes = ", ".join(map(str, table.classes.get(work, {}))) or "none"
        return facts | {
            "why": f"the built-in choice: no bucket from {batch} to {2 * batch} in its tile class (buckets: {sizes})"
        }
    entry = table.configs[table.classes[class_][bucket].use]
    problem = config_problem(entry, table.device, table.head.dtype, work)
    if problem is not None:
        return facts | {"why": f"the built-in choice: bucket {bucket} cannot be used ({problem})"}
    own = "its own bucket" if bucket == batch else f"bucket {bucket}, the next one of its tile class, at most twice it"
    if class_ is not work:
        own += f", of {class_} (there is none of {work})"
    chosen = table.classes[class_][bucket]
    config = dataclasses.asdict(entry)
    return facts | {"why": own, "bucket": bucket, "class": class_.value, "takes": config} | dataclasses.asdict(chosen)


def _screened_without(table: Table, batch: int, work: Work) -> bool:
    """Whether the built-in choice for such a batch is the screened path, which goes before other work's buckets."""
    if not work.screened:
        return False
    from ..tuned import path_in  # loads torch
    from .builtin import family_of

    family = family_of(table.device.cc)
    itemsize, columns = ITEMSIZE[table.head.dtype], table.head.hidden
    return family is not None and path_in(family, itemsize, columns, batch, work) is Path.SCREENED


def _print_bucket(table: Table, facts: dict[str, Any]) -> None:
    bucket: Bucket = table.classes[facts["class"]][facts["bucket"]]
    print(f"takes     {config_line(table.configs[bucket.use])}{or_flashinfer(bucket)}")
    clock = f", {bucket.clock_mhz:.0f} MHz" if bucket.clock_mhz else ""
    print(f"expected  {bucket.us:.1f} +- {bucket.se:.2f} us ({bucket.n} samples{clock})")
    if bucket.default:
        default = config_line(table.configs[bucket.default])
        print(f"default   {bucket.default_us:.1f} us ({default}); gain {100 * bucket.gain:.1f} %")
    if bucket.tied:
        print(f"tied      {'; '.join(config_line(table.configs[key]) for key in bucket.tied)}")
    if bucket.others:
        print(f"others    {', '.join(f'{name} {us:.1f} us' for name, us in bucket.others.items())}")
    if bucket.checked:
        print(f"checked   {bucket.checked}")
