"""``tune show``: a table for people."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator

from ..sources import installed_sources
from ..table import Table
from ..work import Work
from .table_files import config_line, head_line, or_flashinfer, read, screen_line


def run(options: argparse.Namespace) -> int:
    table = read(options.file)
    if options.json:
        facts = {"file": options.file, "notes": table.notes, "kernels_as_installed": _as_installed(table)}
        print(json.dumps(facts | {"table": json.loads(table.dumps())}, indent=2))
    else:
        print("\n".join(_lines(table)))
    return 0


def _as_installed(table: Table) -> bool:
    installed = installed_sources()
    return all(hashes.get("src") == installed.get(path) for path, hashes in table.kernels.items()) and bool(
        table.kernels
    )


def _lines(table: Table) -> Iterator[str]:
    device = table.device
    yield f"{device.name} (compute capability {device.cc}, {device.sms} SMs), head {head_line(table)}"
    versions = [f"{name} {version}" for name, version in (table.tool | table.env).items()]
    yield f"effort {table.effort}; {', '.join(versions)}"
    yield "kernels: as installed here" if _as_installed(table) else "kernels: not those installed here (stale)"
    if line := screen_line(table):
        yield line
    for note in table.notes:
        yield f"note: {note}"
    for work in Work:
        buckets = table.classes.get(work)
        if not buckets:
            continue
        rows = [("batch", "us", "+-", "default", "gain", "takes", "tied", "others")]
        for batch, bucket in buckets.items():
            known = bool(bucket.default)
            rows.append(
                (
                    str(batch),
                    f"{bucket.us:.1f}",
                    f"{bucket.se:.2f}",
                    f"{bucket.default_us:.1f}" if known else "",
                    f"{100 * bucket.gain:.1f} %" if known else "",
                    config_line(table.configs[bucket.use]) + or_flashinfer(bucket),
                    str(len(bucket.tied) or ""),
                    ", ".join(f"{name} {us:.1f}" for name, us in bucket.others.items()),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        yield f"\n{work}"
        for row in rows:
            cells = [
                cell.ljust(width) if place >= 5 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            yield ("  " + "  ".join(cells)).rstrip()
    if table.rejected:
        reasons = Counter(entry["why"] for entry in table.rejected)
        yield f"\nrejected: {', '.join(f'{count} {why}' for why, count in reasons.most_common())}"
