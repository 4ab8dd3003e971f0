"""What an engine has in flight: prompts with samples that have not started, and samples that have.

Shapes: R rows of logits that are read, D tokens that are drawn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from plait.generation.decode_batch import Drafts
from plait.generation.ragged import NewTokens
from plait.generation.response import PendingPrompt, Response
from plait.policy.step import Chunk, Key, Start, StepPlan


@dataclass(frozen=True)
class Drawn:
    """The result of a step's draws."""

    ended: dict[Key, Response]
    """Samples that ended in the step."""
    num_tokens: int
    """Tokens that all samples got."""
    begun: list[Key]
    """Samples that had no row before, and have not ended."""
    num_wrong: dict[Key, int]
    """Sample → how many of its drafted tokens do not count."""
    num_accepted: int = 0
    """How many of the tokens had been drafted."""


class InFlight:
    """Requests and samples by their keys, in the order in which they came.

    Args:
        eos_token_ids: of the model; they end samples whose request names none.
        policy_version: of the weights that give tokens from now on.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], policy_version: int) -> None:
        self._eos_token_ids = eos_token_ids
        self.policy_version = policy_version
        self.pending: dict[int, PendingPrompt] = {}
        """Uid of a prompt with samples that have not started → the prompt."""
        self.started: dict[Key, Response] = {}

    @property
    def uids(self) -> tuple[int, ...]:
        """Prompts that have samples in flight; first those of samples that have started."""
        return tuple(dict.fromkeys((*(uid for uid, _ in self.started), *self.pending)))

    def longest_left(self) -> int:
        """The most tokens that any response may still get."""
        limits = [limit for pending in self.pending.values() for limit in pending.limits]
        return max([*limits, *(response.num_left for response in self.started.values())])

    def shortened(self, drafts: Drafts) -> Drafts:
        """The drafts, cut to the limits of their samples: a sample draws one token more than is drafted."""
        return {key: drafts[key][: response.num_left - 1] for key, response in self.started.items() if key in drafts}

    def chunk(self, chunk: Chunk) -> NewTokens:
        """The tokens of a chunk: of a prompt, or of a sample that is computed again."""
        if chunk.index is None:
            token_ids: Sequence[int] = self.pending[chunk.uid].request.prompt.token_ids
        else:
            token_ids = self.started[chunk.uid, chunk.index].tokens
        return NewTokens(token_ids[chunk.start : chunk.stop], chunk.start, chunk.table)

    def is_computed(self, uid: int, logits_V: Tensor) -> None:
        """A prompt is computed, so its samples can start; the logits [V] are those of its last token."""
        pending = self.pending[uid]
        pending.logits_V, pending.logits_version = logits_V, self.policy_version

    def begin(self, starts: Sequence[Start]) -> list[Tensor]:
        """Begin samples; for each start, the logits [samples, V] that they draw their first token from."""
        parts = []
        for start in starts:
            pending = self.pending[start.uid]
            assert pending.logits_V is not None, "a prompt that starts samples has been computed"
            parts.append(pending.logits_V.expand(len(start.indices), -1))
            versions = (pending.logits_version, self.policy_version)
            for index in start.indices:
                begun = Response.begun(pending, index, self._eos_token_ids, versions)
                self.started[begun.key] = begun
            if not self._one_less(start.uid, len(start.indices)):
                pending.logits_V = pending.logits_V.clone()  # lets go of the batch that it is a row of
        return parts

    def drawn_logits(self, plan: StepPlan, logits_RV: Tensor | None) -> Tensor | None:
        """The logits [D, V] that samples draw from, in the order of `plan.drawn`, out of those [R, V] that the step has
        computed. Logits of a prompt are kept until all its samples have started."""
        if not (plan.chunks or plan.starts):
            return logits_RV
        num_rows = sum(plan.num_new)
        parts = [] if logits_RV is None else [logits_RV[:num_rows]]
        completing = [chunk for chunk in plan.chunks if chunk.completes]
        for i, chunk in enumerate(completing, num_rows):
            assert logits_RV is not None, "a chunk that completes a sequence is read"
            if chunk.index is None:
                self.is_computed(chunk.uid, logits_RV[i])
            else:
                parts.append(logits_RV[i : i + 1])
        parts = [part for part in (*parts, *self.begin(plan.starts)) if len(part)]
        return torch.cat(parts) if parts else None

    def take_out(self, uids: Iterable[int], index: int | None, waiting: Iterable[Key]) -> list[Response]:
        """Take out the samples of these prompts, prompt by prompt, or only those of this index; `waiting` has all
        samples outside the batch."""
        keys: dict[int, list[Key]] = {uid: [] for uid in uids}
        for key in (*self.started, *(key for key in waiting if key not in self.started)):
            if key[0] in keys and index in (None, key[1]):
                keys[key[0]].append(key)
        out = []
        for key in chain.from_iterable(keys.values()):
            response = self.started.pop(key, None)
            if response is None:
                versions = (self.policy_version, self.policy_version)
                response = Response.begun(self.pending[key[0]], key[1], (), versions)
                self._one_less(key[0], 1)
            out.append(response)
        return out

    def new_version(self, version: int) -> None:
        """Stamp later tokens with the version of the new weights."""
        self.policy_version = version
        for response in self.started.values():
            response.new_version(version)

    def forget_logits(self) -> None:
        """Drop the logits of prompts, which are to be computed again."""
        for pending in self.pending.values():
            pending.logits_V = None

    def _one_less(self, uid: int, count: int) -> bool:
        """Count samples of a prompt that have started or left; whether they were the last."""
        pending = self.pending[uid]
        pending.num_pending -= count
        if pending.num_pending == 0:
            del self.pending[uid]
        return pending.num_pending == 0
