"""A role of a flow: its calls, each of which adds a node to the graph."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from plait.dataflow.graph import KEEP, MASK, CallKind, Column, Grain, Level
from plait.dataflow.handles import (
    ColumnHandle,
    Generated,
    Prompts,
    Samples,
    Scores,
    TopLogprobs,
    column_of,
    describe,
    rows_of,
    written_for,
)
from plait.dataflow.options import Asked, GenerateOptions, Resample, Score, ScoreOptions, Top, TrainOptions
from plait.dataflow.tracer import Tracer
from plait.dataflow.unfit import nearest, unfit_partial
from plait.errors import FlowError
from plait.user_code import title_of


class Role:
    """Handle of a role inside a flow: what it can be asked, whatever it is made of and wherever it runs."""

    def __init__(self, name: str, tracer: Tracer, further: Mapping[str, str] = MappingProxyType({})) -> None:
        self.name = name
        self._tracer = tracer
        self._further = further
        """Name of its scores → role, of each further model that scores with it."""

    def __getattr__(self, call: str) -> Any:
        raise FlowError(
            f"role `{self.name}` has no call `{call}`{nearest(call, _CALLS)}; its calls: {', '.join(_CALLS)}"
        )

    def teaches(self) -> None:
        """Say that the flow learns what this role says: a run is refused in which it would be the policy itself, of
        which there is nothing to learn."""
        self._tracer.teachers.add(self.name)

    def generate(
        self,
        prompts: Prompts,
        *,
        greedy: bool = False,
        samples_per_prompt: int | None = None,
        resample: Resample | None = None,
        max_tokens: int | None = None,
    ) -> Generated:
        """Sample responses, to the prompts of the step or to those that were made of samples (`build_prompts`).
        `samples_per_prompt=None` takes the recipe's number; `greedy` takes the likeliest tokens (their log-probs
        are at the sampling temperature all the same); `max_tokens` bounds responses below the recipe's
        `sampling.max_response_tokens`.

        `resample` draws further prompts until enough groups are kept; the step then holds other prompts than those of
        another `generate` call.

        Raises:
            FlowError: an option is wrong.
        """
        if not isinstance(prompts, Prompts):
            raise FlowError(
                f"{self.name}.generate takes the flow's `prompts`, or what `build_prompts` returns, not "
                f"{describe(prompts)}"
            )
        if prompts.node is not None and resample is not None:
            raise FlowError(
                f"{self.name}.generate(resample=…) draws further prompts of the data, but its prompts are made of "
                "samples; give it to the call that draws these"
            )
        if greedy is True and isinstance(samples_per_prompt, int) and samples_per_prompt > 1:
            raise FlowError(
                f"{self.name}.generate(greedy=True) draws the same response each time, so "
                f"`samples_per_prompt={samples_per_prompt}` would give equal samples; leave one of them out"
            )
        node = self._tracer.add(
            f"{self.name}.generate",
            CallKind.GENERATE,
            Grain.SAMPLE,
            role=self.name,
            outputs=(
                ("sampling_logprobs", Level.TOKEN),
                ("finished", Level.SAMPLE),
                ("tokens_left", Level.SAMPLE),
            ),
            options=GenerateOptions(
                samples_per_prompt,
                greedy,
                None if resample is None else _named(resample, f"{self.name}.generate"),
                max_tokens,
                prompts.node,
            ),
        )
        return Generated(self._tracer, node.id)

    def logprobs(self, samples: Samples, *, prompts: Prompts | None = None) -> ColumnHandle:
        """Log-probs of the response tokens under this role's current weights, at the sampling temperature.

        Args:
            prompts: written for these samples (`build_prompts`): the same response tokens are scored behind them; None:
                behind the samples' own.

        Raises:
            FlowError: `prompts` are others. So do the other calls that score.
        """
        return self._score(samples, Score.LOGPROBS, Level.TOKEN, prompts=prompts)

    def entropies(self, samples: Samples, *, prompts: Prompts | None = None) -> ColumnHandle:
        """Entropy, in nats, of the distribution of each response token under this role's current weights, at the
        sampling temperature. A forward of its own, as `logprobs`, and with its `prompts`."""
        return self._score(samples, Score.ENTROPIES, Level.TOKEN, prompts=prompts)

    def top_logprobs(self, samples: Samples, k: int, *, prompts: Prompts | None = None) -> TopLogprobs:
        """The `k` likeliest tokens in the place of each response token under this role's current weights, and their
        log-probs, at the sampling temperature: what a teacher says of a sample beside its token. A forward of its own.

        Args:
            prompts: as of `logprobs`.

        Raises:
            FlowError: `k` is no whole number above 0. (A run checks that the models have so many tokens.)
        """
        what, name = Top(k), f"{self.name}_top"
        if (problem := what.problem) is not None:
            raise FlowError(f"{self.name}.{what}: {problem}")
        outputs = ((f"{name}_ids", Level.TOKEN, k), (f"{name}_logprobs", Level.TOKEN, k + 1))
        return TopLogprobs(*self._scored(samples, what, outputs, prompts=prompts))

    def values(self, samples: Samples, *, prompts: Prompts | None = None) -> ColumnHandle:
        """A critic's value of the state before each response token, behind the `prompts` of `logprobs`."""
        return self._score(samples, Score.VALUES, Level.TOKEN, prompts=prompts)

    def score(self, samples: Samples) -> Scores:
        """One number per sample, from reward functions and reward models; `.of(NAME)` is what one of them gives.

        Each model after the first is a role of its own, with a call of its own, which comes before the call that adds
        up what all give and reads the scores of these models."""
        given = {}
        for name, role in self._further.items():
            given[name] = Role(role, self._tracer)._score(samples, Score.SCORE, Level.SAMPLE).column
        handle = self._score(samples, Score.SCORE, Level.SAMPLE, given)
        return Scores(handle._tracer, handle.column)

    def _score(
        self,
        samples: Samples,
        what: Score,
        level: Level,
        inputs: Mapping[str, Column] = MappingProxyType({}),
        prompts: Prompts | None = None,
    ) -> ColumnHandle:
        return self._scored(samples, what, ((f"{self.name}_{what}", level),), inputs, prompts)[0]

    def _scored(
        self,
        samples: Samples,
        what: Asked,
        outputs: tuple[tuple[str, Level] | tuple[str, Level, int], ...],
        inputs: Mapping[str, Column] = MappingProxyType({}),
        prompts: Prompts | None = None,
    ) -> list[ColumnHandle]:
        rows = rows_of(samples, f"{self.name}.{what}")
        node = self._tracer.add(
            f"{self.name}.{what}",
            CallKind.SCORE,
            Grain.SAMPLE,
            role=self.name,
            rows=rows,
            inputs=dict(inputs),
            outputs=outputs,
            options=ScoreOptions(what, written_for(prompts, rows, f"{self.name}.{what}")),
        )
        return [ColumnHandle(self._tracer, column) for column in node.outputs]

    def train(
        self,
        samples: Samples,
        *,
        loss: Callable[..., Any],
        mini_batches: int = 1,
        epochs: int = 1,
        keep: ColumnHandle | None = None,
        mask: ColumnHandle | None = None,
        whole_groups: bool = False,
        after: int = 0,
        with_next: bool = False,
        **columns: ColumnHandle | None,
    ) -> None:
        """Update this role: `epochs` passes over `mini_batches` mini-batches, one optimizer step each.

        `loss(batch, **columns)` gets, by name, the columns that it asks for. A column given as None is left out, and
        the loss then needs a default for it.

        Samples for which the SAMPLE column `keep` is 0 take no part: neither in the loss nor in any of its
        denominators. Response tokens for which the TOKEN column `mask` is 0 are in neither too. Both are inputs of the
        node under these names, and do not reach the loss.

        Args:
            whole_groups: never split the samples of one prompt over mini-batches or micro-batches (a loss over pairs).
            after: training steps at the beginning of a run in which this call does nothing.
            with_next: make no optimizer step, but leave the gradients of each mini-batch to the next call, a `train` of
                this role too: its i-th step is by the sum of both gradients of the i-th mini-batches.

        Raises:
            FlowError: a column that the loss needs is missing, one is given that it does not take, or an option is
                wrong.
        """
        call = f"{self.name}.train"
        rows = rows_of(samples, call)
        given = {
            name: column_of(handle, rows, f"{call}({name}=…)") for name, handle in columns.items() if handle is not None
        }
        _check_loss(loss, given, call)
        for name, handle, level in ((KEEP, keep, Level.SAMPLE), (MASK, mask, Level.TOKEN)):
            if handle is not None:
                given[name] = column_of(handle, rows, f"{call}({name}=…)")
                if given[name].level is not level or given[name].width is not None:
                    raise FlowError(f"{call}({name}=…) takes one number per {level}, not {given[name]}")
        self._tracer.add(
            call,
            CallKind.TRAIN,
            Grain.BATCH,
            role=self.name,
            rows=rows,
            inputs=given,
            fn=loss,
            options=TrainOptions(mini_batches, epochs, whole_groups, after, with_next),
        )


_CALLS = ("generate", "logprobs", "entropies", "top_logprobs", "values", "score", "train", "teaches")


def _check_loss(loss: Callable[..., Any], given: dict[str, Column], call: str) -> None:
    if not callable(loss):
        raise FlowError(f"{call}: `loss` is a function `loss(batch, …)`, not {describe(loss)}")
    try:
        parameters = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError) as error:
        why = unfit_partial(loss) or f"its parameters cannot be read: {error}"
        raise FlowError(f"{call}: the loss `{title_of(loss)}`: {why}") from None
    title = title_of(loss)
    if not parameters or parameters[0].name != "batch":
        raise FlowError(f"{call}: the first parameter of the loss `{title}` must be `batch`")
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters[1:] if p.kind not in variadic]
    for name in given:
        if name not in names and not takes_any:
            raise FlowError(
                f"{call}: the loss `{title}` takes no column `{name}`{nearest(name, names)}; "
                f"it takes: {', '.join(names) or 'none'}"
            )
    for parameter in parameters[1:]:
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in variadic
        if needed and parameter.name not in given:
            raise FlowError(f"{call}: the loss `{title}` needs the column `{parameter.name}`, which is not given")


def _named(resample: Resample, call: str) -> Resample:
    if not isinstance(resample.reward, Role):
        raise FlowError(
            f"{call}(resample=…): `reward` is the role whose score decides, not {describe(resample.reward)}"
        )
    if resample.max_rounds < 1:
        raise FlowError(f"{call}(resample=…): max_rounds must be at least 1, found {resample.max_rounds}")
    return dataclasses.replace(resample, reward=resample.reward.name)
