"""A flow that trains on greedy samples has log-probs of the sampling temperature, as its trainer has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.runs.written import logged, samples_of
from tests.vllm.stand_in import standing_in

FLOW = """
def likelier(prompts, actor):
    samples = actor.generate(prompts, greedy=True)
    actor.train(samples, loss=ratio, old=samples.logprobs, scored=actor.logprobs(samples))


def ratio(batch, old, scored):
    batch.log("ratio", (batch.logprobs - old).exp())
    batch.log("off", (scored - old).abs())
    return batch.aggregate(-(batch.logprobs - old).exp(), "seq-mean-token-mean")
"""


@pytest.mark.parametrize(
    ("engine", "keys"),
    [("plait", {}), ("plait", {"sampling.top_k": 3}), ("vllm", {})],
    ids=["ours", "ours, filtered", "vllm"],
)
def test_the_ratio_of_greedy_samples_is_1(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: Any, engine: str, keys: dict[str, Any]
) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    recipe = make_recipe(
        algorithm=f"{tmp_path}/flow.py:likelier",
        steps=1,
        samples_per_prompt=1,
        options={},
        **{"reward.functions": [], "sampling.temperature": 0.5, "sampling.engine": engine} | keys,
    )
    with standing_in(monkeypatch) if engine == "vllm" else nullcontext():
        run(recipe)
    (row,) = logged(recipe)
    assert row["ratio"] == pytest.approx(1, abs=1e-5)
    assert row["off"] == pytest.approx(0, abs=1e-5)
    assert row["training/rollout_probs_diff_max"] < 1e-5
    said = [finding["rule"] for finding in read_rows(recipe.run_dir / "doctor.jsonl") if "sentence" in finding]
    assert said == ["truncation"]
    assert samples_of(recipe, 1)[0]["sampling_logprobs"]
