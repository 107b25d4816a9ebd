"""Numba's cache of the loops of the cpu path: files in the package's folder, in the user's, or in ``NUMBA_CACHE_DIR``.

Numba raises where it can write to none of these folders, and for a file that a full disk or a killed process has left
incomplete. The loops are then compiled without a cache: the same loops, some seconds later.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.dispatcher import Dispatcher

from .files import first_line

logger = logging.getLogger("sgl_flashsample")


def cache_folder() -> str | None:
    """Where Numba keeps what it compiles of this package; None where it can write to no folder."""
    try:
        return njit(cache=True)(cache_folder).stats.cache_path
    except RuntimeError:
        return None


def can_cache() -> bool:
    """True if the loops can be kept on disk; else a warning is logged."""
    if cache_folder() is not None:
        return True
    logger.warning(
        "flashsample: the loops of the cpu path are compiled at each start, which takes some seconds: Numba can write "
        "to none of its folders; NUMBA_CACHE_DIR names another one"
    )
    return False


def leave_cache(functions: Iterable[Any], file_name: str, error: Exception) -> None:
    """After ``error``: compile these Numba functions without their cache from now on, and remove its files, so that the
    next process makes them anew. file_name: of the source without its suffix, with which Numba's names begin."""
    for function in functions:
        if isinstance(function, Dispatcher):
            function._cache.disable()
    folder = cache_folder()
    for file in Path(folder or "").glob(f"{file_name}.*.nb[ic]"):
        with contextlib.suppress(OSError):  # a folder that cannot be written to, or another process was first
            file.unlink()
    logger.warning(
        "flashsample: Numba's cache in %s cannot be used, so the loops of the cpu path are compiled anew, which takes "
        "some seconds: %s",
        folder,
        first_line(error),
    )
