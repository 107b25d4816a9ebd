"""The fused kernel against its float64 reference, and the invariances that make it exact."""

from __future__ import annotations

import dataclasses
import itertools
import os

import numpy as np
import pytest
import torch
from problems import CUDA, TILE, WIDE, integer_problem, random_problem, rows
from sgl_flashsample.kernels.head import LMHead, Workspace, supports_tma
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample, num_parts
from sgl_flashsample.kernels.reference import lm_head_sample_ref
from sgl_flashsample.kernels.tiles import TileConfig
from stats import g_test, power


def assert_equal_to_reference(states, head: LMHead, params, tile, max_near_ties: float) -> None:
    token, _, logprob = lm_head_sample(states, head, **params, tile=tile, return_logprob=True)
    options = {f.name: getattr(head, f.name) for f in dataclasses.fields(head) if f.name != "weight"}
    want = lm_head_sample_ref(states, head.weight, **params, **options)
    sure = ~want.near_tie
    assert torch.equal(token[sure], want.token[sure])
    assert want.near_tie.double().mean().item() <= max_near_ties
    assert (token >= head.vocab_start).all()
    assert (token < head.vocab_start + head.vocab_size).all()
    same = token == want.token
    assert (logprob[same] >= want.logprob_low[same] - 1e-4).all()
    assert (logprob[same] <= want.logprob_high[same] + 1e-4).all()


RAGGED = [(1, 1), (1, 2), (3, 17), (17, 127), (3, 128), (65, 129), (1, 5003), (17, 5003)]
if CUDA:
    RAGGED += [(3, 50257), (65, 50257), (17, 151936), (65, 151937)]


@pytest.mark.parametrize("num_rows, vocab", RAGGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_tokens_and_logprobs_equal_the_reference_on_ragged_shapes(device, num_rows, vocab, dtype):
    states, weight = random_problem(num_rows, vocab, 80, dtype, device, padding=vocab % 7)
    head = LMHead(weight, vocab_size=vocab)
    assert_equal_to_reference(states, head, rows(num_rows, device), TILE, max_near_ties=0.35 if num_rows < 9 else 0.1)


def test_tokens_equal_the_reference_when_arithmetic_is_exact(device):
    states, weight = integer_problem(256, 2000, 64, torch.float16, device)
    assert_equal_to_reference(states, LMHead(weight), rows(256, device), WIDE, max_near_ties=0.008)


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
def test_scale_softcap_rounding_shard_offset_and_padding_equal_the_reference(device, options):
    states, weight = random_problem(33, 1000, 64, torch.bfloat16, device, seed=1)
    assert_equal_to_reference(states, LMHead(weight, **options), rows(33, device), WIDE, max_near_ties=0.1)


def test_a_hidden_size_that_no_block_divides_equals_the_reference(device):
    states, weight = random_problem(5, 300, 72, torch.float32, device)
    assert_equal_to_reference(states, LMHead(weight), rows(5, device), TILE, max_near_ties=0.01)


def test_a_weight_and_states_that_descriptors_cannot_address_are_read_through_pointers(device):
    states, weight = random_problem(5, 300, 65, torch.bfloat16, device)
    head = LMHead(weight)
    assert not head.supports_tma
    assert not supports_tma(states)
    tile = dataclasses.replace(TILE, tma=True, hidden_tma=True)
    assert_equal_to_reference(states, head, rows(5, device), tile, max_near_ties=0.3)


def test_greedy_takes_the_first_of_equal_maxima(device):
    weight = torch.zeros(4000, 16, device=device)
    states = torch.ones(3, 16, device=device)
    for first, others in ((0, [1, 3999]), (15, [16]), (513, [600, 1025, 2049]), (3998, [3999])):
        weight.zero_()
        weight[[first, *others]] = 1.0
        params = rows(3, device) | {"temperature": torch.zeros(3, device=device)}
        for tile in (TILE, WIDE):
            token, score, _ = lm_head_sample(states, LMHead(weight), **params, tile=tile)
            assert token.tolist() == [first] * 3
            assert score.tolist() == [16.0] * 3


def test_greedy_logprob_is_that_of_temperature_one(device):
    states, weight = random_problem(4, 700, 32, torch.float32, device)
    params = rows(4, device) | {"temperature": torch.zeros(4, device=device)}
    token, _, logprob = lm_head_sample(states, LMHead(weight), **params, tile=TILE, return_logprob=True)
    want = torch.log_softmax((states.double() @ weight.double().T), -1).gather(1, token[:, None]).squeeze(1)
    torch.testing.assert_close(logprob.double(), want, rtol=0, atol=1e-4)


def test_padding_rows_are_never_drawn_even_when_they_would_win(device):
    states = torch.ones(64, 16, device=device)
    weight = torch.full((1024, 16), -1.0, device=device)
    weight[1000:] = 5.0
    token, _, logprob = lm_head_sample(
        states, LMHead(weight, vocab_size=1000), **rows(64, device), tile=TILE, return_logprob=True
    )
    assert (token < 1000).all()
    torch.testing.assert_close(logprob, torch.full_like(logprob, -float(np.log(1000))), rtol=1e-5, atol=1e-5)


def test_a_nan_or_infinite_logit_never_leaves_the_vocabulary_and_never_touches_another_row(device):
    states, weight = random_problem(8, 1000, 32, torch.float32, device)
    params = rows(8, device)
    clean, _, _ = lm_head_sample(states, LMHead(weight), **params, tile=TILE)
    broken = states.clone()
    broken[1], broken[2, 0], broken[4] = float("nan"), float("inf"), float("-inf")
    token, _, _ = lm_head_sample(broken, LMHead(weight), **params, tile=TILE)
    assert ((token >= 0) & (token < 1000)).all()
    assert token[1].item() == 0, "a row of NaN gives the first id"
    assert torch.equal(token[[0, 3, 5, 6, 7]], clean[[0, 3, 5, 6, 7]])


def test_a_nan_logit_is_never_drawn(device):
    weight = torch.zeros(100, 16, device=device)
    weight[50] = 10.0
    weight[10:40] = float("nan")
    states = torch.ones(32, 16, device=device)
    token, _, _ = lm_head_sample(states, LMHead(weight), **rows(32, device), tile=TILE)
    assert token.tolist() == [50] * 32


def test_an_infinite_logit_wins(device):
    weight = torch.zeros(100, 16, device=device)
    weight[77] = float("inf")
    states = torch.ones(32, 16, device=device)
    token, _, _ = lm_head_sample(states, LMHead(weight), **rows(32, device), tile=TILE)
    assert token.tolist() == [77] * 32


def invariance_problem(device):
    return integer_problem(70, 3000, 64, torch.float16, device, seed=4)


def test_a_token_does_not_depend_on_the_tile(device):
    states, weight = invariance_problem(device)
    head, params = LMHead(weight), rows(70, device)
    tiles = [
        TILE,
        WIDE,
        TileConfig(32, 256, 32, 4, 2, tma=False, reduce_rows=8),
        TileConfig(128, 1024, 64, 4, 1, 4, tma=False),
        TileConfig(128, 1024, 64, 4, 1, tma=False, rows_first=True),
        TileConfig(64, 1024, 32, 4, 1, hidden_tma=True),
        TileConfig(64, 1024, 64, 4, 1, 3, tma=False, reduce_rows=32, one_launch=True),
    ]
    if CUDA:
        tiles = [TILE, WIDE, TileConfig(32, 64, 32, 4, 2, tma=False), TileConfig(128, 128, 64, 8, 3, flatten=False)]
        tiles += [dataclasses.replace(WIDE, **{name: True}) for name in ("rows_first", "hidden_tma", "one_launch")]
    drawn = [lm_head_sample(states, head, **params, tile=tile)[0] for tile in tiles]
    for other in drawn[1:]:
        assert torch.equal(drawn[0], other)


def test_a_token_does_not_depend_on_the_batch_its_order_or_its_neighbours(device):
    states, weight = invariance_problem(device)
    head, params = LMHead(weight), rows(70, device)
    together, _, _ = lm_head_sample(states, head, **params, tile=WIDE)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(5)).to(device)
    shuffled, _, _ = lm_head_sample(
        states[order].contiguous(), head, **{k: v[order].contiguous() for k, v in params.items()}, tile=WIDE
    )
    assert torch.equal(together[order], shuffled)
    for row in (0, 1, 37, 69):
        alone, _, _ = lm_head_sample(
            states[row : row + 1], head, **{k: v[row : row + 1].clone() for k, v in params.items()}, tile=TILE
        )
        assert alone.item() == together[row].item()
    hot = params | {"temperature": torch.where(torch.arange(70, device=device) == 3, params["temperature"], 9.0)}
    assert lm_head_sample(states, head, **hot, tile=WIDE)[0][3].item() == together[3].item()


def test_the_best_shard_holds_the_token_of_the_whole_vocabulary(device):
    states, weight = invariance_problem(device)
    params = rows(70, device)
    whole, best, _ = lm_head_sample(states, LMHead(weight), **params, tile=WIDE)
    cuts = [0, 992, 2000, 3000]
    shards = [
        lm_head_sample(states, LMHead(weight[a:b], vocab_start=a), **params, tile=WIDE)
        for a, b in itertools.pairwise(cuts)
    ]
    score = torch.stack([s for _, s, _ in shards])
    token = torch.stack([t for t, _, _ in shards])
    assert torch.equal(score.amax(0), best)
    assert torch.equal(token.gather(0, score.argmax(0, keepdim=True)).squeeze(0), whole)


def test_another_seed_or_position_draws_anew_and_the_same_ones_draw_the_same(device):
    states = torch.zeros(192, 16, device=device)
    weight = torch.zeros(2048, 16, device=device)
    params = rows(192, device) | {"temperature": torch.ones(192, device=device)}
    tokens, _, _ = lm_head_sample(states, LMHead(weight), **params, tile=WIDE)
    again, _, _ = lm_head_sample(states, LMHead(weight), **params, tile=WIDE)
    assert torch.equal(tokens, again)
    for name in ("seed", "position"):
        moved, _, _ = lm_head_sample(states, LMHead(weight), **(params | {name: params[name] + 1}), tile=WIDE)
        assert (moved != tokens).float().mean() > 0.97


def distribution_problem(device, draws: int):
    logits = torch.randn(1500, generator=torch.Generator().manual_seed(6)) * 2.5
    weight = torch.zeros(1500, 16)
    weight[:, 0] = logits
    states = torch.zeros(draws, 16)
    states[:, 0] = 1.0
    return states.to(device), weight.to(device)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_draws_follow_the_softmax(device, temperature):
    """400,000 draws on a GPU, 90,000 interpreted; alpha 1e-6; power > 0.99 against a temperature 5 % off."""
    draws = 400_000 if CUDA else 90_000
    batch = 20_000 if CUDA else 9_000
    states, weight = distribution_problem(device, batch)
    tile = WIDE if CUDA else TileConfig(512, 2048, 16, 4, 1, tma=False, reduce_rows=512)
    observed = np.zeros(1500)
    for start in range(0, draws, batch):
        params = {
            "temperature": torch.full((batch,), temperature, device=device),
            "seed": torch.full((batch,), 99, device=device),
            "position": torch.arange(start, start + batch, device=device),
        }
        token, _, _ = lm_head_sample(states, LMHead(weight), **params, tile=tile)
        observed += np.bincount(token.cpu().numpy(), minlength=1500)
    logits = weight[:, 0].double().cpu()
    truth = torch.softmax(logits / temperature, 0).numpy()
    off = torch.softmax(logits / (temperature * 1.05), 0).numpy()
    assert power(draws, truth, off, alpha=1e-6) > 0.99
    assert g_test(observed, truth).p_value > 1e-6
    assert g_test(observed, off).p_value < 1e-6, "the test would not see a temperature that is 5 % off"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(2, 8)}, r"hidden is \(2, 8\).*expected \[B, 16\]"),
        ({"hidden": torch.zeros(2, 16, dtype=torch.float16)}, r"hidden is .*float16.*expected .*float32"),
        ({"temperature": torch.zeros(3)}, r"temperature is \(3,\).*expected contiguous \(2,\)"),
        ({"seed": torch.zeros(2, dtype=torch.int32)}, r"seed is .*int32.*expected .*int64"),
        ({"position": torch.zeros(2, 1, dtype=torch.int64)}, r"position is \(2, 1\)"),
        ({"workspace": 3}, r"workspace has 3 slots; expected at least"),
    ],
)
def test_bad_arguments_raise_a_value_error_that_names_them(device, change, message):
    states, head = torch.zeros(2, 16, device=device), LMHead(torch.zeros(4000, 16, device=device))
    arguments = {"hidden": states, "head": head, **rows(2, device), "tile": TILE}
    for name, value in change.items():
        arguments[name] = Workspace(value, device) if name == "workspace" else value.to(device)
    with pytest.raises(ValueError, match=message):
        lm_head_sample(**arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocab_size": 11}, "vocab_size is 11; expected 1 to the head's 10 rows"),
        ({"vocab_start": 8}, "vocab_start is 8; expected a multiple of 16"),
        ({"softcap": 0.0}, "softcap is 0.0; expected a positive number"),
        ({"logits_dtype": torch.int8}, "logits_dtype is torch.int8"),
        ({"weight": torch.zeros(10, 4, 2)}, r"weight is \(10, 4, 2\)"),
        ({"weight": torch.zeros(16, 10).T}, "strides"),
        ({"weight": torch.zeros(10, 4, dtype=torch.int8)}, "expected .* bfloat16, float16 or float32"),
    ],
)
def test_a_bad_head_raises_a_value_error_that_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        LMHead(**({"weight": torch.zeros(10, 4)} | options))


@pytest.mark.parametrize("field, value", [("block_v", 48), ("block_b", 8), ("stages", 0), ("num_warps", 3)])
def test_a_bad_tile_raises_a_value_error_that_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"TileConfig.{field} is {value}"):
        dataclasses.replace(TILE, **{field: value})


def test_no_rows_give_no_tokens(device):
    head = LMHead(torch.zeros(100, 16, device=device))
    token, score, logprob = lm_head_sample(torch.zeros(0, 16, device=device), head, **rows(0, device), tile=TILE)
    assert token.shape == score.shape == (0,)
    assert logprob is None


def test_several_parts_take_part_in_these_tests(device):
    """The shapes above exercise the reduction over parts and several blocks of rows, not just one program."""
    head = LMHead(torch.zeros(5003, 16, device=device))
    assert num_parts(head, 17, TILE) > 2
    assert os.environ.get("TRITON_INTERPRET") == "1" or CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("vocab", [127, 50257, 151936, 151937])
def test_a_hundred_thousand_rows_equal_the_reference(device, vocab, dtype):
    """16,384 rows per case, 8 cases: 131,072 rows."""
    hidden = 256
    head = LMHead(random_problem(1, vocab, hidden, dtype, device, seed=7)[1])
    for start in range(0, 16_384, 1024):
        states = random_problem(1024, 1, hidden, dtype, device, seed=100 + start)[0]
        assert_equal_to_reference(states, head, rows(1024, device, seed=start), WIDE, max_near_ties=0.08)


@pytest.mark.gpu
def test_a_captured_graph_replays_the_same_tokens_and_follows_its_inputs(device):
    states, weight = random_problem(17, 151936, 256, torch.bfloat16, device)
    head, params = LMHead(weight), rows(17, device)
    workspace = Workspace(num_parts(head, 17, TILE) * 17, device)
    eager, _, _ = lm_head_sample(states, head, **params, tile=TILE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, _, _ = lm_head_sample(states, head, **params, tile=TILE, workspace=workspace)
    for _ in range(3):
        graph.replay()
        assert torch.equal(token, eager)
    params["position"] += 1
    graph.replay()
    replayed = token.clone()
    assert torch.equal(replayed, lm_head_sample(states, head, **params, tile=TILE)[0])
    assert not torch.equal(replayed, eager)
