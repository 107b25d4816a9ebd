"""Kernels against their reference on this machine, in seconds: what ``doctor`` and a starting server run."""

from __future__ import annotations

import dataclasses

import torch

from .kernels.head import LMHead
from .kernels.lm_head_sample import lm_head_sample
from .kernels.reference import lm_head_sample_ref
from .tuned import tiles_up_to

# Enough ids for every tile to meet several vocabulary tiles and the masked end; small for the float64 reference.
_IDS = 8191


def compare_with_reference(head: LMHead, max_rows: int) -> str | None:
    """Draw with every tile that batches of up to ``max_rows`` rows use, on the first ids of ``head``.

    Compiles each kernel that such batches need. Returns None when every token is the reference's (near-ties
    excepted), else what differed.
    """
    weight = head.weight
    vocab_size = min(head.vocab_size, _IDS)
    cut = dataclasses.replace(head, weight=weight[:vocab_size], vocab_size=vocab_size)
    generator = torch.Generator(weight.device).manual_seed(1)
    spread = weight[:vocab_size].float().norm(dim=1).mean().clamp(min=1e-6)
    for num_rows, tile in tiles_up_to(head, max_rows):
        hidden = torch.randn(num_rows, weight.shape[1], generator=generator, device=weight.device)
        hidden = (hidden * (3.0 / spread)).to(weight.dtype)
        row = torch.arange(num_rows, device=weight.device)
        temperature = torch.where(row % 3 == 0, 0.0, 0.5 + row % 4 * 0.5)
        seed, position = row * 7919 - 5, row + 11
        want = lm_head_sample_ref(
            hidden,
            cut.weight,
            temperature,
            seed,
            position,
            vocab_start=cut.vocab_start,
            logit_scale=cut.logit_scale,
            softcap=cut.softcap,
            logits_dtype=cut.logits_dtype,
        )
        for return_logprob in (False, True):
            token, _, _ = lm_head_sample(hidden, cut, temperature, seed, position, tile, return_logprob=return_logprob)
            wrong = (token != want.token) & ~want.near_tie
            if wrong.any():
                return f"{int(wrong.sum())} of {num_rows} tokens differ from the reference with {tile}"
    return None
