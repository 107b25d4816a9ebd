"""The ways to do the last step: what each supports, what scratch it needs, and how it is run.

All of them are exact, and draw the same token for the same logits (near-ties of scores excepted): which one serves a
batch is a matter of speed alone, and ``tuned.path_for`` decides it. What differs between them is the logits: a GEMM of
the vendor adds up in another order than the fused pass, and may move a logit by a unit in its last place.
"""

from __future__ import annotations

import torch

from .kernels.features import LogitEdits, Truncation
from .kernels.head import LMHead, Workspace
from .kernels.lm_head_sample import lm_head_sample, workspace_slots
from .kernels.sample_logits import read_slots, sample_logits
from .tuned import Path, Work, draw_for, fused_up_to, path_for, read_for, readers_up_to, tile_for, tiles_up_to


def problem_of(path: Path, head: LMHead) -> str | None:
    """Why ``path`` cannot serve ``head``; None where it can."""
    if path is Path.LOGITS and head.rounding is not head.weight.dtype:
        return f"its GEMM gives {head.weight.dtype}, the head's logits are {head.rounding}"
    return None


def make_workspace(head: LMHead, max_rows: int, searched: torch.Tensor | None = None) -> Workspace:
    """Scratch for any batch of 1 to ``max_rows`` rows of ``head``, on the path that it takes: no such batch allocates
    more, but for the logits that rows with a truncation keep. searched: a counter to go on with (``Workspace``)."""
    device = head.weight.device
    slots, logits = 1, False
    for work in Work:
        fused = fused_up_to(head, max_rows, work)
        slots = max(slots, *(workspace_slots(head, fused, tile) for _, tile in tiles_up_to(head, fused, work)))
        for _, config in readers_up_to(head, max_rows, work):
            slots = max(slots, read_slots(head.vocab_size, max_rows, config, device))
            logits = True
    workspace = Workspace(slots, device, searched)
    if logits:
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
    return_logprob: bool,
    workspace: Workspace | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``token [B] i64``, ``score [B] f32`` and ``logprob [B] f32`` or None, as ``lm_head_sample``.

    Raises ValueError for arguments that do not fit, and for a head that ``path`` does not support.
    """
    work = Work.of(truncation is not None, edits is not None)
    if path is None:
        path = path_for(head, hidden.shape[0], work)
    elif (problem := problem_of(path, head)) is not None:
        raise ValueError(f"path is {path.value!r}, which cannot serve this head: {problem}")
    if path is Path.LOGITS:
        logits, workspace = compute_logits(hidden, head, work, workspace)
        return sample_logits(
            logits,
            head.source,
            temperature,
            seed,
            position,
            read_for(logits.device, head.vocab_size, len(logits), work),
            truncation=truncation,
            edits=edits,
            return_logprob=return_logprob,
            workspace=workspace,
            draw=draw_for(head),
        )
    return lm_head_sample(
        hidden,
        head,
        temperature,
        seed,
        position,
        tile_for(head, hidden.shape[0], work),
        truncation=truncation,
        edits=edits,
        return_logprob=return_logprob,
        workspace=workspace,
        draw=draw_for(head),
    )


def compute_logits(
    hidden: torch.Tensor, head: LMHead, work: Work, workspace: Workspace | None
) -> tuple[torch.Tensor, Workspace]:
    """``hidden @ weight.T`` in the workspace's buffer, padding of the head included; and the workspace, made here where
    None is given."""
    head.check(hidden)
    num_rows, (width, _) = hidden.shape[0], head.weight.shape
    if workspace is None:
        config = read_for(hidden.device, head.vocab_size, num_rows, work)
        workspace = Workspace(max(1, read_slots(head.vocab_size, num_rows, config, hidden.device)), hidden.device)
    logits = workspace.gemm(num_rows, width, head.weight.dtype)
    torch.mm(hidden.detach(), head.weight.detach().T, out=logits)
    return logits, workspace
