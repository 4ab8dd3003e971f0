"""The frame of the fuzzing suite: wrong (and right) inputs, and what every one of them must be answered with.

A case is a command line over files that it writes first. It is run in this process (`plait.cli.main`), or in one of its
own where a hang or memory are the matter, and must

* leave no traceback: wrong input ends with exit code 2 and one line on stderr that begins with `error: `,
* end within DEADLINE_S,
* be refused if it is on a list of what must be, and be accepted if it is on a list of that: so that refusals are not
  blanket.

To add a table of cases: write `tests/fuzz/cases_NAME.py` with a function `cases()` that yields `Case`s, and add it to
`TABLES` in `test_fuzz.py`. Names must be unique within a table. A case is three things:

    yield Case("steps: true", refused("steps", "true"), lambda place: place.recipe(steps=Raw("true")))

its name, what is expected (`refused(*words)`: the message holds each of these words; `ACCEPTED`; `ANSWERED`: either,
but without a traceback), and a function that writes its files in a `Place` and gives the command line. The default
suite runs a fixed share of each table (`DEFAULT_CASES` in all), `make test-all` runs all of them; `always=True` puts a
case among the first, `alone=True` gives it a process of its own (seconds: keep these few).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.cli import main

DEADLINE_S = 10.0
"""Limit of every case, in processor time: the clock of a busy machine runs fast."""
WAIT_S = 60.0
"""Limit of every case by the clock."""


EXAMPLES = '{"prompt": "1+1=", "completion": "2"}\n{"prompt": "1+2=", "completion": "3"}\n'


@dataclass(frozen=True)
class Expected:
    codes: tuple[int, ...]
    words: tuple[str, ...] = ()
    """Each stands in the message of a refusal."""


ACCEPTED = Expected((0,))
ANSWERED = Expected((0, 2))


def refused(*words: str) -> Expected:
    return Expected((2,), words)


def failed(*words: str) -> Expected:
    """The input could be used, and the work then stopped with a message."""
    return Expected((1,), words)


@dataclass(frozen=True)
class Raw:
    """A value of a recipe as it stands in the file: `Raw("010")`."""

    text: str


@dataclass(frozen=True)
class Place:
    """Where a case writes its files."""

    folder: Path
    """Its own, empty."""
    model: Path
    """A tiny checkpoint, not to be changed."""

    def file(self, name: str, content: str | bytes) -> str:
        """Write a file; gives its path. Texts may hold anything, lone surrogates too."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return str(path)

    def rows(self, *rows: Mapping[str, Any]) -> str:
        """A JSONL file."""
        return self.file("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def recipe(self, *, command: str = "train", text: str = "", **keys: Any) -> list[str]:
        """A dry run of a recipe that learns two examples, with `keys` (`sampling__top_p=…`) over its own, and `text`
        behind them. A key that is None is left out."""
        tree: dict[str, Any] = {
            "model": str(self.model),
            "algorithm": "sft",
            "steps": 2,
            "prompts_per_step": 1,
            "data__source": self.folder / "examples.jsonl",
            "run_dir": self.folder / "run",
            "dtype": "float32",
            "threads": 1,
        } | keys
        if tree["data__source"] == self.folder / "examples.jsonl":
            self.file(
                "examples.jsonl", '{"prompt": "1+1=", "completion": "2"}\n{"prompt": "1+2=", "completion": "3"}\n'
            )
        path = self.file("recipe.yaml", _yaml(tree) + text)
        return [command, path, *(["--dry-run"] if command == "train" else [])]

    def generate(self, **options: Any) -> list[str]:
        """`plait generate` of one short response, with `options` (`max_tokens="…"`) over its own."""
        given: dict[str, Any] = {
            "model": self.model,
            "prompts": self.folder / "prompts.jsonl",
            "out": self.folder / "out.jsonl",
            "max_tokens": 2,
            "dtype": "float32",
            "threads": 1,
        } | options
        if given["prompts"] == self.folder / "prompts.jsonl":
            self.file("prompts.jsonl", '{"prompt": "1+1="}\n')
        words = (
            (f"--{key.replace('_', '-')}", *(value if isinstance(value, tuple) else (value,)))
            for key, value in given.items()
        )
        return ["generate", *(str(word) for option in words for word in option)]

    def checkpoint(self, **files: str | bytes | Callable[[bytes], bytes] | None) -> Path:
        """A copy of the tiny checkpoint in which files are others: `config__json="{"`; None: absent; a function: of
        what it held."""
        folder = self.folder / "model"
        folder.mkdir()
        change = {name.replace("__", "."): content for name, content in files.items()}
        for name in {path.name for path in self.model.iterdir()} | change.keys():
            content = change.get(name, b"")
            path = folder / name
            if name not in change:
                path.symlink_to(self.model / name)
            elif callable(content):
                path.write_bytes(content((self.model / name).read_bytes()))
            elif content is not None:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder


@dataclass(frozen=True)
class Case:
    name: str
    expected: Expected
    argv: Callable[[Place], Sequence[str]]
    always: bool = False
    """Part of the default suite."""
    alone: bool = False
    """Run in a process of its own, with its memory bounded."""
    env: Mapping[str, str] = field(default_factory=dict)
    compiles: bool = False
    """It really computes: the first time on a machine its kernels are compiled, which takes many times the deadline."""


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def judge(case: Case, answer: Answer) -> None:
    """AssertionError where a case was not answered as it must be."""
    shown = f"exit code {answer.code}, stderr:\n{answer.err[-3000:]}"
    assert "Traceback (most recent call last)" not in answer.err, shown
    assert answer.code in case.expected.codes, f"expected exit code {case.expected.codes}, found {shown}"
    if answer.code == 0:
        return
    messages = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, f"expected one message, found {len(messages)}; {shown}"
    assert answer.err.rstrip("\n").splitlines()[-1] == messages[0], f"expected the message last, found {shown}"
    assert len(messages[0]) < 2500, f"expected a message that can be read, found {len(messages[0])} characters"
    for word in case.expected.words if answer.code in case.expected.codes else ():
        assert word in messages[0], f"expected {word!r} in the message, found {shown}"


def run_case(case: Case, place: Place) -> None:
    """Write a case's files, run it, judge the answer."""
    argv = [str(word) for word in case.argv(place)]
    judge(case, _alone(argv, case) if case.alone else _here(argv, 20 if case.compiles else 1))


class _TooLong(BaseException):
    """Nothing in plait catches it."""


@contextlib.contextmanager
def _deadline(times: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _TooLong(f"no answer within {DEADLINE_S:g} s of work, or {WAIT_S:g} s of waiting")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, DEADLINE_S), (signal.SIGALRM, signal.ITIMER_REAL, WAIT_S))
    before = [signal.signal(number, ring) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, times * seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def _here(argv: list[str], times: int) -> Answer:
    # A file has an encoding, as a terminal has: a text that it cannot write must not end in a traceback either.
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _deadline(times):
        code = main(argv)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Answer(code, *texts)


_BOUNDED = """
import resource, sys
from plait.cli import main
resource.setrlimit(resource.RLIMIT_AS, (8 << 30,) * 2)
sys.exit(main(sys.argv[1:]))
"""


def _alone(argv: list[str], case: Case) -> Answer:
    done = subprocess.run(
        [sys.executable, "-c", _BOUNDED, *argv],
        capture_output=True,
        timeout=WAIT_S,
        env=os.environ | case.env,
    )
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def _yaml(tree: Mapping[str, Any]) -> str:
    """Keys with `__` for dots as YAML in flow style, so that any value of one line can be told."""
    sections: dict[str, Any] = {}
    for key, value in tree.items():
        *path, leaf = key.split("__")
        at = sections
        for part in path:
            at = at.setdefault(part, {})
        if value is not None:
            at[leaf] = value
    return "".join(f"{json.dumps(key)}: {_flow(value)}\n" for key, value in sections.items())


def _flow(value: Any) -> str:
    match value:
        case Raw():
            return value.text
        case Mapping():
            return "{" + ", ".join(f"{json.dumps(key)}: {_flow(one)}" for key, one in value.items()) + "}"
        case Path():
            return json.dumps(str(value))
    return json.dumps(value)
