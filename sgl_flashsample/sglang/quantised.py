"""LM heads in float8_e4m3fn with float32 scales, one per row or one for all, as SGLang's loaders leave them.

They are recognised by their tensors, not by the classes that made them. SGLang rounds the hidden states to E4M3 as well
(W8A8). The fused pass does not (W8A16): its logits are those of the dequantised weights, so its tokens are not always
SGLang's.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from ..defaults import converts_e4m3

E4M3 = torch.float8_e4m3fn
PACKED = {torch.int32: "packed for Marlin", torch.uint8: "packed, as NVFP4 and MXFP4 are"}
ARITHMETIC = (
    "W8A16: hidden states are not quantised; SGLang's own sampler rounds them to E4M3 too, so its tokens can differ"
)
_BLOCKS = "scales of blocks are not supported"
_HEAD_NAMES = ("lm_head", "model.lm_head", "language_model.lm_head")


class RowScaled(NamedTuple):
    """weight: ``[V, D]``, contiguous rows. scale: float32, ``[V]``, or ``[1]`` for all rows. Both are views of the
    model's tensors. hidden_dtype: that of the hidden states."""

    weight: torch.Tensor
    scale: torch.Tensor
    hidden_dtype: torch.dtype


def read(lm_head: Any) -> RowScaled:
    """The tensors of a head whose weight is two-dimensional and in float8_e4m3fn. Raises ValueError, with the reason in
    words, where the fused pass does not serve them."""
    given, scale = lm_head.weight.detach(), getattr(lm_head, "weight_scale", None)
    width, hidden_dtype = getattr(lm_head, "embedding_dim", None), getattr(lm_head, "orig_dtype", None)
    # Loaders leave the transpose of the checkpoint's weight. Where it is square, only its strides say so.
    weight = next((one for one in (given, given.t()) if one.stride(1) == 1 and one.shape[1] == width), None)
    if weight is None:
        raise ValueError(
            f"the LM head is {tuple(given.shape)} {E4M3} with strides {given.stride()}; expected contiguous rows of "
            f"{width} columns, or the transpose"
        )
    if not isinstance(scale, torch.Tensor):
        raise ValueError(f"the LM head is {E4M3} without weight_scale; {_BLOCKS}")
    one_per_row = scale.shape in ((len(weight),), (len(weight), 1))
    if scale.dtype is not torch.float32 or not (one_per_row or scale.numel() == 1) or not scale.is_contiguous():
        raise ValueError(
            f"the LM head's weight_scale is {tuple(scale.shape)} {scale.dtype} with strides {scale.stride()}; expected "
            f"contiguous float32, one number or one per row; {_BLOCKS}"
        )
    if hidden_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"the LM head is {E4M3} with hidden states in {hidden_dtype}; expected torch.bfloat16 or torch.float16"
        )
    return RowScaled(weight, scale.detach().view(-1), hidden_dtype)


def unsupported(lm_head: Any) -> str | None:
    """Why the fused pass does not serve this head, whose weight is in float8_e4m3fn; None where it does."""
    try:
        weight = read(lm_head).weight
    except ValueError as error:
        return str(error)
    if not converts_e4m3(weight.device):
        return f"the LM head is {E4M3}, which needs compute capability 8.9 or newer"
    return None


def identity(weight: torch.Tensor, scale: Any) -> tuple | None:
    """Changes with the place and layout of a quantised weight and of its scale, and with each write to the scale that
    PyTorch counts; None where the weight is not quantised."""
    if weight.dtype is not E4M3:
        return None
    if not isinstance(scale, torch.Tensor):
        return weight.stride(), None
    version = None if scale.is_inference() else scale._version
    return weight.stride(), scale.data_ptr(), scale.shape, version


def is_named(config: Any) -> bool:
    """A checkpoint's ``quantization_config``, of compressed-tensors, names the LM head."""
    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        return False
    groups = (config.get("config_groups") or {}).values()
    targets = [target for group in groups for target in group.get("targets") or ()]
    return any(map(_names_head, targets)) and not any(map(_names_head, config.get("ignore") or ()))


def _names_head(target: str) -> bool:
    """A target of compressed-tensors is a name, its last parts, or a regular expression after "re:"."""
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in _HEAD_NAMES)
    return target.rpartition(".")[2] == "lm_head"
