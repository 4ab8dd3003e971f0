"""When divided gradients are summed: a backward of a large model whose GPU is simulated does not wait for messages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.layout.decoder import decoder_parameters
from plait.layout.mesh import Layout
from plait.layout.params import Param, Parameters
from plait.layout.shards import largest_in_layers, shard, stage_largest
from plait.layout.zero_shares import Share
from plait.models.parallel.transfer import Transfer
from plait.training import gradients, memory
from plait.training.gradients import ShardedGradients, runs_of
from plait.training.memory import num_rooms
from tests.models.tiny import tiny_model
from tests.training.batches import ADVANTAGES, make_trainer, random_rows, token_mean, train

TOKENS = 16384
FLOPS = 650e12
"""Of products of this size on an H100, in a second."""
LAYERS, DP = 6, 8
LLAMA_7B: dict[str, Any] = {"hidden": 4096, "intermediate": 11008, "heads": 32, "kv_heads": 32, "head_dim": 128}
QWEN_7B: dict[str, Any] = {"hidden": 3584, "intermediate": 18944, "heads": 28, "kv_heads": 4, "head_dim": 128}
QWEN_05B: dict[str, Any] = {"hidden": 896, "intermediate": 4864, "heads": 14, "kv_heads": 2, "head_dim": 64}


@pytest.fixture(scope="module")
def arrivals() -> list[str]:
    """The parameters of a layer as a backward completes them."""
    trainer = make_trainer(tiny_model("llama"), micro_batch_tokens=1000)
    entries = trainer.model.trained.layout.entries
    came: list[str] = []
    take = trainer.optimizer.collected.take

    def noted(entry: int, gradient: Tensor) -> None:
        came.append(entries[entry][0].param.name)
        take(entry, gradient)

    trainer.optimizer.collected.take = noted
    for _ in train(trainer, random_rows(2, 2), {"advantages": ADVANTAGES}, lambda batch, advantages: token_mean(batch)):
        pass
    of_layer = [name.removeprefix("model.layers.1.") for name in came if name.startswith("model.layers.1.")]
    assert len(of_layer) == 9
    return of_layer


@dataclass
class Simulated:
    """A stream that computes, and one that sends: seconds."""

    bytes_per_s: float
    now: float = 0.0
    sent: float = 0.0
    """When all that was posted is through."""
    computed: float = 0.0
    messages: float = 0.0
    stalled: float = 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def begin_reduce(self, tensor: Tensor, target: int) -> Transfer:
        seconds = tensor.numel() * tensor.itemsize / self.bytes_per_s
        self.messages += seconds
        through = self.sent = max(self.sent, self.now) + seconds

        def wait() -> None:
            self.stalled += max(0.0, through - self.now)
            self.now = max(self.now, through)

        return Transfer(tensor, wait)


def sharded(parameters: Parameters, dp: Any) -> tuple[ShardedGradients, dict[str, int]]:
    """On tensors that hold nothing, of the first of eight ranks; the number of each parameter."""
    layout = Layout.on(range(DP), dp=DP)
    flat, place = shard(parameters, layout.parallelism, 0, 0), layout.coordinates(0)
    trained: Any = SimpleNamespace(
        layout=flat,
        parameters=parameters,
        flat=SimpleNamespace(device=torch.device("meta")),
        sum_over_tp=lambda parts: None,
        sum_over_ends=lambda parts: None,
    )
    team: Any = SimpleNamespace(dp=dp, layout=layout, coordinates=place)
    share = Share.of(flat, [(start, stop) for _, start, stop in flat.entries], layout.parallelism, place)
    numbers = {block.param.name: number for number, (block, _, _) in enumerate(flat.entries)}
    return ShardedGradients(trained, team, share, torch.float32), numbers


def backward(shape: dict[str, Any], bytes_per_s: float, arrivals: list[str]) -> Simulated:
    """Of one micro-batch, without embedding and head, until its last gradient has come."""
    whole = decoder_parameters(layers=LAYERS, vocabulary=1024, tied=True, **shape)
    parameters = Parameters(tuple(param for param in whole.params if param.layer is not None))
    streams = Simulated(bytes_per_s)
    collected, numbers = sharded(parameters, SimpleNamespace(index=0, begin_reduce=streams.begin_reduce))
    sizes = {param.name: param for param in parameters.params}
    for layer in reversed(range(LAYERS)):
        for name in arrivals:
            param = sizes[f"model.layers.{layer}.{name}"]
            if len(param.shape) > 1:
                streams.compute(4 * TOKENS * param.num_elements / FLOPS)  # gradients of inputs and of weights
            collected.take(numbers[param.name], torch.empty(param.shape, dtype=torch.bfloat16, device="meta"))
    assert streams.messages * bytes_per_s == pytest.approx(4 * parameters.num_elements), "all are on their way"
    return streams


@pytest.mark.parametrize("shape", [LLAMA_7B, QWEN_7B, QWEN_05B], ids=["7B", "7B, wide", "0.5B"])
@pytest.mark.parametrize("gigabytes_per_s", [200, 40])
def test_a_backward_does_not_wait_for_its_messages(shape, gigabytes_per_s, arrivals):
    """Of 7B a layer computes 20 ms, and its gradients take 4 ms at 200 GB/s, 20 at 40."""
    found = backward(shape, gigabytes_per_s * 1e9, arrivals)
    if shape is LLAMA_7B:
        assert (found.computed, found.messages * gigabytes_per_s) == pytest.approx((0.1224, 4.857), rel=1e-3)
    assert found.stalled <= (0.001 if gigabytes_per_s == 200 else 0.1) * found.computed


def test_with_two_rooms_it_would(arrivals, monkeypatch):
    """Of the six runs of a matrix four are waited for: two thirds of the messages of an MLP, half of those of the
    attention, are not hidden."""
    monkeypatch.setattr(gradients, "num_rooms", lambda largest: 2)
    found = backward(LLAMA_7B, 200e9, arrivals)
    assert found.stalled == pytest.approx(0.54 * found.messages, rel=0.02)


def test_a_slow_link_is_always_busy(arrivals):
    """Messages of 194 ms behind 122 ms of products: what is not hidden is what cannot be."""
    found = backward(LLAMA_7B, 25e9, arrivals)
    first = 4 * TOKENS * LLAMA_7B["hidden"] * LLAMA_7B["intermediate"] / FLOPS
    assert found.sent == pytest.approx(first + found.messages, rel=1e-3)


def test_no_run_waits_for_what_comes_behind_it(arrivals, monkeypatch):
    """Of a layer larger than a run each matrix is summed when it comes: three of 1536 elements, then those of the
    attention, 512 + 512 and 1024 + 1024 as they stand side by side; both norms at its end, as that of the inputs comes
    last."""
    assert (arrivals[0], arrivals[-1]) == ("mlp.down_proj.weight", "input_layernorm.weight")
    shape: dict[str, Any] = {"hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8}
    parameters = decoder_parameters(layers=2, vocabulary=64, tied=True, **shape)
    for module in (gradients, memory):
        monkeypatch.setattr(module, "RUN_ELEMENTS", 1500)
    begun: list[int] = []
    reduce = lambda tensor, target: begun.append(tensor.numel()) or Transfer(tensor, lambda: None)
    collected, numbers = sharded(parameters, SimpleNamespace(index=0, begin_reduce=reduce))
    summed = []
    for name in ["model.norm.weight", *(f"model.layers.1.{of}" for of in arrivals)]:
        shape_of = next(param.shape for param in parameters.params if param.name == name)
        collected.take(numbers[name], torch.empty(shape_of, device="meta"))
        summed.append((name.split(".")[-2], sum(begun)))
        begun.clear()
    assert summed == [
        ("norm", 32),
        *(("down_proj", 1536), ("up_proj", 1536), ("gate_proj", 1536), ("post_attention_layernorm", 0)),
        *(("o_proj", 1024), ("v_proj", 0), ("k_proj", 1024), ("q_proj", 1024), ("input_layernorm", 64)),
    ]


def test_layers_that_are_smaller_than_a_run_are_summed_together(monkeypatch):
    """Layers of 7,744 elements, the last norm among them; and all of them."""
    shape: dict[str, Any] = {"hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8}
    params = decoder_parameters(layers=4, vocabulary=64, tied=True, **shape).params
    assert runs_of(params) == (range(38),)
    monkeypatch.setattr(gradients, "RUN_ELEMENTS", 16_000)
    assert runs_of(params) == (range(19, 38), range(1, 19), range(1))


def test_every_parameter_is_in_one_run(monkeypatch):
    """Whatever stands where: biases between matrices, layers of vectors alone, a head behind the layers."""
    shapes = [(40, 32), (32, 32), (32,), (16, 32), (32,), (32,), (8,), (64, 32), (8,), (32,), (128, 32)]
    layers = [None, 0, 0, 0, 0, 1, 1, 2, 2, None, None]
    params = [Param(str(at), shape, layer) for at, (shape, layer) in enumerate(zip(shapes, layers, strict=True))]
    for run_elements in (1, 40, 600, 1024, 1100, 1700, 3000, 10_000):
        monkeypatch.setattr(gradients, "RUN_ELEMENTS", run_elements)
        runs = runs_of(params)
        assert sorted(at for run in runs for at in run) == list(range(11))
        lowest = [min((layers[at] for at in run if layers[at] is not None), default=3) for run in runs if run[0]]
        assert all(before >= after for before, after in pairwise(lowest)), "as `settle` takes them"
    assert runs_of([]) == ()


def test_rooms_follow_the_largest_matrix_of_a_layer():
    """Runs of 8,388,608 elements: 4096 · 11008 are six of them, 3584 · 18944 nine; one more is filled meanwhile."""
    assert [num_rooms(size) for size in (0, 1, 1 << 23, (1 << 23) + 1)] == [2, 2, 2, 3]
    assert [num_rooms(size) for size in (4096 * 11008, 3584 * 18944, 8192 * 29568)] == [7, 10, 16]


def test_the_largest_matrix_of_a_layer_is_known_without_its_blocks():
    """Embeddings do not count; with two ways and two stages those of each stage's layers."""
    parameters = decoder_parameters(
        layers=4, hidden=64, intermediate=96, heads=6, kv_heads=3, head_dim=16, vocabulary=512, dense={3: 200}
    )
    layout = Layout.on(range(4), tp=2, pp=2)
    for tp in range(2):
        found = stage_largest(parameters, layout.parallelism, tp)
        assert found == (64 * 48, 64 * 100) if tp == 0 else found
        assert found == tuple(largest_in_layers(shard(parameters, layout.parallelism, tp, pp)) for pp in range(2))
