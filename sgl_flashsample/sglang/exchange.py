"""The exchange between the ranks that share an LM head. The only code that knows of groups of ranks.

``merge``      each rank has drawn from its part of the vocabulary: 16 bytes per row and rank
               (``kernels/merge_ranks.py``)
``draw_rows``  each rank has the logits of its part: whole rows go to the ranks, which draw them, and 16 bytes per row
               come back. For truncations, which need the whole vocabulary, and where a part's number of ids is not a
               multiple of 16.

Every rank of a group calls the same of the two, for as many rows, with the same parameters, and gets the same output:
it is made of the same bytes in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..kernels.launch import cdiv
from ..kernels.merge_ranks import NUM_FIELDS, merge_records, pack_record
from ..kernels.params import BatchParams, SampleOutput


class Exchange:
    """group: SGLang's ``GroupCoordinator`` of the ranks, in the order of their ids. Of its collectives it takes those
    below the operators that SGLang registers for torch.compile, which a CPU does not have."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = group.rank_in_group
        self.num_ranks: int = group.world_size

    def merge(self, drawn: SampleOutput) -> SampleOutput:
        """The draw from the whole vocabulary. drawn: this rank's, ``no_record`` where it holds no id."""
        records = self._records_of_all(drawn)
        return merge_records(records, return_logprob=drawn.logprobs is not None)

    def draw_rows(
        self,
        logits: torch.Tensor,  # [B, W], W the same on every rank
        params: BatchParams,
        draw: Callable[[torch.Tensor, BatchParams], SampleOutput],
    ) -> SampleOutput:
        """The draw from the whole vocabulary, ``draw`` giving that of some whole rows (``[R, N * W]``, the padding at
        their end) with their parameters. It is called once on each rank, also where there are fewer rows than ranks."""
        num_rows, width = logits.shape
        each = cdiv(num_rows, self.num_ranks)
        start = min(self.rank * each, num_rows - 1)  # a rank without a row draws one of zeros, which nobody takes
        stop = min(start + each, num_rows)
        sent = torch.nn.functional.pad(logits, (0, 0, 0, each * self.num_ranks - num_rows)).contiguous()
        received = torch.empty_like(sent)
        self._group._all_to_all_single(received, sent)
        rows = received.view(self.num_ranks, each, width).transpose(0, 1).reshape(each, self.num_ranks * width)
        drawn = draw(rows[: stop - start], params.rows(start, stop))
        mine = torch.zeros(1, each, NUM_FIELDS, dtype=torch.float32, device=logits.device)
        pack_record(drawn, records=mine[:, : stop - start])
        records = torch.empty(1, self.num_ranks * each, NUM_FIELDS, dtype=torch.float32, device=logits.device)
        self._group._all_gather_into_tensor(records.view(-1, NUM_FIELDS), mine.view(-1, NUM_FIELDS))
        return merge_records(records[:, :num_rows], return_logprob=drawn.logprobs is not None)

    def _records_of_all(self, drawn: SampleOutput) -> torch.Tensor:
        """``[N, B, 4]``: by SGLang's own all-reduce, one small kernel, where it takes the buffer, else by a gather."""
        shape = (self.num_ranks, drawn.token_ids.shape[0], NUM_FIELDS)
        records = torch.empty(shape, dtype=torch.float32, device=drawn.token_ids.device)
        custom = getattr(self._group, "ca_comm", None)
        if custom is not None and not custom.disabled and custom.should_custom_ar(records):
            return self._group.all_reduce(pack_record(drawn, self.rank, self.num_ranks, records=records))
        self._group._all_gather_into_tensor(records.view(-1, NUM_FIELDS), pack_record(drawn).view(-1, NUM_FIELDS))
        return records
