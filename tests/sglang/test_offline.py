"""``sgl.Engine`` in a program, and the parsers of programs that take SGLang's arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lab import cpu_platform
from serving import CUDA, needs_sglang

from sgl_flashsample.tools import markov

pytestmark = [needs_sglang, pytest.mark.full]


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **({} if CUDA else cpu_platform.environment(folder / "cpu"))}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment | variables
    )


def run_engine(
    folder: Path, size: markov.Size, options: dict[str, object], **variables: str
) -> subprocess.CompletedProcess:
    """``offline_engine.py`` with the checkpoints ``one`` and ``two`` of the folder."""
    options = {"dtype": size.dtype, "random_seed": 7, "log_level": "error"} | options
    if CUDA:
        options |= {
            "mem_fraction_static": 0.2,
            "max_total_tokens": 8192,
            "cuda_graph_max_bs_decode": 8,
            "enable_memory_saver": True,
        }
        options["attention_backend"] = "triton"  # FlashAttention is not in every installation
    else:
        options |= {"device": "cpu", "mem_fraction_static": 0.9, "max_total_tokens": 4096, "max_running_requests": 8}
    arguments = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    script = str(Path(__file__).with_name("offline_engine.py"))
    variables |= {"FLASHSAMPLE_REPORT_PATH": "1", "FLASHSAMPLE_REQUIRE": "1"}
    return run(folder, script, str(folder / "one"), str(folder / "two"), *arguments, **variables)


@pytest.mark.server
@pytest.mark.full
def test_an_engine_that_must_fuse_does_not_start_where_sglang_replaces_its_backend(tmp_path):
    """On a CPU SGLang always does, unless our platform keeps it from that."""
    size = markov.SIZES["small" if CUDA else "tiny"]
    markov.write(tmp_path / "one", size, 0)
    options = {"enable_deterministic_inference": True} if CUDA else {}
    done = run_engine(tmp_path, size, options, SGLANG_PLUGINS="flashsample")
    reason = "FLASHSAMPLE_REQUIRE is on and SGLang uses the sampling backend pytorch instead of flashsample"
    assert done.returncode != 0 and f"flashsample: the server does not start, because {reason}" in done.stderr


@pytest.mark.server
@pytest.mark.full
def test_an_engine_draws_with_the_fused_pass_through_updates_of_its_weights(tmp_path):
    size = markov.SIZES["small" if CUDA else "tiny"]
    first, second = (markov.write(tmp_path / name, size, seed) for seed, name in enumerate(("one", "two")))
    done = run_engine(tmp_path, size, {})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["active"] and result["heads"] == 1

    def greedy(embedding: markov.MarkovModel, head: markov.MarkovModel) -> list[list[int]]:
        model = markov.MarkovModel(size, embedding.embedding, head.head)
        rows = []
        for token in range(300, 304):
            row = []
            for _ in range(8):
                token = int(np.argmax(model.logits(torch.tensor([token]))[0].numpy()))
                row.append(token)
            rows.append(row)
        return rows

    assert result["before"][:4] == greedy(first, first)
    assert result["other"][:4] == greedy(first, second) != result["before"][:4]
    assert result["again"] == result["before"], "seeded rows too"
    assert result.get("resumed", result["before"]) == result["before"]


PARSE = """
import argparse, contextlib
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

def parse():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path", "m", "--sampling-backend", "flashsample"]).sampling_backend

with contextlib.suppress(SystemExit):
    print(parse())
load_plugins()
print("with plugins:", parse())
"""


def test_a_program_that_adds_sglangs_arguments_to_its_own_parser_has_to_load_the_plugins_first(tmp_path):
    """As slime does."""
    done = run(tmp_path, "-c", PARSE)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if "flashsample" in line] == ["with plugins: flashsample"]
    assert "argument --sampling-backend: invalid choice: 'flashsample'" in done.stderr
