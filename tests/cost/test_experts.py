"""How unevenly tokens and experts fall on ranks, by hand and against draws."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

import numpy as np
import pytest

from plait.cost.experts import SPREAD, are_whole, fullest, pair_bytes, passing_elements, reached
from plait.cost.micro_batch import LargestBatch
from plait.cost.model_work import ModelWork
from plait.cost.shape_parameters import adapter_copies
from plait.cost.working_memory import Blocks, activation_bytes
from plait.models.shape import ModelShape
from tests.cost.test_model_costs import SHAPE

NARROW = replace(SHAPE, expert_layers=4, experts=16, experts_per_token=2, expert_intermediate=32)
WIDE = replace(NARROW, expert_intermediate=128)
"""Of a model of hidden size 64."""


def test_narrow_experts_stay_whole() -> None:
    assert (are_whole(SHAPE), are_whole(NARROW), are_whole(WIDE)) == (False, True, False)
    assert are_whole(replace(NARROW, expert_intermediate=64))


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_columns_of_all_experts_fall_evenly(tp: int) -> None:
    assert fullest(WIDE, tp) == 1 / tp
    assert [reached(WIDE, tokens, tp) for tokens in (1.0, 3.0, 100.0)] == [2 / tp, 6 / tp, 16 / tp]


def test_the_fullest_rank_by_hand() -> None:
    """Eight of 16 experts, whose tokens together deviate by a quarter over the root of eight; six of 16 of three."""
    assert fullest(NARROW, 1) == 1
    assert fullest(NARROW, 2) == pytest.approx(0.5 * (1 + 0.25 / sqrt(8) * sqrt(2 * log(2))))
    assert fullest(NARROW, 3) == pytest.approx(6 / 16 * (1 + 0.25 / sqrt(6) * sqrt(2 * log(3))))
    assert fullest(replace(NARROW, experts=1), 2) == 1


def test_few_tokens_reach_more_experts_of_one_rank_than_of_another() -> None:
    """One token has two experts, one for each of two ranks in the mean; many reach all eight of a rank."""
    assert reached(NARROW, 1.0, 2) == pytest.approx(1 + sqrt(2 * log(2)))
    assert reached(NARROW, 100.0, 2) == 8
    assert reached(NARROW, np.array([1.0, 100.0]), 2) == pytest.approx([1 + sqrt(2 * log(2)), 8])
    work, dense = ModelWork(NARROW, "bfloat16", 1), 4 * 64 * 64 + 64 * 16
    assert work.read(100.0, 2) == 2 * (dense / 2 + 8 * 3 * 64 * 32)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_draws_of_many_routers(tp: int) -> None:
    """Of 128 experts the fullest rank has in the mean at most what the formula says, and at least a tenth less; of the
    experts that few tokens reach it is an upper bound."""
    shape, draw = replace(NARROW, experts=128, experts_per_token=8), np.random.default_rng(0)
    tokens = (1 + SPREAD * draw.normal(size=(2000, 128))).clip(0)
    share = (tokens / tokens.sum(1, keepdims=True)).reshape(2000, tp, -1).sum(2).max(1).mean()
    assert share <= fullest(shape, tp) <= 1.1 * share
    for rows in (1, 4, 16, 64):
        chosen = draw.random((200, rows, 128)).argsort(-1)[..., :8].reshape(200, -1)
        is_read = np.zeros((200, 128), bool)
        np.put_along_axis(is_read, chosen, True, 1)
        most = is_read.reshape(200, tp, -1).sum(2).max(1).mean()
        assert most <= reached(shape, float(rows), tp)


def test_what_pairs_keep_as_was_found() -> None:
    """Bytes of a token that the experts of Qwen3-30B-A3B keep in bfloat16 by grouped products, of one of eight ranks,
    on a CPU: 71,890 where each has 96 columns of all experts, 14,210 with 0.988 pairs where it has 16 whole ones."""
    sizes = {"hidden": 2048, "experts": 128, "experts_per_token": 8, "expert_intermediate": 768}
    whole = replace(NARROW, **sizes)
    evenly = 2 * 3 * 8 * 768 // 8  # of `layer_bytes`
    of_pair = 2 * (2 * 2048 + 4 * 768)
    assert pair_bytes(whole, 2, 8, fused=True) + evenly == pytest.approx(8 * of_pair * fullest(whole, 8), abs=1)
    assert 0.988 * of_pair == pytest.approx(14210, rel=0.01)
    of_columns = 2 * 8 * (2 * 2048 + 4 * 96)
    cut = replace(whole, expert_intermediate=4096)
    assert pair_bytes(cut, 2, 8, fused=True) + 2 * 3 * 8 * 512 == of_columns + 2 * 8 * 4 * (512 - 96)
    assert of_columns == pytest.approx(71890, rel=0.01)


def test_what_passes_without_a_backward_by_hand() -> None:
    """Of hidden size 64: four times that of a pair, or that once and four times its columns; whole experts have all of
    theirs on every rank. Of two experts of 32 columns, 3 * 2 * 32 / tp are in `layer_bytes`."""
    assert [passing_elements(NARROW, tp) for tp in (1, 2, 8)] == [256, 256, 256]
    assert [passing_elements(WIDE, tp) for tp in (1, 2, 8)] == [64 + 4 * 128, 64 + 4 * 64, 256]
    passing = [pair_bytes(NARROW, 2, tp, fused=True, by_masks=True) for tp in (1, 2)]
    assert passing == [2 * 2 * (256 - 3 * 32), 2 * 2 * (256 - 3 * 16)]


def test_the_share_of_a_layer_on_the_fullest_rank() -> None:
    """Attention and the router evenly, two experts of 32 columns for each token as they fall."""
    work, even, experts = ModelWork(NARROW, "bfloat16", 1), 4 * 64 * 64 + 64 * 16, 2 * 3 * 64 * 32
    assert work.share(1) == 1
    assert work.share(2) == pytest.approx((even / 2 + experts * fullest(NARROW, 2)) / (even + experts))
    assert ModelWork(WIDE, "bfloat16", 1).share(2) == 1 / 2


def test_adapters_of_experts_are_kept_again_where_no_grouped_product_takes_their_rank() -> None:
    """In float32 A and B of rank 3 are copied with a fourth row: as much more is kept as was found on a CPU."""
    torch, lora = pytest.importorskip("torch"), pytest.importorskip("plait.models.lora")
    from plait.models.lora_settings import LoraSettings
    from tests.models.tiny import tiny_model

    both, found, x = ("experts.gate_up_proj", "experts.down_proj"), {}, torch.randn(6, 32, requires_grad=True)
    for rank in (3, 4):
        model = tiny_model("qwen3_moe", dtype=torch.float32)
        settings = LoraSettings(rank=rank, target_modules=both)
        view = lora.add_lora(model, settings, name="actor", seed=0)
        view.backbone.activate("actor")
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        for param in view.own.parameters.values():
            param.requires_grad_(True)
        own = {tensor.untyped_storage().data_ptr() for tensor in (model.weights, view.own.weights)}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            chosen, weights = torch.arange(12).view(6, 2) % 4, torch.ones(6, 2)
            out = view.module.model.layers[0].mlp.experts(x, chosen, weights)
        found[rank] = sum(size for at, size in kept.items() if at not in own)
        del out
    shape = ModelShape.from_config(model.config.to_dict(), "qwen3_moe")
    copies = {rank: adapter_copies(shape, LoraSettings(rank=rank, target_modules=both), 4) for rank in (3, 4)}
    assert copies == {3: 2 * 4 * 4 * (32 + 48 + 24 + 32), 4: 0}
    assert found[3] - found[4] == 4 * copies[3] // 2
    batch, blocks = LargestBatch(6, 36), Blocks(4, True)
    more = activation_bytes(shape, batch, blocks, copied=copies[3]) - activation_bytes(shape, batch, blocks)
    assert more == 4 * copies[3]
