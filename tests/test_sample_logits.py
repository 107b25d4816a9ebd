"""The reader of logits against the float64 reference, and against the fused kernel on the same logits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import (
    CUDA,
    DTYPES,
    TILE,
    bitmask,
    integer_problem,
    is_cut,
    limit_all,
    limits,
    random_problem,
    reference,
    rows,
)
from sgl_flashsample.kernels.arguments import transform_arguments
from sgl_flashsample.kernels.features import Edit, LogitEdits
from sgl_flashsample.kernels.head import LMHead, LogitsSource, Workspace
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample
from sgl_flashsample.kernels.part import left_of
from sgl_flashsample.kernels.reference import edit_logits_ref, logits_ref
from sgl_flashsample.kernels.sample_logits import num_read_parts, read_slots, sample_logits
from sgl_flashsample.kernels.tiles import ReadConfig

from sgl_flashsample.tuned import READS, draw_for, draw_on

# Interpreted, a program costs milliseconds: few of them, but several parts, several tiles in some of them, and several
# blocks of rows.
READ = ReadConfig(1, 512, 1, stages=2) if CUDA else ReadConfig(16, 512, 4, ctas_per_sm=6, reduce_rows=64)
WIDE = ReadConfig(16, 128, 4, least_parts=128) if CUDA else ReadConfig(64, 2048, 4, ctas_per_sm=2, reduce_rows=64)


def normal(num_rows, width, dtype, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, width, generator=g) * 3).to(dtype).to(device)


def in_memory(logits: torch.Tensor, gap: int) -> torch.Tensor:
    """The same logits in rows that are ``gap`` elements apart, with what no reader may see between them."""
    num_rows, width = logits.shape
    held = torch.full((num_rows, width + gap), float("nan"), dtype=logits.dtype, device=logits.device)
    held[:, :width] = logits
    return held[:, :width]


def draw(logits, source, params, config=READ, truncation=None, **options):
    options = {"draw": draw_on(logits.device, source.vocab_size)} | options
    return sample_logits(logits, source, **params, config=config, truncation=truncation, return_logprob=True, **options)


def assert_drawn_from(logits, drawn, params, truncation=None, max_near_ties=0.0) -> None:
    """Every token and logprob is that of these exact ``[B, V]`` logits."""
    token, _, logprob = drawn
    want = reference(logits, params, truncation)
    sure = ~want.near_tie
    assert want.near_tie.double().mean().item() <= max_near_ties
    assert torch.equal(token[sure], want.token[sure])
    torch.testing.assert_close(logprob.double()[sure], want.logprob_low[sure], rtol=0, atol=1e-4)


RAGGED = [(1, 1), (3, 17), (17, 127), (3, 128), (65, 129), (1, 5003), (17, 5008)]
if CUDA:
    RAGGED += [(3, 50257), (65, 50257), (128, 151936), (65, 151937), (512, 151936)]


@pytest.mark.parametrize("num_rows, vocab", RAGGED)
@DTYPES
def test_tokens_and_logprobs_equal_the_reference_on_ragged_shapes(device, num_rows, vocab, dtype):
    logits = normal(num_rows, vocab, dtype, device)
    params = rows(num_rows, device)
    for gap, config in ((0, READ), (-vocab % 16 + 16, WIDE)):
        drawn = draw(in_memory(logits, gap), LogitsSource(vocab), params, config)
        assert_drawn_from(logits, drawn, params, max_near_ties=0.02)


@pytest.mark.parametrize("num_rows, vocab", RAGGED if CUDA else [(1, 1), (3, 17), (17, 129), (9, 1003)])
def test_truncated_rows_equal_the_reference_on_ragged_shapes(device, num_rows, vocab):
    for dtype, gap in (
        ((torch.bfloat16, 0), (torch.float32, 5))
        if CUDA
        else [((torch.bfloat16, torch.float32)[vocab % 2], vocab % 2 * 5)]
    ):
        logits, params = normal(num_rows, vocab, dtype, device), rows(num_rows, device, greedy_every=9)
        cut = limits(num_rows, vocab, device)
        drawn = draw(in_memory(logits, gap), LogitsSource(vocab), params, truncation=cut)
        assert_drawn_from(logits, drawn, params, cut, max_near_ties=0.05)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"logit_scale": 0.25},
        {"logit_scale": -3.0, "softcap": 20.0},
        {"rounding": torch.bfloat16},
        {"vocab_start": 1600},
    ],
    ids=lambda o: "+".join(o),
)
@pytest.mark.parametrize("vocab", [901, 912])
def test_scale_softcap_rounding_shard_offset_and_padding_are_those_of_the_fused_kernel(device, options, vocab):
    """A head of unit vectors hands its columns of logits to the fused kernel exactly."""
    logits = normal(16, 1000, torch.float32, device)
    params = rows(16, device)
    head_options = {"logits_dtype" if name == "rounding" else name: value for name, value in options.items()}
    head = LMHead(logits.T.contiguous(), vocab_size=vocab, **head_options)
    fused = lm_head_sample(torch.eye(16, device=device), head, **params, tile=TILE, return_logprob=True)
    drawn = draw(logits, LogitsSource(vocab, **options), params)
    assert head.source == LogitsSource(vocab, **({"rounding": torch.float32} | options))
    assert torch.equal(drawn[0], fused[0])
    torch.testing.assert_close(drawn[1], fused[1], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(drawn[2], fused[2], rtol=0, atol=1e-4)


ALL = Edit.ADDITIVE | Edit.SCALING | Edit.MASK | Edit.BIAS


def some_edits(num_rows, vocab, device, bool_mask, **options) -> tuple[LogitEdits, torch.Tensor]:
    g = torch.Generator().manual_seed(vocab)
    shape = (num_rows, vocab)
    allowed = torch.rand(shape, generator=g) < 0.6
    allowed[:, 0] = True
    mask = ~allowed if bool_mask else bitmask(allowed)
    tensors = {
        "additive": -torch.randint(0, 24, shape, generator=g) / 8,
        "scaling": torch.randint(8, 16, shape, generator=g) / 8,
        "mask": mask,
        "bias": torch.randint(-40, 40, shape, generator=g) / 8,
    }
    return LogitEdits(**{name: tensor.to(device) for name, tensor in tensors.items()}, **options), allowed.to(device)


def edited_ref(logits, edits: LogitEdits, allowed, flags) -> torch.Tensor:
    return torch.cat(
        [
            edit_logits_ref(
                logits[i : i + 1],
                additive=edits.additive[i : i + 1] if Edit.ADDITIVE in kind else None,
                scaling=edits.scaling[i : i + 1] if Edit.SCALING in kind else None,
                allowed=allowed[i : i + 1] if Edit.MASK in kind else None,
                bias=edits.bias[i : i + 1] if Edit.BIAS in kind else None,
                bias_before_mask=edits.bias_before_mask,
            )
            for i, kind in enumerate(map(Edit, flags))
        ]
    )


@pytest.mark.parametrize("num_rows, vocab", [(1, 1), (17, 129), (16, 1008)])
@pytest.mark.parametrize("bool_mask, bias_first", [(False, False), (True, True)], ids=["bits", "bools, bias first"])
@pytest.mark.parametrize("truncated", [False, True], ids=["plain", "truncated"])
def test_each_row_may_have_its_own_edits(device, num_rows, vocab, bool_mask, bias_first, truncated):
    logits = normal(num_rows, vocab, torch.bfloat16, device)
    params = rows(num_rows, device)
    flags = [15 - i % 16 for i in range(num_rows)]
    given = torch.tensor(flags, dtype=torch.int32, device=device)
    edits, allowed = some_edits(num_rows, vocab, device, bool_mask, rows=given, bias_before_mask=bias_first)
    cut = limits(num_rows, vocab, device) if truncated else None
    drawn = draw(logits, LogitsSource(vocab), params, truncation=cut, edits=edits)
    assert_drawn_from(edited_ref(logits, edits, allowed, flags), drawn, params, cut, max_near_ties=0.05)
    everywhere = dataclasses.replace(edits, rows=None)
    drawn = draw(logits, LogitsSource(vocab), params, WIDE, truncation=cut, edits=everywhere)
    assert_drawn_from(edited_ref(logits, edits, allowed, [15] * num_rows), drawn, params, cut, max_near_ties=0.05)


def test_equal_logits_give_the_tokens_of_the_fused_kernel_whatever_the_rows_ask_for(device):
    """Integer dot products: the GEMM of either is exact, and equal logits abound."""
    states, weight = integer_problem(16, 1000, 32, torch.bfloat16, device, seed=4)
    head, params = LMHead(weight, vocab_size=993), rows(16, device, greedy_every=9)
    logits = logits_ref(states, weight).to(torch.bfloat16)
    assert torch.equal(logits.double(), logits_ref(states, weight))
    edits, _ = some_edits(16, 993, device, bool_mask=False)
    cut, config = limits(16, 993, device), draw_for(head)
    for truncation in (None, cut):
        for edit in (None, edits):
            options = {"truncation": truncation, "edits": edit, "draw": config}
            fused, _, _ = lm_head_sample(states, head, **params, tile=TILE, **options)
            token, _, _ = sample_logits(logits, head.source, **params, config=READ, **options)
            assert torch.equal(token, fused)


def test_a_token_does_not_depend_on_the_batch_its_order_or_its_neighbours(device):
    logits, params = normal(33, 700, torch.float16, device), rows(33, device)
    source = LogitsSource(700)
    together = draw(logits, source, params, WIDE)[0]
    order = torch.randperm(33, generator=torch.Generator().manual_seed(5)).to(device)
    shuffled = draw(logits[order], source, {k: v[order] for k, v in params.items()}, WIDE)[0]
    assert torch.equal(together[order], shuffled)
    for row in (0, 32):
        alone = draw(logits[row : row + 1], source, {k: v[row : row + 1] for k, v in params.items()})[0]
        assert alone.item() == together[row].item()


def test_the_best_shard_holds_the_token_of_the_whole_vocabulary(device):
    logits, params = normal(33, 700, torch.float32, device), rows(33, device)
    whole, best, _ = draw(logits, LogitsSource(700), params)
    shards = [
        draw(logits[:, a:b], LogitsSource(b - a, vocab_start=a), params) for a, b in ((0, 208), (208, 512), (512, 700))
    ]
    score, token = (torch.stack([shard[i] for shard in shards]) for i in (1, 0))
    assert torch.equal(score.amax(0), best)
    assert torch.equal(token.gather(0, score.argmax(0, keepdim=True)).squeeze(0), whole)


def test_greedy_takes_the_first_of_equal_maxima(device):
    params = rows(3, device) | {"temperature": torch.zeros(3, device=device)}
    for first, others in ((0, [1, 3999]), (513, [600, 1025, 2049, 3590]), (3998, [3999])):
        logits = torch.zeros(3, 4000, device=device)
        logits[:, [first, *others]] = 16.0
        for config in (READ, WIDE):
            token, score, _ = draw(logits, LogitsSource(4000), params, config)
            assert token.tolist() == [first] * 3
            assert score.tolist() == [16.0] * 3


@pytest.mark.parametrize("truncated", [False, True], ids=["plain", "truncated"])
def test_nan_is_never_drawn_infinity_wins_and_a_row_of_neither_gives_the_first_id(device, truncated):
    logits = normal(16, 1003, torch.bfloat16, device)
    logits[:, 10:40] = float("nan")
    logits[:, 1001:] = float("nan")
    logits[1, 700], logits[2] = float("inf"), float("nan")
    logits[3], logits[3, 500] = float("-inf"), -2.0
    params = rows(16, device) | {"temperature": torch.ones(16, device=device)}
    cut = limit_all(16, device, 900, 0.95) if truncated else None
    token, _, _ = draw(logits, LogitsSource(1003), params, truncation=cut)
    assert token[[1, 2, 3]].tolist() == [700, 0, 500]
    assert not logits[torch.arange(16, device=device), token][[0, *range(3, 16)]].isnan().any()
    others = [0, *range(4, 16)]
    clean = logits.double().nan_to_num(nan=float("-inf"))[others]
    params = {name: value[others] for name, value in params.items()}
    want = reference(clean, params, limit_all(13, device, 900, 0.95) if truncated else None)
    assert torch.equal(token[others][~want.near_tie], want.token[~want.near_tie])


def test_the_logits_are_not_changed(device):
    logits = in_memory(normal(17, 901, torch.bfloat16, device), 11)
    before = logits.clone()
    edits, _ = some_edits(17, 901, device, bool_mask=True)
    draw(logits, LogitsSource(901, softcap=3.0), rows(17, device), truncation=limits(17, 901, device), edits=edits)
    assert torch.equal(logits, before)


def test_a_workspace_of_read_slots_serves_every_batch_up_to_its_size(device):
    workspace = Workspace(read_slots(1000, 40, READ, device), device)
    for num_rows in (1, 17, 40):
        params = rows(num_rows, device)
        logits = normal(num_rows, 1000, torch.float32, device)
        drawn = draw(logits, LogitsSource(1000), params, workspace=workspace)
        assert_drawn_from(logits, drawn, params, max_near_ties=0.02)


def test_a_part_leaves_the_score_of_its_second_best_group_also_where_a_later_tile_took_the_slot(device):
    """One part of many tiles of two slots, each of which leaves its two best; without the best group of all, the
    second is the best."""
    config = ReadConfig(16, 32, 4, least_parts=1, ctas_per_sm=1)
    num_rows = 4096 if CUDA else 16  # so many that no program is left to share a row
    assert num_read_parts(320, num_rows, config, device) == 1
    logits, params = normal(num_rows, 320, torch.float32, device), rows(num_rows, device)
    workspace, cut = Workspace(num_rows, device), limit_all(num_rows, device)
    token, _, _ = draw(logits, LogitsSource(320), params, config, cut, workspace=workspace)
    left = left_of(True, config.block_v, 1)
    assert left == 2
    best = torch.cat([workspace.score[: left * num_rows], workspace.second[: left * num_rows]])
    second = best.view(2 * left, num_rows).topk(2, dim=0).values[1]
    in_best = torch.arange(320, device=device)[None] // 16 == token[:, None] // 16
    _, score, _ = draw(logits.masked_fill(in_best, float("-inf")), LogitsSource(320), params, config)
    torch.testing.assert_close(second, score, rtol=0, atol=0)


def test_several_parts_and_blocks_of_rows_take_part_in_these_tests(device):
    assert num_read_parts(5003, 17, READ, device) > 2
    assert num_read_parts(5003, 17, ReadConfig(16, 32, 4, least_parts=100), device) >= 100
    assert is_cut(rows(17, device), limits(17, 127, device), 127).sum() > 5


def test_no_rows_give_no_tokens(device):
    token, score, logprob = draw(torch.zeros(0, 100, device=device), LogitsSource(100), rows(0, device))
    assert token.shape == score.shape == logprob.shape == (0,)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": torch.zeros(2, 99)}, r"logits is \(2, 99\).*expected \[B, 100 or more\]"),
        ({"logits": torch.zeros(2, 100, dtype=torch.float64)}, r"logits is .*float64.*bfloat16, float16 or float32"),
        ({"logits": torch.zeros(200)}, r"logits is \(200,\)"),
        ({"logits": torch.zeros(100, 2).T}, r"logits has strides \(1, 2\); expected rows that are contiguous"),
        ({"temperature": torch.zeros(3)}, r"temperature is \(3,\).*expected contiguous \(2,\)"),
        ({"seed": torch.zeros(2, dtype=torch.int32)}, r"seed is .*int32.*expected .*int64"),
        ({"position": torch.zeros(2, 1, dtype=torch.int64)}, r"position is \(2, 1\)"),
        ({"workspace": 1}, r"workspace has 1 slots; expected at least"),
        ({"truncation": 3}, r"top_k is \(3,\)"),
        ({"edits": torch.zeros(2, 99)}, r"bias is \(2, 99\)"),
        ({"truncation": 2, "source": LogitsSource(84, vocab_start=16)}, "vocab_start is 16; expected 0"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments_raise_a_value_error_that_names_them(device, change, message):
    made = {
        "workspace": lambda slots: Workspace(slots, device),
        "truncation": lambda num_rows: limit_all(num_rows, device),
        "edits": lambda bias: LogitEdits(bias=bias.to(device)),
        "source": lambda source: source,
    }
    arguments = {"logits": torch.zeros(2, 100, device=device), "source": LogitsSource(100), "config": READ}
    arguments |= rows(2, device)
    arguments |= {n: made[n](value) if n in made else value.to(device) for n, value in change.items()}
    with pytest.raises(ValueError, match=message):
        sample_logits(**arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_start": 8}, "vocab_start is 8; expected a multiple of 16"),
        ({"vocab_size": 2**31}, "ids reach 2147483648"),
        ({"softcap": -1.0}, "softcap is -1.0; expected a positive number"),
        ({"rounding": torch.int8}, "rounding is torch.int8"),
    ],
)
def test_a_bad_source_raises_a_value_error_that_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        LogitsSource(**({"vocab_size": 10} | options))


@pytest.mark.parametrize(
    "field, value", [("block_v", 48), ("block_b", 3), ("stages", 0), ("num_warps", 3), ("least_parts", 513)]
)
def test_a_bad_config_raises_a_value_error_that_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"ReadConfig.{field} is {value}"):
        dataclasses.replace(READ, **{field: value})


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"vocab_size": 1001},
        {"softcap": 2.0},
        {"logit_scale": -1.5},
        {"vocab_start": 320},
        {"rounding": torch.float16, "logit_scale": 0.5, "softcap": 3.0},
    ],
    ids="+".join,
)
def test_rows_known_to_be_greedy_are_drawn_without_noise_to_the_same_tokens(device, source):
    logits = (torch.randint(-9, 10, (17, 1008), generator=torch.Generator().manual_seed(9)) / 4).float().to(device)
    logits[3, 77], logits[4, 500], logits[5, :] = float("nan"), float("inf"), float("nan")
    logits[6, 990] = logits[6, 12] = 7.0
    logits[7, :] = float("-inf")
    params = rows(17, device) | {"temperature": torch.zeros(17, device=device)}
    config = dataclasses.replace(READ, reduce_rows=1, one_launch=True)
    source = LogitsSource(**({"vocab_size": 1008} | source))
    drawn = sample_logits(logits, source, **params, config=READ)
    known = sample_logits(logits, source, **params, config=config, all_greedy=True)
    assert torch.equal(drawn.token, known.token)
    assert torch.equal(drawn.score, known.score)
    want = drawn.token.new_tensor([source.vocab_start, source.vocab_start])
    assert torch.equal(known.token[[5, 7]], want), "rows without a token"


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [50257, 151936, 151937])
@DTYPES
def test_every_shipped_config_equals_the_reference_at_real_shapes(device, vocab, dtype):
    logits = normal(24, vocab, dtype, device)
    params, cut = rows(24, device), limits(24, vocab, device)
    for entries in READS.values():
        for _, config in entries:
            assert_drawn_from(logits, draw(logits, LogitsSource(vocab), params, config), params, None, 0.05)
            drawn = draw(logits, LogitsSource(vocab), params, config, cut)
            assert_drawn_from(logits, drawn, params, cut, 0.1)


@pytest.mark.gpu
def test_a_captured_graph_replays_the_same_tokens_and_follows_its_inputs(device):
    logits, params = normal(129, 151936, torch.bfloat16, device), rows(129, device)
    workspace = Workspace(read_slots(151936, 129, READ, device), device)
    eager = sample_logits(logits, LogitsSource(151936), **params, config=READ, workspace=workspace)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token, _, _ = sample_logits(logits, LogitsSource(151936), **params, config=READ, workspace=workspace)
    for _ in range(3):
        graph.replay()
        assert torch.equal(token, eager)
    params["position"] += 1
    graph.replay()
    assert not torch.equal(token, eager)


@pytest.mark.gpu
def test_logits_of_a_real_head_give_the_fused_tokens_up_to_the_order_of_its_sums(device):
    """The GEMMs round differently: rows whose own logits agree must draw the same."""
    states, weight = random_problem(128, 151936, 1024, torch.float16, device)
    head, params = LMHead(weight), rows(128, device)
    fused = lm_head_sample(states, head, **params, tile=TILE)[0]
    drawn = draw(torch.mm(states, weight.T), head.source, params)[0]
    assert (fused == drawn).double().mean() > 0.85


def test_a_scale_that_is_an_integer_is_a_float_to_the_kernels_of_every_head():
    """Equal keys share an entry, which has the type of the first one: that decides how a kernel is compiled."""
    transform_arguments(7, 11, torch.bfloat16)
    numbers = transform_arguments(7.0, 11.0, torch.bfloat16).numbers
    assert numbers == (7.0, 11.0) and all(isinstance(number, float) for number in numbers)
