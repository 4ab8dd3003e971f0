"""How often it is foretold when instances end, and what a resumed run does again of the moves that were made before."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.data.records import Prompt
from plait.generation.request import Request
from plait.generation.settings import Sampling
from plait.kernels.noise import NoiseKey
from plait.policy.migration import Bounds
from plait.policy.rebalance import Rebalancing
from plait.runtime.folder.decisions import Experience
from plait.runtime.steps import rebalancing
from plait.runtime.steps.rebalancing import Balance, Curve, Rebalancer
from plait.workers.dealing import Outstanding
from plait.workers.gathering import Gathering
from plait.workers.remote_moves import RemoteMoves

CALL = (1, "actor.generate")


def test_moves_to_instances_that_are_no_more_are_not_made_again(tmp_path: Path) -> None:
    """The run had four instances and has two now: of three samples that went over, two went to one that is there."""
    path, pairs = tmp_path / "rebalancing.jsonl", [[0, 3, [[0, 0]]], [0, 1, [[0, 1], [0, 2]]]]
    made = {"step": 1, "call": "actor.generate", "curve": None, "moves": [{"left": 4, "pairs": pairs}], "move_s": None}
    path.write_text(json.dumps(made) + "\n")
    outstanding, told = Outstanding(), list[Gathering]()
    outstanding.dealt([Request(Prompt(0, "", (1, 1)), 4, Sampling(max_tokens=9), NoiseKey(0))], 0, number=7)

    def tell(stage: Gathering) -> int:
        assert stage.instances <= {0, 1}
        told.append(stage)
        return len(told)

    moves = RemoteMoves(2, outstanding, tell, gathers=False)
    engine: Any = SimpleNamespace(running=(4, 0), traits=SimpleNamespace(num_instances=2))
    balance = Balance(Rebalancer(Experience(path)), CALL, engine, moves, {0: 2}, Bounds(8, 9))
    balance.look(frees=False)
    assert [dict(stage.pairs) for stage in told] == [{(0, 1): [(0, 1), (0, 2)]}]
    assert balance.num_moved == 2


@pytest.mark.parametrize(("takes_s", "times"), [(0.0, 7), (2.0, 2), (1e3, 1)])
def test_ends_are_foretold_in_a_twentieth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_s: float, times: int
) -> None:
    """After eight steps of ten seconds, and after each of the next six, in which an instance loses more than half of
    its samples. To foretell ends takes no time; or 2 s, so that the next 40 are left alone; or longer than all that
    follows."""
    now_s, foretold = [0.0], []

    def rebalance(works: Any, *given: Any) -> Rebalancing:
        foretold.append(works)
        now_s[0] += takes_s
        return Rebalancing((), 1.0, 1.0)

    monkeypatch.setattr(rebalancing, "rebalance", rebalance)
    experience = Experience(tmp_path / "rebalancing.jsonl", [[9, 9]], clock=lambda: now_s[0])
    engine: Any = SimpleNamespace(running=(2**15, 2**15), traits=SimpleNamespace(num_instances=2))
    moves: Any = SimpleNamespace(is_moving=False, unfinished=((), ()))
    rebalancer = Rebalancer(experience)
    rebalancer.curve = Curve(10.0, 0.0, 1.0)
    balance = Balance(rebalancer, CALL, engine, moves, {0: 2}, Bounds(8, 9))
    now_s[0] += 70.0
    for step in range(7):
        now_s[0] += 10.0
        engine.running = (2**15 >> 2 * step, 2**15)
        balance.look(frees=False)
    assert len(foretold) == times
