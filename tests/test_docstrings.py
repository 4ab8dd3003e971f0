"""What docstrings of public functions say: shapes of tensors, and errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import plait
from tests.parsed import nodes, tree

SOURCES = Path(plait.__file__).parent
TENSOR = re.compile(r"\b(Tensor|ndarray|NDArray)\b")
SHAPE = re.compile(r"\[|\b(shapes?|scalar|flat)\b")
"""`[T, V]`, or in words: of any shape, of one shape, a scalar, flat."""
SUFFIX = re.compile(r"_[0-9A-Z]+$")
"""Of a name that says its shape: `logits_TV`."""
OURSELVES = {"AssertionError", "NotImplementedError", "KeyboardInterrupt"}
"""Errors that no caller is to expect, and an interrupt."""
EVERYTHING = {"Exception", "BaseException"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A function of our sources."""

    path: Path
    function: Function
    owner: ast.ClassDef | None

    @property
    def name(self) -> str:
        owner = "" if self.owner is None else f"{self.owner.name}."
        return f"{self.path.relative_to(SOURCES)}: {owner}{self.function.name}"

    @property
    def says(self) -> str:
        """Its docstring; for `__init__` that of its class too."""
        own = ast.get_docstring(self.function) or ""
        return f"{own}\n{self.says_of_class}" if self.function.name in ("__init__", "__post_init__") else own

    @property
    def says_of_class(self) -> str:
        return "" if self.owner is None else ast.get_docstring(self.owner) or ""

    @property
    def says_of_errors(self) -> str:
        """A class may say it of all its methods: every call raises …, reading … raises …."""
        of_all = " raises " in self.says_of_class
        return f"{self.says}\n{self.says_of_class}" if of_all else self.says


def public_functions() -> Iterator[Found]:
    """Those of modules and of public classes; `__init__` is one."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in tree(path).body:
            owner = node if isinstance(node, ast.ClassDef) else None
            if owner is not None and owner.name.startswith("_"):
                continue
            for function in [node] if owner is None else owner.body:
                shown = isinstance(function, Function) and (
                    not function.name.startswith("_") or function.name in ("__init__", "__post_init__")
                )
                if shown:
                    yield Found(path, function, owner)


# -- shapes


def tensors(function: Function) -> list[str]:
    """Names of the parameters that are tensors or hold some, and the function's own where its result does."""
    every = function.args
    parameters = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
    notes = {p.arg: p.annotation for p in parameters if p is not None} | {function.name: function.returns}
    return [name for name, note in notes.items() if note is not None and TENSOR.search(ast.unparse(note))]


def test_functions_on_tensors_say_their_shapes() -> None:
    silent = [
        found.name
        for found in public_functions()
        if (names := tensors(found.function))
        if not (SHAPE.search(found.says) or any(SUFFIX.search(name) for name in names))
    ]
    assert not silent


# -- errors


@cache
def bases() -> dict[str, set[str]]:
    """Each class of ours, by name → the names of its bases, and of theirs."""
    direct: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                direct.setdefault(node.name, set()).update(ast.unparse(base).split(".")[-1] for base in node.bases)

    def above(name: str) -> set[str]:
        return {name}.union(*(above(base) for base in direct.get(name, ())))

    return {name: above(name) for name in direct}


def raised_name(node: ast.Raise) -> str | None:
    """`ConfigError` of `raise ConfigError(...)`, `refusal` of `raise refusal(...)`; None: nothing of its own."""
    error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    name = "" if error is None else ast.unparse(error).split(".")[-1]
    return name if name.isidentifier() and name not in OURSELVES else None


def caught(handlers: list[ast.ExceptHandler]) -> set[str]:
    types = [handler.type for handler in handlers]
    each = [error for kind in types for error in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
    return {"Exception" if error is None else ast.unparse(error).split(".")[-1] for error in each}


def suppressed(node: ast.With) -> set[str]:
    """Errors that `with contextlib.suppress(...)` catches."""
    calls = [item.context_expr for item in node.items if "suppress(" in ast.unparse(item.context_expr)]
    return {ast.unparse(error).split(".")[-1] for call in calls if isinstance(call, ast.Call) for error in call.args}


def called_here(node: ast.Call) -> str:
    """`name` of `name(...)` and of `self.name(...)`; empty: something else is called."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return ""


def raised_by(inside: list[ast.AST], private: dict[str, Function]) -> set[str]:
    """Names of what is raised and not caught there, by private functions that are called there too."""
    names: set[str] = set()
    for node in inside:
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.With) and (ignored := suppressed(node)):
            names |= {name for name in raised_by([*node.body], private) if not ignored & bases().get(name, {name})}
            continue
        if isinstance(node, ast.Try):
            catches = caught(node.handlers)
            tried = raised_by([*node.body], private)
            names |= {name for name in tried if not catches & (bases().get(name, {name}) | EVERYTHING)}
            names |= raised_by([*node.handlers, *node.orelse, *node.finalbody], private)
            continue
        if isinstance(node, ast.Raise) and (name := raised_name(node)) is not None:
            names.add(name)
        if isinstance(node, ast.Call) and (called := called_here(node)) in private:
            rest = {name: other for name, other in private.items() if name != called}
            names |= raised_by([*private[called].body], rest)
        names |= raised_by([*ast.iter_child_nodes(node)], private)
    return names


def raised(found: Found) -> set[str]:
    """What a function raises, itself or through private ones of its module and class."""
    scopes = [tree(found.path), *([] if found.owner is None else [found.owner])]
    every = [node for scope in scopes for node in scope.body if isinstance(node, Function)]
    return raised_by([*found.function.body], {node.name: node for node in every if node.name.startswith("_")})


def is_said(error: str, says: str) -> bool:
    """Whether a docstring names an error or what it is one of, or leads to where that is said. What a function makes
    (`raise refusal(...)`) has some name there."""
    if "See `" in says:
        return True
    if not error[0].isupper():
        return bool(re.search(r"[Rr]aises|Error\b", says))
    return any(re.search(rf"\b{name}\b", says) for name in bases().get(error, {error}))


def is_command(found: Found) -> bool:
    """Whether its docstring is the help of a command, which says what users ask."""
    of_cli = found.path.parent == SOURCES / "cli" and found.owner is None
    return of_cli and found.function.returns is not None and ast.unparse(found.function.returns) == "int"


def test_functions_that_raise_our_errors_say_which() -> None:
    silent = [
        f"{found.name} raises {', '.join(unsaid)}"
        for found in public_functions()
        if not is_command(found)
        if (unsaid := sorted(error for error in raised(found) if not is_said(error, found.says_of_errors)))
    ]
    assert not silent, "\n".join(silent)


# -- sentences


def test_docstrings_begin_with_what_a_thing_is() -> None:
    """`Of a step.` leaves a reader to guess what of it."""
    vague = [
        f"{path.relative_to(SOURCES)}: {text[:60]}"
        for path in sorted(SOURCES.rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(text := node.value.value, str) and text.startswith("Of ")
    ]
    assert not vague


# -- packages


def test_packages_name_their_modules() -> None:
    """The docstring of a package is a map of it: each module in backticks (`device_*` for several)."""
    lost = []
    for init in sorted(SOURCES.rglob("*/__init__.py")):
        named = re.findall(r"`([\w*]+)`", ast.get_docstring(tree(init)) or "")
        modules = [path.stem for path in init.parent.glob("*.py") if path.stem != "__init__"]
        rooms = [path.parent.name for path in init.parent.glob("*/__init__.py")]
        lost += [f"{init.parent.name}: {m}" for m in (*modules, *rooms) if not any(fnmatch(m, name) for name in named)]
    assert not lost
