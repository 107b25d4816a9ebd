"""``sgl-flashsample demo``: a real SGLang server with the backend on, real requests, and the path that each took."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

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


def say(message: str) -> None:
    print(message, flush=True)


def paths_of(answer: dict[str, Any]) -> str:
    """The paths of an answer's tokens, the most frequent first."""
    counts = Counter(answer["meta_info"].get("flashsample_path", ["not reported"]))
    return ", ".join(path for path, _ in counts.most_common())


def run(folder: str, port: int | None, size_name: str | None) -> int:
    """Run the demonstration. Returns 0, or 1 after one line that says what went wrong."""
    try:
        import torch

        on_gpu = torch.cuda.is_available()
        size_name = size_name or ("small" if on_gpu else "tiny")
        if size_name not in markov.SIZES:
            raise ServerError(f"unknown size {size_name!r}; sizes are {', '.join(markov.SIZES)}")
        return _run(Path(folder).resolve(), port, size_name, on_gpu)
    except (ServerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _run(folder: Path, port: int | None, size_name: str, on_gpu: bool) -> int:
    size = markov.SIZES[size_name]
    say(f"[1/4] checkpoint: {size_name}, {size.vocab_size} tokens, known next-token distribution")
    model = folder / size_name
    truth = markov.write(model, size)

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
        model,
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
        _requests(server)
        _batch(server, truth)
        say("[4/4] counters of the server")
        for line in server.log_lines("] flashsample: ")[-1:]:
            for part in line.partition("flashsample: ")[2].split("; "):
                say("  " + part)
    say("server stopped")
    return 0


def _requests(server: Server) -> None:
    for name, params, fields in REQUESTS:
        answer = server.generate(text=PROMPT, sampling_params={"max_new_tokens": 8, **params}, **fields)
        text = answer["text"].replace("\n", " ")
        extra = ""
        if params.get("sampling_seed") is None and fields.get("return_logprob"):
            extra = f"  logprob of the first token {answer['meta_info']['output_token_logprobs'][0][0]:.3f}"
        say(f"  {name:20} {paths_of(answer):24} {text[:60]!r}{extra}")


def _batch(server: Server, truth: markov.MarkovModel) -> None:
    """Sixteen requests at once, long enough for a rate, and their greedy tokens against the truth."""
    started = time.monotonic()
    prompts = [[300 + i] for i in range(16)]
    params = {"temperature": 1.0, "max_new_tokens": 64, "ignore_eos": True}
    answers = server.generate(input_ids=prompts, sampling_params=params)
    seconds = time.monotonic() - started
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    say(f"  {'a batch of 16':20} {paths_of(answers[0]):24} {tokens} tokens, {tokens / seconds:.0f} tokens per second")
    greedy = server.generate(input_ids=[[300]], sampling_params={"temperature": 0, "max_new_tokens": 1})[0]
    import torch

    right = int(truth.logits(torch.tensor([300])).argmax()) == greedy["output_ids"][0]
    say(f"  {'greedy and truth':20} {paths_of(greedy):24} {'the same token' if right else 'DIFFERENT TOKENS'}")
    if not right:
        raise ServerError("a greedy token differs from the checkpoint's known distribution")
