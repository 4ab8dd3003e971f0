"""Prompts that are computed for other engines: none of their samples begins here.

Words as in `policy.batching`. A prompt that is computed keeps its blocks until it is taken out, so that as many are
computed as have room.
"""

from __future__ import annotations

from plait.policy.room import Room
from plait.policy.sequences import Prompt, Sequences
from plait.policy.step import Chunk


def prompt_chunks(sequences: Sequences, room: Room, budget: int) -> list[Chunk]:
    """What a step computes of prompts, first come, first served. No chunk is read: nobody draws behind it.

    Args:
        budget: tokens of the step at most.
    """
    chunks: list[Chunk] = []
    holds = any(prompt.table for prompt in sequences.prompts.values())
    for prompt in sequences.prompts.values():
        if is_computed(prompt):
            continue
        if budget == 0 or not (prompt.table or room.admit(prompt, idle=not holds)):
            break
        start, holds = prompt.num_computed_tokens, True
        stop = min(prompt.num_tokens, start + budget)
        chunks.append(Chunk(prompt.uid, None, start, stop, tuple(prompt.table), completes=False))
        prompt.num_computed_tokens = stop
        budget -= stop - start
        if is_computed(prompt):
            room.name(prompt, prompt.names)
    return chunks


def due(sequences: Sequences, room: Room, budget: int) -> list[int]:
    """Prompts that the next step will have computed, known before it begins. It may have computed more, where prompts
    share blocks.

    Args:
        budget: as of `prompt_chunks`.
    """
    uids: list[int] = []
    admitted: list[Prompt] = []
    holds = any(prompt.table for prompt in sequences.prompts.values())
    for prompt in sequences.prompts.values():
        if is_computed(prompt):
            continue
        if not prompt.table:
            if holds and not room.may_admit(prompt, admitted):
                break
            admitted.append(prompt)
        holds = True
        budget -= prompt.num_tokens - prompt.num_computed_tokens
        if budget < 0:
            break
        uids.append(prompt.uid)
    return uids


def is_computed(prompt: Prompt) -> bool:
    """Whether all its tokens are."""
    return prompt.num_computed_tokens == prompt.num_tokens


def may_compute(sequences: Sequences, room: Room) -> bool:
    """Whether there is something to compute before a prompt is taken out."""
    prompts = sequences.prompts.values()
    first = next((prompt for prompt in prompts if not is_computed(prompt)), None)
    if first is None:
        return False
    return bool(first.table) or not any(prompt.table for prompt in prompts) or room.may_admit(first)
