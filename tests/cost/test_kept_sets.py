"""What tokens were drawn from, in bytes: the most by hand and by `data.supports`, what is expected by what was
measured, and what processes and messages take of real ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from plait.cost.kept_sets import NO_SETS, KeptSets, expert_bytes, held_set_bytes, most_bytes
from plait.cost.model_costs import ModelCosts
from plait.data.experts import Experts
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.supports import Supports, bits_of, encoded
from plait.generation.settings import SamplingSettings
from plait.layout.mesh import Layout
from plait.workers.packed_experts import pack_experts, unpack_experts
from plait.workers.packed_supports import pack_supports
from tests.cost.test_model_costs import SHAPE, WORK, a_cluster, a_flow, costs_of

VOCABULARY = 49_152
ROUTED = replace(SHAPE, expert_layers=2, mixtures=(2, 3), experts=300, experts_per_token=3, expert_intermediate=16)
ANSWERS = [
    ({"top_p": 0.95}, (231, 293), (267, 336)),
    ({"top_p": 0.99}, (1201, 1630), (1180, 1580)),
    ({"top_p": 0.9}, (158, 159), (182, 183)),
    ({"min_p": 0.05}, (8, 9), (14, 17)),
    ({"min_p": 0.1}, (4, 5), (9, 9)),
    ({"temperature": 1.2, "top_p": 0.95}, (2876, 2876), (2671, 2671)),
    ({"temperature": 1.5, "top_p": 0.95}, (16_637, 16_637), (5753, 5753)),
    ({"temperature": 1.5, "min_p": 0.1}, (10, 10), (18, 18)),
]
"""Filters, and the least and the most of means of tokens and bytes that SmolLM2-135M-Instruct's own answers had."""


def with_gaps(gaps: list[int], vocabulary: int) -> bytes:
    kept_V = torch.zeros(1, vocabulary, dtype=torch.bool)
    kept_V[0, torch.tensor(gaps).add(1).cumsum(0) - 1] = True
    (found,) = encoded(bits_of(kept_V).numpy(), vocabulary)
    return found


def test_the_most_that_top_k_keeps() -> None:
    """Of 50 of 49,152 tokens: 49,102 others, of which 50 gaps of 128 leave 42,702; two of these gaps may be 16,256
    longer. And no more than a bit for each token."""
    assert most_bytes(50, VOCABULARY) == 1 + 50 + 50 + 2
    assert len(with_gaps([16_384] * 2 + [128] * 48, VOCABULARY)) == 103
    assert most_bytes(3, 1000) == 1 + 3 + 3 == len(with_gaps([128] * 3, 1000))
    assert most_bytes(900, 1000) == 1 + 125 == len(with_gaps([1] + [0] * 899, 1000))
    assert KeptSets.expected(SamplingSettings(top_k=50), VOCABULARY) == KeptSets(50.0, 103.0)


def test_no_set_of_so_many_tokens_takes_more() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        vocabulary = int(random.integers(2, 3000))
        kept_V = torch.from_numpy(random.random((1, vocabulary)) < random.random() ** 3)
        (found,) = encoded(bits_of(kept_V).numpy(), vocabulary)
        assert len(found) <= most_bytes(int(kept_V.sum()), vocabulary)


@pytest.mark.parametrize(("filters", "tokens", "num_bytes"), ANSWERS)
def test_what_is_expected_is_near_what_answers_had(filters, tokens, num_bytes) -> None:
    """Within a factor of three of the tokens, and two of the bytes, of which more is expected of hot ones."""
    found = KeptSets.expected(SamplingSettings(**filters), VOCABULARY)
    assert tokens[0] / 1.5 < found.tokens < 3 * tokens[1]
    assert num_bytes[0] / 1.3 < found.bytes < 2 * num_bytes[1]


def test_filters_leave_no_more_together_than_each() -> None:
    both = KeptSets.expected(SamplingSettings(top_k=20, top_p=0.95), VOCABULARY)
    assert both.tokens == 20
    assert both.bytes <= most_bytes(20, VOCABULARY)
    assert KeptSets.expected(SamplingSettings(top_p=0.9, temperature=0), VOCABULARY) == NO_SETS
    assert KeptSets.expected(SamplingSettings(), VOCABULARY) == NO_SETS
    assert (NO_SETS.held_bytes, NO_SETS.sent_bytes, NO_SETS.read_bytes(10)) == (0, 0, 0)


@pytest.mark.parametrize("least", [{"top_p": 0.95}, {"min_p": 0.99}])
def test_what_is_drawn_very_hot_is_drawn_from_all(least: dict[str, float]) -> None:
    """e to the power of ten for each 1 of temperature is no number from 72 on."""
    for temperature in (10.0, 72.0, 1e4):
        hot: dict[str, Any] = {"temperature": temperature, **least}
        assert KeptSets.expected(SamplingSettings(**hot), VOCABULARY) == KeptSets(VOCABULARY, 1 + VOCABULARY // 8)
        assert KeptSets.expected(SamplingSettings(**hot, top_k=50), VOCABULARY).tokens == 50


def test_what_processes_and_messages_take() -> None:
    """Of 300 sets of 50 tokens: objects in tuples, to within the allocator's 16 bytes; two arrays of a message, but
    for a number for each sample; what a micro-batch reads, but for a number for each token."""
    random = np.random.default_rng(0)
    kept_BV = torch.zeros(300, VOCABULARY, dtype=torch.bool)
    for row_V in kept_BV:
        row_V[torch.from_numpy(random.choice(VOCABULARY, 50, replace=False))] = True
    sets = encoded(bits_of(kept_BV).numpy(), VOCABULARY)
    predicted = KeptSets(50, sum(map(len, sets)) / 300)
    held = sum(sys.getsizeof(kept) + -sys.getsizeof(kept) % 16 for kept in sets) + sys.getsizeof(tuple(sets))
    assert held_set_bytes(predicted, 300, 1) == pytest.approx(held, rel=0.05)
    message = pack_supports([sets[:100], sets[100:]])
    assert sum(array.nbytes for array in message) == pytest.approx(300 * predicted.sent_bytes + 2 * 4)
    assert Supports(tuple(sets)).ids_n.nbytes == predicted.read_bytes(300)


def test_they_travel_with_their_samples() -> None:
    """Top-3 of 1,000 tokens: 7 bytes and 4 that say so, of each of 64 response tokens, to one of two ranks its half. A
    reward has no use for them."""
    plain, kept = costs_of(WORK), costs_of(replace(WORK, sampling=SamplingSettings(top_k=3)))
    two = Layout.on(range(2), dp=2)
    more = lambda call, mode: kept.call(call, mode, two).terms["rows"] - plain.call(call, mode, two).terms["rows"]
    for call, mode in (("actor.generate", "decode"), ("ref.logprobs", "score"), ("actor.train", "train")):
        assert more(call, mode) == pytest.approx(64 * 11 / 2 / 0.5e7)
    assert more("reward.score", "score") == pytest.approx(0)


def test_their_memory() -> None:
    """7 and 48 bytes of each token: of all 64 where the flow runs, of half of them on two copies. A micro-batch of 96
    tokens reads 3 ids of 8 bytes of each. On a GPU they are the host's, but for those of a chunk of logits."""
    sampled = replace(WORK, sampling=SamplingSettings(top_k=3))
    on_cpu, two, one = costs_of(sampled), Layout.on(range(2), dp=2), Layout.on(range(1))
    by_all = lambda costs: costs.call("actor.generate", "decode", two).all_set_bytes
    assert by_all(on_cpu) == 64 * 55
    assert by_all(costs_of(replace(sampled, batches=3))) == 3 * 64 * 55
    for call, mode in (("actor.generate", "decode"), ("ref.logprobs", "score"), ("actor.train", "train")):
        assert on_cpu.call(call, mode, two).set_bytes == 32 * 55
    assert on_cpu.call("reward.score", "score", two).set_bytes == 0
    working = lambda costs, call, mode: costs.call(call, mode, one).working_bytes[0]
    for call, mode in (("ref.logprobs", "score"), ("actor.train", "train")):
        assert working(on_cpu, call, mode) - working(costs_of(WORK), call, mode) == 96 * 3 * 8
    on_gpu: list[ModelCosts] = [costs_of(replace(work, device="cuda"), a_cluster(2)) for work in (WORK, sampled)]
    assert by_all(on_gpu[1]) == 0
    assert working(on_gpu[1], "actor.train", "train") > working(on_gpu[0], "actor.train", "train")


def test_experts_of_prompts_and_responses() -> None:
    """Two layers with 3 of 300 experts for each token, in two bytes: 12 bytes. A message has those of a prompt once for
    all its
    samples, and the last token of a response has none."""
    assert expert_bytes(ROUTED) == 12
    rng = np.random.default_rng(0)
    prompt = Prompt(0, "", tuple(range(7)))
    numbers = rng.integers(0, 300, (7 + 9, 6)).astype(np.uint16)
    samples = [
        Sample(prompt, i, tuple(range(10)), (), "", FinishReason.STOP, experts=Experts.of(numbers, 7)) for i in (0, 1)
    ]
    message = pack_experts(samples, [0, 0], 1)
    assert message[1].nbytes == 12 * (7 + 2 * 9)
    assert held_set_bytes(KeptSets(experts=12), 2, 9, prompts=7) == message[1].nbytes
    assert unpack_experts(message, [0, 0]) == [sample.experts for sample in samples]


def test_they_go_to_the_role_that_draws() -> None:
    """12 bytes for each of 16 tokens of 8 samples, to one of two ranks its half; nothing for a reference or a critic,
    which have routers of their own. Where the flow runs, a prompt's are there once for both of its samples."""
    flow, two = a_flow(), Layout.on(range(2), dp=2)
    plain, kept = (
        ModelCosts(
            replace(WORK, sampling=SamplingSettings(router_replay=replays)),
            dict.fromkeys(flow.roles, ROUTED),
            flow,
            a_cluster(),
        )
        for replays in (False, True)
    )
    more = lambda call, mode: kept.call(call, mode, two).terms["rows"] - plain.call(call, mode, two).terms["rows"]
    for call, mode in (("actor.generate", "decode"), ("actor.train", "train")):
        assert more(call, mode) == pytest.approx(8 * 16 * 12 / 2 / 0.5e7)
    for call, mode in (("ref.logprobs", "score"), ("critic.train", "train"), ("critic.values", "score")):
        assert more(call, mode) == pytest.approx(0)
    assert kept.call("actor.generate", "decode", two).all_set_bytes == 12 * (8 * 8 + 4 * 8)
    assert kept.call("actor.train", "train", two).set_bytes == 12 * (4 * 8 + 4 * 8)
    one = Layout.on(range(1))
    working = [costs.call("actor.train", "train", one).working_bytes[0] for costs in (plain, kept)]
    assert working[1] - working[0] == 96 * 12 * 9, "bytes, and indices of 8"
