"""The arguments of a reward call, in TRL's names (`signature` turns them into those of the other forms)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.data.formats import LOG_ARGUMENTS
from plait.data.records import SAMPLE_UID, Sample
from plait.dataflow.unfit import nearest
from plait.rewards.function_kinds import REPLY
from plait.rewards.functions import RewardFunction
from plait.rewards.signature import COLUMNS_OF, GIVEN, Form, Signature


def call_arguments(samples: Sequence[Sample], rollout: str = "") -> dict[str, list[Any]]:
    """Keyword arguments for these samples, one entry of each list per sample.

    `prompts` are as they stand in the data; completions are plain texts for text prompts and
    `[{"role": "assistant", "content": …}]` for messages; `completion_ids` are the ids of the response, stop tokens and
    replies included; `turns` are the messages behind the prompt, whatever that is; `sample_uid` tells each sample from
    all others of the run. Every other column of the row comes under its own name.

    Args:
        rollout: the call that drew the samples, where the flow has several.
    """
    prompts = [sample.prompt.columns.get("prompt", sample.prompt.text) for sample in samples]
    arguments: dict[str, list[Any]] = {
        "prompts": prompts,
        "completions": [
            sample.text if isinstance(prompt, str) else sample.messages
            for sample, prompt in zip(samples, prompts, strict=True)
        ],
        "completion_ids": [list(sample.all_ids) for sample in samples],
        "turns": [sample.messages for sample in samples],
        SAMPLE_UID: [f"{rollout}-{sample.uid}" if rollout else sample.uid for sample in samples],
    }
    names = dict.fromkeys(name for sample in samples for name in sample.prompt.columns if name != "prompt")
    return arguments | {name: [sample.prompt.columns.get(name) for sample in samples] for name in names}


def missing_arguments(function: RewardFunction, signature: Signature, columns: Sequence[str]) -> str | None:
    """A message if `function` has a parameter without a default that neither its form nor a column fills; or if it
    replies, and a column would stand for what was said."""
    form = signature.form
    data = [name for name in columns if name != "prompt"]
    if function.kind is REPLY and "turns" in data:
        return (
            "samples have several turns, and functions get what was said as `turns`, but the data have a column of "
            "that name; rename it"
        )
    missing = [
        name
        for name in signature.required
        if name not in GIVEN[form] and not any(column in data for column in COLUMNS_OF.get((form, name), (name,)))
    ]
    if not missing:
        return None
    arguments = [name for name in (*GIVEN[form], *data) if name not in LOG_ARGUMENTS]
    hints = ", ".join(f"`{name}`{_from(form, name)}{nearest(name, arguments)}" for name in missing)
    if function.kind is REPLY:
        return (
            f"`turns.reply`: `{function.name}` needs {hints}, but is given messages and the columns of the data: "
            f"{', '.join(data)}; add the column to the data, or a default to the parameter"
        )
    return (
        f"`reward.functions`: `{function.name}` needs {hints}, but a reward of {form}'s form is given "
        f"{', '.join(arguments)}; add the column to the data, or a default to the parameter"
    )


def _from(form: Form, name: str) -> str:
    """Where it would come from, if not from the column of its name."""
    if form is Form.TRL and name in ("trainer_state", "environments"):
        return " (which TRL gives and plait does not, docs/rewards.md)"
    sources = COLUMNS_OF.get((form, name))
    return f" (column {' or '.join(f'`{source}`' for source in sources)})" if sources else ""
