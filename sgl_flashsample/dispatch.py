"""Which path and configuration a batch takes, and its launch: the only place that picks and runs a path.

Our own paths draw the same token for the same logits (near-ties of scores excepted): which one serves a batch is a
matter of speed alone. What differs between them is the logits: a GEMM of the vendor adds up in another order than the
fused pass, and may move a logit by a unit in its last place. FlashInfer draws other tokens of the same distribution
(``flashinfer_path.py``): it serves a batch where the table and the caller both allow that.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from .cpu_path import draws_in_host_memory, sample_on_cpu
from .defaults import HeadTraits, default_config, default_config_on, truncation_config
from .flashinfer_path import FlashInferError, draw_with_flashinfer, give_up, unsupported_batch
from .kernels.config import DEFAULT_TRUNCATION, ReadConfig, ScreenConfig, TruncationConfig
from .kernels.launch import is_compiling_only
from .kernels.lm_head_sample import lm_head_sample, workspace_slots
from .kernels.params import BatchParams, LMHead, SampleOutput
from .kernels.sample_logits import read_slots, sample_logits
from .kernels.screened_sample import screened_sample
from .kernels.workspace import Workspace
from .kinds import BATCH_KINDS, PLAIN, BatchKind, Config, SamplingPath, path_of
from .screen import Screen, unsupported_head

Tuned = Mapping[BatchKind, Mapping[int, Config]]  # batch size -> configuration

# Batches up to this size are looked up by place; a larger one takes the built-in choice of its size.
DENSE_ROWS = 512


class DispatchTable:
    """Which configuration batches of one head take: the built-in choices, or a tuned table on top of them. Immutable;
    resolved once, for every batch size that a server is prepared for.

    tuned: what differs from the built-in choices. measured: sizes that a tuned table has decided, for the built-in
    choice or another. A greedy batch that was not measured takes what a plain one takes; a batch with a screen that was
    not measured takes the screened path if that is its built-in choice, else what it would take without a screen.
    flashinfer: sizes of truncated batches that take the flashinfer path where their caller wants the distribution
    alone.
    screening: False leaves nothing to the screened path.
    """

    def __init__(
        self,
        traits: HeadTraits,
        tuned: Tuned | None = None,
        measured: Mapping[BatchKind, Collection[int]] | None = None,
        flashinfer: Collection[int] = (),
        *,
        screening: bool = True,
    ) -> None:
        self.traits, self.screening = traits, screening
        self.flashinfer = frozenset(flashinfer)
        self._tuned = {kind: dict((tuned or {}).get(kind, {})) for kind in BATCH_KINDS}
        self._measured = {
            kind: frozenset((measured or {}).get(kind, ())) | self._tuned[kind].keys() for kind in BATCH_KINDS
        }
        self._dense = {kind: tuple(self._resolve(rows, kind) for rows in range(DENSE_ROWS + 1)) for kind in BATCH_KINDS}
        self._checked: Callable[[], LMHead | None] = lambda: None  # weak: tables outlive heads

    def _resolve(self, num_rows: int, kind: BatchKind) -> Config:
        if kind.screen and not self.screening:
            return self._resolve(num_rows, kind.unscreened)
        config = self._tuned[kind].get(num_rows)
        if config is not None:
            return config
        default = self.default(num_rows, kind)
        if num_rows in self._measured[kind] or kind.fallback is None or isinstance(default, ScreenConfig):
            return default
        return self._resolve(num_rows, kind.fallback)

    def check(self, head: LMHead) -> None:
        """Raise ValueError unless this table is for heads with the traits of ``head``."""
        if head is not self._checked():
            if (traits := HeadTraits.of(head)) != self.traits:
                raise ValueError(f"table is for {self.traits}; expected one for the head's {traits}")
            self._checked = weakref.ref(head)

    @functools.cached_property
    def truncation_config(self) -> TruncationConfig:
        """How truncated rows are drawn, on any path."""
        return truncation_config(self.traits.family, self.traits.itemsize, self.traits.vocab_size)

    def lookup(self, num_rows: int, kind: BatchKind = PLAIN) -> Config:
        """What a batch takes: a tile of the fused path, a reader of the logits path or, for a kind with a screen, what
        the screened path launches."""
        return self._dense[kind][num_rows] if num_rows <= DENSE_ROWS else self.default(num_rows, kind)

    def lookup_on(self, path: SamplingPath, num_rows: int, kind: BatchKind = PLAIN) -> Config:
        """The configuration of a batch on a given path."""
        config = self.lookup(num_rows, kind)
        return config if path_of(config) is path else default_config_on(self.traits, path, num_rows, kind)

    def default(self, num_rows: int, kind: BatchKind = PLAIN) -> Config:
        """What a batch would take without a tuned table."""
        return default_config(self.traits, num_rows, kind if self.screening else kind.unscreened)

    def is_measured(self, num_rows: int, kind: BatchKind) -> bool:
        """Whether a tuned table has decided what such a batch takes."""
        if num_rows in self._measured[kind]:
            return True
        if kind.fallback is None or isinstance(self.default(num_rows, kind), ScreenConfig):
            return False
        return self.is_measured(num_rows, kind.fallback)

    def takes_flashinfer(self, num_rows: int, kind: BatchKind) -> bool:
        return num_rows in self.flashinfer and kind == BatchKind(truncate=True)

    def screened_rows(self, max_rows: int, *, measured: bool = False) -> int:
        """The rows of the largest batch of up to ``max_rows`` rows that is screened if its head has a screen; 0 where
        none is. measured: because a tuned table says so, not the built-in choice alone."""
        kinds = [kind for kind in BATCH_KINDS if kind.screen]
        for rows in range(max_rows, 0, -1):
            for kind in kinds:
                known = rows in self._measured[kind] or not measured
                if known and isinstance(self.lookup(rows, kind), ScreenConfig):
                    return rows
        return 0

    def configs_up_to(self, max_rows: int, *, screened: bool = False) -> Iterator[tuple[BatchKind, int, Config]]:
        """What batches of 1 to ``max_rows`` rows take, with a batch size that takes it. Kinds that launch the same
        kernels are listed once. screened: also of batches whose head has a screen."""
        seen: set[tuple[BatchKind, Config]] = set()
        for kind in BATCH_KINDS:
            if kind.screen and not screened:
                continue
            for num_rows in range(1, max_rows + 1):
                config = self.lookup(num_rows, kind)
                launched = (kind.launched(config), config)
                if launched not in seen:
                    seen.add(launched)
                    yield kind, num_rows, config

    def without(self, refused: Config, kind: BatchKind) -> DispatchTable:
        """The same with the built-in choice wherever ``kind`` takes ``refused``. Greedy and plain batches launch nearly
        the same kernels, and so do batches with and without a screen: what is refused for one is refused for all."""
        kernels = (kind.truncate, kind.edit)
        tuned = {
            other: {rows: c for rows, c in entries.items() if c != refused or (other.truncate, other.edit) != kernels}
            for other, entries in self._tuned.items()
        }
        return self._replaced(tuned=tuned)

    def without_flashinfer(self) -> DispatchTable:
        return self._replaced(flashinfer=())

    def without_screen(self) -> DispatchTable:
        """The same with nothing on the screened path."""
        return self._replaced(screening=False)

    def _replaced(
        self, tuned: Tuned | None = None, flashinfer: Collection[int] | None = None, screening: bool | None = None
    ) -> DispatchTable:
        return DispatchTable(
            self.traits,
            self._tuned if tuned is None else tuned,
            self._measured,
            self.flashinfer if flashinfer is None else flashinfer,
            screening=self.screening if screening is None else screening,
        )


@functools.lru_cache(maxsize=256)
def _default_table(traits: HeadTraits) -> DispatchTable:
    return DispatchTable(traits)


def default_table(head: LMHead) -> DispatchTable:
    """The built-in choices for ``head``. Raises ValueError on a device without any."""
    return _default_table(HeadTraits.of(head))


@functools.lru_cache(maxsize=256)
def reading_table(traits: HeadTraits) -> DispatchTable:
    """What ``api.sample_from_logits`` takes: of each kind and size, the built-in choice for logits in memory."""
    traits = traits._replace(hidden_size=0, has_gemm=True)
    sizes = range(1, DENSE_ROWS + 1)
    kinds = [kind for kind in BATCH_KINDS if not kind.screen]
    chosen = {
        kind: {rows: default_config_on(traits, SamplingPath.LOGITS, rows, kind) for rows in sizes} for kind in kinds
    }
    return DispatchTable(traits, chosen, screening=False)


def make_reading_workspace(
    traits: HeadTraits, max_rows: int, device: torch.device, searched: torch.Tensor | None = None
) -> Workspace:
    """Scratch for ``api.sample_from_logits`` of any batch of 1 to ``max_rows`` rows. searched: as in
    ``make_workspace``."""
    configs = {config for _, _, config in reading_table(traits).configs_up_to(max_rows)}
    slots = [read_slots(traits.vocab_size, max_rows, c, device) for c in configs if isinstance(c, ReadConfig)]
    return Workspace(max(slots), device, searched)


def unsupported_path(path: SamplingPath, head: LMHead) -> str | None:
    """Why ``path`` cannot serve ``head``; None where it can."""
    if path is SamplingPath.SCREENED:
        return unsupported_head(head)
    if path is not SamplingPath.FUSED and not head.gemm_gives_logits:
        return f"its GEMM gives {head.weight.dtype}, the head's logits are {head.rounding}"
    return None


def make_workspace(
    head: LMHead, max_rows: int, searched: torch.Tensor | None = None, table: DispatchTable | None = None
) -> Workspace:
    """Scratch for any batch of 1 to ``max_rows`` rows of ``head``, on the path that it takes: no such batch allocates
    more, except for the logits of truncated rows. The scratch of a screen is separate. searched: an existing counter to
    continue (``Workspace``)."""
    configs = {config for _, _, config in (table or default_table(head)).configs_up_to(max_rows, screened=True)}
    slots = max(slots_for(config, head, max_rows) for config in configs)
    workspace = Workspace(slots, head.weight.device, searched)
    reads = any(isinstance(config, ReadConfig) for config in configs)
    if reads or head.shards > 1 or (table is not None and table.flashinfer):
        workspace.gemm(max_rows, head.weight.shape[0], _gemm_dtype(head))
    return workspace


def slots_for(config: Config, head: LMHead, max_rows: int) -> int:
    """Slots that a ``Workspace`` needs for any batch of 1 to ``max_rows`` rows with this configuration."""
    if isinstance(config, ReadConfig):
        return read_slots(head.vocab_size, max_rows, config, head.weight.device)
    return 1 if isinstance(config, ScreenConfig) else workspace_slots(head, max_rows, config)


def launch(
    config: Config,
    hidden: torch.Tensor,  # [B, D], the weight's dtype
    head: LMHead,
    params: BatchParams,
    *,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
    screen: Screen | None = None,
    truncation_config: TruncationConfig = DEFAULT_TRUNCATION,
) -> SampleOutput:
    """Draw one token per row as ``config`` says; in host memory there is one way (``cpu_path.py``). screen: of
    ``head``, for a ``ScreenConfig``. Raises ValueError for arguments that do not fit."""
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


def sample(
    hidden: torch.Tensor,
    head: LMHead,
    params: BatchParams,
    *,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
    path: SamplingPath | str | None = None,
    table: DispatchTable | None = None,
    screen: Screen | None = None,
) -> SampleOutput:
    """``api.sample`` for an ``LMHead``: pick the configuration of this batch, and launch it."""
    path = None if path is None else SamplingPath(path)
    table = default_table(head) if table is None else table
    table.check(head)
    num_rows, truncation = hidden.shape[0], params.truncation
    kind = BatchKind(truncation is not None, params.edits is not None)
    kind = kind._replace(greedy=params.all_greedy and kind == PLAIN)
    if path is not None and (reason := unsupported_path(path, head)) is not None:
        raise ValueError(f"path is {path.value!r}, which cannot serve this head: {reason}")
    with on_device_of(hidden):
        if path is SamplingPath.FLASHINFER or (path is None and table.takes_flashinfer(num_rows, kind)):
            reason = unsupported_batch(head, params, return_logprob)
            if reason is None:
                logits = compute_logits(hidden, head, workspace or Workspace(1, hidden.device))
                try:
                    return draw_with_flashinfer(logits, head.spec, params)
                except FlashInferError as error:
                    if path is not None:
                        raise
                    give_up(error)  # a request must not fail because a path cannot serve it
            elif path is not None:
                raise ValueError(f"path is {path.value!r}, which cannot serve this batch: {reason}")
        if path in (None, SamplingPath.SCREENED):
            reason = _unsupported_by_screen(screen, head, num_rows, return_logprob)
            if reason is None and (path is not None or _has_small_top_k(params, table.truncation_config)):
                kind = kind._replace(screen=True)
            elif path is not None:
                raise ValueError(f"path is {path.value!r}, which cannot serve this batch: {reason}")
        config = table.lookup(num_rows, kind) if path is None else table.lookup_on(path, num_rows, kind)
        return launch(
            config,
            hidden,
            head,
            params,
            return_logprob=return_logprob,
            workspace=workspace,
            screen=screen,
            truncation_config=table.truncation_config,
        )


def _unsupported_by_screen(screen: Screen | None, head: LMHead, num_rows: int, return_logprob: bool) -> str | None:
    """Why ``screen`` cannot serve such a batch; None where it can."""
    if screen is None:
        return "its head has no screen"
    if return_logprob:
        return "logprobs are asked for"
    if num_rows > screen.max_rows:
        return f"it has {num_rows} rows, the screen is for {screen.max_rows}"
    return None if screen.serves(head) else "the screen is not of what the head holds now"


def _has_small_top_k(params: BatchParams, config: TruncationConfig) -> bool:
    """Whether every truncated row has a top-k that the screened path can serve. A row with a larger one would read the
    whole head after the screen."""
    if params.truncation is None:
        return True
    largest = params.truncation.max_top_k
    return largest is not None and largest <= config.max_small_top_k


def compute_logits(
    hidden: torch.Tensor, head: LMHead, workspace: Workspace, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``hidden @ weight.T`` in ``out``, else in the workspace's buffer, padding of the head included; float32 where
    logits are to be rounded to another dtype than the weight's."""
    head.check(hidden)
    logits = out if out is not None else workspace.gemm(hidden.shape[0], head.weight.shape[0], _gemm_dtype(head))
    hidden, weight = hidden.detach(), head.weight.detach()
    if is_compiling_only():
        return logits
    if head.gemm_gives_logits:
        return torch.mm(hidden, weight.T, out=logits)
    if weight.is_cuda:  # coverage: needs a GPU
        return torch.mm(hidden, weight.T, out_dtype=torch.float32, out=logits)
    return torch.mm(hidden.float(), weight.float().T, out=logits)


def _gemm_dtype(head: LMHead) -> torch.dtype:
    return head.weight.dtype if head.gemm_gives_logits else torch.float32


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels run on the current device: make that the tensor's."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()
