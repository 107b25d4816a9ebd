"""Exchanges through memory that ranks share, of one rank in this process, the others having written before: what they
have written is merged and copied as the definitions say. Ranks that run at the same time are in
``tests/sglang/test_exchange.py``."""

from __future__ import annotations

import pytest
import torch
from test_merge_ranks import as_output, make_records

from sgl_flashsample.kernels.merge_logprobs import MAX_FIELDS
from sgl_flashsample.kernels.merge_ranks import NUM_FIELDS, merge_records
from sgl_flashsample.kernels.params import SampleOutput
from sgl_flashsample.kernels.peer_memory import (
    PeerMemory,
    compile_exchanges,
    copy_logprobs,
    copy_rows,
    exchange_first_logits,
    exchange_logprobs,
    exchange_records,
    exchange_rows,
    tell_logits,
)

MAX_ROWS = 70


def view(memory: PeerMemory, rank: int, addresses: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype):
    """What is at an address on a rank."""
    region = memory._regions[rank]
    values = region[int(addresses[rank]) - region.data_ptr() :].view(dtype)
    return values[: torch.Size(shape).numel()].view(shape)


def make_memory(device, num_ranks: int, rank: int, width: int = 48, dtype=torch.float32) -> PeerMemory:
    num_bytes = PeerMemory.num_bytes(num_ranks, MAX_ROWS, width, dtype)
    padded = [torch.zeros(num_bytes + 128, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
    regions = [region[-region.data_ptr() % 128 :][:num_bytes] for region in padded]
    return PeerMemory(regions, rank, MAX_ROWS, width, dtype)


@pytest.mark.parametrize("num_rows", [1, 65])
@pytest.mark.parametrize("num_ranks, rank", [(1, 0), (2, 1), (3, 0), (8, 5)])
@pytest.mark.parametrize("return_logprob", [True, False])
def test_records_of_all_ranks_are_merged_and_written_to_all(device, num_ranks, rank, num_rows, return_logprob):
    memory = make_memory(device, num_ranks, rank)
    for number in (1, 2, 3):
        records = make_records(device, num_ranks, num_rows).roll(number, dims=0)
        for other in set(range(num_ranks)) - {rank}:
            places = view(memory, rank, memory.records, (2, num_ranks, MAX_ROWS, NUM_FIELDS), torch.float32)
            places[number % 2, other, :num_rows] = records[other]
            view(memory, rank, memory.record_flags, (2, num_ranks), torch.int64)[:, other] = number
        got = exchange_records(memory, as_output(records[rank], return_logprob), 0, num_rows)
        for one, other in zip(got, merge_records(records, return_logprob=return_logprob), strict=True):
            assert one is other is None or torch.equal(one, other)
        fields = NUM_FIELDS if return_logprob else 2
        for other in range(num_ranks):
            places = view(memory, other, memory.records, (2, num_ranks, MAX_ROWS, NUM_FIELDS), torch.float32)
            assert torch.equal(places[number % 2, rank, :num_rows, :fields], records[rank, :, :fields])
            flags = view(memory, other, memory.record_flags, (2, num_ranks), torch.int64)[:, rank]
            assert flags.tolist() == [number, number if num_rows > 64 else 0]


def test_rows_that_a_rank_has_not_drawn_are_those_of_the_others(device):
    memory = make_memory(device, 1, 0)
    drawn = as_output(torch.arange(1.0, 4.0, device=device)[:, None].expand(3, NUM_FIELDS))
    merged = exchange_records(memory, drawn, 2, 7)
    assert merged.token_ids.tolist() == [0, 0, 1, 2, 3, 0, 0]
    want = [float("-inf")] * 2 + [1, 2, 3] + [float("-inf")] * 2
    assert merged.scores.tolist() == merged.log_mass[:, 0].tolist() == want


@pytest.mark.parametrize("width, dtype", [(48, torch.float32), (5000, torch.bfloat16), (17, torch.float16)])
@pytest.mark.parametrize("num_ranks, rank", [(1, 0), (2, 1), (3, 1)])
def test_rows_of_logits_are_joined_from_all_ranks(device, num_ranks, rank, width, dtype):
    memory = make_memory(device, num_ranks, rank, width, dtype)
    parts = torch.randn(num_ranks, MAX_ROWS, width, device=device).to(dtype)
    stride = memory.own_logits.stride(0)
    for other in range(num_ranks):
        view(memory, other, memory.logits, (MAX_ROWS, stride), dtype)[:, :width] = parts[other]
        view(memory, rank, memory.logits_flags, (num_ranks,), torch.int64)[other] = 2
    assert torch.equal(memory.own_logits, parts[rank])
    tell_logits(memory)
    for first, num_rows in ((0, 3), (60, 10)):
        got = copy_rows(memory, first, num_rows)
        assert torch.equal(got, torch.cat(list(parts[:, first : first + num_rows]), 1))
        assert got.stride(0) % 16 == 0
    assert torch.equal(exchange_rows(memory, 1, 2), torch.cat(list(parts[:, 1:3]), 1))
    for other in range(num_ranks):
        assert view(memory, other, memory.logits_flags, (num_ranks,), torch.int64)[rank] == 2


@pytest.mark.parametrize("num_ranks, rank", [(1, 0), (2, 1), (3, 1)])
def test_logprobs_of_all_ranks_are_joined_beside_their_logits(device, num_ranks, rank):
    memory = make_memory(device, num_ranks, rank, width=48)
    packed = torch.randn(num_ranks, MAX_ROWS, MAX_FIELDS, device=device)
    memory.own_logits.fill_(3.0)
    for other in range(num_ranks):
        view(memory, other, memory.logprobs, (MAX_ROWS, MAX_FIELDS), torch.float32)[:] = packed[other]
        view(memory, rank, memory.logits_flags, (num_ranks,), torch.int64)[other] = 2
    assert torch.equal(memory.own_logprobs, packed[rank]) and (memory.own_logits == 3.0).all()
    tell_logits(memory)
    for num_rows, num_fields in ((3, 17), (MAX_ROWS, MAX_FIELDS), (0, 5)):
        assert torch.equal(copy_logprobs(memory, num_rows, num_fields), packed[:, :num_rows, :num_fields])
    assert torch.equal(exchange_logprobs(memory, 2, 5), packed[:, :2, :5])
    for other in range(num_ranks):
        assert view(memory, other, memory.logits_flags, (num_ranks,), torch.int64)[rank] == 2


@pytest.mark.parametrize("num_ranks, rank", [(2, 1), (16, 5)])
def test_first_logits_of_all_ranks_are_joined(device, num_ranks, rank):
    memory = make_memory(device, num_ranks, rank, width=40)
    parts = torch.randn(num_ranks, MAX_ROWS, 40, device=device)
    for other in range(num_ranks):
        view(memory, other, memory.logits, (MAX_ROWS, 48), torch.float32)[:, :40] = parts[other]
        view(memory, rank, memory.logits_flags, (num_ranks,), torch.int64)[other] = 1
    assert torch.equal(exchange_first_logits(memory, 5), parts[:, :5, :16])
    for other in range(num_ranks):
        assert view(memory, other, memory.logits_flags, (num_ranks,), torch.int64)[rank] == 1


@pytest.mark.parametrize("width, most", [(40, MAX_ROWS), (48, 0)])
def test_first_logits_of_more_rows_or_of_whole_groups_are_refused_by_name(device, width, most):
    with pytest.raises(ValueError, match=f"num_rows is {most + 1}; expected at most {most}"):
        exchange_first_logits(make_memory(device, 2, 0, width), most + 1)


@pytest.mark.parametrize("num_rows, num_fields", [(MAX_ROWS + 1, 5), (3, MAX_FIELDS + 1), (3, 0)])
def test_logprobs_that_do_not_fit_are_refused_by_name(device, num_rows, num_fields):
    with pytest.raises(ValueError, match=f"{num_rows} rows of {num_fields} fields; expected at most 70 rows of"):
        copy_logprobs(make_memory(device, 2, 0), num_rows, num_fields)


def test_compiling_what_ranks_exchange_with_exchanges_nothing(device):
    """A rank that fails at it must not have begun: the others would wait."""
    for width in (48, 40):
        region = make_memory(device, 2, 0, width)._regions[0]
        compile_exchanges(region, 2, MAX_ROWS, width, torch.float32)
        assert not region.any()


@pytest.mark.parametrize("first, num_rows", [(-1, 3), (1, 3), (0, MAX_ROWS + 1)])
def test_records_that_do_not_fit_are_refused_by_name(device, first, num_rows):
    drawn = SampleOutput.empty(3, device, False)
    with pytest.raises(ValueError, match=f"first is {first} for 3 rows of {num_rows}; expected them among at most 70"):
        exchange_records(make_memory(device, 1, 0), drawn, first, num_rows)


@pytest.mark.parametrize("first, num_rows", [(-1, 3), (0, 36), (68, 3), (0, 0)])
def test_rows_that_do_not_fit_are_refused_by_name(device, first, num_rows):
    with pytest.raises(ValueError, match=f"first is {first} for {num_rows} rows; expected at most 35 among 70"):
        copy_rows(make_memory(device, 2, 0), first, num_rows)


def test_regions_that_are_none_are_refused_by_name(device):
    num_bytes = PeerMemory.num_bytes(2, 4, 32, torch.float32)
    region = torch.zeros(num_bytes + 256, dtype=torch.uint8, device=device)
    aligned = region[-region.data_ptr() % 128 :]
    for wrong in (aligned[: num_bytes - 1], aligned[:num_bytes].view(torch.int8), aligned[1 : num_bytes + 1]):
        with pytest.raises(ValueError, match=r"a region is \(.*; expected \(.*,\) torch.uint8 at a multiple of 128"):
            PeerMemory([aligned[:num_bytes], wrong], 0, 4, 32, torch.float32)
    with pytest.raises(ValueError, match="rank is 2 of 2; expected 0 to 1"):
        PeerMemory([aligned[:num_bytes]] * 2, 2, 4, 32, torch.float32)
