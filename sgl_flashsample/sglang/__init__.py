"""The SGLang backend, and the only code here that knows SGLang. Entry point: ``plugin.register``.

plugin.py       registers the backend; installs the hooks when a server selects it
hooks.py        the places where SGLang calls us in a step and at its start
weight_hooks.py those where it changes weights later
lazy_logits.py  what LogitsProcessor returns instead of logits
rows.py         per-row parameters that follow a batch through filters and merges
plan.py         which rows of a batch are fused, and why the others are not
sampler.py      the Sampler: fused pass, or SGLang's own, row by row
subbatch.py     the rows that are not fused, as a batch of their own
runtime.py      what this process serves: heads, kernels, counters
head_state.py   one of these heads: its scratch, its choices, its screen, its graphs
screening.py    whether a head has a screen, and that it is one of the weights served
trace.py        counts the drawn tokens into a hot set, when asked to
support.py      why something is not served, as one word
versions.py     which SGLang versions are known, and the shape of each hook target
"""
