"""Tasks of the package reasoning-gym (an extra): questions drawn by name and parameters. Torch-free."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from plait.data.sources import Row, nearest
from plait.errors import DataError

CHUNK = 512
"""Questions per data set of the package: some tasks make no more than the size that they were created with."""

NONSENSE = "no answer at all"


def create_task(name: str, parameters: Mapping[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    """A reasoning_gym data set, which also scores answers to its questions.

    Raises:
        DataError: the package is not installed, the task is unknown (the nearest is named), a parameter is not the
            task's, or has a value that it refuses.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise DataError(
            "`data.source` names a reasoning_gym task, but the package is not installed: pip install 'plait[rewards]'"
        ) from None
    if name not in DATASETS:
        raise DataError(
            f"`data.source`: reasoning_gym has no task `{name}`{nearest(name, list(DATASETS))} "
            f"among its {len(DATASETS)}"
        )
    valid = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for parameter in parameters:
        if parameter in ("seed", "size"):
            raise DataError(f"`data.parameters.{parameter}`: set `data.{parameter}` instead")
        if parameter not in valid:
            raise DataError(
                f"`data.parameters.{parameter}`: task `{name}` has no such parameter{nearest(parameter, valid)}; "
                f"it takes {', '.join(valid) or 'none'}"
            )
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **parameters)
    except (AssertionError, TypeError, ValueError) as error:
        raise _refused(name, parameters, error) from None


def draw_rows(name: str, parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Endless questions of a task, a function of the arguments alone; the same question may come again.

    Columns: prompt, answer (None where only the scorer knows), metadata, task, task_parameters.

    Raises:
        DataError: see `create_task`; or the task's scorer takes nonsense for a right answer.
    """
    number = 0
    while True:
        chunk, offset = divmod(number, CHUNK)
        if offset == 0:
            dataset = create_task(name, parameters, seed=_chunk_seed(name, seed, chunk), size=CHUNK)
        try:
            entry = dataset[offset]
        except (AssertionError, TypeError, ValueError) as error:
            if number:
                raise
            raise _refused(name, parameters, error) from None
        if number == 0:
            _check_scorer(name, dataset, entry)
        columns = {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "task": name,
            "task_parameters": dict(parameters),
        }
        yield Row(columns, f"{name}#{number}")
        number += 1


def _chunk_seed(name: str, seed: int, chunk: int) -> int:
    # The package adds the index of an item to the seed, so neighbouring seeds would give the same items.
    digest = hashlib.blake2b(f"{name}/{seed}/{chunk}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _check_scorer(name: str, dataset: Any, entry: Mapping[str, Any]) -> None:
    try:
        score = dataset.score_answer(NONSENSE, entry)
    except Exception:  # whatever a scorer raises on malformed text: it did not accept it
        return
    if score >= 1:
        raise DataError(
            f"task `{name}`: its scorer gives `{NONSENSE}` the full score, so nothing can be learnt from it; "
            "choose another task in `data.source`"
        )


def _refused(name: str, parameters: Mapping[str, Any], error: Exception) -> DataError:
    return DataError(
        f"`data.parameters`: task `{name}` refuses {dict(parameters)}: {error or 'no reason given'} "
        f"({type(error).__name__})"
    )
