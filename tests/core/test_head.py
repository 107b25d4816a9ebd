"""``Head``: it launches the configuration that its table has for a batch, and no choice changes a token."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import pytest
import torch
from core_examples import (
    READ,
    ROWS,
    SCREEN,
    SCREENED,
    TILE,
    TURNS,
    UNSCREENED,
    VOCAB,
    WIDE,
    assert_reference,
    example,
    table_of,
)
from kernel_cases import limits, make_case, take

from sgl_flashsample import (
    BatchParams,
    Head,
    LMHead,
    SamplingPath,
    WantedLogprobs,
    paths,
    sample,
    sample_from_logits,
    selfcheck,
)
from sgl_flashsample.defaults import HeadTraits, default_config_on
from sgl_flashsample.dispatch import DENSE_ROWS, DispatchTable, default_table
from sgl_flashsample.kernels.config import ScreenConfig, TileConfig
from sgl_flashsample.kinds import CONFIGS, KIND_NAMES, PLAIN
from sgl_flashsample.screen import Screen

GREEDY, EDIT = KIND_NAMES["greedy"], KIND_NAMES["edit"]


def always_screened(head) -> DispatchTable:
    return table_of(head, SCREENED, dict.fromkeys(range(1, DENSE_ROWS + 1), SCREEN))


# The configuration that is launched.


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNSCREENED, ids=str)
def test_a_table_of_any_paths_draws_the_references_tokens_in_one_workspace(device, launched, kind):
    case = example(device, kind)
    table = table_of(case.head)
    head = Head(case.head, max_rows=ROWS, table=table)
    (workspace,) = head.workspaces
    slots, buffer = workspace.slots, workspace.gemm(ROWS, VOCAB, torch.float32).data_ptr()
    sizes = (2, 3) if kind.truncate else (1, 2, 3, 4, 9)
    for rows in sizes:
        params = take(case.params, torch.arange(rows))
        assert_reference(head.draw(case.hidden[:rows], params).token_ids, case)
    assert launched == [TURNS[rows] for rows in sizes]
    assert workspace.slots == slots and workspace.gemm(ROWS, VOCAB, torch.float32).data_ptr() == buffer
    assert workspace.gemm(ROWS, VOCAB, torch.float32).stride() == (608, 1), "rows start at multiples of 16 elements"


def test_a_path_that_is_asked_for_is_the_one_that_runs(device, launched):
    case = example(device)
    table, screen = table_of(case.head, UNSCREENED), Screen(case.head, ROWS)
    for path in CONFIGS:
        Head(case.head, table=table, screen=screen).draw(case.hidden, case.params, path=path)
        assert launched.pop() == table.lookup_on(path, ROWS, PLAIN._replace(screen=path is SamplingPath.SCREENED))
    assert not launched and set(CONFIGS) == set(SamplingPath) - {SamplingPath.FLASHINFER}


def test_only_a_plain_batch_that_is_said_to_be_greedy_takes_the_greedy_choice(device, launched):
    greedy, edited = example(device, GREEDY), example(device, EDIT)
    tuned = {PLAIN: {ROWS: TILE}, GREEDY: {ROWS: WIDE}, EDIT: {ROWS: READ}}
    head = Head(greedy.head, table=DispatchTable(HeadTraits.of(greedy.head), tuned))
    for case in (greedy.with_params(all_greedy=False), greedy, edited, edited.with_params(all_greedy=True)):
        head.draw(case.hidden, case.params)
    assert launched == [TILE, WIDE, READ, READ]


def test_scratch_has_room_for_the_splits_of_every_tuned_tile(device):
    case = example(device)
    table = table_of(case.head, [PLAIN], {ROWS: TileConfig(16, 32, 32, 4, 1, ctas_per_sm=16, flatten=False, tma=False)})
    head = Head(case.head, max_rows=ROWS, table=table)
    if device.type == "cpu":
        assert head.workspaces[0].slots == ROWS * 16 > Head(case.head, max_rows=ROWS).workspaces[0].slots
    assert_reference(head.draw(case.hidden, case.params).token_ids, case)


def test_float32_logits_of_a_half_precision_head_have_their_place_in_the_workspace():
    """A step allocates nothing."""
    weight, hidden = torch.randn(32, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    head = Head(LMHead.of_rank(weight, 0, 2, 64, logits_dtype=torch.float32), max_rows=3)
    held = head.num_bytes
    logits = head.logits(hidden)
    torch.testing.assert_close(logits, hidden.float() @ weight.float().T)
    assert head.num_bytes == held
    assert head.logits(hidden[:2]).data_ptr() == logits.data_ptr()


def test_another_weight_of_the_same_shape_keeps_the_table_and_one_of_another_shape_takes_the_built_in_choices(device):
    case, other = example(device), example(device, rows=2, hidden=48)
    head = Head(case.head, max_rows=ROWS, table=table_of(case.head))
    table = head.table
    head.replace(dataclasses.replace(case.head, weight=case.head.weight.clone()))
    assert head.table is table
    assert_reference(head.draw(case.hidden, case.params).token_ids, case)
    head.replace(other.head)
    assert head.table is default_table(other.head)
    assert_reference(head.draw(other.hidden, other.params).token_ids, other)


def test_a_head_of_another_shape_has_logprobs_in_scratch_of_its_own(device):
    case, other = example(device), make_case(2, 81, device)
    head = Head(case.head, max_rows=ROWS)
    head.reserve_logprobs(ROWS)
    head.reserve_rows(ROWS, VOCAB)
    head.replace(other.head)
    _, found = head.draw_with_logprobs(other.hidden, other.params, WantedLogprobs(2))
    _, want = Head(other.head).draw_with_logprobs(other.hidden, other.params, WantedLogprobs(2))
    assert torch.equal(found.top.logprobs, want.top.logprobs)
    assert_reference(head.draw_from_logits(other.raw, other.params).token_ids, other)
    scratch = head.logprob_scratch.rows
    assert (scratch.max_rows, scratch.vocab_size) == (ROWS, 81), "made anew, so that no step allocates it"


def test_whole_rows_of_logits_are_rounded_as_the_head_rounds_them(device):
    head = Head(LMHead(torch.zeros(515, 32, device=device), logits_dtype=torch.bfloat16))
    params = BatchParams(torch.zeros(2, device=device), *torch.zeros(2, 2, dtype=torch.int64, device=device))
    logits = torch.zeros(2, 515, device=device)
    logits[0, [7, 400]] = torch.tensor([1.0, 1.001], device=device)  # equal in bfloat16
    logits[1, [7, 400]] = torch.tensor([1.0, 1.01], device=device)  # different there, too
    assert head.draw_from_logits(logits, params).token_ids.tolist() == [7, 400]


def test_a_rank_draws_whole_rows_of_logits_with_the_scale_and_the_softcap_of_its_head(device):
    case = example(device, KIND_NAMES["truncate"], softcap=4.0, logit_scale=0.5)
    half = case.head.weight[:304].contiguous()
    head = Head(LMHead.of_rank(half, 0, 2, VOCAB, softcap=4.0, logit_scale=0.5), max_rows=ROWS)
    want = sample_from_logits(case.raw, case.params, softcap=4.0, logit_scale=0.5)
    assert torch.equal(head.draw_from_logits(case.raw, case.params).token_ids, want.token_ids)
    head.reserve_rows(ROWS, VOCAB)
    assert torch.equal(head.draw_from_logits(case.raw, case.params).token_ids, want.token_ids)


def test_a_wrong_configuration_is_taken_out_and_a_wrong_screen_is_dropped(device, monkeypatch):
    case = example(device)
    head = Head(case.head, table=table_of(case.head, [PLAIN], {1: TILE}), screen=Screen(case.head, 1))
    refused = selfcheck.Checked(head.table.without(TILE, PLAIN), None, ("wrong",), "unscreened")
    monkeypatch.setattr(selfcheck, "refuse_wrong", lambda *arguments, **options: refused)
    assert head.check(1) is refused
    assert head.screen is None and head.table.lookup(1) == head.table.default(1)


# When a screen is used.


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PLAIN, EDIT, GREEDY], ids=str)
def test_a_screen_is_used_where_the_table_has_it_and_changes_no_token(device, launched, kind):
    case = example(device, kind)
    head, screen, default = case.head, Screen(case.head, ROWS), default_table(case.head)
    for table, config in [
        (None, default.lookup(ROWS, kind._replace(screen=True))),
        (always_screened(head), SCREEN),
        (always_screened(head).without_screen(), default.lookup(ROWS, kind)),
        (table_of(head), TURNS[ROWS]),
    ]:
        assert_reference(Head(head, table=table, screen=screen).draw(case.hidden, case.params).token_ids, case)
        assert launched.pop() == config


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["truncate", "edit+truncate"])
def test_a_truncated_batch_is_screened_where_every_such_row_is_known_to_have_a_small_top_k(device, launched, kind):
    case = example(device, KIND_NAMES[kind], rows=3)
    table, screen = always_screened(case.head), Screen(case.head, 3)
    small = table.truncation_config.max_small_top_k
    for largest, is_screened in ((small, True), (small + 1, False), (None, False)):
        known = case.with_params(truncation=limits(3, device, top_k=20, top_p=0.9, max_top_k=largest))
        drawn = Head(case.head, table=table, screen=screen).draw(case.hidden, known.params)
        assert_reference(drawn.token_ids, known)
        assert isinstance(launched.pop(), ScreenConfig) == is_screened


def test_a_screen_that_cannot_serve_a_batch_is_as_none_and_a_path_that_insists_says_why(device, launched):
    case = example(device)
    stale_head = LMHead(case.head.weight.clone())
    stale, few = Screen(stale_head, ROWS), Screen(case.head, ROWS - 1)
    stale_head.weight.mul_(2)
    for head, logprob, screen, reason in [
        (case.head, False, None, "its head has no screen"),
        (case.head, False, few, "it has 9 rows, the screen is for 8"),
        (case.head, True, Screen(case.head, ROWS), "logprobs are asked for"),
        (stale_head, False, stale, "the screen is not of what the head holds now"),
    ]:
        batch = dataclasses.replace(case, head=head)
        screened = Head(head, table=always_screened(head), screen=screen)
        drawn = screened.draw(case.hidden, case.params, return_logprob=logprob)
        assert_reference(drawn.token_ids, batch)
        assert not isinstance(launched.pop(), ScreenConfig)
        with pytest.raises(ValueError, match=f"path is 'screened', which cannot serve this batch: {reason}"):
            screened.draw(case.hidden, case.params, return_logprob=logprob, path="screened")


def test_a_configuration_of_the_screened_path_needs_a_screen_and_gives_no_logprobs(device):
    case = example(device)
    config = default_config_on(HeadTraits.of(case.head), SamplingPath.SCREENED, ROWS, PLAIN)
    for screen, logprob in ((None, False), (Screen(case.head, ROWS), True)):
        parts = paths.Parts(case.head, screen=screen)
        with pytest.raises(ValueError, match="the screened path needs a screen, and returns no logprobs"):
            paths.launch(config, case.hidden, case.params, parts, return_logprob=logprob)


# Devices.


def test_kernels_run_on_the_device_of_the_hidden_states(device, monkeypatch):
    case, events = example(device), []

    @contextlib.contextmanager
    def guard(of):
        events.append(of)
        yield
        events.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "device", guard)
        for name, is_cuda in (("cuda:1", True), ("cuda:0", True), ("cpu", False)):
            with paths.on_device_of(types.SimpleNamespace(is_cuda=is_cuda, device=torch.device(name))):
                pass
    assert events == [torch.device("cuda:1"), "left"]
    monkeypatch.setattr(paths, "on_device_of", guard)
    monkeypatch.setattr(paths, "launch", lambda *arguments, **keywords: events.append("launched"))
    monkeypatch.setattr(paths, "sample_logits", lambda *arguments, **keywords: events.append("launched"))
    sample(case.hidden, case.head, case.params)
    sample_from_logits(case.raw, case.params)
    assert events[2] is case.hidden and events[5] is case.raw
    assert events[3:5] == events[6:] == ["launched", "left"]


@pytest.mark.gpu
@pytest.mark.parametrize("path", [*CONFIGS, "from logits"])
def test_a_head_on_another_gpu_than_the_current_one_is_drawn_there(path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for index in (0, 1, 0):
        case = example(torch.device("cuda", index))
        if path == "from logits":
            drawn = sample_from_logits(case.raw, case.params)
        else:
            screen = Screen(case.head, ROWS) if path == "screened" else None
            drawn = Head(case.head, screen=screen).draw(case.hidden, case.params, path=path)
        assert drawn.token_ids.device.index == index and torch.cuda.current_device() == 0
        assert_reference(drawn.token_ids, case)


# Scratch.


@pytest.mark.parametrize("max_rows", [0, ROWS])
def test_a_twin_draws_the_same_tokens_without_a_screen_in_the_same_scratch_or_its_own(device, launched, max_rows):
    case = example(device)
    head = Head(case.head, max_rows=ROWS, table=always_screened(case.head), screen=Screen(case.head, ROWS))
    twin = head.twin(max_rows)
    assert_reference(twin.draw(case.hidden, case.params).token_ids, case)
    assert twin.table is head.table and not isinstance(launched[-1], ScreenConfig)
    assert (twin.workspaces[0] is head.workspaces[0]) is (max_rows == 0)


@pytest.mark.parametrize("way", ["the table's", "fused", "logits", "logprobs", "rows of logits"])
def test_a_batch_beyond_the_scratch_is_drawn_in_scratch_of_its_own(device, way):
    """Graphs that were captured go on using what the head keeps."""
    case = example(device)
    head = Head(case.head, max_rows=2)
    head.reserve_rows(2, VOCAB)
    kept = head.workspaces[0]
    buffer = kept.gemm(2, case.head.weight.shape[0], paths.gemm_dtype(case.head)).data_ptr()
    if way == "logprobs":
        drawn, _ = head.draw_with_logprobs(case.hidden, case.params, WantedLogprobs.of(2))
    elif way == "rows of logits":
        drawn = head.draw_from_logits(Head(case.head).logits(case.hidden), case.params, vocab_size=case.head.vocab_size)
    else:
        drawn = head.draw(case.hidden, case.params, path=None if way == "the table's" else way)
    assert_reference(drawn.token_ids, case)
    assert head.workspaces[0] is kept
    assert kept.gemm(2, case.head.weight.shape[0], paths.gemm_dtype(case.head)).data_ptr() == buffer


def test_a_table_that_needs_more_scratch_than_there_is_gets_it(device):
    case = example(device)
    head = Head(case.head, max_rows=ROWS, table=table_of(case.head, (PLAIN,), dict.fromkeys(range(1, ROWS + 1), READ)))
    few = head.workspaces[0].slots
    head.table = table_of(case.head, (PLAIN,), dict.fromkeys(range(1, ROWS + 1), TILE))
    assert head.workspaces[0].slots >= paths.slots_for(TILE, case.head, ROWS) and few > 0
    assert_reference(head.draw(case.hidden, case.params).token_ids, case)
