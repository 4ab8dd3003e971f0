"""The pool of known texts: what it finds, by hand; and that it keeps to its budget, whatever is said."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.draft_lookup import CELLS
from plait.speculation import pool as pool_module
from plait.speculation.drafter import Asked, PoolDrafter
from plait.speculation.pool import least_bytes, most_entries
from tests.kernels.plain_noise import draw_key_of, gumbel_of

SURE = np.ones(int(np.prod(CELLS)))
PROMPT = (40, 41, 42, 43, 44)
FRAMES = 16_000
"""Bytes of what Python has beside: calls, the tokens of the moment."""


def asked(slot: int = 0, *, place: int, key: int = 0, greedy: bool = True, limit: int = 15) -> Asked:
    arrays = (np.array([slot]), np.array([key], np.uint64), np.array([place]), np.array([greedy]), np.array([limit]))
    return Asked(*arrays, ())


def drafted(pool: PoolDrafter, one: Asked, most: int = 4) -> list[int]:
    found = pool.propose(one, most, SURE, 0.0)
    return found.token_ids_BK[0, : found.lengths_B[0]].tolist()


def say(pool: PoolDrafter, slot: int, *token_ids: int, prob: float = 0.5) -> None:
    count = len(token_ids)
    pool.say(np.array([slot]), np.array([count]), np.array(token_ids, np.int64), np.full(count, prob))


def test_a_sibling_says_it_first() -> None:
    pool = PoolDrafter(1 << 20)
    pool.begin(0, PROMPT)
    pool.begin(1, PROMPT)
    say(pool, 0, 1, 2, 3, 4)
    say(pool, 1, 1)
    assert drafted(pool, asked(1, place=1)) == [2, 3, 4]
    say(pool, 1, 9)
    assert drafted(pool, asked(1, place=2)) == [], "nobody has said (1, 9)"


def test_the_prompt_and_ones_own_words_are_known() -> None:
    pool = PoolDrafter(1 << 20)
    pool.begin(0, PROMPT)
    say(pool, 0, 41, 42)
    assert drafted(pool, asked(place=2)) == [43, 44, 41, 42], "the prompt, and what followed it"


def test_texts_of_other_prompts_are_not_drafted() -> None:
    pool = PoolDrafter(1 << 20)
    pool.begin(0, PROMPT)
    say(pool, 0, 1, 2, 3)
    pool.begin(1, (50, 51, 52))
    say(pool, 1, 1, 2)
    assert drafted(pool, asked(1, place=2)) == []


def test_what_a_longer_context_says_counts_more() -> None:
    """Twice (…, 2, 3) went on with 8, once with 9 but after the same four tokens."""
    pool = PoolDrafter(1 << 20)
    for slot, said in enumerate([(5, 2, 3, 8), (6, 2, 3, 8), (7, 1, 2, 3, 9), (7, 1, 2, 3)]):
        pool.begin(slot, PROMPT)
        say(pool, slot, *said)
    assert drafted(pool, asked(3, place=4), 1) == [9]


@pytest.mark.parametrize("key", range(8))
def test_the_noise_of_the_draw_chooses_among_what_is_as_likely(key: int) -> None:
    pool = PoolDrafter(1 << 20)
    for slot, token in enumerate((7, 8, 9)):
        pool.begin(slot, PROMPT)
        say(pool, slot, 1, token, prob=0.3)
    pool.begin(3, PROMPT)
    say(pool, 3, 1)
    noise = {token: gumbel_of(draw_key_of(key, 1), token) for token in (7, 8, 9)}
    assert drafted(pool, asked(3, place=1, key=key, greedy=False), 1) == [max(noise, key=noise.__getitem__)]


def test_a_draft_ends_at_its_limit_and_where_it_is_not_worth_while() -> None:
    pool = PoolDrafter(1 << 20)
    pool.begin(0, PROMPT)
    pool.begin(1, PROMPT)
    say(pool, 0, *range(1, 9))
    say(pool, 1, 1)
    assert drafted(pool, asked(1, place=1, limit=2)) == [2, 3]
    half = pool.propose(asked(1, place=1), 6, np.full(len(SURE), 0.5), 0.2)
    assert half.lengths_B.tolist() == [2]
    assert half.survival_BK[0].tolist() == [0.5, 0.25, 0, 0, 0, 0]


def test_a_whole_sample_is_recorded() -> None:
    pool = PoolDrafter(1 << 20)
    pool.record(PROMPT, np.array([1, 2, 3]), np.full(3, 0.5))
    pool.begin(0, PROMPT)
    say(pool, 0, 1)
    assert drafted(pool, asked(place=1)) == [2, 3]


def test_what_was_asked_for_the_longest_ago_goes_first() -> None:
    pool = PoolDrafter(least_bytes())
    for start in range(0, 1400, 100):
        pool.record((start, start + 1), np.arange(start + 2, start + 100), np.full(98, 0.5))
    for start, known in ((0, False), (1300, True)):
        pool.begin(0, (start, start + 1))
        say(pool, 0, start + 2)
        assert (drafted(pool, asked(place=1)) != []) == known
        pool.end(0)
    assert pool.num_bytes <= least_bytes()


def test_a_pool_that_is_full_of_what_is_in_use_is_indexed_again_only_when_something_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1024 tokens: two prompts of 5 with 500 of their samples each, and 14 free. A third sample of the first prompt
    says 14, then another; what follows finds no room until the second prompt's only sample has ended."""
    pool, indexed = PoolDrafter(least_bytes()), list[int]()
    index_again = pool.texts.index_again
    monkeypatch.setattr(pool.texts, "index_again", lambda used: indexed.append(used) or index_again(used))
    other = (50, 51, 52, 53, 54)
    for slot, prompt_ids in ((0, PROMPT), (1, other)):
        pool.begin(slot, prompt_ids)
        say(pool, slot, *range(500))
    pool.begin(2, PROMPT)
    say(pool, 2, *range(14))
    assert pool.used == most_entries(least_bytes()) == 1024
    for _ in range(3):
        pool.say(np.array([0, 1, 2]), np.array([1, 1, 1]), np.array([7, 7, 7]), np.full(3, 0.5))
    pool.begin(3, PROMPT)
    for _ in range(3):
        say(pool, 3, 7)
    assert (indexed, pool.used) == ([], 1024), "all is in use: nothing is dropped, and nothing recorded any further"
    pool.end(3)
    pool.begin(3, PROMPT)
    say(pool, 3, 7)
    assert (indexed, pool.ends[3]) == ([], -1), "a sample has ended whose prompt is in use"
    pool.end(1)
    pool.begin(1, PROMPT)
    say(pool, 1, 0)
    assert (indexed, pool.used) == ([1024 - 505], 1024 - 505 + 1)
    assert drafted(pool, asked(1, place=1)) == [1, 2, 3, 4]


def test_tokens_that_are_not_recorded_need_no_room() -> None:
    """One sample found no room for 1100 tokens. It says 1000 more beside another, whose 10 are recorded."""
    pool = PoolDrafter(least_bytes())
    for slot in (0, 1):
        pool.begin(slot, PROMPT)
    say(pool, 0, *range(1100))
    assert pool.ends[0] == -1
    pool.say(np.array([0, 1]), np.array([1020, 10]), np.arange(1030), np.full(1030, 0.5))
    assert (pool.used, pool.ends[1]) == (5 + 10, 14)


@pytest.mark.parametrize(
    ("budget", "prompt_tokens", "tokens"), [(1 << 20, 200, 50), (1 << 16, 1, 1), (1 << 16, 3, 900)]
)
def test_the_budget_holds_all_that_python_takes_also_while_texts_are_dropped(
    budget: int, prompt_tokens: int, tokens: int
) -> None:
    """Long prompts of short samples, prompts and samples of a token, prompts of long samples: several times as many as
    there is room for. The tuples of prompts are not kept: they are dropped as soon as they are told."""
    said, probs = np.arange(tokens) % 97, np.full(tokens, 0.5)

    def filled() -> PoolDrafter:
        pool = PoolDrafter(budget)
        for number in range(3 * budget // (50 * (prompt_tokens + tokens))):
            pool.record((number, *range(prompt_tokens - 1)), said, probs)
        return pool

    filled()  # what is compiled, or read from disk, is no part of a pool
    tracemalloc.start()
    pool = filled()
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now <= pool.num_bytes + FRAMES <= budget + FRAMES
    assert peak <= budget + FRAMES
    assert pool.used > most_entries(budget) // 64, "it holds something"


def test_a_prompt_of_the_hash_of_another_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "hash", lambda token_ids: 7, raising=False)
    pool = PoolDrafter(1 << 20)
    pool.record(PROMPT, np.array([1, 2, 3]), np.full(3, 0.5))
    for slot, prompt_ids in enumerate((PROMPT, (50, 51, 52))):
        pool.begin(slot, prompt_ids)
        say(pool, slot, 1)
    assert drafted(pool, asked(0, place=1)) == [2, 3]
    assert drafted(pool, asked(1, place=1)) == []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "say", "end", "record", "old"]),
        st.integers(0, 5),
        st.integers(0, 7),
        st.integers(1, 400),
    ),
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.integers(0, 3))
def test_the_budget_holds_and_texts_stay_whole(steps: list[tuple[str, int, int, int]], doubled: int) -> None:
    """Slots begin, say and end at random in a pool of few thousand tokens. Of every slot that is still recorded, the
    index has what it said, its prompt before it."""
    budget = least_bytes() << doubled
    pool, said = PoolDrafter(budget), dict[int, list[int]]()
    for number, (what, slot, prompt, length) in enumerate(steps):
        prompt_ids = tuple(range(10 * prompt, 10 * prompt + 5 + prompt))
        tokens = (np.arange(length) * (number + 3)) % 97
        if what == "begin" and slot not in said:
            pool.begin(slot, prompt_ids)
            said[slot] = list(prompt_ids)
        elif what == "say" and slot in said:
            pool.say(np.array([slot]), np.array([length]), tokens, np.full(length, 0.5))
            said[slot] += tokens.tolist()
        elif what == "end" and slot in said:
            pool.end(slot)
            del said[slot]
        elif what == "record":
            pool.record(prompt_ids, tokens, np.full(length, 0.5))
        elif what == "old":
            pool.grow_old()
        assert pool.num_bytes <= budget
        for one, tokens_of in said.items():
            at, found = int(pool.ends[one]), []
            while at >= 0:
                found.append(int(pool.texts.tokens_N[at]))
                at = int(pool.texts.before_N[at])
            assert found[::-1] in ([], tokens_of)
    if said:
        slots = np.array(sorted(said))
        zeros = np.zeros(len(slots), np.int64)
        everything = Asked(slots, zeros.view(np.uint64), zeros + 3, zeros.astype(bool), zeros + 8, ())
        drafts = pool.propose(everything, 8, SURE, 0.0)
        assert (drafts.lengths_B <= 8).all()
