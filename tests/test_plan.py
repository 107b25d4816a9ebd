"""Which rows of a batch are fused, and why the others are not."""

from __future__ import annotations

import types

import pytest
import torch

from sgl_flashsample.sglang.plan import Plan, plan_of
from sgl_flashsample.sglang.rows import Rows


def rows(reasons=(None, None), greedy=(True, False), tempered=(True, False)) -> Rows:
    zeros = torch.zeros(len(reasons), dtype=torch.int64)
    return Rows(reasons, greedy, tempered, torch.ones(len(reasons)), zeros, ((False,) * 3,) * len(reasons))


def info(grammars=None):
    return types.SimpleNamespace(grammars=grammars)


TEMPERED = "greedy_logprob_at_temperature"


@pytest.mark.parametrize(
    "batch, grammars, arguments, reasons",
    [
        (rows(), None, (False, None, None, False), (None, None)),
        (rows(), [None, None], (False, None, None, False), (None, None)),
        (rows((None, "top_p")), None, (False, None, None, False), (None, "top_p")),
        (rows(), [None, object()], (False, None, None, False), (None, "grammar")),
        (rows(("top_p", None)), [object(), object()], (False, None, None, False), ("top_p", "grammar")),
        (rows(), None, (False, [0, 2], [None, [1]], True), (None, None)),  # nobody asked for logprobs
        (rows(), None, (True, [0, 0], [None, None], False), (TEMPERED, None)),
        (rows(tempered=(False, False)), None, (True, [0, 0], [None, None], False), (None, None)),
        (rows(greedy=(True, True), tempered=(True, True)), None, (True, None, None, False), (None, None)),
        (rows(), None, (True, [0, 2], [None, None], False), (TEMPERED, "top_logprobs")),
        (rows(), None, (True, [0, 0], [None, []], False), (TEMPERED, "token_ids_logprobs")),
        (rows(("top_p", None)), None, (True, None, None, True), ("top_p", "original_logprobs")),
    ],
)
def test_each_row_is_fused_unless_something_stands_against_that_row(batch, grammars, arguments, reasons):
    assert plan_of(batch, info(grammars), *arguments).reasons == reasons


def test_a_batch_that_stays_as_it_is_has_one_plan_for_all_its_steps():
    batch = rows()
    first = plan_of(batch, info([None, object()]), True, [0, 0], [None, [1]], False)
    assert plan_of(batch, info([None, object()]), True, [0, 0], [None, [2]], False) is first
    assert plan_of(batch, info(), True, [0, 0], [None, [1]], False) is not first
    assert plan_of(rows(), info([None, object()]), True, [0, 0], [None, [1]], False) is not first


def test_a_plan_names_what_serves_each_row_and_counts_it():
    plan = Plan(("grammar", None, "top_p", None, "grammar"))
    assert plan.native == (0, 2, 4)
    assert plan.labels == ["native:grammar", "fused", "native:top_p", "fused", "native:grammar"]
    assert plan.counts == {("fused", ""): 2, ("native", "grammar"): 2, ("native", "top_p"): 1}
    assert not plan.all_native
    assert Plan.whole("inactive", 3).all_native
    assert Plan.whole("inactive", 3).counts == {("native", "inactive"): 3}
