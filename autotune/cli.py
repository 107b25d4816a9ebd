"""``sgl-flashsample tune``: its commands and their options.

A mistake of the user is a ValueError or an OSError, which ``sgl_flashsample.cli.main`` prints as one line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..exit_codes import OK
from ..files import check_output, write_whole
from ..kernels.config import GROUP_SIZE
from ..kinds import KIND_NAMES, SamplingPath
from ..model_config import head_of
from ..switches import FOLDERS_VARIABLE
from ..tables.lookup import SIMULATED, user_folder
from ..tables.schema import Device, HeadShape, file_name
from .labels import DEVICES, device_named

EFFORT_NAMES = ("quick", "full", "exhaustive")
MAX_GPUS, MAX_PROCESSES, MAX_BATCH = 64, 256, 4096
_EPILOG = """\
A table is one JSON file for one GPU and one LM head. Servers look for it in --tuned FILE (or FLASHSAMPLE_TUNED), the
folders of FLASHSAMPLE_TUNED_DIR, $SGLANG_CACHE_DIR/flashsample, and among the shipped ones, in this order.

examples:
  sgl-flashsample tune plan models/Qwen3-8B     the trials of a run, and an estimate of its time
  sgl-flashsample tune run models/Qwen3-8B      tune for this GPU; the table lies where servers look for it
  sgl-flashsample tune explain --batch 24 --device 'NVIDIA H200' --model-path models/Qwen3-8B
  sgl-flashsample tune verify FILE              check that a table still holds on this machine

exit codes: 0 done, also where the built-in choice stays everywhere or the time was over before the last race; 1 a
choice or a time is wrong, the GPU is too noisy, a table is malformed or stale (lint), two tables differ (diff), a
package is missing; 2 an argument, or what it names, cannot be used, such as a --budget too short for one race; 130
interrupted
"""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Give the parser of ``sgl-flashsample tune`` its commands. ``run`` of the parsed options is the function of the
    command, which takes these options and returns the exit code, or None for 0."""
    parser.description = "Tuned tables: which path and configuration is fastest, per GPU, LM head and batch size."
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    names = parser.add_subparsers(dest="name", required=True, metavar="command")
    for name, command in COMMANDS.items():
        about = command.about[:1].upper() + command.about[1:] + "."
        subparser = names.add_parser(name, help=command.about, description=about)
        for flags, keywords in command.arguments:
            subparser.add_argument(*flags, **keywords)
        subparser.set_defaults(run=command.run)


def plan(options: argparse.Namespace) -> None:
    from .plan import EFFORTS, Plan, usual_compilers

    head, (device, assumed) = _head(options), _device(options.device)
    made = Plan(device, head, EFFORTS[options.effort])
    processes = options.processes or usual_compilers()
    estimate, budget = made.estimate(processes), made.effort.budget
    path = _folder(options.out) / file_name(device.name, head)
    studies = [(str(key), len(made.space(key).points), made.trials(key), made.probes(key)) for key in made.studies]
    if options.json:
        answer: dict[str, Any] = {"file": str(path), "device": msgspec.to_builtins(device)}
        names = ("study", "space", "trials", "probes")
        answer["studies"] = [dict(zip(names, study, strict=True)) for study in studies]
        answer |= {"compiles": made.compiles, "races": made.races}
        answer["seconds"] = dataclasses.asdict(estimate) | {"total": estimate.total, "budget": budget}
        print(json.dumps(answer, indent=1))
        return
    print(f"head {head.vocab} x {head.hidden} {head.dtype}, {device.name}{assumed}, effort {options.effort}")
    print(f"{'study':36} {'space':>6} {'tried':>6}  timed at rows")
    for name, space, trials, probes in studies:
        print(f"{name:36} {space:6} {trials:6}  {', '.join(map(str, probes))}")
    compilers = f"{processes} process{'es' * (processes != 1)}"
    print(f"{made.compiles} kernels to compile in {compilers}, {made.races} races")
    parts = f"start {estimate.start:.0f} s, search {estimate.search:.0f} s, races {estimate.race:.0f} s"
    print(f"about: {parts}, total {estimate.total:.0f} s")
    covered = "all of it"
    if estimate.covered < made.compiles:
        covered = f"about {estimate.covered} of the {made.compiles} configurations, the most promising first"
    print(f"the budget of {budget:.0f} s covers {covered}")
    print(f"a server looks for: {path}")


def run(options: argparse.Namespace) -> int:
    from .progress import Progress
    from .run import Options
    from .run import run as tune

    head, out = _head(options), _folder(options.out)
    fields = {field.name for field in dataclasses.fields(Options)} & vars(options).keys() - {"out"}
    chosen = Options(head, out, **{name: getattr(options, name) for name in fields})
    with Progress(quiet=options.json) as progress:
        result = tune(chosen, progress)
    if options.json:
        answer = {"status": result.status, "message": result.message, "file": str(result.path or "")}
        print(json.dumps(answer | {"complete": result.status in ("done", "up to date")}, indent=1))
        return result.code
    print(result.message)
    if result.path is not None and result.code == OK:
        print(_serving(options, result.path, simulated=result.table is not None and result.table.simulated))
    return result.code


def _folder(out: Path | None) -> Path:
    """The folder of a run's table."""
    folder = out or user_folder()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is {folder}, which is not a folder")
    return folder


def _serving(options: argparse.Namespace, path: Path, *, simulated: bool) -> str:
    """The command of a server that uses the table in ``path``."""
    if simulated:
        return SIMULATED
    model = getattr(options, "model", None) or options.model_path or "MODEL"
    words = ["sglang", "serve", "--model-path", model, "--sampling-backend", "flashsample"]
    words += ["--tp", str(options.tp)] if options.tp > 1 else []
    folder = "" if options.out is None else f"{FOLDERS_VARIABLE}={shlex.quote(str(path.parent.resolve()))} "
    return f"serve with it: {folder}{shlex.join(words)}"


def verify(options: argparse.Namespace) -> int:
    from .progress import Progress
    from .verify import verify as replay

    table = _tables().read(options.file)
    with Progress(quiet=options.json) as progress:
        code, line, replayed = replay(table, progress)
    if options.json:
        sizes = [dataclasses.asdict(one) | {"reason": one.reason} for one in replayed]
        print(json.dumps({"code": code, "message": line, "sizes": sizes}, indent=1))
    else:
        print(line)
    return code


def report(options: argparse.Namespace) -> None:
    table = _tables().read(options.file)
    name = options.file.with_suffix(".html").name
    out = options.out or Path(name)
    out = out / name if out.is_dir() else out
    check_output(out, "--out", "an HTML page", [options.file])
    from .report import page  # takes seconds: faults of the files are told before
    from .trials import log_of

    try:
        write_whole(out, page(table, log_of(options.file)))
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror or error}") from None
    print(json.dumps({"file": str(options.file), "page": str(out)}) if options.json else out)
    if options.open:
        webbrowser.open(out.resolve().as_uri())


def explain(options: argparse.Namespace) -> None:
    of_head = (options.model_path, options.vocab, options.hidden, options.dtype, options.softcap)
    given = any(value is not None for value in of_head) or options.tp != 1
    if options.file is not None and (given or options.device is not None):
        raise ValueError("a table and --device or a head are given; expected one or the other")
    head = _head(options, warn=False) if given else None
    _tables().explain(options.file, options.device, head, options.batch, options.kind, options.json)


def _tables() -> Any:
    """``tables.py``, which needs rich."""
    from . import tables

    return tables


def _head(options: argparse.Namespace, warn: bool = True) -> HeadShape:
    model = getattr(options, "model", None)
    if model and options.model_path:
        raise ValueError("the model is given twice")
    given = (options.vocab, options.hidden, options.dtype, options.softcap, options.tp)
    head = head_of(model or options.model_path, *given)
    if warn and head.tp > 1 and head.vocab % GROUP_SIZE:
        print(
            f"warning: servers with --tp {head.tp} take built-in kernel settings for this head, and no table: each "
            f"rank has {head.vocab} token ids, which is not a multiple of {GROUP_SIZE}",
            file=sys.stderr,
        )
    return head


def _device(name: str | None) -> tuple[Device, str]:
    """The device of that name, else of this machine, and a remark about it."""
    if name is not None:
        return device_named(name), ""
    import torch

    from ..tables.lookup import device_of

    if torch.cuda.is_available():
        return device_of(torch.device("cuda")), ""
    return DEVICES["NVIDIA H200"], " (assumed: there is no GPU here)"


def seconds_of(text: str) -> float:
    """ "50s", "3m", "1h" or seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|)", text.strip())
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not 1 <= seconds <= 86400 * 7:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; expected such as 50s, 3m or 1h")
    return seconds


def sizes_of(text: str) -> tuple[int, ...]:
    """ "1,8,64"."""
    sizes = sorted({int(part) for part in text.split(",")} if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text) else ())
    if not sizes or sizes[0] < 1 or sizes[-1] > MAX_BATCH:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of batch sizes; expected such as 1,8,64")
    return tuple(sizes)


def _number(most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {most}")
        return int(text)

    return number


Argument = tuple[tuple[str, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of ``tune``. run: its function, which returns the exit code, or None for 0."""

    about: str
    run: Callable[[argparse.Namespace], int | None]
    arguments: Sequence[Argument]


def _argument(*flags: str, **options: Any) -> Argument:
    return flags, options


def _flag(name: str, about: str) -> Argument:
    return (name,), {"action": "store_true", "help": about}


FILE = _argument("file", help="a table")
JSON = _flag("--json", "print JSON")
KIND = _argument("--kind", choices=KIND_NAMES, metavar="KIND", help=f"only this one of {', '.join(KIND_NAMES)}")
MODEL = _argument("model", nargs="?", help="a model's folder, its config.json, or a hub's name")
HEAD = (
    _argument("--model-path", metavar="MODEL", help="a model's folder, as servers call it"),
    _argument("--vocab", type=int, metavar="V", help="ids of the whole head, instead of the config's"),
    _argument("--hidden", type=int, metavar="D", help="hidden size, instead of the config's"),
    _argument("--dtype", help="dtype of the head's weight: bf16, fp16, fp32, or e4m3 with a scale per row"),
    _argument("--softcap", action=argparse.BooleanOptionalAction, help="the logits have a softcap, or none"),
    _argument("--tp", "--tp-size", type=int, default=1, help="tensor-parallel degree: the head is one shard"),
)
TUNING = (
    _argument("--effort", choices=EFFORT_NAMES, default="full", help="(default: full)"),
    _argument("--out", type=Path, help="folder of the table (default: the user's cache)"),
    JSON,
)
PROCESSES = {"type": _number(MAX_PROCESSES), "help": "processes that compile (default: processors but one)"}
FLASHINFER_HELP = "also let a path be chosen that draws other tokens of the same distribution, for rows without seeds"

COMMANDS = {
    "plan": Command(
        "print the trials of a run and an estimate of its time; measures nothing",
        plan,
        (
            *(MODEL, *HEAD, *TUNING),
            _argument("--device", metavar="NAME", help="the GPU where there is none here (default: NVIDIA H200)"),
            _argument("--processes", **PROCESSES),
        ),
    ),
    "run": Command(
        "tune for one head on this GPU",
        run,
        (
            *(MODEL, *HEAD, *TUNING),
            _argument("--budget", type=seconds_of, help="time of the run: 50s, 3m, 1h (default: the effort's)"),
            _flag(
                "--force", "measure everything again, instead of going on after an earlier run; its log is kept aside"
            ),
            _argument("--gpus", type=_number(MAX_GPUS), default=1, help="GPUs to measure on (default: 1)"),
            _argument("--batch-sizes", dest="sizes", type=sizes_of, help="instead of the usual ten: 1,8,64"),
            _argument("--compilers", **PROCESSES),
            _argument("--baselines", choices=("on", "off"), help="race FlashInfer too (default: on unless quick)"),
            _argument(
                "--allow-path", dest="flashinfer", choices=(SamplingPath.FLASHINFER.value,), help=FLASHINFER_HELP
            ),
            _flag("--allow-busy", "tune although others use the GPU"),
        ),
    ),
    "verify": Command("measure a table again, in a fresh process", verify, (FILE, JSON)),
    "report": Command(
        "write an HTML page about a table",
        report,
        (
            _argument("file", type=Path, help="a table; its log of trials is looked for beside it"),
            _argument("--out", type=Path, help="the page, or a folder for it (default: this folder)"),
            _flag("--open", "show it in a browser"),
            JSON,
        ),
    ),
    "list": Command(
        "print the tables that servers here would find",
        lambda options: _tables().list_tables(options.json),
        (JSON,),
    ),
    "show": Command(
        "print a table for people",
        lambda options: _tables().show(options.file, options.json, options.kind),
        (FILE, KIND, JSON),
    ),
    "explain": Command(
        "print the choice for a batch, the table that it comes from, and why",
        explain,
        (
            _argument("file", nargs="?", help="a table; without it, the one that a server would find"),
            _argument("--batch", type=_number(10**9 - 1), required=True, metavar="N", help="rows of the batch"),
            *(KIND, *HEAD, JSON),
            _argument("--device", metavar="NAME", help='the GPU, as the driver names it: "NVIDIA H200"'),
        ),
    ),
    "diff": Command(
        "compare two tables: choices, times against their noise, environments; exit code 1 if sizes differ",
        lambda options: _tables().diff(options.a, options.b, options.json, options.all),
        (
            _argument("a", help="a table"),
            _argument("b", help="another table of the same head"),
            _flag("--all", "also the sizes that they agree on"),
            JSON,
        ),
    ),
    "merge": Command(
        "join two tables of one device, head and versions: for a size of both, the choice that gains more",
        lambda options: _tables().merge(options.a, options.b, options.out, options.strict, options.json),
        (
            _argument("a", help="the table whose choice stays where the other's does not gain more, beyond noise"),
            _argument("b", help="another table of the same device, head and versions"),
            _argument("-o", "--out", type=Path, required=True, metavar="C", help="the file to write, or its folder"),
            _flag("--strict", "write nothing if any batch size has another choice in B"),
            JSON,
        ),
    ),
    "lint": Command(
        "check tables: form, ranges, sizes, machine code; exit code 1 if one is malformed, simulated or stale",
        lambda options: _tables().lint(options.files, options.json),
        (_argument("files", nargs="+", metavar="FILE", help="tables"), JSON),
    ),
}
