"""What a person sees while a run takes its time: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

EVERY_SECONDS = 5.0  # between two plain lines about the same part


class Plain:
    def __init__(self, stream: Any = None) -> None:
        self.stream = stream or sys.stderr
        self._last = 0.0
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", file=self.stream, flush=True)

    def update(self, part: str, done: int, total: int, about: str = "") -> None:
        if time.monotonic() - self._last >= EVERY_SECONDS:
            self._last = time.monotonic()
            self.note(f"{part}: {done} of {total}" + (f", {about}" if about else ""))

    def close(self) -> None: ...


class Bars(Plain):
    """With rich, on a terminal."""

    def __init__(self, progress: Any) -> None:
        super().__init__()
        self._progress = progress
        self._tasks: dict[str, Any] = {}
        progress.start()

    def note(self, text: str) -> None:
        self._progress.console.print(f"[{time.monotonic() - self._began:6.1f} s] {text}", markup=False, highlight=False)

    def update(self, part: str, done: int, total: int, about: str = "") -> None:
        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(part, total=total)
        self._progress.update(self._tasks[part], completed=done, total=total, description=f"{part} {about}")

    def close(self) -> None:
        self._progress.stop()


def make(quiet: bool = False) -> Plain:
    """quiet: nothing but what is noted, to the error stream, in plain lines."""
    if not quiet and sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            return Plain()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Bars(Progress(*columns, console=Console(stderr=True)))
    return Plain()
