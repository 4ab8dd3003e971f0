"""What tells a plan from another, in words."""

from __future__ import annotations

from dataclasses import replace

from plait.cli.placement_text import cut_text, unlike
from plait.schedule.plan import Placement, Plan

TRAIN = Placement("actor.train", "train", tuple(range(8)), tp=2, pp=4, stages=(8, 8, 8, 8))
GENERATE = Placement("actor.generate", "decode", tuple(range(8)), dp=4, tp=2)
SHOWN = Plan("shown", 8, (TRAIN, GENERATE))


def other(*placements: Placement) -> Plan:
    return Plan("other", 8, placements)


def test_calls_that_are_elsewhere_or_cut_otherwise_are_named() -> None:
    halves = [replace(GENERATE, ranks=tuple(range(first, first + 4)), dp=2) for first in (0, 4)]
    found = unlike(SHOWN, other(TRAIN, *halves))
    assert found == "actor.generate on 0-3 dp2 tp2 and 4-7 dp2 tp2"
    away = replace(TRAIN, dp=2, pp=2, stages=(16, 16), after="offload")
    assert unlike(SHOWN, other(away, GENERATE)) == "actor.train on 0-7 dp2 tp2 pp2 offload"
    assert cut_text(replace(TRAIN, schedule="gpipe")) == "tp2 pp4 gpipe"


def test_what_only_layers_or_micro_batches_tell_apart_is_said() -> None:
    layers = replace(TRAIN, stages=(9, 9, 8, 6))
    assert unlike(SHOWN, other(layers, GENERATE)) == "actor.train on 0-7 tp2 pp4 of 9+9+8+6 layers"
    small = replace(TRAIN, micro_batch_tokens=512)
    assert unlike(SHOWN, other(small, GENERATE)) == "actor.train on 0-7 tp2 pp4 with 512 tokens a forward"
    assert unlike(SHOWN, SHOWN) == ""


def test_of_many_two_are_named() -> None:
    calls = [replace(GENERATE, call=f"role{n}.logprobs", mode="score") for n in range(4)]
    mine, theirs = Plan("p", 8, tuple(calls)), other(*(replace(call, dp=2, tp=4) for call in calls))
    first, second, rest = unlike(mine, theirs).split(", ")
    assert (first, rest) == ("role0.logprobs on 0-7 dp2 tp4", "2 more calls otherwise")
    assert second.startswith("role1")
