"""Which samples of a flow train, and which are there to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.dataflow import per_group, trace

ROLES = ["actor", "ref", "reward", "critic"]


def loss(batch, advantages):
    return batch


def plain(batch):
    return batch


def over_the_mean(mine, theirs):
    return mine - theirs.mean()


def watched(prompts, examples, actor, reward):
    reward.score(actor.generate(prompts))
    actor.train(examples, loss=plain)


def given_beside(examples, prompts, actor):
    actor.train(examples, loss=plain)
    actor.train(actor.generate(prompts), loss=plain)


def two_trained(prompts, actor, critic):
    mine, more = actor.generate(prompts), actor.generate(prompts)
    critic.train(more, loss=plain)
    actor.train(mine, loss=plain)


def remax(prompts, actor, reward):
    greedy, samples = actor.generate(prompts, greedy=True, samples_per_prompt=1), actor.generate(prompts)
    better = per_group(over_the_mean, reward.score(samples), reward.score(greedy), name="advantages")
    actor.train(samples, loss=loss, advantages=better)


def greedy_trains(prompts, actor):
    actor.generate(prompts)
    actor.train(actor.generate(prompts, greedy=True), loss=plain)


def self_play(prompts, actor, ref, reward):
    theirs, mine = ref.generate(prompts), actor.generate(prompts)
    better = per_group(over_the_mean, reward.score(mine), reward.score(theirs), name="advantages")
    actor.train(mine, loss=loss, advantages=better)


def taught(prompts, actor, ref):
    actor.generate(prompts)
    actor.train(ref.generate(prompts), loss=plain)


@pytest.mark.parametrize(
    ("flow", "trained_on", "main", "trained_roles"),
    [
        (watched, ["examples"], "examples", {"actor"}),
        (given_beside, ["actor.generate", "examples"], "actor.generate", {"actor"}),
        (two_trained, ["actor.generate", "actor.generate#2"], "actor.generate", {"actor", "critic"}),
        (remax, ["actor.generate#2"], "actor.generate#2", {"actor"}),
        (greedy_trains, ["actor.generate#2"], "actor.generate#2", {"actor"}),
        (self_play, ["actor.generate"], "actor.generate", {"actor"}),
        (taught, ["ref.generate"], "ref.generate", {"actor"}),
    ],
)
def test_what_trains_and_what_is_there_to_compare_with(
    flow: Callable[..., Any], trained_on: list[str], main: str, trained_roles: set[str]
) -> None:
    graph = trace(flow, roles=ROLES)
    assert [node.call for node in graph.trained_on] == trained_on
    assert graph.main_rows.call == main
    assert graph.trained_roles == trained_roles
