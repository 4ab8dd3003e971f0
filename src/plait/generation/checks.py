"""What the engine refuses before it changes anything: calls at a wrong time, samples that do not fit or belong here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import get_args

from plait.errors import CallError, ConfigError, DataError
from plait.generation.request import Request
from plait.generation.settings import SamplingSettings
from plait.generation.transfer import Place, SampleState
from plait.models.language_model import LanguageModel
from plait.policy.batching import Scheduler
from plait.policy.step import Key
from plait.schedule.update_rule import HeldKV


def allow(holds: bool, otherwise: str) -> None:
    """Raises CallError where a call cannot be done now."""
    if not holds:
        raise CallError(otherwise)


def check_kv(kv: HeldKV) -> None:
    """Raises CallError for a word that is no choice."""
    choices = get_args(HeldKV)
    allow(kv in choices, f"kv: expected {' or '.join(map(repr, choices))}, found {kv!r}")


def check_exact(settings: SamplingSettings, model: LanguageModel) -> None:
    """Raises ConfigError where equal bits are asked for on a device that does not promise them."""
    if settings.exact and model.device.type != "cpu":
        raise ConfigError(
            f"sampling.exact: expected a model on the CPU, found {model.device.type}: only there are equal bits "
            "promised; set it to false, or `device` to cpu"
        )


def check_speculation(settings: SamplingSettings, *, keeps_state: bool) -> None:
    """Raises ConfigError where drafts are asked for, and layers of the model are recurrent."""
    if keeps_state and settings.speculation not in ("off", "auto"):
        raise ConfigError(
            f"`sampling.speculation` is {settings.speculation}, but some layers of the model are recurrent: "
            "their states cannot be rolled back where draft tokens are rejected; set it to auto or off"
        )


def check_new(request: Request, pending: Collection[int], started: Collection[Key]) -> None:
    """Raises CallError where samples that a request asks for are in flight, or others of its prompt wait to start."""
    uid = request.prompt.uid
    free = uid not in pending and not any((uid, index) in started for index in request.indices)
    allow(free, f"prompt {uid} is in flight already: wait for its samples, abort them, or give the prompt another uid")


def check_room(scheduler: Scheduler, uid: int, num_tokens: int, most: int) -> None:
    """Raises DataError where the pool is too small for a prompt with a response of so many tokens, alone."""
    if not scheduler.room.fits(num_tokens + most):
        room = scheduler.blocks.num_blocks * scheduler.limits.block_tokens
        raise DataError(
            f"prompt {uid}: expected prompt and response to fit into the {room} tokens of the pool, found {num_tokens} "
            f"and up to {most}; raise `sampling.kv_tokens`"
        )


def check_stages(stages: Sequence[SampleState], place: Place) -> None:
    """Raises where what another engine exported cannot be gone on with here.

    Raises:
        CallError: no stage, or stages of several samples.
        DataError: the sample is of another model, or its keys and values are of another dtype.
    """
    allow(len(stages) > 0, "import_sample: expected the stages of an export, found none")
    last = stages[-1]
    name = f"sample {last.key[0]}.{last.key[1]}"
    if last.model != place.fingerprint:
        raise DataError(
            f"{name}: expected a sample of this model (fingerprint {place.fingerprint}), found one of another "
            f"({last.model}): its tokens and keys mean nothing here; import it where the same model is"
        )
    dtype = str(place.model.dtype).removeprefix("torch.")
    for stage in stages:
        same = stage.key[0] == last.key[0]
        allow(same, f"import_sample: expected stages of prompt {last.key[0]}, found one of {stage.key[0]}")
        if stage.stop > stage.start and stage.dtype != dtype:
            raise DataError(
                f"{name}: expected keys and values in {dtype}, the dtype of this engine's model, found {stage.dtype}; "
                "load both models in one dtype, or export with `until=0`: then all is computed again"
            )
