"""What a run measured corrects what its machine's kept profile predicts: seconds in a step of each kind of call,
beside what the profile says for the plan and the lengths that the run had."""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from plait.cost.drafts import Drafts
from plait.cost.kept_profiles import keep_profile, kept_profiles, profile_path
from plait.cost.machine import machine_name
from plait.cost.profile import MOVE, KindRecord, Profile, RunRecord, kind_on
from plait.dataflow import CallKind, Dataflow
from plait.dataflow.made_rows import prompts_each
from plait.errors import UserError
from plait.file_lock import alone_at
from plait.observe.run_log import read_steps
from plait.observe.screen import say
from plait.paths import at_home
from plait.recipes.role_models import function_names
from plait.recipes.turn_checks import said_of_rounds
from plait.runtime.folder.history import History
from plait.runtime.folder.run_files import RunFiles, samples_of
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.prediction.draft_forecast import drafts_of
from plait.runtime.prediction.forecast import STEP, WARM_UP, predicted_seconds, write_forecast
from plait.runtime.prediction.lengths import recorded
from plait.runtime.prediction.machine import machine_of
from plait.runtime.prediction.planning import Planning
from plait.schedule.named_plans import MODE_OF
from plait.schedule.plan import Plan

LOCK_S = 10.0
"""How long a run that has ended waits for another to write the profile of their machine: that takes milliseconds."""


def steady_rows(steps: Sequence[Mapping[str, Any]], begun: Sequence[int]) -> list[Mapping[str, Any]]:
    """Metrics of the steps of some stays, but for the first ones of each.

    Args:
        steps: metrics of all steps of the run.
        begun: the steps after which these stays began, rising.
    """
    rows = [(row, bisect_left(begun, row["step"])) for row in steps]
    return [row for row, stay in rows if stay and row["step"] - begun[stay - 1] > WARM_UP]


def refine(prepared: Prepared, folder: Path, steady: Sequence[Mapping[str, Any]]) -> Profile | None:
    """Hold a run's steps against what the kept profile of its machine, dtype, threads and layers predicts of the
    lengths that these had, and keep that with the profile; returns it. None where there is no such profile, nothing was
    measured, or samples are drawn in rounds or outlive their step, of which the prediction is another
    (`turn_checks.said_of_rounds`).

    Args:
        folder: of the run, whose samples have the lengths.
        steady: metrics of its steps by this plan, as of `steady_rows`.
    """
    recipe, plan = prepared.recipe, prepared.plan
    if not steady or said_of_rounds(prepared.flow, recipe) is not None:
        return None
    cluster, source = machine_of(recipe, prepared.shape, plan.num_ranks)
    if not source.exact:
        return None
    predictions = []
    with contextlib.suppress(UserError, OSError):  # the run itself went well
        lengths = prepared.lengths
        if prepared.flow.of_kind(CallKind.GENERATE):
            files = samples_of(folder, [row["step"] for row in steady])
            if (told := recorded(files, prepared)) is None:
                return None
            lengths = replace(told, beside={**lengths.beside, **told.beside})
        for corrected in (False, True):
            planning = Planning(
                recipe, prepared.flow, prepared.models, prepared.shapes, cluster, lengths, source, corrected
            )
            predictions.append(predicted_seconds(planning.predict(plan).timeline))
    if len(predictions) < 2:
        return None
    record = run_record(plan.num_ranks, kinds_of(prepared.flow, plan), predictions[0], predictions[1], steady)
    if record is None or source.profile is None:
        return None
    record = record.model_copy(update={"functions": _functions(prepared, steady), "drafts": drafts_of(steady)})
    try:
        return _kept_with(source.profile, record)
    except OSError as error:  # the run itself went well
        say(f"what this run measured does not correct the profile of its machine: {error}", file=sys.stderr)
        return None


def run_record(
    devices: int,
    kinds: Mapping[str, str],
    profile: Mapping[str, float],
    predicted: Mapping[str, float],
    rows: Sequence[Mapping[str, float]],
) -> RunRecord | None:
    """
    Args:
        kinds: call → its kind.
        profile: call → its seconds in a step as the profile alone says them; predicted: as runs before corrected them.
            Both with `step`.
        rows: metrics of steps, of whose seconds the median is taken.

    Returns:
        Of the kinds those whose calls were predicted and measured; None where no seconds of steps are there.
    """
    measured = {
        call: median(seconds_of_steps)
        for call in profile
        if (seconds_of_steps := [row[f"timing_s/{call}"] for row in rows if f"timing_s/{call}" in row])
    }
    if not measured.get(STEP) or not predicted.get(STEP):
        return None
    sums: dict[str, list[float]] = {}
    for call in measured.keys() & kinds.keys():
        total = sums.setdefault(kinds[call], [0.0, 0.0, 0.0])
        for place, seconds in enumerate((profile[call], predicted[call], measured[call])):
            total[place] += seconds
    kinds_of_run = {
        kind: KindRecord(profile_s=total[0], predicted_s=total[1], measured_s=total[2])
        for kind, total in sorted(sums.items())
        if min(total) > 0
    }
    return RunRecord(
        devices=devices, predicted_s=predicted[STEP], measured_s=measured[STEP], kinds=kinds_of_run, steps=len(rows)
    )


def kinds_of(flow: Dataflow, plan: Plan) -> dict[str, str]:
    """Call, and move of weights as timelines name it → its kind; functions of rewards are asked no model, and left
    out where they alone score."""
    ranks = {(place.call, place.mode): len(place.ranks) for place in plan.placements}
    modes = {node.call: MODE_OF[node.kind] for node in flow.nodes if node.role is not None and node.kind in MODE_OF}
    calls = {call: kind_on(mode, ranks[call, mode]) for call, mode in modes.items() if (call, mode) in ranks}
    return {**calls, **{f"{role}.weights": MOVE for role in sorted(flow.trained_roles)}}


def _functions(prepared: Prepared, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Names of reward functions → their seconds for a sample, where no model scores for the same role."""
    recipe, flow, seconds = prepared.recipe, prepared.flow, {}
    for node in flow.of_kind(CallKind.SCORE):
        role, source = str(node.role), next((other for other in flow.nodes if other.id == node.rows), None)
        busy = [row[f"timing_s/{node.call}"] for row in rows if f"timing_s/{node.call}" in row]
        if role not in prepared.functions or any(other.role == role for other in prepared.models) or not busy:
            continue
        if source is not None and source.kind is CallKind.GENERATE and (names := function_names(recipe, role)):
            prompts = recipe.prompts_per_step * prompts_each(flow, source, recipe.samples_per_prompt)
            samples = prompts * source.generation.num_samples(recipe.samples_per_prompt)
            seconds[names] = median(busy) / samples
    return seconds


def recorded_drafts(lengths: str | None) -> Drafts | None:
    """What drafts brought to the run whose folder `--lengths` names; None if it is no folder of a run, or the run did
    not draft.

    Raises:
        ConfigError: as of `paths.at_home`.
    """
    folder = None if lengths is None else Path(at_home(lengths, "--lengths"))
    if folder is None or not RunFiles(folder).metrics.is_file():
        return None
    record = drafts_of(read_steps(RunFiles(folder).metrics)[WARM_UP:])
    return None if record is None else Drafts(record.tokens, record.rows, record.passes)


def _kept_with(profile: Profile, record: RunRecord) -> Profile:
    """The profile as it is kept now, with this record; others may have added theirs meanwhile."""
    path = profile_path(profile)
    with alone_at(path.with_suffix(".lock"), LOCK_S):
        newest = kept_profiles(machine_name(profile.device), profile.device)
        kept_profile = next((candidate for candidate in newest if profile_path(candidate) == path), profile)
        kept_profile = kept_profile.with_run(record)
        keep_profile(kept_profile)
    return kept_profile


def conclude(prepared: Prepared, folder: Path) -> None:
    """Leave the prediction beside what was measured in the run's folder, and correct the kept profile by it."""
    history, steps = History(folder, resume=True), read_steps(RunFiles(folder).metrics)
    with contextlib.suppress(OSError):  # a full disk has been said
        write_forecast(prepared, folder, [row for row in steps if row["step"] > history.comparable_from])
    refine(prepared, folder, steady_rows(steps, history.uncounted))
