"""Worker processes, from the side that asks: start, ask with a time limit, end, start again; and a pool of them that
works through a queue of jobs. Requests and answers are JSON over a pipe."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import sgl_flashsample

# A job yields (request, seconds it may take) and is sent the answer; it ends when it has no more to ask.
Job = Generator[tuple[dict[str, Any], float], dict[str, Any], None]

# Program of a worker process. It imports from the same places as this process, which may be an uninstalled checkout.
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
import sgl_flashsample
sgl_flashsample.__path__[:] = json.loads(sys.argv[3])
from sgl_flashsample.autotune.worker import main
main(int(sys.argv[1]), json.loads(sys.argv[4]))
"""
HELLO_SECONDS = 60.0
START_SECONDS = 90.0  # to import torch and open the device, on top of the limit of the first request
MAX_STARTS = 24  # starts of one process; beyond, the fault is not of the configurations


class Workers(NamedTuple):
    """Specs (``worker.main``) of the processes that measure and that compile. on_gpus: they need CUDA devices."""

    measuring: dict[str, Any]
    compiling: dict[str, Any]
    on_gpus: bool = True


WORKERS = Workers(
    measuring={"worker": "sgl_flashsample.autotune.measuring:MeasuringWorker"},
    compiling={"worker": "sgl_flashsample.autotune.compiling:CompilingWorker"},
)


class PoolError(ValueError):
    """A process that cannot be kept alive; the message is one line."""


class WorkerProcess:
    """One process, started when it is first asked. spec: of ``worker.main``. log: file of its output. note: name of the
    thing it works on, from the process itself."""

    def __init__(self, spec: dict[str, Any], log: Path, environment: dict[str, str] | None = None) -> None:
        self.spec, self.log, self.environment = spec, log, environment or {}
        self.starts, self.note, self.deadline = 0, "", math.inf
        self.connection: Connection | None = None
        self._process: subprocess.Popen | None = None
        self._is_fresh = False  # started, not asked anything yet

    def start(self) -> None:
        """Start the process, unless it runs. Its imports take their time while this process goes on. Raises
        PoolError."""
        if self.connection is not None:
            return
        self.starts, self._is_fresh = self.starts + 1, True
        if self.starts > MAX_STARTS:
            worker = self.spec["worker"].rpartition(":")[2]
            raise PoolError(f"the process of {worker} ended {MAX_STARTS} times; its output is in {self.log}")
        ours, theirs = Pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [str(theirs.fileno()), *map(json.dumps, (sys.path, [*sgl_flashsample.__path__], self.spec))]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, *arguments],
                env={**os.environ, **self.environment},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()
        self.connection = ours

    def ask(self, request: dict[str, Any], seconds: float) -> None:
        """Send ``request``; its answer is awaited for ``seconds``. Raises PoolError."""
        self.start()
        assert self.connection is not None
        self.note, self.deadline = "", time.monotonic() + seconds + START_SECONDS * self._is_fresh
        self._is_fresh = False
        with contextlib.suppress(OSError):  # the process has just ended: ``receive`` says so
            self.connection.send_bytes(json.dumps(request).encode())

    def receive(self) -> dict[str, Any] | None:
        """The answer, an error when the process ended or its time is over; None while there is nothing yet."""
        assert self.connection is not None and self._process is not None
        try:
            while self.connection.poll():
                message = json.loads(self.connection.recv_bytes())
                self.note = message.get("note", self.note)
                if message.keys() - {"note"}:
                    self.deadline = math.inf
                    if message.get("error", {}).get("fatal"):
                        self.end()
                    return message
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            code = self._process.returncode
            self.end()
            how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
            return {"error": {"reason": "runtime", "detail": f"the process ended: {how}", "fatal": True}}
        if time.monotonic() > self.deadline:
            self.end()
            return {"error": {"reason": "timeout", "detail": "no answer in time", "fatal": True}}
        return None

    def end(self) -> None:
        """Kill the process, whatever it is doing."""
        self.deadline = math.inf
        if self.connection is not None:
            self.connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.connection = self._process = None


class Pool:
    """Processes of one kind, and the jobs that wait for them."""

    def __init__(self, processes: Iterable[WorkerProcess]) -> None:
        self.processes = list(processes)
        self._queue: collections.deque[Job] = collections.deque()
        self._at_work: dict[WorkerProcess, Job] = {}

    @property
    def idle(self) -> int:
        """Processes without work and without a job waiting for them."""
        return max(0, len(self.processes) - self.pending)

    @property
    def pending(self) -> int:
        """Jobs that are not over."""
        return len(self._queue) + len(self._at_work)

    def start(self) -> None:
        """Start the processes at once; else each is started when it is first asked. Raises PoolError."""
        for process in self.processes:
            process.start()

    def add(self, job: Job) -> None:
        self._queue.append(job)

    def drop_waiting(self) -> None:
        """Forget the jobs that have not begun."""
        for job in self._queue:
            job.close()
        self._queue.clear()

    def end(self) -> None:
        self.drop_waiting()
        for job in self._at_work.values():
            job.close()
        self._at_work.clear()
        for process in self.processes:
            process.end()

    def begin(self) -> tuple[list[Connection], float]:
        """Give waiting jobs to idle processes. Returns the connections to wait for, and the latest time to wait
        until."""
        for process in self.processes:
            while self._queue and process not in self._at_work:
                self._go_on(process, self._queue.popleft(), None)
        deadline = min((process.deadline for process in self._at_work), default=math.inf)
        return [process.connection for process in self._at_work if process.connection is not None], deadline

    def collect(self) -> None:
        """Hand answers to the jobs that asked."""
        for process, job in list(self._at_work.items()):
            answer = process.receive()
            if answer is not None:
                del self._at_work[process]
                self._go_on(process, job, {**answer, "at": process.note})

    def _go_on(self, process: WorkerProcess, job: Job, answer: dict[str, Any] | None) -> None:
        try:
            request, seconds = next(job) if answer is None else job.send(answer)
        except StopIteration:
            return
        self._at_work[process] = job
        process.ask(request, seconds)


def work_until(pools: list[Pool], finished: Callable[[], bool], tick: Callable[[], None] = lambda: None) -> None:
    """Keep the pools at work until ``finished``, or nothing is left to do; ``tick`` runs several times a second."""
    while not finished():
        waits = [pool.begin() for pool in pools]
        if not any(pool.pending for pool in pools):
            tick()
            if not any(pool.pending for pool in pools):
                return
            continue
        connections = [connection for connections, _ in waits for connection in connections]
        seconds = min(deadline for _, deadline in waits) - time.monotonic()
        wait(connections, timeout=max(0.0, min(0.2, seconds)))
        for pool in pools:
            pool.collect()
        tick()


def ask_once(process: WorkerProcess, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One request, waited for. Raises PoolError."""
    process.ask(request, seconds)
    while (answer := process.receive()) is None:
        wait([process.connection] if process.connection is not None else [], timeout=0.2)
    return answer


def visible_gpu(index: int) -> str:
    """The name of the ``index``-th GPU that this process may use, for ``CUDA_VISIBLE_DEVICES``."""
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return given[index] if given else str(index)


def measuring_process(log: Path, gpu: int = 0) -> WorkerProcess:
    """The process that measures on the ``gpu``-th GPU that this one may use. Raises ValueError where there is none."""
    if WORKERS.on_gpus:
        import torch

        if not torch.cuda.is_available():
            raise ValueError("this machine has no CUDA device; run and verify measure on one, other commands need none")
        if gpu >= (there := torch.cuda.device_count()):
            raise ValueError(
                f"--gpus is {gpu + 1} or more; expected at most {there}, the GPUs that this process may use"
            )
    return WorkerProcess(WORKERS.measuring, log, {"CUDA_VISIBLE_DEVICES": visible_gpu(gpu)})


def compiling_process(log: Path, processes: int) -> WorkerProcess:
    """One of so many processes that compile for the first GPU that this one may use."""
    environment = {"CUDA_VISIBLE_DEVICES": visible_gpu(0), "OMP_NUM_THREADS": "1"}
    return WorkerProcess(WORKERS.compiling | {"processes": processes}, log, environment)


def pretending_process(log: Path, capability: str, multiprocessors: int) -> WorkerProcess:
    """A process that compiles for such a GPU, which need not be here. capability: "9.0"."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    return WorkerProcess(WORKERS.compiling | {"gpu": [capability, multiprocessors]}, log, environment)
