"""Training on a GPU, without one: on tensors that hold nothing. Whatever waits for the device raises, or is found, but
for the places where a mini-batch and a scoring call end."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from plait.algorithms.critic import value_loss
from plait.algorithms.grpo import GRPOOptions, grpo
from plait.algorithms.losses import Ratio
from plait.algorithms.ppo import PPOOptions, ppo
from plait.data.experts import Experts
from plait.data.rows import Rows
from plait.data.supports import encoded
from plait.dataflow import Column, Level, Score
from plait.models.backbone import Backbone
from plait.models.compute import flash_plan, flex_plan, layer_kernels, rope, row_attention
from plait.models.compute.flash_plan import FlashPlan
from plait.models.head import Head
from plait.models.language_model import LanguageModel
from plait.models.lora import add_lora
from plait.models.lora_settings import LoraSettings
from plait.models.routers import Routers, sizes_of
from plait.models.scalar_loading import scalar_view
from plait.training import optimizer, scored_rows, tally
from plait.training.mini_batch import LossCall, LossTerm
from plait.training.trainer import Trainer
from tests.algorithms.flows import loss_of
from tests.cases import slow_but
from tests.kernels.row_stand_in import Calls, StandIn, stand_in
from tests.launches import GPU, Launches
from tests.models.compute import flash_stand_in
from tests.models.tiny import VOCAB_SIZE, tiny_model
from tests.training.batches import ADVANTAGES, OLD, REF, make_trainer, random_rows, run_all, scorer, token_mean, train

COLUMNS = {"advantages": ADVANTAGES, "old_logprobs": OLD, "ref_logprobs": REF}
MASK = Column("mask", Level.TOKEN, 5, 0)
VALUES = {"old_values": OLD, "returns": REF}
KL_COEF = Column("kl_coef", Level.BATCH, 6, 0)
Reads = list[int]
"""Tensors of each wait."""


def rows() -> Rows:
    drawn = random_rows(4, 4)
    rng = np.random.default_rng(0)
    for column in (OLD, REF):
        drawn = drawn.with_column(column, rng.normal(size=drawn.num_tokens) - 5)
    return drawn.with_column(MASK, (rng.random(drawn.num_tokens) < 0.8).astype(float))


def on_device(model: LanguageModel) -> LanguageModel:
    """The same model, its weights views of one buffer that holds nothing."""
    module, layout = copy.deepcopy(model.module), model.layout
    weights = torch.empty(layout.num_elements, dtype=model.dtype, device=GPU)
    new: dict[int, nn.Parameter] = {}
    for block, start, stop in layout.entries:
        view = weights[start:stop].view(block.shape)
        new[id(module.get_parameter(block.param.name))] = nn.Parameter(view, requires_grad=False)
    for owner in module.modules():
        vars(owner).pop("forward", None)  # ways of a CPU
        for name, param in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, new[id(param)])
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU))
    output, backbone = module.get_output_embeddings(), Backbone(module.base_model)
    backbone.last_mlp = getattr(module.base_model.layers[-1], "mlp", None)  # which is proven by numbers
    head = Head(output, (output.weight,), linear=True)
    return replace(model, module=module, weights=weights, head=head, backbone=backbone)


def kernel(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
    """Of the right shape, and differentiable: FlexAttention takes no such tensors."""
    groups = query.shape[1] // key.shape[1]
    out = query * key.repeat_interleave(groups, 1) * value.repeat_interleave(groups, 1)
    return out, SimpleNamespace(lse=out.sum(-1))


@pytest.fixture(params=["pieces", "flash", "flex"])
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """The waits of what is computed; each gives ones."""
    found: Reads = []

    def read(tensors: Sequence[Tensor]) -> list[np.ndarray]:
        assert all(tensor.device == GPU for tensor in tensors)
        found.append(len(tensors))
        return [np.ones(tensor.shape) for tensor in tensors]

    for module in (optimizer, scored_rows, tally):
        monkeypatch.setattr(module, "read", read)
    calls: Calls = []
    planned: list[FlashPlan] = []
    if request.param != "pieces":
        by_operator = flash_plan.Operators(gathered=flash_stand_in.gathered, folded=flash_stand_in.folded)
        monkeypatch.setattr(flash_plan, "OPERATORS", by_operator)  # torch's own, of which it knows the shapes
        monkeypatch.setattr(FlashPlan, "attend", noted(FlashPlan.attend, planned))
        monkeypatch.setattr(row_attention, "has_operator", lambda kind: request.param == "flash")
        monkeypatch.setattr(row_attention, "has_kernel", lambda kind: True)
        monkeypatch.setattr(row_attention, "is_proven", lambda *of: True)
        monkeypatch.setattr(flex_plan, "compiled", lambda: kernel)
        for module in (layer_kernels, rope):
            monkeypatch.setattr(module, "is_proven", lambda kind: True)
        stand_in(monkeypatch, StandIn(), calls, GPU.type)
    yield found
    computed = {"normalised", "gated_silu", "rotated"} <= set(calls)
    assert computed == (request.param != "pieces"), "norms, gates and rotations are computed by kernels, too"
    assert bool(planned) == (request.param == "flash")


def noted(attend: Callable[..., Tensor], by: list[FlashPlan]) -> Callable[..., Tensor]:
    def call(plan: FlashPlan, *given: Any) -> Tensor:
        by.append(plan)
        return attend(plan, *given)

    return call


def language() -> LanguageModel:
    return on_device(tiny_model("llama", dtype=torch.bfloat16))


def adapted() -> LanguageModel:
    pytest.importorskip("peft")
    return add_lora(language(), LoraSettings(rank=3), name="actor", seed=0)


def critic() -> Any:
    """Over adapted weights, as a critic without an adapter trains its head alone."""
    pytest.importorskip("peft")
    return add_lora(scalar_view(language(), seed=0), LoraSettings(rank=3), name="critic", seed=0)


def trainer_of(make: Callable[[], Any], **options: Any) -> Trainer:
    return make_trainer(make(), micro_batch_tokens=48, max_grad_norm=0.5, **options)


def trained(trainer: Trainer, columns: Any, loss: Any, **asked: Any) -> tuple[Launches, int]:
    """What two mini-batches launched, and how many micro-batches they had."""
    launches = Launches()
    with launches:
        done, _ = run_all(train(trainer, rows(), columns, loss, mini_batches=2, **asked))
    return launches, sum(one.kind == "TRAIN" for one in done)


QUICK = [
    ("pieces", Ratio.TOKEN, language, False),
    ("flash", Ratio.TOKEN, adapted, True),
    ("flex", Ratio.TOKEN, language, True),
    ("pieces", Ratio.SEQUENCE_MEAN, language, True),
    ("flash", Ratio.SEQUENCE_MEAN, adapted, False),
    ("flex", Ratio.SEQUENCE_MEAN, language, False),
]
"""Every two of a ratio, a model and activations that are kept or computed again: no code knows all three. Of attention
in pieces and by each kernel every two with a ratio and with activations; with a model in the tests below."""


@pytest.mark.parametrize(
    ("reads", "ratio", "make", "checkpoint"),
    slow_but(QUICK, itertools.product(("pieces", "flash", "flex"), Ratio, (language, adapted), (False, True))),
    indirect=["reads"],
)
def test_grpo_waits_for_the_device_where_mini_batches_end(
    reads: Reads, ratio: Ratio, make: Callable[[], Any], checkpoint: bool
) -> None:
    loss = loss_of(grpo, GRPOOptions(kl_coef=0.05, entropy_coef=0.01, ratio=ratio))
    launches, micros = trained(trainer_of(make, checkpoint_activations=checkpoint), COLUMNS, loss, mask=MASK)
    assert micros >= 4
    assert launches.waited == []
    assert len(reads) == 4, "of each mini-batch what it adds up to, and the norm of its gradient"


@pytest.mark.parametrize("reads", slow_but(["flash"], ["pieces", "flash", "flex"]), indirect=True)
def test_ppo_waits_for_the_device_where_mini_batches_end(reads: Reads) -> None:
    """With a coefficient that changes from step to step, which the loss compares with 0."""
    loss = loss_of(ppo, PPOOptions(kl_coef=0.05))
    columns = {"advantages": ADVANTAGES, "old_logprobs": OLD}
    launches, _ = trained(trainer_of(language), columns, loss)
    assert launches.waited == []
    assert len(reads) == 4
    columns = COLUMNS | {"kl_coef": KL_COEF}
    launches, _ = trained(trainer_of(language), columns, with_coefficient, batch_values={KL_COEF: np.asarray(0.1)})
    assert launches.waited == []
    assert len(reads) == 8


def with_coefficient(batch: Any, advantages: Any, old_logprobs: Any, ref_logprobs: Any, kl_coef: Any) -> Any:
    kl_R = batch.logprobs - ref_logprobs
    loss_R = -batch.logprobs * advantages
    return batch.aggregate(loss_R + kl_coef * kl_R if kl_coef > 0 else loss_R, "token-mean")


def test_a_critic_waits_for_the_device_where_mini_batches_end(reads: Reads) -> None:
    loss = partial(value_loss, value_clip=0.2)
    launches, micros = trained(trainer_of(critic, role="critic"), VALUES, loss)
    assert micros >= 4
    assert launches.waited == []
    assert len(reads) == 4


def with_supports(given: Rows) -> Rows:
    """Each token was drawn from two; of every third response from all."""

    def of(token: int) -> bytes:
        kept = np.zeros((1, VOCAB_SIZE), np.bool_)
        kept[0, [token, (token + 9) % VOCAB_SIZE]] = True
        return encoded(np.packbits(kept, axis=1, bitorder="little"), VOCAB_SIZE)[0]

    samples = (
        sample if place % 3 == 2 else replace(sample, supports=tuple(map(of, sample.token_ids)))
        for place, sample in enumerate(given.samples)
    )
    return replace(given, samples=tuple(samples))


def with_experts(given: Rows, model: LanguageModel) -> Rows:
    """Each token went to the first experts, in every layer."""
    width = sizes_of(model.config)[1]
    told = bytes(range(width)) * model.config.num_hidden_layers
    of = lambda sample: Experts(told * len(sample.prompt.token_ids), told * (len(sample.token_ids) - 1))
    return replace(given, samples=tuple(replace(sample, experts=of(sample)) for sample in given.samples))


def routed() -> LanguageModel:
    return on_device(tiny_model("qwen3_moe", dtype=torch.bfloat16))


@pytest.mark.parametrize("reads", slow_but(["flash"], ["pieces", "flash", "flex"]), indirect=True)
def test_what_tokens_were_drawn_from_waits_for_nothing(reads: Reads) -> None:
    trainer = trainer_of(language)
    launches = Launches()
    loss = loss_of(grpo, GRPOOptions(kl_coef=0.05, entropy_coef=0.01))
    with launches:
        run_all(train(trainer, with_supports(rows()), COLUMNS, loss, mini_batches=2))
    assert launches.waited == []
    assert len(reads) == 4


@pytest.mark.parametrize("reads", ["pieces"], indirect=True)
@pytest.mark.parametrize(("replays", "coefficient"), [(True, 0.01), (True, 0.0), (False, 0.01)])
def test_told_and_balanced_experts_wait_for_nothing(
    reads: Reads, replays: bool, coefficient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers are told on the device, and their sums are read with all else. Experts themselves ask for numbers."""
    weighed = lambda self, hidden_TH, chosen_TK, weights_TK: hidden_TH * weights_TK.sum(-1, keepdim=True)
    monkeypatch.setattr(Qwen3MoeExperts, "forward", weighed)
    monkeypatch.setattr(Routers, "check", lambda self, having: None)  # when a model is loaded
    trainer = trainer_of(routed, replays_experts=replays, router_aux_loss_coef=coefficient)
    launches, loss = Launches(), loss_of(grpo, GRPOOptions(kl_coef=0.05))
    given = with_experts(rows(), trainer.model)
    with launches:
        _, metrics = run_all(train(trainer, given, COLUMNS, loss, mini_batches=2))
    assert launches.waited == []
    assert len(reads) == 4
    assert ("actor/routed_otherwise" in metrics) == replays
    assert ("actor/expert_max_violation" in metrics) == (coefficient > 0)


RECURRENT = ["qwen3_5_text", "olmo_hybrid", "lfm2", "bamba", "falcon_h1"]


@pytest.mark.parametrize("reads", ["pieces"], indirect=True)
@pytest.mark.parametrize("family", slow_but(["qwen3_5_text"], RECURRENT))
def test_layers_that_keep_states_wait_for_nothing(reads: Reads, family: str) -> None:
    """Prompts with one response, and with several that go on from the state behind it."""
    make = lambda: on_device(tiny_model(family, dtype=torch.bfloat16))
    launches, micros = trained(trainer_of(make), COLUMNS, loss_of(grpo, GRPOOptions(kl_coef=0.05)), mask=MASK)
    assert micros >= 4
    assert launches.waited == []
    assert len(reads) == 4


@pytest.mark.parametrize("reads", ["flash"], indirect=True)
def test_losses_that_meet_wait_where_their_step_ends(reads: Reads) -> None:
    """For the sums of each, and for the norm of the one gradient."""
    trainer, launches = trainer_of(language), Launches()
    terms = [
        LossTerm(rows(), LossCall(loss_of(grpo, GRPOOptions(kl_coef=0.05)), COLUMNS), 2, 1),
        LossTerm(random_rows(2, 1, seed=1), LossCall(token_mean, {}), 2, 1),
    ]
    with launches:
        run_all(trainer.train(terms, step=0))
    assert launches.waited == []
    assert len(reads) == 6


SCORED = [(language, Score.LOGPROBS), (critic, Score.VALUES), (critic, Score.SCORE)]


@pytest.mark.parametrize(
    ("reads", "make", "what"),
    slow_but(
        [("flash", *SCORED[0]), ("pieces", *SCORED[0]), ("pieces", *SCORED[1]), ("flex", *SCORED[2])],
        [(how, *scored) for how in ("pieces", "flash", "flex") for scored in SCORED],
    ),
    indirect=["reads"],
)
def test_scoring_waits_for_the_device_where_it_ends(reads: Reads, make: Callable[[], Any], what: Score) -> None:
    launches, trainer = Launches(), scorer(make(), 48, 0.7)
    with launches:
        done, found = run_all(trainer.score(rows(), what))
    assert len(done) >= 4
    assert launches.waited == []
    assert reads == [len(done)]
    assert (found == 1).all()
