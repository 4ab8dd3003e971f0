"""A run whose leader hears no signal: who started it leaves, and says where one can go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.errors import RESUME
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.processes import until

DEAF = """
import pathlib, signal, time

from plait.dataflow import per_group

here = pathlib.Path(__file__).parent


def flow(prompts, actor, reward):
    samples = actor.generate(prompts)
    advantages = per_group(deaf, reward.score(samples), name="advantages")
    actor.train(samples, loss=pushed, advantages=advantages)


def pushed(batch, advantages):
    return batch.aggregate(-advantages * batch.logprobs, "token-mean")


def deaf(scores):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    if (here / "hang").exists():
        (here / "busy").touch()
        time.sleep(60)
    return scores - scores.mean()
"""


@pytest.mark.slow
def test_a_run_whose_leader_does_not_answer_says_what_is_good(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    (tmp_path / "flow.py").write_text(DEAF)
    keys = {"algorithm": f"{tmp_path}/flow.py:flow", "options": {}, "devices": 2, "checkpoint.every": 1}
    recipe = make_recipe(steps=3, **keys)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    run(make_recipe(steps=1, **keys))
    (tmp_path / "hang").touch()
    command = [sys.executable, "-m", "plait", "train", str(path), "--resume"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert until((tmp_path / "busy").exists, 240)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    where = f"{recipe.run_dir}/checkpoints/step-1"
    assert process.returncode == 130
    assert said.endswith(f"left at once; the checkpoint of step 1 is good ({where}); go on from it with {RESUME}\n")
