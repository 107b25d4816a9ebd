"""Lines on the error stream while something takes long. Needs the standard library alone."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic

EVERY_SECONDS = 5.0


@contextlib.contextmanager
def waiting(about: Callable[[], str], seconds: float = EVERY_SECONDS) -> Iterator[None]:
    """Print what ``about`` returns every so many seconds, until the block ends."""
    # The block may send what it prints itself elsewhere.
    stream, over, began = sys.stderr, threading.Event(), monotonic()

    def tell() -> None:
        while not over.wait(seconds):
            print(f"{about()} ({monotonic() - began:.0f} s)", file=stream, flush=True)

    thread = threading.Thread(target=tell, name="flashsample-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
