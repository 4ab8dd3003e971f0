"""Runs on several processes: what passes where, timelines, checkpoints under other plans, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.cli.dry_run import dry_run
from plait.errors import RESUME, ConfigError, RunError
from plait.launch.group import Group
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.export import export_checkpoint
from plait.runtime.prediction.run_planning import costs_of_run
from plait.runtime.prepare import prepare
from plait.schedule.plan import Mode
from plait.schedule.timeline import load_any
from tests.runs.placed_runs import where
from tests.runs.plans import assert_equal_runs, planned

MakeRecipe = Callable[..., Recipe]
STEPS = 5
CALLS_OF_ACTOR: tuple[tuple[str, Mode], ...] = (("train", "train"), ("generate", "decode"))


PLANS: dict[str, dict[str, str]] = {
    "dp2": {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"},
    "tp2": {"actor.generate": "0,1 tp2", "actor.train": "0,1 tp2", "ref.logprobs": "0"},
    "pp2": {"actor.generate": "1,0 pp2", "actor.train": "0,1 pp2", "ref.logprobs": "1"},
}


@pytest.fixture
def recipe_of(make_recipe: MakeRecipe, tmp_path: Path) -> Callable[..., Recipe]:
    def make(name: str, plan: str | None, **keys: Any) -> Recipe:
        places = None if plan is None else PLANS[plan]
        return planned(make_recipe, tmp_path, name, places, **{"checkpoint.every": 2} | keys)

    return make


@dataclass(frozen=True)
class Journey:
    """One run under several plans in turn, each resumed from the other's checkpoint; read by several tests."""

    undisturbed: Path
    """The folder of the same run on one process."""
    changed: Path
    sent: int
    received: int
    """Bytes between the process that watches and the ranks, in the two steps under tp 2."""


@pytest.fixture(scope="module")
def journey(placed: Callable[..., Recipe], place: Path) -> Journey:
    """Two steps under tp 2 (a tied embedding), one under pp 2, one on one process, one under dp 2."""
    keys = {"options": {"kl_coef": 0.05}, "sampling.max_response_tokens": 24, "checkpoint.every": 2}
    undisturbed = placed("grpo", "undisturbed", steps=STEPS, **keys)
    run(undisturbed)
    closed: list[tuple[int, int]] = []
    close = Group.close

    def counted(group: Group, grace_s: float = 2.0) -> None:
        closed.append((group.bytes_sent, group.bytes_received))
        close(group, grace_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "close", counted)
        for step, plan in ((2, "tp2"), (3, "pp2"), (4, None), (STEPS, "dp2")):
            here = {} if plan is None else where(place, plan, PLANS[plan])
            run(placed("grpo", "changed", steps=step, **keys, **here), resume=step > 2)
    assert len(closed) == 3, "three of the plans have several processes"
    return Journey(undisturbed.run_dir, place / "changed", *closed[0])


@pytest.mark.slow
def test_a_checkpoint_of_one_plan_is_resumed_under_others(journey: Journey, tmp_path: Path) -> None:
    assert_equal_runs(journey.changed, journey.undisturbed)
    assert export_checkpoint(journey.changed, tmp_path / "exported", dtype="float64").step == STEPS
    folders = (tmp_path / "exported", journey.undisturbed / "final")
    ours, theirs = (_weights(folder / "model.safetensors") for folder in folders)
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-9) for name in theirs)


@pytest.mark.slow
def test_rows_do_not_pass_the_process_that_watches(journey: Journey) -> None:
    """Two steps of many tokens bring not a byte of them to it; and every rank's actions stand in the trace."""
    samples = sum((journey.changed / "samples" / f"step-{step:06}.jsonl").stat().st_size for step in (1, 2))
    assert samples > 30_000
    assert journey.sent < 24_000, "the recipe and the plan, to each of two ranks, and the rendezvous"
    beats = 100 * 120
    assert journey.received < 12_000 + beats, "the outcome, the rendezvous, and heartbeats"
    spans = [s for s in load_any(journey.changed / "trace.json").spans if s.step in (1, 2)]
    for step in (1, 2):
        trained = [{s.action for s in spans if s.rank == rank and s.step == step} for rank in (0, 1)]
        for names in trained:
            assert {"actor.generate/prefill", "actor.train/b0/mb0", "actor.train/b0/step"} <= names
        assert "ref.logprobs/mb0" in trained[0] - trained[1]
    assert not [s for s in spans if "actor.weights" in s.action], "one part serves all calls: nothing moves"


@pytest.mark.slow
def test_moves_are_in_the_timeline_with_their_bytes(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    PLANS["moved"] = {"actor.generate": "1", "actor.train": "0", "ref.logprobs": "0"}
    recipe = recipe_of("moved", "moved", steps=2)
    run(recipe)
    spans = [s for s in load_any(recipe.run_dir / "trace.json").spans if s.action.startswith("actor.weights/")]
    elements = sum(t.numel() for t in _weights(recipe.run_dir / "final/model.safetensors").values())
    for rank, kind in ((0, "SEND"), (1, "RECV")):
        moved = [s for s in spans if s.rank == rank and s.step == 1]
        assert {s.kind for s in moved} == {kind}
        assert sum(s.bytes for s in moved) == 8 * elements


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{"rank": 0}, {"rank": 3}, {"rank": 2, "target_modules": ["q_proj", "down_proj"]}])
@pytest.mark.parametrize("generates", ["0,1 tp2", "0,1 pp2", "1"])
def test_a_run_moves_the_bytes_that_are_predicted(
    recipe_of: Callable[..., Recipe], generates: str, lora: dict[str, Any]
) -> None:
    """With an adapter it alone is moved to what generates, cut as the layers that it is on."""
    PLANS["predicted"] = {"actor.generate": generates, "actor.train": "0", "ref.logprobs": "0"}
    recipe = recipe_of("predicted", "predicted", steps=2, lora=lora)
    run(recipe)
    spans = load_any(recipe.run_dir / "trace.json").spans
    moved = [s for s in spans if s.action.startswith("actor.weights/") and s.kind == "RECV" and s.step == 1]
    prepared = prepare(recipe)
    places = [prepared.plan.placements_of(f"actor.{call}", mode)[0] for call, mode in CALLS_OF_ACTOR]
    costs = costs_of_run(prepared, prepared.lengths, devices=prepared.plan.num_ranks)
    trains, draws = (place.layout for place in places)
    assert sum(s.bytes for s in moved) == costs.move("actor", trains, draws).bytes > 0


@pytest.mark.slow
def test_every_action_has_its_bytes(recipe_of: Callable[..., Recipe], journey: Journey) -> None:
    """25,760 parameters, of them a tied embedding of 320 x 32, in float64."""
    elements, embedding, hidden = 25_760, 320 * 32, 32
    PLANS["cut"] = {"actor.generate": "0,1 tp2", "actor.train": "0,1 pp2", "ref.logprobs": "1"}
    recipe = recipe_of("bytes-cut", "cut", steps=1)
    run(recipe)
    spans = load_any(recipe.run_dir / "trace.json").spans
    # dp 2: of gradients a rank gets its share from the other, of the new weights all that is not its share.
    last = [s for s in load_any(journey.changed / "trace.json").spans if s.step == STEPS]
    assert {s.rank: s.bytes for s in last if s.kind == "STEP"} == {0: 8 * elements, 1: 8 * elements}
    # The stages sum the embedding's gradients, and the last one gets its new weights from the first.
    steps = {s.rank: s.bytes for s in spans if s.kind == "STEP"}
    assert steps == {0: 8 * embedding, 1: 2 * 8 * embedding}
    trained = [s for s in spans if s.action.startswith("actor.train/")]
    tokens = {(s.rank, s.action[-1]): s.tokens for s in trained if s.kind in ("F", "B")}
    passed = [s for s in trained if s.kind.startswith(("SEND", "RECV"))]
    assert {(s.kind, s.lane) for s in passed} == {
        *(("SEND_F", "send"), ("RECV_F", "recv")),
        *(("SEND_B", "send"), ("RECV_B", "recv")),
    }
    for span in passed:
        assert span.bytes == 8 * hidden * tokens[span.rank, span.action[-1]]
    # Two ranks sum the embedding's and each layer's two outputs, and gather their halves of the logits.
    for span in spans:
        if span.kind == "DECODE":
            assert span.bytes == 8 * span.tokens * ((1 + 2 * 2) * hidden + 320 // 2)
    assert {s.rank for s in spans if s.kind == "DECODE"} == {0, 1}


def _weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_what_instances_of_several_ranks_do_not_do_is_refused(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = recipe_of("exact", "tp2", **{"sampling.exact": True})
    for begin in (run, dry_run):
        with pytest.raises(ConfigError, match=r"`sampling.exact` .* actor"):
            begin(recipe)
    assert not recipe.run_dir.exists(), "nothing was begun"


def test_an_error_of_the_users_own_is_said_as_by_one_process(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def count_sevens(completions, **columns):\n    return [None for _ in completions]\n"
    )
    with pytest.raises(RunError, match="no sample of 12 has a score from `reward`") as caught:
        run(recipe_of("none", "dp2"))
    assert "rank" not in str(caught.value)
    assert f"{RESUME} begins again at step 1" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp2", "tp2"])
def test_an_error_while_others_generate_is_said_and_the_last_step_saved(
    recipe_of: Callable[..., Recipe], tmp_path: Path, plan: str
) -> None:
    """The reward of the first group of step 2 fails: the other rank has most of its requests still to do (dp 2), or
    waits for this one in the middle of a token (tp 2)."""
    (tmp_path / "reward.py").write_text(
        "from pathlib import Path\n\n"
        "def count_sevens(completions, **columns):\n"
        "    with Path(__file__).with_name('calls').open('a') as calls:\n"
        "        calls.write('x')\n"
        "    if Path(__file__).with_name('calls').stat().st_size > 4:\n"
        "        raise ValueError('planted')\n"
        "    return [float(text.count('7')) for text in completions]\n"
    )
    keys = {"checkpoint.every": 100, "sampling.max_response_tokens": 40, "sampling.max_running": 4}
    recipe = recipe_of("fails", plan, steps=3, prompts_per_step=4, **keys)
    with pytest.raises(RunError, match="ValueError: planted") as caught:
        run(recipe)
    assert "rank" not in str(caught.value)
    assert f"the checkpoint of step 1 is good ({recipe.run_dir}/checkpoints/step-1)" in str(caught.value)
    assert [path.name for path in (recipe.run_dir / "checkpoints").iterdir()] == ["step-1"]
    assert export_checkpoint(recipe.run_dir, tmp_path / "exported", dtype="float64").step == 1


@pytest.mark.slow
def test_requests_that_come_with_the_last_samples_of_others_are_answered(
    recipe_of: Callable[..., Recipe], tmp_path: Path
) -> None:
    """ReMax generates twice. Rank 1 looks late for commands, so that it finds the second rollout in the loop of the
    first: its samples must come under the second one's number, or the leader waits for ever."""
    (tmp_path / "flow.py").write_text(
        "import time\n"
        "from plait.algorithms.remax import remax as remax\n"
        "from plait.workers.transport import Transport\n\n"
        "poll = Transport.poll\n\n"
        "def late(self, *args, **kwargs):\n"
        "    time.sleep(0.08 if self.rank == 1 else 0.0)\n"
        "    return poll(self, *args, **kwargs)\n\n"
        "Transport.poll = late\n"
    )
    one, two = recipe_of("one", None, steps=1, algorithm="remax"), recipe_of("two", "dp2", steps=1)
    run(one)
    run(two.model_copy(update={"algorithm": f"{tmp_path}/flow.py:remax"}))
    assert_equal_runs(two.run_dir, one.run_dir)


@pytest.mark.slow
def test_samples_without_a_reward_leave_what_was_scored_beside(
    recipe_of: Callable[..., Recipe], tmp_path: Path
) -> None:
    """The reference scores all samples on another rank while functions refuse some of them."""
    (tmp_path / "reward.py").write_text(
        "def count_sevens(completions, **columns):\n"
        "    return [None if len(text) % 3 == 0 else 0.01 * len(text) for text in completions]\n"
    )
    PLANS["beside"] = {"actor.generate": "0", "actor.train": "0", "ref.logprobs": "1"}
    one, two = recipe_of("one", None, steps=2), recipe_of("two", "beside", steps=2)
    run(one)
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)
    rows = [json.loads(line) for line in (two.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["reward/dropped"] for row in rows) > 0
    for name in ("step-000001.jsonl", "step-000002.jsonl"):
        samples = [[json.loads(line) for line in (r.run_dir / "samples" / name).open()] for r in (one, two)]
        assert [list(sample) for sample in samples[0]] == [list(sample) for sample in samples[1]], (
            "columns in one order"
        )
