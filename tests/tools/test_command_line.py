"""The command line: help, exit codes and one-line errors."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from serving import needs_sglang
from tuned_tables import make_table

from sgl_flashsample import __version__
from sgl_flashsample.hot_vocab import HotVocab
from sgl_flashsample.sglang import versions
from sgl_flashsample.tools import server as servers
from sgl_flashsample.tools import smollm2

EVERYTHING = "torch,triton,numpy,msgspec,sglang"
MEANINGS = {0: "done", 1: "something was found wrong", 2: "an argument, or what it names", 130: "interrupted"}
ONE_TOKEN = HotVocab.of_ids(np.bincount([5], minlength=640)).dumps()


def test_help_needs_nothing_but_python_and_names_every_command(command):
    shown = command("--help", hidden=EVERYTHING)
    assert shown.returncode == 0 and shown.stderr == ""
    assert all(
        f"\n    {word} " in shown.stdout for word in ("serve", "bench", "tune", "warm", "trace", "doctor", "demo")
    )
    assert all(f"{code} {meaning}" in shown.stdout for code, meaning in MEANINGS.items())
    assert command("--version", hidden=EVERYTHING).stdout == f"sgl-flashsample {__version__}\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["serve"], ["--model-path", "--tuned FILE", "--flashsample-screen"]),
        (
            ["serve"],
            [f"FLASHSAMPLE_{name} " for name in ("LOG_SECONDS", "TUNED", "TUNED_DIR", "ALLOW_FAMILY", "TRACE")],
        ),
        (["trace"], ["text", "ids", "show", "merge", "FLASHSAMPLE_TRACE"]),
        (["trace", "text"], ["AutoTokenizer", "--vocab", "--name", "--out", "--json"]),
        (["trace", "ids"], ["output_ids", "--model"]),
        (["bench"], ["--model-path MODEL", "--samplings", "--batches", "--load RATE", "--json", "--html", "unchanged"]),
        (["warm"], ["MODEL", "--dtype DTYPE", "--device NAME", "--tuned FILE", "--no-screen", "TRITON_CACHE_DIR"]),
        (["completion"], ["bash", "zsh"]),
        (["doctor"], ["--json"]),
        (["demo"], ["--port", "--size", "--folder"]),
        (["tune"], ["plan", "run", "verify", "explain"]),
    ],
)
def test_each_command_has_a_help_of_its_own(run, arguments, words):
    code, out, _ = run(*arguments, "--help")
    assert code == 0
    assert all(word in out for word in words)


def test_the_help_of_the_screen_says_that_a_server_without_a_fresh_table_races_it(run):
    out = " ".join(run("serve", "--help")[1].split())
    assert "auto: where a tuned table, or without a fresh one a race at the start, finds it faster" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: command (see `sgl-flashsample --help`)"),
        (["nonsense"], "invalid choice"),
        (["doctor", "--yaml"], "unrecognized arguments: --yaml"),
        (["serve", "--model-path", "x", "--sampling-backend", "flashinfer"], "serve sets --sampling-backend itself"),
        (["serve", "--sampling-backend=pytorch"], "serve sets --sampling-backend itself"),
        (["serve"], "no model is named: expected --model-path MODEL"),
        (["serve", "--model-path", "x", "--tuned"], "argument --tuned: expected one argument"),
        (
            ["serve", "--tuned=", "--model-path", "x"],
            "argument --tuned: no file is named; expected the path of a table",
        ),
        (["serve", "--flashsample-screen"], "argument --flashsample-screen: expected one argument"),
        (["serve", "--flashsample-screen=yes"], "invalid choice: 'yes' (choose from 'auto', 'on', 'off')"),
        (["tune", "show", "nothing.json"], "nothing.json: No such file or directory"),
        (["demo", "--size", "huge"], "unknown size 'huge'; sizes are tiny"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_two(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, hidden, advice",
    [
        ("serve --model-path m", "sglang", "sglang is not installed: pip install '.[sglang]'"),
        ("bench --model-path m --html b.html", "sglang", "sglang is not installed: pip install '.[sglang]'"),
        pytest.param(
            "bench --model-path m --html b.html",
            "plotly",
            "plotly is not installed: pip install '.[tune]'",
            marks=needs_sglang,
        ),
        ("demo", "safetensors", "safetensors is not installed: pip install '.[sglang]'"),
        ("demo", "torch", "torch is not installed: pip install '.'"),
        (
            "trace text --tokenizer t",
            "tokenizers",
            "tokenizers is not installed: pip install '.[sglang]'",
        ),
        ("trace show hot.json", "numpy", "numpy is not installed: pip install '.'"),
        ("tune run --vocab 64 --hidden 64", "triton", "triton is not installed: pip install '.'"),
        ("tune show t.json", "rich", "rich is not installed: pip install '.[tune]'"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_brings_it(command, tmp_path, arguments, hidden, advice):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    done = command(*arguments.split(), hidden=hidden, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"error: {advice} in a checkout of sgl-flashsample\n"


def test_token_counts_are_shown_without_torch(command, tmp_path):
    (tmp_path / "hot.json").write_text(ONE_TOKEN)
    done = command("trace", "show", "hot.json", hidden="torch,sglang,scipy", cwd=tmp_path)
    assert done.returncode == 0 and "1 token counted" in done.stdout


def test_an_interruption_is_one_line_and_exit_code_130(run, monkeypatch):
    def interrupted(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(HotVocab, "load", interrupted)
    assert run("trace", "show", "x") == (130, "", "error: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_whatever_ends_a_command_ends_its_servers(tmp_path, number):
    """By a time limit, a terminal that is closed, and Ctrl-C; each twice: who waits is impatient."""
    server = "import os, signal, time; signal.signal(15, lambda *_: print(flush=True)); print(os.getpid(), flush=True)"
    server += "\nwhile True: time.sleep(1)"
    code = f"""
import signal, sys
from sgl_flashsample.cli import main
from sgl_flashsample.tools import demo as demonstration, server
def demo(folder, port, size):
    launcher = (sys.executable, "-c", {server!r})
    with server.Server("m", [], backend=None, log=folder / "log", launcher=launcher, patience=60.0): ...
demonstration.run = demo
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell, and under nohup:
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.exit(main(["demo", "--folder", "."]))
"""
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "log"
    for lines in (1, 2):  # the server is up; it has been asked to stop, and is waited for
        while child.poll() is None and not (log.exists() and log.read_text().count("\n") >= lines):
            time.sleep(0.05)
        time.sleep(0.2)
        child.send_signal(number)
    assert (child.communicate(timeout=60)[1], child.returncode) == ("error: interrupted\n", 130)
    assert not os.path.exists(f"/proc/{int(log.read_text().split()[0])}")


@pytest.mark.parametrize(
    "closed, arguments, code, said",
    [
        (">&-", "trace show hot.json", 0, ""),
        ("<&-", "trace ids --vocab 8", 2, "error: stdin is closed; expected text in it, or files\n"),
        ("2>&-", "trace show nothing.json", 2, ""),
    ],
    ids=["stdout", "stdin", "stderr"],
)
def test_a_closed_stream_is_no_traceback(tmp_path, closed, arguments, code, said):
    (tmp_path / "hot.json").write_text(ONE_TOKEN)
    line = f"{sys.executable} -m sgl_flashsample.cli {arguments} {closed}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    (tmp_path / "hot.json").write_text(ONE_TOKEN)
    shown = [sys.executable, "-m", "sgl_flashsample.cli", "trace", "show", "hot.json"]
    signals = {"preexec_fn": lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN)}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(shown, stdout=write, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path, **signals)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_command_has_found_stays_its_exit_code_where_nobody_reads_it(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    read, write = os.pipe()
    os.close(read)
    lint = [sys.executable, "-m", "sgl_flashsample.cli", "tune", "lint", "broken.json"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # else the first line ends it
    done = subprocess.run(lint, stdout=write, stderr=subprocess.PIPE, check=False, cwd=tmp_path, env=buffered)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_letter_that_an_output_lacks_is_escaped(command, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    shown = command("bench", "--help", hidden=EVERYTHING)
    assert (shown.returncode, shown.stderr) == (0, "") and '"faster by 5.1 \\xb1 0.9 %"' in shown.stdout


def test_a_server_that_does_not_start_is_one_line_and_exit_code_one(run, monkeypatch):
    def fails(server):
        raise servers.ServerError("the server ended with code 1: ValueError: no such model")

    monkeypatch.setattr(servers.Server, "start", fails)
    monkeypatch.setattr(smollm2, "weights_file", lambda: None)  # to write the trained model takes 20 s
    code, _, err = run("demo")
    assert (code, err) == (1, "error: the server ended with code 1: ValueError: no such model\n")


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "sgl_flashsample", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout == f"sgl-flashsample {__version__}\n"
    wrong = subprocess.run([*command[:3], "serve"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2


# --- files that are there

WRITING = [
    ("trace ids IDS --vocab 640 --out", "token counts"),
    ("trace merge HOT --out", "token counts"),
    ("trace map HOT --out", "a token map"),
    ("tune merge TABLE TABLE --out", "a tuned table"),
    ("tune report TABLE --out", "an HTML page"),
    ("bench --model-path m --json", "a benchmark result"),
    ("bench --model-path m --html", "an HTML page"),
]


@pytest.fixture
def there(tmp_path):
    """A folder with something for each command to read."""
    (tmp_path / "IDS").write_text("[1, 2]")
    (tmp_path / "HOT").write_text(ONE_TOKEN)
    (tmp_path / "TABLE").write_text(make_table().dumps())
    return tmp_path


@pytest.mark.parametrize("arguments, kind", WRITING, ids=lambda value: value)
def test_a_file_of_another_kind_is_not_written_over(run, there, arguments, kind):
    (there / "config.json").write_text('{"vocab_size": 640}')
    code, out, err = run(*arguments.split(), "config.json")
    message = f"{arguments.split()[-1]} is config.json, which holds something other than {kind}; expected another file"
    assert (code, out, err) == (2, "", f"error: {message}\n")
    assert (there / "config.json").read_text() == '{"vocab_size": 640}'


@pytest.mark.parametrize("arguments", [arguments for arguments, _ in WRITING[:4]])
def test_an_earlier_file_of_its_kind_and_an_empty_one_are_written_over(run, there, arguments):
    (there / "out").touch()
    assert [run(*arguments.split(), "out")[0] for _ in range(2)] == [0, 0]


# --- serve


@pytest.fixture
def executed(monkeypatch):
    """The commands that would have replaced this process."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: commands.append(arguments))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(versions, "entry_point_found", lambda: True)
    for name in ("FLASHSAMPLE_TUNED", "FLASHSAMPLE_SCREEN", "FLASHSAMPLE_REQUIRE"):
        monkeypatch.setenv(name, "before")  # also puts it back
    return commands


def test_serve_passes_every_argument_to_sglang_with_the_backend_added(run, executed):
    arguments = ["--model-path", "m", "-tp", "2", "--weird=1", "--tun", "-1", "--json", '{"a": 1}', "--port", "31000"]
    run("serve", *arguments)
    assert [command[1:] for command in executed] == [
        ["-m", "sglang.launch_server", *arguments, "--sampling-backend", "flashsample"]
    ]
    assert os.environ["FLASHSAMPLE_TUNED"] == os.environ["FLASHSAMPLE_SCREEN"] == "before"
    assert os.environ["FLASHSAMPLE_REQUIRE"] == "before"


@pytest.mark.parametrize("arguments", [["x"], ["--enable-metrics"], ["--model-loader-extra-config", "{}"]])
def test_without_a_model_sglang_is_not_started(run, executed, arguments):
    code, _, err = run("serve", *arguments)
    assert code == 2 and err.startswith("error: no model is named: expected --model-path MODEL") and not executed


@pytest.mark.parametrize(
    "arguments", [["--model", "m"], ["--model-path=m"], ["--model-p", "m"], ["--config", "c.yaml"]]
)
def test_a_model_may_be_named_in_each_way_that_sglang_takes(run, executed, arguments):
    run("serve", *arguments)
    assert executed[-1][3:] == [*arguments, "--sampling-backend", "flashsample"]


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize(
    "option, variable, value",
    [("--tuned", "FLASHSAMPLE_TUNED", "t.json"), ("--flashsample-screen", "FLASHSAMPLE_SCREEN", "on")],
)
def test_options_of_ours_reach_the_server_through_its_environment(
    run, executed, monkeypatch, tmp_path, option, variable, value, place
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(make_table().dumps())
    for given in ([option, value], [f"{option}={value}"]):
        arguments = ["--model-path", "m"]
        run("serve", *arguments[:place], *given, *arguments[place:])
        assert executed[-1][3:] == ["--model-path", "m", "--sampling-backend", "flashsample"]
        assert os.environ[variable] == (os.path.abspath(value) if option == "--tuned" else value)


@pytest.mark.parametrize("port", ["65536", "0", "-1", "x"])
@pytest.mark.parametrize("command", [["demo"], ["serve", "--model-path", "m"]])
def test_a_port_that_is_none_is_one_line(run, executed, command, port):
    for given in (["--port", port], [f"--port={port}"]):
        code, out, err = run(*command, *given)
        assert (code, out, err.count("\n")) == (2, "", 1) and "--port: " in err and not executed
        assert f"{port!r} is no port; expected 1 to 65535" in err


@pytest.mark.parametrize("content, reason", [(None, "not a file"), ("{}", "no tuned table")])
def test_serve_with_a_file_that_is_no_table_starts_nothing(run, executed, tmp_path, content, reason):
    file = tmp_path / "t.json"
    if content is not None:
        file.write_text(content)
    code, _, err = run("serve", "--tuned", file, "--model-path", "m")
    assert code == 2 and err.startswith(f"error: --tuned is {file}, which is {reason}") and not executed
    assert err.count("\n") == 1


@pytest.mark.parametrize("place", [0, 2])
def test_a_server_can_be_required_to_fuse(run, executed, place):
    arguments = ["--model-path", "m"]
    run("serve", *arguments[:place], "--require", *arguments[place:])
    assert executed[-1][3:] == ["--model-path", "m", "--sampling-backend", "flashsample"]
    assert os.environ["FLASHSAMPLE_REQUIRE"] == "1"


def test_serve_without_the_entry_point_says_what_to_install(run, executed, monkeypatch):
    monkeypatch.setattr(versions, "entry_point_found", lambda: False)
    code, _, err = run("serve", "--model-path", "m")
    assert code == 1 and "no entry point 'flashsample'" in err and "-m pip install PATH" in err
    assert not executed
