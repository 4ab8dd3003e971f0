"""Values and scores of a decoder with a scalar head: equal to Transformers' own in any packing; read and written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from plait.data.packed import pack
from plait.errors import ModelError
from plait.layout.decoder import HEAD
from plait.models.backbone_model import copy_of
from plait.models.files.saving import save_pretrained
from plait.models.language_model import LanguageModel
from plait.models.scalar_loading import load_scalar, scalar_of, scalar_view
from plait.models.scalar_model import ScalarModel
from tests.cases import slow_but
from tests.models.oracle import RAGGED, Groups, largest_error, wide_softmax
from tests.models.tiny import FAMILIES, tiny, tiny_llama, tiny_model, tiny_tokenizer
from tests.models.wrong import attend_wrongly

WITHOUT_CLASSIFIER = {"granite", "cohere", "cohere2"}
EMPTY: Groups = (([5, 6, 7], [[], [8, 9], []]), ([10], [[]]), ([11, 12], []))


def eager_outputs(decoder: object, head_1H: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Values [R] and scores [N], each sample a forward of its own."""
    values, scores = [], []
    with wide_softmax():
        for prompt, responses in groups:
            for response in responses:
                hidden_TH = decoder(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).last_hidden_state[
                    0
                ]
                outputs_T = hidden_TH @ head_1H[0]
                values.append(outputs_T[len(prompt) - 1 : -1] if response else outputs_T[:0])
                scores.append(outputs_T[-1])
    return torch.cat(values), torch.stack(scores)


def gradients(module: torch.nn.Module, values_R: Tensor, scores_N: Tensor) -> dict[str, Tensor]:
    """Parameter gradients of a fixed loss that weighs every value and score differently."""
    weights_R = torch.cos(torch.arange(len(values_R), dtype=values_R.dtype, device=values_R.device))
    weights_N = torch.sin(1 + torch.arange(len(scores_N), dtype=scores_N.dtype, device=scores_N.device))
    module.zero_grad(set_to_none=True)
    ((weights_R * values_R).sum() + (weights_N * scores_N).sum()).backward()
    return {name: param.grad.clone() for name, param in module.named_parameters() if param.grad is not None}


def hf_scores(folder: Path, groups: Groups, padding_side: str | None = None) -> Tensor:
    """What a Transformers program gets; with a padding side, from one padded batch."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    samples = [[*prompt, *response] for prompt, responses in groups for response in responses]
    with torch.no_grad():
        if padding_side is None:
            return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in samples])
        longest, pad = max(map(len, samples)), model.config.pad_token_id
        rows, masks = [], []
        for ids in samples:
            fill = longest - len(ids)
            left, right = (fill, 0) if padding_side == "left" else (0, fill)
            rows.append([pad] * left + ids + [pad] * right)
            masks.append([0] * left + [1] * len(ids) + [0] * right)
        mask = torch.tensor(masks)
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # gpt2 would count the padding
        return model(input_ids=torch.tensor(rows), attention_mask=mask, position_ids=positions).logits[:, 0]


def scores_of(model: ScalarModel, groups: Groups) -> Tensor:
    with torch.no_grad():
        return model.values_and_scores(pack(groups))[1]


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", slow_but(list(FAMILIES)[1::2], FAMILIES))
def test_values_scores_and_gradients_equal_the_eager_unpacked_ones(family: str) -> None:
    model, module = scalar_of(tiny_model(family), seed=3), tiny(family)
    head_1H = model.module.score.weight.detach().clone().requires_grad_()
    expected = eager_outputs(module.base_model, head_1H, RAGGED)
    got = model.values_and_scores(pack(RAGGED))
    assert got[0].dtype == got[1].dtype == torch.float64
    assert got[1].std() > 0.1
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    theirs = {f"{module.base_model_prefix}.{n}": g for n, g in gradients(module.base_model, *expected).items()}
    assert head_1H.grad is not None
    assert largest_error(gradients(model.module, *got), theirs | {HEAD: head_1H.grad}) < 1e-6


def test_the_places_by_hand() -> None:
    """Outputs of a row [prompt 3 | response 2 | response 0]: values before each response token, scores at the end."""
    model = scalar_of(tiny_llama(), seed=0)
    batch = pack([([5, 6, 7], [[8, 9], []])])
    values_R, scores_N = model.values_and_scores(batch)
    outputs = eager_outputs(tiny("llama").base_model, model.module.score.weight, (([5], [[6, 7, 8, 9]]),))
    before = torch.cat([outputs[0], outputs[1]])  # outputs at tokens 5, 6, 7, 8 and 9
    torch.testing.assert_close(values_R, before[[2, 3]], rtol=0, atol=1e-6)
    torch.testing.assert_close(scores_N, before[[4, 2]], rtol=0, atol=1e-6)


def test_empty_responses_are_scored_at_the_prompt() -> None:
    model = scalar_of(tiny_model("gemma2"), seed=0)
    values_R, scores_N = model.values_and_scores(pack(EMPTY))
    expected = eager_outputs(tiny("gemma2").base_model, model.module.score.weight, EMPTY)
    assert values_R.shape == (2,)
    assert scores_N.shape == (4,)
    torch.testing.assert_close(values_R, expected[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(scores_N, expected[1], rtol=0, atol=1e-6)


def test_neither_neighbours_nor_order_nor_sharing_change_a_score() -> None:
    model = scalar_of(tiny_model("gpt_oss"), seed=0)
    together = scores_of(model, RAGGED)
    samples = [(prompt, [response]) for prompt, responses in RAGGED for response in responses]
    torch.testing.assert_close(scores_of(model, samples), together, rtol=0, atol=1e-12)
    torch.testing.assert_close(scores_of(model, samples[::-1]), together.flip(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_narrow_dtypes_give_float32_near_float64(dtype: torch.dtype, allowed: float) -> None:
    model = scalar_of(tiny_llama(dtype, weight_scale=0.05), seed=0)
    wide = tiny("llama", weight_scale=0.05)
    wide.base_model.load_state_dict({k: v.double() for k, v in model.module.base_model.state_dict().items()})
    expected = eager_outputs(wide.base_model, model.module.score.weight.double(), RAGGED)
    for mine, theirs in zip(model.values_and_scores(pack(RAGGED)), expected, strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - theirs).abs().max() < allowed


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_activation_checkpointing_changes_no_gradient(family: str) -> None:
    model, batch = scalar_of(tiny_model(family), seed=0), pack(RAGGED)
    plain = gradients(model.module, *model.values_and_scores(batch))
    again = gradients(model.module, *model.values_and_scores(batch, checkpoint=True))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


# --- parameters --------------------------------------------------------------------------------------------------


def test_the_head_is_small_and_keyed_by_the_seed_alone() -> None:
    wide = {"hidden_size": 1024, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 1}
    base = tiny_model("llama", dtype=torch.float32, **wide)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    heads = [scalar_of(base, seed=seed).module.score.weight.detach() for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].std().item() == pytest.approx(1 / math.sqrt(1025), rel=0.1)
    assert not scalar_of(base, seed=3, head_std=0.0).module.score.weight.any()


def test_the_head_is_one_more_parameter_of_the_flat_buffer() -> None:
    base = tiny_llama(torch.bfloat16)
    model = scalar_of(base, seed=0)
    params = {block.param.name: block.param for block in model.layout.blocks}
    expected = {block.param.name: block.param for block in base.layout.blocks}
    head = params.pop(HEAD)
    assert params == expected  # tied: the language model's head is its embedding
    assert (head.shape, head.cut, head.layer) == ((1, 32), None, None)
    assert model.trained.layout is model.layout
    assert model.trained.weights is model.weights
    for block, start, _ in model.layout.entries:
        param = model.trained.parameter(block.param.name)
        assert param.data_ptr() == model.weights.data_ptr() + start * 2
        assert param.requires_grad
    assert {name for name, _ in model.module.named_parameters()} == {*params, HEAD}


def test_the_copy_has_weights_of_its_own() -> None:
    base = tiny_llama()
    model = scalar_of(base, seed=0)
    before = model.values_and_scores(pack(RAGGED))[1].detach()
    frozen = copy_of(model)
    with torch.no_grad():
        base.weights.zero_()
        model.weights.zero_()
    assert torch.equal(scores_of(frozen, RAGGED), before)
    assert not any(param.requires_grad for param in frozen.module.parameters())


def test_a_view_shares_the_decoder_and_trains_its_head_alone() -> None:
    base = tiny_llama()
    view, alone = scalar_view(base, seed=5), scalar_of(base, seed=5)
    assert torch.equal(scores_of(view, RAGGED), scores_of(alone, RAGGED))
    assert view.weights is base.weights
    assert view.module.base_model is base.module.base_model
    assert [block.param.name for block in view.trained.layout.blocks] == [HEAD]
    theirs = gradients(alone.module, *alone.values_and_scores(pack(RAGGED)))
    assert gradients(view.module, *view.values_and_scores(pack(RAGGED))).keys() == {HEAD}
    torch.testing.assert_close(view.trained.parameter(HEAD).grad, theirs[HEAD], rtol=0, atol=1e-12)
    twin = copy_of(view)
    with torch.no_grad():
        base.weights.zero_()
    assert torch.equal(scores_of(twin, RAGGED), scores_of(alone, RAGGED))


# --- folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    slow_but(
        ["llama", "mixtral", "gpt2"],
        ["llama", "qwen2", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "gpt2", "gpt_neox"],
    ),
)
def test_a_saved_folder_scores_alike_in_transformers_and_here(family: str, tmp_path: Path) -> None:
    model = scalar_of(tiny_model(family, dtype=torch.float32, weight_scale=0.05), seed=2)
    save_pretrained(model, tmp_path / "it")
    expected = scores_of(model, RAGGED)
    for side in (None, "right", "left"):
        torch.testing.assert_close(hf_scores(tmp_path / "it", RAGGED, side), expected, rtol=0, atol=1e-4)
    state = torch.get_rng_state()
    again = load_scalar(str(tmp_path / "it"), dtype="float32", seed=9)
    assert torch.equal(torch.get_rng_state(), state)
    assert again.layout == model.layout
    assert torch.equal(again.weights, model.weights)
    assert again.eos_token_ids == (2,)
    config = json.loads((tmp_path / "it" / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert config["pad_token_id"] == 0
    assert "plait" not in json.dumps(config)


@pytest.mark.parametrize("family", sorted(WITHOUT_CLASSIFIER))
def test_a_family_without_a_classifier_is_written_alike_and_read_here(family: str, tmp_path: Path) -> None:
    model = scalar_of(tiny_model(family, dtype=torch.float32), seed=2)
    save_pretrained(model, tmp_path / "it")
    assert torch.equal(load_scalar(str(tmp_path / "it"), dtype="float32").weights, model.weights)
    assert HEAD in load_file(tmp_path / "it" / "model.safetensors")


def test_a_language_model_gets_a_fresh_head(tmp_path: Path) -> None:
    base = tiny_model("qwen2", dtype=torch.float32)
    save_pretrained(base, tmp_path / "it")
    loaded = load_scalar(str(tmp_path / "it"), dtype="float32", seed=4)
    expected = scalar_of(base, seed=4)
    assert loaded.layout == expected.layout
    assert torch.equal(loaded.weights, expected.weights)


def test_the_padding_token_of_a_folder_is_no_end_of_sequence(tmp_path: Path) -> None:
    """With pad = EOS, the class of Transformers would read the score one token early."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    base = tiny_model("llama", dtype=torch.float32, pad_token_id=2)
    base.tokenizer = tokenizer
    model = scalar_of(base, seed=0)
    groups: Groups = (([5, 6], [[7, 8, 2], [9]]), ([10, 11, 12], [[13, 2]]))
    save_pretrained(model, tmp_path / "it")
    assert json.loads((tmp_path / "it" / "config.json").read_text())["pad_token_id"] == 1  # the other special token
    torch.testing.assert_close(hf_scores(tmp_path / "it", groups, "right"), scores_of(model, groups), rtol=0, atol=1e-5)
    again = load_scalar(str(tmp_path / "it"), dtype="float32")
    assert again.tokenizer.pad_token_id == 1
    assert again.passed_token_id is None
    assert tokenizer.pad_token_id == 2  # the model's own is left alone


def test_a_foreign_folder_whose_padding_token_ends_sequences_is_read_as_its_class_does(tmp_path: Path) -> None:
    """As TRL writes them, for models without a padding token of their own."""
    tiny_llama(torch.float32).module.save_pretrained(tmp_path / "base")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    theirs.config.pad_token_id = 2
    theirs.save_pretrained(tmp_path / "it")
    tiny_tokenizer().save_pretrained(tmp_path / "it")
    groups: Groups = (([5, 6], [[7, 8, 2], [9], [2], [9, 2, 2]]), ([2], [[2]]), ([10, 11, 12], [[13, 2], [2, 13]]))
    model = load_scalar(str(tmp_path / "it"), dtype="float32")
    assert model.passed_token_id == 2
    torch.testing.assert_close(scores_of(model, groups), hf_scores(tmp_path / "it", groups), rtol=0, atol=1e-5)
    save_pretrained(model, tmp_path / "again")
    torch.testing.assert_close(hf_scores(tmp_path / "again", groups), scores_of(model, groups), rtol=0, atol=1e-5)


def test_the_score_of_what_is_passed_over_is_read_in_the_root() -> None:
    """As in the row without a root: at the last token that is not passed over, which stands before the prompt's own."""
    model = replace(scalar_of(tiny_llama(torch.float64), seed=0), passed_token_id=2)
    groups: Groups = (([5, 6, 2], [[2, 2], [7]]), ([5, 6, 8], [[2]]))
    _, expected = model.values_and_scores(pack(groups))
    _, found = model.values_and_scores(pack(groups, root_tokens=2))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    tiny_llama(torch.float32).module.save_pretrained(tmp_path / "base")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    theirs.save_pretrained(tmp_path / "it")
    tiny_tokenizer().save_pretrained(tmp_path / "it")
    with pytest.raises(ModelError, match=r"expected one label \(num_labels 1\) .* found 3 labels"):
        load_scalar(str(tmp_path / "it"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(HEAD), "found 1 labels and a head of none"),
        (lambda tensors: tensors.update({"score.bias": torch.zeros(1)}), r"found .* score\.bias"),
        (lambda tensors: tensors.update({HEAD: torch.zeros(1, 31)}), r"of shape \(1, 32\), found \(1, 31\)"),
        (lambda tensors: tensors.pop("model.norm.weight"), r"lacks 1 tensors of a LlamaModel .*norm\.weight"),
    ],
)
def test_a_damaged_head_or_decoder_is_refused(change, message: str, tmp_path: Path) -> None:
    save_pretrained(scalar_of(tiny_llama(torch.float32), seed=0), tmp_path / "it")
    tensors = load_file(tmp_path / "it" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "it" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_scalar(str(tmp_path / "it"), dtype="float32")


@pytest.mark.parametrize("name", ["score.0.weight", "v_head.summary.weight"])
def test_a_head_of_another_form_is_not_replaced_by_a_new_one(name: str, tmp_path: Path) -> None:
    """As reward models of two layers and TRL's value heads have them, in folders of causal language models."""
    save_pretrained(tiny_llama(torch.float32), tmp_path / "it")
    tensors = load_file(tmp_path / "it" / "model.safetensors")
    save_file(tensors | {name: torch.zeros(4, 32)}, tmp_path / "it" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"expected .* a head of score\.weight alone, found .* {name}\. Set"):
        load_scalar(str(tmp_path / "it"), dtype="float32")


def test_the_decoder_is_admitted_by_the_same_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pretrained(scalar_of(tiny_llama(torch.float32), seed=0), tmp_path / "it")
    with monkeypatch.context() as patch:
        attend_wrongly(patch)
        with pytest.raises(ModelError, match="refused by the check of its self-check"):
            load_scalar(str(tmp_path / "it"), dtype="float32")
    config = tmp_path / "it" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "bert"}))
    with pytest.raises(ModelError, match=r"^model: "):
        load_scalar(str(tmp_path / "it"), dtype="float32")


def test_a_reward_model_of_trl_scores_alike_here(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    base: LanguageModel = tiny_llama(torch.float32, weight_scale=0.05)
    save_pretrained(base, tmp_path / "base")
    pairs = [{"chosen": "the answer is 7.", "rejected": "a quick brown fox jumps"}] * 4
    arguments = RewardConfig(
        output_dir=str(tmp_path / "run"), max_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, bf16=False,
        save_strategy="no", disable_tqdm=True, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = RewardTrainer(
        model=str(tmp_path / "base"), args=arguments, train_dataset=Dataset.from_list(pairs),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "reward"))
    model = load_scalar(str(tmp_path / "reward"), dtype="float32")
    ids = [tiny_tokenizer().encode(text) for text in ("the answer is 7.", "a quick brown fox")]
    groups: Groups = [(tokens[:2], [tokens[2:]]) for tokens in ids]
    torch.testing.assert_close(scores_of(model, groups), hf_scores(tmp_path / "reward", groups), rtol=0, atol=1e-5)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "base").model.embed_tokens.weight
    assert not torch.equal(model.module.get_parameter("model.embed_tokens.weight"), start)
