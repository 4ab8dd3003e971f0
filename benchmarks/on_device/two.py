"""Two processes on one device: whether NCCL connects them, which it refuses where it sees the same GPU twice."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from on_device.job import Job

WAIT_S = 20
"""Of NCCL; twice as long, with what it takes to start, is what the two have: less than the part."""


def main() -> int:
    job, store = Job.read(), Path(sys.argv[1]).with_name("store")
    if "RANK" in os.environ:
        return meet(job.device, int(os.environ["RANK"]), store)
    store.unlink(missing_ok=True)
    command = [sys.executable, "-m", "on_device.two", sys.argv[1]]
    both = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = []
    for one in both:
        try:
            told.append(one.communicate(timeout=2 * WAIT_S)[1])
        except subprocess.TimeoutExpired:
            for other in both:
                other.kill()
            told.append("error: they waited for each other" + one.communicate()[1])
    backend = "NCCL" if job.device == "cuda" else "gloo"
    job.record("two", "", backend=backend, connected=not any(one.returncode for one in both))
    if any(one.returncode for one in both):
        lines = [line for text in told for line in text.splitlines() if "rror" in line or "Duplicate" in line]
        print(f"two processes on one device: not by {backend}: {lines[-1] if lines else 'they ended without a word'}")
    else:
        print(f"two processes on one device: {backend} connects them")
    return 0


def meet(device: str, rank: int, store: Path) -> int:
    """One of the two."""
    import torch
    import torch.distributed as dist

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(0, WAIT_S)
    )
    ones = torch.ones(1 << 10, device=device)
    dist.all_reduce(ones)
    assert float(ones[0]) == 2.0, "what two ranks add"
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
