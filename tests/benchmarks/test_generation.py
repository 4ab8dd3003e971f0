"""The generation benchmark: its work is the same for all, its figures are right, and sides that fail are noticed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from plait.cost.limit import MachineRates
from plait.models.shape import ModelShape
from tests.benchmarks.scripts import BENCHMARKS, output_of
from tests.processes import state_of, until

SHAPE = ModelShape(
    layers=2,
    hidden=128,
    intermediate=256,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocabulary=512,
    tied=True,
    max_positions=256,
    attention_parameters=2 * 128 * 128 + 2 * 128 * 64,
)


@pytest.fixture
def benchmark(imported: Callable[[str], ModuleType]) -> SimpleNamespace:
    """The script, and the modules of its package, which has the script's name."""
    spec = importlib.util.spec_from_file_location("generation_script", BENCHMARKS / "generation.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    names = ("workload", "serving", "processes", "fit", "report")
    return SimpleNamespace(script=script, **{name: imported(f"generation.{name}") for name in names})


# --- the work ----------------------------------------------------------------------------------------------------


def test_a_case_is_the_same_in_every_run_and_survives_its_file(benchmark: SimpleNamespace, tmp_path: Path) -> None:
    work = benchmark.workload
    case = work.draw_case(work.SHAPES["8x8"], 128, prompt_tokens=16, vocabulary=512)
    assert case == work.draw_case(work.SHAPES["8x8"], 128, prompt_tokens=16, vocabulary=512)
    assert [len(prompt) for prompt in case.prompts] == [16] * 8
    assert all(100 <= token < 512 for prompt in case.prompts for token in prompt)
    assert len(set(case.prompts)) == 8
    assert [prompt for prompt, _ in case.samples] == [prompt for prompt in case.prompts for _ in range(8)]
    workload = work.Workload("t", "m", "", "float32", 1, {case.key: case})
    workload.save(tmp_path / "w.json")
    assert work.Workload.load(tmp_path / "w.json") == workload
    assert (workload.max_samples, workload.max_tokens) == (64, 16 + 128)


@pytest.mark.parametrize(("name", "cap"), [("8", 128), ("32", 128), ("32", 512), ("8x8", 512)])
def test_lengths_have_the_tail_whatever_the_batch(benchmark: SimpleNamespace, name: str, cap: int) -> None:
    work = benchmark.workload
    lengths = sorted(work.draw_case(work.SHAPES[name], cap, prompt_tokens=2, vocabulary=512).flat_lengths)
    middle = len(lengths) // 2
    assert lengths[middle - 1] < cap / 4 < lengths[middle]
    assert 0.8 * cap < lengths[-1] <= cap
    assert lengths[0] < cap / 10


# --- sides -------------------------------------------------------------------------------------------------------

FAKE_SIDE = """
import sys, time
from generation.serving import Outcome, serve

def load(workload):
    def run(case, number):
        print("noise on stdout")
        if case.name == "dies":
            raise RuntimeError("no kernel for this head size")
        if case.name == "sleeps":
            time.sleep(60)
        return Outcome(case.flat_lengths, row_steps=number)
    return run, "fake 1.0"

serve(load)
"""


@pytest.fixture
def open_fake(benchmark: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "fake_side.py").write_text(FAKE_SIDE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    work = benchmark.workload
    cases = {name: work.Case(name, 4, ((5, 6),), ((3, 4),)) for name in ("works", "dies", "sleeps")}
    work.Workload("t", "m", "", "float32", 1, cases).save(tmp_path / "w.json")
    engine = benchmark.processes.Engine("fake", "fake_side", Path(sys.executable))
    opened = []

    def open_one(deadline_s: float = 30.0):
        side = benchmark.processes.Process(engine, tmp_path / "w.json", 1, tmp_path / "log", deadline_s)
        opened.append(side)
        return side

    yield open_one
    for side in opened:
        side.close()


def is_stopped(side, deadline_s: float = 10.0) -> bool:
    """Whether its only process has state T; a signal takes a moment on a busy machine."""
    (pid,) = side.pids()
    return until(lambda: state_of(pid) == "T", deadline_s)


def test_a_side_answers_and_is_stopped_in_between(open_fake) -> None:
    side = open_fake()
    assert side.loaded.versions == "fake 1.0"
    assert is_stopped(side)
    for number in range(2):
        timed = side.run("works")
        assert timed.outcome["response_lengths"] == [3, 4]
        assert timed.outcome["row_steps"] == number, "which time it is asked"
        assert timed.wall_s >= 0
        assert timed.peak_bytes > 1e6
        assert is_stopped(side)
    side.close()
    assert side.pids() == []


def test_a_side_that_dies_says_why(benchmark: SimpleNamespace, open_fake) -> None:
    side = open_fake()
    with pytest.raises(benchmark.script.SideError, match=r"fake ended; the end of its output:[^$]*no kernel for this"):
        side.run("dies")


def test_a_side_has_a_deadline(benchmark: SimpleNamespace, open_fake) -> None:
    side = open_fake(deadline_s=5.0)
    side.deadline_s = 0.2
    with pytest.raises(benchmark.script.SideError, match="fake gave no answer for 0 s"):
        side.run("sleeps")


# --- fit ---------------------------------------------------------------------------------------------------------


def test_fit_finds_the_weights_that_made_the_steps(benchmark: SimpleNamespace) -> None:
    draw = np.random.default_rng(0)
    steps = []
    for _ in range(60):
        batch, context, tokens = int(draw.integers(1, 64)), int(draw.integers(0, 9000)), int(draw.integers(1, 256))
        seconds = 5e-3 + 1e-4 * batch + 2e-7 * context + 3e-4 * tokens + 5e-4 * max(0, tokens - 32)
        steps.append(benchmark.serving.Step(batch, context, tokens, seconds))
    found = benchmark.fit.fit(steps)
    weights = [found.constant, found.batch, found.context, found.tokens, found.beyond[32]]
    assert weights == pytest.approx([5e-3, 1e-4, 2e-7, 3e-4, 5e-4], rel=1e-6)
    assert [found.beyond[knot] for knot in (8, 16, 64, 128)] == pytest.approx([0] * 4, abs=1e-9)
    assert benchmark.fit.r_squared(found, steps) == pytest.approx(1)
    assert found.seconds(2, 1000, 40) == pytest.approx(5e-3 + 2e-4 + 2e-4 + 12e-3 + 4e-3)


def test_no_weight_is_negative(benchmark: SimpleNamespace) -> None:
    """Times that fall with the context, by chance, are no reason to predict that they go on to fall."""
    steps = [benchmark.serving.Step(1, context, 1, 1.0 - 1e-4 * context) for context in range(0, 2000, 100)]
    found = benchmark.fit.fit(steps)
    assert min(found.constant, found.batch, found.context, found.tokens, *found.beyond.values()) >= 0
    assert found.context == 0


def test_r_squared_by_hand(benchmark: SimpleNamespace) -> None:
    model = benchmark.fit.StepTime(2.0, 0.0, 0.0, 0.0, {})
    steps = [benchmark.serving.Step(1, 0, 1, seconds) for seconds in (1.0, 2.0, 6.0)]
    assert benchmark.fit.r_squared(model, steps) == pytest.approx(1 - 17 / 14)


def test_typical_steps_are_medians_of_like_runs(benchmark: SimpleNamespace) -> None:
    step = benchmark.serving.Step
    runs = [[step(8, 0, 99, s), step(8, 99, 8, s / 2)] for s in (1.0, 7.0, 2.0)]
    other = [[step(8, 0, 99, 50.0), step(7, 99, 7, 50.0)]]
    assert benchmark.fit.typical(runs + other) == [step(8, 0, 99, 2.0), step(8, 99, 8, 1.0)]


# --- report ------------------------------------------------------------------------------------------------------


def results(benchmark: SimpleNamespace, walls: dict[str, list[float]], dtype: str = "bfloat16"):
    """Results of eight prompts with responses of 4 tokens; steps take 1 s for a batch of 8, 3 s for the prefill."""
    case = benchmark.workload.Case("8", 128, tuple((7, i) for i in range(8)), ((4,),) * 8)
    workload = benchmark.workload.Workload("a model", "m", "", dtype, 1, {case.key: case})
    found = benchmark.report.Results(workload, SHAPE)
    found.rates = [MachineRates(1e6, flops) for flops in (1e12, 3e12, 2e12)]
    found.imported_bytes = {"plait": 400_000_000}
    steps = [{"batch": 8, "context": 0, "tokens": 16, "seconds": 3.0}]
    steps += [{"batch": 8, "context": 16 + 8 * i, "tokens": 8, "seconds": 1.0} for i in range(3)]
    outcome = {"response_lengths": [4] * 8, "row_steps": 24, "steps": steps}
    found.entries[case.key] = {
        name: benchmark.report.Entry(
            [benchmark.processes.Timed(wall, wall / 2, 600_000_000, outcome) for wall in seconds]
        )
        for name, seconds in walls.items()
    }
    return found


def test_the_table(benchmark: SimpleNamespace) -> None:
    found = results(benchmark, {"plait": [6.0, 4.0, 5.0], "transformers": [12.5, 30.0, 11.0]})
    lines = {line.split()[0]: line.split()[1:] for line in benchmark.report.tables(found).splitlines() if line}
    limit = found.limit_s(found.workload.cases["8@128"])
    assert lines["copies"][:5] == ["0.0", "GB/s,", "products", "2000", "GFLOP/s"], "medians"
    weights = 2 * (SHAPE.attention_parameters + 3 * 128 * 256) + 128 * 512
    kv = 2 * 2 * 2 * 32
    assert limit == pytest.approx(2 * (4 * weights + kv * (16 + sum(16 + 8 * i for i in (1, 2, 3)))) / 1e6)
    assert lines["plait"] == [
        *("5.00", "4.00-6.00", "2.50", "32", "32", "6", f"{limit / 5:.1%}", "1.00x", "600"),
    ]
    assert lines["transformers"][0] == "12.50"
    assert lines["transformers"][-2] == "2.50x"


def test_bars(benchmark: SimpleNamespace) -> None:
    walls = {"plait": [5.0], "transformers": [12.4], "vllm": [5.1], "llama": [8.0]}
    lines = benchmark.report.bars(results(benchmark, walls))
    assert "MISS  8@128 against transformers: 2.480 (at least 2.5)" in lines
    assert "pass  8@128 against vllm: 1.020 (at least 1.0)" in lines
    assert "pass  8@128 against llama: 1.600 (at least 1.5)" in lines
    assert any(line.startswith("MISS  8@128 share of the limit: 0.5") for line in lines)
    assert any(line.startswith("pass  R2 of the times of all steps: 1.0") for line in lines)
    others = benchmark.report.bars(results(benchmark, walls, dtype="float32"))
    assert not any("against" in line for line in others), "the bars are those of bfloat16"


@pytest.mark.parametrize(
    ("found", "predicted", "fits"), [(1.15e9, 1e9, True), (1.16e9, 1e9, False), (0.2e9, 0.1e9, True), (0, 2e8, False)]
)
def test_memory_may_be_off_by_a_share_or_by_bytes(
    benchmark: SimpleNamespace, found: float, predicted: float, fits: bool
) -> None:
    assert benchmark.report.fits_memory(int(found), int(predicted)) is fits


def test_other_tokens_than_asked_are_named(benchmark: SimpleNamespace) -> None:
    case = benchmark.workload.Case("8", 128, ((1, 2),), ((3, 4),))
    outcome = benchmark.serving.Outcome([3, 3], 0)
    assert benchmark.report.differing("vllm", case, outcome) == [
        "vllm, 8@128: expected response lengths [3, 4], found [3, 3]"
    ]
    assert benchmark.report.differing("vllm", case, benchmark.serving.Outcome([3, 4], 0)) == []
    code = benchmark.script.exit_code
    assert [code([]), code(["vllm, 8@128: expected"]), code(["vllm", "failed: llama"])] == [0, 1, 2]


# --- the script --------------------------------------------------------------------------------------------------


def test_absent_peers_are_skipped_with_a_notice(benchmark: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engines", "vllm,llama", "--vllm-python", "no/such/python", "--llama-python", "nor/this"]
    assert benchmark.script.main(options) == 2
    said = capsys.readouterr().err
    assert "vllm is left out: no/such/python does not exist; setup_peers.sh makes it" in said
    assert "llama is left out" in said


@pytest.mark.parametrize(
    ("option", "value"), [("--engines", "plait,tgi"), ("--cases", "16"), ("--dtypes", "int8"), ("--threads", "0")]
)
def test_wrong_options_are_refused(
    benchmark: SimpleNamespace, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    with pytest.raises(SystemExit):
        benchmark.script.main([option, value])
    assert option in capsys.readouterr().err


def test_gguf_holds_the_weights(benchmark: SimpleNamespace, tmp_path: Path) -> None:
    """In llama.cpp's order of rows, which the reader of GGUF checkpoints undoes."""
    import gguf
    from safetensors.torch import load_file

    from plait.models.files.gguf_checkpoint import unpermute

    benchmark.script.write_tiny_model(tmp_path / "model")
    importlib.import_module("generation.gguf_file").write_gguf(tmp_path / "model", tmp_path / "m.gguf", "float32")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(tmp_path / "m.gguf")).tensors}
    assert len(tensors) == len(weights)
    query = unpermute(np.array(tensors["blk.1.attn_q.weight"].data), num_heads=4)
    assert (query == weights["model.layers.1.self_attn.q_proj.weight"].numpy()).all()
    key = unpermute(np.array(tensors["blk.0.attn_k.weight"].data), num_heads=2)
    assert (key == weights["model.layers.0.self_attn.k_proj.weight"].numpy()).all()
    down = np.array(tensors["blk.0.ffn_down.weight"].data)
    assert (down == weights["model.layers.0.mlp.down_proj.weight"].numpy()).all()


def run_tiny(tmp_path: Path, *options: str) -> dict:
    kept = tmp_path / "all.json"
    files = ["--json", str(kept), "--profiles", str(tmp_path / "profiles")]
    output_of("generation.py", "--tiny", "--repeats", "1", "--threads", "1", *files, *options)
    (record,) = json.loads(kept.read_text())
    return record


@pytest.mark.slow
def test_tiny_run(tmp_path: Path) -> None:
    record = run_tiny(tmp_path, "--engines", "plait", "--dtypes", "float32", "--cases", "8,8x8")
    assert list(record["cases"]) == ["8@12", "8x8@12"]
    (timed,) = record["cases"]["8x8@12"]["plait"]
    assert len(timed["outcome"]["response_lengths"]) == 64
    tokens = sum(timed["outcome"]["response_lengths"])
    steps = timed["outcome"]["steps"]
    assert sum(step["tokens"] for step in steps) == 8 * 16 + tokens - 64, "no padding, a group's prompt once"
    (profile,) = (tmp_path / "profiles").iterdir()
    kept = json.loads(profile.read_text())
    assert (kept["format"], kept["dtype"], kept["threads"]) == (1, "float32", 1)
    assert kept["step_s"]["constant"] >= 0
    assert kept["rates"]["bytes_per_s"] > 0


@pytest.mark.slow  # the peers' imports take long
def test_tiny_run_of_all_engines(benchmark: SimpleNamespace, tmp_path: Path) -> None:
    """Those that are set up."""
    record = run_tiny(tmp_path, "--dtypes", "bfloat16", "--cases", "8,8x8")
    here = {name for name, python in benchmark.script.peer_pythons().items() if python.is_file()}
    for entries in record["cases"].values():
        assert set(entries) == {"plait", "transformers", "continuous"} | here
        assert len({tuple(runs[0]["outcome"]["response_lengths"]) for runs in entries.values()}) == 1
