"""float32 under every plan: recorded tokens are replayed, so that rounding moves no draw, and the numbers of each token
and the gradients are those of one process to 1e-5."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from plait.generation import sampler
from plait.generation.engine import Engine
from plait.generation.sampler import SamplingRows
from plait.kernels.noise import DrawNoise
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.workers import instances
from tests.runs.placed_runs import OWN_FLOW, PLANS, where
from tests.runs.plans import metrics_of, tokens_of

STEPS = 3
TOLERANCE = 1e-5
EPSILON = 1e-3
"""Of AdamW: by its usual one a gradient that is zero but for rounding moves its weight as far as any other does."""
ALGORITHMS = {"grpo": "grpo", "ppo": "ppo", "safe_rlhf": "safe_rlhf", "own": "baseline_flow"}
REPLAYED = {name: case for name, case in PLANS.items() if case[0][0] in ALGORITHMS}
REPLAY = """
import json
from pathlib import Path

import torch

from plait.generation.engine import Engine
from plait.workers import instances

# Key of a draw → the token that was drawn there.
told = {int(key): token for key, token in json.loads(Path("TOLD").read_text()).items()}


def replayed(logits_BV, noise_B, rows):
    assert rows.temperature_B1 is None
    token_ids_B = torch.tensor([told[key] for key in noise_B.keys.tolist()])
    return token_ids_B, logits_BV.log_softmax(-1).gather(1, token_ids_B[:, None])[:, 0]


instances.sample = replayed
Engine.__init__.__kwdefaults__["choose"] = replayed
"""


def smooth_of(flow: str) -> dict[str, float]:
    """Of the roles that a flow trains."""
    roles = {"grpo": [""], "safe_rlhf": ["", "critic.", "cost_critic."]}.get(flow, ["", "critic."])
    return {f"{role}optimizer.epsilon": EPSILON for role in roles}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Let engines draw by another function; theirs comes back, also after a flow that replaces it in this process."""

    defaults = Engine.__init__.__kwdefaults__
    assert defaults is not None

    def draw_by(choose: Any) -> None:
        monkeypatch.setattr(instances, "sample", choose)
        monkeypatch.setitem(defaults, "choose", choose)

    draw_by(sampler.sample)
    return draw_by


@pytest.fixture(scope="module")
def recorded(place: Path, placed: Callable[..., Recipe]) -> Callable[[str, dict[str, Any], Any], Path]:
    """A flow's run on one process, and its tokens; run once."""

    def get(flow: str, keys: dict[str, Any], engines: Callable[[Any], None]) -> Path:
        keys = keys | {"steps": STEPS}
        name = f"recorded_{flow}_{zlib.crc32(repr(sorted(keys.items())).encode()):08x}"
        if not (place / name).exists():
            told: dict[int, int] = {}

            def choose(logits_BV: Tensor, noise_B: DrawNoise, rows: SamplingRows) -> tuple[Tensor, Tensor]:
                # Not what an engine draws by itself under these keys: only a replay says it again.
                other_B = replace(noise_B, sample_keys=noise_B.sample_keys + 1)
                token_ids_B, logprobs_B = sampler.sample(logits_BV, other_B, rows)
                told.update(zip(noise_B.keys.tolist(), token_ids_B.tolist(), strict=True))
                return token_ids_B, logprobs_B

            engines(choose)
            run(placed(flow, name, dtype="float32", **keys, **smooth_of(flow)))
            (place / f"{name}.json").write_text(json.dumps(told))
        return place / name

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLAYED)
def test_recorded_tokens_have_the_same_numbers(
    name: str,
    place: Path,
    placed: Callable[..., Recipe],
    engines: Callable[[Any], None],
    recorded: Callable[[str, dict[str, Any], Any], Path],
) -> None:
    (flow, keys), plan = REPLAYED[name]
    expected = recorded(flow, keys, engines)
    # A file for each plan: one process loads a file once, and what it replaced here has come back since.
    source = OWN_FLOW if flow == "own" else f"from plait.algorithms.{flow} import {flow} as {flow}\n"
    (place / f"replay_{name}.py").write_text(source + REPLAY.replace("TOLD", f"{expected}.json"))
    algorithm = f"PLACE/replay_{name}.py:{ALGORITHMS[flow]}"
    there = where(place, name, plan)
    keys = keys | {"steps": STEPS, "dtype": "float32"}
    recipe = placed(flow, name, **keys, **there, **smooth_of(flow), algorithm=algorithm)
    run(recipe)
    found = recipe.run_dir
    assert tokens_of(found) == tokens_of(expected)
    compared = set()
    for path in sorted((expected / "samples").iterdir()):
        for mine, theirs in zip(read_rows(found / "samples" / path.name), read_rows(path), strict=True):
            for column in (key for key in theirs if key.endswith("logprobs")):
                compared.add(column)
                near = pytest.approx(theirs[column], rel=TOLERANCE, abs=TOLERANCE)
                assert mine[column] == near, (path.name, column)
    assert {"sampling_logprobs", "ref_logprobs"} <= compared
    for mine, theirs in zip(metrics_of(found), metrics_of(expected), strict=True):
        norms = [key for key in theirs if key.endswith("grad_norm")]
        assert "actor/grad_norm" in norms
        for norm in norms:
            assert mine[norm] == pytest.approx(theirs[norm], rel=TOLERANCE), (theirs["step"], norm)
