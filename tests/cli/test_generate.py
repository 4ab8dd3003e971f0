"""`plait generate`: its figures, a cache that is too small, and what is left of a run that was interrupted."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli import main
from plait.cli.generate_options import Options, asked_of
from plait.errors import RunError
from plait.generation.engine import Engine
from plait.generation.step_record import StepRecord
from plait.models import devices
from plait.observe.run_log import read_rows
from plait.policy.step import StepKind
from plait.runtime.evaluating.generation_report import GenerationReport, Meter
from tests.cli.printed import is_one_error


@pytest.fixture
def given(tiny_folder: Path, tmp_path: Path) -> list[str]:
    """Arguments over two prompts with two samples each, of 3, 5, 2 and 7 tokens."""
    prompts, lengths = tmp_path / "prompts.jsonl", tmp_path / "lengths.jsonl"
    prompts.write_text('{"prompt": "what is 1 plus 4?"}\n{"prompt": "what is 2 plus 4?"}\n')
    lengths.write_text("[3, 5]\n[2, 7]\n")
    return [
        *("generate", "--model", str(tiny_folder), "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl")),
        *("--lengths", str(lengths), "--n", "2", "--dtype", "float32", "--threads", "1"),
    ]


def rows(tmp_path: Path) -> list[dict]:
    return read_rows(tmp_path / "out.jsonl")


def test_json_figures(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*given, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {
        "samples",
        "tokens",
        "seconds",
        "tokens_per_s",
        "packing_seconds",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "step_ms",
        "kv_peak_bytes",
        "limit_share",
        "not_compiled",
        "speculation",
    }
    assert (figures["samples"], figures["tokens"]) == (4, 17)
    assert figures["tokens_per_s"] == pytest.approx(17 / figures["seconds"])
    assert list(figures["step_ms"]) == ["p50", "p90", "p99"]
    assert figures["step_ms"]["p50"] <= figures["step_ms"]["p99"]
    assert 0 < figures["limit_share"] < 1
    assert figures["kv_peak_bytes"] > 0
    assert figures["prefill_tokens_per_s"] > 0
    assert figures["decode_tokens_per_s"] > 0
    assert figures["speculation"] is None, (
        "answers are too short for a copy of the weights, and what computes is not steady"
    )
    assert figures["not_compiled"] is None or "no vector instructions" in figures["not_compiled"]


def test_a_model_that_is_not_compiled_is_named_with_the_reason(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["float64" if word == "float32" else word for word in given]) == 0
    said = capsys.readouterr().out
    reason = "there are no vector instructions or no numba for torch.float64"
    assert f"computed by the model's own layers, not by compiled ones: {reason}\n" in said


def test_what_is_drafted_changes_no_response(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its own output as the history, as a file or in the folder of a run, all is known, and all draft tokens are
    accepted: the file is the same to the byte."""
    long = [*given[:-6], "--max-tokens", "30", "--n", "2", "--dtype", "float64", "--threads", "1"]
    assert main(long) == 0
    plain = (tmp_path / "out.jsonl").read_bytes()
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_bytes(plain)
    capsys.readouterr()
    assert main([*long, "--overwrite", "--speculation", "7", "--history", str(earlier), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["speculation"]
    assert found["accepted_tokens"] > 0
    assert found["acceptance_of_history"] > 0
    told = [(row["token_ids"], row["finish_reason"]) for row in rows(tmp_path)]
    assert told == [(row["token_ids"], row["finish_reason"]) for row in map(json.loads, plain.splitlines())]
    run = tmp_path / "run"
    (run / "samples").mkdir(parents=True)
    shutil.copy(earlier, run / "samples" / "step-000001.jsonl")
    assert main([*long, "--overwrite", "--speculation", "7", "--history", str(run)]) == 0
    said = capsys.readouterr().out
    assert (
        f"speculation: {found['mean_acceptance_length']:.2f} tokens per sample and step with draft tokens "
        f"({found['drafted_steps']:.0%} of steps)\n  {found['draft_tokens']:.0f} rows verified draft tokens, "
        f"{found['draft_acceptance_rate']:.0%} of which were accepted; where all before were, "
        f"by position in the draft: "
        f"1 {found['acceptance_at_1']:.0%}, 2 {found['acceptance_at_2']:.0%}, "
    ) in said
    assert f"history {found['acceptance_of_history']:.0%}\n  " in said
    assert re.search(r"\n  -?\d+\.\d s saved by the fitted cost of a step, \d+\.\d s spent on drafting\n", said)
    assert main([*long, "--overwrite", "--speculation", "adaptive"]) == 0
    assert "speculation: " in capsys.readouterr().out
    assert main([*long, "--overwrite"]) == 0
    assert "speculative decoding: none by `--speculation` auto, as the model's own layers" in capsys.readouterr().out
    assert (tmp_path / "out.jsonl").read_bytes() == plain
    assert main([*("float32" if word == "float64" else word for word in long), "--overwrite"]) == 0
    assert "speculative decoding" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--speculation", "often"],
            "--speculation: expected auto, adaptive, off or a number of tokens from 1 to 15, found 'often'",
        ),
        (
            ["--speculation", "16"],
            "--speculation: expected auto, adaptive, off or a number of tokens from 1 to 15, found '16'",
        ),
        (
            ["--speculation", "off", "--history", "PROMPTS"],
            "--history is what drafts are taken from, but --speculation is off",
        ),
        (["--history", "PROMPTS"], "prompts.jsonl:1: expected a sample of a model of"),
        (["--history", "none.jsonl"], "--history: none.jsonl is not there; give what an earlier"),
        (["--history", "FOLDER"], "has no samples of steps (`samples/step-*.jsonl`); give a run's folder"),
        (
            ["--speculation", "off", "--draft-model", "MODEL"],
            "--draft-model proposes next tokens, but --speculation is off; set it to auto",
        ),
        (
            ["--device", "cuda", "--draft-model", "MODEL"],
            "but --speculation is auto, which drafts nothing where --device is cuda; set it to adaptive",
        ),
        (["--speculation", "auto", "--draft-model", "nowhere"], "--draft-model: model: "),
        (["--speculation", "auto", "--draft-model", ""], "--draft-model: model: expected a known name"),
        (["--speculation", "auto", "--draft-model", "OTHER"], "`--draft-model` is `"),
    ],
)
def test_speculation_is_refused_by_its_option(
    given: list[str],
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "check_cuda", lambda dtype, key: None)  # as if there were a GPU
    words = {
        "PROMPTS": given[given.index("--prompts") + 1],
        "MODEL": given[given.index("--model") + 1],
        "FOLDER": str(tmp_path),
    }
    if "OTHER" in arguments:
        words["OTHER"] = with_other_tokens(Path(words["MODEL"]), tmp_path / "other")
    assert main([*given, *(words.get(word, word) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert is_one_error(error)


def with_other_tokens(model: Path, folder: Path) -> str:
    """The same model, with a tokenizer in which two tokens have changed places."""
    shutil.copytree(model, folder)
    file = folder / "tokenizer.json"
    tree = json.loads(file.read_text())
    ids = tree["model"]["vocab"]
    ids["a"], ids["e"] = ids["e"], ids["a"]
    file.write_text(json.dumps(tree))
    return str(folder)


def test_a_draft_model_changes_no_response(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model itself, which is always right."""
    long = [*given[:-6], "--max-tokens", "30", "--n", "2", "--dtype", "float64", "--threads", "1"]
    assert main(long) == 0
    plain = [(row["token_ids"], row["finish_reason"]) for row in rows(tmp_path)]
    capsys.readouterr()
    model = given[given.index("--model") + 1]
    assert main([*long, "--overwrite", "--speculation", "5", "--draft-model", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["speculation"]
    assert found["acceptance_of_model"] == 1.0
    assert [(row["token_ids"], row["finish_reason"]) for row in rows(tmp_path)] == plain


def test_a_cache_for_one_sample_at_a_time_gives_the_same_responses(given: list[str], tmp_path: Path) -> None:
    assert main(given) == 0
    whole = rows(tmp_path)
    (tmp_path / "out.jsonl").unlink()
    assert main([*given, "--kv-tokens", "64"]) == 0
    small = rows(tmp_path)
    assert [row["token_ids"] for row in small] == [row["token_ids"] for row in whole]


@pytest.mark.usefixtures("no_model_is_loaded")
def test_a_cache_too_small_for_one_sample(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*given, "--kv-tokens", "16"]) == 2
    error = capsys.readouterr().err
    assert "--kv-tokens: the cache holds 16 tokens, but" in error
    assert "prompts.jsonl:" in error
    assert "or more, or lower `--max-tokens`" in error
    assert main([*given, "--kv-tokens", "8"]) == 2
    assert "--kv-tokens: expected at least 16, found 8" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_what_fits_exactly_is_taken(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the smallest cache that does."""
    assert main([*given, "--kv-tokens", "16"]) == 2
    least = capsys.readouterr().err.split("set it to ")[1].split()[0]
    assert main([*given, "--kv-tokens", least]) == 0


def test_the_cache_that_is_asked_for_serves_every_prompt(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the first prompt would do with less."""
    short, long = '{"prompt": "a"}\n', json.dumps({"prompt": "what is 1 plus 4? " * 3}) + "\n"
    (tmp_path / "prompts.jsonl").write_text(short + long)
    assert main([*given, "--kv-tokens", "16"]) == 2
    error = capsys.readouterr().err
    assert "prompts.jsonl:2 has a prompt of" in error
    least = error.split("set it to ")[1].split()[0]
    assert main([*given, "--kv-tokens", least]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top-p", "1.5"], "--top-p: expected above 0 and at most 1, found 1.5"),
        (["--top-p", "nan"], "`--top-p`: expected a number, found `nan`"),
        (["--top-k", "-1"], "--top-k: expected at least 0, found -1"),
        (["--min-p", "1"], "--min-p: expected at least 0 (0 keeps all) and below 1, found 1"),
        (["--max-tokens", "0"], "--max-tokens: expected at least 1, found 0"),
        (["--temperature", "-1"], "--temperature: expected 0 (greedy) or at least 0.01, found -1.0"),
        (["--temperature", "nan"], "`--temperature`: expected a number, found `nan`"),
        (["--stop", ""], "--stop: expected non-empty stop strings"),
    ],
)
def test_an_option_out_of_range_is_named(
    given: list[str], capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main([*given, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Sampling(" not in error
    assert is_one_error(error)


WRONG_PROMPTS = {
    "no column": ('{"text": "a"}\n', "no column `prompt`"),
    "another column": ('{"promt": "a"}\n', "no column `prompt`"),
    "no text": ('{"prompt": 5}\n', "must be a text or a list of messages"),
    "no object": ("5\n", "prompts.jsonl:1"),
    "mixed": ('{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "b"}]}\n', "prompt"),
    "empty": ("", "holds no row"),
    "malformed": ("{\n", "prompts.jsonl:1"),
}


@pytest.mark.parametrize("case", WRONG_PROMPTS)
def test_wrong_prompts_are_told_in_the_words_of_the_command_before_torch_is_imported(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    content, message = WRONG_PROMPTS[case]
    (tmp_path / "prompts.jsonl").write_text(content)
    monkeypatch.setitem(sys.modules, "plait.runtime.evaluating.generate", None)  # an import fails
    assert main(given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "`data." not in error
    assert is_one_error(error)


def test_weights_that_are_cut_short_are_told_before_torch_is_imported(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plait.runtime.evaluating.generate", None)  # an import fails
    place = given.index("--model") + 1
    folder = shutil.copytree(given[place], tmp_path / "cut")
    given[place] = str(folder)
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 100)
    assert main(given) == 2
    error = capsys.readouterr().err
    assert f"is damaged: model.safetensors: it has {size - 100} bytes, and {size} by its header" in error
    assert is_one_error(error)


def test_a_folder_that_is_no_model_is_told_before_torch_is_imported(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before anything is written."""
    monkeypatch.setitem(sys.modules, "plait.runtime.evaluating.generate", None)  # an import fails
    folder = tmp_path / "run"
    (folder / "final").mkdir(parents=True)
    for file in ("run.lock", "recipe.yaml"):
        (folder / file).touch()
    given[given.index("--model") + 1] = str(folder)
    assert main(given) == 2
    error = capsys.readouterr().err
    assert f"it is that of a run; its model is `{folder / 'final'}`" in error
    assert is_one_error(error)


@pytest.mark.parametrize("option", ["--prompts", "--lengths"])
def test_a_device_is_no_file(given: list[str], capsys: pytest.CaptureFixture[str], option: str) -> None:
    given[given.index(option) + 1] = "/dev/null"
    assert main(given) == 2
    error = capsys.readouterr().err
    assert option in error
    assert "`/dev/null` is a device, not a file; give a JSONL" in error


def test_a_prompt_that_is_too_long_is_one_line(
    given: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"prompt": "what is 1 plus 4? " * 500}) + "\n" + '{"prompt": "a"}'
    )
    assert main(given) == 2
    error = capfd.readouterr().err
    assert is_one_error(error)
    assert "that `--lengths` asks for exceeds the 256 positions of the model; shorten the one or the other" in error


class Broken(Engine):
    """Its weights give NaN from the fourth step on."""

    steps = 0

    def step(self):
        type(self).steps += 1
        if self.steps > 4:
            raise RunError("sample 0.1: expected finite logits")
        return super().step()


def alike(rows: list[dict]) -> list[dict]:
    """The same but for the rounding of forwards with other samples in the batch."""
    return [row | {"logprobs": pytest.approx(row["logprobs"], rel=1e-5)} for row in rows]


@pytest.mark.process
def test_several_processes_draw_the_same(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the seed alone, and in the order of the prompts. What is missing may be drawn by another number of them."""
    assert main(given) == 0
    alone = rows(tmp_path)
    assert main([*given, "--devices", "2", "--overwrite", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert rows(tmp_path) == alike(alone)
    assert (figures["samples"], figures["tokens"], figures["limit_share"]) == (4, 17, None)
    (tmp_path / "out.jsonl").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("plait.runtime.evaluating.generate.Engine", Broken)
        patch.setattr(Broken, "steps", 0)
        assert main(given) not in (0, 2)
    assert main([*given, "--devices", "2", "--resume"]) == 0
    assert capsys.readouterr().out.startswith("2 samples")
    assert rows(tmp_path) == alike(alone)


@pytest.mark.process
def test_what_several_processes_cannot_do_is_told_as_one_tells_it(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(given[given.index("--model") + 1])
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no weights")
    broken = [str(tmp_path / "broken") if word == str(folder) else word for word in given]
    told = []
    for count in ("1", "2"):
        told.append((main([*broken, "--devices", count]), capsys.readouterr().err.partition("error:")[2]))
    assert told[0] == told[1]
    assert told[0][1]


@pytest.mark.process
def test_who_reads_what_is_reported_may_leave(given: list[str], tmp_path: Path) -> None:
    """The responses are in a file: the command has done what it was asked for."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "plait", *given], stdout=write, timeout=300)
    os.close(write)
    assert done.returncode == 0
    assert len(rows(tmp_path)) == 4


def test_responses_that_were_finished_outlive_a_run_that_breaks_off(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("plait.runtime.evaluating.generate.Engine", Broken)
        patch.setattr(Broken, "steps", 0)
        assert main(given) not in (0, 2)
    partial = tmp_path / "out.jsonl.partial"
    error = capsys.readouterr().err
    assert f"2 responses are in {partial}; the same command with --resume draws the others" in error
    head, *kept = [json.loads(line) for line in partial.read_text().splitlines()]
    assert (head["format"], head["asked"]["n"]) == ("plait-generation", 2)
    assert [len(row["token_ids"]) for row in kept] == [2, 3], "in the order in which they ended"
    assert main(given) == 2
    assert "holds the responses of an interrupted run; go on with --resume" in capsys.readouterr().err
    assert main([*given, "--overwrite"]) == 0
    assert [len(row["token_ids"]) for row in rows(tmp_path)] == [3, 5, 2, 7]
    assert kept == [rows(tmp_path)[2], rows(tmp_path)[0]]
    assert not partial.exists()


def interrupted_after(steps: int, monkeypatch: pytest.MonkeyPatch, signals: int = 1) -> None:
    """Ctrl-C in the middle of that step."""
    step, count = Engine.step, 0

    def stepping(self: Engine):
        nonlocal count
        count += 1
        if count == steps:
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Engine, "step", stepping)


def test_ctrl_c_keeps_the_responses_that_are_finished(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted_after(4, monkeypatch)
    assert main([*given, "--json"]) == 130
    assert not (tmp_path / "out.jsonl").exists(), "it is whole or not there"
    said = capsys.readouterr()
    assert (
        f"interrupted: 2 of 4 responses are finished; 2 responses are in {tmp_path / 'out.jsonl.partial'}" in said.err
    )
    figures = json.loads(said.out)
    assert (figures["samples"], figures["limit_share"]) == (2, None)
    assert figures["tokens"] > 5, "tokens of unfinished samples took time as well"


def test_ctrl_c_before_anything_is_finished(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted_after(1, monkeypatch, signals=2)  # the second leaves at once
    assert main(given) == 130
    assert "0 of 4 responses are finished; nothing is written" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_ctrl_c_while_the_model_is_loaded_says_what_is_kept(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        interrupted_after(4, patch)
        assert main(given) == 130

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("plait.runtime.evaluating.generate.load_model", interrupted)
    capsys.readouterr()
    assert main([*given, "--resume"]) == 130
    partial = tmp_path / "out.jsonl.partial"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"interrupted; 2 responses are in {partial}; the same command with --resume draws the others"
    partial.unlink()
    assert main(given) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; nothing is written"


def test_an_interrupted_run_goes_on_where_it_was(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sample of each prompt is finished: the other one is drawn as it would have been, and nothing twice."""
    assert main(given) == 0
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    whole = rows(tmp_path)
    out.unlink()
    with monkeypatch.context() as patch:
        interrupted_after(4, patch)
        assert main(given) == 130
    partial.write_bytes(partial.read_bytes() + b'{"row": 1, "sam')  # the machine fell in the middle of a write
    capsys.readouterr()
    for wrong, said in (
        (["--seed", "1"], "was begun with another --seed; give the options as they were"),
        (["--temperature", "0.5", "--top-k", "3"], "was begun with another --temperature, --top-k"),
        (["--chat-template", "false"], "was begun with another --chat-template; give"),
        (["--overwrite"], "--resume goes on with what is there, --overwrite drops it"),
    ):
        assert main([*given, "--resume", *wrong]) == 2
        assert said in capsys.readouterr().err
    at = given.index("--lengths")
    assert main([*given[:at], *given[at + 2 :], "--resume"]) == 2
    assert "was begun with another --lengths" in capsys.readouterr().err, "also where it is given no more"
    assert "chat-template" not in json.loads(partial.read_bytes().splitlines()[0])["asked"], "nor had runs of before"
    assert main([*given, "--resume", "--max-running", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 2
    for one, other in zip(rows(tmp_path), whole, strict=True):
        assert one.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-4)
        assert one == other
    assert not partial.exists()
    assert main([*given, "--resume"]) == 2
    assert "exists; give another file, or --overwrite" in capsys.readouterr().err


def test_what_is_finished_and_not_yet_written_is_written_by_resume(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine fell between the last response and the output. No model is needed."""
    assert main(given) == 0
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    options = Options(
        model=given[2], prompts=tmp_path / "prompts.jsonl", out=out, n=2, lengths=tmp_path / "lengths.jsonl",
        dtype="float32",
    )  # fmt: skip
    head = {"format": "plait-generation", "version": 1, "asked": asked_of(options)}
    whole = out.read_bytes()
    partial.write_bytes(json.dumps(head).encode() + b"\n" + whole)
    out.unlink()
    monkeypatch.delattr("plait.runtime.evaluating.generate.load_model")
    assert main([*given, "--resume"]) == 0
    assert out.read_bytes() == whole


@pytest.mark.parametrize("option", ["--resume", "--overwrite"])
def test_a_run_that_is_still_going_on_is_left_alone(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with monkeypatch.context() as patch:
        interrupted_after(4, patch)
        assert main(given) == 130
    partial = tmp_path / "out.jsonl.partial"
    before = partial.read_bytes()
    with open(partial, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main([*given, option]) == 2
    assert f"another process writes `{partial}`; wait for it, end it, or give" in capsys.readouterr().err
    assert partial.read_bytes() == before
    assert main([*given, option]) == 0, "it has ended"


def test_two_runs_that_begin_at_once_do_not_mix(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = tmp_path / "out.jsonl.partial"
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: partial.touch() or step(self))
    assert main(given) == 1
    assert f"another process has begun to write `{partial}`; give each run a file" in capsys.readouterr().err
    assert partial.read_bytes() == b""


def test_nothing_to_resume(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*given, "--resume"]) == 2
    assert "there is no `" in capsys.readouterr().err
    (tmp_path / "out.jsonl.partial").write_text('{"prompt": "a"}\n')
    assert main([*given, "--resume"]) == 2
    assert "is not a file that `plait generate` wrote" in capsys.readouterr().err


def test_the_output_has_the_columns_of_the_data_and_the_number_of_the_row(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "answer": "5", "tags": ["x"]}\n\n{"prompt": "a", "answer": null}\n')
    assert main(given) == 0
    found = [(row["row"], row["sample"], row["prompt"], row["answer"], row.get("tags")) for row in rows(tmp_path)]
    assert found == [
        (0, 0, "a", "5", ["x"]),
        (0, 1, "a", "5", ["x"]),
        (1, 0, "a", None, None),
        (1, 1, "a", None, None),
    ]
    prompts.write_text('{"prompt": "a", "row": 1}\n{"prompt": "a", "response": "b"}\n')
    assert main([*given, "--overwrite"]) == 2
    assert "has columns named `response`, `row`, as the output has its own" in capsys.readouterr().err


class Idle:
    """What the progress line asks an engine."""

    kv_tokens = (48, 64)
    kv_bytes = 3 << 19
    num_running, num_waiting = 3, 20


def test_the_progress_line() -> None:
    decode = StepRecord(StepKind.DECODE, 3, 3, 200, 1, num_prefill_tokens=0, num_drawn=3, num_preempted=0)
    for limited, use in ((True, "48 tokens (75%) in"), (False, "48 tokens in")):
        meter = Meter(is_kv_limited=limited)
        meter.step(decode, 0.002, kv_bytes=50)
        meter.step(decode, 0.001, kv_bytes=50)
        assert meter.now(Idle()) == f"2,000 tokens/s  3 running, 20 waiting  cache {use} 1.5 MiB"  # type: ignore[arg-type]


def test_meter_counts_mixed_steps_with_the_prompts() -> None:
    meter = Meter()
    mixed = StepRecord(
        StepKind.PREFILL, 3, 102, 40, 0, num_prefill_tokens=100, num_drawn=3, num_preempted=0, packing_s=0.5
    )
    decode = StepRecord(StepKind.DECODE, 4, 4, 200, 1, num_prefill_tokens=0, num_drawn=4, num_preempted=0)
    meter.step(mixed, 2.5, kv_bytes=50)
    meter.step(decode, 0.5, kv_bytes=70)
    meter.step(decode, 0.3, kv_bytes=60)
    figures = GenerationReport(0, 0, 4.0, meter, limit_s=1.0).figures()
    assert figures["tokens"] == 11
    assert figures["tokens_per_s"] == pytest.approx(11 / 4)
    assert figures["packing_seconds"] == 0.5
    assert figures["prefill_tokens_per_s"] == pytest.approx(100 / 2)
    assert figures["decode_tokens_per_s"] == pytest.approx(8 / 0.8)
    assert figures["step_ms"]["p50"] == pytest.approx(400)
    assert figures["kv_peak_bytes"] == 70
    assert figures["limit_share"] == 0.25
