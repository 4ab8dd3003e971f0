"""One GRPO step by plait: the traced flow over the engine and the trainers that `plait train` runs it on."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from grpo.measure import Channel, Ready, StepReport, Stopwatch, max_rss_bytes
from grpo.workload import KL_COEF, LEARNING_RATE, MAX_GRAD_NORM, Workload, reward_of
from plait.algorithms.grpo import GRPOOptions, grpo
from plait.data.computing import evaluate
from plait.data.records import Prompt
from plait.data.rows import FloatArray, Rows
from plait.dataflow import CallKind, Node, Score, trace
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.backbone_model import copy_of
from plait.models.language_loading import load_model
from plait.training.mini_batch import LossCall, LossTerm
from plait.training.settings import OptimizerSettings
from plait.training.trainer import Trainer
from plait.training.trainer_settings import ExecutionSettings, SampleSettings, UpdateSettings

MICRO_BATCH_TOKENS = 4096


class Side:
    """The roles of a step, and the step."""

    def __init__(self, workload: Workload, watch: Stopwatch) -> None:
        self.workload = workload
        self.watch = watch
        self.flow = trace(grpo, roles=("actor", "ref", "reward"), options=GRPOOptions(kl_coef=KL_COEF))
        model = load_model(workload.model, dtype=workload.dtype, device=workload.device)
        self.sampling = SamplingSettings(max_response_tokens=workload.max_response_tokens)
        # As a run decides it (`plait.cost.idle_away`): of a model this small there is room for all on a GPU.
        self.engine = Engine(model, self.sampling, keep_memory=workload.device == "cuda")
        execution = ExecutionSettings(MICRO_BATCH_TOKENS)
        samples = SampleSettings(self.sampling.temperature, workload.max_response_tokens)
        self.actor = Trainer(
            model,
            execution,
            samples,
            UpdateSettings(
                OptimizerSettings(learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM), workload.num_steps
            ),
        )
        self.ref = Trainer(copy_of(model), execution, samples, role="ref")
        self.scored_tokens = self.trained_tokens = 0

    def step(self, step: int) -> StepReport:
        """Run the nodes of the graph in order, as the runtime does."""
        self.scored_tokens = self.trained_tokens = 0
        self.watch.restart()
        rows = Rows(())
        for node in self.flow.nodes:
            match node.kind:
                case CallKind.GENERATE:
                    with self.watch.phase("generation"):
                        rows = self._generate(step)
                case CallKind.SCORE if node.role == "ref":
                    with self.watch.phase("reference"):
                        rows = rows.with_column(node.outputs[0], self._score(rows))
                case CallKind.SCORE:
                    scores = [reward_of(list(sample.token_ids)) for sample in rows.samples]
                    rows = rows.with_column(node.outputs[0], scores)
                case CallKind.COMPUTE:
                    rows = rows.with_column(node.outputs[0], evaluate(node, {node.rows: rows}))
                case CallKind.TRAIN:
                    self._train(node, rows, step)
        self.engine.update_weights(step + 1)
        return StepReport(
            self.watch.stop(),
            [len(sample.prompt.token_ids) for sample in rows.samples],
            [len(sample.token_ids) for sample in rows.samples],
            self.scored_tokens,
            self.trained_tokens,
        )

    def _generate(self, step: int) -> Rows:
        work = self.workload
        count = len(work.prompts)
        for i in range(count):
            prompt = Prompt(step * count + i, work.prompts[i], work.prompt_token_ids[i])
            self.engine.add(
                Request(
                    prompt,
                    work.samples_per_prompt,
                    self.sampling.sampling(),
                    NoiseKey(seed=0, rollout=step),
                    work.response_lengths[i],
                )
            )
        return Rows(tuple(drain(self.engine))).ordered()

    def _score(self, rows: Rows) -> FloatArray:
        actions = self.ref.score(rows, Score.LOGPROBS)
        while True:
            try:
                self.scored_tokens += next(actions).tokens
            except StopIteration as end:
                return end.value

    def _train(self, node: Node, rows: Rows, step: int) -> None:
        how = node.training
        term = LossTerm(rows, LossCall.of(node), how.mini_batches, how.epochs)
        actions = self.actor.train([term], step=step)
        while True:
            self.watch.enter("training")
            done = next(actions, None)
            self.watch.leave("other" if done is None else "optimizer" if done.kind == "STEP" else "training")
            if done is None:
                return
            self.trained_tokens += done.tokens


def main() -> None:
    channel = Channel()
    imported = max_rss_bytes()
    workload = Workload.load(Path(sys.argv[1]))
    torch.set_num_threads(workload.threads)
    side = Side(workload, Stopwatch())
    channel.send(Ready(imported, max_rss_bytes()))
    for step in range(workload.num_steps):
        channel.wait()
        channel.send(side.step(step))


if __name__ == "__main__":
    main()
