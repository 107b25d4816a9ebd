"""A ``custom_generate`` of transformers: hidden states in, tokens out, without the model's own LM head.

    recipe = {"custom_generate": "examples/transformers_generate", "trust_remote_code": True}
    model.generate(ids, do_sample=True, temperature=0.7, seed=7, max_new_tokens=24, **recipe)

do_sample, temperature, top_k, top_p, min_p, repetition_penalty, ends and the largest lengths are those of the call,
else of the model's generation config. Any other option that would change the result is refused.
"""

import torch

from sgl_flashsample import LMHead, LogitEdits, Sampler, SamplingParams

SERVED = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
SERVED |= {"max_length", "max_new_tokens", "eos_token_id", "pad_token_id"}
# They change how fast tokens come, or only what beams, assistants or models with an encoder do.
WITHOUT_EFFECT = {"use_cache", "cache_implementation", "cache_config", "compile_config", "disable_compile"}
WITHOUT_EFFECT |= {"low_memory", "continuous_batching_config", "prefill_chunk_size", "renormalize_logits"}
WITHOUT_EFFECT |= {"early_stopping", "length_penalty", "bos_token_id", "decoder_start_token_id", "is_assistant"}
WITHOUT_EFFECT |= {"num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"}
WITHOUT_EFFECT |= {"assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size", "transformers_version"}
OFF_AT_1 = {"num_beams", "num_beam_groups", "num_return_sequences"}
OFF_AT_1 |= {"typical_p", "encoder_repetition_penalty", "guidance_scale"}
OFF_AT_0 = {"min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"}
OFF_AT_0 |= {"epsilon_cutoff", "eta_cutoff", "diversity_penalty"}
OFF = dict.fromkeys(OFF_AT_1, 1) | dict.fromkeys(OFF_AT_0, 0)


def refuse_others(config, rest):
    """Raise ValueError for options that are set and not served. rest: the options that are no fields of ``config``."""
    known = {name: getattr(config, name) for name in vars(type(config)()) if not name.startswith("_")}
    others = {name: value for name, value in known.items() if name not in SERVED | WITHOUT_EFFECT}
    names = [name for name, value in others.items() if value not in (None, OFF.get(name)) and value is not False]
    names += [name for name in rest if name != "attention_mask" or not bool(rest[name].all())]  # waits for the GPU
    if names:
        raise ValueError(f"{', '.join(sorted(names))}: not served here; leave them out")


def generate(model, inputs=None, generation_config=None, input_ids=None, seed=None, **options):
    """``[B, T + N]``: prompts, ``[B, T]`` of one length, with up to N new ids. A row that has ended is padded."""
    ids = inputs if input_ids is None else input_ids
    given = {name: value for name, value in options.items() if value is not None}
    config, rest = model._prepare_generation_config(generation_config, **given)
    refuse_others(config, rest)
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
    edits, penalty = None, config.repetition_penalty
    if penalty not in (None, 1.0):
        edits = LogitEdits(scaling=torch.ones(len(ids), sampler.head.lm_head.vocab_size, device=ids.device))
        edits.scaling.scatter_(1, ids, penalty)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    steps = config.max_new_tokens or config.max_length - ids.shape[1]
    with torch.inference_mode():
        for _ in range(steps):
            out = model.get_decoder()(tokens, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            hidden, position = out.last_hidden_state[:, -1], ids.shape[1]
            drawn = sampler(hidden, params, position=position, edits=edits).token_ids
            tokens = drawn.masked_fill(ended, padding)[:, None]
            ids = torch.cat([ids, tokens], 1)
            if edits is not None:
                edits.scaling.scatter_(1, tokens, penalty)
            ended |= torch.isin(tokens[:, 0], ends)
            if len(ends) and bool(ended.all()):  # waits for the GPU
                break
    return ids
