"""The doctor at work in a run: facts that only the runtime can establish, probes, and `doctor.jsonl`.

After each step it adds to the step's metrics what the samples, the masks and the weights say (facts under `doctor/`,
which stay out of the logs), has `observe.doctor` examine them, and writes what that says. Every fact is a pass over
numbers that are there, and a hash over a fixed sample of each model's weights; models run again only in a probe, when
engine and trainer disagree and the doctor is about to say so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.data.records import FinishReason, Sample
from plait.data.rows import FloatArray, Rows
from plait.dataflow import CallKind, Dataflow, Grain, Node
from plait.engines import Workers
from plait.errors import DataError, RunError
from plait.models.backbone_model import BackboneModel
from plait.models.flat_weights import FlatWeights
from plait.models.language_model import LanguageModel
from plait.observe.doctor import Doctor, Finding
from plait.observe.doctor_reading import Diagnosis, Reading, Severity
from plait.observe.doctor_settings import DoctorSettings
from plait.observe.run_log import RunLog, cut_after, damaged, read_steps
from plait.recipes.recipe import Recipe
from plait.runtime.loss_splits import split_gaps
from plait.runtime.probe import Suspects, diagnose
from plait.runtime.roles import ModelRole, RewardRole, RoleRuntime
from plait.runtime.step import StepState

SAMPLED_WEIGHTS = 1 << 17
"""Weights of a model that its fingerprint looks at, evenly spread."""
END_TOKENS = (
    "</s>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
)
"""Tokens that end a turn in the families that are admitted."""


class RunDoctor:
    """Open before the first step of a run or of its continuation: the weights are then those that the step begins with.

    Args:
        path: `doctor.jsonl`; cut back to `last_step` when a run is resumed, else begun anew.
        workers: knows where weights are.
        last_step: step after which the run goes on.
        tell: shows a line to the user (`Progress.message`).

    Raises:
        RunError: the file cannot be written.
    """

    def __init__(
        self,
        flow: Dataflow,
        roles: Mapping[str, RoleRuntime],
        recipe: Recipe,
        settings: DoctorSettings,
        path: Path,
        *,
        workers: Workers,
        resume: bool,
        last_step: int,
        tell: Callable[[str], None],
    ) -> None:
        self._flow = flow
        self._roles = roles
        self._recipe = recipe
        self._settings = settings
        self._tell = tell
        self._workers = workers
        self._doctor = Doctor(settings, recipe.dtype.value)
        if resume and path.exists():
            cut_after(path, last_step)
            self._restore(path)
        self._log = RunLog(path, resume=resume)
        self._trained = {node.role for node in flow.of_kind(CallKind.TRAIN)}
        self._models = _models(roles)
        self._ends = self._end_ids()
        for name, weights in self._weights().items():
            self._doctor.remember(last_step, self._first(name), fingerprint(weights))
        self._before = self._fingerprints()
        self._write()

    def _restore(self, path: Path) -> None:
        try:
            self._doctor.restore(read_steps(path))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise damaged(path, repr(error)) from error

    def after_step(self, state: StepState, metrics: Mapping[str, float]) -> list[Finding]:
        """Examine the step that has just ended, weights published: what is new to say is told, written and returned.

        Args:
            metrics: all of the step's, `training/policy_version` after it included.

        Raises:
            RunError: the file cannot be written.
        """
        step = state.step + 1
        numbers = {**metrics, **self._facts(state, metrics)}
        findings = self._doctor.examine(step, numbers, lambda reading: self._probe(state, reading))
        for finding in findings:
            self._tell(str(finding))
        self._write()
        return findings

    def stop_if_asked(self, findings: Sequence[Finding]) -> None:
        """To be called when the step is written.

        Raises:
            RunError: `doctor.stop_on` says that these findings end the run.
        """
        if self._settings.stop_on == "never":
            return
        limit = Severity(self._settings.stop_on)
        grave = [finding for finding in findings if finding.severity.rank >= limit.rank]
        if grave:
            raise RunError(f"{grave[0]}; `doctor.stop_on` is `{self._settings.stop_on}`")

    def summary(self) -> str:
        """The table for the end of the run; empty if all was well."""
        return self._doctor.summary_text()

    def sync(self) -> None:
        """Force the file to disk. Raises OSError."""
        self._log.sync()

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> RunDoctor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        for row in self._doctor.take_rows():
            self._log.append(row)

    # -- facts

    def _facts(self, state: StepState, metrics: Mapping[str, float]) -> dict[str, float]:
        """What the rules read under `doctor/`; a fact that does not apply is absent."""
        facts: dict[str, float] = {}
        rollouts = [rows for node, rows in self._rollouts(state)]
        samples = [sample for rows in rollouts for sample in rows.samples]
        if samples:
            facts |= self._of_samples(samples, metrics)
            facts["groups_broken"] = float(self._groups_are_broken(state))
            facts["uses_groups"] = float(any(_compares_siblings(node) for node in self._flow.nodes))
        if self._flow.calls("ref"):
            facts["has_reference"] = 1.0
        facts |= self._of_reference(state) | self._of_training(state) | self._of_weights(state.step + 1)
        gaps = split_gaps(self._flow, state, self._recipe.sampling.max_response_tokens)
        facts |= {f"loss_split/{name}": gap for name, gap in gaps.items()}
        return {f"doctor/{name}": value for name, value in facts.items()}

    def _rollouts(self, state: StepState) -> list[tuple[Node, Rows]]:
        """What was sampled to be trained on; a greedy rollout is a baseline."""
        nodes = [node for node in self._flow.of_kind(CallKind.GENERATE) if not node.is_greedy]
        return [(node, state.generated[node.id]) for node in nodes if node.id in state.generated]

    def _of_samples(self, samples: Sequence[Sample], metrics: Mapping[str, float]) -> dict[str, float]:
        sampling = self._recipe.sampling
        facts = {"samples": float(len(samples))}
        version = metrics.get("training/policy_version")
        if version is not None:
            facts["version_lag"] = version - 1 - min(sample.policy_version for sample in samples)
        if sampling.stop:
            return facts | {"stop_strings": 1.0}
        stops = self._stop_ids()
        if stops:
            finished = [sample for sample in samples if sample.finish_reason is FinishReason.STOP]
            if finished:
                facts["eos_share"] = float(np.mean([not stops.isdisjoint(s.token_ids[-1:]) for s in finished]))
            facts["passed_end"] = float(np.mean([not self._ends.isdisjoint(s.token_ids[:-1]) for s in samples]))
        return facts

    def _groups_are_broken(self, state: StepState) -> bool:
        for node, rows in self._rollouts(state):
            drawn = node.generation.num_samples(self._recipe.samples_per_prompt)
            if any(len(members) != drawn for members in rows.groups.values()):
                return True
        return False

    def _of_reference(self, state: StepState) -> dict[str, float]:
        """KL(sampling ‖ reference) of the step's samples, k3, from the columns that the flow asked for."""
        for node in self._flow.calls("ref"):
            rows = state.tables.get(node.rows)
            if node.kind is CallKind.SCORE and rows is not None and node.rows in state.generated:
                log_ratio_R = rows.columns[node.outputs[0]] - rows.sampling_logprobs
                clipped_R = np.clip(log_ratio_R[np.isfinite(log_ratio_R)], -20.0, 20.0)
                if len(clipped_R):
                    return {"ref_kl": float((np.exp(clipped_R) - 1 - clipped_R).mean())}
        return {}

    def _of_training(self, state: StepState) -> dict[str, float]:
        facts: dict[str, float] = {}
        for node in self._flow.of_kind(CallKind.TRAIN):
            rows = state.tables.get(node.rows)
            if rows is None or state.step < node.training.after:
                continue
            advantages = node.inputs.get("advantages")
            if advantages is not None and advantages in rows.columns:
                facts["zero_advantages"] = float(np.mean(rows.columns[advantages] == 0))
            mask = node.inputs.get("mask")
            if mask is not None and mask in rows.columns:
                facts |= mask_edges(rows, rows.columns[mask], self._ends)
        return facts

    def _of_weights(self, step: int) -> dict[str, float]:
        now = self._fingerprints()
        before, self._before = self._before, now
        first = self._doctor.baseline
        known = [name for name in now if self._first(name) in first]
        every = self._recipe.reference.sync_every
        as_before = {name: first[self._first(name)] for name in known if self._is_frozen(name)}
        if every and "ref" in as_before:  # what it is since its last sync
            as_before["ref"] = now["ref"] if step % every == 0 else before.get("ref", now["ref"])
        changed = [name for name, expected in as_before.items() if now[name] != expected]
        facts = {"ref_changed" if name == "ref" else f"changed/{name}": 1.0 for name in changed}
        if "actor" in self._trained and "actor" in known and "actor" in before:
            facts["weights_moved"] = float(now["actor"] != before["actor"])
            adapted = self._models["actor"].own is not None
            if "ref" in now and not every and not adapted and now["ref"] == now["actor"] != first[self._first("actor")]:
                facts["ref_is_policy"] = 1.0
        return facts

    def _first(self, name: str) -> str:
        """Name of the fingerprint that a role began with. Under another plan a rank has another part of the model: that
        is compared with its own beginning."""
        part = self._models[name].part
        if part is None or part.is_whole:
            return f"weights/{name}"
        sizes, team = part.team.layout.parallelism, part.team
        place = f"tp {team.tp.index} of {sizes.tp}, pp {team.pp.index} of {sizes.pp}"
        return f"weights/{name} ({place}, stages {sizes.stages})"

    def _is_frozen(self, name: str) -> bool:
        return name not in self._trained

    def _weights(self) -> dict[str, Tensor | FlatWeights]:
        """Role → what training changes of it, or all that it has where it is not trained; those that are here."""
        found: dict[str, Tensor | FlatWeights] = {}
        for name, model in self._models.items():
            weights = model.weights if self._is_frozen(name) or model.nested else model.trained.weights
            now = self._workers.leader_weights.now(name, weights)
            if now is not None:
                found[name] = model.nested or now
        return found

    def _fingerprints(self) -> dict[str, str]:
        return {name: fingerprint(weights) for name, weights in self._weights().items()}

    def _stop_ids(self) -> frozenset[int]:
        asked = self._recipe.sampling.stop_token_ids
        actor = self._models.get("actor")
        known = actor.eos_token_ids if isinstance(actor, LanguageModel) else ()
        return frozenset(known if asked is None else asked)

    def _end_ids(self) -> frozenset[int]:
        """Tokens that end a turn: those that end a response here, and those that do so in the families of models."""
        actor = self._models.get("actor")
        ids = set(self._stop_ids())
        if isinstance(actor, LanguageModel):
            ids |= set(actor.eos_token_ids)
            if actor.tokenizer is not None:
                vocabulary = actor.tokenizer.get_vocab()
                ids |= {vocabulary[token] for token in END_TOKENS if token in vocabulary}
        return frozenset(ids)

    # -- probe

    def _probe(self, state: StepState, reading: Reading) -> Diagnosis | None:
        """Look for the cause of a mismatch on the samples of the step's first rollout."""
        for node, _ in self._rollouts(state):
            role = self._roles.get(str(node.role))
            if not isinstance(role, ModelRole) or role.engine is None or not (_whole(role.model, role.engine.model)):
                continue
            others = {
                name: model
                for name, model in self._models.items()
                if name not in self._trained and isinstance(model, LanguageModel) and _whole(model)
            }
            suspects = Suspects(role, self._recipe.sampling.temperature, others, reading.has_come_apart)
            with self._workers.leader_weights.holding() as are_here:
                return diagnose(suspects, state.tables[node.id]) if are_here else None
        return None


def mask_edges(rows: Rows, mask_R: FloatArray, ends: frozenset[int]) -> dict[str, float]:
    """Where the trained turns end: `mask_early`, the share that ends one token before an end token, `mask_late` one
    token after it. Empty without a trained turn that ends near one."""
    early = late = right = 0
    for sample, start, stop in zip(rows.samples, rows.offsets, rows.offsets[1:], strict=False):
        kept, ids = mask_R[start:stop] > 0, sample.token_ids
        for place in np.flatnonzero(kept & ~np.append(kept[1:], False)):
            right += ids[place] in ends
            early += ids[place] not in ends and place + 1 < len(ids) and ids[place + 1] in ends
            late += ids[place] not in ends and place > 0 and ids[place - 1] in ends
    total = early + late + right
    return {"mask_early": early / total, "mask_late": late / total} if total else {}


def fingerprint(weights: Tensor | FlatWeights) -> str:
    """A hash of an even sample of a flat buffer: equal for equal weights, another after any update of them all."""
    nested = isinstance(weights, FlatWeights)
    stride = max(1, (weights.num_elements if nested else len(weights)) // SAMPLED_WEIGHTS) | 1
    sampled = weights.sampled(stride) if nested else weights.detach()[::stride]
    sampled = sampled.contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(sampled.tobytes(), digest_size=8).hexdigest()


def _whole(*models: Any) -> bool:
    """Whether this process has all of each model, and can compute with it by itself."""
    return all(isinstance(model, BackboneModel) and model.part is None for model in models)


def _compares_siblings(node: Node) -> bool:
    """Whether a call of the flow weighs the samples of a prompt against each other, and against nothing else."""
    return node.grain is Grain.GROUP and all(column.rows == node.rows for column in node.inputs.values())


def _models(roles: Mapping[str, RoleRuntime]) -> dict[str, Any]:
    """Role → its model, reward models included; of a run on several ranks, the leader's parts."""
    models: dict[str, Any] = {}
    for name, role in roles.items():
        if isinstance(role, ModelRole):
            models[name] = role.model
        elif isinstance(role, RewardRole) and role.scorer is not None:
            models[name] = role.scorer.trainer.model
    return {name: model for name, model in models.items() if isinstance(model, BackboneModel)}
