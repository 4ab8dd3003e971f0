"""How generations end: what instances have to spare, when the last samples are gathered on few of them, and when the
first prompts are done. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from plait.cost.costs import Tail
from plait.cost.decoding import Decoding
from plait.cost.layer_times import Terms, total
from plait.cost.workload import Samples, Workload
from plait.policy.migration import STEPS_OF_A_MOVE
from plait.policy.threshold import Gathered, Rollout, kept_counts, outcomes

SHARES = (16, 4)
"""Parts of a rollout's samples that are unfinished when the last are gathered, as far as it is predicted."""


class Endings:
    """The ends of the generations of a workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def first_s(self, terms: Terms, samples: Samples, shares: Sequence[Sequence[int]], running: int) -> float:
        """When prompts that began first have all their samples: the longest of one prompt's."""
        responses = self._workload.lengths.responses
        longest = responses.of(samples.per_prompt)[-1] / responses.longest
        return total(terms) * longest * min(1.0, running / max(map(len, shares)))

    def tails(
        self, seconds: Sequence[float], shares: Sequence[Sequence[int]], decoding: Decoding, running: int
    ) -> tuple[Tail, ...]:
        """What instances have to spare as they are, and when the last samples are gathered on few of them."""
        if len(seconds) < 2:
            return ()
        end = max(seconds)
        spare = Tail(end, sum(end - instance_s for instance_s in seconds))
        if not self._workload.gathers:
            return (spare,)
        low, slope = self.line(decoding, min(running, max(map(len, shares))))
        step_s = lambda count: low + slope * (count - 1)
        move_s = STEPS_OF_A_MOVE * low * decoding.tokens
        rollout = Rollout(len(shares), step_s, 0.0, self._workload.max_running, move_s)
        # Of an instance with more samples than run at once, as many as are among the last.
        last = [[length - 1 for length in sorted(share)[:: -(-len(share) // running)]] for share in shares]
        count = sum(map(len, last))
        ways = [Gathered(count // part, kept) for part in SHARES for kept in kept_counts(len(shares))[::2]]
        serial, *gathering = outcomes(rollout, last, [Gathered(0), *ways])
        tails = [spare]
        for gathered in dict.fromkeys(gathering):  # fewer may not be enough, so some are the same
            if gathered.migrated_s is not None:
                later, more = gathered.generation_s - serial.generation_s, gathered.free_s - serial.free_s
                tails.append(Tail(end + later, spare.idle_s + more, rollout.migration_s))
        return tuple(tails)

    def line(self, decoding: Decoding, most: int) -> tuple[float, float]:
        """As `Generating.step_line`, by steps of one sample and of so many that have said half of what they may."""
        response_tokens = self._workload.lengths.responses.longest / 2
        low, high = (total(decoding.step(count, count * response_tokens)) / decoding.tokens for count in (1, most))
        return low, (high - low) / max(1, most - 1)
