"""What trees of drafts would come to beside chains: counted on samples of a model, by what rows take.

In a tree the second likeliest token of a place competes for a row as well, and what may follow it. Samples are drawn
once, plainly; then they are said again a token at a time, and at each place the pool of known texts is asked for its
two best drafts. Of both it is counted how often they were accepted, by position in the draft, by the confidence of the
first, and by how far the second lies behind it; of the first also by where it comes from. With these shares as
survival, which no estimate could know better, the rows of a step are chosen that give the most tokens per second: among
chains, and among trees.

A draft model draws with the samples' noise: of its 64 likeliest tokens the two with the largest sums are its drafts. It
is asked behind what the samples say, so of paths that a sample does not take nothing is known but how often each place
of a path is right: its chains and trees are chosen by that alone.

    python benchmarks/draft_trees.py                 # SmolLM2-135M-Instruct, three rollouts of eight prompts, minutes
    python benchmarks/draft_trees.py --curve "mine=1:9,8:10.5,32:27"      # ms of steps of so many rows
    python benchmarks/draft_trees.py --draft-model FOLDER --temperature 0.5
    python benchmarks/draft_trees.py --copy-group 48  # drafts of the policy's copy in 4 bits (`low_bit_copy.py`)
    python benchmarks/draft_trees.py --tiny          # does the benchmark itself work?
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from low_bit_copy import matrices, rounded
from step_curves import EPYC, XEON, StepCurve, curve

from plait.data.packed import pack
from plait.generation.engine import Engine, drain
from plait.generation.settings import SamplingSettings
from plait.kernels import draft_lookup
from plait.kernels.draft_lookup import SEEN, WALK
from plait.kernels.noise_bits import draw_key, gumbel
from plait.models.compute.attention import PackedContext
from plait.models.language_loading import load_model
from plait.models.language_model import LanguageModel
from plait.speculation.counts import SOURCES
from plait.speculation.pool import TextPool
from speculation import TASKS, requests, tiny_model

DEEP = 4
"""Tokens of a path."""
MOST = 8
"""Drafted rows of a sample."""
GROUP = 8


@dataclass(frozen=True)
class Said:
    """A sample as it was drawn."""

    prompt_ids: tuple[int, ...]
    noise_key: int
    token_ids: list[int]
    probs: list[float]


Cell = tuple[int, int, int, int]
"""Rank of the draft, place in the path, confidence of the first, distance of the second."""


class Draft(NamedTuple):
    token: int
    cell: Cell
    source: int
    """Of `SOURCES`."""


@dataclass
class Shares:
    """How often drafts of a cell were accepted."""

    trials: dict[Cell, list[int]] = field(default_factory=dict)
    of_sources: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Of first drafts, by source and place in the path."""

    def learn(self, draft: Draft, hit: bool) -> None:
        counted = [self.trials.setdefault(draft.cell, [0, 0])]
        rank, place, *_ = draft.cell
        if rank == 0:
            counted.append(self.of_sources.setdefault((draft.source, place), [0, 0]))
        for of in counted:
            of[0] += 1
            of[1] += hit

    by_rank: dict[tuple[int, int], int] = field(default_factory=dict)
    """Places with two drafts, by whether the first and the second were accepted."""

    def learn_both(self, hits: tuple[bool, bool]) -> None:
        self.by_rank[hits] = self.by_rank.get(hits, 0) + 1

    @property
    def of_failures(self) -> float:
        """In what share of the places in which the first was wrong, the second was accepted."""
        right, wrong = (self.by_rank.get((False, second), 0) for second in (True, False))
        return right / max(1, right + wrong)

    def of(self, cell: Cell) -> float:
        trials, hits = self.trials.get(cell, (0, 0))
        return hits / trials if trials >= 10 else 0.0

    def of_rank(self, rank: int, place: int) -> float:
        """Over all confidences."""
        counts = [count for cell, count in self.trials.items() if cell[:2] == (rank, place)]
        return sum(hits for _, hits in counts) / max(1, sum(trials for trials, _ in counts))


class Known:
    """Looks the two best drafts up behind what a sample has said and some tokens more."""

    def __init__(self) -> None:
        self.pool = TextPool(64 << 20)
        most = 2 * WALK
        self._ints = [np.empty(most, np.int64) for _ in range(4)]
        self._floats = [np.empty(most) for _ in range(2)]

    def best(self, slot: int, noise_key: int, place: int, more: Sequence[int]) -> list[Draft]:
        """The likeliest first.

        Args:
            place: of the first of `more` in the response.
        """
        pool, (entries, alike, seen, best), (weights, means) = self.pool, self._ints, self._floats
        tokens_N, before_N, probs_N, owners_N, chains_2N, heads_2H = pool.texts.index
        context, at = list(reversed(more)), pool.ends[slot]
        while at >= 0 and len(context) < SEEN:
            context.append(int(tokens_N[at]))
            at = before_N[at]
        said, root, count = np.array(context, np.int64), pool.roots[slot], 0
        for level in (1, 0):
            count = draft_lookup._gather(
                said, len(said), root, level, tokens_N, before_N, chains_2N, heads_2H, entries, alike, count
            )
        if count == 0:
            return []
        num = draft_lookup._weigh(count, entries, alike, tokens_N, probs_N, seen, weights, means, best)
        key, total = draw_key(np.uint64(noise_key), np.uint64(place + len(more))), weights[:num].sum()
        likely = np.sqrt(means[:num] * weights[:num] / total) if num > 1 else means[:num]
        mass = max(1.0, float(likely.sum()))
        noise = [gumbel(np.uint64(key), np.uint64(token)) for token in seen[:num]]
        scores = [math.log(p / mass) + g for p, g in zip(likely, noise, strict=True)]
        order = sorted(range(num), key=lambda i: -scores[i])
        left = max(1.0 - float(likely.sum()) / mass, draft_lookup.LEAST_LEFT)
        sure = min(9, int(10 * math.exp(-left * math.exp(-scores[order[0]]))))
        own, kinds_O = pool.owners[slot], pool.texts.kinds_O
        sources = [int(draft_lookup._source(owners_N[entries[best[at]]], own, kinds_O)) for at in order[:2]]
        drafts = [Draft(int(seen[order[0]]), (0, len(more), sure, 0), sources[0])]
        if num > 1:
            behind = min(3, int(2 * (scores[order[0]] - scores[order[1]])))
            drafts.append(Draft(int(seen[order[1]]), (1, len(more), sure, behind), sources[1]))
        return drafts


class Drawn(Known):
    """Drafts of a model that draws with the samples' noise."""

    def __init__(self, model: LanguageModel, temperature: float) -> None:
        super().__init__()
        self._model, self._temperature = model, temperature
        self._best: list[list[list[int]]] = []
        """Of each sample and place, the two tokens with the largest sums."""

    def hear(self, samples: Sequence[Said]) -> None:
        """These are said next."""
        self._best = [self._of_sample(one) for one in samples]

    def best(self, slot: int, noise_key: int, place: int, more: Sequence[int]) -> list[Draft]:
        """See Known.best, of what the sample says."""
        tokens = self._best[slot][place + len(more)]
        return [Draft(token, (rank, len(more), 0, 0), SOURCES.index("model")) for rank, token in enumerate(tokens)]

    def _of_sample(self, one: Said) -> list[list[int]]:
        with torch.inference_mode():
            row = pack([([*one.prompt_ids, *one.token_ids[:-1]], ())])
            hidden_TH = self._model.hidden(row.token_ids_T, row.position_ids_T, PackedContext(row))
            logits_TV = self._model.logits(hidden_TH[len(one.prompt_ids) - 1 :]).float()
            logprobs, tokens = torch.log_softmax(logits_TV / self._temperature, -1).topk(min(64, logits_TV.shape[-1]))
        found = []
        for place, (of_place, ids_of_place) in enumerate(zip(logprobs.tolist(), tokens.tolist(), strict=True)):
            key = np.uint64(draw_key(np.uint64(one.noise_key), np.uint64(place)))
            sums = [
                (logprob + gumbel(key, np.uint64(token)), token)
                for logprob, token in zip(of_place, ids_of_place, strict=True)
            ]
            found.append([token for _, token in heapq.nlargest(2, sums)])
        return found


def drawn(model: LanguageModel, options: argparse.Namespace, rollout: int) -> list[Said]:
    """The samples of a rollout."""
    asked = requests(model, options, GROUP * options.prompts, rollout)
    engine = Engine(model, SamplingSettings(max_running=GROUP * options.prompts))
    for one in asked:
        engine.add(one)
    found = []
    by_uid = {one.prompt.uid: one for one in asked}
    for sample in drain(engine):
        request = by_uid[sample.prompt.uid]
        key = request.noise.sample_key(sample.prompt.uid, sample.index)
        probs = [math.exp(logprob) for logprob in sample.logprobs]
        found.append(Said(request.prompt.token_ids, key, list(sample.token_ids), probs))
    return found


def steps(known: Known, samples: Sequence[Said]) -> Iterator[tuple[int, int]]:
    """(sample, place) of all tokens, as samples say them side by side."""
    for slot, one in enumerate(samples):
        known.pool.begin(slot, one.prompt_ids)
    for place in range(max(len(one.token_ids) for one in samples)):
        live = [slot for slot, one in enumerate(samples) if place < len(one.token_ids)]
        for slot in live:
            if place > 0:
                yield slot, place
        for slot in live:
            one = samples[slot]
            token, prob = np.array([one.token_ids[place]]), np.array([one.probs[place]])
            known.pool.say(np.array([slot]), np.array([1]), token, prob)
    for slot in range(len(samples)):
        known.pool.end(slot)
    known.pool.grow_old()


def learn(known: Known, shares: Shares, samples: Sequence[Said]) -> None:
    """Trials of both drafts at every place, and behind those that were accepted."""
    for slot, place in steps(known, samples):
        one = samples[slot]
        for deep in range(min(DEEP, len(one.token_ids) - place)):
            drafts = known.best(slot, one.noise_key, place, one.token_ids[place : place + deep])
            wanted = one.token_ids[place + deep]
            for draft in drafts:
                shares.learn(draft, draft.token == wanted)
            if len(drafts) > 1 and deep == 0:
                shares.learn_both((drafts[0].token == wanted, drafts[1].token == wanted))
            if wanted not in [draft.token for draft in drafts]:
                break


def survivals_by_place(shares: Shares, *, tree: bool) -> list[float]:
    """Of the likeliest MOST drafted rows where nothing is known of a draft but its rank and place."""
    found: list[float] = []
    open_paths = [(-1.0, 0)]
    while open_paths and len(found) <= MOST:
        survival, place = heapq.heappop(open_paths)
        found.append(-survival)
        for rank in range(2 if tree else 1) if place < DEEP else ():
            if (more := survival * shares.of_rank(rank, place)) < -0.02:
                heapq.heappush(open_paths, (more, place + 1))
    return found[1:]


def survivals(known: Known, shares: Shares, slot: int, one: Said, place: int, *, tree: bool) -> list[float]:
    """Of the likeliest MOST drafted rows of a sample, the likeliest first."""
    found: list[float] = []
    open_paths: list[tuple[float, tuple[int, ...]]] = []
    room = min(DEEP, len(one.token_ids) - place - 1)

    def expand(survival: float, path: tuple[int, ...]) -> None:
        if len(path) < room:
            for draft in known.best(slot, one.noise_key, place, path)[: 2 if tree else 1]:
                if (more := survival * shares.of(draft.cell)) > 0.02:
                    heapq.heappush(open_paths, (-more, (*path, draft.token)))

    expand(1.0, ())
    while open_paths and len(found) < MOST:
        survival, path = heapq.heappop(open_paths)
        found.append(-survival)
        expand(-survival, path)
    return found


def per_second(rows: Sequence[Sequence[float]], running: int, step_s: StepCurve) -> float:
    """Tokens per second of steps of so many samples, from all places at random, each with its best number of rows."""
    order, tokens, taken = list(rows), 0.0, 0.0
    random.Random(0).shuffle(order)
    for start in range(0, len(order) - running + 1, running):
        sums = np.cumsum([0.0, *sorted((s for one in order[start : start + running] for s in one), reverse=True)])
        seconds = step_s(running + np.arange(len(sums)))
        best = int(((running + sums) / seconds).argmax())
        tokens, taken = tokens + running + float(sums[best]), taken + float(seconds[best])
    return tokens / taken


def print_shares(shares: Shares) -> None:
    """How often both draft tokens were accepted, place by place, and the first ones of each source."""
    for rank, name in enumerate(("first", "second")):
        print(name, *(f"{shares.of_rank(rank, place):.1%}" for place in range(DEEP)))
    print(f"second, where the first was wrong {shares.of_failures:.1%}")
    for source, name in enumerate(SOURCES):
        counts = [shares.of_sources.get((source, place), (0, 0)) for place in range(DEEP)]
        if (looked_up := counts[0][0]) > 0:
            came_true = (f"{hits / trials:.1%}" if trials else "-" for trials, hits in counts)
            print(f"first, from {name} ({looked_up} places)", *came_true)


def print_rows(rollouts: Sequence[Sequence[Said]], shares: Shares, options: argparse.Namespace) -> None:
    """The table of what chains and trees come to."""
    rows: dict[bool, list[list[float]]] = {}
    for tree in (False, True) if drafts_of(options) is None else ():
        known, rows[tree] = Known(), []
        for samples in rollouts:
            rows[tree] += [
                survivals(known, shares, slot, samples[slot], place, tree=tree) for slot, place in steps(known, samples)
            ]
    if drafts_of(options) is not None:
        rows = {tree: [survivals_by_place(shares, tree=tree)] * max(options.running) for tree in (False, True)}
    print("\n| a step | running | chains to plain | trees to plain | trees to chains |")
    print("| --- | --- | --- | --- | --- |")
    for step_s in options.curve:
        for running in options.running:
            plain = running / float(step_s(running))
            chains, trees = (per_second(rows[tree], running, step_s) for tree in (False, True))
            print(
                f"| {step_s} | {running} | {chains / plain:.3f} | {trees / plain:.3f} | {trees / chains:.3f} |",
                flush=True,
            )


def drafts_of(options: argparse.Namespace) -> str | None:
    """Who drafts, in words; None: drafts are looked up."""
    if options.copy_group is not None:
        return f"the policy's copy in 4 bits with groups of {options.copy_group}"
    return options.draft_model


def draft_model(options: argparse.Namespace, read: Callable[[], LanguageModel]) -> LanguageModel:
    if options.copy_group is None:
        return load_model(options.draft_model, dtype="bfloat16")
    copy = read()
    with torch.no_grad():
        for weight in matrices(copy):
            weight.copy_(rounded(weight, options.copy_group))
    return copy


def main() -> None:
    """Read the options, draw, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--task", choices=tuple(TASKS), default="chat", help="of benchmarks/speculation.py")
    parser.add_argument("--prompts", type=int, default=8, help=f"of {GROUP} samples each")
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="of a response at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--curve",
        type=curve,
        nargs="+",
        default=[EPYC, XEON],
        help="NAME=ROWS:MS,ROWS:MS…: what steps of so many rows take",
    )
    parser.add_argument(
        "--running", type=int, nargs="*", default=[1, 4, 8, 32], help="samples that run at a time; none: no table"
    )
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--draft-model", help="whose drafts are counted in place of those that are looked up")
    drafts.add_argument("--copy-group", type=int, help="the same of the policy's copy in 4 bits, in groups of so many")
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.tiny:
        options.prompts, options.tokens, options.rollouts, options.running = 2, 20, 2, [1, 4]

    def read() -> LanguageModel:
        with tempfile.TemporaryDirectory() as folder:
            return tiny_model(Path(folder)) if options.tiny else load_model(options.model, dtype="bfloat16")

    model, drafter = read(), drafts_of(options)
    rollouts = [drawn(model, options, number) for number in range(options.rollouts)]
    shares = Shares()
    known = Known() if drafter is None else Drawn(draft_model(options, read), options.temperature)
    for samples in rollouts:
        if isinstance(known, Drawn):
            known.hear(samples)
        learn(known, shares, samples)
    tokens = sum(len(one.token_ids) for samples in rollouts for one in samples)
    print(f"{options.task}, temperature {options.temperature:g}, {tokens} tokens, drafts of {drafter or 'known texts'}")
    print_shares(shares)
    if options.running:
        print_rows(rollouts, shares, options)


if __name__ == "__main__":
    main()
