"""Random mutations of valid decoder inputs, as bytes or as JSON documents."""

from __future__ import annotations

import random
from typing import Any

import msgspec

EDGE_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    1 << 64,
    -(1 << 63),
    0.5,
    -0.0,
    1e308,
    3.5e38,
    "",
    "a" * 65,
    "é\u0000\ud7ff",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"ids": [1], "weights": [1, 2]},
)
_MAX_BYTES = 4096


def mutate_input(data: bytes, rng: random.Random) -> bytes:
    """Return a random mutation of `data`, cut to 4 KiB."""
    if rng.random() < 0.5:
        try:
            changed = _mutate_json(msgspec.json.decode(data), rng)
            return msgspec.json.encode(changed)[:_MAX_BYTES]
        except (
            msgspec.DecodeError,
            msgspec.EncodeError,
            UnicodeError,
            RecursionError,
            ValueError,
            TypeError,
            OverflowError,
        ):
            pass
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        _mutate_bytes(out, rng)
    return bytes(out[:_MAX_BYTES])


def _mutate_bytes(out: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(out) + 1)
    count = min(rng.choice((1, 1, 1, 2, 4, 8, 64)), max(len(out) - at, 0))
    match rng.randrange(5):
        case 0 if at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        case 1:
            out[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
        case 2:
            del out[at : at + count]
        case 3:
            out[at:at] = out[at : at + count]
        case _ if at < len(out):
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B))


def _mutate_json(value: Any, rng: random.Random) -> Any:
    """Remove, rename, repeat or replace one randomly chosen value of a JSON document, in place."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return _edge_value(value, rng)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    match rng.randrange(8):
        case 0:
            value.pop(key)
        case 1 if isinstance(value, dict):
            value[f"{key}{rng.choice(('', 's', '.'))}"] = value[key]
        case 2 if isinstance(value, list):
            value.extend(value[: rng.choice((1, 4, 32))])
        case _:
            value[key] = _mutate_json(value[key], rng)
    return value


def _edge_value(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.5:
        return -value if rng.random() < 0.5 else value * rng.choice((10, 1e20))
    return rng.choice(EDGE_VALUES)
