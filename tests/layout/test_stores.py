"""A file is a layout: saved under one plan, loaded under any other."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

from plait.errors import DataError, LayoutError
from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import weights, zero_shards
from plait.layout.mesh import Cluster, Layout
from plait.layout.move_plan import MoveKind
from plait.layout.params import Param
from plait.layout.stores import from_manifest, stored_once, to_manifest, writers
from tests.cases import examples
from tests.layout.cases import pairs
from tests.layout.judge import check_values, fill, judge, masks
from tests.layout.played_moves import allocate

SMALL = decoder_parameters(
    layers=2, hidden=6, intermediate=8, heads=4, kv_heads=2, head_dim=2, vocabulary=17, tied=True, cut_vocabulary=True
)
ONE_NODE = Cluster(1, 4)


@settings(max_examples=examples(10, 40), deadline=None)
@given(pairs())
def test_saved_under_one_plan_loaded_under_another(case) -> None:
    parameters, cluster, before, after = case
    source = zero_shards(parameters, before, "float32", "before")
    files = stored_once(source, cluster)
    judge(source, files, cluster)
    held = sum(holding.box.num_elements for mine in files.ranks.values() for holding in mine)
    assert held == parameters.num_elements, "an element is missing or stands in two files"
    found = from_manifest(to_manifest(files, cluster), parameters.params, cluster)
    assert found == files
    judge(found, zero_shards(parameters, after, "float32", "after"), cluster)


@settings(max_examples=examples(10, 40), deadline=None)
@given(pairs())
def test_saved_by_parameters_that_were_cut_otherwise(case) -> None:
    """As a family's parameters are where another version cuts them: by boxes of other grids, each element is found."""
    parameters, cluster, before, after = case
    whole = [replace(param, cut=None, sections=1, heads=None, widths=()) for param in parameters.params]
    uncut = replace(parameters, params=tuple(whole))
    for saved, wanted in ((uncut, parameters), (parameters, uncut)):
        files = stored_once(zero_shards(saved, before, "float32"), cluster)
        found = from_manifest(to_manifest(files, cluster), wanted.params, cluster)
        memory = allocate(files)
        fill(memory, files)
        check_values(memory, found)
        judge(found, zero_shards(wanted, after, "float32", "after"), cluster)


def test_actions_of_files() -> None:
    held = weights(SMALL, Layout.on(range(4), dp=2, tp=2), "float32")
    files = stored_once(held, ONE_NODE)
    plan, _ = judge(held, files, ONE_NODE)
    assert {action.kind for _, action in plan} == {MoveKind.WRITE}
    assert {action.peer - 4 for _, action in plan} == {0, 1, 2, 3}
    assert all(action.peer - 4 == rank for rank, action in plan), "each rank writes a file of its own"
    plan, traffic = judge(files, weights(SMALL, Layout.on(range(4), dp=4), "float32", "loaded"), ONE_NODE)
    read = sum(action.num_elements for _, action in plan if action.kind is MoveKind.READ)
    assert read == SMALL.num_elements, "a node reads each element once and spreads it"
    assert traffic.entered[0] == 4 * SMALL.num_elements
    assert max(plan.traffic.sent_bytes(rank) for rank in range(4)) < 4 * SMALL.num_elements


@settings(max_examples=examples(10, 40), deadline=None)
@given(pairs())
def test_each_rank_writes_its_own_file(case) -> None:
    """Replicas too: whichever of them holds an element, the one whose file it is in writes it."""
    parameters, cluster, before, after = case
    for held in (weights(parameters, before, "float32"), zero_shards(parameters, after, "float32")):
        plan, _ = judge(writers(held), stored_once(held, cluster), cluster, bucket_bytes=64, chunk_bytes=1)
        order = sorted(held.ranks)
        assert all(action.peer == cluster.store(order.index(rank)) for rank, action in plan)


def test_replicas_share_the_writing() -> None:
    files = stored_once(weights(SMALL, Layout.on(range(4), dp=4), "float32"), ONE_NODE)
    sizes = [sum(holding.box.num_elements for holding in mine) for mine in files.ranks.values()]
    assert all(sizes)
    assert not any((a & b).any() for a, b in zip(masks(files, [4]), masks(files, [5]), strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda text: text[:-1], DataError, "m: expected a layout in JSON"),
        (lambda _: "[]", DataError, 'm: expected a layout file ("format": "plait-layout")'),
        (lambda text: text.replace('"version": 1', '"version": 2'), DataError, "m: expected layout version 1, found 2"),
        (lambda text: json.dumps(json.loads(text) | {"stores": [{}]}), DataError, "m: expected the holdings"),
        (lambda text: text.replace("up_proj", "other"), LayoutError, "m: expected model.layers.0.mlp.up_proj.weight"),
        (lambda text: text.replace("float32", "float33"), LayoutError, "dtype: expected one of"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(change, error: type[Exception], message: str) -> None:
    text = to_manifest(stored_once(weights(SMALL, Layout.on(range(2), tp=2), "float32"), ONE_NODE), ONE_NODE)
    with pytest.raises(error, match="^" + re.escape(message)):
        from_manifest(change(text), SMALL.params, ONE_NODE, "m")


def test_another_shape_is_refused() -> None:
    text = to_manifest(stored_once(weights(SMALL, Layout.on(range(1)), "float32"), ONE_NODE), ONE_NODE)
    with pytest.raises(LayoutError, match=r"expected model.norm.weight with shape \[7\], found \[6\]: it was saved"):
        from_manifest(text, (Param("model.norm.weight", (7,)),), ONE_NODE)
