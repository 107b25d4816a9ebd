"""The hot vocabulary of a model: how often its traffic draws each group of ids, and how many groups are worth reading
in full. Counted from text, from answers, or by a running server (``sglang/token_counts.py``). Needs no torch.

Drawn tokens are Zipf-like: a small part of the vocabulary carries most of the probability (SIMPLE, arXiv 2512.00719,
section 5.3). Counts are per group of ``GROUP_SIZE`` ids that share one noise value (``kernels/rng.py``). The share of
the drawn tokens in the first H groups estimates the paper's average hit ratio (section 5.4); it is a little too high
where few tokens were counted, which ``unseen`` shows.

A file says what is fast, never which token is drawn. It is data from elsewhere: everything in it is checked and
bounded, and what is wrong is named in one line.
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
    """by_token: number of ids -> share of the tokens that so many of the most frequent single ids cover. counts: first
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
    that so many of the most frequent single ids cover: compared with ``hits``, it tells what grouping costs. notes:
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
        """From ``[V]`` int64, how often each id was drawn."""
        vocab = len(id_counts)
        groups = np.pad(id_counts, (0, -vocab % GROUP_SIZE)).reshape(-1, GROUP_SIZE).sum(1)
        covered = np.cumsum(np.sort(id_counts)[::-1]) / max(1, id_counts.sum())
        by_token = {size: round(float(covered[size - 1]), 6) for size in reported_sizes(vocab)}
        return cls(vocab, groups, one_line(name), one_line(source, MAX_TEXT), by_token)

    @functools.cached_property
    def counted(self) -> int:
        """Tokens."""
        return int(self.counts.sum())

    @property
    def num_groups(self) -> int:
        """Of the vocabulary."""
        return len(self.counts)

    @property
    def seen(self) -> int:
        """Groups of which a token was drawn."""
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
        """What both have counted together; what single ids cover is not known any more. Raises HotVocabError for
        different vocabularies."""
        if self.vocab != other.vocab:
            raise HotVocabError(f"one is of {self.vocab} ids, the other of {other.vocab}")
        origins = dict.fromkeys(filter(None, (*self.source.split(" + "), *other.source.split(" + "))))
        source = one_line(" + ".join(origins), MAX_TEXT)
        return HotVocab(self.vocab, self.counts + other.counts, self.name or other.name, source)

    @functools.cached_property
    def digest(self) -> str:
        """Of the counts: "sha256:..."."""
        text = f"{self.vocab} {GROUP_SIZE} {' '.join(map(str, self.counts.tolist()))}"
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    @classmethod
    def loads(cls, text: str) -> HotVocab:
        """What ``text`` holds. Raises HotVocabError."""
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
        """What ``file`` holds. Raises HotVocabError, whatever is wrong with it."""
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


# --- how many groups to read in full


@dataclasses.dataclass(frozen=True)
class Costs:
    """Microseconds of one step at one batch size, one head and one device.

    hot_us, screened_us: per group that is read in full, that is screened. hit_us, miss_us: the step's rescoring where
    the leaders of all its rows are hot (the bound leaves some groups over all the same), where none is. fixed_us:
    everything else. none_us, all_us: the whole step at H = 0 and at H = G, where measured; None: as the formula says.

    Fitted from noisy times, a coefficient may be negative. Raises ValueError for one that is not finite.
    """

    fixed_us: float
    hot_us: float
    screened_us: float
    hit_us: float
    miss_us: float
    none_us: float | None = None
    all_us: float | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None and not np.isfinite(value):
                raise ValueError(f"{name} is {value}; expected a finite number of microseconds")


@dataclasses.dataclass(frozen=True, eq=False)
class Sizing:
    """What a step costs as a function of H, the groups read in full, and where that is least.

    The model is that of SIMPLE (sections 5.4 and 7.5): a cost that is affine in the work, composed with the hit curve
    a(H). There, the tail is scanned for the rows whose token is not hot, so a(H) weighs two scans (Eq. 10). Here it is
    screened for every row, and a(H) weighs what the screen leaves over: a leader that is hot has its exact score before
    the tail is certified, one that is not has to be rescored first. For G groups:

        F(H) = fixed + hot H + screened (G - H) + hit a(H) + miss (1 - a(H))                     (for Eq. 10)
        F(H + 1) - F(H) = (hot - screened) - (miss - hit) (a(H + 1) - a(H))                      (for Eq. 11)

    a(H + 1) - a(H), the share of the next group, only falls: F is least where that share has come down to
    (hot - screened) / (miss - hit), the first-order condition (for Eq. 12). At H = 0 and H = G a launch is left out, so
    that the formula does not hold: their measured times are compared.

    hits: ``[G + 1]``, a(0) = 0 to a(G) <= 1, as ``HotVocab.hits``.
    """

    costs: Costs
    hits: np.ndarray

    @functools.cached_property
    def formula_us(self) -> np.ndarray:
        """``[G + 1]`` float64, F(H), as if H = 0 and H = G were sizes like any other."""
        hot = np.arange(len(self.hits))
        read = self.costs.hot_us * hot + self.costs.screened_us * hot[::-1]
        return self.costs.fixed_us + read + self.costs.hit_us * self.hits + self.costs.miss_us * (1.0 - self.hits)

    @functools.cached_property
    def us(self) -> np.ndarray:
        """``[G + 1]`` float64, F(H), with what was measured at both ends."""
        us = self.formula_us.copy()
        for place, measured in ((0, self.costs.none_us), (-1, self.costs.all_us)):
            us[place] = us[place] if measured is None else measured
        return us

    def best(self) -> int:
        """The H that costs least; the smallest of equals. For any hit curve."""
        return int(self.us.argmin())


@dataclasses.dataclass(frozen=True)
class Fit:
    """rms_us, worst_us: root mean square and largest size of the model's error at the samples between H = 0 and H = G.
    spare: samples beyond the three that always fit exactly; with none, the errors say nothing."""

    costs: Costs
    rms_us: float
    worst_us: float
    spare: int


def fit(
    samples: Iterable[tuple[int, float]], hits: np.ndarray, *, screened_us: float = 0.0, hit_us: float = 0.0
) -> Fit:
    """Costs by least squares (SIMPLE, section 7.5) from samples (H, microseconds of the step).

    Times of whole steps tell three numbers apart: the cost of making one more group hot, that of a miss beyond a hit,
    and the rest. So ``screened_us`` and ``hit_us`` are what was measured of them alone; left at 0, they are part of
    ``fixed_us``, ``hot_us`` and ``miss_us`` are what is paid beyond them, and every F(H) and optimum is the same.
    Samples at H = 0 and H = G are not fitted: their means become ``none_us`` and ``all_us``.

    Raises ValueError for samples that do not determine the three, and for values out of range.
    """
    num_groups = len(hits) - 1
    sizes, times = np.array(list(samples), dtype=float).reshape(-1, 2).T
    sizes = sizes.astype(int)
    for size, us in zip(sizes, times, strict=True):
        if not 0 <= size <= num_groups:
            raise ValueError(f"samples have H = {size}; expected 0 to {num_groups}")
        if not (np.isfinite(us) and us > 0):
            raise ValueError(f"samples have {us} us at H = {size}; expected a positive number")
    inner = (sizes > 0) & (sizes < num_groups)
    columns = np.stack([np.ones(inner.sum()), sizes[inner], 1.0 - hits[sizes[inner]]], 1)
    lengths = np.linalg.norm(columns, axis=0)  # columns as unlike in size as 1, H and 1 - a(H) are solved at one size
    rank = 0
    if len(columns):
        solved, _, rank, _ = np.linalg.lstsq(
            columns / lengths, times[inner] - screened_us * num_groups - hit_us, rcond=1e-9
        )
    if rank < 3:
        raise ValueError(
            f"samples are of {len(set(sizes[inner]))} sizes between 0 and {num_groups}; expected 3 or more, not all "
            "where the hit curve is straight"
        )
    fixed, slope, drop = (solved / lengths).tolist()
    ends = [float(times[sizes == end].mean()) if end in sizes else None for end in (0, num_groups)]
    costs = Costs(fixed, screened_us + slope, screened_us, hit_us, hit_us + drop, *ends)
    off = np.abs(Sizing(costs, hits).formula_us[sizes[inner]] - times[inner])
    return Fit(costs, float(np.sqrt(np.mean(off**2))), float(off.max()), int(inner.sum()) - 3)


# --- tokens to count

STDIN = "-"
TEXT_BLOCK = 1 << 16  # characters that a tokenizer gets at once: a token never spans two blocks
BLOCKS_AT_ONCE = 16  # that it may work on in parallel
MAX_LINE = 1 << 28  # characters of one line of ids
ID_FIELDS = ("output_ids", "token_ids")

Encode = Callable[[list[str]], list[list[int]]]
Portion = tuple[list[int], int]  # ids, and the bytes of the source that they took


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


def ids_of_text(file: str, encode: Encode) -> Iterator[Portion]:
    """Ids of the tokens of a UTF-8 text, ``STDIN`` or a file. Raises OSError and HotVocabError."""
    with _open(file) as opened:
        blocks = _blocks(opened)
        while texts := list(itertools.islice(blocks, BLOCKS_AT_ONCE)):
            try:
                encoded = encode(texts)
            except Exception as error:
                raise HotVocabError(f"{file}: the tokenizer: {_words(error)}") from None
            yield [token for ids in encoded for token in ids], sum(len(text.encode()) for text in texts)


def ids_of_lines(file: str, vocab: int) -> Iterator[Portion]:
    """Ids of JSON lines, ``STDIN`` or a file: a line is a list of ids, an answer of SGLang (an object with
    ``output_ids``) or a list of answers. Raises OSError and HotVocabError."""
    with _open(file) as opened:
        for number, line in enumerate(iter(lambda: opened.readline(MAX_LINE + 1), ""), 1):
            try:
                if line.strip():
                    yield _ids_in(parse_json(line, MAX_LINE), vocab), len(line.encode())
            except BadFileError as error:
                raise HotVocabError(f"{file}, line {number}: {error}") from None


def count(files: list[str], vocab: int, read: Callable[[str], Iterable[Portion]]) -> tuple[np.ndarray, bool]:
    """``[V]`` int64, how often each id is in ``files``; and whether an interruption ended the count early. Progress
    goes to the error stream. Raises OSError and HotVocabError."""
    sizes = [0 if file == STDIN else os.stat(file).st_size for file in files]
    total = sum(sizes) if all(sizes) else 0
    counts, done, started = np.zeros(vocab, dtype=np.int64), 0, time.monotonic()
    reported = started
    try:
        for file in files:
            try:
                for ids, size in read(file):
                    if ids:
                        np.add.at(counts, ids, 1)
                    done += size
                    if time.monotonic() - reported >= 5.0:
                        reported = time.monotonic()
                        progress = f"{done >> 10:,} of {max(total, done) >> 10:,} KiB read, {counts.sum():,} tokens"
                        print(f"[{reported - started:6.1f} s] {progress}", file=sys.stderr, flush=True)
            except UnicodeDecodeError:
                raise HotVocabError(f"{file} is not UTF-8 text") from None
    except KeyboardInterrupt:
        return counts, True
    return counts, False


def summary(vocab: HotVocab) -> dict[str, Any]:
    """What a person asks of token counts, as JSON. by_id, by_group: the shares of the tokens that so many single ids,
    and so many ids in whole groups, cover."""
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


def _blocks(opened: IO[str]) -> Iterator[str]:
    rest = ""
    while more := opened.read(TEXT_BLOCK):
        block = rest + more
        # After the last end of a line, or else of a word: few tokens span either.
        end = block.rfind("\n") + 1 or max(0, block.rfind(" ")) or len(block)
        yield block[:end]
        rest = block[end:]
    if rest:
        yield rest


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
