"""Tasks of the package reasoning-gym (an extra): questions drawn by name and parameters. Torch-free."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from plait.data.formats import Row
from plait.dataflow.unfit import nearest
from plait.errors import DataError

CHUNK = 512
"""Questions per data set of the package: some tasks make no more than the size that they were created with."""

PATIENCE = 20
"""A task counts as used up when this many draws per distinct question (and 2048 more) brought nothing new."""

DRAW_LIMIT_S = 1800.0
"""For all questions: some tasks take half a second for one."""
QUESTION_LIMIT_S = 60
"""For one: with some parameters (base_conversion with one base only) a task looks for a question for ever."""

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


def draw_in_child(
    name: str, parameters: Mapping[str, Any], seed: int, held_out: int, wanted: int
) -> tuple[list[Row], list[Row]]:
    """`draw`, in a process whose string hashes are fixed.

    Some tasks of the package (word_ladder, ransom_note, polynomial_multiplication …) walk through sets of strings, so
    their questions differ from process to process: a run would not be the same again, nor its held-out items.

    Raises:
        DataError: see `draw`; or the drawing takes too long.
    """
    boot = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from plait.data.tasks import _child; _child()"
    paths = json.dumps([path for path in sys.path if isinstance(path, str)])
    try:
        done = subprocess.run(
            [sys.executable, "-c", boot, paths],
            input=pickle.dumps((QUESTION_LIMIT_S, (name, dict(parameters), seed, held_out, wanted))),
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONHASHSEED": "0"},
            timeout=DRAW_LIMIT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise DataError(
            f"drawing {held_out + wanted} questions of `{name}` took more than {DRAW_LIMIT_S:.0f} s; lower `data.size`"
        ) from None
    except subprocess.CalledProcessError as error:
        if error.returncode == -signal.SIGALRM:
            raise DataError(
                f"task `{name}` found no question within {QUESTION_LIMIT_S} s; change `data.parameters`"
            ) from None
        raise DataError(f"drawing questions of `{name}` failed (exit code {error.returncode}); see above") from None
    outcome = pickle.loads(done.stdout)
    if isinstance(outcome, str):
        raise DataError(outcome)
    return outcome


def _child() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the package may print
    outcome: Any
    try:
        limit_s, request = pickle.load(sys.stdin.buffer)
        outcome = draw(*request, watch=lambda rows: _watched(rows, limit_s))
        signal.alarm(0)
    except DataError as error:
        outcome = str(error)
    pickle.dump(outcome, replies)
    replies.close()


def _watched(rows: Iterator[Row], limit_s: int) -> Iterator[Row]:
    """End this process by SIGALRM when the next row takes longer than `limit_s`, and when its parent is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        signal.alarm(limit_s)
        yield next(rows)


def draw(
    name: str,
    parameters: Mapping[str, Any],
    seed: int,
    held_out: int,
    wanted: int,
    watch: Callable[[Iterator[Row]], Iterator[Row]] = iter,
) -> tuple[list[Row], list[Row]]:
    """(`held_out` rows, `wanted` others), all of distinct questions; fewer where the task is used up.

    Held-out questions are drawn first, so that they are the same whatever is wanted.

    Raises:
        DataError: see `draw_rows`.
    """
    rows = distinct(watch(draw_rows(name, parameters, seed)))
    return list(itertools.islice(rows, held_out)), list(itertools.islice(rows, wanted))


def distinct(rows: Iterable[Row]) -> Iterator[Row]:
    """The first row of every question; ends when new questions have become rare."""
    seen: set[str] = set()
    in_vain = 0
    for row in rows:
        if row.question in seen:
            in_vain += 1
            if in_vain > PATIENCE * len(seen) + 2048:
                return
            continue
        in_vain = 0
        seen.add(row.question)
        yield row


def draw_rows(name: str, parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Endless questions of a task, a function of the arguments alone; the same question may come again.

    Columns: prompt, answer (None where only the scorer knows), metadata, task, task_parameters.

    Raises:
        DataError: see `create_task`; or the task's scorer takes nonsense for a right answer.
    """
    dataset: Any = None
    for number in itertools.count():
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
