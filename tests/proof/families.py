"""Servers of one small model per architecture, stock and ours: are greedy answers and logprobs the same?

    python tests/proof/families.py --out tests/proof/results/families.json

On this machine's CPU, interpreted, in float32. ``DIMENSIONS`` and what an architecture adds make a Hugging Face config,
and Transformers random weights, with a head whose logits are a few units apart. SGLang's own class of that architecture
serves them, with its head, scale, softcap and tying. Greedy requests ask for the logprobs of their prompt too;
truncated ones, for tokens alone.

different              answers with another greedy token than stock's, of "answers"
apart                  answers with the same tokens, and a logprob that differs by more than ``TOLERANCE``
largest_difference     of a logprob of stock and ours, over tokens of the same answers and their prompts
not_fused              requests of ours with a token that another path than the fused one drew

An architecture that stock SGLang does not serve here is in ``env.not_run``, with its error. The row "planted" compares
stock's answers with ours of other weights: some must be different or apart. The exit code is 1 if one is in another
row, or if a request is not fused. Takes six minutes on two cores.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from programs import make_parser, new_env, reason_of, write_result
from lab.servers import server_on_this_machine

from sgl_flashsample.tools import markov
from sgl_flashsample.tools.server import Server, ServerError, stop_all

SIDES = {"stock": "pytorch", "ours": "flashsample"}  # and their sampling backends
TOLERANCE = 2e-5
HEAD_SCALE = 20.0  # of the weights that Transformers draws, with a deviation of 0.02
PLANTED = "planted"
VOCAB = 1024
DIMENSIONS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
ALL_HEADS = {"num_key_value_heads": 4}
LATENT = ALL_HEADS | {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
WINDOW = {"sliding_window": 64}
GPT = ALL_HEADS | {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 4096}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # architecture: the type for Transformers, and what its config adds
    "ApertusForCausalLM": ("apertus", {}),
    "ArceeForCausalLM": ("arcee", {}),
    "CohereForCausalLM": ("cohere", {"logit_scale": 0.0625}),
    "Cohere2ForCausalLM": ("cohere2", {"logit_scale": 0.0625} | WINDOW),
    "DeepseekV3ForCausalLM": ("deepseek_v3", ROUTED | LATENT | {"q_lora_rank": 32, "n_shared_experts": 1}),
    "Ernie4_5_ForCausalLM": ("ernie4_5", {}),
    "GemmaForCausalLM": ("gemma", {}),
    "Gemma2ForCausalLM": (
        "gemma2",
        {"hidden_act": "gelu_pytorch_tanh", "final_logit_softcapping": None, "attn_logit_softcapping": None} | WINDOW,
    ),
    "Gemma3ForCausalLM": ("gemma3_text", WINDOW),
    "Glm4ForCausalLM": ("glm4", {}),
    "Glm4MoeForCausalLM": ("glm4_moe", ROUTED),
    "GPT2LMHeadModel": ("gpt2", GPT),
    "GPTJForCausalLM": ("gptj", GPT | {"rotary_dim": 16}),
    "GptOssForCausalLM": ("gpt_oss", EXPERTS | WINDOW | {"swiglu_limit": 7.0}),
    "GraniteForCausalLM": ("granite", {"logits_scaling": 1.25, "attention_multiplier": 0.25}),
    "GraniteMoeForCausalLM": ("granitemoe", EXPERTS | {"logits_scaling": 1.25, "attention_multiplier": 0.25}),
    "LlamaForCausalLM": ("llama", {}),
    "MiniCPMForCausalLM": ("llama", {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}),
    "MistralForCausalLM": ("mistral", {}),
    "MixtralForCausalLM": ("mixtral", EXPERTS),
    "OlmoForCausalLM": ("olmo", ALL_HEADS),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "OlmoeForCausalLM": ("olmoe", ALL_HEADS | EXPERTS),
    "OPTForCausalLM": ("opt", ALL_HEADS | {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "PersimmonForCausalLM": ("persimmon", ALL_HEADS),
    "PhiForCausalLM": ("phi", ALL_HEADS | {"intermediate_size": 256}),
    "Phi3ForCausalLM": ("phi3", {}),
    "PhiMoEForCausalLM": ("phimoe", EXPERTS),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 64}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [], "decoder_sparse_step": 1}),
    "StableLmForCausalLM": ("stablelm", {}),
    "Starcoder2ForCausalLM": ("starcoder2", {}),
    "TeleFLMForCausalLM": (
        "llama",
        {"use_mup": True, "mup_scale_factor": 1.0, "input_mult": 1.0, "output_mult": 0.5},
    ),
    "XverseForCausalLM": ("llama", {}),
}
ARGUMENTS = (
    *("--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph", "--disable-radix-cache"),
)
ENVIRONMENT = {"TRITON_INTERPRET": "1", "FLASHSAMPLE_REPORT_PATH": "1"}  # layers of some models are kernels too
PROMPTS = [[5 + i, 300 + i, 7, 600 + 3 * i] for i in range(8)]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0}
TRUNCATED = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 4, "ignore_eos": True}


def disabled_models(architecture: str) -> str:
    """SGLang's modules of other models, for its variable of models to leave out: a server would import them all."""
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations
    files = {file.stem: file.read_text() for file in Path(folder).glob("srt/models/*.py")}
    return ",".join(sorted(name for name, text in files.items() if f"class {architecture}(" not in text))


def write_model(folder: Path, architecture: str, seed: int) -> Path:
    """The folder of a checkpoint with weights of this seed."""
    model_type, added = FAMILIES[architecture]
    written = folder / f"{architecture}-{seed}"
    if not written.exists():
        config = transformers.AutoConfig.for_model(model_type, **DIMENSIONS | added)
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(HEAD_SCALE)
        model.save_pretrained(written)
        values = json.loads((written / "config.json").read_text()) | {"architectures": [architecture]}
        (written / "config.json").write_text(json.dumps(values))
        markov.write_tokenizer(written, VOCAB)
    return written


def make_server(folder: Path, architecture: str, side: str, seed: int) -> Server:
    """A server of this architecture with weights of this seed, not started."""
    return server_on_this_machine(
        write_model(folder, architecture, seed),
        list(ARGUMENTS),
        backend=SIDES[side],
        log=folder / f"{architecture}-{side}.log",
        environment=ENVIRONMENT | {"SGLANG_DISABLED_MODEL_ARCHS": disabled_models(architecture)},
        start_seconds=120.0,
    )


def answers_of(server: Server, params: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return server.generate(input_ids=PROMPTS, sampling_params=[params] * len(PROMPTS), **fields)


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    """Logprobs of the tokens of the prompt, from its second on, and of the answer."""
    meta = answer["meta_info"]
    return [entry[0] for entry in [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]]


class NotServedError(Exception):
    """Stock SGLang does not serve the architecture here."""


def compared(folder: Path, architecture: str, seeds: dict[str, int]) -> dict[str, Any]:
    """The row of two servers. Raises ServerError where ours does not start or answer."""
    servers = {side: make_server(folder, architecture, side, seed) for side, seed in seeds.items()}
    try:
        for server in servers.values():
            server.start()
        try:
            servers["stock"].wait_until_ready()
            stock = answers_of(servers["stock"], GREEDY, **LOGPROBS)
        except ServerError as error:
            raise NotServedError(reason_of(error)) from error
        servers["ours"].wait_until_ready()
        ours = answers_of(servers["ours"], GREEDY, **LOGPROBS)
        drawn = [*ours, *answers_of(servers["ours"], TRUNCATED)]
    finally:
        stop_all(servers.values())
    pairs = list(zip(stock, ours, strict=True))
    same = [pair for pair in pairs if pair[0]["output_ids"] == pair[1]["output_ids"]]
    differences = [max(abs(one - other) for one, other in zip(*map(logprobs_of, pair), strict=True)) for pair in same]
    return {
        "architecture": architecture,
        "answers": len(pairs),
        "tokens": sum(len(answer["output_ids"]) for answer in ours),
        "different": len(pairs) - len(same),
        "apart": sum(difference > TOLERANCE for difference in differences),
        "largest_difference": max(differences, default=0.0),
        "not_fused": sum({*answer["meta_info"]["flashsample_path"]} != {"fused"} for answer in drawn),
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--architectures", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    env = new_env() | {"sglang": importlib.metadata.version("sglang"), "not_run": []}
    rows: list[dict[str, Any]] = []
    cases = [(architecture, {"stock": 3, "ours": 3}) for architecture in options.architectures]
    cases.append((options.architectures[0], {"stock": 3, "ours": 4}))
    with tempfile.TemporaryDirectory() as folder:
        for number, (architecture, seeds) in enumerate(cases):
            planted = {PLANTED: "weights of another seed"} if len({*seeds.values()}) > 1 else {}
            try:
                rows.append(compared(Path(folder), architecture, seeds) | planted)
                print(f"{number + 1} of {len(cases)}: {rows[-1]}", file=sys.stderr, flush=True)
            except NotServedError as error:
                env["not_run"].append({"architecture": architecture, "reason": str(error)} | planted)
                print(f"not run: {env['not_run'][-1]}", file=sys.stderr, flush=True)
            write_result(options.out, {"env": env, "rows": rows})
    unnoticed = not any(row["different"] + row["apart"] for row in rows if PLANTED in row)
    unlike = [row for row in rows if row["different"] + row["apart"] + row["not_fused"]]
    wrong = [row["architecture"] for row in unlike if PLANTED not in row]
    print(f"{len(rows) - 1} architectures; wrong: {', '.join(wrong) or 'none'}" + "; unnoticed" * unnoticed)
    return int(bool(wrong) or unnoticed)


if __name__ == "__main__":
    sys.exit(main())
