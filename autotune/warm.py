"""``sgl-flashsample warm``: compiles the kernels that a server of a head launches into Triton's cache; needs no GPU.

A kernel's name in the cache depends on the compute capability, the head's shape and dtype, the choices of the table,
and the versions of Triton and of this package.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import triton

from ..kernels.launch import Gpu, pretend_gpu
from ..paths import Parts
from ..screen import UnwrittenScreen, unsupported_head
from ..screen_race import candidates, raced_kinds, unsupported_race
from ..selfcheck import CHECKED_ROWS, MAX_COMPILED_ROWS, MAX_IDS, compile_ahead, first_ids
from ..tables.fingerprint import compare_compiled
from ..tables.lookup import resolve
from ..tables.schema import Device, HeadShape
from .workload import empty_head

_KERNEL = re.compile("[A-Z2-7]{52}")  # a kernel's folder in Triton's cache: a SHA-256 in base 32
_ELF = struct.Struct("<4s28xQQ6xHHHH")  # magic, then offset, size and number of program and of section headers


class Warmed(NamedTuple):
    """compiled, found: kernels that were compiled, and that the cache had. incomplete: compiled ones that the cache had
    in part. table: the lines of a server's log about its table."""

    compiled: int
    found: int
    incomplete: int
    seconds: float
    table: tuple[str, ...]


def warm(
    shape: HeadShape,
    device: Device,
    *,
    file: str | None = None,
    screened: bool = True,
    max_rows: int = MAX_COMPILED_ROWS,
    step: Callable[[], Any] = lambda: None,
) -> Warmed:
    """Compile for ``device``, which need not be here. The process can launch nothing afterwards.

    file: the tuned table, None for the one that a server finds. screened: also the kernels of screened batches, where
    the table takes that path, or where a server without a fresh table tries it; none of a quantised head. max_rows:
    rows of the largest batch. step: called after each kernel.
    """
    major, minor = map(int, device.cc.split("."))
    pretend_gpu(Gpu((major, minor), device.sms))
    # Pages that are never written take no memory.
    head = empty_head(shape, "cpu")
    resolved = resolve(head, file=file, device=device)
    heads = [head, first_ids(head, MAX_IDS)]
    table = resolved.dispatch
    screened = screened and unsupported_head(head) is None
    if screened and not resolved.knows_screens and unsupported_race(head) is None:
        table = candidates(table, raced_kinds(head))  # a server races them at its start
    rows = table.screened_rows(max_rows) if screened else 0
    parts = [Parts.of(one, UnwrittenScreen(one, max(rows, CHECKED_ROWS)) if rows else None) for one in heads]
    counts = [0, 0]

    def listen(*, cache_hit: bool, **about: Any) -> None:
        counts[cache_hit] += 1
        step()

    started, before = time.monotonic(), triton.knobs.compilation.listener
    incomplete = remove_incomplete(Path(triton.knobs.cache.dir))
    triton.knobs.compilation.listener = listen
    try:
        compile_ahead(parts, max_rows, table)
    finally:
        triton.knobs.compilation.listener = before
    seconds, compiled = time.monotonic() - started, compare_compiled(resolved, parts[0], max_rows)
    lines = (*resolved.warnings, *compiled.warnings, compiled.line())
    return Warmed(counts[0], counts[1], incomplete, seconds, lines)


def remove_incomplete(cache: Path) -> int:
    """Remove the kernels from Triton's cache that a full disk or a killed process has left incomplete, which Triton
    would take as they are; returns how many."""
    kernels = [folder for folder in cache.glob("*") if _KERNEL.fullmatch(folder.name) and folder.is_dir()]
    incomplete = [kernel for kernel in kernels if not all(_is_whole(file) for file in kernel.glob("*"))]
    for kernel in incomplete:
        shutil.rmtree(kernel, ignore_errors=True)  # another process may do the same
    return len(incomplete)


def _is_whole(file: Path) -> bool:
    """True where a file of a kernel is complete, as far as its end shows: the headers of a cubin are at its end."""
    try:
        if file.suffix == ".json":
            json.loads(file.read_text())
        if file.suffix != ".cubin":
            return True
        with file.open("rb") as opened:
            header = opened.read(_ELF.size)
            size = os.fstat(opened.fileno()).st_size
    except ValueError:
        return False
    except OSError:  # another process has removed it, or it is none of ours to read
        return True
    if len(header) < _ELF.size or not header.startswith(b"\x7fELF"):
        return False
    _, programs, sections, program_size, num_programs, section_size, num_sections = _ELF.unpack(header)
    return size >= max(programs + program_size * num_programs, sections + section_size * num_sections)
