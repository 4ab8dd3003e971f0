"""Parts that leave their devices between calls: what is there when, in runs of one process and of several."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.reallocation.offload import HostMemory
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.controller import run_step
from plait.runtime.folder.claim import claim
from plait.runtime.prepare import prepare
from plait.runtime.process import set_up
from plait.runtime.processes.alone import Alone
from plait.runtime.session import Session
from plait.schedule.timeline import load_any
from plait.workers.offload_manager import OffloadManager, OffloadUnit
from plait.workers.recorder import Recorder
from tests.runs.plans import assert_equal_runs, planned

MakeRecipe = Callable[..., Recipe]
FLOW = """
import gc
import os

import torch.distributed as dist

from plait.dataflow import per_group
from plait.workers.offload_manager import OffloadManager


def flow(prompts, actor, ref, reward):
    samples = actor.generate(prompts)
    teacher = ref.generate(prompts, samples_per_prompt=2)
    scores, others = reward.score(samples), reward.score(teacher)
    advantages = per_group(above, scores, name="advantages")
    logprobs = ref.logprobs(samples)
    ref.logprobs(teacher)
    actor.train(samples, loss=pushed, advantages=advantages, ref_logprobs=logprobs)


def above(scores):
    return scores - scores.mean()


def pushed(batch, advantages, ref_logprobs):
    if "SEEN" in os.environ:
        for one in gc.get_objects():
            if isinstance(one, OffloadManager) and one.units:
                there = {f"{u.role} {name}" for u in one.units if not u.memory.is_away for name in u.memory.names}
                away = {f"{u.role} {name}" for u in one.units if u.memory.device_bytes == 0 for name in u.memory.names}
                with open(f"{os.environ['SEEN']}-{dist.get_rank()}", "a") as file:
                    file.write(f"{sorted(there)} {sorted(away)}\\n")
    return batch.aggregate(-advantages * batch.logprobs + 0.1 * (batch.logprobs - ref_logprobs) ** 2, "token-mean")
"""
TWO_DEVICES = {
    "actor.generate": "0,1 dp2 after=drop",
    "actor.train": "0,1 tp2 after=offload",
    "ref.generate": "1 after=drop",
    "ref.logprobs": "0,1 pp2 after=offload",
}
ALL_LEAVE = {
    "actor.generate": "0 after=offload",
    "actor.train": "0 after=offload",
    "ref.logprobs": "0 after=offload",
}
STATE_LEAVES = {"actor.train": "0 after=offload", "ref.logprobs": "0 after=offload"}
PARAMETERS = 25_760


def unit(role: str, size: int, after: Any = "offload") -> tuple[OffloadUnit, torch.Tensor]:
    weights = torch.arange(float(size))
    return OffloadUnit(HostMemory({"weights": weights}, name=role), after, role), weights


def on_device(manager: OffloadManager) -> int:
    """Bytes that its buffers take up there now."""
    return sum(unit.memory.device_bytes for unit in manager.units)


def on_host(manager: OffloadManager, *buffers: torch.Tensor) -> int:
    """Bytes of the copies there of those that are away."""
    values = [manager.now(buffer) for buffer in buffers]
    return sum(now.nbytes for buffer, now in zip(buffers, values, strict=True) if now is not None and now is not buffer)


def test_room_is_made_before_what_is_needed_comes_back() -> None:
    (actor, own), (ref, ref_weights), (copy, copied) = unit("actor", 10), unit("ref", 20), unit("actor", 30, "drop")
    buffers = own, ref_weights, copied
    home = OffloadManager({("actor", "train"): [actor], ("ref", "score"): [ref], ("actor", "decode"): [copy]})
    home.recorder = Recorder()
    assert on_device(home) == 240
    home.want(("actor", "train"))
    assert (on_device(home), on_host(home, *buffers)) == (40, 80), "what is dropped leaves no copy"
    assert home.now(copied) is None
    found = home.now(ref_weights)
    assert found is not None
    assert found.tolist() == list(range(20))
    home.want(("ref", "score"))
    assert (on_device(home), on_host(home, *buffers)) == (80, 40)
    home.want(("actor", "train"), filled=[copy])
    copied.copy_(torch.arange(30.0))
    assert on_device(home) == 160
    home.want(("actor", "decode"))
    assert (on_device(home), copied.sum()) == (120, 435)
    home.want()
    assert (on_device(home), on_host(home, *buffers)) == (0, 120)
    kinds = [(span.action, span.kind, span.role, span.bytes) for span in home.recorder.take().spans]
    assert kinds[:3] == [
        ("ref.offload/weights/0", "OFFLOAD", "ref", 80),
        ("actor.offload/weights/0", "OFFLOAD", "actor", 40),
        ("ref.onload/weights/0", "ONLOAD", "ref", 80),
    ]
    with home.holding(("actor", "train"), ("ref", "score")) as are_there:
        home.want()
        assert (are_there, on_device(home)) == (True, 120)
    home.want()
    with home.holding(("actor", "train"), ("actor", "decode")) as are_there:
        assert (are_there, on_device(home)) == (False, 0), "one was dropped"
    with pytest.raises(AssertionError, match="actor: what was dropped has to be moved anew"):
        home.want(("actor", "decode"))


@pytest.fixture
def recipe_of(make_recipe: MakeRecipe, tmp_path: Path) -> MakeRecipe:
    return functools.partial(planned, make_recipe, tmp_path)


def test_between_its_calls_a_part_has_no_memory(recipe_of: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes on the device at the end of every action of a step: float64, where the masters are the weights."""
    recipe = recipe_of("seen", ALL_LEAVE)
    set_up(1)
    seen: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
    with (
        claim(recipe, resume=False) as directory,
        Session(prepared := prepare(recipe), directory, resume=False, leading=Alone(prepared)) as session,
    ):
        assert session.workers is not None
        offloads = session.workers.rank_state.offloads
        actor, state, ref = [
            next(u.memory for u in offloads.units if is_it(u))
            for is_it in (
                lambda u: u.role == "actor" and "weights" in u.memory.names,
                lambda u: u.role == "actor" and "exp_avg" in u.memory.names,
                lambda u: u.role == "ref",
            )
        ]
        assert on_device(offloads) == 0, "nothing is asked yet"
        advance = session.recorder.advance

        def watched(work: Any, role: str = "") -> Any:
            done = advance(work, role)
            if done is not None and done.action and done.kind not in ("OFFLOAD", "ONLOAD"):
                now = (actor.device_bytes, state.device_bytes, ref.device_bytes)
                seen[done.action.split("/")[0]].add(now)
            return done

        monkeypatch.setattr(session.recorder, "advance", watched)
        run_step(session)
        assert on_device(offloads) == 0
    weights = 8 * PARAMETERS
    assert seen["actor.generate"] == {(weights, 0, 0)}
    assert seen["ref.logprobs"] == {(0, 0, weights)}
    assert seen["actor.train"] == {(weights, 3 * weights, 0)}, "with two moments and gradients"
    spans = load_any(recipe.run_dir / "trace.json").spans
    moved = {(s.action.rsplit("/", 1)[0], s.kind, s.bytes) for s in spans if s.kind in ("OFFLOAD", "ONLOAD")}
    assert moved == {
        (f"{role}.{what}/{name}", what.upper(), weights)
        for role, name in (("actor", "weights"), ("actor", "exp_avg"), ("actor", "exp_avg_sq"), ("ref", "weights"))
        for what in ("offload", "onload")
        if (role, what) != ("ref", "offload")  # it does not change: what was read is in host memory since
    }


@pytest.mark.parametrize("plan", [ALL_LEAVE, pytest.param(STATE_LEAVES, marks=pytest.mark.slow)], ids=["all", "state"])
def test_results_are_those_of_a_run_that_keeps_all(recipe_of: MakeRecipe, tmp_path: Path, plan: dict[str, str]) -> None:
    """With evaluations, checkpoints, a resumption under either; and micro-batches that the plan sets."""
    keys = {"evaluation.items": 2, "evaluation.every": 1, "checkpoint.every": 1}
    run(recipe_of("kept", steps=3, **keys))
    run(recipe_of("left", plan | {"actor.train": "0 after=offload micro_batch_tokens=64"}, steps=1, **keys))
    run(recipe_of("left", None, steps=2, **keys), resume=True)
    run(recipe_of("left", plan, steps=3, **keys), resume=True)
    assert_equal_runs(tmp_path / "left", tmp_path / "kept")


@pytest.mark.slow
def test_adapters_leave_with_the_weights_under_them(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    keys = {"steps": 3, "lora.rank": 2}
    runs = recipe_of("kept", **keys), recipe_of("left", ALL_LEAVE, **keys)
    for recipe in runs:
        run(recipe)
    kept, left = ([json.loads(row) for row in (r.run_dir / "metrics.jsonl").open()] for r in runs)
    for one, other in zip(kept, left, strict=True):
        assert one["actor/loss"] == pytest.approx(other["actor/loss"], abs=1e-9)
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], abs=1e-9)
    spans = load_any(tmp_path / "left" / "trace.json").spans
    assert {s.action.rsplit("/", 1)[0] for s in spans if s.kind == "ONLOAD"} >= {
        "actor.onload/weights",
        "actor.onload/adapter",
        "actor.onload/exp_avg",
    }


@pytest.fixture
def own_flow(tmp_path: Path) -> dict[str, Any]:
    """Keys of a recipe: a reference that samples and scores, in parts of its own each."""
    (tmp_path / "flow.py").write_text(FLOW)
    (tmp_path / "lengths.py").write_text(
        "def lengths(completions, **columns):\n    return [len(text) + text.count('7') for text in completions]\n"
    )
    function = f"{tmp_path}/lengths.py:lengths"
    return {"algorithm": f"{tmp_path}/flow.py:flow", "options": {}, "reward.functions": [function]}


@pytest.mark.slow
def test_workers_drop_and_offload(
    recipe_of: MakeRecipe, own_flow: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes: while the actor trains, nothing else is there; copies of the frozen role come back, too."""
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    run(recipe_of("two", TWO_DEVICES, **own_flow, **{"doctor.enabled": False}))  # which calls the loss once more
    for rank in (0, 1):
        lines = set((tmp_path / f"seen-{rank}").read_text().splitlines())
        there = ["actor exp_avg", "actor exp_avg_sq", "actor gradients", "actor weights"]
        away = ["actor copy", *(["ref copy"] if rank == 1 else []), "ref weights"]
        assert lines == {f"{there} {away}"}
    spans = load_any(tmp_path / "two" / "trace.json").spans
    moved = [s for s in spans if s.action.startswith("actor.weights/") and s.step == 2]
    assert sum(s.bytes for s in moved if s.kind == "RECV") > 0
    # What was dropped comes from the two halves, and the reference's copy on rank 1 from its two stages.
    received = sum(s.bytes for s in spans if s.action.startswith("ref.weights/") and s.kind in ("RECV", "COPY"))
    assert received == 2 * 8 * PARAMETERS
    monkeypatch.delenv("SEEN")
    run(recipe_of("one", **own_flow))
    assert_equal_runs(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_a_checkpoint_of_parts_that_leave_is_resumed_under_any_plan(
    recipe_of: MakeRecipe, own_flow: dict[str, Any], tmp_path: Path
) -> None:
    stay = {call: place.partition(" after")[0] for call, place in TWO_DEVICES.items()}
    keys = own_flow | {"checkpoint.every": 1, "evaluation.items": 2, "evaluation.every": 1}
    run(recipe_of("one", steps=5, **keys))
    for steps, plan in ((1, TWO_DEVICES), (2, stay), (3, TWO_DEVICES), (4, ALL_LEAVE), (5, TWO_DEVICES)):
        run(recipe_of("two", plan, steps=steps, **keys), resume=steps > 1)
    assert_equal_runs(tmp_path / "two", tmp_path / "one")
