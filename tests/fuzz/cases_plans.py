"""Plan files, schedules and timelines, and what `plait schedule` and `plait trace` are asked."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.cases_checkpoints import BROKEN
from tests.fuzz.frame import ACCEPTED, ANSWERED, Case, Place, refused

PLAN: dict[str, Any] = {
    "format": "plait-plan",
    "version": 1,
    "name": "two",
    "num_ranks": 2,
    "placements": [
        {"call": "actor.train", "mode": "train", "ranks": [0, 1], "dp": 2, "tp": 1, "pp": 1, "after": "keep"}
    ],
    "policies": [],
    "schedules": [],
    "predicted": None,
}
LARGE = 10**18

NUMBERS: dict[str, Any] = {
    "true": True,
    "a text": "2",
    "a half": 1.5,
    "below": -1,
    "beyond": LARGE,
    "a list": [1],
    "a map": {"a": 1},
}
OF_PLANS: dict[str, dict[str, Any]] = {
    **{f"num_ranks {what}": {"num_ranks": value} for what, value in NUMBERS.items()},
    "no ranks": {"num_ranks": 0},
    "no name": {"name": 3},
    "another version": {"version": 2},
    "a version that is a list": {"version": [1]},
    "another format": {"format": "plait-schedule"},
    "an unknown key": {"placement": []},
    "placements that are a map": {"placements": {}},
    "a placement that is a number": {"placements": [3]},
    "policies that are numbers": {"policies": [3]},
    "policies without settings": {"policies": [{"name": "a"}]},
    "policies with a list": {"policies": [{"name": "a", "settings": [1]}]},
    "schedules that are numbers": {"schedules": [3]},
    "a schedule that is empty": {"schedules": [{}]},
    "a prediction that is a number": {"predicted": 3},
    "a prediction that is a list": {"predicted": [3]},
    "a prediction that is empty": {"predicted": {}},
    "many placements": {"placements": [PLAN["placements"][0]] * 20_000},
}
OF_PLACEMENTS: dict[str, dict[str, Any]] = {
    **{
        f"{key} {what}": {key: value}
        for key in ("dp", "tp", "pp", "micro_batch_tokens")
        for what, value in NUMBERS.items()
    },
    "no ranks": {"ranks": []},
    "ranks a number": {"ranks": 0},
    "ranks of texts": {"ranks": ["0", "1"]},
    "ranks of booleans": {"ranks": [False, True]},
    "ranks twice": {"ranks": [0, 0]},
    "ranks beyond": {"ranks": [0, LARGE]},
    "many ranks": {"ranks": list(range(100_000)), "dp": 100_000},
    "a mode that is none": {"mode": "sleep"},
    "a mode that is a number": {"mode": 3},
    "a call that is none": {"call": "nobody.train"},
    "a call that is a number": {"call": 3},
    "after that is none": {"after": "throw away"},
    "stages that are a text": {"stages": "ab"},
    "stages of nothing": {"stages": [0, 0], "pp": 2, "dp": 1},
    "stages beyond": {"stages": [LARGE, 1], "pp": 2, "dp": 1},
    "a schedule that is none": {"schedule": "nonsense", "pp": 2, "dp": 1},
    "an unknown key": {"rank": [0]},
}

SPANS = {
    "action": "0F0",
    "kind": "F",
    "rank": 0,
    "start_s": 0.0,
    "end_s": 1.0,
    "bytes": 0,
    "tokens": 0,
    "lane": "compute",
    "role": "",
    "step": 1,
}
OF_SPANS: dict[str, dict[str, Any]] = {
    f"{key} {what}": {key: value}
    for key, kind in (
        ("action", str),
        ("kind", str),
        ("rank", int),
        ("start_s", float),
        ("end_s", float),
        ("bytes", int),
        ("tokens", int),
        ("lane", str),
        ("role", str),
        ("step", int),
    )
    for what, value in {
        "a list": [1],
        "a map": {"a": 1},
        **({"a number": 3} if kind is str else {"a text": "abc", "true": True, "beyond": 10**300}),
    }.items()
}

SCHEDULES: dict[str, list[str]] = {
    "no stages": ["--stages", "0", "--microbatches", "4"],
    "stages below": ["--stages=-2", "--microbatches", "4"],
    "a hundred thousand stages": ["--stages", "100000", "--microbatches", "4"],
    "stages without end": ["--stages", str(LARGE), "--microbatches", "4"],
    "stages of thousands of digits": ["--stages", "9" * 5000, "--microbatches", "4"],
    "micro-batches without end": ["--stages", "4", "--microbatches", str(LARGE)],
    "many micro-batches": ["--stages", "4", "--microbatches", "100000"],
    "many copies": ["--stages", "512,1", "--microbatches", "4,4000"],
    "stages that are a text": ["--stages", "four", "--microbatches", "4"],
    "half a stage": ["--stages", "2.5", "--microbatches", "4"],
    "stages of nothing": ["--stages", "", "--microbatches", "4"],
    "three models": ["--stages", "2,2,2", "--microbatches", "4,4,4"],
    "stages that do not divide": ["--stages", "3,2", "--microbatches", "4,4"],
    "counts that differ": ["--stages", "2,2", "--microbatches", "4"],
    "a time that is no number": ["--stages", "2", "--microbatches", "4", "--forward", "fast"],
    "a time of NaN": ["--stages", "2", "--microbatches", "4", "--forward", "nan"],
    "a time without end": ["--stages", "2", "--microbatches", "4", "--forward", "inf"],
    "a time below": ["--stages", "2", "--microbatches", "4", "--forward=-1"],
    "a time too large": ["--stages", "2", "--microbatches", "4", "--forward", "1e300"],
    "times for other stages": ["--stages", "2", "--microbatches", "4", "--forward", "1:2:3"],
    "a cap of NaN": ["--stages", "2", "--microbatches", "4", "--cap", "nan"],
    "a cap of nothing": ["--stages", "2", "--microbatches", "4", "--cap", "0"],
    "caps for other ranks": ["--stages", "2", "--microbatches", "4", "--cap", "1:2:3"],
    "seconds of NaN": ["--stages", "2", "--microbatches", "4", "--seconds", "nan"],
    "seconds without end": ["--stages", "2", "--microbatches", "4", "--seconds", "inf"],
    "seconds below": ["--stages", "2", "--microbatches", "4", "--seconds=-1"],
    "seconds for ever": ["--stages", "2", "--microbatches", "4", "--seconds", "1e18"],
    "a seed of thousands of digits": ["--stages", "2", "--microbatches", "4", "--seed", "9" * 5000],
    "names that are the same": ["--stages", "2,2", "--microbatches", "4,4", "--models", "a,a"],
    "names that are none": ["--stages", "2", "--microbatches", "4", "--models", "1"],
    "no folder": ["--stages", "2", "--microbatches", "4", "--out", "/nowhere/at/all.json"],
}


def cases() -> Iterator[Case]:
    for what, content in BROKEN.items():
        yield Case(f"plan: {what}", refused(), _plan_text(content))
        yield Case(f"trace show: {what}", refused(), _trace("show", content))
        yield Case(f"trace diff: {what}", refused(), _trace("diff", content))
    for what, change in OF_PLANS.items():
        yield Case(f"plan: {what}", refused(), _plan_text(json.dumps(PLAN | change)))
    for what, change in OF_PLACEMENTS.items():
        plan = PLAN | {"placements": [PLAN["placements"][0] | change]}
        yield Case(f"placement: {what}", refused(), _plan_text(json.dumps(plan)))
    for word in (
        "3",
        "F0",
        "0F" + "9" * 5000,
        "0F0{0-999999999999}",
        "0F0{9-0-}",
        "a" * 5000,
        "0X0",
        "",
        "0F0<0F0",
        "0F0#-1",
    ):
        plan = PLAN | {"schedules": [{"format": "plait-schedule", "version": 1, "name": "s", "rows": [[word]]}]}
        expected = ANSWERED if word == "0F0<0F0" else refused()
        yield Case(f"plan: a schedule with {word[:24]!r}", expected, _plan_text(json.dumps(plan)))
    for what, change in OF_SPANS.items():
        # A span whose bytes are beyond what a device has says nothing wrong of itself.
        yield Case(f"timeline: {what}", refused(), _trace("show", _timeline(change)))
        yield Case(f"Chrome trace: {what}", ANSWERED, _trace("show", _chrome(change)))
    for what, text in {
        "events that are numbers": "[1, 2]",
        "events without names": '[{"ph": "X"}]',
        "events of texts": '[{"name": "a", "ph": "X", "ts": "b", "dur": "c", "pid": 0, "tid": 0, "cat": ""}]',
        "lanes without arguments": '[{"name": "thread_name", "ph": "M", "pid": 0, "tid": 0}]',
        "lanes that are lists": '[{"name": "thread_name", "ph": "M", "pid": [0], "tid": {}, "args": {"name": "a"}}]',
    }.items():
        yield Case(f"Chrome trace: {what}", refused(), _trace("show", text))
    for what, argv in SCHEDULES.items():
        yield Case(
            f"schedule: {what}",
            refused("--"),
            lambda place, argv=argv: ["schedule", *argv],
            always=what in ("a hundred thousand stages", "many micro-batches"),
        )
    for seed in range(60):
        yield Case(f"plan: bytes changed, {seed}", ANSWERED, _plan_text(_noise(json.dumps(PLAN), seed)))
        yield Case(f"timeline: bytes changed, {seed}", ANSWERED, _trace("show", _noise(_timeline({}), seed)))
    yield from _accepted()


def _plan_text(content: str | bytes) -> Callable[[Place], list[str]]:
    return lambda place: place.recipe(plan=Path(place.file("plan.json", content)), prompts_per_step=2)


def _trace(command: str, content: str | bytes) -> Callable[[Place], list[str]]:
    def argv(place: Place) -> list[str]:
        path = place.file("timeline.json", content)
        return ["trace", command, path, *([place.file("other.json", _timeline({}))] if command == "diff" else [])]

    return argv


def _timeline(change: dict[str, Any]) -> str:
    span = SPANS | change
    return json.dumps(
        {
            "format": "plait-timeline",
            "version": 1,
            "source": "measured",
            "span_fields": list(span),
            "memory_fields": ["rank", "time_s", "held"],
            "spans": [list(span.values())],
            "memory": [[0, 0.0, 1.0]],
        }
    )


def _chrome(change: dict[str, Any]) -> str:
    span = SPANS | change
    lane = {"name": "thread_name", "ph": "M", "pid": span["rank"], "tid": 1, "args": {"name": span["lane"]}}
    event = {
        "name": span["action"],
        "cat": span["kind"],
        "ph": "X",
        "ts": span["start_s"],
        "dur": 1,
        "pid": span["rank"],
        "tid": 1,
        "args": {"step": span["step"], "bytes": span["bytes"], "tokens": span["tokens"], "role": span["role"]},
    }
    return json.dumps([lane, event])


def _noise(text: str, seed: int) -> bytes:
    draw, changed = random.Random(seed), bytearray(text.encode())
    for _ in range(draw.choice((1, 2, 6))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def _accepted() -> Iterator[Case]:
    yield Case("a plan", ACCEPTED, _plan_text(json.dumps(PLAN)), always=True)
    yield Case("a plan, for one epoch of more", ACCEPTED, _plan_text(json.dumps(PLAN, indent=2)))
    yield Case("a timeline", ACCEPTED, _trace("show", _timeline({})), always=True)
    yield Case("a timeline against itself", ACCEPTED, _trace("diff", _timeline({})))
    yield Case("a Chrome trace", ACCEPTED, _trace("show", _chrome({})), always=True)
    yield Case(
        "a schedule",
        ACCEPTED,
        lambda place: ["schedule", "--stages", "2,2", "--microbatches", "4,4", "--engine", "greedy"],
        compiles=True,
    )
    yield Case(
        "a schedule of 32 stages by rule",
        ACCEPTED,
        lambda place: ["schedule", "--stages", "32", "--microbatches", "64", "--engine", "1f1b"],
        compiles=True,
    )
