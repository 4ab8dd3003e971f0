"""The class of a flow's options, found from the annotation of that parameter alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel

from plait.errors import ConfigError, FlowError
from plait.recipes.algorithm import load_flow, options_class, trace_algorithm

if TYPE_CHECKING:
    from plait.algorithms.losses import LossBatch
    from plait.dataflow import Prompts, Role

ROLES = ("actor", "ref", "reward")


class Options(BaseModel):
    offset: float = 0.0


def loss(batch: LossBatch, advantages: object) -> None: ...


def flow(prompts: Prompts, actor: Role, reward: Role, options: Options) -> None:
    samples = actor.generate(prompts)
    actor.train(samples, loss=loss, advantages=reward.score(samples))


def test_names_for_type_checkers_need_not_resolve() -> None:
    assert options_class(flow) is Options
    assert trace_algorithm(flow, {"offset": 1.0}, ROLES).roles == ("actor", "reward")


FILE = """
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from somewhere import Options, Prompts, Role

def flow(prompts: Prompts, actor: Role, reward: Role, options: Options) -> None: ...
def no_class(prompts, actor, options: Options | None): ...
def bare(prompts, actor, options): ...
def either(prompts, actor, options: int | str): ...
def without(prompts: Prompts, actor: Role): ...
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flow", r"flow `flow`: the annotation `Options` .*cannot be resolved \(name 'Options' is not defined\)"),
        ("no_class", "flow `no_class`: the annotation .*not under `if TYPE_CHECKING`"),
        ("bare", "flow `bare`: annotate its parameter `options`"),
        ("either", "flow `either`: .*needs the annotation of one class, found `int . str`"),
    ],
)
def test_options_that_have_no_class_are_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "flows.py").write_text(FILE)
    with pytest.raises(FlowError, match=said):
        options_class(load_flow(f"{tmp_path}/flows.py:{name}"))
    assert options_class(load_flow(f"{tmp_path}/flows.py:without")) is None


def test_an_option_of_another_algorithm_is_said_to_be_that() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key `options.gamma`: it is one of ppo, safe_rlhf, and the"):
        trace_algorithm(load_flow("grpo"), {"gamma": 0.9}, ROLES)
    with pytest.raises(ConfigError, match=r"^unknown key `options.ofset`; did you mean `options.offset`\?$"):
        trace_algorithm(flow, {"ofset": 1.0}, ROLES)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("GRPO", "; it is `grpo`; give one of"),
        ("DPOTrainer", "; it is `dpo`; give one of"),
        ("reinforce++", "; it is `reinforce_pp`; give one of"),
        ("dr-grpo", "; it is `grpo` with other options"),
        ("orpo", "; it is `dpo` with other options"),
        ("CISPO", "; it is `grpo` with `options.loss_type: cispo`"),
        ("LUSPO", "; it is `grpo` with other options"),
        ("TOPR", "; it is `examples/newer_losses.py:newer` with `options.loss: topr`"),
        ("pass_k", "; it is `examples/newer_advantages.py:newer` with `options.advantage: pass_at_k`"),
        ("KL-Cov", "; it is `examples/newer_advantages.py:newer` with `options.covariant`"),
        ("LUFFY", "; it is `examples/demonstrated.py:demonstrated` with `options.mix: luffy`"),
        ("PPO-ptx", "; it is `ppo` with `options.ptx_coef` and `pretraining.source`"),
        ("online_dpo", "; it is `examples/online_dpo.py:online_dpo`"),
        ("SDPOTrainer", "; it is `examples/self_distillation.py:sdpo`"),
        ("self-distillation", "; it is `examples/self_distillation.py:sdft`"),
        ("reinforce_baseline", "; OpenRLHF's `reinforce_baseline` is"),
        ("gpro", " (did you mean `grpo`?); give one of"),
        ("nothing", "; give one of"),
    ],
)
def test_what_others_call_an_algorithm_is_answered(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_flow(name)
    assert str(error.value).startswith(f"key `algorithm`: no algorithm `{name}`{said}")
