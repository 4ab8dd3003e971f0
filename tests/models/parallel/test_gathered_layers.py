"""Weights that are gathered a layer at a time: the same numbers, and no memory for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from plait.data.packed import PackedBatch
from plait.errors import ModelError
from plait.layout.mesh import Parallelism
from plait.layout.params import Block, FlatLayout, Param
from plait.layout.shards import gathered_elements
from plait.layout.zero_shares import OwnedRange
from plait.models.admission import check_batch
from plait.models.language_model import LanguageModel
from plait.models.parallel.gathered_layers import GatheredLayers
from plait.models.parallel.part import Part
from plait.models.parallel.partial import hold_shares
from plait.models.parallel.peers import Peers
from plait.models.parallel.team import Team
from plait.models.weight_share import WeightShare
from tests.models.tiny import tiny_model

FAMILIES = {"tied": {"family": "llama", "tie_word_embeddings": True}, "experts": {"family": "qwen3_moe"}}


def pair(
    name: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[LanguageModel, LanguageModel, GatheredLayers]:
    """A model, and the same of which one rank has the only share."""
    of = {**FAMILIES[name], "num_hidden_layers": 4, "dtype": dtype, "device": device}
    whole, shared = (tiny_model(**of) for _ in range(2))
    shared.part = Part(Team.alone(), shared.parameters)
    hold_shares(shared, Team.alone())
    assert isinstance(shared.backbone.layer_weights, GatheredLayers)
    return whole, shared, shared.backbone.layer_weights


def loss_of(model: LanguageModel, batch: PackedBatch, *, checkpoint: bool) -> Tensor:
    logprobs_R, entropies_R = model.logprobs(batch, 1.0, checkpoint=checkpoint)
    return logprobs_R.square().sum() + entropies_R.sum()


def gradients_of(model: LanguageModel) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.module.named_parameters() if param.grad is not None}


def assert_same_gradients(name: str, checkpoint: bool, dtype: torch.dtype, device: str) -> None:
    """Of whole weights and of gathered ones, though a second micro-batch is computed before the backward of the first,
    and rooms were let go in between."""
    whole, shared, gathered = pair(name, dtype, device)
    batch = check_batch(whole.module, whole.device)[0]
    for model in (whole, shared):
        model.module.requires_grad_(True)
    loss_of(whole, batch, checkpoint=checkpoint).backward()
    settled: list[int | None] = []
    with gathered.forward():
        loss = loss_of(shared, batch, checkpoint=checkpoint)
    rooms = [StorageWeakRef(room.memory.untyped_storage()) for room in gathered.rooms]
    with gathered.forward(), torch.no_grad():
        loss_of(shared, batch, checkpoint=False)
    gathered.rest()
    assert all(room.expired() for room in rooms), "a graph that is kept keeps no weights alive"
    with gathered.backward(settled.append):
        loss.backward()
    gathered.rest()
    assert settled == [3, 2, 1, 0]
    expected, found = gradients_of(whole), gradients_of(shared)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_whole_weights_to_the_bit(name: str, checkpoint: bool) -> None:
    assert_same_gradients(name, checkpoint, torch.float32, "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "again"])
def test_gradients_are_the_same_on_a_gpu_in_bfloat16(checkpoint: bool) -> None:
    """Of a model without experts: of these a GPU adds gradients in no order."""
    assert_same_gradients("tied", checkpoint, torch.bfloat16, "cuda")


def test_outside_of_passes_there_are_no_weights() -> None:
    whole, shared, gathered = pair("tied")
    batch = check_batch(whole.module, whole.device)[0]
    params = list(shared.module.parameters())
    assert sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in params}.values()) == 4
    assert all(bool(param.isnan().all()) for param in params), "what computes with them all the same shows it"
    with gathered.forward(), torch.no_grad():
        loss_of(shared, batch, checkpoint=False)
        there = [param for param in params if not param.isnan().any()]
        of_none = [name for name, _ in shared.module.named_parameters() if ".layers." not in name]
        of_layer = [name for name, _ in shared.module.named_parameters() if ".layers.3." in name]
        assert len(there) == len(of_none) + len(of_layer), "the last layer is there, and what belongs to none"
    assert all(bool(param.isnan().all()) for param in params)


@pytest.mark.parametrize("name", FAMILIES)
def test_rooms_are_those_of_the_forecast(name: str) -> None:
    whole, _, gathered = pair(name)
    assert sum(gathered.room_elements) == gathered_elements(whole.parameters, Parallelism(), 0)[0]
    assert not gathered.rooms, "and there are none while nothing computes"


def test_a_rank_without_samples_comes_to_the_same_layers() -> None:
    """Of adapters on upper layers alone, a backward ends at the lowest of them."""
    _, _, gathered = pair("tied")
    found: list[list[Any]] = []
    for lowest in (0, 2, None):
        settled: list[Any] = []
        gathered.idle_forward()
        gathered.idle_backward(settled.append, lowest)
        found.append(settled)
    assert found == [[3, 2, 1, 0], [3, 2], []]


def test_layers_that_compute_in_another_order_are_told() -> None:
    _, _, gathered = pair("tied")
    with pytest.raises(AssertionError, match="layer 1 computes where another was expected"), gathered.forward():
        gathered.enter(1)


def test_layers_that_share_weights_are_refused() -> None:
    layout = FlatLayout(
        (Block.whole(Param("layers.0.weight", (4,), 0)), Block.whole(Param("norm.weight", (4,)))),
        {"layers.1.weight": "layers.0.weight"},
    )
    share = WeightShare(layout, [OwnedRange(0, layout.num_elements, 0, 0)], 0, torch.zeros(()))
    with pytest.raises(ModelError, match="layers that share weights are not gathered one by one"):
        GatheredLayers(torch.nn.Linear(1, 1), share, Peers.alone())
