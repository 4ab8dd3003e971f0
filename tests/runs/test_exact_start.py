"""A role that trains in bfloat16 begins with the numbers of its checkpoint, not with what bfloat16 makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plait.models.loading import load_model, merged
from plait.models.lora import add_lora
from plait.models.lora_files import save_adapter
from plait.models.lora_settings import LoraSettings
from plait.models.parallel.part_loading import PartLoader
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.export import export_checkpoint
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.placed_runs import GRPO, PPO_MODEL, Flow
from tests.runs.plan_files import write_plan
from tests.runs.test_resume import kill_in_step
from tests.runs.written import logged

STILL = {"dtype": "bfloat16", "optimizer.learning_rate": 1e-12, "steps": 1}
"""Nothing is learned: what is saved is what the masters began as."""
CALLS = ("actor.generate", "actor.train", "ref.logprobs")
CASES: dict[str, tuple[Flow, str, str | dict[str, str] | None]] = {
    "one process": (GRPO, "actor", None),
    "dp2": (GRPO, "actor", {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0"}),
    "tp2": (GRPO, "actor", {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "ref.logprobs": "0"}),
    "pp2": (GRPO, "actor", {"actor.generate": "0,1 dp2", "actor.train": "0,1 pp2", "ref.logprobs": "0"}),
    "a critic": (("ppo", PPO_MODEL[1] | {"critic.optimizer.learning_rate": 1e-12}), "critic", None),
    "followed": (("grpo", GRPO[1] | {"reference.sync_every": 1, "reference.mixup": 1.0}), "actor", None),
}


@pytest.mark.parametrize("name", slow_but(("one process", "tp2"), CASES))
def test_masters_begin_as_what_is_stored(name: str, place: Path, placed: Callable[..., Recipe], tmp_path: Path) -> None:
    flow, role, places = CASES[name]
    keys: dict[str, Any] = flow[1] | STILL
    if places is not None:
        keys["plan"] = str(write_plan(place, f"exact-{name}", places))
    recipe = placed(flow[0], f"exact {name}", **keys)
    assert run(recipe).finished
    export_checkpoint(recipe.run_dir, tmp_path / "out", role=role, dtype="float32")
    begun, stored = (load_file(Path(folder) / "model.safetensors") for folder in (tmp_path / "out", recipe.model))
    judge(begun, stored)


def judge(begun: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    compared = begun.keys() & stored.keys()
    assert compared >= {name for name in stored if name.startswith("model.layers")}
    for tensor in compared:
        torch.testing.assert_close(begun[tensor], stored[tensor], rtol=1e-6, atol=1e-9)
        if stored[tensor].dim() > 1:
            assert not torch.equal(stored[tensor].bfloat16().float(), stored[tensor]), "they have more digits"


@pytest.mark.parametrize("cut", slow_but(("tp2",), ("", "tp2", "pp2")))
def test_of_experts_that_are_stored_one_by_one(
    cut: str, place: Path, placed: Callable[..., Recipe], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "experts", family="qwen3_moe")
    keys: dict[str, Any] = GRPO[1] | STILL | {"model": str(folder)}
    if cut:
        keys["plan"] = str(write_plan(place, f"experts-{cut}", dict.fromkeys(CALLS, f"0,1 {cut}")))
    recipe = placed(GRPO[0], f"experts {cut}", **keys)
    assert run(recipe).finished
    export_checkpoint(recipe.run_dir, tmp_path / "out", dtype="float32")
    stored = load_file(folder / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in stored
    judge(load_file(tmp_path / "out" / "model.safetensors"), stored)


@pytest.mark.parametrize("cut", slow_but(("",), ("", "tp2")))
@pytest.mark.parametrize("dtype", slow_but((torch.float32,), (torch.float32, torch.bfloat16)), ids=str)
def test_of_an_adapter_that_is_merged(
    dtype: torch.dtype, cut: str, place: Path, placed: Callable[..., Recipe], tmp_path: Path
) -> None:
    """The reference is what training begins with: it is merged alike."""
    pytest.importorskip("peft")
    base = save_tiny(tmp_path / "base", dtype=dtype)
    view: Any = add_lora(load_model(str(base), dtype="float32"), LoraSettings(rank=2), name="it", seed=0)
    with torch.no_grad():
        view.trained.weights.add_(torch.linspace(-0.1, 0.1, view.trained.layout.num_elements))
    save_adapter(view, tmp_path / "adapter")
    keys: dict[str, Any] = GRPO[1] | STILL | {"model": str(tmp_path / "adapter")}
    if cut:
        keys["plan"] = str(write_plan(place, f"merged-{cut}", dict.fromkeys(CALLS, f"0,1 {cut}")))
    recipe = placed(GRPO[0], f"merged {cut} {dtype}", **keys)
    assert run(recipe).finished
    assert logged(recipe)[0]["kl"] == pytest.approx(0, abs=1e-3 if cut else 0)
    export_checkpoint(recipe.run_dir, tmp_path / "out", dtype="float32")
    expected = load_model(str(tmp_path / "adapter"), dtype="float32", adapt=merged).module.state_dict()
    judge(load_file(tmp_path / "out" / "model.safetensors"), {n: w for n, w in expected.items() if "proj" in n})


def test_a_run_that_is_resumed_reads_nothing_to_begin_with(
    placed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint has the masters; without one it begins as any run."""
    keys: dict[str, Any] = GRPO[1] | {"dtype": "bfloat16", "checkpoint.every": 1, "steps": 1}
    recipe, found = placed(GRPO[0], "resumed", **keys), PartLoader.stored
    asked: list[str] = []
    monkeypatch.setattr(PartLoader, "stored", lambda loader, *of, **scalar: asked.append(*of) or found(loader, *of))
    kill_in_step(recipe, 0)
    assert run(recipe, resume=True).finished
    assert asked == [recipe.model], "no step was saved"
    asked.clear()
    assert run(recipe.model_copy(update={"steps": 2}), resume=True).finished
    assert not asked
