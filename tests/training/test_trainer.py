"""The trainer: gradients against an independent computation, invariance to every split, bits, state, metrics."""

from __future__ import annotations

import functools
import itertools
import random
from functools import partial

import numpy as np
import pytest
import torch

from plait.algorithms.grpo import GRPOOptions, group_advantages, grpo
from plait.algorithms.losses import Aggregation
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import Score, Top
from plait.errors import RunError
from plait.kernels import fused_rows
from plait.models.compute.head_chunks import Buffers
from plait.training.trainer import Trainer
from tests.algorithms import oracle
from tests.algorithms.flows import loss_of
from tests.cases import slow_but
from tests.models.tiny import tiny, tiny_llama
from tests.training.batches import (
    ADVANTAGES,
    MAX_RESPONSE_TOKENS,
    OLD,
    REF,
    make_trainer,
    random_rows,
    run_all,
    scorer,
    train,
    with_policy_columns,
)

TEMPERATURE = 0.7
OPTIONS = GRPOOptions(kl_coef=0.05, clip_low=0.2, clip_high=0.28)
COLUMNS = {"advantages": ADVANTAGES, "old_logprobs": OLD, "ref_logprobs": REF}


def eager_logprobs(module, sample: Sample) -> torch.Tensor:
    """[response tokens], see `eager_all`."""
    logprobs, ids = eager_all(module, sample), torch.tensor(sample.token_ids, dtype=torch.int64)
    return logprobs[torch.arange(len(ids)), ids]


def eager_all(module, sample: Sample) -> torch.Tensor:
    """[response tokens, vocabulary]: one sample alone through Transformers' own eager forward, full logits."""
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.token_ids]])
    logits = module(input_ids=ids).logits[0] / TEMPERATURE
    first = len(sample.prompt.token_ids)
    places = torch.arange(first - 1, ids.shape[1] - 1)
    return logits[places].log_softmax(-1)


def prepared(**kwargs) -> Rows:
    rows = random_rows(empty=True, **kwargs)
    with torch.no_grad():
        exact = torch.cat([eager_logprobs(tiny(), sample) for sample in rows.samples]).numpy()
    return with_policy_columns(rows, exact)


def gradients(rows: Rows, options: GRPOOptions = OPTIONS, **trainer_options) -> tuple[torch.Tensor, dict[str, float]]:
    """The flat gradient of one optimizer step over all rows, and the metrics."""
    trainer = make_trainer(tiny_llama(torch.float64), **trainer_options)
    _, metrics = run_all(train(trainer, rows, COLUMNS, loss_of(grpo, options)))
    return trainer.optimizer.gradients, metrics


@pytest.fixture(scope="module")
def whole():
    """`gradients` of an aggregation by one micro-batch, computed once."""

    def of(aggregation: Aggregation) -> tuple[torch.Tensor, dict[str, float]]:
        return gradients(prepared(), OPTIONS.model_copy(update={"aggregation": aggregation}), micro_batch_tokens=10_000)

    return functools.cache(of)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to 1e-10 of the largest entry, in float64."""
    assert expected.abs().max() > 1e-3, "the gradient must not be trivial"
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("aggregation", slow_but([Aggregation.TOKEN_MEAN], Aggregation))
def test_gradients_equal_an_independent_computation(aggregation, exact_float64):
    """Each sample alone through the eager model; loss and its slopes from the oracle; torch only for the chain rule."""
    rows = prepared()
    module = tiny()
    logprobs = [eager_logprobs(module, sample) for sample in rows.samples]
    lengths = [len(sample.token_ids) for sample in rows.samples]
    split = np.cumsum(lengths)[:-1]
    loss, slopes = oracle.grpo(
        [part.tolist() for part in logprobs],
        [part.tolist() for part in np.split(rows.columns[OLD], split)],
        [part.tolist() for part in np.split(rows.columns[REF], split)],
        rows.columns[ADVANTAGES].tolist(),
        low=0.2,
        high=0.28,
        kl_coef=0.05,
        estimator="k3",
        aggregation=aggregation.value,
        limit=MAX_RESPONSE_TOKENS,
    )
    torch.cat(logprobs).backward(torch.tensor([slope for sample in slopes for slope in sample], dtype=torch.float64))
    found, metrics = gradients(rows, OPTIONS.model_copy(update={"aggregation": aggregation}))
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-10)
    for block, start, stop in tiny_llama().layout.entries:
        assert_close(found[start:stop].view(block.shape), module.get_parameter(block.param.name).grad)
    norm = sum(float(p.grad.norm()) ** 2 for p in module.parameters()) ** 0.5
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-10)


SPLITS = [23, 1, 64]
"""Packed tokens of a forward: 1 has each sample alone, so that no prompt is shared."""
FEW_SPLITS = [(Aggregation.SEQUENCE_MEAN, SPLITS[0])]
"""The other aggregations, and samples alone, are in test_masks_and_pairs.py, with a mask and more."""


@pytest.mark.parametrize(
    ("aggregation", "split"), slow_but(FEW_SPLITS, itertools.product(Aggregation, SPLITS)), ids=str
)
def test_neither_gradient_nor_metric_depends_on_the_split(aggregation, split, exact_float64, whole):
    expected, whole_metrics = whole(aggregation)
    options = OPTIONS.model_copy(update={"aggregation": aggregation})
    found, metrics = gradients(prepared(), options, micro_batch_tokens=split)
    assert_close(found, expected)
    for name in set(metrics) - {"training/tokens_computed"}:
        assert metrics[name] == pytest.approx(whole_metrics[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("budget", slow_but([1000], [100, 1000]))
def test_what_all_prompts_begin_with_is_computed_once_and_changes_nothing(budget, exact_float64):
    rows = prepared(root=40)
    expected, whole_metrics = gradients(rows, micro_batch_tokens=budget)
    found, metrics = gradients(rows.with_root(), micro_batch_tokens=budget)
    assert_close(found, expected)
    computed = "training/tokens_computed"
    assert metrics[computed] < whole_metrics[computed]
    if budget == 1000:
        assert metrics[computed] == whole_metrics[computed] - 3 * 40, "four prompts, one forward"
    for name in set(metrics) - {computed}:
        assert metrics[name] == pytest.approx(whole_metrics[name], rel=1e-9, abs=1e-12), name
    for rows_of in (rows, rows.with_root()):
        trainer = scorer(tiny_llama(torch.float64), budget, TEMPERATURE)
        _, logprobs = run_all(trainer.score(rows_of, Score.LOGPROBS))
        exact = torch.cat([eager_logprobs(tiny(), sample) for sample in rows.samples]).detach().numpy()
        np.testing.assert_allclose(logprobs, exact, rtol=1e-10, atol=1e-10)


def test_checkpointed_activations_change_no_bit():
    rows = prepared()
    plain, plain_metrics = gradients(rows, micro_batch_tokens=40)
    found, metrics = gradients(rows, micro_batch_tokens=40, checkpoint_activations=True)
    assert torch.equal(found, plain)
    assert metrics == plain_metrics


@pytest.mark.skipif(not fused_rows.AVAILABLE, reason="no numba, or a CPU without AVX2")
def test_logits_stay_where_activations_do(monkeypatch: pytest.MonkeyPatch):
    """So they are computed once, else again in the backward; to the bit the same."""
    rows, counts, found = prepared(), [], []
    logits = Buffers.logits
    monkeypatch.setattr(Buffers, "logits", lambda buffers, hidden_CH: counts.append(1) or logits(buffers, hidden_CH))
    for checkpoint in (False, True):
        counts.clear()
        trainer = make_trainer(tiny_llama(torch.bfloat16), micro_batch_tokens=40, checkpoint_activations=checkpoint)
        run_all(train(trainer, rows, COLUMNS, loss_of(grpo, OPTIONS)))
        found.append((len(counts), trainer.optimizer.gradients.clone()))
    (once, kept), (again, computed) = found
    assert again == 2 * once > 2
    assert torch.equal(kept, computed)


def test_nothing_depends_on_the_order_of_arrival():
    """Bit for bit: rows are put in order before anything is computed."""
    rows = prepared()
    shuffled = rows.select(random.Random(1).sample(range(len(rows)), len(rows)))
    states = []
    for given in (rows, shuffled):
        trainer = make_trainer(tiny_llama(torch.float32))
        loss = loss_of(grpo, OPTIONS)
        _, metrics = run_all(train(trainer, given, COLUMNS, loss, mini_batches=3, epochs=2, step=5))
        _, logprobs = run_all(trainer.score(given, Score.LOGPROBS))
        order = [(s.prompt.uid, s.index) for s in given.samples]
        by_sample = dict(zip(order, np.split(logprobs, given.offsets[1:-1]), strict=True))
        states.append((trainer.optimizer.state()["masters"], metrics, {k: v.tolist() for k, v in by_sample.items()}))
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1:] == states[1][1:]


def test_scoring_equals_the_eager_model(exact_float64):
    rows = random_rows(empty=True)
    with torch.no_grad():
        expected = torch.cat([eager_logprobs(tiny(), sample) for sample in rows.samples]).numpy()
        all_RV = torch.cat([eager_all(tiny(), sample) for sample in rows.samples])
    for budget in (1, 40, 1000):
        model = tiny_llama(torch.float64)
        trainer = scorer(model, budget, TEMPERATURE)
        _, entropies = run_all(trainer.score(rows, Score.ENTROPIES))
        np.testing.assert_allclose(entropies, -(all_RV.exp() * all_RV).sum(-1), rtol=1e-10, atol=1e-10)
        values_R3, ids_R3 = all_RV.topk(3)
        _, top = run_all(trainer.score(rows, Top(3)))
        np.testing.assert_array_equal(top[:, :3], ids_R3)
        rest_R = 1 - values_R3.exp().sum(-1, keepdim=True)
        np.testing.assert_allclose(top[:, 3:], torch.cat([values_R3, rest_R.log()], 1), rtol=1e-10, atol=1e-10)
        done, logprobs = run_all(trainer.score(rows, Score.LOGPROBS))
        np.testing.assert_allclose(logprobs, expected, rtol=1e-10, atol=1e-10)
        assert {record.kind for record in done} == {"SCORE"}
        assert [record.action for record in done] == [f"ref.logprobs/mb{i}" for i in range(len(done))]
        assert not any(param.requires_grad for param in model.module.parameters())
    assert done[0].tokens == sum(len(rows.samples[g[0]].prompt.token_ids) for g in rows.groups.values()) + len(expected)


def test_scoring_and_training_share_one_forward():
    """The first ratio is exactly 1 (at a temperature other than 1), also in float32."""
    rows = random_rows()
    trainer = make_trainer(tiny_llama(torch.float32))
    _, logprobs = run_all(trainer.score(rows, Score.LOGPROBS))
    ratios = []

    def loss(batch, old_logprobs):
        ratios.append((batch.logprobs.detach() - old_logprobs).exp())
        return batch.aggregate(batch.logprobs, "token-mean")

    run_all(train(trainer, rows.with_column(OLD, logprobs), {"old_logprobs": OLD}, loss))
    assert torch.cat(ratios).tolist() == [1.0] * rows.num_tokens


def test_columns_stand_beside_their_tokens():
    """A SAMPLE column is spread to its sample's tokens, a TOKEN column follows its tokens, in any split and draw."""
    rows = random_rows(empty=True)
    marks = np.array([s.prompt.uid + s.index / 10 for s in rows.samples])
    tokens = np.concatenate([np.array(s.token_ids, dtype=float) for s in rows.samples])
    rows = rows.with_column(ADVANTAGES, marks).with_column(OLD, tokens)
    samples = {s.prompt.uid + s.index / 10: s for s in rows.samples}
    trainer = make_trainer(tiny_llama(torch.float64), micro_batch_tokens=50)
    seen: list[tuple[float, float, float]] = []

    def loss(batch, advantages, old_logprobs):
        seen.extend(zip(advantages.tolist(), old_logprobs.tolist(), batch.sampling_logprobs.tolist(), strict=True))
        return batch.aggregate(batch.logprobs, "token-mean")

    columns = {"advantages": ADVANTAGES, "old_logprobs": OLD}
    run_all(train(trainer, rows, columns, loss, mini_batches=2, epochs=1, step=0))
    assert len(seen) == rows.num_tokens
    for mark, sample in samples.items():
        mine = [(token, logprob) for m, token, logprob in seen if m == mark]
        assert mine == list(zip(sample.token_ids, sample.logprobs, strict=True))


def test_actions_and_counts():
    # Two groups of 3-token prompts and responses of 4 and 5: 3 + 9 = 12 packed tokens each, and 2 · (3+4 + 3+5) = 30.
    samples = [
        Sample(Prompt(uid, "", (5, 6, 7)), index, (8,) * length, (-1.0,) * length, "", FinishReason.STOP)
        for uid in (1, 2)
        for index, length in ((0, 4), (1, 5))
    ]
    rows = Rows(tuple(samples)).with_column(ADVANTAGES, np.ones(4))
    trainer = make_trainer(tiny_llama(torch.float64), micro_batch_tokens=12, total_optimizer_steps=4, schedule="linear")
    loss = loss_of(grpo, GRPOOptions())
    generator = train(
        trainer, rows, {"advantages": ADVANTAGES}, loss, mini_batches=2, epochs=2, step=0, name="a.train#2"
    )
    done, metrics = run_all(generator)
    assert [(record.action, record.kind, record.tokens) for record in done] == [
        (f"a.train#2/b{batch}/{what}", kind, tokens)
        for batch in range(4)
        for what, kind, tokens in (("mb0", "TRAIN", 12), ("step", "STEP", 0))
    ]
    assert metrics["training/optimizer_steps"] == 4
    assert metrics["training/skipped_steps"] == 0
    assert metrics["training/tokens_computed"] == 2 * 24
    assert metrics["training/tokens_unshared"] == 2 * 30
    assert metrics["actor/lr"] == pytest.approx(1e-3 / 4)
    assert 0 < metrics["actor/entropy"] <= np.log(320)
    assert metrics["actor/pg_clipfrac"] == 0


def test_metrics_are_means_over_optimizer_steps():
    rows = random_rows(num_prompts=2)
    trainer = make_trainer(tiny_llama(torch.float64))
    calls = []

    def loss(batch):
        calls.append(len(calls) + 1)
        batch.log("x", torch.full_like(batch.logprobs, float(calls[-1])))
        return batch.aggregate(batch.logprobs, "token-mean")

    _, metrics = run_all(train(trainer, rows, {}, loss, mini_batches=2, epochs=1, step=0))
    assert calls == [1, 2]
    assert metrics["x"] == 1.5, "1 on every token of the first step, 2 on every token of the second"


def test_the_comparison_is_made_before_the_first_step():
    """Log-probs recorded at the initial weights agree with the first forward, though the weights move a lot later."""
    rows = random_rows()
    trainer = make_trainer(tiny_llama(torch.float64), learning_rate=0.1)
    _, logprobs = run_all(trainer.score(rows, Score.LOGPROBS))
    flat = iter(logprobs.tolist())
    samples = [
        Sample(s.prompt, s.index, s.token_ids, tuple(next(flat) for _ in s.token_ids), "", s.finish_reason)
        for s in rows.samples
    ]
    recorded = Rows(tuple(samples)).with_column(ADVANTAGES, rows.columns[ADVANTAGES])
    loss = loss_of(grpo, GRPOOptions())
    _, metrics = run_all(train(trainer, recorded, {"advantages": ADVANTAGES}, loss, mini_batches=2, epochs=2, step=0))
    assert metrics["training/rollout_probs_diff_max"] < 1e-12
    assert metrics["training/rollout_ess"] == pytest.approx(1)


def steps(trainer: Trainer, numbers: range) -> list[dict[str, float]]:
    loss, columns = loss_of(grpo, GRPOOptions()), {"advantages": ADVANTAGES}
    twice = {"mini_batches": 2, "epochs": 2}
    return [run_all(train(trainer, random_rows(seed=step), columns, loss, step=step, **twice))[1] for step in numbers]


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.float32, torch.bfloat16, torch.float64]))
def test_a_state_continues_bit_for_bit(dtype):
    options = {"schedule": "cosine", "warmup_steps": 3, "total_optimizer_steps": 16, "weight_decay": 0.01}
    straight = make_trainer(tiny_llama(dtype), **options)
    steps(straight, range(2))
    saved = {name: tensor.clone() for name, tensor in straight.optimizer.state().items()}
    expected = steps(straight, range(2, 4))
    resumed = make_trainer(tiny_llama(dtype, seed=9), **options)
    resumed.optimizer.load_state(saved)
    assert steps(resumed, range(2, 4)) == expected
    assert torch.equal(resumed.model.weights, straight.model.weights)
    for name, tensor in straight.optimizer.state().items():
        assert torch.equal(tensor, resumed.optimizer.state()[name]), name


def test_the_same_run_gives_the_same_bits():
    first, second = (make_trainer(tiny_llama(torch.bfloat16)) for _ in range(2))
    assert steps(first, range(2)) == steps(second, range(2))
    assert torch.equal(first.optimizer.state()["masters"], second.optimizer.state()["masters"])


def test_a_step_that_is_not_finite_is_skipped_and_counted():
    rows = random_rows()
    trainer = make_trainer(tiny_llama(torch.float32), max_skipped_steps=3)
    before = trainer.optimizer.state()["masters"].clone()
    made = []

    def loss(batch, bad):
        made.append(1)
        scale = float("nan") if len(made) in bad else 1.0
        return batch.aggregate(batch.logprobs * scale, "token-mean")

    whole = {"micro_batch_tokens": 10_000}
    trainer = make_trainer(tiny_llama(torch.float32), max_skipped_steps=3, **whole)
    _, metrics = run_all(train(trainer, rows, {}, partial(loss, bad={1, 2}), mini_batches=2, epochs=2, step=0))
    assert metrics["training/skipped_steps"] == 2
    assert np.isfinite(list(metrics.values())).all(), "skipped steps are no part of the means"
    assert not torch.equal(trainer.optimizer.state()["masters"], before)
    assert trainer.optimizer.state()["masters"].isfinite().all()
    made.clear()
    with pytest.raises(RunError, match="3 optimizer steps in a row"):
        run_all(train(trainer, rows, {}, partial(loss, bad={1, 2, 3}), mini_batches=2, epochs=2, step=0))


def test_an_abandoned_call_leaves_nothing_behind():
    rows = random_rows()
    loss = loss_of(grpo, GRPOOptions())
    results = []
    for abandon in (True, False):
        trainer = make_trainer(tiny_llama(torch.float32), micro_batch_tokens=30)
        if abandon:
            next(train(trainer, rows, {"advantages": ADVANTAGES}, loss))
        run_all(train(trainer, rows, {"advantages": ADVANTAGES}, loss))
        results.append(trainer.optimizer.state()["masters"])
    assert torch.equal(*results)


def test_no_rows_is_no_step():
    trainer = make_trainer(tiny_llama(torch.float32))
    done, metrics = run_all(
        train(trainer, Rows(()), {}, loss_of(grpo, GRPOOptions()), mini_batches=2, epochs=1, step=0)
    )
    assert done == []
    assert metrics["training/optimizer_steps"] == 0
    assert run_all(trainer.score(Rows(()), Score.LOGPROBS))[1].shape == (0,)


@pytest.mark.slow
def test_grpo_finds_the_rewarded_arm():
    """A bandit of two one-token answers: the rewarded one, at first unlikely, comes to be chosen nearly always."""
    trainer = make_trainer(tiny_llama(torch.float32), learning_rate=3e-3, temperature=1.0, total_optimizer_steps=60)
    arms = (40, 41)
    loss = loss_of(grpo, GRPOOptions())

    def pulls(step: int, chosen: tuple[int, ...] = arms) -> Rows:
        prompt = Prompt(step, "", (5, 6, 7))
        return Rows(tuple(Sample(prompt, i, (arm,), (0.0,), "", FinishReason.STOP) for i, arm in enumerate(chosen)))

    def probabilities() -> np.ndarray:
        return np.exp(run_all(trainer.score(pulls(0), Score.LOGPROBS))[1])

    start = probabilities()
    rewarded = int(np.argmin(start))
    for step in range(60):
        rows = pulls(step)
        rewards = np.array([float(i == rewarded) for i in range(2)])
        rows = rows.with_column(ADVANTAGES, group_advantages(rewards))
        run_all(train(trainer, rows, {"advantages": ADVANTAGES}, loss, mini_batches=1, epochs=1, step=step))
    end = probabilities()
    assert start[rewarded] < 0.05
    assert end[rewarded] > 0.9
    assert end[1 - rewarded] < start[1 - rewarded]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gradients_equal_those_of_the_cpu(exact_float64):
    from tests.models.tiny import tiny_model

    rows = prepared()
    expected, _ = gradients(rows)
    trainer = make_trainer(tiny_model("llama", dtype=torch.float64, device="cuda"))
    loss = loss_of(grpo, OPTIONS)
    run_all(train(trainer, rows, COLUMNS, loss))
    assert_close(trainer.optimizer.gradients.cpu(), expected)
    state = {name: tensor.cpu() for name, tensor in trainer.optimizer.state().items()}
    make_trainer(tiny_model("llama", dtype=torch.float64, device="cuda")).optimizer.load_state(state)
