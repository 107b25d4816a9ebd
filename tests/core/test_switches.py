"""``switches``: what each environment variable takes, and what is said of a value or a name that does not exist."""

from __future__ import annotations

import os

import pytest

from sgl_flashsample import switches


@pytest.fixture(autouse=True)
def a_new_process(monkeypatch):
    monkeypatch.setattr(switches, "_warned", set())
    for name in os.environ:
        if name.startswith("FLASHSAMPLE_"):
            monkeypatch.delenv(name)


def said(caplog) -> list[str]:
    return [record.message for record in caplog.records]


SWITCHES = [name for name, variable in switches.VARIABLES.items() if "yes" in variable.expected]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_on_and_off_in_every_spelling(name, caplog):
    for on in ("1", "true", "yes", "on", "True", "ON", " 1 "):
        assert switches.switch(name, {name: on}) is True, on
    for off in ("0", "false", "no", "off", "False", "OFF", "\t0"):
        assert switches.switch(name, {name: off}) is False, off
    assert not said(caplog)


@pytest.mark.parametrize("name", SWITCHES)
def test_an_empty_switch_is_one_that_is_not_set(name, caplog):
    default = switches.switch(name, {})
    assert switches.switch(name, {name: ""}) is switches.switch(name, {name: "  "}) is default
    assert not said(caplog)


@pytest.mark.parametrize(
    "name, text, default, expected",
    [
        ("REQUIRE", "maybe", False, "1, true, yes or on, or 0, false, no or off; using 0"),
        ("STEP_GRAPHS", "2", True, "1, true, yes or on, or 0, false, no or off; using 1"),
        ("SEVERAL_GPUS", "all", None, "1, true, yes or on, or 0, false, no or off; it counts as not set"),
    ],
)
def test_another_value_of_a_switch_is_one_warning_and_the_default(monkeypatch, caplog, name, text, default, expected):
    monkeypatch.setenv(f"FLASHSAMPLE_{name}", text)
    for _ in range(3):
        assert switches.switch(f"FLASHSAMPLE_{name}", os.environ) is default
    assert said(caplog) == [f"flashsample: FLASHSAMPLE_{name} is '{text}'; expected {expected}"]


@pytest.mark.parametrize(
    "name, text, word, line",
    [
        ("SCREEN", "On ", "on", None),
        ("SCREEN", "yes", "on", None),
        ("SCREEN", "0", "off", None),
        ("SCREEN", "2", "auto", "expected auto, on or off; using auto"),
        ("DRAFTS", "greedy", "greedy", None),
        ("DRAFTS", "off", "stock", None),
        ("DRAFTS", "1", "coupled", "expected coupled, greedy or stock; using coupled"),
    ],
)
def test_a_word_is_one_of_those_that_a_variable_takes_or_after_one_warning_the_default(
    monkeypatch, caplog, name, text, word, line
):
    monkeypatch.setenv(f"FLASHSAMPLE_{name}", text)
    assert switches.word(f"FLASHSAMPLE_{name}") == switches.word(f"FLASHSAMPLE_{name}") == word
    assert said(caplog) == ([] if line is None else [f"flashsample: FLASHSAMPLE_{name} is {text!r}; {line}"])


@pytest.mark.parametrize("text, seconds", [("0", 0.0), (" 0.25", 0.25), ("1e3", 1000.0), ("", 60.0)])
def test_seconds_are_a_number_of_0_or_more(monkeypatch, caplog, text, seconds):
    monkeypatch.setenv(switches.LOG_SECONDS_VARIABLE, text)
    assert switches.seconds(switches.LOG_SECONDS_VARIABLE) == seconds and not said(caplog)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "often"])
def test_seconds_that_are_no_such_number_are_one_warning_and_the_default(monkeypatch, caplog, text):
    monkeypatch.setenv(switches.LOG_SECONDS_VARIABLE, text)
    assert switches.seconds(switches.LOG_SECONDS_VARIABLE) == 60.0
    line = f"flashsample: FLASHSAMPLE_LOG_SECONDS is '{text}'; expected seconds, as a number; using 60"
    assert said(caplog) == [line]


def test_a_path_is_taken_as_it_is():
    name = switches.FILE_VARIABLE
    assert switches.text(name, {name: " a b.json"}) == " a b.json" and switches.text(name, {}) == ""


def test_a_server_is_told_of_each_value_that_it_cannot_read_once(monkeypatch, caplog):
    monkeypatch.setenv("FLASHSAMPLE_REQUIRE", "maybe")
    monkeypatch.setenv("FLASHSAMPLE_SCREEN", "2")
    switches.check()
    switches.check()
    assert [line.split()[1] for line in said(caplog)] == ["FLASHSAMPLE_SCREEN", "FLASHSAMPLE_REQUIRE"]


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("FLASHSAMPLE_TUNDE", "; did you mean FLASHSAMPLE_TUNED?"),
        ("FLASHSAMPLE_LOGSECONDS", "; did you mean FLASHSAMPLE_LOG_SECONDS?"),
        ("FLASHSAMPLE_XYZ", ""),
    ],
)
def test_a_server_is_told_of_a_name_that_does_not_exist_and_of_the_nearest_that_does(
    monkeypatch, caplog, name, nearest
):
    monkeypatch.setenv(name, "1")
    switches.check()
    assert said(caplog) == [f"flashsample: {name} is not a variable of this package{nearest}"]


def test_the_variable_that_the_plugin_sets_for_its_processes_is_known_and_never_suggested(monkeypatch, caplog):
    monkeypatch.setenv("FLASHSAMPLE_REQUESTED", "1")
    switches.check()
    assert not said(caplog)
    monkeypatch.setenv("FLASHSAMPLE_REQUESTE", "1")
    switches.check()
    assert said(caplog) == [
        "flashsample: FLASHSAMPLE_REQUESTE is not a variable of this package; did you mean FLASHSAMPLE_REQUIRE?"
    ]
