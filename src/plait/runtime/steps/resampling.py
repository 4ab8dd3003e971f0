"""Dynamic sampling: the groups of a batch, drawn in rounds until enough are worth training on (`Resample`).

A round begins when the rewards of the one before are there, and has as many groups as are likely to yield those that
are missing (`next_round`), which follows from rewards alone. Where rollouts halt with the step, a batch may be in any
of its rounds then, or wait for rewards; it goes on from there in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol, TypeVar

import numpy as np

from plait.data.records import Prompt, Sample
from plait.data.rows import FloatArray
from plait.dataflow import Node, Resample
from plait.errors import RunError
from plait.observe.progress import ProgressSink
from plait.runtime.steps.step import StepState
from plait.schedule.work import Work
from plait.user_code import CALL_LIMIT_S, UserCode, is_users, title_of
from plait.user_draws import drawing

Groups = list[list[Sample]]
Result = TypeVar("Result")


class Judges(Protocol):
    """Gives the rewards of groups: `rewarding.RewardCalls`."""

    def rewards_of(
        self, rollout: Node, role: str, groups: Sequence[Sequence[Sample]], state: StepState
    ) -> Work[list[FloatArray]]: ...


@dataclass(frozen=True)
class Rounds:
    """How a batch draws in the step under way."""

    draws: Callable[[str, Sequence[Prompt]], Work[None]]
    """Draws the samples that the batch lacks, as far as they come in this step; a round has a name and prompts."""
    more: Callable[[int], Sequence[Prompt] | None]
    """Asked for so many: the prompts of the next round, as many unless it is on record; None: it begins in a later
    step."""
    stands: Callable[[], bool]
    """Whether the batch is not to be drawn any further in this step."""


class Resampling:
    """See the top of the file.

    Args:
        seed: of the run; what a function of the user's draws to keep a group follows from it.
    """

    def __init__(self, rewarding: Judges, progress: ProgressSink, seed: int) -> None:
        self._rewarding, self._progress, self._seed = rewarding, progress, seed

    def work(self, node: Node, state: StepState, rounds: Rounds) -> Work[tuple[Groups, Groups] | None]:
        """(groups that stay, all groups drawn), of the rollout that grows in `state`; None: a later step goes on.

        Raises:
            RunError: no group stays.
        """
        resample, growing, num_wanted = node.generation.resample, state.growing[node.id], len(state.prompts)
        assert resample is not None, f"{node.call} draws once"
        kept: Groups = []
        drawn: Groups = []
        num_judged = 0
        while True:
            number = len(growing.rounds)
            name = node.call if number == 1 else f"{node.call}/r{number}"
            yield from rounds.draws(name, growing.rounds[-1])
            if growing.num_finished < growing.num_asked:
                return None
            for prompts in growing.rounds[num_judged:]:  # of earlier rounds, too, if the batch was halted since
                groups = [growing.groups[prompt.uid] for prompt in prompts]
                rewarding = self._rewarding.rewards_of(node, resample.reward, groups, state)
                rewards = yield from _unless(rounds.stands, rewarding)
                if rewards is None:
                    return None
                noise = f"{self._seed} {state.step} {node.call}"
                for group, scores in zip(groups, rewards, strict=True):
                    if _stays(resample, scores, f"{noise} {group[0].prompt.uid}"):
                        kept.append(group)
                drawn += groups
            num_judged = number
            size = next_round(num_wanted, len(kept), len(drawn), resample.max_rounds)
            if size == 0 or number >= resample.max_rounds:
                break
            further = rounds.more(size)
            if further is None:
                return None
            growing.extend(further)
        state.count("dynamic/rounds", number)
        state.count("dynamic/groups_drawn", len(drawn))
        state.count("dynamic/groups_refused", len(drawn) - len(kept))
        self._check_enough(node, state, len(kept), len(drawn), number)
        return kept[:num_wanted], drawn

    def _check_enough(self, node: Node, state: StepState, num_kept: int, num_drawn: int, number: int) -> None:
        """Say where fewer groups stay than the batch wants. Raises RunError: none does."""
        resample, num_wanted = node.generation.resample, len(state.prompts)
        assert resample is not None, f"{node.call} draws once"
        if num_kept == 0:
            why, more = "the rewards of each group are all alike", "options.max_sampling_rounds"
            if is_users(resample.keep):
                why, more = f"`{title_of(resample.keep)}` refuses the rewards of each", "max_rounds` of its `Resample"
            raise RunError(
                f"step {state.step + 1}: {node.call} drew {num_drawn} groups in {number} rounds and kept none; {why}: "
                f"take easier or harder prompts, more `samples_per_prompt`, or raise the number of rounds (`{more}`)"
            )
        if num_kept < num_wanted:
            self._progress.message(
                f"step {state.step + 1}: {num_kept} of {num_wanted} groups are worth training on after {number} rounds"
            )


def next_round(wanted: int, kept: int, drawn: int, max_rounds: int) -> int:
    """Groups of the next round: as many as are likely to yield those that are missing, ⌈missing / rate⌉ with the share
    of groups that stayed so far, (kept + 1) / (drawn + 1). One more of each is counted, so that there is a rate where
    none has stayed.

    Never more than were drawn before, as a rate of few groups is a rough one; and in all at most `max_rounds` times
    what is wanted.

    Args:
        wanted: groups that the batch is to have.
        kept: those that stay, of `drawn`.

    Returns:
        0 where the batch has enough, or has drawn all that it may.
    """
    missing = max(0, wanted - kept)
    return min(ceil(missing * (drawn + 1) / (kept + 1)), drawn, max(0, max_rounds * wanted - drawn))


def _unless(stands: Callable[[], bool], work: Work[Result]) -> Work[Result | None]:
    """The result of a work; None: the batch stands before the result is there."""
    while True:
        try:
            done = next(work)
        except StopIteration as end:
            return end.value
        if stands():
            return None
        yield done


def _stays(resample: Resample, rewards: FloatArray, noise: str) -> bool:
    """Whether a group with these rewards is kept; what is drawn to decide it is a function of `noise`.

    Raises:
        RunError: the user's `keep` raised, or returned no bool.
    """
    scored = rewards[np.isfinite(rewards)]
    if len(scored) == 0:
        return False
    what = f"the function `{title_of(resample.keep)}` of Resample(keep=…)"
    with UserCode(what, RunError, users=is_users(resample.keep), limit_s=CALL_LIMIT_S), drawing(noise):
        stays = resample.keep(scored)
    if not isinstance(stays, bool | np.bool_):
        raise RunError(f"{what}: expected True or False, found {type(stays).__name__} {stays!r:.80}")
    return bool(stays)
