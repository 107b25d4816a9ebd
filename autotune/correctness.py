"""Correctness before speed: a configuration is timed only after it has drawn the reference's tokens, and written to a
table only after many of its draws have followed the distribution.

The tokens are compared on the first ids of the head, so many that each program of a large GPU walks several vocabulary
tiles, and on a few, with the last tile not full; with more and with fewer rows than a block holds.
"""

from __future__ import annotations

import math

import torch

from ..dispatch import default_table
from ..kernels.config import GROUP_SIZE, ReadConfig, ScreenConfig, TileConfig, cdiv
from ..kernels.params import BatchParams, LMHead, LogitEdits, SampleOutput, Truncation
from ..kernels.reference import allowed_ref, transform_ref
from ..kinds import BatchKind, Config, SamplingPath, path_of
from ..selfcheck import MAX_IDS, Expectation, difference, edits_of_every_kind, expect, first_ids
from .errors import IncorrectTokens
from .gtest import g_test
from .labels import kernel_kind
from .launcher import Launcher, draw
from .workload import Workload

FEW_IDS = 33 * GROUP_SIZE
TEST_ROWS = 512
READ_ROWS = 17  # rows of a check of readers, whose kernel does not depend on them
BATCHES = 4  # batches on the whole head in which a screen's tokens are compared with the fused pass's
SCORE_TOLERANCE = 1e-4  # change of a score by another order of a logit's sum, relative to the score or to 1
MIN_ALLOWED = 16  # least number of tokens of a truncated distribution in the G-test


def fused_beside(config: ScreenConfig, head: LMHead, kind: BatchKind) -> TileConfig:
    """The fused pass that a screen's tokens are compared with on the whole head."""
    tile = default_table(head).lookup_on(SamplingPath.FUSED, config.block_b + 1, kind)
    assert isinstance(tile, TileConfig)
    return tile


def checked_kinds(config: Config, kind: BatchKind) -> list[BatchKind]:
    """The kinds of batches that a check of ``config`` draws. A third of the rows are greedy in any case, but batches of
    greedy rows alone have another reader, without noise."""
    kind = kernel_kind(kind, path_of(config))
    own_reader = isinstance(config, ReadConfig) and not (kind.truncate or kind.edit)
    return [kind, kind._replace(greedy=True)] if own_reader else [kind]


class CorrectnessCheck:
    """Compares configurations for ``head`` with the reference. The tokens of the reference are computed
    once."""

    def __init__(self, head: LMHead) -> None:
        self.head = head
        self.many, self.few = first_ids(head, MAX_IDS), first_ids(head, FEW_IDS)
        self._expected: dict[tuple, Expectation] = {}
        self._workloads: dict[int, Workload] = {}
        self._launcher = Launcher(head.weight.device, TEST_ROWS)

    def check(self, config: Config, kind: BatchKind) -> None:
        """Compare tokens of ``config`` with the reference. Raises IncorrectTokens where one differs."""
        try:
            self._check(config, kind)
        except Exception:
            self._launcher.drop_screens()
            raise

    def _check(self, config: Config, kind: BatchKind) -> None:
        block_b = READ_ROWS if isinstance(config, ReadConfig) else config.block_b
        for each in checked_kinds(config, kind):
            # The draw of truncated rows is compiled for a size of the vocabulary: one size is enough.
            few = self.many if each.truncate else self.few
            for head, rows in ((self.many, block_b - 3), (few, block_b + 1)):
                expected = self._expect(head, rows, each, reads=isinstance(config, ReadConfig))
                reason = difference(expected, config, self._launcher.parts(config, head, rows))
                if reason is not None:
                    raise IncorrectTokens(reason)
        if isinstance(config, ScreenConfig):
            self._compare_with_fused(config, kernel_kind(kind, path_of(config)))

    def _compare_with_fused(self, config: ScreenConfig, kind: BatchKind) -> None:
        """Compare scores on the whole head, on logits as in the races, where most groups are ruled out: a row must not
        lose to the token of the fused pass. Raises IncorrectTokens."""
        rows = config.block_b + 1
        if rows not in self._workloads:
            self._workloads[rows] = Workload(self.head, rows)
        workload, tile = self._workloads[rows], fused_beside(config, self.head, kind)
        wrong = torch.zeros((), dtype=torch.int64, device=self.head.weight.device)
        for params in workload.params(kind)[:BATCHES]:
            screened, fused = (self._draw(each, workload.hidden, self.head, params) for each in (config, tile))
            worse = fused.scores - screened.scores > SCORE_TOLERANCE * fused.scores.abs().clamp(min=1.0)
            wrong += ((screened.token_ids != fused.token_ids) & worse).sum()
        if int(wrong):
            raise IncorrectTokens(
                f"{int(wrong)} of {BATCHES * rows} tokens are not the fused pass's, which finds better ones"
            )

    def g_test(self, config: Config | None, kind: BatchKind, draws: int, rows: int = TEST_ROWS) -> tuple[float, int]:
        """The G-test's p-value over at least ``draws`` draws, and how many there were. config: None for FlashInfer.

        The logits of every row are one column of the head times a power of two, which spreads them. No sum rounds
        them: the distribution is known exactly.
        """
        head, weight, size = self.many, self.many.weight, self.many.vocab_size
        device = weight.device
        truncation = None
        if kind.truncate:
            top_k = torch.full((rows,), 50, dtype=torch.int32, device=device)
            truncation = Truncation(top_k, torch.full((rows,), 0.95, device=device), torch.zeros(rows, device=device))
        scale = 2.0 ** round(math.log2(2.0 * weight.shape[1] ** 0.5))
        edits, probability = self._distribution(kind, truncation, rows, scale)
        while kind.truncate and int((probability > 0).sum()) < MIN_ALLOWED and scale > 2.0**-8:
            scale /= 2  # a nucleus of a token or two is drawn right by a kernel that is wrong
            edits, probability = self._distribution(kind, truncation, rows, scale)
        hidden = torch.zeros(rows, weight.shape[1], dtype=head.hidden_dtype, device=device)
        hidden[:, 0] = scale
        row, ones = torch.arange(rows, device=device), torch.ones(rows, device=device)
        counts = torch.zeros(size, dtype=torch.int64, device=device)
        calls = cdiv(draws, rows)
        for call in range(calls):
            params = BatchParams(ones, row * 7919, torch.full_like(row, call), truncation, edits)
            token = self._draw(config, hidden, head, params).token_ids
            counts += torch.bincount(token, minlength=size)[:size]
        return g_test(counts.cpu().numpy(), probability.cpu().numpy()).p_value, calls * rows

    def _draw(self, config: Config | None, hidden: torch.Tensor, head: LMHead, params: BatchParams) -> SampleOutput:
        return draw(config, hidden, params, self._launcher.parts(config, head, len(hidden)))

    def _expect(self, head: LMHead, rows: int, kind: BatchKind, *, reads: bool) -> Expectation:
        key = (head.vocab_size, rows, kind, reads)
        if key not in self._expected:
            self._expected[key] = expect(head, rows, kind, reads=reads)
        return self._expected[key]

    def _distribution(
        self, kind: BatchKind, truncation: Truncation | None, rows: int, scale: float
    ) -> tuple[LogitEdits | None, torch.Tensor]:
        """The edits of ``rows`` rows whose logits are the head's first column times ``scale``, and ``[V]``, their
        distribution."""
        head, edits = self.many, None
        column = head.weight[None, :, 0].float() * scale
        if head.scale is not None:  # one float32 product, as in the kernel, and the only rounding before the logit's
            column *= head.scale
        logits = transform_ref(column.double(), head.rounding, softcap=head.softcap)
        if kind.edit:  # edits of all kinds, the same in every row
            edits, _ = edits_of_every_kind(torch.zeros(rows, dtype=torch.int64, device=logits.device), head)
            _, edited = edits_of_every_kind(torch.zeros(1, dtype=torch.int64, device=logits.device), head)
            logits = edited(logits)
        probability = torch.softmax(logits, -1)
        if truncation is not None:
            limits = (limit[:1] for limit in (truncation.top_k, truncation.top_p, truncation.min_p))
            temperature = torch.ones(1, device=logits.device)
            probability = probability * allowed_ref(logits.double(), temperature, *limits)
            probability /= probability.sum()
        return edits, probability[0]
