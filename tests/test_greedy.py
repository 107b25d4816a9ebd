"""``argmax``: the token of the largest logit, whatever the shape of the head, the batch, and the screen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import integer_problem, random_problem
from sgl_flashsample.kernels.int8_head import Counted
from sgl_flashsample.kernels.reference import logits_ref

from sgl_flashsample import LMHead, Screen, argmax, greedy
from sgl_flashsample.choices import choices_for
from sgl_flashsample.paths import make_workspace

SHAPES = [(1, 17, 32), (3, 601, 40), (9, 1000, 24), (17, 515, 33)]  # rows, ids, hidden size


def first_maximum(states: torch.Tensor, head: LMHead) -> list[int]:
    """Of the reference's logits; NumPy promises the first one."""
    logits = logits_ref(
        states,
        head.weight[: head.vocab_size],
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        logits_dtype=head.logits_dtype,
    )
    return np.argmax(logits.cpu().numpy(), axis=1).tolist()


def screened_rows(screen: Screen) -> int:
    return int(screen.counters[Counted.ROWS])


def screened_on(device) -> bool:
    """Whether the built-in choice takes greedy rows to the screen there."""
    return device.type != "cuda"


@pytest.mark.parametrize("with_screen", [False, True], ids=["whole head", "screen"])
@pytest.mark.parametrize("num_rows, vocab, hidden", SHAPES)
def test_it_is_the_first_maximum_of_the_logits(device, num_rows, vocab, hidden, with_screen):
    states, weight = integer_problem(num_rows, vocab, hidden, torch.float32, device)
    weight[vocab // 2 : vocab // 2 * 2] = weight[: vocab // 2].clone()  # the largest logit is there twice
    head = LMHead(weight)
    screen = Screen(head, num_rows) if with_screen else None
    assert argmax(states, head, screen=screen).tolist() == first_maximum(states, head)
    if screen is not None and screened_on(device):
        assert screened_rows(screen) == num_rows


@pytest.mark.parametrize("with_screen", [False, True], ids=["whole head", "screen"])
def test_it_sees_the_models_own_logits_padding_scale_and_softcap_included(device, with_screen):
    states, weight = random_problem(5, 300, 32, torch.float16, device, padding=9)
    weight[300:] = 100.0 * states[0].sign()
    head = LMHead(weight, vocab_size=300, logit_scale=0.5, softcap=20.0)
    screen = Screen(head, 5) if with_screen else None
    assert argmax(states, head, screen=screen).tolist() == first_maximum(states, head)


def test_rounded_logits_tie_where_the_sums_do_not(device):
    """Two ids whose sums differ by less than a bfloat16 can tell: the first has the token."""
    weight = torch.full((64, 32), -1.0, dtype=torch.bfloat16, device=device)
    weight[40], weight[50] = 1.0, 1.0
    weight[50, 0] = 1.0078125  # 32.0078125 rounds to 32
    states = torch.ones(2, 32, dtype=torch.bfloat16, device=device)
    head = LMHead(weight)
    for screen in (None, Screen(head, 2)):
        assert argmax(states, head, screen=screen).tolist() == [40, 40] == first_maximum(states, head)
    kept = LMHead(weight, logits_dtype=torch.float32)
    assert argmax(states, kept).tolist() == [50, 50]


def test_a_screen_that_is_stale_or_too_small_is_as_none(device):
    states, weight = integer_problem(6, 601, 32, torch.float32, device)
    head = LMHead(weight)
    small, stale = Screen(head, 5), Screen(head, 6)
    stale.invalidate()
    for screen in (small, stale):
        assert argmax(states, head, screen=screen).tolist() == first_maximum(states, head)
        assert screened_rows(screen) == 0


def test_a_weight_is_a_head_and_a_workspace_and_choices_are_taken(device):
    states, weight = integer_problem(3, 601, 32, torch.float32, device)
    head = LMHead(weight)
    choices = choices_for(head)
    workspace = make_workspace(head, 3, choices=choices)
    expected = first_maximum(states, head)
    assert argmax(states, weight).tolist() == expected
    assert argmax(states, head, choices=choices, workspace=workspace).tolist() == expected
    other = LMHead(torch.zeros(32, 32, device=device))
    with pytest.raises(ValueError, match="choices are for"):
        argmax(states, head, choices=choices_for(other))
    with pytest.raises(ValueError, match="hidden is"):
        argmax(states[:, 1:], head)


def test_a_batch_of_no_rows_has_no_tokens(device):
    head = LMHead(torch.zeros(64, 32, device=device))
    found = argmax(torch.zeros(0, 32, device=device), head, screen=Screen(head, 1))
    assert found.shape == (0,) and found.dtype == torch.int64


def test_what_is_the_same_for_every_greedy_row_is_made_once(device):
    greedy._params.clear(), greedy._zeros.clear()
    first = greedy._params_for(5, torch.zeros(1, device=device).device)
    assert greedy._params_for(5, torch.zeros(1, device=device).device) is first
    assert first.all_greedy and first.temperature.shape == first.seed.shape == first.position.shape == (5,)
    assert not any(field.any() for field in (first.temperature, first.seed, first.position))
    large = greedy._params_for(greedy._LEAST_ROWS + 1, torch.zeros(1, device=device).device)
    assert large.temperature.dtype == torch.float32 and not large.temperature.any()
    assert len(large.temperature) == greedy._LEAST_ROWS + 1 and first in greedy._params.values()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA graphs")
def test_a_first_call_that_is_captured_leaves_nothing_behind_for_others():
    device = torch.device("cuda", 0)
    states, weight = integer_problem(6, 601, 32, torch.float32, device)
    head = LMHead(weight)
    expected = first_maximum(states, head)
    assert argmax(states, head).tolist() == expected  # compiles
    greedy._params.clear(), greedy._zeros.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = argmax(states, head)
    assert not greedy._params and not greedy._zeros
    assert argmax(states, head).tolist() == expected
    graph.replay()
    assert captured.tolist() == expected
