"""Known texts, and what is likely to come next in one: an index of contexts, looked up for many samples at once.

A text is a chain of *entries*, each a token with the entry before it; texts of one prompt go on from its last entry.
An entry is found by the tokens before it: those of equal hash, for SHORT and for LONG tokens, are chained, the newest
first. A look-up walks at most WALK entries of a chain, compares how many tokens before each are those of the sample,
and weighs the tokens that stand there.

A sample will draw the token whose log-probability plus Gumbel noise is largest, and its noise is known ahead
(`noise_bits`). So of the tokens seen in such contexts, the one with the largest sum is drafted, and the *confidence*
is the chance that no other token reaches it: the largest of all others together is a Gumbel variable as well, with
the logarithm of what probability is left as its place.

Imports no torch. Shapes: N entries, H heads of chains, S slots of samples, B samples asked for, K tokens of a draft,
C cells of acceptance, T tokens said."""

from __future__ import annotations

import math

import numpy as np

from plait.compiled import njit
from plait.kernels.noise_bits import draw_key, gumbel, mix

SHORT, LONG = 2, 5
"""Tokens of the contexts that are indexed."""
WALK = 16
"""Entries of a chain that a look-up reads at most."""
SEEN = 16
"""Tokens before an entry that are compared at most; as many alike are as good as all."""

OWN, SIBLING, EARLIER, MODEL = 0, 1, 2, 3
"""Where a draft comes from: the sample's own text and its prompt; other samples of the prompt; those of before; a draft
model, which looks nothing up."""
NUM_SOURCES = 4
MATCHES = (3, 4, 6, 10, 16)
"""A context that is as long or longer counts as another kind of context: 2, 3, 4–5, 6–9, 10–15, 16 and more tokens."""
NUM_MATCHES = len(MATCHES) + 1
NUM_CONFIDENCES = 10
"""Equal parts of 0 … 1."""
DEPTHS = (1, 2, 4)
"""Positions in a draft, from 0: 0, 1, 2–3, 4 and more."""
NUM_DEPTHS = len(DEPTHS) + 1
CELLS = (2, NUM_SOURCES, NUM_MATCHES, NUM_DEPTHS, NUM_CONFIDENCES)
"""What acceptance is learned by: greedy or not, source, context, position in the draft, confidence."""

UNKNOWN = 0.4
"""Probability that a token of a prompt is taken to have had."""
LEAST_LEFT = 0.02
"""Probability that is taken to be left for tokens that were not seen, at least."""

_MATCHES, _DEPTHS = np.array(MATCHES), np.array(DEPTHS)


@njit(nogil=True, error_model="numpy")
def _count_reached(bounds, value):
    count = 0
    while count < len(bounds) and value >= bounds[count]:
        count += 1
    return count


@njit(nogil=True, error_model="numpy")
def _index(entry, root, count, tokens_N, before_N, heads_H, chain_N):
    """Put an entry in front of the chain of the `count` tokens before it, if there are as many."""
    key, at = root + np.uint64(count), before_N[entry]
    for _ in range(count):
        if at < 0:
            return
        key = mix(key + np.uint64(tokens_N[at]))
        at = before_N[at]
    head = np.int64(key & np.uint64(len(heads_H) - 1))
    chain_N[entry] = heads_H[head]
    heads_H[head] = entry


@njit(nogil=True, error_model="numpy")
def append(
    token_ids_T, probs_T, owner, root, end, used, tokens_N, before_N, probs_N, owners_N, chains_2N, heads_2H
):  # fmt: skip
    """Append tokens to a text; its new last entry.

    Args:
        probs_T: that they had when they were drawn; 0: not known.
        owner: number of the text.
        root: hash of the prompt.
        end: the last entry of the text so far; -1: it begins.
        used: entries that there are; those from it on are written.
    """
    for i in range(len(token_ids_T)):
        entry = used + i
        tokens_N[entry], before_N[entry], probs_N[entry], owners_N[entry] = token_ids_T[i], end, probs_T[i], owner
        chains_2N[0, entry], chains_2N[1, entry] = -1, -1
        _index(entry, root, SHORT, tokens_N, before_N, heads_2H[0], chains_2N[0])
        _index(entry, root, LONG, tokens_N, before_N, heads_2H[1], chains_2N[1])
        end = entry
    return end


@njit(nogil=True, error_model="numpy")
def append_all(
    slots_B, counts_B, token_ids_T, probs_T, used, ends_S, owners_S, roots_S,
    tokens_N, before_N, probs_N, owners_N, chains_2N, heads_2H,
):  # fmt: skip
    """Append what samples have said to their texts, one after another; entries that there are then.

    Args:
        counts_B: tokens of each slot, in `token_ids_T`.
        ends_S: is written; slots at -1 are passed over.
    """
    start = 0
    for row in range(len(slots_B)):
        slot, stop = slots_B[row], start + counts_B[row]
        if ends_S[slot] >= 0:
            ends_S[slot] = append(
                token_ids_T[start:stop], probs_T[start:stop], owners_S[slot], roots_S[slot], ends_S[slot], used,
                tokens_N, before_N, probs_N, owners_N, chains_2N, heads_2H,
            )  # fmt: skip
            used += stop - start
        start = stop
    return used


@njit(nogil=True, error_model="numpy")
def verify_drafts(
    slots_B, counts_B, token_ids_T, drafts_SK, cells_SK, lengths_S, computed_S, at_S, cells_X, places_X, hits_X
):  # fmt: skip
    """Hold what samples have said against what was drafted before: one trial for each draft token of which all before
    were accepted. The last three arguments are written; returns the number of trials, and how many of them were
    computed.

    Args:
        lengths_S: tokens of the draft of each slot; 0 once one of them was wrong.
        computed_S: of these, how many were computed.
        at_S: of these, how many were accepted; is written.
        places_X: of each trial, the position in the draft where it was computed, -1 where it was only looked up.
    """
    num_trials, num_computed, start = 0, 0, 0
    for row in range(len(slots_B)):
        slot, stop = slots_B[row], start + counts_B[row]
        for i in range(start, stop):
            at = at_S[slot]
            if at >= lengths_S[slot]:
                break
            hit = drafts_SK[slot, at] == token_ids_T[i]
            cells_X[num_trials], hits_X[num_trials] = cells_SK[slot, at], hit
            places_X[num_trials] = at if at < computed_S[slot] else -1
            num_computed += at < computed_S[slot]
            num_trials += 1
            at_S[slot] = at + 1
            if not hit:
                lengths_S[slot] = 0
        start = stop
    return num_trials, num_computed


@njit(nogil=True, error_model="numpy")
def remember(
    slots_B, token_ids_BK, cells_BK, drafted_B, computed_B, drafts_SK, cells_SK, lengths_S, computed_S, at_S
):  # fmt: skip
    """Keep what was drafted, to be held against what samples say; the last five arguments are written.

    A draft that was only looked up is followed to its end, before another one takes its place.

    Args:
        drafted_B, computed_B: tokens of each draft, and of these how many are computed.
    """
    for row in range(len(slots_B)):
        slot = slots_B[row]
        if at_S[slot] < lengths_S[slot] and computed_B[row] == 0 and computed_S[slot] == 0:
            continue
        for place in range(drafted_B[row]):
            drafts_SK[slot, place], cells_SK[slot, place] = token_ids_BK[row, place], cells_BK[row, place]
        lengths_S[slot], computed_S[slot], at_S[slot] = drafted_B[row], computed_B[row], 0


@njit(nogil=True, error_model="numpy")
def count_entries(used, owners_N, lengths_O):
    """Add to the lengths of texts the first `used` entries."""
    for entry in range(used):
        lengths_O[owners_N[entry]] += 1


@njit(nogil=True, error_model="numpy")
def keep(used, kept_O, numbers_O, tokens_N, before_N, probs_N, owners_N, places_N):
    """Move the entries of texts that are kept to the front, in their order; how many they are. Chains are not kept.

    Args:
        kept_O: whether each text is; what it goes on from is, then.
        numbers_O: of each text that is kept, its new number.
        places_N: is written: where each entry stands now; -1: nowhere.
    """
    count = 0
    for entry in range(used):
        owner, at = owners_N[entry], before_N[entry]
        if not kept_O[owner]:
            places_N[entry] = -1
            continue
        before_N[count] = places_N[at] if at >= 0 else -1
        tokens_N[count], probs_N[count], owners_N[count] = tokens_N[entry], probs_N[entry], numbers_O[owner]
        places_N[entry] = count
        count += 1
    return count


@njit(nogil=True, error_model="numpy")
def index_again(used, roots_O, tokens_N, before_N, owners_N, chains_2N, heads_2H):
    """All entries from the start, in their order; heads are empty."""
    for entry in range(used):
        root = roots_O[owners_N[entry]]
        chains_2N[0, entry], chains_2N[1, entry] = -1, -1
        _index(entry, root, SHORT, tokens_N, before_N, heads_2H[0], chains_2N[0])
        _index(entry, root, LONG, tokens_N, before_N, heads_2H[1], chains_2N[1])


@njit(nogil=True, error_model="numpy")
def _num_alike(entry, context, num_context, tokens_N, before_N):
    """How many tokens before an entry are those of the context, whose newest is the first."""
    count, at = 0, before_N[entry]
    while count < num_context and at >= 0 and tokens_N[at] == context[count]:
        count += 1
        at = before_N[at]
    return count


@njit(nogil=True, error_model="numpy")
def _gather(context, num_context, root, level, tokens_N, before_N, chains_2N, heads_2H, entries, alike, count):
    """Entries whose context is alike in as many tokens as the level asks for, or more; their number with `count`."""
    length = LONG if level else SHORT
    if num_context < length:
        return count
    key = root + np.uint64(length)
    for i in range(length):
        key = mix(key + np.uint64(context[i]))
    entry = heads_2H[level, np.int64(key & np.uint64(heads_2H.shape[1] - 1))]
    walked = 0
    while entry >= 0 and walked < WALK and count < len(entries):
        num_alike = _num_alike(entry, context, num_context, tokens_N, before_N)
        # What the longer contexts have found already is not counted twice.
        if num_alike >= length and (level or num_alike < LONG):
            entries[count], alike[count] = entry, num_alike
            count += 1
        entry = chains_2N[level, entry]
        walked += 1
    return count


@njit(nogil=True, error_model="numpy")
def _weigh(count, entries, alike, tokens_N, probs_N, seen, weights, means, best):
    """The tokens at these entries: their number; of each weight, mean probability, and the entry with most alike."""
    num_seen = 0
    for i in range(count):
        token, place = tokens_N[entries[i]], 0
        while place < num_seen and seen[place] != token:
            place += 1
        if place == num_seen:
            seen[place], weights[place], means[place], best[place] = token, 0.0, 0.0, i
            num_seen += 1
        weight = np.float64(alike[i] * alike[i])
        prob = np.float64(probs_N[entries[i]])
        weights[place] += weight
        means[place] += weight * (prob if prob > 0 else UNKNOWN)
        if alike[i] > alike[best[place]]:
            best[place] = i
    for place in range(num_seen):
        means[place] /= weights[place]
    return num_seen


@njit(nogil=True, error_model="numpy")
def _likeliest(num_seen, seen, weights, means, key, greedy):
    """The token that the noise of a draw favours: (its place among those seen, confidence)."""
    total, mass = 0.0, 0.0
    for place in range(num_seen):
        total += weights[place]
    for place in range(num_seen):
        # As often as it was seen here, and as likely as it was where it was seen.
        means[place] = math.sqrt(means[place] * weights[place] / total) if num_seen > 1 else means[place]
        mass += means[place]
    scale = 1.0 / mass if mass > 1.0 else 1.0
    top, score = 0, -np.inf
    for place in range(num_seen):
        value = math.log(means[place] * scale)
        if not greedy:
            value += gumbel(key, np.uint64(seen[place]))
        if value > score:
            top, score = place, value
    if greedy:
        return top, min(means[top] * scale, 0.999)
    left = max(1.0 - mass * scale, LEAST_LEFT)
    return top, math.exp(-left * math.exp(-score))


@njit(nogil=True, error_model="numpy")
def _source(owner, own, kinds_O):
    if owner == own or kinds_O[owner] == OWN:
        return OWN
    return kinds_O[owner]


@njit(nogil=True, error_model="numpy")
def propose(
    slots_B, keys_B, places_B, greedy_B, limits_B, least, acceptance_C,
    ends_S, owners_S, roots_S, kinds_O,
    tokens_N, before_N, probs_N, owners_N, chains_2N, heads_2H,
    token_ids_BK, cells_BK, survival_BK, lengths_B,
):  # fmt: skip
    """Propose the next tokens of samples; the last four arguments are written.

    Args:
        keys_B: noise keys of the samples.
        places_B: in the response, of the next token.
        limits_B: tokens of a draft at most.
        least: a draft ends where the chance that all of it is accepted falls below.
        acceptance_C: chance that a draft of each cell is accepted, if all before it are.
        ends_S: last entry of each sample's text; -1: it is not known.
        owners_S, roots_S: number of its text and hash of its prompt.
        kinds_O: of each text: OWN is a prompt, SIBLING a response of now, EARLIER one of before.
        cells_BK: of each draft token, where its acceptance stands.
        survival_BK: chance that it and all before it are accepted.
    """
    most = 2 * WALK
    entries, alike = np.empty(most, np.int64), np.empty(most, np.int64)
    seen, best = np.empty(most, np.int64), np.empty(most, np.int64)
    weights, means = np.empty(most, np.float64), np.empty(most, np.float64)
    context = np.empty(SEEN + token_ids_BK.shape[1], np.int64)
    for row in range(len(slots_B)):
        slot = slots_B[row]
        own, root, at = owners_S[slot], roots_S[slot], ends_S[slot]
        # The newest token of the context stands first: drafts are put in front of what was said.
        first, stop = token_ids_BK.shape[1], token_ids_BK.shape[1]
        while at >= 0 and stop < len(context):
            context[stop] = tokens_N[at]
            stop += 1
            at = before_N[at]
        survival, depth = 1.0, 0
        while depth < min(limits_B[row], token_ids_BK.shape[1]):
            said, num_said = context[first:stop], min(stop - first, SEEN)
            count = _gather(said, num_said, root, 1, tokens_N, before_N, chains_2N, heads_2H, entries, alike, 0)
            count = _gather(said, num_said, root, 0, tokens_N, before_N, chains_2N, heads_2H, entries, alike, count)
            if count == 0:
                break
            num_seen = _weigh(count, entries, alike, tokens_N, probs_N, seen, weights, means, best)
            key = draw_key(keys_B[row], np.uint64(places_B[row] + depth))
            top, confidence = _likeliest(num_seen, seen, weights, means, key, greedy_B[row])
            entry = entries[best[top]]
            cell = np.int64(greedy_B[row]) * NUM_SOURCES + _source(owners_N[entry], own, kinds_O)
            cell = cell * NUM_MATCHES + _count_reached(_MATCHES, alike[best[top]])
            cell = cell * NUM_DEPTHS + _count_reached(_DEPTHS, depth)
            cell = cell * NUM_CONFIDENCES + min(np.int64(confidence * NUM_CONFIDENCES), NUM_CONFIDENCES - 1)
            survival *= acceptance_C[cell]
            if survival < least:
                break
            token_ids_BK[row, depth], cells_BK[row, depth], survival_BK[row, depth] = seen[top], cell, survival
            first -= 1
            context[first] = seen[top]
            depth += 1
        lengths_B[row] = depth
