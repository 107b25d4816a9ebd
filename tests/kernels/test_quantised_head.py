"""Heads in float8_e4m3fn with a scale per row: the fused pass draws from what the weights stand for."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from kernel_cases import (
    CUDA,
    KINDS,
    TILE,
    Case,
    assert_equal_to_reference,
    draw,
    make_case,
    make_params,
)

from sgl_flashsample.kernels.config import TileConfig
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample
from sgl_flashsample.kernels.params import LMHead
from sgl_flashsample.kernels.reference import lm_head_sample_ref
from sgl_flashsample.kernels.scale_hidden import scale_hidden
from sgl_flashsample.kernels.workspace import Workspace

E4M3 = torch.float8_e4m3fn
HIDDEN_DTYPES = [torch.bfloat16, torch.float16]

pytestmark = pytest.mark.skipif(
    CUDA and torch.cuda.get_device_capability() < (8, 9), reason="the device cannot convert float8_e4m3fn"
)


def gaussian_case(
    num_rows: int,
    vocab: int,
    device: torch.device,
    kind: str = "plain",
    *,
    hidden: int = 80,
    dtype: torch.dtype = torch.bfloat16,
    **head_options,
) -> Case:
    """Gaussian hidden states, and Gaussian weights that are quantised row by row, as checkpoints have them. Sums are
    rounded."""
    g = torch.Generator().manual_seed(vocab)
    weight = torch.randn(vocab, hidden, generator=g) * torch.rand(vocab, 1, generator=g) * 5 / hidden**0.5
    scale = weight.abs().amax(1) / 448
    weight = (weight / scale[:, None]).to(E4M3)
    states = torch.randn(num_rows, hidden, generator=g).to(dtype)
    head = LMHead(weight.to(device), scale=scale.to(device), hidden_dtype=dtype, **head_options)
    return Case(states.to(device), head, make_params(num_rows, head.spec, device, kind))


def assert_drawn_from_dequantised(case: Case, max_near_ties: float) -> None:
    """Tokens and logprobs are those of float64 on the dequantised weights, but for the room that a float32 sum has."""
    drawn, params, head = draw("fused", case), case.params, case.head
    want = lm_head_sample_ref(
        case.hidden,
        head.weight,
        params.temperature,
        params.seed,
        params.position,
        scale=head.scale,
        logits_dtype=head.rounding,
    )
    certain = ~want.near_tie
    assert torch.equal(drawn.token_ids[certain], want.token[certain])
    assert want.near_tie.double().mean() <= max_near_ties
    same = drawn.token_ids == want.token
    assert (drawn.logprobs[same] >= want.logprob_low[same] - 2e-5).all()
    assert (drawn.logprobs[same] <= want.logprob_high[same] + 2e-5).all()


@pytest.mark.parametrize("num_rows, vocab", [(17, 1), (1, 127), (3, 129), (33, 901)])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_equal_the_reference(device, kind, num_rows, vocab):
    """Sums are exact: tokens and logprobs of every kind of batch, on ragged vocabularies with padding."""
    if "truncate" in kind and not CUDA:
        num_rows = min(num_rows, 8)
    dtype = HIDDEN_DTYPES[vocab % 3 == 0]
    case = make_case(num_rows, vocab, device, kind, E4M3, padding=vocab % 7, hidden_dtype=dtype)
    assert_equal_to_reference(case, draw("fused", case), 0.4 if num_rows < 9 else 0.12)


@pytest.mark.parametrize("dtype", HIDDEN_DTYPES)
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_rounded_sums_give_the_tokens_of_the_dequantised_weights(device, dtype, logits_dtype):
    case = gaussian_case(17, 2003, device, dtype=dtype, logits_dtype=logits_dtype)
    assert_drawn_from_dequantised(case, 0.12)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab, hidden", [(151_936, 4096), (248_320, 5120)])
def test_a_real_head_gives_the_tokens_of_the_dequantised_weights(device, vocab, hidden):
    assert_drawn_from_dequantised(gaussian_case(17, vocab, device, hidden=hidden, dtype=torch.bfloat16), 0.2)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0, "logit_scale": 3.0},
        {"logits_dtype": torch.float32, "softcap": 50.0},
        {"vocab_start": 160, "shards": 2},
    ],
    ids=str,
)
def test_scale_softcap_rounding_and_shard_come_after_the_row_scale(device, options):
    case = make_case(17, 901, device, "edit", E4M3, padding=11, **options)
    assert_equal_to_reference(case, draw("fused", case), 0.15)


@pytest.mark.parametrize("hidden", [65, 72, 200])
@pytest.mark.parametrize("tma", [False, True])
def test_a_hidden_size_that_no_block_divides_is_read_to_its_end(device, hidden, tma):
    case = make_case(5, 300, device, dtype=E4M3, hidden=hidden)
    config = dataclasses.replace(TILE, tma=tma, hidden_tma=tma)
    assert_equal_to_reference(case, draw("fused", case, config), 0.2)


def test_a_byte_behind_the_last_weight_of_a_row_is_not_read_as_one(device):
    """It is no number, and so is any product with it."""
    case = make_case(5, 300, device, dtype=E4M3, hidden=65)
    held = torch.full((300, 80), math.nan, device=device).to(E4M3)
    held[:, :65] = case.head.weight
    wide = dataclasses.replace(case, head=LMHead(held[:, :65], scale=case.head.scale))
    assert torch.equal(draw("fused", wide).scores, draw("fused", case).scores)


def test_memory_that_begins_at_an_odd_address_may_hold_a_weight_at_an_even_one():
    held = torch.zeros(68, dtype=torch.uint8).numpy()
    odd = torch.from_numpy(held[1 - held.ctypes.data % 2 :])
    weight = odd[1:65].view(E4M3).view(4, 16)
    assert (weight.data_ptr() % 2, weight.storage_offset() % 2) == (0, 1)
    assert LMHead(weight, scale=torch.ones(4)).addressed.data_ptr() == weight.data_ptr()


def test_rows_at_any_distance_and_any_address_are_the_weights_rows(device):
    case = make_case(5, 300, device, dtype=E4M3, hidden=40)
    held, scales = torch.zeros(3 + 300 * 57, device=device).to(E4M3), torch.zeros(301, device=device)
    weight, scale = held[3:].view(300, 57)[:, :40], scales[1:]
    weight.copy_(case.head.weight)
    scale.copy_(case.head.scale)
    moved = dataclasses.replace(case, head=LMHead(weight, scale=scale))
    assert torch.equal(draw("fused", moved).scores, draw("fused", case).scores)


@pytest.mark.parametrize(
    "config",
    [
        TileConfig(32, 256, 32, 4, 2, tma=False, reduce_rows=8),
        TileConfig(64, 128, 64, 4, 1, 3, tma=False, rows_first=True, reduce_rows=32, one_launch=True),
    ],
    ids=str,
)
def test_a_token_does_not_depend_on_the_configuration_or_the_batch(device, config):
    case = make_case(33, 1500, device, dtype=E4M3)
    first, other = draw("fused", case), draw("fused", case, config)
    assert torch.equal(first.token_ids, other.token_ids)
    alone = draw("fused", case.rows(torch.tensor([7], device=device)))
    assert alone.token_ids.item() == first.token_ids[7].item()


@pytest.mark.parametrize("dtype", HIDDEN_DTYPES)
def test_hidden_states_of_any_size_are_kept_and_their_unit_is_undone(device, dtype):
    """Rows of all sizes: each element is kept to a share of 2**-40 of its row's largest, and exactly in float16 rows.
    Infinities and NaN stay beside numbers that are kept."""
    tiny, most = (2.0**-133, 2.0**127) if dtype is torch.bfloat16 else (2.0**-24, 2.0**15)
    size = torch.logspace(-24.0, 15.0, 40, base=2.0)
    size = torch.cat([size, torch.tensor([tiny, most, 0.0])])
    g = torch.Generator().manual_seed(0)
    hidden = (size[:, None] * torch.rand(len(size), 300, generator=g) * 1.99).to(dtype)
    hidden[:, 0] = size.to(dtype)
    hidden = torch.cat([hidden, hidden[:3]])
    hidden[-3, 5], hidden[-2, 5], hidden[-1, 5] = float("inf"), float("-inf"), float("nan")
    half = Workspace(1, device).half_hidden(len(hidden), 300)
    scale_hidden(hidden.to(device), half)
    # Elements at even places come first in each 32.
    place = torch.tensor([k - k % 32 + k % 2 * 16 + k % 32 // 2 for k in range(300)])
    got = (half.states.double() * half.unit.double()[: len(hidden), None]).cpu()[:, place]
    want = hidden.double()
    finite = want.isfinite()
    assert torch.equal(got[~finite].nan_to_num(7.0), want[~finite].nan_to_num(7.0))
    largest = torch.where(finite, want.abs(), 0.0).amax(1, keepdim=True)
    error = (torch.where(finite, got - want, 0.0)).abs()
    usual = largest[:, 0] >= 2.0**-111
    allowed = 0.0 if dtype is torch.float16 else 2.0**-40
    assert (error <= allowed * largest)[usual].all()
    assert (half.states[: len(size) - 3].abs().amax(1) >= 2.0**15).all()


def test_huge_and_tiny_hidden_states_draw_the_tokens_of_the_reference(device):
    """Elements beyond float16's range at either end, beside a scale that brings logits back."""
    case = gaussian_case(12, 300, device, logits_dtype=torch.float32)
    factor = 2.0 ** torch.tensor([-60, -30, -20, -10, 0, 10, 20, 30, 40, 50, 60, 70], device=device)
    params = dataclasses.replace(case.params, temperature=factor.float())
    huge = dataclasses.replace(case, hidden=(case.hidden * factor[:, None]).to(case.hidden.dtype), params=params)
    unit = dataclasses.replace(
        case, params=dataclasses.replace(params, temperature=torch.ones_like(params.temperature))
    )
    kept = factor >= 2.0**-19  # colder ones count as the coldest temperature that there is
    assert torch.equal(draw("fused", huge).token_ids[kept], draw("fused", unit).token_ids[kept])


def test_weights_and_hidden_states_that_are_no_numbers_are_never_drawn(device):
    case = gaussian_case(6, 300, device)
    head, hidden = case.head, case.hidden.clone()
    head.weight.view(torch.uint8)[40:200] = 0x7F
    drawn = draw("fused", case)
    assert ((drawn.token_ids < 40) | (drawn.token_ids >= 200)).all()
    assert drawn.logprobs.isfinite().all()
    hidden[2, 3] = float("nan")
    assert draw("fused", dataclasses.replace(case, hidden=hidden)).token_ids[2].item() == 0, "a row of NaN alone"


def test_the_smallest_and_largest_numbers_of_the_format_count(device):
    """Every finite number of the format, as a weight of its own, is the logit."""
    bits = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    weight = torch.zeros(len(bits), 16).to(E4M3)
    weight.view(torch.uint8)[:, 0] = bits
    scale = 2.0 ** (torch.arange(len(bits)) % 40 - 30).float()
    head = LMHead(weight.to(device), scale=scale.to(device), logits_dtype=torch.float32)
    hidden = torch.zeros(1, 16, dtype=head.hidden_dtype, device=device)
    hidden[0, 0] = 1.0
    case = Case(hidden, head, make_params(1, head.spec, device, "truncate"))
    workspace = draw("fused", case).workspace
    assert torch.equal(workspace.last_buffer.logits[0, : len(bits)].cpu(), weight[:, 0].float() * scale)


def test_a_workspace_serves_batches_of_every_size_one_after_the_other(device):
    whole = make_case(40, 500, device, dtype=E4M3)
    workspace = Workspace(4096, device)
    held = workspace.num_bytes
    for num_rows in (5, 40, 1, 17):
        case = whole.rows(torch.arange(num_rows, device=device))
        assert_equal_to_reference(case, draw("fused", case, workspace=workspace), 0.4)
    assert workspace.num_bytes == held + 40 * (32 * 2 + 4)
    assert workspace.held[-1] is not None
    states = workspace.half_hidden(17, 32).states
    draw("fused", case, workspace=workspace)
    assert workspace.half_hidden(40, 32).states.data_ptr() == states.data_ptr()
    assert workspace.half_hidden(1, 40).states.stride(0) == 64


def test_hidden_states_of_another_dtype_are_refused(device):
    case = make_case(2, 40, device, dtype=E4M3)
    for dtype in (torch.float16, torch.float32, E4M3):
        with pytest.raises(ValueError, match=r"hidden is .*expected .B, 32. torch.bfloat16 as the head's"):
            lm_head_sample(case.hidden.to(dtype), case.head, case.params, TILE)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_graph_replays_the_same_tokens_and_follows_its_inputs(device, kind):
    case = make_case(17, 151_936, device, kind, E4M3, hidden=256)
    workspace = Workspace(2**16, device)
    eager = draw("fused", case, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw("fused", case, workspace=workspace)
    changed = False
    for step, sign in itertools.product(range(2), (1, -1)):
        case.hidden.mul_(sign)
        case.params.position.add_(step)
        graph.replay()
        assert torch.equal(captured.token_ids, draw("fused", case, workspace=workspace).token_ids)
        changed |= not torch.equal(captured.token_ids, eager.token_ids)
    assert changed
