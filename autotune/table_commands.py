"""``tune show | explain | diff | merge | lint``: what is done with tables without a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..table_entries import DTYPES
from ..work import Work
from . import diff, explain, lint, merge, show

Command = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a table")
    parser.add_argument("--json", action="store_true", help="as JSON, with what was noted while reading")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="a table; without it, the one that a server here would find")
    parser.add_argument("--batch", type=_positive, required=True, metavar="N", help="rows of the batch")
    works = ", ".join(Work)
    parser.add_argument("--work", choices=list(map(str, Work)), default="plain", metavar="WORK", help=f"one of {works}")
    parser.add_argument("--device", metavar="NAME", help='the GPU, as the driver names it: "NVIDIA H200"')
    parser.add_argument("--vocab", type=_positive, metavar="V", help="ids of the head (of one shard with --tp)")
    parser.add_argument("--hidden", type=_positive, metavar="D", help="hidden size")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the head's weight (default: %(default)s)")
    parser.add_argument("--tp", type=_positive, default=1, help="tensor-parallel degree (default: %(default)s)")
    parser.add_argument("--softcap", action="store_true", help="the head's logits have a softcap")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help="a table")
    parser.add_argument("b", help="another table of the same head")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help="the table whose choice stays where the other's is not better")
    parser.add_argument("b", help="another table of the same device and head")
    parser.add_argument("-o", "--out", required=True, metavar="C", help="the file to write")
    parser.add_argument("--strict", action="store_true", help="write nothing if any batch size has another choice in B")


def _add_lint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="tables")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


COMMANDS: dict[str, Command] = {
    "show": ("print a table for people", _add_show, show.run),
    "explain": ("say what a batch takes, from which table, and why", _add_explain, explain.run),
    "diff": ("compare two tables: choices, times against their noise, environments", _add_diff, diff.run),
    "merge": ("join two tables of one device and head, the better choice where it is better", _add_merge, merge.run),
    "lint": ("check tables: form, ranges, sources, buckets; exit code 1 on errors", _add_lint, lint.run),
}
