"""The fork server of the tests' SGLang servers (tests/lab/fork_server.py): its forks are what spawned processes are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
AT_THE_START = """
import sys

sys.path.insert(0, {tests!r})
from lab import fork_server

fork_server.IMPORTED = ("colorsys", "a_package_that_is_not_there")
fork_server.start()
"""
PROGRAM = """
import multiprocessing, os, signal, sys, time


def child(queue, number):
    about = dict(number=number, parent=os.getppid(), colorsys="colorsys" in sys.modules, main=__name__)
    about |= {name: os.environ.get(name) for name in ("ADDED", "REMOVED", "STAYS")}
    about["quit"] = signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL
    queue.put(about)
    if number == 1:
        os.kill(os.getppid(), signal.SIGQUIT)
        time.sleep(60)
    sys.exit(number)


if __name__ == "__main__":
    told = []
    signal.signal(signal.SIGQUIT, lambda *about: told.append(True))
    multiprocessing.set_start_method("spawn", force=True)
    os.environ["ADDED"] = "1"
    del os.environ["REMOVED"]
    queue = multiprocessing.Queue()
    children = [multiprocessing.Process(target=child, args=(queue, number)) for number in (7, 1)]
    children[0].start()
    print(queue.get())
    children[0].join()
    children[1].start()
    print(queue.get())
    while not told and children[1].is_alive():
        time.sleep(0.01)
    print(dict(first=os.getpid(), told=told, code=children[0].exitcode, child=children[1].pid), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def program(tmp_path):
    """Starts the program as a server is started, or as another one; ends it after the test."""
    started = []

    def start(word: str) -> subprocess.Popen:
        (tmp_path / "sitecustomize.py").write_text(AT_THE_START.format(tests=str(TESTS)))
        (tmp_path / "program.py").write_text(PROGRAM)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "REMOVED": "1", "STAYS": "1"}
        command = [sys.executable, str(tmp_path / "program.py"), word]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
        return started[-1]

    yield start
    for one in started:
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()


def lines(process: subprocess.Popen, count: int) -> list[dict]:
    return [eval(process.stdout.readline()) for _ in range(count)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not (3, 11) <= sys.version_info < (3, 14), reason="another Python spawns processes as ever")
def test_a_fork_has_its_parents_environment_tells_it_of_an_error_and_ends_with_it(program):
    process = program("sglang.launch_server")
    *children, parent = lines(process, 3)
    assert [one["number"] for one in children] == [7, 1] and parent["code"] == 7
    for one in children:
        assert one["colorsys"] and one["main"] == "__mp_main__"
        assert one["parent"] != parent["first"], "it is forked, and not spawned"
        assert (one["ADDED"], one["REMOVED"], one["STAYS"]) == ("1", None, "1") and one["quit"]
    assert parent["told"] == [True] and is_running(children[1]["parent"])
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while is_running(children[1]["parent"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_program_that_is_no_server_spawns_its_processes(program):
    *children, parent = lines(program("another"), 3)
    for one in children:
        assert one["parent"] == parent["first"] and not one["colorsys"]
        assert (one["ADDED"], one["REMOVED"], one["STAYS"]) == ("1", None, "1")
