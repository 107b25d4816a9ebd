"""``tune diff``: what two tables of one head say differently, and whether their noise explains it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..table import Table
from .table_files import CONFIDENT, buckets_of, config_line, differs, head_line, ratio, read


def run(options: argparse.Namespace) -> int:
    a, b = read(options.a), read(options.b)
    if a.head != b.head:
        raise ValueError(f"{options.a} is for head {head_line(a)}, {options.b} for {head_line(b)}")
    facts = {"environment": _environment(a, b), "buckets": _buckets(a, b)}
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0


def _environment(a: Table, b: Table) -> dict[str, list[Any]]:
    """What differs beside the buckets: {name: [in A, in B]}."""
    both: list[dict[str, Any]] = []
    for table in (a, b):
        sources = {f"kernels of {path}": hashes.get("src", "")[:19] for path, hashes in table.kernels.items()}
        device = {"device": table.device.name, "SMs": table.device.sms, "effort": table.effort}
        both.append(device | table.tool | table.env | sources | table.measure)
    first, second = both
    names = [*first, *(name for name in second if name not in first)]
    return {n: [first.get(n), second.get(n)] for n in names if first.get(n) != second.get(n)}


def _buckets(a: Table, b: Table) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for work, rows in buckets_of(a, b):
        mine, theirs = a.classes.get(work, {}).get(rows), b.classes.get(work, {}).get(rows)
        one: dict[str, Any] = {"work": work.value, "batch": rows}
        one["a"] = None if mine is None else config_line(a.configs[mine.use])
        one["b"] = None if theirs is None else config_line(b.configs[theirs.use])
        if mine is not None and theirs is not None:
            one["ratio"], one["se"] = ratio(mine, theirs)
            one["within_noise"] = not differs(mine, theirs)
        found.append(one)
    return found


def _print(facts: dict[str, Any]) -> None:
    for name, (mine, theirs) in facts["environment"].items():
        print(f"{name}: {mine} -> {theirs}")
    shared = [one for one in facts["buckets"] if "ratio" in one]
    changed = 0
    for one in facts["buckets"]:
        place = f"{one['work']} {one['batch']}:"
        if one["a"] is None or one["b"] is None:
            print(f"{place:20} only in {'B' if one['a'] is None else 'A'}: {one['a'] or one['b']}")
            continue
        same = one["a"] == one["b"]
        changed += not same
        verdict = "within noise" if one["within_noise"] else ("B slower" if one["ratio"] > 1 else "B faster")
        config = "same choice" if same else f"{one['a']} -> {one['b']}"
        print(f"{place:20} us B/A {one['ratio']:.4f} +- {one['se']:.4f}, {verdict}; {config}")
    apart = sum(not one["within_noise"] for one in shared)
    print(
        f"{len(shared)} buckets in both: {changed} with another choice, {apart} with a time beyond noise "
        f"({CONFIDENT} combined standard errors)"
    )
