"""Which configuration and path a batch takes. That configuration is launched, and no choice changes a token."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import pytest
import torch
from core_examples import (
    LONG,
    ON_PATH,
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
from kernel_cases import limits, take

from sgl_flashsample import LMHead, SamplingPath, Screen, api, dispatch, sample, sample_from_logits
from sgl_flashsample.defaults import HeadTraits, default_config, default_config_on
from sgl_flashsample.dispatch import DENSE_ROWS, DispatchTable, compute_logits, default_table, make_workspace
from sgl_flashsample.kernels.config import ScreenConfig, TileConfig
from sgl_flashsample.kinds import BATCH_KINDS, CONFIGS, KIND_NAMES, PLAIN, path_of

GREEDY, TRUNCATE, EDIT = (KIND_NAMES[name] for name in ("greedy", "truncate", "edit"))
H200 = HeadTraits("sm90", 2, 151_936, 2048)  # built-in choices with screens, and without them for some batches


@pytest.fixture
def head(device):
    return example(device).head


def always_screened(head) -> DispatchTable:
    return table_of(head, SCREENED, dict.fromkeys(range(1, DENSE_ROWS + 1), SCREEN))


# What a table answers.


def test_a_size_of_the_table_takes_its_configuration_and_every_other_one_the_built_in_choice():
    table = DispatchTable(H200, {TRUNCATE: TURNS})
    for rows in (*range(1, 12), DENSE_ROWS, DENSE_ROWS + 1, 5000):
        for kind in (TRUNCATE, PLAIN, EDIT):
            tuned = TURNS.get(rows) if kind == TRUNCATE else None
            assert table.default(rows, kind) == default_config(H200, rows, kind)
            assert table.lookup(rows, kind) == (tuned or table.default(rows, kind))
            assert table.is_measured(rows, kind) == (tuned is not None)
        for path in CONFIGS:
            chosen = table.lookup(rows, TRUNCATE)
            on_path = chosen if path_of(chosen) is path else default_config_on(H200, path, rows, TRUNCATE)
            assert table.lookup_on(path, rows, TRUNCATE) == on_path


def test_a_kind_that_was_not_measured_takes_what_its_fallback_takes():
    """A measured size has its own choice, which may be the built-in one. Without a measurement, a greedy batch takes
    the choice of plain batches, and a batch with a screen takes the built-in screen, else the choice without a
    screen."""
    kinds = KIND_NAMES
    table = DispatchTable(
        H200,
        {PLAIN: {1: TILE, 64: READ}, GREEDY: {64: WIDE}, TRUNCATE: {1: TILE, 4: LONG}},
        {GREEDY: [1, 2], kinds["truncate+screen"]: [4], kinds["edit+screen"]: [20]},
    )
    for name, rows, wanted, measured in [
        ("greedy", 1, default_config(H200, 1, GREEDY), True),  # kept, though plain batches changed
        ("greedy", 64, WIDE, True),
        ("greedy", 30, default_config(H200, 30, PLAIN), False),
        ("plain", 2, default_config(H200, 2, PLAIN), False),
        ("plain+screen", 1, default_config(H200, 1, kinds["plain+screen"]), False),
        ("plain+screen", 64, READ, True),
        ("greedy+screen", 64, WIDE, True),
        ("greedy+screen", 17, default_config(H200, 17, PLAIN), False),
        ("truncate+screen", 1, default_config(H200, 1, kinds["truncate+screen"]), False),
        ("truncate+screen", 4, default_config(H200, 4, TRUNCATE), True),
        ("edit+screen", 20, default_config(H200, 20, EDIT), True),
        ("edit+truncate+screen", 1, default_config(H200, 1, kinds["edit+truncate"]), False),
    ]:
        assert table.lookup(rows, kinds[name]) == wanted, (name, rows)
        assert table.is_measured(rows, kinds[name]) is measured, (name, rows)
    assert isinstance(table.lookup(1, kinds["plain+screen"]), ScreenConfig)


def test_the_largest_screened_batch_is_known_and_whether_a_tuned_table_says_so():
    built_in, plain = DispatchTable(H200), KIND_NAMES["plain+screen"]
    assert [built_in.screened_rows(most) for most in (512, 20, 0)] == [32, 20, 0]
    assert built_in.screened_rows(512, measured=True) == 0
    table = DispatchTable(H200, {plain: {1: READ, 2: SCREEN, 64: SCREEN}}, {plain: [4]})
    assert [table.screened_rows(most, measured=True) for most in (512, 63, 3, 1)] == [64, 4, 2, 0]
    assert DispatchTable(H200._replace(family="sm80")).screened_rows(512) == 0


def test_without_a_screen_every_batch_takes_what_it_would_without_one():
    sizes = {2: SCREEN, 4: READ}
    table = DispatchTable(H200, {kind: sizes for kind in SCREENED}, flashinfer=[7])
    without = table.without_screen()
    assert without.screened_rows(DENSE_ROWS) == 0 and without.flashinfer == {7}
    assert without.without_flashinfer().screened_rows(DENSE_ROWS) == 0
    for kind in BATCH_KINDS:
        for rows in (1, 2, 4, 9, 600):
            assert without.lookup(rows, kind) == table.lookup(rows, kind.unscreened)


@pytest.mark.slow
@pytest.mark.parametrize("refused", [TILE, READ, SCREEN], ids=ON_PATH)
@pytest.mark.parametrize("kind", ["plain", "greedy+screen", "edit", "edit+truncate+screen"])
def test_a_refusal_gives_a_configuration_back_in_all_kinds_that_launch_it_alike_and_in_no_other(refused, kind):
    sizes, kind = TURNS | {12: SCREEN}, KIND_NAMES[kind]
    table = DispatchTable(H200, {other: sizes for other in BATCH_KINDS}, flashinfer=[2])
    without = table.without(refused, kind)
    assert without.flashinfer == {2}
    for other in BATCH_KINDS:
        alike = (other.truncate, other.edit) == (kind.truncate, kind.edit)
        for rows, config in sizes.items():
            wanted = table.default(rows, other) if config == refused and alike else config
            assert without.lookup(rows, other) == wanted
            assert without.is_measured(rows, other), "nobody measures it again"


@pytest.mark.parametrize("most", [1, 4, 20, 600])
def test_what_a_range_of_batches_launches_is_listed_once_with_a_batch_that_launches_it(most):
    sizes = {PLAIN: TURNS, EDIT: TURNS, GREEDY: {2: LONG, 4: TILE}, KIND_NAMES["greedy+screen"]: {3: TILE, 4: READ}}
    table = DispatchTable(H200, sizes)
    for screened in (False, True):
        listed = list(table.configs_up_to(most, screened=screened))
        launches = [(kind.launched(config), config) for kind, _, config in listed]
        assert len(launches) == len(set(launches))
        assert all(rows <= most and table.lookup(rows, kind) == config for kind, rows, config in listed)
        for kind in BATCH_KINDS if screened else UNSCREENED:
            for rows in range(1, most + 1):
                config = table.lookup(rows, kind)
                assert (kind.launched(config), config) in launches
    # Greedy rows change nothing in the fused pass and in a screen; a reader leaves out their noise.
    for config, same in [(TILE, PLAIN), (READ, GREEDY), (SCREEN, KIND_NAMES["plain+screen"])]:
        assert KIND_NAMES["greedy+screen"].launched(config) == same


def test_a_table_serves_heads_of_its_shape_alone(device, head):
    table = table_of(head)
    for fitting in (head, LMHead(head.weight.clone(), softcap=3.0)):
        table.check(fitting)
    for other in (
        LMHead(head.weight, vocab_size=577),
        LMHead(head.weight.half()),
        LMHead(head.weight, logits_dtype=torch.bfloat16),
        LMHead(torch.zeros(VOCAB, 48, device=device)),
    ):
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"table is for HeadTraits\(.*expected one for the head's HeadTraits\("
            ):
                table.check(other)
    table.check(head)


# What a batch is launched with.


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNSCREENED, ids=str)
def test_a_table_of_any_paths_draws_the_references_tokens_in_one_workspace(device, launched, kind):
    case = example(device, kind)
    table = table_of(case.head)
    workspace = make_workspace(case.head, ROWS, table=table)
    slots, buffer = workspace.slots, workspace.gemm(ROWS, VOCAB, torch.float32).data_ptr()
    sizes = (2, 3) if kind.truncate else (1, 2, 3, 4, 9)
    for rows in sizes:
        params = take(case.params, torch.arange(rows))
        assert_reference(sample(case.hidden[:rows], case.head, params, table=table, workspace=workspace)[0], case)
    assert launched == [TURNS[rows] for rows in sizes]
    assert workspace.slots == slots and workspace.gemm(ROWS, VOCAB, torch.float32).data_ptr() == buffer
    assert workspace.gemm(ROWS, VOCAB, torch.float32).stride() == (608, 1), "rows start at multiples of 16 elements"


def test_a_path_that_is_asked_for_is_the_one_that_runs(device, launched):
    case = example(device)
    table, screen = table_of(case.head, UNSCREENED), Screen(case.head, ROWS)
    for path in CONFIGS:
        sample(case.hidden, case.head, case.params, table=table, path=path, screen=screen)
        assert launched.pop() == table.lookup_on(path, ROWS, PLAIN._replace(screen=path is SamplingPath.SCREENED))
    assert not launched and set(CONFIGS) == set(SamplingPath) - {SamplingPath.FLASHINFER}


def test_only_a_plain_batch_that_is_said_to_be_greedy_takes_the_greedy_choice(device, head, launched):
    table = DispatchTable(HeadTraits.of(head), {PLAIN: {ROWS: TILE}, GREEDY: {ROWS: WIDE}, EDIT: {ROWS: READ}})
    greedy, edited = example(device, GREEDY), example(device, EDIT)
    for case in (greedy.with_params(all_greedy=False), greedy, edited, edited.with_params(all_greedy=True)):
        sample(case.hidden, head, case.params, table=table)
    assert launched == [TILE, WIDE, READ, READ]


def test_scratch_has_room_for_the_splits_of_every_tuned_tile(device):
    case = example(device)
    table = table_of(case.head, [PLAIN], {ROWS: TileConfig(16, 32, 32, 4, 1, ctas_per_sm=16, flatten=False, tma=False)})
    workspace = make_workspace(case.head, ROWS, table=table)
    if device.type == "cpu":
        assert workspace.slots == ROWS * 16 > make_workspace(case.head, ROWS).slots
    assert_reference(sample(case.hidden, case.head, case.params, table=table, workspace=workspace).token_ids, case)


def test_float32_logits_of_a_half_precision_head_have_their_place_in_the_workspace():
    """A step allocates nothing."""
    head = LMHead.of_rank(torch.randn(32, 16).bfloat16(), 0, 2, 64, logits_dtype=torch.float32)
    workspace, hidden = make_workspace(head, 3), torch.randn(3, 16).bfloat16()
    held = workspace.num_bytes
    logits = compute_logits(hidden, head, workspace)
    torch.testing.assert_close(logits, hidden.float() @ head.weight.float().T)
    assert workspace.num_bytes == held
    assert compute_logits(hidden[:2], head, workspace).data_ptr() == logits.data_ptr()


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
        assert_reference(sample(case.hidden, head, case.params, screen=screen, table=table).token_ids, case)
        assert launched.pop() == config


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["truncate", "edit+truncate"])
def test_a_truncated_batch_is_screened_where_every_such_row_is_known_to_have_a_small_top_k(device, launched, kind):
    case = example(device, KIND_NAMES[kind], rows=3)
    table, screen = always_screened(case.head), Screen(case.head, 3)
    small = table.truncation_config.max_small_top_k
    for largest, is_screened in ((small, True), (small + 1, False), (None, False)):
        known = case.with_params(truncation=limits(3, device, top_k=20, top_p=0.9, max_top_k=largest))
        assert_reference(sample(case.hidden, case.head, known.params, table=table, screen=screen).token_ids, known)
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
        options = {"return_logprob": logprob, "screen": screen}
        drawn = sample(case.hidden, head, case.params, table=always_screened(head), **options)
        assert_reference(drawn.token_ids, batch)
        assert not isinstance(launched.pop(), ScreenConfig)
        with pytest.raises(ValueError, match=f"path is 'screened', which cannot serve this batch: {reason}"):
            sample(case.hidden, head, case.params, path="screened", **options)


def test_a_configuration_of_the_screened_path_needs_a_screen_and_gives_no_logprobs(device):
    case = example(device)
    config = default_config_on(HeadTraits.of(case.head), SamplingPath.SCREENED, ROWS, PLAIN)
    for options in ({}, {"screen": Screen(case.head, ROWS), "return_logprob": True}):
        with pytest.raises(ValueError, match="the screened path needs a screen, and returns no logprobs"):
            dispatch.launch(config, case.hidden, case.head, case.params, **options)


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
            with dispatch.on_device_of(types.SimpleNamespace(is_cuda=is_cuda, device=torch.device(name))):
                pass
    assert events == [torch.device("cuda:1"), "left"]
    monkeypatch.setattr(dispatch, "on_device_of", guard)
    monkeypatch.setattr(dispatch, "launch", lambda *arguments, **keywords: events.append("launched"))
    monkeypatch.setattr(api, "sample_logits", lambda *arguments, **keywords: events.append("launched"))
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
            drawn = sample(case.hidden, case.head, case.params, path=path, screen=screen)
        assert drawn.token_ids.device.index == index and torch.cuda.current_device() == 0
        assert_reference(drawn.token_ids, case)
