"""A real SGLang server as a child process, and requests to it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..switches import REQUIRE_VARIABLE

SGLANG_LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")
SGL_FLASHSAMPLE_SERVE = (sys.executable, "-m", "sgl_flashsample.cli", "serve")
CPU_ARGUMENTS = (
    # SGLang takes memory that other processes fill while it loads for its own weights. --max-total-tokens alone bounds
    # the cache; a small fraction would end the start on a machine that is busy.
    *("--device", "cpu", "--max-total-tokens", "16384", "--mem-fraction-static", "0.9"),
    *("--max-running-requests", "256", "--sleep-on-idle"),  # an idle server must not take a core from a busy one
)

# Below the ports that systems hand out to outgoing connections and to sockets bound to port 0 (RFC 6335: 49152 and up;
# Linux: 32768 and up): a server binds its ports seconds after they were chosen, and nobody is given these meanwhile.
PORTS = range(20000, 32000)
PORT_TAKEN = ("EADDRINUSE", "address already in use", "Port is already in use")  # as torch, uvicorn and SGLang say it


class ServerError(RuntimeError):
    """The server did not start or did not answer; the message is one line for a person."""


class RequestError(ServerError):
    """The server has refused a request; the message is its answer."""


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port(other_than: int | None = None) -> int:
    """One of ``PORTS``, at random: two processes that choose at the same time hardly choose the same."""
    for port in random.SystemRandom().sample(PORTS, 100):
        if port != other_than and port_is_free(port):
            return port
    raise ServerError(f"none of 100 ports between {PORTS.start} and {PORTS.stop} is free; choose one with --port")


def stop_all(servers: Iterable[Server]) -> None:
    """Stop the servers, all at the same time: SGLang looks every five seconds whether it is to stop."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda server: server.stop(), servers))


class Server:
    """``with Server(model, arguments) as server: server.generate(...)``; stops the process group at the end.

    backend: a sampling backend's name, or None to leave it to the launcher. launcher: the command that the arguments
    follow. port: None for a free one. A server that finds one of its ports taken is started once more, with others.
    patience: seconds that it is given to stop before it is ended.

    metrics_seconds: after which the next step brings our counters up to date, with FLASHSAMPLE_LOG_SECONDS=0.2. popen:
    what starts the process.
    """

    metrics_seconds = 0.3
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def __init__(
        self,
        model: Path | str,
        arguments: Sequence[str],
        *,
        backend: str | None,
        log: Path,
        launcher: Sequence[str] = SGLANG_LAUNCH_SERVER,
        port: int | None = None,
        environment: dict[str, str] | None = None,
        start_seconds: float = 600.0,
        patience: float = 15.0,
        progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.log, self.start_seconds, self.patience, self.progress = log, start_seconds, patience, progress
        # Stock servers, which are started to compare, cannot meet a demand for the fused pass.
        ours = backend == "flashsample" or tuple(launcher) == SGL_FLASHSAMPLE_SERVE
        stock = {} if ours else {REQUIRE_VARIABLE: "0"}
        self.environment = {**os.environ, "HF_HUB_OFFLINE": "1", **stock, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self._launcher, self._fixed_port = [*launcher, "--model-path", str(model)], port
        self._arguments = [*arguments, *(() if backend is None else ("--sampling-backend", backend))]
        self._choose_ports()

    @classmethod
    def on_this_machine(
        cls,
        model: Path | str,
        arguments: Sequence[str],
        *,
        backend: str | None,
        log: Path,
        gpu_arguments: Sequence[str] = (),
        **options: Any,
    ) -> Server:
        """A server on the GPU, or without one on the CPU. gpu_arguments: for a server on a GPU alone. backend: None for
        SGLang's own choice, and where the launcher names one. options: of ``Server``."""
        if torch.cuda.is_available():
            arguments = [*gpu_arguments, *arguments]
        else:
            arguments = [*CPU_ARGUMENTS, *arguments]
            if backend is None and options.get("launcher") != SGL_FLASHSAMPLE_SERVE:
                backend = "pytorch"
        return cls(model, arguments, backend=backend, log=log, **options)

    def _choose_ports(self) -> None:
        self.port = free_port() if self._fixed_port is None else self._fixed_port
        ports = ["--host", "127.0.0.1", "--port", str(self.port)]
        if "--nccl-port" not in self._arguments:  # SGLang's own choice may be any other process's soon after
            ports += ["--nccl-port", str(free_port(other_than=self.port))]
        self.command = [*self._launcher, *ports, *self._arguments]

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        if not port_is_free(self.port):
            raise ServerError(f"port {self.port} is taken; choose another one with --port")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self.process = self.popen(
                self.command, env=self.environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        started, reported, starts_left = time.monotonic(), 0, 1
        while (waited := time.monotonic() - started) < self.start_seconds:
            assert self.process is not None
            if (code := self.process.poll()) is not None:
                if not starts_left or not any(text in self.log_text() for text in PORT_TAKEN):
                    raise ServerError(f"the server ended with code {code}: {self.last_error()}")
                starts_left -= 1
                self.stop()
                self._choose_ports()
                self.start()
            with contextlib.suppress(OSError, ServerError):
                self.get("/health", timeout=10.0)
                return
            if waited >= reported + 10:
                reported = int(waited)
                self.progress(f"  still starting after {reported} s (log: {self.log})")
            time.sleep(0.3)
        raise ServerError(f"the server was not ready within {self.start_seconds:.0f} s (log: {self.log})")

    def stop(self) -> None:
        """Ask the server to stop, and when its patience is over end it. No process of it stays behind."""
        if self.process is None:
            return
        try:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.patience)
        finally:  # also where whoever waits here is interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def last_error(self) -> str:
        """The last line of the log that names an error, else the last line."""
        lines = [line.strip() for line in self.log_text().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return (errors or lines or ["no output"])[-1][:300]

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_lines(self, marker: str) -> list[str]:
        """Lines of the server's log that contain ``marker``."""
        return [line for line in self.log_text().splitlines() if marker in line]

    def generate(self, **fields: Any) -> Any:
        """POST /generate; ``text`` or ``input_ids`` (one or a list), ``sampling_params``, ``return_logprob``, ..."""
        return self.post("/generate", **fields)

    def stream(self, **fields: Any) -> Iterator[bytes]:
        """POST /generate, of one prompt: its answer so far as JSON, each time that it has grown."""
        path, data = "/generate", json.dumps(fields | {"stream": True}).encode()
        with self._answering(path), self._open(path, data, 600.0) as response:
            for line in response:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    yield line[len(b"data:") :]

    def profile(self, folder: Path, steps: int, shapes: bool = False) -> None:
        """Write a trace of the next ``steps`` forward passes to ``folder``, with the shapes of arguments if asked
        for."""
        options = {"num_steps": steps, "activities": ["CPU", "GPU"], "record_shapes": shapes}
        self.post("/start_profile", output_dir=str(folder), **options)

    def metrics(self) -> str:
        return self.get("/metrics")

    def post(self, path: str, **fields: Any) -> Any:
        """POST to any other endpoint; the answer, of JSON or text. Raises ServerError for an answer that is an error,
        and without one."""
        return self.get(path, json.dumps(fields).encode())

    def get(self, path: str, data: bytes | None = None, timeout: float = 600.0) -> Any:
        text = self.ask(path, data, timeout).decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def ask(self, path: str, data: bytes | None = None, timeout: float = 600.0) -> bytes:
        """GET, or POST of ``data``; the answer as it arrives, of JSON or text. Raises as ``post`` does."""
        with self._answering(path), self._open(path, data, timeout) as response:
            return response.read()

    @contextlib.contextmanager
    def _answering(self, path: str) -> Iterator[None]:
        """Raises ServerError where the server ends, or an answer does before it is whole."""
        try:
            yield
        except (http.client.HTTPException, OSError) as error:
            code = None if self.process is None else self.process.poll()
            ended = "" if code is None else f"; the server ended with code {code}: {self.last_error()}"
            reason = getattr(error, "reason", None) or error
            raise ServerError(f"{path} was not answered: {reason}{ended} (log: {self.log})") from error

    def _open(self, path: str, data: bytes | None, timeout: float) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, headers=headers)
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            kind = RequestError if 400 <= error.code < 500 else ServerError
            raise kind(f"{path} answered {error.code}: {error.read().decode(errors='replace')[:300]}") from error
