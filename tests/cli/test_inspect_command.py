"""`roostream inspect batch` describes a batch that a worker saved: the reason, the source and the values in
it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from roostream.cli.inspect_batch import describe_batch, rows
from roostream.cli.main import cli
from roostream.errors import ConfigError
from roostream.schema.registry import to_toml
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.test_saved_batch import SAVED
from trainer.saved_batch import SavedBatch, SavedBatches


def make_saved_batch(*more: Record, **fields: Any) -> SavedBatch:
    arguments = {
        **vars(SAVED),
        "schema": to_toml(samples.schema()),
        "records": (*samples.records([1, 2, 3]), *more),
        **fields,
    }
    return SavedBatch(**arguments)


def extreme_sample(number: int, partition: int, offset: int) -> Record:
    """Return a sample whose second candidate has an extreme value of `age`."""
    message = pb.Sample.FromString(samples.sample(number)[2:])
    nro = {"item": list(message.item_ids), "age": [1.0, -3e9, 2.0]}
    message.parts[0].nro = encode_nro(samples.schema(), nro, 3)
    return Record("samples", partition, offset, message.close_ms, None, wire.encode(wire.SAMPLE, message))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["inspect", "batch", *arguments])


def test_everything_about_a_batch_is_reported() -> None:
    description = describe_batch(
        make_saved_batch(extreme_sample(7, 0, 5), Record("samples", 1, 9, 6, None, b"?"))
    )
    assert [
        (at["topic"], at["partition"], at["first_offset"], at["last_offset"], at["count"])
        for at in description["records"]
    ] == [("samples", 0, 0, 5, 2), ("samples", 1, 0, 9, 3)]
    assert (description["requests"], description["candidates"], description["rejects"]) == (
        4,
        12,
        {"undecodable": 1},
    )
    assert description["features"]["hour"] == {
        "kind": "float",
        "min": 1.0,
        "mean": 3.25,
        "max": 7.0,
        "extreme": 0,
        "present": 1.0,
    }
    assert description["features"]["age"]["min"] == -3e9 and description["features"]["age"]["extreme"] == 1
    assert description["features"]["user"] == {"kind": "list", "present": 1.0, "longest": 1, "distinct": 4}
    assert description["largest"][0] == {
        "feature": "age",
        "value": -3e9,
        "partition": 0,
        "offset": 5,
        "correction": False,
    }
    assert description["tasks"]["click"]["largest_weight"] == 1.0 and description["findings"] == list(
        SAVED.findings
    )


def test_the_reason_comes_first_and_extreme_values_are_reported() -> None:
    lines = list(rows(describe_batch(make_saved_batch(extreme_sample(7, 0, 5)))))
    assert lines[:2] == [
        ("why", "nothing is finite"),
        ("not finite", "dense weight x: 3 of 9 numbers are not finite"),
    ]
    by_name = dict(lines)
    assert by_name["restored"] == "manifests/00000003 (checksum 00ff)" and by_name["not saved"].startswith(
        "2 more records"
    )
    assert "EXTREME: 1" in by_name["age"] and "EXTREME" not in by_name["hour"]
    assert ("largest", "age = -3e+09 in samples-0 offset 5") in lines


def test_a_batch_without_a_record_that_can_be_read_has_no_numbers() -> None:
    description = describe_batch(
        make_saved_batch(records=(Record("samples", 0, 0, 0, None, b"?"),), manifest="")
    )
    assert (
        description["requests"] == 0
        and description["largest"] == []
        and description["features"]["age"]["min"] is None
    )
    assert (
        dict(rows(description))["restored"] == "the beginning"
        and dict(rows(description))["age"] == "no values, present in 0%"
    )


def test_the_command_prints_what_a_worker_saved(tmp_path: Path) -> None:
    path = SavedBatches(tmp_path).save(make_saved_batch())
    result = run(str(path))
    assert (
        result.exit_code == 0 and "nothing is finite" in result.output and "samples-1 0..1" in result.output
    )
    assert json.loads(run(str(path), "--json").stdout) == describe_batch(make_saved_batch())


@pytest.mark.parametrize(
    ("content", "message"), [(None, "got No such file or directory"), (b"\x00" * 40, "got something else")]
)
def test_another_file_is_refused_in_one_sentence(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.batch"
    if content is not None:
        path.write_bytes(content)
    error = run(str(path)).exception
    assert isinstance(error, ConfigError) and message in str(error) and str(error).startswith(str(path))


def test_an_unreadable_schema_is_reported() -> None:
    with pytest.raises(ConfigError, match="expected the"):
        describe_batch(make_saved_batch(schema="[["))
