"""What earlier samples the command that samples tells its engine: the newest that there is room for, file by file; and
with how many threads it computes."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.data.sources import Source, read_prompts
from plait.errors import DataError
from plait.generation.sampling import Sampling
from plait.generation.settings import MIN_POOL_BYTES, SamplingSettings
from plait.generation.speculator import Speculator
from plait.runtime.evaluating import generate_job
from plait.runtime.processes import generating
from plait.runtime.processes.generating import generate
from plait.speculation.pool import most_entries

ROOM = most_entries(MIN_POOL_BYTES)


class RowsOfFile(list[Any]):
    """A list whose end can be seen."""


def files(folder: Path, *counts: int) -> list[Path]:
    """Files of so many samples of 4 tokens each, of a prompt of 8."""
    paths = []
    for number, count in enumerate(counts):
        lines = [
            json.dumps(
                {
                    "prompt": "what is 7?",
                    "prompt_ids": [*range(3, 11)],
                    "token_ids": [5, 6, 7, 8 + number],
                    "sampling_logprobs": [-1.0, -0.5, -0.25, -sample / 7],
                    "advantages": [0.5] * 4,
                }
            )
            for sample in range(count)
        ]
        paths.append(folder / f"step-{number:06d}.jsonl")
        paths[-1].write_text("".join(line + "\n" for line in lines))
    return paths


def told(tiny_folder: Path, history: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine is told."""
    heard: list[Any] = []
    monkeypatch.setattr(Speculator, "recall", lambda self, *sample: heard.append(sample))
    prompts = history[0].with_name("prompts.jsonl")
    prompts.write_text('{"prompt": "what is 7?"}\n')
    job = generate_job.Job(
        str(tiny_folder),
        Source("prompts", tuple(read_prompts(prompts))),
        Sampling(max_tokens=2),
        engine=SamplingSettings(speculation=2, draft_pool_bytes=MIN_POOL_BYTES),
        dtype="float32",
        history=history,
    )
    generate(job, lambda row: None)
    return [(prompt_ids, list(token_ids), list(logprobs)) for prompt_ids, token_ids, logprobs in heard]


def test_the_rows_of_one_file_are_held_at_a_time(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[weakref.ref[RowsOfFile]] = []

    def reading(path: Path, *, key: str) -> list[Any]:
        assert not any(rows() for rows in read), "those of another file are still there"
        rows = RowsOfFile(read_prompts(path, key=key))
        read.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(generate_job, "read_prompts", reading)
    heard = told(tiny_folder, files(tmp_path, 2, 3, 1), monkeypatch)
    assert len(read) == 3
    assert heard == [
        (tuple(range(3, 11)), [5, 6, 7, 8 + number], [-1.0, -0.5, -0.25, -sample / 7])
        for number, count in enumerate((2, 3, 1))
        for sample in range(count)
    ], "the oldest first, and every bit of it"
    assert len({id(prompt_ids) for prompt_ids, *_ in heard}) == 1


def test_replies_stand_between_what_was_drawn(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = files(tmp_path, 1, 1)
    row = json.loads(history[0].read_text())
    history[0].write_text(json.dumps(row | {"replies": [[1, [20, 21]], [3, [22]]]}) + "\n")
    history[1].write_text(json.dumps(row | {"replies": "none of ours"}) + "\n")
    heard = told(tiny_folder, history, monkeypatch)
    assert [ids for _, ids, _ in heard] == [[5, 20, 21, 6, 7, 22, 8], [5, 6, 7, 8]]
    assert heard[0][2] == [-1.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0]
    history[0].write_text(json.dumps(row | {"replies": [[1, [10**9]]]}) + "\n")
    with pytest.raises(DataError, match="expected a sample of a model of"):
        told(tiny_folder, history, monkeypatch)


def test_what_the_pool_has_no_room_for_is_not_read(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = files(tmp_path, 1, ROOM // 4, ROOM // 8)
    history[0].write_text("damaged")
    heard = told(tiny_folder, history, monkeypatch)
    assert ROOM <= 8 + 4 * len(heard) < ROOM + 8
    newest = ROOM // 8
    assert [token_ids[-1] for _, token_ids, _ in heard] == [9] * (len(heard) - newest) + [10] * newest


@pytest.mark.parametrize("devices", [1, 3])
def test_one_process_has_the_threads_that_the_environment_names(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    """Also where more are asked for than there are prompts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(generating, "usable_cores", lambda: 64)
    computed_with: list[int] = []
    answer = generating.answer_alone
    monkeypatch.setattr(
        generating, "answer_alone", lambda *args: (computed_with.append(torch.get_num_threads()), answer(*args))[1]
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "what is 7?"}\n')
    job = generate_job.Job(
        str(tiny_folder), Source("prompts", tuple(read_prompts(prompts))), Sampling(max_tokens=2), devices=devices
    )
    threads = torch.get_num_threads()
    try:
        generate(replace(job, dtype="float32"), lambda row: None)
    finally:
        torch.set_num_threads(threads)
    assert computed_with == [2]
