"""Whether a screen still pays with what is served: where it reads too much of the head, it rests.

A tuned table has found the screened path faster with inputs of its own. How many groups a screen leaves to rescore
depends on the model and on the traffic: hidden states with a few very large channels, or many cold rows, can leave so
many that one pass over the head is faster. The device counts the groups, and this looks at what has been counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ..kernels.int8_head import Counted

logger = logging.getLogger("sgl_flashsample")

# Of the bytes of the head: what a screen may read, per block of rows, its copy and the rescored groups together.
# Half the head is the copy of a 2-byte head; .15 more of it as groups, if gathering has half the speed of a stream,
# take as long as .3 of it: together less than the whole head. An estimate, not a measurement.
MOST_READ = 0.65
LEAST_BLOCKS = 64  # of rows, that a decision is made from
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 60.0, 3600.0  # twice as long each time, until the screen pays again


class ScreenGuard:
    """For one screen. head_bytes, copy_bytes, group_bytes: of the head, its copy, and one group of ids of the head.

    A block of rows stands for a batch, as it is for almost all that are screened. Where a batch has several, the copy
    is read once and not once per block, and the groups that several want come from the cache.
    """

    def __init__(self, head_bytes: int, copy_bytes: int, group_bytes: int) -> None:
        self._head_bytes, self._copy_bytes, self._group_bytes = head_bytes, copy_bytes, group_bytes
        self._blocks = self._groups = 0  # since the last decision
        self._rest_seconds = FIRST_REST_SECONDS
        self._until: float | None = None  # on the monotonic clock; None while the screen serves

    @property
    def resting(self) -> bool:
        """Whether the screen rested when it was last asked for."""
        return self._until is not None

    def rests(self) -> bool:
        """Whether the screen is to serve nothing now. Ends a rest that is over. Asked in every step."""
        if self._until is None:
            return False
        if time.monotonic() < self._until:
            return True
        self._until = None
        return False

    def count(self, counted: Sequence[int]) -> None:
        """Decide by what has newly been counted, one number for each member of ``Counted``."""
        if self._until is not None:
            return  # the last steps before the rest
        self._blocks += counted[Counted.BATCHES]
        self._groups += counted[Counted.GROUPS]
        if self._blocks < LEAST_BLOCKS:
            return
        groups = self._groups / self._blocks
        self._blocks = self._groups = 0
        read = (self._copy_bytes + groups * self._group_bytes) / self._head_bytes
        if read <= MOST_READ:
            self._rest_seconds = FIRST_REST_SECONDS
            return
        logger.info(
            "flashsample: screen rests for %.0f s, batches are drawn without it: %.1f groups per batch are read from "
            "the LM head, %.1f %% of its bytes with the copy's; a screen is to read %.0f %% or less",
            self._rest_seconds,
            groups,
            100 * read,
            100 * MOST_READ,
        )
        self._until = time.monotonic() + self._rest_seconds
        self._rest_seconds = min(2 * self._rest_seconds, LONGEST_REST_SECONDS)
