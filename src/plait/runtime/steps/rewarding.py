"""Scores of a step: from reward functions in worker processes, from reward models, or from both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from plait.algorithms.advantages import decoupled
from plait.data.records import Sample
from plait.data.rows import FloatArray, Rows
from plait.dataflow import CallKind, Dataflow, Node
from plait.dataflow.graph import added_scores, scores_alone, scores_by_turn, scores_decoupled
from plait.errors import RunError
from plait.observe.progress import ProgressSink
from plait.rewards.pool import RewardPool
from plait.rewards.scores import NONE, GroupScores
from plait.runtime.steps.function_reports import FunctionReports
from plait.runtime.steps.roles import RewardRole, Roles, rewards_of, scorers_of
from plait.runtime.steps.scoring_parts import Spread, Table, in_parts
from plait.runtime.steps.step import StepState, model_calls
from plait.schedule.work import MOVED_ON, Work
from plait.workers.recorder import Recorder


class RewardCalls:
    """Runs the SCORE nodes whose role is a reward or a cost, and those of its further models."""

    def __init__(self, flow: Dataflow, roles: Roles, recorder: Recorder, progress: ProgressSink) -> None:
        self._flow = flow
        self._rewards, self._scorers = rewards_of(roles), scorers_of(roles)
        self._progress = progress
        self._report = FunctionReports(recorder, progress.message)
        self._awaited: dict[tuple[str, int], StepState] = {}
        """(role, ticket of a group at its functions) → the batch that it is of: several may be open."""

    def submit(self, rollout: Node, group: Sequence[Sample], state: StepState) -> None:
        """Send a whole group to the functions of every reward that scores this rollout."""
        for node, role in self._readers(rollout):
            if role.pool is not None:
                self._send(node, role.pool, group, state)

    def poll(self, rollout: Node) -> bool:
        """Take in what the functions of a rollout's rewards have finished, if anything, of whichever batch it is."""
        collected = False
        for node, role in self._readers(rollout):
            if role.pool is not None:
                collected |= self._collect(str(node.role), role.pool.poll())
        return collected

    def settling(self) -> Work[None]:
        """Until functions have nothing left to do, so that they can be asked for something else.

        Raises:
            RunError: a function failed, and its policy is to stop.
        """
        pools = [(name, role.pool) for name, role in self._rewards.items() if role.pool is not None]
        while any(pool.num_outstanding for _, pool in pools):
            collected = [self._collect(name, pool.poll()) for name, pool in pools]
            yield MOVED_ON if any(collected) else None

    def rewards_of(
        self, rollout: Node, role: str, groups: Sequence[Sequence[Sample]], state: StepState
    ) -> Work[list[FloatArray]]:
        """Rewards of groups that were just drawn, [samples] each, before the graph's SCORE node is reached.

        Raises:
            RunError: that role gives no rewards.
        """
        node = next((node for node, _ in self._readers(rollout) if node.role == role), None)
        if node is None:
            raise RunError(f"{rollout.call}: `resample` asks the role `{role}`, which gives no rewards")
        samples = tuple(sample for group in groups for sample in group)
        totals = yield from self._of_functions(samples, node, state)
        for call in (self._flow.nodes[number] for number in model_calls(node).values()):
            yield from self._of_model(partial(in_parts, Table(lambda: Rows(samples))), call, state)
        by_sample = self._with_models(totals, node, state)
        return [np.array([by_sample[sample.uid] for sample in group]) for group in groups]

    def work(
        self, node: Node, state: StepState, spread: Spread, model_is_done: Callable[[], None], *, is_ahead: bool = False
    ) -> Work[None]:
        """Add the node's column; samples without a reward leave the table. A further model's call only has its model
        score: the call of the reward adds that up.

        Args:
            spread: scores the rows by a model, together or in parts.
            model_is_done: called when the model has scored all.
            is_ahead: the batch is of a later step, which adds up: only the model scores. It is asked once.

        Raises:
            RunError: no sample has one, or a function failed and its policy is to stop.
        """
        if node.id not in state.model_scores:  # else the model has scored all, as it was drawn
            yield from self._of_model(spread, node, state)
        model_is_done()
        if is_ahead or str(node.role) not in self._rewards:
            return
        while any(number not in state.model_scores for number in added_scores(node).values()):
            yield None
        while node.rows not in state.tables:  # its last samples have been scored before it has ended
            yield None
        rows = state.tables[node.rows]
        totals = yield from self._of_functions(rows.samples, node, state)
        by_sample = self._with_models(totals, node, state)
        rewards = np.array([by_sample[sample.uid] for sample in rows.samples])
        kept = np.flatnonzero(np.isfinite(rewards)).tolist()
        state.add(node.outputs[0], rewards)
        for name, column in scores_alone(node).items():
            alone = self._alone(name, node, state)
            state.add(column, np.array([alone[sample.uid] for sample in rows.samples]))
        if (column := scores_by_turn(node)) is not None:
            state.add(column, self._by_turn(rows.samples, node, state))
        if (column := scores_decoupled(node)) is not None:
            state.add(column, self._decoupled(rows, kept, node, state))
        if len(kept) == 0:
            role = self._role(node)
            keys = [f"`{node.role}.functions` (do they return None for every sample?)"]
            if role.scorers:
                of_models = [f"`{scorer.key}` (are its scores finite?)" for scorer in role.scorers.values()]
                keys = [*of_models, *(keys if role.pool is not None else ())]
            raise RunError(
                f"step {state.step + 1}: no sample of {len(rows)} has a score from `{node.role}`; look at key "
                f"{', '.join(keys)} and at the failures reported above"
            )
        state.count("reward/dropped", len(rows) - len(kept))
        if len(kept) < len(rows):
            state.tables[node.rows] = state.tables[node.rows].select(kept)

    def _of_functions(self, samples: Sequence[Sample], node: Node, state: StepState) -> Work[dict[str, float]]:
        """Sample uid → weighted score of the functions, 0 where there are none; NaN where they gave none, or nobody
        could reply to the sample."""
        role = self._role(node)
        totals = {sample.uid: NONE if sample.reply_error else 0.0 for sample in samples}
        if role.pool is None:
            return totals
        if node.id not in state.tickets.values():  # samples of no rollout of this process: sent nowhere yet
            rows = state.generated.get(node.rows, state.tables[node.rows])
            for members in rows.groups.values():
                self._send(node, role.pool, [rows.samples[i] for i in members], state)
        self._progress.phase(node.call, len(samples), "samples")
        sent = sum(target == node.id for target in state.tickets.values())
        self._collect(str(node.role), role.pool.poll())
        while len(state.scores.get(node.id, ())) < sent:
            yield None
            self._collect(str(node.role), role.pool.poll())
        # By ticket: the order in which groups finish must not reach a sum.
        groups = state.scores[node.id] = sorted(state.scores[node.id], key=lambda group: group.ticket)
        for group in groups:
            for sample, reward in zip(group.samples, group.rewards, strict=True):
                if sample.uid in totals:
                    totals[sample.uid] += reward
        return totals

    def _of_model(self, spread: Spread, node: Node, state: StepState) -> Work[None]:
        """Score by the model of the node's role, if there is one."""
        scorer = self._scorers.get(str(node.role))
        if scorer is None:
            return
        self._progress.phase(node.call, 0, "actions")
        scored_parts = yield from spread(scorer.call, node.call)
        scored = state.model_scores.setdefault(node.id, {})
        for rows, values in scored_parts:
            values = scorer.checked(rows.samples, values)
            scored |= {sample.uid: float(value) for sample, value in zip(rows.samples, values, strict=True)}

    def _with_models(self, totals: dict[str, float], node: Node, state: StepState) -> dict[str, float]:
        """With what the models said of the same samples."""
        calls = model_calls(node)
        for name, scorer in self._role(node).scorers.items():
            scored = state.model_scores[calls[name]]
            totals = {uid: total + scorer.weight * scored[uid] for uid, total in totals.items()}
        return totals

    def _alone(self, name: str, node: Node, state: StepState) -> dict[str, float]:
        """Sample uid → what one function, or a model, gave it, before its weight; NaN where it did not apply."""
        groups = [group for group in state.scores.get(node.id, ()) if name in group.scores]
        if not groups:
            return dict(state.model_scores[model_calls(node)[name]])
        return {
            sample.uid: score
            for group in groups
            for sample, score in zip(group.samples, group.scores[name], strict=True)
        }

    def _by_turn(self, samples: Sequence[Sample], node: Node, state: StepState) -> FloatArray:
        """[tokens of all samples]: at the last token of each turn what functions gave it, weighted; at the last of all
        what models gave as well."""
        groups = state.scores.get(node.id, ())
        given = {s.uid: turns for group in groups for s, turns in zip(group.samples, group.by_turn, strict=True)}
        of_models = self._with_models(dict.fromkeys((sample.uid for sample in samples), 0.0), node, state)
        parts = [np.zeros(len(sample.token_ids)) for sample in samples]
        for sample, values in zip(samples, parts, strict=True):
            for end, reward in zip(sample.turn_ends, given[sample.uid], strict=True) if groups else ():
                values[end - 1 : end] = reward
            values[-1:] += of_models[sample.uid]
        return np.concatenate(parts)

    def _decoupled(self, rows: Rows, kept: Sequence[int], node: Node, state: StepState) -> FloatArray:
        """[samples]: of each the weighted sum of its scores, each standardised within the group; NaN where a sample has
        no reward, which is then none of its group."""
        weights = self._role(node).weights
        each = [self._alone(name, node, state) for name in weights]
        sums, with_reward = np.full(len(rows), NONE), frozenset(kept)
        for members in rows.groups.values():
            rewarded = [i for i in members if i in with_reward]
            if rewarded:
                scores = np.array([[alone[rows.samples[i].uid] for i in rewarded] for alone in each])
                sums[rewarded] = decoupled(scores, np.array([*weights.values()]))
        return sums

    def _role(self, node: Node) -> RewardRole:
        role = self._rewards.get(str(node.role))
        assert role is not None, f"{node.call}: role `{node.role}` is no reward"
        return role

    def _readers(self, rollout: Node) -> list[tuple[Node, RewardRole]]:
        """The calls that score the samples of a rollout."""
        nodes = [node for node in self._flow.of_kind(CallKind.SCORE) if node.rows == rollout.id]
        return [(node, role) for node in nodes if (role := self._rewards.get(str(node.role)))]

    def _send(self, node: Node, pool: RewardPool, group: Sequence[Sample], state: StepState) -> None:
        """Hand a whole group to the functions of a role; a call of the flow will ask for its scores."""
        key = str(node.role), pool.submit(group, self._flow.rollout_name(self._flow.nodes[node.rows]))
        state.tickets[key], self._awaited[key] = node.id, state

    def _collect(self, role: str, groups: Sequence[GroupScores]) -> bool:
        """Keep the scores of groups that a role's functions are done with under the call that sent them; record what
        they took, and say what went wrong. Whether there are any."""
        for group in groups:
            state = self._awaited.pop((role, group.ticket))
            node = self._flow.nodes[state.tickets[role, group.ticket]]
            self._report(node.call, role, group)
            state.scores.setdefault(node.id, []).append(group)
        return bool(groups)
