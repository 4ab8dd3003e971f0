"""Flow files that users may write: each as text, and what is said of it, so that hundreds run in seconds.

`TRACED` cannot be loaded or traced; `COMPUTED` and `LOST` are traced, and fail when a function over columns or a loss
is called; `FINE` works. `outcome` does with a file what a run does with it: it loads the flow, traces it, runs its
functions over columns on four samples and its losses on a micro-batch of them.
"""

from __future__ import annotations

from pathlib import Path

import torch

from plait.data.computing import evaluate
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import CallKind, Dataflow, Level
from plait.errors import PlaitError
from plait.models.outputs import Outputs
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.training.loss_batch import MicroBatchLoss, Responses
from plait.training.mini_batch import loss_share
from plait.training.token_means import MiniBatchTotals, TokenMeans

ROLES = ("actor", "ref", "reward", "critic")

WHOLE = """
import numpy as np, torch, sys, os
from plait.dataflow import Level, carried, per_batch, per_group, per_sample

def flow(prompts, actor, reward):
    samples = actor.generate(prompts)
    advantages = per_group(judge, reward.score(samples), name="advantages")
    actor.train(samples, loss=loss, advantages=advantages)

def judge(scores):
    return scores - scores.mean()

def loss(batch, advantages):
    return batch.aggregate(-advantages * batch.logprobs, "token-mean")
"""

ERRORS = {
    "raise ValueError('no')": "ValueError: no",
    "raise KeyError('no')": "KeyError: 'no'",
    "raise StopIteration": "StopIteration",
    "raise MemoryError": "MemoryError",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise GeneratorExit('x') from None": "GeneratorExit",
    "raise BaseException('odd')": "BaseException: odd",
    "raise SystemExit": "SystemExit",
    "sys.exit(0)": "SystemExit: 0",
    "sys.exit('bye')": "SystemExit: bye",
    "exit()": "SystemExit",
    "assert False, 'never'": "AssertionError: never",
    "1 / 0": "ZeroDivisionError: division by zero",
    "undefined_name": "NameError: name 'undefined_name' is not defined",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "from numpy import no_such_name": "ImportError: cannot import name 'no_such_name'",
    "None.attribute": "AttributeError: 'NoneType' object has no attribute",
    "[][0]": "IndexError",
    "'a' + 1": "TypeError",
    "(lambda f: f(f))(lambda f: f(f))": "RecursionError: maximum recursion depth exceeded",
    "raise type('Mine', (Exception,), {'__str__': lambda self: 1 / 0})()": "Mine",
    "raise ExceptionGroup('several', [ValueError('one')])": "ExceptionGroup: several (1 sub-exception)",
    "open('/no/such/file')": "FileNotFoundError",
    "int('x' * 10**5)": "ValueError",
    "eval('(')": "SyntaxError",
    "exec('raise RuntimeError(7)')": "RuntimeError: 7",
    "torch.ones(2) @ torch.ones(3)": "RuntimeError",
    "np.ones(2) @ np.ones(3)": "ValueError",
    "np.linalg.inv(np.zeros((2, 2)))": "LinAlgError: Singular matrix",
}
"""A statement → what it raises, wherever it stands."""


def in_function(name: str, statement: str) -> str:
    """WHOLE with a statement at the beginning of a function."""
    head = next(line for line in WHOLE.splitlines() if line.startswith(f"def {name}("))
    return WHOLE.replace(head, f"{head}\n    {statement}")


def returning(name: str, value: str) -> str:
    """WHOLE with a function that returns this."""
    return in_function(name, f"return {value}")


def calling(call: str) -> str:
    """WHOLE with a flow that makes this call last."""
    return WHOLE.replace("    actor.train(", f"    {call}\n    actor.train(")


def _traced() -> dict[str, tuple[str, str]]:
    found = {f"at import: {code}": (f"{WHOLE}\n{code}\n", said) for code, said in ERRORS.items()}
    found |= {f"in the flow: {code}": (in_function("flow", code), said) for code, said in ERRORS.items()}
    found |= {
        "no Python": ("def flow(:\n", "SyntaxError: invalid syntax"),
        "open bracket": ("x = (1,\n", "SyntaxError: '(' was never closed"),
        "bad indent": ("def flow(prompts):\nreturn 1\n", "IndentationError"),
        "tabs and blanks": ("if 1:\n\tx = 1\n        y = 2\n", "TabError"),
        "a NUL": ("x = 1\0\n", "null bytes"),
        "bad coding": ("# -*- coding: klingon -*-\n", "SyntaxError"),
        "empty": ("", "has no `flow`"),
        "no flow": ("def flwo(): ...\n", "did you mean `flwo`?"),
        "no function": ("flow = 3\n", "is not callable, but int"),
        "a class": (
            "class flow:\n    def __init__(self, nothing): ...\n",
            "is a class; give a function",
        ),
        "async": (WHOLE.replace("def flow", "async def flow"), "expected a plain function"),
        "yield": (in_function("flow", "yield"), "expected a plain function"),
        "trains nothing": ("def flow(prompts, actor): ...\n", "trains nothing"),
        "unknown role": (WHOLE.replace("actor, reward", "actor, rewrad"), "did you mean `reward`?"),
        "required position": (WHOLE.replace("prompts, actor", "prompts, /, actor"), "positional-only"),
        "unknown call": (calling("actor.rain(samples)"), "role `actor` has no call `rain` (did you mean `train`?)"),
        "if on data": (in_function("flow", "if actor.generate(prompts).finished: pass"), "has no values"),
        "sum on data": (in_function("flow", "actor.generate(prompts).logprobs + 1"), "computes with"),
        "loop on data": (in_function("flow", "for _ in actor.generate(prompts).logprobs: pass"), "computes with"),
        "loops for ever, calling": (in_function("flow", "while True: actor.generate(prompts)"), "more than 1000 calls"),
        "100,000 calls": (
            in_function("flow", "for _ in range(10**5): actor.generate(prompts)"),
            "more than 1000 calls",
        ),
        "no loss": (WHOLE.replace("loss=loss, ", ""), "missing 1 required keyword-only argument: 'loss'"),
        "loss is no function": (
            WHOLE.replace("loss=loss", "loss=3"),
            "`loss` is a function `loss(batch, …)`, not a int",
        ),
        "loss of a builtin": (WHOLE.replace("loss=loss", "loss=min"), "the loss `min`"),
        "loss without batch": (WHOLE.replace("loss(batch, ", "loss("), "first parameter of the loss `loss` must be"),
        "loss with another name": (
            WHOLE.replace("batch, advantages)", "batch, advantage)"),
            "did you mean `advantage`?",
        ),
        "loss that needs more": (WHOLE.replace("batch, advantages)", "batch, advantages, x)"), "needs the column `x`"),
        "mini_batches 0": (WHOLE.replace("loss=loss", "loss=loss, mini_batches=0"), "mini_batches must be at least 1"),
        "mini_batches of a text": (
            WHOLE.replace("loss=loss", "loss=loss, mini_batches='2'"),
            "must be a whole number, found '2'",
        ),
        "per_group of no function": (calling("per_group(3, samples.finished, name='x')"), "takes a function first"),
        "per_group of no column": (calling("per_group(judge, 3.0, name='x')"), "takes columns, not a float"),
        "per_group of none": (calling("per_group(judge, name='x')"), "needs at least one column"),
        "per_group of two": (calling("per_group(judge, *[samples.finished] * 2, name='x')"), "cannot be called with"),
        "a name that is none": (calling("per_group(judge, samples.finished, name=3)"), "expected a text as the name"),
        "an empty name": (calling("per_group(judge, samples.finished, name='')"), "printable characters"),
        "a long name": (calling("per_group(judge, samples.finished, name='x' * 999)"), "at most 128 characters"),
        "a name of samples": (calling("per_group(judge, samples.finished, name='uid')"), "has a column `uid` already"),
        "a name of samples of turns": (
            calling("per_group(judge, samples.finished, name='replies')"),
            "has a column `replies` already",
        ),
        "a name of a reward function": (
            calling("per_group(judge, samples.finished, name='rewards/brief')"),
            "what reward functions gave, as all of `rewards/…`; take another",
        ),
        "the name step": (
            calling("per_batch(np.mean, samples.finished, name='step', level=Level.BATCH)"),
            "the name `step` is a column of every log",
        ),
        "carried step": (calling("carried('step', 0.0)"), "the name `step` is a column of every log"),
        "carried text": (calling("carried('x', 'abc')"), "starts with finite numbers"),
        "carried NaN": (calling("carried('x', float('nan'))"), "starts with finite numbers"),
        "options without a class": (
            WHOLE.replace("actor, reward)", "actor, reward, options)"),
            "annotate its parameter",
        ),
        "options of no class": (
            WHOLE.replace("actor, reward)", "actor, reward, options: 3)"),
            "annotation of one class",
        ),
        "options that raise": (
            WHOLE.replace(
                "def flow(prompts, actor, reward)",
                "class O:\n    def __init__(self):\n        1 / 0\ndef flow(prompts, actor, reward, options: O)",
            ),
            "options",
        ),
    }
    return found


NO_NUMBERS = {
    "None": "found None",
    "'abc'": "found 'abc'",
    "object()": "found <object",
    "{}": "found {}",
    "print": "found <built-in",
}
"""What is no number of any kind."""

COMPUTED = {f"in judge: {code}": (in_function("judge", code), said) for code, said in ERRORS.items()} | {
    f"judge gives {value}": (returning("judge", value), said)
    for value, said in {
        **NO_NUMBERS,
        "1.0": "expected one number per sample (2), found an array of shape ()",
        "[1.0]": "found an array of shape (1,)",
        "[1.0, 2.0, 3.0]": "found an array of shape (3,)",
        "scores[:, None]": "found an array of shape (2, 1)",
        "[[1.0], [1.0, 2.0]]": "expected one number per sample (2), found [[1.0], [1.0, 2.0]]",
        "[None, 1.0]": "found [None, 1.0]",
        "['1.0', '2.0']": "found ['1.0', '2.0']",
        "scores * 1j": "found complex numbers",
        "[1j, 2j]": "found complex numbers",
        "[1.0, np.complex128(2)]": "found complex numbers",
        "scores * np.nan": "expected finite numbers, found nan",
        "[1.0, float('inf')]": "expected finite numbers, found inf",
        "[10**400, 1]": "expected",
        "torch.ones(2, requires_grad=True)": "expected one number per sample (2)",
        "torch.ones(2, dtype=torch.complex64)": "found complex numbers",
        "np.array(['2020-01-01'] * 2, dtype='datetime64[D]')": "expected one number per sample (2)",
        "(score for score in scores)": "found <generator",
    }.items()
}

LOST = {f"in loss: {code}": (in_function("loss", code), said) for code, said in ERRORS.items()} | {
    f"loss gives {value}": (returning("loss", value), said)
    for value, said in {
        "None": "must return a scalar tensor of real numbers (see batch.aggregate), found NoneType None",
        "0.0": "found float 0.0",
        "'abc'": "found str 'abc'",
        "np.float64(1)": "found float64",
        "batch.logprobs": "found one of shape (4,) and dtype torch.float32",
        "batch.logprobs.mean()[None]": "found one of shape (1,)",
        "(batch.logprobs * 1j).sum()": "found one of shape () and dtype torch.complex64",
        "torch.tensor(3)": "dtype torch.int64",
        "torch.tensor(3.0)": "has no gradient",
        "batch.logprobs.detach().sum()": "has no gradient",
        "batch.logprob.sum()": "AttributeError: a batch has no `logprob` (did you mean `logprobs`?)",
        "batch.values.sum()": "role `actor` is a language model",
        "batch.aggregate(batch.logprobs, 'mean')": "expected one of token-mean",
        "batch.aggregate(batch.logprobs[:2], 'token-mean')": "expected one value per response token, (4,), found (2,)",
        "batch.aggregate(1.0, 'token-mean')": "expected one value per response token, (4,), found 1.0",
        "batch.log('step', batch.logprobs)": "batch.log: the name `step` is a column of every log",
        "batch.log(3, batch.logprobs)": "batch.log: expected a text as the name, found int 3",
        "batch.log('x' * 999, batch.logprobs)": "at most 128 characters",
        "batch.log('timing_s/x', batch.logprobs)": "is one of plait's own",
        "batch.log('x', 3.0)": "expected one value per response token",
        "batch.log('x', batch.logprobs, per='batch')": "expected per= token, sequence or pair",
    }.items()
}

TRACED = _traced()

FINE = {
    "as it is": WHOLE,
    "prints": in_function("judge", "print('out'); print('err', file=sys.stderr)"),
    "a list": returning("judge", "[1, 2]"),
    "a tuple of booleans": returning("judge", "(True, False)"),
    "a tensor": returning("judge", "torch.tensor([1.0, 2.0])"),
    "float16": returning("judge", "scores.astype(np.float16)"),
    "fractions": returning("judge", "[__import__('fractions').Fraction(1, 3)] * 2"),
    "decimals": returning("judge", "[__import__('decimal').Decimal('0.1')] * 2"),
    "catches its own": in_function("judge", "try: 1 / 0\n    except Exception: pass"),
    "a loss in float64": returning("loss", "batch.logprobs.double().sum()"),
    "starts a thread": in_function("judge", "__import__('threading').Thread(target=int, daemon=True).start()"),
    "a partial": WHOLE.replace("loss=loss", "loss=__import__('functools').partial(loss)"),
    "a callable object": WHOLE.replace("loss=loss", "loss=Loss()")
    + "\nclass Loss:\n    def __call__(self, batch, advantages):\n        return loss(batch, advantages)\n",
}


def outcome(folder: Path, source: str) -> PlaitError | None:
    """What plait says of a flow file; None: it works."""
    file = folder / "mine.py"
    file.write_text(source)
    try:
        _run(trace_algorithm(load_flow(f"{file}:flow"), {}, ROLES))
    except PlaitError as error:
        return error
    return None


def _run(flow: Dataflow) -> None:
    prompts = [Prompt(uid, "q", (1,), {}) for uid in range(2)]
    samples = [Sample(p, i, (i + 3,), (-1.0,), "x", FinishReason.STOP) for p in prompts for i in range(2)]
    rows, values = Rows(tuple(samples)), {}
    for node in flow.nodes:
        match node.kind:
            case CallKind.COMPUTE:
                found = evaluate(
                    node, dict.fromkeys((node.rows, *(c.rows for c in node.inputs.values())), rows), values
                )
                if node.outputs[0].level is Level.BATCH:
                    values[node.outputs[0]] = found
                else:
                    rows = rows.with_column(node.outputs[0], found)
            case CallKind.TRAIN:
                columns = {name: torch.tensor(rows.columns[c]).float() for name, c in node.inputs.items()}
                logprobs_R = torch.full((4,), -1.0, requires_grad=True)
                responses = Responses([1] * 4, logprobs_R.detach())
                batch = MicroBatchLoss(
                    Outputs(logprobs_R, logprobs_R), responses, MiniBatchTotals(4, 4, 8), TokenMeans(4)
                )
                assert node.fn is not None
                loss_share(node.fn, batch, columns)
            case _:
                for column in node.outputs:
                    rows = rows.with_column(column, [1.0, 2.0, 3.0, 5.0])
