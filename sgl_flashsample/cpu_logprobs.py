"""Logprobs of rows of logits in host memory, by PyTorch's operations: the largest ones and those of given ids.

Values, limits and the order of ids are those of the kernels (``top_logprobs.py``, ``gather_logprobs.py``). Temporary
tensors are of a few rows at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .kernels.logit_summary import LOWEST_LOGPROB, LogitRows
from .kernels.params import LARGEST_LOGIT, BatchParams, Edit, LogitEdits
from .kernels.reference import edit_logits_ref
from .kernels.top_logprobs import TopLogprobs

BLOCK_LOGITS = 1 << 22  # of a block of rows, 4 bytes each in a few temporary tensors: 16 MiB


@torch.no_grad()
def read_on_cpu(
    rows: LogitRows,
    k: int,
    counts: torch.Tensor | None,
    lists: Sequence[torch.Tensor],
    log_mass: torch.Tensor | None,
    own_mass: torch.Tensor | None = None,
) -> tuple[TopLogprobs | None, list[torch.Tensor]]:
    """The ``k`` largest logprobs of each row, None where k is 0, and those of each of several lists of ids.

    k: up to ``MAX_TOP_LOGPROBS``. counts: ``[B]`` int32, ids of each row, or None. lists: ``[B, m]`` or ``[1, m]``
    int64 each. log_mass: ``[B, 2]`` float32 of the rows, returned where it is known. own_mass: ``[B, 2]`` float32,
    where it is written. Results are those of ``top_logprobs`` and ``gather_logprobs``. Arguments are not checked.
    """
    num_rows, vocab = rows.num_rows, rows.spec.vocab_size
    top = TopLogprobs.empty(num_rows, k, rows.logits.device) if k else None
    gathered = [torch.empty(num_rows, ids.shape[1], dtype=torch.float32) for ids in lists]
    size = max(1, BLOCK_LOGITS // vocab)
    for start in range(0, num_rows, size):
        block = slice(start, min(start + size, num_rows))
        some = _Block(rows, block)
        if own_mass is not None:
            own_mass[block] = some.log_mass
        for found, ids in zip(gathered, lists, strict=True):
            found[block] = some.logprobs_of(ids[block] if ids.shape[0] == num_rows else ids)
        if top is not None:
            top.store(start, some.top(k, None if counts is None else counts[block]))
    return top if top is None or log_mass is None else top._replace(log_mass=log_mass), gathered


class _Block:
    """Some rows of logits, edited, and their log-masses. logits: ``[b, V]`` float32, -inf of a forbidden id."""

    def __init__(self, rows: LogitRows, block: slice) -> None:
        spec, edits = rows.spec, None if rows.params is None else rows.params.edits
        logits = rows.logits[block, : spec.vocab_size].to(rows.rounding).float()
        if spec.logit_scale is not None:
            logits = (logits * spec.logit_scale).to(rows.rounding).float()
        if spec.softcap is not None:
            logits = (spec.softcap * torch.tanh(logits.double() / spec.softcap)).float()
        logits = torch.where(logits > float("-inf"), logits.clamp(max=LARGEST_LOGIT), float("-inf"))  # also for NaN
        self.logits = logits if edits is None else _edited(logits, edits, block, spec.vocab_start)
        self.vocab_start = spec.vocab_start
        self.temperature = torch.ones(len(logits), 1, dtype=torch.float64)
        if rows.temperature is not None:
            given = rows.temperature[block, None]
            hot, cold = BatchParams.MAX_TEMPERATURE, BatchParams.MIN_TEMPERATURE
            self.temperature = torch.where(given <= 0, 1.0, given.nan_to_num(nan=hot).clamp(cold, hot)).double()
        self.largest = self.logits.amax(1, keepdim=True)
        # Relative to the largest logit before the temperature: a quotient may be beyond a float32.
        mass = ((self.logits - self.largest) / self.temperature.float()).exp_().sum(1, keepdim=True)
        self.log_total = mass.double().log()

    def _logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 logprobs of ``[b, n]`` logits of these rows; NaN in a row without an allowed id."""
        relative = (logits.double() - self.largest) / self.temperature
        return (relative - self.log_total).clamp(LOWEST_LOGPROB, 0.0).float()

    def logprobs_of(self, ids: torch.Tensor) -> torch.Tensor:
        """``[b, m]`` float32, of ``[b, m]`` or ``[1, m]`` absolute ids."""
        columns = (ids - self.vocab_start).expand(len(self.logits), -1)
        inside = (columns >= 0) & (columns < self.logits.shape[1])
        logprobs = self._logprobs(self.logits.gather(1, torch.where(inside, columns, 0)))
        return torch.where(inside, logprobs, LOWEST_LOGPROB)

    @functools.cached_property
    def log_mass(self) -> torch.Tensor:
        """``[b, 2]`` float32, as in ``SampleOutput``."""
        mass = self.largest.double() / self.temperature + self.log_total
        has_token = self.largest > float("-inf")
        high = torch.where(has_token, mass.clamp(-LARGEST_LOGIT, LARGEST_LOGIT), self.largest).float()
        low = torch.where(mass.abs() < LARGEST_LOGIT, mass - high, self.log_total)
        return torch.cat([high, torch.where(has_token, low, 0.0).float()], 1)

    def top(self, k: int, counts: torch.Tensor | None) -> TopLogprobs:
        """The ``k`` largest logits of each row, of equal ones the smaller ids. counts: ``[b]``, ids of each row."""
        num_rows, vocab = self.logits.shape
        columns = _first_ids(self.logits, min(k, vocab))
        logits = self.logits.gather(1, columns)
        wanted = torch.full((num_rows, 1), k) if counts is None else counts[:, None]
        beyond = torch.arange(k) >= wanted.clamp(max=vocab)
        nothing = torch.tensor([float("-inf"), 0.0])

        def filled(values: torch.Tensor, nothing: float) -> torch.Tensor:
            padded = torch.nn.functional.pad(values, (0, k - values.shape[1]))
            return padded.masked_fill(beyond, nothing)

        return TopLogprobs(
            filled(self.vocab_start + columns, -1),
            filled(self._logprobs(logits), LOWEST_LOGPROB),
            filled(logits, float("-inf")),
            torch.where(wanted > 0, self.log_mass, nothing),
        )


def _first_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """``[b, k]`` int64 columns of the ``k`` largest of ``[b, V]`` logits, by logit down and column up.

    ``topk`` knows the least of these logits, but takes equal ones in any order. A stable sort of k then is one of V.
    """
    least = logits.topk(k, 1).values[:, -1:]
    above, tied = logits > least, logits == least
    chosen = above | (tied & (tied.cumsum(1, dtype=torch.int32) <= k - above.sum(1, keepdim=True)))
    columns = chosen.nonzero()[:, 1].view(len(logits), k)
    order = logits.gather(1, columns).sort(dim=1, descending=True, stable=True).indices
    return columns.gather(1, order)


def _edited(logits: torch.Tensor, edits: LogitEdits, block: slice, vocab_start: int) -> torch.Tensor:
    """The rows of ``block`` after their edits. logits: ``[b, V]`` float32."""
    rows = torch.arange(block.start, block.stop)
    columns = slice(vocab_start, vocab_start + logits.shape[1])
    flags = torch.full_like(rows, edits.given) if edits.rows is None else edits.rows[block]

    def of_each(edit: Edit, tensor: torch.Tensor | None, nothing: float) -> torch.Tensor | None:
        if tensor is None:
            return None
        return torch.where((flags & edit != 0)[:, None], tensor[rows // edits.repeats, columns], nothing)

    allowed = None
    if edits.mask is not None:
        allowed = _allowed(edits.mask[block], columns) | (flags & Edit.MASK == 0)[:, None]
    return edit_logits_ref(
        logits,
        additive=of_each(Edit.ADDITIVE, edits.additive, 0.0),
        scaling=of_each(Edit.SCALING, edits.scaling, 1.0),
        allowed=allowed,
        bias=of_each(Edit.BIAS, edits.bias, 0.0),
    )


def _allowed(mask: torch.Tensor, columns: slice) -> torch.Tensor:
    """``[b, V]`` bool from a mask as in ``LogitEdits``."""
    if mask.dtype is torch.bool:
        return ~mask[:, columns]
    ids = torch.arange(columns.start, columns.stop)
    covered = ids < 32 * mask.shape[1]
    words = mask[:, ids[covered] // 32]
    allowed = torch.ones(len(mask), len(ids), dtype=torch.bool)
    allowed[:, covered] = (words >> (ids[covered] % 32)) & 1 != 0
    return allowed
