"""Where samples stood that went on with new weights: kept in the run's folder, so that a run that is resumed has each
of them stand there again when these weights come.

What a sample says is then a function of the seed and of this record, however fast each side of the run was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from plait.errors import RunError
from plait.file_writes import writing
from plait.observe.run_log import cut_torn_line, damaged, read_rows
from plait.schedule.update_rule import HeldKV, UpdateRule

Standing = Mapping[int, Mapping[int, int]]
"""Prompt uid → index of each sample of it that has not ended → tokens of its response, replies included."""


class Round(NamedTuple):
    """A batch drew again (`Resample`)."""

    batch: int
    """Its step, from 0."""
    uid: int
    """That of the first of the prompts."""
    num_prompts: int | None
    """None, in older records: as many as the batch began with."""


@dataclass(frozen=True)
class Moment:
    """New weights came."""

    kv: HeldKV
    """What became of keys and values of the samples that had said something with the weights before."""
    standing: Standing
    rounds: tuple[Round, ...] = ()
    """Those that began since the weights before had come, by uid."""

    def is_as(self, other: Moment) -> bool:
        """Whether the same was drawn until both."""
        return (self.standing, self.rounds) == (other.standing, other.rounds)


class Moments:
    """Those of a run, one for each policy version that came.

    A row of JSON each; the last row of a version counts, and where something else was drawn until then than by an
    earlier one, rows of later versions before it do not.

    Args:
        path: of the file. What is there was so in an earlier stay of the run, and is repeated.
        kv: what becomes of keys and values, unless a checkpoint is written or read.
        tell: is told if samples do not stand there again, as what the user's functions say may differ; None: no sample
            depends on it.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, path: Path, kv: HeldKV, tell: Callable[[str], None] | None = None) -> None:
        self._path, self._tell = path, tell
        self._kv: HeldKV = kv
        self._moments: dict[int, Moment] = {}
        if path.is_file():
            cut_torn_line(path)
        rows = read_rows(path) if path.is_file() else ()
        try:
            for row in rows:
                rounds = tuple(_round(*begun) for begun in row.get("rounds", ()))
                self._put(row["version"], Moment(row["kv"], _standing(row["open"]), rounds))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path, f"expected `version`, `kv` and `open` in every row ({error!r})") from None

    @classmethod
    def opened(
        cls, path: Path, rule: UpdateRule, version: int, tell: Callable[[str], None] | None = None
    ) -> Moments | None:
        """Those of a run that goes on with weights of this version; None: its samples never go on with new weights.

        Raises:
            DataError: see above.
            RunError: the file cannot be written.
        """
        if rule.kv is None:
            return None
        moments = cls(path, rule.kv, tell)
        moments.recompute(version)
        return moments

    def at(self, version: int) -> Moment | None:
        """When the weights of this version came; None: they have not, in no stay of the run."""
        return self._moments.get(version)

    def keep(self, version: int, standing: Standing, rounds: tuple[Round, ...] = ()) -> None:
        """The weights of this version come, samples stand so, and these rounds have begun since those before.

        If it was otherwise in an earlier stay of the run, and what functions say may differ, the record is a new one
        from here on, and keys and values are computed again: those of a prompt may lie parked in several instances.

        Raises:
            RunError: it was otherwise, and no sample depends on functions; or the file cannot be written.
        """
        before, now = self._moments.get(version), Moment(self._kv, standing, rounds)
        if before is None:
            self._write(version, now)
        elif not before.is_as(now):
            where = (
                f"after step {version} unfinished samples are not where {self._path} says they were before the run was "
                "resumed"
            )
            if self._tell is None:
                raise RunError(
                    f"{where}: its recipe, its data or the machine's arithmetic has changed. Put them back; or remove "
                    "the file, and the run goes on from its checkpoint with a new record"
                )
            said = "`turns.reply`, a tool or a reward function may have said something else"
            self._tell(f"warning: {where}; {said}. It goes on with a new record")
            self._write(version, replace(now, kv="recompute"))

    def recompute(self, version: int) -> None:
        """A checkpoint is written, or read, which holds no keys and values: with the weights of this version all are
        computed again.

        Raises:
            RunError: the file cannot be written.
        """
        moment = self._moments.get(version)
        if moment is not None and moment.kv != "recompute":
            self._write(version, replace(moment, kv="recompute"))

    def _put(self, version: int, moment: Moment) -> None:
        before = self._moments.get(version)
        if before is not None and not before.is_as(moment):
            self._moments = {earlier: of_it for earlier, of_it in self._moments.items() if earlier < version}
        self._moments[version] = moment

    def _write(self, version: int, moment: Moment) -> None:
        self._put(version, moment)
        stood = [
            [uid, [list(item) for item in tokens_of_samples.items()]]
            for uid, tokens_of_samples in moment.standing.items()
        ]
        row: dict[str, Any] = {"version": version, "kv": moment.kv, "open": stood}
        if moment.rounds:
            row["rounds"] = [list(begun) for begun in moment.rounds]
        with writing(self._path), open(self._path, "a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _standing(rows: list[Any]) -> dict[int, dict[int, int]]:
    return {uid: dict(samples) for uid, samples in rows}


def _round(batch: int, uid: int, count: int | None = None) -> Round:
    return Round(batch, uid, count)
