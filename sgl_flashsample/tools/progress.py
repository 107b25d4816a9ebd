"""Progress of a long measurement: its step, the time since that began, and the time that is left. A terminal shows a
bar that is drawn anew each second; another output gets a line when nothing was said for half a minute."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from tqdm import tqdm

LINE_SECONDS = 30.0
START_SECONDS = 60.0  # that a server is expected to take, until one has started


class Progress:
    """Numbers of starts and of samples. sample_seconds: the expected time of a sample, until one is taken."""

    def __init__(self, sample_seconds: float) -> None:
        self._bar = tqdm(unit="sample", disable=None, leave=False, bar_format="{desc} |{bar}| {elapsed}")
        self._sample_seconds, self._start_seconds = sample_seconds, START_SECONDS
        self._starts = self._samples = self._taken = 0
        self._what, self._since = "", time.monotonic()
        self._said = self._sampled = self._since
        self._over = threading.Event()

    def expect(self, starts: int, samples: int) -> None:
        """Set the numbers of starts and of samples that are left."""
        self._starts, self._samples, self._taken = starts, samples, 0
        self._bar.reset(samples)

    def begin(self, what: str) -> None:
        self._what, self._since = what, time.monotonic()
        self._sampled = self._since

    def has_started(self, seconds: float) -> None:
        """A server has started, within ``seconds``."""
        self._starts, self._start_seconds = max(0, self._starts - 1), seconds

    def step(self) -> None:
        """A sample has been taken."""
        now = time.monotonic()
        self._sample_seconds, self._sampled = now - self._sampled, now
        self._taken += 1
        self._bar.update()

    def say(self, line: str) -> None:
        self._said = time.monotonic()
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    @property
    def line(self) -> str:
        now = time.monotonic()
        left = self._starts * self._start_seconds + max(0, self._samples - self._taken) * self._sample_seconds
        about = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        done = f"{self._taken} of {self._samples} samples"
        return f"{self._what} for {now - self._since:.0f} s; {done}, about {about} left"

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
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self.say(f"  {self.line}")
