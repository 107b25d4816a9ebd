"""Token counts: added up as counted, one text for one count, one line for each fault of a file."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_flashsample.files import BadFileError
from sgl_flashsample.hot_vocab import LINE_IDS, MAX_BYTES, MAX_TOKENS, HotVocab

V = 50257


def zipf_counts(vocab: int, seed: int = 0) -> np.ndarray:
    """``[V]``, counts that fall as 1 / rank, of ids in random order."""
    return 10 * vocab // (1 + np.random.default_rng(seed).permutation(vocab))


IDS = zipf_counts(V)
replace = msgspec.structs.replace
COUNTS = HotVocab.of_ids(IDS, "a model", "text: a.txt")
TEXT = COUNTS.dumps()
SMALL = HotVocab.of_ids(zipf_counts(1100), "m", "server").dumps()


def same(a: HotVocab, b: HotVocab) -> bool:
    return (a.digest, a.name, a.source) == (b.digest, b.name, b.source)


def changed(place: str, value: Any, text: str = TEXT) -> str:
    """The file's text with ``value`` at ``place``, a dotted path; ``...`` takes the entry away."""
    data = json.loads(text)
    *parents, last = place.split(".")
    at = data
    for name in parents:
        at = at[int(name)] if isinstance(at, list) else at[name]
    if value is ...:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return json.dumps(data)


# --- counts and their summary


@pytest.mark.parametrize("vocab", [1, 255, 257, 50257, 151936])
def test_every_id_is_counted_also_in_a_ragged_last_line(vocab):
    ids = np.zeros(vocab, dtype=np.int64)
    for count, token in ((3, 0), (5, vocab // 2), (7, vocab - 1)):
        ids[token] = count
    counts = HotVocab.loads(HotVocab.of_ids(ids).dumps())
    assert np.array_equal(counts.ids, ids) and counts.counted == ids.sum()
    assert counts.summary()["ids_seen"] == np.count_nonzero(ids)


def test_coverage_is_the_share_of_the_tokens_of_the_most_frequent_ids():
    covered = np.cumsum(np.sort(IDS)[::-1]) / IDS.sum()
    rows = COUNTS.summary()["coverage"]
    assert [row["ids"] for row in rows] == [256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
    for row in rows:
        assert row["covers"] == pytest.approx(covered[row["ids"] - 1], rel=1e-12)
    assert [row["ids"] for row in HotVocab.of_ids(np.ones(512, dtype=np.int64)).summary()["coverage"]] == [256]


def test_the_share_of_unseen_ids_is_estimated_from_the_ids_seen_once():
    """The estimate is near the true share of the ids without a drawn token."""
    weights = 1 / np.arange(1, 2001)
    weights /= weights.sum()
    drawn = np.random.default_rng(1).choice(2000, 5000, p=weights)
    counts = HotVocab.of_ids(np.bincount(drawn, minlength=2000))
    missing = weights[counts.ids == 0].sum()
    assert missing > 0.03
    assert counts.summary()["unseen"] == pytest.approx(missing, rel=0.15)
    for tokens, least in ((3, 0.3), (1, 1.0)):  # few tokens prove little
        assert HotVocab.of_ids(np.bincount([0] * tokens, minlength=100)).summary()["unseen"] >= least
    for tokens, share in (([0], "100"), ([0] * 3, "33"), ([0] * 800, "0.12")):
        line = f"at most about {share} % of further tokens have other ids"
        assert line in HotVocab.of_ids(np.bincount(tokens, minlength=100)).lines()


def test_the_most_frequent_ids_are_ascending_and_the_lowest_of_equally_frequent_ones():
    counts = HotVocab.of_ids(np.array([0, 4, 9, 4, 0, 4, 7]))
    for number, ids in ((1, [2]), (2, [2, 6]), (3, [1, 2, 6]), (4, [1, 2, 3, 6]), (6, [0, 1, 2, 3, 5, 6])):
        assert counts.most_frequent(number).tolist() == ids
    for number in (0, 8):
        with pytest.raises(ValueError, match=f"the number of ids is {number}; expected 1 to 7"):
            counts.most_frequent(number)


def test_counts_add_up_with_their_sources_and_only_of_one_vocabulary():
    other = HotVocab.of_ids(np.bincount([5, 5, 50256], minlength=V), "another", "server")
    both = COUNTS.plus(other)
    assert np.array_equal(both.ids, COUNTS.ids + other.ids)
    assert (both.name, both.source) == ("a model", "text: a.txt + server")
    assert both.plus(other).source == both.source, "each source once"
    assert HotVocab.loads(both.dumps()).digest == both.digest
    many = both
    for place in range(60):
        many = many.plus(replace(other, source=f"a long name of a file, number {place}"))
    assert HotVocab.loads(many.dumps()).source.endswith("...")
    with pytest.raises(BadFileError, match="one is of 50257 ids, the other of 50258"):
        COUNTS.plus(HotVocab.of_ids(np.append(IDS, 1)))


# --- its file


def test_what_is_written_is_read_back_and_written_the_same():
    assert same(HotVocab.loads(TEXT), COUNTS) and HotVocab.loads(TEXT).notes == []
    assert HotVocab.loads(TEXT).dumps() == TEXT
    backwards = dict(reversed(json.loads(TEXT).items()))
    assert HotVocab.loads(json.dumps(backwards)).dumps() == TEXT


def test_a_changed_count_changes_the_line_of_its_id_and_the_digest_and_empty_lines_are_left_out():
    ids = IDS.copy()
    ids[3 * LINE_IDS + 5] += 1
    other = HotVocab.of_ids(ids, COUNTS.name, COUNTS.source).dumps()
    lines = [a.split('"')[1] for a, b in zip(TEXT.splitlines(), other.splitlines(), strict=True) if a != b]
    assert lines == ["counted", "digest", str(3 * LINE_IDS)]
    one = HotVocab.of_ids(np.bincount([5 * LINE_IDS + 17], minlength=V))
    assert list(json.loads(one.dumps())["counts"]) == [str(5 * LINE_IDS)]
    assert HotVocab.of_ids(IDS).digest == COUNTS.digest
    assert HotVocab.of_ids(np.roll(IDS, 1)).digest != COUNTS.digest


def test_a_field_of_a_later_release_is_ignored_with_a_note():
    later = HotVocab.loads(changed("bigrams", [1, 2]))
    assert same(later, COUNTS)
    assert later.notes == ["bigrams is not known to this release and is ignored"]
    assert HotVocab.loads(later.dumps()).notes == []
    assert same(HotVocab.loads(changed("schema", "flashsample-hot/3.7")), COUNTS)


@pytest.mark.parametrize(
    "place, value, message",
    [
        ("schema", "flashsample-hot/2", "schema is 'flashsample-hot/2'; expected 'flashsample-hot/3'"),
        ("schema", "flashsample-hot/30", "Expected `str` matching regex '^flashsample-hot/3"),
        ("schema", ..., "schema is None; expected 'flashsample-hot/3'"),
        ("vocab", 0, "Expected `int` >= 1 - at `$.vocab`"),
        ("vocab", 50200, "counts.50176 has 81 counts; expected 24, and a first id that is a multiple of 256"),
        ("counts.3072", [1], "counts.3072 has 1 counts; expected 256"),
        ("counts.3073", [1] * 256, "counts.3073 has 256 counts; expected 256, and a first id"),
        ("counts.1048576", [1] * 256, "counts.1048576 has 256 counts; expected 0"),
        ("counts.03072", [1] * 256, "Expected `int`, got `str` - at `key` in `$.counts`"),
        ("counts.3072.5", -1, "Expected `int` >= 0"),
        ("counts.3072.5", 0.5, "Expected `int`, got `float`"),
        ("counts.3072.5", 1 << 60, "Expected `int` <= 9007199254740991"),
        ("counted", 5, "counted and digest are not those of its counts"),
        ("digest", "sha256:0", "it is damaged, or was changed by hand"),
        ("name", "two\nlines", "a name is 'two\\nlines'; expected printable characters"),
        ("source", "x" * 301, "Expected `str` of length <= 300 - at `$.source`"),
    ],
)
def test_whatever_is_wrong_is_named_in_one_line(place, value, message):
    with pytest.raises(BadFileError) as caught:
        HotVocab.loads(changed(place, value))
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "wrong",
    [
        replace(COUNTS, name="two\nlines"),
        replace(COUNTS, source="x" * 301),
        HotVocab.of_ids(np.array([], dtype=np.int64)),
        replace(COUNTS, counts={0: [1, 2]}),
        HotVocab.of_ids(np.array([5, -1])),
        HotVocab.of_ids(np.array([0, 0])),
        HotVocab.of_ids(np.array([MAX_TOKENS, 1])),
    ],
)
def test_counts_that_could_not_be_read_back_are_not_written(wrong):
    with pytest.raises(BadFileError):
        wrong.dumps()


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    good, long, binary = (tmp_path / name for name in ("good", "long", "binary"))
    good.write_text(TEXT)
    long.write_text(" " * (MAX_BYTES + 1))
    binary.write_bytes(b"{\xff}")
    assert same(HotVocab.load(good), COUNTS)
    for file, message in (
        (tmp_path / "nothing", "No such file or directory"),
        (tmp_path, "it is not a plain file"),
        (long, f"it has {MAX_BYTES + 1} bytes; expected {MAX_BYTES} or fewer"),
        (binary, "it is not UTF-8 text (byte 1)"),
    ):
        with pytest.raises(BadFileError) as caught:
            HotVocab.load(file)
        assert str(caught.value) == f"{file}: {message}"


def in_bounds(text: str) -> bool:
    """True if ``text`` is read. Counts that are read are within the stated bounds; a refusal has one line with the
    reason."""
    try:
        counts = HotVocab.loads(text)
    except BadFileError as error:
        assert str(error).isprintable() and 0 < len(str(error)) < 700
        return False
    assert len(counts.ids) == counts.vocab and counts.ids.sum() == counts.counted >= 1
    assert 0 <= counts.summary()["unseen"] <= 1 and all(line.isprintable() for line in counts.lines())
    assert same(HotVocab.loads(counts.dumps()), counts)
    return True


def signed(data: Any) -> str:
    """With the sum and the digest of the changed counts, where they have one."""
    try:
        ids = np.zeros(data["vocab"], dtype=np.int64)
        for first, line in data["counts"].items():
            ids[int(first) : int(first) + len(line)] = line
        counts = HotVocab.of_ids(ids)
        data |= {"counted": counts.counted, "digest": counts.digest}
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, MemoryError):
        pass
    return json.dumps(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False) | st.text(max_size=400),
    lambda inner: st.lists(inner, max_size=70) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=80,
)
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(st.lists(st.tuples(st.integers(0, len(SMALL.encode()) - 1), st.integers(0, 7)), min_size=1, max_size=20))
def test_flipped_bits_are_noticed_or_harmless(flips):
    data = bytearray(SMALL.encode())
    for place, bit in flips:
        data[place] ^= 1 << bit
    text = data.decode(errors="replace")
    if in_bounds(text):
        assert HotVocab.loads(text).digest == HotVocab.loads(SMALL).digest


@FUZZ
@given(st.sampled_from([*sorted(json.loads(SMALL)), "counts.0", "counts.1024"]), JSON, st.booleans())
def test_a_part_that_is_anything_else_is_refused_or_in_bounds_even_if_signed(place, value, sign):
    text = changed(place, value, SMALL)
    in_bounds(signed(json.loads(text)) if sign else text)


def test_a_text_that_is_not_the_json_of_counts_is_refused_in_one_line():
    for text in ("[]", "\ud800", "[1e999]", '{"counts":' * 5000, TEXT[: len(TEXT) // 2]):
        assert not in_bounds(text)
    assert not in_bounds(TEXT.replace('"vocab"', '"name": "",\n "vocab"')), "a field that is there twice"
