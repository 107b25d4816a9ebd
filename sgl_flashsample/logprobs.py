"""The logprobs of a row of logits that are in memory: of its token, of its likeliest ids and of given ids.

A batch that asks for the last two takes a GEMM and a reader, whatever its size: all readers share the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .kernels.gather_logprobs import gather_logprobs
from .kernels.logit_summary import LogitRows, RowSummary
from .kernels.params import SampleOutput
from .kernels.top_logprobs import TopLogprobs, top_logprobs


class WantedLogprobs(NamedTuple):
    """The logprobs that a batch asks for.

    top: the most likeliest ids of any row, 0 to ``MAX_TOP_LOGPROBS``. counts: ``[B]`` int32, those of each row; None:
    ``top`` in every row. token_ids: ``[B, m]`` int64, absolute ids of each row, -1 in unused places, or ``[1, m]``, the
    same for all rows; None: no given ids. original: at temperature 1 in every row, edits included
    (``SGLANG_RETURN_ORIGINAL_LOGPROB``); else at the temperature of the draw.
    """

    top: int = 0
    counts: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    original: bool = False

    def first(self, num_rows: int) -> WantedLogprobs:
        """Those of the first rows."""
        counts, ids = self.counts, self.token_ids
        ids = ids if ids is None or len(ids) == 1 else ids[:num_rows]
        return self._replace(counts=None if counts is None else counts[:num_rows], token_ids=ids)


class Logprobs(NamedTuple):
    """of_tokens: ``[B]`` float32, of each row's token. top: the likeliest ids. of_ids: ``[B, m]`` float32, of given
    ids. None where they were not asked for; values as in ``TopLogprobs`` and ``gather_logprobs``."""

    of_tokens: torch.Tensor
    top: TopLogprobs | None
    of_ids: torch.Tensor | None


def read_logprobs(
    rows: LogitRows, token_ids: torch.Tensor, wanted: WantedLogprobs, drawn: SampleOutput | None = None
) -> Logprobs:
    """The logprobs that are wanted of ``rows``, whose tokens are ``token_ids``, ``[B]`` int64.

    drawn: a draw from these rows with logprobs, at the temperatures of ``rows``: its values are taken. Never
    synchronises. Raises ValueError for a tensor of another shape, dtype, layout or device.
    """
    known = RowSummary(log_mass=None if drawn is None else drawn.log_mass)
    if known.log_mass is None:
        known = rows.complete(known, ranked=wanted.top > 0)
    top = top_logprobs(rows, wanted.top, counts=wanted.counts, summary=known) if wanted.top else None
    of_ids = None if wanted.token_ids is None else gather_logprobs(rows, wanted.token_ids, summary=known)
    if drawn is None or drawn.logprobs is None:
        of_tokens = gather_logprobs(rows, token_ids[:, None], summary=known)[:, 0]
    else:
        of_tokens = drawn.logprobs
    return Logprobs(of_tokens, top, of_ids)
