"""SGLang servers on this machine: on its GPU, else on the pretended platform of ``cpu_platform.py``; and a pretended
server for dry runs of benchmarks."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sgl_flashsample.tools.server import Server

from . import cpu_platform, fork_server

# Modules of the models whose checkpoints tests and dry runs write (tools/markov.py, drafters.py) or load.
MODELS = {"granite", "llama", "llama_eagle", "llama_eagle3", "mimo", "mimo_mtp", "qwen3", "qwen3_moe"}


def other_models() -> str:
    """SGLang's other models, for its variable of models to leave out: a server would import each of 240 modules. Also
    those of the releases beside the installed one."""
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations
    releases = [Path(folder), *Path(sys.prefix, "sglang-versions").glob("*/sglang")]
    files = [file for release in releases for file in release.glob("srt/models/*.py")]
    return ",".join(sorted({file.stem for file in files} - MODELS))


def pretended_environment(folder: Path) -> dict[str, str]:
    """Environment variables of a server without a GPU that serves one of ``MODELS``: of ``cpu_platform.py``."""
    return cpu_platform.environment(folder) | {"SGLANG_DISABLED_MODEL_ARCHS": other_models()}


def server_on_this_machine(
    model: Path | str,
    arguments: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    kind: type[Server] = Server,
    **options: Any,
) -> Server:
    """A server of this kind, not started. Arguments and options: of ``Server.on_this_machine``."""
    if torch.cuda.is_available():
        return kind.on_this_machine(model, arguments, log=log, environment={**(environment or {})}, **options)
    environment = {**pretended_environment(log.parent / "cpu"), **(environment or {})}
    server = kind.on_this_machine(model, arguments, log=log, environment=environment, **options)
    server.popen = fork_server.popen
    server.patience = 0.0  # it holds nothing that another one waits for, and SGLang takes seconds to end
    return server


class PretendedServer:
    """A server for a dry run, which answers at once. capacity: tokens of its KV cache."""

    metrics_seconds = 0.0

    def __init__(self, log: Path, capacity: int) -> None:
        self.log, self.capacity, self.steps = log, capacity, 0

    start = wait_until_ready = stop = lambda self: None

    def log_text(self) -> str:
        return f"max_total_num_tokens={self.capacity}"

    def generate(self, *, input_ids: list, sampling_params: Any, **fields: Any) -> list[dict[str, Any]]:
        params = sampling_params if isinstance(sampling_params, dict) else sampling_params[0]
        self.steps += params["max_new_tokens"]
        time.sleep(2e-5 * params["max_new_tokens"])
        answer: dict[str, Any] = {"output_ids": [0] * params["max_new_tokens"]}
        if fields.get("return_logprob"):
            answer["meta_info"] = {"output_token_logprobs": [[-1.5, 0, None]] * params["max_new_tokens"]}
        return [answer for _ in input_ids]

    def ask(self, path: str, data: bytes) -> bytes:
        return json.dumps(self.generate(**json.loads(data))).encode()

    def stream(self, *, sampling_params: dict[str, Any], **fields: Any) -> Iterator[bytes]:
        for tokens in range(sampling_params["max_new_tokens"]):
            time.sleep(2e-5)
            yield json.dumps({"output_ids": [0] * (tokens + 1)}).encode()

    def get(self, path: str) -> dict[str, Any]:
        return {"internal_states": [{"flashsample": {"active": True}}]}

    def metrics(self) -> str:
        rows = f'sglang:flashsample_rows_total{{path="fused",reason=""}} {self.steps}\n'
        seconds = f"sglang:flashsample_host_seconds_sum {self.steps * 40e-6}\n"
        return f"{rows}sglang:flashsample_host_seconds_count {self.steps}\n{seconds}"
