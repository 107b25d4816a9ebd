"""The launch of a given configuration: one way to do the last step for one batch. ``Head`` chooses the configuration;
the self-check and the tuner try each of them.

FlashInfer draws other tokens of the same distribution (``flashinfer_path.py``): it serves a batch where the table and
the caller both allow that.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from .cpu_path import draws_in_host_memory, sample_on_cpu
from .defaults import HeadTraits, default_config_on, family_of_device, truncation_config
from .dispatch import DispatchTable, default_table
from .flashinfer_path import draw_with_flashinfer
from .kernels.config import DEFAULT_TRUNCATION, ReadConfig, ScreenConfig, TruncationConfig
from .kernels.launch import is_compiling_only
from .kernels.lm_head_sample import lm_head_sample, workspace_slots
from .kernels.logit_summary import LogitRows
from .kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput
from .kernels.sample_logits import read_slots, sample_logits
from .kernels.screened_sample import screened_sample
from .kernels.workspace import LogprobWorkspace, Workspace
from .kinds import BatchKind, Config, SamplingPath
from .logprobs import Logprobs, WantedLogprobs, read_logprobs
from .screen import Screen, unsupported_head


class Parts(NamedTuple):
    """A launch takes these beside a batch. truncation_config: how truncated rows are drawn. workspace: scratch to
    reuse; None to allocate it in each launch. screen: of ``lm_head``, for a ``ScreenConfig``."""

    lm_head: LMHead
    truncation_config: TruncationConfig = DEFAULT_TRUNCATION
    workspace: Workspace | None = None
    screen: Screen | None = None

    @classmethod
    def of(
        cls,
        lm_head: LMHead,
        screen: Screen | None = None,
        table: DispatchTable | None = None,
        workspace: Workspace | None = None,
    ) -> Parts:
        """With the truncation of ``table``; of the built-in choices when None."""
        table = default_table(lm_head) if table is None else table
        return cls(lm_head, table.truncation_config, workspace, screen)


def launch(
    config: Config,
    hidden: torch.Tensor,  # [B, D], the weight's dtype
    params: BatchParams,
    parts: Parts,
    *,
    return_logprob: bool = False,
) -> SampleOutput:
    """Draw one token per row as ``config`` says; in host memory there is one way (``cpu_path.py``). Raises ValueError
    for arguments that do not fit."""
    head, truncation_config, workspace, screen = parts
    if draws_in_host_memory(hidden.device):
        logits = compute_logits(hidden, head, workspace or Workspace(1, hidden.device))
        return sample_on_cpu(logits, head.spec, params, return_logprob=return_logprob)
    if isinstance(config, ScreenConfig):
        if screen is None or return_logprob:
            raise ValueError("the screened path needs a screen, and returns no logprobs")
        return screened_sample(
            hidden,
            head,
            screen.int8_head,
            params,
            config,
            workspace=screen.workspace,
            head_workspace=workspace,
            truncation_config=truncation_config,
        )
    if isinstance(config, ReadConfig):
        if workspace is None:
            workspace = Workspace(slots_for(config, head, max(1, hidden.shape[0])), hidden.device)
        return sample_logits(
            compute_logits(hidden, head, workspace),
            head.spec,
            params,
            config,
            return_logprob=return_logprob,
            workspace=workspace,
            truncation_config=truncation_config,
        )
    return lm_head_sample(
        hidden,
        head,
        params,
        config,
        return_logprob=return_logprob,
        workspace=workspace,
        truncation_config=truncation_config,
    )


def launch_with_logprobs(
    hidden: torch.Tensor,  # [B, D], the weight's dtype
    params: BatchParams,
    parts: Parts,
    wanted: WantedLogprobs,
    workspace: LogprobWorkspace | None = None,
) -> tuple[SampleOutput, Logprobs]:
    """Draw one token per row from the logits of a GEMM, and read the logprobs that are wanted from them. Raises
    ValueError for arguments that do not fit."""
    head, num_rows = parts.lm_head, max(1, hidden.shape[0])
    config = default_config_on(HeadTraits.of(head), SamplingPath.LOGITS, num_rows, BatchKind.of(params))
    assert isinstance(config, ReadConfig)
    scratch = parts.workspace or Workspace(slots_for(config, head, num_rows), hidden.device)
    logits = compute_logits(hidden, head, scratch)
    drawn = sample_logits(
        logits,
        head.spec,
        params,
        config,
        return_logprob=not wanted.original,
        workspace=scratch,
        truncation_config=parts.truncation_config,
    )
    rows = LogitRows(logits, head.spec, params, original=wanted.original, workspace=workspace)
    return drawn, read_logprobs(rows, drawn.token_ids, wanted, None if wanted.original else drawn)


def launch_flashinfer(hidden: torch.Tensor, params: BatchParams, parts: Parts) -> SampleOutput:
    """Draw one token per row by FlashInfer's rejection sampling. Raises FlashInferError where it cannot."""
    workspace = parts.workspace or Workspace(1, hidden.device)
    return draw_with_flashinfer(compute_logits(hidden, parts.lm_head, workspace), parts.lm_head.spec, params)


def read_logits(
    logits: torch.Tensor,  # [B, V] or wider
    spec: LogitsSpec,
    params: BatchParams,
    workspace: Workspace | None,
    *,
    return_logprob: bool = False,
) -> SampleOutput:
    """Draw one token per row of logits that are in memory, as the built-in choice for them says."""
    if draws_in_host_memory(logits.device):
        return sample_on_cpu(logits, spec, params, return_logprob=return_logprob)
    family, itemsize = family_of_device(logits.device), max(2, logits.element_size())
    kind = BatchKind.of(params)._replace(greedy=False)
    traits = HeadTraits(family, itemsize, spec.vocab_size, hidden_size=0)
    config = default_config_on(traits, SamplingPath.LOGITS, logits.shape[0], kind)
    assert isinstance(config, ReadConfig)
    with on_device_of(logits):
        return sample_logits(
            logits,
            spec,
            params,
            config,
            return_logprob=return_logprob,
            workspace=workspace,
            truncation_config=truncation_config(family, itemsize, spec.vocab_size),
        )


def unsupported_path(path: SamplingPath, head: LMHead) -> str | None:
    """Why ``path`` cannot serve ``head``; None where it can."""
    if path is SamplingPath.SCREENED:
        return unsupported_head(head)
    if path is not SamplingPath.FUSED and not head.gemm_gives_logits:
        return f"its GEMM gives {head.weight.dtype}, the head's logits are {head.rounding}"
    return None


def slots_for(config: Config, head: LMHead, max_rows: int) -> int:
    """Slots that a ``Workspace`` needs for any batch of 1 to ``max_rows`` rows with this configuration."""
    if isinstance(config, ReadConfig):
        return read_slots(head.vocab_size, max_rows, config, head.weight.device)
    return 1 if isinstance(config, ScreenConfig) else workspace_slots(head, max_rows, config)


def compute_logits(
    hidden: torch.Tensor, head: LMHead, workspace: Workspace, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``hidden @ weight.T`` in ``out``, else in the workspace's buffer, padding of the head included; float32 where
    logits are to be rounded to another dtype than the weight's."""
    head.check(hidden)
    logits = out if out is not None else workspace.gemm(hidden.shape[0], head.weight.shape[0], gemm_dtype(head))
    hidden, weight = hidden.detach(), head.weight.detach()
    if is_compiling_only():
        return logits
    if head.gemm_gives_logits:
        return torch.mm(hidden, weight.T, out=logits)
    if weight.is_cuda:  # coverage: needs a GPU
        return torch.mm(hidden, weight.T, out_dtype=torch.float32, out=logits)
    return torch.mm(hidden.float(), weight.float().T, out=logits)


def gemm_dtype(head: LMHead) -> torch.dtype:
    """The dtype of ``compute_logits``."""
    return head.weight.dtype if head.gemm_gives_logits else torch.float32


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels run on the current device: make that the tensor's."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
