"""What a model needs for given samples, in floating point operations: by hand, and pair by pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cost.model_flops import CountedSamples, forward_flops, training_flops
from plait.cost.model_work import ModelWork
from plait.models.lora_settings import LoraSettings
from tests.cost.test_model_costs import HEAD, LAYER, SHAPE
from tests.cost.test_model_work import MIXTURE

WORK = ModelWork(SHAPE, "float32", 1000)
PAIR = 4 * 4 * 64
"""Operations of a pair of a query and a key in four layers: 64 multiplications and additions for its score, and as many
for its value."""


def counted(*samples: tuple[int, int, int], root: int = 0) -> CountedSamples:
    """Of (group, tokens of its prompt, tokens of the response)."""
    group, prompt, said = np.array(samples, dtype=np.int64).reshape(-1, 3).T
    return CountedSamples(group, prompt, said, said, root)


def test_a_shared_prompt_counts_once() -> None:
    """A prompt of 3 tokens, of which each sees itself and those before it (1 + 2 + 3 pairs), and behind it responses of
    2 tokens (4 + 5) and of 1 (4)."""
    micro = counted((0, 3, 2), (0, 3, 1)).micro(SHAPE)
    assert (micro.tokens, micro.pairs, micro.head_rows) == (6, 19, 3)
    forward = 2 * 6 * 4 * LAYER + 19 * PAIR + 2 * 3 * HEAD
    assert forward_flops(WORK, micro) == forward
    assert training_flops(WORK, micro) == 3 * forward

    apart = counted((0, 3, 2), (1, 3, 1)).micro(SHAPE)
    assert (apart.tokens, apart.pairs, apart.head_rows) == (9, 25, 3)


def test_what_all_prompts_begin_with_counts_once() -> None:
    """Prompts of 5 and 4 tokens that begin with the same 3: one of these is spared, with its 1 + 2 + 3 pairs."""
    micro = counted((0, 5, 1), (1, 4, 1), root=3).micro(SHAPE)
    assert (micro.tokens, micro.pairs) == (5 + 1 + 1 + 1, 15 + 6 + 4 + 5)
    alone = counted((0, 5, 1), root=3).micro(SHAPE)
    assert (alone.tokens, alone.pairs) == (6, 15 + 6)


def test_a_mixture_counts_the_experts_that_a_token_passes() -> None:
    """Two of eight, the one that all pass, and the router."""
    micro = counted((0, 3, 2)).micro(MIXTURE)
    layer = 4 * 64 * 64 + 64 * 8 + 3 * 64 * (2 * 32 + 16)
    assert forward_flops(replace(WORK, shape=MIXTURE), micro) == 2 * 5 * 4 * layer + 15 * PAIR + 2 * 2 * HEAD


def test_dense_blocks_and_mixtures_count_each_for_itself() -> None:
    shape = replace(MIXTURE, expert_layers=1, mixtures=(2,))
    micro = counted((0, 3, 2)).micro(shape)
    mixture = 4 * 64 * 64 + 64 * 8 + 3 * 64 * (2 * 32 + 16)
    layers = 3 * LAYER + mixture
    assert forward_flops(replace(WORK, shape=shape), micro) == pytest.approx(2 * 5 * layers + 15 * PAIR + 2 * 2 * HEAD)


def test_a_layer_with_a_window_sees_the_pairs_within_it() -> None:
    """One layer of four sees 2 tokens: of 5 that follow each other 1 + 2 + 2 + 2 + 2 pairs, the others 15."""
    shape = replace(SHAPE, windows=(0, 2, 0, 0))
    micro = counted((0, 3, 2)).micro(shape)
    pairs = (3 * 15 + 9) * PAIR / 4
    assert forward_flops(replace(WORK, shape=shape), micro) == 2 * 5 * 4 * LAYER + pairs + 2 * 2 * HEAD


def test_weights_under_an_adapter_get_no_gradients() -> None:
    """Of 64 to 64 in each of four layers, of rank 2. Attention has no weights: its backward is two forwards."""
    adapter = 4 * 2 * (64 + 64)
    work = replace(WORK, lora=LoraSettings(rank=2, target_modules=("q_proj",)))
    micro = counted((0, 3, 2)).micro(SHAPE)
    weights, rest = 2 * 5 * 4 * LAYER + 2 * 2 * HEAD, 15 * PAIR + 2 * 5 * adapter
    assert forward_flops(work, micro) == weights + rest
    assert training_flops(work, micro) == 2 * weights + 3 * rest


def test_adapters_of_experts_are_computed_for_the_experts_of_a_token() -> None:
    """Two of eight, of 32 to 64 in each of four layers, of rank 2."""
    shape = replace(SHAPE, expert_layers=4, experts=8, experts_per_token=2, expert_intermediate=32)
    adapted = replace(WORK, shape=shape, lora=LoraSettings(rank=2, target_modules=("experts.down_proj",)))
    micro = counted((0, 3, 2)).micro(shape)
    own = 2 * 5 * 4 * 2 * 2 * (32 + 64)
    assert forward_flops(adapted, micro) - forward_flops(replace(WORK, shape=shape), micro) == own


def test_a_loss_that_asks_for_other_tokens_passes_the_head_twice() -> None:
    once, twice = (counted((0, 3, 2)).micro(SHAPE, head_forwards=heads) for heads in (1, 2))
    assert training_flops(WORK, twice) - training_flops(WORK, once) == 2 * 2 * HEAD


def test_each_batch_computes_the_prompts_of_its_samples() -> None:
    """Two samples of one prompt of 3 tokens, one of another of 4: apart in two batches, together in a third, as in
    another epoch; what prompts begin with is spared where a batch has several."""
    samples = counted((7, 3, 2), (7, 3, 1), (9, 4, 1), root=2)
    parts = [samples.micro(SHAPE, [batch]) for batch in ([0], [1, 2], [0, 1])]
    assert [part.tokens for part in parts] == [3 + 2, (3 + 1) + (4 + 1) - 2, 3 + 2 + 1]
    whole = samples.micro(SHAPE, [[0], [1, 2], [0, 1]])
    assert whole.tokens == sum(part.tokens for part in parts)
    assert whole.pairs == sum(part.pairs for part in parts)
    assert whole.head_rows == sum(part.head_rows for part in parts) == 2 + 2 + 3


SAMPLES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=12)


@given(SAMPLES, st.lists(st.integers(4, 9), min_size=4, max_size=4), st.integers(0, 3), st.integers(1, 12))
def test_pairs_are_those_of_a_mask(samples: list[tuple[int, int]], prompts: list[int], root: int, window: int) -> None:
    """Each (group, place, branch) is a token; it sees those before it in its prompt and its own response."""
    shape = replace(SHAPE, windows=(0, window, window, 0))
    micro = counted(*((group, prompts[group], said) for group, said in samples), root=root).micro(shape)
    several = len({group for group, _ in samples}) > 1
    tokens: set[tuple[int, int, int]] = set()
    for number, (group, said) in enumerate(samples):
        for place in range(prompts[group] + said):
            is_root = several and place < root
            owner = -1 if is_root else group
            tokens.add((owner, place, number if place >= prompts[group] else -1))
    assert micro.tokens == len(tokens)
    assert micro.pairs == sum(place + 1 for _, place, _ in tokens)
    assert micro.seen(window) == sum(min(place + 1, window) for _, place, _ in tokens)
