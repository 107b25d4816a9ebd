"""A real SGLang server as a child process, and requests to it."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

SGLANG_LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")
SGLANG_SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")
SGL_FLASHSAMPLE_SERVE = (sys.executable, "-m", "sgl_flashsample.cli", "serve")


class ServerError(RuntimeError):
    """The server did not start or did not answer; the message is one line for a person."""


# Below the ports that systems hand out to outgoing connections and to sockets bound to port 0 (RFC 6335: 49152 and up;
# Linux: 32768 and up): a server binds its ports seconds after they were chosen, and nobody is given these meanwhile.
PORTS = range(20000, 32000)


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


class Server:
    """``with Server(model, arguments) as server: server.generate(...)``; stops the process group at the end.

    backend: a sampling backend's name, or None to leave it to the launcher. launcher: the command that the
    arguments follow.
    """

    def __init__(
        self,
        model: Path,
        arguments: list[str],
        *,
        backend: str | None,
        log: Path,
        launcher: Sequence[str] = SGLANG_LAUNCH_SERVER,
        port: int | None = None,
        environment: dict[str, str] | None = None,
        start_seconds: float = 600.0,
        progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.port = free_port() if port is None else port
        self.log = log
        self.start_seconds = start_seconds
        self.progress = progress
        self.environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
        self.command = [*launcher, "--model-path", str(model)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), *arguments]
        if "--nccl-port" not in arguments:
            self.command += ["--nccl-port", str(free_port(other_than=self.port))]
        if backend is not None:
            self.command += ["--sampling-backend", backend]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        if not port_is_free(self.port):
            raise ServerError(f"port {self.port} is taken; choose another one with --port")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        assert self.process is not None
        started = time.monotonic()
        reported = 0
        while time.monotonic() - started < self.start_seconds:
            if self.process.poll() is not None:
                raise ServerError(f"the server ended with code {self.process.returncode}: {self.last_error()}")
            with contextlib.suppress(OSError, ServerError):
                self._request("/health", None, timeout=10)
                return
            waited = int(time.monotonic() - started)
            if waited >= reported + 10:
                reported = waited
                self.progress(f"  still starting after {waited} s (log: {self.log})")
            time.sleep(0.3)
        raise ServerError(f"the server was not ready within {self.start_seconds:.0f} s (log: {self.log})")

    def stop(self) -> None:
        """Ask the server to stop, and leave no process of it behind."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def last_error(self) -> str:
        """The last line of the log that names an error, else the last line."""
        lines = [line.strip() for line in self.log_text().splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line or "error:" in line]
        return (named or lines or ["no output"])[-1][:300]

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_lines(self, marker: str) -> list[str]:
        """Lines of the server's log that contain ``marker``."""
        return [line for line in self.log_text().splitlines() if marker in line]

    def generate(self, **fields: Any) -> Any:
        """POST /generate; ``text`` or ``input_ids`` (one or a list), ``sampling_params``, ``return_logprob``, ..."""
        return self._request("/generate", fields)

    def chat(self, **fields: Any) -> Any:
        """POST /v1/chat/completions."""
        return self._request("/v1/chat/completions", {"model": "default", **fields})

    def post(self, path: str, **fields: Any) -> Any:
        """POST to any other of the server's endpoints, ``/update_weights_from_disk`` for example."""
        return self._request(path, fields)

    def profile(self, folder: Path, steps: int) -> None:
        """POST /start_profile: write a trace of the next ``steps`` forward passes to ``folder``."""
        activities = ["CPU", "GPU"]
        self._request("/start_profile", {"output_dir": str(folder), "num_steps": steps, "activities": activities})

    def metrics(self) -> str:
        """GET /metrics, as text."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as response:
            return response.read().decode()

    def _request(self, path: str, body: dict[str, Any] | None, timeout: float = 600.0) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path} answered {error.code}: {error.read().decode(errors='replace')[:300]}") from error
        try:
            return json.loads(text)
        except ValueError:
            return text  # /health and the profiler's endpoints answer in plain text
