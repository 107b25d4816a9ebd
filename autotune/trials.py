"""The log of a run: one JSON object per line, appended and flushed at once, so that a run that was killed can be
continued. An incomplete or damaged line is dropped; a log that is not continued is kept under another name.

Events: {"event": "trial", ...} for each configuration of a search, "refused" for one that failed later, "gtest",
"decided" for each batch size, with its ``Entry``, and "transfer" for a race between two sizes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..files import BadFileError, read_bytes, write_whole

T = TypeVar("T")

MAX_LINE = 1 << 16
MAX_BYTES = 1 << 28


class TrialLog:
    """identity: the first line: device, head and versions of the trials. A log of another identity, one that cannot
    be read and, without resume, any log is set aside; ``note`` says so."""

    def __init__(self, path: Path, identity: dict[str, Any], *, resume: bool) -> None:
        self.path, self.note = path, ""
        path.parent.mkdir(parents=True, exist_ok=True)
        first, *events = read_events(path) or [{}]
        goes_on = resume and first.get("identity") == identity
        self.events: list[dict[str, Any]] = events if goes_on else []
        if not goes_on and os.path.lexists(path):
            what = "of another device, version or space" if "identity" in first else "that cannot be read"
            self.note = f"the log {what if resume else 'of earlier runs'} is kept as {set_aside(path).name}"
        # The log is written anew, so that no line is appended to an incomplete one.
        lines = [{"identity": identity}, *self.events]
        write_whole(path, "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
        self._file = path.open("a")

    def add(self, event: str, **values: Any) -> None:
        line = {"event": event, **values}
        self.events.append(line)
        self._file.write(json.dumps(line, sort_keys=True) + "\n")
        self._file.flush()

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.events if line.get("event") == event]

    def close(self) -> None:
        """Raises nothing: a disk that is full has been named where a line was added."""
        with contextlib.suppress(OSError):
            if not self._file.closed:
                self._file.flush()
                os.fsync(self._file.fileno())
        with contextlib.suppress(OSError):  # it tries to write once more
            self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, without incomplete and damaged ones; empty where the log does not exist or is no plain
    file."""
    try:
        lines = read_bytes(path, MAX_BYTES).split(b"\n")
    except BadFileError:
        return []
    events = []
    for line in lines:
        try:
            event = json.loads(line) if len(line) <= MAX_LINE else None
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def recalled(events: Iterable[dict[str, Any]], read: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """The result of ``read`` for each event; events that it cannot use are left out."""
    for event in events:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            yield read(event)


def set_aside(path: Path) -> Path:
    """Rename a file to the first free name of X.old, X.old2, X.old3, ... Raises OSError."""
    names = (path.with_suffix(f".old{number}") for number in itertools.chain([""], itertools.count(2)))
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def log_of(table: Path) -> Path:
    """The log beside a table."""
    return table.with_suffix(".trials.jsonl")
