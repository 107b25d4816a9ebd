"""The check that a starting server makes: it passes right kernels and names wrong ones."""

from __future__ import annotations

import pytest
import torch

from sgl_flashsample import LMHead, selftest


def head(device, **options):
    weight = torch.randn(700, 48, generator=torch.Generator().manual_seed(0))
    return LMHead(weight.to(device), **options)


@pytest.mark.parametrize(
    "options", [{}, {"vocab_size": 601}, {"softcap": 5.0, "logit_scale": 0.5}, {"vocab_start": 320}]
)
@pytest.mark.parametrize("chunk", [64, 97, 5000])
def test_right_kernels_pass_whatever_the_head_and_the_chunk_of_the_reference(device, options, chunk):
    assert selftest.compare_with_reference(head(device, **options), 20, chunk_ids=chunk) is None


def test_a_kernel_that_draws_another_token_is_named_with_its_tile(device, monkeypatch):
    def shifted(*arguments, **keywords):
        token, score, logprob = true(*arguments, **keywords)
        return (token + 1) % 700, score, logprob

    true = selftest.lm_head_sample
    monkeypatch.setattr(selftest, "lm_head_sample", shifted)
    problem = selftest.compare_with_reference(head(device), 20)
    assert "tokens differ from the reference with TileConfig(" in problem


def test_a_dead_head_of_zeros_does_not_stop_a_server(device):
    assert selftest.compare_with_reference(LMHead(torch.zeros(700, 48, device=device)), 4) is None
