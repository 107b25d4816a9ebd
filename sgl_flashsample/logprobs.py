"""The logprobs of a row of logits that are in memory: of its token, of its likeliest ids and of given ids.

A batch that asks for the last two takes a GEMM and a reader, whatever its size: all readers share the logits. For a few
given ids alone the logits are not needed (``paths.reads_ids_from_head``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .cpu_logprobs import read_on_cpu
from .cpu_path import draws_in_host_memory
from .kernels.gather_logprobs import check_ids, gather_logprobs
from .kernels.logit_summary import LogitRows, RowSummary, check_rows
from .kernels.merge_logprobs import merge_logprobs, pack_logprobs
from .kernels.params import SampleOutput
from .kernels.top_logprobs import MAX_TOP_LOGPROBS, TopLogprobs, check_k, top_logprobs


class WantedLogprobs(NamedTuple):
    """The logprobs that a batch asks for, beside those of its tokens.

    top: the most likeliest ids of any row, 0 to ``MAX_TOP_LOGPROBS``, 128. counts: ``[B]`` int32, those of each row;
    None: ``top`` in every row. token_ids: ``[B, m]`` int64, absolute ids of each row, -1 in unused places, or
    ``[1, m]``, the same for all rows; None: no given ids. original: at temperature 1 in every row, edits included
    (``SGLANG_RETURN_ORIGINAL_LOGPROB``); else at the temperature of the draw. temperature: ``[B]`` float32, those of
    the logprobs where the draw has others: a greedy row may have one beside sampled rows; not with ``original``.
    """

    top: int = 0
    counts: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    original: bool = False
    temperature: torch.Tensor | None = None

    @property
    def are_of_draw(self) -> bool:
        """The draw has the same temperatures."""
        return not self.original and self.temperature is None

    @classmethod
    def of(cls, logprobs: WantedLogprobs | int) -> WantedLogprobs:
        """An integer is the number of the likeliest ids. Raises ValueError for a value of another type."""
        if isinstance(logprobs, cls):
            return logprobs
        if isinstance(logprobs, bool) or not isinstance(logprobs, int):
            raise ValueError(f"logprobs is {logprobs!r}; expected WantedLogprobs, or the number of the likeliest ids")
        if not 0 <= logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"logprobs is {logprobs}; expected 0 to {MAX_TOP_LOGPROBS}")
        return cls(logprobs)

    def rows(self, start: int, stop: int, num_rows: int) -> WantedLogprobs:
        """The logprobs of the rows from ``start`` to ``stop`` of ``num_rows``, as views."""
        counts = None if self.counts is None else self.counts[start:stop]
        token_ids = self.token_ids
        if token_ids is not None and token_ids.shape[0] == num_rows:
            token_ids = token_ids[start:stop]
        temperature = None if self.temperature is None else self.temperature[start:stop]
        return self._replace(counts=counts, token_ids=token_ids, temperature=temperature)


def check_wanted(wanted: WantedLogprobs, num_rows: int, like: torch.Tensor) -> None:
    """Raise ValueError unless ``wanted`` is of this type and fits a batch of ``num_rows`` rows on the device of
    ``like``."""
    if not isinstance(wanted, WantedLogprobs):
        raise ValueError(f"wanted is {wanted!r}; expected WantedLogprobs")
    if type(wanted.top) is not int:  # a kernel would take True as an integer of one bit
        raise ValueError(f"wanted.top is {wanted.top!r}; expected an integer from 0 to {MAX_TOP_LOGPROBS}")
    if wanted.top != 0:
        check_k(wanted.top, "wanted.top")
    if wanted.counts is not None:
        check_rows("wanted.counts", wanted.counts, (num_rows,), torch.int32, like)
    if wanted.token_ids is not None:
        check_ids(wanted.token_ids, num_rows, like, "wanted.token_ids")
    if wanted.temperature is not None:
        if wanted.original:
            raise ValueError("wanted.original is True; expected False with wanted.temperature")
        check_rows("wanted.temperature", wanted.temperature, (num_rows,), torch.float32, like)


class Logprobs(NamedTuple):
    """of_tokens: ``[B]`` float32, of each row's token. top: the likeliest ids. of_ids: ``[B, m]`` float32, of given
    ids. None where they were not asked for; values as in ``TopLogprobs`` and ``gather_logprobs``. log_mass: ``[B, 2]``
    float32, as in ``SampleOutput``, at the temperature of these logprobs, of the ids that they are relative to: those
    of the head's part of the vocabulary, until ``merge_parts`` has merged all parts."""

    of_tokens: torch.Tensor
    top: TopLogprobs | None
    of_ids: torch.Tensor | None
    log_mass: torch.Tensor | None = None

    @classmethod
    def empty(cls, wanted: WantedLogprobs, num_rows: int, device: torch.device) -> Logprobs:
        """Room for the logprobs of ``num_rows`` rows."""
        of_tokens = torch.empty(num_rows, dtype=torch.float32, device=device)
        top = TopLogprobs.empty(num_rows, wanted.top, device) if wanted.top else None
        of_ids = None if wanted.token_ids is None else of_tokens.new_empty(num_rows, wanted.token_ids.shape[1])
        return cls(of_tokens, top, of_ids, of_tokens.new_empty(num_rows, 2))

    def rows(self, start: int, stop: int) -> Logprobs:
        """The logprobs of the rows from ``start`` to ``stop``, as views."""
        top, some = self.top, slice(start, stop)
        if top is not None:
            log_mass = None if top.log_mass is None else top.log_mass[some]
            top = TopLogprobs(top.token_ids[some], top.logprobs[some], top.logits[some], log_mass)
        of_ids, mass = (None if one is None else one[some] for one in (self.of_ids, self.log_mass))
        return Logprobs(self.of_tokens[some], top, of_ids, mass)

    def store(self, start: int, part: Logprobs) -> None:
        """Copy the logprobs of some rows to their places, from row ``start`` on."""
        places = slice(start, start + len(part.of_tokens))
        self.of_tokens[places] = part.of_tokens
        if self.top is not None and part.top is not None:
            self.top.store(start, part.top)
        if self.of_ids is not None and part.of_ids is not None:
            self.of_ids[places] = part.of_ids
        if self.log_mass is not None and part.log_mass is not None:
            self.log_mass[places] = part.log_mass

    def pack(
        self, first: int = 0, num_rows: int | None = None, *, tokens: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``pack_logprobs`` of these rows, which are those of a batch of ``num_rows`` from ``first`` on. tokens: the
        token of each row as the first of its given ids. out: where to write."""
        of_ids = self.of_ids
        if tokens:
            of_ids = torch.cat([self.of_tokens[:, None], *(() if of_ids is None else (of_ids,))], 1)
        assert self.log_mass is not None
        return pack_logprobs(self.top, of_ids, self.log_mass, first, num_rows, out)


class LogprobOutput(NamedTuple):
    """A draw, and the logprobs that were asked for with it.

    token_ids: ``[B]`` int64. logprobs: ``[B]`` float32, of these tokens. scores, log_mass: as in ``SampleOutput``;
    log_mass is None with other temperatures than the draw's. top_logprobs: the likeliest ids of each row, ``token_ids``
    and ``logprobs``, ``[B, k]`` each, first the likeliest; None where k is 0. token_ids_logprobs: ``[B, m]`` float32,
    of given ids; None without any.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    scores: torch.Tensor
    log_mass: torch.Tensor | None
    top_logprobs: TopLogprobs | None
    token_ids_logprobs: torch.Tensor | None

    @classmethod
    def of(cls, drawn: SampleOutput, found: Logprobs) -> LogprobOutput:
        return cls(drawn.token_ids, found.of_tokens, drawn.scores, drawn.log_mass, found.top, found.of_ids)


def read_logprobs(
    rows: LogitRows, token_ids: torch.Tensor, wanted: WantedLogprobs, drawn: SampleOutput | None = None
) -> Logprobs:
    """The logprobs that are wanted of ``rows``, whose tokens are ``token_ids``, ``[B]`` int64.

    drawn: a draw from these rows with logprobs, at the temperatures of ``rows``: its log-masses are taken. Never
    synchronises. Raises ValueError for a tensor of another shape, dtype, layout or device.
    """
    check_wanted(wanted, rows.num_rows, rows.logits)
    check_rows("token_ids", token_ids, (rows.num_rows,), torch.int64, rows.logits)
    # Where others are read, the token's is read with them: the same number, bit for bit, as that of the same id.
    of_tokens = None if drawn is None or wanted.top or wanted.token_ids is not None else drawn.logprobs
    log_mass = None if drawn is None else drawn.log_mass
    lists = [] if wanted.token_ids is None else [wanted.token_ids]
    if of_tokens is None:
        lists.append(token_ids[:, None])
    own_mass = None
    if log_mass is None:
        own_mass = torch.empty(rows.num_rows, 2, dtype=torch.float32, device=rows.logits.device)
    read = read_on_cpu if draws_in_host_memory(rows.logits.device) else _read_by_kernels
    top, found = read(rows, wanted.top, wanted.counts, lists, log_mass, own_mass)
    of_ids = None if wanted.token_ids is None else found[0]
    of_tokens = found[-1][:, 0] if of_tokens is None else of_tokens
    return Logprobs(of_tokens, top, of_ids, own_mass if log_mass is None else log_mass)


def merge_parts(
    parts: torch.Tensor,
    wanted: WantedLogprobs,
    of_tokens: torch.Tensor | None = None,
    lists: torch.Tensor | None = None,
) -> Logprobs:
    """The logprobs that are wanted, relative to the whole vocabulary, of those of its N parts in the order of the ids.

    parts: ``[N, B, F]`` float32, ``Logprobs.pack`` of each part, with the tokens where ``of_tokens`` is None. wanted:
    as the parts were read. of_tokens: ``[B]`` float32, the merged logprobs of the tokens (``merge_records``). lists:
    as in ``merge_logprobs``. Raises ValueError for parts that do not fit.
    """
    top, given, log_mass = merge_logprobs(parts, wanted.top, counts=wanted.counts, lists=lists)
    if of_tokens is None:
        assert given is not None
        of_tokens, given = given[:, 0].contiguous(), given[:, 1:].contiguous()
    elif given is None:
        given = log_mass.new_empty(len(log_mass), 0)
    return Logprobs(of_tokens, top, None if wanted.token_ids is None else given, log_mass)


def _read_by_kernels(
    rows: LogitRows,
    k: int,
    counts: torch.Tensor | None,
    lists: Sequence[torch.Tensor],
    log_mass: torch.Tensor | None,
    own_mass: torch.Tensor | None,
) -> tuple[TopLogprobs | None, list[torch.Tensor]]:
    """``read_on_cpu`` by kernels: one pass over the logits for all of it. own_mass: written by each list, for which one
    kernel does."""
    known = RowSummary(log_mass=log_mass)
    if log_mass is None:
        known = rows.complete(known, ranked=k > 0)
    top = top_logprobs(rows, k, counts=counts, summary=known) if k else None
    return top, [
        gather_logprobs(rows, ids, summary=known, own_mass=own_mass if ids.shape[1] else None) for ids in lists
    ]
