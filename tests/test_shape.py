"""The shape of the house: modules import each other in one direction, and not through too many others; files
and classes tell one story; docstrings and pages name what there is; a test stands where what it tests stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import plait
from plait.recipes.keys import describe_keys
from tests.parsed import nodes, tree

SOURCES = Path(plait.__file__).parents[1]
TESTS = Path(__file__).parent
MOST_DEEP = 20
"""Modules of the longest chain of imports: what a reader must follow at worst."""
MOST_FUNCTION_LINES = 60
MOST_LINES = 400
LONG_LINES, MOST_LONG = 300, 10
"""So many modules may have more lines than that."""
MANY_PARAMETERS, MOST_WIDE = 6, 23
"""So many functions may have more parameters than that, `self` left out."""
MOST_METHODS = 12
WIDE = {
    "ControllersStore": "torch.distributed calls its methods by their names",
    "Costs": "what a prediction asks of a cost model, each once",
    "LossBatch": "what a loss reads and what it makes of that, each once",
    "MicroBatchLoss": "the same",
    "Peers": "the collectives and messages along one axis, each once",
}
"""Classes with more public methods, and why."""
MOST_PRIVATE = 29
"""Places in which tests see private names of ours."""
OF_TRL = frozenset(("_metrics", "_generate"))
"""Attributes of TRL's trainers that tests read, of names that ours have too."""
OF_THE_WHOLE = {
    "runs": "runs from a recipe to the final weights",
    "golden": "runs against a record of what they computed",
    "fuzz": "wrong inputs of every kind, each answered in one message",
    "planted": "bugs that the suite and the doctor must find",
}
"""Packages of tests that mirror none of ours."""
LEAST_NAMESAKES = 0.835
"""Share of the test files elsewhere that have the name of the module that they test."""
PAGES = SOURCES.parent / "docs"
REFERENCE = re.compile(r"`((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*)`")
PRIVATE = re.compile(r"\b_\w+")
FILE_NAME = re.compile(r"\.(py|json|jsonl|yaml|log)$")
ARGUMENT = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*):( |$)")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def files() -> dict[str, Path]:
    """By name; a package is its `__init__`."""
    paths = sorted((SOURCES / "plait").rglob("*.py"))
    names = [".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in paths]
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


@cache
def modules() -> dict[str, Path]:
    """By name; the files of packages, which say what is in them, are left out."""
    return {name: path for name, path in files().items() if path.name != "__init__.py"}


def imports(path: Path, known: frozenset[str], *, typed: bool) -> set[str]:
    """Modules and packages that one imports outside its functions. Of a package a module is imported, or else a name
    that its `__init__` has.

    Args:
        typed: what is imported for type checkers alone is among them.
    """
    imported: set[str] = set()
    waiting: list[ast.AST] = list(tree(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.If) and not typed and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With):
            waiting += ast.iter_child_nodes(node)
    return imported & known


@cache
def graph(*, typed: bool) -> dict[str, set[str]]:
    paths = files()
    known = frozenset(paths)
    return {name: imports(path, known, typed=typed) - {name} for name, path in paths.items()}


def test_no_module_imports_one_that_imports_it() -> None:
    """Not for type checkers either."""
    edges = graph(typed=True)
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
    """Through packages, too: to import a name of one is to run its `__init__`."""
    edges = graph(typed=False)

    @cache
    def longest(name: str) -> tuple[str, ...]:
        below = max((longest(other) for other in sorted(edges[name])), key=len, default=())
        return (name, *below)

    chain = max((longest(name) for name in edges), key=len)
    assert len(chain) <= MOST_DEEP, " → ".join(chain)


@cache
def passed_on(module: str) -> set[str]:
    """Names that a module has from another one alone."""
    statements = [node for node in tree(modules()[module]).body if not isinstance(node, ast.Import | ast.ImportFrom)]
    imported = (node for node in nodes(modules()[module]) if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name for node in imported for alias in node.names} - bound(statements)


def test_names_are_imported_from_the_modules_that_define_them() -> None:
    """Else a reader looks for them in a module that has them from elsewhere; packages may gather names."""
    wrong = [
        f"{name}: {alias.name} of {node.module}"
        for name, path in files().items()
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.module in modules()
        for alias in node.names
        if alias.name in passed_on(node.module)
    ]
    assert not wrong


def test_no_module_is_too_long() -> None:
    long = {name: lines for name, path in modules().items() if (lines := path.read_text().count("\n")) > MOST_LINES}
    assert not long


def test_few_modules_are_long() -> None:
    long = sorted(name for name, path in modules().items() if path.read_text().count("\n") > LONG_LINES)
    assert len(long) <= MOST_LONG, f"{len(long)}: {', '.join(long)}"


@cache
def plain_functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All but kernels and other compiled ones, where not everything can be called, or passed as a whole."""
    return [
        (f"{name}.{node.name}", node)
        for name, path in modules().items()
        if not name.startswith("plait.kernels.")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def test_no_function_is_too_long() -> None:
    sizes = {name: (node.end_lineno or node.lineno) - node.lineno + 1 for name, node in plain_functions()}
    assert not {name: lines for name, lines in sizes.items() if lines > MOST_FUNCTION_LINES}


def test_few_functions_have_many_parameters() -> None:
    wide = []
    for name, node in plain_functions():
        named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if sum(argument.arg not in ("self", "cls") for argument in named) > MANY_PARAMETERS:
            wide.append(name)
    assert len(wide) <= MOST_WIDE, f"{len(wide)}: {', '.join(sorted(wide))}"


def test_no_class_does_too_much() -> None:
    """By its public methods: behind more of them stand two ideas, each of which has a name."""
    wide: dict[str, int] = {}
    for path in modules().values():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                methods = [
                    child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
                wide[node.name] = max(wide.get(node.name, 0), sum(not name.startswith("_") for name in methods))
    assert {name for name, count in wide.items() if count > MOST_METHODS} == set(WIDE)


# -- what docstrings and pages say


def documented(path: Path) -> Iterator[tuple[Documented, str]]:
    for node in nodes(path):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)) is not None:
            yield node, text


def documented_arguments(text: str) -> Iterator[str]:
    """Names under `Args:`, of which a line may have several: `a, b: what they are`."""
    _, _, section = text.partition("Args:\n")
    for line in section.splitlines():
        if line and not line.startswith("    "):
            return
        if (match := ARGUMENT.match(line.removeprefix("    "))) is not None:
            yield from match[1].split(", ")


def parameters(node: Documented) -> set[str]:
    """Those of a function; of a class those of its `__init__`, or its fields where it has none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        return {argument.arg for argument in every if argument is not None}
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return parameters(child)
    return {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }


def test_arguments_of_docstrings_are_parameters() -> None:
    wrong = [
        f"{name}: {getattr(node, 'name', 'the module')} has no `{argument}`"
        for name, path in modules().items()
        for node, text in documented(path)
        for argument in documented_arguments(text)
        if argument not in parameters(node)
    ]
    assert not wrong


def bound(body: list[ast.stmt]) -> set[str]:
    """What statements give a name: definitions, imports, values, under conditions too."""
    names: set[str] = set()
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(statement.name)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in statement.names}
            case ast.Assign() | ast.AnnAssign():
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            case ast.If() | ast.Try():
                names |= bound([*statement.body, *statement.orelse])
    return names


@cache
def members() -> dict[str, set[str]]:
    """Names of each module, package and class (by its own name): methods, fields, attributes of `self`."""
    members: dict[str, set[str]] = {}
    for path in sorted((SOURCES / "plait").rglob("*.py")):
        name = ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
        members.setdefault(name, set()).update(bound(tree(path).body))
        members.setdefault(name.rpartition(".")[0], set()).add(name.rpartition(".")[2])
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                own = members.setdefault(node.name, set())
                own |= bound(node.body)
                own |= {
                    part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
                }
    return members


@cache
def recipe_keys() -> tuple[str, ...]:
    return tuple(key for key, _, _ in describe_keys())


def is_stale(reference: str, package: str) -> bool:
    """Whether its first word is one of our packages, modules or classes, as seen from a package, and the next ones are
    nothing in it; keys of a recipe, which begin with the same words, and names of files are none."""
    known = members()
    sections = {f"{key}.".startswith(f"{reference}.") or f"{reference}.".startswith(f"{key}.") for key in recipe_keys()}
    if FILE_NAME.search(reference) or any(sections):
        return False
    first, *rest = reference.removeprefix("plait.").split(".")
    seen_from = package.split(".")
    starts = [".".join([*seen_from[:depth], first]) for depth in range(len(seen_from), 0, -1)]
    starts = [start for start in [*starts, first] if start in known]
    return bool(starts) and not any(leads(start, rest) for start in starts)


def leads(start: str, rest: list[str]) -> bool:
    known = members()
    for word in rest:
        if start not in known:  # a function, a value: what is in it we cannot tell
            return True
        if word not in known[start]:
            return False
        start = f"{start}.{word}" if f"{start}.{word}" in known else word
    return True


def texts_of(path: Path) -> Iterator[str]:
    """Docstrings, and texts that stand below values and fields."""
    for node in nodes(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def test_references_lead_to_what_there_is() -> None:
    """Dotted names between backticks: `package.module`, `module.name`, `Class.member`."""
    stale: list[str] = []
    for path in sorted((SOURCES / "plait").rglob("*.py")):
        package = ".".join(path.relative_to(SOURCES).parent.parts)
        names = [name for text in texts_of(path) for name in REFERENCE.findall(text)]
        stale += [f"{path}: {name}" for name in names if is_stale(name, package)]
    for page in sorted(PAGES.glob("*.md")):
        if not page.name.startswith("coming-from"):  # other projects' keys begin with our packages' names
            names = REFERENCE.findall(page.read_text())
            stale += [f"{page}: {name}" for name in names if is_stale(name, "plait")]
    assert not stale


# -- what tests see


@cache
def private_names() -> frozenset[str]:
    """Names with an underscore that our sources define or set: functions, classes, constants, attributes."""
    names: set[str] = set()
    for path in modules().values():
        for node in nodes(path):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
    private = (name for name in names if name.startswith("_") and not name.endswith("__"))
    return frozenset(private) - {"_", "_replace"} - OF_TRL  # `_replace` is what named tuples call a public method


def private_names_in(path: Path) -> list[str]:
    """Those of them that a test's file reads of something else than itself, imports, or patches by name."""
    text = path.read_text()
    if private_names().isdisjoint(PRIVATE.findall(text)):  # most files have none of these words, and need no tree
        return []
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                names.append(name)
            case ast.ImportFrom(module=str(module), names=aliases) if module.startswith("plait"):
                names += [alias.name for alias in aliases]
            case ast.Call(func=ast.Attribute(attr="setattr" | "object"), args=[_, ast.Constant(value=str(name)), *_]):
                names.append(name)
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(dotted)), *_]):
                names.append(dotted.rpartition(".")[2])
    return [name for name in names if name in private_names()]


def test_tests_see_little_that_is_private() -> None:
    """Names of ours with an underscore that a test reads, imports or patches: what tests have to see is made public,
    or passed in. The cap only falls."""
    counts = {path: len(private) for path in sorted(TESTS.rglob("*.py")) if (private := private_names_in(path))}
    total = sum(counts.values())
    worst = sorted(counts.items(), key=lambda item: -item[1])[:5]
    assert total <= MOST_PRIVATE, f"{total}: {', '.join(f'{path.name} has {count}' for path, count in worst)}"


# -- where tests stand


def mirrored(folder: Path) -> Path:
    """What a package of tests is about: one of ours, the benchmarks, or the pages of the documentation."""
    return (SOURCES.parent if folder.parts[:1] in (("benchmarks",), ("docs",)) else SOURCES / "plait") / folder


def test_tests_stand_where_what_they_test_stands() -> None:
    """In the package of the same name, where most of them have the name of a module; the others prove something of
    several, and say what."""
    namesakes, others = [], []
    for path in sorted(TESTS.rglob("test_*.py")):
        place = path.relative_to(TESTS)
        folder, name = mirrored(place.parent), path.stem.removeprefix("test_")
        is_of_the_whole = place.parts[0] in OF_THE_WHOLE
        assert folder.is_dir() or is_of_the_whole, f"{place} stands in a package that mirrors none"
        if any((folder / f"{name}.{suffix}").exists() for suffix in ("py", "md")):
            namesakes.append(place)
            continue
        assert ast.get_docstring(tree(path)), f"{place} does not say what it proves"
        if not is_of_the_whole:
            others.append(str(place))
    share = len(namesakes) / (len(namesakes) + len(others))
    assert share >= LEAST_NAMESAKES, f"{share:.3f}: {', '.join(others)}"
