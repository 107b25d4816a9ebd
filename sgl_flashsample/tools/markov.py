"""A real Hugging Face checkpoint whose next-token distribution is known in closed form.

Every attention and MLP block writes zeros to the residual stream, so the hidden state before the LM head is
the RMS-normalised embedding of the last token alone, and

    p(next | last) = softmax(lm_head @ rmsnorm(embedding[last]) / temperature)

whatever came before: a Markov chain, computed by the model at the full cost of its size. Each token belongs
to one of a few contexts; contexts are peaked (top probability about 0.9), Zipf-like or almost flat, as real
ones are. Embeddings are +-1 patterns of a Hadamard matrix, which RMSNorm leaves unchanged and whose products
with the head's random weights exercise the hardware like a real model's.

    python -m sgl_flashsample.tools.markov OUT --size qwen3-1.7b
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

_ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "granite": "GraniteForCausalLM",
}
_SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Size:
    """Dimensions of a decoder, in Hugging Face's names. ``softcap`` sets final_logit_softcapping; ``logits_scaling``
    divides the logits (granite only). num_experts: of each layer, of which a token takes num_experts_per_tok
    (qwen3_moe only); intermediate_size is then that of an expert."""

    arch: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    dtype: str = "bfloat16"
    tied: bool = False
    softcap: float | None = None
    logits_scaling: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0


SIZES = {
    "tiny": Size("qwen3", 64, 128, 2, 4, 2, 16, 1024, "float32"),
    "tiny-llama-tied": Size("llama", 64, 128, 2, 4, 2, 16, 1000, "float32", tied=True),
    "tiny-softcap": Size("qwen3", 64, 128, 2, 4, 2, 16, 1024, "float32", softcap=8.0),
    "tiny-granite": Size("granite", 64, 128, 2, 4, 2, 16, 1024, "float32", logits_scaling=1.25),
    "tiny-moe": Size("qwen3_moe", 64, 32, 2, 4, 2, 16, 1024, "float32", num_experts=4, num_experts_per_tok=2),
    "small": Size("qwen3", 1024, 3072, 4, 16, 8, 128, 151936),
    "smollm2-135m": Size("llama", 576, 1536, 30, 9, 3, 64, 49152, tied=True),
    "qwen3-0.6b": Size("qwen3", 1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-1.7b": Size("qwen3", 2048, 6144, 28, 16, 8, 128, 151936),
    "qwen3-8b": Size("qwen3", 4096, 12288, 36, 32, 8, 128, 151936),
    "qwen3-30b-a3b": Size("qwen3_moe", 2048, 768, 48, 32, 4, 128, 151936, num_experts=128, num_experts_per_tok=8),
    "llama-3.2-1b": Size("llama", 2048, 8192, 16, 32, 8, 64, 128256),
    "llama-3.1-8b": Size("llama", 4096, 14336, 32, 32, 8, 128, 128256),
}
CONTEXTS = 16
NORM_EPS = 1e-6


class MarkovModel:
    """The checkpoint's embedding and head, and the distribution that follows from them.

    context: ``[V]`` int64, tokens with equal context have equal next-token distributions (untied heads only).
    """

    def __init__(self, size: Size, embedding: torch.Tensor, head: torch.Tensor) -> None:
        self.size, self.embedding, self.head = size, embedding, head
        self.context = _contexts(size)
        self._by_token: dict[
            int, torch.Tensor
        ] = {}  # logits after representatives; each computation converts the head to float64

    def representative(self, tokens: torch.Tensor) -> torch.Tensor:
        """For each of ``[N]`` tokens, one token that stands for all with the same next-token distribution."""
        if self.size.tied:
            return tokens
        first = torch.stack([(self.context == context).nonzero()[0, 0] for context in range(CONTEXTS)])
        return first[self.context[tokens]]

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[N, V]`` float64 logits after each of ``[N]`` tokens, rounded where the model rounds."""
        if self.size.tied:
            return self._computed(tokens)
        wanted = self.representative(tokens).tolist()
        if new := [token for token in set(wanted) if token not in self._by_token]:
            self._by_token.update(zip(new, self._computed(torch.tensor(new)), strict=True))
        return torch.stack([self._by_token[token] for token in wanted])

    def _computed(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.embedding[tokens].float()
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + NORM_EPS)
        logits = states.to(self.embedding.dtype).double() @ self.head.double().T
        logits = logits.to(self.head.dtype)
        if self.size.logits_scaling is not None:
            logits = logits * (1.0 / self.size.logits_scaling)
        logits = logits.double()
        if self.size.softcap is not None:
            logits = self.size.softcap * torch.tanh(logits / self.size.softcap)
        return logits

    def distribution(self, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """``[N, V]`` float64 next-token probabilities."""
        return torch.softmax(self.logits(tokens) / temperature, -1)

    @classmethod
    def load(cls, folder: Path) -> MarkovModel:
        """The model of a folder that ``write`` made."""
        from safetensors import safe_open

        size = Size(**json.loads((folder / "markov.json").read_text())["size"])
        with safe_open(folder / "model.safetensors", framework="pt") as tensors:
            embedding = tensors.get_tensor("model.embed_tokens.weight")
            head = embedding if size.tied else tensors.get_tensor("lm_head.weight")
        return cls(size, embedding, head)


def _contexts(size: Size) -> torch.Tensor:
    ids = torch.arange(size.vocab_size)
    return (ids * 2654435761 % 2**32 >> 16) % CONTEXTS


def _hadamard_rows(hidden_size: int) -> torch.Tensor:
    """``[CONTEXTS, hidden_size]`` of +-1 with orthogonal rows."""
    order = hidden_size & -hidden_size  # the largest power of two that divides it
    if order < CONTEXTS:
        raise ValueError(f"hidden_size is {hidden_size}; expected a multiple of {CONTEXTS}")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix[:CONTEXTS].repeat(1, hidden_size // order)


def _wanted_logits(size: Size, generator: torch.Generator) -> torch.Tensor:
    """``[V, CONTEXTS]``: peaked, Zipf-like and flat contexts, each with its own order of tokens."""
    vocab = size.vocab_size
    columns = []
    for context in range(CONTEXTS):
        rank = torch.randperm(vocab, generator=generator).float()
        kind = context % 4
        if kind == 3:
            column = 0.5 * torch.randn(vocab, generator=generator)
        else:
            column = -(1.1, 1.4, 1.8)[kind] * torch.log(rank + 2.7)
            if kind == 0:
                top = int(rank.argmin())
                others = torch.logsumexp(column[torch.arange(vocab) != top], 0)
                column[top] = others + 2.2  # probability 0.9
        columns.append(column - column.mean())
    wanted = torch.stack(columns, 1)
    wanted[: len(_SPECIAL_TOKENS)] = wanted.min(0).values - 3
    return wanted


def build(size: Size, seed: int = 0, error: float = 0.0) -> MarkovModel:
    """Embedding and head of a checkpoint; the same for the same size, seed and error. error: standard deviation of a
    normal error of each logit, for a draft model of the checkpoint without any."""
    generator = torch.Generator().manual_seed(seed)
    dtype, hidden = _DTYPES[size.dtype], size.hidden_size
    patterns = _hadamard_rows(hidden)
    wanted = _wanted_logits(size, generator)
    if error:
        wanted += error * torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed + 2))
    head = wanted @ patterns / hidden
    head += torch.randn(size.vocab_size, hidden, generator=generator) * (0.2 / hidden**0.5)
    head = head.to(dtype)
    embedding = head if size.tied else patterns[_contexts(size)].to(dtype)
    return MarkovModel(size, embedding, head)


def write(folder: Path, size: Size, seed: int = 0, error: float = 0.0) -> MarkovModel:
    """Write config, tokenizer and weights to ``folder`` unless they are there already; return the truth. error: as of
    ``build``."""
    marker = folder / "markov.json"
    description = json.dumps({"size": dataclasses.asdict(size), "seed": seed, "error": error})
    if marker.is_file() and marker.read_text() == description:
        return MarkovModel.load(folder)
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    model = build(size, seed, error)
    (folder / "config.json").write_text(json.dumps(config(size), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    write_tokenizer(folder, size.vocab_size)
    save_file(_weights(model, seed), folder / "model.safetensors", metadata={"format": "pt"})
    marker.write_text(description)  # last: its presence means the folder is complete
    return model


def _weights(model: MarkovModel, seed: int) -> dict[str, torch.Tensor]:
    size, dtype = model.size, _DTYPES[model.size.dtype]
    generator = torch.Generator().manual_seed(seed + 1)

    def dense(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)

    hidden, head_dim = size.hidden_size, size.head_dim
    queries, keys = size.num_attention_heads * head_dim, size.num_key_value_heads * head_dim
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": torch.ones(hidden, dtype=dtype)}
    if not size.tied:
        tensors["lm_head.weight"] = model.head
    for layer in range(size.num_hidden_layers):
        weights = {
            "input_layernorm": torch.ones(hidden, dtype=dtype),
            "post_attention_layernorm": torch.ones(hidden, dtype=dtype),
            "self_attn.q_proj": dense(queries, hidden),
            "self_attn.k_proj": dense(keys, hidden),
            "self_attn.v_proj": dense(keys, hidden),
            "self_attn.o_proj": torch.zeros(hidden, queries, dtype=dtype),
        }
        if size.num_experts:
            weights["mlp.gate"] = dense(size.num_experts, hidden)
        for mlp in [f"mlp.experts.{expert}" for expert in range(size.num_experts)] or ["mlp"]:
            weights[f"{mlp}.gate_proj"] = dense(size.intermediate_size, hidden)
            weights[f"{mlp}.up_proj"] = dense(size.intermediate_size, hidden)
            weights[f"{mlp}.down_proj"] = torch.zeros(hidden, size.intermediate_size, dtype=dtype)
        if size.arch in ("qwen3", "qwen3_moe"):
            weights |= {f"self_attn.{name}_norm": torch.ones(head_dim, dtype=dtype) for name in "qk"}
        tensors |= {f"model.layers.{layer}.{name}.weight": weight for name, weight in weights.items()}
    return tensors


def config(size: Size) -> dict[str, object]:
    """The Hugging Face config of a size."""
    values: dict[str, object] = {
        "architectures": [_ARCHITECTURES[size.arch]],
        "model_type": size.arch,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_hidden_layers,
        "num_attention_heads": size.num_attention_heads,
        "num_key_value_heads": size.num_key_value_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab_size,
        "tie_word_embeddings": size.tied,
        "torch_dtype": size.dtype,
        "max_position_embeddings": 40960,  # as Qwen3 has
        "rms_norm_eps": NORM_EPS,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if size.num_experts:
        values |= {
            "num_experts": size.num_experts,
            "num_experts_per_tok": size.num_experts_per_tok,
            "moe_intermediate_size": size.intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if size.softcap is not None:
        values["final_logit_softcapping"] = size.softcap
    if size.logits_scaling is not None:
        values |= {
            "logits_scaling": size.logits_scaling,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": size.head_dim**-0.5,
        }
    return values


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer: three special tokens, the 256 bytes, and words that only the model produces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*_SPECIAL_TOKENS, *alphabet]
    names += [f"Ġw{i}" for i in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names[:vocab_size])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": 40960,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a checkpoint whose next-token distribution is known.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.folder, SIZES[options.size], options.seed)
    print(f"{options.size} written to {options.folder}")
