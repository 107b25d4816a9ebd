"""Ranks that decide alike: what the first one found, and what failed on any of them.

On the group's CPU side, at start. Every rank makes the same calls in the same order, whatever happened to it: a rank
that stayed away would leave the others waiting.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """group: SGLang's ``GroupCoordinator``, or None for a rank alone, which agrees with itself."""

    def __init__(self, group: Any = None) -> None:
        self._group = group if group is not None and group.world_size > 1 else None

    @property
    def is_first(self) -> bool:
        return self._group is None or self._group.rank_in_group == 0

    def from_first(self, text: str) -> str:
        """``text`` of the first rank; the others' is ignored."""
        if self._group is None:
            return text
        data = text.encode() if self.is_first else b""
        size = self._broadcast(torch.tensor([len(data)], dtype=torch.int64))
        received = torch.zeros(int(size), dtype=torch.uint8)
        if self.is_first:
            received = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else received
        return bytes(self._broadcast(received).tolist()).decode() if len(received) else ""

    def anywhere(self, flags: list[bool]) -> list[bool]:
        """Per place, whether it is True on any rank. All ranks give equally many."""
        if self._group is None or not flags:
            return flags
        values = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group.cpu_group)
        return [bool(value) for value in values.tolist()]

    def same(self, text: str) -> bool:
        """Whether ``text`` is the same on all ranks."""
        if self._group is None:
            return True
        own = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.int32)
        first = self._broadcast(own.clone())
        return not self.anywhere([not torch.equal(own, first)])[0]

    def _broadcast(self, values: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        dist.broadcast(values, src=self._group.ranks[0], group=self._group.cpu_group)
        return values
