"""Foreign files are read within bounds. Our own files appear complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sgl_flashsample.files import BadFileError, check_writable, hold, one_line, parse_json, read_plain, write_whole


@contextlib.contextmanager
def at_once():
    """Fails if the code inside the block waits."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: pytest.fail("it waits"))
    signal.alarm(2)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_plain_file_within_its_bound_is_read_and_nothing_else_is_waited_for(tmp_path, monkeypatch):
    file = tmp_path / "text"
    file.write_text("é" * 50)
    assert read_plain(file, 100) == "é" * 50
    with pytest.raises(BadFileError, match="it has 100 bytes; expected 99 or fewer"):
        read_plain(file, 99)
    status = os.stat(file)
    file.unlink()
    os.mkfifo(file)  # between the look at the file and the reading of it
    with monkeypatch.context() as patched, at_once():
        patched.setattr(os, "stat", lambda path: status)
        assert read_plain(file, 100) == ""


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" + "1," * 50 + "1]", "it is longer than 100 bytes"),
        ('"' + "é" * 60 + '"', "it is longer than 100 bytes"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' is there twice in one object"),
        ("[-Infinity]", "it has the number -Infinity; expected finite ones"),
        ("[1", "it is not JSON: "),
        ("", "it is not JSON: Expecting value"),
    ],
    ids=range(6),
)
def test_json_is_parsed_within_its_bound(text, message):
    with pytest.raises(BadFileError) as caught:
        parse_json(text, 100)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_json_of_any_depth_and_length_of_number_is_an_answer():
    assert parse_json('{"a": [1, {"b": 2.5}]}', 30) == {"a": [1, {"b": 2.5}]}
    for text, message in (("[" * 90_000, "it is nested too deeply"), ("9" * 5000, "it is not JSON: Exceeds the limit")):
        with pytest.raises(BadFileError, match=message):
            parse_json(text, 100_000)


def test_a_line_is_short_and_printable():
    assert one_line("a\nb\x1b[2J\u202e") == "a b [2J "
    assert one_line("x" * 500) == "x" * 117 + "..." and one_line("x" * 500, 300) == "x" * 297 + "..."


def test_a_file_is_written_whole_or_left_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "file"
    for text in ("one é\n", "two"):
        write_whole(file, text)
        assert file.read_text(encoding="utf-8") == text
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "three \ud800")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "three")
    assert file.read_text() == "two" and os.listdir(tmp_path) == ["file"]


def write_in_place(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.mark.parametrize("write, whole", [(write_whole, True), (write_in_place, False)], ids=["ours", "in place"])
def test_a_reader_finds_a_whole_file_while_processes_write_it_and_are_killed(tmp_path, write, whole):
    file, texts = tmp_path / "file", ["a" * 1_000_000, "b" * 1_000_000]
    write_whole(file, texts[0])

    def write_often() -> None:
        for text in itertools.cycle(texts):
            write(file, text)

    reads = []
    for _ in range(20):
        writers = [multiprocessing.get_context("fork").Process(target=write_often) for _ in range(2)]
        for writer in writers:
            writer.start()
        reads += [file.read_text() for _ in range(10)]
        for writer in writers:
            writer.kill()
            writer.join()
        reads.append(file.read_text())
    assert all(read in texts for read in reads) == whole


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_plain_file_is_not_replaced(tmp_path, make):
    make(tmp_path / "there")
    with pytest.raises(ValueError, match="there is not a plain file"):
        write_whole(tmp_path / "there", "text")
    assert os.listdir(tmp_path) == ["there"]


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600)])
def test_a_file_has_the_mode_that_the_process_gives_its_files(tmp_path, umask, mode):
    code = "import sys; from sgl_flashsample.files import write_whole; write_whole(sys.argv[1], 'x')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=True, umask=umask)
    assert stat.S_IMODE(os.stat(tmp_path / "file").st_mode) == mode


def test_the_process_keeps_its_umask_while_files_are_written(tmp_path, monkeypatch):
    """All threads share the umask: changed for a moment, it would make other threads' files writable by anybody."""
    asked = []
    monkeypatch.setattr(os, "umask", lambda mask: asked.append(mask) or 0o022)
    write_whole(tmp_path / "file", "x")
    assert asked == []


@pytest.mark.full
def test_other_threads_files_keep_their_mode_while_files_are_written(tmp_path):
    stop, modes, path = threading.Event(), set(), tmp_path / "other"

    def create() -> None:
        while not stop.is_set():
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
            modes.add(stat.S_IMODE(os.stat(path).st_mode))
            path.unlink()

    before = os.umask(0o022)
    thread = threading.Thread(target=create)
    thread.start()
    for _ in range(1000):
        write_whole(tmp_path / "file", "x")
    stop.set()
    thread.join()
    os.umask(before)
    assert modes == {0o644}


@pytest.mark.parametrize(
    "name, words",
    [
        ("file", None),
        ("new", None),
        ("folder", "which is not a plain file"),
        ("nowhere/file", "in a folder that is not there"),
        ("/proc/file", "which cannot be written: No such file or directory"),
    ],
)
def test_it_is_known_beforehand_whether_a_file_can_be_written(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    with contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=f"^--out is {name}, {words}$"):
        check_writable(name, "--out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_file_is_held_once_until_it_is_closed_and_not_by_programs_that_are_started(tmp_path):
    file = tmp_path / "lock"
    held = hold(file)
    assert held is not None and hold(file) is None
    sleeping = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        held.close()
        with hold(file) as again:
            assert again is not None
    finally:
        sleeping.kill()
        sleeping.wait()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_taken_as_it_is(tmp_path, monkeypatch, number):
    def no_locks(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for _ in range(2):
        with hold(tmp_path / "lock") as held:
            assert held is not None
