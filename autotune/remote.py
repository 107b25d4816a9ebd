"""Other processes, from the side that asks: start, ask with a time limit, end, start again; and a crew of them that
works through a queue of jobs."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import sgl_flashsample

# A job yields (request, seconds it may take) and is sent the answer; it ends when it has no more to ask.
Job = Generator[tuple[dict[str, Any], float], dict[str, Any], None]

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
import sgl_flashsample
sgl_flashsample.__path__[:] = json.loads(sys.argv[3])
from sgl_flashsample.autotune.worker import main
main(int(sys.argv[1]), json.loads(sys.argv[4]))
"""
START_SECONDS = 90.0  # for a process to import torch and open its device, on top of the first request's limit
MOST_STARTS = 24  # of one process: beyond, it is not the configurations that are at fault


class RemoteError(RuntimeError):
    """A process that cannot be kept alive; the message is one line."""


class Remote:
    """One process, started when it is first asked. spec: of ``worker.main``. log: where its output goes."""

    def __init__(self, name: str, spec: dict[str, Any], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name, self.spec, self.log, self.environment = name, spec, log, environment or {}
        self.starts = 0
        self.note = ""  # the last one of the request under way
        self.deadline = float("inf")
        self._fresh = False  # started, not asked anything yet
        self._process: subprocess.Popen | None = None
        self.connection: Connection | None = None

    @property
    def busy(self) -> bool:
        return self.deadline != float("inf")

    def ask(self, request: dict[str, Any], seconds: float) -> None:
        """Send ``request``; its answer is awaited for ``seconds``."""
        self.start()
        assert self.connection is not None
        if self._fresh:
            seconds += START_SECONDS
            self._fresh = False
        self.note, self.deadline = "", time.monotonic() + seconds
        with contextlib.suppress(OSError):  # it has just ended: ``receive`` says so
            self.connection.send_bytes(json.dumps(request).encode())

    def receive(self) -> dict[str, Any] | None:
        """The answer, an error when the process ended or its time is over; None while there is nothing yet."""
        assert self.connection is not None
        try:
            while self.connection.poll():
                message = json.loads(self.connection.recv_bytes())
                if "note" in message:
                    self.note = message["note"]
                if set(message) - {"note"}:
                    self.deadline = float("inf")
                    if message.get("error", {}).get("fatal"):
                        self.end()
                    return message
        except (EOFError, OSError):
            return self._ended()
        if time.monotonic() > self.deadline:
            self.end()
            return {"error": {"why": "timeout", "detail": "no answer in time", "fatal": True}}
        return None

    def end(self) -> None:
        """Kill the process, whatever it is doing."""
        self.deadline = float("inf")
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ended(self) -> dict[str, Any]:
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        self.end()
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        return {"error": {"why": "runtime", "detail": f"the process ended: {how}", "fatal": True}}

    def start(self) -> None:
        """Start the process, unless it runs: what it imports, it imports beside us."""
        if self.connection is not None:
            return
        self.starts += 1
        self._fresh = True
        if self.starts > MOST_STARTS:
            raise RemoteError(f"the {self.name} process ended {MOST_STARTS} times; its output is in {self.log}")
        ours, theirs = Pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            command = [sys.executable, "-c", _CHILD, str(theirs.fileno()), json.dumps(sys.path)]
            command += [json.dumps(list(sgl_flashsample.__path__)), json.dumps(self.spec)]
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **self.environment},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()
        self.connection = ours


class Crew:
    """Processes of one kind, and the jobs that wait for them."""

    def __init__(self, remotes: Iterable[Remote]) -> None:
        self.remotes = list(remotes)
        self._queue: collections.deque[Job] = collections.deque()
        self._at_work: dict[Remote, Job] = {}

    @property
    def idle(self) -> int:
        """How many processes have nothing to do and no job waiting for them."""
        return max(0, len(self.remotes) - len(self._at_work) - len(self._queue))

    @property
    def pending(self) -> int:
        return len(self._queue) + len(self._at_work)

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
        for remote in self.remotes:
            remote.end()

    def begin(self) -> None:
        """Give waiting jobs to idle processes."""
        for remote in self.remotes:
            while self._queue and remote not in self._at_work:
                job = self._queue.popleft()
                self._go_on(remote, job, None)

    def answers(self) -> None:
        """Hand what has been answered to the jobs that asked."""
        for remote, job in list(self._at_work.items()):
            answer = remote.receive()
            if answer is not None:
                del self._at_work[remote]
                self._go_on(remote, job, {**answer, "at": remote.note})

    def connections(self) -> list[Connection]:
        return [remote.connection for remote in self._at_work if remote.connection is not None]

    def next_deadline(self) -> float:
        return min((remote.deadline for remote in self._at_work), default=float("inf"))

    def _go_on(self, remote: Remote, job: Job, answer: dict[str, Any] | None) -> None:
        try:
            request, seconds = next(job) if answer is None else job.send(answer)
        except StopIteration:
            return
        self._at_work[remote] = job
        remote.ask(request, seconds)


def work_until(crews: list[Crew], finished: Callable[[], bool], tick: Callable[[], None] = lambda: None) -> None:
    """Keep the crews at work until ``finished``, or nothing is left to do; ``tick`` runs several times a second."""
    while not finished():
        for crew in crews:
            crew.begin()
        if not any(crew.pending for crew in crews):
            tick()
            if finished() or not any(crew.pending for crew in crews):
                return
            continue
        connections = [connection for crew in crews for connection in crew.connections()]
        left = min(crew.next_deadline() for crew in crews) - time.monotonic()
        wait(connections, timeout=max(0.0, min(0.2, left)))
        for crew in crews:
            crew.answers()
        tick()
