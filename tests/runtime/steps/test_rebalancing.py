"""What a resumed run does again of the moves that were made before."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plait.data.records import Prompt
from plait.generation.request import Request
from plait.generation.settings import Sampling
from plait.kernels.noise import NoiseKey
from plait.policy.migration import Bounds
from plait.runtime.folder.decisions import Experience
from plait.runtime.steps.rebalancing import Balance, Rebalancer
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
