"""A loop over a Hugging Face model with ``Sampler``: the model gives hidden states, and its own LM head does not run.

    python examples/plain_loop.py HuggingFaceTB/SmolLM2-135M-Instruct "The capital of France is"

Without a GPU: with Numba (`pip install '.[cpu]'` in the checkout).
"""

import sys

import torch

from sgl_flashsample import LMHead, Sampler, SamplingParams

PARAMS = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, seed=7)


def generate(model, ids, steps, params=PARAMS):
    """``[B, steps]`` new ids after ``ids``, ``[B, T]``."""
    sampler, tokens, cache, new = Sampler(LMHead.from_hf(model)), ids, None, []
    with torch.inference_mode():
        for step in range(steps):
            out = model.model(tokens, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            # The token depends on logits, seed and position alone: the same call gives the same text again.
            out = sampler(out.last_hidden_state[:, -1], params, position=ids.shape[1] + step)
            tokens = out.token_ids[:, None]
            new.append(tokens)
    return torch.cat(new, 1)


def main(name, prompt):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name).to(device)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    print(prompt + tokenizer.decode(generate(model, ids, 24)[0]))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
