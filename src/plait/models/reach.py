"""What texts reach of a model that reads images or sounds too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def text_decoder(decoder: Any) -> Any:
    """What reads texts in the decoder of a model that reads images or sounds too; of other models the decoder."""
    config = getattr(decoder, "config", None)
    return decoder if config is None or config.get_text_config() is config else decoder.get_decoder()


def text_modules(decoder: Any) -> list[nn.Module]:
    """What texts reach of a decoder, itself included: `text_decoder` and all in it, without its children that hold
    models of another configuration (phi4_multimodal has its encoders in one beside the layers)."""
    texts = text_decoder(decoder)
    beside = {id(inner) for child in texts.children() if _has_encoder(child, texts) for inner in child.modules()}
    return [module for module in texts.modules() if id(module) not in beside]


def _has_encoder(child: nn.Module, texts: Any) -> bool:
    from transformers import PreTrainedModel

    return any(
        isinstance(inner, PreTrainedModel) and type(inner.config) is not type(texts.config) for inner in child.modules()
    )


def unreached(module: Any) -> list[nn.Parameter]:
    """Parameters that no text reaches, of a model that reads images or sounds too: those of its decoder outside
    `text_modules`. They are not trained and stay as they were read, in any layout.

    Args:
        module: a causal language model of Transformers, or a ScalarModule.
    """
    decoder = getattr(module, "base_model", None)
    if decoder is None:
        return []
    reached = {id(param) for inner in text_modules(decoder) for param in inner.parameters(recurse=False)}
    if (head := getattr(module, "get_output_embeddings", lambda: None)()) is not None:
        reached |= {id(param) for param in head.parameters()}
    return [param for param in decoder.parameters() if id(param) not in reached]


def reached(module: Any) -> list[tuple[str, nn.Parameter]]:
    """The other parameters, by name."""
    beside = {id(param) for param in unreached(module)}
    return [(name, param) for name, param in module.named_parameters() if id(param) not in beside]


def any_reached(outputs: Tensor, params: Sequence[nn.Parameter]) -> bool:
    """Whether outputs of a text, of any shape and with their graph, depend on some of these parameters."""
    grads = torch.autograd.grad(outputs.sum(), params, retain_graph=True, allow_unused=True) if params else ()
    return any(grad is not None and bool(grad.any()) for grad in grads)
