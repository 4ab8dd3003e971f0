"""Every key of a recipe and of the built-in algorithms, with values that are none of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from plait.recipes.algorithm import BUILT_IN, load_flow, options_class
from plait.recipes.recipe import Recipe
from tests.fuzz.frame import ACCEPTED, Case, Expected, Place, Raw, refused

NO_NUMBERS = {
    "true": "true",
    "a text": "many",
    "a number in quotes": '"3"',
    "a map": "{a: 1}",
    "a list in a list": "[[1]]",
    "a date": "2026-01-02",
    "an impossible date": "2026-13-45",
    "octal in YAML 1.1": "010",
    "base 60 in YAML 1.1": "1:30",
    "not a number": ".nan",
    "infinity": "-.inf",
    "too large to be finite": "1e400",
    "more than 64 bits": "99999999999999999999",
    "thousands of digits": "9" * 5000,
}
"""What no number of a recipe is, as YAML has it."""

ENDLESS = frozenset(
    {"optimizer.max_grad_norm", "critic.optimizer.max_grad_norm", "cost_critic.optimizer.max_grad_norm"}
)
"""Keys for which `.inf` is a value of its own."""

MAY_BE_LARGE = frozenset({"seed", "data.seed", "pretraining.seed"})


def fields(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of every key."""
    for name, info in model.model_fields.items():
        either = get_args(info.annotation) if get_origin(info.annotation) in (Union, UnionType) else (info.annotation,)
        section = next((one for one in either if isinstance(one, type) and issubclass(one, BaseModel)), None)
        if section is not None:
            yield from fields(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info.annotation


def _members(annotation: Any) -> tuple[Any, ...]:
    """Every type in a union, a tuple or an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, UnionType) or origin is tuple:
        return tuple(one for part in get_args(annotation) for one in _members(part))
    return (annotation,)


def numeric() -> Iterator[tuple[str, bool]]:
    """(key that takes numbers, whether these are whole)."""
    for key, annotation in fields():
        if {int, float} & (members := set(_members(annotation))):
            yield key, float not in members


def option_fields() -> Iterator[tuple[str, str, Any]]:
    """(algorithm, key, type) of the built-in algorithms."""
    for algorithm in BUILT_IN:
        cls = options_class(load_flow(algorithm))
        assert cls is not None, f"{algorithm} has no options"
        for name, annotation in fields(cls):
            yield algorithm, name, annotation


def _set(key: str, value: str) -> Any:
    # A section that must have a source gets one, so that nothing else is wrong.
    more: dict[str, Any] = {"pretraining__source": "p.jsonl"} if key.startswith("pretraining.") else {}
    return lambda place: place.recipe(**(more | {key.replace(".", "__"): Raw(value)}))


def _on_the_command_line(key: str, value: str) -> Any:
    def argv(place: Place) -> list[str]:
        first, path, flag = place.recipe()
        more = ["--pretraining.source", "p.jsonl"] if key.startswith("pretraining.") else []
        return [first, path, flag, *more, f"--{key}={value}"]

    return argv


def _option(algorithm: str, key: str, value: str) -> Any:
    return lambda place: place.recipe(algorithm=algorithm, **{f"options__{key}": Raw(value)})


def cases() -> Iterator[Case]:
    for key, whole in numeric():
        leaf = key.rsplit(".", 1)[-1]
        for what, value in NO_NUMBERS.items():
            if what == "more than 64 bits" and not whole:
                continue
            always = what == "true" and hash_of(key) % 4 == 0
            yield Case(f"{key}: {what}", refused(leaf), _set(key, value), always=always)
        if key not in ENDLESS:
            yield Case(f"{key}: endless", refused(leaf), _set(key, ".inf"))
        if whole and key not in MAY_BE_LARGE:
            yield Case(f"{key}: beyond reason", refused(leaf), _set(key, "9000000000000000000"))
        for what in ("true", "not a number", "base 60 in YAML 1.1"):
            yield Case(f"--{key}: {what}", refused(leaf), _on_the_command_line(key, NO_NUMBERS[what]))
    for key, annotation in fields():
        leaf, members = key.rsplit(".", 1)[-1], set(_members(annotation))
        if members <= {str, type(None)} or "Path" in str(annotation):
            for what, value in {
                "true": "true",
                "a number": "3",
                "a map": "{a: b}",
                "a NUL character": '"a\\0b"',
                "half a character": '"a\\uD800b"',
            }.items():
                yield Case(f"{key}: {what}", refused(leaf), _set(key, value))
        if bool in members and int not in members:
            for what, value in {"a number": "1", "a text": "perhaps", "a list": "[true]"}.items():
                yield Case(f"{key}: {what}", refused(leaf), _set(key, value))
    for algorithm, key, annotation in option_fields():
        members = set(_members(annotation))
        values = {}
        if {int, float} & members:
            values = {k: NO_NUMBERS[k] for k in ("true", "not a number", "octal in YAML 1.1", "thousands of digits")}
            values["endless"] = ".inf"
        elif bool in members:
            values = {"a number": "1"}
        for what, value in values.items():
            yield Case(f"{algorithm}: options.{key}: {what}", refused(key), _option(algorithm, key, value))
    yield from _accepted()


def hash_of(text: str) -> int:
    """The same in every process."""
    return sum(i * ord(c) for i, c in enumerate(text, 1))


def _accepted() -> Iterator[Case]:
    """Values that mean what they look like."""
    for key, value in {
        "steps": "3",
        "seed": str(2**63 - 1),
        "optimizer.learning_rate": "1e-5",
        "optimizer.weight_decay": "0",
        "optimizer.epsilon": "1E-8",
        "optimizer.max_grad_norm": ".inf",
        "optimizer.betas": "[0.9, 0.95]",
        "lora.alpha": "null",
        "stalled_after_s": "1_800",
        "data.shuffle": "false",
        "checkpoint_activations": "True",
        "data.prompt_template": '"{question} "',
        "lora.target_modules": "[q_proj, v_proj]",
        "data.seed": "0",
        "run_dir": "10",
    }.items():
        expected: Expected = ACCEPTED
        more = {"lora__rank": 2} if key.startswith("lora.") else {}
        if key == "run_dir":
            expected = refused("run_dir")
        yield Case(
            f"{key}: {value} is understood",
            expected,
            lambda place, key=key, value=value, more=more: place.recipe(**more, **{key.replace(".", "__"): Raw(value)}),
            always=True,
        )
