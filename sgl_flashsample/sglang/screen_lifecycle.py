"""The screen of one head for as long as a server runs: whether it is built, when it is a copy of the weights that are
served, and when it pauses because it does not pay.

A screen (``sgl_flashsample.screen``) draws the same tokens as the head from half the bytes, as long as it is a copy of
the same weights. SGLang changes weights while it serves; ``hooks.py`` announces each change before and after. In
between, batches are drawn without the screen.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ..cpu_path import draws_in_host_memory
from ..dispatch import DispatchTable
from ..files import first_line
from ..kernels.params import LMHead
from ..kernels.rng import GROUP_SIZE
from ..kernels.workspace import ScreenCounter
from ..paths import Parts
from ..screen import Screen, unsupported_head
from ..screen_race import Stopwatch, race, unsupported_race
from ..switches import SCREEN_VARIABLE, word
from .metrics import DeviceCounters

logger = logging.getLogger("sgl_flashsample")


class ScreenMode(enum.StrEnum):
    """The choice of the server's user."""

    AUTO = "auto"  # a screen where a tuned table has measured that it is faster; without a fresh one, where a race has
    ON = "on"  # also where only the built-in choice is the screened path
    OFF = "off"


NOT_MEASURED = "no batch size has measured faster with it"

# Share of the memory left free by the weights that a screen may take. The KV cache gets the rest.
MEMORY_SHARES = {ScreenMode.AUTO: 0.05, ScreenMode.ON: 0.5}

# Largest share of the head's bytes that a screen may read per block of rows, copy and rescored groups together. The
# copy of a 2-byte head is half of it; 0.15 more as groups, gathered at half the speed of a stream, take as long as 0.3:
# together less than one pass over the head. An estimate, not a measurement.
MAX_READ_SHARE = 0.65
MIN_BLOCKS = 64  # blocks of rows that one decision is made from
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 3600.0  # the pause doubles until the screen pays again


def screen_mode() -> ScreenMode:
    """The value of ``FLASHSAMPLE_SCREEN``."""
    return ScreenMode(word(SCREEN_VARIABLE))


def unsupported_screen(head: LMHead, table: DispatchTable, mode: ScreenMode, max_rows: int) -> str | None:
    """Why this head gets no screen; None where it gets one. max_rows: size of the largest batch to come."""
    if (reason := unsupported_head(head)) is not None:
        return f"the head cannot be screened: {reason}"
    if draws_in_host_memory(head.weight.device):
        return "the head is in host memory"
    if not table.screened_rows(max_rows, measured=mode is ScreenMode.AUTO):
        faster = unsupported_race(head) or NOT_MEASURED
        return faster if mode is ScreenMode.AUTO else "the screened path is the choice for no batch size here"
    return _lack_of_memory(head, table.screened_rows(max_rows), mode)


def race_screen(head: LMHead, table: DispatchTable, screen: HeadScreen, stopwatch: Callable[[], Stopwatch]) -> Any:
    """The ``screen_race.Outcome`` of a head, as values of JSON; after a failure, which is logged, why there is none.

    table: of ``candidates``, and checked. stopwatch: makes one. Waits for the device, and captures CUDA graphs: before
    SGLang captures any.
    """
    try:
        return msgspec.to_builtins(race(Parts.of(head, screen.trial()), table, stopwatch()))
    except Exception as error:  # memory, a compiler, or what else a starting server may lack
        reason = f"{type(error).__name__}: {first_line(error)}"
        logger.warning(
            "flashsample: the screen (INT8 copy of the LM head) could not be timed; built-in kernel settings are used, "
            "same tokens: %s",
            reason,
        )
        return reason


def _lack_of_memory(head: LMHead, rows: int, mode: ScreenMode) -> str | None:
    """Why a screen of ``head`` would take too much of the free memory; None where it would not."""
    return lack_of_memory(Screen.bytes_for(head, rows), head.weight.device, MEMORY_SHARES[mode])


def lack_of_memory(needed: int, device: torch.device, share: float) -> str | None:
    """Why ``needed`` bytes are more than this share of the device's free memory; None where they are not."""
    if device.type != "cuda":
        return None
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + reserved
    if needed <= int(share * free):
        return None
    return f"it takes {needed:,} bytes, more than {100 * share:.0f} % of the {free:,} free bytes"


class HeadScreen:
    """The screen of one head, through every change of its weights.

    rows: size of the largest batch that is screened. counter_seconds: time between two reads of its device counters.
    Raises ValueError for a head that cannot be screened, torch.OutOfMemoryError where there is no memory for it.
    """

    def __init__(self, head: LMHead, rows: int, counter_seconds: float) -> None:
        self.rows, self._counter_seconds = rows, counter_seconds
        self.stopped = self._pinned = False
        copy_bytes = self._build(head).int8_head.num_bytes
        row_bytes = head.weight.shape[1] * head.weight.element_size()
        self._pause = PausePolicy(head.vocab_size * row_bytes, copy_bytes, GROUP_SIZE * row_bytes)

    def _build(self, head: LMHead) -> Screen:
        # SGLang serves in inference mode, whose tensors could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            screen = Screen(head, self.rows, announces_writes=True)
        self._screen: Screen | None = screen
        self._counters = DeviceCounters(screen.counters, self._counter_seconds)
        self._counters.new()  # allocates its pinned memory now, not in a step
        self.num_bytes = screen.num_bytes
        return screen

    def trial(self) -> Screen:
        """A screen of the same copy, to be timed: what it draws is not counted here."""
        assert self._screen is not None
        return self._screen.twin()

    def fit(self, rows: int) -> None:
        """Serve batches of up to ``rows`` rows from now on, with scratch for these alone. No graph has been captured
        with the scratch so far."""
        assert self._screen is not None
        self.rows = rows
        self._screen.grow(rows)
        self.num_bytes = self._screen.num_bytes

    def serving(self, head: LMHead) -> Screen | None:
        """The screen, if it is a copy of what ``head`` holds now and is not paused."""
        screen = self._screen
        if screen is None or self.stopped or self._pause.is_paused():
            return None
        return screen if screen.serves(head) else None

    def pin(self) -> Screen:
        """A screen of the same copy, for the graphs of drafts, which are never captured anew: its memory is kept from
        now on. Reads for drafts are not counted here, and pause nothing."""
        assert self._screen is not None
        self._pinned = True
        twin = self._screen.twin()
        self.num_bytes += twin.workspace.num_bytes
        return twin

    @property
    def paused(self) -> bool:
        return self._pause.paused

    def new_counts(self) -> Sequence[int]:
        """The increase of its counters since the last call, one number per ``ScreenCounter``, as far as it is known
        without waiting. A screen that does not pay by these counts is paused from the next step on."""
        counted = self._counters.new()
        self._pause.add(counted)
        return counted

    def invalidate(self) -> None:
        """The head's weights change, or may have changed: serve nothing until ``renew``."""
        if self._screen is not None:
            self._screen.invalidate()

    def stop(self) -> None:
        """Serve nothing any more. The memory stays: launches and graphs may still read it."""
        self.stopped = True

    def free(self, head: LMHead) -> None:
        """Give the memory back, until ``renew``, unless it is pinned; waits for the device. No graph that reads it may
        be replayed."""
        if self._screen is not None and not self._pinned:
            _wait(head.weight.device)
            self._screen.close()
            self._screen = None

    def renew(self, head: LMHead) -> None:
        """Copy ``head`` anew; waits for the device, before and after. Raises RuntimeError where there is no memory for
        a screen that was freed, ValueError for a head of another shape."""
        _wait(head.weight.device)  # a step may still be under way that reads the old copy
        if self._screen is not None:
            self._screen.rebuild(head)
        elif (reason := _lack_of_memory(head, self.rows, ScreenMode.ON)) is not None:
            raise RuntimeError(reason)
        else:
            self._build(head)
        _wait(head.weight.device)  # the next step runs on another stream


class PausePolicy:
    """Pauses a screen that reads too much of the head.

    A table, or the race at the start, has found the screened path faster with made inputs. How many groups a screen
    leaves to rescore depends on the model and the traffic: hidden states with a few very large channels, or many rows
    at a high temperature, can leave so many that one pass over the head is faster. The device counts the groups.

    Each block of rows counts as one batch, which it is for almost all screened batches. Where a batch has several
    blocks, the copy is read once for all of them, and groups that several blocks want come from the cache.
    """

    def __init__(self, head_bytes: int, copy_bytes: int, group_bytes: int) -> None:
        """Bytes of the head, of its INT8 copy and of one group of ids of the head."""
        self._head_bytes, self._copy_bytes, self._group_bytes = head_bytes, copy_bytes, group_bytes
        self._blocks = self._groups = 0  # since the last decision
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._until: float | None = None  # on the monotonic clock; None while the screen serves

    @property
    def paused(self) -> bool:
        """The screen was paused at the last call of ``is_paused``."""
        return self._until is not None

    def is_paused(self) -> bool:
        """The screen must serve nothing now. Ends a pause that is over."""
        if self._until is None:
            return False
        if time.monotonic() < self._until:
            return True
        self._until = None
        return False

    def add(self, counted: Sequence[int]) -> None:
        """Decide by new counts, one number per ``ScreenCounter``."""
        if self._until is not None:
            return  # counts of the last steps before the pause
        self._blocks += counted[ScreenCounter.ROW_BLOCKS]
        self._groups += counted[ScreenCounter.GROUPS]
        if self._blocks < MIN_BLOCKS:
            return
        groups = self._groups / self._blocks
        self._blocks = self._groups = 0
        share = (self._copy_bytes + groups * self._group_bytes) / self._head_bytes
        if share <= MAX_READ_SHARE:
            self._pause_seconds = FIRST_PAUSE_SECONDS
            return
        logger.info(
            "flashsample: screen (INT8 copy of the LM head) paused for %.0f s, then tried again: for the current "
            "requests it read %.1f %% of the LM head's bytes, and it is faster only below %.0f %%; until then the "
            "fused kernel draws the same tokens without it",
            self._pause_seconds,
            100 * share,
            100 * MAX_READ_SHARE,
        )
        self._until = time.monotonic() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
