"""Hot sets, ``flashsample-hot/1``: how often a model's traffic draws each group of ids, as JSON.

Drawn tokens are Zipf-like: a small part of the vocabulary carries most of the probability (SIMPLE, arXiv 2512.00719,
section 5.3). The unit of a hot set is the group of ``GROUP_SIZE`` ids that share one noise value (``kernels/rng.py``).
A token is drawn with the probability that the paper's hit ratio adds up (section 5.4), so the share of the drawn tokens
that are in the first H groups is an estimate of its average; a little high where few tokens have ranked the groups,
which ``unseen`` tells.

A file is data from elsewhere, read as tuned tables are: everything is checked and bounded, and what is wrong is named
in one line. It says what is fast, never which token is drawn. Reading one needs no torch.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from .bounded_json import BoundedError, Reader, parse, shorten
from .files import read_plain
from .kernels.rng import GROUP_SIZE

SCHEMA = "flashsample-hot/1"
MAX_BYTES = 4 << 20
MAX_VOCAB = 1 << 21
MAX_TOKENS = 1 << 53  # up to here, shares of all tokens are exact as floats
ROW = 64  # groups per line of a file
DIGITS = 6  # of the shares in a file


class HotSetError(ValueError):
    """A hot set that cannot be used; the message is one line that names what is wrong."""


@dataclasses.dataclass(frozen=True)
class HotSet:
    """How often tokens of each group were drawn.

    vocab: V, ids of the whole vocabulary, not of a shard. counts: tokens per group, ceil(V / GROUP_SIZE) of them. name:
    of the model or tokenizer, "" where unknown. source: what was counted, in words. by_token: for some numbers of ids,
    the share of the tokens that as many most frequent *ids* cover: what grouping them costs. notes: what was ignored
    while reading. Raises HotSetError for counts that do not fit V, and where nothing was counted.
    """

    vocab: int
    counts: tuple[int, ...]
    name: str = ""
    source: str = ""
    by_token: dict[int, float] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.vocab <= MAX_VOCAB:
            raise HotSetError(f"vocab is {self.vocab}; expected 1 to {MAX_VOCAB}")
        if len(self.counts) != groups_of(self.vocab):
            raise HotSetError(
                f"counts are of {len(self.counts)} groups; expected {groups_of(self.vocab)} for {self.vocab} ids"
            )
        if min(self.counts) < 0:
            raise HotSetError(f"a count is {min(self.counts)}; expected 0 or more")
        if not 1 <= self.counted <= MAX_TOKENS:
            raise HotSetError(f"counts add up to {self.counted} tokens; expected 1 to {MAX_TOKENS}")

    @classmethod
    def of_tokens(cls, tokens: Mapping[int, int], vocab: int, name: str = "", source: str = "") -> HotSet:
        """From how often each id was drawn. Raises HotSetError for an id outside of the vocabulary."""
        counts = [0] * groups_of(vocab)
        for token, count in tokens.items():
            if not 0 <= token < vocab:
                raise HotSetError(f"the id {token} was drawn; expected 0 to {vocab - 1}")
            counts[token // GROUP_SIZE] += count
        by_token = shares(sorted(tokens.values(), reverse=True), token_sizes(vocab))
        return cls(vocab, tuple(counts), name, source, by_token)

    @functools.cached_property
    def counted(self) -> int:
        """Tokens."""
        return sum(self.counts)

    @property
    def num_groups(self) -> int:
        """Of the vocabulary."""
        return len(self.counts)

    @functools.cached_property
    def seen(self) -> int:
        """Groups of which a token was drawn."""
        return sum(count > 0 for count in self.counts)

    @property
    def unseen(self) -> float:
        """An estimate of the share of further tokens whose group has not been drawn yet: groups drawn once over tokens
        (Good 1953), with one more such group, so that few tokens do not pass for all. Where it is not small, more has
        to be counted."""
        return min(1.0, (self.counts.count(1) + 1) / self.counted)

    @functools.cached_property
    def ranked(self) -> tuple[int, ...]:
        """All groups, the most frequent first; of equals, the lower id first."""
        return tuple(sorted(range(self.num_groups), key=lambda group: (-self.counts[group], group)))

    @functools.cached_property
    def _cumulative(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.counts[group] for group in self.ranked))

    def first(self, num_groups: int) -> tuple[int, ...]:
        """The ``num_groups`` most frequent groups, in that order. Raises ValueError."""
        return self.ranked[: self._checked(num_groups)]

    def coverage(self, num_groups: int) -> float:
        """The hit curve: which share of the tokens fell in the ``num_groups`` most frequent groups. Raises
        ValueError."""
        return self._cumulative[self._checked(num_groups)] / self.counted

    def groups_for(self, coverage: float) -> int:
        """The fewest groups that cover this share of the tokens. Raises ValueError."""
        if not 0.0 <= coverage <= 1.0:
            raise ValueError(f"coverage is {coverage}; expected a share from 0 to 1")
        return bisect.bisect_left(self._cumulative, coverage * self.counted)

    def _checked(self, num_groups: int) -> int:
        if type(num_groups) is not int or not 0 <= num_groups <= self.num_groups:
            raise ValueError(f"num_groups is {num_groups!r}; expected an integer from 0 to {self.num_groups}")
        return num_groups

    def plus(self, other: HotSet) -> HotSet:
        """What both have counted together. Raises HotSetError for sets of different vocabularies."""
        if self.vocab != other.vocab:
            raise HotSetError(f"one is of {self.vocab} ids, the other of {other.vocab}")
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        sources = dict.fromkeys(filter(None, (*self.source.split(" + "), *other.source.split(" + "))))
        # The single ids are not known any more.
        return HotSet(self.vocab, counts, self.name or other.name, shorten(" + ".join(sources), 300))

    @functools.cached_property
    def digest(self) -> str:
        """Names the counts, and so every hot set that can be taken from them: "sha256:..."."""
        text = f"{self.vocab} {GROUP_SIZE} {' '.join(map(str, self.counts))}"
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    @classmethod
    def loads(cls, text: str) -> HotSet:
        """The hot set that ``text`` holds. Raises HotSetError."""
        try:
            return _HotSetReader().hot_set(parse(text, MAX_BYTES))
        except BoundedError as error:
            raise HotSetError(str(error)) from None

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> HotSet:
        """The hot set in ``file``. Raises HotSetError, whatever is wrong with it."""
        try:
            return cls.loads(read_plain(file, MAX_BYTES))
        except (BoundedError, HotSetError) as error:
            raise HotSetError(f"{shorten(str(file), 300)}: {error}") from None

    def dumps(self) -> str:
        """The set's one text: keys sorted, the counts of ``ROW`` groups on a line, in the order of their ids. Raises
        HotSetError where ``loads`` would."""
        text = self._text()
        HotSet.loads(text)
        return text

    def _text(self) -> str:
        fields = {
            "by_token": {str(ids): round(share, DIGITS) for ids, share in sorted(self.by_token.items())},
            "counted": self.counted,
            "digest": self.digest,
            "group_size": GROUP_SIZE,
            "name": self.name,
            "schema": SCHEMA,
            "source": self.source,
            "vocab": self.vocab,
        }
        rows = [f"    {list(self.counts[at : at + ROW])}" for at in range(0, self.num_groups, ROW)]
        texts = {name: json.dumps(value, ensure_ascii=False) for name, value in fields.items()}
        texts["counts"] = "[\n" + ",\n".join(rows) + "\n  ]"
        return "{\n" + ",\n".join(f'  "{name}": {texts[name]}' for name in sorted(texts)) + "\n}\n"


def groups_of(vocab: int) -> int:
    return -(-vocab // GROUP_SIZE)


def token_sizes(vocab: int) -> tuple[int, ...]:
    """The numbers of ids at which coverage is reported: 256, 512, 1024, ... below V, each a whole number of groups."""
    doubled = (256 << step for step in range(MAX_VOCAB.bit_length()))
    return tuple(itertools.takewhile(lambda size: size < vocab, doubled))


def shares(descending: list[int], sizes: tuple[int, ...]) -> dict[int, float]:
    """Per size, which share of all the counts the first so many of them are."""
    cumulative = (0, *itertools.accumulate(descending))
    total = cumulative[-1] or 1
    return {size: round(cumulative[min(size, len(descending))] / total, DIGITS) for size in sizes}


class _HotSetReader(Reader):
    def hot_set(self, data: Any) -> HotSet:
        top = self.object("the hot set", data)
        schema = top.pop("schema", None)
        if not isinstance(schema, str) or not re.fullmatch(rf"{SCHEMA}(\.[0-9]{{1,3}})?", schema):
            self.fail("schema", schema, repr(SCHEMA))
        size = self.required(top, "group_size")
        if type(size) is not int or size != GROUP_SIZE:
            self.fail("group_size", size, f"{GROUP_SIZE}, the ids that share one noise value in this release")
        vocab = self.integer("vocab", self.required(top, "vocab"), 1, MAX_VOCAB)
        counts = self.counts(self.required(top, "counts"), groups_of(vocab))
        counted = self.integer("counted", self.required(top, "counted"), 1, MAX_TOKENS)
        if counted != sum(counts):
            self.fail("counted", counted, f"{sum(counts)}, the sum of its counts")
        digest = self.required(top, "digest")
        found = HotSet(
            vocab,
            counts,
            self.text("name", top.pop("name", "")),
            self.text("source", top.pop("source", "")),
            {
                self.size(ids, vocab): self.number(f"by_token.{ids}", share, 0.0, 1.0)
                for ids, share in self.object("by_token", top.pop("by_token", {})).items()
            },
        )
        if digest != found.digest:
            self.fail("digest", digest, f"{found.digest}, that of its counts: it is damaged, or was changed by hand")
        self.rest("", top)
        return dataclasses.replace(found, notes=tuple(self.notes))

    def counts(self, data: Any, groups: int) -> tuple[int, ...]:
        """Their place says which group they are of: none can be there twice, or lie outside of the vocabulary."""
        rows = self.list("counts", data)
        if len(rows) != -(-groups // ROW):
            raise BoundedError(f"counts has {len(rows)} rows; expected {-(-groups // ROW)}")
        found: list[int] = []
        for place, row in enumerate(rows):
            where, expected = f"counts[{place}]", min(ROW, groups - ROW * place)
            if len(self.list(where, row)) != expected:
                raise BoundedError(f"{where} has {len(row)} counts; expected {expected}")
            found += [self.integer(f"{where}[]", count, 0, MAX_TOKENS) for count in row]
        return tuple(found)

    def size(self, name: str, vocab: int) -> int:
        if not re.fullmatch("[1-9][0-9]{0,6}", name) or int(name) > vocab:
            self.fail("a key of by_token", name, f"a number of ids from 1 to {vocab}")
        return int(name)
