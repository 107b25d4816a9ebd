"""Draft models for the checkpoints of ``markov.py``, as SGLang loads them for EAGLE, EAGLE3 and MTP. The one of
STANDALONE is ``markov.write`` with an error.

Each has one layer, whose attention and MLP write zeros, as the target's do. For EAGLE and MTP its hidden state is made
from the token alone, so a draft does not depend on what came before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sgl_flashsample.tools import markov


def write_eagle(folder: Path, size: markov.Size, error: float = 0.4) -> None:
    """The hidden state of the target, with a normal error of ``error`` per element, under the target's LM head."""
    hidden = size.hidden_size
    of_token = _noisy_identity(hidden, error)
    weights = _layer(size, inputs=hidden) | {
        "fc.weight": torch.cat([of_token, torch.zeros_like(of_token)], 1),
        "fc.bias": torch.zeros(hidden),
    }
    config = markov.config(size) | {"architectures": ["LlamaForCausalLMEagle"]}
    _write(folder, size, weights, config | {"model_type": "llama", "num_hidden_layers": 1})


def write_eagle3(folder: Path, size: markov.Size, hot_ids: int) -> None:
    """A draft model with a vocabulary of ``hot_ids`` ids, every second one of the target's, and a random LM head: it
    shows what drafts cost, and few are accepted."""
    generator, hidden = torch.Generator().manual_seed(7), size.hidden_size
    weights = _layer(size, inputs=2 * hidden)
    norms = ("layers.0.hidden_norm", "layers.0.input_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    weights["fc.weight"] = 0.1 * torch.randn(hidden, 3 * hidden, generator=generator)
    weights["lm_head.weight"] = torch.randn(hot_ids, hidden, generator=generator)
    weights["d2t"] = torch.arange(hot_ids)  # added to the draft model's id
    config = markov.config(size) | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": hot_ids}
    _write(folder, size, weights, config | {"model_type": "llama", "num_hidden_layers": 1})


def write_mtp(folder: Path, size: markov.Size, error: float = 0.4) -> markov.MarkovModel:
    """The target as a MiMo, another architecture with the same tokens, and one more layer for the next token but one,
    whose hidden state is the target's with a normal error of ``error`` per element. Returns the truth."""
    from safetensors.torch import load_file

    model = markov.write(folder, size)
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] == ["MiMoForCausalLM"]:
        return model
    weights = load_file(folder / "model.safetensors")
    weights = {name: weight for name, weight in weights.items() if "_norm" not in name}
    heads = {"q": size.num_attention_heads, "k": size.num_key_value_heads, "v": size.num_key_value_heads}
    for layer in range(size.num_hidden_layers):
        biases = {name: torch.zeros(count * size.head_dim) for name, count in heads.items()}
        weights |= {f"model.layers.{layer}.self_attn.{name}_proj.bias": bias for name, bias in biases.items()}
    first, mtp = "model.layers.0.", "model.mtp_layers.0."
    weights |= {name.replace(first, mtp): weight.clone() for name, weight in weights.items() if first in name}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    weights |= {f"{mtp}{name}.weight": torch.ones(size.hidden_size) for name in norms}
    of_token = _noisy_identity(size.hidden_size, error)
    weights[f"{mtp}input_proj.weight"] = torch.cat([torch.zeros_like(of_token), of_token], 1)
    architecture = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    _write(folder, size, weights, config | architecture)
    return model


def _layer(size: markov.Size, inputs: int) -> dict[str, torch.Tensor]:
    """inputs: elements that the attention reads."""
    generator, hidden, inner = torch.Generator().manual_seed(8), size.hidden_size, size.intermediate_size
    queries, keys = size.num_attention_heads * size.head_dim, size.num_key_value_heads * size.head_dim
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return {
        **{
            f"layers.0.self_attn.{name}.weight": 0.02 * torch.randn(rows, inputs, generator=generator)
            for name, rows in projections.items()
        },
        "layers.0.self_attn.o_proj.weight": torch.zeros(hidden, queries),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
        "layers.0.mlp.gate_proj.weight": torch.zeros(inner, hidden),
        "layers.0.mlp.up_proj.weight": torch.zeros(inner, hidden),
        "layers.0.mlp.down_proj.weight": torch.zeros(hidden, inner),
    }


def _noisy_identity(width: int, error: float) -> torch.Tensor:
    """``[width, width]``; elements of its input are +-1."""
    noise = torch.randn(width, width, generator=torch.Generator().manual_seed(6))
    return torch.eye(width) + error / width**0.5 * noise


def _write(folder: Path, size: markov.Size, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, size.dtype)
    weights = {name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # last: its presence means that all is there
