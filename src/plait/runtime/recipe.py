"""The recipe: everything a user says about a run, read from a file of few keys and from the command line.

Sections are the settings of the packages that use them. What plait derives from a recipe is never written back into it.
Torch-free.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plait.data.settings import DataSettings
from plait.errors import ConfigError
from plait.generation.settings import SamplingSettings
from plait.rewards.settings import RewardSettings
from plait.training.settings import OptimizerSettings

LIST_HINT = "; `plait train --help-all` lists every key"


class DType(StrEnum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class EvaluationSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(0, ge=0, description="evaluate every so many steps; 0: only before and after")
    items: int = Field(0, ge=0, description="held-out items per evaluation, greedy; 0: no evaluation")
    show: int = Field(3, ge=0, description="sample answers printed at the end")


class CheckpointSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(0, ge=0, description="save every so many steps; 0: only at the end or when stopped")
    keep_last: int = Field(2, ge=1, description="checkpoints kept, besides the best one")


class Recipe(BaseModel):
    """A run. `options` holds the algorithm's own keys and is checked against its options class."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(description="smollm2-135m-instruct, a local folder, or a hub id")
    algorithm: str = Field("grpo", description="a built-in name, or FILE.py:FUNCTION")
    options: dict[str, Any] = Field(default_factory=dict, description="keys of the algorithm")
    steps: int = Field(100, ge=1, description="training steps: one batch generated, scored and trained on each")
    prompts_per_step: int = Field(16, ge=1, description="prompts in the batch of a step")
    samples_per_prompt: int = Field(8, ge=1, description="responses drawn per prompt")
    data: DataSettings
    reward: RewardSettings = RewardSettings()
    sampling: SamplingSettings = SamplingSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    run_dir: Path = Field(Path("runs/run"), description="folder that the run writes")
    overwrite: bool = Field(False, description="clear a run that is already in run_dir")
    seed: int = Field(0, ge=0, description="of everything that is drawn")
    dtype: DType = Field(DType.BFLOAT16, description="of weights in compute; masters are float32 (float64 for float64)")
    device: Literal["cpu", "cuda"] = Field("cpu", description="cpu or cuda")
    threads: int = Field(0, ge=0, description="CPU threads; 0: one per core")
    micro_batch_tokens: int = Field(4096, ge=1, description="tokens of a forward in scoring and training")
    checkpoint_activations: bool = Field(
        False, description="recompute activations in the backward: less memory, more time"
    )
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field((), description="also log to these")


def load_recipe(path: Path | None, overrides: Sequence[tuple[str, Any]] = ()) -> Recipe:
    """Read a YAML recipe and apply `(dotted key, value)` overrides; the later wins.

    Raises:
        ConfigError: the file is missing or malformed, a key is unknown (the nearest valid name is offered), or a value
            does not fit.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        if not path.is_file():
            raise ConfigError(f"recipe `{path}` does not exist; give the path of a YAML file")
        try:
            loaded = yaml.safe_load(path.read_text())
        except yaml.YAMLError as error:
            raise ConfigError(f"recipe `{path}` is not valid YAML: {error}") from None
        if not isinstance(loaded, dict):
            raise ConfigError(f"recipe `{path}` must be a mapping of keys, found {type(loaded).__name__}")
        tree = loaded
    for key, value in overrides:
        _set(tree, key.split("."), value, key)
    _check_names(tree)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def parse_overrides(tokens: Sequence[str]) -> list[tuple[str, Any]]:
    """`--key value` or `--key=value` pairs; dashes in a key read as underscores, values as YAML scalars.

    Raises:
        ConfigError: a token is no option, or an option has no value.
    """
    pairs: list[tuple[str, Any]] = []
    queue = list(tokens)
    while queue:
        token = queue.pop(0)
        if not token.startswith("--"):
            raise ConfigError(f"expected `--key value`, found `{token}`")
        key, separator, value = token[2:].partition("=")
        if not separator:
            if not queue:
                raise ConfigError(f"`--{key}` needs a value")
            value = queue.pop(0)
        try:
            pairs.append((key.replace("-", "_"), yaml.safe_load(value)))
        except yaml.YAMLError as error:
            raise ConfigError(f"`--{key}`: `{value}` is not a valid value: {error}") from None
    return pairs


def describe_keys(model: type[BaseModel] | None = None) -> Iterator[tuple[str, str, str]]:
    """(dotted key, default as text, description) of every key of a settings class, a recipe by default."""
    yield from _walk(model or Recipe, "")


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, info in model.model_fields.items():
        section = _section(info.annotation)
        if section is not None:
            yield from _walk(section, f"{prefix}{name}.")
        else:
            default = "required" if info.is_required() else _plain(info.get_default(call_default_factory=True))
            yield f"{prefix}{name}", default, info.description or ""


def _plain(value: Any) -> str:
    match value:
        case StrEnum():
            return value.value
        case () | {}:
            return "none"
        case _:
            return str(value)


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _set(tree: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"`{key}` cannot be set: `{part}` is not a section but {child!r}")
        tree = child
    tree[path[-1]] = value


def _check_names(tree: Mapping[str, Any]) -> None:
    """Name the nearest valid key for each unknown one; keys inside `options` and task parameters are their owners'."""
    valid = [key for key, _, _ in describe_keys()]

    def visit(node: Mapping[str, Any], model: type[BaseModel], prefix: str) -> None:
        for name, value in node.items():
            info = model.model_fields.get(name)
            if info is None:
                full = f"{prefix}{name}"
                raise ConfigError(f"unknown key `{full}`{nearest(full, valid) or LIST_HINT}")
            section = _section(info.annotation)
            if section is not None:
                if not isinstance(value, Mapping):
                    raise ConfigError(f"`{prefix}{name}` is a section of keys, found {value!r}")
                visit(value, section, f"{prefix}{name}.")

    visit(tree, Recipe, "")


def nearest(name: str, names: Sequence[str]) -> str:
    """`; did you mean …?`, or nothing when no valid name is near; a bare leaf name finds its section too."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not close:
        leaves = {full.rsplit(".", 1)[-1]: full for full in names}
        match = difflib.get_close_matches(name.rsplit(".", 1)[-1], list(leaves), n=1, cutoff=0.7)
        close = [leaves[match[0]]] if match else []
    return f"; did you mean `{close[0]}`?" if close else ""


def _explain(error: ValidationError) -> str:
    lines = []
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "missing":
            lines.append(f"key `{key}` is missing; set it in the recipe or with --{key}")
        else:
            lines.append(f"key `{key}`: {detail['msg'][:1].lower()}{detail['msg'][1:]}, found {detail['input']!r}")
    return "; ".join(lines)


def validate_options(cls: type[Any], options: Mapping[str, Any]) -> Any:
    """Build an algorithm's options from the recipe's `options` section, errors named as `options.KEY`.

    Raises:
        ConfigError: a key is unknown, missing or ill-typed.
    """
    from pydantic import TypeAdapter

    names = list(getattr(cls, "model_fields", None) or getattr(cls, "__dataclass_fields__", {}))
    for name in options:
        if names and name not in names:
            raise ConfigError(f"unknown key `options.{name}`{nearest(name, names)}")
    try:
        return TypeAdapter(cls).validate_python(dict(options))
    except ValidationError as error:
        raise ConfigError(_explain(error).replace("key `", "key `options.")) from None
