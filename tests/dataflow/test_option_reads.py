"""Options that a flow reads while it is traced, and those that nobody will ever read."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
from pydantic import BaseModel

from plait.data.settings import DataSettings
from plait.dataflow import Dataflow, per_group, trace
from plait.recipes.flow_checks import said_of_unread_options
from plait.recipes.recipe import Recipe


class Model(BaseModel):
    first: float = 1.0
    second: float = 2.0

    @property
    def both(self) -> float:
        return self.first + self.second


@dataclasses.dataclass
class Plain:
    first: float = 1.0
    second: float = 2.0

    @property
    def both(self) -> float:
        return self.first + self.second


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    first: float = 1.0
    second: float = 2.0

    @property
    def both(self) -> float:
        return self.first + self.second


def loss(batch, scores, options=None, first=0.0):
    return batch


def centred(scores, options):
    return scores - options.first


def unread_by(reads, options):
    """What a flow of the user's leaves unread that does `reads(samples, scores, options)` → a loss."""

    def flow(prompts, actor, reward, options):
        samples = actor.generate(prompts)
        scores = reward.score(samples)
        actor.train(samples, loss=reads(scores, options) or loss, scores=scores)

    graph = trace(flow, roles=["actor", "reward"], options=options)
    assert type(options) in (Model, Plain, Slots, int), "it is of its own class again"
    return graph.unread


READS = {
    "nothing": (lambda scores, options: None, ("first", "second")),
    "one": (lambda scores, options: partial(loss, first=options.first), ("second",)),
    "a property of two": (lambda scores, options: partial(loss, first=options.both), ()),
    "for the loss": (lambda scores, options: partial(loss, options=options), ()),
    "in a closure": (lambda scores, options: lambda batch, scores: loss(batch, scores, options), ()),
    "for a column": (lambda scores, options: per_group(centred, scores, name="c", options=options) is None or None, ()),
}


@pytest.mark.parametrize("cls", [Model, Plain, Slots])
@pytest.mark.parametrize("case", READS)
def test_what_a_flow_neither_reads_nor_keeps_is_unread(cls, case):
    reads, unread = READS[case]
    assert unread_by(reads, cls()) == unread


def test_all_of_them_may_be_read_at_once():
    assert unread_by(lambda scores, options: partial(loss, first=options.model_dump()["first"]), Model()) == ()
    assert unread_by(lambda scores, options: partial(loss, first=vars(options)["first"]), Plain()) == ()
    assert unread_by(lambda scores, options: partial(loss, first=dataclasses.asdict(options)["first"]), Slots()) == ()
    assert unread_by(lambda scores, options: partial(loss, first=options), 4) == (), "options of no class with keys"


def test_a_flow_that_raises_leaves_its_options_as_they_were():
    options = Model()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        unread_by(lambda scores, options: 1 / 0, options)
    assert type(options) is Model


def test_it_is_said_of_those_that_the_recipe_states():
    recipe = Recipe(model="m", data=DataSettings(source="d"), options={"kl_coef": 0.1, "epochs": 2})
    said = said_of_unread_options(Dataflow("mine", (), ("kl_coef", "clip_low")), recipe)
    assert list(said) == ["`options.kl_coef` does nothing: the flow `mine` does not read it with these options"]
