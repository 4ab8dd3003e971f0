"""Data: JSONL, Parquet and saved sets that are damaged, ambiguous, endless or say nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.frame import ACCEPTED, ANSWERED, EXAMPLES, Case, Expected, Place, refused

GOOD = '{"prompt": "1+1=", "completion": "2"}\n'
DEEP = "[" * 100_000 + "]" * 100_000

ROWS: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "an empty file": ("", ("data.source",)),
    "blank lines": ("\n\n \n", ("data.source",)),
    "no JSON": ("hello\n", (":1", "malformed")),
    "a list": ("[1]\n", ("#1", "found a number")),
    "a number": ("3\n", (":1",)),
    "a text": ('"a"\n', (":1",)),
    "null": ("null\n", (":1",)),
    "cut": (GOOD + '{"prompt": "a"', (":2", "malformed")),
    "two objects in a line": (GOOD.strip() + GOOD, (":1", "malformed")),
    "a key twice": ('{"prompt": "a", "prompt": "b", "completion": "c"}\n', (":1", "prompt", "twice")),
    "an inner key twice": ('{"prompt": "a", "completion": "b", "x": {"y": 1, "y": 2}}\n', (":1", "y", "twice")),
    "NaN": ('{"prompt": "a", "completion": "b", "x": NaN}\n', (":1", "NaN")),
    "Infinity": ('{"prompt": "a", "completion": "b", "x": -Infinity}\n', (":1", "Infinity")),
    "a number too large": ('{"prompt": "a", "completion": "b", "x": 1e999}\n', (":1", "1e999")),
    "thousands of digits": ('{"prompt": "a", "completion": "b", "x": ' + "9" * 6000 + "}\n", (":1", "digits")),
    "deep": ('{"prompt": "a", "completion": "b", "x": ' + DEEP + "}\n", (":1", "deep")),
    "150 deep": ('{"prompt": "a", "completion": "b", "x": ' + "[" * 150 + "]" * 150 + "}\n", (":1", "deep")),
    "deep and open": ('{"prompt": ' + "[" * 100_000 + "\n", (":1",)),
    "half a character": ('{"prompt": "\\ud800", "completion": "b"}\n', (":1", "prompt", "surrogate")),
    "half a character, upper case": ('{"prompt": "a", "completion": "\\uDfFf"}\n', (":1", "completion", "surrogate")),
    "half a character in a key": ('{"prompt": "a", "completion": "b", "\\ud800": 1}\n', (":1", "surrogate")),
    "not UTF-8": (GOOD.encode() + b'{"prompt": "\xff", "completion": "a"}\n', ("UTF-8",)),
    "UTF-16": (GOOD.encode("utf-16"), ()),
    "NULs": (b"\0" * 100, ()),
    "a prompt that is a number": ('{"prompt": 3, "completion": "b"}\n', (":1", "prompt")),
    "a prompt that is true": ('{"prompt": true, "completion": "b"}\n', (":1", "prompt")),
    "a prompt that is a map": ('{"prompt": {"a": 1}, "completion": "b"}\n', (":1", "prompt")),
    "an empty prompt": ('{"prompt": "", "completion": "b"}\n', (":1", "prompt")),
    "no prompt": ('{"question": "a"}\n', (":1",)),
    "an empty completion": ('{"prompt": "a", "completion": " "}\n', (":1", "completion")),
    "messages that are texts": ('{"messages": ["a", "b"]}\n', (":1", "messages")),
    "messages without a role": ('{"messages": [{"content": "a"}]}\n', (":1", "messages")),
    "a role that is a number": ('{"messages": [{"role": 1, "content": "a"}]}\n', (":1", "messages")),
    "no messages": ('{"messages": []}\n', (":1",)),
    "nobody answers": ('{"messages": [{"role": "user", "content": "a"}]}\n', (":1", "assistant")),
    "texts and messages": (
        GOOD + '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        ("mixed",),
    ),
}

_CHAT = (
    '{{"prompt": [{{"role": "user", "content": "a"}}], "completion": [{{"role": "assistant", "content": "b"}}]{}}}\n'
)
CHATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kwargs that are a text": (_CHAT.format(', "chat_template_kwargs": "abc"'), (":1", "chat_template_kwargs")),
    "kwargs that are a list": (_CHAT.format(', "chat_template_kwargs": [1]'), (":1", "chat_template_kwargs")),
    "kwargs that are a number": (_CHAT.format(', "chat_template_kwargs": 3'), (":1", "chat_template_kwargs")),
    "kwargs of ours": (_CHAT.format(', "chat_template_kwargs": {"tokenize": true}'), (":1",)),
    "kwargs that are messages": (_CHAT.format(', "chat_template_kwargs": {"conversation": []}'), (":1",)),
    "tools that are no JSON": (_CHAT.format(', "tools": "[{"'), (":1", "tools")),
    "tools that are deep": (_CHAT.format(f', "tools": {json.dumps(DEEP)}'), (":1", "tools")),
    "tools that are a number": (_CHAT.format(', "tools": 3'), (":1",)),
}

PROMPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "an empty prompt": ('{"prompt": ""}\n', (":1", "empty")),
    "an empty prompt among others": ('{"prompt": "a"}\n{"prompt": ""}\n', (":2", "empty")),
    "an empty message": ('{"prompt": [{"role": "user", "content": ""}]}\n', (":1", "empty")),
    "an empty list of messages": ('{"prompt": []}\n', (":1", "empty")),
    "two kinds": ('{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "b"}]}\n', ("mixed",)),
}


def _examples(content: str | bytes) -> Callable[[Place], list[str]]:
    return lambda place: place.recipe(data__source=Path(place.file("d.jsonl", content)))


def cases() -> Iterator[Case]:
    for what, (content, words) in {**ROWS, **CHATS}.items():
        yield Case(what, refused(*words), _examples(content))
    for what, (content, words) in ROWS.items():
        words = tuple(word for word in words if word not in ("data.source", "mixed"))
        yield Case(f"held out: {what}", refused(*words), _held_out(content))
    for what, (content, words) in {**PROMPTS, **{k: v for k, v in ROWS.items() if "ompletion" not in k}}.items():
        if what in (
            "messages that are texts",
            "messages without a role",
            "a role that is a number",
            "no messages",
            "nobody answers",
            "texts and messages",
        ):
            continue
        words = tuple(word for word in words if word != "data.source")
        yield Case(f"generate: {what}", refused(*words), _prompts(content))
    for what, change in PARQUET.items():
        yield Case(f"Parquet: {what}", refused(), _parquet(change))
    for what, name in {"no file": "none.jsonl", "a folder": ".", "a device": "/dev/zero", "an empty name": ""}.items():
        yield Case(f"source: {what}", refused("data.source"), lambda place, name=name: place.recipe(data__source=name))
    for what, text in {"an empty folder": "", "a broken state": '{"_data_files": 3}', "a deep state": DEEP}.items():
        yield Case(f"saved: {what}", refused("data.source"), lambda place, text=text: _saved(place, text))
    yield from _flipped()
    yield from _accepted()


def _held_out(content: str | bytes) -> Callable[[Place], list[str]]:
    return lambda place: place.recipe(
        data__source=place.folder / "examples.jsonl",
        evaluation__sets=[str(place.file("d.jsonl", content))],
        evaluation__items=1,
    )


def _prompts(content: str | bytes) -> Callable[[Place], list[str]]:
    return lambda place: place.generate(prompts=place.file("d.jsonl", content))


PARQUET: dict[str, Any] = {
    "empty": lambda whole: b"",
    "a text": lambda whole: GOOD.encode(),
    "only magic": lambda whole: b"PAR1PAR1",
    "cut": lambda whole: whole[: len(whole) // 2],
    "no end": lambda whole: whole[:-4],
    "a length of nothing": lambda whole: whole[:-8] + b"\xff\xff\xff\x7fPAR1",
    "a footer of noise": lambda whole: whole[:-60] + random.Random(0).randbytes(52) + whole[-8:],
}


def _parquet(change: Any) -> Callable[[Place], list[str]]:
    def argv(place: Place) -> list[str]:
        return place.recipe(data__source=Path(place.file("d.parquet", change(_table(place)))))

    return argv


def _table(place: Place, **columns: Any) -> bytes:
    import pyarrow
    import pyarrow.parquet

    path = place.folder / "made.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns or {"prompt": ["a", "b"], "completion": ["c", "d"]}), path)
    return path.read_bytes()


def _saved(place: Place, text: str) -> list[str]:
    place.file("set/dataset_info.json", "{}")
    if text:
        place.file("set/state.json", text)
    return place.recipe(data__source=place.folder / "set")


def _flipped() -> Iterator[Case]:
    """Good rows with some bytes changed: whatever comes of it, no traceback."""
    whole = EXAMPLES.encode()
    for seed in range(60):
        draw = random.Random(seed)
        changed = bytearray(whole)
        for _ in range(draw.choice((1, 2, 8))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        yield Case(f"bytes changed, {seed}", ANSWERED, _examples(bytes(changed)))

    def noisy(seed: int) -> Callable[[bytes], bytes]:
        def change(table: bytes) -> bytes:
            draw, changed = random.Random(seed), bytearray(table)
            for _ in range(draw.choice((1, 4, 16))):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            return bytes(changed)

        return change

    for seed in range(60):
        yield Case(f"Parquet: bytes changed, {seed}", ANSWERED, _parquet(noisy(seed)))


def _accepted() -> Iterator[Case]:
    rows = {
        "a number of 300 digits": '{"prompt": "a", "completion": "b", "x": ' + "9" * 300 + "}\n",
        "50 deep": '{"prompt": "a", "completion": "b", "x": ' + "[" * 50 + "]" * 50 + "}\n",
        "a pair of surrogates": '{"prompt": "\\ud83d\\ude00", "completion": "b"}\n',
        "a line separator": '{"prompt": "a\u2028b", "completion": "c"}\n',
        "Windows": '{"prompt": "a", "completion": "b"}\r\n',
        "a byte order mark": "\ufeff" + GOOD,
        "blank lines between": GOOD + "\n\n" + GOOD,
        "kwargs": _CHAT.format(', "chat_template_kwargs": {"enable_thinking": false}'),
        "kwargs that are null": _CHAT.format(', "chat_template_kwargs": null'),
        "tools": _CHAT.format(', "tools": "[]"'),
    }
    for what, content in rows.items():
        yield Case(what, ACCEPTED, _examples(content), always=what in ("kwargs", "50 deep"))
    yield Case("Parquet", ACCEPTED, _parquet(lambda whole: whole), always=True)
    expected: dict[str, tuple[Expected, Any]] = {
        "Parquet: a column twice": (refused("prompt"), _twice),
        "Parquet: no UTF-8": (refused("Parquet"), _not_utf8),
    }
    for what, (answer, argv) in expected.items():
        yield Case(what, answer, argv, always=True)


def _twice(place: Place) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    columns = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array(["c"])]
    table = pyarrow.Table.from_arrays(columns, names=["prompt", "completion", "prompt"])
    path = place.folder / "d.parquet"
    pyarrow.parquet.write_table(table, path)
    return place.recipe(data__source=path)


def _not_utf8(place: Place) -> list[str]:
    import pyarrow

    raw = pyarrow.array([b"\xff\xfe", b"ok"], type=pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    return place.recipe(data__source=Path(place.file("d.parquet", _table(place, prompt=texts, completion=["a", "b"]))))
