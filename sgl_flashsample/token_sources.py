"""Tokens to count: of text, with a tokenizer, and of JSON lines with ids. Whatever is wrong with them is one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from .bounded_json import BoundedError, parse, shorten, shown

STDIN = "-"
BLOCK = 1 << 16  # characters that a tokenizer gets at once: a token never spans two blocks
BLOCKS = 16  # that it may work on in parallel
MAX_LINE = 1 << 28  # characters of one line of ids
ID_FIELDS = ("output_ids", "token_ids")

Encode = Callable[[list[str]], list[list[int]]]


class SourceError(ValueError):
    """What is wrong with a source of tokens; the message is one line."""


def load_tokenizer(name: str) -> tuple[Encode, int]:
    """A function that encodes texts without special tokens, and the number of ids that it knows.

    name: a ``tokenizer.json`` or a folder with one, read by the tokenizers library alone; else whatever transformers'
    AutoTokenizer finds under it. Raises SourceError.
    """
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            from tokenizers import Tokenizer

            return _fast(Tokenizer.from_file(str(file)))
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(name)
        backend = getattr(found, "backend_tokenizer", None)
        if backend is not None:
            return _fast(backend)
        return lambda texts: [found.encode(text, add_special_tokens=False) for text in texts], len(found)
    except ImportError as error:
        raise SourceError(f"--tokenizer needs {error.name or 'a library'}, which comes with SGLang: {error}") from None
    except Exception as error:  # tokenizers raises bare Exceptions, transformers many kinds, some over many lines
        reason = shorten(" ".join(str(error).split()), 200)
        raise SourceError(f"--tokenizer {shorten(name)}: {type(error).__name__}: {reason}") from None


def _fast(tokenizer: Any) -> tuple[Encode, int]:
    def encode(texts: list[str]) -> list[list[int]]:
        return [found.ids for found in tokenizer.encode_batch(texts, add_special_tokens=False)]

    return encode, max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def open_text(file: str) -> IO[str]:
    """``file``, or the standard input for "-". Raises OSError."""
    if file == STDIN:
        return open(sys.stdin.fileno(), encoding="utf-8", closefd=False)
    return open(file, encoding="utf-8")


def bytes_of(files: list[str]) -> int:
    """Of all files together; 0 where one of them does not say."""
    sizes = [0 if file == STDIN else os.stat(file).st_size for file in files]
    return sum(sizes) if all(sizes) else 0


def ids_of_text(file: str, encode: Encode) -> Iterator[tuple[list[int], int]]:
    """Ids of ``file``'s tokens in portions, and how many bytes of it each took. Raises OSError and SourceError."""
    with open_text(file) as opened:
        for texts in _batches(_blocks(file, opened)):
            try:
                encoded = encode(texts)
            except Exception as error:  # as in load_tokenizer
                raise SourceError(f"{file}: the tokenizer: {shorten(' '.join(str(error).split()), 200)}") from None
            yield [token for ids in encoded for token in ids], sum(len(text.encode()) for text in texts)


def _blocks(file: str, opened: IO[str]) -> Iterator[str]:
    rest = ""
    while True:
        try:
            more = opened.read(BLOCK)
        except UnicodeDecodeError:
            raise SourceError(f"{file} is not UTF-8 text") from None
        if not more:
            break
        block = rest + more
        # After the last end of a line, or else of a word: few tokens span either.
        cut = block.rfind("\n") + 1 or max(0, block.rfind(" ")) or len(block)
        yield block[:cut]
        rest = block[cut:]
    if rest:
        yield rest


def _batches(blocks: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for block in blocks:
        batch.append(block)
        if len(batch) == BLOCKS:
            yield batch
            batch = []
    if batch:
        yield batch


def ids_of_lines(file: str, vocab: int) -> Iterator[tuple[list[int], int]]:
    """Ids of each line of ``file``, and its bytes. A line is a list of ids, an answer of SGLang (an object with
    ``output_ids``) or a list of answers. Raises OSError and SourceError."""
    with open_text(file) as opened:
        number = 0
        while True:
            number += 1
            try:
                line = opened.readline(MAX_LINE + 1)
            except UnicodeDecodeError:
                raise SourceError(f"{file} is not UTF-8 text") from None
            if not line:
                return
            if not line.strip():
                continue
            try:
                yield _ids(parse(line, MAX_LINE), vocab), len(line.encode())
            except BoundedError as error:
                raise SourceError(f"{file}, line {number}: {error}") from None


def _ids(value: Any, vocab: int, inner: bool = False) -> list[int]:
    if isinstance(value, dict):
        name = next((name for name in ID_FIELDS if name in value), None)
        if name is None:
            raise BoundedError(f"an object has no {' or '.join(ID_FIELDS)}")
        value, inner = value[name], True
    if not isinstance(value, list):
        raise BoundedError(f"it is {shown(value)}; expected a list of ids or an object with {ID_FIELDS[0]}")
    if value and isinstance(value[0], dict | list) and not inner:
        return [token for answer in value for token in _ids(answer, vocab, inner=True)]
    for token in value:
        if type(token) is not int or not 0 <= token < vocab:
            raise BoundedError(f"an id is {shown(token)}; expected an integer from 0 to {vocab - 1}")
    return value
