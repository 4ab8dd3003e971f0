"""What a step works on: a prompt instance, and the samples drawn for it. Frozen, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from plait.data.experts import Experts

SYSTEM_ROLES = ("system", "developer")
"""Roles of a message that may stand before all others, and says how the model is to behave."""
IS_ERROR = "is_error"
"""In a message of a tool: it says what went wrong."""
SAMPLE_UID = "sample_uid"
"""Name under which functions of the user's get what tells a sample from all others of a run."""
EVALUATION_UID = 1 << 31
"""First uid of held-out prompts, so that they meet no training prompt of a run."""
MADE_UID = 1 << 40
"""First uid of prompts that are made of samples, so that they meet no prompt of the data."""

Value = TypeVar("Value")


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token or stop string; the response includes it."""
    LENGTH = "length"
    """Truncated at the response limit."""
    ABORTED = "aborted"
    """Given up from outside; as where what replies to it failed (`Sample.reply_error`)."""
    OPEN = "open"
    """Unfinished: it goes on with later weights."""


@dataclass(frozen=True)
class MadeOf:
    """Where a prompt comes from that a function has made of a sample."""

    uid: int
    """That of the prompt of the data with which it began."""
    samples: tuple[tuple[int, int], ...]
    """Each sample that leads from there to it, in order: id of the node that drew it, and its index."""


@dataclass(frozen=True)
class Prompt:
    """One prompt instance: a row of the data set as it is asked at one place of the run.

    Two instances of one row (another epoch) have different uids; groups are keyed by uid, never by text.
    """

    uid: int
    text: str
    """After the chat template."""
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row of the data set, `prompt` as it stood there included; reaches the reward."""
    source: str = ""
    """Label of its source, where the data have several."""
    is_chat: bool = False
    """Whether a chat template wrote `text`."""
    asked: tuple[Mapping[str, Any], ...] = ()
    """The messages that the chat template wrote, with what `data` puts before and around a prompt; of a raw text the
    text, as the user's. Empty where the response is given, and where ranks are told of it."""
    made_of: MadeOf | None = None
    """None: it is of the data; and where ranks are told of it."""

    @property
    def name(self) -> str:
        """What the uids of its samples begin with: its own uid, or that of the sample that it is made of."""
        if self.made_of is None:
            return str(self.uid)
        return ".".join(map(str, (self.made_of.uid, *(index for _, index in self.made_of.samples))))

    @property
    def system(self) -> Mapping[str, Any] | None:
        """The system message that it begins with, if it has one."""
        return next((message for message in self.asked[:1] if message["role"] in SYSTEM_ROLES), None)

    def title(self, index: int | None = None) -> str:
        """What messages call it; or one of its samples, by index."""
        name = shown_uid(self.name)
        if index is not None:
            title = f"sample {name}.{index}"
        else:
            title = f"prompt {name}" if self.made_of is None else f"the prompt made of sample {name}"
        if is_of_evaluation(self.name):
            title += " of the evaluation"
        own = self.columns.get("id")
        return f"{title} (`id` {own})" if isinstance(own, str | int) and str(own) else title


def is_of_evaluation(uid: str) -> bool:
    """Whether the uid of a prompt or a sample is that of an item of an evaluation."""
    first = uid.partition(".")[0]
    return first.isdecimal() and int(first) >= EVALUATION_UID


def shown_uid(uid: str) -> str:
    """A uid as people read it: items of an evaluation are counted from 1."""
    first, point, rest = uid.partition(".")
    return f"{int(first) - EVALUATION_UID + 1}{point}{rest}" if is_of_evaluation(uid) else uid


@dataclass(frozen=True)
class Reply:
    """What a tool, an environment or a user said between two turns of a sample. The model reads it and has not drawn
    it, so it is in no loss and in no column."""

    at: int
    """Tokens of the sample that were drawn before it."""
    token_ids: tuple[int, ...]
    """With all that the chat template writes between the two turns."""


def replies_in(row: Mapping[str, Any]) -> tuple[Reply, ...]:
    """The replies that a record of a sample tells of; none where its `replies` are something else, as a column of the
    data in the output of `plait generate`, or what reward functions logged in folders of earlier versions."""
    told = row.get("replies")
    if not isinstance(told, list) or not all(map(_is_reply, told)):
        return ()
    return unpacked_replies(told)


def packed_replies(replies: Iterable[Reply]) -> list[list[Any]]:
    """As JSON values."""
    return [[reply.at, list(reply.token_ids)] for reply in replies]


def unpacked_replies(told: Iterable[Sequence[Any]]) -> tuple[Reply, ...]:
    """What `packed_replies` gave."""
    return tuple(Reply(at, tuple(token_ids)) for at, token_ids in told)


def _is_reply(told: Any) -> bool:
    if not isinstance(told, list) or len(told) != 2 or not isinstance(told[1], list):
        return False
    return all(type(number) is int and number >= 0 for number in (told[0], *told[1]))


def ranges_of(replies: Iterable[Reply]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of `Sample.all_ids` that are replies."""
    ranges, before = [], 0
    for reply in replies:
        start = reply.at + before
        before += len(reply.token_ids)
        ranges.append((start, reply.at + before))
    return tuple(ranges)


def turn_start(replies: Sequence[Reply]) -> int:
    """The first token of `Sample.all_ids` in the turn behind the replies."""
    return ranges_of(replies)[-1][1] if replies else 0


def drawn_of(values: Sequence[Value], replies: Iterable[Reply]) -> tuple[Value, ...]:
    """Those of tokens that were drawn, of one value for each token of a response."""
    kept, done = list[Value](), 0
    for start, stop in ranges_of(replies):
        kept += values[done:start]
        done = stop
    return (*kept, *values[done:])


def with_replies(
    values: Sequence[Value], replies: Iterable[Reply], of_reply: Callable[[Reply], Iterable[Value]]
) -> tuple[Value, ...]:
    """One value per drawn token, with those of the replies between."""
    spread, done = list[Value](), 0
    for reply in replies:
        spread += [*values[done : reply.at], *of_reply(reply)]
        done = reply.at
    return (*spread, *values[done:])


def logprobs_with(replies: Iterable[Reply], logprobs: Sequence[float]) -> tuple[float, ...]:
    """One per token of a response; 0.0 stands for those of replies, which nobody drew."""
    return with_replies(logprobs, replies, lambda reply: [0.0] * len(reply.token_ids))


def conversation(prompt: Any, said: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a prompt as it stands in the data (of a text, the user's), and what was said behind it. A last
    message of the assistant, which the response goes on from, is one with the first turn."""
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    *before, last = (dict(message) for message in asked)
    first, *others = (dict(message) for message in said)
    if last["role"] == first["role"]:
        return [*before, last | {"content": (last["content"] or "") + first["content"]}, *others]
    return [*before, last, first, *others]


@dataclass(frozen=True)
class Sample:
    """One prompt with one response, of one turn or more. The sampled token ids are kept and never re-tokenised."""

    prompt: Prompt
    index: int
    """0 … samples_per_prompt − 1 within its group."""
    token_ids: tuple[int, ...]
    """What was drawn of the response, its stop tokens included; no token of the prompt, or of a reply."""
    logprobs: tuple[float, ...]
    """Log-probs of the sampled tokens under softmax(logits / temperature), greedy ones' too, from the forward that
    sampled them; where `supports` says so, over what it was drawn from."""
    text: str
    """The response without special tokens, replies included."""
    finish_reason: FinishReason
    policy_version: int = 0
    """Version of the weights that gave its last token."""
    token_versions: tuple[int, ...] | None = None
    """The version of each token, where the weights changed on the way; None: all are of `policy_version`."""
    replies: tuple[Reply, ...] = ()
    """What was said between its turns, in order; none where it has one turn."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """What was said behind the prompt, as messages, where there were several turns; ranks are not told."""
    reply_error: str = ""
    """How the function failed that was to reply to its last turn, which ended it: it has no reward, and is not trained
    on; ranks are not told."""
    supports: tuple[bytes, ...] | None = None
    """For each token what top-k, top-p and min-p had left of the vocabulary to draw it from, as `data.supports` says
    it; None: all of it, for each."""
    experts: Experts | None = None
    """Which experts the engine's routers chose for the tokens of prompt and response; None: nobody has kept that."""

    @property
    def uid(self) -> str:
        return f"{self.prompt.name}.{self.index}"

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy version of each token."""
        return self.token_versions or (self.policy_version,) * len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        """The policy version of its oldest token."""
        return min(self.token_versions or (self.policy_version,))

    @cached_property
    def all_ids(self) -> tuple[int, ...]:
        """The response as models read it: what was drawn, and the replies between."""
        return with_replies(self.token_ids, self.replies, lambda reply: reply.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the response, replies included."""
        return len(self.token_ids) + sum(len(reply.token_ids) for reply in self.replies)

    @property
    def waits(self) -> bool:
        """Whether it is unfinished, and its last turn is over: what follows has not been said."""
        return self.finish_reason is FinishReason.OPEN and bool(self.turns) and self.turns[-1]["role"] == "assistant"

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """For each of its turns, how many tokens were drawn up to its end."""
        return (*(reply.at for reply in self.replies), len(self.token_ids))

    @property
    def token_turns(self) -> tuple[int, ...]:
        """The number of the turn that each of its tokens was drawn in, from 0."""
        starts = (0, *self.turn_ends)
        return tuple(turn for turn, end in enumerate(self.turn_ends) for _ in range(starts[turn], end))

    @property
    def ends_with_reply(self) -> bool:
        """Whether nothing was drawn behind its last reply."""
        return bool(self.replies) and self.replies[-1].at == len(self.token_ids)

    @property
    def is_within_turn(self) -> bool:
        """Whether it is unfinished, and its last token was drawn in a turn that is not over."""
        return self.finish_reason is FinishReason.OPEN and not (self.waits or self.ends_with_reply)

    @property
    def places(self) -> tuple[int, ...]:
        """Where in `all_ids` each drawn token is."""
        return drawn_of(range(self.num_tokens), self.replies)

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """What was said behind the prompt: the assistant's turns, and the replies."""
        return list(self.turns) or [{"role": "assistant", "content": self.text}]
