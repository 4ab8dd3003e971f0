"""Training with weights that are strided views in another's memory, bit for bit as with weights in a buffer of their
own; and generation with them."""

from __future__ import annotations

import torch

from plait.algorithms.grpo import GRPOOptions, grpo
from plait.data.records import Prompt
from plait.dataflow import Score
from plait.generation.engine import Engine
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.layout.mesh import Parallelism
from plait.layout.shards import shard
from plait.models.flat_weights import FlatWeights
from plait.models.language_model import LanguageModel
from plait.models.parallel.partial import cut_from, take_weights
from plait.models.parallel.team import Team
from plait.training.trainer import Trainer
from tests.algorithms.flows import loss_of
from tests.models.tiny import tiny_model
from tests.training.batches import ADVANTAGES, OLD, REF, make_trainer, random_rows, run_all, train, with_policy_columns

COLUMNS = {"advantages": ADVANTAGES, "old_logprobs": OLD, "ref_logprobs": REF}


def plain_model() -> LanguageModel:
    """Biases of some products, an untied head."""
    return tiny_model("qwen2", dtype=torch.bfloat16)


def nested_model() -> tuple[LanguageModel, list[torch.Tensor]]:
    """The same, its matrices columns of wider ones; and what they lie in."""
    model = plain_model()
    layout = shard(model.parameters, Parallelism(), 0, 0)
    hosts, views = [], []
    for block in layout.blocks:
        *outer, inner = block.shape
        wide = 2 * inner + 5 if outer else inner
        hosts.append(torch.full((*outer, wide), 3.0, dtype=torch.bfloat16))
        views.append(hosts[-1][..., inner : 2 * inner] if outer else hosts[-1])
    take_weights(model, Team.alone(), cut_from(model.module), "cpu", FlatWeights(layout, None, views))
    return model, hosts


def trained(model: LanguageModel, steps: int) -> tuple[Trainer, list[dict[str, float]]]:
    trainer = make_trainer(model, checkpoint_activations=True, max_grad_norm=0.5, weight_decay=0.1)
    metrics = []
    for step in range(steps):
        rows = random_rows(seed=step)
        rows = with_policy_columns(rows, run_all(trainer.score(rows, Score.LOGPROBS))[1])
        loss = loss_of(grpo, GRPOOptions.model_validate({}))
        metrics.append(run_all(train(trainer, rows, COLUMNS, loss, mini_batches=2, epochs=1, step=step))[1])
    return trainer, metrics


def test_training_is_that_of_one_buffer() -> None:
    model, hosts = nested_model()
    assert (model.nested is not None, model.weights.numel()) == (True, 0)
    assert not model.module.get_parameter("model.layers.0.mlp.down_proj.weight").is_contiguous()
    plain = plain_model()
    (nested, metrics), (alone, expected) = trained(model, 2), trained(plain, 2)
    assert metrics == expected
    assert torch.equal(model.trained.flat.flat("cpu"), plain.weights)
    state, other = nested.optimizer.state(), alone.optimizer.state()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[name], other[name]) for name in state)
    untouched = [host[..., : host.shape[-1] // 2 - 2] for host in hosts if host.ndim > 1]
    assert all((part == 3).all() for part in untouched), "what belongs to others stays as it is"
    again, _ = nested_model()
    resumed = make_trainer(again)
    resumed.optimizer.load_state({name: tensor.clone() for name, tensor in other.items()})
    assert torch.equal(again.trained.flat.flat("cpu"), plain.weights)


def test_generation_sees_new_weights() -> None:
    """A smaller part generates in the memory of a larger one that trains."""
    settings = SamplingSettings.model_validate({"max_response_tokens": 6})

    def said(engine: Engine, uid: int) -> tuple[int, ...]:
        engine.add(Request(Prompt(uid, "", (5, 6, 7)), 1, Sampling(max_tokens=6), NoiseKey(0)))
        while engine.has_work:
            if found := engine.step():
                return found[0].token_ids
        raise AssertionError("nothing was said")

    (model, hosts), plain = nested_model(), plain_model()
    engine, expected = Engine(model, settings), Engine(plain, settings)
    assert (first := said(engine, 1)) == said(expected, 1)
    version = model.weights_version
    head = model.layout.blocks.index(next(b for b in model.layout.blocks if b.param.name == "lm_head.weight"))
    hosts[head].neg_()
    plain.module.get_parameter("lm_head.weight").data.neg_()
    plain.weights.add_(0)
    assert model.weights_version > version
    assert said(engine, 2) == said(expected, 2) != first
