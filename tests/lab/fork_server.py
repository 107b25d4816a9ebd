"""Processes start with PyTorch and Transformers imported: for tests on a machine without a GPU.

A server's processes import the packages of others for most of a start. ``popen`` starts one process that imports them,
and waits for nothing but to fork servers, for this process and for programs that it runs; ``run`` has it fork such a
program. SGLang spawns more processes: a server's first one forks another that waits (``start``), and they are forks of
that one. Each imports SGLang and this package as ever, and finds its plugins anew, with its own environment: what the
packages of others read at their import is the same in all forks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection, process
from pathlib import Path
from typing import IO, Any

LAUNCHERS = ("sglang.launch_server", str(Path(sys.executable).with_name("sglang")))  # a word of a server's command
ENGINE = str(Path(__file__).resolve().parents[2] / "examples" / "offline_engine.py")  # SGLang spawns its processes too
# Variables that other packages read when they are imported, and that differ between servers.
READ_AT_IMPORT = ("TRITON_INTERPRET", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
READ_AT_IMPORT += ("HF_HUB_OFFLINE",)
FOLDER = "LAB_FORK_SERVERS"  # environment variable: where the sockets are of processes that fork servers
IMPORTED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torchvision", "triton"),
    *("transformers", "transformers.processing_utils", "transformers.masking_utils", "transformers.modeling_layers"),
    *("openai", "openai.types.responses", "openai.types.graders", "compressed_tensors", "xgrammar", "IPython"),
    *("scipy.stats", "aiohttp", "fastapi", "uvicorn", "PIL.Image", "huggingface_hub", "gguf", "opentelemetry.sdk"),
    *("numba",),
)
_SET_PDEATHSIG = 1  # of prctl(2)


def start() -> None:
    """In a server's first process, before it imports anything of its own."""
    if not (3, 11) <= sys.version_info < (3, 14) or not {*LAUNCHERS, ENGINE} & {*sys.orig_argv}:
        return  # a later Python starts its fork server in another way
    _import(IMPORTED)
    _carry_environment()
    _fork()


def _import(names: Sequence[str]) -> None:
    gc.disable()  # nearly all that imports make stays: to look for garbage in it is a seventh of their time
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _carry_environment() -> None:
    """A fork has the environment of its parent at the time of its start, as a spawned process has."""
    from multiprocessing import spawn

    describe, prepare = spawn.get_preparation_data, spawn.prepare

    def described(name):
        return describe(name) | {"environment": dict(os.environ)}

    def prepared(data):
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        environment = data.pop("environment")
        for variable in os.environ.keys() - environment.keys():
            del os.environ[variable]
        os.environ.update(environment)
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = described, prepared


def _fork() -> None:
    """Start the process that waits, and let ``spawn`` fork it."""
    import ctypes
    import socket
    from multiprocessing import connection, context, forkserver, popen_forkserver

    listener = socket.socket(socket.AF_UNIX)
    address = connection.arbitrary_address("AF_UNIX")
    listener.bind(address)
    listener.listen()
    alive, held = os.pipe()
    first = os.getpid()
    process = os.fork()
    if process == 0:
        os.close(held)
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)  # SGLang's processes end when their parent does
        signal.signal(signal.SIGQUIT, lambda *about: os.kill(first, signal.SIGQUIT))  # they tell their parent by it
        try:
            forkserver.main(listener.detach(), alive, [])
        finally:
            os._exit(0)
    os.close(alive)
    listener.close()
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, held, process
    context.SpawnProcess._Popen = staticmethod(popen_forkserver.Popen)


# --- servers

STARTED: list[subprocess.Popen] = []  # processes that fork servers: each ends with the one that has started it


class Forked:
    """A server's first process, with what ``Server`` uses of ``subprocess.Popen``."""

    def __init__(self, parent: socket.socket) -> None:
        self._parent, self.pid = parent, int(parent.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and connection.wait([self._parent], timeout):
            self.returncode = int(self._parent.recv(64) or -signal.SIGKILL)
            self._parent.close()
        return self.returncode


def popen(command: Sequence[str], *, env: Mapping[str, str], stdout: IO, **options: Any) -> Any:
    """As ``subprocess.Popen`` in a session of its own, with all output in ``stdout``: a fork, if it is a server of this
    Python."""
    if command[:3] != [sys.executable, "-m", LAUNCHERS[0]] and command[0] != LAUNCHERS[1]:
        return subprocess.Popen(command, env=env, stdout=stdout, **options)
    return _fork_as(command, env, stdout, stdout)


def run(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with both outputs captured as text: a fork. command: a script of this Python."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        environment = {"HF_HUB_OFFLINE": "1", **environment}  # as servers have it: both are forks of one process
        code = _fork_as(command, environment, out, errors).wait()
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), errors.read())


def _fork_as(command: Sequence[str], environment: Mapping[str, str], *outputs: IO) -> Forked:
    parent = _connect(environment)
    order = {"command": command, "environment": {**environment}, "folder": os.getcwd()}
    order["cores"] = [*os.sched_getaffinity(0)]
    socket.send_fds(parent, [json.dumps(order).encode()], [output.fileno() for output in outputs])
    return Forked(parent)


def _connect(environment: Mapping[str, str]) -> socket.socket:
    """To the process that forks servers with such an environment, which is started where there is none."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="fork-")
        atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
    address = os.path.join(os.environ[FOLDER], "-".join(environment.get(name, "") for name in READ_AT_IMPORT))
    started = None
    while True:
        parent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            parent.connect(address)
            return parent
        parent.close()
        if started is None:
            program = f"from lab import fork_server; fork_server.serve({address!r}, {IMPORTED!r})"
            variables = {**environment, "PYTHONPATH": str(Path(__file__).parents[1])}
            started = subprocess.Popen(
                [sys.executable, "-c", program], env=variables, stdin=subprocess.PIPE, start_new_session=True
            )
            STARTED.append(started)
        assert started.poll() is None, "the process that forks servers has ended"
        time.sleep(0.02)


def serve(address: str, names: Sequence[str]) -> None:
    """Import these, fork a server for each order, and tell who gave it how the server ends; until standard input
    does, which ends the servers too."""
    _import(names)
    sys.path[:] = [path for path in sys.path[1:] if path != os.environ["PYTHONPATH"]]
    with contextlib.suppress(FileNotFoundError):
        os.unlink(address)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    events = selectors.DefaultSelector()
    for source in (listener, sys.stdin):
        events.register(source, selectors.EVENT_READ)
    while True:
        for event, _ in events.select():
            if event.fileobj is sys.stdin:  # whoever started this has gone, and cannot stop its servers any more
                for server, _ in [one.data for one in events.get_map().values() if one.data]:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(server, signal.SIGKILL)
                return
            if event.fileobj is listener:
                client, _ = listener.accept()
                order, outputs, *_ = socket.recv_fds(client, 1 << 20, 2)
                if (server := os.fork()) == 0:
                    for other in [one for one in events.get_map().values() if one.data]:
                        os.close(other.fd)
                        other.data[1].close()
                    for held in (events, listener, client):
                        held.close()
                    return _become(**json.loads(order), outputs=outputs)
                for output in outputs:
                    os.close(output)
                client.send(str(server).encode())
                events.register(os.pidfd_open(server), selectors.EVENT_READ, (server, client))
                continue
            server, client = event.data
            events.unregister(event.fd)
            os.close(event.fd)
            code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
            with contextlib.suppress(OSError), client:
                client.send(str(code).encode())


def _become(command: list[str], environment: dict[str, str], folder: str, cores: list[int], outputs: list[int]) -> None:
    """Go on as a process that was started with this command."""
    os.setsid()
    os.sched_setaffinity(0, cores)
    for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    process.ORIGINAL_DIR = folder
    sys.orig_argv[:] = command
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    importlib.invalidate_caches()
    sys.modules["numpy"].random.seed()
    sys.modules.pop("sitecustomize", None)
    if importlib.util.find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")
    words = command[1:] if command[0] == sys.executable else command
    if words[0] == "-m":
        sys.path.insert(0, folder)
        sys.argv[:] = ["", *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(words[0]))
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")
