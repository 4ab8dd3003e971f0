"""The loop that has an engine draw: when it steps, what it passes on, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.data.records import Sample
from plait.runtime.steps.drawing import drawing
from plait.schedule.work import MOVED_ON, Done
from tests.runtime.samples import sample


@dataclass
class Scripted:
    """An engine whose every step is said: the samples that it finishes; None: it is not ready for one."""

    script: list[Sequence[Sample] | None]
    steps: list[str] = field(default_factory=list)
    """Calls that stepped it."""

    @property
    def has_work(self) -> bool:
        return bool(self.script)

    @property
    def ready(self) -> bool:
        if self.script[0] is None:
            del self.script[0]
            return False
        return True

    def advance(self, call: str) -> tuple[Done, list[Sample]]:
        self.steps.append(call)
        finished = list(self.script.pop(0) or ())
        return Done(f"{call}/decode", "DECODE", units=len(finished)), finished


A, B, C = (sample(uid, 0) for uid in (1, 2, 3))


def test_each_step_is_an_action_and_what_ends_is_handed_on() -> None:
    engine, taken = Scripted([[A], None, None, [B, C]]), list[Sequence[Sample]]()
    news = iter([False, False, True, False])

    def take(finished: Sequence[Sample]) -> bool:
        taken.append(finished)
        return next(news)

    actions = list(drawing(engine, "actor.generate", take))
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
    engine, mine = Scripted([[B], [A], [C]]), {1}

    def take(finished: Sequence[Sample]) -> bool:
        mine.difference_update(done.prompt.uid for done in finished)
        return False

    assert len(list(drawing(engine, "first", take, until=lambda: not mine))) == 2
    assert len(list(drawing(engine, "second", take))) == 1
    assert engine.steps == ["first", "first", "second"]
    assert list(drawing(engine, "third", take)) == []


def test_what_is_said_before_a_step_reaches_that_step() -> None:
    """As a halt does, whose time has come between two steps."""
    engine = Scripted([[A], [B]])
    said = list[int]()
    for _ in drawing(engine, "call", lambda finished: False, before=lambda: said.append(len(engine.steps))):
        pass
    assert said == [0, 1]
