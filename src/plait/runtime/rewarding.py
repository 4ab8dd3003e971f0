"""Scores of a step: from reward functions in worker processes, from a reward model, or from both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from plait.data.records import Sample
from plait.data.rows import FloatArray
from plait.dataflow import CallKind, Dataflow, Node
from plait.errors import RunError
from plait.observe.progress import Progress
from plait.rewards.scores import GroupScores
from plait.runtime.recorder import Recorder
from plait.runtime.roles import RewardRole, RoleRuntime
from plait.runtime.step import StepState


class Rewarding:
    """Runs the SCORE nodes whose role is a reward: `reward.score`, `cost.score`."""

    def __init__(
        self, flow: Dataflow, roles: Mapping[str, RoleRuntime], recorder: Recorder, progress: Progress
    ) -> None:
        self._flow = flow
        self._roles = roles
        self._recorder = recorder
        self._progress = progress

    def submit(self, rollout: Node, group: Sequence[Sample], state: StepState) -> None:
        """Send a whole group to the functions of every reward that scores this rollout."""
        for node, role in self._readers(rollout):
            if role.pool is not None:
                state.tickets[str(node.role), role.pool.submit(group)] = node.id

    def poll(self, rollout: Node, state: StepState) -> None:
        """Take in what the functions have finished."""
        for node, role in self._readers(rollout):
            if role.pool is not None:
                self._collect(node, role.pool.poll(), state)

    def rewards_of(
        self, rollout: Node, role: str, groups: Sequence[Sequence[Sample]], state: StepState
    ) -> list[FloatArray]:
        """Rewards of groups that were just drawn, [samples] each, before the graph's SCORE node is reached.

        Raises:
            RunError: the flow does not score these samples by that role.
        """
        node = next((node for node, _ in self._readers(rollout) if node.role == role), None)
        if node is None:
            raise RunError(f"{rollout.call}: `resample` asks the role `{role}`, but the flow does not score by it")
        by_sample = self._score([sample for group in groups for sample in group], node, state)
        return [np.array([by_sample[sample.uid] for sample in group]) for group in groups]

    def score(self, node: Node, state: StepState) -> None:
        """Add the node's column; samples without a reward leave the table.

        Raises:
            RunError: no sample has one, or a function failed and its policy is to stop.
        """
        rows = state.tables[node.rows]
        by_sample = self._score(rows.samples, node, state)
        state.add(node.outputs[0], np.array([by_sample[sample.uid] for sample in rows.samples]))
        rows = state.tables[node.rows]
        kept = np.flatnonzero(np.isfinite(rows.columns[node.outputs[0]]))
        if len(kept) == 0:
            role = self._roles[str(node.role)]
            keys = [f"`{node.role}.functions` (do they return None for every sample?)"]
            if isinstance(role, RewardRole) and role.scorer is not None:
                keys = [f"`{role.scorer.key}` (are its scores finite?)", *(keys if role.pool is not None else ())]
            raise RunError(
                f"step {state.step + 1}: no sample of {len(rows)} has a score from `{node.role}`; look at key "
                f"{', '.join(keys)} and at the failures reported above"
            )
        state.count("reward/dropped", len(rows) - len(kept))
        if len(kept) < len(rows):
            state.tables[node.rows] = rows.select(kept.tolist())

    def _score(self, samples: Sequence[Sample], node: Node, state: StepState) -> dict[str, float]:
        """Sample uid → weighted score; NaN where the functions gave none."""
        role = self._roles[str(node.role)]
        assert isinstance(role, RewardRole), f"{node.call}: role `{node.role}` is no reward"
        totals = dict.fromkeys((sample.uid for sample in samples), 0.0)
        if role.pool is not None:
            if node.id not in state.tickets.values():  # samples that no rollout made, and so sent nowhere yet
                rows = state.tables[node.rows]
                for members in rows.groups.values():
                    ticket = role.pool.submit([rows.samples[i] for i in members])
                    state.tickets[str(node.role), ticket] = node.id
            self._progress.phase(node.call, len(samples), "samples")
            with self._recorder.span(node.call, "SCORE", node.role or "", lane="host"):
                self._collect(node, role.pool.wait(), state)
            # By ticket: the order in which groups finish must not reach a sum.
            groups = state.scores[node.id] = sorted(state.scores[node.id], key=lambda group: group.ticket)
            for group in groups:
                for sample, reward in zip(group.samples, group.rewards, strict=True):
                    if sample.uid in totals:
                        totals[sample.uid] += reward
        if role.scorer is not None:
            scored = state.model_scores.setdefault(node.id, {})
            missing = [sample for sample in samples if sample.uid not in scored]
            values = self._recorder.drive(role.scorer.scores(missing, call=node.call), node, self._progress)
            scored |= {sample.uid: float(value) for sample, value in zip(missing, values, strict=True)}
            for uid in totals:
                totals[uid] += role.scorer.weight * scored[uid]
        return totals

    def _readers(self, rollout: Node) -> list[tuple[Node, RewardRole]]:
        """The calls that score the samples of a rollout."""
        nodes = [node for node in self._flow.of_kind(CallKind.SCORE) if node.rows == rollout.id]
        return [(node, role) for node in nodes if isinstance(role := self._roles[str(node.role)], RewardRole)]

    def _collect(self, node: Node, groups: Sequence[GroupScores], state: StepState) -> None:
        """Keep the scores of groups that a role's functions are done with under the call that sent them; say what went
        wrong."""
        for group in groups:
            state.scores.setdefault(state.tickets[str(node.role), group.ticket], []).append(group)
            for trouble in (*group.failures, *group.recovered):
                self._progress.message(str(trouble))
