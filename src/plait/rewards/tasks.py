"""The reward of a reasoning_gym task: its own scorer on the answer found in the response, guarded.

Runs inside reward workers; imports reasoning_gym at its first call. Some of that package's scorers (spiral_matrix,
string_insertion, binary_matrix …) pass the answer to `eval`: such a task runs what the model writes, in a worker that
has a time limit but the rights of the user.
"""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from plait.rewards.answers import AnswerFormat, Verdict, extract_answer, has_form

SCORER_LIMIT_S = 2.0
"""CPU seconds for a scorer to read one answer: some hand it to a computer algebra, where 9**9**9 takes for ever."""


@dataclass(frozen=True)
class TaskReward:
    """TRL's signature over rows that `data.tasks` drew (columns answer, metadata, task, task_parameters).

    The reward is 1 for an exact answer, and otherwise 0, or the scorer's partial credit (in [0, 1)) if asked for. Logs
    `verdict` (see `Verdict`) and `answer` (the text found, or None) per sample.
    """

    where: AnswerFormat = AnswerFormat.TAGS
    partial_credit: bool = False

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        answer: Sequence[str | None],
        metadata: Sequence[dict[str, Any]],
        task: Sequence[str],
        task_parameters: Sequence[dict[str, Any]],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        answers = [extract_answer(text_of(completion), self.where) for completion in completions]
        scored = [
            score_answer(name, parameters, text, {"question": prompt, "answer": reference, "metadata": facts})
            for name, parameters, text, prompt, reference, facts in zip(
                task, task_parameters, answers, prompts, answer, metadata, strict=True
            )
        ]
        if log_extra is not None:
            log_extra("verdict", [verdict.value for verdict, _ in scored])
            log_extra("answer", list(answers))
        return [score if self.partial_credit else float(verdict is Verdict.EXACT) for verdict, score in scored]


@dataclass(frozen=True)
class WellFormed:
    """1 for a well-formed answer, right or wrong, and 0 for a malformed one: a small weight of it teaches the form."""

    where: AnswerFormat = AnswerFormat.TAGS

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        verdicts: list[str] = []
        columns["log_extra"] = lambda name, values: verdicts.extend(values) if name == "verdict" else None
        task_columns = {name: columns[name] for name in ("answer", "metadata", "task", "task_parameters", "log_extra")}
        TaskReward(self.where)(prompts, completions, **task_columns)
        return [float(Verdict(verdict).well_formed) for verdict in verdicts]


def score_answer(
    task: str, parameters: dict[str, Any], answer: str | None, entry: dict[str, Any]
) -> tuple[Verdict, float]:
    """The verdict on an answer, and the scorer's score in [0, 1] (0 for a malformed answer).

    A scorer that raises, gives no finite number or takes more than SCORER_LIMIT_S of CPU time has met text that it
    cannot read: malformed, by the task's rule.

    Raises:
        Exception: whatever the scorer raises on the task's own answer too; then the row is at fault, not the text.
    """
    scorer = _scorer(task, json.dumps(parameters, sort_keys=True))
    if answer is None or not has_form(answer, entry["answer"]):
        return Verdict.MALFORMED, 0.0
    try:
        with _limited():
            score = float(scorer.score_answer(answer, entry))
    except _TooSlow:
        return Verdict.MALFORMED, 0.0
    except Exception:  # scorers raise ValueError, TypeError, KeyError, OverflowError … on text that they cannot parse
        scorer.score_answer(entry["answer"], entry)
        return Verdict.MALFORMED, 0.0
    if not math.isfinite(score):
        return Verdict.MALFORMED, 0.0
    if score >= 1:
        return Verdict.EXACT, 1.0
    return (Verdict.PARTIAL, score) if score > 0 else (Verdict.WRONG, 0.0)


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion in either of TRL's shapes."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


class _TooSlow(BaseException):
    """No Exception, so that a scorer's own `except Exception` lets it through."""


@contextmanager
def _limited() -> Iterator[None]:
    """Interrupt what takes too long, in the main thread, which is where workers call; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, interrupt)
    # Again and again, for a scorer that swallows even this.
    signal.setitimer(signal.ITIMER_VIRTUAL, SCORER_LIMIT_S, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@lru_cache(maxsize=32)
def _scorer(task: str, parameters: str) -> Any:
    from plait.data.tasks import create_task

    return create_task(task, json.loads(parameters))
