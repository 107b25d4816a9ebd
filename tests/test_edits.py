"""Penalties, grammar masks and bias inside the fused pass: SGLang's arithmetic in SGLang's order, row by row."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import (
    CUDA,
    DTYPES,
    TILE,
    WIDE,
    bitmask,
    draw,
    integer_problem,
    is_cut,
    limit_all,
    limits,
    random_problem,
    reference,
    rows,
)
from sgl_flashsample.kernels.features import Edit, LogitEdits
from sgl_flashsample.kernels.head import LMHead
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample
from sgl_flashsample.kernels.reference import edit_logits_ref, logits_ref
from sgl_flashsample.kernels.rng import GROUP_SIZE

NAMES = {Edit.ADDITIVE: "additive", Edit.SCALING: "scaling", Edit.MASK: "mask", Edit.BIAS: "bias"}
ALL = Edit.ADDITIVE | Edit.SCALING | Edit.MASK | Edit.BIAS


@dataclasses.dataclass(frozen=True)
class Problem:
    """Edits of ``num_rows`` rows, in eighths, so that only a scaling rounds. allowed: what ``mask`` says."""

    additive: torch.Tensor
    scaling: torch.Tensor
    allowed: torch.Tensor
    bias: torch.Tensor

    def edits(self, kinds: Edit = ALL, bool_mask: bool = False, **options) -> LogitEdits:
        mask = ~self.allowed if bool_mask else bitmask(self.allowed)
        tensors = {"additive": self.additive, "scaling": self.scaling, "mask": mask, "bias": self.bias}
        return LogitEdits(**{NAMES[kind]: tensors[NAMES[kind]] for kind in kinds}, **options)

    def edited(self, logits: torch.Tensor, kinds: Edit | list[Edit] = ALL, bias_before_mask: bool = False):
        """The reference's ``[B, V]`` float32 logits; kinds: of all rows, or of each."""
        per_row = [kinds] * len(logits) if isinstance(kinds, Edit) else kinds
        return torch.cat(
            [
                edit_logits_ref(
                    logits[i : i + 1],
                    additive=self.additive[i : i + 1] if Edit.ADDITIVE in kind else None,
                    scaling=self.scaling[i : i + 1] if Edit.SCALING in kind else None,
                    allowed=self.allowed[i : i + 1] if Edit.MASK in kind else None,
                    bias=self.bias[i : i + 1] if Edit.BIAS in kind else None,
                    bias_before_mask=bias_before_mask,
                )
                for i, kind in enumerate(per_row)
            ]
        )


def problem(num_rows: int, vocab: int, device: torch.device, seed: int = 0) -> Problem:
    g = torch.Generator().manual_seed(seed)
    shape = (num_rows, vocab)
    few = torch.rand(shape, generator=g) < 0.3
    additive = torch.where(few, -torch.randint(0, 24, shape, generator=g) / 8, 0.0)
    additive[torch.rand(shape, generator=g) < 0.05] = float("-inf")
    scaling = torch.where(torch.rand(shape, generator=g) < 0.3, torch.randint(9, 16, shape, generator=g) / 8, 1.0)
    bias = torch.where(torch.rand(shape, generator=g) < 0.2, torch.randint(-40, 40, shape, generator=g) / 8, 0.0)
    allowed = torch.rand(shape, generator=g) < 0.6
    allowed[:, torch.randint(0, vocab, (1,), generator=g)] = True
    return Problem(*(tensor.to(device) for tensor in (additive, scaling, allowed, bias)))


def assert_drawn_from(logits, token, logprob, params, max_near_ties: float = 0.1) -> None:
    """Every token and logprob is that of these exact ``[B, V]`` logits."""
    want = reference(logits, params)
    something = (logits > float("-inf")).any(1)
    assert (token[~something] == 0).all()
    sure = ~want.near_tie & something
    assert torch.equal(token[sure], want.token[sure])
    assert (want.near_tie & something).double().mean().item() <= max_near_ties
    same = sure & (token == want.token)
    torch.testing.assert_close(logprob.double()[same], want.logprob_low[same], rtol=0, atol=1e-4)


def sample(states, weight, params, edits, tile=TILE, **options):
    head = weight if isinstance(weight, LMHead) else LMHead(weight, **options)
    token, _, logprob = lm_head_sample(states, head, **params, tile=tile, edits=edits, return_logprob=True)
    return token, logprob


RAGGED = [(17, 1), (1, 127), (3, 127), (17, 129), (65, 129), (1, 5003), (17, 5003)]
if CUDA:
    RAGGED += [(65, 5003), (3, 50257), (65, 50257), (17, 151936), (65, 151937)]
BIAS_FIRST = pytest.mark.parametrize("bias_first", [False, True], ids=["mask then bias", "bias then mask"])
BOOL_MASK = pytest.mark.parametrize("bool_mask", [False, True], ids=["bitmask", "bool mask"])


@pytest.mark.parametrize("num_rows, vocab", RAGGED)
@DTYPES
def test_all_edits_together_equal_the_reference_on_ragged_shapes(device, num_rows, vocab, dtype):
    states, weight = integer_problem(num_rows, vocab, 64, dtype, device, seed=vocab)
    params, edits = rows(num_rows, device), problem(num_rows, vocab, device)
    for bias_first in (False, True):
        drawn = sample(states, weight, params, edits.edits(bias_before_mask=bias_first))
        edited = edits.edited(logits_ref(states, weight), bias_before_mask=bias_first)
        assert_drawn_from(edited, *drawn, params, 0.35 if num_rows < 9 else 0.1)


@pytest.mark.parametrize("kinds", [Edit(flags) for flags in range(1, 16)], ids=lambda kinds: kinds.name)
@BOOL_MASK
@BIAS_FIRST
def test_each_combination_of_edits_equals_the_reference(device, kinds, bool_mask, bias_first):
    states, weight = integer_problem(17, 300, 64, torch.float16, device)
    params, edits = rows(17, device), problem(17, 300, device, seed=int(kinds))
    drawn = sample(states, weight, params, edits.edits(kinds, bool_mask, bias_before_mask=bias_first))
    assert_drawn_from(edits.edited(logits_ref(states, weight), kinds, bias_first), *drawn, params)


def test_each_row_may_have_its_own_combination(device):
    states, weight = integer_problem(33, 700, 64, torch.float32, device)
    params, edits = rows(33, device), problem(33, 700, device)
    flags = torch.arange(33, dtype=torch.int32, device=device) % 16
    for bool_mask in (False, True):
        drawn = sample(states, weight, params, edits.edits(bool_mask=bool_mask, rows=flags))
        edited = edits.edited(logits_ref(states, weight), [Edit(flag) for flag in flags.tolist()])
        assert_drawn_from(edited, *drawn, params)


def test_a_flag_of_an_edit_that_is_not_given_means_nothing(device):
    states, weight = integer_problem(16, 300, 64, torch.float32, device)
    params, edits = rows(16, device), problem(16, 300, device)
    flags = torch.full((16,), int(ALL), dtype=torch.int32, device=device)
    for kind in Edit:
        drawn = sample(states, weight, params, edits.edits(kind, rows=flags))
        assert_drawn_from(edits.edited(logits_ref(states, weight), kind), *drawn, params)


@BOOL_MASK
@BIAS_FIRST
def test_a_row_without_a_flag_is_as_if_unedited_whatever_its_tensors_hold(device, bool_mask, bias_first):
    states, weight = random_problem(17, 300, 64, torch.bfloat16, device)
    params, head = rows(17, device), LMHead(weight)
    plain = lm_head_sample(states, head, **params, tile=TILE, return_logprob=True)
    nothing = torch.full((17, 300), float("nan"), device=device)
    mask = torch.ones_like(nothing, dtype=torch.bool) if bool_mask else bitmask(torch.zeros_like(nothing).bool())
    edited = torch.arange(17, device=device) == 4
    garbage = LogitEdits(nothing, nothing, mask, nothing, bias_first, torch.where(edited, 15, 0).int())
    drawn = lm_head_sample(states, head, **params, tile=TILE, edits=garbage, return_logprob=True)
    assert torch.equal(drawn[0][~edited], plain[0][~edited])
    for one, other in zip(plain[1:], drawn[1:], strict=True):  # another binary: rounded otherwise
        torch.testing.assert_close(one[~edited], other[~edited], rtol=1e-6, atol=1e-5)
    assert drawn[0][4].item() == 0, "a row of nothing gives the first id"


@pytest.mark.parametrize("words", [0, 1, 3, 9, 10])
def test_ids_beyond_a_short_bitmask_are_allowed(device, words):
    states, weight = integer_problem(24, 300, 64, torch.float32, device)
    params, edits = rows(24, device), problem(24, 300, device)
    allowed = edits.allowed.clone()
    allowed[:, 32 * words :] = True
    short = dataclasses.replace(edits.edits(Edit.MASK), mask=bitmask(edits.allowed)[:, :words])
    drawn = sample(states, weight, params, short)
    assert_drawn_from(
        dataclasses.replace(edits, allowed=allowed).edited(logits_ref(states, weight), Edit.MASK), *drawn, params
    )


def test_every_bit_of_a_word_is_one_token(device):
    """Thirty-two rows, in each of which the grammar leaves one id of the second word."""
    weight = torch.zeros(64, 16, device=device)
    allowed = torch.zeros(32, 64, dtype=torch.bool, device=device)
    allowed[torch.arange(32), 32 + torch.arange(32)] = True
    token, logprob = sample(
        torch.zeros(32, 16, device=device), weight, rows(32, device), LogitEdits(mask=bitmask(allowed))
    )
    assert token.tolist() == list(range(32, 64))
    torch.testing.assert_close(logprob, torch.zeros_like(logprob), rtol=0, atol=1e-6)


def test_a_true_of_a_bool_mask_forbids(device):
    weight = torch.zeros(64, 16, device=device)
    forbidden = torch.ones(8, 70, dtype=torch.bool, device=device)  # columns beyond the vocabulary are not read
    forbidden[:, 33] = False
    forbidden[:, 64:] = False
    token, _ = sample(torch.zeros(8, 16, device=device), weight, rows(8, device), LogitEdits(mask=forbidden))
    assert token.tolist() == [33] * 8


def test_minus_infinity_in_additive_forbids_a_token(device):
    """min_new_tokens: the end of the sequence would win, and may not yet come."""
    weight = torch.zeros(300, 16, device=device)
    weight[7] = 5.0
    states, params = torch.ones(16, 16, device=device), rows(16, device)
    additive = torch.zeros(16, 300, device=device)
    assert sample(states, weight, params, LogitEdits(additive=additive))[0].tolist() == [7] * 16
    additive[:, 7] = float("-inf")
    token, logprob = sample(states, weight, params, LogitEdits(additive=additive))
    assert (token != 7).all()
    torch.testing.assert_close(
        logprob, torch.full_like(logprob, -(torch.tensor(299.0).log().item())), atol=1e-4, rtol=0
    )


@BOOL_MASK
def test_a_bias_cannot_revive_a_masked_token_in_either_order(device, bool_mask):
    states, weight = torch.ones(8, 16, device=device), torch.zeros(100, 16, device=device)
    allowed = torch.ones(8, 100, dtype=torch.bool, device=device)
    allowed[:, 40] = False
    bias = torch.zeros(8, 100, device=device)
    bias[:, 40] = 1e30
    mask = ~allowed if bool_mask else bitmask(allowed)
    for bias_first in (False, True):
        edits = LogitEdits(mask=mask, bias=bias, bias_before_mask=bias_first)
        assert (sample(states, weight, rows(8, device), edits)[0] != 40).all()
    assert sample(states, weight, rows(8, device), LogitEdits(bias=bias))[0].tolist() == [40] * 8


def test_an_infinite_bias_wins_unless_its_token_is_masked(device):
    """Added to a masked logit it makes a NaN, which is not drawn."""
    states, weight = torch.ones(8, 16, device=device), torch.zeros(100, 16, device=device)
    bias = torch.zeros(8, 100, device=device)
    bias[:, 40] = float("inf")
    bias[:, 41] = float("-inf")
    token, _ = sample(states, weight, rows(8, device), LogitEdits(bias=bias))
    assert token.tolist() == [40] * 8
    allowed = torch.ones(8, 100, dtype=torch.bool, device=device)
    allowed[:, 40] = False
    for bias_first in (False, True):
        edits = LogitEdits(mask=bitmask(allowed), bias=bias, bias_before_mask=bias_first)
        token, _ = sample(states, weight, rows(8, device), edits)
        assert ((token != 40) & (token != 41)).all()


def test_a_nan_among_the_edits_forbids_its_token(device):
    states, weight = torch.ones(16, 16, device=device), torch.zeros(64, 16, device=device)
    values = torch.full((16, 64), float("nan"), device=device)
    values[:, 20:23] = 1.0
    for name in ("additive", "scaling", "bias"):
        token, _ = sample(states, weight, rows(16, device), LogitEdits(**{name: values}))
        assert ((token >= 20) & (token < 23)).all()


def test_a_penalty_scales_a_negative_logit_up_and_a_positive_one_down(device):
    weight = torch.zeros(32, 16, device=device)
    weight[:, 0] = torch.tensor([-3.0, 3.0] * 16)
    states = torch.zeros(1, 16, device=device)
    states[:, 0] = 1.0
    params = rows(1, device) | {"temperature": torch.ones(1, device=device)}
    scaling = torch.full((1, 32), 1.7, device=device)
    kept = draw(states, LMHead(weight), params, limit_all(1, device, 3), edits=LogitEdits(scaling=scaling)).kept
    assert torch.equal(kept[0, :2].cpu(), torch.tensor([-3.0 * torch.tensor(1.7), torch.tensor(3.0) / 1.7]))


def test_greedy_takes_the_first_of_equal_maxima_after_the_edits(device):
    states, weight = torch.ones(3, 16, device=device), torch.zeros(4000, 16, device=device)
    params = rows(3, device) | {"temperature": torch.zeros(3, device=device)}
    for first, others in ((0, [1, 3999]), (15, [16]), (513, [600, 1025, 2049]), (3998, [3999])):
        bias = torch.zeros(3, 4000, device=device)
        bias[:, [first, *others]] = 1.25
        for tile in (TILE, WIDE):
            token, score, _ = lm_head_sample(states, LMHead(weight), **params, tile=tile, edits=LogitEdits(bias=bias))
            assert token.tolist() == [first] * 3
            assert score.tolist() == [1.25] * 3


@pytest.mark.parametrize("vocab", [127, 5003])
def test_greedy_tokens_are_exactly_those_of_the_edited_logits(device, vocab):
    states, weight = integer_problem(40, vocab, 64, torch.bfloat16, device)
    params, edits = rows(40, device) | {"temperature": torch.zeros(40, device=device)}, problem(40, vocab, device)
    token, _ = sample(states, weight, params, edits.edits())
    assert torch.equal(token, edits.edited(logits_ref(states, weight)).argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@BIAS_FIRST
def test_together_with_a_truncation_the_edited_logits_are_kept_exactly_and_drawn_from(device, dtype, bias_first):
    states, weight = integer_problem(17, 300, 64, dtype, device)
    params, edits, truncation = rows(17, device), problem(17, 300, device), limits(17, 300, device, first=3)
    flags = (torch.arange(17, dtype=torch.int32, device=device) * 7) % 16
    drawn = draw(
        states,
        LMHead(weight),
        params,
        truncation,
        edits=edits.edits(rows=flags, bias_before_mask=bias_first),
    )
    edited = edits.edited(logits_ref(states, weight), [Edit(flag) for flag in flags.tolist()], bias_first)
    cut = is_cut(params, truncation, 300)
    assert cut.sum() > 8
    assert drawn.kept.dtype is torch.float32
    assert torch.equal(drawn.kept[cut], edited[cut])
    want = reference(edited, params, truncation)
    sure = ~want.near_tie
    assert sure.double().mean() > 0.8
    assert torch.equal(drawn.token[sure], want.token[sure])
    torch.testing.assert_close(drawn.logprob.double()[sure], want.logprob_low[sure], rtol=0, atol=1e-4)


def test_a_grammar_that_leaves_one_token_is_drawn_through_any_truncation(device):
    states, weight = random_problem(16, 300, 64, torch.float32, device)
    only = torch.arange(16, device=device) * 17 + 3
    allowed = torch.zeros(16, 300, dtype=torch.bool, device=device).scatter(1, only[:, None], True)
    drawn = draw(
        states, LMHead(weight), rows(16, device), limits(16, 300, device), edits=LogitEdits(mask=bitmask(allowed))
    )
    assert torch.equal(drawn.token, only)


def test_edits_follow_scale_softcap_and_rounding(device):
    states, weight = integer_problem(12, 300, 64, torch.bfloat16, device)
    params, edits = rows(12, device), problem(12, 300, device)
    for options in ({"logit_scale": 0.3}, {"softcap": 5.0}, {"logit_scale": 3.0, "softcap": 20.0}):
        drawn = sample(states, weight, params, edits.edits(), **options)
        edited = edits.edited(logits_ref(states, weight, **options))
        want = reference(edited, params)
        assert (drawn[0] == want.token).double().mean() > 0.9
        same = drawn[0] == want.token
        torch.testing.assert_close(drawn[1].double()[same], want.logprob_low[same], rtol=0, atol=1e-4)


def test_edits_may_be_views_of_wider_tensors(device):
    states, weight = integer_problem(17, 300, 64, torch.float32, device)
    params, edits = rows(17, device), problem(17, 300, device)

    def view(tensor: torch.Tensor, garbage) -> torch.Tensor:
        wide = torch.full((17, tensor.shape[1] + 45), garbage, dtype=tensor.dtype, device=device)
        wide[:, 2 : 2 + tensor.shape[1]] = tensor
        return wide[:, 2 : 2 + tensor.shape[1]]

    for bool_mask in (False, True):
        given = edits.edits(bool_mask=bool_mask)
        wide = LogitEdits(
            view(given.additive, 9.0), view(given.scaling, 0.1), view(given.mask, True), view(given.bias, 9.0)
        )
        assert not wide.bias.is_contiguous()
        for one, other in zip(sample(states, weight, params, given), sample(states, weight, params, wide), strict=True):
            assert torch.equal(one, other)


def test_one_row_of_edits_may_serve_the_whole_batch(device):
    """Rows that overlap: a stride of 0."""
    states, weight = integer_problem(17, 300, 64, torch.float32, device)
    params, edits = rows(17, device), problem(1, 300, device)
    bias = edits.bias.expand(17, 300)
    assert_drawn_from(
        edit_logits_ref(logits_ref(states, weight), bias=bias),
        *sample(states, weight, params, LogitEdits(bias=bias)),
        params,
    )


def test_a_token_does_not_depend_on_the_tile_or_the_neighbours_edits(device):
    states, weight = integer_problem(33, 1500, 64, torch.float16, device)
    params, edits = rows(33, device), problem(33, 1500, device)
    together, _ = sample(states, weight, params, edits.edits())
    assert torch.equal(together, sample(states, weight, params, edits.edits(), tile=WIDE)[0])
    for row in (0, 7, 32):
        own = {name: value[row : row + 1].clone() for name, value in params.items()}
        alone = Problem(*(getattr(edits, f.name)[row : row + 1] for f in dataclasses.fields(edits)))
        assert sample(states[row : row + 1], weight, own, alone.edits())[0].item() == together[row].item()
    flags = torch.where(torch.arange(33, device=device) == 7, 15, 0).int()
    assert sample(states, weight, params, edits.edits(rows=flags))[0][7].item() == together[7].item()


@BOOL_MASK
def test_shards_read_the_columns_of_their_own_ids(device, bool_mask):
    states, weight = integer_problem(17, 1500, 64, torch.float16, device)
    params, edits = rows(17, device), problem(17, 1500, device).edits(bool_mask=bool_mask)
    whole, _ = sample(states, weight, params, edits)
    cuts = [(0, 31 * GROUP_SIZE), (31 * GROUP_SIZE, 1500)]
    shards = [
        lm_head_sample(states, LMHead(weight[a:b], vocab_start=a), **params, tile=TILE, edits=edits) for a, b in cuts
    ]
    score, token = torch.stack([s[1] for s in shards]), torch.stack([s[0] for s in shards])
    assert torch.equal(token.gather(0, score.argmax(0, keepdim=True)).squeeze(0), whole)


def test_a_call_without_logprobs_draws_the_same_tokens(device):
    states, weight = integer_problem(17, 300, 64, torch.float32, device)
    params, edits = rows(17, device), problem(17, 300, device).edits()
    token, _, logprob = lm_head_sample(states, LMHead(weight), **params, tile=TILE, edits=edits)
    assert logprob is None
    assert torch.equal(token, sample(states, weight, params, edits)[0])


def test_no_edits_at_all_are_an_unedited_batch(device):
    states, weight = integer_problem(9, 300, 64, torch.float32, device)
    params = rows(9, device)
    assert LogitEdits().kinds == Edit(0)
    plain = lm_head_sample(states, LMHead(weight), **params, tile=TILE)[0]
    assert torch.equal(sample(states, weight, params, LogitEdits())[0], plain)


def test_the_kinds_of_edits_are_those_that_are_given(device):
    tensor, word = torch.zeros(1, 32, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    assert LogitEdits(additive=tensor, bias=tensor).kinds == Edit.ADDITIVE | Edit.BIAS
    assert LogitEdits(scaling=tensor, mask=word).kinds == Edit.SCALING | Edit.MASK
    assert not LogitEdits(mask=word).mask_is_bool
    assert LogitEdits(mask=word.bool()).mask_is_bool


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("additive", torch.zeros(2, 399), r"additive is \(2, 399\) .*expected contiguous \(2, 400\) torch.float32"),
        ("scaling", torch.zeros(3, 400), r"scaling is \(3, 400\) .*expected contiguous \(2, 400\)"),
        ("bias", torch.zeros(2, 400, dtype=torch.float16), r"bias is \(2, 400\) torch.float16.*expected .*float32"),
        ("bias", torch.zeros(400, 2).T, r"bias is .*strides \(1, 2\); expected contiguous"),
        ("mask", torch.zeros(2, 399, dtype=torch.bool), r"mask is \(2, 399\) torch.bool.*expected .*\(2, 400\)"),
        ("mask", torch.zeros(2, 13, dtype=torch.int64), r"mask is \(2, 13\) torch.int64.*expected .*int32"),
        ("mask", torch.zeros(1, 13, dtype=torch.int32), r"mask is \(1, 13\) .*expected contiguous \(2, 13\)"),
        ("rows", torch.zeros(2, dtype=torch.int64), r"rows is \(2,\) torch.int64.*expected contiguous \(2,\).*int32"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_bad_edit_raises_a_value_error_that_names_it(device, name, value, message):
    states, head = torch.zeros(2, 16, device=device), LMHead(torch.zeros(400, 16, device=device))
    value = value.T.to(device).T if value.dim() == 2 else value.to(device)
    if name != "bias" or value.dtype is not torch.float32:
        value = value.contiguous()
    with pytest.raises(ValueError, match=message):
        lm_head_sample(states, head, **rows(2, device), tile=TILE, edits=LogitEdits(**{name: value}))


def test_edits_of_a_shard_need_the_columns_of_the_ids_before_it(device):
    states, head = torch.zeros(2, 16, device=device), LMHead(torch.zeros(400, 16, device=device), vocab_start=160)
    with pytest.raises(ValueError, match=r"bias is \(2, 400\).*expected contiguous \(2, 560\)"):
        lm_head_sample(
            states, head, **rows(2, device), tile=TILE, edits=LogitEdits(bias=torch.zeros(2, 400, device=device))
        )
