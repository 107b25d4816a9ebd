"""``Head``: the only door between code that asks for tokens and code that draws them."""

from __future__ import annotations

import copy
import logging
import os

import torch

from . import paths, selfcheck
from .cpu_path import draws_in_host_memory, unsupported_by_machine
from .defaults import HeadTraits
from .dispatch import DispatchTable, default_table, reading_table
from .draft_children import children_of_hidden, children_of_own_ids
from .flashinfer_path import FlashInferError, give_up, unsupported_batch
from .kernels.config import ReadConfig
from .kernels.draft_children import Children
from .kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput
from .kernels.sample_own_ids import OwnIds
from .kernels.workspace import LogprobWorkspace, Workspace
from .kinds import BatchKind, Config, SamplingPath
from .logprobs import Logprobs, WantedLogprobs, check_wanted
from .paths import LogprobScratch
from .screen import Screen
from .tables.lookup import resolve

logger = logging.getLogger("sgl_flashsample")

MAX_ROWS = 1 << 16  # of a batch that scratch is kept for: more is a mistake, and takes minutes to look up


class Head:
    """One LM head on one device, ready to draw: weights, dispatch table, scratch and, where wanted, a screen.

        head = Head.tuned(LMHead(weight, vocab_size=151_643), max_rows=64)
        out = head.draw(hidden, params)

    lm_head: an ``LMHead``, or its ``[V, D]`` weight. A weight that its module or its place in memory gets later is
    followed. max_rows: rows of the largest batch that scratch is kept for; a larger batch, and every batch where it is
    0, allocates scratch of its own. table: the configuration of each batch; the built-in choices when None. screen: an
    INT8 copy of the head (``Screen``), from which batches without logprobs are drawn where ``table`` has that as the
    fastest; it serves nothing while it is stale or too small for the batch. searched: an existing ``[1]`` int64 counter
    to go on with, of truncated rows that took a search. announces_changes: the caller calls ``replace`` for a weight in
    another place; a draw then does not look for one, which takes the host a microsecond.

    Calls share the scratch: make them on one stream of the device. Before a CUDA graph is captured, call once with a
    batch of the same size and kind: that compiles the kernels, and scratch for truncated rows grows with the first
    batch that needs it.

    Raises ValueError for a head that cannot be served, for a table of another shape of head, and on a machine without a
    device for the kernels.
    """

    def __init__(
        self,
        lm_head: LMHead | torch.Tensor,
        *,
        max_rows: int = 0,
        table: DispatchTable | None = None,
        screen: Screen | None = None,
        workspace: Workspace | None = None,
        searched: torch.Tensor | None = None,
        announces_changes: bool = False,
    ) -> None:
        if type(max_rows) is not int or not 0 <= max_rows <= MAX_ROWS:
            raise ValueError(f"max_rows is {max_rows!r}; expected an integer, 0 to {MAX_ROWS}")
        lm_head = lm_head if isinstance(lm_head, LMHead) else LMHead(lm_head)
        for name, value, kind in (("table", table, DispatchTable), ("screen", screen, Screen)):
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} is {value!r}; expected a {kind.__name__} or None")
        self._table = default_table(lm_head) if table is None else table
        self._table.check(lm_head)
        self._parts = paths.Parts(lm_head, self._table.truncation_config, workspace, screen)
        self.max_rows, self._searched, self._announces_changes = 0, searched, announces_changes
        self._rows_scratch: LogprobScratch | None = None
        self._logprob_scratch: LogprobScratch | None = None
        if max_rows:
            self.grow(max_rows)

    @classmethod
    def tuned(
        cls,
        lm_head: LMHead | torch.Tensor,
        *,
        max_rows: int = 0,
        screen: bool = False,
        file: str | os.PathLike[str] | None = None,
    ) -> Head:
        """A head with the tuned table that fits it on this machine. screen: with a screen for batches of up to
        ``max_rows`` rows, 1 or more. file: the tuned table, instead of the one that fits. A table that cannot be used
        is a warning in the log, and the built-in choices serve."""
        lm_head = lm_head if isinstance(lm_head, LMHead) else LMHead(lm_head)
        resolved = resolve(lm_head, file=file)
        for warning in resolved.warnings:
            logger.warning("flashsample: %s", warning)
        built = Screen(lm_head, max_rows) if screen else None
        return cls(lm_head, max_rows=max_rows, table=resolved.dispatch, screen=built)

    @property
    def lm_head(self) -> LMHead:
        """The head that is drawn from, with the weight that it has by now."""
        if self._announces_changes:
            return self._parts.lm_head
        lm_head = self._parts.lm_head.current
        if lm_head is not self._parts.lm_head:
            self._parts = self._parts._replace(lm_head=lm_head)
        return lm_head

    @property
    def table(self) -> DispatchTable:
        return self._table

    @table.setter
    def table(self, table: DispatchTable) -> None:
        self._table = table
        self._parts = self._parts._replace(truncation_config=table.truncation_config)
        kept, lm_head, max_rows = self._parts.workspace, self._parts.lm_head, self.max_rows
        if max_rows and kept is not None and table.traits.unmodelled == HeadTraits.of(lm_head).unmodelled:
            slots = (paths.slots_for(config, lm_head, max_rows) for config in self._configs_up_to(max_rows))
            if kept.slots < max(slots):
                self.grow(max_rows)

    @property
    def screen(self) -> Screen | None:
        return self._parts.screen

    @screen.setter
    def screen(self, screen: Screen | None) -> None:
        if screen is not self._parts.screen:
            self._parts = self._parts._replace(screen=screen)

    @property
    def parts(self) -> paths.Parts:
        """The head and its screen, for launches of given configurations (``paths.launch``) with scratch of their
        own."""
        return self._parts._replace(lm_head=self.lm_head, workspace=None)

    def twin(self, max_rows: int = 0) -> Head:
        """The same head and table without a screen, with scratch of its own for up to ``max_rows`` rows; where that is
        0, with the scratch that this one has by now."""
        twin = copy.copy(self)
        twin._parts = self._parts._replace(lm_head=self.lm_head, screen=None)
        twin.max_rows, twin._searched, twin._rows_scratch, twin._logprob_scratch = 0, None, None, None
        if max_rows:
            twin.grow(max_rows)
        return twin

    @property
    def workspaces(self) -> list[Workspace]:
        """The scratch of all draws, but that of the screen."""
        rows, logprobs = (None if one is None else one.draw for one in (self._rows_scratch, self._logprob_scratch))
        kept = (self._parts.workspace, rows, logprobs)
        return list(dict.fromkeys(one for one in kept if one is not None))

    @property
    def logprob_scratch(self) -> LogprobScratch | None:
        """Scratch of logprobs beside those of the tokens; None before ``reserve_logprobs``."""
        return self._logprob_scratch

    @property
    def searched(self) -> torch.Tensor | None:
        """``[1]`` int64 on the device: truncated rows that took a search over their logits; None without scratch."""
        return self._searched

    @property
    def num_bytes(self) -> int:
        """Device memory that the scratch and the screen take."""
        screen = self.screen
        scratch = sum(workspace.num_bytes for workspace in self.workspaces)
        scratch += sum(one.rows.num_bytes for one in (self._rows_scratch, self._logprob_scratch) if one is not None)
        return scratch + (0 if screen is None or screen.closed else screen.num_bytes)

    def draw(
        self,
        hidden: torch.Tensor,
        params: BatchParams,
        *,
        return_logprob: bool = False,
        path: SamplingPath | str | None = None,
    ) -> SampleOutput:
        """Draw ``token[b] ~ softmax(logits[b] / temperature[b])``, exactly (FlashSampling paper, section 3.2).

        hidden: ``[B, D]``, contiguous rows, the head's dtype and device. params: per-row temperature, seed, position,
        edits and truncation. return_logprob: also compute the token's log-probability. path: the path to take; None for
        the one that the table has as the fastest.

        The token depends on (logits row, seed, position) alone (``SamplingPath.FLASHINFER`` apart). Never synchronises.
        Raises ValueError for a tensor of another shape, dtype, layout or device, and for a path that cannot serve the
        head or the batch.
        """
        check_rows("hidden", hidden)
        check_params(params)
        lm_head, table = self.lm_head, self._table
        table.check(lm_head)
        if lm_head.batch_invariant and return_logprob and path is None:  # with the scratch that is kept for logprobs
            return self.draw_with_logprobs(hidden, params, WantedLogprobs())[0]
        num_rows, kind = hidden.shape[0], BatchKind.of(params)
        with paths.on_device_of(hidden):
            if path is not None:
                return self._draw_on(SamplingPath(path), hidden, params, kind, return_logprob)
            if table.takes_flashinfer(num_rows, kind) and unsupported_batch(lm_head, params, return_logprob) is None:
                try:
                    return paths.launch_flashinfer(hidden, params, self._parts_for(num_rows))
                except FlashInferError as error:  # a request must not fail because a path cannot serve it
                    give_up(error)
            if self._has_small_top_k(params) and self._unsupported_by_screen(num_rows, return_logprob) is None:
                kind = kind.screened
            config = table.lookup(num_rows, kind)
            return paths.launch(config, hidden, params, self._parts_for(num_rows), return_logprob=return_logprob)

    def draw_children(self, hidden: torch.Tensor, params: BatchParams, number: int) -> Children:
        """The token that ``draw`` gives each row, and the ids that are next best at its perturbed scores, for a tree of
        drafts (``kernels/draft_children.py``): ``number`` ids, 2 to 8.

        hidden, params: as in ``draw``, without a truncation and edits. No screen serves it. Never synchronises. Raises
        ValueError as ``draw``, for another number, and for a batch-invariant head.
        """
        check_rows("hidden", hidden)
        check_params(params)
        lm_head = self.lm_head
        self._table.check(lm_head)
        if lm_head.batch_invariant:
            raise ValueError("the head is batch-invariant; expected one whose batches take any configuration")
        config = self._table.lookup(len(hidden), BatchKind.of(params))
        with paths.on_device_of(hidden):
            return children_of_hidden(config, hidden, params, self._parts_for(len(hidden)), number)

    def _parts_for(self, num_rows: int) -> paths.Parts:
        """Without the kept scratch where that is for fewer rows: captured graphs go on using it."""
        return self._parts if num_rows <= self.max_rows or not self.max_rows else self._parts._replace(workspace=None)

    def _draw_on(
        self, path: SamplingPath, hidden: torch.Tensor, params: BatchParams, kind: BatchKind, return_logprob: bool
    ) -> SampleOutput:
        lm_head, num_rows = self._parts.lm_head, hidden.shape[0]
        if (reason := paths.unsupported_path(path, lm_head)) is not None:
            raise ValueError(f"path is {path.value!r}, which cannot serve this head: {reason}")
        if path is SamplingPath.FLASHINFER:
            reason = unsupported_batch(lm_head, params, return_logprob)
        elif path is SamplingPath.SCREENED:
            reason, kind = self._unsupported_by_screen(num_rows, return_logprob), kind.screened
        if reason is not None:
            raise ValueError(f"path is {path.value!r}, which cannot serve this batch: {reason}")
        parts = self._parts_for(num_rows)
        if path is SamplingPath.FLASHINFER:
            return paths.launch_flashinfer(hidden, params, parts)
        config = self.table.lookup_on(path, num_rows, kind)
        if parts.workspace is not None:  # it is kept for the configurations of the table alone
            parts = parts.with_scratch([config], max(1, num_rows))
        return paths.launch(config, hidden, params, parts, return_logprob=return_logprob)

    def _unsupported_by_screen(self, num_rows: int, return_logprob: bool) -> str | None:
        """Why the screen cannot serve such a batch; None where it can."""
        screen = self._parts.screen
        if screen is None:
            return "its head has no screen"
        if return_logprob:
            return "logprobs are asked for"
        if num_rows > screen.max_rows:
            return f"it has {num_rows} rows, the screen is for {screen.max_rows}"
        return None if screen.serves(self._parts.lm_head) else "the screen is not of what the head holds now"

    def _has_small_top_k(self, params: BatchParams) -> bool:
        """True if every truncated row has a top-k that the screened path can serve. A row with a larger one would read
        the whole head after the screen."""
        if params.truncation is None:
            return True
        largest = params.truncation.max_top_k
        return largest is not None and largest <= self._parts.truncation_config.max_small_top_k

    def draw_with_logprobs(
        self,
        hidden: torch.Tensor,
        params: BatchParams,
        wanted: WantedLogprobs,
        *,
        path: SamplingPath | str | None = None,
    ) -> tuple[SampleOutput, Logprobs]:
        """``draw``, with the logprobs of the likeliest ids and of given ids.

        The batch takes a GEMM, and its logits, ``[B, V]``, are kept for the readers in scratch of the head; for a few
        given ids alone it takes the path that it has without them, and reads the head's rows with these ids once more
        (``paths.reads_ids_from_head``). Logprobs are those of the edited logits before truncation, at the temperature
        of the draw, 1 on greedy rows; ``wanted.original``: 1 on all; or at ``wanted.temperature``.
        ``SampleOutput.logprobs`` and ``log_mass`` are None with either. Logprobs of a head that is a part of the
        vocabulary are relative to its ids (``merge_parts``). path: ``SamplingPath.LOGITS`` for the GEMM in any case.

        Never synchronises. Raises ValueError as ``draw``, for another ``top`` than 0 to 128, and for another path.
        """
        check_rows("hidden", hidden)
        check_params(params)
        if path is not None and SamplingPath(path) is not SamplingPath.LOGITS:
            raise ValueError(f"path is {str(path)!r}; expected 'logits' or None where logprobs are asked for")
        lm_head, num_rows = self.lm_head, len(hidden)
        self._table.check(lm_head)
        check_wanted(wanted, num_rows, hidden)
        config = self._table.lookup(num_rows, BatchKind.of(params))
        with paths.on_device_of(hidden):
            in_host_memory = draws_in_host_memory(hidden.device)
            if path is None and not in_host_memory and paths.reads_ids_from_head(config, num_rows, lm_head, wanted):
                return paths.launch_with_ids(config, hidden, params, self._parts_for(num_rows), wanted)
            parts, scratch = self._parts_for(num_rows), self._logprob_scratch
            if scratch is not None and num_rows <= scratch.rows.max_rows:
                parts = parts._replace(workspace=scratch.draw, readers=scratch.rows)
            return paths.launch_with_logprobs(hidden, params, parts, wanted)

    def reserve_logprobs(self, max_rows: int) -> None:
        """Make scratch for ``draw_with_logprobs`` of up to ``max_rows`` rows, where there is not enough: it then
        allocates its results alone, and the logits of truncated rows."""
        lm_head, held = self.lm_head, self._logprob_scratch
        if lm_head.batch_invariant:  # ``grow`` has made it: such a head has one scratch for all draws
            return
        if held is None or held.rows.max_rows < max_rows or held.rows.vocab_size != lm_head.vocab_size:
            scratch = LogprobScratch.for_rows(max_rows, HeadTraits.of(lm_head), lm_head.weight.device, self._searched)
            scratch.draw.gemm(max_rows, lm_head.weight.shape[0], paths.gemm_dtype(lm_head))
            self._logprob_scratch = scratch

    def logprobs_of(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        wanted: WantedLogprobs,
        *,
        chunk_rows: int = paths.MAX_CHUNK_ROWS,
    ) -> Logprobs:
        """The logprobs of given tokens, of the likeliest ids and of given ids, without a draw: those of a prompt.

        hidden: ``[T, D]``, contiguous rows, the head's dtype and device. token_ids: ``[T]`` int64, the token of each
        row. wanted: with T rows; the temperature is 1, and there are no edits. chunk_rows: rows whose logits are in
        memory at a time, 1 or more; fewer where these would take more than 384 MB. The call owns that memory and the
        scratch, and keeps none. A row's result depends on the rows beside it as far as a GEMM's rounding does. Logprobs
        of a head that is a part of the vocabulary are relative to its ids; those of other ids are the lowest.

        Never synchronises. Raises ValueError for a tensor of another shape, dtype, layout or device.
        """
        check_rows("hidden", hidden)
        parts = self.parts
        self._table.check(parts.lm_head)
        if not isinstance(chunk_rows, int) or chunk_rows < 1:
            raise ValueError(f"chunk_rows is {chunk_rows!r}; expected an integer, 1 or more")
        with paths.on_device_of(hidden):
            return paths.logprobs_in_chunks(hidden, token_ids, parts, wanted, chunk_rows)

    def draw_from_logits(
        self,
        logits: torch.Tensor,
        params: BatchParams,
        *,
        vocab_size: int | None = None,
        return_logprob: bool = False,
    ) -> SampleOutput:
        """Draw from whole rows of the head's logits, before its scale and softcap: ``[B, vocab_size]`` or wider.

        vocab_size: ids of the whole vocabulary; when None, of all shards of the head (``LMHead.of_rank``). Raises
        ValueError as ``draw``.
        """
        check_rows("logits", logits)
        check_params(params)
        spec = self._spec_of_rows(vocab_size)
        scratch = self._scratch_of_rows(len(logits), spec)
        workspace = None if scratch is None else scratch.draw
        return paths.read_logits(logits, spec, params, workspace, return_logprob=return_logprob)

    def draw_from_own_ids(self, logits: torch.Tensor, own: OwnIds, params: BatchParams) -> SampleOutput:
        """Draw one of the ids in ``own`` per row of their logits, ``[B, H]`` or wider, before scale and softcap. Raises
        ValueError as ``draw``, and for a truncation or edits."""
        check_rows("logits", logits)
        check_params(params)
        spec = self._spec_of_rows(own.vocab_size)
        scratch = self._scratch_of_rows(len(logits), spec)
        return paths.read_own_ids(logits, own, spec, params, None if scratch is None else scratch.draw)

    def draw_children_of_own_ids(self, logits: torch.Tensor, own: OwnIds, params: BatchParams, number: int) -> Children:
        """``draw_children`` of the ids in ``own``, from logits as in ``draw_from_own_ids``. Raises ValueError as that,
        and for another number."""
        check_rows("logits", logits)
        check_params(params)
        spec = self._spec_of_rows(own.vocab_size)
        scratch = self._scratch_of_rows(len(logits), spec)
        workspace = None if scratch is None else scratch.draw
        return children_of_own_ids(logits, own, spec, params, number, workspace)

    def _scratch_of_rows(self, num_rows: int, spec: LogitsSpec) -> LogprobScratch | None:
        kept = self._rows_scratch
        if kept is None or num_rows > kept.rows.max_rows or kept.rows.vocab_size != spec.vocab_size:
            return None
        return kept

    def draw_from_logits_with_logprobs(
        self, logits: torch.Tensor, params: BatchParams, wanted: WantedLogprobs, *, vocab_size: int | None = None
    ) -> tuple[SampleOutput, Logprobs]:
        """``draw_from_logits``, with logprobs as ``draw_with_logprobs``, relative to the whole vocabulary."""
        check_rows("logits", logits)
        check_params(params)
        check_wanted(wanted, logits.shape[0], logits)
        spec = self._spec_of_rows(vocab_size)
        scratch = self._scratch_of_rows(len(logits), spec)
        return paths.read_logits_with_logprobs(logits, spec, params, wanted, scratch)

    def _spec_of_rows(self, vocab_size: int | None) -> LogitsSpec:
        lm_head = self._parts.lm_head
        size = vocab_size or lm_head.spec.total_ids or lm_head.vocab_size
        return LogitsSpec(size, 0, lm_head.logit_scale, lm_head.softcap, logits_dtype=lm_head.rounding)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``hidden @ weight.T``, ``[B, V]``, padding included, before scale, softcap and edits: in ``out``, else in
        scratch that the next draw may write to. float32 where logits are rounded to another dtype than that of the
        hidden states. A quantised weight is converted a part at a time, in memory of its own."""
        return paths.compute_logits(hidden, self.lm_head, self._parts_for(len(hidden)).workspace, out=out)

    def check(self, max_rows: int, *, bool_masks: bool = False) -> selfcheck.Checked:
        """Compare each configuration that batches of up to ``max_rows`` rows take with a reference, and take out what
        is wrong: such batches get the built-in choice, and a wrong screen is dropped. bool_masks: also with grammar
        masks of dtype bool. Compiles the kernels, allocates and waits: at start. A ``reason`` in the result says that
        the head must not be used."""
        checked = selfcheck.refuse_wrong(self.lm_head, max_rows, self.table, self.screen, bool_masks=bool_masks)
        self.table = checked.table
        if checked.unscreened is not None:
            self.screen = None
        return checked

    def grow(self, max_rows: int) -> None:
        """Make scratch for batches of up to ``max_rows`` rows in the place of the scratch so far, on whatever path they
        take; graphs that were captured with that must not be replayed. Batches then allocate no scratch, but for the
        logits of truncated rows."""
        lm_head, screen, configs = self.lm_head, self.screen, self._configs_up_to(max_rows)
        slots = max(paths.slots_for(config, lm_head, max_rows) for config in configs)
        workspace = Workspace(slots, lm_head.weight.device, self._searched)
        if lm_head.scale is not None:
            workspace.half_hidden(max_rows, lm_head.weight.shape[1])
        if any(isinstance(config, ReadConfig) for config in configs) or lm_head.shards > 1 or self.table.flashinfer:
            workspace.gemm(max_rows, lm_head.weight.shape[0], paths.gemm_dtype(lm_head))
        self.max_rows, self._searched = max_rows, workspace.searched
        self._parts = self._parts._replace(workspace=workspace)
        if lm_head.shards > 1 or lm_head.batch_invariant:  # both read logprobs in every step that has any
            readers = LogprobWorkspace(max_rows, lm_head.vocab_size, lm_head.weight.device)
            self._logprob_scratch = LogprobScratch(workspace, readers)
        if screen is not None and not screen.closed and (rows := self.table.screened_rows(max_rows)) > screen.max_rows:
            screen.grow(rows)

    def _configs_up_to(self, max_rows: int) -> set[Config]:
        """The configurations that batches of up to ``max_rows`` rows take."""
        configs = {config for _, _, config in self.table.configs_up_to(max_rows, screened=True)}
        if self.lm_head.shards > 1:  # one rank that finds no memory in a step would leave the others alone
            configs |= {config for _, _, config in reading_table(HeadTraits.of(self.lm_head)).configs_up_to(max_rows)}
        return configs

    def reserve_rows(self, max_rows: int, vocab_size: int) -> None:
        """Make scratch for ``draw_from_logits`` of up to ``max_rows`` rows of a vocabulary of ``vocab_size`` ids, with
        any logprobs."""
        lm_head = self.lm_head
        traits = HeadTraits.of(lm_head).unmodelled
        traits = traits._replace(vocab_size=vocab_size, itemsize=lm_head.rounding.itemsize)
        self._rows_scratch = LogprobScratch.for_rows(max_rows, traits, lm_head.weight.device, self._searched)

    def replace(self, lm_head: LMHead) -> None:
        """Draw from another head from now on. One of another shape takes the built-in choices, and scratch of its
        own. Raises ValueError for a value of another type."""
        if not isinstance(lm_head, LMHead):
            raise ValueError(f"lm_head is {lm_head!r}; expected an LMHead")
        self._parts = self._parts._replace(lm_head=lm_head)
        if HeadTraits.of(lm_head).unmodelled != self.table.traits.unmodelled:
            rows, logprobs = self._rows_scratch, self._logprob_scratch
            self.table, self._rows_scratch, self._logprob_scratch = default_table(lm_head), None, None
            if self.max_rows:
                self.grow(self.max_rows)
            if rows is not None:
                self.reserve_rows(rows.rows.max_rows, rows.rows.vocab_size)
            if logprobs is not None and self._logprob_scratch is None:
                self.reserve_logprobs(logprobs.rows.max_rows)


def check_params(params: BatchParams) -> None:
    """Raise ValueError for parameters, a truncation or edits of another type."""
    if not isinstance(params, BatchParams):
        raise ValueError(f"params is a {type(params).__name__}; expected BatchParams")
    params.check_types()


def check_rows(name: str, rows: torch.Tensor) -> None:
    """Raise ValueError unless ``rows``, hidden states or logits, is a matrix on a device where kernels run."""
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2:
        is_what = f"has shape {tuple(rows.shape)}" if isinstance(rows, torch.Tensor) else f"is a {type(rows).__name__}"
        raise ValueError(f"{name} {is_what}; expected a [B, {'D' if name == 'hidden' else 'V'}] tensor")
    if draws_in_host_memory(rows.device) and (reason := unsupported_by_machine()) is not None:
        raise ValueError(f"{name} is on the CPU; expected it on a CUDA device: {reason}")
