"""The needs of the screened path beside the head: its INT8 copy, and the scratch of its launches."""

from __future__ import annotations

import copy
import dataclasses
import math

import torch

from .kernels.int8_head import MAX_HIDDEN, Int8Head
from .kernels.params import LMHead
from .kernels.workspace import ScreenWorkspace


@dataclasses.dataclass
class _State:
    """The state of a copy, whoever reads it."""

    valid: bool = True
    closed: bool = False


class Screen:
    """The screen of one head: hand it to ``sample`` with every batch of that head.

    It holds half the bytes of a 2-byte head on the head's device, allocated when it is made, and takes moments to
    build. While it is not a copy of what the head holds now, it serves nothing and batches are drawn without it:
    ``invalidate`` before a weight is written to, ``rebuild`` after it. PyTorch's own writes, steps of its optimizers
    and of classes derived from them, and another weight in the head's place, are noticed without that; writes through
    ``.data``, by a replayed CUDA graph or by another library are not.

    max_rows: rows of the largest batch that it has scratch for. announces_writes: the caller invalidates before every
    write to the weight; needed for weights that were made under ``torch.inference_mode()``, whose writes PyTorch does
    not count. int8_head, workspace: for ``screened_sample``; reused by every call on one stream. counters:
    ``[len(ScreenCounter)]`` int64 on the device.

    Raises ValueError for a head that the screened path cannot serve (``unsupported_head``), and for an inference tensor
    without ``announces_writes``.
    """

    _copy = Int8Head

    def __init__(self, head: LMHead, max_rows: int, *, announces_writes: bool = False) -> None:
        if not isinstance(head, LMHead):
            raise ValueError(f"head is a {type(head).__name__}; expected an LMHead")
        head = head.current
        if (reason := unsupported_head(head)) is not None:
            raise ValueError(f"the head cannot be screened: {reason}")
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}; expected 1 or more")
        if head.weight.is_inference() and not announces_writes:
            raise ValueError(
                "the weight was made under torch.inference_mode(), which hides writes to it; "
                "expected announces_writes=True and a call of invalidate() before each write"
            )
        self.max_rows = max_rows
        self.int8_head = self._copy(head)
        self.workspace = self._new_workspace()
        self._layout = _layout_of(head)
        self._state = _State()

    def _new_workspace(self, counters: torch.Tensor | None = None) -> ScreenWorkspace:
        weight = self.int8_head.weight
        return ScreenWorkspace(self.int8_head.num_groups, weight.shape[1], self.max_rows, weight.device, counters)

    def twin(self) -> Screen:
        """A screen of the same copy, valid as long as this one, with scratch and counters of its own: what it draws is
        not counted here."""
        twin = copy.copy(self)
        twin.workspace = twin._new_workspace()
        return twin

    def grow(self, max_rows: int) -> None:
        """Make scratch for batches of up to ``max_rows`` rows, in the place of the scratch so far: graphs that were
        captured with that must not be replayed. The counters go on."""
        self.max_rows = max_rows
        self.workspace = self._new_workspace(self.counters)

    @property
    def closed(self) -> bool:
        return self._state.closed

    @property
    def counters(self) -> torch.Tensor:
        return self.workspace.operands.counters

    @property
    def num_bytes(self) -> int:
        """Device memory that this holds: the copy and the scratch."""
        return self.int8_head.num_bytes + self.workspace.num_bytes

    @staticmethod
    def bytes_for(head: LMHead, max_rows: int) -> int:
        """``num_bytes`` of the screen of ``head``: nothing is allocated on its device."""
        like = torch.empty(head.weight.shape, dtype=head.weight.dtype, device="meta")
        return UnwrittenScreen(LMHead(like, vocab_size=head.vocab_size), max_rows).num_bytes

    def serves(self, head: LMHead) -> bool:
        """True if this is a copy of what ``head`` holds, as far as PyTorch knows. Costs a step a microsecond or two."""
        if self.closed or not self._state.valid:
            return False
        return self._layout == _layout_of(head) and not self.int8_head.is_stale(head) and unsupported_head(head) is None

    def invalidate(self) -> None:
        """Serve nothing until the next ``rebuild``."""
        self._state.valid = False

    def rebuild(self, head: LMHead) -> None:
        """Copy what ``head`` holds by now, in place: captured graphs read the new copy. Raises ValueError for a head of
        another shape, dtype or device, one that cannot be screened, and a screen that was closed."""
        head = head.current
        if self.closed:
            raise ValueError("the screen is closed; expected a new one")
        if (reason := unsupported_head(head)) is not None:
            raise ValueError(f"the head cannot be screened: {reason}")
        if _layout_of(head) != self._layout:
            raise ValueError(f"head is {_layout_of(head)}; expected the screen's {self._layout}")
        self._state.valid = False  # also where copying fails in the middle
        self.int8_head.rebuild(head)
        self._state.valid = True

    def close(self) -> None:
        """Serve nothing any more and let go of the memory; graphs that were captured with it must not be replayed."""
        self._state.closed = True
        del self.int8_head, self.workspace


class _UnwrittenHead(Int8Head):
    """The tensors of a copy, allocated but not filled."""

    def rebuild(self, head: LMHead) -> None:
        pass


class UnwrittenScreen(Screen):
    """As large as a screen of ``head``, but not filled: to tell its size, and to compile kernels for. It serves
    nothing."""

    _copy = _UnwrittenHead

    def __init__(self, head: LMHead, max_rows: int) -> None:
        super().__init__(head, max_rows, announces_writes=True)
        self.invalidate()


def unsupported_head(head: LMHead) -> str | None:
    """Why the screened path cannot serve ``head``; None where it can."""
    if head.batch_invariant:
        return "it is batch-invariant, and the groups that a screen reads again take other tiles"
    if head.scale is not None:
        return f"its weight is {head.weight.dtype}, an INT8 copy is no smaller"
    if head.weight.shape[1] > MAX_HIDDEN:
        return f"its hidden size is {head.weight.shape[1]}, the bound holds up to {MAX_HIDDEN}"
    if head.logit_scale is not None and not 0 < head.logit_scale < math.inf:
        return f"its logit_scale is {head.logit_scale}, the bound needs a positive one"
    return None


def _layout_of(head: LMHead) -> tuple[int, int, int, torch.dtype, torch.device]:
    """The properties of a head that its copy and scratch are made for: ids, hidden size, distance of rows, dtype,
    device."""
    weight = head.weight
    return head.vocab_size, weight.shape[1], weight.stride(0), weight.dtype, weight.device
