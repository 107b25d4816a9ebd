"""The command line: ``sgl-flashsample serve | tune | trace | doctor | demo``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys

from . import __version__

_SERVE_HELP = """\
usage: sgl-flashsample serve [--tuned FILE] [--flashsample-screen auto|on|off]
                             --model-path MODEL [any SGLang server argument ...]

Starts SGLang's server with --sampling-backend flashsample. Every other argument goes to SGLang unchanged;
`python -m sglang.launch_server --help` lists them.

  --tuned FILE  the tuned table to use; without it, one that fits is looked for (README, "Tune once, ship the file")
  --flashsample-screen auto|on|off
                whether to keep an INT8 copy of the LM head (README, "Below the floor"); auto: where a tuned table says
                that it wins

environment:
  FLASHSAMPLE_TUNED        the tuned table to use, as --tuned
  FLASHSAMPLE_TUNED_DIR    folders to look for one in, before the cache and the shipped ones
  FLASHSAMPLE_ALLOW_FAMILY 1: also use a table of another GPU of the same compute capability
  FLASHSAMPLE_SCREEN       auto, on or off, as --flashsample-screen
  FLASHSAMPLE_LOG_SECONDS  seconds between the log lines with counters (default 60)
  FLASHSAMPLE_REPORT_PATH  1: every response's meta_info.flashsample_path names the path of each token
  FLASHSAMPLE_ANY_SGLANG   1: also try SGLang versions that this release does not know
  FLASHSAMPLE_TRACE        a file: count the tokens that are drawn into this hot set (sgl-flashsample trace --help)
"""


def serve(arguments: list[str]) -> int:
    """Replace this process by SGLang's server with our backend on. Returns only when it cannot."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_SERVE_HELP)
        return 0 if arguments else 2
    if any(a.split("=")[0] == "--sampling-backend" for a in arguments):
        print("error: serve sets --sampling-backend itself; leave it out", file=sys.stderr)
        return 2
    try:
        tuned, arguments = _take(arguments, "--tuned", "the path of a table")
        screen, arguments = _take(arguments, "--flashsample-screen", "auto, on or off")
        if screen not in (None, "auto", "on", "off"):
            raise ValueError(f"--flashsample-screen is {screen!r}; expected auto, on or off")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("sglang") is None:
        print("error: SGLang is not installed: pip install 'sgl-flashsample[sglang]'", file=sys.stderr)
        return 1
    if not entry_point_found():
        print(
            "error: SGLang would not find the plugin (no entry point 'flashsample' in sglang.srt.plugins): "
            "pip install sgl-flashsample into the environment of this Python",
            file=sys.stderr,
        )
        return 1
    if tuned is not None:
        os.environ["FLASHSAMPLE_TUNED"] = os.path.abspath(tuned)  # the server's processes inherit it
    if screen is not None:
        os.environ["FLASHSAMPLE_SCREEN"] = screen
    command = [sys.executable, "-m", "sglang.launch_server", *arguments, "--sampling-backend", "flashsample"]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _take(arguments: list[str], name: str, expected: str) -> tuple[str | None, list[str]]:
    """The value of the option ``name`` and the arguments without it. Raises ValueError when it has none; expected: what
    is to be one, in words."""
    rest, value = list(arguments), None
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            rest, value = arguments[:place] + arguments[place + 1 :], argument.partition("=")[2]
        elif argument == name:
            rest, value = arguments[:place] + arguments[place + 2 :], next(iter(arguments[place + 1 :]), "")
        else:
            continue
        if not value:
            raise ValueError(f"{name} has no value; expected {expected}")
        if any(other.split("=")[0] == name for other in rest):
            raise ValueError(f"{name} is given twice")
        return value, rest
    return None, rest


def entry_point_found() -> bool:
    """Whether SGLang, in this Python, would discover the plugin."""
    found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="flashsample")
    return any(point.value.startswith("sgl_flashsample.") for point in found)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["serve"]:
        return serve(arguments[1:])  # not through argparse: SGLang's arguments are SGLang's business
    if arguments[:1] == ["tune"]:
        from .autotune.commands import main as tune

        return tune(arguments[1:])
    if arguments[:1] == ["trace"]:
        from .trace import main as trace

        return trace(arguments[1:])
    parser = argparse.ArgumentParser(prog="sgl-flashsample", description="Exact fused sampling for SGLang.")
    parser.add_argument("--version", action="version", version=f"sgl-flashsample {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("serve", help="start SGLang's server with the backend on", add_help=False)
    commands.add_parser("tune", help="tuned tables: which configuration is fastest on this GPU", add_help=False)
    commands.add_parser("trace", help="hot sets: which ids carry most of a model's traffic", add_help=False)
    doctor = commands.add_parser("doctor", help="check this machine: versions, GPU, hooks, a ten-second self-test")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    demo = commands.add_parser("demo", help="serve a generated checkpoint, send requests, show the path of each")
    demo.add_argument("--port", type=int, help="port of the server (default: a free one)")
    demo.add_argument("--size", help="size of the checkpoint (default: small on a GPU, tiny without)")
    demo.add_argument("--folder", default=".cache/demo", help="checkpoint and log (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        from .doctor import run

        return run(as_json=options.json)
    from .demo.run import run as run_demo

    return run_demo(options.folder, options.port, options.size)


if __name__ == "__main__":
    raise SystemExit(main())
