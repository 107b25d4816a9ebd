"""The plugin without a server: what it declines and why, how a server starts, and what a failure of ours costs."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from head_states import (
    CPU,
    VOCAB,
    CountingCapture,
    Model,
    Processor,
    hidden_states,
    make_batch,
    make_head,
    make_state,
    metadata_of,
    serve,
    weights,
)
from serving import needs_sglang
from sglang_batches import ModelRunner, SteadyServer, request
from tuned_tables import table_for_this_machine

from sgl_flashsample import __version__, paths, screen_race
from sgl_flashsample.defaults import HeadTraits
from sgl_flashsample.dispatch import DispatchTable, default_table
from sgl_flashsample.kernels.config import ScreenConfig
from sgl_flashsample.kernels.gather_rows import RowBuffers
from sgl_flashsample.kernels.params import LMHead
from sgl_flashsample.kernels.rng import NOISE_ABI
from sgl_flashsample.kernels.workspace import ScreenCounter
from sgl_flashsample.kinds import BATCH_KINDS, PLAIN, BatchKind
from sgl_flashsample.screen import Screen
from sgl_flashsample.selfcheck import MAX_COMPILED_ROWS, Checked
from sgl_flashsample.sglang import hooks, metrics, plugin, screen_lifecycle, support, versions
from sgl_flashsample.sglang import runtime as runtime_module
from sgl_flashsample.sglang.batch import BATCH_ATTRIBUTE, SLOTS_ATTRIBUTE, Reason, Routing
from sgl_flashsample.sglang.draw import COMMON_KINDS
from sgl_flashsample.sglang.exchange import Exchange, RankSync
from sgl_flashsample.sglang.head import STAGED_ROWS, HeadState
from sgl_flashsample.sglang.hooks import StepHooks
from sgl_flashsample.sglang.runtime import QUIET_SECONDS, Runtime
from sgl_flashsample.sglang.screen_lifecycle import SCREEN_VARIABLE, ScreenMode
from sgl_flashsample.sglang.settings import REPORT_PATH_VARIABLE, REQUIRE_VARIABLE, NotActiveError
from sgl_flashsample.sglang.step_graphs import RETRY_SECONDS, SLOTS, StepCounts
from sgl_flashsample.tables import fingerprint, lookup
from sgl_flashsample.tables.schema import Entry


def change(config: types.SimpleNamespace, changes: dict[str, object]) -> None:
    """Set ``config.a.b`` for the path "a.b"; a variable of SGLang's environment answers with its value."""
    for path, value in changes.items():
        *parts, name = path.split(".")
        place = functools.reduce(getattr, parts, config)
        setattr(place, name, types.SimpleNamespace(get=lambda value=value: value) if parts == ["environ"] else value)


@pytest.fixture
def several_gpus(monkeypatch) -> None:
    """Servers of several GPUs are wanted."""
    monkeypatch.setenv(support.RANKS_VARIABLE, "1")


# Servers and heads that are not served.


CHECKS = ("SGLANG_ENABLE_NAN_LOGITS_CHECK", "SGLANG_ENABLE_ASYNC_ASSERT", "SGLANG_SANITIZE_NAN_LOGITS")
BACKEND, TWO_RANKS = "exec.graph.cuda_graph_config.decode.backend", {"parallel.tp_size": 2}
REPLICAS = TWO_RANKS | {"parallel.attn_dp_size": 2}
BESIDE = "beside DP attention without --enable-dp-lm-head"
DETERMINISTIC = "exec.deterministic.enable_deterministic_inference"
LORA, MODULES = "lora.enable_lora", "lora.lora_target_modules"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"exec.kernel.grammar_backend": "outlines"}, None),
        ({"exec.graph.cuda_graph_config": None}, None),
        ({BACKEND: "disabled"}, None),
        ({BACKEND: "breakable"}, "a decode graph that is not a full one"),
        ({"spec.speculative_algorithm": "DFLASH"}, "speculative decoding with DFLASH"),
        (TWO_RANKS, None),
        ({"parallel.pp_size": 2}, None),
        ({"exec.moe.elastic_ep_backend": "mooncake"}, "elastic expert parallelism"),
        ({DETERMINISTIC: True}, None),
        ({DETERMINISTIC: True} | TWO_RANKS, "deterministic inference with several ranks"),
        ({DETERMINISTIC: True, "parallel.pp_size": 2}, "deterministic inference with several ranks"),
        (
            {DETERMINISTIC: True, "spec.speculative_algorithm": "NGRAM"},
            "deterministic inference with speculative decoding",
        ),
        (
            {DETERMINISTIC: True, "exec.kernel.grammar_backend": "outlines"},
            "deterministic inference with grammar masks of bools (--grammar-backend outlines)",
        ),
        ({"exec.deterministic.rl_on_policy_target": "fsdp"}, "on-policy RL logprobs"),
        ({"exec.dllm.dllm_algorithm": "LowConfidence"}, "diffusion LLM"),
        ({"disagg.enable_pdmux": True}, "PD multiplexing"),
        ({"exec.overlap.enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"exec.graph.enable_torch_compile": True}, "torch.compile"),
        ({"flags.capture.enable_torch_compile": True}, "torch.compile"),
        # Not every release has all of these settings: here only the tested one exists.
        *(({f"environ.{name}": on}, name if on else None) for name in CHECKS for on in (False, True)),
        ({LORA: True, MODULES: ["all"]}, "LoRA of the LM head"),
        ({LORA: True, MODULES: {"lm_head"}}, "LoRA of the LM head"),
        ({LORA: True, MODULES: {"output"}}, "LoRA of the LM head"),
        ({LORA: True, MODULES: ["q_proj"]}, None),
        ({LORA: None, MODULES: ["all"]}, None),
        ({"parallel.attn_dp_size": 2}, None),
        (REPLICAS, None),
        (REPLICAS | {"parallel.attn_tp_size": 2}, f"attention over several ranks {BESIDE}"),
        (REPLICAS | {"parallel.pp_size": 2}, f"pipeline parallelism {BESIDE}"),
        (REPLICAS | {"disagg.disaggregation_mode": "decode"}, f"PD disaggregation {BESIDE}"),
        (REPLICAS | {"exec.features.enable_encoder_swa_bounded_replay": True}, f"bounded replay {BESIDE}"),
        (REPLICAS | {"environ.SGLANG_SCHEDULER_SKIP_ALL_GATHER": True}, f"SGLANG_SCHEDULER_SKIP_ALL_GATHER {BESIDE}"),
        (TWO_RANKS | {"parallel.attn_dp_size": 2, "parallel.enable_dp_lm_head": True}, None),
        ({"parallel.attn_cp_size": 2}, None),
        (TWO_RANKS | {"parallel.attn_cp_size": 2}, "context parallelism"),
        ({"observability.debug_tensor_dump_output_folder": "dump"}, None),
        (
            TWO_RANKS | {"observability.debug_tensor_dump_output_folder": "dump"},
            "a dump of tensors, which reads logits, with several ranks",
        ),
    ],
    ids=str,
)
def test_a_server_in_an_unserved_mode_is_inactive_with_the_mode_in_words(server_config, several_gpus, changes, words):
    change(server_config, changes)
    reason = None if words is None else f"{words} is not supported yet"
    assert support.unsupported_server() == Runtime(None).inactive_reason == reason


LORA_PLACES = pytest.mark.parametrize(
    "adapters, served",
    [
        ([["q_proj", "v_proj"]], True),
        ([["q_proj"], ["gate_proj", "lm_head"]], False),
        (["all-linear"], False),
        ([], True),
    ],
    ids=str,
)


def write_adapters(folder: Path, adapters: list) -> list[types.SimpleNamespace]:
    """As ``lora_paths`` of SGLang's configuration."""
    paths = [folder / str(place) for place in range(len(adapters))]
    for path, modules in zip(paths, adapters, strict=True):
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps({"target_modules": modules, "r": 8, "lora_alpha": 8}))
    return [types.SimpleNamespace(lora_path=str(path)) for path in paths]


@LORA_PLACES
def test_where_no_modules_are_named_the_adapters_say_whether_they_reach_the_lm_head(
    server_config, tmp_path, adapters, served
):
    vars(server_config.lora).update(enable_lora=True, lora_paths=write_adapters(tmp_path, adapters))
    runtime = Runtime(None)
    assert runtime.inactive_reason == (None if served else "LoRA of the LM head is not supported yet")
    assert runtime.no_screen_reason is None


@pytest.mark.slow
@needs_sglang
@LORA_PLACES
def test_sglang_reads_adapters_as_we_expect(monkeypatch, tmp_path, adapters, served):
    from sglang.srt import runtime_context

    lora = types.SimpleNamespace(
        enable_lora=True, lora_target_modules=None, lora_paths=write_adapters(tmp_path, adapters)
    )
    monkeypatch.setattr(runtime_context, "get_lora", lambda: lora)
    assert (support.unsupported_adapters() is None) is served


def test_adapters_that_cannot_be_read_leave_the_server_to_sglang(server_config, tmp_path):
    vars(server_config.lora).update(enable_lora=True, lora_paths=[types.SimpleNamespace(lora_path=str(tmp_path))])
    reason = Runtime(None).inactive_reason
    assert reason.startswith("the modules of the LoRA adapters cannot be read (FileNotFoundError: ")


UNMEASURED = (
    "this kind of speculative decoding is off by default; measured ones are, with one draft head: EAGLE, EAGLE3, "
    "NEXTN, STANDALONE, NGRAM on one GPU, EAGLE with --speculative-eagle-topk 1 on two; FLASHSAMPLE_SPECULATION=1 "
    "turns all on"
)


@pytest.mark.parametrize(
    "changes, words",
    [
        *(({"spec.speculative_algorithm": name}, None) for name in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")),
        ({"spec.speculative_algorithm": "FROZEN_KV_MTP"}, UNMEASURED),
        ({"spec.speculative_algorithm": "uno"}, "with UNO"),
        ({"spec.speculative_accept_threshold_single": 0.9}, "with acceptance thresholds below 1"),
        ({"spec.speculative_accept_threshold_acc": 0.9}, "with acceptance thresholds below 1"),
        ({"spec.speculative_use_rejection_sampling": True}, "by rejection sampling"),
        ({"environ.SGLANG_SIMULATE_ACC_LEN": 2}, "with a simulated acceptance"),
        ({"parallel.pp_size": 2}, "with pipeline parallelism"),
        ({"parallel.tp_size": 2, "parallel.attn_dp_size": 2}, "with DP attention"),
        ({"parallel.tp_size": 2, "spec.speculative_algorithm": "EAGLE"}, None),
        ({"parallel.tp_size": 2, "spec.speculative_algorithm": "EAGLE", "spec.speculative_eagle_topk": 1}, None),
        ({"parallel.tp_size": 2, "spec.speculative_algorithm": "EAGLE", "spec.speculative_eagle_topk": 2}, UNMEASURED),
        ({"parallel.tp_size": 2, "spec.speculative_algorithm": "NGRAM"}, UNMEASURED),
        ({"parallel.tp_size": 4, "spec.speculative_algorithm": "EAGLE"}, UNMEASURED),
        ({"spec.enable_multi_layer_eagle": True, "spec.speculative_algorithm": "EAGLE"}, UNMEASURED),
    ],
    ids=str,
)
def test_of_speculative_decoding_it_is_said_what_is_not_served(
    server_config, several_gpus, monkeypatch, changes, words
):
    change(server_config, changes)
    name = changes.get("spec.speculative_algorithm")
    assert support.unsupported_speculation() is None or name is not None, (
        "without speculation nothing stands against it"
    )
    server_config.spec.speculative_algorithm = name or "EAGLE"
    served_on_request = words in (None, UNMEASURED)
    reason = words if served_on_request else f"speculative decoding {words} is not supported yet"
    assert support.unsupported_server() == Runtime(None).inactive_reason == reason
    monkeypatch.setenv(support.SPECULATION_VARIABLE, "0")
    if served_on_request:
        left = "speculative decoding is left to SGLang, as FLASHSAMPLE_SPECULATION is off"
        assert Runtime(None).inactive_reason == left
    monkeypatch.setenv(support.SPECULATION_VARIABLE, "1")
    runtime = Runtime(None)
    assert runtime.inactive_reason == (None if served_on_request else reason) and runtime.settings.verifies


@pytest.mark.parametrize(
    "changes, measured",
    [
        ({"tp_size": 2}, True),
        ({"tp_size": 4}, True),
        ({"pp_size": 2}, True),
        ({"tp_size": 8}, False),
        ({"pp_size": 3}, False),
        ({"tp_size": 2, "pp_size": 2}, False),
        ({"tp_size": 2, "attn_dp_size": 2, "enable_dp_lm_head": True}, True),
        ({"tp_size": 2, "attn_dp_size": 2}, False),
        ({"tp_size": 4, "attn_dp_size": 2, "enable_dp_lm_head": True}, False),
    ],
    ids=str,
)
def test_several_gpus_are_served_where_they_have_been_measured_and_elsewhere_on_request(
    server_config, pretend_gpu, monkeypatch, changes, measured
):
    vars(server_config.parallel).update(changes)
    gpu = torch.device("cuda")
    pretend_gpu(False)
    assert support.unsupported_server() is support.unmeasured_exchange(CPU) is None
    pretend_gpu(True)
    collectives = support.unmeasured_exchange(gpu)
    assert collectives.endswith("; FLASHSAMPLE_SEVERAL_GPUS=1 turns them on"), "whatever the configuration"
    reason = support.unsupported_server()
    assert reason is None if measured else reason.startswith("this parallel configuration is off by default; ")
    monkeypatch.setenv(support.RANKS_VARIABLE, "1")
    assert support.unsupported_server() is None and support.unmeasured_exchange(gpu) is None
    monkeypatch.setenv(support.RANKS_VARIABLE, "0")
    assert support.unsupported_server() == "several GPUs are left to SGLang, as FLASHSAMPLE_SEVERAL_GPUS is off"


@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_pipeline_which_reads_tokens_late_gets_copies_of_those_of_a_graph(server_config, fake_heads, pp_size):
    vars(server_config.parallel).update(pp_size=pp_size, pp_rank=pp_size - 1)
    runtime = Runtime(None)
    assert runtime.use_step_graphs
    assert prepared(runtime, make_head(weights(CPU)), VOCAB).copies_tokens is (pp_size > 1)


@pytest.mark.parametrize("algorithm", [None, "EAGLE", "NGRAM"])
def test_a_server_with_drafts_gets_copies_of_first_tokens(server_config, fake_heads, algorithm):
    server_config.spec.speculative_algorithm = algorithm
    state = prepared(Runtime(None), make_head(weights(CPU)), VOCAB)
    assert state.copies_staged is (algorithm is not None) and not state.copies_tokens


@pytest.mark.slow
@needs_sglang
def test_sglang_has_settings_that_look_for_nan():
    from sglang.srt.environ import envs

    assert sum(hasattr(envs, name) for name in CHECKS) >= 2


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, None),
        ({"model.weight_cache_mode": "attach"}, "shared with other processes"),
        ({"model.remote_instance_weight_loader_start_seed_via_transfer_engine": True}, "may write to the weights"),
        ({"model.remote_instance_weight_loader_backend": "transfer_engine"}, "may write to the weights"),
    ],
    ids=str,
)
def test_a_server_in_which_others_change_the_head_has_no_screen(server_config, monkeypatch, changes, words):
    change(server_config, changes)
    reason = Runtime(None).no_screen_reason
    assert (words is None and reason is None) or words in reason
    monkeypatch.setenv(SCREEN_VARIABLE, "off")
    assert Runtime(None).no_screen_reason == "FLASHSAMPLE_SCREEN is off"


class OtherProcessor(Processor):
    def _compute_lm_head(self): ...


WEIGHT = torch.zeros(104, 16)
GATHERED = Processor(do_tensor_parallel_all_gather=True)


@pytest.mark.parametrize(
    "processor, lm_head, words",
    [
        (OtherProcessor(vocab_size=100), make_head(WEIGHT), "has its own _compute_lm_head"),
        (Processor(), make_head(WEIGHT, set_lora=1, apply_lora=1), "LoRA"),
        (Processor(), types.SimpleNamespace(), "no two-dimensional weight"),
        (Processor(), make_head(torch.zeros(4, 4, 4)), "no two-dimensional weight"),
        (Processor(), types.SimpleNamespace(weight=WEIGHT, quant_method=object()), "quantised (object)"),
        (Processor(), make_head(WEIGHT.to(torch.int8)), "torch.int8"),
        (Processor(), make_head(torch.zeros(16, 104).T), "not contiguous"),
        (Processor(), make_head(WEIGHT, use_intel_amx_backend=True), "AMX"),
        (Processor(), make_head(WEIGHT.bfloat16()), "bfloat16 is wrong in Triton's interpreter"),
        (GATHERED, make_head(WEIGHT, tp_size=5), "600 ids, the LM head 520 rows"),
        (GATHERED, make_head(WEIGHT, tp_size=8, num_added_embeddings=3), "ids that were added to the vocabulary"),
        (
            Processor(do_tensor_parallel_all_gather=True, use_tp_lm_head_all_to_all=True),
            make_head(WEIGHT, tp_size=8),
            "all-to-all",
        ),
        (
            Processor(do_tensor_parallel_all_gather=True, vocab_size=2**24 + 1),
            make_head(WEIGHT, tp_size=2**20),
            "16777217 ids; with several ranks, up to 16777216",
        ),
        (Processor(return_full_logits=True), make_head(WEIGHT), "full logits"),
        (Processor(vocab_size=200), make_head(WEIGHT), "200 ids, the LM head 104 rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_head_that_cannot_be_fused_has_its_reason_in_words(server_config, processor, lm_head, words):
    server_config.parallel.tp_size = server_config.parallel.attn_tp_size = getattr(lm_head, "tp_size", 1)
    assert words in support.unsupported_head(processor, lm_head)


REPLICATED = "each rank has the whole LM head, which is not supported with several ranks"


@pytest.mark.parametrize(
    "ranks, processor, divided, words",
    [
        ((1, 1, 1), Processor(vocab_size=100), 1, None),
        ((2, 1, 2), Processor(vocab_size=100), 1, None),
        ((6, 3, 1), GATHERED, 6, None),
        ((6, 3, 1), GATHERED, 1, "gathered over 6 ranks, but the LM head is divided over 1"),
        ((6, 3, 1), Processor(vocab_size=100), 1, REPLICATED),
        ((6, 3, 1), Processor(do_tensor_parallel_all_gather=True, use_attn_tp_group=True, vocab_size=300), 3, None),
        (
            (6, 3, 1),
            Processor(do_tensor_parallel_all_gather=True, use_attn_tp_group=True),
            6,
            "gathered over 3 ranks",
        ),
    ],
    ids=["one rank", "DP", "a part", "replicated, gathered", "replicated", "a part of attention's ranks", "over all"],
)
def test_a_part_of_a_head_is_served_where_sglang_gathers_the_others(
    server_config, device, ranks, processor, divided, words
):
    """ranks: of tensor parallelism, of attention, of DP attention."""
    vars(server_config.parallel).update(zip(("tp_size", "attn_tp_size", "attn_dp_size"), ranks, strict=True))
    reason = support.unsupported_head(processor, make_head(WEIGHT.to(device), tp_size=divided))
    assert reason is None if words is None else words in reason


def test_a_device_without_kernels_has_its_reason_in_words(in_host_memory, monkeypatch):
    monkeypatch.setattr(support, "unsupported_by_machine", lambda: "no Numba")
    assert support.unsupported_device(CPU) == "no Numba"
    assert "the device is meta; CUDA is needed" in support.unsupported_device(torch.device("meta"))


@pytest.mark.parametrize(
    "capability, reason",
    [
        *((one, None) for one in ((8, 0), (9, 0), (10, 0), (12, 0))),
        ((7, 5), "compute capability 7.5 is not known: 8.x to 12.x are"),
        ((13, 0), "compute capability 13.0 is not known: 8.x to 12.x are"),
    ],
    ids=str,
)
def test_gpus_of_known_compute_capabilities_are_served_and_no_older_or_newer_ones(monkeypatch, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert support.unsupported_device(torch.device("cuda", 0)) == reason


def test_a_dumper_of_tensors_that_this_sglang_lacks_dumps_nothing(server_config, several_gpus, pretend):
    server_config.parallel.tp_size = 2
    assert support.unsupported_server() is None
    pretend("sglang.srt.debug_utils.dumper", dumper=types.SimpleNamespace(may_enable=True))
    assert support.unsupported_server().startswith("a dump of tensors, which reads logits, with several ranks")


def test_in_host_memory_ranks_and_drafts_are_left_to_sglang_and_half_precision_is_served(
    server_config, in_host_memory, pretend_gpu
):
    weight = WEIGHT.to(torch.bfloat16)
    assert support.unsupported_head(Processor(vocab_size=100), make_head(weight)) is None
    processor = Processor(vocab_size=100, do_tensor_parallel_all_gather=True)
    assert "several ranks on CPUs" in support.unsupported_head(processor, make_head(weight))
    server_config.spec.speculative_algorithm = "NGRAM"
    pretend_gpu(False)
    assert "on a CPU without Triton's interpreter" in support.unsupported_speculation()


def test_a_server_whose_configuration_cannot_be_read_is_left_to_sglang(server_config):
    del server_config.exec.dllm
    assert "configuration cannot be read" in Runtime(None).inactive_reason


# A head follows its model.


@pytest.mark.parametrize(
    "attributes, facts",
    [
        ({}, (VOCAB, None, None)),
        ({"vocab_size": 599}, (599, None, None)),
        ({"logit_scale": 0.5}, (VOCAB, 0.5, None)),
        ({"final_logit_softcapping": 30.0}, (VOCAB, None, 30.0)),
        ({"final_logit_softcapping": 0}, (VOCAB, None, None)),  # SGLang: no softcap
    ],
    ids=str,
)
@pytest.mark.parametrize("replaced", [False, True])
def test_a_head_follows_its_model(device, attributes, facts, replaced):
    state = make_state(device)
    first = state.head.lm_head
    vars(state.processor).update(attributes)
    if replaced:
        state.lm_head.weight = weights(device, 1)
    state.update(1)
    head = state.head.lm_head
    assert (head.vocab_size, head.logit_scale, head.softcap) == facts
    assert head.weight.data_ptr() == state.lm_head.weight.data_ptr()
    assert (head is first) is (not attributes and not replaced), "what has not changed stays"


def test_a_head_that_changes_its_shape_gives_up_its_tuned_table(device):
    state = make_state(device)
    tuned = state.head.table
    state.processor.final_logit_softcapping = 30.0
    state.update(1)
    assert state.head.table is tuned
    state.lm_head.weight = torch.zeros(608, 48, device=device, dtype=state.head.lm_head.weight.dtype)
    state.update(1)
    assert state.head.table is default_table(state.head.lm_head) is not tuned


@pytest.mark.parametrize("option", ["use_fp32_lm_head", "use_fp32_lm_head_output"])
def test_a_float32_head_option_keeps_the_accumulator(device, option):
    lm_head = make_head(torch.zeros(104, 16, dtype=torch.float16, device=device))
    assert HeadState(Processor(vocab_size=100), lm_head).head.lm_head.rounding == torch.float16
    assert HeadState(Processor(vocab_size=100, **{option: True}), lm_head).head.lm_head.rounding == torch.float32


@pytest.mark.parametrize(
    "rank, rows, vocab, start, size",
    [
        *((0, 64, 100, 0, 64), (1, 64, 100, 64, 36), (1, 64, 64, None, 64)),
        *((1, 60, 100, 64, 36), (0, 60, 100, 0, 48), (0, 20, 40, None, 20)),
    ],
    ids=["first", "last", "one without ids", "after half a group", "before half a group", "no whole group"],
)
def test_a_rank_draws_from_the_whole_groups_of_its_part_or_hands_whole_rows_over(
    device, rank, rows, vocab, start, size
):
    exchange = Exchange(types.SimpleNamespace(rank_in_group=rank, world_size=2))
    state = HeadState(Processor(vocab_size=vocab), make_head(torch.zeros(rows, 16, device=device)), exchange=exchange)
    assert state.whole_rows == (start is None)
    assert (state.head.lm_head.vocab_start, state.head.lm_head.vocab_size) == (start or 0, size)
    assert state.status["ranks"] == 2 and state.status["vocab_size"] == vocab


def test_the_logits_of_a_part_are_rounded_as_the_models_own(device):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 16, generator=generator).to(device, torch.float16)
    hidden = torch.randn(3, 16, generator=generator).to(device, torch.float16)
    exchange = Exchange(types.SimpleNamespace(rank_in_group=0, world_size=2))
    for keeps_fp32 in (False, True):
        processor = Processor(vocab_size=100, use_fp32_lm_head=keeps_fp32)
        state = HeadState(processor, make_head(weight), exchange=exchange)
        state.update(3)
        want = hidden.double() @ weight.double().T
        got = state.logits_of_shard(hidden)
        assert got.dtype == (torch.float32 if keeps_fp32 else torch.float16)
        torch.testing.assert_close(got.double(), want, rtol=2e-3 * (not keeps_fp32), atol=1e-5 if keeps_fp32 else 1e-3)


def test_a_workspace_grows_only_for_a_larger_batch_and_goes_on_counting(device):
    state = make_state(device)
    state.update(3)
    first = state.head.workspaces[0]
    state.update(512)
    assert state.head.workspaces[0] is first
    state.update(600)
    assert state.head.workspaces[0] is not first and state.head.workspaces[0].searched is first.searched
    made = []
    for num_rows in range(601, 1200):
        state.update(num_rows)
        made += [] if state.head.workspaces[0] in made else [state.head.workspaces[0]]
    assert len(made) <= 4, "a server that climbs row by row makes few of them"
    state.update(600)
    assert state.head.workspaces[0].slots >= paths.slots_for(state.head.table.lookup(600), state.head.lm_head, 600)


STEPS = {
    "decode": (["decode"], {}, True),
    "prefill": (["extend"], {}, True),
    "input logprobs": (["extend"], {"extend_return_logprob": True}, False),
    "target verify": (["extend", "target_verify"], {}, False),
    "split prefill": (["extend", "split_prefill"], {}, False),
    "prefill only": (["extend"], {"is_prefill_only": True}, False),
    "neither": ([], {}, False),
}
HIDDEN = {
    "no rows": lambda hidden: hidden[:0],
    "another dtype": torch.Tensor.double,
    "columns apart": lambda hidden: hidden.T.contiguous().T,
}


@pytest.mark.parametrize("verifies", [False, True])
@pytest.mark.parametrize("name", [*STEPS, *HIDDEN])
def test_logits_are_left_for_later_only_in_steps_that_draw_one_token_per_row(runtime, device, name, verifies):
    modes, fields, wanted = STEPS.get(name, (["decode"], {}, False))
    runtime.settings.verifies = verifies
    wanted = verifies if name == "target verify" else wanted
    state, hidden = make_state(device), HIDDEN.get(name, torch.Tensor.clone)(hidden_states(device))
    serve(runtime, state)
    metadata = metadata_of(*modes, **fields)
    assert runtime.can_defer(state.processor, hidden, state.lm_head, metadata) is (state if wanted else None)


# How a server starts.


def make_model(device) -> Model:
    lm_head = torch.nn.Linear(16, 104, bias=False, device=device)
    lm_head.quant_method = None
    return Model(lm_head, vocab_size=100)


@pytest.fixture
def starting(server_config, fake_heads, runtime, monkeypatch, tmp_path) -> Runtime:
    """A runtime that finds no table of this machine's user."""
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    return runtime


def prepared(runtime: Runtime, lm_head, vocab: int = 100) -> HeadState | None:
    """The head of a model that has just been loaded; None where it is SGLang's."""
    runtime.prepare_model(Model(lm_head, vocab_size=vocab))
    return next(iter(runtime.heads), None)


def load(runtime: Runtime, device, **attributes) -> None:
    """Calls the hook that runs after SGLang has loaded a model."""
    runner = types.SimpleNamespace(is_generation=True, is_draft_worker=False, model=make_model(device))
    vars(runner).update(attributes)
    StepHooks(runtime).load_model(None, runner)


@pytest.mark.slow
def test_a_generating_model_is_prepared_and_a_line_says_so(runtime, device, monkeypatch, tmp_path, caplog):
    """With kernels that are compared with the reference, for small batches alone."""
    monkeypatch.setattr(runtime_module, "MAX_INTERPRETED_ROWS", 4)
    monkeypatch.setattr(runtime_module, "MAX_COMPILED_ROWS", 4)
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        load(runtime, device)
    assert len(runtime.heads) == 1
    line = caplog.records[-1].message
    assert re.match(r"flashsample 0\.\S+ with SGLang \S+: fused sampling active, LM head 104 x 16 float32, ", line)
    assert f", random numbers of NOISE_ABI {NOISE_ABI}, kernels compiled and checked against a reference in " in line


@pytest.mark.parametrize(
    "attributes, reason",
    [({"is_generation": False}, None), ({"is_draft_worker": True}, None), ({}, "a mode that is not served")],
    ids=["embedding", "draft", "inactive"],
)
def test_a_model_that_is_not_fused_here_is_not_prepared(starting, device, caplog, attributes, reason):
    starting.inactive_reason = reason
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        load(starting, device, **attributes)
    assert starting.heads == [] and not caplog.records and starting.inactive_reason is reason


@pytest.mark.parametrize("place", ["no LogitsProcessor", "no head beside it"])
def test_a_model_that_does_not_show_its_head_is_waited_for_and_a_line_says_so(starting, device, caplog, place):
    model = Headless() if place == "no LogitsProcessor" else Model(None, vocab_size=100)
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        load(starting, device, model=model)
        assert starting.heads == [] and starting.status["active"]
        assert starting.head_for(Processor(vocab_size=100), make_model(device).lm_head) is not None
    assert ": waiting for the first batch, which shows where the model's LM head is; " in caplog.records[0].message


# The status of a server, and its refusal to start.


def test_the_status_of_a_server_names_its_table_and_its_memory(starting, tuned_file):
    file, _, lm_head = tuned_file
    state = prepared(starting, lm_head)
    state.update(4)
    status = starting.status
    assert json.loads(json.dumps(status)) == status
    (head,), *_ = (status.pop(name) for name in ("heads", "draft_head", "draft_vocabulary"))
    assert status == {"active": True, "reason": None, "version": __version__, "noise": NOISE_ABI}
    shape = {"vocab_size": 100, "ranks": 1, "hidden_size": 16, "dtype": "float32"}
    shape |= {"table": str(file), "screen": None, "screen_decision": None, "graphs": 0, "graph_bytes": 0}
    assert head == shape | {"bytes": state.head.workspaces[0].num_bytes}


def test_a_gauge_and_the_status_say_why_the_fused_pass_serves_no_more_once(server_config, prometheus, caplog):
    server_config.observability.enable_metrics = True
    failing = Runtime(None)
    assert prometheus("active") == 1
    failing.disable("a kernel failed")
    failing.disable("another one")
    assert prometheus("active") == 0 and len(caplog.records) == 1
    assert (failing.status["active"], failing.status["reason"]) == (False, "a kernel failed")


@pytest.mark.parametrize(
    "parallel, every, reports",
    [
        ({}, False, True),
        ({"tp_size": 2}, False, True),
        ({"tp_size": 2, "tp_rank": 1, "attn_tp_rank": 1}, False, False),
        ({"tp_size": 2, "tp_rank": 1, "attn_tp_rank": 1}, True, True),
        ({"tp_size": 2, "tp_rank": 1, "attn_tp_rank": 0}, False, True),
    ],
    ids=["one rank", "first", "second", "second, as all do", "with batches of its own"],
)
def test_of_ranks_with_the_same_batches_one_reports_them(
    server_config, prometheus, caplog, monkeypatch, parallel, every, reports
):
    monkeypatch.setenv(metrics.LOG_SECONDS_VARIABLE, "0")
    vars(server_config.parallel).update(parallel)
    server_config.observability.enable_metrics = True
    server_config.observability.enable_metrics_for_all_schedulers = every
    runtime = Runtime(None)
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        runtime.metrics.add_batch(Routing((None,)), 0, None)
        runtime.metrics.flush()
    assert (prometheus("rows_total", path="fused", reason="") == 1) == reports == bool(caplog.records)


def test_an_idle_server_brings_its_counters_up_to_date(server_config, prometheus, clock):
    server_config.observability.enable_metrics = True
    runtime, state = Runtime(None), make_state(CPU)
    serve(runtime, state)
    runtime.metrics.add_batch(Routing((None,) * 8), 0, None)
    state.counts.replayed = 1
    runtime.idle()
    assert not prometheus("rows_total", path="fused", reason=""), "as seldom as in steps"
    clock[0] += metrics.FLUSH_SECONDS
    runtime.idle()
    assert prometheus("rows_total", path="fused", reason="") == 8
    assert prometheus("replayed_steps_total") == 1 and state.counts == StepCounts()


def test_an_idle_server_reads_what_its_devices_have_counted_and_then_nothing_more(server_config, clock):
    runtime, reads = Runtime(None), []
    runtime.show_counts = lambda: reads.append(clock[0]) or Runtime.show_counts(runtime)
    runtime.idle()
    assert not reads, "nothing was served"
    runtime.metrics.add_batch(Routing((None,)), 0, None)
    for _ in range(100):
        clock[0] += 0.1
        runtime.idle()
    assert len(reads) == runtime_module.IDLE_READS and reads[-1] - reads[0] > metrics.READ_SECONDS


def test_the_log_line_of_an_idle_server_comes_at_its_interval_and_once(server_config, monkeypatch, clock, caplog):
    monkeypatch.setenv(metrics.LOG_SECONDS_VARIABLE, "10")
    runtime = Runtime(None)
    runtime.metrics.add_batch(Routing((None,)), 0, None)
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        for _ in range(300):
            clock[0] += 0.1
            runtime.idle()
    lines = [record.message for record in caplog.records]
    assert lines == ["flashsample: since the start: fused 1 rows in 1 batches"]


def test_counters_that_cannot_be_written_cost_counts_and_no_step(server_config, monkeypatch, clock, caplog):
    runtime = Runtime(None)
    flush, broken = runtime.metrics.flush, OSError(28, "No space left on device")
    runtime.metrics.flush = lambda: (_ for _ in ()).throw(broken)
    for show in (runtime.show_counts, runtime.idle) * 2:
        clock[0] += 100.0
        runtime.metrics.add_fused(3, 0, clock[0])
        show()
        assert not runtime.metrics.is_behind(clock[0]), "what could not be shown is forgotten"
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("flashsample: counters miss steps, after OSError: [Errno 28] No space left on device")
    runtime.metrics.flush = flush
    runtime.metrics.add_fused(5, 0, clock[0])
    runtime.show_counts()
    assert runtime.metrics.summary().startswith("since the start: fused 5 rows in 1 batches")


@pytest.fixture
def preparing(server_config, script) -> tuple[Runtime, HeadState]:
    """A server that captures graphs of steps ahead, and its head, whose model SGLang has captured for 2 rows."""
    runtime, state = Runtime(None), make_state(CPU, capture=CountingCapture(), script=script)
    serve(runtime, state)
    state.captured[2] = hidden_states(CPU, 2)
    runtime.prepares_steps = True
    return runtime, state


def test_an_idle_server_captures_the_graphs_of_steps_ahead(preparing):
    runtime, state = preparing
    graphs = len(COMMON_KINDS) * (1 + len(STAGED_ROWS))
    for _ in range(graphs):
        runtime.idle()
    assert state.graphs.count == SLOTS * graphs
    runtime.idle()
    assert state.graphs.count == SLOTS * graphs and state.graphs.is_prepared
    assert runtime.status["heads"][0]["graphs"] == state.graphs.count


@pytest.mark.parametrize("served", ["drawn", "verified", "by another rank of DP attention"])
def test_a_request_that_follows_the_last_one_at_once_waits_for_no_capture(clock, preparing, served):
    """SGLang is idle between the two."""
    runtime, state = preparing
    for _ in range(3):
        if served == "drawn":
            runtime.metrics.add_fused(1, 0, clock[0])
        elif served == "verified":
            runtime.count_verified(None, Routing.all_fused(1), (torch.zeros(1),) * 3, VOCAB, clock[0])
        else:
            none = types.SimpleNamespace(reqs=[], req_pool_indices_cpu=torch.empty(0, dtype=torch.int64), device="cpu")
            StepHooks(runtime).from_schedule_batch(None, types.SimpleNamespace(), none, VOCAB)
        runtime.idle()
        clock[0] += 0.9 * QUIET_SECONDS
        runtime.idle()
    assert state.graphs is None
    clock[0] += QUIET_SECONDS
    runtime.idle()
    assert state.graphs.count == SLOTS


@pytest.mark.parametrize("reason", ["weights released", "weights may be released unannounced", "off"])
def test_an_idle_server_draws_nothing_where_weights_may_be_gone_or_the_fused_pass_is_off(preparing, reason):
    """SGLang releases the memory of weights while it has nothing to do."""
    runtime, state = preparing
    if reason == "weights released":
        runtime.weights_settled = False
    elif reason == "off":
        runtime.disable("a kernel failed")
    else:
        runtime.prepares_steps = Runtime(None).prepares_steps
    runtime.idle()
    assert state.graphs is None
    if reason == "weights released":
        runtime.weights_settled = True
        runtime.idle()
        assert state.graphs.count == SLOTS


def test_a_failure_while_graphs_are_captured_ahead_costs_these_and_not_the_server(preparing, caplog):
    runtime, state = preparing
    state.captured[2] = None  # of an SGLang that we do not know
    for _ in range(3):
        runtime.idle()
    (line,) = [record.message for record in caplog.records]
    words = "flashsample: CUDA graphs of the sampling step are captured in steps, not ahead: TypeError: "
    assert line.startswith(words) and not runtime.prepares_steps


@pytest.mark.parametrize("late", [False, True])
def test_a_gauge_says_that_the_only_head_is_sglangs_whenever_it_shows_itself(server_config, prometheus, late):
    server_config.observability.enable_metrics = True
    runtime, lm_head = Runtime(None), make_head(WEIGHT, set_lora=1, apply_lora=1)
    assert (runtime.head_for(Processor(), lm_head) if late else prepared(runtime, lm_head)) is None
    status = runtime.status
    assert (status["active"], status["reason"], status["heads"]) == (False, "the LM head has LoRA adapters", [])
    assert prometheus("active") == 0


def test_a_head_that_sglang_has_wrapped_since_its_check_is_sglangs_and_so_it_is_said(server_config, prometheus, device):
    server_config.observability.enable_metrics = True
    runtime, state = Runtime(None), make_state(device)
    serve(runtime, state)
    wrapper = make_head(state.lm_head.weight, set_lora=1, apply_lora=1)
    other = make_head(weights(device, seed=3), set_lora=1, apply_lora=1)
    assert runtime.head_for(state.processor, other) is None and runtime.heads == [state], "another head of the model"
    assert runtime.head_for(state.processor, wrapper) is None
    assert runtime.status["reason"] == "the LM head has LoRA adapters" and prometheus("active") == 0


class Headless(torch.nn.Module): ...


def load_refused(runtime: Runtime, device) -> None:
    model = make_model(device)
    model.lm_head.set_lora = model.lm_head.apply_lora = 1
    load(runtime, device, model=model)


def announce(runtime: Runtime, device) -> None:
    runtime.inactive_reason = "a mode is not served"
    runtime.announce_inactive()


@pytest.mark.parametrize(
    "start, reason",
    [
        (load, None),
        (lambda runtime, device: load(runtime, device, is_draft_worker=True), None),
        (lambda runtime, device: load(runtime, device, is_generation=False), "this model generates no tokens"),
        (
            lambda runtime, device: load(runtime, device, model=Headless()),
            "the model shows its LM head only at its first",
        ),
        (lambda runtime, device: StepHooks(runtime).load_model(None, object()), "load_model: AttributeError"),
        (load_refused, "the LM head has LoRA adapters"),
        (announce, "a mode is not served"),
    ],
    ids=["a model", "a draft model", "embedding", "no head", "an unknown runner", "refused head", "mode"],
)
def test_a_server_that_must_fuse_does_not_start_where_it_cannot(starting, device, monkeypatch, caplog, start, reason):
    monkeypatch.setenv(REQUIRE_VARIABLE, "1")
    words = f"because FLASHSAMPLE_REQUIRE is on and {reason}"
    with contextlib.nullcontext() if reason is None else pytest.raises(NotActiveError, match=words):
        start(starting, device)
    errors = [record.levelno == logging.ERROR for record in caplog.records]
    assert errors == [] if reason is None else errors[-1]
    assert len(starting.heads) == (start is load)


def test_the_logits_of_a_draft_model_are_sglangs(runtime, device):
    state, hidden, metadata = make_state(device), hidden_states(device), metadata_of("decode")
    serve(runtime, state)
    assert runtime.can_defer(state.processor, hidden, state.lm_head, metadata) is state
    draft = types.SimpleNamespace(named_modules=lambda: [("logits_processor", state.processor)])
    runner = types.SimpleNamespace(model=draft, is_generation=True, is_draft_worker=True)
    StepHooks(runtime).load_model(None, runner)
    assert runtime.can_defer(state.processor, hidden, state.lm_head, metadata) is None


@pytest.fixture
def tuned_file(tmp_path, monkeypatch, device):
    """A table for a head of 100 x 16 on this machine, and that head, padded as SGLang does."""
    lm_head = make_head(torch.randn(104, 16, generator=torch.Generator().manual_seed(0)).to(device))
    table = table_for_this_machine(LMHead(lm_head.weight, vocab_size=100))
    table = msgspec.structs.replace(table, entries=[entry for entry in table.entries if entry.kind == "plain"])
    file = tmp_path / "table.json"
    file.write_text(table.dumps())
    monkeypatch.setenv(lookup.FILE_VARIABLE, str(file))
    return file, table, lm_head


def test_a_starting_server_serves_with_its_table_and_says_so_in_one_line(starting, tuned_file, caplog):
    file, _, lm_head = tuned_file
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = prepared(starting, lm_head)
    assert state.head.table.is_measured(4, PLAIN)
    line, about_screen, active = [record.message for record in caplog.records]
    assert line.startswith(
        f"flashsample: tuned table {file} (match of GPU, LM head and versions: exact; from: the named file): "
    )
    assert about_screen.startswith("flashsample: no screen (INT8 copy of the LM head for small batches), same tokens: ")
    assert ": fused sampling active, " in active


def test_a_starting_server_says_which_of_its_compiled_choices_are_not_those_that_were_measured(
    starting, tuned_file, monkeypatch, caplog
):
    monkeypatch.setattr(fingerprint, "machine_code", lambda config, kind, parts: "another")
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        prepared(starting, tuned_file[2])
    warning, line = [record.message for record in caplog.records][:2]
    assert "is stale (other machine code than was measured: plain 1, 2, 4, 8, 16)" in warning
    assert "(match of GPU, LM head and versions: stale: other machine code than was measured: " in line


def test_a_config_that_fails_the_self_check_leaves_the_fused_pass_on_with_one_warning(
    starting, tuned_file, script, caplog
):
    _, table, lm_head = tuned_file
    entry: Entry = next(entry for entry in table.entries if entry.rows == 4)
    script.check = lambda table: Checked(
        table.without(entry.configuration, PLAIN), None, (f"off with {entry.configuration}", "off")
    )
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = prepared(starting, lm_head)
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(
        "flashsample: 2 configurations failed the self-check at start and are not used; their batch sizes use "
        f"built-in ones, which passed it: off with {entry.configuration}; off"
    )
    dispatch = state.head.table
    assert dispatch.lookup(4) == default_table(state.head.lm_head).lookup(4) and dispatch.is_measured(2, PLAIN)
    assert starting.inactive_reason is None


def test_a_bad_table_is_one_warning_and_the_built_in_choices(starting, tuned_file, caplog):
    file, _, lm_head = tuned_file
    file.write_text(file.read_text()[:500])
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = prepared(starting, lm_head)
    built_in = DispatchTable(HeadTraits.of(state.head.lm_head))
    assert all(
        state.head.table.lookup(n, kind) == built_in.lookup(n, kind) for n in range(1, 20) for kind in BATCH_KINDS
    )
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING] + [logging.INFO] * 3, "the bad table, the choices, the screen, active"
    assert caplog.records[0].message.startswith(f"flashsample: {file}: ")
    assert re.search(r": built-in kernel settings( \([^)]*\))?, same tokens(; |$)", caplog.records[1].message)


@pytest.mark.parametrize(
    "check, scale, reason",
    [
        (lambda table: Checked(table, "3 of 4 tokens differ", ()), None, "3 of 4 tokens differ"),
        (None, "half", "its setup failed: ValueError: logit_scale is 'half'; expected a finite number or None"),
    ],
    ids=["wrong tokens", "no setup"],
)
def test_a_head_that_fails_at_the_start_is_sglangs_with_one_warning(
    starting, device, script, caplog, check, scale, reason
):
    script.check = check
    starting.prepare_model(Model(make_head(weights(device)), logit_scale=scale))
    assert starting.heads == []
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.endswith(f"not active, SGLang's own sampler is used for everything: {reason}")


@pytest.mark.parametrize("says", [None, "2 of its 8 tokens are truncated ones", MemoryError("no room")], ids=str)
def test_flashinfer_draws_what_a_table_gives_it_only_if_it_draws_right_here(
    starting, device, tmp_path, monkeypatch, caplog, says
):
    def check(head) -> str | None:
        if isinstance(says, Exception):
            raise says
        return says

    lm_head = make_head(weights(device))
    table = table_for_this_machine(LMHead(lm_head.weight, vocab_size=600))
    entry = next(entry for entry in table.entries if (entry.kind, entry.rows) == ("truncate", 2))
    file = tmp_path / "table.json"
    file.write_text(msgspec.structs.replace(table, entries=[msgspec.structs.replace(entry, flashinfer=True)]).dumps())
    monkeypatch.setenv(lookup.FILE_VARIABLE, str(file))
    monkeypatch.setattr(runtime_module, "unsupported_by_flashinfer", check)
    state = prepared(starting, lm_head, 600)
    assert state.head.table.takes_flashinfer(2, BatchKind(truncate=True)) is (says is None)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    words = f"cannot use FlashInfer ({'MemoryError: no room' if isinstance(says, Exception) else says}): until restart"
    assert len(warnings) == (0 if says is None else 1) and all(words in warning for warning in warnings)


def test_a_head_that_shows_itself_during_a_capture_is_prepared_after_it(starting, device, monkeypatch):
    processor, lm_head = Processor(), make_head(weights(device))
    with monkeypatch.context() as capturing:
        capturing.setattr(runtime_module, "has_cuda", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert starting.head_for(processor, lm_head) is None
    assert starting.head_for(processor, lm_head) is not None


def test_a_step_says_when_all_its_rows_are_greedy(device, one_rank, script):
    for temperatures in ((1.0, 0.0), (0.0, 0.0)):
        SteadyServer(device, make_state(device, script=script), [{"temperature": each} for each in temperatures]).step()
    assert [call.params.all_greedy for call in script.calls] == [False, True]


NO_SCREEN = "small batches), same tokens: "
LATE = "the model shows its LM head only after the memory is shared out"
WITHOUT_SCREEN = {"check": lambda table: Checked(table.without_screen(), None, (), "out of registers")}
SCREENS = [
    (ScreenMode.ON, None, True, {}, "screen built, "),
    (ScreenMode.ON, "the hook is missing", True, {}, f"{NO_SCREEN}the hook is missing"),
    (ScreenMode.ON, None, False, {}, f"{NO_SCREEN}{LATE}"),
    (ScreenMode.AUTO, None, True, {}, f"{NO_SCREEN}no tuned table says that it is faster here, and a head of "),
    (ScreenMode.ON, None, True, WITHOUT_SCREEN, f"{NO_SCREEN}its kernels fail here: out of registers"),
]


@pytest.mark.parametrize("mode, reason, starts, changes, words", SCREENS, ids=[row[-1][-40:] for row in SCREENS])
def test_one_line_says_what_screen_was_built_or_why_not(
    starting, device, script, caplog, mode, reason, starts, changes, words
):
    starting.screen_mode, starting.no_screen_reason = mode, reason
    vars(script).update(changes)
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        lm_head = make_head(weights(device))
        state = prepared(starting, lm_head, 600) if starts else starting.head_for(Processor(), lm_head)
    (record,) = [record for record in caplog.records if "INT8 copy" in record.message]
    built = "screen built" in words
    assert words in record.message and state.has_screen is (state.screen is not None) is built
    assert record.levelno == (logging.WARNING if mode is ScreenMode.ON and not built else logging.INFO)
    state.update(4)
    (status,), scratch = starting.status["heads"], state.head.workspaces[0].num_bytes
    assert status["table"] is None and status["bytes"] == scratch + (state.screen.num_bytes if built else 0)
    assert (status["screen"] is not None) is built
    if built:
        screen, weight = state.screen, state.head.lm_head.weight
        assert status["screen"] == {"rows": screen.rows, "bytes": screen.num_bytes, "paused": False}
        share = 100 * screen.num_bytes / (weight.numel() * weight.element_size())
        assert f"batches of up to {screen.rows} requests faster, same tokens: " in record.message
        assert record.message.endswith(f" {screen.num_bytes:,} more bytes of GPU memory, {share:.1f} % of the head's")


def test_a_screen_that_finds_no_memory_leaves_the_head_without_one(starting, device, monkeypatch, caplog):
    def fails(*arguments, **options):
        raise torch.OutOfMemoryError("no memory")

    starting.screen_mode = ScreenMode.ON
    monkeypatch.setattr(runtime_module, "HeadScreen", fails)
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = prepared(starting, make_head(weights(device)), 600)
    assert state is not None and state.screen is None
    (line,) = [record.message for record in caplog.records if "INT8 copy" in record.message]
    assert line.endswith("small batches), same tokens: OutOfMemoryError: no memory")


# Screens of heads without a tuned table that knows them.


class GivenTimes:
    """A stopwatch. times: microseconds of the built-in choice and of the screened path, the same in each round; or an
    error. runs: each call is made once. heats: those that it has timed."""

    def __init__(self) -> None:
        self.times: tuple[float, float] | Exception = (300.0, 170.0)
        self.runs, self.heats = False, 0

    def __call__(self, calls, rounds, refresh):
        self.heats += 1
        for call in calls if self.runs else ():
            call()
        if isinstance(self.times, Exception):
            raise self.times
        return [[microseconds] * rounds for microseconds in self.times]


@pytest.fixture
def stopwatch(monkeypatch) -> GivenTimes:
    """Times the heats of all races, which also small heads are in."""
    given = GivenTimes()
    monkeypatch.setattr(HeadState, "stopwatch", lambda state: given)
    monkeypatch.setattr(screen_race, "MIN_RACED_BYTES", 0)
    return given


class Ranks:
    """``RankSync`` of the first of two ranks. others: answers of the second one, by the number of the question; this
    rank's own where it has none."""

    rank, num_ranks = 0, 2
    first_reason = RankSync.first_reason

    def __init__(self, others: dict[int, Any]) -> None:
        self.others, self.asked = others, 0

    def of_all(self, value: Any) -> list[Any]:
        self.asked += 1
        return [value, self.others.get(self.asked, value)]


def lines_of(caplog) -> list[str]:
    """The lines about the table and the screen of a head that has just been prepared."""
    return [record.message for record in caplog.records if "fused sampling active" not in record.message]


def test_a_screen_that_wins_its_race_at_the_start_serves_and_two_lines_and_the_status_say_so(
    starting, device, stopwatch, caplog
):
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = prepared(starting, make_head(weights(device)), 600)
    decided, built = lines_of(caplog)
    rows = 16 if device.type == "cpu" else 64
    used = ", ".join(f"{kind} 1-{min(most, rows)}" for kind, most in screen_race.MOST_ROWS.items())
    assert decided.startswith("flashsample: no tuned table for ")
    words = f"screen used for {used} rows, measured in "
    assert words in decided and "(plain 1: 300 µs without it, 170 µs with it); else built-in kernel" in decided
    assert f"batches of up to {rows} requests faster, same tokens" in built
    (status,) = starting.status["heads"]
    assert status["screen_decision"].startswith(words) and status["screen"]["rows"] == rows
    state.update(4)
    assert state.head.screen is not None and stopwatch.heats > 4


def test_the_draws_of_a_race_are_not_counted(starting, device, stopwatch, monkeypatch):
    """They would pause the screen, and be in the metrics."""
    monkeypatch.setattr(screen_race, "MOST_ROWS", {"plain": 2})
    stopwatch.runs = True
    state = prepared(starting, make_head(weights(device)), 600)
    assert stopwatch.heats and list(state.screen.new_counts()) == [0] * len(ScreenCounter)
    assert not state.head.screen.counters.any()


def test_a_screen_has_scratch_for_the_largest_batch_that_won_alone(starting, device, stopwatch, monkeypatch):
    monkeypatch.setattr(screen_race, "SIZES", (1, 2))
    state = prepared(starting, make_head(weights(device)), 600)
    assert state.screen.rows == state.screen.trial().max_rows == 2
    assert Screen.bytes_for(state.head.lm_head, 2) == state.screen.num_bytes


def test_a_screen_that_loses_its_race_is_not_kept(starting, device, stopwatch, caplog):
    stopwatch.times = (170.0, 300.0)
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = prepared(starting, make_head(weights(device)), 600)
    decided, none = lines_of(caplog)
    assert ": screen used for no batch, measured in " in decided
    assert none.endswith(f"{NO_SCREEN}no batch size has measured faster with it")
    assert state.screen is state.head.screen is None and state.head.table.screened_rows(512) == 0
    (status,) = starting.status["heads"]
    assert status["screen"] is None and status["screen_decision"].startswith("screen used for no batch")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("ptxas failed\nlong")], ids=str)
def test_a_race_that_fails_leaves_the_built_in_choice_with_one_warning(starting, device, stopwatch, caplog, error):
    stopwatch.times = error
    state = prepared(starting, make_head(weights(device)), 600)
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("flashsample: the screen (INT8 copy of the LM head) could not be timed; ")
    assert warning.endswith(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    assert state.screen is None and state.head.table.screened_rows(512) == 0 and starting.heads == [state]


def test_a_head_that_shows_itself_late_is_not_raced(starting, device, stopwatch):
    state = starting.head_for(Processor(), make_head(weights(device)))
    assert state.screen is None and stopwatch.heats == 0 and state.unraced is None


def test_a_head_with_a_table_and_one_below_the_least_size_are_not_raced(
    starting, device, stopwatch, tuned_file, monkeypatch, caplog
):
    _, _, lm_head = tuned_file
    assert prepared(starting, lm_head).screen is None
    monkeypatch.delenv(lookup.FILE_VARIABLE)
    monkeypatch.setattr(screen_race, "MIN_RACED_BYTES", 10**6)
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        starting.prepare_model(Model(make_head(weights(device)), vocab_size=600))
    assert all(state.screen is None for state in starting.heads) and stopwatch.heats == 0
    assert any("is too small for it to be" in record.message for record in caplog.records)


def test_a_stale_table_keeps_its_other_choices_and_the_screen_is_raced(
    starting, device, stopwatch, tuned_file, monkeypatch, caplog
):
    _, table, lm_head = tuned_file
    monkeypatch.setattr(lookup, "known_stale", lambda table: ["the built-in choices have changed since"])
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = prepared(starting, lm_head)
    choices = next(line for line in lines_of(caplog) if ": tuned kernel settings for " in line)
    assert "versions: stale: the built-in choices have changed since; " in choices
    assert "; screen used for plain 1-" in choices and ", measured in " in choices
    assert state.screen is not None and stopwatch.heats
    assert isinstance(state.head.table.lookup(1, PLAIN.screened), ScreenConfig)
    (entry,) = [entry for entry in table.entries if entry.rows == 1]
    assert state.head.table.lookup(1, PLAIN) == entry.configuration


def test_a_screen_without_room_in_the_memory_is_not_raced(starting, device, stopwatch, monkeypatch, caplog):
    monkeypatch.setattr(screen_lifecycle, "_lack_of_memory", lambda head, rows, mode: "it takes 9 bytes of 8")
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = prepared(starting, make_head(weights(device)), 600)
    assert state.screen is None and stopwatch.heats == 0 and state.head.table.screened_rows(512, measured=True) == 0
    assert lines_of(caplog)[1].endswith(f"{NO_SCREEN}it takes 9 bytes of 8")


SLOW = msgspec.to_builtins(screen_race.Outcome((screen_race.Heat("plain", 1, [300.0] * 12, [299.0] * 12),), 0.1))


@pytest.mark.parametrize(
    "other, reason",
    [
        ([SLOW], "no batch size has measured faster with it"),
        (["OutOfMemoryError: no memory"], "rank 1: OutOfMemoryError: no memory"),
        (["no screen was raced there"], "rank 1: no screen was raced there"),
    ],
    ids=["slower there", "failed there", "a table there"],
)
def test_what_is_not_faster_on_every_rank_is_used_on_none(starting, device, stopwatch, caplog, other, reason):
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = starting._prepare(Processor(), make_head(weights(device)), starting=True)
        assert state.screen is not None and state.unraced is not None
        starting._ranks = Ranks({1: other})
        starting._race_screens([state])
    assert state.screen is None and state.head.table.screened_rows(512) == 0
    assert caplog.records[-1].message.endswith(f"{NO_SCREEN}{reason}")


def test_a_rank_that_finds_no_memory_for_a_screen_that_won_goes_on_without_it(
    starting, device, stopwatch, monkeypatch, caplog
):
    """A screen is private: a rank that raised between two questions would leave the others alone."""
    won = msgspec.to_builtins(screen_race.Outcome((screen_race.Heat("plain", 1, [300.0] * 12, [100.0] * 12),), 0.1))
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        state = starting._prepare(Processor(), make_head(weights(device)), starting=True)

        def full(rows: int) -> None:
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(state.screen, "fit", full)
        starting._settle_screen(state, [won, won])
    assert state.screen is None and state.head.screen is None
    assert caplog.records[-1].message.endswith(f"{NO_SCREEN}OutOfMemoryError: no memory")


def test_row_buffers_that_found_no_memory_are_made_by_a_later_step(monkeypatch):
    state = make_state(CPU)
    state.update(4)
    more = MAX_COMPILED_ROWS + 1

    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(RowBuffers, "allocate", full)
        with pytest.raises(torch.OutOfMemoryError):
            state.update(more)
    state.update(more)
    assert state.rows.capacity >= more and state.head.max_rows >= more


def test_ranks_without_a_head_have_no_say_and_learn_the_status_of_the_others(starting, device, stopwatch):
    state = starting._prepare(Processor(), make_head(weights(device)), starting=True)
    starting._ranks = Ranks({1: [], 2: []})
    starting._race_screens([state])
    assert state.has_screen
    starting._statuses = ["of before"]
    starting._ranks = Ranks({1: [SLOW], 2: [state.status]})
    starting._race_screens([])
    assert starting._statuses == [state.status]


GROUPS = {
    "step": versions.HOOK_TARGETS,
    "arrival": {hooks.ARRIVAL_TARGET},
    "prompts": versions.PROMPT_TARGETS,
    "replicas": versions.REPLICA_TARGETS,
    "verification": {name for names in versions.SPECULATION_TARGETS for name in names},
    "drafts": versions.DRAFT_TARGETS,
    "status": {hooks.STATUS_TARGET},
    "idle": {hooks.IDLE_TARGET},
}


@pytest.fixture
def starts(server_config, registry, classes, pretend, monkeypatch) -> Callable[..., tuple[Runtime, list[str]]]:
    """Makes the sampler of a server, whose SGLang is refused for a reason or not; returns its runtime and which hooks
    were installed, in their order."""

    def start(refused: str | None = None) -> tuple[Runtime, list[str]]:
        pretend("sgl_flashsample.sglang.sampler", FlashSampler=lambda runtime: runtime)
        monkeypatch.setattr(plugin, "_runtime", None)
        monkeypatch.setattr(plugin.versions, "unsupported_version", lambda installed: refused)
        runtime = plugin.make_sampler()
        group = {target: name for name, targets in GROUPS.items() for target in targets}
        return runtime, list(dict.fromkeys(group.get(target, "weights") for target in registry.hooked))

    return start


@pytest.mark.parametrize("wanted", [True, False], ids=["a hook does not land", "no screen is wanted"])
def test_a_server_without_hooks_of_weight_changes_has_no_screen(starts, classes, monkeypatch, wanted):
    monkeypatch.setenv(SCREEN_VARIABLE, "on" if wanted else "off")
    classes[hooks.MANAGER] = ImportError("X")
    made, installed = starts()
    assert plugin.make_sampler() is made and made.inactive_reason is None and "weights" not in installed
    assert made.no_screen_reason == (f"{hooks.MANAGER} is missing (X)" if wanted else "FLASHSAMPLE_SCREEN is off")
    assert not made.prepares_steps, "it would draw with weights that are released"


def test_a_server_is_told_once_of_a_variable_that_does_not_exist(starts, monkeypatch, caplog):
    monkeypatch.setenv("FLASHSAMPLE_TUNDE", "1")
    starts()
    plugin.make_sampler()
    (line,) = [record.message for record in caplog.records if "TUNDE" in record.message]
    assert line == "flashsample: FLASHSAMPLE_TUNDE is not a variable of this package; did you mean FLASHSAMPLE_TUNED?"


LAST = ["status", "idle"]  # whatever there is
STEP, VERIFICATION = next(iter(versions.HOOK_TARGETS)), next(iter(versions.SPECULATION_TARGETS[0]))


@pytest.mark.parametrize("screen", ["on", "off"])
@pytest.mark.parametrize(
    "algorithm, refused, missing, reason, installed",
    [
        (None, None, set(), None, ["step", "arrival", "prompts", "weights"]),
        ("EAGLE", None, set(), None, ["step", "arrival", "prompts", "verification", "drafts", "weights"]),
        ("EAGLE", "SGLang 9.9 is unknown", set(), "SGLang 9.9 is unknown", []),
        ("EAGLE", None, {STEP}, f"no {STEP}", []),
        (
            "EAGLE",
            None,
            GROUPS["verification"],
            "; ".join(f"no {name}" for name in versions.SPECULATION_TARGETS[0]),
            ["step", "arrival", "prompts"],
        ),
    ],
    ids=["no drafts", "drafts", "an unknown version", "no place for a step", "no place for a verification"],
)
def test_a_server_gets_the_hooks_of_its_mode_until_one_does_not_land_which_is_said(
    starts, server_config, registry, monkeypatch, caplog, algorithm, refused, missing, reason, installed, screen
):
    """With or without a screen: graphs that are captured ahead draw with the weights."""
    monkeypatch.setenv(SCREEN_VARIABLE, screen)
    server_config.spec.speculative_algorithm, registry.missing = algorithm, missing
    runtime, done = starts(refused)
    assert runtime.inactive_reason == reason and done == [*installed, *LAST]
    assert runtime.prepares_steps is (reason is None) and (runtime.no_screen_reason is None) is (screen == "on")
    answer = types.SimpleNamespace(internal_state={})
    registry.hooked[hooks.STATUS_TARGET][0](answer)
    assert answer.internal_state["flashsample"]["reason"] == reason
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == (reason is not None)
    assert all(one.endswith(f"not active, SGLang's own sampler is used for everything: {reason}") for one in warnings)


@pytest.mark.parametrize("missing", [(), tuple(versions.REPLICA_TARGETS)[:1]])
def test_ranks_that_share_a_head_but_no_requests_have_hooks_to_agree_on_each_step(
    starts, server_config, registry, missing
):
    change(server_config, REPLICAS)
    registry.missing = set(missing)
    runtime, done = starts()
    assert done == ["step", "arrival", "prompts", *([] if missing else ["replicas", "weights"]), *LAST]
    assert runtime.inactive_reason == (f"no {missing[0]}" if missing else None)


@pytest.mark.parametrize("algorithm", [None, "EAGLE", "DFLASH"])
def test_paths_per_token_are_reported_but_with_drafts_where_a_warning_says_that_they_are_not(
    server_config, monkeypatch, caplog, algorithm
):
    """SGLang keeps one value per step, and gives as many to a client as there are tokens."""
    monkeypatch.setenv(REPORT_PATH_VARIABLE, "1")
    server_config.spec.speculative_algorithm = algorithm
    assert Runtime(None).settings.report_path == (algorithm is None)
    warnings = [record.message for record in caplog.records if REPORT_PATH_VARIABLE in record.message]
    assert len(warnings) == (algorithm is not None)


@pytest.mark.parametrize("known", [{}, {"dp_rank": None}, {"dp_rank": 3}])
@pytest.mark.parametrize("later", [None, 2])
def test_each_replica_tells_the_samples_of_a_seeded_request_apart_from_those_of_the_others(
    starting, server_config, device, known, later
):
    """SGLang spreads them over the replicas. SGLang 0.5.17 says with the model which one this is."""
    vars(server_config.parallel).update(known)
    runtime = Runtime(None)
    assert runtime.arrivals.rank == (known.get("dp_rank") or 0)
    load(runtime, device, ps=types.SimpleNamespace(dp_rank=later))
    assert runtime.arrivals.rank == (later or known.get("dp_rank") or 0)


@pytest.mark.parametrize(
    "arguments, inherited, required",
    [
        (["--sampling-backend", "flashsample"], "", "0"),
        (["--sampling-backend=flashsample"], "", "0"),
        (["--use-ray", "--sampling-backend", "flashsample"], "", "0"),
        (["--model-path", "/models/flashsample"], "", "0"),
        ([], "1", "0"),
        ([], "", "1"),
        ([], "", "0"),
    ],
)
def test_an_installed_plugin_adds_its_name_and_looks_for_a_replaced_backend_only_where_it_was_asked_for(
    server_config, registry, monkeypatch, arguments, inherited, required
):
    """The server's processes are started without its arguments: they inherit a variable. A server that must fuse need
    not have the argument: ``sgl.Engine`` takes the backend as a parameter."""
    backends = {}
    sys.modules["sglang.srt.layers.sampler"].register_sampler_backend = backends.__setitem__
    monkeypatch.setattr(sys, "argv", ["server", *arguments])
    monkeypatch.setenv("FLASHSAMPLE_REQUESTED", inherited)
    monkeypatch.setenv(REQUIRE_VARIABLE, required)
    plugin.register()
    requested = "--model-path" not in arguments and bool(arguments or inherited)
    assert backends == {"flashsample": plugin.make_sampler}
    looks = requested or required == "1"
    by_ray = "--use-ray" in arguments
    assert (
        registry.registered
        == ["sglang.srt.arg_groups.attention_hook._deterministic_sampling_backend"]
        + ["sglang.srt.layers.sampler.create_sampler"] * looks
        + ["sglang.srt.server_args.ServerArgs.from_cli_args"] * by_ray
    )
    assert os.environ["FLASHSAMPLE_REQUESTED"] == ("1" if requested else "")


@pytest.mark.parametrize("use_ray, backend", [(True, "flashsample"), (True, "pytorch"), (False, "flashsample")])
@pytest.mark.parametrize("must_fuse", [False, True])
def test_ray_whose_actors_load_no_plugins_gets_sglangs_own_backend_and_ends_a_server_that_must_fuse(
    monkeypatch, caplog, use_ray, backend, must_fuse
):
    monkeypatch.setenv(REQUIRE_VARIABLE, "1" if must_fuse else "0")
    arguments = types.SimpleNamespace(use_ray=use_ray, sampling_backend=backend)
    with pytest.raises(NotActiveError, match="Ray") if use_ray and must_fuse else contextlib.nullcontext():
        plugin._leave_ray(None, arguments)
    left = use_ray and backend == "flashsample"
    assert arguments.sampling_backend == (None if left else backend)
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    words = "not active, SGLang's own sampler is used for everything: Ray's actors load no plugins (--use-ray)"
    assert lines == [f"flashsample: {words}"] * left


@pytest.mark.slow
@needs_sglang
def test_sglang_parses_ray_with_our_backend_into_its_own():
    """In a process of its own, which hooks its SGLang."""
    code = """
import argparse, contextlib, sys, torch
if torch.version.cuda is None:
    import lab.torchvision_schemas
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
arguments = parser.parse_args(sys.argv[1:])
with contextlib.suppress(Exception):  # a model that is not there
    ServerArgs.from_cli_args(arguments)
print("backend", arguments.sampling_backend)
"""
    given = ["--model-path", "none", "--use-ray", "--sampling-backend", "flashsample"]
    tests = Path(__file__).resolve().parents[1]  # for ``lab``
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, cwd=tests)
    assert "backend None" in done.stdout and "Ray's actors load no plugins" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "backend, target, keeps", [("flashsample", None, True), ("flashsample", "fsdp", False), ("pytorch", None, False)]
)
def test_deterministic_mode_keeps_our_backend_where_it_is_asked_for_and_leaves_on_policy_logprobs(
    backend, target, keeps
):
    view = types.SimpleNamespace(sampling_backend=backend, rl_on_policy_target=target)
    forced = {"sampling_backend": "pytorch"}
    assert plugin._keep_backend(lambda view: forced, view) == ({} if keeps else forced)


@pytest.mark.parametrize("must_fuse", [False, True])
def test_a_backend_that_sglang_replaces_is_a_warning_and_ends_a_server_that_must_fuse(
    server_config, registry, pretend, monkeypatch, caplog, must_fuse
):
    class FlashSampler: ...

    pretend("sgl_flashsample.sglang.sampler", FlashSampler=FlashSampler)
    monkeypatch.setenv(REQUIRE_VARIABLE, "1" if must_fuse else "0")
    server_config.exec.kernel.sampling_backend = "pytorch"
    server_config.exec.deterministic.rl_on_policy_target = "fsdp"
    reason = (
        "SGLang uses the sampling backend pytorch instead of flashsample (on-policy RL logprobs, which it rounds to "
        "bfloat16: another order of a sum may round to another number)"
    )
    with pytest.raises(NotActiveError) if must_fuse else contextlib.nullcontext():
        plugin._explain_replacement(object())
    assert caplog.records[0].message == f"flashsample: not active: {reason}"
    answer = types.SimpleNamespace(internal_state={})
    registry.hooked.pop(hooks.STATUS_TARGET)[0](answer)
    assert answer.internal_state == {"flashsample": {"active": False, "reason": reason}}
    plugin._explain_replacement(FlashSampler())
    assert not registry.hooked, "nothing was replaced"


# Failures and their cost.


@pytest.fixture
def path_of_a_batch(runners, head, info_of, hidden):
    """A function that draws a batch of the given number of rows on both servers and returns the path of its rows. Every
    other row has a bias. Both servers must draw the same tokens."""

    def draw(num_rows: int) -> str:
        states = hidden(num_rows)
        biases = [{"17": 300.0} if n % 2 else None for n in range(num_rows)]
        requests = [request(f"r{n}", temperature=0, logit_bias=bias) for n, bias in enumerate(biases)]
        got, output = runners[0].sample(head.lazy(states), info_of(requests))
        want, _ = runners[1].sample(head.logits(states), info_of(requests))
        assert got.tolist() == want.tolist()
        (path,) = set(output.customized_info["flashsample_path"])
        return path

    return draw


def test_a_batch_that_finds_no_memory_and_larger_ones_are_sglangs_and_smaller_ones_stay_fused(
    path_of_a_batch, runners, script, caplog
):
    script.error, script.smallest = torch.OutOfMemoryError("no memory"), 4
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        paths = {num_rows: path_of_a_batch(num_rows) for num_rows in (2, 5, 6, 4, 3)}
    assert paths == dict.fromkeys((2, 3), "fused") | dict.fromkeys((4, 5, 6), "native:out_of_memory")
    assert [call.rows for call in script.calls] == [2, 5, 4, 3], "6 rows are not tried after 5, 4 are"
    script.error = None
    assert [path_of_a_batch(num_rows) for num_rows in (3, 4, 5)] == ["fused", *["native:out_of_memory"] * 2]
    assert runners[0].sampler.runtime.inactive_reason is None
    assert [record.message for record in caplog.records] == [
        f"flashsample: out of GPU memory for a batch of {rows} requests: from this batch on, for 5 minutes, batches of "
        "this size or more use SGLang's own sampler; a lower --mem-fraction-static leaves this plugin more memory"
        for rows in (5, 4)
    ]


def test_a_batch_that_found_no_memory_is_tried_again_after_some_minutes(path_of_a_batch, script, clock, caplog):
    script.error = torch.OutOfMemoryError("no memory")
    path_of_a_batch(5)
    script.error = None
    clock[0] += RETRY_SECONDS - 1
    assert path_of_a_batch(5) == "native:out_of_memory"
    clock[0] += 1
    assert [path_of_a_batch(num_rows) for num_rows in (5, 6)] == ["fused", "fused"]
    assert len(caplog.records) == 1


def test_any_other_failure_leaves_everything_to_sglang_with_one_warning(path_of_a_batch, runners, script, caplog):
    script.error = ZeroDivisionError("no such kernel")
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        assert [path_of_a_batch(2) for _ in range(3)] == ["native:error", "native:inactive", "native:inactive"]
    assert len(script.calls) == 1
    assert runners[0].sampler.runtime.inactive_reason == "ZeroDivisionError: no such kernel"
    (record,) = caplog.records
    assert record.message.startswith(
        "flashsample: fused sampling failed; from this batch on until restart, SGLang's own sampler is used for "
        "everything (same distribution, other random numbers): ZeroDivisionError: "
    )


def test_a_failure_to_tell_rows_apart_leaves_everything_to_sglang(path_of_a_batch, runners, monkeypatch):
    def fails(*arguments, **options):
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("sgl_flashsample.sglang.sampler.routing_of", fails)
    assert [path_of_a_batch(2) for _ in range(2)] == ["native:error", "native:inactive"]
    assert runners[0].sampler.runtime.inactive_reason == "routing: ZeroDivisionError: a fault"


def leave_head(given) -> None:
    """A head is SGLang's, and so are its logits."""
    given.sampler.runtime._refuse("the LM head has LoRA adapters")
    given.output.next_token_logits = given.head.logits(given.states)


def know_other(name: str, value: object) -> Callable:
    return lambda given: setattr(given.info, name, value)


# Differences from the call that we know: of a later SGLang, or as something has read the logits.
UNKNOWN: dict[str, tuple[Callable, str]] = {
    "an argument": (lambda given: given.options.update(argument=1), "unknown_argument"),
    "fewer positions": (lambda given: given.arguments.append(given.arguments.pop()[:1]), "positions"),
    "no batch": (know_other(BATCH_ATTRIBUTE, None), "unknown_rows"),
    "another batch": (know_other(BATCH_ATTRIBUTE, make_batch({})), "unknown_rows"),
    "no slots": (know_other(SLOTS_ATTRIBUTE, None), "unknown_rows"),
    "fewer slots": (know_other(SLOTS_ATTRIBUTE, torch.tensor([1])), "unknown_rows"),
    "logits that were read": (lambda given: given.output.next_token_logits.add_(0.0), "logits_computed"),
    "logits that were read beside another head": (
        lambda given: (
            given.output.next_token_logits.dense(),
            given.sampler.runtime._refuse("the LM head is quantised"),
        ),
        "logits_computed",
    ),
    "logits of the fused head": (
        lambda given: setattr(given.output, "next_token_logits", given.head.logits(given.states)),
        "logits_computed",
    ),
    "the only head": (leave_head, "inactive"),
    "another head": (leave_head, "inactive"),
    "another head and a prompt's logprobs": (
        lambda given: (leave_head(given), setattr(given.output, "input_token_logprobs", torch.zeros(3))),
        "input_logprobs",
    ),
}


@pytest.mark.parametrize("return_logprob", [False, True])
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_call_that_is_not_as_we_know_it_is_sglangs(runners, head, info_of, hidden, monkeypatch, name, return_logprob):
    from sglang.srt.layers.sampler import Sampler

    theirs, (change, reason) = Sampler.forward, UNKNOWN[name]
    monkeypatch.setattr(Sampler, "forward", lambda self, *arguments, argument=None: theirs(self, *arguments))
    states, info = hidden(2), info_of([request("a", temperature=0), request("b", temperature=0)])
    sampler = runners[0].sampler
    if "another head" in name or "fused" in name:
        serve(sampler.runtime, head.state)

    def call(output, *arguments):
        given = types.SimpleNamespace(sampler=sampler, head=head, states=states, info=info, output=output)
        given.arguments, given.options = [*arguments], {}
        change(given)
        return sampler(output, *given.arguments, **given.options)

    runners[0].sampler = call
    tokens, output = runners[0].sample(head.lazy(states), info, return_logprob)
    assert output.customized_info == {"flashsample_path": [f"native:{reason}"] * 2}
    assert tokens.tolist() == head.logits(states).argmax(-1).tolist()
    assert (output.next_token_logprobs is not None) is return_logprob
    assert sampler.runtime.inactive_reason is None, "the next batch is fused"


def test_what_a_model_tells_of_its_tokens_is_answered_beside_their_paths(runners, head, info_of, hidden):
    states, info, of_model = hidden(2), info_of([request("a"), request("b")]), {"experts": [[1, 2], [3, 4]]}
    sampler = runners[0].sampler

    def call(output, *arguments):
        output.customized_info = of_model
        return sampler(output, *arguments)

    runners[0].sampler = call
    _, output = runners[0].sample(head.lazy(states), info)
    assert output.customized_info == {"experts": [[1, 2], [3, 4]], "flashsample_path": ["fused"] * 2}
    assert of_model.keys() == {"experts"}, "the model may keep it"


def test_logits_that_sglang_has_preprocessed_are_sampled_as_they_are(runners, head, info_of, hidden):
    """Its bias is not added twice."""
    states, requests = hidden(2), [request(rid, temperature=0, logit_bias={"17": 3.0}) for rid in "ab"]
    ours = ModelRunner(runners[0].sampler)  # without our hook
    tokens, output = ours.sample(head.lazy(states), info_of(requests))
    assert tokens.tolist() == runners[1].sample(head.logits(states), info_of(requests))[0].tolist()
    assert output.customized_info == {"flashsample_path": ["native:logits_computed"] * 2}
    biased = head.logits(states)
    biased[:, 17] += 3.0
    assert torch.equal(output.next_token_logits, biased)


def test_a_failing_hook_leaves_the_batch_to_sglang_instead_of_ending_the_scheduler(runtime):
    info = types.SimpleNamespace(**{BATCH_ATTRIBUTE: "something"})
    slots = torch.arange(1, 3)
    broken = types.SimpleNamespace(reqs=None, device="cpu", req_pool_indices_cpu=slots)  # not the SGLang that we know
    StepHooks(runtime).from_schedule_batch(None, info, broken, 100)
    assert getattr(info, BATCH_ATTRIBUTE) is None
    assert "from_schedule_batch: TypeError" in runtime.inactive_reason


def test_a_request_that_cannot_be_read_is_one_warning_and_nothing_is_off(runtime, caplog):
    info = types.SimpleNamespace()
    requests = [object()] * 2  # without the attributes that we read
    batch = types.SimpleNamespace(reqs=requests, device="cpu", req_pool_indices_cpu=torch.arange(1, 3))
    for _ in range(2):
        StepHooks(runtime).from_schedule_batch(None, info, batch, 100)
        assert [row.reason for row in getattr(info, BATCH_ATTRIBUTE).rows] == [Reason.UNREADABLE] * 2
    assert runtime.inactive_reason is None
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith(
        "flashsample: a request cannot be read, so SGLang's own sampler draws it, and others like"
    )
    assert "AttributeError" in warning


@pytest.mark.parametrize("hook", ["get_logits", "load_model"])
def test_a_failure_while_deciding_or_preparing_leaves_the_model_to_sglang(runtime, hook):
    """An unknown SGLang: its metadata and model runners lack the attributes that we read."""
    step_hooks = StepHooks(runtime)
    if hook == "load_model":
        step_hooks.load_model("result", object())
    else:
        logits = step_hooks.get_logits(
            lambda *arguments: "sglang's", Processor(), torch.zeros(2, 16), make_head(WEIGHT), object()
        )
        assert logits == "sglang's"
    assert runtime.inactive_reason.startswith(f"{hook}: AttributeError")


def test_logits_that_were_left_for_later_are_sglangs_own_whoever_reads_them(runtime, device):
    """Computed by SGLang's code, without its buffer of logits: another step may have that one."""
    state, hidden = make_state(device), hidden_states(device)
    serve(runtime, state)

    def original(processor, hidden, lm_head, metadata, bias, use_buffer):
        assert bias is None and use_buffer is False
        return hidden @ lm_head.weight.T

    logits = StepHooks(runtime).get_logits(original, state.processor, hidden, state.lm_head, metadata_of("extend"))
    assert logits.prefills and torch.equal(logits.dense(), hidden @ state.lm_head.weight.T)


def test_once_the_fused_pass_is_off_new_batches_and_plain_logits_are_left_as_they_are(runtime):
    step_hooks, info = StepHooks(runtime), types.SimpleNamespace()
    runtime.inactive_reason = "off"
    step_hooks.from_schedule_batch(None, info, types.SimpleNamespace(reqs=[], device="cpu"), 100)
    step_hooks.filter_batch(None, info, [0], None)
    assert vars(info) == {}
    output = types.SimpleNamespace(next_token_logits=torch.zeros(1, 4))
    got = step_hooks.preprocess_logits(lambda *arguments: arguments, "runner", output, info)
    assert got == ("runner", output, info)


def test_logits_with_an_embedding_bias_are_sglangs(runtime, device):
    logits = StepHooks(runtime).get_logits(
        lambda *arguments: arguments[4], Processor(), hidden_states(device), make_head(WEIGHT), object(), "a bias"
    )
    assert logits == "a bias" and runtime.inactive_reason is None
