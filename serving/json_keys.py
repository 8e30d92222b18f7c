"""Refuses JSON objects that have a key twice.

JSON leaves open which of the values counts. A gateway that checks the first one would let through another
user than the one that serving uses, since msgspec takes the last.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numba import njit

from serving.errors import RequestError, shown

_MAX_KEYS = 1024  # of an object that is compared pair by pair
_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")
_OPEN, _CLOSE = (ord("{"), ord("[")), (ord("}"), ord("]"))


def check_keys(body: bytes) -> None:
    """`body` is valid JSON, as far as msgspec looks: not inside of values that it skips. Raises RequestError
    400: an object has a key twice; UnicodeDecodeError, RecursionError: a skipped value cannot be read."""
    bytes_N = np.frombuffer(body, np.uint8)
    if may_repeat_keys(bytes_N, np.empty(len(body) // 4 + 1, np.uint64), np.empty(len(body) + 1, np.int64)):
        json.loads(body.decode(), object_pairs_hook=_check_object, parse_int=str)  # of any number of digits


def _check_object(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise RequestError(400, f"expected each field once, got {shown(key)!r} twice in an object", "$")
        seen.add(key)


@njit(cache=True)  # keeps the GIL, as the kernels of request_batch.py do
def may_repeat_keys(bytes_N: np.ndarray, hashes: np.ndarray, starts: np.ndarray) -> bool:
    """Whether an object may have a key twice: two keys have one hash, a key is escaped, or an object has more
    than _MAX_KEYS keys.

    `hashes` and `starts` are working memory: the hashes of the keys of all open objects, and, by depth, where
    those of an open object start (-1 = it is an array).
    """
    depth = num_keys = 0
    expects_key = False
    n = 0
    while n < len(bytes_N):
        byte = bytes_N[n]
        if byte == _QUOTE:
            hashed, is_escaped = np.uint64(14695981039346656037), False
            n += 1
            while bytes_N[n] != _QUOTE:
                if bytes_N[n] == _BACKSLASH:
                    is_escaped = True
                    n += 1
                hashed = (hashed ^ np.uint64(bytes_N[n])) * np.uint64(1099511628211)
                n += 1
            if expects_key:
                first = starts[depth - 1]
                if is_escaped or num_keys - first >= _MAX_KEYS:
                    return True
                for at in range(first, num_keys):
                    if hashes[at] == hashed:
                        return True
                hashes[num_keys] = hashed
                num_keys += 1
                expects_key = False
        elif byte == _OPEN[0] or byte == _OPEN[1]:
            expects_key = byte == _OPEN[0]
            starts[depth] = num_keys if expects_key else -1
            depth += 1
        elif byte == _CLOSE[0] or byte == _CLOSE[1]:
            depth -= 1
            if byte == _CLOSE[0]:
                num_keys = starts[depth]
            expects_key = False
        elif byte == _COMMA:
            expects_key = depth > 0 and starts[depth - 1] >= 0
        n += 1
    return False
