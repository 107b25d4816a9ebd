"""Ranks: what they decide together at the start of a server, and what those that share an LM head exchange in a step.
The only code that knows of groups of ranks.

``RankSync``            answers of all ranks to one question, at start
``Exchange.merge``      each rank has drawn from its part of the vocabulary: 16 bytes per row and rank
                        (``kernels/merge_ranks.py``)
``Exchange.draw_rows``  each rank has the logits of its part: whole rows go to the ranks, which draw them, and 16 bytes
                        per row come back. For truncations, which need the whole vocabulary, and for parts that the
                        kernels cannot draw from.

Every rank of a group calls the same of the two, for as many rows, with the same parameters, and gets the same output:
it is made of the same bytes in the same order. In a step no rank changes what it does alone: the others would wait for
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from ..kernels.launch import cdiv
from ..kernels.merge_ranks import NUM_FIELDS, merge_records, pack_record
from ..kernels.params import BatchParams, SampleOutput
from ..kernels.rng import GROUP_SIZE
from .support import is_elastic


class RankSync:
    """All ranks of a server. group: SGLang's ``GroupCoordinator`` of them; None for a server of one process."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank: int = 0 if group is None else group.rank_in_group
        self.num_ranks: int = 1 if group is None else group.world_size

    @classmethod
    def of_server(cls) -> RankSync:
        if not torch.distributed.is_initialized():
            return cls()
        from sglang.srt.distributed import parallel_state

        if is_elastic():  # a rank that joins later would wait for those that run
            return cls()
        group = parallel_state.get_world_group()
        return cls(group if group.world_size > 1 else None)

    def of_all(self, value: Any) -> list[Any]:
        """What each rank says, in their order; values are those of JSON. Every rank asks, as often, in the same order.
        It travels through host memory: for the start."""
        if self._group is None:
            return [value]
        data = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([len(data)]))
        padded = torch.nn.functional.pad(data, (0, int(max(sizes)) - len(data)))
        texts = zip(self._gather(padded), sizes, strict=True)
        return [msgspec.json.decode(text[: int(size)].numpy().tobytes()) for text, size in texts]

    def first_reason(self, reasons: list[str | None]) -> str | None:
        """Of the reasons that the ranks have against something, in their order, this rank's own or else the first."""
        if reasons[self.rank] is not None:
            return reasons[self.rank]
        return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        torch.distributed.all_gather(gathered, tensor, group=self._group.cpu_group)
        return gathered


def bytes_received(num_ranks: int, num_rows: int, part_bytes: int | None = None) -> int:
    """What a rank receives in a step. part_bytes: of one row's logits on a rank, where whole rows travel; None where
    ranks draw from their parts, and each reads the records of all from all others, as SGLang's all-reduce does."""
    record = NUM_FIELDS * 4
    if part_bytes is None:
        return (num_ranks - 1) * num_ranks * num_rows * record
    return (num_ranks - 1) * cdiv(num_rows, num_ranks) * (part_bytes + record)


class Exchange:
    """group: SGLang's ``GroupCoordinator`` of the ranks, in the order of their ids. Of its collectives it takes those
    below the operators that SGLang registers for torch.compile, which a CPU does not have."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = group.rank_in_group
        self.num_ranks: int = group.world_size

    @classmethod
    def of_processor(cls, processor: Any) -> Exchange | None:
        """Between the ranks whose logits a LogitsProcessor gathers; None where each rank has the whole head."""
        if not processor.do_tensor_parallel_all_gather:
            return None
        from sglang.srt.distributed import parallel_state

        attention = processor.use_attn_tp_group
        return cls(parallel_state.get_attn_tp_group() if attention else parallel_state.get_tp_group())

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
        padding = each * self.num_ranks - num_rows
        sent = (torch.nn.functional.pad(logits, (0, 0, 0, padding)) if padding else logits).contiguous()
        received = torch.empty_like(sent)
        self._group._all_to_all_single(received, sent)
        whole = self.num_ranks * width
        # The reader is compiled for rows that start at multiples of 16 elements.
        rows = torch.empty(each, cdiv(whole, GROUP_SIZE) * GROUP_SIZE, dtype=sent.dtype, device=sent.device)[:, :whole]
        rows.unflatten(1, (self.num_ranks, width)).copy_(received.view(self.num_ranks, each, width).transpose(0, 1))
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
