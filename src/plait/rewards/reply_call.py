"""The function that replies to a turn of the model (`turns.reply`), as a worker process calls it.

    reply(messages, **columns) -> None | str | message | [message, ...]

It is called as a reward function is, for one sample at a time; what it returns travels as a column that it logs. Runs
inside workers: standard library only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from plait.data.records import SAMPLE_UID, conversation
from plait.errors import ConfigError
from plait.rewards.awaiting import settled_together
from plait.rewards.signature import GIVEN, Miscounted, is_coroutine

KEY = "turns.reply"
COLUMN = "reply"
_OWN = ("prompts", "completions", "turns", "log_extra")
"""What the pool gives, whatever the function asks for."""
_OF_REWARDS = frozenset(name for names in GIVEN.values() for name in names if name != SAMPLE_UID)
"""What a reward function gets in one of its forms, and this one does not."""
_TAKEN = ("messages", "completion_ids")
"""What it does not get as a column: the conversation has the one name, and only rewards get the other."""
_EXPECTED = (
    "expected None (the conversation is over), a text, a message such as "
    '{"role": "tool", "content": "…"}, or a list of messages'
)


class ReplyCall:
    """A function of the user's, in the form of a reward: it scores nothing, and logs its reply.

    Raises:
        ConfigError: it has no parameter `messages`, or needs what only a reward function gets.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        parameters = list(inspect.signature(function).parameters.values())
        own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in _OWN]
        kept = [p for p in parameters if p.name not in _OF_REWARDS | {"messages"} and p.kind is not p.VAR_POSITIONAL]
        kept = [p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY) for p in kept]
        named = [p for p in parameters if p.name == "messages" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not named:
            shown = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
            raise ConfigError(f"expected a function reply(messages, **columns), found {function.__name__}{shown}")
        for p in parameters:
            if p.name in _OF_REWARDS and p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                raise ConfigError(
                    f"`{function.__name__}` needs `{p.name}`, which reward functions get; what was said is in "
                    "`messages`: remove the parameter"
                )
        self.__signature__ = inspect.Signature([*own, *kept])
        self._left_out = _TAKEN if any(p.name == SAMPLE_UID for p in kept) else (*_TAKEN, SAMPLE_UID)
        self.awaits = is_coroutine(function)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        turns: Sequence[Sequence[Mapping[str, Any]]],
        log_extra: Callable[[str, Any], None],
        **columns: Sequence[Any],
    ) -> list[None] | Coroutine[Any, Any, list[None]]:
        """The scores of the samples: none has one. To be awaited where the function is.

        Raises:
            Miscounted: the function returned what is no reply.
            Exception: whatever the function raises.
        """
        replies = []
        for place, (prompt, said) in enumerate(zip(prompts, turns, strict=True)):
            own = {name: values[place] for name, values in columns.items() if name not in self._left_out}
            replies.append(self._function(messages=conversation(prompt, said), **own))
        if any(map(inspect.isawaitable, replies)):
            return self._later(replies, log_extra)
        return self._logged(replies, log_extra)

    async def _later(self, replies: list[Any], log_extra: Callable[[str, Any], None]) -> list[None]:
        return self._logged(await settled_together(replies), log_extra)

    def _logged(self, replies: list[Any], log_extra: Callable[[str, Any], None]) -> list[None]:
        log_extra(COLUMN, [_checked(reply) for reply in replies])
        return [None] * len(replies)


def _checked(reply: Any) -> list[dict[str, Any]] | None:
    """What a function returned, as messages."""
    if reply is None:
        return None
    if isinstance(reply, str):
        _check_text(reply)
        return [{"role": "user", "content": reply}]
    messages = [reply] if isinstance(reply, Mapping) else reply
    if not isinstance(messages, list | tuple) or not messages:
        raise Miscounted(f"returned {type(reply).__name__} {reply!r:.60}; {_EXPECTED}")
    for message in messages:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or not isinstance(message.get("content"), str):
            raise Miscounted(f"returned {message!r:.80} as a message, which needs texts as `role` and `content`")
        if message["role"] == "assistant":
            raise Miscounted("returned a message of the role `assistant`: that is the model's; give tool or user")
        _check_text(message["content"])
    return [dict(message) for message in messages]


def _check_text(text: str) -> None:
    """Raises Miscounted where a text has half of a character, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Miscounted(
            f"returned a text with half of a character ({text[error.start : error.end]!a}, a surrogate) at "
            f"{error.start}; remove it, such as with `text.encode(errors='ignore').decode()`"
        ) from None
