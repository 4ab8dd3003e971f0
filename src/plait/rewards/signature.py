"""The three signatures that reward functions have in the field, told apart by the names of their parameters.

TRL       f(prompts, completions, completion_ids, **columns) -> [number or None, ...]
verl      compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number or {"score": number, ...}
OpenRLHF  reward_func(queries, prompts, labels) -> {"rewards": ..., "scores": ..., "extra_logs": {...}} or the rewards

verl's is called once per sample, the others once per group. Whatever a function logs by its return goes to the same
places as what it logs with `log_extra` and `log_metric`. Runs inside reward workers: standard library only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from plait.data.records import SAMPLE_UID
from plait.errors import ConfigError
from plait.rewards.awaiting import settled

Logs = Mapping[str, Callable[[str, Any], None]]
"""`log_extra(column, values)` and `log_metric(name, value)`, by name."""


class Form(StrEnum):
    TRL = "TRL"
    VERL = "verl"
    OPENRLHF = "OpenRLHF"


_MARKS = {
    Form.TRL: ("completions", "completion_ids"),
    Form.VERL: ("solution_str",),
    Form.OPENRLHF: ("queries",),
}
"""The parameter by which each form is known: where it gets the response."""

GIVEN = {
    Form.TRL: ("prompts", "completions", "completion_ids", "turns", SAMPLE_UID, "log_extra", "log_metric"),
    Form.VERL: ("solution_str", "turns", SAMPLE_UID, "log_metric"),
    Form.OPENRLHF: ("queries", "prompts", "turns", SAMPLE_UID, "log_extra", "log_metric"),
}
"""Parameters that need no column of the data."""

COLUMNS_OF = {
    (Form.VERL, "ground_truth"): ("ground_truth", "reward_model"),
    (Form.OPENRLHF, "labels"): ("labels", "label"),
}
"""Columns that fill a parameter, the first that the data have; any other parameter is filled by the column of its name.
verl's data keep the ground truth as `reward_model.ground_truth`."""

THREE_FORMS = (
    "a reward has one of three forms, known by the names of its parameters: TRL's "
    "`f(prompts, completions, completion_ids, **columns) -> [number or None, ...]`; verl's "
    '`compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number or {"score": number, ...}`; '
    'OpenRLHF\'s `reward_func(queries, prompts, labels) -> {"rewards": [...], "scores": [...], "extra_logs": {...}} or '
    "[...]`"
)


@dataclass(frozen=True)
class Signature:
    """What a function can be given. Crosses from the worker to the controller."""

    form: Form
    named: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool
    """It has **columns."""
    awaits: bool = False
    """It is a coroutine function."""


def signature_from(entry: Mapping[str, Any]) -> Signature:
    """The inverse of `dataclasses.asdict`, after a way through JSON."""
    named, required = tuple(entry["named"]), tuple(entry["required"])
    return Signature(Form(entry["form"]), named, required, entry["takes_all"], entry["awaits"])


def signature_of(name: str, call: Callable[..., Any]) -> Signature:
    """Which of the three forms a function has.

    A function without a readable signature (some builtins) is taken for TRL's with all columns.

    Raises:
        ConfigError: its parameters fit none of the forms, or more than one.
    """
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return Signature(Form.TRL, (), (), takes_all=True)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    forms = [form for form, marks in _MARKS.items() if any(mark in names for mark in marks)]
    if not forms and (takes_all or "turns" in names) and not unnamed:
        forms = [Form.TRL]
    if len(forms) != 1 or unnamed:
        raise ConfigError(f"`{name}({_shown(parameters)})` {_complaint(forms, unnamed)}; {THREE_FORMS}")
    required = tuple(p.name for p in named if p.default is p.empty)
    return Signature(forms[0], tuple(names), required, takes_all, is_coroutine(call))


def is_coroutine(call: Callable[..., Any]) -> bool:
    """Whether what a call returns is awaited, as far as that is known before."""
    asked = (call, getattr(call, "__call__", None))  # noqa: B004 - an object may have one that is a coroutine function
    return any(map(inspect.iscoroutinefunction, asked)) or bool(getattr(call, "awaits", False))


def _shown(parameters: Sequence[inspect.Parameter]) -> str:
    return ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)


def _complaint(forms: Sequence[Form], unnamed: Sequence[str]) -> str:
    if unnamed:
        return f"takes {', '.join(f'`{name}`' for name in unnamed)} by position only, but arguments are given by name"
    if not forms:
        marks = ", ".join(f"`{mark}`" for form in Form for mark in _MARKS[form])
        return f"gets no response: none of {marks} is among its parameters"
    return f"fits more than one form ({', '.join(forms)}): rename the parameters that are not of its own"


class Miscounted(ValueError):
    """A function logged another number of values than it was given samples."""


Begun = tuple[list[Any], Callable[[list[Any]], Any]]
"""A call that has begun: what the function returned, some of it to be awaited perhaps; what that, settled, comes to."""


class RewardCall:
    """A loaded function, called in its own form, whose result has TRL's: per sample one number, one for each turn, or
    None.

    Raises (when called):
        ValueError: the function returned something that is not of its form; the message says what.
        Miscounted: a column that it returned has another length than the samples.
        Exception: whatever the function raises.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.signature = signature_of(name, function)
        self._function = function

    def __call__(self, arguments: Mapping[str, list[Any]], texts: Sequence[tuple[str, str]], logs: Logs) -> Any:
        """
        Args:
            arguments: TRL's, as `calls.call_arguments` makes them; one entry of each list per sample.
            texts: (prompt after the template, response) of each sample.
            logs: see `Logs`.
        """
        results, ended = self.begun(arguments, texts, logs)
        return ended(settled(results))

    def begun(self, arguments: Mapping[str, list[Any]], texts: Sequence[tuple[str, str]], logs: Logs) -> Begun:
        """The same, but nothing is awaited. Raises ValueError as above."""
        match self.signature.form:
            case Form.TRL:
                return [self._function(**self._kept({**arguments}) | self._asked(logs))], lambda results: listed(
                    *results
                )
            case Form.VERL:
                return self._verl(arguments, texts, logs), partial(self._scores_of_verl, logs)
            case Form.OPENRLHF:
                ended = partial(self._scores_of_openrlhf, len(texts), logs)
                return [self._openrlhf(arguments, texts, logs)], ended

    def _kept(self, given: dict[str, Any]) -> dict[str, Any]:
        if self.signature.takes_all and self.signature.form is Form.TRL:
            return given
        return {name: given[name] for name in self.signature.named if name in given}

    def _asked(self, logs: Logs) -> dict[str, Any]:
        return {name: log for name, log in logs.items() if name in self.signature.named}

    def _verl(self, arguments: Mapping[str, list[Any]], texts: Sequence[tuple[str, str]], logs: Logs) -> list[Any]:
        asked = {name: log for name, log in self._asked(logs).items() if name in GIVEN[Form.VERL]}
        results = []
        for place, (_, response) in enumerate(texts):
            named = {name: values[place] for name, values in arguments.items()}
            if "ground_truth" not in named and "reward_model" in named:
                named["ground_truth"] = _ground_truth(named["reward_model"])
            elif named.get("ground_truth") is None and isinstance(inside := named.get("reward_model"), Mapping):
                named["ground_truth"] = inside.get("ground_truth")  # this row's; others have the column itself
            results.append(self._function(**self._kept(named | {"solution_str": response}) | asked))
        return results

    def _scores_of_verl(self, logs: Logs, results: list[Any]) -> list[Any]:
        scores: list[Any] = []
        logged: dict[str, list[Any]] = {}
        for place, result in enumerate(results):
            if not isinstance(result, Mapping):
                scores.append(listed(result))
                continue
            if "score" not in result:
                raise ValueError(f"verl's form returns a number or a dict with `score`, found keys {list(result)}")
            scores.append(listed(result["score"]))
            for key, value in result.items():
                if key != "score":
                    logged.setdefault(str(key), [None] * len(results))[place] = listed(value)
        self._log(logged, logs)
        return scores

    def _openrlhf(self, arguments: Mapping[str, list[Any]], texts: Sequence[tuple[str, str]], logs: Logs) -> Any:
        named = {**arguments}
        if "label" in named and all(label is None for label in named.get("labels", ())):
            named["labels"] = named["label"]
        named |= {"queries": [prompt + response for prompt, response in texts], "prompts": [text for text, _ in texts]}
        return self._function(**self._kept(named) | self._asked(logs))

    def _scores_of_openrlhf(self, num_samples: int, logs: Logs, results: list[Any]) -> Any:
        (result,) = results
        if not isinstance(result, Mapping):
            return listed(result)
        if "rewards" not in result:
            raise ValueError(f"OpenRLHF's form returns a list or a dict with `rewards`, found keys {list(result)}")
        logged = {str(key): _column(value) for key, value in (result.get("extra_logs") or {}).items()}
        if result.get("scores") is not None:
            logged = {"scores": _column(result["scores"])} | logged
        for key, values in logged.items():
            if isinstance(values, list) and len(values) != num_samples:
                raise Miscounted(f"`{key}` has {len(values)} values for {num_samples} samples")
        self._log({key: values for key, values in logged.items() if isinstance(values, list)}, logs)
        for key, value in logged.items():
            if not isinstance(value, list) and _is_number(value):
                logs["log_metric"](f"rewards/{self.name}/{key}", value)
        return listed(result["rewards"])

    def _log(self, columns: Mapping[str, Sequence[Any]], logs: Logs) -> None:
        """Each column with the samples, and the numbers in it as a curve of their mean."""
        for key, values in columns.items():
            logs["log_extra"](key, values)
            for value in values:
                if _is_number(value):
                    logs["log_metric"](f"rewards/{self.name}/{key}", value)


def _ground_truth(reward_model: Any) -> Any:
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        keys = list(reward_model) if isinstance(reward_model, Mapping) else repr(reward_model)
        raise ValueError(f"the row has no `ground_truth`, and its `reward_model` holds none: found {keys}")
    return reward_model["ground_truth"]


def listed(value: Any) -> Any:
    """Arrays and tensors of any library as Python numbers and lists of them, a column [N, 1] as [N]; all else as is."""
    if not hasattr(value, "tolist"):
        return value
    value = value.tolist()
    if isinstance(value, list) and value and all(isinstance(row, list) and len(row) == 1 for row in value):
        return [row[0] for row in value]
    return value


def _column(value: Any) -> Any:
    """What OpenRLHF's form logs, as `listed`; a tuple is a list of values, too."""
    return list(value) if isinstance(value, tuple) else listed(value)


def _is_number(value: Any) -> bool:
    """Whether it is one that a curve can have: finite, and no whole number beyond all floats."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False
