"""Triton's interpreter in less time, with the same results: for the servers and the tests of a machine without a GPU.

Before each call of a device function the interpreter goes through every name of ``triton.language`` for what it has to
replace, although the launch around it has done so; and for each result it builds its table of NumPy's dtypes again.
The two are much of the time that a small kernel takes.
"""

from __future__ import annotations

import functools
import os


def turn_on() -> None:
    """Interpret this process's kernels, here. Before the first ``import triton``."""
    os.environ["TRITON_INTERPRET"] = "1"
    patch()


def patch() -> None:
    """Once per process, with ``TRITON_INTERPRET=1``; again does nothing. Another build is left alone."""
    import triton.language as tl
    from triton.runtime import interpreter

    names = ("_patch_lang", "_get_np_dtype", "_LangPatchScope")
    if not all(hasattr(interpreter, name) for name in names) or hasattr(interpreter._patch_lang, "once"):
        return
    look = interpreter._patch_lang
    languages = [tl, tl.core]
    replaced: set[int] = set()  # of the launch that runs: which of the languages have been gone through

    @functools.cache
    def seen_from(function) -> frozenset[int]:
        names = function.__globals__.values()
        return frozenset(i for i, language in enumerate(languages) if any(name is language for name in names))

    def look_once(function):
        seen = seen_from(function)
        if seen and seen <= replaced:
            return interpreter._LangPatchScope()
        outermost = not replaced
        scope = look(function)
        replaced.update(seen)
        if outermost:
            restore = scope.restore

            def end() -> None:
                replaced.clear()
                restore()

            scope.restore = end
        return scope

    dtype_of = interpreter._get_np_dtype
    dtype_of_scalar = functools.cache(dtype_of)

    def numpy_dtype(kind):
        """A block's is that of its elements; pointers cannot be hashed, and have no table."""
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return dtype_of(element) if isinstance(element, tl.pointer_type) else dtype_of_scalar(element)

    look_once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = look_once
    interpreter._get_np_dtype = numpy_dtype
