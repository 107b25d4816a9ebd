"""A run of the tests says why some were skipped."""

from __future__ import annotations

import types
from pathlib import Path


def test_reasons_are_one_line_and_there_is_none_where_nothing_was_skipped(request):
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).resolve().parents[1] / "conftest.py"))
    reasons = ["needs a CUDA device", "exhaustive: runs with --full", "exhaustive: runs with --full"]
    reports = [types.SimpleNamespace(longrepr=("file", 7, f"Skipped: {reason}")) for reason in reasons]
    written: list[str] = []
    for skipped in ([], reports):
        conftest.pytest_terminal_summary(types.SimpleNamespace(stats={"skipped": skipped}, write_line=written.append))
    assert written == ["skipped: 2 exhaustive: runs with --full; 1 needs a CUDA device"]
