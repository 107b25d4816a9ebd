"""The log of a search: one JSON object per line, appended and flushed as things happen, so that a run that was killed
goes on where it was. A line that was cut short is dropped."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from ..table_entries import LAUNCHES
from .space import Config

MAX_LINE = 1 << 16


def config_data(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def config_of(path: str, data: dict[str, Any]) -> Config:
    """Raises ValueError or TypeError where ``data`` is no configuration of ``path``."""
    if path not in LAUNCHES:
        raise ValueError(f"path is {path!r}; expected one of {', '.join(LAUNCHES)}")
    return LAUNCHES[path](**data)


class Log:
    """``identity`` is the first line: what the trials were measured on and with. A log of another identity is set
    aside, not read."""

    def __init__(self, path: Path, identity: dict[str, Any], *, resume: bool) -> None:
        self.path, self.identity = path, identity
        self.events: list[dict[str, Any]] = []
        self.note = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        events = read(path) if resume else []
        if events and events[0].get("identity") == identity:
            self.events = events[1:]
        elif events:
            path.replace(path.with_suffix(".old"))
            self.note = f"the log of another device, version or space is kept as {path.with_suffix('.old').name}"
        # Written anew, so that a line that was cut short does not swallow the next one.
        partial = path.with_suffix(".partial")
        lines = [{"identity": identity}, *self.events]
        partial.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
        partial.replace(path)
        self._file = path.open("a")

    def add(self, kind: str, **values: Any) -> None:
        event = {"kind": kind, **values}
        self.events.append(event)
        self._file.write(json.dumps(event, sort_keys=True) + "\n")
        self._file.flush()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("kind") == kind]

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a log, without the lines that are cut short; nothing where there is no log."""
    try:
        text = path.read_bytes()
    except OSError:
        return []
    events = []
    for line in text.split(b"\n"):
        try:
            event = json.loads(line) if len(line) <= MAX_LINE else None
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events
