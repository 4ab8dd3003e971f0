"""Real worker processes: scores, and every way in which a function can fail."""

import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from plait.errors import ConfigError, RunError
from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.scores import FailureKind
from tests.rewards import samples
from tests.rewards.samples import group

LIMIT_S = 1.0


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that its new parent has not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def score(functions, *groups, weights=(), **options):
    if not isinstance(functions, list):
        functions = [functions]
    with RewardPool(reward_functions(functions, weights), timeout_s=options.pop("timeout_s", 20.0), **options) as pool:
        return pool.score([sample for one in groups for sample in one])


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
    assert (one.failures, one.num_dropped) == ((), 0)


def test_where_nothing_applies_there_is_no_reward_and_no_failure():
    (one,) = score(samples.only_even, group(0, "a", "bb"))
    assert math.isnan(one.rewards[0])
    assert one.rewards[1] == 2.0
    assert (one.failures, one.num_dropped) == ((), 1)


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


@pytest.mark.parametrize("workers", [1, 3])
def test_results_do_not_depend_on_order_or_number_of_workers(workers):
    groups = [group(uid, "x" * (uid % 6 + 1), "y") for uid in range(8)]
    random.Random(workers).shuffle(groups)
    with RewardPool(reward_functions([samples.slow_length, samples.noisy]), workers=workers, seed=5) as pool:
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


# -- failures


@pytest.mark.parametrize(
    ("word", "kind", "said", "trace"),
    [
        ("raise", FailureKind.RAISED, "ValueError: cannot read this", "in faulty"),
        ("exit", FailureKind.RAISED, "SystemExit: 3", "in faulty"),
        ("hang", FailureKind.TIMEOUT, "limit of 1 s (`reward.timeout_s`)", "in faulty"),
        ("hang in C", FailureKind.TIMEOUT, "limit of 1 s", ""),
        ("die", FailureKind.DIED, "exit code 7", ""),
        ("segfault", FailureKind.DIED, "SIGSEGV", "in faulty"),
        ("skip", FailureKind.MISCOUNTED, "0 scores for 1 samples", ""),
        ("bare", FailureKind.MISCOUNTED, "returned float 1.0, expected a list", ""),
        ("nan", FailureKind.NO_SCORE, "returned nan", ""),
        ("inf", FailureKind.NO_SCORE, "returned -inf", ""),
        ("text", FailureKind.NO_SCORE, "returned str '1.0'", ""),
        ("list", FailureKind.NO_SCORE, "returned list [1.0]", ""),
    ],
)
def test_the_culprit_is_found_and_dropped_alone(word, kind, said, trace):
    (bad, good) = score(
        [samples.faulty, samples.length], group(12, "a", word, "cc"), group(13, "d"), on_error="drop", timeout_s=LIMIT_S
    )
    (failure,) = bad.failures
    assert (failure.uid, failure.function, failure.kind) == ("12.1", "faulty", kind)
    assert said in failure.message
    assert trace in failure.traceback
    assert failure.response == word
    assert math.isnan(bad.scores["faulty"][1])
    assert bad.scores["length"] == (1.0, float(len(word)), 2.0)
    assert math.isnan(bad.rewards[1]), "a failed sample has no reward though another function scored it"
    assert (bad.rewards[0], bad.rewards[2], bad.num_dropped) == (2.0, 4.0, 1)
    assert good.rewards == (2.0,)


@pytest.mark.parametrize("word", ["raise", "nan", "die"])
def test_stop_names_the_sample_the_function_and_the_remedy(word):
    with pytest.raises(RunError) as caught:
        score(samples.faulty, group(7, "a", "b", word))
    for words in ("`faulty`", "sample 7.2", f"'{word}'", "reward.on_error: drop"):
        assert words in str(caught.value)
    if word == "raise":
        assert 'raise ValueError("cannot read this")' in str(caught.value), "the worker's own traceback"


def test_several_culprits_in_one_group():
    (one,) = score(samples.faulty, group(0, "raise", "ok", "die", "nan"), on_error="drop")
    assert [(failure.uid, failure.kind) for failure in one.failures] == [
        ("0.0", FailureKind.RAISED),
        ("0.2", FailureKind.DIED),
        ("0.3", FailureKind.NO_SCORE),
    ]
    assert one.rewards[1] == 2.0


def test_a_miscount_that_no_sample_shows_alone_is_everyones():
    (one,) = score(samples.one_for_all, group(0, "a", "b", "c"), on_error="drop")
    assert {failure.kind for failure in one.failures} == {FailureKind.MISCOUNTED}
    assert [failure.uid for failure in one.failures] == ["0.0", "0.1", "0.2"]
    assert one.num_dropped == 3
    with pytest.raises(RunError, match="1 scores for 3 samples, though not for one alone"):
        score(samples.one_for_all, group(0, "a", "b", "c"))


def test_a_failure_that_has_passed_is_told_and_does_not_stop_the_run():
    (one,) = score(samples.crowd_shy, group(3, "a", "b"))
    assert one.rewards == (2.0, 2.0)
    assert one.failures == ()
    assert "too many at once" in one.recovered[0]
    assert "prompt 3" in one.recovered[0]


def test_a_worker_that_died_while_idle_is_replaced():
    with RewardPool(reward_functions([samples.pids])) as pool:
        (one,) = pool.score(group(0, "a"))
        os.kill(one.extras["pid"][0], signal.SIGKILL)
        assert until(lambda: not alive(one.extras["pid"][0]))
        (two,) = pool.score(group(1, "a"))
    assert two.rewards == (0.0,)
    assert two.extras["pid"] != one.extras["pid"]


def test_what_a_function_started_is_killed_with_it(tmp_path):
    (tmp_path / "spawns.py").write_text(
        "import subprocess, time\n"
        "def spawn(completions, **_):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "    time.sleep(1000)\n"
    )
    (one,) = score(f"{tmp_path}/spawns.py:spawn", group(0, "a"), on_error="drop", timeout_s=LIMIT_S)
    assert one.failures[0].kind is FailureKind.TIMEOUT
    assert "spawns.py" in one.failures[0].traceback, "where it hung"
    assert until(lambda: not alive(int((tmp_path / "pid").read_text())))


def test_wait_has_a_deadline():
    with RewardPool(reward_functions([samples.faulty]), timeout_s=60) as pool:
        pool.start()
        pool.submit(group(9, "hang"))
        with pytest.raises(RunError, match="rewards of prompts 9 are not there after 0 s"):
            pool.wait(deadline_s=0.2)


def test_columns_that_cannot_be_sent_are_named():
    with (
        RewardPool(reward_functions([samples.length])) as pool,
        pytest.raises(RunError, match="columns of prompt 0 cannot be sent"),
    ):
        pool.score(group(0, "a", thing=lambda: None))


# -- loading


@pytest.mark.parametrize(
    ("source", "path", "said"),
    [
        ("def reward(**_): return []", "rewards.py:rewrad", "did you mean `reward`"),
        ("reward = 3", "rewards.py:reward", "not callable"),
        ("import no_such_module", "rewards.py:reward", "No module named 'no_such_module'"),
        ("def reward(:", "rewards.py:reward", "SyntaxError"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_any_work(tmp_path, source, path, said):
    (tmp_path / "rewards.py").write_text(source)
    with RewardPool(reward_functions([f"{tmp_path}/{path}"])) as pool, pytest.raises(ConfigError) as caught:
        pool.start()
    assert said in str(caught.value)


def test_a_file_that_kills_its_worker_while_it_is_imported(tmp_path):
    (tmp_path / "rewards.py").write_text("import os; os._exit(5)")
    with (
        RewardPool(reward_functions([f"{tmp_path}/rewards.py:f"])) as pool,
        pytest.raises(RunError, match=r"exit code 5.* while its file was imported"),
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


# -- processes


def test_workers_import_nothing_heavy():
    (one,) = score("tests.rewards.samples:modules", group(0, "a"))
    assert one.extras["heavy"] == ([],)


def test_no_process_is_left_after_close_or_an_exception():
    seen: list[int] = []

    def use_and_fail():
        with RewardPool(reward_functions([samples.pids]), workers=2) as pool:
            for result in pool.score(group(0, "a") + group(1, "b") + group(2, "c")):
                seen.append(result.extras["pid"][0])
            pool.submit(group(3, "d"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use_and_fail()
    assert seen
    assert not any(alive(pid) for pid in seen)


def test_close_ends_a_hung_worker_and_may_be_called_again(tmp_path):
    pool = RewardPool(reward_functions([samples.pids, samples.faulty]), timeout_s=100)
    (one,) = pool.score(group(0, "a"))
    pool.submit(group(1, "hang in C"))
    pool.poll()
    pool.close()
    assert not alive(one.extras["pid"][0])
    pool.close()
    with pytest.raises(AssertionError, match="closed"):
        pool.submit(group(2, "a"))


SCRIPT = """
import os, signal, sys, time
from tests.rewards.samples import group
from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool

def in_the_script(completions, log_extra, **columns):
    log_extra("pid", [os.getpid()] * len(completions))
    return [4.0] * len(completions)

if __name__ == "__main__":
    functions = reward_functions([in_the_script, "tests.rewards.samples:faulty"])
    with RewardPool(functions, timeout_s=100) as pool:
        one, = pool.score(group(0, "abc"))
        pool.submit(group(1, sys.argv[1]))
        interrupts = []
        signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
        print(one.rewards[0], one.extras["pid"][0], flush=True)
        while True:
            time.sleep(0.05)
            pool.poll()
            if interrupts:
                print("interrupted", pool.num_outstanding, flush=True)
                interrupts.clear()
"""


def start_script(tmp_path, word):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), word],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )
    assert process.stdout is not None
    reward, pid = process.stdout.readline().split()
    assert float(reward) == 7.0, "a function of the script itself: 4, and 3 of the other"
    return process, int(pid)


@pytest.mark.parametrize("word", ["hang", "hang in C"])
def test_workers_die_with_a_parent_that_is_killed(tmp_path, word):
    process, worker = start_script(tmp_path, word)
    assert alive(worker)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    assert until(lambda: not alive(worker))
    process.stdout.close()


def test_ctrl_c_reaches_the_parent_only(tmp_path):
    process, worker = start_script(tmp_path, "hang")
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to the whole foreground group
    os.kill(worker, signal.SIGINT)
    assert process.stdout.readline().split() == ["interrupted", "1"]
    assert alive(worker)
    process.kill()
    process.wait(timeout=10)
    assert until(lambda: not alive(worker))
    process.stdout.close()


def test_a_script_that_starts_a_run_when_imported_is_stopped(tmp_path):
    (tmp_path / "unguarded.py").write_text(
        "from plait.rewards.functions import reward_functions\n"
        "from plait.rewards.pool import RewardPool\n"
        "def f(completions, **_): return [1.0]\n"
        "with RewardPool(reward_functions([f])) as pool: pool.start()\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "unguarded.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "if __name__ == '__main__'" in done.stderr
