"""`plait plan` and `plait simulate`, as a user calls them. Models by their shapes: nothing is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from plait.cli import plan as plan_command
from plait.cli import plan_following
from plait.cli.plan_report import why
from plait.cli.plan_text import busy_alike, fullest
from plait.cost.cluster_file import SHIPPED
from plait.cost.kept_profiles import keep_profile
from plait.cost.machine import machine_name
from plait.cost.profile import KindRecord, RunRecord
from plait.models.files.known_shapes import KNOWN
from plait.models.shape import ModelShape
from plait.runtime.prediction import choosing
from plait.schedule.plan import Plan
from plait.schedule.timeline import Span, Timeline
from plait.simulator.step_memory import RankMemory
from plait.simulator.steps import CallRecord, Prediction
from tests.cli.printed import run
from tests.cli.recipes import write_with_reward
from tests.cost.test_gpu_links import of_gpu
from tests.cost.test_profile import PROFILE
from tests.given_plan import leave_others_out

RENTED = Path(__file__).parents[2] / "recipes/clusters/rented.yaml"
ROLES = ("actor", "critic", "ref", "reward")
RECIPE = """
model: llama-2-7b
algorithm: ppo
prompts_per_step: 64
samples_per_prompt: 1
data: {source: prompts.jsonl}
reward: {functions: [rewards.py:brief]}
sampling: {max_response_tokens: 256}
device: cuda
"""


JUDGED = """
from plait.dataflow import parse_grades, build_prompts


def judged(prompts, actor, judge):
    samples = actor.generate(prompts)
    verdicts = judge.generate(build_prompts(samples, asks), samples_per_prompt=2, max_tokens=8)
    actor.train(samples, loss=loss, grades=parse_grades(samples, counts, verdicts=verdicts))


def loss(batch, grades):
    return batch


def asks(completions):
    return completions


def counts(verdicts):
    return [float(len(texts)) for texts in verdicts]
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return write_with_reward(RECIPE, tmp_path / "ppo.yaml")


def test_a_found_plan_is_a_file_that_is_predicted_alike(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--cluster", "4xA100-80G", "--lengths", "64:128~0.5")
    code, out, _ = run(capsys, "plan", recipe, *place, "--seconds", 0.1, "--out", "found.json", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["feasible"] is True
    assert {one["call"] for one in found["calls"]} >= {"actor.generate", "actor.train", "critic.train"}
    assert found["tokens_per_s"] == pytest.approx(64 * (64 + 144) / found["seconds_per_step"], rel=0.1)
    assert all(one["peak_bytes"] == pytest.approx(sum(one["terms"].values()), rel=1e-6) for one in found["memory"])
    assert [one["rank"] for one in found["memory"]] == [0, 1, 2, 3]
    assert {"colocated", "ReaL heuristic", "HybridFlow"} <= {one["name"] for one in found["baselines"]}
    assert 1 <= len(found["alternatives"]) <= 3
    assert all(one["seconds_per_step"] >= found["seconds_per_step"] and one["why"] for one in found["alternatives"])
    plan = Plan.load("found.json")
    assert plan.predicted is not None
    code, out, _ = run(
        capsys,
        "simulate",
        recipe,
        *place,
        "--plan",
        "found.json",
        "--timeline",
        "t.json",
        "--picture",
        "p.svg",
        "--json",
    )
    told = json.loads(out)
    assert told["seconds_per_step"] == pytest.approx(found["seconds_per_step"])
    assert Timeline.load("t.json") == plan.predicted
    assert Path("p.svg").read_text().startswith("<svg")
    code, _, err = run(capsys, "simulate", recipe, *place, "--timeline", "t.json")
    assert code == 2
    assert "--overwrite" in err


MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}


def test_adapters_of_experts_take_their_time_and_memory(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """All 32 experts of each layer, of 1,024 to 1,024 and of 512 to 1,024, with rank 8: 7.3 M numbers."""
    pytest.importorskip("peft")
    (tmp_path / "mixture").mkdir()
    (tmp_path / "mixture/config.json").write_text(json.dumps(MIXTURE))
    place = ("--cluster", "2xA100-80G", "--lengths", "64:128~0.5", "--json", "--model", "mixture", "--lora.rank", 8)
    experts = ("--lora.target_modules", "[all-linear, experts.gate_up_proj, experts.down_proj]")
    code, out, _ = run(capsys, "plan", recipe, *place, *experts, "--seconds", 0.1)
    assert (code, json.loads(out)["feasible"]) == (0, True)
    told = []
    for targets in ((), experts):
        code, out, _ = run(capsys, "simulate", recipe, *place, *targets, "--plan", "colocated")
        assert code == 0
        told.append(json.loads(out))
    assert told[1]["seconds_per_step"] > told[0]["seconds_per_step"]
    adapter = 8 * 32 * 8 * (1024 + 1024 + 512 + 1024)
    linear, both = ([one["terms"]["actor: optimizer state"] for one in each["memory"]] for each in told)
    assert both[0] - linear[0] == 18 * adapter, "weights, gradients, masters and moments"


@pytest.mark.parametrize(
    ("cluster", "ranks", "nodes", "said"),
    [
        ("16xH100", 2, 1, "its `num_ranks` are 2, but the cluster `16xH100` has 16 devices; give --devices 2"),
        ("2xH100", 16, 1, "its `num_ranks` are 16, but the cluster `2xH100` has 2 devices; give --devices 16"),
        ("8xH100", 8, 2, "its `nodes` are 2, but the cluster `8xH100` has 1; give another --cluster"),
    ],
)
def test_a_plan_of_other_devices_is_not_predicted(
    cluster: str, ranks: int, nodes: int, said: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Plan("other", ranks, nodes=nodes).save("other.json")
    place = ("--cluster", cluster, "--lengths", "64:128", "--model", "smollm2-135m")
    code, out, err = run(capsys, "simulate", recipe, *place, "--plan", "other.json")
    assert (code, out) == (2, "")
    assert f"plan `other.json`: {said}" in err


def test_a_plan_whose_file_names_no_nodes_is_on_those_of_the_cluster(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Plan("open", 16).save("open.json")
    Plan("stated", 16, nodes=2).save("stated.json")
    place = ("--cluster", "16xH100", "--lengths", "64:128", "--model", "smollm2-135m", "--json")
    told = [
        json.loads(run(capsys, "simulate", recipe, *place, "--plan", f"{name}.json")[1]) for name in ("open", "stated")
    ]
    assert told[0]["calls"] == told[1]["calls"]
    assert told[0]["seconds_per_step"] == told[1]["seconds_per_step"]


@pytest.mark.parametrize(
    ("device", "model", "tokens", "again", "told"),
    [
        (
            "H100",
            "smollm2-135m",
            16_384,
            False,
            "16,384 tokens, whose activations are kept for the backward, as they fit",
        ),
        (
            "A100-40G",
            "llama-2-7b",
            4_096,
            True,
            "4,096 tokens, whose activations are recomputed in the backward, as they fit",
        ),
    ],
)
def test_a_plan_is_predicted_with_what_a_run_finds_for_its_memory(
    device: str, model: str, tokens: int, again: bool, told: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the second what it is predicted to take where the recipe says so itself."""
    asked = ("simulate", recipe, "--cluster", f"4x{device}", "--plan", "colocated", "--lengths", "64:128")
    asked = (*asked, "--model", model, "--critic.model", "smollm2-135m")
    _, out, _ = run(capsys, *asked, "--json")
    found = json.loads(out)
    assert (found["micro_batch_tokens"], found["checkpoint_activations"]) == (tokens, again)
    stated = ("--micro_batch_tokens", tokens, "--checkpoint_activations", str(again).lower())
    _, out, _ = run(capsys, *asked, *stated, "--json")
    told_by_recipe = json.loads(out)
    for key in ("seconds_per_step", "memory", "calls", "micro_batch_tokens", "checkpoint_activations"):
        assert found[key] == told_by_recipe[key], key
    _, out, _ = run(capsys, *asked)
    assert f"training micro-batches of up to {told}" in " ".join(out.split())


def test_plans_of_others_take_what_they_take_by_themselves(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And what each of them spends more or less time on is said, whether the plan was found or given."""
    place = ("--cluster", "2xH200", "--lengths", "64:128", "--model", "smollm2-135m", "--json")
    code, out, _ = run(capsys, "plan", recipe, *place, "--evaluations", 40)
    assert code == 0
    found = json.loads(out)
    words = {"one mesh": "one-mesh", "ReaL heuristic": "real", "HybridFlow": "hybridflow"}
    named = {one["name"]: one for one in found["baselines"]}
    assert {"colocated", "split", *words} <= set(named)
    for name, one in named.items():
        _, out, _ = run(capsys, "simulate", recipe, *place, "--plan", words.get(name, name))
        told = json.loads(out)
        assert (told["seconds_per_step"], told["feasible"]) == (one["seconds_per_step"], one["feasible"])
        assert one["why"]
        assert one["seconds_per_step"] >= found["seconds_per_step"] or not one["feasible"]
        assert [(other["name"], other["seconds_per_step"]) for other in told["baselines"]] == [
            (other["name"], other["seconds_per_step"]) for other in found["baselines"]
        ]
        for other in told["baselines"]:
            faster = other["seconds_per_step"] < told["seconds_per_step"] * (1 - 1e-9)
            assert other["why"].startswith("faster by") is (faster and other["feasible"])
        assert (told["evaluations"], told["alternatives"]) == (1 + len(named), [])
        assert told["seconds_spent"] > 0


def test_as_many_evaluations_find_the_same_plan(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--cluster", "4xA100-80G", "--lengths", "64:128", "--model", "smollm2-135m", "--json")
    records = []
    for _ in range(2):
        code, out, _ = run(capsys, "plan", recipe, *place, "--evaluations", 20, "--seed", 2)
        assert code == 0
        records.append({key: value for key, value in json.loads(out).items() if key != "seconds_spent"})
    assert records[0] == records[1]
    code, out, _ = run(capsys, "plan", recipe, *place, "--evaluations", 10**6, "--seconds", 0.05)
    assert code == 0
    assert json.loads(out)["evaluations"] < 10**6


def test_a_plan_that_is_left_open_is_said_to_be_searched(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "AUTO_EVALUATIONS", 20)
    ask = ("simulate", recipe, "--cluster", "2xH200", "--lengths", "64:128", "--model", "smollm2-135m")
    code, _, err = run(capsys, *ask, "--plan", "auto")
    assert code == 0
    assert err.startswith("trying 20 plans as a run does, and as many for each variant of the recipe")
    assert run(capsys, *ask, "--plan", "colocated")[2] == ""
    monkeypatch.setattr(plan_command, "SAYS_EVERY_S", 0.0)
    searched, given = (run(capsys, *ask, "--plan", name)[2] for name in ("auto", "colocated"))
    assert re.search(r"\n20 plans tried, the best takes [\d.e-]+ s a step\n", searched)
    assert "\nof the best plans, number 1 of " in searched
    assert "the plan split is predicted\n" in given


def test_a_cluster_with_a_price_says_what_steps_cost(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 steps on the devices of a node, by the price of an hour in the file that ships."""
    leave_others_out(monkeypatch)
    place = ("--cluster", str(RENTED), "--lengths", "64:128", "--plan", "colocated")
    code, out, _ = run(capsys, "simulate", recipe, *place, "--json")
    assert code == 0
    told = json.loads(out)
    assert told["devices"] == 8
    assert told["price_of_1000_steps"] == pytest.approx(2.5 * 8 * told["seconds_per_step"] * 1000 / 3600)
    _, out, _ = run(capsys, "simulate", recipe, *place)
    line = next(line for line in out.splitlines() if line.startswith("1,000 steps"))
    assert line.split()[2] == f"{told['price_of_1000_steps']:,.2f},"


def test_a_cluster_of_two_kinds_says_which_device_each_rank_is(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight H100 of 2.5 an hour, sixteen A100 of 1.5: 44 for an hour of all."""
    leave_others_out(monkeypatch)
    place = ("--cluster", str(RENTED.with_name("two_kinds.yaml")), "--lengths", "64:128", "--plan", "colocated")
    code, out, _ = run(capsys, "simulate", recipe, *place, "--json")
    assert code == 0
    told = json.loads(out)
    assert [row["device"] for row in told["memory"]] == ["H100"] * 8 + ["A100-80G"] * 16
    assert {row["limit_bytes"] for row in told["memory"]} == {80 << 30}
    assert told["price_of_1000_steps"] == pytest.approx(44 * told["seconds_per_step"] * 1000 / 3600)
    _, out, _ = run(capsys, "simulate", recipe, *place)
    assert "at 44 for an hour of all" in out
    assert "(H100)" in out
    assert "(A100-80G)" in out


def test_a_person_gets_a_table(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_following, "visible_devices", lambda: 0)
    code, out, _ = run(capsys, "plan", recipe, "--cluster", "4xH200", "--evaluations", 30)
    assert code == 0
    for words in ("predicted", "actor.generate", "rank 0", "other plans", "plan 2", "split", "tokens"):
        assert words in out
    told = " ".join(out.split())
    assert "responses of 256 (256), as long as they may be: `--lengths` states others" in told
    assert "shares of them; how far off they are is not known; nothing of this was run" in told
    needed = "where there are 4 GPUs: this machine has none"
    beside = f"keep the plan with `--out FILE`; {needed}; with weights in place of the shape llama-2-7b"
    assert told.endswith(f"to follow it {beside} plait train {recipe} --plan FILE")
    place = ("--cluster", "4xH200", "--evaluations", 5, "--lengths", "64:128", "--out", "kept.json")
    _, out, _ = run(capsys, "plan", recipe, "--prompts_per_step", "32", *place)
    assert out.endswith(f"\nplait train {recipe} --prompts_per_step 32 --plan kept.json\n")
    assert "as long as they may be" not in out
    _, out, _ = run(capsys, "simulate", recipe, "--cluster", "4xH200", "--plan", "split", "--lengths", "64:256")
    assert "as long as they may be" not in out


def test_calls_that_differ_share_no_row() -> None:
    """Two roles that take the same time at once, each on a rank of its own, and a third rank as the first."""
    spans = [
        Span(f"{role}.values/b0", "SCORE", rank, 0.0, 1.0, role=role, step=1)
        for rank, role in enumerate(("critic", "reward", "critic"))
    ]
    assert busy_alike(spans) == [[0, 2], [1]]


def test_of_ranks_that_do_the_same_the_fullest_is_shown() -> None:
    """Ranks 0 and 2 score, 1 scores on another device, 3 does nothing."""
    spans = [Span("ref.logprobs/b0", "SCORE", rank, 0.0, 1.0, role="ref", step=1) for rank in (0, 1, 2)]
    memory = [RankMemory(rank, peak, 10, {"ref": peak}) for rank, peak in enumerate((5, 9, 7, 1))]
    shown = fullest(memory, ["large", "small", "large", "large"], spans)
    assert [(ranks, one.peak_bytes) for ranks, one in shown] == [("0,2", 7), ("1", 9), ("3", 1)]


def test_what_explains_most_of_a_difference_is_said_first() -> None:
    """Training beside generation spares 10 s of 22; of each call 1 s of generation is less, or 9 s."""

    def lasting(step_s: float, generation_s: float) -> Prediction:
        calls = [("actor.generate", "DECODE", generation_s), ("actor.train", "TRAIN", 11.0)]
        records = tuple(CallRecord(name, kind, 0.0, seconds, 0) for name, kind, seconds in calls)
        return Prediction(step_s, Timeline(()), records, ())

    slow = lasting(22.0, 11.0)
    assert why(slow, lasting(12.0, 10.0)) == "faster by 10 s: more calls overlap, actor.generate takes 1 s less"
    assert why(slow, lasting(12.0, 2.0)) == "faster by 10 s: actor.generate takes 9 s less"
    assert why(lasting(12.0, 10.0), slow) == "fewer calls overlap, actor.generate takes 1 s more"


def test_a_difference_of_many_calls_is_not_said_to_be_one_of_overlap() -> None:
    """Four calls one after the other, 1 s more each: none overlaps, before or after."""

    def lasting(each_s: float) -> Prediction:
        records = tuple(CallRecord(f"{n}.score", "SCORE", n * each_s, each_s, 0) for n in range(5))
        return Prediction(5 * each_s, Timeline(()), records, ())

    told = "4.score takes 1 s more, 3.score takes 1 s more, others take 3 s more"
    assert why(lasting(2.0), lasting(3.0)) == told


def test_the_rank_that_lacks_room_is_that_of_the_smaller_device(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole models of 7B on devices of 80 and of 40 GiB: each holds as much, in half the room on the latter."""
    link = {"gb_per_s": 200, "latency_us": 5}
    devices = [{"devices": 1, "device": name, "intra": link, "inter": link} for name in ("A100-80G", "A100-40G")]
    Path("two.yaml").write_text(yaml.safe_dump({"nodes": devices, "host": link}))
    code, out, err = run(
        capsys, "simulate", recipe, "--cluster", "two.yaml", "--plan", "colocated", "--tp", 1, "--lengths", "64:128"
    )
    assert code == 0, err
    [line] = [line for line in out.splitlines() if line.startswith("does not fit")]
    assert "rank 1 would hold" in line
    assert line.endswith("of 40.00 GiB")


def test_ranks_that_do_the_same_share_a_row(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, or each half of a split; a link that nothing is seen on has no row."""
    leave_others_out(monkeypatch)
    place = ("--cluster", "8xH200", "--lengths", "64:128")
    for plan, ranks in (("colocated", ["0-7"]), ("split", ["0-3", "4-7"])):
        code, out, _ = run(capsys, "simulate", recipe, *place, "--plan", plan)
        assert code == 0
        assert [line.split()[1] for line in out.splitlines() if "|" in line and "link" not in line] == ranks
        assert "to follow it" not in out


@pytest.mark.parametrize(
    ("devices", "keys", "said"),
    [
        (8, ("--fusion", "0.25"), "scoring may begin beside generation"),
        (8, (), "scoring could begin beside generation, but neither recipe nor plan"),
        (8, ("--fusion", "off"), "scoring could begin beside generation, but neither recipe nor plan"),
        (2, (), "nothing to hide: one instance generates"),
    ],
)
def test_a_table_says_whether_fusion_has_something_to_hide(
    devices: int, keys: tuple[str, ...], said: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A named plan lets nothing be that the recipe does not state."""
    code, out, _ = run(capsys, "simulate", recipe, "--cluster", f"{devices}xH200", "--plan", "split", *keys)
    assert code == 0
    [line] = [line for line in out.splitlines() if line.startswith("fusion")]
    assert said in line


@pytest.mark.parametrize("most", ["0", "1"])
def test_a_found_plan_lets_scoring_begin_beside_generation_of_its_own_batch_or_the_next(
    most: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("--algorithm", "grpo", "--samples_per_prompt", "8", "--options.kl_coef", "0.05", "--max_staleness", most)
    keys += ("--lengths", "64:100~0.9", "--evaluations", "200")
    code, out, err = run(capsys, "plan", recipe, "--cluster", "4xH200", *keys, "--out", f"plan-{most}.json")
    assert code == 0, err
    assert "scoring may begin beside generation" in out
    assert "fusion" in [policy.name for policy in Plan.load(f"plan-{most}.json").policies]


@pytest.mark.parametrize("columns", [60, 120])
def test_it_fits_the_terminal(
    columns: int, recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(capsys, "plan", recipe, "--cluster", "4xA100-80G", "--evaluations", 20)
    assert code == 0
    *lines, command = out.splitlines()
    assert command.startswith("plait train ")
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "--cluster", "4xH10"), "H100"),
        (("plan", "--cluster", "4xH100", "--lengths", "999"), "max_response_tokens"),
        (("plan", "--cluster", "4xH100", "--lengths", "long"), "--lengths"),
        (("plan", "--cluster", "4xH100", "--seconds", "0"), "--seconds"),
        (("plan", "--cluster", "4xH100", "--evaluations", "0"), "--evaluations"),
        (("plan", "--devices", "0"), "--devices"),
        (("plan", "--cluster", "4xH100", "--out", "none/plan.json"), "--out"),
        (("plan", "--cluster", "1xRTX-4090", "--seconds", "0.2"), "has room for"),
        (("simulate", "--cluster", "4xH100", "--plan", "splitt"), "split"),
        (("simulate", "--cluster", "4xH100", "--plan", "hybridflo"), "hybridflow"),
        (("simulate", "--clustr", "4xH100"), "--cluster"),
        (("simulate", "--cluster", "4xH100", "--plan", "colocated", "--tp", "0"), "--tp: expected at least 1"),
        (("simulate", "--cluster", "4xH100", "--plan", "real", "--tp", "2"), "--tp: expected --plan colocated, split"),
        (("simulate", "--cluster", "4xH100", "--plan", "colocated", "--pp", "3"), "expected a multiple of 3"),
        (("simulate", "--cluster", "4xH100", "--plan", "colocated", "--pp", "64"), "64"),
        (("plan", "--cluster", "4xH100", "--prompts_per_stp", "4"), "prompts_per_step"),
        (("plan", "--cluster", "4xH100", "--evaluation", "4"), "did you mean `--evaluations`?"),
        (("plan", "--cluster", "4xH100", "--picture", "p.svg"), "unknown key `picture`"),
        (("simulate", "--cluster", "4xH100", "--seconds", "1"), "unknown key `seconds`"),
        (("simulate", "--cluster", "4xH100", "--pictur", "p.svg"), "did you mean `--picture`?"),
        (("plan", "--cluster", "4xH100", "--plan", "split"), "--plan: a plan is searched here; `plait simulate`"),
        (("plan", "--cluster", "4xH100", "--plan=split"), "--plan: a plan is searched here; `plait simulate`"),
        (("plan", "--cluster", "4xH100", "--sampling.exact", "true"), "`sampling.exact` promises equal bits on a CPU"),
        (("plan", "--cluster", "4xH100", "--dtype", "float64"), "`device` is cuda, where attention is computed in"),
        (
            ("plan", "--cluster", "4xH100", "--device", "cpu"),
            "key `device`: expected cuda, for a cluster of H100",
        ),
        (
            ("plan", "--cluster", str(RENTED.with_name("two_kinds.yaml")), "--device", "cpu"),
            "key `device`: expected cuda, for a cluster of ",
        ),
    ],
)
def test_what_cannot_be_used_is_said_in_one_message(
    words: tuple[str, ...], said: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, words[0], recipe, *words[1:])
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_where_there_is_no_gpu_a_cluster_is_asked_for(
    command: str, recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run(capsys, command, recipe, "--lengths", "64:128")
    assert (code, out) == (2, "")
    assert err.startswith("error: --cluster: `device` of the recipe is cuda, but torch finds no CUDA device here")


def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """H100 that are not there."""
    h100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: h100.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h100)


@pytest.mark.parametrize(("words", "devices"), [((), 4), (("--devices", "2"), 2)])
def test_this_machine_has_as_many_gpus_as_a_run_would_take(
    words: tuple[str, ...], devices: int, recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    four_gpus(monkeypatch)
    code, out, _ = run(capsys, "simulate", recipe, *words, "--lengths", "64:128", "--plan", "colocated", "--json")
    assert code == 0
    assert json.loads(out)["devices"] == devices


@pytest.mark.parametrize("is_kept", [False, True])
def test_where_the_links_of_gpus_are_from_is_said(
    is_kept: bool,
    recipe: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With a profile, in which links were not measured, and without one; nothing where a plan has one GPU."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    leave_others_out(monkeypatch)
    four_gpus(monkeypatch)
    if is_kept:
        keep_profile(of_gpu(shape=ModelShape.from_config(KNOWN["llama-2-7b"], "llama-2-7b")))
    ask = ("simulate", recipe, "--lengths", "64:128", "--plan", "colocated", "--devices")
    said = "links between GPUs not measured, taken as 360 GB/s and 5 us, a share of vendors' numbers of H100"
    source = json.loads(run(capsys, *ask, 2, "--json")[1])["calibration"]["source"]
    assert source.endswith(f"; {said}")
    assert said in " ".join(run(capsys, *ask, 2)[1].split())
    assert "links between" not in json.loads(run(capsys, *ask, 1, "--json")[1])["calibration"]["source"]
    assert source.startswith("what was measured" if is_kept else "vendors' numbers")


def test_keys_of_the_recipe_may_stand_behind_it(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_others_out(monkeypatch)
    place = ("--cluster", "4xA100-80G", "--lengths", "64:128", "--json")
    _, whole, _ = run(capsys, "simulate", recipe, *place, "--plan", "one-mesh")
    code, half, _ = run(capsys, "simulate", recipe, "--prompts_per_step", "32", *place, "--plan", "one-mesh")
    assert code == 0
    seconds = [json.loads(text)["seconds_per_step"] for text in (whole, half)]
    assert seconds[1] < seconds[0]


def test_samples_of_a_step_are_predicted_as_many_at_a_time_as_the_clusters_device_runs(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 samples on four GPUs, 128 on each: at once, or 64 at a time."""
    leave_others_out(monkeypatch)
    place = ("--cluster", "4xA100-80G", "--lengths", "64:128", "--json", "--plan", "one-mesh")
    found = []
    for stated in ((), ("--sampling.max_running", "256"), ("--sampling.max_running", "64")):
        code, out, _ = run(capsys, "simulate", recipe, "--samples_per_prompt", "8", *stated, *place)
        assert code == 0
        found.append(json.loads(out))
    default, many, few = found
    assert default["seconds_per_step"] == many["seconds_per_step"] < few["seconds_per_step"]
    assert default["memory"] == many["memory"] != few["memory"]


def test_of_several_stages_one_is_meant(recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stages = {"first": {"algorithm": "sft"}, "second": {"model": "@first", "algorithm": "grpo", "steps": 1}}
    common = yaml.safe_load(RECIPE) | {"stages": stages, "samples_per_prompt": 2}
    for key in ("algorithm", "sampling"):
        del common[key]
    (tmp_path / "stages.yaml").write_text(yaml.safe_dump(common))
    place = ("--cluster", "2xH100", "--lengths", "64:128", "--json")
    for words, said in (((), "found nothing"), (("--stage", "secnd"), "did you mean `second`")):
        code, _, err = run(capsys, "simulate", "stages.yaml", *place, *words)
        assert code == 2
        assert "first, second" in err
        assert said in err
    code, out, _ = run(capsys, "simulate", "stages.yaml", *place, "--stage", "second")
    assert code == 0
    assert {one["call"] for one in json.loads(out)["calls"]} == {"actor.generate", "actor.train"}
    assert run(capsys, "simulate", recipe, "--stage", "second")[0] == 2


def test_a_reward_model_that_an_earlier_stage_trains_may_score(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_folder: Path
) -> None:
    """Before that a language model of its shape stands there, which has no head for scores."""
    stages = {
        "grader": {"algorithm": "reward_model"},
        "policy": {"algorithm": "ppo", "reward": {"model": "@grader"}, "sampling": {"max_response_tokens": 4}},
    }
    common = {"model": str(tiny_folder), "prompts_per_step": 4, "data": {"source": "prompts.jsonl"}, "stages": stages}
    (tmp_path / "stages.yaml").write_text(yaml.safe_dump(common))
    words = ("--stage", "policy", "--plan", "colocated", "--lengths", "8:4", "--json")
    code, out, err = run(capsys, "simulate", "stages.yaml", *words)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert "reward.score" in {call["call"] for call in found["calls"]}
    assert [variant["name"] for variant in found["variants"]] == ["with max_staleness 1"]


def test_keys_and_values_take_their_share_of_the_cluster_that_is_planned_for(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.3 of 80 GiB, and of 141: what a GPU's pool takes by default, though no GPU is here."""
    for cluster, gib in (("2xH100", 80), ("2xH200", 141)):
        _, out, _ = run(
            capsys, "simulate", recipe, "--cluster", cluster, "--plan", "colocated", "--lengths", "64:128", "--json"
        )
        call = json.loads(out)
        held = [terms.get("actor decode", 0) for terms in (one["terms"] for one in call["memory"])]
        assert max(held) <= 0.3 * gib * 2**30


def test_a_named_plan_is_cut_as_stated(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_others_out(monkeypatch)
    words = ("simulate", recipe, "--cluster", "8xA100-80G", "--plan", "colocated", "--lengths", "64:128", "--json")
    code, out, _ = run(capsys, *words, "--tp", 2, "--pp", 2, "--decode-tp", 4)
    assert code == 0
    cuts = {one["call"]: (one["dp"], one["tp"], one["pp"]) for one in json.loads(out)["calls"]}
    assert cuts.pop("actor.generate") == (2, 4, 1)
    assert set(cuts.values()) == {(2, 2, 2)}
    code, out, _ = run(capsys, *words, "--tp", 8)
    assert {(one["dp"], one["tp"], one["pp"]) for one in json.loads(out)["calls"]} == {(1, 8, 1)}


def test_a_cluster_file_says_how_wrong_predictions_were(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_others_out(monkeypatch)
    text = (SHIPPED / "A100-80G.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text + "calibration: {source: held against ten runs, error: 0.044}\n")
    words = ("simulate", recipe, "--plan", "colocated", "--lengths", "64:128", "--devices", 8)
    code, out, _ = run(capsys, *words, "--cluster", "mine.yaml", "--json")
    assert code == 0
    stated = {"source": "held against ten runs", "error": 0.044, "kinds": {}, "runs": 0, "carried": {}}
    assert json.loads(out)["calibration"] == stated
    assert "held against ten runs; expected to be off by 4%" in run(capsys, *words, "--cluster", "mine.yaml")[1]


def test_runs_on_such_devices_say_how_wrong_they_were_predicted(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    leave_others_out(monkeypatch)
    run_record = RunRecord(devices=8, predicted_s=10.0, measured_s=8.0)
    of_gpu = {"machine": "NVIDIA H100 80GB HBM3", "device": "cuda", "links_over": "nccl"}
    profile = PROFILE.model_copy(update={**of_gpu, "runs": (run_record,)})
    keep_profile(profile)
    words = ("simulate", recipe, "--plan", "colocated", "--lengths", "64:128", "--json")
    found = {
        name: json.loads(run(capsys, *words, "--cluster", name)[1])["calibration"] for name in ("8xH100", "8xH200")
    }
    assert (found["8xH100"]["error"], found["8xH100"]["runs"]) == (0.25, 1)
    assert "1 run on NVIDIA H100 80GB HBM3" in found["8xH100"]["source"]
    assert (found["8xH200"]["error"], found["8xH200"]["runs"]) == (None, 0)


def test_what_one_device_measured_is_carried_to_two_and_said(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three steps took 16 times as long as the profile said: 8 times on two devices, until a run on two says more."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    kinds = {
        kind: KindRecord(profile_s=1.0, predicted_s=1.0, measured_s=16.0) for kind in ("train on 1", "decode on 1")
    }
    alone = RunRecord(devices=1, predicted_s=1.0, measured_s=1.0, kinds=kinds, steps=3)
    shape = ModelShape.from_config(KNOWN["smollm2-135m"], "smollm2-135m")
    profile = PROFILE.model_copy(update={"machine": machine_name("cpu"), "shape": shape, "runs": (alone,)})
    keep_profile(profile)
    words = ("simulate", recipe, "--model", "smollm2-135m", "--device", "cpu", "--threads", 1, "--plan", "colocated")
    ask = (*words, "--lengths", "64:128", "--devices", 2)
    told = json.loads(run(capsys, *ask, "--json")[1])["calibration"]
    assert told["carried"] == {
        "decode on 2": {"of": "decode on 1", "steps": 3, "factor": pytest.approx(8.0)},
        "train on 2": {"of": "train on 1", "steps": 3, "factor": pytest.approx(8.0)},
    }
    shown = " ".join(run(capsys, *ask)[1].split())
    assert "corrected by 1 run on other numbers of devices than 2" in shown
    assert "train on 2 8.00 times as long, carried from train on 1 (3 steps)" in shown
    keep_profile(
        profile.with_run(alone.model_copy(update={"devices": 2, "kinds": {"train on 2": kinds["train on 1"]}}))
    )
    told = json.loads(run(capsys, *ask, "--json")[1])["calibration"]
    assert list(told["carried"]) == ["decode on 2"]


def test_a_pool_beside_other_models_has_what_they_leave(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nine tenths of a device for all weights, state and the pool: named and found plans fit, and hold no more."""
    text = (SHIPPED / "A100-80G.yaml").read_text() + "software: {pool_share: 0.9}\n"
    (tmp_path / "mine.yaml").write_text(text)
    place = ("--cluster", "mine.yaml", "--lengths", "2048:256", "--data.max_prompt_tokens", 2048, "--json")
    many = ("--prompts_per_step", 4096, "--sampling.max_running", 4096, "--sampling.kv_tokens", 10_000_000)
    named = run(capsys, "simulate", recipe, *many, *place, "--devices", 8, "--plan", "colocated", "--tp", 8)
    for code, out, _ in (named, run(capsys, "plan", recipe, *many, *place, "--devices", 8, "--evaluations", 30)):
        told = json.loads(out)
        assert code == 0
        assert told["feasible"]
        decoding = [one["terms"] for one in told["memory"] if "actor decode" in one["terms"]]
        held = [sum(count for what, count in terms.items() if what.startswith(ROLES)) for terms in decoding]
        assert max(held, default=0) <= 0.9 * 80 * 2**30


def test_how_long_prompts_of_a_judge_count_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    leave_others_out(monkeypatch)
    (tmp_path / "flow.py").write_text(JUDGED)
    tree = {**yaml.safe_load(RECIPE), "algorithm": "flow.py:judged", "reward": {"functions": []}}
    Path("judged.yaml").write_text(yaml.safe_dump(tree))
    given = ["simulate", "judged.yaml", "--cluster", "8xH100", "--plan", "colocated", "--lengths", "64:200"]
    said = " ".join(run(capsys, *given)[1].split())
    assert "made judge.generate: prompts of 264 tokens (at most 264), responses of 8 (8)" in said
    assert "prompts of judge.generate count as long as the samples that they are made of, with their own" in said
    assert "count as long as the samples" in json.loads(run(capsys, *given, "--json")[1])["made"]
