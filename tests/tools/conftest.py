"""The command line in a test: in this process, or in one of its own from which packages are hidden."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
    """Runs a command in an empty folder; its exit code and what it printed on both streams."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = cli.main([*map(str, arguments)])
        except SystemExit as end:  # argparse
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def command(tmp_path_factory):
    """Runs a command in a process of its own. hidden: packages that are as if they were not installed."""
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
