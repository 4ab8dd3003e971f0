"""Functions compiled by numba, and kept on disk until any file that they are made of changes.

numba keeps a compiled function until the function's own file changes, though the code of all that it calls is in it.
Here it is taken from disk only if neither its file has changed nor any file of the same package that this one imports,
directly or not: their contents make up the *stamp* that lies beside it. What was compiled under another stamp is
overwritten, so old code does not pile up.

Compiled code lies in `NUMBA_CACHE_DIR`, in `__pycache__` beside the file, or in the user's cache folder, whichever can
be written. Where none can, every process compiles anew. In a folder that is given, each stamp has a folder of its own:
installations of the same text share what is compiled, and what is no longer used stays until somebody removes it.

A function with `fastmath` that another one calls needs `forceinline=True`. Else it is compiled as a function of its own
in the process that compiles its caller, as a part of the caller in those that find this compiled, and the two round
differently.
"""

# numba may be missing, and types little of what is used here.
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from __future__ import annotations

import ast
import functools
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

try:
    from numba import config
    from numba import njit as _compile
    from numba.core import caching, event

    AVAILABLE = not config.DISABLE_JIT
    """Whether functions are compiled."""
except ImportError:
    AVAILABLE = False


AGAIN_S = 90.0
"""Compiling that has taken so long is told once more."""
LOCK_S = 10.0
"""How long a process waits to write what it has compiled: writing takes milliseconds."""


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with a cache on disk; without numba the function stays plain Python."""
    if not AVAILABLE:
        return lambda function: function

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = _compile(**options)(function)
        dispatcher._cache = _OpenedLate(function)
        return dispatcher

    return compiled


def stamp(file: str) -> bytes:
    """A digest of a file of a package and of all files of this package that it imports, directly or not."""
    root = _root_of(Path(file).resolve())
    named = sorted((path.relative_to(root.parent).as_posix(), digest) for path, digest in _files(file).items())
    return hashlib.sha256(repr(named).encode()).digest()


def changed_since(file: str, imported_ns: int) -> bool:
    """Whether one of the files of `stamp` is newer than a time of importing: the code that runs is not what they say.
    A file from the future says nothing but that clocks differ."""
    now = time.time_ns()
    return any(imported_ns < path.stat().st_mtime_ns <= now for path in _files(file))


def _files(file: str) -> dict[Path, str]:
    """A file and all of its package that it imports, directly or not, each with its digest."""
    digests: dict[Path, str] = {}
    waiting = [Path(file).resolve()]
    while waiting:
        path = waiting.pop()
        if path not in digests:
            status = path.stat()
            digests[path], imported = _read(path, status.st_mtime_ns, status.st_size)
            waiting += imported
    return digests


@functools.cache
def _read(path: Path, mtime_ns: int, size: int) -> tuple[str, tuple[Path, ...]]:
    """Digest of a file in this state, and the files of its package that it imports."""
    source = path.read_bytes()
    return hashlib.sha256(source).hexdigest(), tuple(_imported(ast.parse(source), _root_of(path)))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All of a body, those inside others too. (`ast.walk` goes through expressions as well, ten times as long.)"""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, field, []))


def _imported(module: ast.Module, root: Path) -> Iterator[Path]:
    names: list[str] = []
    for node in _statements(module.body):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    for name in names:
        first, *rest = name.split(".")
        path = root.joinpath(*rest).with_suffix(".py")
        if first == root.name and rest and path.is_file():
            yield path


@functools.cache
def _root_of(path: Path) -> Path:
    """The folder of the outermost package that a file is in; of a file in no package, its own folder."""
    folder = path.parent
    while (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder


class Announcement:
    """Says that compiling begins, which takes long enough to wonder; and on a busy machine that it still goes on, after
    AGAIN_S of it, and each time that it has taken twice as long as was said.

    Args:
        tell: is told it, where nobody looks at what this process prints; None: it is printed.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self.tell = tell
        self._made = False
        self._open, self._since_s, self._taken_s, self._next_s = 0, 0.0, 0.0, AGAIN_S

    def begins(self, *, kept: bool) -> None:
        """A function is compiled from now on, perhaps within another one.

        Args:
            kept: whether what is compiled is kept for other processes.
        """
        self._passed()
        self._open += 1
        if self._made:
            return
        self._made = True
        until = "kept for later runs" if kept else "in every process, for no folder to keep them can be written"
        remedy = "" if kept else "; set NUMBA_CACHE_DIR to one that can"
        self._say(f"compiling kernels for this CPU, a minute or two in all ({until}{remedy})")

    @property
    def taken_s(self) -> float:
        """Seconds that were compiled for, up to now."""
        return self._taken_s + (time.monotonic() - self._since_s if self._open else 0.0)

    def ends(self) -> None:
        """It is compiled."""
        self._passed()
        self._open -= 1

    def _passed(self) -> None:
        """Count the time since the last of these calls, if something was being compiled in it."""
        now_s = time.monotonic()
        if self._open:
            self._taken_s += now_s - self._since_s
        self._since_s = now_s
        if self._taken_s >= self._next_s:
            self._next_s = 2 * self._taken_s
            self._say(f"still compiling kernels for this CPU, {self._taken_s / 60:.0f} min so far")

    def _say(self, text: str) -> None:
        if self.tell is None:
            print(f"plait: {text}", file=sys.stderr, flush=True)
        else:
            self.tell(text)


ANNOUNCEMENT = Announcement()
"""That of this process."""

_not_waited_for: set[Path] = set()
"""Folders that somebody did not let go of."""


@contextmanager
def lock_of(folder: Path) -> Iterator[bool]:
    """Whether nobody else writes compiled code to the folder meanwhile; False: somebody does who has not ended within
    LOCK_S, which is said once and not waited for again, and what was compiled is not kept."""
    from plait.file_lock import StillHeld, alone_at  # most processes compile nothing

    with ExitStack() as stack:
        is_alone = True
        try:
            stack.enter_context(alone_at(folder / "kept.lock", 0 if folder in _not_waited_for else LOCK_S))
        except StillHeld as error:
            is_alone = False
            if folder not in _not_waited_for:
                _not_waited_for.add(folder)
                print(f"plait: compiled kernels are not kept for later runs: {error}", file=sys.stderr, flush=True)
        except OSError:  # whoever saves there is told
            pass
        yield is_alone


if AVAILABLE:

    class _Stamped:
        """A locator whose cache is fresh as long as all files that the function is made of are."""

        _py_file: str

        def get_source_stamp(self) -> bytes:
            return stamp(self._py_file)

        def get_disambiguator(self) -> str:
            """numba has the line here, so that a function that moves leaves its old code behind. Names are enough."""
            return "kept"

    class _Given(_Stamped, caching.UserProvidedCacheLocator):
        def get_cache_path(self) -> str:
            """numba names the folder after the place of the file, so that each installation would compile anew."""
            return str(Path(config.CACHE_DIR) / f"{Path(self._py_file).stem}-{self.get_source_stamp().hex()[:32]}")

    class _Beside(_Stamped, caching.InTreeCacheLocator):
        pass

    class _OfUser(_Stamped, caching.UserWideCacheLocator):
        pass

    class _Kept(caching.CompileResultCacheImpl):
        _locator_classes: ClassVar = [_Given, _Beside, _OfUser]

    class _Cache(caching.FunctionCache):
        _impl_class = _Kept

        def save_overload(self, sig: Any, data: Any) -> None:
            """numba reads the index, adds to it and writes it: two processes at once would give one number to two."""
            with lock_of(Path(self.cache_path)) as is_alone:
                if is_alone:
                    super().save_overload(sig, data)

    class _NoCache(caching.NullCache):
        pass

    class _OpenedLate:
        """A function's cache, opened when it is first used: stamps take half a second, and most processes that import
        kernels call few of them or none. What has been edited since it was imported is not kept: it would be taken for
        the code of the new text."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self._function = function
            self._imported_ns = time.time_ns()

        @functools.cached_property
        def _opened(self) -> Any:
            if changed_since(self._function.__code__.co_filename, self._imported_ns):
                return caching.NullCache()
            try:
                return _Cache(self._function)
            except RuntimeError:  # numba found no folder
                return _NoCache()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._opened, name)

    class _Announcing(event.Listener):
        """Tells `ANNOUNCEMENT` when numba begins to compile one of these functions, and when it has ended, also if it
        could not."""

        def on_start(self, event: Any) -> None:
            cache = _cache_of(event)
            if isinstance(cache, _Cache | _NoCache):
                ANNOUNCEMENT.begins(kept=isinstance(cache, _Cache))

        def on_end(self, event: Any) -> None:
            if isinstance(_cache_of(event), _Cache | _NoCache):
                ANNOUNCEMENT.ends()

    def _cache_of(event: Any) -> Any:
        cache = getattr(event.data["dispatcher"], "_cache", None)
        return cache._opened if isinstance(cache, _OpenedLate) else None

    event.register("numba:compile", _Announcing())
