"""The bound of the screened path: it holds, it is needed, and it is not wide.

The copy, the hidden states in fixed point and the first pass against their references, and the constants of the proof
against values written down here."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import CUDA, LISTED, SCREEN, Case, draw, limits, make_params, rounding_case

from sgl_flashsample.kernels import int8_head as int8_head_module
from sgl_flashsample.kernels import screen as screen_module
from sgl_flashsample.kernels import screened_truncated as screened_truncated_module
from sgl_flashsample.kernels.config import LIMBS, ScreenConfig
from sgl_flashsample.kernels.epilogue import cap_slack, soft_cap
from sgl_flashsample.kernels.int8_head import Int8Head
from sgl_flashsample.kernels.params import NARROW_CAP, BatchParams, LMHead, LogitEdits, LogitsSpec
from sgl_flashsample.kernels.reference import (
    edit_logits_ref,
    error_bound_ref,
    group_noise_ref,
    group_scores_ref,
    logits_ref,
    quantize_hidden_ref,
    screen_head_ref,
    transform_ref,
)
from sgl_flashsample.kernels.screen import quantize_hidden, screen_head
from sgl_flashsample.kernels.workspace import ScreenWorkspace

# What the proof at the head of int8_head.py asks for, on any device: 4 products at a time, each cut off at 2**-23.
ACCUMULATION = (4 + 2) / 4 * 2.0**-23


def gaussian(num_rows, vocab, hidden, device, dtype=torch.bfloat16, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(num_rows, hidden, generator=g).to(dtype)
    weight = (torch.randn(vocab, hidden, generator=g) * 3 / hidden**0.5).to(dtype)
    return states.to(device), weight.to(device)


def with_outliers(states, weight):
    """Two channels of the hidden states 64 times as large, and their columns so much smaller that logits stay."""
    states, weight = states.clone(), weight.clone()
    states[:, [3, 11]] *= 64
    weight[:, [3, 11]] /= 64
    return states, weight


def workspace_for(copy: Int8Head, num_rows: int) -> ScreenWorkspace:
    return ScreenWorkspace(copy.num_groups, copy.weight.shape[1], num_rows, copy.weight.device)


def fixed_point(states: torch.Tensor, copy: Int8Head, config: ScreenConfig = SCREEN):
    """The results of ``quantize_hidden``: the workspace, and the float64 hidden states that its limbs represent."""
    num_rows, width = states.shape
    workspace = workspace_for(copy, num_rows)
    quantize_hidden(states, workspace, config)
    limbs = workspace.limbs[: num_rows * LIMBS, :width].view(num_rows, LIMBS, width)
    return workspace, quantize_hidden_ref(limbs, workspace.operands.hidden_scale[:num_rows])


def copied_rows(copy: Int8Head, width: int) -> torch.Tensor:
    return copy.weight[:, :width].double() * copy.operands.scale.double()[:, None]


# --- the copy and the hidden states ---------------------------------------------------------------------------------


@triton.jit
def _soft_cap_kernel(x_ptr, out_ptr, softcap, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    capped = soft_cap(tl.load(x_ptr + offs, mask=offs < n), softcap)
    tl.store(out_ptr + offs, capped, mask=offs < n)
    tl.store(out_ptr + n + offs, cap_slack(capped, softcap), mask=offs < n)


@pytest.mark.parametrize("cap", [0.5, 30.0, 32.0, 33.0, 1000.0, 1e6])
def test_the_slack_of_a_soft_cap_holds_its_error(device, cap):
    """Twice: that of the value, and that of the one which it is compared with."""
    x = torch.cat([torch.linspace(-4, 4, 4001), torch.linspace(-0.26, 0.26, 4001)]) * cap
    x = torch.cat([x, torch.linspace(-6, 6, 999)]).to(device)
    out = torch.empty(2, len(x), device=device)
    softcap = (cap,) if cap <= NARROW_CAP else (cap, 1.0 / cap)
    _soft_cap_kernel[(triton.cdiv(len(x), 1024),)](x, out, softcap, len(x), BLOCK=1024)
    error = (out[0].double() - cap * torch.tanh(x.double() / cap)).abs()
    assert (2 * error <= out[1].double()).all()


def test_the_constants_of_the_proof_are_no_smaller_than_the_proof_asks_for():
    """Errors in order: accumulation; 12 float32 roundings of 2**-24 in the screen, with room; 3 in the bound."""
    assert int8_head_module.ACCUMULATION >= ACCUMULATION
    assert int8_head_module.SCREEN_ROUNDING >= 2 * 12 * 2.0**-24
    assert int8_head_module.BOUND_ROUNDING >= 3 * 2.0**-24
    assert 0 < int8_head_module.MIN_SCALE <= 2.0**-64 and int8_head_module.MAX_HIDDEN == 2**15
    # The slack of a score: 2**-15 and 2**-23 of it, twice, because two values of it are compared.
    assert screen_module._SLACK.value >= 2 * 2.0**-15
    assert screen_module._RELATIVE_SLACK.value >= 2 * 2.0**-23
    # Of a float16: half a step is 2**-11 of it, 2**-25 where it is tiny. Of sums of 2**15 squares: 2**-9.
    assert screen_module._HALF_ROUNDING.value >= 2.0**-11 and screen_module._HALF_TINY.value >= 2.0**-25
    assert screen_module._SUM.value >= 1 + 2.0**15 * 2.0**-24 and screen_module._STEPS.value >= 4 * 2.0**-24
    # Of a mass of 2**18 exponentials, and per unit of an exponent.
    assert screened_truncated_module._SUM_SLACK.value >= 2.0**-13
    assert screened_truncated_module._EXPONENT_SLACK.value >= 2 * 2.0**-23


@pytest.mark.parametrize("config", [SCREEN, LISTED], ids=["chunks", "listed"])
@pytest.mark.parametrize("outliers", [False, True], ids=["", "outliers"])
def test_the_bound_holds_for_every_dot_product_and_is_not_loose(device, config, outliers):
    states, weight = gaussian(9, 800, 512, device, seed=2)
    if outliers:
        states, weight = with_outliers(states, weight)
    copy = Int8Head(LMHead(weight))
    workspace, fixed = fixed_point(states, copy, config)
    rows = copied_rows(copy, 512)
    off = (states.double() @ weight.double().T - fixed @ rows.T).abs()
    truth = error_bound_ref(weight, rows, states, fixed, ACCUMULATION)
    bound = (
        workspace.operands.hidden_norm.double()[:, None] * copy.operands.error.double()[None, :]
        + workspace.operands.hidden_error.double()[:, None] * copy.operands.norm.double()[None, :]
    )
    lengths = states.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None, :]
    assert (bound >= truth).all(), "the kernels' bound is no less than its definition"
    assert (bound <= 1.01 * truth).all(), "and little more"
    assert (off + ACCUMULATION * 512 * lengths <= truth).all()
    assert (off > 0.1 * truth).any(), "the bound would not see an error in its scale"
    assert (truth / lengths).median() < (0.1 if outliers else 0.01)


def test_the_screens_own_rounding_is_in_the_bound(device):
    """With an exact copy and exact hidden states, only the two accumulations round."""
    weight = torch.zeros(32, 64, device=device)
    weight[:, 0], weight[:, 1:] = 127.0, torch.randint(-127, 128, (32, 63), generator=torch.Generator().manual_seed(0))
    copy = Int8Head(LMHead(weight))
    assert torch.equal(copied_rows(copy, 64), weight.double())
    norm = weight.double().norm(dim=1)
    least = (ACCUMULATION * 64 + 2 * 12 * 2.0**-24) * norm
    assert (copy.operands.error.double() >= least).all() and (copy.operands.error.double() <= 3 * least).all()
    assert (copy.operands.norm.double() >= norm).all()


def test_fixed_point_is_the_nearest_and_its_norms_are_bounds(device):
    states = torch.randn(6, 77, generator=torch.Generator().manual_seed(0))
    states[1] *= 1e30
    states[2] *= 1e-30
    states[3] = 0
    states[4, 5] = 1e6
    states[5] = states[5].sign() * 3.0
    states = states.to(device)
    workspace, fixed = fixed_point(states, Int8Head(LMHead(torch.zeros(16, 77, device=device))))
    step, largest = workspace.operands.hidden_scale.double(), states.double().abs().amax(1)
    assert (fixed.abs() <= step[:, None] * 127 * 256).all()
    assert ((states.double() - fixed).abs() <= step[:, None] * 0.501).all()
    present = largest > 2.0**-80
    torch.testing.assert_close(step[present], (largest / (127 * 256))[present], rtol=1e-6, atol=0)
    for bound, value in (
        (workspace.operands.hidden_norm, states.double()),
        (workspace.operands.hidden_error, states.double() - fixed),
    ):
        exact = value.norm(dim=1)
        assert (bound.double() >= exact).all()
        assert (bound.double() <= 1.01 * exact + 2.0**-20 * states.double().norm(dim=1) + 1e-30).all()


def test_hidden_states_start_a_screen_without_a_threshold_or_a_winner(device):
    copy = Int8Head(LMHead(torch.zeros(16, 32, device=device)))
    workspace, _ = fixed_point(torch.ones(3, 32, device=device), copy)
    assert (ordered_to_float(workspace.operands.threshold) == float("-inf")).all()
    assert (workspace.operands.best == -(2**63)).all() and not workspace.operands.candidates.any()


def aligned_errors(device, side: str) -> Case:
    """Two ids in two groups. The screen sees the second, which has the larger logit, smaller by nearly all of its
    bound: all rounding errors point the same way, of the weight or of the hidden state."""
    hidden, step = 64, 1.0 / 16
    signs = torch.randn(hidden, generator=torch.Generator().manual_seed(8)).sign()
    weight = torch.zeros(32, hidden)
    if side == "weight":
        states = signs[None, :].clone()
        weight[16] = 0.49 * step * signs  # rounds to nothing, in steps that its largest element decides
        weight[16, 0] = 127 * step * signs[0]
        weight[0, 0] = (127 * step + 0.4 * step * hidden) * signs[0]
    else:
        step = 2.0**-20  # of the hidden state: its largest element is 127 * 256 of them
        states = 0.49 * step * signs[None, :]
        states[0, 0] = 127 * 256 * step * signs[0]
        weight[16] = signs
        weight[0, 0] = (127 * 256 * step + 0.4 * step * hidden) / states[0, 0]
    assert (states.double() @ weight.double().T)[0].argmax() == 16
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return Case(states.to(device), LMHead(weight.to(device)), BatchParams(zero.float(), zero, zero))


@pytest.mark.parametrize("side", ["weight", "hidden"])
def test_half_the_bound_would_lose_the_token_where_all_errors_point_the_same_way(device, side):
    case = aligned_errors(device, side)
    copy = Int8Head(case.head)
    if side == "hidden":
        copy.operands.error.zero_()  # of an exact copy: it would hide what is tested
    assert draw("screened", case, int8_head=copy).token_ids.item() == 16
    (copy.operands.error if side == "weight" else copy.operands.norm).mul_(0.5)
    assert draw("screened", case, int8_head=copy).token_ids.item() == 0, "the case is not hard enough"


@pytest.mark.slow
def test_a_truncated_token_needs_the_bound_too(device):
    states, weight = gaussian(6, 1000, 64, device, torch.float32, seed=8)
    states[:, 0], weight[:, 0] = 0.0, 200.0  # a column that sets the copy's step and affects no logit
    head = LMHead(weight)
    params = make_params(6, head.spec, device)
    case = Case(states, head, params).with_params(
        temperature=torch.ones(6, device=device), truncation=limits(6, device, top_k=3)
    )
    copy, fused = Int8Head(head), draw("fused", case).token_ids
    assert torch.equal(draw("screened", case, int8_head=copy).token_ids, fused)
    copy.operands.error.zero_()
    assert (draw("screened", case, int8_head=copy).token_ids != fused).any()


@pytest.mark.parametrize("shape", ["peaked", "flat", "heavy tails", "outlier channels"])
def test_tokens_equal_the_fused_pass_for_logits_of_every_shape(device, shape):
    states, weight = gaussian(10, 1000, 96, device, seed=3)
    if shape == "outlier channels":
        states, weight = with_outliers(states, weight)
    elif shape == "heavy tails":
        heavy = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).abs() ** 3
        weight = (weight * heavy.to(device)).bfloat16()
    else:
        states = states * (6 if shape == "peaked" else 0.01)
    head = LMHead(weight)
    params = make_params(10, head.spec, device)
    temperature = torch.tensor([0.0, 0.2, 0.7, 1.0, 1.5] * 2, device=device)
    case = Case(states, head, params).with_params(temperature=temperature)
    for config in (SCREEN, LISTED):
        assert torch.equal(draw("screened", case, config).token_ids, draw("fused", case).token_ids)


# --- the first pass -------------------------------------------------------------------------------------------------


def ordered_to_float(key: torch.Tensor) -> torch.Tensor:
    return torch.where(key < 0, key ^ 0x7FFFFFFF, key).view(torch.float32)


def screened(case: Case, config: ScreenConfig):
    """The workspace after the first pass; and, in float64, the screen's dot products and their bounds."""
    copy = Int8Head(case.head)
    width, vocab = case.hidden.shape[1], case.head.vocab_size
    workspace, fixed = fixed_point(case.hidden, copy, config)
    screen_head(case.head, copy, len(case.hidden), case.params, workspace, config)
    rows = copied_rows(copy, width)
    return workspace, fixed @ rows.T, error_bound_ref(case.head.weight[:vocab], rows, case.hidden, fixed, ACCUMULATION)


@pytest.mark.parametrize("config", [SCREEN, LISTED], ids=["chunks", "listed"])
def test_upper_scores_and_thresholds_enclose_those_of_the_reference(device, config):
    """Also the float32 scores of the fused pass, wherever they are rounded to."""
    num_rows, vocab = 17, 1500
    states, weight = gaussian(num_rows, vocab, 128, device, seed=5)
    options = {"softcap": 15.0, "logit_scale": 0.5}
    head = LMHead(weight, logits_dtype=torch.float32, **options)
    case = Case(states, head, make_params(num_rows, head.spec, device))
    workspace, dots, bound = screened(case, config)
    noise = group_noise_ref(case.params.seed, case.params.position, vocab, 0)
    low, high = screen_head_ref(dots, bound, case.params.temperature, noise, rounding=torch.float32, **options)
    groups = -(-vocab // 16)
    score_hi = workspace.operands.score_hi[: groups * num_rows].view(groups, num_rows).T.double()
    threshold = ordered_to_float(workspace.operands.threshold).double()
    sampled = (case.params.temperature > 0)[:, None]
    slack = torch.where(sampled, 2 * (2.0**-15 + 2.0**-23 * high.abs()), 0.0)
    assert (score_hi >= high + slack - torch.where(sampled, 0.0, 1e-5)).all()
    assert (score_hi <= high + 0.01).all(), "and little more"
    low, slack = low.amax(1), slack.gather(1, low.argmax(1, keepdim=True))[:, 0]
    assert (threshold <= low - slack + torch.where(sampled[:, 0], 0.0, 1e-5)).all()
    assert (threshold >= low - 0.01).all()


def known_exactly(device, **limit) -> tuple[Case, ScreenWorkspace, torch.Tensor]:
    """Rows with these limits whose logits the screen knows exactly: the head is zero, so the logits are the biases. A
    low temperature makes scores of thousands. Returns the case, the workspace after the first pass, and float64
    logits."""
    num_rows, vocab = 6, 400
    bias = (4 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(3))).to(device)
    case = Case(
        torch.zeros(num_rows, 32, device=device),
        LMHead(torch.zeros(vocab, 32, device=device)),
        BatchParams(
            torch.tensor([1.0, 0.01] * 3, device=device),
            *(torch.arange(num_rows, device=device) for _ in range(2)),
            limits(num_rows, device, **limit) if limit else None,
            LogitEdits(bias=bias),
        ),
    )
    return case, screened(case, SCREEN)[0], bias.double()


def float32_error_bound(values: torch.Tensor) -> torch.Tensor:
    """The largest difference of two float32 scores or log-masses of the same logits, by the proof at the top of
    screen.py."""
    return 2 * (2.0**-15 + 2.0**-23 * values.abs())


def test_scores_have_room_for_float32_where_the_bound_of_the_logits_has_none(device):
    case, workspace, logits = known_exactly(device)
    noise = group_noise_ref(case.params.seed, case.params.position, logits.shape[1], 0)
    score = group_scores_ref(logits, case.params.temperature, noise)
    score_hi = workspace.operands.score_hi.view(score.shape[::-1]).T.double()
    threshold = ordered_to_float(workspace.operands.threshold).double()
    assert (score_hi >= score + float32_error_bound(score)).all()
    assert (threshold <= score.amax(1) - float32_error_bound(score.amax(1))).all()


def test_masses_have_room_for_float32_where_the_bound_of_the_logits_has_none(device):
    case, workspace, logits = known_exactly(device, top_k=5)
    noiseless = torch.zeros(len(logits), workspace.num_groups, device=device)
    mass = group_scores_ref(logits, case.params.temperature, noiseless)
    lse_hi, lse_lo = (getattr(workspace.operands, name).view_as(mass).double() for name in ("lse_hi", "lse_lo"))
    assert (lse_hi >= mass + float32_error_bound(mass)).all()
    assert (lse_lo <= mass - float32_error_bound(mass)).all()


def test_what_lies_beyond_the_vocabulary_raises_no_threshold_and_writes_nothing(device):
    """Every logit is far below zero, the logit of padding, and the last tile of the screen extends beyond the head."""
    num_rows, vocab = 5, 96
    states, weight = torch.ones(num_rows, 64, device=device), torch.full((vocab, 64), -4.0, device=device)
    weight[:, 1:] = torch.randint(-1, 2, (vocab, 63), generator=torch.Generator().manual_seed(1)).float() / 4
    head = LMHead(weight)
    case = Case(states * 8, head, make_params(num_rows, head.spec, device))
    copy = Int8Head(head)
    workspace = ScreenWorkspace(copy.num_groups, copy.weight.shape[1], num_rows, device)
    guarded = torch.full((8 * num_rows + 1000,), -77.0, device=device)  # 8 groups in a tile of 128
    workspace.operands = workspace.operands._replace(score_hi=guarded[: 8 * num_rows])
    drawn = draw("screened", case, dataclasses.replace(SCREEN, block_v=128), int8_head=copy, screen=workspace)
    assert torch.equal(drawn.token_ids, draw("fused", case).token_ids)
    assert (guarded[6 * num_rows :] == -77.0).all(), "there are six groups"
    assert (ordered_to_float(workspace.operands.threshold) < 0).all()


@pytest.mark.parametrize("config", [SCREEN, LISTED], ids=["chunks", "listed"])
def test_what_the_screen_says_of_truncated_rows_holds_what_is_true_of_them(device, config):
    """For groups: bounds of their largest logit and of their mass. For ids: upper bounds of their logits, rounded
    up."""
    num_rows, vocab = 9, 805
    states, weight = gaussian(num_rows, vocab, 96, device, seed=2)
    head = LMHead(weight, softcap=30.0, logits_dtype=torch.float32)
    bias = torch.where(torch.arange(vocab, device=device) % 50 < 17, -float("inf"), 0.5).expand(num_rows, -1)
    params = BatchParams(
        0.3 + torch.arange(num_rows, device=device) / 5,
        *(torch.arange(num_rows, device=device) for _ in range(2)),
        limits(num_rows, device, top_k=5),
        LogitEdits(bias=bias.contiguous()),
    )
    case = Case(states, head, params)
    workspace, dots, bound = screened(case, config)
    groups = -(-vocab // 16)
    logit_hi, max_lo, lse_hi, lse_lo = (
        getattr(workspace.operands, name)[: num_rows * groups].view(num_rows, groups)
        for name in ("logit_hi", "max_logit_lo", "lse_hi", "lse_lo")
    )
    id_hi = workspace.operands.id_hi[: vocab * num_rows].view(vocab, num_rows).T.double()

    def grouped(logits: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(logits.double(), (0, -vocab % 16), value=-float("inf"))
        return padded.view(num_rows, groups, 16)

    exact = logits_ref(states, weight, softcap=30.0, logits_dtype=torch.float32)
    logits = grouped(edit_logits_ref(exact, bias=bias))
    peak, mass = logits.amax(-1), (logits / params.temperature.double()[:, None, None]).logsumexp(-1)
    assert (max_lo <= peak).all() and (peak <= logit_hi).all()
    assert (lse_lo <= mass).all() and (mass <= lse_hi).all()
    some = peak > -float("inf")
    assert 0 < some.sum() < some.numel() and (logit_hi[~some] == -float("inf")).all()
    assert (logit_hi - max_lo)[some].median() < 1.0, "and little more"
    assert ((lse_hi - lse_lo)[some] > 0).all()
    low, high = (
        edit_logits_ref(transform_ref(dots + sign * bound, torch.float32, softcap=30.0), bias=bias).double()
        for sign in (-1, 1)
    )
    close = 1e-5 * high.abs().clamp(min=1.0)
    assert (id_hi >= high - close).all(), "no nearest float16 is smaller"
    assert (id_hi <= high + 2.0**-8 * high.abs() + 1e-3)[high > -float("inf")].all()
    assert (logit_hi >= grouped(high).amax(-1) - 1e-4).all()
    assert (max_lo <= grouped(low).amax(-1) + 1e-4).all()
    noiseless = torch.zeros(num_rows, groups, device=device)
    slack = 2 * 2.0**-15
    for ends, sign, stored in ((high, 1, lse_hi), (low, -1, lse_lo)):
        exact = group_scores_ref(ends, params.temperature, noiseless)
        assert (sign * (stored - exact) >= slack)[some].all(), "beyond the error of a float32 sum"


# --- the life of a copy ---------------------------------------------------------------------------------------------


def test_a_copy_knows_its_bytes_and_when_its_head_has_changed_and_is_rebuilt_in_place(device):
    case = rounding_case(9, 1003, device, torch.float16, hidden=512)
    head, weight = case.head, case.head.weight
    copy = Int8Head(head)
    assert copy.num_bytes <= 0.52 * weight.numel() * weight.element_size()
    assert copy.num_groups == 63
    assert not copy.is_stale(head)
    assert copy.is_stale(LMHead(weight.clone()))
    weight.neg_()
    assert copy.is_stale(head)
    pointers = [tensor.data_ptr() for tensor in (copy.weight, *copy.operands)]
    copy.rebuild(head)
    assert not copy.is_stale(head)
    assert pointers == [tensor.data_ptr() for tensor in (copy.weight, *copy.operands)]
    fused = draw("fused", case).token_ids
    assert torch.equal(draw("screened", case, int8_head=copy).token_ids, fused)


def test_another_weight_at_the_address_of_one_that_is_gone_is_another_head(device):
    """This happens when a model is unloaded and another of its shape loaded: same memory, same count of writes."""
    storage = torch.zeros(64, 32, device=device)
    copy = Int8Head(LMHead(torch.from_dlpack(storage) if CUDA else torch.from_numpy(storage.numpy())))
    successor = torch.from_dlpack(storage) if CUDA else torch.from_numpy(storage.numpy())
    assert successor.data_ptr() == storage.data_ptr() and successor._version == 0
    assert copy.is_stale(LMHead(successor))


def test_a_copy_is_built_in_blocks_of_rows_that_leave_no_trace(device, monkeypatch):
    _, weight = gaussian(1, 1003, 48, device)
    whole = Int8Head(LMHead(weight))
    monkeypatch.setattr(int8_head_module, "_BUILD_ELEMENTS", 48 * 40)
    blocks = Int8Head(LMHead(weight))
    for one, other in zip((whole.weight, *whole.operands), (blocks.weight, *blocks.operands), strict=True):
        assert torch.equal(one, other)


def test_rows_that_are_not_finite_have_no_bound(device):
    weight = torch.ones(48, 16, device=device)
    weight[3, 5], weight[20, 0], weight[40] = float("nan"), float("inf"), 3e38
    operands = Int8Head(LMHead(weight)).operands
    assert operands.error[[3, 20]].tolist() == operands.norm[[3, 20]].tolist() == [float("inf")] * 2
    assert torch.isfinite(operands.error[[0, 19, 47]]).all()


def test_a_hidden_size_beyond_the_bound_of_its_sums_is_refused(device):
    with pytest.raises(ValueError, match="weight has 32784 columns; expected 32768 or fewer"):
        Int8Head(LMHead(torch.zeros(1, 32784, device=device)))


def test_a_copy_of_another_vocabulary_is_refused(device):
    copy = Int8Head(LMHead(torch.zeros(40, 16, device=device)))
    with pytest.raises(ValueError, match=r"int8_head is \(40, 16\) on .*; expected \(32, 16\)"):
        copy.rebuild(LMHead(torch.zeros(40, 16, device=device), vocab_size=32))
    assert LogitsSpec(40).num_groups == copy.num_groups == 3
