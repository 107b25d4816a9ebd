"""A ``Head`` for tests of the SGLang layer: it notes its draws, fails where it is told to, and on a CPU draws by the
reference, in milliseconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from kernel_cases import edited_ref, reference

from sgl_flashsample.dispatch import DispatchTable
from sgl_flashsample.head import Head
from sgl_flashsample.kernels.logit_summary import LOWEST_LOGPROB
from sgl_flashsample.kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput
from sgl_flashsample.kernels.reference import gather_logprobs_ref, top_logprobs_ref, transform_ref
from sgl_flashsample.kernels.top_logprobs import TopLogprobs
from sgl_flashsample.kinds import SamplingPath
from sgl_flashsample.logprobs import Logprobs, WantedLogprobs
from sgl_flashsample.selfcheck import Checked


class Call(NamedTuple):
    """One call of ``Head.draw``. screened: the head had a screen."""

    rows: int
    params: BatchParams
    return_logprob: bool
    path: str | None
    screened: bool


@dataclasses.dataclass
class Script:
    """The part of fake heads in a test. calls: the draws so far, failed ones too. error: raised by each draw of
    ``smallest`` rows or more, of a head with a screen alone where ``screened`` is set. prompts: the logprobs that were
    asked for of prompts. check: the result of ``Head.check`` for a table; when None, everything is right."""

    calls: list[Call] = dataclasses.field(default_factory=list)
    prompts: list[WantedLogprobs] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    smallest: int = 1
    screened: bool = False
    check: Callable[[DispatchTable], Checked] | None = None


class FakeHead(Head):
    """On a GPU the kernels draw, and ``check`` compares nothing there either."""

    def __init__(self, lm_head: LMHead | torch.Tensor, *, script: Script | None = None, **options: Any) -> None:
        super().__init__(lm_head, **options)
        self.script = Script() if script is None else script

    def draw(
        self,
        hidden: torch.Tensor,
        params: BatchParams,
        *,
        return_logprob: bool = False,
        path: SamplingPath | str | None = None,
    ) -> SampleOutput:
        script, has_screen = self.script, self.screen is not None
        script.calls.append(Call(len(hidden), params, return_logprob, path, has_screen))
        if script.error is not None and len(hidden) >= script.smallest and (has_screen or not script.screened):
            raise script.error
        if hidden.is_cuda:
            return super().draw(hidden, params, return_logprob=return_logprob, path=path)
        lm_head = self.lm_head
        return _drawn(hidden.double() @ lm_head.weight.double().T, lm_head.spec, params, return_logprob)

    def draw_with_logprobs(
        self, hidden: torch.Tensor, params: BatchParams, wanted: WantedLogprobs
    ) -> tuple[SampleOutput, Logprobs]:
        self.script.calls.append(Call(len(hidden), params, True, None, self.screen is not None))
        if self.script.error is not None and len(hidden) >= self.script.smallest:
            raise self.script.error
        if hidden.is_cuda:
            return super().draw_with_logprobs(hidden, params, wanted)
        spec = self.lm_head.spec
        return _drawn_with_logprobs(hidden.double() @ self.lm_head.weight.double().T, spec, params, wanted)

    def draw_from_logits_with_logprobs(
        self, logits: torch.Tensor, params: BatchParams, wanted: WantedLogprobs, *, vocab_size: int | None = None
    ) -> tuple[SampleOutput, Logprobs]:
        if logits.is_cuda:
            return super().draw_from_logits_with_logprobs(logits, params, wanted, vocab_size=vocab_size)
        spec = dataclasses.replace(self.lm_head.spec, vocab_size=vocab_size or self.lm_head.vocab_size)
        return _drawn_with_logprobs(logits.double(), spec, params, wanted)

    def draw_from_logits(
        self,
        logits: torch.Tensor,
        params: BatchParams,
        *,
        vocab_size: int | None = None,
        return_logprob: bool = False,
    ) -> SampleOutput:
        if logits.is_cuda:
            return super().draw_from_logits(logits, params, vocab_size=vocab_size, return_logprob=return_logprob)
        spec = dataclasses.replace(self.lm_head.spec, vocab_size=vocab_size or self.lm_head.vocab_size)
        return _drawn(logits.double(), spec, params, return_logprob)

    def logprobs_of(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, wanted: WantedLogprobs, **options: Any
    ) -> Logprobs:
        script, spec = self.script, self.lm_head.spec
        script.prompts.append(wanted)
        if script.error is not None and len(hidden) >= script.smallest:
            raise script.error
        if hidden.is_cuda:
            return super().logprobs_of(hidden, token_ids, wanted, **options)
        dots = (hidden.double() @ self.lm_head.weight.double().T)[:, : spec.vocab_size]
        assert spec.logits_dtype is not None
        logits = transform_ref(dots, spec.logits_dtype, logit_scale=spec.logit_scale, softcap=spec.softcap)
        of_tokens = gather_logprobs_ref(logits, token_ids[:, None])[:, 0].float()
        top = None
        if wanted.top:
            ids, values = top_logprobs_ref(logits, wanted.top)
            counts = torch.full_like(token_ids, wanted.top) if wanted.counts is None else wanted.counts
            ids = ids.masked_fill(torch.arange(wanted.top) >= counts[:, None], -1)
            top = TopLogprobs(ids, values.float(), values.float(), None)
        ids = wanted.token_ids
        of_ids = None if ids is None else gather_logprobs_ref(logits, ids.expand(len(logits), -1)).float()
        return Logprobs(of_tokens, top, of_ids)

    def check(self, max_rows: int, *, bool_masks: bool = False) -> Checked:
        checked = Checked(self.table, None, ()) if self.script.check is None else self.script.check(self.table)
        self.table = checked.table
        if checked.unscreened is not None:
            self.screen = None
        return checked


def _drawn(dots: torch.Tensor, spec: LogitsSpec, params: BatchParams, return_logprob: bool) -> SampleOutput:
    """The reference's draw from ``[B, V]`` float64 products with the weight."""
    return _drawn_from(_edited(dots, spec, params), params, return_logprob)


def _drawn_with_logprobs(
    dots: torch.Tensor, spec: LogitsSpec, params: BatchParams, wanted: WantedLogprobs
) -> tuple[SampleOutput, Logprobs]:
    """The reference's draw, and the logprobs that are wanted."""
    logits = _edited(dots, spec, params)
    temperature = torch.ones_like(params.temperature) if wanted.original else params.temperature
    temperature = temperature if wanted.temperature is None else wanted.temperature
    drawn = _drawn_from(logits, params, wanted.are_of_draw)
    of_tokens = gather_logprobs_ref(logits, drawn.token_ids[:, None], temperature)[:, 0].float()
    top = None
    if wanted.top:
        ids, logprobs = top_logprobs_ref(logits, min(wanted.top, spec.vocab_size), temperature)
        pad = (0, wanted.top - ids.shape[1])
        ids = torch.nn.functional.pad(ids, pad, value=-1)
        logprobs = torch.nn.functional.pad(logprobs.float(), pad, value=LOWEST_LOGPROB)
        counts = torch.full((len(logits),), wanted.top) if wanted.counts is None else wanted.counts
        inside = torch.arange(wanted.top) < counts[:, None]
        logprobs = torch.where(inside, logprobs, LOWEST_LOGPROB)
        top = TopLogprobs(torch.where(inside, ids, -1), logprobs, logprobs, None)
    of_ids = None
    if wanted.token_ids is not None:
        ids = wanted.token_ids.expand(len(logits), -1)
        of_ids = gather_logprobs_ref(logits, ids, temperature).float()
    return drawn, Logprobs(of_tokens, top, of_ids)


def _edited(dots: torch.Tensor, spec: LogitsSpec, params: BatchParams) -> torch.Tensor:
    """``[B, V]`` logits of these products, edits included."""
    assert spec.shards == 1 and spec.logits_dtype is not None
    columns = dots[:, : spec.vocab_size]
    logits = transform_ref(columns, spec.logits_dtype, logit_scale=spec.logit_scale, softcap=spec.softcap)
    if params.edits is not None:
        edits = params.edits.part(0, len(logits))  # a row of edits per row of the batch
        logits = edited_ref(logits, edits)
    return logits


def _drawn_from(logits: torch.Tensor, params: BatchParams, return_logprob: bool) -> SampleOutput:
    want = reference(logits, params)
    logprobs = want.logprob_low.float() if return_logprob else None
    return SampleOutput(want.token, logprobs, torch.zeros(len(logits)))
