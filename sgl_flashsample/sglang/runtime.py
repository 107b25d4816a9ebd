"""The state of the fused pass in one server process: its heads, their kernels, its metrics. The plugin makes one."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from .. import __version__
from ..dispatch import DispatchTable
from ..flashinfer_path import CANNOT_USE
from ..head import Head
from ..kernels.rng import NOISE_ABI
from ..screen_race import Outcome, candidates, decide, raced_kinds, unsupported_race
from ..selfcheck import MAX_COMPILED_ROWS, dependence_on_batch, unsupported_by_flashinfer
from ..switches import (
    STEP_GRAPHS_VARIABLE,
    switch,
)
from ..tables.fingerprint import compare_compiled
from ..tables.lookup import ResolvedTable, resolve
from . import quantised, support, token_counts
from .arrivals import Arrivals
from .batch import Batch, Routing
from .draw import PREPARES_NOTHING, prepare_next
from .exchange import Exchange, RankSync
from .find_heads import heads_of, processors_of
from .head import GraphInputs, HeadState
from .metrics import Metrics
from .model_graph import ExtraRoot
from .own_vocabulary import HotVocabulary
from .row_table import RowTable
from .screen_lifecycle import NOT_MEASURED, HeadScreen, ScreenMode, race_screen, screen_mode, unsupported_screen
from .settings import Settings, refuse_to_start, unsupported_screens
from .versions import LOADS_HEAD_SCALES, drops_head_scales, sglang_version

logger = logging.getLogger("sgl_flashsample")

MAX_INTERPRETED_ROWS = 16  # on a CPU the kernels are checked for batches up to this size
QUIET_SECONDS = 0.5  # without a batch, until graphs are captured ahead: a client's next request often follows at once
IDLE_READS = 4  # reads of device counters after the last step: one starts a copy, a later one sees it
NATIVE_FEATURES = "custom logit processors, sampling masks and beam search"
DETERMINISTIC = (
    ", deterministic inference: one tile and one set of kernels for all batches, the same bits in all batches tried; "
    "requests without a seed have 42, and the n answers of a request differ"
)


DETERMINISTIC_SEED = 42  # of a request without a seed, as in SGLang's deterministic mode
NOT_RACED = "no screen was raced there"
LATE_HEAD = "the model shows its LM head only at its first batch"
LATE_ON_RANKS = f"{LATE_HEAD}, which is not supported with several ranks"


class RankError(RuntimeError):
    """This rank failed while its peers wait in an exchange. The error must propagate: SGLang ends the server, as after
    an error of its own."""


class Mode(NamedTuple):
    """The answers of one of SGLang's ForwardModes: each takes a call, and a step has many questions."""

    mode: Any
    decodes: bool
    extends: bool
    verifies: bool
    is_split: bool
    extends_drafts: bool

    @property
    def prefills(self) -> bool:
        return self.extends and not self.verifies


_MODES: dict[int, Mode] = {}


def mode_of(metadata: Any) -> Mode:
    """The mode of a forward, by SGLang's LogitsMetadata."""
    mode = metadata.forward_mode
    known = _MODES.get(id(mode))
    if known is None or known.mode is not mode:
        answers = mode.is_decode(), mode.is_extend(), mode.is_target_verify(), mode.is_split_prefill()
        known = _MODES[id(mode)] = Mode(mode, *answers, mode.is_draft_extend_v2())
    return known


class Runtime:
    """State of the fused pass in this process.

    Reasons in words, None while there is none: inactive_reason, why nothing is fused; no_mixing_reason, why batches in
    which some rows need SGLang's sampler are not fused; no_grammars_reason, why rows with a grammar are not fused;
    no_screen_reason, why no head has a screen. weights_settled: no change of the weights is under way. prepares_steps:
    CUDA graphs of steps are captured while SGLang has nothing to do. reads_prompts, numbers_arrivals: the hooks of
    prompt logprobs and of arrivals are in place.

    Ranks that share a head make the same batches and decide all of this alike, at the start (``agree``,
    ``prepare_model``); from then on none changes it (``RankError``).
    """

    def __init__(self, inactive_reason: str | None) -> None:
        self.inactive_reason = inactive_reason
        self.no_mixing_reason: str | None = None
        self.no_grammars_reason: str | None = None
        self.settings = Settings.of_server()
        self.inactive_reason = self.inactive_reason or self.settings.unsupported
        self.use_step_graphs = bool(switch(STEP_GRAPHS_VARIABLE))
        self.screen_mode = screen_mode()
        self.no_screen_reason = unsupported_screens(self.screen_mode)
        deterministic = self.settings.deterministic
        self.arrivals = Arrivals(self.settings.replica, DETERMINISTIC_SEED if deterministic else None)
        self._warned_of_request = False
        self._row_table: RowTable | None = None
        self._model_runner: Any = None
        self._idle_reads = 0  # reads of device counters that are left
        self._misses_counts = False
        self.weights_settled = True
        self.prepares_steps = False  # once it is known that every change of weights is announced
        self.reads_prompts = self.numbers_arrivals = False
        self.weight_changes = 0  # announced so far
        self._screens_outdated = False
        self._heads: dict[tuple[int, int], HeadState | None] = {}
        self._extra_root: ExtraRoot | None = None
        self.step_of_replicas: Any = None  # ``replicas.Step``, while the model runs it
        self._draft_processors: set[int] = set()
        self.prepares_drafts = False  # the draft model has a head of its own, prepared before memory is shared out
        self.draft_head: HeadState | None = None  # drafts are drawn from it; it may be a head of the target
        self.draft_vocabulary: HotVocabulary | None = None  # None: all ids of the draft model are drafted
        self.draws_drafts = False  # graphs may read ``draft_head`` also when this has ended
        self._refused: list[str] = []  # why a head is left to SGLang
        self._ranks = RankSync()  # this process alone, until ``agree``
        self._statuses: list[dict[str, Any]] = []  # statuses of heads that other ranks have
        self.metrics = Metrics(self.settings.metrics, self.settings.reports, self.settings.metric_labels)
        self._update_gauge()
        self.token_counts = token_counts.TokenCounts.of_this_server()

    def agree(self) -> None:
        """Agree with the other ranks of this server: nothing is fused where one of them has a reason against it, or
        where their versions or settings differ. The seed of rank 0 becomes that of all: nodes draw one each where none
        is given. Every rank calls this once, before it loads the model."""
        try:
            self._ranks = RankSync.of_server()
        except Exception as error:  # an SGLang whose ranks we cannot find, on each of them
            self.inactive_reason = self.inactive_reason or f"this server's ranks cannot be found ({error})"
            return self._update_gauge()
        # A rank without a hook computes with SGLang what the others exchange.
        in_place = {"hooks of prompts": self.reads_prompts, "the hook of arrivals": self.numbers_arrivals}
        answers = self._ranks.of_all([self.inactive_reason, self.settings.seed, self.settings.shared | in_place])
        self.settings.seed = answers[0][1]
        differing = (
            f"the ranks differ: {name} is {first!r} on rank 0 and {other[name]!r} on rank {rank}"
            for name, first in answers[0][2].items()
            for rank, (_, _, other) in enumerate(answers)
            if other.get(name) != first
        )
        self.inactive_reason = self._ranks.first_reason([reason for reason, _, _ in answers]) or next(differing, None)
        self._update_gauge()

    def stay_with_ranks(self, reason: str) -> None:
        """Raises RankError where others share a head with this rank."""
        if any(state.exchange is not None for state in self.heads):
            raise self._rank_error(reason)

    def _rank_error(self, reason: str) -> RankError:
        last = self._ranks.num_ranks - 1
        return RankError(
            f"flashsample: sampling failed on rank {self._ranks.rank} (of 0 to {last}); the other ranks need its part, "
            f"so the server ends: {reason}"
        )

    def disable(self, reason: str) -> None:
        """Leave everything to SGLang's sampler from now on, and say why, once. Raises RankError."""
        self.stay_with_ranks(reason)
        if self.inactive_reason is None:
            self.inactive_reason = reason
            self._update_gauge()
            logger.warning(
                "flashsample: fused sampling failed; from this batch on until restart, SGLang's own sampler is used "
                "for everything (same distribution, other random numbers): %s",
                reason,
            )

    def warn_of_request(self, error: Exception) -> None:
        """A request cannot be read, on every rank alike. Said once: a client may send many."""
        if not self._warned_of_request:
            self._warned_of_request = True
            logger.warning(
                "flashsample: a request cannot be read, so SGLang's own sampler draws it, and others like it without "
                "another warning: %s: %s",
                type(error).__name__,
                error,
            )

    def stop_mixing(self, reason: str) -> None:
        """Leave batches in which some rows need SGLang's sampler to it as a whole, from now on, and say why. Raises
        RankError."""
        self.stay_with_ranks(reason)
        self.no_mixing_reason = reason
        logger.warning(
            "flashsample: splitting a batch between fused sampling and SGLang's own sampler failed; from this batch on "
            "until restart, SGLang's own sampler takes the whole batch where a request in it needs it: %s",
            reason,
        )

    def stop_grammars(self, reason: str, everywhere: bool = True) -> None:
        """Leave rows with a grammar to SGLang's sampler from now on, and say why. everywhere: every rank does so in
        this step. Raises RankError where that is not known."""
        if not everywhere:
            self.stay_with_ranks(reason)
        self.no_grammars_reason = reason
        logger.warning(
            "flashsample: until restart, requests with a grammar use SGLang's own sampler, which enforces it as ever: "
            "%s",
            reason,
        )

    @property
    def heads(self) -> list[HeadState]:
        """The heads that this server fuses."""
        return [state for state in self._heads.values() if state is not None]

    @property
    def _heads_and_drafts(self) -> list[HeadState]:
        """``heads``, and the draft model's head where that is another one."""
        heads, drafts = self.heads, self.draft_head
        return heads if drafts is None or drafts in heads else [*heads, drafts]

    def weights_change(self) -> None:
        """Weights change, or may have changed: no screen serves until ``renew_screens``."""
        self.weight_changes += 1
        for state in self._heads_and_drafts:
            state.weights_change()
            self._screens_outdated = self._screens_outdated or state.has_screen

    def free_screens(self) -> None:
        """Give the memory of all screens back: SGLang has released that of the weights."""
        for state in self._heads_and_drafts:
            state.free_screen()
        if torch.cuda.is_available():  # coverage: needs a GPU
            torch.cuda.empty_cache()

    def renew_screens(self) -> None:
        """Make all screens copies of the weights as they are now. Outside of decode steps: it takes a while."""
        if not self._screens_outdated:
            return
        self._screens_outdated = False
        started = time.monotonic()
        states = [state for state in self._heads_and_drafts if state.has_screen]
        for state in states:
            state.renew_screen()
        if any(state.has_screen for state in states):
            logger.info("flashsample: screen rebuilt for new weights in %.2f s", time.monotonic() - started)

    def stop_screens(self, reason: str) -> None:
        """Draw without screens from now on, and say why."""
        for state in self._heads_and_drafts:
            state.stop_screen(reason)

    @property
    def _about(self) -> str:
        return f"flashsample {__version__} with SGLang {sglang_version()}"

    def announce_inactive(self) -> None:
        """Say why SGLang serves everything. Raises NotActiveError where that must not be."""
        assert self.inactive_reason is not None
        self._update_gauge()
        logger.warning(
            "%s: not active, SGLang's own sampler is used for everything: %s", self._about, self.inactive_reason
        )
        refuse_to_start(self.inactive_reason)

    @property
    def leaves_heads(self) -> bool:
        """SGLang serves an LM head of this server."""
        return bool(self._refused)

    @property
    def all_native_reason(self) -> str | None:
        """Why SGLang serves everything: a reason of the whole server, or of its heads where none is fused."""
        return self.inactive_reason or (self._refused[0] if self.leaves_heads and not self.heads else None)

    def _update_gauge(self) -> None:
        self.metrics.set_active(self.all_native_reason is None)

    @property
    def status(self) -> dict[str, Any]:
        """For ``/server_info``: whether the fused pass serves, else why not; per head its shape and dtype, the tuned
        table (None: built-in choices), its screen, how many CUDA graphs of a step it has, and the bytes that it takes
        beside the model and these graphs. draft_head: the same of the head that drafts are drawn from, one of ``heads``
        or the draft model's; draft_vocabulary: its ids that are drafted, None where all are. In a pipeline the first
        stage answers, with the last stage's state at its start. Values are those of JSON."""
        reason = self.all_native_reason
        return {
            "active": reason is None,
            "reason": reason,
            "version": __version__,
            "noise": NOISE_ABI,
            "heads": [state.status for state in self.heads] or self._statuses,
            "draft_head": None if self._drawing_head is None else self._drawing_head.status,
            "draft_vocabulary": self.draft_vocabulary.status if self.draws_drafts and self.draft_vocabulary else None,
        }

    def prepare_model(self, model: torch.nn.Module, model_runner: Any = None) -> None:
        """After the weights have loaded: compile and check the kernels, agree with the other ranks on what they serve,
        and say in one line what is active. Raises RankError after a failure that the other ranks cannot know of."""
        self._model_runner = model_runner
        if self.inactive_reason is not None:
            return
        started = time.monotonic()
        prepared: dict[tuple[int, int], HeadState | str] = {}
        failure = None
        try:
            for processor, lm_head in heads_of(model) if self.settings.last_stage else ():
                key = (id(processor), id(lm_head))
                prepared[key] = self._heads.get(key) or self._prepare(processor, lm_head, starting=True)
        except Exception as error:  # the other ranks wait for an answer
            failure = f"{type(error).__name__}: {error}"
        try:
            agreed = self._try_with_ranks(prepared, failure)
        except Exception as error:
            if self._ranks.num_ranks == 1:
                raise
            raise self._rank_error(f"{type(error).__name__}: {error}") from error
        if not agreed and self._ranks.num_ranks > 1:
            self.inactive_reason = LATE_ON_RANKS
            return self.announce_inactive()
        admitted = zip(prepared.items(), agreed, strict=False)
        # Heads that are served come first: the log line of another one says whether there are any.
        for (key, one), reason in sorted(admitted, key=lambda pair: pair[1] is not None):
            self._admit(key, one, reason)
        if agreed and None not in agreed:
            for reason in filter(None, agreed[len(prepared) :]):  # heads that only other ranks have
                self._refuse(reason)
        if self.all_native_reason is not None:
            return refuse_to_start(self.all_native_reason)
        if not agreed:
            refuse_to_start(LATE_HEAD)
            logger.info(
                "%s: waiting for the first batch, which shows where the model's LM head is; a line that the fused "
                "sampling is active, or why not, follows",
                self._about,
            )
        for state in self.heads:
            lm_head = state.head.lm_head
            weight = lm_head.weight
            ranks = "" if state.exchange is None else f" of {state.exchange.num_ranks} ranks"
            logger.info(
                "%s: fused sampling active, LM head %d x %d %s%s%s, random numbers of NOISE_ABI %d, kernels compiled "
                "and checked against a reference in %.1f s%s; SGLang's own sampler is used for requests with %s",
                self._about,
                *weight.shape,
                str(weight.dtype).removeprefix("torch."),
                "" if lm_head.scale is None else f" with scales ({quantised.ARITHMETIC})",
                ranks and f" on each{ranks}",
                NOISE_ABI,
                time.monotonic() - started,
                DETERMINISTIC if lm_head.batch_invariant else "",
                NATIVE_FEATURES,
            )
        config = getattr(getattr(model_runner, "model_config", None), "hf_config", None)
        if drops_head_scales(sglang_version()) and quantised.is_named(getattr(config, "quantization_config", None)):
            logger.warning(
                "flashsample: this checkpoint's LM head is quantised, and SGLang %s drops its scales: tokens are "
                "wrong, whichever sampler draws them; SGLang %s and newer load them",
                sglang_version(),
                ".".join(map(str, LOADS_HEAD_SCALES)),
            )
        if self.heads:
            first = self.heads[0]
            self._extra_root = ExtraRoot.of_device(first.head.lm_head.weight.device, first.exchange is not None)

    def find_inputs(self, state: HeadState, model_runner: Any) -> None:
        """Find where the graphs of SGLang's decode steps read slots and positions, if it has them as all known versions
        do; else each step gathers by a launch of its own."""
        if state.inputs is not None:
            return
        buffers = getattr(getattr(model_runner, "decode_cuda_graph_runner", None), "buffers", None)
        found = [getattr(buffers, name, None) for name in ("positions", "req_pool_indices")]
        vectors = [
            one for one in found if isinstance(one, torch.Tensor) and one.dtype is torch.int64 and one.dim() == 1
        ]
        if len(vectors) == 2 and min(map(len, vectors)) >= max(state.captured):
            state.inputs = GraphInputs(*vectors)

    def row_table(self, device: torch.device | str) -> RowTable:
        """The parameters of all requests of this server."""
        if self._row_table is None:
            self._row_table = RowTable(device)
        return self._row_table

    def captures_model(self, processor: Any, state: HeadState, hidden: torch.Tensor, metadata: Any) -> bool:
        """SGLang captures its model into a CUDA graph, which has ``hidden``. The graph may get one more root, and steps
        of its size get graphs of their own when SGLang has nothing to do."""
        if not _is_capturing():
            return False
        if self._extra_root is not None:
            self._extra_root.add(torch.cuda.current_stream().cuda_stream)
        mode = mode_of(metadata)
        if id(processor) not in self._draft_processors and (mode.decodes or mode.verifies):
            # Graphs of before go later: a graph must not be destroyed during a capture.
            state.was_recaptured = state.was_recaptured or hidden.shape[0] in state.captured
            state.captured[hidden.shape[0]] = hidden
        return True

    def _try_with_ranks(
        self, prepared: dict[tuple[int, int], HeadState | str], failure: str | None
    ) -> list[str | None]:
        """``_agree_on_heads``, before and after a trial of the exchange, and a race of the screens. The others wait for
        the answers of a rank until this has returned. Heads whose exchange goes wrong become the reason in
        ``prepared``."""
        agreed = self._agree_on_heads(list(prepared.values()), failure)
        if self._ranks.num_ranks > 1 and None in agreed:
            # No rank comes here without the others: the exchange itself can be tried, and its result is agreed on.
            for place, (key, one) in enumerate(prepared.items()):
                if agreed[place] is None and isinstance(one, HeadState):
                    prepared[key] = one.check_exchange() or one
            tried = self._agree_on_heads(list(prepared.values()))
            agreed = [first or second for first, second in zip(agreed, tried, strict=True)]
        served = [one for one, reason in zip(prepared.values(), agreed, strict=False) if reason is None]
        if None in agreed:
            self._race_screens([one for one in served if isinstance(one, HeadState)])
        return agreed

    def _agree_on_heads(self, prepared: list[HeadState | str], failure: str | None = None) -> list[str | None]:
        """The reason that any rank has against each head. prepared: the heads of this rank, or why SGLang has to serve
        them. failure: why this rank does not know them. Stages of a pipeline before the last one have none."""
        reasons = [None if isinstance(one, HeadState) else one for one in prepared]
        statuses = [one.status for one in prepared if isinstance(one, HeadState)]
        answers = self._ranks.of_all([failure, reasons, statuses])
        if not prepared:
            self._statuses = next((statuses for _, _, statuses in answers if statuses), [])
        failure = self._ranks.first_reason([failed for failed, _, _ in answers])
        counts = {len(of_rank) for _, of_rank, _ in answers} - {0}
        if len(counts) > 1:
            failure = failure or "the ranks have different numbers of LM heads"
        if not counts and failure is not None:
            return [failure]
        return [
            failure or self._ranks.first_reason([of_rank[place] if of_rank else None for _, of_rank, _ in answers])
            for place in range(max(counts, default=0))
        ]

    def head_for(self, processor: Any, lm_head: Any) -> HeadState | None:
        """The state of this processor and head; None, with the reason logged once, where SGLang serves them."""
        key = (id(processor), id(lm_head))
        known = self._heads.get(key)
        if known is not None:
            return known
        if key not in self._heads:
            if _is_capturing():
                return None  # compiling would break the capture; a head is prepared before that or not at all
            if self._ranks.num_ranks > 1:
                prepared: HeadState | str = LATE_ON_RANKS
            else:
                prepared = self._prepare(processor, lm_head, starting=False)
            if not isinstance(prepared, HeadState):
                # SGLang may have wrapped a head that was prepared, as it does for LoRA adapters.
                weight = getattr(lm_head, "weight", None)
                wrapped = (at for at, one in self._heads.items() if one is not None and one.lm_head.weight is weight)
                self._heads |= dict.fromkeys(tuple(wrapped), None)
            self._admit(key, prepared, None if isinstance(prepared, HeadState) else prepared)
        return self._heads[key]

    def _prepare(self, processor: Any, lm_head: Any, starting: bool) -> HeadState | str:
        """A checked head, or why SGLang has to serve it. starting: the server has not allocated its KV cache yet."""
        try:
            reason = support.unsupported_head(processor, lm_head)
            if reason is not None:
                return reason
            exchange = Exchange.of_processor(processor)
            state = HeadState(processor, lm_head, exchange=exchange, batch_invariant=self.settings.deterministic)
            reason = self._check(state, starting)
            if reason is not None:
                return reason
            state.use_step_graphs = self.use_step_graphs and lm_head.weight.is_cuda
            state.copies_tokens, state.copies_staged = self.settings.is_pipeline, self.settings.verifies
            state.newly_searched(self.metrics.read_seconds)  # allocates its pinned memory now, not in a step
            return state
        except Exception as error:  # whatever a kernel or a model does, the server must start
            return f"its setup failed: {type(error).__name__}: {error}"

    def _admit(self, key: tuple[int, int], prepared: HeadState | str, reason: str | None) -> None:
        """Serve a head from now on, or leave it to SGLang, for ``reason``."""
        self._heads[key] = prepared if isinstance(prepared, HeadState) and reason is None else None
        if reason is not None:
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        """Leave a head to SGLang, and say why."""
        self._refused.append(reason)
        self._update_gauge()
        place = "not active for one of its LM heads" if self.heads else "not active"
        extent = "that head" if self.heads else "everything"
        logger.warning("%s: %s, SGLang's own sampler is used for %s: %s", self._about, place, extent, reason)

    def _check(self, state: HeadState, starting: bool) -> str | None:
        """Give ``state`` its table and its screen, as far as they pass the checks on this machine. Returns why its
        kernels cannot be trusted, or None."""
        head = state.head
        max_rows = MAX_COMPILED_ROWS if head.lm_head.weight.is_cuda else MAX_INTERPRETED_ROWS
        if state.exchange is not None:
            reason = state.unsupported_rows(max_rows, self.settings.bool_masks)
            if reason is not None or state.whole_rows:
                return reason
        resolved = resolve(head.lm_head)
        for warning in resolved.warnings:
            logger.warning("flashsample: %s", warning)
        head.table = resolved.dispatch
        races = self.screen_mode is ScreenMode.AUTO and not resolved.knows_screens
        races = races and unsupported_race(head.lm_head) is None
        no_screen = self._build_screen(state, max_rows, starting, races)
        head.screen = None if state.screen is None else state.screen.serving(head.lm_head)
        checked = head.check(max_rows, bool_masks=self.settings.bool_masks)
        if checked.reason is not None:
            return checked.reason
        if checked.refused:
            logger.warning(
                "flashsample: %d configurations failed the self-check at start and are not used; their batch sizes use "
                "built-in ones, which passed it: %s",
                len(checked.refused),
                "; ".join(checked.refused),
            )
        if head.lm_head.batch_invariant and (reason := dependence_on_batch(head.lm_head)) is not None:
            return reason
        head.table = _without_failing_flashinfer(head)
        resolved = dataclasses.replace(resolved, dispatch=head.table)
        resolved = compare_compiled(resolved, head.parts, max_rows)
        for warning in resolved.warnings:
            logger.warning("flashsample: %s", warning)
        state.table_file = None if resolved.table_file is None else str(resolved.table_file.file)
        measured = self.screen_mode is ScreenMode.AUTO
        if state.screen is not None and not head.table.screened_rows(state.screen.rows, measured=measured):
            no_screen = f"its kernels fail here: {checked.unscreened or '; '.join(checked.refused)}"
            state.free_screen()
            state.screen = None
        if races and state.screen is not None:
            state.unraced = resolved
            return None
        self._announce_choices(state, resolved, no_screen)
        return None

    def _race_screens(self, states: list[HeadState]) -> None:
        """Race the screens of heads whose tables do not know them, and keep those that win: on all ranks alike. Every
        rank calls this once, for the same heads; ranks without any, for none."""
        raced = []
        for state in states:
            outcome: Any = NOT_RACED
            if state.unraced is not None and state.screen is not None:
                outcome = race_screen(state.head.lm_head, state.head.table, state.screen, state.stopwatch)
            raced.append(outcome)
        answers = self._ranks.of_all(raced)
        for place, state in enumerate(states):
            if state.unraced is not None:
                self._settle_screen(state, [of_rank[place] if of_rank else None for of_rank in answers])
        if any(outcome != NOT_RACED for of_rank in answers for outcome in of_rank):
            statuses = self._ranks.of_all([state.status for state in states])
            if not states:
                self._statuses = next(filter(None, statuses), [])

    def _settle_screen(self, state: HeadState, outcomes: list[Any]) -> None:
        """Keep a screen for the batches that were faster with it. outcomes: of ``race_screen`` on each rank, None of
        one without a head."""
        assert state.unraced is not None and state.screen is not None
        resolved, state.unraced = state.unraced, None
        reason = self._ranks.first_reason([one if isinstance(one, str) else None for one in outcomes])
        if reason is None:
            raced = [msgspec.convert(one, Outcome) for one in outcomes if one is not None]
            outcome = Outcome.of_ranks(raced)
        else:
            outcome = Outcome((), 0.0)
        table = state.head.table = decide(state.head.table, outcome)
        if reason is None:
            state.screen_decision = outcome.words(table)
        rows = table.screened_rows(state.screen.rows, measured=True)
        try:
            if rows:
                state.screen.fit(rows)
        except Exception as error:  # memory: a screen is private to a rank, which goes on with the others without it
            reason, rows = f"{type(error).__name__}: {error}", 0
        if not rows:
            state.free_screen()
            state.screen = None
        self._announce_choices(state, resolved, reason or NOT_MEASURED)

    def _build_screen(self, state: HeadState, max_rows: int, starting: bool, races: bool) -> str | None:
        """Build the screen of a head; returns why it gets none, or None. races: a race is to show for which batches,
        of the most that may have it."""
        lm_head, built_in = state.head.lm_head, state.head.table
        table = candidates(built_in, raced_kinds(lm_head)) if races else built_in
        try:
            reason = self.no_screen_reason or unsupported_screen(lm_head, table, self.screen_mode, max_rows)
            if reason is None and not starting:
                reason = "the model shows its LM head only after the memory is shared out"
            if reason is None:
                state.screen = HeadScreen(lm_head, table.screened_rows(max_rows), self.metrics.read_seconds)
                state.head.table = table
        except Exception as error:  # memory, or whatever a copy of this head meets: it is served without
            reason = f"{type(error).__name__}: {error}"
        return reason

    def _announce_choices(self, state: HeadState, resolved: ResolvedTable, reason: str | None) -> None:
        """Log the table of a head, and its screen or why it has none."""
        logger.info("flashsample: %s", resolved.line(state.screen_decision or ""))
        screen, weight = state.screen, state.head.lm_head.weight
        if screen is None:
            level = logging.WARNING if self.screen_mode is ScreenMode.ON else logging.INFO
            logger.log(
                level, "flashsample: no screen (INT8 copy of the LM head for small batches), same tokens: %s", reason
            )
            return
        logger.info(
            "flashsample: screen built, an INT8 copy of the LM head that makes batches of up to %d requests faster, "
            "same tokens: %s more bytes of GPU memory, %.1f %% of the head's",
            screen.rows,
            f"{screen.num_bytes:,}",
            100 * screen.num_bytes / (weight.numel() * weight.element_size()),
        )

    @property
    def head_of_replicas(self) -> HeadState | None:
        """The head that ranks with requests of their own share; None where there is none."""
        return next((state for state in self.heads if state.spans_replicas), None)

    def _takes_step(self, mode: Mode) -> bool:
        """Logits of a head that replicas share are left out: in a step that all ranks agree on, and in the graphs of
        SGLang's decode steps, after which they are computed where a step needs them. No fact of one rank alone
        counts."""
        if _is_capturing():
            return mode.decodes
        return self.step_of_replicas is not None and self.step_of_replicas.fused

    def can_defer(self, processor: Any, hidden: torch.Tensor, lm_head: Any, metadata: Any) -> HeadState | None:
        """The head's state when these logits need not be computed now; None when SGLang should compute them."""
        mode, drafting = mode_of(metadata), id(processor) in self._draft_processors
        shared = self._heads.get((id(processor), id(lm_head)))
        if shared is not None and shared.spans_replicas:
            if not self._takes_step(mode) or self.inactive_reason is not None or not shared.takes(hidden):
                return None
            self._renew_in_step(mode)
            return shared
        sampling = mode.decodes or (mode.extends and not metadata.extend_return_logprob)
        sampling = sampling or (drafting and mode.extends_drafts)
        if not sampling or mode.is_split or metadata.is_prefill_only:
            return None
        if mode.verifies and not self.settings.verifies:
            return None
        return self._head_in_step(processor, hidden, lm_head, mode)

    def prompt_head(self, processor: Any, hidden: torch.Tensor, lm_head: Any, metadata: Any) -> HeadState | None:
        """The head's state when the logprobs of these prompts are read here; None when SGLang should compute them, as
        those of a quantised head, and where the kernels cannot draw from the parts of ranks."""
        mode = mode_of(metadata)
        if id(processor) in self._draft_processors or not mode.extends or _is_capturing():
            return None
        if mode.verifies or mode.is_split:
            return None
        state = self._head_in_step(processor, hidden, lm_head, mode)
        if state is not None and state.head.lm_head.scale is not None:
            return None
        return None if state is None or state.whole_rows else state

    def _head_in_step(self, processor: Any, hidden: torch.Tensor, lm_head: Any, mode: Mode) -> HeadState | None:
        """The head's state in a step that it may serve; None where it is SGLang's, or these hidden states are."""
        if self.inactive_reason is not None or hidden.shape[0] == 0:
            return None
        self._renew_in_step(mode)
        drafting = id(processor) in self._draft_processors
        state = self._drawing_head if drafting else self.head_for(processor, lm_head)
        return state if state is not None and state.takes(hidden) else None

    def _renew_in_step(self, mode: Mode) -> None:
        if self._screens_outdated and self.weights_settled and mode.extends and not _is_capturing():
            self.renew_screens()

    @property
    def _drawing_head(self) -> HeadState | None:
        """The head that drafts are drawn from now; None where SGLang makes them."""
        return self.draft_head if self.draws_drafts else None

    def leave_drafts(self, draft_model: torch.nn.Module) -> None:
        """SGLang computes a draft model's logits, except where drafts are drawn from ``draft_head``."""
        self._draft_processors |= {id(processor) for processor in processors_of(draft_model).values()}
        if self.prepares_drafts:
            self.prepare_draft_head(draft_model, starting=True)  # its log lines come again before graphs are captured

    def prepare_draft_head(self, draft_model: torch.nn.Module, starting: bool) -> str | None:
        """Make ``draft_head`` the head of this model: one of the target's where it is the same, else a checked one of
        its own. Returns why there is none."""
        if self.draft_head is not None:
            return None
        if self.all_native_reason is not None or not self.heads:
            return self.all_native_reason or LATE_HEAD
        pairs = list(heads_of(draft_model))
        if len(pairs) != 1:
            return f"the draft model shows {len(pairs)} LM heads; expected 1"
        if any(state.lends_weight_alone(pairs[0][1]) for state in self.heads):
            return "the draft model has the weight of the target's quantised LM head without its scales"
        same = next((state for state in self.heads if state.is_of(*pairs[0])), None)
        prepared = same or self._prepare(*pairs[0], starting=starting)
        if same is None:
            (reason,) = self._agree_on_heads([prepared])
            if reason is not None or isinstance(prepared, str):
                return reason
            # Drafts exchange records alone, which have room in the target's memory.
            if prepared.exchange is not None and not prepared.exchange.use_memory_of(self.heads[0].exchange):
                return "the ranks of the draft model's LM head are not those of the target's"
            self._race_screens([prepared])
        assert isinstance(prepared, HeadState)
        self.draft_head = prepared
        return None

    def watch_tokens(self, watcher: Callable[[np.ndarray], None]) -> None:
        """``TokenCounts.watch``, by the counter that there is or a new one."""
        if self.token_counts is None:
            self.token_counts = token_counts.TokenCounts()
        self.token_counts.watch(watcher)

    def count_verified(
        self,
        batch: Batch | None,
        routing: Routing,
        verified: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        vocab: int,
        started: float,
    ) -> None:
        """Count one batch whose drafts were verified, a row per request. batch: None where SGLang did it. verified:
        what ``eagle_sample`` returns."""
        if self.token_counts is not None:
            drawn, _, nodes = verified
            accepted = drawn.reshape(-1)[nodes.clamp(min=0).long()]
            self.token_counts.add(torch.where(nodes >= 0, accepted, -1), vocab)
        self._count(routing, 0 if batch is None else batch.num_truncated, None if batch is None else started)

    def count(
        self, logits_output: Any, batch: Batch | None, routing: Routing, token_ids: torch.Tensor, started: float
    ) -> None:
        """Count one batch that was served. started: ``time.perf_counter()`` at the beginning of its call."""
        num_truncated = 0 if batch is None or routing.all_native else routing.part(batch).num_truncated
        if self.settings.report_path:
            models = logits_output.customized_info or {}
            logits_output.customized_info = {**models, "flashsample_path": list(routing.labels)}
        if self.token_counts is not None:
            self.token_counts.add(token_ids, logits_output.next_token_logits.shape[-1])
        self._count(routing, num_truncated, None if routing.native else started)

    def _count(self, routing: Routing, num_truncated: int, started: float | None) -> None:
        if self.metrics.add_batch(routing, num_truncated, started):
            self.show_counts()

    def show_counts(self) -> None:
        """Bring the counters of all heads up to date. A failure, as of a full disk, costs counts and not the server."""
        started = time.perf_counter()
        try:
            for state in self.heads:
                self.metrics.add_searched(state.newly_searched(self.metrics.read_seconds))
                self.metrics.add_steps(state.counts)
                if state.screen is not None:
                    self.metrics.add_screened(state.screen.new_counts(), state.screen.paused)
            self.metrics.flush()
        except Exception as error:
            self.metrics.drop()
            if not self._misses_counts:
                self._misses_counts = True
                text = "flashsample: counters miss steps, after %s: %s (this line comes once)"
                logger.warning(text, type(error).__name__, error)
        self.metrics.scheduling_seconds += time.perf_counter() - started

    def idle(self) -> None:
        """SGLang has nothing to do, and says so again and again: bring the counters of the last steps up to date, and,
        once there has been no batch for a while, capture a graph that steps will ask for."""
        now = time.perf_counter()
        is_quiet = now - self.metrics.last_batch >= QUIET_SECONDS
        # A draw reads the weights, whose memory SGLang may have released.
        if is_quiet and self.prepares_steps and self.weights_settled and self.inactive_reason is None:
            self._prepare_steps()
        if self.metrics.is_behind(now):
            self._idle_reads = IDLE_READS
        if self._idle_reads and now >= self.metrics.next_flush:
            self._idle_reads -= 1
            self.show_counts()

    def _prepare_steps(self) -> None:
        """Capture the graphs of one size and kind of steps that lack them."""
        try:
            for state in self.heads:
                if state.captured:
                    self.find_inputs(state, self._model_runner)
                if prepare_next(state, self.row_table(state.head.lm_head.weight.device)):
                    return
        except Exception as error:  # steps capture what they need
            self.prepares_steps = False
            logger.warning(PREPARES_NOTHING, f"{type(error).__name__}: {error}")


def _without_failing_flashinfer(head: Head) -> DispatchTable:
    """The table of ``head``, without FlashInfer where that cannot draw for it here."""
    if not head.table.flashinfer:
        return head.table
    try:
        reason = unsupported_by_flashinfer(head.lm_head)
    except Exception as error:  # memory for the check, or what else a starting server may lack
        reason = f"{type(error).__name__}: {error}"
    if reason is None:
        return head.table
    logger.warning(CANNOT_USE, reason)
    return head.table.without_flashinfer()


@functools.cache
def has_cuda() -> bool:
    """PyTorch asks the driver and the environment at each call."""
    return torch.cuda.is_available()


def _is_capturing() -> bool:
    return has_cuda() and torch.cuda.is_current_stream_capturing()
