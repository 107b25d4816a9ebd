"""``Sampler``: numbers in any form draw what ``sample`` draws from tensors, and the examples of the page run."""

from __future__ import annotations

import concurrent.futures
import copy
import pickle
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from core_examples import ROWS, SCREEN, SCREENED, TILE, VOCAB, example, table_of

from sgl_flashsample import BatchParams, LMHead, Sampler, SamplingParams, Truncation, argmax, sample, sample_from_logits
from sgl_flashsample.dispatch import default_table
from sgl_flashsample.kernels.params import SampleOutput
from sgl_flashsample.kernels.reference import logits_ref
from sgl_flashsample.kernels.workspace import ScreenCounter
from sgl_flashsample.sampler import seed_of_sample
from sgl_flashsample.screen import Screen
from sgl_flashsample.tables import lookup

PAGE = Path(__file__).resolve().parents[2] / "docs" / "library" / "index.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
FORMS = {"numbers": lambda values: values[0], "lists": list, "tensors": torch.tensor}


@pytest.fixture
def case(device, monkeypatch, tmp_path):
    monkeypatch.setenv(lookup.FOLDERS_VARIABLE, str(tmp_path))
    return example(device)


def rows(case, value, dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype).expand(len(case.hidden)).contiguous().to(case.hidden.device)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_numbers_in_any_form_draw_what_tensors_on_the_device_draw(case, form):
    num_rows, take = len(case.hidden), FORMS[form]
    values = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.0}
    params = SamplingParams(**{name: take([value] * num_rows) for name, value in values.items()}, seed=[5] * num_rows)
    out = Sampler(case.head)(case.hidden, params, position=take([3] * num_rows), return_logprob=True)
    limits = (rows(case, 20, torch.int32), rows(case, 0.9, torch.float32), rows(case, 0.0, torch.float32))
    tensors = (rows(case, 0.7, torch.float32), rows(case, 5, torch.int64), rows(case, 3, torch.int64))
    wanted = sample(case.hidden, case.head, BatchParams(*tensors, Truncation(*limits, 20)), return_logprob=True)
    assert torch.equal(out.token_ids, wanted.token_ids) and torch.equal(out.logprobs, wanted.logprobs)


def test_a_table_that_cannot_be_used_is_one_warning_and_the_built_in_choices_draw(case, tmp_path, caplog):
    file = tmp_path / "table.json"
    file.write_text("{")
    sampler = Sampler(case.head, tuned=file)
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith(f"flashsample: {file}: ")
    assert sampler.head.table.lookup(1) == default_table(sampler.head.lm_head).lookup(1)


@pytest.mark.slow
def test_one_seed_gives_the_rows_those_of_its_samples(case):
    for seed in (7, 2**63 - 1):
        samples = [seed_of_sample(seed, row) for row in range(len(case.hidden))]
        one, each = (
            Sampler(case.head)(case.hidden, SamplingParams(seed=given), position=0) for given in (seed, samples)
        )
        assert samples[0] == seed and torch.equal(one.token_ids, each.token_ids)


def test_samples_of_two_seeds_have_no_seed_in_common():
    seeds = [seed_of_sample(seed, sample) for seed in (-(2**63), *range(100)) for sample in range(100)]
    assert len(set(seeds)) == len(seeds) and all(-(2**63) <= seed < 2**63 for seed in seeds)


@pytest.mark.slow
def test_without_seeds_and_positions_each_call_draws_anew_and_a_sampler_with_a_seed_draws_it_all_again(case):
    samplers = [Sampler(case.head, seed=3), Sampler(case.head, seed=3), Sampler(case.head)]
    drawn = [[sampler(case.hidden).token_ids.tolist() for _ in range(3)] for sampler in samplers]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(map(tuple, drawn[0]))) == 3


@pytest.mark.slow
def test_greedy_rows_are_those_of_temperature_0(case):
    params = SamplingParams(temperature=0)
    assert params.all_greedy and not SamplingParams(temperature=[0, 1.0]).all_greedy
    wanted = (case.hidden.double() @ case.head.weight.double().T)[:, :VOCAB].argmax(-1)
    assert torch.equal(Sampler(case.head)(case.hidden, params).token_ids, wanted)


@pytest.mark.slow
def test_parameters_of_one_call_are_not_those_of_the_next(case):
    sampler, fresh = Sampler(case.head), Sampler(case.head)
    sampler(case.hidden, SamplingParams(temperature=0), position=1)
    params = SamplingParams(temperature=5.0, seed=2)
    drawn = [each(case.hidden, params, position=1).token_ids for each in (sampler, fresh)]
    assert torch.equal(*drawn)


def test_a_seed_that_the_sampler_is_given_between_calls_is_that_of_the_next(case):
    sampler, params = Sampler(case.head, seed=3), SamplingParams(temperature=5.0)
    sampler(case.hidden, params)
    sampler.seed = 4
    want = Sampler(case.head)(case.hidden, SamplingParams(temperature=5.0, seed=4), position=1)
    assert torch.equal(sampler(case.hidden, params).token_ids, want.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [list, np.array])
def test_a_sequence_that_changes_changes_no_parameters_that_were_made_of_it(case, sequence):
    sampler, numbers = Sampler(case.head), sequence([5.0] * len(case.hidden))
    params = SamplingParams(temperature=numbers, seed=2)
    want = sampler(case.hidden, params, position=1).token_ids
    numbers[:] = sequence([0.0] * len(case.hidden))
    assert torch.equal(sampler(case.hidden, params, position=1).token_ids, want)
    assert not params.all_greedy


CHANGES = {
    "temperature": (torch.float32, 5.0, 0.0),
    "seed": (torch.int64, 2, 3),
    "top_k": (torch.int32, 0, 1),
    "top_p": (torch.float32, 1.0, 1e-6),
    "min_p": (torch.float32, 0.0, 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, wide", [("temperature", False), *((name, True) for name in CHANGES)])
def test_a_tensor_that_changes_is_drawn_with_as_it_is_by_then_in_whatever_dtype(case, name, wide):
    dtype, old, new = CHANGES[name]
    if wide:
        dtype = torch.int32 if name == "seed" else torch.int64 if name == "top_k" else torch.float64
    numbers = {"temperature": 5.0, "seed": [2] * len(case.hidden)}
    tensor = torch.full((len(case.hidden),), old, dtype=dtype, device=case.hidden.device)
    sampler, params = Sampler(case.head), SamplingParams(**numbers | {name: tensor})
    before = sampler(case.hidden, params, position=1).token_ids
    tensor.fill_(new)
    after = sampler(case.hidden, params, position=1).token_ids
    want = Sampler(case.head)(case.hidden, SamplingParams(**numbers | {name: [new] * len(tensor)}), position=1)
    assert torch.equal(after, want.token_ids) and not torch.equal(after, before)


def test_what_is_made_of_numbers_and_of_tensors_that_fit_is_made_once(case, monkeypatch):
    sampler, made = Sampler(case.head), []
    monkeypatch.setattr(sampler.head, "draw", lambda hidden, batch, **_: made.append(batch))
    for seed in (2, [2] * len(case.hidden), rows(case, 2, torch.int64)):
        params = SamplingParams(temperature=[0.7] * len(case.hidden), top_k=5, seed=seed)
        first, second = [sampler(case.hidden, params) for _ in range(2)] and made[-2:]
        assert first.temperature is second.temperature and first.seed is second.seed
        assert first.truncation is second.truncation


@pytest.mark.slow
def test_a_batch_larger_than_announced_is_drawn_all_the_same(case):
    small, large = Sampler(case.head, max_rows=1, seed=1), Sampler(case.head, max_rows=64, seed=1)
    assert torch.equal(small(case.hidden).token_ids, large(case.hidden).token_ids)
    assert small.head.max_rows == len(case.hidden)


@pytest.mark.slow
def test_a_screen_changes_no_token(case):
    plain, screened = (Sampler(case.head, seed=1, screen=screen) for screen in (False, True))
    assert screened.head.screen.max_rows == 64
    assert torch.equal(plain(case.hidden).token_ids, screened(case.hidden).token_ids)


@pytest.mark.slow
def test_a_batch_larger_than_announced_is_screened_as_well_and_counted_with_the_others(case):
    plain, screened = Sampler(case.head, seed=1), Sampler(case.head, max_rows=4, seed=1, screen=True)
    screened.head.table = table_of(case.head, kinds=SCREENED, sizes={3: SCREEN, 8: SCREEN, 9: TILE})
    for rows in (3, 8):
        hidden = case.hidden[:rows]
        assert torch.equal(screened(hidden).token_ids, plain(hidden).token_ids)
    assert screened.head.screen.counters[ScreenCounter.ROWS] == 11
    screened(case.hidden)
    assert screened.head.screen.max_rows == 8, "scratch for rows that no table screens"


@pytest.mark.slow
def test_a_sampler_whose_screen_was_closed_draws_larger_batches_without_it(case):
    plain, closed = Sampler(case.head, seed=1), Sampler(case.head, max_rows=4, seed=1, screen=True)
    closed.head.table = table_of(case.head, kinds=SCREENED, sizes={8: SCREEN})
    closed.head.screen.close()
    hidden = case.hidden[:8]
    assert torch.equal(closed(hidden).token_ids, plain(hidden).token_ids)


@pytest.mark.parametrize(
    "params, truncates, max_top_k",
    [
        ({}, False, None),
        ({"top_k": 0, "top_p": [1.0, 1], "min_p": 0}, False, None),
        ({"top_k": [5, 40]}, True, 40),
        ({"top_k": [5, 0]}, True, None),
        ({"top_p": 0.9}, True, None),
        ({"min_p": [0, 0.1]}, True, None),
        ({"top_k": torch.tensor([5])}, True, None),
    ],
    ids=str,
)
def test_limits_are_passed_on_only_where_there_are_any(params, truncates, max_top_k):
    made = SamplingParams(**params)
    assert (made.truncates, made.max_top_k) == (truncates, max_top_k)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("temperature", -1, "0, or 1e-6 to 1e30"),
        ("temperature", [1.0, 1e-9], "0, or 1e-6 to 1e30"),
        ("temperature", "hot", "0, or 1e-6 to 1e30"),
        ("temperature", None, "0, or 1e-6 to 1e30"),
        ("top_k", 1.5, "an int32"),
        ("top_k", float("inf"), "an int32"),
        ("top_k", True, "an int32"),
        ("top_k", [-(2**31) - 1, 1], "an int32"),
        ("temperature", 1e39, "0, or 1e-6 to 1e30"),
        ("top_p", 0, "more than 0, at most 1"),
        ("top_p", float("nan"), "more than 0, at most 1"),
        ("min_p", [1.5], "0 to 1"),
        ("seed", 2**63, "an int64"),
        ("seed", 5.0, "an int64"),
    ],
)
def test_a_number_out_of_its_range_is_named_with_the_range(name, value, words):
    with pytest.raises(ValueError, match=rf"^{name} is .*; expected {re.escape(words)}$"):
        SamplingParams(**{name: value})


def test_what_does_not_fit_the_batch_is_refused_by_name(case):
    sampler = Sampler(case.head)
    with pytest.raises(ValueError, match=r"top_p has shape \(2,\); expected \(\d+,\), one for each row of hidden"):
        sampler(case.hidden, SamplingParams(top_p=[0.5, 0.5]))
    with pytest.raises(ValueError, match=r"hidden is a list; expected a \[B, D\] tensor"):
        sampler([[1.0]])
    with pytest.raises(ValueError, match="params is a dict; expected SamplingParams"):
        sampler(case.hidden, {"temperature": 1.0})


@pytest.mark.parametrize("rows", [0, 1.5, 8.0, "8", 65537])
def test_a_sampler_of_no_rows_or_of_too_many_is_refused(case, rows):
    with pytest.raises(ValueError, match=f"max_rows is {rows!r}; expected an integer, 1 to 65536"):
        Sampler(case.head, max_rows=rows)


@pytest.mark.parametrize(
    ("name", "value", "words"), [("screen", "off", "True or False"), ("tuned", 3, "the file of a tuned table, or None")]
)
def test_an_option_of_another_type_is_refused(case, name, value, words):
    with pytest.raises(ValueError, match=f"^{name} is {value!r}; expected {words}$"):
        Sampler(case.head, **{name: value})


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_a_tensor_of_no_numbers_is_refused(case, dtype):
    temperature = torch.ones(len(case.hidden), dtype=dtype, device=case.hidden.device)
    with pytest.raises(ValueError, match=f"temperature is {dtype}; expected numbers"):
        Sampler(case.head)(case.hidden, SamplingParams(temperature=temperature))


@pytest.mark.parametrize("seed", [1.5, "x", True, 2**63])
def test_a_seed_is_an_int64(case, seed):
    with pytest.raises(ValueError, match=f"seed is {seed!r}; expected an int64"):
        Sampler(case.head, seed=seed)


def test_a_position_is_an_int64_of_0_or_more(case):
    sampler = Sampler(case.head)
    for position in (0.5, [0.5] * len(case.hidden), -1, 2**63, "ab", [None]):
        with pytest.raises(ValueError, match=r"position is .*; expected an int64, 0 or more"):
            sampler(case.hidden, position=position)


def test_tensors_of_seeds_and_positions_hold_integers(case):
    sampler, floats = Sampler(case.head), torch.ones(len(case.hidden))
    with pytest.raises(ValueError, match=r"position is torch\.float32; expected integers"):
        sampler(case.hidden, position=floats)
    with pytest.raises(ValueError, match=r"seed is torch\.float32; expected integers"):
        sampler(case.hidden, SamplingParams(seed=floats))


@pytest.mark.slow
def test_numbers_of_numpy_are_numbers_and_a_copy_draws_what_its_original_draws(case):
    num_rows = len(case.hidden)
    plain, numpy_s = Sampler(case.head, seed=3), copy.deepcopy(Sampler(case.head, seed=np.int64(3)))
    want = plain(case.hidden, SamplingParams(temperature=0.7, top_k=[5] * num_rows), position=list(range(num_rows)))
    params = SamplingParams(temperature=np.float32(0.7), top_k=np.full(num_rows, 5))
    for position in (np.arange(num_rows), [*np.arange(num_rows)]):
        assert torch.equal(numpy_s(case.hidden, params, position=position).token_ids, want.token_ids)


def test_a_sampler_that_was_pickled_draws_the_same_and_has_its_screen_once_that_is_rebuilt(case):
    sampler, params = Sampler(case.head, seed=3, screen=True), SamplingParams(temperature=0.7)
    sampler(case.hidden, params)
    loaded, hidden = pickle.loads(pickle.dumps((sampler, case.hidden)))
    want = sampler(case.hidden, params).token_ids
    assert torch.equal(loaded(hidden, params).token_ids, want)
    screen, head = loaded.head.screen, loaded.head.lm_head
    assert not screen.serves(head)
    screen.rebuild(head)
    assert screen.serves(head) and torch.equal(loaded(hidden, params, position=1).token_ids, want)


def test_scratch_that_inference_mode_has_made_serves_outside_of_it(case):
    sampler = Sampler(case.head)
    with torch.inference_mode():
        inside = sampler(case.hidden, position=1, logprobs=2)
    outside = sampler(case.hidden, position=1, logprobs=2)
    assert torch.equal(inside.token_ids, outside.token_ids)


def test_a_batch_that_is_refused_leaves_the_scratch_as_it_is(case):
    sampler = Sampler(case.head)
    rows = sampler.head.max_rows
    with pytest.raises(ValueError, match="hidden is "):
        sampler(torch.zeros(rows + 1, case.hidden.shape[1] + 1, dtype=case.hidden.dtype, device=case.hidden.device))
    assert sampler.head.max_rows == rows


@pytest.mark.slow
def test_a_top_k_beyond_int32_is_off_and_not_another_one(case):
    num_rows = len(case.hidden)
    drawn = [
        Sampler(case.head)(case.hidden, SamplingParams(temperature=5.0, seed=2, top_k=top_k), position=1).token_ids
        for top_k in (torch.full((num_rows,), 2**32 + 1), torch.zeros(num_rows, dtype=torch.int32))
    ]
    assert torch.equal(*drawn)


def test_threads_that_share_a_sampler_draw_one_after_another(case, monkeypatch):
    """They share its scratch."""
    inside: list[int] = []

    def draw(hidden, *arguments, **options):
        inside.append(threading.get_ident())
        time.sleep(0.02)
        assert len(set(inside)) == 1, "another thread draws"
        inside.clear()
        return SampleOutput.empty(len(hidden), hidden.device, False)

    shared = Sampler(case.head)
    monkeypatch.setattr(shared.head, "draw", draw)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: shared(case.hidden), range(8)))
    assert shared.calls == 8


# Hugging Face models.


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=300, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config).eval()
    return made.to("cuda") if torch.cuda.is_available() else made


def another_model(model, head, **changes):
    config = type(model.config)(**model.config.to_dict() | changes)
    return type("Model", (), {"config": config, "get_output_embeddings": lambda self: head})()


@pytest.mark.slow
def test_the_head_of_a_model_has_its_padding_softcap_and_scale(model):
    head = LMHead.from_hf(model)
    assert head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert (head.vocab_size, head.softcap, head.logit_scale) == (300, None, None)
    changes = {"vocab_size": 290, "final_logit_softcapping": 30.0, "logits_scaling": 8.0}
    head = LMHead.from_hf(another_model(model, model.lm_head, **changes))
    assert (head.vocab_size, head.softcap, head.logit_scale) == (290, 30.0, 0.125)


SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
TRANSFORMED = {
    "Cohere": HEADS | {"logit_scale": 0.25},
    "Gemma2": HEADS | {"head_dim": 16, "final_logit_softcapping": 3.0},
    "Granite": HEADS | {"logits_scaling": 8.0},
    "HyperCLOVAX": HEADS | {"logits_scaling": 0.125},
    "FalconH1": HEADS | MAMBA | {"lm_head_multiplier": 0.05},
    "RecurrentGemma": {"num_attention_heads": 2, "block_types": ["attention"], "logits_soft_cap": 3.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", TRANSFORMED)
def test_a_head_gives_the_logits_of_the_models_own(family):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**SIZES, **TRANSFORMED[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    model.get_output_embeddings().weight.data.mul_(40.0)
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        want, hidden = model(ids).logits[0].double(), model.model(ids).last_hidden_state[0]
    head = LMHead.from_hf(model)
    logits = logits_ref(hidden, head.weight, logit_scale=head.logit_scale, softcap=head.softcap)
    torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)
    plain = logits_ref(hidden, head.weight)
    assert (plain - want).abs().max() > 1.0, "the scale and the softcap are not looked at"


class LoraLinear(torch.nn.Module):
    """As of an adapter: its weight is that of the layer below, its output is not."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base_layer(hidden) + hidden.sum()


class NormedLinear(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, torch.nn.functional.normalize(self.weight))


class PackedTensor(torch.Tensor):
    """As a quantised or sharded weight is."""


def linear(**options) -> torch.nn.Linear:
    return torch.nn.Linear(32, 300, bias=False, **options)


def patched() -> torch.nn.Linear:
    head = linear()
    head.forward = lambda hidden: 2 * hidden
    return head


def packed() -> torch.nn.Linear:
    head = linear()
    head.weight = torch.nn.Parameter(head.weight.detach().as_subclass(PackedTensor))
    return head


REFUSED = {
    "none": (lambda: None, "without output embeddings; expected a causal LM"),
    "a bias": (lambda: torch.nn.Linear(32, 300), "has a bias; expected none"),
    "an adapter": (
        lambda: LoraLinear(linear()),
        r"is a \w+\.LoraLinear with a forward of its own.*merge_and_unload\(\)",
    ),
    "an adapter over a bias": (lambda: LoraLinear(torch.nn.Linear(32, 300)), "LoraLinear with a forward of its own"),
    "a sum": (
        lambda: torch.nn.ParameterDict({"weight": torch.ones(300, 32)}),
        "ParameterDict with a forward of its own",
    ),
    "a forward of a subclass": (lambda: NormedLinear(32, 300, bias=False), "NormedLinear with a forward of its own"),
    "a forward of the instance": (patched, "torch.nn.modules.linear.Linear with a forward of its own"),
    "an embedding": (lambda: torch.nn.Embedding(300, 32), "Embedding with a forward of its own"),
    "a packed weight": (packed, "a PackedTensor that is quantised, sharded or computed"),
    "a computed weight": (
        lambda: torch.nn.utils.parametrizations.weight_norm(linear()),
        "the LM head, a .*ParametrizedLinear, is a Tensor that is quantised, sharded or computed",
    ),
    "too few rows": (lambda: torch.nn.Linear(32, 299, bias=False), "has 299 rows; expected the 300 ids"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_a_model_whose_head_is_another_thing_than_a_linear_layer_is_refused_by_name(model, case):
    head, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        LMHead.from_hf(another_model(model, head()))


@pytest.mark.slow
def test_a_model_that_adds_a_bias_after_its_head_is_refused_and_zeros_are_none(model):
    with_bias = another_model(model, model.lm_head)
    with_bias.final_logits_bias = torch.zeros(1, 300)
    assert LMHead.from_hf(with_bias).vocab_size == 300
    with_bias.final_logits_bias[0, 3] = 1.0
    with pytest.raises(ValueError, match="adds its final_logits_bias to the logits; expected none, or zeros"):
        LMHead.from_hf(with_bias)


@pytest.mark.slow
def test_a_head_whose_inputs_are_moved_between_devices_is_a_linear_layer(model):
    head = patched()
    head._hf_hook = object()
    assert LMHead.from_hf(another_model(model, head)).weight is head.weight


@pytest.mark.slow
def test_a_model_of_several_modalities_gives_the_logits_of_its_text_model():
    """SGLang's, which the ``logits`` of transformers' wrapper are not."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=8)
    text = transformers.Gemma2Config(**SIZES, **TRANSFORMED["Gemma2"])
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=32)
    head = LMHead.from_hf(transformers.PaliGemmaForConditionalGeneration(config))
    assert (head.vocab_size, head.softcap, head.logit_scale) == (96, 3.0, None)


# Weights that are replaced.


def put_data(head: torch.nn.Linear, weight: torch.Tensor) -> None:
    head.weight.data = weight


def write(head: torch.nn.Linear, weight: torch.Tensor) -> None:
    with torch.no_grad():
        head.weight.copy_(weight)


def assign(head: torch.nn.Linear, weight: torch.Tensor) -> None:
    head.load_state_dict({"weight": weight}, assign=True)


def tie(head: torch.nn.Linear, weight: torch.Tensor) -> None:
    head.weight = torch.nn.Parameter(weight)


REPLACEMENTS = {"in place": write, "data": put_data, "assigned": assign, "tied": tie}
each_replacement = pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)


@pytest.fixture
def module(case, model):
    """The head of the batch as that of a model."""
    module = torch.nn.Linear(case.hidden.shape[1], VOCAB, bias=False)
    module.weight = torch.nn.Parameter(case.head.weight[:VOCAB].clone())
    return module


def head_of(module: torch.nn.Linear, model) -> LMHead:
    return LMHead.from_hf(another_model(model, module, vocab_size=len(module.weight)))


def greedy(case, weight: torch.Tensor) -> torch.Tensor:
    return (case.hidden.double() @ weight.double().T).argmax(-1)


@pytest.mark.slow
@each_replacement
def test_a_head_draws_from_a_weight_that_is_replaced_later(case, module, model, replace):
    head = head_of(module, model)
    sampler, flipped = Sampler(head), module.weight.detach().flip(0).contiguous()
    for weight in (module.weight.detach().clone(), flipped):
        assert torch.equal(argmax(case.hidden, head), greedy(case, weight))
        assert torch.equal(sampler(case.hidden, SamplingParams(temperature=0)).token_ids, greedy(case, weight))
        replace(module, flipped)


@pytest.mark.slow
@each_replacement
def test_a_screen_serves_no_weight_that_is_replaced_until_it_is_rebuilt(case, module, model, replace):
    sampler = Sampler(head_of(module, model), screen=True)
    sampler.head.table = table_of(case.head, kinds=SCREENED, sizes={ROWS: SCREEN})
    flipped = module.weight.detach().flip(0).contiguous()
    plain = Sampler(LMHead(flipped), seed=sampler.seed)
    sampler(case.hidden)
    assert sampler.head.screen.counters[ScreenCounter.ROWS] == ROWS
    replace(module, flipped.clone())
    assert torch.equal(sampler(case.hidden, position=1).token_ids, plain(case.hidden, position=1).token_ids)
    assert sampler.head.screen.counters[ScreenCounter.ROWS] == ROWS
    sampler.head.screen.rebuild(sampler.head.lm_head)
    assert torch.equal(sampler(case.hidden, position=2).token_ids, plain(case.hidden, position=2).token_ids)
    assert sampler.head.screen.counters[ScreenCounter.ROWS] == 2 * ROWS


@pytest.mark.slow
def test_a_screen_of_a_head_whose_weight_was_replaced_before_it_copies_the_new_one(case, module, model):
    head = head_of(module, model)
    assign(module, module.weight.detach().flip(0).contiguous())
    assert Screen(head, ROWS).serves(head.current)


@pytest.mark.slow
def test_a_screen_that_is_rebuilt_copies_what_its_head_holds_by_now(case, module, model):
    head = head_of(module, model)
    screen = Screen(head, ROWS)
    assign(module, module.weight.detach().flip(0).contiguous())
    assert not screen.serves(head.current)
    screen.rebuild(head)
    assert screen.serves(head.current)


@pytest.mark.slow
@pytest.mark.parametrize("replace", [put_data, assign])
def test_a_weight_of_another_layout_is_read_as_it_lies(case, module, model, replace):
    """Launches and descriptors remember alignment and distances of rows."""
    head = head_of(module, model)
    assert torch.equal(argmax(case.hidden, head), greedy(case, module.weight.detach()))
    width = case.hidden.shape[1]
    wide = module.weight.detach().new_zeros(VOCAB, 2 * width + 1)[:, 1 : 1 + width]
    replace(module, wide.copy_(module.weight.detach().flip(0)))
    assert head.current.variant != head.variant
    assert torch.equal(argmax(case.hidden, head), greedy(case, wide))


@pytest.mark.slow
def test_a_weight_of_another_dtype_makes_the_sampler_say_so(case, module, model):
    sampler = Sampler(head_of(module, model))
    put_data(module, module.weight.detach().bfloat16())
    with pytest.raises(ValueError, match=r"table is for .*; expected one for the head's"):
        sampler(case.hidden.bfloat16())


@pytest.mark.slow
def test_a_head_whose_weight_stays_is_made_once_and_a_replaced_weight_once_more(case, module, model):
    head = head_of(module, model)
    assert head.current is head
    assign(module, module.weight.detach().clone())
    assert head.current is head.current is head.current.current is not head


@pytest.mark.slow
def test_draws_from_a_weight_that_is_trained_take_no_part_in_the_training(case, module, model):
    sampler = Sampler(head_of(module, model), screen=True)
    out = sampler(case.hidden, return_logprob=True)
    assert module.weight.requires_grad and not out.logprobs.requires_grad
    assert not any(tensor.requires_grad for tensor in sampler.head.screen.int8_head.operands)


# The examples of the page.


def run(example: str) -> dict:
    names: dict = {}
    exec(compile(example, str(PAGE), "exec"), names)
    return names


@pytest.fixture
def ids(model) -> torch.Tensor:
    return torch.tensor([[5, 6, 7], [8, 9, 10]], device=model.device)


def test_the_page_has_three_examples():
    assert len(EXAMPLES) == 3


@pytest.mark.slow
def test_the_example_in_host_memory_draws_the_tokens_of_the_kernels():
    pytest.importorskip("numba")
    variables = run(EXAMPLES[2])
    want = sample_from_logits(variables["logits"], variables["params"]).token_ids
    assert torch.equal(variables["tokens"], want)


@pytest.mark.slow
def test_the_engine_gives_a_sequence_the_same_tokens_whatever_is_beside_it(model, ids):
    names = run(EXAMPLES[0])
    runner, sequence = names["Runner"](model), names["Sequence"]
    hidden = model.model(ids).last_hidden_state[:, -1].detach()
    both = [sequence([1, 2], 0.9, 0.8, seed=4), sequence([1, 2, 3], seed=5)]
    runner.step(both, hidden)
    alone = sequence([1, 2, 3], seed=5)
    runner.step([alone], hidden[1:])
    assert len(both[0].ids) == 3 and alone.ids == both[1].ids


@pytest.mark.slow
def test_the_scores_are_the_log_softmax_of_the_models_logits(model, ids):
    token_ids, top, of_prompt = run(EXAMPLES[1])["score"](model, ids)
    with torch.inference_mode():
        logits = model(ids).logits.float()
    want = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(of_prompt, want, rtol=0, atol=1e-4)
    largest = torch.log_softmax(logits[:, -1] / 0.7, -1).topk(5)
    assert torch.equal(top.token_ids, largest.indices)
    torch.testing.assert_close(top.logprobs, largest.values, rtol=0, atol=1e-4)
    drawn = Sampler(LMHead.from_hf(model))(
        model.model(ids).last_hidden_state[:, -1].detach(), SamplingParams(0.7, seed=7), position=ids.shape[1]
    )
    assert torch.equal(token_ids, drawn.token_ids)
