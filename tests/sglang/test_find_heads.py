"""Where the LM head of a model is: what its code passes to its LogitsProcessor."""

from __future__ import annotations

import importlib

import pytest
import torch
from head_states import TorchProcessor
from serving import needs_sglang

from sgl_flashsample.sglang.find_heads import heads_of, passed_head

pytestmark = needs_sglang


@pytest.fixture
def processors(monkeypatch) -> None:
    """SGLang's LogitsProcessors are stand-ins."""
    monkeypatch.setattr("sglang.srt.layers.logits_processor.LogitsProcessor", TorchProcessor)


class Embeddings(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(8, 4)


class Base(torch.nn.Module):
    """A model with a head that only some of its kinds use."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.logits_processor = Embeddings(), TorchProcessor()
        self.lm_head = torch.nn.Embedding(8, 4)


class Tied(Base):
    def forward(self, input_ids, hidden, batch):
        if batch is None:
            return self.logits_processor(input_ids, hidden, self.model.embed_tokens, batch)
        return self.logits_processor(input_ids, hidden, lm_head=self.model.embed_tokens, forward_batch=batch)


class Inherited(Tied):
    pass


class Local(Base):
    def forward(self, input_ids, hidden, batch):
        head = self.lm_head
        return self.logits_processor(input_ids, hidden, head, batch)


class Several(Base):
    def forward(self, input_ids, hidden, batch):
        self.logits_processor(input_ids, hidden, self.model.embed_tokens, batch)
        return self.logits_processor(input_ids, hidden, self.lm_head, batch)


class Missing(Base):
    def forward(self, input_ids, hidden, batch):
        return self.logits_processor(input_ids, hidden, self.output, batch)


@pytest.mark.parametrize("kind", [Tied, Inherited, Local, Several, Missing, Base])
def test_a_head_is_what_the_model_passes_and_else_its_lm_head(processors, kind):
    model = kind()
    ((processor, lm_head),) = heads_of(model)
    assert processor is model.logits_processor
    assert lm_head is (model.model.embed_tokens if isinstance(model, Tied) else model.lm_head)


def test_a_model_without_either_shows_no_head(processors):
    model = Missing()
    del model.lm_head
    assert not list(heads_of(model))


MODELS = [
    ("gemma2", "Gemma2ForCausalLM", "model.embed_tokens"),
    ("commandr", "CohereForCausalLM", "model.embed_tokens"),
    ("internlm2", "InternLM2ForCausalLM", "output"),
    ("mllama", "MllamaForConditionalGeneration", "language_model.lm_head"),
    ("qwen3", "Qwen3ForCausalLM", "lm_head"),
]


@pytest.mark.parametrize("module, name, place", MODELS, ids=[name for _, name, _ in MODELS])
def test_the_heads_of_models_of_the_installed_sglang_show(module, name, place):
    model = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
    assert passed_head(model, "logits_processor") == place
