"""The LM head as kernels see it, and the scratch that they share."""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import rng
from .integers import cdiv, next_power_of_2
from .tiles import MOST_CANDIDATES, MOST_CHUNKS, TileConfig

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# Kernel arguments that may come as views at any offset: another alignment must not compile another kernel.
ROW_POINTERS = ["temperature_ptr", "seed_ptr", "position_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"]
EDIT_POINTERS = ["edit_rows_ptr", "additive_ptr", "scaling_ptr", "mask_ptr", "bias_ptr"]

MOST_LEFT = 8  # groups that a part leaves behind per row with a truncation
SPAN = 8  # groups that the search over kept logits handles as one
CHAIN = 4  # tokens that one pass over them measures
FIRST_GROUPS = 64  # groups that these come from
LISTED = max(MOST_CHUNKS * FIRST_GROUPS, 2 * MOST_CANDIDATES)  # room for lists of groups, per row
PARTIALS = 16  # what each of those programs leaves behind: two numbers per token and one more, in a power of two


def block_of_spans(vocab_size: int) -> int:
    """The spans of a row, as a power of two."""
    return next_power_of_2(cdiv(vocab_size, SPAN * rng.GROUP_SIZE))


def supports_tma(matrix: torch.Tensor) -> bool:
    """Whether tensor descriptors can address ``matrix``: 16-byte aligned rows."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


@dataclasses.dataclass(frozen=True)
class LMHead:
    """An LM head: ``[V, D]`` weight (bf16, fp16 or fp32, row-contiguous) and how logits come from it.

    vocab_size: ids below it are real, the rows after it are padding and are never returned (default V).
    vocab_start: absolute id of row 0, a multiple of ``GROUP_SIZE``; non-zero on a vocabulary shard.
    logit_scale, softcap: ``softcap * tanh(logit_scale * x / softcap)``, as far as set.
    logits_dtype: what a logit is rounded to before anything else, as the model's own GEMM would do
    (default: the weight's dtype; torch.float32 keeps the accumulator).
    """

    weight: torch.Tensor
    vocab_size: int = 0
    vocab_start: int = 0
    logit_scale: float | None = None
    softcap: float | None = None
    logits_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        weight = self.weight
        if weight.dim() != 2 or weight.dtype not in TRITON_DTYPES:
            raise ValueError(
                f"weight is {tuple(weight.shape)} {weight.dtype}; expected [V, D] in bfloat16, float16 or float32"
            )
        if weight.stride(1) != 1 or weight.stride(0) < weight.shape[1]:
            raise ValueError(f"weight has strides {weight.stride()}; expected rows that are contiguous")
        if self.vocab_size == 0:
            object.__setattr__(self, "vocab_size", weight.shape[0])
        if not 1 <= self.vocab_size <= weight.shape[0]:
            raise ValueError(f"vocab_size is {self.vocab_size}; expected 1 to the head's {weight.shape[0]} rows")
        if self.vocab_start < 0 or self.vocab_start % rng.GROUP_SIZE:
            raise ValueError(f"vocab_start is {self.vocab_start}; expected a multiple of {rng.GROUP_SIZE}, 0 or more")
        if self.vocab_start + weight.shape[0] >= 2**31:
            raise ValueError(f"ids reach {self.vocab_start + weight.shape[0]}; expected them below 2**31")
        if self.rounding not in TRITON_DTYPES:
            raise ValueError(f"logits_dtype is {self.logits_dtype}; expected bfloat16, float16 or float32")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; expected a positive number or None")

    @property
    def rounding(self) -> torch.dtype:
        """What logits are rounded to."""
        return self.weight.dtype if self.logits_dtype is None else self.logits_dtype

    def check(self, hidden: torch.Tensor) -> None:
        """Raise ValueError unless ``hidden`` can be multiplied with the weight."""
        if hidden.dim() != 2 or hidden.dtype != self.weight.dtype or hidden.shape[1] != self.weight.shape[1]:
            raise ValueError(
                f"hidden is {tuple(hidden.shape)} {hidden.dtype}; "
                f"expected [B, {self.weight.shape[1]}] {self.weight.dtype} as the head's"
            )
        if hidden.device != self.weight.device or hidden.stride(1) != 1:
            raise ValueError(
                f"hidden is on {hidden.device} with strides {hidden.stride()}; "
                f"expected contiguous rows on {self.weight.device}"
            )

    @functools.cached_property
    def source(self) -> LogitsSource:
        """What the output of a GEMM with the weight is, in the weight's dtype."""
        return LogitsSource(self.vocab_size, self.vocab_start, self.logit_scale, self.softcap, self.rounding)

    @functools.cached_property
    def supports_tma(self) -> bool:
        """Whether tensor descriptors can address the weight."""
        return supports_tma(self.weight)

    def addressed(self, tile: TileConfig, hidden: torch.Tensor) -> TileConfig:
        """``tile`` without the descriptors that cannot address the weight or ``hidden``."""
        if tile.tma and not self.supports_tma:
            tile = dataclasses.replace(tile, tma=False)
        if tile.hidden_tma and not supports_tma(hidden):
            tile = dataclasses.replace(tile, hidden_tma=False)
        return tile

    @functools.cached_property
    def variant(self) -> tuple:
        """What of this head a compiled kernel depends on, beside its constants."""
        return self.weight.dtype, self.weight.stride(0), self.weight.data_ptr() % 16 == 0

    @functools.cached_property
    def _descriptors(self) -> dict[tuple[int, int], TensorDescriptor]:
        return {}

    def blocks(self, tile: TileConfig) -> torch.Tensor | TensorDescriptor:
        """What the kernel reads the weight through: a descriptor of the tile's blocks, or the tensor."""
        if not tile.tma:
            return self.weight
        key = (tile.block_v, tile.block_d)
        found = self._descriptors.get(key)
        if found is None:
            found = self._descriptors[key] = TensorDescriptor.from_tensor(self.weight, list(key))
        return found


@dataclasses.dataclass(frozen=True)
class LogitsSource:
    """What ``[B, >= vocab_size]`` logits are, and what is still to be done to them.

    vocab_size: columns below it are real, those after it are padding and are never returned or read.
    vocab_start: absolute id of column 0, a multiple of ``GROUP_SIZE``; non-zero on a vocabulary shard.
    logit_scale, softcap: ``softcap * tanh(logit_scale * x / softcap)``, as far as set.
    rounding: what a logit is rounded to before anything else (default: the logits' own dtype).
    """

    vocab_size: int
    vocab_start: int = 0
    logit_scale: float | None = None
    softcap: float | None = None
    rounding: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size is {self.vocab_size}; expected 1 or more")
        if self.vocab_start < 0 or self.vocab_start % rng.GROUP_SIZE:
            raise ValueError(f"vocab_start is {self.vocab_start}; expected a multiple of {rng.GROUP_SIZE}, 0 or more")
        if self.vocab_start + self.vocab_size >= 2**31:
            raise ValueError(f"ids reach {self.vocab_start + self.vocab_size}; expected them below 2**31")
        if self.rounding is not None and self.rounding not in TRITON_DTYPES:
            raise ValueError(f"rounding is {self.rounding}; expected bfloat16, float16 or float32")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; expected a positive number or None")


class Workspace:
    """Scratch of ``lm_head_sample`` and ``sample_logits`` for up to ``slots`` = parts x rows; reused by every call on
    one stream.

    ``slots * 708`` bytes on ``device``, and what ``gemm`` and ``kept`` have been asked for.
    searched: ``[1]`` int64, counts the rows that took the search over kept logits, in this workspace or, when it is
    given, since it was made.
    """

    def __init__(self, slots: int, device: torch.device, searched: torch.Tensor | None = None) -> None:
        self.slots = slots
        self.searched = torch.zeros(1, dtype=torch.int64, device=device) if searched is None else searched
        held = slots * MOST_LEFT
        self.score = torch.empty(held, dtype=torch.float32, device=device)
        self.second = torch.empty(held, dtype=torch.float32, device=device)
        self.group = torch.empty(held, dtype=torch.int32, device=device)
        self.logits = torch.empty(held, rng.GROUP_SIZE, dtype=torch.float32, device=device)
        self.lse = torch.empty(held, 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(slots, dtype=torch.int32, device=device)  # each launch leaves zeros behind
        self._kept: dict[torch.dtype, Kept] = {}
        self.last_kept: Kept | None = None  # of the last batch with a truncation
        self._gemm: torch.Tensor | None = None

    def gemm(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for a GEMM's ``[num_rows, width]`` logits, in rows that start at multiples of ``GROUP_SIZE`` elements;
        allocates for the first batch and for a larger one, by doubling."""
        stride = cdiv(width, rng.GROUP_SIZE) * rng.GROUP_SIZE
        found = self._gemm
        if found is None or found.dtype is not dtype or found.shape[1] != stride or found.shape[0] < num_rows:
            held = num_rows
            if found is not None and found.dtype is dtype and found.shape[1] == stride:
                held = max(num_rows, 2 * found.shape[0])
            found = self._gemm = torch.empty(held, stride, dtype=dtype, device=self.score.device)
        return found[:num_rows, :width]

    def kept(self, num_rows: int, vocab_size: int, dtype: torch.dtype) -> Kept:
        """Room for the logits of ``num_rows`` rows; allocates for the first batch and for a larger one."""
        kept = self._kept.get(dtype)
        if kept is None or kept.num_rows < num_rows or not kept.fits(vocab_size):
            if kept is not None and kept.fits(vocab_size):
                # By doubling, so that a batch that grows row by row does not allocate at every step.
                num_rows = max(num_rows, 2 * kept.num_rows)
            kept = self._kept[dtype] = Kept(num_rows, vocab_size, dtype, self.score.device, self.searched)
        self.last_kept = kept
        return kept


class Kept:
    """What rows with a truncation leave behind, ``[num_rows, width]`` logits, and the scratch of their draw.

    width: the vocabulary size rounded up to whole groups. searched: as in ``Workspace``.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        searched: torch.Tensor | None = None,
    ) -> None:
        num_groups = cdiv(vocab_size, rng.GROUP_SIZE)
        self.num_rows, self.width = num_rows, num_groups * rng.GROUP_SIZE
        self.logits = torch.empty(num_rows, self.width, dtype=dtype, device=device)
        self.score, self.mass, self.peak = (
            torch.empty(num_rows, num_groups, dtype=torch.float32, device=device) for _ in range(3)
        )
        # Lists of spans: as many as there are, and those of a window, a power of two.
        self.list = torch.empty(num_rows, 3 * cdiv(num_groups, SPAN), dtype=torch.int32, device=device)
        self.partial = torch.empty(num_rows, MOST_CHUNKS, PARTIALS, dtype=torch.float32, device=device)
        self.first = torch.empty(num_rows, LISTED, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(num_rows, dtype=torch.int32, device=device)
        # Per row of the last batch: 0 without a truncation, 1 answered in one pass, more with a search.
        self.rounds = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.searched = torch.zeros(1, dtype=torch.int64, device=device) if searched is None else searched

    def fits(self, vocab_size: int) -> bool:
        return self.width - rng.GROUP_SIZE < vocab_size <= self.width
