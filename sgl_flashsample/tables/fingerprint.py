"""The machine code of a configuration, as a hash: what a tuned table was measured with.

Two compilations by one release of Triton give the same hash, in any process and with or without the GPU. Comments,
names and lines of a kernel are not in it. Another release makes other code of the same kernel, and so does another
assembler (``TRITON_PTXAS_PATH``: ``torch.compile`` sets it in the process that calls it).
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import triton

from ..cpu_path import draws_in_host_memory
from ..defaults import HeadTraits, default_config
from ..files import first_line
from ..kernels.launch import compiling_only
from ..kinds import KIND_NAMES, BatchKind, Config
from ..selfcheck import launch_once
from .lookup import Match, ResolvedTable, gemm_as_measured, other_code, slower_than_measured
from .schema import Table

if TYPE_CHECKING:
    from ..kernels.params import LMHead
    from ..paths import Parts

logger = logging.getLogger("sgl_flashsample")

DIGITS = 16  # of a hash
SOFTCAP = 30.0  # of the heads that are measured with one: a constant of their kernels
# Instructions, and the numbers that they read. Other sections of a cubin are for debuggers and for the loader.
_CODE = (".text.", ".nv.constant", ".nv.global.init")
_HEADER = struct.Struct("<40xQ10xHHH")  # of an ELF file: offset, size and number of section headers, place of names
_SECTION = struct.Struct("<II16xQQ24x")  # offset of the name, type, offset and size of the content
_NO_CONTENT = 8  # type of a section that takes no place in the file


def machine_code(config: Config, kind: BatchKind, parts: Parts) -> str:
    """Hash of the kernels that a batch of this kind launches with ``config``, in hexadecimal digits; empty where none
    is compiled: by the interpreter, and in host memory. Compiles those that are not compiled yet. Raises what Triton
    raises for a configuration that does not compile."""
    if triton.knobs.runtime.interpret or draws_in_host_memory(parts.lm_head.weight.device):
        return ""
    with compiling_only() as binaries:
        launch_once(parts, config, kind.launched(config))
    digest = hashlib.sha256()
    for binary in binaries:
        about = binary.metadata
        digest.update(repr((about.name, about.num_warps, about.shared)).encode())
        for name, content in sorted(_code_of(binary.asm["cubin"])):
            digest.update(repr((name, len(content))).encode() + content)
    return digest.hexdigest()[:DIGITS]


def _code_of(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of a cubin that hold code or constants."""
    start, size, number, place = _HEADER.unpack_from(cubin)
    sections = [_SECTION.unpack_from(cubin, start + size * index) for index in range(number)]
    _, _, names, length = sections[place]
    for name_at, type_, offset, size in sections:
        name = cubin[names + name_at : names + length].partition(b"\0")[0].decode()
        if name.startswith(_CODE) and type_ != _NO_CONTENT:
            yield name, cubin[offset : offset + size]


class Measured(NamedTuple):
    """A size of a table, and the configuration that it was measured with. code: its machine code then."""

    kind: BatchKind
    rows: int
    config: Config
    code: str


def measured_sizes(table: Table, traits: HeadTraits) -> Iterator[Measured]:
    """Every size that ``table`` has decided. traits: of its head, for the built-in choices, which are those without a
    cost model."""
    for entry in table.entries:
        yield Measured(KIND_NAMES[entry.kind], entry.rows, entry.configuration, entry.code)
    for name, confirmed in table.confirmed.items():
        kind = KIND_NAMES[name]
        codes = confirmed.code or [""] * len(confirmed.rows)
        for rows, code in zip(confirmed.rows, codes, strict=True):
            yield Measured(kind, rows, default_config(traits.unmodelled, rows, kind), code)


def _as_measured(table: Table, head: LMHead, traits: HeadTraits) -> bool:
    """Whether the kernels of ``head`` are compiled as those of the head that ``table`` was measured with."""
    assert table.head is not None
    same_head = head.logit_scale is None and head.softcap in (None, SOFTCAP) and head.vocab_size == table.head.vocab
    same_head = same_head and gemm_as_measured(table, traits)
    return same_head and table.env.get("triton") == triton.__version__


def compare_compiled(resolved: ResolvedTable, parts: Parts, max_rows: int) -> ResolvedTable:
    """``resolved`` with its table stale where a configuration that batches of up to ``max_rows`` rows take compiles to
    other machine code than was measured. warnings: those that are new. parts: the head whose kernels are compiled, with
    the screen that it draws with. Nothing is compared with a table of another GPU or another release of Triton, nor for
    a head whose kernels have other constants than those of the head that was measured."""
    file = resolved.table_file
    traits = resolved.dispatch.traits
    if file is None or file.match is Match.FAMILY or not _as_measured(file.table, parts.lm_head, traits):
        return dataclasses.replace(resolved, warnings=())
    installed: dict[tuple[BatchKind, Config], str] = {}
    stale = []
    for one in measured_sizes(file.table, traits):
        used = one.rows <= max_rows and resolved.dispatch.lookup(one.rows, one.kind) == one.config
        if not one.code or not used or (one.kind.screen and parts.screen is None):
            continue
        key = (one.kind.launched(one.config), one.config)
        if key not in installed:
            installed[key] = ""
            try:
                installed[key] = machine_code(one.config, one.kind, parts)
            except Exception as error:  # a server serves without this comparison
                logger.debug("flashsample: %s is not compared with its table: %s", one.config, first_line(error))
        if installed[key] not in ("", one.code):
            stale.append((one.kind, one.rows))
    if not stale:
        return dataclasses.replace(resolved, warnings=())
    file = dataclasses.replace(file, match=Match.STALE, differs=(*file.differs, other_code(stale)))
    return dataclasses.replace(resolved, table_file=file, warnings=tuple(slower_than_measured(file)))
