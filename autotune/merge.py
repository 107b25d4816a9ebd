"""``tune merge``: two tables of one device and head as one."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ..table import Bucket, Choice, Table
from .table_files import buckets_of, config_line, differs, head_line, read, write


def run(options: argparse.Namespace) -> int:
    a, b = read(options.a), read(options.b)
    _require_alike(a, b, options)
    if options.strict and (conflict := _conflict(a, b)) is not None:
        raise ValueError(f"{conflict} (--strict)")
    merged, taken, added = joined(a, b)
    write(merged, options.out)
    total = sum(map(len, merged.classes.values()))
    print(f"{options.out}: {total} buckets, {taken} of them better in {options.b}, {added} only there")
    return 0


def _require_alike(a: Table, b: Table, options: argparse.Namespace) -> None:
    if a.head != b.head:
        raise ValueError(f"{options.a} is for head {head_line(a)}, {options.b} for {head_line(b)}")
    if a.device != b.device:
        raise ValueError(f"{options.a} is for {a.device}, {options.b} for {b.device}")
    for path in a.kernels.keys() & b.kernels.keys():
        if a.kernels[path].get("src") != b.kernels[path].get("src"):
            raise ValueError(f"the tables were measured with different kernels ({path}); tune anew instead")


def _conflict(a: Table, b: Table) -> str | None:
    for work, rows in buckets_of(a, b):
        mine, theirs = a.classes.get(work, {}).get(rows), b.classes.get(work, {}).get(rows)
        if mine is not None and theirs is not None and a.configs[mine.use] != b.configs[theirs.use]:
            own, other = config_line(a.configs[mine.use]), config_line(b.configs[theirs.use])
            return f"{work} {rows} takes {own} in A and {other} in B"
    return None


def joined(a: Table, b: Table) -> tuple[Table, int, int]:
    """The table with every bucket of either; where both have one, that of ``a`` unless that of ``b`` is faster beyond
    noise. Also how many of ``b`` were faster, and how many only ``b`` has."""
    configs: dict[str, Choice] = {}
    classes: dict[str, dict[int, Bucket]] = {}
    taken = added = 0
    for work, rows in buckets_of(a, b):
        mine, theirs = a.classes.get(work, {}).get(rows), b.classes.get(work, {}).get(rows)
        better = mine is not None and theirs is not None and theirs.us < mine.us and differs(mine, theirs)
        if mine is None or better:
            assert theirs is not None
            taken, added = taken + better, added + (mine is None)
            bucket = _carried(theirs, b, configs, a)
        else:
            bucket = _carried(mine, a, configs, a)
        classes.setdefault(work.value, {})[rows] = bucket
    rejected = list({json.dumps(entry, sort_keys=True): entry for entry in [*a.rejected, *b.rejected]}.values())
    provenance = {"merged": [_flat(table.provenance) for table in (a, b)]}
    merged = dataclasses.replace(
        a,
        configs=configs,
        classes=classes,
        kernels=b.kernels | a.kernels,
        measure={name: b.measure[name] for name in ("screen",) if name in b.measure} | a.measure,
        effort=a.effort if a.effort == b.effort else "mixed",
        rejected=rejected,
        provenance=provenance,
    )
    return merged, taken, added


def _flat(provenance: dict[str, Any]) -> dict[str, Any]:
    """What fits one level deeper: merging again and again must not nest without end."""
    return {name: value for name, value in provenance.items() if not isinstance(value, dict | list)}


def _carried(bucket: Bucket, table: Table, configs: dict[str, Choice], first: Table) -> Bucket:
    """``bucket`` with its configurations in ``configs``; a key that ``first`` has for another one is changed."""

    def carry(key: str) -> str:
        if not key:
            return key
        choice, name, count = table.configs[key], key, 2
        while first.configs.get(name, choice) != choice or configs.get(name, choice) != choice:
            name, count = f"{key}-{count}", count + 1
        configs[name] = choice
        return name

    return dataclasses.replace(
        bucket, use=carry(bucket.use), default=carry(bucket.default), tied=[carry(key) for key in bucket.tied]
    )
