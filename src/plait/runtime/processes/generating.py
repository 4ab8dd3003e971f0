"""Answer the prompts of a file, by this process or by several that each answer a part of them."""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from plait.data.records import Prompt
from plait.data.sources import Source
from plait.errors import ConfigError
from plait.generation.request import Request
from plait.launch.failures import WorkerError
from plait.launch.group import Group, Handle
from plait.launch.local import LocalProcesses
from plait.launch.machine import usable_cores, visible_devices
from plait.launch.watch import Watch
from plait.launch.worker_context import WorkerContext
from plait.observe.loading import loading
from plait.observe.progress import Progress
from plait.runtime.evaluating.generate import answer, answer_alone
from plait.runtime.evaluating.generate_job import Asked, Earlier, Job, checked
from plait.runtime.evaluating.generation_report import GenerationReport, Meter, row_of
from plait.runtime.process import set_up
from plait.runtime.processes.forwarded_signals import ForwardedSignals, forwarding_signals
from plait.runtime.processes.launching import RUN_S, as_alone, crowding
from plait.runtime.stopping import LEADERS_SIGNAL
from plait.stop_signals import interrupts_kept, let_be, raise_lost

SENT = 256
"""Prompts, or earlier samples, that go to a process in one message."""


def generate(
    job: Job, keep: Callable[[dict[str, Any]], None], done: Collection[tuple[int, int]] = ()
) -> GenerationReport:
    """Answer every prompt. Everything is checked before a model is loaded. A response is the same whichever process
    draws it, up to the rounding of forwards with other samples in the batch.

    Args:
        keep: is given each response as soon as it has ended (`generation_report.row_of`).
        done: (row, sample) that are not drawn again.

    Raises:
        UserError: a prompt, a key or the model cannot be used; or there are fewer GPUs.
        RunError: a process could not go on; says which, and in what.
    """
    if job.device != "cpu" and job.devices > max(1, found := visible_devices()):
        raise ConfigError(f"--devices: expected at most {found}, the GPUs that are visible, found {job.devices}")
    set_up(job.threads)
    with interrupts_kept():
        asked = checked(job)
        raise_lost()
        parts = _parts(asked.requests, done, job.devices)
        if not parts:
            return GenerationReport(0, 0, 0.0, Meter())
        if len(parts) > 1:
            job = replace(job, threads=job.threads or max(1, usable_cores() // len(parts)))
            return _by_processes(job, asked, parts, keep, done)
        with Progress(0) as progress:
            return answer_alone(job, asked, lambda sample: keep(row_of(sample)), progress, done)


def _parts(requests: Sequence[Request], done: Collection[tuple[int, int]], most: int) -> list[list[Request]]:
    """The prompts that lack responses, dealt out: at most so many parts, none of them empty."""
    lacking = [
        request
        for request in requests
        if any((request.prompt.uid, index) not in done for index in range(request.num_samples))
    ]
    count = min(most, len(lacking))
    return [lacking[first::count] for first in range(count)]


class Answering:
    """One of the processes, which has a copy of the model; see `launch`."""

    def __init__(self, context: WorkerContext, job: Job, asked: Asked) -> None:
        self._context, self._job, self._asked = context, job, asked
        self._requests: list[Request] = []
        self._earlier: list[Earlier] = []
        set_up(job.threads)
        if job.device != "cpu":
            import torch

            torch.cuda.set_device(context.place.device)

    def take(self, requests: Sequence[Request], earlier: Sequence[Earlier]) -> None:
        """What is asked besides."""
        self._requests += requests
        self._earlier += earlier

    def answer(self, done: Collection[tuple[int, int]]) -> GenerationReport:
        """Each response is told as soon as it has ended."""
        asked = replace(self._asked, requests=self._requests, earlier=self._earlier)
        keep = lambda sample: self._context.tell(json.dumps(row_of(sample)))
        try:
            return answer(self._job, asked, keep, _Told(self._context), done, stopped_by=(LEADERS_SIGNAL,))
        finally:
            signal.signal(LEADERS_SIGNAL, let_be)  # where it ended this process, it would end the others, too


class _Told:
    """What a process has to say goes to the one that started it, which counts the responses."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def start(self, steps_done: int = 0) -> None: ...
    def phase(self, name: str, total: int = 0, unit: str = "") -> None: ...
    def advance(self, count: int = 1, *, note: str = "") -> None: ...

    def message(self, text: str) -> None:
        self._context.tell(json.dumps(text))


class _Responses:
    """What processes tell: responses, which are kept with the columns of their prompts, and messages, shown once."""

    def __init__(self, requests: Iterable[Request], keep: Callable[[dict[str, Any]], None], progress: Progress) -> None:
        self._columns = {request.prompt.uid: request.prompt.columns for request in requests}
        self._keep, self._progress = keep, progress
        self._messages: set[str] = set()
        self.num_kept = 0
        self.meter = Meter()

    def hear(self, word: str) -> None:
        match json.loads(word):
            case str(text) if text not in self._messages:
                self._messages.add(text)
                self._progress.message(text)
            case dict(row):
                self._keep({**self._columns[row["row"]], **row})
                self.num_kept += 1
                self.meter.tokens += len(row["token_ids"])
                self._progress.advance()


def _by_processes(
    job: Job,
    asked: Asked,
    parts: Sequence[Sequence[Request]],
    keep: Callable[[dict[str, Any]], None],
    done: Collection[tuple[int, int]],
) -> GenerationReport:
    told: queue.SimpleQueue[str | list[GenerationReport] | WorkerError] = queue.SimpleQueue()
    watch = Watch(on_devices=job.device != "cpu", heard=lambda rank, text: told.put(text))
    launcher = LocalProcesses(threads=job.threads, watch=watch)
    ranks = range(len(parts))
    num_asked = sum((r.prompt.uid, i) not in done for part in parts for r in part for i in range(r.num_samples))
    loading(f"{len(parts)} processes, each with a copy of {job.model}")
    with Progress(0) as progress:
        if job.device == "cpu" and (note := crowding(len(parts), job.threads, usable_cores())):
            progress.message(note)
        bare = replace(job, prompts=Source(job.prompts.name, ()), lengths=None, history=())
        nothing = replace(asked, requests=(), earlier=())
        responses = _Responses(asked.requests, keep, progress)
        signals: ForwardedSignals | None = None
        began = time.perf_counter()
        try:
            with (
                launcher.start(Answering, len(parts), arguments=(bare, nothing)) as group,
                forwarding_signals(group, ranks) as signals,
            ):
                handles = [_ask(group, rank, part, asked.earlier, done) for rank, part in enumerate(parts)]
                threading.Thread(target=_wait, args=(handles, told), daemon=True).start()
                progress.start()
                progress.phase("generate", num_asked, "samples")
                while isinstance(word := told.get(), str):
                    responses.hear(word)
                if isinstance(word, WorkerError):
                    raise word
                return GenerationReport.of_all(word)
        except WorkerError as error:
            if signals is not None and signals.ended_it(error.failure):
                return GenerationReport(responses.num_kept, num_asked, time.perf_counter() - began, responses.meter)
            raise as_alone(error, peers=False) from error


def _ask(
    group: Group,
    rank: int,
    part: Sequence[Request],
    earlier: Sequence[Earlier],
    done: Collection[tuple[int, int]],
) -> Handle:
    told = [replace(request, prompt=Prompt(request.prompt.uid, "", request.prompt.token_ids)) for request in part]
    for first in range(0, max(len(told), len(earlier)), SENT):
        group.submit(rank, "take", told[first : first + SENT], earlier[first : first + SENT])
    rows = {request.prompt.uid for request in part}
    return group.submit(rank, "answer", {place for place in done if place[0] in rows})


def _wait(handles: Sequence[Handle], told: queue.SimpleQueue[Any]) -> None:
    try:
        told.put([handle.result(RUN_S) for handle in handles])
    except WorkerError as error:
        told.put(error)
