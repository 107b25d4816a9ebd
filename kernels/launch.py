"""Launch a kernel again without asking Triton again which binary that is.

A launch through Triton's front door looks at every argument to find the binary: about a microsecond each, and these
kernels have dozens. Here the caller says what the binary depends on, and the answer is kept.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Hashable, Iterator
from typing import Any

import torch
import triton.language as tl

from .cache_key import settle

_BINARIES: dict[tuple[Hashable, ...], Any] = {}
_compiling_only = contextvars.ContextVar("compiling_only", default=False)  # another thread's launches still run


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Within this, ``launch`` asks Triton for the binary and runs nothing: outputs stay as they were allocated."""
    token = _compiling_only.set(True)
    try:
        yield
    finally:
        _compiling_only.reset(token)


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
    variant: tuple[Hashable, ...],
    *,
    early: bool = False,
) -> None:
    """Run ``kernel`` with ``arguments``, then ``constants`` (in the order of its signature).

    variant: what the binary depends on beside the constants: the device, the types of pointers, and the alignment and
    values of the arguments that Triton specializes on. Two launches with the same variant must agree on all of these.
    early: while the launch before it still runs (``starts_early``): the kernel itself waits for that one, before it
    reads what that wrote or writes anything. The constants say so too.
    """
    options = {"launch_pdl": True} if early else {}
    if _compiling_only.get():
        _prepare(kernel, constants)
        kernel.warmup(*arguments, **constants, num_warps=num_warps, grid=(programs,), **options)
        return
    key = (id(kernel), num_warps, variant, *constants.values())
    binary = _BINARIES.get(key)
    if binary is None:
        _prepare(kernel, constants)
        # The interpreter has no binaries and returns None: it is asked anew each time.
        binary = kernel[(programs,)](*arguments, **constants, num_warps=num_warps, **options)
        if binary is not None:
            _BINARIES[key] = binary
        return
    binary[(programs, 1, 1)](*arguments, *constants.values())


@functools.cache
def _constants_of(kernel: Any) -> list[str]:
    parameters = inspect.signature(kernel.fn).parameters.values()
    return [parameter.name for parameter in parameters if parameter.annotation in (tl.constexpr, "tl.constexpr")]


def _prepare(kernel: Any, constants: dict[str, Any]) -> None:
    settle(kernel)  # first: whatever remembers something by its kernel asks for the kernel's hash, which is its name
    _check_order(kernel, constants)


def _check_order(kernel: Any, constants: dict[str, Any]) -> None:
    """A known binary is launched by place, not by name: in another order it would read one constant for another."""
    names = _constants_of(kernel)
    assert names == list(constants), f"constants of {kernel.__name__} are {list(constants)}, expected {names}"


@functools.cache
def resident_programs(device: torch.device, ctas_per_sm: int) -> int:
    """How many programs run at the same time where a multiprocessor holds ``ctas_per_sm`` of them."""
    if device.type != "cuda":
        return ctas_per_sm  # interpreted: programs run one after the other
    return torch.cuda.get_device_properties(device).multi_processor_count * ctas_per_sm


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether a launch on this device can start before the one before it has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
