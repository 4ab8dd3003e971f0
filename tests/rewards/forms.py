"""Reward functions in the three forms, as users of TRL, verl and OpenRLHF write them, and some that fit none."""

from __future__ import annotations

import asyncio

_at_once = asyncio.Semaphore(1)
_client: list[asyncio.AbstractEventLoop] = []


def trl(prompts, completions, completion_ids, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def by_the_step(completions, trainer_state, **columns):
    return [float(trainer_state.global_step)] * len(completions)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {
        "score": float(solution_str == ground_truth),
        "acc": solution_str == ground_truth,
        "seen": [data_source, solution_str, ground_truth, extra_info],
    }


def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """The shape of verl's own scorers."""
    return score if solution_str == ground_truth else format_score


async def judged(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert not kwargs
    return float(len(solution_str))


async def asks_a_service(completions, **columns):
    """Through a client that it keeps from call to call, and that lives in the loop of its first use, one by one."""
    _client.extend([] if _client else [asyncio.get_running_loop()])

    async def asked(text):
        async with _at_once:
            answer = _client[0].create_future()
            _client[0].call_soon(answer.set_result, float(len(text)))
            return await answer

    return await asyncio.gather(*map(asked, completions))


def reads_a_number(solution_str):
    """Logs what it read, as verl's scorers do."""
    return {"score": 0.0, "pred": int(solution_str)}


def partly(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "hint": "x"} if solution_str == "a" else 0.5


def picky(solution_str, **kwargs):
    if solution_str == "bad":
        raise ValueError("cannot read this")
    return {"acc": 1.0} if solution_str == "unscored" else None if solution_str == "skip" else 1.0


def reward_func(queries, prompts, labels, **kwargs):
    """With tensors, as OpenRLHF's example."""
    import torch

    assert not kwargs
    rows = zip(queries, prompts, labels, strict=True)
    rewards = torch.tensor([float(query == prompt + right) for query, prompt, right in rows])
    return {"rewards": rewards, "scores": rewards / 2, "extra_logs": {"length": [len(q) for q in queries], "k": 7.0}}


def in_lists(queries, prompts, labels):
    return [float(query == prompt + right) for query, prompt, right in zip(queries, prompts, labels, strict=True)]


def logs_tuples(queries, prompts):
    return {"rewards": (1.0, 2.0), "scores": (0.5, 1.0), "extra_logs": {"length": tuple(map(len, queries))}}


def column_of_tensor(queries, prompts, labels=None):
    import torch

    return torch.tensor([[float(len(query) - len(prompt))] for query, prompt in zip(queries, prompts, strict=True)])


def wrong_dict(queries, prompts, labels=None):
    return {"reward": [1.0 for _ in queries]}


def wrong_log(queries, prompts, labels=None):
    return {"rewards": [1.0 for _ in queries], "extra_logs": {"x": [1.0]}}


def array(completions, log_extra, **columns):
    import numpy

    log_extra("half", numpy.array([len(text) / 2 for text in completions]))
    return numpy.array([len(text) for text in completions], dtype=numpy.float32)


def acc_too(completions, log_extra, **columns):
    log_extra("acc", ["mine"] * len(completions))
    return [0.0] * len(completions)


# -- none of the three


def two_at_once(completions, solution_str):
    return []


def sees_nothing(prompts, answer):
    return []


def by_position(completions, answer, /):
    return []


def other_names(texts):
    return []


def by_turn(turns, **columns):
    """How many characters each turn of the model has."""
    return [[float(len(said["content"])) for said in of_sample[::2]] for of_sample in turns]


def by_turn_of_verl(solution_str, turns):
    return {"score": tuple(len(said["content"]) for said in turns[::2])}


def by_turn_of_openrlhf(queries, turns):
    import torch

    return {"rewards": [torch.tensor(lengths) for lengths in by_turn(turns)]}


def two_turns(completions):
    return [[1.0, 2.0] for _ in completions]


def picky_by_turn(completions, turns):
    if "bad" in completions:
        raise ValueError("cannot read this")
    return by_turn(turns)
