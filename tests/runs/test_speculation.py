"""Training with drafts is training without: the same tokens, metrics and weights, on one device and on several."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.cost.device_memory import memory_by_device, memory_of_plan
from plait.cost.generation_memory import packed_bytes
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.model_parameters import parameters_of
from plait.cost.placed import Facts
from plait.errors import ConfigError, ModelError
from plait.kernels import paged_attention
from plait.layout.mesh import Layout
from plait.models.files.saving import save_pretrained
from plait.observe.run_log import read_rows
from plait.recipes.device_checks import check_served
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prediction.machine import machine_of
from plait.runtime.prediction.planning import Planning
from plait.runtime.prepare import outline, prepare
from plait.runtime.steps.draft_knowledge import NAME, read_known
from plait.schedule.timeline import load_any
from tests.cases import slow_but
from tests.models.tiny import tiny_model, tiny_tokenizer
from tests.runs.placed_runs import GRPO, recipe_in, where
from tests.runs.plans import assert_equal_runs

STEPS = 3
"""A step takes 3 of 6 prompts: a pass and a half."""

MODEL = "MODEL"
"""In place of the folder of the policy as it begins."""

HOW: dict[str, dict[str, Any]] = {
    "auto": {"sampling.speculation": "auto"},
    "adaptive": {"sampling.speculation": "adaptive"},
    "five": {"sampling.speculation": 5},
    "chunks": {"sampling.speculation": 3, "sampling.max_prefill_tokens": 7, "sampling.max_running": 5},
    "a pool of keys that is too small": {"sampling.speculation": 4, "sampling.kv_tokens": 96},
    "a pool of texts that is too small": {"sampling.speculation": 4, "sampling.draft_pool_bytes": 1 << 16},
    "a draft model": {"sampling.speculation": 4, "sampling.draft_model": MODEL},
    "a draft model, where it pays": {"sampling.speculation": "adaptive", "sampling.draft_model": MODEL},
    "a draft model, where much may be lost": {
        "sampling.speculation": "adaptive",
        "sampling.draft_model": MODEL,
        "sampling.speculation_loss": 0.3,
    },
}
PLACES = {
    "instances": {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0"},
    "tp2": {"actor.generate": "1,0 tp2", "actor.train": "0,1 dp2", "ref.logprobs": "0"},
    "pp2": {"actor.generate": "0,1 pp2", "actor.train": "0", "ref.logprobs": "1"},
}


def recipe_of(place: Path, tiny_folder: Path, run_dir: str, **keys: Any) -> Recipe:
    # Cold, so that a model of random weights says some of what it said before. Gradients of cold draws are large, and
    # Adam makes of their rounding, which goes by who adds what, 1e-7 of an update where they are almost nothing.
    base = {"steps": STEPS, "sampling.max_response_tokens": 12, "sampling.temperature": 0.1}
    base |= {"optimizer.learning_rate": 1e-4}
    base |= {"data.source": str(place / "few.jsonl")}
    keys = {key: str(tiny_folder) if value == MODEL else value for key, value in keys.items()}
    return recipe_in(place, tiny_folder, "grpo", run_dir, **(GRPO[1] | base | keys))


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    (place / "few.jsonl").write_text("".join(f'{{"prompt": "what is {i} plus 4?"}}\n' for i in range(6)))
    return place


@pytest.fixture(scope="module")
def plain(place: Path, tiny_folder: Path) -> Path:
    recipe = recipe_of(place, tiny_folder, "plain")
    run(recipe)
    return Path(recipe.run_dir)


def accepted(run_dir: Path) -> float:
    return sum(row.get("perf/spec/accepted_tokens", 0.0) for row in read_rows(run_dir / "metrics.jsonl"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_keys_and_values_of_a_draft_model_share_the_memory_for_them(
    device: str, place: Path, tiny_folder: Path
) -> None:
    """Here the draft model is as large as the policy, so half as many tokens of each have room."""
    tokens = []
    for drafts in ({"sampling.speculation": 4}, HOW["a draft model"]):
        keys = {"device": device, "dtype": "float32", "sampling.kv_memory": 0.25, **drafts}
        recipe = outline(recipe_of(place, tiny_folder, "shared", **keys), device_memory=1 << 22).recipe
        check_served(recipe)
        tokens.append(recipe.sampling.kv_tokens)
    assert tokens == [(1 << 20) // (2 * 2 * 2 * 8 * 4), (1 << 20) // (2 * 2 * 2 * 2 * 8 * 4)]


QUICK = ("a pool of keys that is too small",)
"""Five are drafted as four are; where drafts pay is decided in the run by default below, and an instance of two has a
draft model there; tests of the engine have chunks and small pools of texts."""


@pytest.mark.parametrize("how", slow_but(QUICK, HOW))
def test_a_run_with_drafts_is_the_run_without(how: str, place: Path, tiny_folder: Path, plain: Path) -> None:
    recipe = recipe_of(place, tiny_folder, how, **HOW[how])
    run(recipe)
    assert_equal_runs(Path(recipe.run_dir), plain)
    assert accepted(plain) == 0
    if HOW[how]["sampling.speculation"] not in ("auto", "adaptive"):
        steps = [span for span in load_any(Path(recipe.run_dir) / "trace.json").spans if span.kind == "DECODE"]
        assert all(span.samples <= span.drawn <= span.tokens for span in steps)
        assert 0 < sum(span.drawn - span.samples for span in steps) <= accepted(Path(recipe.run_dir))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["auto", 4])
def test_in_exact_mode_to_the_bit(how: Any, place: Path, tiny_folder: Path) -> None:
    keys = {"sampling.exact": True, "dtype": "float32"}
    without, drafting = (
        recipe_of(place, tiny_folder, f"exact-{how}-{drafts}", **keys, **{"sampling.speculation": drafts})
        for drafts in ("off", how)
    )
    for recipe in (without, drafting):
        run(recipe)
    assert_equal_runs(Path(drafting.run_dir), Path(without.run_dir), tolerance=0.0)


@pytest.mark.skipif(not paged_attention.fast(torch.float32), reason="no numba, or a CPU without AVX2")
@pytest.mark.parametrize("plan", slow_but([None], [None, "instances", "tp2"]))
def test_a_run_by_default_is_the_run_without_to_the_bit(
    plan: str | None, place: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the compiled forward, resumed in the middle, with what its engines had learned; ranks with parts of a model
    draft nothing."""
    keys: dict[str, Any] = {"dtype": "float32", "sampling.max_response_tokens": 20, "checkpoint.every": 2}
    if plan is not None:
        keys |= where(place, f"default-{plan}", PLACES[plan])
    without = recipe_of(place, tiny_folder, f"without-{plan}", **keys, **{"sampling.speculation": "off"})
    run(without)
    default = recipe_of(place, tiny_folder, f"default-{plan}", **keys)
    run(recipe_of(place, tiny_folder, f"default-{plan}", **keys | {"steps": 2}))
    learned = {one.instance for one in read_known(Path(default.run_dir) / "checkpoints/step-2" / NAME)}
    assert learned == {None: {0}, "instances": {0, 1}, "tp2": set()}[plan]
    run(default, resume=True)
    assert ("speculative decoding" in capsys.readouterr().err) == (plan == "tp2"), "why there are none, and no more"
    assert_equal_runs(Path(default.run_dir), Path(without.run_dir), tolerance=0.0)
    told = {"perf/spec/drafted_steps" in row for row in read_rows(Path(default.run_dir) / "metrics.jsonl")}
    assert told == {plan != "tp2"}


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ("tp2", MODEL),
        *(
            pytest.param(plan, model, marks=pytest.mark.slow)
            for plan in ("instances", "pp2")
            for model in (None, MODEL)
        ),
    ],
)
def test_all_ranks_take_the_same_drafts(
    plan: str, model: str | None, place: Path, tiny_folder: Path, plain: Path
) -> None:
    """One rank of an instance drafts, and has the draft model."""
    keys = where(place, f"spec-{plan}", PLACES[plan]) | {"sampling.speculation": 4, "sampling.draft_model": model}
    recipe = recipe_of(place, tiny_folder, f"on-{plan}-{model}", **keys)
    run(recipe)
    assert_equal_runs(Path(recipe.run_dir), plain)
    assert accepted(Path(recipe.run_dir)) > 0


DRAFTED = ("draft_tokens", "accepted_tokens", "acceptance_of_history")


def test_several_instances_draft_as_a_lone_one_does(place: Path, tiny_folder: Path, plain: Path) -> None:
    """The last step asks again what the first one asked, of whichever instance has the least to do. Each was told what
    the other had drawn."""
    keys: dict[str, Any] = {"sampling.speculation": 4}
    alone = recipe_of(place, tiny_folder, "told-alone", **keys)
    keys |= where(place, "told-instances", PLACES["instances"])
    instances = recipe_of(place, tiny_folder, "told-instances", **keys)
    for recipe in (alone, instances):
        run(recipe)
    assert_equal_runs(Path(instances.run_dir), plain)
    wanted, found = (read_rows(Path(one.run_dir) / "metrics.jsonl")[-1] for one in (alone, instances))
    for figure in DRAFTED:
        assert found[f"perf/spec/{figure}"] == wanted[f"perf/spec/{figure}"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, "instances", "tp2"])
def test_a_resumed_run_drafts_as_well_as_one_that_went_on(
    plan: str | None, place: Path, tiny_folder: Path, plain: Path
) -> None:
    """The last step asks again what an earlier one asked in another stay, and drafts from what was said then. Several
    instances know what any of them has said, before and after."""
    keys = {"sampling.speculation": 4, "checkpoint.every": 2}
    if plan is not None:
        keys |= where(place, f"resumed-{plan}", PLACES[plan])
    through = recipe_of(place, tiny_folder, f"through-{plan}", **keys)
    run(through)
    run(recipe_of(place, tiny_folder, f"resumed-{plan}", **keys, steps=2))
    resumed = recipe_of(place, tiny_folder, f"resumed-{plan}", **keys)
    run(resumed, resume=True)
    assert_equal_runs(Path(resumed.run_dir), plain)
    last, wanted = (read_rows(Path(one.run_dir) / "metrics.jsonl")[-1] for one in (resumed, through))
    for figure in DRAFTED:
        found, least = (row.get(f"perf/spec/{figure}", 0.0) for row in (last, wanted))
        assert found == least
    assert last["perf/spec/accepted_tokens"] > 0


def test_a_resumed_run_without_its_samples_has_lost_drafts_and_nothing_else(
    place: Path, tiny_folder: Path, plain: Path
) -> None:
    """One that has them drafts from what was said before it was stopped."""
    keys = {"sampling.speculation": 4, "checkpoint.every": 2}
    recipe, kept = (recipe_of(place, tiny_folder, name, **keys) for name in ("lost", "kept"))
    run(recipe_of(place, tiny_folder, "lost", **keys, steps=2))
    shutil.copytree(recipe.run_dir, kept.run_dir)
    run(kept, resume=True)
    assert read_rows(Path(kept.run_dir) / "metrics.jsonl")[-1]["perf/spec/acceptance_of_history"] > 0
    texts = {path: path.read_text() for path in (Path(recipe.run_dir) / "samples").glob("step-*.jsonl")}
    gone, *damaged = texts
    gone.unlink()
    for path in damaged:
        path.write_text(texts[path][:100] + "\n")
    run(recipe, resume=True)
    assert "perf/spec/acceptance_of_history" not in read_rows(Path(recipe.run_dir) / "metrics.jsonl")[-1]
    for path, text in texts.items():
        path.write_text(text)
    assert_equal_runs(Path(recipe.run_dir), plain)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, "instances", "tp2"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_what_engines_had_learned_is_taken_up_or_said_to_be_gone(
    plan: str | None,
    is_whole: bool,
    place: Path,
    tiny_folder: Path,
    plain: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    keys: dict[str, Any] = {"sampling.speculation": "adaptive", "checkpoint.every": 2}
    if plan is not None:
        keys |= where(place, f"learned-{plan}", PLACES[plan])
    recipe = recipe_of(place, tiny_folder, f"learned-{plan}-{is_whole}", **keys)
    run(recipe_of(place, tiny_folder, f"learned-{plan}-{is_whole}", **keys, steps=2))
    kept = Path(recipe.run_dir) / "checkpoints/step-2" / NAME
    known = read_known(kept)
    assert [one.instance for one in known] == ([0, 1] if plan == "instances" else [0])
    assert all(one.knowledge.pace is not None and one.knowledge.pace.num_steps > 0 for one in known)
    if not is_whole:
        kept.write_text("{")
    run(recipe, resume=True)
    assert ("what was learned about draft tokens is lost, and learned again" in capfd.readouterr().err) != is_whole
    assert_equal_runs(Path(recipe.run_dir), plain)


def other_tokens(folder: Path) -> Path:
    """A model whose tokenizer has other ids."""
    model = tiny_model("llama", dtype=torch.float32)
    model.tokenizer = tiny_tokenizer()
    model.tokenizer.add_tokens(["another"])
    ids = model.tokenizer.get_vocab()
    assert max(ids.values()) < 320
    save_pretrained(model, folder)
    return folder


def test_a_draft_model_has_the_tokens_of_the_policy(tmp_path: Path, place: Path, tiny_folder: Path) -> None:
    """Here the policy has a token more than the draft model knows."""
    more = other_tokens(tmp_path / "more")
    keys = {"sampling.speculation": "adaptive", "sampling.draft_model": str(tiny_folder)}
    recipe = recipe_of(place, more, "more", **keys)
    said = r"`sampling.draft_model` is `.*tiny`, which drafts tokens for `.*more`, but 1 of these, such as 'another'"
    with pytest.raises(ConfigError, match=said):
        prepare(recipe)
    keys = {"sampling.speculation": 3, "sampling.draft_model": str(tmp_path)}
    none = recipe_of(place, tiny_folder, "none", **keys)
    with pytest.raises(ModelError, match=r"key `sampling.draft_model`: model: "):
        prepare(none)
    nameless = recipe_of(place, tiny_folder, "nameless", **keys | {"sampling.draft_model": ""})
    with pytest.raises(ModelError, match=r"key `sampling.draft_model`: model: expected a known name .* empty name"):
        prepare(nameless)


def test_a_draft_model_is_of_use_only_where_something_is_drafted(place: Path, tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft_model is '.*', but nothing is drafted; set speculation to auto"):
        recipe_of(place, tiny_folder, "off", **{"sampling.speculation": "off", "sampling.draft_model": MODEL})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"sampling.speculation": 4}, "speculation_loss is what auto and adaptive may lose, but speculation is 4"),
        (
            {"sampling.speculation": "off"},
            "speculation_loss is what auto and adaptive may lose, but speculation is off",
        ),
        ({"sampling.engine": "vllm"}, "`sampling.speculation_loss` is 0.1, but `sampling.engine` is vllm"),
    ],
)
def test_what_may_be_lost_is_refused_where_nothing_is(
    place: Path, tiny_folder: Path, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        prepare(recipe_of(place, tiny_folder, "loss", **keys | {"sampling.speculation_loss": 0.1}))


def test_its_seconds_stand_in_plans(place: Path, tiny_folder: Path) -> None:
    """Of a fixed length it drafts in every step; what `adaptive` comes to is known when a run has measured it."""
    sizes, found = SampleLengths(Lengths.fixed(8), Lengths.fixed(8)), {}
    for how in (3, "adaptive"):
        keys = {"sampling.speculation": how, "sampling.draft_model": MODEL}
        ready = prepare(recipe_of(place, tiny_folder, f"plans-{how}", **keys))
        cluster, _ = machine_of(ready.recipe, ready.shape, 1)
        planning = Planning(ready.recipe, ready.flow, ready.models, ready.shapes, cluster, sizes)
        found[how] = planning.costs.call("actor.generate", "decode", Layout.on(range(1)))
    assert found[3].terms["draft model"] > 0
    assert "draft model" not in found["adaptive"].terms


def test_its_weights_and_keys_stand_in_the_forecast(place: Path, tiny_folder: Path) -> None:
    """A model of the policy's shape: as many bytes as that, of each engine that drafts."""
    keys = {"sampling.speculation": "adaptive", "sampling.draft_model": MODEL, "dtype": "float32"}
    prepared = prepare(recipe_of(place, tiny_folder, "forecast", **keys))
    of_run = prepared.flow, prepared.models, prepared.shapes, prepared.plan, prepared.lengths
    (alone,) = memory_of_plan(prepared.recipe, *of_run)
    rows = dict(alone.rows)
    assert rows["draft model: weights (float32)"] == pytest.approx(rows["actor: weights (float32)"], rel=0.01)
    assert rows["draft model: weights packed for decoding"] == packed_bytes(prepared.shape, "float32")
    caches = [size for what, size in rows.items() if "KV cache" in what]
    assert len(caches) == 2
    assert caches[0] == caches[1]
    placed = prepare(recipe_of(place, tiny_folder, "tp2", **keys, **where(place, "forecast-tp2", PLACES["tp2"])))
    parameters = parameters_of(placed.models)
    facts = Facts(placed.recipe, placed.models, placed.shapes, parameters, placed.plan, placed.flow, placed.lengths)
    devices = {rank: [what for what, _ in one.rows] for one in memory_by_device(facts) for rank in one.ranks}
    drafts = {rank: sum("draft model" in what for what in rows) for rank, rows in devices.items()}
    assert drafts == {0: 3, 1: 0}, "the leader drafts, whichever place it has in the instance"
