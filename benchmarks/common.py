"""What the benchmarks share: heads and batches, ratios of times, command lines and result files. Import it first.

With ``--dry-run`` kernels are interpreted on the CPU and shapes are small: everything runs, the times mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for ``lab``, which is not installed

if "--dry-run" in sys.argv:
    from lab import interpreter

    interpreter.turn_on()  # before Triton is imported

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import itertools
import json
import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from sgl_flashsample import LMHead, __version__
from sgl_flashsample.autotune.baselines import OFFSETS_PER_CALL, BaselineBatch
from sgl_flashsample.autotune.timing import MAX_CALLS, describe_machine
from sgl_flashsample.autotune.workload import PROFILES, REACH, Workload, directions, make_weight
from sgl_flashsample.files import first_line, one_line, write_whole
from sgl_flashsample.kernels.params import LogitEdits
from sgl_flashsample.kinds import BatchKind

DRY_RUN = "--dry-run" in sys.argv
RESULTS = Path(__file__).resolve().parent / "results"
MAX_REASON = 160  # characters


@dataclasses.dataclass(frozen=True)
class Shape:
    """D hidden elements, V ids; a final softcap or None."""

    hidden: int
    vocab: int
    softcap: float | None = None

    def __str__(self) -> str:
        return f"{self.hidden}x{self.vocab}"

    @property
    def fields(self) -> dict[str, int]:
        return {"D": self.hidden, "V": self.vocab}

    def weight(self) -> torch.Tensor:
        """``[V, D]``, the head that the tuner measures on, whatever the profile of the hidden states."""
        return make_weight(self.vocab, self.hidden, DTYPE, DEVICE)


DEVICE = torch.device("cpu" if DRY_RUN or not torch.cuda.is_available() else "cuda")
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
SHAPES = (
    [Shape(48, 777, 30.0)]
    if DEVICE.type == "cpu"
    else [Shape(4096, 151936), Shape(2048, 151936), Shape(8192, 128256), Shape(2880, 201088), Shape(3840, 262144, 30.0)]
)


class Batch:
    """Hidden states whose logits are distributed as ``profile`` says (``autotune/workload.py``), and everything that
    rows may ask for. Hidden states differ from round to round, noise from call to call.

    hidden: ``[B, D]``. seed: ``[B]`` int64. position: ``[MAX_CALLS, B]`` int64, of each call of a captured graph.
    """

    def __init__(self, head: LMHead, rows: int, profile: str = "typical") -> None:
        device, width = head.weight.device, head.weight.shape[1]
        self.head, self.rows, self._deviation = head, rows, PROFILES[profile][1]
        self._along = REACH * width**0.5 * directions(width, device)[list(PROFILES).index(profile)]
        self.hidden = torch.empty(rows, width, dtype=head.weight.dtype, device=device)
        self.seed = torch.arange(rows, device=device) * 7919
        self.position = torch.empty(MAX_CALLS, rows, dtype=torch.int64, device=device)
        self._offset = torch.empty(MAX_CALLS, 1, dtype=torch.int64, device=device)
        self.refresh(0)

    def refresh(self, index: int) -> None:
        """The inputs of round ``index``, in place."""
        generator = torch.Generator(self.hidden.device).manual_seed(index)
        noise = torch.randn(self.hidden.shape, device=self.hidden.device, generator=generator)
        self.hidden.copy_(noise * self._deviation + self._along)
        steps = index * MAX_CALLS + torch.arange(MAX_CALLS, device=self.hidden.device)[:, None]
        self.position.copy_(steps.expand_as(self.position))
        self._offset.copy_(steps * OFFSETS_PER_CALL)

    def full(self, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[B]``, the same value for each row."""
        return torch.full((self.rows,), value, dtype=dtype, device=self.hidden.device)

    @functools.cached_property
    def edits(self) -> LogitEdits:
        """Of every kind, in every row, as the tuner has them: ``[B, V]`` float32 three times, and a mask."""
        edits = Workload(self.head, self.rows).params(BatchKind(edit=True))[0].edits
        assert edits is not None
        return edits

    def for_baselines(self, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> BaselineBatch:
        return BaselineBatch(
            hidden=self.hidden,
            weights=[self.head.weight],
            softcap=self.head.softcap,
            temperature=self.full(1.0),
            top_k=self.full(top_k, torch.int32),
            top_p=self.full(top_p),
            seed=torch.tensor([1234], device=self.hidden.device),
            offset=self._offset,
            min_p=self.full(min_p) if min_p else None,
        )


def make_parser(description: str | None, *, needs_gpu: bool = True) -> argparse.ArgumentParser:
    """With --out, and with --dry-run and --fast where a GPU is needed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write, as results come")
    if needs_gpu:
        parser.add_argument("--fast", action="store_true", help="a part of the cells, in about a third of the time")
        parser.add_argument("--dry-run", action="store_true", help="small shapes, interpreted; needs no GPU")
        if not DRY_RUN and DEVICE.type != "cuda" and "-h" not in sys.argv and "--help" not in sys.argv:
            parser.error("no CUDA device; --dry-run works without one")
    return parser


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


def new_env() -> dict[str, Any]:
    """What the results of this run depend on."""
    return describe_machine(DEVICE) | {"sgl_flashsample": __version__, "date": today(), "command": command_line()}


def today() -> str:
    return datetime.date.today().isoformat()


def command_line() -> str:
    """How this was called, without the folders of this machine."""
    return " ".join(["python", *(re.sub(r"(?<![^=:])/([^=:]*/)?", "", word) for word in sys.argv)])


def reason_of(error: BaseException) -> str:
    """One line for a result file: why something was not measured."""
    return one_line(first_line(error), MAX_REASON)


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """The times of one race, for who watches; over the floor where that is known."""
    floor = next((row["us"] for row in rows if row["path"] == "read"), None)
    print(title, flush=True)
    for row in rows:
        over = f" {row['us'] / floor:7.3f} of the floor" if floor else ""
        ratio = f", {1 + row['ratio']['off']:.3f} of {row['older_us']:.1f}" if "ratio" in row else ""
        line = f"  {row['mode']:12} {row['path']:18} {row['us']:8.1f} +- {row['us_spread']:5.1f} us{over}{ratio}"
        print(f"{line}  {row['form']}{', picked' * row.get('picked', False)}", flush=True)


def write_result(file: Path, data: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, dumps(data))


def dumps(data: dict[str, Any]) -> str:
    """JSON with one row per line."""
    return "\n".join(_lines(data, "")) + "\n"


def _lines(value: Any, indent: str) -> Iterator[str]:
    if not _has_rows(value):
        yield indent + json.dumps(value)
        return
    items = list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]
    yield indent + "[{"[isinstance(value, dict)]
    for place, (name, item) in enumerate(items):
        lines = list(_lines(item, indent + " "))
        if name is not None:
            lines[0] = f"{indent} {json.dumps(name)}: {lines[0].lstrip()}"
        lines[-1] += "," if place + 1 < len(items) else ""
        yield from lines
    yield indent + "]}"[isinstance(value, dict)]


def _has_rows(value: Any) -> bool:
    """Whether ``value`` is a list of objects, or has one somewhere inside."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, dict) for item in value)
    return isinstance(value, dict) and any(map(_has_rows, value.values()))


def read_result(file: Path, made_by: str) -> dict[str, Any]:
    """What ``write_result`` has written. Raises ValueError, in one line, for anything else."""
    try:
        data = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file} is no result of benchmarks/{made_by}: {reason_of(error)}") from None
    if not isinstance(data, dict) or not isinstance(data.get("env"), dict):
        raise ValueError(f"{file} is no result of benchmarks/{made_by}: it has no env")
    return data
