"""``sgl-flashsample warm`` fills Triton's cache for a GPU that is not there; and the completion script."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tuned_tables import CODE, make_table

from sgl_flashsample.autotune import warm as warming
from sgl_flashsample.autotune.labels import DEVICES, known_device
from sgl_flashsample.autotune.warm import remove_incomplete
from sgl_flashsample.tables.lookup import environment
from sgl_flashsample.tables.schema import Confirmed, HeadShape

HEAD = {"vocab_size": 1009, "hidden_size": 64, "torch_dtype": "bfloat16"}
SHAPE = HeadShape(vocab=HEAD["vocab_size"], hidden=HEAD["hidden_size"], dtype="bf16")
# A table that was measured with other machine code of a built-in choice.
CONFIRMED = {"plain": Confirmed(rows=[1], us=[1.0], code=[CODE])}
UNLIKE = make_table(head=SHAPE, env=environment(), entries=[], confirmed=CONFIRMED)
# The check of a starting server, for a head of these ids and this width: prints how many kernels were compiled.
START = """
import json, sys
import torch, triton
import sgl_flashsample.kernels
from sgl_flashsample import LMHead
from sgl_flashsample.selfcheck import refuse_wrong
from sgl_flashsample.tables.lookup import resolve

vocab, hidden = json.loads(sys.argv[1])
weight = torch.randn(-(-vocab // 64) * 64, hidden, device="cuda").to(torch.bfloat16)
compiled = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **about: compiled.extend([src.name] * (not cache_hit))
head = LMHead(weight, vocab_size=vocab)
assert refuse_wrong(head, 512, resolve(head).dispatch).reason is None
print(json.dumps(compiled))
"""


@pytest.fixture
def warm(command, tmp_path, monkeypatch):
    """Runs the command for a small head, in a process whose Triton compiles, with a cache of its own."""
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    # Not in the checkout, whose folder of the package has no kernels in it.
    return lambda *arguments: command("warm", tmp_path, *arguments, cwd=tmp_path)


def counts_of(out: str) -> tuple[str, int, int]:
    """The device, kernels compiled, and kernels that were there."""
    match = re.search(r"^(\d+) kernels compiled for (.*) in \d+ s, (\d+) were there: ", out, re.M)
    assert match is not None, out
    return match[2], int(match[1]), int(match[3])


@pytest.mark.full
def test_kernels_are_of_the_named_gpu_and_a_second_run_finds_them_all(warm, tmp_path, monkeypatch):
    """And so does another GPU of the same architecture; one of another architecture finds none. What a table was not
    measured with is named."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    few = ("--max-rows", 1, "--no-screen")
    first = warm(*few, "--device", "A100")
    assert first.returncode == 0, first.stderr
    _, compiled, already_there = counts_of(first.stdout)
    assert compiled >= 10 and already_there == 0
    files = [file for file in (tmp_path / "cache").rglob("*.json") if not file.name.startswith("__grp__")]
    assert len(files) == compiled and {json.loads(file.read_text())["target"]["arch"] for file in files} == {80}
    for cubin in sorted((tmp_path / "cache").rglob("*.cubin"))[:2]:
        os.truncate(cubin, 4096)
    second = warm(*few, "--device", "A100")
    assert second.returncode == 0
    assert counts_of(second.stdout)[1:] == (2, compiled - 2), "what was incomplete is compiled anew"
    assert "2 kernels of the cache were incomplete and have been removed" in second.stdout
    device, compiled, already_there = counts_of(warm(*few, "--device", "H100").stdout)
    assert device == "NVIDIA H100 80GB HBM3" and compiled >= 10 and already_there == 0
    (tmp_path / "table.json").write_text(UNLIKE.dumps())
    third = warm(*few, "--device", "H200", "--tuned", "table.json").stdout
    assert counts_of(third) == ("NVIDIA H200", 0, compiled)
    assert "is stale (other machine code than was measured: plain 1): same tokens, but it may be slow" in third


def test_a_quantised_head_has_its_kernels_compiled_without_a_screen(monkeypatch):
    """It is large enough for servers to race a screen, had it one."""
    compiled = []
    monkeypatch.setattr(warming, "compile_ahead", lambda parts, *arguments: compiled.extend(parts))
    monkeypatch.setattr(warming, "pretend_gpu", lambda gpu: None)
    warming.warm(HeadShape(vocab=151_936, hidden=4096, dtype="e4m3"), DEVICES["NVIDIA H200"])
    assert [(parts.lm_head.vocab_size, parts.screen) for parts in compiled] == [(151_936, None), (40_000, None)]
    assert all(parts.lm_head.scale is not None for parts in compiled)


@pytest.mark.parametrize("name", ["H200", "L40S", "RTX 4090"])
def test_what_was_compiled_is_also_json(run, tmp_path, monkeypatch, name):
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warming, "compile_ahead", lambda *_: warming.triton.knobs.compilation.listener(cache_hit=False))
    monkeypatch.setattr(warming, "pretend_gpu", lambda gpu: None)
    code, out, _ = run("warm", tmp_path, "--device", name, "--json")
    answer = json.loads(out)
    assert (code, answer["device"], answer["compiled"], answer["found"]) == (0, known_device(name).name, 1, 0)
    assert answer["cache"] == str(tmp_path / "cache") and answer["table"]


@pytest.mark.gpu
def test_a_server_compiles_nothing_that_was_compiled_without_its_gpu(warm, tmp_path):
    with pytest.MonkeyPatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        without = warm()
        assert without.returncode == 2 and "there is no GPU here: expected --device" in without.stderr
        done = warm("--device", "H200")
        assert done.returncode == 0, done.stderr
    shape = json.dumps([HEAD["vocab_size"], HEAD["hidden_size"]])
    started = subprocess.run([sys.executable, "-c", START, shape], cwd=tmp_path, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    assert json.loads(started.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "H1000"], "--device is 'H1000'; known without a GPU are NVIDIA H200, "),
        (["--device", "H100", "--max-rows", "0"], "--max-rows is 0; expected 1 to 65536"),
        (["--device", "H100", "--max-rows", "65537"], "--max-rows is 65537; expected 1 to 65536"),
        (["--device", "H100", "--tuned", "nowhere.json"], "--tuned is nowhere.json, which is not a file"),
        (["--device", "H100", "--tuned", "config.json"], "--tuned is config.json, which is no tuned table: "),
        (
            ["--device", "A100", "--tuned", "h200.json"],
            "--tuned names a table that these servers would not use: h200.json: it is for NVIDIA H200, not NVIDIA A100",
        ),
        (
            ["--device", "H100", "--tuned", "h200.json"],
            "--tuned names a table that these servers would not use: h200.json: it is for NVIDIA H200 (132 SMs), not ",
        ),
    ],
)
def test_what_cannot_be_compiled_for_is_named_in_one_line(warm, tmp_path, arguments, message):
    (tmp_path / "h200.json").write_text(UNLIKE.dumps())
    done = warm(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


ELF = struct.pack("<4s28xQQ6xHHHH", b"\x7fELF", 200, 64, 56, 1, 68, 2)  # its last header ends at byte 256


@pytest.mark.parametrize(
    "name, content, whole",
    [
        ("k.cubin", ELF.ljust(256, b"\0"), True),
        ("k.cubin", ELF.ljust(255, b"\0"), False),
        ("k.cubin", ELF[:40], False),
        ("k.cubin", b"", False),
        ("k.cubin", b"\0" * 256, False),
        ("k.json", b'{"shared": 1}', True),
        ("k.json", b'{"shared": ', False),
        ("k.ptx", b"", True),
    ],
)
def test_a_kernel_is_removed_from_the_cache_where_a_file_of_it_is_incomplete(tmp_path, name, content, whole):
    one, other = tmp_path / ("A" * 52), tmp_path / ("B" * 52)
    for folder in (one, other):
        folder.mkdir()
        (folder / "k.ttir").touch()
    (one / name).write_bytes(content)
    assert remove_incomplete(tmp_path) == (not whole)
    assert one.exists() == whole and other.exists()


def test_a_folder_that_is_no_kernel_of_triton_stays_in_the_cache(tmp_path):
    for folder in ("my-project", "A" * 51, "a" * 52):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tsconfig.json").write_text("{} // not JSON")
    (tmp_path / ("A" * 52)).touch()
    assert remove_incomplete(tmp_path) == 0
    assert len(list(tmp_path.glob("*/tsconfig.json"))) == 3


def test_two_processes_may_remove_the_same_incomplete_kernels(tmp_path):
    for number in range(200):
        kernel = tmp_path / f"{number:04}".translate(str.maketrans("0189", "ABCD")).ljust(52, "A")
        kernel.mkdir(exist_ok=True)
        (kernel / "k.json").write_text("{")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(remove_incomplete, [tmp_path, tmp_path]))
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_named_in_one_line(warm, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/cache")
    done = warm("--device", "H100")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr == "error: /proc/cache: No such file or directory; TRITON_CACHE_DIR names another folder\n"


def test_an_interpreter_is_not_asked_to_compile(warm, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = warm("--device", "H100")
    assert done.returncode == 2 and done.stderr.startswith("error: TRITON_INTERPRET is 1: ")


@pytest.mark.parametrize(
    "words, completed",
    [
        (["wa"], {"warm"}),
        (["tune", "re"], {"report"}),
        (["bench", "--js"], {"--json"}),
        (["tune", "run", "--effort", "q"], {"quick"}),
    ],
)
def test_a_shell_completes_commands_options_and_choices(run, tmp_path, words, completed):
    code, script, err = run("completion", "bash")
    assert code == 0, err
    line = " ".join(f"'{word}'" for word in ("sgl-flashsample", *words))
    (tmp_path / "complete.bash").write_text(
        f"{script}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words)}\n"
        "$(complete -p sgl-flashsample | sed -E 's/.*-F ([^ ]+).*/\\1/')\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    done = subprocess.run(["bash", tmp_path / "complete.bash"], capture_output=True, text=True, check=True)
    assert {word.strip() for word in done.stdout.split()} == completed
