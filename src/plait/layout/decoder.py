"""The parameters of a Llama-like decoder from its numbers alone, for plans and estimates without a model at hand."""

from __future__ import annotations

from collections.abc import Mapping

from plait.layout.params import Heads, Param, Parameters

HEAD = "score.weight"
"""The head of a scalar model."""


def experts_stay_whole(width: int, hidden: int) -> bool:
    """Whether ranks of tensor parallelism have whole experts of a mixture; else each has some columns of all.

    Narrow ones do, no wider than the model itself: of columns of theirs products are too thin, and there are so many
    experts that ranks get about as many tokens each. So it is whatever the number of ranks (ADR 119).

    Args:
        width: of one expert.
    """
    return width <= hidden


def decoder_parameters(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: int,
    tied: bool = False,
    experts: int = 0,
    dense: Mapping[int, int] | None = None,
    cut_vocabulary: bool = False,
    outputs: int | None = None,
) -> Parameters:
    """Names, shapes and cuts as Transformers' Llama, Mistral, Qwen and Mixtral families have them.

    Args:
        intermediate: of the MLP, or of each expert where there are `experts`.
        dense: layer → width of its MLP, of layers without experts where others have some.
        cut_vocabulary: tensor parallelism cuts the embedding and the head by rows; otherwise the embedding is
            replicated, and the head too where it is tied.
        outputs: of a scalar model's head, which is replicated; None: a language model.
    """
    dense = dense or {}
    query, group = Heads(heads, kv_heads), Heads(heads, kv_heads, shared=True)
    rows = 0 if cut_vocabulary else None
    embedding, tied = "model.embed_tokens.weight", tied and outputs is None
    params = [Param(embedding, (vocabulary, hidden), cut=rows, ends="both" if tied else "first")]
    for layer in range(layers):
        at, attention = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        params += [
            Param(f"{attention}.q_proj.weight", (heads * head_dim, hidden), layer, 0, heads=query),
            Param(f"{attention}.k_proj.weight", (kv_heads * head_dim, hidden), layer, 0, heads=group),
            Param(f"{attention}.v_proj.weight", (kv_heads * head_dim, hidden), layer, 0, heads=group),
            Param(f"{attention}.o_proj.weight", (hidden, heads * head_dim), layer, 1, heads=query),
        ]
        width = dense.get(layer, 0) or intermediate
        if experts and layer not in dense:
            params.append(Param(f"{at}.mlp.gate.weight", (experts, hidden), layer))
            params += _experts(f"{at}.mlp.experts", layer, (experts, hidden, intermediate))
        else:
            params += [
                Param(f"{at}.mlp.gate_proj.weight", (width, hidden), layer, 0),
                Param(f"{at}.mlp.up_proj.weight", (width, hidden), layer, 0),
                Param(f"{at}.mlp.down_proj.weight", (hidden, width), layer, 1),
            ]
        params += [
            Param(f"{at}.input_layernorm.weight", (hidden,), layer),
            Param(f"{at}.post_attention_layernorm.weight", (hidden,), layer),
        ]
    params.append(Param("model.norm.weight", (hidden,), ends="last"))
    if outputs is not None:
        return Parameters((*params, Param(HEAD, (outputs, hidden), ends="last")))
    if tied:
        return Parameters(tuple(params), {"lm_head.weight": embedding})
    return Parameters((*params, Param("lm_head.weight", (vocabulary, hidden), cut=0, ends="last")))


def _experts(at: str, layer: int, shape: tuple[int, int, int]) -> tuple[Param, Param]:
    """shape: (experts, hidden size, width of one)"""
    experts, hidden, width = shape
    joined = (experts, 2 * width, hidden)
    if experts_stay_whole(width, hidden):
        return Param(f"{at}.gate_up_proj", joined, layer, 0), Param(f"{at}.down_proj", shape, layer, 0)
    return Param(f"{at}.gate_up_proj", joined, layer, 1, sections=2), Param(f"{at}.down_proj", shape, layer, 2)
