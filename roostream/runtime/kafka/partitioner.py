"""Kafka's default partitioner for keys, as in the Java client: `toPositive(murmur2(key)) mod partitions`."""

from __future__ import annotations

_M32 = 0xFFFFFFFF
_SEED, _MIX = 0x9747B28C, 0x5BD1E995


def murmur2(data: bytes) -> int:
    """uint32; org.apache.kafka.common.utils.Utils.murmur2."""
    h = (_SEED ^ len(data)) & _M32
    body = len(data) & ~3
    for i in range(0, body, 4):
        k = int.from_bytes(data[i : i + 4], "little") * _MIX & _M32
        k = (k ^ k >> 24) * _MIX & _M32
        h = (h * _MIX & _M32) ^ k
    if len(data) > body:
        h = (h ^ int.from_bytes(data[body:], "little")) * _MIX & _M32
    h = (h ^ h >> 13) * _MIX & _M32
    return h ^ h >> 15


def partition_of(key: bytes, num_partitions: int) -> int:
    """0..num_partitions - 1."""
    return (murmur2(key) & 0x7FFFFFFF) % num_partitions
