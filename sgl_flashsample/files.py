"""Files that other programs read or have written: read in bounds, written whole."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from .bounded_json import BoundedError, shorten


def read_plain(file: str | os.PathLike[str], max_bytes: int) -> str:
    """The text of ``file``. Raises BoundedError, and waits for nothing: what is not a plain file of at most
    ``max_bytes`` bytes is not read."""
    try:
        kind = os.stat(file)
        if not stat.S_ISREG(kind.st_mode):
            raise BoundedError("it is not a plain file")
        if kind.st_size > max_bytes:
            raise BoundedError(f"it has {kind.st_size} bytes; expected {max_bytes} or fewer")
        # Between the two calls it may have become a pipe, which would wait for a writer.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            return opened.read(max_bytes + 1).decode()
    except OSError as error:
        raise BoundedError(shorten(error.strerror or str(error))) from None
    except UnicodeDecodeError as error:
        raise BoundedError(f"it is not UTF-8 text (byte {error.start})") from None


def write_whole(file: str | os.PathLike[str], text: str) -> None:
    """The whole of ``text`` at ``file``, or what was there before. Raises OSError, and ValueError where something that
    is no plain file is in its place."""
    path = Path(file)
    if path.exists() and not path.is_file():
        raise ValueError(f"{file} is not a plain file")
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
