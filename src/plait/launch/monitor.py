"""Watches the ranks of a group from a thread: carries messages, finds deaths and freezes, says who waited for whom."""

from __future__ import annotations

import selectors
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from plait.launch.bell import Bell
from plait.launch.failures import Ended, Failure, PeerState, as_said
from plait.launch.keys import Keys
from plait.launch.watch import Watch, stalled_of
from plait.launch.watched_rank import Held, Pending, Rank
from plait.launch.wire import Ask, Beat, Forged, Raised, Remark, Reply, Seen, StoreAnswer

_TICK_S = 0.1
"""Between two looks at clocks and processes; what comes by a connection is seen at once."""
_ASKED_PER_STALL = 10
"""How often ranks that stand still are asked for whom they wait, in the time after which they count as stalled."""
SETTLE_S = 0.15
"""An exception is held back so long: if a peer's death was its cause, that is the error."""
NODES_SETTLE_S = 2.0
"""The same where ranks are on several machines, whose loss is seen later, unless all others are known to have outlived
the exception; longer where one is silent."""
_DUMPS_S = 1.0
"""For stacks of ranks that do not say where they are, all together."""
LOOK_S = 0.5
"""For the others to say where they are, when a rank has failed."""


class Monitor:
    """One thread for all ranks. `changed` guards all that is shared and is notified of every change.

    Args:
        ranks: of the group.
        deliver: called with (rank, pending action, its reply), `changed` held.
        watch: when one counts as lost, and who hears what it tells.
    """

    def __init__(self, ranks: list[Rank], deliver: Callable[[int, Pending, Reply], None], watch: Watch) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.failure: Failure | None = None
        """What became of the whole group: a rank that died or froze. All processes are gone when it is set."""
        self.closing = False
        self._ranks = ranks
        self._deliver = deliver
        self._watch = watch
        self._stillness = watch.stillness(len(ranks))
        self._keys = Keys()
        self._asked: set[int] = set()
        """Ranks that have been asked for whom they wait since they stand still."""
        self._asked_s = 0.0
        self._did: Sequence[str] = ()
        self._held: list[Held] = []
        self._failing: tuple[Rank, Failure, float] | None = None
        self._ended = False
        self._bell = Bell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for rank in ranks:
            self._selector.register(rank.channel.link, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="plait-launch", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have the thread send what could not be sent at once."""
        self._bell.ring()

    def kill_all(self) -> None:
        """Kill every process and wait until it is gone."""
        with self.changed:
            for rank in self._ranks:
                rank.dead = True
                rank.process.signal_group()  # all at once, so that none sees another's end for long
            for rank in self._ranks:
                rank.process.kill()

    def end(self) -> None:
        """End the thread. The processes are gone."""
        with self.changed:
            self._ended = True
            self.changed.notify_all()
        self.wake()
        self._thread.join(timeout=30.0)
        assert not self._thread.is_alive(), "the monitor of a closed group goes on"
        self._bell.close()

    def look_at_peers(self, of: int) -> tuple[PeerState, ...]:
        """What the other ranks are doing now; waits for their answers, not long. `changed` is held."""
        others = [rank for rank in self._ranks if rank.rank != of]
        self.ask(others)
        end = time.monotonic() + LOOK_S
        while not all(rank.answered for rank in others) and (left_s := end - time.monotonic()) > 0:
            self.changed.wait(left_s)
        return self._states(others)

    def _states(self, ranks: list[Rank]) -> tuple[PeerState, ...]:
        raised = {held.rank.rank: held.state for held in self._held}
        end = time.monotonic() + _DUMPS_S
        return tuple(raised.get(rank.rank) or rank.state(dump=time.monotonic() < end) for rank in ranks)

    def ask(self, ranks: list[Rank]) -> None:
        """Ask ranks where they are."""
        for rank in ranks:
            if not rank.dead and not rank.ask():
                self.wake()

    # -- the thread

    def _run(self) -> None:
        try:
            self._look_on()
        except BaseException as error:
            # A defect of ours: whoever waits must not wait for a thread that is gone.
            with self.changed:
                self.kill_all()
                cause = f"was given up: the launcher failed: {error!r}"
                self.failure = Failure(Ended.DIED, 0, "", 0.0, cause, traceback.format_exc())
                self.changed.notify_all()

    def _look_on(self) -> None:
        looked = time.monotonic()
        while True:
            events = self._selector.select(_TICK_S)
            with self.changed:
                if self._ended:
                    break
                for key, _ in events:
                    if key.data is None:
                        self._bell.hush()
                    elif not key.data.dead:
                        self._receive(key.data)
                for rank in self._ranks:
                    self._flush(rank)
                if (now := time.monotonic()) - looked >= _TICK_S:
                    # When this thread itself was held up, or the machine was, silence is not the workers'.
                    self._look_after(min(now - looked, 2 * _TICK_S))
                    looked = now
                if self.failure is not None:
                    break
        self._selector.close()

    def _flush(self, rank: Rank) -> None:
        if rank.dead:
            return
        events = selectors.EVENT_READ if rank.channel.flush() else selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._selector.get_key(rank.channel.link).events != events:
            self._selector.modify(rank.channel.link, events, rank)

    def _receive(self, rank: Rank) -> None:
        before = rank.channel.bytes_received
        forged = ""
        try:
            messages = rank.channel.receive()
        except Forged as error:
            messages, forged = [], str(error)
        if rank.channel.bytes_received > before:
            rank.heard = rank.ever_heard = True
        for message in messages:
            match message:
                case Beat():
                    pass
                case Remark(text):
                    self._watch.heard(rank.rank, text)
                case Seen():
                    if message.number == rank.look:
                        rank.seen = message
                        self.changed.notify_all()
                case Reply():
                    self._replied(rank, message)
                case Ask():
                    for asker, number, answer in self._keys.ask(rank.rank, message.number, message.question):
                        self._ranks[asker].channel.put(StoreAnswer(number, answer))
                case _:
                    raise AssertionError(f"the controller was sent {message}")
        if forged:
            self._died(rank, f"has a connection on which {forged}")
        elif rank.channel.ended:
            self._died(rank)

    def _replied(self, rank: Rank, reply: Reply) -> None:
        pending = rank.pending.popleft()
        assert pending.number == reply.number, f"reply {reply.number} to action {pending.number}"
        if rank.pending:
            rank.pending[0].since = time.monotonic()
        if isinstance(reply.value, Raised) and len(self._ranks) > 1:
            self._held.append(Held(time.monotonic(), rank, pending, reply))
            if rank.node:  # who answers what it is asked now did not die before
                self.ask([other for other in self._ranks if other is not rank])
            return
        self._deliver(rank.rank, pending, reply)
        self.changed.notify_all()

    def _look_after(self, elapsed: float) -> None:
        now = time.monotonic()
        doubtful = any(rank.process.doubtful for rank in self._ranks if not rank.dead)
        if self._failing is None and not doubtful:  # else a failure has the first word
            while self._held and self._is_settled(self._held[0], now):
                held = self._held.pop(0)
                self._deliver(held.rank.rank, held.pending, held.reply)
                self.changed.notify_all()
        for rank in self._ranks:
            if rank.dead:
                continue
            rank.silence_s = 0.0 if rank.heard else rank.silence_s + elapsed
            rank.heard = False
            if rank.process.exited:
                self._receive(rank)
                if not rank.dead:
                    self._died(rank)
            elif rank.ever_heard and rank.silence_s > self._watch.freeze_after_s:
                self._froze(rank)
        self._look_for_stalls(elapsed, now)
        if self._failing is not None:
            rank, failure, due = self._failing
            if now >= due or all(other.answered for other in self._ranks if other is not rank):
                self._fail(rank, failure)

    def _is_settled(self, held: Held, now: float) -> bool:
        """Whether no death can have been the cause of an exception, as far as that can be known."""
        others = [rank for rank in self._ranks if rank is not held.rank]
        outlived = not held.rank.node or all(rank.seen is not None for rank in others)
        return now - held.since >= (SETTLE_S if outlived else NODES_SETTLE_S)

    def _look_for_stalls(self, elapsed: float, now: float) -> None:
        still = self._stillness
        if still is None or self.closing or self._failing is not None:
            return
        still.look(elapsed)
        suspects = [rank for rank in still.suspects if self._ranks[rank].pending and not self._ranks[rank].dead]
        if now - self._asked_s > max(4 * LOOK_S, still.limit_s / _ASKED_PER_STALL):
            self._asked, self._asked_s = set(), now
        new = set(suspects) - self._asked  # what they said before they stood still is nothing
        self._asked = set(suspects)
        self.ask([self._ranks[rank] for rank in sorted(new)])
        waits = {rank: seen.waits_for for rank in suspects if (seen := self._ranks[rank].seen) is not None}
        if len(waits) == len(suspects):
            blamed = stalled_of(suspects, waits, excuses_silent=still.excuses_silent)
            if blamed is not None:
                self._stalled(self._ranks[blamed], still.seconds[blamed])

    def _stalled(self, rank: Rank, seconds: float) -> None:
        seen = rank.seen or Seen(0, "", "")
        cause = f"stalled: no progress for {seconds:.1f} s"
        self._begin_failure(rank, Ended.STALLED, cause, seen.stack, seen.waits_for)

    def _died(self, rank: Rank, cause: str = "") -> None:
        rank.dead = True
        self._selector.unregister(rank.channel.link)
        if not self.closing:
            observed, stack = rank.process.cause_of_death()
            self._begin_failure(rank, Ended.DIED, cause or observed, stack)

    def _froze(self, rank: Rank) -> None:
        if not self.closing:
            state = rank.process.state()
            cause = f"froze: no heartbeat for {rank.silence_s:.1f} s" + (f" ({state})" if state else "")
            self._begin_failure(rank, Ended.FROZEN, cause, "")

    def _begin_failure(self, rank: Rank, ended: Ended, cause: str, stack: str, waits_for: str = "") -> None:
        if self._failing is not None:  # the first is the root
            return
        method, seconds = rank.under_way
        self._did = self._watch.doing()
        failure = Failure(ended, rank.rank, method, seconds, cause, stack, waits_for, node=rank.node)
        self._failing = (rank, as_said(self._did, failure), time.monotonic() + LOOK_S)
        self.ask([other for other in self._ranks if other is not rank])

    def _fail(self, rank: Rank, failure: Failure) -> None:
        """Kill everything and make the failure known."""
        process = rank.process
        stack = failure.traceback
        if failure.ended is Ended.FROZEN:
            stack = process.dump_stack(stopped=True)
        peers = self._states([other for other in self._ranks if other is not rank])
        peers = tuple(as_said(self._did, peer) for peer in peers)
        output, file = process.output()
        self.kill_all()
        self.failure = replace(failure, traceback=stack, peers=peers, output=output, output_file=file)
        self.changed.notify_all()
