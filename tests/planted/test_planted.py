"""The list of planted defects fits the code: each replaced text and each named test exists."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import run as planted
import torch

# Modules of the package that decide no token, no path and no answer of a server.
ASIDE = {"__init__.py", "model_config.py"}


@functools.cache
def text_of(file: str) -> str:
    path = planted.ROOT / file
    return path.read_text() if path.is_file() else ""


@functools.cache
def functions_of(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(text_of(file))) if isinstance(node, ast.FunctionDef)}


def faults_of(defect: planted.Defect) -> Iterator[str]:
    text = text_of(defect.file)
    if text.count(defect.old) != 1:
        yield f"its text occurs {text.count(defect.old)} times in {defect.file}"
    elif defect.file.endswith(".py"):
        try:
            ast.parse(text.replace(defect.old, defect.new))
        except SyntaxError as error:
            yield f"with it, {defect.file} is no Python: {error}"
    if defect.new == defect.old:
        yield "it changes nothing"
    if not defect.tests:
        yield "it names no test"
    for test in defect.tests:
        file, _, function = test.partition("::")
        if function.partition("[")[0] not in functions_of(file):
            yield f"there is no {test}"


def files_without_a_defect() -> set[str]:
    """Files with kernels, and modules of the package but those aside, that no defect is planted in."""
    kernels = {path for path in (planted.ROOT / "kernels").glob("*.py") if "_kernel(" in path.read_text()}
    package = planted.ROOT / "sgl_flashsample"
    modules = {path for folder in ("", "sglang", "tables") for path in (package / folder).glob("*.py")}
    wanted = kernels | {path for path in modules if path.name not in ASIDE}
    return {path.relative_to(planted.ROOT).as_posix() for path in wanted} - {one.file for one in planted.defects()}


def test_every_defect_can_be_planted_and_names_tests_that_exist():
    listed = planted.defects()
    faults = [f"{defect.name}: {fault}" for defect in listed for fault in faults_of(defect)]
    faults += [f"{name}: {n} defects" for name, n in Counter(one.name for one in listed).items() if n > 1]
    faults += [f"no defect in {file}" for file in sorted(files_without_a_defect())]
    assert not faults, "\n".join(faults)


def test_every_defect_has_been_run_and_was_caught():
    rows = planted.rows(planted.RESULTS)
    missing = {defect.name for defect in planted.defects()} ^ rows.keys()
    assert not missing, f"run `python tests/planted/run.py --changed --json {planted.RESULTS.name}` for these"
    assert all(row["caught"] for row in rows.values())
    assert [name for name, row in rows.items() if row["env"].keys() != {"date", *planted.VERSIONS}] == []


@pytest.fixture
def defect(tmp_path) -> planted.Defect:
    """A defect of ``tmp_path``."""
    (tmp_path / "module.py").write_text("a = 1\n")
    return planted.Defect("a defect", "module.py", "a = 1", "a = 2", ["tests/test_a.py::test_a"])


@pytest.mark.parametrize("without, caught", [(0, True), (1, False), (planted.TIMED_OUT, False)])
def test_a_time_out_counts_only_where_the_tests_pass_soon_without_the_defect(
    tmp_path, monkeypatch, defect, without, caught
):
    """A busy machine must not count as a catch."""
    runs = []

    def run_tests(copy, tests, seconds):
        runs.append(((copy / "module.py").read_text(), seconds))
        return (planted.TIMED_OUT, "took too long") if len(runs) == 1 else (without, "")

    monkeypatch.setattr(planted, "run_tests", run_tests)
    outcome = planted.plant(tmp_path, defect)
    assert runs == [("a = 2\n", planted.SECONDS), ("a = 1\n", planted.SECONDS / 3)]
    assert (outcome.how, not outcome.error) == ("timed out", caught)


@pytest.mark.parametrize(
    "ended, how", [("SIGSEGV", "ended"), ("SIGABRT", "ended"), ("SIGKILL", "not run"), ("SIGTERM", "not run")]
)
def test_a_process_that_another_one_ends_has_caught_nothing(tmp_path, monkeypatch, defect, ended, how):
    """A machine without memory kills."""
    monkeypatch.setattr(planted, "run_tests", lambda copy, tests, seconds: (-signal.Signals[ended], ""))
    outcome = planted.plant(tmp_path, defect)
    assert outcome.how == how and outcome.error == ("" if how == "ended" else f"its tests were ended by {ended}")


def test_each_row_of_the_result_file_has_the_date_and_versions_of_its_run(tmp_path, monkeypatch, defect, capsys):
    """A defect that could not be run keeps its earlier row, and the run fails."""
    other = dataclasses.replace(defect, name="another")
    monkeypatch.setattr(planted, "defects", lambda: [defect, other])
    monkeypatch.setattr(planted, "run_tests", lambda copy, tests, seconds=None: (0, ""))
    monkeypatch.setattr(planted, "copy_of_repository", lambda folder: tmp_path)
    monkeypatch.setattr(planted.Defect, "digest", lambda self, root: "digest")
    old, file = {"name": "a defect", "env": {"date": "2000-01-01"}}, tmp_path / "result.json"
    file.write_text(json.dumps({"defects": [old]}))
    monkeypatch.setattr(sys, "argv", ["run.py", "--json", str(file), "--jobs", "1"])
    how = {"a defect": "not run", "another": "failed"}
    monkeypatch.setattr(
        planted,
        "plant",
        lambda copy, one: planted.Outcome(one, how[one.name], "" if how[one.name] == "failed" else "why"),
    )
    assert planted.main() == 1
    assert "1 of 2 caught, 1 not run" in capsys.readouterr().out
    rows = planted.rows(file)
    assert rows["a defect"] == old and rows["another"]["env"] == planted.environment()
    assert planted.environment()["torch"] == torch.__version__


def test_failures_are_read_from_what_pytest_prints():
    printed = """
FAILED tests/a.py::test_one - AssertionError: assert [1] == [2]
FAILED tests/a.py::test_two[x - y]
ERROR tests/b.py - ImportError: cannot import name 'x'
1 failed
"""
    assert planted.failures(printed) == {"tests/a.py::test_one", "tests/a.py::test_two[x - y]", "tests/b.py"}
