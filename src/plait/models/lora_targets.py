"""Which layers of a decoder get an adapter: linear ones by their own names, experts of a mixture by theirs.

Experts are stacked in parameters, `….experts.gate_up_proj` [E, …]. Their names have a dot, as those of peft's
`target_parameters` have; names of linear layers have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.layout.adapters import EXPERTS
from plait.models.expert_adapters import stacked_parameters
from plait.models.files.hub import read_config
from plait.models.files.pretrained import new_module
from plait.models.lora_settings import ALL_LINEAR, LoraSettings, target_of
from plait.models.reach import text_modules
from plait.models.working_weights import adapted_layers, layer_of


def check_targets(settings: LoraSettings, models: Iterable[str]) -> None:
    """Raises ModelError where the settings name a layer that a model has not, by its configuration alone."""
    for name in () if settings.target_modules == ALL_LINEAR else dict.fromkeys(models):
        check_names(settings, decoder_without_weights(name))


def decoder_without_weights(name: str) -> Any:
    """The decoder of a model, by its configuration alone; its parameters are on the meta device."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    read = read_config(name)
    return without_weights(CONFIG_MAPPING[read["model_type"]].from_dict(dict(read)))


def without_weights(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return new_module(config, decoder_only=True)


@dataclass(frozen=True)
class Target:
    """What gets an adapter: a linear layer, or a parameter [E, …] of the E experts of a mixture.

    module: the layer; the module of the experts
    leaf:   the weight's name in the module
    stated: what a recipe calls it
    """

    module: Any
    leaf: str
    stated: str

    @property
    def is_stacked(self) -> bool:
        return self.weight.ndim == 3

    @property
    def weight(self) -> Tensor:
        """[out, in] or [E, out, in]; [..., in, out] if `is_transposed`."""
        weight: Tensor = self.module.get_parameter(self.leaf)
        return weight

    @property
    def is_transposed(self) -> bool:
        return type(self.module).__name__ == "Conv1D" or getattr(self.module, "is_transposed", False) is True


def check_names(settings: LoraSettings, decoder: Any) -> None:
    """
    Raises:
        ModelError: a name of the settings is none of a layer, or of experts, that can be adapted; or there is none.
    """
    if settings.target_modules == ALL_LINEAR:
        return
    names, targets = _linear_names(decoder), {*settings.target_modules} - {ALL_LINEAR}
    experts = {target_of(name) for name in _stacked(decoder)}
    unknown = sorted(targets - names - experts)
    if others := sorted({target_of(name) for name in _mixtures(decoder)} & {*unknown}):
        raise ModelError(
            f"lora.target_modules: expected names of layers of {type(decoder).__name__} that can have adapters, found "
            f"{', '.join(others)}, of experts that compute in a way of their family alone; leave them out"
        )
    if unknown:
        raise ModelError(
            f"lora.target_modules: expected all-linear, or names among {', '.join(sorted(names | experts))}, found "
            f"{', '.join(unknown)}"
        )
    if not settings.target_modules:
        raise ModelError("lora.target_modules: expected at least one name, found none")


def targets_of(settings: LoraSettings, decoder: Any) -> dict[str, Target]:
    """What gets an adapter, by the name of the layer or of the experts' parameter, in the decoder's order: of what
    texts reach (`models.reach`).

    Peft reads the names of an MLP's layers, in a model with a mixture of experts, as those of the experts, which are
    no linear layers in Transformers: of such a model no MLP's are adapted, those of dense layers neither. It also takes
    a number, as layers in a list have for a name, for that of a decoder layer: these are left out. So is what peft
    adapts in no model of a family.

    Raises:
        ModelError: see `check_names`.
    """
    check_names(settings, decoder)
    linear = _linear_names(decoder) if settings.linear == ALL_LINEAR else {*settings.linear}
    layers, stacked, targets = _linear_layers(decoder), _stacked(decoder), {}
    for at, module in decoder.named_modules():
        if at in layers and (name := at.rpartition(".")[2]) in linear:
            targets[at] = Target(layers[at], "weight", name)
        for leaf, _ in module.named_parameters(recurse=False):
            if (of_experts := f"{at}.{leaf}") in stacked and (name := target_of(of_experts)) in settings.experts:
                targets[of_experts] = Target(module, leaf, name)
    return targets


def parameters_named(ends: Iterable[str], decoder: Any) -> dict[str, Any]:
    """Parameters of experts whose names end so, as peft takes `target_parameters`."""
    ends = tuple(f".{end}" for end in ends)
    return {name: layer for name, layer in _stacked(decoder).items() if f".{name}".endswith(ends)}


def _stacked(decoder: Any) -> dict[str, Any]:
    """Parameters of experts of decoder layers that can be adapted."""
    reached = {id(module) for module in text_modules(decoder)}
    stacked = stacked_parameters(decoder).items()
    return {name: layer for name, layer in stacked if layer_of(name) is not None and id(layer) in reached}


def _mixtures(decoder: Any) -> list[str]:
    """Names of the parameters of experts, whether or not they can be adapted."""
    of_layers = [(name, param) for name, param in decoder.named_parameters() if layer_of(name) is not None]
    convolved = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Conv1d)}
    return [name for name, param in of_layers if param.ndim == 3 and id(param) not in convolved]


def _linear_names(decoder: Any) -> set[str]:
    """What a recipe calls the linear layers that can be adapted."""
    layers = _linear_layers(decoder)
    mixtures = tuple(set(map(_mixture_of, _mixtures(decoder))))
    left_out = {at.rpartition(".")[2] for at in layers if at.startswith(mixtures)} | EXPERTS if mixtures else set()
    left_out |= _REFUSED_BY_PEFT.get(getattr(getattr(decoder, "config", None), "model_type", ""), set())
    return {name for at in layers if not (name := at.rpartition(".")[2]).isdigit()} - left_out


_REFUSED_BY_PEFT = {"falcon_h1": {"out_proj"}, "nemotron_h": {"out_proj"}}
"""Family → linear layers of Mamba-2: kernels of Transformers compute with their weights, past an adapter."""


def _mixture_of(experts: str) -> str:
    """What the names of a mixture begin with: the module around the experts, or these alone where they lie in the layer
    itself.

    Args:
        experts: name of a parameter of experts.
    """
    own = experts.rpartition(".")[0]
    around = own.rpartition(".")[0]
    return f"{own if around.rpartition('.')[2].isdigit() else around}."


def unreached_layers(decoder: Any) -> list[str]:
    """Names of the linear layers that no text reaches, as those of an encoder of images."""
    reached = {id(module) for module in text_modules(decoder)}
    return [at for at, layer in _every_linear_layer(decoder).items() if id(layer) not in reached]


def _linear_layers(decoder: Any) -> dict[str, nn.Module]:
    """Linear layers that texts reach, by name."""
    beside = set(unreached_layers(decoder))
    return {at: layer for at, layer in _every_linear_layer(decoder).items() if at not in beside}


def _every_linear_layer(decoder: Any) -> dict[str, nn.Module]:
    """Linear layers of the decoder, those that are wrapped already by the name they had."""
    adapted = adapted_layers(decoder)
    layers: dict[str, nn.Module] = {at: layer.base_layer for at, layer in adapted.items()}
    for at, layer in decoder.named_modules():
        is_linear = isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
        if is_linear and not any(at.startswith(f"{wrapped}.") for wrapped in adapted):
            layers[at] = layer
    return layers
