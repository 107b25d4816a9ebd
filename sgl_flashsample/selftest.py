"""Kernels against their reference on this machine, in seconds: what ``doctor`` and a starting server run."""

from __future__ import annotations

import dataclasses

import torch

from .kernels.head import LMHead
from .kernels.lm_head_sample import lm_head_sample
from .kernels.reference import Reference, logits_ref, sample_ref
from .tuned import tiles_up_to

# Enough ids for each program of a large GPU to walk several vocabulary tiles.
MAX_IDS = 40_000
# Ids that the float64 reference takes at a time: a server that loads its model has little memory to spare.
CHUNK_IDS = 2_048
# Bound on the error of a float32 dot product, in units of the sum of its absolute terms.
_ACCUMULATION = 2.0**-22


def compare_with_reference(head: LMHead, max_rows: int, chunk_ids: int = CHUNK_IDS) -> str | None:
    """Draw with every tile that batches of up to ``max_rows`` rows use, on the first ids of ``head``.

    Compiles each kernel that such batches need. Returns None when every token is the reference's (near-ties
    excepted), else what differed.
    """
    weight = head.weight
    vocab_size = min(head.vocab_size, MAX_IDS)
    cut = dataclasses.replace(head, weight=weight[:vocab_size], vocab_size=vocab_size)
    generator = torch.Generator(weight.device).manual_seed(1)
    spread = weight[:chunk_ids].float().norm(dim=1).mean().clamp(min=1e-6)
    for num_rows, tile in tiles_up_to(head, max_rows):
        hidden = torch.randn(num_rows, weight.shape[1], generator=generator, device=weight.device)
        hidden = (hidden * (3.0 / spread)).to(weight.dtype)
        row = torch.arange(num_rows, device=weight.device)
        temperature = torch.where(row % 3 == 0, 0.0, 0.5 + row % 4 * 0.5)
        seed, position = row * 7919 - 5, row + 11
        want = _reference(hidden, cut, temperature, seed, position, chunk_ids)
        for return_logprob in (False, True):
            token, _, _ = lm_head_sample(hidden, cut, temperature, seed, position, tile, return_logprob=return_logprob)
            wrong = (token != want.token) & ~want.near_tie
            if wrong.any():
                return f"{int(wrong.sum())} of {num_rows} tokens differ from the reference with {tile}"
    return None


def _reference(
    hidden: torch.Tensor,
    head: LMHead,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    chunk_ids: int,
) -> Reference:
    low, logits, high = (
        torch.cat(
            [
                logits_ref(
                    hidden,
                    head.weight[start : start + chunk_ids],
                    logit_scale=head.logit_scale,
                    softcap=head.softcap,
                    logits_dtype=head.logits_dtype,
                    perturb=sign * _ACCUMULATION,
                )
                for start in range(0, head.vocab_size, chunk_ids)
            ],
            dim=1,
        )
        for sign in (-1, 0, 1)
    )
    return sample_ref(logits, low, high, temperature, seed, position, vocab_start=head.vocab_start)
