"""Shared parts of the programs of this folder: the way to modules of the tests and of the benchmarks, command lines,
result files. Import it first: with ``--dry-run`` it turns Triton's interpreter on."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from common import (  # noqa: E402
    DEVICE,
    DRY_RUN,
    MAX_REASON,
    command_line,
    in_processes,
    make_parser,
    new_env,
    read_result,
    reason_of,
    today,
    write_result,
)

__all__ = [
    "DEVICE",
    "DRY_RUN",
    "MAX_REASON",
    "ROOT",
    "command_line",
    "in_processes",
    "make_parser",
    "new_env",
    "read_result",
    "reason_of",
    "today",
    "write_result",
]
