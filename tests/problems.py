"""Problems that the kernel tests draw from, and tiles to draw them with."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sgl_flashsample.kernels.features import LogitEdits, Truncation
from sgl_flashsample.kernels.head import LMHead, Workspace
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample, num_parts
from sgl_flashsample.kernels.reference import Reference, sample_ref, truncated_sample_ref
from sgl_flashsample.kernels.tiles import DrawConfig, TileConfig

from sgl_flashsample.tuned import draw_for

CUDA = torch.cuda.is_available()
# Interpreted, a program costs milliseconds: large tiles, few of them. Several parts, so that the reduction works.
TILE = (
    TileConfig(16, 128, 64, 4, 3) if CUDA else TileConfig(16, 512, 64, 4, 1, ctas_per_sm=8, tma=False, reduce_rows=64)
)
WIDE = (
    TileConfig(64, 128, 64, 4, 3) if CUDA else TileConfig(64, 2048, 128, 4, 1, ctas_per_sm=2, tma=False, reduce_rows=64)
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])


def rows(num_rows: int, device: torch.device, seed: int = 0, greedy_every: int = 5) -> dict[str, torch.Tensor]:
    """Mixed parameters: temperatures from 0.2 to 2, every fifth row greedy, arbitrary seeds and positions."""
    g = torch.Generator().manual_seed(seed)
    temperature = 0.2 + 1.8 * torch.rand(num_rows, generator=g)
    temperature[::greedy_every] = 0.0
    return {
        "temperature": temperature.to(device),
        "seed": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=g).to(device),
        "position": torch.randint(0, 2**20, (num_rows,), generator=g).to(device),
    }


def random_problem(num_rows, vocab, hidden, dtype, device, seed=0, padding=0):
    """Logits with a standard deviation of about 3: peaked and flat rows both occur at the temperatures above."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(num_rows, hidden, generator=g).to(dtype)
    weight = (torch.randn(vocab + padding, hidden, generator=g) * 3 / hidden**0.5).to(dtype)
    return states.to(device), weight.to(device)


def integer_problem(num_rows, vocab, hidden, dtype, device, seed=0):
    """Entries whose dot products float32 sums without any rounding, in any order: ties abound, near-ties do not."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randint(-2, 3, (num_rows, hidden), generator=g).to(dtype)
    weight = torch.randint(-1, 2, (vocab, hidden), generator=g).to(dtype) / 4
    return states.to(device), weight.to(device)


def ties_apart(num_rows: int, device: torch.device):
    """Rows at temperature 1 whose largest logits are 200 equal ones, one group in each of 200 spans; with their ids."""
    weight, states = torch.zeros(200 * 128, 16, device=device), torch.zeros(num_rows, 16, device=device)
    tied = torch.arange(200, device=device) * 128 + 5
    weight[tied, 0], states[:, 0] = 1.0, 4.0
    params = rows(num_rows, device) | {"temperature": torch.ones(num_rows, device=device)}
    return states, LMHead(weight), params, tied


def limits(num_rows: int, vocab: int, device: torch.device, first: int = 0) -> Truncation:
    """Every combination of top-k, top-p and min-p in turn, all off and all on among them, off in all its spellings."""
    g = torch.Generator().manual_seed(num_rows * 7 + vocab)
    combination = (torch.arange(num_rows) + first) % 8
    off = torch.tensor([0, -1, vocab, 2**30])[torch.arange(num_rows) // 8 % 4]
    top_k = torch.where(combination & 1 > 0, torch.randint(1, max(2, min(vocab, 40)), (num_rows,), generator=g), off)
    top_p = torch.where(combination & 2 > 0, 0.05 + 0.93 * torch.rand(num_rows, generator=g), 1.0)
    min_p = torch.where(combination & 4 > 0, 0.01 + 0.5 * torch.rand(num_rows, generator=g), 0.0)
    return Truncation(top_k.int().to(device), top_p.to(device), min_p.to(device))


def limit_all(
    num_rows: int, device: torch.device, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Truncation:
    """The same limits for every row."""
    return Truncation(
        torch.full((num_rows,), top_k, dtype=torch.int32, device=device),
        torch.full((num_rows,), top_p, device=device),
        torch.full((num_rows,), min_p, device=device),
    )


def take(limits: Truncation, rows: torch.Tensor) -> Truncation:
    return Truncation(limits.top_k[rows], limits.top_p[rows], limits.min_p[rows])


def is_cut(params: dict[str, torch.Tensor], limits: Truncation, vocab: int) -> torch.Tensor:
    """``[B]``: sampled rows with a limit that is on."""
    use_k = (limits.top_k >= 1) & (limits.top_k < vocab)
    return (use_k | (limits.top_p < 1) | (limits.min_p > 0)) & (params["temperature"] > 0)


def reference(logits: torch.Tensor, params: dict[str, torch.Tensor], limits: Truncation | None = None) -> Reference:
    """From ``[B, V]`` logits that are exact: plain and greedy rows as without a truncation, the others as with it."""
    logits = logits.double()
    plain = sample_ref(logits, logits, logits, **params)
    if limits is None:
        return plain
    cut = is_cut(params, limits, logits.shape[1])
    tempered = params | {"temperature": torch.where(cut, params["temperature"], 1.0)}
    found = truncated_sample_ref(logits, **tempered, top_k=limits.top_k, top_p=limits.top_p, min_p=limits.min_p)
    return Reference(
        *(torch.where(cut, getattr(found, f.name), getattr(plain, f.name)) for f in dataclasses.fields(Reference))
    )


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What one call gives. rounds: per row 0 without a truncation, 1 answered in one pass, more after a search."""

    token: torch.Tensor
    score: torch.Tensor
    logprob: torch.Tensor
    rounds: torch.Tensor
    kept: torch.Tensor  # [B, V], the logits that rows with a truncation were drawn from


def draw(
    states: torch.Tensor,
    head: LMHead,
    params: dict[str, torch.Tensor],
    limits: Truncation,
    tile: TileConfig = TILE,
    config: DrawConfig | None = None,
    edits: LogitEdits | None = None,
) -> Drawn:
    num_rows = len(states)
    workspace = Workspace(num_parts(head, num_rows, tile) * num_rows, states.device)
    config = draw_for(head) if config is None else config
    drawn = lm_head_sample(
        states,
        head,
        **params,
        tile=tile,
        truncation=limits,
        edits=edits,
        return_logprob=True,
        workspace=workspace,
        draw=config,
    )
    kept = workspace.last_kept
    assert kept is not None
    return Drawn(*drawn, kept.rounds[:num_rows], kept.logits[:num_rows, : head.vocab_size])


def bitmask(allowed: torch.Tensor) -> torch.Tensor:
    """``[B, V]`` bool to the words of a grammar: bit i % 32 of word i // 32 is set where token i is allowed."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32))
    bits = padded.view(len(allowed), -1, 32).long() << torch.arange(32, device=allowed.device)
    words = bits.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()
