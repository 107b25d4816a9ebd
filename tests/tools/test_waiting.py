"""``waiting``: no command is silent for long."""

from __future__ import annotations

import contextlib
import io
import time

from sgl_flashsample.tools.waiting import EVERY_SECONDS, waiting


def test_a_line_comes_every_so_often_until_the_end_also_where_the_block_prints_elsewhere(capsys):
    counts = iter(range(1, 1000))
    with waiting(lambda: f"{next(counts)} kernels", seconds=0.02), contextlib.redirect_stderr(io.StringIO()):
        time.sleep(0.15)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2 and lines[:2] == ["1 kernels (0 s)", "2 kernels (0 s)"]
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_what_is_fast_prints_nothing_and_what_is_slow_is_never_silent_for_ten_seconds(capsys):
    with waiting(lambda: "slow"):
        pass
    assert capsys.readouterr().err == "" and EVERY_SECONDS < 10
