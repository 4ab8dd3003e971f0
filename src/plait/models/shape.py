"""What memory and lengths depend on in a model's configuration, read from its `config.json`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.errors import ModelError
from plait.models.layer_types import (
    MLP_LAYERS,
    attending_layers,
    kinds_of_layers,
    layers_without_mlp,
    mixtures_of,
    recurrent_layers,
    windows_of,
)
from plait.models.mixer_shape import MixerShape, mixer_shape, mlp_width

KEPT_SCORES = 32 * 1024 * 1024
"""Attention probabilities of one layer that are kept for the backward; a batch with more recomputes them."""

_NAMES = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "num_heads"),
    "vocab_size": (),
    "max_position_embeddings": ("n_positions", "max_sequence_length"),
    "intermediate_size": ("n_inner",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("top_k",),
    "moe_intermediate_size": (),
}
"""Key → other names that families give it."""
_GATED = ("qwen3_next", "qwen3_5")
"""Families whose attention has a gate for each query."""
_CHANGING_ROPES = ("longrope", "su", "dynamic")

_SHARED_WIDTHS = tuple(f"{name}_intermediate_size" for name in ("shared_expert", "shared", "moe_shared_expert"))

NO_MIXER = MixerShape(0)


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder. Sizes are in elements."""

    layers: int
    hidden: int
    intermediate: int
    """Width of a dense block's MLP."""
    heads: int
    kv_heads: int
    head_dim: int
    """Dims of a head's queries and keys."""
    vocabulary: int
    tied: bool
    max_positions: int
    """See `usable_positions`."""
    attention_parameters: int
    """Weights of one layer's projections."""
    expert_layers: int = 0
    """Layers whose MLP is a mixture of experts."""
    experts: int = 0
    """Routed ones, of one such layer."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Width of the expert that every token passes."""
    attention_extras: int = 0
    """Biases of one layer's projections, and weights of its heads' norms."""
    balances: bool = False
    """Whether Transformers has a loss for its family that balances the experts (`load_balancing_loss_func`)."""
    mixtures: tuple[int, ...] = ()
    """Which of the layers are `expert_layers`, ascending, where others are dense; empty: all, none, or nobody says."""
    windows: tuple[int, ...] = ()
    """Tokens that the attention of each layer sees at most, its own one of them; 0: all. Empty: all layers see all."""
    recurrent: tuple[int, ...] = ()
    """Which of the layers are recurrent, ascending."""
    attends: tuple[int, ...] | None = None
    """Which have keys and values, ascending; None: those that keep no state."""
    without_mlp: tuple[int, ...] = ()
    """Which are a mixer or attention alone, ascending."""
    mlp_matrices: int = 3
    """That a dense MLP has, and an expert. Families with two count as if they had a gate, Nemotron-H apart."""
    mixer: MixerShape = NO_MIXER
    """One of these layers."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str | None = None) -> ModelShape:
        """Read a `config.json`; of a composite model, the text model's part.

        Args:
            name: of the model, for messages.

        Raises:
            ModelError: a number that the shape needs is not there; the message names the model and the keys.
        """
        config = config.get("text_config") or config
        name = name or str(config.get("_name_or_path") or config.get("model_type") or "this model")
        try:
            return cls._read(config, name)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(
                f"model: the configuration of {name!r} does not fit together: {error!r}; set `model` to another."
            ) from error

    @classmethod
    def _read(cls, config: Mapping[str, Any], name: str) -> ModelShape:
        kinds = kinds_of_layers(config, _number(config, "num_hidden_layers"))
        if MLP_LAYERS.intersection(kinds):
            config = {**config, "num_hidden_layers": len(kinds)}  # of Nemotron-H they are counted so
        needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
        if missing := [key for key in needed if not _number(config, key)]:
            raise _lacking(config, name, missing)
        layers, hidden, heads, vocabulary, _ = (_number(config, key) for key in needed)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        intermediate = mlp_width(config, _number(config, "intermediate_size") or 4 * hidden)
        if config.get("kv_lora_rank"):
            head_dim = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
            attention = _latent_attention_parameters(config, hidden, heads)
        else:
            gates = heads if str(config.get("model_type")).startswith(_GATED) else 0
            attention = hidden * head_dim * (2 * heads + 2 * kv_heads + gates)
        experts = _number(config, "num_experts") if "moe" in kinds or not MLP_LAYERS.intersection(kinds) else 0
        recurrent, attends = recurrent_layers(kinds), attending_layers(kinds, layers)
        expert_intermediate = _number(config, "moe_intermediate_size") or intermediate
        shared = _shared_width(config, expert_intermediate)
        if latent := int(config.get("moe_latent_size") or 0):
            # Experts read and give so few numbers, into which and from which all tokens are projected: as many weights.
            expert_intermediate, shared = expert_intermediate * latent // hidden, shared + latent
        mixtures = mixtures_of(config, layers, kinds) if experts else ()
        return cls(
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=vocabulary,
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=usable_positions(config, name),
            attention_parameters=attention,
            expert_layers=len(mixtures),
            experts=experts,
            experts_per_token=_number(config, "num_experts_per_tok"),
            balances="router_aux_loss_coef" in config and len(mixtures) > 0,
            expert_intermediate=expert_intermediate if experts else 0,
            shared_intermediate=shared if experts else 0,
            attention_extras=_attention_extras(config, heads, kv_heads, head_dim, hidden),
            mixtures=mixtures if len(mixtures) < layers else (),
            windows=windows_of(config, layers),
            recurrent=recurrent,
            attends=None if {*attends} == {*range(layers)} - {*recurrent} else attends,
            without_mlp=layers_without_mlp(kinds),
            mlp_matrices=2 if str(config.get("model_type")) == "nemotron_h" else 3,
            mixer=mixer_shape(config, hidden, attention) if recurrent else NO_MIXER,
        )

    @property
    def window(self) -> int:
        """Tokens that a layer's attention sees at most; 0: all, or not all layers see as many."""
        windows = set(self.windows)
        return windows.pop() if len(windows) == 1 else 0

    @property
    def attending(self) -> int:
        """Layers with keys and values."""
        return self.attending_in(0, self.layers)

    def attending_in(self, start: int, stop: int) -> int:
        """Those among the layers from `start` on, before `stop`."""
        if self.attends is None:
            return stop - start - self.recurrent_in(start, stop)
        return sum(start <= layer < stop for layer in self.attends)

    def recurrent_in(self, start: int, stop: int) -> int:
        """Recurrent layers, among these."""
        return sum(start <= layer < stop for layer in self.recurrent)

    @property
    def dense_layers(self) -> int:
        """Layers whose MLP is no mixture of experts."""
        return self.layers - self.expert_layers - len(self.without_mlp)

    @property
    def projections(self) -> int:
        """Weights of the projections of all layers, those that attend and those that are recurrent."""
        return self.attending * self.attention_parameters + len(self.recurrent) * self.mixer.parameters

    @property
    def parameters(self) -> int:
        """Parameters of a decoder; experts and their routers, norms and embeddings counted, biases of
        MLPs not.
        """
        dense = self.mlp_matrices * self.hidden * self.intermediate
        inner = self.experts * self.expert_intermediate + self.shared_intermediate
        mixture = self.mlp_matrices * self.hidden * inner
        mixture += self.hidden * self.experts
        mlps = self.dense_layers * dense + self.expert_layers * mixture
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        extras = self.attending * self.attention_extras + len(self.recurrent) * self.mixer.extras
        layers = self.projections + extras + self.layers * 2 * self.hidden
        return layers + mlps + embeddings + self.hidden

    @property
    def active_intermediate(self) -> int:
        """Inner elements of the widest MLP that one token passes."""
        mixture = self.experts_per_token * self.expert_intermediate + self.shared_intermediate
        dense = self.intermediate if self.dense_layers else 0
        return max(dense, mixture if self.expert_layers else 0)

    def head_in_layers(self, outputs: int) -> float:
        """What the head takes of a token, in layers: its floating point operations over those of a layer.

        A forward multiplies and adds once per weight that the token passes, a backward twice as often, so the ratio is
        that of the weights, in training as in scoring: outputs * hidden over `projections` + 3 * hidden * intermediate
        (`mlp_matrices`), of a mixture the router and the experts that a token passes, averaged over layers.
        What depends on lengths (attention scores) and what is small (norms, embeddings) is left out.

        Args:
            outputs: the vocabulary; 1 of a scalar model.
        """
        dense = self.dense_layers * self.mlp_matrices * self.hidden * self.intermediate
        inner = self.experts_per_token * self.expert_intermediate + self.shared_intermediate
        mixture = self.expert_layers * self.hidden * (self.mlp_matrices * inner + self.experts)
        layers = self.projections + dense + mixture
        return outputs * self.hidden * self.layers / layers


def usable_positions(config: Mapping[str, Any], name: str) -> int:
    """Longest prompt with response, in tokens.

    Rotary embeddings that change with the longest sequence of a batch ("longrope", "dynamic") would make a sample
    depend on its neighbours, so for them it is the length up to which they do not change.

    Raises:
        ModelError: the configuration states no number of positions.
    """
    limit = _number(config, "max_position_embeddings")
    if not limit:
        raise _lacking(config, name, ["max_position_embeddings"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for entry in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if (entry.get("rope_type") or entry.get("type")) in _CHANGING_ROPES:
            # Families of the Phi-3 kind state it outside, and Transformers lets that win.
            stated = config.get("original_max_position_embeddings") or entry.get("original_max_position_embeddings")
            limit = min(limit, int(stated or limit))
    return limit


def config_fields(config: Any) -> dict[str, Any]:
    """A Transformers configuration of a text model as a mapping, under the names that all families share."""
    return config.to_dict() | {shared: getattr(config, own, None) for shared, own in config.attribute_map.items()}


def _number(config: Mapping[str, Any], key: str) -> int:
    """0 where neither the key nor another name of it is set; of one number for each layer the largest."""
    values = (config.get(name) for name in (key, *_NAMES[key]))
    largest = (max(value, default=0) if isinstance(value, list) else value for value in values)
    return next((int(value) for value in largest if isinstance(value, int | float) and value), 0)


def _lacking(config: Mapping[str, Any], name: str, keys: list[str]) -> ModelError:
    return ModelError(
        f"model: the configuration of {name!r} (family {config.get('model_type', 'not stated')}) lacks "
        f"{', '.join(f'`{key}`' for key in keys)}; set `model` to a decoder of attention layers whose config.json "
        "is complete."
    )


def _latent_attention_parameters(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """DeepSeek-V2 (arXiv 2405.04434, section 2.1): queries and keys with values, each through a low rank."""
    nope, rope, value = (int(config[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, query_rank = int(config["kv_lora_rank"]), int(config.get("q_lora_rank") or 0)
    query = query_rank * (hidden + heads * (nope + rope)) if query_rank else hidden * heads * (nope + rope)
    return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _attention_extras(config: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int, hidden: int) -> int:
    """Qwen2 has biases of queries, keys and values, whatever its configuration says, Qwen3 and LFM2 norms of queries'
    and keys' heads, OLMo-hybrid of all heads; other families say that they have biases, of the output too."""
    projected = (heads + 2 * kv_heads) * head_dim
    family = str(config.get("model_type"))
    norms = 2 * head_dim if family.startswith(("qwen3", "lfm2")) else 0
    norms = (heads + kv_heads) * head_dim if family == "olmo_hybrid" else norms
    if family.startswith("qwen2"):
        return projected
    return norms + (projected + hidden if config.get("attention_bias") is True else 0)


def _shared_width(config: Mapping[str, Any], expert: int) -> int:
    """Inner elements of the expert that all tokens pass, which families state as one width or in experts."""
    stated = next((width for key in _SHARED_WIDTHS if (width := config.get(key))), None)
    return int(config.get("n_shared_experts") or 0) * expert if stated is None else int(stated)
