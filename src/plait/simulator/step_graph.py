"""The calls of a step that models compute, as a prediction sees them: who waits for whom, and what is placed alike."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from plait.dataflow import CallKind, Dataflow, Node
from plait.dataflow.graph import added_scores
from plait.schedule.named_plans import MODE_OF
from plait.schedule.needs import early_scores, may_stream, needs_of
from plait.schedule.plan import Mode


@dataclass(frozen=True)
class Slot:
    """What a plan places once: all calls of a role in a mode."""

    role: str
    mode: Mode

    def __str__(self) -> str:
        return f"{self.role} {self.mode}"


NO_MODEL = -1
"""Slot of a call that functions answer, in processes of their own: it keeps no rank busy."""


@dataclass(frozen=True)
class StepCall:
    """
    slot:      place in `StepGraph.slots`, or NO_MODEL
    needs:     calls (places in `StepGraph.calls`) that have ended before it begins
    source:    the call whose samples it may score while they end; None: it waits for all of them
    beside:    `needs` where it does that
    deciding:  slots of the models that a generation asks which groups to keep; their ranks are kept busy too
    with_next: whether it leaves its gradients to the next call of its slot, and trains together with it
    answers:   whether it generates from prompts that are made of samples of the same batch, and so never ahead of it
    """

    call: str
    slot: int
    needs: frozenset[int]
    source: int | None = None
    beside: frozenset[int] = frozenset()
    deciding: tuple[int, ...] = ()
    with_next: bool = False
    answers: bool = False


@dataclass(frozen=True)
class Rollouts:
    """What parts samples are scored in beside generation, as `runtime.steps.scoring_parts` cuts them.

    groups:       prompts of a step
    group_tokens: of a prompt with its samples behind the root, in the mean
    micro_batch_tokens: the recipe's
    root_tokens:  that all prompts begin with: each micro-batch has them once
    """

    groups: int = 1
    group_tokens: int = 1
    micro_batch_tokens: int = 1
    root_tokens: int = 0

    def parts(self, micro_batches: int, tokens: int | None = None) -> int:
        """
        Args:
            micro_batches: of a part.
            tokens: of each at most; None: the recipe's.
        """
        room = max(1, (tokens or self.micro_batch_tokens) - self.root_tokens)
        together = max(1, micro_batches * room // max(1, self.group_tokens))
        return max(1, -(-self.groups // together))


@dataclass(frozen=True)
class StepGraph:
    """
    slots:   in the order in which the flow first asks for them
    trained: roles whose weights change
    owners:  role → whose weights it computes with, where several frozen roles share them; itself where it is not named
    nested:  whether a part of a model lies in the whole of it where a rank keeps both
    fuses:   whether scoring may begin on ranks that generate, as these have no samples left
    ahead:   whether a step draws the samples of a batch behind its own (`max_staleness`), beside training where what
             generates has weights of its own
    early:   calls that score these samples then, and not in the step that trains on them
    pools_stay: whether what generations take beside weights stays with their ranks
    gathers: whether samples may be gathered on few ranks, and each copy of a model score by itself; rebalances: whether
             instances give each other samples beside that
    follows: role → the trained one that its weights are brought towards, once in `follow_steps` steps
    """

    calls: tuple[StepCall, ...]
    slots: tuple[Slot, ...]
    trained: frozenset[str]
    owners: Mapping[str, Hashable] = field(default_factory=dict)
    rollouts: Rollouts = Rollouts()
    nested: bool = False
    fuses: bool = False
    ahead: bool = False
    early: frozenset[int] = frozenset()
    pools_stay: bool = False
    gathers: bool = False
    rebalances: bool = False
    follows: Mapping[str, str] = field(default_factory=dict)
    follow_steps: int = 1

    @classmethod
    def of(
        cls,
        flow: Dataflow,
        models: Collection[str],
        rewards: Collection[str] = (),
        *,
        functions: Collection[str] = (),
        owners: Mapping[str, Hashable] | None = None,
        rollouts: Rollouts = Rollouts(),
        nested: bool = False,
        fuses: bool = False,
        ahead: bool = False,
        frozen: Collection[str] = (),
        pools_stay: bool = False,
        rebalances: bool = False,
        follows: Mapping[str, str] | None = None,
    ) -> StepGraph:
        """
        Args:
            models: roles that are models.
            rewards: roles that only score samples; those that are no models are among them anyway.
            functions: of those that are no models, the ones whose time is known.
            frozen: models that never change, and are no rewards.
        """
        needs = needs_of(flow, {*rewards, *(role for role in flow.roles if role not in models)})
        placed = [node for node in flow.nodes if node.role in (*models, *functions) and node.kind in MODE_OF]
        slots = tuple(dict.fromkeys(_slot(node) for node in placed if node.role in models))
        number = {node.id: place for place, node in enumerate(placed)}
        calls = []
        for node in placed:
            streams = may_stream(node, flow) and node.rows in needs[node.id] and node.rows in number
            calls.append(
                StepCall(
                    node.call,
                    slots.index(_slot(node)) if node.role in models else NO_MODEL,
                    _placed_needs(needs[node.id], needs, number),
                    number[node.rows] if streams else None,
                    _placed_needs(needs[node.id] - {node.rows}, needs, number) if streams else frozenset(),
                    _deciding(node, flow, slots),
                    node.kind is CallKind.TRAIN and node.training.with_next,
                    node.kind is CallKind.GENERATE and node.prompts is not None,
                )
            )
        trained = frozenset(str(node.role) for node in placed if node.kind is CallKind.TRAIN)
        early = frozenset(number[node] for node in early_scores(flow, needs, frozen) if node in number)
        return cls(
            tuple(calls),
            slots,
            trained,
            owners or {},
            rollouts,
            nested,
            fuses,
            ahead,
            early,
            pools_stay,
            gathers=fuses,
            rebalances=rebalances,
            follows=follows or {},
        )

    @cached_property
    def calls_of(self) -> tuple[tuple[int, ...], ...]:
        """By slot."""
        return tuple(
            tuple(number for number, call in enumerate(self.calls) if call.slot == slot)
            for slot in range(len(self.slots))
        )

    @cached_property
    def updates(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The calls of each slot, those together whose gradients meet in the same optimizer steps."""
        of_slots: list[tuple[tuple[int, ...], ...]] = []
        for numbers in self.calls_of:
            ends = [at + 1 for at, number in enumerate(numbers) if not self.calls[number].with_next]
            of_slots.append(tuple(numbers[start:end] for start, end in pairwise((0, *ends))))
        return tuple(of_slots)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(slot.role for slot in self.slots))

    @cached_property
    def waits(self) -> tuple[tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]], ...]:
        """The keys that each call in step 0 waits for, and those where it scores beside generation; then the end's."""
        keys = lambda calls: frozenset((0, number) for number in calls)
        end = keys(range(len(self.calls)))
        return (*((keys(call.needs), keys(call.beside)) for call in self.calls), (end, end))

    @cached_property
    def draws(self) -> frozenset[int]:
        """Calls that generate."""
        return frozenset(
            number
            for number, call in enumerate(self.calls)
            if call.slot != NO_MODEL and self.slots[call.slot].mode == "decode"
        )

    @cached_property
    def draws_ahead(self) -> frozenset[int]:
        """Those of them that may draw samples of a later batch."""
        return frozenset(number for number in self.draws if not self.calls[number].answers)

    @cached_property
    def scores_of(self) -> Mapping[int, tuple[int, ...]]:
        """Generation → calls of models that may score its samples as they end, and wait for nothing else: in a step
        that draws ahead those that score what it draws."""
        return {
            draw: tuple(
                number
                for number, call in enumerate(self.calls)
                if call.source == draw
                and call.slot != NO_MODEL
                and not call.beside
                and (not self.ahead or number in self.early)
            )
            for draw in self.draws
        }

    def slots_of(self, role: str) -> dict[Mode, int]:
        return {slot.mode: number for number, slot in enumerate(self.slots) if slot.role == role}

    def home_of(self, role: str) -> int:
        """The slot whose weights are the role's own."""
        mine = self.slots_of(role)
        return next(mine[mode] for mode in _HOMES if mode in mine)

    @cached_property
    def families(self) -> tuple[tuple[int, ...], ...]:
        """Slots of roles that share weights, together."""
        slots_of_families: dict[Hashable, list[int]] = {}
        for number, slot in enumerate(self.slots):
            slots_of_families.setdefault(self.owners.get(slot.role, slot.role), []).append(number)
        return tuple(map(tuple, slots_of_families.values()))


_HOMES: tuple[Mode, ...] = ("train", "score", "decode")


def _slot(node: Node) -> Slot:
    return Slot(str(node.role), MODE_OF[node.kind])


def _deciding(node: Node, flow: Dataflow, slots: tuple[Slot, ...]) -> tuple[int, ...]:
    resample = node.generation.resample if node.kind is CallKind.GENERATE else None
    if resample is None:
        return ()
    asked = [other for other in flow.calls(resample.reward) if other.rows == node.id]
    asked += [flow.nodes[number] for other in asked for number in added_scores(other).values()]
    deciding = dict.fromkeys(Slot(str(other.role), "score") for other in asked)
    return tuple(slots.index(slot) for slot in deciding if slot in slots)


def _placed_needs(
    needs: Collection[int], all_needs: Mapping[int, frozenset[int]], number: Mapping[int, int]
) -> frozenset[int]:
    """Calls of models among these needs, and those that the others of them wait for."""
    placed: set[int] = set()
    seen: set[int] = set()
    waiting = list(needs)
    while waiting:
        call = waiting.pop()
        if call in seen:
            continue
        seen.add(call)
        if call in number:
            placed.add(number[call])
        else:
            waiting += all_needs[call]
    return frozenset(placed)
