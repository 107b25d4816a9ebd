"""The parameters of a batch from a table of requests: every row has its line's numbers, bit by bit, and nothing else is
read or written."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_flashsample.cpu_path import gather_rows_on_cpu
from sgl_flashsample.kernels.gather_rows import (
    NO_MIN_P,
    RowBuffers,
    StagedBatch,
    gather_rows,
    pack_line,
    stage_rows,
    write_rows,
)
from sgl_flashsample.kernels.params import Edit, LogitEdits
from sgl_flashsample.kernels.reference import gather_rows_ref

INF, NAN = float("inf"), float("nan")
# temperature, top_k, top_p, min_p, seed, edits. The first line is that of padding.
REQUESTS = (
    (0.0, 0, 1.0, 0.0, 0, 0),
    (0.7, 50, 0.9, 0.1, 42, Edit.MASK),
    (INF, -1, 0.5, 1.0, -1, Edit.ADDITIVE | Edit.BIAS),
    (-0.0, 1 << 30, 0.9, 0.05, -(2**63), 15),
    (1e-38, 1, 0.0, 1e-38, 2**63 - 1, Edit.SCALING),
    (NAN, 2**31 - 1, NAN, -0.0, 2**32, 0),
    (2.5, -(2**31), 1.0, 0.3, 2**32 + 7, 15),
    (1.0, (1 << 30) - 1, 0.999, 0.0, -(2**32) - 7, 9),
    (1.0, 20, 1.0, 0.2, 2**31, 2),
)
PARAMETERS = tuple(RowBuffers.DTYPES)


def packed(requests=REQUESTS) -> torch.Tensor:
    """``[N, 8]`` int32. A request is given in the order of ``REQUESTS``."""
    lines = (pack_line(temperature, k, seed, p, min_p, edits) for temperature, k, p, min_p, seed, edits in requests)
    return torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.int32).view(-1, 8)


def bits(tensor: torch.Tensor) -> list[int]:
    """The values as integers: NaN equals itself, and -0 differs from 0."""
    return (tensor.view(torch.int32) if tensor.dtype is torch.float32 else tensor).tolist()


def dirty(rows: int, device) -> RowBuffers:
    out = RowBuffers.allocate(rows, device)
    for tensor in out.tensors:
        tensor.fill_(-77)
    return out


def drawn_slots(num_rows: int, device) -> torch.Tensor:
    """Slots in and out of the table, many of them twice."""
    outside = torch.tensor([-1, len(REQUESTS), 2**31, 2**32 + 1, 2**62, -(2**63)])
    known = torch.cat([torch.arange(len(REQUESTS)), outside])
    generator = torch.Generator().manual_seed(num_rows)
    return known[torch.randint(len(known), (num_rows,), generator=generator)].to(device)


@pytest.mark.parametrize("nodes", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 31, 32, 33, 100])
def test_rows_are_the_references_and_what_is_behind_them_stays(device, num_rows, nodes):
    table, slots = packed().to(device), drawn_slots(num_rows, device)
    positions = torch.arange(num_rows * nodes, device=device) * 2**33 - 5
    out = dirty(num_rows * nodes + 40, device)
    gather_rows(table, slots, positions, out, nodes=nodes, drafts=nodes > 1, edits=Edit.MASK | Edit.BIAS)
    expected = gather_rows_ref(table, slots, positions, nodes, Edit.MASK | Edit.BIAS, nodes > 1)
    for name in PARAMETERS:
        assert bits(getattr(out, name)[: num_rows * nodes]) == bits(expected[name]), name
        assert set(getattr(out, name)[num_rows * nodes :].tolist()) == {-77}, name


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("in_host_memory", [False, True], ids=["kernel", "host memory"])
def test_rows_behind_the_batch_are_padding_as_far_as_is_asked(device, nodes, in_host_memory):
    device, gather = (torch.device("cpu"), gather_rows_on_cpu) if in_host_memory else (device, gather_rows)
    table, slots = packed().to(device), torch.tensor([2, 99, 1], device=device)
    positions, out = torch.arange(3 * nodes, device=device) + 7, dirty(40, device)
    gather(table, slots, positions, out, nodes=nodes, drafts=nodes > 1, edits=13, rows=37)
    batch = gather_rows_ref(table, slots, positions, nodes, 13, nodes > 1)
    nothing = torch.zeros(37 - 3 * nodes, dtype=torch.int64, device=device)
    padding = gather_rows_ref(table, nothing, nothing)
    for name in PARAMETERS:
        got = bits(getattr(out, name))
        assert got == [*bits(batch[name]), *bits(padding[name]), *bits(getattr(dirty(3, device), name))], name


def test_a_row_has_the_numbers_that_its_request_gave(device):
    table = packed().to(device)
    slots = torch.arange(len(REQUESTS), device=device)
    out = dirty(len(REQUESTS), device)
    gather_rows(table, slots, slots + 100, out, edits=15)
    columns = zip(*REQUESTS, strict=True)
    for name, column in zip(("temperature", "top_k", "top_p", "min_p", "seed", "edits"), columns, strict=True):
        assert bits(getattr(out, name)) == bits(torch.tensor(column, dtype=RowBuffers.DTYPES[name])), name
    assert out.position.tolist() == list(range(100, 100 + len(REQUESTS)))


def test_a_slot_outside_of_the_table_is_a_row_of_padding(device):
    """The table lies between lines that nothing may read."""
    memory = torch.full((6, 8), 99, dtype=torch.int32, device=device)
    table = memory[2:4]
    table[0], table[1] = 5, 6
    slots = torch.tensor([-1, 2, -2, 3, 1, 2**32], device=device)
    out = dirty(6, device)
    gather_rows(table, slots, slots, out, edits=15)
    assert out.top_k.tolist() == [5, 5, 5, 5, 6, 5]
    assert out.position.tolist() == slots.tolist()


def test_a_verification_of_drafts_ignores_min_p_and_takes_top_p_of_what_top_k_has_left(device):
    limits = [(0, 1.0), (0, 0.9), (-1, 0.9), (1 << 30, 0.9), (5, 1.0), (5, 0.9), (1, 0.0), (200_000, 0.9)]
    table = packed([(1.0, top_k, top_p, 0.5, 1, 0) for top_k, top_p in limits]).to(device)
    slots = torch.arange(len(limits), device=device)
    out = RowBuffers.allocate(2 * len(limits), device)
    gather_rows(table, slots, slots.repeat(2), out, nodes=2, drafts=True)
    minute = torch.tensor(NO_MIN_P).item()
    assert out.min_p.tolist() == [0.0] * 10 + [minute] * 6
    gather_rows(table, slots, slots, out)
    assert out.min_p[: len(limits)].tolist() == [0.5] * len(limits)


def test_views_at_odd_addresses_are_read_and_written(device):
    lines = packed()
    memory = torch.zeros(1 + lines.numel(), dtype=torch.int32, device=device)
    moved = memory[1:].view(lines.shape)
    moved.copy_(lines)
    ids = torch.arange(-1, len(REQUESTS), device=device)
    table = torch.zeros_like(lines, device=device)
    write_rows(table, ids[1:], moved)
    out = RowBuffers.allocate(len(REQUESTS), device)
    gather_rows(table, ids[1:], ids[1:], out)
    assert torch.equal(table.cpu(), lines)
    assert out.seed.tolist() == [request[4] for request in REQUESTS]


@pytest.mark.parametrize("num_lines", [0, 1, 31, 33, 70])
def test_lines_are_written_to_their_slots_and_no_other_line_changes(device, num_lines):
    g = torch.Generator().manual_seed(num_lines)
    size = 90
    slots = torch.randperm(size, generator=g)[:num_lines]
    lines = torch.randint(-(2**31), 2**31, (num_lines, 8), generator=g).int()
    table = torch.randint(-(2**31), 2**31, (size, 8), generator=g).int()
    expected = table.clone()
    expected[slots] = lines
    written = table.to(device)
    write_rows(written, slots.to(device), lines.to(device))
    assert torch.equal(written.cpu(), expected)


def test_a_line_for_a_slot_outside_of_the_table_is_dropped(device):
    memory = torch.zeros(6, 8, dtype=torch.int32, device=device)
    slots = torch.tensor([-1, 2, 1, 2**32, -(2**62)], device=device)
    write_rows(memory[2:4], slots, torch.ones(5, 8, dtype=torch.int32, device=device))
    assert memory.sum(1).tolist() == [0, 0, 0, 8, 0, 0]


def test_a_request_that_takes_a_slot_replaces_the_one_before_it(device):
    table = torch.zeros(4, 8, dtype=torch.int32, device=device)
    slot = torch.tensor([2], device=device)
    out = RowBuffers.allocate(3, device)
    for request in REQUESTS[1:3]:
        write_rows(table, slot, packed([request]).to(device))
        gather_rows(table, torch.tensor([2, 1, 2], device=device), torch.arange(3, device=device), out, edits=15)
        assert out.seed.tolist() == [request[4], 0, request[4]]
        assert out.edits.tolist() == [request[5], 0, request[5]]


def test_lines_have_the_words_of_the_definition():
    lines = packed()
    assert lines.dtype is torch.int32 and lines.shape == (len(REQUESTS), 8)
    for line, (temperature, top_k, top_p, min_p, seed, edits) in zip(lines, REQUESTS, strict=True):
        floats = torch.tensor([temperature, top_p, min_p]).view(torch.int32).tolist()
        halves = torch.tensor([seed]).view(torch.int32).tolist()
        assert line.tolist() == [floats[0], top_k, *halves, *floats[1:], int(edits), 0]


def test_numbers_beyond_float32_are_infinite_as_in_a_tensor():
    lines = packed([(1e39, 5, 1.0, 0.0, 9, 1), (-1e300, 6, 0.5, 0.1, -9, 2)])
    assert lines[:, 0].view(torch.float32).tolist() == [math.inf, -math.inf]
    assert torch.equal(lines[:, 1:], packed([(1.0, 5, 1.0, 0.0, 9, 1), (1.0, 6, 0.5, 0.1, -9, 2)])[:, 1:])


@pytest.mark.parametrize(
    "place, value, message",
    [
        (0, None, "temperature is None; expected a number"),
        (1, 2**31, "top_k is 2147483648; expected an int32"),
        (1, 1.5, "top_k is 1.5; expected an int32"),
        (4, 2**63, "seed is 9223372036854775808; expected an int64"),
        (5, "1", "edits is '1'; expected an int32"),
    ],
)
def test_a_value_that_does_not_fit_is_named(place, value, message):
    bad = list(REQUESTS[1])
    bad[place] = value
    with pytest.raises(ValueError, match=message):
        packed([REQUESTS[0], tuple(bad)])


def test_parameters_are_views_of_the_first_rows(device):
    out = RowBuffers.allocate(8, device)
    mask = torch.zeros(3, 1, dtype=torch.int32, device=device)
    flags = torch.ones(3, dtype=torch.int32, device=device)
    whole = out.params(3, truncated=True, max_top_k=64, edits=LogitEdits(mask=mask, repeats=3))
    assert not whole.all_greedy and not whole.distribution_only
    assert whole.truncation.max_top_k == 64
    assert whole.edits.mask is mask and whole.edits.repeats == 3
    views = {name: getattr(whole, name) for name in ("temperature", "seed", "position")}
    views |= {name: getattr(whole.truncation, name) for name in ("top_k", "top_p", "min_p")}
    for name, view in (views | {"edits": whole.edits.rows}).items():
        assert view.shape == (3,) and view.data_ptr() == getattr(out, name).data_ptr(), name
    plain = out.params(8, truncated=False, greedy=True, distribution_only=True)
    assert plain.truncation is None and plain.edits is None
    assert plain.all_greedy and plain.distribution_only
    assert out.params(3, truncated=False, edits=LogitEdits(mask=mask, rows=flags)).edits.rows is flags


def test_views_of_more_sizes_than_are_remembered_are_right(device):
    out = RowBuffers.allocate(2 * RowBuffers.REMEMBERED_SIZES, device)
    for rows in (*range(out.capacity + 1), 1, out.capacity):
        assert out.params(rows, truncated=False).seed.shape == (rows,)
    assert len(out._views) <= RowBuffers.REMEMBERED_SIZES


@pytest.mark.parametrize("rows", [-1, 5])
def test_more_rows_than_the_buffers_have_are_refused(rows):
    with pytest.raises(ValueError, match=f"rows is {rows}; expected 0 to the buffers' 4"):
        RowBuffers.allocate(4, "cpu").params(rows, truncated=False)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"top_k": torch.zeros(4)}, r"top_k is \(4,\) torch.float32 .*; expected contiguous \(4,\) torch.int32"),
        (
            {"seed": torch.zeros(2, 2).long()},
            r"seed is \(2, 2\) torch.int64 .*; expected contiguous \(4,\) torch.int64",
        ),
        ({"min_p": torch.zeros(8)[::2]}, r"min_p is \(4,\) torch.float32 .* strides \(2,\); expected contiguous"),
        ({"edits": torch.zeros(5, dtype=torch.int32)[1:]}, "edits is at address .*; expected a multiple of 16"),
        ({"temperature": torch.zeros(2, 2)}, r"temperature is \(2, 2\) .*; expected contiguous \(4,\) torch.float32"),
        ({"min_p": torch.zeros(5)}, r"min_p is \(5,\) .*; expected contiguous \(4,\) torch.float32"),
        ({"position": None}, r"position is a NoneType; expected a tensor, \(4,\) torch.int64"),
    ],
)
def test_wrong_buffers_are_named(changed, message):
    tensors = {name: torch.zeros(4, dtype=dtype) for name, dtype in RowBuffers.DTYPES.items()}
    with pytest.raises(ValueError, match=message):
        RowBuffers(**tensors | changed)


TABLE = torch.zeros(4, 8, dtype=torch.int32)
IDS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"table": TABLE.long()}, r"table is \(4, 8\) torch.int64 .*; expected contiguous \[S, 8\] torch.int32"),
        ({"table": TABLE[:, :7]}, r"table is \(4, 7\)"),
        ({"table": TABLE[::2]}, r"table is \(2, 8\) torch.int32 with strides \(16, 1\)"),
        ({"table": TABLE[:0]}, r"table is \(0, 8\).*of one line or more"),
        ({"table": TABLE.reshape(-1)[1:25].view(3, 8)}, "table is .*, at a multiple of 16"),
        ({"table": TABLE.reshape(-1)}, r"table is \(32,\)"),
        ({"slots": IDS.int()}, r"slots is \(3,\) torch.int32 .*; expected contiguous \(3,\) torch.int64"),
        ({"slots": IDS[:, None]}, r"slots is \(3, 1\)"),
        ({"slots": torch.zeros(6).long()[::2]}, r"slots is \(3,\) torch.int64 .* strides \(2,\)"),
        ({"slots": IDS.to("meta")}, "slots is .* on meta .*; expected .* on cpu"),
        ({"positions": IDS.int()}, r"positions is \(3,\) torch.int32 .*; expected contiguous \(3,\) torch.int64"),
        ({"positions": IDS[:2]}, r"positions is \(2,\)"),
        ({"positions": torch.zeros(6).long()[::2]}, r"positions is \(3,\) torch.int64 .* strides \(2,\)"),
        ({"positions": IDS.to("meta")}, "positions is .* on meta .*; expected .* on cpu"),
        ({"nodes": 2}, r"positions is \(3,\) .*; expected contiguous \(6,\)"),
        ({"nodes": 0}, "nodes is 0; expected 1 or more"),
        ({"out": RowBuffers.allocate(2, "cpu")}, "out has 2 rows on cpu; expected 3 or more on cpu"),
        ({"out": RowBuffers.allocate(3, "meta")}, "out has 3 rows on meta; expected 3 or more on cpu"),
    ],
)
def test_wrong_arguments_of_a_gather_are_named(changed, message):
    arguments = {"table": TABLE, "slots": IDS, "positions": IDS, "out": RowBuffers.allocate(3, "cpu")}
    with pytest.raises(ValueError, match=message):
        gather_rows(**arguments | changed)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"table": TABLE.float()}, r"table is \(4, 8\) torch.float32"),
        ({"slots": IDS[:, None]}, r"slots is \(3, 1\)"),
        ({"lines": TABLE}, r"lines is \(4, 8\) .*; expected contiguous \(3, 8\) torch.int32"),
        (
            {"lines": torch.zeros(3, 16, dtype=torch.int32)[:, :8]},
            r"lines has strides \(16, 1\); expected it contiguous",
        ),
    ],
)
def test_wrong_arguments_of_a_write_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        write_rows(**{"table": TABLE, "slots": IDS, "lines": TABLE[:3]} | changed)


@pytest.mark.gpu
def test_a_captured_gather_reads_what_is_written_later(device):
    table = torch.zeros(4, 8, dtype=torch.int32, device=device)
    slots, positions = (torch.zeros(3, dtype=torch.int64, device=device) for _ in range(2))
    slot = torch.tensor([2], device=device)
    out = RowBuffers.allocate(3, device)
    gather_rows(table, slots, positions, out, edits=15)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_rows(table, slots, positions, out, edits=15)
    for request in REQUESTS[1:3]:
        write_rows(table, slot, packed([request]).to(device))
        slots.copy_(torch.tensor([2, 0, 2]))
        positions.copy_(torch.tensor([7, 8, 9]))
        graph.replay()
        assert out.seed.tolist() == [request[4], 0, request[4]]
        assert out.position.tolist() == [7, 8, 9]


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "num_rows, staged, num_lines, width", [(0, 1, 0, 8), (1, 1, 1, 5), (3, 4, 70, 33), (32, 32, 2, 2056)]
)
def test_a_staged_batch_has_its_new_lines_its_hidden_states_and_its_parameters(
    device, num_rows, staged, num_lines, width, dtype
):
    g = torch.Generator().manual_seed(num_rows)
    table = torch.randint(0, 2**31 - 1, (90, 8), generator=g, dtype=torch.int32)
    new_slots = pinned(torch.randperm(90, generator=g)[:num_lines], device)
    new_lines = pinned(torch.randint(0, 2**31 - 1, (num_lines, 8), generator=g, dtype=torch.int32), device)
    slots = torch.cat([new_slots, torch.tensor([7, 99, -1])])[:num_rows]
    slots = torch.cat([slots, torch.arange(1, 1 + num_rows - len(slots))]).to(device)
    positions = torch.arange(num_rows, device=device) + 2**33
    hidden = torch.randn(num_rows, width, generator=g).to(device, dtype)
    stage, out = torch.full((staged, width), 9, dtype=dtype, device=device), dirty(40, device)
    batch, lines = StagedBatch(device), table.to(device)
    batch.set(hidden, slots, positions, (num_lines, new_slots.data_ptr(), new_lines.data_ptr()))
    stage_rows(batch, lines, stage, out)

    table[new_slots] = new_lines
    assert torch.equal(lines.cpu(), table)
    assert torch.equal(stage[:num_rows], hidden) and (stage[num_rows:] == 9).all()
    nothing = torch.zeros(staged - num_rows, dtype=torch.int64, device=device)
    expected = gather_rows_ref(lines, torch.cat([slots, nothing]), torch.cat([positions, nothing]))
    for name in PARAMETERS:
        got = bits(getattr(out, name))
        assert got == [*bits(expected[name]), *bits(getattr(dirty(40 - staged, device), name))], name


HIDDEN, INDICES = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"slots": INDICES.int()}, "slots"),
        ({"slots": INDICES[:1]}, "slots"),
        ({"positions": torch.zeros(4, dtype=torch.int64)[::2]}, "positions"),
        ({"slots": torch.zeros(2, dtype=torch.int64, device="meta")}, "slots is .* on meta"),
        ({"hidden": torch.zeros(8, 2).T}, "hidden has strides"),
        ({"hidden": torch.zeros(20)[1:17].view(2, 8)}, "a multiple of 16"),
    ],
)
def test_a_batch_that_the_kernel_cannot_read_is_refused_by_name(changed, message):
    batch = {"hidden": HIDDEN, "slots": INDICES, "positions": INDICES} | changed
    with pytest.raises(ValueError, match=message):
        StagedBatch(torch.device("cpu")).set(**batch)


@pytest.mark.parametrize(
    "rows, columns, capacity, message", [(33, 8, 40, "stage is"), (0, 8, 40, "stage is"), (4, 8, 3, "out has")]
)
def test_a_stage_of_another_size_is_refused_by_name(rows, columns, capacity, message):
    batch, out = StagedBatch(torch.device("cpu")), RowBuffers.allocate(capacity, "cpu")
    with pytest.raises(ValueError, match=message):
        stage_rows(batch, torch.zeros(2, 8, dtype=torch.int32), torch.zeros(rows, columns), out)
