from __future__ import annotations

import pytest

from roostream.runtime.kafka.partitioner import murmur2


@pytest.mark.parametrize(
    ("key", "hashed"),
    [  # org.apache.kafka.common.utils.UtilsTest.testMurmur2
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_the_partitioner_equals_java_kafkas(key: bytes, hashed: int) -> None:
    assert murmur2(key) == hashed % (1 << 32)
