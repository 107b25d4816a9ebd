"""Fixtures that run the command line: in the test's process, or in a new one from which packages are hidden."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from command_line import runner_of

from sgl_flashsample import cli

HIDING = """\
import os, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["HIDDEN"].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes seconds (left out by `make test-fast`)")


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty folder. Returns its exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    return runner_of(cli.main, capsys)


@pytest.fixture
def command(tmp_path_factory):
    """Runs a command in a new process. hidden: packages that this process cannot import, as if not installed."""
    folder = tmp_path_factory.mktemp("hiding")
    (folder / "sitecustomize.py").write_text(HIDING)

    def command(*arguments: object, hidden: str = "", **options) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, "-m", "sgl_flashsample.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path, "HIDDEN": hidden},
            **options,
        )

    return command
