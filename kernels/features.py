"""What a row of a batch may ask for beyond its temperature: edits of its logits, and a truncation.

Values only. The arithmetic is ``epilogue.edit_logits`` and ``draw_truncated``.
"""

from __future__ import annotations

import dataclasses
import enum

import torch


class Edit(enum.IntFlag):
    """Which edits apply to a row."""

    ADDITIVE = 1
    SCALING = 2
    MASK = 4
    BIAS = 8


def require(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> None:
    """Raise ValueError unless ``tensor`` has this shape and dtype, contiguous rows, and the device of ``like``."""
    contiguous = tensor.is_contiguous() if tensor.dim() < 2 else tensor.stride(-1) == 1
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != like.device or not contiguous:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} with strides {tensor.stride()}; "
            f"expected contiguous {shape} {dtype} on {like.device}"
        )


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Which tokens of a row may be drawn, as SGLang decides it on its FlashInfer backend.

    top_k: ``[B]`` int32; fewer than ``top_k`` tokens have a larger logit. Off below 1 and from V on.
    top_p: ``[B]`` float32 in (0, 1]; tokens with a larger logit have less than ``top_p`` of the probability. Off at 1.
    min_p: ``[B]`` float32 in [0, 1]; probability at least ``min_p`` times the largest one. Off at 0.

    Top-k and top-p look at the whole distribution each ("joint"); on a row with min-p, top-p looks at what top-k has
    left. Equal logits stay or go together. Greedy rows ignore all three.

    largest_top_k: the caller knows that every row with a truncation has a top-k, none above this; None: not known. It
    decides how fast a batch is, never its tokens.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    largest_top_k: int | None = None

    def check(self, num_rows: int, like: torch.Tensor) -> None:
        require("top_k", self.top_k, (num_rows,), torch.int32, like)
        require("top_p", self.top_p, (num_rows,), torch.float32, like)
        require("min_p", self.min_p, (num_rows,), torch.float32, like)


@dataclasses.dataclass(frozen=True)
class LogitEdits:
    """Changes to logits before temperature and truncation, in this order, as in SGLang; each optional.

    additive: ``[B, V]`` float32, added (frequency and presence penalties, min_new_tokens).
    scaling: ``[B, V]`` float32; a logit ``x`` becomes ``x * s`` below 0, else ``x / s`` (repetition penalty).
    mask: allowed tokens: ``[B, W]`` int32, bit ``i % 32`` of word ``i // 32`` set where token i is allowed, ids
        from ``32 W`` on allowed; or forbidden ones: ``[B, V]`` bool, True where forbidden.
    bias: ``[B, V]`` float32, added after the mask: it cannot revive a masked token.
    bias_before_mask: the order of SGLang's speculative batches.
    rows: ``[B]`` int32 of ``Edit`` flags, which edits apply to which row; None: all that are given to every row.
        A row without a flag reads nothing.
    """

    additive: torch.Tensor | None = None
    scaling: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    bias_before_mask: bool = False
    rows: torch.Tensor | None = None

    @property
    def kinds(self) -> Edit:
        """The edits that are given."""
        given = (self.additive, self.scaling, self.mask, self.bias)
        return Edit(sum(flag for flag, tensor in zip(Edit, given, strict=True) if tensor is not None))

    @property
    def mask_is_bool(self) -> bool:
        return self.mask is not None and self.mask.dtype is torch.bool

    def check(self, num_rows: int, width: int, like: torch.Tensor) -> None:
        """width: ids below it have a column."""
        for name, tensor in (("additive", self.additive), ("scaling", self.scaling), ("bias", self.bias)):
            if tensor is not None:
                require(name, tensor, (num_rows, max(width, tensor.shape[-1])), torch.float32, like)
        if self.mask_is_bool:
            assert self.mask is not None
            require("mask", self.mask, (num_rows, max(width, self.mask.shape[-1])), torch.bool, like)
        elif self.mask is not None:
            require("mask", self.mask, (num_rows, self.mask.shape[-1]), torch.int32, like)
        if self.rows is not None:
            require("rows", self.rows, (num_rows,), torch.int32, like)
