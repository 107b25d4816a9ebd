"""The launch of a given configuration: one way to do the last step for one batch. ``Head`` chooses the configuration;
the self-check and the tuner try each of them.

FlashInfer draws other tokens of the same distribution (``flashinfer_path.py``): it serves a batch where the table and
the caller both allow that.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import torch

from . import invariant
from .cpu_path import draws_in_host_memory, sample_on_cpu
from .defaults import HeadTraits, default_config_on, family_of_device, truncation_config
from .dispatch import default_table, reading_table
from .flashinfer_path import draw_with_flashinfer
from .kernels.config import (
    DEFAULT_TRUNCATION,
    GROUP_SIZE,
    MIN_RESCORED_ROWS,
    ReadConfig,
    ScreenConfig,
    TileConfig,
    TruncationConfig,
    cdiv,
)
from .kernels.gather_logprobs import head_logprobs
from .kernels.launch import is_compiling_only
from .kernels.lm_head_sample import lm_head_sample, num_splits, workspace_slots
from .kernels.logit_summary import LogitRows
from .kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput, check_tensor
from .kernels.reference import transform_ref
from .kernels.sample_logits import read_slots, sample_logits
from .kernels.sample_own_ids import OwnIds, sample_own_ids
from .kernels.screened_sample import screened_sample
from .kernels.workspace import LogprobWorkspace, Workspace
from .kinds import BatchKind, Config, SamplingPath
from .logprobs import Logprobs, WantedLogprobs, check_wanted, read_logprobs
from .screen import Screen, unsupported_head

MAX_CHUNK_ROWS = 1024  # of a prompt, whose logits are in memory at a time
MAX_CHUNK_BYTES = 384_000_000  # of these logits, and of the scratch that a batch-invariant head takes beside them
# Given ids are read from the head where they are at most one of so many of its rows: 3 % of a fused pass's bytes.
HEAD_ROWS_PER_READ = 32
CONVERTED_WEIGHTS = 2**25  # of a quantised head, in memory as hidden_dtype at a time


class Parts(NamedTuple):
    """A launch takes these beside a batch. truncation_config: how truncated rows are drawn. workspace: scratch to
    reuse; None to allocate it in each launch. screen: of ``lm_head``, for a ``ScreenConfig``. readers: scratch to reuse
    for logprobs beside those of the tokens; None to allocate it in each launch."""

    lm_head: LMHead
    truncation_config: TruncationConfig = DEFAULT_TRUNCATION
    workspace: Workspace | None = None
    screen: Screen | None = None
    readers: LogprobWorkspace | None = None

    @classmethod
    def of(cls, lm_head: LMHead, screen: Screen | None = None, workspace: Workspace | None = None) -> Parts:
        """With the truncation of such heads. Raises ValueError on a device without kernels."""
        return cls(lm_head, default_table(lm_head).truncation_config, workspace, screen)

    def with_scratch(self, configs: Iterable[Config], max_rows: int) -> Parts:
        """With scratch for batches of up to ``max_rows`` rows that take one of ``configs``, or a GEMM alone: the same
        where it is large enough, else new."""
        kept, slots = self.workspace, max((slots_for(config, self.lm_head, max_rows) for config in configs), default=1)
        if kept is not None and kept.slots >= slots:
            return self
        searched = None if kept is None else kept.searched
        return self._replace(workspace=Workspace(slots, self.lm_head.weight.device, searched))


class LogprobScratch(NamedTuple):
    """The scratch of draws from logits in memory, with logprobs beside those of the tokens."""

    draw: Workspace
    rows: LogprobWorkspace

    @classmethod
    def for_rows(
        cls, max_rows: int, traits: HeadTraits, device: torch.device, searched: torch.Tensor | None = None
    ) -> LogprobScratch:
        """For up to ``max_rows`` rows of the logits of such a head. searched: as in ``Workspace``."""
        configs = {config for _, _, config in reading_table(traits).configs_up_to(max_rows)}
        vocab_size = traits.vocab_size
        slots = [read_slots(vocab_size, max_rows, one, device) for one in configs if isinstance(one, ReadConfig)]
        return cls(Workspace(max(slots), device, searched), LogprobWorkspace(max_rows, vocab_size, device))


def launch(
    config: Config,
    hidden: torch.Tensor,  # [B, D], the head's hidden_dtype
    params: BatchParams,
    parts: Parts,
    *,
    return_logprob: bool = False,
) -> SampleOutput:
    """Draw one token per row as ``config`` says; in host memory there is one way (``cpu_path.py``). Raises ValueError
    for arguments that do not fit."""
    head, truncation_config, workspace, screen, _ = parts
    if head.batch_invariant and return_logprob:
        return launch_with_logprobs(hidden, params, parts, WantedLogprobs())[0]
    if draws_in_host_memory(hidden.device):
        if head.batch_invariant:
            raise ValueError("hidden is in host memory; expected it on a GPU with a batch-invariant head")
        logits = compute_logits(hidden, head, workspace)
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


def reads_ids_from_head(config: Config, num_rows: int, head: LMHead, wanted: WantedLogprobs) -> bool:
    """True where a batch that would take ``config`` without logprobs keeps it, and only the head's rows with the given
    ids are read again: the log-mass is that of the draw."""
    ids = wanted.token_ids
    if wanted.top or ids is None or not wanted.are_of_draw or not isinstance(config, TileConfig):
        return False
    # ``head_logprobs`` reads rows without their scale, and by other tiles than those of a batch-invariant head.
    if head.scale is not None or head.batch_invariant:
        return False
    lists = num_rows if ids.shape[0] == num_rows else cdiv(num_rows, MIN_RESCORED_ROWS)
    return lists * ids.shape[1] * HEAD_ROWS_PER_READ <= head.vocab_size


def launch_with_ids(
    config: Config,
    hidden: torch.Tensor,  # [B, D], the head's hidden_dtype
    params: BatchParams,
    parts: Parts,
    wanted: WantedLogprobs,
) -> tuple[SampleOutput, Logprobs]:
    """Draw one token per row as ``config`` says, and read the logprobs of given ids from the head's rows with these
    ids. Raises ValueError for arguments that do not fit."""
    drawn = launch(config, hidden, params, parts, return_logprob=True)
    assert wanted.token_ids is not None and drawn.log_mass is not None
    # The token's is read with the others: the same number, bit for bit, as that of the same id.
    of_ids, of_tokens = (
        head_logprobs(hidden, parts.lm_head, ids, drawn.log_mass, params)
        for ids in (wanted.token_ids, drawn.token_ids[:, None])
    )
    return drawn, Logprobs(of_tokens[:, 0], None, of_ids, drawn.log_mass)


def launch_with_logprobs(
    hidden: torch.Tensor,  # [B, D], the head's hidden_dtype
    params: BatchParams,
    parts: Parts,
    wanted: WantedLogprobs,
) -> tuple[SampleOutput, Logprobs]:
    """Draw one token per row from the logits of a GEMM, of a batch-invariant head from those of its tile, and read the
    logprobs that are wanted from them. Raises ValueError for arguments that do not fit."""
    head, num_rows = parts.lm_head, max(1, hidden.shape[0])
    head.check(hidden)
    path = SamplingPath.FUSED if head.batch_invariant else SamplingPath.LOGITS
    config = default_config_on(HeadTraits.of(head), path, num_rows, BatchKind.of(params))
    parts = parts.with_scratch([config], num_rows)
    known = wanted.are_of_draw and not head.batch_invariant
    drawn = launch(config, hidden, params, parts, return_logprob=known)
    if not head.batch_invariant:
        assert parts.workspace is not None
        logits = parts.workspace.gemm(len(hidden), head.weight.shape[0], gemm_dtype(head))  # the launch has written it
        return drawn, _read_beside(logits, head.spec, params, drawn, wanted, parts.readers)
    found = Logprobs.empty(wanted, 0, hidden.device)
    if len(hidden):
        rows = invariant.rows_left(parts, invariant.at_wanted_temperatures(params, wanted))
        found = read_logprobs(rows, drawn.token_ids, wanted)
    if wanted.are_of_draw:
        drawn = drawn._replace(logprobs=found.of_tokens, log_mass=found.log_mass)
    return drawn, found


def _read_beside(
    logits: torch.Tensor,
    spec: LogitsSpec,
    params: BatchParams,
    drawn: SampleOutput,
    wanted: WantedLogprobs,
    readers: LogprobWorkspace | None,
) -> Logprobs:
    """The logprobs that are wanted of the logits that ``drawn`` is of."""
    if wanted.temperature is not None:
        params = dataclasses.replace(params, temperature=wanted.temperature)
    rows = LogitRows(logits, spec, params, original=wanted.original, workspace=readers)
    return read_logprobs(rows, drawn.token_ids, wanted, drawn if wanted.are_of_draw else None)


def logprobs_in_chunks(
    hidden: torch.Tensor,  # [T, D], the head's hidden_dtype
    token_ids: torch.Tensor,  # [T] int64
    parts: Parts,
    wanted: WantedLogprobs,
    chunk_rows: int,
) -> Logprobs:
    """The logprobs that are wanted of all rows at temperature 1, from the logits of so many rows at a time, or fewer
    where ``MAX_CHUNK_BYTES`` says so. Raises ValueError for arguments that do not fit."""
    head, num_rows = parts.lm_head, hidden.shape[0]
    head.check(hidden)
    check_wanted(wanted, num_rows, hidden)
    check_tensor("token_ids", token_ids, (num_rows,), torch.int64, hidden)
    found = Logprobs.empty(wanted, num_rows, hidden.device)
    row_bytes = cdiv(head.weight.shape[0], GROUP_SIZE) * GROUP_SIZE * gemm_dtype(head).itemsize
    if head.batch_invariant:
        row_bytes = invariant.row_bytes(head)
    most = max(1, min(chunk_rows, MAX_CHUNK_BYTES // row_bytes))
    size = cdiv(num_rows, cdiv(num_rows, most)) if num_rows else 1  # chunks of one size, as near as it may be
    # Scratch of this call alone: a prompt must not leave behind what a step of decoding never needs.
    parts = parts._replace(workspace=None, readers=LogprobWorkspace(size, head.vocab_size, hidden.device))
    parts = parts.with_scratch([invariant.tile_of(head)] if head.batch_invariant else [], size)
    for start in range(0, num_rows, size):
        stop = min(start + size, num_rows)
        rows = _rows_of_prompt(hidden[start:stop], parts)
        found.store(start, read_logprobs(rows, token_ids[start:stop], wanted.rows(start, stop, num_rows)))
    return found


def _rows_of_prompt(hidden: torch.Tensor, parts: Parts) -> LogitRows:
    """The logits of the head at temperature 1, in the scratch of ``parts``."""
    head = parts.lm_head
    if not head.batch_invariant:
        return LogitRows(compute_logits(hidden, head, parts.workspace), head.spec, workspace=parts.readers)
    params = invariant.params_of_prompt(hidden)
    launch(invariant.tile_of(head), hidden, params, parts)
    return invariant.rows_left(parts, params)


def launch_flashinfer(hidden: torch.Tensor, params: BatchParams, parts: Parts) -> SampleOutput:
    """Draw one token per row by FlashInfer's rejection sampling. Raises FlashInferError where it cannot."""
    return draw_with_flashinfer(compute_logits(hidden, parts.lm_head, parts.workspace), parts.lm_head.spec, params)


def read_logits(
    logits: torch.Tensor,  # [B, V] or wider
    spec: LogitsSpec,
    params: BatchParams,
    workspace: Workspace | None = None,
    *,
    return_logprob: bool = False,
) -> SampleOutput:
    """Draw one token per row of logits that are in memory, as the built-in choice for them says."""
    if draws_in_host_memory(logits.device):
        return sample_on_cpu(logits, spec, params, return_logprob=return_logprob)
    family, itemsize, config = _reader_of(logits, spec, params)
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


def _reader_of(logits: torch.Tensor, spec: LogitsSpec, params: BatchParams) -> tuple[str, int, ReadConfig]:
    """The family of the device, bytes per logit, and the built-in choice of a reader."""
    family, itemsize = family_of_device(logits.device), max(2, logits.element_size())
    kind = BatchKind.of(params)._replace(greedy=False)
    traits = HeadTraits(family, itemsize, spec.vocab_size, hidden_size=0)
    config = default_config_on(traits, SamplingPath.LOGITS, logits.shape[0], kind)
    assert isinstance(config, ReadConfig)
    return family, itemsize, config


def read_own_ids(
    logits: torch.Tensor,  # [B, H] or wider
    own: OwnIds,
    spec: LogitsSpec,
    params: BatchParams,
    workspace: Workspace | None = None,
) -> SampleOutput:
    """Draw one of the ids in ``own`` per row of their logits; in host memory through rows as wide as the vocabulary."""
    if draws_in_host_memory(logits.device):
        rounding = logits.dtype if spec.logits_dtype is None else spec.logits_dtype
        options = {"logit_scale": spec.logit_scale, "softcap": spec.softcap}
        seen = transform_ref(logits[:, : own.size].double(), rounding, **options).float()
        wide = seen.new_full((len(logits), own.vocab_size), float("-inf"))
        wide.index_copy_(1, own.token_ids[: own.size], seen)
        return sample_on_cpu(wide, LogitsSpec(own.vocab_size), params)
    with on_device_of(logits):
        return sample_own_ids(logits, own, spec, params, _reader_of(logits, spec, params)[2], workspace=workspace)


def read_logits_with_logprobs(
    logits: torch.Tensor,
    spec: LogitsSpec,
    params: BatchParams,
    wanted: WantedLogprobs,
    scratch: LogprobScratch | None = None,
) -> tuple[SampleOutput, Logprobs]:
    """``read_logits``, and the logprobs that are wanted of the same logits."""
    workspace, readers = scratch or (None, None)
    drawn = read_logits(logits, spec, params, workspace, return_logprob=wanted.are_of_draw)
    with on_device_of(logits):
        return drawn, _read_beside(logits, spec, params, drawn, wanted, readers)


def read_logprobs_of_prompt(
    logits: torch.Tensor,
    spec: LogitsSpec,
    token_ids: torch.Tensor,
    wanted: WantedLogprobs,
    readers: LogprobWorkspace | None = None,
) -> Logprobs:
    """The logprobs that are wanted of logits that are in memory, at temperature 1. token_ids: ``[B]`` int64, the token
    of each row."""
    return read_logprobs(LogitRows(logits, spec, workspace=readers), token_ids, wanted)


def unsupported_path(path: SamplingPath, head: LMHead) -> str | None:
    """Why ``path`` cannot serve ``head``; None where it can."""
    if head.batch_invariant and path is not SamplingPath.FUSED:
        return "a batch-invariant head takes the fused path alone"
    if path is SamplingPath.SCREENED:
        return unsupported_head(head)
    if path is not SamplingPath.FUSED and not head.gemm_gives_logits:
        return f"its GEMM gives {head.hidden_dtype}, the head's logits are {head.rounding}"
    return None


def slots_for(config: Config, head: LMHead, max_rows: int) -> int:
    """Slots that a ``Workspace`` needs for any batch of 1 to ``max_rows`` rows with this configuration."""
    if isinstance(config, ReadConfig):
        return read_slots(head.vocab_size, max_rows, config, head.weight.device)
    if isinstance(config, ScreenConfig):
        return 1
    if head.batch_invariant:  # as many splits for every batch; asked in a step
        return num_splits(head, max_rows, config) * max_rows
    return workspace_slots(head, max_rows, config)


def compute_logits(
    hidden: torch.Tensor, head: LMHead, workspace: Workspace | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``hidden @ weight.T`` in ``out``, else in the workspace's buffer, else in memory of its own, padding of the head
    included; float32 where logits are to be rounded to another dtype than that of the hidden states."""
    head.check(hidden)
    if head.batch_invariant:
        raise ValueError("head is batch-invariant; expected one whose logits may come from a GEMM of the vendor")
    logits = out
    if logits is None:
        workspace = workspace or Workspace(1, hidden.device)
        logits = workspace.gemm(hidden.shape[0], head.weight.shape[0], gemm_dtype(head))
    hidden, weight = hidden.detach(), head.weight.detach()
    if is_compiling_only():
        return logits
    if head.scale is not None:
        # Converted, the weight has no rounding: the scale comes after the sum, as in the fused pass. A part at a time.
        size = max(1, CONVERTED_WEIGHTS // weight.shape[1])
        for start in range(0, weight.shape[0], size):
            ids = slice(start, start + size)
            sums = _products(hidden, weight[ids].to(hidden.dtype))
            torch.mul(sums, head.scale[ids], out=logits[:, ids])
        return logits
    if head.gemm_gives_logits:
        return torch.mm(hidden, weight.T, out=logits)
    return _products(hidden, weight, logits)


def _products(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``hidden @ weight.T`` in float32."""
    if weight.is_cuda:  # coverage: needs a GPU
        return torch.mm(hidden, weight.T, out_dtype=torch.float32, out=out)
    return torch.mm(hidden.float(), weight.float().T, out=out)


def gemm_dtype(head: LMHead) -> torch.dtype:
    """The dtype of ``compute_logits``."""
    return head.hidden_dtype if head.gemm_gives_logits else torch.float32


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels run on the current device: make that the tensor's."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
