"""Tables read and written by commands, and how their parts are shown."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from ..files import write_whole
from ..lookup import load_table
from ..table import Bucket, Choice, Table
from ..table_entries import LAUNCHES
from ..work import Work

CONFIDENT = 1.96  # standard errors: 95 % of the differences of equal times are smaller


def read(file: str) -> Table:
    """Raises ValueError for a file that is no table."""
    table, problem = load_table(file)
    if table is None:
        raise ValueError(f"{file}: {problem}")
    return table


def write(table: Table, file: str) -> None:
    """The whole of ``table`` at ``file``, or what was there before."""
    write_whole(file, table.dumps())


def buckets_of(*tables: Table) -> Iterator[tuple[Work, int]]:
    """The class and batch size of every bucket that any of the tables has, in their order."""
    for work in Work:
        sizes = {rows for table in tables for rows in table.classes.get(work, {})}
        yield from ((work, rows) for rows in sorted(sizes))


def head_line(table: Table) -> str:
    head = table.head
    softcap = ", softcap" if head.softcap else ""
    return f"{head.vocab} x {head.hidden} {head.dtype}, tp {head.tp}{softcap}"


def screen_line(table: Table) -> str:
    """What a screen of this head costs, and which kinds of work have one; empty for a table without any."""
    works = [work.value for work in Work if work.screened and table.classes.get(work)]
    if not works:
        return ""
    cost = table.measure.get("screen")
    size, rows = (cost.get("bytes"), cost.get("rows")) if isinstance(cost, dict) else (None, None)
    memory = "of unknown size"
    if isinstance(size, int) and isinstance(rows, int):
        memory = f"{size / 1e9:.2f} GB beside the head, for up to {rows} rows"
    return f"screen: {memory} ({', '.join(works)})"


def config_line(choice: Choice) -> str:
    """ "fused 16x128x256 warps 4 stages 3": the shape, then what is not as usual."""
    config = dict(choice.config)
    shape = "x".join(str(config.pop(name)) for name in ("block_b", "block_v", "block_d") if name in config)
    usual = {}
    if (kind := LAUNCHES.get(choice.path)) is not None:
        usual = {field.name: field.default for field in dataclasses.fields(kind)}
    rest = [f"{name.removeprefix('num_')} {value}" for name, value in config.items() if value != usual.get(name)]
    return " ".join([choice.path, *filter(None, [shape]), *rest])


def or_flashinfer(bucket: Bucket) -> str:
    """What to add to the line of what ``bucket`` uses."""
    return f"; {bucket.distribution_only} where no row has a seed" if bucket.distribution_only else ""


def ratio(a: Bucket, b: Bucket) -> tuple[float, float]:
    """The time of ``b`` over that of ``a``, and the standard error of this ratio."""
    quotient = b.us / a.us
    return quotient, quotient * math.hypot(a.se / a.us, b.se / b.us)


def differs(a: Bucket, b: Bucket) -> bool:
    """Whether the times are further apart than their noise explains."""
    return abs(b.us - a.us) > CONFIDENT * math.hypot(a.se, b.se)
