"""The public functions: ``sample``, ``sample_from_logits`` and ``argmax``. For engines other than SGLang; SGLang's
backend calls what they call."""

from __future__ import annotations

import torch

from .dispatch import DispatchTable
from .head import Head, check_params, check_rows
from .kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput
from .kernels.workspace import Workspace
from .kinds import SamplingPath
from .paths import read_logits
from .screen import Screen

_MIN_ZEROS = 1024
# By device and number of rows. Never freed: a captured graph reads them at the addresses that they had during the
# capture.
_zeros: dict[tuple[torch.device, int], torch.Tensor] = {}
_greedy_params: dict[tuple[torch.device, int], BatchParams] = {}


def sample(
    hidden: torch.Tensor,
    lm_head: torch.Tensor | LMHead,
    params: BatchParams,
    *,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
    path: SamplingPath | str | None = None,
    table: DispatchTable | None = None,
    screen: Screen | None = None,
) -> SampleOutput:
    """Draw ``token[b] ~ softmax(logits[b] / temperature[b])``, exactly, in one pass over the head.

    ``logits = softcap(logit_scale * (hidden @ weight.T))``, rounded to the head's ``logits_dtype``, then edited as
    ``params.edits`` says; the distribution is truncated as ``params.truncation`` says (FlashSampling paper, section 3.2
    and Lemma 4.3; for truncation see ``kernels/truncation_math.py``). Logits are not written to memory, except those of
    truncated rows, 2 or 4 bytes each. Where a GEMM is faster, the batch takes one, and one kernel reads its output.

    Args:
        hidden: ``[B, D]``, contiguous rows, the head's dtype and device.
        lm_head: ``[V, D]`` weight (bfloat16, float16 or float32), or an ``LMHead`` for padding, a softcap,
            a scale or a vocabulary shard. Keep one ``LMHead`` per model: it caches its descriptors.
        params: per-row temperature, seed and position.
        return_logprob: also compute the token's log-probability.
        workspace: scratch to reuse (``dispatch.make_workspace(head, max_rows, table=table)``); allocated when None. It
            grows with the first larger batch that has a truncation or a GEMM: before a CUDA graph is captured, call
            once with the largest.
        path: the path to take; None for the one that ``table`` has as the fastest.
        table: which path and configuration a batch takes, ``resolve(head).dispatch`` from a tuned table; the built-in
            choices when None. Resolve once per head: it reads files.
        screen: ``Screen(head, max_rows)``, kept with the head: batches without logprobs may then take the screened
            path, which reads half the bytes, where ``table`` has it as the fastest. Ignored if stale or too small for
            the batch.

    Invariants: the token depends on (logits row, seed, position) only, not on batch size, order,
    neighbours, tile, shards, path (``SamplingPath.FLASHINFER`` apart), or eager against graph; ids are below
    ``vocab_size``; the first maximum wins a greedy tie. Never synchronises; usable inside a CUDA graph once a
    call of the same shapes has compiled the kernels (a replay reads ``params`` anew).

    Raises:
        ValueError: a tensor of the wrong shape, dtype, layout or device; the message names it. An unknown path, or one
            that cannot serve the head or the batch. A table for heads of another shape.
    """
    check_rows("hidden", hidden)
    head = Head(lm_head, table=table, screen=screen, workspace=workspace)
    return head.draw(hidden, params, return_logprob=return_logprob, path=path)


def sample_from_logits(
    logits: torch.Tensor,
    params: BatchParams,
    *,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    shards: int = 1,
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
        vocab_start: absolute id of column 0, a multiple of 16, where the columns are one of ``shards`` parts of the
            vocabulary.
        logit_scale, softcap: ``softcap * tanh(logit_scale * logits / softcap)`` first, as far as set.
        return_logprob: also compute the token's log-probability.
        workspace: scratch to reuse, ``Workspace(512 * B, device)`` for any batch of up to B rows; allocated when None.

    Invariants: as for ``sample``. The same logits, seed and position give the token that ``sample`` draws, except in
    near-ties: rows whose two best scores differ by one rounding of a float32.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, layout or device; the message names it.
    """
    check_rows("logits", logits)
    check_params(params)
    size = logits.shape[-1] if vocab_size is None else vocab_size
    spec = LogitsSpec(size, vocab_start, logit_scale, softcap, shards=shards)
    return read_logits(logits, spec, params, return_logprob=return_logprob, workspace=workspace)


def argmax(
    hidden: torch.Tensor,
    lm_head: torch.Tensor | LMHead,
    *,
    screen: Screen | None = None,
    table: DispatchTable | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """The first id with the largest logit: ``torch.argmax(logits, -1)``, for the logits of ``sample``, which are not
    written to memory.

    Args:
        hidden: ``[B, D]``, contiguous rows, the head's dtype and device.
        lm_head: ``[V, D]`` weight, or an ``LMHead``, as for ``sample``; a whole vocabulary. Where the head is a shard,
            call ``sample`` with ``all_greedy``: its scores tell which shard holds the token.
        screen, table, workspace: as for ``sample``.

    Returns ``[B]`` int64. The token depends on the row's logits only, not on the batch, the path or the screen. With a
    ``workspace``, allocates only the token ids and the scores. Usable inside a CUDA graph once a call of the same
    shapes has compiled the kernels; synchronises in the first call on a device and in the first whose rows outnumber
    the cached zeros, but never in one that is captured.

    Raises ValueError for a tensor of the wrong shape, dtype or device, and a table for heads of another shape.
    """
    check_rows("hidden", hidden)
    params = _greedy_params_for(hidden.shape[0], hidden.device)
    return sample(hidden, lm_head, params, workspace=workspace, table=table, screen=screen).token_ids


def _greedy_params_for(num_rows: int, device: torch.device) -> BatchParams:
    """The parameters of ``num_rows`` greedy rows. Seeds and positions are 0: greedy rows have no noise."""
    params = _greedy_params.get((device, num_rows))
    if params is None:
        zeros = _zeros_for(num_rows, device)
        params = BatchParams(zeros.view(torch.float32)[:num_rows], zeros[:num_rows], zeros[:num_rows], all_greedy=True)
        if (device, len(zeros)) in _zeros:  # coverage: else needs a GPU
            _greedy_params[device, num_rows] = params
    return params


def _zeros_for(num_rows: int, device: torch.device) -> torch.Tensor:
    """``num_rows`` int64 zeros or more."""
    size = max(_MIN_ZEROS, 1 << max(0, num_rows - 1).bit_length())
    zeros = _zeros.get((device, size))
    if zeros is None:
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        if device.type == "cuda":  # coverage: needs a GPU
            if torch.cuda.is_current_stream_capturing():
                return zeros  # its graph alone fills it
            torch.cuda.current_stream(device).synchronize()  # other streams will read it
        _zeros[device, size] = zeros
    return zeros
