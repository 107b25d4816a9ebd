"""Progress of a run, on the error stream: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

EVERY_SECONDS = 5.0  # time between two lines about the same part, without a terminal


class Progress:
    """A context. quiet: print notes alone, as plain lines."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._began = time.monotonic()
        self._last_line = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, console=self._console, disable=quiet or not self._console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        """Print one line."""
        self._bars.console.print(f"[{time.monotonic() - self._began:6.1f} s] {text}")

    def update(self, part: str, done: int, total: int, about: str = "") -> None:
        """Show the progress of ``part``."""
        if not self._bars.disable:
            if part not in self._tasks:
                self._tasks[part] = self._bars.add_task(part, total=total)
            self._bars.update(self._tasks[part], completed=done, total=total, description=f"{part} {about}")
        elif time.monotonic() - self._last_line >= EVERY_SECONDS:
            self._last_line = time.monotonic()
            self.note(f"{part}: {done} of {total}" + (f", {about}" if about else ""))
