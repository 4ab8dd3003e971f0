"""Generation in a step: sample, hand each group to the reward functions as soon as it is whole, and draw again.

A group goes to the reward functions when its last sample is finished, while generation goes on: the graph says that
scores are per sample, so no barrier is owed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import numpy as np

from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import FloatArray, Rows
from plait.dataflow import CallKind, Dataflow, Node, Resample
from plait.engines import GenerationEngine
from plait.errors import RunError
from plait.generation.request import Request
from plait.kernels.noise import NoiseKey
from plait.observe.progress import Progress
from plait.policy.fusion_gate import RolloutSize
from plait.policy.migration import Bounds
from plait.recipes.recipe import Recipe
from plait.runtime.folder.moments import Moments
from plait.runtime.steps.drawn import DrawnBatch
from plait.runtime.steps.rebalancing import Balance, Rebalancer
from plait.runtime.steps.rewarding import RewardCalls
from plait.runtime.steps.running_on import Asked, Beside, RunningOn
from plait.runtime.steps.step import StepState
from plait.runtime.steps.streams import PartialRollout
from plait.runtime.steps.tail import Batch, FusionGate, Judge, Tail
from plait.schedule.dispatch import Task
from plait.schedule.work import MOVED_ON, Work
from plait.user_code import CALL_LIMIT_S, UserCode, is_users, title_of

Draw = Callable[[int], Sequence[Prompt]]
"""The next so many prompts of the run."""


class Rollout:
    """Runs the GENERATE nodes of a flow."""

    def __init__(self, flow: Dataflow, rewarding: RewardCalls, recipe: Recipe, progress: Progress) -> None:
        self._flow = flow
        self._rewarding = rewarding
        self._recipe = recipe
        self._progress = progress
        self._rollouts = [node.id for node in flow.of_kind(CallKind.GENERATE)]
        self._has_said_how = False
        self.gate: FusionGate | None = None
        """When a run gathers samples; None: no steps are kept by which that could be decided."""
        self.rebalancer: Rebalancer | None = None
        """When a run rebalances samples; None: instances keep theirs."""
        self.beside: Beside | None = None
        """The rollouts of the step under way, where those of later batches halt with it; None: all end in it."""
        self._running_on = RunningOn(rewarding)

    @property
    def _bounds(self) -> Bounds:
        """How much one instance may run."""
        sampling = self._recipe.sampling
        kv_tokens = inf if sampling.kv_tokens is None else sampling.kv_tokens
        return Bounds(sampling.max_running, sampling.max_response_tokens, kv_tokens)

    def run_on(self, moments: Moments) -> None:
        """Have samples go on with later weights."""
        self._running_on = RunningOn(self._rewarding, moments, keeps=self._recipe.on_update == "keep")

    def work(
        self, node: Node, engine: GenerationEngine, state: StepState, draw: Draw, fused: Task | None
    ) -> Work[None]:
        """Fill the node's table with samples of the step's prompts, or of as many others as `resample` asks for; one
        step of the engine per `next()`.

        Args:
            fused: the task of the call, where others score on ranks that have nothing left to generate.

        Raises:
            RunError: of all the groups that `resample` had drawn none may stay.
        """
        resample = node.generation.resample
        if self.beside is not None or node.id in state.growing:
            self._say_how(node, engine, None)
            beside = self.beside or Beside(state.step, (state.step,))
            says = partial(self._progress.phase, node.call, unit="samples")
            if not (yield from self._running_on.work(self._asked(node, state), engine, state, beside, says)):
                return
            groups = generated = list(state.growing[node.id].groups.values())
        elif resample is None:
            groups = yield from self._round(node, engine, state, state.prompts, fused)
            generated = groups
        else:
            groups, generated = yield from self._until_enough(node, engine, state, draw, resample)
        self._fill(node, state, groups, generated)

    def _fill(
        self, node: Node, state: StepState, groups: Sequence[Sequence[Sample]], generated: Sequence[Sequence[Sample]]
    ) -> None:
        """The node's table, and all that it drew."""
        limit = self._recipe.sampling.max_response_tokens
        state.begin_table(node.id, _with_generated_columns(_rows_of(groups), node, limit))
        state.generated[node.id] = _with_generated_columns(_rows_of(generated), node, limit)

    def restored(self, drawn: DrawnBatch, state: StepState) -> None:
        """Make of a batch what it was when its rollouts had ended; its rewards are asked for by the calls that read
        them."""
        for node in self._flow.of_kind(CallKind.GENERATE):
            groups: dict[int, list[Sample]] = defaultdict(list)
            for sample in drawn.samples[node.id]:
                groups[sample.prompt.uid].append(sample)
            if node.generation.resample is None:
                state.growing[node.id] = growing = PartialRollout(state.prompts, self._count(node))
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

    def _count(self, node: Node) -> int:
        """Samples of each prompt."""
        return node.generation.num_samples(self._recipe.samples_per_prompt)

    def _asked(self, node: Node, state: StepState) -> Asked:
        """What the node asks of every prompt of a batch."""
        sampling = self._recipe.sampling.sampling(**({"temperature": 0.0} if node.generation.greedy else {}))
        rollout = state.step * len(self._rollouts) + self._rollouts.index(node.id)
        return Asked(node, self._count(node), sampling, NoiseKey(self._recipe.seed, rollout))

    def _until_enough(
        self, node: Node, engine: GenerationEngine, state: StepState, draw: Draw, resample: Resample
    ) -> Work[tuple[list[list[Sample]], list[list[Sample]]]]:
        """(groups that stay, all groups drawn)."""
        wanted = len(state.prompts)
        prompts = state.prompts
        kept: list[list[Sample]] = []
        drawn: list[list[Sample]] = []
        number = 0
        for number in range(1, resample.max_rounds + 1):
            groups = yield from self._round(node, engine, state, prompts)
            drawn += groups
            rewards = yield from self._rewarding.rewards_of(node, resample.reward, groups, state)
            kept += [group for group, scores in zip(groups, rewards, strict=True) if _stays(resample, scores)]
            if len(kept) >= wanted or number == resample.max_rounds:
                break
            prompts = draw(wanted)
        state.count("dynamic/rounds", number)
        state.count("dynamic/groups_drawn", len(drawn))
        state.count("dynamic/groups_refused", len(drawn) - len(kept))
        if not kept:
            raise RunError(
                f"step {state.step + 1}: {node.call} drew {len(drawn)} groups in {number} rounds and kept none; the "
                "rewards of each group are all alike: take easier or harder prompts, more `samples_per_prompt`, or "
                "raise the number of rounds (`options.max_sampling_rounds`)"
            )
        if len(kept) < wanted:
            self._progress.message(
                f"step {state.step + 1}: {len(kept)} of {wanted} groups are worth training on after {number} rounds"
            )
        return kept[:wanted], drawn

    def _round(
        self,
        node: Node,
        engine: GenerationEngine,
        state: StepState,
        prompts: Sequence[Prompt],
        fused: Task | None = None,
    ) -> Work[list[list[Sample]]]:
        """One group of samples per prompt, in order of the prompts."""
        self._say_how(node, engine, fused)
        asked = self._asked(node, state)
        count = asked.count
        for prompt in prompts:
            engine.add(Request(prompt, count, asked.sampling, asked.noise))
        self._progress.phase(node.call, count * len(prompts), "samples")
        growing = PartialRollout(prompts, count)
        if node.generation.resample is None:
            state.growing[node.id] = growing
        tail = None
        if fused is not None:
            assert engine.moves is not None, f"{node.call}: nothing can be gathered"
            batch = Batch({(p.uid, index): len(p.token_ids) for p in prompts for index in range(count)}, count)
            judge, fusion = self._judge(node, engine, state, batch), self._recipe.fusion
            when = judge or (int(fusion * len(batch.prompts)) if isinstance(fusion, float) else 0)
            tail = Tail(fused, engine, batch, self._bounds, when)
        balance = self._balance(node, engine, state, prompts)
        while engine.has_work:
            done, finished = engine.advance(node.call) if engine.ready else (None, [])
            if self._rewarding.poll(node):
                done = done or MOVED_ON
            growing.hear(engine.said)
            for sample in finished:
                if (group := growing.take(sample)) is not None:
                    self._rewarding.submit(node, group, state)
            if tail is not None:
                tail.look(len(finished))
            if balance is not None:
                balance.look(frees=tail is not None)
            yield done
        if tail is not None:
            tail.end()
        if balance is not None:
            balance.end()
        if tail is not None or balance is not None or self.gate is not None:
            counts = [moves.num_moved for moves in (tail, balance) if moves is not None]
            state.count("perf/samples_moved", sum(counts))
        growing.hear({})
        return list(growing.groups.values())

    def _judge(self, node: Node, engine: GenerationEngine, state: StepState, batch: Batch) -> Judge | None:
        """Who judges this rollout; None: the recipe says when samples are gathered."""
        if self._recipe.fusion != "auto" or self.gate is None:
            return None
        most = self._recipe.sampling.max_running
        size = RolloutSize(len(batch.prompts), engine.traits.num_instances, most, batch.per_prompt)
        return self.gate.judge(state.step, node.call, size)

    def _balance(
        self, node: Node, engine: GenerationEngine, state: StepState, prompts: Sequence[Prompt]
    ) -> Balance | None:
        """What has samples of this rollout move between instances; None: they do not. A rollout that draws in rounds
        is left alone: what was decided is known by its step."""
        if self.rebalancer is None or node.generation.resample is not None:
            return None
        tokens = {prompt.uid: len(prompt.token_ids) for prompt in prompts}
        return self.rebalancer.balance((state.step + 1, node.call), engine, tokens, self._bounds)

    def _say_how(self, node: Node, engine: GenerationEngine, fused: Task | None) -> None:
        """A person should know, once, that a run generates the slower way, and why; and where fusion hides nothing."""
        if self._has_said_how:
            return
        self._has_said_how = True
        if (reason := engine.not_compiled) is not None:
            self._progress.message(f"{node.call}: computed by the model's own layers, not by compiled ones: {reason}")
        if self._recipe.fusion not in ("off", "auto") and fused is None:
            self._progress.message(
                f"{node.call}: `fusion` has nothing to hide: one instance generates, or no model scores its samples "
                "where they are generated; they end where they begin"
            )


def _stays(resample: Resample, rewards: FloatArray) -> bool:
    scored = rewards[np.isfinite(rewards)]
    if len(scored) == 0:
        return False
    what = f"the function `{title_of(resample.keep)}` of Resample(keep=…)"
    with UserCode(what, RunError, users=is_users(resample.keep), limit_s=CALL_LIMIT_S):
        stays = resample.keep(scored)
    if not isinstance(stays, bool | np.bool_):
        raise RunError(f"{what}: expected True or False, found {type(stays).__name__} {stays!r:.80}")
    return bool(stays)


def _rows_of(groups: Sequence[Sequence[Sample]]) -> Rows:
    return Rows(tuple(sample for group in groups for sample in group)).ordered()


def _with_generated_columns(rows: Rows, node: Node, max_response_tokens: int) -> Rows:
    """What a rollout says of its samples, in the columns that `Generated` offers to a flow."""
    logprobs, finished, tokens_left = node.outputs
    lengths = np.diff(rows.offsets)
    return (
        rows.with_column(logprobs, rows.sampling_logprobs)
        .with_column(finished, [sample.finish_reason is FinishReason.STOP for sample in rows.samples])
        .with_column(tokens_left, max_response_tokens - lengths)
    )
