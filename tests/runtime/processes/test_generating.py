"""Several processes that answer the prompts of a file: what goes to them and comes back, and how they are stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from plait.data.sources import Source, read_prompts
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.launch import wire
from plait.runtime.evaluating.generate_job import Job
from plait.runtime.processes.generating import generate
from plait.runtime.stopping import LEADERS_SIGNAL

pytestmark = pytest.mark.process


def job_of(tiny_folder: Path, tmp_path: Path, *rows: str, **options: Any) -> Job:
    """Two processes with a thread each, and float64, which compiles nothing."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{row}\n" for row in rows))
    return Job(
        str(tiny_folder),
        Source("prompts", tuple(read_prompts(prompts))),
        Sampling(max_tokens=2),
        engine=SamplingSettings(speculation="off", max_running=1),
        **{"dtype": "float64", "devices": 2, "threads": 1} | options,
    )


def test_columns_of_the_data_stay_where_they_are(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests of a program may take a megabyte in each row."""
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1 << 15)
    program = "x" * (1 << 16)
    job = job_of(tiny_folder, tmp_path, *(f'{{"tests": "{program}", "prompt": "what is {n}?"}}' for n in range(3)))
    rows: list[dict[str, Any]] = []
    report = generate(job, rows.append)
    assert sorted(row["row"] for row in rows) == [0, 1, 2]
    for row in rows:
        assert list(row)[:4] == ["prompt", "tests", "row", "sample"]
        assert (row["tests"], row["prompt"]) == (program, f"what is {row['row']}?")
    assert report.is_whole
    assert report.processes == 2
    assert report.limit_s is None


def test_a_process_that_has_ended_its_part_is_not_ended_by_a_signal_to_stop(
    tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others end their step and report; of these, one shows the signal's message."""
    job = job_of(
        tiny_folder,
        tmp_path,
        '{"prompt": "what is 1?"}',
        '{"prompt": "what is 2?"}',
        lengths=[[1] * 32, [200] * 32],
        samples_per_prompt=32,
    )
    rows: list[int] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row["row"])
        if rows.count(0) < 32:
            return
        if rows.count(1) == 1:
            time.sleep(1.0)  # rank 0 returns
            children = sorted(psutil.Process().children(), key=lambda child: (child.create_time(), child.pid))
            first, _ = children[-2:]  # behind those from which processes of tests begin warm
            os.kill(first.pid, LEADERS_SIGNAL)
        if rows.count(1) == 3:
            signal.raise_signal(signal.SIGINT)

    report = generate(job, keep)
    assert rows.count(0) == 32
    assert 32 < report.num_samples == len(rows) < report.num_asked == 64
    assert report.processes == 2, "each has told what it counted"
    assert report.meter.tokens >= sum(1 if row == 0 else 200 for row in rows)
    assert capfd.readouterr().err.count("stopping after this step, with the responses so far") == 1
