"""A folder with a LoRA adapter alone, as peft and plait write it, is sampled from, evaluated and trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.cli import main
from plait.errors import ModelError
from plait.models.files.hub import read_config
from plait.models.loading import load_model
from plait.models.lora import add_lora
from plait.models.lora_files import save_adapter
from plait.models.lora_settings import LoraSettings
from plait.recipes.recipe import Recipe


@pytest.fixture
def adapter(tiny_folder: Path, tmp_path: Path) -> Path:
    """An adapter of rank 2, with a B that is not 0."""
    view = add_lora(load_model(str(tiny_folder), dtype="float32"), LoraSettings(rank=2), name="actor", seed=0)
    with torch.no_grad():
        view.trained.weights.add_(0.05)
    folder = tmp_path / "adapter"
    save_adapter(view, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(tiny_folder)}))
    return folder


def answers(model: Path, tmp_path: Path, name: str) -> list[tuple[list[int], list[float]]]:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / name
    prompts.write_text('{"prompt": "what is 1 plus 4?"}\n{"prompt": "what is 2 plus 4?"}\n')
    argv = ["generate", "--model", str(model), "--prompts", str(prompts), "--out", str(out), "--dtype", "float32"]
    assert main([*argv, "--temperature", "0", "--max-tokens", "8", "--threads", "1"]) == 0
    return [(row["token_ids"], row["logprobs"]) for row in map(json.loads, out.read_text().splitlines())]


def test_generate_with_an_adapter_computes_as_peft_does(adapter: Path, tiny_folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with_adapter, without = answers(adapter, tmp_path, "with.jsonl"), answers(tiny_folder, tmp_path, "without.jsonl")
    assert with_adapter[0][1] != pytest.approx(without[0][1], abs=1e-3)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_folder), adapter).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    message = [{"role": "user", "content": "what is 1 plus 4?"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    response, logprobs = with_adapter[0]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == response
    theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
    assert logprobs == pytest.approx(theirs.tolist(), abs=1e-4)


def test_eval_with_an_adapter_is_that_of_its_weights(
    adapter: Path, tiny_folder: Path, make_recipe: Callable[..., Recipe], tmp_path: Path, capsys
) -> None:
    """Whether the recipe trains adapters or not: a recipe with `lora` must not measure the model under it."""
    (tmp_path / "r.py").write_text("def size(completions, **columns):\n    return [len(c) for c in completions]\n")
    path = tmp_path / "recipe.json"

    def size(model: Path, rank: int) -> float:
        functions = {"reward.functions": [f"{tmp_path}/r.py:size"]}
        path.write_text(json.dumps(make_recipe(**{"lora.rank": rank, **functions}).model_dump(mode="json")))
        assert main(["eval", str(path), "--model", str(model), "--evaluation.items", "2", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["eval/reward"]

    assert size(adapter, 0) == size(adapter, 4) != size(tiny_folder, 4)


def test_training_says_that_it_merges_an_adapter(
    adapter: Path, make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(make_recipe(steps=1).model_dump(mode="json")))
    assert main(["train", str(path), "--model", str(adapter)]) == 0
    assert (
        f"the adapter {adapter}, which is merged into the weights, as without `lora` all are" in capsys.readouterr().err
    )


def test_a_dry_run_takes_an_adapter(adapter: Path, make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(make_recipe().model_dump(mode="json")))
    assert main(["train", str(path), "--model", str(adapter), "--lora.rank", "2", "--dry-run"]) == 0
    assert main(["train", str(path), "--model", str(adapter), "--lora.rank", "4", "--dry-run"]) == 2


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (None, "does not say which model the adapter was trained on; set `base_model_name_or_path` there"),
        (
            "no/such/folder/here",
            "was trained on 'no/such/folder/here', which cannot be loaded; correct `base_model_name_",
        ),
    ],
)
def test_a_base_that_is_missing(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], base: str | None, said: str
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    argv = ["generate", "--model", str(adapter), "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "o")]
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_an_adapter_on_an_adapter_is_refused(adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(adapter)}))
    with pytest.raises(ModelError, match="which is itself only an adapter; set `base_model_name_or_path` there"):
        read_config(str(adapter))


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    name, tensor = next(iter(load_file(weights).items()))
    save_file({**load_file(weights), name: tensor[:, :1].clone()}, weights)
    with pytest.raises(ValueError, match="does not fit this model"):
        load_model(str(adapter), dtype="float32")


def test_the_configuration_of_an_adapter_is_that_of_its_base(adapter: Path, tiny_folder: Path) -> None:
    assert read_config(str(adapter)) == read_config(str(tiny_folder))
