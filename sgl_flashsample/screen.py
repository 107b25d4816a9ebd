"""What the screened path needs beside the head: its INT8 copy, and the scratch of its launches."""

from __future__ import annotations

import math

import torch

from .kernels.head import LMHead
from .kernels.int8_head import MOST_HIDDEN, Int8Head, ScreenWorkspace


class Screen:
    """The screen of one head: hand it to ``sample`` with every batch of that head.

    It holds half the bytes of a 2-byte head on the head's device, allocated when it is made, and takes moments to
    build. While it is not a copy of what the head holds now, it serves nothing and batches are drawn without it:
    ``invalidate`` before a weight is written to, ``rebuild`` after it. PyTorch's own writes are noticed without that;
    those through ``.data`` or by another library are not.

    max_rows: rows of the largest batch that it has scratch for. columns: of ``Int8Head``. int8_head, workspace: for
    ``screened_sample``; reused by every call on one stream. counters: ``[len(Counted)]`` int64 on the device.

    Raises ValueError for a head that the screened path cannot serve (``problem_of``) and wrong ``columns``.
    """

    _copy = Int8Head

    def __init__(self, head: LMHead, max_rows: int, columns: torch.Tensor | None = None) -> None:
        if (problem := problem_of(head)) is not None:
            raise ValueError(f"the head cannot be screened: {problem}")
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}; expected 1 or more")
        self.max_rows = max_rows
        self.int8_head = self._copy(head, columns)
        self.workspace = ScreenWorkspace(self.int8_head, max_rows)
        self.closed = False
        self._head = _described(head)
        self._valid = True

    @property
    def counters(self) -> torch.Tensor:
        return self.workspace.counters

    @property
    def num_bytes(self) -> int:
        """Device memory that this holds: the copy and the scratch."""
        held = (value for value in vars(self.workspace).values() if isinstance(value, torch.Tensor))
        return self.int8_head.num_bytes + sum(tensor.numel() * tensor.element_size() for tensor in held)

    @staticmethod
    def bytes_for(head: LMHead, max_rows: int) -> int:
        """``num_bytes`` of the screen of ``head``, without ``columns``: nothing is allocated on its device."""
        like = torch.empty(head.weight.shape, dtype=head.weight.dtype, device="meta")
        return UnwrittenScreen(LMHead(like, head.vocab_size), max_rows).num_bytes

    def serves(self, head: LMHead) -> bool:
        """Whether this is a copy of what ``head`` holds, as far as PyTorch knows. Costs a step a microsecond or two."""
        if self.closed or not self._valid:
            return False
        return self._head == _described(head) and not self.int8_head.is_stale(head) and problem_of(head) is None

    def invalidate(self) -> None:
        """Serve nothing until the next ``rebuild``."""
        self._valid = False

    def rebuild(self, head: LMHead) -> None:
        """Copy ``head`` anew, in place: captured graphs read the new copy. Raises ValueError for a head of another
        shape, dtype or device, one that cannot be screened, and a screen that was closed."""
        if self.closed:
            raise ValueError("the screen is closed; expected a new one")
        if (problem := problem_of(head)) is not None:
            raise ValueError(f"the head cannot be screened: {problem}")
        if _described(head) != self._head:
            raise ValueError(f"head is {_described(head)}; expected the screen's {self._head}")
        self._valid = False  # also where copying fails in the middle
        self.int8_head.rebuild(head)
        self._valid = True

    def close(self) -> None:
        """Serve nothing any more and let go of the memory; graphs that were captured with it must not be replayed."""
        self.closed = True
        del self.int8_head, self.workspace


class _Unwritten(Int8Head):
    """The tensors of a copy, with nothing in them."""

    def rebuild(self, head: LMHead) -> None:
        pass


class UnwrittenScreen(Screen):
    """As large as a screen of ``head``, with nothing in it: to weigh it, and to compile kernels for. It serves
    nothing."""

    _copy = _Unwritten

    def __init__(self, head: LMHead, max_rows: int) -> None:
        super().__init__(head, max_rows)
        self.invalidate()


def problem_of(head: LMHead) -> str | None:
    """Why the screened path cannot serve ``head``; None where it can."""
    if head.weight.shape[1] > MOST_HIDDEN:
        return f"its hidden size is {head.weight.shape[1]}, the bound holds up to {MOST_HIDDEN}"
    if head.logit_scale is not None and not 0 < head.logit_scale < math.inf:
        return f"its logit_scale is {head.logit_scale}, the bound needs a positive one"
    return None


def _described(head: LMHead) -> tuple[int, int, int, torch.dtype, torch.device]:
    """What of a head a copy and its scratch are made for: ids, hidden size, distance of rows, dtype, device."""
    weight = head.weight
    return head.vocab_size, weight.shape[1], weight.stride(0), weight.dtype, weight.device
