"""A ``custom_generate`` of transformers: hidden states in, tokens out, without the model's own LM head.

    recipe = {"custom_generate": "examples/transformers_generate", "trust_remote_code": True}
    model.generate(ids, do_sample=True, temperature=0.7, seed=7, max_new_tokens=24, **recipe)

do_sample, temperature, top_k, top_p, min_p, ends and lengths are those of the call, else of the model's generation
config.
"""

import torch

from sgl_flashsample import LMHead, Sampler, SamplingParams


def generate(model, inputs=None, generation_config=None, input_ids=None, seed=None, **options):
    """``[B, T + N]``: prompts, ``[B, T]`` of one length, with up to N new ids. A row that has ended is padded."""
    ids = inputs if input_ids is None else input_ids
    given = {name: value for name, value in options.items() if value is not None}
    config, rest = model._prepare_generation_config(generation_config, **given)
    if config.num_beams not in (None, 1) or config.num_return_sequences not in (None, 1) or "logits_processor" in rest:
        raise ValueError(
            "beams, several sequences per prompt and logits processors are not served here; leave them out"
        )
    params = SamplingParams(
        temperature=(1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        seed=seed,
    )
    ends = torch.tensor([] if config.eos_token_id is None else config.eos_token_id, device=ids.device).flatten()
    padding = config.pad_token_id if config.pad_token_id is not None else int(ends[0]) if len(ends) else 0
    sampler, tokens, cache = Sampler(LMHead.from_hf(model)), ids, None
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    steps = config.max_new_tokens or config.max_length - ids.shape[1]
    with torch.inference_mode():
        for _ in range(steps):
            out = model.get_decoder()(tokens, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            drawn = sampler(out.last_hidden_state[:, -1], params, position=ids.shape[1]).token_ids
            tokens = drawn.masked_fill(ended, padding)[:, None]
            ids = torch.cat([ids, tokens], 1)
            ended |= torch.isin(tokens[:, 0], ends)
            if len(ends) and bool(ended.all()):  # waits for the GPU
                break
    return ids
