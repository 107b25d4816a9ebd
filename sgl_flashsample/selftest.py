"""Kernels against their reference on this machine, in seconds: what ``doctor`` and a starting server run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .choices import Choices, Config, choices_for
from .flashinfer_path import FlashInferError, draw_with_flashinfer
from .kernels.features import Edit, LogitEdits, Truncation
from .kernels.head import LMHead, Workspace
from .kernels.lm_head_sample import lm_head_sample, num_parts
from .kernels.reference import (
    Reference,
    allowed_ref,
    edit_logits_ref,
    logits_ref,
    sample_ref,
    transform_ref,
    truncated_sample_ref,
)
from .kernels.rng import GROUP_SIZE
from .kernels.sample_logits import read_slots, sample_logits
from .kernels.screened_sample import screened_sample
from .kernels.tiles import ReadConfig, ScreenConfig
from .paths import compute_logits
from .screen import Screen
from .tuned import draw_for
from .warmup import compile_at_once, launch_once
from .work import Work

# Enough ids for each program of a large GPU to walk several vocabulary tiles.
MAX_IDS = 40_000
# Ids that the float64 reference takes at a time: a server that loads its model has little memory to spare.
CHUNK_IDS = 2_048
# Tensor cores cut the sum of so many terms and the accumulator to 24 bits of the largest, each time.
_TERMS_AT_ONCE = 16
_CUT = 2.0**-23


def compare_with_reference(
    head: LMHead,
    max_rows: int,
    chunk_ids: int = CHUNK_IDS,
    *,
    bool_masks: bool = False,
    choices: Choices | None = None,
    screen: Screen | None = None,
) -> str | None:
    """Draw with every tile and every reader that batches of up to ``max_rows`` rows take (of ``choices``, built in when
    None), whatever their features, on the first ids of ``head``. screen: of ``head``; also with every configuration of
    the screened path, on a copy of these ids.

    Compiles each kernel that such batches need, with ``bool_masks`` also those for grammar masks of dtype bool.
    Returns None when every token is the reference's (near-ties excepted), else what differed.
    """
    choices = choices or choices_for(head)
    check = _Check(head, max_rows, chunk_ids, bool_masks, choices, screen)
    used = choices.used_up_to(max_rows, screened=screen is not None)
    return next(filter(None, (check.problem_of(*one) for one in used)), None)


@dataclasses.dataclass(frozen=True)
class Checked:
    """choices: what is left of those that were checked. problem: why not even the built-in ones can be trusted, or
    None. refused: of each configuration that was taken out, what was wrong with it. unscreened: why nothing is screened
    any more, or None."""

    choices: Choices
    problem: str | None
    refused: tuple[str, ...]
    unscreened: str | None = None


def refuse_wrong(
    head: LMHead,
    max_rows: int,
    choices: Choices,
    *,
    bool_masks: bool = False,
    agree: Callable[[list[bool]], list[bool]] = lambda failed: failed,
    screen: Screen | None = None,
) -> Checked:
    """``compare_with_reference`` for each configuration by itself: one from a tuned table that fails, or that does not
    compile, gives its batches back to the built-in choice, which is checked in turn. Where a built-in one of the
    screened path fails, nothing is screened; any other is needed.

    agree: given which of the configurations failed here, which of them failed anywhere; called alike on all ranks.
    """
    refused: list[str] = []
    unscreened: str | None = None
    verified: set[tuple[Work, Config]] = set()
    while True:
        every = choices.used_up_to(max_rows, screened=screen is not None)
        used = [one for one in every if (one[0].launched(one[2]), one[2]) not in verified]
        if not used:
            return Checked(choices, None, tuple(refused), unscreened)
        check = _Check(head, max_rows, CHUNK_IDS, bool_masks, choices, screen)
        problems = [check.problem_or_error(*one) for one in used]
        failed = agree([problem is not None for problem in problems])
        for (work, num_rows, config), problem, fails in zip(used, problems, failed, strict=True):
            if not fails:
                verified.add((work.launched(config), config))
                continue
            if choices.pick(num_rows, work) != config:
                continue  # a refusal of plain batches took it from greedy ones
            problem = problem or f"another rank refuses {config} ({work})"
            if not choices.is_tuned(num_rows, work):
                if not isinstance(config, ScreenConfig):
                    return Checked(choices, problem, tuple(refused), unscreened)
                choices, unscreened = choices.without_screen(), problem
                continue
            choices = choices.without(config, work)
            refused.append(problem)


def flashinfer_problem(head: LMHead, num_rows: int = 8) -> str | None:
    """Why FlashInfer cannot draw for ``head`` here; None where it can. Also compiles it, a minute the first time."""
    if head.vocab_start or head.rounding is not head.weight.dtype:
        return "it needs a whole vocabulary, and logits of the weight's dtype"
    raw = compute_logits(_hidden(head, num_rows, CHUNK_IDS), head, Workspace(1, head.weight.device))
    row = torch.arange(num_rows, device=raw.device)
    temperature, params = 0.5 + row % 4 * 0.5, (row * 7919 - 5, row + 11)
    limits = Truncation(20 + row.int(), torch.where(row % 2 == 0, 0.95, 1.0), torch.zeros_like(temperature))
    try:
        token = draw_with_flashinfer(raw, head.source, temperature, *params, limits).token
    except FlashInferError as error:
        return str(error)
    logits = transform_ref(
        raw[:, : head.vocab_size].double(), head.rounding, logit_scale=head.logit_scale, softcap=head.softcap
    )
    # Wherever rounding decides which token is the last one, either is right.
    allowed = allowed_ref(logits, temperature, limits.top_k, limits.top_p, limits.min_p, slack=1e-5)
    inside = (token >= 0) & (token < head.vocab_size)
    wrong = ~inside | ~allowed.gather(1, token.clamp(0, head.vocab_size - 1)[:, None])[:, 0]
    return f"{int(wrong.sum())} of its {num_rows} tokens are truncated ones" if wrong.any() else None


class _Check:
    """Kernels of ``head`` compiled together, then checked one by one."""

    def __init__(
        self,
        head: LMHead,
        max_rows: int,
        chunk_ids: int,
        bool_masks: bool,
        choices: Choices,
        screen: Screen | None,
    ) -> None:
        # The last group is as full as the whole vocabulary's: a reader is compiled for whole groups or for any.
        vocab_size = min(head.vocab_size, MAX_IDS // GROUP_SIZE * GROUP_SIZE + head.vocab_size % GROUP_SIZE)
        self.head, self.chunk_ids = head, chunk_ids
        self.cut = dataclasses.replace(head, weight=head.weight[:vocab_size], vocab_size=vocab_size)
        self.first = {work: choices.pick(1, work) for work in Work}
        self.whole_screen = screen
        self.screen, self.screen_error = None, "no screen"
        if screen is not None and (screened_rows := choices.screened_rows(max_rows)):
            try:
                self.screen = Screen(self.cut, screened_rows)
            except Exception as error:  # memory for a second copy, or what else a starting server may lack
                self.screen_error = first_line(error)
        screens = (screen, self.screen) if self.screen is not None else ()
        compile_at_once([head, self.cut], max_rows, bool_masks=bool_masks, choices=choices, screens=screens)

    def problem_of(self, work: Work, num_rows: int, config: Config) -> str | None:
        if work.truncates and self.head.vocab_start:
            return None  # only a whole vocabulary is truncated
        if isinstance(config, ScreenConfig) and self.screen is None:
            return f"{self.screen_error} with {config} ({work})"
        problem = _compare(self.cut, num_rows, config, work, self.chunk_ids, self.screen)
        if problem is not None:
            return f"{problem} with {config} ({work})"
        if config == self.first[work] and work.truncates and self.cut.vocab_size < self.head.vocab_size:
            # The draw is compiled for a size of the vocabulary: the first truncated request must not wait for it.
            for return_logprob in (False,) if work.screened else (False, True):
                launch_once(self.head, config, work, return_logprob, screen=self.whole_screen)
        return None

    def problem_or_error(self, work: Work, num_rows: int, config: Config) -> str | None:
        try:
            return self.problem_of(work, num_rows, config)
        except Exception as error:  # whatever a compiler or a device makes of a configuration
            return f"{first_line(error)} with {config} ({work})"


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _compare(
    head: LMHead, num_rows: int, config: Config, work: Work, chunk_ids: int, screen: Screen | None
) -> str | None:
    expected = expect(head, num_rows, work, reads=isinstance(config, ReadConfig), chunk_ids=chunk_ids)
    # A batch that asks for logprobs is one without a screen.
    logprobs = (False,) if work.screened else (False, True)
    found = (difference(expected, config, return_logprob=logprob, screen=screen) for logprob in logprobs)
    return next((problem for problem in found if problem is not None), None)


@dataclasses.dataclass(frozen=True)
class Expectation:
    """A batch of every kind of row, and what must be drawn from it. raw: a GEMM's output, where a reader is compared.
    low, high: how far from ``logits`` a right logit may be."""

    head: LMHead
    work: Work
    hidden: torch.Tensor
    raw: torch.Tensor | None
    params: dict[str, torch.Tensor]
    low: torch.Tensor
    logits: torch.Tensor
    high: torch.Tensor
    truncation: Truncation | None
    edits: LogitEdits | None
    want: Reference


def expect(head: LMHead, num_rows: int, work: Work, *, reads: bool, chunk_ids: int = CHUNK_IDS) -> Expectation:
    """reads: from logits that a GEMM has written, as ``ReadConfig`` does."""
    hidden = _hidden(head, num_rows, chunk_ids)
    row = torch.arange(num_rows, device=hidden.device)
    greedy_row = 1 if work.truncates else 0
    temperature = torch.where(row % 3 == greedy_row, 0.0, 0.5 + row % 4 * 0.5)
    if work.greedy:
        temperature.zero_()
    params = {"temperature": temperature, "seed": row * 7919 - 5, "position": row + 11}
    raw = None
    if reads:
        raw = compute_logits(hidden, head, Workspace(1, hidden.device))
        low, logits, high = _logits_of_gemm(raw, head)
    else:
        error = accumulation_error(head.weight.shape[1])
        low, logits, high = (_logits(hidden, head, chunk_ids, sign * error) for sign in (-1, 0, 1))
    edits = None
    if work.edits:
        edits, edited = _edits(row, head)
        low, logits, high = map(edited, (low, logits, high))
    want = sample_ref(logits, low, high, temperature, params["seed"], params["position"], vocab_start=head.vocab_start)
    truncation = _truncation(row) if work.truncates else None
    return Expectation(head, work, hidden, raw, params, low, logits, high, truncation, edits, want)


def difference(
    expected: Expectation, config: Config, *, return_logprob: bool, screen: Screen | None = None
) -> str | None:
    """How what ``config`` draws differs from the expectation; None where it does not. screen: of its head."""
    head, hidden, num_rows = expected.head, expected.hidden, len(expected.hidden)
    truncation, want = expected.truncation, expected.want
    temperature = expected.params["temperature"]
    options: dict[str, Any] = {"truncation": truncation, "edits": expected.edits, "return_logprob": return_logprob}
    options["draw"] = draw_for(head)
    drawn = (temperature, expected.params["seed"], expected.params["position"])
    if isinstance(config, ScreenConfig):
        assert screen is not None and not return_logprob
        workspace = Workspace(1, hidden.device)
        options |= {"workspace": screen.workspace, "head_workspace": workspace}
        token, _, _ = screened_sample(hidden, head, screen.int8_head, *drawn, config, **options)
    elif isinstance(config, ReadConfig):
        assert expected.raw is not None
        workspace = Workspace(read_slots(head.vocab_size, num_rows, config, hidden.device), hidden.device)
        options["workspace"] = workspace
        options["all_greedy"] = expected.work.greedy
        token, _, _ = sample_logits(expected.raw, head.source, *drawn, config, **options)
    else:
        workspace = Workspace(num_parts(head, num_rows, config) * num_rows, hidden.device)
        options["workspace"] = workspace
        token, _, _ = lm_head_sample(hidden, head, *drawn, config, **options)
    if truncation is not None:
        assert workspace.last_kept is not None
        kept = workspace.last_kept.logits[:num_rows, : head.vocab_size].double()
        if isinstance(config, ScreenConfig):  # keeps the groups that it has read
            read = workspace.last_kept.peak[:num_rows].repeat_interleave(GROUP_SIZE, 1)[:, : head.vocab_size]
            kept = torch.where(read > float("-inf"), kept, expected.logits)
        limited = _limited(truncation, head) & (temperature > 0)
        room = 1e-5 * expected.logits.abs().clamp(min=1.0)
        inside = (kept >= expected.low - room) & (kept <= expected.high + room) | (kept == expected.logits)
        off = limited & ~inside.all(1)
        if off.any():
            return f"logits of {int(off.sum())} of {num_rows} rows differ from the reference"
        want = _with_truncated(want, kept, limited, *drawn, truncation)
    wrong = (token != want.token) & ~want.near_tie
    if wrong.any():
        return f"{int(wrong.sum())} of {num_rows} tokens differ from the reference"
    return None


def accumulation_error(terms: int) -> float:
    """Bound on the error of a float32 dot product of ``terms`` terms, in units of the sum of their absolute values."""
    return max(1.0, terms / _TERMS_AT_ONCE) * _CUT


def _hidden(head: LMHead, num_rows: int, chunk_ids: int) -> torch.Tensor:
    """Hidden states that give logits of a usual size."""
    weight = head.weight
    generator = torch.Generator(weight.device).manual_seed(1)
    spread = weight[:chunk_ids].float().norm(dim=1).mean().clamp(min=1e-6)
    hidden = torch.randn(num_rows, weight.shape[1], generator=generator, device=weight.device)
    return (hidden * (3.0 / spread)).to(weight.dtype)


def _logits(hidden: torch.Tensor, head: LMHead, chunk_ids: int, perturb: float) -> torch.Tensor:
    return torch.cat(
        [
            logits_ref(
                hidden,
                head.weight[start : start + chunk_ids],
                logit_scale=head.logit_scale,
                softcap=head.softcap,
                logits_dtype=head.logits_dtype,
                perturb=perturb,
            )
            for start in range(0, head.vocab_size, chunk_ids)
        ],
        dim=1,
    )


def _logits_of_gemm(raw: torch.Tensor, head: LMHead) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a GEMM's output means, and how far float32 may be off: the output itself is the model's own."""
    logits = transform_ref(
        raw[:, : head.vocab_size].double(), head.rounding, logit_scale=head.logit_scale, softcap=head.softcap
    )
    room = 0.0 if head.softcap is None else 2.0**-20 * head.softcap
    return logits - room, logits, logits + room


def _edits(row: torch.Tensor, head: LMHead) -> tuple[LogitEdits, Callable[[torch.Tensor], torch.Tensor]]:
    """Edits of all kinds, all of them in row 0 and another combination in each following one; and what they do to
    the reference's logits."""
    words = -(-(head.vocab_start + head.vocab_size) // 32)
    ids = torch.arange(words * 32, device=row.device)[None, :] + row[:, None]
    additive, scaling, bias = ids % 3 * -0.25, 1.0 + ids % 2 * 0.125, ids % 4 * 0.5
    allowed = ids % 5 != 0
    bits = allowed.view(len(row), words, 32).long() << torch.arange(32, device=row.device)
    packed = bits.sum(-1)
    flags = 15 - row % 16
    edits = LogitEdits(
        additive=additive,
        scaling=scaling,
        mask=torch.where(packed >= 2**31, packed - 2**32, packed).int(),
        bias=bias,
        rows=flags.int(),
    )
    columns = slice(head.vocab_start, head.vocab_start + head.vocab_size)

    def edited(logits: torch.Tensor) -> torch.Tensor:
        with_additive, with_scaling, with_mask, with_bias = ((flags & edit != 0)[:, None] for edit in Edit)
        return edit_logits_ref(
            logits,
            additive=torch.where(with_additive, additive, 0.0)[:, columns],
            scaling=torch.where(with_scaling, scaling, 1.0)[:, columns],
            allowed=(allowed | ~with_mask)[:, columns],
            bias=torch.where(with_bias, bias, 0.0)[:, columns],
        ).double()

    return edits, edited


def _truncation(row: torch.Tensor) -> Truncation:
    """Top-k and top-p in row 0, and another combination in each following one."""
    return Truncation(
        torch.where(row % 2 == 0, 20, 0).int(),
        torch.where(row % 4 < 2, 0.95, 1.0),
        torch.where(row % 5 == 4, 0.05, 0.0),
    )


def _limited(truncation: Truncation, head: LMHead) -> torch.Tensor:
    use_k = (truncation.top_k >= 1) & (truncation.top_k < head.vocab_size)
    return use_k | (truncation.top_p < 1) | (truncation.min_p > 0)


def _with_truncated(
    want: Reference,
    kept: torch.Tensor,
    limited: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    truncation: Truncation,
) -> Reference:
    """``want`` with the rows of a truncation drawn from the logits that they have kept."""
    logits = torch.where(limited[:, None], kept, 0.0)
    found = truncated_sample_ref(
        logits,
        torch.where(limited, temperature, 1.0),
        seed,
        position,
        truncation.top_k,
        truncation.top_p,
        truncation.min_p,
    )
    token = torch.where(limited, found.token, want.token)
    return dataclasses.replace(want, token=token, near_tie=torch.where(limited, found.near_tie, want.near_tie))
