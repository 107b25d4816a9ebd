"""``sgl-flashsample trace``: what is counted, what is printed, and what is said about whatever cannot be read."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections import Counter

import numpy as np
import pytest
import torch

from sgl_flashsample import hot_vocab
from sgl_flashsample.hot_vocab import HotVocab

tokenizers = pytest.importorskip("tokenizers")
V = 640  # of the LM head; the tokenizer knows fewer ids
WORDS = [f"w{i}" for i in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model's folder with a tokenizer of bytes and whole words, and a config."""
    folder = tmp_path_factory.mktemp("models") / "Qwen9-1B"
    folder.mkdir()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges, vocab = [], {}
    for word in ["Ġ" + word for word in WORDS]:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            vocab[word[:end]] = None
    names = ["<s>", *alphabet, *vocab]
    bpe = tokenizers.models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=list(dict.fromkeys(merges)))
    made = tokenizers.Tokenizer(bpe)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": V, "hidden_size": 64}))
    return folder


@pytest.fixture
def trace(run):
    return functools.partial(run, "trace")


def text_of(words: int) -> str:
    """Words that are the rarer the later they come, on lines of ten."""
    drawn = [WORDS[(i * i * 7) % (1 + i % len(WORDS))] for i in range(words)]
    return "".join("".join(f" {word}" for word in drawn[at : at + 10]) + "\n" for at in range(0, words, 10))


def ids_in(model, text) -> Counter:
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    return Counter(tokenizer.encode(text, add_special_tokens=False).ids)


def counts_of(ids: dict[int, int], vocab: int = V) -> HotVocab:
    per_id = np.zeros(vocab, dtype=np.int64)
    per_id[list(ids)] = list(ids.values())
    return HotVocab.of_ids(per_id)


def write(name, text) -> None:
    with open(name, "w") as file:
        file.write(text)


def test_the_tokens_of_a_text_are_counted_without_special_ones(trace, model):
    text = text_of(5000)
    write("a.txt", text)
    code, out, err = trace("text", "a.txt", "--tokenizer", model, "-o", "hot.json")
    assert code == 0, err
    written, ids = HotVocab.load("hot.json"), ids_in(model, text)
    assert written.digest == counts_of(ids).digest
    assert written.ids[0] == 0, "no <s>"
    assert (written.vocab, written.name, written.source) == (V, "Qwen9-1B", "text: a.txt")
    assert f"{ids.total():,} tokens counted (Qwen9-1B, text: a.txt)" in out
    assert f"{len(ids)} of 640 ids seen" in out
    covers = sum(n for _, n in ids.most_common(256)) / ids.total()
    (row,) = [line.split() for line in out.splitlines() if line.split()[:1] == ["256"]]
    assert row == ["256", f"{covers:.2%}"]
    assert out.splitlines()[-1] == f"hot.json: {written.digest}"


def test_long_texts_in_blocks_and_several_files_count_as_one_text_does(trace, model, monkeypatch):
    monkeypatch.setattr(hot_vocab, "TEXT_BLOCK", 97)
    texts = [text_of(3000), text_of(700).replace("\n", ""), "no end of a line", "x" * 1000]
    for place, text in enumerate(texts):
        write(f"{place}.txt", text)
    files = [f"{place}.txt" for place in range(4)]
    assert trace("text", *files, "--tokenizer", model / "tokenizer.json", "-o", "hot")[0] == 0
    assert HotVocab.load("hot").digest == counts_of(sum((ids_in(model, text) for text in texts), Counter())).digest


def test_text_may_come_from_the_standard_input_and_the_summary_as_json(command, model, tmp_path):
    text = text_of(100)
    done = command("trace", "text", "--tokenizer", model, "--json", input=text, cwd=tmp_path)
    facts = json.loads(done.stdout)
    assert facts["counted"] == ids_in(model, text).total()
    assert (facts["vocab"], facts["source"]) == (V, "text: stdin")
    assert (facts["file"], facts["interrupted"]) == (None, False)
    assert [row["ids"] for row in facts["coverage"]] == [256, 512]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_transformers_tokenizer_is_loaded_by_its_name_and_v_is_what_it_knows(trace, model, monkeypatch):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    write("a.txt", text_of(50))
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url: None)
    for tokenizer in (fast, transformers.ByT5Tokenizer()):  # the second one is not of the tokenizers library
        known = max(tokenizer.get_vocab().values()) + 1
        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", {"Qwen/Qwen9-1B": tokenizer}.__getitem__)
        code, _, err = trace("text", "a.txt", "--tokenizer", "Qwen/Qwen9-1B", "-o", "hot.json")
        assert code == 0
        assert f"V is {known}, the ids that the tokenizer knows; --vocab if the LM head has more" in err
        written = HotVocab.load("hot.json")
        assert (written.name, written.vocab) == ("Qwen/Qwen9-1B", known)
        assert (
            written.digest == counts_of(Counter(tokenizer.encode(text_of(50), add_special_tokens=False)), known).digest
        )


def test_a_hub_that_is_not_reached_is_asked_once_for_a_tokenizer(monkeypatch, tmp_path):
    transformers, asked = pytest.importorskip("transformers"), []

    def unreachable(url: str) -> None:
        asked.append(url)
        raise Exception("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: pytest.fail("transformers asks it"))
    with pytest.raises(hot_vocab.BadFileError, match="--tokenizer Qwen/another: Exception: Name or service not known"):
        hot_vocab.load_tokenizer("Qwen/another")
    assert len(asked) == 1


def test_without_the_tokenizers_library_the_error_says_so(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="tokenizers"):
        hot_vocab.load_tokenizer(str(model))


def test_a_tokenizer_that_fails_on_a_text_is_named_with_the_file(trace, model, monkeypatch):
    def fails(texts: list[str]) -> list[list[int]]:
        raise ValueError("no rule for it")

    monkeypatch.setattr(hot_vocab, "load_tokenizer", lambda name: (fails, V))
    write("a.txt", "a text")
    code, _, err = trace("text", "a.txt", "--tokenizer", model)
    assert code == 2 and "a.txt, the tokenizer: no rule for it" in err


def test_a_count_that_takes_long_says_every_five_seconds_how_far_it_is(trace, monkeypatch):
    seconds = itertools.count(100.0, 2.0)
    monkeypatch.setattr(hot_vocab, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))
    write("ids", "[1, 2, 3]\n" * 1024)
    code, _, err = trace("ids", "ids", "--vocab", V)
    lines = [line for line in err.splitlines() if line.endswith(" tokens")]
    assert code == 0 and len(lines) > 1 and lines[0].endswith("s] ids: 9 tokens")


def test_ids_are_counted_from_lists_answers_and_lists_of_answers(trace, model):
    lines = [
        "[1, 2, 3]",
        "",
        '{"text": "...", "output_ids": [3, 639], "meta_info": {}}',
        '[{"output_ids": [3]}, {"token_ids": [3, 17]}]',
        "[[5], [5, 5]]",
        "[]",
    ]
    write("answers.jsonl", "\n".join(lines))
    assert trace("ids", "answers.jsonl", "--model", model, "-o", "a.json")[0] == 0
    written = HotVocab.load("a.json")
    assert written.digest == counts_of({1: 1, 2: 1, 3: 4, 639: 1, 17: 1, 5: 3}).digest
    assert (written.vocab, written.name, written.source) == (V, "Qwen9-1B", "ids: answers.jsonl")
    assert trace("ids", "answers.jsonl", "--vocab", V, "--name", "other", "-o", "b.json")[0] == 0
    assert (HotVocab.load("b.json").name, HotVocab.load("b.json").digest) == ("other", written.digest)


def test_show_prints_what_counting_printed_and_merge_adds_up(trace):
    for name, line in (("a", "[1, 2, 600]"), ("b", "[1, 2, 3, 4]")):
        write(name, line)
        code, counted, _ = trace("ids", name, "--vocab", V, "-o", f"{name}.json")
        assert code == 0
        assert trace("show", f"{name}.json")[:2] == (0, counted)
    code, out, _ = trace("merge", "a.json", "b.json", "-o", "c.json")
    assert code == 0 and "7 tokens counted (ids: a + ids: b)" in out
    assert HotVocab.load("c.json").digest == counts_of({1: 2, 2: 2, 3: 1, 4: 1, 600: 1}).digest
    facts = json.loads(trace("show", "c.json", "--json")[1])
    assert (facts["counted"], facts["digest"], facts["file"]) == (7, HotVocab.load("c.json").digest, "c.json")
    assert facts["coverage"][0] == {"ids": 256, "covers": 1.0}


def test_a_map_has_the_most_frequent_ids_as_sglang_reads_them(trace):
    write("hot.json", counts_of({5: 3, 7: 1, 9: 2, 600: 3}).dumps())
    code, out, _ = trace("map", "hot.json", "--ids", 3, "-o", "map.pt")
    assert (code, out.splitlines()) == (
        0,
        ["map.pt: 3 of 640 ids; 88.89% of the counted tokens", "serve with --speculative-token-map map.pt"],
    )
    assert torch.load("map.pt", weights_only=True) == [5, 9, 600]
    facts = json.loads(trace("map", "hot.json", "--json", "-o", "map.pt")[1])
    want = {"file": "map.pt", "vocab": V, "ids": 96, "ids_counted": 4, "covers": 1.0}
    assert facts == want, "15 % of the ids by default"
    assert "96 of 640 ids, 92 of them never counted; 100.00%" in trace("map", "hot.json", "-o", "map.pt")[1]
    assert torch.load("map.pt", weights_only=True) == [*range(95), 600], "the lowest of those that were never counted"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "the following arguments are required: command (see `sgl-flashsample trace --help`)"),
        ("sort", "invalid choice: 'sort'"),
        ("text TEXT", "required: --tokenizer (see `sgl-flashsample trace text --help`)"),
        ("text nothing.txt --tokenizer MODEL", "nothing.txt: No such file or directory"),
        ("text . --tokenizer MODEL", ".: Is a directory"),
        ("text TEXT --tokenizer TEXT", "--tokenizer TEXT: Exception: expected value at line 1 column 1"),
        ("text BINARY --tokenizer MODEL", "BINARY is not UTF-8 text"),
        ("text EMPTY --tokenizer MODEL", "the input has no tokens to count"),
        ("text TEXT --tokenizer MODEL --vocab 8", "V is 8; expected 458, the ids that the tokenizer knows, to 2097152"),
        ("ids IDS --vocab 0", "V is 0; expected 1 to 2097152"),
        ("text TEXT --tokenizer MODEL -o nowhere/x", "--out is nowhere/x, in a folder that is not there"),
        ("text TEXT --tokenizer MODEL -o .", "--out is ., which is not a plain file"),
        ("text TEXT --tokenizer MODEL -o TEXT", "--out is TEXT, a file that is read; expected another one"),
        ("ids IDS --vocab 9 -o IDS", "--out is IDS, a file that is read; expected another one"),
        ("ids IDS", "one of the arguments --model --vocab is required"),
        ("ids IDS --vocab 8 --model MODEL", "argument --model: not allowed with argument --vocab"),
        ("ids IDS --model TEXT", "TEXT is no config"),
        ("ids TEXT --vocab 8", "TEXT, line 1: it is not JSON: Expecting value"),
        ("ids IDS --vocab 8", "IDS, line 2: Expected `int` <= 7 - at `$[0]`"),
        ("ids BOOL --vocab 8", "BOOL, line 1: Expected `int`, got `bool` - at `$[0]`"),
        ("ids OTHER --vocab 8", "OTHER, line 1: an object has no output_ids or token_ids"),
        ("ids NUMBER --vocab 8", "NUMBER, line 1: Expected `array`, got `int`"),
        ("ids DEEP --vocab 8", "DEEP, line 1: Expected `int`, got `array` - at `$[0]`"),
        ("ids BINARY --vocab 8", "BINARY is not UTF-8 text"),
        ("show", "required: HOT"),
        ("show TEXT", "TEXT: it is not JSON: Expecting value"),
        ("show \udcff\udcfe", "error: \\xff\\xfe: No such file or directory"),
        ("map HOT", "required: -o/--out"),
        ("map HOT -o nowhere/x", "--out is nowhere/x, in a folder that is not there"),
        ("map HOT -o HOT", "--out is HOT, a file that is read; expected another one"),
        ("map HOT --ids 641 -o c", "--ids: the number of ids is 641; expected 1 to 640"),
        ("merge HOT", "required: -o/--out"),
        ("merge HOT TEXT -o c", "TEXT: it is not JSON"),
        ("merge HOT HOT8 -o c", "HOT is of 640 ids, HOT8 of 8; expected files of one vocabulary"),
        ("merge HOT MORE ./HOT -o c", "./HOT is named twice: its tokens would count twice; name it once"),
        ("merge HOT MORE -o HOT", "--out is HOT, a file that is read; expected another one"),
        ("merge HOT MORE -o /proc/c", "--out is /proc/c, which cannot be written: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two_and_writes_nothing(trace, model, tmp_path, arguments, message):
    files = {"TEXT": b"hello", "EMPTY": b"", "BINARY": b"\xff\xfe\x00", "IDS": b"[1]\n[8]\n", "BOOL": b"[true]"}
    files |= {"OTHER": b'{"ids": [1]}', "NUMBER": b"5", "DEEP": b"[[[1]]]"}
    files |= {name: counts_of({1: 1}).dumps().encode() for name in ("HOT", "MORE")}
    files |= {"HOT8": counts_of({1: 1}, 8).dumps().encode()}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    before = sorted(os.listdir(tmp_path))
    code, out, err = trace(*(model if word == "MODEL" else word for word in arguments.split()))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before


def test_an_interruption_keeps_what_was_counted(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    # Tests that run in the background of a shell are started with this signal ignored.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from sgl_flashsample.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["trace", "ids", "pipe", "--vocab", str(V), "-o", "hot.json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=tmp_path, **pipes)
    with open(tmp_path / "pipe", "w") as pipe:
        pipe.write("[1, 2]\n" * 20_000)
        pipe.flush()
        time.sleep(0.5)  # what is still on its way may or may not be counted
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err == "error: interrupted: what was counted until then is above\n"
    written = HotVocab.load(tmp_path / "hot.json")
    assert 1000 < written.counted <= 40_000
    assert f"{written.counted:,} tokens counted" in out


def test_a_closed_stdin_is_one_line(trace, monkeypatch):
    monkeypatch.setattr(hot_vocab.sys, "stdin", None)
    code, _, err = trace("ids", "--vocab", 8)
    assert (code, err) == (2, "error: stdin is closed; expected text in it, or files\n")


def test_an_interruption_before_the_first_token_says_so(trace, monkeypatch):
    monkeypatch.setattr(hot_vocab, "count", lambda files, vocab, encode: (np.zeros(vocab, dtype=np.int64), True))
    code, _, err = trace("ids", "x", "--vocab", 8, "-o", "hot.json")
    assert (code, err) == (2, "error: interrupted before any token was counted\n")
    assert os.listdir() == []
