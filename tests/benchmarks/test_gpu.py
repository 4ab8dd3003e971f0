"""The benchmark of a GPU: what it counts, by hand; that a part ends when it must; and that it runs, on a CPU."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from plait.models.shape import ModelShape
from tests.benchmarks.scripts import BENCHMARKS, output_of

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def gpu(imported: Callable[[str], ModuleType]) -> ModuleType:
    return imported("gpu")


def options_of(gpu: ModuleType, *arguments: str) -> argparse.Namespace:
    return gpu._parser().parse_args(arguments)


def test_all_parts_together_take_25_minutes_at_most(gpu: ModuleType) -> None:
    ordered = gpu.order(list(gpu.LIMITS), ("135M", "1.5B"))
    assert {part for part, _ in ordered} == set(gpu.LIMITS)
    assert sum(gpu.LIMITS[part] for part, _ in ordered) <= 25 * 60


def test_what_says_most_comes_first_and_of_the_small_model(gpu: ModuleType) -> None:
    said = [f"{part} {shape}".rstrip() for part, shape in gpu.order(list(gpu.LIMITS), ("135M", "1.5B"))]
    assert said[:3] == ["tokens 135M", "decode 135M", "training 135M"]
    assert said[3:7] == ["tokens 1.5B", "decode 1.5B", "training 1.5B", "tests"]
    assert said[7:10] == ["predicted 135M", "predicted 1.5B", "two"]
    assert gpu.order(["two", "decode"], ("tiny",)) == [("decode", "tiny"), ("two", "")]


def test_a_part_that_takes_too_long_is_stopped_and_the_next_one_runs(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    says = {
        "decode": "import time\ndef stand_still(): time.sleep(60)\nstand_still()",
        "training": "print('trained')",
        "two": "import sys; print('first'); print('last', file=sys.stderr); sys.exit(3)",
    }
    monkeypatch.setattr(gpu, "command_of", lambda part, *of: [sys.executable, "-c", says[part]])
    asked = ["--limit-s", "2", "--folder", str(tmp_path / "models"), "--report", str(tmp_path / "report")]
    assert gpu.main(["--tiny", "--parts", "decode,training,two", *asked]) == 1
    out = capfd.readouterr().out
    assert "-- decode tiny: stopped after 2 s" in out
    assert "-- training tiny: done" in out
    assert "-- two: exit code 3" in out
    logs = {name: (tmp_path / "report" / f"{name}.log").read_text() for name in says}
    assert "in stand_still" in logs["decode"], "it says where it was stopped"
    assert logs["two"] == "first\nlast\n"
    assert all(text in out for text in logs.values())
    machine, *ended = results(tmp_path / "report")
    assert machine["torch"] == torch.__version__
    assert [(one["part"], one["shape"], one["ended"]) for one in ended] == [
        ("decode", "tiny", "stopped after 2 s"),
        ("training", "tiny", "done"),
        ("two", "", "exit code 3"),
    ]


def test_each_shape_is_a_process_with_the_time_of_the_part(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A part that has less than half of its time left is not begun."""
    seconds = {"135M": 0, "1.5B": 60}
    shape_of = "import json, sys, time; (shape,) = json.load(open(sys.argv[1]))['shapes']; "
    command = [sys.executable, "-c", f"{shape_of} time.sleep({seconds}[shape])"]
    monkeypatch.setattr(gpu, "command_of", lambda part, job, options: [*command, str(job)])
    monkeypatch.setattr(gpu, "LIMITS", {"decode": 2})
    job = gpu.Job("cpu", "float32", ("135M", "1.5B"), True, str(tmp_path), str(tmp_path))
    options, forever = options_of(gpu, "--tiny"), float("inf")
    assert gpu.run_part("decode", "135M", job, options, forever) == "done"
    assert gpu.run_part("decode", "1.5B", job, options, forever) == "stopped after 2 s"
    monkeypatch.setattr(gpu, "LIMITS", {"decode": 60, "two": 6})
    until = time.monotonic() + 8
    assert gpu.run_part("decode", "135M", job, options, until) == "not begun: there is no time left"
    of_two = job.of_shape("135M")  # shorter, so there is time
    assert gpu.run_part("two", "", of_two, options, until) == "done"
    assert [(one["part"], one["shape"], one["ended"]) for one in results(tmp_path)] == [
        ("decode", "135M", "done"),
        ("decode", "1.5B", "stopped after 2 s"),
        ("decode", "135M", "not begun: there is no time left"),
        ("two", "", "done"),
    ]


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_what_is_not_there_is_left_out(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    nowhere = str(tmp_path / "python")
    assert gpu.main(["--tiny", "--parts", "vllm,ppo", "--ppo-python", nowhere, "--vllm-python", nowhere]) == 0
    out = capfd.readouterr().out
    assert "left out: no vLLM" in out
    assert "left out: no TRL 1.10" in out


@pytest.mark.parametrize(
    ("asked", "place"),
    [([], "gpu-report"), (["--folder", "models"], "models"), (["--folder", "models", "--report", "found"], "found")],
    ids=str,
)
def test_what_was_found_stays(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "command_of", lambda part, *of: [sys.executable, "-c", "print('trained')"])
    assert gpu.main(["--tiny", "--parts", "training", *asked]) == 0
    assert [one["part"] for one in results(tmp_path / place)] == ["machine", "training"]
    assert (tmp_path / place / "training.log").read_text() == "trained\n"


def test_what_tests_need_is_named(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"pytest", "pytest_timeout", "hypothesis"}
    monkeypatch.setattr(gpu, "find_spec", lambda name: object() if name in there else None)
    assert gpu.lacks("tests", options_of(gpu)) is None
    there -= {"pytest_timeout", "hypothesis"}
    assert gpu.lacks("tests", options_of(gpu)) == "pytest-timeout, hypothesis: not installed"


def test_peers_are_given_the_device(gpu: ModuleType, tmp_path: Path) -> None:
    command = gpu.command_of("ppo", tmp_path / "job.json", options_of(gpu))
    assert command[command.index("--device") + 1] == "cuda"
    assert command[command.index("--peer-precision") + 1] == "bfloat16"
    assert "--device" not in gpu.command_of("ppo", tmp_path / "job.json", options_of(gpu, "--tiny"))


def test_what_a_decode_step_reads(gpu: ModuleType) -> None:
    """Weights: 3 layers of 8·8 + 2·8·4 + 8·8 + 3·8·16 + 2·8 numbers, 8 of the last norm, 32·8 of the embedding."""
    decode = importlib.import_module("on_device.decode")
    shape = ModelShape.from_config(LLAMA, "a llama")
    weights = 3 * (64 + 64 + 64 + 384 + 16) + 8 + 256
    assert decode.read_bytes(shape, 0, "bfloat16") == 2 * weights
    # a token held: keys and values of 2 heads of 2 numbers in 3 layers
    assert decode.read_bytes(shape, 10, "float32") == 4 * (weights + 10 * 24)


def test_what_training_computes(gpu: ModuleType) -> None:
    training = importlib.import_module("on_device.training")
    shape = ModelShape.from_config(LLAMA, "a llama")
    # prompts of 3 tokens: 6 pairs; a response of 2: 2·3 with the prompt, 3 of its own
    assert training.pairs(groups=2, samples=4, prompt_tokens=3, tokens=2) == 2 * (6 + 4 * 9)
    # a pair: 2 numbers of a head times 4 heads, in scores and in sums over values, in 3 layers; 2 FLOPs each
    assert training.flops(shape, 0, 1) == 3 * (2 * 2 * 8 * 3)
    assert training.flops(shape, 5, 0) == 3 * 2 * 5 * shape.parameters


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    parts = "tokens,decode,training,predicted,two"
    asked = ["--tiny", "--parts", parts, "--limit-s", "300", "--report", str(tmp_path)]
    printed = output_of("gpu.py", *asked)
    assert "12 of 12 greedy tokens are those of Transformers" in printed
    assert "goal 70% of the roofline" in printed
    assert "tiny, 40 tokens, recomputed activations: forward and backward" in printed
    assert "tiny: step: predicted " in printed
    assert "tiny, rank 0: predicted " in printed
    assert "two processes on one device: gloo connects them" in printed
    found = results(tmp_path)
    assert {one["part"] for one in found} == {"machine", *parts.split(",")}
    assert {one["ended"] for one in found if "ended" in one} == {"done"}
    assert [one["samples"] for one in found if "step_s" in one] == [1, 2]
    assert [one["checkpoints"] for one in found if "mfu" in one] == [True, False]
    assert "step" in {one["name"] for one in found if one["part"] == "predicted" and "name" in one}


def test_without_a_gpu_it_says_what_runs_on_a_cpu(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(gpu, "find_spec", lambda name: object())
    assert gpu.main(["--parts", "decode"]) == 2
    assert "expected a CUDA device, found none; `--tiny` runs on a CPU" in capfd.readouterr().err


def test_what_plait_needs_is_asked_for_before_any_part(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name in ("gguf", "yaml") else object())
    assert gpu.main(["--tiny", "--parts", "decode"]) == 2
    assert "found no pyyaml, gguf; `pip install` them" in capfd.readouterr().err


def test_what_lacks_something_itself_is_named_before_any_part(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(module: str) -> None:
        raise ImportError("No module named 'typing_inspection'")

    monkeypatch.setattr(gpu, "import_module", fails)
    monkeypatch.setattr(gpu, "NEEDED", {"pydantic": "pydantic"})
    assert gpu.main(["--tiny", "--parts", "decode"]) == 2
    assert "expected pydantic to be imported, found: No module named 'typing_inspection'" in capfd.readouterr().err


def test_what_is_asked_for_is_what_plait_depends_on(gpu: ModuleType) -> None:
    project = tomllib.loads((BENCHMARKS.parent / "pyproject.toml").read_text())["project"]
    assert set(gpu.NEEDED.values()) == {re.split("[>=<]", one)[0] for one in project["dependencies"]}


def test_tests_of_gpus_are_found(gpu: ModuleType) -> None:
    assert str(BENCHMARKS.parent / "tests/generation/test_engine.py") in gpu.tests_of_gpus()
