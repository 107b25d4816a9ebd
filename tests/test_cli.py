"""The command line, as a person meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgl_flashsample import cli
from sgl_flashsample.demo import bootstrap
from sgl_flashsample.demo.server import Server, ServerError, free_port
from sgl_flashsample.sglang import versions


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sgl_flashsample.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_help_names_the_commands_and_each_command_has_its_own():
    assert all(word in command("--help").stdout for word in ("serve", "tune", "doctor", "demo"))
    assert "--model-path" in command("serve", "--help").stdout
    shown = command("serve", "--help").stdout
    assert all(f"FLASHSAMPLE_{name}" in shown for name in ("LOG_SECONDS", "TUNED ", "TUNED_DIR", "ALLOW_FAMILY"))
    assert "--port" in command("demo", "--help").stdout
    assert command("--version").stdout.strip() == "sgl-flashsample 0.1.0"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["serve", "--model-path", "x", "--sampling-backend", "flashinfer"], "serve sets --sampling-backend itself"),
        (["serve", "--sampling-backend=pytorch"], "serve sets --sampling-backend itself"),
        (["serve", "--model-path", "x", "--tuned"], "--tuned has no value; expected the path of a table"),
        (["serve", "--tuned=", "--model-path", "x"], "--tuned has no value; expected the path of a table"),
        (["serve", "--tuned", "a", "--tuned=b"], "--tuned is given twice"),
        (["serve", "--flashsample-screen"], "--flashsample-screen has no value; expected auto, on or off"),
        (["serve", "--flashsample-screen=yes"], "--flashsample-screen is 'yes'; expected auto, on or off"),
        (["tune", "show", "nothing.json"], "error: nothing.json: No such file or directory"),
        (["nonsense"], "invalid choice"),
        (["demo", "--size", "huge"], "unknown size 'huge'; sizes are tiny"),
    ],
)
def test_a_mistake_gets_one_line_and_no_traceback(arguments, message):
    done = command(*arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_passes_every_argument_to_sglang_with_the_backend_added(monkeypatch):
    seen = []
    monkeypatch.setattr(cli.os, "execv", lambda path, arguments: seen.append(arguments))
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cli, "entry_point_found", lambda: True)
    cli.main(["serve", "--model-path", "m", "--tp-size", "2", "--weird=1"])
    assert seen[0][1:] == [
        *("-m", "sglang.launch_server", "--model-path", "m", "--tp-size", "2", "--weird=1"),
        *("--sampling-backend", "flashsample"),
    ]


@pytest.mark.parametrize("how", [["--tuned", "t.json"], ["--tuned=t.json"]])
@pytest.mark.parametrize("place", [0, 2])
def test_the_tuned_table_reaches_the_server_through_its_environment_and_not_sglang(monkeypatch, tmp_path, how, place):
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHSAMPLE_TUNED", "another")  # also puts it back
    monkeypatch.setattr(cli.os, "execv", lambda path, arguments: seen.append(arguments))
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cli, "entry_point_found", lambda: True)
    arguments = ["--model-path", "m"]
    cli.main(["serve", *arguments[:place], *how, *arguments[place:]])
    assert seen[0][3:] == ["--model-path", "m", "--sampling-backend", "flashsample"]
    assert os.environ["FLASHSAMPLE_TUNED"] == str(tmp_path / "t.json")


@pytest.mark.parametrize("how", [["--flashsample-screen", "on"], ["--flashsample-screen=on"]])
def test_the_screen_reaches_the_server_through_its_environment_and_not_sglang(monkeypatch, how):
    seen = []
    monkeypatch.setenv("FLASHSAMPLE_SCREEN", "off")  # also puts it back
    monkeypatch.setattr(cli.os, "execv", lambda path, arguments: seen.append(arguments))
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cli, "entry_point_found", lambda: True)
    cli.main(["serve", "--model-path", "m", *how])
    assert seen[0][3:] == ["--model-path", "m", "--sampling-backend", "flashsample"]
    assert os.environ["FLASHSAMPLE_SCREEN"] == "on"


def test_serve_without_sglang_or_without_the_entry_point_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["serve", "--model-path", "m"]) == 1
    assert "pip install 'sgl-flashsample[sglang]'" in capsys.readouterr().err
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cli, "entry_point_found", lambda: False)
    assert cli.main(["serve", "--model-path", "m"]) == 1
    assert "no entry point 'flashsample'" in capsys.readouterr().err


def test_doctor_reports_versions_device_and_self_test_and_exits_zero_when_all_is_well():
    done = command("doctor")
    assert done.returncode == 0, done.stdout
    for word in ("Python 3.", "torch 2.", "triton 3.", "self-test"):
        assert word in done.stdout
    assert "problem" not in done.stdout


def test_doctor_gives_each_problem_its_remedy_and_exits_one():
    done = command("doctor", "--json", SGLANG_PLUGINS="other")
    findings = json.loads(done.stdout)
    problems = [finding for finding in findings if finding["level"] == "problem"]
    if any("SGLang" in f["what"] and "not installed" not in f["what"] for f in findings):
        assert done.returncode == 1
        assert any("SGLANG_PLUGINS=other" in problem["what"] for problem in problems)
    assert all(problem["advice"] for problem in problems)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.19", "0.5.21.post1", "0.5.23"])
def test_known_sglang_versions_are_accepted(version):
    assert versions.version_problem(version) is None


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0", "1.0", "unknown", "not installed"])
def test_an_unknown_sglang_version_is_named_with_those_that_are_known(version, monkeypatch):
    problem = versions.version_problem(version)
    assert f"SGLang {version} is not among the known versions 0.5.17 to 0.5.23" in problem
    monkeypatch.setenv(versions.ANY_VERSION_VARIABLE, "1")
    assert versions.version_problem(version) is None


def test_a_hook_target_that_is_missing_or_changed_is_named(monkeypatch):
    monkeypatch.setitem(versions.HOOK_TARGETS, "json.nothing", ("self",))
    assert "json.nothing is missing" in versions.target_problem("json.nothing")
    monkeypatch.setitem(versions.HOOK_TARGETS, "json.loads", ("s", "strict"))
    assert "json.loads has parameters s, " in versions.target_problem("json.loads")
    monkeypatch.setitem(versions.HOOK_TARGETS, "json.loads", ("s",))
    assert versions.target_problem("json.loads") is None


def test_a_taken_port_is_said_before_anything_starts(tmp_path):
    import socket

    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        server = Server(tmp_path, [], backend=None, log=tmp_path / "log", port=port)
        with pytest.raises(ServerError, match=f"port {port} is taken"):
            server.start()


def test_no_port_of_a_server_is_one_that_the_system_hands_out_to_others_meanwhile(tmp_path):
    server = Server(tmp_path, ["--tp", "1"], backend=None, log=tmp_path / "log")
    first_of_others = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [int(server.command[server.command.index(name) + 1]) for name in ("--port", "--nccl-port")]
    assert ports[0] == server.port != ports[1]
    assert all(1024 <= port < first_of_others for port in ports)
    chosen = Server(tmp_path, ["--nccl-port", "1234"], backend=None, log=tmp_path / "log")
    assert chosen.command.count("--nccl-port") == 1 and "1234" in chosen.command


def test_a_server_that_dies_at_start_is_reported_with_its_last_error(tmp_path):
    server = Server(tmp_path, [], backend=None, log=tmp_path / "log")
    server.command = [sys.executable, "-c", "raise SystemExit('ValueError: no such model')"]
    with pytest.raises(ServerError, match="ended with code 1: ValueError: no such model"), server:
        pass


@pytest.mark.parametrize(
    "gpu, cores, workers, threads",
    [(False, 1, None, None), (False, 2, 2, 1), (False, 16, 4, 4), (True, 16, None, None)],
)
def test_make_test_uses_the_cores_that_there_are_and_does_not_share_a_gpu(monkeypatch, gpu, cores, workers, threads):
    called = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: gpu)
    monkeypatch.setattr(bootstrap.os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(bootstrap.subprocess, "call", lambda command, env, cwd: called.append((command[1:], env)) or 7)
    assert bootstrap.run_tests(["-k", "some"]) == 7
    ((command, environment),) = called
    assert command[-2:] == ["-k", "some"]
    assert command[:2] == (["-n", str(workers)] if workers else ["-k", "some"])
    assert environment.get("OMP_NUM_THREADS") == (str(threads) if threads else None)


def test_kernels_run_here():
    assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"
