"""A rank that is not the leader: takes the leader's commands one after another and does its part of each.

While its engine has work it goes on stepping it, and takes further requests in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from plait.data.records import Sample
from plait.generation.engine import Engine
from plait.runtime.ranks.board import Board
from plait.runtime.ranks.chores import load_part, move_part, save_part, spans_as_values
from plait.runtime.ranks.commands import LEADER, Call, Do, ScoreCall, TrainCall
from plait.runtime.ranks.mail import Mail
from plait.runtime.ranks.parcels import Parcel, pack_samples, unpack_requests
from plait.runtime.ranks.parts import WAIT_S, Parts
from plait.runtime.recorder import Recorder

REPORT_S = 0.25
"""Between two reports of a call in which the leader has no part."""


class Server:
    """Serves until the leader ends it."""

    def __init__(self, parts: Parts, mail: Mail, board: Board) -> None:
        self._parts = parts
        self._mail = mail
        self._board = board
        self._recorder = Recorder.on_shared_clock(parts.rank)
        parts.residence.recorder = self._recorder
        self._next: Parcel | None = None
        self._asked: dict[int, Parcel] = {}
        """Prompt whose samples are being generated → the command that asked for them."""

    def serve(self) -> None:
        """Raises what an action raises; the run is over then."""
        while True:
            command, self._next = self._next, None
            if command is None:
                _, command = self._mail.receive([LEADER], "the next command", WAIT_S)
            self._recorder.step = command.header["at"]
            match Do(command.header["do"]):
                case Do.END:
                    return
                case Do.SCORE:
                    self._call(ScoreCall.of(command), command)
                case Do.TRAIN:
                    self._call(TrainCall.of(command, self._parts.flow), command)
                case Do.GENERATE:
                    self._generate(command)
                case other:
                    self._little(other, command)

    def _little(self, do: Do, command: Parcel) -> None:
        """A command without a call of the flow behind it."""
        header, parts, recorder = command.header, self._parts, self._recorder
        match do:
            case Do.MOVE:
                with self._board.doing(f"{header['role']}.weights (move)"):
                    move_part(parts, header["role"], header["numbers"], recorder)
            case Do.VERSION:
                self._engine(header["role"]).update_weights(header["version"])
            case Do.FORGET:
                pass  # all requests have been served meanwhile
            case Do.GATHER:
                with self._board.doing(f"{header['role']}.weights (gather)"):
                    parts.gather(header["role"])
            case Do.SAVE:
                with self._board.doing("save"):
                    counts = save_part(parts, Path(header["folder"]), recorder)
                    self._answer(command, Parcel({"counts": counts}), "what was saved")
            case Do.LOAD:
                torch.set_num_threads(header["threads"])
                with self._board.doing("load"):
                    load_part(parts, Path(header["folder"]), header["counts"], recorder)
            case Do.SPANS:
                parts.residence.want()
                spans = spans_as_values(recorder.take().spans, header["zero"])
                self._answer(command, Parcel({"spans": spans}), "a timeline")
            case _:
                raise AssertionError(f"a command `{do}` that nobody serves")

    def _answer(self, command: Parcel, answer: Parcel, what: str) -> None:
        header = {**answer.header, "answers": command.header["number"]}
        self._mail.send(LEADER, Parcel(header, answer.arrays), what)

    def _call(self, call: Call, command: Parcel) -> None:
        """Run a call to its end; the first rank of a layout that the leader is not in reports to it."""
        ranks = call.layout(self._parts).mesh.ranks
        reports = LEADER not in ranks and ranks[0] == self._parts.rank
        self._parts.residence.want(call.need)
        work = call.run(self._parts)
        count, reported_s = 0, self._recorder.now_s
        with self._board.doing(call.call):
            while True:
                with self._recorder.span(call.call, "CALL", call.role) as mark:
                    try:
                        done = next(work)
                    except StopIteration as end:
                        mark.keep = False
                        result = end.value
                        break
                    mark.is_of(done)
                self._board.tick()
                count += 1
                if reports and self._recorder.now_s - reported_s > REPORT_S:
                    self._answer(command, Parcel({"count": count}), "a report")
                    count, reported_s = 0, self._recorder.now_s
            if reports:
                self._answer(command, call.answer(result), "a result")

    def _generate(self, command: Parcel) -> None:
        role = command.header["role"]
        engine, name = self._engine(role), f"{role}.generate"
        team = self._parts.roles[role].instance
        delivers = team is not None and team.is_leader and LEADER not in team.all.ranks
        self._parts.residence.want((role, "decode"))
        self._asked.clear()
        self._take(command, engine)
        with self._board.doing(name):
            while engine.has_work:
                with self._recorder.generating(name, role, engine):
                    finished = engine.step()
                self._board.tick()
                if delivers:
                    self._deliver(finished)
                if self._next is None and (found := self._mail.poll([LEADER])) is not None:
                    self._meanwhile(found[1], engine, role)
                if self._next is not None and self._next.header["do"] == Do.END:
                    return

    def _deliver(self, samples: Sequence[Sample]) -> None:
        """To the commands that asked for them: requests may have come while the last samples of others were sent."""
        asked = {sample.uid: self._asked[sample.prompt.uid] for sample in samples}
        for command in {one.header["number"]: one for one in asked.values()}.values():
            mine = [sample for sample in samples if asked[sample.uid] is command]
            self._answer(command, pack_samples(mine), "samples")

    def _meanwhile(self, command: Parcel, engine: Engine, role: str) -> None:
        """Requests for the engine at work are taken, or forgotten, at once; another command waits for its end."""
        header = command.header
        mine = header.get("role") == role and self._alone(role)
        if mine and header["do"] == Do.GENERATE:
            self._take(command, engine)
        elif mine and header["do"] == Do.FORGET:
            for uid in self._asked:
                engine.abort(uid)
        else:
            self._next = command

    def _take(self, command: Parcel, engine: Engine) -> None:
        for request in unpack_requests(command.header["requests"]):
            engine.add(request)
            self._asked[request.prompt.uid] = command

    def _alone(self, role: str) -> bool:
        """Ranks that generate together must begin with a request at the same step."""
        team = self._parts.roles[role].instance
        return team is not None and team.all.size == 1

    def _engine(self, role: str) -> Engine:
        engine = self._parts.roles[role].engine
        assert engine is not None, f"role {role} has no engine on rank {self._parts.rank}"
        return engine
