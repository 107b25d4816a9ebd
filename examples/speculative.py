"""Speculative decoding with ``verify``: drafts change how many tokens a pass of the model gives, and no token.

    python examples/speculative.py HuggingFaceTB/SmolLM2-135M-Instruct "1 2 3 4 1 2 3 4 1 2"

The drafts are what followed the last id earlier in the text. Without a GPU: with Numba, or with TRITON_INTERPRET=1.
"""

import sys

import torch

from sgl_flashsample import BatchParams, LMHead, verify


def looked_up(ids, count=3):
    """Up to ``count`` ids that followed the last id where it was before."""
    before = [place for place, token in enumerate(ids[:-1]) if token == ids[-1]]
    return ids[before[-1] + 1 :][:count] if before else []


def generate(model, ids, steps, temperature=0.7, seed=7, draft=looked_up):
    """``steps`` ids after the list ``ids``, and the number of passes that they took. draft: from a list of ids to ids
    that may follow."""
    head, text, passes = LMHead.from_hf(model), list(ids), 0
    device = head.weight.device
    with torch.inference_mode():
        while len(text) < len(ids) + steps:
            nodes = torch.tensor([[text[-1], *draft(text)]], device=device)
            seen = torch.cat([torch.tensor([text[:-1]], dtype=nodes.dtype, device=device), nodes], 1)
            hidden = model.model(seen).last_hidden_state[:, -nodes.shape[1] :]  # an engine keeps a cache
            seeds, positions = torch.tensor([[seed], [len(text)]], device=device)
            out = verify(
                hidden, head, nodes, BatchParams(torch.full((1,), temperature, device=device), seeds, positions)
            )
            text += out.token_ids[0, : out.num_tokens[0]].tolist()
            passes += 1
    return text[len(ids) : len(ids) + steps], passes


def main(name, prompt):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name).to(device)
    new, passes = generate(model, tokenizer(prompt).input_ids, 24)
    print(prompt + tokenizer.decode(new))
    print(f"{len(new)} tokens in {passes} passes of the model")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
