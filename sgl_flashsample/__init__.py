"""sgl-flashsample: the last step of LLM decoding (LM head, softmax, sampling) as one exact fused pass.

    from sgl_flashsample import BatchParams, LMHead, sample

    head = LMHead(weight, vocab_size=151_643)
    out = sample(hidden, head, BatchParams(temperature, seed, position))

``sample`` is documented in ``api.py``; SGLang reaches the same code through ``sglang/plugin.py``.
Importing this package loads neither torch nor Triton; the names below do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import BatchParams, SampleOutput, sample, sample_from_logits
    from .choices import Choices
    from .greedy import argmax
    from .kernels.features import LogitEdits, Truncation
    from .kernels.head import LMHead, Workspace
    from .kernels.rng import NOISE_ABI
    from .kernels.tiles import TileConfig
    from .lookup import load_table
    from .resolution import resolve
    from .screen import Screen
    from .work import Path

_HOMES = {
    "Choices": ".choices",
    "load_table": ".lookup",
    "resolve": ".resolution",
    "Screen": ".screen",
    "BatchParams": ".api",
    "SampleOutput": ".api",
    "sample": ".api",
    "sample_from_logits": ".api",
    "argmax": ".greedy",
    "LogitEdits": ".kernels.features",
    "Truncation": ".kernels.features",
    "LMHead": ".kernels.head",
    "Workspace": ".kernels.head",
    "NOISE_ABI": ".kernels.rng",
    "TileConfig": ".kernels.tiles",
    "Path": ".work",
}

__all__ = [
    "NOISE_ABI",
    "BatchParams",
    "Choices",
    "LMHead",
    "LogitEdits",
    "Path",
    "SampleOutput",
    "Screen",
    "TileConfig",
    "Truncation",
    "Workspace",
    "__version__",
    "argmax",
    "load_table",
    "resolve",
    "sample",
    "sample_from_logits",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
