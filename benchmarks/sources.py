"""The code that a result describes: a fingerprint of the code that draws, and the commit. Loads no torch.

The fingerprint is a hash of the source text without comments, docstrings and empty lines. Equal fingerprints are equal
kernels and equal choices of a configuration. Unequal ones may still compile to the same machine code: a file with
another fingerprint, or without one, counts as measured with other code.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIGITS = 16
UNKNOWN = "unknown"
CHOICES = ("defaults", "dispatch", "kinds", "paths")  # modules that choose a configuration and launch it
IN_HOST_MEMORY = ("cpu_loops", "cpu_path")
NOT_TIMED = ("reference",)
OF_DRAFTS = ("draft_children", "follow_drafts", "sample_own_ids")  # kernels that run with speculative decoding alone
OF_RANKS = ("merge_logprobs", "merge_ranks", "peer_memory")  # kernels that run on several GPUs alone
CPU, GPU, DRAFTS, RANKS = "cpu", "gpu", "gpu, drafts", "gpus"
NOT_RUN = {GPU: (*OF_DRAFTS, *OF_RANKS), DRAFTS: OF_RANKS, RANKS: ()}  # by place


def place_of(name: str) -> str:
    """Where a result file of this name was measured: on a CPU, on one GPU, there with drafts, or on several GPUs."""
    card, _, benchmark = name.removesuffix(".json").rpartition("-")
    if not card:
        return CPU
    if re.search(r"x\d+(-|$)", card):
        return RANKS
    return DRAFTS if benchmark == "speculation" else GPU


def drawing_code(place: str) -> list[Path]:
    """The files that decide how tokens are drawn in a place of ``place_of``, and how fast."""
    package = ROOT / "sgl_flashsample"
    if place == CPU:
        return [package / f"{name}.py" for name in IN_HOST_MEMORY]
    others = (*NOT_TIMED, *NOT_RUN[place])
    kernels = sorted(path for path in (ROOT / "kernels").glob("*.py") if path.stem not in others)
    built_in = sorted((package / "tables").glob("builtin-*.json"))
    return [*kernels, *(package / f"{name}.py" for name in CHOICES), *built_in]


def fingerprint(files: Iterable[Path]) -> str:
    """Hash of the code in ``files``, in hexadecimal digits; the same with every release of Python."""
    digest = hashlib.sha256()
    for file in files:
        text = bare(file.read_text()) if file.suffix == ".py" else file.read_text()
        digest.update(f"{file.name}\0{text}\0".encode())
    return digest.hexdigest()[:DIGITS]


def bare(source: str) -> str:
    """``source`` without comments, docstrings, empty lines and blanks at the ends of lines."""
    lines = source.splitlines()
    for (first, start), (last, end) in sorted([*_docstrings(source), *_comments(source)], reverse=True):
        # Offsets of the syntax tree count bytes, not characters; nothing but a comment follows a docstring on its line.
        lines[first - 1 : last] = [lines[first - 1][:start] + lines[last - 1][end:]]
    return "\n".join(filter(None, (line.rstrip() for line in lines)))


Span = tuple[tuple[int, int], tuple[int, int]]  # line and column of the beginning, and of the end


def _docstrings(source: str) -> Iterator[Span]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            assert text.end_lineno is not None and text.end_col_offset is not None
            yield (text.lineno, text.col_offset), (text.end_lineno, text.end_col_offset)


def _comments(source: str) -> Iterator[Span]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start, token.end


def state() -> dict[str, object]:
    """The facts that a result file records of this tree."""
    code = {place: fingerprint(drawing_code(place)) for place in (CPU, *NOT_RUN)}
    return {"commit": commit(), "drawing_code": code}


def commit() -> str:
    """The commit of this tree, with ", changed" where tracked files differ from it; "unknown" without Git."""
    try:
        head = _git("rev-parse", "HEAD").strip()
        return head + ", changed" * bool(_git("status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
