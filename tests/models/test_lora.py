"""Adapters on shared weights: peft's own numbers, gradients and files; several on one base without a second copy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from plait.data.packed import pack
from plait.data.records import Prompt
from plait.errors import ModelError
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.layout.decoder import HEAD
from plait.models.backbone_model import copy_of
from plait.models.compute import widened
from plait.models.files import hub
from plait.models.files.saving import merged_weight, save_pretrained
from plait.models.language_loading import from_module, load_model
from plait.models.language_model import LanguageModel
from plait.models.loading import read_tokens
from plait.models.lora import add_lora, without_lora
from plait.models.lora_files import load_adapter, save_adapter
from plait.models.lora_settings import LoraSettings
from plait.models.lora_targets import check_targets, targets_of
from plait.models.scalar_loading import scalar_of, scalar_view
from plait.models.scalar_model import ScalarModel
from plait.models.working_weights import adapted_layers, layout_of
from plait.training.optimizer import MasterOptimizer
from plait.training.settings import OptimizerSettings
from tests.cases import slow_but
from tests.models.oracle import RAGGED, Groups, eager_logprobs, gradients, largest_error
from tests.models.test_admission import IN_PLACE
from tests.models.test_scalar_model import gradients as scalar_gradients
from tests.models.test_scalar_model import hf_scores, scores_of
from tests.models.tiny import FAMILIES, RECURRENT, tiny, tiny_llama, tiny_model, tiny_tokenizer, tiny_with_images

peft = pytest.importorskip("peft")

RANK_4 = LoraSettings(rank=4)


def stirred(view: Any, seed: int = 0) -> Any:
    """The view with A and B far from their start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in view.own.parameters.values():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return view


def logprobs_of(model: LanguageModel, **options: Any) -> Tensor:
    with torch.no_grad():
        return model.logprobs(pack(RAGGED), 1.0, **options)[0]


@torch.no_grad()
def merged_copy(view: Any) -> Any:
    """A copy of the model under the adapter, with its layers merged one by one."""
    whole = copy_of(without_lora(view))
    for at, layer in adapted_layers(view.module.base_model).items():
        if view.own.adapter in layer.lora_A:
            weight = whole.module.base_model.get_parameter(f"{at}.weight")
            weight.copy_(merged_weight(layer, view.own.adapter))
    if isinstance(view, ScalarModel):
        whole.module.score.weight.copy_(view.module.score.weight)
    return whole


def in_peft(view: LanguageModel, module: Any) -> Any:
    """A PeftModel on a fresh module, by peft's public way, with the view's A and B."""
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in view.own.parameters})
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    model = peft.get_peft_model(module, config, autocast_adapter_dtype=False)
    state = {f"base_model.model.{name}": param.detach().clone() for name, param in view.own.parameters.items()}
    loaded = peft.set_peft_model_state_dict(model, state)
    assert not loaded.unexpected_keys
    return model.eval()


@pytest.mark.parametrize("widens", [True, False])
def test_adapters_of_bfloat16_compute_as_the_layers_under_them(monkeypatch: pytest.MonkeyPatch, widens: bool) -> None:
    """Without instructions for it: summed in float32, rounded once; with them by torch, whose sums are the same."""
    monkeypatch.setattr(widened, "WIDENS", widens)
    view = stirred(add_lora(tiny_model("llama", dtype=torch.bfloat16), RANK_4, name="actor", seed=0))
    layers = adapted_layers(view.module.base_model).values()
    for low in (of[view.own.adapter] for layer in layers for of in (layer.lora_A, layer.lora_B)):
        assert ("forward" in vars(low)) == widens
        x = torch.linspace(-1, 1, 6 * low.in_features).view(6, -1).bfloat16()
        exact = (x.double() @ low.weight.double().t()).float()
        torch.testing.assert_close(low(x).float(), exact, rtol=2**-7, atol=2**-7)
    assert logprobs_of(view).isfinite().all()


def kept_bytes(*models: Any) -> int:
    """Bytes of all distinct storages under the models' parameters."""
    storages = [param.untyped_storage() for model in models for param in model.module.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def engine_of(model: LanguageModel) -> Engine:
    return Engine(model, SamplingSettings(max_running=4, max_prefill_tokens=64))


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", slow_but(["llama", "mixtral"], FAMILIES))
def test_a_fresh_adapter_changes_no_bit_and_a_trained_one_is_pefts(family: str) -> None:
    model = tiny_model(family)
    before = logprobs_of(model)
    view = add_lora(model, RANK_4, name="actor", seed=1)
    assert torch.equal(logprobs_of(view), before)
    stirred(view)
    module = in_peft(view, tiny(family))
    expected = eager_logprobs(module, RAGGED)
    got = view.logprobs(pack(RAGGED), 1.0)
    assert (got[0] - before).abs().max() > 1e-2
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-6)
    theirs = gradients(module, *expected)
    mine = gradients(view.module, *got)
    strip = {name.removeprefix("base_model.model.").replace(".default.", "."): grad for name, grad in theirs.items()}
    assert largest_error({name.replace(".actor.", "."): grad for name, grad in mine.items()}, strip) < 1e-6
    assert len(mine) == len(view.trained.layout.blocks)
    assert torch.equal(logprobs_of(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_compute_in_the_compute_dtype(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype, weight_scale=0.05)
    before = logprobs_of(model)
    view = add_lora(model, RANK_4, name="actor", seed=1)
    assert torch.equal(logprobs_of(view), before)
    assert view.trained.weights.dtype == dtype
    assert not torch.equal(logprobs_of(stirred(view)), before)


def test_alpha_and_targets_are_the_settings(tmp_path: Path) -> None:
    settings = LoraSettings(rank=2, alpha=3.0, target_modules=("q_proj", "down_proj"))
    view = stirred(add_lora(tiny_llama(), settings, name="a", seed=0))
    assert {name.split(".")[-3] for name in view.own.parameters} == {"q_proj", "down_proj"}
    weight = view.module.get_parameter("model.layers.1.mlp.down_proj.weight")
    key = "model.layers.1.mlp.down_proj.lora_"
    delta = 1.5 * view.trained.parameter(f"{key}B.weight") @ view.trained.parameter(f"{key}A.weight")
    merged = merged_copy(view).module.get_parameter("model.layers.1.mlp.down_proj.weight")
    torch.testing.assert_close(merged, weight + delta, rtol=0, atol=1e-12)
    save_adapter(view, tmp_path / "it")
    config = json.loads((tmp_path / "it" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 3, ["down_proj", "q_proj"])


def test_a_saved_adapter_names_its_base_from_the_root_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pretrained(tiny_llama(torch.float32), tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    view = add_lora(load_model("base", dtype="float32"), RANK_4, name="a", seed=0)
    save_adapter(view, tmp_path / "it")
    monkeypatch.chdir(tmp_path / "it")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "it").peft_config["default"].r == 4
    assert read_tokens("../it")[1] == view.eos_token_ids == (2,), "those of its base"


def test_a_saved_adapter_names_a_base_of_a_hub_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pretrained(tiny_llama(torch.float32), tmp_path / "snapshot")
    monkeypatch.setattr(hub, "resolve", lambda name: tmp_path / "snapshot")
    save_adapter(add_lora(load_model("org/tiny", dtype="float32"), RANK_4, name="a", seed=0), tmp_path / "it")
    assert json.loads((tmp_path / "it/adapter_config.json").read_text())["base_model_name_or_path"] == "org/tiny"


def test_greedy_generation_is_that_of_the_unmerged_model_in_peft() -> None:
    view = stirred(add_lora(tiny_llama(), RANK_4, name="actor", seed=1), seed=3)
    prompts = ([5, 6, 7, 8], [40, 41, 42], [9])
    said = []
    for model in (view, without_lora(view)):
        engine = engine_of(model)
        for uid, ids in enumerate(prompts):
            sampling = Sampling(temperature=0.0, max_tokens=12)
            engine.add(Request(Prompt(uid, "", tuple(ids)), 1, sampling, NoiseKey(0, 0)))
        said.append({sample.prompt.uid: list(sample.token_ids) for sample in drain(engine)})
    module = in_peft(view, tiny("llama"))
    for uid, ids in enumerate(prompts):
        row = torch.tensor([ids])
        out = module.generate(input_ids=row, attention_mask=torch.ones_like(row), max_new_tokens=12, do_sample=False)
        assert out[0, len(ids) :].tolist() == said[0][uid]
    assert said[0] != said[1]


def test_engines_of_two_views_step_by_turns() -> None:
    """Each decode step of one comes between two of the other."""
    model = tiny_llama()
    views = [stirred(add_lora(model, RANK_4, name=name, seed=1), seed) for seed, name in enumerate("ab")]

    def engines() -> list[Engine]:
        made = [engine_of(view) for view in (*views, model)]
        for engine in made:
            engine.add(Request(Prompt(0, "", (5, 6, 7)), 2, Sampling(max_tokens=8), NoiseKey(3, 0)))
        return made

    apart = [sorted((s.index, s.token_ids) for s in drain(engine)) for engine in engines()]
    together: list[list[Any]] = [[], [], []]
    turns = engines()
    while any(engine.has_work for engine in turns):
        for engine, out in zip(turns, together, strict=True):
            out += [(s.index, s.token_ids) for s in engine.step()] if engine.has_work else []
    assert [sorted(out) for out in together] == apart
    assert apart[0] != apart[1] != apart[2]


# --- several on one base -----------------------------------------------------------------------------------------


def test_actor_critic_reward_and_reference_share_one_copy_of_the_weights() -> None:
    base = tiny_llama(torch.bfloat16)
    before, weights_bytes = kept_bytes(base), base.weights.nbytes
    assert before == weights_bytes
    actor = add_lora(base, RANK_4, name="actor", seed=0)
    critic = add_lora(scalar_view(actor, seed=1), RANK_4, name="critic", seed=0)
    reward = add_lora(scalar_view(base, seed=2), RANK_4, name="reward", seed=0)
    reference = without_lora(actor)
    assert reference is base
    assert isinstance(critic, ScalarModel)
    own = [view.trained.weights for view in (actor, critic, reward)]
    for view in (actor, critic, reward):
        assert view.weights is base.weights
        at = view.module.get_parameter("model.layers.0.self_attn.q_proj.weight")
        assert at.untyped_storage().data_ptr() == base.weights.untyped_storage().data_ptr()
        for block, start, _ in view.trained.layout.entries:
            param = view.trained.parameter(block.param.name)
            assert param.data_ptr() == view.trained.weights.data_ptr() + start * 2
            assert any(param is other for other in view.module.parameters())
    assert kept_bytes(actor, critic, reward, reference) == weights_bytes + sum(w.nbytes for w in own)
    assert len({w.data_ptr() for w in own}) == 3
    names = {block.param.name for block in critic.trained.layout.blocks}
    assert names == {block.param.name for block in actor.trained.layout.blocks} | {HEAD}


@pytest.mark.parametrize("checkpoint", [False, True])
def test_forwards_and_backwards_of_several_views_interleave(checkpoint: bool) -> None:
    """The backward of one, with recomputed layers, comes after the forwards of the others."""
    base = tiny_llama()
    actor = stirred(add_lora(base, RANK_4, name="actor", seed=0), 1)
    critic = stirred(add_lora(scalar_view(base, seed=1), RANK_4, name="critic", seed=0), 2)
    batch = pack(RAGGED)
    alone = gradients(actor.module, *actor.logprobs(batch, 1.0))
    critic_alone = scalar_gradients(critic.module, *critic.values_and_scores(batch))
    assert len(alone) + 1 == len(critic_alone)

    first = actor.logprobs(batch, 1.0, checkpoint=checkpoint)
    reference = logprobs_of(base)
    second = critic.values_and_scores(batch, checkpoint=checkpoint)
    assert torch.equal(logprobs_of(without_lora(actor)), reference)
    mine = gradients(actor.module, *first)
    assert all(torch.equal(mine[name], alone[name]) for name in alone)
    assert torch.equal(logprobs_of(base), reference)
    theirs = scalar_gradients(critic.module, *second)
    assert all(torch.equal(theirs[name], critic_alone[name]) for name in critic_alone)
    assert alone.keys() == mine.keys()


def test_an_adapter_that_is_on_is_not_switched_again() -> None:
    base = tiny_llama()
    view = add_lora(base, RANK_4, name="a", seed=0)
    logprobs_of(view)
    layer = view.module.base_model.layers[0].self_attn.q_proj
    active = layer._active_adapter
    logprobs_of(view)
    assert layer._active_adapter is active
    logprobs_of(base)
    assert layer._active_adapter == []


def test_a_critic_of_its_own_backbone_has_an_adapter_and_its_head() -> None:
    model = scalar_of(tiny_llama(), seed=0)
    before = scores_of(model, RAGGED)
    view = add_lora(model, RANK_4, name="critic", seed=0)
    assert torch.equal(scores_of(view, RAGGED), before)
    mine = scalar_gradients(view.module, *view.values_and_scores(pack(RAGGED)))
    assert len(mine) == len(view.trained.layout.blocks) == 2 * 14 + 1
    assert not torch.equal(scores_of(stirred(view), RAGGED), before)
    assert torch.equal(scores_of(without_lora(view), RAGGED), before)
    assert torch.equal(scores_of(copy_of(view), RAGGED), scores_of(view, RAGGED))
    torch.testing.assert_close(scores_of(merged_copy(view), RAGGED), scores_of(view, RAGGED), rtol=0, atol=1e-9)


def test_training_moves_the_adapter_and_nothing_else() -> None:
    base = tiny_llama(torch.bfloat16)
    frozen, reference = base.weights.clone(), logprobs_of(base)
    actor = add_lora(base, RANK_4, name="actor", seed=0)
    other = stirred(add_lora(base, RANK_4, name="other", seed=0))
    others = other.trained.weights.clone()
    optimizer = MasterOptimizer(actor, OptimizerSettings(learning_rate=1e-2), total_steps=2)
    start = actor.trained.weights.clone()
    for _ in range(2):  # B alone moves in the first step: the gradient of A goes through B
        optimizer.collected.zero()
        with optimizer.collecting_gradients():
            actor.logprobs(pack(RAGGED), 1.0)[0].sum().backward()
        optimizer.step(loss_is_finite=True)
    for block, begin, stop in actor.trained.layout.entries:
        assert not torch.equal(actor.trained.weights[begin:stop], start[begin:stop]), block.param.name
    assert optimizer.masters.dtype == torch.float32
    assert torch.equal(base.weights, frozen)
    assert torch.equal(other.trained.weights, others)
    assert torch.equal(logprobs_of(base), reference)
    assert not torch.equal(logprobs_of(actor), reference)


def test_copies_and_layouts_see_through_the_wrapped_layers() -> None:
    base, plain = tiny_model("qwen2"), tiny_model("qwen2")
    view = stirred(add_lora(base, RANK_4, name="actor", seed=0))
    assert layout_of(base.module) == plain.layout
    assert torch.equal(base.trained.parameter("model.layers.0.self_attn.q_proj.bias"),
                       plain.module.model.layers[0].self_attn.q_proj.bias)  # fmt: skip
    twin, copied = copy_of(base), copy_of(view)
    assert torch.equal(twin.weights, plain.weights)
    assert {name for name, _ in twin.module.named_modules()} == {name for name, _ in plain.module.named_modules()}
    expected = logprobs_of(view)
    with torch.no_grad():
        view.trained.weights.zero_()
        base.weights.zero_()
    assert torch.equal(logprobs_of(copied), expected)
    assert torch.equal(logprobs_of(twin), logprobs_of(plain))
    assert not any(param.requires_grad for param in copied.module.parameters())
    assert scalar_of(view, seed=1).layout == scalar_of(plain, seed=1).layout


# --- the start ---------------------------------------------------------------------------------------------------


def test_a_is_keyed_by_seed_and_name_and_b_is_zero() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    views = {key: add_lora(tiny_llama(), RANK_4, name=key[0], seed=key[1]) for key in (("a", 1), ("a", 2), ("b", 1))}
    again = add_lora(tiny_llama(), RANK_4, name="a", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [view.trained.weights for view in views.values()]
    assert torch.equal(again.trained.weights, weights[0])
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    drawn = [param for name, param in again.own.parameters.items() if ".lora_A." in name]
    assert not any(param.any() for name, param in again.own.parameters.items() if ".lora_B." in name)
    assert len({param[0, 0].item() for param in drawn}) == len(drawn)
    for param in drawn:
        bound = param.shape[1] ** -0.5
        assert param.abs().max() <= bound
        assert param.abs().max() > 0.9 * bound


def test_adapters_are_cut_where_their_layers_are() -> None:
    view = add_lora(tiny_model("phi3", dtype=torch.float32), RANK_4, name="a", seed=0)
    params = {block.param.name.removeprefix("model.layers.1."): block.param for block in view.trained.layout.blocks}
    hosts = {block.param.name.removeprefix("model.layers.1."): block.param for block in view.layout.blocks}
    assert hosts["mlp.gate_up_proj.weight"].cut == 0
    assert params["mlp.gate_up_proj.lora_B.weight"].cut == 0
    assert params["mlp.gate_up_proj.lora_B.weight"].sections == hosts["mlp.gate_up_proj.weight"].sections
    assert params["mlp.gate_up_proj.lora_A.weight"].cut is None
    assert hosts["mlp.down_proj.weight"].cut == 1
    assert params["mlp.down_proj.lora_A.weight"].cut == 1
    assert params["mlp.down_proj.lora_B.weight"].cut is None
    assert {param.layer for param in params.values()} == {0, 1}


def test_of_a_mixture_of_experts_the_rest_is_adapted() -> None:
    view = add_lora(tiny_model("deepseek_v3", dtype=torch.float32), RANK_4, name="a", seed=0)
    assert {name.split(".")[-3] for name in view.own.parameters} == {
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
    }  # fmt: skip


def test_dense_layers_beside_mixtures_are_adapted_outside_their_mlps_too() -> None:
    """They have the names of experts."""
    base = tiny_model("qwen3_moe", dtype=torch.float32, weight_scale=0.05, mlp_only_layers=[0])
    view = stirred(add_lora(base, RANK_4, name="a", seed=0))
    assert {name.split(".")[-3] for name in view.own.parameters} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert (logprobs_of(view) - logprobs_of(base)).abs().max() > 1e-3
    with pytest.raises(
        ModelError,
        match=r"gate_up_proj, k_proj, o_proj, q_proj, v_proj, found down_proj",
    ):
        add_lora(base, LoraSettings(rank=4, target_modules=("down_proj",)), name="b", seed=0)


def test_attention_beside_experts_in_the_layer_itself_is_adapted() -> None:
    decoder = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(4, 4)})])})
    experts = nn.Module()
    experts.down_proj = nn.Parameter(torch.zeros(2, 4, 4))
    decoder["layers"][0]["experts"] = experts
    decoder["layers"][0]["mlp"] = nn.ModuleDict({"down_proj": nn.Linear(4, 4)})
    assert set(targets_of(RANK_4, decoder)) == {"layers.0.q_proj"}


def test_all_linear_layers_of_mixers_are_adapted() -> None:
    """Their convolutions, of three dims as stacked experts are, are no mixture."""
    targets = targets_of(LoraSettings(rank=2), tiny("qwen3_5_text").model)
    names = {at.rpartition(".")[2] for at in targets}
    assert names == {
        "q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
        "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert len(targets) == 4 + 2 * 5 + 3 * 3


@pytest.mark.parametrize("family", ["falcon_h1", "nemotron_h"])
def test_what_peft_adapts_in_no_model_of_a_family_is_left_out(family: str) -> None:
    base = tiny_model(family, dtype=torch.float32, weight_scale=0.05)
    view = stirred(add_lora(base, RANK_4, name="a", seed=0))
    names = {name.split(".")[-3] for name in view.own.parameters}
    assert {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj"} <= names
    assert "out_proj" not in names
    assert (logprobs_of(view) - logprobs_of(base)).abs().max() > 1e-3
    with pytest.raises(ModelError, match=r"names among .*in_proj, .*found out_proj"):
        add_lora(base, LoraSettings(rank=4, target_modules=("out_proj",)), name="b", seed=0)


def test_a_parameter_of_three_dims_beside_the_layers_is_no_mixture() -> None:
    """As the probe of gemma3's vision tower, whose layers have the names of the decoder's."""
    tower = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(4, 4)})]), "head": nn.Module()})
    tower["head"].probe = nn.Parameter(torch.zeros(1, 1, 4))
    layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(4, 4), "up_proj": nn.Linear(4, 4)})])
    decoder = nn.ModuleDict({"vision_tower": tower, "layers": layers})
    assert {"layers.0.q_proj", "layers.0.up_proj"} <= targets_of(RANK_4, decoder).keys()


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",)])
def test_of_a_model_that_reads_images_what_texts_reach_is_adapted(targets: Any, tmp_path: Path) -> None:
    """Its encoder has layers of the same names. An adapter of peft's has them too, and says the same without."""
    base = from_module(tiny_with_images(), None)
    view = stirred(add_lora(base, LoraSettings(rank=4, target_modules=targets), name="a", seed=0))
    assert "model.language_model.layers.0.self_attn.q_proj.lora_A.weight" in view.own.parameters
    assert all(".language_model.layers." in name for name in view.own.parameters)
    expected = logprobs_of(view)
    assert (expected - logprobs_of(base)).abs().max() > 1e-3
    save_adapter(view, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(tiny_with_images(), tmp_path / "adapter").eval()
    assert {name.partition(".lora_A.")[0] for name, _ in theirs.named_parameters() if ".lora_A." in name} == {
        f"base_model.model.{name.partition('.lora_A.')[0]}" for name in view.own.parameters if ".lora_A." in name
    }
    with torch.no_grad():
        torch.testing.assert_close(eager_logprobs(theirs, RAGGED)[0], expected, rtol=0, atol=1e-4)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear" if targets == "all-linear" else [*targets])
    everywhere = peft.get_peft_model(tiny_with_images(), config)
    with torch.no_grad():
        for name, param in everywhere.named_parameters():
            if ".lora_" in name:
                own = view.own.parameters.get(name.removeprefix("base_model.model.").replace(".default", ""))
                param.copy_(torch.ones_like(param) if own is None else own)
    everywhere.save_pretrained(tmp_path / "everywhere")
    assert any("vision_tower" in name for name in load_file(tmp_path / "everywhere" / "adapter_model.safetensors"))
    for folder in ("adapter", "everywhere"):
        again = load_adapter(from_module(tiny_with_images(), None), tmp_path / folder, name="x")
        assert torch.equal(logprobs_of(again), expected)
        assert again.trained.layout == view.trained.layout


def test_of_encoders_inside_a_decoder_no_layer_is_adapted() -> None:
    view = add_lora(from_module(tiny_with_images("phi4_multimodal"), None), RANK_4, name="a", seed=0)
    assert {name.split(".")[1] for name in view.own.parameters} == {"layers"}


def test_layers_whose_name_is_a_number_are_not_adapted() -> None:
    """The number is also that of a decoder layer: gemma3n has a list of projections beside its layers."""
    base = tiny_model("gemma3n_text", dtype=torch.float32, weight_scale=0.05, **IN_PLACE["gemma3n_text"])
    view = stirred(add_lora(base, RANK_4, name="a", seed=0))
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in view.own.parameters
    assert not any("altup_projections" in name for name in view.own.parameters)
    assert (logprobs_of(view) - logprobs_of(base)).abs().max() > 1e-3


def test_an_unknown_target_names_the_known_ones() -> None:
    settings = LoraSettings(rank=4, target_modules=("q_proj", "lm_head"))
    with pytest.raises(ModelError, match=r"^lora\.target_modules: expected .*names among down_proj, .*lm_head"):
        add_lora(tiny_llama(), settings, name="a", seed=0)
    with pytest.raises(ModelError, match=r"expected all-linear, .*found lm_head"):
        check_targets(settings, ["smollm2-135m-instruct"])


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"install plait\[lora\]"):
        add_lora(tiny_llama(), RANK_4, name="a", seed=0)


# --- folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", slow_but(["llama", "mixtral"], ["llama", "mixtral", "gpt2", "deepseek_v3", "cohere", *RECURRENT])
)
def test_a_saved_adapter_is_the_same_in_peft_and_read_again(family: str, tmp_path: Path) -> None:
    base = tiny_model(family, dtype=torch.float32, weight_scale=0.05)
    view = stirred(add_lora(base, RANK_4, name="actor", seed=0))
    save_pretrained(base, tmp_path / "base")
    save_adapter(view, tmp_path / "adapter")
    expected = logprobs_of(view)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(eager_logprobs(theirs, RAGGED)[0], expected, rtol=0, atol=1e-4)
    assert torch.equal(logprobs_of(load_model(str(tmp_path / "base"), dtype="float32")), logprobs_of(base))
    again = load_adapter(tiny_model(family, dtype=torch.float32, weight_scale=0.05), tmp_path / "adapter", name="x")
    assert torch.equal(logprobs_of(again), expected)
    assert again.trained.layout == view.trained.layout


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_a_merged_export_is_a_plain_model(family: str, tmp_path: Path) -> None:
    base = tiny_model(family, dtype=torch.float32, weight_scale=0.05)
    view = stirred(add_lora(base, RANK_4, name="actor", seed=0))
    stirred(add_lora(base, RANK_4, name="other", seed=0), seed=9)
    save_pretrained(view, tmp_path / "it")
    expected = logprobs_of(view)
    merged = load_model(str(tmp_path / "it"), dtype="float32")
    torch.testing.assert_close(logprobs_of(merged), expected, rtol=0, atol=1e-4)
    assert torch.equal(merged.weights, merged_copy(view).weights)
    assert merged.layout == base.layout
    assert (expected - logprobs_of(base)).abs().max() > 1e-2


def test_a_scalar_adapter_carries_its_head_to_peft(tmp_path: Path) -> None:
    base = tiny_llama(torch.float32, weight_scale=0.05)
    under = scalar_view(base, seed=1)
    view = stirred(add_lora(under, RANK_4, name="reward", seed=0))
    save_pretrained(under, tmp_path / "base")
    save_adapter(view, tmp_path / "adapter")
    save_pretrained(view, tmp_path / "merged")
    expected = scores_of(view, RAGGED)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    samples = [[*prompt, *response] for prompt, responses in RAGGED for response in responses]
    with torch.no_grad():
        got = torch.cat([theirs(input_ids=torch.tensor([ids])).logits[0] for ids in samples])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(hf_scores(tmp_path / "merged", RAGGED), expected, rtol=0, atol=1e-4)
    other = scalar_view(tiny_llama(torch.float32, weight_scale=0.05), seed=5)
    assert torch.equal(scores_of(load_adapter(other, tmp_path / "adapter", name="x"), RAGGED), expected)


def test_the_padding_token_beside_a_scalar_adapter_is_no_end_of_sequence(tmp_path: Path) -> None:
    """A base whose padding token is EOS, as of most chat models: peft would read the score one token early."""
    base = tiny_model("llama", dtype=torch.float32, weight_scale=0.05, pad_token_id=2)
    base.tokenizer = tiny_tokenizer()
    base.tokenizer.pad_token = base.tokenizer.eos_token
    view = stirred(add_lora(scalar_view(base, seed=1), RANK_4, name="reward", seed=0))
    save_pretrained(base, tmp_path / "base")
    save_adapter(view, tmp_path / "adapter")
    groups: Groups = (([5, 6], [[7, 8, 2], [9]]), ([10, 11, 12], [[13, 2]]))
    theirs = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base",
        attn_implementation="eager",
        num_labels=1,
        pad_token_id=AutoTokenizer.from_pretrained(tmp_path / "adapter").pad_token_id,
    )
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    samples = [[*prompt, *response] for prompt, responses in groups for response in responses]
    with torch.no_grad():
        got = torch.cat([theirs(input_ids=torch.tensor([ids])).logits[0] for ids in samples])
    torch.testing.assert_close(got, scores_of(view, groups), rtol=0, atol=1e-4)
    assert base.tokenizer.pad_token_id == 2


def test_an_adapter_that_peft_trained_is_read(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["v_proj", "o_proj"], task_type="CAUSAL_LM")
    module = peft.get_peft_model(tiny("llama", dtype=torch.float32, weight_scale=0.05), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in module.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
        expected = eager_logprobs(module.eval(), RAGGED)[0]
    module.save_pretrained(tmp_path / "it")
    view = load_adapter(tiny_llama(torch.float32, weight_scale=0.05), tmp_path / "it", name="x")
    torch.testing.assert_close(logprobs_of(view), expected, rtol=0, atol=1e-4)
    assert view.own.settings == LoraSettings(rank=3, alpha=12, target_modules=("o_proj", "v_proj"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "expected plain LoRA, found LoRA with use_dora"),
        ({"alora_invocation_tokens": [5, 6]}, "expected plain LoRA, found LoRA with alora_invocation_tokens"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "LoRA with init_lora_weights 'pissa_niter_4', trained on other",
        ),
        ({"peft_type": "LOHA"}, "expected plain LoRA, found LOHA"),
        ({"r": 5}, r"does not fit this model: .* of shape \(4, 32\) in place of \(5, 32\)"),
        ({"r": None}, r"should state `r`, a whole number, and `lora_alpha`, a number, found None and 8"),
        ({"lora_alpha": "high"}, r"`lora_alpha`, a number, found 4 and 'high'"),
        ("remove", "does not fit this model: no model.layers.0.self_attn.q_proj.lora_A.weight"),
        ("add", r"does not fit this model: an unknown model\.norm\.weight"),
        ("head", r"^adapter: '.*it' does not fit this model: .*target_modules: expected .*, found lm_head$"),
        ("file", r"should hold adapter_config\.json and adapter_model\.safetensors"),
    ],
)
def test_other_adapters_are_refused_before_anything_is_changed(change: Any, message: str, tmp_path: Path) -> None:
    save_adapter(add_lora(tiny_llama(torch.float32), RANK_4, name="a", seed=0), tmp_path / "it")
    config, file = tmp_path / "it" / "adapter_config.json", tmp_path / "it" / "adapter_model.safetensors"
    tensors = load_file(file)
    if isinstance(change, dict):
        config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    elif change == "remove":
        del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
        save_file(tensors, file)
    elif change == "add":
        save_file({**tensors, "base_model.model.model.norm.weight": torch.zeros(32)}, file)
    elif change == "head":
        save_file({**tensors, "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, file)
    else:
        file.unlink()
    model = tiny_llama(torch.float32)
    with pytest.raises(ModelError, match=message):
        load_adapter(model, tmp_path / "it", name="x")
    assert not any("lora" in name for name, _ in model.module.named_modules())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_adapters_and_heads_on_cuda_equal_those_on_the_cpu() -> None:
    gradients_of, scores = [], []
    for device in ("cpu", "cuda"):
        base = tiny_model("llama", device=device)
        critic = stirred(add_lora(scalar_view(base, seed=1), RANK_4, name="critic", seed=0))
        outputs = critic.values_and_scores(pack(RAGGED, device=device))
        gradients_of.append({name: grad.cpu() for name, grad in scalar_gradients(critic.module, *outputs).items()})
        scores.append(outputs[1].detach().cpu())
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-9)
    assert largest_error(gradients_of[1], gradients_of[0]) < 1e-9
