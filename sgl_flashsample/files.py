"""Reads files and JSON that other programs have written, within limits; writes files so that no reader sees half of
one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NoReturn

_UMASK = os.umask(0o022)  # read once, at import: reading it sets the mask of all threads for a moment
os.umask(_UMASK)

# How the files of each kind begin that commands write.
_BEGINNINGS = {
    "token counts": rb'\s*\{\s*"schema"\s*:\s*"flashsample-hot/',
    "a token map": rb"(?s)PK\x03\x04.{26}archive/data\.pkl",  # as torch.save writes it
    "a tuned table": rb'\s*\{\s*"schema"\s*:\s*"flashsample-tune/',
    "a benchmark result": rb'\s*\{\s*"env"\s*:\s*\{',
    "an HTML page": rb"(?i)\s*<!doctype html",
}
_BYTES = range(0xDC80, 0xDD00)  # letters that stand for the bytes of a file's name that are not UTF-8


class BadFileError(ValueError):
    """A file or text that cannot be used; the message is one line that names what is wrong."""


def one_line(text: str, most: int = 120) -> str:
    """``text`` in one line of at most ``most`` printable characters."""
    line = "".join(letter if letter.isprintable() else _unprintable(letter) for letter in text[: most + 1])
    return line if len(line) <= most else line[: most - 3] + "..."


def _unprintable(letter: str) -> str:
    return f"\\x{ord(letter) - 0xDC00:x}" if ord(letter) in _BYTES else " "


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def read_plain(file: str | os.PathLike[str], max_bytes: int) -> str:
    """The text of ``file``. Raises BadFileError, as ``read_bytes`` does."""
    try:
        return read_bytes(file, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise BadFileError(f"it is not UTF-8 text (byte {error.start})") from None


def read_bytes(file: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The bytes of ``file``. Raises BadFileError, and waits for nothing: what is not a plain file of at most
    ``max_bytes`` bytes is not read."""
    try:
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):
            raise BadFileError("it is not a plain file")
        if status.st_size > max_bytes:
            raise BadFileError(f"it has {status.st_size} bytes; expected {max_bytes} or fewer")
        # Between the two calls it may have become a pipe, which would wait for a writer.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            return opened.read(max_bytes + 1)
    except OSError as error:
        raise BadFileError(one_line(error.strerror or str(error))) from None


def parse_json(text: str, max_bytes: int) -> Any:
    """``text`` as JSON. Raises BadFileError; also for a key that is twice in one object, NaN and infinity."""
    if len(text) > max_bytes or len(text.encode(errors="replace")) > max_bytes:
        raise BadFileError(f"it is longer than {max_bytes} bytes")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except BadFileError:
        raise
    except RecursionError:
        raise BadFileError("it is nested too deeply") from None
    except ValueError as error:
        raise BadFileError(f"it is not JSON: {one_line(str(error))}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise BadFileError(f"the key {one_line(ascii(name))} is there twice in one object")
        members[name] = value
    return members


def _refuse(name: str) -> NoReturn:
    raise BadFileError(f"it has the number {name}; expected finite ones")


def hold(path: Path) -> IO[str] | None:
    """The file ``path``, made where it is missing, and locked until it is closed or this process ends; None where
    another process has it locked. Programs that this process starts do not inherit it. A file system without locks is
    taken as it is. Raises OSError where the file cannot be opened."""
    opened = path.open("a")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        opened.close()
        return None
    except OSError:
        pass
    return opened


def check_writable(file: str | os.PathLike[str], option: str) -> None:
    """Raises ValueError, with the ``option`` that named ``file``, where ``write_whole`` could not write it."""
    path = Path(file)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} is {file}, in a folder that is not there")
    if path.exists() and not path.is_file():
        raise ValueError(f"{option} is {file}, which is not a plain file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{option} is {file}, which cannot be written: {error.strerror}") from None


def check_other(file: str | os.PathLike[str], option: str, inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Raises ValueError, with the ``option`` that named ``file``, where that is one of the files that are read."""
    if os.path.exists(file) and any(os.path.exists(one) and os.path.samefile(file, one) for one in inputs):
        raise ValueError(f"{option} is {file}, a file that is read; expected another one")


def check_output(
    file: str | os.PathLike[str], option: str, kind: str, inputs: Iterable[str | os.PathLike[str]] = ()
) -> None:
    """Raises ValueError, with the ``option`` that named ``file``, where it cannot be written, is one of the ``inputs``,
    or holds something else than an earlier file of its ``kind``, one of ``_BEGINNINGS``; it may be empty."""
    check_writable(file, option)
    check_other(file, option, inputs)
    if os.path.exists(file):
        with open(file, "rb") as opened:
            content = opened.read(4096)
        if content and not re.match(_BEGINNINGS[kind], content):
            raise ValueError(f"{option} is {file}, which holds something other than {kind}; expected another file")


def write_whole(file: str | os.PathLike[str], content: str | bytes) -> None:
    """Write ``content`` to ``file``; where that fails, the old content stays. Raises OSError, and ValueError where
    ``file`` exists and is no plain file."""
    path = Path(file)
    if path.exists() and not path.is_file():
        raise ValueError(f"{file} is not a plain file")
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content.encode() if isinstance(content, str) else content)
            opened.flush()
            os.fsync(opened.fileno())
        os.chmod(name, 0o666 & ~_UMASK)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
