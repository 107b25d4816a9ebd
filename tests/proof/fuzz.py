"""Random requests to two real SGLang servers, stock and ours: does ours answer each as stock does, and do both live on?

    python tests/proof/fuzz.py --out tests/proof/results/http-fuzz.json

On this machine's CPU, with a checkpoint of 1,024 ids and the installed SGLang; for another release, put its folder
first on ``PYTHONPATH``. Requests go to /generate, /v1/completions and /v1/chat/completions, many at a time, so that
batches are mixed. They come from a seed and their number, and are of these kinds:

usual    sampling parameters as applications send them
edge     one to three parameters at a bound, beyond it, or absurd: numbers, ids, limits, prompts, grammars
types    one parameter of a wrong type
junk     a body that is no JSON, no object, or deeply nested
batch    several prompts, each with parameters of its own
left     the client closes the connection, or aborts the request, while it is answered

Both servers get the same request at the same time. Their answers must have the same status, the same fields, the same
message where a request is refused, the same kind of end, logprobs and lists of logprobs of the same shape, and the same
number of tokens where no draw decides it. Where neither a draw nor time decides the tokens (greedy, or one token left
by a limit; penalties reach a token of SGLang's a step late or not), they must be the same, but for near-ties: those are
asked for once more, with the logprobs of both tokens. What ``left`` requests answer is not compared. In the end both
servers answer, and ours has counted no failure, has logged none, and still serves.

A server that ends is a failure; the requests that it had then are in the result. ``EXCLUDED`` lists what no request
asks for, because stock SGLang ends or hangs. ``--only NUMBER ...`` sends these requests again, one at a time, and
prints the answers. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch
from programs import make_parser, new_env, write_result
from lab.servers import server_on_this_machine
from servers import counters_of, failures_of
from tqdm import tqdm

from sgl_flashsample.cpu_path import draws_in_host_memory
from sgl_flashsample.sglang.versions import sglang_version
from sgl_flashsample.tools import markov
from sgl_flashsample.tools.server import Server, stop_all

SIDES = {"stock": "pytorch", "ours": "flashsample"}  # and their sampling backends
SIZE = dataclasses.replace(markov.SIZES["tiny"], num_hidden_layers=1)
VOCAB, CONTEXT = SIZE.vocab_size, 4096
ARGUMENTS = ("--enable-metrics", "--enable-return-hidden-states", "--random-seed", "1234", "--log-level", "warning")
EXAMPLES = 20
SECONDS = 120.0  # for an answer
NEAR_TIE = 1e-4  # of two logits over the temperature: what float32 probabilities may have as equal
# Parameters that no request has, and why. Except with the last two, stock SGLang's scheduler or detokenizer ends, and
# the server with it, or hangs. ``unfit`` looks for them.
EXCLUDED = {
    "top_k from 2**31": "RuntimeError: value cannot be converted to type int32 without overflow",
    "logit_bias that is no object": "AttributeError: 'list' object has no attribute 'items'",
    "grammar that is neither text nor null": "TypeError: unhashable type: 'list'",
    "top_logprobs_num above the vocabulary": "RuntimeError: selected index k out of range",
    "top_logprobs_num, logprob_start_len or token_ids_logprob of a wrong type": "TypeError in the scheduler",
    "logprob_start_len below -1": "AssertionError",
    "min_new_tokens beside a grammar": "where the grammar allows the end alone, no token is left: RuntimeError: "
    "probability tensor contains either inf, nan or element < 0",
    "stop_token_ids outside the vocabulary": "beside any request with min_new_tokens, RuntimeError: index is out of "
    "bounds for dimension 1",
    "skip_special_tokens, spaces_between_special_tokens or no_stop_trim of a wrong type": "the detokenizer ends",
    "min_new_tokens beside stop_token_ids of all ids": "likewise",
    "a temperature above 3e38 beside a grammar or min_new_tokens": "likewise: -inf over inf",
    "an empty prompt": "AssertionError (not req.kv.holds_kv) == req.kv.is_kv_released, or IndexError beside a penalty",
    "max_new_tokens that is a fraction": "TypeError: slice indices must be integers",
    "return_sampling_mask": "a greedy request gets 500 alone and 200 beside a drawn one",
    "max_new_tokens of null": "it is well, but each answer has 4,096 tokens and takes seconds",
}
EXCLUDED_IN = {  # of one release alone
    "0.5.17": {
        "grammars": "on a CPU, RuntimeError: Unsupported device",
        "token_ids_logprob": "beside another request with logprobs, AttributeError: 'list' object has no attribute "
        "'tolist'",
    },
}
SGLANG = sglang_version()
EXCLUDED |= EXCLUDED_IN.get(SGLANG, {})
# OpenAI's lists of top logprobs have one entry for all tokens with the same text, as parts of characters.
TOP_BY_TEXT = SGLANG == "0.5.17"
KINDS = {"usual": 40, "edge": 35, "types": 8, "junk": 3, "batch": 6, "left": 8}
ENDPOINTS = {"/generate": 70, "/v1/completions": 15, "/v1/chat/completions": 15}
HUGE, NAN, INF = 1e308, math.nan, math.inf

# --- requests -------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
REGEXES = ("[a-f]+", "yes|no", "[0-9]{2}", "(ab)*c", ".*", "\\d+\\.\\d")
EBNFS = ('root ::= "yes" | "no"', 'root ::= "a" root | "b"')
BROKEN = {
    "regex": ("[a-", "(", "*", "a{2,1}", "(?=a)b", "\\"),
    "ebnf": ("root ::=", "nothing", 'root ::= other\nother ::= missing "a"', "::="),
    "json_schema": ("{", "[]", '{"type": "nothing"}', '{"$ref": "#/none"}', "null", '"x"', '{"type": 5}'),
    "structural_tag": ("{", "{}", '{"type": "structural_tag"}'),
}
STOPS = ("a", " w300", ["x", "y"], ["w"], "e")

Draw = Callable[[random.Random], Any]


def one_of(*values: Any) -> Draw:
    return lambda r: r.choice(values)


def between(low: float, high: float) -> Draw:
    return lambda r: round(r.uniform(low, high), 4)


def bias(ids: Sequence[Any], values: Sequence[float]) -> Draw:
    return lambda r: {str(r.choice(ids)): r.choice(values) for _ in range(r.randint(1, 4))}


IDS = range(VOCAB)
USUAL: dict[str, Draw] = {
    "temperature": one_of(0, 0, 0.0, 0.3, 0.7, 1, 1.0, 1.5, 2),
    "top_p": between(0.05, 1.0),
    "top_k": one_of(1, 2, 5, 20, 50, 200, 1000, -1),
    "min_p": one_of(0.0, 0.01, 0.05, 0.3),
    "frequency_penalty": between(-2, 2),
    "presence_penalty": between(-2, 2),
    "repetition_penalty": between(0.5, 2),
    "min_new_tokens": one_of(0, 1, 2),
    "logit_bias": bias(IDS, (-100.0, -5.0, -0.5, 0.5, 2.0, 5.0, 100.0)),
    "stop": one_of(*STOPS),
    "stop_token_ids": lambda r: [r.choice(IDS) for _ in range(r.randint(1, 3))],
    "stop_regex": one_of("w7.*", "[0-9]", ["a", "b+"]),
    "regex": one_of(*REGEXES),
    "ebnf": one_of(*EBNFS),
    "json_schema": one_of(json.dumps(SCHEMA), '{"type": "boolean"}', '{"enum": ["a", "b"]}'),
    "sampling_seed": lambda r: r.randrange(2**31),
    "n": one_of(1, 2, 3),
    "no_stop_trim": one_of(True, False),
    "skip_special_tokens": one_of(True, False),
    "spaces_between_special_tokens": one_of(True, False),
}
SWITCHES = ("no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens")
GRAMMARS = ("regex", "ebnf", "json_schema", "structural_tag")
EDGE: dict[str, Draw] = {
    "temperature": one_of(0.0, -0.0, 1e-7, 9.9e-7, 1e-6, 1e-5, 1e-3, 100, 1e30, 1e38, HUGE, -1, -1e-9, NAN, INF),
    "top_p": one_of(0, 1e-38, 1e-9, 1e-5, 1.0, 1.0000001, 1.5, -0.1, 0.9999999, NAN, INF),
    "top_k": one_of(-1, 0, 1, VOCAB - 1, VOCAB, VOCAB + 1, 2**30, 2**31 - 1, 2**31, 2**63, -2, -(2**40)),
    "min_p": one_of(0, 1e-38, 1e-9, 0.999999, 1.0, 1.0001, 2, -0.1, NAN),
    "frequency_penalty": one_of(-2, 2, 2.0001, -2.0001, 0, 1e-9, HUGE, NAN, -INF),
    "presence_penalty": one_of(-2, 2, 2.0001, -2.0001, 0, 1e-9, HUGE, NAN, INF),
    "repetition_penalty": one_of(0, 1e-9, 1e-3, 2, 2.0001, -1, 1, NAN, INF),
    "min_new_tokens": one_of(0, 1, 4, 5, -1, 2**31),
    "max_new_tokens": one_of(0, 0, -1, 1, CONTEXT - 1, CONTEXT, 2**31, 2**63, None),
    "logit_bias": lambda r: r.choice(
        (
            bias(IDS, (-1e4, 1e4, 1e-30, 0.0, -INF)),
            bias((0, VOCAB - 1, VOCAB, VOCAB + 1, -1, 2**31, 2**63), (1.0, -1.0)),
            bias(("x", "", "1.5", " 7 ", "+5", "007", "1e3", "٣", "1_0"), (1.0, -2.0)),
            lambda r: {str(token): 1.5 for token in range(VOCAB)},
            lambda r: {},
        )
    )(r),
    "stop": one_of("", [], [""], "a" * 300, ["a"] * 40, "\u0000", "é", [" "] * 32),
    "stop_token_ids": one_of([], [VOCAB], [-1], [2**40], list(range(VOCAB)), [1, 1, 1], [None]),
    "stop_regex": one_of("(", "", [], "a*", "x" * 300, [".*"] * 33, "(a|b)*c"),
    "regex": one_of(*BROKEN["regex"], "", "(a?){20}a{20}"),
    "ebnf": one_of(*BROKEN["ebnf"], ""),
    "json_schema": one_of(*BROKEN["json_schema"], "", "{}"),
    "structural_tag": one_of(*BROKEN["structural_tag"], ""),
    "sampling_seed": one_of(0, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64, 10**30),
    "n": one_of(0, -1, 1, 8),
    "beam_width": one_of(0, -1, 1, 2, 3),
    "ignore_eos": one_of(True, False, None),
    "custom_params": one_of({}, {"a": 1}, {"__req__": 1}, None),
    "stream_interval": one_of(0, -1, 1, 100),
    "no_such_parameter": one_of(1, None),
}
WRONG: tuple[Any, ...] = (
    "x",
    "",
    "1",
    True,
    None,
    [],
    [1],
    {},
    {"a": {"b": []}},
    1.5,
    -0.5,
    2**70,
    [[[]]],
    [None],
    "nan",
)
FIELD_NAMES = ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob")
JUNK = (
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b"null",
    b"5",
    b'"x"',
    b"[" * 5000,
    b'{"text": "a"',
    b'{"text": "\\ud800", "sampling_params": {"max_new_tokens": 1}}',
    b"\xff\xfe{}",
    b"{}",
    b'{"input_ids": null}',
    b'{"text": 5}',
    b'{"text": "a", "sampling_params": []}',
    b'{"text": "a", "sampling_params": [[[{}]]]}',
    b'{"text": "a", "sampling_params": "x"}',
    b'{"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1}]}',
    b'{"text": [], "sampling_params": {}}',
    b'{"input_ids": [1, "a"], "sampling_params": {"max_new_tokens": 1}}',
    b'{"input_ids": [1.5], "sampling_params": {"max_new_tokens": 1}}',
    b'{"text": "a", "input_ids": [1], "sampling_params": {"max_new_tokens": 1}}',
    b'{"text": "a", "sampling_params": {"max_new_tokens": 1, "max_new_tokens": 2, "temperature": 0}}',
    b'{"prompt": "a", "max_tokens": 1, "temperature": 0}',
    b'{"messages": [{"role": "x", "content": "a"}], "max_tokens": 1}',
    b'{"messages": [{"role": "user"}], "max_tokens": 1}',
    b'{"messages": "x"}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 1, "temperature": 0}',
    b'{"messages": [[[]]], "temperature": [[]]}',
)


@dataclasses.dataclass(frozen=True)
class Request:
    """params: of each row, for what can be said of its answer. leave: seconds after which the client has gone; abort:
    whether it says so."""

    number: int
    kind: str
    path: str
    body: bytes
    params: tuple[dict[str, Any], ...] = ()
    leave: float | None = None
    abort: bool = False
    streams: bool = False

    @property
    def certain(self) -> bool:
        """True if the tokens do not depend on draws."""
        return bool(self.params) and all(map(is_certain, self.params))

    @property
    def counted(self) -> bool:
        """True if the numbers of tokens do not depend on draws."""
        return self.certain or (bool(self.params) and all(map(is_counted, self.params)))


def is_certain(params: dict[str, Any]) -> bool:
    def number(name: str, default: float) -> float:
        value = params.get(name, default)
        return value if isinstance(value, int | float) else math.nan

    penalties = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    if any(number(name, none) != none for name, none in penalties.items()) and params.get("max_new_tokens") != 1:
        return False  # by chance a step late: SGLang counts a step's tokens if they have arrived when it makes the next
    one = number("top_k", -1) == 1 or 0 < number("top_p", 1.0) <= 1e-5 or number("min_p", 0.0) == 1
    return (0 <= number("temperature", 1.0) < 1e-6 or one) and not params.get("beam_width")


def is_counted(params: dict[str, Any]) -> bool:
    ends = ("stop", "stop_token_ids", "stop_regex", *GRAMMARS)
    return bool(params.get("ignore_eos")) and not any(params.get(name) for name in ends)


def make_prompt(r: random.Random, edge: bool) -> dict[str, Any]:
    """``input_ids`` or ``text``."""
    if edge:
        return r.choice(
            (
                {"input_ids": [VOCAB - 1] * r.choice((1, 600))},
                {"input_ids": [5] * (CONTEXT - r.choice((0, 1, 2, 5)))},
                {"input_ids": [5] * (CONTEXT + 1)},
                {"text": "a" * (2 * CONTEXT)},
                {"text": "\u0000 é \U0001f600"},
                {"input_ids": [0, 1, 2]},
            )
        )
    if r.random() < 0.5:
        return {"input_ids": [r.randrange(3, VOCAB) for _ in range(r.randint(1, 8))]}
    return {"text": "".join(r.choice("abcdef gh\n") for _ in range(r.randint(1, 12)))}


def make_params(r: random.Random, kind: str) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": r.choice((1, 1, 2, 3, 4)), "ignore_eos": r.random() < 0.7}
    if r.random() < 0.25:
        params["temperature"] = 0
    names = [name for name in USUAL if name not in params and name not in GRAMMARS]
    for name in r.sample(names, min(len(names), int(r.expovariate(0.4)))):
        params[name] = USUAL[name](r)
    if r.random() < 0.1:
        name = r.choice(GRAMMARS[:3])
        params[name] = USUAL[name](r)
    if kind == "edge":
        for name in r.sample(list(EDGE), r.choice((0, 1, 1, 1, 2, 3))):
            params[name] = EDGE[name](r)
    if kind == "types":
        params[r.choice([*USUAL, "max_new_tokens", "ignore_eos", "structural_tag"])] = r.choice(WRONG)
    return params


def make_fields(r: random.Random, kind: str) -> dict[str, Any]:
    """Fields of /generate beside the sampling parameters."""
    fields: dict[str, Any] = {}
    if r.random() < 0.35:
        fields["return_logprob"] = True
        if r.random() < 0.5:
            fields["top_logprobs_num"] = r.choice((0, 1, 2, 5, 20))
        if r.random() < 0.2:
            fields["token_ids_logprob"] = [r.randrange(VOCAB) for _ in range(r.randint(1, 4))]
        if r.random() < 0.2:
            fields["logprob_start_len"] = r.choice((0, 1, -1))
        if r.random() < 0.3:
            fields["return_text_in_logprobs"] = True
    if r.random() < 0.02:
        fields["return_hidden_states"] = True
    if kind == "edge" and r.random() < 0.2:
        name = r.choice(FIELD_NAMES)
        fields["return_logprob"] = True
        fields[name] = {
            "return_logprob": r.choice((False, None)),
            "logprob_start_len": r.choice((0, 3, 10_000, -2)),
            "top_logprobs_num": r.choice((-1, 100, VOCAB, VOCAB + 1, 10**9)),
            "token_ids_logprob": r.choice(([], [VOCAB], [-1], [0] * 50, [2**40])),
        }[name]
    if kind == "types" and r.random() < 0.3:
        fields[r.choice(FIELD_NAMES)] = r.choice(WRONG)
    return fields


def for_openai(r: random.Random, path: str, params: dict[str, Any], prompt: dict[str, Any]) -> dict[str, Any]:
    """The same, in the words of OpenAI's API."""
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
    body: dict[str, Any] = {names.get(name, name): value for name, value in params.items()}
    schema = body.pop("json_schema", None)
    if schema is not None:
        try:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": json.loads(schema)},
            }
        except (TypeError, ValueError):
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
    text = prompt.get("text", prompt.get("input_ids"))
    if path == "/v1/completions":
        body["prompt"] = text
        if r.random() < 0.3:
            body["logprobs"] = r.choice((0, 1, 3, 5))
        if r.random() < 0.1:
            body["echo"] = True
    else:
        body["messages"] = [{"role": "user", "content": text if isinstance(text, str) else "w"}]
        if r.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": r.choice((0, 1, 3, 5))}
    return body


def unfit(body: dict[str, Any]) -> bool:
    """True if a body has a parameter that ``EXCLUDED`` lists."""

    def is_int(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    given = body.get("sampling_params", body)
    for params in given if isinstance(given, list) else [given]:
        limit = params.get("max_new_tokens", params.get("max_tokens", 1))
        if (is_int(params.get("top_k")) and params["top_k"] >= 2**31) or isinstance(limit, float | None):
            return True
        if not isinstance(params.get("logit_bias"), dict | None):
            return True
        if any(not isinstance(params.get(name), bool | None) for name in SWITCHES):
            return True
        stops = params.get("stop_token_ids") or []
        if isinstance(stops, list) and any(is_int(one) and one not in IDS for one in stops):
            return True
        least = params.get("min_new_tokens", params.get("min_tokens"))
        if least and isinstance(stops, list) and len(stops) == VOCAB:
            return True
        grammar = any(params.get(name) for name in (*GRAMMARS, "response_format"))
        temperature = params.get("temperature")
        if (least and grammar) or ((least or grammar) and isinstance(temperature, float) and temperature > 3e38):
            return True
        if any(not isinstance(params.get(name), str | None) for name in GRAMMARS):
            return True
        if grammar and "grammars" in EXCLUDED:
            return True
    if body.get("token_ids_logprob") is not None and "token_ids_logprob" in EXCLUDED:
        return True
    if isinstance(given, list):
        return False
    top, start, ids = (body.get(name) for name in ("top_logprobs_num", "logprob_start_len", "token_ids_logprob"))
    if any(not (value is None or is_int(value)) for value in (top, start)):
        return True
    if not (ids is None or (isinstance(ids, list) and all(map(is_int, ids)))):
        return True
    return (top is not None and top > VOCAB) or (start is not None and start < -1)


def make_request(seed: int, number: int) -> Request:
    """The same for the same numbers."""
    for attempt in range(1000):
        r = random.Random(f"{seed} {number} {attempt}")
        kind = r.choices(list(KINDS), list(KINDS.values()))[0]
        path = r.choices(list(ENDPOINTS), list(ENDPOINTS.values()))[0]
        if kind == "junk":
            return Request(number, kind, path, r.choice(JUNK))
        if kind == "batch":
            rows = [make_params(r, "usual") for _ in range(r.randint(2, 6))]
            logprob = [r.random() < 0.3 for _ in rows]
            top = [r.choice((0, 0, 2)) for _ in rows]
            prompts = [[r.randrange(3, VOCAB) for _ in range(r.randint(1, 4))] for _ in rows]
            many = dict.fromkeys(("n",), rows[0].get("n", 1))
            rows = [row | many for row in rows]  # SGLang wants the same n for all
            body = {"input_ids": prompts, "sampling_params": rows, "return_logprob": logprob, "top_logprobs_num": top}
            path = "/generate"
        else:
            params = make_params(r, kind)
            rows = [params]
            prompt = make_prompt(r, kind == "edge" and r.random() < 0.1)
            if path == "/generate":
                body = {**prompt, "sampling_params": params, **make_fields(r, kind)}
            else:
                body = for_openai(r, path, params, prompt)
        leave, abort, streams = None, False, kind != "batch" and r.random() < 0.05
        if kind == "left":
            leave, abort = r.uniform(0, 0.1), path == "/generate" and r.random() < 0.5
            target = params if path == "/generate" else body
            target["max_new_tokens" if path == "/generate" else "max_tokens"] = r.choice((1, 4, 50, 500))
            if abort:
                body["rid"] = f"fuzz-{seed}-{number}"
        if streams:
            body["stream"] = True
        if not unfit(body):
            return Request(number, kind, path, json.dumps(body).encode(), tuple(rows), leave, abort, streams)
    raise AssertionError("what is excluded is all there is")


# --- answers --------------------------------------------------------------------------------------------------------

# Fields that depend on how many tokens were drawn.
UNSTEADY = ("decode_throughput",)


@dataclasses.dataclass(frozen=True)
class Answer:
    """status: of HTTP, or a word where there is none. data: JSON, of a stream the list of its events; or text."""

    status: int | str
    data: Any = None

    @classmethod
    def of(cls, status: int, text: str, streams: bool) -> Answer:
        if streams and text.startswith("data:"):
            events = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
            return cls(status, [event if event == "[DONE]" else json.loads(event) for event in events])
        try:
            return cls(status, json.loads(text))
        except ValueError:
            return cls(status, text)

    @property
    def short(self) -> str:
        """For a list of examples."""
        rows = [facts_of(row, self.data) for row in sequences(self.data)]
        return f"{self.status} {message_of(self.data) or rows}"[:400]


def sequences(data: Any) -> list[dict[str, Any]]:
    """The answers, one per prompt and sample, or choice. The events of a stream are put together."""
    if isinstance(data, dict):
        choices = data.get("choices")
        return choices if isinstance(choices, list) else [data] if "meta_info" in data else []
    if not isinstance(data, list):
        return []
    if "[DONE]" not in data:
        return [row for row in data if isinstance(row, dict) and "meta_info" in row]
    joined: dict[int, dict[str, Any]] = {}
    for event in data:
        if not isinstance(event, dict):
            continue
        if "meta_info" in event:
            joined[event.get("index", 0)] = event
        for choice in event.get("choices") or ():
            row = joined.setdefault(choice["index"], {"text": "", "finish_reason": None})
            row["text"] += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            row["finish_reason"] = choice.get("finish_reason") or row["finish_reason"]
    return [joined[index] for index in sorted(joined)]


def message_of(data: Any) -> str:
    """Why a request is refused, without what is this request's alone."""
    if isinstance(data, list):
        return " ".join(filter(None, map(message_of, data))) if "[DONE]" in data else ""
    if data == "[DONE]":
        return ""
    if isinstance(data, dict):
        error = data.get("error", data.get("message") if data.get("object") == "error" else None)
        data = error.get("message") if isinstance(error, dict) else error
    return re.sub(r"[0-9a-f]{32}|\d\d:\d\d:\d\d", "...", str(data)) if data is not None else ""


def facts_of(row: dict[str, Any], data: Any) -> dict[str, Any]:
    """One sequence: its end, its number of tokens, its ids and its text."""
    about = row.get("meta_info") or {}
    end = about.get("finish_reason", row.get("finish_reason"))
    text = row.get("text", (row.get("message") or {}).get("content"))
    return {
        "end": end.get("type") if isinstance(end, dict) else end,
        "matched": end.get("matched") if isinstance(end, dict) else row.get("matched_stop"),
        "tokens": about.get("completion_tokens"),
        "ids": row.get("output_ids"),
        "text": text,
    }


def shape(value: Any) -> Any:
    """Names, types and lengths, all the way down."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return "number" if isinstance(value, float) else type(value).__name__


def logprob_shapes(row: dict[str, Any]) -> dict[str, Any]:
    """The different shapes of entries of each list of logprobs, and whether it has one entry per token."""
    about, form = row.get("meta_info") or {}, dict[str, Any]()
    for name, value in about.items():
        if name.endswith("_logprobs") and isinstance(value, list):
            kinds = sorted({json.dumps(shape(entry)) for entry in value})
            whole = len(value) == about.get("completion_tokens") if name.startswith("output") else len(value)
            form[name] = [kinds, whole]
    lists = row.get("logprobs")
    if isinstance(lists, dict):
        entries = lists.get("content")
        form["names"] = sorted(lists)
        if isinstance(entries, list):
            form["content"] = sorted({f"{sorted(entry)} {num_top(entry.get('top_logprobs'))}" for entry in entries})
        else:
            form["lengths"] = sorted({len(value) > 0 for value in lists.values() if isinstance(value, list)})
            form["top"] = sorted({num_top(entry) for entry in lists.get("top_logprobs") or () if entry})
    elif "choices" in row or "logprobs" in row:
        form["names"] = type(lists).__name__
    return form


def num_top(entries: Collection[Any] | None) -> int:
    """The number of top logprobs of a token in an OpenAI answer; at most 1 where that depends on the token."""
    return min(len(entries or ()), 1) if TOP_BY_TEXT else len(entries or ())


def differences(stock: Answer, ours: Answer, request: Request) -> list[str]:
    """The differences, in a few words each. Tokens come last."""
    if stock.status != ours.status:
        return [f"status: {stock.status}, {ours.status}"]
    differing = []
    messages = message_of(stock.data), message_of(ours.data)
    if messages[0] != messages[1]:
        differing.append(f"message: {messages[0][:160]!r}, {messages[1][:160]!r}")
    if isinstance(stock.data, dict) and isinstance(ours.data, dict) and stock.data.keys() != ours.data.keys():
        differing.append(f"fields: {sorted(stock.data.keys() ^ ours.data.keys())}")
    pairs = list(zip(sequences(stock.data), sequences(ours.data), strict=False))
    if len(sequences(stock.data)) != len(sequences(ours.data)):
        differing.append(f"sequences: {len(sequences(stock.data))}, {len(sequences(ours.data))}")
    for place, (one, other) in enumerate(pairs):
        differing += [f"row {place}: {words}" for words in row_differences(one, other, stock, ours, request)]
    return differing


def follows(words: str, row: int) -> bool:
    """True if a difference may follow from another token of this row. Fields and other rows do not."""
    names = ("ids", "text", "end", "matched", "tokens", "logprobs")
    return any(words.startswith(f"row {row}: {name}:") for name in names)


def row_differences(
    stock: dict[str, Any], ours: dict[str, Any], stock_answer: Answer, ours_answer: Answer, request: Request
) -> list[str]:
    differing = []
    names = [{*row, *(row.get("meta_info") or ())}.difference(UNSTEADY) for row in (stock, ours)]
    if names[0] != names[1]:
        differing.append(f"fields: {sorted(names[0] ^ names[1])}")
    one, other = facts_of(stock, stock_answer.data), facts_of(ours, ours_answer.data)
    known = ["end", "tokens"] if request.counted else []
    known += ["matched", "ids", "text"] if request.certain else []
    if one["end"] == other["end"] == "abort":
        known = []  # a prompt that is too long is replaced by one token, and what is drawn after that is nobody's
    differing += [f"{name}: {one[name]!r}, {other[name]!r}" for name in known if one[name] != other[name]]
    if not request.counted and (one["end"] in ("stop", "length")) != (other["end"] in ("stop", "length")):
        differing.append(f"end: {one['end']}, {other['end']}")
    if any(not 0 <= token < VOCAB for token in other["ids"] or ()):
        differing.append(f"no id: {other['ids']}")
    # Stock answers a request for 0 tokens at one time with the logprob of one, at another with none.
    none = any(params.get("max_new_tokens") == 0 for params in request.params)
    if not none and (left := logprob_shapes(stock)) != (right := logprob_shapes(ours)):
        differing.append(f"logprobs: {left}, {right}"[:300])
    return differing


# --- servers --------------------------------------------------------------------------------------------------------


class Fuzz:
    """``options.requests`` requests to both servers, ``options.concurrency`` at a time.

    counts: by kind, endpoint, and status of both. different: how many; examples: the first.
    """

    def __init__(self, servers: dict[str, Server], options: Any, http: aiohttp.ClientSession) -> None:
        self.servers, self.options, self.http = servers, options, http
        self.kinds: collections.Counter[str] = collections.Counter()
        self.endpoints: collections.Counter[str] = collections.Counter()
        self.statuses: collections.Counter[str] = collections.Counter()
        self.certain = self.near_ties = self.different = 0
        self.examples: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any]] = []
        self.waiting: dict[int, Request] = {}
        self.sent = 0

    def has_ended(self) -> list[str]:
        return [
            side for side, server in self.servers.items() if server.process is None or server.process.poll() is not None
        ]

    async def until_ended(self, seconds: float) -> None:
        """A server takes some seconds to end after its scheduler has."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and not self.has_ended():
            await asyncio.sleep(0.2)

    async def post(self, side: str, path: str, body: bytes, streams: bool = False) -> Answer:
        url = f"http://127.0.0.1:{self.servers[side].port}{path}"
        try:
            async with self.http.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                return Answer.of(response.status, (await response.read()).decode(errors="replace"), streams)
        except aiohttp.ClientPayloadError:  # a stream whose request turns out to be wrong
            return Answer("an answer that breaks off")
        except TimeoutError:
            return Answer(f"no answer in {SECONDS:.0f} s")
        except aiohttp.ClientError as error:
            return Answer("no answer", type(error).__name__)

    async def ask(self, side: str, request: Request) -> Answer:
        asked = self.post(side, request.path, request.body, request.streams)
        if request.leave is None:
            return await asked
        if not request.abort:
            try:
                return await asyncio.wait_for(asked, request.leave)
            except TimeoutError:
                return Answer("left")
        task = asyncio.ensure_future(asked)
        await asyncio.sleep(request.leave)
        rid = json.loads(request.body)["rid"]
        await self.post(side, "/abort_request", json.dumps({"rid": rid}).encode())
        return await task

    async def both(self, request: Request) -> dict[str, Answer]:
        answers = await asyncio.gather(*(self.ask(side, request) for side in SIDES))
        return dict(zip(SIDES, answers, strict=True))

    async def one(self, request: Request) -> None:
        """Send it and count."""
        self.waiting[request.number] = request
        answers = await self.both(request)
        if any(str(answer.status).startswith("no answer") for answer in answers.values()):
            await self.until_ended(15.0)
        if self.has_ended():
            return
        del self.waiting[request.number]
        self.kinds[request.kind] += 1
        self.endpoints[request.path] += 1
        self.certain += request.certain
        for side, answer in answers.items():
            self.statuses[f"{side} {answer.status}"] += 1
        differing = []
        if request.kind != "left":
            differing = differences(answers["stock"], answers["ours"], request)
        if differing and request.certain and answers["stock"].status == 200:
            tied = await self.near_ties_of(request, answers)
            self.near_ties += len(tied)
            differing = [words for words in differing if not any(follows(words, row) for row in tied)]
        if differing:
            self.different += 1
            if len(self.examples) < EXAMPLES:
                self.examples.append(example(request, differing, answers))
        for side in SIDES:
            if str(answers[side].status).startswith("no answer") and request.kind == "left":
                self.different += 1
                self.examples.append(example(request, [f"{side} does not answer"], answers))

    async def near_ties_of(self, request: Request, answers: dict[str, Answer]) -> list[int]:
        """The rows in which stock's own logprobs, where the tokens differ first, are as good as equal. Those are of the
        edited logits, at temperature 1 beside no drawn row and at the request's beside one."""
        body = json.loads(request.body)
        if request.path != "/generate" or isinstance(body.get("sampling_params"), list) or request.streams:
            return []
        tied = []
        for row, pair in enumerate(zip(*(sequences(answers[side].data) for side in SIDES), strict=False)):
            ids = [one["output_ids"] for one in pair]
            place = next((place for place, pair in enumerate(zip(*ids, strict=False)) if len(set(pair)) == 2), None)
            if place is None:
                continue
            both = [tokens[place] for tokens in ids]
            again = body | {"return_logprob": True, "token_ids_logprob": both, "stream": False}
            again["sampling_params"] = body["sampling_params"] | {"n": 1}
            answer = await self.post("stock", "/generate", json.dumps(again).encode())
            lists = sequences(answer.data)[0]["meta_info"]["output_token_ids_logprobs"] if answer.status == 200 else []
            if place >= len(lists):
                continue
            values = [entry[0] for entry in lists[place]]
            temperature = max(1.0, body["sampling_params"].get("temperature") or 1.0)
            if None not in values and abs(values[0] - values[1]) <= NEAR_TIE * temperature:
                tied.append(row)
        return tied

    async def run(self, numbers: Sequence[int]) -> None:
        """Ends early where a server does."""
        left = iter(tqdm(numbers, unit="request", smoothing=0.02))
        started = time.monotonic()

        async def worker() -> None:
            for number in left:
                if self.has_ended() or time.monotonic() - started > self.options.minutes * 60:
                    return
                self.sent += 1
                await self.one(make_request(self.options.seed, number))

        waiting: dict[int, Request] = {}
        workers = [asyncio.ensure_future(worker()) for _ in range(self.options.concurrency)]
        while not all(one.done() for one in workers):
            await asyncio.wait(workers, timeout=1.0)
            if ended := self.has_ended():
                waiting = waiting or dict(self.waiting)
                for one in workers:
                    one.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(*workers, return_exceptions=True)
                self.ended = [{"side": side, "log": self.servers[side].last_error()} for side in ended]
                self.ended += [as_sent(request) for request in waiting.values()]
        for one in workers:
            if not one.cancelled():
                one.result()


def as_sent(request: Request) -> dict[str, Any]:
    return {"number": request.number, "kind": request.kind, "path": request.path, "body": str(request.body[:600])[2:-1]}


def example(request: Request, differing: list[str], answers: dict[str, Answer]) -> dict[str, Any]:
    return as_sent(request) | {"different": differing} | {side: answer.short for side, answer in answers.items()}


def make_servers(folder: Path) -> dict[str, Server]:
    """Not started."""
    markov.write(folder / "model", SIZE)
    environment = {"FLASHSAMPLE_LOG_SECONDS": "0.2"}
    return {
        side: server_on_this_machine(
            folder / "model",
            ["--dtype", SIZE.dtype, *ARGUMENTS],
            backend=backend,
            log=folder / f"{side}.log",
            environment=environment,
        )
        for side, backend in SIDES.items()
    }


async def fuzz(servers: dict[str, Server], options: Any) -> Fuzz:
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        run = Fuzz(servers, options, http)
        if options.only:
            for number in options.only:
                request = make_request(options.seed, number)
                print(json.dumps(as_sent(request)), flush=True)
                answers = await run.both(request)
                for side, answer in answers.items():
                    print(f"  {side:5} {answer.short} {run.has_ended()}")
                print(f"  {differences(answers['stock'], answers['ours'], request)}", flush=True)
        else:
            await run.run(range(int(options.first), int(options.first + options.requests)))
        return run


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=float, default=1e5, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=48, help="requests at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no more are sent")
    parser.add_argument("--only", type=int, nargs="+", help="send these again, alone, and print their answers")
    parser.add_argument("--logs", type=Path, help="a folder for the servers' logs, to be kept")
    options = parser.parse_args()
    if not draws_in_host_memory(torch.device("cpu")) or torch.cuda.is_available():
        parser.error("this draws in host memory: on a machine without a GPU, and with TRITON_INTERPRET unset")
    with tempfile.TemporaryDirectory() as name:
        servers = make_servers(options.logs or Path(name))
        try:
            for server in servers.values():
                server.start()
            for server in servers.values():
                server.wait_until_ready()
            started = time.monotonic()
            run = asyncio.run(fuzz(servers, options))
            seconds = time.monotonic() - started
            if options.only:
                return 0
            alive = not run.has_ended()
            failures = failures_of(servers["ours"])
            counters = counters_of(servers["ours"]) if alive else {}
            if alive:
                servers["stock"].generate(text="a", sampling_params={"max_new_tokens": 2})
        finally:
            stop_all(servers.values())
    result = {
        "env": new_env() | {"sglang": SGLANG},
        "seed": options.seed,
        "requests": run.sent,
        "asked_for": int(options.requests),
        "seconds": round(seconds, 1),
        "kinds": dict(run.kinds),
        "endpoints": dict(run.endpoints),
        "statuses": dict(sorted(run.statuses.items())),
        "certain": run.certain,
        "near_ties": run.near_ties,
        "different": run.different,
        "examples": run.examples,
        "ended": run.ended,
        "failures": failures,
        "counters": counters,
        "excluded": EXCLUDED,
    }
    write_result(options.out, result)
    print(json.dumps({name: value for name, value in result.items() if name != "env"}, indent=1))
    served = counters.get("active") == 1 and not any("error" in name or "inactive" in name for name in counters)
    return int(bool(run.different or run.ended or failures or not served))


if __name__ == "__main__":
    sys.exit(main())
