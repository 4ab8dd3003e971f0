"""Requests that come and go, weights that change on the way, a sample that moves: the engine without training."""

import sys

import torch

from plait.data.records import Prompt
from plait.generation.engine import Engine, drain
from plait.generation.moves import SampleMoves
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.language_loading import load_model

model = load_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct", dtype="bfloat16")
here = Engine(model, SamplingSettings(max_running=4, prefix_cache_tokens=1024), policy_version=1)
there = Engine(model, SamplingSettings(), policy_version=1)


def ask(uid: int, text: str, num_samples: int) -> Request:
    return Request(
        Prompt(uid, text, tuple(model.tokenizer.encode(text))), num_samples, Sampling(max_tokens=24), NoiseKey(7)
    )


here.add(ask(0, "Once upon a time", 3))
for _ in range(5):
    here.step()

here.add(ask(1, "The capital of France is", 2))  # while the others run
here.step()

# A sample goes on elsewhere: the bulk of its keys and values while it still runs here, then the rest.
first = SampleMoves(here.state).export_sample(0, 2, final=False)
here.step()
SampleMoves(there.state).import_sample(first, SampleMoves(here.state).export_sample(0, 2, since=first.stop))

# New weights for samples in flight.
with torch.no_grad():
    model.weights.mul_(1.001)
for engine in (here, there):
    engine.update_weights(2, kv="recompute")

for name, engine in (("here", here), ("there", there)):
    for sample in drain(engine):
        print(name, sample.uid, sample.token_versions, repr(sample.text))
