"""The draw of one step: parameters gathered from the table of requests, then a replayed CUDA graph or launches."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.gather_rows import StagedBatch
from ..kernels.launch import num_binaries
from ..kernels.params import BatchParams, Edit, LogitEdits, SampleOutput
from ..logprobs import Logprobs, WantedLogprobs
from .batch import BATCH_ATTRIBUTE, Batch, DrawKind, edits_of, routing_of, slots_of
from .head import STAGED_ROWS, HeadState
from .lazy_logits import LazyLogits
from .logprobs import AskedLogprobs, PackedLogprobs
from .row_table import TOP_K_BOUNDS, RowTable
from .step_graphs import (
    MAX_PREPARED_BYTES,
    Drawn,
    EditPlaces,
    Launched,
    NextBatch,
    PlacedEdits,
    StepGraphs,
)

logger = logging.getLogger("sgl_flashsample")

# The kinds whose graphs are captured ahead: greedy, plain, truncated with a small top-k, truncated by anything else.
COMMON_KINDS = (
    DrawKind(False, None, True, False),
    DrawKind(False, None, False, False),
    DrawKind(True, TOP_K_BOUNDS[0], False, False),
    DrawKind(True, None, False, False),
)
FULL_STEP_SECONDS = 0.5  # between two steps that follow the model and the life of the screen
PREPARES_NOTHING = "flashsample: CUDA graphs of the sampling step are captured in steps, not ahead: %s"


class Step(NamedTuple):
    """The inputs of a draw beside hidden states. slots: ``[B]``, the slots of the requests. positions: ``[B * nodes]``.
    edits: of ``B * nodes`` rows; where they have no ``rows``, the flags are those of the requests. nodes: rows of each
    request, the nodes of its tree of drafts; None where there are no drafts, and each request has one row. asked: the
    logprobs beside those of the tokens."""

    batch: Batch
    slots: torch.Tensor
    positions: torch.Tensor
    edits: LogitEdits | None
    return_logprob: bool
    nodes: int | None = None
    asked: AskedLogprobs | None = None

    @property
    def kind(self) -> DrawKind:
        return self.batch.mix.draw if self.nodes is None else self.batch.mix.draw_of_nodes


def replayed(
    started: float,
    lazy: Any,
    sampling_info: Any,
    positions: torch.Tensor,
    return_logprob: bool,
    top_logprobs_nums: list[int] | None = None,
    token_ids_logprobs: list | None = None,
    original_logprobs: bool = False,
) -> tuple[Drawn, AskedLogprobs | None] | None:
    """The draw of a step whose like has been replayed before, found in one function: between two steps the host does
    much else, and what a step looks at is no longer in its caches. None where ``draw`` has to serve it, as it does once
    in ``FULL_STEP_SECONDS``. return_logprob and the rest: as in ``routing_of``; the logprobs that are asked for beside
    those of the tokens are returned too. Who serves the rows is decided once for a batch and SGLang's lists. Raises
    GrammarError as ``edits_of`` does."""
    batch = getattr(sampling_info, BATCH_ATTRIBUTE, None)
    if type(lazy) is not LazyLogits or batch is None:
        return None
    state, num_rows, mix, grammars = lazy.source, lazy.num_rows, batch.mix, sampling_info.grammars or ()
    graphs = state.graphs
    if (
        graphs is None
        or started > state.full_step_at
        or len(batch.kinds) != num_rows
        or positions.shape[0] != num_rows
        or lazy.computed is not None
        or (state.too_large is not None and num_rows >= state.too_large)
        or state.was_recaptured
        or not state.is_current()
    ):
        return None
    if (grammars or mix.masked) and len(grammars) - grammars.count(None) != batch.num_masked:
        return None  # a grammar came or went after its row was scheduled
    captured, asked = lazy.captured, None
    logprobs: Hashable = return_logprob
    if return_logprob:
        fused = batch.fused
        last_top, last_ids, _, _, asked = fused.last_asked
        if last_top is not top_logprobs_nums or last_ids is not token_ids_logprobs:
            lists = top_logprobs_nums, token_ids_logprobs, original_logprobs
            width, whole = lazy.shape[1], state.exchange is None
            if routing_of(batch, sampling_info, True, *lists, True, width, whole) is not fused:
                return None
            asked = fused.asked(*lists, batch.temperatures(sampling_info, original_logprobs))
        logprobs = asked is None or (asked.layout, state.logprob_inputs)
    place = (num_rows, num_rows) if captured is None else (captured.data_ptr(), captured.shape[0])
    ready = graphs.ready.get((*place, mix, None, logprobs))
    if ready is None:
        return None
    keyed, lines, layout = ready
    table = batch.table
    if lines is not table.lines or table.is_too_small:
        return None
    if captured is not None:
        if layout is not None:
            device = lazy.hidden.device
            edits = edits_of(batch, batch.fused, sampling_info, device)
            placed = None if edits is None else PlacedEdits.of(edits, num_rows, device)
            if placed is None or placed.layout != layout:
                return None
            keyed.next_batch.set(placed.addresses)
        if asked is not None:
            state.logprob_inputs.load(asked, captured.shape[0])
        if table.queued:
            table.write()
        state.counts.replayed += 1
        return keyed.replay_next(num_rows), asked
    slots = slots_of(sampling_info, num_rows)
    if slots is None or state.stage_for(num_rows, lazy.prefills) is None:
        return None
    try:
        table.hand_over(keyed.next_batch, lazy.hidden, slots, positions)
    except ValueError:  # the graph cannot read such tensors
        return None
    if lazy.prefills:
        state.counts.prefills += 1
    else:
        state.counts.replayed += 1
    return keyed.replay_next(num_rows), None


def replayed_nodes(started: float, lazy: LazyLogits, step: Step) -> Drawn | None:
    """``replayed`` of a verification of drafts without edits and logprobs, by launches that gather the parameters of
    its nodes and a graph. None where ``draw`` has to serve it."""
    state, captured, batch, nodes = lazy.source, lazy.captured, step.batch, step.nodes
    graphs = state.graphs
    if (
        graphs is None
        or captured is None
        or step.edits is not None
        or step.return_logprob
        or started > state.full_step_at
        or batch.table.is_too_small
        or state.was_recaptured
        or not state.is_current()
    ):
        return None
    ready = graphs.ready.get((captured.data_ptr(), captured.shape[0], batch.mix, nodes, False))
    if ready is None or ready[2] is not None:
        return None
    gather(state, step, captured.shape[0])
    state.counts.replayed += 1
    return ready[0].replay_next(lazy.num_rows)


def _is_staged(stage: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> bool:
    """The kernel that brings a batch to its stage reads such tensors."""
    return (
        hidden.dtype is stage.dtype
        and slots.device == positions.device == stage.device
        and slots.shape == positions.shape
        and slots.dtype is positions.dtype is torch.int64
        and slots.is_contiguous()
        and positions.is_contiguous()
        and hidden.is_contiguous()
        and hidden.data_ptr() % 16 == 0
    )


def draw(lazy: LazyLogits, step: Step) -> Drawn:
    """One token per row of ``lazy.hidden``: by a CUDA graph where there is one for such a step, else by launches."""
    known = num_binaries()
    drawn = _draw(lazy, step)
    lazy.source.counts.late_compiles += num_binaries() - known
    return drawn


def _draw(lazy: LazyLogits, step: Step) -> Drawn:
    state: HeadState = lazy.source
    state.follow_recapture()
    hidden, captured, edits, asked = lazy.hidden, lazy.captured, step.edits, step.asked
    num_rows = hidden.shape[0]
    staged = captured is None and edits is None and asked is None and step.nodes is None
    if staged:
        captured = state.stage_for(num_rows, lazy.prefills)
        staged = captured is not None and _is_staged(captured, hidden, step.slots, step.positions)
        captured = captured if staged else None
    # In a pipeline, what a graph is told may be overwritten before it has run.
    if (edits is not None or asked is not None) and state.copies_tokens:
        captured = None
    placed = None
    if edits is not None and captured is not None:
        placed = PlacedEdits.of(edits, num_rows, hidden.device)
        cut = state.cuts_blocks_between(len(captured), edits.repeats)
        captured = None if placed is None or cut else captured
    padded = hidden if captured is None else captured  # a graph draws all rows of SGLang's, padding too
    state.update(padded.shape[0])
    state.full_step_at = time.perf_counter() + FULL_STEP_SECONDS
    state.counts.prefills += lazy.prefills
    table = step.batch.table
    if table.is_too_small:
        table.write()
    wanted = None if asked is None else state.wanted(asked, len(padded))
    graphs = None if captured is None else state.step_graphs(padded.shape[0], step.kind, edits is not None)
    keyed, gathers = None, staged
    if graphs is not None:
        gathers = staged or (step.nodes is None and not lazy.prefills and state.inputs is not None)
        # The batch is drawn with its noise, whatever FlashInfer could do.
        kind, mix = step.kind._replace(distribution_only=False), step.batch.mix
        logprobs = step.return_logprob if wanted is None else wanted
        needs_more = mix.is_native or (edits is None) is bool(mix.edits)  # these are not the edits of the kinds
        needs_more = needs_more or (step.nodes is None and not gathers)
        keyed = graphs.find(
            lambda batch: _launches(state, padded, kind, edits, logprobs, table if gathers else None, batch),
            padded,
            kind,
            None if placed is None else placed.layout,
            # Where a graph reads what is asked for depends on both.
            step.return_logprob if asked is None else (asked.layout, state.logprob_inputs),
            table.lines if gathers else None,
            None
            if needs_more
            else (*((num_rows, num_rows) if staged else (padded.data_ptr(), len(padded))), mix, step.nodes),
            staged,
            0 if asked is None else asked.layout.num_bytes(len(padded)),
        )
    if keyed is None:
        state.counts.launched += not lazy.prefills
        edits = step.edits
        if captured is not None and state.draws_padding:
            if staged:
                captured[:num_rows].copy_(hidden)
            hidden = captured
            if edits is not None and placed is not None:  # their tensors have no rows for padding
                places = torch.tensor(placed.addresses, dtype=torch.int64).to(hidden.device, non_blocking=True)
                edits = dataclasses.replace(edits, places=places)
        rows = len(hidden)
        gather(state, step, rows)
        logprobs = step.return_logprob if wanted is None else wanted.rows(0, rows, len(padded))
        return Drawn.of(launch(state, hidden, params_of(state, step.kind, edits, rows), logprobs)).first(num_rows)
    if staged:
        table.hand_over(keyed.next_batch, hidden, step.slots, step.positions)
    elif gathers:
        table.write()
    else:
        gather(state, step, len(padded))
    if placed is not None:
        keyed.next_batch.set(placed.addresses)
    state.counts.replayed += not lazy.prefills
    return keyed.replay_next(num_rows)


def _launches(
    state: HeadState,
    padded: torch.Tensor,
    kind: DrawKind,
    edits: LogitEdits | None,
    logprobs: bool | WantedLogprobs,
    table: RowTable | None,
    batch: NextBatch | None = None,
) -> Launched:
    """The launches that a graph captures. table: to gather the parameters from, of the rows that SGLang's graph has, or
    of those that ``batch`` brings to ``padded``. edits: their tensors are those of ``batch``."""
    rows = padded.shape[0]
    if isinstance(batch, EditPlaces):
        assert edits is not None
        batch.load()
        edits = dataclasses.replace(edits, places=batch.places)
    if table is not None and isinstance(batch, StagedBatch):
        table.stage(batch, padded, state.rows)
    elif table is not None:
        assert state.inputs is not None
        given = Edit(0) if edits is None else edits.given
        table.gather(state.inputs.slots[:rows], state.inputs.positions[:rows], state.rows, edits=given)
    return launch(state, padded, params_of(state, kind, edits, rows), logprobs, retry=False)


def gather(state: HeadState, step: Step, rows: int) -> None:
    """Bring the parameters of the step into the buffers of ``state``, and greedy rows behind them up to ``rows``."""
    device = state.rows.temperature.device
    # SGLang has both so already, with exceptions.
    slots, positions = (
        indices.to(device, torch.int64, non_blocking=True).contiguous() for indices in (step.slots, step.positions)
    )
    edits = Edit(0) if step.edits is None else step.edits.given
    nodes, drafts = step.nodes or 1, step.nodes is not None
    step.batch.table.gather(slots, positions, state.rows, nodes=nodes, drafts=drafts, edits=edits, rows=rows)


def params_of(state: HeadState, kind: DrawKind, edits: LogitEdits | None, rows: int) -> BatchParams:
    """The parameters of the first rows of the buffers."""
    return state.rows.params(
        rows,
        truncated=kind.truncated or state.batch_invariant,  # such a head draws every batch so
        max_top_k=kind.max_top_k,
        greedy=kind.all_greedy,
        edits=edits,
        distribution_only=kind.distribution_only,
    )


def prepare_next(state: HeadState, table: RowTable) -> bool:
    """Capture, outside of steps, the graphs of one size and kind that steps will ask for. Draws once, which compiles
    what is missing. Returns whether there may be more to do."""
    state.follow_recapture()
    if not state.use_step_graphs or state.exchange is not None:  # an exchange takes all ranks
        return False
    if state.graphs is not None and state.graphs.is_prepared and state.is_current():
        return False
    sizes = [(state.captured[rows], state.inputs is not None, False) for rows in state.captured]
    sizes += [(stage, True, True) for rows in STAGED_ROWS if (stage := state.stage_for(rows)) is not None]
    for hidden, gathers, staged in sorted(sizes, key=lambda size: -len(size[0])):  # smaller ones find memory of larger
        for kind in COMMON_KINDS:
            state.update(len(hidden))
            graphs = state.step_graphs(len(hidden), kind, edited=False)
            if graphs is None:
                return False
            if graphs.has(hidden, kind, table.lines if gathers else None, staged):
                continue
            try:
                _prepare(state, graphs, hidden, kind, table, gathers, staged)
            except Exception as error:  # steps capture what they need
                graphs.is_prepared = True
                logger.warning(PREPARES_NOTHING, f"{type(error).__name__}: {error}")
            graphs.is_prepared = graphs.is_prepared or graphs.prepared_bytes > MAX_PREPARED_BYTES
            return not (graphs.is_prepared or graphs.is_off)
    assert state.graphs is not None
    state.graphs.is_prepared = True
    return False


def _prepare(
    state: HeadState,
    graphs: StepGraphs,
    hidden: torch.Tensor,
    kind: DrawKind,
    table: RowTable,
    gathers: bool,
    staged: bool,
) -> None:
    def launches(batch: NextBatch | None) -> Launched:
        return _launches(state, hidden, kind, None, False, table if gathers else None, batch)

    nothing = torch.zeros(0, dtype=torch.int64, device=hidden.device)
    table.gather(nothing, nothing, state.rows, rows=len(hidden))
    launches(StagedBatch(hidden.device) if staged else None)
    graphs.prepare(launches, hidden, kind, table.lines if gathers else None, staged)


def launch(
    state: HeadState,
    hidden: torch.Tensor,
    params: BatchParams,
    logprobs: bool | WantedLogprobs,
    *,
    retry: bool = True,
) -> Launched:
    """One token per row, by launches. logprobs: also those of the tokens; or which ones. Where ranks share the head,
    each draws from its part, in its own way, and they exchange the draws and the logprobs; for truncated batches they
    exchange whole rows of logits. A batch that is larger than the memory through which they exchange is drawn in
    blocks. retry: a draw that fails is tried in another way (``HeadState.step_down``), as other ranks wait for the
    exchange."""
    memory, num_rows = None if state.exchange is None else state.exchange.memory, len(hidden)
    if memory is None or num_rows <= memory.max_rows:
        return _launch(state, hidden, params, logprobs, retry)
    blocks = []
    for start in range(0, num_rows, memory.max_rows):
        stop = min(start + memory.max_rows, num_rows)
        wanted = logprobs.rows(start, stop, num_rows) if isinstance(logprobs, WantedLogprobs) else logprobs
        blocks.append(_launch(state, hidden[start:stop], params.rows(start, stop), wanted, retry))
    return _joined(blocks)


def _joined(blocks: list[Launched]) -> Launched:
    """The rows of all blocks, in their order."""

    def cat(parts: Sequence[torch.Tensor | None]) -> Any:
        return torch.cat([part for part in parts if part is not None]) if parts[0] is not None else None

    out = SampleOutput(*map(cat, zip(*(block.out for block in blocks), strict=True)))
    logprobs = cat([block.logprobs for block in blocks])
    rest = [block.rest for block in blocks if block.rest is not None]
    return Launched(out, blocks, logprobs, PackedLogprobs.joined(rest) if rest else None)


def _launch(
    state: HeadState, hidden: torch.Tensor, params: BatchParams, logprobs: bool | WantedLogprobs, retry: bool
) -> Launched:
    """``launch`` of one block."""
    exchange = state.exchange
    if isinstance(logprobs, WantedLogprobs):
        held: list[Any] = []
        out, read = _draw_with_logprobs(state, hidden, params, logprobs, held)
        return Launched(out, [read, *held], read.of_tokens, PackedLogprobs.of(read))
    if exchange is not None and (params.truncation is not None or state.whole_rows):
        scratch: list[Any] = []

        def draw_rows(logits: torch.Tensor, params: BatchParams) -> SampleOutput:
            drawn = state.sample_rows(logits, params, logprobs)
            scratch.extend((drawn, params))
            return drawn

        return Launched(exchange.draw_rows(state.logits_of_shard(hidden), params, draw_rows), scratch)
    while True:
        try:
            drawn = state.head.draw(hidden, params, return_logprob=logprobs, path=state.path)
            break
        except Exception as error:
            if not retry or not state.step_down(error):
                raise
    if exchange is None:
        return Launched(drawn)
    holds: list[Any] = [drawn]
    if state.straddling is not None:
        logits = state.logits_of_group(state.straddling, hidden)
        drawn = state.straddling.complete(drawn, logits, params, holds)
        holds.append(drawn)
    return Launched(exchange.merge(drawn), holds)


def _draw_with_logprobs(
    state: HeadState, hidden: torch.Tensor, params: BatchParams, wanted: WantedLogprobs, holds: list[Any]
) -> tuple[SampleOutput, Logprobs]:
    """``launch`` with logprobs beside those of the tokens. holds: gets what the launches write to beside the result."""
    exchange = state.exchange
    if exchange is not None and (params.truncation is not None or state.whole_rows):

        def draw_rows(
            logits: torch.Tensor, params: BatchParams, wanted: WantedLogprobs
        ) -> tuple[SampleOutput, Logprobs]:
            drawn = state.sample_rows_with_logprobs(logits, params, wanted)
            holds.extend((drawn, params, wanted))
            return drawn

        return exchange.draw_rows_with_logprobs(state.logits_of_shard(hidden), params, wanted, draw_rows)
    drawn, found = state.head.draw_with_logprobs(hidden, params, wanted)
    used = state.head.logprob_scratch
    holds.extend((drawn, found, used, None if used is None else used.draw.held))
    if exchange is None:
        return drawn, found
    if state.straddling is not None:
        logits = state.logits_of_group(state.straddling, hidden)
        drawn, found = state.straddling.complete_with_logprobs(drawn, found, logits, params, wanted, holds)
        holds.extend((drawn, found))
    return exchange.merge_with_logprobs(drawn, found, wanted)
