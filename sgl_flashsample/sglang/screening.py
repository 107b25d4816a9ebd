"""Whether a head of this server has a screen, and that it is a copy of the weights that are served.

A screen (``sgl_flashsample.screen``) draws the tokens that the head itself would, from half the bytes; a screen of
other weights would not. SGLang changes weights while it serves: ``weight_hooks.py`` tells us before and after. In
between, and wherever it is not certain that nobody has written to the head, batches are drawn without the screen.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Sequence

import torch

from ..choices import Choices
from ..kernels.head import LMHead
from ..kernels.rng import GROUP_SIZE
from ..screen import Screen, problem_of
from .counters import DeviceCounters
from .screen_guard import ScreenGuard

logger = logging.getLogger("sgl_flashsample")

SCREEN_VARIABLE = "FLASHSAMPLE_SCREEN"


class Mode(enum.StrEnum):
    """What the server was asked for."""

    AUTO = "auto"  # where a tuned table says that a screen wins
    ON = "on"  # also where the built-in choice does
    OFF = "off"


# Of the memory that the weights have left free: what a screen may take. The KV cache gets the rest of it.
MEMORY_SHARES = {Mode.AUTO: 0.05, Mode.ON: 0.5}


def asked_for() -> Mode:
    """What ``FLASHSAMPLE_SCREEN`` says."""
    text = os.environ.get(SCREEN_VARIABLE, Mode.AUTO)
    try:
        return Mode(text)
    except ValueError:
        logger.warning("flashsample: %s is %r; expected auto, on or off: auto it is", SCREEN_VARIABLE, text)
        return Mode.AUTO


def problem_for(head: LMHead, choices: Choices, mode: Mode, max_rows: int) -> str | None:
    """Why this head gets no screen, in words; None where it gets one. max_rows: of the batches to come."""
    if (problem := problem_of(head)) is not None:
        return problem
    if not wins(choices, mode, max_rows):
        return "no tuned table says that it wins here" if mode is Mode.AUTO else "it wins at no batch size here"
    return memory_problem(head, rows_of(choices, max_rows), mode)


def wins(choices: Choices, mode: Mode, max_rows: int) -> bool:
    """Whether any batch is to be screened, by what this mode trusts."""
    return choices.screens(max_rows, tuned=mode is Mode.AUTO)


def rows_of(choices: Choices, max_rows: int) -> int:
    """The largest batch that is screened."""
    return choices.screened_rows(max_rows)


def memory_problem(head: LMHead, rows: int, mode: Mode) -> str | None:
    """Why a screen of ``head`` would take too much of the memory that is free; None where it would not."""
    free = free_bytes(head.weight.device)
    needed = Screen.bytes_for(head, rows)
    allowed = int(MEMORY_SHARES[mode] * free) if free is not None else needed
    if needed <= allowed:
        return None
    return f"it takes {needed:,} bytes, more than {100 * MEMORY_SHARES[mode]:.0f} % of the {free:,} that are free"


def free_bytes(device: torch.device) -> int | None:
    """What can be allocated on ``device``; None on a CPU, where kernels are interpreted and memory is not scarce."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class HeadScreen:
    """The screen of one head for as long as that is served, through every change of its weights. It rests where it does
    not pay (``screen_guard.py``). rows: of the largest batch that is screened. interval: seconds between two looks at
    its counters."""

    def __init__(self, head: LMHead, rows: int, interval: float) -> None:
        self.rows, self._interval = rows, interval
        self.stopped = False
        copy_bytes = self._build(head).int8_head.num_bytes
        row_bytes = head.weight.shape[1] * head.weight.element_size()
        self._guard = ScreenGuard(head.vocab_size * row_bytes, copy_bytes, GROUP_SIZE * row_bytes)

    def _build(self, head: LMHead) -> Screen:
        # SGLang serves in inference mode, whose tensors could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            screen = Screen(head, self.rows)
        self._screen: Screen | None = screen
        self._counters = DeviceCounters(screen.counters, self._interval)
        self._counters.new()  # takes its pinned memory now, not in a step
        self.num_bytes = screen.num_bytes
        return screen

    def serving(self, head: LMHead) -> Screen | None:
        """The screen, if it is a copy of what ``head`` holds now and does not rest."""
        screen = self._screen
        if screen is None or self.stopped or self._guard.rests():
            return None
        return screen if screen.serves(head) else None

    @property
    def resting(self) -> bool:
        """Whether it serves nothing for a while, because it has read too much of the head."""
        return self._guard.resting

    def counted(self) -> Sequence[int]:
        """What its counters have counted since the last call, as far as that is known without waiting. Where that says
        that it does not pay, it rests from the next step on."""
        counted = self._counters.new()
        self._guard.count(counted)
        return counted

    def invalidate(self) -> None:
        """The head's weights change, or may have changed: serve nothing until ``renew``."""
        if self._screen is not None:
            self._screen.invalidate()

    def stop(self) -> None:
        """Serve nothing any more. The memory stays: launches and graphs may still read it."""
        self.stopped = True

    def free(self, head: LMHead) -> None:
        """Give the memory back, until ``renew``; waits for the device. No graph may be replayed that reads it."""
        if self._screen is not None:
            _wait(head.weight.device)
            self._screen.close()
            self._screen = None

    def renew(self, head: LMHead) -> None:
        """Copy ``head`` anew; waits for the device, before and after. Raises RuntimeError where there is no memory for
        what was freed."""
        _wait(head.weight.device)  # a step may still be under way that reads the old copy
        if self._screen is not None:
            self._screen.rebuild(head)
        elif (problem := memory_problem(head, self.rows, Mode.ON)) is not None:
            raise RuntimeError(problem)
        else:
            self._build(head)
        _wait(head.weight.device)  # and the next one runs on another stream


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
