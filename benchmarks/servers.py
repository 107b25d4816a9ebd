"""Shared by the benchmarks of servers: their options, servers that answer in turns, and failures and the rows of each
path of a server of ours."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sgl_flashsample.tools.server import Server


def failures_of(server: Server) -> list[str]:
    """Lines of a server's log that a healthy one does not write."""
    lines = [line for line in server.log_lines('File "') if "sgl_flashsample" in line]
    lines += server.log_lines("Scheduler hit an exception") + server.log_lines("until restart")
    return lines


def counters_of(server: Server) -> dict[str, float]:
    """The rows of each path and reason, and whether ours serves."""
    time.sleep(server.metrics_seconds)
    server.generate(text="a", sampling_params={"max_new_tokens": 2})  # a step brings the counters up to date
    counted: dict[str, float] = {}
    for name, labels, value in re.findall(
        r"^sglang:flashsample_(rows_total|active)(\{.*\})? (\S+)$", server.metrics(), re.M
    ):
        words = [re.search(rf'\b{label}="(\w*)"', labels) for label in ("path", "reason")]
        key = " ".join(word[1] for word in words if word and word[1]) if name == "rows_total" else name
        counted[key] = counted.get(key, 0.0) + float(value)
    return counted


def server_options(parser: argparse.ArgumentParser, logs: str, memory_share: float) -> None:
    """Add the options of all servers. logs: the folder of logs, within the one for temporary files."""
    folder = Path(tempfile.gettempdir()) / logs
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="environment of the servers")
    parser.add_argument("--memory-share", type=float, default=memory_share, help="--mem-fraction-static of each server")
    parser.add_argument("--logs", type=Path, default=folder)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which no further cell begins")
    parser.add_argument(
        "--turn", type=Path, metavar="FILE", help="start beside benchmarks with this file, then measure alone"
    )


def check_server_options(options: Any) -> None:
    """Complete ``--set`` and ``until``, the time of ``--limit``. Raises ValueError for ``--set`` and ``--pairs``."""
    if getattr(options, "pairs", 2) < 2:
        raise ValueError(f"--pairs is {options.pairs}; expected 2 or more")
    if any("=" not in text for text in options.set):
        raise ValueError(f"--set is {options.set}; expected NAME=VALUE")
    options.set = dict(text.split("=", 1) for text in options.set)
    options.until = time.monotonic() + options.limit


Servers = Iterable[Server]


@contextlib.contextmanager
def in_turns(options: Any) -> Iterator[Callable[[Servers], None]]:
    """Servers start in here while no other benchmark with the same ``--turn`` measures. Call what is given with them,
    once they are ready: they stand still until no other benchmark starts servers or measures, and from then on this one
    is alone. This wait is no part of ``--limit``. Without ``--turn`` nothing waits."""
    if options.turn is None:
        yield lambda servers: None
        return
    with options.turn.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)

        def wait(servers: Servers) -> None:
            servers, began = list(servers), time.monotonic()
            _signal(servers, signal.SIGSTOP)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            finally:
                _signal(servers, signal.SIGCONT)
            options.until += time.monotonic() - began

        yield wait


def _signal(servers: Servers, number: signal.Signals) -> None:
    for server in servers:
        if server.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, number)


class TakingTurns(Server):
    """A server that stops ``others`` while it answers: they look for work, stages of a pipeline without a pause, on
    cores that the measured server needs."""

    others: Sequence[TakingTurns] = ()

    def _open(self, *request: Any) -> Any:
        _signal(self.others, signal.SIGSTOP)
        _signal([self], signal.SIGCONT)
        return super()._open(*request)

    def stop(self) -> None:
        _signal([self], signal.SIGCONT)
        super().stop()


def take_turns(servers: Iterable[Any]) -> None:
    """From now on one of these ``TakingTurns``, which are all ready, runs while the others stand still."""
    servers = list(servers)
    for server in servers:
        server.others = [other for other in servers if other is not server]
