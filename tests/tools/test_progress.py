"""``Progress``: what a long measurement shows of itself, in a terminal and elsewhere."""

from __future__ import annotations

import time
import types

import pytest

from sgl_flashsample.tools import progress
from sgl_flashsample.tools.progress import LINE_SECONDS, Progress


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_a_line_says_what_is_done_what_is_known_and_how_much_time_is_left(clock):
    shown = Progress(seconds=200.0, total=9)
    shown.begin("starting stock")
    clock[0] += 7
    assert shown.line == "starting stock for 7 s; 0 of 9 decided, at most 3 min left"
    shown.begin("t1, batch 8", "no pair yet")
    clock[0] += 150
    assert shown.line == "t1, batch 8 for 150 s, no pair yet; 0 of 9 decided, at most 43 s left"
    shown.know("-4.1 ± 2.3 %")
    shown.decided(3, 8)
    clock[0] += 60
    assert shown.line == "t1, batch 8 for 210 s, -4.1 ± 2.3 %; 3 of 8 decided, at most 0 s left"
    assert (shown.elapsed, shown.left) == (217.0, -17.0)


def test_without_a_terminal_a_line_comes_when_nothing_was_said_for_a_while(clock, capsys):
    shown = Progress(seconds=600.0, total=1)
    shown.begin("starting stock")
    shown._show_once()
    assert capsys.readouterr().out == ""
    for _ in range(2):
        clock[0] += LINE_SECONDS
        shown._show_once()
        shown._show_once()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "  starting stock for 20 s; 0 of 1 decided, at most 10 min left",
        "  starting stock for 40 s; 0 of 1 decided, at most 9 min left",
    ]


def test_lines_that_nobody_reads_do_not_end_it(clock, monkeypatch):
    def gone(line):
        raise BrokenPipeError

    shown = Progress(seconds=600.0, total=1)
    monkeypatch.setattr(shown, "say", gone)
    clock[0] += LINE_SECONDS
    shown._show_once()


def test_in_a_terminal_the_bar_says_it(clock):
    shown, drawn = Progress(seconds=60.0, total=1), []
    shown._bar = types.SimpleNamespace(disable=False, set_description_str=drawn.append)
    shown.begin("starting stock")
    shown._show_once()
    assert drawn == [shown.line]


def test_it_is_shown_each_second_until_the_end(monkeypatch):
    shown, times = Progress(seconds=60.0, total=1), []
    monkeypatch.setattr(shown._over, "wait", lambda seconds: shown._over.is_set() or time.sleep(0.001))
    monkeypatch.setattr(shown, "_show_once", lambda: times.append(1))
    with shown.shown():
        while len(times) < 3:
            time.sleep(0.001)
    count = len(times)
    time.sleep(0.01)
    assert len(times) == count
