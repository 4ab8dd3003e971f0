"""What most processes of tests do, done once in the template that they are forks of (see `warm`).

A process that generates and trains for the first time imports late what its libraries import late, and loads compiled
kernels from their cache: a second and a half, of a run that takes half a second where it is the second one. Nothing
that a program could tell is left behind: no random number is drawn, and no model is kept. But what passes its
self-check in one of the forks, or where tests check once, has passed it in all: a fifth of what a rank of a tiny run
computes. `make test-all`, whose processes are no forks, has all of them check.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from plait.generation.engine import Engine, drain
from plait.generation.settings import SamplingSettings
from plait.models import language_loading, scalar_loading
from tests.generation.requests import request
from tests.models.tiny import save_tiny, self_check_once
from tests.training.batches import make_trainer, random_rows, run_all, token_mean, train


def rehearse() -> None:
    """Read a tiny model, generate with it and train it, in the dtypes of most tests."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        save_tiny(Path(folder))
        for dtype in ("float32", "float64"):
            model = language_loading.load_model(folder, dtype=dtype)
            engine = Engine(model, SamplingSettings(max_running=2))
            engine.add(request(0, 5, [3, 4, 2]))
            assert engine.state.forward.refusals.compiled is None or dtype == "float64"
            for _ in drain(engine):
                pass
            run_all(train(make_trainer(model), random_rows(), {}, token_mean))
    language_loading.self_check = scalar_loading.self_check = self_check_once()
