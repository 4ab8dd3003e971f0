"""JSON as plait reads it: strict, so that a value means what it looks like, and bounded, so that no text can harm.

Refused beside what is no JSON: a key that stands twice, numbers that are not finite, integers of more digits than a
float could hold, values nested deeper than anything of ours, and texts with half a surrogate pair, which is no
character.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 100
"""Lists and maps inside each other."""
MAX_DIGITS = 308
"""The most digits of an integer: more do not fit a float."""


class Malformed(ValueError):
    """A text is no value of its form; the message says what is wrong and where, in one line."""


def kind_of(value: Any) -> str:
    """What a value is, in a message's words: `a list`, `null`."""
    words = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else words.get(type(value), type(value).__name__)


def parse(text: str | bytes, *, finite: bool = True) -> Any:
    """The value that a JSON text holds.

    Args:
        finite: refuse NaN and Infinity, which Python writes and JSON does not know.

    Raises:
        Malformed: see above.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = (_DECODER if finite else _PYTHONS).decode(text)
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise Malformed(f"{error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise Malformed(_TOO_DEEP) from None
    # A depth takes brackets: most texts have too few of them to be looked through.
    if text.count("[") + text.count("{") > MAX_DEPTH:
        check_depth(value)
    if "\\ud" in text or "\\uD" in text or not is_unicode(text):
        check_texts(value)
    return value


_TOO_DEEP = f"lists and maps are nested more than {MAX_DEPTH} deep"


def check_depth(value: Any) -> None:
    """Raises Malformed where lists and maps are nested more than MAX_DEPTH deep, or hold themselves."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for whole in level
            if isinstance(whole, list | dict)
            for item in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(item, list | dict)
        ]
        if not level:
            return
    raise Malformed(_TOO_DEEP)


def check_texts(value: Any, whose: str = "a text") -> None:
    """Raises Malformed where a text of a value, or a key, holds half of a surrogate pair: it can be neither tokenised
    nor written. Of no great depth."""
    match value:
        case str() if not is_unicode(value):
            lone = next(ord(c) for c in value if 0xD800 <= ord(c) < 0xE000)
            raise Malformed(f"{whose} holds a lone surrogate (\\u{lone:04x}), which is no character; fix the text")
        case list():
            for item in value:
                check_texts(item, whose)
        case dict():
            for key, item in value.items():
                check_texts(key, "a key")
                check_texts(item, f"`{key}`" if whose == "a text" else whose)


def whole_number(digits: str) -> int:
    """The integer of a text of digits, perhaps with a sign.

    Raises:
        Malformed: it has more than MAX_DIGITS.
    """
    if len(digits) > MAX_DIGITS:
        raise Malformed(f"the number {digits[:12]}… has {len(digits)} digits, more than {MAX_DIGITS}")
    return int(digits)


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate: whether it can be written."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Malformed(f"the number {text[:40]} is too large to be finite")
    return value


def _no_number(word: str) -> Any:
    raise Malformed(f"{word} is no number of JSON; give a finite one, or null")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise Malformed(f"the key {twice[:80]!r} appears twice in one object; keep one of them")
    return by_name


_DECODER = json.JSONDecoder(
    object_pairs_hook=_once, parse_float=_finite, parse_int=whole_number, parse_constant=_no_number
)
_PYTHONS = json.JSONDecoder(object_pairs_hook=_once, parse_int=whole_number)
