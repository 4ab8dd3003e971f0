"""Names of modules, and the order of parameters in a flat buffer."""

from __future__ import annotations

from plait.models.module_names import in_module_order, weights_side_by_side


def test_biases_come_behind_the_weights_that_read_the_same_tensor() -> None:
    attention = [f"{name}_proj.{leaf}" for name in "qkv" for leaf in ("weight", "bias")]
    layers = [
        f"model.layers.{i}.{name}"
        for i in range(2)
        for name in (
            *(f"self_attn.{name}" for name in attention),
            "self_attn.o_proj.weight",
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
            "mlp.down_proj.weight",
            "input_layernorm.weight",
        )
    ]
    names = ["model.embed_tokens.weight", *layers, "model.norm.weight"]
    ordered = weights_side_by_side(names)
    first = [name.removeprefix("model.layers.0.self_attn.") for name in ordered[1:7]]
    assert first == ["q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias"]
    assert ordered[7:12] == names[7:12], "the others stay where they are"
    assert ordered[12:15] == [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    assert sorted(ordered) == sorted(names)
    assert in_module_order(ordered) == names


def test_names_without_biases_stay_in_order() -> None:
    names = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert weights_side_by_side(names) == names


def test_modules_that_are_no_neighbours_stay_where_they_are() -> None:
    names = [f"layers.0.mlp.{name}_proj.{leaf}" for name in ("gate", "down", "up") for leaf in ("weight", "bias")]
    assert weights_side_by_side(names) == in_module_order(names) == names
