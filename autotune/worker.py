"""The process that measures or compiles: it answers one request at a time and may hang, crash or lose its device
without harm to the process that asked (``pool.py``).

A request is one JSON object with its name in "op"; the answer is one JSON object, {"error": {"reason", "detail",
"fatal"}} where there is no result. Before the answer to a request about several configurations come {"note": name},
each with the configuration that is being worked on, in case this process has to be ended. The answers are those of
``measuring.py`` or ``compiling.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from .errors import error_of


class Worker(Protocol):
    """note: set before the first request; to be called with the name of the configuration that is being worked on."""

    note: Callable[[str], None]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]: ...


def serve(connection: Connection, worker: Worker) -> None:
    """Answer until the other side hangs up."""

    def send(message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            connection.send_bytes(json.dumps(message).encode())

    worker.note = lambda text: send({"note": text})
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        try:
            answer = worker.answer(request)
        except Exception as error:
            answer = error_of(error)
            print(f"{request.get('op')}: {answer['error']}", file=sys.stderr, flush=True)
        send(answer)


def main(descriptor: int, spec: dict[str, Any]) -> None:
    """Run a worker process. descriptor: of the pipe to the process that asks. spec: {"worker": "module:class", ...} for
    the ``make`` of the class."""
    with contextlib.suppress(OSError, AttributeError):  # Linux ends this process with its parent, however that one ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks handles Ctrl-C
    connection = Connection(descriptor)
    try:
        module, _, name = spec["worker"].partition(":")
        worker = getattr(importlib.import_module(module), name).make(spec)
    except Exception as error:
        connection.send_bytes(json.dumps(error_of(error)).encode())
        raise SystemExit(1) from None
    serve(connection, worker)
