"""What is told of a layer by models of few layers and of many: times by a known law in, the law out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.cost.measured import stopwatch, work
from plait.cost.measured.models import Models, Pair, deep_layers, of_steps
from plait.cost.measured.work import capture_s
from plait.cost.model_work import ModelWork
from plait.generation.request import Request
from plait.models.layer_types import stating_kinds
from tests.cost.test_model_costs import SHAPE
from tests.models.tiny import tiny_config, tiny_model

LAYER_US = {(1, 64): 40, (1, 1024): 44, (256, 64): 90, (256, 1024): 190}
"""Of the device, by samples and context."""


def step_us(layers: int, samples: int, context: int, asking_us: float = 0.0) -> float:
    """A step waits for the host 1300 us and 9 for each sample; then the device computes layers, and draws in 300 us,
    while the host asks for all of it in `asking_us`."""
    return 1300 + 9 * samples + max(asking_us, layers * LAYER_US[samples, context] + 300)


def times_of(few: int, many: int, asking_us: float = 0.0) -> dict[tuple[int, ...], tuple[float, ...]]:
    pair: Any = Pair(few, few, many, many)  # type: ignore[arg-type]  # in place of a model its layers
    return {size: pair.step(lambda layers, *of: step_us(layers, *of, asking_us=asking_us), *size) for size in LAYER_US}


def test_layers_and_all_beside_them_are_told_apart() -> None:
    steps, rests = of_steps(times_of(15, 30), 30, 1.0)
    assert [(samples, context, pytest.approx(us)) for samples, context, us in steps] == [
        (*size, us) for size, us in LAYER_US.items()
    ]
    assert rests == ((1, pytest.approx(1300 + 9 + 300)), (256, pytest.approx(1300 + 9 * 256 + 300)))


def test_steps_are_as_long_as_measured_where_layers_hide_behind_the_host() -> None:
    """The host asks for 1500 us: as long as 15 layers take, but for 256 samples. The difference says too little of a
    layer; a step of all 30 is exact all the same."""
    found = times_of(15, 30, asking_us=1500)
    assert found[1, 64] == (0.0, 2809, 2809)
    steps, rests = of_steps(found, 30, 2.0)
    for samples, context, layer_us in steps:
        assert 30 * layer_us + dict(rests)[samples] == pytest.approx(step_us(30, samples, context, 1500))


def test_no_layer_is_faster_than_its_weights_are_read() -> None:
    """By the difference it takes 0; reading takes 20 us, the rest of 1000 us is not of layers."""
    steps, rests = of_steps({(1, 64): (0.0, 1000.0, 1000.0)}, 10, 20.0)
    assert (steps, rests) == (((1, 64, 20.0),), ((1, 800.0),))


def test_the_deepest_model_has_all_layers_that_fit() -> None:
    """With keys and values of 100 tokens, into two fifths of what is free."""
    of = ModelWork(SHAPE, "bfloat16", 1)
    each = of.read(1) + of.kept(100, 1)
    assert deep_layers(of, 100, int(10 * SHAPE.layers * each)) == SHAPE.layers
    assert deep_layers(of, 100, int(5 * each) + 5) == 2


def test_brief_work_of_a_gpu_is_not_waited_for_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait takes 20 us, a call 1: sixteen calls 36 us."""
    clock, calls = [0.0], [0]

    def now(device: str) -> float:
        clock[0] += 10.0
        return clock[0]

    def call() -> None:
        clock[0] += 1.0
        calls[0] += 1

    monkeypatch.setattr(stopwatch, "now", now)
    monkeypatch.setattr(stopwatch, "BRIEF_S", 20.0)
    assert stopwatch.seconds_in_a_row(call, "cuda") == (16 + 10) / 16
    assert calls == [16]
    assert stopwatch.seconds_in_a_row(call, "cpu") == 1 + 10


@pytest.mark.parametrize(("device", "prompts"), [("cpu", [(0, 3)]), ("cuda", [(0, 1), (1, 1), (2, 1)])])
def test_samples_of_a_gpu_have_prompts_of_their_own(device: str, prompts: list[tuple[int, int]]) -> None:
    """Steps go on until all have begun, one in each here."""
    added: list[Request] = []
    said: dict[int, int] = {}
    words = SimpleNamespace(num_embeddings=9)
    module = SimpleNamespace(get_input_embeddings=lambda: words)
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(device=SimpleNamespace(type=device), module=module),
        said=said,
        add=added.append,
        step=lambda: said.update({len(said): 1}),
    )
    work.begin(engine, 3, 5, 10)
    assert [(request.prompt.uid, request.num_samples) for request in added] == prompts
    assert len({request.prompt.token_ids[0] for request in added}) == len(prompts)
    assert len(said) == 3


@pytest.mark.parametrize("vocabulary", [3, 17, 96, 258, 50_000])
def test_prompts_begin_otherwise_in_a_vocabulary_of_any_size(vocabulary: int) -> None:
    """All 256 of the largest step, within a block of 16 tokens, which prompts may share."""
    prompts = [work.prompt_tokens(number, 64, vocabulary) for number in range(1, 257)]
    assert len({prompt[:16] for prompt in prompts}) == 256
    assert all(0 <= token_id < vocabulary for prompt in prompts for token_id in prompt)
    assert {len(prompt) for prompt in prompts} == {64}
    if vocabulary > 256:
        assert prompts[99] == (100,) * 64
    assert work.prompt_tokens(100, 4, 17) == (15, 3, 15, 15), "100 = 5 x 17 + 15, and 15 + 5 = 17 + 3"


def test_the_first_sample_is_there_when_the_last_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six prompts of 8 tokens, 9 of which fit a step, begin one behind the other: 5 steps wait for the last."""
    monkeypatch.setattr(work, "num_prompts", lambda device, samples: samples)
    monkeypatch.setattr(work, "PREFILL_TOKENS", 9)
    assert work.waits("cuda", 6, 8) == 5
    engine = work.engine_for(tiny_model("llama", dtype=torch.float32), 6, 8, 3)
    work.begin(engine, 6, 8, 3)
    assert len(engine.said) == 6
    for _ in range(2):
        engine.step()
        assert engine.last_step is not None
        assert engine.last_step.num_tokens == 6, "all are drawn together"


def test_what_is_captured_again_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time a step takes 5 s to capture, the next one 2; where nothing is captured it takes nothing."""
    captured = SimpleNamespace(seconds=0.0, kept=False, times=iter([5.0, 2.0]))

    def step() -> None:
        if not captured.kept:
            captured.seconds += next(captured.times)
        captured.kept = True

    captured.drop = lambda: setattr(captured, "kept", False)
    forward = SimpleNamespace(module=SimpleNamespace(captured=captured))
    engine = SimpleNamespace(state=SimpleNamespace(forward=forward), step=step)
    monkeypatch.setattr(work, "engine_for", lambda *of: engine)
    for name in ("begin", "end"):
        monkeypatch.setattr(work, name, lambda *of: None)
    model: Any = SimpleNamespace(max_positions=512)
    assert capture_s(model) == 2.0
    forward.module.captured = None
    assert capture_s(model) == 0.0


@pytest.mark.parametrize(
    ("family", "kinds", "least", "many"),
    [
        ("qwen3_5_text", "SSSA", ["S", "S", "S", "A"], 8),
        ("lfm2", "SAASA", ["A", "A", "S"], 9),
        ("bamba", "SSASS", ["S", "S", "S", "S", "A"], 10),
        ("nemotron_h", "SEASESESEA", ["S", "S", "E", "E", "A"], 10),
        ("falcon_h1", "HH", ["H"], 9),
    ],
)
def test_layers_that_keep_a_state_are_measured_beside_those_that_attend(
    family: str, kinds: str, least: list[str], many: int
) -> None:
    """A model of one kind alone is none that is admitted."""
    names = {"S": "conv" if family == "lfm2" else "linear_attention", "A": "full_attention", "E": "moe", "H": "hybrid"}
    types = [names[kind] for kind in kinds]
    stated = stating_kinds(family, types)
    if family == "nemotron_h":
        stated = {"layers_block_type": stated["layer_types"]}
    config = tiny_config(family, num_hidden_layers=len(kinds), **stated).to_dict()
    rows = Models.of("it", config, "float32", "cpu", 100).rows
    assert (rows.few_layers, rows.layers) == (len(least), many)
    for model, layers in ((rows.few, len(least)), (rows.many, many)):
        assert model.config.layer_types == [names[kind] for kind in least] * (layers // len(least))
