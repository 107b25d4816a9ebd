"""A head that this server fuses, as the model has it now: its scratch, its choices, its screen, its graphs."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..api import BatchParams, SampleOutput, sample
from ..choices import Choices, choices_for
from ..kernels.features import LogitEdits
from ..kernels.head import LMHead, Workspace
from ..paths import make_workspace
from ..screen import Screen
from ..tuned import Shape
from .counters import DeviceCounters
from .rows import Rows
from .screening import HeadScreen
from .step_graphs import StepGraphs

logger = logging.getLogger("sgl_flashsample")

# Kernels are compiled at start for batches up to this size; the last tile also serves larger ones.
MAX_COMPILED_ROWS = 512


class HeadState:
    """A LogitsProcessor with its LM head, and the fused head made from them.

    SGLang may change either after the start (a new weight tensor, a logit scale set late): ``current`` follows.
    choices: what batches of the current head take; the built-in ones until others are put here. replays: whether
    batches that stay as they are become CUDA graphs. screen: of the head, where it has one. graphs: None until a batch
    is to be replayed, and again after every change of what they were captured with.
    """

    choices: Choices
    replays = False
    screen: HeadScreen | None = None

    def __init__(self, processor: Any, lm_head: Any) -> None:
        self.processor, self.lm_head = processor, lm_head
        self._parameters: dict[str, torch.Tensor] = getattr(lm_head, "_parameters", {})
        self._facts: tuple | None = None
        self._head: LMHead | None = None
        self._workspace: Workspace | None = None
        self._workspace_rows = 0
        self._searched: DeviceCounters | None = None
        self._serving: Screen | None = None  # what batches are drawn with
        self.graphs: StepGraphs | None = None

    def facts(self) -> tuple:
        """What a head is made of, and whether anybody has written to its weight, as far as PyTorch knows: as long as
        this stays as it is, so does ``current``."""
        processor = self.processor
        weight = self._parameters.get("weight")  # as an attribute of a module it is looked up in Python
        if weight is None:
            weight = self.lm_head.weight
        version = None if weight.is_inference() else weight._version
        softcap = getattr(processor, "final_logit_softcapping", None)
        return weight.data_ptr(), processor.logit_scale, softcap, processor.vocab_size, version

    def current(self) -> LMHead:
        facts = self.facts()
        if facts != self._facts:
            processor, weight = self.processor, self.lm_head.weight
            keeps_fp32 = processor.use_fp32_lm_head or getattr(processor, "use_fp32_lm_head_output", False)
            self._head = LMHead(
                weight.detach(),
                vocab_size=processor.vocab_size,
                logit_scale=processor.logit_scale,
                softcap=getattr(processor, "final_logit_softcapping", None) or None,
                logits_dtype=torch.float32 if keeps_fp32 else weight.dtype,
            )
            if self._facts is None or self.choices.shape != Shape.of(self._head):
                self.choices = choices_for(self._head)
            self._facts = facts
            self.graphs = None
        assert self._head is not None
        return self._head

    def scratch(self, num_rows: int) -> Workspace:
        """Workspace for ``num_rows`` rows; allocates for the first batch and for one larger than all before."""
        if num_rows > self._workspace_rows:
            # By doubling: beyond the rows that kernels are compiled for, a batch may grow at every step.
            rows = max(num_rows, 2 * self._workspace_rows, MAX_COMPILED_ROWS)
            searched = self._workspace.searched if self._workspace is not None else None
            self._workspace = make_workspace(self.current(), rows, searched, self.choices)
            self._workspace_rows = rows
            self.graphs = None
        assert self._workspace is not None
        return self._workspace

    def sample(
        self,
        hidden: torch.Tensor,
        rows: Rows,
        edits: LogitEdits | None,
        positions: torch.Tensor,
        return_logprob: bool,
    ) -> SampleOutput:
        """Tokens for ``hidden``: by a graph, where the batch has stayed as it is for some steps, else by launches."""
        head = self.current()
        self.scratch(hidden.shape[0])
        serving = None if self.screen is None else self.screen.serving(head)
        if serving is not self._serving:
            self._serving, self.graphs = serving, None
        if positions.dtype is not torch.int64:
            positions = positions.to(torch.int64)
        elif self.replays:
            if self.graphs is None:
                self.graphs = StepGraphs(self._draw, MAX_COMPILED_ROWS, hidden.device)
            out = self.graphs.step(rows, hidden, edits, positions, return_logprob)
            if out is not None:
                return out
        params = BatchParams(
            rows.temperature,
            rows.seed,
            positions,
            rows.truncation,
            edits,
            rows.all_greedy,
            rows.distribution_only,
        )
        return self._draw(hidden, params, return_logprob)[0]

    def _draw(self, hidden: torch.Tensor, params: BatchParams, return_logprob: bool) -> tuple[SampleOutput, Any]:
        screen = self._serving
        try:
            out = self._sampled(hidden, params, return_logprob, screen)
        except Exception as error:
            if screen is None:
                raise
            out = self._sampled(hidden, params, return_logprob, None)  # what fails there too is not the screen's fault
            self.give_up_screen(f"{type(error).__name__}: {error}")
        assert self._workspace is not None
        return out, (self._workspace, self._workspace.last_kept)

    def _sampled(
        self, hidden: torch.Tensor, params: BatchParams, return_logprob: bool, screen: Screen | None
    ) -> SampleOutput:
        assert self._head is not None
        return sample(
            hidden,
            self._head,
            params,
            return_logprob=return_logprob,
            workspace=self._workspace,
            choices=self.choices,
            screen=screen,
        )

    @property
    def has_screen(self) -> bool:
        return self.screen is not None and not self.screen.stopped

    def weights_change(self) -> None:
        """The head's weights change, or may have changed: no screen and no graph with one until ``renew_screen``."""
        if self.screen is not None:
            self.screen.invalidate()
            self._serving = self.graphs = None

    def free_screen(self) -> None:
        """Give the memory of the screen back, until ``renew_screen``. Waits for the device."""
        if self.screen is not None:
            self._serving = self.graphs = None
            self.screen.free(self.current())

    def renew_screen(self) -> None:
        """Make the screen a copy of what the head holds now. Not in a decode step: it waits for the device."""
        if self.screen is not None and not self.screen.stopped:
            try:
                self.screen.renew(self.current())
            except Exception as error:  # memory, or a head of another shape
                self.give_up_screen(f"{type(error).__name__}: {error}")

    def give_up_screen(self, problem: str) -> None:
        """Draw without a screen from now on, and say why."""
        if self.screen is not None:
            logger.warning("flashsample: screen off: %s", problem)
            self.screen.stop()
            self._serving = self.graphs = None

    def newly_searched(self, interval: float) -> int:
        """Rows that took a search over kept logits since the last call, as far as that is known without waiting;
        asked of the device at most once in ``interval`` seconds."""
        if self._searched is None:
            self._searched = DeviceCounters(self.scratch(1).searched, interval)
        (searched,) = self._searched.new()
        return searched
