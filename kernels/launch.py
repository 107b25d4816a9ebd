"""Launch a kernel again without asking Triton again which binary that is.

A launch through Triton's front door looks at every argument to find the binary: about a microsecond each, and these
kernels have dozens. Here the caller says what the binary depends on, and the answer is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_BINARIES: dict[tuple[Hashable, ...], Any] = {}


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The next launch may start as far as there is room: it waits for this one's results by itself."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Until then, nothing that the previous launch writes may be read."""
    if OVERLAP:
        gdc_wait()


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a launch can start before the one that it depends on has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10, 12)


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
    variant: tuple[Hashable, ...],
    overlap: bool = False,
) -> None:
    """Run ``kernel`` with ``arguments``, then ``constants`` (in the order of its signature).

    variant: what the binary depends on beside the constants: the device, the types of pointers, and the alignment and
    values of the arguments that Triton specializes on. Two launches with the same variant must agree on all of these.
    overlap: the kernel may start before the previous launch has ended, and calls ``wait_for_previous``.
    """
    key = (id(kernel), num_warps, overlap, variant, *constants.values())
    binary = _BINARIES.get(key)
    if binary is None:
        # The interpreter has no binaries and returns None: it is asked anew each time.
        options = {"launch_pdl": True} if overlap else {}
        binary = kernel[(programs,)](*arguments, **constants, num_warps=num_warps, **options)
        if binary is not None:
            names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
            assert names == list(constants), f"constants of {kernel.__name__} are {list(constants)}, expected {names}"
            _BINARIES[key] = binary
        return
    binary[(programs, 1, 1)](*arguments, *constants.values())
