"""sgl-flashsample: the last step of LLM decoding (LM head, softmax, sampling) as one exact fused pass.

    from sgl_flashsample import LMHead, Sampler, SamplingParams

    sampler = Sampler(LMHead(weight, vocab_size=151_643))
    out = sampler(hidden, SamplingParams(temperature=0.7, top_k=50))

``sampler.py`` takes numbers, ``api.py`` tensors that are on the device already. SGLang reaches the same code through
``sglang/plugin.py``.
Importing this package loads neither torch nor Triton; the names below do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import DraftTree, VerifyOutput, argmax, sample, sample_from_logits, verify
    from .head import Head
    from .kernels.params import BatchParams, LMHead, LogitEdits, SampleOutput, Truncation
    from .kernels.rng import NOISE_ABI
    from .kernels.top_logprobs import TopLogprobs
    from .kinds import SamplingPath
    from .logprobs import LogprobOutput, Logprobs, WantedLogprobs
    from .sampler import Sampler, SamplingParams

_HOMES = {
    **dict.fromkeys(("DraftTree", "VerifyOutput", "argmax", "sample", "sample_from_logits", "verify"), ".api"),
    **dict.fromkeys(("BatchParams", "LMHead", "LogitEdits", "SampleOutput", "Truncation"), ".kernels.params"),
    **dict.fromkeys(("LogprobOutput", "Logprobs", "WantedLogprobs"), ".logprobs"),
    **dict.fromkeys(("Sampler", "SamplingParams"), ".sampler"),
    **{"Head": ".head", "NOISE_ABI": ".kernels.rng", "SamplingPath": ".kinds"},
    "TopLogprobs": ".kernels.top_logprobs",
}

__all__ = [
    "NOISE_ABI",
    "BatchParams",
    "DraftTree",
    "Head",
    "LMHead",
    "LogitEdits",
    "LogprobOutput",
    "Logprobs",
    "SampleOutput",
    "Sampler",
    "SamplingParams",
    "SamplingPath",
    "TopLogprobs",
    "Truncation",
    "VerifyOutput",
    "WantedLogprobs",
    "__version__",
    "argmax",
    "sample",
    "sample_from_logits",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
