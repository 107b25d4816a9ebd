"""JSON from elsewhere, read so that nothing in it is larger, deeper or stranger than expected."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

MAX_TEXT = 300  # characters of any string
MAX_ENTRIES = 4096  # of any object or list
MAX_DEPTH = 4  # of the parts that are free in form
MAX_NUMBER = 1e18  # in those
MAX_NOTES = 20


class BoundedError(ValueError):
    """What is wrong, in one line that names the place."""


def parse(text: str, max_bytes: int) -> Any:
    """``text`` as JSON. Raises BoundedError; also for a key that is twice in one object, NaN and infinity."""
    if len(text) > max_bytes or len(text.encode(errors="replace")) > max_bytes:
        raise BoundedError(f"it is longer than {max_bytes} bytes")
    try:
        return json.loads(text, object_pairs_hook=_pairs, parse_constant=_refuse_constant)
    except BoundedError:
        raise
    except RecursionError:
        raise BoundedError("it is nested too deeply") from None
    except ValueError as error:
        raise BoundedError(f"it is not JSON: {shorten(str(error))}") from None


def shorten(text: str, most: int = 120) -> str:
    """``text`` in one line of at most ``most`` printable characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: most + 1])
    return line if len(line) <= most else line[: most - 3] + "..."


def shown(value: Any) -> str:
    """A JSON value as a message shows it."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return "a huge number"  # Python refuses to print one of more than a few thousand digits
    return shorten(ascii(value))


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BoundedError(f"the key {shown(name)} is there twice in one object")
        found[name] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise BoundedError(f"it has the number {name}; expected finite ones")


class Reader:
    """Checks of single values. ``where`` is the place in the text, for the message of the BoundedError that all raise.

    notes: what was ignored because this release does not know it.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []

    def fail(self, where: str, value: Any, expected: str) -> NoReturn:
        raise BoundedError(f"{shorten(where)} is {shown(value)}; expected {expected}")

    def note(self, what: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(f"{shorten(what)} is not known to this release and is ignored")

    def rest(self, where: str, fields: dict[str, Any]) -> None:
        """Note the fields that nobody has taken."""
        for name in fields:
            self.note(f"{where}{name}")

    def required(self, fields: dict[str, Any], name: str, where: str = "") -> Any:
        """Take a field out of ``fields``."""
        if name not in fields:
            raise BoundedError(f"{shorten(where + name)} is missing")
        return fields.pop(name)

    def each(self, where: str, value: Any, read: Callable[[str, Any], Any]) -> dict[str, Any]:
        return {key: read(f"{where}.{key}", item) for key, item in self.object(where, value).items()}

    def object(self, where: str, value: Any) -> dict[str, Any]:
        """A copy, for its reader to take the fields out of."""
        if not isinstance(value, dict):
            self.fail(where, value, "an object")
        self._bound(where, value)
        for name in value:
            self.text(f"a key of {where}", name)
        return dict(value)

    def list(self, where: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            self.fail(where, value, "a list")
        self._bound(where, value)
        return value

    def _bound(self, where: str, value: Any) -> None:
        if len(value) > MAX_ENTRIES:
            raise BoundedError(f"{shorten(where)} has {len(value)} entries; expected {MAX_ENTRIES} or fewer")

    def text(self, where: str, value: Any, least: int = 0) -> str:
        # Printable: it is shown on terminals and in logs, where a line of its own would pass for another's.
        if not isinstance(value, str) or not least <= len(value) <= MAX_TEXT or not value.isprintable():
            self.fail(where, value, f"a text of {least} to {MAX_TEXT} printable characters")
        return value

    def boolean(self, where: str, value: Any) -> bool:
        if not isinstance(value, bool):
            self.fail(where, value, "true or false")
        return value

    def integer(self, where: str, value: Any, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            self.fail(where, value, f"an integer from {least} to {most}")
        return value

    def number(self, where: str, value: Any, least: float, most: float) -> float:
        # An integer may be too large for a float: compared first.
        if type(value) not in (int, float) or not least <= value <= most:
            self.fail(where, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def free(self, where: str, value: Any, depth: int = MAX_DEPTH) -> Any:
        """JSON of any form, in bounds."""
        if depth == 0:
            raise BoundedError(f"{shorten(where)} is nested too deeply")
        if isinstance(value, dict):
            return self.each(where, value, lambda place, item: self.free(place, item, depth - 1))
        if isinstance(value, list):
            return [self.free(f"{where}[]", item, depth - 1) for item in self.list(where, value)]
        if isinstance(value, str):
            return self.text(where, value)
        if type(value) in (int, float):
            self.number(where, value, -MAX_NUMBER, MAX_NUMBER)
        return value  # true, false, null
