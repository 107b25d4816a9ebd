"""Baselines that our paths are compared with: one GEMM of the vendor, and other ways to get tokens from its logits.

The tuner times three of them beside the contenders of a race (``GEMM``, ``ARGMAX``, ``FLASHINFER``) and the benchmarks
all. A baseline may have several forms; which one is the fastest depends on the shape. FlashInfer reads float32 logits
and nothing else: either the GEMM writes them, or a further pass converts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..kinds import BatchKind
from ..tables.schema import HeadShape
from .labels import GEMM
from .timing import Call

ARGMAX = "gemm+argmax"
MULTINOMIAL = "gemm+multinomial"
EXPONENTIAL = "gemm+exponential"  # as SGLang draws
FLASHINFER = "gemm+flashinfer"

# Kinds of draws of a baseline.
NOTHING, PLAIN, GREEDY, TRUNCATED = "nothing", "plain", "greedy", "truncated"

NO_GEMM = "a GEMM multiplies no e4m3 weight with hidden states of another dtype"

OFFSETS_PER_CALL = 4096  # a thread of FlashInfer's draws far fewer numbers per call


@dataclasses.dataclass(frozen=True)
class BaselineBatch:
    """hidden: ``[B, D]``. weights: copies of the head, ``[V, D]``, read in turns. softcap: of the logits, or None.
    temperature: ``[B]`` float32. top_k: ``[B]`` int32, top_p: ``[B]`` float32. seed: ``[1]`` int64, offset:
    ``[steps, 1]`` int64: FlashInfer's noise; steps are ``OFFSETS_PER_CALL`` apart. min_p: ``[B]`` float32; baselines
    with a truncation then draw with min-p alone, at temperature 1."""

    hidden: torch.Tensor
    weights: Sequence[torch.Tensor]
    softcap: float | None
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    offset: torch.Tensor
    min_p: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Baseline:
    """name: as in tables and plots. draws: ``NOTHING``, ``PLAIN``, ``GREEDY`` or ``TRUNCATED``. form: the way, where
    there are several. call: one step; returns the tokens, or the logits of a GEMM alone."""

    name: str
    draws: str
    form: str
    call: Call


def baselines(
    batch: BaselineBatch, *, flashinfer: Any = None, compile: Callable[[Callable], Callable] | None = None
) -> Iterator[Baseline]:
    """Every baseline for this batch. flashinfer: ``import_flashinfer()``; None skips the baselines that need it.
    compile: ``torch.compile``, for the forms that it makes; None skips these."""
    gemm = Gemm(batch)
    softcap, temperature = batch.softcap, batch.temperature[:, None]
    yield Baseline(GEMM, NOTHING, "torch.mm(out=)", gemm)
    # A softcap is monotone: a greedy baseline leaves it out.
    yield Baseline(ARGMAX, GREEDY, "eager, as SGLang does", lambda step: _argmax(gemm(step)))
    yield Baseline(
        EXPONENTIAL, PLAIN, "eager, as SGLang does", lambda step: _exponential_race(gemm(step), softcap, temperature)
    )
    if compile is not None:
        argmax, multinomial, race = compile(_argmax), compile(_multinomial), compile(_exponential_race)
        yield Baseline(ARGMAX, GREEDY, "torch.compile", lambda step: argmax(gemm(step)))
        yield Baseline(MULTINOMIAL, PLAIN, "softmax and multinomial", lambda step: multinomial(gemm(step), softcap))
        yield Baseline(EXPONENTIAL, PLAIN, "torch.compile", lambda step: race(gemm(step), softcap, temperature))
    if flashinfer is None:
        return
    logits: dict[str, Call] = {"GEMM writes float32": gemm.float32}
    if compile is not None:
        to_float32 = compile(_to_float32)
        logits["GEMM writes 2 bytes, one pass converts"] = lambda step: to_float32(gemm(step), softcap)
    truncated = _flashinfer_truncated if batch.min_p is None else _flashinfer_min_p
    for form, source in logits.items():
        yield Baseline(FLASHINFER, PLAIN, form, _flashinfer_plain(flashinfer, source, batch))
        yield Baseline(FLASHINFER, TRUNCATED, form, truncated(flashinfer, source, batch))


def baseline_names(kind: BatchKind, head: HeadShape, *, flashinfer: bool) -> list[str]:
    """The baselines that are timed beside the contenders of a race. flashinfer: it can be raced. With penalties, a
    grammar or a bias no other sampler draws from the logits of the GEMM. A quantised head has none (``NO_GEMM``)."""
    if head.is_quantised:
        return []
    if kind.greedy:
        return [GEMM, ARGMAX]
    return [GEMM, FLASHINFER] if flashinfer and not kind.edit else [GEMM]


def baseline_call(name: str, kind: BatchKind, batch: BaselineBatch) -> Call:
    """The first form of the baseline ``name`` for such batches. Raises ValueError where there is none."""
    flashinfer = import_flashinfer() if name == FLASHINFER else None
    draws = (NOTHING, GREEDY if kind.greedy else TRUNCATED if kind.truncate else PLAIN)
    for baseline in baselines(batch, flashinfer=flashinfer):
        if baseline.name == name and baseline.draws in draws:
            return baseline.call
    raise ValueError(f"baseline is {name!r}; there is none of this name for {kind} batches")


def import_flashinfer() -> Any:
    """``flashinfer.sampling``. Raises whatever its import does: it looks for compilers and GPUs."""
    import flashinfer.sampling

    return flashinfer.sampling


class Gemm:
    """The GEMM of one batch, and the buffers that it writes to."""

    def __init__(self, batch: BaselineBatch) -> None:
        self._batch = batch
        shape = (batch.hidden.shape[0], batch.weights[0].shape[0])
        self._logits = torch.empty(shape, dtype=batch.hidden.dtype, device=batch.hidden.device)
        self._logits_f32: torch.Tensor | None = None

    def __call__(self, step: int) -> torch.Tensor:
        """``[B, V]`` logits in the weight's dtype."""
        return torch.mm(self._batch.hidden, self._weight(step).T, out=self._logits)

    def float32(self, step: int) -> torch.Tensor:
        """``[B, V]`` float32 logits that the GEMM writes itself, with the softcap."""
        batch, softcap = self._batch, self._batch.softcap
        if self._logits_f32 is None:
            self._logits_f32 = torch.empty(self._logits.shape, device=self._logits.device)
        if batch.hidden.dtype is torch.float32:
            logits = torch.mm(batch.hidden, self._weight(step).T, out=self._logits_f32)
        else:
            logits = torch.mm(batch.hidden, self._weight(step).T, out_dtype=torch.float32, out=self._logits_f32)
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def _weight(self, step: int) -> torch.Tensor:
        return self._batch.weights[step % len(self._batch.weights)]


# Separate functions, so that torch.compile compiles nothing else. softcap: None or a constant.
def _to_float32(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    logits = logits.float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def _multinomial(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return torch.multinomial(torch.softmax(_to_float32(logits, softcap), -1), 1)


def _exponential_race(logits: torch.Tensor, softcap: float | None, temperature: torch.Tensor) -> torch.Tensor:
    """The draw of SGLang 0.5.17 to 0.5.23 for rows without truncation and seed (srt/layers/sampler.py)."""
    logits = _to_float32(logits, softcap)
    logits.div_(temperature)
    logits[:] = torch.softmax(logits, -1)
    exponential = torch.empty_like(logits).exponential_(1.0).clamp_min_(torch.finfo(torch.float32).tiny)
    return (logits / exponential).argmax(-1).to(torch.int32)


def _flashinfer_plain(flashinfer: Any, logits: Call, batch: BaselineBatch) -> Call:
    return lambda step: flashinfer.sampling_from_logits(logits(step), **flashinfer_noise(batch, step))


def _flashinfer_truncated(flashinfer: Any, logits: Call, batch: BaselineBatch) -> Call:
    """SGLang asks for "joint". FlashInfer's default, top-k first, draws from another distribution."""
    top_k = torch.where(batch.top_k < 1, batch.weights[0].shape[0], batch.top_k)
    return lambda step: flashinfer.top_k_top_p_sampling_from_logits(
        logits(step), top_k, batch.top_p, filter_apply_order="joint", **flashinfer_noise(batch, step)
    )


def _flashinfer_min_p(flashinfer: Any, logits: Call, batch: BaselineBatch) -> Call:
    """FlashInfer draws with min-p from probabilities alone."""
    return lambda step: flashinfer.min_p_sampling_from_probs(
        torch.softmax(logits(step), -1), batch.min_p, **flashinfer_noise(batch, step)
    )


def flashinfer_noise(batch: BaselineBatch, step: int) -> dict[str, Any]:
    """The arguments of FlashInfer's functions that hold the noise of a step. PyTorch's generator, their default, cannot
    be asked while a graph is captured; tensors can advance."""
    return {"deterministic": True, "seed": batch.seed, "offset": batch.offset[step]}
