"""What a tile becomes on a GPU, without a GPU: real cubins, and the registers, spills and shared memory they take."""

from __future__ import annotations

import dataclasses
import re

import torch
import triton
from sgl_flashsample.autotune.cubin import register_usage
from sgl_flashsample.kernels.bound_truncated import bound_truncated_kernel
from sgl_flashsample.kernels.draw_screened import draw_screened_kernel
from sgl_flashsample.kernels.draw_top_k import key_shift
from sgl_flashsample.kernels.draw_truncated import draw_truncated_kernel
from sgl_flashsample.kernels.head import TRITON_DTYPES, block_of_spans
from sgl_flashsample.kernels.int8_head import ID_ROWS
from sgl_flashsample.kernels.list_groups import list_groups_kernel
from sgl_flashsample.kernels.list_ids import _GROUPS_AT_ONCE, _WARPS, list_ids_kernel
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample_kernel
from sgl_flashsample.kernels.part import left_of
from sgl_flashsample.kernels.quantize_hidden import quantize_hidden_kernel
from sgl_flashsample.kernels.reduce_parts import reduce_parts_kernel
from sgl_flashsample.kernels.rescore_groups import rescore_groups_kernel
from sgl_flashsample.kernels.rounds import Round
from sgl_flashsample.kernels.sample_logits import sample_logits_kernel
from sgl_flashsample.kernels.screen_head import screen_head_kernel
from sgl_flashsample.kernels.search_truncated import search_truncated_kernel
from sgl_flashsample.kernels.tiles import MOST_PARTS, DrawConfig, ReadConfig, ScreenConfig, TileConfig
from sgl_flashsample.kernels.verify_ids import verify_ids_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sgl_flashsample.resolution import DTYPE_NAMES

_ROWS = {"temperature_ptr": "*fp32", "seed_ptr": "*i64", "position_ptr": "*i64"}
_OUTPUTS = {"token_ptr": "*i64", "best_score_ptr": "*fp32", "logprob_ptr": "*fp32"}
_ROWS |= {"top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
_EDITS = {"edit_rows_ptr": "*i32", "mask_ptr": "*i32"} | dict.fromkeys(
    ("additive_ptr", "scaling_ptr", "bias_ptr"), "*fp32"
)
_EDITS |= dict.fromkeys(("mask_words", "given_edits"), "i32")
_EDITS |= dict.fromkeys(("additive_stride", "scaling_stride", "mask_stride", "bias_stride"), "i32")
_PARTS = {"score_ptr": "*fp32", "group_ptr": "*i32", "logits_ptr": "*fp32", "lse_ptr": "*fp32"}
_SMS = 132  # multiprocessors of the device compiled for, about: it decides how much a part leaves behind


@dataclasses.dataclass(frozen=True)
class Resources:
    """Per program: shared memory in bytes, registers per thread, and bytes of local memory per thread (spills). loaded:
    pointer arguments that the kernel loads from."""

    shared: int
    registers: int
    spilled: int
    loaded: tuple[str, ...] = ()


def resources_of_lm_head_sample(
    capability: int,
    hidden_size: int,
    dtype: torch.dtype,
    tile: TileConfig,
    *,
    return_logprob: bool = False,
    softcap: bool = False,
    truncate: bool = False,
    edits: bool = False,
    whole_groups: bool = True,
) -> Resources:
    """Compile the fused kernel for compute capability ``capability`` (80, 90, 100, ...)."""
    name = DTYPE_NAMES[dtype]
    pointers = {
        "weight": f"tensordesc<{name}[{tile.block_v}, {tile.block_d}]>" if tile.tma else f"*{name}",
        "hidden": f"tensordesc<{name}[{tile.block_b}, {tile.block_d}]>" if tile.hidden_tma else f"*{name}",
        **_PARTS,
        "peak_ptr": "*fp32",
        "kept_ptr": "*bf16" if dtype is torch.bfloat16 and not softcap and not edits else "*fp32",
        "second_ptr": "*fp32",
        "arrived_ptr": "*i32",
    }
    constants = {
        "D": hidden_size,
        "LOGITS_DTYPE": TRITON_DTYPES[dtype],
        "HAS_SCALE": False,
        "HAS_SOFTCAP": softcap,
        "WHOLE_GROUPS": whole_groups,
        "RETURN_LOGPROB": return_logprob or truncate,
        "TRUNCATE": truncate,
        "EDIT": bool(edits),
        "EDIT_ROWS": bool(edits),
        "MASK_IS_BOOL": False,
        "BIAS_FIRST": False,
        "BLOCK_B": tile.block_b,
        "BLOCK_V": tile.block_v,
        "BLOCK_D": tile.block_d,
        "STAGES": tile.stages,
        "FLATTEN": tile.flatten,
        "WEIGHT_TMA": tile.tma,
        "HIDDEN_TMA": tile.hidden_tma,
        "ROWS_FIRST": tile.rows_first,
        "LEFT": left_of(truncate, tile.block_v, _SMS * tile.ctas_per_sm),
        **_reduction(tile, _SMS * tile.ctas_per_sm, truncate),
    }
    rest = {**_ROWS, **_EDITS, **_OUTPUTS}
    rest |= dict.fromkeys(("num_rows", "vocab_size", "vocab_start", "num_parts", "kept_groups"), "i32")
    rest |= {"weight_stride": "i32", "hidden_stride": "i32", "logit_scale": "fp32", "softcap": "fp32"}
    aligned = (
        {*pointers, "weight_stride", "hidden_stride"}
        - ({"weight"} if tile.tma else set())
        - ({"hidden"} if tile.hidden_tma else set())
    )
    return _compile(
        lm_head_sample_kernel, {**pointers, **rest}, constants, aligned, capability, tile.num_warps, tile.stages
    )


def resources_of_sample_logits(
    capability: int,
    dtype: torch.dtype,
    config: ReadConfig,
    *,
    all_greedy: bool = False,
    return_logprob: bool = False,
    softcap: bool = False,
    truncate: bool = False,
    edits: bool = False,
    whole_groups: bool = True,
) -> Resources:
    """Compile the reader of logits of ``dtype``; whole_groups: of a vocabulary that is a multiple of 16."""
    name = DTYPE_NAMES[dtype]
    parts = min(MOST_PARTS, max(config.least_parts, _SMS * config.ctas_per_sm))
    pointers = _PARTS | {
        "source_ptr": f"*{name}",
        "peak_ptr": "*fp32",
        "kept_ptr": "*bf16" if dtype is torch.bfloat16 and not softcap and not edits else "*fp32",
        "second_ptr": "*fp32",
        "arrived_ptr": "*i32",
    }
    constants = {
        "LOGITS_DTYPE": TRITON_DTYPES[dtype],
        "HAS_SCALE": False,
        "HAS_SOFTCAP": softcap,
        "WHOLE_GROUPS": whole_groups,
        "ALL_GREEDY": all_greedy,
        "RETURN_LOGPROB": return_logprob or truncate,
        "TRUNCATE": truncate,
        "EDIT": edits,
        "EDIT_ROWS": edits,
        "MASK_IS_BOOL": False,
        "BIAS_FIRST": False,
        "BLOCK_B": config.block_b,
        "BLOCK_V": config.block_v,
        "STAGES": config.stages,
        "LEFT": left_of(truncate, config.block_v, parts),
        **_reduction(config, parts, truncate),
    }
    rest = {**_ROWS, **_EDITS, **_OUTPUTS, "source_stride": "i32", "logit_scale": "fp32", "softcap": "fp32"}
    rest |= dict.fromkeys(("num_rows", "vocab_size", "vocab_start", "num_parts", "kept_groups"), "i32")
    aligned = {*pointers, "source_stride"}
    return _compile(
        sample_logits_kernel, {**pointers, **rest}, constants, aligned, capability, config.num_warps, config.stages
    )


def _reduction(config: TileConfig | ReadConfig, parts: int, truncate: bool) -> dict[str, object]:
    one = config.one_launch and not truncate
    return {
        "ONE_LAUNCH": one,
        "BLOCK_P": triton.next_power_of_2(parts) if one else 1,
        "BLOCK_R": config.reduce_rows if one else 1,
    }


def resources_of_reduce_parts(capability: int, tile: TileConfig, parts: int, return_logprob: bool = False) -> Resources:
    """Compile the reduction over ``parts`` parts (a power of two)."""
    pointers = dict(_PARTS)
    rest = {name: _ROWS[name] for name in ("temperature_ptr", "seed_ptr", "position_ptr")}
    rest |= _OUTPUTS
    rest |= dict.fromkeys(("num_rows", "num_parts", "vocab_size", "vocab_start"), "i32")
    constants = {"RETURN_LOGPROB": return_logprob, "BLOCK_P": parts, "BLOCK_R": tile.reduce_rows}
    return _compile(reduce_parts_kernel, {**pointers, **rest}, constants, set(pointers), capability, 1, 3)


def resources_of_draw_truncated(
    capability: int, vocab_size: int, config: DrawConfig, parts: int, dtype: torch.dtype
) -> Resources:
    """Compile the draw of truncated rows from kept logits of ``dtype``, over ``parts`` parts (a power of two)."""
    pointers = _PARTS | {"second_ptr": "*fp32", "kept_ptr": f"*{DTYPE_NAMES[dtype]}", "peak_ptr": "*fp32"}
    pointers |= {"partial_ptr": "*fp32", "list_ptr": "*i32", "arrived_ptr": "*i32", "rounds_ptr": "*i32"}
    rest = {**_ROWS, **_OUTPUTS}
    rest |= dict.fromkeys(("num_rows", "num_parts", "vocab_size", "vocab_start", "kept_groups"), "i32")
    constants = {"RETURN_LOGPROB": True, "BLOCK_P": parts, "BLOCK": config.block, "CHUNKS": config.chunks}
    constants |= {"BLOCK_S": block_of_spans(vocab_size), "CANDIDATES": config.candidates}
    constants |= {"KEY_SHIFT": key_shift(dtype)}
    return _compile(
        draw_truncated_kernel, {**pointers, **rest}, constants, set(pointers), capability, config.num_warps, 3
    )


def resources_of_search_truncated(
    capability: int, vocab_size: int, config: DrawConfig, dtype: torch.dtype
) -> Resources:
    """Compile the search in truncated rows of kept logits of ``dtype``."""
    pointers = {"kept_ptr": f"*{DTYPE_NAMES[dtype]}", "kept_score_ptr": "*fp32", "kept_mass_ptr": "*fp32"}
    pointers |= {"kept_peak_ptr": "*fp32", "list_ptr": "*i32", "arrived_ptr": "*i32", "rounds_ptr": "*i32"}
    pointers |= {"searched_ptr": "*i64"}
    rest = {**_ROWS, **_OUTPUTS}
    rest |= dict.fromkeys(("vocab_size", "vocab_start", "num_groups"), "i32")
    block_s = block_of_spans(vocab_size)
    constants = {"RETURN_LOGPROB": True, "BLOCK_S": block_s, "CHUNKS": config.search_chunks}
    constants |= {"WINDOW": min(config.window, block_s), "GATHER": min(config.gather, block_s)}
    return _compile(
        search_truncated_kernel, {**pointers, **rest}, constants, set(pointers), capability, config.search_warps, 3
    )


def resources_of_quantize_hidden(
    capability: int, hidden_size: int, dtype: torch.dtype, config: ScreenConfig
) -> Resources:
    """Compile the kernel that puts hidden states of ``dtype`` into fixed point."""
    pointers = {"hidden_ptr": f"*{DTYPE_NAMES[dtype]}", "terms_ptr": "*i8", "threshold_ptr": "*i32", "best_ptr": "*i64"}
    pointers |= dict.fromkeys(("shrink_ptr", "scale_ptr", "norm_ptr", "error_ptr"), "*fp32")
    pointers |= {"candidates_ptr": "*i32"}
    strides = dict.fromkeys(("hidden_stride", "terms_stride"), "i32")
    constants = {"D": hidden_size, "BLOCK_D": triton.next_power_of_2(hidden_size), "TERMS": config.terms}
    constants |= {"SHRINK": True, "EARLY": config.early}
    aligned = {*pointers, *strides}
    return _compile(quantize_hidden_kernel, pointers | strides, constants, aligned, capability, config.hidden_warps, 3)


def _screened(dtype: torch.dtype, softcap: bool, edits: bool) -> dict[str, object]:
    """Constants that both passes of the screened path have."""
    return {
        "LOGITS_DTYPE": TRITON_DTYPES[dtype],
        "HAS_SCALE": False,
        "HAS_SOFTCAP": softcap,
        "EDIT": edits,
        "EDIT_ROWS": edits,
        "MASK_IS_BOOL": False,
        "BIAS_FIRST": False,
    }


def resources_of_screen_head(
    capability: int,
    hidden_size: int,
    dtype: torch.dtype,
    config: ScreenConfig,
    *,
    softcap: bool = False,
    truncate: bool = False,
    edits: bool = False,
    whole_groups: bool = True,
) -> Resources:
    """Compile the pass over the INT8 copy of a head of ``dtype``."""
    rows = config.block_b * config.terms
    blocks = {
        "weight": f"tensordesc<i8[{config.block_v}, {config.block_d}]>" if config.tma else "*i8",
        "terms": f"tensordesc<i8[{rows}, {config.block_d}]>" if config.tma else "*i8",
    }
    pointers = dict.fromkeys(("scale_ptr", "error_ptr", "norm_ptr", "upper_ptr"), "*fp32")
    pointers |= dict.fromkeys(("reach_ptr", "most_ptr", "least_ptr"), "*fp32")
    pointers |= dict.fromkeys(("hidden_scale_ptr", "hidden_norm_ptr", "hidden_error_ptr"), "*fp32")
    pointers |= {"threshold_ptr": "*i32", "id_upper_ptr": "*fp16"}
    constants = _screened(dtype, softcap, edits) | {
        "D": hidden_size,
        "WHOLE_GROUPS": whole_groups,
        "TRUNCATE": truncate,
        "BLOCK_B": config.block_b,
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
        "TERMS": config.terms,
        "STAGES": config.stages,
        "FLATTEN": config.flatten,
        "TMA": config.tma,
        "EARLY": config.early,
    }
    rest = _ROWS | _EDITS | dict.fromkeys(("num_rows", "vocab_size", "vocab_start", "num_parts", "stride"), "i32")
    rest |= {"logit_scale": "fp32", "softcap": "fp32"}
    aligned = {*pointers, "stride"} | (set() if config.tma else set(blocks))
    return _compile(
        screen_head_kernel, blocks | pointers | rest, constants, aligned, capability, config.num_warps, config.stages
    )


def resources_of_rescore_groups(
    capability: int,
    hidden_size: int,
    dtype: torch.dtype,
    config: ScreenConfig,
    *,
    softcap: bool = False,
    truncate: bool = False,
    of: Round = Round.MAIN,
    edits: bool = False,
) -> Resources:
    """Compile the pass over the groups of a head of ``dtype`` that could still win, or that of another round."""
    name = DTYPE_NAMES[dtype]
    pointers = {"weight_ptr": f"*{name}", "hidden_ptr": f"*{name}"}
    pointers |= dict.fromkeys(("upper_ptr", "reach_ptr", "logits_ptr"), "*fp32")
    pointers |= dict.fromkeys(
        ("threshold_ptr", "list_ptr", "place_ptr", "candidates_ptr", "flagged_ptr", "arrived_ptr"), "*i32"
    )
    pointers |= dict.fromkeys(("best_ptr", "counters_ptr"), "*i64")
    pointers |= {"kept_ptr": "*bf16" if dtype is torch.bfloat16 and not softcap and not edits else "*fp32"}
    pointers |= {"peak_ptr": "*fp32", "rounds_ptr": "*i32"}
    constants = _screened(dtype, softcap, edits) | {
        "D": hidden_size,
        "TRUNCATE": truncate,
        "ROUND": int(of),
        "BLOCK_B": max(16, config.block_b),
        "BLOCK_V": config.rescore_v,
        "BLOCK_D": config.rescore_d,
        "STAGES": config.rescore_stages,
        "CHUNK": config.chunk,
        "BLOCK_C": triton.next_power_of_2(config.chunk),
        "PREFETCH": config.prefetch,
        "LISTED": of is Round.FIRST or (config.listed and of is Round.MAIN),
        "EARLY": config.early,
    }
    others = _ROWS | _EDITS | {name: _OUTPUTS[name] for name in ("token_ptr", "best_score_ptr")}
    strides = dict.fromkeys(("weight_stride", "hidden_stride"), "i32")
    others |= dict.fromkeys(("num_rows", "vocab_size", "vocab_start", "num_programs"), "i32")
    others |= {"logit_scale": "fp32", "softcap": "fp32"}
    return _compile(
        rescore_groups_kernel,
        pointers | strides | others,
        constants,
        {*pointers, *strides},
        capability,
        config.rescore_warps,
        config.rescore_stages,
    )


def resources_of_list_groups(capability: int, config: ScreenConfig, *, first: bool = False) -> Resources:
    """Compile the pass that lists the groups that could still win; first: those of the FIRST round."""
    pointers = dict.fromkeys(("threshold_ptr", "list_ptr", "place_ptr", "candidates_ptr", "flagged_ptr"), "*i32")
    pointers |= {"upper_ptr": "*fp32"}
    constants = {
        "FIRST": first,
        "BLOCK_B": max(16, config.block_b),
        "CHUNK": config.chunk,
        "BLOCK_C": triton.next_power_of_2(config.chunk),
        "EARLY": config.early,
    }
    rest = {name: _ROWS[name] for name in ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr")}
    types = pointers | rest | dict.fromkeys(("num_rows", "num_groups", "vocab_size"), "i32")
    return _compile(list_groups_kernel, types, constants, set(pointers), capability, config.rescore_warps, 3)


def resources_of_list_ids(capability: int, config: ScreenConfig) -> Resources:
    """Compile the pass that lists the ids that have yet to be verified."""
    pointers = dict.fromkeys(("threshold_ptr", "ids_ptr", "num_ids_ptr", "candidates_ptr"), "*i32")
    pointers |= {"upper_ptr": "*fp32", "id_upper_ptr": "*fp16"}
    constants = {"BLOCK_B": ID_ROWS, "BLOCK_C": _GROUPS_AT_ONCE, "EARLY": config.early}
    rest = {name: _ROWS[name] for name in ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr")}
    types = pointers | rest | dict.fromkeys(("num_rows", "num_groups", "vocab_size"), "i32")
    return _compile(list_ids_kernel, types, constants, set(pointers), capability, _WARPS, 3)


def resources_of_verify_ids(
    capability: int, hidden_size: int, dtype: torch.dtype, config: ScreenConfig, *, edits: bool = False
) -> Resources:
    """Compile the pass that reads ids of a head of ``dtype`` one by one."""
    name = DTYPE_NAMES[dtype]
    pointers = {"weight_ptr": f"*{name}", "hidden_ptr": f"*{name}", "upper_ptr": "*fp32", "counters_ptr": "*i64"}
    pointers |= dict.fromkeys(("threshold_ptr", "ids_ptr", "num_ids_ptr", "arrived_ptr"), "*i32")
    constants = _screened(dtype, False, edits) | {
        "D": hidden_size,
        "BLOCK_B": ID_ROWS,
        "BLOCK_V": config.rescore_v,
        "BLOCK_D": config.rescore_d,
        "STAGES": config.rescore_stages,
        "EARLY": config.early,
    }
    rest = {name: _ROWS[name] for name in ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr")} | _EDITS
    strides = dict.fromkeys(("weight_stride", "hidden_stride"), "i32")
    rest |= dict.fromkeys(("num_rows", "vocab_size", "vocab_start", "num_programs"), "i32")
    rest |= {"logit_scale": "fp32", "softcap": "fp32"}
    types = pointers | strides | rest
    aligned = {*pointers, *strides}
    return _compile(
        verify_ids_kernel, types, constants, aligned, capability, config.rescore_warps, config.rescore_stages
    )


def resources_of_bound_truncated(capability: int, vocab_size: int, draw: DrawConfig, config: ScreenConfig) -> Resources:
    """Compile the pass that finds what a row's logits must reach to matter to its truncation."""
    pointers = {"reach_ptr": "*fp32", "peak_ptr": "*fp32", "threshold_ptr": "*i32"}
    constants = {"BLOCK_S": block_of_spans(vocab_size), "CANDIDATES": draw.candidates, "AGAIN": False}
    constants |= {"EARLY": config.early}
    rest = {name: _ROWS[name] for name in ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr")}
    types = pointers | rest | dict.fromkeys(("vocab_size", "num_groups"), "i32")
    return _compile(bound_truncated_kernel, types, constants, set(pointers), capability, draw.num_warps, 3)


def resources_of_draw_screened(
    capability: int, vocab_size: int, draw: DrawConfig, config: ScreenConfig, dtype: torch.dtype
) -> Resources:
    """Compile the draw of truncated rows from the groups that were rescored, kept in ``dtype``."""
    pointers = {"kept_ptr": f"*{DTYPE_NAMES[dtype]}", "list_ptr": "*i32", "threshold_ptr": "*i32", "rounds_ptr": "*i32"}
    pointers |= dict.fromkeys(("peak_ptr", "most_ptr", "least_ptr"), "*fp32")
    constants = {"BLOCK_S": block_of_spans(vocab_size), "CANDIDATES": draw.candidates}
    constants |= {"KEY_SHIFT": key_shift(dtype), "EARLY": config.early}
    rest = _ROWS | {name: _OUTPUTS[name] for name in ("token_ptr", "best_score_ptr")}
    types = pointers | rest | dict.fromkeys(("vocab_size", "num_groups"), "i32")
    return _compile(draw_screened_kernel, types, constants, set(pointers), capability, draw.num_warps, 3)


def _compile(kernel, types, constants, aligned, capability, num_warps, num_stages) -> Resources:
    names = kernel.arg_names
    missing = set(names) ^ {*types, *constants}
    if missing:
        raise ValueError(f"signature of {kernel.__name__} differs in {sorted(missing)}")
    signature = {name: types.get(name, "constexpr") for name in names}
    compiled = triton.compile(
        ASTSource(
            kernel,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    registers, spilled = register_usage(compiled.asm["cubin"])
    return Resources(compiled.metadata.shared, registers, spilled, _loaded(compiled.asm["ttir"]))


def _loaded(ttir: str) -> tuple[str, ...]:
    """Of a function in Triton's IR, the arguments whose addresses, with whatever is added, are loaded from."""
    of: dict[str, str] = {f"%{name}": name for name in re.findall(r"%(\w+): !tt\.ptr<", ttir)}
    found = set()
    for result, operation, operands in re.findall(r"(%\w+) = (tt\.\w+) ([^:{]*)", ttir):
        first = re.match(r"%\w+", operands)
        if first is None or first[0] not in of:
            continue
        if operation == "tt.load":
            found.add(of[first[0]])
        elif operation in ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.bitcast"):
            of[result] = of[first[0]]
    return tuple(sorted(found))
