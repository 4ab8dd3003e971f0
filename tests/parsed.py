"""Sources as trees, each parsed once by all tests that look at them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a tree. To walk through one takes longer than to parse it, and many tests look at all of every tree."""
    return tuple(ast.walk(tree(path)))
