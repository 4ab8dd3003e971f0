"""Samples that begin in one process and go on in another: two instances of a model, and the way between them."""

import sys

import torch.distributed as dist

from plait.data.records import Prompt
from plait.generation.engine import Engine, drain
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.launch.local import LocalProcesses
from plait.layout.mesh import Layout
from plait.models.language_loading import load_model
from plait.models.parallel.team import make_teams
from plait.workers.sample_mover import End, SampleMover

HERE, THERE, BOTH = Layout.on((0,)), Layout.on((1,)), Layout.on((0, 1), dp=2)


class Instance:
    """One rank: here samples begin, there they end."""

    def __init__(self, context, model):
        dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=2)
        self.model = load_model(model, dtype="bfloat16")
        self.engine = Engine(self.model, SamplingSettings())
        is_here = context.rank == 0
        here = End(HERE, self.engine if is_here else None)
        there = End(THERE, None if is_here else self.engine)
        self.mover = SampleMover(make_teams([BOTH], context.rank)[BOTH].all, here, there)

    def prompt(self, text):
        return Prompt(0, text, tuple(self.model.tokenizer.encode(text)))

    def lacks(self, text):
        """There: what of the prompt is not known yet."""
        return self.mover.here([self.prompt(text)])

    def begin(self, text, num_samples, lacks):
        """Here: say a few tokens; the bulk begins to travel, and more are said meanwhile."""
        self.engine.add(Request(self.prompt(text), num_samples, Sampling(max_tokens=24), NoiseKey(7)))
        for _ in range(8):
            self.engine.step()
        self.keys = [(0, index) for index in range(num_samples)]
        return self.mover.give(self.keys, lacks, number=0)

    def take(self, given):
        """There: receive the bulk."""
        self.mover.take(given, number=0)

    def leave(self):
        """Here: say more until the bulk is through, then send the rest."""
        while not self.mover.is_through:
            self.engine.step()
        moved = list(self.mover.moving(self.keys))
        return f"{len(self.keys)} samples left; the rest of them were {sum(action.bytes for action in moved):,} bytes"

    def go_on(self):
        list(self.mover.moving())
        return [sample.text for sample in drain(self.engine)]


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    with LocalProcesses().start(Instance, 2, arguments=[model]) as group:
        lacks = group.submit(1, "lacks", "Once upon a time").result(120.0)
        given = group.submit(0, "begin", "Once upon a time", 3, lacks).result(120.0)
        group.submit(1, "take", given)
        left = group.submit(0, "leave")
        texts = group.submit(1, "go_on").result(120.0)
        print(left.result(120.0), *map(repr, texts), sep="\n")
