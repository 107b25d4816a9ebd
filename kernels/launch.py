"""Launch a kernel again without asking Triton again which binary that is.

A launch through Triton's front door looks at every argument to find the binary: about a microsecond each. Here the
caller says what the binary depends on, and the answer is kept.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

_BINARIES: dict[tuple[Hashable, ...], Any] = {}
# Binaries within ``compiling_only``, else None; another thread's launches still run.
_compiled: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("compiled", default=None)


@contextlib.contextmanager
def compiling_only() -> Iterator[list[Any]]:
    """Within this, ``launch`` asks Triton for the binary and runs nothing: outputs stay as they were allocated. Yields
    the list that each launch appends its binary to."""
    binaries: list[Any] = []
    token = _compiled.set(binaries)
    try:
        yield binaries
    finally:
        _compiled.reset(token)


def is_compiling_only() -> bool:
    return _compiled.get() is not None


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
    variant: tuple[Hashable, ...],
    *,
    early: bool = False,
    max_registers: int | None = None,
) -> None:
    """Run ``kernel`` with ``arguments``, then ``constants`` (in the order of its signature).

    variant: what the binary depends on beside the constants: the device, the types of pointers, which arguments are
    None, and the alignment and values of the arguments that Triton specializes on. Two launches with the same variant
    must agree on all of these.
    early: while the launch before it still runs (``supports_early_launch``): the kernel itself waits for that one,
    before it reads what that wrote or writes anything. The constants say so too.
    max_registers: per thread; what needs more goes to memory. The compiler decides where it is None.
    """
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    if (compiled := _compiled.get()) is not None:
        _prepare(kernel, constants)
        compiled.append(kernel.warmup(*arguments, **constants, num_warps=num_warps, grid=(programs,), **options))
        return
    key = (id(kernel), num_warps, max_registers, variant, *constants.values())
    binary = _BINARIES.get(key)
    if binary is None:
        _prepare(kernel, constants)
        # The interpreter has no binaries and returns None: it is asked anew each time.
        binary = kernel[(programs,)](*arguments, **constants, num_warps=num_warps, **options)
        if binary is not None:
            _BINARIES[key] = binary
        return
    binary[(programs, 1, 1)](*arguments, *constants.values())


def num_binaries() -> int:
    """The kernels that this process has compiled, or loaded from Triton's cache on disk, for ``launch``. 0 in the
    interpreter."""
    return len(_BINARIES)


def _prepare(kernel: Any, constants: dict[str, Any]) -> None:
    warm_cache_key(kernel)  # first: whatever remembers something by its kernel asks for the kernel's hash
    # A known binary is launched by place, not by name: in another order it would read one constant for another.
    names = _constants_of(kernel)
    assert names == list(constants), f"constants of {kernel.__name__} are {list(constants)}, expected {names}"


@functools.cache
def _constants_of(kernel: Any) -> list[str]:
    parameters = inspect.signature(kernel.fn).parameters.values()
    return [parameter.name for parameter in parameters if parameter.annotation in (tl.constexpr, "tl.constexpr")]


_warmed: set[int] = set()  # by identity: a function's hash is its cache key, which must not be asked for first


def warm_cache_key(kernel: Any) -> None:
    """Let Triton hash ``kernel`` after all that it calls. Nothing in the interpreter.

    Triton hashes a function with the constants that its callees use, as far as it has hashed these before: the key of a
    kernel in the cache on disk would depend on which kernel a process launched first, and processes would not find what
    others have compiled.
    """
    if not isinstance(kernel, triton.JITFunction) or id(kernel) in _warmed:
        return
    _warmed.add(id(kernel))
    for callee in _callees(kernel):
        warm_cache_key(callee)
    _ = kernel.cache_key  # a property that is computed when it is first read


def _callees(kernel: triton.JITFunction) -> Iterator[triton.JITFunction]:
    """A superset of the functions that ``kernel`` calls: every JIT function that its names and attributes may mean."""
    names = kernel.fn.__code__.co_names
    known = [kernel.fn.__globals__[name] for name in names if name in kernel.fn.__globals__]
    modules = [value for value in known if isinstance(value, types.ModuleType)]
    for value in (*known, *(getattr(module, name, None) for module in modules for name in names)):
        if isinstance(value, triton.JITFunction):
            yield value


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a device that launches and the choice of a path depend on. capability: (9, 0) for an H100.
    clock: of its multiprocessors, in Hz, and bandwidth: of its memory, in bytes per second, both at the largest clocks;
    0 where unknown. is_geforce: it is of the line whose tensor cores are slow with sums in float32."""

    capability: tuple[int, int]
    multiprocessors: int
    clock: float = 0.0
    bandwidth: float = 0.0
    is_geforce: bool = False


_pretended: Gpu | None = None


@functools.cache
def gpu_of(device: torch.device) -> Gpu | None:
    """None for the CPU, where kernels are interpreted."""
    if _pretended is not None:
        return _pretended
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    # In kHz and bits; memory transfers twice per cycle.
    clock, memory_clock, width = (
        getattr(properties, name, 0) for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )
    return Gpu(
        (properties.major, properties.minor),
        properties.multi_processor_count,
        clock=1e3 * clock,
        bandwidth=2e3 * memory_clock * width / 8,
        is_geforce="GeForce" in properties.name,
    )


def pretend_gpu(gpu: Gpu) -> None:
    """From now on this process compiles for ``gpu``, which it need not have: from tensors in host memory, and within
    ``compiling_only``, as nothing can run. To be called before anything else of this package."""
    global _pretended
    _pretended = gpu
    for remembered in (gpu_of, resident_programs, supports_early_launch):
        remembered.cache_clear()
    triton.runtime.driver.set_active(_PretendedDriver(gpu))


class _PretendedDriver:
    """The answers that Triton needs from a driver before it compiles."""

    def __init__(self, gpu: Gpu) -> None:
        major, minor = gpu.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@functools.cache
def resident_programs(device: torch.device, ctas_per_sm: int) -> int:
    """The number of programs that run at the same time where a multiprocessor holds ``ctas_per_sm`` programs.
    Interpreted programs run one after the other."""
    gpu = gpu_of(device)
    return ctas_per_sm if gpu is None else gpu.multiprocessors * ctas_per_sm


@functools.cache
def supports_early_launch(device: torch.device) -> bool:
    """Whether a launch on this device can start before the one before it has ended (programmatic dependent launch)."""
    gpu = gpu_of(device)
    return gpu is not None and gpu.capability >= (9, 0)
