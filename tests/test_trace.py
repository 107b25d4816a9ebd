"""``sgl-flashsample trace``, as a person meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from sgl_flashsample import token_sources, trace
from sgl_flashsample.hot_set import HotSet

tokenizers = pytest.importorskip("tokenizers")
V = 640  # of the LM head; the tokenizer knows fewer ids
WORDS = [f"w{i}" for i in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model's folder with a tokenizer of bytes and whole words, and a config."""
    folder = tmp_path_factory.mktemp("models") / "Qwen9-1B"
    folder.mkdir()
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": V, "hidden_size": 64}))
    return folder


def write_tokenizer(folder):
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


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty folder; its exit code and what it printed on both streams."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        try:
            code = trace.main([*map(str, arguments)])
        except SystemExit as end:  # argparse
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def text_of(words: int) -> str:
    """Words that are the rarer the later they come, on lines of ten."""
    drawn = [WORDS[(i * i * 7) % (1 + i % len(WORDS))] for i in range(words)]
    lines = [drawn[at : at + 10] for at in range(0, words, 10)]
    return "\n".join("".join(f" {word}" for word in line) for line in lines) + "\n"


def counts_of(model, text) -> Counter:
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    return Counter(tokenizer.encode(text, add_special_tokens=False).ids)


def same_counts(found: HotSet, tokens: Counter) -> bool:
    return found.counts == HotSet.of_tokens(tokens, found.vocab).counts


def test_help_names_the_ways_to_count_and_each_command_explains_its_options(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(word in out for word in ("text", "ids", "show", "merge", "FLASHSAMPLE_TRACE"))
    for name, words in {"text": "AutoTokenizer", "ids": "output_ids", "show": "--json", "merge": "--out"}.items():
        code, out, _ = run(name, "--help")
        assert code == 0 and words in out


def test_the_tokens_of_a_text_are_counted_without_special_ones(run, model):
    text = text_of(5000)
    with open("a.txt", "w") as file:
        file.write(text)
    code, out, err = run("text", "a.txt", "--tokenizer", model, "-o", "hot.json")
    assert code == 0, err
    found, tokens = HotSet.load("hot.json"), counts_of(model, text)
    assert same_counts(found, tokens)
    assert found.counts[0] == sum(n for token, n in tokens.items() if token < 16), "no <s>"
    assert (found.vocab, found.name, found.source) == (V, "Qwen9-1B", "text: a.txt")
    assert f"{tokens.total():,} tokens counted (Qwen9-1B, text: a.txt)" in out
    assert f"{found.seen} of 40 groups of 16 ids seen (V = 640)" in out
    top = sum(n for _, n in tokens.most_common(256))
    (row,) = [line.split() for line in out.splitlines() if line.split()[:1] == ["256"]]
    assert row == ["256", f"{100 * top / tokens.total():.2f}", "%", "16", f"{100 * found.coverage(16):.2f}", "%"]
    assert out.splitlines()[-1] == f"hot.json: {found.digest}"


def test_long_texts_in_blocks_and_several_files_count_as_one_text_does(run, model, monkeypatch):
    monkeypatch.setattr(token_sources, "BLOCK", 97)
    texts = [text_of(3000), text_of(700).replace("\n", ""), "no end of a line", "x" * 1000]
    for place, text in enumerate(texts):
        with open(f"{place}.txt", "w") as file:
            file.write(text)
    code, _, err = run("text", *(f"{i}.txt" for i in range(4)), "--tokenizer", model / "tokenizer.json", "-o", "hot")
    assert code == 0, err
    assert same_counts(HotSet.load("hot"), sum((counts_of(model, text) for text in texts), Counter()))


def test_text_may_come_from_the_standard_input_and_the_summary_as_json(model, tmp_path):
    text = text_of(100)
    command = [sys.executable, "-m", "sgl_flashsample.cli", "trace", "text", "--tokenizer", str(model), "--json"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=tmp_path)
    facts = json.loads(done.stdout)
    assert facts["counted"] == counts_of(model, text).total()
    assert (facts["vocab"], facts["groups"], facts["source"]) == (V, 40, "text: stdin")
    assert (facts["file"], facts["interrupted"]) == (None, False)
    assert [row["ids"] for row in facts["coverage"]] == [256, 512]
    assert list(tmp_path.iterdir()) == []


def test_a_transformers_tokenizer_is_loaded_by_its_name_and_v_is_what_it_knows(run, model, monkeypatch):
    pytest.importorskip("transformers")
    import transformers

    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    asked = []
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: asked.append(name) or fast)
    with open("a.txt", "w") as file:
        file.write(text_of(50))
    code, _, err = run("text", "a.txt", "--tokenizer", "Qwen/Qwen9-1B", "-o", "hot.json")
    found = HotSet.load("hot.json")
    assert (code, asked) == (0, ["Qwen/Qwen9-1B"])
    assert (found.name, found.vocab) == ("Qwen/Qwen9-1B", len(fast))
    assert f"V is {len(fast)}, the ids that the tokenizer knows; --vocab if the LM head has more" in err
    assert same_counts(found, counts_of(model, text_of(50)))
    slow = type("Slow", (), {"__len__": lambda self: len(fast)})()
    slow.encode = lambda text, add_special_tokens: fast.encode(text, add_special_tokens=add_special_tokens)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: slow)
    assert run("text", "a.txt", "--tokenizer", "Qwen/Qwen9-1B", "-o", "slow.json")[0] == 0
    assert HotSet.load("slow.json") == found


def test_ids_are_counted_from_lists_answers_and_lists_of_answers(run, model):
    lines = [
        "[1, 2, 3]",
        "",
        '{"text": "...", "output_ids": [3, 639], "meta_info": {}}',
        '[{"output_ids": [3]}, {"token_ids": [3, 17]}]',
        "[[5], [5, 5]]",
        "[]",
    ]
    with open("answers.jsonl", "w") as file:
        file.write("\n".join(lines))
    code, _, err = run("ids", "answers.jsonl", "--model", model, "-o", "hot.json")
    assert code == 0, err
    found = HotSet.load("hot.json")
    assert same_counts(found, Counter({1: 1, 2: 1, 3: 4, 639: 1, 17: 1, 5: 3}))
    assert (found.vocab, found.name, found.source) == (V, "Qwen9-1B", "ids: answers.jsonl")
    assert run("ids", "answers.jsonl", "--vocab", V, "--name", "other", "-o", "b.json")[0] == 0
    assert HotSet.load("b.json").name == "other"
    assert HotSet.load("b.json").counts == found.counts


def test_show_prints_what_recording_printed_and_merge_adds_up(run, model):
    for name, line in (("a", "[1, 2, 600]"), ("b", "[1, 2, 3, 4]")):
        with open(name, "w") as file:
            file.write(line)
        assert run("ids", name, "--vocab", V, "-o", f"{name}.json")[0] == 0
    recorded = run("ids", "a", "--vocab", V, "-o", "a.json")[1]
    assert run("show", "a.json")[:2] == (0, recorded)
    code, out, _ = run("merge", "a.json", "b.json", "-o", "c.json")
    assert code == 0 and "7 tokens counted (ids: a + ids: b)" in out and "not known" in out
    merged = HotSet.load("c.json")
    assert same_counts(merged, Counter({1: 2, 2: 2, 3: 1, 4: 1, 600: 1}))
    facts = json.loads(run("show", "c.json", "--json")[1])
    assert facts["counted"] == 7 and facts["digest"] == merged.digest
    assert facts["coverage"][0] == {"ids": 256, "by_id": None, "groups": 16, "by_group": 1.0}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: command (see `sgl-flashsample trace --help`)"),
        (["sort"], "invalid choice: 'sort'"),
        (["text", "TEXT"], "required: --tokenizer (see `sgl-flashsample trace text --help`)"),
        (["text", "nothing.txt", "--tokenizer", "MODEL"], "nothing.txt: No such file or directory"),
        (["text", ".", "--tokenizer", "MODEL"], ".: Is a directory"),
        (["text", "TEXT", "--tokenizer", "TEXT"], "--tokenizer TEXT: Exception: expected value at line 1 column 1"),
        (["text", "BINARY", "--tokenizer", "MODEL"], "BINARY is not UTF-8 text"),
        (["text", "EMPTY", "--tokenizer", "MODEL"], "there is no token"),
        (
            ["text", "TEXT", "--tokenizer", "MODEL", "--vocab", "8"],
            "V is 8; expected 458 or more, the ids that",
        ),
        (["text", "TEXT", "--tokenizer", "MODEL", "--vocab", "0"], "argument --vocab: '0' is no number of ids from 1"),
        (["text", "TEXT", "--tokenizer", "MODEL", "-o", "nowhere/x"], "--out is nowhere/x, in a folder that is not"),
        (["text", "TEXT", "--tokenizer", "MODEL", "-o", "."], ". is not a plain file"),
        (["ids", "IDS"], "V is not known: expected one of --model and --vocab"),
        (["ids", "IDS", "--vocab", "8", "--model", "MODEL"], "V is not known: expected one of --model and --vocab"),
        (["ids", "IDS", "--model", "TEXT"], "TEXT is no config"),
        (["ids", "TEXT", "--vocab", "8"], "TEXT, line 1: it is not JSON: Expecting value"),
        (["ids", "IDS", "--vocab", "8"], "IDS, line 2: an id is 9; expected an integer from 0 to 7"),
        (["ids", "BOOL", "--vocab", "8"], "BOOL, line 1: an id is True; expected an integer from 0 to 7"),
        (["ids", "OTHER", "--vocab", "8"], "OTHER, line 1: an object has no output_ids or token_ids"),
        (["ids", "NUMBER", "--vocab", "8"], "NUMBER, line 1: it is 5; expected a list of ids or an object"),
        (["ids", "DEEP", "--vocab", "8"], "DEEP, line 1: an id is a list; expected an integer"),
        (["ids", "BINARY", "--vocab", "8"], "BINARY is not UTF-8 text"),
        (["show"], "required: file"),
        (["show", "TEXT"], "TEXT: it is not JSON: Expecting value"),
        (["show", "nothing"], "nothing: No such file or directory"),
        (["merge", "HOT"], "required: -o/--out"),
        (["merge", "HOT", "TEXT", "-o", "c"], "TEXT: it is not JSON"),
        (["merge", "HOT", "HOT8", "-o", "c"], "one is of 640 ids, the other of 8"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_gets_one_line_exit_code_two_and_writes_nothing(run, model, tmp_path, arguments, message):
    files = {"TEXT": b"hello", "EMPTY": b"", "BINARY": b"\xff\xfe\x00", "IDS": b"[1]\n[9]\n", "BOOL": b"[true]"}
    files |= {"OTHER": b'{"ids": [1]}', "NUMBER": b"5", "DEEP": b"[[[1]]]"}
    files |= {"HOT": HotSet.of_tokens({1: 1}, V).dumps().encode(), "HOT8": HotSet.of_tokens({1: 1}, 8).dumps().encode()}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    before = sorted(os.listdir(tmp_path))
    code, out, err = run(*(model if argument == "MODEL" else argument for argument in arguments))
    (line,) = [line for line in err.splitlines() if not line.startswith("[")]  # beside progress
    assert (code, out) == (2, "")
    assert line.startswith("error: ") and message in line
    assert sorted(os.listdir(tmp_path)) == before


def test_without_a_tokenizers_library_the_line_says_what_brings_it(run, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, err = run("text", "a.txt", "--tokenizer", model)
    assert code == 2 and "--tokenizer needs tokenizers, which comes with SGLang" in err


def test_an_interruption_keeps_what_was_counted(model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    # Tests that run in the background of a shell are started with this signal ignored.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from sgl_flashsample.trace import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["ids", "pipe", "--vocab", str(V), "-o", "hot.json"]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with open(tmp_path / "pipe", "w") as pipe:
        pipe.write("[1, 2]\n" * 20_000)
        pipe.flush()
        time.sleep(1.0)  # what is still on its way may or may not be counted
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted: what was counted until then is above" in err and "Traceback" not in err
    found = HotSet.load(tmp_path / "hot.json")
    assert 1000 < found.counted <= 40_000
    assert f"{found.counted:,} tokens counted" in out


def test_an_interruption_before_the_first_token_says_so(run, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(trace, "_count", interrupted)
    code, _, err = run("ids", "x", "--vocab", 8, "-o", "hot.json")
    assert (code, err.splitlines()[-1]) == (2, "error: interrupted before any token was counted")
    assert os.listdir() == []


def test_a_hot_set_is_shown_without_torch(tmp_path):
    (tmp_path / "hot.json").write_text(HotSet.of_tokens({1: 1}, V).dumps())
    code = "import sys; from sgl_flashsample.cli import main; c = main(sys.argv[1:]); print('torch' in sys.modules, c)"
    command = [sys.executable, "-c", code, "trace", "show", "hot.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "False 0"
