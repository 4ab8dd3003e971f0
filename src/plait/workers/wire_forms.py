"""Records as they travel between ranks: each field by its type, as a JSON value, and where that is large as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, Protocol, Self, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from plait.data.records import Prompt, Sample
from plait.workers.messages import NUM_SAMPLE_ARRAYS, Message, pack_samples, unpack_samples


class Form(NamedTuple):
    """How a value travels.

    pack:   (value, arrays so far, which get its own) → JSON value
    unpack: (that JSON value, its arrays and all behind them) → value
    """

    pack: Callable[[Any, list[NDArray[Any]]], Any]
    unpack: Callable[[Any, Iterator[NDArray[Any]]], Any]


class Record(Protocol):
    """Base of frozen dataclasses that travel as their fields do."""

    kind: ClassVar[str] = ""

    def to_message(self) -> Message:
        arrays: list[NDArray[Any]] = []
        header = form_of_fields(type(self)).pack(self, arrays)
        return Message(header, tuple(arrays), self.kind)

    @classmethod
    def of(cls, message: Message) -> Self:
        return form_of_fields(cls).unpack(message.header, iter(message.arrays))


@cache
def form_of(kind: Any) -> Form:
    """How values of a type travel. A sequence is a list afterwards, of samples a tuple; samples and prompts are as
    `pack_samples` has them. What is of no type that is named here travels as it is, and is a JSON value."""
    origin: Any = get_origin(kind) or kind
    args = get_args(kind)
    if origin in (Union, UnionType):
        return _or_none([form_of(arg) for arg in args if arg is not NoneType])
    if origin is tuple and args[-1] is not Ellipsis:
        return _row(tuple, [form_of(arg) for arg in args])
    if origin in _COLLECTIONS:
        return _SAMPLES if args[0] is Sample else _many(_COLLECTIONS[origin], form_of(args[0]))
    if origin in (Mapping, dict):
        return _mapping(*map(form_of, args)) if args[0] is not str else _object(form_of(args[1]))
    if origin in _FORMS:
        return _FORMS[origin]
    if not isinstance(origin, type):
        return _AS_IT_IS
    if issubclass(origin, Enum):
        return Form(lambda value, arrays: value.value, lambda value, arrays: origin(value))
    if issubclass(origin, BaseModel):
        return Form(lambda value, arrays: value.model_dump(mode="json"), lambda v, arrays: origin.model_validate(v))
    if hasattr(origin, "to_message"):
        packed: Any = origin
        return _embedded(packed.to_message, packed.of)
    return form_of_fields(origin) if dataclasses.is_dataclass(origin) or hasattr(origin, "_fields") else _AS_IT_IS


@cache
def form_of_fields(cls: Any) -> Form:
    """How instances of a dataclass or named tuple travel: the fields in order."""
    make: Callable[..., Any] = cls
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else cls._fields
    row = _row(tuple, [form_of(hints[name]) for name in names])
    return Form(
        lambda value, arrays: row.pack([getattr(value, name) for name in names], arrays),
        lambda values, arrays: make(*row.unpack(values, arrays)),
    )


_AS_IT_IS = Form(lambda value, arrays: value, lambda value, arrays: value)
_COLLECTIONS: Mapping[Any, Callable[..., Any]] = {tuple: tuple, Sequence: list, list: list, frozenset: frozenset}


def _or_none(forms: Sequence[Form]) -> Form:
    if all(form is _AS_IT_IS for form in forms):
        return _AS_IT_IS
    (form,) = forms
    return Form(
        lambda value, arrays: None if value is None else form.pack(value, arrays),
        lambda value, arrays: None if value is None else form.unpack(value, arrays),
    )


def _row(made: Callable[..., Any], forms: Sequence[Form]) -> Form:
    return Form(
        lambda values, arrays: [form.pack(value, arrays) for form, value in zip(forms, values, strict=True)],
        lambda values, arrays: made(form.unpack(value, arrays) for form, value in zip(forms, values, strict=True)),
    )


def _many(made: Callable[..., Any], form: Form) -> Form:
    if form is _AS_IT_IS:
        return Form(lambda values, arrays: list(values), lambda values, arrays: made(values))
    return Form(
        lambda values, arrays: [form.pack(value, arrays) for value in values],
        lambda values, arrays: made(form.unpack(value, arrays) for value in values),
    )


def _mapping(key: Form, value: Form) -> Form:
    items = _many(dict, _row(tuple, [key, value]))
    return Form(lambda mapping, arrays: items.pack(mapping.items(), arrays), items.unpack)


def _object(form: Form) -> Form:
    return Form(
        lambda mapping, arrays: {name: form.pack(value, arrays) for name, value in mapping.items()},
        lambda mapping, arrays: {name: form.unpack(value, arrays) for name, value in mapping.items()},
    )


def _embedded(to_message: Callable[[Any], Message], of: Callable[[Message], Any]) -> Form:
    """What has a message of its own: that header, and the number of its arrays."""

    def pack(value: Any, arrays: list[NDArray[Any]]) -> Any:
        message = to_message(value)
        arrays += message.arrays
        return [message.header, len(message.arrays)]

    return Form(pack, lambda value, arrays: of(Message(value[0], tuple(islice(arrays, value[1])))))


def _pack_array(array: NDArray[Any], arrays: list[NDArray[Any]]) -> None:
    arrays.append(array)


def _pack_samples(samples: Sequence[Sample], arrays: list[NDArray[Any]]) -> list[str]:
    """Samples as `pack_samples` has them; of none no array, as nearly all requests have none that has begun."""
    if samples:
        arrays += pack_samples(samples)
    return [sample.text for sample in samples]


def _unpack_samples(texts: Sequence[str], arrays: Iterator[NDArray[Any]]) -> tuple[Sample, ...]:
    return unpack_samples(tuple(islice(arrays, NUM_SAMPLE_ARRAYS)), texts) if texts else ()


_SAMPLES = Form(_pack_samples, _unpack_samples)
_FORMS: Mapping[Any, Form] = {
    np.ndarray: Form(_pack_array, lambda value, arrays: next(arrays)),
    Message: _embedded(lambda message: message, lambda message: message),
    Prompt: Form(
        lambda prompt, arrays: [prompt.uid, list(prompt.token_ids)],
        lambda value, arrays: Prompt(value[0], "", tuple(value[1])),
    ),
}
