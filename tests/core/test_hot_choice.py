"""Which ids are drafted, by the tokens that requests get: no torch, no server, no clock."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_flashsample.hot_choice import GIVEN_UP, HALVING, MOST_MISSED, SMALL_WINDOW, WINDOW, WORTH, HotChoice, Verdict

VOCAB, SIZE, TOKENS = 1000, 100, 500  # ids, those of a set, and tokens of a window
FIRST, OTHER = range(800, 900), range(600, 700)  # the ids of two kinds of traffic, each as many as a set has


@pytest.fixture
def choice() -> HotChoice:
    return HotChoice(VOCAB, SIZE, TOKENS)


def window(ids: range, missing: float = 0.0, seen: int = 0) -> np.ndarray:
    """Tokens of one window: each of ``ids`` equally often, but for a share that has ids which no window had before.
    seen: how many windows had such ids."""
    rare = np.setdiff1d(np.arange(100, 600), ids)
    count = round(missing * TOKENS)
    return np.concatenate([np.resize(np.array(ids), TOKENS - count), np.roll(rare, -seen * count)[:count]])


def verdicts(changes: list) -> list[Verdict]:
    return [change.verdict for change in changes]


def adopted(choice: HotChoice) -> HotChoice:
    changes = choice.add(np.concatenate([window(FIRST), window(FIRST)]))
    assert verdicts(changes) == [Verdict.ADOPTED]
    return choice


def test_a_set_is_adopted_at_the_end_of_the_first_window_that_ids_counted_before_cover(choice):
    assert choice.add(window(FIRST)) == []
    assert choice.add(window(FIRST)[:-1]) == [], "the window is not over"
    (change,) = choice.add(window(FIRST)[-1:])
    assert change.verdict is Verdict.ADOPTED and (change.covers, change.before) == (1.0, None)
    assert change.token_ids.tolist() == list(FIRST) and change.token_ids.dtype == np.int64


def test_the_lowest_ids_are_the_first_candidate(choice):
    """Tokenizers give them to what is frequent."""
    (change,) = choice.add(window(range(SIZE)))
    assert change.verdict is Verdict.ADOPTED


def test_a_set_is_never_judged_by_the_tokens_that_it_was_made_from(choice):
    """Each window has ids that no earlier one had: any set covers what it was made from, and nothing more."""
    for start in range(100, 1000, SIZE):
        assert choice.add(window(range(start, start + SIZE))) == []


def test_ids_of_the_last_window_are_in_the_new_set(choice):
    """7 ids of the second window are new, each of one token; the set has room for them."""
    choice.add(window(range(800, 893)))
    second = np.concatenate([np.resize(np.arange(800, 893), 493), np.arange(893, 900)])
    (change,) = choice.add(second)
    assert change.token_ids.tolist() == list(range(800, 900)) and change.covers == 0.986


MARGIN = 1 / TOKENS


@pytest.mark.parametrize(
    "missed_by_candidate, missed_in_use, verdict",
    [
        (MOST_MISSED, None, Verdict.ADOPTED),
        (MOST_MISSED + MARGIN, None, None),
        (GIVEN_UP, GIVEN_UP, None),
        (GIVEN_UP, GIVEN_UP + MARGIN, Verdict.GIVEN_UP),
        (MOST_MISSED + MARGIN, 0.9, Verdict.GIVEN_UP),
        (MOST_MISSED, GIVEN_UP + MARGIN, Verdict.RENEWED),
        (0.01, 0.01 + WORTH + MARGIN, Verdict.RENEWED),
        (0.01, 0.01 + WORTH - MARGIN, None),
        (0.01, 0.005, None),
    ],
)
def test_what_becomes_of_a_set_by_what_it_and_a_candidate_miss(missed_by_candidate, missed_in_use, verdict):
    before = None if missed_in_use is None else 1 - missed_in_use
    assert HotChoice._verdict(1 - missed_by_candidate, before) is verdict


def test_a_set_stays_while_its_traffic_does(choice):
    assert adopted(choice).add(np.tile(window(FIRST), 50)) == []


def test_a_set_is_renewed_when_the_traffic_changes_to_ids_that_counts_cover_by_then(choice):
    """At the second window of the other traffic: at the first one, nothing covers it."""
    both = np.concatenate([window(FIRST)[:250], window(OTHER)[:250]])
    adopted(choice)
    assert verdicts(choice.add(both)) == [Verdict.GIVEN_UP]
    changes = choice.add(np.tile(window(OTHER), 3 * HALVING))
    assert verdicts(changes)[0] is Verdict.ADOPTED and set(verdicts(changes[1:])) <= {Verdict.RENEWED}
    assert changes[-1].token_ids.tolist() == list(OTHER)
    assert choice.add(np.tile(window(OTHER), 10)) == []


def test_a_set_whose_ids_fade_is_renewed_from_what_takes_their_place(choice):
    """A hundredth of the tokens more at each window: counts follow, and drafts are never given up."""
    assert verdicts(choice.add(np.tile(window(range(800, 850)), 2))) == [Verdict.ADOPTED]
    found = []
    for share in range(5, 501, 5):
        found += choice.add(np.concatenate([window(range(800, 850))[share:], window(range(600, 650))[:share]]))
    assert set(verdicts(found)) == {Verdict.RENEWED} and found[-1].token_ids[:50].tolist() == list(range(600, 650))
    assert all(change.covers > change.before for change in found)


def test_a_set_is_given_up_when_no_set_covers_the_traffic_and_adopted_when_one_does_again(choice):
    adopted(choice)
    assert choice.add(window(FIRST, 0.02)) == []
    (change,) = choice.add(window(FIRST, 0.03, seen=1))
    assert change.verdict is Verdict.GIVEN_UP and change.token_ids is None
    assert change.covers == pytest.approx(0.97) and change.before == pytest.approx(0.97)
    assert choice.add(window(FIRST, 0.018, seen=2)) == [], "too close to be adopted"
    assert verdicts(choice.add(window(FIRST))) == [Verdict.ADOPTED]


def test_two_kinds_of_traffic_in_turn_have_a_set_of_both(choice):
    """As many windows as it takes to see both."""
    narrow = window(range(800, 850)), window(range(600, 650))
    changes = choice.add(np.concatenate([narrow[place % 2] for place in range(60)]))
    assert verdicts(changes)[-1] is Verdict.ADOPTED
    assert changes[-1].token_ids.tolist() == [*range(600, 650), *range(800, 850)]
    assert choice.add(np.concatenate(narrow * 20)) == []


def test_traffic_of_a_month_does_not_outweigh_that_of_now(choice):
    """Twice ``HALVING`` windows later the new ids are the set, however long the old ones came."""
    choice.add(np.tile(window(FIRST), 1000))
    changes = choice.add(np.tile(window(OTHER), 2 * HALVING))
    assert changes[-1].token_ids.tolist() == list(OTHER)


@pytest.mark.parametrize("block", [1, 7, TOKENS, 3 * TOKENS + 1])
def test_changes_do_not_depend_on_the_blocks_in_which_tokens_come(choice, block):
    parts = [FIRST, FIRST, OTHER, *[range(SIZE)] * 9, FIRST]
    tokens = np.concatenate([window(part) for part in parts])
    found = [change for start in range(0, len(tokens), block) for change in choice.add(tokens[start : start + block])]
    whole = HotChoice(VOCAB, SIZE, TOKENS).add(tokens)
    assert len(whole) == 4 and list(map(repr, found)) == list(map(repr, whole))


def test_a_small_vocabulary_has_small_windows():
    assert HotChoice(151_936, 22_800).window == WINDOW == HotChoice(SMALL_WINDOW * WINDOW, 16).window
    assert (HotChoice(1024, 160).window, HotChoice(5, 5).window) == (128, 1)


def test_a_set_of_zipf_like_tokens_is_adopted_within_a_few_windows_and_improves_as_more_are_counted():
    """32,768 ids, of which the set has 15 %: at best it covers 99.9 %."""
    generator = np.random.default_rng(1)
    shares, names = 1 / np.arange(1, 32_769) ** 1.7, generator.permutation(32_768)
    choice = HotChoice(32_768, 4_928)
    found = []
    for place in range(60):
        tokens = names[generator.choice(32_768, choice.window, p=shares / shares.sum())]
        found += [(place, *change) for change in choice.add(tokens)]
    places, kinds, _, covers, _ = zip(*found, strict=True)
    assert places[0] < 5 and 2 <= len(kinds) <= 6
    assert kinds == (Verdict.ADOPTED, *[Verdict.RENEWED] * (len(kinds) - 1))
    assert covers[-1] > covers[0] + 0.005
