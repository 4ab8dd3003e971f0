"""The example of docs/layouts.md prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_the_example() -> None:
    (found,) = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    code, text = found
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, str(PAGE), "exec"), {})
    assert out.getvalue() == text
