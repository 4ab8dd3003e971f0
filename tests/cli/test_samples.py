"""`plait samples` of a run's folder, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.data.records import EVALUATION_UID
from tests.cli.printed import is_one_error, run


def sample(uid: str, response: str, reward: float | str | None, **more: Any) -> dict[str, Any]:
    row = {"uid": uid, "prompt": f"<user>\nquestion {uid[0]}", "response": response, "finish_reason": "stop"}
    scored = {} if reward is None else {"reward_score": reward}
    return {**row, "policy_version": 4, "token_ids": [1, 2], "sampling_logprobs": [-1.0, -2.0], **scored, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with samples of two prompts in step 3, of one in step 1, and the items of an evaluation."""
    first = [
        sample(
            "7.0", "six", -0.25, **{"data/answer": 6, "rewards/right": 0.0, "rewards/brief": None, "advantages": -1.5}
        ),
        sample("7.1", "\n ", None),
        sample(
            "7.2",
            "it is\n\x1b[31m6",
            1.0,
            **{"data/answer": 6, "advantages": 1.5, "rewards/right": 1.0, "ref_logprobs": [-1, -2]},
        ),
    ]
    turns = [{"role": "assistant", "content": "call"}, {"role": "tool", "name": "add", "content": "42"}]
    second = [
        sample("8.0", "call42", 0.5, turns=turns),
        sample("8.1", "x" * 500 + "END", "NaN", reply_error="it broke\n  at a line"),
    ]
    item = {**sample("9.0", "five", None), "reward": 0.75, "judged": {"kind": 0.125}, "verdict": "exact"}
    run_dir = tmp_path / "run"
    (run_dir / "samples").mkdir(parents=True)
    (run_dir / "recipe.yaml").touch()
    for name, rows in {"step-000001": first[:1], "step-000003": [*first, *second], "eval-000002": [item]}.items():
        (run_dir / f"samples/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def test_the_newest_step_by_prompt_the_best_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is one number is told, parts of rewards by their names; a sample without a reward stands last."""
    code, out, _ = run(capsys, "samples", folder)
    assert code == 0
    head, _, *lines = out.splitlines()
    assert head == (
        f"step 3 of {folder}: 2 prompts, 5 samples; reward 0.4167 on average, from -0.25 to 1, 2 without"
    ), "(-0.25 + 1 + 0.5) / 3"
    assert lines[:8] == [
        "prompt 7  answer 6",
        "  <user> question 7",
        "  7.2  reward 1  right 1  advantages 1.5  2 tokens  stop",
        "    it is ␛[31m6",
        "  7.0  reward -0.25  right 0  brief -  advantages -1.5  2 tokens  stop",
        "    six",
        "  7.1  2 tokens  stop",
        "    '\\n '",
    ]
    assert lines[9:] == [
        "prompt 8",
        "  <user> question 8",
        "  8.0  reward 0.5  2 tokens  stop",
        "    assistant: call",
        "    tool add: 42",
        "  8.1  reward NaN  2 tokens  stop",
        "    no reply: it broke at a line",
        f"    {'x' * 200} … {'x' * 197}END",
    ]


def test_a_step_an_evaluation_a_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "prompt 7  answer 6\n" in run(capsys, "samples", folder, 1)[1]
    shown = run(capsys, "samples", folder, "--evaluation")[1]
    assert f"the evaluation after step 2 of {folder}: 1 prompt, 1 sample; reward 0.75 on average" in shown
    assert "  9.0  reward 0.75  verdict exact  kind 0.125  2 tokens  stop\n" in shown
    whole = run(capsys, "samples", folder, "--uid", "7.2", "--whole")[1].splitlines()
    assert whole[2:] == ["prompt 7  answer 6", "  <user>", "  question 7", *whole[5:6], "    it is", "    ␛[31m6"]
    assert "7.0" not in run(capsys, "samples", folder, "--uid", "7.2")[1]
    few = run(capsys, "samples", folder, "--prompts", 1)[1].splitlines()
    assert few[-1].startswith("1 more prompt (--prompts 2 shows all); every column is in ")


def test_items_of_an_evaluation_are_counted_from_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As messages call them; what the file has finds them, too."""
    items = [{**sample(f"{EVALUATION_UID + at}.0", "\n \n", None), "reward": 0.5} for at in (0, 4)]
    (folder / "samples/eval-000003.jsonl").write_text("".join(json.dumps(row) + "\n" for row in items))
    shown = run(capsys, "samples", folder, "--evaluation")[1]
    assert "prompt 1\n" in shown
    assert "  5.0  reward 0.5  2 tokens  stop\n    '\\n \\n'\n" in shown
    assert str(EVALUATION_UID)[:5] not in shown
    one, other = (run(capsys, "samples", folder, "--evaluation", "--uid", uid)[1] for uid in ("5.0", "2147483652"))
    assert one == other
    assert "prompt 5\n" in one
    assert "prompt 1\n" not in one
    _, _, error = run(capsys, "samples", folder, "--evaluation", "--uid", "3")
    assert "has no sample `3`; its prompts are 1, 5" in error


def test_what_is_not_there_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "new/samples").mkdir(parents=True)
    (folder.parent / "new/samples/eval-000000.jsonl").touch()  # held-out data that are given have no answers
    (folder.parent / "new/recipe.yaml").touch()
    (folder.parent / "empty").mkdir()
    cases: dict[tuple[object, ...], str] = {
        (folder, 2): "has no samples of step 2; there are those of 1, 3",
        (folder, 3, "--evaluation"): "has no evaluation after step 3; there are those of 2",
        (folder, "--uid", "70"): "has no sample `70`; its prompts are 7, 8",
        (folder, "--prompts", 0): "--prompts: expected 1 or more, found 0",
        (folder.parent,): f"holds runs, and is none itself; give one of `{folder}`",
        (folder.parent / "none",): "does not exist",
        (folder.parent / "empty",): "holds no run",
        (folder.parent / "new",): "none are drawn where all are given",
        (folder.parent / "new", "--evaluation"): "has no evaluation with answers: it has none (`evaluation.items`), or",
        (folder.parent, "--evaluation"): f"holds runs, and is none itself; give one of `{folder}`",
        (folder / "samples",): f"is in the run `{folder}`; give that",
    }
    for words, why in cases.items():
        code, _, said = run(capsys, "samples", *words)
        assert code == 2
        assert is_one_error(said)
        assert why in said


def test_a_damaged_file_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = {
        "[]\n": "expected a JSON object",
        '{"uid": "3.1"}\n': "no `prompt`",
        _line(uid=3): "expected a text as `uid`, found a number",
        _line(prompt=None): "expected a text as `prompt`, found null",
        _line(token_ids=2): "expected a list as `token_ids`, found a number",
        _line(turns="call"): "expected a list as `turns`, found a text",
        _line(turns=[{"role": "tool"}]): "expected messages with `role` and `content` as `turns`",
        _line(judged=2): "expected an object as `judged`, found a number",
        _line(reward_score="good"): "its reward is no number",
        _line(reward_score=[1.0]): "its reward is no number",
    }
    for text, why in faults.items():
        (folder / "samples/step-000003.jsonl").write_text(text)
        (folder / "samples/step-mine.jsonl").write_text(text)
        code, _, said = run(capsys, "samples", folder)
        assert (code, is_one_error(said)) == (2, True)
        assert f"step-000003.jsonl:1 is damaged: {why}" in said


def _line(**changed: Any) -> str:
    return json.dumps({**sample("3.1", "six", 1.0), **changed}) + "\n"


def test_infinite_rewards_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean of both infinities is no number; the least reward stands before those without one."""
    given = {"7.0": None, "7.1": "-Infinity", "7.2": "Infinity", "7.3": 1.0}
    rows = [sample(uid, "six", reward) for uid, reward in given.items()]
    (folder / "samples/step-000003.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = run(capsys, "samples", folder)
    assert code == 0
    assert out.splitlines()[0].endswith("reward nan on average, from -inf to inf, 1 without")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  7")] == ["7.2", "7.3", "7.1", "7.0"]
