"""Transformers' conversion of what a checkpoint stores to the tensors of a module: the one that it loads by, for as few
tensors at a time as belong together.

Experts that are stored one by one are stacked, what is stored as one is split, names change. Which of it a family needs
Transformers says (`get_model_conversion_mapping`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(eq=False)
class Group:
    """Stored tensors that tensors of the module are made of.

    first:  name of the one tensor that is made, or of the first of several
    stored: name of a stored tensor → the pattern by which it is converted; None: it is the module's as it stands
    """

    first: str
    stored: dict[str, str | None] = field(default_factory=dict)


class Conversion:
    """What a checkpoint's tensors become.

    Args:
        module: of Transformers, whole, perhaps without weights.
        stored: names of the checkpoint's tensors; those of which the module needs nothing are left out.
    """

    def __init__(self, module: Any, stored: Iterable[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        transforms = get_model_conversion_mapping(module)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self._module = module
        self._converters: Mapping[str, Any] = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        own, prefix = module.state_dict(), module.base_model_prefix
        groups: dict[str, Group] = {}
        for name in sorted(stored, key=dot_natural_key):
            made, pattern = rename_source_key(name, renamings, converters, prefix, own)
            if made not in own and name in own:
                made, pattern = rename_source_key(name, [], [], prefix, own)
            if made in own:
                groups.setdefault(made, Group(made)).stored[name] = pattern
        self.groups = tuple(groups.values())

    def convert(self, group: Group, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The tensors of the module that a group makes, by their names there, in the dtype of what is read.

        Args:
            read: gives a stored tensor; on the meta device, shapes alone are converted.

        Raises:
            ValueError: they do not fit together, as some are missing or have another shape; and what `read` raises.
        """
        names = list(group.stored)
        pattern = group.stored[names[0]]
        if pattern is None:
            return {group.first: read(names[0])}
        converter = copy.deepcopy(self._converters[pattern])
        for name, of_name in group.stored.items():
            converter.add_tensor(group.first, name, of_name, lambda name=name: read(name))
        try:
            made = converter.convert(group.first, model=self._module, config=self._module.config)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            raise ValueError(
                f"{group.first} cannot be built from the tensors that are there, {names[0]}{others}, of which some may "
                f"be missing or have another shape ({error}); set `model` to a complete checkpoint"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
