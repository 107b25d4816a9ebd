"""The list of planted defects fits the code: each replaced text and each named test exists."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import run as planted

DEFECTS = planted.defects()
RESULTS = planted.ROOT / "benchmarks" / "results" / "planted-defects.json"


# Modules of the package that decide no token, no path and no answer of a server.
ASIDE = {"__init__.py", "cli.py", "doctor.py", "model_config.py"}


def test_names_are_unique_and_there_is_one_of_every_kernel():
    names = [defect.name for defect in DEFECTS]
    assert len(set(names)) == len(names) >= 40
    kernels = {path.name for path in (planted.ROOT / "kernels").glob("*.py") if "_kernel(" in path.read_text()}
    assert kernels <= {Path(defect.file).name for defect in DEFECTS}


def test_there_is_one_of_every_module_of_the_package():
    package = planted.ROOT / "sgl_flashsample"
    modules = {path for folder in ("", "sglang", "tables") for path in (package / folder).glob("*.py")}
    wanted = {str(path.relative_to(planted.ROOT)) for path in modules if path.name not in ASIDE}
    assert wanted <= {defect.file for defect in DEFECTS}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_can_be_planted_and_names_tests_that_exist(defect):
    text = (planted.ROOT / defect.file).read_text()
    assert text.count(defect.old) == 1, f"expected once in {defect.file}"
    assert defect.new != defect.old and defect.tests
    if defect.file.endswith(".py"):
        ast.parse(text.replace(defect.old, defect.new))
    for test in defect.tests:
        file, _, function = test.partition("::")
        source = (planted.ROOT / file).read_text()
        assert f"def {function.partition('[')[0]}(" in source, test


def test_every_defect_has_been_run_and_was_caught():
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text())["defects"]}
    missing = {defect.name for defect in DEFECTS} ^ rows.keys()
    assert not missing, f"run `python tests/planted/run.py --json {RESULTS.name} --only ...` for these"
    assert all(row["caught"] for row in rows.values())


@pytest.mark.parametrize("without, caught", [(0, True), (1, False), (planted.TIMED_OUT, False)])
def test_a_time_out_counts_only_where_the_tests_pass_soon_without_the_defect(tmp_path, monkeypatch, without, caught):
    """Else a busy machine would catch everything."""
    (tmp_path / "module.py").write_text("a = 1\n")
    defect = planted.Defect("a defect", "module.py", "a = 1", "a = 2", ["tests/test_a.py::test_a"])
    runs = []

    def run_tests(copy, tests, seconds):
        runs.append(((copy / "module.py").read_text(), seconds))
        return (planted.TIMED_OUT, "took too long") if len(runs) == 1 else (without, "")

    monkeypatch.setattr(planted, "run_tests", run_tests)
    outcome = planted.plant(tmp_path, defect)
    assert runs == [("a = 2\n", planted.SECONDS), ("a = 1\n", planted.SECONDS / 3)]
    assert outcome.caught is caught and outcome.row["how"] == "timed out"


def test_failures_are_read_from_what_pytest_prints():
    printed = """
FAILED tests/a.py::test_one - AssertionError: assert [1] == [2]
FAILED tests/a.py::test_two[x - y]
ERROR tests/b.py - ImportError: cannot import name 'x'
1 failed
"""
    assert planted.failures(printed) == {"tests/a.py::test_one", "tests/a.py::test_two[x - y]", "tests/b.py"}
