"""Ctrl-C while kernels are compiled ahead: what was not begun is dropped, and a compiler that runs ends by itself."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import triton

from sgl_flashsample.selfcheck import _dropped_when_interrupted, _leave_signals_to_others


def test_what_waits_is_dropped_by_an_interrupt():
    begun, over = threading.Event(), threading.Event()

    def first() -> bool:
        begun.set()
        return over.wait(60)

    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(first)
        assert begun.wait(60)
        other = pool.submit(pytest.fail, "it was begun")
        with pytest.raises(KeyboardInterrupt), _dropped_when_interrupted(pool):
            raise KeyboardInterrupt
        over.set()
        assert one.result() and other.cancelled()


def test_an_interrupt_waits_for_what_compiles_and_for_nothing_else():
    begun, over, done = threading.Event(), threading.Event(), []

    def compiles(name: str) -> None:
        begun.set()
        assert over.wait(30)
        done.append(name)

    def interrupted() -> None:
        with (
            contextlib.suppress(KeyboardInterrupt),
            ThreadPoolExecutor(1) as pool,
            triton.AsyncCompileMode(pool) as mode,
            _dropped_when_interrupted(pool, mode),
        ):
            for name in ("first", "second"):
                mode.submit(name, functools.partial(compiles, name), lambda kernel: kernel)
            assert begun.wait(30)
            threading.Timer(0.2, over.set).start()
            raise KeyboardInterrupt

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and done == ["first"]


@pytest.mark.parametrize("signal", ["INT", "TERM", "HUP"])
def test_a_signal_to_all_processes_of_a_terminal_does_not_end_a_compiler(signal):
    with ThreadPoolExecutor(1, initializer=_leave_signals_to_others) as pool:
        command = ["sh", "-c", f"kill -{signal} $$; echo compiled"]
        done = pool.submit(subprocess.run, command, capture_output=True, text=True).result()
    assert (done.returncode, done.stdout) == (0, "compiled\n")
