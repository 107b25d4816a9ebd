"""The LM heads of a model: what its code passes to its LogitsProcessors.

Most models have an ``lm_head`` beside their processor. Others pass tied embeddings (Gemma 2, Command-R), an ``output``
(InternLM2) or the head of a language model within them (Llama 3.2 Vision). The source of the model says which.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

HEAD_PLACE, HEAD_NAME = 2, "lm_head"  # of ``LogitsProcessor.forward``: input ids, hidden states, LM head


def heads_of(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """Each LogitsProcessor of a model with its LM head; without those whose head does not show."""
    modules = dict(model.named_modules())
    for name, processor in processors_of(model).items():
        parent, _, attribute = name.rpartition(".")
        owner = modules.get(parent)
        kind: Any = type(owner)
        lm_head = _attribute(owner, passed_head(kind, attribute) or HEAD_NAME)
        if lm_head is None:
            lm_head = _attribute(owner, HEAD_NAME)
        if lm_head is not None:
            yield processor, lm_head


def processors_of(model: torch.nn.Module) -> dict[str, Any]:
    """Each LogitsProcessor of a model, by name."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    return {name: module for name, module in model.named_modules() if isinstance(module, LogitsProcessor)}


@functools.cache
def passed_head(owner: type, processor: str) -> str | None:
    """The attribute that the code of ``owner`` passes to its attribute ``processor`` as the LM head, such as
    "model.embed_tokens"; None where it passes several, another expression, or has no source."""
    passed = set()
    for part in itertools.takewhile(lambda part: part is not torch.nn.Module, owner.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError, SyntaxError):
            continue
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        passed |= {_argument(call) for call in calls if ast.unparse(call.func) == f"self.{processor}"}
        if passed:  # methods of a base class are overridden
            break
    expression = passed.pop() if len(passed) == 1 else ""
    prefix, _, attribute = expression.partition(".")
    return attribute if prefix == "self" and attribute.replace(".", "").isidentifier() else None


def _argument(call: ast.Call) -> str:
    """The LM head of a call of a LogitsProcessor, as source."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == HEAD_NAME]
    return ast.unparse((*named, *call.args[HEAD_PLACE:], ast.Constant(None))[0])


def _attribute(owner: Any, dotted: str) -> Any:
    """None where ``owner`` lacks it."""
    return functools.reduce(lambda value, name: getattr(value, name, None), dotted.split("."), owner)
