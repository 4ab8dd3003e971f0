"""Adapters of experts: products against sums that are written out, gradients, peft's own numbers and files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from plait.data.packed import pack
from plait.errors import ModelError
from plait.models.backbone_model import copy_of
from plait.models.expert_adapters import LowRankSum, adapted_experts
from plait.models.expert_files import from_peft, names_in_peft, shape_in_peft, to_peft
from plait.models.files.adapter_folder import adapter_of
from plait.models.files.saving import save_pretrained
from plait.models.language_loading import load_model
from plait.models.lora import add_lora, without_lora
from plait.models.lora_files import load_adapter, save_adapter
from plait.models.lora_merging import merge
from plait.models.lora_settings import LoraSettings
from plait.models.lora_targets import check_names, targets_of
from tests.cases import slow_but
from tests.models.oracle import RAGGED, eager_logprobs, gradients, wide_softmax
from tests.models.test_lora import logprobs_of, stirred
from tests.models.tiny import tiny, tiny_model

peft = pytest.importorskip("peft")

BOTH = ("experts.gate_up_proj", "experts.down_proj")
SETTINGS = LoraSettings(rank=3, alpha=5.0, target_modules=("o_proj", *BOTH))
SCALE = 5 / 3
FAMILIES = ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_next", "qwen2_moe"]


def settings_of(family: str) -> LoraSettings:
    linear = {"nemotron_h": "q_proj"}.get(family, "o_proj")
    experts = ("experts.up_proj", "experts.down_proj") if family == "nemotron_h" else BOTH
    return LoraSettings(rank=3, alpha=5.0, target_modules=(linear, *experts))


def adapted(family: str = "qwen3_moe", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    return stirred(add_lora(tiny_model(family, dtype=dtype, **options), settings_of(family), name="actor", seed=1))


# --- products ------------------------------------------------------------------------------------------------------


def sum_of(*, by_columns: bool, rank: int = 2, dtype: torch.dtype = torch.float64) -> tuple[LowRankSum, Tensor]:
    """Three experts of 8 inputs and 16 outputs, and what they are when it is written out, [E, O, I]."""
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    generator = torch.Generator().manual_seed(0)
    weight, a, b = draw(3, 16, 8), draw(3, rank, 8), draw(3, 16, rank)
    whole = weight + 0.5 * torch.stack([b_e @ a_e for a_e, b_e in zip(a, b, strict=True)])
    return LowRankSum(weight.mT.contiguous() if by_columns else weight, a, b, 0.5, by_columns=by_columns), whole


def test_each_product_is_that_of_the_sum() -> None:
    rows, columns = sum_of(by_columns=False), sum_of(by_columns=True)
    x, bias = torch.randn(5, 8, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    near: Any = lambda found, expected: torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    one = torch.tensor(1)
    near(F.linear(x, rows[0][one], bias), x @ rows[1][1].T + bias)
    near(x @ columns[0][one], x @ columns[1][1].T)
    near(torch.matmul(x, rows[0].transpose(-2, -1)[2]), x @ rows[1][2].T)
    chosen = torch.tensor([2, 0, 0, 1, 2])
    expected = torch.stack([whole @ row for whole, row in zip(rows[1][chosen], x, strict=True)])
    near(torch.bmm(rows[0][chosen], x[:, :, None])[:, :, 0], expected)
    near(torch.bmm(x[:, None], columns[0][chosen])[:, 0], expected)


@pytest.mark.parametrize("rank", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_take_any_rank(rank: int, dtype: torch.dtype) -> None:
    experts, whole = sum_of(by_columns=True, rank=rank, dtype=dtype)
    x = torch.randn(6, 8, dtype=dtype)
    found = F.grouped_mm(x, experts, offs=torch.tensor([2, 2, 6], dtype=torch.int32))
    expected = torch.cat([x[:2] @ whole[0].T, x[2:] @ whole[2].T])
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-5 if dtype == torch.float32 else 0.15)


def test_another_product_is_refused() -> None:
    experts, _ = sum_of(by_columns=False)
    with pytest.raises(ModelError, match=r"^lora\.target_modules: .*by `einsum`, beside which no adapter"):
        torch.einsum("ni,eoi->neo", torch.randn(5, 8, dtype=torch.float64), experts)


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", slow_but(FAMILIES[:2], [*FAMILIES, "nemotron_h"]))
def test_gradients_equal_those_through_the_merged_weights(family: str) -> None:
    """With W' = W + scale · B A written out for each expert, and the family's own loop over experts."""
    view = adapted(family)
    loss = lambda logprobs, entropies: (
        torch.cos(torch.arange(len(logprobs))) * logprobs + 0.3 * torch.sin(torch.arange(len(logprobs))) * entropies
    ).sum()
    for param in view.own.parameters.values():
        param.requires_grad_(True)
    own = dict(view.own.parameters)
    with wide_softmax():
        got = view.logprobs(pack(RAGGED), 1.0)
        mine = dict(zip(own, torch.autograd.grad(loss(*got), [*own.values()]), strict=True))

    module = tiny(family)
    module.set_experts_implementation("eager")
    leaves = {name: param.detach().clone().requires_grad_(True) for name, param in own.items()}
    weights = {name: param.detach() for name, param in module.named_parameters()}
    hosts = [name.removesuffix(".lora_A.weight") for name in leaves if name.endswith(".lora_A.weight")]
    assert any(".experts." in name for name in hosts)
    for host in hosts:
        key = host if host in weights else f"{host}.weight"
        delta = SCALE * leaves[f"{host}.lora_B.weight"] @ leaves[f"{host}.lora_A.weight"]
        weights[key] = weights[key] + (delta.mT if family == "gpt_oss" and ".experts." in host else delta)

    class Merged(nn.Module):
        def forward(self, **inputs: Any) -> Any:
            return functional_call(module, weights, (), inputs)

    expected = eager_logprobs(Merged(), RAGGED)
    theirs = dict(zip(leaves, torch.autograd.grad(loss(*expected), [*leaves.values()]), strict=True))
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-9)
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    assert largest > 1e-3
    for name, grad in theirs.items():
        assert (mine[name] - grad).abs().max() <= 1e-9 * largest, name


@pytest.mark.parametrize("family", slow_but(FAMILIES[1:2], FAMILIES))
def test_numbers_and_gradients_are_pefts(family: str) -> None:
    view = adapted(family)
    for param in view.own.parameters.values():
        param.requires_grad_(True)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["o_proj"], target_parameters=[f"mlp.{n}" for n in BOTH])
    module = tiny(family)
    module.set_experts_implementation("eager")
    model = peft.get_peft_model(module, config, autocast_adapter_dtype=False).eval()
    hosts = dict.fromkeys(name.partition(".lora_")[0] for name in view.own.parameters)
    names = names_in_peft(name for name in hosts if ".experts." in name)

    def in_peft(name: str) -> str:
        at, _, rest = name.partition(".lora_")
        return f"base_model.model.{names.get(at, at)}.lora_{rest.replace('.weight', '.default.weight')}"

    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, param in view.own.parameters.items():
            theirs[in_peft(name)].copy_(to_peft(name, param))
    with wide_softmax():
        expected = eager_logprobs(model, RAGGED)
        their_gradients = gradients(model, *expected)
        got = view.logprobs(pack(RAGGED), 1.0)
        torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-9)
        gradients(view.module, *got)
    for name, param in view.own.parameters.items():
        grad = their_gradients[in_peft(name)]
        torch.testing.assert_close(to_peft(name, param.grad), grad, rtol=0, atol=1e-9 * (1 + float(grad.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_adapter_changes_no_bit_where_experts_compute_in_groups(dtype: torch.dtype) -> None:
    base = tiny_model("qwen3_moe", dtype=dtype, weight_scale=0.05)
    before = logprobs_of(base)
    view = add_lora(base, SETTINGS, name="actor", seed=1)
    assert torch.equal(logprobs_of(view), before)
    changed = logprobs_of(stirred(view))
    assert (changed - before).abs().max() > 1e-3
    assert torch.equal(logprobs_of(without_lora(view)), before)
    base.module.set_experts_implementation("eager")
    torch.testing.assert_close(logprobs_of(view), changed, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.1)


class Largest(TorchDispatchMode):
    """Elements of the largest new tensor."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.found = max(self.found, out.numel())
        return out


def test_nothing_as_large_as_the_experts_is_made() -> None:
    """Not their sum with B A, nor its gradient: two tokens of 32 numbers pass experts of 32 · 96."""
    view = adapted(dtype=torch.float32, num_experts=64, num_local_experts=64, moe_intermediate_size=48)
    experts = view.module.model.layers[0].mlp.experts
    for param in view.own.parameters.values():
        param.requires_grad_(True)
    view.backbone.activate("actor")
    x = torch.randn(2, 32)
    with Largest() as largest:
        out = experts(x, torch.tensor([[1, 5], [5, 60]]), torch.ones(2, 2))
        out.sum().backward()
    assert all(param.grad is not None for name, param in view.own.parameters.items() if "layers.0.mlp" in name)
    for name in ("layers.0.mlp.experts.gate_up_proj.lora_B", "layers.0.mlp.experts.down_proj.lora_B"):
        (grad,) = (param.grad for at, param in view.own.parameters.items() if at.startswith(f"model.{name}"))
        assert grad.flatten(1).any(1).nonzero().flatten().tolist() == [1, 5, 60], "no other expert has a token"
    assert experts.down_proj.numel() == 64 * 32 * 48
    assert largest.found <= 64 * 96 * 4, "B, of a rank that grouped products take"


def test_views_interleave_and_copies_see_through() -> None:
    base = tiny_model("qwen3_moe")
    before = logprobs_of(base)
    actor = stirred(add_lora(base, SETTINGS, name="actor", seed=0), 1)
    other = stirred(add_lora(base, LoraSettings(rank=2, target_modules=BOTH[:1]), name="other", seed=0), 2)
    said = logprobs_of(actor), logprobs_of(other)
    assert not torch.equal(*said)
    assert torch.equal(logprobs_of(base), before)
    assert torch.equal(logprobs_of(actor), said[0])
    twin = copy_of(without_lora(actor))
    assert not adapted_experts(twin.module)
    assert torch.equal(logprobs_of(twin), before)
    copied = copy_of(actor)
    actor.trained.weights.zero_()
    assert torch.equal(logprobs_of(copied), said[0])
    assert copy.deepcopy(base.module).model.layers[0].mlp.experts.forward.__self__ is not base.module


# --- names ---------------------------------------------------------------------------------------------------------


def test_names_of_peft_are_taken() -> None:
    stated = LoraSettings(rank=1, target_modules=("q_proj", "mlp.experts.gate_up_proj"))
    assert stated.target_modules == ("q_proj", "experts.gate_up_proj")
    assert (stated.linear, stated.experts) == (("q_proj",), ("experts.gate_up_proj",))
    assert names_in_peft(["a.experts.gate_up_proj", "a.experts.down_proj", "b.experts.down_proj"]) == {
        "a.experts.gate_up_proj": "a.experts.base_layer",
        "a.experts.down_proj": "a.experts",
        "b.experts.down_proj": "b.experts",
    }


def test_all_linear_layers_and_experts_are_adapted() -> None:
    both = LoraSettings(rank=1, target_modules=("all-linear", "experts.down_proj"))
    assert (both.linear, both.experts) == ("all-linear", ("experts.down_proj",))
    assert LoraSettings(rank=1, target_modules=("all-linear",)).target_modules == "all-linear"
    found = targets_of(both, tiny("qwen3_moe").model)
    assert {target.stated for target in found.values()} == {"q_proj", "k_proj", "v_proj", "o_proj", "experts.down_proj"}
    assert {at for at, target in found.items() if target.is_stacked} == {
        "layers.0.mlp.experts.down_proj",
        "layers.1.mlp.experts.down_proj",
    }


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("7.mlp.experts.down_proj",),
            r"without a number, .*found 7\.mlp\.experts\.down_proj; write exp.*_proj",
        ),
        (("all-linear", "q_proj"), "all-linear with names of experts alone, found q_proj"),
    ],
)
def test_names_that_say_too_much_are_refused(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LoraSettings(rank=1, target_modules=names)


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    decoder = tiny("qwen3_moe").model
    with pytest.raises(ModelError, match=r"names among experts\.down_proj, experts\.gate_up_proj, k_proj, .*up_proj$"):
        check_names(LoraSettings(rank=1, target_modules=("experts.up_proj",)), decoder)
    with pytest.raises(ModelError, match=r"names among down_proj, .*found experts\.down_proj$"):
        check_names(LoraSettings(rank=1, target_modules=("experts.down_proj",)), tiny("llama").model)


def test_experts_that_do_not_say_how_they_lie_are_refused() -> None:
    decoder = tiny("qwen3_moe").model
    for layer in decoder.layers:
        del layer.mlp.experts.is_transposed
    with pytest.raises(ModelError, match=r"Qwen3MoeModel .*found experts\.down_proj, experts\.gate_up"):
        check_names(LoraSettings(rank=1, target_modules=BOTH), decoder)


# --- folders -------------------------------------------------------------------------------------------------------


def test_two_experts_as_peft_lays_them_out() -> None:
    a, b = torch.arange(12.0).view(2, 2, 3), torch.arange(8.0).view(2, 2, 2)
    assert to_peft("x.lora_A.weight", a).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert to_peft("x.lora_B.weight", b).tolist() == [[0, 4, 1, 5], [2, 6, 3, 7]]
    for name, tensor in (("x.lora_A.weight", a), ("x.lora_B.weight", b)):
        assert to_peft(name, tensor).shape == shape_in_peft(name, tuple(tensor.shape))
        assert torch.equal(from_peft(name, to_peft(name, tensor), 2), tensor)


@pytest.mark.parametrize("family", slow_but(FAMILIES[:2], FAMILIES))
def test_a_saved_adapter_is_the_same_in_peft_merged_and_read_again(family: str, tmp_path: Path) -> None:
    save_pretrained(tiny_model(family, dtype=torch.float32, weight_scale=0.05), tmp_path / "base")
    base = load_model(str(tmp_path / "base"), dtype="float32")
    view = stirred(add_lora(base, settings_of(family), name="actor", seed=1))
    expected = logprobs_of(view)
    assert (expected - logprobs_of(base)).abs().max() > 1e-3
    save_adapter(view, tmp_path / "adapter")
    save_pretrained(view, tmp_path / "whole")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    near: Any = lambda found: torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    with torch.no_grad():
        near(eager_logprobs(theirs, RAGGED)[0])
        near(eager_logprobs(theirs.merge_and_unload(), RAGGED)[0])
    near(logprobs_of(load_model(str(tmp_path / "whole"), dtype="float32")))
    again = load_adapter(load_model(str(tmp_path / "base"), dtype="float32"), tmp_path / "adapter", name="x")
    assert torch.equal(logprobs_of(again), expected)
    assert again.own.settings == LoraSettings(rank=3, alpha=5.0, target_modules=tuple(sorted(SETTINGS.target_modules)))
    assert adapter_of(str(tmp_path / "adapter")).settings.target_modules == ("o_proj", *sorted(BOTH))
    base = load_model(str(tmp_path / "base"), dtype="float32")
    merge(base, adapter_of(str(tmp_path / "adapter")))
    near(logprobs_of(base))


@pytest.mark.parametrize(("linear", "stated"), [(["o_proj"], ("experts.down_proj", "o_proj")), ([], BOTH[1:])])
def test_what_peft_writes_is_read(linear: list[str], stated: tuple[str, ...], tmp_path: Path) -> None:
    """With `target_parameters` by another end of the names, of one of the two alone."""
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=linear, target_parameters=["down_proj"])
    theirs = peft.get_peft_model(tiny("qwen3_moe", dtype=torch.float32, weight_scale=0.05), config)
    for name, param in theirs.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(param, std=0.1)
    theirs.save_pretrained(tmp_path)
    view = load_adapter(tiny_model("qwen3_moe", dtype=torch.float32, weight_scale=0.05), tmp_path, name="x")
    assert view.own.settings.target_modules == stated
    with torch.no_grad():
        expected = eager_logprobs(theirs.eval(), RAGGED)[0]
    torch.testing.assert_close(logprobs_of(view), expected, rtol=0, atol=1e-4)
    save_adapter(view, tmp_path / "again")
    before, after = (load_file(tmp_path / at / "adapter_model.safetensors") for at in (".", "again"))
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_other_forms_of_files_are_refused(tmp_path: Path) -> None:
    view = adapted(dtype=torch.float32, weight_scale=0.05)
    save_adapter(view, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("experts.base_layer.lora_A.weight"))
    save_file(tensors | {key: torch.cat([tensors[key]] * 2)}, file)
    with pytest.raises(ModelError, match=r"base_layer\.lora_A\.weight of shape \(24, 32\) in place of \(12, 32\)"):
        load_adapter(view, tmp_path, name="x")
    save_file({key.replace("experts.base_layer", "experts.0.gate_proj"): value for key, value in tensors.items()}, file)
    with pytest.raises(ModelError, match=r"each expert for itself, such as .*experts\.0\.gate_proj; load it in peft"):
        load_adapter(view, tmp_path, name="x")


@pytest.mark.parametrize("stated", ["experts.down_proj", {"down_proj": 1}, [3]], ids=str)
def test_parameters_that_are_no_list_of_names_are_refused(stated: Any, tmp_path: Path) -> None:
    view = adapted(dtype=torch.float32)
    save_adapter(view, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_parameters": stated}))
    with pytest.raises(ModelError, match=r"should state `target_parameters` as a list of names, found"):
        load_adapter(view, tmp_path, name="x")


@pytest.mark.parametrize(
    ("linear", "named"),
    [
        (None, ("experts.down_proj",)),
        ([], ("experts.down_proj",)),
        (".*_proj", ("all-linear", "experts.down_proj")),
        ("all-linear", ("all-linear", "experts.down_proj")),
    ],
)
def test_what_a_folder_adapts_is_known_before_its_weights_are_read(
    linear: Any, named: tuple[str, ...], tmp_path: Path
) -> None:
    config = {"r": 2, "lora_alpha": 4, "target_modules": linear, "target_parameters": ["mlp.experts.down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "base"}))
    assert adapter_of(str(tmp_path)).settings.target_modules == named
