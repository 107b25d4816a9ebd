"""The demonstration checkpoint: the distribution it claims is the one that its weights give."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sgl_flashsample.demo import markov


@pytest.mark.parametrize("name", ["tiny", "tiny-llama-tied", "tiny-softcap", "tiny-granite"])
def test_a_written_checkpoint_loads_with_the_same_truth_and_passes_its_embedding_through(tmp_path, name):
    size = markov.SIZES[name]
    written = markov.write(tmp_path, size)
    loaded = markov.MarkovModel.load(tmp_path)
    tokens = torch.arange(0, size.vocab_size, 37)
    assert torch.equal(written.logits(tokens), loaded.logits(tokens))
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) is not size.tied
    for key, tensor in tensors.items():
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            assert not tensor.any(), f"{key} would write to the residual stream"
    want = torch.nn.functional.rms_norm(tensors["model.embed_tokens.weight"][tokens], (size.hidden_size,), eps=1e-6)
    head = tensors["model.embed_tokens.weight" if size.tied else "lm_head.weight"]
    logits = want.double() @ head.double().T / (size.logits_scaling or 1.0)
    if size.softcap:
        logits = size.softcap * torch.tanh(logits / size.softcap)
    torch.testing.assert_close(loaded.logits(tokens), logits, rtol=0, atol=1e-5)


def test_contexts_are_peaked_zipf_like_and_flat():
    model = markov.build(markov.SIZES["tiny"])
    member = torch.tensor([int((model.context == c).nonzero()[0, 0]) for c in range(markov.CONTEXTS)])
    top = model.distribution(member).amax(-1)
    assert (top[0::4] > 0.8).all()
    assert ((top[1::4] > 0.05) & (top[1::4] < 0.6)).all()
    assert (top[3::4] < 0.02).all()


def test_tokens_of_one_context_share_their_distribution():
    model = markov.build(markov.SIZES["tiny"])
    same = (model.context == model.context[5]).nonzero().flatten()
    logits = model.logits(same[:4])
    assert torch.equal(logits[0], logits[3])


def test_a_second_write_keeps_the_files_and_another_size_replaces_them(tmp_path):
    markov.write(tmp_path, markov.SIZES["tiny"])
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns
    markov.write(tmp_path, markov.SIZES["tiny"])
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before
    markov.write(tmp_path, dataclasses.replace(markov.SIZES["tiny"], vocab_size=512))
    assert markov.MarkovModel.load(tmp_path).head.shape[0] == 512


def test_every_size_has_a_config_that_names_its_dimensions():
    for name, size in markov.SIZES.items():
        values = markov.config(size)
        assert values["hidden_size"] == size.hidden_size, name
        assert size.hidden_size % markov.CONTEXTS == 0
