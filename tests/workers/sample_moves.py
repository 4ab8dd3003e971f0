"""Runs in worker processes: samples that begin in one instance and go on in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from plait.generation.engine import Engine, drain
from plait.generation.moves import SampleMoves
from plait.generation.request import Request
from plait.generation.settings import SamplingSettings
from plait.generation.speculator import Speculator
from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.models.backbone_model import copy_of
from plait.models.compute.float64 import kept_float64
from plait.models.parallel.partial import part_of
from plait.policy.step import Key
from plait.schedule.update_rule import HeldKV
from plait.schedule.work import to_the_end
from plait.workers.gathering import Gathering, Left, MoveWord, Stage
from plait.workers.gathering import Said as SaidOfPairs
from plait.workers.instances import engine_of
from plait.workers.messages import Message
from plait.workers.migrations import SampleMoverOfRank
from plait.workers.sample_mover import End, SampleMover, SamplesMoved, _speaker
from plait.workers.sample_offers import Answer, Given, Lack
from tests.generation.requests import request
from tests.generation.scripted_drafter import ScriptedDrafter, misleading
from tests.models.tiny import tiny_model
from tests.reallocation.worker import differing
from tests.workers.said import Said, said_by

BUCKET_BYTES = 4096
"""Short messages, so that one move has many."""
_models: dict[Any, Any] = {}


@dataclass
class Seen:
    """What one rank has seen."""

    said: Said
    """By samples that ended in its engines; of an instance, every rank says the same."""
    moves: list[SamplesMoved] = field(default_factory=list)
    lacks: list[tuple[Lack, ...]] = field(default_factory=list)
    """What travelled, of what went ahead and of moves, in turn."""
    num_held: list[int] = field(default_factory=list)
    """Blocks that somebody holds in the target's pool: before samples come, after, and in the end."""
    num_prefilled: int = 0
    """Tokens that the target computed of what it was given in its first step."""
    wrong: list[str] = field(default_factory=list)
    left: list[Key] = field(default_factory=list)
    """Samples that have left this rank's instance by drawn moves."""
    owned: list[frozenset[Key]] = field(default_factory=list)
    """Samples that have started or ended in this rank's instance, after each of those."""
    learned: list[Any] = field(default_factory=list)
    """Trials and hits of drafts: in the source before samples leave, in the target when they are there."""
    drafted: list[int] = field(default_factory=list)
    """Drafts that this rank's engine has computed."""


def layout_of(ranks: Sequence[int], tp: int = 1, pp: int = 1, stages: tuple[int, ...] = ()) -> Layout:
    return Layout(Mesh(tuple(ranks)), Parallelism(1, tp, pp, stages))


def make_engine(worker: Any, layout: Layout, family: str, dtype: str, settings: SamplingSettings) -> Engine | None:
    """This rank's, in an instance; None if it is no member."""
    team = worker.team_of(layout)
    if team is None:
        return None
    if (layout, family, dtype) not in _models:
        whole = tiny_model(family, dtype=getattr(torch, dtype))
        _models[layout, family, dtype] = part_of(copy_of(whole), team)
    return engine_of(_models[layout, family, dtype], settings, team)


def mover_of(
    worker: Any, source: Layout, target: Layout, leaving: Engine | None, entering: Engine | None, kv: HeldKV = "keep"
) -> Any:
    world = Layout.on(range(worker.context.num_ranks), dp=worker.context.num_ranks)
    peers = worker.team_of(world).all
    if worker.rank not in (*source.mesh.ranks, *target.mesh.ranks):
        return None
    return SampleMover(peers, End(source, leaving), End(target, entering), kv=kv, bucket_bytes=BUCKET_BYTES)


def ahead(
    seen: Seen, mover: SampleMover, between: tuple[Layout, Layout], keys: Sequence[Key], *engines: Engine | None
) -> None:
    """The bulk goes ahead; meanwhile the engines make two steps. What instances tell each other passes by rank 0 in a
    run; here they tell it themselves."""
    source, target = between
    is_source, is_target = (mover.rank in one.mesh.ranks for one in between)
    prompts = [one.prompt for one in ASKED if one.prompt.uid in {uid for uid, _ in keys}]
    if is_target:
        answer = mover.here(prompts)
        tell(mover, target, source, answer.to_message())
    else:
        answer = Answer.of(mover._receive(target, "an answer"))
    if is_source:
        given = mover.give(keys, answer, len(seen.moves))
        tell(mover, source, target, given.to_message())
    else:
        given = Given.of(mover._receive(source, "what is given"))
    if is_target:
        mover.take(given, len(seen.moves))
    seen.lacks.append(given.answer.lacks)
    for engine in engines:
        steps(seen, engine, 2)


def tell(mover: SampleMover, own: Layout, other: Layout, message: Message) -> None:
    if mover.rank == _speaker(own):
        mover._send([rank for rank in other.mesh.ranks if rank not in own.mesh.ranks], message, "a word")


def moved(seen: Seen, mover: SampleMover, keys: Sequence[Key], recompute: Sequence[Key] = ()) -> None:
    """Samples leave, and are there."""
    seen.moves.append(to_the_end(mover.moving(keys, recompute=recompute)))
    move = seen.moves[-1]
    seen.lacks.append(move.lacks)
    if wrong := differing(move.plan, mover.rank, move.report):
        seen.wrong.append(wrong)


def ended(seen: Seen, *engines: Engine | None) -> Seen:
    """All work done; nothing may be left in a pool."""
    for engine in engines:
        if engine is None:
            continue
        seen.said |= said_by(list(drain(engine)))
        if engine.occupancy.kv_bytes or engine.state.scheduler.blocks.num_held:
            seen.wrong.append(
                f"{engine.occupancy.kv_bytes} bytes, {engine.state.scheduler.blocks.num_held} blocks are left"
            )
    return seen


def steps(seen: Seen, engine: Engine | None, count: int) -> None:
    for _ in range(count):
        if engine is not None:
            seen.said |= said_by(engine.step())


ASKED = (request(0, 19, [9, 5, 8]), request(1, 7, [10]), request(2, 40, [7, 8]))
KEYS = ((0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1))
STAY = request(9, 33, [12])
"""Keeps the source busy."""
OTHER = request(8, 11, [14])
"""Keeps the target busy."""


def alone(family: str, dtype: str, exact: bool = False, asked: Sequence[Request] = (*ASKED, STAY, OTHER)) -> Said:
    """What all of them say in one engine that nobody disturbs."""
    model = tiny_model(family, dtype=getattr(torch, dtype))
    engine = Engine(model, SamplingSettings(exact=exact))
    with kept_float64(model.dtype):
        for one in asked:
            engine.add(one)
        return said_by(list(drain(engine)))


def one_to_one(worker: Any, family: str, dtype: str, exact: bool) -> Seen:
    """From rank 0 to rank 1, with other samples at work on both. Sample 0.1 ends between the stages."""
    seen, settings = Seen({}), SamplingSettings(exact=exact)
    source, target = layout_of([0]), layout_of([1])
    leaving, entering = (make_engine(worker, one, family, dtype, settings) for one in (source, target))
    mover = mover_of(worker, source, target, leaving, entering)
    if leaving is not None:
        for one in (STAY, *ASKED):
            leaving.add(one)
            steps(seen, leaving, 1)
    if entering is not None:
        entering.add(OTHER)
        entering.step()
        seen.num_held.append(entering.state.scheduler.blocks.num_held)
    ahead(seen, mover, (source, target), KEYS, leaving)
    moved(seen, mover, KEYS)
    if entering is not None:
        seen.num_held.append(entering.state.scheduler.blocks.num_held)
        entering.step()
        assert entering.last_step is not None
        seen.num_prefilled = entering.last_step.num_prefill_tokens
    return ended(seen, leaving, entering)


LONGER = (request(0, 19, [44, 40, 42]), request(1, 7, [46]), request(2, 40, [41, 45]))
"""The prompts of ASKED, whose samples do not end while they move."""


def drafting(worker: Any, dtype: str, stages: int, drafter: str | None = None) -> Seen:
    """From rank 0 to rank 1, while both draft what they were told before: every draft of LONGER is accepted.

    Args:
        drafter: of MISLEADING, which drafts in place of that.
    """
    seen, settings = Seen({}), SamplingSettings(exact=True, speculation=3)
    source, target = layout_of([0]), layout_of([1])
    leaving, entering = (make_engine(worker, one, "llama", dtype, settings) for one in (source, target))
    mover = mover_of(worker, source, target, leaving, entering)
    known = alone("llama", dtype, exact=True, asked=LONGER)
    for engine, others in ((leaving, STAY), (entering, OTHER)):
        if engine is not None:
            if drafter is not None:
                texts = [token_ids for token_ids, _ in known.values()]
                engine.speculates = Speculator(3, ScriptedDrafter(misleading(drafter, texts)))
            engine.add(others)
            for one in LONGER:
                for index in range(one.num_samples):
                    engine.speculates.recall(one.prompt.token_ids, *known[one.prompt.uid, index])
            steps(seen, engine, 1)
    if leaving is not None:
        for one in LONGER:
            leaving.add(one)
        steps(seen, leaving, 4)
    if stages == 2:
        ahead(seen, mover, (source, target), KEYS, leaving)
    if leaving is not None:
        leaving.land()
        seen.learned.append(leaving.speculates.learned())
    moved(seen, mover, KEYS)
    if entering is not None:
        seen.learned.append(entering.speculates.learned())
        steps(seen, entering, 2)
    seen.drafted = [int(engine.speculates.counts.drafted) for engine in (leaving, entering) if engine is not None]
    return ended(seen, leaving, entering)


def in_turn(worker: Any, case: str) -> Seen:
    """Samples of one prompt of 40 tokens, one behind the other, and what happens on the way."""
    seen, source, target = Seen({}), layout_of([0]), layout_of([1])
    leaving, entering = (make_engine(worker, one, "llama", "float32", SamplingSettings()) for one in (source, target))
    kv = "recompute" if case == "other weights" else "keep"
    mover = mover_of(worker, source, target, leaving, entering, kv)
    if leaving is not None:
        leaving.add(ASKED[2])
        steps(seen, leaving, 2)
    if entering is not None and case.startswith("other weights"):
        entering.update_weights(1)
    moved(seen, mover, [(2, 0)])
    steps(seen, entering, 1)
    ahead(seen, mover, (source, target), [(2, 1)])
    steps(seen, leaving, 1)
    if entering is not None and case == "the other has ended":
        entering.abort(2, 0)
    if leaving is not None and case == "computed again":
        leaving.update_weights(leaving.policy_version)
        steps(seen, leaving, 1)
    moved(seen, mover, [] if case == "given up" else [(2, 1)], [(2, 1)] if case == "recompute" else [])
    if entering is not None:
        seen.num_held.append(entering.state.scheduler.blocks.num_held)
    return ended(seen, leaving, entering)


def between(worker: Any, before: Any, after: Any, family: str) -> Seen | None:
    """From one instance to another, in float64; ranks of larger ones step together."""
    seen, settings = Seen({}), SamplingSettings(max_prefill_tokens=30)
    source, target = layout_of(**before), layout_of(**after)
    leaving, entering = (make_engine(worker, one, family, "float64", settings) for one in (source, target))
    mover = mover_of(worker, source, target, leaving, entering)
    if mover is None:
        return None
    with kept_float64(torch.float64):
        return gone_over(seen, mover, (source, target), leaving, entering)


def gone_over(
    seen: Seen,
    mover: SampleMover,
    between: tuple[Layout, Layout],
    leaving: Engine | None,
    entering: Engine | None,
) -> Seen:
    if leaving is not None:
        for one in (STAY, *ASKED):
            leaving.add(one)
        steps(seen, leaving, 4)
    if entering is not None:
        entering.add(OTHER)
    steps(seen, entering, 2)
    ahead(seen, mover, between, KEYS)
    steps(seen, leaving, 2)
    steps(seen, entering, 1)
    moved(seen, mover, [key for key in KEYS if key not in seen.said])
    steps(seen, entering, 1)
    if entering is not None and entering.last_step is not None:
        seen.num_prefilled = entering.last_step.num_prefill_tokens
    return ended(seen, leaving, entering)


@dataclass(frozen=True)
class DrawnMove:
    """Some samples of all other instances go to those that are kept.

    recompute: of the keys, those that are computed again there
    ahead:     the bulk of the others' goes ahead; those in `stays` are given up before the rest goes
    steps:     of each instance, before each of the four stages
    """

    kept: tuple[int, ...]
    keys: frozenset[Key]
    recompute: frozenset[Key]
    ahead: bool
    stays: frozenset[Key]
    steps: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DrawnRollout:
    """asked: uid → tokens of the prompt, lengths of its samples, the instance where they begin
    pool: keys and values of each instance, in tokens; None: as many as there are"""

    asked: tuple[tuple[int, tuple[int, ...], int], ...]
    moves: tuple[DrawnMove, ...]
    pool: int | None

    @property
    def requests(self) -> list[Request]:
        return [request(uid, size, lengths) for uid, (size, lengths, _) in enumerate(self.asked)]


def drawn(worker: Any, places: Sequence[Any], rollout: DrawnRollout) -> Seen:
    """Instances that generate in float64, and samples that move between them. Every rank knows all moves, so that what
    instances tell the leader passes between them here."""
    instances = [layout_of(**place) for place in places]
    settings = SamplingSettings(max_running=4, max_prefill_tokens=25, kv_tokens=rollout.pool)
    engines = [make_engine(worker, one, "llama", "float64", settings) for one in instances]
    [engine] = [one for one in engines if one is not None]
    world = Layout.on(range(worker.context.num_ranks), dp=worker.context.num_ranks)
    mover, seen = SampleMoverOfRank(instances, engine, worker.team_of(world).all), Seen({})
    with kept_float64(torch.float64):
        for one, (_, _, place) in zip(rollout.requests, rollout.asked, strict=True):
            if place == mover.place:
                engine.add(one)
        for number, move in enumerate(rollout.moves):
            play(seen, mover, engine, gatherings(rollout, move, number, len(instances)), move.steps)
            seen.owned.append(frozenset((*SampleMoves(engine.state).started, *seen.said)))
        return ended(seen, engine)


def gatherings(rollout: DrawnRollout, move: DrawnMove, number: int, num_instances: int) -> list[Gathering]:
    """The stages of a move. Samples never come back to where they began, where others of their prompt may be to begin
    with: nobody asks for that."""
    sources = [place for place in range(num_instances) if place not in move.kept]
    to = {(uid, index): move.kept[(uid + index) % len(move.kept)] for uid, index in sorted(move.keys)}
    keys = {key: target for key, target in to.items() if rollout.asked[key[0]][2] != target}
    pairs = {
        (source, target): [key for key in keys if keys[key] == target]
        for source in sources
        for target in sorted({*keys.values()})
    }
    prompts = [one.prompt for one in rollout.requests if one.prompt.uid in {uid for uid, _ in keys}]
    every = Gathering(pairs, {one.uid: 0 for one in prompts}, move.recompute, Stage.HERE, number, prompts)
    stays = move.stays if move.ahead else frozenset()
    rest = {pair: [key for key in of_pair if key not in stays] for pair, of_pair in pairs.items()}
    ahead = [replace(every, stage=stage) for stage in (Stage.HERE, Stage.GIVE, Stage.TAKE)] if move.ahead else []
    return [*ahead, replace(every, stage=Stage.REST, pairs=rest)]


def play(
    seen: Seen, mover: SampleMoverOfRank, engine: Engine, stages: Sequence[Gathering], counts: Sequence[Sequence[int]]
) -> None:
    heard: dict[tuple[int, int], Message] = {}
    for stage, of_instances in zip(stages, counts[-len(stages) :], strict=True):
        for _ in range(of_instances[mover.place]):
            if engine.has_work:
                again = said_by(engine.step())
                seen.wrong += [f"{key} ended twice" for key in again.keys() & seen.said.keys()]
                seen.said |= again
        answer = mover.do(replace(stage, said=heard))
        if answer is not None and stage.stage is Stage.REST:
            assert isinstance(answer, Left), f"a source says {answer}"
            seen.left += answer.keys
        heard = told(answer) if stage.stage in (Stage.HERE, Stage.GIVE) else {}


def told(answer: MoveWord | None) -> dict[tuple[int, int], Message]:
    """What all instances say of a stage, all ranks of one the same."""
    answers: list[MoveWord | None] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return {pair: word for said in answers if isinstance(said, SaidOfPairs) for pair, word in said.of_pairs.items()}
