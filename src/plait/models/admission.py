"""The checks that admit a model instead of a list of families; a refusal names the check and what was measured.

Checks (a) and (b) need the configuration only, so that a dry run already makes them, and with them what (c) says of
layers whatever their weights are (`models.foreseen`).

(a) backend flag: the family declares that its attention may be replaced. Those with recurrent layers beside it declare
    it for no engine; of them check (c) tells.
(b) layer types: every decoder layer is full or sliding-window attention, or keeps a state in the form that
    `compute.recurrent` takes, or both, or an MLP alone (no compressed attention, whose state packing and our caches do
    not see); and some attend.
(c) self-check: at load, a few tokens packed with shared prompts through our attention against the family's own eager
    forward of every sample by itself, with the same weights; and every decoder layer calls our attention, or our
    segments where it is recurrent, exactly once, with the window that the configuration states (the few tokens
    themselves would not reach far enough back). Recurrent layers are one function, however their tokens are
    put together (`models.mixer_proof`).
    Then the gradients of some of the weights, through both forwards as training runs them. Attention is in pieces on
    every device: a kernel has a proof of its own, against these, when it is first used (`compute.row_attention`), and
    a model that only generates does not wait until one is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.data.packed import PackedBatch, pack
from plait.errors import ModelError
from plait.models.compute import cpu_linear
from plait.models.compute.attention import ATTENTION, PackedContext
from plait.models.compute.row_attention import pieces_plan
from plait.models.files.pretrained import code_refusal, needs_code
from plait.models.layer_calls import LayerCalls, layer_types
from plait.models.layer_types import ATTENDING_LAYERS, MLP_LAYERS, RECURRENT_LAYERS
from plait.models.mixer_proof import mixer_fault
from plait.models.module_names import wildcard
from plait.models.reach import any_reached, reached, unreached
from plait.models.shape import config_fields

TAKEN_LAYERS = ATTENDING_LAYERS | RECURRENT_LAYERS | MLP_LAYERS

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest accepted error of a token's logits, relative to the norm of the eager logits about their mean. The eager
forwards take their softmax in float32, also in a float64 model. A wrong attention gives errors near 1."""

CHECK_QUANTILE = {torch.bfloat16: 0.75, torch.float16: 0.75}
"""In narrow dtypes a rounding may send a token to another expert; a quarter of the tokens may differ more."""

GRADIENT_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 0.75, torch.float16: 0.75}
"""The same of the gradients of all layers' weights of one name together, relative to their norm. A gradient that is
missing or of another function is wrong by 1 or more; roundings and other experts make up to half of it in bfloat16."""

COMPARED_ELEMENTS = 1 << 22
"""Elements of the weights whose gradients are compared, the smallest first; for them a backward passes all layers."""


_OF_CONFIGS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What a family's configuration raises on values that do not fit together."""
_OF_FORWARDS = (*_OF_CONFIGS, NotImplementedError, RuntimeError)
"""What a forward raises that a family, or a library for it, does not have for such inputs."""


class CheckedModel(Protocol):
    """What the self-check needs of a model. For one without a vocabulary the hidden states stand for the logits."""

    module: Any
    weights: Tensor

    def hidden(self, token_ids_T: Tensor, position_ids_T: Tensor, context: Any) -> Tensor:
        """[T, H] of int64 ids and positions, by our attention."""
        ...

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N, V]."""
        ...

    def eager_logits(self, token_ids_1T: Tensor) -> Tensor:
        """[1, T, V] of one row of int64 ids, by the attention of Transformers."""
        ...


def check_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Checks (a) and (b) from a `config.json` alone: no module is built and no weight is fetched.

    Returns:
        The text model's configuration, with its family's defaults, under names shared by families (`models.shape`).

    Raises:
        ModelError: Transformers cannot read the configuration, or the family is refused.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    family = config.get("model_type")
    if family not in CONFIG_MAPPING and needs_code(config):
        raise code_refusal(name, "model")
    if family not in CONFIG_MAPPING:
        raise ModelError(
            f"model: {name!r} is of the family {family!r}, which this version of Transformers does not know; "
            "set `model` to another one."
        )
    try:
        read = CONFIG_MAPPING[family].from_dict(dict(config))
        fields = config_fields(read.get_text_config())
    except (StrictDataclassError, *_OF_CONFIGS) as error:
        raise ModelError(
            f"model: the config.json of {name!r} cannot be read: {error}; set `model` to another."
        ) from error
    check_family(causal_class(read, name), read, name)
    return fields


def causal_class(config: Any, name: str) -> type[Any]:
    """The class that Transformers makes of a configuration for causal language modelling.

    Raises:
        ModelError: the family has none.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model: {name!r} is of the family {config.model_type}, which has no causal language model in "
            "Transformers; set `model` to a decoder."
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def check_family(cls: type[Any], config: Any, name: str) -> None:
    """Checks (a) and (b) of a model class and its configuration.

    Raises:
        ModelError: the family is refused.
    """
    types = layer_types(config) or []
    if not getattr(cls, "_supports_attention_backend", False) and not RECURRENT_LAYERS.intersection(types):
        cause = "_supports_attention_backend is false: its attention cannot be replaced"
        raise refusal(config, name, "backend flag", cause)
    if others := sorted(set(types) - TAKEN_LAYERS):
        count = sum(layer not in TAKEN_LAYERS for layer in types)
        cause = f"{count} of {len(types)} layers are {', '.join(others)}; expected {', '.join(sorted(TAKEN_LAYERS))}"
        raise refusal(config, name, "layer types", cause)
    if types and not ATTENDING_LAYERS.intersection(types):
        raise refusal(config, name, "layer types", f"none of its {len(types)} layers is an attention layer")


@torch.no_grad()
def self_check(model: CheckedModel, name: str) -> float:
    """Check (c). Reads no random state and draws from none.

    Returns:
        The measured relative error.

    Raises:
        ModelError: the forward or the backward fails, skips a layer or a window, or differs from the eager one.
    """
    with _guarded(model, name, "recurrent layer"):
        fault = mixer_fault(model.module)
    if fault is not None:
        raise refusal(model.module.config, name, "self-check", fault)
    batch, samples = check_batch(model.module, model.weights.device)
    recorder = LayerCalls(batch)
    with _guarded(model, name, "forward"):
        packed_TV = model.logits(model.hidden(batch.token_ids_T, batch.position_ids_T, recorder))
        eager_TV = _eager_logits(model, samples)
    if (cause := recorder.fault(model.module.config)) is not None:
        raise refusal(model.module.config, name, "self-check", cause)
    places = [
        place
        for group in batch.groups
        for response in group.responses
        for span in (group.prompt, response)
        for place in range(span.start, span.stop)
    ]
    error = _relative_error(packed_TV[places], eager_TV)
    allowed = TOLERANCE[model.weights.dtype]
    if not error <= allowed:
        cause = f"the packed logits differ from the eager forward by {error:.2g} of their size, allowed {allowed:g}"
        raise refusal(model.module.config, name, "self-check", cause)
    _check_gradients(model, name, batch, samples, places)
    return error


@contextmanager
def _guarded(model: CheckedModel, name: str, what: str) -> Iterator[None]:
    try:
        yield
    except _OF_FORWARDS as error:
        if isinstance(error, ModelError):
            raise
        cause = f"its {what} raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise refusal(model.module.config, name, "self-check", cause) from error


def _check_gradients(
    model: CheckedModel, name: str, batch: PackedBatch, samples: list[list[int]], places: list[int]
) -> None:
    """Compare the gradients of a random combination of the logits, packed and eager; `unreached` weights get none."""
    compared, context = compared_parameters(model.module), PackedContext(batch, planned=pieces_plan)
    beside = unreached(model.module)
    required = [(param, param.requires_grad) for param in model.module.parameters()]
    try:
        for param in (*compared.values(), *beside):
            param.requires_grad_(True)
        with _guarded(model, name, "training forward or backward"), torch.enable_grad(), cpu_linear.everywhere():
            packed_TV = model.logits(model.hidden(batch.token_ids_T, batch.position_ids_T, context))
            strays = any_reached(packed_TV, beside)
            packed = _gradients(packed_TV[places], compared)
            eager = _gradients(_eager_logits(model, samples), compared)
    finally:
        for param, before in required:
            param.requires_grad_(before)
    if strays:
        raise refusal(model.module.config, name, "self-check", "texts reach weights outside its decoder of texts")
    allowed = GRADIENT_TOLERANCE[model.weights.dtype]
    largest = max(float(grad.norm()) for grad in eager.values())
    for key, expected in eager.items():
        size = float(expected.norm())
        if size > 1e-3 * largest and not (error := float((packed[key] - expected).norm()) / size) <= allowed:
            cause = f"the gradient of {key} differs from the eager one by {error:.2g} of its size, allowed {allowed:g}"
            raise refusal(model.module.config, name, "self-check", cause)


def compared_parameters(module: Any) -> dict[str, torch.nn.Parameter]:
    """By name the smallest of a module that texts reach, up to COMPARED_ELEMENTS in all; one at least."""
    compared, room = {}, COMPARED_ELEMENTS
    for name, param in sorted(reached(module), key=lambda item: item[1].numel()):
        if compared and param.numel() > room:
            break
        compared[name] = param
        room -= param.numel()
    return compared


def _gradients(logits_NV: Tensor, compared: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """By name, without numbers of layers; float64."""
    generator = torch.Generator().manual_seed(0)
    direction_NV = torch.randn(logits_NV.shape, generator=generator, dtype=torch.float64).to(logits_NV)
    grads = torch.autograd.grad(logits_NV, list(compared.values()), direction_NV, allow_unused=True)
    pieces: dict[str, list[Tensor]] = {}
    for (name, param), grad in zip(compared.items(), grads, strict=True):
        piece = torch.zeros_like(param) if grad is None else grad
        pieces.setdefault(wildcard(name), []).append(piece.detach().reshape(-1).double())
    return {key: torch.cat(parts) for key, parts in pieces.items()}


def check_batch(module: Any, device: torch.device) -> tuple[PackedBatch, list[list[int]]]:
    """Two groups whose responses differ in length, and the same samples one by one; ids spread over the vocabulary."""
    vocab_size = module.base_model.get_input_embeddings().weight.shape[0]
    ids = iter((7 + 7919 * i) % vocab_size for i in range(64))
    shape = ((4, (5, 3, 6)), (3, (4, 5)))
    groups = [([next(ids) for _ in range(p)], [[next(ids) for _ in range(r)] for r in lengths]) for p, lengths in shape]
    return pack(groups, device), [prompt + response for prompt, rs in groups for response in rs]


def _eager_logits(model: CheckedModel, samples: list[list[int]]) -> Tensor:
    module = model.module
    module.set_attn_implementation("eager")
    try:
        rows = [torch.tensor([sample], device=model.weights.device) for sample in samples]
        return torch.cat([model.eager_logits(row) for row in rows])
    finally:
        module.set_attn_implementation(ATTENTION)


def _relative_error(packed_NV: Tensor, eager_NV: Tensor) -> float:
    quantile = CHECK_QUANTILE.get(packed_NV.dtype, 1.0)
    packed_NV, eager_NV = packed_NV.double(), eager_NV.double()
    size = (eager_NV - eager_NV.mean(-1, keepdim=True)).norm(dim=-1).mean()
    error_N = (packed_NV - eager_NV).norm(dim=-1) / size
    return float(torch.quantile(error_N, quantile))


def refusal(config: Any, name: str, check: str, cause: str) -> ModelError:
    """The error of a check that refuses a family, for these reasons."""
    family = getattr(config, "model_type", type(config).__name__)
    return ModelError(
        f"model: {name!r} (family {family}) is refused by the check of its {check}: {cause}. "
        "Set `model` to a decoder with full or sliding-window attention; layers of linear attention or Mamba-2 may be "
        "among them."
    )
