"""Every command that the documentation shows is run, in the order of its page.

A fence ```` ```console ```` holds commands behind `$ `; `console slow` marks pages whose commands need the real model.
`make` targets are run by `.ci/run`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from plait.recipes.recipe_file import unknown_keys, with_sections
from plait.yaml_text import parse
from tests.cases import slow_but

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```console( slow)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
LONG = ("cluster", "plans", "recipes", "schedules")
"""Pages whose commands take longer than those of all others together."""
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
YAML = re.compile(r"^ *```yaml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHIPPED = [path for folder in ("examples", "recipes", "recipes/published") for path in (ROOT / folder).glob("*.yaml")]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def commands(page: Path, slow: bool) -> list[str]:
    blocks = [text for mark, text in FENCE.findall(page.read_text()) if bool(mark) == slow]
    return [line[2:] for text in blocks for line in text.splitlines() if line.startswith("$ ")]


def run_page(page: Path, slow: bool, folder: Path) -> None:
    for name in ("examples", "recipes", "benchmarks"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name)
    for command in commands(page, slow):
        program, *arguments = shlex.split(command)
        argv = {"plait": [sys.executable, "-m", "plait"], "python": [sys.executable]}[program] + arguments
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{page.name}: `{command}` ended with {done.returncode}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize(
    "page",
    slow_but([p for p in PAGES if p.stem not in LONG], [p for p in PAGES if commands(p, False)]),
    ids=lambda page: page.stem,
)
def test_commands(page: Path, tmp_path: Path) -> None:
    run_page(page, False, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if commands(p, True)], ids=lambda page: page.stem)
def test_commands_on_the_real_model(page: Path, tmp_path: Path) -> None:
    run_page(page, True, tmp_path)


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    texts = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "benchmarks" / "README.md"], ids=lambda page: f"{page.parent.name}-{page.stem}"
)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_the_recipe_in_the_docs_is_the_demo() -> None:
    assert f"```yaml\n{(ROOT / 'recipes/demo.yaml').read_text()}```" in (ROOT / "docs/recipes.md").read_text()


def unknown_in(text: str) -> list[str]:
    """What is said of keys that recipes do not have in a recipe, with its stages, or in a part of one."""
    tree = parse(textwrap.dedent(text))
    assert isinstance(tree, dict)
    stages = tree.pop("stages", {})
    return [line for one in (tree, *stages.values()) for line in unknown_keys(with_sections(one))]


@pytest.mark.parametrize("page", [p for p in PAGES if YAML.search(p.read_text())], ids=lambda page: page.stem)
def test_recipes_in_the_docs_have_keys_of_today(page: Path) -> None:
    clusters = "devices_per_node:", "price_per_device_hour:"
    texts = [text for text in YAML.findall(page.read_text()) if not any(key in text for key in clusters)]
    assert [line for text in texts for line in unknown_in(text)] == []


@pytest.mark.parametrize("path", sorted(SHIPPED), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipes_that_are_shipped_have_keys_of_today(path: Path) -> None:
    assert unknown_in(path.read_text()) == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)}
    assert {"demo", "test"} <= shown <= targets
