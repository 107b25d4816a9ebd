"""Real SGLang servers for the tests: on the GPU where there is one, else on the CPU, with rows drawn in host memory."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab.servers import server_on_this_machine

from sgl_flashsample.tools import markov
from sgl_flashsample.tools.server import SGLANG_LAUNCH_SERVER, Server

CUDA = torch.cuda.is_available()
VERSIONS_FOLDER = Path(sys.prefix) / "sglang-versions"  # other releases, from `make test-full`

# Environments of servers. INTERPRETED: of kernels, where there is no GPU. Other tests may use one of two GPUs more.
INTERPRETED = {} if CUDA else {"TRITON_INTERPRET": "1"}
TWO_RANKS = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"} if CUDA else {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")


def version_path(version: str) -> Path:
    """The folder of another SGLang release; skips the test where `make test-full` has not fetched it."""
    folder = VERSIONS_FOLDER / version
    if not folder.is_dir():
        pytest.skip(f"SGLang {version} is not in {VERSIONS_FOLDER}")
    return folder


def server_of(
    model: Path,
    dtype: str,
    *,
    name: str,
    backend: str | None = "flashsample",
    arguments: list[str] | None = None,
    environment: dict[str, str] | None = None,
    first_on_path: Path | None = None,
    launcher: Sequence[str] = SGLANG_LAUNCH_SERVER,
) -> Server:
    """A server (not started) of a checkpoint."""
    if CUDA and backend is None:
        backend = "flashinfer"
    log = model.parent / f"{name}.log"
    variables = {"FLASHSAMPLE_REPORT_PATH": "1", "FLASHSAMPLE_LOG_SECONDS": "0", **(environment or {})}
    server = server_on_this_machine(
        model,
        ["--dtype", dtype, "--random-seed", "1234", *(arguments or [])],
        gpu_arguments=[
            *("--mem-fraction-static", "0.2", "--attention-backend", "triton", "--disable-prefill-cuda-graph"),
            *("--cuda-graph-max-bs-decode", "128", "--disable-flashinfer-autotune", "--max-total-tokens", "65536"),
        ],
        backend=backend,
        log=log,
        launcher=launcher,
        environment=variables,
    )
    if first_on_path is not None:
        server.environment["PYTHONPATH"] = f"{first_on_path}:{server.environment.get('PYTHONPATH', '')}"
    return server


def make_server(folder: Path, size_name: str, *, name: str, **options: Any) -> tuple[Server, markov.MarkovModel]:
    """A server (not started) of a Markov checkpoint, and the checkpoint's truth. options: of ``server_of``."""
    size = markov.SIZES[size_name]
    truth = markov.write(folder / size_name, size)
    return server_of(folder / size_name, size.dtype, name=name, **options), truth


def paths(answer: dict) -> list[str]:
    """The path of each token of an answer."""
    return answer["meta_info"]["flashsample_path"]


def transitions(prompts: list[int], answers: list[dict]) -> np.ndarray:
    """``[N, 2]``: each answered token with the token before it."""
    pairs = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [prompt, *answer["output_ids"]]
        pairs += itertools.pairwise(tokens)
    return np.array(pairs)


def draw(server: Server, tokens: int, batch: int, params: dict, first: int = 300) -> np.ndarray:
    """Transitions of at least ``tokens`` tokens, from ``batch`` concurrent requests."""
    prompts = [first + i for i in range(batch)]
    each = -(-tokens // batch)
    answers = server.generate(
        input_ids=[[prompt] for prompt in prompts],
        sampling_params={"max_new_tokens": each, "ignore_eos": True, **params},
    )
    return transitions(prompts, answers)
