"""What GPUs do not do is refused, be there one or not."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import ConfigError
from plait.recipes.device_checks import check_served
from tests.recipes.test_checks import recipe_of


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"device": "cuda", "sampling.exact": True}, r"`sampling.exact` promises .* `device` is cuda"),
        ({"device": "cuda", "dtype": "float64"}, r"`device` is cuda, .* but the dtype is float64"),
    ],
)
def test_what_is_for_a_cpu_alone_is_refused_on_a_gpu(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_served(recipe_of(**keys))
    check_served(recipe_of(**{**keys, "device": "cpu"}))
