"""Runs one training step of a dataflow on one device: every call in graph order, each as small actions.

A group goes to the reward functions as soon as its last sample is finished, while generation goes on: the graph says
that scores are per sample, so no barrier is owed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import FloatArray, Rows, evaluate, spread_to
from plait.dataflow import CallKind, Column, Dataflow, Node
from plait.errors import RunError
from plait.generation.noise import NoiseKey
from plait.generation.request import Request
from plait.observe.progress import Progress
from plait.rewards.scores import GroupScores
from plait.runtime.evaluation import logged_means
from plait.runtime.recipe import Recipe
from plait.runtime.recorder import Recorder
from plait.runtime.roles import FunctionRole, ModelRole, RoleRuntime
from plait.training.trainer import Done


@dataclass
class StepState:
    """What the calls of one step have made so far."""

    step: int
    """Steps done before this one."""
    prompts: Sequence[Prompt]
    tables: dict[int, Rows] = field(default_factory=dict)
    """Id of each GENERATE node → its rows."""
    generated: dict[int, Rows] = field(default_factory=dict)
    """The same before samples without a reward were dropped."""
    tickets: dict[int, int] = field(default_factory=dict)
    """Ticket of a group at the reward functions → id of the SCORE node that sent it."""
    scores: dict[int, list[GroupScores]] = field(default_factory=dict)
    """Id of each SCORE node of a reward function → what its functions said, group by group."""
    metrics: dict[str, float] = field(default_factory=dict)


class Executor:
    """Binds a dataflow to the engines of its roles and runs steps of it."""

    def __init__(
        self,
        flow: Dataflow,
        roles: Mapping[str, RoleRuntime],
        recipe: Recipe,
        recorder: Recorder,
        progress: Progress,
    ) -> None:
        self.flow = flow
        self.roles = roles
        self.recipe = recipe
        self.recorder = recorder
        self.progress = progress
        self.is_training = False
        """Whether a step is beyond its first training call, so that weights are no longer those before it."""
        self._rollouts = [node.id for node in flow.nodes if node.kind is CallKind.GENERATE]

    def run_step(self, step: int, prompts: Sequence[Prompt]) -> StepState:
        """Generate, score, compute and train, in the order of the graph.

        Args:
            step: steps done before this one; it keys the draws. Logs and traces count from 1.

        Raises:
            RunError: every sample of the step lost its reward, or a call failed.
        """
        state = StepState(step, prompts)
        self.recorder.step = step + 1
        for node in self.flow.nodes:
            match node.kind:
                case CallKind.GENERATE:
                    self._generate(node, state)
                case CallKind.SCORE if isinstance(self.roles[_role(node)], FunctionRole):
                    self._reward(node, state)
                case CallKind.SCORE:
                    self._score(node, state)
                case CallKind.COMPUTE:
                    with self.recorder.span(node.call, "COMPUTE"):
                        values = evaluate(node, state.tables)
                    _add(state, node.outputs[0], values)
                case CallKind.TRAIN:
                    self.is_training = True
                    self._train(node, state)
        self.is_training = False
        return state

    def _generate(self, node: Node, state: StepState) -> None:
        engine = self._model(node).engine
        assert engine is not None, f"{node.call}: role `{node.role}` has no generation engine"
        count = node.options["samples_per_prompt"] or self.recipe.samples_per_prompt
        sampling = self.recipe.sampling.sampling(**({"temperature": 0.0} if node.options["greedy"] else {}))
        rollout = state.step * len(self._rollouts) + self._rollouts.index(node.id)
        for prompt in state.prompts:
            engine.add(Request(prompt, count, sampling, NoiseKey(self.recipe.seed, rollout)))
        readers = self._reward_calls(node)
        self.progress.phase(node.call, count * len(state.prompts), "samples")
        groups: dict[int, list[Sample]] = {prompt.uid: [] for prompt in state.prompts}
        while engine.has_work:
            with self.recorder.span(node.call, "GENERATE", _role(node)) as mark:
                finished = engine.step()
                assert engine.last_step is not None, "a step leaves a record"
                mark.kind, mark.tokens = engine.last_step.kind.name, engine.last_step.num_tokens
                mark.action = f"{node.call}/{engine.last_step.kind.name.lower()}"
            self.progress.advance(len(finished))
            for _, role in readers:
                self._collect(role.pool.poll(), state)
            for sample in finished:
                group = groups[sample.prompt.uid]
                group.append(sample)
                if len(group) == count:
                    group.sort(key=lambda member: member.index)
                    for reader, role in readers:
                        state.tickets[role.pool.submit(group)] = reader.id
        rows = Rows(tuple(sample for group in groups.values() for sample in group)).ordered()
        limit = self.recipe.sampling.max_response_tokens
        state.tables[node.id] = state.generated[node.id] = _with_generated_columns(rows, node, limit)

    def _reward_calls(self, node: Node) -> list[tuple[Node, FunctionRole]]:
        """The calls of functions that score the samples of a GENERATE node."""
        reads = [n for n in self.flow.nodes if n.kind is CallKind.SCORE and n.rows == node.id]
        return [(n, role) for n in reads if isinstance(role := self.roles[_role(n)], FunctionRole)]

    def _reward(self, node: Node, state: StepState) -> None:
        """Collect the scores of the groups that went out during generation; drop samples that got none."""
        role = self.roles[_role(node)]
        assert isinstance(role, FunctionRole)
        self.progress.phase(node.call, len(state.prompts), "groups")
        with self.recorder.span(node.call, "SCORE", _role(node), lane="host"):
            self._collect(role.pool.wait(), state)
        # By ticket: the order in which groups finish must not reach a sum.
        scores = state.scores[node.id] = sorted(state.scores[node.id], key=lambda group: group.ticket)
        by_sample = {s.uid: reward for group in scores for s, reward in zip(group.samples, group.rewards, strict=True)}
        _add(state, node.outputs[0], np.array([by_sample[s.uid] for s in state.tables[node.rows].samples]))
        rows = state.tables[node.rows]
        kept = np.flatnonzero(np.isfinite(rows.columns[node.outputs[0]]))
        if len(kept) == 0:
            raise RunError(
                f"step {state.step + 1}: no sample of {len(rows)} has a reward; look at key `reward.functions` "
                "(do they return None for every sample?) and at the failures reported above"
            )
        state.metrics["reward/dropped"] = state.metrics.get("reward/dropped", 0) + len(rows) - len(kept)
        if len(kept) < len(rows):
            state.tables[node.rows] = rows.select(kept.tolist())

    def _collect(self, groups: Sequence[GroupScores], state: StepState) -> None:
        """Keep the scores of groups that are done under the call that sent them; say what went wrong."""
        for group in groups:
            state.scores.setdefault(state.tickets[group.ticket], []).append(group)
            for trouble in (*group.failures, *group.recovered):
                self.progress.message(str(trouble))

    def _score(self, node: Node, state: StepState) -> None:
        role = self._model(node)
        values = self._drive(role.trainer.logprobs(state.tables[node.rows], call=node.call), node)
        _add(state, node.outputs[0], values)

    def _train(self, node: Node, state: StepState) -> None:
        rows = state.tables[node.rows]
        columns = dict(node.inputs)
        for column in node.inputs.values():
            if column.rows != node.rows:
                rows = rows.with_column(column, spread_to(column, state.tables[column.rows], rows, node.call))
        keep = columns.pop("keep", None)
        if keep is not None:
            kept = np.flatnonzero(rows.columns[keep])
            state.metrics[f"{node.role}/samples_left_out"] = len(rows) - len(kept)
            rows = rows.select(kept.tolist())
        assert node.fn is not None
        options = {name: node.options[name] for name in ("mini_batches", "epochs")}
        work = self._model(node).trainer.train(rows, columns, node.fn, **options, step=state.step, call=node.call)
        state.metrics |= self._drive(work, node)

    def _drive(self, work: Generator[Done, None, Any], node: Node) -> Any:
        """Run a steppable call to its end, one recorded action at a time."""
        self.progress.phase(node.call, 0, "actions")
        while True:
            with self.recorder.span(node.call, node.kind.upper(), _role(node)) as mark:
                try:
                    done = next(work)
                except StopIteration as stop:
                    mark.keep = False
                    return stop.value
                mark.action, mark.kind, mark.tokens = done.action, done.kind, done.tokens
            self.progress.advance()

    def _model(self, node: Node) -> ModelRole:
        role = self.roles[_role(node)]
        assert isinstance(role, ModelRole), f"{node.call}: role `{node.role}` is a function"
        return role


def _role(node: Node) -> str:
    assert node.role is not None, f"{node.call} belongs to no role"
    return node.role


def _with_generated_columns(rows: Rows, node: Node, max_response_tokens: int) -> Rows:
    """What a rollout says of its samples, in the columns that `Samples` offers to a flow."""
    logprobs, finished, tokens_left = node.outputs
    lengths = np.diff(rows.offsets)
    return (
        rows.with_column(logprobs, rows.sampling_logprobs)
        .with_column(finished, [sample.finish_reason is FinishReason.STOP for sample in rows.samples])
        .with_column(tokens_left, max_response_tokens - lengths)
    )


def _add(state: StepState, column: Column, values: FloatArray) -> None:
    state.tables[column.rows] = state.tables[column.rows].with_column(column, values)


def step_metrics(flow: Dataflow, state: StepState) -> dict[str, float]:
    """The numbers of a step that its rows tell: reward, its parts, lengths, dead groups. Names: docs/metrics.md."""
    metrics = state.metrics | _response_metrics(flow, state)
    for node in flow.nodes:
        if node.id in state.scores:
            rows = state.tables[node.rows]
            rewards = rows.columns[node.outputs[0]]
            groups = [rewards[list(members)] for members in rows.groups.values()]
            # A greedy rollout is a baseline: its rewards must not stand for those of the samples.
            prefix = f"greedy/{node.role}" if flow.nodes[node.rows].options["greedy"] else str(node.role)
            metrics[prefix] = float(rewards.mean())
            metrics[f"{prefix}_std"] = float(rewards.std())
            metrics[f"frac_{prefix}_zero_std"] = float(np.mean([np.ptp(group) == 0 for group in groups]))
            for name, values in _by_function(state.scores[node.id]).items():
                metrics[f"{prefix}s/{name}/mean"] = float(np.nanmean(values)) if np.isfinite(values).any() else 0.0
    for name, value in _logged(flow, state).items():
        metrics[f"logged/{name}" if name in metrics else name] = value
    return metrics


def _response_metrics(flow: Dataflow, state: StepState) -> dict[str, float]:
    first = next(node for node in flow.nodes if node.kind is CallKind.GENERATE)
    samples = state.generated[first.id].samples
    lengths = np.array([len(sample.token_ids) for sample in samples])
    truncated = [sample.finish_reason is FinishReason.LENGTH for sample in samples]
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": float(np.mean(truncated)),
        "prompt_length/mean": float(np.mean([len(prompt.token_ids) for prompt in state.prompts])),
    }


def _logged(flow: Dataflow, state: StepState) -> dict[str, float]:
    """Means of what reward functions logged (`log_metric`), those of greedy rollouts under `greedy/`."""
    found: dict[str, float] = {}
    for node_id, groups in state.scores.items():
        prefix = "greedy/" if flow.nodes[flow.nodes[node_id].rows].options["greedy"] else ""
        found |= {f"{prefix}{name}": value for name, value in logged_means(groups).items()}
    return found


def _by_function(groups: Sequence[GroupScores]) -> dict[str, FloatArray]:
    names = groups[0].scores if groups else {}
    return {name: np.concatenate([np.asarray(group.scores[name]) for group in groups]) for name in names}
