"""The texts that drafts are taken from: prompts, their samples under way, and those of earlier rollouts.

All stand in one index (`kernels.draft_lookup`) in which contexts of different prompts do not meet. It grows as it
fills, up to a budget of bytes; then prompts that nobody has asked for the longest are dropped, and of those in use
what was said earlier. When even that is too much, samples are not recorded any further, and nothing is drafted for
them."""

from __future__ import annotations

from dataclasses import dataclass

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
DROPPING_BYTES = 8 + 8 + 8 + 4 + 1
"""Bytes of a text while some are dropped: its length, its place in the order of prompts, the hash there, its new
number, whether it is kept. While arrays grow, one after another, it is less."""
PROMPT_BYTES = 512
"""What Python takes for a prompt at most: its record, its numbers, its place in a dictionary that has just grown."""
ENTRIES_PER_TEXT, ENTRIES_PER_PROMPT = 8, 64
"""Room for entries that each text and each prompt takes, also if it has fewer."""
NONE = -1
MIN_ENTRIES = 1 << 10
"""Entries of a new pool."""


@dataclass(slots=True)
class _Prompt:
    """A prompt that the index has. Its tokens are there one after another; its samples' texts have the same root."""

    root: int
    end: int
    """Its last entry."""
    num_tokens: int
    num_running: int = 0


class Texts:
    """The arrays of the index, for so many entries."""

    def __init__(self, num_entries: int) -> None:
        num_texts = num_entries // ENTRIES_PER_TEXT
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
        """As the look-up takes them: four of [N], then [2, N] and [2, H]."""
        return self.tokens_N, self.before_N, self.probs_N, self.owners_N, self.chains_2N, self.heads_2H

    def grow(self, used: int) -> None:
        """To twice the size, one array after another: no two of them stand beside what they were."""
        size = 2 * len(self.tokens_N)
        self.chains_2N = self.heads_2H = np.zeros((2, 0), np.int32)
        for name in ("tokens_N", "before_N", "probs_N", "owners_N", "roots_O", "kinds_O"):
            longer = np.zeros(2 * len(getattr(self, name)), getattr(self, name).dtype)
            longer[: len(longer) // 2] = getattr(self, name)
            setattr(self, name, longer)
        self.chains_2N = np.full((2, size), NONE, np.int32)
        self.heads_2H = np.full((2, 2 * size), NONE, np.int32)
        self.index_again(used)

    def index_again(self, used: int) -> None:
        """Chains of the first so many entries."""
        self.heads_2H.fill(NONE)
        draft_lookup.index_again(
            used, self.roots_O, self.tokens_N, self.before_N, self.owners_N, self.chains_2N, self.heads_2H
        )


class TextPool:
    """Texts by number, of prompts by their token ids.

    Args:
        budget_bytes: that it takes at most, also while it grows or drops texts; beside some 200 bytes for each sample
            under way.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.texts = Texts(MIN_ENTRIES)
        self.used = 0
        """Entries."""
        self.num_texts = 0
        self.ends = np.zeros(0, np.int64)
        """Last entry of the text of each slot; NONE: it is not recorded."""
        self.owners = np.zeros(0, np.int64)
        self.roots = np.zeros(0, np.uint64)
        self._prompts: dict[int, _Prompt] = {}
        """By the hash of their tokens; the one that was asked for last stands last."""
        self._of_slot: dict[int, _Prompt] = {}
        self._may_drop = True
        """Whether something may have gone out of use since texts were dropped in vain."""

    @property
    def num_bytes(self) -> int:
        """Without what samples under way take."""
        return self.texts.num_bytes + PROMPT_BYTES * len(self._prompts)

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
            self.roots[slot], self.ends[slot] = prompt.root, prompt.end

    def say(self, slots_B: IntArray, counts_B: IntArray, token_ids_T: IntArray, probs_T: FloatArray) -> None:
        """Further tokens of these samples, so many each, and the probabilities with which they were drawn."""
        if not self._has_room(int(counts_B[self.ends[slots_B] != NONE].sum()), 0):
            self._stop(slots_B)
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
        if prompt is not None and self._has_room(len(token_ids), 1) and self._prompts.get(prompt.root) is prompt:
            self._append(token_ids, probs, self._new_text(prompt.root, EARLIER), prompt.root, prompt.end)

    def end(self, slot: int) -> None:
        """The sample in a slot says nothing more."""
        self._stop(np.array([slot]))
        if (prompt := self._of_slot.pop(slot, None)) is not None:
            prompt.num_running -= 1
            self._may_drop |= prompt.num_running == 0

    def grow_old(self) -> None:
        """What has been said so far counts as said earlier."""
        kinds = self.texts.kinds_O[: self.num_texts]
        kinds[kinds == SIBLING] = EARLIER
        self._may_drop = True

    def _stop(self, slots: IntArray) -> None:
        """Nothing more is recorded of what is said in these slots."""
        recorded = slots[self.ends[slots] != NONE]
        self._may_drop |= bool((self.texts.kinds_O[self.owners[recorded]] == EARLIER).any())
        self.ends[recorded] = NONE

    def _prompt(self, token_ids: tuple[int, ...]) -> _Prompt | None:
        """None where it finds no room, or another prompt has its hash."""
        # A hash of ints is the same in every process.
        root = hash(token_ids) & (2**64 - 1)
        if (kept := self._prompts.pop(root, None)) is not None:
            self._prompts[root] = kept
            known = self.texts.tokens_N[kept.end + 1 - kept.num_tokens : kept.end + 1]
            return kept if np.array_equal(known, token_ids) else None
        if not self._has_room(len(token_ids), 1, 1):
            return None
        text = self._new_text(root, OWN)
        end = self._append(np.array(token_ids, np.int64), np.zeros(len(token_ids)), text, root, NONE)
        self._prompts[root] = prompt = _Prompt(root, end, len(token_ids))
        return prompt

    def _new_text(self, root: int, kind: int) -> int:
        number = self.num_texts
        self.texts.roots_O[number], self.texts.kinds_O[number] = root, kind
        self.num_texts += 1
        self._may_drop |= kind != SIBLING
        return number

    def _append(self, token_ids: IntArray, probs: FloatArray, owner: int, root: int, end: int) -> int:
        end = draft_lookup.append(
            token_ids, probs, np.int64(owner), np.uint64(root), np.int64(end), np.int64(self.used), *self.texts.index
        )
        self.used += len(token_ids)
        return int(end)

    def _has_room(self, num_entries: int, num_texts: int, num_prompts: int = 0) -> bool:
        """Whether so much fits in, after growing or dropping what is least of use."""
        if self._fits(num_entries, num_texts, num_prompts):
            return True
        if _bytes(2 * len(self.texts.tokens_N)) <= self._budget_bytes:
            self.texts.grow(self.used)
            return self._has_room(num_entries, num_texts, num_prompts)
        if self._may_drop:
            self._drop()
        return self._fits(num_entries, num_texts, num_prompts)

    def _fits(self, num_entries: int, num_texts: int, num_prompts: int) -> bool:
        room = len(self.texts.tokens_N)
        return (
            self.used + num_entries <= room
            and self.num_texts + num_texts <= room // ENTRIES_PER_TEXT
            and len(self._prompts) + num_prompts <= room // ENTRIES_PER_PROMPT
        )

    def _drop(self) -> None:
        """Drop texts until half of the room is free, or all that are left are in use. Nothing is indexed again where
        all are."""
        texts, half, count = self.texts, len(self.texts.tokens_N) // 2, self.num_texts
        lengths_O = np.zeros(count, np.int64)
        draft_lookup.count_entries(self.used, texts.owners_N, lengths_O)
        order_O = np.argsort(texts.roots_O[:count])
        roots_O = texts.roots_O[order_O]
        live = np.unique(self.owners[self.ends != NONE])
        kept_O, left, left_texts, is_vain = np.ones(count, bool), self.used, count, True
        for root, prompt in list(self._prompts.items()):
            if (
                left <= half
                and left_texts <= half // ENTRIES_PER_TEXT
                and len(self._prompts) <= half // ENTRIES_PER_PROMPT
            ):
                is_vain = False
                break
            first, stop = np.searchsorted(roots_O, np.uint64(root)), np.searchsorted(roots_O, np.uint64(root), "right")
            numbers = order_O[first:stop]
            if prompt.num_running == 0:
                del self._prompts[root]
            else:
                numbers = numbers[texts.kinds_O[numbers] == EARLIER]
                numbers = numbers[~np.isin(numbers, live)]
            kept_O[numbers] = False
            left, left_texts = left - int(lengths_O[numbers].sum()), left_texts - len(numbers)
        del lengths_O, order_O, roots_O
        if kept_O.all():
            self._may_drop = not is_vain
        else:
            self._keep(kept_O)

    def _keep(self, kept_O: NDArray[np.bool_]) -> None:
        """Only these texts; they move to the front, and numbers of texts and entries follow."""
        texts, count = self.texts, len(kept_O)
        numbers_O = np.cumsum(kept_O, dtype=np.int32)
        numbers_O -= 1
        places_N = texts.chains_2N[0]  # which are made again
        self.used = int(
            draft_lookup.keep(
                self.used, kept_O, numbers_O, texts.tokens_N, texts.before_N, texts.probs_N, texts.owners_N, places_N
            )
        )
        for prompt in self._prompts.values():
            prompt.end = int(places_N[prompt.end])
        live = self.ends != NONE
        self.ends[live], self.owners[live] = places_N[self.ends[live]], numbers_O[self.owners[live]]
        self.num_texts = int(kept_O.sum())
        texts.roots_O[: self.num_texts] = texts.roots_O[:count][kept_O]
        texts.kinds_O[: self.num_texts] = texts.kinds_O[:count][kept_O]
        texts.index_again(self.used)


def _bytes(num_entries: int) -> int:
    """What a pool of so many entries takes at most."""
    texts, prompts = num_entries // ENTRIES_PER_TEXT, num_entries // ENTRIES_PER_PROMPT
    return num_entries * ENTRY_BYTES + texts * (TEXT_BYTES + DROPPING_BYTES) + prompts * PROMPT_BYTES


def least_bytes() -> int:
    """Budget of the smallest pool."""
    return _bytes(MIN_ENTRIES)


def most_entries(budget_bytes: int) -> int:
    """Tokens that a pool has room for within a budget."""
    size = MIN_ENTRIES
    while _bytes(2 * size) <= budget_bytes:
        size *= 2
    return size
