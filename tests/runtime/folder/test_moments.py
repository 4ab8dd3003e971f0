"""Where samples stood when new weights came: kept for a run that is resumed, which must find them there again."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import DataError, RunError
from plait.observe.run_log import read_rows
from plait.runtime.folder.moments import Moment, Moments, Round
from plait.schedule.update_rule import UpdateRule

STANDING = {7: {0: 12, 3: 0}, 9: {1: 5}}


def test_what_is_kept_is_there_in_the_next_stay(tmp_path: Path) -> None:
    path = tmp_path / "moments.jsonl"
    moments = Moments(path, "keep")
    assert moments.at(3) is None
    moments.keep(3, STANDING)
    moments.keep(4, {})
    assert read_rows(path)[0] == {"version": 3, "kv": "keep", "open": [[7, [[0, 12], [3, 0]]], [9, [[1, 5]]]]}
    again = Moments(path, "recompute")
    assert (again.at(3), again.at(4), again.at(5)) == (Moment("keep", STANDING), Moment("keep", {}), None)


def test_rounds_are_kept_beside_where_samples_stand_and_others_are_another_record(tmp_path: Path) -> None:
    path, told = tmp_path / "moments.jsonl", list[str]()
    rounds = (Round(4, 18, 2), Round(3, 21, 5))
    Moments(path, "keep").keep(3, STANDING, rounds)
    assert read_rows(path)[0]["rounds"] == [[4, 18, 2], [3, 21, 5]]
    again = Moments(path, "keep", told.append)
    assert again.at(3) == Moment("keep", STANDING, rounds)
    again.recompute(3)
    again.keep(3, STANDING, rounds)
    assert (again.at(3), told) == (Moment("recompute", STANDING, rounds), [])
    again.keep(3, STANDING, rounds[:1])
    assert Moments(path, "keep").at(3) == again.at(3) == Moment("recompute", STANDING, rounds[:1])
    assert len(told) == 1


def test_rounds_of_an_older_record_do_not_say_how_large_they_are(tmp_path: Path) -> None:
    path = tmp_path / "moments.jsonl"
    path.write_text('{"version": 3, "kv": "keep", "open": [], "rounds": [[4, 18]]}\n')
    moments = Moments(path, "keep")
    assert moments.at(3) == Moment("keep", {}, (Round(4, 18, None),))
    moments.recompute(3)
    assert Moments(path, "keep").at(3) == Moment("recompute", {}, (Round(4, 18, None),))


@pytest.mark.parametrize("row", ['{"version": 3}', '{"version": 3, "kv": "keep", "open": [7]}'])
def test_a_row_that_is_none_is_damaged(tmp_path: Path, row: str) -> None:
    (tmp_path / "moments.jsonl").write_text(row + "\n")
    with pytest.raises(DataError, match=r"moments\.jsonl is damaged: expected `version`, `kv` and `open` in every row"):
        Moments(tmp_path / "moments.jsonl", "keep")


def test_samples_that_stand_there_again_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "moments.jsonl"
    Moments(path, "keep").keep(3, STANDING)
    before = path.read_bytes()
    Moments(path, "keep").keep(3, {9: {1: 5}, 7: {3: 0, 0: 12}})
    assert path.read_bytes() == before


def test_samples_that_stand_elsewhere_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "moments.jsonl"
    Moments(path, "keep").keep(3, STANDING)
    with pytest.raises(RunError, match=rf"after step 3 unfinished samples are not where {path} says .*; or remove"):
        Moments(path, "keep").keep(3, {**STANDING, 9: {1: 6}})


def test_where_replies_may_differ_the_run_goes_on_with_a_record_of_its_own(tmp_path: Path) -> None:
    """Of the old one what came later is void, in the next stay too, and nothing that lies parked is kept."""
    path, told = tmp_path / "moments.jsonl", list[str]()
    before = Moments(path, "keep")
    for version in (2, 3, 4, 5):
        before.keep(version, STANDING)
    moments = Moments(path, "keep", told.append)
    moments.keep(2, STANDING)
    assert not told
    moments.keep(3, {9: {1: 6}})
    assert [line.startswith("warning: after step 3 unfinished samples are not where") for line in told] == [True]
    moments.recompute(2)
    for stay in (moments, Moments(path, "keep")):
        at = [stay.at(version) for version in (2, 3, 4, 5)]
        assert at == [Moment("recompute", STANDING), Moment("recompute", {9: {1: 6}}), None, None]


def test_at_a_checkpoint_keys_and_values_are_computed_again_and_the_last_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "moments.jsonl"
    moments = Moments(path, "keep")
    moments.keep(3, STANDING)
    moments.recompute(3)
    moments.recompute(3)
    moments.recompute(4)
    assert [(row["version"], row["kv"]) for row in read_rows(path)] == [(3, "keep"), (3, "recompute")], (
        "once, and none of 4"
    )
    assert moments.at(3) == Moments(path, "keep").at(3) == Moment("recompute", STANDING)


def test_a_line_that_was_not_written_whole_is_none(tmp_path: Path) -> None:
    path = tmp_path / "moments.jsonl"
    Moments(path, "keep").keep(3, STANDING)
    with path.open("a") as file:
        file.write('{"version": 4, "kv": "ke')
    moments = Moments(path, "keep")
    assert moments.at(4) is None
    moments.keep(4, {})
    assert [row["version"] for row in read_rows(path)] == [3, 4]


def test_a_run_whose_samples_wait_has_none(tmp_path: Path) -> None:
    path = tmp_path / "moments.jsonl"
    assert Moments.opened(path, UpdateRule(), 0) is None
    assert not path.exists()
    Moments(path, "keep").keep(3, STANDING)
    opened = Moments.opened(path, UpdateRule("keep"), 3)
    assert opened is not None
    assert opened.at(3) == Moment("recompute", STANDING), "a checkpoint holds no keys and values"
