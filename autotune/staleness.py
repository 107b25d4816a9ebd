"""The sizes of a tuned table whose configurations compile to other machine code than was measured. Needs no GPU: worker
processes compile for the table's one. Loads no torch."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..defaults import family_of
from ..kinds import BatchKind, Config
from ..tables.lookup import known_stale, other_code
from ..tables.schema import Device, HeadShape, Table
from . import pool
from .decisions import decisions, device_and_head
from .labels import codes_request
from .pool import WorkerProcess, ask_once, pretending_process

CODE_SECONDS = 3600.0  # of a table whose kernels are not in Triton's cache: minutes on two processors


@dataclasses.dataclass(frozen=True)
class Staleness:
    """reasons: why the whole table is stale. sizes: those whose configurations compile to other machine code. unknown:
    why that cannot be told; empty where it was compared."""

    reasons: tuple[str, ...] = ()
    sizes: tuple[tuple[BatchKind, int], ...] = ()
    unknown: str = ""

    @property
    def lines(self) -> list[str]:
        """Why the table is stale, a line for each reason; none where it is not, as far as can be told."""
        return [*self.reasons, *([other_code(self.sizes)] if self.sizes else [])]

    def words(self, table: Table) -> str:
        """The state of the table in one line."""
        if self.lines:
            return f"stale: {'; '.join(self.lines)}"
        return (
            f"whether it is stale is not known: {self.unknown}"
            if self.unknown
            else f"as measured, by Triton {table.env['triton']}"
        )


def other_release(table: Table, installed: str) -> str:
    """Why machine code of the installed release of Triton says nothing about ``table``; empty where it does."""
    measured = table.env.get("triton", "unknown")
    return "" if measured == installed else f"it was measured with Triton {measured}, and {installed} is installed"


class Compilers:
    """A process for each GPU that tables are of, until the end of the context. note: prints a line for the user."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._processes: dict[tuple[str, int], WorkerProcess] = {}
        self._log = Path(tempfile.gettempdir()) / f"flashsample-compiling-{os.getpid()}.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.end()
        if self._log.exists() and not self._log.stat().st_size:
            self._log.unlink()

    def staleness(self, table: Table, installed: str | None = None) -> Staleness:
        """Compile the configurations of ``table``, unless Triton's cache has them, and compare. installed: the release
        of Triton, None to look it up."""
        if reasons := known_stale(table):
            return Staleness(tuple(reasons))
        if table.simulated and pool.WORKERS.on_gpus:
            return Staleness(unknown="it was measured on a simulated device")
        device, head = device_and_head(table)
        if family_of(device.cc) is None:
            return Staleness(unknown=f"there are no kernels for compute capability {device.cc}")
        try:
            installed = installed or importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            return Staleness(unknown="Triton is not installed")
        if unknown := other_release(table, installed):
            return Staleness(unknown=unknown)
        sizes = list(decisions(table))
        choices = [(one.config, one.kind) for one in sizes if one.config is not None]
        self._note(f"compiling what {len(sizes)} batch sizes take on an {device.name}, to compare the machine code")
        answer = self.codes(device, head, choices)
        if "error" in answer:
            return Staleness(unknown=f"nothing could be compiled: {answer['error']['detail']}")
        stale = [
            (one.kind, one.rows) for one, code in zip(sizes, answer["codes"], strict=True) if one.entry.code != code
        ]
        return Staleness(sizes=tuple(stale))

    def codes(self, device: Device, head: HeadShape, choices: Iterable[tuple[Config, BatchKind]]) -> dict[str, Any]:
        """The answer of a worker: "codes", the machine code of each of ``choices``, or an error."""
        gpu = (device.cc, device.sms)
        if gpu not in self._processes:
            self._processes[gpu] = pretending_process(self._log, *gpu)
        return ask_once(self._processes[gpu], codes_request(head, choices), CODE_SECONDS)
