"""``tune plan | run | verify | report``: what needs the search.

Exit codes: 0 fine, also where the default won everywhere or the time was over; 1 something that was measured is wrong;
2 a mistake of who typed, or a GPU too noisy to measure on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from ..lookup import load_table, user_folder
from ..table import Device, Table, file_name
from ..work import Path as DrawPath
from . import head as heads
from . import progress as progresses

OK, WRONG, BAD = 0, 1, 2
MOST_GPUS = 64
EFFORT_NAMES = ("quick", "full", "exhaustive")
# What is assumed where there is no GPU to ask: shared memory of a program, from the vendor's tables.
DEVICES = {
    "NVIDIA H200": Device("NVIDIA H200", "9.0", 132, 50, 232448),
    "NVIDIA H100 80GB HBM3": Device("NVIDIA H100 80GB HBM3", "9.0", 132, 50, 232448),
    "NVIDIA A100-SXM4-80GB": Device("NVIDIA A100-SXM4-80GB", "8.0", 108, 40, 166912),
    "NVIDIA B200": Device("NVIDIA B200", "10.0", 148, 126, 232448),
}


class UsageError(ValueError):
    """A mistake in what was typed; the message is one line."""


def add_plan(parser: argparse.ArgumentParser) -> None:
    _add_head(parser)
    parser.add_argument("--device", help="name of the GPU where there is none here (default: NVIDIA H200)")
    parser.add_argument("--processes", type=_count("--processes"), help="that compile (default: processors but one)")


def add_run(parser: argparse.ArgumentParser) -> None:
    _add_head(parser)
    parser.add_argument("--budget", type=seconds_of, help="time of the whole run: 50s, 3m, 1h (default: the effort's)")
    parser.add_argument("--no-resume", dest="resume", action="store_false", help="forget what an earlier run found out")
    parser.add_argument("--resume", dest="resume", action="store_true", default=True, help="go on after one (default)")
    parser.add_argument("--force", action="store_true", help="tune again although the table is up to date")
    parser.add_argument("--gpus", type=_count("--gpus", MOST_GPUS), default=1, help="to measure on (default: 1)")
    parser.add_argument("--batch-sizes", type=batches_of, help="instead of the ten buckets: 1,8,64")
    parser.add_argument("--compilers", type=_count("--compilers", 256), help="processes (default: processors but one)")
    parser.add_argument("--rivals", choices=("on", "off"), help="race FlashInfer too (default: on unless quick)")
    parser.add_argument(
        "--allow-path",
        choices=(DrawPath.FLASHINFER.value,),
        help="also let a path be chosen that draws other tokens of the same distribution, for batches without seeds",
    )
    parser.add_argument("--allow-busy", action="store_true", help="tune although others use the GPU")


def add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a table")
    parser.add_argument("--surface", help="a recorded cost surface instead of a GPU")
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a table")
    parser.add_argument("--out", type=Path, help="the page to write (default: beside the table, .html)")


def _add_head(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a model's folder, or its config.json")
    parser.add_argument("--model-path", help="the same, as servers call it")
    parser.add_argument("--vocab", type=int, help="ids of the head, instead of the config's")
    parser.add_argument("--hidden", type=int, help="hidden size, instead of the config's")
    parser.add_argument("--dtype", help="of the head's weight: bf16, fp16 or fp32")
    parser.add_argument("--softcap", action=argparse.BooleanOptionalAction, help="whether the logits have a softcap")
    parser.add_argument("--tp", "--tp-size", type=int, default=1, help="tensor-parallel degree: one shard is tuned")
    parser.add_argument("--effort", choices=EFFORT_NAMES, default="full", help="(default: full)")
    parser.add_argument("--out", type=Path, help="folder of the table (default: the user's cache)")
    parser.add_argument("--surface", help="a recorded cost surface instead of a GPU")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def plan(options: argparse.Namespace) -> int:
    from .plan import EFFORTS, Plan
    from .surface import load as load_surface

    head, device, assumed = _head(options), None, ""
    if options.surface:
        device = Device(**load_surface(options.surface)["device"])
    else:
        device, assumed = _device(options.device)
    found = Plan(device, head, EFFORTS[options.effort])
    processes = options.processes or max(1, min(15, len(os.sched_getaffinity(0)) - 1))
    seconds = found.estimate(processes)
    path = (options.out or user_folder()) / file_name(device.name, head)
    studies: list[dict[str, Any]] = [
        {
            "study": str(key),
            "space": len(found.space(key).points),
            "trials": found.trials(key),
            "probes": found.probes(key),
        }
        for key in found.studies
    ]
    if options.json:
        facts = {"file": str(path), "studies": studies, "compiles": found.compiles, "races": found.races}
        print(json.dumps(facts | {"seconds": seconds, "device": dataclasses.asdict(device)}, indent=1))
        return OK
    print(f"head {head.vocab} x {head.hidden} {head.dtype}, {device.name}{assumed}, effort {options.effort}")
    print(f"{'study':28} {'space':>6} {'tried':>6}  timed at rows")
    for study in studies:
        probes = ", ".join(map(str, study["probes"]))
        print(f"{study['study']:28} {study['space']:6} {study['trials']:6}  {probes}")
    print(f"{found.compiles} kernels to compile in {processes} processes, {found.races} races")
    parts = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    print(f"about: {parts} (budget {found.effort.budget:.0f} s)")
    print(f"a server looks for: {path}")
    return OK


def run(options: argparse.Namespace) -> int:
    from .run import Options, TuneError
    from .run import run as tune
    from .surface import load as load_surface

    head = _head(options)
    if options.surface:
        load_surface(options.surface)
    out = options.out or user_folder()
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out is {out}, which is not a folder")
    chosen = Options(
        head,
        out,
        effort=options.effort,
        budget=options.budget,
        resume=options.resume,
        force=options.force,
        gpus=options.gpus,
        surface=options.surface,
        allow_busy=options.allow_busy,
        compilers=options.compilers,
        rivals=None if options.rivals is None else options.rivals == "on",
        buckets=options.batch_sizes,
        flashinfer=options.allow_path is not None,
    )
    shown = progresses.make(quiet=options.json)
    try:
        result = tune(chosen, shown)
    except (TuneError, ModuleNotFoundError) as error:
        raise UsageError(str(error)) from None
    finally:
        shown.close()
    if options.json:
        facts = {"status": result.status, "message": result.message, "file": str(result.path or "")}
        print(json.dumps(facts | {"complete": result.status in ("done", "up to date")}, indent=1))
    else:
        print(result.message)
    return result.code


def verify(options: argparse.Namespace) -> int:
    from .surface import load as load_surface
    from .verify import verify as replay

    if options.surface:
        load_surface(options.surface)
    shown = progresses.make(quiet=options.json)
    try:
        code, line, found = replay(_table(options.file), options.surface, shown)
    finally:
        shown.close()
    if options.json:
        rows = [dataclasses.asdict(one) | {"problem": one.problem} for one in found]
        print(json.dumps({"code": code, "message": line, "buckets": rows}, indent=1))
    else:
        print(line)
    return code


def report(options: argparse.Namespace) -> int:
    from ..files import write_whole
    from .report import page

    table, log = _table(options.file), options.file.with_suffix(".trials.jsonl")
    out = options.out or options.file.with_suffix(".html")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, page(table, log if log.exists() else None))
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}") from None
    print(out)
    return OK


COMMANDS: dict[str, tuple[str, Any, Any]] = {
    "plan": ("what a run would try, and how long it would take; measures nothing", add_plan, plan),
    "run": ("tune for one head on this GPU", add_run, run),
    "verify": ("measure a table again, in a fresh process", add_verify, verify),
    "report": ("write an HTML page about a table", add_report, report),
}


def _head(options: argparse.Namespace) -> Any:
    if options.model and options.model_path:
        raise UsageError("the model is given twice")
    model = options.model or options.model_path
    return heads.head_of(model, options.vocab, options.hidden, options.dtype, options.softcap, options.tp)


def _device(name: str | None) -> tuple[Device, str]:
    if name is None:
        import torch

        if torch.cuda.is_available():
            found: Any = torch.cuda.get_device_properties(0)
            cc = f"{found.major}.{found.minor}"
            shared = found.shared_memory_per_block_optin
            return Device(found.name, cc, found.multi_processor_count, found.L2_cache_size >> 20, shared), ""
        return DEVICES["NVIDIA H200"], " (assumed: there is no GPU here)"
    matching = [device for known, device in DEVICES.items() if name.lower().replace("_", " ") in known.lower()]
    if not matching:
        raise UsageError(f"--device is {name!r}; known without a GPU are {', '.join(DEVICES)}")
    return matching[0], ""


def _table(path: Path) -> Table:
    table, problem = load_table(path)
    if table is None:
        raise UsageError(f"{path}: {problem}")
    return table


def seconds_of(text: str) -> float:
    """ "50s", "3m", "1h" or seconds."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|)", text.strip())
    seconds = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not 1 <= seconds <= 86400 * 7:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; expected such as 50s, 3m or 1h")
    return seconds


def batches_of(text: str) -> tuple[int, ...]:
    """ "1,8,64"."""
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1 or found[-1] > 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of batch sizes; expected such as 1,8,64")
    return found


def _count(name: str, most: int = 1024) -> Any:
    def count(text: str) -> int:
        if not text.isdigit() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {most}")
        return int(text)

    return count
