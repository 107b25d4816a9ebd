"""Proves the tests: plants one defect at a time into a copy of the repository, and runs the tests that must fail.

    python tests/planted/run.py [--only WORDS ...] [--changed] [--json FILE] [--jobs N]

``defects.toml`` lists the defects. A defect is caught if every test that it names passes without it, and fails with it,
ends its process or never ends. Prints one line per defect; the exit code is 1 unless all are caught.

``--json`` adds the outcomes to the file's rows of other listed defects, so that a new defect needs no new run of all.
Each row has the date and versions of its run; a defect that could not be run keeps its earlier row.
``--changed`` chooses the defects whose own lines, source file or test files are not those of their row in that file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
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
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("defects.toml")
RESULTS = ROOT / "benchmarks" / "results" / "planted-defects.json"
VERSIONS = ("torch", "triton", "pytest")
SECONDS = 150  # for the tests of one defect, which may make a kernel search for ever
TIMED_OUT = -1000  # no signal has that number
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)  # a machine without memory, or a person; no defect sends them


@dataclasses.dataclass(frozen=True)
class Defect:
    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def digest(self, root: Path) -> str:
        """A digest of the defect, its source file and its test files."""
        files = [self.file, *sorted({test.partition("::")[0] for test in self.tests})]
        texts = [repr(self), *((root / file).read_text() for file in files)]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """how: what the tests did: "failed", "ended" (their process) or "timed out"; "not run" where that is not known.
    error: why it was not caught."""

    defect: Defect
    how: str
    error: str = ""

    @property
    def row(self) -> dict[str, object]:
        """The row of the result file."""
        defect = self.defect
        row = {"name": defect.name, "file": defect.file, "caught": not self.error, "by": defect.tests}
        return row if self.how == "failed" else row | {"how": self.how}


def defects() -> list[Defect]:
    return [Defect(**fields) for fields in tomllib.loads(LIST.read_text())["defect"]]


def rows(file: Path) -> dict[str, dict[str, object]]:
    """The rows of a result file by name; none if there is no such file."""
    return {row["name"]: row for row in json.loads(file.read_text())["defects"]} if file.exists() else {}


def copy_of_repository(folder: Path) -> Path:
    """A copy of tracked and untracked files, laid out like an installed package, so that Python imports the copy."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for package in ("kernels", "autotune"):
        link = folder / "sgl_flashsample" / package
        if not link.exists():
            link.symlink_to(Path("..") / package)
    return folder


def run_tests(copy: Path, tests: list[str], seconds: float | None = None) -> tuple[int, str]:
    """Exit code and output of pytest in the copy; a process that was ended, or took longer, has a negative code."""
    environment = dict(os.environ, PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
    environment.setdefault("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "--full", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests],
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
    """Node ids of the tests that failed, without their messages."""
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\[\s]+(?:\[.*?\])?)?)(?: - .*)?$", output, re.MULTILINE))


def plant(copy: Path, defect: Defect) -> Outcome:
    path = copy / defect.file
    text = path.read_text()
    if text.count(defect.old) != 1:
        return Outcome(defect, "not run", f"its text occurs {text.count(defect.old)} times in {defect.file}")
    path.write_text(text.replace(defect.old, defect.new))
    try:
        code, output = run_tests(copy, defect.tests, SECONDS)
    finally:
        path.write_text(text)
    if code == TIMED_OUT:
        # A busy machine must not count as a catch.
        soon = run_tests(copy, defect.tests, SECONDS / 3)[0] == 0
        return Outcome(defect, "timed out", "" if soon else f"without it they take more than {SECONDS / 3:.0f} s")
    if -code in FROM_OUTSIDE:
        return Outcome(defect, "not run", f"its tests were ended by {signal.Signals(-code).name}")
    if code < 0:  # the defect took the interpreter down, whatever was printed
        return Outcome(defect, "ended")
    failed = failures(output)
    passed = [test for test in defect.tests if not any(one == test or one.startswith(f"{test}[") for one in failed)]
    if passed and code not in (0, 1):
        return Outcome(defect, "not run", f"pytest ended with {code}: {output.strip().splitlines()[-1:]}")
    return Outcome(defect, "failed", f"passes: {', '.join(passed)}" if passed else "")


def outcomes(copies: list[Path], chosen: list[Defect]) -> Iterator[Outcome]:
    """The outcomes as they come; as many defects at a time as there are copies."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def plant_in_a_free_copy(defect: Defect) -> Outcome:
        copy = free.get()
        try:
            return plant(copy, defect)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        try:
            for done in as_completed([pool.submit(plant_in_a_free_copy, one) for one in chosen]):
                yield done.result()
        finally:  # where the run is interrupted, the defects that wait are left out
            pool.shutdown(wait=False, cancel_futures=True)


def environment() -> dict[str, str]:
    """The date and the versions of a run."""
    return {"date": time.strftime("%Y-%m-%d")} | {name: importlib.metadata.version(name) for name in VERSIONS}


def write(file: Path, added: dict[str, dict[str, object]]) -> None:
    """Writes the rows of all listed defects that were ever run, in the order of the list."""
    by_name = rows(file) | added
    env = {"command": "python tests/planted/run.py"}
    listed = ",\n".join(f"  {json.dumps(by_name[one.name])}" for one in defects() if one.name in by_name)
    file.write_text(f'{{\n "env": {json.dumps(env)},\n "defects": [\n{listed}\n ]\n}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="defects whose name or file contains any of these")
    parser.add_argument("--changed", action="store_true", help="defects whose source or tests have changed")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"result file to add to, e.g. {RESULTS.name}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="defects at a time, one per core")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs is {arguments.jobs}; expected 1 or more")
    chosen = defects()
    if arguments.only:
        chosen = [one for one in chosen if any(words in one.name or words in one.file for words in arguments.only)]
    if arguments.changed:
        known = rows(arguments.json or RESULTS)
        chosen = [one for one in chosen if known.get(one.name, {}).get("digest") != one.digest(ROOT)]
    if not chosen:
        print("no defect to plant")
        return 0
    added: dict[str, dict[str, object]] = {}  # of the defects that were run
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy_of_repository(Path(folder) / str(number)) for number in range(arguments.jobs)]
        digests = {one.name: one.digest(copies[0]) for one in chosen}
        code, output = run_tests(copies[0], sorted({test for one in chosen for test in one.tests}))
        if code != 0:
            print(f"the tests must pass without a defect; pytest ended with {code}:\n{output[-2000:]}")
            return 1
        for outcome in outcomes(copies, chosen):
            name, run = outcome.defect.name, outcome.how != "not run"
            verdict = ("NOT CAUGHT" if run else "NOT RUN") if outcome.error else "caught"
            print(f"{verdict:10} {outcome.defect.file}: {name}  {outcome.error}".rstrip(), flush=True)
            if run:
                added[name] = outcome.row | {"digest": digests[name], "env": environment()}
                if arguments.json is not None:
                    write(arguments.json, added)
    caught = sum(row["caught"] is True for row in added.values())
    print(f"{caught} of {len(chosen)} caught, {len(chosen) - len(added)} not run")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
