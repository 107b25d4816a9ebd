"""How tests run: in which order, on how many threads, and why some were skipped."""

from __future__ import annotations

import itertools
import os
import types
from pathlib import Path

import pytest
import torch


@pytest.fixture
def conftest(request):
    return request.config.pluginmanager.get_plugin(str(Path(__file__).resolve().parents[1] / "conftest.py"))


@pytest.mark.parametrize("given, used", [("no", ("loadgroup", False)), ("worksteal", ("worksteal", True))])
def test_workers_keep_groups_together_unless_another_scheduler_is_named(conftest, given, used):
    option = types.SimpleNamespace(numprocesses=8, dist=given, loadscopereorder=True)
    conftest.pytest_cmdline_main(types.SimpleNamespace(option=option))
    assert (option.dist, option.loadscopereorder) == used


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="runs in a worker of pytest-xdist")
def test_workers_share_the_cores():
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    assert torch.get_num_threads() * workers <= max(workers, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_on_a_gpu_neighbours_are_of_different_files_behind_those_that_take_long(conftest, monkeypatch, on_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    named = [(name, number, set()) for name in ("a.py", "b.py", "c.py", "d.py") for number in range(50)]
    named += [("e.py", 0, {"slow"}), ("f.py", 0, {"server"}), ("test_server.py", 0, {"server"})]
    items = [
        types.SimpleNamespace(path=Path(name), nodeid=f"{name}::{number}", keywords=words, add_marker=lambda mark: None)
        for name, number, words in named
    ]
    conftest.pytest_collection_modifyitems(types.SimpleNamespace(getoption=lambda name: False), items)
    files = [item.path.name for item in items]
    assert files[:2] == ["test_server.py", "f.py"] and files.index("e.py") == (2 if on_gpu else 202)
    changes = sum(one != other for one, other in itertools.pairwise(files))
    assert changes > 100 if on_gpu else changes < 9


def test_reasons_are_one_line_and_there_is_none_where_nothing_was_skipped(conftest):
    reasons = ["needs a CUDA device", "exhaustive: runs with --full", "exhaustive: runs with --full"]
    reports = [types.SimpleNamespace(longrepr=("file", 7, f"Skipped: {reason}")) for reason in reasons]
    written: list[str] = []
    for skipped in ([], reports):
        conftest.pytest_terminal_summary(types.SimpleNamespace(stats={"skipped": skipped}, write_line=written.append))
    assert written == ["skipped: 2 exhaustive: runs with --full; 1 needs a CUDA device"]
