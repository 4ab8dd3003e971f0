"""The doctor in real runs of a tiny model: silent when all is well, and naming what was planted when not."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plait.data.packed import PackedBatch
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import CallKind, Level, per_sample, trace
from plait.errors import RunError
from plait.generation.engine import Engine
from plait.generation.response import Response
from plait.generation.sampler import SamplingRows
from plait.models.backbone_model import copy_of
from plait.models.files.saving import save_pretrained
from plait.models.flat_weights import FlatWeights
from plait.observe.doctor import Finding
from plait.observe.doctor_reading import Severity
from plait.observe.doctor_settings import DoctorSettings
from plait.observe.run_log import read_rows
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from plait.runtime import api
from plait.runtime.finished_step import finish_metrics
from plait.runtime.folder.claim import claim
from plait.runtime.health.doctor import RunDoctor
from plait.runtime.health.inspected_run import InspectedRun
from plait.runtime.health.step_facts import StepFacts, answer_ends, mask_edges, training_facts, turn_ends
from plait.runtime.health.weight_facts import WeightFacts, fingerprint
from plait.runtime.prepare import prepare
from plait.runtime.process import set_up
from plait.runtime.processes.alone import Alone
from plait.runtime.session import Session
from plait.runtime.steps.step import StepState
from plait.workers import instances, loading
from tests.cases import slow_but
from tests.models.tiny import tiny_model, tiny_tokenizer
from tests.runs.test_flows import data as data
from tests.runs.test_flows import recipe_of as flow_recipe

MakeRecipe = Callable[..., Recipe]
Patch = pytest.MonkeyPatch
QUIET = DoctorSettings(truncated=1.0)
"""A model that knows nothing never stops."""
ENDS = [2, *range(100, 180)]
"""End tokens of a model that draws one every few tokens."""


@pytest.fixture(scope="session")
def ending_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "ending"
    model = tiny_model("llama", dtype=torch.float32)
    model.tokenizer = tiny_tokenizer()
    model.module.generation_config.eos_token_id = ENDS
    save_pretrained(model, folder)
    return folder


@pytest.fixture
def recipe_of(make_recipe: MakeRecipe, tmp_path: Path) -> MakeRecipe:
    def make(**keys: Any) -> Recipe:
        recipe = make_recipe(**{"steps": 9, "sampling.temperature": 0.8, "sampling.max_response_tokens": 8} | keys)
        (tmp_path / "reward.py").write_text(
            "def count_sevens(completions, **columns):\n    return [float(len(text) % 5) for text in completions]\n"
        )
        return recipe

    return make


class Run:
    """A session with a doctor beside it, stepped by hand."""

    def __init__(self, session: Session, doctor: RunDoctor) -> None:
        self.session = session
        self.doctor = doctor

    def steps(self, count: int) -> list[Finding]:
        session, found = self.session, []
        for _ in range(count):
            state = session.begin_step()
            session.executor.run_step(state, session.batches)
            session.end_step(state)
            found += self.doctor.after_step(state, finish_metrics(session, state, 1.0))
        return found


@contextmanager
def opened(recipe: Recipe, *, resume: bool = False, settings: DoctorSettings = QUIET) -> Iterator[Run]:
    set_up(1)
    prepared = prepare(recipe)
    with (
        claim(recipe, resume=resume) as directory,
        Session(prepared, directory, resume=resume, leading=Alone(prepared)) as session,
    ):
        doctor = RunDoctor(
            InspectedRun(session.prepared.flow, session.roles, recipe, session.workers, session.between_steps),
            settings,
            recipe.run_dir / "beside.jsonl",
            resume=resume,
            last_step=session.done.step,
            tell=lambda line: None,
        )
        with doctor:
            yield Run(session, doctor)


def said(recipe: Recipe, steps: int = 3, settings: DoctorSettings = QUIET) -> list[Finding]:
    with opened(recipe, settings=settings) as run:
        return run.steps(steps)


def errors(findings: list[Finding]) -> set[str]:
    return {finding.rule for finding in findings if finding.severity is Severity.ERROR}


# -- all is well


SOUND: list[dict[str, Any]] = [
    {},
    {"dtype": "float64"},
    {"dtype": "bfloat16", "optimizer.learning_rate": 1e-4},
    {"options": {"mini_batches": 3, "epochs": 2, "kl_coef": 0.05}},
    {"algorithm": "rloo", "options": {}},
    {"lora.rank": 2},
    {"algorithm": "remax", "options": {}, "samples_per_prompt": 1, "prompts_per_step": 6},
    {"sampling.top_p": 0.9, "lora.rank": 2, "dtype": "bfloat16", "optimizer.learning_rate": 1e-4},
]


@pytest.mark.parametrize("keys", slow_but([SOUND[2], SOUND[3], SOUND[5], SOUND[6], SOUND[7]], SOUND), ids=str)
def test_a_sound_run_has_no_findings(recipe_of: MakeRecipe, ending_folder: Path, keys: dict[str, Any]) -> None:
    recipe = recipe_of(model=str(ending_folder), **keys)
    with opened(recipe, settings=DoctorSettings(clipped=1.0, entropy_left=0.0)) as run:
        assert run.steps(4) == []
        assert run.doctor.summary() == ""
    rows = read_rows(recipe.run_dir / "beside.jsonl")
    assert all("baseline" in row for row in rows)


@pytest.mark.parametrize(
    "flow", slow_but(["sft", "dpo", "safe_rlhf"], ["sft", "reward_model", "dpo", "kto", "distill", "ppo", "safe_rlhf"])
)
def test_a_sound_run_of_every_flow_has_no_findings(
    recipe_of: MakeRecipe, ending_folder: Path, data: dict[str, str], flow: str
) -> None:
    recipe = flow_recipe(flow, recipe_of, data, model=str(ending_folder))
    quiet = DoctorSettings(clipped=1.0, entropy_left=0.0, dead_groups=1.0)
    assert said(recipe, steps=3, settings=quiet) == []


@pytest.mark.parametrize("flow", slow_but(["dpo"], ["dpo", "kto"]))
def test_a_reference_of_given_samples_that_begins_elsewhere_is_named(
    recipe_of: MakeRecipe, data: dict[str, str], flow: str
) -> None:
    with opened(flow_recipe(flow, recipe_of, data)) as run:
        run.session.roles["ref"].model.weights.mul_(1.1)
        findings = run.steps(1)
    assert "wrong_reference" in errors(findings)


# -- one token off


def predict_the_same(batch: PackedBatch) -> torch.Tensor:
    return (sound_places(batch) + 1).clamp(max=batch.num_tokens - 1)


sound_places = PackedBatch.predict_R.func
sound_targets = PackedBatch.targets_R.func
sound_logprobs = Rows.sampling_logprobs.func


def one_ahead(rows: Rows) -> np.ndarray:
    return np.roll(sound_logprobs(rows), 1)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (PackedBatch, "predict_R", property(predict_the_same)),
        (PackedBatch, "targets_R", property(lambda batch: sound_targets(batch).roll(1))),
        (Rows, "sampling_logprobs", property(one_ahead)),
    ],
    ids=["places", "targets", "engine's"],
)
def test_a_shift_is_named(recipe_of: MakeRecipe, monkeypatch: Patch, owner: type, name: str, wrong: property) -> None:
    monkeypatch.setattr(owner, name, wrong)
    findings = said(recipe_of(), steps=2)
    assert errors(findings) == {"mask_shift"}
    assert "one" in findings[0].sentence


# -- temperature


@pytest.mark.parametrize("keys", [{}, {"sampling.top_p": 0.9}], ids=str)
def test_a_trainer_without_the_temperature_is_named(
    recipe_of: MakeRecipe, monkeypatch: Patch, keys: dict[str, Any]
) -> None:
    from plait.models import language_model

    sound = language_model.chunked_logprobs
    monkeypatch.setattr(
        language_model,
        "chunked_logprobs",
        lambda head, h, ids, temperature, rows, **more: sound(head, h, ids, 1.0, rows, **more),
    )
    findings = said(recipe_of(**keys), steps=2)
    assert errors(findings) == {"temperature"}
    assert "the trainer takes its log-probs at temperature 1, the recipe says 0.8" in findings[0].sentence
    assert findings[0].key == "sampling.temperature"


@pytest.mark.parametrize("stated", [0.8, 1.005])
def test_an_engine_with_another_temperature_is_named(recipe_of: MakeRecipe, monkeypatch: Patch, stated: float) -> None:
    sound = SamplingRows.of.__func__

    def warmer(cls: type, samplings: Any, *rest: Any) -> SamplingRows:
        return sound(cls, [dataclasses.replace(one, temperature=1.2) for one in samplings], *rest)

    monkeypatch.setattr(SamplingRows, "of", classmethod(warmer))
    findings = said(recipe_of(**{"optimizer.learning_rate": 1e-5, "sampling.temperature": stated}), steps=2)
    assert errors(findings) == {"temperature"}
    assert "the engine samples at temperature 1.2" in findings[0].sentence


# -- weights of the engine


class StaleEngine(Engine):
    """Keeps the weights that it was made with."""

    def __init__(self, model: Any, settings: Any, **options: Any) -> None:
        super().__init__(copy_of(model), settings, **options)


class LateEngine(StaleEngine):
    """Has the weights of one update before."""

    def __init__(self, model: Any, settings: Any, **options: Any) -> None:
        super().__init__(model, settings, **options)
        self._current, self._next = model, copy_of(model)

    def update_weights(self, version: int) -> None:
        self.model, self._next = self._next, copy_of(self._current)
        super().update_weights(version)


@pytest.mark.parametrize("engine", slow_but([StaleEngine], [StaleEngine, LateEngine]))
def test_an_engine_with_old_weights_is_named(recipe_of: MakeRecipe, monkeypatch: Patch, engine: type) -> None:
    monkeypatch.setattr(instances, "Engine", engine)
    findings = said(recipe_of(), steps=4)
    assert {finding.rule for finding in findings} == {"stale_sampler_weights"}
    assert findings[0].step == 2, "before the first update there is nothing to see"


def test_an_engine_that_swaps_in_the_first_weights_is_named(recipe_of: MakeRecipe, monkeypatch: Patch) -> None:
    """Its model is the trainer's: only the log-probs themselves show it."""
    sound = Engine.step
    first: dict[int, torch.Tensor] = {}

    def step(engine: Engine) -> list[Sample]:
        weights = engine.model.weights.data  # a view whose changes the engine does not count
        old = first.setdefault(id(engine), weights.clone())
        now = weights.clone()
        weights.copy_(old)
        finished = sound(engine)
        weights.copy_(now)
        return finished

    monkeypatch.setattr(Engine, "step", step)
    findings = said(recipe_of(), steps=3)
    assert {finding.rule for finding in findings} == {"stale_sampler_weights"}
    assert "the weights of `ref`" in findings[0].sentence


def test_samples_of_an_older_version_are_named(recipe_of: MakeRecipe, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(Engine, "update_weights", lambda engine, version: None)
    findings = said(recipe_of(), steps=3)
    assert [finding.rule for finding in findings] == ["stale_policy_version"]
    allowed = DoctorSettings(truncated=1, max_version_lag=2)
    assert said(recipe_of(run_dir=str(tmp_path / "other")), steps=3, settings=allowed) == []


# -- the reference


def test_a_reference_that_is_the_policy_is_named(recipe_of: MakeRecipe, monkeypatch: Patch) -> None:
    monkeypatch.setattr(loading, "copy_of", lambda model: model)
    assert errors(said(recipe_of(), steps=2)) == {"stale_reference"}


def test_a_reference_that_begins_elsewhere_is_named(recipe_of: MakeRecipe) -> None:
    with opened(recipe_of()) as run:
        weights = run.session.roles["ref"].model.weights
        noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(0))
        weights.add_(0.02 * noise)
        findings = run.steps(1)
    assert "wrong_reference" in errors(findings)


@pytest.mark.slow
def test_entropies_of_the_reference_are_not_its_log_probs(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        "def flow(prompts, actor, ref):\n"
        "    samples = actor.generate(prompts)\n"
        "    entropies, ref_logprobs = ref.entropies(samples), ref.logprobs(samples)\n"
        "    actor.train(samples, loss=loss, entropies=entropies, ref_logprobs=ref_logprobs)\n\n\n"
        "def loss(batch, entropies, ref_logprobs):\n"
        "    return batch.aggregate((entropies + ref_logprobs) * batch.logprobs, 'token-mean')\n"
    )
    keys = {"algorithm": f"{tmp_path}/flow.py:flow", "options": {}, "reward.functions": []}
    assert errors(said(recipe_of(**keys), steps=1)) == set()


def test_a_reference_that_changes_later_is_named(recipe_of: MakeRecipe) -> None:
    with opened(recipe_of()) as run:
        assert run.steps(2) == []
        run.session.roles["ref"].model.weights.mul_(1.01)
        (finding,) = run.steps(1)
    assert (finding.rule, finding.step) == ("stale_reference", 3)
    assert "not those that it had at the beginning" in finding.sentence


def test_a_reference_that_a_resume_loads_from_the_policy_is_named(recipe_of: MakeRecipe) -> None:
    recipe = recipe_of()
    with opened(recipe) as run:
        assert run.steps(2) == []
        run.session.records.last_step = run.session.done.step
        run.session.save()
    with opened(recipe, resume=True) as run:
        run.session.roles["ref"].model.weights.copy_(run.session.roles["actor"].model.weights)
        findings = run.steps(1)
    assert errors(findings) == {"stale_reference"}


# -- ends


def test_an_engine_that_takes_the_end_token_away_is_named(
    recipe_of: MakeRecipe, ending_folder: Path, monkeypatch: Patch
) -> None:
    sound = Response.sample

    def strip(response: Response, tokenizer: Any, reason: FinishReason | None = None, **told: Any) -> Sample:
        sample = sound(response, tokenizer, reason, **told)
        if sample.finish_reason is FinishReason.STOP and len(sample.token_ids) > 1:
            return dataclasses.replace(sample, token_ids=sample.token_ids[:-1], logprobs=sample.logprobs[:-1])
        return sample

    monkeypatch.setattr(Response, "sample", strip)
    findings = said(recipe_of(model=str(ending_folder)), steps=2)
    assert {finding.rule for finding in findings} == {"missing_eos"}


def test_a_mask_without_the_end_token_is_named(recipe_of: MakeRecipe, ending_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        "import numpy as np\n"
        "from plait.dataflow import Level, per_group, per_sample\n"
        "def no_last(logprobs):\n    return np.append(np.ones(len(logprobs) - 1), 0.0)\n"
        "def loss(batch, advantages):\n"
        "    return batch.aggregate(-advantages * batch.logprobs, 'token-mean')\n"
        "def centre(rewards):\n    return rewards - rewards.mean()\n"
        "def flow(prompts, actor, reward):\n"
        "    samples = actor.generate(prompts)\n"
        "    mask = per_sample(no_last, actor.logprobs(samples), name='mask', level=Level.TOKEN)\n"
        "    advantages = per_group(centre, reward.score(samples), name='advantages')\n"
        "    actor.train(samples, loss=loss, mask=mask, advantages=advantages)\n"
    )
    recipe = recipe_of(model=str(ending_folder), algorithm=f"{tmp_path}/flow.py:flow", options={})
    assert errors(said(recipe, steps=1)) == {"missing_eos", "mask_shift"}


def test_a_loss_that_does_not_add_up_is_named_once(recipe_of: MakeRecipe, ending_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        "from plait.dataflow import per_group\n"
        "def my_loss(batch, advantages):\n    return -(advantages * batch.logprobs).mean()\n"
        "def centre(rewards):\n    return rewards - rewards.mean()\n"
        "def flow(prompts, actor, reward):\n"
        "    samples = actor.generate(prompts)\n"
        "    advantages = per_group(centre, reward.score(samples), name='advantages')\n"
        "    actor.train(samples, loss=my_loss, advantages=advantages)\n"
    )
    recipe = recipe_of(model=str(ending_folder), algorithm=f"{tmp_path}/flow.py:flow", options={})
    found = [finding for finding in said(recipe, steps=2) if finding.rule == "loss_depends_on_split"]
    assert [finding.step for finding in found] == [1]
    assert "the loss `my_loss` of actor.train does not add up" in found[0].sentence
    assert "`return batch.aggregate(values, 'token-mean')`" in found[0].sentence


def test_an_engine_that_does_not_know_the_end_token_is_named(recipe_of: MakeRecipe, ending_folder: Path) -> None:
    recipe = recipe_of(model=str(ending_folder), **{"sampling.stop_token_ids": [5]})
    findings = said(recipe, steps=1)
    assert errors(findings) == {"missing_eos"}
    assert "go on after an end token" in findings[0].sentence


@pytest.mark.parametrize(("stated", "rules"), [(None, {"missing_eos"}), ([], set())])
def test_a_model_without_an_end_token_is_named(
    recipe_of: MakeRecipe, ending_folder: Path, tmp_path: Path, stated: list[int] | None, rules: set[str]
) -> None:
    """But where it was asked for."""
    folder = shutil.copytree(ending_folder, tmp_path / "endless")
    for name in ("config", "generation_config", "tokenizer_config"):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None, "eos_token": None}))
    findings = said(recipe_of(model=str(folder), **{"sampling.stop_token_ids": stated}), steps=1)
    assert {finding.rule for finding in findings} == rules
    assert all("names an end token" in finding.sentence for finding in findings)


def test_where_trained_turns_end() -> None:
    prompt = Prompt(0, "q", (1,))
    ids = (5, 6, 2, 7, 8, 2)  # two turns, each ended by token 2

    def edges(mask: list[float]) -> dict[str, float]:
        sample = Sample(prompt, 0, ids, (0.0,) * 6, "", FinishReason.STOP)
        return mask_edges(Rows((sample,)), np.array(mask), frozenset({2}))

    assert edges([1, 1, 1, 0, 1, 1]) == {"mask_early": 0.0, "mask_late": 0.0}
    assert edges([1, 1, 0, 0, 1, 0]) == {"mask_early": 1.0, "mask_late": 0.0}
    assert edges([1, 1, 1, 1, 0, 1]) == {"mask_early": 0.0, "mask_late": 0.5}
    assert edges([0, 0, 0, 0, 0, 0]) == {}
    assert edges([1, 0, 0, 0, 0, 0]) == {}, "a turn that was cut ends anywhere"


UNCERTAIN = {"algorithm": f"{Path(__file__).parents[3]}/examples/newer_losses.py:newer", "options": {"uncertain": 0.2}}


def where_a_teacher_is_certain(prompts, actor, ref):
    samples = actor.generate(prompts)
    top = ref.top_logprobs(samples, 4)
    certain = per_sample(lambda top: top[:, 0] > -0.1, top.logprobs, name="certain", level=Level.TOKEN)
    actor.train(samples, loss=lambda batch: batch.logprobs.sum(), mask=certain)


@pytest.mark.parametrize("own", [False, True])
def test_a_mask_of_how_certain_a_model_is_has_no_turns(own: bool) -> None:
    flow = trace(where_a_teacher_is_certain, roles=("actor", "ref"))
    if not own:
        flow = trace_algorithm(load_flow(UNCERTAIN["algorithm"]), UNCERTAIN["options"], ("actor", "reward"))
    (node,) = flow.of_kind(CallKind.TRAIN)
    assert node.mask is not None
    rows = Rows((Sample(Prompt(0, "q", (1,)), 0, (5, 2), (0.0, 0.0), "", FinishReason.STOP),))
    rows = rows.with_column(node.mask, [1, 0])
    if not own:
        rows = rows.with_column(node.loss_columns["advantages"], [1])
    facts = training_facts(flow, StepState(0, tables={node.rows: rows}), frozenset({2}))
    assert facts == {"mask_chooses": 1.0} | ({} if own else {"zero_advantages": 0.0})


@pytest.mark.slow
def test_training_on_uncertain_tokens_alone_is_sound(recipe_of: MakeRecipe, ending_folder: Path) -> None:
    found = {finding.rule for finding in said(recipe_of(model=str(ending_folder), **UNCERTAIN), steps=2)}
    assert found.isdisjoint(("missing_eos", "mask_shift", "mask_coverage"))


def test_an_answer_of_several_messages_goes_on_after_the_end_of_one() -> None:
    """gpt-oss ends its reasoning with the token that ends the answers of phi3."""
    phi3, gpt_oss = {"<|end|>": 7, "<|endoftext|>": 0}, {"<|end|>": 7, "<|return|>": 2}
    assert (turn_ends(phi3), answer_ends(phi3)) == ({0, 7}, {0, 7})
    assert (turn_ends(gpt_oss), answer_ends(gpt_oss)) == ({2, 7}, {2})


@pytest.mark.parametrize(("model", "is_another"), [(None, 0.0), ("m", 0.0), ("teacher", 1.0)])
def test_a_reference_of_the_same_name_is_no_other(model: str | None, is_another: float) -> None:
    """Its KL is asked for: it begins at 0."""
    recipe = load_recipe(None, [("model", "m"), ("data.source", "d"), ("reference.model", model)])
    flow = trace_algorithm(load_flow("grpo"), {"kl_coef": 0.1}, ("actor", "reward", "ref"))
    inspected: Any = SimpleNamespace(flow=flow, recipe=recipe, models={}, roles=(), rollouts=lambda state: [])
    assert StepFacts(inspected).of_step(StepState(1), {})["reference_is_another"] == is_another


@pytest.mark.parametrize(
    ("algorithm", "is_taught"), [("sft", 1.0), ("kto", 1.0), ("distill", 1.0), ("grpo", 0.0), ("ppo", 0.0)]
)
def test_who_learns_from_given_samples_or_a_teacher_is_told(algorithm: str, is_taught: float) -> None:
    recipe = load_recipe(None, [("model", "m"), ("data.source", "d")])
    flow = trace_algorithm(load_flow(algorithm), {}, ("actor", "reward", "ref", "critic"))
    inspected: Any = SimpleNamespace(flow=flow, recipe=recipe, models={}, roles=(), rollouts=lambda state: [])
    assert StepFacts(inspected).of_step(StepState(1), {})["is_taught"] == is_taught


def test_what_training_reads_is_told_of_what_takes_part() -> None:
    """Of two truncated samples and two others the others, which have no advantages; of truncated ones alone none."""
    flow = trace_algorithm(load_flow("grpo"), {"mask_truncated": True}, ("actor", "reward"))
    (node,) = flow.of_kind(CallKind.TRAIN)
    keep, advantages_of = node.keep, node.loss_columns["advantages"]
    assert keep is not None

    def facts(finished: list[float], advantages: list[float]) -> dict[str, float]:
        prompt, end = Prompt(0, "q", (1,)), FinishReason.STOP
        rows = Rows(tuple(Sample(prompt, i, (5,), (0.0,), "", end) for i in range(len(finished))))
        rows = rows.with_column(keep, finished).with_column(advantages_of, advantages)
        return training_facts(flow, StepState(3, tables={node.rows: rows}), frozenset())

    assert facts([1, 1, 0, 0], [0, 0, 1, -1]) == {"zero_advantages": 1.0}
    assert facts([1, 1, 0, 1], [0, 1, 0, -1]) == {"zero_advantages": 1 / 3}
    assert facts([0, 0], [1, -1]) == {"all_left_out": 1.0}


@pytest.mark.parametrize("ptx_coef", [0.0, 0.5])
def test_what_else_is_in_the_same_optimizer_steps_is_told(ptx_coef: float) -> None:
    flow = trace_algorithm(load_flow("grpo"), {"ptx_coef": ptx_coef}, ("actor", "reward"))
    node = flow.of_kind(CallKind.TRAIN)[0]
    prompt = Prompt(0, "q", (1,))
    rows = Rows(tuple(Sample(prompt, i, (5,), (0.0,), "", FinishReason.STOP) for i in range(2)))
    rows = rows.with_column(node.loss_columns["advantages"], [0.0, 0.0])
    facts = training_facts(flow, StepState(3, tables={node.rows: rows}), frozenset())
    assert facts == {"zero_advantages": 1.0} | ({"learns_beside": 1.0} if ptx_coef else {})


@pytest.mark.parametrize("num_examples", [0, 1])
def test_what_is_left_out_beside_another_loss_is_told_apart(num_examples: int) -> None:
    """The example is learnt where there is one; without it nothing is."""
    flow = trace_algorithm(load_flow("grpo"), {"ptx_coef": 0.5, "mask_truncated": True}, ("actor", "reward"))
    drawn, given = flow.of_kind(CallKind.TRAIN)
    assert drawn.keep is not None
    samples = tuple(Sample(Prompt(0, "q", (1,)), i, (5,), (0.0,), "", FinishReason.LENGTH) for i in range(2))
    rows = Rows(samples).with_column(drawn.keep, [0.0, 0.0])
    rows = rows.with_column(drawn.loss_columns["advantages"], [1.0, -1.0])
    examples = Rows(samples[:num_examples])
    facts = training_facts(flow, StepState(3, tables={drawn.rows: rows, given.rows: examples}), frozenset())
    assert facts == {"left_out_beside" if num_examples else "all_left_out": 1.0}


# -- groups


def test_dead_groups_are_named(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    recipe = recipe_of()
    (tmp_path / "reward.py").write_text(
        "def count_sevens(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    (finding,) = said(recipe, steps=2)
    assert (finding.rule, finding.severity, finding.key) == ("dead_groups", Severity.ERROR, "reward.functions")


def test_groups_that_are_keyed_wrongly_are_named(recipe_of: MakeRecipe, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Rows, "groups", property(lambda rows: {i: (i,) for i in range(len(rows))}))
    findings = said(recipe_of(), steps=1)
    assert errors(findings) == {"dead_groups"}
    assert "keyed by something else" in findings[0].sentence


# -- what it writes


def test_a_resumed_run_goes_on_from_what_was_written(recipe_of: MakeRecipe, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Engine, "update_weights", lambda engine, version: None)
    recipe = recipe_of()
    with opened(recipe) as run:
        first = run.steps(3)
        run.session.records.last_step = run.session.done.step
        run.session.save()
        later = run.steps(2)
        table = run.doctor.summary()
    with opened(recipe, resume=True) as run:
        assert len(read_rows(recipe.run_dir / "beside.jsonl")) > 2
        assert max(row["step"] for row in read_rows(recipe.run_dir / "beside.jsonl")) == 3, "cut back to the checkpoint"
        assert run.steps(2) == later, "what was said before the interruption is not said again"
        assert run.doctor.summary() == table
    assert [finding.step for finding in first + later] == [2, 4], "said when it begins and when it is twice as bad"


def test_a_run_may_be_stopped_by_a_finding(recipe_of: MakeRecipe, monkeypatch: Patch) -> None:
    monkeypatch.setattr(loading, "copy_of", lambda model: model)
    with opened(recipe_of(), settings=DoctorSettings(truncated=1, stop_on="error")) as run:
        findings = run.steps(1)
        with pytest.raises(RunError, match=r"stale_reference.*`doctor.stop_on` is `error`"):
            run.doctor.stop_if_asked(findings)
    with opened(recipe_of(overwrite=True)) as run:
        run.doctor.stop_if_asked(run.steps(1))


DEAD = "def count_sevens(completions, **columns):\n    return [1.0] * len(completions)\n"


def test_a_run_has_its_doctor(recipe_of: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of(steps=2)
    (tmp_path / "reward.py").write_text(DEAD)
    outcome = api.run(recipe)
    assert "doctor: error, step 1, dead_groups: every advantage of the step is 0" in capsys.readouterr().err
    assert "dead_groups" in outcome.doctor
    assert {row["step"] for row in read_rows(recipe.run_dir / "doctor.jsonl")} == {0, 1, 2}
    assert not any(name.startswith("doctor/") for row in read_rows(recipe.run_dir / "metrics.jsonl") for name in row)
    without = recipe_of(steps=2, run_dir=str(tmp_path / "without"), **{"doctor.enabled": False})
    assert api.run(without).doctor == ""
    assert not (tmp_path / "without" / "doctor.jsonl").exists()


def test_a_run_that_its_doctor_stops_can_be_resumed(recipe_of: MakeRecipe, tmp_path: Path) -> None:
    recipe = recipe_of(steps=3, **{"doctor.truncated": 1.0, "doctor.stop_on": "error"})
    (tmp_path / "reward.py").write_text(DEAD)
    with pytest.raises(RunError, match=r"dead_groups.*`doctor.stop_on` is `error`"):
        api.run(recipe)
    assert [row["step"] for row in read_rows(recipe.run_dir / "metrics.jsonl")] == [1]
    resumed = recipe_of(steps=3, **{"doctor.truncated": 1.0})
    (tmp_path / "reward.py").write_text(DEAD)
    outcome = api.run(resumed, resume=True)
    assert (outcome.finished, outcome.step) == (True, 3)
    spoken = [row for row in read_rows(recipe.run_dir / "doctor.jsonl") if "sentence" in row]
    assert [row["step"] for row in spoken] == [1], "what was said before is not said again"


def flat(values: torch.Tensor) -> FlatWeights:
    layout: Any = SimpleNamespace(num_elements=len(values), blocks=())
    return FlatWeights(layout, values)


@functools.cache
def weights_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1_000_003, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_fingerprint_tells_an_update_and_nothing_else(dtype: torch.dtype) -> None:
    weights = weights_of(dtype)
    assert fingerprint(flat(weights)) == fingerprint(flat(weights.clone()))
    assert fingerprint(flat(weights)) != fingerprint(flat(weights * 1.01))
    assert fingerprint(flat(weights[:5])) != fingerprint(flat(-weights[:5]))


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "weights/ref"), ("qwen2", "weights/ref (weights side by side)")]
)
def test_a_reference_is_not_compared_with_its_weights_in_another_order(family: str, name: str) -> None:
    """A run of an early version, which had each bias behind its weight, goes on."""
    model, baseline = tiny_model(family), {"weights/ref": "of then"}
    inspected: Any = SimpleNamespace(
        models={"ref": model},
        flow=SimpleNamespace(trained_roles=frozenset({"actor"})),
        recipe=SimpleNamespace(reference=SimpleNamespace(sync_every=0)),
        workers=SimpleNamespace(leader_weights=SimpleNamespace(now=lambda _, weights: weights)),
    )
    weight_facts = WeightFacts(inspected, lambda: baseline)
    baseline = weight_facts.first() | baseline
    assert baseline.keys() == {"weights/ref", name}
    assert weight_facts.of_step(1) == ({"ref_changed": 1.0} if family == "llama" else {})
    with torch.no_grad():
        model.weights.mul_(1.01)
    assert weight_facts.of_step(2) == {"ref_changed": 1.0}
