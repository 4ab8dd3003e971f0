"""Find a user's function by `FILE.py:NAME`, `package.module:NAME` or `package.module.NAME`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import symtable
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from plait.errors import ConfigError
from plait.user_code import IMPORT_LIMIT_S, UserCode, importing

_sources: dict[str, bytes] = {}
"""What files of the user's held when they were imported, by the names of their modules."""
_MOST_FUNCTIONS = 6
"""Most functions of a file that are named where the one is not there that was asked for."""
_MAKES_NAMES = re.compile(
    r"import\s*\(?\s*\*|\b(global|globals|locals|vars|exec|setattr|__dict__|__getattr__|modules)\b"
)
"""Where this stands in a file, it may have names that only who runs it sees."""


def split_path(path: str, *, key: str) -> tuple[str, str]:
    """(file or module, name) of a function's path; a file must exist, a module is not imported.

    Raises:
        ConfigError: the path has neither form, or the file does not exist.
    """
    module, separator, name = path.rpartition(":")
    if not separator:
        module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in name.split(".")) or path.endswith(".py"):
        service = "; a service is asked by a function of yours" if "://" in path else ""
        raise ConfigError(
            f"`{key}`: expected FILE.py:FUNCTION, package.module:function or package.module.function, found `{path}`"
            f"{service}"
        )
    if module.endswith(".py") or "/" in module:
        if not os.path.isfile(module):
            from plait.data.files import why_no_file

            place = "" if Path(module).is_absolute() else f" in {Path.cwd()}, where the command runs"
            raise ConfigError(f"`{key}`: the file `{module}` {why_no_file(Path(module))}{place}")
    elif not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"`{key}`: `{module}` is neither a Python file nor a module name")
    return module, name


def check_defined(path: str, *, key: str) -> None:
    """See that a function of the user's is there, as far as its file tells without being run.

    Raises:
        ConfigError: as of `split_path`; or nothing in the file makes that name.
    """
    module_name, name = split_path(path, key=key)
    if not module_name.endswith(".py"):
        return
    try:
        source = Path(module_name).read_text(encoding="utf-8-sig")
        made = symtable.symtable(source, module_name, "exec").get_symbols()
    except (SyntaxError, ValueError, OSError):
        return  # whoever runs it is told
    names = {symbol.get_name() for symbol in made if symbol.is_assigned() or symbol.is_imported()}
    first = name.partition(".")[0]
    if first not in names and _MAKES_NAMES.search(source) is None:
        functions = [s.get_name() for s in made if s.is_namespace() and s.get_name()[:1] != "_"]
        raise _has_no(first, module_name, key, names, functions)


def load_function(path: str, *, key: str = "reward.functions") -> Any:
    """Import the module or file and return the callable of that name.

    Raises:
        ConfigError: not found (the nearest name is given) or not callable; or the import itself failed, whatever it
            raised, or took more than `IMPORT_LIMIT_S`.
    """
    module_name, name = split_path(path, key=key)
    users = module_name.split(".")[0] != "plait"
    with UserCode(f"`{key}`: `{path}` cannot be loaded", ConfigError, users=users, limit_s=IMPORT_LIMIT_S):
        return _loaded(module_name, name, path, key)


def _loaded(module_name: str, name: str, path: str, key: str) -> Any:
    if module_name.endswith(".py"):
        module = load_file(Path(module_name))
    else:
        try:
            with importing(module_name):
                module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise
            file = Path(*module_name.split(".")).with_suffix(".py")
            meant = f"; for the file `{file}` give `{file}:{name}`" if file.is_file() else ""
            raise ConfigError(f"`{key}`: there is no module `{error.name}` for `{path}`{meant}") from None
    value: Any = module
    needs_object = False
    for part in name.split("."):
        if not hasattr(value, part):
            raise _has_no(part, module_name, key, dir(value), _functions_of(value))
        needs_object = isinstance(value, type) and inspect.isfunction(inspect.getattr_static(value, part, None))
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(f"`{key}`: `{path}` is not callable, but {type(value).__name__}")
    if needs_object or isinstance(value, type):
        kind = "a method of a class" if needs_object else "a class"
        raise ConfigError(f"`{key}`: `{path}` is {kind}; give a function, or an object that the file makes of it")
    return value


def _has_no(part: str, module_name: str, key: str, names: Iterable[str], functions: Sequence[str]) -> ConfigError:
    """That a module has no such name, with the nearest that it has, or else the first of its own functions."""
    close = difflib.get_close_matches(part, [name for name in names if not name.startswith("_")], n=1)
    listed = f"; its functions: {', '.join(functions[:_MOST_FUNCTIONS])}" if functions else ""
    hint = f"; did you mean `{close[0]}`?" if close else listed
    return ConfigError(f"`{key}`: `{module_name}` has no `{part}`{hint}")


def _functions_of(module: Any) -> list[str]:
    """Names of the functions that a module has of its own."""
    if not isinstance(module, ModuleType):
        return []
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    return [name for name, value in functions.items() if value.__module__ == module.__name__ and name[:1] != "_"]


def load_file(path: Path) -> ModuleType:
    """Import a file as a module of its own, anew where it has changed since; its folder becomes importable, as when it
    is run as a script, and the packages that the file is in, so that it may import relatively to them.

    Raises:
        ImportError: it imports relatively, and another package is found by the name of its own.
    """
    resolved = path.resolve()
    package, *places = _packages_of(resolved)
    sys.path += [place for place in dict.fromkeys([str(resolved.parent), *places]) if place not in sys.path]
    other = _other_package(package.partition(".")[0], *places) if package else None
    name = f"{package}.plait_user_{resolved.stem}" if package and other is None else f"plait_user_{resolved.stem}"
    source = resolved.read_bytes()
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(resolved) and _sources.get(name) == source:
        return loaded
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None, f"{resolved} has no loader"
    assert spec.loader is not None, f"{resolved} has no loader"
    module = importlib.util.module_from_spec(spec)
    for inner in [inner for inner in sys.modules if inner.startswith(f"{name}.")]:
        del sys.modules[inner]  # of another `__init__.py`, which had this name
    sys.modules[name] = module
    _sources[name] = source
    try:
        with importing(str(resolved)):
            # What was read, not what Python keeps compiled of the file: that may be older by less than a second.
            exec(compile(source, str(resolved), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if other is not None and isinstance(error, ImportError) and "no known parent package" in str(error):
            error.msg += f": `{package}` is not found in {places[0]}, as {other} comes first; give it another name"
        raise
    return module


def _packages_of(file: Path) -> tuple[str, ...]:
    """Dotted, the packages that a file is in, and the folder that these are found in; of a file in none "" alone."""
    names: list[str] = []
    folder = file.parent.parent if file.name == "__init__.py" else file.parent  # that one is a package itself
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    return (".".join(names), str(folder)) if names else ("",)


def _other_package(name: str, place: str) -> str | None:
    """Where Python finds a package of this name, if that is not in `place`."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that was made by hand
        spec = None
    found = (spec and spec.origin) or f"a module `{name}`"
    return None if Path(found).resolve() == Path(place, name, "__init__.py") else found
