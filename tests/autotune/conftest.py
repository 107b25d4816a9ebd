"""Fixtures of the autotuner's tests."""

from __future__ import annotations

import pytest
from tune_examples import write_device

from sgl_flashsample.autotune import cli


@pytest.fixture
def simulated(tmp_path):
    """A function that writes a simulated device with these changes; its path."""
    return lambda **changes: write_device(tmp_path / "device.json", **changes)


@pytest.fixture
def command(capsys):
    """Runs a command of ``tune``; its exit code and what it printed on both streams."""

    def run(*arguments):
        try:
            code = cli.main([*map(str, arguments)])
        except SystemExit as end:  # argparse
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
