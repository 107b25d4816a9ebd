"""Progress of a measurement that has so much time: what it does, what is known of it, and the time that is left. A
terminal shows a bar that is drawn anew each second; another output gets a line when nothing was said for a while."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from time import monotonic

from tqdm import tqdm

LINE_SECONDS = 20.0


class Progress:
    """seconds: of the whole measurement, from now on. total: cells."""

    def __init__(self, seconds: float, total: int) -> None:
        self._bar = tqdm(total=total, disable=None, leave=False, bar_format="{desc} |{bar}|")
        self._began = self._said = self._since = monotonic()
        self._seconds, self._total, self._done = seconds, total, 0
        self._what = self._detail = ""
        self._over = threading.Event()

    @property
    def elapsed(self) -> float:
        return monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds; below 0 where the time is over."""
        return self._seconds - self.elapsed

    def begin(self, what: str, detail: str = "") -> None:
        self._what, self._since, self._detail = what, monotonic(), detail

    def know(self, detail: str) -> None:
        """What is known by now of what was begun."""
        self._detail = detail

    def decided(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        self._bar.total, self._bar.n = total, done

    def say(self, line: str) -> None:
        self._said = monotonic()
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    @property
    def line(self) -> str:
        known = f", {self._detail}" if self._detail else ""
        left = max(0.0, self.left)
        at_most = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        seconds = monotonic() - self._since
        return f"{self._what} for {seconds:.0f} s{known}; {self._done} of {self._total} decided, at most {at_most} left"

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show it until the end of the block."""
        thread = threading.Thread(target=self._show, name="flashsample-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            self._bar.close()

    def _show(self) -> None:
        while not self._over.wait(1.0):
            self._show_once()

    def _show_once(self) -> None:
        if not self._bar.disable:
            self._bar.set_description_str(self.line)
        elif monotonic() - self._said >= LINE_SECONDS:
            with contextlib.suppress(BrokenPipeError):  # the measurement's own next line finds it too
                self.say(f"  {self.line}")
