"""Fixtures of the autotuner's tests."""

from __future__ import annotations

import contextlib

import pytest
from command_line import runner_of
from lab.simulated import measuring_on
from tune_examples import write_device

from sgl_flashsample import cli


@pytest.fixture
def simulated(tmp_path):
    """A function that writes the file of a simulated device with the given changes, and returns its path."""
    return lambda **changes: write_device(tmp_path / "device.json", **changes)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Lines are not wrapped."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture
def command(capsys):
    """Runs a command of ``tune``. device: the file of a simulated device to measure on. Returns its exit code, standard
    output and standard error."""
    run = runner_of(lambda arguments: cli.main(["tune", *arguments]), capsys)

    def command(*arguments: object, device: str | None = None) -> tuple[int, str, str]:
        with measuring_on(device) if device is not None else contextlib.nullcontext():
            return run(*arguments)

    return command
