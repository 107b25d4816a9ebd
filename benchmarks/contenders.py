"""Everything that benchmarks/kernels.py may race: our paths through the public API, and the rivals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rivals import TOP_K, TOP_P, Contender, Inputs, rivals
from sgl_flashsample.kernels.features import Truncation
from sgl_flashsample.kernels.head import LMHead, Workspace
from sgl_flashsample.kernels.lm_head_sample import num_parts
from sgl_flashsample.kernels.sample_logits import num_read_parts

from sgl_flashsample import Screen, tuned
from sgl_flashsample.api import BatchParams, sample
from sgl_flashsample.work import ANY_BATCH, Path

OURS = ("fused", "logits", "screened")
PATHS = ("gemm", *OURS, "flashinfer_gumbel", "flashinfer_topk_topp", "multinomial_compiled", "exp_race")
MODES = ("plain", "trunc", "greedy")
MOST_SCREENED = 64  # rows of the largest batch with a screen
STEPS = 4  # calls per replay, each with noise of its own


@dataclasses.dataclass(frozen=True)
class Shape:
    """D hidden elements, V ids; a final softcap or None."""

    hidden: int
    vocab: int
    softcap: float | None = None

    def __str__(self) -> str:
        return f"{self.hidden}x{self.vocab}"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is raced."""

    paths: tuple[str, ...]
    modes: tuple[str, ...]
    dry: bool

    def has(self, contender: Contender) -> bool:
        return contender.path in self.paths and (contender.path == "gemm" or contender.mode in self.modes)


def our_config(path: Path, head: LMHead, rows: int, work: tuned.Work) -> str:
    """The shape of the launch, and whether a batch of this size takes this path by itself (with a screen, if it is the
    screened one)."""
    if path is Path.SCREENED:
        shape, work = tuned.Shape.of(head), work.with_screen
        config = str(tuned.screen_of(shape, rows, work))
        return config + ("; picked by the table" if path is tuned.path_of(shape, rows, work) else "")
    if path is Path.FUSED:
        config = str(tuned.tile_for(head, rows, work))
    else:
        config = str(tuned.read_for(head.weight.device, head.vocab_size, rows, work))
    return config + ("; picked by the table" if path is tuned.path_for(head, rows, work) else "")


def ours(inputs: Inputs, head: LMHead, wanted: Wanted) -> Iterator[Contender]:
    rows, device = inputs.hidden.shape[0], inputs.hidden.device
    slots = [1]
    for work in tuned.Work:
        slots.append(num_parts(head, rows, tuned.tile_for(head, rows, work)) * rows)
        reader = tuned.read_for(device, head.vocab_size, rows, work)
        slots.append(num_read_parts(head.vocab_size, rows, reader, device) * rows)
    workspace = Workspace(max(slots), device)
    truncation = Truncation(
        torch.full((rows,), TOP_K, dtype=torch.int32, device=device),
        torch.full((rows,), TOP_P, device=device),
        torch.zeros(rows, device=device),
    )
    screen = Screen(head, rows) if rows <= MOST_SCREENED and Path.SCREENED in wanted.paths else None
    for mode in MODES:
        temperature = torch.full((rows,), 0.0 if mode == "greedy" else 1.0, device=device)
        kept = truncation if mode == "trunc" else None
        greedy = mode == "greedy"
        params = [
            BatchParams(temperature, inputs.seed, position, kept, all_greedy=greedy) for position in inputs.position
        ]
        work = tuned.Work.of(kept is not None, False, greedy)
        paths = ANY_BATCH if screen is None else (*ANY_BATCH, Path.SCREENED)
        for path in paths:
            config = our_config(path, head, rows, work)

            def draw(step: int, params=params, path=path) -> torch.Tensor:
                options = {"workspace": workspace, "path": path, "screen": screen}
                return sample(inputs.hidden, head, params[step], **options).token_ids

            yield Contender(str(path), mode, config, draw)


def contenders(inputs: Inputs, flashinfer: Any, wanted: Wanted) -> list[Contender]:
    head = LMHead(inputs.weight, softcap=inputs.softcap)

    def compiled(function: Callable) -> Callable:
        return function if wanted.dry else torch.compile(function, dynamic=False, fullgraph=True)

    return [
        found for found in [*ours(inputs, head, wanted), *rivals(inputs, flashinfer, compiled)] if wanted.has(found)
    ]


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def steps_of(contender: Contender) -> Callable[[], None]:
    def call() -> None:
        for step in range(STEPS):
            contender.draw(step)

    return call
