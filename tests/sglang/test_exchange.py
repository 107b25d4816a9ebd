"""Ranks in processes of their own, over gloo and SGLang's own group: each gets the draw from the whole vocabulary."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import types
import weakref
from collections.abc import Sequence
from pathlib import Path

import exchange_worker
import pytest
import torch
from head_states import Processor
from kernel_cases import make_case
from serving import needs_sglang

from sgl_flashsample import Head, Logprobs, WantedLogprobs
from sgl_flashsample.kernels.draft_children import Children
from sgl_flashsample.kernels.params import BatchParams, SampleOutput
from sgl_flashsample.kernels.peer_memory import PeerMemory
from sgl_flashsample.sglang import exchange as exchange_module
from sgl_flashsample.sglang.exchange import Exchange, RankSync, bytes_received
from sgl_flashsample.tools.server import free_port

WORKER = Path(exchange_worker.__file__)
RANKS = 3  # not all of which hold an equal part of a vocabulary, or any; two share a head in test_ranks.py


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[dict]:
    """What the others said to each rank, and what it drew, by the name of the batch."""
    port, folder = free_port(), tmp_path_factory.mktemp("memory")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(RANKS), str(port), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:  # one that waits for another for ever does not outlive the test
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), printed[0][1][-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


@needs_sglang
@pytest.mark.full
def test_every_rank_gets_the_same(answers):
    assert len(answers[0]["drawn"]) == 12 * len(exchange_worker.SHAPES)
    assert all(json.dumps(answer) == json.dumps(answers[0]) for answer in answers)
    ranks = range(len(answers))
    said = [{"rank": rank, "words": ["word"] * rank, "none": None, "large": 2**63 - 1} for rank in ranks]
    assert answers[0]["said"] == said


@needs_sglang
@pytest.mark.full
def test_the_token_is_that_of_one_rank_with_the_whole_head_and_so_is_its_logprob(answers):
    """Truncated rows are drawn by one rank each, and so are all where a rank has no whole group of 16 ids; of others,
    every rank draws from its part."""
    cases = exchange_worker.cases()
    whole = {name: exchange_worker.draw_whole(case) for name, case in cases.items()}
    for name, answered in answers[0]["drawn"].items():
        of_case, each = name.rsplit(", ", 2)[0], answered["drawn"]
        return_logprob = exchange_worker.wants_logprob(cases[of_case])
        assert len(each) == (exchange_worker.TIMES if "by memory" in name else 1)
        for got, want in zip(each, whole[of_case], strict=False):
            assert got["token_ids"] == want.token_ids.tolist(), name
            assert (got["logprobs"] is None) is (got["log_mass"] is None) is not return_logprob
            for key in ("logprobs", "log_mass") if return_logprob else ():
                values = torch.tensor(got[key])
                torch.testing.assert_close(values, getattr(want, key), rtol=1e-5, atol=2e-4, equal_nan=True, msg=name)


def assert_logprobs(got: dict, want: Logprobs, name: str) -> None:
    values = dict(zip(("logprobs", "top ids", "top logprobs", "of ids"), exchange_worker.values_of(want), strict=True))
    ids = values.pop("top ids")
    assert got["top ids"] == ids.tolist(), name
    for key, value in values.items():
        torch.testing.assert_close(torch.tensor(got[key]), value, rtol=1e-5, atol=2e-4, equal_nan=True, msg=name)


@needs_sglang
@pytest.mark.full
def test_logprobs_beside_the_tokens_are_those_of_one_rank_with_the_whole_head_and_change_no_token(answers):
    """Draws and prompts are compared."""
    cases, prompts = exchange_worker.cases(), 0
    for name, answered in answers[0]["drawn"].items():
        case = cases[name.rsplit(", ", 2)[0]]
        (got,) = answered["found"]
        assert got["token_ids"] == answered["drawn"][0]["token_ids"], name
        assert_logprobs(got, exchange_worker.logprobs_of_whole(case), name)
        if answered["prompt"] is not None:
            assert_logprobs(answered["prompt"], exchange_worker.prompt_of(case, Head(case.head)), name)
            prompts += 1
    assert prompts


@pytest.mark.parametrize("attention", [False, True])
def test_the_ranks_of_an_exchange_are_those_whose_logits_sglang_gathers(pretend, attention):
    groups = {name: types.SimpleNamespace(rank_in_group=1, world_size=size) for name, size in (("tp", 4), ("attn", 2))}
    state = types.SimpleNamespace(get_tp_group=lambda: groups["tp"], get_attn_tp_group=lambda: groups["attn"])
    pretend("sglang.srt.distributed", parallel_state=state)
    processor = Processor(do_tensor_parallel_all_gather=True, use_attn_tp_group=attention)
    exchange = Exchange.of_processor(processor)
    assert (exchange.rank, exchange.num_ranks) == (1, 2 if attention else 4)
    processor.do_tensor_parallel_all_gather = False
    assert Exchange.of_processor(processor) is None


@pytest.mark.parametrize("num_ranks, num_rows", [(2, 1), (2, 17), (3, 64), (8, 3)])
def test_the_bytes_of_a_step_are_those_of_its_collectives(num_ranks, num_rows):
    """An all-to-all and a gather leave out one's own."""
    drawn = SampleOutput(*(torch.zeros(num_rows, dtype=dtype) for dtype in (torch.int64, *3 * [torch.float32])))
    received = []

    def note(tensor: torch.Tensor) -> None:
        received.append(tensor.numel() * tensor.element_size() * (num_ranks - 1) / num_ranks)

    group = types.SimpleNamespace(rank_in_group=0, world_size=num_ranks)
    group._all_to_all_single = lambda output, sent: (note(output), output.copy_(sent))
    group._all_gather_into_tensor = lambda output, tensor: note(output.zero_())
    Exchange(group).merge(drawn)
    assert sum(received) == bytes_received(num_ranks, num_rows)
    received.clear()
    wanted = WantedLogprobs(5, token_ids=torch.zeros(1, 3, dtype=torch.int64))
    drawn = drawn._replace(log_mass=torch.zeros(num_rows, 2))
    found = Logprobs.empty(wanted, num_rows, torch.device("cpu"))
    Exchange(group).merge_with_logprobs(drawn, found, wanted)
    assert sum(received) == bytes_received(num_ranks, num_rows, num_fields=2 + 3 * 5 + 3)
    received.clear()
    logits = torch.zeros(num_rows, 48, dtype=torch.bfloat16)
    params = BatchParams(torch.ones(num_rows), *torch.zeros(2, num_rows, dtype=torch.int64))
    Exchange(group).draw_rows(
        logits, params, lambda rows, _: SampleOutput(*(None if part is None else part[: len(rows)] for part in drawn))
    )
    assert sum(received) == bytes_received(num_ranks, num_rows, part_bytes=96)


@pytest.fixture
def alone() -> Exchange:
    """The exchange of one rank with itself, by collectives."""
    group = types.SimpleNamespace(rank_in_group=0, world_size=1)
    group._all_to_all_single = group._all_gather_into_tensor = lambda output, sent: output.copy_(sent)
    return Exchange(group)


def memory_of_one(max_rows: int, width: int) -> PeerMemory:
    num_bytes = PeerMemory.num_bytes(1, max_rows, width, torch.float32)
    padded = torch.zeros(num_bytes + 128, dtype=torch.uint8)
    return PeerMemory([padded[-padded.data_ptr() % 128 :][:num_bytes]], 0, max_rows, width, torch.float32)


WANTED = [
    WantedLogprobs(3, token_ids=torch.tensor([[5, 90, -1]])),
    WantedLogprobs(2, torch.tensor([2, 0, 1], dtype=torch.int32)),
    WantedLogprobs(token_ids=torch.arange(300).repeat(3, 1)),  # more than memory has room for
    WantedLogprobs(original=True),
]


@pytest.mark.parametrize("by_memory", [True, False])
@pytest.mark.parametrize("wanted", WANTED, ids=["both", "likeliest", "given", "tokens"])
def test_logprobs_of_one_rank_are_its_own_whether_rows_or_draws_are_exchanged(alone, device, by_memory, wanted):
    if device.type != "cpu":
        pytest.skip("one process has no group on a GPU")
    case = make_case(3, 320, device, "truncate", torch.float32)
    head = Head(case.head)
    alone.memory = memory_of_one(3, 320) if by_memory else None
    want, of_whole = head.draw_with_logprobs(case.hidden, case.params, wanted)

    def draw(logits: torch.Tensor, params: BatchParams, wanted: WantedLogprobs) -> tuple[SampleOutput, Logprobs]:
        return head.draw_from_logits_with_logprobs(logits, params, wanted)

    for _ in range(2):  # the second one finds the memory as the first has left it
        answers = [
            alone.merge_with_logprobs(*head.draw_with_logprobs(case.hidden, case.params, wanted), wanted),
            alone.draw_rows_with_logprobs(head.logits(case.hidden), case.params, wanted, draw),
        ]
        for drawn, found in answers:
            assert torch.equal(drawn.token_ids, want.token_ids)
            torch.testing.assert_close(found.of_tokens, of_whole.of_tokens, rtol=0, atol=1e-5)
            assert (found.top is None) is (of_whole.top is None) and (found.of_ids is None) is (of_whole.of_ids is None)
            if found.top is not None:
                assert torch.equal(found.top.token_ids, of_whole.top.token_ids)
                torch.testing.assert_close(found.top.logprobs, of_whole.top.logprobs, rtol=0, atol=1e-5)
            if found.of_ids is not None:
                torch.testing.assert_close(found.of_ids, of_whole.of_ids, rtol=0, atol=1e-5)


@pytest.mark.parametrize("by_memory", [True, False])
def test_children_of_one_rank_are_its_own(alone, device, by_memory):
    if device.type != "cpu":
        pytest.skip("one process has no group on a GPU")
    alone.memory = memory_of_one(3, 320) if by_memory else None
    for start in range(3):  # the next one finds the memory as the one before has left it
        ids = torch.arange(start, start + 6).view(3, 2)
        children = Children(ids, -ids.float())
        assert [torch.equal(*pair) for pair in zip(alone.merge_children(children), children, strict=True)] == [True] * 2


def test_the_logprobs_of_a_prompt_are_exchanged_for_some_rows_at_a_time(alone, monkeypatch):
    gathered = []
    gather = alone._gathered
    monkeypatch.setattr(exchange_module, "MAX_PROMPT_ROWS", 4)
    monkeypatch.setattr(alone, "_gathered", lambda packed: gathered.append(len(packed)) or gather(packed))
    found = Logprobs(-torch.arange(9.0), None, -torch.arange(18.0).view(9, 2), torch.zeros(9, 2))
    merged = alone.merge_prompt(found, WantedLogprobs(token_ids=torch.zeros(9, 2, dtype=torch.int64)))
    assert gathered == [4, 4, 1]
    assert torch.equal(merged.of_tokens, found.of_tokens) and torch.equal(merged.of_ids, found.of_ids)


def test_ranks_that_others_may_join_while_they_run_agree_on_nothing(server_config, pretend, monkeypatch):
    """One that joins later would wait for answers of those that run. The fused pass stays off there."""
    group = types.SimpleNamespace(rank_in_group=1, world_size=2)
    pretend("sglang.srt.distributed", parallel_state=types.SimpleNamespace(get_world_group=lambda: group))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert RankSync.of_server().num_ranks == 2
    server_config.exec.moe.elastic_ep_backend = "mooncake"
    assert RankSync.of_server().num_ranks == 1


class Handle:
    """Of regions that live as long as their owner: views do not keep them."""

    def __init__(self, region: torch.Tensor) -> None:
        self._regions = [weakref.ref(region), lambda: torch.zeros_like(region)]

    def get_buffer(self, rank: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        assert self._regions[rank]().shape == tuple(shape) and dtype is torch.uint8
        size = shape[0]
        padded = torch.zeros(size + 128, dtype=dtype)
        return padded[-padded.data_ptr() % 128 :][:size]


@pytest.fixture
def connected(monkeypatch, pretend):
    """Connects two ranks; returns the exchange and a reference to the memory that it reserved. reach: GPUs reach each
    other, as far as SGLang's all-reduce has found. others: the other rank has memory, and has opened that of this one.
    fails: this one has none. opens: it can open memory. opened: the groups that have opened it."""
    opened: list[str] = []

    def connect(
        reach: bool = True, others: Sequence[bool] = (True, True), fails: bool = False, opens: bool = True
    ) -> tuple[Exchange, weakref.ref | None]:
        reserved, answers = [], iter(others)

        def reserve(num_bytes: int, device: torch.device) -> torch.Tensor:
            if fails:
                raise torch.OutOfMemoryError("a fault")
            region = torch.zeros(num_bytes, dtype=torch.uint8)
            reserved.append(weakref.ref(region))
            return region

        def rendezvous(region: torch.Tensor, name: str) -> Handle | None:
            opened.append(name)
            return Handle(region) if opens else None

        monkeypatch.setattr(exchange_module, "_symmetric_memory", reserve)
        monkeypatch.setattr(RankSync, "of_all", lambda self, value: [value, next(answers)])
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        pretend("torch.distributed._symmetric_memory", rendezvous=rendezvous)
        group = types.SimpleNamespace(rank_in_group=0, world_size=2, device=torch.device("cpu"))
        group.ca_comm = types.SimpleNamespace(disabled=False, graph_params=None) if reach else None
        group.device_group = types.SimpleNamespace(group_name="tp")
        exchange = Exchange(group)
        exchange.connect(4, 32, torch.bfloat16)
        return exchange, reserved[0] if reserved else None

    connect.opened = opened
    return connect


def test_ranks_that_reach_each_others_memory_exchange_through_it_and_keep_it(connected):
    exchange, reserved = connected()
    assert exchange.memory.max_rows == 4 and exchange.memory.own_logits.shape == (4, 32)
    gc.collect()
    assert reserved() is not None, "the views of a region do not keep its memory"


@pytest.mark.parametrize(
    "fault, opened",
    [
        ({"others": (False,)}, []),
        ({"fails": True}, []),
        ({"reach": False}, []),
        ({"opens": False}, ["tp"]),
        ({"others": (True, False)}, ["tp"]),
    ],
    ids=["another rank", "this rank", "GPUs that do not reach each other", "cannot open", "another rank cannot open"],
)
def test_where_one_rank_has_no_memory_for_an_exchange_all_use_collectives(connected, fault, opened):
    exchange, reserved = connected(**fault)
    assert exchange.memory is None and (reserved is None) is not fault.keys().isdisjoint({"fails", "reach"})
    assert connected.opened == opened, "no rank waits to open memory that another does not have"
    gc.collect()
    assert reserved is None or reserved() is None, "memory that is not exchanged through is given back"
