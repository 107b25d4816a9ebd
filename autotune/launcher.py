"""Draws by given configurations, whatever a table would choose: for the check of tokens and for timing."""

from __future__ import annotations

import torch

from ..kernels.config import ScreenConfig
from ..kernels.params import BatchParams, LMHead, SampleOutput
from ..kernels.workspace import Workspace
from ..kinds import Config
from ..paths import Parts, launch, launch_flashinfer
from ..screen import Screen


class Launcher:
    """The scratch of such draws on one device, and a screen of each head whose configuration needs one. screen_rows:
    rows of the largest screened batch."""

    def __init__(self, device: torch.device, screen_rows: int) -> None:
        self.screen_rows = screen_rows
        self._workspace = Workspace(1, device)
        self._screens: dict[tuple[int, int], Screen] = {}

    def parts(self, config: Config | None, head: LMHead, rows: int) -> Parts:
        """The parts of launches in batches of ``rows`` rows. config: None for FlashInfer. Scratch that is too small is
        replaced for later parts, not in earlier ones."""
        parts = Parts.of(head, self.screen(config, head), self._workspace)
        parts = parts.with_scratch([] if config is None else [config], rows)
        assert parts.workspace is not None
        self._workspace = parts.workspace
        return parts

    def drop_screens(self) -> None:
        """Make new screens for later launches: one whose launch has failed may be left uncleared."""
        self._screens.clear()

    def screen(self, config: Config | None, head: LMHead) -> Screen | None:
        """The screen of ``head``, made when it is first needed; None for a configuration that needs none."""
        if not isinstance(config, ScreenConfig):
            return None
        key = head.weight.data_ptr(), head.vocab_size
        if key not in self._screens:
            self._screens[key] = Screen(head, self.screen_rows)
        return self._screens[key]


def draw(config: Config | None, hidden: torch.Tensor, params: BatchParams, parts: Parts) -> SampleOutput:
    """One token per row of ``hidden`` ``[B, D]``. config: None for FlashInfer. Raises ValueError for arguments that do
    not fit, FlashInferError where FlashInfer cannot draw."""
    if config is None:
        return launch_flashinfer(hidden, params, parts)
    return launch(config, hidden, params, parts)
