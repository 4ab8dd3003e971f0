"""What a run has drawn in its earlier stays, for engines that draft: a resumed run drafts from it as before.

It stands in the run's own files of samples, and in the checkpoint for batches that were generated ahead. Without it a
run says the same and drafts less, so what is gone or damaged is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from plait.data.records import FinishReason, Prompt, Sample, replies_in
from plait.dataflow import CallKind
from plait.errors import DataError
from plait.observe.run_log import read_rows
from plait.recipes.engine_checks import speculates
from plait.runtime.folder.run_files import RunFiles
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.steps.drawn import DrawnBatch
from plait.runtime.workers import Workers
from plait.speculation.pool import most_entries

Drawn = tuple[str, Sample]
"""A call of the flow, and a finished sample of it."""
_COLUMNS = ("prompt_ids", "token_ids", "sampling_logprobs")


def recall_earlier(
    workers: Workers, prepared: Prepared, files: RunFiles, step: int, ahead: Sequence[DrawnBatch]
) -> None:
    """Tell the engines that draft what their roles have drawn: of the newest as much as their pools hold.

    Args:
        step: up to which samples are read; 0: nothing has been trained on.
        ahead: batches of later steps, as far as they are drawn.
    """
    sampling, roles = prepared.recipe.sampling, dict[str, str]()
    for node in prepared.flow.of_kind(CallKind.GENERATE):
        assert node.role is not None, f"nobody generates in {node.call}"
        roles[node.call] = node.role
    if not speculates(prepared.recipe):
        return
    names = {node.id: node.call for node in prepared.flow.nodes}
    room = dict.fromkeys(roles.values(), most_entries(sampling.draft_pool_bytes))
    kept: dict[str, list[Sample]] = {role: [] for role in room}
    prompts: set[tuple[str, tuple[int, ...]]] = set()
    for call, sample in _newest_first(files, roles, step, _ahead(names, ahead)):
        role, prompt_ids = roles[call], sample.prompt.token_ids
        room[role] -= sample.num_tokens + (0 if (role, prompt_ids) in prompts else len(prompt_ids))
        prompts.add((role, prompt_ids))
        if room[role] >= 0:
            kept[role].append(sample)
        elif max(room.values()) < 0:
            break
    for role, samples in kept.items():
        workers.draft_knowledge.recall(role, samples[::-1])


def _ahead(names: Mapping[int, str], batches: Sequence[DrawnBatch]) -> list[Drawn]:
    """Unfinished samples are left out: they are heard when they go on."""
    return [
        (names[node], sample)
        for batch in batches
        for node, samples in batch.samples.items()
        for sample in samples
        if sample.finish_reason is not FinishReason.OPEN
    ]


def _newest_first(files: RunFiles, calls: Iterable[str], step: int, ahead: Sequence[Drawn]) -> Iterator[Drawn]:
    yield from reversed(ahead)
    for number in range(step, 0, -1):
        try:
            rows = read_rows(files.samples(number))
        except (OSError, DataError):
            continue
        for row in reversed(rows):
            call = row.get("rollout", next(iter(calls)))
            prompt_ids, token_ids, logprobs = (row.get(key) or () for key in _COLUMNS)
            if call in calls and prompt_ids and token_ids and len(logprobs) == len(token_ids):
                uid, *_, index = str(row["uid"]).split(".")
                prompt, reason = Prompt(int(uid), "", tuple(prompt_ids)), FinishReason(row["finish_reason"])
                told = tuple(token_ids), tuple(logprobs)
                yield call, Sample(prompt, int(index), *told, "", reason, replies=replies_in(row))
