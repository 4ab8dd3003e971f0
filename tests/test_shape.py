"""The shape of the house: modules import each other in one direction, and not through too many others; files
and classes tell one story."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import plait

SOURCES = Path(plait.__file__).parents[1]
MOST_DEEP = 20
"""Modules of the longest chain of imports: what a reader must follow at worst."""
MOST_FUNCTION_LINES = 60
MOST_LINES = 400
MOST_METHODS = 12
WIDE = {
    "ControllersStore": "torch.distributed calls its methods by their names",
    "Peers": "the collectives and messages along one axis, each once",
}
"""Classes with more public methods, and why."""


@cache
def modules() -> dict[str, Path]:
    """By name; the files of packages, which say what is in them, are left out."""
    paths = sorted((SOURCES / "plait").rglob("*.py"))
    named = {".".join(path.relative_to(SOURCES).with_suffix("").parts): path for path in paths}
    return {name: path for name, path in named.items() if not name.endswith(".__init__")}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, known: frozenset[str]) -> set[str]:
    """Modules that one imports outside its functions, for type checkers too."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(tree(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            waiting += ast.iter_child_nodes(node)
    return found & known


@cache
def graph() -> dict[str, set[str]]:
    paths = modules()
    known = frozenset(paths)
    return {name: imports(path, known) - {name} for name, path in paths.items()}


def test_no_module_imports_one_that_imports_it() -> None:
    edges = graph()
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " → ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in sorted(edges[name]):
                walk(other, (*above, name))
            done.add(name)

    for name in edges:
        walk(name, ())


def test_no_chain_of_imports_is_too_long() -> None:
    edges = graph()

    @cache
    def longest(name: str) -> tuple[str, ...]:
        below = max((longest(other) for other in sorted(edges[name])), key=len, default=())
        return (name, *below)

    chain = max((longest(name) for name in edges), key=len)
    assert len(chain) <= MOST_DEEP, " → ".join(chain)


def test_no_module_is_too_long() -> None:
    long = {name: lines for name, path in modules().items() if (lines := path.read_text().count("\n")) > MOST_LINES}
    assert not long


def test_no_function_is_too_long() -> None:
    """But in kernels and other compiled ones, where not everything can be called."""
    long: dict[str, int] = {}
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                is_compiled = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                if lines > MOST_FUNCTION_LINES and not (is_compiled or name.startswith("plait.kernels.")):
                    long[f"{name}.{node.name}"] = lines
    assert not long


def test_no_class_does_too_much() -> None:
    """By its public methods: behind more of them stand two ideas, each of which has a name."""
    wide: dict[str, int] = {}
    for path in modules().values():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
                wide[node.name] = max(wide.get(node.name, 0), sum(not name.startswith("_") for name in methods))
    assert {name for name, count in wide.items() if count > MOST_METHODS} == set(WIDE)
