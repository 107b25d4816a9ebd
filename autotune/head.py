"""The head to tune for: from a model's folder or config, or as it is spelled out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..table import HeadShape

MAX_CONFIG_BYTES = 1 << 22
DTYPE_NAMES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
}
MOST = 1 << 24
VOCAB_MULTIPLE = 64  # SGLang pads a vocabulary to a multiple of this before it is cut into shards


class HeadError(ValueError):
    """What is wrong with a model or a shape; the message is one line."""


def head_of(
    model: str | None,
    vocab: int | None,
    hidden: int | None,
    dtype: str | None,
    softcap: bool | None,
    tp: int,
) -> HeadShape:
    """What is given explicitly beats what the model's config says. Raises HeadError."""
    found = _config(model) if model else {}
    vocab = vocab if vocab is not None else found.get("vocab")
    hidden = hidden if hidden is not None else found.get("hidden")
    name = dtype or found.get("dtype") or "bf16"
    if vocab is None or hidden is None:
        raise HeadError("the head is not known: give a model's folder or config.json, or --vocab and --hidden")
    if name not in DTYPE_NAMES:
        raise HeadError(f"--dtype is {name!r}; expected bf16, fp16 or fp32")
    for option, value, least in (("--vocab", vocab, 1), ("--hidden", hidden, 16), ("--tp", tp, 1)):
        if type(value) is not int or not least <= value <= MOST:
            raise HeadError(f"{option} is {value!r}; expected an integer from {least} to {MOST}")
    capped = found.get("softcap", False) if softcap is None else softcap
    return HeadShape(shard_of(vocab, tp), hidden, DTYPE_NAMES[name], tp, bool(capped))


def shard_of(vocab: int, tp: int) -> int:
    """Ids of the first of ``tp`` shards, as SGLang cuts a vocabulary; all of it for one."""
    if tp == 1:
        return vocab
    padded = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return min(vocab, -(-padded // tp))


def _config(model: str) -> dict[str, Any]:
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise HeadError(f"{model} is neither a model's folder nor a config.json on this machine")
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise HeadError(f"{path} is longer than {MAX_CONFIG_BYTES} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HeadError(f"{path} is no config: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise HeadError(f"{path} is no config: it holds a {type(data).__name__}")
    inner = data.get("text_config")  # a model that also sees or hears
    text = {**data, **inner} if isinstance(inner, dict) else data
    missing = [name for name in ("vocab_size", "hidden_size") if type(text.get(name)) is not int]
    if missing:
        raise HeadError(f"{path} has no integer {missing[0]}")
    dtype = text.get("torch_dtype") or text.get("dtype") or data.get("torch_dtype") or data.get("dtype")
    return {
        "vocab": text["vocab_size"],
        "hidden": text["hidden_size"],
        "dtype": dtype if isinstance(dtype, str) else None,
        "softcap": bool(text.get("final_logit_softcapping")),
    }
