"""What tokens ask of layers with experts, by hand; operations of models, against those that ReaL's paper counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost.model_work import ModelWork
from plait.models.files.known_shapes import KNOWN
from plait.models.shape import ModelShape
from tests.cost.test_model_costs import SHAPE

PROMPT, SAID, BATCH = 128, 128, 512
MIXTURE = replace(
    SHAPE, expert_layers=4, experts=8, experts_per_token=2, expert_intermediate=32, shared_intermediate=16
)


def forward(work: ModelWork, tokens: float, square_lengths: float) -> float:
    """Every query reads every key of its sample, and embedding and head count alike."""
    layer = work.products(tokens) + work.attention(square_lengths)
    return work.shape.layers * layer + 2 * (2 * tokens * work.head)


def step(shape: ModelShape) -> float:
    """PPO of four equal models: three score, two train (a forward, twice as much backward, and the forward that is
    computed again), and one generates, a token of each sample in a step."""
    work = ModelWork(shape, "bfloat16", shape.vocabulary)
    whole = forward(work, BATCH * (PROMPT + SAID), BATCH * (PROMPT + SAID) ** 2)
    prompts = forward(work, BATCH * PROMPT, BATCH * PROMPT**2)
    steps = (forward(work, BATCH, BATCH * (PROMPT + said)) for said in range(1, SAID + 1))
    return 3 * whole + 2 * 4 * whole + prompts + sum(steps)


@pytest.mark.parametrize(("name", "pflop"), [("llama-2-7b", 21.4), ("llama-2-70b", 247.6)])
def test_a_step_of_four_models(name: str, pflop: float) -> None:
    """The paper counts four square matrices of attention, where the 70B model shares keys and values among heads."""
    shape = ModelShape.from_config(KNOWN[name])
    shape = replace(shape, kv_heads=shape.heads, attention_parameters=4 * shape.hidden**2)
    assert step(shape) / 1e15 == pytest.approx(pflop, abs=0.1)


def test_a_run_of_four_models_of_70b() -> None:
    """At 6.4542 PFLOP a second a step takes 38.4 s, 1,600 steps 17.05 hours."""
    shape = ModelShape.from_config(KNOWN["llama-2-70b"])
    shape = replace(shape, kv_heads=shape.heads, attention_parameters=4 * shape.hidden**2)
    seconds = step(shape) / 6.4542e15
    assert seconds == pytest.approx(38.4, abs=0.05)
    assert 1600 * seconds / 3600 == pytest.approx(17.05, abs=0.03)


def test_experts_are_read_as_far_as_tokens_reach_them() -> None:
    """Every token reads attention, the shared expert and the router, and two of eight experts."""
    work = ModelWork(MIXTURE, "bfloat16", 1)
    dense, expert = 4 * 64 * 64 + 64 * (3 * 16 + 8), 3 * 64 * 32
    assert [work.read(tokens) for tokens in (1, 3, 100)] == [2 * (dense + count * expert) for count in (2, 6, 8)]
    assert work.products(10) == 2 * 10 * (dense + 2 * expert)


def test_layers_are_averages_of_dense_ones_and_mixtures() -> None:
    work = ModelWork(replace(MIXTURE, expert_layers=1), "float32", 1)
    dense = 4 * 64 * 64 + (3 * 3 * 64 * 128 + 64 * (3 * 16 + 8)) / 4
    assert work.read(100) == 4 * (dense + 8 * 3 * 64 * 32 / 4)
