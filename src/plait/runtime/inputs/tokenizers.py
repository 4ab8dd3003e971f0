"""The tokenizers of models by name, and whether what they write has a place in the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plait.dataflow import CallKind, Dataflow, Node
from plait.errors import ConfigError, ModelError
from plait.models.files.adapter_folder import adapter_of
from plait.models.files.hub import resolve
from plait.models.files.known_shapes import is_shape, no_weights
from plait.models.files.pretrained import tokenizer_of
from plait.models.shape import ModelShape
from plait.observe.loading import loading
from plait.recipes.role_models import REWARD_ROLES, RoleModel


def load_tokenizer(model: str, key: str = "model") -> Any:
    """The tokenizer of a model name, without its weights.

    Args:
        key: of the recipe, for messages.

    Raises:
        ModelError: the model cannot be found, or its folder has no tokenizer.
    """
    if is_shape(model):
        raise no_weights(model, key)
    loading(f"tokenizer of {model}", once=True)
    adapter = adapter_of(model)
    if adapter is None:
        folder = resolve(model)
    else:
        folder = adapter.folder if adapter.has_tokenizer else resolve(adapter.base)
    try:
        return tokenizer_of(folder, model)
    except ModelError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"key `{key}`: `{model}` has no tokenizer that can be read: {error}") from error


def unlike_tokens(tokenizer: Any, other: str, key: str) -> list[str]:
    """Tokens of a tokenizer that have another id in that of another model, or none.

    Raises:
        ModelError: see `load_tokenizer`.
    """
    ids = load_tokenizer(other, key).get_vocab()
    return [token for token, place in tokenizer.get_vocab().items() if ids.get(token) != place]


def check_draft_model(tokenizer: Any, model: str, name: str, key: str) -> None:
    """Raises ConfigError where a draft model does not speak the tokens of the model in whose place it drafts.

    Args:
        tokenizer: of that model.
    """
    if unlike := unlike_tokens(tokenizer, name, key):
        raise ConfigError(
            f"`{key}` is `{name}`, which drafts tokens for `{model}`, but {len(unlike)} of these, such as "
            f"{unlike[0]!r}, have another id there or none; give a model with the tokenizer of `{model}`, or leave it "
            "out"
        )


def check_roles(tokenizer: Any, model: str, role_models: Iterable[RoleModel]) -> None:
    """Raises ConfigError where a role reads a run's token ids, but begins as a model for which they mean other texts.

    A frozen reward model has its own tokens: samples are rendered for it.

    Args:
        tokenizer: of the run's model.

    Raises:
        ModelError: see `load_tokenizer`.
    """
    for of_role in role_models:
        if of_role.name == model:
            continue
        if of_role.reward:
            load_tokenizer(of_role.name, of_role.key)
            continue
        if unlike := unlike_tokens(tokenizer, of_role.name, of_role.key):
            remedy = f"give another `{of_role.key}`"
            if of_role.scalar and of_role.role not in REWARD_ROLES and of_role.key != f"{of_role.role}.model":
                remedy = f"set `{of_role.role}.model`, such as to `{model}` (it gets a new head)"
            raise ConfigError(
                f"the {of_role.role} begins as `{of_role.name}` (key `{of_role.key}`) and reads the tokens of "
                f"`{model}`, but {len(unlike)} of these, such as {unlike[0]!r}, have another id there or none; "
                f"{remedy}"
            )


def check_reach(
    tokenizer: Any,
    model: str,
    flow: Dataflow,
    longest_of: Mapping[str, int],
    role_models: Iterable[RoleModel],
    shapes: Mapping[str, ModelShape],
) -> None:
    """Raises ConfigError where a role reads a run's token ids, but its model has too few positions for the longest
    sample, or no embedding for some of the tokens: of given texts those that the tokenizer writes, of drawn samples all
    that are drawn from, which may be more. A model may have rows for others, too: its log-probs are over all that it
    has. A frozen reward model has its own tokens.

    Args:
        tokenizer: of the run's model; some write tokens that it has no embedding for (see `check_ids`).
        longest_of: call that makes or reads samples → tokens of its longest one, with the prompt.
        shapes: by the model's name.
    """
    limits = "`data.max_example_tokens`"
    if flow.of_kind(CallKind.GENERATE):
        limits = "`data.max_prompt_tokens` or `sampling.max_response_tokens`"
    written = min(max(tokenizer.get_vocab().values(), default=0) + 1, shapes[model].vocabulary)
    read = {m: [flow.nodes[node.rows] for node in flow.calls(m.role)] for m in role_models if not m.reward}
    for of_role, sources in read.items():
        shape = shapes[of_role.name]
        _check_drawn(of_role, sources, {m.role: m.name for m in read}, shapes)
        if of_role.key == "model":
            continue
        longest = max(longest_of[source.call] for source in sources)
        if shape.max_positions < longest:
            raise ConfigError(
                f"`{of_role.key}` is `{of_role.name}`, whose positions end at {shape.max_positions}, but samples may "
                f"have {longest} tokens with their prompts; lower {limits}, or give another `{of_role.key}`"
            )
        if shape.vocabulary < written:
            raise ConfigError(
                f"`{of_role.key}` is `{of_role.name}`, whose vocabulary has {shape.vocabulary} tokens, but that of "
                f"the run has {written}; give another `{of_role.key}`"
            )


def _check_drawn(
    of_role: RoleModel, sources: Iterable[Node], names: Mapping[str, str], shapes: Mapping[str, ModelShape]
) -> None:
    """Raises ConfigError where a role reads samples of a model that draws from more tokens than its own has.

    Args:
        sources: what makes the rows that it reads.
        names: role → name of its model.
    """
    has = shapes[of_role.name].vocabulary
    for name in (names[str(source.role)] for source in sources if source.kind is CallKind.GENERATE):
        if has < (drawn := shapes[name].vocabulary):
            raise ConfigError(
                f"`{of_role.key}` is `{of_role.name}`, whose vocabulary has {has} tokens, but `{name}`, whose samples "
                f"the {of_role.role} reads, draws from {drawn}, with or without a text in its tokenizer; give another "
                f"`{of_role.key}`, or add rows to it (Transformers' `resize_token_embeddings({drawn})`)"
            )


def check_ids(tokenizer: Any, vocabulary: int, ids: Iterable[tuple[str, Sequence[int]]], name: str) -> None:
    """Raises ModelError where a tokenizer writes tokens that its model has no embedding for.

    Args:
        ids: (place, token ids) of the texts that are read.
        name: of the model, for messages.
    """
    if max(tokenizer.get_vocab().values(), default=0) < vocabulary:
        return  # whatever the text
    for place, tokens in ids:
        if max(tokens, default=0) >= vocabulary:
            raise ModelError(
                f"model: the tokenizer of {name!r} writes token {max(tokens)} for {place}, but the model has only "
                f"{vocabulary}; give the model its own tokenizer, or set `model` to another."
            )
