"""Find the answer in a response, and say whether it has the form of one. Pure, standard library only."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from enum import StrEnum


class AnswerFormat(StrEnum):
    """Where the answer of a response stands."""

    TAGS = "tags"
    """Inside the last <answer>…</answer>."""
    LINE = "line"
    """The last line that is not blank."""
    NUMBER = "number"
    """The last number, thousands separators removed, with a minus sign of ASCII."""
    WHOLE = "whole"
    """All of the response."""


class Verdict(StrEnum):
    EXACT = "exact"
    """The scorer's full score."""
    PARTIAL = "partial"
    """More than nothing."""
    WRONG = "wrong"
    MALFORMED = "malformed"
    """No answer was found, it has not the form of one, or the scorer raised on it. Scored 0."""

    @property
    def well_formed(self) -> bool:
        return self is not Verdict.MALFORMED


_OPEN, _CLOSE = "<answer>", "</answer>"
# A sign counts only where it cannot be an operator or a hyphen, so "12-5" ends in 5 and "= -5" in -5; so does the point
# of ".5". Of "2e3" the exponent is no number of its own.
_BEHIND = r"(?<![\w.)])"
_NUMBER = re.compile(
    rf"(?:(?:{_BEHIND}[-+\u2212])?(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|{_BEHIND}[-+\u2212]?\.\d+)"
    r"(?:[eE][-+]?\d+(?!\w))?"
)
# 1e999999 is short to write and long to compute with.
_ABSURD = re.compile(r"\d[eE][-+]?\d{4,}")
_NOT_FINITE = re.compile(r"\b(?:nan|inf|infinity)\b", re.IGNORECASE)


def extract_answer(text: str, where: AnswerFormat) -> str | None:
    """The answer in a response, without surrounding spaces; None if the response has no answer or an empty one."""
    match where:
        case AnswerFormat.TAGS:
            candidates = _in_tags(text)
        case AnswerFormat.LINE:
            candidates = [line for line in text.splitlines() if line.strip()]
        case AnswerFormat.NUMBER:
            candidates = [number.replace(",", "").replace("\u2212", "-") for number in _NUMBER.findall(text)]
        case AnswerFormat.WHOLE:
            candidates = [text]
    return (candidates[-1].strip() or None) if candidates else None


def _in_tags(text: str) -> list[str]:
    """What stands in each pair of tags, first to last; a tag within a pair opens none. In time linear in the text,
    which may be a tag said over and over: a lazy pattern looks for the end of each anew."""
    found: list[str] = []
    end = 0
    while (start := text.find(_OPEN, end)) >= 0:
        start += len(_OPEN)
        if (close := text.find(_CLOSE, start)) < 0:
            break
        found.append(text[start:close])
        end = close + len(_CLOSE)
    return found


def has_form(answer: str, reference: str | None) -> bool:
    """Whether `answer` has the form that `reference` shows: a number if that is a number; never nan or inf unless the
    reference says so (scorers take nan for anything); never a number of thousands of digits in scientific notation."""
    if _ABSURD.search(answer):
        return False
    if reference is not None and _number(reference) is not None:
        return _number(answer) is not None
    return not _NOT_FINITE.search(answer) or (reference is not None and bool(_NOT_FINITE.search(reference)))


def _number(text: str) -> Decimal | None:
    try:
        value = Decimal(text.replace(",", "").strip())
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
