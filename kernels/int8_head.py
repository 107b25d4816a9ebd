"""The INT8 copy of an LM head that the screened path reads, and how far it is from the head.

For a row ``w`` of the head, its copy ``s q`` (int8 ``q``, one scale ``s``), a hidden state ``h`` and its fixed-point
``k`` (``screen.py``), Cauchy and Schwarz give

    |<w, h> - <s q, k>|  =  |<w - s q, h> + <s q, h - k>|  <=  |w - s q| |h| + |s q| |h - k|

The kernels do not have these products but their float32 results. So every row has, rounded up,

    norm   = |s q|
    error  = (|w - s q| + a D |w| + c |s q|) (1 + m)

and ``error |h| + norm |h - k| + TINY`` bounds |fused pass's dot product - screen's| (``error_bound``).

a: the fused pass's accumulation in float32. A tensor core adds K products to the sum so far at once; each of these is
    cut off at 2**-23 of the largest, and so is the result: (K + 2) / K * 2**-23 per product, of what no partial sum
    exceeds, |w| |h|. The smallest K known is 4 (Fasi et al., PeerJ CS 2021: truncation, blocks of 4 and 8; newer
    devices have larger blocks and more bits): a = 1.5 * 2**-23. A chain of fused multiply-adds errs by a third of it.
c: the screen's own float32: two integers rounded to it, |256 hi| + |lo| <= 3 |k|, and added, two products with scales,
    and the bound added: each 2**-24 of its result, below 12 * 2**-24 |s q| |k| in all, where |k| <= 2 |h|.
    c = 2**-19 is more than that.
m: the bound's products and sums are float32 themselves, 3 * 2**-24 of it: m = 2**-20.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import GROUP_SIZE, ScreenConfig, cdiv
from .params import LMHead, descriptor

ACCUMULATION = 1.5 * 2.0**-23  # a
SCREEN_ROUNDING = 2.0**-19  # c
BOUND_ROUNDING = 2.0**-20  # m
MIN_SCALE = 2.0**-100  # keeps scales and their reciprocals normal numbers: smaller rows count as error alone
MAX_HIDDEN = 2**15  # D, so that sums of D squares and of D products of int8 keep their promises
TINY = tl.constexpr(MIN_SCALE)  # above all that underflows in the bound's own products

_CLIPS = (1.0, 0.9, 0.8, 0.7)  # shares of a row's largest value that its scale may reach: the best of them is taken
_ALIGNMENT = 16  # bytes that a tensor descriptor's rows are multiples of
_BUILD_ELEMENTS = 2**22  # elements of the head per step: building needs a few float64 copies of so many besides


class Int8Operands(NamedTuple):
    """Per row of the head, float32: the scale of its copy, and ``error`` and ``norm`` as above."""

    scale: Any
    error: Any
    norm: Any


class Int8Head:
    """An INT8 copy of ``head``: half the bytes of a 2-byte head, and 12 bytes per row.

    weight: ``[V, D rounded up to 16]`` int8. operands: ``[V]`` float32 each; error and norm are +inf for a row that is
    not finite.

    Raises ValueError for a hidden size beyond ``MAX_HIDDEN``.
    """

    def __init__(self, head: LMHead) -> None:
        rows, width = head.vocab_size, head.weight.shape[1]
        device = head.weight.device
        if width > MAX_HIDDEN:
            raise ValueError(f"weight has {width} columns; expected {MAX_HIDDEN} or fewer")
        with torch.inference_mode(False):  # else ``rebuild`` could not write to them outside of that mode
            self.weight = torch.zeros(rows, cdiv(width, _ALIGNMENT) * _ALIGNMENT, dtype=torch.int8, device=device)
            self.operands = Int8Operands(*(torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3)))
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}
        self.rebuild(head)

    def rebuild(self, head: LMHead) -> None:
        """Copy ``head`` anew, in place: after its weight has changed. Captured graphs read the new copy."""
        self.check(head)
        width = head.weight.shape[1]
        rows = max(1, _BUILD_ELEMENTS // width)
        for first in range(0, head.vocab_size, rows):
            block = slice(first, min(first + rows, head.vocab_size))
            exact = head.weight.detach()[block].double()
            quantised, scale, error, norm = _quantise_rows(exact)
            error += ACCUMULATION * width * exact.norm(dim=1) + SCREEN_ROUNDING * norm
            self.weight[block, :width] = quantised
            self.operands.scale[block] = scale
            self.operands.error[block] = _rounded_up(error * (1 + BOUND_ROUNDING))
            self.operands.norm[block] = _rounded_up(norm)
        self._built_from = _WeightState(head.weight)

    def is_stale(self, head: LMHead) -> bool:
        """Whether ``head`` is known to be another than this was built from: another tensor, or written to since.

        Writes through ``.data``, by a replayed CUDA graph or by another library leave no trace, nor does any write to a
        tensor that was made under ``torch.inference_mode()``, optimizers' steps apart: whoever updates weights that way
        rebuilds.
        """
        return not self._built_from.is_of(head.weight)

    @property
    def num_groups(self) -> int:
        return cdiv(self.weight.shape[0], GROUP_SIZE)

    @property
    def num_bytes(self) -> int:
        """Device memory that this holds."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.weight, *self.operands))

    def check(self, head: LMHead) -> None:
        """Raise ValueError unless this can be a copy of ``head``."""
        head.check_not_quantised()
        rows, width = self.weight.shape
        wanted = (head.vocab_size, cdiv(head.weight.shape[1], _ALIGNMENT) * _ALIGNMENT)
        if (rows, width) != wanted or self.weight.device != head.weight.device:
            raise ValueError(
                f"int8_head is ({rows}, {width}) on {self.weight.device}; expected {wanted} on {head.weight.device}"
            )

    def weight_operand(self, config: ScreenConfig) -> torch.Tensor | TensorDescriptor:
        """The kernel's argument for the copy: a descriptor of the config's blocks, or the tensor."""
        if not config.tma:
            return self.weight
        return descriptor(self._descriptors, self.weight, (config.block_v, config.block_d))


class _WeightState:
    """The memory of a weight, PyTorch's count of the writes to it, and whether an optimizer has made a step since.
    Keeps no memory alive.

    An address and a count of writes are not enough: a freed weight's successor often has both. The weak reference keeps
    the identity of the storage, not its memory, from being used again. Fused optimizers do not count their writes.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._storage = StorageWeakRef(weight.untyped_storage())
        self._address, self._version = weight.data_ptr(), _version_of(weight)
        self._stepped = False
        _watch_optimizers()
        with _states_lock:
            _states.add(self)

    def note_step(self, storages: set[int]) -> None:
        """An optimizer makes a step, with parameters in these storages."""
        self._stepped |= self._storage.cdata in storages

    def __deepcopy__(self, memo: dict[int, Any]) -> _WeightState:
        """The same: a copy of ``StorageWeakRef`` would let go of a count that it never took."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, the state of no weight: the weight of another process is another one."""
        return _WeightState, (torch.empty(0),)

    def is_of(self, weight: torch.Tensor) -> bool:
        if self._stepped or weight.data_ptr() != self._address or _version_of(weight) != self._version:
            return False
        return weight.untyped_storage()._cdata == self._storage.cdata


_states: weakref.WeakSet[_WeightState] = weakref.WeakSet()
_states_lock = threading.Lock()  # a set that grows cannot be iterated over


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_note_step)  # a step that fails has written, too
    register_optimizer_step_post_hook(_note_step)  # a copy may be built in the step's closure


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    """Tell all states which storages ``optimizer`` writes to: those of any view of them count."""
    with _states_lock:
        states = list(_states)
    if not states:
        return
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    written = (one for one in parameters if one.requires_grad or one.grad is not None)  # the others are frozen
    local = (one.to_local() if hasattr(one, "to_local") else one for one in written)  # of a DTensor
    storages = {one.untyped_storage()._cdata for one in local if one.layout is torch.strided}
    for state in states:
        state.note_step(storages)


def _version_of(weight: torch.Tensor) -> int | None:
    return None if weight.is_inference() else weight._version


def _quantise_rows(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """int8 rows, float32 scales, and ``|w - s q|`` and ``|s q|`` of each, of ``[N, D]`` float64 rows.

    Sums are float64: their rounding is far below that of the float32 that their results are rounded up to.
    """
    largest = exact.abs().amax(dim=1)
    best: tuple[torch.Tensor, ...] | None = None
    for clip in _CLIPS:
        scale = (largest * (clip / 127)).clamp(min=MIN_SCALE).float()
        steps = (exact / scale.double()[:, None]).round_().clamp_(-127, 127)
        copied = steps * scale.double()[:, None]
        candidate = (steps.to(torch.int8), scale, (exact - copied).norm(dim=1), copied.norm(dim=1))
        if best is None:
            best = candidate
        else:
            better = candidate[2] < best[2]
            best = tuple(
                torch.where(better.view(-1, *[1] * (new.dim() - 1)), new, old)
                for new, old in zip(candidate, best, strict=True)
            )
    assert best is not None
    steps, scale, error, norm = best
    finite = torch.isfinite(error) & torch.isfinite(scale)
    infinite = torch.full_like(error, float("inf"))
    return (
        torch.where(finite[:, None], steps, torch.zeros_like(steps)),
        torch.where(finite, scale, torch.zeros_like(scale)),
        torch.where(finite, error, infinite),
        torch.where(finite, norm, infinite),
    )


def _rounded_up(values: torch.Tensor) -> torch.Tensor:
    """float64 to float32, none smaller; +inf where there is no number."""
    values = values.nan_to_num(nan=float("inf"), posinf=float("inf"))
    rounded = values.float()
    above = torch.nextafter(rounded, torch.full_like(rounded, float("inf")))
    return torch.where(rounded.double() < values, above, rounded) + MIN_SCALE


@triton.jit
def error_bound(error, norm, hidden_norm, hidden_error):
    """``[BLOCK_V, BLOCK_B]``: the largest distance between the fused pass's dot products and the screen's. +inf or NaN
    where nothing is known."""
    return error[:, None] * hidden_norm[None, :] + (norm[:, None] * hidden_error[None, :] + TINY)
