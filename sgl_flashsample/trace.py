"""``sgl-flashsample trace``: counts the tokens of text or of answers into a hot set, and shows hot sets.

What a running server draws is counted by the server itself (``sglang/trace.py``). Exit codes: 0 fine, 2 a mistake of
who typed, 130 interrupted, with what was counted until then written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import token_sources as sources
from .autotune import progress as progresses
from .autotune.commands import BAD, INTERRUPTED, Parser
from .autotune.head import HeadError, head_of
from .bounded_json import shorten
from .files import write_whole
from .hot_set import MAX_VOCAB, HotSet, token_sizes
from .kernels.rng import GROUP_SIZE

_EPILOG = """\
A hot set says how often each group of 16 ids is drawn. Count what your model draws: traffic differs, and a hot set of
other text covers less of it.

a running server: start it with FLASHSAMPLE_TRACE=hot.json in its environment; `show hot.json` at any time.
answers that were kept: `ids answers.jsonl --model /models/Qwen3-8B -o hot.json`
text, where there are none: `text corpus.txt --tokenizer /models/Qwen3-8B -o hot.json`
"""

_Portions = Iterator[tuple[list[int], int]]


def add_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", default=[sources.STDIN], metavar="FILE", help="UTF-8 text; - or none: stdin"
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH|NAME",
        help="a model's folder, its tokenizer.json, or a name that transformers' AutoTokenizer knows",
    )
    _add_result(parser, "the config.json beside the tokenizer, else what the tokenizer knows")


def add_ids(parser: argparse.ArgumentParser) -> None:
    fields = " or ".join(sources.ID_FIELDS)
    about = f"JSON lines: lists of ids, or answers with {fields}; - or none: stdin"
    parser.add_argument("files", nargs="*", default=[sources.STDIN], metavar="FILE", help=about)
    parser.add_argument("--model", metavar="PATH", help="the model's folder or its config.json, for V")
    _add_result(parser, "the model's")


def _add_result(parser: argparse.ArgumentParser, vocab: str) -> None:
    parser.add_argument("--vocab", type=_vocab, metavar="V", help=f"ids of the whole LM head (default: {vocab})")
    parser.add_argument("-o", "--out", metavar="HOT", help="the hot set to write (default: only print the summary)")
    parser.add_argument("--name", help="of the model, to be written down (default: the tokenizer's or the model's)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a hot set")
    parser.add_argument("--json", action="store_true", help="as JSON")


def add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="HOT", help="hot sets of one vocabulary, as of several servers")
    parser.add_argument("-o", "--out", required=True, metavar="HOT", help="the file to write")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def text(options: argparse.Namespace) -> int:
    encode, known = sources.load_tokenizer(options.tokenizer)
    vocab, note = options.vocab or _vocab_beside(options.tokenizer), ""
    if vocab is None:
        vocab, note = known, f"V is {known}, the ids that the tokenizer knows; --vocab if the LM head has more"
    if vocab < known:
        raise sources.SourceError(f"V is {vocab}; expected {known} or more, the ids that the tokenizer knows")
    return _record(options, vocab, options.tokenizer, "text", lambda file: sources.ids_of_text(file, encode), note)


def ids(options: argparse.Namespace) -> int:
    if (options.vocab is None) == (options.model is None):
        raise sources.SourceError("V is not known: expected one of --model and --vocab")
    vocab = options.vocab or head_of(options.model, None, None, None, None, 1).vocab
    name = options.model or ""
    return _record(options, vocab, name, "ids", lambda file: sources.ids_of_lines(file, vocab))


def show(options: argparse.Namespace) -> int:
    _print(HotSet.load(options.file), options.json, options.file)
    return 0


def merge(options: argparse.Namespace) -> int:
    first, *others = [HotSet.load(file) for file in options.files]
    for other in others:
        first = first.plus(other)
    write_whole(options.out, first.dumps())
    _print(first, options.json, options.out)
    return 0


COMMANDS: dict[str, tuple[str, Callable[[Any], None], Callable[[argparse.Namespace], int]]] = {
    "text": ("count the tokens of text", add_text, text),
    "ids": ("count ids in JSON lines, as of answers that were kept", add_ids, ids),
    "show": ("print what a hot set covers", add_show, show),
    "merge": ("add up hot sets", add_merge, merge),
}


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="sgl-flashsample trace",
        description="Hot sets: which groups of ids carry most of a model's traffic.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (about, add_arguments, _) in COMMANDS.items():
        add_arguments(names.add_parser(name, help=about, description=about[:1].upper() + about[1:] + "."))
    options = parser.parse_args(arguments)
    try:
        code = COMMANDS[options.command][2](options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        about = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            about = f"{error.filename}: {error.strerror}"
        print(f"error: {' '.join(about.split())}", file=sys.stderr)
        return BAD
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _record(
    options: argparse.Namespace,
    vocab: int,
    tokenizer: str,
    kind: str,
    read: Callable[[str], _Portions],
    note: str = "",
) -> int:
    """Count, also until an interruption, then write and print."""
    if options.out is not None and not Path(options.out).absolute().parent.is_dir():
        raise sources.SourceError(f"--out is {options.out}, in a folder that is not there")  # not after an hour
    shown = progresses.make(quiet=options.json)
    if note:
        shown.note(note)
    counts: Counter[int] = Counter()
    interrupted = False
    try:
        _count(options.files, read, counts, shown)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        shown.close()
    if not counts:
        raise sources.SourceError("interrupted before any token was counted" if interrupted else "there is no token")
    names = ", ".join("stdin" if file == sources.STDIN else Path(file).name for file in options.files)
    name = options.name if options.name is not None else name_of(tokenizer)
    found = HotSet.of_tokens(counts, vocab, shorten(name), shorten(f"{kind}: {names}"))
    if options.out is not None:
        write_whole(options.out, found.dumps())
    _print(found, options.json, options.out, interrupted)
    if interrupted:
        print("interrupted: what was counted until then is above", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def _count(files: list[str], read: Callable[[str], _Portions], counts: Counter[int], shown: progresses.Plain) -> None:
    total, done, tokens = sources.bytes_of(files), 0, 0
    for file in files:
        for portion, size in read(file):
            counts.update(portion)
            done, tokens = done + size, tokens + len(portion)
            shown.update("KiB read", done >> 10, max(total, done) >> 10, f"{tokens:,} tokens")


def name_of(model: str) -> str:
    """How a model or tokenizer is written down: the name of its folder, not where that lies; a hub's name as it is."""
    path = Path(model)
    if not model or not path.exists():
        return model
    return (path if path.is_dir() else path.parent).resolve().name


def _vocab_beside(tokenizer: str) -> int | None:
    path = Path(tokenizer)
    try:
        return head_of(str(path if path.is_dir() else path.parent), None, None, None, None, 1).vocab
    except HeadError:
        return None


def _vocab(given: str) -> int:
    if not (given.isascii() and given.isdigit() and len(given) <= 9 and 1 <= int(given) <= MAX_VOCAB):
        raise argparse.ArgumentTypeError(f"{given!r} is no number of ids from 1 to {MAX_VOCAB}")
    return int(given)


def _print(found: HotSet, as_json: bool, file: str | None, interrupted: bool = False) -> None:
    if as_json:
        print(json.dumps(_facts(found) | {"file": file, "interrupted": interrupted}, indent=1))
    else:
        print("\n".join(_lines(found, file)))


def _facts(found: HotSet) -> dict[str, Any]:
    return {
        "name": found.name,
        "source": found.source,
        "vocab": found.vocab,
        "counted": found.counted,
        "groups": found.num_groups,
        "groups_seen": found.seen,
        "unseen": found.unseen,
        "coverage": [
            {"ids": size, "by_id": found.by_token.get(size), "groups": groups, "by_group": found.coverage(groups)}
            for size, groups in _sizes(found)
        ],
        "digest": found.digest,
        "notes": list(found.notes),
    }


def _sizes(found: HotSet) -> list[tuple[int, int]]:
    """Numbers of ids, and of as many ids in groups."""
    return [(size, size // GROUP_SIZE) for size in token_sizes(found.vocab)]


def _lines(found: HotSet, file: str | None) -> Iterator[str]:
    about = ", ".join(filter(None, (found.name, found.source)))
    yield f"{found.counted:,} tokens counted{f' ({about})' if about else ''}"
    yield f"{found.seen:,} of {found.num_groups:,} groups of {GROUP_SIZE} ids seen (V = {found.vocab:,})"
    yield f"about {100 * found.unseen:.2g} % or less of further tokens are of none of these"
    for note in found.notes:
        yield f"note: {note}"
    rows = [("ids", "single ids cover", "groups", "groups cover")]
    for size, groups in _sizes(found):
        single = f"{100 * found.by_token[size]:.2f} %" if size in found.by_token else "not known"
        rows.append((f"{size:,}", single, f"{groups:,}", f"{100 * found.coverage(groups):.2f} %"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    yield f"{file}: {found.digest}" if file else "not written: --out names a file to write"
