"""Which rows of a batch are fused, and why the others are not."""

from __future__ import annotations

import types

import pytest
import torch
from sgl_flashsample.kernels.features import Edit

from sgl_flashsample.sglang.plan import Plan, plan_of
from sgl_flashsample.sglang.rows import TOP_K_OFF, Rows


def rows(reasons=(None, None), greedy=(True, False), tempered=(True, False)) -> Rows:
    n = len(reasons)
    zeros, ones = torch.zeros(n), torch.ones(n)
    edits = (Edit(0),) * n
    limits, needs, seeded = (zeros.int(), ones, zeros), ((False,) * 3,) * n, (False,) * n
    return Rows(
        reasons, greedy, tempered, ones, zeros.long(), needs, edits, *limits, seeded, (TOP_K_OFF,) * len(reasons)
    )


def info(grammars=None):
    return types.SimpleNamespace(grammars=grammars)


TEMPERED = "greedy_logprob_at_temperature"


@pytest.mark.parametrize(
    "batch, grammars, arguments, reasons",
    [
        (rows(), None, (False, None, None, False), (None, None)),
        (rows(), [None, None], (False, None, None, False), (None, None)),
        (rows((None, "beam_search")), None, (False, None, None, False), (None, "beam_search")),
        (rows(), [None, object()], (False, None, None, False), (None, None)),
        (rows(("beam_search", None)), [object(), object()], (False, None, None, False), ("beam_search", None)),
        (rows(), None, (False, [0, 2], [None, [1]], True), (None, None)),  # nobody asked for logprobs
        (rows(), None, (True, [0, 0], [None, None], False), (TEMPERED, None)),
        (rows(tempered=(False, False)), None, (True, [0, 0], [None, None], False), (None, None)),
        (rows(greedy=(True, True), tempered=(True, True)), None, (True, None, None, False), (None, None)),
        (rows(), None, (True, [0, 2], [None, None], False), (TEMPERED, "top_logprobs")),
        (rows(), None, (True, [0, 0], [None, []], False), (TEMPERED, "token_ids_logprobs")),
        (rows(("beam_search", None)), None, (True, None, None, True), ("beam_search", "original_logprobs")),
    ],
)
def test_each_row_is_fused_unless_something_stands_against_that_row(batch, grammars, arguments, reasons):
    assert plan_of(batch, info(grammars), *arguments, True).reasons == reasons


def test_rows_with_a_grammar_of_an_unknown_kind_are_sglangs():
    batch = rows(("beam_search", None))
    assert plan_of(batch, info([object(), object()]), False, None, None, False, False).reasons == (
        "beam_search",
        "grammar",
    )
    assert plan_of(batch, info([object(), None]), False, None, None, False, False).reasons == ("beam_search", None)


def test_a_batch_that_stays_as_it_is_has_one_plan_for_all_its_steps():
    batch = rows()
    first = plan_of(batch, info([None, object()]), True, [0, 0], [None, [1]], False, True)
    assert plan_of(batch, info([None, object()]), True, [0, 0], [None, [2]], False, True) is first
    assert plan_of(batch, info(), True, [0, 0], [None, [1]], False, True) is not first
    assert plan_of(rows(), info([None, object()]), True, [0, 0], [None, [1]], False, True) is not first


def test_a_plan_names_what_serves_each_row_and_counts_it():
    plan = Plan(("grammar", None, "beam_search", None, "grammar"))
    assert plan.native == (0, 2, 4)
    assert plan.labels == ["native:grammar", "fused", "native:beam_search", "fused", "native:grammar"]
    assert plan.counts == {("fused", ""): 2, ("native", "grammar"): 2, ("native", "beam_search"): 1}
    assert not plan.all_native
    assert Plan.whole("inactive", 3).all_native
    assert Plan.whole("inactive", 3).counts == {("native", "inactive"): 3}
