"""The machine's own rates, measured between the engines' runs."""

from __future__ import annotations

import torch

from generation.serving import Runner, serve
from generation.workload import Case, Workload
from plait.cost.limit import MachineRates
from plait.cost.measured.rates import measure_rates
from plait.runtime.process import set_up


def load(workload: Workload) -> tuple[Runner, str]:
    set_up(workload.threads)

    def run(case: Case, number: int) -> MachineRates:
        return measure_rates(workload.dtype)

    return run, f"torch {torch.__version__}"


if __name__ == "__main__":
    serve(load)
