"""The process that measures, or compiles: it answers one request at a time and may hang, crash or lose its device
without harm to who asked (``remote.py``).

A request is one JSON object with its name in "op"; the answer is one JSON object, {"error": {"why", "detail", "fatal"}}
where there is no result. Before the answer come {"note": text}: what is being worked on, so that who has to end this
process knows what it died of. What answers is a bench: ``gpu.py``, ``compiling.py`` or, without a GPU, ``surface.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

# Why a configuration is rejected.
WHY = ("shared_memory", "registers", "compile", "timeout", "runtime", "incorrect")
DETAIL = 200  # characters

# An error after which this process cannot go on: its context of the device is lost.
_LOST = re.compile(r"illegal|misaligned|unspecified launch failure|CUDA error|hardware stack|device-side assert", re.I)
_COMPILE = ("CompilationError", "CompileTimeAssertionFailure", "PTXASError", "PassManager", "UnsupportedLanguage")


class Incorrect(Exception):
    """Tokens or logits that are not the reference's."""


class Bench(Protocol):
    """note: to be called with what is being worked on."""

    note: Callable[[str], None]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]: ...


def error_of(error: BaseException) -> dict[str, Any]:
    """What a request's exception means for the configuration it was about."""
    kind, text = type(error).__name__, str(error)
    detail = f"{kind}: {(text.splitlines() or [''])[0]}"[:DETAIL]
    lost = bool(_LOST.search(text)) and kind != "OutOfResources"
    if isinstance(error, Incorrect):
        why, detail, lost = "incorrect", text[:DETAIL], False
    elif kind == "OutOfResources" or "out of resource" in text:
        why = "shared_memory" if "shared" in text else "registers"
    elif lost:
        why = "runtime"
    elif kind in _COMPILE or "ptxas" in text.lower() or "PassManager" in text:
        why = "compile"
    else:
        why = "runtime"
    return {"error": {"why": why, "detail": "".join(c if c.isprintable() else " " for c in detail), "fatal": lost}}


def serve(connection: Connection, bench: Bench) -> None:
    """Answer until the other side hangs up."""

    def send(message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            connection.send_bytes(json.dumps(message).encode())

    bench.note = lambda text: send({"note": text})
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        try:
            answer = bench.answer(request)
        except Exception as error:
            answer = error_of(error)
            print(f"{request.get('op')}: {answer['error']}", file=sys.stderr, flush=True)
        send(answer)


def die_with_parent() -> None:
    """The kernel ends this process with its parent, however that one ends; on Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(descriptor: int, spec: dict[str, Any]) -> None:
    """spec: {"bench": "gpu" | "compiling" | "surface", ...} for the bench's ``make``."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked decides what Ctrl-C means
    connection = Connection(descriptor)
    try:
        bench = _make(spec)
    except Exception as error:
        connection.send_bytes(json.dumps(error_of(error) | {"note": "start"}).encode())
        raise SystemExit(1) from None
    serve(connection, bench)


def _make(spec: dict[str, Any]) -> Bench:
    # Each bench imports what it needs: the fake one must start without torch.
    if spec["bench"] == "surface":
        from .surface import SurfaceBench

        return SurfaceBench.make(spec)
    if spec["bench"] == "compiling":
        from .compiling import CompileBench

        return CompileBench.make(spec)
    from .gpu import GpuBench

    return GpuBench.make(spec)
