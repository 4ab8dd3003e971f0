"""The pages for those who come from TRL, verl or OpenRLHF are made of one table, and what it names exists.

After a change of the table: `python -m tests.docs.test_coming_from`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from plait.algorithms.dpo import DPOOptions
from plait.algorithms.options import PolicyOptions
from plait.cli.help import options_of
from plait.errors import ConfigError
from plait.recipes.algorithm import BUILT_IN, load_flow, options_class
from plait.recipes.keys import parse_overrides
from plait.recipes.other_names import System, answer, answer_value, systems
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe, validate_options

DOCS = Path(__file__).parents[2] / "docs"
KEYS = {option.name.removeprefix("--") for option in options_of("train")}
OPTIONS = {name for algorithm in BUILT_IN for name in options_class(load_flow(algorithm)).model_fields}  # type: ignore[union-attr]
SCRIPTS = {"reward_model_name_or_path", "config"}
"""Options of TRL's scripts, which no public dataclass holds."""
PPO = """
sft_model_path reward_model_path value_model total_episodes num_ppo_epochs num_mini_batches stop_token stop_token_id
local_rollout_forward_batch_size response_length kl_coef kl_estimator cliprange cliprange_value vf_coef gamma lam
whiten_rewards missing_eos_penalty num_sample_generations model_adapter_name ref_adapter_name
"""
"""Of `PPOConfig` and `PPOTrainer`, which TRL 1.10 has and 1.16 has not."""
UNLISTED = {
    "Experimental trainers",
    "Earlier versions",
    "Earlier versions, and other trainers",
    "Names without dots, of earlier versions",
}
"""Groups of names that no list here holds: of versions that are gone, and of scripts that are run less often."""
SAME = {"data.seed", "data.shuffle"}
"""Names of verl's that are keys of ours, and are taken."""
OVERLONG = {
    f"{section}.{name}"
    for section in (
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    )
    for name in ("enable", "len", "penalty_factor")
}
ELSEWHERE = OVERLONG | {
    "actor_rollout_ref.actor.megatron",
    "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff",
    "actor_rollout_ref.actor.megatron.router_replay",
    "actor_rollout_ref.actor.router_replay",
    "actor_rollout_ref.ref.megatron",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
    "algo.advantage.is_correction_enable",
    "algo.advantage.is_correction_type",
    "algorithm.gdpo_reward_keys",
    "algorithm.gdpo_reward_weights",
    "async_training.partial_rollout",
    "async_training.require_batches",
    "async_training.staleness_threshold",
    "async_training.trigger_parameter_sync_step",
    "critic.megatron",
    "custom_reward_function.reward_kwargs",
    "data.response_key",
    "data.sampler.class_name",
    "data.sampler.class_path",
    "reward.custom_reward_function.reward_kwargs",
    "reward_model.launch_reward_fn_async",
    "reward_model.max_length",
    "reward_model.micro_batch_size_per_gpu",
    "reward_model.strategy",
}
"""Dotted names that are not in the lists: of other trainers of verl, of its older versions, and those that its command
line adds by `+`; of older versions of OpenRLHF."""


def page(system: System) -> str:
    lines = [
        f"# Coming from {system.title}",
        "",
        f"This page lists each name of {system.names_of}, and the key of a [recipe](recipes.md) that says the same.",
        "If you give one of these names to `plait train`, it tells you the key. Data formats ([data.md](data.md)) and",
        "reward functions ([rewards.md](rewards.md)) need no change. Options of algorithms are compared in",
        "[algorithms.md](algorithms.md#options).",
    ]
    if system.begin:
        lines += ["", system.begin.rstrip()]
    for title, entries in system.groups.items():
        lines += ["", f"## {title}", "", f"| {system.title} | here | |", "|---|---|---|"]
        for entry in entries:
            theirs, ours = (", ".join(f"`{name}`" for name in names) for names in (entry.names, entry.keys))
            lines.append(f"| {theirs} | {ours or 'none'} | {entry.note} |")
    return "\n".join(lines) + "\n"


def path_of(system: System) -> Path:
    return DOCS / f"coming-from-{system.id}.md"


@pytest.mark.parametrize("system", systems(), ids=lambda system: system.id)
def test_the_page_is_made_of_the_table(system: System) -> None:
    assert path_of(system).read_text() == page(system)


@pytest.mark.parametrize("system", systems(), ids=lambda system: system.id)
def test_every_key_of_ours_exists(system: System) -> None:
    for entry in system.entries():
        for key in entry.keys:
            known = key.removeprefix("options.") in OPTIONS if key.startswith("options.") else key in KEYS
            assert known, f"{entry.names} is said to be `{key}`"
        assert entry.keys or entry.say, f"{entry.names} has neither a key nor a reason"
    names = [name for entry in system.entries() for name in entry.names]
    assert len(set(names)) == len(names)


def test_defaults_of_ours_are_what_the_tables_say() -> None:
    """Numbers and names before "here unless set"; of an option those of some algorithm."""
    defaults = {option.name.removeprefix("--"): [option.default] for option in options_of("train")}
    for cls in (options_class(load_flow(algorithm)) for algorithm in BUILT_IN):
        for name, info in cls.model_fields.items():  # type: ignore[union-attr]
            defaults.setdefault(f"options.{name}", []).append(str(info.default))
    seen = 0
    for entry in (entry for system in systems() for entry in system.entries()):
        for clause in re.findall(r"([^,;]+) here unless set", entry.note):
            told = re.findall(r"`([^`]+)`|(\d[\d.e-]*)", clause)
            ours = " ".join(default for key in entry.keys for default in defaults[key])
            numbers = {float(number) for number in re.findall(r"\d[\d.e-]*", ours)}
            for name, number in told:
                assert name in {*ours.split(), *BUILT_IN} if name else float(number) in numbers, (entry.names, clause)
            seen += len(told)
    assert seen > 20


def test_no_name_of_theirs_is_a_key_of_ours() -> None:
    """But where it means the same."""
    same = {"dtype", "seed", *SAME}
    theirs = {name: entry for system in systems() for entry in system.entries() for name in entry.names}
    for name in theirs.keys() & KEYS:
        assert name in same, name
        assert name in theirs[name].keys


def test_every_name_of_trl_is_in_the_table_and_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import peft
    import trl
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.gkd import GKDConfig
    from trl.experimental.orpo import ORPOConfig

    classes = (
        trl.SFTConfig,
        trl.RewardConfig,
        trl.DPOConfig,
        CPOConfig,
        ORPOConfig,
        trl.GRPOConfig,
        trl.RLOOConfig,
        trl.KTOConfig,
        trl.DistillationConfig,
        GKDConfig,
        trl.ModelConfig,
        trl.ScriptArguments,
    )
    trainers = (
        trl.SFTTrainer,
        trl.RewardTrainer,
        trl.DPOTrainer,
        trl.GRPOTrainer,
        trl.RLOOTrainer,
        trl.KTOTrainer,
        trl.DistillationTrainer,
    )
    arguments = {name for cls in trainers for name in inspect.signature(cls.__init__).parameters} - {"self", "model"}
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)} | arguments
    fields |= {f"peft_config.{field.name}" for field in dataclasses.fields(peft.LoraConfig)}
    (mine,) = (system for system in systems() if system.id == "trl")
    names = {name for entry in mine.entries() for name in entry.names}
    assert trl.__version__.startswith("1.16.")
    assert peft.__version__.startswith("0.21.")
    elsewhere = SCRIPTS | set(PPO.split())
    assert names >= elsewhere
    assert names - elsewhere - unlisted(mine) == fields


@pytest.mark.slow  # imports every trainer
def test_every_name_of_the_experimental_trainers_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.a2po import A2POConfig
    from trl.experimental.async_distillation import AsyncDistillationConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig
    from trl.experimental.gold import GOLDConfig
    from trl.experimental.iw_opd import IWOPDConfig
    from trl.experimental.online_dpo import OnlineDPOConfig
    from trl.experimental.sdft import SDFTConfig
    from trl.experimental.sdpo import SDPOConfig
    from trl.experimental.server_distillation import ServerDistillationConfig
    from trl.experimental.tpo import TPOConfig

    classes = (
        A2POConfig,
        AsyncDistillationConfig,
        AsyncGRPOConfig,
        GOLDConfig,
        IWOPDConfig,
        OnlineDPOConfig,
        SDFTConfig,
        SDPOConfig,
        ServerDistillationConfig,
        TPOConfig,
    )
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert [name for name in sorted(fields - KEYS) if "TRL" not in answer(name)] == []


def unlisted(system: System) -> set[str]:
    groups = [entries for title, entries in system.groups.items() if title in UNLISTED]
    assert groups
    return {name for entries in groups for entry in entries for name in entry.names}


def names_of(system: str) -> list[str]:
    """All names that are in its list here."""
    lines = (Path(__file__).parent / f"names_of_{system}.txt").read_text().splitlines()
    sections = (line.partition(":") for line in lines if not line.startswith("#"))
    return [f"{section}.{name}".lstrip(".") for section, _, names in sections for name in names.split()]


@pytest.mark.parametrize("id", ["verl", "openrlhf"])
def test_every_name_of_another_system_is_in_its_table_and_exists(id: str) -> None:
    """By itself, or as one of a section that is."""
    (mine,) = (system for system in systems() if system.id == id)
    table = {name for entry in mine.entries() for name in entry.names}
    every = names_of(id)
    around = {name: {name, *(name[: dot.start()] for dot in re.finditer(r"\.", name))} for name in every}
    assert len(every) > 200
    assert [name for name in every if not around[name] & table] == []
    assert [name for name in every if name not in SAME and not answer(name)] == []
    exist = set().union(*around.values()) | ELSEWHERE
    assert [name for name in table - unlisted(mine) if "." in name and name not in exist] == []


def test_values_have_other_names_too() -> None:
    for system in systems():
        for entry in system.entries():
            for theirs in entry.values:
                assert all(f"`{theirs}` is" in answer_value(key, theirs) for key in entry.keys)
    with pytest.raises(ConfigError, match=r"found 'low_var_kl'; verl's `low_var_kl` is `k3` here \(docs/coming-from-v"):
        validate_options(PolicyOptions, {"kl_estimator": "low_var_kl"})
    with pytest.raises(ConfigError, match=r"^key `algorithm`: no algorithm `gae`; verl's `gae` is `ppo` here \(docs"):
        load_flow("gae")
    with pytest.raises(ConfigError, match=r"^key `algorithm`: no algorithm `dapo`; it is `grpo` with other options \("):
        load_flow("dapo")
    with pytest.raises(
        ConfigError, match=r"found 'simpo'; TRL's `simpo` is `options\.loss_type: sigmoid_norm` of `dpo`"
    ):
        validate_options(DPOOptions, {"loss_type": "simpo"})
    with pytest.raises(
        ConfigError, match=r"found \['sigmoid', 'sft'\]; TRL's `sft` is `options\.nll_coef` of `dpo` here"
    ):
        validate_options(DPOOptions, {"loss_type": ["sigmoid", "sft"]})
    assert answer_value("options.kl_estimator", "k9") == answer_value("options.kl_estimator", 3) == ""


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("num_generations", ": TRL's is `samples_per_prompt` here (docs/coming-from-trl.md)"),
        ("use_vllm", ": TRL's is `sampling.engine` here (`vllm`, in an environment of its own"),
        ("vllm_mode", ", TRL's, has no equivalent here: samples are drawn by plait's own engine"),
        ("callbacks", ", TRL's, has no equivalent here: a run calls nothing of yours between steps; `metrics.jsonl`"),
        ("train_dataset", ": TRL's is `data.source` here"),
        ("options.epsilon", ": TRL's `epsilon` is `options.clip_low` here (without `epsilon_high` set"),
        ("sampling.max_completion_length", ": TRL's `max_completion_length` is `sampling.max_response_tokens` here"),
        ("lora.lora_alpha", ": TRL's `lora_alpha` is `lora.alpha` here"),
        ("checkpoint.save_steps", ": TRL's `save_steps` is `checkpoint.every` here"),
        ("lora.use_dora", ", TRL's `use_dora`, has no equivalent here: adapters are plain LoRA"),
        ("lora.use_rslora", ": TRL's `use_rslora` is `lora.alpha` here (its scale is alpha / √rank"),
        ("lora.bias", ", TRL's `peft_config.bias`, has no equivalent here: no bias is trained"),
        ("lora.r", ": TRL's `peft_config.r` is `lora.rank` here"),
        ("lora.exclude_modules", ": TRL's `peft_config.exclude_modules` is `lora.target_modules` here"),
        ("lora.init_lora_weights", ", TRL's `peft_config.init_lora_weights`, has no equivalent here: A is drawn"),
        ("sampling.repetition_penalty", ", TRL's `repetition_penalty`, has no equivalent here: training needs"),
        ("peft_config.r", ": TRL's is `lora.rank` here"),
        ("peft_config.x", ": TRL's `peft_config` is `lora.rank` and `lora.alpha` and `lora.target_modules` here"),
        ("lr_scheduler_kwargs.min_lr_rate", ": TRL's `lr_scheduler_kwargs` is `optimizer.min_lr_ratio` and"),
        ("num_ppo_epochs", ": TRL's is `options.epochs` here (theirs is 4 unless set, ours 1)"),
        ("cpo_alpha", ": TRL's is `options.nll_coef` here (of `dpo` with `options.reference_free: true`"),
        ("options.simpo_gamma", ": TRL's `simpo_gamma` is `options.margin` here (of `dpo` with"),
        ("desirable_weight", ": TRL's is `options.desirable_weight` here (of `kto`"),
        ("undesirable_loss_weight", ": OpenRLHF's is `options.undesirable_weight` here (of `kto`"),
        ("config", ", TRL's, has no equivalent here: a recipe is given as it is: `plait train RECIPE`"),
        ("rpo_alpha", ": TRL's is `options.nll_coef` here (of `dpo`: the weight is the same"),
        ("options.rpo_alpha", ": TRL's `rpo_alpha` is `options.nll_coef` here"),
        ("max_prompt_length", ": TRL's is `data.max_prompt_tokens` here"),
        ("max_seq_length", ": TRL's is `data.max_example_tokens` here"),
        ("evaluation_strategy", ": TRL's is `evaluation.every` and `evaluation.items` here"),
        ("reprompt_template", ", TRL's, has no equivalent here: a function of yours writes what the teacher reads"),
        ("model.partial_pretrain", ": verl's is `model` here (of the SFT trainer)"),
        ("optim.lr", ": verl's is `optimizer.learning_rate` here (of the SFT trainer)"),
        ("data.multiturn.messages_key", ", verl's `data.multiturn`, has no equivalent here: columns have the names"),
        ("ref_num_nodes", ": OpenRLHF's is `plan` and `devices` here"),
        ("vllm_is_correction_type", ": OpenRLHF's is `options.correction` here (`tis` and `icepop` are the same"),
        ("actor_rollout_ref.rollout.n", ": verl's is `samples_per_prompt` here"),
        ("rollout.n", ": verl's `actor_rollout_ref.rollout.n` is `samples_per_prompt` here"),
        ("lr", ": verl's `actor_rollout_ref.actor.optim.lr` is `optimizer.learning_rate` here"),
        ("optimizer.lr", ": verl's `actor_rollout_ref.actor.optim.lr` is `optimizer.learning_rate` here"),
        ("critic.optimizer.lr", ": verl's `critic.optim.lr` is `critic.optimizer.learning_rate` here"),
        ("critic.optim.lr", ": verl's is `critic.optimizer.learning_rate` here"),
        (
            "actor_rollout_ref.actor.fsdp_config.fsdp_size",
            ": verl's `actor_rollout_ref.actor.fsdp_config` is `plan` here",
        ),
        ("global_profiler.steps", ", verl's `global_profiler`, has no equivalent here: every action of every step"),
        ("logger.wandb.org", ": OpenRLHF's `logger.wandb` is `trackers` here"),
        ("n_samples_per_prompt", ": OpenRLHF's is `samples_per_prompt` here (docs/coming-from-openrlhf.md)"),
        ("rollout.n_samples_per_prompt", ": OpenRLHF's is `samples_per_prompt` here (docs/coming-from-openrlhf.md)"),
        ("top_p", ": TRL's is `sampling.top_p` here (log-probs are over the tokens that are left"),
        ("actor_rollout_ref.rollout.top_k", ": verl's is `sampling.top_k` here (log-probs"),
        ("loss_type", ": TRL's is `options.aggregation` and `options.loss_type` here"),
        ("batch_size", ": OpenRLHF's `rollout.batch_size` is `prompts_per_step` here"),
    ],
)
def test_answers(key: str, said: str) -> None:
    assert answer(key).startswith(said)


def test_what_holds_other_keys_is_answered_for_what_stands_in_it_or_for_itself() -> None:
    assert answer("peft_config", {}).startswith(": TRL's is `lora.rank` and `lora.alpha` and")
    assert answer("peft_config", {"r": 8}).startswith(": TRL's `peft_config.r` is `lora.rank` here")
    assert answer("args", {"learning_rate": 1e-5}).startswith(", TRL's, has no equivalent here: its settings are keys")
    assert answer("rollout", {"n_samples_per_prompt": 8}).startswith(": OpenRLHF's `rollout.n_samples_per_prompt` is")


@pytest.mark.parametrize(
    "key", ["stepps", "n", "path", "model.name", "rollout", "x", "lora.lr", "options.gamma", "seed.x"]
)
def test_what_is_nobodys_gets_no_answer(key: str) -> None:
    assert answer(key) == ""


def recipe_of(system: str, folder: Path) -> Recipe:
    """The recipe that a page begins with, checked as far as it can be without its files."""
    _, _, rest = (DOCS / f"coming-from-{system}.md").read_text().partition("```yaml\n")
    path = folder / f"{system}.yaml"
    path.write_text(rest.partition("```")[0])
    recipe = load_recipe(path)
    validate_options(options_class(load_flow(recipe.algorithm)) or object, recipe.options)
    return recipe


def test_the_recipe_for_a_script_of_trl_is_one(tmp_path: Path) -> None:
    recipe = recipe_of("trl", tmp_path)
    assert (recipe.steps, recipe.prompts_per_step, recipe.lora.rank) == (100, 8, 16)
    assert recipe.lora.target_modules == ("q_proj", "v_proj"), "as peft takes for qwen3 where nothing is said"


@pytest.mark.parametrize("system", ["verl", "openrlhf"])
def test_the_recipe_for_a_command_is_one(system: str, tmp_path: Path) -> None:
    """Its names are those of the table, and its mini-batches those of the command."""
    command = (DOCS / f"coming-from-{system}.md").read_text().partition("```\n")[2].partition("```")[0]
    names = re.findall(r"(?:--([a-z_.]+))|(?:\s([a-z_.]+)=)", command)
    assert names
    assert [name for pair in names if not answer(name := pair[0] or pair[1])] == []
    recipe = recipe_of(system, tmp_path)
    assert (recipe.prompts_per_step, recipe.samples_per_prompt, recipe.options["mini_batches"]) == (64, 8, 4)


def test_a_command_line_a_recipe_and_options_are_answered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^unknown key `num_generations`: TRL's is `samples_per_prompt` here \(docs"):
        parse_overrides(["--num_generations", "8"])
    recipe = tmp_path / "verl.yaml"
    recipe.write_text("model: m\nactor_rollout_ref:\n  rollout:\n    n: 8\n")
    with pytest.raises(ConfigError, match=r"^unknown key `actor_rollout_ref`: verl's `actor_rollout_ref\.rollout\.n`"):
        load_recipe(recipe)
    recipe.write_text("model: m\ndata:\n  source: s\n  train_files: f\n")
    with pytest.raises(ConfigError, match=r"^unknown key `data.train_files`: verl's is `data.source` here"):
        load_recipe(recipe)
    recipe.write_text("model: {name: m}\n")
    with pytest.raises(ConfigError, match=r"^`model` is no section of keys$"):
        load_recipe(recipe)
    with pytest.raises(ConfigError, match=r"^`critic.model` is no section of keys$"):
        parse_overrides(["--critic.model.fsdp_config.param_offload", "true"])
    recipe.write_text("model: m\nalgorithm: {adv_estimator: grpo}\n")
    with pytest.raises(ConfigError, match=r"^`algorithm` is no section of keys: verl's `algorithm.adv_estimator` is"):
        load_recipe(recipe)
    with pytest.raises(ConfigError, match=r"^unknown key `algorithm.adv_estimator`: verl's is `algorithm` here"):
        parse_overrides(["--algorithm.adv_estimator", "grpo"])
    with pytest.raises(ConfigError, match=r"found `trainer.total_epochs=3`: verl's is `epochs` here \(verl"):
        parse_overrides(["trainer.total_epochs=3"])
    with pytest.raises(ConfigError, match=r"found `\+steps=3`; did you mean `--steps=3`\?"):
        parse_overrides(["+steps=3"])
    with pytest.raises(
        ConfigError, match=r"^unknown key `options.epsilon_high`: TRL's `epsilon_high` is `options.clip"
    ):
        validate_options(PolicyOptions, {"epsilon_high": 0.28})


def test_all_unknown_keys_of_a_recipe_are_answered_at_once(tmp_path: Path) -> None:
    recipe = tmp_path / "trl.yaml"
    data = "[{source: s}, {train_files: f}]"
    recipe.write_text(f"model_name_or_path: m\nlora: {{r: 1}}\nmax_steps: 5\nstepps: 5\ndata: {data}\n")
    with pytest.raises(ConfigError) as refused:
        load_recipe(recipe)
    first, inside, second, third, of_list = str(refused.value).split("; unknown key ")
    assert first == "unknown key `model_name_or_path`: TRL's is `model` here (docs/coming-from-trl.md)"
    assert second.startswith("`max_steps`: TRL's is `steps` here (counts batches here and optimizer steps there;")
    assert third == "`stepps`; did you mean `steps`?"
    assert (inside, of_list[:24]) == (
        "`lora.r`: TRL's `peft_config.r` is `lora.rank` here (docs/coming-from-trl.md)",
        "`data.more.0.train_files",
    )


if __name__ == "__main__":
    for one in systems():
        path_of(one).write_text(page(one))
