"""Small models of the same configuration, by which it is shown that a family can be cut."""

from __future__ import annotations

import pytest

from plait.layout.mesh import Parallelism
from plait.models.parallel.scaled_down import kinds_of, scaled_down
from tests.models.tiny import tiny_model


@pytest.mark.parametrize("layers", [2, 5])
def test_what_a_layer_has_as_many_of_as_there_are_layers_stays_whole(layers: int) -> None:
    """Of Falcon-H1 a time step has two limits, and the projection of a mixer five factors; all layers are alike."""
    model = tiny_model("falcon_h1", num_hidden_layers=layers)
    small = scaled_down(model, "it", Parallelism(), "cpu", scalar=False)
    assert kinds_of(small) == kinds_of(model)[:1]
    for key, count in (("time_step_limit", 2), ("ssm_multipliers", 5)):
        assert len(getattr(small.config, key)) == count
        assert tuple(getattr(small.config, key)) == tuple(getattr(model.config, key))


def test_lists_of_layers_are_cut() -> None:
    small = scaled_down(tiny_model("qwen3_5_text"), "it", Parallelism(), "cpu", scalar=False)
    assert small.config.layer_types == ["linear_attention", "full_attention"]
