"""Of ``tune report``: what the batches of a head with a screen gain by it, and what memory that takes."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator

from ..table import Table
from ..table_entries import ITEMSIZE
from ..work import ANY_BATCH, Path, Work
from .table_files import CONFIDENT


@dataclasses.dataclass(frozen=True)
class ScreenedBatch:
    """One bucket of a class with a screen. Times are microseconds; None where its race had no such path.

    takes: the path that has won, in ``us``, with the standard error ``se``. unscreened: the fastest path that needs no
    screen, in ``unscreened_us``. screened_us: of the screened path.
    """

    work: Work
    rows: int
    takes: str
    us: float
    se: float
    unscreened: str
    unscreened_us: float | None
    screened_us: float | None

    @property
    def gain(self) -> float | None:
        """The share of the time without a screen that the screened path saves; below 0 where it takes longer."""
        if self.screened_us is None or self.unscreened_us is None:
            return None
        return 1.0 - self.screened_us / self.unscreened_us


def screened_batches(table: Table) -> Iterator[ScreenedBatch]:
    """Every bucket of every class with a screen."""
    for work in Work:
        for rows, bucket in table.classes.get(work, {}).items() if work.screened else ():
            takes = table.configs[bucket.use].path
            times = {path: us for path, us in bucket.others.items() if path in (*ANY_BATCH, Path.SCREENED)}
            times[takes] = bucket.us
            without = min((path for path in ANY_BATCH if path in times), key=lambda path: times[path], default=None)
            yield ScreenedBatch(
                work,
                rows,
                takes,
                bucket.us,
                bucket.se,
                without or "",
                None if without is None else times[without],
                times.get(Path.SCREENED),
            )


def section(table: Table) -> str:
    """HTML; empty for a table without such classes."""
    found = list(screened_batches(table))
    if not found:
        return ""
    rows = "".join(
        f"<tr><td class=l>{html.escape(batch.work)}<td>{batch.rows}<td class=l>{html.escape(batch.takes)}"
        f"<td>{batch.us:.1f} &plusmn; {CONFIDENT * batch.se:.1f}<td>{_time(batch.screened_us)}"
        f"<td>{_time(batch.unscreened_us)}<td class=l>{html.escape(batch.unscreened)}<td>{_gain(batch)}"
        for batch in found
    )
    header = (
        "<tr><th class=l>batches<th>rows<th class=l>winner<th>&micro;s<th>screened, &micro;s"
        "<th>best without a screen, &micro;s<th class=l>path<th>gain of the screen"
    )
    won = sum(batch.takes == Path.SCREENED for batch in found)
    return (
        f"<h2>With a screen</h2><p>The screened path wins {won} of {len(found)} buckets. {_memory(table)}</p>"
        f"<table>{header}{rows}</table>"
    )


def _time(us: float | None) -> str:
    return "not raced" if us is None else f"{us:.1f}"


def _gain(batch: ScreenedBatch) -> str:
    if batch.gain is None:
        return ""
    return f"<span class=gain>{batch.gain:.1%}</span>" if batch.takes == Path.SCREENED else f"{batch.gain:.1%}"


def _memory(table: Table) -> str:
    cost = table.measure.get("screen")
    size, rows = (cost.get("bytes"), cost.get("rows")) if isinstance(cost, dict) else (None, None)
    if not isinstance(size, int) or not isinstance(rows, int):
        return "What memory a screen takes is not in the table."
    head = table.head
    head_bytes = head.vocab * head.hidden * ITEMSIZE[head.dtype]
    return (
        f"A screen for up to {rows} rows takes {size:,} bytes, {size / head_bytes:.1%} of the LM head's {head_bytes:,}."
    )
