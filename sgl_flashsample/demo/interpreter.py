"""Triton's interpreter in less time, with the same results: for servers and tests on a machine without a GPU.

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
    patch_languages = interpreter._patch_lang
    languages = (tl, tl.core)
    patched: set[int] = set()  # by the launch that runs: places in ``languages``

    @functools.cache
    def languages_of(function) -> frozenset[int]:
        names = function.__globals__.values()
        return frozenset(place for place, language in enumerate(languages) if any(name is language for name in names))

    def patch_languages_once(function):
        needed = languages_of(function)
        if needed and needed <= patched:
            return interpreter._LangPatchScope()
        outermost = not patched
        scope = patch_languages(function)
        patched.update(needed)
        if outermost:
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    numpy_dtype = interpreter._get_np_dtype
    numpy_dtype_of_scalar = functools.cache(numpy_dtype)

    def numpy_dtype_cached(dtype):
        """A block's is that of its elements; pointers cannot be hashed, and have no table."""
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return numpy_dtype(element) if isinstance(element, tl.pointer_type) else numpy_dtype_of_scalar(element)

    patch_languages_once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_languages_once
    interpreter._get_np_dtype = numpy_dtype_cached
