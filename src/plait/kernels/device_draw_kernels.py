"""The Triton programs behind `device_draw`. Imports triton; TRITON_INTERPRET=1 runs them on a CPU, for tests.

Four, one after another: `tops` finds the largest logit of each group of neighbouring tokens; `choose` finds from these
the first candidate that is left out, and which candidate is best; `weigh` sums the weights of blocks of tokens, of all
and of the tail; `decide` says whether the tail wins, and which of its tokens. So logits are read twice, and little
else.

How `choose` finds the C-th largest logit: at least C groups have a maximum that is not below the C-th largest maximum,
and fewer than C have a larger one. Only tokens of these are larger themselves: of C − 1 groups, however many tie.

Numbers are looked for bit by bit, among integers in the order of the logits. A temperature divides as IEEE 754 says
(`div_rn`; `/` is an approximation), so that a logit is equal to the threshold that torch found among them.

Shapes: B rows, V tokens of the vocabulary, G groups, S blocks, W places for candidates. `found` is float64 [B, 4]: the
largest logit, that of the first candidate left out, both over the temperature; score and token of the best candidate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait.kernels import noise, noise_bits

GOLDEN, MIX_1, MIX_2 = map(tl.constexpr, (noise_bits.GOLDEN, noise_bits.MIX_1, noise_bits.MIX_2))
SPARE_BITS = tl.constexpr(64 - noise_bits.UNIFORM_BITS)
SCALE = tl.constexpr(2.0**-noise_bits.UNIFORM_BITS)
TAIL_GUMBEL = tl.constexpr(noise.TAIL_GUMBEL & noise_bits.MASK)
TAIL_UNIFORM = tl.constexpr(noise.TAIL_UNIFORM & noise_bits.MASK)
BELOW_ONE = tl.constexpr(1.0 - 2.0**-53)
"""A positive number times this is the next smaller one."""
HIGHEST_BIT, ALL_BITS = tl.constexpr(1 << 31), tl.constexpr((1 << 32) - 1)


@triton.jit
def mix(bits):
    """As `noise.mix`, of uint64."""
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def draw_key(keys, places, row):
    """As `noise.draw_keys`, of a row."""
    key, place = tl.load(keys + row), tl.load(places + row)
    return mix(key.to(tl.uint64, bitcast=True) + (place.to(tl.uint64, bitcast=True) + 1) * GOLDEN)


@triton.jit
def uniform(key, ids):
    """As `noise.uniform`, of uint64."""
    bits = mix(key + mix(ids + GOLDEN)) >> SPARE_BITS
    return (bits.to(tl.float64) + 0.5) * SCALE


@triton.jit
def gumbel(key, ids):
    """Standard Gumbel variables of the same."""
    return -tl.log(-tl.log(uniform(key, ids)))


@triton.jit
def ordered(logits, BITS: tl.constexpr):
    """uint32 in the order of float32 logits, with 0 below all of them; BITS are of use: 16 of a bfloat16."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.uint32, bitcast=True)  # of two zeros neither is larger
    order = tl.where(bits >= HIGHEST_BIT, bits ^ ALL_BITS, bits | HIGHEST_BIT)
    return order >> (32 - BITS)


@triton.jit
def of_ordered(order, BITS: tl.constexpr):
    """The logit of an `ordered`; −∞ of 0."""
    shifted = order << (32 - BITS)
    negative = ((shifted ^ ALL_BITS) >> (32 - BITS)) << (32 - BITS)
    bits = tl.where(shifted >= HIGHEST_BIT, shifted ^ HIGHEST_BIT, negative)
    return tl.where(order == 0, -float("inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def nth_largest(order, count, BITS: tl.constexpr):
    """The largest uint32 that at least `count` of these reach; 0 where they are fewer."""
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 1, tl.uint32) << (BITS - 1)
    for _ in range(BITS):
        trial = found | bit
        reached = tl.sum((order >= trial).to(tl.int32), 0)
        found = tl.where(reached >= count, trial, found)
        bit = bit >> 1
    return found


@triton.jit
def over(logits, temperature, SCALED: tl.constexpr):
    """Logits over the temperature, as float32."""
    logits = logits.to(tl.float32)
    if SCALED:
        logits = tl.div_rn(logits, temperature)
    return logits


@triton.jit(do_not_specialize=["G"])
def tops(logits, row_stride, maxima, V, G, GROUP: tl.constexpr, N: tl.constexpr):
    """Grid (B, ⌈V / N⌉): the largest of each GROUP neighbouring logits, `maxima` [B, G]."""
    row = tl.program_id(0).to(tl.int64)
    group_K = tl.program_id(1) * (N // GROUP) + tl.arange(0, N // GROUP)
    at_KD = group_K[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit_KD = tl.load(logits + row * row_stride + at_KD, mask=at_KD < V, other=-float("inf")).to(tl.float32)
    tl.store(maxima + row * G + group_K, tl.max(logit_KD, 1).to(maxima.dtype.element_ty), mask=group_K < G)


@triton.jit(
    do_not_specialize=["G", "count"],
    do_not_specialize_on_alignment=["keys", "places", "temperatures", "greedy", "thresholds"],
)
def choose(
    logits,
    row_stride,
    maxima,
    keys,
    places,
    temperatures,
    greedy,
    thresholds,
    lists,
    found,
    V,
    G,
    count,
    WIDE_G: tl.constexpr,
    GROUP: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    SCALED: tl.constexpr,
    SOME_GREEDY: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Grid (B,): `found`, the first one left out is the count-th likeliest; a greedy row's has a score of ∞. `lists`:
    int32 [B, 2, W] to write in."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    temperature = 1.0
    if SCALED:
        temperature = tl.load(temperatures + row).to(tl.float32)
    group_G = tl.arange(0, WIDE_G)
    max_G = tl.load(maxima + row * G + group_G, mask=group_G < G, other=-float("inf")).to(tl.float32)
    highest = tl.max(max_G, 0)
    top = over(highest, temperature, SCALED)
    left_out = tl.full((), -float("inf"), tl.float32)
    best = tl.full((), float("inf"), tl.float64)
    token = V - 1
    likeliest = token
    if SOME_GREEDY:
        group = tl.min(tl.where((max_G == highest) & (group_G < G), group_G, G - 1), 0)
        at_D = group * GROUP + tl.arange(0, GROUP)
        raw_D = tl.load(base + at_D, mask=at_D < V, other=-float("inf")).to(tl.float32)
        likeliest = tl.min(tl.where((raw_D == highest) & (at_D < V), at_D, V - 1), 0)
    if not ALL_GREEDY:
        order_G = tl.where(group_G < G, ordered(max_G, BITS), 0)
        least = nth_largest(order_G, count, BITS)
        is_listed_G = order_G > least
        groups = lists + row * 2 * W
        tl.store(groups + tl.cumsum(is_listed_G.to(tl.int32), 0) - 1, group_G, mask=is_listed_G)
        num_groups = tl.sum(is_listed_G.to(tl.int32), 0)
        tl.debug_barrier()  # what other threads of the program have stored
        place_T = tl.arange(0, W * GROUP)
        group_T = tl.load(groups + place_T // GROUP, mask=place_T // GROUP < num_groups, other=G)
        id_T = group_T * GROUP + place_T % GROUP
        raw_T = tl.load(base + id_T, mask=id_T < V, other=-float("inf")).to(tl.float32)
        order_T = tl.where(id_T < V, ordered(raw_T, BITS), 0)
        first_out = tl.maximum(least, nth_largest(order_T, count, BITS))
        left_out = over(of_ordered(first_out, BITS), temperature, SCALED)
        logit_T = over(raw_T, temperature, SCALED)
        is_kept_T = logit_T > left_out
        if FILTERED:
            is_kept_T = is_kept_T & (logit_T >= tl.load(thresholds + row))
        candidates = groups + W
        tl.store(candidates + tl.cumsum(is_kept_T.to(tl.int32), 0) - 1, id_T, mask=is_kept_T)
        num_kept = tl.sum(is_kept_T.to(tl.int32), 0)
        tl.debug_barrier()
        place_W = tl.arange(0, W)
        id_W = tl.load(candidates + place_W, mask=place_W < num_kept, other=0)
        logit_W = over(tl.load(base + id_W), temperature, SCALED)
        key = draw_key(keys, places, row)
        score_W = (logit_W - top).to(tl.float64) + gumbel(key, id_W.to(tl.uint64))
        score_W = tl.where(place_W < num_kept, score_W, -float("inf"))
        best = tl.max(score_W, 0)
        token = tl.min(tl.where((score_W == best) & (place_W < num_kept), id_W, V - 1), 0)
    if SOME_GREEDY:
        is_greedy = True
        if not ALL_GREEDY:
            is_greedy = tl.load(greedy + row) != 0
        token = tl.where(is_greedy, likeliest, token)
        best = tl.where(is_greedy, float("inf"), best)
    tl.store(found + row * 4, top.to(tl.float64))
    tl.store(found + row * 4 + 1, left_out.to(tl.float64))
    tl.store(found + row * 4 + 2, best)
    tl.store(found + row * 4 + 3, token.to(tl.float64))


@triton.jit
def weights(base, at, top, left_out, temperature, threshold, V, SCALED: tl.constexpr, FILTERED: tl.constexpr):
    """The weights of these tokens, and those that the tail has of them; float32."""
    logit = over(tl.load(base + at, mask=at < V, other=-float("inf")), temperature, SCALED)
    weight = tl.exp(logit - top)
    in_tail = (logit <= left_out) & (at < V)
    if FILTERED:
        in_tail = in_tail & (logit >= threshold)
    return weight, tl.where(in_tail, weight, 0.0)


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["temperatures", "thresholds"])
def weigh(
    logits,
    row_stride,
    temperatures,
    thresholds,
    found,
    sums,
    V,
    S,
    N: tl.constexpr,
    SCALED: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Grid (B, S): the weights of N neighbouring tokens summed, of all and of the tail: `sums` float64 [B, 2, S]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature, threshold = 1.0, 0.0
    if SCALED:
        temperature = tl.load(temperatures + row).to(tl.float32)
    if FILTERED:
        threshold = tl.load(thresholds + row)
    top = tl.load(found + row * 4).to(tl.float32)
    left_out = tl.load(found + row * 4 + 1).to(tl.float32)
    at_N = block * N + tl.arange(0, N)
    base = logits + row * row_stride
    weight_N, tail_N = weights(base, at_N, top, left_out, temperature, threshold, V, SCALED, FILTERED)
    tl.store(sums + row * 2 * S + block, tl.sum(weight_N, 0).to(tl.float64))
    tl.store(sums + (row * 2 + 1) * S + block, tl.sum(tail_N.to(tl.float64), 0))


@triton.jit
def first_above(edge, weight, point, WIDE: tl.constexpr):
    """The first place at which the running sum exceeds the point, of those with weight; else the last one of these."""
    place = tl.arange(0, WIDE)
    last = tl.max(tl.where(weight > 0, place, 0), 0)
    return tl.minimum(tl.min(tl.where((edge > point) & (weight > 0), place, WIDE), 0), last)


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["keys", "places", "temperatures", "thresholds"])
def decide(
    logits,
    row_stride,
    keys,
    places,
    temperatures,
    thresholds,
    found,
    sums,
    tokens,
    logprobs,
    V,
    S,
    WIDE_S: tl.constexpr,
    N: tl.constexpr,
    SCALED: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Grid (B,): the best candidate, or the token of the tail where that wins; with its log-prob."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    temperature, threshold = 1.0, 0.0
    if SCALED:
        temperature = tl.load(temperatures + row).to(tl.float32)
    if FILTERED:
        threshold = tl.load(thresholds + row)
    top = tl.load(found + row * 4).to(tl.float32)
    left_out = tl.load(found + row * 4 + 1).to(tl.float32)
    best = tl.load(found + row * 4 + 2)
    token = tl.load(found + row * 4 + 3).to(tl.int32)
    block_S = tl.arange(0, WIDE_S)
    total = tl.sum(tl.load(sums + row * 2 * S + block_S, mask=block_S < S, other=0.0), 0)
    tail_S = tl.load(sums + (row * 2 + 1) * S + block_S, mask=block_S < S, other=0.0)
    tail = tl.sum(tail_S, 0)
    key = draw_key(keys, places, row)
    if tail > 0 and tl.log(tail) + gumbel(key, tl.full((), TAIL_GUMBEL, tl.uint64)) > best:
        edge_S = tl.cumsum(tail_S, 0)
        point = uniform(key, tl.full((), TAIL_UNIFORM, tl.uint64)) * tail
        point = tl.minimum(point, tail * BELOW_ONE)  # a product may round up to the whole
        block = first_above(edge_S, tail_S, point, WIDE_S)
        before = tl.sum(tl.where(block_S == block - 1, edge_S, 0.0), 0)
        at_N = block * N + tl.arange(0, N)
        _, tail_N = weights(base, at_N, top, left_out, temperature, threshold, V, SCALED, FILTERED)
        edge_N = tl.cumsum(tail_N.to(tl.float64), 0)
        token = block * N + first_above(edge_N, tail_N, point - before, N)
    tl.store(tokens + row, token.to(tl.int64))
    logit = over(tl.load(base + token), temperature, SCALED)
    tl.store(logprobs + row, logit - (top + tl.log(total).to(tl.float32)))
