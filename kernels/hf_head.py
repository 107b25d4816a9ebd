"""The LM head of a Hugging Face model: which module it is, and how the model's configuration transforms its logits.
Nothing of transformers is imported."""

from __future__ import annotations

from typing import Any

import torch


def plain_head(model: Any) -> Any:
    """The module of ``model``'s output embeddings, which multiplies by its weight and does nothing else. Raises
    ValueError where it does more."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise ValueError(f"model is a {type(model).__name__} without output embeddings; expected a causal LM")
    kind = f"{type(head).__module__}.{type(head).__qualname__}"  # adapters have a Linear of their own, too
    # accelerate moves a module's inputs between devices in a forward of the instance.
    patched = "forward" in vars(head) and not hasattr(head, "_hf_hook")
    if getattr(type(head), "forward", None) is not torch.nn.Linear.forward or patched:
        raise ValueError(
            f"the LM head is a {kind} with a forward of its own; expected a torch.nn.Linear: merge adapters into the "
            "model (model.merge_and_unload()) and dequantise the head first"
        )
    weight = head._parameters.get("weight")
    if type(weight) not in (torch.nn.Parameter, torch.Tensor):
        weight = getattr(head, "weight", None)
        raise ValueError(
            f"the weight of the LM head, a {kind}, is a {type(weight).__name__} that is quantised, sharded or computed;"
            " expected a torch.nn.Parameter"
        )
    if head.bias is not None:
        raise ValueError("the LM head has a bias; expected none")
    added = getattr(model, "final_logits_bias", None)
    if added is not None and bool(added.any()):
        raise ValueError("the model adds its final_logits_bias to the logits; expected none, or zeros")
    return head


def text_config(model: Any) -> Any:
    """The configuration of ``model``; where it has several modalities, of its text model."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def logit_scale(config: Any) -> float | None:
    """The factor of the logits; None for none."""
    model_type = getattr(config, "model_type", "")
    scaling = getattr(config, "logits_scaling", None)  # a divisor, but in HyperCLOVA X
    scales = [
        None if model_type == "mpt" else getattr(config, "logit_scale", None),  # MPT's models do not apply theirs
        getattr(config, "lm_head_multiplier", None),
        scaling if scaling is None or model_type == "hyperclovax" else 1.0 / scaling,
    ]
    return next((scale for scale in scales if scale not in (None, 1.0)), None)


def softcap(config: Any) -> float | None:
    """The final softcap; None for none."""
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next(filter(None, (getattr(config, name, None) for name in names)), None)
