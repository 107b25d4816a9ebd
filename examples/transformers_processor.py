"""``generate`` of transformers with a logits processor: it gets logits, ``sample_from_logits`` draws from them, and
greedy decoding takes the one id that the processor leaves.

    python examples/transformers_processor.py HuggingFaceTB/SmolLM2-135M-Instruct "The capital of France is"

With ``transformers_generate`` the model's own LM head does not run either. Without a GPU the logits are drawn from in
host memory, which needs Numba.
"""

import sys

import torch

from sgl_flashsample import BatchParams, sample_from_logits
from sgl_flashsample.sampler import seed_of_sample


class Draw:
    """Rows have the seeds of the samples of ``seed``."""

    def __init__(self, temperature, seed):
        self.temperature, self.seed = temperature, seed

    def __call__(self, ids, logits):
        def rows(value, dtype):
            return torch.full((len(logits),), value, dtype=dtype, device=logits.device)

        seeds = torch.tensor([seed_of_sample(self.seed, row) for row in range(len(logits))], device=logits.device)
        params = BatchParams(rows(self.temperature, torch.float32), seeds, rows(ids.shape[1], torch.int64))
        drawn = sample_from_logits(logits, params).token_ids
        return torch.full_like(logits, float("-inf")).scatter(1, drawn[:, None], 0.0)


def generate(model, ids, steps, temperature=0.7, seed=7):
    return model.generate(ids, max_new_tokens=steps, do_sample=False, logits_processor=[Draw(temperature, seed)])


def main(name, prompt):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name).to(device)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    print(tokenizer.decode(generate(model, ids, 24)[0]))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
