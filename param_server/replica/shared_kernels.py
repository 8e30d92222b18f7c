"""Compiled loops over rows that one process writes while others read them, without a lock between them.

Letters: C places of the index, N slots, W words of a slot, U keys asked for, D width, K tables of the stack, M slots.

A file's words (uint64) are an index and a slab:

    index  C words      0 = free · GONE = its key was removed · else tag << 32 | slot + 1; open addressing, linear probing;
                        the tag is the low half of the key's hash, whose high bits choose the place
    slab   N x W words  sequence · id · table · D float32, two a word

Written by one process, in this order:

    1 sequence odd   2 id, table, row   3 sequence even   4 the index word names the slot   5 the old slot rests (slots.py)

so that an index word, one aligned store of 8 bytes, names either the row before or the row after, both whole; also if the writer
ends between any two of these. A reader takes

    a the index word   b the sequence   c key and row   d the sequence again

and begins at a again unless b and d are equal and even. Then what it copied is one row that was written whole, and the key in it
tells whose (a slot can have been given to another since a). The sequence has 64 bits and only grows, so it can't come round.
A sequence is odd only while no index word names its slot: a reader never waits for a writer that has ended.

Order, on x86-64 as on arm64: 1 before 2 by a release fence, 2 before 3 and 3 before 4 by release stores; a, b by acquire loads,
c before d by an acquire fence. Numba has none of these; they are LLVM's, below. Plain loads of a row that is just being written
give any bits, which d then refuses (Boehm, "Can seqlocks get along with programming language memory models?", 2012).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload, register_jitable

from param_server.initial import fill_one, splitmix64
from param_server.kernels import table_at

SEQUENCE, ID, TABLE, HEAD_WORDS = 0, 1, 2, 3
GONE = np.uint64(0xFFFFFFFF)
_AHEAD = 8  # keys
_ONE, _S32, _LOW32, _FREE = np.uint64(1), np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(0)


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [context.cast(builder, args[1], signature.args[1], types.intp)])


@intrinsic
def _load(typing: Any, words: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), "acquire", 8)

    return types.uint64(words, at), code


@intrinsic
def _store(typing: Any, words: Any, at: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = context.cast(builder, args[2], signature.args[2], types.uint64)
        builder.store_atomic(word, _pointer(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(words, at, value), code


@intrinsic
def _prefetch(typing: Any, words: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte.as_pointer()], kind)
        pointer = builder.bitcast(_pointer(context, builder, signature, args), byte.as_pointer())
        builder.call(fetch, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(words, at), code


@intrinsic
def _acquire(typing: Any) -> tuple[Any, Callable[..., Any]]:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("acquire")
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def _release(typing: Any) -> tuple[Any, Callable[..., Any]]:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("release")
        return context.get_dummy_value()

    return types.void(), code


def load(words: np.ndarray, at: int | np.int64) -> np.uint64:
    """words[at]; nothing that comes after it is read before it."""
    return np.uint64(words[at])


def store(words: np.ndarray, at: int | np.int64, value: np.uint64) -> None:
    """words[at] = value; whoever sees it sees all that was written before."""
    words[at] = value


def prefetch(words: np.ndarray, at: int | np.int64) -> None:
    """words[at] will be read soon."""


def fence_acquire() -> None:
    """What was read before is read before whatever is read after."""


def fence_release() -> None:
    """What was written before is written before whatever is written after."""


overload(load, inline="always")(lambda words, at: lambda words, at: _load(words, at))
overload(store, inline="always")(lambda words, at, value: lambda words, at, value: _store(words, at, value))
overload(prefetch, inline="always")(lambda words, at: lambda words, at: _prefetch(words, at))
overload(fence_acquire, inline="always")(lambda: lambda: _acquire())
overload(fence_release, inline="always")(lambda: lambda: _release())


@njit(cache=True, nogil=True)
def gather(
    index_C: np.ndarray,
    shift: np.uint64,
    slab: np.ndarray,
    numbers: np.ndarray,
    num_words: int,
    table_U: np.ndarray,
    id_U: np.ndarray,
    seed: np.uint64,
    known_K: np.ndarray,
    scale_K: np.ndarray,
    out_UD: np.ndarray,
) -> int:
    """Rows of keys (uint32 `table_U`, int64 `id_U`) into `out_UD` (float32), initial values where there is none; how often a key
    was begun anew because of a write beside it. `slab` uint64 and `numbers` float32 are the same bytes; `shift` = 64 - log2 C;
    `seed`, `known_K`, `scale_K` as in `param_server.kernels.gather`.

    First the words of all keys, then all rows: what is far away in memory is then on its way for many keys at once. A key
    whose slot turns out to be another's is begun anew by itself."""
    hashed_U, at_U = np.empty(id_U.shape[0], np.uint64), np.empty(id_U.shape[0], np.int64)
    for u in range(id_U.shape[0]):
        hashed_U[u] = splitmix64(np.uint64(id_U[u]) ^ np.uint64(table_U[u]))
        prefetch(index_C, np.int64(hashed_U[u] >> shift))
    for u in range(id_U.shape[0]):  # a, as far as tags tell
        at_U[u] = _named(index_C, hashed_U[u], shift, num_words)
    again, k = 0, 0
    for u in range(id_U.shape[0]):
        table, id_ = np.uint64(table_U[u]), np.uint64(id_U[u])
        at = at_U[u]
        if u + _AHEAD < id_U.shape[0] and at_U[u + _AHEAD] >= 0:
            prefetch(slab, at_U[u + _AHEAD])
            prefetch(slab, at_U[u + _AHEAD] + 8)
        if at >= 0:
            sequence = load(slab, at + SEQUENCE)  # b
            mine = slab[at + ID] == id_ and slab[at + TABLE] == table  # c
            _copy(numbers, at, out_UD, u)
            fence_acquire()
            if not mine or sequence & _ONE or load(slab, at + SEQUENCE) != sequence:  # d
                at, more = _one(index_C, shift, slab, numbers, num_words, table, id_, out_UD, u)
                again += more
        if at < 0:
            k = table_at(table_U[u], known_K, k)
            fill_one(seed, table_U[u], id_U[u], scale_K[k] if k >= 0 else np.float32(0), out_UD[u])
    return again


@register_jitable
def _named(index_C: np.ndarray, hashed: np.uint64, shift: np.uint64, num_words: int) -> np.int64:
    """Where the slot begins that the first word with this key's tag names, -1 where there is none."""
    mask, place = index_C.shape[0] - 1, np.int64(hashed >> shift)
    word = load(index_C, place)
    while word != _FREE and (word == GONE or (word >> _S32) != (hashed & _LOW32)):
        place = (place + 1) & mask
        word = load(index_C, place)
    return np.int64(-1) if word == _FREE else np.int64((word & _LOW32) - _ONE) * num_words


@register_jitable
def _copy(numbers: np.ndarray, at: np.int64, out_UD: np.ndarray, u: int) -> None:
    first = 2 * (at + HEAD_WORDS)
    for j in range(out_UD.shape[1]):
        out_UD[u, j] = numbers[first + j]


@register_jitable
def _one(
    index_C: np.ndarray,
    shift: np.uint64,
    slab: np.ndarray,
    numbers: np.ndarray,
    num_words: int,
    table: np.uint64,
    id_: np.uint64,
    out_UD: np.ndarray,
    u: int,
) -> tuple[np.int64, int]:
    """One key's row into `out_UD[u]`: (where its slot begins, -1 = it has none; how often it was begun anew)."""
    mask, again = index_C.shape[0] - 1, 0
    hashed = splitmix64(id_ ^ table)
    place = np.int64(hashed >> shift)
    while True:
        word = load(index_C, place)  # a
        if word == _FREE:
            return np.int64(-1), again
        if word == GONE or (word >> _S32) != (hashed & _LOW32):
            place = (place + 1) & mask
            continue
        at = np.int64((word & _LOW32) - _ONE) * num_words
        sequence = load(slab, at + SEQUENCE)  # b
        mine = slab[at + ID] == id_ and slab[at + TABLE] == table  # c
        if mine:
            _copy(numbers, at, out_UD, u)
        fence_acquire()
        if sequence & _ONE or load(slab, at + SEQUENCE) != sequence:  # d
            again += 1
        elif mine:
            return at, again
        elif load(index_C, place) == word and load(slab, at + SEQUENCE) == sequence:
            place = (place + 1) & mask  # another key with the same tag
        else:
            again += 1


@njit(cache=True, nogil=True, error_model="numpy")
def put(
    index_C: np.ndarray,
    shift: np.uint64,
    slab: np.ndarray,
    numbers: np.ndarray,
    num_words: int,
    table_U: np.ndarray,
    id_U: np.ndarray,
    rows_UD: np.ndarray,
    free_M: np.ndarray,
    freed_M: np.ndarray,
    counts: np.ndarray,
    bucket_N: np.ndarray,
    num_buckets: int,
) -> tuple[int, int, int]:
    """Hold rows (float32) under their keys, in order, until a key needs what there is no more of: (how many keys are done; how
    many of `free_M`, int64 slots that may be written, were used from its beginning; how many slots, no longer named, were put
    into `freed_M`). A row that is there already to the bit costs nothing; at most 3 of 4 places are taken.

    The writer's own: `counts` int64 [live keys, places that aren't free], `bucket_N` int32 [N], the bucket of the key that a slot
    is named by, -1 = none."""
    mask, used, freed = index_C.shape[0] - 1, 0, 0
    for u in range(id_U.shape[0]):
        table, id_ = np.uint64(table_U[u]), np.uint64(id_U[u])
        hashed = splitmix64(id_ ^ table)
        place, hole, old = np.int64(hashed >> shift), np.int64(-1), np.int64(-1)
        while index_C[place] != _FREE:
            word = index_C[place]
            if word == GONE:
                hole = place if hole < 0 else hole
            elif (word >> _S32) == (hashed & _LOW32):
                at = np.int64((word & _LOW32) - _ONE) * num_words
                if slab[at + ID] == id_ and slab[at + TABLE] == table:
                    old = np.int64((word & _LOW32) - _ONE)
                    break
            place = (place + 1) & mask
        if old >= 0 and _equal(numbers, 2 * (old * num_words + HEAD_WORDS), rows_UD[u]):
            continue
        if used == free_M.shape[0] or (old < 0 and hole < 0 and 4 * counts[1] >= 3 * index_C.shape[0]):
            return u, used, freed
        slot = free_M[used]
        used += 1
        bucket_N[slot] = hashed % np.uint64(num_buckets)
        write(slab, numbers, slot * num_words, id_, table, rows_UD[u])
        if old >= 0:
            freed_M[freed] = old
            bucket_N[old] = -1
            freed += 1
        else:
            counts[0] += 1
            if hole >= 0:
                place = hole
            else:
                counts[1] += 1
        store(index_C, place, ((hashed & _LOW32) << _S32) | np.uint64(slot + 1))  # 4
    return id_U.shape[0], used, freed


@register_jitable
def write(
    slab: np.ndarray, numbers: np.ndarray, at: int, id_: np.uint64, table: np.uint64, row_D: np.ndarray
) -> None:
    sequence = slab[at + SEQUENCE]
    store(slab, at + SEQUENCE, sequence + _ONE)  # 1
    fence_release()
    slab[at + ID] = id_  # 2
    slab[at + TABLE] = table
    first = 2 * (at + HEAD_WORDS)
    for j in range(row_D.shape[0]):
        numbers[first + j] = row_D[j]
    store(slab, at + SEQUENCE, sequence + _ONE + _ONE)  # 3


@njit(cache=True, nogil=True)
def _equal(numbers: np.ndarray, first: int, row_D: np.ndarray) -> bool:
    """To the bit; of NaN, which no row has, never."""
    for j in range(row_D.shape[0]):
        if numbers[first + j] != row_D[j] or np.signbit(numbers[first + j]) != np.signbit(row_D[j]):
            return False
    return True


@njit(cache=True, nogil=True)
def remove(
    index_C: np.ndarray,
    shift: np.uint64,
    slab: np.ndarray,
    num_words: int,
    table_U: np.ndarray,
    id_U: np.ndarray,
    freed_M: np.ndarray,
    counts: np.ndarray,
    bucket_N: np.ndarray,
) -> int:
    """Forget the keys that are there; how many slots were put into `freed_M` (int64). Nothing moves in the index: a reader that
    is on its way finds every other key. GONE at the end of a run is free again."""
    mask, freed = index_C.shape[0] - 1, 0
    for u in range(id_U.shape[0]):
        table, id_ = np.uint64(table_U[u]), np.uint64(id_U[u])
        hashed = splitmix64(id_ ^ table)
        place = np.int64(hashed >> shift)
        while index_C[place] != _FREE:
            word = index_C[place]
            if word != GONE and (word >> _S32) == (hashed & _LOW32):
                at = np.int64((word & _LOW32) - _ONE) * num_words
                if slab[at + ID] == id_ and slab[at + TABLE] == table:
                    freed_M[freed] = np.int64((word & _LOW32) - _ONE)
                    bucket_N[freed_M[freed]] = -1
                    freed += 1
                    counts[0] -= 1
                    store(index_C, place, GONE)
                    while index_C[place] == GONE and index_C[(place + 1) & mask] == _FREE:
                        store(index_C, place, _FREE)
                        counts[1] -= 1
                        place = (place - 1) & mask
                    break
            place = (place + 1) & mask
    return freed


@njit(cache=True, nogil=True)
def keys_of(slab: np.ndarray, num_words: int, slots_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(uint32 [M], int64 [M]) tables and ids at slots."""
    table_M, id_M = np.empty(slots_M.shape[0], np.uint32), np.empty(slots_M.shape[0], np.int64)
    for m in range(slots_M.shape[0]):
        table_M[m] = np.uint32(slab[slots_M[m] * num_words + TABLE])
        id_M[m] = np.int64(slab[slots_M[m] * num_words + ID])
    return table_M, id_M


@njit(cache=True, nogil=True)
def rows_at(numbers: np.ndarray, num_words: int, slots_M: np.ndarray, width: int) -> np.ndarray:
    """float32 [M, D]: rows at slots, read by their writer."""
    out_MD = np.empty((slots_M.shape[0], width), np.float32)
    for m in range(slots_M.shape[0]):
        first = 2 * (slots_M[m] * num_words + HEAD_WORDS)
        for j in range(width):
            out_MD[m, j] = numbers[first + j]
    return out_MD


@njit(cache=True, nogil=True)
def set_word(words: np.ndarray, at: int, value: int) -> None:
    """`store`, for who isn't compiled."""
    store(words, at, np.uint64(value))
