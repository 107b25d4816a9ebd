"""The flashinfer path: taken only where it is allowed and exact, given up for good where it fails. Here FlashInfer is
a stand-in that draws what it is asked for; on a GPU it is itself."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import stats
import torch
from core_examples import VOCAB, example, table_of
from kernel_cases import limits

from sgl_flashsample import BatchParams, LMHead, LogitEdits, sample, selfcheck
from sgl_flashsample.dispatch import DispatchTable
from sgl_flashsample.flashinfer_path import DRAWS_PER_CALL, FIRST_OFFSET, draw_with_flashinfer
from sgl_flashsample.head import Head
from sgl_flashsample.kernels.params import LogitsSpec
from sgl_flashsample.kernels.reference import allowed_ref, transform_ref
from sgl_flashsample.kinds import BATCH_KINDS, BatchKind

ROWS = 6


@pytest.fixture
def head(device):
    return example(device).head


@pytest.fixture
def states(device):
    return example(device, rows=ROWS).hidden


def make_params(device, rows=ROWS, **changes) -> BatchParams:
    row = torch.arange(rows, device=device)
    truncation = limits(rows, device, top_p=0.9)
    truncation.top_k.add_(20 + row)
    params = BatchParams(torch.ones(rows, device=device), row * 7919 + 3, row + 5, truncation, distribution_only=True)
    return dataclasses.replace(params, **changes)


def allowing(head, *sizes) -> DispatchTable:
    return table_of(head, (), flashinfer=sizes)


def ours(params: BatchParams) -> BatchParams:
    """The same batch, drawn for a caller that asks for exact tokens."""
    return dataclasses.replace(params, distribution_only=False)


def test_a_batch_takes_it_where_table_and_caller_allow_it(head, states, device, flashinfer):
    params = make_params(device)
    output = Head(head, table=allowing(head, ROWS)).draw(states, params)
    assert len(flashinfer.calls) == 1
    assert output.token_ids.dtype is torch.int64 and output.logprobs is None
    assert output.token_ids.shape == output.scores.shape == (ROWS,)
    truncation, logits = params.truncation, (states @ head.weight.T).double()
    allowed = allowed_ref(logits, params.temperature, truncation.top_k, truncation.top_p, truncation.min_p, slack=1e-6)
    assert allowed.gather(1, output.token_ids[:, None]).all()


@pytest.mark.slow
def test_every_other_batch_has_the_tokens_of_our_paths(head, states, device, flashinfer):
    params, table = make_params(device), allowing(head, ROWS)
    edits = LogitEdits(bias=torch.zeros(ROWS, VOCAB, device=device), rows=torch.zeros(ROWS, device=device).int())
    for given, chosen, logprob in [
        (ours(params), table, False),
        (dataclasses.replace(params, truncation=None), table, False),
        (dataclasses.replace(params, edits=edits), table, False),
        (params, table, True),
        (params, allowing(head, ROWS + 1), False),
        (params, table.without_flashinfer(), False),
        (params, None, False),
    ]:
        want = sample(states, head, ours(given), return_logprob=logprob).token_ids
        drawn = Head(head, table=chosen).draw(states, given, return_logprob=logprob).token_ids
        assert torch.equal(drawn, want)
    assert not flashinfer.calls
    assert [kind for kind in BATCH_KINDS if table.takes_flashinfer(ROWS, kind)] == [BatchKind(truncate=True)]


def test_as_a_path_that_is_asked_for_it_says_what_it_cannot_serve(head, states, device, flashinfer):
    params = make_params(device)
    sample(states, head, params, path="flashinfer")
    assert len(flashinfer.calls) == 1
    edits = LogitEdits(bias=torch.zeros(ROWS, VOCAB, device=device))
    for changes, options, reason in [
        ({"distribution_only": False}, {}, r"its caller has not said distribution_only \(every row truncated"),
        ({"truncation": None}, {}, "its rows have no truncation"),
        ({"edits": edits}, {}, "its rows have edits"),
        ({}, {"return_logprob": True}, "logprobs are asked for"),
    ]:
        with pytest.raises(ValueError, match=f"path is 'flashinfer', which cannot serve this batch: {reason}"):
            sample(states, head, dataclasses.replace(params, **changes), path="flashinfer", **options)


def test_flashinfer_refuses_shards_and_parameters_that_do_not_fit(head, states, device, flashinfer):
    params = make_params(device)
    with pytest.raises(ValueError, match="the head is a shard"):
        sample(states, dataclasses.replace(head, shards=2), params, path="flashinfer")
    with pytest.raises(ValueError, match=r"temperature is \(2,\)"):
        sample(states, head, dataclasses.replace(params, temperature=params.temperature[:2]), path="flashinfer")
    with pytest.raises(ValueError, match="truncation is None"):
        draw_with_flashinfer(states @ head.weight.T, head.spec, dataclasses.replace(params, truncation=None))


def test_its_noise_is_a_function_of_the_first_row_and_of_nothing_else(head, states, device, flashinfer):
    params = make_params(device)
    state = torch.get_rng_state()
    first = sample(states, head, params, path="flashinfer").token_ids
    torch.manual_seed(1)
    assert torch.equal(sample(states, head, params, path="flashinfer").token_ids, first)
    torch.set_rng_state(state)
    sample(states, head, dataclasses.replace(params, position=params.position + 1), path="flashinfer")
    sample(states, head, dataclasses.replace(params, seed=params.seed + 1), path="flashinfer")
    assert torch.equal(torch.get_rng_state(), state), "PyTorch's generator is not asked"
    one, same, later, other = ((call.seed, call.offset) for call in flashinfer.calls)
    assert one == same == (3, FIRST_OFFSET + 5 * DRAWS_PER_CALL)
    assert later == (3, one[1] + DRAWS_PER_CALL) and other == (4, one[1])


@pytest.mark.parametrize("position", [0, 1, 2**20, 2**29 - 1])
def test_its_counters_are_never_those_of_our_noise(position):
    """cuRAND counts (offset / 4, row), we (index, position, stream and unit), under the same key."""
    first, after = ((FIRST_OFFSET + at * DRAWS_PER_CALL) % 2**64 // 4 for at in (position, position + 1))
    last = first + DRAWS_PER_CALL // 4 - 1
    for counter in (first, last):
        assert 2**29 <= counter >> 32 < 2**32, "our second word is a position, below 2**29"
    assert last < after


def test_its_logits_are_the_models_scaled_capped_and_without_the_padding(device, flashinfer):
    raw = torch.randn(ROWS, VOCAB + 20, generator=torch.Generator().manual_seed(5)).bfloat16().to(device) * 4
    params = make_params(device, temperature=0.5 + torch.arange(ROWS, device=device) / 4)
    params = dataclasses.replace(
        params, truncation=dataclasses.replace(params.truncation, top_k=torch.zeros_like(params.truncation.top_k))
    )
    before = raw.clone()
    draw_with_flashinfer(raw, LogitsSpec(VOCAB, 0, 0.7, 5.0, torch.bfloat16), params)
    (call,) = flashinfer.calls
    logits = transform_ref(raw[:, :VOCAB].double(), torch.bfloat16, logit_scale=0.7, softcap=5.0)
    want = torch.softmax(logits / params.temperature.double()[:, None], -1)
    torch.testing.assert_close(call.probs.double(), want, rtol=1e-5, atol=0)
    assert torch.equal(raw, before) and call.top_k.tolist() == [VOCAB] * ROWS, "a top-k of 0 is off"


def test_temperatures_out_of_range_count_as_the_nearest_end(device, flashinfer):
    """``BatchParams`` says so for every path; a division by them would give NaN for -inf logits, and for all."""
    logits = torch.full((ROWS, VOCAB), float("-inf"), device=device)
    logits[:, 0], logits[:, 1] = 1.0, 2.0
    params = make_params(device, temperature=torch.tensor([1e-40, 1e-6, float("inf"), float("nan"), 1e31, 1e30]))
    params = dataclasses.replace(params, temperature=params.temperature.to(device))
    draw_with_flashinfer(logits, LogitsSpec(VOCAB), params)
    (call,) = flashinfer.calls
    assert call.probs[:, :2].tolist() == [[0.0, 1.0]] * 2 + [[0.5, 0.5]] * 4
    assert not call.probs[:, 2:].any()


def test_no_rows_are_no_call(head, device, flashinfer):
    output = sample(torch.zeros(0, 32, device=device), head, make_params(device, 0), path="flashinfer")
    assert output.token_ids.shape == (0,) and not flashinfer.calls


def test_a_failure_is_one_warning_and_our_own_tokens_from_then_on(head, states, device, flashinfer, caplog):
    params, table = make_params(device), allowing(head, ROWS)
    flashinfer.breaks = RuntimeError("no kernel image is available\nmore")
    want = sample(states, head, ours(params)).token_ids
    with caplog.at_level(logging.WARNING, "sgl_flashsample"):
        for _ in range(3):
            assert torch.equal(Head(head, table=table).draw(states, params).token_ids, want)
            flashinfer.breaks = None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "flashsample cannot use FlashInfer (RuntimeError: no kernel image is available): until restart, "
    )
    assert "\n" not in line and not flashinfer.calls
    with pytest.raises(ValueError, match="FlashInfer failed: RuntimeError"):
        sample(states, head, params, path="flashinfer")


def test_without_flashinfer_our_paths_serve_its_batches(head, states, device, without_flashinfer):
    params = make_params(device)
    with pytest.raises(RuntimeError, match="flashinfer"):
        sample(states, head, params, path="flashinfer")
    want = sample(states, head, ours(params)).token_ids
    assert torch.equal(Head(head, table=allowing(head, ROWS)).draw(states, params).token_ids, want)
    assert selfcheck.unsupported_by_flashinfer(head).startswith("ModuleNotFoundError: ")


def test_tokens_that_a_truncation_forbids_are_found_at_the_start(head, flashinfer):
    assert selfcheck.unsupported_by_flashinfer(head) is None
    for draw in (lambda call: call.probs.argmin(-1).int(), lambda call: call.probs.argmax(-1).int() + VOCAB):
        flashinfer.draw = draw
        assert selfcheck.unsupported_by_flashinfer(head) == "8 of its 8 tokens are truncated ones"
    shard = dataclasses.replace(head, shards=2)
    assert "it needs a whole vocabulary" in selfcheck.unsupported_by_flashinfer(shard)


def counts_and_truth(head, column, rows, calls, top_k, top_p):
    """How often each token was drawn at temperature 0.8, and the reference's distribution."""
    device, vocab = head.weight.device, head.vocab_size
    hidden = torch.zeros(rows, head.weight.shape[1], dtype=head.weight.dtype, device=device)
    hidden[:, column] = 8.0  # a column of the head, times a power of two: logits that no sum rounds
    row, temperature = torch.arange(rows, device=device), torch.full((rows,), 0.8, device=device)
    truncation = limits(rows, device, top_k, top_p)
    counts = torch.zeros(vocab, dtype=torch.int64, device=device)
    for call in range(calls):
        params = BatchParams(temperature, row * 7919 + 1, row + call, truncation, distribution_only=True)
        counts += torch.bincount(sample(hidden, head, params, path="flashinfer").token_ids, minlength=vocab)
    logits = head.weight[None, :, column].double() * 8.0
    one = [tensor[:1] for tensor in (temperature, truncation.top_k, truncation.top_p, truncation.min_p)]
    # Float32 sums decide about the last token that top-p leaves; either is right.
    surely, perhaps = (allowed_ref(logits, *one, slack=slack)[0] for slack in (-1e-5, 1e-5))
    assert not counts[~perhaps].any()
    probability = torch.softmax(logits / temperature[:1].double()[:, None], -1)[0] * surely
    return (counts * surely).cpu().numpy(), (probability / probability.sum()).cpu().numpy()


def assert_follows(counts: np.ndarray, truth: np.ndarray) -> None:
    assert stats.g_test(counts, truth).p_value > 1e-6
    hotter = np.where(truth > 0, truth ** (1 / 1.05), 0.0)
    assert stats.power(int(counts.sum()), truth, hotter / hotter.sum(), 1e-6) > 0.99


@pytest.mark.slow
def test_the_truncated_distribution_is_handed_over_whole(device, flashinfer):
    weight = torch.randn(160, 32, generator=torch.Generator().manual_seed(1)).to(device) / 4
    counts, truth = counts_and_truth(LMHead(weight), 3, 4096, 30, 50, 0.95)
    assert_follows(counts, truth)
    assert stats.g_test(counts, np.where(truth > 0, truth**0.9, 0) / (truth**0.9)[truth > 0].sum()).p_value < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [129, 50257, 151936])
@pytest.mark.parametrize("top_k, top_p", [(50, 0.9), (0, 0.95), (20, 1.0)])
def test_flashinfer_draws_from_the_references_distribution(vocab, top_k, top_p):
    pytest.importorskip("flashinfer")
    generator = torch.Generator().manual_seed(0)
    head = LMHead((torch.randn(vocab, 64, generator=generator) / 4).bfloat16().to("cuda"))
    assert_follows(*counts_and_truth(head, 0, 512, 600, top_k, top_p))


@pytest.mark.gpu
def test_flashinfer_is_captured_in_a_graph_and_replays_with_new_noise():
    pytest.importorskip("flashinfer")
    device = torch.device("cuda")
    head = LMHead(torch.randn(151936, 64, device=device).bfloat16())
    hidden = torch.randn(64, 64, device=device).bfloat16()
    params, table = make_params(device, 64), allowing(head, 64)
    drawing = Head(head, max_rows=64, table=table)
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = drawing.draw(hidden, params).token_ids
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = drawing.draw(hidden, params).token_ids
    graph.replay()
    assert torch.equal(tokens, eager)
    params.position.add_(1)
    graph.replay()
    assert not torch.equal(tokens, eager)
    assert torch.equal(tokens, drawing.draw(hidden, params).token_ids)
    assert selfcheck.unsupported_by_flashinfer(head) is None
