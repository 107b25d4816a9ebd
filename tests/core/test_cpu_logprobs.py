"""Logprobs of logits in host memory, by PyTorch's operations: the reference's, whatever is equal, forbidden or no
number."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import Mix, edited_ref, make_case, mixed_edits, pack_bits, peaked, random_rows

from sgl_flashsample import cpu_logprobs
from sgl_flashsample.cpu_logprobs import read_on_cpu
from sgl_flashsample.kernels.logit_summary import LOWEST_LOGPROB, LogitRows
from sgl_flashsample.kernels.params import LARGEST_LOGIT, BatchParams, LogitEdits, LogitsSpec
from sgl_flashsample.kernels.reference import gather_logprobs_ref, top_logprobs_ref
from sgl_flashsample.kernels.top_logprobs import TopLogprobs

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within a few roundings of float32; NaN where NaN is expected."""
    difference = (got.double() - want).abs()
    return bool(((difference <= 2e-5 + 4e-7 * want.abs()) | (got.isnan() & want.isnan())).all())


def top_of(rows: LogitRows, k: int, counts: torch.Tensor | None = None) -> TopLogprobs:
    top, _ = read_on_cpu(rows, k, counts, [], None)
    return top


def assert_reference(rows: LogitRows, k: int, logits: torch.Tensor, temperature: torch.Tensor | None = None) -> None:
    """The ``k`` largest and the ids of the reference, from ``[B, V]`` logits after their edits."""
    vocab = logits.shape[1]
    given = rows.spec.vocab_start + torch.tensor([[0, vocab - 1, vocab, -1, 0, vocab // 2]])
    top, (found,) = read_on_cpu(rows, k, None, [given], None)
    ids, logprobs = top_logprobs_ref(logits, min(k, vocab), temperature, vocab_start=rows.spec.vocab_start)
    assert torch.equal(top.token_ids[:, :vocab], ids) and close(top.logprobs[:, :vocab], logprobs)
    want = gather_logprobs_ref(logits, given.expand(len(logits), -1), temperature, vocab_start=rows.spec.vocab_start)
    assert close(found, want)
    assert not (top.logprobs > 0).any() and not (found > 0).any()


def test_hostile_rows_have_the_references_ids_and_logprobs():
    for index in range(12):
        rows = random_rows(Mix(hostile=True), index, 5, CPU)
        read = LogitRows(rows.logits, LogitsSpec(rows.logits.shape[1]), rows.params)
        assert_reference(read, 20, rows.edited, rows.params.temperature)


def test_logprobs_are_right_at_any_temperature():
    case = peaked(CPU)
    rows = LogitRows(case.raw, case.head.spec, case.params)
    assert_reference(rows, 20, case.raw.double(), case.params.temperature)
    want = torch.logsumexp(case.raw.double() / case.params.temperature.double()[:, None], 1)
    torch.testing.assert_close(top_of(rows, 1).log_mass.double().sum(1), want, rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize("value", [2.5, 0.0, -7.0, LARGEST_LOGIT, INF, -INF])
def test_of_equal_logits_the_smaller_ids_come_first(value):
    equal = torch.randperm(3000, generator=torch.Generator().manual_seed(1))[:200].sort().values
    logits = torch.full((1, 3000), -9.0)
    logits[0, equal] = value
    assert_reference(LogitRows(logits, LogitsSpec(3000)), 128, logits)


def test_zeros_of_both_signs_are_equal():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = LogitRows(torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0] * 40], dtype=dtype), LogitsSpec(200))
        assert top_of(rows, 9).token_ids[0].tolist() == [0, 1, 3, 4, 5, 6, 8, 9, 10]


def test_a_row_without_an_allowed_id_has_no_logprobs_and_no_log_mass():
    rows = LogitRows(torch.tensor([[-INF, NAN] * 20, [0.0] * 40]), LogitsSpec(40))
    top, (found,) = read_on_cpu(rows, 3, None, [torch.tensor([[7, -1]])], None)
    assert top.logprobs[0].isnan().all() and found[0, 0].isnan() and found[0, 1] == LOWEST_LOGPROB
    assert not top.logprobs[1].isnan().any()
    assert top.log_mass[0].tolist() == [-INF, 0.0]


@pytest.mark.parametrize("bool_mask", [False, True], ids=["words", "bools"])
def test_edits_are_those_of_each_rows_flags_also_where_rows_share_them(bool_mask):
    case = make_case(24, 601, CPU, "edit")
    few, per_row = mixed_edits(8, 601, CPU), mixed_edits(24, 601, CPU, bool_mask=bool_mask)
    shared = {name: getattr(few, name) for name in ("additive", "scaling", "bias")}
    each = {name: tensor.repeat_interleave(3, 0) for name, tensor in shared.items()}
    want = edited_ref(case.raw.double(), dataclasses.replace(per_row, **each))
    edits = dataclasses.replace(per_row, **shared, repeats=3)
    params = dataclasses.replace(case.params, edits=edits)
    assert_reference(LogitRows(case.raw, LogitsSpec(601), params), 9, want, params.temperature)
    every = dataclasses.replace(per_row, rows=None)
    params = dataclasses.replace(params, edits=every)
    assert_reference(
        LogitRows(case.raw, LogitsSpec(601), params), 9, edited_ref(case.raw.double(), every), params.temperature
    )


@pytest.mark.parametrize("words", [0, 1, 9, 12])
def test_ids_beyond_a_short_mask_of_words_are_allowed(words):
    case = make_case(5, 300, CPU)
    allowed = torch.rand(5, 12 * 32, generator=torch.Generator().manual_seed(1)) < 0.3
    params = dataclasses.replace(case.params, edits=LogitEdits(mask=pack_bits(allowed)[:, :words].contiguous()))
    want = torch.where(allowed[:, :300] | (torch.arange(300) >= 32 * words), case.raw.double(), -INF)
    assert_reference(LogitRows(case.raw, LogitsSpec(300), params), 9, want, params.temperature)


def test_a_part_of_a_vocabulary_has_its_own_ids():
    case = make_case(5, 300, CPU, "edit", vocab_start=160, shards=2)
    assert_reference(LogitRows(case.raw, case.head.spec, case.params), 9, case.edited, case.params.temperature)


def test_a_row_is_the_same_whatever_the_block_that_it_is_read_in(monkeypatch):
    case = make_case(7, 301, CPU, "edit")
    rows, counts = LogitRows(case.raw, case.head.spec, case.params), torch.tensor([3, 0, 9, 1, 2, 5, 7]).int()
    ids = torch.randint(301, (7, 4), generator=torch.Generator().manual_seed(1))
    whole, whole_found = read_on_cpu(rows, 9, counts, [ids, ids[:1]], None)
    for size in (1, 602, 903):
        monkeypatch.setattr(cpu_logprobs, "BLOCK_LOGITS", size)
        top, found = read_on_cpu(rows, 9, counts, [ids, ids[:1]], None)
        assert all(torch.equal(one, other) for one, other in zip((*top, *found), (*whole, *whole_found), strict=True))


def test_logits_and_parameters_may_want_gradients_and_are_not_changed():
    logits, row = torch.zeros(2, 40), torch.arange(2)
    logits[:, 7] = NAN
    params = BatchParams(torch.ones(2), row, row, edits=LogitEdits(bias=torch.ones(2, 40)))
    before = logits.clone()
    for tensor in (logits, params.temperature, params.edits.bias):
        tensor.requires_grad_()
    top = top_of(LogitRows(logits, LogitsSpec(40), params), 3)
    assert not top.logprobs.requires_grad and torch.equal(logits.nan_to_num(), before.nan_to_num())
