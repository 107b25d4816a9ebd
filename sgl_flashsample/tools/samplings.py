"""The ways of sampling that are measured, by name: what a request asks a server for, and the title in tables.

``bench``, the benchmarks and their pages share them. This module loads no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

# A list of objects that no answer of a benchmark's length ends; numbers, words and fixed text in turn.
JSON_SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 16},
            "count": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "count", "ok"],
    },
}
# The field of ``LogitEdits`` that carries a parameter of a request.
EDITS = {
    "frequency_penalty": "additive",
    "repetition_penalty": "scaling",
    "json_schema": "mask",
    "logit_bias": "bias",
}


class Sampling(NamedTuple):
    """One way of sampling. title: its name in tables. params: the sampling parameters of a request. fields: the other
    fields of a request. server: arguments of a server that takes such requests."""

    title: str
    params: dict[str, Any]
    fields: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    server: tuple[str, ...] = ()

    @property
    def temperature(self) -> float:
        return self.params["temperature"]

    @property
    def truncation(self) -> tuple[int, float, float] | None:
        """top_k (0: off), top_p and min_p; None where all ids may be sampled."""
        limits = self.params.get("top_k", 0), self.params.get("top_p", 1.0), self.params.get("min_p", 0.0)
        return None if limits == (0, 1.0, 0.0) else limits

    @property
    def edits(self) -> tuple[str, ...]:
        """Fields of ``LogitEdits`` that such a row has."""
        return tuple(field for name, field in EDITS.items() if name in self.params)

    @property
    def logprob(self) -> bool:
        return self.fields.get("return_logprob", False)


def _sampling(title: str, temperature: float = 1.0, **params: Any) -> Sampling:
    return Sampling(title, {"temperature": temperature, **params})


_PENALTIES: dict[str, Any] = {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
_BIAS: dict[str, Any] = {"logit_bias": {"100": 3.0, "200": -100.0}}
_GRAMMAR: dict[str, Any] = {"json_schema": json.dumps(JSON_SCHEMA)}
_TRUNCATED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
_TRUNC = "temperature 0.7, top_p 0.9, top_k 50"
# SGLang's own ``DisallowedTokensLogitsProcessor``, as its ``to_str`` gives it: the class by its name, pickled.
PROCESSOR = json.dumps(
    {"callable": b"csglang.srt.sampling.custom_logit_processor\nDisallowedTokensLogitsProcessor\n.".hex()}
)
SAMPLINGS: dict[str, Sampling] = {
    "t1": _sampling("temperature 1"),
    "trunc": Sampling(_TRUNC, _TRUNCATED),
    "greedy": _sampling("greedy", 0.0),
    "penalty": Sampling(f"{_TRUNC}, frequency_penalty 0.5, repetition_penalty 1.1", _TRUNCATED | _PENALTIES),
    "json": Sampling(f"{_TRUNC}, JSON schema", _TRUNCATED | _GRAMMAR),
    "logprob": Sampling("temperature 1, logprob", {"temperature": 1.0}, {"return_logprob": True}),
    "top-logprobs": Sampling(
        "temperature 1, 5 top logprobs", {"temperature": 1.0}, {"return_logprob": True, "top_logprobs_num": 5}
    ),
    "ids": Sampling(
        "temperature 1, logprobs of 16 given ids",
        {"temperature": 1.0},
        {"return_logprob": True, "token_ids_logprob": list(range(1000, 1016))},
    ),
    "prompt-logprobs": Sampling(
        "temperature 1, logprobs of the prompt", {"temperature": 1.0}, {"return_logprob": True, "logprob_start_len": 0}
    ),
    "processor": Sampling(
        f"{_TRUNC}, custom logit processor",
        _TRUNCATED | {"custom_params": {"token_ids": [100, 200]}},
        {"custom_logit_processor": PROCESSOR},
        ("--enable-custom-logit-processor",),
    ),
    "k20p95": _sampling("top_k 20, top_p 0.95", top_k=20, top_p=0.95),
    "k50p90": _sampling("top_k 50, top_p 0.9", top_k=50, top_p=0.9),
    "p90": _sampling("top_p 0.9", top_p=0.9),
    "minp05": _sampling("min_p 0.05", min_p=0.05),
    "k1000": _sampling("top_k 1000", top_k=1000),
    "penalties": _sampling("penalties (additive and scaling)", **_PENALTIES),
    "bias": _sampling("logit bias", **_BIAS),
    "bitmask": _sampling("grammar bitmask", **_GRAMMAR),
    "edits": _sampling("penalties, bias and grammar", **_PENALTIES, **_BIAS, **_GRAMMAR),
    "edits+k50p90": _sampling(
        "penalties, bias and grammar, top_k 50, top_p 0.9", top_k=50, top_p=0.9, **_PENALTIES, **_BIAS, **_GRAMMAR
    ),
    "T0.7": _sampling("temperature 0.7", 0.7),
    "T0.6 k20p95": _sampling("temperature 0.6, top_k 20, top_p 0.95", 0.6, top_k=20, top_p=0.95),
    "T0.6 k50p90": _sampling("temperature 0.6, top_k 50, top_p 0.9", 0.6, top_k=50, top_p=0.9),
}
# Samplings of servers: what ``benchmarks/serve.py`` measures, and what ``bench`` offers.
SERVED = ("t1", "trunc", "greedy", "penalty", "json", "logprob", "top-logprobs", "ids", "prompt-logprobs")
OFFERED = (*SERVED, "processor")


def server_arguments(samplings: Iterable[str]) -> list[str]:
    """The arguments of a server that takes requests of these samplings."""
    return list(dict.fromkeys(argument for name in samplings for argument in SAMPLINGS[name].server))
