"""Plans by name as they are foretold are those that a run follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost import placement
from plait.cost.cluster_file import read_cluster
from plait.cost.lengths import Lengths, SampleLengths
from plait.runtime.prediction import spending
from plait.runtime.prediction.planning import Planning
from plait.runtime.prediction.spending import settled
from plait.runtime.prepare import outline
from plait.schedule.named_plans import NAMES

LENGTHS = SampleLengths(Lengths.fixed(8), Lengths.fixed(8))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [1e-5, 1e-3, 1.0])
def test_a_named_plan_is_that_of_a_run(
    name: str, device: str, share: float, make_recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all has room, where parameters must be cut or what idles must leave, and where nothing helps."""
    whole = read_cluster("2xA100-80G")
    memory = int(share * whole.device.memory_bytes)
    cluster = replace(whole, device=replace(whole.device, memory_bytes=memory))
    for module in (placement, spending):
        monkeypatch.setattr(module, "device_bytes", lambda recipe, devices: memory)
    monkeypatch.setattr(placement, "check_devices", lambda recipe, plan, nodes: None)
    monkeypatch.setattr(spending, "say", lambda text, file: None)
    run = outline(make_recipe(devices=2, plan=name))
    run = replace(run, recipe=run.recipe.model_copy(update={"device": device}))
    planning = Planning(run.recipe, run.flow, run.models, run.shapes, cluster, LENGTHS)
    resolved = placement.resolve_plan(run.recipe, run.flow, run.models, run.shapes)
    assert planning.given(name) == settled(run, resolved, LENGTHS)
