"""Generation in a step: sample, give each group to the reward functions, and draw again if `resample` asks for it
(`resampling`).

A group goes to the reward functions as soon as its last sample is finished, while the other groups go on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Protocol

import numpy as np

from plait.data.numbers import is_of_data, number_of
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import CallKind, Dataflow, Node
from plait.dataflow.made_rows import prompts_each
from plait.engines import GenerationEngine
from plait.errors import RunError
from plait.kernels.noise import NoiseKey
from plait.observe.progress import ProgressSink
from plait.policy.fusion_gate import RolloutSize
from plait.policy.migration import Bounds
from plait.recipes.engine_checks import said_of_no_drafts
from plait.recipes.recipe import Recipe
from plait.runtime.folder.moments import Moments, Round
from plait.runtime.steps.asking import AskedRollout, Asking, Beside
from plait.runtime.steps.drawn import DrawnBatch
from plait.runtime.steps.gates import AtShare, Decides, Gate
from plait.runtime.steps.partial_rollout import PartialRollout
from plait.runtime.steps.rebalancing import Balance, Rebalancer
from plait.runtime.steps.resampling import Groups, Resampling, Rounds
from plait.runtime.steps.rewarding import RewardCalls
from plait.runtime.steps.step import StepState
from plait.runtime.steps.tail import Batch, Tail
from plait.runtime.steps.watch import Watch
from plait.schedule.dispatch import Task
from plait.schedule.work import Work


class Draw(Protocol):
    """Gives the prompts of a batch's further rounds: `batches.Batches.draw`."""

    def __call__(self, count: int, record: Collection[Round] | None, *, is_later: bool) -> Sequence[Prompt] | None: ...


class Rollout:
    """Runs the GENERATE nodes of a flow."""

    def __init__(self, flow: Dataflow, rewarding: RewardCalls, recipe: Recipe, progress: ProgressSink) -> None:
        self._flow = flow
        self._rewarding = rewarding
        self._recipe = recipe
        self._progress = progress
        self._rollouts = [node.id for node in flow.of_kind(CallKind.GENERATE)]
        self._said = set[str]()
        self.gate: Gate = AtShare()
        """Decides when the last samples of a rollout are gathered."""
        self.rebalancer: Rebalancer | None = None
        """Decides when samples move to instances that end sooner; None: never."""
        self.beside: Beside | None = None
        """The rollouts of the step under way, if those of later batches halt with it; None: all end in the step."""
        self._asking = Asking(rewarding)
        self._resampling = Resampling(rewarding, progress, recipe.seed)

    @property
    def _bounds(self) -> Bounds:
        """How many samples and tokens one instance may hold."""
        sampling = self._recipe.sampling
        kv_tokens = inf if sampling.kv_tokens is None else sampling.kv_tokens
        return Bounds(sampling.max_running, sampling.max_response_tokens, kv_tokens)

    def run_on(self, moments: Moments | None) -> None:
        """From now on, samples may go on with later weights (`partial_rollout`); None: they end in their step."""
        self._asking = Asking(self._rewarding, moments, self._recipe.update_rule)

    def size_of(self, node: Node, engine: GenerationEngine) -> RolloutSize:
        """How many samples a rollout has, how many instances of the engine draw them, how many each runs at a time, and
        how many samples a prompt has."""
        count, most = self._count(node), self._recipe.sampling.max_running
        prompts = self._recipe.prompts_per_step * prompts_each(self._flow, node, self._recipe.samples_per_prompt)
        return RolloutSize(count * prompts, engine.traits.num_instances, most, count)

    def num_split(self, node: Node, engine: GenerationEngine, step: int) -> int:
        """How many samples of a rollout, its last ones, are scored apart from the others of their prompts: as many as
        the recipe has gathered, or as the gate says."""
        return self.gate.early(step, node.call, self.size_of(node, engine)).num_split

    def work(
        self, node: Node, engine: GenerationEngine, state: StepState, draw: Draw, fused: Task | None
    ) -> Work[None]:
        """Fill the node's table with samples of its prompts, and of further prompts if `resample` asks for them; one
        step of the engine per `next()`.

        Args:
            fused: the task of the call, if other calls score on its ranks once these have no samples left; else None.

        Raises:
            RunError: `resample` kept none of the groups that were drawn.
        """
        if node.generation.resample is None:
            growing = yield from self._own(node, engine, state, fused)
            if growing.num_finished < growing.num_asked:
                return
            groups = generated = list(growing.groups.values())
        else:
            enough = yield from self._until_enough(node, engine, state, draw)
            if enough is None:
                return
            groups, generated = enough
        self._fill(node, state, groups, generated)

    def _fill(
        self, node: Node, state: StepState, groups: Sequence[Sequence[Sample]], generated: Sequence[Sequence[Sample]]
    ) -> None:
        """End a rollout.

        Args:
            groups: go into the node's table, without samples to which the reply function failed.
            generated: all groups that were drawn, for the records.

        Raises:
            RunError: nothing is left in the table.
        """
        limit = node.generation.limit(self._recipe.sampling.max_response_tokens)
        rows = _with_generated_columns(_rows_of(groups), node, limit)
        state.begin_table(node.id, rows)
        answered = [place for place, sample in enumerate(rows.samples) if not sample.reply_error]
        if not answered:
            raise RunError(
                f"step {state.step + 1}: `{self._recipe.turns.replier}` failed on each sample of {node.call}; look at "
                "the failures reported above"
            )
        if len(answered) < len(rows):
            state.tables[node.id] = rows.select(answered)
        state.generated[node.id] = _with_generated_columns(_rows_of(generated), node, limit)

    def restored(self, drawn: DrawnBatch, state: StepState) -> None:
        """Give a batch the samples and metrics that it had when the checkpoint was written. Rewards are not restored:
        the calls that read them ask for them again. Raises RunError as `_fill`."""
        for node in self._flow.of_step_prompts:
            groups: dict[int, list[Sample]] = defaultdict(list)
            for sample in drawn.samples[node.id]:
                groups[sample.prompt.uid].append(sample)
            further = drawn.further.get(node.id, ())
            state.growing[node.id] = growing = PartialRollout(state.prompts, self._count(node), further)
            for sample in drawn.samples[node.id]:
                if sample.finish_reason is not FinishReason.OPEN:
                    growing.take(sample)
            if (kept := drawn.kept[node.id]) is not None:
                self._fill(node, state, [groups[uid] for uid in kept], list(groups.values()))
            else:
                begun = [sample for sample in drawn.samples[node.id] if sample.finish_reason is FinishReason.OPEN]
                state.begun[node.id] = {(sample.prompt.uid, sample.index): sample for sample in begun}
        state.metrics = {name: value for name, value, _ in drawn.said}
        state.said_by = {name: node for name, _, node in drawn.said}
        state.model_scores = {node: dict(scores) for node, scores in drawn.model_scores.items()}

    def _prompts(self, node: Node, state: StepState) -> Sequence[Prompt]:
        """Those that a rollout begins with: of the step, or made of samples."""
        return state.prompts if node.prompts is None else state.made[node.id]

    def _count(self, node: Node) -> int:
        """Samples of each prompt."""
        return node.generation.num_samples(self._recipe.samples_per_prompt)

    def _asked(self, node: Node, state: StepState, growing: PartialRollout) -> AskedRollout:
        """What the engine is asked for the prompts of `growing`: with which parameters, and by which noise."""
        asked = self._recipe.sampling
        limit, greedy = node.generation.limit(asked.max_response_tokens), node.generation.greedy
        replays = asked.router_replay and (not greedy or node in self._flow.trained_on)
        how: dict[str, object] = {"keeps_support": asked.filters}
        if greedy:
            how = {"temperature": 0.0, "greedy_logprobs_at": asked.temperature}
        sampling = asked.sampling(max_tokens=limit, keeps_experts=replays, **how)
        noise = NoiseKey(self._recipe.seed, state.step * len(self._rollouts) + self._rollouts.index(node.id))
        return AskedRollout(node, state, growing, sampling, noise, self._flow.rollout_name(node))

    def _until_enough(
        self, node: Node, engine: GenerationEngine, state: StepState, draw: Draw
    ) -> Work[tuple[Groups, Groups] | None]:
        """See `Resampling.work`."""
        growing = state.growing.setdefault(node.id, PartialRollout(state.prompts, self._count(node)))
        record = None if self.beside is None else self._asking.record(self.beside)

        def stands() -> bool:
            return self.beside is not None and record is None and self.beside.stands(state.step)

        def draws(name: str, prompts: Sequence[Prompt]) -> Work[None]:
            watch = Watch(balance=self._balance(name, engine, state, prompts)) if self.beside is None else None
            return self._round(node, engine, state, growing, watch)

        def more(count: int) -> Sequence[Prompt] | None:
            if stands():
                return None
            is_later = self.beside is not None and state.step > self.beside.step
            return draw(count, None if record is None else record.rounds, is_later=is_later)

        return (yield from self._resampling.work(node, state, Rounds(draws, more, stands)))

    def _own(self, node: Node, engine: GenerationEngine, state: StepState, fused: Task | None) -> Work[PartialRollout]:
        """The samples of the call's own prompts, as far as they come in this step. Samples that were begun in another
        step, or that halt with this one, do not move between instances."""
        prompts = self._prompts(node, state)
        growing = PartialRollout(prompts, self._count(node))
        if self.beside is not None or node.id in state.growing:
            growing = state.growing.setdefault(node.id, growing)
            yield from self._round(node, engine, state, growing)
            return growing
        state.growing[node.id] = growing
        balance = self._balance(node.call, engine, state, prompts)
        yield from self._round(node, engine, state, growing, Watch(self._tail(node, engine, state, fused), balance))
        return growing

    def _round(
        self,
        node: Node,
        engine: GenerationEngine,
        state: StepState,
        growing: PartialRollout,
        watch: Watch | None = None,
    ) -> Work[None]:
        """Draw the samples of `growing`, as far as they come in this step.

        Args:
            watch: of samples that move between instances; None: they do not.
        """
        self._say_how(node, engine)
        beside = self.beside or Beside(state.step, (state.step,))
        says = partial(self._progress.phase, node.call, unit="samples")
        yield from self._asking.work(self._asked(node, state, growing), engine, beside, says, watch)
        self._say_how(node, engine)
        if watch is not None:
            state.count("perf/samples_moved", watch.end())

    def _tail(self, node: Node, engine: GenerationEngine, state: StepState, fused: Task | None) -> Tail | None:
        """Gathers the last samples of a batch; None: they end where they begin."""
        if fused is None:
            return None
        assert engine.moves is not None, f"{node.call}: nothing can be gathered"
        count = self._count(node)
        prompts = self._prompts(node, state)
        tokens = {(p.uid, index): len(p.token_ids) for p in prompts for index in range(count)}
        batch = Batch(tokens, count, self.num_split(node, engine, state.step))
        return Tail(fused, engine, batch, self._bounds, self._decides(node, engine, state, batch))

    def _decides(self, node: Node, engine: GenerationEngine, state: StepState, batch: Batch) -> Decides:
        """Decides when the samples of this rollout are gathered."""
        size = replace(self.size_of(node, engine), samples=len(batch.prompts), num_split=batch.num_split)
        return self.gate.deciding(state.step, node.call, size)

    def _balance(
        self, name: str, engine: GenerationEngine, state: StepState, prompts: Sequence[Prompt]
    ) -> Balance | None:
        """Moves samples of these prompts between instances; None: they stay.

        Args:
            name: of the call, or of one of its rounds (`actor.generate/r2`).
        """
        if self.rebalancer is None:
            return None
        tokens = {prompt.uid: len(prompt.token_ids) for prompt in prompts}
        return self.rebalancer.balance((state.step + 1, name), engine, tokens, self._bounds)

    def _say_how(self, node: Node, engine: GenerationEngine) -> None:
        """Say once per run why the engine does not compute by compiled layers, and why it drafts no tokens. Stages
        know the first when they have drawn, so this is called before and after a rollout."""
        by_layers, refusals = "computed by the model's own layers, not by compiled ones", engine.refusals
        no_drafts = said_of_no_drafts(self._recipe, refusals.steady)
        for what, why in ((by_layers, refusals.compiled), ("speculative decoding", no_drafts)):
            if why is not None and what not in self._said:
                self._said.add(what)
                self._progress.message(f"{node.call}: {what}: {why}")


def _rows_of(groups: Sequence[Sequence[Sample]]) -> Rows:
    return Rows(tuple(sample for group in groups for sample in group)).ordered()


def _with_generated_columns(rows: Rows, node: Node, max_response_tokens: int) -> Rows:
    """Add the columns that `Generated` offers to a flow: sampling log-probs, finished, tokens left; numbers of the data
    and the turn of each token where the flow asks for them."""
    logprobs, finished, tokens_left, *further = node.outputs
    lengths = np.array([sample.num_tokens for sample in rows.samples])
    for column in further:
        if is_of_data(column):
            values: list[float] = [number_of(sample.prompt, column) for sample in rows.samples]
        else:
            values = [turn for sample in rows.samples for turn in sample.token_turns]
        rows = rows.with_column(column, values)
    return (
        rows.with_column(logprobs, rows.sampling_logprobs)
        .with_column(finished, [sample.finish_reason is FinishReason.STOP for sample in rows.samples])
        .with_column(tokens_left, max_response_tokens - lengths)
    )
