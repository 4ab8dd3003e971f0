"""The texts that guesses are taken from: prompts, their samples under way, and those of earlier rollouts.

All stand in one index (`kernels.draft_lookup`) in which contexts of different prompts do not meet. It grows as it
fills, up to a budget of bytes; then prompts that nobody has asked for the longest are dropped, and of those in use
what was said earlier. When even that is too much, samples are not recorded any further, and nothing is guessed for
them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plait.kernels import draft_lookup
from plait.kernels.draft_lookup import EARLIER, OWN, SIBLING

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

ENTRY_BYTES = 4 + 4 + 4 + 4 + 2 * 4 + 2 * 2 * 4
"""Bytes of an entry: token, the one before, probability, text, chains, and two heads of each kind."""
TEXT_BYTES = 8 + 1
"""Bytes of a text: hash of its prompt, kind."""
NONE = -1
MIN_ENTRIES = 1 << 10
"""Entries of a new pool."""


@dataclass(slots=True)
class _Prompt:
    """A prompt, and the texts that go on from it."""

    token_ids: tuple[int, ...]
    root: int
    text: int
    """Number of its own text."""
    end: int
    """Its last entry; NONE where it found no room."""
    num_running: int = 0
    responses: list[int] = field(default_factory=list)
    """Texts of its samples."""


class Texts:
    """The arrays of the index, for so many entries and texts."""

    def __init__(self, num_entries: int, num_texts: int) -> None:
        self.tokens_N = np.zeros(num_entries, np.int32)
        self.before_N = np.zeros(num_entries, np.int32)
        self.probs_N = np.zeros(num_entries, np.float32)
        self.owners_N = np.zeros(num_entries, np.int32)
        self.chains_2N = np.full((2, num_entries), NONE, np.int32)
        self.heads_2H = np.full((2, 2 * num_entries), NONE, np.int32)
        self.roots_O = np.zeros(num_texts, np.uint64)
        self.kinds_O = np.zeros(num_texts, np.int8)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values())

    @property
    def index(self) -> tuple[NDArray, ...]:
        """As the look-up takes them."""
        return self.tokens_N, self.before_N, self.probs_N, self.owners_N, self.chains_2N, self.heads_2H


class TextPool:
    """Texts by number, of prompts by their token ids.

    Args:
        budget_bytes: that its arrays take at most.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.texts = Texts(*_sizes(MIN_ENTRIES))
        self.used = 0
        """Entries."""
        self.num_texts = 0
        self.ends = np.zeros(0, np.int64)
        """Last entry of the text of each slot; NONE: it is not recorded."""
        self.owners = np.zeros(0, np.int64)
        self.roots = np.zeros(0, np.uint64)
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        """The one that was asked for last stands last."""
        self._of_slot: dict[int, _Prompt] = {}

    @property
    def num_bytes(self) -> int:
        return self.texts.num_bytes

    def begin(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """A sample of a prompt begins in a slot: nothing is said yet."""
        while slot >= len(self.ends):
            more = max(16, len(self.ends))
            self.ends = np.concatenate([self.ends, np.full(more, NONE, np.int64)])
            self.owners = np.concatenate([self.owners, np.zeros(more, np.int64)])
            self.roots = np.concatenate([self.roots, np.zeros(more, np.uint64)])
        self.ends[slot] = NONE
        prompt = self._prompt(prompt_ids)
        if prompt is None:
            return
        prompt.num_running += 1  # first: nothing in use is dropped for what comes next
        self._of_slot[slot] = prompt
        if self._has_room(0, 1):
            self.owners[slot] = self._new_text(prompt.root, SIBLING)
            prompt.responses.append(int(self.owners[slot]))
            self.roots[slot], self.ends[slot] = prompt.root, prompt.end

    def say(self, slots_B: IntArray, counts_B: IntArray, token_ids_T: IntArray, probs_T: FloatArray) -> None:
        """Further tokens of these samples, so many each, and the probabilities with which they were drawn."""
        if not self._has_room(len(token_ids_T), 0):
            self.ends[slots_B] = NONE
            return
        self.used = int(
            draft_lookup.append_all(
                slots_B,
                counts_B,
                token_ids_T,
                probs_T,
                np.int64(self.used),
                self.ends,
                self.owners,
                self.roots,
                *self.texts.index,
            )
        )

    def record(self, prompt_ids: tuple[int, ...], token_ids: IntArray, probs: FloatArray) -> None:
        """A sample that was drawn earlier, whole."""
        prompt = self._prompt(prompt_ids)
        if prompt is None or not self._has_room(len(token_ids), 1) or prompt_ids not in self._prompts:
            return
        prompt.responses.append(text := self._new_text(prompt.root, EARLIER))
        self._append(token_ids, probs, text, prompt.root, prompt.end)

    def end(self, slot: int) -> None:
        """The sample in a slot says nothing more."""
        self.ends[slot] = NONE
        if (prompt := self._of_slot.pop(slot, None)) is not None:
            prompt.num_running -= 1

    def grow_old(self) -> None:
        """What has been said so far counts as said earlier."""
        kinds = self.texts.kinds_O[: self.num_texts]
        kinds[kinds == SIBLING] = EARLIER

    def _prompt(self, token_ids: tuple[int, ...]) -> _Prompt | None:
        """None where it finds no room."""
        if (kept := self._prompts.pop(token_ids, None)) is not None:
            self._prompts[token_ids] = kept
            return kept
        if not self._has_room(len(token_ids), 1):
            return None
        # A hash of ints is the same in every process.
        root = hash(token_ids) & (2**64 - 1)
        text = self._new_text(root, OWN)
        end = self._append(np.array(token_ids, np.int64), np.zeros(len(token_ids)), text, root, NONE)
        self._prompts[token_ids] = prompt = _Prompt(token_ids, root, text, end)
        return prompt

    def _new_text(self, root: int, kind: int) -> int:
        number = self.num_texts
        self.texts.roots_O[number], self.texts.kinds_O[number] = root, kind
        self.num_texts += 1
        return number

    def _append(self, token_ids: IntArray, probs: FloatArray, owner: int, root: int, end: int) -> int:
        end = draft_lookup.append(
            token_ids, probs, np.int64(owner), np.uint64(root), np.int64(end), np.int64(self.used), *self.texts.index
        )
        self.used += len(token_ids)
        return int(end)

    def _has_room(self, num_entries: int, num_texts: int) -> bool:
        """Whether so much fits in, after growing or dropping what is least of use."""
        if self._fits(num_entries, num_texts):
            return True
        size = len(self.texts.tokens_N)
        if sum(_bytes(*_sizes(2 * size))) <= self._budget_bytes:
            self._keep(np.ones(self.num_texts, bool), 2 * size)
            return self._has_room(num_entries, num_texts)
        self._drop(size // 2)
        return self._fits(num_entries, num_texts)

    def _fits(self, num_entries: int, num_texts: int) -> bool:
        entries, texts = len(self.texts.tokens_N), len(self.texts.kinds_O)
        return self.used + num_entries <= entries and self.num_texts + num_texts <= texts

    def _drop(self, most: int) -> None:
        """Drop texts until no more than so many entries are left, or all that are left are in use."""
        lengths = np.bincount(self.texts.owners_N[: self.used], minlength=self.num_texts)
        kept = np.ones(self.num_texts, bool)
        left = self.used
        for key, prompt in list(self._prompts.items()):
            if left <= most:
                break
            if prompt.num_running == 0:
                numbers = [prompt.text, *prompt.responses]
                del self._prompts[key]
            else:
                numbers = [number for number in prompt.responses if self.texts.kinds_O[number] == EARLIER]
                numbers = [number for number in numbers if number not in set(self.owners[self.ends != NONE].tolist())]
            kept[numbers] = False
            left -= int(lengths[numbers].sum())
        self._keep(kept, len(self.texts.tokens_N))

    def _keep(self, kept_O: NDArray[np.bool_], num_entries: int) -> None:
        """Only these texts, in arrays of so many entries; numbers of texts and entries follow."""
        old, used = self.texts, self.used
        kept_N = kept_O[old.owners_N[:used]]
        places_N, numbers_O = np.cumsum(kept_N) - 1, np.cumsum(kept_O) - 1
        new = Texts(*_sizes(num_entries))
        self.used, self.num_texts = int(kept_N.sum()), int(kept_O.sum())
        before = old.before_N[:used][kept_N]
        new.before_N[: self.used] = np.where(before == NONE, NONE, places_N[before])
        new.tokens_N[: self.used], new.probs_N[: self.used] = old.tokens_N[:used][kept_N], old.probs_N[:used][kept_N]
        new.owners_N[: self.used] = numbers_O[old.owners_N[:used][kept_N]]
        new.roots_O[: self.num_texts] = old.roots_O[: len(kept_O)][kept_O]
        new.kinds_O[: self.num_texts] = old.kinds_O[: len(kept_O)][kept_O]
        self.texts = new
        for prompt in self._prompts.values():
            prompt.text, prompt.end = int(numbers_O[prompt.text]), int(places_N[prompt.end])
            prompt.responses = [int(numbers_O[number]) for number in prompt.responses if kept_O[number]]
        live = self.ends != NONE
        self.ends[live], self.owners[live] = places_N[self.ends[live]], numbers_O[self.owners[live]]
        draft_lookup.index_again(
            self.used, new.roots_O, new.tokens_N, new.before_N, new.owners_N, new.chains_2N, new.heads_2H
        )


def _sizes(num_entries: int) -> tuple[int, int]:
    """Entries and texts of arrays; a text of fewer than eight tokens takes the room of eight."""
    return num_entries, num_entries // 8


def _bytes(num_entries: int, num_texts: int) -> tuple[int, int]:
    return num_entries * ENTRY_BYTES, num_texts * TEXT_BYTES


def least_bytes() -> int:
    """Budget of the smallest pool."""
    return sum(_bytes(*_sizes(MIN_ENTRIES)))
