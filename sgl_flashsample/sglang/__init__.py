"""The SGLang backend, and the only code here that knows SGLang. Entry point: ``plugin.register``.

plugin.py            registers the backend; installs the hooks when a server selects it
hooks.py             every place where SGLang calls us
lazy_logits.py       what LogitsProcessor returns instead of logits
batch.py             one batch: parameters per row, routing, edits
sampler.py           the Sampler: fused pass or SGLang's own, row by row
speculation.py       verifies drafts by a draw at every node
drafts.py            draws a draft model's tokens
draft_graphs.py      SGLang's CUDA graphs of drafts, of all ids and of some
exchange.py          what ranks that share a head tell each other
head.py              one LM head: weights, table, workspace, screen
step_graphs.py       captures and replays the CUDA graphs of a step whose batch does not change
model_graph.py       lets the kernels of SGLang's own model graphs overlap
screen_lifecycle.py  whether a head has a screen, and when that serves
runtime.py           what this process serves: start, disable, announce, count
settings.py          what SGLang's configuration and the environment variables say
metrics.py           the log line and Prometheus
token_counts.py      counts the drawn tokens for a hot vocabulary, when asked to
support.py           what is not served, and why
versions.py          which SGLang versions are known, and the shape of each hook target
"""
