"""Real worker processes: scores and their order, and functions that cannot be loaded."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from plait.errors import ConfigError, RunError
from plait.rewards import call_workers
from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.settings import RewardSettings
from tests.cases import slow_but
from tests.processes import until
from tests.rewards import samples
from tests.rewards.pools import score
from tests.rewards.samples import group

EXAMPLE = Path(__file__).parents[2] / "examples" / "length_reward.py"

# -- scores


def test_scores_weights_and_names():
    (one, two) = score(
        [samples.length, "tests.rewards.samples:only_even", samples.Weighted(3.0)],
        group(4, "a", "bb"),
        group(5, "cccc"),
        weights=(1.0, 10.0, 0.5),
    )
    assert list(one.scores) == ["length", "only_even", "Weighted"]
    assert one.scores["length"] == (1.0, 2.0)
    assert one.scores["only_even"][1] == 2.0
    assert math.isnan(one.scores["only_even"][0])
    # 1·1 + 0.5·3, the function that does not apply left out; 1·2 + 10·2 + 0.5·6
    assert one.rewards == (2.5, 25.0)
    assert two.rewards == (4.0 + 40.0 + 6.0,)
    assert one.failures == ()


def test_the_example_runs_as_it_stands():
    """The reward functions of `examples/length_reward.py`, by hand."""
    with RewardPool(reward_functions([f"{EXAMPLE}:brief", f"{EXAMPLE}:close_to_the_answer"], [1.0, 10.0])) as pool:
        pool.start(["prompt", "answer"])
        one, two = pool.score(group(0, "it is 12.", "9", "no", answer="12") + group(1, "x" * 80, answer="blue"))
    assert one.scores["brief"] == (1 - 9 / 64, 1 - 1 / 64, 1 - 2 / 64)
    assert one.scores["close_to_the_answer"] == (1.0, 0.25, 0.0)
    assert two.rewards == (0.0,), "past the longest, and the other does not apply"


def test_groups_are_scored_while_nobody_asks_for_them():
    """A look takes in what the one worker has said and gives it the next; scores are kept for a later poll. Until then
    they are news, which a look between two calls may have taken from the one that waits for them."""
    with RewardPool(reward_functions([samples.length])) as pool:
        for uid in range(3):
            pool.submit(group(uid, "a" * (uid + 1)))
        assert until(lambda: pool.look() is None and pool.news() == ([], math.inf))
        assert pool.num_outstanding == 3
        assert [scores.rewards for scores in sorted(pool.poll(), key=lambda one: one.ticket)] == [
            (1.0,),
            (2.0,),
            (3.0,),
        ]
        assert pool.news() is None


def test_where_nothing_applies_there_is_no_reward_and_no_failure():
    (one,) = score(samples.only_even, group(0, "a", "bb"))
    assert math.isnan(one.rewards[0])
    assert one.rewards[1] == 2.0
    assert one.failures == ()


def test_a_function_sees_trls_arguments():
    (text, messages) = score(
        samples.see,
        group(0, "ab", "c", prompt="why?", answer="x"),
        group(1, "ab", prompt=[{"role": "user", "content": "why?"}], answer=None),
    )
    assert text.extras["seen"] == (["why?", "ab", [0, 1], "x"], ["why?", "c", [0], "x"])
    assert messages.extras["seen"] == (
        [[{"role": "user", "content": "why?"}], [{"role": "assistant", "content": "ab"}], [0, 1], None],
    )


def test_a_function_without_keywords_gets_what_it_names_and_coroutines_are_awaited():
    (one,) = score([samples.chars, samples.later], group(0, "abc", answer="x"))
    assert one.scores == {"chars": (3.0,), "later": (3.0,)}


def test_what_functions_log():
    (one,) = score(samples.logging, group(0, "a", "bb"))
    assert one.extras == {"shout": ("A", "BB")}
    assert one.metrics == {"longest": (2.0,)}


@pytest.mark.parametrize(
    ("logged", "said"),
    [
        ("'m', 'abc'", "log_metric('m', …): expected a finite number, found str 'abc'"),
        ("'m', None", "expected a finite number, found None"),
        ("'m', [1, 2]", "expected a finite number, found list [1, 2]"),
        ("'m', 1j", "expected a finite number, found complex 1j"),
        ("'m', float('nan')", "expected a finite number, found float nan"),
        ("3, 1.0", "log_metric: expected a text as the name, found int 3"),
        ("'', 1.0", "expected a name of printable characters, found ''"),
        ("'a\\nb', 1.0", "expected a name of printable characters"),
        ("'n' * 5000, 1.0", "expected a name of at most 128 characters, found 5000"),
        ("'step', 1.0", "the name `step` is a column of every log; take another, such as `my/step`"),
        ("'timing_s/step', 1.0", "the name `timing_s/step` is one of plait's own"),
    ],
)
def test_what_is_no_metric_is_refused_by_name(tmp_path, logged, said):
    source = f"def f(completions, log_metric, **_):\n    log_metric({logged})\n    return [1.0] * len(completions)\n"
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(RunError) as caught:
        score(f"{tmp_path}/mine.py:f", group(0, "a"))
    assert said in str(caught.value)
    assert "in f\n    log_metric(" in str(caught.value), "the line"


def test_what_a_call_took_is_its_own_time():
    (one, two) = score([samples.length, samples.naps], group(0, "a"), group(1, "b"))
    for result in (one, two):
        assert [call.function for call in result.worked] == ["length", "naps"]
        fast, slow = (call.end_s - call.start_s for call in result.worked)
        assert 0 <= fast < slow, "it does not wait for the other, nor for a worker to start"
        assert slow >= 0.2


@pytest.mark.parametrize("workers", slow_but([3], [1, 3]))
def test_results_do_not_depend_on_order_or_number_of_workers(workers):
    groups = [group(uid, "x" * (uid % 6 + 1), "y") for uid in range(8)]
    random.Random(workers).shuffle(groups)
    functions = reward_functions([samples.slow_length, samples.noisy])
    with RewardPool(functions, RewardSettings(workers=workers), seed=5) as pool:
        tickets = [pool.submit(one) for one in groups]
        assert pool.num_outstanding == 8
        results = pool.wait()
        assert [result.ticket for result in results] == tickets
        assert pool.num_outstanding == 0
    assert [result.samples for result in results] == [tuple(one) for one in groups]
    for result in results:
        uid = result.samples[0].prompt.uid
        assert result.scores["slow_length"] == (float(uid % 6 + 1), 1.0)
        # A function's own random numbers are a function of (seed, its name, the samples).
        drawn = random.Random(f"5/noisy/{uid}.0,{uid}.1")
        assert result.scores["noisy"] == (drawn.random(), drawn.random())


def test_poll_does_not_wait_and_delivers_each_group_once():
    with RewardPool(reward_functions([samples.length])) as pool:
        pool.start()
        assert pool.poll() == []
        pool.submit(group(0, "a"))
        got: list = []
        assert until(lambda: got.extend(pool.poll()) or got)
        assert [result.rewards for result in got] == [(1.0,)]
        assert pool.poll() == []


# -- loading


@pytest.mark.parametrize(
    ("source", "path", "said"),
    [
        ("def reward(**_): return []", "rewards.py:rewrad", "did you mean `reward`"),
        ("reward = 3", "rewards.py:reward", "not callable"),
        ("import no_such_module", "rewards.py:reward", "rewards.py:1: ModuleNotFoundError: No module named"),
        ("x = 1\ndef reward(:", "rewards.py:reward", "rewards.py:2: SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)", "rewards.py:reward", "rewards.py:2: SystemExit: 3"),
        ("raise KeyboardInterrupt", "rewards.py:reward", "rewards.py:1: KeyboardInterrupt"),
        ("def f(): f()\nf()", "rewards.py:reward", "rewards.py:1: RecursionError: maximum recursion depth"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_any_work(tmp_path, source, path, said):
    (tmp_path / "rewards.py").write_text(source)
    with RewardPool(reward_functions([f"{tmp_path}/{path}"])) as pool, pytest.raises(ConfigError) as caught:
        pool.start()
    assert said in str(caught.value)
    assert "src/plait" not in f"{caught.value}{caught.value.frames}", "the user's own frames alone"


def test_a_file_that_hangs_while_it_is_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(call_workers, "IMPORT_LIMIT_S", 1.0)
    (tmp_path / "rewards.py").write_text("import time\ntime.sleep(1000)")
    with (
        RewardPool(reward_functions([f"{tmp_path}/rewards.py:f"])) as pool,
        pytest.raises(ConfigError, match="importing the rewards `f` took more than 1 s") as caught,
    ):
        pool.start()
    assert "rewards.py" in caught.value.frames


def test_a_file_that_kills_its_worker_while_it_is_imported(tmp_path):
    (tmp_path / "rewards.py").write_text("import os; os._exit(5)")
    with (
        RewardPool(reward_functions([f"{tmp_path}/rewards.py:f"])) as pool,
        pytest.raises(ConfigError, match=r"`f` ended its worker process \(exit code 5\) while its file was imported"),
    ):
        pool.start()


def test_a_column_that_a_function_needs_and_the_data_lack():
    with RewardPool(reward_functions([samples.see, "tests.rewards.samples:chars"])) as pool:
        pool.start(["prompt", "answer"])
    (file,) = reward_functions(["tests.rewards.needs:needs_answer"])
    with RewardPool([file]) as pool:
        pool.start(["prompt", "answer"])
        with pytest.raises(ConfigError, match=r"`needs_answer` needs `answer` \(did you mean `answers`\?\)"):
            pool.start(["prompt", "answers"])


def test_siblings_of_a_file_and_its_prints(tmp_path):
    (tmp_path / "sibling.py").write_text("VALUE = 4.0")
    (tmp_path / "mine.py").write_text(
        "import sibling\ndef f(completions, **_):\n    print('hello from the reward')\n    return [sibling.VALUE]\n"
    )
    (one,) = score(f"{tmp_path}/mine.py:f", group(0, "a"), output=tmp_path / "rewards.log")
    assert one.rewards == (4.0,)
    assert (tmp_path / "rewards.log").read_text() == "hello from the reward\n"
