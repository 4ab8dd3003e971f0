"""Responses behind other prompts: who shares one, in which order they stay, and what a packed row of them has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.experts import Experts
from plait.data.records import FinishReason, Prompt, Reply, Sample
from plait.data.replaced_prompts import WrittenPrompts
from plait.data.rows import Rows, sizes_of
from plait.policy.packing import LEAST_ROOT, split_micro_batches

OWN = {3: (1, 2), 8: (1, 2, 3)}


def sample(uid: int, index: int, token_ids: tuple[int, ...] = (7, 8)) -> Sample:
    return Sample(Prompt(uid, "own", OWN[uid]), index, token_ids, (-0.5,) * len(token_ids), "text", FinishReason.STOP)


def written(rows: Rows, prompts: list[tuple[int, ...]]) -> WrittenPrompts:
    pairs = zip(rows.samples, prompts, strict=True)
    return WrittenPrompts(rows, {one.uid: replace(one.prompt, token_ids=ids, text="new") for one, ids in pairs})


def shown(rows: Rows) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(one.prompt.uid, one.index, one.prompt.token_ids) for one in rows.samples]


def test_who_reads_the_same_tokens_shares_them() -> None:
    """Samples 3.0 and 8.1 read [5, 6], of two prompts; 3.1 its own [1, 2]; 8.0 [9]."""
    rows = Rows((sample(3, 0), sample(3, 1), sample(8, 0), sample(8, 1)))
    found = written(rows, [(5, 6), (1, 2), (9,), (5, 6)]).behind(rows)
    assert shown(found) == [(0, 0, (5, 6)), (1, 0, (1, 2)), (2, 0, (9,)), (0, 1, (5, 6))]
    assert [one.token_ids for one in found.samples] == [(7, 8)] * 4
    assert not found.columns


def test_the_response_is_as_it_was_but_for_its_experts() -> None:
    own = replace(
        sample(3, 0),
        replies=(Reply(1, (4, 4)),),
        supports=(b"a", b"b"),
        token_versions=(1, 2),
        experts=Experts(b"12", b"3456"),
    )
    rows = Rows((own,))
    (found,) = written(rows, [(5, 6)]).behind(rows).samples
    assert found == replace(own, prompt=replace(own.prompt, uid=0, token_ids=(5, 6), text="new"), experts=None)


def test_a_sample_that_nothing_was_written_for_is_no_part_of_it() -> None:
    rows = Rows((sample(3, 0),))
    with pytest.raises(KeyError):
        WrittenPrompts(rows, {}).behind(rows)


ROOT = tuple(range(100, 100 + LEAST_ROOT))
prompts_of = st.lists(st.sampled_from([(1,), (1, 2), (3, 4, 5), (*ROOT, 6), (*ROOT, 7, 8)]), min_size=1, max_size=8)


@given(prompts_of, st.randoms(use_true_random=False))
def test_packing_has_each_prompt_once_whatever_the_order(prompts: list[tuple[int, ...]], random) -> None:
    """A forward of all has each different prompt once, less what all begin with; groups and sizes do not depend on the
    order in which samples come."""
    samples = [sample(8 if place % 2 else 3, place // 2, (7,) * (1 + place % 3)) for place in range(len(prompts))]
    told = written(Rows(tuple(samples)), prompts)
    found = told.behind(Rows(tuple(samples))).with_root()
    (micro,) = split_micro_batches(sizes_of(found), 10_000)
    different = set(prompts)
    shares_root = len(different) > 1 and all(prompt[:LEAST_ROOT] == ROOT for prompt in different)
    assert found.root_tokens == (LEAST_ROOT if shares_root else 0)
    spared = (len(different) - 1) * found.root_tokens
    assert micro.num_tokens == sum(map(len, different)) - spared + sum(len(one.token_ids) for one in samples)
    assert len(micro.groups) == len(different)
    order = random.sample(range(len(samples)), len(samples))
    shuffled = told.behind(Rows(tuple(samples[place] for place in order)))
    assert shown(shuffled) == [shown(found)[place] for place in order]
