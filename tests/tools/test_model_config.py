"""The LM head of a model: from its config, or as it is spelled out."""

from __future__ import annotations

import json

import pytest

from sgl_flashsample.model_config import HeadError, head_of, shard_of
from sgl_flashsample.tables.schema import HeadShape

QWEN3_8B = {"vocab_size": 151936, "hidden_size": 4096, "torch_dtype": "bfloat16"}
GEMMA = {"vocab_size": 262144, "hidden_size": 3840, "final_logit_softcapping": 30.0, "torch_dtype": None}


@pytest.fixture
def config(tmp_path):
    def write(text: str | None = None, **values) -> str:
        (tmp_path / "config.json").write_text(json.dumps(values) if text is None else text)
        return str(tmp_path / "config.json")

    return write


def test_a_head_is_read_from_a_models_folder_or_config_and_what_is_given_beats_it(config, tmp_path):
    path = config(**QWEN3_8B, time_step_limit=[0.0, float("inf")])  # as configs of state-space models have it
    assert head_of(path) == head_of(str(tmp_path)) == HeadShape(vocab=151936, hidden=4096, dtype="bf16")
    given = HeadShape(vocab=1000, hidden=64, dtype="fp16", softcap=True)
    assert head_of(path, 1000, 64, "float16", True) == given
    assert head_of(None, 1000, 64, "half", True) == given
    assert head_of(None, 1000, 64) == HeadShape(vocab=1000, hidden=64, dtype="bf16")
    assert head_of(path, dtype="float8_e4m3fn") == HeadShape(vocab=151936, hidden=4096, dtype="e4m3")


def test_a_head_within_a_model_that_also_sees_and_its_softcap(config):
    path = config(text_config=GEMMA, torch_dtype="float16", hidden_size=1)
    assert head_of(path) == HeadShape(vocab=262144, hidden=3840, dtype="fp16", softcap=True)
    assert not head_of(path, softcap=False).softcap


def test_a_hub_s_name_is_looked_up_in_the_cache_and_asks_no_hub_then(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("the hub is asked"))
    repository = tmp_path / "models--Qwen--Qwen3-8B"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps(QWEN3_8B))
    assert head_of("Qwen/Qwen3-8B") == HeadShape(vocab=151936, hidden=4096, dtype="bf16")


def test_a_hub_s_config_that_is_not_in_the_cache_is_downloaded(monkeypatch, config, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    there = {("Qwen/Qwen3-8B", "config.json"): config(**QWEN3_8B)}

    def download(name: str, file: str) -> str:
        if (name, file) not in there:
            raise OSError("404")
        return there[name, file]

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    # It is asked once before: a download is tried for half a minute where there is no network.
    monkeypatch.setattr(hub, "hf_hub_url", lambda name, file: (name, file))
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda url: download(*url))
    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert head_of("Qwen/Qwen3-8B") == HeadShape(vocab=151936, hidden=4096, dtype="bf16")
    with pytest.raises(HeadError, match="nor a model that could be fetched from the Hugging Face hub"):
        head_of("Qwen/another")


def test_a_hub_that_is_not_reached_is_asked_once_and_a_folder_is_no_name_of_it(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def unreachable(url: str) -> None:
        asked.append(url)
        raise Exception("Name or service not known")  # httpx's, which are no OSError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(hub, "hf_hub_download", lambda *_: pytest.fail("a download is begun"))
    with pytest.raises(HeadError, match="nor a model that could be fetched from the Hugging Face hub"):
        head_of("Qwen/another")
    assert len(asked) == 1
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    with pytest.raises(HeadError, match=r"^weights is a folder without a config\.json; expected a model's folder$"):
        head_of("weights")
    assert len(asked) == 1


def test_a_config_need_not_have_what_is_given(config):
    shape = HeadShape(vocab=50257, hidden=768, dtype="bf16")
    assert head_of(config(hidden_size=768), vocab=50257) == shape
    file = config(vocab_size=50257, n_embd=768)
    assert head_of(file, hidden=768) == shape
    with pytest.raises(HeadError, match="has no integer hidden_size"):
        head_of(file, vocab=50257)


def test_a_text_model_has_what_transformers_takes_for_an_entry_that_is_not_there(config):
    """Gemma 3's have no size of the vocabulary."""
    pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text", "hidden_size": 3840}
    file = config(model_type="gemma3", text_config=text)
    assert (head_of(file).vocab, head_of(file).hidden) == (262_208, 3840)
    with pytest.raises(HeadError, match="has no integer vocab_size"):
        head_of(config(model_type="another", text_config=text))


def test_a_shard_is_cut_as_servers_cut_it(config):
    assert (shard_of(151936, 1), shard_of(151936, 2), shard_of(50257, 4)) == (151936, 75968, 12576)
    assert (shard_of(151936, 3), shard_of(128256, 6), shard_of(202048, 8)) == (50688, 21376, 25256)
    assert head_of(config(**QWEN3_8B), tp=2) == HeadShape(vocab=75968, hidden=4096, dtype="bf16", tp=2)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is no config: Expecting value"),
        ("[]", "is no config: it holds a list"),
        ("[" * 100_000, "is no config: "),
        ("\xff", "is no config: "),
        ('{"vocab_size": "many"}', "has no integer vocab_size"),
        ('{"vocab_size": 5}', "has no integer hidden_size"),
        ('{"vocab_size": 5, "hidden_size": true}', "has no integer hidden_size"),
        (
            '{"vocab_size": 5, "hidden_size": 64, "dtype": "int8"}',
            "--dtype is 'int8'; expected bf16, fp16, fp32 or e4m3",
        ),
        (" " * (1 << 22) + "{}", "expected 4194304 or fewer"),
    ],
    ids=str.strip,
)
def test_a_config_that_is_none_is_one_line(config, text, message):
    with pytest.raises(HeadError) as error:
        head_of(config(text))
    assert message in str(error.value) and str(error.value).isprintable()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"model": None}, "give a model's folder or config.json, or --vocab and --hidden"),
        ({"model": ""}, "the model's name is empty: expected a model's folder, its config.json or a hub's name"),
        ({"model": "/nonexistent/model"}, "/nonexistent/model is neither a model's folder nor a config.json"),
        ({"model": None, "vocab": 0, "hidden": 64}, "--vocab is 0; expected an integer from 1 to 16777216"),
        ({"model": None, "vocab": 640, "hidden": 8}, "--hidden is 8; expected an integer from 16 to 16777216"),
        ({"model": None, "vocab": 640, "hidden": 64, "tp": 0}, "--tp is 0; expected an integer from 1 to 16777216"),
    ],
)
def test_a_head_that_is_none_is_one_line(arguments, message):
    with pytest.raises(HeadError, match=message):
        head_of(**arguments)
