"""Answers of a real SGLang server whose LM head is in float8_e4m3fn, against those of the dequantised weights.

On a CPU, SGLang's own logits of such a head are those of ``lab/cpu_platform.py``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import CUDA, INTERPRETED, TWO_RANKS, draw, needs_sglang, paths, server_of, version_path

from sgl_flashsample.kernels.reference import dequantize_ref
from sgl_flashsample.sglang.versions import drops_head_scales, sglang_version
from sgl_flashsample.tools import markov
from sgl_flashsample.tools.server import Server

pytestmark = [needs_sglang, pytest.mark.server, *([pytest.mark.gpu] if CUDA else [])]


@pytest.fixture(scope="module")
def loads_scales() -> None:
    if drops_head_scales(sglang_version()):
        pytest.skip(f"SGLang {sglang_version()} drops the scales of such a head")


SIZE = dataclasses.replace(markov.SIZES["small" if CUDA else "tiny"], dtype="bfloat16")
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["re:.*layers.*"],
    "config_groups": {
        "group_0": {
            "targets": ["re:.*lm_head"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                **{"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
            },
        }
    },
}
LOGPROB_ERROR = 2e-2 if CUDA else 2e-5  # on a GPU, logits may round to other bfloat16 numbers


def write(folder: Path, seed: int, size: markov.Size = SIZE) -> markov.MarkovModel:
    """Write a checkpoint with a quantised head; return the truth, whose logits are not rounded."""
    model = markov.write(folder, size, seed)
    file, config = folder / "model.safetensors", markov.config(size) | {"quantization_config": QUANTISATION}
    exact, tensors = model.head.float(), load_file(file)
    scale = exact.abs().amax(1, keepdim=True) / 448
    weight = (exact / scale).to(torch.float8_e4m3fn)
    save_file(tensors | {"lm_head.weight": weight, "lm_head.weight_scale": scale}, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return markov.MarkovModel(size, model.embedding, dequantize_ref(weight, scale[:, 0]))


class Served(NamedTuple):
    """truth and other: of the checkpoint that is served, and of the one at ``update``."""

    server: Server
    truth: markov.MarkovModel
    other: markov.MarkovModel
    update: Path


@pytest.fixture(scope="module", params=[None, *([] if CUDA else [pytest.param("0.5.23", marks=pytest.mark.full)])])
def served(request, tmp_path_factory, loads_scales):
    folder, version = tmp_path_factory.mktemp("quantised"), request.param
    truth, other = write(folder / "model", 0), write(folder / "other", 1)
    path = version_path(version) if version else None
    with server_of(folder / "model", "bfloat16", name="quantised", first_on_path=path) as server:
        yield Served(server, truth, other, folder / "other")


def dtype_of(truth: markov.MarkovModel) -> torch.dtype:
    """That of the hidden states and of the logits."""
    return getattr(torch, truth.size.dtype)


def assert_greedy(server: Server, truth: markov.MarkovModel) -> None:
    """Greedy tokens are the likeliest ones of the dequantised weights, but for near ties of rounded logits."""
    pairs = torch.tensor(draw(server, 160, 16, {"temperature": 0}))
    logits = truth.logits(pairs[:, 0])
    (best, second), likeliest = (found.T for found in logits.topk(2))
    room = 2 * torch.finfo(dtype_of(truth)).eps * best.abs()
    certain = best - second > room
    assert certain.float().mean() > 0.3
    assert torch.equal(pairs[certain, 1], likeliest[0][certain])
    assert (best - logits.gather(1, pairs[:, 1:])[:, 0] <= room).all()


def logprobs_of(truth: markov.MarkovModel, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """The logprob of each token after the one before it, from rounded logits."""
    ids = torch.tensor(tokens)
    logits = truth.logits(ids[:-1]).to(dtype_of(truth)).double() / temperature
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()


def assert_logprobs(server: Server, truth: markov.MarkovModel) -> None:
    """Another scale of a row gives other logprobs, though the likeliest token may stay."""
    params = {"temperature": 0.8, "sampling_seed": 5, "max_new_tokens": 30, "ignore_eos": True}
    answer = server.generate(input_ids=[300], sampling_params=params, return_logprob=True)
    assert set(paths(answer)) == {"fused"}
    got = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(logprobs_of(truth, [300, *answer["output_ids"]], 0.8), abs=LOGPROB_ERROR)


def test_the_line_at_the_start_names_the_head_and_its_arithmetic(served):
    (line,) = served.server.log_lines("fused sampling active")
    size = f"LM head {SIZE.vocab_size} x {SIZE.hidden_size} float8_e4m3fn with scales"
    assert f"{size} (W8A16: hidden states are not quantised; " in line


def test_greedy_tokens_are_those_of_the_dequantised_weights(served):
    assert_greedy(served.server, served.truth)


def test_logprobs_are_those_of_the_dequantised_weights(served):
    assert_logprobs(served.server, served.truth)


def test_native_rows_and_logprobs_of_prompts_are_sglangs(served):
    prompt, greedy = [300, 77, 5, 411], {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    answer = served.server.generate(input_ids=prompt, sampling_params=greedy, return_logprob=True, logprob_start_len=0)
    assert paths(answer) == ["native:input_logprobs", "fused", "fused", "fused"]
    got = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    assert got == pytest.approx(logprobs_of(served.truth, prompt), abs=max(LOGPROB_ERROR, 1e-3))
    masked, fused = served.server.generate(
        input_ids=[[300], [300]],
        sampling_params=[greedy | {"temperature": 1.0, "top_k": 3}, greedy],
        return_sampling_mask=[True, False],
    )
    assert (set(paths(masked)), set(paths(fused))) == ({"native:sampling_mask"}, {"fused"})
    tokens = [300, *masked["output_ids"]]
    likeliest = served.truth.logits(torch.tensor(tokens[:-1])).bfloat16().topk(3).values[:, -1]
    drawn = served.truth.logits(torch.tensor(tokens[:-1])).bfloat16().gather(1, torch.tensor(tokens[1:])[:, None])
    assert (drawn[:, 0] >= likeliest).all()


def test_answers_follow_new_weights_and_scales(served):
    """Each of these updates makes new Parameters of weight and scale. The end of a session transposes them, SGLang's
    own logits fail then; an update from disk transposes them back."""
    for path in ("/begin_weight_update", "/end_weight_update"):
        served.server.post("/flush_cache?timeout=60")
        assert served.server.post(path, **({"selector": "all"} if "begin" in path else {}))["success"]
        assert_greedy(served.server, served.truth)
        assert_logprobs(served.server, served.truth)
    served.server.post("/flush_cache?timeout=60")
    assert served.server.post("/update_weights_from_disk", model_path=str(served.update))["success"]
    assert_greedy(served.server, served.other)
    assert_logprobs(served.server, served.other)
    assert not served.server.log_lines("until restart") and "Traceback" not in served.server.log_text()


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.skipif(CUDA and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_draw_from_their_parts_of_the_head(tmp_path, loads_scales):
    size = dataclasses.replace(SIZE, dtype="float16")  # bfloat16 is wrong in Triton's interpreter
    truth = write(tmp_path / "model", 0, size)
    options = {"arguments": ["--tp-size", "2"], "environment": TWO_RANKS | INTERPRETED}
    with server_of(tmp_path / "model", size.dtype, name="ranks", **options) as server:
        lines = server.log_lines("fused sampling active")
        assert len(lines) == 2 and all("float8_e4m3fn with scales" in line and "of 2 ranks" in line for line in lines)
        assert_greedy(server, truth)
        assert_logprobs(server, truth)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.skipif(CUDA, reason="the GPU machine has one SGLang")
def test_an_sglang_that_drops_the_scales_says_so_once(tmp_path):
    write(tmp_path / "model", 0)
    path = version_path("0.5.17")
    with server_of(tmp_path / "model", "bfloat16", name="dropped", first_on_path=path) as server:
        assert len(server.log_lines("SGLang 0.5.17 drops its scales")) == 1
