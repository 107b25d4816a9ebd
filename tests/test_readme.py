"""The README says what is so: its numbers are those of the committed results, its commands exist."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


def test_its_result_tables_are_those_of_the_result_files():
    import tables

    text = (ROOT / "README.md").read_text()
    assert tables.filled(text) == text, "run `python benchmarks/tables.py --write`"


def test_its_commands_are_targets_of_the_makefile_and_the_test_command_is_what_ci_runs():
    text, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "lint"):
        assert f"make {target}" in text
        assert f"\n{target}:" in makefile
        assert f"make {target}" in (ROOT / ".ci" / "run").read_text()


def test_it_names_every_reason_and_every_environment_variable_that_the_code_knows():
    import re

    text = (ROOT / "README.md").read_text()
    sources = [path.read_text() for path in (ROOT / "sgl_flashsample").rglob("*.py")]
    variables = {name for source in sources for name in re.findall(r"\bFLASHSAMPLE_[A-Z_]+\b", source)}
    for name in variables - {"FLASHSAMPLE_REQUESTED"}:  # set by the plugin for its own child processes
        assert name in text, name
