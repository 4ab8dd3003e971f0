"""Examples in Python print what their pages say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["layouts", "predictions"])
def test_the_example(page: str) -> None:
    path = DOCS / f"{page}.md"
    (found,) = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    code, text = found
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, str(path), "exec"), {})
    assert out.getvalue() == text
