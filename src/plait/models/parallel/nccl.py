"""What NCCL asks of whoever sends by it, beyond gloo. A run on GPUs has groups of both: tensors of a GPU go by NCCL.

no tags         messages between two ranks meet in the order of posting
two streams     a message that is posted alone runs in one line with all others between these two ranks: a receive
                that waits holds up the send behind it. What is posted as one batch runs at once, and in one line
                with the collectives of the group
the first use   makes connections, in the call itself: of a group those between all its ranks, of messages those between
                two in one direction. The process stands still meanwhile, until all of them are there, and some waits
                of torch's for it end after minutes: `connect` does it, in an order that all ranks share
memory          is taken by every connection. A message to each rank of a group connects every two: where a collective
                does the same, it is taken
threads         what one posts while another posts a batch of the same group is taken into that batch: see `posting`
waiting         is for the GPU to do. A wait with a deadline has the CPU look again every few milliseconds until
                the work is done; the deadline of the group, and the launcher, end what hangs
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_POSTING: defaultdict[Any, threading.Lock] = defaultdict(threading.Lock)


def posting(group: Any) -> threading.Lock:
    """Held while something is posted to a group (None: the default one): threads that move samples do that, too."""
    return _POSTING[group]


def serves(group: Any) -> bool:
    """Whether a group (None: the default one) sends the tensors of GPUs by NCCL."""
    return dist.is_initialized() and "cuda:nccl" in dist.get_backend_config(group)


def carries(group: Any, device: torch.device) -> bool:
    """Whether a group sends tensors of this device by NCCL."""
    return device.type == "cuda" and serves(group)


def connect(group: Any, ranks: Sequence[int], rank: int, *, pairs: bool) -> None:
    """Use a group for the first time, where NCCL serves it. Every rank of it calls this, for one group after the other.

    Args:
        group: None: the default one.
        ranks: of the group; `rank` is the one of this process.
        pairs: connect each two ranks, too, in both directions, for messages that are posted alone.
    """
    if not serves(group):
        return
    number = torch.zeros(1, device=device())
    dist.all_reduce(number, group=group)
    for sender, receiver in permutations(sorted(ranks), 2) if pairs else ():
        if rank == sender:
            dist.send(number, receiver, group=group)
        elif rank == receiver:
            dist.recv(number, sender, group=group)


def device() -> torch.device:
    """Where this process computes."""
    return torch.device("cuda", torch.cuda.current_device())


def wait(work: Any, tensor: Tensor | None, seconds: float) -> bool:
    """Until a work is done: the CPU, or for a tensor of a GPU what is computed there from now on.

    Args:
        tensor: that is on its way, of any shape and dtype; None: a barrier.
        seconds: deadline of the CPU.

    Returns:
        False where it was aborted.

    Raises:
        RuntimeError: of torch.distributed; nothing came through until the deadline, or the peer is gone.
    """
    through = work.wait() if tensor is not None and tensor.is_cuda else work.wait(timedelta(seconds=seconds))
    return through is not False
