"""Whether scoring could begin on ranks that generate: by what reason it cannot. No torch."""

from __future__ import annotations

import pytest

from plait.dataflow import Dataflow, Resample, build_prompts, trace
from plait.schedule.plan import Placement, Plan
from plait.schedule.stage_fusion import nothing_to_hide
from tests.schedule.test_placements import ALONE, PPO, SFT
from tests.schedule.workloads import never


def in_rounds(prompts, actor, ref, reward):
    samples = actor.generate(prompts, resample=Resample(keep=bool, reward=reward, max_rounds=2))
    actor.train(samples, loss=never, rewards=reward.score(samples), kept=ref.logprobs(samples))


def behind_others(prompts, actor, ref):
    samples = actor.generate(prompts)
    told = build_prompts(samples, never)
    actor.train(samples, loss=never, kept=ref.logprobs(samples, prompts=told))


BEHIND = trace(behind_others, roles=("actor", "ref"))
ROUNDS = trace(in_rounds, roles=("actor", "ref", "reward"))


def placed(generates: int, **scores: tuple[int, ...]) -> Plan:
    """The actor generates on the first ranks of four; others score on theirs."""
    calls = {"ref": "ref.logprobs", "critic": "critic.values", "actor": "actor.logprobs"}
    ranks = tuple(range(generates))
    return Plan(
        "mine",
        4,
        (
            Placement("actor.generate", "decode", ranks, dp=generates),
            *(Placement(calls[role], "score", on, dp=len(on)) for role, on in scores.items()),
        ),
    )


def test_of_batches_that_are_drawn_ahead_only_what_scores_them_then_can_be_hidden() -> None:
    plan, models = placed(2, ref=(0, 1), critic=(0, 1)), ("actor", "ref", "critic")
    ref = next(node.id for node in PPO.nodes if node.call == "ref.logprobs")
    assert nothing_to_hide(plan, PPO, models, (), ahead={ref}) == ""
    found = nothing_to_hide(plan, PPO, models, (), ahead=())
    assert (
        found
        == "batches are generated ahead, and ref and critic score them in their own step, when all samples are there"
    )
    assert nothing_to_hide(placed(2, ref=(2,), critic=(0, 1)), PPO, models, (), ahead={ref}).startswith("batches are")


@pytest.mark.parametrize(
    ("flow", "plan", "copied", "said"),
    [
        (SFT, placed(1), (), "nothing is generated"),
        (PPO, placed(1, ref=(0,), critic=(0,)), (), "one instance generates"),
        (PPO, placed(2, ref=(2,), critic=(2, 3)), (), "no model scores samples where they are generated"),
        (PPO, placed(2, ref=(2,), critic=(1, 2)), (), ""),
        (PPO, placed(2, ref=(2,), critic=(0, 1)), ("critic",), "weights of critic are brought from where they train"),
        (PPO, placed(2, ref=(1,), critic=(0, 1)), ("critic",), ""),
        (PPO, placed(2, ref=(1,), critic=(0, 1)), ("critic", "ref"), "weights of ref and critic are brought"),
        (ALONE, placed(2, actor=(0, 1)), ("actor",), "weights of actor are brought"),
        (ROUNDS, placed(2, ref=(0, 1)), (), "samples are drawn in rounds (`resample`), and no model scores any before"),
        (BEHIND, placed(2, ref=(0, 1)), (), "samples are scored behind other prompts, which are written when all"),
        (ROUNDS, placed(2, ref=(2,)), (), "no model scores samples where they are generated"),
    ],
)
def test_why_there_is_nothing_to_hide(flow: Dataflow, plan: Plan, copied: tuple[str, ...], said: str) -> None:
    found = nothing_to_hide(plan, flow, ("actor", "ref", "critic"), copied)
    assert found.startswith(said)
    assert bool(found) == bool(said)
