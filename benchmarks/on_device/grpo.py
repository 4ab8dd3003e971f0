"""`grpo_step.py` on the device, of the small model; plait's side alone where TRL is not installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec

import grpo_step

from on_device.job import Job


def main() -> int:
    job = Job.read()
    how = ["--sides", "plait" if find_spec("trl") is None else "plait,trl"]
    if job.is_tiny:
        return grpo_step.main([*how, "--tiny", "--repeats", "1"])
    # If it has to be written first, then without this process on the device, beside the sides.
    model = replace(job, device="cpu").model("135M")
    return grpo_step.main([*how, "--device", job.device, "--threads", "8", "--model", model])


if __name__ == "__main__":
    sys.exit(main())
