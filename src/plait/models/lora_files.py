"""Adapters in files, as peft writes and reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from plait.errors import ConfigError, ModelError
from plait.layout.adapters import low_rank
from plait.layout.params import Param
from plait.models.expert_files import from_peft, names_in_peft, shape_in_peft, to_peft
from plait.models.files.adapter_folder import CONFIG, WEIGHTS, adapter_of
from plait.models.files.claims import read_object
from plait.models.files.saving import check_finite
from plait.models.flat_weights import cut_block
from plait.models.lora import add_lora, own_adapter, peft_fields, peft_library, whole_decoder
from plait.models.lora_settings import LoraSettings, target_of
from plait.models.lora_targets import (
    Target,
    check_targets,
    decoder_without_weights,
    parameters_named,
    targets_of,
    unreached_layers,
)
from plait.models.model import AnyModel, Model
from plait.output import write_folder

_PREFIX = "base_model.model."
"""What every name begins with in a file of peft."""

_NOT_READ = (
    "use_rslora",
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "alpha_pattern",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
)
"""What changes the numbers of an adapter and has no trace in the names and shapes of its file."""

_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")

_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` that change the base: peft subtracts the first B A from the weights before training,
so that the adapter does not fit the base as it is published. (An adapter that peft has converted back says `true`.)"""


def save_adapter(model: Model, folder: str | Path, *, marker: Mapping[str, Any] | None = None) -> None:
    """Write the adapter alone (and the head of a scalar model) as peft does, in the compute dtype, whole or not at all:
    `peft.PeftModel.from_pretrained(base, folder)` gives the same model elsewhere. The tokenizer goes with it; beneath a
    scalar model's adapter the base has to have its padding token (see `ScalarModel.tokenizer_of_folder`).

    Args:
        marker: see `output.write_folder`.

    Raises:
        ModelError: a weight is not finite; nothing is written.
        OSError: the disk is full or the place cannot be written; an older folder stays.
    """
    from safetensors.torch import save_file

    own = own_adapter(model)
    assert own.settings is not None, "an adapter has settings"
    heads = sorted(name.rpartition(".")[0] for name in model.parameters_of_views())
    decoder, prefix = model.module.base_model, model.module.base_model_prefix
    targets = targets_of(own.settings, decoder)
    config = peft_library().LoraConfig(
        **peft_fields(own.settings, decoder),
        target_parameters=sorted({target.stated for target in targets.values() if target.is_stacked}) or None,
        task_type=model.peft_task,
        modules_to_save=heads or None,
        base_model_name_or_path=_base_of(model),
        inference_mode=True,
    )
    in_file = _names_in_file(prefix, targets)
    tensors = {
        f"{_PREFIX}{in_file.get(name, name)}": to_peft(name, param.detach().cpu().clone())
        for name, param in own.parameters.items()
    }
    check_finite(tensors)

    def write(work: Path) -> None:
        config.save_pretrained(work)
        _in_order(work / CONFIG)
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
        if (tokenizer := model.tokenizer_of_folder()) is not None:
            tokenizer.save_pretrained(work)

    write_folder(folder, write, marker=marker)


def _in_order(path: Path) -> None:
    """Peft keeps names of layers as a set, which it writes in another order each time."""
    config = read_object(path)
    targets = config["target_modules"]
    path.write_text(json.dumps({**config, "target_modules": sorted(targets)}, indent=2, sort_keys=True))


def _base_of(model: Model) -> str | None:
    """The hub id or the folder that the model was read from, from the root on: an adapter is loaded from anywhere."""
    name = getattr(model.config, "_name_or_path", None)
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name or None


def load_adapter(
    model: AnyModel, folder: str | Path, *, name: str, device: torch.device | str | None = None
) -> AnyModel:
    """A view of the model with an adapter that `save_adapter`, peft or TRL wrote; what it has of layers that no text
    reaches is left out. Of a scalar model with an adapter of a language model, the head stays as it is.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`.
        name, device: see `add_lora`.

    Raises:
        ModelError: not there, not readable, of another model, or of a kind that is more than A and B.
    """
    stored = stored_adapter(model, folder)
    view = add_lora(model, stored.settings, name=name, seed=0, device=device)
    assert view.own is not None, "add_lora gives a view"
    with torch.no_grad():
        for block in view.own.layout.blocks:
            if (tensor := stored.tensors.get(block.param.name)) is not None:
                view.own.parameters[block.param.name].copy_(cut_block(tensor, block))
    return view


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter as it stands in files, for a model that it fits.

    tensors: A and B, and the head of a scalar model where there is one, by the names that views give them
    """

    settings: LoraSettings
    tensors: Mapping[str, Tensor]


def stored_adapter(model: Model, folder: str | Path) -> StoredAdapter:
    """See `load_adapter`; changes nothing of the model."""
    folder = Path(folder)
    config, opened = _read(folder)
    decoder, prefix = whole_decoder(model), model.module.base_model_prefix
    names = {key: key.removeprefix(_PREFIX) for key in tuple(opened.keys())}
    settings = _settings(config, names, decoder, prefix, folder)
    beside = _beside(decoder, prefix)
    tensors = {name: opened.get_tensor(key) for key, name in names.items() if not name.startswith(beside)}
    try:
        targets = targets_of(settings, decoder)
    except ModelError as error:  # it adapts layers that are never adapted here
        raise ModelError(f"adapter: {str(folder)!r} does not fit this model: {error}") from None
    in_file, expected = _names_in_file(prefix, targets), _shapes(model, targets, settings.rank)
    if config.get("task_type") != model.peft_task:  # of a language model: a head is new
        expected = {key: shape for key, shape in expected.items() if key in tensors or ".lora_" in key}
    shapes = {in_file.get(name, name): shape_in_peft(name, shape) for name, shape in expected.items()}
    _check_tensors(tensors, shapes, folder)
    for name, stored in in_file.items():
        tensors[name] = from_peft(name, tensors.pop(stored), expected[name][0])
    return StoredAdapter(settings, tensors)


def check_trained(settings: LoraSettings, models: Mapping[str, str]) -> None:
    """Models have the layers that are to be adapted, and those that begin as an adapter were trained with the settings
    of the run; by their files alone.

    Args:
        models: key and role, for messages → the model that is trained.

    Raises:
        ConfigError: one was trained with others. ModelError: see `lora_targets.check_targets` and `load_adapter`.
    """
    check_targets(settings, models.values())
    for where, name in models.items():
        if (adapter := adapter_of(name)) is None:
            continue
        decoder = decoder_without_weights(name)
        config, opened = _read(adapter.folder)
        own = _settings(config, opened.keys(), decoder, decoder.base_model_prefix, adapter.folder)
        targets = {target.stated for target in targets_of(settings, decoder).values()}
        for what, found, wanted in (
            ("rank", own.rank, settings.rank),
            ("alpha", f"{own.effective_alpha:g}", f"{settings.effective_alpha:g}"),
            ("target_modules", f"[{', '.join(own.target_modules)}]", f"[{', '.join(sorted(targets))}]"),
        ):
            if found != wanted:
                raise ConfigError(
                    f"{where}: the adapter `{name}` has `lora.{what}` {found}, but the recipe has {wanted}; set "
                    f"`lora.{what}` to {found} to train the adapter further, give the role another model, or leave "
                    "`lora` out: the adapter is then merged into the weights, all of which are trained"
                )


def _read(folder: Path) -> tuple[dict[str, Any], Any]:
    """The configuration of an adapter, and its file of tensors, of which none is read yet."""
    from safetensors import SafetensorError, safe_open

    try:
        return read_object(folder / CONFIG), safe_open(folder / WEIGHTS, "pt")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"adapter: {str(folder)!r} should hold adapter_config.json and adapter_model.safetensors: {error}"
        ) from error


def _beside(decoder: Any, prefix: str) -> tuple[str, ...]:
    """What names of tensors of layers begin with that no text reaches."""
    return tuple(f"{prefix}.{at}.lora_" for at in unreached_layers(decoder))


def _settings(config: Mapping[str, Any], keys: Iterable[str], decoder: Any, prefix: str, folder: Path) -> LoraSettings:
    others = [key for key in _NOT_READ if config.get(key)]
    if str(first := config.get("init_lora_weights")).startswith(_CHANGE_THE_BASE):
        others.append(f"init_lora_weights {first!r:.40}, trained on other weights than those of the base")
    if config.get("peft_type") != "LORA" or others:
        kind = config.get("peft_type") if config.get("peft_type") != "LORA" else f"LoRA with {', '.join(others)}"
        raise ModelError(f"adapter: {str(folder)!r}: expected plain LoRA, found {kind}.")
    beside = _beside(decoder, prefix)
    names = [key.removeprefix(_PREFIX).split(".lora_A.")[0] for key in keys if ".lora_A." in key]
    if apart := next((name for name in names if _ONE_EXPERT.search(name)), None):
        raise ModelError(
            f"adapter: {str(folder)!r}: expected adapters of experts as peft's `target_parameters` has them, found "
            f"those of each expert for itself, such as {apart}; load it in peft and save it again"
        )
    stated = config.get("target_parameters") or []
    if not (isinstance(stated, list) and all(isinstance(name, str) for name in stated)):
        raise ModelError(
            f"adapter: {str(folder)!r}: adapter_config.json should state `target_parameters` as a list of names, found "
            f"{stated!r:.80}"
        )
    experts = parameters_named(stated, decoder)
    of_experts = {f"{prefix}.{at}" for at in names_in_peft(experts).values()}
    linear = {at.rpartition(".")[2] for at in names if not f"{at}.lora_".startswith(beside) and at not in of_experts}
    targets = sorted(linear | set(map(target_of, experts)))
    try:
        return LoraSettings(rank=config["r"], alpha=config["lora_alpha"], target_modules=tuple(targets))
    except (KeyError, ValidationError) as error:
        raise ModelError(
            f"adapter: {str(folder)!r}: adapter_config.json should state `r`, a whole number, and `lora_alpha`, a "
            f"number, found {config.get('r')!r:.80} and {config.get('lora_alpha')!r:.80}."
        ) from error


def _names_in_file(prefix: str, targets: Mapping[str, Target]) -> dict[str, str]:
    """Names of A and B of experts → those in a file, whose names of other layers are as here."""
    experts = [at for at, target in targets.items() if target.is_stacked]
    return {
        f"{prefix}.{name}.lora_{low}.weight": f"{prefix}.{stored}.lora_{low}.weight"
        for name, stored in names_in_peft(experts).items()
        for low in "AB"
    }


def _shapes(model: Model, targets: Mapping[str, Target], rank: int) -> dict[str, tuple[int, ...]]:
    """What `add_lora` would hold."""
    shapes: dict[str, tuple[int, ...]] = {}
    for at, target in targets.items():
        full = f"{model.module.base_model_prefix}.{at}"
        own = low_rank(full, Param(full, tuple(target.weight.shape)), rank, is_transposed=target.is_transposed)
        shapes |= {param.name: param.shape for param in own}
    heads = model.parameters_of_views()
    return shapes | {param.name: param.shape for param in model.trained.parameters.params if param.name in heads}


def _check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    faults = [f"no {key}" for key in expected.keys() - tensors.keys()]
    faults += [f"an unknown {key}" for key in tensors.keys() - expected.keys()]
    faults += [
        f"{key} of shape {tuple(tensors[key].shape)} in place of {expected[key]}"
        for key in expected.keys() & tensors.keys()
        if tuple(tensors[key].shape) != expected[key]
    ]
    if faults:
        raise ModelError(
            f"adapter: {str(folder)!r} does not fit this model: {'; '.join(sorted(faults)[:3])} ({len(faults)} in all)."
        )
