"""A name in Triton's cache on disk that does not depend on which kernel a process launched first.

Triton hashes a function with the constants that its callees use, as far as it has looked at these before: a kernel that
is asked for first has another name than one whose callees other kernels have shown. A process then compiles what
another one has compiled for it. Looked at after its callees, a function has one name.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import triton

_settled: set[int] = set()  # by identity: a function's hash is its name, which must not come first


def settle(kernel: Any) -> None:
    """Let Triton look at ``kernel``, after all that it calls. Nothing in the interpreter."""
    if not isinstance(kernel, triton.JITFunction) or id(kernel) in _settled:
        return
    _settled.add(id(kernel))
    for callee in _callees(kernel):
        settle(callee)
    _ = kernel.cache_key  # a property that looks when it is first read


def _callees(kernel: triton.JITFunction) -> Iterator[triton.JITFunction]:
    """What ``kernel`` calls, and maybe more: all that its names could mean, those of attributes in every module."""
    names = kernel.fn.__code__.co_names
    known = [kernel.fn.__globals__[name] for name in names if name in kernel.fn.__globals__]
    modules = [value for value in known if isinstance(value, types.ModuleType)]
    for value in (*known, *(getattr(module, name, None) for module in modules for name in names)):
        if isinstance(value, triton.JITFunction):
            yield value
