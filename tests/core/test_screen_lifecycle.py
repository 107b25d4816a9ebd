"""A screen serves only the head that it copies, and only while that head's weight is unchanged."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from core_examples import ROWS, VOCAB, example

from sgl_flashsample import LMHead, sample
from sgl_flashsample.head import Head
from sgl_flashsample.kernels.int8_head import MAX_HIDDEN
from sgl_flashsample.kernels.workspace import ScreenCounter
from sgl_flashsample.screen import Screen, UnwrittenScreen
from sgl_flashsample.sglang.screen_lifecycle import HeadScreen

HIDDEN = 32


def assert_drawn_without(screen: Screen, case, head: LMHead) -> None:
    """The screen does not serve ``head``, whose batches get their tokens without it."""
    assert not screen.serves(head)
    drawn = Head(head, screen=screen).draw(case.hidden, case.params).token_ids
    assert torch.equal(drawn, sample(case.hidden, head, case.params, path="fused").token_ids)
    assert screen.closed or screen.counters[ScreenCounter.ROWS] == 0


def assert_drawn_with(screen: Screen, case, head: LMHead) -> None:
    assert screen.serves(head)
    drawn = Head(head, screen=screen).draw(case.hidden, case.params, path="screened").token_ids
    assert torch.equal(drawn, sample(case.hidden, head, case.params, path="fused").token_ids)


def test_a_freed_heads_screen_does_not_serve_the_next_head_at_its_address():
    """As after unloading a model and loading another one of its shape: PyTorch's allocators give the block out again,
    and a weight that nobody has written to has version 0."""
    memory = np.random.default_rng(0).integers(-1, 2, (VOCAB, HIDDEN)).astype(np.float32)
    first = LMHead(torch.from_numpy(memory))
    screen, address = Screen(first, ROWS), first.weight.data_ptr()
    assert screen.serves(first)
    del first
    memory[:] = memory[::-1].copy()
    second = LMHead(torch.from_numpy(memory))
    assert (second.weight.data_ptr(), second.weight._version) == (address, 0)
    assert_drawn_without(screen, example(torch.device("cpu")), second)


@pytest.mark.gpu
def test_a_freed_heads_screen_does_not_serve_the_next_head_of_the_caching_allocator(device):
    first = LMHead(torch.zeros(4096, 1024, device=device))
    screen, address = Screen(first, ROWS), first.weight.data_ptr()
    del first
    # As many as the allocator has free blocks of this size, or more: one of them is at that address.
    heads = [LMHead(torch.ones(4096, 1024, device=device)) for _ in range(16)]
    (second,) = [head for head in heads if head.weight.data_ptr() == address]
    assert not screen.serves(second)


def test_a_screen_keeps_no_memory_of_its_head_alive():
    memory = np.zeros((VOCAB, HIDDEN), np.float32)
    head = LMHead(torch.from_numpy(memory))
    screen, gone = Screen(head, ROWS), weakref.ref(memory)
    del memory, head
    gc.collect()
    assert gone() is None and not screen.closed


def swap_data(weight):
    weight.data = weight.data.clone()


WRITES = {
    "in place": lambda weight: weight.mul_(2),
    "through a view": lambda weight: weight[5:6].zero_(),
    "another .data": swap_data,
    "another storage": lambda weight: weight.set_(weight.clone()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_noticed_and_a_rebuild_serves_again_in_place(device, write):
    case = example(device)
    screen = Screen(case.head, ROWS)
    copy = screen.int8_head.weight.data_ptr()
    write(case.head.weight)
    assert_drawn_without(screen, case, case.head)
    screen.rebuild(case.head)
    assert_drawn_with(screen, case, case.head)
    assert screen.int8_head.weight.data_ptr() == copy, "captured graphs read it there"


FUSED = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD]


@pytest.mark.parametrize("optimizer", FUSED)
def test_a_step_of_a_fused_optimizer_is_noticed(device, optimizer):
    """PyTorch does not count the writes of these."""
    case = example(device)
    weight = torch.nn.Parameter(case.head.weight)
    head = LMHead(weight)
    screen = Screen(head, ROWS)
    weight.grad, version = torch.randn_like(weight), weight._version
    optimizer([weight], lr=0.5, fused=True).step()
    assert weight._version == version
    assert_drawn_without(screen, case, head)
    screen.rebuild(head)
    assert_drawn_with(screen, case, head)


def stepped(*parameters: torch.nn.Parameter) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    torch.optim.AdamW(parameters, lr=0.5, fused=True).step()


def test_a_step_is_noticed_by_screens_of_views_twins_and_copies_and_by_no_screen_of_another_weight(device):
    parameter, other = (torch.nn.Parameter(torch.randn(VOCAB + 16, HIDDEN, device=device)) for _ in range(2))
    heads = [LMHead(parameter), LMHead(parameter.data), LMHead(parameter[16:].detach())]
    screens = [Screen(head, ROWS) for head in heads]
    others = [screens[0].twin(), copy.deepcopy(screens[0])]
    stepped(other)
    assert all(screen.serves(head) for screen, head in zip(screens, heads, strict=True))
    stepped(other, parameter)
    assert not any(screen.serves(head) for screen, head in zip(screens, heads, strict=True))
    assert not any(screen.serves(heads[0]) for screen in others)


def test_a_frozen_weight_keeps_its_screen_while_the_rest_of_its_model_is_trained(device):
    frozen = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, device=device), requires_grad=False)
    screen = Screen(LMHead(frozen), ROWS)
    stepped(frozen, torch.nn.Parameter(torch.randn(8, 8, device=device)))
    assert screen.serves(LMHead(frozen))


def test_a_step_that_fails_and_a_step_whose_closure_rebuilds_are_noticed(device):
    weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, device=device))
    screen = Screen(LMHead(weight), ROWS)
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(lambda: (_ for _ in ()).throw(RuntimeError("out of memory")))
    assert not screen.serves(LMHead(weight))
    weight.grad = torch.ones_like(weight)
    optimizer.step(lambda: screen.rebuild(LMHead(weight)))
    assert not screen.serves(LMHead(weight))


def test_a_step_is_noticed_by_the_screen_of_the_local_part_of_a_sharded_weight(tmp_path):
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = torch.nn.Parameter(distribute_tensor(torch.randn(VOCAB, HIDDEN), mesh, [Shard(0)]))
        head = LMHead(weight.to_local().detach())
        screen = Screen(head, ROWS)
        stepped(weight)
        assert not screen.serves(head)
    finally:
        distributed.destroy_process_group()


def test_a_screen_serves_the_heads_of_its_weight_and_no_other(device):
    head = example(device).head
    screen = Screen(head, ROWS)
    assert screen.serves(LMHead(head.weight, softcap=5.0, logit_scale=0.5)), "the copy is of the weight alone"
    for other in (
        LMHead(head.weight.clone()),
        LMHead(head.weight[: VOCAB - 5]),  # begins where the copied one does
        LMHead(head.weight, vocab_size=VOCAB - 5),
        LMHead(head.weight[:, : HIDDEN - 16]),
        LMHead(head.weight, logit_scale=-1.0),
    ):
        assert not screen.serves(other)


def test_a_screen_is_not_rebuilt_from_a_head_of_another_layout_and_stays_as_it_was(device):
    head = example(device).head
    screen = Screen(head, ROWS)
    with pytest.raises(ValueError, match=r"head is \(600, 32, 32, torch.float16.*expected the screen's \(600, 32"):
        screen.rebuild(LMHead(head.weight.half()))
    with pytest.raises(ValueError, match=r"the head cannot be screened: its logit_scale is -1\.0"):
        screen.rebuild(LMHead(head.weight, logit_scale=-1.0))
    assert screen.serves(head)


def test_a_weight_whose_writes_pytorch_does_not_count_needs_a_caller_that_announces_them(device):
    with torch.inference_mode():
        case = example(device)
        with pytest.raises(ValueError, match=r"torch.inference_mode\(\).*expected announces_writes=True"):
            Screen(case.head, ROWS)
        screen = Screen(case.head, ROWS, announces_writes=True)
        assert screen.serves(case.head)
        screen.invalidate()
        case.head.weight.mul_(-1)
        assert_drawn_without(screen, case, case.head)
        screen.rebuild(case.head)
        assert_drawn_with(screen, case, case.head)


def test_a_twin_reads_the_same_copy_and_counts_what_it_draws_itself(device):
    case = example(device)
    screen = Screen(case.head, ROWS)
    twin = screen.twin()
    assert_drawn_with(twin, case, case.head)
    assert screen.counters[ScreenCounter.ROWS] == 0 < twin.counters[ScreenCounter.ROWS]
    assert twin.int8_head is screen.int8_head


def test_a_twin_is_invalid_rebuilt_and_closed_with_its_screen(device):
    case = example(device)
    screen = Screen(case.head, ROWS)
    twin = screen.twin()
    screen.invalidate()
    assert not twin.serves(case.head)
    screen.rebuild(case.head)
    assert twin.serves(case.head)
    screen.close()
    assert twin.closed and not twin.serves(case.head)


def test_a_rebuild_that_fails_leaves_nothing_that_serves(device, monkeypatch):
    head = example(device).head
    screen = Screen(head, ROWS)
    monkeypatch.setattr(screen.int8_head, "rebuild", lambda head: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        screen.rebuild(head)
    assert not screen.serves(head)


def test_a_closed_screen_holds_no_memory_and_serves_nothing(device):
    case = example(device)
    screen = Screen(case.head, ROWS)
    held = weakref.ref(screen.int8_head.weight)
    screen.close()
    gc.collect()
    assert held() is None
    assert_drawn_without(screen, case, case.head)
    with pytest.raises(ValueError, match="the screen is closed; expected a new one"):
        screen.rebuild(case.head)


@pytest.mark.parametrize("vocab, hidden, rows", [(1, 8, 1), (127, 33, 3), (503, 72, 65)])
def test_what_a_screen_will_hold_is_known_to_the_byte(device, vocab, hidden, rows):
    head = LMHead(torch.ones(vocab + 3, hidden, dtype=torch.bfloat16, device=device), vocab_size=vocab)
    screen = Screen(head, rows)
    assert Screen.bytes_for(head, rows) == screen.num_bytes > screen.int8_head.num_bytes
    assert not UnwrittenScreen(head, rows).serves(head)
    large = LMHead(torch.empty(151_936, 4096, dtype=torch.bfloat16, device="meta"))
    assert 0.5 < Screen.bytes_for(large, 32) / (large.weight.numel() * 2) < 0.52, "the copy is half, the scratch little"


@pytest.mark.parametrize(
    "head, rows, message",
    [
        (torch.zeros(32, 8), 1, "head is a Tensor; expected an LMHead"),
        (LMHead(torch.zeros(32, 8), logit_scale=-1.0), 1, "cannot be screened: its logit_scale is -1.0"),
        (LMHead(torch.zeros(1, MAX_HIDDEN + 1)), 1, f"cannot be screened: its hidden size is {MAX_HIDDEN + 1}"),
        (LMHead(torch.zeros(32, 8)), 0, "max_rows is 0; expected 1 or more"),
    ],
    ids=["a tensor", "negative scale", "wide", "no rows"],
)
def test_a_screen_that_cannot_be_says_why(head, rows, message):
    with pytest.raises(ValueError, match=message):
        Screen(head, rows)


def test_the_pinned_screen_of_a_servers_head_is_written_anew_in_its_place_and_never_freed(device):
    """The graphs of drafts read it and are never captured anew."""
    case = example(device)
    screen = HeadScreen(case.head, ROWS, counter_seconds=60.0)
    twin = screen.pin()
    screen.free(case.head)
    assert not twin.closed and twin.serves(case.head)
    place = twin.int8_head.weight.data_ptr()
    case.head.weight.mul_(-1.0)
    screen.invalidate()
    assert not twin.serves(case.head)
    screen.renew(case.head)
    assert twin.int8_head.weight.data_ptr() == place
    assert_drawn_with(twin, case, case.head)


def test_copies_of_a_screen_come_and_go_and_the_head_keeps_its_weight():
    weight = torch.randn(VOCAB, HIDDEN)
    screen = Screen(LMHead(weight), ROWS)
    for _ in range(3):
        assert not copy.deepcopy(screen).serves(LMHead(weight.clone()))
        gc.collect()
    assert screen.serves(LMHead(weight)) and weight.untyped_storage().nbytes() == weight.nbytes


def test_a_screen_that_inference_mode_has_built_is_rebuilt_outside_of_it(device):
    case = example(device)
    with torch.inference_mode():
        screen = Screen(case.head, ROWS)
    screen.rebuild(case.head)
    assert_drawn_with(screen, case, case.head)
