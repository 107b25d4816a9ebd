"""The fake head of tests draws what a head draws."""

from __future__ import annotations

import pytest
import torch
from fake_head import FakeHead
from kernel_cases import KINDS, make_case

from sgl_flashsample.head import Head


@pytest.mark.parametrize("kind", KINDS)
def test_a_fake_head_draws_what_a_head_draws(kind):
    case = make_case(5, 401, torch.device("cpu"), kind, torch.float32)
    real, fake = Head(case.head), FakeHead(case.head)
    want = real.draw(case.hidden, case.params, return_logprob=True)
    logits = real.logits(case.hidden)
    for got in (
        fake.draw(case.hidden, case.params, return_logprob=True),
        fake.draw_from_logits(logits, case.params, return_logprob=True),
    ):
        assert torch.equal(got.token_ids, want.token_ids)
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-4, atol=1e-4)
