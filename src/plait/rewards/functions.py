"""Which functions make up the reward: named, weighted, and in a form that a worker process can load."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import ConfigError
from plait.rewards.answers import AnswerFormat
from plait.rewards.function_kinds import COST, REWARD, Kind
from plait.rewards.loading import split_path
from plait.rewards.scores import MODEL, nth
from plait.rewards.settings import RewardSettings
from plait.rewards.tasks import TaskReward, WellFormed

RewardCallable = Callable[..., Any]

TASK, WELL_FORMED = "task", "well_formed"
"""Words for plait's own functions, which score answers to a reasoning_gym task."""


@dataclass(frozen=True)
class RewardFunction:
    name: str
    """Unique among the functions of a pool; names its curve, `rewards/NAME/mean`."""
    target: str | bytes
    """A path that the worker imports, or a pickled callable."""
    weight: float = 1.0
    kind: Kind = REWARD

    @property
    def forked(self) -> str:
        """What is said where a child that it forked came back."""
        return self.kind.forked(f"{self.kind.noun} `{self.name}`")


def reward_functions(
    functions: Sequence[str | RewardCallable],
    weights: Sequence[float] = (),
    *,
    key: str = "reward.functions",
    reserved: Collection[str] = (),
) -> tuple[RewardFunction, ...]:
    """Paths and picklable callables as reward functions; weights default to 1.

    Args:
        key: of the recipe that names them.
        reserved: names that something else has.

    Raises:
        ConfigError: a path has no valid form or names no file, a callable cannot be sent to a worker, or the number of
            weights differs.
    """
    kind = COST if key.startswith(f"{COST.section}.") else REWARD  # those of evaluations have the limits of rewards
    if weights and len(weights) != len(functions):
        raise ConfigError(
            f"`{kind.section}.weights` has {len(weights)} numbers for {len(functions)} functions; give one each"
        )
    if not functions:
        raise ConfigError(f"`{key}` is empty; name at least one function")
    made: list[RewardFunction] = []
    for function, weight in zip(functions, weights or [1.0] * len(functions), strict=True):
        if isinstance(function, str):
            file, name = split_path(function, key=key)
            target: str | bytes = f"{os.path.abspath(file)}:{name}" if file.endswith(".py") else f"{file}:{name}"
        else:
            name, target = _name_of(function), _pickled(function)
        taken = {*reserved, *(other.name for other in made)}
        unique = next(n for n in (name, *(f"{name}#{i}" for i in range(2, len(taken) + 3))) if n not in taken)
        made.append(RewardFunction(unique, target, float(weight), kind))
    return tuple(made)


def functions_of(settings: RewardSettings, *, task: str | None, role: str = "reward") -> tuple[RewardFunction, ...]:
    """The functions that the settings of a role name. `task` is the reasoning_gym task of the data, None for a file.

    Raises:
        ConfigError: `task` or `well_formed` is asked for, or nothing is named, and the data are no task's.
    """
    key, own = f"{role}.functions", _of_task(settings.answer, partial_credit=settings.partial_credit)
    if task is None and not settings.functions:
        raise ConfigError(_no_task(key, "is empty"))
    of_models = [nth(MODEL, place) for place in range(len(settings.models))]
    return reward_functions(
        _resolved(settings.functions or (TASK,), own, task, key), settings.weights, key=key, reserved=of_models
    )


def eval_functions_of(
    functions: Sequence[str], answer: AnswerFormat, *, task: str | None
) -> tuple[RewardFunction, ...]:
    """The functions of `evaluation.functions`; none where it is empty. `answer` and `task` are as in `functions_of`.

    Raises:
        ConfigError: as there, but for what is empty.
    """
    key = "evaluation.functions"
    return reward_functions(_resolved(functions, _of_task(answer), task, key), key=key) if functions else ()


def _of_task(where: AnswerFormat, *, partial_credit: bool = False) -> dict[str, RewardCallable]:
    return {TASK: TaskReward(where, partial_credit), WELL_FORMED: WellFormed(where)}


def _resolved(
    names: Sequence[str], own: Mapping[str, RewardCallable], task: str | None, key: str
) -> list[str | RewardCallable]:
    """Functions by their names, plait's `own` by their words. Raises ConfigError."""
    if task is None and (named := [name for name in names if name in own]):
        raise ConfigError(_no_task(key, f"names `{named[0]}`"))
    return [own.get(name, name) for name in names]


def _no_task(key: str, stated: str) -> str:
    return (
        f"`{key}` {stated}, but `data.source` is a file and no reasoning_gym:TASK; name a function of yours: "
        "FILE.py:FUNCTION or package.module:function"
    )


_NAMES: dict[type, str] = {TaskReward: TASK, WellFormed: WELL_FORMED}


def _name_of(function: RewardCallable) -> str:
    return _NAMES.get(type(function)) or getattr(function, "__name__", type(function).__name__)


def _pickled(function: RewardCallable) -> bytes:
    if not callable(function):
        raise ConfigError(f"a reward is a path or a callable, found {type(function).__name__}")
    remedy = "define it at the top level of a file, or give its path FILE.py:FUNCTION"
    stream = io.BytesIO()
    try:
        pickle.Pickler(stream, protocol=5).dump(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"reward `{_name_of(function)}` cannot be sent to a worker process ({error}); {remedy}"
        ) from None
    if b"__main__" in stream.getvalue() and main_file() is None:
        raise ConfigError(f"reward `{_name_of(function)}` is defined in an interactive session; {remedy}")
    return stream.getvalue()


def main_file() -> str | None:
    """The script that this process runs, None in an interactive session."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return str(Path(file).resolve()) if file and Path(file).is_file() else None
