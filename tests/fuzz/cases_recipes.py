"""Recipe files as texts: what is no YAML, what is YAML of another meaning than it looks, what never ends."""

from __future__ import annotations

from collections.abc import Iterator

from tests.fuzz.frame import ACCEPTED, Case, Place, refused

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)
"""Nine to the thirteenth power."""

MERGE_BOMB = "a: &a {k: 1}\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{', '.join(['*' + chr(97 + i)] * 20)}]}}\n" for i in range(12)
)

WRONG: dict[str, str | bytes] = {
    "empty": "",
    "a list": "- 1\n- 2\n",
    "a text": "hello\n",
    "a number": "3\n",
    "two documents": "steps: 1\n---\nsteps: 2\n",
    "open quote": 'model: "abc\n',
    "open bracket": "steps: [1, 2\n",
    "a tab": "data:\n\tsource: x\n",
    "an unknown anchor": "steps: *none\n",
    "an object of Python": "model: !!python/object/apply:os.system ['true']\n",
    "an unknown tag": "model: !thing 3\n",
    "a tag that does not fit": "steps: !!int abc\n",
    "a float tag that does not fit": "steps: !!float abc\n",
    "a date tag that does not fit": "model: !!timestamp 2026-99-99\n",
    "binary": "model: !!binary abc\n",
    "a set": "model: !!set {a, b}\n",
    "not UTF-8": b"model: \xff\xfe\xfa\n",
    "a NUL": "model: a\0b\n",
    "a bell": "model: a\x07b\n",
    "bytes": bytes(range(256)),
    "escape beyond Unicode": 'model: "\\U00110000"\n',
    "half a character": 'model: "\\uD800"\n',
    "deep lists": "options: {a: " + "[" * 100_000 + "]" * 100_000 + "}\n",
    "deep maps": "options: " + "{a: " * 20_000 + "1" + "}" * 20_000 + "\n",
    "deep, open": "options: " + "[" * 100_000,
    "deep by indentation": "".join(" " * i + "a:\n" for i in range(1500)),
    "a billion laughs": BOMB + "options: {a: *m}\n",
    "a billion laughs at the key": "options:\n" + "".join(f"  {line}\n" for line in BOMB.splitlines()),
    "a bomb of merges": MERGE_BOMB + "options: {a: *m}\n",
    "a list that holds itself": "options: {a: &a [*a]}\n",
    "a map that holds itself": "options: &a {a: *a}\n",
    "huge": "options: {a: [" + "1, " * 400_000 + "]}\n",
    "a huge text": "model: " + "a" * 3_000_000 + "\n",
    "a map as a key": "{{a: b}: c}\n",
    "a list as a key": "? [a, b]\n: c\n",
    "a number as a key": "3: 4\n",
    "true as a key": "true: 4\n",
    "null as a key": "null: 4\n",
    "infinity as a key": ".inf: 4\n",
    "a number as a key of a section": "data: {3: 4}\n",
    "a number as a key of options": "options: {3: 4}\n",
    "a value for a section": "data: 3\n",
    "a list for a section": "sampling: [temperature]\n",
    "a text for options": "options: abc\n",
    "a list for options": "options: [1]\n",
    "stages as a list": "stages: [a, b]\n",
    "stages as a text": "stages: abc\n",
    "no stages": "stages: {}\n",
    "a stage of a number": "stages: {a: 1}\n",
    "a stage with a number for a name": "stages: {1: {model: x}}\n",
    "a stage after none": "stages: {a: {model: '@b'}}\n",
}

TWICE = {
    "a key": ("steps: 1\n", "steps"),
    "a section": ("sampling: {top_p: 1}\nsampling: {top_k: 0}\n", "sampling"),
    "a key of a section": ("sampling: {top_p: 1, top_p: 0.5}\n", "top_p"),
    "a key in quotes": ('"steps": 4\n', "steps"),
    "a key of options": ("options: {epochs: 1, epochs: 2}\n", "epochs"),
}


def cases() -> Iterator[Case]:
    for what, text in WRONG.items():
        yield Case(what, refused(), lambda place, text=text: ["train", place.file("r.yaml", text), "--dry-run"])
        yield Case(f"plait eval: {what}", refused(), lambda place, text=text: ["eval", place.file("r.yaml", text)])
    for what, (text, key) in TWICE.items():
        yield Case(
            f"{what} twice",
            refused(key, "twice"),
            lambda place, text=text: place.recipe(steps=3, text=text),
            always=True,
        )
    for name in ("deep lists", "a billion laughs", "huge"):
        value = str(WRONG[name]).removeprefix("options: ")
        yield Case(f"on the command line: {name}", refused(), lambda place, value=value: _over(place, value[:100_000]))
    yield from _accepted()


def _over(place: Place, value: str) -> list[str]:
    return [*place.recipe(), f"--data.parameters={value}"]


def _accepted() -> Iterator[Case]:
    texts = {
        "an anchor": "optimizer: &o {learning_rate: 1e-4}\ncritic: {optimizer: *o}\n",
        "a merge": "optimizer: &o {learning_rate: 1e-6}\nevaluation: {every: 0}\n",
        "a comment": "# a comment\n",
        "a byte order mark": "",
        "yes for true": "overwrite: yes\n",
        "a time as a text": 'data: {source: SOURCE, prompt_template: "1:30 {question}"}\n',
    }
    for what, text in texts.items():
        if what == "an anchor":
            # A critic is refused for sft: by its own rule, not for the anchor.
            yield Case(what, refused("critic", "sft"), lambda place, text=text: place.recipe(text=text))
        elif what == "a byte order mark":
            yield Case(what, ACCEPTED, _with_mark)
        elif "SOURCE" in text:
            continue
        else:
            yield Case(what, ACCEPTED, lambda place, text=text: place.recipe(text=text), always=True)


def _with_mark(place: Place) -> list[str]:
    command, path, flag = place.recipe()
    with open(path, "rb") as file:
        text = file.read()
    return [command, place.file("recipe.yaml", b"\xef\xbb\xbf" + text), flag]
