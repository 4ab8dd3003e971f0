"""Parameters of the models of roles, as they would have them when they are loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from plait.layout.params import Parameters
from plait.models.files.hub import is_stated, read_config
from plait.models.files.known_shapes import is_shape
from plait.recipes.role_models import RoleModel


def parameters_of(models: Sequence[RoleModel]) -> dict[str, Parameters]:
    """The parameters of each role's model, from the configurations alone; those of equal ones are made once.

    Imports torch.

    Raises:
        ModelError: Transformers makes no model of a configuration.
    """
    from plait.models.files.pretrained import reading

    texts = {name: json.dumps(read_config(name), sort_keys=True) for name in {model.name for model in models}}
    parameters = {}
    for model in models:
        with reading(model.name):
            parameters[model.role] = _parameters_by(texts[model.name], model.scalar)
    return parameters


def needs_all_tokens(model: RoleModel) -> str:
    """Why ranks that train it by tensor parallelism cannot part its tokens (`sequence_parallel`), in words for a
    person; empty: they can, as a test says of those models whose configuration plait states.

    Imports torch for others.

    Raises:
        ModelError: Transformers makes no model of its configuration.
    """
    if is_stated(model.name):
        return ""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from plait.models.files.pretrained import reading

    config = read_config(model.name)
    if is_shape(model.name) and config.get("model_type") not in CONFIG_MAPPING:
        return ""  # nothing but numbers is known of it
    with reading(model.name):
        return _undivided(json.dumps(config, sort_keys=True), model.scalar)


@cache
def _undivided(config_text: str, scalar: bool) -> str:
    from plait.models.parallel.token_split import undivided

    module, parameters = _module_by(config_text, scalar), _parameters_by(config_text, scalar)
    names = {param.name for param in parameters.params}
    return undivided(module, parameters, names)


@cache
def _parameters_by(config_text: str, scalar: bool) -> Parameters:
    """As a loaded model of this configuration would have them; a scalar one has a head of one output."""
    from plait.models.working_weights import layout_of

    module = _module_by(config_text, scalar)
    text = module.config.get_text_config()
    return Parameters.of(layout_of(module), text.num_attention_heads, getattr(text, "num_key_value_heads", None))


def _module_by(config_text: str, scalar: bool) -> Any:
    """It has no numbers."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from plait.models.files.pretrained import new_module
    from plait.models.scalar_model import ScalarModule

    read = json.loads(config_text)
    config = CONFIG_MAPPING[read["model_type"]].from_dict(read)
    with torch.device("meta"):
        if not scalar:
            return new_module(config, decoder_only=False)
        decoder = new_module(config, decoder_only=True)
        return ScalarModule(decoder, torch.nn.Parameter(torch.empty(1, config.get_text_config().hidden_size)))
