"""The loop that has an engine draw: when it steps, what it passes on, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

from plait.data.records import Sample
from plait.runtime.steps.engine_loop import engine_loop
from plait.schedule.work import MOVED_ON
from tests.runtime.samples import sample
from tests.runtime.scripted_engine import ScriptedEngine

A, B, C = (sample(uid, 0) for uid in (1, 2, 3))


def test_each_step_is_an_action_and_what_ends_is_handed_on() -> None:
    engine, taken = ScriptedEngine([[A], None, None, [B, C]]), list[Sequence[Sample]]()
    news = iter([False, False, True, False])

    def take(finished: Sequence[Sample]) -> bool:
        taken.append(finished)
        return next(news)

    actions = list(engine_loop(engine, "actor.generate", take))
    # Not ready it has nothing to record; where something else came (a reward, say) it need not wait all the same.
    assert [done if done is None else (done.action, done.units) for done in actions] == [
        ("actor.generate/decode", 1),
        None,
        (MOVED_ON.action, 0),
        ("actor.generate/decode", 2),
    ]
    assert taken == [[A], [], [], [B, C]]
    assert engine.steps == ["actor.generate"] * 2


def test_it_leaves_an_engine_that_others_go_on_with() -> None:
    engine, mine = ScriptedEngine([[B], [A], [C]]), {1}

    def take(finished: Sequence[Sample]) -> bool:
        mine.difference_update(done.prompt.uid for done in finished)
        return False

    assert len(list(engine_loop(engine, "first", take, until=lambda: not mine))) == 2
    assert len(list(engine_loop(engine, "second", take))) == 1
    assert engine.steps == ["first", "first", "second"]
    assert list(engine_loop(engine, "third", take)) == []


def test_what_is_said_before_a_step_reaches_that_step() -> None:
    """As a halt does, whose time has come between two steps."""
    engine = ScriptedEngine([[A], [B]])
    said = list[int]()
    for _ in engine_loop(engine, "call", lambda finished: False, before=lambda: said.append(len(engine.steps))):
        pass
    assert said == [0, 1]
