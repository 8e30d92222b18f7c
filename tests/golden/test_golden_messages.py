"""Golden bytes of every record type: bytes of older versions still decode, and this version writes exactly
the stored bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.internal import api_implementation

from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from tests.golden.golden_messages import MESSAGES, RANK_ANSWER

HERE = Path(__file__).parent
ROO = HERE.parents[1] / "roostream" / "wire"


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_golden_bytes_round_trip(name: str) -> None:
    golden = bytes.fromhex((HERE / f"{name}.hex").read_text(encoding="ascii"))
    kind, message = MESSAGES[name]
    assert wire.decode(golden) == (kind, message)
    assert wire.encode(kind, message) == golden
    assert wire.kind_of(golden) == kind


@pytest.mark.parametrize("name", ["row_delta", "barrier"])
def test_version_1_rows_without_checksum_are_read(name: str) -> None:
    golden = bytes.fromhex((HERE / "format_1" / f"{name}.hex").read_text(encoding="ascii"))
    assert golden[1] == wire.VERSION and wire.decode(golden) == MESSAGES[name]


def test_golden_bytes_of_an_answer_round_trip() -> None:
    golden = bytes.fromhex((HERE / "rank_answer.hex").read_text(encoding="ascii"))
    assert pb.RankAnswer.FromString(golden) == RANK_ANSWER
    assert RANK_ANSWER.SerializeToString(deterministic=True) == golden


def test_every_type_of_record_has_golden_bytes() -> None:
    assert sorted(kind for kind, _ in MESSAGES.values()) == sorted(wire.TYPES)


def test_messages_are_parsed_by_upb() -> None:
    assert api_implementation.Type() == "upb", (
        "expected protobuf's C implementation; the pure Python one is far too slow"
    )


def test_generated_code_is_current(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I.",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
        "roo.proto",
    ]
    subprocess.run(command, cwd=ROO, check=True, capture_output=True, timeout=60)
    for name in ("roo_pb2.py", "roo_pb2.pyi"):
        generated, committed = (
            (tmp_path / name).read_text(encoding="utf-8"),
            (ROO / name).read_text(encoding="utf-8"),
        )
        assert generated == committed, f"expected {name} to match roo.proto: run `{' '.join(command[1:])}`"
