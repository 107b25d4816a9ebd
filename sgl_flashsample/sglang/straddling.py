"""Groups of 16 ids that lie on two ranks, where the part of a rank is no multiple of 16 ids: 202,048 ids on 8 ranks.

A group of ids has one random number (``kernels/rng.py``), so one rank draws from it as a whole: the rank with its first
ids. Each rank draws from the whole groups of its part as from any part. The ranks hand each other the logits of the
first ids of their parts, 16 at most (``Exchange.first_logits``); each completes the group that ends on the next rank,
draws from it too, and merges the two draws (``Straddling.complete``). The exchange that follows is that of any parts,
and the tokens are those of one rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from ..defaults import HeadTraits
from ..kernels.merge_ranks import merge_records, pack_record
from ..kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput
from ..kernels.rng import GROUP_SIZE
from ..kernels.workspace import MAX_TOP_LOGPROBS
from ..logprobs import Logprobs, WantedLogprobs, merge_parts
from ..paths import (
    LogprobScratch,
    compute_logits,
    gemm_dtype,
    read_logits,
    read_logits_with_logprobs,
    read_logprobs_of_prompt,
)

MIN_WIDTH = 2 * GROUP_SIZE  # ids of a part, which then has a whole group wherever it begins


class Scratch(NamedTuple):
    """For batches of up to so many rows. readers: of a group. sent, group: ``[max_rows, GROUP_SIZE]``. lists: of
    ``merge_logprobs``."""

    readers: LogprobScratch
    sent: torch.Tensor
    group: torch.Tensor
    lists: torch.Tensor


@dataclasses.dataclass
class Straddling:
    """The geometry of one rank's part, and scratch.

    whole_groups: the head of the groups that lie on this rank alone. first: the head of the ids before these, which
    complete a group of the rank before; None where that group ends with its part. last: the head of the ids after
    these; None where there are none. group: the logits of the group that ``last`` begins; None without ``last``.
    next_rank: the rank that holds its other ids. scratch: None before ``reserve``.
    """

    whole_groups: LMHead
    first: LMHead | None
    last: LMHead | None
    group: LogitsSpec | None
    next_rank: int
    scratch: Scratch | None = None

    @classmethod
    def of_rank(cls, part: LMHead, rank: int, num_ranks: int, vocab_size: int) -> Straddling | None:
        """part: the rows of this rank, as many as every rank has: rank r holds the ids from ``r * W`` on. None where
        no group straddles, and where some rank has no whole group: all ranks get the same answer."""
        width = len(part.weight)
        last_start = _whole(width * (num_ranks - 1) + GROUP_SIZE - 1)
        if num_ranks == 1 or width % GROUP_SIZE == 0 or width < MIN_WIDTH or last_start >= vocab_size:
            return None
        start, stop = rank * width, (rank + 1) * width
        first_id = _whole(start + GROUP_SIZE - 1)
        is_last = rank == num_ranks - 1
        after_id = min(stop, vocab_size) if is_last else _whole(stop)
        spec = dataclasses.replace(
            part.spec, vocab_size=after_id - first_id, vocab_start=first_id, shards=num_ranks, total_ids=vocab_size
        )
        whole_groups = _rows(part, first_id - start, width if is_last else after_id - start, spec)
        first = _rows(part, 0, first_id - start) if first_id > start else None
        last = group = None
        if not is_last and after_id < stop:
            last = _rows(part, after_id - start, width)
            group = dataclasses.replace(spec, vocab_size=GROUP_SIZE, vocab_start=after_id)
        return cls(whole_groups, first, last, group, rank + 1)

    def reserve(self, max_rows: int) -> None:
        """Make scratch for ``max_rows`` rows. CUDA graphs that were captured with the scratch so far must not be
        replayed after that."""
        weight, dtype = self.whole_groups.weight, gemm_dtype(self.whole_groups)
        traits = HeadTraits.of(self.whole_groups).unmodelled
        traits = traits._replace(vocab_size=GROUP_SIZE, itemsize=dtype.itemsize)
        readers = LogprobScratch.for_rows(max_rows, traits, weight.device)
        logits = torch.zeros(2, max_rows, GROUP_SIZE, dtype=dtype, device=weight.device)
        lists = torch.empty(max_rows * 2 * MAX_TOP_LOGPROBS, dtype=torch.int32, device=weight.device)
        self.scratch = Scratch(readers, logits[0], logits[1], lists)

    def with_scratch(self, max_rows: int) -> Straddling:
        """The same, with scratch of its own for ``max_rows`` rows."""
        other = dataclasses.replace(self)
        other.reserve(max_rows)
        return other

    @property
    def num_bytes(self) -> int:
        """Device memory that the scratch takes."""
        scratch = self.scratch
        if scratch is None:
            return 0
        return sum(one.num_bytes for one in scratch.readers) + sum(tensor.nbytes for tensor in scratch[1:])

    def logits_of_first(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``[B, GROUP_SIZE]``: what the rank before needs, anything behind it. out: where to write; scratch when
        None."""
        assert self.scratch is not None
        sent = self.scratch.sent[: len(hidden)] if out is None else out
        if self.first is not None:
            compute_logits(hidden, self.first, out=sent[:, : len(self.first.weight)])
        return sent

    def logits_of_group(self, hidden: torch.Tensor, received: torch.Tensor) -> torch.Tensor | None:
        """``[B, GROUP_SIZE]``: the logits of the group that begins on this rank; None without one. received:
        ``[N, B, GROUP_SIZE]``, ``logits_of_first`` of all ranks."""
        if self.last is None or self.scratch is None:
            return None
        here = self.scratch.group[: len(hidden), : len(self.last.weight)]
        return self.group_of(compute_logits(hidden, self.last, out=here), received)

    def group_of(self, last: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """``logits_of_group`` of a rank with ``last``, whose logits are given, in the scratch or elsewhere."""
        assert self.scratch is not None
        logits, here = self.scratch.group[: len(last)], last.shape[1]
        if last.data_ptr() != logits.data_ptr():
            logits[:, :here] = last
        logits[:, here:] = received[self.next_rank, :, : GROUP_SIZE - here]
        return logits

    def complete(
        self, drawn: SampleOutput, logits: torch.Tensor | None, params: BatchParams, holds: list[Any]
    ) -> SampleOutput:
        """The draw from all ids that this rank answers for. drawn: from ``whole_groups``. logits: of
        ``logits_of_group``. holds: gets what the launches write to beside the result."""
        if logits is None or self.group is None or self.scratch is None:
            return drawn
        return_logprob = drawn.logprobs is not None
        workspace = self.scratch.readers.draw
        of_group = read_logits(logits, self.group, params, workspace, return_logprob=return_logprob)
        return _merged(drawn, of_group, return_logprob, holds)

    def complete_with_logprobs(
        self,
        drawn: SampleOutput,
        found: Logprobs,
        logits: torch.Tensor | None,
        params: BatchParams,
        wanted: WantedLogprobs,
        holds: list[Any],
    ) -> tuple[SampleOutput, Logprobs]:
        """``complete``, with the logprobs relative to these ids. found: relative to those of ``whole_groups``."""
        if logits is None or self.group is None or self.scratch is None:
            return drawn, found
        of_group, found_there = read_logits_with_logprobs(logits, self.group, params, wanted, self.scratch.readers)
        both = [
            one._replace(logprobs=beside.of_tokens, log_mass=beside.log_mass)
            for one, beside in ((drawn, found), (of_group, found_there))
        ]
        merged = _merged(both[0], both[1], True, holds)
        holds.append((of_group, found_there))
        assert merged.logprobs is not None
        if not wanted.top and wanted.token_ids is None:
            return merged, Logprobs(merged.logprobs, None, None, merged.log_mass)
        packed = [found.pack(), found_there.pack()]
        parts = torch.stack(packed)
        holds.append((packed, parts))
        return merged, merge_parts(parts, wanted, merged.logprobs, self.scratch.lists)

    def complete_prompt(
        self, found: Logprobs, logits: torch.Tensor | None, token_ids: torch.Tensor, wanted: WantedLogprobs
    ) -> Logprobs:
        """The logprobs of rows of a prompt relative to all ids that this rank answers for. found: relative to those of
        ``whole_groups``. token_ids: ``[T]`` int64, the token of each row."""
        if logits is None or self.group is None or self.scratch is None:
            return found
        found_there = read_logprobs_of_prompt(logits, self.group, token_ids, wanted, self.scratch.readers.rows)
        parts = torch.stack([found.pack(tokens=True), found_there.pack(tokens=True)])
        return merge_parts(parts, wanted, lists=self.scratch.lists)


def _merged(one: SampleOutput, other: SampleOutput, return_logprob: bool, holds: list[Any]) -> SampleOutput:
    """The draw from two parts, ``one`` of the lower ids."""
    packed = [pack_record(one), pack_record(other)]
    records = torch.cat(packed)
    holds.append((one, other, packed, records))
    return merge_records(records, return_logprob=return_logprob)


def _whole(ids: int) -> int:
    """The ids of so many that are in whole groups."""
    return ids // GROUP_SIZE * GROUP_SIZE


def _rows(part: LMHead, start: int, stop: int, spec: LogitsSpec | None = None) -> LMHead:
    """The head of some rows of the weight."""
    scale = None if part.scale is None else part.scale[start:stop]
    spec = dataclasses.replace(part.spec, vocab_size=stop - start) if spec is None else spec
    return LMHead(part.weight[start:stop], spec, scale=scale, hidden_dtype=part.hidden_dtype)
