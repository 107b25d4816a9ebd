"""Token counts: how often the traffic of a model draws each id. Counted from text, from answers, or by a running server
(``sglang/token_counts.py``). Needs no torch.

Drawn tokens are Zipf-like: a small part of the vocabulary carries most of the probability (SIMPLE, arXiv 2512.00719,
section 5.3). A draft model whose LM head has the rows of these ids alone is faster and its drafts are nearly as often
accepted (FR-Spec, arXiv 2502.14856): SGLang takes their list as ``--speculative-token-map``.

A file of counts is data from elsewhere: everything in it is checked and bounded; a fault is named in one line.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from .files import BadFileError, one_line, parse_json, read_plain

SCHEMA = "flashsample-hot/3"
MAX_BYTES = 32 << 20
MAX_VOCAB = 1 << 21
MAX_TOKENS = (1 << 53) - 1  # so that shares of all tokens are exact as float64
LINE_IDS = 256  # per line of a file
MAX_TEXT = 300  # characters of a name
MAPPED_SHARE = 0.15  # of V, ids of a token map by default

Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class HotVocab(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """How often tokens of each id were drawn: a file's fields.

    vocab: V, ids of the whole vocabulary, not of a shard. name: of the model or tokenizer, "" where unknown. source:
    the traffic that was counted. counted: number of tokens. digest: hash of the counts, "sha256:...". counts: first id
    of a line -> tokens drawn of each of its ids; a line without any is left out. notes: fields of the file that were
    ignored.
    """

    schema: Annotated[str, Meta(pattern=rf"^{SCHEMA}(\.[0-9]{{1,3}})?$")]
    vocab: Annotated[int, Meta(ge=1, le=MAX_VOCAB)]
    name: Text = ""
    source: Text = ""
    counted: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    digest: str
    counts: dict[Annotated[int, Meta(ge=0, le=MAX_VOCAB)], list[Annotated[int, Meta(ge=0, le=MAX_TOKENS)]]]
    notes: list[str] = []

    @classmethod
    def of_ids(cls, ids: np.ndarray, name: str = "", source: str = "", notes: list[str] | None = None) -> HotVocab:
        """Counts from ``[V]`` int64, how often each id was drawn."""
        lines = ((first, ids[first : first + LINE_IDS]) for first in range(0, len(ids), LINE_IDS))
        return cls(
            schema=SCHEMA,
            vocab=len(ids),
            name=one_line(name),
            source=one_line(source, MAX_TEXT),
            counted=sum(ids[ids != 0].tolist()),  # those of a file may be more than an int64 holds
            digest=f"sha256:{hashlib.sha256(ids.astype('<i8').tobytes()).hexdigest()}",
            counts={first: line.tolist() for first, line in lines if line.any()},
            notes=notes or [],
        )

    @functools.cached_property
    def ids(self) -> np.ndarray:
        """``[V]`` int64, tokens per id."""
        ids = np.zeros(self.vocab, dtype=np.int64)
        for first, line in self.counts.items():
            part = ids[first:][:LINE_IDS]
            if first % LINE_IDS or len(part) != len(line):
                expected = f"{len(part)}, and a first id that is a multiple of {LINE_IDS}"
                raise BadFileError(f"counts.{first} has {len(line)} counts; expected {expected}")
            part[:] = line
        return ids

    def plus(self, other: HotVocab) -> HotVocab:
        """The sum of both. Raises BadFileError for different vocabularies."""
        if self.vocab != other.vocab:
            raise BadFileError(f"one is of {self.vocab} ids, the other of {other.vocab}")
        origins = dict.fromkeys(filter(None, f"{self.source} + {other.source}".split(" + ")))
        return HotVocab.of_ids(self.ids + other.ids, self.name or other.name, " + ".join(origins))

    def most_frequent(self, number: int) -> np.ndarray:
        """``most_frequent`` of these counts."""
        return most_frequent(self.ids, number)

    @classmethod
    def loads(cls, text: str) -> HotVocab:
        """Counts from the text of a file. Raises BadFileError."""
        data = parse_json(text, MAX_BYTES)
        if isinstance(data, dict) and not str(data.get("schema")).startswith(SCHEMA):
            raise BadFileError(f"schema is {one_line(repr(data.get('schema')), 60)}; expected {SCHEMA!r}")
        try:
            file = msgspec.convert(data, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise BadFileError(one_line(str(error), MAX_TEXT)) from None
        if wrong := [text for text in (file.name, file.source) if not text.isprintable()]:
            raise BadFileError(f"a name is {one_line(ascii(wrong[0]))}; expected printable characters")
        unknown = sorted(data.keys() - set(cls.__struct_fields__))[:20]
        notes = [f"{one_line(name)} is not known to this release and is ignored" for name in unknown]
        checked = cls.of_ids(file.ids, file.name, file.source, notes)
        if (file.counted, file.digest) != (checked.counted, checked.digest):
            raise BadFileError(
                f"counted and digest are not those of its counts ({checked.counted}, {checked.digest}): "
                "it is damaged, or was changed by hand"
            )
        return checked

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> HotVocab:
        """Counts from a file. Raises BadFileError, whatever is wrong with it."""
        try:
            return cls.loads(read_plain(file, MAX_BYTES))
        except BadFileError as error:
            raise BadFileError(f"{one_line(str(file), 300)}: {error}") from None

    def dumps(self, *, checked: bool = True) -> str:
        """The file's one text. Raises BadFileError where ``loads`` would, unless the counts are known to be right and
        are not ``checked``, which takes most of the time."""
        fields = msgspec.to_builtins(self, str_keys=True)
        counts = ",\n".join(f'  "{first}": {line}' for first, line in fields.pop("counts").items())
        del fields["notes"]
        text = "".join(f' "{name}": {json.dumps(value, ensure_ascii=False)},\n' for name, value in fields.items())
        text = f'{{\n{text} "counts": {{\n{counts}\n }}\n}}\n'
        if checked:
            HotVocab.loads(text)
        return text

    def summary(self) -> dict[str, Any]:
        """The counts for a person, as JSON.

        unseen: an estimate of the share of further tokens whose id has not been drawn yet: ids drawn once over tokens
        (Good 1953), with one more such id, so that few tokens do not pass for all. Where it is not small, more has to
        be counted. coverage: the shares of the tokens that as many ids cover, the most frequent first.
        """
        covered = np.cumsum(np.sort(self.ids)[::-1]) / self.counted
        return {
            "name": self.name,
            "source": self.source,
            "vocab": self.vocab,
            "counted": self.counted,
            "ids_seen": int(np.count_nonzero(self.ids)),
            "unseen": min(1.0, (int((self.ids == 1).sum()) + 1) / self.counted),
            "coverage": [{"ids": size, "covers": float(covered[size - 1])} for size in _reported_sizes(self.vocab)],
            "digest": self.digest,
            "notes": self.notes,
        }

    def lines(self) -> Iterator[str]:
        """The summary for reading."""
        facts = self.summary()
        about = ", ".join(filter(None, (self.name, self.source)))
        yield f"{self.counted:,} token{'s' * (self.counted != 1)} counted{f' ({about})' if about else ''}"
        yield f"{facts['ids_seen']:,} of {self.vocab:,} ids seen"
        unseen = 100 * facts["unseen"]
        yield f"at most about {unseen:{'.0f' if unseen >= 10 else '.2g'}} % of further tokens have other ids"
        yield from (f"note: {note}" for note in self.notes)
        yield f"{'ids':>9}  {'cover':>7}"
        for row in facts["coverage"]:
            yield f"{row['ids']:>9,}  {row['covers']:>7.2%}"


def _reported_sizes(vocab: int) -> list[int]:
    """The numbers of ids at which coverage is reported: 256, 512, 1024, ... below V."""
    return [1 << bits for bits in range(8, (vocab - 1).bit_length())]


def most_frequent(counts: np.ndarray, number: int) -> np.ndarray:
    """``[number]`` int64, ascending: the ids with the largest ``counts``, ``[V]``, of equally frequent ones the lowest,
    which tokenizers give to what is frequent. Raises ValueError."""
    if not 1 <= number <= len(counts):
        raise ValueError(f"the number of ids is {number}; expected 1 to {len(counts)}")
    return np.sort(np.argsort(-counts, kind="stable")[:number])


# --- tokens to count

STDIN = "-"
TEXT_BLOCK = 1 << 16  # characters of a text, and the rest of its last line: few tokens span two blocks
BLOCKS_AT_ONCE = 16  # blocks that a tokenizer may work on in parallel
MAX_LINE = 1 << 28  # characters of one line of ids
PROGRESS_SECONDS = 5.0

Encode = Callable[[list[str]], list[list[int]]]


def _ask_hub_once(name: str) -> None:
    """Raise where the Hugging Face hub has no model of this name or is not reached: transformers tries for most of a
    minute then. What the cache has needs no hub."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled

    file = "tokenizer_config.json"
    if isinstance(huggingface_hub.try_to_load_from_cache(name, file), str):
        return
    with contextlib.suppress(EntryNotFoundError, OfflineModeIsEnabled):
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, file))


def load_tokenizer(name: str) -> tuple[Encode, int]:
    """A function that encodes texts without special tokens, and the number of ids that it knows.

    name: a ``tokenizer.json`` or a folder with one, read by the tokenizers library alone; else whatever transformers'
    AutoTokenizer finds under it. Raises BadFileError, ModuleNotFoundError.
    """
    file = Path(name, "tokenizer.json") if os.path.isdir(name) else Path(name)
    load: Callable[[str], Any]
    if fast := file.is_file():
        from tokenizers import Tokenizer

        load = Tokenizer.from_file
    else:
        from transformers import AutoTokenizer

        load = AutoTokenizer.from_pretrained
    try:
        if not os.path.exists(name):
            _ask_hub_once(name)
        tokenizer = load(str(file) if fast else name)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions, transformers many kinds, some over many lines
        reason = f"{type(error).__name__}: {one_line(str(error), 200)}"
        raise BadFileError(f"--tokenizer {one_line(name)}: {reason}") from None

    def encode(texts: list[str]) -> list[list[int]]:
        if fast:
            return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    return encode, max(tokenizer.get_vocab().values(), default=-1) + 1


def ids_of_text(text: IO[str], encode: Encode) -> Iterator[list[int]]:
    """Ids of the tokens of a text. Raises BadFileError where the tokenizer fails."""
    blocks = iter(lambda: text.read(TEXT_BLOCK) + text.readline(), "")
    while texts := list(itertools.islice(blocks, BLOCKS_AT_ONCE)):
        try:
            yield from encode(texts)
        except Exception as error:
            raise BadFileError(f"the tokenizer: {one_line(str(error), 200)}") from None


def ids_of_lines(lines: IO[str], vocab: int) -> Iterator[list[int]]:
    """Ids of JSON lines: a line is a list of ids, an answer of SGLang (an object with ``output_ids``, or
    ``token_ids``) or a list of answers. Raises BadFileError."""
    ids = list[Annotated[int, Meta(ge=0, lt=vocab)]]
    for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), ""), 1):
        try:
            value = parse_json(line, MAX_LINE) if line.strip() else []
            several = isinstance(value, list) and value and isinstance(value[0], dict | list)
            for answer in value if several else [value]:
                if isinstance(answer, dict):
                    if not answer.keys() & {"output_ids", "token_ids"}:
                        raise BadFileError("an object has no output_ids or token_ids")
                    answer = answer.get("output_ids", answer.get("token_ids"))
                yield msgspec.convert(answer, ids)
        except (BadFileError, msgspec.ValidationError) as error:
            raise BadFileError(f"line {number}: {error}") from None


def count(files: list[str], vocab: int, encode: Encode | None = None) -> tuple[np.ndarray, bool]:
    """``[V]`` int64, how often each id is in ``files`` (UTF-8, or ``STDIN``): text to ``encode``, without it lines of
    ids; and whether an interruption ended the count early. Progress goes to the error stream. Raises OSError and
    ValueError."""
    counts, started = np.zeros(vocab, dtype=np.int64), time.monotonic()
    reported = started
    try:
        for file in files:
            if file == STDIN and sys.stdin is None:
                raise ValueError("stdin is closed; expected text in it, or files")
            with open(0 if file == STDIN else file, encoding="utf-8", closefd=file != STDIN) as opened:
                for ids in ids_of_text(opened, encode) if encode else ids_of_lines(opened, vocab):
                    np.add.at(counts, np.array(ids, dtype=np.int64), 1)
                    if time.monotonic() - reported >= PROGRESS_SECONDS:
                        reported = time.monotonic()
                        progress = f"{one_line(file)}: {counts.sum():,} tokens"
                        print(f"[{reported - started:6.1f} s] {progress}", file=sys.stderr, flush=True)
    except UnicodeDecodeError:
        raise BadFileError(f"{file} is not UTF-8 text") from None
    except BadFileError as error:
        raise BadFileError(f"{file}, {error}") from None
    except KeyboardInterrupt:
        return counts, True
    return counts, False
