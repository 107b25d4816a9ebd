"""The LM head of a model: from its folder or ``config.json``, or as it is spelled out. Needs no torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .files import BadFileError, one_line, read_plain
from .kernels.config import cdiv
from .tables.schema import HeadShape

MAX_CONFIG_BYTES = 1 << 22
MAX_DIMENSION = 1 << 24
# SGLang pads a vocabulary to a multiple of this before it divides it, and of this times the ranks where they do not
# divide that.
VOCAB_MULTIPLE = 64
DTYPE_NAMES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"), "e4m3"),
}


class HeadError(ValueError):
    """A model or a shape that gives no LM head; the message is one line."""


def head_of(
    model: str | None,
    vocab: int | None = None,
    hidden: int | None = None,
    dtype: str | None = None,
    softcap: bool | None = None,
    tp: int = 1,
) -> HeadShape:
    """The head of ``model`` (a folder, a ``config.json``, or a hub's name), or its first shard for ``tp`` ranks.
    Explicit arguments take precedence over the config. Raises HeadError."""
    given = [name for name, value in (("vocab_size", vocab), ("hidden_size", hidden)) if value is not None]
    if model == "":
        raise HeadError("the model's name is empty: expected a model's folder, its config.json or a hub's name")
    text = _text_config(model, given) if model else {}
    vocab = text.get("vocab_size") if vocab is None else vocab
    hidden = text.get("hidden_size") if hidden is None else hidden
    if vocab is None or hidden is None:
        raise HeadError("the head is not known: give a model's folder or config.json, or --vocab and --hidden")
    config_dtype = text.get("torch_dtype") or text.get("dtype")
    dtype = dtype or (config_dtype if isinstance(config_dtype, str) else "bf16")
    if dtype not in DTYPE_NAMES:
        raise HeadError(f"--dtype is {dtype!r}; expected bf16, fp16, fp32 or e4m3")
    for option, value, least in (("--vocab", vocab, 1), ("--hidden", hidden, 16), ("--tp", tp, 1)):
        if type(value) is not int or not least <= value <= MAX_DIMENSION:
            raise HeadError(f"{option} is {value!r}; expected an integer from {least} to {MAX_DIMENSION}")
    capped = bool(text.get("final_logit_softcapping")) if softcap is None else softcap
    return HeadShape(vocab=shard_of(vocab, tp), hidden=hidden, dtype=DTYPE_NAMES[dtype], tp=tp, softcap=capped)


def shard_of(vocab: int, tp: int) -> int:
    """The rows of the weight on each of ``tp`` ranks, as SGLang divides a vocabulary; of one rank, the real ids."""
    if tp == 1:
        return vocab
    multiple = VOCAB_MULTIPLE if cdiv(vocab, VOCAB_MULTIPLE) * VOCAB_MULTIPLE % tp == 0 else VOCAB_MULTIPLE * tp
    return cdiv(vocab, multiple) * multiple // tp


def config_file(model: str) -> Path:
    """The config of a model's folder, of a file, or of a hub's name: from the Hugging Face cache, else from the hub.
    Raises HeadError where there is none."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise HeadError(f"{model} is a folder without a config.json; expected a model's folder")
    if path.exists():
        return path
    with contextlib.suppress(Exception):  # no such package; no hub's name; no such model there; no network
        import huggingface_hub

        cached = huggingface_hub.try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        # A download is tried for half a minute where there is no network. This is tried once.
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(model, "config.json"))
        return Path(huggingface_hub.hf_hub_download(model, "config.json"))
    raise HeadError(
        f"{model} is neither a model's folder nor a config.json on this machine, nor a model that could be fetched "
        "from the Hugging Face hub"
    )


def _defaults_of(config: dict[str, Any]) -> dict[str, Any]:
    """The entries of a text model's config, with those that transformers fills in: Gemma 3's has no vocabulary size.
    Empty without transformers, or where it does not know the model."""
    with contextlib.suppress(Exception):
        from transformers import AutoConfig

        return AutoConfig.for_model(**config).get_text_config().to_dict()
    return {}


def _text_config(model: str, given: Collection[str]) -> dict[str, Any]:
    """The config's entries; of a multimodal model, those of its text model. given: names that it need not have."""
    path = config_file(model)
    try:
        # Not ``files.parse_json``: configs of state-space models hold Infinity.
        config = json.loads(read_plain(path, MAX_CONFIG_BYTES))
    except (BadFileError, ValueError, RecursionError) as error:
        raise HeadError(f"{path} is no config: {one_line(str(error))}") from None
    if not isinstance(config, dict):
        raise HeadError(f"{path} is no config: it holds a {type(config).__name__}")
    text = dict(config)
    if isinstance(inner := config.get("text_config"), dict):
        text |= {name: value for name, value in inner.items() if value is not None}
    if any(name not in text for name in ("vocab_size", "hidden_size")):
        text = _defaults_of(config) | text
    for name in ("vocab_size", "hidden_size"):
        if name not in given and type(text.get(name)) is not int:
            raise HeadError(f"{path} has no integer {name}")
    return text
