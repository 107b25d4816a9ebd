"""Logprobs of given ids, from logits and from the head: the reference's, and the same number on both ways."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import CUDA, DTYPES, READ, TILE, Mix, make_case, random_rows, rounding_case

from sgl_flashsample.kernels.gather_logprobs import gather_logprobs, head_logprobs
from sgl_flashsample.kernels.lm_head_sample import lm_head_sample
from sgl_flashsample.kernels.logit_summary import LOWEST_LOGPROB, LogitRows, RowSummary, summarize_logits
from sgl_flashsample.kernels.params import BatchParams, LMHead, LogitEdits, LogitsSpec
from sgl_flashsample.kernels.reference import gather_logprobs_ref, log_softmax_ref
from sgl_flashsample.kernels.sample_logits import sample_logits
from sgl_flashsample.kernels.top_logprobs import top_logprobs
from sgl_flashsample.kernels.workspace import SUMMARY_IDS


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within a few roundings of float32; NaN where NaN is expected."""
    difference = (got.double() - want).abs()
    return bool(((difference <= 2e-5 + 4e-7 * want.abs()) | (got.isnan() & want.isnan())).all())


def some_ids(num_rows: int, num_ids: int, vocab: int, device, start: int = 0) -> torch.Tensor:
    """Ids of the vocabulary, many of them twice; ids around it; and -1, which stands for none."""
    generator = torch.Generator().manual_seed(num_rows + num_ids)
    outside = torch.tensor([-1, start - 1, start + vocab, 2**31, 2**32 + start, -(2**62)])
    ids = start + torch.randint(vocab, (num_rows, num_ids), generator=generator)
    other = outside[torch.randint(len(outside), ids.shape, generator=generator)]
    return torch.where(torch.rand(ids.shape, generator=generator) < 0.2, other, ids).to(device)


def log_mass_ref(logits: torch.Tensor, temperature: torch.Tensor | None = None) -> torch.Tensor:
    """``[B, 2]`` float32, the log-mass in two parts."""
    t = 1.0 if temperature is None else torch.where(temperature <= 0, 1.0, temperature.double())[:, None]
    mass = torch.logsumexp(logits.double() / t, 1)
    return torch.stack([mass.float(), (mass - mass.float().double()).float()], 1)


@pytest.mark.parametrize("shared", [False, True], ids=["ids of each row", "ids of all rows"])
@pytest.mark.parametrize("kind", ["plain", "edit+truncate"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_the_references_from_logits_and_from_the_head(device, dtype, kind, shared):
    """The temperatures and edits of a batch count, also with 16 rows or more and with more ids than a program takes."""
    for num_rows, num_ids in ((1, 1), (5, 17), (19, 130)):
        case = make_case(num_rows, 2003, device, kind, DTYPES[dtype], hidden=80, padding=13)
        ids = some_ids(1 if shared else num_rows, num_ids, 2003, device)
        for original in (False, True):
            temperature = None if original else case.params.temperature
            want = gather_logprobs_ref(case.edited, ids.expand(num_rows, -1), temperature)
            rows = LogitRows(case.raw, case.head.spec, case.params, original=original)
            assert close(gather_logprobs(rows, ids), want)
            log_mass = log_mass_ref(case.edited, temperature)
            assert close(gather_logprobs(rows, ids, summary=RowSummary(log_mass=log_mass)), want)
            assert close(head_logprobs(case.hidden, case.head, ids, log_mass, case.params, original=original), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_logit_from_the_head_is_that_of_the_fused_pass_where_sums_are_rounded(device, dtype):
    """Each row's token has the logprob that the draw returned for it; a logit that is rounded otherwise is off by more
    than a thousandth."""
    case = rounding_case(17, 2003, device, DTYPES[dtype])
    drawn = lm_head_sample(case.hidden, case.head, case.params, TILE, return_logprob=True)
    got = head_logprobs(case.hidden, case.head, drawn.token_ids[:, None], drawn.log_mass, case.params)
    torch.testing.assert_close(got[:, 0], drawn.logprobs, rtol=0, atol=2e-5)


def test_temperature_1_without_parameters_and_on_greedy_rows(device):
    case = make_case(3, 999, device, "greedy", torch.float32)
    ids = some_ids(3, 9, 999, device)
    want = gather_logprobs_ref(case.edited, ids)
    log_mass = log_mass_ref(case.edited)
    for params in (None, case.params):
        assert close(gather_logprobs(LogitRows(case.raw, case.head.spec, params), ids), want)
        assert close(head_logprobs(case.hidden, case.head, ids, log_mass, params), want)


@pytest.mark.parametrize("option", [{"logit_scale": 0.125}, {"softcap": 5.0}, {"logits_dtype": torch.float32}])
def test_scale_soft_cap_and_rounding_are_applied(device, option):
    case = make_case(3, 999, device, "plain", torch.float16, **option)
    ids = some_ids(3, 9, 999, device)
    want = gather_logprobs_ref(case.edited, ids, case.params.temperature)
    rows = LogitRows(case.raw, case.head.spec, case.params)
    log_mass = log_mass_ref(case.edited, case.params.temperature)
    assert close(gather_logprobs(rows, ids), want)
    assert close(head_logprobs(case.hidden, case.head, ids, log_mass, case.params), want)


def test_an_id_outside_of_a_part_has_the_lowest_logprob_and_the_largest_over_the_parts_is_its_own(device):
    case = make_case(3, 2005, device, "plain", torch.float32)
    ids = some_ids(3, 40, 2005, device)
    log_mass = log_mass_ref(case.edited, case.params.temperature)
    from_logits, from_head = [], []
    for start, stop in ((0, 992), (992, 2000), (2000, 2005)):
        head = LMHead(case.head.weight[start:stop], vocab_start=start, shards=3, total_ids=2005)
        rows = LogitRows(case.raw[:, start:stop], head.spec, case.params)
        from_logits.append(gather_logprobs(rows, ids, summary=RowSummary(log_mass=log_mass)))
        from_head.append(head_logprobs(case.hidden, head, ids, log_mass, case.params))
        outside = (ids < start) | (ids >= stop)
        assert (from_logits[-1][outside] == LOWEST_LOGPROB).all() and (from_head[-1][outside] == LOWEST_LOGPROB).all()
    want = gather_logprobs_ref(case.edited, ids, case.params.temperature)
    for parts in (from_logits, from_head):
        assert close(torch.stack(parts).amax(0), want)


def test_hostile_rows_have_no_logprob_above_0_and_the_references_ones(device):
    for index in range(8):
        rows = random_rows(Mix(hostile=True), index, 5, device)
        ids = some_ids(5, 20, rows.logits.shape[1], device)
        got = gather_logprobs(LogitRows(rows.logits, LogitsSpec(rows.logits.shape[1]), rows.params), ids)
        assert not (got > 0).any()
        want = gather_logprobs_ref(rows.edited, ids, rows.params.temperature)
        if not CUDA:  # compiled kernels may round an edited logit otherwise
            assert close(got, want)
        assert torch.equal(got.isnan(), want.isnan())


def test_a_row_without_an_allowed_id_has_no_logprobs(device):
    hidden, weight = torch.ones(2, 16, device=device), torch.zeros(40, 16, device=device)
    bias = torch.zeros(2, 40, device=device)
    bias[0] = float("-inf")
    row = torch.arange(2, device=device)
    params = BatchParams(torch.ones(2, device=device), row, row, edits=LogitEdits(bias=bias))
    head, ids = LMHead(weight), torch.tensor([[3, -1], [3, -1]], device=device)
    rows = LogitRows(torch.zeros(2, 40, device=device), head.spec, params)
    log_mass = top_logprobs(rows, 1).log_mass
    summary = RowSummary(log_mass=log_mass)
    for got in (
        gather_logprobs(rows, ids),
        gather_logprobs(rows, ids, summary=summary),
        head_logprobs(hidden, head, ids, log_mass, params),
    ):
        assert got[0, 0].isnan() and close(got[1, 0].cpu(), -torch.tensor(40.0).double().log())
        assert got[:, 1].tolist() == [LOWEST_LOGPROB] * 2


def test_the_log_mass_of_the_rows_is_that_of_the_largest_logprobs(device):
    """And of a row whose ids are all forbidden."""
    case = make_case(5, 131, device, "edit")
    logits = case.raw.clone()
    logits[1] = -float("inf")
    rows = LogitRows(logits, case.head.spec, case.params)
    own_mass = torch.zeros(5, 2, device=device)
    gather_logprobs(rows, torch.zeros(1, 1, dtype=torch.int64, device=device), own_mass=own_mass)
    assert torch.equal(own_mass, top_logprobs(rows, 1).log_mass) and own_mass[1].tolist() == [-float("inf"), 0.0]
    known = RowSummary(log_mass=own_mass)
    for ids, summary in ((torch.zeros(1, 0, dtype=torch.int64, device=device), None), (row_ids(rows), known)):
        with pytest.raises(
            ValueError, match=r"own_mass with \d ids; expected 1 or more, and no log_mass in the summary"
        ):
            gather_logprobs(rows, ids, summary=summary, own_mass=own_mass)


def row_ids(rows: LogitRows) -> torch.Tensor:
    return torch.arange(rows.num_rows, device=rows.logits.device)[:, None]


def test_one_summary_serves_given_ids_and_the_largest_logprobs(device):
    logits, row = make_case(3, SUMMARY_IDS + 37, device).raw, torch.arange(3, device=device)
    rows = LogitRows(logits, LogitsSpec(SUMMARY_IDS + 37), BatchParams(0.5 + row / 2, row, row))
    summary = summarize_logits(rows)
    top = top_logprobs(rows, 9, summary=summary)
    assert torch.equal(gather_logprobs(rows, top.token_ids, summary=summary), top.logprobs)


def test_the_drawn_tokens_logprob_is_that_of_the_draw(device):
    case = make_case(5, 2003, device)
    drawn = sample_logits(case.raw, case.head.spec, case.params, READ, return_logprob=True)
    rows, ids = LogitRows(case.raw, case.head.spec, case.params), drawn.token_ids[:, None]
    for got in (gather_logprobs(rows, ids), gather_logprobs(rows, ids, summary=RowSummary(log_mass=drawn.log_mass))):
        assert close(got[:, 0], drawn.logprobs.double())


def test_no_rows_and_no_ids_have_no_logprobs(device):
    case = make_case(3, 40, device)
    none = torch.zeros(3, 0, dtype=torch.int64, device=device)
    assert gather_logprobs(LogitRows(case.raw, case.head.spec), none).shape == (3, 0)
    assert head_logprobs(case.hidden, case.head, none, torch.zeros(3, 2, device=device)).shape == (3, 0)
    assert gather_logprobs(LogitRows(case.raw[:0], case.head.spec), none[:0]).shape == (0, 0)
    ids = torch.zeros(1, 5, dtype=torch.int64, device=device)
    assert head_logprobs(case.hidden[:0], case.head, ids, torch.zeros(0, 2, device=device)).shape == (0, 5)


LOGITS = torch.zeros(3, 40)
ROWS = LogitRows(LOGITS, LogitsSpec(40))
IDS = torch.zeros(3, 5, dtype=torch.int64)
ROW = torch.zeros(3, dtype=torch.int64)
GIVEN = {
    "hidden": torch.zeros(3, 16),
    "head": LMHead(torch.zeros(40, 16)),
    "ids": IDS,
    "log_mass": torch.zeros(3, 2),
    "params": BatchParams(torch.ones(3), ROW, ROW),
}
WRONG_IDS = [
    (IDS.int(), r"ids is \(3, 5\) torch.int32 .*; expected contiguous \(3, 5\) torch.int64"),
    (IDS[:2], r"ids is \(2, 5\); expected a tensor of shape \(3, m\) or \(1, m\)"),
    (IDS[0], r"ids is \(5,\); expected a tensor"),
    ([1, 2], "ids is list; expected a tensor"),
    (IDS[:, :4], r"ids has strides \(5, 1\); expected it contiguous"),
]


@pytest.mark.parametrize("ids, message", WRONG_IDS)
def test_wrong_ids_are_named(ids, message):
    with pytest.raises(ValueError, match=message):
        gather_logprobs(ROWS, ids)
    with pytest.raises(ValueError, match=message):
        head_logprobs(**GIVEN | {"ids": ids})


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"hidden": torch.zeros(3, 15)}, r"hidden is \(3, 15\) torch.float32; expected \[B, 16\]"),
        ({"log_mass": torch.zeros(3)}, r"log_mass is \(3,\) .*; expected contiguous \(3, 2\) torch.float32"),
        ({"log_mass": torch.zeros(3, 4)[:, :2]}, r"log_mass has strides \(4, 1\); expected it contiguous"),
        (
            {"params": dataclasses.replace(GIVEN["params"], temperature=torch.ones(2))},
            r"temperature is \(2,\) .*; expected contiguous \(3,\) torch.float32",
        ),
    ],
)
def test_wrong_arguments_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        head_logprobs(**GIVEN | changed)


def test_a_summary_of_other_rows_is_refused():
    with pytest.raises(ValueError, match=r"log_mass is \(2, 2\) .*; expected contiguous \(3, 2\)"):
        gather_logprobs(ROWS, IDS, summary=RowSummary(log_mass=torch.zeros(2, 2)))


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True], ids=["ids of each row", "ids of all rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_of_a_head_of_real_size_have_the_references_logprobs(device, dtype, shared):
    generator = torch.Generator(device).manual_seed(1)
    weight = (torch.randn(128_256, 2048, generator=generator, device=device) / 16).to(DTYPES[dtype])
    head = LMHead(weight, logits_dtype=torch.float32)  # a rounding to 2 bytes may go either way
    for num_rows, num_ids in ((1, 256), (33, 7), (64, 256)):
        hidden = torch.randn(num_rows, 2048, generator=generator, device=device).to(DTYPES[dtype])
        logits = hidden.double() @ weight.double().T
        ids = some_ids(1 if shared else num_rows, num_ids, 128_256, device)
        want = gather_logprobs_ref(logits, ids.expand(num_rows, -1))
        got = head_logprobs(hidden, head, ids, log_mass_ref(logits))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-4)
        rows = LogitRows(logits.float(), head.spec)
        assert close(gather_logprobs(rows, ids), gather_logprobs_ref(logits.float(), ids.expand(num_rows, -1)))


def test_the_reference_gathers_what_the_softmax_has(device):
    logits = make_case(3, 50, device).edited
    ids = torch.tensor([[4, -1], [49, 50], [0, 0]], device=device)
    got, whole = gather_logprobs_ref(logits, ids), log_softmax_ref(logits)
    assert got.tolist() == [
        [whole[0, 4].item(), LOWEST_LOGPROB],
        [whole[1, 49].item(), LOWEST_LOGPROB],
        [whole[2, 0].item()] * 2,
    ]
