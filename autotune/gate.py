"""Correctness before speed: a configuration is timed only after it has drawn the reference's tokens, and published only
after many draws of it have followed the distribution.

The tokens are compared on the first ids of the head, so many that each program of a large GPU walks several vocabulary
tiles, and on a few, with the last tile not full; with more and with fewer rows than a block holds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..flashinfer_path import draw_with_flashinfer
from ..kernels.features import Edit, LogitEdits, Truncation
from ..kernels.head import LMHead, Workspace
from ..kernels.lm_head_sample import lm_head_sample, num_parts, workspace_slots
from ..kernels.reference import allowed_ref, edit_logits_ref, transform_ref
from ..kernels.rng import GROUP_SIZE
from ..kernels.sample_logits import num_read_parts, sample_logits
from ..kernels.screened_sample import screened_sample
from ..paths import compute_logits
from ..screen import Screen
from ..selftest import Expectation, difference, expect
from ..tuned import draw_for, tile_for
from ..work import Work
from .builtin import kernels_of
from .inputs import Batch, as_bitmask
from .space import Config, ReadConfig, ScreenConfig, TileConfig
from .worker import Incorrect

MANY_IDS = 40_000
FEW_IDS = 33 * GROUP_SIZE
TEST_ROWS = 512
READ_ROWS = 17  # where the rows of a block do not decide the kernel
BATCHES = 4  # of the whole head that a screen's tokens are compared with the fused pass's on
SCORES_APART = 1e-4  # what two sums of a logit may move a score by, of it or of 1
MIN_ALLOWED = 16  # tokens of a truncated distribution of the G-test
MIN_EXPECTED = 10.0  # draws of a cell of the G-test: smaller ones are pooled


def first_ids(head: LMHead, most: int) -> LMHead:
    """``head`` cut to about ``most`` ids; its last group is as full as the whole vocabulary's, which decides how a
    reader is compiled."""
    size = min(head.vocab_size, most // GROUP_SIZE * GROUP_SIZE + head.vocab_size % GROUP_SIZE)
    return dataclasses.replace(head, weight=head.weight[:size], vocab_size=size)


def rival_of(config: ScreenConfig, head: LMHead, work: Work) -> TileConfig:
    """The fused pass that a screen's tokens are compared with on the whole head."""
    return tile_for(head, config.block_b + 1, work)


def launched_by(config: Config, kernels: Work) -> list[Work]:
    """What a check of ``config`` launches it for: a third of the rows are greedy, but greedy batches have a reader of
    their own, without noise."""
    both = isinstance(config, ReadConfig) and kernels is Work.PLAIN
    return [kernels, Work.GREEDY] if both else [kernels]


class Gate:
    """Compares configurations for ``head`` with the reference. What must be drawn is computed once."""

    def __init__(self, head: LMHead, many_ids: int = MANY_IDS) -> None:
        self.head = head
        self.many, self.few = first_ids(head, many_ids), first_ids(head, FEW_IDS)
        self._expected: dict[tuple, Expectation] = {}
        self._screens: dict[int, Screen] = {}
        self._batches: dict[int, Batch] = {}

    def screen(self, head: LMHead) -> Screen:
        """Of one of our heads; made when it is first needed."""
        if head.vocab_size not in self._screens:
            self._screens[head.vocab_size] = Screen(head, TEST_ROWS)
        return self._screens[head.vocab_size]

    def check(self, config: Config, work: Work) -> None:
        """Raises Incorrect where a token is not the reference's."""
        works = launched_by(config, kernels_of(work, config))
        block_b = READ_ROWS if isinstance(config, ReadConfig) else config.block_b
        for work in works:
            for head, num_rows in self._problems(work, block_b):
                expected = self._expect(head, num_rows, work, config)
                screen = self.screen(head) if isinstance(config, ScreenConfig) else None
                problem = difference(expected, config, return_logprob=False, screen=screen)
                if problem is not None:
                    raise Incorrect(problem)
        if isinstance(config, ScreenConfig):
            self._compare_with_fused(config, works[0])

    def _compare_with_fused(self, config: ScreenConfig, work: Work) -> None:
        """On the whole head and on logits as in the races, where most groups are ruled out: a row must not lose to what
        the fused pass finds for it. Raises Incorrect."""
        head, rows = self.head, config.block_b + 1
        batch, tile = self._batch(rows), rival_of(config, head, work)
        workspace = Workspace(workspace_slots(head, rows, tile), head.weight.device)
        options: dict[str, Any] = {
            "truncation": batch.truncation(work),
            "edits": batch.edits if work.edits else None,
            "draw": draw_for(head),
        }
        wrong = torch.zeros((), dtype=torch.int64, device=head.weight.device)
        for step in range(BATCHES):
            params = (batch.temperature(work), batch.seed, batch.position[step])
            screen = self.screen(head)
            found = screened_sample(
                batch.hidden, head, screen.int8_head, *params, config, workspace=screen.workspace, **options
            )
            want = lm_head_sample(batch.hidden, head, *params, tile, workspace=workspace, **options)
            short = want.score - found.score > SCORES_APART * want.score.abs().clamp(min=1.0)
            wrong += ((found.token != want.token) & short).sum()
        if int(wrong):
            raise Incorrect(
                f"{int(wrong)} of {BATCHES * rows} tokens are not the fused pass's, which finds better ones"
            )

    def _batch(self, rows: int) -> Batch:
        if rows not in self._batches:
            self._batches[rows] = Batch(self.head, rows)
        return self._batches[rows]

    def _problems(self, work: Work, block_b: int) -> list[tuple[LMHead, int]]:
        # The draw of truncated rows is compiled for a size of the vocabulary: one size is enough.
        few = self.many if work.truncates else self.few
        return [(self.many, block_b - 3), (few, block_b + 1)]

    def _expect(self, head: LMHead, num_rows: int, work: Work, config: Config) -> Expectation:
        reads = isinstance(config, ReadConfig)
        key = (head.vocab_size, num_rows, work, reads)
        if key not in self._expected:
            self._expected[key] = expect(head, num_rows, work, reads=reads)
        return self._expected[key]

    def g_test(self, config: Config | None, work: Work, draws: int, rows: int = TEST_ROWS) -> tuple[float, int]:
        """The G-test's p-value over at least ``draws`` draws, and how many there were. config: None for FlashInfer.

        Every row has the logits of one column of the head, times a power of two so that they spread, which no sum
        rounds: the distribution is known exactly.
        """
        head, weight = self.many, self.many.weight
        device, size = weight.device, head.vocab_size
        truncation = None
        temperature = torch.ones(rows, device=device)
        if work.truncates:
            top_k = torch.full((rows,), 50, dtype=torch.int32, device=device)
            top_p, min_p = torch.full((rows,), 0.95, device=device), torch.zeros(rows, device=device)
            truncation = Truncation(top_k, top_p, min_p)
        scale = 2.0 ** round(math.log2(2.0 * weight.shape[1] ** 0.5))
        edits, probability = self._distribution(work, truncation, rows, scale)
        while work.truncates and int((probability > 0).sum()) < MIN_ALLOWED and scale > 2.0**-8:
            scale /= 2  # a nucleus of a token or two is drawn right by a kernel that is wrong
            edits, probability = self._distribution(work, truncation, rows, scale)
        hidden = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=device)
        hidden[:, 0] = scale
        row = torch.arange(rows, device=device)
        counts = torch.zeros(size, dtype=torch.int64, device=device)
        options: dict[str, Any] = {"truncation": truncation, "edits": edits, "draw": draw_for(head)}
        if isinstance(config, ScreenConfig):
            screen, workspace = self.screen(head), Workspace(1, device)
        elif isinstance(config, TileConfig):
            workspace = Workspace(num_parts(head, rows, config) * rows, device)
        else:
            slots = num_read_parts(size, rows, config, device) * rows if config is not None else 1
            workspace = Workspace(slots, device)
            raw = compute_logits(hidden, head, workspace)
        calls = math.ceil(draws / rows)
        for call in range(calls):
            params = (temperature, row * 7919 + 1, torch.full_like(row, call))
            if config is None:
                assert truncation is not None
                token, _, _ = draw_with_flashinfer(raw, head.source, *params, truncation)
            elif isinstance(config, ScreenConfig):
                own = options | {"workspace": screen.workspace, "head_workspace": workspace}
                token, _, _ = screened_sample(hidden, head, screen.int8_head, *params, config, **own)
            elif isinstance(config, ReadConfig):
                token, _, _ = sample_logits(raw, head.source, *params, config, workspace=workspace, **options)
            else:
                token, _, _ = lm_head_sample(hidden, head, *params, config, workspace=workspace, **options)
            counts += torch.bincount(token, minlength=size)[:size]
        return g_test(counts.cpu(), probability.cpu()), calls * rows

    def _distribution(
        self, work: Work, truncation: Truncation | None, rows: int, scale: float
    ) -> tuple[LogitEdits | None, torch.Tensor]:
        """The edits of ``rows`` rows whose logits are the head's first column times ``scale``, and ``[size]``, their
        distribution."""
        head, edits = self.many, None
        logits = transform_ref(head.weight[None, :, 0].double() * scale, head.rounding, softcap=head.softcap)
        if work.edits:
            edits, logits = _edited(logits, rows, head)
        probability = torch.softmax(logits, -1)
        if truncation is not None:
            top_k, top_p, min_p = (limit[:1] for limit in (truncation.top_k, truncation.top_p, truncation.min_p))
            allowed = allowed_ref(logits.double(), torch.ones_like(top_p), top_k, top_p, min_p)
            probability = probability * allowed
            probability /= probability.sum()
        return edits, probability[0]


def _edited(logits: torch.Tensor, rows: int, head: LMHead) -> tuple[LogitEdits, torch.Tensor]:
    """The same edits of all kinds in every row, and the logits that they give."""
    ids = torch.arange(head.vocab_size, device=logits.device)[None, :]
    additive, scaling, bias = ids % 3 * -0.25, 1.0 + ids % 2 * 0.125, ids % 4 * 0.5
    allowed = ids % 5 != 0
    tensors = {"additive": additive, "scaling": scaling, "bias": bias}
    spread: dict[str, Any] = {name: tensor.float().expand(rows, -1).contiguous() for name, tensor in tensors.items()}
    mask = as_bitmask(allowed).expand(rows, -1).contiguous()
    flags = torch.full((rows,), int(sum(Edit)), dtype=torch.int32, device=logits.device)
    edited = edit_logits_ref(logits, additive=additive, scaling=scaling, allowed=allowed, bias=bias)
    return LogitEdits(**spread, mask=mask, rows=flags), edited.double()


def g_test(observed: torch.Tensor, probability: torch.Tensor) -> float:
    """p-value of ``observed`` counts under exact probabilities (log-likelihood ratio against chi-square). Cells that
    expect fewer than ``MIN_EXPECTED`` draws are pooled, never dropped.

    With Williams' correction (Biometrika 63, 1976): among thousands of cells of a few draws each, the plain statistic
    is too large by half a standard deviation, and p below 1e-3 comes ten times too often.
    """
    if bool((observed[probability == 0] > 0).any()):
        return 0.0  # forbidden, however rare
    observed = observed.double()
    expected = probability.double() * observed.sum()
    small = expected < MIN_EXPECTED
    observed = torch.cat([observed[~small], observed[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = 2.0 * torch.xlogy(observed, observed / expected).sum()
    freedom = torch.tensor(float(len(observed) - 1), dtype=torch.float64)
    if freedom <= 0:
        return 1.0
    correction = 1.0 + ((1.0 / expected).sum() - 1.0 / expected.sum()) / (6.0 * freedom)
    return float(torch.special.gammaincc(freedom / 2, (statistic / correction).cpu() / 2))
