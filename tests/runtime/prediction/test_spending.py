"""What a run states of the memory of its GPUs before it begins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost import placement
from plait.cost.lengths import Lengths, SampleLengths
from plait.runtime.inputs.prepared import Outline
from plait.runtime.prediction import spending
from plait.runtime.prepare import outline
from plait.schedule.plan import Plan

LENGTHS = SampleLengths(Lengths.fixed(8), Lengths.fixed(8))


@pytest.fixture
def run(make_recipe, monkeypatch: pytest.MonkeyPatch) -> tuple[Outline, Plan]:
    """A recipe that leaves everything open, as if its GPU were here, with its plan."""
    monkeypatch.setattr(spending, "device_bytes", lambda recipe, devices: 80 << 30)
    foreseen = outline(make_recipe())
    recipe = foreseen.recipe.model_validate(foreseen.recipe.model_dump(exclude_unset=True) | {"device": "cuda"})
    on_gpu = replace(foreseen, recipe=recipe)
    return on_gpu, placement.resolve_plan(foreseen.recipe, foreseen.flow, foreseen.models, foreseen.shapes)


def way(run: Outline) -> tuple[int, bool]:
    return run.recipe.micro_batch_tokens, run.recipe.checkpoint_activations


def test_a_run_on_a_gpu_states_what_fits(run: tuple[Outline, Plan]) -> None:
    on_gpu, plan = run
    found = spending.spending(on_gpu, plan, LENGTHS)
    assert way(found) == (16_384, False)
    assert spending.spending(found, plan, LENGTHS) is found, "nothing is left open"


def test_gpus_that_are_not_alike_have_the_way_that_takes_least(run: tuple[Outline, Plan]) -> None:
    on_gpu, plan = run
    assert way(spending.spending(on_gpu, plan, LENGTHS, is_alike=False)) == (4_096, True)


def test_a_forecast_that_fails_keeps_no_run_from_its_work(
    run: tuple[Outline, Plan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise KeyError("layers")

    monkeypatch.setattr(spending, "with_memory_spent", fails)
    on_gpu, plan = run
    assert way(spending.spending(on_gpu, plan, LENGTHS)) == (4_096, True)
    assert "what fits on a GPU is not known: KeyError: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "prompt", "expected"),
    [("cpu", 100, 1_000), ("cuda", None, 1_000), ("cuda", 100, 150), ("cuda", 990, 1_000)],
)
def test_a_pool_of_a_gpu_has_room_for_samples_of_the_recipe(
    device: str, prompt: int | None, expected: int, run: tuple[Outline, Plan]
) -> None:
    recipe, shape = run[0].recipe, replace(run[0].shapes[run[0].recipe.model], max_positions=1_000)
    sampling = recipe.sampling.model_copy(update={"max_response_tokens": 50})
    data = recipe.data.model_copy(update={"max_prompt_tokens": prompt})
    asked = recipe.model_copy(update={"device": device, "sampling": sampling, "data": data})
    assert spending.held_positions(asked, shape) == expected
