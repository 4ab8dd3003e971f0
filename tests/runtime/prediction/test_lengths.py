"""Lengths that a run had, read from its files of samples."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

from plait.cost.lengths import Lengths, SampleLengths
from plait.observe.run_log import write_rows
from plait.recipes.recipe import Recipe
from plait.runtime.prediction.lengths import lengths_of
from plait.runtime.prepare import outline


def test_samples_of_the_last_steps_are_read_a_step_at_a_time(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """All twenty at once take tens of gigabytes of a run with thousands of long samples."""
    run, there = outline(make_recipe()), SampleLengths(Lengths.fixed(1), Lengths.fixed(1))
    most = run.recipe.sampling.max_response_tokens

    def peak_bytes(steps: int) -> int:
        for step in range(1, steps + 1):
            rows = [
                {"prompt_ids": [1, 2, 3, uid], "token_ids": [9] * 300, "sampling_logprobs": [-0.5 - uid] * 300}
                for uid in range(20)
            ]
            write_rows(tmp_path / f"samples/step-{step:06d}.jsonl", rows)
        tracemalloc.start()
        lengths = lengths_of(str(tmp_path), run, lambda: there)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert set(lengths.prompts.values) == {4}
        assert set(lengths.responses.values) == {most}
        return peak

    peak_bytes(1)  # with what is imported
    of_one = peak_bytes(1)
    assert peak_bytes(12) < 1.5 * of_one


def test_what_is_made_of_samples_has_lengths_of_its_own(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        "from plait.dataflow import build_prompts\n"
        "def asks(prompts):\n    return prompts\n"
        "def judged(prompts, actor, judge):\n"
        "    samples = actor.generate(prompts)\n"
        "    judge.generate(build_prompts(samples, asks))\n"
        "    actor.train(samples, loss=lambda batch: batch)\n"
    )
    run = outline(make_recipe(algorithm=f"{tmp_path}/flow.py:judged", options={}, **{"reward.functions": []}))
    rows = [
        {"rollout": "actor.generate", "prompt_ids": [1] * 5, "token_ids": [2] * 3},
        {"rollout": "judge.generate", "prompt_ids": [1] * 9, "token_ids": [2] * 2},
    ]
    write_rows(tmp_path / "samples/step-000001.jsonl", rows)
    found = lengths_of(str(tmp_path), run, lambda: SampleLengths(Lengths.fixed(1), Lengths.fixed(1)))
    assert (found.prompts.values, found.responses.values) == ((5,), (3,))
    made = found.of("judge.generate")
    assert (made.prompts.values, made.responses.values) == ((9,), (2,))
