"""Host memory that graphs use stays until a graph that was dropped has run."""

from __future__ import annotations

import weakref

import torch

from sgl_flashsample.kernels.host_memory import MAX_LEFT, memory_for_graphs


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
