"""What single measurements leave out, by stand-ins for the clock."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from plait.cost.measured import measuring, stopwatch
from plait.cost.measured.sizes import Sizes
from plait.models.files.known_shapes import KNOWN


def test_a_copy_is_measured_into_memory_that_was_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that the system gives at the first touch took five times as long as the copy: 128 MiB at 2.6 GB/s, not 15.
    A layer was then said to take that long at least, to read its weights."""
    targets: list[torch.Tensor] = []
    found: list[bool] = []

    def empty_like(source: torch.Tensor) -> torch.Tensor:
        targets.append(torch.zeros_like(source))
        return targets[0]

    def seconds_of(work: Callable[[], object], device: str) -> float:
        found.append(bool(targets[0].all()))
        return 1.0

    monkeypatch.setattr(measuring, "COPIED_BYTES", {"cpu": 16})
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(measuring, "seconds_in_a_row", seconds_of)
    assert measuring.copy_s("cpu") == (1.0,)
    assert found == [True]


def test_links_between_gpus_are_measured_before_this_process_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the models, a GPU had no room for the other process."""
    done: list[str] = []

    def models_of(*of: object) -> None:
        done.append("models")
        raise InterruptedError

    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(measuring, "measure_gpu_links", lambda: done.append("links"))
    monkeypatch.setattr(measuring.Models, "of", models_of)
    for device in ("cuda", "cpu"):
        with pytest.raises(InterruptedError):
            measuring.measure("m", {}, "bfloat16", device, 1)
    assert done == ["links", "models", "models"]


def test_of_a_model_of_images_the_part_for_texts_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer layers were asked of the whole configuration, which names none: both models of a pair had all of them."""
    found: list[object] = []

    def models_of(name: str, config: object, *of: object) -> None:
        found.append(config)
        raise InterruptedError

    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(measuring.Models, "of", models_of)
    for config in ({"text_config": {"num_hidden_layers": 4}, "vision_config": {}}, {"num_hidden_layers": 4}):
        with pytest.raises(InterruptedError):
            measuring.measure("m", config, "bfloat16", "cpu", 1)
    assert found == [{"num_hidden_layers": 4}] * 2


def test_each_kind_of_measurement_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they call, they call as it is: all of them once, of two tiny models."""
    monkeypatch.setattr(stopwatch, "MOST_REPEATS", 1)
    config = {**KNOWN["smollm2-135m"], "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    steps = ((1, 16),)
    sizes = Sizes(rows=(16,), back=(16,), prompts=(16,), products=(16,), decoded=steps, by_layers=steps)
    models = measuring.Models.of("tiny", config, "float32", "cpu", sizes.most_tokens)
    for family, works in measuring._works(models, sizes).items():
        for work in works.values():
            assert all(map(math.isfinite, work())), family
