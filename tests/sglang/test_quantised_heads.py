"""LM heads in float8_e4m3fn with scales: which are served, and that weight and scale are followed together."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_states import (
    PADDING,
    VOCAB,
    WIDTH,
    Model,
    Processor,
    hidden_states,
    make_head,
    make_state,
    metadata_of,
    serve,
)
from torch.nn import Parameter

from sgl_flashsample.kernels.reference import dequantize_ref
from sgl_flashsample.sglang import quantised, support
from sgl_flashsample.sglang import runtime as runtime_module
from sgl_flashsample.sglang.exchange import Exchange
from sgl_flashsample.sglang.head import HeadState
from sgl_flashsample.sglang.hooks import WeightHooks
from sgl_flashsample.sglang.runtime import Runtime

E4M3, ROWS = torch.float8_e4m3fn, VOCAB + PADDING


class QuantisedHead(torch.nn.Module):
    """An LM head with the tensors that SGLang's loaders leave: the transpose of ``weight``, and ``weight_scale``.
    truth: ``[V, D]`` float64, the weights that they stand for."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, hidden_dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.load(weight, scale)
        self.embedding_dim, self.orig_dtype, self.quant_method = weight.shape[1], hidden_dtype, object()

    def load(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self.weight, self.weight_scale = (Parameter(one, requires_grad=False) for one in (weight.t(), scale))

    @property
    def truth(self) -> torch.Tensor:
        weight = self.weight if self.weight.shape[1] == self.embedding_dim else self.weight.t()
        return dequantize_ref(weight, self.weight_scale.reshape(-1).expand(len(weight)))


def tensors(device: torch.device, seed: int = 0, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the scales of its rows, ``[V, 1]``, as checkpoints hold them."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(rows, WIDTH, generator=generator)
    scale = exact.abs().amax(1, keepdim=True) / 448
    return (exact / scale).to(device, E4M3), scale.to(device)


def loaded(device: torch.device, seed: int = 0, **options: Any) -> QuantisedHead:
    return QuantisedHead(*tensors(device, seed), **options)


def with_one_scale(device: torch.device, seed: int = 0) -> QuantisedHead:
    weight, scale = tensors(device, seed)
    return QuantisedHead(weight, scale.max())


def assert_gives_logits_of(state: HeadState, lm_head: QuantisedHead) -> None:
    """``state`` computes the logits of the weights that the head stands for by now, as far as float16 tells them."""
    hidden = hidden_states(lm_head.weight.device, dtype=lm_head.orig_dtype)
    assert_close(state.head.logits(hidden), hidden, lm_head.truth)


def assert_close(got: torch.Tensor, hidden: torch.Tensor, truth: torch.Tensor) -> None:
    """Logits are those of ``truth``, but for the rounding to the dtype of the hidden states."""
    want = hidden.double() @ truth.T
    assert got.dtype is hidden.dtype and got.shape == want.shape
    assert ((got.double() - want).abs() <= 2 * torch.finfo(got.dtype).eps * (1 + want.abs())).all()


# Layouts.

LAYOUTS: dict[str, Callable[[QuantisedHead], None]] = {
    "as loaders leave them": lambda head: None,
    "as checkpoints hold them": lambda head: head.load(head.weight, head.weight_scale),
    "scales without a second dimension": lambda head: head.load(head.weight.t(), head.weight_scale[:, 0]),
    "one scale": lambda head: head.load(head.weight.t(), head.weight_scale.max()),
    "one scale in a vector": lambda head: head.load(head.weight.t(), head.weight_scale[3]),
    "bfloat16 hidden states": lambda head: setattr(head, "orig_dtype", torch.bfloat16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_is_read_in_each_layout_that_loaders_leave(server_config, device, monkeypatch, layout):
    monkeypatch.setattr(support, "draws_in_host_memory", lambda device: True)  # else bfloat16 needs a GPU
    monkeypatch.setattr(support, "unsupported_by_machine", lambda: None)
    lm_head = loaded(device)
    LAYOUTS[layout](lm_head)
    assert support.unsupported_head(Processor(), lm_head) is None
    assert_gives_logits_of(HeadState(Processor(), lm_head), lm_head)


def test_the_rows_of_a_square_weight_are_the_contiguous_ones(server_config, device):
    weight, scale = tensors(device, rows=WIDTH)
    lm_head, want = QuantisedHead(weight, scale), dequantize_ref(weight, scale[:, 0])
    assert torch.equal(quantised.read(lm_head).weight.double(), weight.double())
    hidden = hidden_states(device, dtype=torch.float16)
    assert_close(HeadState(Processor(vocab_size=WIDTH), lm_head).head.logits(hidden), hidden, want)


def test_logits_have_the_dtype_of_hidden_states_where_others_are_asked_for(device):
    """SGLang's own computation of such logits does not look at the option."""
    state = HeadState(Processor(use_fp32_lm_head=True), loaded(device))
    assert state.head.lm_head.rounding is torch.float16


def test_a_rank_has_the_scales_of_its_rows(device):
    weight, scale = tensors(device)
    lm_head = QuantisedHead(weight[304:], scale[304:])
    state = HeadState(Processor(), lm_head, exchange=Exchange(types.SimpleNamespace(rank_in_group=1, world_size=2)))
    assert state.head.lm_head.vocab_start == 304 and not state.whole_rows
    assert torch.equal(state.head.lm_head.scale, scale[304:, 0])


@pytest.mark.parametrize("scales", ["one for each row", "one"])
def test_a_rank_whose_part_ends_within_a_group_has_the_scales_of_its_whole_groups_and_follows_them(device, scales):
    """Ids 300 to 599 are its part: the group of 288 to 303 is the rank's before."""
    weight, scale = tensors(device)
    scale = scale[300:600].contiguous() if scales == "one for each row" else scale[:1].clone()
    lm_head = QuantisedHead(weight[300:600], scale)
    exchange = Exchange(types.SimpleNamespace(rank_in_group=1, world_size=2))
    state = HeadState(Processor(vocab_size=600), lm_head, exchange=exchange)
    head = state.head.lm_head
    assert head.vocab_start == 304 and not state.whole_rows
    assert torch.equal(head.scale, scale[4:, 0] if len(scale) > 1 else scale[0].expand(296))
    lm_head.weight_scale.data.mul_(2)
    state.weights_change()
    state.update(1)
    assert torch.equal(
        state.head.lm_head.scale, lm_head.weight_scale[4:, 0] if len(scale) > 1 else scale[0].expand(296)
    )


# Refusals.


def scaled_by(scale: Any, **attributes: Any) -> Callable[[QuantisedHead], None]:
    def change(lm_head: QuantisedHead) -> None:
        lm_head.weight_scale = None if scale is None else Parameter(scale, requires_grad=False)
        vars(lm_head).update(attributes)

    return change


def weighted_by(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[QuantisedHead], None]:
    return lambda lm_head: setattr(lm_head, "weight", Parameter(make(lm_head.weight), requires_grad=False))


REFUSED: dict[str, tuple[Callable[[QuantisedHead], None], str]] = {
    "Marlin": (weighted_by(lambda weight: torch.zeros(4, 99, dtype=torch.int32)), "torch.int32 (packed for Marlin)"),
    "NVFP4": (
        weighted_by(lambda weight: torch.zeros(ROWS, 16, dtype=torch.uint8)),
        "torch.uint8 (packed, as NVFP4 and MXFP4 are)",
    ),
    "GPTQ": (lambda lm_head: delattr(lm_head, "weight"), "no two-dimensional weight (GPTQ, AWQ, GGUF or packed)"),
    "E5M2": (weighted_by(lambda weight: weight.to(torch.float8_e5m2)), "the LM head is torch.float8_e5m2"),
    "fnuz": (weighted_by(lambda weight: weight.to(torch.float8_e4m3fnuz)), "the LM head is torch.float8_e4m3fnuz"),
    "scales of blocks": (scaled_by(torch.ones(5, 1)), "weight_scale is (5, 1) torch.float32"),
    "as many scales of blocks as rows": (scaled_by(torch.ones(ROWS // 8, 8)), "scales of blocks are not supported"),
    "scales of blocks under another name": (
        scaled_by(None),
        "without weight_scale; scales of blocks are not supported",
    ),
    "scales in bytes": (scaled_by(torch.ones(ROWS, 1, dtype=torch.uint8)), f"weight_scale is ({ROWS}, 1) torch.uint8"),
    "scales of another tensor's rows": (scaled_by(torch.ones(ROWS, 2)[:, :1]), "with strides (2, 1)"),
    "another hidden size": (lambda lm_head: setattr(lm_head, "embedding_dim", 16), "contiguous rows of 16 columns"),
    "gaps in rows": (
        weighted_by(lambda weight: torch.zeros(ROWS, 2 * WIDTH).to(E4M3)[:, ::2]),
        f"with strides ({2 * WIDTH}, 2)",
    ),
    "float32": (lambda lm_head: setattr(lm_head, "orig_dtype", torch.float32), "hidden states in torch.float32"),
    "no dtype": (lambda lm_head: delattr(lm_head, "orig_dtype"), "hidden states in None"),
    "interpreted bfloat16": (
        lambda lm_head: setattr(lm_head, "orig_dtype", torch.bfloat16),
        "bfloat16 is wrong in Triton's interpreter",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_quantised_head_is_refused_by_name(server_config, name):
    lm_head, (change, words) = loaded(torch.device("cpu")), REFUSED[name]
    assert support.unsupported_head(Processor(), lm_head) is None
    change(lm_head)
    assert words in support.unsupported_head(Processor(), lm_head)


def test_a_head_with_fewer_rows_than_the_vocabulary_is_refused(server_config, device):
    """Its weight has more columns than that."""
    weight, scale = tensors(device, rows=16)
    reason = support.unsupported_head(Processor(vocab_size=20), QuantisedHead(weight, scale))
    assert reason == "the vocabulary has 20 ids, the LM head 16 rows"


def test_a_device_that_cannot_convert_the_weight_is_refused(server_config, device, monkeypatch):
    monkeypatch.setattr(quantised, "converts_e4m3", lambda device: False)
    reason = support.unsupported_head(Processor(), loaded(device))
    assert reason == "the LM head is torch.float8_e4m3fn, which needs compute capability 8.9 or newer"


def test_a_head_without_a_weight_that_comes_late_is_refused_beside_served_ones(runtime, device):
    serve(runtime, make_state(device))
    assert runtime.head_for(Processor(), types.SimpleNamespace()) is None


# Changes of weights.


def write(lm_head: QuantisedHead, seed: int) -> None:
    """Into the tensors that are there, as PyTorch counts writes."""
    weight, scale = tensors(lm_head.weight.device, seed)
    lm_head.weight.copy_(weight.t())
    lm_head.weight_scale.copy_(scale if lm_head.weight_scale.numel() > 1 else scale.max())


def move_scale(lm_head: QuantisedHead) -> None:
    lm_head.weight_scale.data = 2 * lm_head.weight_scale.data


CHANGES: dict[str, Callable[[QuantisedHead], None]] = {
    "new Parameters, of new values": lambda lm_head: lm_head.load(*tensors(lm_head.weight.device, 1)),
    "new Parameters, transposed": lambda lm_head: lm_head.load(lm_head.weight.clone(), lm_head.weight_scale.clone()),
    "a new scale": lambda lm_head: lm_head.load(lm_head.weight.t(), 2 * lm_head.weight_scale),
    "another scale at the same Parameter": move_scale,
    "one scale instead of many": lambda lm_head: lm_head.load(lm_head.weight.t(), lm_head.weight_scale.max()),
    "writes": lambda lm_head: write(lm_head, 1),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("made", [loaded, with_one_scale])
def test_a_change_is_seen_by_the_next_step_and_followed(device, made, name):
    lm_head = made(device)
    state = HeadState(Processor(), lm_head)
    state.update(1)
    assert state.is_current()
    before = lm_head.truth.clone()
    CHANGES[name](lm_head)
    assert not state.is_current()
    state.update(1)
    assert state.is_current()
    assert_gives_logits_of(state, lm_head)
    if "transposed" not in name and not (made is with_one_scale and "instead" in name):
        assert not torch.equal(lm_head.truth, before), "the test changes something"


def test_other_strides_at_the_same_place_are_seen(device):
    (held, _), (_, scale) = tensors(device, rows=2 * ROWS), tensors(device)
    lm_head = QuantisedHead(held[::2], scale)
    state = HeadState(Processor(), lm_head)
    state.update(1)
    lm_head.weight.data = held[:ROWS].t()
    assert not state.is_current()
    state.update(1)
    assert_gives_logits_of(state, lm_head)


def test_scales_that_are_written_unseen_are_read_where_they_are(device):
    """As SGLang's weight loaders write."""
    lm_head = loaded(device)
    state = HeadState(Processor(), lm_head)
    state.update(1)
    lm_head.weight_scale.data.mul_(2)
    assert_gives_logits_of(state, lm_head)


def test_tensors_whose_writes_nobody_counts_are_current_until_there_are_others(device):
    """As those are that SGLang makes in PyTorch's inference mode."""
    with torch.inference_mode():
        lm_head = loaded(device)
    state = HeadState(Processor(), lm_head)
    state.update(1)
    assert state.is_current()
    with torch.inference_mode():
        lm_head.load(lm_head.weight.t(), lm_head.weight_scale * 2)
    assert not state.is_current()


def test_the_copy_of_one_scale_stays_where_it_is_with_new_parameters(device):
    """CUDA graphs of SGLang's, of a draft model, go on reading it."""
    state = HeadState(Processor(), with_one_scale(device))
    copied = state.head.lm_head.scale
    state.lm_head.load(*tensors(device, 1)[:1], torch.tensor(0.25, device=device))
    state.update(1)
    assert state.head.lm_head.scale is copied and copied.unique().tolist() == [0.25]


def test_one_scale_is_copied_anew_to_its_place_after_a_change_of_weights(runtime, device):
    """CUDA graphs read the copy."""
    lm_head = with_one_scale(device)
    state = HeadState(Processor(), lm_head)
    serve(runtime, state)
    with torch.inference_mode():
        state.update(1)
    copied = state.head.lm_head.scale
    for changes in range(2):
        WeightHooks(runtime).updater_call()
        lm_head.weight_scale.data.mul_(2)
        assert not state.is_current(), changes
        state.update(1)
        assert state.is_current() and state.head.lm_head.scale is copied
        assert_gives_logits_of(state, lm_head)


def test_a_change_of_weights_leaves_the_graphs_of_other_heads_alone(runtime, device):
    for state in (make_state(device), HeadState(Processor(), loaded(device))):
        serve(runtime, state)
        state.update(1)
        WeightHooks(runtime).updater_call()
        assert state.is_current()


# Steps.


def test_hidden_states_of_the_models_dtype_are_taken(device):
    state = HeadState(Processor(), loaded(device))
    assert state.takes(hidden_states(device, dtype=torch.float16))
    for dtype in (torch.float32, torch.bfloat16, E4M3):
        assert not state.takes(hidden_states(device, dtype=dtype))


def test_stages_of_prefills_hold_hidden_states(device):
    stage = HeadState(Processor(), loaded(device)).stage(4)
    assert stage.shape == (4, WIDTH) and stage.dtype is torch.float16


def test_a_step_is_fused_and_logprobs_of_prompts_are_sglangs(runtime, device):
    state = HeadState(Processor(), loaded(device))
    serve(runtime, state)
    arguments = state.processor, hidden_states(device, dtype=torch.float16), state.lm_head
    assert runtime.can_defer(*arguments, metadata_of("extend")) is state
    assert runtime.prompt_head(*arguments, metadata_of("extend")) is None


# Draft models.


@pytest.fixture
def target(runtime, device) -> HeadState:
    """The state of the target's head."""
    state = HeadState(Processor(), loaded(device))
    serve(runtime, state)
    return state


@pytest.mark.parametrize("scales", ["scales of its own", "no scales"])
def test_a_draft_head_that_took_the_weight_alone_is_refused(runtime, device, target, scales):
    draft = loaded(device, seed=1)
    draft.weight = target.lm_head.weight
    if scales == "no scales":
        draft.weight_scale = None
    reason = runtime.prepare_draft_head(Model(draft), starting=False)
    assert reason == "the draft model has the weight of the target's quantised LM head without its scales"
    assert runtime.draft_head is None


def test_a_draft_head_with_the_targets_weight_and_scales_is_the_targets(runtime, target):
    assert runtime.prepare_draft_head(Model(target.lm_head), starting=False) is None
    assert runtime.draft_head is target


def test_a_draft_head_with_tensors_of_its_own_is_another(runtime, device, target, fake_heads):
    assert runtime.prepare_draft_head(Model(loaded(device, seed=1)), starting=False) is None
    assert runtime.draft_head not in (None, target)


# Lines of the log.


@pytest.fixture
def starting(fake_heads, runtime, monkeypatch, tmp_path) -> Runtime:
    """A runtime that finds no table of this machine's user."""
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    return runtime


def test_the_line_at_the_start_names_the_arithmetic(starting, device, caplog):
    with caplog.at_level(logging.INFO, "sgl_flashsample"):
        starting.prepare_model(Model(loaded(device)))
    (line,) = [record.message for record in caplog.records if "fused sampling active" in record.message]
    assert f"LM head {ROWS} x {WIDTH} float8_e4m3fn with scales (W8A16: hidden states are not quantised; " in line
    assert "SGLang's own sampler rounds them to E4M3 too, so its tokens can differ)" in line
    assert starting.status["heads"][0]["dtype"] == "float8_e4m3fn"


def test_a_refused_head_is_one_line(starting, device, caplog):
    lm_head = loaded(device)
    REFUSED["scales of blocks"][0](lm_head)
    starting.prepare_model(Model(lm_head))
    (warning,) = [record.message for record in caplog.records]
    assert "not active" in warning and warning.endswith("scales of blocks are not supported")


def config_of(*targets: str, ignore: tuple[str, ...] = (), method: str = "compressed-tensors") -> dict[str, Any]:
    return {"quant_method": method, "ignore": list(ignore), "config_groups": {"group_0": {"targets": list(targets)}}}


DROPPED = {
    "no config": (None, False),
    "no groups": ({"quant_method": "compressed-tensors"}, False),
    "lm_head": (config_of("Linear", "lm_head"), True),
    "its last part": (config_of("language_model.lm_head"), True),
    "a regular expression": (config_of("re:.*lm_head"), True),
    "one of a nested head": (config_of("re:language_model\\.lm_head"), True),
    "layers": (config_of("Linear", "re:.*layers.*"), False),
    "ignored": (config_of("lm_head", ignore=("re:.*lm_head",)), False),
    "another method": (config_of("lm_head", method="modelopt"), False),
}


@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("version", ["0.5.18", "0.5.19", "unknown"])
def test_an_sglang_that_drops_the_scales_of_a_head_is_one_warning(starting, device, monkeypatch, caplog, version, name):
    config, dropped = DROPPED[name]
    monkeypatch.setattr(runtime_module, "sglang_version", lambda: version)
    hf_config = types.SimpleNamespace(quantization_config=config)
    runner = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_config=hf_config))
    model = Model(make_head(torch.zeros(ROWS, WIDTH, dtype=torch.float16, device=device)))
    starting.prepare_model(model, runner)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (dropped and version == "0.5.18")
    assert not warnings or "SGLang 0.5.18 drops its scales: tokens are wrong" in warnings[0]
