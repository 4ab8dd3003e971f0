"""Low-rank adapters on shared weights (Hu et al. 2021, arXiv 2106.09685), through peft's layers, never merged. Those of
experts, which are no layers, are our own (`expert_adapters`), with the numbers of peft's.

    y = W x + (alpha / rank) · B A x          A [rank, in] drawn, B [out, rank] zero at first, W frozen

A model with an adapter is a view: the same module, the same weights, and a flat buffer of its own for A and B (and for
the head of a scalar model). Several views may lie on one backbone; without an adapter it is the reference. Which
adapter is on is the backbone's to say, before every forward (`models.backbone`).

Parameters go by the names that peft gives them in a saved file, without its prefix: `model.layers.0.….lora_A.weight`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.layout.adapters import low_rank
from plait.layout.params import Param, Parameters
from plait.models.compute import cpu_linear, widened
from plait.models.draws import generator
from plait.models.expert_adapters import Pair, adapt, adapted_experts
from plait.models.lora_settings import LoraSettings, check_peft
from plait.models.lora_targets import targets_of, unreached_layers, without_weights
from plait.models.model import AnyModel, Model
from plait.models.parallel.adapters import dress, partials_of
from plait.models.parallel.part import Part
from plait.models.working_weights import OwnPart, adapted_layers


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
        ModelError: peft is not installed, or a target module is none of the decoder that can have an adapter.
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
    for block in base.layout.blocks:
        _parameter_of(base, block.param.name).requires_grad_(False)
    heads = base.parameters_of_views()

    def first(param: Param) -> Tensor | None:
        if ".lora_" not in param.name:
            return heads[param.name]
        return _draw(param, name, seed) if ".lora_A." in param.name else None

    with base.backbone.layer_weights.having(None):
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
    _adapt_experts(base, whole, adapter)
    base.backbone.adapted(adapted_layers(decoder).values(), adapted_experts(decoder).values())
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


def _adapt_experts(base: Model, whole: Any, adapter: OwnPart) -> None:
    """Give the experts of this rank's layers their A and B.

    Args:
        whole: the decoder with all layers.
    """
    settings, name = adapter.settings, adapter.adapter
    assert settings is not None, "an adapter has settings"
    assert name is not None, "an adapter has a name"
    decoder, prefix, own = base.module.base_model, base.module.base_model_prefix, adapter.parameters
    pairs: dict[str, dict[str, Pair]] = {}
    for at, target in targets_of(settings, whole).items():
        if target.is_stacked and (a := own.get(f"{prefix}.{at}.lora_A.weight")) is not None:
            pair = Pair(a, own[f"{prefix}.{at}.lora_B.weight"], settings.scaling)
            pairs.setdefault(at.rpartition(".")[0], {})[target.leaf] = pair
    for module, of_module in pairs.items():
        adapt(decoder.get_submodule(module), name, of_module)


def peft_fields(settings: LoraSettings, decoder: Any) -> dict[str, Any]:
    alpha = settings.effective_alpha
    linear = [target for target in targets_of(settings, decoder).values() if not target.is_stacked]
    names = sorted({target.stated for target in linear})
    alike = sorted(at for at in unreached_layers(decoder) if at.rpartition(".")[2] in names)
    return {
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": names,
        "exclude_modules": alike or None,
        "fan_in_fan_out": any(target.is_transposed for target in linear),
        "bias": "none",
        "lora_dropout": 0.0,
    }


def whole_decoder(model: Model) -> Any:
    """The decoder as all ranks have it together; without weights, where this one has a part of it."""
    is_whole = model.part is None or model.part.is_whole
    return model.module.base_model if is_whole else without_weights(model.config)


def _with_all_layers(model: Model) -> Any:
    """The decoder with the layers of all stages, though those of others have no weights."""
    return model.module.base_model if model.team.pp.size == 1 else without_weights(model.config)


def _part_of(base: Model, decoder: Any, settings: LoraSettings) -> Part:
    """What adapters of the whole model consist of, with the heads of views, and this rank's place among those that have
    parts of it.

    Args:
        decoder: with all layers.
    """
    parameters, hosts = base.parameters, []
    weights = {param.name: param for param in parameters.params}
    for at, target in targets_of(settings, decoder).items():
        full = f"{base.module.base_model_prefix}.{at}"
        name = full if target.is_stacked else f"{full}.weight"
        host = weights[parameters.aliases.get(name, name)]
        hosts.append((host, *low_rank(full, host, settings.rank, is_transposed=target.is_transposed)))
    params = [param for _, *own in hosts for param in own]
    heads = {param.name: param for param in base.trained.parameters.params}
    params += [heads[name] for name in base.parameters_of_views()]
    own = Parameters(tuple(params), layers=parameters.num_layers)
    return Part(base.team, own, partials_of(base.part, hosts))


def _draw(param: Param, name: str, seed: int) -> Tensor:
    """Uniform in ± 1 / sqrt(in), as peft and Hu et al.'s code draw A (Kaiming, a = √5). Float32 on the CPU."""
    bound = 1 / math.sqrt(param.shape[-1])
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
    check_peft()
    import peft

    return peft
