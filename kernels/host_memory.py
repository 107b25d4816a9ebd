"""Host memory that captured CUDA graphs read and write.

A kernel moves the words: a copy as a node of a graph costs the host several times what a launch does.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any

import torch
import triton
import triton.language as tl

from .intrinsics import after_writes
from .launch import launch

MAX_LEFT = 1024  # pieces of memory whose owners have gone
_left: collections.deque[torch.Tensor] = collections.deque(maxlen=MAX_LEFT)
_BLOCK = 1024
_WARPS = 8
_POINTERS = ["source_ptr", "target_ptr"]


def memory_for_graphs(owner: Any, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[size]`` zeros in host memory, pinned where the device is a GPU.

    The memory outlives its owner: a graph that was dropped may still have to run, and PyTorch does not know that it
    uses the memory. It is given up when so many others have lost their owners that the graph has run long ago.
    """
    memory = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
    weakref.finalize(owner, _left.append, memory).atexit = False
    return memory


@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=_POINTERS)
def copy_words_kernel(
    source_ptr,  # [N] i32
    target_ptr,  # [N] i32, out; with TELLS [N + 2]: then a number, out, and the number that is put there at the end
    num_words,  # N
    # constexpr
    BLOCK: tl.constexpr,
    TELLS: tl.constexpr,
):
    for first in range(0, num_words, BLOCK):
        words = first + tl.arange(0, BLOCK)
        tl.store(target_ptr + words, tl.load(source_ptr + words, mask=words < num_words), mask=words < num_words)
    if TELLS:
        number = tl.load(target_ptr + num_words + 1)
        tl.debug_barrier()  # all threads have written
        tl.store(target_ptr + num_words, after_writes(number))


def copy_words(source: torch.Tensor, target: torch.Tensor, *, tells: bool = False) -> None:
    """Copy ``[N]`` int32 between a GPU and pinned host memory, in one launch of one program.

    tells: ``target`` is ``[N + 2]``, in host memory. When the words have arrived there, the last number is put before
    itself: a host that finds it there may read them.

    Raises ValueError for another shape, dtype or layout.
    """
    expected = (source.numel() + (2 if tells else 0),)
    for name, tensor, shape in (("source", source, source.shape[:1]), ("target", target, expected)):
        if tensor.shape != shape or tensor.dtype is not torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}; "
                f"expected contiguous {tuple(shape)} torch.int32"
            )
    device = source.device if source.is_cuda else target.device
    constants = {"BLOCK": _BLOCK, "TELLS": tells}
    launch(copy_words_kernel, 1, (source, target, source.numel()), constants, _WARPS, (device.index,))
