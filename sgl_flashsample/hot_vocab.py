"""Token counts: how often the traffic of a model draws each group of ids. Counted from text, from answers, or by a
running server (``sglang/token_counts.py``). Needs no torch.

Drawn tokens are Zipf-like: a small part of the vocabulary carries most of the probability (SIMPLE, arXiv 2512.00719,
section 5.3). Counts are per group of ``GROUP_SIZE`` ids that share one noise value (``kernels/rng.py``). The share of
the drawn tokens in the first H groups estimates the paper's average hit ratio (section 5.4); it is a little too high
where few tokens were counted, which ``unseen`` shows.

A file of counts is data from elsewhere: everything in it is checked and bounded; what is wrong is named in one line.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from .files import BadFileError, one_line, parse_json, read_plain
from .kernels.rng import GROUP_SIZE

SCHEMA = "flashsample-hot/2"
MAX_BYTES = 4 << 20
MAX_VOCAB = 1 << 21
MAX_TOKENS = (1 << 53) - 1  # so that shares of all tokens are exact as float64
LINE_GROUPS = 64  # per line of a file
LINE_IDS = LINE_GROUPS * GROUP_SIZE
MAX_TEXT = 300  # characters of a name

Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class HotVocabError(ValueError):
    """Token counts that cannot be used; the message is one line that names what is wrong."""


class _File(msgspec.Struct, kw_only=True):
    """by_token: number of ids -> share of the tokens that as many of the most frequent single ids cover. counts: first
    id of the line -> tokens drawn from each of its groups; a line without any is left out."""

    schema: Annotated[str, Meta(pattern=rf"^{SCHEMA}(\.[0-9]{{1,3}})?$")]
    vocab: Annotated[int, Meta(ge=1, le=MAX_VOCAB)]
    name: Text = ""
    source: Text = ""
    group_size: int
    counted: Count
    digest: str
    by_token: dict[Annotated[int, Meta(ge=1, le=MAX_VOCAB)], Annotated[float, Meta(ge=0.0, le=1.0)]] = {}
    counts: dict[Annotated[int, Meta(ge=0, le=MAX_VOCAB)], list[Count]]


@dataclasses.dataclass(frozen=True, eq=False)
class HotVocab:
    """How often tokens of each group were drawn.

    vocab: V, ids of the whole vocabulary, not of a shard. counts: ``[G]`` int64, tokens per group. name: of the model
    or tokenizer, "" where unknown. source: what was counted. by_token: for some numbers of ids, the share of the tokens
    that as many of the most frequent single ids cover: compared with ``hits``, it tells what grouping costs. notes:
    what was ignored while reading. Raises HotVocabError for counts that do not fit V, and where nothing was counted.
    """

    vocab: int
    counts: np.ndarray
    name: str = ""
    source: str = ""
    by_token: dict[int, float] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.vocab <= MAX_VOCAB:
            raise HotVocabError(f"vocab is {self.vocab}; expected 1 to {MAX_VOCAB}")
        if len(self.counts) != groups_of(self.vocab):
            raise HotVocabError(f"counts are of {len(self.counts)} groups; expected {groups_of(self.vocab)}")
        if (least := self.counts.min()) < 0:
            raise HotVocabError(f"a count is {least}; expected 0 or more")
        if not 1 <= (total := self.counts.sum(dtype=float)) <= MAX_TOKENS:
            raise HotVocabError(f"{total:.0f} tokens are counted; expected 1 to {MAX_TOKENS}")
        for text in (self.name, self.source):
            if len(text) > MAX_TEXT or not text.isprintable():
                raise HotVocabError(f"a name is {one_line(ascii(text))}; expected {MAX_TEXT} printable characters")

    @classmethod
    def of_ids(cls, id_counts: np.ndarray, name: str = "", source: str = "") -> HotVocab:
        """Counts from ``[V]`` int64, how often each id was drawn."""
        vocab = len(id_counts)
        groups = np.pad(id_counts, (0, -vocab % GROUP_SIZE)).reshape(-1, GROUP_SIZE).sum(1)
        covered = np.cumsum(np.sort(id_counts)[::-1]) / max(1, id_counts.sum())
        by_token = {size: round(float(covered[size - 1]), 6) for size in reported_sizes(vocab)}
        return cls(vocab, groups, one_line(name), one_line(source, MAX_TEXT), by_token)

    @functools.cached_property
    def counted(self) -> int:
        """Number of tokens."""
        return int(self.counts.sum())

    @property
    def num_groups(self) -> int:
        """Groups of the vocabulary."""
        return len(self.counts)

    @property
    def seen(self) -> int:
        """Groups from which a token was drawn."""
        return int(np.count_nonzero(self.counts))

    @property
    def unseen(self) -> float:
        """An estimate of the share of further tokens whose group has not been drawn yet: groups drawn once over tokens
        (Good 1953), with one more such group, so that few tokens do not pass for all. Where it is not small, more has
        to be counted."""
        return min(1.0, (int((self.counts == 1).sum()) + 1) / self.counted)

    @functools.cached_property
    def ranked(self) -> np.ndarray:
        """``[G]`` int64, all groups, the most frequent first; of equals, the lower first."""
        return np.argsort(-self.counts, kind="stable")

    @functools.cached_property
    def hits(self) -> np.ndarray:
        """The hit curve, ``[G + 1]`` float64: the share of the tokens in the H most frequent groups."""
        return np.concatenate([[0], np.cumsum(self.counts[self.ranked])]) / self.counted

    def plus(self, other: HotVocab) -> HotVocab:
        """The sum of both; the shares of single ids are not known any more. Raises HotVocabError for different
        vocabularies."""
        if self.vocab != other.vocab:
            raise HotVocabError(f"one is of {self.vocab} ids, the other of {other.vocab}")
        origins = dict.fromkeys(filter(None, (*self.source.split(" + "), *other.source.split(" + "))))
        source = one_line(" + ".join(origins), MAX_TEXT)
        return HotVocab(self.vocab, self.counts + other.counts, self.name or other.name, source)

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the counts: "sha256:..."."""
        text = f"{self.vocab} {GROUP_SIZE} {' '.join(map(str, self.counts.tolist()))}"
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    @classmethod
    def loads(cls, text: str) -> HotVocab:
        """Counts from the text of a file. Raises HotVocabError."""
        try:
            data = parse_json(text, MAX_BYTES)
            file = msgspec.convert(data, _File, str_keys=True)
        except (BadFileError, msgspec.ValidationError) as error:
            raise HotVocabError(one_line(str(error), MAX_TEXT)) from None
        if file.group_size != GROUP_SIZE:
            raise HotVocabError(f"group_size is {file.group_size}; expected {GROUP_SIZE}, the ids of one noise value")
        counts = np.zeros(groups_of(file.vocab), dtype=np.int64)
        for first, line in file.counts.items():
            groups = counts[first // GROUP_SIZE : first // GROUP_SIZE + LINE_GROUPS]
            if first % LINE_IDS or len(groups) != len(line):
                expected = f"{len(groups)}, and a first id that is a multiple of {LINE_IDS}"
                raise HotVocabError(f"counts.{first} has {len(line)} counts; expected {expected}")
            groups[:] = line
        if beyond := [size for size in file.by_token if size > file.vocab]:
            raise HotVocabError(f"by_token has {beyond[0]} ids; expected {file.vocab} or fewer")
        notes = [f"{one_line(name)} is not known to this release and is ignored" for name in data.keys() - _FIELDS]
        vocab = cls(file.vocab, counts, file.name, file.source, file.by_token, tuple(sorted(notes)[:20]))
        if (file.counted, file.digest) != (vocab.counted, vocab.digest):
            raise HotVocabError(
                f"counted and digest are not those of its counts ({vocab.counted}, {vocab.digest}): "
                "it is damaged, or was changed by hand"
            )
        return vocab

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> HotVocab:
        """Counts from a file. Raises HotVocabError, whatever is wrong with it."""
        try:
            return cls.loads(read_plain(file, MAX_BYTES))
        except (BadFileError, HotVocabError) as error:
            raise HotVocabError(f"{one_line(str(file), 300)}: {error}") from None

    def dumps(self) -> str:
        """The file's one text. Raises HotVocabError where ``loads`` would."""
        lines = {}
        for first in range(0, self.num_groups, LINE_GROUPS):
            line = self.counts[first : first + LINE_GROUPS]
            if line.any():
                lines[first * GROUP_SIZE] = line.tolist()
        fields = {
            "schema": SCHEMA,
            "vocab": self.vocab,
            "name": self.name,
            "source": self.source,
            "group_size": GROUP_SIZE,
            "counted": self.counted,
            "digest": self.digest,
            "by_token": self.by_token,
        }
        text = "".join(f' "{name}": {json.dumps(value, ensure_ascii=False)},\n' for name, value in fields.items())
        rows = ",\n".join(f'  "{first}": {line}' for first, line in lines.items())
        text = f'{{\n{text} "counts": {{\n{rows}\n }}\n}}\n'
        HotVocab.loads(text)
        return text


_FIELDS = {field.name for field in msgspec.structs.fields(_File)}


def groups_of(vocab: int) -> int:
    return -(-vocab // GROUP_SIZE)


def reported_sizes(vocab: int) -> list[int]:
    """The numbers of ids at which coverage is reported: 256, 512, 1024, ... below V, each a whole number of groups."""
    return [256 << doubled for doubled in range(MAX_VOCAB.bit_length()) if 256 << doubled < vocab]


# --- tokens to count

STDIN = "-"
TEXT_BLOCK = 1 << 16  # characters of a text, and the rest of its last line: few tokens span two blocks
BLOCKS_AT_ONCE = 16  # blocks that a tokenizer may work on in parallel
MAX_LINE = 1 << 28  # characters of one line of ids
ID_FIELDS = ("output_ids", "token_ids")
PROGRESS_SECONDS = 5.0

Encode = Callable[[list[str]], list[list[int]]]


def load_tokenizer(name: str) -> tuple[Encode, int]:
    """A function that encodes texts without special tokens, and the number of ids that it knows.

    name: a ``tokenizer.json`` or a folder with one, read by the tokenizers library alone; else whatever transformers'
    AutoTokenizer finds under it. Raises HotVocabError, ImportError.
    """
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            fast: Any = Tokenizer.from_file(str(file))
        else:
            from transformers import AutoTokenizer

            slow = AutoTokenizer.from_pretrained(name)
            fast = getattr(slow, "backend_tokenizer", None)
            if fast is None:
                return lambda texts: [slow.encode(text, add_special_tokens=False) for text in texts], len(slow)
    except ImportError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions, transformers many kinds, some over many lines
        raise HotVocabError(f"--tokenizer {one_line(name)}: {type(error).__name__}: {_words(error)}") from None

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in fast.encode_batch(texts, add_special_tokens=False)]

    return encode, max(fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def ids_of_text(file: str, encode: Encode) -> Iterator[list[int]]:
    """Ids of the tokens of a UTF-8 text, ``STDIN`` or a file. Raises OSError and HotVocabError."""
    with _open(file) as opened:
        blocks = iter(lambda: opened.read(TEXT_BLOCK) + opened.readline(), "")
        while texts := list(itertools.islice(blocks, BLOCKS_AT_ONCE)):
            try:
                yield from encode(texts)
            except Exception as error:
                raise HotVocabError(f"{file}: the tokenizer: {_words(error)}") from None


def ids_of_lines(file: str, vocab: int) -> Iterator[list[int]]:
    """Ids of JSON lines, ``STDIN`` or a file: a line is a list of ids, an answer of SGLang (an object with
    ``output_ids``) or a list of answers. Raises OSError and HotVocabError."""
    with _open(file) as opened:
        for number, line in enumerate(iter(lambda: opened.readline(MAX_LINE + 1), ""), 1):
            try:
                if line.strip():
                    yield _ids_in(parse_json(line, MAX_LINE), vocab)
            except BadFileError as error:
                raise HotVocabError(f"{file}, line {number}: {error}") from None


def count(files: list[str], vocab: int, read: Callable[[str], Iterable[list[int]]]) -> tuple[np.ndarray, bool]:
    """``[V]`` int64, how often each id is in ``files``; and whether an interruption ended the count early. Progress
    goes to the error stream. Raises OSError and HotVocabError."""
    counts, started = np.zeros(vocab, dtype=np.int64), time.monotonic()
    reported = started
    try:
        for file in files:
            try:
                for ids in read(file):
                    np.add.at(counts, np.array(ids, dtype=np.int64), 1)
                    if time.monotonic() - reported >= PROGRESS_SECONDS:
                        reported = time.monotonic()
                        progress = f"{one_line(file)}: {counts.sum():,} tokens"
                        print(f"[{reported - started:6.1f} s] {progress}", file=sys.stderr, flush=True)
            except UnicodeDecodeError:
                raise HotVocabError(f"{file} is not UTF-8 text") from None
    except KeyboardInterrupt:
        return counts, True
    return counts, False


def summary(vocab: HotVocab) -> dict[str, Any]:
    """The counts for a person, as JSON. by_id, by_group: the shares of the tokens that as many single ids, and as many
    ids in whole groups, cover."""
    return {
        "name": vocab.name,
        "source": vocab.source,
        "vocab": vocab.vocab,
        "counted": vocab.counted,
        "groups": vocab.num_groups,
        "groups_seen": vocab.seen,
        "unseen": vocab.unseen,
        "coverage": [
            {
                "ids": size,
                "by_id": vocab.by_token.get(size),
                "groups": size // GROUP_SIZE,
                "by_group": float(vocab.hits[size // GROUP_SIZE]),
            }
            for size in reported_sizes(vocab.vocab)
        ],
        "digest": vocab.digest,
        "notes": list(vocab.notes),
    }


def summary_lines(vocab: HotVocab) -> Iterator[str]:
    """The same for reading."""
    about = ", ".join(filter(None, (vocab.name, vocab.source)))
    yield f"{vocab.counted:,} tokens counted{f' ({about})' if about else ''}"
    yield f"{vocab.seen:,} of {vocab.num_groups:,} groups of {GROUP_SIZE} ids seen (V = {vocab.vocab:,})"
    yield f"at most about {100 * vocab.unseen:.2g} % of further tokens are in other groups"
    yield from (f"note: {note}" for note in vocab.notes)
    yield f"{'ids':>9}  {'single ids cover':>16}  {'groups':>7}  {'groups cover':>12}"
    for row in summary(vocab)["coverage"]:
        by_id = "not known" if row["by_id"] is None else f"{row['by_id']:.2%}"
        yield f"{row['ids']:>9,}  {by_id:>16}  {row['groups']:>7,}  {row['by_group']:>12.2%}"


def _open(file: str) -> IO[str]:
    if file == STDIN:
        if sys.stdin is None:
            raise ValueError("stdin is closed; expected text in it, or files")
        return open(sys.stdin.fileno(), encoding="utf-8", closefd=False)
    return open(file, encoding="utf-8")


def _ids_in(value: Any, vocab: int, inner: bool = False) -> list[int]:
    if isinstance(value, dict):
        name = next((name for name in ID_FIELDS if name in value), None)
        if name is None:
            raise BadFileError(f"an object has no {' or '.join(ID_FIELDS)}")
        value, inner = value[name], True
    if not isinstance(value, list):
        raise BadFileError(f"it is {one_line(repr(value))}; expected a list of ids or an object with {ID_FIELDS[0]}")
    if value and isinstance(value[0], dict | list) and not inner:
        return [token for answer in value for token in _ids_in(answer, vocab, inner=True)]
    for token in value:
        if type(token) is not int or not 0 <= token < vocab:
            raise BadFileError(f"an id is {one_line(repr(token))}; expected an integer from 0 to {vocab - 1}")
    return value


def _words(error: Exception) -> str:
    return one_line(" ".join(str(error).split()), 200)
