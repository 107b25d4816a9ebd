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
from lab.servers import pretended_environment
from serving import CUDA, needs_sglang

from sgl_flashsample.tools import markov

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = [needs_sglang, pytest.mark.full]


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **({} if CUDA else pretended_environment(folder / "cpu"))}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment | variables
    )


def run_engine(
    folder: Path, size: markov.Size, options: dict[str, object], **variables: str
) -> subprocess.CompletedProcess:
    """``examples/offline_engine.py`` with the checkpoints ``one`` and ``two`` of the folder."""
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
    script = str(EXAMPLES / "offline_engine.py")
    variables |= {"FLASHSAMPLE_REPORT_PATH": "1", "FLASHSAMPLE_REQUIRE": "1"}
    return run(folder, script, str(folder / "one"), str(folder / "two"), *arguments, **variables)


@pytest.mark.server
@pytest.mark.full
def test_an_engine_that_must_fuse_does_not_start_where_sglang_replaces_its_backend(tmp_path):
    """On a CPU SGLang always does, unless our platform keeps it from that."""
    size = markov.SIZES["small" if CUDA else "tiny"]
    markov.write(tmp_path / "one", size, 0)
    options = {"rl_on_policy_target": "fsdp"} if CUDA else {}
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
    assert (result["active"], result["heads"], result["paths"]) == (True, 1, ["fused"])

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
import argparse, contextlib, json, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

class Prefixed(argparse.ArgumentParser):
    def add_argument(self, *flags, **options):
        if "dest" in options:
            options["dest"] = "sglang_" + options["dest"]
        return super().add_argument(*("--sglang-" + flag.lstrip("-") for flag in flags), **options)

def parse():
    parser = Prefixed(add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--sglang-model-path", "m", *sys.argv[1:]]).sglang_sampling_backend

"""
WITHOUT_PLUGINS = """
with contextlib.suppress(SystemExit):
    print(parse())
load_plugins()
print("with plugins:", parse())
"""
SLIME_ARGUMENTS = 'source "$1"; printf "%s\\n" "${SGLANG_ARGS[@]}"'


@pytest.fixture
def slime_arguments() -> list[str]:
    command = ["bash", "-eu", "-c", SLIME_ARGUMENTS, "bash", EXAMPLES / "rl" / "slime.sh"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_slimes_parser_knows_the_backend_once_the_plugins_are_loaded(tmp_path, slime_arguments):
    """slime adds SGLang's arguments to its own parser, each with a prefix."""
    done = run(tmp_path, "-c", PARSE + WITHOUT_PLUGINS, *slime_arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if "flashsample" in line] == ["with plugins: flashsample"]
    assert "argument --sglang-sampling-backend: invalid choice: 'flashsample'" in done.stderr


def test_the_example_of_slime_loads_the_plugins_before_it_parses(tmp_path, monkeypatch, slime_arguments):
    (tmp_path / "train.py").write_text(PARSE + 'print("parsed:", parse() if __name__ == "__main__" else None)')
    monkeypatch.chdir(tmp_path)
    done = run(tmp_path, str(EXAMPLES / "rl" / "slime_train.py"), *slime_arguments)
    assert done.returncode == 0 and "parsed: flashsample" in done.stdout.splitlines(), done.stderr[-3000:]


COMPOSE = """
import json, sys
import hydra
from omegaconf import OmegaConf

with hydra.initialize_config_dir(sys.argv[1], version_base=None):
    rollout = hydra.compose("ppo_trainer", overrides=sys.argv[2:]).actor_rollout_ref.rollout
print(json.dumps({"name": rollout.name, "engine": OmegaConf.to_container(rollout.engine_kwargs)["sglang"]}))
"""


def test_verl_hands_the_backend_of_the_example_to_sglang(tmp_path):
    folder = Path(sys.prefix) / "programs" / "verl"
    if not folder.is_dir():
        pytest.skip(f"verl is not in {folder}")
    (tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRAIN": "train.parquet", "TEST": "test.parquet"}
    command = [EXAMPLES / "rl" / "verl_grpo.sh", "trainer.total_epochs=2"]
    module, name, *overrides = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert (module, name, overrides[-1]) == ("-m", "verl.trainer.main_ppo", "trainer.total_epochs=2")
    settings = str(folder / "verl" / "trainer" / "config")
    composed = run(tmp_path, "-c", COMPOSE, settings, *overrides, PYTHONPATH=str(folder))
    assert composed.returncode == 0, composed.stderr[-3000:]
    got = json.loads(composed.stdout.splitlines()[-1])
    assert got == {"name": "sglang", "engine": {"sampling_backend": "flashsample"}}
