"""Migration: when few samples are left, gather them on few instances and free the others (RLHFuse, inter-stage fusion).

Near the end of generation a handful of long samples keep every instance half idle. Once at most `threshold` samples
are unfinished, `decide` keeps the instances with the most work left, moves the samples of the others there, and frees
those for scoring. Paper notes B2 and B3. In a run `policy.fusion_gate` says when, and how many are kept, by what it
predicts; or the share of the recipe says when, and the least number is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf

from plait.policy.step import Key


class Transfer(StrEnum):
    """How a sample's keys and values get to the instance that goes on with it."""

    KV = "kv"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A sample that is still growing: `tokens` of context so far (prompt and response), and the bytes of KV cache that
    it needs at its present length with the growth that is expected of it (or tokens, where rooms are counted in them).
    """

    sample: int
    tokens: int
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """An instance, its unfinished samples, and the KV bytes that are free beside theirs."""

    instance: int
    unfinished: tuple[Unfinished, ...]
    kv_bytes_free: float


@dataclass(frozen=True)
class Bounds:
    """What of an instance is bounded: samples at once, tokens of a response, tokens of keys and values."""

    slots: int
    response: int
    kv_tokens: float = inf


@dataclass(frozen=True, slots=True)
class Move:
    sample: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Migration:
    """keep, free: instances; moves: every unfinished sample of a freed instance, in the order in which they are sent.
    None is freed where all instances are needed, or fewer of them lack the KV memory."""

    keep: tuple[int, ...]
    free: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()


def decide(loads: Sequence[InstanceLoad], threshold: int, max_batch: int, kept: int = 1) -> Migration | None:
    """Whether and how to migrate now; None while more than `threshold` samples are unfinished or none is.

    max_batch: samples that an instance takes at most: in a run `sampling.max_running`, however much slower its decode
               steps get by that
    kept:      instances that are kept at least: as many as gain most, as far as that is predicted (`fusion_gate`).
               RLHFuse sets the number by how many samples have steps that are hardly slower than one's (BS_max)

    The number kept is the least from `kept` on that fits `max_batch` and the KV memory; kept are those with the most
    work left, so that the least is moved. The longest samples are placed first, each on the kept instance with the
    fewest samples that has room.
    """
    count = sum(len(load.unfinished) for load in loads)
    if not 0 < count <= threshold:
        return None
    ranked = sorted(loads, key=lambda load: (-len(load.unfinished), -_kv_bytes(load), load.instance))
    least = max(1, kept, ceil(count / max_batch))
    for num_kept in range(least, len(loads)):
        moves = _place(ranked[:num_kept], ranked[num_kept:], max_batch)
        if moves is not None:
            keep = tuple(sorted(load.instance for load in ranked[:num_kept]))
            free = tuple(sorted(load.instance for load in ranked[num_kept:]))
            return Migration(keep, free, moves)
    return Migration(tuple(sorted(load.instance for load in loads)))


def cheaper_transfer(
    sample: Unfinished, setup_s: float, bytes_per_s: float, prefill_s: Callable[[int], float]
) -> Transfer:
    """Send the KV cache if that takes less time than a prefill of the context on the other side (B3).

    prefill_s: seconds of a prefill of so many tokens, with the wait for its turn
    """
    send_s = setup_s + sample.kv_bytes / bytes_per_s
    return Transfer.KV if send_s < prefill_s(sample.tokens) else Transfer.RECOMPUTE


@dataclass(frozen=True)
class HowToMove:
    """recompute: samples whose keys and values are computed again where they go; ahead: the bulk of the others' goes
    ahead while both instances go on, and they stand still for the rest alone"""

    recompute: frozenset[Key] = frozenset()
    ahead: bool = False


AT_ONCE = HowToMove()
STEPS_OF_A_MOVE = 2
"""Decode steps in which samples that move stand still, as far as it is predicted."""
LEAST_AHEAD = 0.5
"""The share of a decode step that keys and values must travel to go ahead: the leader has to speak three more times."""


@dataclass(frozen=True)
class MoveTimes:
    """What moving samples takes, by the cost model.

    setup_s, bytes_per_s: of a message from one instance to another
    token_bytes:          keys and values of a token
    prefill_token_s:      to compute those of a token again, on one instance
    may_go_ahead:         whether messages go beside others of their ranks
    """

    setup_s: float
    bytes_per_s: float
    token_bytes: int
    prefill_token_s: float
    may_go_ahead: bool = True

    def how(self, contexts: Mapping[Key, int], step_s: float) -> HowToMove:
        """How samples move best.

        Args:
            contexts: sample → its tokens so far.
            step_s: of a decode step, for which the source would stand still.
        """
        samples = {key: Unfinished(0, tokens, tokens * self.token_bytes) for key, tokens in contexts.items()}
        prefill_s = lambda tokens: tokens * self.prefill_token_s
        again = frozenset(
            key
            for key, sample in samples.items()
            if cheaper_transfer(sample, self.setup_s, self.bytes_per_s, prefill_s) is Transfer.RECOMPUTE
        )
        sent_bytes = sum(sample.kv_bytes for key, sample in samples.items() if key not in again)
        ahead = self.may_go_ahead and sent_bytes / self.bytes_per_s > LEAST_AHEAD * step_s
        return HowToMove(again, ahead)


def _kv_bytes(load: InstanceLoad) -> float:
    return sum(sample.kv_bytes for sample in load.unfinished)


def _place(kept: Sequence[InstanceLoad], freed: Sequence[InstanceLoad], max_batch: int) -> tuple[Move, ...] | None:
    """Where each sample of the freed instances goes, or None when they do not fit."""
    batch = {load.instance: len(load.unfinished) for load in kept}
    room = {load.instance: load.kv_bytes_free for load in kept}
    if any(size > max_batch for size in batch.values()):
        return None
    homeless = [(sample, load.instance) for load in freed for sample in load.unfinished]
    moves = []
    for sample, source in sorted(homeless, key=lambda pair: (-pair[0].tokens, pair[0].sample)):
        open_to = [i for i in batch if batch[i] < max_batch and room[i] >= sample.kv_bytes]
        if not open_to:
            return None
        target = min(open_to, key=lambda i: (batch[i], -room[i], i))
        batch[target] += 1
        room[target] -= sample.kv_bytes
        moves.append(Move(sample.sample, source, target))
    return tuple(moves)
