"""Terms of forwards and backwards by a device's numbers, computed by hand on the machine of `test_model_costs`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.cost.hardware import Software
from plait.cost.model_work import ModelWork
from plait.cost.passes import Micro, Passes, total
from plait.cost.shape_parameters import adapter_parameters
from plait.layout.mesh import Layout
from tests.cost.test_model_costs import HEAD, LAYER, SHAPE, SOFTWARE, WORK, a_cluster, check, costs_of

FORWARD = {"products": 2 * 96 * LAYER / 0.5e9, "attention": 4 * (4 * 36 + 8 * 100) * 64 / 0.5e9}
"""A layer over the 96 tokens of a step, which are more than reading its weights takes."""
ONE = Layout.on(range(1))


def passes(layout: Layout, software: Software = SOFTWARE) -> Passes:
    return Passes(a_cluster(4, software=software), ModelWork(SHAPE, "bfloat16", 1000), layout)


def test_recomputing_is_a_forward_of_the_layers() -> None:
    plain, again = (
        costs_of(replace(WORK, checkpoint_activations=flag)).call("actor.train", "train", ONE) for flag in (False, True)
    )
    assert costs_of(WORK).flow.optimizer_steps("actor") == 1
    assert "recomputing" not in plain.terms
    assert again.terms == pytest.approx({**plain.terms, "recomputing": 4 * total(FORWARD)})


def test_a_backward_of_adapters_is_one_forward() -> None:
    """Weights get no gradients: products, attention and head twice in place of three times. The optimizer passes the
    adapter's numbers alone: 12 bytes there and back, weights of two and gradients of four."""
    whole, adapted = (
        costs_of(replace(WORK, lora_rank=rank)).call("actor.train", "train", ONE).terms for rank in (0, 2)
    )
    for name in ("products", "attention", "head"):
        assert adapted[name] == pytest.approx(2 / 3 * whole[name])
    assert adapter_parameters(SHAPE, 2) == 4 * 2 * (4 * (64 + 64) + 3 * (64 + 128))
    assert adapted["optimizer"] == pytest.approx((2 * 12 + 2 + 4) * adapter_parameters(SHAPE, 2) / 0.5e8)


def test_prompts_are_computed_once_for_all_their_samples() -> None:
    """Four prompts of eight tokens in one chunk: 32 tokens, 36 pairs each; the head, of four rows, reads weights."""
    found = costs_of(WORK).call("actor.generate", "prefill", ONE)
    layer = (2 * 32 * LAYER + 4 * 4 * 36 * 64) / 0.5e9
    check(found, {"prompts": 4 * layer + 2 * HEAD / 0.5e8})
    in_two = costs_of(replace(WORK, max_prefill_tokens=16)).call("actor.generate", "prefill", ONE)
    layer = max((2 * 16 * LAYER + 4 * 2 * 36 * 64) / 0.5e9, 2 * LAYER / 0.5e8)
    check(in_two, {"prompts": 2 * (4 * layer + 2 * HEAD / 0.5e8)})


def test_decoding_reads_keys_and_values_of_every_context() -> None:
    """Four samples with 1,000 tokens: the weights once, and of each token keys and values of four heads."""
    layer = passes(ONE).decode_layer(4, 1000)
    assert layer["products"] == pytest.approx(2 * 4 * LAYER / 0.5e9)
    assert layer["attention"] == pytest.approx(4 * 1000 * 64 / 0.5e9)
    assert total(layer) == pytest.approx((2 * LAYER + 2 * 1000 * 64 * 2) / 0.5e8)


def test_ranks_that_decode_divide_weights_and_heads_and_sum_twice() -> None:
    two = passes(Layout.on(range(2), tp=2))
    layer = (2 * LAYER + 2 * 1000 * 64 * 2) / 2 / 0.5e8 + 2 * (1e-4 + 4 * 64 * 2 / 0.5e8)
    assert total(two.decode_layer(4, 1000)) == pytest.approx(layer)
    at_once = two.decode_steps(np.array([4.0]), np.array([1000.0]), np.array([1.0]))
    assert at_once.tolist() == pytest.approx([4 * layer + 2 * HEAD / 2 / 0.5e8])


def test_a_token_hops_from_stage_to_stage() -> None:
    """Of one group: through both stages, and over a link and a hop's own time from each to the next."""
    software = replace(SOFTWARE, hop_s=0.25)
    two = passes(Layout.on(range(2), pp=2), software)
    layer = (2 * LAYER + 2 * 1000 * 64 * 2) / 0.5e8
    hops = 2 * (1e-4 + 4 * 64 * 2 / 0.5e8 + 0.25)
    found = two.decode_steps(np.array([4.0]), np.array([1000.0]), np.array([1.0]))
    assert found.tolist() == pytest.approx([4 * layer + 2 * HEAD / 0.5e8 + hops])


@pytest.mark.parametrize(("schedule", "waits"), [("", 1), ("gpipe", 1), ("one at a time", 3)])
def test_one_micro_batch_at_a_time_waits_for_every_one(schedule: str, waits: int) -> None:
    """Three micro-batches through two stages; the last is the slower, by its head, three forwards of 100 rows."""
    terms = passes(Layout.on(range(2), pp=2)).training(Micro(96, 944, 100), 3, recompute=False, schedule=schedule)
    stage = 2 * 3 * total(FORWARD)
    assert terms["head"] == pytest.approx(3 * 3 * 2 * 100 * HEAD / 0.5e9)
    assert terms["filling and draining"] == pytest.approx(waits * stage)
    assert terms["hops"] == pytest.approx(waits * 2 * (1e-4 + 96 * 64 * 2 / 0.5e8))
    assert total(terms) == pytest.approx((3 + waits) * stage + terms["head"] + terms["hops"])
