"""`plait export`: the dtype is that of the run unless another is asked for, and steps that are not there are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait.cli import main
from plait.recipes.recipe import Recipe
from tests.cli.recipes import write_recipe


def test_export_defaults_to_the_dtype_of_the_run_and_lists_the_steps(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(**{"checkpoint.every": 1, "checkpoint.keep_last": 2})
    assert main(["train", str(write_recipe(recipe, tmp_path / "recipe.json"))]) == 0
    run_dir, out = str(recipe.run_dir), tmp_path / "exported"
    capsys.readouterr()
    assert main(["export", run_dir, "--out", str(out), "--step", "7"]) == 2
    assert capsys.readouterr().err.endswith("has no checkpoint of step 7; there are: 1, 2\n")
    assert main(["export", run_dir, "--out", str(out), "--step", "1"]) == 0
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.float32}
    assert main(["export", run_dir, "--out", str(out)]) == 2
    assert main(["export", run_dir, "--out", str(out), "--overwrite", "--dtype", "bfloat16"]) == 0
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert main(["export", str(tmp_path), "--out", str(out)]) == 2
    around = capsys.readouterr().err
    assert "holds no run" in around
    assert around.endswith(f"; give one of `{run_dir}`\n")
    assert main(["export", str(tmp_path / "nothing"), "--out", str(out)]) == 2
    assert capsys.readouterr().err.endswith("; give the folder of a run\n")
    assert main(["export", f"{run_dir}n", "--out", str(out)]) == 2
    assert capsys.readouterr().err.endswith("; give the folder of a run (did you mean `run`?)\n")
    assert main(["export", f"{run_dir}/checkpoints/step-2/", "--out", str(out)]) == 2
    assert f"is a checkpoint of the run `{run_dir}`: give that, with `--step 2`" in capsys.readouterr().err
    assert main(["export", f"{run_dir}/final", "--out", str(out)]) == 2
    assert f"; it is a Hugging Face folder already; the run is `{run_dir}`: give that" in capsys.readouterr().err
    assert main(["export", f"{run_dir}/checkpoints", "--out", str(out)]) == 2
    assert capsys.readouterr().err.endswith(f"does not exist; the run is `{run_dir}`: give that\n")
