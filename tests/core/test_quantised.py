"""Quantised heads behind the public API: the tokens and logprobs of what their weights stand for, on the paths that
serve them."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from core_examples import SCREEN, assert_reference
from kernel_cases import KINDS, Case, make_case

from sgl_flashsample import (
    Head,
    LMHead,
    LogprobOutput,
    Sampler,
    SamplingParams,
    WantedLogprobs,
    defaults,
    paths,
    sample,
    verify,
)
from sgl_flashsample.defaults import HeadTraits, all_configs, default_config
from sgl_flashsample.dispatch import DispatchTable, default_table
from sgl_flashsample.kernels import launch
from sgl_flashsample.kernels.config import ReadConfig, TileConfig
from sgl_flashsample.kernels.gather_logprobs import head_logprobs
from sgl_flashsample.kernels.int8_head import Int8Head
from sgl_flashsample.kernels.launch import Gpu
from sgl_flashsample.kernels.reference import dequantize_ref, gather_logprobs_ref, top_logprobs_ref
from sgl_flashsample.kinds import BATCH_KINDS, KIND_NAMES, SamplingPath
from sgl_flashsample.sampler import seed_of_sample
from sgl_flashsample.screen import Screen, unsupported_head
from sgl_flashsample.selfcheck import refuse_wrong
from sgl_flashsample.tables import lookup
from sgl_flashsample.tables.schema import HeadShape

E4M3, VOCAB = torch.float8_e4m3fn, 600
SIZES = (1, 2, 16, 17, 32, 33, 64, 65, 512, 5000)


@pytest.fixture(params=["kernels", "host memory"])
def place(request, device, monkeypatch) -> torch.device:
    """The device of the batches: that of the kernels, or the CPU without them."""
    if request.param == "kernels":
        return device
    pytest.importorskip("numba")
    for module in ("api", "head", "logprobs", "paths"):
        monkeypatch.setattr(f"sgl_flashsample.{module}.draws_in_host_memory", lambda device: True)
    return torch.device("cpu")


def example(device: torch.device, kind: str = "plain", rows: int = 9, **options) -> Case:
    return make_case(rows, VOCAB, device, kind, E4M3, padding=8, **options)


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [None, "fused", "logits"])
def test_tokens_and_logprobs_are_the_references_on_every_path(place, path, kind):
    case = example(place, kind, rows=5 if "truncate" in kind else 9)
    drawn = sample(case.hidden, Head(case.head, max_rows=9), case.params, return_logprob=True, path=path)
    # A row is certain in such a batch where it has no near-tie.
    assert_reference(drawn.token_ids, case)
    want = gather_logprobs_ref(case.edited, drawn.token_ids[:, None], case.params.temperature)[:, 0]
    assert ((drawn.logprobs.double() - want).abs() <= 2e-5).all()


@pytest.mark.parametrize("options", [{"logits_dtype": torch.float32}, {"softcap": 4.0, "logit_scale": 0.5}], ids=str)
def test_logits_are_rounded_scaled_and_capped_after_the_row_scale(place, options):
    case = example(place, **options)
    assert_reference(sample(case.hidden, case.head, case.params).token_ids, case)


@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float16])
def test_logits_are_those_of_float64_on_the_dequantised_weights_part_by_part(place, monkeypatch, hidden_dtype):
    monkeypatch.setattr(paths, "CONVERTED_WEIGHTS", 250 * 32)
    case = example(place, hidden_dtype=hidden_dtype)
    head = Head(case.head, max_rows=9)
    want = case.hidden.double() @ dequantize_ref(case.head.weight, case.head.scale).T
    assert torch.equal(head.logits(case.hidden), want.to(hidden_dtype))
    out = torch.empty(9, VOCAB + 8, dtype=hidden_dtype, device=place)
    assert head.logits(case.hidden, out) is out and torch.equal(out, want.to(hidden_dtype))


@pytest.mark.slow
def test_logprobs_beside_a_draw_and_of_a_prompt_are_the_references(place):
    case = example(place)
    ids = torch.tensor([[3, 599, 17]], device=place)
    drawn = sample(case.hidden, case.head, case.params, logprobs=WantedLogprobs(4, token_ids=ids))
    assert isinstance(drawn, LogprobOutput)
    top_ids, top = top_logprobs_ref(case.edited, 4, case.params.temperature)
    assert torch.equal(drawn.top_logprobs.token_ids, top_ids)
    torch.testing.assert_close(drawn.top_logprobs.logprobs.double(), top, rtol=0, atol=2e-5)
    given = gather_logprobs_ref(case.edited, ids.expand(9, -1), case.params.temperature)
    torch.testing.assert_close(drawn.token_ids_logprobs.double(), given, rtol=0, atol=2e-5)
    tokens = torch.arange(9, device=place)
    of_prompt = Head(case.head).logprobs_of(case.hidden, tokens, WantedLogprobs(), chunk_rows=4).of_tokens
    want = gather_logprobs_ref(case.edited, tokens[:, None])[:, 0]
    torch.testing.assert_close(of_prompt.double(), want, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_sampler_and_a_verification_draw_what_sample_draws(place, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHSAMPLE_CONFIG_DIR", str(tmp_path))
    case = example(place)
    sampler = Sampler(case.head, max_rows=2, seed=5)
    drawn = sampler(case.hidden, SamplingParams(temperature=0.8), position=3)
    rows = torch.arange(9, device=place)
    params = dataclasses.replace(
        case.params,
        temperature=torch.full((9,), 0.8, device=place),
        seed=torch.tensor([seed_of_sample(5, row) for row in range(9)], device=place),
        position=torch.full_like(rows, 3),
    )
    assert torch.equal(drawn.token_ids, sample(case.hidden, case.head, params).token_ids)
    drafts = drawn.token_ids[:, None]
    assert torch.equal(verify(case.hidden[:, None], case.head, drafts, params).token_ids[:, 0], drawn.token_ids)


# --- what serves them -------------------------------------------------------------------------------------------------


def test_no_screen_and_no_reader_of_single_rows_takes_a_quantised_head(device):
    case = example(device)
    reason = "its weight is torch.float8_e4m3fn, an INT8 copy is no smaller"
    assert unsupported_head(case.head) == reason
    with pytest.raises(ValueError, match=rf"the head cannot be screened: {reason}"):
        Screen(case.head, 4)
    with pytest.raises(ValueError, match=r"path is 'screened', which cannot serve this head: its weight is"):
        sample(case.hidden, case.head, case.params, path="screened")
    for refused in (
        lambda: Int8Head(case.head),
        lambda: head_logprobs(case.hidden, case.head, case.hidden.new_zeros(1, 1).long(), torch.zeros(9, 2)),
    ):
        with pytest.raises(ValueError, match=r"the head's weight is torch.float8_e4m3fn; expected one without a scale"):
            refused()


@pytest.mark.parametrize("family", ["sm80", "sm90", "sm100"])
def test_built_in_choices_read_the_weight_as_it_is_whatever_the_batch(family):
    """A GEMM would need the whole weight in another dtype, and the head as right operand a copy in shared memory."""
    for kind in BATCH_KINDS:
        for rows in SIZES:
            config = default_config(HeadTraits(family, 1, 151_936, 4096, has_gemm=False), rows, kind)
            assert isinstance(config, TileConfig) and not config.rows_first, (kind, rows)
    assert not any(isinstance(config, type(SCREEN)) for config in all_configs(family, 1))


@pytest.mark.parametrize("name, times", [("plain", 2), ("greedy", 2), ("truncate", 2), ("edit+truncate", 1)])
def test_a_built_in_tile_of_an_sm90_reads_few_more_bytes_of_hidden_states_than_of_weights(name, times):
    """Each tile of the vocabulary reads the hidden states again. Without edits, three programs with small tiles take
    less time than one or two with large ones; with edits alone, a large tile has no room."""
    for rows in SIZES:
        config = default_config(HeadTraits("sm90", 1, 151_936, 4096, has_gemm=False), rows, KIND_NAMES[name])
        assert config.block_b * 2 <= config.block_v * times, rows


def test_a_model_with_a_quantised_weight_needs_its_scale_by_name(device):
    linear = torch.nn.Linear(32, VOCAB, bias=False, device=device)
    linear.weight = torch.nn.Parameter(linear.weight.detach().to(E4M3), requires_grad=False)
    config = types.SimpleNamespace(vocab_size=VOCAB)
    model = types.SimpleNamespace(config=config, get_output_embeddings=lambda: linear)
    with pytest.raises(ValueError, match=r"scale is None; expected contiguous \[600\] float32"):
        LMHead.from_hf(model)


def test_dispatch_takes_the_fused_pass_unless_a_path_is_asked_for(device, launched):
    case = example(device)
    assert not HeadTraits.of(case.head).has_gemm and HeadTraits.of(case.head).itemsize == 1
    head = Head(case.head)
    head.draw(case.hidden, case.params)
    head.draw(case.hidden, case.params, path=SamplingPath.LOGITS)
    assert [type(config) for config in launched] == [TileConfig, ReadConfig]


def test_a_table_for_another_dtype_is_none_for_a_quantised_head(device):
    case = example(device)
    assert lookup.head_shape_of(case.head) == HeadShape(vocab=VOCAB, hidden=32, dtype="e4m3")
    of_half = LMHead(case.head.weight.half())
    with pytest.raises(ValueError, match=r"table is for .*itemsize=2.*; expected one for the head's .*itemsize=1"):
        Head(case.head, table=DispatchTable(HeadTraits.of(of_half)))
    assert default_table(case.head) is not default_table(of_half)


def test_a_device_that_cannot_convert_the_weight_is_refused_by_name(device, monkeypatch):
    case = example(device)
    for capability, converts in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(launch, "gpu_of", lambda device, c=capability: Gpu(c, 100))
        assert defaults.converts_e4m3.__wrapped__(device) is converts
    monkeypatch.undo()
    monkeypatch.setattr(defaults, "converts_e4m3", lambda device: False)
    with pytest.raises(ValueError, match=r"weight is torch.float8_e4m3fn on .*; expected .* capability 8.9 or newer"):
        Head(case.head)


def test_scratch_of_a_head_has_room_for_the_hidden_states_of_its_largest_batch(device):
    case = example(device)
    head = Head(case.head, max_rows=9)
    held, half = head.num_bytes, head.workspaces[0].held[-1]
    assert half.states.shape == (9, 32) and half.unit.shape == (9,)
    head.draw(case.hidden, case.params)
    assert head.num_bytes == held and head.workspaces[0].held[-1] is half


@pytest.mark.slow
def test_the_check_of_a_starting_server_passes_a_right_head_and_finds_a_scale_that_is_left_out(device, monkeypatch):
    case = example(device)
    assert refuse_wrong(case.head, 4, default_table(case.head)).fault is None
    right = paths.lm_head_sample

    def without_scale(hidden, head, *arguments, **options):
        return right(hidden, LMHead(head.weight, head.spec, scale=torch.ones_like(head.scale)), *arguments, **options)

    monkeypatch.setattr(paths, "lm_head_sample", without_scale)
    assert "tokens differ from the reference" in refuse_wrong(case.head, 4, default_table(case.head)).fault


def test_a_rank_holds_the_scales_of_its_rows(device):
    case = example(device)
    part = LMHead.of_rank(case.head.weight[304:], 1, 2, VOCAB, scale=case.head.scale[304:])
    shard = Case(case.hidden, part, case.params)
    assert_reference(sample(case.hidden, part, case.params).token_ids, shard)


def test_a_scale_may_be_a_parameter_of_a_module(place):
    case = example(place)
    head = dataclasses.replace(case.head, scale=torch.nn.Parameter(case.head.scale))
    for path in ("fused", "logits") if place.type == "cuda" else ("logits",):
        assert torch.equal(
            sample(case.hidden, head, case.params, path=path).token_ids,
            sample(case.hidden, case.head, case.params, path=path).token_ids,
        )
