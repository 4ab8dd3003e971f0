"""A run from end to end on a tiny model: what it writes, and that own flows, losses and rewards run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import plait
from plait.errors import ConfigError, DataError, FlowError, RunError
from plait.generation.engine import Engine
from plait.observe.run_log import read_rows
from plait.observe.trace import read_trace
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.export import export_checkpoint
from plait.schedule.timeline import load_any
from tests.runs.written import logged, samples_of

EXAMPLES = Path(__file__).parents[2] / "examples"
MakeRecipe = Callable[..., Recipe]


def test_a_run_explains_itself(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(**{"evaluation.items": 4, "evaluation.every": 1})
    outcome = run(recipe)
    assert outcome.finished
    rows = logged(recipe)
    assert [row["step"] for row in rows] == [1, 2]
    evaluations = read_rows(recipe.run_dir / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 1, 2], "the last one is due at the last step and done once"
    for row, evaluation in zip(rows, evaluations[1:], strict=True):
        assert {name: row[name] for name in evaluation} == evaluation
    expected = {
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "rewards/count_sevens/mean",
        "kl",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
        "actor/pg_clipfrac",
        "actor/pg_loss",
        "actor/ppo_kl",
        "eval/reward",
        "perf/throughput",
        "response_length/clip_ratio",
        "response_length/mean",
        "timing_s/actor.generate",
        "timing_s/actor.train",
        "timing_s/ref.logprobs",
        "timing_s/step",
        "training/rollout_probs_diff_mean",
    }
    assert expected <= rows[0].keys()
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-9), "the policy is the reference at the first step"
    assert rows[0]["training/rollout_probs_diff_max"] < 1e-5, "engine and trainer agree"
    worked = [s for s in load_any(recipe.run_dir / "trace.json").spans if s.lane == "reward worker 0" and s.step == 1]
    assert [s.action for s in worked] == ["reward.score/count_sevens"] * 3, "a call for each group"
    took = sum(s.duration_s for s in worked)
    assert rows[0]["timing_s/reward.score"] == pytest.approx(took, abs=1e-4), "what the function took, no wait"

    samples = samples_of(recipe, 2)
    assert len(samples) == 12
    for sample in samples:
        assert len(sample["token_ids"]) == len(sample["sampling_logprobs"]) == len(sample["ref_logprobs"])
        assert sample["policy_version"] == 1
        assert sample["reward_score"] == sample["response"].count("7")
    assert sum(sample["advantages"] for sample in samples) == pytest.approx(0, abs=1e-9)

    names = {event["name"] for event in read_trace(recipe.run_dir / "trace.json")}
    assert {"actor.generate/prefill", "actor.generate/decode", "ref.logprobs/mb0", "actor.train/b0/step"} <= names
    assert (recipe.run_dir / "recipe.yaml").is_file()


def test_a_run_says_once_which_forward_generates(make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_recipe(**{"sampling.exact": True})).finished
    said = [line for line in capsys.readouterr().err.splitlines() if "not by compiled ones" in line]
    assert said == [
        "actor.generate: computed by the model's own layers, not by compiled ones: exact mode has a forward of its own"
    ]


def test_which_weights_gave_each_token_is_recorded(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand where the weights changed within a sample; elsewhere one version says it."""
    step = Engine.step

    def stepping(self: Engine):
        finished = step(self)
        if self.has_work and self.policy_version == 0:
            self.update_weights(7, "keep")
        return finished

    recipe = make_recipe()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", stepping)
        assert run(recipe).finished
    first, second = (samples_of(recipe, at) for at in (1, 2))
    mixed = [row for row in first if "token_versions" in row]
    assert mixed
    for row in mixed:
        assert row["token_versions"] == [0] + [7] * (len(row["token_ids"]) - 1)
        assert row["policy_version"] == 7
    assert not any("token_versions" in row for row in second)
    shares = [row.get("training/mixed_versions") for row in logged(recipe)]
    assert shares == [len(mixed) / len(first), None]


def test_the_final_folder_loads_in_transformers(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    run(recipe)
    final = AutoModelForCausalLM.from_pretrained(recipe.run_dir / "final")
    assert AutoTokenizer.from_pretrained(recipe.run_dir / "final").chat_template
    before = AutoModelForCausalLM.from_pretrained(recipe.model)
    assert not torch.equal(final.lm_head.weight, before.lm_head.weight), "training moved the weights"

    assert export_checkpoint(recipe.run_dir, tmp_path / "out", dtype="float32").step == 2
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, left), right in zip(final.named_parameters(), exported.parameters(), strict=True):
        assert torch.equal(left, right), name
    with pytest.raises(ConfigError, match=r"--out: .* exists"):
        export_checkpoint(recipe.run_dir, tmp_path / "out")


@pytest.mark.slow
def test_the_reward_rises(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(steps=25, **{"prompts_per_step": 6, "samples_per_prompt": 8, "optimizer.learning_rate": 0.01})
    run(recipe)
    rewards = [row["reward"] for row in logged(recipe)]
    assert sum(rewards[-5:]) / 5 > 3 * sum(rewards[:5]) / 5 + 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"mini_batches": 3, "epochs": 2},
        {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
        {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "loss"},
        {"kl_coef": 0.1, "kl_estimator": "k2", "aggregation": "token-mean", "clip_high": 0.28},
        {"aggregation": "seq-mean-token-sum-norm", "scale_rewards": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_grpo(make_recipe: MakeRecipe, options: dict[str, Any]) -> None:
    recipe = make_recipe(options=options, steps=1)
    outcome = run(recipe)
    steps = options.get("mini_batches", 1) * options.get("epochs", 1)
    assert outcome.metrics["training/optimizer_steps"] == steps
    assert ("kl" in outcome.metrics) == (options.get("kl_coef", 0) > 0)


def test_own_flow_loss_and_reward_from_the_command_line(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json") | {"options": {"entropy_bonus": 0.01}}))
    command = [sys.executable, "-m", "plait", "train", str(path)]
    command += ["--algorithm", f"{EXAMPLES}/my_flow.py:best_of_group"]
    command += ["--reward.functions", f"[{EXAMPLES}/length_reward.py:brief]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = logged(recipe)
    assert {"rewards/brief/mean", "actor/pushed"} <= rows[-1].keys()
    assert {sample["advantages"] for sample in samples_of(recipe, 1)} <= {-1.0, 0.0, 1.0}


def test_own_flow_and_reward_from_python(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from length_reward import brief
    from my_flow import best_of_group

    keys = make_recipe(options={}).model_dump(mode="json", exclude={"algorithm", "reward"})
    outcome = plait.train(**keys, algorithm=best_of_group, reward=brief)
    assert outcome.finished
    assert "rewards/brief/mean" in outcome.metrics
    stored = (Path(keys["run_dir"]) / "recipe.yaml").read_text()
    assert "my_flow.py:best_of_group" in stored, "the run can be resumed from the command line"


def test_a_flow_from_python_is_what_its_file_says_now(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rewards are, and what is kept of the code: a notebook that had imported it before ran what it was then."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file, source = tmp_path / "edited_flow.py", (EXAMPLES / "my_flow.py").read_text()
    file.write_text(source)
    from edited_flow import best_of_group  # pyright: ignore[reportMissingImports]

    file.write_text(source.replace("actor.train(samples,", "actor.train(samples, epochs=2,"))
    keys = make_recipe(options={}, steps=1).model_dump(mode="json", exclude={"algorithm"})
    assert plait.train(**keys, algorithm=best_of_group).metrics["training/optimizer_steps"] == 2


def test_keys_from_python_are_laid_over_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: m\ndata: {source: d}\nsampling: {max_running: 2}\noptions: {kl_coef: 0.1, epochs: 2}\n")
    monkeypatch.setattr("plait.runtime.api.run", lambda recipe, **_: recipe)
    recipe: Any = plait.train(path, sampling={"temperature": 0.5}, options={"epochs": 3})
    assert (recipe.sampling.max_running, recipe.sampling.temperature) == (2, 0.5)
    assert recipe.options == {"kl_coef": 0.1, "epochs": 3}


def test_a_step_that_is_asked_to_stop_is_finished_and_saved(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    undisturbed = make_recipe(steps=4, run_dir=str(tmp_path / "whole"))
    run(undisturbed)

    stopped = make_recipe(steps=4)
    (tmp_path / "reward.py").write_text(
        "import os, signal\n"
        "def count_sevens(completions, **columns):\n"
        f"    if os.path.exists({str(tmp_path / 'stop')!r}):\n"
        f"        os.remove({str(tmp_path / 'stop')!r})\n"
        f"        os.kill({os.getpid()}, signal.SIGTERM)\n"
        "    return [float(text.count('7')) for text in completions]\n"
    )
    (tmp_path / "stop").touch()
    outcome = run(stopped)
    assert (outcome.finished, outcome.step) == (False, 1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "handlers are given back"
    outcome = run(stopped, resume=True)
    assert outcome.finished
    assert [row["step"] for row in logged(stopped)] == list(range(1, 5))
    for left, right in zip(logged(undisturbed), logged(stopped), strict=True):
        assert {k: v for k, v in left.items() if not k.startswith(("timing_", "perf/"))} == {
            k: v for k, v in right.items() if not k.startswith(("timing_", "perf/"))
        }


def test_samples_without_a_reward_are_dropped_and_counted(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(steps=1)
    (tmp_path / "reward.py").write_text(
        "def count_sevens(completions, **columns):\n"
        "    return [None, *(1.0 * i for i in range(len(completions) - 1))]\n"
    )
    outcome = run(recipe)
    assert outcome.metrics["reward/dropped"] == 3
    assert sum("advantages" not in sample for sample in samples_of(recipe, 1)) == 3


def test_no_reward_at_all_stops_the_run(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(steps=1)
    (tmp_path / "reward.py").write_text(
        "def count_sevens(completions, **columns):\n    return [None] * len(completions)\n"
    )
    with pytest.raises(RunError, match=r"no sample of 12 has a score from `reward`.*reward\.functions"):
        run(recipe)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sampling.top_p": 0.9, "sampling.engine": "vllm"}, ConfigError, r"`sampling\.top_p` is 0\.9, but .*to 1, or"),
    ({"sampling.temperature": 0}, ConfigError, r"`sampling\.temperature` is 0"),
    ({"sampling.max_response_tokens": 256}, ConfigError, r"exceed the 256 positions"),
    (
        {"sampling.kv_tokens": 16, "sampling.max_response_tokens": 16},
        ConfigError,
        r"exceed the 16 tokens of the KV pool \(`sampling\.kv_tokens`",
    ),
    ({"data.max_prompt_tokens": 3}, DataError, r"12 of 12 prompts are longer than 3 tokens"),
    ({"data.source": "nowhere.jsonl"}, DataError, r"`data\.source`: `nowhere\.jsonl` does not exist"),
    ({"algorithm": "gpro"}, ConfigError, r"no algorithm `gpro` \(did you mean `grpo`\?\); give one of"),
    ({"algorithm": "nowhere.py:flow"}, ConfigError, r"`nowhere\.py` does not exist"),
    (
        {"algorithm": f"{EXAMPLES}/my_flow.py:best_of_grup"},
        ConfigError,
        r"has no `best_of_grup`; did you mean `best_of_group`",
    ),
    ({"algorithm": f"{EXAMPLES}/my_flow.py:best_of_group"}, ConfigError, r"unknown key `options\.kl_coef`"),
    ({"reward.functions": []}, ConfigError, r"role `reward`, which nothing fills: set `reward\.functions`"),
    ({"model": "smollm2-135m-instrct"}, Exception, r"smollm2-135m-instruct"),
    ({"trackers": ["wandb"]}, ConfigError, r"trackers.*wandb"),
]


@pytest.mark.parametrize(
    ("keys", "kind", "message"), WRONG, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_wrong_input_is_refused_before_any_work(
    make_recipe: MakeRecipe, keys: dict[str, Any], kind: type[Exception], message: str
) -> None:
    recipe = make_recipe(**keys)
    with pytest.raises(kind, match=message):
        run(recipe)
    assert not recipe.run_dir.exists() or not any(recipe.run_dir.iterdir()), "nothing was written"


def test_an_existing_run_is_kept(make_recipe: MakeRecipe) -> None:
    run(make_recipe(steps=1))
    with pytest.raises(ConfigError, match=r"holds a run already.*resume=True.*`overwrite: true`"):
        run(make_recipe(steps=1))
    with pytest.raises(ConfigError, match=r"begun with other values of `optimizer\.betas`"):
        run(make_recipe(steps=2, **{"optimizer.betas": (0.8, 0.9)}), resume=True)
    assert run(make_recipe(steps=2), resume=True).step == 2
    assert run(make_recipe(steps=1, overwrite=True)).step == 1


def test_a_flow_that_asks_too_much_of_a_role(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        "def loss(batch): ...\n"
        "def other(prompts, actor, reward):\n"
        "    samples = reward.generate(prompts)\n    actor.train(samples, loss=loss)\n"
        "def costs(prompts, actor, cost):\n"
        "    samples = actor.generate(prompts)\n    cost.score(samples)\n    actor.train(samples, loss=loss)\n"
        "def coached(prompts, actor, coach):\n    pass\n"
    )
    for name, kind, message in (
        ("other", FlowError, "role `reward` cannot `generate`"),
        ("costs", ConfigError, r"role `cost`, which nothing fills: set `cost\.functions`"),
        ("coached", FlowError, "role `coach`, which nothing fills"),
    ):
        functions = {} if name == "other" else {"reward.functions": []}
        recipe = make_recipe(algorithm=f"{tmp_path}/flow.py:{name}", options={}, **functions)
        with pytest.raises(kind, match=message):
            run(recipe)
