"""Whole runs on a GPU, in float32, against the same on a CPU, in float64: what was built without one. The first ones
are those of which least is known. Skipped where there is no GPU; `PLAIT_GPU_TESTS=cpu` has a CPU stand in for it, which
shows that they run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests import warm
from tests.models.tiny import save_tiny
from tests.runs.placed_runs import GRPO, KEPT, PPO, SAFE_MODELS, SUMMED, Flow, where
from tests.runs.plans import metrics_of, runs_of_flows, tokens_of
from tests.runs.test_judges import FLOWS

WHERE = os.environ.get("PLAIT_GPU_TESTS") or ("cuda" if warm.HAS_GPU else "")
NUM_GPUS = torch.cuda.device_count() if WHERE == "cuda" else 2
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not WHERE, reason="no GPU")]
CLOSE = 1e-3
"""Of metrics, relative to those above 1."""
WEIGHTS_CLOSE = 1e-4
"""Of all weights, root mean square. Adam moves them by 1e-3 in each of four updates, in whichever direction a gradient
of nearly nothing points."""
EXPECTED: dict[str, Any] = {"device": "cpu", "dtype": "float64", "sampling.speculation": "off"}
"""Float64, as for other dtypes a CPU would have to compile kernels first."""
FOUND: dict[str, Any] = EXPECTED | {"device": WHERE, "dtype": "float32", "sampling.kv_tokens": 2048}
ROUNDING = ("training/rollout_",)
"""Beginnings of the names of metrics that say how two ways round."""

REPLAYED = {"sampling.router_replay": True, "optimizer.router_aux_loss_coef": 0.01}
ADAPTED = ("grpo", GRPO[1] | {"lora.rank": 4})
PARKED = {"max_staleness": 1, "partial_rollout": "keep", "tokens_per_version": 3}
"""Samples stop after so many tokens, and go on behind the next weights with the keys and values that they had."""
TWO_MODELS = {"reward.model": ["PLACE/scorer", "PLACE/other_scorer"], "reward.model_weight": [0.7, 0.3]}


def of_family(family: str, **keys: Any) -> Flow:
    """GRPO of a tiny model of it."""
    return "grpo", GRPO[1] | {"model": f"PLACE/{family}"} | keys


EXPERT_TARGETS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
EXPERTS_ADAPTED = of_family("qwen3_moe", **REPLAYED, **{"lora.rank": 4, "lora.target_modules": EXPERT_TARGETS})
ALONE: dict[str, Flow] = {
    "parked": ("grpo", GRPO[1] | PARKED),
    "parked, routed": of_family("qwen3_moe", **REPLAYED, **PARKED),
    "experts, adapted": EXPERTS_ADAPTED,
    "kept": KEPT,
    "qwen3_5_text": of_family("qwen3_5_text"),
    "bamba": of_family("bamba"),
    "routed": of_family("qwen3_moe", **REPLAYED),
    "summed": SUMMED,
    "several models": ("grpo", GRPO[1] | TWO_MODELS),
    "adapted": ADAPTED,
    "states, adapted": of_family("qwen3_5_text", **{"lora.rank": 4}),
    "kept, adapted, recomputed": ("grpo", KEPT[1] | {"lora.rank": 4, "checkpoint_activations": True}),
    **{family: of_family(family) for family in ("lfm2", "olmo_hybrid", "granitemoehybrid", "falcon_h1", "nemotron_h")},
    "qwen3_next": of_family("qwen3_next", **REPLAYED),
    "safe": SAFE_MODELS,
    "ppo": PPO,
}
TP2 = {"actor.generate": "0,1 tp2", "actor.train": "0,1 tp2", "ref.logprobs": "0,1 pp2"}
PP2 = {"actor.generate": "0,1 pp2", "actor.train": "1,0 pp2", "ref.logprobs": "0,1 dp2"}
DP2 = {"actor.generate": "0 | 1", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"}
AWAY = {"actor.generate": "0 after=offload", "actor.train": "0 after=offload", "ref.logprobs": "0 after=offload"}
"""What idles is in memory of the host."""
GRADIENTS, WEIGHTS = {"optimizer.shard_gradients": True}, {"optimizer.shard_weights": True}
APART = {"actor.generate prefill": "0", "actor.generate": "1", "actor.train": "0,1 dp2", "ref.logprobs": "0"}
TOGETHER: dict[str, tuple[Flow, dict[str, str]]] = {
    "zero-2": (("grpo", GRPO[1] | GRADIENTS), DP2),
    "zero-3": (("grpo", GRPO[1] | WEIGHTS | {"checkpoint_activations": True}), DP2),
    "zero-3, adapted": (("grpo", ADAPTED[1] | WEIGHTS), DP2),
    "tokens-tp2": (("grpo", GRPO[1] | {"sequence_parallel": True}), TP2),
    "tokens, recomputed-tp2": (of_family("qwen3_moe", sequence_parallel=True, checkpoint_activations=True), TP2),
    "experts, adapted-tp2": (EXPERTS_ADAPTED, TP2),
    "parked-dp2": (ALONE["parked"], DP2),
    "apart": (GRPO, APART),
    "adapted-tp2": (ADAPTED, TP2),
    "kept-tp2": (KEPT, TP2),
    "routed-pp2": (ALONE["routed"], PP2),
    "routed-tp2": (ALONE["routed"], TP2),
    "qwen3_5_text-tp2": (ALONE["qwen3_5_text"], TP2),
    "bamba-pp2": (ALONE["bamba"], PP2),
    "summed-pp2": (SUMMED, PP2),
}
"""On two GPUs."""


@pytest.fixture(scope="module")
def on(place: Path, placed: Callable[..., Recipe]) -> Callable[..., Path]:
    """The folder of a run on a device, which is run once."""

    def folder_of(name: str, flow: Flow, device: Mapping[str, Any], **keys: Any) -> Path:
        tree = flow[1] | device | {"steps": 2} | keys
        model = place / tree.get("model", "PLACE/").removeprefix("PLACE/")
        if not model.exists():
            save_tiny(model, family=model.name, weight_scale=0.05)
        recipe = placed(flow[0], name, **tree)
        if not recipe.run_dir.exists():
            assert run(recipe).finished
        return recipe.run_dir

    return folder_of


def assert_close(found: Path, expected: Path) -> None:
    """The same tokens; metrics within CLOSE, weights within WEIGHTS_CLOSE."""
    assert tokens_of(found) == tokens_of(expected)
    pairs = zip(map(exact, metrics_of(found)), map(exact, metrics_of(expected)), strict=True)
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        far = {name: (mine[name], one) for name, one in theirs.items() if not near(mine[name], one)}
        assert not far, far
    weights, others = (load_file(next((folder / "final").glob("*.safetensors"))) for folder in (found, expected))
    assert weights.keys() == others.keys()
    off = torch.cat([(tensor.double() - others[name].double()).flatten() for name, tensor in weights.items()])
    assert float(off.square().mean().sqrt()) <= WEIGHTS_CLOSE


def exact(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith(ROUNDING)}


def near(mine: float, theirs: float) -> bool:
    return mine == theirs or abs(mine - theirs) <= CLOSE * max(1.0, abs(theirs))


def _needs(flow: Flow) -> None:
    if "lora.rank" in flow[1]:
        pytest.importorskip("peft")


@pytest.mark.parametrize("name", ALONE)
def test_a_gpu_trains_as_a_cpu(name: str, on: Callable[..., Path]) -> None:
    _needs(ALONE[name])
    assert_close(on(f"found {name}", ALONE[name], FOUND), on(f"expected {name}", ALONE[name], EXPECTED))


def test_what_is_away_when_idle_comes_back_to_a_gpu(place: Path, on: Callable[..., Path]) -> None:
    away = on("found away", GRPO, FOUND, **where(place, "away", AWAY))
    assert_close(away, on("expected away", GRPO, EXPECTED))


@pytest.mark.parametrize("flow", ["judged", "by_itself"])
def test_judges_on_a_gpu_say_what_they_say_on_a_cpu(flow: str, tiny_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"what is {i} plus 4?", "solution": str(i + 4)} for i in range(6)]
    make = runs_of_flows(FLOWS, rows, tiny_folder, tmp_path)
    made = [make(flow, name, **keys) for name, keys in (("found", FOUND), ("expected", EXPECTED))]
    for recipe in made:
        assert run(recipe).finished
    assert_close(*(recipe.run_dir for recipe in made))


@pytest.mark.skipif(NUM_GPUS < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("name", TOGETHER)
def test_two_gpus_train_as_a_cpu(name: str, place: Path, on: Callable[..., Path]) -> None:
    flow, plan = TOGETHER[name]
    _needs(flow)
    assert_close(on(f"found {name}", flow, FOUND, **where(place, name, plan)), on(f"expected {name}", flow, EXPECTED))
