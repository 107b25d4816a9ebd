"""What benchmarks/kernels.py races against: one cuBLAS GEMM, then somebody else's way to draw from its logits.

A path may have several forms. Which one is fastest depends on the shape, so all are raced and the fastest counts.
FlashInfer reads float32 and nothing else: either the GEMM writes it, or a pass of its own converts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

TOP_K, TOP_P = 50, 0.9
BY_GEMM = "GEMM writes float32"
BY_CAST = "GEMM writes bf16, then .float()"
BY_SOFTCAP = "GEMM writes bf16, then float32 and softcap in one compiled pass"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One batch of a shape, D hidden elements, V ids. Noise differs from step to step, of ``steps`` between refreshes.

    hidden: ``[B, D]``; weight: ``[V, D]``; position: ``[steps, B]`` int64; seed: ``[B]`` int64. philox_seed ``[1]``
    and philox_offset ``[steps, 1]`` int64: FlashInfer's noise. temperatures: ``[B, 1]`` float32 ones. rounded:
    ``[B, V]``, what the GEMM writes in the weight's dtype; wide: ``[B, V]`` float32. along: ``[D]``, what all hidden
    states have in common, beside Gaussian noise of deviation 1.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    softcap: float | None
    position: torch.Tensor
    seed: torch.Tensor
    philox_seed: torch.Tensor
    philox_offset: torch.Tensor
    temperatures: torch.Tensor
    rounded: torch.Tensor
    wide: torch.Tensor
    along: torch.Tensor | None = None

    @classmethod
    def make(
        cls, weight: torch.Tensor, softcap: float | None, rows: int, steps: int, along: torch.Tensor | None = None
    ) -> Inputs:
        device, (vocab, hidden_size) = weight.device, weight.shape
        inputs = cls(
            hidden=torch.empty(rows, hidden_size, dtype=weight.dtype, device=device),
            weight=weight,
            softcap=softcap,
            position=torch.arange(steps, device=device)[:, None].repeat(1, rows),
            seed=torch.arange(rows, device=device) * 7919,
            philox_seed=torch.tensor([1234], device=device),
            philox_offset=torch.arange(steps, device=device)[:, None] * 4096,
            temperatures=torch.ones(rows, 1, device=device),
            rounded=torch.empty(rows, vocab, dtype=weight.dtype, device=device),
            wide=torch.empty(rows, vocab, device=device),
            along=along,
        )
        inputs.refresh()
        return inputs

    def refresh(self) -> None:
        """Other hidden states, and noise that was not drawn before."""
        steps = self.position.shape[0]
        self.hidden.normal_()
        if self.along is not None:
            self.hidden.add_(self.along)
        self.position.add_(steps)
        self.philox_offset.add_(steps * 4096)  # a thread of FlashInfer's draws far fewer numbers per call

    def gemm(self) -> torch.Tensor:
        return torch.mm(self.hidden, self.weight.T, out=self.rounded)

    def gemm_wide(self) -> torch.Tensor:
        return torch.mm(self.hidden, self.weight.T, out_dtype=torch.float32, out=self.wide)


@dataclasses.dataclass(frozen=True)
class Contender:
    """path, mode: as in the result file. form: how, where there are several ways. draw: tokens of one step."""

    path: str
    mode: str
    form: str
    draw: Callable[[int], torch.Tensor]

    @property
    def name(self) -> str:
        return f"{self.path} {self.mode}: {self.form}"


# Functions of their own, so that torch.compile sees nothing but them. ``softcap`` is None or a constant.
def to_float32(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    logits = logits.float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def multinomial(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return torch.multinomial(torch.softmax(to_float32(logits, softcap), -1), 1)


def exponential_race(logits: torch.Tensor, softcap: float | None, temperatures: torch.Tensor) -> torch.Tensor:
    """SGLang 0.5.17 to 0.5.23, rows without a truncation and without a seed (srt/layers/sampler.py)."""
    logits = to_float32(logits, softcap)
    logits.div_(temperatures)
    logits[:] = torch.softmax(logits, -1)
    waiting = torch.empty_like(logits).exponential_(1.0).clamp_min_(torch.finfo(torch.float32).tiny)
    return (logits / waiting).argmax(-1).to(torch.int32)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def import_flashinfer() -> Any:
    """``flashinfer.sampling``; raises whatever its import does: it looks for compilers and GPUs."""
    import flashinfer.sampling

    return flashinfer.sampling


def rivals(inputs: Inputs, flashinfer: Any, compile: Callable[[Callable], Callable]) -> Iterator[Contender]:
    """All ways to get tokens without us, and the GEMM alone. flashinfer: None leaves its ways out."""
    softcap = inputs.softcap
    yield Contender("gemm", "gemm", "torch.mm(out=), no sampling", lambda step: inputs.gemm())

    drawn = compile(multinomial)
    yield Contender(
        "multinomial_compiled", "plain", "softmax and torch.multinomial", lambda step: drawn(inputs.gemm(), softcap)
    )
    temperatures = inputs.temperatures
    yield Contender(
        "exp_race", "plain", "eager, as in SGLang", lambda step: exponential_race(inputs.gemm(), softcap, temperatures)
    )
    raced = compile(exponential_race)
    yield Contender(
        "exp_race", "plain", "under torch.compile", lambda step: raced(inputs.gemm(), softcap, temperatures)
    )
    # A softcap is monotone: a greedy rival leaves it out.
    largest = compile(argmax)
    yield Contender("exp_race", "greedy", "argmax, eager, as in SGLang", lambda step: argmax(inputs.gemm()))
    yield Contender("multinomial_compiled", "greedy", "argmax under torch.compile", lambda step: largest(inputs.gemm()))
    if flashinfer is not None:
        yield from _flashinfer_rivals(inputs, flashinfer, compile)


def _flashinfer_rivals(inputs: Inputs, flashinfer: Any, compile: Callable[[Callable], Callable]) -> Iterator[Contender]:
    rows, softcap = inputs.hidden.shape[0], inputs.softcap
    if softcap is None:
        logits = {BY_GEMM: inputs.gemm_wide, BY_CAST: lambda: inputs.gemm().float()}
    else:
        widen = compile(to_float32)
        logits = {BY_SOFTCAP: lambda: widen(inputs.gemm(), softcap)}
    top_k = torch.full((rows,), TOP_K, dtype=torch.int32, device=inputs.hidden.device)
    top_p = torch.full((rows,), TOP_P, device=inputs.hidden.device)

    def noise(step: int) -> dict[str, Any]:
        # Its default, PyTorch's generator, cannot be asked while a graph is captured, and tensors can advance.
        return {"deterministic": True, "seed": inputs.philox_seed, "offset": inputs.philox_offset[step]}

    for form, made in logits.items():
        yield Contender(
            "flashinfer_gumbel",
            "plain",
            form,
            lambda step, made=made: flashinfer.sampling_from_logits(made(), **noise(step)),
        )
        # Joint is what SGLang asks for and what we draw. FlashInfer's default, top-k first, draws from another
        # distribution.
        yield Contender(
            "flashinfer_topk_topp",
            "trunc",
            f"joint; {form}",
            lambda step, made=made: flashinfer.top_k_top_p_sampling_from_logits(
                made(), top_k, top_p, filter_apply_order="joint", **noise(step)
            ),
        )
