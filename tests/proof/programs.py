"""Shared parts of the programs of this folder: the way to modules of the tests and of the benchmarks, command lines,
result files. Import it first: with ``--dry-run`` it turns Triton's interpreter on."""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from common import (  # noqa: E402
    DEVICE,
    DRY_RUN,
    MAX_REASON,
    command_line,
    read_result,
    reason_of,
    write_result,
)
from sources import state  # noqa: E402

from sgl_flashsample import __version__  # noqa: E402
from sgl_flashsample.autotune.timing import describe_machine  # noqa: E402

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


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with --out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write, as results come")
    return parser


def new_env() -> dict[str, Any]:
    """The machine, versions, code, date and command that results depend on."""
    about = {"sgl_flashsample": __version__, "date": today(), "command": command_line()}
    return describe_machine(DEVICE) | about | state()


def today() -> str:
    return datetime.date.today().isoformat()


def in_processes(function: Callable[..., Any], cases: Iterable[tuple], processes: int) -> Iterator[Any]:
    """``function(*case)`` of each case, in their order; by several processes, which share all GPUs, where more than 1.

    One process often leaves a GPU idle, which waits for its launches.
    """
    if processes == 1:
        yield from itertools.starmap(function, cases)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, _take_a_gpu, (context.Value("i", 0),))
    with pool:
        yield from pool.map(function, *zip(*cases, strict=True))


def _take_a_gpu(taken: Any) -> None:
    """Makes a GPU the current one of this process, by turns. taken: how many processes have one."""
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        torch.cuda.set_device(number % torch.cuda.device_count())
