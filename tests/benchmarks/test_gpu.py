"""The benchmark of a GPU: what it counts, by hand; that a part ends when it must; and that it runs, on a CPU."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from plait.data.records import FinishReason, Prompt, Sample
from plait.models.shape import ModelShape
from plait.speculation.counts import Counts
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


def test_all_parts_together_take_28_minutes_at_most(gpu: ModuleType) -> None:
    ordered = gpu.order(list(gpu.LIMITS), ("135M", "1.5B"))
    assert {part for part, _ in ordered} == set(gpu.LIMITS)
    assert sum(gpu.LIMITS[part] for part, _ in ordered) <= 28 * 60


def test_what_is_newest_and_says_most_comes_first(gpu: ModuleType) -> None:
    said = [f"{part} {shape}".rstrip() for part, shape in gpu.order(list(gpu.LIMITS), ("135M", "1.5B"))]
    first = ["features", "decode 1.5B", "training 1.5B", "tests", "prompts 1.5B"]
    then = ["drafts 1.5B", "turns 1.5B"]
    assert said[:7] == [*first, *then]
    assert said[7:14] == [
        *("predicted 1.5B", "products", "decode 135M", "grpo"),
        *("tokens 1.5B", "tokens 135M", "training 135M"),
    ]
    assert gpu.order(["two", "decode", "turns"], ("tiny",)) == [("decode", "tiny"), ("turns", "tiny"), ("two", "")]


def test_a_quarter_of_an_hour_has_room_for_two_commands(gpu: ModuleType) -> None:
    """Those that the top of the file says, each with what it takes to begin, and two minutes for a machine to start."""
    said = re.findall(r"gpu\.py --within-s (\d+)(?: --parts (\S+))?", gpu.__doc__ or "")
    (first_s, nothing), (second_s, parts) = said
    assert nothing == ""
    seconds = [gpu.LIMITS[part] for part, _ in gpu.order(list(gpu.LIMITS), ("135M", "1.5B"))]
    assert sum(seconds[:5]) <= int(first_s) - 20
    assert sum(seconds[:6]) > int(first_s) - 20, "the next part is of the second command"
    assert [part for part, _ in gpu.order(parts.split(","), ("135M", "1.5B"))] == ["drafts", "turns"]
    assert sum(seconds[5:7]) <= int(second_s) - 20
    assert int(first_s) + int(second_s) <= 15 * 60 - 120


def test_micro_batches_of_training_are_full(gpu: ModuleType) -> None:
    training = importlib.import_module("on_device.training")
    of_group = training.PROMPT_TOKENS + training.SAMPLES * training.TOKENS
    assert training.MICRO_BATCH_TOKENS % of_group == 0
    assert training.GROUPS * of_group == 2 * training.MICRO_BATCH_TOKENS
    _, rows = training.batch(training.GROUPS, training.SAMPLES, training.PROMPT_TOKENS, training.TOKENS, 1000)
    split = training.ExecutionSettings(training.MICRO_BATCH_TOKENS).split(rows.ordered(), num_shares=1, num_stages=1)
    assert [[micro.num_tokens for micro in of_rank] for of_rank in split] == [[16_384, 16_384]]


def test_what_is_no_product_is_told_by_its_kind(gpu: ModuleType) -> None:
    """Names as a profile of an H100 has them."""
    kernels = importlib.import_module("on_device.kernels")
    named = {
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT": "products",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>": "products",
        "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "attention",
        "gather": "laying out keys",
        "fold": "laying out keys",
        "_rms_norm_backward_kernel": "norms and gates",
        "_swiglu_forward_kernel": "norms and gates",
        "rotate": "rotations",
        "logprobs_backward": "log-probs",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
        "void at::native::vectorized_gather_kernel<16, long>": "reading and adding rows",
        "Memcpy DtoD (Device -> Device)": "copies and zeros",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "sums",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "reductions",
        "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda>": "other numbers by themselves",
        "something_new": "others",
    }
    found = {name: next(iter(kernels.categories_of([(1.0, name)]))) for name in named}
    assert found == named
    parts = kernels.categories_of([(1.0, "something_new"), (0.25, "gather"), (0.5, "fold"), (0.5, "rotate")])
    assert list(parts.items()) == [("laying out keys", 0.75), ("rotations", 0.5), ("others", 1.0)]


def test_a_part_that_takes_too_long_is_stopped_and_the_next_one_runs(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    says = {
        "decode": "import time\ndef stand_still(): time.sleep(60)\nstand_still()",
        "training": "print('trained')",
        "two": "import sys; print('first'); print('last', file=sys.stderr); sys.exit(3)",
    }
    monkeypatch.setattr(gpu, "command_of", lambda part, *of: [sys.executable, "-c", says[part]])
    asked = ["--limit-s", "1", "--folder", str(tmp_path / "models"), "--report", str(tmp_path / "report")]
    assert gpu.main(["--tiny", "--parts", "decode,training,two", *asked]) == 1
    out = capfd.readouterr().out
    assert "-- decode tiny: stopped after 1 s" in out
    assert "-- training tiny: done" in out
    assert "-- two: exit code 3" in out
    logs = {name: (tmp_path / "report" / f"{name}.log").read_text() for name in says}
    assert "in stand_still" in logs["decode"], "it says where it was stopped"
    assert logs["two"] == "first\nlast\n"
    assert all(text in out for text in logs.values())
    machine, *ended = results(tmp_path / "report")
    assert machine["torch"] == torch.__version__
    assert [(one["part"], one["shape"], one["ended"]) for one in ended] == [
        ("decode", "tiny", "stopped after 1 s"),
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
    monkeypatch.setattr(gpu, "LIMITS", {"decode": 60})
    job = gpu.Job("cpu", "float32", ("135M", "1.5B"), True, str(tmp_path), str(tmp_path))
    options, forever = options_of(gpu, "--tiny"), float("inf")
    assert gpu.run_part("decode", "135M", job, options, forever) == "done"
    monkeypatch.setattr(gpu, "LIMITS", {"decode": 1})
    assert gpu.run_part("decode", "1.5B", job, options, forever) == "stopped after 1 s"
    monkeypatch.setattr(gpu, "LIMITS", {"decode": 60, "two": 6})
    until = time.monotonic() + 8
    assert gpu.run_part("decode", "135M", job, options, until) == "not begun: there is no time left"
    of_two = job.of_shape("135M")  # shorter, so there is time
    assert gpu.run_part("two", "", of_two, options, until) == "done"
    assert [(one["part"], one["shape"], one["ended"]) for one in results(tmp_path)] == [
        ("decode", "135M", "done"),
        ("decode", "1.5B", "stopped after 1 s"),
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


def test_a_part_knows_when_it_is_stopped(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ends = "import json, sys, time; print(json.load(open(sys.argv[1]))['ends'] - time.time())"
    monkeypatch.setattr(gpu, "command_of", lambda part, job, options: [sys.executable, "-c", ends, str(job)])
    job = gpu.Job("cpu", "float32", ("tiny",), True, str(tmp_path), str(tmp_path))
    assert gpu.run_part("two", "", job, options_of(gpu, "--tiny", "--limit-s", "50"), float("inf")) == "done"
    assert 20 < float((tmp_path / "two.log").read_text()) < 50


def test_a_part_has_what_those_before_it_have_left(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = "import json, sys, time; print(json.load(open(sys.argv[1]))['ends'] - time.time())"
    monkeypatch.setattr(gpu, "command_of", lambda part, job, options: [sys.executable, "-c", ends, str(job)])
    asked = ["--tiny", "--parts", "decode,training,two", "--limit-s", "50", "--report", str(tmp_path)]
    assert gpu.main(asked) == 0
    left = [float((tmp_path / f"{part}.log").read_text()) for part in ("decode", "training", "two")]
    assert 20 < left[0] < 50
    assert 70 < left[1] < 100
    assert 120 < left[2] < 150
    assert gpu.main([*asked, "--within-s", "90"]) == 0
    assert float((tmp_path / "two.log").read_text().split()[-1]) < 90


@pytest.mark.parametrize("has_trl", [True, False])
def test_grpo_is_measured_without_trl(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_trl: bool
) -> None:
    part = importlib.import_module("on_device.grpo")
    asked: list[list[str]] = []
    monkeypatch.setattr(part, "find_spec", lambda name: object() if has_trl else None)
    monkeypatch.setattr(part.grpo_step, "main", lambda how: asked.append(how) or 0)
    job = gpu.Job("cuda", "bfloat16", ("tiny",), False, str(tmp_path), str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["grpo", str(job.saved())])
    written = []  # without the device, on which the sides are to be alone
    monkeypatch.setattr(gpu.Job, "model", lambda job, shape: written.append((job.device, shape)) or "folder")
    assert part.main() == 0
    assert written == [("cpu", "135M")]
    sides = "plait,trl" if has_trl else "plait"
    assert asked == [["--sides", sides, "--device", "cuda", "--threads", "8", "--model", "folder"]]


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


def test_products_of_a_step(gpu: ModuleType) -> None:
    """Of the larger shape first; of each what reads most in a step."""
    products = importlib.import_module("on_device.products")
    found = products.products_of(["135M", "1.5B"])
    assert [(one.shape, one.name, one.outputs, one.inputs, one.times) for one in found] == [
        ("1.5B", "gate_up", 17_920, 1536, 28),
        ("1.5B", "down", 1536, 8960, 28),
        ("1.5B", "head", 151_936, 1536, 1),
        ("1.5B", "qkv", 2048, 1536, 28),
        ("1.5B", "o", 1536, 1536, 28),
        ("135M", "gate_up", 3072, 576, 30),
        ("135M", "head", 49_152, 576, 1),
        ("135M", "down", 576, 1536, 30),
        ("135M", "qkv", 960, 576, 30),
        ("135M", "o", 576, 576, 30),
    ]
    assert found[0].num_bytes(torch.bfloat16) == 2 * 17_920 * 1536


def test_what_products_come_to_in_a_step(gpu: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Only of ways that have computed all of them; the shape has two layers."""
    products, job_module = (importlib.import_module(f"on_device.{name}") for name in ("products", "job"))
    job = gpu.Job("cpu", "float32", ("tiny",), True, str(tmp_path), str(tmp_path))
    rates = job_module.Rates("a device", 1e9, 0.0, 0.0, 0.0)
    names = [one.name for one in products.products_of(["tiny"])]
    seconds = products.Seconds(dict)
    seconds["linear", 1, "tiny"] = dict.fromkeys(names, 1e-3)
    seconds["split", 1, "tiny"] = {"head": 5e-4}
    for way in ("linear", "split"):
        products.in_steps(job, rates, way, seconds)
    products.in_steps(job, rates, "fastest", products.with_fastest(seconds))
    assert [(one["way"], round(one["step_s"], 9)) for one in results(tmp_path)] == [
        ("linear", 9e-3),
        ("fastest", 8.5e-3),
    ]
    # qkv 256·128, o 128·128, gate and up 512·128, down 128·256 numbers, twice; the head 512·128
    assert results(tmp_path)[0]["share"] == pytest.approx(4 * (2 * 147_456 + 65_536) / 9e-3 / 1e9)


def test_how_far_two_ways_say_the_same(gpu: ModuleType) -> None:
    """Behind a token that differs, others are of another text."""
    module = importlib.import_module("on_device.alike")

    def said(uid: int, token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> Sample:
        return Sample(Prompt(uid, "", (1,)), 0, token_ids, logprobs, "", FinishReason.LENGTH)

    plain = [said(0, (5, 6, 7), (-1.0, -2.0, -3.0)), said(1, (8, 9), (-1.0, -1.0))]
    other = [said(1, (8, 9), (-1.0, -1.5)), said(0, (5, 4, 7), (-1.25, -9.0, -3.0))]
    both = module.alike(other, plain)
    assert both == (3, 5, 0.5)
    assert (both.is_far("bfloat16"), module.alike(plain, plain).is_far("float32")) == (True, False)
    broken = module.alike([said(0, (5,), (float("nan"),))], [said(0, (5,), (-1.0,))])
    assert broken.is_far("bfloat16")
    with pytest.raises(AssertionError, match="1 samples are missing"):
        module.alike(plain[:1], plain)


def test_seconds_of_drafts_and_of_what_verifies_them(
    gpu: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drafts = importlib.import_module("on_device.drafts")
    job = gpu.Job("cpu", "float32", ("tiny",), True, str(tmp_path), str(tmp_path))
    samples = [Sample(Prompt(uid, "", (1,)), 0, (5,), (-1.0,), "", FinishReason.LENGTH) for uid in range(2)]
    plain = drafts.Rollout([drafts.Step(0.004, 0.0, 2)], samples, Counts())
    steps = [drafts.Step(0.010, 0.006, 3), drafts.Step(0.010, 0.006, 7), drafts.Step(0.020, 0.009, 5)]
    drafted = drafts.Rollout(steps, samples, Counts(drafted=40.0, accepted=10.0, model_passes=9.0))
    way, engine = drafts.Way("3 by itself", 3, "tiny"), SimpleNamespace(speculates=None)
    drafts.say(job, "tiny", way, engine, drafted, plain)
    assert "a step 10.000 ms, drafting 6.000, verifying 4.000; 500 tokens/s, 1.00 of off" in capfd.readouterr().out
    (one,) = results(tmp_path)
    assert (one["tokens_per_s"], one["model_passes"], one["steps"]) == (pytest.approx(500), 9.0, 3)


def test_a_draft_model_has_the_tokens_of_its_policy(gpu: ModuleType) -> None:
    """Else it would draft for no sample that has another."""
    drafts, job = (importlib.import_module(f"on_device.{name}") for name in ("drafts", "job"))
    for policy, draft in drafts.SMALLER.items():
        assert job.SHAPES[draft].vocabulary == job.SHAPES[policy].vocabulary
    assert gpu._parser().get_default("shapes")[-1] in drafts.SMALLER


def test_waits_are_counted(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of events those that are not there yet; and what torch warns of."""
    drafts, modes, ended = importlib.import_module("on_device.drafts"), ["default"], list[bool]()

    class Event:
        def __init__(self, is_there: bool) -> None:
            self.is_there = is_there

        def query(self) -> bool:
            return self.is_there

        def synchronize(self) -> None:
            ended.append(self.is_there)

    own = Event.synchronize
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with drafts.counted_waits("cuda") as found:
        for is_there in (True, False, True):
            torch.cuda.Event(is_there).synchronize()
        for message in (
            "called a synchronizing CUDA operation",
            "called a synchronizing CUDA operation",
            "of a prototype",
        ):
            warnings.warn(message, stacklevel=1)
    assert (found.asked, found.waited, found.others) == (3, 1, 2)
    assert ended == [True, False, True]
    assert modes == ["default", "warn", "default"]
    assert torch.cuda.Event.synchronize is own


def test_a_product_that_is_wrong_is_refused(gpu: ModuleType, tmp_path: Path) -> None:
    products, job_module = (importlib.import_module(f"on_device.{name}") for name in ("products", "job"))
    job = gpu.Job("cpu", "float32", ("tiny",), True, str(tmp_path), str(tmp_path))
    rates, product = job_module.Rates("a device", 1e9, 0.0, 0.0, 0.0), products.products_of(["tiny"])[0]
    wrong = lambda x_TI, weight_OI: 2 * torch.nn.functional.linear(x_TI, weight_OI)
    assert products.measure(job, rates, "wrong", [wrong], 2, product) is None
    assert results(tmp_path)[0]["refused"] == "ValueError: is 1 of its size off"


def test_steps_count_that_were_done_before_time_was_up(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run does not end by itself: after three steps nothing comes."""
    predicted = importlib.import_module("on_device.predicted")
    files = predicted.RunFiles(tmp_path / "run")
    stands_still = (
        "import json, pathlib, sys, time; p = pathlib.Path(sys.argv[-1]).parent / 'run'; p.mkdir(); "
        "p = p / 'metrics.jsonl'; "
        "p.write_text(''.join(json.dumps({'step': n, 'perf/step_s': 0.5, 'other': 1}) + '\\n' for n in range(1, 4))); "
        "time.sleep(600)"
    )
    started = predicted.subprocess.Popen
    monkeypatch.setattr(
        predicted.subprocess,
        "Popen",
        lambda command, **how: started([sys.executable, "-c", stands_still, command[-1]], **how),
    )
    job = gpu.Job("cpu", "float32", ("tiny",), True, str(tmp_path), str(tmp_path), time.time() + predicted.SPARE_S + 2)
    assert predicted.train(job, "tiny", tmp_path / "recipe.json", files) == 3
    assert [(one["kind"], one["step"], one["perf/step_s"]) for one in results(tmp_path)] == [
        ("step", 1, 0.5),
        ("step", 2, 0.5),
        ("step", 3, 0.5),
    ]
    assert "other" not in results(tmp_path)[0]


def test_a_run_that_fails_is_said_though_steps_were_done(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where memory runs out in its second step."""
    predicted = importlib.import_module("on_device.predicted")
    files = predicted.RunFiles(tmp_path / "run")
    files.path.mkdir()
    files.metrics.write_text(json.dumps({"step": 1, "perf/step_s": 0.5}) + "\n")
    started = predicted.subprocess.Popen
    fails = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(predicted.subprocess, "Popen", lambda command, **how: started(fails, **how))
    job = gpu.Job("cpu", "float32", ("tiny",), True, str(tmp_path), str(tmp_path))
    with pytest.raises(RuntimeError, match="behind step 1 of 6: exit code 3"):
        predicted.train(job, "tiny", tmp_path / "recipe.json", files)
    assert [one["step"] for one in results(tmp_path)] == [1]


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    parts = "features,decode,prompts,drafts,turns,predicted,grpo,products,tokens,training,two"
    asked = ["--tiny", "--parts", parts, "--limit-s", "300", "--report", str(tmp_path)]
    printed = output_of("gpu.py", *asked)
    assert printed.count("PASSED") == 2, "kept sets, with adapters and without"
    assert "12 of 12 greedy tokens are those of Transformers" in printed
    assert "goal 70% of the roofline" in printed
    assert "tiny, micro-batches of 40 tokens, recomputed activations: forward and backward" in printed
    assert re.search(r"ms +\d+\.\d% products\n", printed)
    assert re.search(r"ms +\d+\.\d% between kernels\n", printed)
    assert "tiny: step: predicted " in printed
    assert "tiny, rank 0: predicted " in printed
    assert "two processes on one device: gloo connects them" in printed
    assert "tinier in float32: 48 of 48 tokens stand before the first that differs" in printed
    assert "tiny: 192 of 192 tokens stand before the first that differs" in printed
    assert "GRPO step, tiny random Llama" in printed
    assert "tiny products of a step of    1 rows fastest" in printed
    found = results(tmp_path)
    assert {one["part"] for one in found} == {"machine", *parts.split(",")}
    assert [one["step"] for one in found if one.get("kind") == "step"] == [1, 2, 3, 4, 5, 6]
    assert [one["profile"]["device"] for one in found if one.get("kind") == "profile"] == ["cpu"]
    assert {one["ended"] for one in found if "ended" in one} == {"done"}
    assert [one["samples"] for one in found if one["part"] == "decode" and "step_s" in one] == [1, 2]
    assert [one["checkpoints"] for one in found if "mfu" in one] == [True, False]
    assert "step" in {one["name"] for one in found if one["part"] == "predicted" and "name" in one}
    prompts = [one for one in found if one["part"] == "prompts"]
    assert [one["way"] for one in prompts if "way" in one] == ["replayed", "launched"]
    assert [(one["running"], one["graphs"]) for one in prompts if "graphs" in one] == [(8, 0)], "a CPU has none"
    ways = "off", "3 by tinier", "3 by itself", "adaptive by tinier"
    drafts = [one for one in found if one["part"] == "drafts"]
    assert [(one["way"], one["samples"]) for one in drafts if "step_s" in one] == [(w, n) for w in ways for n in (1, 2)]
    assert [one["way"] for one in drafts if one.get("waits") == {"asked": 0, "waited": 0, "others": 0}] == list(ways)
    assert all(one["same"] == one["total"] for one in found if "same" in one and "total" in one)
    itself = [one for one in drafts if one.get("way") == "3 by itself" and "accepted" in one]
    assert all(one["accepted"] == one["drafted"] > 0 for one in itself)
    turns = [(one["way"], one["tokens"]) for one in found if one["part"] == "turns" and "way" in one]
    # Two prompts of 20 tokens; behind turns and replies of 16 tokens four samples have 52, then 84. Found are 2 and 4
    # blocks of each, or the one block of a prompt by the second of its samples.
    kept, again = 4 * (52 - 32) + 4 * (84 - 64), 4 * 52 - 2 * 16 + 4 * 84 - 2 * 16
    assert turns == 3 * [("found", 2 * 20 + kept), ("computed again", 2 * 20 + again)]


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
    """Those that need one, and those of kernels, which are interpreted elsewhere; each with its mark, without which
    `-m cuda` would leave it out."""
    tests = BENCHMARKS.parent / "tests"
    found = {Path(file) for file in gpu.tests_of_gpus()}
    kernels = {tests / f"kernels/test_device_{name}.py" for name in ("attention", "draw", "logprobs", "rows")}
    assert {tests / "generation/test_engine.py", *kernels} <= found
    assert gpu.FEATURES.is_file()
    assert gpu.FEATURES not in found, "a part of their own"
    needs = re.compile(r"(@pytest\.mark\.cuda\n)?@pytest\.mark\.skipif\(not torch\.cuda")
    for file in tests.rglob("test_*.py"):
        for marked in needs.finditer(file.read_text()):
            assert marked[1], file
            assert file in found


@pytest.mark.parametrize("has_xdist", [True, False])
def test_tests_of_gpus_are_run_at_the_same_time_where_they_can_be(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_xdist: bool
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: object() if has_xdist else None)
    for part in ("features", "tests"):
        command = gpu.command_of(part, tmp_path / "job.json", options_of(gpu))
        assert ("-n" in command) == has_xdist
    assert command[command.index("-m", 2 + command.index("-m")) + 1] == "cuda and not slow"
