"""DPO, KTO, distillation, reward model and SFT against TRL 1.16's own trainers and collators on the same data: loss,
gradients, metrics. Slow to import.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plait.algorithms.distill import DistillOptions, distill
from plait.algorithms.dpo import DPOOptions, dpo, pair_losses
from plait.algorithms.kto import KTOOptions, kto, reference_point
from plait.algorithms.reward_model import RewardModelOptions, reward_model
from plait.algorithms.sft import SFTOptions, sft
from plait.data.examples import Given
from plait.data.mismatched import mismatched
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import Column, Level, Score, Top
from plait.models.files.saving import save_pretrained
from plait.models.language_model import LanguageModel
from plait.models.scalar_loading import scalar_of
from plait.models.scalar_model import ScalarModel
from tests.algorithms.flows import loss_of
from tests.models.tiny import tiny, tiny_model, tiny_tokenizer
from tests.training.batches import evaluate, make_trainer, run_all, scorer, train
from tests.training.exact import ExactFloat64
from tests.training.gradients import assert_equal_gradients

pytest.importorskip("trl")

FAMILY = "qwen2"  # untied head, biases
REF_SEED = 7
PAIRS = 5
REF = Column("ref_logprobs", Level.TOKEN, 1, 0)
VOCABULARY = 320
IDS = Column("ids", Level.TOKEN, 2, 0, width=VOCABULARY)
TOP = Column("top", Level.TOKEN, 2, 0, width=VOCABULARY + 1)
LABEL = Column("label", Level.SAMPLE, 0, 0)
DESIRABLE, KL = (Column(name, Level.BATCH, node, node) for node, name in enumerate(("desirable", "kl"), 5))


def pairs() -> tuple[Rows, list[dict[str, list[int]]]]:
    """The same pairs as rows, chosen first, and as TRL's examples. No two lengths are equal in every pair."""
    rng = np.random.default_rng(0)
    samples, examples = [], []
    for uid in range(PAIRS):
        prompt = Prompt(10 + uid, "", tuple(rng.integers(3, 300, rng.integers(2, 9)).tolist()))
        both = [tuple(rng.integers(3, 300, rng.integers(1, 12)).tolist()) for _ in range(2)]
        samples += [Sample(prompt, i, ids, (), "", FinishReason.STOP, -1) for i, ids in enumerate(both)]
        examples.append(
            {
                "prompt_ids": list(prompt.token_ids),
                "chosen_ids": list(both[0]),
                "rejected_ids": list(both[1]),
            }
        )
    return Rows(tuple(samples)), examples


def trainer_of(model: LanguageModel | ScalarModel, **options: Any) -> Any:
    """Micro-batches of a few pairs, so that the loss is summed over several of them."""
    return make_trainer(model, temperature=1.0, micro_batch_tokens=60, **options)


def settings(tmp_path: Any) -> dict[str, Any]:
    return {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}


@pytest.fixture(scope="module")
def trl_dpo(tmp_path_factory):
    """TRL's trainer, never run beyond its loss."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    text = {name: ["a"] * 2 for name in ("prompt", "chosen", "rejected")}
    trl = DPOTrainer(
        model=tiny(FAMILY),
        ref_model=tiny(FAMILY, seed=REF_SEED),
        args=DPOConfig(**settings(tmp_path_factory.mktemp("trl"))),
        train_dataset=Dataset.from_dict(text),
        processing_class=tiny_tokenizer(),
    )
    trl.model.train()
    return trl


@pytest.mark.parametrize(
    ("loss_type", "smoothing", "beta"),
    [
        ("sigmoid", 0.0, 0.1),
        ("sigmoid_norm", 0.0, 2.0),
        ("hinge", 0.0, 0.05),
        ("ipo", 0.0, 0.3),
        ("robust", 0.1, 0.1),
        ("exo_pair", 0.1, 0.1),
        ("nca_pair", 0.0, 0.1),
        ("bco_pair", 0.0, 0.1),
        ("sppo_hard", 0.0, 0.3),
        ("apo_zero", 0.0, 0.1),
        ("apo_down", 0.0, 0.1),
    ],
)
def test_dpo_equals_trl(trl_dpo, loss_type, smoothing, beta):
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    rows, examples = pairs()
    trl_dpo.loss_types, trl_dpo.beta, trl_dpo.label_smoothing = [loss_type], beta, smoothing
    trl_dpo.model.zero_grad()
    trl_dpo._metrics["train"].clear()
    trainer, reference = (trainer_of(tiny_model(FAMILY, seed=seed)) for seed in (0, REF_SEED))
    loss = loss_of(dpo, DPOOptions(beta=beta, loss_type=loss_type, label_smoothing=smoothing))
    with ExactFloat64():
        expected = trl_dpo._compute_loss(trl_dpo.model, DataCollatorForPreference(pad_token_id=0)(examples), False)
        expected.backward()
        rows = rows.with_column(REF, run_all(reference.score(rows, Score.LOGPROBS))[1])
        columns = {"ref_logprobs": REF}
        _, metrics = run_all(train(trainer, rows, columns, loss, whole_groups=True))
    # TRL's head works in float32 even for a float64 model.
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert_equal_gradients(trainer, trl_dpo.model, 1e-5)
    logged = trl_dpo._metrics["train"]
    for name in ("chosen", "rejected", "accuracies", "margins"):
        assert metrics[f"rewards/{name}"] == pytest.approx(logged[f"rewards/{name}"][0], rel=1e-4), name
    for name in ("chosen", "rejected"):
        assert metrics[f"logps/{name}"] == pytest.approx(logged[f"logps/{name}"][0], rel=1e-5), name
    assert 0 < metrics["rewards/accuracies"] < 1


def test_losses_without_a_reference_equal_trls():
    """SimPO, CPO and ORPO: what TRL's trainers make of the log-probs of two pairs, averaged over tokens or summed."""
    from types import SimpleNamespace

    import torch
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    chosen, rejected = torch.tensor([-1.5, -0.4]), torch.tensor([-2.0, -0.1])
    given = {"alpha": 0.0, "label_smoothing": 0.0, "accelerator": SimpleNamespace(device="cpu")}
    cpo = SimpleNamespace(beta=2.0, simpo_gamma=0.7, loss_type="simpo", **given)
    theirs = CPOTrainer.cpo_loss(cpo, chosen, rejected)[0]
    simpo = DPOOptions(loss_type="sigmoid_norm", reference_free=True, beta=2.0, margin=0.7)
    torch.testing.assert_close(pair_losses(chosen, rejected, simpo), theirs)
    cpo.loss_type = "sigmoid"
    theirs = CPOTrainer.cpo_loss(cpo, chosen, rejected)[0]
    torch.testing.assert_close(pair_losses(chosen, rejected, DPOOptions(reference_free=True, beta=2.0)), theirs)
    orpo = SimpleNamespace(beta=0.3, **given)
    theirs = -ORPOTrainer.odds_ratio_loss(orpo, chosen, rejected)[0]
    mine = pair_losses(chosen, rejected, DPOOptions(loss_type="orpo", reference_free=True, beta=0.3))
    torch.testing.assert_close(mine, theirs)


def test_smoothed_labels_are_not_trls(trl_dpo):
    """TRL's sigmoid loss leaves `label_smoothing` out; ours is conservative DPO. With h = log-ratio of the chosen less
    that of the rejected one, and ε = 0.2: ours is 0.8 · −log σ(β h) + 0.2 · −log σ(−β h), TRL's is −log σ(β h)."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    rows, examples = pairs()
    trl_dpo.loss_types, trl_dpo.beta, trl_dpo.label_smoothing = ["sigmoid"], 0.1, 0.2
    trainer, reference = (trainer_of(tiny_model(FAMILY, seed=seed)) for seed in (0, REF_SEED))
    with ExactFloat64():
        theirs = trl_dpo._compute_loss(trl_dpo.model, DataCollatorForPreference(pad_token_id=0)(examples), False).item()
        rows = rows.with_column(REF, run_all(reference.score(rows, Score.LOGPROBS))[1])
        policy = run_all(trainer.score(rows, Score.LOGPROBS))[1]
        found = {
            smoothing: run_all(
                evaluate(
                    trainer,
                    rows,
                    {"ref_logprobs": REF},
                    loss_of(dpo, DPOOptions(label_smoothing=smoothing)),
                    whole_groups=True,
                )
            )[1]["actor/loss"]
            for smoothing in (0.0, 0.2)
        }
    sums = [part.sum() for part in np.split(policy - rows.columns[REF], rows.offsets[1:-1])]
    logits = 0.1 * (np.array(sums[::2]) - np.array(sums[1::2]))
    right, wrong = np.log1p(np.exp(-logits)), np.log1p(np.exp(logits))
    assert theirs == pytest.approx(right.mean(), rel=1e-5)
    assert found[0.0] == pytest.approx(theirs, rel=1e-5)
    assert found[0.2] == pytest.approx((0.8 * right + 0.2 * wrong).mean(), rel=1e-9)
    assert abs(found[0.2] - theirs) > 0.005


@pytest.fixture(scope="module", params=[(0, REF_SEED), (REF_SEED, 0)], ids=["far from it", "clamped"])
def trl_kto(request, tmp_path_factory):
    """TRL's trainer, never run beyond its loss, and the seeds of policy and reference: there and back."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    text = {"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]}
    policy, reference = (tiny(FAMILY, seed=seed) for seed in request.param)
    trl = KTOTrainer(
        model=policy,
        ref_model=reference,
        args=KTOConfig(**settings(tmp_path_factory.mktemp("trl"))),
        train_dataset=Dataset.from_dict(text),
        processing_class=tiny_tokenizer(),
    )
    trl.model.train()
    return trl, request.param


KTO_CASES = {
    "kto": (KTOOptions(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5), [1, 0, 0, 1, 0]),
    "one label": (KTOOptions(), [1, 1, 1, 1, 1]),
    "apo_zero_unpaired": (KTOOptions(loss_type="apo_zero_unpaired", beta=0.2), [0, 0, 1, 1, 0]),
}


@pytest.mark.parametrize("case", KTO_CASES)
def test_kto_equals_trl(trl_kto, case):
    """Also where the estimate of the KL is below 0. TRL's is that of a micro-batch of one process, here all of it."""
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    (trl, seeds), (options, labels) = trl_kto, KTO_CASES[case]
    both, examples = pairs()
    own = [sample for sample in both.samples if sample.index == 0]
    theirs = [
        {"prompt_ids": of["prompt_ids"], "completion_ids": of["chosen_ids"], "label": bool(label)}
        for of, label in zip(examples, labels, strict=True)
    ]
    has_kl = options.loss_type == "kto"
    if has_kl:  # as `_prepare_dataset` of KTOTrainer rotates them
        theirs = [one | {"KL_completion_ids": theirs[i - 1]["completion_ids"]} for i, one in enumerate(theirs)]
    trl.loss_type, trl.beta, trl.calculate_KL = options.loss_type, options.beta, has_kl
    trl.desirable_weight, trl.undesirable_weight = options.desirable_weight, options.undesirable_weight
    trl.model.zero_grad()
    trl._metrics["train"].clear()
    trainer, reference = (trainer_of(tiny_model(FAMILY, seed=seed)) for seed in seeds)
    with ExactFloat64():
        batch = DataCollatorForUnpairedPreference(pad_token_id=0)(theirs)
        expected = trl._compute_loss(trl.model, batch, False)
        expected.backward()
        z0 = reference_point_of(own, trainer, reference)
        metrics = trained_by_kto(own, labels, trainer, reference, options, z0 if has_kl else None)
    # TRL's head works in float32 even for a float64 model.
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert_equal_gradients(trainer, trl.model, 1e-5)
    logged = trl._metrics["train"]
    if has_kl:
        assert z0 == pytest.approx(logged["kl"][0], rel=1e-5)
        assert (z0 > 0.1) == (seeds[0] == 0)
    names = [f"{what}/{side}" for what in ("rewards", "logps") for side in ("chosen", "rejected")] + ["rewards/margins"]
    assert {name for name in names if name in logged} == {name for name in names if name in metrics}
    for name in logged.keys() & set(names):
        assert metrics[name] == pytest.approx(logged[name][0], rel=1e-4), name


def reference_point_of(own: list[Sample], policy: Any, reference: Any) -> float:
    """z₀ of these responses, from the same prompts with completions of others."""
    given = [Given(sample, (1.0,) * len(sample.token_ids)) for sample in own]
    rows = Rows(tuple(other.sample for other in mismatched(given, 1000)))
    of_each = [
        np.split(run_all(model.score(rows, Score.LOGPROBS))[1], rows.offsets[1:-1]) for model in (policy, reference)
    ]
    return reference_point(*of_each, [np.ones(len(sample.token_ids)) for sample in rows.samples])


def trained_by_kto(
    own: list[Sample], labels: list[int], policy: Any, reference: Any, options: KTOOptions, z0: float | None
) -> dict[str, float]:
    """The metrics of a step of KTO."""
    rows = Rows(tuple(own)).with_column(LABEL, labels)
    rows = rows.with_column(REF, run_all(reference.score(rows, Score.LOGPROBS))[1])
    columns = {"ref_logprobs": REF, "label": LABEL, "desirable": DESIRABLE}
    values = {DESIRABLE: np.array(np.mean(labels))}
    if z0 is not None:
        columns["kl"], values[KL] = KL, np.array(z0)
    return run_all(train(policy, rows, columns, loss_of(kto, options), batch_values=values))[1]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_equals_trl(beta, monkeypatch):
    """Over the whole vocabulary at a temperature, with a wider teacher: the divergence of TRL's GKD from full logits,
    and that of its DistillationTrainer from hidden states, which is float32."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    rows, _ = pairs()
    wider = {"seed": REF_SEED, "hidden_size": 48}
    policy, reference, temperature = tiny(FAMILY), tiny(FAMILY, **wider), 0.1
    assert policy.config.vocab_size == VOCABULARY
    trainer = make_trainer(tiny_model(FAMILY), temperature=temperature, micro_batch_tokens=60)
    options = DistillOptions(beta=beta, top_k=VOCABULARY)
    with ExactFloat64():
        top = run_all(scorer(tiny_model(FAMILY, **wider), 60, temperature).score(rows, Top(VOCABULARY)))[1]
        rows = rows.with_column(IDS, top[:, :VOCABULARY]).with_column(TOP, top[:, VOCABULARY:])
        columns = {"teacher_ids": IDS, "teacher_logprobs": TOP}
        _, metrics = run_all(train(trainer, rows, columns, loss_of(distill, options)))
        own, its = (torch.cat([said(module, sample) for sample in rows.samples]) for module in (policy, reference))
        logits = policy.lm_head(own), reference.lm_head(its).detach()
        expected = GKDTrainer.generalized_jsd_loss(
            *logits, beta=beta, temperature=temperature, num_items_in_batch=rows.num_tokens
        )
        expected.backward()
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=1e-9)
    assert_equal_gradients(trainer, policy, 1e-9)
    heads = policy.lm_head.weight, reference.lm_head.weight
    mask = torch.ones(1, len(own))
    chunked, entropies, count = _chunked_divergence_loss(
        own[None], its[None], *heads, mask, beta, temperature=temperature
    )
    assert metrics["actor/loss"] == pytest.approx(chunked.item(), rel=1e-5)
    assert metrics["actor/entropy"] == pytest.approx(float(entropies / count), rel=1e-5)


def test_the_loss_of_gkd_is_at_temperature_1(monkeypatch):
    """Whatever the `temperature` that its trainer samples at."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    rows, _ = pairs()
    sample = max(rows.samples, key=lambda sample: sample.num_tokens)
    policy, reference = tiny(FAMILY), tiny(FAMILY, seed=REF_SEED)
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.token_ids]])
    labels = ids.clone()
    labels[:, : len(sample.prompt.token_ids)] = -100
    trl = SimpleNamespace(teacher_model=reference, beta=0.3, temperature=0.1)
    trl.generalized_jsd_loss = GKDTrainer.generalized_jsd_loss
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    trainer = trainer_of(tiny_model(FAMILY))
    with ExactFloat64():
        expected = GKDTrainer.compute_loss(trl, policy, inputs)
        top = run_all(scorer(tiny_model(FAMILY, seed=REF_SEED), 60, 1.0).score(Rows((sample,)), Top(VOCABULARY)))[1]
        given = Rows((sample,)).with_column(IDS, top[:, :VOCABULARY]).with_column(TOP, top[:, VOCABULARY:])
        columns = {"teacher_ids": IDS, "teacher_logprobs": TOP}
        loss = loss_of(distill, DistillOptions(beta=0.3, top_k=VOCABULARY))
        _, metrics = run_all(train(trainer, given, columns, loss))
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=1e-9)


def said(module: Any, sample: Sample) -> torch.Tensor:
    """Hidden states that predict the tokens of a response."""
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.token_ids]])
    return module.model(input_ids=ids, use_cache=False).last_hidden_state[0, len(sample.prompt.token_ids) - 1 : -1]


@pytest.mark.parametrize(
    ("centre", "margin", "dtype"),
    [(0.0, 0.0, torch.float64), (0.01, 0.5, torch.float64), (0.01, 0.5, torch.float32)],
)
def test_the_reward_model_equals_trl(tmp_path, centre, margin, dtype):
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer
    from trl.trainer.reward_trainer import DataCollatorForPreference

    rows, examples = pairs()
    model = scalar_of(tiny_model(FAMILY, dtype=dtype), seed=3, head_std=0.2)
    save_pretrained(model, tmp_path / "model")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype=dtype)
    args = RewardConfig(**settings(tmp_path), center_rewards_coefficient=centre or None)
    text = {name: ["a"] * 2 for name in ("chosen", "rejected")}
    trl = RewardTrainer(
        model=theirs, args=args, train_dataset=Dataset.from_dict(text), processing_class=tiny_tokenizer()
    )
    trl.model.train()
    whole = [{f"{kind}_ids": e["prompt_ids"] + e[f"{kind}_ids"] for kind in ("chosen", "rejected")} for e in examples]
    columns = {}
    if margin:  # half of it in the options, the rest in a column of the data, another for each pair
        margins = [margin + 0.1 * place for place in range(len(whole))]
        whole = [example | {"margin": own} for example, own in zip(whole, margins, strict=True)]
        columns = {"margin": Column("margin", Level.SAMPLE, 0, 0)}
        rows = rows.with_column(columns["margin"], [margins[s.prompt.uid - 10] - margin / 2 for s in rows.samples])
    trainer = trainer_of(model, role="reward")
    loss = loss_of(reward_model, RewardModelOptions(margin=margin / 2, center_rewards_coefficient=centre), "reward")
    with ExactFloat64():
        expected = trl.compute_loss(trl.model, DataCollatorForPreference(pad_token_id=0)(whole))
        expected.backward()
        _, metrics = run_all(train(trainer, rows, columns, loss, whole_groups=True))
    tolerance = 1e-7 if dtype is torch.float64 else 1e-5
    assert metrics["reward/loss"] == pytest.approx(expected.item(), rel=tolerance)
    assert_equal_gradients(trainer, trl.model, 10 * tolerance)
    logged = trl._metrics["train"]
    for name in ("accuracy", "margin", "mean_reward"):
        assert metrics[f"reward/{name}"] == pytest.approx(logged[name][0], rel=1e-4), name
    assert 0 < metrics["reward/accuracy"] < 1


def test_sft_equals_the_cross_entropy_of_transformers():
    """The loss that TRL's SFT trainer takes from the model: labels −100 where nothing is to be learnt."""
    rows, examples = pairs()
    mask = Column("trained", Level.TOKEN, 0, 0)
    trained = np.random.default_rng(1).integers(0, 2, rows.num_tokens).astype(float)
    module = tiny(FAMILY)
    parts = iter(np.split(trained, rows.offsets[1:-1]))
    ids, labels = [], []
    for example in examples:
        for kind in ("chosen_ids", "rejected_ids"):
            ids.append(torch.tensor(example["prompt_ids"] + example[kind]))
            kept = np.append(np.zeros(len(example["prompt_ids"])), next(parts))
            labels.append(torch.where(torch.tensor(kept) > 0, ids[-1], -100))
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    attention = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    trainer = trainer_of(tiny_model(FAMILY))
    with ExactFloat64():
        expected = module(input_ids=padded, attention_mask=attention, labels=targets).loss
        expected.backward()
        _, metrics = run_all(
            train(
                trainer,
                rows.with_column(mask, trained),
                {},
                loss_of(sft, SFTOptions()),
                mini_batches=1,
                epochs=1,
                step=0,
                mask=mask,
            )
        )
    assert metrics["actor/loss"] == pytest.approx(expected.item(), rel=1e-9)
    assert metrics["actor/nll"] == pytest.approx(expected.item(), rel=1e-9)
    assert_equal_gradients(trainer, module, 1e-9)


def half_greedy(module: Any, prompt: tuple[int, ...], length: int, rng: np.random.Generator) -> tuple[int, ...]:
    """A response of which about every other token is the likeliest."""
    ids = list(prompt)
    for _ in range(length):
        with torch.no_grad():
            likeliest = int(module(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(likeliest if rng.random() < 0.5 else int(rng.integers(3, 300)))
    return tuple(ids[len(prompt) :])


def test_token_accuracy_equals_trl(tmp_path):
    """Over trained tokens, in several micro-batches."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rng, module = np.random.default_rng(3), tiny(FAMILY)
    mask = Column("trained", Level.TOKEN, 0, 0)
    samples, ids, labels, trained = [], [], [], []
    for uid, length in enumerate((3, 9, 1, 12, 7)):
        prompt = Prompt(uid, "", tuple(rng.integers(3, 300, rng.integers(2, 9)).tolist()))
        response = half_greedy(module, prompt.token_ids, length, rng)
        samples.append(Sample(prompt, 0, response, (), "", FinishReason.STOP, -1))
        trained.append(rng.random(length) < 0.7)
        ids.append(torch.tensor(prompt.token_ids + response))
        kept = torch.tensor([False] * len(prompt.token_ids) + trained[-1].tolist())
        labels.append(torch.where(kept, ids[-1], -100))
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }
    trl = SFTTrainer(
        model=module,
        args=SFTConfig(**settings(tmp_path)),
        train_dataset=Dataset.from_dict({"text": ["a"] * 2}),
        processing_class=tiny_tokenizer(),
    )
    trl.model.train()
    rows = Rows(tuple(samples)).with_column(mask, np.concatenate(trained).astype(float))
    trainer = make_trainer(tiny_model(FAMILY), temperature=1.0, micro_batch_tokens=16)
    with ExactFloat64():
        trl.compute_loss(trl.model, batch)
        loss = loss_of(sft, SFTOptions())
        _, metrics = run_all(train(trainer, rows, {}, loss, mask=mask))
    [expected] = trl._metrics["train"]["mean_token_accuracy"]
    assert 0.2 < expected < 0.8
    assert metrics["actor/mean_token_accuracy"] == pytest.approx(expected, rel=1e-6)
