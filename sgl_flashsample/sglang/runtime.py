"""What this server process serves: its heads, their kernels, its counters. One per process, made by the sampler."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch

from .. import __version__
from ..api import SampleOutput
from ..choices import Choices
from ..kernels.features import LogitEdits
from ..kernels.rng import NOISE_ABI
from . import screening, support, trace, tuning
from .agreement import Ranks
from .counters import Counters
from .head_state import MAX_COMPILED_ROWS, HeadState
from .lazy_logits import LazyLogits
from .rows import Rows
from .screening import HeadScreen, Mode
from .steady import Steady
from .versions import sglang_version

logger = logging.getLogger("sgl_flashsample")

REPORT_PATH_VARIABLE = "FLASHSAMPLE_REPORT_PATH"
STEP_GRAPHS_VARIABLE = "FLASHSAMPLE_STEP_GRAPHS"
NATIVE_FEATURES = "custom logit processors, sampling masks, beams, top logprobs and token-id logprobs"


class Runtime:
    """State of the fused pass in this process.

    problem: why nothing is fused, in words; None while the fused pass is active. mixing_problem: the same for batches
    in which some rows need SGLang's sampler, grammar_problem: for rows with a grammar, screen_problem: why no head has
    a screen. weights_settled: nobody is about to change weights. trace: what counts the drawn tokens, where that was
    asked for. steady: the batch of the last step, where the next may repeat that.
    """

    def __init__(self, problem: str | None) -> None:
        self.problem = problem
        self.mixing_problem: str | None = None
        self.grammar_problem: str | None = None
        self.server_seed = 0
        self.custom_processors = self.original_logprobs = self.bool_masks = self.deterministic = False
        self.syncs_tokens = False
        self.tp_size = 1
        self.report_path = os.environ.get(REPORT_PATH_VARIABLE) == "1"
        self.replays = os.environ.get(STEP_GRAPHS_VARIABLE) != "0"
        self._screening = screening.asked_for()
        self.screen_problem = _server_screen_problem(self._screening)
        self.weights_settled = True
        self._screens_outdated = False
        self._heads: dict[tuple[int, int], HeadState | None] = {}
        metrics = False
        try:
            from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB, SYNC_TOKEN_IDS_ACROSS_TP
            from sglang.srt.runtime_context import get_device, get_exec, get_observability, get_parallel

            self.server_seed = int(get_device().random_seed or 0)
            self.bool_masks = getattr(get_exec().kernel, "grammar_backend", None) == "outlines"
            self.custom_processors = bool(get_exec().features.enable_custom_logit_processor)
            self.original_logprobs = bool(SGLANG_RETURN_ORIGINAL_LOGPROB)
            self.syncs_tokens = bool(SYNC_TOKEN_IDS_ACROSS_TP)
            self.deterministic = bool(get_exec().deterministic.enable_deterministic_inference)
            self.tp_size = int(get_parallel().tp_size)
            # With a pipeline, tokens of several steps are under way at once, and a graph's would be overwritten.
            self.replays = self.replays and int(get_parallel().pp_size) == 1
            metrics = bool(get_observability().enable_metrics)
            self.problem = self.problem or support.server_problem()
        except Exception as error:  # an SGLang whose configuration we cannot read is served by SGLang alone
            self.problem = self.problem or f"this server's configuration cannot be read ({error})"
        self.counters = Counters(metrics)
        self.trace = trace.of_this_server()
        self.steady: Steady | None = None

    def disable(self, problem: str) -> None:
        """Leave everything to SGLang's sampler from now on, and say why, once."""
        if self.problem is None:
            self.problem = problem
            logger.warning("flashsample: off, SGLang's own sampler takes over: %s", problem)

    def stop_mixing(self, problem: str) -> None:
        """Leave batches in which some rows need SGLang's sampler to it as a whole, from now on, and say why."""
        self.mixing_problem = problem
        logger.warning("flashsample: SGLang's own sampler takes over every mixed batch: %s", problem)

    def stop_grammars(self, problem: str) -> None:
        """Leave rows with a grammar to SGLang's sampler from now on, and say why."""
        self.grammar_problem = problem
        logger.warning("flashsample: SGLang's own sampler takes over every row with a grammar: %s", problem)

    def weights_change(self) -> None:
        """Weights change, or may have changed: no screen serves until ``renew_screens``."""
        for state in filter(None, self._heads.values()):
            state.weights_change()
            self._screens_outdated = self._screens_outdated or state.has_screen

    def free_screens(self) -> None:
        """Give the memory of all screens back: SGLang has released that of the weights."""
        for state in filter(None, self._heads.values()):
            state.free_screen()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def renew_screens(self) -> None:
        """Make all screens copies of the weights as they are now. Outside of decode steps: it takes a while."""
        if not self._screens_outdated:
            return
        self._screens_outdated = False
        started = time.monotonic()
        states = [state for state in self._heads.values() if state is not None and state.has_screen]
        for state in states:
            state.renew_screen()
        if any(state.has_screen for state in states):
            logger.info("flashsample: screen made anew after a change of weights in %.2f s", time.monotonic() - started)

    def stop_screens(self, problem: str) -> None:
        """Draw without screens from now on, and say why."""
        for state in filter(None, self._heads.values()):
            state.give_up_screen(problem)

    @property
    def _about(self) -> str:
        return f"flashsample {__version__} with SGLang {sglang_version()}"

    def announce_inactive(self) -> None:
        logger.warning("%s: not active, SGLang's own sampler serves everything: %s", self._about, self.problem)

    def prepare_model(self, model: torch.nn.Module) -> None:
        """After the weights have loaded: compile and check the kernels, then say in one line what is active."""
        from sglang.srt.layers.logits_processor import LogitsProcessor

        if self.problem is not None:
            return
        started = time.monotonic()
        modules = dict(model.named_modules())
        states = []
        for name, module in modules.items():
            lm_head = getattr(modules.get(name.rpartition(".")[0]), "lm_head", None)
            if isinstance(module, LogitsProcessor) and lm_head is not None:
                states.append(self.head_for(module, lm_head, starting=True))
        if not states:
            logger.info("%s: fused sampling active once the model shows its LM head", self._about)
        for state in filter(None, states):
            head = state.current()
            logger.info(
                "%s: fused sampling active, LM head %d x %d %s, noise %d, kernels compiled and checked in %.1f s; "
                "SGLang's own sampler for %s",
                self._about,
                *head.weight.shape,
                str(head.weight.dtype).removeprefix("torch."),
                NOISE_ABI,
                time.monotonic() - started,
                NATIVE_FEATURES,
            )

    def head_for(self, processor: Any, lm_head: Any, starting: bool = False) -> HeadState | None:
        """The state of this processor and head; None, with the reason logged once, where SGLang serves them. starting:
        memory is still to be shared out."""
        key = (id(processor), id(lm_head))
        if key not in self._heads:
            if _is_capturing():
                return None  # compiling would break the capture; a head is prepared before that or not at all
            self._heads[key] = self._prepare(processor, lm_head, starting)
        return self._heads[key]

    def _prepare(self, processor: Any, lm_head: Any, starting: bool) -> HeadState | None:
        try:
            problem = support.head_problem(processor, lm_head)
            if problem is None:
                state = HeadState(processor, lm_head)
                max_rows = MAX_COMPILED_ROWS if lm_head.weight.is_cuda else 16
                head, ranks = state.current(), self._ranks()
                found = tuning.resolve_alike(head, self.tp_size, ranks, self.deterministic)
                no_screen = self._give_screen(state, found.choices, max_rows, starting)
                serving = None if state.screen is None else state.screen.serving(head)
                checked = tuning.check(head, max_rows, found, ranks, self.bool_masks, serving)
                state.choices, problem = checked.choices, checked.problem
                if problem is None:
                    state.replays = self.replays and lm_head.weight.is_cuda
                    state.scratch(1)
                    state.newly_searched(self.counters.read_interval)  # takes its pinned memory now, not in a step
                    if state.screen is not None and not screening.wins(
                        state.choices, self._screening, state.screen.rows
                    ):
                        no_screen = f"its kernels fail here: {checked.unscreened or '; '.join(checked.refused)}"
                        state.free_screen()
                        state.screen = None
                    self._about_screen(state, no_screen)
                    return state
        except Exception as error:  # whatever a kernel or a model does, the server must start
            problem = f"{type(error).__name__}: {error}"
        logger.warning("%s: not active, SGLang's own sampler serves everything: %s", self._about, problem)
        return None

    def _give_screen(self, state: HeadState, choices: Choices, max_rows: int, starting: bool) -> str | None:
        """Build the screen of a head that is to have one; returns why it is not, in words."""
        head = state.current()
        try:
            problem = self.screen_problem or screening.problem_for(head, choices, self._screening, max_rows)
            if problem is None and not starting:
                problem = "the model shows its LM head only after the memory is shared out"
            if problem is None:
                rows = screening.rows_of(choices, max_rows)
                state.screen = HeadScreen(head, rows, self.counters.read_interval)
        except Exception as error:  # memory, or whatever a copy of this head meets: it is served without
            problem = f"{type(error).__name__}: {error}"
        return problem

    def _about_screen(self, state: HeadState, problem: str | None) -> None:
        """Say in a line what screen a head has, or why it has none."""
        screen, weight = state.screen, state.current().weight
        if screen is None:
            level = logging.WARNING if self._screening is Mode.ON else logging.INFO
            logger.log(level, "flashsample: screen not built: %s", problem)
            return
        logger.info(
            "flashsample: screen built: %s bytes, %.1f %% of the LM head's, for batches of up to %d rows",
            f"{screen.num_bytes:,}",
            100 * screen.num_bytes / (weight.numel() * weight.element_size()),
            screen.rows,
        )

    def _ranks(self) -> Ranks:
        """The ranks that hold shards of a head."""
        if self.tp_size == 1:
            return Ranks()
        from sglang.srt.runtime_context import get_parallel

        return Ranks(get_parallel().tp_group)

    def can_defer(self, processor: Any, hidden: torch.Tensor, lm_head: Any, metadata: Any) -> HeadState | None:
        """The head's state when these logits need not be computed now; None when SGLang should compute them."""
        if self.problem is not None or hidden.shape[0] == 0:
            return None
        mode = metadata.forward_mode
        sampling = mode.is_decode() or (mode.is_extend() and not metadata.extend_return_logprob)
        if not sampling or mode.is_target_verify() or mode.is_split_prefill() or metadata.is_prefill_only:
            return None
        if self._screens_outdated and self.weights_settled and mode.is_extend() and not _is_capturing():
            self.renew_screens()
        state = self.head_for(processor, lm_head)
        if state is None or hidden.dtype != lm_head.weight.dtype or hidden.stride(1) != 1:
            return None
        return state

    def sample(
        self,
        lazy: LazyLogits,
        rows: Rows,
        edits: LogitEdits | None,
        positions: torch.Tensor,
        return_logprob: bool,
    ) -> SampleOutput | None:
        """Tokens for the rows of ``lazy``; None after a failure, which also switches the fused pass off."""
        state: HeadState = lazy.source
        try:
            out = state.sample(lazy.hidden, rows, edits, positions, return_logprob)
            if rows.num_truncated:
                self.counters.add_truncated(rows.num_truncated, state.newly_searched(self.counters.read_interval))
            if state.screen is not None:
                self.counters.add_screened(state.screen.counted(), state.screen.resting)
            return out
        except Exception as error:  # a request must not fail because a path cannot serve it
            self.disable(f"{type(error).__name__}: {error}")
            return None

    def repeat(self, lazy: LazyLogits, rows: Rows | None) -> None:
        """After a step of ``rows`` without logprobs and edits: let the next ones repeat it, where it was replayed."""
        if rows is None or self.trace is not None or self.report_path or self.syncs_tokens:
            return
        graphs = lazy.source.graphs
        if graphs is not None and graphs.replays(rows):
            self.steady = Steady(lazy.source, graphs, rows, self.disable)

    def look(self) -> None:
        """Before a step of which everything is asked: count those that were repeated."""
        if self.steady is not None:
            self.steady.count(self.counters)
            self.steady = None


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _server_screen_problem(mode: Mode) -> str | None:
    """Why no head of this server may have a screen, as far as its arguments say."""
    if mode is Mode.OFF:
        return f"{screening.SCREEN_VARIABLE} is off"
    try:
        return support.screen_problem()
    except Exception as error:  # an SGLang whose configuration we cannot read
        return f"this server's configuration cannot be read ({error})"
