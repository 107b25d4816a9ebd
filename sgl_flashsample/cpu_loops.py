"""The loops of the cpu path, compiled by Numba: one token per row of logits in host memory. Needs Numba, so
``cpu_path.py``, which checks the arguments, imports this file when it is first called.

The mathematics is that of ``kernels/rng.py`` and ``kernels/truncation_math.py``. What differs is what is computed at
all. A group's score is at most its largest logit, log(16) and its noise, and the noise is at most what the upper 32 of
its 64 bits allow. So of a group of 16 logits mostly one question is asked, whether any of them is above a number, and
the few groups with such a logit are scored in float64. Philox runs for every group: the noise can be as large as 45,
more than logits usually differ, so no group can be ruled out by its logits alone.

A truncated row is read for the largest logit of each group and, where that does not settle top-p, once more for the
mass. What k block maxima reach, k logits reach, and likewise for mass: so the limits of top-k and top-p are looked for
among the maxima of blocks of 256 ids, then among the maxima of the groups in blocks that reach it, then among the
logits of the groups that reach that. Of the rest nothing is read again.

Words are logits as integers: int32 are the bits of a float32, int16 of a bfloat16, uint16 of a float16. They are
widened in registers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .kernels.params import LARGEST_LOGIT, BatchParams, Edit
from .kernels.rng import GROUP_SIZE, Stream, Unit
from .loops_cache import can_cache, leave_cache

_LIMIT = np.float32(LARGEST_LOGIT)
_LOWEST = np.finfo(np.float32).min
_NONE = np.float32(-np.inf)
_HUGE_SCORE = 2.0**126  # of ``epilogue.py``
_COLDEST, _HOTTEST = BatchParams.MIN_TEMPERATURE, BatchParams.MAX_TEMPERATURE
_CHUNK = 64  # groups whose noise is bounded at once: it stays in the L1 cache
_AHEAD = 128  # groups whose memory is asked for before they are read, while the noise is computed
_BLOCK = 16  # groups of a block
_LOG2_E = 1.0 / math.log(2.0)
_LN_2 = np.float32(math.log(2.0))
_LOG2_GROUP = math.log2(GROUP_SIZE)
# Room for float32 roundings, in bits: of a bound, and of a bound per its size.
_MARGIN = np.float32(0.01)
_RELATIVE = np.float32(2.0**-19)
_ROUNDINGS = 1e-4  # room for those of a sum of weights
# The most that noise and 16 equal logits add to a score, in bits: v is 2**-65 or more.
_MOST_NOISE = np.float32(65 + _LOG2_GROUP) + _MARGIN
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_TOKEN_STREAM = np.uint64(int(Stream.SAMPLE) + 256 * int(Unit.TOKEN))
_GROUP_STREAM = np.uint64(int(Stream.SAMPLE) + 256 * int(Unit.GROUP))
_ADDITIVE, _SCALING, _MASK, _BIAS = (int(flag) for flag in Edit)
# The series of tanh in ``epilogue.soft_cap``, and up to which share of the cap it is taken.
_TANH3, _TANH5, _TANH7, _TANH9 = (np.float32(x) for x in (-1 / 3, 2 / 15, -17 / 315, 62 / 2835))
_SERIES_UP_TO = np.float32(0.25)
# Types that logits are rounded to.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

_FLOAT = ir.FloatType()
_GROUP_OF_FLOATS = ir.VectorType(_FLOAT, GROUP_SIZE)

_CACHES = can_cache()
_compiled = functools.partial(njit, nogil=True, cache=_CACHES, no_cpython_wrapper=True, no_cfunc_wrapper=True)


# --- what Numba has no name for ---------------------------------------------------------------------------------------


@intrinsic
def _float_of_bits(_context, _bits):
    """The float32 of these 32 bits."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], _FLOAT)


@intrinsic
def _bits_of_float(_context, _value):
    """The 32 bits of a float32."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


def _widen(builder, words, dtype, count):
    """LLVM for words as float32. count: lanes of a vector, or 0 for one word."""

    def of(element):
        return ir.VectorType(element, count) if count else element

    if dtype == types.uint16:
        return builder.fpext(builder.bitcast(words, of(ir.HalfType())), of(_FLOAT))
    if dtype == types.int16:
        wide = builder.zext(words, of(ir.IntType(32)))
        shift = ir.Constant(wide.type, [16] * count if count else 16)
        return builder.bitcast(builder.shl(wide, shift), of(_FLOAT))
    return builder.bitcast(words, of(_FLOAT))


@intrinsic
def _logit_of(_context, word):
    """A word as float32."""
    return types.float32(word), lambda context, builder, signature, args: _widen(builder, args[0], signature.args[0], 0)


def _load_group(context, builder, signature, args):
    """LLVM for the words of a group as float32."""
    row, place = args
    dtype = signature.args[0].dtype
    array = context.make_array(signature.args[0])(context, builder, row)
    words = ir.VectorType(ir.IntType(dtype.bitwidth), GROUP_SIZE)
    pointer = builder.bitcast(builder.gep(array.data, [place]), words.as_pointer())
    return _widen(builder, builder.load(pointer, align=dtype.bitwidth // 8), dtype, GROUP_SIZE)


def _splat(builder, value):
    lanes = builder.insert_element(ir.Constant(_GROUP_OF_FLOATS, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), GROUP_SIZE), [0] * GROUP_SIZE)
    return builder.shuffle_vector(lanes, ir.Constant(_GROUP_OF_FLOATS, ir.Undefined), zeros)


@intrinsic
def _any_above(_context, row, _place, _limit):
    """True if any of the 16 words from ``place`` on is above ``limit``; a NaN is not."""

    def generate(context, builder, signature, args):
        logits = _load_group(context, builder, signature, args[:2])
        above = builder.fcmp_ordered(">", logits, _splat(builder, args[2]))
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.IntType(1), [above.type]), f"llvm.vector.reduce.or.v{GROUP_SIZE}i1"
        )
        return builder.call(function, [above])

    return types.boolean(row, types.intp, types.float32), generate


@intrinsic
def _prefetch(_context, row, _place):
    """Ask for the memory of a word, and do not wait: into the L2 cache, which takes more such requests than the L1."""

    def generate(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]), "llvm.prefetch.p0"
        )
        pointer = builder.bitcast(builder.gep(array.data, [args[1]]), byte)
        builder.call(function, [pointer, *(ir.Constant(flag, value) for value in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(row, types.intp), generate


@intrinsic
def _largest(_context, row, _place):
    """The largest of the 16 words from ``place`` on, bounded as logits are; a NaN is none."""

    def generate(context, builder, signature, args):
        logits = _load_group(context, builder, signature, args)
        valid = builder.fcmp_ordered(">", logits, _splat(builder, ir.Constant(_FLOAT, -math.inf)))
        logits = builder.select(valid, logits, _splat(builder, ir.Constant(_FLOAT, -math.inf)))
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOAT, [_GROUP_OF_FLOATS]), f"llvm.vector.reduce.fmax.v{GROUP_SIZE}f32"
        )
        largest = builder.call(function, [logits], fastmath=("nnan",))
        highest = ir.Constant(_FLOAT, float(_LIMIT))
        return builder.select(builder.fcmp_ordered(">", largest, highest), highest, largest)

    return types.float32(row, types.intp), generate


# --- the noise --------------------------------------------------------------------------------------------------------


@_compiled(inline="always")
def _philox(index, position, stream, seed):
    """The first two words of ``rng.philox4x32``, in uint64."""
    c0, c1, c2, c3 = index, position & _LOW, position >> _32, stream
    k0, k1 = seed & _LOW, seed >> _32
    for _ in range(10):
        p0, p1 = (c0 & _LOW) * _M0, (c2 & _LOW) * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1


@_compiled()
def gumbel(index, position, stream, seed):
    """Gumbel(0, 1) in float64, ``reference.gumbel_ref``. All arguments uint64."""
    hi, lo = _philox(index, position, stream, seed)
    if hi < np.uint64(0x80000000):
        v = (float(hi) * 2.0**32 + float(lo) + 0.5) * 2.0**-64
        return -math.log(-math.log1p(-v))
    v = (float(hi ^ _LOW) * 2.0**32 + float(lo ^ _LOW) + 0.5) * 2.0**-64
    return -math.log(-math.log(v))


@_compiled()
def _bound_noise(groups, position, seed, bounds):
    """A number for each group that is not below ``log2(16)`` and its noise in bits; +inf where the upper 32 bits are 0.

    The noise is at most -log(v). The bits of a float32 are a logarithm, up to 0.09 below the true one.
    """
    top = np.float32(127 + 31 + _LOG2_GROUP) + _MARGIN
    for i in range(bounds.size):
        hi, _ = _philox(np.uint64(groups[i]), position, _GROUP_STREAM, seed)
        upper = np.float32(np.int32(hi >> np.uint64(1)))
        rounded = upper * np.float32(1 - 2.0**-20)
        bound = top - np.float32(_bits_of_float(rounded)) * np.float32(2.0**-23)
        bounds[i] = np.float32(np.inf) if upper == np.float32(0) else bound


# --- one row ----------------------------------------------------------------------------------------------------------


@_compiled(fastmath={"contract"})
def _exp2(x):
    """``2**x`` for float32 x in [-126, 0], within 2 ulp; anything for others. Compiles to vectors."""
    shifted = x + np.float32(1.5 * 2.0**23)
    r = x - (shifted - np.float32(1.5 * 2.0**23))
    p = np.float32(1.5252734e-05)  # log(2)**k / k!, from k = 7 on
    p = p * r + np.float32(1.5403530e-04)
    p = p * r + np.float32(1.3333558e-03)
    p = p * r + np.float32(9.6181291e-03)
    p = p * r + np.float32(5.5504109e-02)
    p = p * r + np.float32(2.4022651e-01)
    p = p * r + np.float32(6.9314718e-01)
    p = p * r + np.float32(1.0)
    power = np.int32(_bits_of_float(shifted) << np.int32(23))
    return _float_of_bits(np.int32(_bits_of_float(p) + power))


@_compiled()
def _weight(logit, largest, rate):
    """``exp((logit - largest) / temperature)`` of a bounded ``largest``: 0 of NaN, and of what is no normal float32. A
    logit out of bounds is far from ``largest`` on its side."""
    exponent = (logit - largest) * rate
    weight = _exp2(exponent if exponent < np.float32(0) else np.float32(0))
    return weight if exponent > np.float32(-126) else np.float32(0)


@_compiled(fastmath={"reassoc"})
def _mass(row, largest, rate):
    mass = np.float32(0)
    for i in range(row.size):
        mass += _weight(_logit_of(row[i]), largest, rate)
    return mass


@_compiled()
def _read_group(row, group, vocab_size, logits):
    """Copy the logits of a group, bounded, -inf beyond the last. Returns the largest."""
    largest = _NONE
    for i in range(GROUP_SIZE):
        column = group * GROUP_SIZE + i
        logit = _NONE
        if column < vocab_size:
            logit = min(_logit_of(row[column]), _LIMIT)
        logits[i] = logit if logit > _NONE else _NONE
        largest = max(largest, logits[i])
    return largest


@_compiled()
def _rate_of(temperature):
    """``log2(e) / temperature`` as the kernels have it."""
    return np.float32(_LOG2_E) * (np.float32(1) / np.float32(temperature))


@_compiled()
def _log2_mass_of_group(logits, largest, rate):
    """``log2`` of the mass of a group that has a token, relative to its largest logit."""
    return math.log(_mass(logits.view(np.int32), largest, rate)) * _LOG2_E


@_compiled()
def _group_score(largest, relative, rate):
    """The score of a group whose largest logit's share of it is ``relative`` bits less, rounded as the kernels round
    it: in bits, and again."""
    bits = float(largest) * float(rate)
    if abs(bits) > _HUGE_SCORE:
        bits = (_HUGE_SCORE if largest > 0 else -_HUGE_SCORE) + float(largest) * (_HUGE_SCORE / float(_LIMIT))
    else:
        bits += relative
    return np.float32(bits) * _LN_2


@_compiled()
def _is_below(bits, best):
    """True if a group whose score in bits, before its rounding, is at most ``bits`` surely scores less than ``best``.
    Huge scores have the order of the logits and not their distances: of those it is not known."""
    score = bits / _LOG2_E
    return abs(best) < _HUGE_SCORE / _LOG2_E and score + abs(score) * _RELATIVE < best


@_compiled()
def _limit_of_score(score):
    """A number that a group's score in bits exceeds, before its rounding, if the group scores more than ``score``."""
    bits = np.float32(score * _LOG2_E)
    if abs(bits) < _HUGE_SCORE:
        return bits - abs(bits) * _RELATIVE
    return np.float32(_HUGE_SCORE / 2) if bits > 0 else _NONE


@_compiled()
def _pick_in_group(logits, largest, first_id, temperature, position, seed):
    """The place of a group's token."""
    best, pick = -math.inf, 0
    for i in range(GROUP_SIZE):
        if logits[i] > _NONE:
            noise = gumbel(np.uint64(first_id + i), position, _TOKEN_STREAM, seed)
            score = (float(logits[i]) - float(largest)) / temperature + noise
            if score > best:
                best, pick = score, i
    return pick


@_compiled()
def _read_row(row, vocab_size, maxima, block_maxima, logits):
    """The largest logit of each group and of each block; returns the largest of all."""
    largest = _NONE
    whole = vocab_size // GROUP_SIZE
    for block in range(block_maxima.size):
        first, last = block * _BLOCK, min((block + 1) * _BLOCK, maxima.size)
        block_max = _NONE
        for group in range(first, min(last, whole)):
            maxima[group] = _largest(row, group * GROUP_SIZE)
            block_max = max(block_max, maxima[group])
        if last > whole:
            maxima[whole] = _read_group(row, whole, vocab_size, logits)
            block_max = max(block_max, maxima[whole])
        block_maxima[block] = block_max
        largest = max(largest, block_max)
    return largest


@_compiled()
def _mass_of_row(row, vocab_size, largest, temperature):
    """The mass of all logits, relative to the largest."""
    rate = _rate_of(temperature)
    mass = 0.0
    for first in range(0, vocab_size, _BLOCK * GROUP_SIZE):
        mass += _mass(row[first : min(first + _BLOCK * GROUP_SIZE, vocab_size)], largest, rate)
    return mass


@_compiled()
def _limit_logits(bounds, limit, per_bit, needed):
    """Numbers that a logit of each group must exceed for the group's score to exceed ``limit`` bits."""
    for i in range(bounds.size):
        x = (limit - bounds[i]) * per_bit
        needed[i] = x - abs(x) * _RELATIVE


@_compiled()
def _draw_plain(row, vocab_size, first_group, temperature, position, seed, groups, bounds, needed, logits):
    """Column, logit and score of a row without limits; the first column, -inf and -inf where it has no token."""
    rate = _rate_of(temperature)
    per_bit = np.float32(temperature / _LOG2_E)
    best, best_group, limit = _NONE, 0, _NONE
    num_groups = -(-vocab_size // GROUP_SIZE)
    whole = vocab_size // GROUP_SIZE
    for first in range(0, num_groups, _CHUNK):
        count = min(_CHUNK, num_groups - first)
        # Where no noise is large enough for any of these groups, none is computed: rows of a low temperature.
        needed_by_any = (limit - _MOST_NOISE) * per_bit
        needed_by_any -= abs(needed_by_any) * _RELATIVE
        i = 0
        while i < count and first + i < whole and not _any_above(row, (first + i) * GROUP_SIZE, needed_by_any):
            i += 1
        if i == count:
            continue
        for i in range(count):
            groups[i] = first_group + first + i
        _bound_noise(groups[:count], position, seed, bounds[:count])
        _limit_logits(bounds[:count], limit, per_bit, needed[:count])
        for i in range(count):
            group = first + i
            _prefetch(row, (group + _AHEAD) * GROUP_SIZE)
            if group >= whole or _any_above(row, group * GROUP_SIZE, needed[i]):
                largest = _read_group(row, group, vocab_size, logits)
                if largest == _NONE:
                    continue
                relative = _log2_mass_of_group(logits, largest, rate)
                # Now the bound is known without the allowance for 16 equal logits: most groups end here.
                if _is_below(float(largest) * rate + relative + (bounds[i] - _LOG2_GROUP), best):
                    continue
                noise = gumbel(np.uint64(first_group + group), position, _GROUP_STREAM, seed)
                score = _group_score(largest, relative + noise * _LOG2_E, rate)
                if score > best:
                    best, best_group = score, group
                    limit = _limit_of_score(score)
                    _limit_logits(bounds[i + 1 : count], limit, per_bit, needed[i + 1 : count])
    largest = _read_group(row, best_group, vocab_size, logits)
    if largest == _NONE:
        return 0, _NONE, _NONE
    pick = _pick_in_group(logits, largest, (first_group + best_group) * GROUP_SIZE, temperature, position, seed)
    return best_group * GROUP_SIZE + pick, logits[pick], best


@_compiled()
def _first_largest(row, vocab_size, logits):
    """Column and logit of the first maximum; the first column and -inf where the row has no token."""
    best, column = _NONE, 0
    for group in range(-(-vocab_size // GROUP_SIZE)):
        place = group * GROUP_SIZE
        if place + GROUP_SIZE > vocab_size or _any_above(row, place, best):
            _read_group(row, group, vocab_size, logits)
            for i in range(GROUP_SIZE):
                if logits[i] > best:
                    best, column = logits[i], place + i
    return column, best


@_compiled()
def _smallest_allowed(values, weights, count, top_k, mass, counts, masses):
    """The smallest of ``count`` values that has fewer than ``top_k`` values and less than ``mass`` of the weight above
    it, whether one below it would not be allowed, and the weight above it. The largest is always allowed. Reorders its
    input.

    A radix select, by 8 bits of the ordered key at a time.
    """
    above, mass_above, key = 0, 0.0, 0
    for shift in (24, 16, 8, 0):
        counts[:] = 0
        masses[:] = 0.0
        for i in range(count):
            digit = (_ordered(values[i]) >> shift) & 255
            counts[digit] += 1
            masses[digit] += weights[i]
        chosen, next_above, next_mass = -1, above, mass_above
        for digit in range(255, -1, -1):
            if counts[digit]:
                if chosen >= 0 and (next_above >= top_k or next_mass >= mass):
                    break
                chosen, above, mass_above = digit, next_above, next_mass
                next_above += counts[digit]
                next_mass += masses[digit]
        key |= chosen << shift
        kept = 0
        for i in range(count):
            if (_ordered(values[i]) >> shift) & 255 == chosen:
                values[kept], weights[kept] = values[i], weights[i]
                kept += 1
        count = kept
    reached = above + count >= top_k or mass_above + masses[key & 255] >= mass
    return values[0], reached, mass_above


@_compiled()
def _ordered(value):
    """An integer from 0 to 2**32 in the order of the float32 values; -0 and 0 are equal."""
    bits = np.int64(_bits_of_float(value + np.float32(0)))
    return bits + 2**31 if bits >= 0 else -1 - bits


@_compiled()
def _limit_of(row, vocab_size, largest, rate, bound, top_k, mass, scratch, ids):
    """``_smallest_allowed`` of the logits that reach ``bound``. Returns it, the weight above it, and how many groups
    are listed: those that may hold an allowed logit."""
    maxima, block_maxima, values, weights, _, _, logits, masses = scratch
    listed, counts = ids
    count = 0
    for block in range(block_maxima.size):
        if block_maxima[block] >= bound:
            values[count], weights[count] = block_maxima[block], _weight(block_maxima[block], largest, rate)
            count += 1
    value, reached, _ = _smallest_allowed(values, weights, count, top_k, mass, counts, masses)
    if reached:
        bound = max(bound, value)
    count = _list_groups(maxima, block_maxima, bound, listed)
    for i in range(count):
        values[i], weights[i] = maxima[listed[i]], _weight(maxima[listed[i]], largest, rate)
    value, reached, _ = _smallest_allowed(values, weights, count, top_k, mass, counts, masses)
    if reached:
        bound = max(bound, value)
    num_listed = _list_groups(maxima, block_maxima, bound, listed)
    count = _gather(row, vocab_size, listed[:num_listed], bound, largest, rate, values, weights, logits)
    bound, _, above = _smallest_allowed(values, weights, count, top_k, mass, counts, masses)
    return bound, above, num_listed


@_compiled()
def _draw_truncated(
    row,
    vocab_size,
    largest,
    total,  # the row's mass relative to the largest logit; 0 where it is not known
    temperature,
    position,
    seed,
    top_k,  # above vocab_size where there is none
    top_p,
    min_p,
    scratch,
    ids,
):
    """Column, logit and score of a row with limits and at least one token."""
    maxima, block_maxima, values, weights, bounds, _, logits, masses = scratch
    listed, counts = ids
    rate = _rate_of(temperature)
    floor = _LOWEST
    if min_p > 0:
        floor = min(largest, np.float32(float(largest) + math.log(min(min_p, 1.0)) * temperature))
    use_k, use_p = top_k <= vocab_size, top_p < 1
    # With min-p, top-p is of what top-k has left.
    sequential = min_p > 0 and use_k and use_p
    if use_k and (sequential or not use_p or total == 0):
        lowest = _LOWEST if sequential else floor
        bound, above, num_listed = _limit_of(row, vocab_size, largest, rate, lowest, top_k, math.inf, scratch, ids)
        if use_p and not sequential:
            # The largest logits of all groups are a part of the mass. Where top-p rules out nothing of that part, it
            # rules out nothing of the row, whose mass takes as long as all else together.
            part = float(_mass(maxima.view(np.int32), largest, rate))
            use_p = above >= top_p * part * (1 - _ROUNDINGS)
        if use_p:
            mass = 0.0 if sequential else _mass_of_row(row, vocab_size, largest, temperature)
            count = _gather(row, vocab_size, listed[:num_listed], bound, largest, rate, values, weights, logits)
            if sequential:
                for i in range(count):
                    mass += weights[i]
            bound, _, _ = _smallest_allowed(values, weights, count, top_k, top_p * mass, counts, masses)
    elif use_p:
        if total == 0:
            total = _mass_of_row(row, vocab_size, largest, temperature)
        bound, _, num_listed = _limit_of(row, vocab_size, largest, rate, floor, top_k, top_p * total, scratch, ids)
    else:
        bound, num_listed = floor, _list_groups(maxima, block_maxima, floor, listed)
    bound = max(bound, floor)

    best, best_column, best_logit = _NONE, 0, _NONE
    for first in range(0, num_listed, _CHUNK):
        count = min(_CHUNK, num_listed - first)
        _bound_noise(listed[first : first + count], position, seed, bounds[:count])
        for i in range(count):
            group = listed[first + i]
            peak = maxima[group] * rate
            if maxima[group] < bound or _is_below(float(peak + abs(peak) * _RELATIVE + bounds[i]), best):
                continue
            _read_group(row, group, vocab_size, logits)
            noise = gumbel(np.uint64(group), position, _GROUP_STREAM, seed)
            relative = _log2_mass_of_group(logits, maxima[group], rate) + noise * _LOG2_E
            group_score = _group_score(maxima[group], relative, rate)
            if group_score > best:
                relative /= _LOG2_E
                i, score = _first_allowed(
                    logits, maxima[group], bound, group, group_score, relative, temperature, position, seed
                )
                if score > best:
                    best, best_column, best_logit = score, group * GROUP_SIZE + i, logits[i]
    return best_column, best_logit, best


@_compiled()
def _list_groups(maxima, block_maxima, bound, listed):
    """The groups whose largest logit reaches ``bound``. Returns how many there are."""
    count = 0
    for block in range(block_maxima.size):
        if block_maxima[block] >= bound:
            for group in range(block * _BLOCK, min((block + 1) * _BLOCK, maxima.size)):
                if maxima[group] >= bound:
                    listed[count] = group
                    count += 1
    return count


@_compiled()
def _gather(row, vocab_size, listed, bound, largest, rate, values, weights, logits):
    """Copy the logits of the listed groups that reach ``bound``, and their weights. Returns how many there are."""
    count = 0
    for group in listed:
        _read_group(row, group, vocab_size, logits)
        for i in range(GROUP_SIZE):
            if logits[i] >= bound:
                values[count], weights[count] = logits[i], _weight(logits[i], largest, rate)
                count += 1
    return count


@_compiled()
def _first_allowed(logits, largest, bound, group, group_score, relative, temperature, position, seed):
    """Place and score of a group's best token with a logit of ``bound`` or more; ``truncation_math.token_scores``."""
    perturbed = np.full(GROUP_SIZE, -np.inf)
    first = -math.inf
    for i in range(GROUP_SIZE):
        if logits[i] > _NONE:
            noise = gumbel(np.uint64(group * GROUP_SIZE + i), position, _TOKEN_STREAM, seed)
            perturbed[i] = (float(logits[i]) - float(largest)) / temperature + noise
            first = max(first, perturbed[i])
    best, place = _NONE, 0
    for i in range(GROUP_SIZE):
        if logits[i] >= bound:
            score = group_score  # of the group's first token
            if perturbed[i] < first:
                behind = math.exp(first - perturbed[i]) - 1.0
                score = np.float32(group_score - math.log(1.0 + math.exp(relative - first) * behind))
            if score > best:
                best, place = score, i
    return place, best


# --- logits that are not words yet ------------------------------------------------------------------------------------


@_compiled()
def _rounded(x, dtype):
    """float32 rounded to a dtype, to the nearest and of two to the even one, as float32."""
    bits = _bits_of_float(x)
    if dtype == BFLOAT16:
        half = np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))
        rounded = _float_of_bits(((bits + half) >> np.int32(16)) << np.int32(16))
        return rounded if x == x else x
    if dtype == FLOAT16:
        half = np.int32(0xFFF) + ((bits >> np.int32(13)) & np.int32(1))
        rounded = _float_of_bits(((bits + half) >> np.int32(13)) << np.int32(13))
        size = abs(x)
        tiny = (size + np.float32(0.5)) - np.float32(0.5)  # in steps of 2**-24
        rounded = (tiny if x > 0 else -tiny) if size < np.float32(2.0**-14) else rounded
        rounded = (np.float32(np.inf) if x > 0 else _NONE) if size >= np.float32(65520.0) else rounded
        return rounded if x == x else x
    return x


@_compiled(error_model="numpy")
def _transform_row(row, dtype, scale, softcap, out):
    """``epilogue.transform_logits``, bounded. scale: 1 where there is none; softcap: 0 where there is none."""
    for i in range(out.size):
        x = _rounded(_logit_of(row[i]), dtype)
        if scale != np.float32(1):
            x = _rounded(x * scale, dtype)
        if softcap != np.float32(0):
            share = x / softcap
            square = share * share
            power = -abs(share * np.float32(2 * _LOG2_E))
            power = _exp2(max(power, np.float32(-126)))
            capped = softcap * ((np.float32(1) - power) / (np.float32(1) + power))
            if square < _SERIES_UP_TO * _SERIES_UP_TO:  # where the difference above has few digits
                capped = abs(x) * (
                    np.float32(1) + square * (_TANH3 + square * (_TANH5 + square * (_TANH7 + square * _TANH9)))
                )
            x = (capped if x >= 0 else -capped) if x == x else x
        x = min(x, _LIMIT)
        out[i] = x if x > _NONE else _NONE


@_compiled(error_model="numpy")
def _edit_row(flags, additive, scaling, mask_words, mask_bools, bias, out, vocab_start):
    """``epilogue.edit_logits`` in place on ``out``. Edits are those of the row, for all ids."""
    for i in range(out.size):
        column = vocab_start + i
        x = out[i]
        if flags & _ADDITIVE:
            x += additive[column]
        if flags & _SCALING:
            x = x * scaling[column] if x < 0 else x / scaling[column]
        if flags & _MASK:
            if column < mask_bools.size:
                x = _NONE if mask_bools[column] else x
            elif column // 32 < mask_words.size:
                x = x if (mask_words[column // 32] >> (column % 32)) & 1 else _NONE
        allowed = x > _NONE
        if flags & _BIAS:
            x += bias[column]
            allowed &= bias[column] > _NONE
        out[i] = min(max(x, -_LIMIT), _LIMIT) if allowed else _NONE


# --- rows of a batch --------------------------------------------------------------------------------------------------


@_compiled()
def _draw_row(
    row, vocab_size, first_group, temperature, position, seed, top_k, top_p, min_p, want_mass, scratch, ids, outputs, b
):
    """One token, and what ``outputs`` hold of it at ``b``."""
    maxima, block_maxima, _, _, bounds, needed, logits, _ = scratch
    tokens, scores, logprobs, log_masses = outputs
    greedy = temperature <= 0
    temperature = 1.0 if greedy else max(temperature, _COLDEST) if temperature < _HOTTEST else _HOTTEST
    use_k = top_k >= 1 and top_k < vocab_size
    largest, total = _NONE, 0.0
    limited = not greedy and (use_k or top_p < 1 or min_p > 0)
    if limited or want_mass:
        largest = _read_row(row, vocab_size, maxima, block_maxima, logits)
        if want_mass and largest > _NONE:
            total = _mass_of_row(row, vocab_size, largest, temperature)
    if greedy:
        column, logit = _first_largest(row, vocab_size, logits)
        score = logit
    elif limited:
        column, logit, score = 0, _NONE, _NONE
        if largest > _NONE:
            most = top_k if use_k else vocab_size + 1
            column, logit, score = _draw_truncated(
                row, vocab_size, largest, total, temperature, position, seed, most, top_p, min_p, scratch, ids
            )
    else:
        column, logit, score = _draw_plain(
            row, vocab_size, first_group, temperature, position, seed, ids[0], bounds, needed, logits
        )
    tokens[b] = first_group * GROUP_SIZE + column
    scores[b] = score
    if want_mass:
        log_mass = float(largest) / temperature + math.log(total) if total > 0 else -math.inf
        log_masses[b, 0] = min(max(log_mass, -float(_LIMIT)), float(_LIMIT)) if total > 0 else log_mass
        log_masses[b, 1] = math.log(total) if total > 0 else 0.0  # as it is beyond the limit
        if abs(log_mass) < float(_LIMIT):
            log_masses[b, 1] = log_mass - float(log_masses[b, 0])
        # In a row without a token this is NaN.
        logprobs[b] = (float(logit) - float(largest)) / temperature - (math.log(total) if total > 0 else 0.0)


# --- a batch ----------------------------------------------------------------------------------------------------------

# Addresses are int64, as are counts. Distances are in elements; where an address is 0, nothing is read.
_EDITS = ("additive", "scaling", "mask_words", "mask_bools", "bias")
_ADDRESSES = ("words", "temperature", "seed", "position", "top_k", "top_p", "min_p", "edit_rows", *_EDITS)
JOB = np.dtype(
    [
        *((name, "i8") for name in ("next_row", *_ADDRESSES, "token_ids", "scores", "logprobs", "log_mass")),
        *((name, "i8") for name in ("num_rows", "stride", "vocab_size", "vocab_start", "given", "edit_repeats")),
        *((f"{name}_{about}", "i8") for about in ("stride", "width") for name in _EDITS),
        *((name, "i8") for name in ("transform", "dtype")),
        *((name, "f4") for name in ("scale", "softcap")),
    ]
)


@intrinsic
def _pointer(_context, _address):
    """To what is at an address."""
    return types.voidptr(types.int64), lambda context, builder, signature, args: builder.inttoptr(
        args[0], cgutils.voidptr_t
    )


@intrinsic
def _claim_row(_context, job):
    """``job.next_row``, which is one more from then on: each thread gets another row."""

    def generate(context, builder, signature, args):
        word, offset = ir.IntType(64), JOB.fields["next_row"][1]
        pointer = cgutils.get_record_member(builder, args[0], offset, word)
        return builder.atomic_rmw("add", pointer, ir.Constant(word, 1), "monotonic")

    return types.int64(job), generate


@_compiled()
def _edit(job, b, flags, out):
    """Edit row ``b``, as its flags say."""
    shared = b // job.edit_repeats
    _edit_row(
        flags,
        carray(_pointer(job.additive + 4 * shared * job.additive_stride), job.additive_width, np.float32),
        carray(_pointer(job.scaling + 4 * shared * job.scaling_stride), job.scaling_width, np.float32),
        carray(_pointer(job.mask_words + 4 * b * job.mask_words_stride), job.mask_words_width, np.int32),
        carray(_pointer(job.mask_bools + b * job.mask_bools_stride), job.mask_bools_width, np.uint8),
        carray(_pointer(job.bias + 4 * shared * job.bias_stride), job.bias_width, np.float32),
        out,
        job.vocab_start,
    )


def _sampler_of(words: type[np.generic], cache: bool) -> Any:
    itemsize = np.dtype(words).itemsize

    @cfunc(types.void(types.CPointer(from_dtype(JOB))), cache=cache)
    def sample_rows(jobs):
        job = carray(jobs, 1)[0]
        b = _claim_row(job)
        if b >= job.num_rows:
            return
        vocab_size, num_rows = job.vocab_size, job.num_rows
        truncates, want_mass = job.top_k != 0, job.logprobs != 0
        num_groups = -(-vocab_size // GROUP_SIZE)
        size = num_groups if truncates or want_mass else 0
        scratch = (
            np.empty(size, np.float32),
            np.empty(-(-size // _BLOCK), np.float32),
            np.empty(size * GROUP_SIZE if truncates else 0, np.float32),
            np.empty(size * GROUP_SIZE if truncates else 0, np.float32),
            np.empty(_CHUNK, np.float32),
            np.empty(_CHUNK, np.float32),
            np.empty(GROUP_SIZE, np.float32),
            np.empty(256, np.float64),
        )
        ids = (np.empty(max(size, _CHUNK), np.int32), np.empty(256, np.int64))
        edited = np.empty(0, np.float32)
        temperature = carray(_pointer(job.temperature), num_rows, np.float32)
        seed = carray(_pointer(job.seed), num_rows, np.int64)
        position = carray(_pointer(job.position), num_rows, np.int64)
        outputs = (
            carray(_pointer(job.token_ids), num_rows, np.int64),
            carray(_pointer(job.scores), num_rows, np.float32),
            carray(_pointer(job.logprobs), num_rows, np.float32),
            carray(_pointer(job.log_mass), (num_rows, 2), np.float32),
        )
        first_group = job.vocab_start // GROUP_SIZE
        while b < num_rows:
            row = carray(_pointer(job.words + b * job.stride * itemsize), vocab_size, words)
            top_k, top_p, min_p = np.int64(0), np.float32(1), np.float32(0)
            if truncates:
                top_k = np.int64(carray(_pointer(job.top_k), num_rows, np.int32)[b])
                top_p = carray(_pointer(job.top_p), num_rows, np.float32)[b]
                min_p = carray(_pointer(job.min_p), num_rows, np.float32)[b]
            noise = np.uint64(position[b]), np.uint64(seed[b])
            values = (float(temperature[b]), *noise, top_k, float(top_p), float(min_p))
            flags = job.given
            if job.edit_rows != 0:
                flags &= carray(_pointer(job.edit_rows), num_rows, np.int32)[b]
            if job.transform or flags:
                if edited.size == 0:
                    edited = np.empty(vocab_size, np.float32)
                _transform_row(row, job.dtype, job.scale, job.softcap, edited)
                if flags:
                    _edit(job, b, flags, edited)
                bits = edited.view(np.int32)
                _draw_row(bits, vocab_size, first_group, *values, want_mass, scratch, ids, outputs, b)
            else:
                _draw_row(row, vocab_size, first_group, *values, want_mass, scratch, ids, outputs, b)
            b = _claim_row(job)

    return sample_rows


@functools.cache
def sampler_of(words: str) -> Any:
    """The address of a C function, for logits whose words have this dtype: it takes the address of a ``JOB``, and draws
    rows until all have been taken. Several threads may call it at once, for the same job."""
    kind = np.dtype(words).type
    try:
        return _sampler_of(kind, _CACHES).address
    except Exception as error:
        if not _CACHES:
            raise
        leave_cache(globals().values(), "cpu_loops", error)
        return _sampler_of(kind, False).address
