"""The screened path draws the fused pass's token from half the bytes: its bound holds, is needed, and is not wide."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import CUDA, DTYPES, TILE, bitmask, integer_problem, random_problem, rows
from sgl_flashsample.kernels import rescore_groups
from sgl_flashsample.kernels.features import Edit, LogitEdits, Truncation
from sgl_flashsample.kernels.head import LMHead
from sgl_flashsample.kernels.int8_head import ACCUMULATION, Counted, Int8Head, ScreenWorkspace
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample
from sgl_flashsample.kernels.quantize_hidden import quantize_hidden
from sgl_flashsample.kernels.reference import (
    group_noise_ref,
    lm_head_sample_ref,
    quantize_hidden_ref,
    screen_head_ref,
    screen_room_ref,
)
from sgl_flashsample.kernels.screen_head import screen_head
from sgl_flashsample.kernels.screened_sample import screened_sample
from sgl_flashsample.kernels.tiles import ScreenConfig

from sgl_flashsample.tuned import Shape, screen_of
from sgl_flashsample.work import Work

# Interpreted, a program costs milliseconds: few programs. Several parts and several chunks, so that both are joined.
CONFIG = (
    ScreenConfig(16, 128, 128, 4, 3)
    if CUDA
    else ScreenConfig(16, 1024, 64, 4, 1, ctas_per_sm=3, tma=False, chunk=100, rescore_d=64)
)
ONE_TERM = dataclasses.replace(CONFIG, terms=1)
LISTED = dataclasses.replace(CONFIG, listed=True, rescore_ctas_per_sm=1 if CUDA else 6, rescore_v=32, early=True)
CONFIGS = pytest.mark.parametrize("config", [CONFIG, ONE_TERM, LISTED], ids=["two terms", "one term", "listed"])


@dataclasses.dataclass(frozen=True)
class Screened:
    token: torch.Tensor
    score: torch.Tensor
    workspace: ScreenWorkspace
    counted: dict[Counted, int]


def screen(states, head, params, config=CONFIG, int8_head=None, edits=None, workspace=None) -> Screened:
    int8_head = Int8Head(head) if int8_head is None else int8_head
    workspace = ScreenWorkspace(int8_head, len(states)) if workspace is None else workspace
    before = workspace.counters.clone()
    token, score, logprob = screened_sample(
        states, head, int8_head, **params, config=config, edits=edits, workspace=workspace
    )
    assert logprob is None
    return Screened(token, score, workspace, dict(zip(Counted, (workspace.counters - before).tolist(), strict=True)))


def assert_equal_to_the_fused_pass_and_the_reference(states, head, params, config=CONFIG, int8_head=None) -> Screened:
    found = screen(states, head, params, config, int8_head)
    fused = lm_head_sample(states, head, **params, tile=TILE)
    options = {f.name: getattr(head, f.name) for f in dataclasses.fields(head) if f.name != "weight"}
    want = lm_head_sample_ref(states, head.weight, **params, **options)
    sure = ~want.near_tie
    assert torch.equal(found.token[sure], want.token[sure])
    assert torch.equal(found.token[sure], fused.token[sure])
    torch.testing.assert_close(found.score, fused.score, rtol=1e-4, atol=1e-4)
    return found


def with_outliers(states, weight, channels=(3, 11)):
    """Some channels of the hidden states 50 times as large, and their columns so much smaller that logits stay."""
    states, weight = states.clone(), weight.clone()
    states[:, list(channels)] *= 64
    weight[:, list(channels)] /= 64
    return states, weight


RAGGED = [(1, 1, 80), (3, 17, 65), (1, 127, 80), (3, 129, 33), (17, 5003, 72), (65, 2003, 80)]
if CUDA:
    RAGGED += [(1, 151936, 4096), (17, 151937, 1000), (3, 50257, 768), (65, 151936, 256)]


@pytest.mark.parametrize("num_rows, vocab, hidden", RAGGED)
@DTYPES
def test_tokens_equal_the_fused_pass_and_the_reference_on_ragged_shapes(device, num_rows, vocab, hidden, dtype):
    states, weight = random_problem(num_rows, vocab, hidden, dtype, device, padding=vocab % 7)
    head = LMHead(weight, vocab_size=vocab)
    assert_equal_to_the_fused_pass_and_the_reference(states, head, rows(num_rows, device))


@CONFIGS
@pytest.mark.parametrize("temperature", [0.0, 0.2, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("shape", ["random", "peaked", "flat", "heavy tails", "outlier channels"])
def test_tokens_equal_the_fused_pass_for_every_kind_of_logits(device, shape, temperature, config):
    states, weight = random_problem(17, 3000, 96, torch.bfloat16, device, seed=3)
    if shape == "peaked":
        states *= 6
    if shape == "flat":
        states *= 0.01
    if shape == "heavy tails":
        generator = torch.Generator().manual_seed(1)
        weight = (weight * torch.randn(weight.shape, generator=generator).to(device).abs() ** 3).bfloat16()
    if shape == "outlier channels":
        states, weight = with_outliers(states, weight)
    params = rows(17, device) | {"temperature": torch.full((17,), temperature, device=device)}
    assert_equal_to_the_fused_pass_and_the_reference(states, LMHead(weight), params, config)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"logit_scale": 0.25},
        {"logit_scale": 3.0, "softcap": 20.0},
        {"logits_dtype": torch.float32},
        {"vocab_start": 1600},
        {"vocab_size": 901},
    ],
    ids=lambda o: "+".join(o),
)
def test_scale_softcap_rounding_shard_offset_and_padding_equal_the_fused_pass(device, options):
    states, weight = random_problem(33, 1000, 64, torch.bfloat16, device, seed=1)
    assert_equal_to_the_fused_pass_and_the_reference(states, LMHead(weight, **options), rows(33, device))


@CONFIGS
def test_tokens_equal_to_the_bit_where_sums_are_exact_and_ties_abound(device, config):
    states, weight = integer_problem(96, 3000, 64, torch.float16, device)
    params = rows(96, device, greedy_every=2)
    fused = lm_head_sample(states, LMHead(weight), **params, tile=TILE)
    found = screen(states, LMHead(weight), params, config)
    assert torch.equal(found.token, fused.token)
    assert torch.equal(found.score, fused.score)


def test_a_token_does_not_depend_on_the_config(device):
    states, weight = integer_problem(40, 3000, 64, torch.float16, device, seed=4)
    head, params = LMHead(weight), rows(40, device)
    int8_head = Int8Head(head)
    configs = [
        CONFIG,
        dataclasses.replace(CONFIG, block_b=64),
        dataclasses.replace(CONFIG, block_b=8, block_d=32, chunk=16),
        dataclasses.replace(CONFIG, block_v=128, chunk=1000, rescore_v=128, rescore_d=16),
    ]
    if CUDA:
        configs += [dataclasses.replace(CONFIG, **{name: False}) for name in ("flatten", "tma", "prefetch")]
    tokens = [screen(states, head, params, config, int8_head).token for config in configs]
    for other in tokens[1:]:
        assert torch.equal(tokens[0], other)


@pytest.mark.parametrize("work", [Work.PLAIN, Work.EDIT, Work.GREEDY])
def test_the_built_in_configs_draw_the_fused_pass_token(device, work):
    for num_rows, vocab in ((1, 300), (33, 3000)):
        states, weight = integer_problem(num_rows, vocab, 64, torch.float16, device)
        head, params = LMHead(weight), rows(num_rows, device)
        fused = lm_head_sample(states, head, **params, tile=TILE)
        config = screen_of(Shape.of(head), num_rows, work)
        assert torch.equal(screen(states, head, params, config).token, fused.token)


@CONFIGS
@pytest.mark.parametrize("outliers", [False, True], ids=["", "outliers"])
def test_the_bound_holds_for_every_logit_and_is_not_loose(device, config, outliers):
    states, weight = random_problem(9, 800, 512, torch.bfloat16, device, seed=2)
    if outliers:
        states, weight = with_outliers(states, weight)
    head = LMHead(weight)
    int8_head = Int8Head(head)
    workspace = ScreenWorkspace(int8_head, 9)
    quantize_hidden(states, int8_head, workspace, config)
    terms = workspace.terms[: 9 * config.terms, :512].view(9, config.terms, 512)
    fixed = quantize_hidden_ref(terms, workspace.hidden_scale)
    copy = int8_head.weight[:, :512].double() * int8_head.scale.double()[:, None]
    off = (states.double() @ weight.double().T - fixed @ copy.T).abs()
    truth = screen_room_ref(weight, copy, states, fixed, ACCUMULATION)
    room = (
        workspace.hidden_norm.double()[:, None] * int8_head.error.double()[None, :]
        + workspace.hidden_error.double()[:, None] * int8_head.norm.double()[None, :]
    )
    assert (room >= truth).all(), "what the kernels use is no less than the bound from its definition"
    assert (room <= 1.01 * truth).all(), "and little more"
    accumulated = ACCUMULATION * 512 * states.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None, :]
    assert (off + accumulated <= truth).all()
    assert (off > 0.1 * truth).any(), "the bound would not see an error in its scale"
    relative = (truth / (states.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None, :])).median()
    assert relative < (0.01 if config.terms == 2 and not outliers else 0.1)


def test_fixed_point_is_the_nearest_and_its_norms_are_bounds(device):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(6, 77, generator=generator)
    states[1] *= 1e30
    states[2] *= 1e-30
    states[3] = 0
    states[4, 5] = 1e6
    states[5] = states[5].sign() * 3.0
    states = states.to(device)
    int8_head = Int8Head(LMHead(torch.zeros(16, 77, device=device)))
    workspace = ScreenWorkspace(int8_head, 6)
    for config, largest in ((CONFIG, 127 * 256), (ONE_TERM, 127)):
        quantize_hidden(states, int8_head, workspace, config)
        terms = workspace.terms[: 6 * config.terms, :77].view(6, config.terms, 77)
        step = workspace.hidden_scale.double()
        fixed = quantize_hidden_ref(terms, step)
        assert (fixed.abs() <= step[:, None] * largest).all()
        off = (states.double() - fixed).abs()
        assert (off <= step[:, None] * 0.501).all()
        present = states.double().abs().amax(1) > 2.0**-80
        torch.testing.assert_close(step[present], (states.double().abs().amax(1) / largest)[present], rtol=1e-6, atol=0)
        for bound, value in (
            (workspace.hidden_norm, states.double()),
            (workspace.hidden_error, states.double() - fixed),
        ):
            exact = value.norm(dim=1)
            assert (bound.double() >= exact).all()
            assert (bound.double() <= 1.01 * exact + 2.0**-20 * states.double().norm(dim=1) + 1e-30).all()


def aligned_problem(device, side: str):
    """Two ids in two groups. The screen sees the second, which has the larger logit, smaller by all of its bound."""
    hidden, step = 64, 1.0 / 16
    signs = torch.randn(hidden, generator=torch.Generator().manual_seed(8)).sign()
    if side == "weight":
        states = signs[None, :].clone()
        weight = torch.zeros(32, hidden)
        weight[16] = 0.49 * step * signs  # rounds to nothing, in steps that its largest element decides
        weight[16, 0] = 127 * step * signs[0]
        weight[0, 0] = (127 * step + 0.4 * step * hidden) * signs[0]
    else:
        states = 0.49 * step * signs[None, :]
        states[0, 0] = 127 * step * signs[0]
        weight = torch.zeros(32, hidden)
        weight[16] = signs * step
        weight[0, 0] = (127 * step + 0.4 * step * hidden) * step / states[0, 0]
    exact = (states.double() @ weight.double().T)[0]
    assert exact.argmax() == 16
    params = {
        "temperature": torch.zeros(1, device=device),
        "seed": torch.zeros(1, dtype=torch.int64, device=device),
        "position": torch.zeros(1, dtype=torch.int64, device=device),
    }
    return states.to(device), weight.to(device), params


@pytest.mark.parametrize("side", ["weight", "hidden"])
def test_half_the_bound_would_lose_the_token_when_all_errors_point_the_same_way(device, side):
    states, weight, params = aligned_problem(device, side)
    head = LMHead(weight)
    int8_head = Int8Head(head)
    assert screen(states, head, params, ONE_TERM, int8_head).token.item() == 16
    (int8_head.error if side == "weight" else int8_head.norm).mul_(0.5)
    assert screen(states, head, params, ONE_TERM, int8_head).token.item() == 0, "the problem is not hard enough"


@CONFIGS
def test_upper_scores_and_thresholds_enclose_those_of_the_reference(device, config):
    states, weight = random_problem(17, 1500, 128, torch.bfloat16, device, seed=5)
    head, params = LMHead(weight, softcap=15.0, logit_scale=0.5, logits_dtype=torch.float32), rows(17, device)
    int8_head = Int8Head(head)
    workspace = ScreenWorkspace(int8_head, 17)
    quantize_hidden(states, int8_head, workspace, config)
    screen_head(head, int8_head, 17, **params, workspace=workspace, config=config)
    terms = workspace.terms[: 17 * config.terms, :128].view(17, config.terms, 128)
    fixed = quantize_hidden_ref(terms, workspace.hidden_scale)
    copy = int8_head.weight.double() * int8_head.scale.double()[:, None]
    room = screen_room_ref(weight, copy, states, fixed, ACCUMULATION)
    noise = group_noise_ref(params["seed"], params["position"], 1500, 0)
    low, high = screen_head_ref(
        fixed @ copy.T, room, params["temperature"], noise, rounded=head.rounding, softcap=15.0, logit_scale=0.5
    )
    upper = workspace.upper[: 94 * 17].view(94, 17).T.double()
    assert (upper >= high - 1e-5).all()
    assert (upper <= high + 0.01).all()
    threshold = workspace.threshold
    back = torch.where(threshold < 0, threshold ^ 0x7FFFFFFF, threshold).view(torch.float32).double()
    assert (back <= low.amax(1) + 1e-5).all()
    assert (back >= low.amax(1) - 0.01).all()


EDITS = {
    "additive": lambda g, b, v: {"additive": -3 * torch.rand(b, v, generator=g)},
    "scaling": lambda g, b, v: {"scaling": 0.5 + torch.rand(b, v, generator=g)},
    "bool mask": lambda g, b, v: {"mask": torch.rand(b, v, generator=g) < 0.9},
    "bit mask": lambda g, b, v: {"mask": bitmask(torch.rand(b, v, generator=g) < 0.1)},
    "bias": lambda g, b, v: {"bias": 5 * torch.randn(b, v, generator=g)},
    "all": lambda g, b, v: {
        "additive": -3 * torch.rand(b, v, generator=g),
        "scaling": 0.5 + torch.rand(b, v, generator=g),
        "mask": bitmask(torch.rand(b, v, generator=g) < 0.5),
        "bias": torch.randn(b, v, generator=g),
        "rows": torch.randint(0, 16, (b,), generator=g, dtype=torch.int32),
    },
}


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("bias_first", [False, True], ids=["", "bias first"])
def test_edited_logits_give_the_token_of_the_fused_pass(device, kind, bias_first):
    states, weight = integer_problem(17, 1900, 64, torch.float16, device, seed=6)
    given = EDITS[kind](torch.Generator().manual_seed(2), 17, 1900)
    edits = LogitEdits(**{name: value.to(device) for name, value in given.items()}, bias_before_mask=bias_first)
    head, params = LMHead(weight), rows(17, device)
    fused = lm_head_sample(states, head, **params, tile=TILE, edits=edits)
    found = screen(states, head, params, edits=edits)
    assert torch.equal(found.token, fused.token)
    assert torch.equal(found.score, fused.score)
    assert found.counted[Counted.GROUPS] < 17 * 119 / 4, "edits must not make every group a candidate"
    assert Edit.MASK & edits.kinds or kind not in ("bool mask", "bit mask")


def test_a_row_whose_tokens_are_all_forbidden_gives_the_first_id_as_the_fused_pass_does(device):
    states, weight = integer_problem(3, 500, 32, torch.float16, device)
    mask = torch.zeros(3, 500, dtype=torch.bool, device=device)
    mask[1] = True
    edits, params = LogitEdits(mask=mask), rows(3, device)
    fused = lm_head_sample(states, LMHead(weight), **params, tile=TILE, edits=edits)
    found = screen(states, LMHead(weight), params, edits=edits)
    assert found.token.tolist() == fused.token.tolist()
    assert found.token[1] == 0
    assert found.counted[Counted.SURE_ROWS] >= 1, "a row without a token reads nothing"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38, -3e38])
def test_hidden_states_and_weights_that_are_not_finite_or_huge_give_the_fused_pass_token(device, value):
    states, weight = integer_problem(9, 1000, 32, torch.float32, device)
    params = rows(9, device, greedy_every=3)
    broken_states, broken_weight = states.clone(), weight.clone()
    broken_states[1], broken_states[2, 0] = value, value
    broken_weight[50], broken_weight[777, 3] = value, value
    for s, w in ((broken_states, weight), (states, broken_weight), (broken_states, broken_weight)):
        fused = lm_head_sample(s, LMHead(w), **params, tile=TILE)
        assert torch.equal(screen(s, LMHead(w), params).token, fused.token)


@pytest.mark.parametrize("config", [CONFIG, LISTED], ids=["chunks", "listed"])
def test_where_every_group_could_win_every_group_is_read_and_the_token_is_right(device, config):
    states, weight = integer_problem(17, 3003, 64, torch.float16, device)
    head, params = LMHead(weight), rows(17, device)
    int8_head = Int8Head(head)
    fused = lm_head_sample(states, head, **params, tile=TILE)
    int8_head.error.fill_(1e6)
    found = screen(states, head, params, config, int8_head=int8_head)
    assert torch.equal(found.token, fused.token)
    assert found.counted[Counted.GROUPS] == 188 * found.counted[Counted.BATCHES]
    assert found.counted[Counted.CANDIDATES] == 188 * 17
    assert found.counted[Counted.WIDE_BATCHES] == found.counted[Counted.BATCHES] == 2


def test_neither_the_order_of_the_list_nor_who_reads_an_entry_matters_even_where_scores_tie(device, monkeypatch):
    states, weight = integer_problem(17, 703, 64, torch.float16, device)
    weight[:, 1:] = 0  # one of few products each: the best is everywhere
    head, params = LMHead(weight), rows(17, device) | {"temperature": torch.zeros(17, device=device)}
    fused = lm_head_sample(states, head, **params, tile=TILE)
    in_order = screen(states, head, params, LISTED)
    list_groups, shifts = rescore_groups.list_groups, []

    def shuffled(num_rows, block_b, workspace, config, first):
        list_groups(num_rows, block_b, workspace, config, first)
        for block in range(-(-num_rows // block_b)):
            entries = workspace.list[block * workspace.num_groups :][: int(workspace.flagged[block])]
            entries.copy_(entries.flip(0).roll(shifts[-1]))
            place = workspace.place[block * workspace.num_groups :]
            place[entries.long()] = torch.arange(len(entries), dtype=torch.int32, device=device)

    monkeypatch.setattr(rescore_groups, "list_groups", shuffled)
    for shift in (0, 5):
        shifts.append(shift)
        found = screen(states, head, params, LISTED)
        assert torch.equal(found.token, fused.token)
        assert torch.equal(found.score, in_order.score)


@pytest.mark.parametrize("config", [CONFIG, LISTED], ids=["chunks", "listed"])
def test_what_is_read_first_spares_what_is_worse(device, config):
    states, weight = random_problem(4, 4000, 64, torch.bfloat16, device)
    weight = torch.cat([states / 8, weight])  # the first group holds what each state points to
    head, params = LMHead(weight), rows(4, device) | {"temperature": torch.ones(4, device=device)}
    int8_head = Int8Head(head)
    int8_head.error *= 20  # little is ruled out before its turn
    fused = lm_head_sample(states, head, **params, tile=TILE)
    found = screen(states, head, params, dataclasses.replace(config, rescore_v=32), int8_head)
    assert torch.equal(found.token, fused.token)
    assert found.counted[Counted.CANDIDATES] > 80
    if not CUDA:  # there, programs run at the same time
        assert found.counted[Counted.GROUPS] < 60


def test_few_groups_are_read_and_the_counters_say_how_many(device):
    states, weight = random_problem(8, 4000, 256, torch.bfloat16, device)
    head, params = LMHead(weight), rows(8, device) | {"temperature": torch.ones(8, device=device)}
    two, one = screen(states, head, params), screen(states, head, params, ONE_TERM)
    for found in (two, one):
        assert found.counted[Counted.BATCHES] == 1
        assert found.counted[Counted.ROWS] == 8
        assert found.counted[Counted.CANDIDATES] >= 8
        assert found.counted[Counted.GROUPS] <= found.counted[Counted.CANDIDATES]
        assert 0 <= found.counted[Counted.SURE_ROWS] <= 8
    assert two.counted[Counted.GROUPS] < one.counted[Counted.GROUPS] < 100
    peaked = screen(weight[100:900:100] * 8, head, params)
    assert peaked.counted[Counted.SURE_ROWS] == 8, "nothing comes near the one id that a state points to"
    assert peaked.counted[Counted.GROUPS] == 8
    assert peaked.counted[Counted.WIDE_BATCHES] == 0


def test_the_best_shard_holds_the_token_of_the_whole_vocabulary(device):
    states, weight = integer_problem(17, 2000, 64, torch.float16, device, seed=4)
    params = rows(17, device)
    whole = screen(states, LMHead(weight), params)
    shards = [screen(states, LMHead(weight[a:b], vocab_start=a), params) for a, b in ((0, 992), (992, 2000))]
    score = torch.stack([shard.score for shard in shards])
    token = torch.stack([shard.token for shard in shards])
    assert torch.equal(score.amax(0), whole.score)
    assert torch.equal(token.gather(0, score.argmax(0, keepdim=True)).squeeze(0), whole.token)


def test_a_workspace_serves_batches_of_every_size_one_after_the_other(device):
    states, weight = integer_problem(40, 1500, 64, torch.float16, device)
    head = LMHead(weight)
    int8_head = Int8Head(head)
    workspace = ScreenWorkspace(int8_head, 40)
    for num_rows, config in ((40, CONFIG), (1, LISTED), (17, CONFIG), (40, LISTED), (40, CONFIG)):
        params = rows(num_rows, device, seed=num_rows)
        fused = lm_head_sample(states[:num_rows], head, **params, tile=TILE)
        found = screen(states[:num_rows], head, params, config, int8_head=int8_head, workspace=workspace)
        assert torch.equal(found.token, fused.token)


def test_columns_scaled_by_powers_of_two_change_no_token_and_tighten_the_bound_of_outliers(device):
    states, weight = with_outliers(*random_problem(17, 2000, 128, torch.bfloat16, device))
    head, params = LMHead(weight), rows(17, device) | {"temperature": torch.ones(17, device=device)}
    columns = torch.ones(128, device=device)
    columns[[3, 11]] = 64.0
    scaled = Int8Head(head, columns)
    found = assert_equal_to_the_fused_pass_and_the_reference(states, head, params, int8_head=scaled)
    assert found.counted[Counted.GROUPS] < 0.7 * screen(states, head, params).counted[Counted.GROUPS]


def test_a_copy_knows_its_bytes_and_when_its_head_has_changed_and_is_rebuilt_in_place(device):
    states, weight = integer_problem(9, 1003, 512, torch.float16, device)
    head, params = LMHead(weight), rows(9, device)
    int8_head = Int8Head(head)
    assert int8_head.num_bytes <= 0.52 * weight.numel() * weight.element_size()
    assert int8_head.num_groups == 63
    assert not int8_head.is_stale(head)
    assert int8_head.is_stale(LMHead(weight.clone()))
    weight.neg_()
    assert int8_head.is_stale(head)
    pointers = [tensor.data_ptr() for tensor in (int8_head.weight, int8_head.scale, int8_head.error, int8_head.norm)]
    int8_head.rebuild(head)
    assert not int8_head.is_stale(head)
    assert pointers == [t.data_ptr() for t in (int8_head.weight, int8_head.scale, int8_head.error, int8_head.norm)]
    fused = lm_head_sample(states, head, **params, tile=TILE)
    assert torch.equal(screen(states, head, params, int8_head=int8_head).token, fused.token)


def test_a_copy_is_built_in_blocks_of_rows_that_leave_no_trace(device, monkeypatch):
    _, weight = random_problem(1, 1003, 48, torch.bfloat16, device)
    whole = Int8Head(LMHead(weight))
    monkeypatch.setattr("sgl_flashsample.kernels.int8_head._BUILD_ELEMENTS", 48 * 40)
    blocks = Int8Head(LMHead(weight))
    for name in ("weight", "scale", "error", "norm"):
        assert torch.equal(getattr(whole, name), getattr(blocks, name)), name


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(2, 8)}, r"hidden is \(2, 8\).*expected \[B, 16\]"),
        ({"temperature": torch.zeros(3)}, r"temperature is \(3,\).*expected contiguous \(2,\)"),
        ({"seed": torch.zeros(2, dtype=torch.int32)}, r"seed is .*int32.*expected .*int64"),
        ({"workspace": 1}, r"workspace is for 1 rows.*expected at least 2 rows"),
        ({"int8_head": torch.zeros(300, 16)}, r"int8_head is \(300, 16\).*expected \(400, 16\)"),
        ({"return_logprob": True}, "return_logprob is True; expected False"),
        ({"vocab_start": 16}, "vocab_start is 16; expected 0, the whole vocabulary, with a truncation"),
        ({"logit_scale": -1.0}, "logit_scale is -1.0; expected a positive number"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_bad_arguments_raise_a_value_error_that_names_them(device, change, message):
    weight = torch.zeros(400, 16, device=device)
    head = LMHead(weight, logit_scale=change.get("logit_scale"), vocab_start=change.get("vocab_start", 0))
    int8_head = Int8Head(LMHead(change.get("int8_head", weight).to(device)))
    arguments = {"hidden": torch.zeros(2, 16, device=device), **rows(2, device)}
    arguments |= {name: value.to(device) for name, value in change.items() if name in arguments}
    arguments["return_logprob"] = change.get("return_logprob", False)
    if "vocab_start" in change:
        off = torch.zeros(2, device=device)
        arguments["truncation"] = Truncation(off.int(), off + 1, off)
    arguments["workspace"] = ScreenWorkspace(int8_head, change.get("workspace", 2))
    with pytest.raises(ValueError, match=message):
        screened_sample(head=head, int8_head=int8_head, config=CONFIG, **arguments)


@pytest.mark.parametrize(
    "columns, message",
    [
        (torch.ones(8), r"columns is \(8,\)"),
        (torch.full((16,), 3.0), "expected powers of two"),
        (torch.zeros(16), "expected powers of two"),
        (torch.full((16,), 2.0**40), "expected powers of two"),
    ],
)
def test_bad_columns_raise_a_value_error_that_says_what_is_wrong(device, columns, message):
    with pytest.raises(ValueError, match=message):
        Int8Head(LMHead(torch.zeros(10, 16, device=device)), columns.to(device))


def test_a_hidden_size_beyond_the_bound_of_its_sums_is_refused(device):
    with pytest.raises(ValueError, match="weight has 32784 columns; expected 32768 or fewer"):
        Int8Head(LMHead(torch.zeros(1, 32784, device=device)))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("block_v", 48, "ScreenConfig.block_v is 48"),
        ("terms", 3, "ScreenConfig.terms is 3"),
        ("terms", 4, "ScreenConfig.terms is 4; expected 2 or fewer"),
        ("chunk", 8, "ScreenConfig.chunk is 8; expected 16 or more"),
        ("rescore_warps", 16, "ScreenConfig.rescore_warps is 16; expected 8 or fewer"),
        ("block_b", 256, "ScreenConfig.block_b is 256; expected 128 or fewer"),
        ("rescore_stages", 0, "ScreenConfig.rescore_stages is 0"),
        ("rescore_v", 8, "ScreenConfig.rescore_v is 8; expected a power of two of at least 16"),
        ("rescore_ctas_per_sm", 0, "ScreenConfig.rescore_ctas_per_sm is 0"),
    ],
)
def test_a_bad_config_raises_a_value_error_that_names_the_field(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})
    with pytest.raises(ValueError, match="block_b is 8 with 1 terms; expected at least 16"):
        dataclasses.replace(CONFIG, block_b=8, terms=1)


def test_no_rows_give_no_tokens(device):
    head = LMHead(torch.zeros(100, 16, device=device))
    token, score, logprob = screened_sample(
        torch.zeros(0, 16, device=device), head, Int8Head(head), **rows(0, device), config=CONFIG
    )
    assert token.shape == score.shape == (0,)
    assert logprob is None


@pytest.mark.gpu
def test_a_captured_graph_replays_the_same_tokens_and_follows_its_inputs(device):
    states, weight = random_problem(17, 151936, 1024, torch.bfloat16, device)
    head, params = LMHead(weight), rows(17, device)
    int8_head = Int8Head(head)
    workspace = ScreenWorkspace(int8_head, 17)
    eager = screen(states, head, params, int8_head=int8_head).token
    graph = torch.cuda.CUDAGraph()
    screened_sample(states, head, int8_head, **params, config=CONFIG, workspace=workspace)
    with torch.cuda.graph(graph):
        token, _, _ = screened_sample(states, head, int8_head, **params, config=CONFIG, workspace=workspace)
    for _ in range(3):
        graph.replay()
        assert torch.equal(token, eager)
    params["position"] += 1
    graph.replay()
    assert torch.equal(token, screen(states, head, params, int8_head=int8_head).token)
    assert not torch.equal(token, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("rescore", [(64, 256, 4), (64, 64, 8), (32, 256, 4), (16, 256, 4)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_a_thousand_steps_equal_the_fused_pass(device, temperature, rescore):
    """16 rows x 64 positions at a real shape. The fewer groups a program reads at a time, the more threads share one,
    and the oftener it looks again at what the others have raised meanwhile."""
    states, weight = random_problem(16, 151936, 4096, torch.bfloat16, device)
    head, params = LMHead(weight), rows(16, device) | {"temperature": torch.full((16,), temperature, device=device)}
    int8_head = Int8Head(head)
    workspace = ScreenWorkspace(int8_head, 16)
    names = ("rescore_v", "rescore_d", "rescore_warps")
    config = dataclasses.replace(CONFIG, **dict(zip(names, rescore, strict=True)))
    for _ in range(64):
        params["position"] += 1
        fused = lm_head_sample(states, head, **params, tile=TILE)
        found = screen(states, head, params, config, int8_head=int8_head, workspace=workspace)
        assert torch.equal(found.token, fused.token)
