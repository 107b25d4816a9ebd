"""The ways to do the last step: what each supports, what scratch it needs, and how it is run.

Our own draw the same token for the same logits (near-ties of scores excepted): which one serves a batch is a matter of
speed alone, and ``choices.Choices`` decides it. What differs between them is the logits: a GEMM of the vendor adds up
in another order than the fused pass, and may move a logit by a unit in its last place. FlashInfer draws other tokens of
the same distribution (``flashinfer_path.py``): it serves a batch where the choices and the caller both allow that.
"""

from __future__ import annotations

import torch

from .choices import Choices, choices_for
from .flashinfer_path import FlashInferError, draw_with_flashinfer, give_up, problem_of_batch
from .kernels.features import LogitEdits, Truncation
from .kernels.head import LMHead, Workspace
from .kernels.lm_head_sample import lm_head_sample, workspace_slots
from .kernels.reduce_parts import Drawn
from .kernels.sample_logits import read_slots, sample_logits
from .kernels.screened_sample import screened_sample
from .kernels.tiles import ReadConfig, ScreenConfig
from .screen import Screen
from .screen import problem_of as problem_of_screen
from .work import Path, Work


def problem_of(path: Path, head: LMHead) -> str | None:
    """Why ``path`` cannot serve ``head``; None where it can."""
    if path is Path.SCREENED:
        return problem_of_screen(head)
    if path is not Path.FUSED and head.rounding is not head.weight.dtype:
        return f"its GEMM gives {head.weight.dtype}, the head's logits are {head.rounding}"
    return None


def make_workspace(
    head: LMHead, max_rows: int, searched: torch.Tensor | None = None, choices: Choices | None = None
) -> Workspace:
    """Scratch for any batch of 1 to ``max_rows`` rows of ``head``, on the path that it takes: no such batch allocates
    more, but for the logits that rows with a truncation keep. A screen has scratch of its own. searched: a counter to
    go on with (``Workspace``)."""
    device = head.weight.device
    slots, logits = 1, False
    for config in {config for _, _, config in (choices or choices_for(head)).used_up_to(max_rows, screened=True)}:
        if isinstance(config, ScreenConfig):
            continue
        if isinstance(config, ReadConfig):
            slots = max(slots, read_slots(head.vocab_size, max_rows, config, device))
            logits = True
        else:
            slots = max(slots, workspace_slots(head, max_rows, config))
    workspace = Workspace(slots, device, searched)
    if logits or (choices is not None and choices.flashinfer):
        workspace.gemm(max_rows, head.weight.shape[0], head.weight.dtype)
    return workspace


def run(
    path: Path | None,  # None: the fastest
    hidden: torch.Tensor,  # [B, D], the weight's dtype
    head: LMHead,
    temperature: torch.Tensor,  # [B] f32
    seed: torch.Tensor,  # [B] i64
    position: torch.Tensor,  # [B] i64
    *,
    truncation: Truncation | None,
    edits: LogitEdits | None,
    greedy: bool,
    return_logprob: bool,
    workspace: Workspace | None,
    choices: Choices | None,
    distribution_only: bool = False,
    screen: Screen | None = None,
) -> Drawn:
    """As ``lm_head_sample``. distribution_only: of ``BatchParams``. screen: of ``head``, or of what it was: a batch
    that it cannot serve is drawn as if there were none.

    Raises ValueError for arguments that do not fit, and for a head or a batch that ``path`` does not support.
    """
    work = Work.of(truncation is not None, edits is not None, greedy)
    num_rows = hidden.shape[0]
    if choices is None:
        choices = choices_for(head)
    choices.check(head)
    if path is not None and (problem := problem_of(path, head)) is not None:
        raise ValueError(f"path is {path.value!r}, which cannot serve this head: {problem}")
    if path is Path.FLASHINFER or (path is None and choices.takes_flashinfer(num_rows, work)):
        problem = problem_of_batch(head, truncation, edits, return_logprob, distribution_only)
        if problem is None and truncation is not None:
            logits = compute_logits(hidden, head, workspace or Workspace(1, hidden.device))
            try:
                return draw_with_flashinfer(logits, head.source, temperature, seed, position, truncation)
            except FlashInferError as error:
                if path is not None:
                    raise
                give_up(error)  # a request must not fail because a path cannot serve it
        elif path is not None:
            raise ValueError(f"path is {path.value!r}, which cannot serve this batch: {problem}")
    if path in (None, Path.SCREENED):
        problem = _problem_of_screening(screen, head, num_rows, return_logprob)
        if problem is None and (path is not None or _is_screened_fast(truncation, choices)):
            work = work.with_screen
        elif path is not None:
            raise ValueError(f"path is {path.value!r}, which cannot serve this batch: {problem}")
    config = choices.pick(num_rows, work) if path is None else choices.on(path, num_rows, work)
    if isinstance(config, ScreenConfig) and screen is not None:
        return screened_sample(
            hidden,
            head,
            screen.int8_head,
            temperature,
            seed,
            position,
            config,
            truncation=truncation,
            edits=edits,
            workspace=screen.workspace,
            head_workspace=workspace,
            draw=choices.draw,
        )
    assert not isinstance(config, ScreenConfig), "only work with a screen takes the screened path"
    if isinstance(config, ReadConfig):
        if workspace is None:
            slots = read_slots(head.vocab_size, max(1, num_rows), config, hidden.device)
            workspace = Workspace(slots, hidden.device)
        return sample_logits(
            compute_logits(hidden, head, workspace),
            head.source,
            temperature,
            seed,
            position,
            config,
            truncation=truncation,
            edits=edits,
            all_greedy=greedy,
            return_logprob=return_logprob,
            workspace=workspace,
            draw=choices.draw,
        )
    return lm_head_sample(
        hidden,
        head,
        temperature,
        seed,
        position,
        config,
        truncation=truncation,
        edits=edits,
        return_logprob=return_logprob,
        workspace=workspace,
        draw=choices.draw,
    )


def _problem_of_screening(screen: Screen | None, head: LMHead, num_rows: int, return_logprob: bool) -> str | None:
    """Why ``screen`` cannot serve such a batch; None where it can."""
    if screen is None:
        return "its head has no screen"
    if return_logprob:
        return "logprobs are asked for"
    if num_rows > screen.max_rows:
        return f"it has {num_rows} rows, the screen is for {screen.max_rows}"
    return None if screen.serves(head) else "the screen is not of what the head holds now"


def _is_screened_fast(truncation: Truncation | None, choices: Choices) -> bool:
    """Whether no row is certain to be left to the whole head, after the screen."""
    if truncation is None:
        return True
    return truncation.largest_top_k is not None and truncation.largest_top_k <= choices.draw.candidates // 2


def compute_logits(hidden: torch.Tensor, head: LMHead, workspace: Workspace) -> torch.Tensor:
    """``hidden @ weight.T`` in the workspace's buffer, padding of the head included."""
    head.check(hidden)
    logits = workspace.gemm(hidden.shape[0], head.weight.shape[0], head.weight.dtype)
    torch.mm(hidden.detach(), head.weight.detach().T, out=logits)
    return logits
