"""Sampled tokens follow the promised distribution: G-tests of known power."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from kernel_cases import CUDA, PATHS, draw, limits, spelled_out
from stats import g_test, power

from sgl_flashsample.kernels.config import ReadConfig, TileConfig
from sgl_flashsample.kernels.reference import allowed_ref, truncated_sample_ref

pytestmark = pytest.mark.slow
# Interpreted, one program for a thousand rows.
WIDE = {
    "fused": TileConfig(64, 128, 64, 4, 3) if CUDA else TileConfig(512, 1024, 32, 4, 1, tma=False, reduce_rows=512),
    "logits": ReadConfig(1, 512, 1) if CUDA else ReadConfig(512, 1024, 4, ctas_per_sm=1, reduce_rows=512),
    "screened": None,
}


@pytest.mark.parametrize(
    "path, temperature",
    [(path, t) for path in PATHS for t in (0.7, 1.0, 1.6)]
    if CUDA
    else [("fused", 0.7), pytest.param("fused", 1.6, marks=pytest.mark.full), ("logits", 1.0)],
)
def test_draws_follow_the_softmax(device, path, temperature):
    """400,000 draws on a GPU, 48,000 interpreted; alpha 1e-6; power > 0.99 against a temperature that is 5 % off."""
    vocab, draws, batch = (1500, 400_000, 20_000) if CUDA else (200, 48_000, 8_000)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(6)) * 2.5
    case = spelled_out(logits.tolist(), batch, device, temperature)
    observed = np.zeros(vocab)
    for start in range(0, draws, batch):
        moved = case.with_params(position=case.params.position + start)
        tokens = draw(path, moved, WIDE[path], logprobs=False).token_ids
        observed += np.bincount(tokens.cpu().numpy(), minlength=vocab)
    truth = torch.softmax(logits.double() / temperature, 0).numpy()
    off = torch.softmax(logits.double() / (temperature * 1.05), 0).numpy()
    assert power(draws, truth, off, alpha=1e-6) > 0.99
    assert g_test(observed, truth).p_value > 1e-6
    assert g_test(observed, off).p_value < 1e-6, "the test would not see a temperature that is 5 % off"


MODES = {
    "top_p .95 + top_k 20": {"top_p": 0.95, "top_k": 20},
    "top_p .9 + top_k 50": {"top_p": 0.9, "top_k": 50},
    "top_p .9": {"top_p": 0.9},
    "min_p .05": {"min_p": 0.05},
    "top_k 100": {"top_k": 100},
    "all": {"top_k": 80, "top_p": 0.8, "min_p": 0.001},
}
SPREADS = {"peaked": 4.0, "typical": 2.5, "flat": 0.5}
CELLS = 48 if CUDA else 12


@pytest.mark.parametrize("spread", SPREADS if CUDA else ["typical"])
@pytest.mark.parametrize("mode", MODES)
def test_truncated_draws_follow_the_law_that_is_left_and_never_leave_it(device, mode, spread):
    """Of the kernels, 680,000 draws per case on a GPU. Interpreted, 12,000 of the reference, to which the other tests
    hold the kernels token by token. No token outside the allowed set, and a G-test at alpha 1e-6 with power > 0.99
    against a total variation of 0.01 (0.05)."""
    vocab, draws, batch = (50_257, 680_000, 5_000) if CUDA else (200, 12_000, 12_000)
    dtype = torch.bfloat16 if CUDA else torch.float32
    difference, limit = 0.01 if CUDA else 0.05, MODES[mode]
    values = (torch.randn(vocab, generator=torch.Generator().manual_seed(11)) * SPREADS[spread]).to(dtype)
    logits, truncation = values.double()[None], limits(1, torch.device("cpu"), **limit)
    allowed = allowed_ref(logits, torch.ones(1), truncation.top_k, truncation.top_p, truncation.min_p, slack=1e-5)[0]
    case = spelled_out(values.tolist(), batch, device, dtype=dtype)
    case = case.with_params(truncation=limits(batch, device, **limit))
    observed = torch.zeros(vocab, dtype=torch.int64)
    for start in range(0, draws, batch):
        params = dataclasses.replace(case.params, position=case.params.position + start)
        if CUDA:
            tokens = draw("fused", dataclasses.replace(case, params=params), WIDE["fused"]).token_ids
        else:
            every = params.truncation
            rows = (params.temperature, params.seed, params.position, every.top_k, every.top_p, every.min_p)
            tokens = truncated_sample_ref(logits.expand(batch, -1), *rows).token
        observed += torch.bincount(tokens.cpu(), minlength=vocab)
    assert observed[~allowed].sum() == 0

    truth = torch.where(allowed, torch.softmax(logits[0], 0), 0.0)
    truth, order = (truth / truth.sum()).sort(descending=True)
    cell = ((truth.cumsum(0) - truth / 2) * CELLS).long().clamp(max=CELLS - 1)
    expected = torch.zeros(CELLS, dtype=torch.float64).index_add(0, cell, truth).numpy()
    counts = torch.zeros(CELLS, dtype=torch.int64).index_add(0, cell, observed[order]).numpy()
    counts, expected = counts[expected > 0], expected[expected > 0]
    upper = np.cumsum(expected) - expected < 0.5
    mass = expected[upper].sum()
    assert mass < 1, "more than one cell is left"
    other = np.where(upper, expected * (1 - difference / mass), expected * (1 + difference / (1 - mass)))
    assert power(draws, expected, other, 1e-6) > 0.99
    assert g_test(counts, expected).p_value > 1e-6


@pytest.mark.parametrize("apart", [16, 1], ids=["in two groups", "in one group"])
def test_equal_logits_are_drawn_equally_down_to_a_temperature_of_a_thousandth(device, apart):
    """At lower temperatures, float32 scores of groups are so large that they round the noise away. Of equal scores the
    lowest id wins, and takes up to ``2**-25 * |logit| / temperature`` more than its share. A larger excess fails here,
    and in one group any does."""
    num_rows, logit = 4000, 40.0
    values = [-1000.0] * 32
    values[0] = values[apart] = logit
    share = {}
    for temperature in (1.0, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        tokens = draw("fused", spelled_out(values, num_rows, device, temperature), WIDE["fused"]).token_ids
        assert torch.isin(tokens, torch.tensor([0, apart], device=device)).all()
        share[temperature] = (tokens == 0).double().mean().item()
        noise = 4 * 0.5 / num_rows**0.5
        bias = 0.0 if temperature >= 1e-3 or apart == 1 else 2.0**-25 * logit / temperature
        assert 0.5 - noise < share[temperature] < 0.5 + noise + bias, temperature
    assert apart == 1 or (0.52 < share[1e-5] < 0.6 and share[1e-6] > 0.8), share
