"""Host memory that captured CUDA graphs read and write."""

from __future__ import annotations

import collections
import weakref
from typing import Any

import torch

MAX_LEFT = 1024  # pieces of memory whose owners have gone
_left: collections.deque[torch.Tensor] = collections.deque(maxlen=MAX_LEFT)


def memory_for_graphs(owner: Any, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[size]`` zeros in host memory, pinned where the device is a GPU.

    The memory outlives its owner: a graph that was dropped may still have to run, and PyTorch does not know that it
    uses the memory. It is given up when so many others have lost their owners that the graph has run long ago.
    """
    memory = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
    weakref.finalize(owner, _left.append, memory).atexit = False
    return memory
