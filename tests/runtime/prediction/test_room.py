"""What is said of a plan that has no room: on which machine, of how many ranks, and which keys make it smaller."""

from __future__ import annotations

import pytest

from plait.cost.device_memory import DeviceMemory
from plait.cost.lengths import Lengths, SampleLengths
from plait.memory_limits import Limit
from plait.recipes.recipe import Recipe
from plait.runtime.prediction import room
from plait.runtime.prediction.remedies import remedies
from plait.runtime.prediction.room import said_of_room, warn_of_room
from plait.simulator.step_memory import ENGINE

GIB = 1 << 30
LENGTHS = SampleLengths(Lengths.fixed(16), Lengths.fixed(1))


class Run:
    recipe = Recipe.model_validate({"model": "it", "data": {"source": "x"}})
    flow, models, shapes = None, (), {}


class Ranks:
    def __init__(self, num_ranks: int, nodes: int) -> None:
        self.num_ranks, self.nodes = num_ranks, nodes


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each rank 6 GiB, of this machine 8."""

    def held(recipe, flow, models, shapes, plan, lengths) -> list[DeviceMemory]:
        rows = [("actor: weights (bfloat16)", 6 * GIB)]
        return [DeviceMemory(list(range(plan.num_ranks)), rows, [("actor.train", 6 * GIB)], [])]

    monkeypatch.setattr(room, "memory_of_plan", held)
    monkeypatch.setattr(room, "limit", lambda: Limit(8 * GIB, None))


def said(num_ranks: int, nodes: int, **joined: int) -> str | None:
    return said_of_room(Run(), Ranks(num_ranks, nodes), LENGTHS, {name: gib * GIB for name, gib in joined.items()})


def test_the_machine_with_least_memory_is_the_one_that_counts() -> None:
    assert said(1, 1) is None
    assert said(2, 2, far=7) is None
    here = said(4, 2, far=16)
    assert here is not None
    assert "2 ranks of a machine are together expected to hold 12.00 GiB, and 8.00 GiB is all that the machine" in here
    there = said(2, 2, near=16, far=5)
    assert there is not None
    assert "the rank of a machine is expected to hold 6.00 GiB, and 5.00 GiB is all that far has" in there


def test_a_fault_in_what_is_predicted_keeps_no_run_from_its_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_room(Run(), Ranks(2, 1), LENGTHS, {})
    assert capsys.readouterr().err.startswith("memory does not fit: 2 ranks")
    monkeypatch.setattr(room, "memory_of_plan", lambda *_: 1 / 0)
    warn_of_room(Run(), Ranks(2, 1), LENGTHS, {})
    assert capsys.readouterr().err.startswith("nothing is known of the memory of this run: ZeroDivisionError")


@pytest.mark.parametrize(
    ("what", "key"),
    [
        ("texts that drafts are taken from, at most", "sampling.draft_pool_bytes"),
        ("draft model: weights packed for decoding", "sampling.draft_model"),
        ("weights packed for decoding, beyond other temporary memory", "sampling.exact"),
        ("gradient of the head", "lora.rank"),
        ("draft model: KV cache (64 tokens)", "sampling.max_running"),
        ("actor: prompts on their way (64 tokens)", "sampling.max_prefill_tokens"),
        ("activations", "micro_batch_tokens"),
    ],
)
def test_keys_that_make_a_row_smaller(what: str, key: str) -> None:
    assert f"`{key}`" in remedies(what, 1)


def test_keys_that_would_change_nothing_are_not_named() -> None:
    assert remedies("logits of one chunk", 1) == "take more devices, or a smaller model"
    assert remedies("actor decode: brought back", 1) == "take more devices, or a smaller model"
    assert "`sampling.max_running`" in remedies(ENGINE, 1)
    assert "micro_batch" not in remedies(ENGINE, 1)
    state = "actor: masters, moments and gradients"
    assert remedies(state, 1) == "take more devices, a smaller model or `lora.rank`"
    assert (
        remedies(state, 2)
        == "take more devices, a smaller model, `lora.rank`, `optimizer.shard_gradients` or `optimizer.shard_weights`"
    )


def test_adapters_are_not_advised_where_there_are_some() -> None:
    shards = "a smaller model or, if it is trained there, `optimizer.shard_weights`"
    assert remedies("actor: weights", 8, adapted=True) == f"take more devices, {shards}"
    assert remedies("actor: weights", 8, more="a machine", adapted=True) == f"take a machine, {shards}"
    assert remedies("actor: weights", 1, adapted=True) == "take more devices, or a smaller model"
    of_adapter = "actor: adapter, its masters, moments and gradients"
    assert remedies(of_adapter, 8, adapted=True) == "take more devices, a smaller model or `optimizer.shard_weights`"
    assert "`lora.rank`" in remedies("actor: masters, moments and gradients", 8)
