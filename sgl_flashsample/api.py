"""The public function: ``sample``. For engines other than SGLang, and what the SGLang backend calls."""

from __future__ import annotations

import dataclasses

import torch

from .kernels.features import LogitEdits, Truncation
from .kernels.head import LMHead, Workspace
from .kernels.lm_head_sample import lm_head_sample
from .tuned import Work, draw_for, tile_for


@dataclasses.dataclass(frozen=True)
class BatchParams:
    """One value per row of the batch, on the device of the hidden states.

    temperature: ``[B]`` float32; 0 is greedy, else at least 1e-6 (not checked: that would synchronise).
    seed: ``[B]`` int64, any value. Rows with equal seed, position and logits get equal tokens, so give
        each request its own.
    position: ``[B]`` int64, at least 0 and different for each token of a request, for example its index.
    truncation: top-k, top-p and min-p of the rows; None where no row has any.
    edits: penalties, grammar mask and bias of the rows; None where no row has any.
    """

    temperature: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    truncation: Truncation | None = None
    edits: LogitEdits | None = None


@dataclasses.dataclass(frozen=True)
class SampleOutput:
    """token_ids: ``[B]`` int64, absolute vocabulary ids.

    logprobs: ``[B]`` float32, natural log-probability of each token under ``softmax(logits / temperature)``
        (temperature 1 on greedy rows), or None when not asked for.
    scores: ``[B]`` float32. Where the head is a shard of the vocabulary, the shard with the largest score
        holds the row's token; of equal scores, the one with the lowest ids.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None
    scores: torch.Tensor


def sample(
    hidden: torch.Tensor,
    lm_head: torch.Tensor | LMHead,
    params: BatchParams,
    *,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
) -> SampleOutput:
    """Draw ``token[b] ~ softmax(logits[b] / temperature[b])``, exactly, in one pass over the head.

    ``logits = softcap(logit_scale * (hidden @ weight.T))``, rounded to the head's ``logits_dtype``, then edited as
    ``params.edits`` says; the distribution is truncated as ``params.truncation`` says (FlashSampling paper, section 3.2
    and Lemma 4.3; for truncation see ``kernels/draw_truncated.py``). Logits are not written to memory, except those of
    rows with a truncation, 2 or 4 bytes each.

    Args:
        hidden: ``[B, D]``, contiguous rows, the head's dtype and device.
        lm_head: ``[V, D]`` weight (bfloat16, float16 or float32), or an ``LMHead`` for padding, a softcap,
            a scale or a vocabulary shard. Keep one ``LMHead`` per model: it caches its descriptors.
        params: per-row temperature, seed and position.
        return_logprob: also compute the token's log-probability.
        workspace: scratch to reuse (``Workspace(slots, device)``); allocated when None. It grows with the first larger
            batch that has a truncation: before a CUDA graph is captured, call once with the largest.

    Invariants: the token depends on (logits row, seed, position) only, not on batch size, order,
    neighbours, tile, shards, or eager against graph; ids are below ``vocab_size``; the first maximum wins
    a greedy tie. Never synchronises; usable inside a CUDA graph once a call of the same shapes has
    compiled the kernels (a replay reads ``params`` anew).

    Raises:
        ValueError: a tensor of the wrong shape, dtype, layout or device; the message names it.
    """
    head = lm_head if isinstance(lm_head, LMHead) else LMHead(lm_head)
    token_ids, scores, logprobs = lm_head_sample(
        hidden,
        head,
        params.temperature,
        params.seed,
        params.position,
        tile_for(head, hidden.shape[0], Work.of(params.truncation is not None, params.edits is not None)),
        truncation=params.truncation,
        edits=params.edits,
        draw=draw_for(head),
        return_logprob=return_logprob,
        workspace=workspace,
    )
    return SampleOutput(token_ids, logprobs, scores)
