"""One PPO step by the PPOTrainer of TRL 1.10. Runs in the peer's environment (setup_peer.sh), which has no plait.

The settings are TRL's defaults, but for what the workload fixes and what would cost TRL time; README.md lists each.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from grpo.measure import Channel, Ready, Stopwatch, max_rss_bytes
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from ppo.measure import PHASES, PPOStep
from ppo.workload import (
    CLIP_RANGE,
    EPOCHS,
    GAMMA,
    KL_COEF,
    LAMBDA,
    LEARNING_RATE,
    MINI_BATCHES,
    TEMPERATURE,
    VALUE_CLIP_RANGE,
    VALUE_COEF,
    Workload,
    digest,
)

MICRO_BATCH_SAMPLES = 8
PAD = "<pad>"


class Probe(TrainerCallback):
    """Starts, times and reports the steps of a trainer."""

    def __init__(self, channel: Channel, watch: Stopwatch) -> None:
        self._channel = channel
        self._watch = watch
        self._pad_token_id = -1
        self._trainer: Any = None
        self._begin()

    def _begin(self) -> None:
        self._is_training = False
        self.report = PPOStep({}, [], [], scored_tokens=0, trained_tokens=0)

    def attach(self, trainer: PPOTrainer, pad_token_id: int) -> None:
        """Time the trainer: what lies between generation and the first training micro-batch is scoring."""
        self._trainer, self._pad_token_id = trainer, pad_token_id
        generate, forward, get_reward = ppo_trainer.batch_generation, ppo_trainer.forward, ppo_trainer.get_reward
        accumulate, gather = trainer.accelerator.accumulate, trainer.accelerator.gather_for_metrics
        optimizer_step = trainer.optimizer.step

        def batch_generation(model: Any, queries: torch.Tensor, *args: Any) -> Any:
            with self._watch.phase("generation"):
                sequences, logits = generate(model, queries, *args)
            responses = sequences[:, queries.shape[1] :]
            self.report.prompt_lengths = (queries != pad_token_id).sum(1).tolist()
            self.report.response_lengths = (responses != pad_token_id).sum(1).tolist()
            self.report.prompt_digest = digest(queries.tolist())
            self._watch.enter("scoring")
            return sequences, logits

        def counted_forward(model: Any, sequences: torch.Tensor, *args: Any) -> Any:
            if model is trainer.ref_model:
                self.report.scored_tokens += sequences.numel()
            else:
                self.report.trained_tokens += 2 * sequences.numel()  # policy and value model in one
            return forward(model, sequences, *args)

        def counted_reward(model: Any, sequences: torch.Tensor, *args: Any) -> Any:
            self.report.scored_tokens += sequences.numel()
            return get_reward(model, sequences, *args)

        def micro_batch(*models: Any) -> Any:
            if not self._is_training:
                self._is_training = True
                self._watch.leave()
                self._watch.enter("training")
            return accumulate(*models)

        def gathered(*args: Any) -> Any:
            if self._is_training:
                self._is_training = False
                self._watch.leave()
            return gather(*args)

        def step(*args: Any, **kwargs: Any) -> Any:
            self.report.optimizer_steps += 2 * trainer.accelerator.sync_gradients  # of both models
            return optimizer_step(*args, **kwargs)

        ppo_trainer.batch_generation = batch_generation
        ppo_trainer.forward = counted_forward
        ppo_trainer.get_reward = counted_reward
        trainer.accelerator.accumulate = micro_batch
        trainer.accelerator.gather_for_metrics = gathered
        trainer.optimizer.step = step

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._channel.wait()
        self._watch.restart()

    def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        self.report.phases = self._watch.stop()
        self.report.max_rss_bytes = max_rss_bytes()
        self._channel.send(self.report)
        self._begin()
        if state.global_step < state.max_steps:
            self._channel.wait()
        # The trainer still clears up after its step: that is charged to the next one.
        self._watch.restart()


def build(workload: Workload, folder: str, probe: Probe) -> PPOTrainer:
    num_samples = len(workload.prompts)
    micro_batch = min(MICRO_BATCH_SAMPLES, num_samples)
    assert num_samples % micro_batch == 0, f"{num_samples} samples do not divide into micro-batches of {micro_batch}"
    if workload.peer_precision == "autocast":  # bf16=True does not reach the Accelerator that this trainer makes
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    config = PPOConfig(
        output_dir=folder,
        use_cpu=workload.device == "cpu",
        bf16=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_samples // micro_batch,
        local_rollout_forward_batch_size=num_samples,
        total_episodes=num_samples * workload.num_steps,
        num_ppo_epochs=EPOCHS,
        num_mini_batches=MINI_BATCHES,
        response_length=workload.response_tokens,
        temperature=TEMPERATURE,
        kl_coef=KL_COEF,
        cliprange=CLIP_RANGE,
        cliprange_value=VALUE_CLIP_RANGE,
        vf_coef=VALUE_COEF,
        gamma=GAMMA,
        lam=LAMBDA,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(workload.policy, padding_side="left")
    # TRL takes every pad token for padding, also one that was sampled; this one, as in its example, no model can say.
    tokenizer.add_special_tokens({"pad_token": PAD})
    # One batch more than is asked: in the last one of an epoch Accelerate steps after every micro-batch.
    queries = Dataset.from_dict(
        {"input_ids": [list(ids) for ids in workload.prompt_token_ids] * (workload.num_steps + 1)}
    )

    dtype = torch.bfloat16 if workload.peer_precision == "bfloat16" else torch.float32

    def scalar(name: str) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, dtype=dtype)

    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(workload.policy, dtype=dtype),
        ref_model=AutoModelForCausalLM.from_pretrained(workload.policy, dtype=dtype),
        reward_model=scalar(workload.reward),
        value_model=scalar(workload.value),
        train_dataset=queries,
        eval_dataset=queries,
        callbacks=[probe],
    )
    in_order = DataLoader(queries, batch_size=num_samples, collate_fn=trainer.data_collator)  # type: ignore[arg-type]
    trainer.dataloader = trainer.accelerator.prepare(in_order)
    probe.attach(trainer, tokenizer.pad_token_id)
    return trainer


def main() -> None:
    channel = Channel()
    imported = max_rss_bytes()
    workload = Workload.load(Path(sys.argv[1]))
    torch.set_num_threads(workload.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(workload, folder, Probe(channel, Stopwatch(PHASES)))
        channel.send(Ready(imported, max_rss_bytes()))
        trainer.train()


if __name__ == "__main__":
    main()
