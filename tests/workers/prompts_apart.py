"""Runs in worker processes: prompts that some instances compute, and others draw samples of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from plait.generation.engine import Engine
from plait.generation.settings import SamplingSettings
from plait.layout.mesh import Layout
from plait.models.compute.float64 import kept_float64
from plait.policy.step import PROMPT
from plait.workers.gathering import Gathering, Left, Stage
from plait.workers.prompt_moves import PromptMoverOfRank
from tests.generation.requests import request
from tests.workers.said import Said
from tests.workers.sample_moves import OTHER, Seen, ended, layout_of, make_engine, steps, told

ASKED = (request(0, 19, [9, 5, 8]), request(1, 7, [10]), request(2, 40, [7, 8]))
AHEAD = (Stage.HERE, Stage.GIVE, Stage.TAKE, Stage.ENTER)


@dataclass
class Followed:
    """What one rank has seen: of its engine; prompts that it computed, as it said so; commands whose prompts came;
    tokens of prompts that it computed of what it was given; bytes that came."""

    seen: Seen = field(default_factory=lambda: Seen({}))
    computed: list[int] = field(default_factory=list)
    through: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    received_bytes: int = 0

    @property
    def said(self) -> Said:
        return self.seen.said


def apart(worker: Any, draws: Sequence[Any], computes: Sequence[Any], ahead: bool) -> Followed:
    """Each instance that computes has all of ASKED as it stands behind it, in turn; so it is with those that draw."""
    instances = [layout_of(**place) for place in (*draws, *computes)]
    settings = SamplingSettings(max_running=8, max_prefill_tokens=25)
    engines = [make_engine(worker, one, "llama", "float64", settings) for one in instances]
    [engine] = [one for one in engines if one is not None]
    world = Layout.on(range(worker.context.num_ranks), dp=worker.context.num_ranks)
    if engines.index(engine) >= len(draws):
        engine.state.compute_for_others()
    mover, followed = PromptMoverOfRank(instances, engine, worker.team_of(world).all, deadline_s=60.0), Followed()
    with kept_float64(torch.float64):
        pairs = [(len(draws) + number % len(computes), number % len(draws)) for number in range(len(ASKED))]
        for one, (source, _) in zip(ASKED, pairs, strict=True):
            if mover.place == source:
                engine.add(one)
        while engine.has_work and mover.may_step:
            followed.computed += mover.due()
            engine.step()
            assert not mover.computed(), "it was known before the step"
        if mover.place == 0:
            engine.add(OTHER)
            steps(followed.seen, engine, 1)
        for number, (one, pair) in enumerate(zip(ASKED, pairs, strict=True)):
            gathering = Gathering(
                {pair: [(one.prompt.uid, PROMPT)]}, {one.prompt.uid: 0}, move=number, prompts=[one.prompt]
            )
            goes_on(followed, mover, engine, gathering, AHEAD if ahead else (Stage.REST,))
            if mover.place == pair[1]:
                steps(followed.seen, engine, 1)
                assert engine.last_step is not None
                followed.num_prefilled += engine.last_step.num_prefill_tokens
        assert mover.place < len(draws) or not engine.has_work
        ended(followed.seen, engine)
        return followed


def goes_on(
    followed: Followed, mover: PromptMoverOfRank, engine: Engine, gathering: Gathering, stages: Sequence[Stage]
) -> None:
    """With the stages of one move."""
    heard: dict[Any, Any] = {}
    is_target = (mover.place,) == (*gathering.targets,)
    for number, stage in enumerate(stages):
        answer = mover.do(number, replace(gathering, stage=stage, said=heard))
        heard = told(answer) if stage in (Stage.HERE, Stage.GIVE) else {}
        has_begun = stage is Stage.TAKE or (stage is Stage.GIVE and not is_target)
        assert mover.is_under_way == (has_begun and mover.place in gathering.instances)
        if isinstance(answer, Left):
            followed.seen.left += answer.keys
        if is_target and stage is Stage.TAKE:
            if engine.has_work:  # it goes on with others
                steps(followed.seen, engine, 1)
            while not (news := mover.news(0.1)):
                pass
            followed.through += [command for command, _ in news]
    followed.received_bytes += mover.received_bytes if is_target else 0
