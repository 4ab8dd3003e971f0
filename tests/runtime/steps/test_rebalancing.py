"""How often it is predicted when instances end, and what a resumed run does again of the moves that were made
before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.data.records import Prompt
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.kernels.noise import NoiseKey
from plait.policy.migration import Bounds, HowToMove
from plait.policy.rebalance import Rebalancing
from plait.runtime.folder.decisions import Experience
from plait.runtime.steps import rebalancing
from plait.runtime.steps.rebalancing import Balance, Curve, Rebalancer
from plait.schedule.timeline import Span, Timeline
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


def decided(path: Path, steps: Sequence[Span], after_s: float) -> dict[str, Any]:
    """What becomes of twelve samples on one instance and four on another after so long, by the spans of a step."""
    now_s, asked = [0.0], list[Any]()
    experience = Experience(path, clock=lambda: now_s[0])
    experience.keep((0, "actor.generate"), {"moves": [], "curve": None, "move_s": 0.03}, 0.03)
    rebalancer = Rebalancer(experience)
    rebalancer.learn(Timeline(tuple(steps)), [50 * n for n in range(1, 9)])
    unfinished = tuple((uid, 0) for uid in range(12)), tuple((uid, 0) for uid in range(12, 16))

    def move(pairs: Any, how: HowToMove) -> int:
        asked.append(pairs)
        return sum(map(len, pairs.values()))

    moves: Any = SimpleNamespace(is_moving=False, unfinished=unfinished, moved_s=None, move=move)
    said = {(uid, 0): 100 if uid < 12 else 150 for uid in range(16)}
    engine: Any = SimpleNamespace(running=(12, 4), traits=SimpleNamespace(num_instances=2), moves=moves, said=said)
    balance = rebalancer.balance(CALL, engine, dict.fromkeys(range(16), 8), Bounds(64, 400))
    assert balance is not None
    now_s[0] = after_s
    balance.look(frees=False)
    balance.end()
    row = experience.decisions.of(CALL)
    assert row is not None
    assert len(asked) == len(row["moves"]) == 1, "what moves is written"
    return row["moves"][0]


@pytest.mark.parametrize("row_s", [0.0001, 0.001], ids=["rows cost little", "rows cost much"])
def test_steps_with_drafts_decide_as_plain_ones_that_bring_as_many_tokens(tmp_path: Path, row_s: float) -> None:
    """Each sample computes four rows and gets 2.5 tokens, in steps 2.5 times as long as those of one row and token: as
    many tokens are taken to be said by then, and as many seconds to be left."""
    found, token_s = [], lambda n: 0.004 + 1.6 * row_s * n
    for rows, drawn in ((1, 1.0), (4, 2.5)):
        steps = [
            Span(
                *("actor.generate/decode", "DECODE", 0, 0.0, drawn * token_s(n)),
                tokens=rows * n,
                samples=n,
                drawn=round(drawn * n),
            )
            for n in range(2, 18, 2)
        ]
        found.append(decided(tmp_path / f"{rows}.jsonl", steps, 100.5 * token_s(12)))
    plain, drafted = found
    assert (drafted["left"], drafted["pairs"]) == (plain["left"], plain["pairs"])
    assert (drafted["before_s"], drafted["after_s"]) == pytest.approx((plain["before_s"], plain["after_s"]))
    late = decided(tmp_path / "late.jsonl", steps, 1e3)
    assert late == drafted, "what samples have said counts, not how long it is since they were asked for"


@pytest.mark.parametrize(("takes_s", "times"), [(0.0, 7), (2.0, 2), (1e3, 1)])
def test_ends_are_predicted_in_a_twentieth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_s: float, times: int
) -> None:
    """After eight steps of ten seconds, and after each of the next six, in which an instance loses more than half of
    its samples. To predict ends takes no time; or 2 s, so that the next 40 are left alone; or longer than all that
    follows."""
    now_s, predicted = [0.0], []

    def rebalance(works: Any, *given: Any) -> Rebalancing:
        predicted.append(works)
        now_s[0] += takes_s
        return Rebalancing((), 1.0, 1.0)

    monkeypatch.setattr(rebalancing, "rebalance", rebalance)
    experience = Experience(tmp_path / "rebalancing.jsonl", [[9, 9]], clock=lambda: now_s[0])
    engine: Any = SimpleNamespace(running=(2**15, 2**15), traits=SimpleNamespace(num_instances=2), said={})
    moves: Any = SimpleNamespace(is_moving=False, unfinished=((), ()))
    rebalancer = Rebalancer(experience)
    rebalancer.curve = Curve(10.0, 0.0, 1.0)
    balance = Balance(rebalancer, CALL, engine, moves, {0: 2}, Bounds(8, 9))
    now_s[0] += 70.0
    for step in range(7):
        now_s[0] += 10.0
        engine.running = (2**15 >> 2 * step, 2**15)
        balance.look(frees=False)
    assert len(predicted) == times
