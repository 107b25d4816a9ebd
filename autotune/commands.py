"""``sgl-flashsample tune``: finds its commands in the modules named ``*_commands`` beside it, and runs one.

Such a module has ``COMMANDS: {name: (help, add_arguments, run)}``; ``run(options)`` returns the exit code. A mistake of
the person who typed is a ValueError or an OSError: one line on the error stream and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

Command = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
BAD, INTERRUPTED = 2, 130
_EPILOG = """\
A table is one JSON file for one GPU and one LM head. Servers look for it in --tuned FILE (or FLASHSAMPLE_TUNED), the
folders of FLASHSAMPLE_TUNED_DIR, $SGLANG_CACHE_DIR/flashsample, and what is shipped, in this order.
"""


class Parser(argparse.ArgumentParser):
    """One line for a mistake, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD, f"error: {message} (see `{self.prog} --help`)\n")


def commands() -> dict[str, Command]:
    """All of them, by name."""
    found: dict[str, Command] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name.endswith("_commands"):
            found |= importlib.import_module(f".{module.name}", __package__).COMMANDS
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="sgl-flashsample tune",
        description="Tuned tables: which path and configuration is fastest, per GPU, LM head and batch size.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = parser.add_subparsers(dest="command", required=True, metavar="command")
    known = commands()
    for name, (about, add_arguments, _) in known.items():
        add_arguments(names.add_parser(name, help=about, description=about[:1].upper() + about[1:] + "."))
    options = parser.parse_args(arguments)
    run: Callable[[Any], int] = known[options.command][2]
    try:
        code = run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
