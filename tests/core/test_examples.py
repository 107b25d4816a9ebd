"""The programs of ``examples/``, with a model of 300 ids. (``offline_engine.py``: ``tests/sglang/test_offline.py``.)"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sgl_flashsample import LMHead, Sampler, SamplingParams
from sgl_flashsample.tools import markov

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("examples")]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=300, num_key_value_heads=2, eos_token_id=None, **sizes)
    return transformers.LlamaForCausalLM(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def ids(model) -> torch.Tensor:
    return torch.tensor([[5, 6, 7], [8, 9, 10]], device=model.device)


def drawn_again(model, text: torch.Tensor, start: int, params: SamplingParams) -> torch.Tensor:
    """The tokens of a text from ``start`` on, each drawn from the hidden state before it."""
    sampler = Sampler(LMHead.from_hf(model))
    with torch.inference_mode():
        hidden = model.model(text[:, :-1]).last_hidden_state
    places = range(start, text.shape[1])
    return torch.stack([sampler(hidden[:, at - 1], params, position=at).token_ids for at in places], 1)


def test_the_plain_loop_gives_seeded_tokens_again_and_greedy_tokens_as_the_model_does(model, ids):
    generate = load("plain_loop.py").generate
    first = generate(model, ids, 6)
    assert first.shape == (2, 6) and torch.equal(first, generate(model, ids, 6))
    greedy = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 3:]
    assert torch.equal(generate(model, ids, 6, SamplingParams(temperature=0)), greedy)


def test_the_engine_gives_requests_the_tokens_that_they_get_alone():
    first, second = load("engine.py").main(steps=8)
    generator = torch.Generator().manual_seed(0)
    embedding, weight = (torch.randn(1000, 64, generator=generator) for _ in range(2))
    if torch.cuda.is_available():
        embedding, weight = embedding.cuda(), weight.cuda()
    sampler = Sampler(LMHead(weight))
    for tokens, params in ((first, SamplingParams(0.8, seed=7)), (second, SamplingParams(top_p=0.9, seed=8))):
        token = 0
        for position, want in enumerate(tokens):
            token = int(sampler(embedding[[token]], params, position=position).token_ids)
            assert token == want
    assert (len(first), len(second)) == (8, 5)


def test_the_logits_processor_draws_what_a_sampler_draws_from_the_hidden_states(model, ids):
    text = load("transformers_processor.py").generate(model, ids, 4, temperature=0.8, seed=1)
    assert torch.equal(drawn_again(model, text, 3, SamplingParams(temperature=0.8, seed=1)), text[:, 3:])


RECIPE = {"custom_generate": str(EXAMPLES / "transformers_generate"), "trust_remote_code": True}


@pytest.fixture
def modules_folder(monkeypatch, tmp_path):
    """transformers copies the code of a custom_generate into this folder, and imports it from there."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))


def test_custom_generate_draws_what_a_sampler_draws(model, ids, modules_folder):
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
    text = model.generate(ids, max_new_tokens=4, seed=3, **options, **RECIPE)
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=3)
    assert torch.equal(text[:, :3], ids)
    assert torch.equal(drawn_again(model, text, 3, params), text[:, 3:])


def test_custom_generate_is_greedy_and_ends_as_generate_does(model, ids, modules_folder):
    free = model.generate(ids, max_new_tokens=5, do_sample=False)
    end = int(free[0, 4])
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    want = model.generate(ids, **options)
    got = model.generate(ids, **options, **RECIPE)
    assert torch.equal(got, want) and not torch.equal(want, free)


def test_custom_generate_penalises_repetition_as_generate_does(model, ids, modules_folder):
    options = {"max_new_tokens": 8, "do_sample": False}
    free = model.generate(ids, **options)
    options |= {"repetition_penalty": 1.5}
    got = model.generate(ids, **options, attention_mask=torch.ones_like(ids), **RECIPE)
    assert torch.equal(got, model.generate(ids, **options)) and not torch.equal(got, free)


UNSERVED = {
    "num_beams": 2,
    "num_return_sequences": 2,
    "bad_words_ids": [[5]],
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "forced_eos_token_id": 0,
    "typical_p": 0.2,
    "epsilon_cutoff": 0.1,
    "sequence_bias": {(5,): -100.0},
    "min_new_tokens": 5,
    "guidance_scale": 2.0,
    "stop_strings": ["."],
    "return_dict_in_generate": True,
    "logits_processor": [],
    "prefix_allowed_tokens_fn": lambda row, ids: [5],
    "stopping_criteria": [],
    "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_custom_generate_refuses_what_it_does_not_serve(model, ids, modules_folder, name):
    value = UNSERVED[name]
    value = value.to(ids.device) if isinstance(value, torch.Tensor) else value
    with pytest.raises(ValueError, match=f"^{name}: not served here; leave them out"):
        model.generate(ids, max_new_tokens=2, do_sample=True, **{name: value}, **RECIPE)


def test_custom_generate_serves_the_options_of_a_model_that_change_nothing(model, ids, modules_folder, monkeypatch):
    off = {"typical_p": 1.0, "min_new_tokens": 0, "num_beams": 1, "use_cache": True, "bos_token_id": 1}
    for name, value in off.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert model.generate(ids, max_new_tokens=1, **RECIPE).shape == (2, 4)


def test_drafts_give_the_tokens_of_the_plain_loop_in_fewer_passes(model):
    generate = load("speculative.py").generate
    params = SamplingParams(temperature=0.7, seed=7)
    (want,) = load("plain_loop.py").generate(model, torch.tensor([[5, 6, 7]], device=model.device), 6, params).tolist()
    alone, passes = generate(model, [5, 6, 7], 6, draft=lambda text: [])
    assert (alone, passes) == (want, 6)
    right, few = generate(model, [5, 6, 7], 6, draft=lambda text: want[len(text) - 3 :][:2])
    assert right == want and few < 4
    wrong, _ = generate(model, [5, 6, 7], 6, draft=lambda text: [1, 2])
    assert wrong == want


def test_ids_are_looked_up_where_the_last_one_was_before():
    looked_up = load("speculative.py").looked_up
    assert looked_up([1, 2, 3, 4, 5, 1, 9, 1]) == [9, 1]
    assert looked_up([1, 2, 3, 4, 5, 2]) == [3, 4, 5]
    assert looked_up([1, 2, 3]) == []


@pytest.mark.parametrize("name", ["plain_loop.py", "transformers_processor.py", "speculative.py"])
def test_each_program_continues_a_text(name, tmp_path, capsys):
    markov.write(tmp_path, markov.SIZES["tiny"])
    load(name).main(str(tmp_path), "The quick")
    assert capsys.readouterr().out.splitlines()[0].startswith("The quick")


def test_the_page_of_examples_names_each_file():
    page = (EXAMPLES / "README.md").read_text()
    files = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.*") if path.suffix in (".py", ".sh")}
    assert {name for name in re.findall(r"\]\(([^)]+)\)", page) if not name.startswith("..")} == files


@pytest.mark.parametrize("name", ["plain_loop", "speculative", "transformers_processor", "offline_engine"])
def test_an_example_without_its_arguments_says_how_it_is_run(name):
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py", "model"], capture_output=True, text=True)
    assert done.returncode == 1 and f"    python examples/{name}.py " in done.stderr and "Traceback" not in done.stderr
