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
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_rest_is_guessed_at_first_and_then_measured(clock):
    shown = Progress(sample_seconds=2.0)
    shown.expect(starts=2, samples=10)
    shown.begin("starting stock")
    clock[0] += 7
    assert shown.line == "starting stock for 7 s; 0 of 10 samples, about 2 min left", "two minutes and 20 s"
    shown.has_started(20.0)
    assert shown.line.endswith("0 of 10 samples, about 40 s left")
    shown.has_started(20.0)
    shown.begin("t1, batch 8")
    clock[0] += 5
    shown.step()
    assert shown.line == "t1, batch 8 for 5 s; 1 of 10 samples, about 45 s left"


def test_without_a_terminal_a_line_comes_when_nothing_was_said_for_a_while(clock, capsys):
    shown = Progress(sample_seconds=2.0)
    shown.begin("starting stock")
    shown._show_once()
    assert capsys.readouterr().out == ""
    for _ in range(2):
        clock[0] += LINE_SECONDS
        shown._show_once()
        shown._show_once()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"  starting stock for {n} s; 0 of 0 samples, about 0 s left" for n in (30, 60)]


def test_in_a_terminal_the_bar_says_it(clock):
    shown, drawn = Progress(sample_seconds=2.0), []
    shown._bar = types.SimpleNamespace(disable=False, set_description_str=drawn.append)
    shown.begin("starting stock")
    shown._show_once()
    assert drawn == [shown.line]


def test_it_is_shown_each_second_until_the_end(monkeypatch):
    shown, times = Progress(sample_seconds=2.0), []
    monkeypatch.setattr(shown._over, "wait", lambda seconds: shown._over.is_set() or time.sleep(0.001))
    monkeypatch.setattr(shown, "_show_once", lambda: times.append(1))
    with shown.shown():
        while len(times) < 3:
            time.sleep(0.001)
    count = len(times)
    time.sleep(0.01)
    assert len(times) == count
