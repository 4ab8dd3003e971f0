"""For stages of equal work: how many layers the head, which the last stage has besides, is worth on this machine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from plait.launch.local import LocalProcesses
from plait.launch.worker_context import WorkerContext

REPEATS = 3
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Shares:
    layers: int
    head: tuple[float, float]
    """In layers: the head's CPU time in training (forward and backward) and in scoring (forward)."""


def shares_of(recipe: dict[str, Any]) -> Shares:
    """Measured in a process of one thread, on one group of the recipe's samples."""
    with LocalProcesses(threads=1).start(_Timed, 1) as group:
        return group.submit(0, "shares", recipe).result(DEADLINE_S)


class _Timed:
    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank

    def shares(self, recipe: dict[str, Any]) -> Shares:
        import torch

        from plait.data.packed import pack
        from plait.models.language_loading import load_model

        torch.set_num_threads(1)
        model = load_model(recipe["model"], dtype=recipe["dtype"])
        prompt = json.loads(Path(recipe["data"]["source"]).read_text().splitlines()[0])["prompt"]
        prompt_ids = tuple(model.tokenizer(prompt)["input_ids"])
        response = (prompt_ids * recipe["sampling"]["max_response_tokens"])[: recipe["sampling"]["max_response_tokens"]]
        batch = pack([(prompt_ids, [response] * recipe["samples_per_prompt"])], model.device)
        model.module.requires_grad_(True)
        measured = [_seconds(model, batch) for _ in range(REPEATS + 1)][1:]
        layers = model.config.get_text_config().num_hidden_layers
        forward, backward, head_forward, head_backward = (median(times) for times in zip(*measured, strict=True))
        train = (head_forward + head_backward) / (forward + backward)
        return Shares(layers, (layers * train, layers * head_forward / forward))


def _seconds(model: Any, batch: Any) -> tuple[float, float, float, float]:
    """CPU seconds: layers forward, layers backward, head forward, head backward."""
    times = [time.process_time()]
    hidden_TH = model.stage(batch)
    times.append(time.process_time())
    cut_TH = hidden_TH.detach().requires_grad_(True)
    logprobs_R, _ = model.logprobs_of(cut_TH, batch, 1.0)
    times.append(time.process_time())
    logprobs_R.sum().backward()
    times.append(time.process_time())
    hidden_TH.backward(cut_TH.grad)
    times.append(time.process_time())
    for parameter in model.module.parameters():
        parameter.grad = None
    forward, head_forward, head_backward, backward = (after - before for before, after in pairwise(times))
    return forward, backward, head_forward, head_backward
