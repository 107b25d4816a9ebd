"""Ranks in processes of their own, over gloo and SGLang's own group: each gets the draw from the whole vocabulary."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import exchange_worker
import pytest
import torch
from head_states import Processor
from serving import needs_sglang

from sgl_flashsample.demo.server import free_port
from sgl_flashsample.kernels.merge_ranks import merge_records, pack_record
from sgl_flashsample.kernels.params import BatchParams, SampleOutput
from sgl_flashsample.sglang.exchange import Exchange, bytes_received

WORKER = Path(exchange_worker.__file__)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.full)])
def answers(request) -> list[dict]:
    """What the others said to each rank, and what it drew, by the name of the batch."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(request.param), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(request.param)
    ]
    printed = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), printed[0][1][-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


@needs_sglang
@pytest.mark.slow
def test_every_rank_gets_the_same(answers):
    assert len(answers[0]["drawn"]) == 6 * len(exchange_worker.SHAPES)
    assert all(json.dumps(answer) == json.dumps(answers[0]) for answer in answers)
    ranks = range(len(answers))
    said = [{"rank": rank, "words": ["word"] * rank, "none": None, "large": 2**63 - 1} for rank in ranks]
    assert answers[0]["said"] == said


@needs_sglang
@pytest.mark.slow
def test_the_token_is_that_of_one_rank_with_the_whole_head_and_so_is_its_logprob(answers):
    """Truncated rows are drawn by one rank each, and so are all where the parts are no multiple of 16 ids or a rank has
    none; of others, every rank draws from its part."""
    cases = exchange_worker.cases()
    for name, got in answers[0]["drawn"].items():
        case = cases[name.rpartition(", ")[0]]
        return_logprob = exchange_worker.wants_logprob(case)
        want = exchange_worker.draw_whole(case, return_logprob)
        assert got["token_ids"] == want.token_ids.tolist(), name
        assert (got["logprobs"] is None) is (got["log_mass"] is None) is not return_logprob
        for key in ("logprobs", "log_mass") if return_logprob else ():
            values = torch.tensor(got[key])
            torch.testing.assert_close(values, getattr(want, key), rtol=1e-5, atol=2e-4, equal_nan=True, msg=name)


class CustomAllReduce:
    """Of SGLang, as far as it decides: it takes buffers up to ``limit`` bytes."""

    def __init__(self, limit: int, disabled: bool) -> None:
        self.limit, self.disabled = limit, disabled

    def should_custom_ar(self, buffer: torch.Tensor) -> bool:
        assert buffer.numel() * 4 % 16 == 0
        return buffer.numel() * 4 <= self.limit


class Group:
    """Of a rank: its collectives return what all ranks together have sent."""

    def __init__(self, rank: int, draws: list[SampleOutput], limit: int, disabled: bool) -> None:
        self.rank_in_group, self.world_size, self.used = rank, len(draws), ""
        self.ca_comm = CustomAllReduce(limit, disabled)
        self._draws = draws

    def all_reduce(self, buffer: torch.Tensor) -> torch.Tensor:
        self.used = "all-reduce"
        every = [pack_record(draw, rank, self.world_size) for rank, draw in enumerate(self._draws)]
        assert torch.equal(buffer, every[self.rank_in_group])
        return torch.stack(every).sum(0)

    def _all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        self.used = "gather"
        every = [pack_record(draw).view(-1, 4) for draw in self._draws]
        assert torch.equal(own, every[self.rank_in_group])
        output.copy_(torch.cat(every))


@pytest.mark.parametrize(
    "limit, disabled, used",
    [(10**6, False, "all-reduce"), (16, False, "gather"), (10**6, True, "gather")],
    ids=["small", "too large", "disabled"],
)
def test_a_record_travels_by_sglangs_all_reduce_where_that_takes_it(limit, disabled, used):
    row = torch.arange(5.0)
    draws = [SampleOutput((row + 100 * rank).long(), -row - rank, row * (rank - 0.5), row + rank) for rank in range(2)]
    want = merge_records(torch.cat([pack_record(draw) for draw in draws]), return_logprob=True)
    for rank, drawn in enumerate(draws):
        group = Group(rank, draws, limit, disabled)
        for got, wanted in zip(Exchange(group).merge(drawn), want, strict=True):
            assert torch.equal(got, wanted)
        assert group.used == used


@pytest.mark.parametrize("attention", [False, True])
def test_the_ranks_of_an_exchange_are_those_whose_logits_sglang_gathers(monkeypatch, attention):
    groups = {name: types.SimpleNamespace(rank_in_group=1, world_size=size) for name, size in (("tp", 4), ("attn", 2))}
    state = types.SimpleNamespace(get_tp_group=lambda: groups["tp"], get_attn_tp_group=lambda: groups["attn"])
    module = types.ModuleType("sglang.srt.distributed")
    module.parallel_state = state
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", module)
    processor = Processor(do_tensor_parallel_all_gather=True, use_attn_tp_group=attention)
    exchange = Exchange.of_processor(processor)
    assert (exchange.rank, exchange.num_ranks) == (1, 2 if attention else 4)
    processor.do_tensor_parallel_all_gather = False
    assert Exchange.of_processor(processor) is None


@pytest.mark.parametrize("num_ranks, num_rows", [(2, 1), (2, 17), (3, 64), (8, 3)])
def test_the_bytes_of_a_step_are_those_of_its_collectives(num_ranks, num_rows):
    """An all-reduce of small buffers reads those of all other ranks; an all-to-all and a gather leave out one's own."""
    drawn = SampleOutput(*(torch.zeros(num_rows, dtype=dtype) for dtype in (torch.int64, *3 * [torch.float32])))
    received = []

    def note(tensor: torch.Tensor, share: float) -> None:
        received.append(tensor.numel() * tensor.element_size() * share)

    group = types.SimpleNamespace(rank_in_group=0, world_size=num_ranks, ca_comm=CustomAllReduce(10**6, False))
    others = (num_ranks - 1) / num_ranks
    group.all_reduce = lambda buffer: (note(buffer, num_ranks - 1), buffer)[1]
    group._all_to_all_single = lambda output, sent: (note(output, others), output.copy_(sent))
    group._all_gather_into_tensor = lambda output, own: note(output.zero_(), others)
    Exchange(group).merge(drawn)
    assert sum(received) == bytes_received(num_ranks, num_rows)
    received.clear()
    logits = torch.zeros(num_rows, 48, dtype=torch.bfloat16)
    params = BatchParams(torch.ones(num_rows), *torch.zeros(2, num_rows, dtype=torch.int64))
    Exchange(group).draw_rows(
        logits, params, lambda rows, _: SampleOutput(*(None if part is None else part[: len(rows)] for part in drawn))
    )
    assert sum(received) == bytes_received(num_ranks, num_rows, part_bytes=96)
