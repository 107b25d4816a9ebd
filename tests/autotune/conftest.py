"""Fixtures of the autotuner's tests."""

from __future__ import annotations

import pytest
from command_line import runner_of
from tune_examples import write_device

from sgl_flashsample import cli


@pytest.fixture
def simulated(tmp_path):
    """A function that writes the file of a simulated device with the given changes, and returns its path."""
    return lambda **changes: write_device(tmp_path / "device.json", **changes)


@pytest.fixture
def command(capsys):
    """Runs a command of ``tune``. Returns its exit code, standard output and standard error."""
    return runner_of(lambda arguments: cli.main(["tune", *arguments]), capsys)
