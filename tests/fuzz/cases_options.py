"""Options of the command line that are no numbers, no texts, no files; and run folders whose files are damaged."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz.cases_checkpoints import BROKEN
from tests.fuzz.frame import ACCEPTED, ANSWERED, Case, Place, Raw, refused

NUMBERS = (
    "abc",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "true",
    "0x10",
    "1_000",
    "",
    " ",
    "9" * 30,
    "9" * 5000,
    "-1",
    "1.5",
    "٣",
)
OF_GENERATE = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "stop_token_ids",
    "max_running",
    "kv_tokens",
    "seed",
    "threads",
)
MAY = {
    ("temperature", "1.5"),
    ("temperature", "1_000"),
    ("temperature", "٣"),
    ("top_p", "٣"),
    ("temperature", "9" * 30),
}
"""What these options do take (Python reads digits of every script as numbers)."""

WORDS: dict[str, list[str]] = {
    "nothing": [],
    "a command that is none": ["trian"],
    "a NUL in a command": ["tra\0in"],
    "a NUL in a path": ["train", "a\0b.yaml"],
    "half a character in a path": ["train", "a\udcffb.yaml"],
    "half a character in a value": ["train", "x.yaml", "--model", "\udc80"],
    "an option without a name": ["train", "--"],
    "an option of dots": ["train", "--...", "1"],
    "a long option": ["train", "--" + "a" * 10_000, "1"],
    "an option with an empty key": ["train", "--=3"],
    "a value without a key": ["train", "x.yaml", "3"],
    "a key of a section of nothing": ["train", "--steps.a.b", "3"],
    "a value that is no YAML": ["train", "--steps", "[1"],
    "a deep value": ["train", "--data.parameters", "[" * 50_000],
    "a folder as a recipe": ["train", "/"],
    "a device as a recipe": ["train", "/dev/zero"],
    "a long path": ["train", "a" * 5000],
    "a path of dots": ["train", ".." + "/.." * 2000],
    "export of nothing": ["export", "/nowhere", "--out", "x"],
    "export with a NUL": ["export", "a\0b", "--out", "x"],
    "eval of a folder": ["eval", "/tmp"],
    "trace of nothing": ["trace", "show", "/nowhere"],
    "trace of a device": ["trace", "show", "/dev/null"],
    "trace of a folder": ["trace", "show", "/"],
    "trace to nowhere": ["trace", "chrome", "/nowhere", "/nowhere/x"],
}

LENGTHS: dict[str, str | bytes] = {
    "no list": "3\n",
    "of texts": '["a"]\n',
    "of booleans": "[true]\n",
    "of halves": "[1.5]\n",
    "of nothing": "[0]\n",
    "below": "[-1]\n",
    "beyond": "[99999999999999999999]\n",
    "of thousands of digits": "[" + "9" * 6000 + "]\n",
    "deep": "[" * 100_000 + "]" * 100_000 + "\n",
    "too few": "[]\n",
    "too many": "[1, 2]\n",
    "for other prompts": "[1]\n[1]\n",
    "not UTF-8": b"\xff\n",
    "NaN": "[NaN]\n",
}


def cases() -> Iterator[Case]:
    for option in OF_GENERATE:
        for value in NUMBERS:
            if (option, value) in MAY:
                continue
            if value == "-1" and option == "temperature":
                continue
            name = f"generate --{option.replace('_', '-')}={value[:12]!r} of {len(value)} characters"
            yield Case(name, refused(), _generate(option, value))
    for option, values in {
        "device": ("tpu", "", "cuda:0"),
        "dtype": ("int8", "", "float16"),
        "model": ("", "/nowhere", "~nobody/x", "a/b/c", "a" * 5000, "../..", "."),
        "prompts": ("/nowhere", "/", "/dev/null", "a" * 5000),
        "out": ("/", "/nowhere/\0", "/dev/null/x", "/proc/x"),
        "stop": ("",),
        "lengths": ("/nowhere", "/"),
    }.items():
        for value in values:
            name = f"generate --{option}={value[:12]!r} of {len(value)} characters"
            yield Case(name, refused(), lambda place, o=option, v=value: place.generate(**{o: v}))
    for what, content in LENGTHS.items():
        yield Case(f"lengths: {what}", refused("--lengths"), _lengths(content))
    yield Case(
        "generate: stop token beyond the vocabulary",
        refused("--stop-token-ids", "320"),
        lambda place: place.generate(stop_token_ids=320),
        always=True,
    )
    for what, argv in WORDS.items():
        yield Case(what, ANSWERED if what == "nothing" else refused(), lambda place, argv=argv: argv)
    yield from _of_recipes()
    yield from _of_run_folders()
    yield from _flags()


def _generate(option: str, value: str) -> Callable[[Place], list[str]]:
    def argv(place: Place) -> list[str]:
        words = place.generate(**({option: "5"} if option != "top_p" else {option: "0.5"}))
        name = f"--{option.replace('_', '-')}"
        at = words.index(name)
        return [*words[:at], f"{name}={value}", *words[at + 2 :]]

    return argv


def _lengths(content: str | bytes) -> Callable[[Place], list[str]]:
    return lambda place: place.generate(lengths=place.file("lengths.jsonl", content))


def _of_recipes() -> Iterator[Case]:
    """Values that are of their kind, and do not fit together."""
    grpo: dict[str, Any] = {"algorithm": "grpo", "samples_per_prompt": 2, "prompts_per_step": 1}

    def prompts(place: Place, **keys: Any) -> list[str]:
        from pathlib import Path

        source = Path(place.file("prompts.jsonl", '{"prompt": "1+1="}\n{"prompt": "1+2="}\n'))
        function = place.file("f.py", "def f(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
        return place.recipe(
            **(
                grpo
                | {"data__source": source, "reward__functions": [f"{function}:f"], "sampling__max_response_tokens": 4}
                | keys
            )
        )

    wrong: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "a stop token beyond the vocabulary": (("stop_token_ids", "320"), {"sampling__stop_token_ids": [320]}),
        "a stop token below": (("stop_token_ids",), {"sampling__stop_token_ids": [-1]}),
        "more tokens than positions": (("positions",), {"sampling__max_response_tokens": 2**31 - 1}),
        "infinite temperature": (("temperature",), {"sampling__temperature": Raw(".inf")}),
        "a weight of NaN": (("weights",), {"reward__weights": Raw("[.nan]")}),
        "an infinite weight": (("weights",), {"reward__weights": Raw("[.inf]")}),
        "a weight of true": (("weights",), {"reward__weights": Raw("[true]")}),
        "many workers": (("workers",), {"reward__workers": 1_000_000}),
        "many devices": (("devices",), {"devices": 1_000_000}),
        "many threads": (("threads",), {"threads": 1_000_000}),
        "more held out than there are": (("evaluation.items",), {"evaluation__items": 10**9}),
        "more rows than there are": (("data.size",), {"data__size": 10**9}),
        "an empty stop": (("stop",), {"sampling__stop": [""]}),
    }
    for what, (words, keys) in wrong.items():
        yield Case(f"recipe: {what}", refused(*words), lambda place, keys=keys: prompts(place, **keys))
    large = (
        {"prompts_per_step": 2**31 - 1},
        {"samples_per_prompt": 2**31 - 1},
        {"steps": 2**31 - 1},
        {"evaluation__show": 2**31 - 1},
        {"sampling__max_running": 2**31 - 1},
        {"micro_batch_tokens": 2**31 - 1},
        {"seed": 2**63 - 1},
        {"data__seed": 2**63 - 1},
    )
    for keys in large:
        yield Case(f"recipe: large {next(iter(keys))}", ANSWERED, lambda place, keys=keys: prompts(place, **keys))
    yield Case("recipe: prompts", ACCEPTED, prompts, always=True)
    for what, template in {"no question": "abc", "half a brace": "{question"}.items():
        yield Case(
            f"recipe: a prompt template with {what}",
            refused("prompt_template"),
            lambda place, template=template: prompts(place, data__prompt_template=template),
        )


RUN_FILES = (
    "recipe.yaml",
    "metrics.jsonl",
    "trace.json",
    "run.lock",
    "checkpoints/step-1/state.json",
    "checkpoints/step-1/manifest.json",
    "samples/step-1.jsonl",
    "evaluations.jsonl",
    "doctor.json",
)


def _of_run_folders() -> Iterator[Case]:
    """Folders that no run could go on from: damaged files, files for folders, folders for files."""
    for file in RUN_FILES:
        for what, content in BROKEN.items():
            if file == "recipe.yaml" and what in ("thousands of digits", "a key twice"):
                continue
            yield Case(f"resume: {file}: {what}", refused(), _run(file, content, "--resume"))
        yield Case(f"export: {file}: noise", refused(), _exported(file, random.Random(0).randbytes(200)))
        yield Case(f"export: {file}: deep", refused(), _exported(file, BROKEN["deep"]))


def _run(file: str, content: str | bytes, *flags: str) -> Callable[[Place], list[str]]:
    def argv(place: Place) -> list[str]:
        place.file(f"run/{file}", content)
        return [*place.recipe(), *flags]

    return argv


def _exported(file: str, content: str | bytes) -> Callable[[Place], list[str]]:
    def argv(place: Place) -> list[str]:
        place.file("run/recipe.yaml", "model: x\n")
        place.file(f"run/{file}", content)
        return ["export", str(place.folder / "run"), "--out", str(place.folder / "out")]

    return argv


def _flags() -> Iterator[Case]:
    for command in ("train", "eval", "generate", "export", "schedule", "trace"):
        for flag in ("--help", "--help-all") if command != "trace" else ("--help",):
            yield Case(f"{command} {flag}", ACCEPTED, lambda place, c=command, f=flag: [c, f])
        yield Case(f"{command} --frobnicate", refused(), lambda place, c=command: [c, "--frobnicate", "1"])
