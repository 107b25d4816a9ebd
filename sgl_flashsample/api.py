"""The public functions: ``sample`` and ``sample_from_logits``. For engines other than SGLang, and what the SGLang
backend calls."""

from __future__ import annotations

import dataclasses

import torch

from .choices import Choices
from .kernels.features import LogitEdits, Truncation
from .kernels.head import LMHead, LogitsSource, Workspace
from .kernels.sample_logits import sample_logits
from .paths import run
from .screen import Screen
from .tuned import draw_on, read_for
from .work import Path, Work


@dataclasses.dataclass(frozen=True)
class BatchParams:
    """One value per row of the batch, on the device of the hidden states.

    temperature: ``[B]`` float32; 0 is greedy, else at least 1e-6 (not checked: that would synchronise).
    seed: ``[B]`` int64, any value. Rows with equal seed, position and logits get equal tokens, so give
        each request its own.
    position: ``[B]`` int64, at least 0 and different for each token of a request, for example its index.
    truncation: top-k, top-p and min-p of the rows; None where no row has any.
    edits: penalties, grammar mask and bias of the rows; None where no row has any.
    all_greedy: the caller knows that every temperature is 0 or less, which may be faster; with another temperature
        the tokens are undefined.
    distribution_only: the caller wants tokens of the right distribution and no certain ones: they may depend on the
        batch and on the row's place in it. Only for batches with every row truncated by top-k or top-p, none greedy and
        none with min-p; of others the tokens are undefined. Allows the flashinfer path, where a tuned table names it.
    """

    temperature: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    truncation: Truncation | None = None
    edits: LogitEdits | None = None
    all_greedy: bool = False
    distribution_only: bool = False


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
    path: Path | None = None,
    choices: Choices | None = None,
    screen: Screen | None = None,
) -> SampleOutput:
    """Draw ``token[b] ~ softmax(logits[b] / temperature[b])``, exactly, in one pass over the head.

    ``logits = softcap(logit_scale * (hidden @ weight.T))``, rounded to the head's ``logits_dtype``, then edited as
    ``params.edits`` says; the distribution is truncated as ``params.truncation`` says (FlashSampling paper, section 3.2
    and Lemma 4.3; for truncation see ``kernels/draw_truncated.py``). Logits are not written to memory, except those of
    rows with a truncation, 2 or 4 bytes each. Batches for which a GEMM is faster have it, and one reader of its output.

    Args:
        hidden: ``[B, D]``, contiguous rows, the head's dtype and device.
        lm_head: ``[V, D]`` weight (bfloat16, float16 or float32), or an ``LMHead`` for padding, a softcap,
            a scale or a vocabulary shard. Keep one ``LMHead`` per model: it caches its descriptors.
        params: per-row temperature, seed and position.
        return_logprob: also compute the token's log-probability.
        workspace: scratch to reuse (``paths.make_workspace(head, max_rows, choices=choices)``); allocated when None. It
            grows with the first larger batch that has a truncation or a GEMM: before a CUDA graph is captured, call
            once with the largest.
        path: how it is done; the fastest one when None, as ``choices`` has it.
        choices: which path and configuration a batch takes, ``resolve(head).choices`` from a tuned table; the built-in
            ones when None. Resolve once per head: it reads files.
        screen: ``Screen(head, max_rows)``, kept with the head: batches without a truncation and logprobs may then be
            drawn from half the bytes, where ``choices`` has that as the fastest. One that is stale, or too small for
            the batch, is as none.

    Invariants: the token depends on (logits row, seed, position) only, not on batch size, order,
    neighbours, tile, shards, path (``Path.FLASHINFER`` apart), or eager against graph; ids are below
    ``vocab_size``; the first maximum wins a greedy tie. Never synchronises; usable inside a CUDA graph once a
    call of the same shapes has compiled the kernels (a replay reads ``params`` anew).

    Raises:
        ValueError: a tensor of the wrong shape, dtype, layout or device; the message names it. A path that cannot
            serve the head or the batch. Choices for heads of another shape.
    """
    head = lm_head if isinstance(lm_head, LMHead) else LMHead(lm_head)
    token_ids, scores, logprobs = run(
        path,
        hidden,
        head,
        params.temperature,
        params.seed,
        params.position,
        truncation=params.truncation,
        edits=params.edits,
        greedy=params.all_greedy,
        return_logprob=return_logprob,
        workspace=workspace,
        choices=choices,
        distribution_only=params.distribution_only,
        screen=screen,
    )
    return SampleOutput(token_ids, logprobs, scores)


def sample_from_logits(
    logits: torch.Tensor,
    params: BatchParams,
    *,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
) -> SampleOutput:
    """Draw ``token[b] ~ softmax(logits[b] / temperature[b])``, exactly, in one pass over logits that are in memory
    (the standalone sampler of the FlashSampling paper, section 5.2).

    Args:
        logits: ``[B, V]`` bfloat16, float16 or float32, contiguous rows at any distance; not changed. Fastest where
            rows start at multiples of 16 elements.
        params: per-row temperature, seed and position; edits and truncation as in ``sample``.
        vocab_size: columns from here on are padding, never read or drawn (default V).
        vocab_start: absolute id of column 0, a multiple of 16, where the columns are a shard of the vocabulary.
        logit_scale, softcap: ``softcap * tanh(logit_scale * logits / softcap)`` first, as far as set.
        return_logprob: also compute the token's log-probability.
        workspace: scratch to reuse, ``Workspace(512 * B, device)`` for any batch of up to B rows; allocated when None.

    Invariants: those of ``sample``. The same logits, seed and position give the token that ``sample`` draws, but for
    near-ties: rows whose two best scores are one rounding of a float32 apart, about one in a million.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, layout or device; the message names it.
    """
    size = logits.shape[-1] if vocab_size is None else vocab_size
    work = Work.of(params.truncation is not None, params.edits is not None, params.all_greedy)
    token_ids, scores, logprobs = sample_logits(
        logits,
        LogitsSource(size, vocab_start, logit_scale, softcap),
        params.temperature,
        params.seed,
        params.position,
        read_for(logits.device, size, logits.shape[0], work),
        truncation=params.truncation,
        edits=params.edits,
        all_greedy=params.all_greedy,
        return_logprob=return_logprob,
        workspace=workspace,
        draw=draw_on(logits.device, size),
    )
    return SampleOutput(token_ids, logprobs, scores)
