"""A sampling backend that draws nothing: the GEMM of the LM head, then token 0 for every row. What a server with it
takes per token is what no sampler can beat.

``serve.py`` puts ``install(folder)`` on the path of its servers: SGLang finds the backend as it finds any plugin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

BACKEND = "oracle"


def register() -> None:
    """Add the backend. Called by SGLang in each of its processes."""
    from sglang.srt.layers.sampler import register_sampler_backend

    register_sampler_backend(BACKEND, make_sampler)


def make_sampler() -> Any:
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.sampler import Sampler

    def compute_logits(processor: Any, hidden_states: torch.Tensor, lm_head: Any, *args: Any, **kwargs: Any) -> Any:
        """The GEMM alone: no gather, no float32."""
        return processor._compute_lm_head(hidden_states, lm_head, None)

    class Oracle(Sampler):
        def forward(self, logits_output: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            logits = logits_output.next_token_logits
            return torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)

    LogitsProcessor._get_logits = compute_logits
    return Oracle()


def install(folder: Path, file: Path = Path(__file__)) -> Path:
    """A folder for PYTHONPATH with ``file``, which has a ``register``, as an installed package."""
    name = file.stem
    (folder / file.name).write_text(file.read_text())
    about = folder / f"flashsample_{name}-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashsample-{name.replace('_', '-')}\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    return folder
