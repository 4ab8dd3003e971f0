"""Parameters of the models of roles, as they would have them when they are loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from plait.layout.params import Parameters
from plait.models.files.hub import read_config
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


@cache
def _parameters_by(config_text: str, scalar: bool) -> Parameters:
    """As a loaded model of this configuration would have them; a scalar one has a head of one output."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from plait.models.files.pretrained import new_module
    from plait.models.scalar_model import ScalarModule
    from plait.models.working_weights import layout_of

    read = json.loads(config_text)
    config = CONFIG_MAPPING[read["model_type"]].from_dict(read)
    with torch.device("meta"):
        if scalar:
            decoder = new_module(config, decoder_only=True)
            head_1H = torch.nn.Parameter(torch.empty(1, config.get_text_config().hidden_size))
            module = ScalarModule(decoder, head_1H)
        else:
            module = new_module(config, decoder_only=False)
    text = config.get_text_config()
    return Parameters.of(layout_of(module), text.num_attention_heads, getattr(text, "num_key_value_heads", None))
