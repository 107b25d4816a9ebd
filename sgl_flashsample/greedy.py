"""The public function ``argmax``: the most likely token of each row, without logits in memory. What a speculative
draft worker calls, whose tokens are greedy in every step."""

from __future__ import annotations

import torch

from .api import BatchParams, sample
from .choices import Choices
from .kernels.head import LMHead, Workspace
from .screen import Screen

_LEAST_ROWS = 1024
# By device and number of rows. Kept for good: a captured graph reads them wherever they were when it was captured.
_zeros: dict[tuple[torch.device, int], torch.Tensor] = {}
_params: dict[tuple[torch.device, int], BatchParams] = {}


def argmax(
    hidden: torch.Tensor,
    lm_head: torch.Tensor | LMHead,
    *,
    screen: Screen | None = None,
    choices: Choices | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """The first id with the largest logit: ``torch.argmax(logits, -1)``, for the logits of ``sample``.

    Args:
        hidden: ``[B, D]``, contiguous rows, the head's dtype and device.
        lm_head: ``[V, D]`` weight, or an ``LMHead``, as for ``sample``; a whole vocabulary. Where the head is a shard,
            call ``sample`` with ``all_greedy``: its scores tell which shard holds the token.
        screen: ``Screen(head, max_rows)``, kept with the head: rows may then be drawn from half the bytes. One that is
            stale, or too small for the batch, is as none.
        choices, workspace: as for ``sample``.

    Returns ``[B]`` int64. The token depends on the row's logits only, not on the batch, the path or the screen. With a
    ``workspace``, allocates nothing but that and the scores. Usable inside a CUDA graph once a call of the same shapes
    has compiled the kernels; synchronises in the first call on a device and in the first with more rows than it has
    zeros for, but never in one that is captured.

    Raises ValueError for a tensor of the wrong shape, dtype or device, and choices for heads of another shape.
    """
    params = _params_for(hidden.shape[0], hidden.device)
    return sample(hidden, lm_head, params, workspace=workspace, choices=choices, screen=screen).token_ids


def _params_for(num_rows: int, device: torch.device) -> BatchParams:
    """Of ``num_rows`` greedy rows, whose noise nobody looks at."""
    found = _params.get((device, num_rows))
    if found is None:
        zeros = _zeros_for(num_rows, device)
        found = BatchParams(zeros.view(torch.float32)[:num_rows], zeros[:num_rows], zeros[:num_rows], all_greedy=True)
        if (device, len(zeros)) in _zeros:
            _params[device, num_rows] = found
    return found


def _zeros_for(num_rows: int, device: torch.device) -> torch.Tensor:
    """``num_rows`` int64 zeros or more."""
    size = max(_LEAST_ROWS, 1 << max(0, num_rows - 1).bit_length())
    found = _zeros.get((device, size))
    if found is None:
        found = torch.zeros(size, dtype=torch.int64, device=device)
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return found  # its graph alone fills it
            torch.cuda.current_stream(device).synchronize()  # other streams will read it
        _zeros[device, size] = found
    return found
