"""Continuous batching: which samples a step computes, which start, which give way. Decisions over numbers, no torch.

The engine executes these decisions, and the simulator takes the same ones. They depend on requests, lengths and limits
alone (not on a clock or on free memory), so a resumed run repeats them.

Words: a *prompt* is computed once, in chunks if it is long, and then starts its samples, all at once or as places
become free; they share its blocks. Prompts that begin alike share the full blocks of their common beginning: the first
one computes them, and later ones find them, even in the same step. A sample is *preempted* when the pool is too small:
its blocks are freed, and it waits, ahead of all samples that have not started, until its tokens are computed again. The
*order* of samples is that in which they were asked for; the youngest give way. Those of an earlier *rollout* come
before all of a later one, whenever they were asked for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from plait.policy.blocks import Blocks
from plait.policy.coming_back import come_back
from plait.policy.kept_turns import KeptTurns
from plait.policy.prompts_alone import prompt_chunks
from plait.policy.room import Room
from plait.policy.sequences import Prompt, Sequences, Started, order_of
from plait.policy.step import Chunk, Key, Limits, Share, Start, StepPlan

NO_DRAFTS: Mapping[Key, int] = MappingProxyType({})


class Scheduler:
    """Decides the steps of an engine. `plan` counts its step as done, with all drafts accepted; `take_back` corrects
    that for drafts that were wrong."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.sequences = Sequences()
        self.room = Room(limits, self.sequences)
        self.turns = KeptTurns(limits, self.room.blocks)
        self._turn = 0
        """The number of the last step."""

    @property
    def running(self) -> dict[Key, Started]:
        """The samples in the batch."""
        return self.sequences.running

    @property
    def blocks(self) -> Blocks:
        """Who holds which block of the pool."""
        return self.room.blocks

    @property
    def has_work(self) -> bool:
        sequences = self.sequences
        return bool(sequences.running or sequences.preempted or sequences.prompts)

    def add(
        self, uid: int, num_tokens: int, indices: Sequence[int], names: Sequence[Hashable], rollout: int = 0
    ) -> None:
        """Queue samples of a prompt.

        Args:
            names: a prefix key for each full block of the prompt; blocks of equal ones are computed once.
            rollout: its number.
        """
        self.sequences.add_prompt(uid, num_tokens, indices, tuple(names), rollout)

    def add_started(
        self,
        key: Key,
        num_tokens: int,
        num_computed_tokens: int,
        names: Sequence[Hashable],
        *,
        is_current: bool = True,
        is_parked: bool = False,
        rollout: int = 0,
    ) -> int | None:
        """Queue a sample that has started elsewhere, with room for the computed tokens that it brings or shares.

        Args:
            num_tokens: of prompt and response.
            names: as of `add`.
            is_current: whether its keys and values are of the current weights, so that samples may share them.
            is_parked: whether they, of all tokens but the newest, stay where they are until it runs
                (`StepPlan.brought`): however many wait, none of them gives way.
            rollout: as of `add`.

        Returns:
            How many of the computed tokens are here already, shared with others; the caller writes the rest at once.
            None if there is no room: all tokens are computed again, or if they stay where they are.
        """
        sample = self.sequences.add_started(key, num_tokens, tuple(names), rollout)
        if is_parked:
            assert num_computed_tokens == num_tokens - 1, f"sample {key} is parked, and not whole"
            sample.num_parked_tokens = num_computed_tokens
            return None
        return self.room.bring(sample, num_computed_tokens, is_current=is_current)

    def remove(self, keys: Iterable[Key], contexts: Mapping[Key, Sequence[Hashable]] | None = None) -> None:
        """Remove samples that have ended or are taken out, and free their blocks.

        Args:
            contexts: running sample → a prefix key for each full block of prompt and response, by which later prompts
                that continue its text find the blocks.
        """
        for key in keys:
            was_running = key in self.running
            sample = self.sequences.pop(key)
            if sample is None:
                self._give_up(key)
                continue
            if was_running and contexts is not None:
                self.room.name(sample, contexts[key])
            self.blocks.release(sample.table)

    def _give_up(self, key: Key) -> None:
        """Remove a sample that has not started, if there is one of this key."""
        prompt = self.sequences.prompts.get(key[0])
        if prompt is not None and key[1] in prompt.pending:
            prompt.pending.remove(key[1])
            self.sequences.num_unstarted -= 1
            self._let_go(prompt)

    def recompute(self) -> None:
        """Drop all keys and values: all started samples wait to be computed again."""
        for sample in list(self.running.values()):
            self.room.preempt(sample)
        for item in self.sequences:
            self.room.evict(item)
        for sample in self.sequences.preempted:
            sample.num_parked_tokens = 0
        self.forget()

    def forget(self) -> None:
        """Let no later sequence share what is held now."""
        for item in self.sequences:
            item.is_current = not item.table
        self.blocks.forget()

    def start_ready(self) -> tuple[Start, ...]:
        """Let samples of computed prompts enter the batch, as far as there are places.

        Called before `plan`: they draw their first token, and those that do not end with it have a row in the step.
        """
        starts: list[Start] = []
        places = self.limits.max_running - len(self.running)
        prompts = self.sequences.prompts
        while self.limits.starts and places and prompts and not self.sequences.preempted:
            prompt = next(iter(prompts.values()))
            if prompt.num_computed_tokens < prompt.num_tokens:
                break
            places -= self._begin(prompt, places, starts)
        return tuple(starts)

    def plan(self, num_drafted: Mapping[Key, int] = NO_DRAFTS, share: Share | None = None) -> StepPlan:
        """Decide one step, first come, first served: the next tokens of running samples, and new samples as places
        allow.

        Args:
            num_drafted: running sample → number of draft tokens that are computed after its newest one. Drafts use
                free blocks only: if these are too few for all drafts, none is computed.
            share: what the step computes at most, while other samples are in flight, of which none may have to give
                way (`shares.has_room`). None: it computes all running samples.
        """
        self._turn += 1
        joined, brought = come_back(self.sequences, self.room, self.limits.max_running)
        asked = list(self.running.values()) if share is None else [self.running[key] for key in share.rows]
        if num_drafted and not self.room.has_room(asked, num_drafted):
            num_drafted = NO_DRAFTS
        preempted, copies, grown = self._make_room(asked, num_drafted)
        context, num_new, rows = 0, [], []
        for sample in asked:
            if preempted and sample.key not in self.running:
                continue
            context += sample.num_computed_tokens
            count = 1 + num_drafted.get(sample.key, 0) if num_drafted else 1
            sample.num_computed_tokens += count
            sample.num_tokens += count
            sample.turn = self._turn
            rows.append(sample.key)
            num_new.append(count)
        chunks, starts = self._fill(None if share is None else share.most - len(rows))
        return StepPlan(
            preempted=tuple(preempted),
            copies=tuple(copies),
            grown=tuple(grown),
            joined=tuple(key for key in joined if key in self.running),
            rows=tuple(rows),
            num_new=tuple(num_new),
            num_row_context=context,
            chunks=tuple(chunks),
            starts=tuple(starts),
            brought=tuple(key for key in brought if key not in preempted),
        )

    def take_back(self, num_wrong: Mapping[Key, int]) -> None:
        """Running sample → how many of its drafted tokens were wrong or came after its end; they do not count, and are
        overwritten."""
        for key, count in num_wrong.items():
            sample = self.running[key]
            sample.num_computed_tokens -= count
            sample.num_tokens -= count

    def _make_room(
        self, samples: Iterable[Started], num_drafted: Mapping[Key, int]
    ) -> tuple[list[Key], list[tuple[int, int]], list[Key]]:
        """Give these running samples blocks for their new tokens: (preempted, copies, grown) of `StepPlan`."""
        preempted: list[Key] = []
        copies: list[tuple[int, int]] = []
        grown: list[Key] = []
        asking = self.room.asking(samples, num_drafted)
        if len(asking) > self.blocks.num_free:
            asking.sort(key=order_of)
        for sample in asking:
            if sample.key not in self.running:
                continue
            copied = self.room.grow(sample, 1 + num_drafted.get(sample.key, 0), preempted)
            if copied is not None:
                copies += copied
                grown.append(sample.key)
        return preempted, copies, grown

    def _fill(self, most: int | None) -> tuple[list[Chunk], list[Start]]:
        """Chunks and starts for the free places, for at most `most` samples."""
        if not self.limits.starts:
            return prompt_chunks(self.sequences, self.room, self.limits.max_prefill_tokens), []
        places = self.limits.max_running - len(self.running)
        if most is not None:
            places = min(places, most)
        budget = self.limits.max_prefill_tokens
        chunks: list[Chunk] = []
        starts: list[Start] = []
        # Each takes at least one place, so no more of them than places are looked at.
        for item in tuple(islice(self.sequences.in_turn(), places)):
            if places == 0 or (isinstance(item, Started) and item.num_parked_tokens):
                break
            done = item.num_computed_tokens == item.num_tokens
            if not done:
                idle = not (self.running or chunks or starts)
                if budget == 0 or not (item.table or self.room.admit(item, idle)):
                    break
                chunks.append(_next_chunk(item, budget))
                item.num_computed_tokens, done = chunks[-1].stop, chunks[-1].completes
                budget -= chunks[-1].stop - chunks[-1].start
                if done:
                    self.room.name(item, item.names)
            places -= self._begin(item, places, starts) if done else _wanted(item, places)
        return chunks, starts

    def _begin(self, item: Started | Prompt, places: int, starts: list[Start]) -> int:
        """Let samples of a computed sequence enter the batch; how many."""
        if isinstance(item, Started):
            item.num_tokens += 1
            self.sequences.enter(item)
            item.turn = self._turn
            return 1
        indices = item.pending[:places]
        for index in indices:
            self.blocks.hold(item.table)
            key = (item.uid, index)
            order = (item.rollout, item.number, index)
            self.running[key] = Started(
                key,
                order,
                item.num_tokens + 1,
                item.num_computed_tokens,
                list(item.table),
                item.names,
                item.is_current,
                self._turn,
            )
        starts.append(Start(item.uid, tuple(indices)))
        del item.pending[: len(indices)]
        self.sequences.num_unstarted -= len(indices)
        self._let_go(item)
        return len(indices)

    def _let_go(self, prompt: Prompt) -> None:
        """Remove a prompt without samples to start."""
        if not prompt.pending:
            self.blocks.release(prompt.table)
            del self.sequences.prompts[prompt.uid]


def _next_chunk(item: Started | Prompt, budget: int) -> Chunk:
    """The next chunk of a sequence, of at most `budget` tokens."""
    uid, index = item.key if isinstance(item, Started) else (item.uid, None)
    stop = min(item.num_tokens, item.num_computed_tokens + budget)
    return Chunk(uid, index, item.num_computed_tokens, stop, tuple(item.table), stop == item.num_tokens)


def _wanted(item: Started | Prompt, places: int) -> int:
    """Places to keep free for the samples of a sequence that is being computed."""
    return 1 if isinstance(item, Started) else min(places, len(item.pending))
