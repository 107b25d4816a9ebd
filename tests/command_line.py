"""Runs commands of this project in the process of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]


def runner_of(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that calls ``main`` with its arguments as text. It returns the exit code, standard output and standard
    error."""

    def run(*arguments: object) -> tuple[Any, str, str]:
        try:
            code: Any = main([*map(str, arguments)])
        except SystemExit as end:  # argparse
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
