"""Tokens are trained by the experts that they had when they were drawn, with weights and gradients of the present
router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.data.experts import Experts
from plait.data.rows import Rows
from plait.dataflow import Score
from plait.errors import ModelError, RunError
from plait.models.model import Model
from plait.training.trainer import Trainer
from tests.models.tiny import tiny, tiny_model
from tests.training.batches import make_trainer, random_rows, run_all, token_mean, train
from tests.training.exact import ExactFloat64
from tests.training.gradients import assert_equal_gradients
from tests.training.routed import EXPERTS, TOP_K, routed_by, told, with_experts

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss"]


def rows_of(root: int = 0) -> Rows:
    """Groups that share prompts, whose prompts begin alike; one response is empty."""
    return with_experts(random_rows(4, 3, empty=True, root=root).with_root())


def trainer_of(model: Model, **options: Any) -> Trainer:
    return make_trainer(model, **{"micro_batch_tokens": 90, "replays_experts": True} | options)


def plain_losses(module: Any, family: str, rows: Rows) -> tuple[Tensor, Tensor]:
    """Of rows of one, by routers of the family's formula that are told where to go: the mean log-prob of response
    tokens, and the mean over samples of E Σ f P."""
    routers, sums, balances = routed_by(module, family), [], []
    for sample in rows.samples:
        for layer, router in enumerate(routers):
            router.told_TK = told(sample)[:, layer]
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.all_ids]])
        seen: list[tuple[Tensor, Tensor]] = []
        note = lambda _, __, out, seen=seen: seen.append((out[0].softmax(-1), out[2]))
        hooks = [router.register_forward_hook(note) for router in routers]
        start = len(sample.prompt.token_ids)
        said = (module(input_ids=ids, use_cache=False).logits[0, start - 1 : -1] / 0.7).log_softmax(-1)
        sums.append(said.gather(1, ids[0, start:, None]).sum())
        for hook in hooks:
            hook.remove()
        probs, used = (torch.cat(parts) for parts in zip(*seen, strict=True))
        chosen = torch.nn.functional.one_hot(used, EXPERTS).sum(1).to(probs.dtype)
        balances.append(EXPERTS * (chosen.mean(0) * probs.mean(0)).sum())
    return torch.stack(sums).sum() / rows.num_tokens, torch.stack(balances).mean()


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_a_plain_forward_over_these_experts(family: str, coefficient: float) -> None:
    """With the loss that balances experts, too: it counts the experts that computed."""
    module, rows = tiny(family), rows_of()
    with ExactFloat64():
        mean, balance = plain_losses(module, family, rows)
        (mean + coefficient * balance).backward()
        trainer = trainer_of(tiny_model(family), router_aux_loss_coef=coefficient)
        metrics = run_all(train(trainer, rows, {}, token_mean))[1]
    assert metrics["actor/loss"] == pytest.approx(float(mean.detach()), rel=1e-12)
    if coefficient:
        assert metrics["actor/router_aux_loss"] == pytest.approx(float(balance.detach()), rel=1e-12)
    for router in [module for module in module.modules() if type(module).__name__ == "Told"]:
        assert router.router.weight.grad.abs().max() > 0, "gradients reach the router"
    for name, param in list(module.named_parameters()):  # names without the wrapper
        plain = name.replace(".gate.router.", ".gate.").replace(".router.router.", ".router.")
        if plain != name:
            owner, leaf = plain.rsplit(".", 1)
            module.get_submodule(owner).register_parameter(leaf, param)
    assert_equal_gradients(trainer, module, 1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_tokens": 30},
        {"micro_batch_tokens": 1000},
        {"checkpoint_activations": True},
        {"checkpoint_activations": True, "router_aux_loss_coef": 0.3},
    ],
    ids=str,
)
def test_however_samples_are_cut_and_activations_kept(options: dict[str, Any]) -> None:
    rows = rows_of(root=9)
    balances = {"router_aux_loss_coef": options.get("router_aux_loss_coef", 0.0)}
    expected, found = trainer_of(tiny_model("qwen3_moe"), **balances), trainer_of(tiny_model("qwen3_moe"), **options)
    theirs, mine = (run_all(train(trainer, rows, {}, token_mean))[1] for trainer in (expected, found))
    assert mine["actor/loss"] == pytest.approx(theirs["actor/loss"], rel=1e-12)
    assert torch.allclose(found.optimizer.gradients, expected.optimizer.gradients, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_scores_are_of_these_experts_too(dtype: torch.dtype) -> None:
    """Old log-probs and those of training are the same numbers, to the bit: also where the last MLP would compute only
    what is read."""
    rows, seen = rows_of(root=9), []

    def kept(batch: Any) -> Tensor:
        seen.append(batch.logprobs.detach().double())
        return token_mean(batch)

    trainer = trainer_of(tiny_model("qwen3_moe", dtype=dtype), micro_batch_tokens=1000)
    scored = run_all(trainer.score(rows, Score.LOGPROBS))[1]
    free = run_all(make_trainer(trainer.model, micro_batch_tokens=1000).score(rows, Score.LOGPROBS))[1]
    run_all(train(trainer, rows, {}, kept))
    assert torch.equal(torch.cat(seen), torch.from_numpy(scored)[trained_order(rows)])
    assert abs(free - scored).max() > 0.1, "routers by themselves choose others"


def trained_order(rows: Rows) -> Any:
    return rows.token_places(rows.order)


def own_choices(model: Model, rows: Rows) -> Rows:
    """The rows, of which each token went where the model's routers send it."""

    class Heard:
        def __init__(self) -> None:
            self.layers: dict[int, Tensor] = {}

        def chosen(self, layer: int, own_TK: Tensor) -> Tensor:
            self.layers[layer] = own_TK
            return own_TK

    from plait.data.packed import pack

    samples = []
    for sample in rows.samples:
        heard, batch = Heard(), pack([(sample.prompt.token_ids, [sample.all_ids])])
        with torch.no_grad():
            model.stage(batch, routing=heard)
        numbers_TW = torch.cat([own_TK for _, own_TK in sorted(heard.layers.items())], 1).to(torch.uint8)
        split = len(sample.prompt.token_ids)
        kept = Experts.of(numbers_TW[: max(split, len(numbers_TW) - 1)].numpy(), split)
        samples.append(replace(sample, experts=kept))
    return replace(rows, samples=tuple(samples))


def test_own_choices_change_no_bit() -> None:
    """And none of them would have been another; of random ones 5 in 6 would."""
    plain, rows = random_rows(4, 3, root=9).with_root(), rows_of(root=9)
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    free = make_trainer(tiny_model("qwen3_moe", dtype=torch.float32), micro_batch_tokens=1000, router_aux_loss_coef=0.1)
    replayed = trainer_of(model, micro_batch_tokens=1000, router_aux_loss_coef=0.1)
    expected = run_all(train(free, plain, {}, token_mean))[1]
    found = run_all(train(replayed, own_choices(model, plain), {}, token_mean))[1]
    assert found.pop("actor/routed_otherwise") == 0
    assert found == expected
    assert torch.equal(free.optimizer.gradients, replayed.optimizer.gradients)
    other = run_all(train(trainer_of(tiny_model("qwen3_moe")), rows, {}, token_mean))[1]
    assert other["actor/routed_otherwise"] == pytest.approx(5 / 6, abs=0.1), "of 6 pairs of 4 experts one is its own"


def test_who_has_other_routers_does_not_replay() -> None:
    rows = rows_of()
    plain = replace(rows, samples=tuple(replace(sample, experts=None) for sample in rows.samples))
    reference = make_trainer(tiny_model("qwen3_moe"), micro_batch_tokens=1000)
    scored = [run_all(reference.score(some, Score.LOGPROBS))[1] for some in (rows, plain)]
    assert (scored[0] == scored[1]).all()


def test_given_samples_beside_drawn_ones() -> None:
    """They have no experts, and routers send their tokens."""
    rows = rows_of()
    mixed = replace(
        rows,
        samples=tuple(replace(s, experts=None) if s.prompt.uid % 2 else s for s in rows.samples),
    )
    plain = replace(rows, samples=tuple(replace(sample, experts=None) for sample in rows.samples))
    trainer = trainer_of(tiny_model("qwen3_moe"), micro_batch_tokens=1000)
    of_mixed, of_all, of_none = (run_all(trainer.score(some, Score.LOGPROBS))[1] for some in (mixed, rows, plain))
    for place, sample in enumerate(rows.samples):
        at = rows.token_places([place])
        expected = of_none if sample.prompt.uid % 2 else of_all
        assert of_mixed[at] == pytest.approx(expected[at], rel=1e-9)


def test_samples_of_another_model_are_refused() -> None:
    rows = with_experts(random_rows(2, 2), layers=3)
    with pytest.raises(RunError, match=r"`sampling.router_replay`: samples were drawn by a model with other mixtures"):
        run_all(trainer_of(tiny_model("qwen3_moe")).score(rows, Score.LOGPROBS))


def test_families_whose_choice_cannot_be_told_are_refused() -> None:
    """DeepSeek-V2 weighs by scores of which it has set those outside the chosen groups to 0."""
    with pytest.raises(ModelError, match=r"in layer 1 experts that were told have no weight; set "):
        trainer_of(tiny_model("deepseek_v2", n_group=2, topk_group=1, topk_method="group_limited_greedy"))
    trainer_of(tiny_model("deepseek_v3", n_group=2, topk_group=1))
    assert TOP_K == 2
