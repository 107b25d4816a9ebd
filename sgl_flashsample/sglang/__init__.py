"""The SGLang backend, and the only code here that knows SGLang. Entry point: ``plugin.register``.

plugin.py            registers the backend; installs the hooks when a server selects it
hooks.py             every place where SGLang calls us
lazy_logits.py       what LogitsProcessor returns instead of logits
batch.py             one batch: parameters per row, routing, edits
sampler.py           the Sampler: fused pass or SGLang's own, row by row
head.py              one LM head: weights, table, workspace, screen, CUDA graphs
screen_lifecycle.py  whether a head has a screen, and when that serves
runtime.py           what this process serves: start, disable, announce, count
metrics.py           the log line and Prometheus
token_counts.py      counts the drawn tokens for a hot vocabulary, when asked to
support.py           what is not served, and why
versions.py          which SGLang versions are known, and the shape of each hook target
"""
