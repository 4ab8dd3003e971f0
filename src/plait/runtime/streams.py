"""Scoring that begins before all samples are there: rows in parts, each as soon as it is whole.

Which samples make a part depends on what was asked for, never on who was finished first: packed together they are
computed together, and a rounding must not depend on the clock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from plait.data.records import Prompt, Sample
from plait.data.rows import FloatArray, Rows
from plait.policy.fusion_gate import PARTS_OF_AN_INSTANCE
from plait.schedule.dispatch import Task
from plait.schedule.work import MOVED_ON, Work
from plait.workers.ranks import LEADER

Part = Callable[[], Rows | None]
"""Rows that are scored by one call; None: they are not there yet."""

Scored = tuple[Rows, FloatArray]
"""Rows, and a number for each of them or of their tokens."""


Call = Callable[[Rows, str, int | None], Work[FloatArray]]
"""Scores a part, from its rows, its name (`ref.logprobs/p1` of several), and the number of the copy of the model that
computes it; None: all copies do, each a share."""

Spread = Callable[[Call, str], Work[list[Scored]]]
"""Scores all parts by a call of this name: (its rows, the result) of each, in their order."""


class PartialRollout:
    """The samples of a rollout, group by group, as far as they are finished.

    Args:
        count: samples of each prompt.
    """

    def __init__(self, prompts: Sequence[Prompt], count: int) -> None:
        self.prompts = tuple(prompts)
        self.count = count
        self.groups: dict[int, list[Sample]] = {prompt.uid: [] for prompt in prompts}

    @property
    def unfinished(self) -> Iterator[tuple[int, int]]:
        """(prompt uid, index) of each sample that is not finished."""
        for uid, group in self.groups.items():
            finished = {sample.index for sample in group}
            yield from ((uid, index) for index in range(self.count) if index not in finished)

    @property
    def whole(self) -> list[list[Sample]]:
        """Groups of which all samples are finished, each by index."""
        return [
            sorted(group, key=lambda sample: sample.index) for group in self.groups.values() if len(group) == self.count
        ]

    @property
    def num_asked(self) -> int:
        """Samples that the rollout will have."""
        return self.count * len(self.prompts)

    def take(self, sample: Sample) -> list[Sample] | None:
        """A finished sample; its group by index, if it was the last of it."""
        group = self.groups[sample.prompt.uid]
        group.append(sample)
        if len(group) < self.count:
            return None
        group.sort(key=lambda member: member.index)
        return group

    def rows_of(self, uids: Sequence[int]) -> Rows | None:
        """The samples of some prompts; None while one of them is not finished."""
        groups = [self.groups[uid] for uid in uids]
        if any(len(group) < self.count for group in groups):
            return None
        return Rows(tuple(sample for group in groups for sample in group)).ordered()

    def expected_tokens(self, max_response_tokens: int) -> int:
        """Tokens of all groups, if all responses were as long as they may be."""
        return sum(len(prompt.token_ids) + self.count * max_response_tokens for prompt in self.prompts)

    def parts(self, max_response_tokens: int, tokens_of_a_part: int) -> list[Part]:
        """Whole groups in the order of the prompts: as many in a part as would have at most `tokens_of_a_part` if all
        responses were as long as they may be, or one."""
        parts: defaultdict[int, list[int]] = defaultdict(list)
        for uid, number in self.numbers(max_response_tokens, tokens_of_a_part).items():
            parts[number].append(uid)
        return [lambda uids=uids: self.rows_of(uids) for uids in parts.values()]

    def numbers(self, max_response_tokens: int, tokens_of_a_part: int) -> dict[int, int]:
        """Uid of a prompt → the number of the part of `parts` that its group is in."""
        numbers: dict[int, int] = {}
        number = tokens = 0
        for prompt in self.prompts:
            expected = len(prompt.token_ids) + self.count * max_response_tokens
            if numbers and tokens + expected > tokens_of_a_part:
                number, tokens = number + 1, 0
            numbers[prompt.uid] = number
            tokens += expected
        return numbers

    def share(self, max_response_tokens: int, copies: int) -> int:
        """Tokens of a part, where each of so many copies of a model is to have some."""
        return -(-self.expected_tokens(max_response_tokens) // (PARTS_OF_AN_INSTANCE * copies))


def in_parts(parts: Sequence[Part], call: Call, name: str) -> Work[list[Scored]]:
    """Score parts by all copies of the model, each part as soon as it is there, in their order. Several calls may be on
    their way."""
    names = [name] if len(parts) == 1 else [f"{name}/p{number}" for number in range(len(parts))]
    waiting, going = deque(zip(parts, names, strict=True)), deque[tuple[Rows, Work[FloatArray]]]()
    scored: list[Scored] = []
    while waiting or going:
        done = None
        while waiting and (rows := waiting[0][0]()) is not None:
            going.append((rows, call(rows, waiting.popleft()[1], None)))
            done = next(going[-1][1])
        if done is None and going:
            rows, work = going[0]
            try:
                done = next(work)
            except StopIteration as end:
                going.popleft()
                scored.append((rows, end.value))
                done = MOVED_ON
        yield done
    return scored


def where_free(
    parts: Sequence[Part], instances: Sequence[frozenset[int]], task: Task, call: Call, name: str
) -> Work[list[Scored]]:
    """As `in_parts`, each part by one copy of the model, as soon as nobody else keeps the ranks of one busy.

    Which copy scores a part, and when, is the clock's to say; what is scored together is not. Copies without the leader
    are told of a part more than they are at, while there is one for each copy: the leader may be in the middle of an
    action when they have ended the first. For the same reason they are let go when all parts are given out, not when
    they have ended theirs, and before the leader computes its own: they are told of another call's part behind it.

    Args:
        instances: the ranks of each.
        task: of this call; it keeps busy the ranks of the instances that are at work.
    """
    waiting = dict(enumerate(parts))
    going: list[deque[tuple[int, Rows, Work[FloatArray]]]] = [deque() for _ in instances]
    leader_last = sorted(range(len(instances)), key=lambda place: LEADER in instances[place])
    scored: dict[int, Scored] = {}
    while waiting or any(going):
        moved = False
        for had in (0, 1):
            for place in leader_last:
                ranks, leads = instances[place], LEADER in instances[place]
                if len(going[place]) != had or (had and (leads or len(waiting) < len(instances))):
                    continue
                number, rows = _next_part(waiting)
                if rows is not None and (had or task.take(ranks)):
                    del waiting[number]
                    going[place].append((number, rows, call(rows, f"{name}/p{number}", place)))
                    moved = True
                    if not leads:
                        yield next(going[place][-1][2]) or MOVED_ON
        if not waiting:
            task.share([rank for ranks in instances if LEADER not in ranks for rank in ranks])
        for place in leader_last:
            queue = going[place]
            if moved and LEADER in instances[place]:
                break  # others may have to be told of more, before this one computes
            if not queue:
                continue
            number, rows, work = queue[0]
            try:
                done = next(work)
            except StopIteration as end:
                queue.popleft()
                scored[number] = rows, end.value
                if not queue:
                    task.release(instances[place])
                moved = True
                continue
            if done is not None:
                yield done
                moved = True
        yield MOVED_ON if moved else None
    return [scored[number] for number in sorted(scored)]


def _next_part(waiting: Mapping[int, Part]) -> tuple[int, Rows | None]:
    """The first part whose samples are all there, and its rows; None: there is none."""
    for number, part in waiting.items():
        if (rows := part()) is not None:
            return number, rows
    return 0, None
