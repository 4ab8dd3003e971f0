"""Low-rank adapters on shared weights (Hu et al. 2021, arXiv 2106.09685), through peft's layers, never merged.

    y = W x + (alpha / rank) · B A x          A [rank, in] drawn, B [out, rank] zero at first, W frozen

A model with an adapter is a view: the same module, the same weights, and a flat buffer of its own for A and B (and for
the head of a scalar model). Several views may lie on one backbone; without an adapter it is the reference. Which
adapter is on is the backbone's to say, before every forward (`models.backbone`).

Parameters go by the names that peft gives them in a saved file, without its prefix: `model.layers.0.….lora_A.weight`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.layout.adapters import EXPERTS, low_rank
from plait.layout.params import Param, Parameters
from plait.models.compute import cpu_linear, widened
from plait.models.draws import generator
from plait.models.files.hub import read_config
from plait.models.files.pretrained import new_module
from plait.models.lora_settings import LoraSettings
from plait.models.model import AnyModel, Model
from plait.models.parallel.adapters import dress, partials_of
from plait.models.parallel.part import Part
from plait.models.reach import text_modules
from plait.models.working_weights import OwnPart, adapted_layers, layer_of


def add_lora(
    model: AnyModel, settings: LoraSettings, *, name: str, seed: int, device: torch.device | str | None = None
) -> AnyModel:
    """A view of the model with a fresh adapter, which at first changes nothing (B is 0).

    The weights under it are frozen, and from now on `model` is the view without an adapter. An adapter that `model` may
    have already stays apart: adapters do not add up.

    Args:
        settings: of rank 1 or more.
        name: tells the adapters of one backbone apart.
        seed: with the name, of the draw of A; no global random state is read or moved.
        device: that the adapter lies on; None: beside the weights under it.

    Raises:
        ModelError: peft is not installed, or a target module is no linear layer of the decoder.
    """
    base = without_lora(model)
    decoder = base.module.base_model
    whole = _with_all_layers(base)
    part = _part_of(base, whole, settings)
    fields = peft_fields(settings, whole)
    if any(at.rpartition(".")[2] in fields["target_modules"] for at, _ in decoder.named_modules()):  # else peft refuses
        _inject(decoder, fields, name)
    layers = {at: layer for at, layer in adapted_layers(decoder).items() if name in layer.lora_A}
    for layer in layers.values():
        dress(layer, name)
    base.backbone.adapted(adapted_layers(decoder).values())
    for block in base.layout.blocks:
        _parameter_of(base, block.param.name).requires_grad_(False)
    heads = base.parameters_of_views()

    def first(param: Param) -> Tensor | None:
        if ".lora_" not in param.name:
            return heads[param.name]
        return _draw(param, name, seed) if ".lora_A." in param.name else None

    adapter = OwnPart.allocate(
        part,
        first,
        base.weights,
        device,
        base=base,
        view_of=lambda other: add_lora(other, settings, name=name, seed=seed),
        adapter=name,
        settings=settings,
    )
    prefix = base.module.base_model_prefix
    for at, layer in layers.items():
        layer.lora_A[name].weight = adapter.parameters[f"{prefix}.{at}.lora_A.weight"]
        layer.lora_B[name].weight = adapter.parameters[f"{prefix}.{at}.lora_B.weight"]
    if widened.takes(base.weights):
        cpu_linear.install(decoder)  # thin products of bfloat16 by torch take 20 times as long
    return base.with_own(adapter)


def without_lora(model: AnyModel) -> AnyModel:
    """The model under the adapter: the same weights; the reference of an actor. A model without one is itself."""
    return model if model.own is None or model.own.adapter is None else model.own.base


# --- the layers --------------------------------------------------------------------------------------------------


def _inject(decoder: Any, fields: Mapping[str, Any], name: str) -> None:
    """Let peft wrap the target layers. Its parameters come on the meta device: nothing is drawn or allocated."""
    peft = peft_library()
    taken = any(name in layer.lora_A for layer in adapted_layers(decoder).values())
    assert not taken, f"the backbone has an adapter {name!r} already"
    config = peft.LoraConfig(**fields)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        warnings.filterwarnings("ignore", message=".*Already found a `peft_config` attribute")
        peft.inject_adapter_in_model(config, decoder, adapter_name=name, low_cpu_mem_usage=True)


def peft_fields(settings: LoraSettings, decoder: Any) -> dict[str, Any]:
    alpha = settings.effective_alpha
    targets = targets_of(settings, decoder)
    names = sorted({at.rpartition(".")[2] for at in targets})
    alike = sorted(at for at in unreached_layers(decoder) if at.rpartition(".")[2] in names)
    return {
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": names,
        "exclude_modules": alike or None,
        "fan_in_fan_out": any(type(layer).__name__ == "Conv1D" for layer in targets.values()),
        "bias": "none",
        "lora_dropout": 0.0,
    }


def check_targets(settings: LoraSettings, models: Iterable[str]) -> None:
    """Raises ModelError where the settings name a layer that a model has not, by its configuration alone."""
    for name in () if settings.target_modules == "all-linear" else dict.fromkeys(models):
        targets_of(settings, decoder_without_weights(name))


def decoder_without_weights(name: str) -> Any:
    """The decoder of a model, by its configuration alone; its parameters are on the meta device."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    read = read_config(name)
    return _without_weights(CONFIG_MAPPING[read["model_type"]].from_dict(dict(read)))


def _without_weights(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return new_module(config, decoder_only=True)


def whole_decoder(model: Model) -> Any:
    """The decoder as all ranks have it together; without weights, where this one has a part of it."""
    is_whole = model.part is None or model.part.is_whole
    return model.module.base_model if is_whole else _without_weights(model.config)


def _with_all_layers(model: Model) -> Any:
    """The decoder with the layers of all stages, though those of others have no weights."""
    return model.module.base_model if model.team.pp.size == 1 else _without_weights(model.config)


def targets_of(settings: LoraSettings, decoder: Any) -> dict[str, nn.Module]:
    """The layers that get an adapter, by name: of those that texts reach (`models.reach`).

    Peft reads the names of an MLP's layers, in a model with a mixture of experts, as those of the experts, which are
    no linear layers in Transformers: such a model is adapted outside its MLPs, those of dense layers too. It also takes
    a number, as layers in a list have for a name, for that of a decoder layer: these are left out. So is what peft
    adapts in no model of a family.

    Raises:
        ModelError: a name of the settings is none of a linear layer.
    """
    layers = _linear_layers(decoder)
    of_layers = [(name, param) for name, param in decoder.named_parameters() if layer_of(name) is not None]
    convolved = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Conv1d)}
    stacked = (name for name, param in of_layers if param.ndim == 3 and id(param) not in convolved)
    mixtures = tuple(set(map(_mixture_of, stacked)))
    left_out = {at.rpartition(".")[2] for at in layers if at.startswith(mixtures)} | EXPERTS if mixtures else set()
    left_out |= _REFUSED_BY_PEFT.get(getattr(getattr(decoder, "config", None), "model_type", ""), set())
    names = {name for at in layers if not (name := at.rpartition(".")[2]).isdigit()} - left_out
    targets = names if settings.target_modules == "all-linear" else set(settings.target_modules)
    if unknown := sorted(targets - names):
        raise ModelError(
            f"lora.target_modules: expected all-linear alone, or names among {', '.join(sorted(names))}, found "
            f"{', '.join(unknown)}"
        )
    if not targets:
        raise ModelError("lora.target_modules: expected at least one name, found none")
    return {at: layer for at, layer in layers.items() if at.rpartition(".")[2] in targets}


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


def _part_of(base: Model, decoder: Any, settings: LoraSettings) -> Part:
    """What adapters of the whole model consist of, with the heads of views, and this rank's place among those that have
    parts of it.

    Args:
        decoder: with all layers.
    """
    targets = targets_of(settings, decoder)
    parameters, hosts = base.parameters, []
    weights = {param.name: param for param in parameters.params}
    for at, _ in decoder.named_modules():
        if at in targets:
            full = f"{base.module.base_model_prefix}.{at}"
            host = weights[parameters.aliases.get(f"{full}.weight", f"{full}.weight")]
            is_transposed = type(targets[at]).__name__ == "Conv1D"
            hosts.append((host, *low_rank(full, host, settings.rank, is_transposed=is_transposed)))
    params = [param for _, *own in hosts for param in own]
    heads = {param.name: param for param in base.trained.parameters.params}
    params += [heads[name] for name in base.parameters_of_views()]
    own = Parameters(tuple(params), layers=parameters.num_layers)
    return Part(base.team, own, partials_of(base.part, hosts))


def _draw(param: Param, name: str, seed: int) -> Tensor:
    """Uniform in ± 1 / sqrt(in), as peft and Hu et al.'s code draw A (Kaiming, a = √5). Float32 on the CPU."""
    bound = 1 / math.sqrt(param.shape[1])
    return (torch.rand(param.shape, generator=generator(seed, name, param.name)) * 2 - 1) * bound


def _parameter_of(model: Model, name: str) -> nn.Parameter:
    """A parameter of the weights that the model has or shares. A view's layout may hold a head that is not in its
    module.
    """
    while model.own is not None:
        model = model.own.base
    return model.module.get_parameter(name)


def own_adapter(model: Model) -> OwnPart:
    own_part = model.own
    assert own_part is not None, "the model has no adapter"
    assert own_part.adapter is not None, "the model has a head of its own and no adapter"
    return own_part


def peft_library() -> Any:
    """The package peft.

    Raises:
        ModelError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError("lora: adapters need the package peft; install plait[lora], or set lora.rank to 0.") from error
    return peft
