"""SGLang's CUDA graphs of drafts, twice: of all ids, and of the ids of a ``LearnedVocabulary``. A step replays the ones
that are in use, chosen on the host.

A backend of SGLang's captures a graph per ``ShapeKey``, and for some servers several variants of it, from one plan of
the attention and one set of buffers. The second graph is one more variant.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ..files import first_line
from .learned_vocabulary import LearnedVocabulary


class BothGraphs:
    """SGLang's graph backend, ``BaseCudaGraphBackend``, of a runner of drafts."""

    def __init__(self, backend: Any, vocabulary: LearnedVocabulary) -> None:
        self._backend, self._vocabulary = backend, vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def capture_one(self, shape_key: Any, forward: Callable, *args: Any, **kwargs: Any) -> None:
        """Capture both. Where the second one fails, all ids are drafted until restart."""
        vocabulary = self._vocabulary
        with vocabulary.used(False):
            self._backend.capture_one(shape_key, forward, *args, **kwargs)
        if vocabulary.stopped:
            return
        try:
            with vocabulary.used(True):
                self._backend.capture_one(_of_learned(shape_key), forward, *args, **kwargs)
        except Exception as error:  # the server has the graphs of all ids
            vocabulary.stop(first_line(error))

    def replay(self, shape_key: Any, *args: Any, **kwargs: Any) -> Any:
        key = _of_learned(shape_key) if self._vocabulary.in_use else shape_key
        return self._backend.replay(key, *args, **kwargs)


@functools.cache  # of every step, of as many keys as there are graphs
def _of_learned(shape_key: Any) -> Any:
    return dataclasses.replace(shape_key, variant_label=f"{shape_key.variant_label or ''}-flashsample-learned")
