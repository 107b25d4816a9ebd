"""The backend that is compared with the fused pass draws the same tokens."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from kernel_cases import KINDS, expected, make_case

from sgl_flashsample.head import Head

pytest.importorskip("numba")
DecisionPlane = runpy.run_path(str(Path(__file__).resolve().parent.parent.parent / "benchmarks" / "decision_plane.py"))[
    "DecisionPlane"
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_decision_plane_draws_the_tokens_of_the_definition_in_blocks_of_any_size(device, kind):
    planes = [DecisionPlane(device, *sizes) for sizes in ((4, 1), (7, 3), (100, None))]
    for num_rows in (17, 3, 23):  # memory is reserved anew, and used again
        case = make_case(num_rows, 901, device, kind, torch.bfloat16, padding=11, softcap=9.0)
        want = expected(case)
        certain = ~want.near_tie
        for plane in planes:
            logits = Head(case.head).logits(case.hidden)
            out = plane.draw(logits, case.head.spec, case.params, return_logprob=True)
            assert torch.equal(out.token_ids[certain], want.token[certain])
            known = certain & ~want.logprob_low.isnan()
            logprobs = out.logprobs[known].double()
            assert (logprobs >= want.logprob_low[known] - 1e-4).all()
            assert (logprobs <= want.logprob_high[known] + 1e-4).all()
