"""Host memory that graphs use stays until a graph that was dropped has run, and words get there before the number that
says so."""

from __future__ import annotations

import time
import weakref

import pytest
import torch

from sgl_flashsample.kernels.host_memory import MAX_LEFT, copy_words, memory_for_graphs


class Owner:
    """An owner of memory."""


def test_memory_outlives_its_owner_for_a_while(device):
    def leave() -> weakref.ref:
        owner = Owner()
        return weakref.ref(memory_for_graphs(owner, 2, torch.int64, device))

    first = leave()
    memory = first()
    assert memory is not None and memory.tolist() == [0, 0] and memory.is_pinned() == (device.type == "cuda")
    del memory
    for _ in range(MAX_LEFT - 1):
        leave()
    assert first() is not None
    leave()
    assert first() is None


@pytest.mark.parametrize("num_words", [1, 8, 1024, 2500])
def test_words_are_copied_to_the_host_and_from_it(device, num_words):
    owner = Owner()
    host = memory_for_graphs(owner, num_words, torch.int32, device)
    words = torch.arange(1, num_words + 1, dtype=torch.int32, device=device)
    copy_words(words, host)
    back = torch.zeros_like(words)
    copy_words(host, back)
    assert torch.equal(back, words)
    assert host.tolist() == words.tolist()


def test_a_number_behind_the_words_tells_that_they_have_arrived(device):
    owner, words = Owner(), torch.tensor([3, 1, 2], dtype=torch.int32, device=device)
    host = memory_for_graphs(owner, 5, torch.int32, device)
    host[-1] = 7
    copy_words(words, host, tells=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert host.tolist() == [3, 1, 2, 7, 7]


@pytest.mark.gpu
def test_words_of_a_graph_are_there_when_their_number_is():
    """The host looks for the number without a wait for the GPU."""
    device, owner, size = torch.device("cuda"), Owner(), 50_000
    words, host = (
        torch.zeros(size, dtype=torch.int32, device=device),
        memory_for_graphs(owner, size + 2, torch.int32, device),
    )
    copy_words(words, host, tells=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        words.add_(1)
        copy_words(words, host, tells=True)
    numbers = memoryview(host.numpy().data)[size:]
    for step in range(1, 200):
        numbers[1] = step
        graph.replay()
        deadline = time.monotonic() + 5
        while numbers[0] != step:
            assert time.monotonic() < deadline
        assert (host[:size] == step).all()


@pytest.mark.parametrize(
    ("source", "target", "tells", "message"),
    [
        (
            torch.zeros(3),
            torch.zeros(3),
            False,
            r"source is \(3,\) torch.float32 with strides \(1,\); expected contiguous",
        ),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), True, r"target is \(4,\) .* \(5,\)"),
        (
            torch.zeros(6, dtype=torch.int32)[::2],
            torch.zeros(3, dtype=torch.int32),
            False,
            r"source is .* strides \(2,\)",
        ),
    ],
    ids=["dtype", "length", "strides"],
)
def test_other_words_are_refused(source, target, tells, message):
    with pytest.raises(ValueError, match=message):
        copy_words(source, target, tells=tells)
