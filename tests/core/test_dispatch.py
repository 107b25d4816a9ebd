"""Which configuration a batch takes."""

from __future__ import annotations

import pytest
import torch
from core_examples import (
    LONG,
    ON_PATH,
    READ,
    SCREEN,
    SCREENED,
    TILE,
    TURNS,
    UNSCREENED,
    VOCAB,
    WIDE,
    example,
    table_of,
)

from sgl_flashsample import LMHead
from sgl_flashsample.defaults import HeadTraits, default_config, default_config_on
from sgl_flashsample.dispatch import DENSE_ROWS, DispatchTable
from sgl_flashsample.kernels.config import ScreenConfig
from sgl_flashsample.kinds import BATCH_KINDS, CONFIGS, KIND_NAMES, PLAIN, path_of

GREEDY, TRUNCATE, EDIT = (KIND_NAMES[name] for name in ("greedy", "truncate", "edit"))
H200 = HeadTraits("sm90", 2, 151_936, 2048)  # built-in choices with screens, and without them for some batches


@pytest.fixture
def head(device):
    return example(device).head


# Answers of a table.


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
    for name, rows, asked in [
        ("greedy", 1, "greedy"),
        ("greedy", 30, "greedy plain"),
        ("plain+screen", 1, "plain+screen"),
        ("greedy+screen", 17, "greedy+screen greedy plain"),
        ("greedy+screen", 64, "greedy+screen greedy"),
        ("greedy", DENSE_ROWS + 1, "greedy"),
    ]:
        assert " ".join(map(str, table.choice(rows, kinds[name]).asked)) == asked, (name, rows)
    assert table.without_screen().choice(17, kinds["greedy+screen"]).asked == (GREEDY, PLAIN)


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
