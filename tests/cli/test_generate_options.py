"""Options of `plait generate` that are wrong are refused before a model is loaded, each by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plait.cli import main
from plait.generation.settings import SamplingSettings
from plait.models import devices
from plait.models.files.saving import save_pretrained
from plait.models.scalar_loading import load_scalar
from plait.observe.run_log import read_rows
from plait.runtime.evaluating import generate
from tests.cli.printed import is_one_error
from tests.models.tiny import tiny_tokenizer


@pytest.fixture
def ask(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `plait generate` over two prompts; returns its exit code and what it wrote to stderr."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "what is 1 plus 4?"}\n\n{"prompt": "what is 2 plus 4?"}\n')

    def run(*options: str, model: str = str(tiny_folder), prompts: Path = prompts) -> tuple[int, str]:
        given = ["generate", "--model", model, "--prompts", str(prompts), "--dtype", "float32", "--threads", "1"]
        out = [] if "--out" in options else ["--out", str(tmp_path / "out.jsonl")]
        code = main([*given, *out, *options])
        return code, capsys.readouterr().err

    return run


def test_lengths_and_a_new_folder(ask, tmp_path: Path) -> None:
    (tmp_path / "lengths.jsonl").write_text("[3, 5]\n\n[2, 7]\n")
    out = tmp_path / "a" / "b" / "out.jsonl"
    code, _ = ask("--out", str(out), "--lengths", str(tmp_path / "lengths.jsonl"), "--n", "2", "--max-running", "1")
    assert code == 0
    assert [len(row["token_ids"]) for row in read_rows(out)] == [3, 5, 2, 7]


def test_prompts_in_a_column_of_another_name(ask, tmp_path: Path) -> None:
    """As `data.prompt_column` of a recipe; without the option the message names it."""
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"question": "what is 1 plus 4?", "prompt": 1}\n{"question": "what is 2 plus 4?", "prompt": 2}\n')
    usual, own = tmp_path / "usual.jsonl", tmp_path / "own.jsonl"
    assert ask("--max-tokens", "4", "--out", str(usual))[0] == 0
    assert ask("--max-tokens", "4", "--out", str(own), "--prompt-column", "question", prompts=asked)[0] == 0
    assert [row["token_ids"] for row in read_rows(own)] == [row["token_ids"] for row in read_rows(usual)]
    asked.write_text('{"question": "what is 1 plus 4?"}\n')
    code, said = ask(prompts=asked)
    assert code == 2
    assert said.endswith("no column `prompt`; found `question`; set `--prompt-column`\n")


@pytest.mark.parametrize(("stated", "running"), [((), (64, 256)), (("--max-running", "64"), (64, 64))])
def test_a_gpu_runs_more_samples_unless_told_otherwise(
    ask, stated: tuple[str, ...], running: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[SamplingSettings] = []
    monkeypatch.setattr(generate, "Engine", lambda model, engine: engines.append(engine) or 1 / 0)
    monkeypatch.setattr(generate, "load_model", lambda *_, **__: None)
    monkeypatch.setattr(devices, "check_cuda", lambda dtype, key: None)  # as if there were a GPU
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    for device in ("cpu", "cuda"):
        with pytest.raises(ZeroDivisionError):
            ask("--device", device, *stated)
    assert tuple(engine.max_running for engine in engines) == running


def test_stop_token_ids(ask, tmp_path: Path) -> None:
    """Greedy and seeded alike: the first response token of the first prompt, made a stop token, ends it there."""
    assert ask("--temperature", "0", "--max-tokens", "6")[0] == 0
    first, other = (row["token_ids"] for row in read_rows(tmp_path / "out.jsonl"))
    stops = [first[0], 0]
    out = tmp_path / "stopped.jsonl"
    assert (
        ask("--temperature", "0", "--max-tokens", "6", "--out", str(out), "--stop-token-ids", *map(str, stops))[0] == 0
    )
    stopped = read_rows(out)
    assert stopped[0]["token_ids"] == first[:1]
    assert stopped[0]["finish_reason"] == "stop"
    until = next((place + 1 for place, token in enumerate(other) if token in stops), len(other))
    assert stopped[1]["token_ids"] == other[:until]


@pytest.mark.parametrize(
    ("options", "lengths", "message"),
    [
        (["--n", "0"], None, "--n: expected at least 1, found 0"),
        (["--max-running", "0"], None, "--max-running: expected at least 1, found 0"),
        (["--seed", "-1"], None, "--seed: expected at least 0, found -1"),
        (["--stop-token-ids", "5", "-1"], None, "--stop-token-ids: expected at least 0, found -1"),
        (["--stop-token-ids", "5", "99999999"], None, "--stop-token-ids: the model has"),
        ([], "[1]\n", "--lengths: 1 lists of lengths for 2 prompts"),
        ([], "[1]\n[1]\n[1]\n", "--lengths: 3 lists of lengths for 2 prompts"),
        ([], "[1]\n[1, 2]\n", "lengths.jsonl:2 has 2 lengths, but --n is 1"),
        (["--n", "2"], "[1, 2]\n[]\n", "lengths.jsonl:2 has 0 lengths, but --n is 2"),
        ([], "[true]\n[1]\n", "lengths.jsonl:1: expected a list of positive whole numbers, found [true]"),
        ([], "[0]\n[1]\n", "lengths.jsonl:1: expected a list of positive whole numbers, found [0]"),
        ([], "[1]\n[\n", "lengths.jsonl:2: malformed JSON"),
        ([], "[1]\n[99999]\n", "prompts.jsonl:3: the prompt has"),
        (
            ["--system-prompt", "brief", "--device", "cuda"],
            None,
            "--device is cuda, but torch finds no CUDA device; set it to cpu",
        ),
    ],
)
@pytest.mark.usefixtures("no_model_is_loaded")
def test_checked_before_the_model_is_loaded(
    ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], lengths: str | None, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if lengths is not None:
        (tmp_path / "lengths.jsonl").write_text(lengths)
        options = [*options, "--lengths", str(tmp_path / "lengths.jsonl")]
    code, error = ask(*options)
    assert code == 2
    assert message in error
    assert is_one_error(error)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no row; give another source in `--prompts`"),
        (b"\n \n", "holds no row; give another source in `--prompts`"),
        (b'{"prompt": "caf\xe9"}\n', "is not UTF-8"),
        (b'{"prompt": "' + b"what is 1 plus 4? " * 500 + b'"}\n', "mine.jsonl:1: the prompt has"),
    ],
)
@pytest.mark.usefixtures("no_model_is_loaded")
def test_prompts_are_checked_before_the_model_is_loaded(ask, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "mine.jsonl").write_bytes(content)
    code, error = ask(prompts=tmp_path / "mine.jsonl")
    assert code == 2
    assert message in error
    assert "data." not in error, "a key of a recipe, of which there is none"
    assert is_one_error(error)


def test_a_reward_model_does_not_speak(ask, tiny_folder: Path, tmp_path: Path) -> None:
    save_pretrained(load_scalar(str(tiny_folder), dtype="float32"), tmp_path / "rm")
    code, error = ask(model=str(tmp_path / "rm"))
    assert code == 2
    assert "is a reward model (LlamaForSequenceClassification), but the role `actor` begins as" in error


@pytest.mark.usefixtures("no_model_is_loaded")
def test_missing_prompts_and_system_message(ask, tmp_path: Path) -> None:
    code, error = ask(prompts=tmp_path / "promts.jsonl")
    assert (code, "did you mean `prompts.jsonl`" in error, "reasoning_gym" in error) == (2, True, False)
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": messages}) + "\n")
    code, error = ask("--system-prompt", "brief", prompts=tmp_path / "chat.jsonl")
    assert code == 2
    assert "data." not in error


@pytest.mark.usefixtures("no_model_is_loaded")
def test_empty_prompts_sent_raw(ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    monkeypatch.setattr("plait.runtime.evaluating.generate_job.load_tokenizer", lambda _: tokenizer)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    code, error = ask(prompts=tmp_path / "mine.jsonl")
    assert (code, "mine.jsonl:2: the prompt is empty" in error, "`--prompts`" in error) == (2, True, True)
    code, error = ask("--system-prompt", "brief", prompts=tmp_path / "mine.jsonl")
    assert (code, "`--system-prompt` needs a chat template" in error) == (2, True)


@pytest.mark.parametrize(("said", "is_chat"), [("auto", True), ("true", True), ("false", False)])
def test_texts_are_sent_raw_where_that_is_asked(
    ask, tiny_folder: Path, tmp_path: Path, said: str, is_chat: bool
) -> None:
    """Log-probs are those of Transformers behind the text alone, or behind the user's message."""
    text = "what is 1 plus 4?"
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    code, error = ask("--chat-template", said, "--max-tokens", "4", prompts=tmp_path / "mine.jsonl")
    assert code == 0, error
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_folder), AutoModelForCausalLM.from_pretrained(tiny_folder)
    if is_chat:
        message = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer(text)["input_ids"]
    (row,) = read_rows(tmp_path / "out.jsonl")
    drawn = torch.tensor(row["token_ids"])
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *row["token_ids"]]])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
    assert row["logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.usefixtures("no_model_is_loaded")
def test_a_chat_template_that_does_not_fit_is_told_in_the_words_of_the_command(
    ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps({"prompt": [{"role": "user", "content": "b"}]}) + "\n")
    code, error = ask("--chat-template", "false", prompts=mine)
    assert (code, "`--chat-template` is false, but the prompts are messages" in error) == (2, True)
    code, error = ask("--chat-template", "false", "--system-prompt", "brief")
    assert (code, "`--system-prompt` needs a chat template" in error) == (2, True)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    monkeypatch.setattr("plait.runtime.evaluating.generate_job.load_tokenizer", lambda _: tokenizer)
    code, error = ask("--chat-template", "true")
    assert (code, "or give texts with `--chat-template false`" in error, "data." in error) == (2, True, False)


@pytest.mark.usefixtures("no_model_is_loaded")
def test_an_output_that_cannot_be_written(ask, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, error = ask("--out", str(tmp_path / "file"))
    assert (code, "exists; give another file" in error) == (2, True)
    code, error = ask("--out", str(tmp_path / "file" / "out.jsonl"))
    assert (code, "--out: " in error, "cannot be written" in error) == (2, True, True)
