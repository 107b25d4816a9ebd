"""Which SGLang versions this release knows, and what it needs of each hook target."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil

from ..switches import ANY_VERSION_VARIABLE, switch

OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)
LOADS_HEAD_SCALES = (0, 5, 19)  # the oldest that loads an LM head of compressed-tensors with its scales

# Hook target -> the leading parameters that our wrapper relies on, alike in all known versions.
HOOK_TARGETS: dict[str, tuple[str, ...]] = {
    "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits": (
        "self",
        "hidden_states",
        "lm_head",
        "logits_metadata",
        "embedding_bias",
        "use_logits_buffer",
    ),
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": ("self",),
    "sglang.srt.model_executor.model_runner.ModelRunner._preprocess_logits": ("self", "logits_output", "sampling_info"),
    "sglang.srt.model_executor.model_runner.ModelRunner.sample": ("self", "logits_output", "forward_batch"),
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch": (
        "self",
        "batch",
        "vocab_size",
    ),
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_filter_batch": (
        "self",
        "keep_indices",
        "keep_indices_device",
    ),
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_merge_batch": ("self", "other"),
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward": ("self",),
}


# Targets in a server with speculative decoding; some functions have another name in other versions.
_LOGPROBS = "sglang.srt.layers.logprob_processor.compute_spec"
SPECULATION_TARGETS: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "sglang.srt.speculative.eagle_utils.eagle_sample": ("verify_input", "batch", "logits_output", "grammar_mask"),
    },
    {
        f"{_LOGPROBS}_logprobs": ("batch", "logits_output", "predict", "accept_index"),
        f"{_LOGPROBS}_v2_logprobs": ("batch", "logits_output", "predict", "accept_index"),
    },
)

# Targets in a server whose drafts we draw: hooked functions, and others that show what a draft model has computed.
DRAFT_TARGETS: dict[str, tuple[str, ...]] = {
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_cuda_graphs": ("self",),
    "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation": ("self", "batch"),
    "sglang.srt.speculative.eagle_worker_v2.draft_topk1_postprocess": (
        "next_token_logits",
        "positions",
        "draft_tokens",
        "draft_token_column",
    ),
}
# Targets in such a server whose drafts change their vocabulary: each captures one of SGLang's CUDA graphs of drafts.
DRAFT_GRAPH_TARGETS: dict[str, tuple[str, ...]] = {
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.capture_one_shape": ("self",),
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.capture_one_shape": (
        "self",
    ),
}
READ_CALLS: dict[str, tuple[str, ...]] = {
    "sglang.srt.layers.logits_processor.LogitsProcessor.forward": (
        "self",
        "input_ids",
        "hidden_states",
        "lm_head",
        "logits_metadata",
    ),
}

# Targets in a server whose ranks have requests of their own and share an LM head.
REPLICA_TARGETS: dict[str, tuple[str, ...]] = {
    "sglang.srt.managers.scheduler_components.dp_attn.prepare_mlp_sync_batch_raw": ("local_batch", "model_runner"),
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": ("self", "forward_batch"),
}

# Targets of prompt logprobs: computed in a prefill; asked for once more after a retraction.
PROMPT_TARGETS: dict[str, tuple[str, ...]] = {
    "sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward": (
        "self",
        "pruned_states",
        "sample_indices",
        "input_logprob_indices",
        "token_to_seq_idx",
        "lm_head",
        "get_logits_fn",
        "logits_metadata",
        "skip_chunking_for_dp_attn",
    ),
    "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend": ("self",),
}


# The functions that put SGLang's own sampling backend in the place of another one in deterministic mode: where its
# callers find them, in newer releases and in 0.5.17.
_DETERMINISTIC_BACKENDS = (
    "sglang.srt.arg_groups.attention_hook._deterministic_sampling_backend",
    "sglang.srt.arg_groups.overrides._deterministic_sampling_backend",
)


def deterministic_backend_target() -> str | None:
    """The hook target that decides the sampling backend in deterministic mode; None where it is not found."""
    return next((target for target in _DETERMINISTIC_BACKENDS if unsupported_target(target, ("view",)) is None), None)


def sglang_version() -> str:
    """The installed SGLang's version, or "not installed"."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def unsupported_version(version: str) -> str | None:
    """Why the fused pass stays off for this SGLang version; None when it is known (or trying it is allowed)."""
    if switch(ANY_VERSION_VARIABLE):
        return None
    known = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    numbers = _numbers(version)
    if len(numbers) == 3 and OLDEST <= numbers <= NEWEST:
        return None
    return f"SGLang {version} is not among the known versions {known} ({ANY_VERSION_VARIABLE}=1 tries it)"


def drops_head_scales(version: str) -> bool:
    """This SGLang takes the weight of a quantised LM head for one that is not."""
    return () < _numbers(version) < LOADS_HEAD_SCALES


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 17) of "0.5.17"; () where it has other parts."""
    try:
        return tuple(int(part) for part in version.split(".")[:3])
    except ValueError:
        return ()


def unsupported_target(target: str, want: tuple[str, ...] | None = None) -> str | None:
    """Why ``target`` cannot be hooked in this SGLang; None when it has the leading parameters ``want``, by default
    those of ``HOOK_TARGETS``."""
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        return f"{target} is missing ({error})"
    want = HOOK_TARGETS[target] if want is None else want
    have = tuple(inspect.signature(inspect.unwrap(function)).parameters)
    if have[: len(want)] != want:
        return f"{target} has parameters {', '.join(have)}; expected {', '.join(want)} first"
    return None


def entry_point_found() -> bool:
    """SGLang, in this Python, would discover the plugin."""
    points = importlib.metadata.entry_points(group="sglang.srt.plugins", name="flashsample")
    return any(point.value.startswith("sgl_flashsample.") for point in points)
