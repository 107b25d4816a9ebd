"""A hot set: ranked and added up as counted, one text for one set, and one line for whatever is wrong in a file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sgl_flashsample.kernels.rng import GROUP_SIZE

from sgl_flashsample.hot_set import MAX_BYTES, MAX_TOKENS, ROW, HotSet, HotSetError, groups_of

V = 50257


def zipf_tokens(vocab: int, seed: int = 0) -> Counter[int]:
    """Counts that fall as 1 / rank, of ids in random order."""
    ids = list(range(vocab))
    random.Random(seed).shuffle(ids)
    return Counter({token: 10 * vocab // (rank + 1) for rank, token in enumerate(ids)})


TOKENS = zipf_tokens(V)
SET = HotSet.of_tokens(TOKENS, V, "a model", "text: a.txt")
TEXT = SET.dumps()


def changed(place: str, value: Any, signed: bool = False) -> str:
    """The file's text with ``value`` at ``place``, a dotted path; ``...`` takes the entry away. signed: with the sum
    and the digest of the changed counts, where they have one."""
    data = json.loads(TEXT)
    *parents, last = place.split(".")
    at = data
    for name in parents:
        at = at[int(name)] if isinstance(at, list) else at[name]
    if value is ...:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return json.dumps(sign(data) if signed else data)


def sign(data: Any) -> Any:
    try:
        counts = tuple(count for row in data["counts"] for count in row)
        data["counted"] = sum(counts)
        data["digest"] = HotSet(data["vocab"], counts).digest
    except (TypeError, ValueError, KeyError, OverflowError):
        pass
    return data


# --- what it says


@pytest.mark.parametrize("vocab", [1, 127, 129, 50257, 151936, 151937])
def test_every_id_is_counted_in_its_group_also_in_a_ragged_last_one(vocab):
    drawn = {0: 3, vocab // 2: 5, vocab - 1: 7}
    drawn = Counter(drawn) if len(drawn) == 3 else Counter({0: 7})
    found = HotSet.of_tokens(drawn, vocab)
    want = Counter()
    for token, count in drawn.items():
        want[token // 16] += count
    assert GROUP_SIZE == 16
    assert found.num_groups == len(found.counts) == -(-vocab // 16)
    assert {group: count for group, count in enumerate(found.counts) if count} == want
    assert found.counted == sum(drawn.values())
    assert found.seen == len(want)


def test_groups_are_ranked_by_their_tokens_and_equals_by_their_id():
    found = HotSet.of_tokens({0: 2, 16: 9, 17: 1, 40: 10, 63: 2}, 100)
    assert found.first(7) == (1, 2, 0, 3, 4, 5, 6)
    assert found.first(2) == (1, 2)
    assert found.first(0) == ()


def test_coverage_is_the_share_of_the_tokens_in_the_first_groups():
    per_group = Counter()
    for token, count in TOKENS.items():
        per_group[token // 16] += count
    ordered = sorted(per_group.values(), reverse=True)
    for groups in (0, 1, 2, 64, 1000, groups_of(V)):
        assert SET.coverage(groups) == sum(ordered[:groups]) / sum(ordered)
        in_these = set(SET.first(groups))
        assert sum(n for token, n in TOKENS.items() if token // 16 in in_these) == sum(ordered[:groups])
    assert SET.coverage(0) == 0 and SET.coverage(SET.num_groups) == 1


def test_the_hit_curve_never_falls_and_bends_down():
    steps = [SET.coverage(h + 1) - SET.coverage(h) for h in range(SET.num_groups)]
    assert min(steps) >= 0
    assert all(later <= earlier + 1e-15 for earlier, later in itertools.pairwise(steps))


def test_groups_for_a_coverage_are_the_fewest():
    for share in (0.0, 0.1, 0.5, 0.95, 1.0):
        groups = SET.groups_for(share)
        assert SET.coverage(groups) >= share
        assert groups == 0 or SET.coverage(groups - 1) < share
    with pytest.raises(ValueError, match=r"coverage is 1\.5; expected a share from 0 to 1"):
        SET.groups_for(1.5)


def test_single_ids_cover_at_least_what_as_many_ids_in_groups_do():
    ordered = sorted(TOKENS.values(), reverse=True)
    assert list(SET.by_token) == [256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
    for size, share in SET.by_token.items():
        assert share == pytest.approx(sum(ordered[:size]) / sum(ordered), abs=1e-6)
        assert share >= SET.coverage(size // 16) - 1e-6


@pytest.mark.parametrize("wrong", [-1, groups_of(V) + 1, 1.0, True, None])
def test_a_number_of_groups_that_the_vocabulary_has_not_is_refused(wrong):
    for method in (SET.first, SET.coverage):
        with pytest.raises(ValueError, match=f"num_groups is {wrong!r}; expected an integer from 0 to {groups_of(V)}"):
            method(wrong)


def test_what_has_not_been_seen_is_estimated_from_what_was_seen_once():
    """Tokens drawn from a known distribution: the estimate is near the true share of the groups that none was of."""
    groups = 2000
    weights = [1 / (rank + 1) for rank in range(groups)]
    drawn = Counter(16 * group for group in random.Random(1).choices(range(groups), weights, k=5000))
    found = HotSet.of_tokens(drawn, 16 * groups)
    missing = sum(weight for group, weight in enumerate(weights) if not found.counts[group]) / sum(weights)
    assert missing > 0.03
    assert found.unseen == pytest.approx(missing, rel=0.15)
    assert HotSet.of_tokens({0: 3}, 100).unseen >= 0.3, "few tokens prove little"
    assert HotSet.of_tokens({0: 1}, 100).unseen == 1.0


def test_two_sets_add_up_as_if_counted_together():
    a, b = zipf_tokens(1000, 1), zipf_tokens(1000, 2)
    one, other = HotSet.of_tokens(a, 1000, "m", "text: a"), HotSet.of_tokens(b, 1000, "", "server")
    both = one.plus(other)
    assert both.counts == HotSet.of_tokens(a + b, 1000).counts
    assert (both.name, both.source, both.by_token) == ("m", "text: a + server", {})
    assert other.plus(other).source == "server"
    with pytest.raises(HotSetError, match="one is of 1000 ids, the other of 50257"):
        one.plus(SET)


@pytest.mark.parametrize(
    "vocab, counts, message",
    [
        (0, (), "vocab is 0; expected 1 to"),
        (33, (1, 2), "counts are of 2 groups; expected 3 for 33 ids"),
        (32, (5, -1), "a count is -1; expected 0 or more"),
        (32, (0, 0), "counts add up to 0 tokens; expected 1 to"),
        (32, (MAX_TOKENS, 1), "counts add up to 9007199254740993 tokens"),
    ],
)
def test_counts_that_do_not_fit_are_refused(vocab, counts, message):
    with pytest.raises(HotSetError, match=message):
        HotSet(vocab, counts)


@pytest.mark.parametrize("token", [-1, 100])
def test_an_id_outside_of_the_vocabulary_is_refused(token):
    with pytest.raises(HotSetError, match=f"the id {token} was drawn; expected 0 to 99"):
        HotSet.of_tokens({3: 1, token: 1}, 100)


# --- its file


def test_what_is_written_is_read_back_and_written_the_same():
    assert HotSet.loads(TEXT) == SET
    assert HotSet.loads(TEXT).dumps() == TEXT
    assert HotSet.loads(TEXT).notes == ()
    backwards = dict(reversed(json.loads(TEXT).items()))
    assert HotSet.loads(json.dumps(backwards)).dumps() == TEXT


def test_keys_are_sorted_and_a_changed_group_changes_its_own_line_the_sum_and_the_digest():
    data = json.loads(TEXT)
    assert list(data) == sorted(data)
    assert all(len(row) == ROW for row in data["counts"][:-1])
    counts = list(SET.counts)
    counts[3 * ROW + 5] += 1
    other = dataclasses.replace(SET, counts=tuple(counts)).dumps()
    pairs = zip(TEXT.splitlines(), other.splitlines(), strict=True)
    assert [a.split('"')[1] if '"' in a else "row" for a, b in pairs if a != b] == ["counted", "row", "digest"]


def test_the_digest_is_of_the_counts_and_not_of_where_they_come_from():
    assert SET.digest.startswith("sha256:") and len(SET.digest) == 71
    assert dataclasses.replace(SET, name="other", source="", by_token={}).digest == SET.digest
    moved = (SET.counts[1], SET.counts[0], *SET.counts[2:])
    assert dataclasses.replace(SET, counts=moved).digest != SET.digest


def test_a_field_of_a_later_release_is_ignored_with_a_note():
    found = HotSet.loads(changed("bigrams", [1, 2]))
    assert found == SET
    assert found.notes == ("bigrams is not known to this release and is ignored",)
    assert HotSet.loads(changed("schema", "flashsample-hot/1.7")) == SET


@pytest.mark.parametrize(
    "place, value, message",
    [
        ("schema", "flashsample-hot/2", "schema is 'flashsample-hot/2'; expected 'flashsample-hot/1'"),
        ("schema", ..., "schema is None; expected 'flashsample-hot/1'"),
        ("group_size", 32, "group_size is 32; expected 16, the ids that share one noise value in this release"),
        ("group_size", True, "group_size is True; expected 16"),
        ("vocab", 0, "vocab is 0; expected an integer from 1 to 2097152"),
        ("vocab", 10**30, "vocab is a huge number; expected an integer from 1 to"),
        ("vocab", 151936, "counts has 50 rows; expected 149"),
        ("vocab", 50241 - 1, "counts[49] has 6 counts; expected 4"),
        ("vocab", ..., "vocab is missing"),
        ("counts", {}, "counts is an object; expected a list"),
        ("counts.3", [1], "counts[3] has 1 counts; expected 64"),
        ("counts.3", 7, "counts[3] is 7; expected a list"),
        ("counts.3.5", -1, "counts[3][] is -1; expected an integer from 0 to"),
        ("counts.3.5", 0.5, "counts[3][] is 0.5; expected an integer from 0 to"),
        ("counts.3.5", 1 << 60, "counts[3][] is a huge number; expected an integer from 0 to 9007199254740992"),
        ("counted", 5, f"counted is 5; expected {SET.counted}, the sum of its counts"),
        ("digest", "sha256:0", f"digest is 'sha256:0'; expected {SET.digest}, that of its counts: it is damaged"),
        ("name", "two\nlines", "name is 'two\\nlines'; expected a text of 0 to 300 printable characters"),
        ("name", 3, "name is 3; expected a text"),
        ("source", "x" * 301, "expected a text of 0 to 300 printable characters"),
        ("by_token", [], "by_token is a list; expected an object"),
        ("by_token.1e3", 0.5, "a key of by_token is '1e3'; expected a number of ids from 1 to 50257"),
        ("by_token.50258", 0.5, "a key of by_token is '50258'; expected a number of ids from 1 to 50257"),
        ("by_token.256", 1.5, "by_token.256 is 1.5; expected a number from 0 to 1"),
    ],
)
def test_whatever_is_wrong_is_named_in_one_line(place, value, message):
    with pytest.raises(HotSetError) as caught:
        HotSet.loads(changed(place, value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_counts_that_have_changed_places_are_noticed():
    row = json.loads(TEXT)["counts"][0]
    assert row[0] != row[1]
    with pytest.raises(HotSetError, match=r"digest is .* it is damaged, or was changed by hand"):
        HotSet.loads(changed("counts.0", [row[1], row[0], *row[2:]]))


def test_a_set_that_could_not_be_read_back_is_not_written():
    for wrong in ({"name": "two\nlines"}, {"source": "x" * 301}, {"by_token": {0: 0.5}}, {"by_token": {1: 2.0}}):
        with pytest.raises(HotSetError):
            dataclasses.replace(SET, **wrong).dumps()


def test_a_file_that_is_none_is_named_and_nothing_is_waited_for(tmp_path):
    good, pipe, long, binary = (tmp_path / name for name in ("good", "pipe", "long", "binary"))
    good.write_text(TEXT)
    os.mkfifo(pipe)
    long.write_text(" " * (MAX_BYTES + 1))
    binary.write_bytes(b"{\xff}")
    assert HotSet.load(good) == SET
    for file, message in (
        (tmp_path / "nothing", "No such file or directory"),
        (tmp_path, "it is not a plain file"),
        (pipe, "it is not a plain file"),
        (long, f"it has {MAX_BYTES + 1} bytes; expected {MAX_BYTES} or fewer"),
        (binary, "it is not UTF-8 text (byte 1)"),
    ):
        with pytest.raises(HotSetError) as caught:
            HotSet.load(file)
        assert str(caught.value) == f"{file}: {message}"


def test_a_hot_set_is_read_without_torch():
    code = "import sys; from sgl_flashsample.hot_set import HotSet; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def in_bounds(text: str) -> bool:
    """Whether ``text`` is read; what is read is as bounded as it claims, and what is not has one line that says why."""
    try:
        found = HotSet.loads(text)
    except HotSetError as error:
        assert str(error).isprintable() and 0 < len(str(error)) < 700
        return False
    assert len(found.counts) == groups_of(found.vocab)
    assert sorted(found.first(found.num_groups)) == list(range(found.num_groups))
    assert 0 <= found.coverage(1) <= found.coverage(found.num_groups) == 1
    assert all(0 <= share <= 1 and 1 <= ids <= found.vocab for ids, share in found.by_token.items())
    assert HotSet.loads(found.dumps()) == found
    return True


SMALL = HotSet.of_tokens(zipf_tokens(1100), 1100, "m", "server").dumps()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False) | st.text(max_size=400),
    lambda inner: st.lists(inner, max_size=70) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=80,
)
FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(st.lists(st.tuples(st.integers(0, len(SMALL.encode()) - 1), st.integers(0, 7)), min_size=1, max_size=20))
def test_flipped_bits_are_noticed_or_harmless(flips):
    data = bytearray(SMALL.encode())
    for place, bit in flips:
        data[place] ^= 1 << bit
    text = data.decode(errors="replace")
    if in_bounds(text):
        assert HotSet.loads(text).counts == HotSet.loads(SMALL).counts


@FUZZ
@given(st.text(max_size=500) | JSON.map(lambda value: json.dumps(value, ensure_ascii=False)))
def test_any_other_text_is_refused_in_one_line(text):
    assert not in_bounds(text)


@FUZZ
@given(st.sampled_from(sorted(json.loads(SMALL))), st.none() | st.integers(0, 1), JSON, st.booleans())
def test_a_part_that_is_anything_else_is_refused_or_in_bounds_even_if_signed(field, row, value, signed):
    data = json.loads(SMALL)
    if field == "counts" and row is not None:
        data["counts"][row] = value
    else:
        data[field] = value
    in_bounds(json.dumps(sign(data) if signed else data))


@FUZZ
@given(st.lists(st.integers(0, 1 << 50), min_size=69, max_size=69), st.integers(1, 1200))
def test_signed_counts_of_any_size_are_read_if_they_fit_the_vocabulary(counts, vocab):
    data = json.loads(SMALL)
    data |= {"vocab": vocab, "counts": [counts[:64], counts[64:]], "by_token": {}}
    fits = groups_of(vocab) == 69 and 0 < sum(counts) <= MAX_TOKENS
    assert in_bounds(json.dumps(sign(data))) == fits


def test_deep_long_and_strange_texts_are_refused_in_one_line():
    for text in ("[" * 100_000, '{"counts":' * 5000, "NaN", '{"a": 1, "a": 2}', "1" * 5000, "\ud800", "", "[1e999]"):
        assert not in_bounds(text)
    assert not in_bounds(TEXT.replace('"vocab"', '"name": "",\n  "vocab"'))
    assert not in_bounds(TEXT[: len(TEXT) // 2])
