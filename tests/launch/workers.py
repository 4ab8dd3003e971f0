"""Workers for the tests of launchers: what is asked of them, and every way to fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")  # cannot be unpickled: two arguments, one kept


class Echo:
    def __init__(self, context, *arguments, **options):
        self.context = context
        self.arguments, self.options = arguments, options
        self.log = []

    def started_with(self):
        return self.context.rank, self.context.num_ranks, self.arguments, self.options

    def back(self, value=None):
        return value

    def append(self, item):
        self.log.append(item)
        return len(self.log)

    def read_log(self):
        return self.log

    def nap(self, seconds):
        time.sleep(seconds)
        return time.time()

    def interval(self, seconds):
        start = time.time()
        time.sleep(seconds)
        return start, time.time()

    def fail(self, text):
        raise KeyError(text)

    def fail_oddly(self):
        raise Odd("salt", "pepper")

    def unsendable(self):
        return lambda: None

    def leave(self):
        sys.exit(7)

    def pid(self):
        return os.getpid()

    def niceness(self):
        return os.nice(0)

    def tell(self, count):
        for number in range(count):
            self.context.tell(str(number))

    def count_signals(self, number):
        self.signals = 0

        def count(number, frame):
            self.signals += 1

        signal.signal(number, count)

    def wait_for_signal(self, seconds):
        end = time.monotonic() + seconds
        while self.signals == 0 and time.monotonic() < end:
            time.sleep(0.01)
        return self.signals

    def environment(self, name):
        return os.environ.get(name)

    def say(self, text):
        print(text)

    def hang_in_python(self):
        while True:
            time.sleep(0.05)

    def wait_for_peer(self, peer, file):
        """Wait for a rank for ever; the file is there from then on."""
        with self.context.waiting_for(f"rank {peer} (recv 3F0)"):
            open(file, "w").close()
            self.hang_in_python()

    def wait_for_two(self, first, go, then, file):
        """Wait for a rank until the file `go` is there, then as `wait_for_peer` for another."""
        with self.context.waiting_for(f"rank {first} (recv 2F0)"):
            while not os.path.exists(go):
                time.sleep(0.01)
        self.wait_for_peer(then, file)

    def clean_up_for_ever(self, file):
        """After an error, in a `with` that does not end; the file is there from then on."""
        try:
            raise RuntimeError("rank 1 closed its connection")
        finally:
            open(file, "w").close()
            self.hang_in_python()

    def spawn_and_hang(self, file):
        child = subprocess.Popen(["sleep", "1000"])
        with open(file, "w") as out:
            out.write(f"{os.getpid()} {child.pid}\n")
        self.hang_in_python()

    def ignore_sigterm(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def exit_hard(self, code):
        print("about to leave")
        os._exit(code)

    def hold(self, size):
        self.held = bytearray(b"x") * size

    def hoard(self):
        held = []
        while True:
            held.append(bytearray(b"x") * (16 << 20))

    def crash(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def stop_self(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def kill_self(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Closing(Echo):
    def __init__(self, context, file):
        super().__init__(context)
        self.file = file

    def close(self):
        with open(self.file, "a") as out:
            out.write(f"closed {self.context.rank}\n")


class Place(Echo):
    def place(self):
        return self.context.place


class Storing(Echo):
    def ask(self, name, *arguments):
        return getattr(self.context.store(), name)(*arguments)


class Unbuildable:
    def __init__(self, context):
        raise ValueError(f"rank {context.rank} cannot be built")


class Summing:
    """Sums over the ranks with torch.distributed."""

    def __init__(self, context):
        import torch.distributed as dist

        self.context = context
        dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.num_ranks)

    def sum(self, value, times=1):
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([float(value)])
        for _ in range(times):
            with self.context.waiting_for("all ranks (sum)"):
                dist.all_reduce(tensor)
        return tensor.item()

    def again(self):
        import torch.distributed as dist

        dist.destroy_process_group()
        store = self.context.store("second")
        dist.init_process_group("gloo", store=store, rank=self.context.rank, world_size=self.context.num_ranks)

    def end(self):
        import torch.distributed as dist

        dist.destroy_process_group()

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


def waiter(group, rank, peer, folder):
    """The handle of a rank that waits for another by now.

    Args:
        folder: where it may leave a file.
    """
    file = os.path.join(folder, f"rank {rank} waits")
    handle = group.submit(rank, "wait_for_peer", peer, file)
    until_there(file)
    return handle


def until_there(file, limit_s=30.0):
    """Until a rank has made a file."""
    until = time.monotonic() + limit_s
    while not os.path.exists(file):
        assert time.monotonic() < until, f"no rank has made {file}"
        time.sleep(0.01)
