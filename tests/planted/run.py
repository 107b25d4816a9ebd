"""Proves the tests: plants one defect at a time into a copy of the repository, and runs the tests that must fail.

    python tests/planted/run.py [--only WORDS ...] [--json FILE] [--sound] [--workers N]

Defects are listed in ``defects*.toml``. A defect is caught if every test that it names fails with it, or if they do not
end; one that is named and passes, or that cannot be run, is reported. ``--sound`` first runs the named tests without
any defect: they must pass. Prints a table; ends with 1 unless all is as it must be.

``--json`` keeps the file's rows of listed defects that are not run now, so that a new defect needs no new run of all.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTS = sorted(Path(__file__).parent.glob("defects*.toml"))
SECONDS = 150  # for the tests of one defect, which may make a kernel search for ever
TIMED_OUT = -1000  # no signal has that number
NOTHING_COLLECTED = (2, 3, 4, 5)  # pytest's exit codes for what says nothing about a defect


@dataclasses.dataclass(frozen=True)
class Defect:
    name: str
    file: str
    old: str
    new: str
    tests: list[str]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """passed: named tests that do not fail. error: why nothing is known, or an empty string. how: what the tests did:
    "failed"; "ended", their process; "timed out", and without the defect they take less than a third of that time."""

    defect: Defect
    caught: bool
    passed: list[str]
    error: str
    seconds: float
    how: str = "failed"

    @property
    def row(self) -> dict[str, object]:
        """Of the result file. by: the named tests that fail."""
        by = [test for test in self.defect.tests if test not in self.passed and not self.error]
        row = {"name": self.defect.name, "file": self.defect.file, "caught": self.caught, "by": by}
        return row if self.how == "failed" else row | {"how": self.how}


def defects() -> list[Defect]:
    return [Defect(**fields) for path in LISTS for fields in tomllib.loads(path.read_text())["defect"]]


def copy_of_repository(folder: Path) -> Path:
    """A copy of tracked and untracked files, laid out like an installed package, so that Python imports the copy."""
    copy = folder / "repository"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    for package in ("kernels", "autotune"):
        (copy / "sgl_flashsample" / package).symlink_to(Path("..") / package)
    return copy


def run_tests(copy: Path, tests: list[str], seconds: float | None = None) -> tuple[int, str]:
    """Exit code and output of pytest in the copy; a process that was ended, or took longer, has a negative code."""
    environment = dict(os.environ, PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "pytest", "-q", "--full", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return TIMED_OUT, "took too long"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that a test with the defect has left behind
        process.wait()
    return process.returncode, output


def failures(output: str) -> set[str]:
    """Node ids of what failed, without their messages."""
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\[\s]+(?:\[.*?\])?)?)(?: - .*)?$", output, re.MULTILINE))


def plant(copy: Path, defect: Defect) -> Outcome:
    started = time.monotonic()
    path = copy / defect.file
    text = path.read_text()
    if text.count(defect.old) != 1:
        error = f"its text occurs {text.count(defect.old)} times in {defect.file}"
        return Outcome(defect, False, [], error, 0.0)
    path.write_text(text.replace(defect.old, defect.new))
    try:
        code, output = run_tests(copy, defect.tests, SECONDS)
    finally:
        path.write_text(text)
    failed = failures(output)
    passed = [test for test in defect.tests if not any(one == test or one.startswith(test) for one in failed)]
    error, how = "", "failed"
    if code == TIMED_OUT:
        passed, how = [], "timed out"
        if run_tests(copy, defect.tests, SECONDS / 3)[0] != 0:
            error = f"its tests took more than {SECONDS} s, and without it they do not pass in a third of that"
    elif code < 0:  # the defect took the interpreter down: noticed, whatever was printed
        passed, how = [], "ended"
    elif code in NOTHING_COLLECTED and not failed:
        error = f"pytest ended with {code}: {output.strip().splitlines()[-1:]}"
    caught = not passed and not error
    return Outcome(defect, caught, passed, error, time.monotonic() - started, how)


def unsound(copy: Path, chosen: list[Defect]) -> Iterator[str]:
    """Named tests that fail without any defect."""
    tests = sorted({test for defect in chosen for test in defect.tests})
    code, output = run_tests(copy, tests)
    yield from sorted(failures(output))
    if code not in (0, 1):
        yield f"pytest ended with {code}: {output.strip()[-500:]}"


def outcomes(copies: list[Path], chosen: list[Defect]) -> Iterator[Outcome]:
    """One after the other as they end; as many at a time as there are copies."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def plant_in_a_free_copy(defect: Defect) -> Outcome:
        copy = free.get()
        try:
            return plant(copy, defect)
        finally:
            free.put(copy)

    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        for done in concurrent.futures.as_completed([pool.submit(plant_in_a_free_copy, one) for one in chosen]):
            yield done.result()


def write(file: Path, rows: list[dict[str, object]]) -> None:
    """``rows`` in the order of the lists, with those of the file that are listed and were not run now."""
    kept = json.loads(file.read_text())["defects"] if file.exists() else []
    by_name = {row["name"]: row for row in [*kept, *rows]}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "pytest")}
    env = versions | {"date": time.strftime("%Y-%m-%d"), "command": "python tests/planted/run.py"}
    listed_rows = [by_name[defect.name] for defect in defects() if defect.name in by_name]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in listed_rows)
    file.write_text(f'{{\n "env": {json.dumps(env)},\n "defects": [\n{lines}\n ]\n}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="defects whose name or file contains any of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    parser.add_argument("--sound", action="store_true", help="also run the named tests without a defect")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="defects at a time, one per core")
    arguments = parser.parse_args()
    if arguments.workers < 1:
        parser.error(f"--workers is {arguments.workers}; expected 1 or more")
    chosen = [
        defect
        for defect in defects()
        if not arguments.only or any(words in defect.name or words in defect.file for words in arguments.only)
    ]
    wrong: list[str] = []
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy_of_repository(Path(folder) / str(number)) for number in range(arguments.workers)]
        if arguments.sound:
            wrong = list(unsound(copies[0], chosen))
            for test in wrong:
                print(f"fails without a defect: {test}", flush=True)
        for outcome in outcomes(copies, chosen):
            rows.append(outcome.row)
            verdict, defect = "caught" if outcome.caught else "NOT CAUGHT", outcome.defect
            print(f"{verdict:10} {outcome.seconds:5.0f} s  {defect.file}: {defect.name}", flush=True)
            for line in [*(f"passes: {test}" for test in outcome.passed), *([outcome.error] if outcome.error else [])]:
                print(f"{'':20}{line}", flush=True)
            if arguments.json is not None:
                write(arguments.json, rows)
    caught = sum(row["caught"] is True for row in rows)
    print(f"{caught} of {len(rows)} caught")
    return 0 if caught == len(rows) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
