"""The worker's side: the main thread runs actions, a second one receives and beats.

Imports the standard library and its siblings only, so that heartbeats begin before torch is imported.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import queue
import runpy
import select
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from plait.launch.keys import Answer, GiveUp, Question
from plait.launch.wire import (
    KEY_BYTES,
    MAX_MESSAGE_BYTES,
    Ask,
    Beat,
    Call,
    Channel,
    Look,
    Raised,
    Remark,
    Reply,
    Seen,
    Start,
    Stop,
    StoreAnswer,
)
from plait.launch.worker_context import WorkerContext
from plait.orphan_guard import begin_as_child, end_unless_heard
from plait.user_code import importing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # what torch.distributed.Store is

SCRIPT_MODULE = "__plait_main__"
"""Name under which a worker imports the controller's script: its `if __name__ == "__main__":` part does not run."""
_MAX_TRACEBACK = 20_000
_OWN_FILES = (__file__, "<string>")


def main(link_fd: int, guard_fd: int, crash_fd: int, beats_fd: int, silent_after_s: int) -> None:
    """Serve until told to stop. The key comes on stdin.

    Args:
        guard_fd, crash_fd: see `begin_as_child`.
        beats_fd, silent_after_s: see `end_unless_heard`; 0 seconds: an owner that says nothing is waited for.
    """
    for fd in (link_fd, guard_fd, crash_fd, beats_fd):
        os.set_inheritable(fd, False)
    begin_as_child(guard_fd, crash_fd)
    if silent_after_s:
        end_unless_heard(beats_fd, silent_after_s)
    key = sys.stdin.buffer.read(KEY_BYTES)
    if len(key) < KEY_BYTES:
        os._exit(1)  # the controller ended while it started this process
    service = _Service(Channel(socket.socket(fileno=link_fd), key, controller=False))
    _run(service)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # threads that an action left behind must not keep the process


class _Service:
    """The connection: the main thread takes calls from it and replies, a thread of its own receives and beats."""

    def __init__(self, channel: Channel) -> None:
        self.inbox: queue.SimpleQueue[Start | Call | Stop] = queue.SimpleQueue()
        self.stopping = False
        self.context: WorkerContext | None = None
        self._channel = channel
        self._sending = threading.Lock()
        self._main_thread = threading.get_ident()
        self._beat_s = 1.0
        self._asked: dict[int, queue.SimpleQueue[Answer]] = {}
        self._numbers = itertools.count()
        threading.Thread(target=self._serve_until_end, name="plait-service", daemon=True).start()

    def send(self, message: object) -> None:
        with self._sending:
            self._channel.put(message)
            self._channel.flush(wait=True)

    def ask(self, question: Question, seconds: float) -> Answer:
        """What the controller answers; any thread may ask. Raises TimeoutError after so many seconds."""
        number, answer = next(self._numbers), queue.SimpleQueue[Answer]()
        self._asked[number] = answer
        self.send(Ask(number, question))
        try:
            return answer.get(timeout=seconds)
        except queue.Empty:
            self.send(Ask(number, GiveUp(number)))
            raise TimeoutError from None
        finally:
            del self._asked[number]

    def _serve_until_end(self) -> None:
        try:
            self._serve()
        except BaseException:
            traceback.print_exc()  # into the rank's output, whose end the controller quotes
        finally:
            os._exit(1)  # without this thread the process would seem frozen

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._channel.link, select.POLLIN)
        next_beat = time.monotonic()
        while True:
            if (left_s := next_beat - time.monotonic()) <= 0:
                self.send(Beat())
                next_beat = time.monotonic() + self._beat_s
                continue
            if poll.poll(left_s * 1e3):
                for message in self._channel.receive():
                    self._take(message)
                if self._channel.ended:  # the controller is gone
                    return

    def _take(self, message: object) -> None:
        match message:
            case Look():
                waits_for = self.context.waits_for if self.context else ""
                self.send(Seen(message.number, waits_for, self._main_stack(), self._handled()))
            case Stop():
                self.stopping = True
                self.inbox.put(message)
            case Start():
                self._beat_s = message.beat_s
                self.inbox.put(message)
            case Call():
                self.inbox.put(message)
            case StoreAnswer():
                if (asked := self._asked.get(message.number)) is not None:  # else it was given up
                    asked.put(message.answer)
            case _:
                raise AssertionError(f"a worker was sent {message}")

    def _main_stack(self) -> str:
        frame = sys._current_frames().get(self._main_thread)
        frames = itertools.dropwhile(lambda entry: entry.filename in _OWN_FILES, traceback.extract_stack(frame))
        return "".join(traceback.format_list(list(frames)))[-_MAX_TRACEBACK:]

    def _handled(self) -> str:
        handled: Any = sys._current_exceptions().get(self._main_thread)
        error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
        return _name_of(error) if error is not None else ""


def _run(service: _Service) -> None:
    worker: Any = None
    main = _ControllersMain()
    while not service.stopping:
        match service.inbox.get():
            case Start() as start:
                main.start, sys.argv = start, list(start.argv)
                worker = _timed(service, 0, partial(_construct, service, start, main), send_result=False)
            case Call() as call:
                _timed(service, call.number, partial(_call, worker, call, main))
    if worker is not None and hasattr(worker, "close"):
        try:
            worker.close()
        except Exception:  # nobody waits for it any more: into the rank's output
            traceback.print_exc()


def _construct(service: _Service, start: Start, main: _ControllersMain) -> Any:
    (worker, *args), kwargs = main.unpickled(start.arguments)

    def open_store() -> Store:
        from plait.launch.store import ControllersStore

        return ControllersStore(service.ask)

    tell = lambda text: service.send(Remark(text))
    service.context = WorkerContext(start.rank, start.num_ranks, open_store, start.place, tell)
    return worker(service.context, *args, **kwargs)


def _call(worker: Any, call: Call, main: _ControllersMain) -> Any:
    args, kwargs = main.unpickled(call.arguments)
    return getattr(worker, call.method)(*args, **kwargs)


def _timed(service: _Service, number: int, action: Callable[[], Any], *, send_result: bool = True) -> Any:
    """Run an action and send its result, or what it raised."""
    started = time.perf_counter()
    value: bytes | Raised
    result = None
    try:
        result = action()
        value = pickle.dumps(result if send_result else None, protocol=5)
        if len(value) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a result of {len(value)} bytes is more than the {MAX_MESSAGE_BYTES} that may go through the "
                "controller; arrays travel from worker to worker"
            )
    except BaseException as error:  # the process boundary: whatever it raises is reported, SystemExit too
        value = _raised(error)
    service.send(Reply(number, time.perf_counter() - started, value))
    return result


def _raised(error: BaseException) -> Raised:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))[-_MAX_TRACEBACK:]
    try:
        data: bytes | None = pickle.dumps(error, protocol=5)
        pickle.loads(data)
    except Exception:  # an exception's own pickling may raise anything; its text is enough
        data = None
    return Raised(_name_of(error), text, data)


def _name_of(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[-1000:]


class _ControllersMain:
    """Finds what the controller's script defined, by importing that script under another name when it is asked for."""

    def __init__(self) -> None:
        self.start: Start | None = None

    def unpickled(self, data: bytes) -> Any:
        unpickler = _Unpickler(io.BytesIO(data))
        unpickler.main = self
        return unpickler.load()

    def module(self) -> types.ModuleType:
        start = self.start
        assert start is not None, "the first message is Start"
        if SCRIPT_MODULE not in sys.modules:
            where = start.main_module or start.main_file
            if where is None:
                raise pickle.UnpicklingError("it was typed in: put it into a file, which a worker process can import")
            with importing(where):
                if start.main_module is not None:
                    names = runpy.run_module(where, run_name=SCRIPT_MODULE, alter_sys=True)
                else:
                    names = runpy.run_path(where, run_name=SCRIPT_MODULE)
            module = types.ModuleType(SCRIPT_MODULE)
            module.__dict__.update(names)
            sys.modules[SCRIPT_MODULE] = module
        return sys.modules[SCRIPT_MODULE]


class _Unpickler(pickle.Unpickler):
    main: _ControllersMain

    def find_class(self, module: str, name: str) -> Any:
        if module != "__main__":
            return super().find_class(module, name)
        value: Any = self.main.module()
        for part in name.split("."):
            value = getattr(value, part)
        return value
