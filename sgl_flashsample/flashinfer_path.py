"""The flashinfer path after its GEMM: FlashInfer's rejection sampling under top-k and top-p, as stock SGLang calls it.

Equal in distribution to our own paths, not token for token: FlashInfer draws all rows of a call from one seed, so a
token depends on the row's place in the batch. It serves a batch only where the caller wants the distribution alone
(``BatchParams.distribution_only``), and every row is truncated:

- A plain row would not be exact: FlashInfer's uniforms have 24 bits, and the total variation that they cost grows with
  the tokens that may be drawn, by up to 2**-24 for each (3e-3 and more on a whole vocabulary of 150k, see
  ``kernels/rng.py``; about 3e-6 under a top-k of 50).
- Min-p is another chain of kernels, and SGLang's choice between the two is the batch's, not the row's.

Its noise is a function of the arguments: nothing is asked of PyTorch's generator, which a CUDA graph would freeze and
whose state is on the host.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from .files import first_line
from .kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput

logger = logging.getLogger("sgl_flashsample")

# cuRAND's counter is (offset / 4: 64 bits, row: 64 bits) under the key of row 0's request. Ours, under the same key, is
# (index, position: 64 bits, stream and unit): an offset from here on has the counter of a position from 2**29 on.
FIRST_OFFSET = -(2**63)
DRAWS_PER_CALL = 2**20  # a row takes one per round of its rejection, a few
CANNOT_USE = (
    "flashsample cannot use FlashInfer (%s): until restart, batches for which the tuned table names it are sampled by "
    "flashsample's own kernels, from the same distribution; SGLang's use of FlashInfer is not affected"
)
NEEDS = "every row truncated by top-k or top-p, none greedy, with min-p or with a seed of its own"

_given_up: list[str] = []


class FlashInferError(RuntimeError):
    """FlashInfer is not there, or failed; one line."""


def unsupported_batch(head: LMHead, params: BatchParams, return_logprob: bool) -> str | None:
    """Why the path cannot serve such a batch; None where it can."""
    if not params.distribution_only:
        return f"its caller has not said distribution_only ({NEEDS})"
    if params.truncation is None:
        return "its rows have no truncation"
    if params.edits is not None:
        return "its rows have edits"
    if return_logprob:
        return "logprobs are asked for"
    if head.shards > 1:
        return "the head is a shard"
    return _given_up[0] if _given_up else None


def give_up(error: FlashInferError) -> None:
    """Our own paths serve FlashInfer's batches from now on, in this process: it is not asked again, so this is said
    once."""
    _given_up.append(f"FlashInfer failed: {error}")
    logger.warning(CANNOT_USE, error)


def draw_with_flashinfer(
    logits: torch.Tensor,  # [B, V], of a GEMM; not changed
    spec: LogitsSpec,
    params: BatchParams,  # temperatures above 0, a truncation with min-p 0
) -> SampleOutput:
    """``token[b] ~ softmax(logits[b] / temperature[b])`` under the joint top-k and top-p of row b; scores are 0.

    Calls with another seed or position in row 0 have other noise. Never synchronises. Raises ValueError for arguments
    that do not fit, else FlashInferError.
    """
    num_rows, size, truncation = logits.shape[0], spec.vocab_size, params.truncation
    if truncation is None:
        raise ValueError("truncation is None; expected top-k and top-p of every row")
    params.check("logits", logits, spec)
    if num_rows == 0:
        return SampleOutput.empty(0, logits.device, False)
    try:
        token = _module().top_k_top_p_sampling_from_probs(
            torch.softmax(_model_logits(logits[:, :size], spec) / _bounded(params.temperature)[:, None], -1),
            torch.where(truncation.top_k < 1, size, truncation.top_k),
            truncation.top_p,
            filter_apply_order="joint",
            deterministic=True,
            seed=params.seed[:1],
            offset=torch.add(_first_offset(logits.device), params.position[:1], alpha=DRAWS_PER_CALL),
        )
    except Exception as error:  # its import looks for compilers and GPUs, its first call compiles
        raise FlashInferError(first_line(error)) from error
    return SampleOutput(token.long(), None, torch.zeros_like(params.temperature))


def _bounded(temperature: torch.Tensor) -> torch.Tensor:
    """As ``BatchParams`` has it: the nearest temperature in range, for NaN the largest."""
    coldest, hottest = BatchParams.MIN_TEMPERATURE, BatchParams.MAX_TEMPERATURE
    return torch.where(temperature < hottest, temperature.clamp(min=coldest), hottest)


def _model_logits(logits: torch.Tensor, spec: LogitsSpec) -> torch.Tensor:
    """``[B, V]`` float32: a GEMM's output scaled and soft-capped, rounded where the model rounds."""
    logits_f32 = logits.float()
    if spec.logit_scale is not None:
        logits_f32 = (logits_f32 * spec.logit_scale).to(spec.logits_dtype or logits.dtype).float()
    return logits_f32 if spec.softcap is None else torch.tanh(logits_f32 / spec.softcap) * spec.softcap


@functools.cache
def _first_offset(device: torch.device) -> torch.Tensor:
    return torch.tensor([FIRST_OFFSET], dtype=torch.int64, device=device)


@functools.cache
def _module() -> Any:
    import flashinfer.sampling

    return flashinfer.sampling
