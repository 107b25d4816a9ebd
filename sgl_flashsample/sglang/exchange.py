"""Ranks: what they decide together at the start of a server, and what those that share an LM head exchange in a step.
The only code that knows of groups of ranks.

``RankSync``            answers of all ranks to one question, at start
``Exchange.merge``      each rank has drawn some rows, or all of them from its part of the vocabulary: 20 bytes per row
                        and rank (``kernels/merge_ranks.py``)
``Exchange.draw_rows``  each rank has the logits of its part: whole rows go to the ranks, which draw them, and ``merge``
                        follows. For truncations, which need the whole vocabulary, and where a rank has no id.
``merge_children``      each rank has the best ids of its part, for trees of drafts: 8 bytes per id and rank more
``first_logits``        before ``merge``, where groups of ids lie on two ranks (``straddling.py``)
``gather_rows``         before a draw, where each rank has rows of its own (``replicas.py``)
``..._with_logprobs``   the same two, and the logprobs that were asked for beside those of the tokens, in an exchange
                        more: 12 bytes per likeliest id, row and rank, 4 per given id (``kernels/merge_logprobs.py``)

Every rank of a group calls the same of these, for as many rows, with the same parameters, and gets the same output:
it is made of the same bytes in the same order. In a step no rank changes what it does alone: the others would wait for
it.

Where the GPUs of a group reach each other's memory, these are kernels (``kernels/peer_memory.py``), which CUDA graphs
may hold, for up to ``PeerMemory.max_rows`` rows: ``draw.launch`` draws a larger batch in blocks. Elsewhere they are
collectives of the group, as for prompts (``Exchange.merge_prompt``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from ..kernels.config import cdiv
from ..kernels.draft_children import Children
from ..kernels.merge_logprobs import MAX_FIELDS, fields_of
from ..kernels.merge_ranks import NUM_FIELDS, merge_records, pack_record
from ..kernels.params import BatchParams, SampleOutput
from ..kernels.peer_memory import (
    PeerMemory,
    compile_exchanges,
    exchange_first_logits,
    exchange_logprobs,
    exchange_records,
    exchange_rows,
)
from ..kernels.rng import GROUP_SIZE
from ..logprobs import Logprobs, WantedLogprobs, merge_parts
from .support import is_elastic

logger = logging.getLogger("sgl_flashsample")

MAX_PROMPT_ROWS = 1024  # of a prompt, whose logprobs are exchanged at a time


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
        """The values of all ranks, in their order; values are those of JSON. Every rank calls this equally often, in
        the same order. The values travel through host memory: for the start."""
        if self._group is None:
            return [value]
        data = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([len(data)]))
        padded = torch.nn.functional.pad(data, (0, int(max(sizes)) - len(data)))
        texts = zip(self._gather(padded), sizes, strict=True)
        return [msgspec.json.decode(text[: int(size)].numpy().tobytes()) for text, size in texts]

    def first_reason(self, reasons: list[str | None]) -> str | None:
        """This rank's own reason, else the first of ``reasons``, which have the order of the ranks."""
        if reasons[self.rank] is not None:
            return reasons[self.rank]
        return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        torch.distributed.all_gather(gathered, tensor, group=self._group.cpu_group)
        return gathered


def bytes_received(num_ranks: int, num_rows: int, part_bytes: int | None = None, num_fields: int = 0) -> int:
    """Bytes that a rank receives in a step. part_bytes: size of one row's logits on a rank, where whole rows travel;
    None where ranks draw from their parts. num_fields: of a row's logprobs beside that of its token."""
    records = num_rows * (NUM_FIELDS + num_fields) * 4
    rows = 0 if part_bytes is None else cdiv(num_rows, num_ranks) * part_bytes
    return (num_ranks - 1) * (records + rows)


class Exchange:
    """group: SGLang's ``GroupCoordinator`` of the ranks, in the order of their ids. Its collectives are called below
    the operators that SGLang registers for torch.compile: a CPU has no such operators.

    memory: memory that all ranks reach, through which up to ``max_rows`` rows are exchanged at a time; None before
    ``connect`` and where there is none.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = group.rank_in_group
        self.num_ranks: int = group.world_size
        self.memory: PeerMemory | None = None
        self._allocated: Any = None

    @classmethod
    def of_processor(cls, processor: Any) -> Exchange | None:
        """The exchange between the ranks whose logits a LogitsProcessor gathers; None where each rank has the whole
        head."""
        if not processor.do_tensor_parallel_all_gather:
            return None
        from sglang.srt.distributed import parallel_state

        attention = processor.use_attn_tp_group
        return cls(parallel_state.get_attn_tp_group() if attention else parallel_state.get_tp_group())

    def connect(self, max_rows: int, width: int, dtype: torch.dtype) -> None:
        """Reserve memory that all ranks reach, for batches of up to ``max_rows`` rows of ``width`` logits each, where
        all ranks can. Every rank calls it, before any step."""
        group, num_ranks = self._group, self.num_ranks
        num_bytes = PeerMemory.num_bytes(num_ranks, max_rows, width, dtype)
        # SGLang's own all-reduce has found that these GPUs reach each other, and exchanges through such memory itself.
        custom: Any = getattr(group, "ca_comm", None)
        reserved, memory = False, None
        # A rank answers also after a failure: the others wait for it.
        try:
            if hasattr(custom, "graph_params") and not custom.disabled:
                region = _symmetric_memory(num_bytes, group.device)
                if region.is_cuda:  # coverage: needs several GPUs
                    compile_exchanges(region, num_ranks, max_rows, width, dtype)
                reserved = True
        except Exception as error:
            logger.warning("flashsample: %d bytes for exchanges between ranks: %s", num_bytes, error)
        if not all(RankSync(group).of_all(reserved)):
            return
        try:
            from torch.distributed._symmetric_memory import rendezvous

            handle = rendezvous(region, group.device_group.group_name)
            regions = [handle.get_buffer(rank, [num_bytes], torch.uint8) for rank in range(num_ranks)]
            regions[self.rank].zero_()
            torch.cuda.synchronize()
            memory = PeerMemory(regions, self.rank, max_rows, width, dtype)
        except Exception as error:
            # Its text alone: a log that is kept would keep the region, which the error's traceback has.
            logger.warning("flashsample: memory for exchanges between ranks cannot be shared: %s", str(error))
        # No rank writes to a region before it is zero.
        if all(RankSync(group).of_all(memory is not None)):
            self.memory = memory
            self._allocated = region, handle  # the regions are views, which do not keep the memory

    def use_memory_of(self, other: Exchange | None) -> bool:
        """Exchange through the memory that the same ranks have connected for another LM head. False where ``other`` is
        of other ranks."""
        if other is None or other._group is not self._group:
            return False
        self.memory, self._allocated = other.memory, other._allocated
        return True

    def of_all(self, values: list[int]) -> list[list[int]]:
        """The values of all ranks, in their order, each of as many. They travel through host memory, in each step."""
        own = torch.tensor(values)
        gathered = [torch.empty_like(own) for _ in range(self.num_ranks)]
        torch.distributed.all_gather(gathered, own, group=self._group.cpu_group)
        return [one.tolist() for one in gathered]

    def gather_rows(self, own: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """``[sum(rows), F]``: the rows of all ranks, in their order. own: those of this rank, ``[rows[rank], F]``."""
        most = max(rows)
        padded = own if len(own) == most else torch.nn.functional.pad(own, (0, 0, 0, most - len(own)))
        parts = self._gathered(padded)
        if min(rows) == most:
            return parts.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    def merge(self, drawn: SampleOutput, first: int = 0, num_rows: int | None = None) -> SampleOutput:
        """The draw from the whole vocabulary, of a batch of ``num_rows`` rows. drawn: this rank's, of the rows from
        ``first`` on, ``no_record`` where it holds no id; as many as the batch has by default."""
        num_rows = drawn.token_ids.shape[0] if num_rows is None else num_rows
        if self.memory is not None:
            return exchange_records(self.memory, drawn, first, num_rows)
        record = pack_record(drawn, first, num_rows)
        records = record.new_empty(self.num_ranks, *record.shape[1:])
        self._group._all_gather_into_tensor(records.view(-1, NUM_FIELDS), record.view(-1, NUM_FIELDS))
        return merge_records(records, return_logprob=drawn.logprobs is not None)

    def merge_children(self, children: Children) -> Children:
        """As many children of each node, of those that all ranks have among their ids."""
        num_rows, number = children.token_ids.shape
        fields = children.token_ids.float(), children.scores
        if self.memory is None:
            parts = self._gathered(torch.cat(fields, 1))
        else:
            torch.cat(fields, 1, out=self.memory.own_logprobs[:num_rows, : 2 * number])
            parts = exchange_logprobs(self.memory, num_rows, 2 * number)
        ids, scores = parts.unflatten(2, (2, number)).permute(2, 1, 0, 3).flatten(2)
        scores, places = scores.topk(number, dim=1)
        merged = Children(ids.gather(1, places).long(), scores)
        if self.memory is not None:  # the next exchange may write where ranks have read the parts of this one
            self.merge(SampleOutput(merged.token_ids[:, 0].contiguous(), None, scores[:, 0].contiguous()))
        return merged

    def merge_with_logprobs(
        self,
        drawn: SampleOutput,
        found: Logprobs,
        wanted: WantedLogprobs,
        first: int = 0,
        num_rows: int | None = None,
    ) -> tuple[SampleOutput, Logprobs]:
        """``merge``, and the logprobs of the batch relative to the whole vocabulary. found: those of the rows of
        ``drawn``, relative to the ids that they were drawn from. wanted: of all rows of the batch."""
        num_rows = len(drawn.token_ids) if num_rows is None else num_rows
        num_ids = 0 if wanted.token_ids is None else wanted.token_ids.shape[1]
        parts = lists = None
        if wanted.top or num_ids:
            memory, num_fields = self.memory, fields_of(wanted.top, num_ids)
            if memory is not None and num_fields <= MAX_FIELDS:
                lists = memory.lists
                found.pack(first, num_rows, out=memory.own_logprobs[:num_rows, :num_fields])
                parts = exchange_logprobs(memory, num_rows, num_fields)
            else:
                parts = self._gathered(found.pack(first, num_rows))
        # Last: the next exchange may write where ranks have read the parts of this one.
        merged = self.merge(drawn._replace(logprobs=found.of_tokens, log_mass=found.log_mass), first, num_rows)
        assert merged.logprobs is not None
        if parts is None:
            return merged, Logprobs(merged.logprobs, None, None, merged.log_mass)
        return merged, merge_parts(parts, wanted, merged.logprobs, lists)

    def merge_prompt(self, found: Logprobs, wanted: WantedLogprobs) -> Logprobs:
        """The logprobs of the rows of a prompt relative to the whole vocabulary. found: those of this rank's ids; each
        token is one of some rank. The parts of all ranks are in memory for ``MAX_PROMPT_ROWS`` rows at a time."""
        num_rows = len(found.of_tokens)
        merged = Logprobs.empty(wanted, num_rows, found.of_tokens.device)
        for start in range(0, num_rows, MAX_PROMPT_ROWS):
            stop = min(start + MAX_PROMPT_ROWS, num_rows)
            parts = self._gathered(found.rows(start, stop).pack(tokens=True))
            merged.store(start, merge_parts(parts, wanted.rows(start, stop, num_rows)))
        return merged

    def first_logits(self, own: torch.Tensor, by_memory: bool = True) -> torch.Tensor:
        """``[N, B, GROUP_SIZE]``, the logits of the first ids of all ranks. own: those of this rank; not copied where
        they are in ``memory`` already. by_memory: False for a prompt, which may have more rows than there is memory
        for."""
        if self.memory is None or not by_memory:
            return self._gathered(own)
        here = self.memory.own_logits[: len(own), :GROUP_SIZE]
        if here.data_ptr() != own.data_ptr():
            here.copy_(own)
        return exchange_first_logits(self.memory, len(own))

    def _gathered(self, packed: torch.Tensor) -> torch.Tensor:
        """``[N, B, F]``, the rows of all ranks, by a collective."""
        parts = packed.new_empty(self.num_ranks, *packed.shape)
        self._group._all_gather_into_tensor(parts.view(-1, packed.shape[1]), packed)
        return parts

    def draw_rows(
        self,
        logits: torch.Tensor,  # [B, W], W the same on every rank
        params: BatchParams,
        draw: Callable[[torch.Tensor, BatchParams], SampleOutput],
    ) -> SampleOutput:
        """The draw from the whole vocabulary, ``draw`` giving that of some whole rows (``[R, N * W]``, the padding at
        their end) with their parameters. Each rank calls ``draw`` once, also where there are fewer rows than ranks.

        Logits that are in ``memory`` already are not copied there.
        """
        share = self._share_of(logits)
        drawn = draw(share.rows, params.rows(share.drawn_from, share.drawn_to))
        return self.merge(_first_of(drawn, share.num_served), share.start, logits.shape[0])

    def draw_rows_with_logprobs(
        self,
        logits: torch.Tensor,  # [B, W], W the same on every rank
        params: BatchParams,
        wanted: WantedLogprobs,
        draw: Callable[[torch.Tensor, BatchParams, WantedLogprobs], tuple[SampleOutput, Logprobs]],
    ) -> tuple[SampleOutput, Logprobs]:
        """``draw_rows``, with the logprobs of the batch. ``draw`` also takes those that are wanted of its rows, and
        returns them."""
        num_rows, share = logits.shape[0], self._share_of(logits)
        drawn_rows = share.drawn_from, share.drawn_to
        drawn, found = draw(share.rows, params.rows(*drawn_rows), wanted.rows(*drawn_rows, num_rows))
        mine = _first_of(drawn, share.num_served), found.rows(0, share.num_served)
        return self.merge_with_logprobs(*mine, wanted, share.start, num_rows)

    def _share_of(self, logits: torch.Tensor) -> _Share:
        """This rank's share of the rows of a batch whose logits each rank has its part of."""
        num_rows = logits.shape[0]
        each = cdiv(num_rows, self.num_ranks)
        start = min(self.rank * each, num_rows)
        stop = min(start + each, num_rows)
        drawn_from = min(start, num_rows - 1)  # a rank without rows draws a dummy row; its result is dropped
        drawn_to = max(stop, drawn_from + 1)
        if self.memory is not None:
            here = self.memory.own_logits[:num_rows]
            if here.data_ptr() != logits.data_ptr():
                here.copy_(logits)
            rows = exchange_rows(self.memory, drawn_from, drawn_to - drawn_from)
        else:
            rows = self._gathered_rows(logits, each)[: drawn_to - drawn_from]
        return _Share(rows, start, stop - start, drawn_from, drawn_to)

    def _gathered_rows(self, logits: torch.Tensor, each: int) -> torch.Tensor:
        """``[each, N * W]``: this rank's share of the rows, zeros beyond the batch."""
        num_rows, width = logits.shape
        padding = each * self.num_ranks - num_rows
        sent = (torch.nn.functional.pad(logits, (0, 0, 0, padding)) if padding else logits).contiguous()
        received = torch.empty_like(sent)
        self._group._all_to_all_single(received, sent)
        whole = self.num_ranks * width
        # The reader is compiled for rows that start at multiples of 16 elements.
        rows = torch.empty(each, cdiv(whole, GROUP_SIZE) * GROUP_SIZE, dtype=sent.dtype, device=sent.device)[:, :whole]
        rows.unflatten(1, (self.num_ranks, width)).copy_(received.view(self.num_ranks, each, width).transpose(0, 1))
        return rows


class _Share(NamedTuple):
    """The rows of a batch that one rank draws. rows: their whole logits, ``[R, N * W]``. start: the first one.
    num_served: how many of them are served. drawn_from, drawn_to: those that are drawn, one at least."""

    rows: torch.Tensor
    start: int
    num_served: int
    drawn_from: int
    drawn_to: int


def _first_of(drawn: SampleOutput, num_rows: int) -> SampleOutput:
    """The draws of the first rows, as views."""
    logprobs, log_mass = (None if values is None else values[:num_rows] for values in (drawn.logprobs, drawn.log_mass))
    return SampleOutput(drawn.token_ids[:num_rows], logprobs, drawn.scores[:num_rows], log_mass)


def _symmetric_memory(num_bytes: int, device: torch.device) -> torch.Tensor:  # coverage: needs several GPUs
    """Memory of this rank that the others may open. Waits for no rank."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
