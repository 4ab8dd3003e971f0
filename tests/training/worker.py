"""The worker of the tests on several ranks: it trains its part of a tiny model, and says how far it is from one rank.

What one rank does alone is `reference`, computed by the test and read from a file by every worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from plait.algorithms.grpo import GRPOOptions, grpo
from plait.algorithms.losses import cross_entropy
from plait.algorithms.ppo import PPOOptions, ppo
from plait.data.rows import Rows
from plait.dataflow import Column, Level, Score, Top
from plait.errors import RunError
from plait.launch.worker_context import WorkerContext
from plait.layout.mesh import Cluster, Layout, Mesh, Parallelism
from plait.layout.shards import largest_in_layers
from plait.layout.zero_shares import tied_pieces
from plait.models.language_model import LanguageModel
from plait.models.lora import add_lora
from plait.models.lora_settings import LoraSettings
from plait.models.parallel.peers import Peers
from plait.models.parallel.team import Team, make_teams
from plait.models.scalar_loading import scalar_of
from plait.models.scalar_model import ScalarModel
from plait.models.weight_share import WeightShare
from plait.policy.packing import LEAST_ROOT
from plait.reallocation.saving import SavedFiles, loading, saving
from plait.schedule.action import Kind
from plait.schedule.fused import fused_order
from plait.schedule.plan import Placement
from plait.schedule.schedule import Schedule
from plait.schedule.work import Work
from plait.training import gradients, memory
from plait.training.mini_batch import LossCall, LossTerm
from plait.training.pipeline import execute
from plait.training.together import train_together
from plait.training.trainer import Trainer
from tests.algorithms.flows import loss_of
from tests.cases import examples
from tests.models.tiny import tiny_model
from tests.training.batches import (
    ADVANTAGES,
    OLD,
    REF,
    evaluate,
    make_trainer,
    random_rows,
    run_all,
    train,
    with_policy_columns,
)
from tests.training.routed import with_experts

STEPS = examples(1, 2)
"""Each of four optimizer steps, and scores before them."""
RETURNS = Column("returns", Level.TOKEN, 5, 0)
OLD_VALUES = Column("critic_values", Level.TOKEN, 6, 0)
MASK = Column("trained", Level.TOKEN, 7, 7)

MODELS: dict[str, dict[str, Any]] = {
    "tied": {"family": "llama", "num_hidden_layers": 4, "vocab_size": 323},
    "biased": {"family": "qwen2", "num_hidden_layers": 4},
    "experts": {"family": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [0]},
}
"""A tied embedding whose vocabulary divides by nothing; an untied one with biases of keys, which two ranks share; one
whose layers but the first are mixtures of experts, which are balanced."""

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "warmup_steps": 2,
    "total_optimizer_steps": 8,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "micro_batch_tokens": 100,
}


def actor_loss() -> Any:
    return loss_of(grpo, GRPOOptions(kl_coef=0.05))


def pair_loss(batch: Any, ref_logprobs: Tensor) -> Tensor:
    """Like DPO's: of pairs, so that groups stay whole."""
    margin_N = batch.per_sequence(batch.logprobs - ref_logprobs)
    chosen_P, rejected_P = batch.pairs(margin_N)
    batch.log("rewards/accuracies", (chosen_P > rejected_P).to(margin_N.dtype), per="pair")
    return batch.mean_over_pairs(torch.nn.functional.softplus(rejected_P - chosen_P))


def weighted(batch: Any, weights: Tensor) -> Tensor:
    return batch.aggregate(weights * batch.logprobs, "token-mean")


def score_loss(batch: Any, advantages: Tensor) -> Tensor:
    del advantages
    batch.log("score", batch.scores, per="sequence")
    return batch.mean_over_sequences((batch.scores - 1) ** 2)


CASES: dict[str, tuple[str, Any, dict[str, Column], dict[str, Any]]] = {
    "grpo": ("actor", actor_loss, {"advantages": ADVANTAGES, "old_logprobs": OLD, "ref_logprobs": REF}, {}),
    "pairs": ("actor", lambda: pair_loss, {"ref_logprobs": REF}, {"whole_groups": True}),
    "critic": (
        "critic",
        lambda: loss_of(ppo, PPOOptions(), "critic"),
        {"returns": RETURNS, "old_values": OLD_VALUES},
        {},
    ),
    "replayed": ("actor", actor_loss, {"advantages": ADVANTAGES, "old_logprobs": OLD, "ref_logprobs": REF}, {}),
    "scores": ("reward", lambda: score_loss, {"advantages": ADVANTAGES}, {}),
    "summed": ("actor", actor_loss, {"advantages": ADVANTAGES, "old_logprobs": OLD, "ref_logprobs": REF}, {}),
}
"""Role, loss, its columns, keys of LossCall. `summed` has a second loss, over other samples."""


ADAPTED = {"adapter": "tied", "biased adapter": "biased", "adapter of experts": "experts"}
"""Models that are trained by an adapter → what it is added to."""


def build(case: str, model: str, dtype: str, team: Team | None = None) -> LanguageModel | ScalarModel:
    """The model of a case: this rank's part of it, where there is a team that has it in parts."""
    if model in ADAPTED:
        return add_lora(build(case, ADAPTED[model], dtype, team), LoraSettings(rank=4), name=CASES[case][0], seed=0)
    whole = tiny_model(**MODELS[model], dtype=getattr(torch, dtype))
    read = whole if CASES[case][0] == "actor" else scalar_of(whole, seed=3)
    if team is None or (team.tp.size * team.pp.size == 1 and not team.layout.shards_weights):
        return read
    from plait.models.parallel.partial import part_of

    return part_of(read, team)


def trainer_of(case: str, model: LanguageModel | ScalarModel, team: Team | None = None, **options: Any) -> Trainer:
    balance = {"router_aux_loss_coef": 0.1} if hasattr(model.config, "router_aux_loss_coef") else {}
    replay = {"replays_experts": case == "replayed"}
    return make_trainer(model, role=CASES[case][0], team=team, **{**SETTINGS, **balance, **replay, **options})


def rows_of(case: str, step: int, prompts: int = 7) -> Rows:
    """Prompts that begin alike, with three samples, of pairs two; one response is empty."""
    pairs = CASES[case][3].get("whole_groups", False)
    rows = random_rows(prompts, 2 if pairs else 3, seed=step, empty=not pairs, root=LEAST_ROOT).with_root()
    rng = np.random.default_rng(step)
    for column in (RETURNS, OLD_VALUES):
        rows = rows.with_column(column, rng.normal(size=rows.num_tokens))
    return with_experts(rows, layers=3)  # of `MODELS["experts"]`; who does not replay them reads none


def terms_of(case: str, rows: Rows, step: int) -> list[LossTerm]:
    """What a case trains by: two mini-batches in two epochs."""
    _, loss, columns, asked = CASES[case]
    terms = [LossTerm(rows, LossCall(loss(), columns, name="actor.train" if case == "summed" else None, **asked), 2, 2)]
    if case == "summed":
        given = random_rows(3, 1, seed=100 + step)
        mask_R = np.random.default_rng(step).integers(0, 2, given.num_tokens).astype(float)
        call = LossCall(partial(cross_entropy, coef=0.3), {}, mask=MASK, temperature=1.0, name="actor.train#2")
        terms.append(LossTerm(given.with_column(MASK, mask_R), call, 2, 2))
    return terms


def exhausted(steps: Iterable[Any]) -> None:
    for _ in steps:
        pass


def run(
    case: str, trainer: Trainer, steps: Iterable[int] = range(STEPS)
) -> tuple[list[dict[str, float]], list[np.ndarray]]:
    """Some steps: metrics and scores of each. What is scored is what the next training compares with."""
    _, loss, columns, asked = CASES[case]
    metrics, scored = [], []
    for step in steps:
        rows = rows_of(case, step)
        if CASES[case][0] == "actor":
            top = run_all(trainer.score(rows, Top(5, among=40)))[1]
            scored += [top, run_all(trainer.score(rows, Score.LOGPROBS))[1]]
            rows = with_policy_columns(rows, scored[-1])
        else:
            scored.append(run_all(trainer.score(rows, Score.VALUES))[1])
            scored.append(run_all(trainer.score(rows, Score.SCORE))[1])
        metrics += run_all(trainer.train(terms_of(case, rows, step), step=step))[1]
        metrics.append(run_all(evaluate(trainer, rows, columns, loss(), **asked))[1])
    return metrics, scored


def reference(case: str, model: str, dtype: str, path: Path, **options: Any) -> list[dict[str, float]]:
    """One rank: its metrics; scores and weights go to the file."""
    trainer = trainer_of(case, build(case, model, dtype), **options)
    metrics, scored = run(case, trainer)
    weights = {
        block.param.name: trainer.model.trained.weights[start:stop].view(block.shape).clone()
        for block, start, stop in trainer.model.trained.layout.entries
    }
    torch.save({"scored": [torch.tensor(values) for values in scored], "weights": weights}, path)
    return metrics


class Worker:
    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank
        self.context = context
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=context.store(), rank=self.rank, world_size=context.num_ranks)
        self.teams: dict[Layout, Team | None] = {}

    def close(self) -> None:
        dist.destroy_process_group()

    def team(self, parallelism: Parallelism) -> Team | None:
        """The team of the first ranks; every rank of the world calls it."""
        return self.team_on(Layout(Mesh(tuple(range(parallelism.size))), parallelism))

    def team_on(self, layout: Layout) -> Team | None:
        if layout not in self.teams:
            self.teams |= make_teams([layout], self.rank, timeout_s=60.0, waiting_for=self.context.waiting_for)
        return self.teams[layout]

    def part(self, case: str, model: str, dtype: str, team: Team) -> LanguageModel | ScalarModel:
        return build(case, model, dtype, team)

    def compare(
        self, parallelism: Parallelism, case: str, model: str, dtype: str, path: str, options: Mapping[str, Any]
    ) -> tuple[list[dict[str, float]], float, float] | None:
        """Metrics, and how far scores and weights are from the reference at most; None: no member."""
        team = self.team(parallelism)
        if team is None:
            return None
        given = dict(options)
        team = replace(team, splits_tokens=given.pop("splits_tokens", False))
        if given.get("shard_weights") and team.dp.size > 1:
            team = replace(team, layout=replace(team.layout, shards_weights=True))
        run_elements = given.pop("run_elements", gradients.RUN_ELEMENTS)
        with (
            mock.patch.object(gradients, "RUN_ELEMENTS", run_elements),
            mock.patch.object(memory, "RUN_ELEMENTS", run_elements),
        ):
            trainer = trainer_of(case, self.part(case, model, dtype, team), team, **given)
            metrics, scored = run(case, trainer)
            num_rooms = memory.num_rooms(largest_in_layers(trainer.model.trained.layout))
        check_copies(trainer, team)
        held, updated = trainer.optimizer.gradients, trainer.optimizer.masters
        weights = trainer.model.trained.layout.num_elements
        divides = (given.get("shard_gradients") or given.get("shard_weights")) and team.dp.size > 1
        if divides:
            tied = tied_elements(trainer.model, team)
            assert held.numel() == updated.numel() + (tied if team.pp.index else 0)
        else:
            assert held.numel() == weights
        room = min(run_elements, weights)
        rooms = [room] * num_rooms if divides else []
        assert [one.numel() for one in trainer.optimizer.scratch().values()] == [held.numel(), *rooms]
        expected = torch.load(path, weights_only=True)
        off = max(float((torch.tensor(a) - b).abs().max()) for a, b in zip(scored, expected["scored"], strict=True))
        return metrics, off, weights_off(trainer.model, expected["weights"])

    def state_files(
        self,
        parallelism: Parallelism,
        case: str,
        model: str,
        dtype: str,
        folder: str,
        *,
        load: bool,
        options: Mapping[str, Any],
    ) -> list[dict[str, float]] | None:
        """Train, then save the optimizer's state as the layout that it has; or load it from any layout, then train."""
        team = self.team(parallelism)
        if team is None:
            return None
        trainer = trainer_of(case, self.part(case, model, dtype, team), team, **options)
        cluster = Cluster(1, 4)
        if load:
            for name, held in trainer.optimizer.holdings().items():
                steps = loading(held, cluster, self.rank, trainer.optimizer.buffers(), SavedFiles(Path(folder), name))
                exhausted(steps)
            counts = torch.load(f"{folder}/counts.pt", weights_only=True)
            trainer.optimizer.load_state({**counts, **trainer.optimizer.buffers()})
        metrics, _ = run(case, trainer, range(STEPS, 2 * STEPS) if load else range(STEPS))
        if not load:
            for name, held in trainer.optimizer.holdings().items():
                buffers = trainer.optimizer.buffers()
                exhausted(saving(held, cluster, self.rank, buffers, SavedFiles(Path(folder), name)))
            if team.all.index == 0:
                counts = {name: tensor for name, tensor in trainer.optimizer.state().items() if tensor.ndim == 0}
                torch.save(counts, f"{folder}/counts.pt")
        return metrics

    def skip(self, parallelism: Parallelism) -> tuple[dict[str, float], bool, str] | None:
        """Train on a sample that only one dp rank computes and whose loss is no number, until that is refused: the
        metrics of the first time, whether weights stayed as they were, the refusal."""
        team = self.team(parallelism)
        if team is None:
            return None
        trainer = trainer_of("grpo", self.part("grpo", "tied", "float64", team), team, max_skipped_steps=2)
        before = trainer.model.trained.weights.clone()
        rows = rows_of("grpo", 0)
        advantages = rows.columns[ADVANTAGES].copy()
        advantages[5] = np.nan
        rows = rows.with_column(ADVANTAGES, advantages)
        found = []
        for step in range(2):
            work = train(trainer, rows, {"weights": ADVANTAGES}, weighted, mini_batches=1, epochs=1, step=step)
            try:
                found.append(run_all(work)[1])
            except RunError as error:
                return found[0], torch.equal(before, trainer.model.trained.weights), str(error)
        return found[0], False, ""

    def together(
        self, schedule: Schedule, ranks: Mapping[str, str], slow: int = -1, prompts: int = 7, divides: bool = False
    ) -> tuple[list[str], Mapping[str, float], Mapping[str, float], list[str]] | None:
        """An actor and a critic in the pipelines of a schedule, two mini-batches in two epochs, one of which the critic
        alone has: together, and one after the other. Actions of the first pair of mini-batches here, metrics together
        and alone, and what of the state is not the same.

        Args:
            ranks: of `actor` and `critic`, as `"0,1 pp2"`.
            slow: a rank that sleeps before every forward and backward.
            divides: gradients are divided over dp.
        """
        placements = {}
        for role, text in ranks.items():
            mesh, *sizes = text.split()
            on = tuple(map(int, mesh.split(",")))
            placements[role] = Placement(f"{role}.train", "train", on, **{s[:2]: int(s[2:]) for s in sizes})
        order = fused_order(schedule, placements)
        cases = {"actor": "grpo", "critic": "critic"}
        teams = {role: self.team_on(p.layout) for role, p in placements.items()}
        joint = self.team_on(order.layout)
        if joint is None:
            return None
        rows = rows_of("grpo", 0, prompts)
        rows = with_policy_columns(rows, np.full(rows.num_tokens, -5.0))
        given = {"actor": rows.select(range(1)), "critic": rows}  # a batch of one sample is one mini-batch
        calls = {role: LossCall(CASES[case][1](), CASES[case][2]) for role, case in cases.items()}

        def trainers() -> dict[str, Trainer]:
            found = {}
            for role, case in cases.items():
                team = teams[role]
                assert team is not None, "all of the schedule's ranks have a part of both"
                model, count = self.part(case, "biased", "float32", team), order.num_micro_batches[role]
                how = {"micro_batches": count, "micro_batch_tokens": 1000, "shard_gradients": divides}
                found[role] = trainer_of(case, model, team, **how)
            return found

        alone, both = trainers(), trainers()
        for part in (given, dict.fromkeys(cases, rows)):
            terms = {role: [LossTerm(part[role], calls[role], mini_batches=2, epochs=2)] for role in cases}
            expected = [run_all(alone[role].train(terms[role], step=0))[1][0] for role in cases]
            begun = [both[role].begin(terms[role], step=0) for role in cases]
            done, found = run_all(delayed(train_together(begun, order, joint), self.rank == slow))
        unlike = [
            f"{role} {name}"
            for role in cases
            for name, tensor in both[role].optimizer.state().items()
            if not torch.equal(tensor, alone[role].optimizer.state()[name])
        ]
        first = [one.action for one in done if "/b0/" in one.action and one.kind in (Kind.FORWARD, Kind.BACKWARD)]
        return first, {**found[0][0], **found[1][0]}, {**expected[0], **expected[1]}, unlike

    def pipeline(self, schedule: Schedule, tokens: Sequence[int], in_order: bool = False) -> tuple[list[str], float]:
        """Run a schedule on linear stages: the actions done, and how far gradients are from those of the whole."""
        team = self.team(Parallelism(pp=schedule.num_ranks))
        if team is None:
            return [], 0.0
        keys = {(action.model, action.copy): action.stage for action in schedule.rows[team.pp.index]}
        depth = {key: 1 + max(a.stage for a in schedule if (a.model, a.copy) == key) for key in keys}
        stages = {key: LinearStage(key, stage, depth[key], tokens) for key, stage in keys.items()}
        done, _ = run_all(execute(schedule, stages, team.pp, name="toy", in_order=in_order))
        names = [one.action.removeprefix("toy/") for one in done]
        is_trained = any(action.kind is Kind.BACKWARD for action in schedule)
        return names, max(stage.off() for stage in stages.values()) if is_trained else 0.0

    def posted_ahead(self, schedule: Schedule, tokens: Sequence[int]) -> int:
        """Run a schedule: how many receives this rank has posted when it first waits for one."""
        post, posted, first_wait = Peers.irecv, [], []

        class Watched:
            def __init__(self, transfer: Any) -> None:
                self._transfer = transfer

            def wait(self) -> Tensor:
                first_wait.append(len(posted))
                return self._transfer.wait()

        def irecv(*args: Any) -> Watched:
            posted.append(Watched(post(*args)))
            return posted[-1]

        with mock.patch.object(Peers, "irecv", irecv):
            self.pipeline(schedule, tokens)
        return first_wait[0]


def tied_elements(model: LanguageModel | ScalarModel, team: Team) -> int:
    """Elements that this rank's place along dp has of what both ends of the pipeline hold."""
    found = tied_pieces(model.trained.layout, model.trained.parameters, team.layout.parallelism, team.coordinates)
    return sum(stop - start for owner, start, stop in found if owner == team.dp.index)


def check_copies(trainer: Trainer, team: Team) -> None:
    """Every dp rank has the same working weights, which are the masters of those that update them; where it has a share
    of them alone, its own."""
    if isinstance(share := trainer.model.trained.flat, WeightShare):
        masters = trainer.optimizer.masters
        assert torch.equal(share.whole[: len(masters)], masters.to(share.dtype))
        assert all(param.untyped_storage().nbytes() <= 8 for param in trainer.model.module.parameters())
        return
    weights = trainer.model.trained.weights
    for other in team.dp.all_gather(weights):
        assert torch.equal(weights, other)
    masters = team.dp.all_gather(
        trainer.optimizer.buffers()["masters"],
        [trainer.optimizer.holdings()["masters"].buffers[r]["masters"] for r in team.dp.ranks],
    )
    assert torch.equal(weights[len(weights) - sum(map(len, masters)) :], torch.cat(masters).to(weights.dtype))


def delayed(work: Work[Any], sleeps: bool) -> Work[Any]:
    """The same, with a sleep before each action."""
    while True:
        time.sleep(0.003 if sleeps else 0.0)
        try:
            done = next(work)
        except StopIteration as end:
            return end.value
        yield done


class LinearStage:
    """One of `depth` matrices; the loss is the sum of what comes out of the last, weighted by micro-batch."""

    def __init__(self, key: tuple[str, int], stage: int, depth: int, tokens: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(len(key[0]) + 7 * key[1])
        self.matrices = [torch.randn(5, 5, generator=generator, dtype=torch.float64) for _ in range(depth)]
        self.inputs = [torch.randn(count, 5, generator=generator, dtype=torch.float64) for count in tokens]
        self.place = stage
        self.own = self.matrices[stage].clone().requires_grad_(True)
        self.in_flight: dict[int, tuple[Tensor | None, Tensor]] = {}

    def tokens(self, index: int) -> int:
        return len(self.inputs[index])

    def room(self, index: int) -> Tensor:
        return torch.full_like(self.inputs[index], float("nan"))

    def forward(self, index: int, inputs: Tensor | None) -> Tensor | None:
        assert (inputs is None) == (self.place == 0)
        x = self.inputs[index] if inputs is None else inputs.requires_grad_(True)
        out = torch.tanh(x @ self.own)
        if self.place + 1 < len(self.matrices):
            self.in_flight[index] = inputs, out
            return out.detach()
        self.in_flight[index] = inputs, out.sum() * (index + 1)
        return None

    def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        inputs, start = self.in_flight.pop(index)
        torch.autograd.backward(start, gradient)
        return None if inputs is None else inputs.grad

    def off(self) -> float:
        assert not self.in_flight
        matrices = [matrix.clone().requires_grad_(True) for matrix in self.matrices]
        for index, x in enumerate(self.inputs):
            for matrix in matrices:
                x = torch.tanh(x @ matrix)
            (x.sum() * (index + 1)).backward()
        expected, found = matrices[self.place].grad, self.own.grad
        assert expected is not None
        return float((expected if found is None else found - expected).abs().max())


def weights_off(model: LanguageModel | ScalarModel, expected: Mapping[str, Tensor]) -> float:
    """How far the weights of this rank are from whole ones at most."""
    largest = 0.0
    for block, start, stop in model.trained.layout.entries:
        whole = expected[block.param.name].view(block.param.grid)[:, block.start : block.stop].reshape(-1)
        pieces = [(start, stop, model.trained.weights[start:stop])]
        if isinstance(share := model.trained.flat, WeightShare):
            pieces = list(share.pieces(start, stop))
        for low, high, found in pieces:
            largest = max(largest, float((found - whole[low - start : high - start]).abs().max()))
    return largest
