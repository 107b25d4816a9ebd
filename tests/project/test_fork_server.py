"""The fork servers of the tests' SGLang servers (tests/lab/fork_server.py): their forks are what started or spawned
processes are."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from lab import fork_server

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


SERVER = """
import json, os, random, sys, numpy

about = dict(argv=sys.argv[1:], folder=os.getcwd(), name=__name__, path=sys.path[:2], session=os.getsid(0))
about |= dict(colorsys="colorsys" in sys.modules, file=__file__, parent=os.getppid(), pid=os.getpid())
about |= dict(own=os.environ["OWN"], interprets=os.environ["TRITON_INTERPRET"], site=sys.modules["sitecustomize"].OWN)
about |= dict(chance=[random.random(), numpy.random.rand()], input=sys.stdin.read(), known="ADDED" in os.environ)
about["cores"] = len(os.sched_getaffinity(0))
print(json.dumps(about), flush=True)
if "stay" in sys.argv:
    import time
    time.sleep(60)
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a pretended server with these variables and arguments: the process, and the file with what it says."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADDED", "1")
    monkeypatch.setenv(fork_server.FOLDER, tempfile.mkdtemp(prefix="fork-"))  # a socket's path must be short
    monkeypatch.setattr(fork_server, "IMPORTED", ("numpy", "colorsys", "a_package_that_is_not_there"))
    monkeypatch.setattr(fork_server, "STARTED", [])

    def start(name: str, *arguments: str, **variables: str):
        (folder := tmp_path / name).mkdir()
        (folder / "sitecustomize.py").write_text(f"OWN = {name!r}")
        environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": str(folder), "OWN": name} | variables
        command = [sys.executable, "-m", "sglang.launch_server", *arguments]
        with (tmp_path / f"{name}.log").open("wb") as output:
            process = fork_server.popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        return process, tmp_path / f"{name}.log"

    yield start
    for one in fork_server.STARTED:
        one.communicate()
    shutil.rmtree(os.environ[fork_server.FOLDER])


def said(log: Path) -> dict:
    deadline = time.monotonic() + 60
    while not log.read_text().endswith("}\n"):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return json.loads(log.read_text())


def test_servers_are_forks_of_one_process_and_each_is_what_its_command_would_have_started(start, tmp_path):
    every, started = os.sched_getaffinity(0), [start("one", "--a", "0")]
    try:
        os.sched_setaffinity(0, {min(every)})
        started.append(start("two", "--b", "3"))
    finally:
        os.sched_setaffinity(0, every)
    started.append(start("three", "0", TRITON_INTERPRET="1"))
    assert [process.wait(60) for process, _ in started] == [process.poll() for process, _ in started] == [0, 3, 0]
    one, two, three = (said(log) for _, log in started)
    assert one["parent"] == two["parent"] != three["parent"], "Triton reads that variable when it is imported"
    for name, about, (process, _) in zip(("one", "two", "three"), (one, two, three), started, strict=True):
        assert about["colorsys"] and about["parent"] != os.getpid() and about["pid"] == about["session"] == process.pid
        assert (about["own"], about["site"], about["name"]) == (name, name, "__main__") and not about["known"]
        assert about["folder"] == str(tmp_path) and about["path"] == [str(tmp_path), str(tmp_path / name)]
        assert about["file"] == str(tmp_path / "sglang" / "launch_server.py") and about["input"] == ""
    assert (one["argv"], two["argv"], three["interprets"]) == (["--a", "0"], ["--b", "3"], "1")
    assert (one["cores"], two["cores"]) == (len(every), 1)
    assert not set(one["chance"]) & set(two["chance"])


def test_a_fork_is_waited_for_and_ends_by_a_signal_and_one_that_fails_says_why(start):
    process, log = start("stays", "stay", "0")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None and said(log)["pid"] == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == process.poll() == -signal.SIGTERM and not is_running(process.pid)
    process.send_signal(signal.SIGTERM)  # of a process that is gone
    failing, log = start("fails", "no number")
    assert failing.wait(60) == 1 and "ValueError: invalid literal for int()" in log.read_text()


def test_servers_end_with_who_started_them_however_that_ends(start):
    """A test that is killed cannot stop its servers."""
    process, log = start("stays", "stay", "0")
    said(log)
    (forking,) = fork_server.STARTED
    assert is_running(process.pid)
    forking.stdin.close()
    assert process.wait(60) == -signal.SIGKILL and forking.wait(60) == 0
    deadline = time.monotonic() + 30
    while is_running(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_is_no_server_of_this_python_is_started_and_not_forked(tmp_path):
    with (tmp_path / "log").open("wb") as output:
        process = fork_server.popen([sys.executable, "-c", "print(1)"], env=os.environ, stdout=output)
    assert isinstance(process, subprocess.Popen) and process.wait(60) == 0


def test_a_script_runs_as_a_fork_and_its_outputs_are_apart(start, tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n\nprint(sys.argv, sys.path[0], __name__, 'colorsys' in sys.modules)\nraise ValueError('no')\n"
    )
    done = fork_server.run([sys.executable, str(script), "a"])
    assert done.stdout == f"{[str(script), 'a']} {tmp_path} __main__ True\n" and done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: no"


def test_a_program_shares_the_process_that_forks_and_its_own_ends_with_it(start, tmp_path):
    process, log = start("here", "0")
    assert process.wait(60) == 0
    program = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from lab import fork_server

fork_server.IMPORTED = ("numpy",)
command, environment = json.loads(sys.argv[2])
with open("log", "wb") as output:
    fork_server.popen(command, env=environment, stdout=output).wait(60)
print(json.load(open("log"))["parent"])
"""
    environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": str(tmp_path / "here"), "OWN": "there"}
    order = json.dumps([[sys.executable, "-m", "sglang.launch_server", "0"], environment])
    without = {name: value for name, value in os.environ.items() if name != fork_server.FOLDER}
    parents = [
        int(subprocess.run([sys.executable, "-c", program, str(TESTS), order], env=env, capture_output=True).stdout)
        for env in (os.environ, without)
    ]
    assert parents[0] == said(log)["parent"] != parents[1]
    deadline = time.monotonic() + 30
    while is_running(parents[1]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert is_running(parents[0])
