"""What a dry run says of batches that are generated ahead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait.cli import main
from tests.cli.test_dry_run import recipe


def said(tmp_path: Path, capsys: pytest.CaptureFixture[str], *keys: str) -> str:
    assert main(["train", recipe(tmp_path, "qwen2.5-7b"), "--dry-run", *keys]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_split_generates_beside_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(tmp_path, capsys, "--devices", "2", "--plan", "split", "--max_staleness", "1")
    assert "max_staleness 1: while batch b is scored and trained, batch b + 1 is generated; at most 2 are open" in text
    assert (
        "What generates on rank 0 keeps the actor's weights of the step's beginning during training on rank 1" in text
    )
    assert "no further version is held" in text


def test_shared_devices_wait_for_the_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(tmp_path, capsys, "--devices", "2", "--plan", "colocated", "--max_staleness", "2")
    assert "batches up to b + 2 are generated; at most 3 are open" in text
    assert "the actor is trained when the rollouts of the step have ended" in text


def test_nothing_is_said_where_nothing_is_drawn_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "max_staleness" not in said(tmp_path, capsys, "--devices", "2", "--plan", "split")


def test_the_gain_is_predicted_where_sides_are_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(tmp_path, capsys, "--devices", "2", "--plan", "split", "--max_staleness", "1")
    found = re.search(r"Predicted: (\S+) s a step, in place of (\S+) s with nothing ahead \((\S+) times", text)
    assert found is not None
    ahead, alone, ratio = map(float, found.groups())
    assert 0 < ahead < alone
    assert ratio == pytest.approx(alone / ahead, rel=0.02)


@pytest.mark.parametrize(
    ("partial_rollout", "expected"),
    [
        ("keep", "until they do, a copy of these is held in host memory"),
        ("recompute", "go on, and their keys and values are computed again"),
    ],
)
def test_samples_that_go_on(
    partial_rollout: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("--devices", "2", "--plan", "colocated", "--max_staleness", "1", "--partial_rollout", partial_rollout)
    text = said(tmp_path, capsys, *keys)
    assert expected in text
    assert "places that become free go to the next batch" in text
    assert "is not predicted" in text


def test_samples_that_draw_so_many_tokens_of_each_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("--max_staleness", "2", "--partial_rollout", "recompute", "--tokens_per_version", "40")
    text = said(tmp_path, capsys, "--devices", "2", "--plan", "colocated", *keys)
    assert "A sample draws 40 tokens in a step that does not train on it, at most" in text
    assert "the actor is trained when the rollouts of the step have ended" in text
