"""What an engine has in flight: prompts with samples that have not started, and samples that have.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from plait.generation.ragged import NewTokens
from plait.generation.response import PendingPrompt, Response
from plait.policy.step import Chunk, Key, Start


class InFlight:
    """Requests and samples by their keys, in the order in which they came.

    Args:
        eos_token_ids: of the model; they end samples whose request names none.
    """

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self.asked: dict[int, PendingPrompt] = {}
        """By prompt uid, while samples of it have to start."""
        self.started: dict[Key, Response] = {}

    def longest_left(self) -> int:
        """Tokens that a response may still have."""
        limits = [limit for asked in self.asked.values() for limit in asked.limits]
        return max([*limits, *(said.limit - len(said.token_ids) for said in self.started.values())])

    def chunk(self, chunk: Chunk) -> NewTokens:
        """The tokens of a chunk: of a prompt, or of a sample that is computed again."""
        if chunk.index is None:
            token_ids: Sequence[int] = self.asked[chunk.uid].request.prompt.token_ids
        else:
            token_ids = self.started[chunk.uid, chunk.index].tokens
        return NewTokens(token_ids[chunk.start : chunk.stop], chunk.start, chunk.table)

    def newest(self, key: Key, table: Sequence[int]) -> NewTokens:
        """The newest token of a sample that runs."""
        said = self.started[key]
        return NewTokens(said.token_ids[-1:], len(said.tokens) - 1, table)

    def begin(self, starts: Sequence[Start], policy_version: int) -> list[Tensor]:
        """Samples begin with the logits [number, V] of their prompt's last token, which are given back."""
        parts = []
        for start in starts:
            asked = self.asked[start.uid]
            assert asked.logits_V is not None, "a prompt that starts samples has been computed"
            parts.append(asked.logits_V.expand(len(start.indices), -1))
            versions = (asked.logits_version, policy_version)
            for index in start.indices:
                begun = Response.begun(asked, index, self._eos_token_ids, versions)
                self.started[begun.key] = begun
            if not self._one_less(start.uid, len(start.indices)):
                asked.logits_V = asked.logits_V.clone()  # lets go of the batch that it is a row of
        return parts

    def take_out(self, uid: int, index: int | None, waiting: Iterable[Key], policy_version: int) -> list[Response]:
        """A prompt's samples, or one of them, leave; `waiting` are those of all prompts that have not started."""
        keys = [key for key in (*self.started, *waiting) if key[0] == uid and index in (None, key[1])]
        out = []
        for key in keys:
            said = self.started.pop(key, None)
            if said is None:
                said = Response.begun(self.asked[uid], key[1], (), (policy_version, policy_version))
                self._one_less(uid, 1)
            out.append(said)
        return out

    def forget_logits(self) -> None:
        """Those of prompts have to be computed again."""
        for asked in self.asked.values():
            asked.logits_V = None

    def _one_less(self, uid: int, count: int) -> bool:
        """So many samples have no start ahead of them any more; whether they were the last of the prompt."""
        asked = self.asked[uid]
        asked.num_pending -= count
        if asked.num_pending == 0:
            del self.asked[uid]
        return asked.num_pending == 0
