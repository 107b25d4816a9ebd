"""``sgl-flashsample demo``: a real SGLang server with the backend on, real requests, and the path that each took."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from . import cpu_platform, markov
from .server import SGL_FLASHSAMPLE_SERVE, Server, ServerError

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


def run(folder: Path, port: int | None, size_name: str | None) -> None:
    """Run the demonstration. Raises ServerError, and ValueError for an unknown size."""
    on_gpu = torch.cuda.is_available()
    size_name = size_name or ("small" if on_gpu else "tiny")
    if size_name not in markov.SIZES:
        raise ValueError(f"unknown size {size_name!r}; sizes are {', '.join(markov.SIZES)}")
    size = markov.SIZES[size_name]
    say(f"[1/4] checkpoint: {size_name}, {size.vocab_size} tokens, known next-token distribution")
    truth = markov.write(folder / size_name, size)

    arguments = ["--dtype", size.dtype, "--random-seed", "1"]
    environment = {"FLASHSAMPLE_REPORT_PATH": "1", "FLASHSAMPLE_LOG_SECONDS": "0"}
    if on_gpu:
        arguments += ["--mem-fraction-static", "0.5"]
    else:
        arguments += cpu_platform.SERVER_ARGUMENTS
        environment |= cpu_platform.environment(folder / "cpu")
    where = "GPU" if on_gpu else "CPU, kernels interpreted"
    say(f"[2/4] sgl-flashsample serve: SGLang's server with --sampling-backend flashsample ({where})")
    server = Server(
        folder / size_name,
        arguments,
        backend=None,
        launcher=SGL_FLASHSAMPLE_SERVE,
        log=folder / "server.log",
        port=port,
        environment=environment,
        progress=say,
    )
    started = time.monotonic()
    with server:
        say(f"  ready after {time.monotonic() - started:.0f} s")
        for line in server.log_lines("] flashsample ")[:1]:
            say("  " + line.partition("] ")[2])
        say("[3/4] requests")
        for name, params, fields in REQUESTS:
            answer = server.generate(text=PROMPT, sampling_params={"max_new_tokens": 8, **params}, **fields)
            logprobs = answer["meta_info"].get("output_token_logprobs")
            logprob = f"  logprob of the first token {logprobs[0][0]:.3f}" if logprobs else ""
            text = answer["text"].replace("\n", " ")[:60]
            say(f"  {name:20} {paths_of(answer):24} {text!r}{logprob}")
        compare_with_truth(server, truth)
        say("[4/4] counters of the server")
        for line in server.log_lines("] flashsample: ")[-1:]:
            for counter in line.partition("flashsample: ")[2].split("; "):
                say("  " + counter)
    say("server stopped")


def compare_with_truth(server: Server, truth: markov.MarkovModel) -> None:
    """Sixteen requests at once, long enough for a rate, and a greedy token against the truth. Raises ServerError where
    they differ."""
    started = time.monotonic()
    params = {"temperature": 1.0, "max_new_tokens": 64, "ignore_eos": True}
    answers = server.generate(input_ids=[[300 + row] for row in range(16)], sampling_params=params)
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    rate = tokens / (time.monotonic() - started)
    say(f"  {'a batch of 16':20} {paths_of(answers[0]):24} {tokens} tokens, {rate:.0f} tokens per second")
    greedy = server.generate(input_ids=[[300]], sampling_params={"temperature": 0, "max_new_tokens": 1})[0]
    same = greedy["output_ids"] == [int(truth.logits(torch.tensor([300])).argmax())]
    say(f"  {'greedy and truth':20} {paths_of(greedy):24} {'the same token' if same else 'DIFFERENT TOKENS'}")
    if not same:
        raise ServerError("a greedy token differs from the checkpoint's known distribution")


def paths_of(answer: dict[str, Any]) -> str:
    """The paths of an answer's tokens, the most frequent first."""
    counts = Counter(answer["meta_info"].get("flashsample_path", ["not reported"]))
    return ", ".join(path for path, _ in counts.most_common())


def say(message: str) -> None:
    print(message, flush=True)
