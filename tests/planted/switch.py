"""Plant a bug: one place in the code under test, written otherwise, while a context lasts.

A bug names a function and the text to be replaced in its source. The function is compiled again from the changed
source and gets the new code object, so that whoever has imported it runs the changed code. A text that is no longer
there, or not just once, is an error: the list of bugs cannot rot in silence.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class Bug:
    name: str
    place: str
    """package.module:function, or package.module:Class.method."""
    right: str
    """Text of the function as it is."""
    wrong: str
    """What stands in its place."""
    caught_by: tuple[str, ...]
    """Existing checks that fail: FILE::TEST under tests/, with its parameters where it has any."""
    doctor: str | None = None
    """The name that the doctor gives it in a run."""
    flow: str = "grpo"
    """That of the run."""

    def __str__(self) -> str:
        return self.name


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Run with the bug in place."""
    function = function_at(bug.place)
    before = function.__code__
    function.__code__ = changed_code(function, bug)
    try:
        yield
    finally:
        function.__code__ = before


def function_at(place: str) -> FunctionType:
    """The plain function behind a name: that of a property, a class method, a static method too."""
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    match found:
        case property():
            found = found.fget
        case functools.cached_property():
            found = found.func
        case classmethod() | staticmethod():
            found = found.__func__
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType), f"{place} is {found!r}, no function"
    return found


def changed_code(function: FunctionType, bug: Bug) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(bug.right)
    assert count == 1, f"{bug.name}: `{bug.right}` stands {count} times in {bug.place}, expected once"
    tree = ast.parse(source.replace(bug.right, bug.wrong))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef), f"{bug.place} is no plain function"
    definition.decorator_list = []
    flags = __future__.annotations.compiler_flag
    namespace = dict(function.__globals__)
    exec(compile(tree, f"<{bug.name}>", "exec", flags=flags, dont_inherit=True), namespace)
    code = namespace[definition.name].__code__
    assert code.co_freevars == function.__code__.co_freevars, f"{bug.place} closes over other names"
    return code
