"""Columns of several numbers per token, of distillation and of an algorithm that has none, by hand."""

from __future__ import annotations

import pytest

from plait.algorithms.distill import DistillOptions, distill
from plait.algorithms.kto import KTOOptions, kto
from plait.cost.device_memory import memory_by_device
from plait.cost.layer_times import Micro
from plait.cost.wide_columns import head_forwards, numbers_read, numbers_scored, wide_numbers
from plait.cost.working_memory import WIDE_NUMBER_BYTES
from plait.dataflow import Node
from plait.layout.mesh import Layout
from tests.algorithms.flows import graph_of
from tests.cost.test_device_memory import facts_of, named, row_of
from tests.cost.test_passes import passes


def node_of(call: str, flow=distill, options=None) -> Node:
    graph = graph_of(flow, options or DistillOptions(top_k=3))
    return next(node for node in graph.nodes if node.call == call)


def test_numbers_of_a_token() -> None:
    """Three ids, their log-probs and that of the rest are scored, sent back, and read by a loss that passes the head a
    second time."""
    score, train = node_of("ref.top_logprobs"), node_of("actor.train")
    assert (numbers_scored(score), wide_numbers(score), head_forwards(score)) == (7, 7, 1)
    assert (numbers_read(train), wide_numbers(train), head_forwards(train)) == (7, 7, 2)
    score, train = (node_of(call, kto, KTOOptions()) for call in ("ref.logprobs", "actor.train"))
    assert (numbers_scored(score), wide_numbers(score), head_forwards(score)) == (1, 0, 1)
    assert (numbers_read(train), wide_numbers(train), head_forwards(train)) == (len(train.inputs), 0, 1)


def test_memory_of_what_they_are_compared_by() -> None:
    """Of the tokens of the largest micro-batch, where the actor trains."""
    bytes_of = {}
    for top_k in (64, 512):
        options = {"top_k": top_k, "on_policy": False}
        facts = facts_of(named("colocated", 1), "distill", options=options, micro_batch_tokens=2000)
        (device,) = memory_by_device(facts)
        bytes_of[top_k] = row_of("likeliest tokens of each place", dict(device.rows))
    assert bytes_of == {top_k: WIDE_NUMBER_BYTES * (2 * top_k + 1) * 2000 for top_k in (64, 512)}


def test_a_second_pass_over_the_head_takes_its_seconds() -> None:
    """In forwards; a backward has one."""
    one, two = (
        passes(Layout.on(range(1))).training(
            Micro(96, 944, 100, head_forwards=count), 3, recompute=True, schedule="1f1b"
        )
        for count in (1, 2)
    )
    assert two.pop("head") == pytest.approx(4 / 3 * one.pop("head"))
    assert two == pytest.approx(one)
