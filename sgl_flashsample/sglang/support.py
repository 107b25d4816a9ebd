"""Which servers, devices and LM heads the fused pass does not serve, and why: the reasons in the log at start."""

from __future__ import annotations

from typing import Any

import torch

from ..cpu_path import draws_in_host_memory, unsupported_by_machine
from ..defaults import FAMILIES, family_of
from ..files import first_line
from ..kernels.draft_children import MAX_CHILDREN
from ..switches import RANKS_VARIABLE, SPECULATION_VARIABLE, switch
from . import quantised

# Algorithms whose drafts SGLang verifies in the one place that we know.
SPECULATIVE_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP", "STANDALONE", "NGRAM")
# Algorithms that are verified by default, with one draft head: measured on GPUs, and not slower.
MEASURED_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
MEASURED_ON_TWO_RANKS = ("EAGLE",)  # of these, with chains of drafts
# Algorithms whose draft model has one head and the one worker that we know.
DRAFT_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
# Parallel servers that are fused by default, as measured on GPUs: the arguments, by tensor-parallel ranks, stages and
# replicas with a head each.
MEASURED_RANKS = {
    (2, 1, 1): "--tp-size 2",
    (4, 1, 1): "--tp-size 4",
    (1, 2, 1): "--pp-size 2",
    (2, 1, 2): "--tp-size 2 --dp-size 2 --enable-dp-attention --enable-dp-lm-head",
}
MAX_EXCHANGED_IDS = 2**24  # ids travel as float32
# Settings with which SGLang's sampler looks for NaN in the logits. Not every known version has the second.
LOGIT_CHECKS = ("SGLANG_SANITIZE_NAN_LOGITS", "SGLANG_ENABLE_NAN_LOGITS_CHECK", "SGLANG_ENABLE_ASYNC_ASSERT")


def _is_set(envs: Any, name: str) -> bool:
    setting = getattr(envs, name, None)
    return setting is not None and bool(setting.get())


def unsupported_server() -> str | None:
    """Why nothing is fused under this server's arguments; None when the fused pass may run."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg, get_exec, get_flags, get_observability, get_parallel

    parallel, execution, ranks = get_parallel(), get_exec(), get_parallel().tp_size
    dump = getattr(get_observability(), "debug_tensor_dump_output_folder", None)
    several = torch.cuda.is_available() and (ranks > 1 or parallel.pp_size > 1)
    if several and (unmeasured := _unmeasured_ranks()) is not None:
        return unmeasured
    if (speculation := unsupported_speculation()) is not None:
        return speculation
    if (adapters := unsupported_adapters()) is not None:
        return adapters
    graph = execution.graph.cuda_graph_config
    checks = (
        *((f"{mode} beside DP attention without --enable-dp-lm-head", on) for mode, on in _modes_of_shared_heads()),
        ("elastic expert parallelism", is_elastic()),
        ("context parallelism", ranks > 1 and parallel.attn_cp_size > 1),
        ("a dump of tensors, which reads logits, with several ranks", ranks > 1 and (dump is not None or _dumps())),
        ("on-policy RL logprobs", execution.deterministic.rl_on_policy_target is not None),
        ("deterministic inference with several ranks", is_deterministic() and (ranks > 1 or parallel.pp_size > 1)),
        ("deterministic inference with speculative decoding", is_deterministic() and speculates()),
        (
            "deterministic inference with grammar masks of bools (--grammar-backend outlines)",
            is_deterministic() and getattr(execution.kernel, "grammar_backend", None) == "outlines",
        ),
        ("diffusion LLM", execution.dllm.dllm_algorithm is not None),
        ("PD multiplexing", get_disagg().enable_pdmux),
        ("two-batch overlap", execution.overlap.enable_two_batch_overlap),
        ("torch.compile", get_flags().capture.enable_torch_compile or execution.graph.enable_torch_compile),
        (
            "a decode graph that is not a full one",
            graph is not None and graph.decode.backend not in ("full", "disabled"),
        ),
        *((name, _is_set(envs, name)) for name in LOGIT_CHECKS),
    )
    return next((f"{reason} is not supported yet" for reason, applies in checks if applies), None)


def shares_head() -> bool:
    """Ranks of DP attention, which have requests of their own, share an LM head."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    # Newer SGLang has only the width, and no groups to ask for it where there is one rank.
    return parallel.tp_size > 1 and parallel.attn_dp_size > 1 and not parallel.enable_dp_lm_head


def spans_replicas(processor: Any) -> bool:
    """A LogitsProcessor computes the logits of all ranks of DP attention together."""
    return bool(getattr(processor, "do_tensor_parallel_all_gather_dp_attn", False))


def _modes_of_shared_heads() -> list[tuple[str, bool]]:
    """The modes in which a head that ranks of DP attention share is left to SGLang, and whether they are on."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel

    if not shares_head():
        return []
    parallel = get_parallel()
    return [
        ("attention over several ranks", parallel.attn_tp_size > 1),
        ("pipeline parallelism", parallel.pp_size > 1),
        ("PD disaggregation", get_disagg().disaggregation_mode != "null"),
        ("bounded replay", getattr(get_exec().features, "enable_encoder_swa_bounded_replay", False)),
        ("SGLANG_SCHEDULER_SKIP_ALL_GATHER", _is_set(envs, "SGLANG_SCHEDULER_SKIP_ALL_GATHER")),
    ]


def _unmeasured_ranks() -> str | None:
    """Why a server of several GPUs is left to SGLang by default, or as its user wants it; None where it is not."""
    from sglang.srt.runtime_context import get_parallel

    parallel, wanted = get_parallel(), switch(RANKS_VARIABLE)
    if wanted is False:
        return f"several GPUs are left to SGLang, as {RANKS_VARIABLE} is off"
    replicas = parallel.attn_dp_size if parallel.tp_size > 1 else 1
    if wanted or ((parallel.tp_size, parallel.pp_size, replicas) in MEASURED_RANKS and not shares_head()):
        return None
    return (
        "this parallel configuration is off by default; measured ones are: "
        f"{', '.join(MEASURED_RANKS.values())}; {RANKS_VARIABLE}=1 turns all on"
    )


def unmeasured_exchange(device: torch.device) -> str | None:
    """Why ranks that exchange by collectives are left to SGLang by default; None where they are not."""
    if device.type == "cpu" or switch(RANKS_VARIABLE):
        return None
    return (
        "SGLang's custom all-reduce, which shows that GPUs reach each other's memory, is off or not used here, and "
        f"exchanges by collectives have not been measured in servers; {RANKS_VARIABLE}=1 turns them on"
    )


def unsupported_speculation() -> str | None:
    """Why drafts cannot be verified by the fused pass; None without speculative decoding, and where they can."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_parallel, get_spec

    spec, parallel = get_spec(), get_parallel()
    if spec.speculative_algorithm is None:
        return None
    name = str(spec.speculative_algorithm).upper()
    thresholds = (spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc)
    checks = (
        (f"speculative decoding with {name}", name not in SPECULATIVE_ALGORITHMS),
        ("speculative decoding with acceptance thresholds below 1", any(value < 1 for value in thresholds)),
        ("speculative decoding by rejection sampling", bool(spec.speculative_use_rejection_sampling)),
        ("speculative decoding with a simulated acceptance", envs.SGLANG_SIMULATE_ACC_LEN.get() > 0),
        (
            "speculative decoding on a CPU without Triton's interpreter (TRITON_INTERPRET=1)",
            not torch.cuda.is_available() and draws_in_host_memory(torch.device("cpu")),
        ),
        ("speculative decoding with pipeline parallelism", parallel.pp_size > 1),
        ("speculative decoding with DP attention", parallel.tp_size > 1 and parallel.attn_dp_size > 1),
    )
    reason = next((f"{reason} is not supported yet" for reason, applies in checks if applies), None)
    wanted = switch(SPECULATION_VARIABLE)
    if reason is not None or wanted:
        return reason
    if wanted is False:
        return f"speculative decoding is left to SGLang, as {SPECULATION_VARIABLE} is off"
    chains_on_two = parallel.tp_size == 2 and name in MEASURED_ON_TWO_RANKS and spec.speculative_eagle_topk in (None, 1)
    if name in MEASURED_ALGORITHMS and not has_several_draft_heads() and (parallel.tp_size == 1 or chains_on_two):
        return None
    return (
        "this kind of speculative decoding is off by default; measured ones are, with one draft head: "
        f"{', '.join(MEASURED_ALGORITHMS)} on one GPU, {', '.join(MEASURED_ON_TWO_RANKS)} with "
        f"--speculative-eagle-topk 1 on two; {SPECULATION_VARIABLE}=1 turns all on"
    )


def unsupported_adapters() -> str | None:
    """Why the LoRA adapters of this server leave it to SGLang; None where none of them reaches the LM head.

    After our check of the head, SGLang puts another one in its place, or does not, for as long as the server runs: by
    the modules that are named, else by those of the adapters that it starts with. It refuses a later adapter of others.
    """
    from sglang.srt.runtime_context import get_lora

    lora = get_lora()
    if not lora.enable_lora:
        return None
    try:
        from sglang.srt.lora.lora_config import LoRAConfig
        from sglang.srt.lora.utils import get_normalized_target_modules

        named = [lora.lora_target_modules] if lora.lora_target_modules else []
        named = named or [LoRAConfig(adapter.lora_path).target_modules for adapter in lora.lora_paths or ()]
        modules = set().union(*map(get_normalized_target_modules, named))
    except Exception as error:  # a file that SGLang will not read either, or an SGLang that reads it otherwise
        return f"the modules of the LoRA adapters cannot be read ({first_line(error)})"
    return "LoRA of the LM head is not supported yet" if modules & {"all", "lm_head"} else None


def unsupported_drafts() -> str | None:
    """Why the arguments of this server leave its drafts to SGLang; None where they do not."""
    from sglang.srt.runtime_context import get_parallel, get_spec

    spec, parallel = get_spec(), get_parallel()
    name = str(spec.speculative_algorithm).upper()
    checks = (
        (f"{name} drafts", name not in DRAFT_ALGORITHMS),
        ("several draft heads (--enable-multi-layer-eagle)", has_several_draft_heads()),
        (
            f"a tree of drafts with more than {MAX_CHILDREN} children (--speculative-eagle-topk)",
            (spec.speculative_eagle_topk or 1) > MAX_CHILDREN,
        ),
        ("drafts in a pipeline", parallel.pp_size > 1),
    )
    return next((f"drawing {reason} is not supported yet" for reason, applies in checks if applies), None)


def has_several_draft_heads() -> bool:
    """Each draft of a chain has a head of its own. Some known versions of SGLang lack the setting."""
    from sglang.srt.runtime_context import get_spec

    return bool(getattr(get_spec(), "enable_multi_layer_eagle", False))


def draft_model_has_its_own_head() -> bool:
    """The draft model keeps the LM head that it is loaded with. EAGLE's is replaced by the target's."""
    from sglang.srt.runtime_context import get_spec

    return str(get_spec().speculative_algorithm).upper() == "STANDALONE"


def is_deterministic() -> bool:
    """A row must not depend on its batch (``--enable-deterministic-inference``)."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def keeps_backend(arguments: Any) -> bool:
    """Our backend stays in SGLang's deterministic mode. arguments: SGLang's ServerArgs."""
    return arguments.rl_on_policy_target is None


def speculates() -> bool:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm is not None


def is_elastic() -> bool:
    """Ranks may join this server while it runs."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().moe.elastic_ep_backend is not None


def _dumps() -> bool:
    """SGLang's dumper may read logits, on some ranks alone."""
    try:
        from sglang.srt.debug_utils.dumper import dumper

        return bool(dumper.may_enable)
    except (ImportError, AttributeError):
        return False


def unsupported_screens() -> str | None:
    """Why no head of this server may have a screen, whatever its device; None when one may have.

    A screen is a copy of the head: no hook sees some writes to the head, or additions to its output.
    """
    from sglang.srt.runtime_context import get_model

    model = get_model()
    checks = (
        ("the weights are shared with other processes", model.weight_cache_mode != "off"),
        (
            "other processes may write to the weights (a transfer engine)",
            model.remote_instance_weight_loader_start_seed_via_transfer_engine
            or model.remote_instance_weight_loader_backend != "nccl",
        ),
    )
    return next((reason for reason, applies in checks if applies), None)


def unsupported_device(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device; None when they can."""
    if device.type == "cpu":
        return unsupported_by_machine() if draws_in_host_memory(device) else None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the device is {device.type}{' (ROCm)' if torch.version.hip else ''}; CUDA is needed"
    major, minor = torch.cuda.get_device_capability(device)
    if family_of(f"{major}.{minor}") is None:
        return f"compute capability {major}.{minor} is not known: {min(FAMILIES)}.x to {max(FAMILIES)}.x are"
    return None


def unsupported_head(processor: Any, lm_head: Any) -> str | None:
    """Why this LogitsProcessor and LM head are left to SGLang; None when the fused pass computes what they do."""
    from sglang.srt.layers.logits_processor import LogitsProcessor, should_apply_lm_head_quant_method
    from sglang.srt.runtime_context import get_parallel

    weight = getattr(lm_head, "weight", None)
    kind = type(processor)
    overridden = [
        n for n in ("forward", "_get_logits", "_compute_lm_head") if getattr(kind, n) is not getattr(LogitsProcessor, n)
    ]
    if overridden:
        return f"{kind.__name__} has its own {overridden[0]}"
    if hasattr(lm_head, "set_lora") and hasattr(lm_head, "apply_lora"):
        return "the LM head has LoRA adapters"
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return "the LM head has no two-dimensional weight (GPTQ, AWQ, GGUF or packed)"
    hidden_dtype, rows = weight.dtype, weight.shape[0]
    if weight.dtype is quantised.E4M3:
        if (reason := quantised.unsupported(lm_head)) is not None:
            return reason
        scaled = quantised.read(lm_head)
        hidden_dtype, rows = scaled.hidden_dtype, scaled.weight.shape[0]
    elif weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        packing = quantised.PACKED.get(weight.dtype)
        return f"the LM head is {weight.dtype}" + (f" ({packing})" if packing else "")
    elif should_apply_lm_head_quant_method(lm_head, getattr(lm_head, "quant_method", None)):
        return f"the LM head is quantised ({type(lm_head.quant_method).__name__})"
    elif weight.stride(1) != 1:
        return f"the LM head's rows are not contiguous (strides {weight.stride()})"
    if getattr(lm_head, "use_intel_amx_backend", False):
        return "the LM head is packed for AMX"
    in_host_memory = draws_in_host_memory(weight.device)
    if is_deterministic():
        if in_host_memory:
            return "deterministic inference on a CPU needs Triton's interpreter (TRITON_INTERPRET=1)"
        if weight.dtype is quantised.E4M3:
            return "deterministic inference with a quantised LM head is not supported yet"
    if weight.device.type == "cpu" and hidden_dtype is torch.bfloat16 and not in_host_memory:
        return "bfloat16 is wrong in Triton's interpreter"
    if processor.return_full_logits:
        return "full logits are returned"
    parallel, ranks = get_parallel(), 1
    if not processor.do_tensor_parallel_all_gather and parallel.tp_size > 1 and parallel.attn_tp_size > 1:
        return "each rank has the whole LM head, which is not supported with several ranks that have the same batches"
    if processor.do_tensor_parallel_all_gather:
        if in_host_memory:
            return "several ranks on CPUs exchange by kernels, which need Triton's interpreter (TRITON_INTERPRET=1)"
        if getattr(processor, "use_tp_lm_head_all_to_all", False):
            return "the ranks exchange logits by an all-to-all (--enable-tp-lm-head-all-to-all)"
        ranks = getattr(lm_head, "tp_size", 1)
        gathered = parallel.attn_tp_size if processor.use_attn_tp_group else parallel.tp_size
        if ranks != gathered:
            return f"the logits are gathered over {gathered} ranks, but the LM head is divided over {ranks}"
        if getattr(lm_head, "num_added_embeddings", 0):
            return "the LM head has ids that were added to the vocabulary, which is not supported with several ranks"
        if processor.vocab_size > MAX_EXCHANGED_IDS:
            ids = f"the vocabulary has {processor.vocab_size} ids"
            return f"{ids}; with several ranks, up to {MAX_EXCHANGED_IDS} are supported"
    if processor.vocab_size > ranks * rows:
        return f"the vocabulary has {processor.vocab_size} ids, the LM head {ranks * rows} rows"
    return unsupported_device(weight.device)
