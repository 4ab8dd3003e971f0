"""Runs in worker processes: an instance of several stages generates, with steps in flight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from plait.data.records import Sample
from plait.generation import engine as engine_of_a_rank
from plait.generation import forward
from plait.generation.engine import Engine, drain
from plait.generation.request import GoingOn, Request
from plait.generation.settings import SamplingSettings
from plait.generation.speculator import Speculator
from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.models.backbone_model import copy_of
from plait.models.lora import add_lora
from plait.models.lora_settings import LoraSettings
from plait.models.parallel.partial import part_of
from plait.workers.call_messages import Delivered, Generate
from plait.workers.instances import engine_of
from plait.workers.lockstep_engine import LockstepEngine
from tests.generation.scripted_drafter import ScriptedDrafter, misleading
from tests.models.tiny import tiny_model
from tests.workers.said import Said, said_by

LAYERS = 4
_models: dict[Any, Any] = {}


def whole_model(dtype: str = "float64", kinds: str = "") -> Any:
    """
    Args:
        kinds: of its layers: S keeps a state, A attends; empty: a llama.
    """
    if not kinds:
        return tiny_model(dtype=getattr(torch, dtype), num_hidden_layers=LAYERS)
    types = ["linear_attention" if kind == "S" else "full_attention" for kind in kinds]
    layers = {"num_hidden_layers": len(kinds), "layer_types": types}
    return tiny_model("qwen3_5_text", dtype=getattr(torch, dtype), **layers)


def alone(requests: Sequence[Request], dtype: str = "float64", kinds: str = "", **settings: Any) -> Said:
    """What one process says, without stages."""
    if ("alone", dtype, kinds) not in _models:
        _models["alone", dtype, kinds] = whole_model(dtype, kinds)
    engine = Engine(_models["alone", dtype, kinds], SamplingSettings(**settings))
    for one in requests:
        engine.add(one)
    return said_by(list(drain(engine)))


@dataclass
class Seen:
    """What one rank has seen."""

    said: Said = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)
    """Steps in flight, at each step."""
    rows: list[int] = field(default_factory=list)
    """Sequences that each step computed."""
    running: list[int] = field(default_factory=list)
    """Samples in the batch at each step."""
    preempted: int = 0
    drafted: int = 0
    left: int = 0
    """Blocks and bytes held in the end."""
    not_compiled: str | None = None
    was_packed: bool = False
    """Whether the module computed from packed weights."""
    use: Any = None


def engine_on(
    worker: Any, sizes: dict[str, Any], settings: dict[str, Any], timeout_s: float = 60.0, dtype: str = "float64"
) -> Any:
    """(the engine, the team) of this rank.

    Args:
        sizes: of the layout; "rank" of adapters that add nothing yet, where there are to be some; "kinds" of layers
            (`whole_model`).
    """
    count = worker.context.num_ranks
    layout = Layout(Mesh(tuple(range(count))), Parallelism(1, sizes.get("tp", 1), sizes.get("pp", 1)))
    team = worker.team_of(layout, timeout_s)
    rank, kinds = sizes.get("rank", 0), sizes.get("kinds", "")
    if (layout, dtype, rank, kinds) not in _models:
        part = part_of(copy_of(whole_model(dtype, kinds)), team)
        adapted = add_lora(part, LoraSettings(rank=rank), name="actor", seed=0) if rank else part
        _models[layout, dtype, rank, kinds] = adapted
    return engine_of(_models[layout, dtype, rank, kinds], SamplingSettings(**settings), team), team


def note(seen: Seen, engine: Engine, samples: Sequence[Sample]) -> None:
    seen.said |= said_by(samples)
    if engine.last_step is not None:
        seen.in_flight.append(engine.last_step.num_groups)
        seen.rows.append(engine.last_step.num_sequences)
        seen.running.append(engine.last_step.num_running)
        seen.preempted += engine.last_step.num_preempted


def ended(seen: Seen, engine: Engine) -> Seen:
    seen.left = engine.occupancy.kv_bytes + engine.state.scheduler.blocks.num_held
    seen.not_compiled = engine.state.forward.refusals.compiled
    if engine.speculation is not None:
        seen.drafted = int(engine.speculation.drafted)
    return seen


def all_at_once(engine: Engine, requests: Sequence[Request]) -> Seen:
    for one in requests:
        engine.add(one)
    seen = Seen()
    while engine.has_work:
        note(seen, engine, engine.step())
        seen.was_packed |= engine.state.forward.module.is_prepared
    return ended(seen, engine)


def generated(
    worker: Any,
    sizes: dict[str, Any],
    settings: dict[str, Any],
    requests: Sequence[Request],
    dtype: str = "float64",
    refused: int | None = None,
) -> Seen:
    """
    Args:
        refused: the rank that finds no faster backend than the module; None: none.
    """
    engine, _ = engine_on(worker, sizes, settings, dtype=dtype)
    kinds = () if worker.context.rank == refused else forward.BACKENDS
    with mock.patch.object(forward, "BACKENDS", kinds):
        return all_at_once(engine, requests)


def misled(
    worker: Any, sizes: dict[str, int], settings: dict[str, Any], requests: Sequence[Request], drafter: str
) -> Seen:
    """By drafts of which most are wrong: the rank that drafts tells them to the others."""
    known = [token_ids for token_ids, _ in alone(requests, exact=True).values()]
    speculator = Speculator(4, ScriptedDrafter(misleading(drafter, known)))
    with mock.patch.object(engine_of_a_rank, "speculator_of", return_value=speculator):
        engine, _ = engine_on(worker, sizes, settings | {"speculation": 4})
    return all_at_once(engine, requests)


def disturbed(worker: Any, groups: int, requests: Sequence[Request]) -> Seen:
    """Requests come while others run, one sample is taken out, and the weights are said to have changed."""
    engine, _ = engine_on(worker, {"pp": worker.context.num_ranks}, {"decode_groups": groups, "exact": True})
    seen = Seen()
    for number, one in enumerate(requests):
        engine.add(one)
        for _ in range(3):
            note(seen, engine, engine.step())
        if number == 1:
            taken = engine.abort(one.prompt.uid, 0)
            seen.said |= {(uid, -1): tokens for (uid, _), tokens in said_by(taken).items()}
        if number == 2:
            engine.update_weights(engine.policy_version)
    while engine.has_work:
        note(seen, engine, engine.step())
    return ended(seen, engine)


def back_beside(worker: Any, groups: int, stops: int, steps: int, requests: Sequence[Request]) -> Seen:
    """Samples of the first request stop after so many tokens, and come back with their keys and values when the others
    have made so many steps."""
    engine, _ = engine_on(worker, {"pp": worker.context.num_ranks}, {"decode_groups": groups, "exact": True})
    first, *others = requests
    count = range(first.num_samples)
    engine.add(replace(first, going_on=GoingOn(stops=dict.fromkeys(count, stops), parks=True)))
    stopped = tuple(drain(engine))
    seen = Seen()
    for one in others:
        engine.add(one)
    for _ in range(steps):
        note(seen, engine, engine.step())
    engine.add(replace(first, going_on=GoingOn(stopped, keeps=frozenset(count))))
    while engine.has_work:
        note(seen, engine, engine.step())
    return ended(seen, engine)


def locked(worker: Any, groups: int, requests: Sequence[Request]) -> Seen:
    """By the ranks' own loop; the first rank says what a step begins with."""
    engine, team = engine_on(worker, {"pp": worker.context.num_ranks}, {"decode_groups": groups})
    lockstep, seen = LockstepEngine(engine, team, None, None), Seen()
    coming = [
        (0, Generate("actor", "actor.generate", requests[:1], 0)),
        (1, Generate("actor", "actor.generate", requests[1:], 0)),
    ]

    def hear() -> None:
        lockstep.hear(*coming.pop(0))

    steps = 0
    while coming or not lockstep.is_empty:
        if lockstep.decides and steps in (0, 4):
            hear()
        for _, answer in lockstep.step(hear):
            assert isinstance(answer, Delivered), f"nobody moves samples, and {answer} is told"
            seen.said |= said_by(answer.samples)
        steps += 1
    seen.use = lockstep.take_use()
    return ended(seen, engine)


def stalled(worker: Any, which: int, timeout_s: float, requests: Sequence[Request]) -> Seen:
    """One stage stops in the middle of a step, for longer than others wait."""
    engine, _ = engine_on(worker, {"pp": worker.context.num_ranks}, {"decode_groups": 3}, timeout_s)
    for one in requests:
        engine.add(one)
    for _ in range(4):
        engine.step()
    if worker.rank == which:
        time.sleep(3 * timeout_s)
    while engine.has_work:
        engine.step()
    return Seen()
