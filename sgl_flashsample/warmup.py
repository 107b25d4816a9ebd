"""The kernels of a head, compiled at the same time: one by one, the first start on a machine waits for each of them.

Threads are enough: Triton lets go of Python's lock in its passes, in LLVM and around ptxas, four fifths of a
compilation. They also work where child processes do not, as in SGLang's scheduler, which is a daemon.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

from .choices import Choices, choices_for
from .kernels.features import Edit, LogitEdits, Truncation
from .kernels.head import LMHead, Workspace
from .kernels.launch import compiling_only
from .kernels.lm_head_sample import lm_head_sample
from .kernels.sample_logits import read_slots, sample_logits
from .kernels.screened_sample import screened_sample
from .kernels.tiles import ReadConfig, ScreenConfig
from .screen import Screen
from .tuned import draw_for
from .work import Config, Work

logger = logging.getLogger("sgl_flashsample")

MOST_WORKERS = 8


def compile_at_once(
    heads: list[LMHead],
    max_rows: int,
    *,
    bool_masks: bool = False,
    choices: Choices | None = None,
    screens: Sequence[Screen | None] = (),
) -> None:
    """Compile what batches of 1 to ``max_rows`` rows of ``heads`` launch, whatever their features; run none of it.

    bool_masks: also the kernels for grammar masks of dtype bool. choices: what batches take; the built-in choices for
    the first head when None. screens: of the heads, in their order, where batches may be screened. What fails to
    compile fails again where it is launched, and is reported there.
    """
    if triton.knobs.runtime.interpret:
        return  # there is nothing to compile
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    try:
        with ThreadPoolExecutor(workers) as pool, triton.AsyncCompileMode(pool, ignore_errors=True), compiling_only():
            for head, screen in itertools.zip_longest(heads, screens):
                _launch_all(head, max_rows, bool_masks, choices or choices_for(heads[0]), screen)
    except Exception as error:  # another Triton: each kernel is compiled at its first launch, as ever
        logger.debug("flashsample: kernels are not compiled ahead: %s: %s", type(error).__name__, error)


def _launch_all(head: LMHead, max_rows: int, bool_masks: bool, choices: Choices, screen: Screen | None) -> None:
    # The kernels that take longest come first, so that none of them is left alone at the end.
    used = choices.used_up_to(max_rows, screened=screen is not None)
    for work, _, config in sorted(used, key=lambda one: not one[0].truncates):
        if work.truncates and head.vocab_start:
            continue  # only a whole vocabulary is truncated
        # A batch that asks for logprobs is one without a screen.
        for return_logprob in (False,) if work.screened else (False, True):
            launch_once(head, config, work, return_logprob, screen=screen)
            if bool_masks and work.edits:
                launch_once(head, config, work, return_logprob, bool_mask=True, screen=screen)


def launch_once(
    head: LMHead,
    config: Config,
    work: Work,
    return_logprob: bool,
    *,
    bool_mask: bool = False,
    screen: Screen | None = None,
) -> None:
    """What a batch with these features launches, with one row: kernels do not depend on the number of rows. screen: of
    ``head``, for a ``ScreenConfig``."""
    weight = head.weight
    row = torch.zeros(1, dtype=torch.int64, device=weight.device)
    one = torch.ones(1, dtype=torch.float32, device=weight.device)
    options: dict[str, Any] = {
        "truncation": Truncation(row.int(), one, one) if work.truncates else None,
        "edits": _edits(head, bool_mask) if work.edits else None,
        "return_logprob": return_logprob,
        "draw": draw_for(head),
    }
    if isinstance(config, ScreenConfig):
        assert screen is not None and not return_logprob
        hidden = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        screened_sample(hidden, head, screen.int8_head, one, row, row, config, workspace=screen.workspace, **options)
    elif isinstance(config, ReadConfig):
        workspace = Workspace(read_slots(head.vocab_size, 1, config, weight.device), weight.device)
        logits = workspace.gemm(1, weight.shape[0], weight.dtype)
        greedy = work.greedy
        sample_logits(logits, head.source, one, row, row, config, all_greedy=greedy, workspace=workspace, **options)
    else:
        hidden = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        lm_head_sample(hidden, head, one, row, row, config, **options)


def _edits(head: LMHead, bool_mask: bool) -> LogitEdits:
    width, device = head.vocab_start + head.vocab_size, head.weight.device
    values = torch.ones(1, width, dtype=torch.float32, device=device)
    forbidden = torch.zeros_like(values, dtype=torch.bool)
    allowed = torch.full((1, -(-width // 32)), -1, dtype=torch.int32, device=device)
    flags = torch.full((1,), sum(Edit), dtype=torch.int32, device=device)
    mask = forbidden if bool_mask else allowed
    return LogitEdits(additive=values, scaling=values, mask=mask, bias=values, rows=flags)
