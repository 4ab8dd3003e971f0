"""The arguments of a reward call, in TRL's signature: f(prompts, completions, completion_ids, **columns)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.data.records import Sample
from plait.data.sources import LOG_ARGUMENTS, SAMPLE_ARGUMENTS, nearest


def call_arguments(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Keyword arguments for these samples, one entry of each list per sample.

    `prompts` are as they stand in the data; completions are plain texts for text prompts and
    `[{"role": "assistant", "content": …}]` for messages; `completion_ids` are the sampled ids, stop token included.
    Every other column of the row comes under its own name.
    """
    prompts = [sample.prompt.columns.get("prompt", sample.prompt.text) for sample in samples]
    arguments: dict[str, list[Any]] = {
        "prompts": prompts,
        "completions": [
            sample.text if isinstance(prompt, str) else [{"role": "assistant", "content": sample.text}]
            for sample, prompt in zip(samples, prompts, strict=True)
        ],
        "completion_ids": [list(sample.token_ids) for sample in samples],
    }
    names = dict.fromkeys(name for sample in samples for name in sample.prompt.columns if name != "prompt")
    return arguments | {name: [sample.prompt.columns.get(name) for sample in samples] for name in names}


def missing_arguments(function: str, required: Sequence[str], columns: Sequence[str]) -> str | None:
    """A message if `function` has a parameter without a default that is neither TRL's nor a column of the data."""
    given = [*SAMPLE_ARGUMENTS, *(name for name in columns if name != "prompt")]
    missing = [name for name in required if name not in given and name not in LOG_ARGUMENTS]
    if not missing:
        return None
    hints = ", ".join(f"`{name}`{nearest(name, given)}" for name in missing)
    return f"`reward.functions`: `{function}` needs {hints}, but a reward is given {', '.join(given)}"
