"""The check that a starting server makes: it passes right kernels and names wrong ones."""

from __future__ import annotations

import pytest
import torch
from sgl_flashsample.kernels.tiles import ReadConfig

from sgl_flashsample import LMHead, choices, selftest
from sgl_flashsample.choices import Choices, choices_for
from sgl_flashsample.tuned import Shape
from sgl_flashsample.work import Path, Work

LAUNCHED = [work for work in Work if work.fallback is None]  # greedy batches launch what plain ones do


def head(device, **options):
    weight = torch.randn(700, 48, generator=torch.Generator().manual_seed(0))
    return LMHead(weight.to(device), **options)


@pytest.mark.parametrize(
    "options, chunk",
    [
        ({}, 97),
        ({"vocab_size": 601}, 64),
        ({"softcap": 5.0, "logit_scale": 0.5}, 5000),
        ({"vocab_start": 320}, 97),
    ],
    ids=["whole", "padded", "softcap", "shard"],
)
def test_right_kernels_pass_whatever_the_head_and_the_chunk_of_the_reference(device, options, chunk):
    assert selftest.compare_with_reference(head(device, **options), 20, chunk_ids=chunk) is None


@pytest.fixture
def broken(monkeypatch):
    """Makes the kernels of one kind of work draw the token after the right one."""

    def break_it(work: Work) -> None:
        def shifted(*arguments, **keywords):
            token, score, logprob = true(*arguments, **keywords)
            own = Work.of(keywords["truncation"] is not None, keywords["edits"] is not None)
            return (token + 1) % 700 if own is work else token, score, logprob

        true = selftest.lm_head_sample
        monkeypatch.setattr(selftest, "lm_head_sample", shifted)

    return break_it


@pytest.mark.parametrize("work", LAUNCHED)
def test_a_kernel_that_draws_another_token_is_named_with_its_tile_and_its_work(device, broken, work):
    broken(work)
    problem = selftest.compare_with_reference(head(device), 4)
    assert "tokens differ from the reference with TileConfig(" in problem
    assert problem.endswith(f"({work})")


def test_a_kernel_that_keeps_other_logits_is_named(device, monkeypatch):
    def spoiled(*arguments, **keywords):
        drawn = true(*arguments, **keywords)
        if keywords["truncation"] is not None:
            keywords["workspace"].last_kept.logits[0, 3] += 1
        return drawn

    true = selftest.lm_head_sample
    monkeypatch.setattr(selftest, "lm_head_sample", spoiled)
    problem = selftest.compare_with_reference(head(device), 4)
    assert problem.startswith("logits of 1 of 1 rows differ from the reference")


def test_every_kernel_of_every_work_is_compiled_with_and_without_logprobs(device, monkeypatch):
    """The search is compiled for a size of the vocabulary, so also for the whole one."""
    seen = set()

    def note(hidden, head, *arguments, **keywords):
        work = Work.of(keywords["truncation"] is not None, keywords["edits"] is not None)
        seen.add((work, head.vocab_size, keywords["return_logprob"]))
        return true(hidden, head, *arguments, **keywords)

    def note_whole(head, config, work, return_logprob, *, screen):
        seen.add((work, head.vocab_size, return_logprob))
        launch_once(head, config, work, return_logprob, screen=screen)

    true, launch_once = selftest.lm_head_sample, selftest.launch_once
    monkeypatch.setattr(selftest, "lm_head_sample", note)
    monkeypatch.setattr(selftest, "launch_once", note_whole)
    monkeypatch.setattr(selftest, "MAX_IDS", 128)
    assert selftest.compare_with_reference(head(device), 1) is None
    cut = 128 + 700 % 16  # the last group is as full as the whole vocabulary's
    wanted = {(work, cut) for work in LAUNCHED} | {(work, 700) for work in LAUNCHED if work.truncates}
    assert seen == {(*one, return_logprob) for one in wanted for return_logprob in (False, True)}


def test_every_tile_and_reader_of_every_work_is_drawn_with(device, monkeypatch):
    seen = set()
    monkeypatch.setattr(selftest, "_compare", lambda head, rows, tile, work, *rest: seen.add((work, tile)))
    selftest.compare_with_reference(head(device), 130)
    own = choices_for(head(device))
    picked = {(work, own.pick(rows, work)) for work in Work if not work.screened for rows in range(1, 131)}
    assert seen == {(work, config) for work, config in picked if work in LAUNCHED or isinstance(config, ReadConfig)}


@pytest.fixture
def large(monkeypatch):
    """Batches of more than 3 rows take a GEMM and a reader."""

    monkeypatch.setattr(choices, "path_of", lambda shape, rows, work: Path.FUSED if rows <= 3 else Path.LOGITS)
    monkeypatch.setattr(selftest, "choices_for", lambda head: Choices(Shape.of(head)))  # not those kept from before


@pytest.mark.parametrize(
    "options", [{"vocab_size": 601}, {"softcap": 5.0, "logit_scale": 0.5, "vocab_start": 320}], ids=str
)
def test_right_readers_pass_too(device, large, options):
    assert selftest.compare_with_reference(head(device, **options), 5) is None


def test_a_reader_that_draws_another_token_is_named_and_fused_batches_are_compared_without_it(
    device, large, monkeypatch
):
    def shifted(*arguments, **keywords):
        token, score, logprob = true(*arguments, **keywords)
        return (token + 1) % 700, score, logprob

    true = selftest.sample_logits
    monkeypatch.setattr(selftest, "sample_logits", shifted)
    assert selftest.compare_with_reference(head(device), 3) is None
    assert "tokens differ from the reference with ReadConfig(" in selftest.compare_with_reference(head(device), 4)


def test_a_dead_head_of_zeros_does_not_stop_a_server(device):
    assert selftest.compare_with_reference(LMHead(torch.zeros(700, 48, device=device)), 4) is None
