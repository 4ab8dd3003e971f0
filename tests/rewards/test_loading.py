"""A function is found by its file or its module, with what it imports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.rewards.loading import check_defined, load_function


@pytest.fixture(autouse=True)
def modules_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "plait_user_" in name or name.startswith("my_scores"):
            del sys.modules[name]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """my_scores.inner, whose modules import each other relatively."""
    inner = tmp_path / "my_scores" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").write_text("")
    (inner.parent / "words.py").write_text("def count(text): return float(len(text.split()))\n")
    (inner / "length.py").write_text(
        "from ..words import count\n"
        "def words(completions, **_): return [count(text) for text in completions]\n"
        "def late(completions, **_):\n"
        "    from .. import words\n"
        "    return [words.count(text) for text in completions]\n"
    )
    return inner


@pytest.mark.parametrize("name", ["words", "late"])
def test_a_file_in_a_package_may_import_relatively(package: Path, name: str) -> None:
    function = load_function(f"{package}/length.py:{name}")
    assert function(["one two", ""]) == [2.0, 0.0]


def test_a_file_in_a_package_that_changes_is_imported_anew(package: Path) -> None:
    load_function(f"{package}/length.py:words")
    (package / "length.py").write_text("from .. import words as ours\ndef words(completions): return ours.__name__\n")
    assert load_function(f"{package}/length.py:words")([]) == "my_scores.words"


def test_the_file_of_a_package_itself_may_import_relatively(package: Path) -> None:
    (package / "__init__.py").write_text("from .length import words\n")
    assert load_function(f"{package}/__init__.py:words")(["one two"]) == [2.0]


def test_a_file_in_no_package_imports_what_is_beside_it_and_nothing_relatively(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("ONE = 1.0\n")
    (tmp_path / "scores.py").write_text("from beside_it import ONE\ndef one(completions): return [ONE]\n")
    assert load_function(f"{tmp_path}/scores.py:one")([""]) == [1.0]
    (tmp_path / "scores.py").write_text("from .beside_it import ONE\ndef one(completions): return [ONE]\n")
    with pytest.raises(ConfigError, match=r"scores.py:1: ImportError: attempted relative import with no known parent"):
        load_function(f"{tmp_path}/scores.py:one")
    del sys.modules["beside_it"]


def test_a_package_of_the_same_name_elsewhere_is_not_taken_for_it(package: Path, tmp_path: Path) -> None:
    """The second file would have been run with what the first imports."""
    load_function(f"{package}/length.py:words")
    other = tmp_path / "other" / "my_scores"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    (other / "words.py").write_text("def count(text): return -1.0\n")
    (other / "length.py").write_text("from .words import count\ndef words(completions): return [count(completions)]\n")
    with pytest.raises(ConfigError, match=r"length.py:1: .*`my_scores` is not found in .*other, as .*give it another"):
        load_function(f"{other}/length.py:words")
    (other / "length.py").write_text("def words(completions): return [-1.0]\n")
    assert load_function(f"{other}/length.py:words")([]) == [-1.0]


def test_two_packages_themselves_import_each_its_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("from .said import text\n")
        (tmp_path / name / "said.py").write_text(f"def text(): return '{name}'\n")
    assert [load_function(f"{tmp_path}/{name}/__init__.py:text")() for name in ("one", "two")] == ["one", "two"]


def test_an_object_of_a_class_is_loaded_and_the_class_is_not(tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text(
        "class Scorer:\n"
        "    def __call__(self, completions, **_): return [2.0 for _ in completions]\n"
        "    def score(self, completions, **_): return [3.0 for _ in completions]\n"
        "    @staticmethod\n"
        "    def plain(completions, **_): return [4.0 for _ in completions]\n"
        "scorer = Scorer()\n"
    )
    found = [
        load_function(f"{tmp_path}/scorer.py:{name}")(["x"]) for name in ("scorer", "scorer.score", "Scorer.plain")
    ]
    assert found == [[2.0], [3.0], [4.0]]
    with pytest.raises(ConfigError, match=r"scorer\.py:Scorer` is a class; give a function, or an object that"):
        load_function(f"{tmp_path}/scorer.py:Scorer")
    with pytest.raises(ConfigError, match=r"Scorer\.score` is a method of a class; give a function, or an object"):
        load_function(f"{tmp_path}/scorer.py:Scorer.score")


def test_a_module_that_is_a_file_here_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command `plait` does not import from the working folder, as TRL's scripts do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_lib").mkdir()
    (tmp_path / "my_lib" / "scores_of_mine.py").write_text("def right(completions): return [1.0]\n")
    said = r"no module `my_lib` for .*; for the file `my_lib/scores_of_mine\.py` give `my_lib/scores_of_mine\.py:right`"
    with pytest.raises(ConfigError, match=said):
        load_function("my_lib.scores_of_mine.right")
    with pytest.raises(ConfigError, match=r"no module `my_lib` for `my_lib\.scores_of_hers\.right`$"):
        load_function("my_lib.scores_of_hers.right")


@pytest.mark.parametrize(
    "text",
    [
        "def f(completions): return 0.0",
        "if True:\n    from math import floor as f",
        "try:\n    import fast as f\nexcept ImportError:\n    f = None",
        "for f in (len, max):\n    pass",
        "class f:\n    @staticmethod\n    def g(completions): return 0.0",
        "from math import *",
        "globals()['f'] = len",
        "def make():\n    global f\n    f = len\nmake()",
        "def __getattr__(name): return len",
        "def f(:",
        "\0",
    ],
)
def test_a_file_that_may_have_a_name_is_left_to_who_runs_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    check_defined(f"{tmp_path}/mine.py:f", key="reward.functions")


def test_a_name_that_nothing_in_a_file_makes_is_told_in_the_words_of_who_runs_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("FEW = 1\ndef scored(completions):\n    inner = 0\n    return inner\n")
    for name, said in (("scores", "did you mean `scored`"), ("inner", "its functions: scored"), ("f.g", "has no `f`")):
        refused = []
        for seen in (check_defined, load_function):
            with pytest.raises(ConfigError, match=said) as error:
                seen(f"{tmp_path}/mine.py:{name}", key="reward.functions")
            refused.append(str(error.value))
        assert refused[0] == refused[1]
    check_defined("some.module:f", key="reward.functions")  # which may be made when it is imported
