"""A batch-invariant head: the bits of a row are the same in every batch, whatever is beside it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import make_params

from sgl_flashsample import BatchParams, Head, LMHead, paths
from sgl_flashsample.defaults import HeadTraits
from sgl_flashsample.dispatch import DispatchTable
from sgl_flashsample.kernels.config import TileConfig
from sgl_flashsample.kernels.lm_head_sample import num_splits
from sgl_flashsample.kernels.params import LogitsSpec
from sgl_flashsample.logprobs import WantedLogprobs
from sgl_flashsample.screen import Screen
from sgl_flashsample.selfcheck import dependence_on_batch

ROWS, HIDDEN, VOCAB = 21, 40, 203  # more rows than a tile has, and neither size fills its tiles


@pytest.fixture
def head(device) -> Head:
    torch.manual_seed(0)
    weight = torch.randn(VOCAB + 5, HIDDEN, device=device).half()
    return Head(LMHead(weight, vocab_size=VOCAB, softcap=20.0, batch_invariant=True), max_rows=ROWS)


@pytest.fixture
def hidden(device) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, HIDDEN, device=device).half()


def params_of(kind: str, head: Head, device: torch.device) -> BatchParams:
    return make_params(ROWS, head.lm_head.spec, device, kind)


def bits(values: torch.Tensor) -> list[int]:
    return values.contiguous().view(torch.int32).flatten().tolist()


@pytest.mark.parametrize("kind", ["plain", "truncate", "edit", "edit+truncate"])
@pytest.mark.parametrize("return_logprob", [False, True])
def test_tokens_scores_and_logprobs_of_a_row_are_those_that_it_has_alone(head, hidden, device, kind, return_logprob):
    params = params_of(kind, head, device)
    together = head.draw(hidden, params, return_logprob=return_logprob)
    for row in (0, 1, 15, 16, ROWS - 1):
        alone = head.draw(hidden[row : row + 1], params.rows(row, row + 1), return_logprob=return_logprob)
        for values, others in zip(alone, together, strict=True):
            assert values is others is None or bits(values) == bits(others[row : row + 1])


def test_a_row_has_the_bits_beside_rows_with_edits_and_limits_that_it_has_beside_plain_ones(head, hidden, device):
    plain, mixed = params_of("plain", head, device), params_of("edit+truncate", head, device)
    assert mixed.truncation is not None and mixed.edits is not None
    first = torch.arange(ROWS, device=device) == 0
    truncation, flags = mixed.truncation, torch.full((ROWS,), 15, dtype=torch.int32, device=device)
    mixed = dataclasses.replace(
        mixed,
        temperature=torch.where(first, plain.temperature, mixed.temperature),
        seed=plain.seed,
        position=plain.position,
        truncation=dataclasses.replace(
            truncation,
            top_k=torch.where(first, 0, truncation.top_k),
            top_p=torch.where(first, 1.0, truncation.top_p),
            min_p=torch.where(first, 0.0, truncation.min_p),
            max_top_k=None,
        ),
        edits=dataclasses.replace(mixed.edits, rows=torch.where(first, 0, flags)),
    )
    drawn, others = (head.draw(hidden, params, return_logprob=True) for params in (plain, mixed))
    for values, beside in zip(drawn, others, strict=True):
        assert bits(values[:1]) == bits(beside[:1])


def test_its_tokens_are_the_references(head):
    """With every kind of row, as a server checks it at its start."""
    assert head.check(ROWS).fault is None


def test_its_logprobs_are_those_of_an_ordinary_head(head, hidden, device):
    params = params_of("plain", head, device)
    ordinary = Head(LMHead(head.lm_head.weight, head.lm_head.spec, batch_invariant=False))
    got, want = (one.draw(hidden, params, return_logprob=True) for one in (head, ordinary))
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.log_mass.sum(1), want.log_mass.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", [WantedLogprobs(), WantedLogprobs(3)], ids=["tokens", "top"])
def test_a_prompt_has_the_bits_of_the_logprobs_that_its_tokens_were_drawn_with(head, hidden, device, wanted):
    params = dataclasses.replace(params_of("plain", head, device), temperature=torch.ones(ROWS, device=device))
    drawn, found = head.draw_with_logprobs(hidden, params, wanted)
    read = head.logprobs_of(hidden, drawn.token_ids, wanted, chunk_rows=8)
    assert bits(read.of_tokens) == bits(found.of_tokens)
    assert bits(found.of_tokens) == bits(head.draw(hidden, params, return_logprob=True).logprobs)
    if wanted.top:
        assert bits(read.top.logprobs) == bits(found.top.logprobs)


@pytest.mark.parametrize("original", [False, True])
def test_a_draw_has_its_own_log_mass_beside_logprobs_at_its_temperatures_alone(head, hidden, device, original):
    params = params_of("plain", head, device)
    drawn, found = head.draw_with_logprobs(hidden, params, WantedLogprobs(3, original=original))
    assert drawn.log_mass is (None if original else found.log_mass)
    assert drawn.logprobs is (None if original else found.of_tokens)


def test_a_row_of_a_prompt_does_not_depend_on_its_chunk(head, hidden, device):
    tokens = torch.arange(ROWS, device=device)
    whole = head.logprobs_of(hidden, tokens, WantedLogprobs(2))
    part = head.logprobs_of(hidden[9:12], tokens[9:12], WantedLogprobs(2), chunk_rows=1)
    assert bits(part.of_tokens) == bits(whole.of_tokens[9:12]) and bits(part.log_mass) == bits(whole.log_mass[9:12])


@pytest.mark.parametrize("family", ["sm80", "sm90", "sm100"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_all_batches_of_a_head_take_one_tile(family, itemsize):
    table = DispatchTable(HeadTraits(family, itemsize, 151_936, 4096, batch_invariant=True))
    assert len({config for _, _, config in table.configs_up_to(600, screened=True)}) == 1
    assert isinstance(table.lookup(1), TileConfig)


def test_the_vocabulary_is_cut_alike_for_all_batches(monkeypatch):
    head = LMHead(torch.empty(32_000, 16, dtype=torch.bfloat16, device="cpu"), batch_invariant=True)
    others = LMHead(head.weight)
    tile = TileConfig(16, 64, 32, 4, 1)
    monkeypatch.setattr("sgl_flashsample.kernels.lm_head_sample.resident_programs", lambda *_: 132)
    assert {num_splits(head, rows, tile) for rows in range(1, 600)} == {132}
    assert len({num_splits(others, rows, tile) for rows in range(1, 600)}) > 1


def test_a_device_on_which_a_row_depends_on_its_batch_is_found(head, monkeypatch):
    assert dependence_on_batch(head.lm_head) is None
    read = paths.read_logprobs

    def depends_on_place(*arguments):
        found = read(*arguments)
        found.of_tokens[4:] = found.of_tokens[4:].nextafter(torch.full_like(found.of_tokens[4:], -9.0))
        return found

    monkeypatch.setattr(paths, "read_logprobs", depends_on_place)
    reason = dependence_on_batch(head.lm_head)
    assert reason is not None and reason.startswith("a row's logits, token or logprobs depend on its batch of ")


@pytest.mark.parametrize("path", ["logits", "screened", "flashinfer"])
def test_no_other_path_serves_it(head, hidden, device, path):
    with pytest.raises(ValueError, match="takes the fused path alone"):
        head.draw(hidden, params_of("plain", head, device), path=path)


def test_what_it_cannot_do_is_refused_with_the_reason(head, hidden, device, monkeypatch):
    with pytest.raises(ValueError, match="expected one whose logits may come from a GEMM"):
        head.logits(hidden)
    with pytest.raises(ValueError, match="shards is 2; expected 1, the whole vocabulary, with batch_invariant"):
        LogitsSpec(16, shards=2, batch_invariant=True)
    with pytest.raises(ValueError, match="batch-invariant"):
        Screen(head.lm_head, 4)
    monkeypatch.setattr(paths, "draws_in_host_memory", lambda device: True)
    with pytest.raises(ValueError, match="hidden is in host memory; expected it on a GPU with a batch-invariant head"):
        head.draw(hidden, params_of("plain", head, device))
