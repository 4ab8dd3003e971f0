"""`plait doctor` of a run's folder, as a user calls it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from plait.observe.doctor import Doctor
from plait.runtime.folder.run_lock import Lock
from tests.cli.printed import run


def begun(folder: Path, *shares: float) -> Path:
    """The folder of a run whose responses were cut so often; what was said."""
    doctor = Doctor()
    for step, share in enumerate(shares, 1):
        doctor.examine(step, {"response_length/clip_ratio": share})
    folder.mkdir()
    (folder / "doctor.jsonl").write_text("".join(json.dumps(row) + "\n" for row in doctor.take_rows()))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, len(shares) + 1)))
    return folder


def test_what_was_said_is_said_again_with_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", begun(tmp_path / "run", 0.1, 0.6, 0.7, 1.0))
    first, *table = out.splitlines()
    assert code == 0
    assert first == (
        "doctor: warning, step 2, truncation: 60% of the responses are truncated at the limit: the limit is too low "
        "for the "
        "task, or the model does not stop (look at `sampling.max_response_tokens`)"
    )
    assert table[-1].split()[:5] == ["truncation", "warning", "2", "4", "1"]
    assert run(capsys, "doctor", begun(tmp_path / "sound", 0.1, 0.2))[1] == "steps: 2; the doctor found nothing\n"
    assert (
        run(capsys, "doctor", begun(tmp_path / "broken_off"))[1]
        == "no step has ended yet, so the doctor has found nothing\n"
    )


def test_how_the_run_ended_stands_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stay = {"from_step": 0, "to_step": 2, "code": [], "ended": "…", "how": "RunError: planted; go on with --resume"}
    record = {"format": "plait-run", "version": 1, "saved_step": 2, "stays": [stay]}
    end = "the run ended after step 2: planted; go on with --resume"
    for folder in (begun(tmp_path / "warned", 0.6), begun(tmp_path / "sound", 0.1)):
        (folder / "run.json").write_text(json.dumps(record))
    assert run(capsys, "doctor", tmp_path / "warned")[1].splitlines()[-2:] == ["", end]
    assert run(capsys, "doctor", tmp_path / "sound")[1] == f"steps: 1; the doctor found nothing\n{end}\n"


def test_without_its_file_the_doctor_was_off_or_had_no_step_to_look_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is killed before its first step has written no `doctor.jsonl`, though its doctor was on."""
    stay = {"from_step": 0, "to_step": 0, "code": []}
    (tmp_path / "run.json").write_text(
        json.dumps({"format": "plait-run", "version": 1, "saved_step": 0, "stays": [stay]})
    )
    for doctor, said in (
        ("doctor: {enabled: false}", "its doctor was off (`doctor.enabled`)"),
        ("doctor: {enabled: true}", "no step has ended yet, so the doctor has found nothing"),
        ("steps: 3", "no step has ended yet, so the doctor has found nothing"),
    ):
        (tmp_path / "recipe.yaml").write_text(doctor)
        code, out, _ = run(capsys, "doctor", tmp_path)
        first, end = out.splitlines()
        assert (code, first) == (0, said)
        assert end.startswith("the run was killed: ")


def test_of_a_recipe_with_stages_it_says_how_each_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order in which they were begun, also of one whose doctor was off; the last was killed."""
    for number, (stage, how) in enumerate({"sft": "finished", "reward": "finished", "policy": None}.items()):
        stay = {"started": f"2026-01-0{number + 1}", "from_step": 0, "to_step": number + 1, "code": [], "how": how}
        record = {"format": "plait-run", "version": 1, "saved_step": 2, "stays": [stay]}
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "run.json").write_text(json.dumps(record))
    (tmp_path / "notes").mkdir()
    code, out, _ = run(capsys, "doctor", tmp_path)
    sft, reward, policy, *rest = out.splitlines()
    assert sft == f"`{tmp_path}/sft`: the run finished after step 1"
    assert reward == f"`{tmp_path}/reward`: the run finished after step 2"
    assert policy.startswith(f"`{tmp_path}/policy`: the run was killed: ")
    assert (code, rest) == (0, ["", "give one of these folders to see what its doctor said"])


def test_a_folder_without_a_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for there, remedy in (
        (None, "give the folder of a run, or the word engines"),
        ("sft/doctor.jsonl", f"give one of `{tmp_path}/sft`"),
        ("recipe.yaml", "its doctor was off (`doctor.enabled`)"),
    ):
        if there is not None:
            (tmp_path / there).parent.mkdir(exist_ok=True)
            (tmp_path / there).write_text("doctor: {enabled: false}")
        code, _, err = run(capsys, "doctor", tmp_path)
        assert (code, err) == (2, f"error: WHAT: `{tmp_path}` has no doctor.jsonl; {remedy}\n")
    code, _, err = run(capsys, "doctor", tmp_path / "nothere")
    assert (code, err.split("; ")[0]) == (2, f"error: WHAT: `{tmp_path}/nothere` does not exist")
    taken = tmp_path / "taken"
    taken.mkdir()
    lock = Lock(taken)
    code, _, err = run(capsys, "doctor", taken)
    assert (code, f"holds no run: process {os.getpid()} on " in err, "is still loading" in err) == (2, True, True)
    lock.release()
    code, _, err = run(capsys, "doctor", taken)
    ended = "the command that took it ended while it was loading; give it again, without --resume"
    assert (code, err) == (2, f"error: WHAT: `{taken}` holds no run: {ended}\n")
    (tmp_path / "doctor.jsonl").write_text('{"step": 1, "rule": "truncation"}\n')
    code, _, err = run(capsys, "doctor", tmp_path)
    assert (code, "doctor.jsonl is damaged: KeyError('severity')" in err) == (2, True)
