"""Continuous batching: who is computed in a step, who starts, who gives way. Decisions over numbers, without torch.

The engine executes these decisions; a simulator given the same numbers takes the same ones. They depend on requests,
lengths and limits alone (no clock, no free memory), so a resumed run repeats them.

Words: a *prompt* is computed once, in chunks where it is long, and then starts its samples, all at once or as places
become free; they share its blocks. A sample is *preempted* when the pool is too small: its blocks are freed and it
waits, ahead of all that have not started, until its tokens are computed again. The *order* of samples is that in which
they were asked for; who is younger gives way.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from types import MappingProxyType

from plait.policy.blocks import Blocks, num_blocks_for
from plait.policy.step import Chunk, Key, Limits, Start, StepPlan

NO_DRAFTS: Mapping[Key, int] = MappingProxyType({})


@dataclass(slots=True)
class Started:
    """A sample that has started."""

    key: Key
    order: tuple[int, int]
    num_tokens: int
    """Of prompt and response; all but the newest are computed when it runs."""
    num_computed_tokens: int
    """Whose keys and values lie in the pool."""
    table: list[int]
    names: tuple[Hashable, ...]
    """Prefix keys of the full blocks of its prompt."""
    is_current: bool = True
    """What it holds was computed with the present weights, so others may share it."""


@dataclass(slots=True)
class _Prompt:
    """A prompt with samples that have not started."""

    uid: int
    number: int
    """In order of arrival."""
    num_tokens: int
    pending: list[int]
    names: tuple[Hashable, ...]
    num_computed_tokens: int = 0
    table: list[int] = field(default_factory=list)
    is_current: bool = True

    @property
    def order(self) -> tuple[int, int]:
        return self.number, self.pending[0]


class Scheduler:
    """The numbers that decisions are made of, and the decisions. `plan` assumes that what it says is done, and that
    drafts come true; `take_back` says of which tokens that was wrong."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = Blocks(limits.num_blocks, limits.cache_blocks)
        self.running: dict[Key, Started] = {}
        self._preempted: list[Started] = []
        """In their order: to be computed again, or on their way."""
        self._prompts: dict[int, _Prompt] = {}
        self._count = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._preempted or self._prompts)

    @property
    def num_waiting(self) -> int:
        """Samples that are not in the batch."""
        return len(self._preempted) + sum(len(prompt.pending) for prompt in self._prompts.values())

    @property
    def waiting(self) -> Iterator[Key]:
        """Samples that are not in the batch."""
        yield from (sample.key for sample in self._preempted)
        yield from ((prompt.uid, index) for prompt in self._prompts.values() for index in prompt.pending)

    def find(self, key: Key) -> Started | None:
        """The sample, if it has started."""
        return self.running.get(key) or next((s for s in self._preempted if s.key == key), None)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens has room in the pool when it is alone."""
        return num_blocks_for(num_tokens, self.limits.block_tokens) <= self.blocks.num_blocks

    def add(self, uid: int, num_tokens: int, indices: Sequence[int], names: Sequence[Hashable] | None = None) -> None:
        """Queue samples of a prompt.

        Args:
            names: a prefix key for each full block of the prompt; equal ones are computed once. None: shared by its
                own samples only.
        """
        assert uid not in self._prompts, f"prompt {uid} waits already"
        self._prompts[uid] = _Prompt(uid, self._count, num_tokens, list(indices), self._names(uid, num_tokens, names))
        self._count += 1

    def num_shared(self, uid: int, num_prompt: int, names: Sequence[Hashable] | None = None) -> int:
        """Tokens of a prompt that a sample of it would share with others here; `names` as of `add`."""
        return len(self.blocks.find(self._names(uid, num_prompt, names))) * self.limits.block_tokens

    def add_started(
        self,
        key: Key,
        num_prompt: int,
        num_tokens: int,
        num_computed_tokens: int,
        names: Sequence[Hashable] | None = None,
        *,
        is_current: bool = True,
    ) -> int | None:
        """Queue a sample that has started elsewhere, with room for the computed tokens that it brings or shares.

        Args:
            num_tokens: of prompt and response.
            names: as of `add`.
            is_current: what it brings is of the present weights, so it and others may share.

        Returns:
            How many of these tokens lie here already, shared with others; the caller writes the rest at once. None
            where there is no room now: all are computed again.
        """
        block_tokens, blocks = self.limits.block_tokens, self.blocks
        order, named = (self._count, key[1]), self._names(key[0], num_prompt, names)
        sample = Started(key, order, num_tokens, 0, [], named)
        self._count += 1
        insort(self._preempted, sample, key=_order)
        shared = blocks.find(named[: num_computed_tokens // block_tokens]) if is_current else []
        blocks.hold(shared)
        goes_on = num_computed_tokens == num_tokens - 1
        count = num_blocks_for(num_computed_tokens if goes_on else num_tokens, block_tokens) - len(shared)
        if num_computed_tokens == 0 or blocks.num_free - count < len(self.running):
            blocks.release(shared)
            return None
        sample.table, sample.is_current = shared + blocks.take(count), is_current
        sample.num_computed_tokens = num_computed_tokens
        self._name(sample)
        return len(shared) * block_tokens

    def remove(self, keys: Iterable[Key], contexts: Mapping[Key, Sequence[Hashable]] | None = None) -> None:
        """These samples have ended, or are taken out wherever they are; their blocks are free at once.

        Args:
            contexts: of samples that were running, a prefix key for each full block of prompt and response, by which
                later prompts that go on with them find these.
        """
        for key in keys:
            sample = self.running.pop(key, None)
            if sample is not None and sample.is_current and contexts is not None:
                full = sample.num_computed_tokens // self.limits.block_tokens
                for block, name in zip(sample.table[:full], contexts[key], strict=False):
                    self.blocks.name(block, name)
            if sample is None and self._preempted:
                sample = next((s for s in self._preempted if s.key == key), None)
                if sample is not None:
                    self._preempted.remove(sample)
            if sample is not None:
                self.blocks.release(sample.table)
                continue
            prompt = self._prompts.get(key[0])
            if prompt is not None and key[1] in prompt.pending:
                prompt.pending.remove(key[1])
                self._let_go(prompt)

    def recompute(self) -> None:
        """Nothing that the pool holds counts any more: all started samples wait to be computed again."""
        for sample in list(self.running.values()):
            self._preempt(sample)
        for item in (*self._preempted, *self._prompts.values()):
            self._evict(item)
        self.forget()

    def forget(self) -> None:
        """What is held now is not found by later sequences."""
        for item in (*self.running.values(), *self._preempted, *self._prompts.values()):
            item.is_current = not item.table
        self.blocks.forget()

    def start_ready(self) -> tuple[Start, ...]:
        """Samples of prompts that are computed enter the batch, as far as there are places.

        To be asked before `plan`: they draw their first token, and those that it does not end have a row in the step.
        """
        starts: list[Start] = []
        places = self.limits.max_running - len(self.running)
        while places and self._prompts and not self._preempted:
            prompt = next(iter(self._prompts.values()))
            if prompt.num_computed_tokens < prompt.num_tokens:
                break
            places -= self._begin(prompt, places, starts)
        return tuple(starts)

    def plan(self, num_drafted: Mapping[Key, int] = NO_DRAFTS) -> StepPlan:
        """Decide one step: first come, first served; further tokens for all that run, new ones as places allow.

        Args:
            num_drafted: of running samples, guesses of their next tokens that are computed behind the newest one. They
                take room that is free: where it is too little for all, none is computed.
        """
        joined = self._join() if self._preempted else ()
        if num_drafted and not self._has_room(num_drafted):
            num_drafted = NO_DRAFTS
        preempted, copies, grown = self._make_room(num_drafted)
        context, num_new = 0, []
        for key, sample in self.running.items():
            context += sample.num_computed_tokens
            count = 1 + num_drafted.get(key, 0) if num_drafted else 1
            sample.num_computed_tokens += count
            sample.num_tokens += count
            num_new.append(count)
        rows = tuple(self.running)
        chunks, starts = self._fill()
        return StepPlan(
            preempted=tuple(preempted),
            copies=tuple(copies),
            grown=tuple(grown),
            joined=tuple(key for key in joined if key in self.running),
            rows=rows,
            num_new=tuple(num_new),
            num_row_context=context,
            chunks=tuple(chunks),
            starts=tuple(starts),
        )

    def take_back(self, num_wrong: Mapping[Key, int]) -> None:
        """So many drafted tokens of these running samples were not what they drew, or stand behind their end; what was
        computed of them is overwritten."""
        for key, count in num_wrong.items():
            sample = self.running[key]
            sample.num_computed_tokens -= count
            sample.num_tokens -= count

    def _join(self) -> tuple[Key, ...]:
        """Samples of which all but the newest token are computed go on, as far as there are places."""
        places = self.limits.max_running - len(self.running)
        ready = (sample for sample in self._preempted if sample.num_computed_tokens == sample.num_tokens - 1)
        joined = list(islice(ready, places))
        for sample in joined:
            self._preempted.remove(sample)
            self.running[sample.key] = sample
        return tuple(sample.key for sample in joined)

    def _num_lacking(self, sample: Started, num_new: int) -> int:
        """Blocks that a running sample has to take, so that it may write so many tokens: behind its table, and a copy
        in place of the last one where that has room left and is shared."""
        size = self.limits.block_tokens
        growth = max(0, num_blocks_for(sample.num_computed_tokens + num_new, size) - len(sample.table))
        return growth + self._needs_copy(sample)

    def _needs_copy(self, sample: Started) -> bool:
        has_room = sample.num_computed_tokens < len(sample.table) * self.limits.block_tokens
        return has_room and self.blocks.is_shared(sample.table[-1])

    def _has_room(self, num_drafted: Mapping[Key, int]) -> bool:
        """Whether all may compute their drafts, and nobody gives way for it."""
        lacking = (self._num_lacking(sample, 1 + num_drafted.get(key, 0)) for key, sample in self.running.items())
        return sum(lacking) <= self.blocks.num_free

    def _make_room(self, num_drafted: Mapping[Key, int]) -> tuple[list[Key], list[tuple[int, int]], list[Key]]:
        """Blocks that they may write for the new tokens of all running samples: (preempted, copies, grown)."""
        block_tokens, blocks = self.limits.block_tokens, self.blocks
        asking = [
            sample
            for key, sample in self.running.items()
            if sample.num_computed_tokens + num_drafted.get(key, 0) >= len(sample.table) * block_tokens
            or blocks.is_shared(sample.table[-1])
        ]
        if not asking:
            return [], [], []
        if len(asking) > blocks.num_free:
            asking.sort(key=_order)
        preempted: list[Key] = []
        copies: list[tuple[int, int]] = []
        grown: list[Key] = []
        for sample in asking:
            if sample.key not in self.running:
                continue
            num_new = 1 + num_drafted.get(sample.key, 0)
            if not (lacking := self._num_lacking(sample, num_new)):
                continue  # the others have taken copies
            while blocks.num_free < lacking and sample.key in self.running:
                if not self._evict_waiting(sample.order):
                    youngest = max(self.running.values(), key=_order)
                    self._preempt(youngest)
                    preempted.append(youngest.key)
            if sample.key not in self.running or not (lacking := self._num_lacking(sample, num_new)):
                continue
            if self._needs_copy(sample):
                source = sample.table.pop()
                sample.table += blocks.take(lacking)
                copies.append((source, sample.table[-lacking]))
                blocks.release((source,))
            else:
                sample.table += blocks.take(lacking)
            grown.append(sample.key)
        return preempted, copies, grown

    def _fill(self) -> tuple[list[Chunk], list[Start]]:
        """Chunks and starts for the places that are free."""
        places = self.limits.max_running - len(self.running)
        budget = self.limits.max_prefill_tokens
        chunks: list[Chunk] = []
        starts: list[Start] = []
        # Each takes a place at least, so no more of them than places can be of interest.
        for item in tuple(islice(chain(self._preempted, self._prompts.values()), places)):
            if places == 0:
                break
            done = item.num_computed_tokens == item.num_tokens
            if not done:
                idle = not (self.running or chunks or starts)
                if budget == 0 or not (item.table or self._admit(item, idle)):
                    break
                stop = min(item.num_tokens, item.num_computed_tokens + budget)
                done = stop == item.num_tokens
                index = item.key[1] if isinstance(item, Started) else None
                uid = item.key[0] if isinstance(item, Started) else item.uid
                chunks.append(Chunk(uid, index, item.num_computed_tokens, stop, tuple(item.table), done))
                budget -= stop - item.num_computed_tokens
                item.num_computed_tokens = stop
                if done:
                    self._name(item)
            places -= self._begin(item, places, starts) if done else _wanted(item, places)
        return chunks, starts

    def _begin(self, item: Started | _Prompt, places: int, starts: list[Start]) -> int:
        """Samples of what is computed enter the batch; returns how many."""
        if isinstance(item, Started):
            self._preempted.remove(item)
            item.num_tokens += 1
            self.running[item.key] = item
            return 1
        indices = item.pending[:places]
        for index in indices:
            self.blocks.hold(item.table)
            key = (item.uid, index)
            order = (item.number, index)
            self.running[key] = Started(
                key,
                order,
                item.num_tokens + 1,
                item.num_computed_tokens,
                list(item.table),
                item.names,
                item.is_current,
            )
        starts.append(Start(item.uid, tuple(indices)))
        del item.pending[: len(indices)]
        self._let_go(item)
        return len(indices)

    def _admit(self, item: Started | _Prompt, idle: bool) -> bool:
        """Give it blocks for all its tokens, if that leaves one for each running sample, or nothing else runs."""
        block_tokens, blocks = self.limits.block_tokens, self.blocks
        # The newest token is computed in any case: its logits are asked for.
        shared = blocks.find(item.names[: (item.num_tokens - 1) // block_tokens])
        blocks.hold(shared)
        count = num_blocks_for(item.num_tokens, block_tokens) - len(shared)
        spare = 0 if idle else len(self.running) + 1
        while idle and blocks.num_free < count and self._evict_waiting(item.order):
            pass
        if blocks.num_free - count < spare:
            assert not idle, f"{item.num_tokens} tokens do not fit into an empty pool"
            blocks.release(shared)
            return False
        item.table = shared + blocks.take(count)
        item.num_computed_tokens = len(shared) * block_tokens
        return True

    def _evict_waiting(self, order: tuple[int, int]) -> bool:
        """Free the blocks of the youngest that waits, if it is younger than `order`; False where there is none."""
        for item in (*reversed(self._prompts.values()), *reversed(self._preempted)):
            if item.table and item.order > order:
                self._evict(item)
                return True
        return False

    def _evict(self, item: Started | _Prompt) -> None:
        self.blocks.release(item.table)
        item.table, item.num_computed_tokens, item.is_current = [], 0, True

    def _name(self, item: Started | _Prompt) -> None:
        """Others find the full blocks of its prompt from now on, also in this step: keys are written before they are
        read."""
        if item.is_current:
            full = item.num_computed_tokens // self.limits.block_tokens
            for block, name in zip(item.table[:full], item.names, strict=False):
                self.blocks.name(block, name)

    def _preempt(self, sample: Started) -> None:
        del self.running[sample.key]
        self._evict(sample)
        insort(self._preempted, sample, key=_order)

    def _let_go(self, prompt: _Prompt) -> None:
        """Its last sample has started, or was taken out."""
        if not prompt.pending:
            self.blocks.release(prompt.table)
            del self._prompts[prompt.uid]

    def _names(self, uid: int, num_tokens: int, names: Sequence[Hashable] | None) -> tuple[Hashable, ...]:
        """A uid may come again with another prompt, so names made of it must not outlive its samples."""
        count = num_tokens // self.limits.block_tokens
        if names is not None:
            return tuple(names[:count])
        return () if self.limits.cache_blocks else tuple((uid, at) for at in range(count))


def _order(sample: Started) -> tuple[int, int]:
    return sample.order


def _wanted(item: Started | _Prompt, places: int) -> int:
    """Places that wait for what is on its way."""
    return 1 if isinstance(item, Started) else min(places, len(item.pending))
