"""What a real SGLang server answers over HTTP with the backend on, against stock SGLang and against the truth.

The checkpoint is a Markov chain (sgl_flashsample/tools/markov.py): its next-token distribution is known. One pair of
servers runs without ``--full``; all others with it.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import math
import random
import re
import runpy
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from serving import CUDA, INTERPRETED, TWO_RANKS, draw, make_server, needs_sglang, paths, transitions, version_path
from stats import g_test, power
from torch.utils._pytree import tree_flatten
from tuned_tables import table_for_this_machine

from sgl_flashsample.hot_vocab import HotVocab
from sgl_flashsample.kernels.params import LMHead
from sgl_flashsample.kernels.reference import allowed_ref
from sgl_flashsample.sglang.versions import sglang_version
from sgl_flashsample.tools import markov
from sgl_flashsample.tools.server import Server, ServerError, stop_all

pytestmark = [needs_sglang, pytest.mark.server, *([pytest.mark.gpu] if CUDA else [])]

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
SIZE = "small" if CUDA else "tiny"
ARGUMENTS = ["--enable-metrics", "--enable-custom-logit-processor", "--enable-return-hidden-states"]
STRUCTURAL_TAG = json.dumps(
    {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
        "triggers": ["<a>"],
    }
)
JSON_SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
LOGIT_BIAS = {"500": 4.0, "77": 1.0, "78": -100.0}
ABORTS = 25
TOGETHER_PROMPT = [5, 300, 77]  # of requests that decode side by side
TOP_LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3}

# Every sampling feature of SGLang, with the path that must serve it (None: several). Deterministic requests and those
# that SGLang's sampler draws are compared with stock token for token, so no request before them may draw in one server
# only. Where this SGLang refuses a request, both must refuse it.
COMPARED = {
    "greedy": ({"temperature": 0}, {}, "fused"),
    # SGLang's sampler draws these: first, while both servers' generators are where they started.
    "custom logit processor": (
        {"temperature": 1.0, "custom_params": {"token_ids": [253, 708]}},
        {"custom_logit_processor": "disallow tokens"},
        "native:custom_logit_processor",
    ),
    "sampling mask": ({"temperature": 1.0, "top_k": 5}, {"return_sampling_mask": True}, "native:sampling_mask"),
    "top_k 1": ({"temperature": 1.3, "top_k": 1}, {}, "fused"),
    "greedy with stop token": ({"temperature": 0, "stop_token_ids": [1]}, {}, "fused"),
    "greedy with logprob": ({"temperature": 0}, {"return_logprob": True}, "fused"),
    "greedy with top logprobs": ({"temperature": 0}, TOP_LOGPROBS, "fused"),
    "greedy with token ids logprobs": (
        {"temperature": 0},
        {"return_logprob": True, "token_ids_logprob": [5, 6]},
        "fused",
    ),
    "greedy with top_p": ({"temperature": 0, "top_p": 0.3, "min_p": 0.2}, {}, "fused"),
    "greedy with frequency penalty": ({"temperature": 0, "frequency_penalty": 1.5}, {}, "fused"),
    "greedy with presence penalty": ({"temperature": 0, "presence_penalty": 1.5}, {}, "fused"),
    "greedy with repetition penalty": ({"temperature": 0, "repetition_penalty": 1.4}, {}, "fused"),
    "greedy with logit bias": ({"temperature": 0, "logit_bias": LOGIT_BIAS}, {}, "fused"),
    "greedy with min_new_tokens": ({"temperature": 0, "min_new_tokens": 4}, {}, "fused"),
    "greedy with regex": ({"temperature": 0, "regex": "[a-f]+"}, {}, "fused"),
    "greedy with json schema": ({"temperature": 0, "json_schema": JSON_SCHEMA}, {}, "fused"),
    "greedy with structural tag": ({"temperature": 0, "structural_tag": STRUCTURAL_TAG}, {}, "fused"),
    "greedy with ebnf": ({"temperature": 0, "ebnf": 'root ::= "yes" | "no"'}, {}, "fused"),
    "greedy with everything": (
        {"temperature": 0, "regex": "[a-f0-9]+", "logit_bias": {"17": 2.0}, "frequency_penalty": 0.7}
        | {"presence_penalty": 0.3, "repetition_penalty": 1.2, "min_new_tokens": 3, "top_p": 0.5},
        {"return_logprob": True},
        "fused",
    ),
    "greedy with hidden states": ({"temperature": 0}, {"return_hidden_states": True}, "fused"),
    "greedy with stop regex": ({"temperature": 0, "stop_regex": "w7.*"}, {}, "fused"),
    "input logprobs": ({"temperature": 0}, {"return_logprob": True, "logprob_start_len": 0}, "fused"),
    "input logprobs, top and of ids": (
        {"temperature": 0},
        TOP_LOGPROBS | {"logprob_start_len": 1, "token_ids_logprob": [5, 6, 5]},
        "fused",
    ),
    "input logprobs and no token": (
        {"max_new_tokens": 0},
        TOP_LOGPROBS | {"logprob_start_len": 0, "token_ids_logprob": [7]},
        None,
    ),
    # Drawn here from our noise, in stock from the generator that the ones above draw from.
    "a truncation to one token": ({"temperature": 1.0, "top_p": 1e-6}, {"return_logprob": True}, "fused"),
    "min_p of one": ({"temperature": 1.0, "min_p": 1.0}, {}, "fused"),
    # Its steps draw tokens that nobody uses.
    "beam search": ({"temperature": 0, "beam_width": 2}, {}, None),
}
# Requests that the fused pass draws with its own noise: not stock's tokens, the same distribution.
FUSED = {
    "temperature": ({"temperature": 1.0}, {}),
    "top_p": ({"temperature": 1.0, "top_p": 0.8}, {}),
    "top_k": ({"temperature": 1.0, "top_k": 7}, {}),
    "top_k and top_p": ({"temperature": 0.7, "top_p": 0.9, "top_k": 50}, {"return_logprob": True}),
    "min_p": ({"temperature": 1.0, "min_p": 0.05}, {}),
    "top_k, top_p and min_p": ({"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05}, {}),
    "presence penalty": ({"temperature": 1.0, "presence_penalty": 1.0}, {}),
    "logit bias": ({"temperature": 1.0, "logit_bias": LOGIT_BIAS}, {}),
    "min_new_tokens": ({"temperature": 1.0, "min_new_tokens": 4}, {}),
    "regex": ({"temperature": 1.0, "regex": "[a-f]+"}, {}),
    "json schema with top_p": ({"temperature": 1.0, "json_schema": JSON_SCHEMA, "top_p": 0.9}, {}),
    "high temperature": ({"temperature": 1.9}, {}),
    "seed": ({"temperature": 1.0, "sampling_seed": 11}, {}),
    "n": ({"temperature": 1.0, "n": 3}, {}),
    "logprob": ({"temperature": 0.8}, {"return_logprob": True}),
    "stop": ({"temperature": 1.0, "stop": ["z"]}, {}),
    "hidden stop ids": ({"temperature": 1.0, "stop_token_ids": [5, 6]}, {}),
}


def ask(server: Server, params: dict, fields: dict | None = None):
    request = {"input_ids": [5, 300, 77], "sampling_params": {"max_new_tokens": 10, **params}}
    return server.generate(**request, **(fields or {}))


def ask_or_refused(server: Server, params: dict, fields: dict | None = None):
    """The answer, or what the server said when it refused the request."""
    try:
        return ask(server, params, fields)
    except ServerError as error:
        return str(error)


def ask_together(server: Server, rows: list[tuple[dict, dict]]) -> list[dict]:
    """The answers to requests that decode side by side. rows: sampling parameters and fields of each."""
    return server.generate(
        input_ids=[TOGETHER_PROMPT] * len(rows),
        sampling_params=[{"max_new_tokens": 12, "ignore_eos": True, **params} for params, _ in rows],
        return_logprob=[fields.get("return_logprob", False) for _, fields in rows],
        top_logprobs_num=[fields.get("top_logprobs_num", 0) for _, fields in rows],
        custom_logit_processor=[fields.get("custom_logit_processor") for _, fields in rows],
    )


def assert_same_until_a_tie(ours: list[int], stock: list[int], truth: markov.MarkovModel, prompt: list[int]) -> None:
    """The first tokens that differ have equal logits, and neither a penalty. Equal logits are common in a bfloat16
    model, and a sampler may take any of them."""
    differ = (place for place, (token, other) in enumerate(zip(ours, stock, strict=True)) if token != other)
    if (place := next(differ, None)) is None:
        return
    before, pair = [*prompt, *ours[:place]], [ours[place], stock[place]]
    assert not {*before}.intersection(pair)
    assert truth.logits(torch.tensor(before[-1:]))[0, pair].unique().numel() == 1


def seeded_rows() -> list[tuple[dict, dict]]:
    """Rows that draw the same wherever the pass runs: each kind of ``FUSED`` with a seed, and logprobs."""
    seeded = [params | {"sampling_seed": place, "ignore_eos": True} for place, (params, _) in enumerate(FUSED.values())]
    rows = [({key: value for key, value in params.items() if key != "n"}, {}) for params in seeded]
    rows += [({"temperature": 1.0, "sampling_seed": 3}, {"return_logprob": True}), ({"temperature": 0}, TOP_LOGPROBS)]
    return rows


def assert_same_answers(
    answers: list[dict], others: list[dict], *, with_paths: bool = True, logprob_error: float = 1e-3
) -> None:
    """The same tokens and paths, and logprobs as near as ``logprob_error``."""
    for got, want in zip(answers, others, strict=True):
        assert got["output_ids"] == want["output_ids"]
        assert not with_paths or paths(got) == paths(want)
        logprobs = (answer["meta_info"].get("output_token_logprobs", []) for answer in (got, want))
        for one, other in zip(*logprobs, strict=True):
            assert one[0] == pytest.approx(other[0], abs=logprob_error)


def assert_same_logprobs_of_prompts(answer: dict, other: dict) -> None:
    """The same lists, with values within 1e-3."""
    got, want = (
        {name: value for name, value in one["meta_info"].items() if name.startswith("input_") and "logprobs" in name}
        for one in (answer, other)
    )
    assert got.keys() == want.keys()
    (mine, shape), (theirs, expected) = tree_flatten(got), tree_flatten(want)
    assert shape == expected
    for one, two in zip(mine, theirs, strict=True):
        assert one == (pytest.approx(two, abs=1e-3) if isinstance(two, float) else two)


def all_paths(answers: list[dict]) -> set[str]:
    return {path for answer in answers for path in paths(answer)}


def assert_greedy(server: Server, truth: markov.MarkovModel, tokens: int = 160, batch: int = 16) -> None:
    """The server's greedy tokens are the likeliest ones."""
    pairs = draw(server, tokens, batch, {"temperature": 0})
    assert np.array_equal(pairs[:, 1], truth.logits(torch.tensor(pairs[:, 0])).argmax(-1).numpy())


def assert_no_failure(server: Server) -> None:
    """SGLang itself logs tracebacks for some requests that it refuses."""
    assert not [line for line in server.log_lines('File "') if "sgl_flashsample" in line]
    assert not server.log_lines("Scheduler hit an exception")
    assert not server.log_lines("until restart") and not server.log_lines("for 5 minutes")


def rank_table(pairs, truth, temperature=1.0, bins=64, allowed=None):
    """Counts of the drawn tokens by their rank in their context's distribution, and the expected shares at
    ``temperature``; ranks from ``bins`` - 1 on are one bin. One test for many contexts: the order of the tokens is
    the same at every temperature, their shares are not. allowed: from ``[N, V]`` logits, the tokens that a truncation
    leaves."""
    states, state = np.unique(truth.representative(torch.tensor(pairs[:, 0])), return_inverse=True)
    logits = truth.logits(torch.tensor(states)).double()
    if allowed is not None:
        allowed_ids = allowed(logits)
        assert allowed_ids.numpy()[state, pairs[:, 1]].all(), "a token that is not allowed"
        logits = logits.masked_fill(~allowed_ids, -math.inf)
    table = torch.softmax(logits / temperature, -1).numpy()
    order = np.argsort(-table, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)[state, pairs[:, 1]]
    ordered = np.take_along_axis(table, order, axis=1)
    expected = np.concatenate([ordered[:, : bins - 1], ordered[:, bins - 1 :].sum(1, keepdims=True)], axis=1)
    return np.bincount(np.minimum(rank, bins - 1), minlength=bins), np.bincount(state) / len(pairs) @ expected


def context_table(pairs, truth):
    """Counts of the drawn tokens per context and token, and the expected shares: every cell of the chain."""
    states, state = np.unique(truth.representative(torch.tensor(pairs[:, 0])), return_inverse=True)
    counts = np.zeros((len(states), truth.size.vocab_size))
    np.add.at(counts, (state, pairs[:, 1]), 1)
    shares = truth.distribution(torch.tensor(states)).numpy() * counts.sum(1, keepdims=True) / counts.sum()
    return counts.reshape(-1), shares.reshape(-1)


def assert_draws_of_one_id_are_independent(server: Server, truth: markov.MarkovModel, requests: int = 100) -> None:
    """Requests without a seed and with the same id, one after the other, follow the truth, and no two in a row agree
    more often than two draws do. Two independent answers of 16 tokens are equal once in a million pairs."""
    params = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
    answers = [server.generate(input_ids=[303], rid="task 12", sampling_params=params) for _ in range(requests)]
    assert len({tuple(answer["output_ids"]) for answer in answers}) == requests
    assert g_test(*rank_table(transitions([303] * requests, answers), truth)).p_value > 1e-6
    agree = sum(one["output_ids"][0] == other["output_ids"][0] for one, other in itertools.pairwise(answers))
    share = float((truth.distribution(torch.tensor([303])) ** 2).sum())
    assert share ** (requests - 1) < 1e-6 < binomtest(agree, requests - 1, share).pvalue


def disallow_tokens() -> str:
    """SGLang's own custom logit processor, as requests carry it: by its name."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    return DisallowedTokensLogitsProcessor.to_str()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def tuned(folder) -> dict[str, str]:
    """The environment of a server with a table that alternates paths over batch sizes, so that comparisons cover all
    of them."""
    size = markov.SIZES[SIZE]
    dtype, device = getattr(torch, size.dtype), "cuda" if CUDA else "cpu"
    table = table_for_this_machine(LMHead(torch.empty(size.vocab_size, size.hidden_size, dtype=dtype, device=device)))
    (folder / "tuned").mkdir()
    (folder / "tuned" / table.file_name).write_text(table.dumps())
    return {"FLASHSAMPLE_TUNED_DIR": str(folder / "tuned")}


@pytest.fixture(scope="module")
def servers(folder, tuned):
    """Our server and a stock server, and on a GPU one of ours without CUDA graphs, started together; and the answers of
    the first two to ``COMPARED``, which are their first requests."""
    ours, truth = make_server(folder, SIZE, name="ours", arguments=ARGUMENTS, environment=tuned)
    quiet = ["--sleep-on-idle"]  # else a server that waits keeps a core busy
    stock, _ = make_server(folder, SIZE, name="stock", backend=None, arguments=ARGUMENTS + quiet)
    others = {}
    if CUDA:
        others["eager"], _ = make_server(folder, SIZE, name="eager", arguments=["--disable-cuda-graph", *quiet])
    started = (ours, stock, *others.values())
    try:
        for server in started:  # at once: --max-total-tokens bounds what each takes of a GPU
            server.start()
        processor = disallow_tokens()
        for server in started:
            server.wait_until_ready()
        answers = {}
        for name, (params, fields, _) in COMPARED.items():
            if "custom_logit_processor" in fields:
                fields = {"custom_logit_processor": processor}
            answers[name] = [ask_or_refused(server, params, fields) for server in (ours, stock)]
        yield {"ours": ours, "stock": stock, "truth": truth, "answers": answers, "processor": processor, **others}
    finally:
        stop_all(started)


@pytest.fixture
def ours(servers) -> Server:
    return servers["ours"]


@pytest.fixture(scope="module")
def screened(folder):
    """Our server whose head has a screen; on a CPU its kernels are interpreted."""
    environment = {"FLASHSAMPLE_SCREEN": "on"} | INTERPRETED
    server, _ = make_server(folder, SIZE, name="screened", arguments=ARGUMENTS, environment=environment)
    with server:
        yield server


@pytest.fixture
def of_kernels(request) -> Server:
    """Our server whose rows are drawn by kernels."""
    return request.getfixturevalue("ours" if CUDA else "screened")


@pytest.fixture
def truth(servers) -> markov.MarkovModel:
    return servers["truth"]


def test_the_server_says_in_one_line_each_which_table_it_uses_and_what_is_active(ours, folder):
    (line,) = ours.log_lines("] flashsample: tuned table ")
    (path,) = (folder / "tuned").iterdir()
    assert (
        f"tuned table {path} (match of GPU, LM head and versions: exact; from: FLASHSAMPLE_TUNED_DIR): tuned " in line
    )
    assert " kernel settings for 15 batch sizes; built-in ones for 0 others" in line
    assert "measurement: plain 17-512; truncate 3-7, 17-512; edit 9-512" in line
    (active,) = ours.log_lines("] flashsample 0.")
    for word in ("with SGLang 0.5.", "fused sampling active", "LM head", "SGLang's own sampler is used for"):
        assert word in active
    text = ours.log_text()
    assert text.index(line) < text.index(active)


def test_server_info_says_that_the_fused_pass_serves_and_with_which_table(ours, folder):
    (path,) = (folder / "tuned").iterdir()
    (state,) = ours.get("/server_info")["internal_states"]
    status = state["flashsample"]
    (head,) = status["heads"]
    assert (status["active"], status["reason"], head["table"]) == (True, None, str(path))
    assert head["bytes"] > 0 and not ours.log_lines("no status in /server_info")


@pytest.mark.parametrize("name", COMPARED)
def test_greedy_and_native_answers_equal_stock_and_their_path_is_reported(servers, name):
    mine, theirs = servers["answers"][name]
    if isinstance(theirs, str):
        assert mine == theirs
        pytest.skip(f"this SGLang refuses it: {theirs[:80]}")
    assert mine["output_ids"] == theirs["output_ids"]
    assert mine["text"] == theirs["text"]
    path = COMPARED[name][2]
    if path is not None:
        assert set(paths(mine)) == {path}
    assert mine["meta_info"].get("hidden_states") == theirs["meta_info"].get("hidden_states")
    ours, stock = (a["meta_info"].get("output_token_logprobs", []) for a in (mine, theirs))
    assert len(ours) == len(stock)
    assert all(math.isclose(a[0], b[0], abs_tol=1e-3) for a, b in zip(ours, stock, strict=True))
    assert_same_logprobs_of_prompts(mine, theirs)


@pytest.mark.parametrize("name", FUSED)
def test_requests_that_the_fused_pass_draws_are_fused(ours, name):
    answers = ask(ours, *FUSED[name])
    answers = answers if isinstance(answers, list) else [answers]
    assert all_paths(answers) == {"fused"}
    assert all(1 <= len(answer["output_ids"]) <= 10 for answer in answers)


def test_greedy_tokens_are_the_truths(ours, truth):
    assert_greedy(ours, truth, 200, 40)


def test_fifty_thousand_tokens_follow_the_truth_and_a_temperature_off_by_5_percent_would_show(ours, truth):
    """alpha 1e-6; power above 0.99 against a temperature that is 5 % off."""
    pairs = draw(ours, 50_000, 250, {"temperature": 1.0})
    observed, expected = rank_table(pairs, truth)
    assert observed.sum() >= 50_000
    assert power(50_000, expected, rank_table(pairs, truth, 1.05)[1], alpha=1e-6) > 0.99
    assert g_test(observed, expected).p_value > 1e-6
    assert g_test(*context_table(pairs, truth)).p_value > 1e-6


@pytest.mark.full
def test_tokens_of_a_temperature_off_by_5_percent_do_not_follow_the_truth(ours, truth):
    off = draw(ours, 50_000, 200, {"temperature": 1.05})
    assert g_test(*rank_table(off, truth)).p_value < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_other_temperatures_follow_the_truth(ours, truth, temperature):
    pairs = draw(ours, 12_000, 120, {"temperature": temperature})
    assert g_test(*rank_table(pairs, truth, temperature)).p_value > 1e-6


TRUNCATIONS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "top_k, top_p and min_p": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.full
@pytest.mark.parametrize("name", TRUNCATIONS)
def test_truncated_tokens_are_allowed_ones_and_follow_the_truncated_truth(ours, truth, name):
    params = {"temperature": 1.0, **TRUNCATIONS[name]}
    pairs = draw(ours, *((40_000, 100) if CUDA else (160, 16)), params)

    def allowed(logits: torch.Tensor) -> torch.Tensor:
        def each(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((len(logits),), value, dtype=dtype)

        limits = each(params.get("top_k", 0), torch.int32), each(params.get("top_p", 1.0), torch.float64)
        min_p, temperature = each(params.get("min_p", 0.0), torch.float64), each(params["temperature"], torch.float32)
        return allowed_ref(logits, temperature, *limits, min_p, slack=1e-4)

    assert g_test(*rank_table(pairs, truth, params["temperature"], allowed=allowed)).p_value > 1e-6


def test_logprobs_are_those_of_the_tempered_distribution(ours, truth):
    answer = ask(ours, {"temperature": 0.8, "max_new_tokens": 30}, {"return_logprob": True})
    assert set(paths(answer)) == {"fused"}
    previous = torch.tensor([77, *answer["output_ids"][:-1]])
    tokens = torch.tensor(answer["output_ids"])
    want = truth.distribution(previous, 0.8).log().gather(1, tokens[:, None]).squeeze(1)
    got = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    assert np.allclose(got, want.numpy(), atol=1e-3 if truth.size.dtype == "float32" else 2e-2)


def test_a_seeded_request_answers_the_same_alone_and_among_63_others(ours):
    seeded = {"temperature": 1.0, "sampling_seed": 4242, "max_new_tokens": 16, "ignore_eos": True}
    alone, other = (
        ours.generate(input_ids=[300], sampling_params=seeded | {"sampling_seed": seed})["output_ids"]
        for seed in (4242, 4243)
    )
    others = [{"temperature": 0.3 + i / 50, "max_new_tokens": 16, "ignore_eos": True} for i in range(63)]
    crowd = ours.generate(input_ids=[[300]] * 64, sampling_params=[*others[:31], seeded, *others[31:]])
    assert crowd[31]["output_ids"] == alone != other


@pytest.mark.parametrize("fields", [TOP_LOGPROBS, {"return_logprob": True, "token_ids_logprob": [5, 6]}], ids=str)
def test_a_seeded_request_answers_the_same_with_logprobs_beside_those_of_its_tokens(ours, fields):
    seeded = {"temperature": 1.0, "sampling_seed": 11, "max_new_tokens": 16, "ignore_eos": True}
    alone, asking = (ours.generate(input_ids=[50, 60], sampling_params=seeded, **more) for more in ({}, fields))
    assert alone["output_ids"] == asking["output_ids"]


def test_a_seeded_request_answers_the_same_with_logprobs_of_prompts_and_beside_them(ours):
    """A prefill that returns logprobs of a prompt draws the first tokens of all its requests."""
    for seed in range(8):
        seeded = {"temperature": 1.0, "sampling_seed": seed, "max_new_tokens": 3, "ignore_eos": True}
        alone = ours.generate(input_ids=[50, 61], sampling_params=seeded)
        with_them = ours.generate(input_ids=[50, 61], sampling_params=seeded, return_logprob=True, logprob_start_len=0)
        beside, other = ours.generate(
            input_ids=[[50, 61], [70, 80, 90]],
            sampling_params=[seeded, seeded],
            return_logprob=[False, True],
            logprob_start_len=[-1, 0],
        )
        assert alone["output_ids"] == with_them["output_ids"] == beside["output_ids"]
        assert len(with_them["meta_info"]["input_token_logprobs"]) == 2
        assert len(other["meta_info"]["input_token_logprobs"]) == 3
        assert all_paths([alone, with_them, beside, other]) == {"fused"}


def test_a_grammar_that_is_complete_ends_an_answer_that_min_new_tokens_would_go_on_with(ours):
    """In stock SGLang no token is left then."""
    for temperature in (0, 1.0):
        params = {"temperature": temperature, "regex": "true|false", "min_new_tokens": 9}
        answer = ask(ours, params, {"return_logprob": True})
        assert answer["text"] in ("true", "false") and answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert answer["meta_info"]["output_token_logprobs"][-1][0] == 0.0


def test_the_samples_of_a_seeded_request_differ_and_are_the_same_again(ours):
    seeded = {"temperature": 1.0, "sampling_seed": 5, "ignore_eos": True}
    first, again = ([answer["output_ids"] for answer in ask(ours, seeded | {"n": 4})] for _ in range(2))
    assert first == again and len({tuple(tokens) for tokens in first}) == 4
    assert first[0] == ask(ours, seeded)["output_ids"]
    assert not {tuple(answer["output_ids"]) for answer in ask(ours, seeded | {"n": 4, "sampling_seed": 6})} & {
        tuple(tokens) for tokens in first
    }


def test_requests_without_a_seed_differ_from_each_other(ours):
    params = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
    answers = ours.generate(input_ids=[[303]] * 32, sampling_params=params)
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 28


def test_requests_without_a_seed_that_have_one_id_are_independent(ours, truth):
    assert_draws_of_one_id_are_independent(ours, truth)


def test_greedy_rows_beside_sampled_ones_stay_fused_and_greedy(ours, truth):
    params = [{"temperature": 0.0 if i % 2 else 1.0, "max_new_tokens": 12, "ignore_eos": True} for i in range(16)]
    answers = ours.generate(input_ids=[[300 + i] for i in range(16)], sampling_params=params)
    assert all_paths(answers) == {"fused"}
    for i in range(1, 16, 2):
        previous = torch.tensor([300 + i, *answers[i]["output_ids"][:-1]])
        assert answers[i]["output_ids"] == truth.logits(previous).argmax(-1).tolist()


def test_each_row_of_a_mixed_batch_has_its_own_path_and_stocks_answer(servers, truth):
    greedy = servers["answers"]["greedy"][1]["output_ids"]
    disallowed = {"temperature": 0, "custom_params": {"token_ids": sorted(set(greedy[:3]))}}
    rows = [
        ({"temperature": 0}, {}, "fused"),
        (disallowed, {"custom_logit_processor": servers["processor"]}, "native:custom_logit_processor"),
        ({"temperature": 1.0, "sampling_seed": 7}, {}, "fused"),
        ({"temperature": 0}, TOP_LOGPROBS, "fused"),
        ({"temperature": 0, "regex": "[a-f]+"}, {}, "fused"),
        ({"temperature": 0}, {"return_logprob": True}, "fused"),
        ({"temperature": 0, "frequency_penalty": 1.5, "repetition_penalty": 1.2}, {}, "fused"),
        ({"temperature": 0.6, "top_k": 1}, {"return_logprob": True}, "fused"),
        ({"temperature": 0}, {}, "fused"),
    ]
    mine, theirs = (ask_together(servers[name], [row[:2] for row in rows]) for name in ("ours", "stock"))
    for ours, stock, (params, fields, path) in zip(mine, theirs, rows, strict=True):
        assert set(paths(ours)) == {path}
        if params["temperature"] == 1.0:
            continue  # our noise, not stock's
        if "custom_logit_processor" in fields:
            # The best allowed tokens are equal in a bfloat16 model, and SGLang may take any of them.
            token_ids = torch.tensor([77, *ours["output_ids"]])
            logits = truth.logits(token_ids[:-1])
            logits[:, disallowed["custom_params"]["token_ids"]] = -torch.inf
            assert torch.equal(logits.gather(1, token_ids[1:, None])[:, 0], logits.amax(1))
            continue
        if "repetition_penalty" in params:
            assert_same_until_a_tie(ours["output_ids"], stock["output_ids"], truth, TOGETHER_PROMPT)
            continue
        assert ours["output_ids"] == stock["output_ids"], params
        if not fields.get("return_logprob"):
            continue
        got, want = (answer["meta_info"]["output_token_logprobs"] for answer in (ours, stock))
        assert [entry[0] for entry in got] == pytest.approx([entry[0] for entry in want], abs=1e-3)
        if "top_logprobs_num" in fields:
            got, want = (answer["meta_info"]["output_top_logprobs"] for answer in (ours, stock))
            for first, second in zip(got, want, strict=True):
                assert [entry[0] for entry in first] == pytest.approx([entry[0] for entry in second], abs=1e-3)
                # Ids whose logprobs are nearly equal may swap, and the last may be another.
                for (logprob, token_id, _), (_, other, _) in zip(first, second, strict=True):
                    close = [entry[1] for entry in second if abs(entry[0] - logprob) < 2e-3]
                    assert token_id == other or token_id in close or logprob - second[-1][0] < 2e-3
    assert mine[1]["output_ids"] != greedy and mine[6]["output_ids"] != greedy, "they were processed"


@pytest.mark.full
def test_a_seeded_request_answers_the_same_alone_and_among_64_others_with_every_feature(ours):
    seeded = {"temperature": 1.0, "sampling_seed": 4243, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.5}
    seeded["max_new_tokens"] = 6
    (alone,) = ask_together(ours, [(seeded, {})])
    others = [({key: v for key, v in params.items() if key != "n"}, {}) for params, _ in FUSED.values()]
    others += [({"temperature": 1.0}, {"return_logprob": True, "top_logprobs_num": n}) for n in (2, 129)]
    others += [({"temperature": 1.0, "top_k": 1}, {}), ({"temperature": 0, "regex": "[0-9]+"}, {})]
    others = [(params | {"max_new_tokens": 6}, fields) for params, fields in (others * 4)[:64]]
    assert len(others) == 64
    answers = ask_together(ours, [*others[:41], (seeded, {}), *others[41:]])
    assert answers[41]["output_ids"] == alone["output_ids"]
    assert all_paths(answers) == {"fused", "native:top_logprobs"}


def metric(server: Server, name: str, **labels: str) -> float:
    """The sum of a metric of ours over all processes."""
    total = 0.0
    for line in server.metrics().splitlines():
        if line.startswith(f"sglang:flashsample_{name}") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            total += float(line.split()[-1])
    return total


def test_what_was_served_is_in_the_log_and_in_the_metrics_with_its_reasons(ours):
    ask_together(ours, [({"temperature": 1.0}, {})] * 2)
    newest = ours.log_lines("] flashsample: since the start: fused ")[-1]
    for reason in ("custom_logit_processor", "sampling_mask"):
        assert f"SGLang's sampler ({reason})" in newest
        assert metric(ours, "rows_total", path="native", reason=reason) > 0
    host = r"; CPU time of fused sampling [\d.]+ us per batch over [\d,]+ batches"
    assert re.search(rf"{host}(; .* by CUDA graphs)?$", newest)
    assert metric(ours, "rows_total", path="fused", reason="") > metric(ours, "batches_total", path="fused") > 0
    assert metric(ours, "host_seconds_sum") > 0


def test_metrics_have_the_labels_of_sglangs_own(ours):
    lines = re.findall(r"^sglang:(flashsample_active|max_total_num_tokens)(\{[^}]*\})", ours.metrics(), re.M)
    labels = dict(lines)
    assert 'model_name="' in labels["flashsample_active"]
    assert labels["flashsample_active"] == labels["max_total_num_tokens"]


@pytest.mark.full
@pytest.mark.skipif(CUDA, reason="kernels draw there in any case")
def test_interpreted_kernels_give_the_tokens_of_rows_that_are_drawn_in_host_memory(servers, of_kernels):
    rows = seeded_rows()
    assert_same_answers(ask_together(of_kernels, rows), ask_together(servers["ours"], rows))
    assert_no_failure(of_kernels)


@(pytest.mark.gpu if CUDA else pytest.mark.full)  # on a CPU it needs a server of its own
def test_truncated_rows_and_those_of_them_that_were_searched_are_in_the_log_and_in_the_metrics(of_kernels):
    def read() -> list[float]:
        return [metric(of_kernels, f"{name}_rows_total") for name in ("truncated", "searched")]

    # So flat that the first tokens to arrive are hardly ever the one that is allowed.
    flat = {"temperature": 50.0, "top_p": 1e-6, "max_new_tokens": 6}
    of_kernels.generate(input_ids=[300], sampling_params=flat)  # counts of earlier searches have arrived by now
    truncated, searched = read()
    of_kernels.generate(input_ids=[300], sampling_params=flat)
    now_truncated, now_searched = read()
    assert 6 <= now_truncated - truncated <= 7, "overlap scheduling has drawn one more when it sees the last"
    assert 1 <= now_searched - searched <= 8, "the counts of its steps and of the step before"
    (logged,) = re.findall(
        r"([\d,]+) of the rows with top-k, top-p or min-p \(([\d,]+) by a search\)",
        of_kernels.log_lines("] flashsample: ")[-1],
    )
    logged = [int(number.replace(",", "")) for number in logged]
    assert 0 <= logged[0] - now_truncated <= 1 and 0 <= logged[1] - now_searched <= 1


def test_chat_completions_are_served(ours):
    asked = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
    answer = ours.post("/v1/chat/completions", **asked, temperature=1.0, max_tokens=5)
    assert answer["usage"]["completion_tokens"] >= 1


def test_bad_requests_are_refused_as_by_stock_and_the_server_goes_on(servers):
    for params in ({"temperature": -1}, {"top_p": 0}, {"logit_bias": {"99999999": 1.0}}, {"sampling_seed": "x"}):
        mine, theirs = (ask_or_refused(servers[name], params) for name in ("ours", "stock"))
        assert type(mine) is type(theirs)
        if isinstance(theirs, str):
            assert mine == theirs
    assert ask(servers["ours"], {"temperature": 1.0})["output_ids"]


def test_nothing_of_ours_has_failed(ours):
    assert_no_failure(ours)


# Other servers.

VARIANTS = {
    "tied head, mixed chunks, no overlap": (
        "tiny-llama-tied",
        ["--chunked-prefill-size", "32", "--enable-mixed-chunk", "--disable-overlap-schedule"],
        "0.5.17",
    ),
    "softcap, newest SGLang": ("tiny-softcap", ["--chunked-prefill-size", "32"], "0.5.23"),
    "logit scale": ("tiny-granite", ["--disable-radix-cache"], None),
    "mixture of experts": ("tiny-moe", [], None),
}


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.skipif(CUDA, reason="the GPU machine has one SGLang; the variants run on the CPU")
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_heads_schedules_and_sglang_versions_follow_the_truth(folder, variant):
    size_name, arguments, version = VARIANTS[variant]
    server, truth = make_server(
        folder,
        size_name,
        name=size_name,
        arguments=arguments,
        first_on_path=version_path(version) if version else None,
        launcher=(str(Path(sys.executable).with_name("sglang")), "serve"),
    )
    with server:
        (active,) = server.log_lines("fused sampling active")
        assert server.get("/server_info")["internal_states"][0]["flashsample"]["active"]
        assert version is None or f"with SGLang {version}: " in active
        assert_greedy(server, truth, 100, 20)
        # Prompts longer than a chunk, so that chunks of some are in a batch with the decoding of others.
        long = [[300 + i] * 75 + [400 + i] for i in range(24)]
        params = [{"temperature": 1.0, "max_new_tokens": 2 + i, "ignore_eos": True} for i in range(24)]
        for prompt, answer in zip(long, server.generate(input_ids=long, sampling_params=params), strict=True):
            assert set(paths(answer)) == {"fused"}
            previous = torch.tensor([prompt[-1], *answer["output_ids"][:-1]])
            drawn = truth.distribution(previous).gather(1, torch.tensor(answer["output_ids"])[:, None])
            assert (drawn > 1e-9).all(), "a token that the truth all but excludes"
        pairs = draw(server, 8000, 100, {"temperature": 1.0})
        assert g_test(*rank_table(pairs, truth)).p_value > 1e-6
        assert g_test(*rank_table(draw(server, 8000, 100, {"temperature": 1.2}), truth)).p_value < 1e-6
        if truth.size.softcap is None:  # SGLang's own softcap is a Triton kernel that the interpreter cannot run
            assert set(paths(ask(server, {"temperature": 1.0, "top_p": 0.7, "max_new_tokens": 4}))) == {"fused"}
            rows = [({"temperature": 0, "frequency_penalty": 1.5}, {}), ({"temperature": 1.0}, {})]
            rows += [({"temperature": 0}, TOP_LOGPROBS)]
            mixed, alone = ask_together(server, rows), [ask_together(server, [row])[0] for row in rows]
            assert [set(paths(answer)) for answer in mixed] == [{"fused"}] * 3
            assert [mixed[row]["output_ids"] for row in (0, 2)] == [alone[row]["output_ids"] for row in (0, 2)]
        assert "Traceback" not in server.log_text()


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.skipif(CUDA, reason="runs on the CPU")
def test_what_cannot_be_fused_is_said_in_one_line_and_served_by_sglang(folder):
    reason = "SGLang 9.9.9 is not among the known versions 0.5.17 to 0.5.23"
    pretended = folder / "pretended" / "sglang-9.9.9.dist-info"
    pretended.mkdir(parents=True, exist_ok=True)
    (pretended / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    server, truth = make_server(folder, "tiny", name="an unknown SGLang", first_on_path=pretended.parent)
    with server:
        lines = {line.partition("flashsample 0.")[2] for line in server.log_lines("not active")}
        assert len(lines) == 1
        assert reason in lines.pop()
        for state in server.get("/server_info")["internal_states"]:
            assert not state["flashsample"]["active"] and reason in state["flashsample"]["reason"]
        for params in ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}):
            assert all(path.startswith("native:") for path in paths(ask(server, params)))
        assert_greedy(server, truth, 20, 5)
        assert "Traceback" not in server.log_text()


# DP attention first: pytest lets tests share a server where it has the same place in the parameters of each.
RANKS = {
    "DP attention": (
        ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head"],
        {"ranks": 1},
    ),
    "DP attention with a head over all ranks": (
        ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"],
        {"ranks": 2},
    ),
    "tensor parallelism": (["--tp-size", "2"], {"ranks": 2}),
    "pipeline parallelism": (["--pp-size", "2"], None),
}


@pytest.fixture(scope="module")
def of_two_ranks(request, folder):
    """Our server of two ranks, named in ``RANKS``: that name, and the server."""
    name = request.param
    environment = TWO_RANKS | ({"FLASHSAMPLE_SEVERAL_GPUS": "1"} if name.endswith("over all ranks") else {})
    if name != "pipeline parallelism":  # our ranks exchange by kernels, and DP attention has some
        environment |= INTERPRETED
    arguments = [*ARGUMENTS, *RANKS[name][0]]
    server, _ = make_server(folder, SIZE, name=name, arguments=arguments, environment=environment)
    with server:
        yield name, server


@pytest.mark.full
@pytest.mark.skipif(CUDA and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("of_two_ranks", RANKS, indirect=True)
def test_a_server_of_two_ranks_draws_the_tokens_of_one_rank(servers, of_two_ranks):
    name, server = of_two_ranks
    head, processor = RANKS[name][1], {"custom_logit_processor": servers["processor"]}
    states = [state["flashsample"] for state in server.get("/server_info")["internal_states"]]
    assert all(state["active"] for state in states)
    if head is not None:
        assert all(head.items() <= state["heads"][0].items() for state in states)
    # A pipeline's answer says no paths. Each rank of DP attention, and each stage, has a random generator: SGLang's
    # sampler draws from another one than on one rank.
    if name == "tensor parallelism":
        for request, (params, fields, _) in COMPARED.items():
            got = ask_or_refused(server, params, processor if "custom_logit_processor" in fields else fields)
            want = servers["answers"][request][0]
            if isinstance(want, str):
                assert got == want, request
            else:
                assert got["output_ids"] == want["output_ids"], request
                if want["output_ids"]:  # an answer without a token has no path
                    assert paths(got) == paths(want), request
    rows = [*seeded_rows(), ({"temperature": 0, "custom_params": {"token_ids": [738]}}, processor)]
    assert_same_answers(ask_together(server, rows), ask_together(servers["ours"], rows), with_paths=False)
    assert_draws_of_one_id_are_independent(server, servers["truth"], 100 if CUDA else 25)
    assert metric(server, "rows_total", path="fused") > metric(server, "rows_total", path="native") > 0
    assert_no_failure(server)


@pytest.mark.full
@pytest.mark.skipif(CUDA and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("of_two_ranks", [name for name in RANKS if name.startswith("DP attention")], indirect=True)
def test_a_rank_of_dp_attention_without_requests_draws_nothing_and_none_waits(of_two_ranks):
    """It runs the model with the others, at each of their steps."""
    _, server = of_two_ranks

    def counted() -> tuple[float, float]:
        """Batches and rows, once the counters of an idle server have caught up."""
        counts = None
        while counts != (counts := (metric(server, "batches_total"), metric(server, "rows_total"))):
            time.sleep(3)
        return counts

    for busy in (0, 1):
        batches, rows = counted()
        answer = ask(server, {"temperature": 1.0, "sampling_seed": busy}, {"routed_dp_rank": busy})
        tokens = len(answer["output_ids"])
        assert paths(answer) == ["fused"] * tokens
        drawn = [after - before for after, before in zip(counted(), (batches, rows), strict=True)]
        # SGLang may begin a step before it knows that the request is done.
        assert drawn[0] == drawn[1] and tokens <= drawn[0] <= tokens + 1
    assert_no_failure(server)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("version", [None] if CUDA else [None, "0.5.17", "0.5.23"])
def test_a_seeded_request_gives_its_samples_in_the_same_order_after_aborts(folder, version):
    """Two of four samples run at a time, so that the others are aborted while they wait."""
    server, _ = make_server(
        folder,
        SIZE,
        name=f"aborts {version}",
        arguments=["--max-running-requests", "2"],
        first_on_path=version_path(version) if version else None,
    )
    seeded, delays = {"temperature": 1.0, "sampling_seed": 3, "n": 4, "ignore_eos": True}, random.Random(0)

    def answers() -> list[list[int]]:
        return [answer["output_ids"] for answer in ask(server, seeded)]

    with server, concurrent.futures.ThreadPoolExecutor() as pool:
        first = answers()
        assert len({tuple(tokens) for tokens in first}) == 4
        for _ in range(ABORTS):
            aborted = pool.submit(ask_or_refused, server, seeded | {"max_new_tokens": 3000})
            time.sleep(0.2 * delays.random())
            while not aborted.done():
                server.post("/abort_request", rid="", abort_all=True)
                time.sleep(0.02)
            assert answers() == first
        assert_no_failure(server)


@pytest.mark.full
@pytest.mark.parametrize("version", [None] if CUDA else [None, "0.5.17", "0.5.23"])
def test_a_retraction_changes_no_token_of_a_seeded_request_and_no_logprob(servers, folder, version):
    """It asks for the logprobs of all that a request has generated, also where there are those of its prompt."""
    server, _ = make_server(
        folder,
        SIZE,
        name=f"retractions {version}",
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"},
        first_on_path=version_path(version) if version else None,
    )
    requests = [
        {
            "input_ids": [300 + place] * (1, 5, 70)[place % 3],
            "sampling_params": {
                "temperature": 1.0,
                "sampling_seed": place,
                "max_new_tokens": 24,
                "ignore_eos": True,
            },
            "return_logprob": place % 2 == 0,
            "logprob_start_len": 0 if place % 4 == 0 else -1,
        }
        for place in range(16)
    ]

    def answers(server: Server) -> list[dict]:
        with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: server.generate(**request), requests))

    with server:
        got, want = answers(server), answers(servers["ours"])
        assert len(server.log_lines("etract")) > 5
        assert [answer["output_ids"] for answer in got] == [answer["output_ids"] for answer in want]
        # SGLang 0.5.17 itself loses logprobs now and then, and gives prompts those of others (sglang#36938).
        if (version or sglang_version()) != "0.5.17":
            # A prefill may round a logit to another bfloat16 than decode steps did.
            assert_same_answers(got, want, logprob_error=0.05)
            for answer, other in zip(got, want, strict=True):
                assert_same_logprobs_of_prompts(answer, other)
        assert all_paths(got) == {"fused"}
        assert_no_failure(server)


@pytest.mark.full
def test_a_server_of_two_stages_with_the_decision_plane_draws_the_same_tokens(servers, folder, tmp_path):
    if CUDA and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    package = runpy.run_path(str(BENCHMARKS / "oracle.py"))["install"](tmp_path, BENCHMARKS / "decision_plane.py")
    server, _ = make_server(
        folder,
        SIZE,
        name="plane",
        backend="decision_plane",
        arguments=[*ARGUMENTS, "--pp-size", "2"],
        environment=TWO_RANKS,
        first_on_path=package,
    )
    with server:
        rows = seeded_rows()
        for _ in range(2):
            answers = ask_together(server, rows), ask_together(servers["ours"], rows)
            assert_same_answers(*answers, with_paths=False)
        assert_no_failure(server)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.skipif(CUDA, reason="runs on the CPU")
def test_a_server_that_must_fuse_and_cannot_ends_with_the_reason(folder):
    environment = {"FLASHSAMPLE_REQUIRE": "1", "SGLANG_SANITIZE_NAN_LOGITS": "1"}
    server, _ = make_server(folder, "tiny", name="required", environment=environment)
    with pytest.raises(ServerError), server:
        pass
    reason = "FLASHSAMPLE_REQUIRE is on and SGLANG_SANITIZE_NAN_LOGITS is not supported yet"
    assert len(server.log_lines(f"] flashsample: the server does not start, because {reason}")) == 1


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("version", [None if CUDA else "0.5.17"])  # the oldest: all of them answer alike
def test_a_server_that_is_asked_to_counts_what_it_draws_whoever_draws_it(folder, version):
    file = folder / f"hot-{version}.json"
    server, truth = make_server(
        folder,
        SIZE,
        name=file.stem,
        environment={"FLASHSAMPLE_TRACE": str(file)},
        first_on_path=version_path(version) if version else None,
    )
    answered: Counter[int] = Counter()
    with server:
        (line,) = server.log_lines("counting the drawn tokens into ")
        assert str(file) in line
        for temperature, fields in ((1.0, {}), (0, {}), (1.0, TOP_LOGPROBS)):
            answers = server.generate(
                input_ids=[[300 + i] for i in range(20)],
                sampling_params={"max_new_tokens": 25, "ignore_eos": True, "temperature": temperature},
                **fields,
            )
            assert all_paths(answers) == {"fused"}
            for answer in answers:
                answered.update(answer["output_ids"])
        assert not server.log_lines("not counted") and "Traceback" not in server.log_text()
        # SGLang may kill its processes when it ends; five seconds after the last token all are in the file.
        deadline = time.monotonic() + 30
        while not file.exists() or HotVocab.load(file).counted < answered.total():
            assert time.monotonic() < deadline, "tokens are missing"
            time.sleep(0.5)
    counts = HotVocab.load(file)
    assert (counts.vocab, counts.name, counts.source) == (truth.size.vocab_size, SIZE, "server")
    assert all(counts.ids[token] >= count for token, count in answered.items())
    # Overlap scheduling draws one more token per request; the server asks itself something when it starts.
    assert answered.total() == 1500
    assert counts.counted - answered.total() <= 60 + 32


@pytest.mark.full
def test_a_screened_server_draws_the_same_tokens_and_follows_an_update_of_its_weights(folder, ours, truth, screened):
    """That its hooks land in every release: test_weight_hooks.py."""
    other = markov.write(folder / "other weights" / SIZE, markov.SIZES[SIZE], seed=1)
    sampled = [{"temperature": 0.4 + i / 10, "sampling_seed": i} for i in range(6)]
    edited = [{"temperature": 1.0, "sampling_seed": 9, "logit_bias": LOGIT_BIAS}, {"temperature": 0}]
    truncated = [{"temperature": 1.0, "sampling_seed": 10, "top_p": 0.8, "top_k": 20}, {"temperature": 0}]
    batches = [
        [row | {"max_new_tokens": 12, "ignore_eos": True} for row in rows] for rows in (sampled, edited, truncated)
    ]

    def tokens(server: Server) -> list[list[int]]:
        answers = [server.generate(input_ids=[[300 + i] for i in range(len(b))], sampling_params=b) for b in batches]
        assert all_paths([answer for batch in answers for answer in batch]) == {"fused"}
        return [answer["output_ids"] for batch in answers for answer in batch]

    def rows_screened() -> float:
        return metric(screened, "screen_rows_total")

    def post(path: str, **fields):
        # An answer is sent while the step after its last is still under way, and SGLang ends where it is not idle.
        screened.post("/flush_cache?timeout=60")
        return screened.post(path, **fields)

    (line,) = screened.log_lines("flashsample: screen ")
    assert re.search(
        r"screen built, .* up to \d+ requests faster, .*: [\d,]+ more bytes of GPU memory, [\d.]+ % of the head's$",
        line,
    )
    so_far = rows_screened()
    before = tokens(screened)
    assert before == tokens(ours)
    assert_greedy(screened, truth)
    assert rows_screened() >= so_far + 12 * (6 + 2 + 2)
    so_far = rows_screened()
    assert post("/update_weights_from_disk", model_path=str(folder / "other weights" / SIZE))["success"]
    assert_greedy(screened, other)
    assert tokens(screened) != before
    assert rows_screened() > so_far, "the screen is of the new weights"
    assert post("/update_weights_from_disk", model_path=str(folder / SIZE))["success"]
    assert tokens(screened) == before
    post("/release_memory_occupation")
    post("/resume_memory_occupation")
    so_far = rows_screened()
    assert tokens(screened) == before
    assert rows_screened() > so_far
    assert len(screened.log_lines("flashsample: screen rebuilt for new weights in ")) == 3
    post("/begin_weight_update", selector="all")
    assert tokens(screened) == before
    so_far = rows_screened()  # what was under way has arrived
    assert tokens(screened) == before
    assert rows_screened() == so_far, "somebody may be writing to the weights"
    post("/end_weight_update")
    assert tokens(screened) == before
    assert rows_screened() > so_far
    newest = [line for line in screened.log_lines("] flashsample: since the start: fused ") if "; screen " in line][-1]
    assert re.search(
        r"; screen [\d,]+ rows \([\d,]+ with one candidate group or none\), [\d.]+ of the head's groups read per "
        r"block of rows, [\d,]+ of [\d,]+ blocks with too many",
        newest,
    )
    assert not screened.log_lines("until restart") and "Traceback" not in screened.log_text()


@pytest.mark.skipif(not CUDA, reason="needs CUDA graphs")
def test_graph_and_eager_servers_draw_the_same_tokens(servers):
    params = [
        {"temperature": 0.5 + i / 20, "sampling_seed": i, "max_new_tokens": 20, "ignore_eos": True} for i in range(24)
    ]
    prompts = [[300 + i] for i in range(24)]
    graph, eager = (
        [answer["output_ids"] for answer in servers[name].generate(input_ids=prompts, sampling_params=params)]
        for name in ("ours", "eager")
    )
    assert graph == eager


@pytest.fixture(scope="module")
def deterministic(folder):
    """Our server with ``--enable-deterministic-inference``, which prefills in chunks and retracts requests."""
    arguments = ["--enable-deterministic-inference", "--chunked-prefill-size", "16"]
    arguments += [] if CUDA else ["--attention-backend", "torch_native"]
    environment = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"} | INTERPRETED
    server, _ = make_server(folder, SIZE, name="deterministic", arguments=arguments, environment=environment)
    with server:
        yield server


# Rows of all kinds but penalties: while it overlaps steps, SGLang may count a token a step late. No seed is given.
MIXED = (
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 1.3, "logit_bias": LOGIT_BIAS},
    {"temperature": 0.9, "regex": "[a-f]+"},
)


def mixed_request(place: int, **params) -> dict:
    return {
        "input_ids": [300 + place] * (3, 40, 5)[place % 3],
        "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, **MIXED[place % len(MIXED)], **params},
        "return_logprob": place % 4 != 3,
        "logprob_start_len": 0 if place % 2 == 0 else -1,
        "top_logprobs_num": 2 if place % 4 == 2 else 0,
    }


def numbers_of(answer: dict) -> tuple:
    """The tokens and all logprobs of an answer."""
    about = answer["meta_info"]
    names = [name for name in sorted(about) if name.endswith("logprobs")]
    return answer["output_ids"], [(name, about[name]) for name in names]


@pytest.mark.full
def test_deterministic_inference_is_fused_and_the_server_says_so(deterministic):
    (line,) = deterministic.log_lines("fused sampling active")
    assert "deterministic inference: one tile and one set of kernels for all batches" in line
    assert "requests without a seed have 42, and the n answers of a request differ" in line
    (line,) = deterministic.log_lines("flashsample: no screen")
    assert line.endswith("what a screen reads depends on the batch")


@pytest.mark.full
def test_deterministic_answers_are_the_same_bit_for_bit_alone_among_others_and_after_retractions(deterministic):
    requests = [mixed_request(place) for place in range(12)]
    alone = [deterministic.generate(**request) for request in requests]
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: deterministic.generate(**request), requests))
    assert [numbers_of(answer) for answer in together] == [numbers_of(answer) for answer in alone]
    assert all_paths(together) == {"fused"} and len(deterministic.log_lines("etract")) > 1
    assert_no_failure(deterministic)


@pytest.mark.full
def test_deterministic_answers_do_not_depend_on_what_the_radix_cache_has_of_a_prompt(deterministic):
    """SGLang's own script checks it so, of a model with a larger vocabulary: ``test_deterministic``, radix_cache."""
    request = mixed_request(1, temperature=1.0, max_new_tokens=6)
    deterministic.post("/flush_cache?timeout=60")
    first, second = (deterministic.generate(**request) for _ in range(2))
    assert [answer["meta_info"]["cached_tokens"] > 0 for answer in (first, second)] == [False, True]
    assert numbers_of(first) == numbers_of(second)


@pytest.mark.full
def test_deterministic_requests_without_a_seed_have_42_and_samples_differ(deterministic):
    unseeded, seeded = (mixed_request(0, **params) for params in ({"n": 3}, {"n": 3, "sampling_seed": 42}))
    first, again, given = (deterministic.generate(**one) for one in (unseeded, unseeded, seeded))
    tokens = [[answer["output_ids"] for answer in answers] for answers in (first, again, given)]
    assert tokens[0] == tokens[1] == tokens[2] and len(set(map(tuple, tokens[0]))) == 3
    single = deterministic.generate(**mixed_request(0))
    assert single["output_ids"] == tokens[0][0]


@pytest.mark.full
def test_deterministic_logprobs_of_a_prompt_are_those_that_its_tokens_were_drawn_with(deterministic):
    answer = deterministic.generate(**mixed_request(0, max_new_tokens=20))
    drawn = answer["meta_info"]["output_token_logprobs"]
    request = mixed_request(0, max_new_tokens=1)
    request["input_ids"] = request["input_ids"] + answer["output_ids"]
    read = deterministic.generate(**request)["meta_info"]["input_token_logprobs"]
    assert read[-len(drawn) :] == drawn
