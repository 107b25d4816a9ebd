"""What the winner of a race is shown beside: the vendor's GEMM alone, and what it costs to draw from its logits with
FlashInfer or to take their maximum. For information; a table never names them as a choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..kernels.head import LMHead
from ..work import Work
from .inputs import Batch
from .names import GEMM

ARGMAX = "gemm+argmax"
FLASHINFER = "gemm+flashinfer"


def names_for(work: Work, flashinfer: bool) -> list[str]:
    """The rivals of one kind of work; edits have none but the GEMM."""
    found = [GEMM]
    if work.greedy:
        found.append(ARGMAX)
    elif flashinfer and not work.edits:
        found.append(FLASHINFER)
    return found


def prepare(device: torch.device) -> dict[str, Any]:
    """Import FlashInfer and compile what will be raced, which takes a minute the first time on a machine."""
    if device.type != "cuda":
        return {"available": False, "detail": "no CUDA device"}
    began = time.monotonic()
    logits = torch.randn(2, 1024, device=device)
    top_k = torch.full((2,), 50, dtype=torch.int32, device=device)
    top_p = torch.full((2,), 0.9, device=device)
    seed, offset = torch.tensor([1], device=device), torch.tensor([0], device=device)
    _sample(logits, None, None, seed, offset)
    _sample(logits, top_k, top_p, seed, offset)
    torch.cuda.synchronize(device)
    return {"available": True, "detail": f"{time.monotonic() - began:.0f} s"}


def call_of(name: str, heads: list[LMHead], batch: Batch, work: Work) -> Callable[[int], Any]:
    """One call of rival ``name``, with the noise of step ``step``."""
    rows, (width, _) = batch.rows, heads[0].weight.shape
    dtype, device = heads[0].weight.dtype, batch.hidden.device
    logits = torch.empty(rows, width, dtype=dtype, device=device)

    def gemm(step: int) -> torch.Tensor:
        return torch.mm(batch.hidden, heads[step % len(heads)].weight.T, out=logits)

    if name == GEMM:
        return gemm
    if name == ARGMAX:
        return lambda step: gemm(step).argmax(-1)
    if name != FLASHINFER:
        raise ValueError(f"rival is {name!r}; expected {GEMM}, {ARGMAX} or {FLASHINFER}")
    softcap = heads[0].softcap
    wide = torch.empty(rows, width, device=device)

    def logits_in_float32(step: int) -> torch.Tensor:
        weight = heads[step % len(heads)].weight
        if dtype is torch.float32:
            found = torch.mm(batch.hidden, weight.T, out=wide)
        else:
            found = torch.mm(batch.hidden, weight.T, out_dtype=torch.float32, out=wide)
        return found if softcap is None else found.div_(softcap).tanh_().mul_(softcap)

    top_k = top_p = None
    if (limits := batch.truncation(work)) is not None:
        top_k, top_p = torch.where(limits.top_k < 1, width, limits.top_k), limits.top_p
    return lambda step: _sample(logits_in_float32(step), top_k, top_p, batch.rival_seed, batch.rival_offset[step])


def _sample(
    logits: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> torch.Tensor:
    """Joint is what SGLang asks for. The generator of PyTorch cannot be asked while a graph is captured, and tensors
    advance between replays."""
    import flashinfer.sampling as flashinfer

    noise: dict[str, Any] = {"deterministic": True, "seed": seed, "offset": offset}
    if top_k is None:
        return flashinfer.sampling_from_logits(logits, **noise)
    return flashinfer.top_k_top_p_sampling_from_logits(logits, top_k, top_p, filter_apply_order="joint", **noise)
