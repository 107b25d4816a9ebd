"""The INT8 copy of an LM head that the screened path reads, how far it is from the head, and the scratch of that path.

For a row ``w`` of the head, its copy ``s q`` (int8 ``q``, one scale ``s``), a hidden state ``h`` and its fixed-point
``k`` (``quantize_hidden.py``), Cauchy and Schwarz give

    |<w, h> - <s q, k>|  =  |<w - s q, h> + <s q, h - k>|  <=  |w - s q| |h| + |s q| |h - k|

What the kernels have is not these products but their float32 results. So, of every row and rounded up,

    norm   = |s q|
    error  = (|w - s q| + a D |w| + c |s q|) (1 + m)

and ``room = error |h| + norm |h - k| + TINY`` bounds |fused pass's dot product - screen's| (``room_of``).

a: the fused pass's accumulation in float32. A tensor core adds K products to the sum so far at once; each of these is
    cut off at 2**-23 of the largest, and so is the result: (K + 2) / K * 2**-23 per product, of what no partial sum
    exceeds, |w| |h|. The smallest K known is 4 (Fasi et al., PeerJ CS 2021: truncation, blocks of 4 and 8; newer
    devices have larger blocks and more bits): a = 1.5 * 2**-23. A chain of fused multiply-adds errs by a third of it.
c: the screen's own float32: two integers rounded to it, |256 hi| + |lo| <= 3 |k|, and added, two products with scales,
    and the room added: each 2**-24 of its result, below 12 * 2**-24 |s q| |k| in all, where |k| <= 2 |h|.
    c = 2**-19 is more than that.
m: the room's products and sums are float32 themselves, 3 * 2**-24 of it: m = 2**-20.
"""

from __future__ import annotations

import enum
import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import rng
from .head import LMHead
from .integers import cdiv
from .tiles import LEAST_CHUNK, MOST_BLOCK_B, MOST_TERMS, ScreenConfig

ACCUMULATION = 1.5 * 2.0**-23  # a
SCREEN_ROUNDING = 2.0**-19  # c
ROOM_ROUNDING = 2.0**-20  # m
LEAST_SCALE = 2.0**-100  # keeps scales and their reciprocals normal numbers: smaller rows count as error alone
ID_ROWS = 16  # of the largest batch in which ids of truncated rows are looked at one by one: each takes 2 bytes per id
MOST_HIDDEN = 2**15  # D, so that sums of D squares and of D products of int8 keep their promises
TINY = tl.constexpr(LEAST_SCALE)  # what underflows in the room's own products is less than this

_CLIPS = (1.0, 0.9, 0.8, 0.7)  # shares of a row's largest value that its scale may reach: the best of them is taken
_ALIGNMENT = 16  # bytes that a tensor descriptor's rows are multiples of
_BUILD_ELEMENTS = 2**22  # of the head per step: some float64 copies of so many are what building needs besides


class Int8Head:
    """An INT8 copy of ``head``: half the bytes of a 2-byte head, and 12 bytes per row.

    columns: ``[D]`` float32 powers of two from 2**-30 to 2**29, or None. A column of the head is multiplied by its own
    before it is rounded, and the hidden state's element divided by it, both exactly: channels in which hidden states
    are large lose less when their columns are scaled up.

    weight: ``[V, D rounded up to 16]`` int8. scale, error, norm: ``[V]`` float32, the last two as above and +inf for a
    row that is not finite.

    Raises ValueError for a hidden size beyond ``MOST_HIDDEN`` and columns that are not such numbers.
    """

    def __init__(self, head: LMHead, columns: torch.Tensor | None = None) -> None:
        rows, width = head.vocab_size, head.weight.shape[1]
        device = head.weight.device
        if width > MOST_HIDDEN:
            raise ValueError(f"weight has {width} columns; expected {MOST_HIDDEN} or fewer")
        if columns is not None:
            mantissa, exponent = torch.frexp(columns)
            if columns.shape != (width,) or columns.dtype != torch.float32 or columns.device != device:
                raise ValueError(
                    f"columns is {tuple(columns.shape)} {columns.dtype} on {columns.device}; "
                    f"expected ({width},) torch.float32 on {device}"
                )
            if not bool(((mantissa == 0.5) & (exponent > -30) & (exponent <= 30)).all()):
                raise ValueError("columns has other values; expected powers of two from 2**-30 to 2**29")
        self.columns = columns
        self.shrink = None if columns is None else 1.0 / columns  # what hidden states are multiplied by
        self.weight = torch.zeros(rows, cdiv(width, _ALIGNMENT) * _ALIGNMENT, dtype=torch.int8, device=device)
        self.scale, self.error, self.norm = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3))
        self.rebuild(head)

    def rebuild(self, head: LMHead) -> None:
        """Copy ``head`` anew, in place: after its weight has changed. Captured graphs read the new copy."""
        self.require_shape_of(head)
        width = head.weight.shape[1]
        rows = max(1, _BUILD_ELEMENTS // width)
        for first in range(0, head.vocab_size, rows):
            block = slice(first, min(first + rows, head.vocab_size))
            exact = head.weight[block].double()
            if self.columns is not None:
                exact *= self.columns
            quantised, scale, error, norm = _quantise_rows(exact)
            error += ACCUMULATION * width * exact.norm(dim=1) + SCREEN_ROUNDING * norm
            self.weight[block, :width] = quantised
            self.scale[block] = scale
            self.error[block] = _rounded_up(error * (1 + ROOM_ROUNDING))
            self.norm[block] = _rounded_up(norm)
        self._built_from = _state_of(head.weight)

    def is_stale(self, head: LMHead) -> bool:
        """Whether ``head`` is known to be another than this was built from: another tensor, or written to since.

        Writes through ``.data`` or by another library leave no trace: whoever updates weights that way rebuilds.
        """
        return self._built_from != _state_of(head.weight)

    @property
    def num_groups(self) -> int:
        return cdiv(self.scale.shape[0], rng.GROUP_SIZE)

    @property
    def num_bytes(self) -> int:
        """Device memory that this holds."""
        held = (self.weight, self.scale, self.error, self.norm, self.columns, self.shrink)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def require_shape_of(self, head: LMHead) -> None:
        """Raise ValueError unless this can be a copy of ``head``."""
        rows, width = self.weight.shape
        wanted = (head.vocab_size, cdiv(head.weight.shape[1], _ALIGNMENT) * _ALIGNMENT)
        if (rows, width) != wanted or self.weight.device != head.weight.device:
            raise ValueError(
                f"int8_head is ({rows}, {width}) on {self.weight.device}; expected {wanted} on {head.weight.device}"
            )

    @functools.cached_property
    def _descriptors(self) -> dict[tuple[int, int], TensorDescriptor]:
        return {}

    def blocks(self, config: ScreenConfig) -> torch.Tensor | TensorDescriptor:
        """What the kernel reads the copy through: a descriptor of the config's blocks, or the tensor."""
        if not config.tma:
            return self.weight
        key = (config.block_v, config.block_d)
        found = self._descriptors.get(key)
        if found is None:
            found = self._descriptors[key] = TensorDescriptor.from_tensor(self.weight, list(key))
        return found


def _quantise_rows(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """int8 rows, float32 scales, and ``|w - s q|`` and ``|s q|`` of each, of ``[N, D]`` float64 rows.

    Sums are float64: their rounding is far below that of the float32 that their results are rounded up to.
    """
    largest = exact.abs().amax(dim=1)
    best: tuple[torch.Tensor, ...] | None = None
    for clip in _CLIPS:
        scale = (largest * (clip / 127)).clamp(min=LEAST_SCALE).float()
        steps = (exact / scale.double()[:, None]).round_().clamp_(-127, 127)
        copied = steps * scale.double()[:, None]
        found = (steps.to(torch.int8), scale, (exact - copied).norm(dim=1), copied.norm(dim=1))
        if best is None:
            best = found
        else:
            better = found[2] < best[2]
            best = tuple(
                torch.where(better.view(-1, *[1] * (new.dim() - 1)), new, old)
                for new, old in zip(found, best, strict=True)
            )
    assert best is not None
    steps, scale, error, norm = best
    finite = torch.isfinite(error) & torch.isfinite(scale)
    nothing = torch.zeros_like(scale)
    infinite = torch.full_like(error, float("inf"))
    return (
        torch.where(finite[:, None], steps, torch.zeros_like(steps)),
        torch.where(finite, scale, nothing),
        torch.where(finite, error, infinite),
        torch.where(finite, norm, infinite),
    )


def _rounded_up(values: torch.Tensor) -> torch.Tensor:
    """float64 to float32, none smaller; +inf where there is no number."""
    values = values.nan_to_num(nan=float("inf"), posinf=float("inf"))
    rounded = values.float()
    above = torch.nextafter(rounded, torch.full_like(rounded, float("inf")))
    return torch.where(rounded.double() < values, above, rounded) + LEAST_SCALE


def _state_of(weight: torch.Tensor) -> tuple[int, int | None]:
    return weight.data_ptr(), None if weight.is_inference() else weight._version


@triton.jit
def room_of(error, norm, hidden_norm, hidden_error):
    """``[BLOCK_V, BLOCK_B]``: how far the fused pass's dot products may be from the screen's. +inf or NaN where nothing
    is known."""
    return error[:, None] * hidden_norm[None, :] + (norm[:, None] * hidden_error[None, :] + TINY)


class Counted(enum.IntEnum):
    """What ``ScreenWorkspace.counters`` counts on the device, without anyone waiting for it."""

    BATCHES = 0  # blocks of rows: each reads groups of its own
    ROWS = 1
    GROUPS = 2  # groups that were read from the head, per block of rows: on a GPU, not the same number each time
    CANDIDATES = (
        3  # groups that a row could have taken its token from, per row, as far as was known before any was read
    )
    SURE_ROWS = 4  # rows with one such group or none
    WIDE_BATCHES = 5  # blocks of rows that could have to read more than a ``WIDE`` share of the head


class ScreenWorkspace:
    """Scratch of ``screened_sample`` for up to ``max_rows`` rows of ``int8_head``'s batches, with any config; reused by
    every call on one stream.

    counters: ``[len(Counted)]`` int64, counts in this workspace or, when it is given, since it was made.
    """

    def __init__(self, int8_head: Int8Head, max_rows: int, counters: torch.Tensor | None = None) -> None:
        device, width = int8_head.weight.device, int8_head.weight.shape[1]
        padded = cdiv(max_rows, MOST_BLOCK_B) * MOST_BLOCK_B
        self.max_rows, self.num_groups = max_rows, int8_head.num_groups
        # Rows beyond the batch are multiplied too: their integers, whichever they are, touch nobody else's.
        self.terms = torch.zeros(padded * MOST_TERMS, width, dtype=torch.int8, device=device)
        self.hidden_scale, self.hidden_norm, self.hidden_error = (
            torch.zeros(max_rows, dtype=torch.float32, device=device) for _ in range(3)
        )
        self.upper = torch.empty(self.num_groups * max_rows, dtype=torch.float32, device=device)
        self.threshold = torch.empty(max_rows, dtype=torch.int32, device=device)
        # Of rows with a truncation.
        self.reach, self.most, self.least = (
            torch.empty(max_rows * self.num_groups, dtype=torch.float32, device=device) for _ in range(3)
        )
        ids = self.num_groups * rng.GROUP_SIZE
        self.id_upper = torch.empty(ids * min(max_rows, ID_ROWS), dtype=torch.float16, device=device)
        self.ids = torch.empty(ids, dtype=torch.int32, device=device)
        self.num_ids, self.ids_arrived = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        self.best = torch.empty(max_rows, dtype=torch.int64, device=device)
        self.candidates = torch.empty(max_rows, dtype=torch.int32, device=device)
        chunks = cdiv(self.num_groups, LEAST_CHUNK)
        self.logits = torch.empty(chunks * max_rows, rng.GROUP_SIZE, dtype=torch.float32, device=device)
        row_blocks = cdiv(max_rows, 16)
        self.list = torch.empty(row_blocks * self.num_groups, dtype=torch.int32, device=device)
        self.place = torch.empty_like(self.list)
        self.flagged = torch.zeros(max_rows, dtype=torch.int32, device=device)  # each launch leaves zeros behind
        self.arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)  # and here
        self.counters = torch.zeros(len(Counted), dtype=torch.int64, device=device) if counters is None else counters
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    def require_room(self, int8_head: Int8Head, num_rows: int) -> None:
        """Raise ValueError unless a batch of ``num_rows`` rows of ``int8_head`` fits."""
        width = int8_head.weight.shape[1]
        if num_rows > self.max_rows or (self.num_groups, self.terms.shape[1]) != (int8_head.num_groups, width):
            raise ValueError(
                f"workspace is for {self.max_rows} rows, {self.num_groups} groups and {self.terms.shape[1]} columns; "
                f"expected at least {num_rows} rows, {int8_head.num_groups} groups and {width} columns"
            )

    def blocks(self, config: ScreenConfig) -> torch.Tensor | TensorDescriptor:
        """What the kernel reads the hidden states' terms through."""
        if not config.tma:
            return self.terms
        key = (config.block_b * config.terms, config.block_d)
        found = self._descriptors.get(key)
        if found is None:
            found = self._descriptors[key] = TensorDescriptor.from_tensor(self.terms, list(key))
        return found
