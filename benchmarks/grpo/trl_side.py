"""One GRPO step by TRL's GRPOTrainer, with forced response lengths.

The settings are TRL's defaults, but for what the workload fixes and what would cost TRL time; README.md lists each.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo.measure import Channel, Ready, StepReport, Stopwatch, max_rss_bytes
from grpo.workload import KL_COEF, LEARNING_RATE, MAX_GRAD_NORM, Workload, reward_of

MICRO_BATCH_SAMPLES = 8


class ForcedLengths(LogitsProcessor):
    """Row i of the batch says EOS as its token lengths[i], and not before. TRL keeps the EOS as a response token."""

    def __init__(self, lengths: list[int], prompt_tokens: int, eos_token_ids: list[int]) -> None:
        self._prompt_tokens = prompt_tokens
        self._eos_token_ids = eos_token_ids
        self._ending: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            self._ending.setdefault(length, []).append(row)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self._eos_token_ids] = float("-inf")
        ending = self._ending.get(input_ids.shape[1] - self._prompt_tokens + 1)
        if ending is not None:
            scores[ending] = float("-inf")
            scores[ending, self._eos_token_ids[0]] = 0.0
        return scores


class Probe(TrainerCallback):
    """Starts, times and reports the steps of a trainer."""

    def __init__(self, channel: Channel, watch: Stopwatch) -> None:
        self._channel = channel
        self._watch = watch
        self.scored_tokens = self.trained_tokens = 0
        self.prompt_lengths: list[int] = []
        self.response_lengths: list[int] = []

    def attach(self, trainer: GRPOTrainer) -> None:
        """Time the trainer's own methods."""
        watch = self._watch
        trainer.training_step = watch.timed(trainer.training_step, "training")
        trainer._generate_and_score_completions = watch.timed(trainer._generate_and_score_completions, "other")
        trainer._clip_grad_norm = watch.timed(trainer._clip_grad_norm, "optimizer")
        generate, logprobs = trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies

        def generate_single_turn(prompt_ids: list[list[int]], *args: Any) -> Any:
            with watch.phase("generation"):
                completion_ids, rest = generate(prompt_ids, *args)
            self.prompt_lengths = [len(ids) for ids in prompt_ids]
            self.response_lengths = [len(ids) for ids in completion_ids]
            return completion_ids, rest

        def per_token_logps(model: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if model is not trainer.ref_model:
                self.trained_tokens += input_ids.numel()
                return logprobs(model, input_ids, *args, **kwargs)
            self.scored_tokens += input_ids.numel()
            with watch.phase("reference"):
                return logprobs(model, input_ids, *args, **kwargs)

        trainer._generate_single_turn = generate_single_turn  # type: ignore[assignment]
        trainer._get_per_token_logps_and_entropies = per_token_logps

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._channel.wait()
        self.scored_tokens = self.trained_tokens = 0
        self._watch.restart()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._watch.enter("optimizer")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._watch.leave()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        phases = self._watch.stop()
        report = StepReport(phases, self.prompt_lengths, self.response_lengths, self.scored_tokens, self.trained_tokens)
        self._channel.send(report)


def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [reward_of(ids) for ids in completion_ids]


def build(workload: Workload, folder: str, probe: Probe) -> GRPOTrainer:
    num_samples = len(workload.wanted_response_lengths)
    micro_batch = min(MICRO_BATCH_SAMPLES, num_samples)
    assert num_samples % micro_batch == 0, f"{num_samples} samples do not divide into micro-batches of {micro_batch}"
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=workload.device == "cpu",
        bf16=False,
        model_init_kwargs={"dtype": workload.dtype},
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_samples // micro_batch,
        num_generations=workload.samples_per_prompt,
        max_completion_length=workload.max_response_tokens,
        max_steps=workload.num_steps,
        beta=KL_COEF,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(workload.model, dtype=getattr(torch, workload.dtype))
    eos = model.generation_config.eos_token_id
    forced = ForcedLengths(
        workload.wanted_response_lengths, len(workload.prompt_token_ids[0]), eos if isinstance(eos, list) else [eos]
    )
    model.generate = partial(model.generate, logits_processor=LogitsProcessorList([forced]))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": list(workload.prompts)}),
        processing_class=AutoTokenizer.from_pretrained(workload.model, padding_side="left"),
        callbacks=[probe],
    )
    probe.attach(trainer)
    return trainer


def main() -> None:
    channel = Channel()
    imported = max_rss_bytes()
    workload = Workload.load(Path(sys.argv[1]))
    torch.set_num_threads(workload.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(workload, folder, Probe(channel, Stopwatch()))
        channel.send(Ready(imported, max_rss_bytes()))
        trainer.train()


if __name__ == "__main__":
    main()
