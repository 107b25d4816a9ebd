"""The environment variables of this package: their names, their values and their defaults. No other file reads them.

A value that cannot be read counts as the default, and a name of ours that does not exist as nothing; each is one
warning per process.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

logger = logging.getLogger("sgl_flashsample")

FILE_VARIABLE = "FLASHSAMPLE_TUNED"
FOLDERS_VARIABLE = "FLASHSAMPLE_TUNED_DIR"
FAMILY_VARIABLE = "FLASHSAMPLE_ALLOW_FAMILY"
SCREEN_VARIABLE = "FLASHSAMPLE_SCREEN"
REQUIRE_VARIABLE = "FLASHSAMPLE_REQUIRE"
STEP_GRAPHS_VARIABLE = "FLASHSAMPLE_STEP_GRAPHS"
MODEL_GRAPHS_VARIABLE = "FLASHSAMPLE_MODEL_GRAPHS"
LOG_SECONDS_VARIABLE = "FLASHSAMPLE_LOG_SECONDS"
REPORT_PATH_VARIABLE = "FLASHSAMPLE_REPORT_PATH"
RANKS_VARIABLE = "FLASHSAMPLE_SEVERAL_GPUS"
SPECULATION_VARIABLE = "FLASHSAMPLE_SPECULATION"
DRAFTS_VARIABLE = "FLASHSAMPLE_DRAFTS"
DRAFT_VOCAB_VARIABLE = "FLASHSAMPLE_DRAFT_VOCAB"
ANY_VERSION_VARIABLE = "FLASHSAMPLE_ANY_SGLANG"
TRACE_VARIABLE = "FLASHSAMPLE_TRACE"
REQUESTED_VARIABLE = "FLASHSAMPLE_REQUESTED"  # set by the plugin, for the processes of its server
ALL_IDS, LEARNED_IDS = "all", "auto"  # of ``DRAFT_VOCAB_VARIABLE``
_PREFIX = "FLASHSAMPLE_"

_SPELLINGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


class _Variable(NamedTuple):
    default: Any
    expected: str
    parse: Callable[[str], Any]  # raises KeyError or ValueError for what is not expected


def _switch(default: bool | None) -> _Variable:
    """default: None where what is on without the variable depends on the server."""
    return _Variable(default, "1, true, yes or on, or 0, false, no or off", lambda text: _SPELLINGS[text.lower()])


def _word(default: str, *others: str, on: str | None = None, off: str | None = None) -> _Variable:
    """on, off: the words that the spellings of a switch mean too."""
    words = [default, *others]
    expected = f"{', '.join(words[:-1])} or {words[-1]}"
    known = {spelling: on if value else off for spelling, value in _SPELLINGS.items()} | {one: one for one in words}

    def parse(text: str) -> str:
        if (word := known[text.lower()]) is None:
            raise ValueError(text)
        return word

    return _Variable(default, expected, parse)


def _finite(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(text)
    return seconds


_TEXT = _Variable("", "text", str)
VARIABLES = {
    FILE_VARIABLE: _TEXT,
    FOLDERS_VARIABLE: _TEXT,
    FAMILY_VARIABLE: _switch(False),
    SCREEN_VARIABLE: _word("auto", "on", "off", on="on", off="off"),
    REQUIRE_VARIABLE: _switch(False),
    STEP_GRAPHS_VARIABLE: _switch(True),
    MODEL_GRAPHS_VARIABLE: _switch(None),
    LOG_SECONDS_VARIABLE: _Variable(60.0, "seconds, as a number", _finite),
    REPORT_PATH_VARIABLE: _switch(False),
    RANKS_VARIABLE: _switch(None),
    SPECULATION_VARIABLE: _switch(None),
    DRAFTS_VARIABLE: _word("coupled", "greedy", "stock", off="stock"),
    DRAFT_VOCAB_VARIABLE: _Variable(ALL_IDS, f"{ALL_IDS}, {LEARNED_IDS}, or a file", str),
    ANY_VERSION_VARIABLE: _switch(False),
    TRACE_VARIABLE: _TEXT,
    REQUESTED_VARIABLE: _switch(False),
}
_warned: set[str] = set()  # lines that this process has said


def switch(name: str, environ: Mapping[str, str] = os.environ) -> bool | None:
    """True if a switch is on; None where nothing is said of one whose default depends on the server."""
    return _value(name, environ)


def word(name: str) -> str:
    """One of the words that a variable takes."""
    return _value(name, os.environ)


def seconds(name: str) -> float:
    """A length of time, 0 or more."""
    return _value(name, os.environ)


def text(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """A text, such as a path; "" where nothing is said."""
    return _value(name, environ)


def check() -> None:
    """At the start of a server: warn of what is wrong."""
    for line in problems(os.environ):
        _warn(line)


def problems(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each value that cannot be read, and for each name of ours that does not exist."""
    for name in VARIABLES:
        if line := _read(name, environ)[1]:
            yield line
    known = {name.removeprefix(_PREFIX): name for name in VARIABLES if name != REQUESTED_VARIABLE}
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in VARIABLES:
            nearest = difflib.get_close_matches(name.removeprefix(_PREFIX), known, n=1, cutoff=0.5)
            yield f"{name} is not a variable of this package" + "".join(f"; did you mean {known[n]}?" for n in nearest)


def _value(name: str, environ: Mapping[str, str]) -> Any:
    value, line = _read(name, environ)
    if line is not None:
        _warn(line)
    return value


def _read(name: str, environ: Mapping[str, str]) -> tuple[Any, str | None]:
    """The value, and what is wrong with what was given."""
    given, variable = environ.get(name, ""), VARIABLES[name]
    if not given.strip():
        return variable.default, None
    try:
        return variable.parse(given if variable is _TEXT else given.strip()), None
    except (KeyError, ValueError):
        default = variable.default
        in_words = default if isinstance(default, str) else f"{default or 0:g}"
        unset = "it counts as not set" if default in (None, "") else f"using {in_words}"
        return default, f"{name} is {given!r}; expected {variable.expected}; {unset}"


def _warn(line: str) -> None:
    if line not in _warned:
        _warned.add(line)
        logger.warning("flashsample: %s", line)
